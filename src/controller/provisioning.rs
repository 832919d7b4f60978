//! Provisions a tenant: observe → plan → apply, as long as there is something to do, then the status.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{
    Context, TenantKey, adoption,
    apply::apply,
    credentials::{self, Credentials, server_of},
    error::Error,
    observe::observe,
    plan::{self, Effect, Goal, Observed, Plan, Wait},
    render::{Tenant, TenantSecret},
    status,
    upkeep::judgement,
    virtual_cluster::{BACKSTOP, Next, SOON, set_metadata},
};
use crate::{
    api::{ClusterVersion, VirtualCluster, labels, root_namespace, virtual_cluster::phase},
    features::Feature,
};

/// Passes of observe → plan → apply within one reconcile. More than there are stages means two of them undo each other.
const MAX_PASSES: usize = 12;

/// One reconcile of a tenant that has not been Running yet.
pub(super) async fn reconcile(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Next, Error> {
    let now = context.now();
    let vc = match pin(context, &vc, now).await {
        Ok(vc) => vc,
        Err(error) if error.is_final() => return failed(context, key, &vc, &error.to_string(), now).await,
        Err(error) => return Err(error),
    };
    match bring_up(context, key, &vc).await {
        Ok(next) => Ok(next),
        Err(error) if error.is_final() => failed(context, key, &vc, &error.to_string(), context.now()).await,
        Err(error) => Err(error),
    }
}

/// Pins a tenant that is seen for the first time, or that agreed to another revision before it ever ran.
async fn pin(context: &Context, vc: &VirtualCluster, now: Timestamp) -> Result<VirtualCluster, Error> {
    let root = root_namespace::of(vc);
    if root.len() > root_namespace::MAX_LENGTH {
        return Err(Error::Blocked(format!(
            "its root namespace would be named {root}, which has {} characters; at most {} are allowed: give it a shorter name",
            root.len(),
            root_namespace::MAX_LENGTH
        )));
    }
    let gate = context
        .config
        .features
        .enabled(Feature::ClusterVersionPartialUpgrade);
    // One that has run is upgraded once it runs again.
    if vc.has_run() || (vc.pin().is_some() && !(gate && vc.opted_in())) {
        return Ok(vc.clone());
    }
    if vc.pin().is_none()
        && let Some(revision) = adoption::revision_of_lost_status(context, vc).await?
    {
        let next = status::pending(vc, &root, Some(&revision), now);
        return status::write(&context.kubernetes, vc, next).await;
    }
    let name = &vc.spec.cluster_version_name;
    let cluster_versions = Api::<ClusterVersion>::all(context.kubernetes.client());
    let Some(cluster_version) = context.kubernetes.get(&cluster_versions, name).await? else {
        return Err(Error::Blocked(format!("desired ClusterVersion {name} not found")));
    };
    let revision = context.revisions.ensure(&cluster_version).await?;
    if vc.pin() != Some(revision.as_str()) {
        let next = status::pending(vc, &root, Some(&revision), now);
        let pinned = status::write(&context.kubernetes, vc, next).await?;
        let note = format!("provisioning from {revision} into namespace {root}");
        context.events.normal(&pinned, "Provisioning", "Provision", note);
        return Ok(pinned);
    }
    Ok(vc.clone())
}

async fn bring_up(context: &Context, key: &TenantKey, vc: &VirtualCluster) -> Result<Next, Error> {
    let tenant = Tenant::of(vc);
    let revision = vc.pin().unwrap_or_default();
    let template = context.revisions.template_for(vc, revision).await?;
    let goal = context.goal(&tenant, &template, revision);
    credentials::validity(&goal, None).map_err(|source| Error::Pki {
        what: format!("issue certificates in {}", tenant.root_namespace),
        source: Box::new(source),
    })?;
    let first = template.etcd.as_ref().unwrap_or(&template.api_server);
    for _ in 0..MAX_PASSES {
        let observed = observe(&context.kubernetes, &tenant, &template, context.ask()).await?;
        let has_started = observed.stateful_sets.contains_key(&first.stateful_set_name);
        if has_started
            && vc
                .status
                .as_ref()
                .is_none_or(|status| status::failures(status) == 0)
        {
            // Also after a restart of the manager: whoever is in the middle counts.
            context.starting.keep(key, Instant::now());
        }
        let may_start = has_started || context.starting.take(key, Instant::now());
        let now = context.now();
        if vc.has_run()
            && let Some(lost) = plan::lost_etcd(&goal, &observed, vc.accepts_empty_etcd())
        {
            return Err(Error::Blocked(lost));
        }
        let credentials = match judged(context, vc, &goal, &observed, now) {
            Ok(credentials) => credentials,
            // What somebody else put there is no credential of the tenant's: that is what is to be told.
            Err(fault) => match plan::provision(&goal, &observed, None, may_start, now) {
                Plan::Blocked(why) => return Err(Error::Blocked(why)),
                _ => return Err(fault),
            },
        };
        let due = credentials.as_ref().map(Credentials::due_secrets);
        match plan::provision(&goal, &observed, due.as_deref(), may_start, now) {
            Plan::Do(effects) => {
                for effect in &effects {
                    apply(
                        &context.kubernetes,
                        &goal,
                        &observed,
                        effect,
                        context.issuing(),
                        now,
                    )
                    .await?;
                    tell(context, vc, effect);
                }
            }
            Plan::Wait(wait) => return waits(context, key, vc, &observed, wait, now).await,
            Plan::Blocked(why) => return Err(Error::Blocked(why)),
            Plan::Done => {
                let endpoint = server_of(&goal, &observed);
                return done(context, key, vc, &endpoint, credentials.as_ref()).await;
            }
        }
    }
    Err(Error::Blocked(
        "provisioning does not come to rest: something else changes the tenant's objects".into(),
    ))
}

/// The credentials of a tenant that has them: leaves may be left from an earlier attempt, or by another manager, so that
/// they cannot be used, or may have come to their time.
fn judged(
    context: &Context,
    vc: &VirtualCluster,
    goal: &Goal<'_>,
    observed: &Observed,
    now: Timestamp,
) -> Result<Option<Credentials>, Error> {
    let once = [TenantSecret::RootCa, TenantSecret::ServiceAccount];
    // Not made yet, or lost: the plan knows which.
    if once
        .iter()
        .any(|secret| !observed.secrets.contains_key(secret.name()))
    {
        return Ok(None);
    }
    match credentials::judge(goal, observed, &judgement(context, vc, now)) {
        Ok(credentials) => Ok(Some(credentials)),
        Err(fault) => Err(Error::Blocked(fault.message)),
    }
}

async fn done(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    endpoint: &str,
    credentials: Option<&Credentials>,
) -> Result<Next, Error> {
    let next = status::running(vc, endpoint, credentials, context.now());
    let running = status::write(&context.kubernetes, vc, next).await?;
    context.starting.give_back(key, Instant::now());
    context.events.normal(
        &running,
        "Running",
        "Provision",
        format!("the control plane answers at {endpoint}"),
    );
    tracing::info!(tenant = %key, %endpoint, "tenant is running");
    record_applied(context, &running).await?;
    Ok(Next::Nothing)
}

/// Writes the label that readers of the Go manager's know, and takes back a consent that has been used up.
pub(super) async fn record_applied(context: &Context, vc: &VirtualCluster) -> Result<(), Error> {
    if !context
        .config
        .features
        .enabled(Feature::ClusterVersionPartialUpgrade)
    {
        return Ok(());
    }
    let cluster_versions = Api::<ClusterVersion>::all(context.kubernetes.client());
    let cluster_version = context
        .kubernetes
        .get(&cluster_versions, &vc.spec.cluster_version_name)
        .await?;
    // Only while the ClusterVersion still says what was applied.
    let applied = cluster_version
        .filter(|cluster_version| vc.pin() == Some(super::revision::name(cluster_version).as_str()))
        .and_then(|cluster_version| cluster_version.resource_version());
    let mut change = json!({});
    if let Some(applied) = applied {
        change[labels::CLUSTER_VERSION_APPLIED] = applied.into();
    }
    if vc.opted_in() {
        change[labels::READY_FOR_UPGRADE] = serde_json::Value::Null;
    }
    if change.as_object().is_some_and(|change| !change.is_empty()) {
        set_metadata(context, vc, &json!({"labels": change})).await?;
    }
    Ok(())
}

async fn waits(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    observed: &Observed,
    wait: Wait,
    now: Timestamp,
) -> Result<Next, Error> {
    let limit = SignedDuration::try_from(context.config.provisioner_timeout).unwrap_or(SignedDuration::MAX);
    let recorded = vc.status.as_ref().and_then(|status| status.provisioning.as_ref());
    let Some(component) = wait.component else {
        if wait.watched {
            context.events.normal(
                vc,
                "WaitsForItsTurn",
                "Provision",
                format!("waits for {}", wait.message),
            );
            return Ok(Next::In(BACKSTOP));
        }
        if now.duration_since(recorded.map_or(now, |provisioning| provisioning.since.0)) < limit {
            return Ok(Next::In(SOON * 3));
        }
        return failed(context, key, vc, &format!("waits for {}", wait.message), now).await;
    };
    // An attempt begins anew when the last one is given up, or when the component's StatefulSet is made.
    let made = observed
        .stateful_sets
        .get(component.name())
        .and_then(kube::ResourceExt::creation_timestamp)
        .map_or(now, |time| time.0);
    let since = recorded.map_or(made, |provisioning| provisioning.since.0.max(made));
    let waited = now.duration_since(since);
    let hopeless = wait.problem.as_ref().is_some_and(|problem| problem.hopeless);
    if waited < limit && !hopeless {
        tracing::debug!(tenant = %key, waits_for = %wait.message, "waiting");
        let left = Duration::try_from(limit - waited).unwrap_or(BACKSTOP);
        return Ok(Next::In(if wait.watched {
            BACKSTOP.min(left)
        } else {
            SOON.min(left)
        }));
    }
    let root = root_namespace::of(vc);
    let mut error = format!(
        "{root}/{component} is not ready in {} seconds: {}",
        waited.as_secs(),
        wait.message
    );
    if let Some(problem) = &wait.problem {
        error = format!("{error}: {}", context.told(&root, problem).await);
    }
    failed(context, key, vc, &error, now).await
}

/// Counts a failed attempt, at most one per backoff, and goes on trying.
async fn failed(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    error: &str,
    now: Timestamp,
) -> Result<Next, Error> {
    // Its turn is not for one that is stuck.
    context.starting.give_back(key, Instant::now());
    let current = vc.status.clone().unwrap_or_default();
    let failures = status::failures(&current);
    let backoff = attempt_backoff(failures);
    let since = current
        .provisioning
        .as_ref()
        .filter(|_| failures > 0)
        .map(|provisioning| provisioning.since.0);
    let waited = since.map_or(SignedDuration::MAX, |since| now.duration_since(since));
    if let Ok(left) =
        Duration::try_from(SignedDuration::try_from(backoff).unwrap_or(SignedDuration::ZERO) - waited)
        && !left.is_zero()
        && waited != SignedDuration::MAX
    {
        return Ok(Next::In(left));
    }
    tracing::warn!(tenant = %key, failures = failures + 1, error, "attempt to provision failed");
    if vc.phase() == phase::ERROR {
        // Trying goes on, but there is nothing new to say unless the reason is.
        context
            .events
            .warning(vc, "ProvisioningFailed", "Provision", error);
    }
    // The first sight is recorded before the first failure, as readers of the phases expect.
    let seen = if vc.phase().is_empty() {
        let next = status::pending(vc, &root_namespace::of(vc), None, now);
        status::write(&context.kubernetes, vc, next).await?
    } else {
        vc.clone()
    };
    let next = status::provision_failed(&seen, &root_namespace::of(vc), error, now);
    let written = status::write(&context.kubernetes, &seen, next).await?;
    if vc.phase() != phase::ERROR {
        context
            .events
            .warning(&written, "ProvisioningFailed", "Provision", error);
    }
    Ok(Next::In(attempt_backoff(failures + 1)))
}

/// How long after the n-th failure the next attempt may be counted: 5 s, doubled each time, at most 5 min.
fn attempt_backoff(failures: u32) -> Duration {
    Duration::from_secs(5 << failures.saturating_sub(1).min(6)).min(Duration::from_mins(5))
}

fn tell(context: &Context, vc: &VirtualCluster, effect: &Effect) {
    super::tell_effect(context, vc, "Provision", effect);
}
