//! One CA for the webhooks of all replicas, kept in a Secret: who makes it, publishes it and serves from it.
//!
//! Every replica does the same, leader or not. A pass reads the webhook configurations and the Secret, fresh from the
//! API server, and then
//!
//! 1. makes a CA if there is none, or a new one if its time has come (`plan`); the previous ones stay in the list of
//!    trusted CAs for as long as a certificate of theirs may be served;
//! 2. puts that list into the `caBundle` of every webhook that has another (`publish`);
//! 3. takes a certificate from the CA, if the one in use has to go (`leaf`);
//! 4. checks that what is served verifies against what is published ([`SelfCheck`]).
//!
//! Watches call for a pass; nothing is polled.
//!
//! # Why no call fails
//!
//! - Every write of the Secret is guarded by its `resourceVersion`, so of two replicas one is overtaken and reads again.
//! - The configurations are read *before* the Secret, and written guarded by the version read. A list newer than the
//!   one at hand can be published only by a write after that reading, which makes ours fail.
//! - A replica serves a certificate of a new CA only after that CA has been in every configuration for
//!   [`Lifetimes::settle`]. One that has no certificate yet takes one at once, and is not ready until then.
//! - A retired CA leaves the list when every certificate of it has expired, whether or not anybody renewed them.
//! - When the Secret is lost, what is published takes its place as the list of retired CAs.
//! - A pass that fails changes nothing: the certificate in use is served on.

mod leaf;
mod lifetimes;
mod plan;
mod publish;
mod secret;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use rand::RngExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::leaf::{Decision, Leaf, Names, Settling, Standing};
pub use self::lifetimes::Lifetimes;
use self::plan::{Plan, Reason, Usable};
use self::secret::{SecretStore, Written};
use super::configurations::{Configuration, Configurations, Kind};
use super::self_check::SelfCheck;
use super::tls::ReloadableCertificate;
use super::upkeep::{self, Pass};
use crate::client::CallError;
use crate::metrics::Metrics;
use crate::pki::{Authority, CertificateInfo};

/// Name of the Secret, in the manager's namespace.
pub const SECRET: &str = "vc-manager-webhook-ca";
/// Field manager of what is written here: the Secret, and `caBundle`.
pub const FIELD_MANAGER: &str = "vc-manager-webhook";
/// Common name of the CA.
const COMMON_NAME: &str = "vc-manager webhook CA";
/// How often a pass begins anew because someone else wrote first. Each time somebody has got ahead.
const ATTEMPTS: usize = 10;

/// What it takes to keep the shared CA.
pub struct Setup {
    /// Client of the cluster.
    pub client: Client,
    /// Our own namespace.
    pub namespace: String,
    /// Deadline of one call.
    pub limit: Duration,
    /// How long CA and certificates live.
    pub lifetimes: Lifetimes,
    /// What is served.
    pub certificate: ReloadableCertificate,
    /// Whether it verifies.
    pub check: SelfCheck,
    /// Where lives are shown.
    pub metrics: Arc<Metrics>,
}

/// The shared CA, as one replica keeps it.
pub struct SharedCa {
    setup: Setup,
    store: SecretStore,
    configurations: Configurations,
    /// Moves this replica's renewals away from those of others.
    seed: String,
    leaf: Option<Leaf>,
    settling: Settling,
    /// Configurations that were said to be missing.
    missing: Vec<Kind>,
    /// Whether it was said that somebody else has to renew the CA.
    end_told: bool,
    /// Whether it was said that cert-manager is asked to do what is done here.
    rival_told: bool,
}

/// What there is to take a certificate from.
struct Prepared {
    usable: Usable,
    /// The configurations as they are now.
    published: Vec<Configuration>,
    /// Why one of them could not be written. The present certificate has to be renewed all the same.
    problem: Option<CallError>,
}

/// One step that may have been overtaken.
enum Step<T> {
    Done(T),
    Overtaken,
}

impl SharedCa {
    /// Keeps nothing yet.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self {
            store: SecretStore::new(setup.client.clone(), &setup.namespace, setup.limit),
            configurations: Configurations::new(setup.client.clone(), setup.limit),
            seed: rand::rng().random::<u128>().to_string(),
            setup,
            leaf: None,
            settling: Settling::default(),
            missing: Vec::new(),
            end_told: false,
            rival_told: false,
        }
    }

    /// A first pass, in no more than the time of one call, so that the listener can open with the right certificate.
    /// If it fails, [`Self::run`] says why and goes on trying.
    pub async fn start(&mut self) {
        let limit = self.setup.limit;
        let _ = timeout(limit, self.pass()).await;
    }

    /// Keeps everything right until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let woken = Arc::new(Notify::new());
        let (store, configurations) = (self.store.clone(), self.configurations.clone());
        tokio::select! {
            () = stop.cancelled() => {}
            () = store.watch(Arc::clone(&woken)) => {}
            () = configurations.watch(Arc::clone(&woken)) => {}
            () = upkeep::run(self, &woken) => {}
        }
    }

    /// The usable CA, and the configurations after it was published; overtaken if someone else wrote first.
    async fn prepare(&self, now: Timestamp) -> anyhow::Result<Step<Prepared>> {
        // In this order: see above.
        let found = self.configurations.read().await?;
        let secret = self.store.read().await?;
        let stored = secret.as_ref().map(secret::stored);
        let published = publish::published(&found);
        let usable = match plan::plan(now, stored, &published, self.setup.lifetimes) {
            Plan::Keep(usable) => usable,
            Plan::Amend(usable) => {
                let written = self.store.write(secret, None, &usable.trusted).await?;
                if written == Written::Stored {
                    info!(
                        trusted = usable.trusted.len(),
                        "list of trusted webhook CAs brought up to date"
                    );
                }
                return Ok(Step::Overtaken);
            }
            Plan::Replace { because, retired } => {
                self.replace(secret, because, retired, now).await?;
                return Ok(Step::Overtaken);
            }
            Plan::NotYet(not_before) => bail!(
                "the webhook CA in Secret {}/{SECRET} is valid from {not_before} only: check the clocks, then delete \
                 the Secret",
                self.setup.namespace
            ),
            Plan::Foreign(error) => {
                let Setup { namespace, .. } = &self.setup;
                let problem = Reason::Unusable(error);
                bail!(
                    "Secret {namespace}/{SECRET} is not vc-manager's (it has no label \
                     app.kubernetes.io/managed-by=vc-manager) and is no CA to sign with ({problem}); it is left alone: \
                     delete it, or put a CA into its tls.crt and tls.key, or run with --webhook-cert-dir"
                );
            }
        };
        let mut published = Vec::new();
        let mut problem = None;
        for configuration in found {
            let kind = configuration.kind;
            let Some(patch) = publish::patch(&configuration, &usable.trusted) else {
                published.push(configuration);
                continue;
            };
            match self.configurations.apply(kind, FIELD_MANAGER, &patch).await {
                Ok(applied) => {
                    info!(configuration = %kind, trusted = usable.trusted.len(), "caBundle published");
                    published.push(applied);
                }
                // Written meanwhile. One that was deleted is not made again: by itself the patch is not valid, and
                // that is said for once.
                Err(error) if matches!(error.code(), Some(404 | 409)) => return Ok(Step::Overtaken),
                Err(error) => {
                    problem = Some(error);
                    published.push(configuration);
                }
            }
        }
        Ok(Step::Done(Prepared {
            usable,
            published,
            problem,
        }))
    }

    async fn replace(
        &self,
        found: Option<k8s_openapi::api::core::v1::Secret>,
        because: Reason,
        retired: Vec<CertificateInfo>,
        now: Timestamp,
    ) -> anyhow::Result<()> {
        let (not_before, not_after) = self.setup.lifetimes.of_ca(now);
        let (authority, pair) = Authority::create_for_leaves(COMMON_NAME, not_before, not_after, now)
            .context("cannot make a webhook CA")?;
        let mut trusted = vec![CertificateInfo::from_der(authority.certificate_der().to_vec())?];
        trusted.extend(retired);
        if self.store.write(found, Some(&pair), &trusted).await? == Written::Stored {
            let not_after = authority.not_after();
            info!(%because, %not_after, retired = trusted.len() - 1, "new webhook CA");
        }
        Ok(())
    }

    /// Takes a new certificate if need be. Says when to look at it again.
    fn certify(
        &mut self,
        usable: &Usable,
        published: &[Configuration],
        now: Timestamp,
    ) -> anyhow::Result<Timestamp> {
        let lifetimes = self.setup.lifetimes;
        let signer = usable.signer.certificate_der();
        let everywhere = publish::is_everywhere(signer, published);
        let left = self
            .settling
            .observe(signer, everywhere, lifetimes.settle(), Instant::now());
        let settled = left.is_some_and(|left| left.is_zero());
        let names = Names::wanted(&self.setup.namespace, published);
        let decision = self
            .leaf
            .as_ref()
            .map_or(Decision::Issue("there was none"), |leaf| {
                let standing = Standing {
                    signer,
                    signer_not_after: usable.signer.not_after(),
                    settled,
                };
                let trusts = |issuer: &[u8]| {
                    let published = publish::published(published);
                    usable
                        .trusted
                        .iter()
                        .chain(&published)
                        .any(|ca| ca.der() == issuer)
                };
                leaf.decide(&names, standing, trusts, now)
            });
        let again = match decision {
            // Whole seconds are over only when the next one has begun.
            Decision::Keep(until) => upkeep::after(until, now).unwrap_or(until),
            Decision::Issue(because) => self.take(because, usable, names, now)?,
        };
        // Other replicas serve from a retired CA still; with the very first CA there is no one else to call.
        let from_signer = self.leaf.as_ref().is_some_and(|leaf| leaf.is_from(signer));
        let is_news = usable.trusted.len() > 1 && lifetimes.is_news(&usable.trusted[0], now);
        let unsettled = from_signer && !settled && is_news;
        self.setup.check.set_unsettled(unsettled);
        let waits = unsettled || !from_signer;
        let settling = left.filter(|left| waits && !left.is_zero());
        let settling = settling.map(|left| lifetimes::later(now, lifetimes::signed(left)));
        Ok(settling.map_or(again, |at| at.min(again)))
    }

    /// Takes a new certificate. Says when to renew it.
    fn take(
        &mut self,
        because: &str,
        usable: &Usable,
        names: Names,
        now: Timestamp,
    ) -> anyhow::Result<Timestamp> {
        let (leaf, certified) = Leaf::issue(&usable.signer, names, self.setup.lifetimes, &self.seed, now)
            .context("cannot issue the serving certificate")?;
        info!(because, not_after = %leaf.not_after(), "new serving certificate");
        let renew = leaf.renew_at();
        self.setup.certificate.set(certified);
        self.leaf = Some(leaf);
        Ok(renew)
    }

    /// Says once which configurations are missing, as without them nobody asks the webhooks.
    fn tell_missing(&mut self, found: &[Configuration]) {
        for kind in Kind::ALL {
            let is_missing = !found.iter().any(|configuration| configuration.kind == kind);
            if !is_missing {
                self.missing.retain(|known| *known != kind);
            } else if !self.missing.contains(&kind) {
                self.missing.push(kind);
                warn!(
                    "{kind} does not exist: until it does the API server does not ask this webhook; to install it: vc-manager webhook-config | kubectl apply --server-side --force-conflicts -f -"
                );
            }
        }
    }

    /// Says once that cert-manager's injector is asked to write what is written here.
    fn tell_rival(&mut self, found: &[Configuration]) {
        let rival = found.iter().find(|configuration| configuration.injected);
        if let Some(Configuration { kind, .. }) = rival
            && !self.rival_told
        {
            warn!(
                "{kind} is annotated for cert-manager, so its caBundle is left alone: run with --webhook-cert-dir, or apply the configurations that `vc-manager webhook-config` prints without --cert-manager"
            );
        }
        self.rival_told = rival.is_some();
    }

    /// Says once that a CA which is not ours to renew comes to its end.
    fn tell_end(&mut self, usable: &Usable, now: Timestamp) {
        let (from, to) = (usable.signer.not_before(), usable.signer.not_after());
        let late = now > crate::pki::renew_at(from, to);
        if late && !self.end_told {
            warn!(not_after = %to, "Secret {SECRET} is not vc-manager's, so its CA is not renewed: put a new one in");
        }
        self.end_told = late;
    }
}

impl Pass for SharedCa {
    async fn pass(&mut self) -> anyhow::Result<Option<Timestamp>> {
        for _ in 0..ATTEMPTS {
            let now = Timestamp::now();
            let Step::Done(prepared) = self.prepare(now).await? else {
                continue;
            };
            let Prepared {
                usable,
                published,
                problem,
            } = prepared;
            self.tell_missing(&published);
            self.tell_rival(&published);
            self.tell_end(&usable, now);
            self.setup
                .metrics
                .set_webhook_ca_not_after(usable.signer.not_after().as_second());
            let again = self.certify(&usable, &published, now)?;
            self.setup.check.judge(published, now);
            if let Some(problem) = problem {
                return Err(problem.into());
            }
            let review = upkeep::after(usable.review, now).unwrap_or(usable.review);
            return Ok(Some(again.min(review)));
        }
        Err(anyhow!(
            "others write Secret {SECRET} or the webhook configurations all the time"
        ))
    }

    fn failed(&mut self) {
        self.setup.check.judge_again(Timestamp::now());
    }
}
