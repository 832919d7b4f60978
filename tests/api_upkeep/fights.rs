//! Nobody is fought with for ever.

use k8s_openapi::{
    api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    jiff::SignedDuration,
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use vc_manager::controller::render::Kind;

use crate::{
    scene::{ONE, Scene},
    support::{condition, eventually},
};

const SET: Kind = Kind::StatefulSet;

impl Scene {
    /// Sets the first argument of the apiserver.
    async fn meddle(&self, argument: &str) {
        let change = json!({"spec": {"template": {"spec": {"containers": [
            {"name": "apiserver", "args": [argument]},
        ]}}}});
        self.edit(SET, "apiserver", change).await;
    }

    async fn argument(&self) -> String {
        let shape = self.shape(SET, "apiserver").await.expect("it is there");
        let argument = shape.pointer("/spec/template/spec/containers/0/args/0");
        argument
            .and_then(|text| text.as_str())
            .expect("a text")
            .to_owned()
    }

    /// Four times what is changed is put back.
    async fn fight(&self, round: &str) {
        for n in 1..=4 {
            let theirs = format!("--{round}={n}");
            self.meddle(&theirs).await;
            eventually("it is put back", async || {
                (self.argument().await != theirs).then_some(())
            })
            .await;
            self.at_rest().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_give_up_is_let_alone_for_an_hour() {
    let scene = Scene::start("up-fight").await;
    let before = scene.shape(SET, "apiserver").await;
    scene.fight("first").await;
    assert_eq!(scene.shape(SET, "apiserver").await, before);
    scene.meddle("--last=1").await;
    let message = scene.says("Drifted", "True", "Contested").await;
    for words in [
        "StatefulSet apiserver",
        "spec.template.spec.containers[name=apiserver].args",
        "set by kubectl-edit",
        "put back several times",
        "Find who changes it",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
    scene.tells("Contested", &["StatefulSet apiserver"]).await;
    scene.assert_settled().await;
    assert_eq!(scene.argument().await, "--last=1");
    assert_eq!(scene.told("DriftRepaired").await.len(), 4);
    assert_eq!(scene.told("Contested").await.len(), 1, "told once");
    // It runs, if otherwise than it should.
    assert_eq!(condition(&scene.tenant().await, "Ready").status, "True");

    // Other objects are still looked after.
    let etcd = scene.shape(Kind::Service, "etcd").await;
    scene
        .edit(
            Kind::Service,
            "etcd",
            json!({"spec": {"selector": {"component-name": "decoy"}}}),
        )
        .await;
    scene.tells("DriftRepaired", &["Service etcd"]).await;
    scene.at_rest().await;
    assert_eq!(scene.shape(Kind::Service, "etcd").await, etcd);
    let manager = scene.shape(SET, "controller-manager").await;
    scene.delete(SET, "controller-manager").await;
    scene
        .tells("DriftRepaired", &["StatefulSet controller-manager was deleted"])
        .await;
    scene.at_rest().await;
    assert_eq!(scene.shape(SET, "controller-manager").await, manager);
    assert_eq!(scene.argument().await, "--last=1");
    scene.says("Drifted", "True", "Contested").await;

    // An hour after the first time.
    scene.pass(SignedDuration::from_mins(61));
    scene.poke(ONE).await;
    scene.says("Drifted", "False", "InSync").await;
    assert_eq!(scene.shape(SET, "apiserver").await, before);
    scene.assert_settled().await;
    // From then on it is as before.
    scene.pass(SignedDuration::from_mins(61));
    scene.fight("second").await;
    scene.meddle("--last=2").await;
    scene.says("Drifted", "True", "Contested").await;
    // Who comes to their senses ends it.
    scene
        .edit(
            SET,
            "apiserver",
            json!({"spec": {"template": {"spec": {"containers": [
                {"name": "apiserver", "args": ["--etcd-servers=https://etcd-0.etcd:2379"]},
            ]}}}}),
        )
        .await;
    scene.at_rest().await;
    assert_eq!(scene.shape(SET, "apiserver").await, before);
}

/// It is left deleted, too; that the tenant cannot answer then is said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_deleted_again_and_again_is_left() {
    let scene = Scene::start("up-deleter").await;
    for _ in 0..4 {
        scene.delete(SET, "apiserver").await;
        eventually("it is made anew", async || scene.shape(SET, "apiserver").await).await;
        scene.at_rest().await;
    }
    scene.delete(SET, "apiserver").await;
    let message = scene.says("Drifted", "True", "Contested").await;
    assert!(
        message.contains("StatefulSet apiserver does not exist"),
        "{message}"
    );
    scene.assert_settled().await;
    assert!(scene.shape(SET, "apiserver").await.is_none());
    let message = scene.says("Ready", "False", "NotReady").await;
    assert!(message.contains("apiserver"), "{message}");
    scene.pass(SignedDuration::from_mins(61));
    scene.poke(ONE).await;
    scene.says("Ready", "True", "Running").await;
    scene.says("Drifted", "False", "InSync").await;
}

/// Somebody who is as quick as the manager is not fought within one look, either, and does not make it write at every
/// turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quick_opponent_is_let_alone_as_well() {
    let scene = Scene::start("up-quick").await;
    let mark = scene.at_rest().await;
    // For some seconds: times in managedFields are of whole ones.
    for n in 0..100 {
        let label = json!({"metadata": {"labels": {"tier": format!("theirs-{n}")}}});
        scene.edit(SET, "apiserver", label).await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    scene.says("Drifted", "True", "Contested").await;
    scene.at_rest().await;
    let writes = scene.writes(mark);
    let of = |resource: &str| writes.iter().filter(|call| call.resource == resource).count();
    assert_eq!(of("statefulsets"), 4);
    assert_eq!(of("virtualclusters"), 1, "{writes:?}");
    assert_eq!(scene.told("Contested").await.len(), 1);
    let shape = scene.shape(SET, "apiserver").await.unwrap();
    assert_eq!(shape["labels"]["tier"], "theirs-99");
    scene.assert_settled().await;
}

/// What the API server refuses to put back is told in its words, and nothing else waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_put_back_is_told() {
    let scene = Scene::start("up-refused").await;
    // Whoever else may write, the manager may not: a policy of the super cluster says so.
    let policy: ValidatingAdmissionPolicy = serde_json::from_value(json!({
        "metadata": {"name": "up-refused"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"],
                "operations": ["CREATE", "UPDATE"], "resources": ["statefulsets"]}]},
            "validations": [{
                "expression": "!object.spec.template.spec.containers.exists(c, c.image == 'registry.example/apiserver:1')",
                "message": "this image is forbidden since yesterday",
            }],
        },
    }))
    .unwrap();
    let binding: ValidatingAdmissionPolicyBinding = serde_json::from_value(json!({
        "metadata": {"name": "up-refused"},
        "spec": {
            "policyName": "up-refused", "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.root}}},
        },
    }))
    .unwrap();
    let client = scene.scope.client.clone();
    Api::all(client.clone())
        .create(&PostParams::default(), &policy)
        .await
        .unwrap();
    Api::all(client.clone())
        .create(&PostParams::default(), &binding)
        .await
        .unwrap();
    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "apiserver", "image": image}]}}}});
    // In force once it refuses.
    eventually("the policy to be in force", async || {
        let label = Patch::Merge(json!({"metadata": {"labels": {"probe": "x"}}}));
        let dry = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        scene
            .api(SET)
            .patch("apiserver", &dry, &label)
            .await
            .is_err()
            .then_some(())
    })
    .await;
    scene.edit(SET, "apiserver", image("example.com/allowed:1")).await;
    let message = scene.says("Drifted", "True", "Refused").await;
    for words in [
        "StatefulSet apiserver",
        "image (set by kubectl-edit)",
        "this image is forbidden since yesterday",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
    scene.tells("Refused", &["forbidden since yesterday"]).await;
    scene.at_rest().await;
    assert_eq!(
        condition(&scene.tenant().await, "Ready").status,
        "True",
        "it runs"
    );
    // Each look tries it once, and no look follows from it.
    let mark = scene.manager().traffic.mark();
    scene.look().await;
    let tries = scene.writes(mark).len();
    assert_eq!(tries, 1, "{:?}", scene.writes(mark));
    assert_eq!(scene.told("Refused").await.len(), 1, "told once");
    // Others are looked after.
    scene.delete(SET, "controller-manager").await;
    scene
        .tells("DriftRepaired", &["StatefulSet controller-manager was deleted"])
        .await;
    scene.delete_secret("admin-kubeconfig").await;
    scene.tells("CertificatesReissued", &["admin-kubeconfig"]).await;

    Api::<ValidatingAdmissionPolicyBinding>::all(client)
        .delete("up-refused", &DeleteParams::default())
        .await
        .unwrap();
    eventually("it to be put back", async || {
        scene.poke(ONE).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let shape = scene.shape(SET, "apiserver").await?;
        (shape.pointer("/spec/template/spec/containers/0/image")? == "registry.example/apiserver:1")
            .then_some(())
    })
    .await;
    scene.says("Drifted", "False", "InSync").await;
    scene.at_rest().await;
    scene.assert_settled().await;
}
