//! Reconciles a VirtualCluster: which of provisioning, upgrading and deleting is its business now.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kube::{Api, ResourceExt as _, core::DeserializeGuard, runtime::controller::Action};
use serde_json::json;

use super::{
    Context, TenantKey, cleanup,
    error::Error,
    kubernetes::unchanged_since,
    provisioning, status, upgrade,
    upkeep::{self, Kept},
};
use crate::{
    api::{VirtualCluster, labels, root_namespace, virtual_cluster::phase},
    features::Feature,
};

/// While a tenant waits for something a watch will tell, it is looked at again this often all the same.
pub(super) const BACKSTOP: Duration = Duration::from_secs(20);
/// How soon something is looked at again that no watch tells.
pub(super) const SOON: Duration = Duration::from_millis(500);

/// One pass. What decides is read fresh from the API server; `object` only says which one to look at.
pub(super) async fn reconcile(
    object: Arc<DeserializeGuard<VirtualCluster>>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let key = TenantKey {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
    };
    let api = Api::<VirtualCluster>::namespaced(context.kubernetes.client(), &key.namespace);
    let Some(vc) = context.kubernetes.get(&api, &key.name).await? else {
        context.forget(&key);
        return Ok(Action::await_change());
    };
    context.tenants.insert(root_namespace::of(&vc), key.clone());
    let result = dispatch(&context, &key, vc).await;
    if let Ok(Next::Gone) = &result {
        context.forget(&key);
    }
    result.map(|next| match next {
        Next::Gone | Next::Nothing => Action::await_change(),
        Next::In(delay) => Action::requeue(super::run::jittered(delay)),
    })
}

/// When to look at a tenant again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// When something changes.
    Nothing,
    /// After this long, if nothing changes before.
    In(Duration),
    /// Never: it is gone.
    Gone,
}

async fn dispatch(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Next, Error> {
    if vc.metadata.deletion_timestamp.is_some() {
        return cleanup::reconcile(context, key, &vc).await;
    }
    let vc = ensure_finalizer(context, vc).await?;
    match vc.phase() {
        "" | phase::PENDING | phase::ERROR => Box::pin(provisioning::reconcile(context, key, vc)).await,
        phase::RUNNING => {
            context.starting.give_back(key, Instant::now());
            // One that is under way was agreed to while the gate was on, and is not left half done.
            if vc.status.as_ref().is_some_and(|status| status.upgrade.is_some()) {
                return Box::pin(upgrade::reconcile(context, key, vc)).await;
            }
            run_on(context, key, vc).await
        }
        // Nobody but a person writes another phase; the Go manager failed on it for ever.
        other => {
            context.give_back_turns(key);
            let note = format!(
                "phase {other:?} is not known to this manager; set status.phase to Running or Pending"
            );
            context.events.warning(&vc, "UnknownPhase", "Reconcile", note);
            Ok(Next::Nothing)
        }
    }
}

/// A tenant that runs is looked after, and upgraded if its owner agreed.
async fn run_on(context: &Context, key: &TenantKey, vc: VirtualCluster) -> Result<Next, Error> {
    let gate = context
        .config
        .features
        .enabled(Feature::ClusterVersionPartialUpgrade);
    let Kept { vc, next, at_rest } = Box::pin(upkeep::reconcile(context, key, vc)).await?;
    if !(gate && vc.opted_in() && at_rest) {
        context.upgrading.give_back(key, Instant::now());
    } else if vc.spec.paused {
        context.upgrading.give_back(key, Instant::now());
        let waits = status::upgrade_waits(&vc, "spec.paused to be false", context.now());
        status::write(&context.kubernetes, &vc, waits).await?;
    } else {
        return Box::pin(upgrade::reconcile(context, key, vc)).await;
    }
    // The manager ended, or met a conflict, between the last two writes of provisioning. What another manager left is not
    // touched.
    if gate && !vc.opted_in() && !vc.is_adopted() && vc.label(labels::CLUSTER_VERSION_APPLIED).is_none() {
        provisioning::record_applied(context, &vc).await?;
    }
    Ok(next)
}

async fn ensure_finalizer(context: &Context, vc: VirtualCluster) -> Result<VirtualCluster, Error> {
    let mut finalizers = vc.finalizers().to_vec();
    if finalizers
        .iter()
        .any(|finalizer| finalizer == labels::VIRTUAL_CLUSTER_FINALIZER)
    {
        return Ok(vc);
    }
    finalizers.push(labels::VIRTUAL_CLUSTER_FINALIZER.into());
    set_metadata(context, &vc, &json!({"finalizers": finalizers})).await
}

/// Merges `change` into the metadata of `vc`; a conflict if anyone wrote it since it was read.
pub(super) async fn set_metadata(
    context: &Context,
    vc: &VirtualCluster,
    change: &serde_json::Value,
) -> Result<VirtualCluster, Error> {
    let api =
        Api::<VirtualCluster>::namespaced(context.kubernetes.client(), &vc.namespace().unwrap_or_default());
    let mut metadata = change.clone();
    metadata["resourceVersion"] = unchanged_since(&vc.metadata);
    context
        .kubernetes
        .merge(&api, &vc.name_any(), &json!({"metadata": metadata}))
        .await
}
