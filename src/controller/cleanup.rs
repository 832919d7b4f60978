//! Deletes a tenant: its root namespace, if it is provably this one's, and then the finalizer.

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{
    Context, TenantKey,
    error::Error,
    render::{self, Tenant},
    status, terminating,
    virtual_cluster::{Next, set_metadata},
};
use crate::api::{VirtualCluster, labels};

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
            } else {
                tell_what_remains(context, vc, &namespace).await?;
            }
            return Ok(Next::In(terminating::next_look(&namespace, context.now())));
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

/// Says, in the status and as an Event, why the root namespace is not gone: once for each reason.
async fn tell_what_remains(
    context: &Context,
    vc: &VirtualCluster,
    namespace: &Namespace,
) -> Result<(), Error> {
    let now = context.now();
    let Some(why) = terminating::report(namespace, now) else {
        return Ok(());
    };
    let next = status::deleting(vc, &why, now);
    if vc.status.as_ref() == Some(&next) {
        return Ok(());
    }
    status::write(&context.kubernetes, vc, next).await?;
    tracing::warn!(namespace = %namespace.name_any(), %why, "deletion waits");
    context.events.warning(vc, "DeletionWaits", "Delete", why);
    Ok(())
}
