//! What a real Go manager left, put into this server.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::future::join_all;
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, Secret, Service},
};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::api::VirtualCluster;

use crate::found::{
    FOR_LIFE, Found, assert_untouched, at_rest, etcd_pods, footprint, has_good_kubeconfigs, taken_over,
};
use crate::made::make_namespace;
use crate::running::first_upgrade;
use crate::support::{Driver, Manager, Options, Scope, eventually, samples, templates, upstream::raw};

/// Objects that a real Go manager left, as they were printed: by file.
pub(crate) fn real() -> BTreeMap<String, Vec<Value>> {
    let mut all = BTreeMap::new();
    let Some(folder) = samples::of_the_go_manager() else {
        return all;
    };
    for file in samples::files(&folder.join("left-by-upstream")) {
        let text = std::fs::read_to_string(&file).expect("a text");
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
        let mut objects = Vec::new();
        for mut document in documents {
            match document.get_mut("items").map(Value::take) {
                Some(Value::Array(items)) => objects.extend(items),
                _ => objects.push(document),
            }
        }
        let name = file.file_stem().and_then(|name| name.to_str()).expect("a name");
        all.insert(name.to_owned(), objects);
    }
    assert_eq!(all.len(), 5, "{:?}", all.keys());
    all
}

pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut objects = objects.iter();
    objects
        .find(|object| object["kind"] == kind)
        .unwrap_or_else(|| panic!("no {kind}"))
}

/// Real objects in the place of those a fixture makes.
pub(crate) async fn load(scope: &Scope, file: &str, objects: &[Value]) -> Found {
    let version = format!("{}-{file}", scope.namespace);
    scope
        .create_cluster_version(&version, of_kind(objects, "ClusterVersion")["spec"].clone())
        .await;
    let real = of_kind(objects, "VirtualCluster");
    let (name, root) = (
        real["metadata"]["name"].as_str().unwrap(),
        real["status"]["clusterNamespace"].as_str().unwrap(),
    );
    let mut tenant = real.clone();
    tenant["metadata"] = json!({"name": name, "namespace": scope.namespace,
        "finalizers": real["metadata"]["finalizers"], "labels": real["metadata"]["labels"]});
    tenant["spec"]["clusterVersionName"] = json!(version);
    let api = raw::<VirtualCluster>(&scope.client, Some(&scope.namespace));
    let tenant: DynamicObject = serde_json::from_value(tenant).unwrap();
    let params = PostParams::default();
    let mut made = api.create(&params, &tenant).await.unwrap();
    made.data["status"] = real["status"].clone();
    let uid = api.replace_status(name, &params, &made).await.unwrap().uid();

    let mut namespace = of_kind(objects, "Namespace").clone();
    namespace["metadata"]["annotations"]["tenancy.x-k8s.io/vcuid"] = json!(uid);
    restore(&raw::<Namespace>(&scope.client, None), &namespace).await;
    for object in objects {
        match object["kind"].as_str().unwrap() {
            "Secret" => restore(&raw::<Secret>(&scope.client, Some(root)), object).await,
            "Service" => restore(&raw::<Service>(&scope.client, Some(root)), object).await,
            "StatefulSet" => restore(&raw::<StatefulSet>(&scope.client, Some(root)), object).await,
            _ => {}
        }
    }
    eventually("the StatefulSets to be played", async || {
        let all = scope
            .api::<StatefulSet>(root)
            .list(&ListParams::default())
            .await
            .ok()?;
        let seen = |set: &StatefulSet| {
            let status = set.status.clone().unwrap_or_default();
            status.observed_generation == set.metadata.generation
        };
        all.iter().all(seen).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    Found::of(scope, name, root).await
}

/// An object of another cluster, with the same managers of its fields.
pub(crate) async fn restore(api: &Api<DynamicObject>, object: &Value) {
    let mut object = object.clone();
    let managers = object["metadata"]["managedFields"].take();
    let metadata = object["metadata"].as_object_mut().expect("metadata");
    for key in [
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "generation",
        "managedFields",
    ] {
        metadata.remove(key);
    }
    let spec = &mut object["spec"];
    if spec["clusterIP"].is_string() && spec["clusterIP"] != "None" {
        // The addresses of that cluster are not here.
        for key in ["clusterIP", "clusterIPs"] {
            spec.as_object_mut().expect("a spec").remove(key);
        }
        for port in spec["ports"].as_array_mut().into_iter().flatten() {
            port.as_object_mut().expect("a port").remove("nodePort");
        }
    }
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    let name = object.name_any();
    api.create(&PostParams::default(), &object).await.unwrap();
    let managers: Vec<_> = managers
        .as_array()
        .into_iter()
        .flatten()
        .filter(|entry| entry.get("subresource").is_none())
        .collect();
    let patch = json!({"metadata": {"managedFields": managers}});
    let restored = api
        .patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    let managers = |fields: &Value| -> BTreeSet<String> {
        let all = fields.as_array().into_iter().flatten();
        all.filter(|entry| entry.get("subresource").is_none())
            .map(|entry| format!("{} {}", entry["manager"], entry["operation"]))
            .collect()
    };
    let stored = serde_json::to_value(restored.metadata.managed_fields).unwrap();
    assert_eq!(
        managers(&stored),
        managers(&patch["metadata"]["managedFields"]),
        "{name}"
    );
}

/// What a real Go manager left, put into this server: what runs is taken over, what does not is brought up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_real_go_manager_left_is_taken_over() {
    let real = real();
    if real.is_empty() {
        return;
    }
    // The namespace it was in there, so that the root namespaces keep their names.
    let scope = Scope::new("bench").await;
    let driver = Driver::start(&scope);
    make_namespace(&scope, &scope.manager_namespace()).await;
    let rounds: [&[(&str, Option<&str>)]; 2] = [
        &[
            ("running-clusterip", None),
            ("pending-nodeport-kubeconfig", Some("controller-manager")),
            ("pending-image-missing", Some("apiserver")),
        ],
        &[
            ("running-after-upgrade", None),
            ("error-image-missing", Some("apiserver")),
        ],
    ];
    for round in rounds {
        let mut found = Vec::new();
        for (file, stuck) in round {
            let objects = &real[*file];
            let name = of_kind(objects, "VirtualCluster")["metadata"]["name"]
                .as_str()
                .unwrap();
            if let Some(set) = stuck {
                driver.hold(name, set);
            }
            found.push(load(&scope, file, objects).await);
        }
        let manager = Manager::start(&scope, Options::default());
        for ((file, stuck), tenant) in round.iter().zip(&found) {
            println!("{file}");
            let Some(set) = stuck else {
                taken_over(&scope, &tenant.name).await;
                continue;
            };
            eventually("good kubeconfigs", async || {
                let secrets = scope.secrets(&tenant.root).await;
                has_good_kubeconfigs(&secrets, &tenant.root).then_some(())
            })
            .await;
            driver.release(&tenant.name, set);
            scope.settled(&tenant.name).await;
            let secrets = scope.secrets(&tenant.root).await;
            for secret in FOR_LIFE {
                assert_eq!(secrets[secret], tenant.secrets[secret], "{file}: {secret}");
            }
            assert_eq!(etcd_pods(&scope, &tenant.root).await, tenant.etcd, "{file}");
        }
        let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();
        at_rest(&manager, &names).await;
        let runs = |tenant: &Found| tenant.object["status"]["phase"] == "Running";
        let (ran, rest): (Vec<_>, Vec<_>) = found.into_iter().partition(runs);
        assert_untouched(&scope, &ran, &manager).await;
        for tenant in ran.iter().chain(&rest) {
            let version = tenant.object["spec"]["clusterVersionName"].as_str().unwrap();
            scope
                .edit_named(version, |content| templates::verbosity(content, 5))
                .await;
        }
        join_all(ran.iter().map(|tenant| first_upgrade(&scope, tenant))).await;
        join_all(rest.iter().map(|tenant| scope.upgrade(&tenant.name))).await;
        for tenant in ran.iter().chain(&rest) {
            scope.delete(&tenant.name).await;
            eventually("the root namespace to be gone", async || {
                footprint(&scope, &tenant.root).await.is_empty().then_some(())
            })
            .await;
        }
        manager.stop().await.unwrap();
    }
}
