//! Takes over a tenant that the Go manager left Running: it is pinned to a revision recorded from what runs, and nothing
//! in its root namespace is touched.
//!
//! One that is not Running is simply provisioned further: see `provisioning`.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, Service},
};
use kube::{Api, ResourceExt as _};
use serde_json::Value;

use super::{
    Context, TenantKey,
    error::Error,
    recorded,
    render::{self, Tenant},
    status,
};
use crate::api::{ClusterVersion, VirtualCluster, labels};

/// Whether a tenant has a pin.
pub(super) enum Pinned {
    /// It has, perhaps from now on.
    Yes(VirtualCluster),
    /// It cannot have one: its status says why.
    No(VirtualCluster),
}

/// Pins a Running tenant that has no pin, because another manager made it.
pub(super) async fn ensure_pinned(
    context: &Context,
    key: &TenantKey,
    vc: VirtualCluster,
) -> Result<Pinned, Error> {
    if vc.pin().is_some() {
        return Ok(Pinned::Yes(vc));
    }
    pin_what_runs(context, key, vc).await
}

/// Pins a tenant to a revision recorded from what runs, whatever it was pinned to.
pub(super) async fn pin_what_runs(
    context: &Context,
    key: &TenantKey,
    vc: VirtualCluster,
) -> Result<Pinned, Error> {
    let tenant = Tenant::of(&vc);
    let now = context.now();
    let namespaces = Api::<Namespace>::all(context.kubernetes.client());
    let namespace = context
        .kubernetes
        .get(&namespaces, &tenant.root_namespace)
        .await?;
    let found = match &namespace {
        None => Err(format!("root namespace {} does not exist", tenant.root_namespace)),
        Some(namespace) if !render::belongs_to(namespace, &tenant) => Err(format!(
            "the annotations of namespace {} do not name this VirtualCluster (uid {})",
            tenant.root_namespace, tenant.uid
        )),
        Some(_) => what_runs(context, &tenant).await?,
    };
    let recorded = match found {
        Ok(what_runs) => record(context, &vc, &what_runs).await,
        Err(why) => Err(Error::Blocked(why)),
    };
    match recorded {
        Ok(revision) => {
            let next = status::adopted(&vc, &tenant.root_namespace, &revision, now);
            let vc = status::write(&context.kubernetes, &vc, next).await?;
            let note = format!(
                "taken over from another manager as it is; what it runs is recorded as {revision}, and stays until its first upgrade"
            );
            context.events.normal(&vc, "Adopted", "Adopt", note);
            tracing::info!(tenant = %key, %revision, "tenant adopted");
            Ok(Pinned::Yes(vc))
        }
        Err(error) if error.is_final() => {
            let why =
                format!("it is Running and another manager made it, but it cannot be taken over: {error}");
            let next = status::blocked(&vc, &why, now);
            let changed = vc.status.as_ref() != Some(&next);
            let vc = status::write(&context.kubernetes, &vc, next).await?;
            if changed {
                context.events.warning(&vc, "CannotAdopt", "Adopt", why);
            }
            Ok(Pinned::No(vc))
        }
        Err(error) => Err(error),
    }
}

/// The content that runs, or why it cannot be told.
async fn what_runs(context: &Context, tenant: &Tenant) -> Result<Result<Value, String>, Error> {
    let root = &tenant.root_namespace;
    let sets = context.kubernetes.list_raw::<StatefulSet>(root).await?;
    let services = context.kubernetes.list_raw::<Service>(root).await?;
    Ok(recorded::content(&by_name(sets), &by_name(services), root))
}

async fn record(context: &Context, vc: &VirtualCluster, runs: &Value) -> Result<String, Error> {
    let name = &vc.spec.cluster_version_name;
    let cluster_versions = Api::<ClusterVersion>::all(context.kubernetes.client());
    let owner = context.kubernetes.get(&cluster_versions, name).await?;
    context.revisions.record(name, owner.as_ref(), runs).await
}

/// The revision of a tenant that was made here and whose status was lost: recorded from what runs, since to take what the
/// ClusterVersion says now would be an upgrade that nobody agreed to. `None` if nothing of it was made here, or not enough.
pub(super) async fn revision_of_lost_status(
    context: &Context,
    vc: &VirtualCluster,
) -> Result<Option<String>, Error> {
    let tenant = Tenant::of(vc);
    let namespaces = Api::<Namespace>::all(context.kubernetes.client());
    let namespace = context
        .kubernetes
        .get(&namespaces, &tenant.root_namespace)
        .await?;
    if namespace.is_none_or(|namespace| !render::belongs_to(&namespace, &tenant)) {
        return Ok(None);
    }
    let sets = context
        .kubernetes
        .list_in::<StatefulSet>(&tenant.root_namespace)
        .await?;
    let is_ours = |set: &StatefulSet| set.annotations().contains_key(labels::RENDERED_HASH);
    if !sets.iter().any(is_ours) {
        return Ok(None);
    }
    match what_runs(context, &tenant).await? {
        Ok(runs) => record(context, vc, &runs).await.map(Some),
        Err(_) => Ok(None),
    }
}

fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let name = |object: &Value| {
        object
            .pointer("/metadata/name")
            .and_then(Value::as_str)
            .map(ToOwned::to_owned)
    };
    objects
        .into_iter()
        .filter_map(|object| Some((name(&object)?, object)))
        .collect()
}
