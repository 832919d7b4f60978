//! The CustomResourceDefinitions of both managers.

use k8s_openapi::{
    api::{apps::v1::StatefulSet, core::v1::Secret},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{Api, ResourceExt, api::PostParams};
use serde_json::{Value, json};
use vc_manager::api::{VirtualCluster, crd::crds};

use crate::found::{
    FOR_LIFE, Found, assert_untouched, at_rest, has_good_kubeconfigs, object, old_conditions, taken_over,
};
use crate::made::{left, make_namespace, present, running};
use crate::running::{first_upgrade, first_upgrade_to};
use crate::support::{
    ApiServer, Driver, Manager, Options, Scope, eventually, templates,
    upstream::{self, Reached, State, Tenant, raw},
};

/// The Go manager's definitions are replaced while its tenants run; and put back, should one want to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_are_replaced_and_put_back() {
    let server: &'static ApiServer = Box::leak(Box::new(
        tokio::task::spawn_blocking(ApiServer::start).await.unwrap(),
    ));
    server.install(&upstream::definitions());
    let scope = Scope {
        server,
        client: server.client().await,
        namespace: "moved".into(),
    };
    make_namespace(&scope, "moved").await;
    make_namespace(&scope, &scope.manager_namespace()).await;
    let driver = Driver::start(&scope);
    scope.create_cluster_version("moved", present("NodePort")).await;
    let mut tenants = running("moved", "NodePort");
    tenants.push(Tenant::new("moved", "pending", "moved").state(State::Pending {
        retries: 1,
        reached: Reached::ControllerManager,
    }));
    driver.hold("pending", "controller-manager");
    let mut found = left(&scope, &tenants).await;
    for tenant in &found {
        let counted = tenant.object["metadata"]["generation"].as_u64();
        assert!(
            counted > Some(2),
            "without the subresource each status is a generation: {counted:?}"
        );
    }

    let pending = found.pop().unwrap();
    let manager = take_over(&scope, &found).await;
    eventually("good kubeconfigs", async || {
        let secrets = scope.secrets(&pending.root).await;
        has_good_kubeconfigs(&secrets, &pending.root).then_some(())
    })
    .await;
    driver.release("pending", "controller-manager");
    scope.settled("pending").await;
    assert_untouched(&scope, &found, &manager).await;
    scope.edit(|content| templates::verbosity(content, 5)).await;
    first_upgrade(&scope, &found[0]).await;
    manager.stop().await.unwrap();

    put_back(&scope, &found).await;
    upgraded_there(&scope, &tenants[0], &found[0]).await;
    let mut again = Vec::new();
    for tenant in &found {
        again.push(Found::of(&scope, &tenant.name, &tenant.root).await);
    }
    let manager = take_over(&scope, &again).await;
    assert_untouched(&scope, &again, &manager).await;
    scope.edit(|content| templates::verbosity(content, 6)).await;
    first_upgrade_to(&scope, &again[0], "-v=6").await;
}

/// This manager's definitions, and the manager: all tenants are pinned to what runs.
async fn take_over(scope: &Scope, found: &[Found]) -> Manager {
    define(scope, &crds()).await;
    let manager = Manager::start(scope, Options::default());
    for tenant in found {
        taken_over(scope, &tenant.name).await;
    }
    let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();
    at_rest(&manager, &names).await;
    manager
}

/// The Go manager's definitions: what it needs is there, and what it does not know is dropped with its first write.
async fn put_back(scope: &Scope, found: &[Found]) {
    let upgraded = object(scope, "plain").await;
    define(scope, &upstream::definitions()).await;
    let api = raw::<VirtualCluster>(&scope.client, Some("moved"));
    for tenant in found {
        let mut object = api.get(&tenant.name).await.unwrap();
        let said = json!("said by the Go manager");
        object.data["status"]["message"] = said.clone();
        let saved = api
            .replace(&tenant.name, &PostParams::default(), &object)
            .await
            .unwrap();
        let status = &saved.data["status"];
        assert_eq!(
            status["message"], said,
            "{}: a status is written with the rest",
            tenant.name
        );
        assert_eq!(status["clusterNamespace"], *tenant.root);
        assert_eq!(status.get("revision"), None, "its definition does not know it");
    }
    let typed = |object: &Value| old_conditions(object).len();
    assert!(
        typed(&object(scope, "plain").await) >= typed(&upgraded),
        "none of its conditions is lost"
    );
}

/// The Go manager upgrades what was made here, and leaves nothing of what this manager notes down.
async fn upgraded_there(scope: &Scope, tenant: &Tenant, found: &Found) {
    let before = scope.secrets(&found.root).await;
    tenant.upgrade(&scope.client).await;
    let secrets = scope.secrets(&found.root).await;
    assert_eq!(secrets["root-ca"], before["root-ca"]);
    for secret in ["apiserver-ca", "etcd-ca", "serviceaccount-rsa"] {
        assert_ne!(secrets[secret], before[secret], "{secret}");
    }
    for set in ["apiserver", "controller-manager"] {
        let set: StatefulSet = scope.get(&found.root, set).await;
        assert!(set.annotations().is_empty(), "{:?}", set.annotations());
    }
    for secret in secrets.keys() {
        let secret: Secret = scope.get(&found.root, secret).await;
        // Those that are for life are created here, so that another manager does not own their notes.
        let for_life = FOR_LIFE.contains(&secret.name_any().as_str());
        assert!(
            for_life || secret.annotations().is_empty(),
            "{:?}",
            secret.annotations()
        );
    }
}

/// Replaces the definitions, as `kubectl replace` would, and waits until they are in force.
async fn define(scope: &Scope, definitions: &[CustomResourceDefinition]) {
    let api = Api::<CustomResourceDefinition>::all(scope.client.clone());
    for definition in definitions {
        let mut definition = definition.clone();
        let stored = api.get(&definition.name_any()).await.unwrap();
        definition.metadata.resource_version = stored.resource_version();
        api.replace(&definition.name_any(), &PostParams::default(), &definition)
            .await
            .unwrap();
    }
    for definition in definitions {
        let version = &definition.spec.versions[0];
        let has_status = version
            .subresources
            .as_ref()
            .is_some_and(|all| all.status.is_some());
        let path = match definition.spec.scope.as_str() {
            "Cluster" => "/apis/tenancy.x-k8s.io/v1alpha1/clusterversions/moved/status".to_owned(),
            _ => "/apis/tenancy.x-k8s.io/v1alpha1/namespaces/moved/virtualclusters/plain/status".to_owned(),
        };
        eventually("the definition to be in force", async || {
            let request = http::Request::get(&path).body(Vec::new()).unwrap();
            let served = scope.client.request_text(request).await.is_ok();
            (served == has_status).then_some(())
        })
        .await;
    }
}
