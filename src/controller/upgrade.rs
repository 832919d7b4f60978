//! Upgrades a tenant that agreed to it: everything but etcd, one gate after the other.
//!
//! preflight → leaves and apiserver, gate → controller-manager, gate → recorded, consent consumed. Nothing is
//! written into the root namespace before the preflight passed. The attempt lives in the status, so a crash
//! resumes where it was.

use std::time::{Duration, Instant};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use super::{
    Context, TenantKey,
    apply::apply,
    credentials::{self, Credentials, server_of},
    error::Error,
    observe::observe,
    plan::{self, Answer, Attempt, Goal, Observed, Plan, Wait},
    render::Tenant,
    rollout, status,
    upkeep::judgement,
    virtual_cluster::{BACKSTOP, Next, SOON},
};
use crate::{
    api::{ClusterVersion, Component, UpgradeStep, VirtualCluster, labels, virtual_cluster::UpgradeStatus},
    metrics::UpgradeOutcome,
};

/// Passes of observe → plan → apply within one reconcile. More than there are stages means two of them undo each other.
const MAX_PASSES: usize = 12;

/// One reconcile of a Running tenant that is being upgraded or agreed to be.
pub(super) async fn reconcile(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Next, Error> {
    match vc.status.as_ref().and_then(|status| status.upgrade.clone()) {
        Some(attempt) => {
            context.upgrading.keep(key, Instant::now());
            go_on(context, key, vc, attempt).await
        }
        None => begin(context, key, vc).await,
    }
}

/// What an upgrade is about, for its records.
struct Target<'a> {
    revision: &'a str,
    resource_version: &'a str,
    started: Time,
}

async fn begin(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Next, Error> {
    let now = context.now();
    let name = &vc.spec.cluster_version_name;
    let cluster_versions = Api::<ClusterVersion>::all(context.kubernetes.client());
    let Some(cluster_version) = context.kubernetes.get(&cluster_versions, name).await? else {
        let target = Target {
            revision: "",
            resource_version: "",
            started: Time(now),
        };
        let error = format!("desired ClusterVersion {name} not found");
        return failed(context, key, &vc, &target, &error, None, now).await;
    };
    let revision = context.revisions.ensure(&cluster_version).await?;
    let resource_version = cluster_version.resource_version().unwrap_or_default();
    if vc.pin() == Some(revision.as_str()) && !status::last_upgrade_failed(&vc) {
        return nothing_to_do(context, key, &vc, &revision, &resource_version, now).await;
    }
    if !context.upgrading.take(key, Instant::now()) {
        let why = "its turn: as many tenants are upgrading as may at once (--max-upgrading-tenants)";
        status::write(&context.kubernetes, &vc, status::upgrade_waits(&vc, why, now)).await?;
        return Ok(Next::In(BACKSTOP));
    }
    let target = Target {
        revision: &revision,
        resource_version: &resource_version,
        started: Time(now),
    };
    match preflight(context, &vc, &revision).await {
        Ok(None) => {}
        Ok(Some(wait)) => {
            // Waiting for its own health, it must not keep healthy tenants from their turn.
            context.upgrading.give_back(key, Instant::now());
            status::write(
                &context.kubernetes,
                &vc,
                status::upgrade_waits(&vc, &wait.message, now),
            )
            .await?;
            return Ok(Next::In(if wait.watched { BACKSTOP } else { SOON * 6 }));
        }
        Err(error) if error.is_final() => {
            return failed(context, key, &vc, &target, &error.to_string(), None, now).await;
        }
        Err(error) => {
            // Others must not wait for it to pass.
            context.upgrading.give_back(key, Instant::now());
            return Err(error);
        }
    }
    // The preflight took a while. If only others' labels and annotations changed meanwhile, it still holds; with the
    // object as it was before, an upgrade would never begin beside a busy writer.
    let tenants = Api::<VirtualCluster>::namespaced(context.kubernetes.client(), &key.namespace);
    let Some(fresh) = context.kubernetes.get(&tenants, &key.name).await? else {
        return Ok(Next::Gone);
    };
    if fresh.metadata.deletion_timestamp.is_some()
        || fresh.uid() != vc.uid()
        || fresh.status != vc.status
        || !fresh.opted_in()
        || fresh.spec != vc.spec
    {
        return Ok(Next::In(SOON));
    }
    let vc = fresh;
    let certificates = cluster_version.spec.certificate_policy();
    let next = status::upgrade_started(&vc, &revision, &resource_version, certificates, now);
    let vc = status::write(&context.kubernetes, &vc, next).await?;
    let from = vc.pin().unwrap_or("what the tenant runs");
    context.events.normal(
        &vc,
        "UpgradeStarted",
        "Upgrade",
        format!("from {from} to {revision}"),
    );
    tracing::info!(tenant = %key, %revision, "upgrade begins");
    match vc.status.as_ref().and_then(|status| status.upgrade.clone()) {
        Some(attempt) => go_on(context, key, vc, attempt).await,
        None => Ok(Next::In(SOON)),
    }
}

/// Whether the upgrade may begin: `None`, or what it waits for.
async fn preflight(context: &Context, vc: &VirtualCluster, revision: &str) -> Result<Option<Wait>, Error> {
    let template = context.revisions.template_for(vc, revision).await?;
    let tenant = Tenant::of(vc);
    let goal = context.goal(&tenant, &template, revision);
    let observed = observe(&context.kubernetes, &tenant, &template, context.ask()).await?;
    match plan::preflight(&goal, &observed, status::last_upgrade_failed(vc), context.now()) {
        Plan::Wait(wait) => return Ok(Some(wait)),
        Plan::Blocked(why) => return Err(Error::Blocked(why)),
        Plan::Do(_) | Plan::Done => {}
    }
    judged(context, vc, &goal, &observed)?;
    for object in plan::preview(&goal, &observed) {
        context
            .kubernetes
            .apply(&tenant.root_namespace, &object, true)
            .await?;
    }
    Ok(None)
}

async fn go_on(
    context: &Context,
    key: &TenantKey,
    mut vc: VirtualCluster,
    mut attempt: UpgradeStatus,
) -> Result<Next, Error> {
    let tenant = Tenant::of(&vc);
    let template = match context.revisions.template_for(&vc, &attempt.revision).await {
        Ok(template) => template,
        Err(error) => return ended_by(context, key, &vc, &attempt, error, None).await,
    };
    let revision = attempt.revision.clone();
    let goal = context.goal(&tenant, &template, &revision);
    let mut seen = None;
    for _ in 0..MAX_PASSES {
        let observed = match observe(&context.kubernetes, &tenant, &template, context.ask()).await {
            Ok(observed) => seen.insert(observed),
            Err(error) => return ended_by(context, key, &vc, &attempt, error, seen.as_ref()).await,
        };
        let now = context.now();
        let credentials = match judged(context, &vc, &goal, observed) {
            Ok(credentials) => credentials,
            Err(error) => return ended_by(context, key, &vc, &attempt, error, Some(observed)).await,
        };
        let name = attempt.attempt();
        let step = Attempt {
            name: &name,
            step: attempt.step,
            certificates: attempt.certificates,
            due: &credentials.due_secrets(),
        };
        match plan::upgrade(&goal, observed, &step, now) {
            Plan::Do(effects) => {
                for effect in &effects {
                    match apply(
                        &context.kubernetes,
                        &goal,
                        observed,
                        effect,
                        context.issuing(),
                        now,
                    )
                    .await
                    {
                        Ok(()) => super::tell_effect(context, &vc, "Upgrade", effect),
                        Err(error) => {
                            return ended_by(context, key, &vc, &attempt, error, Some(observed)).await;
                        }
                    }
                }
            }
            Plan::Wait(wait) => return waits(context, key, &vc, &attempt, observed, wait, now).await,
            Plan::Blocked(why) => {
                return ended_by(context, key, &vc, &attempt, Error::Blocked(why), Some(observed)).await;
            }
            Plan::Done if attempt.step == UpgradeStep::ApiServer && template.controller_manager.is_some() => {
                context.events.normal(
                    &vc,
                    "ApiServerUpgraded",
                    "Upgrade",
                    "the new apiserver is ready and answers",
                );
                let next = status::upgrade_step(&vc, UpgradeStep::ControllerManager, now);
                vc = status::write(&context.kubernetes, &vc, next).await?;
                attempt.step = UpgradeStep::ControllerManager;
                attempt.step_since = Time(now);
            }
            Plan::Done => {
                let endpoint = server_of(&goal, observed);
                return succeeded(context, key, &vc, &attempt, &endpoint, &credentials, now).await;
            }
        }
    }
    let error = Error::Blocked(
        "the upgrade does not come to rest: something else changes the tenant's objects".into(),
    );
    ended_by(context, key, &vc, &attempt, error, seen.as_ref()).await
}

/// The credentials of the tenant: leaves that are due, damaged, or for other names are issued whatever the policy. An
/// error says what keeps certificates from being issued at all.
fn judged(
    context: &Context,
    vc: &VirtualCluster,
    goal: &Goal<'_>,
    observed: &Observed,
) -> Result<Credentials, Error> {
    let root = &goal.tenant.root_namespace;
    credentials::validity(goal, context.config.max_certificate_life).map_err(|source| Error::Pki {
        what: format!("issue certificates in {root}"),
        source: Box::new(source),
    })?;
    // What another manager issued is good until its first upgrade here. This is it.
    let judgement = credentials::Judge {
        adopted: false,
        ..judgement(context, vc, context.now())
    };
    credentials::judge(goal, observed, &judgement).map_err(|fault| Error::Blocked(fault.message))
}

/// The step waits: within its time, and while there is hope, until something changes.
async fn waits(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    attempt: &UpgradeStatus,
    observed: &Observed,
    wait: Wait,
    now: Timestamp,
) -> Result<Next, Error> {
    let left = time_left(context, attempt, now);
    let hopeless = wait.problem.as_ref().is_some_and(|problem| problem.hopeless);
    if !left.is_zero() && !hopeless {
        // What is wrong, or, once that has passed, what is waited for.
        let text = match &wait.problem {
            Some(problem) => format!("pod {}: {}", problem.pod, problem.message),
            None => status::expectation(attempt.step).to_owned(),
        };
        status::write(&context.kubernetes, vc, status::upgrade_waits_for(vc, &text, now)).await?;
        tracing::debug!(tenant = %key, step = attempt.step.name(), waits_for = %wait.message, "waiting");
        return Ok(Next::In(left.min(if wait.watched { BACKSTOP } else { SOON })));
    }
    let mut error = match &wait.problem {
        Some(_) => wait.message.clone(),
        None => format!("{} within {:?}", wait.message, context.config.provisioner_timeout),
    };
    if let Some(problem) = &wait.problem {
        let root = Tenant::of(vc).root_namespace;
        error = format!("{error}: {}", context.told(&root, problem).await);
    }
    let target = Target::of(attempt);
    failed(context, key, vc, &target, &error, Some(observed), now).await
}

/// An error ends the attempt, unless it may pass and there is time left for that.
async fn ended_by(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    attempt: &UpgradeStatus,
    error: Error,
    observed: Option<&Observed>,
) -> Result<Next, Error> {
    let now = context.now();
    if !error.is_final() && !time_left(context, attempt, now).is_zero() {
        return Err(error);
    }
    let target = Target::of(attempt);
    failed(context, key, vc, &target, &error.to_string(), observed, now).await
}

fn time_left(context: &Context, attempt: &UpgradeStatus, now: Timestamp) -> Duration {
    let limit = SignedDuration::try_from(context.config.provisioner_timeout).unwrap_or(SignedDuration::MAX);
    Duration::try_from(limit.saturating_sub(now.duration_since(attempt.step_since.0)))
        .unwrap_or(Duration::ZERO)
}

impl<'a> Target<'a> {
    fn of(attempt: &'a UpgradeStatus) -> Self {
        Self {
            revision: &attempt.revision,
            resource_version: &attempt.cluster_version_resource_version,
            started: attempt.started.clone(),
        }
    }
}

/// The consent is consumed while the attempt stands in the status, and then the success is recorded: a crash in between
/// resumes the attempt, finds nothing to do, and records. The other way round, a ClusterVersion edited meanwhile would
/// be taken up on a consent that has been used.
async fn succeeded(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    attempt: &UpgradeStatus,
    endpoint: &str,
    credentials: &Credentials,
    now: Timestamp,
) -> Result<Next, Error> {
    let revision = &attempt.revision;
    let vc = &consume(context, vc, Some(&attempt.cluster_version_resource_version)).await?;
    let next = status::upgraded(
        vc,
        revision,
        Some(endpoint),
        Some(credentials),
        Some(&attempt.started),
        now,
    );
    let written = status::write(&context.kubernetes, vc, next).await?;
    context.repairs.forget(key);
    let target = Target::of(attempt);
    count(context, &written, &target, UpgradeOutcome::Upgraded, now);
    context.events.normal(
        &written,
        "UpgradeSucceeded",
        "Upgrade",
        format!("runs {revision} and answers"),
    );
    tracing::info!(tenant = %key, %revision, "upgrade succeeded");
    context.upgrading.give_back(key, Instant::now());
    Ok(Next::Nothing)
}

/// The tenant agreed to a revision that it runs already.
async fn nothing_to_do(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    revision: &str,
    resource_version: &str,
    now: Timestamp,
) -> Result<Next, Error> {
    let next = status::upgraded(vc, revision, None, None, None, now);
    let written = status::write(&context.kubernetes, vc, next).await?;
    let target = Target {
        revision,
        resource_version,
        started: Time(now),
    };
    count(context, &written, &target, UpgradeOutcome::Unchanged, now);
    context.events.normal(
        &written,
        "NothingToUpgrade",
        "Upgrade",
        format!("already runs {revision}"),
    );
    consume(context, &written, Some(resource_version)).await?;
    context.upgrading.give_back(key, Instant::now());
    Ok(Next::Nothing)
}

/// Of an attempt that stands in the status the consent is consumed first: a crash in between resumes the attempt. The
/// other way round, it would leave a consent that nobody gave anew. One that never began is recorded first, because
/// nothing else would tell of it.
async fn failed(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
    target: &Target<'_>,
    error: &str,
    observed: Option<&Observed>,
    now: Timestamp,
) -> Result<Next, Error> {
    let began = vc.status.as_ref().is_some_and(|status| status.upgrade.is_some());
    if !began && status::just_failed(vc, target.revision, error, now) {
        // Told already, only the consent was not consumed then.
        consume(context, vc, None).await?;
        context.upgrading.give_back(key, Instant::now());
        return Ok(Next::Nothing);
    }
    let vc = if began {
        consume(context, vc, None).await?
    } else {
        vc.clone()
    };
    let next = status::upgrade_failed(
        &vc,
        target.revision,
        &target.started,
        error,
        api_is_up(observed),
        now,
    );
    let written = status::write(&context.kubernetes, &vc, next).await?;
    count(context, &written, target, UpgradeOutcome::Failed, now);
    context
        .events
        .warning(&written, "UpgradeFailed", "Upgrade", error);
    tracing::warn!(tenant = %key, revision = target.revision, error, "upgrade failed");
    if !began {
        consume(context, &written, None).await?;
    }
    // The rollout of revisions puts the return to `lastGood` here.
    context.upgrading.give_back(key, Instant::now());
    Ok(Next::Nothing)
}

/// Whether the tenant's API works, if that was looked at.
fn api_is_up(observed: Option<&Observed>) -> Option<bool> {
    let observed = observed?;
    let apiserver = observed.stateful_sets.get(Component::ApiServer.name())?;
    let answers = !matches!(observed.answer, Some(Answer::NotReady(_)));
    Some(answers && rollout::pending(apiserver).is_none())
}

/// Removes the consent and, after a success, records what was applied: one write, none if nothing would change.
async fn consume(
    context: &Context,
    vc: &VirtualCluster,
    applied: Option<&str>,
) -> Result<VirtualCluster, Error> {
    let mut change = json!({});
    let labels = vc.labels();
    if labels.contains_key(labels::READY_FOR_UPGRADE) {
        change[labels::READY_FOR_UPGRADE] = Value::Null;
    }
    if let Some(applied) = applied
        .filter(|applied| labels.get(labels::CLUSTER_VERSION_APPLIED).map(String::as_str) != Some(applied))
    {
        change[labels::CLUSTER_VERSION_APPLIED] = applied.into();
    }
    if change.as_object().is_none_or(serde_json::Map::is_empty) {
        return Ok(vc.clone());
    }
    // Not guarded by the resourceVersion, unlike other writes: only these two keys are touched, whoever else writes
    // meanwhile. The uid keeps it from an object of the same name that came later.
    let api =
        Api::<VirtualCluster>::namespaced(context.kubernetes.client(), &vc.namespace().unwrap_or_default());
    let patch = json!({"metadata": {"uid": vc.uid(), "labels": change}});
    context.kubernetes.merge(&api, &vc.name_any(), &patch).await
}

fn count(
    context: &Context,
    vc: &VirtualCluster,
    target: &Target<'_>,
    outcome: UpgradeOutcome,
    now: Timestamp,
) {
    let took = Duration::try_from(now.duration_since(target.started.0)).unwrap_or(Duration::ZERO);
    // A name that no ClusterVersion has is no label: anybody could make up any number of them.
    let cluster_version = if target.revision.is_empty() {
        ""
    } else {
        &vc.spec.cluster_version_name
    };
    context
        .metrics
        .upgrade_finished(cluster_version, target.resource_version, took, outcome);
}
