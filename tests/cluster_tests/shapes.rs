//! Control planes of other shapes than one of each behind a ClusterIP.

use std::process::Command;

use kube::ResourceExt as _;
use serde_json::json;

use crate::{
    control_plane::{Before, PODS, kept},
    support::{
        Scene, cluster,
        templates::{self, Kubernetes, at},
    },
};

/// No controller-manager: its step is left out, when provisioning and when upgrading.
pub(crate) async fn without_controller_manager(scene: Scene) {
    const PODS: [&str; 2] = ["apiserver-0", "etcd-0"];
    let mut content = templates::standard();
    content
        .as_object_mut()
        .expect("an object")
        .remove("controllerManager");
    let version = scene.cluster_version("tenants", content).await;
    let tenant = scene.provisioned("tenant", &version).await;
    tenant.expect_pods(&PODS).await;
    let usage = tenant.use_it().await;
    let before = Before::of(&tenant).await;
    scene
        .edit_content(&version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
        })
        .await;
    tenant.opt_in().await;
    tenant.upgraded().await;
    assert_eq!(tenant.version().await, Kubernetes::Next.git_version());
    tenant.expect_pods(&PODS).await;
    kept(&tenant, &before).await;
    tenant.expect_usable(&usage).await;
    tenant.delete().await;
}

/// Three members of etcd: all of them serve, and an upgrade leaves all of them alone.
pub(crate) async fn three_members(scene: Scene) {
    const PODS: [&str; 5] = [
        "apiserver-0",
        "controller-manager-0",
        "etcd-0",
        "etcd-1",
        "etcd-2",
    ];
    let version = scene
        .cluster_version("tenants", templates::with_etcd_members(3))
        .await;
    let tenant = scene.provisioned("tenant", &version).await;
    tenant.expect_pods(&PODS).await;
    let usage = tenant.use_it().await;
    let before = Before::of(&tenant).await;
    let root = tenant.root.clone();
    let healthy = move || healthy_members(&root);
    assert_eq!(
        tokio::task::spawn_blocking(healthy.clone())
            .await
            .expect("kubectl"),
        3
    );

    scene
        .edit_content(&version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
        })
        .await;
    tenant.opt_in().await;
    tenant.upgraded().await;
    assert_eq!(tenant.version().await, Kubernetes::Next.git_version());
    tenant.expect_pods(&PODS).await;
    kept(&tenant, &before).await;
    tenant.expect_usable(&usage).await;
    assert_eq!(tokio::task::spawn_blocking(healthy).await.expect("kubectl"), 3);
    tenant.delete().await;
}

/// How many members answer, as etcd's own client in one of their pods sees it.
fn healthy_members(root: &str) -> usize {
    let kubectl = std::env::var_os("VCM_KUBECTL").unwrap_or_else(|| "kubectl".into());
    let output = Command::new(kubectl)
        .arg("--kubeconfig")
        .arg(cluster::kubeconfig())
        .args([
            "--namespace",
            root,
            "exec",
            "etcd-0",
            "--",
            "etcdctl",
            "--endpoints=https://etcd-0.etcd:2379",
        ])
        .args([
            "--cacert=/etc/kubernetes/pki/root/tls.crt",
            "--cert=/etc/kubernetes/pki/etcd/tls.crt",
        ])
        .args([
            "--key=/etc/kubernetes/pki/etcd/tls.key",
            "endpoint",
            "health",
            "--cluster",
            "--write-out=json",
        ])
        .output()
        .expect("kubectl");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let members: Vec<serde_json::Value> = serde_json::from_str(&said)
        .unwrap_or_else(|error| panic!("{error}: {said}{}", String::from_utf8_lossy(&output.stderr)));
    members.iter().filter(|member| member["health"] == true).count()
}

/// A Service of type NodePort: clients in the super cluster use its name, which stands without brackets.
pub(crate) async fn node_port(scene: Scene) {
    let mut content = templates::standard();
    *at(&mut content, "/apiServer/service/spec/type") = json!("NodePort");
    let version = scene.cluster_version("tenants", content).await;
    let tenant = scene.provisioned("tenant", &version).await;
    let server = format!("https://apiserver-svc.{}:6443", tenant.root);
    assert_eq!(
        tenant
            .get()
            .await
            .status
            .and_then(|status| status.endpoint)
            .as_deref(),
        Some(server.as_str())
    );
    let secrets = tenant.secrets().await;
    for name in ["admin-kubeconfig", "controller-manager-kubeconfig"] {
        let text = &secrets[name][name];
        assert!(
            text.lines()
                .any(|line| line.trim() == format!("server: {server}")),
            "{name} does not lead to {server}"
        );
    }
    // The controller-manager of Kubernetes 1.34 and later refuses a name in brackets.
    tenant.expect_controllers("after-provisioning").await;
    tenant.expect_pods(&PODS).await;
    assert_eq!(tenant.version().await, Kubernetes::First.git_version());
    let service = tenant
        .api::<k8s_openapi::api::core::v1::Service>()
        .get("apiserver-svc")
        .await
        .expect("the Service");
    let ports = service
        .spec
        .as_ref()
        .and_then(|spec| spec.ports.clone())
        .unwrap_or_default();
    assert!(
        ports.iter().any(|port| port.node_port.is_some()),
        "{}",
        service.name_any()
    );
    tenant.delete().await;
}
