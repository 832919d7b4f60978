//! Whether the API server can verify what this replica serves: the chain in use, against the bundle and the name in
//! each webhook configuration. A replica that would fail every call is not ready.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::configurations::{Configuration, Configurations, Kind, Webhook};
use super::health::Latch;
use super::tls::{ReloadableCertificate, provider};
use super::upkeep::{self, Pass};
use crate::pki::CertificateInfo;

/// Why the API server would refuse this replica.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Nothing is served.
    #[error("there is no serving certificate")]
    NoCertificate,
    /// A configuration trusts nobody.
    #[error("{kind} has no CA certificate in the caBundle of webhook {webhook}")]
    NoBundle {
        /// The configuration.
        kind: Kind,
        /// Name of the webhook.
        webhook: String,
    },
    /// A configuration points nowhere.
    #[error("{kind} has no usable host for webhook {webhook}")]
    NoHost {
        /// The configuration.
        kind: Kind,
        /// Name of the webhook.
        webhook: String,
    },
    /// It would verify, but not with every API server yet.
    #[error("the CA of the serving certificate was published only just now")]
    Unsettled,
    /// The chain does not verify.
    #[error(
        "the serving certificate does not verify for {host} with the caBundle of webhook {webhook} in {kind}: {source}"
    )]
    Rejected {
        /// The configuration.
        kind: Kind,
        /// Name of the webhook.
        webhook: String,
        /// The name it was verified for.
        host: String,
        /// The verifier's reason.
        source: rustls::Error,
    },
}

/// Verifies `chain` as the API server would at `now`, for each webhook. Where nobody is sent here, all is well.
pub fn verify(
    chain: &[CertificateDer<'_>],
    configurations: &[Configuration],
    now: Timestamp,
) -> Result<(), Fault> {
    let (end_entity, intermediates) = chain.split_first().ok_or(Fault::NoCertificate)?;
    let since_1970 = Duration::from_secs(u64::try_from(now.as_second()).unwrap_or(0));
    for Configuration { kind, webhooks, .. } in configurations {
        for Webhook { name, host, trusted } in webhooks {
            let (kind, webhook) = (*kind, name.clone());
            let Some(host) = host else {
                return Err(Fault::NoHost { kind, webhook });
            };
            let Some(verifier) = verifier(trusted) else {
                return Err(Fault::NoBundle { kind, webhook });
            };
            verifier
                .verify_server_cert(
                    end_entity,
                    intermediates,
                    host,
                    &[],
                    UnixTime::since_unix_epoch(since_1970),
                )
                .map_err(|source| Fault::Rejected {
                    kind,
                    webhook,
                    host: host.to_str().into_owned(),
                    source,
                })?;
        }
    }
    Ok(())
}

/// `None` if nothing in `trusted` can be a root.
fn verifier(trusted: &[CertificateInfo]) -> Option<Arc<WebPkiServerVerifier>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(trusted.iter().map(|root| CertificateDer::from(root.der())));
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider()))
        .build()
        .ok()
}

/// The readiness latch that follows the check.
pub struct SelfCheck {
    certificate: ReloadableCertificate,
    latch: Latch,
    /// Whether API servers may not have heard of the CA yet.
    unsettled: bool,
    /// What the configurations were when last read.
    seen: Option<Vec<Configuration>>,
    /// What was last said in the log.
    said: Option<Result<(), String>>,
}

impl SelfCheck {
    /// Sets `latch` by how `certificate` is judged.
    #[must_use]
    pub fn new(certificate: ReloadableCertificate, latch: Latch) -> Self {
        Self {
            certificate,
            latch,
            unsettled: false,
            seen: None,
            said: None,
        }
    }

    /// Says whether API servers may not have heard yet of the CA that signed the certificate, while they know another
    /// replica's: then this one is better not called.
    pub fn set_unsettled(&mut self, unsettled: bool) {
        self.unsettled = unsettled;
    }

    /// Judges by `configurations`.
    pub fn judge(&mut self, configurations: Vec<Configuration>, now: Timestamp) {
        self.seen = Some(configurations);
        self.judge_again(now);
    }

    /// Judges by the configurations last seen: the API server does not answer, and time goes on. Before any were seen
    /// nothing is known, and the latch stays as it is.
    pub fn judge_again(&mut self, now: Timestamp) {
        let Some(configurations) = &self.seen else { return };
        let current = self.certificate.current();
        let chain = current.as_ref().map_or(&[][..], |key| &key.cert);
        let mut outcome = verify(chain, configurations, now);
        if outcome.is_ok() && self.unsettled {
            outcome = Err(Fault::Unsettled);
        }
        let outcome = outcome.map_err(|fault| fault.to_string());
        self.latch.set(outcome.is_ok());
        if self.said.as_ref() != Some(&outcome) {
            match &outcome {
                Ok(()) => info!("the webhook configurations trust the serving certificate"),
                Err(reason) => warn!(
                    reason,
                    "not ready: the API server would refuse the serving certificate"
                ),
            }
            self.said = Some(outcome);
        }
    }
}

/// Checks a certificate that others look after, and so the bundles too.
pub struct Watched {
    check: SelfCheck,
    configurations: Configurations,
}

impl Watched {
    /// Checks with `check` against `configurations`.
    #[must_use]
    pub fn new(check: SelfCheck, configurations: Configurations) -> Self {
        Self {
            check,
            configurations,
        }
    }

    /// Checks until `stop`: at once, and whenever certificate or configurations change.
    pub async fn run(self, stop: CancellationToken) {
        let woken = Arc::new(Notify::new());
        let mut changes = self.check.certificate.changes();
        let watching = self.configurations.clone();
        let reloads = async {
            while changes.changed().await.is_ok() {
                woken.notify_one();
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = watching.watch(Arc::clone(&woken)) => {}
            () = upkeep::run(self, &woken) => {}
            () = reloads => {}
        }
    }
}

impl Pass for Watched {
    async fn pass(&mut self) -> anyhow::Result<Option<Timestamp>> {
        let configurations = self.configurations.read().await?;
        self.check.judge(configurations, Timestamp::now());
        let expiry = self.check.certificate.current().and_then(|key| {
            let end_entity = key.cert.first()?;
            CertificateInfo::from_der(end_entity.to_vec()).ok()
        });
        Ok(expiry.and_then(|info| upkeep::after(info.not_after, Timestamp::now())))
    }

    fn failed(&mut self) {
        self.check.judge_again(Timestamp::now());
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::SignedDuration;
    use rustls::pki_types::ServerName;

    use super::*;
    use crate::pki::{Authority, ExtendedUsage, KeyAlgorithm, LeafRequest};
    use crate::server::health::Readiness;
    use crate::server::tls::certified_key;

    fn in_hours(hours: i64) -> Timestamp {
        Timestamp::now()
            .checked_add(SignedDuration::from_hours(hours))
            .unwrap()
    }

    fn ca() -> (Authority, CertificateInfo) {
        let (authority, _) =
            Authority::create_for_leaves("ca", in_hours(-1), in_hours(9), Timestamp::now()).unwrap();
        let info = CertificateInfo::from_der(authority.certificate_der().to_vec()).unwrap();
        (authority, info)
    }

    /// A certificate for an hour, and as what is served.
    fn leaf(ca: &Authority) -> rustls::sign::CertifiedKey {
        let request = LeafRequest {
            common_name: "leaf".into(),
            organization: None,
            usages: &[ExtendedUsage::ServerAuth],
            dns_names: vec!["hook.ns.svc".into()],
            ip_addresses: vec!["127.0.0.1".parse().unwrap()],
        };
        let now = Timestamp::now();
        let pair = ca
            .issue_between(&request, KeyAlgorithm::EcdsaP256, in_hours(-1), in_hours(1), now)
            .unwrap();
        certified_key(pair.certificate_pem.as_bytes(), pair.key_pem.as_bytes()).unwrap()
    }

    fn configuration(host: &str, trusted: &[&CertificateInfo]) -> Configuration {
        Configuration {
            kind: Kind::Validating,
            resource_version: "1".into(),
            injected: false,
            webhooks: vec![Webhook {
                name: "hook".into(),
                host: ServerName::try_from(host.to_owned()).ok(),
                trusted: trusted.iter().copied().cloned().collect(),
            }],
        }
    }

    #[test]
    fn what_the_api_server_would_say() {
        let (authority, own) = ca();
        let (_, other) = ca();
        let chain = leaf(&authority).cert;
        let said = |configurations: &[Configuration], hours| {
            verify(&chain, configurations, in_hours(hours)).map_err(|fault| fault.to_string())
        };
        let good = configuration("hook.ns.svc", &[&other, &own]);
        assert_eq!(said(&[], 0), Ok(()), "nobody is sent here");
        assert_eq!(
            said(&[good.clone(), configuration("127.0.0.1", &[&own])], 0),
            Ok(())
        );
        for (configuration, hours, words) in [
            (
                configuration("hook.ns.svc", &[]),
                0,
                "has no CA certificate in the caBundle",
            ),
            (configuration("not a host", &[&own]), 0, "has no usable host"),
            (configuration("hook.ns.svc", &[&other]), 0, "BadSignature"),
            (configuration("other.ns.svc", &[&own]), 0, "not valid for name"),
            (configuration("127.0.0.2", &[&own]), 0, "not valid for name"),
            (good.clone(), 2, "expired"),
        ] {
            let text = said(&[good.clone(), configuration], hours).unwrap_err();
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(matches!(
            verify(&[], &[good], Timestamp::now()),
            Err(Fault::NoCertificate)
        ));
    }

    #[test]
    fn the_latch_follows() {
        let (authority, own) = ca();
        let certificate = ReloadableCertificate::default();
        certificate.set(leaf(&authority));
        let readiness = Readiness::new();
        let mut check = SelfCheck::new(certificate.clone(), readiness.latch("webhook-certificate"));
        check.judge_again(Timestamp::now());
        assert!(!readiness.is_ready(), "nothing is known yet");
        check.judge(vec![configuration("127.0.0.1", &[&own])], Timestamp::now());
        assert!(readiness.is_ready());
        check.judge_again(in_hours(2));
        assert!(!readiness.is_ready(), "expired");
        check.judge_again(Timestamp::now());
        assert!(readiness.is_ready());
        check.set_unsettled(true);
        check.judge_again(Timestamp::now());
        assert!(!readiness.is_ready(), "not known everywhere");
        check.set_unsettled(false);
        check.judge_again(Timestamp::now());
        certificate.set(leaf(&ca().0));
        check.judge_again(Timestamp::now());
        assert!(!readiness.is_ready(), "of another CA");
    }
}
