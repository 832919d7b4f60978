//! What may not change in a ClusterVersion while tenants use it: fields of a StatefulSet that the API server does not
//! let anyone change, and whether a Service has an address. The upgrade of each tenant would fail on them; and of etcd,
//! which an upgrade does not touch, new tenants would have another than the old ones, of the same revision.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{quantity::quantity, rules::same};
use crate::{
    admission::cluster::User,
    api::{Component, FieldError},
};

/// The fields of the embedded objects that differ and may not, without the reason.
#[must_use]
pub fn changed(spec: &Value, old: &Value) -> Vec<String> {
    let mut fields = Vec::new();
    for component in Component::ALL {
        let at = |root: &'static str| (component.spec_key(), root);
        let (new_set, old_set) = (object(spec, at("statefulset")), object(old, at("statefulset")));
        if let (Some(new), Some(old)) = (new_set, old_set) {
            for field in [
                "selector",
                "serviceName",
                "volumeClaimTemplates",
                "podManagementPolicy",
            ] {
                if comparable(field, new) != comparable(field, old) {
                    fields.push(format!("spec.{}.statefulset.spec.{field}", component.spec_key()));
                }
            }
        }
        let (new_service, old_service) = (object(spec, at("service")), object(old, at("service")));
        if let (Some(new), Some(old)) = (new_service, old_service)
            && is_headless(new) != is_headless(old)
        {
            fields.push(format!("spec.{}.service.spec.clusterIP", component.spec_key()));
        }
    }
    fields
}

/// Whether an embedded object comes or goes, so that there is nothing to compare it with in `old`.
#[must_use]
pub fn comes_or_goes(spec: &Value, old: &Value) -> bool {
    Component::ALL.into_iter().any(|component| {
        ["statefulset", "service"].into_iter().any(|root| {
            let at = (component.spec_key(), root);
            object(spec, at).is_some() != object(old, at).is_some()
        })
    })
}

/// The faults of `spec` while `users` use the ClusterVersion: what differs from the revision that each of them runs, or is
/// brought to, or, if it has none yet, from `old`. To go back to what they run is no change.
#[must_use]
pub fn faults(
    spec: &Value,
    old: &Value,
    users: &[User],
    contents: &BTreeMap<String, Value>,
) -> Vec<FieldError> {
    // Few revisions, many users.
    let mut changes: BTreeMap<Option<&str>, Vec<String>> = BTreeMap::new();
    let mut affected: BTreeMap<String, usize> = BTreeMap::new();
    for user in users {
        let pins = user
            .pins
            .iter()
            .map(|pin| contents.get_key_value(pin).map(|(pin, _)| pin.as_str()));
        let mut baselines: BTreeSet<Option<&str>> = pins.collect();
        if baselines.is_empty() {
            baselines.insert(None);
        }
        let mut fields = BTreeSet::new();
        for baseline in baselines {
            let content = baseline.and_then(|pin| contents.get(pin)).unwrap_or(old);
            fields.extend(
                changes
                    .entry(baseline)
                    .or_insert_with(|| changed(spec, content))
                    .iter()
                    .cloned(),
            );
        }
        for field in fields {
            *affected.entry(field).or_default() += 1;
        }
    }
    affected
        .into_iter()
        .map(|(field, tenants)| {
            let users = match tenants {
                1 => "1 VirtualCluster runs".to_owned(),
                many => format!("{many} VirtualClusters run"),
            };
            FieldError::forbidden(
                field,
                format_args!(
                    "may not change while {users} with another value: Kubernetes cannot change it in what runs; make another \
                     ClusterVersion"
                ),
            )
        })
        .collect()
}

fn object<'a>(spec: &'a Value, (bundle, object): (&str, &str)) -> Option<&'a Value> {
    spec.get(bundle)?.get(object).filter(|object| object.is_object())
}

/// A field as the API server would store it, as far as its defaults matter.
fn comparable(field: &str, set: &Value) -> Value {
    let value = set
        .pointer(&format!("/spec/{field}"))
        .cloned()
        .unwrap_or(Value::Null);
    match (field, value) {
        ("podManagementPolicy", Value::Null) => "OrderedReady".into(),
        ("serviceName", Value::Null) => "".into(),
        ("volumeClaimTemplates", Value::Null) => json!([]),
        ("volumeClaimTemplates", Value::Array(claims)) => claims.into_iter().map(stored_claim).collect(),
        (_, value) => telling(value),
    }
}

/// A claim template with its defaults and without what the API server sets.
fn stored_claim(mut claim: Value) -> Value {
    if let Some(map) = claim.as_object_mut() {
        for key in ["apiVersion", "kind", "status"] {
            map.remove(key);
        }
    }
    if let Some(metadata) = claim.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("creationTimestamp");
    }
    if let Some(spec) = claim.get_mut("spec").and_then(Value::as_object_mut) {
        if same(spec.get("volumeMode"), None) {
            spec.insert("volumeMode".into(), "Filesystem".into());
        }
        // The same amount may be written in several ways.
        for amounts in ["requests", "limits"] {
            let amounts = spec
                .get_mut("resources")
                .and_then(|resources| resources.get_mut(amounts));
            for amount in amounts
                .and_then(Value::as_object_mut)
                .into_iter()
                .flat_map(|map| map.values_mut())
            {
                if let Some(number) = quantity(amount) {
                    *amount = number.into();
                }
            }
        }
    }
    telling(claim)
}

/// `value` without what says nothing: nulls, and lists and maps with nothing in them.
fn telling(value: Value) -> Value {
    let says_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    match value {
        Value::Object(map) => map
            .into_iter()
            .map(|(key, value)| (key, telling(value)))
            .filter(|(_, value)| !says_nothing(value))
            .collect(),
        Value::Array(items) => items.into_iter().map(telling).collect(),
        other => other,
    }
}

fn is_headless(service: &Value) -> bool {
    service.pointer("/spec/clusterIP").and_then(Value::as_str) == Some("None")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Value {
        json!({"etcd": {
            "statefulset": {"spec": {"serviceName": "etcd", "selector": {"matchLabels": {"a": "b"}},
                "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}}}}]}},
            "service": {"spec": {"clusterIP": "None"}},
        }, "apiServer": {"statefulset": {"spec": {}}, "service": {"spec": {}}}})
    }

    #[test]
    fn each_frozen_field_is_named() {
        for (pointer, value, field) in [
            (
                "/etcd/statefulset/spec/serviceName",
                json!("other"),
                "spec.etcd.statefulset.spec.serviceName",
            ),
            (
                "/etcd/statefulset/spec/selector/matchLabels",
                json!({"a": "c"}),
                "spec.etcd.statefulset.spec.selector",
            ),
            (
                "/etcd/statefulset/spec/volumeClaimTemplates",
                json!([]),
                "spec.etcd.statefulset.spec.volumeClaimTemplates",
            ),
            (
                "/etcd/service/spec/clusterIP",
                json!(null),
                "spec.etcd.service.spec.clusterIP",
            ),
            (
                "/apiServer/service/spec",
                json!({"clusterIP": "None"}),
                "spec.apiServer.service.spec.clusterIP",
            ),
            (
                "/apiServer/statefulset/spec",
                json!({"podManagementPolicy": "Parallel"}),
                "spec.apiServer.statefulset.spec.podManagementPolicy",
            ),
        ] {
            let mut new = spec();
            *new.pointer_mut(pointer).unwrap() = value;
            assert_eq!(changed(&new, &spec()), [field]);
            assert_eq!(changed(&spec(), &new), [field]);
        }
    }

    #[test]
    fn what_the_api_server_would_store_alike_has_not_changed() {
        let mut new = spec();
        new["etcd"]["statefulset"]["spec"]["podManagementPolicy"] = json!("OrderedReady");
        new["etcd"]["statefulset"]["spec"]["volumeClaimTemplates"][0] = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "status": {"phase": "Pending"},
            "metadata": {"name": "data", "creationTimestamp": null, "labels": {}},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "storageClassName": null,
                "resources": {"requests": {"storage": "1024Mi"}, "limits": {}}},
        });
        new["etcd"]["statefulset"]["spec"]["selector"]["matchExpressions"] = json!([]);
        new["etcd"]["statefulset"]["spec"]["replicas"] = json!(3);
        new["apiServer"]["statefulset"]["spec"] =
            json!({"serviceName": "", "selector": null, "volumeClaimTemplates": null});
        new["apiServer"]["service"]["spec"] = json!({"clusterIP": "", "type": "NodePort"});
        assert_eq!(changed(&new, &spec()), Vec::<String>::new());
        // A bundle that comes or goes has nothing to be compared with.
        new["etcd"] = Value::Null;
        assert_eq!(changed(&new, &spec()), Vec::<String>::new());
    }

    fn user(pins: &[&str]) -> User {
        User {
            key: "ns/t".into(),
            pins: pins.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn what_counts_is_what_tenants_run() {
        let mut new = spec();
        new["etcd"]["statefulset"]["spec"]["serviceName"] = json!("other");
        let contents = BTreeMap::from([("old".to_owned(), spec()), ("new".to_owned(), new.clone())]);
        let told = |spec: &Value, old: &Value, users: &[User]| -> Vec<String> {
            faults(spec, old, users, &contents)
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        assert!(told(&new, &spec(), &[]).is_empty(), "nobody uses it");
        for (users, text) in [
            (vec![user(&[])], "while 1 VirtualCluster runs"),
            (
                vec![user(&["old"]), user(&["old"]), user(&["new"])],
                "while 2 VirtualClusters run",
            ),
            (vec![user(&["gone"])], "while 1 VirtualCluster runs"),
            (vec![user(&["new", "old"])], "while 1 VirtualCluster runs"),
        ] {
            let told = told(&new, &spec(), &users);
            assert!(
                told.len() == 1
                    && told[0].starts_with("spec.etcd.statefulset.spec.serviceName: Forbidden")
                    && told[0].contains(text),
                "{told:?}"
            );
        }
        // Back to what runs, whatever stands there now.
        assert!(told(&spec(), &new, &[user(&["old"])]).is_empty());
        // In two steps, the first of which takes away what there is to compare with.
        let mut without = spec();
        without["etcd"] = Value::Null;
        assert!(
            comes_or_goes(&without, &spec())
                && comes_or_goes(&new, &without)
                && !comes_or_goes(&new, &spec())
        );
        assert_eq!(told(&new, &without, &[user(&["old"])]).len(), 1);
    }
}
