//! What may not change in a ClusterVersion while tenants use it: fields of a StatefulSet that the API server does not
//! let anyone change, and whether a Service has an address. The upgrade of each tenant would fail on them; and of etcd,
//! which an upgrade does not touch, new tenants would have another than the old ones, of the same revision.

use serde_json::{Value, json};

use super::{quantity::quantity, rules::same};
use crate::api::{Component, FieldError};

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

/// `fields` as faults, while so many tenants use the ClusterVersion.
#[must_use]
pub fn faults(fields: &[String], tenants: usize) -> Vec<FieldError> {
    let users = match tenants {
        0 => return Vec::new(),
        1 => "1 VirtualCluster uses".to_owned(),
        many => format!("{many} VirtualClusters use"),
    };
    fields
        .iter()
        .map(|field| {
            FieldError::forbidden(
                field,
                format_args!(
                    "may not change while {users} this ClusterVersion: Kubernetes cannot change it in what runs; make \
                     another ClusterVersion"
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

    #[test]
    fn nobody_is_hindered_while_nobody_uses_it() {
        let fields = ["spec.a".to_owned()];
        assert!(faults(&fields, 0).is_empty());
        for (tenants, text) in [
            (1, "while 1 VirtualCluster uses this"),
            (7, "while 7 VirtualClusters use this"),
        ] {
            let fault = faults(&fields, tenants).remove(0).to_string();
            assert!(
                fault.starts_with("spec.a: Forbidden: may not change") && fault.contains(text),
                "{fault}"
            );
        }
    }
}
