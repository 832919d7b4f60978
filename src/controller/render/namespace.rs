//! The root namespace, and how to tell whose it is.

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::Tenant;
use crate::api::labels;

/// The root namespace of `tenant`. The syncer collects it by these annotations once the VirtualCluster is gone.
#[must_use]
pub fn namespace(tenant: &Tenant, super_cluster_labelling: bool) -> Value {
    let mut namespace = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": tenant.root_namespace,
            "annotations": {
                labels::VC_NAME: tenant.name,
                labels::VC_NAMESPACE: tenant.namespace,
                labels::VC_UID: tenant.uid,
                labels::VC_ROOT_NS: "true",
            },
        },
    });
    if super_cluster_labelling {
        namespace["metadata"]["labels"] = json!({labels::CONTROLLED: "true"});
    }
    namespace
}

/// Whether `namespace` is provably the root namespace of `tenant`: its annotations name the very object, by uid.
#[must_use]
pub fn belongs_to(namespace: &Namespace, tenant: &Tenant) -> bool {
    let says = |key: &str, value: &str| namespace.annotations().get(key).map(String::as_str) == Some(value);
    says(labels::VC_NAME, &tenant.name)
        && says(labels::VC_NAMESPACE, &tenant.namespace)
        && says(labels::VC_UID, &tenant.uid)
        && says(labels::VC_ROOT_NS, "true")
}
