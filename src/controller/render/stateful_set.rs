//! The StatefulSets of a tenant.

use std::collections::BTreeMap;

use k8s_openapi::api::{apps::v1::StatefulSet, core::v1::Secret};
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

/// apiserver and controller-manager: `hashes` go into the annotations of the pod template.
pub(super) fn with_hashes(bundle: &Bundle, tenant: &Tenant, hashes: &BTreeMap<String, String>) -> Value {
    let mut value = place(bundle, tenant);
    let template = &mut value["spec"]["template"];
    let annotations = metadata::child(&mut template["metadata"], "annotations");
    for (key, hash) in hashes {
        annotations.insert(key.clone(), hash.clone().into());
    }
    value
}

/// Hashes of the Secrets that `component` reads, by the keys of the annotations. Of one that does not exist there is
/// none.
#[must_use]
pub fn hashes(component: Component, secrets: &BTreeMap<String, Secret>) -> BTreeMap<String, String> {
    let hash = |which: &TenantSecret| {
        let secret = secrets.get(which.name())?;
        // What cannot be read is hashed as such: it changes once it is repaired.
        let hash = pki::hash::annotation_hash(which.name(), &secret::data_of(secret))
            .unwrap_or_else(|_| "unreadable".into());
        Some((hash_key(*which), hash))
    };
    hashed(component).iter().filter_map(hash).collect()
}

/// The annotations on the pod template of a stored StatefulSet.
#[must_use]
pub fn hashes_of(set: &StatefulSet) -> BTreeMap<String, String> {
    let template = set.spec.as_ref().and_then(|spec| spec.template.metadata.as_ref());
    template
        .and_then(|metadata| metadata.annotations.clone())
        .unwrap_or_default()
}

/// Annotation that carries the hash of a Secret.
#[must_use]
pub fn hash_key(secret: TenantSecret) -> String {
    format!("{secret}-hash")
}

/// Secrets whose hashes a component carries.
#[must_use]
pub const fn hashed(component: Component) -> &'static [TenantSecret] {
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
