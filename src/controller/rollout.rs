//! Whether a StatefulSet has rolled out: every pod is of the newest revision and ready. Pure.
//!
//! The rule is that of `kubectl rollout status`. Looking at ready replicas alone, as the Go manager did, is
//! satisfied by the pods of before.

use k8s_openapi::api::apps::v1::StatefulSet;

/// What a StatefulSet has still to do, in words, or `None` when its rollout is complete.
#[must_use]
pub fn pending(set: &StatefulSet) -> Option<String> {
    let spec = set.spec.as_ref()?;
    let wanted = spec.replicas.unwrap_or(1);
    let Some(status) = &set.status else {
        return Some("its StatefulSet has not been seen by the StatefulSet controller yet".into());
    };
    if status.observed_generation.unwrap_or(0) < set.metadata.generation.unwrap_or(0) {
        return Some("its StatefulSet has not been seen by the StatefulSet controller yet".into());
    }
    let partition = spec
        .update_strategy
        .as_ref()
        .and_then(|strategy| strategy.rolling_update.as_ref())
        .and_then(|rolling| rolling.partition)
        .unwrap_or(0);
    let updated = status.updated_replicas.unwrap_or(0);
    let to_update = (wanted - partition).max(0);
    if partition > 0 {
        if updated < to_update {
            return Some(format!("{updated} of {to_update} pods are of the new revision"));
        }
    } else if status.update_revision != status.current_revision && updated < wanted {
        return Some(format!("{updated} of {wanted} pods are of the new revision"));
    }
    let ready = status.ready_replicas.unwrap_or(0);
    if ready < wanted {
        return Some(format!("{ready} of {wanted} pods are ready"));
    }
    if partition == 0 && status.update_revision != status.current_revision {
        return Some("its StatefulSet has not finished its update yet".into());
    }
    if status.replicas > wanted {
        return Some(format!(
            "{} pods too many are being removed",
            status.replicas - wanted
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn set(spec: &Value, status: &Value) -> StatefulSet {
        serde_json::from_value(json!({"metadata": {"generation": 2}, "spec": spec, "status": status}))
            .expect("a StatefulSet")
    }

    #[test]
    fn only_new_and_ready_pods_count() {
        let done = json!({"observedGeneration": 2, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1,
            "currentRevision": "b", "updateRevision": "b"});
        assert_eq!(pending(&set(&json!({"replicas": 1}), &done)), None);
        for (change, words) in [
            (json!({"observedGeneration": 1}), "has not been seen"),
            (
                json!({"currentRevision": "a", "updatedReplicas": 0}),
                "of the new revision",
            ),
            (json!({"currentRevision": "a"}), "not finished"),
            (
                json!({"currentRevision": "a", "readyReplicas": 0}),
                "0 of 1 pods are ready",
            ),
            (json!({"readyReplicas": 0}), "0 of 1 pods are ready"),
            (json!({"replicas": 2}), "too many"),
        ] {
            let mut status = done.clone();
            status
                .as_object_mut()
                .unwrap()
                .extend(change.as_object().unwrap().clone());
            let why = pending(&set(&json!({"replicas": 1}), &status)).expect("pending");
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn old_ready_pods_do_not_satisfy_it() {
        // The moment after an apply: the controller has not looked yet, the old pod is still ready.
        let stale = json!({"observedGeneration": 1, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1,
            "currentRevision": "a", "updateRevision": "a"});
        assert!(pending(&set(&json!({"replicas": 1}), &stale)).is_some());
        assert!(pending(&set(&json!({"replicas": 1}), &Value::Null)).is_some());
    }

    #[test]
    fn a_partition_and_no_replicas_are_respected() {
        let status = json!({"observedGeneration": 2, "replicas": 3, "readyReplicas": 3, "updatedReplicas": 1,
            "currentRevision": "a", "updateRevision": "b"});
        let spec = |partition: i32| json!({"replicas": 3, "updateStrategy": {"rollingUpdate": {"partition": partition}}});
        assert_eq!(pending(&set(&spec(2), &status)), None);
        assert!(pending(&set(&spec(1), &status)).is_some());
        let empty = json!({"observedGeneration": 2, "replicas": 0});
        assert_eq!(pending(&set(&json!({"replicas": 0}), &empty)), None);
    }
}
