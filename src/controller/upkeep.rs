//! Keeps a tenant that runs as it should be: its certificates renewed, its objects as the pin says, its status true.
//!
//! It comes before an upgrade that was agreed to, too: a tenant whose certificate has ended could not even be asked.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Secret, Service},
    },
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::Value;

use super::{
    Context, TenantKey, adoption,
    apply::{Issuing, Signer, apply},
    credentials::{Credentials, Fault, Judge, Why, judge, server_of},
    error::Error,
    managed_fields::Drift,
    observe::observe,
    plan::{self, Care, Effect, Goal, Known, ObjectId, Observed, Plan, Refused},
    render::{self, Kind, Rendered, Tenant, TenantSecret},
    status::{self, Difference, Found},
    virtual_cluster::{BACKSTOP, Next, SOON},
};
use crate::{
    api::{Component, FIELD_MANAGER, VirtualCluster, labels},
    client::deadline,
    features::Feature,
    pki,
};

/// Passes of observe → plan → apply within one reconcile. More than there are stages means two of them undo each other.
const MAX_PASSES: usize = 16;
/// A tenant is looked at this often even if nothing ever changes, as the Go manager did.
const RESYNC: Duration = Duration::from_hours(10);
/// How often a tenant is looked at that waits for a person.
const BLOCKED_CHECK: Duration = Duration::from_mins(5);
/// How often a tenant is looked at that should be up and is not.
const UNREADY_CHECK: Duration = Duration::from_secs(30);
/// How often it is looked at whether a new certificate is served.
const SERVED_CHECK: Duration = Duration::from_secs(15);

/// How a pass ended.
pub(super) struct Kept {
    /// The tenant as it is stored now.
    pub(super) vc: VirtualCluster,
    /// When to look again.
    pub(super) next: Next,
    /// Whether an upgrade may begin: nothing of this is under way.
    pub(super) at_rest: bool,
}

/// One pass for a Running tenant that is not being upgraded.
pub(super) async fn reconcile(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Kept, Error> {
    let vc = match adoption::ensure_pinned(context, key, vc).await? {
        adoption::Pinned::Yes(vc) => vc,
        adoption::Pinned::No(vc) => {
            return Ok(Kept {
                vc,
                next: Next::In(BLOCKED_CHECK),
                at_rest: false,
            });
        }
    };
    let tenant = Tenant::of(&vc);
    let revision = vc.pin().unwrap_or_default().to_owned();
    let template = match context.revisions.template_for(&vc, &revision).await {
        Ok(template) => template,
        // What it is pinned to is lost. What runs still says what it is, and its certificates do not wait.
        Err(error) if error.is_final() => {
            tracing::warn!(tenant = %key, %error, "the pinned revision cannot be used");
            return Ok(match adoption::pin_what_runs(context, key, vc).await? {
                adoption::Pinned::Yes(vc) => Kept {
                    vc,
                    next: Next::In(SOON),
                    at_rest: false,
                },
                adoption::Pinned::No(vc) => Kept {
                    vc,
                    next: Next::In(BLOCKED_CHECK),
                    at_rest: false,
                },
            });
        }
        Err(error) => return Err(error),
    };
    let goal = context.goal(&tenant, &template, &revision);
    let mut refusals = Refusals::default();
    for _ in 0..MAX_PASSES {
        let observed = observe(&context.kubernetes, &tenant, &template, context.ask()).await?;
        let now = context.now();
        // First of all: without it, every Secret is missing.
        if let Some(plan) = plan::homeless(&goal, &observed) {
            context.restarting.give_back(key, Instant::now());
            let (why, again) = match plan {
                Plan::Wait(wait) => (format!("waits for {}", wait.message), UNREADY_CHECK),
                Plan::Blocked(why) => (why, BLOCKED_CHECK),
                Plan::Do(_) | Plan::Done => (String::new(), BLOCKED_CHECK),
            };
            return blocked(context, &vc, &why, again, true).await;
        }
        let known = context.repairs.known(key, now);
        let judged = judge(&goal, &observed, &judgement(context, &vc, now));
        let plan = match &judged {
            Ok(credentials) => {
                let care = care(context, &vc, credentials, &known, &refusals.of);
                plan::upkeep(&goal, &observed, &care, now)
            }
            // Nothing is touched, but how it is shows in the status.
            Err(_) => plan::health(&goal, &observed, now),
        };
        let view = View {
            context,
            key,
            vc: &vc,
            goal: &goal,
            observed: &observed,
            judged: &judged,
            known: &known,
            refusals: &refusals,
            signer: &Signer::default(),
            now,
        };
        let effects = match plan {
            Plan::Do(effects) => effects,
            other => return view.settle(other).await,
        };
        let replaces_pods = effects.iter().any(Effect::replaces_pods);
        if replaces_pods && !context.restarting.take(key, Instant::now()) {
            let present = plan::health(&goal, &observed, now);
            return view.rest(&present, Next::In(BACKSTOP), false).await;
        }
        let refused = view.do_all(&effects).await?;
        if let Some((_, error)) = refused.iter().find(|(effect, _)| !Refusals::passes_over(effect)) {
            return view.refused(error).await;
        }
        refusals.note(&refused);
    }
    Err(Error::Blocked(
        "the upkeep does not come to rest: something else changes the tenant's objects".into(),
    ))
}

/// What was refused for good in the present reconcile: what else there is to do is done all the same.
#[derive(Default)]
struct Refusals {
    of: Refused,
    /// Why leaves were not issued: of the first of them.
    not_issued: Option<Fault>,
}

impl Refusals {
    /// Whether other things can be done although `effect` cannot.
    const fn passes_over(effect: &Effect) -> bool {
        matches!(effect, Effect::Issue { .. } | Effect::PutBack { .. })
    }

    /// Takes note of effects that were refused.
    fn note(&mut self, refused: &[(&Effect, Error)]) {
        for (effect, error) in refused {
            match effect {
                Effect::Issue { secrets, .. } => {
                    self.of.secrets.extend(secrets);
                    self.not_issued.get_or_insert_with(|| Fault {
                        reason: "CannotIssue",
                        message: error.to_string(),
                    });
                }
                Effect::PutBack { object, .. } => {
                    let id = object.id();
                    self.of.objects.insert(id, error.to_string());
                }
                _ => {}
            }
        }
    }

    fn any(&self) -> bool {
        self.of != Refused::default()
    }
}

/// Nothing can be done until a person acts, or something ends: said in the status, and told when that is new.
async fn blocked(
    context: &Context,
    vc: &VirtualCluster,
    why: &str,
    again: Duration,
    at_rest: bool,
) -> Result<Kept, Error> {
    let is_new = !status::is_blocked_by(vc, why);
    let next = status::blocked(vc, why, context.now());
    let vc = status::write(&context.kubernetes, vc, next).await?;
    if is_new {
        context.events.warning(&vc, "Blocked", "Upkeep", why);
        tracing::warn!(why, "a person has to look at this tenant");
    }
    Ok(Kept {
        vc,
        next: Next::In(again),
        at_rest,
    })
}

/// What the credentials of `vc` are judged by.
pub(super) fn judgement<'a>(context: &Context, vc: &'a VirtualCluster, now: Timestamp) -> Judge<'a> {
    Judge {
        recorded: vc.status.as_ref().and_then(|status| status.certificates.as_ref()),
        adopted: vc.is_adopted(),
        max_life: context.config.max_certificate_life,
        now,
    }
}

fn care<'a>(
    context: &Context,
    vc: &VirtualCluster,
    credentials: &'a Credentials,
    known: &'a BTreeMap<ObjectId, Known>,
    refused: &'a Refused,
) -> Care<'a> {
    let gate = context
        .config
        .features
        .enabled(Feature::ClusterVersionPartialUpgrade);
    // What is about to be upgraded is not brought back to what it was before that.
    let left = vc.spec.paused || vc.is_adopted() || (gate && vc.opted_in());
    Care {
        credentials,
        repair: !left,
        after_failure: status::last_upgrade_failed(vc),
        known,
        refused,
        accept_empty_etcd: vc.accepts_empty_etcd(),
    }
}

/// What a pass goes by.
struct View<'a> {
    context: &'a Context,
    key: &'a TenantKey,
    vc: &'a VirtualCluster,
    goal: &'a Goal<'a>,
    observed: &'a Observed,
    judged: &'a Result<Credentials, Fault>,
    known: &'a BTreeMap<ObjectId, Known>,
    refusals: &'a Refusals,
    signer: &'a Signer,
    now: Timestamp,
}

impl View<'_> {
    /// Does all effects, in order, and tells of them; those that are refused for good, with the reason.
    async fn do_all<'e>(&self, effects: &'e [Effect]) -> Result<Vec<(&'e Effect, Error)>, Error> {
        let mut refused = Vec::new();
        let mut issued = Vec::new();
        let mut outcome = Ok(());
        for effect in effects {
            match (self.apply(effect).await, effect) {
                (Ok(()), Effect::Issue { secrets, .. }) => issued.extend(secrets),
                (Ok(()), _) => {}
                (Err(error), _) if error.is_final() => refused.push((effect, error)),
                (Err(error), _) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        self.tell_issued(&issued);
        outcome.map(|()| refused)
    }

    /// Nothing is to be done, or nothing can be.
    async fn settle(&self, plan: Plan) -> Result<Kept, Error> {
        let restarting = &self.context.restarting;
        let (next, at_rest) = match &plan {
            _ if self.judged.is_err() => {
                restarting.give_back(self.key, Instant::now());
                (Next::In(BLOCKED_CHECK), true)
            }
            Plan::Wait(_) => {
                let next = if plan::awaits_reload(self.observed, self.now) {
                    SERVED_CHECK
                } else {
                    UNREADY_CHECK
                };
                // An upgrade may repair what keeps it from being ready, unless that is a restart of ours.
                (Next::In(next), !restarting.holds(self.key, Instant::now()))
            }
            Plan::Blocked(_) => {
                restarting.give_back(self.key, Instant::now());
                (Next::In(BLOCKED_CHECK), true)
            }
            Plan::Done | Plan::Do(_) => {
                restarting.give_back(self.key, Instant::now());
                (self.next_look(), true)
            }
        };
        self.rest(&plan, next, at_rest).await
    }

    /// Does one effect, and tells of it.
    async fn apply(&self, effect: &Effect) -> Result<(), Error> {
        let Self {
            context,
            goal,
            observed,
            signer,
            now,
            ..
        } = *self;
        if let Effect::PutBack { object, drift } = effect {
            return self.put_back(object, drift).await;
        }
        apply(
            &context.kubernetes,
            goal,
            observed,
            effect,
            Issuing {
                lenient: true,
                signer: Some(signer),
                ..context.issuing()
            },
            now,
        )
        .await?;
        match effect {
            // Told of all together.
            Effect::Issue { secrets, .. } => self.count_reissued(secrets),
            Effect::Apply(object) => {
                // Once more will change nothing: the API server, or a policy, does not keep the hash.
                let hash = std::iter::once(object.hash().to_owned());
                context.repairs.settled(self.key, object.id(), hash);
            }
            Effect::Restart(restart) => {
                context.metrics.upkeep().restarted(restart.component.name());
                super::tell_effect(context, self.vc, "Upkeep", effect);
            }
            _ => super::tell_effect(context, self.vc, "Upkeep", effect),
        }
        Ok(())
    }

    /// A leaf that somebody overwrites again and again is not issued for ever.
    fn count_reissued(&self, secrets: &[TenantSecret]) {
        let Ok(credentials) = self.judged else { return };
        for (secret, why) in &credentials.due {
            if secrets.contains(secret) && *why != Why::Due {
                self.context
                    .repairs
                    .put_back(self.key, plan::id_of(*secret), self.now);
            }
        }
    }

    /// Leaves that are not issued any more for now.
    fn contested_leaves(&self) -> Option<String> {
        let credentials = self.judged.as_ref().ok()?;
        let contested = |secret: &TenantSecret| {
            self.known
                .get(&plan::id_of(*secret))
                .is_some_and(|known| known.contested)
        };
        let told: Vec<_> = credentials
            .due
            .iter()
            .filter(|(secret, _)| contested(secret))
            .map(|(secret, why)| {
                let stored = self.observed.secrets.get(secret.name());
                let writer = stored
                    .and_then(last_writer)
                    .map_or_else(String::new, |writer| format!(" (last written by {writer})"));
                format!("{secret}: {why}{writer}")
            })
            .collect();
        (!told.is_empty()).then(|| {
            format!(
                "issued again several times within an hour, and changed each time: left for now. Find who writes it. {}",
                told.join("; ")
            )
        })
    }

    /// Puts an object back and says who had changed it.
    async fn put_back(&self, object: &Rendered, drift: &[Drift]) -> Result<(), Error> {
        let before = version_of(object, self.observed);
        let after = self.apply_object(object).await?;
        let id = object.id();
        if before.is_some() && before == after {
            // The API server does not keep track of these fields. They are as they should be.
            let paths = drift.iter().map(plan::settled_as);
            self.context.repairs.settled(self.key, id, paths);
            return Ok(());
        }
        self.context.repairs.put_back(self.key, id, self.now);
        self.context.metrics.upkeep().put_back(object.kind.name());
        let what = described(object, drift);
        let note = if before.is_some() {
            format!("{what} changed by hand; put back to what the revision says")
        } else {
            format!("{what} was deleted; made anew from the revision")
        };
        tracing::warn!(tenant = %self.key, %note, "drift repaired");
        self.context
            .events
            .warning(self.vc, "DriftRepaired", "Upkeep", note);
        Ok(())
    }

    /// Applies an object; if it is refused because of ports that others put beside its own, without those.
    async fn apply_object(&self, object: &Rendered) -> Result<Option<String>, Error> {
        let root = &self.goal.tenant.root_namespace;
        let refused = match self.context.kubernetes.apply(root, object, false).await {
            Err(error @ Error::Refused { .. }) => error,
            other => return other,
        };
        let Some(patch) = plan::only_own_ports(object, self.observed) else {
            return Err(refused);
        };
        match self.merge(object, &patch).await {
            Ok(()) => self.context.kubernetes.apply(root, object, false).await,
            Err(Error::Refused { .. }) => Err(refused),
            Err(error) => Err(error),
        }
    }

    /// Strategic merge of `patch` into an object, by the field manager that applies it.
    async fn merge(&self, object: &Rendered, patch: &Value) -> Result<(), Error> {
        let (root, name) = (&self.goal.tenant.root_namespace, &object.name);
        let client = self.context.kubernetes.client();
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let patch = Patch::Strategic(patch);
        let call = async {
            match object.kind {
                Kind::StatefulSet => {
                    let api = Api::<StatefulSet>::namespaced(client, root);
                    api.patch(name, &params, &patch).await.map(|_| ())
                }
                Kind::Service => {
                    let api = Api::<Service>::namespaced(client, root);
                    api.patch(name, &params, &patch).await.map(|_| ())
                }
            }
        };
        let what = format!("update {} {root}/{name}", object.kind.name());
        let limit = self.context.config.kube_api_timeout;
        Ok(deadline(limit, what, Box::pin(call)).await?)
    }

    /// Tells of the leaves that were issued.
    fn tell_issued(&self, issued: &[&TenantSecret]) {
        let Ok(credentials) = self.judged else { return };
        let mut renewed = Vec::new();
        let mut repaired = Vec::new();
        for (secret, why) in credentials
            .due
            .iter()
            .filter(|(secret, _)| issued.contains(&secret))
        {
            self.context.metrics.upkeep().issued(secret.name(), why.label());
            if *why == Why::Due {
                renewed.push(secret.name());
                continue;
            }
            let mut hints = Vec::new();
            if matches!(why, Why::OtherAuthority | Why::OtherNames) {
                let key = if secret.is_kubeconfig() {
                    secret.name()
                } else {
                    pki::TLS_CERTIFICATE_KEY
                };
                hints.push(format!("key {key}"));
            }
            let stored = self.observed.secrets.get(secret.name());
            hints.extend(
                stored
                    .and_then(last_writer)
                    .map(|writer| format!("last written by {writer}")),
            );
            let hints = if hints.is_empty() {
                String::new()
            } else {
                format!(" ({})", hints.join(", "))
            };
            repaired.push(format!("{secret}, because {why}{hints}"));
        }
        if renewed.is_empty() && repaired.is_empty() {
            return;
        }
        let Self { context, vc, .. } = self;
        if !renewed.is_empty() {
            let note = format!(
                "renewed {}: two thirds of their life are over",
                renewed.join(", ")
            );
            context.events.normal(vc, "CertificatesRenewed", "Upkeep", note);
        }
        if !repaired.is_empty() {
            let note = format!("issued {}", repaired.join("; "));
            context.events.warning(vc, "CertificatesReissued", "Upkeep", note);
        }
        tracing::info!(tenant = %self.key, ?renewed, ?repaired, "certificates issued");
    }

    /// What was to be done is refused for good, and keeps everything else from being done.
    async fn refused(&self, error: &Error) -> Result<Kept, Error> {
        self.context.restarting.give_back(self.key, Instant::now());
        blocked(self.context, self.vc, &error.to_string(), BLOCKED_CHECK, true).await
    }

    /// Nothing is to be done for now: the status says how things are.
    async fn rest(&self, plan: &Plan, next: Next, at_rest: bool) -> Result<Kept, Error> {
        let found = self.found(plan);
        let news = status::news(self.vc, &found);
        let status = status::kept(self.vc, &found, self.now);
        let vc = status::write(&self.context.kubernetes, self.vc, status).await?;
        // What a person has to act on is told once: when it is new, and stored.
        for (type_, reason, message) in news {
            self.context.events.warning(&vc, reason, "Upkeep", message);
            tracing::warn!(tenant = %self.key, condition = type_, reason, "a person has to look at this tenant");
        }
        Ok(Kept { vc, next, at_rest })
    }

    fn found<'b>(&'b self, plan: &'b Plan) -> Found<'b> {
        Found {
            credentials: self.judged.as_ref(),
            not_issued: self.refusals.not_issued.as_ref(),
            uneasy: self.uneasy(),
            plan,
            difference: self.difference(),
            endpoint: self.judged.is_ok().then(|| server_of(self.goal, self.observed)),
        }
    }

    /// What is wrong with the certificates, though they are there: in one word, in words.
    fn uneasy(&self) -> Option<(&'static str, String)> {
        if let Some(contested) = self.contested_leaves() {
            return Some(("Contested", contested));
        }
        if let Ok(Credentials {
            complaint: Some(complaint),
            ..
        }) = self.judged
        {
            return Some(complaint.clone());
        }
        let secret = self.observed.secrets.get(TenantSecret::Etcd.name())?;
        let pods = plan::serving_older(self.observed, Component::Etcd, secret, self.now);
        (!pods.is_empty()).then(|| {
            let older = format!(
                "{} of etcd still serve the certificate of before; etcd reads its files for each connection, so look at how they \
                 are mounted. It is not restarted here: without a volume that would lose its data",
                pods.join(", ")
            );
            ("OldCertificateServed", older)
        })
    }

    /// What differs from the revision and is left as it is.
    fn difference(&self) -> Option<Difference> {
        if self.vc.is_adopted() {
            return None;
        }
        // By the reason for which they are left, the one that most needs a person first.
        let mut left: BTreeMap<(u8, &'static str, String), Vec<String>> = BTreeMap::new();
        for (object, mut drift) in plan::differing(self.goal, self.observed, self.known) {
            // Without the time: a change of the same kind is no news, however often it is made.
            for culprit in drift.iter_mut().filter_map(|drift| drift.by.as_mut()) {
                culprit.at = None;
            }
            let what = if plan::is_stored(&object, self.observed) {
                described(&object, &drift)
            } else {
                format!("{} does not exist", described(&object, &drift))
            };
            if let Some(because) = self.left_because(&object) {
                left.entry(because).or_default().push(what);
            }
        }
        let reason = left.keys().next()?.1;
        let texts = left
            .iter()
            .map(|((.., why), what)| format!("{}: {why}", what.join("; ")));
        Some(Difference {
            reason,
            message: texts.collect::<Vec<_>>().join(". "),
        })
    }

    /// Why an object that differs from the revision is left as it is: how urgent that is, in one word, in words. Nothing
    /// of one that is about to be put back, or to be upgraded, or that an upgrade left when it failed: that is told
    /// elsewhere.
    fn left_because(&self, object: &Rendered) -> Option<(u8, &'static str, String)> {
        let id = object.id();
        if let Some(error) = self.refusals.of.objects.get(&id) {
            return Some((0, "Refused", format!("not put back: {error}")));
        }
        if let Some(meta) = plan::stored(object, self.observed).filter(|meta| !render::is_ours(meta)) {
            let why = format!(
                "made by {} in the place of ours, and left alone: delete it, or annotate it with {}",
                plan::made_by(meta),
                labels::RENDERED_HASH
            );
            return Some((0, "NotOurs", why));
        }
        if self.known.get(&id).is_some_and(|known| known.contested) {
            let why = "put back several times within an hour and changed again each time: it is left for now. Find who changes it";
            return Some((1, "Contested", why.into()));
        }
        let (reason, why) = if self.judged.is_err() {
            (
                "CredentialsAtFault",
                "not put back before the condition CertificatesValid is True again",
            )
        } else if self.vc.spec.paused {
            ("Paused", "not put back while spec.paused is true")
        } else {
            return None;
        };
        Some((2, reason, why.into()))
    }

    fn next_look(&self) -> Next {
        if plan::awaits_reload(self.observed, self.now) {
            return Next::In(SERVED_CHECK);
        }
        if self.refusals.any() {
            return Next::In(BLOCKED_CHECK);
        }
        let certificates = self.judged.as_ref().ok().map(|credentials| &credentials.status);
        let renewal = certificates
            .and_then(|status| status.renew_at.as_ref())
            .map(|time| time.0);
        let soonest = [renewal, self.context.repairs.again(self.key, self.now)]
            .into_iter()
            .flatten()
            .min();
        let left = soonest
            .and_then(|at| Duration::try_from(at.duration_since(self.now)).ok())
            .map_or(RESYNC, |left| left.clamp(Duration::from_secs(1), RESYNC));
        Next::In(left)
    }
}

fn version_of(object: &Rendered, observed: &Observed) -> Option<String> {
    match object.kind {
        Kind::StatefulSet => observed.stateful_sets.get(&object.name)?.resource_version(),
        Kind::Service => observed.services.get(&object.name)?.resource_version(),
    }
}

fn described(object: &Rendered, drift: &[Drift]) -> String {
    /// More than these are counted.
    const SHOWN: usize = 5;
    let mut text = format!("{} {}", object.kind.name(), object.name);
    for (index, drift) in drift.iter().take(SHOWN).enumerate() {
        text.push_str(if index == 0 { ": " } else { ", " });
        text.push_str(&drift.to_string());
    }
    if drift.len() > SHOWN {
        let _ = write!(text, " and {} more", drift.len() - SHOWN);
    }
    text
}

/// Field manager, other than this one, that last wrote `secret`.
fn last_writer(secret: &Secret) -> Option<String> {
    let entries = secret.metadata.managed_fields.iter().flatten();
    entries
        .filter(|entry| entry.manager.as_deref() != Some(FIELD_MANAGER))
        .max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?
        .manager
        .clone()
}
