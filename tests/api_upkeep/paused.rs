//! `spec.paused`: nothing is put back and no upgrade begins; certificates are renewed all the same.

use k8s_openapi::jiff::SignedDuration;
use serde_json::json;
use vc_manager::{api::labels, controller::render::Kind};

use crate::{
    scene::{LEAVES, ONE, Scene},
    support::{condition, templates, tuple},
};

const SET: Kind = Kind::StatefulSet;

impl Scene {
    async fn pause(&self, paused: bool) {
        let mark = self.manager().traffic.mark();
        self.scope.merge(ONE, &json!({"spec": {"paused": paused}})).await;
        self.looked_into(&self.root, mark).await;
        self.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_put_back_but_certificates_are_renewed() {
    let scene = Scene::start("up-paused").await;
    let before = scene.shape(SET, "apiserver").await.unwrap();
    scene.pause(true).await;
    let mark = scene.manager().traffic.mark();
    scene
        .edit(
            SET,
            "apiserver",
            json!({"spec": {"template": {"spec": {"containers": [
                {"name": "apiserver", "image": "example.com/debug:1"},
            ]}}}}),
        )
        .await;
    scene.delete(Kind::Service, "etcd").await;
    scene.looked_into(&scene.root, mark).await;
    let message = scene.says("Drifted", "True", "Paused").await;
    scene.at_rest().await;
    for words in [
        "StatefulSet apiserver: spec.template.spec.containers[name=apiserver].image (set by kubectl-edit)",
        "Service etcd does not exist",
        "spec.paused",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
    assert!(scene.shape(Kind::Service, "etcd").await.is_none());
    let changed = scene.shape(SET, "apiserver").await.unwrap();
    assert_ne!(changed, before);
    assert_eq!(scene.told("DriftRepaired").await, [""; 0]);
    scene.assert_settled().await;

    // Most of a year later.
    let secrets = scene.scope.secrets(&scene.root).await;
    scene.pass(SignedDuration::from_hours(24 * 300));
    scene.look().await;
    let renewed = scene.scope.secrets(&scene.root).await;
    for (name, data) in &renewed {
        assert_eq!(data != &secrets[name], LEAVES.contains(&name.as_str()), "{name}");
    }
    scene.assert_certified().await;
    let note = scene.tells("CertificatesRenewed", &["renewed"]).await;
    for name in LEAVES {
        assert!(note.contains(name), "{name} is not in {note:?}");
    }
    // What was changed by hand has survived the restart that this took.
    let image = |shape: &serde_json::Value| shape.pointer("/spec/template/spec/containers/0/image").cloned();
    let restarted = scene.shape(SET, "apiserver").await.unwrap();
    assert_eq!(image(&restarted), image(&changed));
    scene.says("Drifted", "True", "Paused").await;
    assert_eq!(scene.told("DriftRepaired").await, [""; 0]);
    scene.assert_settled().await;

    scene.pause(false).await;
    scene.says("Drifted", "False", "InSync").await;
    scene
        .tells("DriftRepaired", &["StatefulSet apiserver", "image"])
        .await;
    scene.tells("DriftRepaired", &["Service etcd was deleted"]).await;
    let after = scene.shape(SET, "apiserver").await.unwrap();
    assert_eq!(image(&after), image(&before));
    scene.assert_certified().await;
    scene.says("Ready", "True", "Running").await;
    scene.assert_settled().await;
}

/// A tenant that lacks a part of itself is not ready, paused or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_during_a_pause_shows_in_ready() {
    let scene = Scene::start("up-missing").await;
    scene.pause(true).await;
    for (kind, name) in [
        (SET, "etcd"),
        (SET, "apiserver"),
        (SET, "controller-manager"),
        (Kind::Service, "apiserver-svc"),
    ] {
        let there = scene.api(kind).get(name).await.unwrap();
        let rv = there.metadata.resource_version.clone();
        scene.delete(kind, name).await;
        let message = scene.says("Ready", "False", "NotReady").await;
        assert!(
            message.contains(&format!("{kind:?} {name}, which does not exist")),
            "{message}"
        );
        // Restored by a person, as it was.
        let mut restored = there.clone();
        restored.metadata.resource_version = None;
        restored.metadata.uid = None;
        let made = scene
            .api(kind)
            .create(&kube::api::PostParams::default(), &restored)
            .await;
        assert_ne!(made.unwrap().metadata.resource_version, rv);
        scene.says("Ready", "True", "Running").await;
    }
    assert_eq!(scene.told("DriftRepaired").await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_upgrade_begins_before_the_pause_ends() {
    let scene = Scene::start("up-held").await;
    let pin = scene.tenant().await.pin().unwrap().to_owned();
    scene.pause(true).await;
    scene.scope.edit(|content| templates::verbosity(content, 7)).await;
    scene.scope.opt_in(ONE).await;
    let message = scene.says("Upgrading", "False", "Waiting").await;
    assert!(message.contains("spec.paused"), "{message}");
    let before = scene.scope.versions(&scene.root).await;
    scene.assert_settled().await;
    assert_eq!(scene.scope.versions(&scene.root).await, before);
    let tenant = scene.tenant().await;
    assert_eq!(tenant.pin(), Some(pin.as_str()));
    assert!(
        tenant.label(labels::READY_FOR_UPGRADE).is_some(),
        "the consent stands"
    );
    assert!(tenant.status.unwrap().history.is_empty());

    scene.scope.merge(ONE, &json!({"spec": {"paused": false}})).await;
    let upgraded = scene
        .scope
        .ended_with(ONE, "TenantControlPlaneUpgradeCompleted")
        .await;
    assert_ne!(upgraded.pin(), Some(pin.as_str()), "{:?}", tuple(&upgraded));
    assert_eq!(
        condition(&upgraded, "Upgrading").reason.as_deref(),
        Some("Succeeded")
    );
    scene.at_rest().await;
    scene.assert_settled().await;

    // One that is under way when the pause begins is not left half done.
    scene.driver.hold(ONE, "apiserver");
    scene.scope.edit(|content| templates::verbosity(content, 8)).await;
    scene.scope.opt_in(ONE).await;
    scene
        .scope
        .when(ONE, "upgrading", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.upgrade.is_some())
        })
        .await;
    scene.scope.merge(ONE, &json!({"spec": {"paused": true}})).await;
    scene.driver.release(ONE, "apiserver");
    let upgraded = scene
        .scope
        .when(ONE, "upgraded twice", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.history.len() == 2)
        })
        .await;
    assert_eq!(tuple(&upgraded).2, "TenantControlPlaneUpgradeCompleted");
}
