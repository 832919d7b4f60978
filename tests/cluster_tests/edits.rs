//! Edits of a ClusterVersion that are not about what runs.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::json;
use vc_manager::api::labels;

use crate::{
    control_plane::{Before, PODS, kept},
    support::{Tenant, condition, manager, templates::at},
};

/// A new label on the ClusterVersion itself, then consent: nothing is written but the VirtualCluster.
pub(crate) async fn metadata_only(tenant: &Tenant, version: &str) {
    let scene = &tenant.scene;
    let before = Before::of(tenant).await;
    let history = tenant.get().await.status.unwrap_or_default().history;
    scene
        .edit(version, |object| {
            drop(object.labels_mut().insert("team".into(), "blue".into()));
        })
        .await;
    let edited = scene.recorded(version).await;
    tenant.opt_in().await;
    let object = tenant
        .when("done", crate::support::PATIENCE, |vc| {
            vc.labels().get(labels::CLUSTER_VERSION_APPLIED) == edited.metadata.resource_version.as_ref()
                && !vc.labels().contains_key(labels::READY_FOR_UPGRADE)
        })
        .await;
    assert_eq!(
        condition(&object, "Upgrading"),
        ("False".into(), "NothingToDo".into())
    );
    assert_eq!(
        object.status.unwrap_or_default().history,
        history,
        "nothing happened"
    );
    assert_eq!(tenant.pod_uids().await, before.pod_uids, "no pod is replaced");
    assert_eq!(tenant.versions().await, before.versions, "nothing is written");
    tenant.expect_events(&["NothingToUpgrade"]).await;
    let series = [
        format!("cluster_version=\"{version}\""),
        format!(
            "resource_version=\"{}\"",
            edited.resource_version().unwrap_or_default()
        ),
    ];
    assert_eq!(manager::count("clusters_upgraded", &[&series[0], &series[1]]), 1);
}

/// A label on the apiserver's Service. Leaves are refreshed with it, as with any upgrade, and pods replaced.
pub(crate) async fn service_only(tenant: &Tenant, version: &str) {
    let scene = &tenant.scene;
    let before = Before::of(tenant).await;
    let labels = BTreeMap::from([("exposed".to_owned(), "yes".to_owned())]);
    scene
        .edit_content(version, |content| {
            at(content, "/apiServer/service/metadata")["labels"] = json!(labels);
        })
        .await;
    tenant.opt_in().await;
    tenant.upgraded().await;
    let service = tenant
        .api::<Service>()
        .get("apiserver-svc")
        .await
        .expect("the Service");
    assert_eq!(service.labels().get("exposed").map(String::as_str), Some("yes"));
    kept(tenant, &before).await;
    tenant.expect_pods(&PODS).await;
    tenant.expect_controllers("after-the-service").await;
}
