//! What the status of a VirtualCluster says next. Pure, but for the one write at the end.
//!
//! The tuples of phase, message and reason are those of the Go manager, to the letter.

mod upkeep;

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::{Api, ResourceExt as _};
use serde_json::{Map, Value, json};

pub(super) use upkeep::{Difference, Found, PROBLEMS, adopted, blocked, is_blocked_by, kept, news};

use super::{
    credentials::Credentials,
    error::Error,
    kubernetes::{Kubernetes, unchanged_since},
};
use crate::api::{
    UpgradeStep, VirtualCluster, VirtualClusterStatus,
    virtual_cluster::{
        CertificatePolicy, Condition, HISTORY_LIMIT, HistoryEntry, ProvisioningStatus, RevisionStatus,
        UpgradeResult, UpgradeStatus, phase,
    },
};

/// Failed attempts after which the phase says Error.
pub(super) const ATTEMPTS: u32 = 3;
/// Longest text of an error in a status; the rest is in the log.
const MAX_TEXT: usize = 1024;

/// Within this time the same failure once more is not a new one.
const SAME_FAILURE: SignedDuration = SignedDuration::from_secs(5);
/// Conditions kept.
const MAX_CONDITIONS: usize = 64;

/// Reason for the phase after a failed upgrade.
const UPGRADE_FAILED: &str = "TenantControlPlaneUpgradeFailed";

/// Condition types that are written here. Everything else in the list is left as it is.
const READY: &str = "Ready";
const UPGRADING: &str = "Upgrading";

/// First sight: the tenant is pinned to `revision` from now on.
#[must_use]
pub(super) fn pending(
    vc: &VirtualCluster,
    root_namespace: &str,
    revision: Option<&str>,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    if status.phase.is_empty() {
        status.phase = phase::PENDING.into();
        status.message = format!("retry: {ATTEMPTS}");
        status.reason = "ClusterCreating".into();
    }
    status.cluster_namespace = Some(root_namespace.to_owned());
    if let Some(revision) = revision {
        status.revision = Some(RevisionStatus {
            target: Some(revision.to_owned()),
            ..status.revision.unwrap_or_default()
        });
    }
    let failures = failures(&status);
    status.provisioning = Some(ProvisioningStatus {
        failures,
        since: Time(now),
    });
    set(
        &mut status,
        vc,
        READY,
        "False",
        "Provisioning",
        "the control plane is being provisioned",
        now,
    );
    status
}

/// An attempt to provision failed.
#[must_use]
pub(super) fn provision_failed(
    vc: &VirtualCluster,
    root_namespace: &str,
    error: &str,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    let failures = failures(&status).saturating_add(1);
    let error = shortened(error);
    status
        .cluster_namespace
        .get_or_insert_with(|| root_namespace.to_owned());
    if failures >= ATTEMPTS {
        status.phase = phase::ERROR.into();
        status.message = "fail to create virtualcluster".into();
        status.reason = "TenantControlPlaneError".into();
    } else {
        status.phase = phase::PENDING.into();
        status.message = format!("retry: {}", ATTEMPTS - failures);
        status.reason = format!("fail to create virtualcluster({}): {error}", vc.name_any());
    }
    status.provisioning = Some(ProvisioningStatus {
        failures,
        since: Time(now),
    });
    set(&mut status, vc, READY, "False", "ProvisioningFailed", &error, now);
    status
}

/// The tenant is up.
#[must_use]
pub(super) fn running(
    vc: &VirtualCluster,
    endpoint: &str,
    credentials: Option<&Credentials>,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    status.phase = phase::RUNNING.into();
    status.message = "tenant control plane is running".into();
    status.reason = "TenantControlPlaneRunning".into();
    status.provisioning = None;
    status.endpoint = Some(endpoint.to_owned());
    if let Some(pin) = vc.pin().map(ToOwned::to_owned) {
        status.revision = Some(RevisionStatus {
            current: Some(pin.clone()),
            target: None,
            last_good: Some(pin),
            ..status.revision.unwrap_or_default()
        });
    }
    ready(&mut status, vc, now);
    if let Some(credentials) = credentials {
        upkeep::certified(&mut status, vc, credentials, now);
    }
    status
}

/// An upgrade waits to begin; why.
#[must_use]
pub(super) fn upgrade_waits(vc: &VirtualCluster, why: &str, now: Timestamp) -> VirtualClusterStatus {
    let mut status = current(vc);
    set(
        &mut status,
        vc,
        UPGRADING,
        "False",
        "Waiting",
        &shortened(&format!("waits for {why}")),
        now,
    );
    status
}

/// An upgrade begins.
#[must_use]
pub(super) fn upgrade_started(
    vc: &VirtualCluster,
    revision: &str,
    resource_version: &str,
    certificates: CertificatePolicy,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    let step = UpgradeStep::ApiServer;
    status.upgrade = Some(UpgradeStatus {
        revision: revision.to_owned(),
        cluster_version_resource_version: resource_version.to_owned(),
        step,
        step_since: Time(now),
        started: Time(now),
        waiting_for: Some(expectation(step).to_owned()),
        certificates,
    });
    status.revision.get_or_insert_default().target = Some(revision.to_owned());
    let message = format!("moving to {revision}: {}", expectation(step));
    set(&mut status, vc, UPGRADING, "True", step.name(), &message, now);
    status
}

/// The upgrade under way goes on to `step`: the new apiserver answers.
#[must_use]
pub(super) fn upgrade_step(vc: &VirtualCluster, step: UpgradeStep, now: Timestamp) -> VirtualClusterStatus {
    let mut status = current(vc);
    if let Some(upgrade) = &mut status.upgrade {
        upgrade.step = step;
        upgrade.step_since = Time(now);
        upgrade.waiting_for = Some(expectation(step).to_owned());
        let message = format!("moving to {}: {}", upgrade.revision, expectation(step));
        set(&mut status, vc, UPGRADING, "True", step.name(), &message, now);
    }
    status
}

/// The tenant's API answers.
fn ready(status: &mut VirtualClusterStatus, vc: &VirtualCluster, now: Timestamp) {
    let message = "the control plane is running and answers";
    set(status, vc, READY, "True", "Running", message, now);
}

/// The tenant is being deleted, and its root namespace does not go; why, and what to do.
#[must_use]
pub(super) fn deleting(vc: &VirtualCluster, why: &str, now: Timestamp) -> VirtualClusterStatus {
    let mut status = current(vc);
    set(&mut status, vc, READY, "False", "Deleting", &shortened(why), now);
    status
}

/// What the upgrade under way waits for: a problem that may yet pass, or just its gate.
#[must_use]
pub(super) fn upgrade_waits_for(vc: &VirtualCluster, problem: &str, now: Timestamp) -> VirtualClusterStatus {
    let mut status = current(vc);
    if let Some(upgrade) = &mut status.upgrade {
        upgrade.waiting_for = Some(shortened(problem));
        let message = shortened(&format!("moving to {}: {problem}", upgrade.revision));
        let reason = upgrade.step.name();
        set(&mut status, vc, UPGRADING, "True", reason, &message, now);
    }
    status
}

/// The upgrade succeeded, or there was nothing to do (`started` is then absent).
#[must_use]
pub(super) fn upgraded(
    vc: &VirtualCluster,
    revision: &str,
    endpoint: Option<&str>,
    credentials: Option<&Credentials>,
    started: Option<&Time>,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    status.phase = phase::RUNNING.into();
    status.message = "tenant control plane is upgraded".into();
    status.reason = "TenantControlPlaneUpgradeCompleted".into();
    status.upgrade = None;
    let pins = status.revision.get_or_insert_default();
    pins.target = None;
    if started.is_some() {
        // etcd goes on as it was made.
        if pins.etcd.is_none() && pins.current.as_deref() != Some(revision) {
            pins.etcd.clone_from(&pins.current);
        }
        pins.adopted = false;
    }
    pins.current = Some(revision.to_owned());
    if let Some(endpoint) = endpoint {
        status.endpoint = Some(endpoint.to_owned());
    }
    if let Some(started) = started {
        pins.last_good = Some(revision.to_owned());
        record(
            &mut status,
            revision,
            started,
            UpgradeResult::Succeeded,
            None,
            now,
        );
        ready(&mut status, vc, now);
        if let Some(credentials) = credentials {
            upkeep::certified(&mut status, vc, credentials, now);
        }
        set(
            &mut status,
            vc,
            UPGRADING,
            "False",
            "Succeeded",
            &format!("runs {revision}"),
            now,
        );
    } else {
        set(
            &mut status,
            vc,
            UPGRADING,
            "False",
            "NothingToDo",
            &format!("already runs {revision}"),
            now,
        );
    }
    status
}

/// The upgrade to `revision` failed. The phase stays Running, and the pin stays where it was.
#[must_use]
pub(super) fn upgrade_failed(
    vc: &VirtualCluster,
    revision: &str,
    started: &Time,
    error: &str,
    api_is_up: Option<bool>,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    let error = shortened(error);
    status.phase = phase::RUNNING.into();
    status.message = format!("fail to upgrade: {error}");
    status.reason = UPGRADE_FAILED.into();
    status.upgrade = None;
    if let Some(pins) = &mut status.revision {
        pins.target = None;
    }
    record(
        &mut status,
        revision,
        started,
        UpgradeResult::Failed,
        Some(error.clone()),
        now,
    );
    match api_is_up {
        Some(true) => ready(&mut status, vc, now),
        Some(false) => set(&mut status, vc, READY, "False", "UpgradeFailed", &error, now),
        // Not known: it is what it was.
        None => {}
    }
    let message =
        format!("{error}; to try again, set the label tenancy.x-k8s.io/ready-for-upgrade once more");
    set(&mut status, vc, UPGRADING, "False", "Failed", &message, now);
    status
}

/// Attempts to provision that failed so far: what the status counts, or what the Go manager left in its message.
#[must_use]
pub(super) fn failures(status: &VirtualClusterStatus) -> u32 {
    if let Some(provisioning) = &status.provisioning {
        return provisioning.failures;
    }
    match status.phase.as_str() {
        phase::ERROR => ATTEMPTS,
        phase::PENDING => {
            let left = status
                .message
                .split_once(':')
                .and_then(|(_, left)| left.trim().parse().ok());
            ATTEMPTS.saturating_sub(left.unwrap_or(ATTEMPTS))
        }
        _ => 0,
    }
}

/// Whether the newest upgrade failed, under whichever manager: what it left unready is what the next one repairs.
#[must_use]
pub(super) fn last_upgrade_failed(vc: &VirtualCluster) -> bool {
    let Some(status) = &vc.status else { return false };
    match status.history.first() {
        Some(newest) => newest.result == UpgradeResult::Failed,
        None => status.reason == UPGRADE_FAILED,
    }
}

/// Message of the condition `type_`, if there is one.
fn message_of(vc: &VirtualCluster, type_: &str) -> Option<String> {
    let conditions = &vc.status.as_ref()?.conditions;
    let condition = conditions
        .iter()
        .find(|condition| condition.type_.as_deref() == Some(type_))?;
    condition.message.clone()
}

/// Whether the newest upgrade failed just now, on this revision and for this reason: it is the same failure.
#[must_use]
pub(super) fn just_failed(vc: &VirtualCluster, revision: &str, error: &str, now: Timestamp) -> bool {
    let history = vc.status.as_ref().and_then(|status| status.history.first());
    history.is_some_and(|entry| {
        entry.result == UpgradeResult::Failed
            && entry.revision == revision
            && entry.reason.as_deref() == Some(shortened(error).as_str())
            && now.duration_since(entry.ended.0) < SAME_FAILURE
    })
}

/// Writes `next` if it differs from what `vc` says, and only the fields that differ. Fails with a conflict if
/// anyone wrote the object since `vc` was read.
pub(super) async fn write(
    kubernetes: &Kubernetes,
    vc: &VirtualCluster,
    mut next: VirtualClusterStatus,
) -> Result<VirtualCluster, Error> {
    if vc.status.as_ref() == Some(&next) {
        return Ok(vc.clone());
    }
    next.observed_generation = vc.metadata.generation;
    let api = Api::namespaced(kubernetes.client(), &vc.namespace().unwrap_or_default());
    let patch = json!({
        "metadata": {"resourceVersion": unchanged_since(&vc.metadata)},
        "status": difference(vc.status.as_ref(), &next),
    });
    kubernetes.merge_status(&api, &vc.name_any(), &patch).await
}

/// The merge patch from one status to the other: top-level fields that differ, null for those that are gone.
fn difference(old: Option<&VirtualClusterStatus>, new: &VirtualClusterStatus) -> Value {
    let fields = |status: Option<&VirtualClusterStatus>| match serde_json::to_value(status) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let (old, new) = (fields(old), fields(Some(new)));
    let gone = old
        .keys()
        .filter(|key| !new.contains_key(*key))
        .map(|key| (key.clone(), Value::Null));
    let mut patch: Map<_, _> = gone.collect();
    for (key, value) in &new {
        match old.get(key) {
            Some(before) if before == value => {}
            // A merge patch keeps the keys of an object that it does not name: those that are gone are named.
            Some(Value::Object(before)) => {
                let mut value = value.clone();
                if let Value::Object(fields) = &mut value {
                    for key in before.keys() {
                        fields.entry(key).or_insert(Value::Null);
                    }
                }
                patch.insert(key.clone(), value);
            }
            _ => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    Value::Object(patch)
}

fn current(vc: &VirtualCluster) -> VirtualClusterStatus {
    vc.status.clone().unwrap_or_default()
}

pub(super) fn expectation(step: UpgradeStep) -> &'static str {
    match step {
        UpgradeStep::ApiServer => "the new apiserver to be ready and to answer",
        UpgradeStep::ControllerManager => "the new controller-manager to be ready",
    }
}

fn record(
    status: &mut VirtualClusterStatus,
    revision: &str,
    started: &Time,
    result: UpgradeResult,
    reason: Option<String>,
    now: Timestamp,
) {
    let entry = HistoryEntry {
        revision: revision.to_owned(),
        started: started.clone(),
        ended: Time(now),
        result,
        reason,
    };
    status.history.insert(0, entry);
    status.history.truncate(HISTORY_LIMIT);
}

/// Sets a condition by the rules of `metav1.Condition`: the time moves only when the status does.
fn set(
    status: &mut VirtualClusterStatus,
    vc: &VirtualCluster,
    type_: &str,
    value: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    let found = status
        .conditions
        .iter()
        .position(|condition| condition.type_.as_deref() == Some(type_));
    let since = found
        .map(|index| &status.conditions[index])
        .filter(|condition| condition.status == value)
        .and_then(|condition| condition.last_transition_time.clone());
    let condition = Condition {
        type_: Some(type_.to_owned()),
        status: value.to_owned(),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        observed_generation: vc.metadata.generation,
    };
    match found {
        Some(index) => status.conditions[index] = condition,
        None => status.conditions.push(condition),
    }
    // The Go manager appended without bound: its oldest entries go first.
    while status.conditions.len() > MAX_CONDITIONS {
        let Some(oldest) = status
            .conditions
            .iter()
            .position(|condition| condition.type_.is_none())
        else {
            break;
        };
        status.conditions.remove(oldest);
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= MAX_TEXT {
        return text.to_owned();
    }
    text.chars().take(MAX_TEXT).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::VirtualClusterSpec;

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().expect("a time")
    }

    fn later() -> Timestamp {
        "2026-01-01T00:01:00Z".parse().expect("a time")
    }

    fn with(status: VirtualClusterStatus) -> VirtualCluster {
        let mut vc = VirtualCluster::new("tenant", VirtualClusterSpec::default());
        vc.status = Some(status);
        vc
    }

    fn tuple(status: &VirtualClusterStatus) -> (&str, &str, &str) {
        (&status.phase, &status.message, &status.reason)
    }

    #[test]
    fn tuples_are_those_of_the_go_manager() {
        let vc = with(pending(
            &VirtualCluster::new("tenant", VirtualClusterSpec::default()),
            "root",
            Some("r1"),
            now(),
        ));
        assert_eq!(
            tuple(vc.status.as_ref().unwrap()),
            ("Pending", "retry: 3", "ClusterCreating")
        );
        assert_eq!(vc.pin(), Some("r1"));

        let first = with(provision_failed(&vc, "root", "boom", now()));
        assert_eq!(
            tuple(first.status.as_ref().unwrap()),
            (
                "Pending",
                "retry: 2",
                "fail to create virtualcluster(tenant): boom"
            )
        );
        let second = with(provision_failed(&first, "root", "boom", now()));
        let third = with(provision_failed(&second, "root", "boom", now()));
        assert_eq!(
            tuple(third.status.as_ref().unwrap()),
            (
                "Error",
                "fail to create virtualcluster",
                "TenantControlPlaneError"
            )
        );

        let up = with(running(&third, "https://10.0.0.1:6443", None, now()));
        assert_eq!(
            tuple(up.status.as_ref().unwrap()),
            (
                "Running",
                "tenant control plane is running",
                "TenantControlPlaneRunning"
            )
        );
        assert_eq!(up.pin(), Some("r1"));

        let started = with(upgrade_started(&up, "r2", "77", CertificatePolicy::Always, now()));
        assert_eq!((started.phase(), started.pin()), ("Running", Some("r1")));
        let done = upgraded(&started, "r2", None, None, Some(&Time(now())), later());
        assert_eq!(
            tuple(&done),
            (
                "Running",
                "tenant control plane is upgraded",
                "TenantControlPlaneUpgradeCompleted"
            )
        );
        assert_eq!(done.revision.as_ref().unwrap().current.as_deref(), Some("r2"));

        let failed = upgrade_failed(&started, "r2", &Time(now()), "no image", Some(false), later());
        assert_eq!(
            tuple(&failed),
            (
                "Running",
                "fail to upgrade: no image",
                "TenantControlPlaneUpgradeFailed"
            )
        );
        assert_eq!(failed.revision.as_ref().unwrap().current.as_deref(), Some("r1"));
        assert_eq!(failed.history.len(), 1);
    }

    #[test]
    fn the_retry_counter_of_the_go_manager_is_read() {
        let status = |phase: &str, message: &str| VirtualClusterStatus {
            phase: phase.into(),
            message: message.into(),
            ..VirtualClusterStatus::default()
        };
        assert_eq!(failures(&status("Pending", "retry: 3")), 0);
        assert_eq!(failures(&status("Pending", "retry: 1")), 2);
        assert_eq!(failures(&status("Pending", "retry: 0")), 3);
        assert_eq!(failures(&status("Pending", "edited by hand")), 0);
        assert_eq!(failures(&status("Pending", "retry: 99")), 0);
        assert_eq!(failures(&status("Error", "x")), 3);
    }

    #[test]
    fn conditions_keep_their_time_and_strangers_stay() {
        let mut status = VirtualClusterStatus::default();
        status.conditions.push(Condition {
            status: "True".into(),
            reason: Some("ClusterCreating".into()),
            ..Condition::default()
        });
        let vc = with(status);
        let once = with(pending(&vc, "root", None, now()));
        let twice = pending(&once, "root", None, later());
        assert_eq!(twice.conditions.len(), 2);
        assert_eq!(twice.conditions[0].type_, None);
        assert_eq!(twice.conditions[1].last_transition_time, Some(Time(now())));
    }

    #[test]
    fn history_and_texts_are_bounded() {
        let mut vc = VirtualCluster::new("tenant", VirtualClusterSpec::default());
        for _ in 0..30 {
            vc = with(upgrade_failed(
                &vc,
                "r2",
                &Time(now()),
                &"é".repeat(5000),
                Some(true),
                later(),
            ));
        }
        let status = vc.status.unwrap();
        assert_eq!(status.history.len(), HISTORY_LIMIT);
        assert!(status.message.chars().count() < 1100);
    }

    #[test]
    fn only_what_differs_is_written() {
        let vc = VirtualCluster::new("tenant", VirtualClusterSpec::default());
        let first = pending(&vc, "root", Some("r1"), now());
        let second = running(&with(first.clone()), "https://10.0.0.1:6443", None, later());
        let patch = difference(Some(&first), &second);
        assert_eq!(patch["provisioning"], Value::Null);
        assert_eq!(
            patch["revision"],
            json!({"current": "r1", "lastGood": "r1", "target": null})
        );
        assert!(patch.get("clusterNamespace").is_none());
        assert_eq!(difference(Some(&second), &second), json!({}));
    }
}
