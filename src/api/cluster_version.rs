//! The ClusterVersion: the templates that tenants are made from.

use std::borrow::Cow;

use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::{Component, schema, virtual_cluster::CertificatePolicy};
use crate::hex;

/// What a ClusterVersion says, as raw JSON.
///
/// The bundles `etcd`, `apiServer` and `controllerManager` hold whole StatefulSets and Services. They are kept
/// as they came, so that unknown and future fields, nulls and integers beyond 2^53 survive;
/// [`Template`](super::template::Template) is the read-only view that the manager works with.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "tenancy.x-k8s.io",
    version = "v1alpha1",
    kind = "ClusterVersion",
    shortname = "cv",
    status = "ClusterVersionStatus",
    derive = "PartialEq",
    doc = "ClusterVersion holds the templates (whole StatefulSets and Services) that the control planes of VirtualClusters are made from.",
    printcolumn = r#"{"name":"Revision","type":"string","jsonPath":".status.revision"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
pub struct ClusterVersionSpec {
    /// All of `spec`, untouched.
    #[serde(flatten)]
    pub raw: Map<String, Value>,
}

impl JsonSchema for ClusterVersionSpec {
    fn schema_name() -> Cow<'static, str> {
        "ClusterVersionSpec".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "The bundles of the control plane's components. Each is {metadata: {name}, statefulset, service}, \
                            where statefulset is a whole apps/v1 StatefulSet and service a whole v1 Service.",
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": true,
            "x-kubernetes-validations": [schema::required("apiServer", "a tenant without an apiserver cannot be provisioned")],
            "properties": {
                "upgradePolicy": schema::upgrade_policy(),
                "etcd": schema::bundle(Component::Etcd, "The etcd of a tenant. Applied once, when the tenant is made; an upgrade never touches it."),
                "apiServer": schema::bundle(Component::ApiServer, "The kube-apiserver of a tenant. Its service is the address of the tenant."),
                "controllerManager": schema::bundle(Component::ControllerManager, "The kube-controller-manager of a tenant. Optional; its service, too."),
            },
        })
    }
}

/// Key below `spec` that is policy, not content: an edit of it alone is no new revision.
const UPGRADE_POLICY: &str = "upgradePolicy";

impl ClusterVersionSpec {
    /// The part of `spec` that tenants are rendered from: everything but the upgrade policy.
    #[must_use]
    pub fn content(&self) -> Value {
        let mut content = self.raw.clone();
        content.remove(UPGRADE_POLICY);
        Value::Object(content)
    }

    /// Which leaf certificates upgrades to this ClusterVersion refresh. What is no known value, which admission
    /// refuses, is the default.
    #[must_use]
    pub fn certificate_policy(&self) -> CertificatePolicy {
        let policy = self
            .raw
            .get(UPGRADE_POLICY)
            .and_then(|policy| policy.get("certificates"));
        policy
            .and_then(|value| CertificatePolicy::deserialize(value).ok())
            .unwrap_or_default()
    }

    /// Identity of the content: SHA-256 in hex over its canonical JSON.
    #[must_use]
    pub fn content_hash(&self) -> String {
        canonical_hash(&self.content())
    }
}

/// SHA-256, in 64 lower-case hex digits, of the canonical JSON of `value`: keys sorted, no insignificant space.
///
/// Keys are sorted here and not left to the map type, because any dependency can switch `serde_json` to
/// insertion order for the whole build, which would silently give every stored revision a new name.
#[must_use]
pub fn canonical_hash(value: &Value) -> String {
    let mut text = String::new();
    write_canonical(value, &mut text);
    hex::encode(Sha256::digest(text.as_bytes()))
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| *key);
            out.push('{');
            for (index, (key, value)) in entries.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&Value::String(key.clone()).to_string());
                out.push(':');
                write_canonical(value, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

/// What the manager says of a ClusterVersion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterVersionStatus {
    /// `metadata.generation` this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Name of the ControllerRevision, in the manager's namespace, that keeps the present content of this
    /// ClusterVersion. An upgrade moves a tenant to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(value: Value) -> ClusterVersionSpec {
        serde_json::from_value(value).expect("any object is a spec")
    }

    #[test]
    fn templates_survive_untouched() {
        let raw = json!({
            "etcd": {"statefulset": {"spec": {"futureField": {"a": null}, "big": 9_007_199_254_740_993_i64,
                "min": i64::MIN, "max": u64::MAX, "float": 0.5}}},
            "unknownBundle": [1, null, "x"],
        });
        assert_eq!(serde_json::to_value(spec(raw.clone())).unwrap(), raw);
    }

    #[test]
    fn hash_is_of_content_only() {
        let plain = spec(json!({"apiServer": {"a": 1, "b": [1, 2]}}));
        let reordered = spec(serde_json::from_str(r#"{"apiServer":{"b":[1,2],"a":1}}"#).unwrap());
        let policy = spec(json!({"upgradePolicy": {"maxConcurrent": 3}, "apiServer": {"a": 1, "b": [1, 2]}}));
        let other = spec(json!({"apiServer": {"a": 1, "b": [2, 1]}}));
        assert_eq!(plain.content_hash(), reordered.content_hash());
        assert_eq!(plain.content_hash(), policy.content_hash());
        assert_ne!(plain.content_hash(), other.content_hash());
        // A stored revision is found by this name: it may never change.
        assert_eq!(
            canonical_hash(&json!({"b": [1, null, "\u{e9}\n"], "a": {"d": 1.5, "c": true}})),
            "48b412e4d3491cf5a174b7562b1cca238166943527a4d15174ec1d8786a83245"
        );
    }
}
