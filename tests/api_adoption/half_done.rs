//! Tenants that the Go manager did not bring up.

use futures::future::join_all;
use serde_json::Value;

use crate::found::{FOR_LIFE, etcd_pods, has_good_kubeconfigs, object, old_conditions, server};
use crate::made::{left, prepared, present};
use crate::support::{
    self, Manager, Options, eventually, templates,
    upstream::{Layout, Reached, State, Tenant},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_left_half_done_is_brought_up() {
    half_done("halfip", "ClusterIP").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_left_half_done_behind_a_node_port_is_brought_up() {
    half_done("halfport", "NodePort").await;
}

async fn half_done(scope: &str, service_type: &str) {
    let (scope, driver) = prepared(scope, present(service_type)).await;
    let pending = |name: &str, retries: u32, reached: Reached| {
        Tenant::new(&scope.namespace, name, &scope.namespace).state(State::Pending { retries, reached })
    };
    let error = |name: &str, reached: Reached| {
        Tenant::new(&scope.namespace, name, &scope.namespace).state(State::Error { reached })
    };
    let tenants = [
        pending("seen", 3, Reached::Nothing),
        pending("secrets", 3, Reached::Secrets).gate(),
        pending("etcd", 2, Reached::Etcd),
        pending("apiserver", 2, Reached::ApiServer).gate(),
        pending("controllers", 1, Reached::ControllerManager),
        pending("last", 0, Reached::ControllerManager).gate(),
        pending("old", 1, Reached::ControllerManager).layout(Layout::Created),
        error("error", Reached::ControllerManager).gate(),
        error("early", Reached::ApiServer),
        error("old-error", Reached::ControllerManager).layout(Layout::Created),
    ];
    let stuck = |tenant: &Tenant| match &tenant.state {
        State::Pending { reached, .. } | State::Error { reached } => match reached {
            Reached::Etcd => Some("etcd"),
            Reached::ApiServer => Some("apiserver"),
            Reached::ControllerManager => Some("controller-manager"),
            Reached::Nothing | Reached::Secrets => None,
        },
        _ => None,
    };
    for tenant in &tenants {
        if let Some(set) = stuck(tenant) {
            driver.hold(&tenant.name, set);
        }
    }
    let found = left(&scope, &tenants).await;
    for tenant in &found {
        let bracketed = tenant.secrets.get("admin-kubeconfig").map(|data| {
            let server = server(&data["admin-kubeconfig"]).to_owned();
            server == format!("https://[apiserver-svc.{}]:6443", tenant.root)
        });
        assert_eq!(
            bracketed.unwrap_or(service_type == "NodePort"),
            service_type == "NodePort",
            "{}",
            tenant.name
        );
    }

    let _manager = Manager::start(&scope, Options::default());
    // What kept them down is their kubeconfig: they come up once that is another one.
    let up = tenants.iter().zip(&found).map(async |(tenant, before)| {
        let name = &tenant.name;
        eventually(&format!("good kubeconfigs for {name}"), async || {
            let secrets = scope.secrets(&before.root).await;
            has_good_kubeconfigs(&secrets, &before.root).then_some(())
        })
        .await;
        if let Some(set) = stuck(tenant) {
            driver.release(name, set);
        }
        let after = scope.settled(name).await;
        assert_eq!(
            support::tuple(&after),
            (
                "Running".into(),
                "tenant control plane is running".into(),
                "TenantControlPlaneRunning".into()
            ),
            "{name}"
        );
        let now = object(&scope, name).await;
        assert_eq!(now["status"]["clusterNamespace"], *before.root, "{name}");
        assert_ne!(
            now["status"]["revision"]["adopted"], true,
            "{name}: it is one of ours"
        );
        for condition in old_conditions(&before.object) {
            assert!(
                old_conditions(&now).contains(&condition),
                "{name}: {condition} is gone"
            );
        }
        let secrets = scope.secrets(&before.root).await;
        assert!(has_good_kubeconfigs(&secrets, &before.root), "{name}");
        for secret in FOR_LIFE {
            if let Some(data) = before.secrets.get(secret) {
                assert_eq!(secrets[secret], *data, "{name}: {secret}");
            }
        }
        let same = before.etcd == Value::Null || before.etcd == etcd_pods(&scope, &before.root).await;
        (!same).then_some(name)
    });
    // Without a volume, which no sample of the Go manager has, another pod is an empty etcd.
    let replaced: Vec<_> = join_all(up).await.into_iter().flatten().collect();
    assert!(replaced.is_empty(), "other pods for etcd of {replaced:?}");
    scope.edit(|content| templates::verbosity(content, 5)).await;
    join_all(found.iter().map(|tenant| scope.upgrade(&tenant.name))).await;
}
