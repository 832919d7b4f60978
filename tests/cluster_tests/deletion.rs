//! Tenants and ClusterVersions that are deleted.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::DeleteParams};
use vc_manager::api::labels;

use crate::support::{PATIENCE, Scene, Tenant, templates, until};

/// A ClusterVersion that is deleted while `tenants` use it stays until they are gone.
pub(crate) async fn in_use(version: &str, tenants: [&Tenant; 3]) {
    let scene = &tenants[0].scene;
    delete_version(scene, version).await;
    still_there(scene, version).await;
    for tenant in tenants {
        tenant.delete().await;
    }
    futures::future::join_all(tenants.map(Tenant::gone)).await;
    gone(scene, version).await;
}

/// A tenant that is deleted while it is being provisioned, from a ClusterVersion with which it would never run.
pub(crate) async fn before_it_ever_ran(scene: Scene) {
    let mut content = templates::standard();
    *templates::image(&mut content, "etcd") = "registry.k8s.io/etcd:v9.9.9".into();
    let version = scene.cluster_version("tenants", content).await;
    let tenant = scene.tenant("tenant", &version).await;
    until("its first pod", PATIENCE, async || {
        let pods = tenant
            .api::<Pod>()
            .get_opt("etcd-0")
            .await
            .map_err(|error| error.to_string())?;
        pods.map(|_| ()).ok_or_else(|| "no pod".to_owned())
    })
    .await;
    assert_eq!(tenant.get().await.phase(), "Pending");
    delete_version(&scene, &version).await;
    still_there(&scene, &version).await;
    tenant.delete().await;
    tenant.gone().await;
    gone(&scene, &version).await;
}

async fn delete_version(scene: &Scene, version: &str) {
    scene
        .cluster_versions()
        .delete(version, &DeleteParams::default())
        .await
        .expect("it may be deleted");
}

async fn still_there(scene: &Scene, version: &str) {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let object = scene
        .cluster_versions()
        .get(version)
        .await
        .expect("it stays while it is used");
    assert!(object.metadata.deletion_timestamp.is_some());
    assert_eq!(object.finalizers(), [labels::CLUSTER_VERSION_FINALIZER]);
}

async fn gone(scene: &Scene, version: &str) {
    until(
        "the ClusterVersion to be gone",
        Duration::from_secs(30),
        async || {
            let left = scene
                .cluster_versions()
                .get_opt(version)
                .await
                .expect("an answer");
            left.map_or(Ok(()), |object| Err(format!("{:?}", object.metadata)))
        },
    )
    .await;
}
