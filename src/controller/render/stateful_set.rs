//! The StatefulSets of a tenant.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use super::{Kind, Tenant, TenantSecret, metadata, secret};
use crate::{
    api::{Component, template::Bundle},
    pki,
};

/// Port etcd members speak to each other on. The contract fixes it.
const ETCD_PEER_PORT: u16 = 2380;

/// etcd: the list of its members is appended to the arguments of the first container.
pub(super) fn etcd(bundle: &Bundle, service: &str, tenant: &Tenant) -> Value {
    let mut value = place(bundle, tenant);
    let members: Vec<_> = (0..bundle.replicas)
        .map(|ordinal| {
            let member = format!("{}-{ordinal}", bundle.stateful_set_name);
            format!("{member}=https://{member}.{service}:{ETCD_PEER_PORT}")
        })
        .collect();
    let args = &mut value["spec"]["template"]["spec"]["containers"][0]["args"];
    if !args.is_array() {
        *args = Value::Array(Vec::new());
    }
    if let Some(args) = args.as_array_mut() {
        args.extend(["--initial-cluster".into(), members.join(",").into()]);
    }
    value
}

/// apiserver and controller-manager: hashes of the Secrets they read at start only, as pod-template annotations.
pub(super) fn with_hashes(bundle: &Bundle, tenant: &Tenant, secrets: &BTreeMap<String, Secret>) -> Value {
    let mut value = place(bundle, tenant);
    let template = &mut value["spec"]["template"];
    let annotations = metadata::child(&mut template["metadata"], "annotations");
    for name in hashed(bundle.component).iter().map(|secret| secret.name()) {
        if let Some(secret) = secrets.get(name) {
            // What cannot be read is hashed as such: it changes once it is repaired.
            let hash = pki::hash::annotation_hash(name, &secret::data_of(secret))
                .unwrap_or_else(|_| "unreadable".into());
            annotations.insert(format!("{name}-hash"), hash.into());
        }
    }
    value
}

/// Secrets whose change replaces the pods of a component.
fn hashed(component: Component) -> &'static [TenantSecret] {
    match component {
        Component::Etcd => &[],
        Component::ApiServer => &[
            TenantSecret::RootCa,
            TenantSecret::ApiServer,
            TenantSecret::FrontProxy,
            TenantSecret::ServiceAccount,
        ],
        Component::ControllerManager => &[
            TenantSecret::RootCa,
            TenantSecret::ServiceAccount,
            TenantSecret::ControllerManagerKubeconfig,
        ],
    }
}

/// What all three have in common.
fn place(bundle: &Bundle, tenant: &Tenant) -> Value {
    super::placed(
        bundle.stateful_set.clone(),
        Kind::StatefulSet,
        &tenant.root_namespace,
    )
}
