//! The rights of the manifest are enough, and what is missing without them is said.

use std::fs;
use std::path::Path;

use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::Api;
use kube::api::PostParams;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::scene::Scene;

/// The only object of a kind in the manifest.
fn object<T: DeserializeOwned>(kind: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/vc-manager.yaml");
    let text = fs::read_to_string(path).unwrap();
    let mut objects = text
        .split("\n---\n")
        .map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    let object = objects.find(|object| object["kind"] == kind).unwrap();
    serde_json::from_value(object).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_of_the_manifest_are_enough() {
    let scene = Scene::with_configurations("rights").await;
    let kubeconfig = scene.server.kubeconfig("vc-manager", None);
    let mut replica = scene.replica_as("a", &kubeconfig, &[]);
    replica
        .says("cannot get resource \"validatingwebhookconfigurations\"")
        .await;
    assert!(!replica.is_ready("/webhook-certificate").await);

    let params = PostParams::default();
    let subject = json!([{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "vc-manager"}]);
    let role = object::<ClusterRole>("ClusterRole");
    Api::all(scene.client.clone())
        .create(&params, &role)
        .await
        .unwrap();
    let mut role = object::<Role>("Role");
    role.metadata.namespace = Some(scene.namespace.clone());
    let namespaced = Api::namespaced(scene.client.clone(), &scene.namespace);
    namespaced.create(&params, &role).await.unwrap();
    let mut binding = object::<ClusterRoleBinding>("ClusterRoleBinding");
    binding.subjects = serde_json::from_value(subject.clone()).unwrap();
    Api::all(scene.client.clone())
        .create(&params, &binding)
        .await
        .unwrap();
    let mut binding = object::<RoleBinding>("RoleBinding");
    binding.metadata.namespace = Some(scene.namespace.clone());
    binding.subjects = serde_json::from_value(subject).unwrap();
    let namespaced = Api::namespaced(scene.client.clone(), &scene.namespace);
    namespaced.create(&params, &binding).await.unwrap();

    replica.ready().await;
    scene.is_published().await;
    // A watch that was refused before works by now as well: what is written over comes back.
    replica.says("webhook certificates: works again").await;
    let forced = json!({"data": {"tls.key": ""}});
    let (old, _) = scene.stored().await;
    scene
        .merge(&scene.secrets(), vc_manager::server::shared_ca::SECRET, &forced)
        .await;
    super::support::eventually("a new CA", async || (scene.stored().await.0 != old).then_some(())).await;
    scene.is_published().await;
}
