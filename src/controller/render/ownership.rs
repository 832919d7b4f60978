//! Whose an object in a root namespace is.
//!
//! The namespace is the tenant's, but anybody with the right to may put objects there, and nothing that is written
//! there carries a reference to its owner. So it is told by who made an object, and that is on it: annotations that
//! are only written here, or the name of the field manager.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};

use crate::api::{FIELD_MANAGER, labels};

/// Names by which Go managers made objects before they applied them: those of their programs. `manager` is also what
/// the programs of many other operators are called, so that it counts only for who wrote the object itself.
pub const GO_PROGRAMS: [&str; 2] = ["manager", "vc-manager"];

/// Whether an object with this metadata, in a root namespace, was made by this manager or by the Go manager.
///
/// It was if it carries [`labels::RENDERED_HASH`] or [`labels::ISSUED_FOR`], whatever their value, or if one of its
/// field managers is [`FIELD_MANAGER`] (which both apply by) or a program of the Go manager. The annotations survive
/// a backup that is restored by somebody else, where field managers do not; and by giving an object one of them a
/// person declares it to be the tenant's.
#[must_use]
pub fn is_ours(meta: &ObjectMeta) -> bool {
    let annotated = meta.annotations.as_ref().is_some_and(|annotations| {
        annotations.contains_key(labels::RENDERED_HASH) || annotations.contains_key(labels::ISSUED_FOR)
    });
    annotated
        || writers(meta).any(|entry| {
            let name = entry.manager.as_deref().unwrap_or_default();
            name == FIELD_MANAGER
                || (GO_PROGRAMS.contains(&name) && entry.operation.as_deref() == Some("Update"))
        })
}

/// Names of those who wrote an object, each once, in the order of the object. Who only wrote its status is none.
#[must_use]
pub fn field_managers(meta: &ObjectMeta) -> Vec<&str> {
    let mut names = Vec::new();
    for name in writers(meta).filter_map(|entry| entry.manager.as_deref()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn writers(meta: &ObjectMeta) -> impl Iterator<Item = &ManagedFieldsEntry> {
    let entries = meta.managed_fields.iter().flatten();
    entries.filter(|entry| entry.subresource.as_deref().is_none_or(str::is_empty))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn meta(value: Value) -> ObjectMeta {
        serde_json::from_value(value).expect("metadata")
    }

    fn managed(entries: &[(&str, &str, &str)]) -> ObjectMeta {
        let entries: Vec<_> = entries
            .iter()
            .map(|(manager, operation, subresource)| {
                json!({"manager": manager, "operation": operation, "subresource": subresource})
            })
            .collect();
        meta(json!({"managedFields": entries}))
    }

    #[test]
    fn told_by_annotation_or_field_manager() {
        let ours = [
            meta(json!({"annotations": {"tenancy.x-k8s.io/rendered-hash": ""}})),
            meta(json!({"annotations": {"tenancy.x-k8s.io/issued-for": "a backup"}})),
            managed(&[("virtualcluster/provisioner/native", "Apply", "")]),
            managed(&[("kubectl-edit", "Update", ""), ("vc-manager", "Update", "")]),
            managed(&[("manager", "Update", "")]),
        ];
        for meta in ours {
            assert!(is_ours(&meta), "{meta:?}");
        }
        let theirs = [
            ObjectMeta::default(),
            meta(json!({"annotations": {"tenancy.x-k8s.io/vcname": "one"}})),
            managed(&[("kubectl-create", "Update", ""), ("helm", "Update", "")]),
            managed(&[("kubectl", "Update", ""), ("manager", "Update", "status")]),
            managed(&[("manager", "Apply", "")]),
            managed(&[("virtualcluster/provisioner/native-not", "Apply", "")]),
        ];
        for meta in theirs {
            assert!(!is_ours(&meta), "{meta:?}");
        }
    }

    #[test]
    fn field_managers_are_those_of_the_object() {
        let all = managed(&[
            ("helm", "Update", ""),
            ("kube-controller-manager", "Update", "status"),
            ("kubectl", "Apply", ""),
            ("helm", "Apply", ""),
        ]);
        assert_eq!(field_managers(&all), ["helm", "kubectl"]);
    }
}
