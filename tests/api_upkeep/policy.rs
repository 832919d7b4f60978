//! `spec.upgradePolicy.certificates`, and that etcd stays as it was made whatever a new revision says.

use std::collections::BTreeMap;

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};
use vc_manager::{controller::render::Kind, pki::CertificateInfo};

use crate::{
    scene::{LEAVES, ONE, Scene, content},
    support::{eventually, templates},
};

const SET: Kind = Kind::StatefulSet;

fn with_policy(certificates: &str) -> Value {
    let mut content = content();
    content["upgradePolicy"] = json!({"certificates": certificates});
    content
}

/// Names of what differs.
fn differing<K: PartialEq>(before: &BTreeMap<String, K>, after: &BTreeMap<String, K>) -> Vec<String> {
    let names = after
        .iter()
        .filter(|(name, value)| before.get(*name) != Some(value));
    names.map(|(name, _)| name.clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_needed_an_upgrade_of_the_service_restarts_nothing() {
    let scene = Scene::of("up-needed", with_policy("IfNeeded"), &[]).await;
    let (sets, secrets) = (scene.generations().await, scene.scope.secrets(&scene.root).await);
    let versions = scene.scope.versions(&scene.root).await;
    scene
        .scope
        .edit(|content| content["apiServer"]["service"]["spec"]["sessionAffinity"] = json!("ClientIP"))
        .await;
    scene.scope.upgrade(ONE).await;
    scene.at_rest().await;
    assert_eq!(scene.generations().await, sets);
    assert_eq!(scene.scope.secrets(&scene.root).await, secrets);
    assert_eq!(
        differing(&versions, &scene.scope.versions(&scene.root).await),
        ["Service/apiserver-svc"]
    );
    let service = scene.shape(Kind::Service, "apiserver-svc").await.unwrap();
    assert_eq!(service["spec"]["sessionAffinity"], "ClientIP");
    scene.assert_settled().await;

    // Once that is not asked for any more, the next one refreshes what upgrades have always refreshed.
    scene
        .scope
        .edit(|content| {
            content["upgradePolicy"] = json!({"certificates": "Always"});
            content["apiServer"]["service"]["spec"]["sessionAffinity"] = json!("None");
        })
        .await;
    scene.scope.upgrade(ONE).await;
    scene.at_rest().await;
    let refreshed = scene.scope.secrets(&scene.root).await;
    let expected: Vec<_> = refreshed
        .keys()
        .filter(|name| LEAVES.contains(&name.as_str()) && *name != "etcd-ca")
        .cloned()
        .collect();
    assert_eq!(differing(&secrets, &refreshed), expected);
    assert_eq!(
        differing(&sets, &scene.generations().await),
        ["apiserver", "controller-manager"]
    );
    scene.assert_certified().await;
    scene.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_policy_an_upgrade_refreshes_certificates() {
    let scene = Scene::start("up-always").await;
    let (sets, secrets) = (scene.generations().await, scene.scope.secrets(&scene.root).await);
    scene
        .scope
        .edit(|content| content["apiServer"]["service"]["spec"]["sessionAffinity"] = json!("ClientIP"))
        .await;
    scene.scope.upgrade(ONE).await;
    scene.at_rest().await;
    let refreshed = differing(&secrets, &scene.scope.secrets(&scene.root).await);
    assert_eq!(
        refreshed,
        [
            "admin-kubeconfig",
            "apiserver-ca",
            "controller-manager-kubeconfig",
            "front-proxy-ca"
        ]
    );
    assert_eq!(
        differing(&sets, &scene.generations().await),
        ["apiserver", "controller-manager"]
    );
    scene.assert_certified().await;
}

/// A leaf that is due when the upgrade begins, and one that is damaged in the middle of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_needed_only_what_is_due_is_refreshed() {
    let scene = Scene::of("up-due", with_policy("IfNeeded"), &[]).await;
    // Half a year later one of them is lost, and so younger than the others from then on.
    scene.pass(SignedDuration::from_hours(24 * 180));
    scene.delete_secret("front-proxy-ca").await;
    scene.tells("CertificatesReissued", &["front-proxy-ca"]).await;
    scene.at_rest().await;
    let secrets = scene.scope.secrets(&scene.root).await;
    scene.scope.edit(|content| templates::verbosity(content, 3)).await;
    // When the others are due, it is not.
    scene.pass(SignedDuration::from_hours(24 * 120));
    scene.scope.upgrade(ONE).await;
    scene.at_rest().await;
    let mut refreshed = scene.scope.secrets(&scene.root).await;
    assert_eq!(
        differing(&secrets, &refreshed),
        [
            "admin-kubeconfig",
            "apiserver-ca",
            "controller-manager-kubeconfig",
            "etcd-ca"
        ]
    );
    scene.assert_certified().await;
    scene.assert_settled().await;

    // In the middle of an upgrade.
    scene.driver.hold(ONE, "apiserver");
    scene.scope.edit(|content| templates::verbosity(content, 4)).await;
    scene.scope.opt_in(ONE).await;
    eventually("the new apiserver", async || {
        let set = scene.shape(SET, "apiserver").await?;
        let args = set.pointer("/spec/template/spec/containers/0/args/0")?.clone();
        (args == "-v=4").then_some(())
    })
    .await;
    assert_eq!(
        differing(&refreshed, &scene.scope.secrets(&scene.root).await),
        [""; 0]
    );
    let garbage = BTreeMap::from([("tls.crt".to_owned(), "garbage".to_owned())]);
    scene.set_data("apiserver-ca", "meddler", &garbage).await;
    refreshed.insert("apiserver-ca".into(), garbage);
    eventually("a good certificate", async || {
        let pem = scene.scope.secrets(&scene.root).await["apiserver-ca"]["tls.crt"].clone();
        CertificateInfo::parse(&pem).ok()
    })
    .await;
    scene.driver.release(ONE, "apiserver");
    scene
        .scope
        .ended_with(ONE, "TenantControlPlaneUpgradeCompleted")
        .await;
    scene.at_rest().await;
    let after = scene.scope.secrets(&scene.root).await;
    assert_eq!(differing(&refreshed, &after), ["apiserver-ca"]);
    let certificate = CertificateInfo::parse(&after["apiserver-ca"]["tls.crt"]).unwrap();
    assert!(certificate.matches_key(&after["apiserver-ca"]["tls.key"]));
    scene.assert_settled().await;
}

/// A certificate that the apiserver took up while it ran is no reason for an upgrade to restart it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_needed_an_upgrade_does_not_restart_for_what_was_renewed_before() {
    let mut scene = Scene::of("up-reloaded", with_policy("IfNeeded"), &[]).await;
    let carried = async |scene: &Scene| {
        let set = scene.shape(SET, "apiserver").await.unwrap();
        set.pointer("/spec/template/metadata/annotations/apiserver-ca-hash")
            .cloned()
    };
    let (before, sets) = (carried(&scene).await, scene.generations().await);
    // One that asks its tenants relies on them to take up what they can. (None answers here.)
    scene.restart_manager_with(&["--tenant-probe=true"]).await;
    let secrets = scene.scope.secrets(&scene.root).await;
    scene.pass(SignedDuration::from_hours(24 * 300));
    scene.poke(ONE).await;
    scene.tells("CertificatesRenewed", &LEAVES).await;
    scene.says("Ready", "False", "NotReady").await;
    scene.restart_manager_with(&[]).await;
    scene.says("Ready", "True", "Running").await;
    scene.at_rest().await;
    let renewed = scene.scope.secrets(&scene.root).await;
    assert_eq!(differing(&secrets, &renewed).len(), LEAVES.len());
    assert_eq!(
        differing(&sets, &scene.generations().await),
        ["controller-manager"]
    );
    assert_eq!(carried(&scene).await, before);
    scene.assert_settled().await;

    let sets = scene.generations().await;
    scene
        .scope
        .edit(|content| content["apiServer"]["service"]["spec"]["sessionAffinity"] = json!("ClientIP"))
        .await;
    scene.scope.upgrade(ONE).await;
    scene.at_rest().await;
    assert_eq!(scene.generations().await, sets);
    assert_eq!(scene.scope.secrets(&scene.root).await, renewed);
    scene.assert_settled().await;
    // One that replaces the pods anyway brings the hash up to date.
    scene
        .edit(
            SET,
            "apiserver",
            json!({"spec": {"template": {"metadata": {"annotations": {"example.com/scrape": "false"}}}}}),
        )
        .await;
    scene.tells("DriftRepaired", &["StatefulSet apiserver"]).await;
    scene.at_rest().await;
    scene.assert_certified().await;
    scene.assert_settled().await;
}

/// What a new revision says of etcd is for tenants to come: neither an upgrade nor the upkeep after it touches etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_stays_as_it_was_made() {
    let mut scene = Scene::start("up-same-etcd").await;
    let made = scene.tenant().await.pin().unwrap().to_owned();
    let before = [
        scene.shape(SET, "etcd").await,
        scene.shape(Kind::Service, "etcd").await,
    ];
    let versions = scene.scope.versions(&scene.root).await;
    let etcd = ["StatefulSet/etcd", "Service/etcd", "Secret/etcd-ca"].map(str::to_owned);
    let same = |now: &BTreeMap<String, String>| etcd.iter().all(|name| now[name] == versions[name]);
    scene
        .scope
        .edit(|content| {
            templates::verbosity(content, 2);
            let set = &mut content["etcd"]["statefulset"]["spec"];
            set["replicas"] = json!(3);
            set["template"]["spec"]["containers"][0]["image"] = json!("registry.example/etcd:2");
            content["etcd"]["service"]["metadata"]["labels"] = json!({"new": "label"});
            content["etcd"]["service"]["metadata"]["name"] = json!("etcd-peers");
            set_service_name(content, "etcd-peers");
        })
        .await;
    scene.look().await;
    assert!(
        same(&scene.scope.versions(&scene.root).await),
        "an edit reaches nobody"
    );
    let upgraded = scene.scope.upgrade(ONE).await;
    let revision = upgraded.status.unwrap().revision.unwrap();
    assert_ne!(revision.current.as_deref(), Some(made.as_str()));
    assert_eq!(revision.etcd.as_deref(), Some(made.as_str()));
    scene.assert_settled().await;
    assert!(
        same(&scene.scope.versions(&scene.root).await),
        "nor does an upgrade"
    );

    // Upkeep afterwards: it is put back to what it was made from, and its certificate is for the member it has.
    scene
        .edit(SET, "etcd", json!({"metadata": {"labels": {"tier": "other"}}}))
        .await;
    scene
        .tells("DriftRepaired", &["StatefulSet etcd: metadata.labels.tier"])
        .await;
    scene.delete(Kind::Service, "etcd").await;
    scene.tells("DriftRepaired", &["Service etcd was deleted"]).await;
    scene.delete_secret("etcd-ca").await;
    scene.tells("CertificatesReissued", &["etcd-ca"]).await;
    scene.at_rest().await;
    let after = [
        scene.shape(SET, "etcd").await,
        scene.shape(Kind::Service, "etcd").await,
    ];
    assert_eq!(after, before);
    let names = etcd_names(&scene).await;
    assert!(names.iter().any(|name| name == "etcd-0.etcd"), "{names:?}");
    assert!(
        !names
            .iter()
            .any(|name| name.starts_with("etcd-1") || name.contains("peers")),
        "{names:?}"
    );
    scene.assert_certified().await;
    scene.assert_settled().await;

    // Another upgrade, and a manager that knows of all this only what is written.
    scene.scope.edit(|content| templates::verbosity(content, 3)).await;
    scene.restart_manager().await;
    let upgraded = scene.scope.upgrade(ONE).await;
    let revision = upgraded.status.unwrap().revision.unwrap();
    assert_eq!(revision.etcd.as_deref(), Some(made.as_str()));
    scene.pass(SignedDuration::from_hours(24 * 300));
    scene.look().await;
    scene.assert_certified().await;
    assert_eq!(etcd_names(&scene).await, names);
    let last = [
        scene.shape(SET, "etcd").await,
        scene.shape(Kind::Service, "etcd").await,
    ];
    assert_eq!(last, before);

    // A tenant that is made now is made from what is said now.
    scene.scope.provision("two").await;
    let two = scene.scope.tenant("two").await;
    let root = crate::support::root_of(&two);
    let set: k8s_openapi::api::apps::v1::StatefulSet = scene.scope.get(&root, "etcd").await;
    assert_eq!(set.spec.unwrap().replicas, Some(3));
    assert_eq!(two.status.unwrap().revision.unwrap().etcd, None);
}

fn set_service_name(content: &mut Value, name: &str) {
    content["etcd"]["statefulset"]["spec"]["serviceName"] = json!(name);
}

async fn etcd_names(scene: &Scene) -> Vec<String> {
    let pem = scene.scope.secrets(&scene.root).await["etcd-ca"]["tls.crt"].clone();
    CertificateInfo::parse(&pem).unwrap().dns_names
}
