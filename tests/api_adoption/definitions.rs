//! The CustomResourceDefinitions of both managers.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, ResourceExt, api::PostParams};
use serde_json::{Value, json};
use vc_manager::api::{VirtualCluster, crd::crds};

use crate::found::{
    assert_untouched, at_rest, footprint, has_good_kubeconfigs, object, old_conditions, taken_over,
};
use crate::made::{left, make_namespace, present, running};
use crate::running::first_upgrade;
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

    define(&scope, &crds()).await;
    let pending = found.pop().unwrap();
    let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();
    let manager = Manager::start(&scope, Options::default());
    for name in &names {
        taken_over(&scope, name).await;
    }
    eventually("good kubeconfigs", async || {
        let secrets = scope.secrets(&pending.root).await;
        has_good_kubeconfigs(&secrets, &pending.root).then_some(())
    })
    .await;
    driver.release("pending", "controller-manager");
    scope.settled("pending").await;
    at_rest(&manager, &names).await;
    assert_untouched(&scope, &found, &manager).await;
    scope.edit(|content| templates::verbosity(content, 5)).await;
    first_upgrade(&scope, &found[0]).await;
    manager.stop().await.unwrap();

    // Back: what the Go manager needs is there, and what it does not know is dropped with its first write.
    let upgraded = object(&scope, "plain").await;
    let files = footprint(&scope, &found[0].root).await;
    define(&scope, &upstream::definitions()).await;
    let api = raw::<VirtualCluster>(&scope.client, Some("moved"));
    for tenant in &found {
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
        typed(&object(&scope, "plain").await) >= typed(&upgraded),
        "none of its conditions is lost"
    );

    // And here once more: pinned to what runs, which is what was made here before.
    define(&scope, &crds()).await;
    let manager = Manager::start(&scope, Options::default());
    for name in &names {
        taken_over(&scope, name).await;
    }
    at_rest(&manager, &names).await;
    assert_eq!(footprint(&scope, &found[0].root).await, files);
    scope.edit(|content| templates::verbosity(content, 6)).await;
    scope.upgrade("plain").await;
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
