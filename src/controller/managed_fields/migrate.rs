//! Takes over what an object's maker owns, so that a field which is no longer applied goes.
//!
//! Old builds of the Go manager made objects without applying them. What they set is owned by an `Update` of their
//! program; server-side apply never removes that. kubectl does the same when a user turns to `--server-side`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, ObjectMeta};
use serde_json::Value;

use super::{is_applied_by, is_creation};
use crate::api::FIELD_MANAGER;

/// `metadata.managedFields` with all that `programs` own by `Update` owned by our `Apply` instead; `None` if they own
/// nothing.
#[must_use]
pub fn migrated(stored: &ObjectMeta, programs: &[&str]) -> Option<Vec<ManagedFieldsEntry>> {
    let is_theirs = |entry: &ManagedFieldsEntry| {
        entry.operation.as_deref() == Some("Update")
            && entry.subresource.as_deref().is_none_or(str::is_empty)
            && is_creation(entry, stored)
            && entry
                .manager
                .as_deref()
                .is_some_and(|manager| programs.contains(&manager))
    };
    let entries = stored.managed_fields.as_ref()?;
    let (theirs, others): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(is_theirs);
    let newest = theirs.last()?.clone();
    let (ours, mut kept): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|entry| is_applied_by(entry, FIELD_MANAGER));
    let mut fields = Value::Object(serde_json::Map::new());
    for entry in ours.iter().chain(&theirs) {
        if let Some(FieldsV1(owned)) = &entry.fields_v1 {
            unite(&mut fields, owned);
        }
    }
    kept.push(ManagedFieldsEntry {
        manager: Some(FIELD_MANAGER.into()),
        operation: Some("Apply".into()),
        fields_v1: Some(FieldsV1(fields)),
        ..ours.into_iter().next().unwrap_or(newest)
    });
    Some(kept)
}

/// The union of two sets of fields: both are trees of maps.
fn unite(into: &mut Value, other: &Value) {
    let (Value::Object(into), Value::Object(other)) = (into, other) else {
        return;
    };
    for (key, value) in other {
        match into.get_mut(key) {
            Some(known) => unite(known, value),
            None => {
                into.insert(key.clone(), value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_program_made_is_as_if_it_were_applied() {
        let stored: ObjectMeta = serde_json::from_value(json!({"creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [
            {"manager": "manager", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
             "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:a": {}, "f:b": {"f:c": {}}, "f:selector": {}}}},
            {"manager": FIELD_MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
             "fieldsV1": {"f:spec": {"f:b": {"f:d": {}}}}},
            {"manager": "manager", "operation": "Update", "subresource": "status",
             "fieldsV1": {"f:status": {"f:e": {}}}},
            {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:f": {}}}},
        ]}))
        .expect("metadata");
        let entries = migrated(&stored, &["manager"]).expect("entries");
        let told: Vec<_> = entries
            .iter()
            .map(|entry| {
                let fields = entry.fields_v1.as_ref().map(|fields| fields.0.to_string());
                (
                    entry.operation.as_deref().unwrap_or_default(),
                    fields.unwrap_or_default(),
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                ("Update", r#"{"f:status":{"f:e":{}}}"#.to_owned()),
                ("Update", r#"{"f:spec":{"f:f":{}}}"#.to_owned()),
                (
                    "Apply",
                    r#"{"f:spec":{"f:a":{},"f:b":{"f:c":{},"f:d":{}},"f:selector":{}}}"#.to_owned()
                ),
            ]
        );
        assert_eq!(migrated(&stored, &["another"]), None);
        assert_eq!(migrated(&ObjectMeta::default(), &["manager"]), None);
        // Other operators' programs are called so, too: what one of them wrote later is its own.
        let mut later = stored;
        later.creation_timestamp = None;
        assert_eq!(migrated(&later, &["manager"]), None);
    }
}
