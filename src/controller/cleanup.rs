//! Deletes a tenant: its root namespace, if it is provably this one's, and then the finalizer.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{
    Context, TenantKey,
    error::Error,
    render::{self, Tenant},
    virtual_cluster::{Next, set_metadata},
};
use crate::api::{VirtualCluster, labels};

/// How often a namespace that is on its way out is looked at.
const TERMINATING_CHECK: Duration = Duration::from_secs(2);

/// One pass for a VirtualCluster that is being deleted.
pub(super) async fn reconcile(
    context: &Context,
    key: &TenantKey,
    vc: &VirtualCluster,
) -> Result<Next, Error> {
    context.give_back_turns(key);
    if !vc
        .finalizers()
        .iter()
        .any(|finalizer| finalizer == labels::VIRTUAL_CLUSTER_FINALIZER)
    {
        return Ok(Next::Gone);
    }
    let tenant = Tenant::of(vc);
    let root = &tenant.root_namespace;
    let namespace = context
        .kubernetes
        .get(&Api::<Namespace>::all(context.kubernetes.client()), root)
        .await?;
    if let Some(namespace) = namespace {
        if render::belongs_to(&namespace, &tenant) {
            if namespace.metadata.deletion_timestamp.is_none() {
                context
                    .kubernetes
                    .delete_namespace(root, &namespace.uid().unwrap_or_default())
                    .await?;
                context.events.normal(
                    vc,
                    "Deleting",
                    "Delete",
                    format!("root namespace {root} is being deleted"),
                );
            } else if let Some(why) = remains(&namespace) {
                context.events.warning(
                    vc,
                    "DeletionWaits",
                    "Delete",
                    format!("root namespace {root} is not gone yet: {why}"),
                );
            }
            return Ok(Next::In(TERMINATING_CHECK));
        }
        let note = format!("namespace {root} is left alone: its annotations do not name this VirtualCluster");
        context.events.warning(vc, "NamespaceNotOurs", "Delete", note);
    }
    let left: Vec<_> = vc
        .finalizers()
        .iter()
        .filter(|finalizer| *finalizer != labels::VIRTUAL_CLUSTER_FINALIZER)
        .collect();
    set_metadata(context, vc, &json!({"finalizers": left})).await?;
    tracing::info!(tenant = %key, namespace = %root, "tenant deleted");
    Ok(Next::Gone)
}

/// What the namespace controller says keeps a namespace from going, beyond pods that take their time to stop.
fn remains(namespace: &Namespace) -> Option<String> {
    let conditions = namespace.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .filter(|condition| condition.status == "True" && condition.type_ != "NamespaceContentRemaining")
        .find_map(|condition| condition.message.clone())
}
