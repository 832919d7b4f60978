//! Why the pods of a component do not become ready, in words a person can act on. Pure.

use k8s_openapi::{
    api::core::v1::{ContainerState, ContainerStatus, Pod},
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt as _;

/// How long a pod may fail to start before waiting longer has no point. Registries hiccup, Secrets arrive late.
const PATIENCE: SignedDuration = SignedDuration::from_secs(60);
/// Restarts after which a crashing container is held to crash for ever.
const CRASHES: i32 = 3;

/// A pod that does not run as it should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod.
    pub uid: String,
    /// The pod's container that has the problem.
    pub container: String,
    /// What is wrong: the image, the exit code, what the kubelet said.
    pub message: String,
    /// Whether waiting longer has no point.
    pub hopeless: bool,
    /// Whether the container runs at the moment.
    pub runs: bool,
    /// Whether the last words of the container are worth reading: it ran and ended.
    pub crashed: bool,
    /// The StatefulSet revision the pod is of.
    pub revision: Option<String>,
}

/// The worst problem among the pods of the StatefulSet `set` that run its newest revision, if any has one.
///
/// Others are being replaced: a controller-manager of before may well crash while its apiserver is exchanged, and
/// that says nothing of the one to come.
#[must_use]
pub fn worst(pods: &[Pod], set: &str, update_revision: &str, now: Timestamp) -> Option<Diagnosis> {
    let mut found: Vec<_> = staying(pods, set)
        .filter_map(|pod| diagnose(pod, now))
        .filter(|diagnosis| diagnosis.revision.as_deref() == Some(update_revision))
        .collect();
    found.sort_by_key(|diagnosis| (!diagnosis.hopeless, diagnosis.pod.clone()));
    found.into_iter().next()
}

/// Pods of the StatefulSet that run another revision than `update_revision`, are not ready, and cannot become it:
/// the StatefulSet controller waits for them for ever instead of replacing them (kubernetes#67250).
#[must_use]
pub fn stuck(pods: &[Pod], set: &str, update_revision: &str, now: Timestamp) -> Vec<Diagnosis> {
    staying(pods, set)
        .filter_map(|pod| diagnose(pod, now))
        // One that runs may yet become ready.
        .filter(|diagnosis| diagnosis.hopeless || !diagnosis.runs)
        .filter(|diagnosis| {
            diagnosis
                .revision
                .as_deref()
                .is_some_and(|revision| revision != update_revision)
        })
        .collect()
}

/// The pods that `set` controls and that are not on their way out.
fn staying<'a>(pods: &'a [Pod], set: &'a str) -> impl Iterator<Item = &'a Pod> {
    of_set(pods, set).filter(|pod| pod.metadata.deletion_timestamp.is_none())
}

/// The pods that `set` controls.
pub(super) fn of_set<'a>(pods: &'a [Pod], set: &'a str) -> impl Iterator<Item = &'a Pod> {
    pods.iter().filter(move |pod| {
        pod.owner_references()
            .iter()
            .any(|owner| owner.kind == "StatefulSet" && owner.name == set && owner.controller == Some(true))
    })
}

/// What is wrong with `pod`; `None` while it is ready or merely starting.
fn diagnose(pod: &Pod, now: Timestamp) -> Option<Diagnosis> {
    let status = pod.status.as_ref()?;
    let ready = status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    if ready {
        return None;
    }
    let age = pod
        .creation_timestamp()
        .map_or(SignedDuration::ZERO, |time| now.duration_since(time.0));
    let diagnosis = |container: &str, message: String, hopeless: bool, crashed: bool, runs: bool| Diagnosis {
        pod: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        container: container.to_owned(),
        message,
        hopeless,
        runs,
        crashed,
        revision: pod.labels().get("controller-revision-hash").cloned(),
    };
    let containers = status
        .init_container_statuses
        .iter()
        .flatten()
        .chain(status.container_statuses.iter().flatten());
    for container in containers {
        if let Some((message, hopeless, crashed)) = of_container(container, age) {
            let runs = container
                .state
                .as_ref()
                .is_some_and(|state| state.running.is_some());
            return Some(diagnosis(&container.name, message, hopeless, crashed, runs));
        }
    }
    let unschedulable = status.conditions.iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    unschedulable.map(|condition| {
        let why = condition.message.clone().unwrap_or_default();
        diagnosis("", format!("cannot be scheduled: {why}"), false, false, false)
    })
}

fn of_container(container: &ContainerStatus, age: SignedDuration) -> Option<(String, bool, bool)> {
    let name = &container.name;
    let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
    let reason = waiting
        .and_then(|waiting| waiting.reason.as_deref())
        .unwrap_or_default();
    let said = waiting
        .and_then(|waiting| waiting.message.as_deref())
        .unwrap_or_default();
    match reason {
        "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" | "RegistryUnavailable" => {
            return Some((
                format!("image {} cannot be pulled", container.image),
                age >= PATIENCE,
                false,
            ));
        }
        "InvalidImageName" => {
            return Some((
                format!("image name {:?} is not valid", container.image),
                true,
                false,
            ));
        }
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
            let message = format!("container {name} cannot be started: {said}");
            return Some((message, age >= PATIENCE, false));
        }
        _ => {}
    }
    let ended = ended(container.state.as_ref()).or_else(|| ended(container.last_state.as_ref()));
    let (code, why) = ended.filter(|_| container.restart_count > 0 || waiting.is_none())?;
    let runs_again = container
        .state
        .as_ref()
        .is_some_and(|state| state.running.is_some());
    let hopeless = container.restart_count >= CRASHES && !runs_again;
    let times = match container.restart_count {
        0 => String::new(),
        1 => ", restarted once".into(),
        n => format!(", restarted {n} times"),
    };
    Some((
        format!("container {name} ended with exit code {code} ({why}){times}"),
        hopeless,
        true,
    ))
}

/// Exit code and reason of a container that ended with an error.
fn ended(state: Option<&ContainerState>) -> Option<(i32, String)> {
    let terminated = state?.terminated.as_ref()?;
    (terminated.exit_code != 0).then(|| {
        (
            terminated.exit_code,
            terminated.reason.clone().unwrap_or_else(|| "Error".into()),
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2026-01-01T00:02:00Z".parse().expect("a time")
    }

    fn pod(created: &str, container: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "apiserver-0", "uid": "u", "creationTimestamp": created,
                "labels": {"controller-revision-hash": "apiserver-1"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "apiserver", "uid": "s", "controller": true}]},
            "status": {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [container]},
        }))
        .expect("a pod")
    }

    fn container(state: &Value, last: &Value, restarts: i32) -> Value {
        json!({"name": "apiserver", "image": "example/kube-apiserver:v9", "imageID": "", "ready": false,
            "restartCount": restarts, "state": state, "lastState": last})
    }

    #[test]
    fn an_image_is_named_and_given_time() {
        let state = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}});
        let young = worst(
            &[pod("2026-01-01T00:01:30Z", &container(&state, &json!({}), 0))],
            "apiserver",
            "apiserver-1",
            now(),
        );
        let old = worst(
            &[pod("2026-01-01T00:00:00Z", &container(&state, &json!({}), 0))],
            "apiserver",
            "apiserver-1",
            now(),
        );
        assert!(!young.expect("told").hopeless);
        let old = old.expect("told");
        assert!(
            old.hopeless && old.message.contains("example/kube-apiserver:v9"),
            "{old:?}"
        );
    }

    #[test]
    fn a_crash_loop_tells_the_exit_code() {
        let last = json!({"terminated": {"exitCode": 1, "reason": "Error"}});
        let state = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let found = |restarts, state: &Value| {
            worst(
                &[pod("2026-01-01T00:01:30Z", &container(state, &last, restarts))],
                "apiserver",
                "apiserver-1",
                now(),
            )
        };
        let third = found(3, &state).expect("told");
        assert!(
            third.hopeless && third.crashed && third.message.contains("exit code 1"),
            "{third:?}"
        );
        assert!(!found(1, &state).expect("told").hopeless);
        assert!(!found(4, &json!({"running": {}})).expect("told").hopeless);
    }

    #[test]
    fn a_pod_that_is_merely_starting_is_no_problem() {
        let creating = json!({"waiting": {"reason": "ContainerCreating"}});
        let running = json!({"running": {}});
        for state in [creating, running] {
            let pods = [pod("2026-01-01T00:00:00Z", &container(&state, &json!({}), 0))];
            assert_eq!(worst(&pods, "apiserver", "apiserver-1", now()), None);
            assert_eq!(worst(&pods, "etcd", "apiserver-1", now()), None);
        }
    }

    #[test]
    fn a_pod_of_before_is_not_the_new_ones_problem() {
        let state = json!({"waiting": {"reason": "ImagePullBackOff"}});
        let pods = [pod("2026-01-01T00:00:00Z", &container(&state, &json!({}), 0))];
        assert_eq!(worst(&pods, "apiserver", "apiserver-2", now()), None);
    }

    #[test]
    fn only_broken_pods_of_another_revision_are_stuck() {
        let state = json!({"waiting": {"reason": "ImagePullBackOff"}});
        let pods = [pod("2026-01-01T00:01:59Z", &container(&state, &json!({}), 0))];
        assert_eq!(stuck(&pods, "apiserver", "apiserver-2", now()).len(), 1);
        assert!(stuck(&pods, "apiserver", "apiserver-1", now()).is_empty());
    }
}
