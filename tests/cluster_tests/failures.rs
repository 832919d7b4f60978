//! Upgrades that cannot succeed: each says why in words a person can act on, and harms nobody else; with a ClusterVersion
//! that is put right, consent given anew repairs the tenant.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;
use vc_manager::api::virtual_cluster::HistoryEntry;

use crate::{
    control_plane::{Before, PODS, UPGRADE_EVENTS, kept, succeeded},
    support::{
        Prober, Scene, Tenant, condition, manager, restarts,
        templates::{self, Kubernetes, at},
        tenant::Usage,
    },
};

/// An image that is nowhere.
pub(crate) const NO_IMAGE: &str = "registry.k8s.io/kube-apiserver:v9.9.9";

/// A tenant whose ClusterVersion is going to be broken, as it was before.
pub(crate) struct Broken {
    tenant: Tenant,
    version: String,
    usage: Usage,
    before: Before,
}

impl Broken {
    pub(crate) async fn new(tenant: &Tenant, version: &str) -> Self {
        let usage = tenant.use_it().await;
        Self {
            usage,
            before: Before::of(tenant).await,
            tenant: tenant.clone(),
            version: version.to_owned(),
        }
    }

    /// What holds after a failure and no success. Only the newest version has series: those of the versions before
    /// are dropped.
    async fn counted(&self) {
        let series = format!("cluster_version=\"{}\"", self.version);
        assert_eq!(manager::count("clusters_upgrade_failed", &[&series]), 1);
        assert_eq!(
            manager::count("clusters_upgraded", &[&series]),
            0,
            "nothing claims success"
        );
        let etcd = ["etcd-0"].map(|name| (name, self.before.pod_uids[name].clone()));
        let pods = self.tenant.pods().await;
        for (name, uid) in etcd {
            assert_eq!(
                (pods[name].uid(), restarts(&pods[name])),
                (Some(uid), 0),
                "{name} is left alone"
            );
        }
    }

    /// Consent is given anew, and the tenant is as if nothing had been.
    async fn repaired(&self) {
        self.tenant.opt_in().await;
        self.tenant.upgraded().await;
        let edited = self
            .tenant
            .scene
            .cluster_versions()
            .get(&self.version)
            .await
            .expect("the ClusterVersion");
        succeeded(
            &self.tenant,
            edited.metadata.resource_version.as_deref(),
            &UPGRADE_EVENTS,
        )
        .await;
        kept(&self.tenant, &self.before).await;
        self.tenant.expect_usable(&self.usage).await;
        self.tenant.expect_controllers("after-the-repair").await;
    }
}

/// The upgrade to an image that does not exist has begun, beside `other`, and goes on until it fails.
pub(crate) async fn missing_image(broken: &Broken, other: &HistoryEntry) {
    let tenant = &broken.tenant;
    let object = tenant.failed(&["apiserver-0", NO_IMAGE]).await;
    assert_eq!(
        condition(&object, "Ready"),
        ("False".into(), "UpgradeFailed".into()),
        "its API is away"
    );
    let newest = tenant.newest().await;
    assert!(
        newest.started.0 < other.ended.0 && other.started.0 < newest.ended.0,
        "not beside another one"
    );
    broken.counted().await;

    tenant
        .scene
        .edit_content(&broken.version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
        })
        .await;
    tenant.scene.recorded(&broken.version).await;
    broken.repaired().await;
    tenant.expect_events(&["StuckPodDeleted"]).await;
}

/// A flag that the apiserver does not know, then one that the controller-manager does not know.
pub(crate) async fn flags(scene: Scene) {
    const FLAG: &str = "--no-such-flag";
    let version = scene.cluster_version("tenants", templates::standard()).await;
    let tenant = scene.provisioned("tenant", &version).await;
    let broken = Broken::new(&tenant, &version).await;
    scene
        .edit_content(&version, |content| {
            templates::set_flag(content, "apiServer", FLAG);
        })
        .await;
    tenant.opt_in().await;
    let object = tenant
        .failed(&["apiserver-0", "exit code 1", "unknown flag: --no-such-flag"])
        .await;
    assert_eq!(
        condition(&object, "Ready"),
        ("False".into(), "UpgradeFailed".into())
    );
    let controller_manager = tenant.pod_uids().await["controller-manager-0"].clone();
    assert_eq!(
        controller_manager, broken.before.pod_uids["controller-manager-0"],
        "it is not its turn"
    );
    broken.counted().await;

    scene
        .edit_content(&version, |content| {
            templates::unset_flag(content, "apiServer", FLAG);
            templates::set_kubernetes(content, Kubernetes::Next);
            templates::set_flag(content, "controllerManager", FLAG);
        })
        .await;
    tenant.opt_in().await;
    tenant
        .failed(&[
            "controller-manager-0",
            "exit code 1",
            "unknown flag: --no-such-flag",
        ])
        .await;
    // The API is there, whatever Ready says: that is about the controller-manager, too.
    assert_eq!(tenant.version().await, Kubernetes::Next.git_version());
    tenant.expect_usable(&broken.usage).await;
    broken.counted().await;

    scene
        .edit_content(&version, |content| {
            templates::unset_flag(content, "controllerManager", FLAG);
        })
        .await;
    scene.recorded(&version).await;
    broken.repaired().await;
    tenant.expect_events(&["StuckPodDeleted"]).await;
    tenant.delete().await;
}

/// An apiserver that starts and then gives up, as it finds no etcd. The tenant is deleted in that state.
pub(crate) async fn crash(scene: Scene) {
    let version = scene.cluster_version("tenants", templates::standard()).await;
    let tenant = scene.provisioned("tenant", &version).await;
    let broken = Broken::new(&tenant, &version).await;
    let nowhere = "--etcd-servers=https://etcd-0.etcd:9";
    scene
        .edit_content(&version, |content| {
            templates::set_flag(content, "apiServer", nowhere);
        })
        .await;
    tenant.opt_in().await;
    tenant
        .failed(&["apiserver-0", "exit code", "last said", "storage"])
        .await;
    broken.counted().await;
    tenant.delete().await;
    tenant.gone().await;
}

/// A field that may not change: nothing is written, and the API stays.
pub(crate) async fn refused(tenant: &Tenant, version: &str) {
    let scene = &tenant.scene;
    let before = Before::of(tenant).await;
    let prober = Prober::start(tenant.admin_config().await);
    scene
        .edit_content(version, |content| {
            *at(content, "/apiServer/statefulset/spec/serviceName") = json!("another");
            templates::set_flag(content, "apiServer", "--event-ttl=3h");
        })
        .await;
    tenant.opt_in().await;
    let object = tenant
        .failed(&["apiserver", "refuses", "updates to statefulset spec"])
        .await;
    let outages = prober.stop().await;
    assert!(outages.spans.is_empty(), "{outages:?}");
    assert_eq!(condition(&object, "Ready").0, "True");
    assert_eq!(tenant.pod_uids().await, before.pod_uids, "no pod is replaced");
    assert_eq!(tenant.versions().await, before.versions, "nothing is written");
    let counted = manager::count(
        "clusters_upgrade_failed",
        &[&format!("cluster_version=\"{version}\"")],
    );
    assert_eq!(counted, 1);

    scene
        .edit_content(version, |content| {
            *at(content, "/apiServer/statefulset/spec/serviceName") = json!("apiserver-svc");
        })
        .await;
    tenant.opt_in().await;
    tenant.upgraded().await;
    kept(tenant, &before).await;
    tenant.expect_pods(&PODS).await;
    let pods: BTreeMap<String, Pod> = tenant.pods().await;
    let containers = &pods["apiserver-0"].spec.as_ref().expect("a spec").containers;
    assert!(
        containers[0]
            .args
            .iter()
            .flatten()
            .any(|arg| arg == "--event-ttl=3h")
    );
}
