//! Data that is lost is not covered up: etcd is made anew only where its data is, or where its owner accepts an empty
//! one; a root namespace never.

use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use kube::{
    Api,
    api::{DeleteParams, PostParams, PropagationPolicy},
};
use serde_json::{Value, json};
use vc_manager::{api::labels, controller::render::Kind};

use crate::{
    scene::{ONE, Scene, content},
    support::eventually,
};

const SET: Kind = Kind::StatefulSet;

/// Three members with a volume each.
fn with_volumes() -> Value {
    let mut content = content();
    let spec = &mut content["etcd"]["statefulset"]["spec"];
    spec["replicas"] = json!(3);
    spec["template"]["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "data", "mountPath": "/data"}]);
    spec["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}},
    }}]);
    content
}

impl Scene {
    /// etcd's StatefulSet is deleted, and not made anew: said with what to do about it.
    async fn loses_etcd(&self) {
        self.delete(SET, "etcd").await;
        let message = self.says("Ready", "False", "Blocked").await;
        for words in [
            &format!("StatefulSet {}/etcd does not exist", self.root),
            "is not made anew",
            "Restore",
            "tenancy.x-k8s.io/accept-empty-etcd=true",
        ] {
            assert!(message.contains(words), "{words:?} is not in {message:?}");
        }
        self.tells("Blocked", &["etcd does not exist"]).await;
        self.assert_settled().await;
        assert!(self.shape(SET, "etcd").await.is_none());
        assert_eq!(self.told("Blocked").await.len(), 1, "told once");
    }

    async fn claim(&self, name: &str) {
        let claim: PersistentVolumeClaim =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": {
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}},
            }}))
            .unwrap();
        let api = self.scope.api::<PersistentVolumeClaim>(&self.root);
        api.create(&PostParams::default(), &claim).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_without_its_data_is_not_made_anew_unless_that_is_accepted() {
    let scene = Scene::start("up-etcd").await;
    let before = scene.shape(SET, "etcd").await;
    scene.loses_etcd().await;
    // Certificates are still looked after.
    scene.delete_secret("admin-kubeconfig").await;
    scene.tells("CertificatesReissued", &["admin-kubeconfig"]).await;
    // Anything but exactly `true` accepts nothing.
    scene.accept("yes").await;
    scene.look().await;
    assert!(scene.shape(SET, "etcd").await.is_none());
    scene.accept("true").await;
    scene
        .tells("DriftRepaired", &["StatefulSet etcd was deleted"])
        .await;
    scene.says("Ready", "True", "Running").await;
    assert_eq!(scene.shape(SET, "etcd").await, before);
    scene.assert_settled().await;
}

impl Scene {
    async fn accept(&self, value: &str) {
        let note = json!({"metadata": {"annotations": {labels::ACCEPT_EMPTY_ETCD: value}}});
        self.scope.merge(ONE, &note).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_whose_volumes_are_there_is_made_anew() {
    let scene = Scene::of("up-volumes", with_volumes(), &[]).await;
    let before = scene.shape(SET, "etcd").await;
    scene.loses_etcd().await;
    // Two of three members have one; the third one's claim is of another name.
    for name in ["data-etcd-0", "data-etcd-1", "data-etcd-20"] {
        scene.claim(name).await;
    }
    scene.look().await;
    assert!(scene.shape(SET, "etcd").await.is_none());
    scene.claim("data-etcd-2").await;
    scene.poke(ONE).await;
    scene
        .tells("DriftRepaired", &["StatefulSet etcd was deleted"])
        .await;
    scene.says("Ready", "True", "Running").await;
    assert_eq!(scene.shape(SET, "etcd").await, before);
    scene.assert_settled().await;
    // With its volumes it needs nobody's consent.
    scene.delete(SET, "etcd").await;
    eventually("it is made anew", async || scene.shape(SET, "etcd").await).await;
    scene.says("Ready", "True", "Running").await;
}

/// Deleted with `--cascade=orphan`, its pods run on, and so does their data: a new one takes them up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_whose_pods_are_there_is_made_anew() {
    let scene = Scene::start("up-orphans").await;
    let before = scene.shape(SET, "etcd").await;
    let running = json!({"ready": true, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}});
    scene.driver.make_pod(&scene.root, "etcd", running).await;
    scene.at_rest().await;
    let orphan = DeleteParams {
        propagation_policy: Some(PropagationPolicy::Orphan),
        ..DeleteParams::default()
    };
    scene.api(SET).delete("etcd", &orphan).await.unwrap();
    scene
        .tells("DriftRepaired", &["StatefulSet etcd was deleted"])
        .await;
    scene.at_rest().await;
    assert_eq!(scene.shape(SET, "etcd").await, before);
    assert_eq!(scene.told("Blocked").await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_that_is_gone_is_told_and_not_made_anew() {
    let scene = Scene::start("up-gone").await;
    let namespaces = Api::<Namespace>::all(scene.scope.client.clone());
    namespaces
        .delete(&scene.root, &DeleteParams::default())
        .await
        .unwrap();
    eventually("the namespace to be gone", async || {
        namespaces
            .get_opt(&scene.root)
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
    scene.poke(ONE).await;
    let message = eventually("the condition", async || {
        let message = scene.says("Ready", "False", "Blocked").await;
        message.contains("does not exist").then_some(message)
    })
    .await;
    for words in [
        &format!("root namespace {} does not exist", scene.root),
        "delete the VirtualCluster",
        "restore the namespace",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
    scene
        .tells("Blocked", &["root namespace", "does not exist"])
        .await;
    scene.assert_settled().await;
    assert!(namespaces.get_opt(&scene.root).await.unwrap().is_none());
    // What is wrong is that, not that a Secret in it was lost, or that somebody had changed something.
    for reason in [
        "RootCALost",
        "CertificatesReissued",
        "DriftRepaired",
        "CannotApply",
        "CannotIssue",
    ] {
        assert_eq!(scene.told(reason).await, [""; 0], "{reason}");
    }

    // One of the same name that is another's is left alone.
    let other: Namespace = serde_json::from_value(json!({"metadata": {"name": scene.root}})).unwrap();
    namespaces.create(&PostParams::default(), &other).await.unwrap();
    scene.poke(ONE).await;
    eventually("the condition", async || {
        let message = scene.says("Ready", "False", "Blocked").await;
        message.contains("do not name this VirtualCluster").then_some(())
    })
    .await;
    scene.assert_settled().await;
    assert!(
        scene.scope.versions(&scene.root).await.is_empty(),
        "nothing is written into it"
    );
    // It can be deleted nevertheless.
    scene.scope.delete(ONE).await;
    assert!(namespaces.get_opt(&scene.root).await.unwrap().is_some());
}
