//! The super cluster: how to reach it, and how to leave it as it was.

use std::{path::PathBuf, time::Duration};

use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::Namespace},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use vc_manager::api::{ClusterVersion, VirtualCluster, VirtualClusterSpec, crd::crds};

use super::until;

/// What all names made here begin with.
pub(crate) const PREFIX: &str = "vct";

/// The administrator's kubeconfig of the super cluster.
pub(crate) fn kubeconfig() -> PathBuf {
    match std::env::var_os("VCM_KUBECONFIG") {
        Some(path) if !path.is_empty() => path.into(),
        _ => panic!("these tests need a real cluster (VCM_KUBECONFIG is not set): run `make test`"),
    }
}

/// A client of the super cluster.
pub(crate) async fn client() -> Client {
    let path = kubeconfig();
    let file = Kubeconfig::read_from(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .expect("a kubeconfig");
    config.connect_timeout = Some(Duration::from_secs(5));
    let client = Client::try_from(config).expect("a client");
    let answer = client.apiserver_version().await;
    answer.unwrap_or_else(|error| {
        panic!(
            "the cluster of {} does not answer ({error}): run `make cluster`",
            path.display()
        )
    });
    client
}

/// Installs the definitions that this build prints, as an installation does, and waits until their kinds are served.
pub(crate) async fn install_definitions(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply("cluster-tests").force();
    for definition in crds() {
        definitions
            .patch(&definition.name_any(), &params, &Patch::Apply(&definition))
            .await
            .expect("a definition that is accepted");
    }
    // For a moment after it was accepted a kind is not known yet, or its storage is not ready.
    until("the kinds to be served", Duration::from_mins(1), async || {
        let one = ListParams::default().limit(1);
        let versions = Api::<ClusterVersion>::all(client.clone());
        versions.list(&one).await.map_err(|error| error.to_string())?;
        let tenants = Api::<VirtualCluster>::all(client.clone());
        tenants.list(&one).await.map_err(|error| error.to_string())?;
        Ok(())
    })
    .await;
}

/// Makes a namespace.
pub(crate) async fn make_namespace(client: &Client, name: &str) {
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        ..ObjectMeta::default()
    };
    let namespace = Namespace {
        metadata,
        ..Namespace::default()
    };
    Api::all(client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .expect("a name that is free");
}

/// Fails if some manager reconciles the cluster already: two of them would fight over the tenants.
pub(crate) async fn assert_no_manager(client: &Client) {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), "vc-manager");
    for deployment in deployments
        .list(&ListParams::default())
        .await
        .expect("Deployments")
    {
        let ready = deployment
            .status
            .as_ref()
            .and_then(|status| status.ready_replicas)
            .unwrap_or(0);
        let name = deployment.name_any();
        assert!(
            ready == 0,
            "Deployment vc-manager/{name} manages this cluster; these tests run their own manager, and two would \
             fight over the tenants: kubectl -n vc-manager scale deployment/{name} --replicas=0"
        );
    }
    // One outside of the cluster is known only by what it does.
    let namespace = format!("{PREFIX}-canary");
    make_namespace(client, &namespace).await;
    let api: Api<VirtualCluster> = Api::namespaced(client.clone(), &namespace);
    let spec = VirtualClusterSpec {
        cluster_version_name: format!("{PREFIX}-none"),
        ..VirtualClusterSpec::default()
    };
    api.create(&PostParams::default(), &VirtualCluster::new("canary", spec))
        .await
        .expect("a VirtualCluster");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let canary = api.get("canary").await.expect("the VirtualCluster");
    clear(client).await;
    assert!(
        canary.finalizers().is_empty() && canary.status.is_none(),
        "a manager outside of the cluster reconciles it; these tests run their own, and two would fight over the \
         tenants: end that one first"
    );
}

/// Removes everything whose name says it was made here. Needs no manager.
pub(crate) async fn clear(client: &Client) {
    let ours = |name: &str| name.starts_with(&format!("{PREFIX}-"));
    let no_finalizers = Patch::Merge(json!({"metadata": {"finalizers": null}}));

    let all: Api<VirtualCluster> = Api::all(client.clone());
    for tenant in all.list(&ListParams::default()).await.expect("VirtualClusters") {
        let namespace = tenant.namespace().unwrap_or_default();
        if ours(&namespace) {
            let api: Api<VirtualCluster> = Api::namespaced(client.clone(), &namespace);
            ignore_gone(
                api.delete(&tenant.name_any(), &DeleteParams::default())
                    .await
                    .map(|_| ()),
            );
            ignore_gone(
                api.patch(&tenant.name_any(), &PatchParams::default(), &no_finalizers)
                    .await
                    .map(|_| ()),
            );
        }
    }
    let versions: Api<ClusterVersion> = Api::all(client.clone());
    for version in versions
        .list(&ListParams::default())
        .await
        .expect("ClusterVersions")
    {
        if ours(&version.name_any()) {
            ignore_gone(
                versions
                    .delete(&version.name_any(), &DeleteParams::default())
                    .await
                    .map(|_| ()),
            );
            ignore_gone(
                versions
                    .patch(&version.name_any(), &PatchParams::default(), &no_finalizers)
                    .await
                    .map(|_| ()),
            );
        }
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for namespace in namespaces.list(&ListParams::default()).await.expect("Namespaces") {
        if ours(&namespace.name_any()) {
            ignore_gone(
                namespaces
                    .delete(&namespace.name_any(), &DeleteParams::default())
                    .await
                    .map(|_| ()),
            );
        }
    }
    until(
        "the namespaces of the tests to be gone",
        Duration::from_mins(2),
        async || {
            let left = namespaces.list(&ListParams::default()).await.expect("Namespaces");
            let left: Vec<_> = left
                .iter()
                .map(kube::ResourceExt::name_any)
                .filter(|name| ours(name))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        },
    )
    .await;
}

fn ignore_gone(result: Result<(), kube::Error>) {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
        other => other.expect("it may be removed"),
    }
}
