//! The part of an object that someone owns.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use serde_json::{Map, Value};

use super::{
    is_applied_by,
    ownership::{Entry, FieldSet, Place, is_default_key},
};

/// The part of a stored object that `manager` owns by server-side apply, or `None` if there is none: what client-go
/// calls to extract. Applied again, it changes nothing.
///
/// Type and place come with it. Values are as they are stored, so that a part that is owned as a whole has the server's
/// defaults; what was applied and not stored (an explicit `false` or null) is not in it.
#[must_use]
pub fn owned(object: &Value, stored: &ObjectMeta, manager: &str) -> Option<Value> {
    owned_by(object, stored, |entry| is_applied_by(entry, manager))
}

/// The part of a stored object that is owned by any of the entries that `who` selects; see [`owned`].
#[must_use]
pub fn owned_by(
    object: &Value,
    stored: &ObjectMeta,
    who: impl Fn(&ManagedFieldsEntry) -> bool,
) -> Option<Value> {
    let mut entries = Entry::all(stored);
    for entry in &mut entries {
        entry.ours = who(entry.source);
    }
    let Some(Value::Object(mut part)) = extract(object, &Place::root(&entries)) else {
        return None;
    };
    for key in ["apiVersion", "kind"] {
        if let Some(value) = object.get(key) {
            part.insert(key.into(), value.clone());
        }
    }
    let metadata = part
        .entry("metadata")
        .or_insert_with(|| Value::Object(Map::new()));
    for key in ["name", "namespace"] {
        if let (Some(metadata), Some(value)) = (
            metadata.as_object_mut(),
            object.get("metadata").and_then(|metadata| metadata.get(key)),
        ) {
            metadata.insert(key.into(), value.clone());
        }
    }
    Some(Value::Object(part))
}

/// What of `value` is ours.
fn extract(value: &Value, place: &Place<'_>) -> Option<Value> {
    if !place.is_ours() {
        return None;
    }
    match value {
        Value::Null => None,
        Value::Object(fields) if place.is_in_parts() => {
            let part: Map<_, _> = fields
                .iter()
                .filter_map(|(name, value)| Some((name.clone(), extract(value, &place.field(name))?)))
                .collect();
            let empty = part.is_empty() && !place.ours().any(FieldSet::owns_itself);
            (!empty).then_some(Value::Object(part))
        }
        Value::Array(elements) if place.is_in_parts() => {
            let key_names = place.key_names().unwrap_or_default();
            let part: Vec<_> = elements
                .iter()
                .enumerate()
                .filter_map(|(index, element)| {
                    let mut part = extract(element, &place.element(index, element))?;
                    // Without its keys an element would be another one, whoever set them.
                    for name in &key_names {
                        if let (Some(part), Some(value)) = (part.as_object_mut(), element.get(name))
                            && !(name == "protocol" && is_default_key(name, value))
                        {
                            part.entry(name.as_str()).or_insert_with(|| value.clone());
                        }
                    }
                    Some(part)
                })
                .collect();
            (!part.is_empty()).then_some(Value::Array(part))
        }
        other => Some(other.clone()),
    }
}
