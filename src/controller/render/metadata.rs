//! What every object of a root namespace has in common: where it goes, and nothing that only a server may set.

use serde_json::{Map, Value};

use crate::api::{cluster_version::canonical_hash, labels};

/// Fields of `metadata` that belong to the API server, or that have no meaning in another namespace.
const SERVER_SET: [&str; 9] = [
    "creationTimestamp",
    "deletionTimestamp",
    "generateName",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Makes `object` one of `namespace`: its type, its namespace, no status, no server-set metadata.
///
/// The type is always filled in: samples of the Go manager lack `apiVersion` and `kind` or name a wrong group,
/// and a bundle's key already says what the object is.
pub(super) fn place(mut object: Value, api_version: &str, kind: &str, namespace: &str) -> Value {
    if let Some(map) = object.as_object_mut() {
        map.insert("apiVersion".into(), api_version.into());
        map.insert("kind".into(), kind.into());
        map.remove("status");
    }
    let metadata = child(&mut object, "metadata");
    for key in SERVER_SET {
        metadata.remove(key);
    }
    metadata.insert("namespace".into(), namespace.into());
    object
}

/// The object below `key`, made if it is absent, null or no object.
pub(super) fn child<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    descendant(value, &[key])
}

/// The object at the end of `path`; it and those on the way are made if they are absent, null or no objects.
pub(super) fn descendant<'a>(value: &'a mut Value, path: &[&str]) -> &'a mut Map<String, Value> {
    let mut object = as_object(value);
    for key in path {
        object = as_object(object.entry(*key).or_insert(Value::Null));
    }
    object
}

fn as_object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it was just made an object"),
    }
}

/// Writes the hash of `object` as it stands, but for an earlier such hash, into its annotations.
pub(super) fn record_hash(object: &mut Value) {
    if let Some(annotations) = object
        .pointer_mut("/metadata/annotations")
        .and_then(Value::as_object_mut)
    {
        annotations.remove(labels::RENDERED_HASH);
    }
    let hash = canonical_hash(object);
    let metadata = &mut object["metadata"];
    child(metadata, "annotations").insert(labels::RENDERED_HASH.into(), hash.into());
}
