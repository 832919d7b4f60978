//! What is written into a root namespace, rendered from a revision and nothing else. Pure.
//!
//! The renderer adds to the author's templates what the contract with the Go manager lists, and no more: the
//! namespace, the hashes and the label on pod templates, etcd's member list. One addition is ours: the hash of
//! the rendering itself, as an annotation on the object, so that an object that would not change is not
//! written again.

mod metadata;
mod namespace;
mod ownership;
mod secret;
mod service;
mod stateful_set;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use serde_json::Value;

pub use namespace::{belongs_to, namespace};
pub use ownership::{GO_PROGRAMS, field_managers, is_ours};
pub use secret::{TenantSecret, data_of, secret};
pub use stateful_set::{hash_key, hashed, hashes, hashes_of};

use crate::api::{
    Component, VirtualCluster, labels, root_namespace, template::Bundle, template::Template,
    virtual_cluster::DEFAULT_CLUSTER_DOMAIN,
};

/// The names of one tenant that its objects are rendered for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name of the VirtualCluster.
    pub name: String,
    /// Namespace of the VirtualCluster.
    pub namespace: String,
    /// Uid of the VirtualCluster.
    pub uid: String,
    /// The root namespace, which is also the cluster key.
    pub root_namespace: String,
    /// DNS domain of the tenant cluster.
    pub cluster_domain: String,
    /// One more DNS name of the apiserver.
    pub external_domain: Option<String>,
    /// Days its certificates are valid, as the author wrote it.
    pub pki_expire_days: Option<i64>,
}

impl Tenant {
    /// The tenant that `vc` describes.
    #[must_use]
    pub fn of(vc: &VirtualCluster) -> Self {
        Self {
            name: vc.name_any(),
            namespace: vc.namespace().unwrap_or_default(),
            uid: vc.uid().unwrap_or_default(),
            root_namespace: root_namespace::of(vc),
            cluster_domain: vc
                .spec
                .cluster_domain
                .clone()
                .filter(|domain| !domain.is_empty())
                .unwrap_or_else(|| DEFAULT_CLUSTER_DOMAIN.to_owned()),
            external_domain: vc.label(labels::EXTERNAL_APISERVER_DOMAIN).map(ToOwned::to_owned),
            pki_expire_days: vc.spec.pki_expire_days,
        }
    }
}

/// Kinds of rendered objects that are written by server-side apply as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `apps/v1` StatefulSet.
    StatefulSet,
    /// `v1` Service.
    Service,
}

impl Kind {
    /// As the API calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StatefulSet => "StatefulSet",
            Self::Service => "Service",
        }
    }
}

/// `object` as it is applied in `namespace`, but for what depends on the tenant: its type, its place, and of a
/// StatefulSet the update strategy and the label on its pods. Any JSON will do.
#[must_use]
pub fn placed(object: Value, kind: Kind, namespace: &str) -> Value {
    match kind {
        Kind::Service => metadata::place(object, "v1", "Service", namespace),
        Kind::StatefulSet => {
            let mut object = metadata::place(object, "apps/v1", "StatefulSet", namespace);
            // With OnDelete, which the Go manager's samples say, an upgrade would never reach the pods.
            metadata::descendant(&mut object, &["spec", "updateStrategy"])
                .insert("type".into(), "RollingUpdate".into());
            metadata::descendant(&mut object, &["spec", "template", "metadata", "labels"])
                .insert(labels::CLUSTER.into(), namespace.into());
            object
        }
    }
}

/// An object ready to be applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    /// Its kind.
    pub kind: Kind,
    /// Which component it belongs to.
    pub component: Component,
    /// Its name.
    pub name: String,
    /// The whole object.
    pub value: Value,
}

impl Rendered {
    /// Kind and name.
    #[must_use]
    pub fn id(&self) -> (&'static str, String) {
        (self.kind.name(), self.name.clone())
    }

    /// The same, with the number of replicas left to others.
    #[must_use]
    pub fn without_replicas(self) -> Self {
        self.without("/spec", "replicas")
    }

    /// The same, with pods that do not carry the label of their tenant.
    #[must_use]
    pub fn without_cluster_label(self) -> Self {
        self.without("/spec/template/metadata/labels", labels::CLUSTER)
    }

    fn without(mut self, parent: &str, key: &str) -> Self {
        let parent = self.value.pointer_mut(parent).and_then(Value::as_object_mut);
        if parent.is_some_and(|parent| parent.remove(key).is_some()) {
            metadata::record_hash(&mut self.value);
        }
        self
    }

    /// Hash of this rendering, as the object carries it.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.value
            .pointer("/metadata/annotations")
            .and_then(|annotations| annotations.get(labels::RENDERED_HASH))
            .and_then(Value::as_str)
            .unwrap_or_default()
    }
}

/// The StatefulSet of `component`, if the revision has the component.
///
/// `secrets` are the tenant's Secrets by name: their hashes go into the pod template, so that the pods are
/// replaced when, and only when, what they read at start has changed.
#[must_use]
pub fn stateful_set(
    template: &Template,
    component: Component,
    tenant: &Tenant,
    secrets: &BTreeMap<String, Secret>,
) -> Option<Rendered> {
    stateful_set_with(template, component, tenant, &hashes(component, secrets))
}

/// As [`stateful_set`], with these annotations on the pod template.
#[must_use]
pub fn stateful_set_with(
    template: &Template,
    component: Component,
    tenant: &Tenant,
    hashes: &BTreeMap<String, String>,
) -> Option<Rendered> {
    let bundle = template.bundle(component)?;
    let value = match component {
        Component::Etcd => stateful_set::etcd(bundle, template.etcd_service.as_deref()?, tenant),
        Component::ApiServer | Component::ControllerManager => {
            stateful_set::with_hashes(bundle, tenant, hashes)
        }
    };
    Some(rendered(
        Kind::StatefulSet,
        bundle,
        &bundle.stateful_set_name,
        value,
    ))
}

/// The Service of `component`, if the revision has one.
#[must_use]
pub fn service(template: &Template, component: Component, tenant: &Tenant) -> Option<Rendered> {
    let bundle = template.bundle(component)?;
    let value = service::service(bundle.service.as_ref()?, tenant);
    let name = value
        .pointer("/metadata/name")
        .and_then(Value::as_str)?
        .to_owned();
    Some(rendered(Kind::Service, bundle, &name, value))
}

fn rendered(kind: Kind, bundle: &Bundle, name: &str, mut value: Value) -> Rendered {
    metadata::record_hash(&mut value);
    Rendered {
        kind,
        component: bundle.component,
        name: name.to_owned(),
        value,
    }
}
