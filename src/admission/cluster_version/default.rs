//! What is changed in a ClusterVersion before it is stored: the update strategy of every embedded StatefulSet becomes
//! `RollingUpdate`. With `OnDelete`, which the Go manager's samples say, an upgrade would never reach the pods.
//!
//! The patch consists of explicit operations on the JSON as it came, so that nothing else can change: no unknown
//! field, no null, no order of keys. It never refuses anything; that is for validation, which comes after it.

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation};
use serde_json::{Value, json};

use super::rules::same;
use crate::api::Component;

const ROLLING_UPDATE: &str = "RollingUpdate";

/// The changes to a ClusterVersion with this `spec`, and a line for each that took something away.
///
/// In an update `old` is what stands there now. A bundle that is not edited is not changed here either: an edit of the
/// policy alone, or of another bundle, must not be a new revision of this one.
#[must_use]
pub fn patch(spec: &Value, old: Option<&Value>) -> (Vec<PatchOperation>, Vec<String>) {
    let mut operations = Vec::new();
    let mut warnings = Vec::new();
    for component in Component::ALL {
        let bundle = spec.get(component.spec_key());
        if old.is_some_and(|old| same(old.get(component.spec_key()), bundle)) {
            continue;
        }
        let set = bundle.and_then(|bundle| bundle.get("statefulset"));
        let Some(Value::Object(set_spec)) = set.and_then(|set| set.get("spec")) else {
            continue;
        };
        let strategy = set_spec.get("updateStrategy").unwrap_or(&Value::Null);
        let mut path = vec![
            "spec",
            component.spec_key(),
            "statefulset",
            "spec",
            "updateStrategy",
        ];
        let value = match strategy {
            Value::Null => json!({"type": ROLLING_UPDATE}),
            Value::Object(strategy) if strategy.get("type").is_none_or(|kind| kind != ROLLING_UPDATE) => {
                path.push("type");
                ROLLING_UPDATE.into()
            }
            // Right already, or no strategy at all: validation says so.
            _ => continue,
        };
        if let Some(former) = strategy.get("type").filter(|kind| !kind.is_null()) {
            warnings.push(format!(
                "{}: changed from {former} to {ROLLING_UPDATE:?}, so that upgrades reach the pods",
                path.join(".")
            ));
        }
        // "add" replaces a member that is there.
        operations.push(PatchOperation::Add(AddOperation {
            path: PointerBuf::from_tokens(path),
            value,
        }));
    }
    (operations, warnings)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::admission::arbitrary::json_value;

    fn applied(spec: &Value) -> (Value, Vec<String>) {
        let mut object = json!({"spec": spec});
        let (patch, warnings) = patch(spec, None);
        json_patch::patch(&mut object, &patch).expect("the patch fits");
        (object["spec"].take(), warnings)
    }

    fn with(strategy: &Value) -> Value {
        json!({"etcd": {"statefulset": {"spec": {"replicas": 1, "updateStrategy": strategy}}}})
    }

    #[test]
    fn whatever_it_was_it_rolls() {
        let rolling = json!({"type": "RollingUpdate"});
        let partition =
            json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 1, "x": null}, "y": null});
        for (before, after, told) in [
            (json!(null), rolling.clone(), false),
            (json!({}), rolling.clone(), false),
            (json!({"type": null}), rolling.clone(), false),
            (json!({"type": "OnDelete"}), rolling.clone(), true),
            (json!({"type": 7}), rolling.clone(), true),
            (rolling.clone(), rolling, false),
            (
                json!({"type": "OnDelete", "rollingUpdate": {"partition": 1, "x": null}, "y": null}),
                partition.clone(),
                true,
            ),
            (partition.clone(), partition, false),
            // Not ours to mend: validation refuses it.
            (json!("OnDelete"), json!("OnDelete"), false),
        ] {
            let (spec, warnings) = applied(&with(&before));
            assert_eq!(spec, with(&after), "{before}");
            assert_eq!(!warnings.is_empty(), told, "{before}: {warnings:?}");
        }
        let absent = json!({"apiServer": {"statefulset": {"spec": {}}}});
        assert_eq!(
            applied(&absent).0,
            json!({"apiServer": {"statefulset": {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}}})
        );
    }

    #[test]
    fn a_person_reads_what_was_changed() {
        let (_, warnings) = patch(&with(&json!({"type": "OnDelete"})), None);
        assert_eq!(
            warnings,
            [
                "spec.etcd.statefulset.spec.updateStrategy.type: changed from \"OnDelete\" to \"RollingUpdate\", so that \
              upgrades reach the pods"
            ]
        );
    }

    #[test]
    fn a_bundle_that_is_not_edited_stays_as_it_is() {
        let old = json!({"etcd": {"statefulset": {"spec": {}}}, "apiServer": {"statefulset": {"spec": {}}}});
        let mut new = old.clone();
        new["upgradePolicy"] = json!({"paused": true});
        assert!(patch(&new, Some(&old)).0.is_empty());
        new["etcd"]["service"] = json!({});
        let (operations, _) = patch(&new, Some(&old));
        assert_eq!(operations.len(), 1);
        assert_eq!(
            operations[0].path().to_string(),
            "/spec/etcd/statefulset/spec/updateStrategy"
        );
    }

    #[test]
    fn nothing_comes_where_no_stateful_set_is() {
        for spec in [
            json!(null),
            json!({}),
            json!([]),
            json!({"etcd": null, "apiServer": {}, "controllerManager": {"statefulset": null}}),
            json!({"etcd": {"statefulset": {"metadata": {}}}, "apiServer": {"statefulset": {"spec": null}}}),
            json!({"etcd": {"statefulset": []}, "other": {"statefulset": {"spec": {}}}, "apiServer": 7}),
        ] {
            assert_eq!(patch(&spec, None), (vec![], vec![]), "{spec}");
        }
    }

    /// What the rule says, written a second time by a read and a write of whole values.
    fn expected(mut spec: Value) -> Value {
        for component in ["etcd", "apiServer", "controllerManager"] {
            let Some(set) = spec.pointer_mut(&format!("/{component}/statefulset/spec")) else {
                continue;
            };
            let Some(set) = set.as_object_mut() else { continue };
            match set.get_mut("updateStrategy") {
                Some(Value::Object(strategy)) => {
                    strategy.insert("type".into(), "RollingUpdate".into());
                }
                None | Some(Value::Null) => {
                    set.insert("updateStrategy".into(), json!({"type": "RollingUpdate"}));
                }
                Some(_) => {}
            }
        }
        spec
    }

    proptest! {
        #[test]
        fn exactly_the_expected_object(spec in json_value()) {
            let (after, _) = applied(&spec);
            prop_assert_eq!(&after, &expected(spec));
            // A second pass has nothing to do.
            prop_assert_eq!(patch(&after, None), (vec![], vec![]));
        }
    }
}
