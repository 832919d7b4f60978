//! What is recorded of a tenant that the Go manager made: rendered again, it is what runs.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use k8s_openapi::api::{apps::v1::StatefulSet, core::v1::Namespace};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::{
    api::{Component, FIELD_MANAGER, labels, template::Template},
    controller::{
        kubernetes::Kubernetes,
        managed_fields::{drift, scaled_by_other},
        recorded,
        render::{Kind, Rendered},
    },
};

use super::{
    assert_contains,
    contents::{charts, fixture, of_file, rendered, sample},
    objects::{api, by},
    support::{Scope, samples, templates},
};

/// How the Go manager makes its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// By server-side apply, as since its pull request 290.
    Applied,
    /// By a plain create, as before.
    Created,
    /// And before its pull request 331, when there was no label on the pods.
    CreatedWithoutLabel,
}

/// Objects of a root namespace by name.
struct Stored {
    stateful_sets: BTreeMap<String, Value>,
    services: BTreeMap<String, Value>,
}

/// A tenant that the Go manager made.
struct Tenant {
    client: Client,
    namespace: String,
}

impl Tenant {
    async fn make(client: &Client, namespace: &str, content: &Value, how: How) -> Self {
        let object: Namespace =
            serde_json::from_value(json!({"metadata": {"name": namespace}})).expect("a namespace");
        Api::all(client.clone())
            .create(&PostParams::default(), &object)
            .await
            .expect("a name no other test uses");
        let tenant = Self {
            client: client.clone(),
            namespace: namespace.into(),
        };
        for (kind, object) in completed(content, namespace, how) {
            let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
            let api = tenant.api(kind);
            let written = if how == How::Applied {
                let params = PatchParams {
                    force: true,
                    ..by(FIELD_MANAGER)
                };
                api.patch(&name, &params, &Patch::Apply(object)).await
            } else {
                let params = PostParams {
                    field_manager: Some("manager-amd64".into()),
                    ..PostParams::default()
                };
                let object = serde_json::from_value(object).expect("an object");
                api.create(&params, &object).await
            };
            written.unwrap_or_else(|error| panic!("{namespace}/{name}: {error}"));
        }
        tenant
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        api(&self.client, &self.namespace, kind)
    }

    async fn read(&self) -> Stored {
        let by_name = async |kind| {
            let list = self.api(kind).list(&ListParams::default()).await.expect("a list");
            list.into_iter()
                .map(|object| (object.name_any(), serde_json::to_value(object).expect("JSON")))
                .collect()
        };
        Stored {
            stateful_sets: by_name(Kind::StatefulSet).await,
            services: by_name(Kind::Service).await,
        }
    }

    async fn recorded(&self) -> Value {
        let stored = self.read().await;
        recorded::content(&stored.stateful_sets, &stored.services, &self.namespace).expect("a content")
    }

    /// Applies what is rendered of `content`, as this manager does.
    async fn apply(&self, content: &Value) -> Vec<Rendered> {
        let objects = rendered(content, &self.namespace);
        let kubernetes = Kubernetes::new(self.client.clone(), Duration::from_secs(30));
        for object in &objects {
            kubernetes
                .apply(&self.namespace, object, false)
                .await
                .unwrap_or_else(|error| panic!("{}/{}: {error}", self.namespace, object.name));
        }
        objects
    }

    async fn patch(&self, kind: Kind, name: &str, manager: &str, patch: Value) {
        self.api(kind)
            .patch(name, &by(manager), &Patch::Strategic(patch))
            .await
            .expect("it is accepted");
    }

    /// What is recorded, rendered and applied changes nothing that runs, and is recorded again.
    async fn assert_comes_back(&self, what: &str) -> Value {
        let before = self.read().await;
        let content = recorded::content(&before.stateful_sets, &before.services, &self.namespace)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        Template::parse(&content).expect("a template");
        let objects = self.apply(&content).await;
        let after = self.read().await;
        for object in objects {
            let (before, after) = match object.kind {
                Kind::StatefulSet => (&before.stateful_sets, &after.stateful_sets),
                Kind::Service => (&before.services, &after.services),
            };
            let (before, after) = (&before[&object.name], &after[&object.name]);
            assert_eq!(runs(before), runs(after), "{what}: {}", object.name);
            let metadata = serde_json::from_value(after["metadata"].clone()).expect("metadata");
            assert_eq!(drift(&object.value, &metadata), [], "{what}: {}", object.name);
        }
        let mut again = self.recorded().await;
        let mut rolling = content.clone();
        for component in Component::ALL {
            for content in [&mut again, &mut rolling] {
                if let Some(spec) =
                    content.pointer_mut(&format!("/{}/statefulset/spec", component.spec_key()))
                {
                    spec["updateStrategy"] = json!("the renderer's");
                }
            }
        }
        assert_eq!(again, rolling, "{what}");
        content
    }
}

/// What of an object runs: not the update strategy, which is the renderer's, nor the annotations and the label that it
/// puts on pods.
fn runs(object: &Value) -> Value {
    let mut spec = object["spec"].clone();
    if object.pointer("/spec/template").is_some() {
        spec.as_object_mut().expect("an object").remove("updateStrategy");
        let pods = spec["template"]["metadata"].as_object_mut().expect("metadata");
        pods.remove("annotations");
        pods["labels"]
            .as_object_mut()
            .expect("labels")
            .remove(labels::CLUSTER);
    }
    spec
}

/// The objects of `content` as the Go manager writes them, in its order: with what it adds, and with what Go's structs
/// say when nobody has.
fn completed(content: &Value, namespace: &str, how: How) -> Vec<(Kind, Value)> {
    let mut objects = Vec::new();
    for component in Component::ALL {
        let bundle = &content[component.spec_key()];
        if bundle.is_null() {
            continue;
        }
        let mut set = bundle["statefulset"].clone();
        let service = bundle["service"]["metadata"]["name"].as_str().unwrap_or_default();
        complete(&mut set, component, service, namespace, how);
        objects.push((Kind::StatefulSet, set));
        if bundle["service"].is_object() {
            let mut service = bundle["service"].clone();
            service["apiVersion"] = json!("v1");
            service["kind"] = json!("Service");
            service["metadata"]["namespace"] = json!(namespace);
            service["metadata"]["creationTimestamp"] = Value::Null;
            service["status"] = json!({"loadBalancer": {}});
            objects.push((Kind::Service, service));
        }
    }
    objects
}

fn complete(set: &mut Value, component: Component, service: &str, namespace: &str, how: How) {
    set["apiVersion"] = json!("apps/v1");
    set["kind"] = json!("StatefulSet");
    set["metadata"]["namespace"] = json!(namespace);
    set["metadata"]["creationTimestamp"] = Value::Null;
    set["metadata"]
        .as_object_mut()
        .expect("an object")
        .remove("resourceVersion");
    set["status"] = json!({"replicas": 0, "availableReplicas": 0});
    let replicas = set["spec"]["replicas"].as_u64().unwrap_or(1);
    let pods = &mut set["spec"]["template"];
    pods["metadata"]["creationTimestamp"] = Value::Null;
    if how != How::CreatedWithoutLabel {
        pods["metadata"]["labels"][labels::CLUSTER] = json!(namespace);
    }
    let hashed: &[&str] = match component {
        Component::Etcd => &[],
        Component::ApiServer => &["root-ca", "apiserver-ca", "front-proxy-ca", "serviceaccount-rsa"],
        Component::ControllerManager => &["root-ca", "serviceaccount-rsa", "controller-manager-kubeconfig"],
    };
    for secret in hashed {
        pods["metadata"]["annotations"][format!("{secret}-hash")] = json!(format!("of {namespace}"));
    }
    for container in pods["spec"]["containers"].as_array_mut().expect("containers") {
        container
            .as_object_mut()
            .expect("an object")
            .entry("resources")
            .or_insert(json!({}));
    }
    if component == Component::Etcd {
        let members: Vec<_> = (0..replicas)
            .map(|ordinal| format!("etcd-{ordinal}=https://etcd-{ordinal}.{service}:2380"))
            .collect();
        let args = &mut pods["spec"]["containers"][0]["args"];
        let mut all = args.as_array().cloned().unwrap_or_default();
        all.extend([json!("--initial-cluster"), json!(members.join(","))]);
        *args = Value::Array(all);
    }
}

/// Contents to make tenants from, each with its origin.
fn contents() -> Vec<(String, Value)> {
    let mut with_default_type = templates::full("ClusterIP");
    with_default_type["apiServer"]["service"]["spec"]
        .as_object_mut()
        .expect("an object")
        .remove("type");
    let mut contents = vec![
        ("without a Service's type".to_owned(), with_default_type),
        ("NodePort".to_owned(), templates::full("NodePort")),
        ("fixture".to_owned(), fixture()),
    ];
    let mut folders = vec![charts()];
    folders.extend(samples::of_the_go_manager());
    for file in folders.iter().flat_map(|folder| samples::files(folder)) {
        let origin = file.display().to_string();
        contents.extend(
            of_file(&file)
                .into_iter()
                .map(|content| (origin.clone(), content)),
        );
    }
    contents
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_go_manager_made_comes_back_from_what_runs() {
    let scope = Scope::new("adopt").await;
    for (index, (origin, content)) in contents().iter().enumerate() {
        let without_label = (index == 0).then_some(How::CreatedWithoutLabel);
        for how in [How::Applied, How::Created].into_iter().chain(without_label) {
            let what = format!("{origin}, {how:?}");
            let mut of_tenants = Vec::new();
            for tenant in ["a", "b"] {
                let namespace = format!("adopt-{index}-{how:?}-{tenant}").to_lowercase();
                let tenant = Tenant::make(&scope.client, &namespace, content, how).await;
                of_tenants.push(tenant.assert_comes_back(&what).await);
            }
            assert_eq!(
                of_tenants[0], of_tenants[1],
                "{what}: two tenants of the same templates"
            );
            let text = of_tenants[0].to_string();
            for theirs in ["adopt-", "of adopt", "-hash", "uid", "initial-cluster\""] {
                assert!(!text.contains(theirs), "{what}: {theirs} in {text}");
            }
        }
    }
}

/// What others note down, and what a controller sets for one tenant, is not recorded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_of_one_tenant_is_not_recorded() {
    let scope = Scope::new("adopt-noted").await;
    let tenant = Tenant::make(&scope.client, "adopt-noted-a", &sample(), How::Applied).await;
    let mut expected = tenant.recorded().await;
    let note = json!({"example.com/note": "of-this-tenant"});
    let noted = json!({"metadata": {"annotations": note, "labels": note}});
    let restarted = json!({"spec": {"template":
        {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}});
    let balanced = json!({"metadata": {"annotations": note, "finalizers": ["service.kubernetes.io/load-balancer-cleanup"]},
        "spec": {"externalIPs": ["10.1.0.1"]}});
    for (kind, name, manager, patch) in [
        (Kind::StatefulSet, "apiserver", "kubectl-annotate", noted),
        (Kind::StatefulSet, "apiserver", "kubectl-rollout", restarted),
        (
            Kind::Service,
            "apiserver-svc",
            "cloud-controller-manager",
            balanced,
        ),
    ] {
        tenant.patch(kind, name, manager, patch).await;
    }
    assert_eq!(tenant.recorded().await, expected);

    autoscale(&tenant, "apiserver", 3).await;
    let spec = expected["apiServer"]["statefulset"]["spec"].as_object_mut();
    spec.expect("an object").remove("replicas");
    assert_eq!(tenant.recorded().await, expected);
    // Of etcd the number is what its members are, which runs with another list now.
    autoscale(&tenant, "etcd", 3).await;
    let stored = tenant.read().await;
    let fault = recorded::content(&stored.stateful_sets, &stored.services, &tenant.namespace);
    assert!(fault.expect_err("other members").contains("has other members"));
}

/// What ran when it was recorded runs again after an upgrade that is taken back, whatever a person had done to it before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_person_had_changed_runs_again_after_an_upgrade() {
    let scope = Scope::new("adopt-edited").await;
    let tenant = Tenant::make(&scope.client, "adopt-edited-a", &sample(), How::Applied).await;
    let plain = tenant.recorded().await;
    let pod = json!({
        "containers": [
            {"name": "apiserver", "image": "example.com/patched", "env": [{"name": "A", "value": "b"}],
                "resources": {"requests": {"cpu": "3"}}},
            {"name": "sidecar", "image": "example.com/sidecar"},
        ],
        "volumes": [{"name": "more", "emptyDir": {}}],
    });
    let port = json!({"ports": [{"port": 6443, "targetPort": 6443}], "sessionAffinity": "ClientIP"});
    for (kind, name, manager, spec) in [
        (
            Kind::StatefulSet,
            "apiserver",
            "kubectl-edit",
            json!({"template": {"spec": pod}}),
        ),
        (
            Kind::StatefulSet,
            "controller-manager",
            "kubectl",
            json!({"replicas": 2}),
        ),
        (Kind::Service, "apiserver-svc", "kubectl-edit", port),
    ] {
        tenant.patch(kind, name, manager, json!({"spec": spec})).await;
    }
    let edited = tenant.recorded().await;
    assert_ne!(edited, plain);
    let at = |content: &Value, pointer: &str| content.pointer(pointer).cloned().unwrap_or_default();
    let containers = at(&edited, "/apiServer/statefulset/spec/template/spec/containers");
    let apiserver = containers
        .as_array()
        .and_then(|all| all.iter().find(|container| container["name"] == "apiserver"))
        .expect("it is there");
    assert_eq!(apiserver["image"], "example.com/patched");
    assert_eq!(apiserver["env"], json!([{"name": "A", "value": "b"}]));
    assert_eq!(
        apiserver["resources"]["requests"],
        json!({"cpu": "3", "memory": "256Mi"})
    );
    let args = "/apiServer/statefulset/spec/template/spec/containers/0/args";
    assert_eq!(apiserver["args"], at(&plain, args));
    assert_eq!(at(&edited, "/controllerManager/statefulset/spec/replicas"), 2);
    assert_eq!(at(&edited, "/apiServer/service/spec/ports/0/targetPort"), 6443);

    // An upgrade sets all of it anew, and more; then it is taken back.
    let before = tenant.read().await;
    let mut next = of_file(&charts().join("clusterversion-1.35.yaml")).remove(0);
    let spec = &mut next["apiServer"]["statefulset"]["spec"];
    spec["template"]["spec"]["priorityClassName"] = json!("system-cluster-critical");
    tenant.apply(&next).await;
    let upgraded = tenant.read().await;
    assert_ne!(
        runs(&before.stateful_sets["apiserver"]),
        runs(&upgraded.stateful_sets["apiserver"])
    );
    tenant.apply(&edited).await;
    let after = tenant.read().await;
    for (name, set) in &before.stateful_sets {
        assert_eq!(runs(set), runs(&after.stateful_sets[name]), "{name}");
    }
    for (name, service) in &before.services {
        assert_eq!(service["spec"], after.services[name]["spec"], "{name}");
    }
    assert_eq!(tenant.recorded().await, edited);
}

/// Of objects that were created and applied later, only what was applied is recorded, so that the tenants of one fleet
/// are of one revision however old they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_was_created_and_later_applied_is_as_one_that_was_applied_from_the_start() {
    let scope = Scope::new("adopt-age").await;
    let content = templates::full("NodePort");
    let old = Tenant::make(&scope.client, "adopt-age-old", &content, How::Created).await;
    let note = json!({"metadata": {"annotations": {"cloud.example/note": "a"}}});
    old.patch(
        Kind::Service,
        "apiserver-svc",
        "cloud-controller-manager",
        note.clone(),
    )
    .await;
    let created = old.recorded().await;
    assert!(!created.to_string().contains("cloud.example"), "{created:#}");
    assert_eq!(created.pointer("/apiServer/service/spec/ports/0/nodePort"), None);

    let new = Tenant::make(&scope.client, "adopt-age-new", &content, How::Applied).await;
    for (kind, object) in completed(&content, "adopt-age-old", How::Applied) {
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let params = PatchParams {
            force: true,
            ..by(FIELD_MANAGER)
        };
        old.api(kind)
            .patch(&name, &params, &Patch::Apply(object))
            .await
            .expect("it is accepted");
    }
    assert_eq!(old.recorded().await, new.recorded().await);
    old.assert_comes_back("created and applied").await;
}

async fn autoscale(tenant: &Tenant, name: &str, replicas: i32) {
    let api: Api<StatefulSet> = Api::namespaced(tenant.client.clone(), &tenant.namespace);
    let mut scale = api.get_scale(name).await.expect("a scale");
    scale.spec.as_mut().expect("a spec").replicas = Some(replicas);
    let params = PostParams {
        field_manager: Some("kube-controller-manager".into()),
        ..PostParams::default()
    };
    api.replace_scale(name, &params, &scale)
        .await
        .expect("it is accepted");
    let stored = api.get(name).await.expect("it is there");
    assert!(scaled_by_other(&stored.metadata).is_some());
}

/// What the Go manager itself left in a real cluster: the content that is recorded is that of the ClusterVersion it was
/// made from, and the same before and after an upgrade to the same templates.
#[test]
fn what_the_go_manager_left_is_recorded_as_what_it_was_made_from() {
    let Some(folder) = samples::of_the_go_manager() else {
        return;
    };
    let mut files = samples::files(&folder.join("left-by-upstream"));
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    assert!(!files.is_empty(), "nothing in {}", folder.display());
    for file in &files {
        let what = file.display().to_string();
        let (stored, namespace) = left(file);
        let content = recorded::content(&stored.stateful_sets, &stored.services, &namespace)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let text = content.to_string();
        assert!(
            !text.contains(&namespace) && !text.contains("-hash"),
            "{what}: {text}"
        );
        let mut original = of_file(file).remove(0);
        if content.get("controllerManager").is_none() {
            // It waited for the apiserver in vain.
            original
                .as_object_mut()
                .expect("an object")
                .remove("controllerManager");
        }
        without_defaults(&mut original);
        let mut recorded = content.clone();
        without_defaults(&mut recorded);
        assert_eq!(recorded, original, "{what}");

        // What is rendered is what runs, but for the annotations.
        for object in rendered(&content, &namespace) {
            let stored = match object.kind {
                Kind::StatefulSet => &stored.stateful_sets[&object.name],
                Kind::Service => &stored.services[&object.name],
            };
            assert_contains(
                &runs(stored),
                &runs(&object.value),
                &format!("{what}: {}", object.name),
            );
        }
    }
}

/// The objects in a file, and the root namespace they are in.
fn left(file: &Path) -> (Stored, String) {
    let text = fs::read_to_string(file).expect("it can be read");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let mut stored = Stored {
        stateful_sets: BTreeMap::new(),
        services: BTreeMap::new(),
    };
    let mut namespace = String::new();
    let objects = documents
        .into_iter()
        .flat_map(|document| match &document["items"] {
            Value::Array(items) => items.clone(),
            _ => vec![document],
        });
    for object in objects {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        match object["kind"].as_str() {
            Some("Namespace") => namespace = name,
            Some("StatefulSet") => {
                stored.stateful_sets.insert(name, object);
            }
            Some("Service") => {
                stored.services.insert(name, object);
            }
            _ => {}
        }
    }
    (stored, namespace)
}

/// Takes off what Go's structs and the API server add to templates that were applied.
fn without_defaults(content: &mut Value) {
    match content {
        Value::Object(fields) => {
            fields.retain(|key, value| {
                !(value.is_null() || key == "status" || key == "resources" && *value == json!({}))
            });
            if fields.contains_key("fieldPath") {
                fields.remove("apiVersion");
            }
            fields.values_mut().for_each(without_defaults);
        }
        Value::Array(elements) => elements.iter_mut().for_each(without_defaults),
        _ => {}
    }
}
