//! Reconciles a ClusterVersion: records its content as a revision, keeps its finalizer while tenants use it.
//! It touches no tenant.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kube::{Api, ResourceExt as _, core::DeserializeGuard, runtime::controller::Action};
use serde_json::json;

use super::{
    Context,
    error::Error,
    kubernetes::unchanged_since,
    revision,
    run::{jittered, readable_tenants},
};
use crate::api::{ClusterVersion, VirtualCluster, labels};

/// How often a ClusterVersion that is being deleted looks whether tenants still use it.
const IN_USE_CHECK: Duration = Duration::from_secs(10);

/// One pass.
pub(super) async fn reconcile(
    object: Arc<DeserializeGuard<ClusterVersion>>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let api = Api::<ClusterVersion>::all(context.kubernetes.client());
    let name = object.name_any();
    let Some(cluster_version) = context.kubernetes.get(&api, &name).await? else {
        return Ok(Action::await_change());
    };
    let finalizers = cluster_version.finalizers().to_vec();
    let ours = finalizers
        .iter()
        .any(|finalizer| finalizer == labels::CLUSTER_VERSION_FINALIZER);

    if cluster_version.metadata.deletion_timestamp.is_some() {
        if !ours {
            return Ok(Action::await_change());
        }
        let (users, broken) = users(&context, &name).await?;
        if !users.is_empty() || broken > 0 {
            let shown: Vec<_> = users.iter().take(5).map(VirtualCluster::name_any).collect();
            tracing::info!(cluster_version = %name, tenants = users.len(), first = ?shown, "deletion waits: tenants still use it");
            return Ok(Action::requeue(jittered(IN_USE_CHECK)));
        }
        let left: Vec<_> = finalizers
            .iter()
            .filter(|finalizer| *finalizer != labels::CLUSTER_VERSION_FINALIZER)
            .collect();
        set_finalizers(&context, &api, &cluster_version, &json!(left)).await?;
        context.metrics.drop_superseded(&name, &[]);
        return Ok(Action::await_change());
    }

    let mut cluster_version = cluster_version;
    if !ours {
        let mut all = finalizers;
        all.push(labels::CLUSTER_VERSION_FINALIZER.into());
        cluster_version = set_finalizers(&context, &api, &cluster_version, &json!(all)).await?;
    }
    let revision = context.revisions.ensure(&cluster_version).await?;
    let status = cluster_version.status.clone().unwrap_or_default();
    let is_new = status.revision.as_deref() != Some(revision.as_str());
    if is_new || status.observed_generation != cluster_version.metadata.generation {
        context
            .kubernetes
            .merge_status(&api, &name, &revision::status_patch(&cluster_version, &revision))
            .await?;
    }
    if is_new {
        let mut used = BTreeSet::new();
        let mut applied: Vec<_> = cluster_version.resource_version().into_iter().collect();
        let (users, broken) = users(&context, &name).await?;
        for vc in users {
            applied.extend(vc.label(labels::CLUSTER_VERSION_APPLIED).map(ToOwned::to_owned));
            let status = vc.status.unwrap_or_default();
            let pins = status.revision.unwrap_or_default();
            used.extend(
                [pins.current, pins.target, pins.last_good, pins.etcd]
                    .into_iter()
                    .flatten(),
            );
        }
        context.metrics.drop_superseded(&name, &applied);
        if broken == 0 {
            context.revisions.collect(&cluster_version, &used).await?;
        }
    }
    Ok(Action::await_change())
}

/// The tenants of ClusterVersion `name`, and how many there are that cannot be read and may be of it, too.
async fn users(context: &Context, name: &str) -> Result<(Vec<VirtualCluster>, usize), Error> {
    let (mut all, broken) = readable_tenants(&context.kubernetes).await?;
    all.retain(|vc| vc.spec.cluster_version_name == name);
    Ok((all, broken))
}

async fn set_finalizers(
    context: &Context,
    api: &Api<ClusterVersion>,
    cluster_version: &ClusterVersion,
    finalizers: &serde_json::Value,
) -> Result<ClusterVersion, Error> {
    let patch = json!({"metadata": {
        "resourceVersion": unchanged_since(&cluster_version.metadata),
        "finalizers": finalizers,
    }});
    context
        .kubernetes
        .merge(api, &cluster_version.name_any(), &patch)
        .await
}
