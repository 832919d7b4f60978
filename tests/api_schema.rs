//! What the definitions alone refuse, on a real API server without any webhook: the exact words, and that nothing
//! which was stored before the rules is locked in by them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::api::crd::crds;

use support::{ApiServer, Scope, eventually, samples, templates};

/// Objects of a kind as raw as the server takes them; VirtualClusters are those of the namespace `default`.
fn raw(client: &Client, kind: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("tenancy.x-k8s.io", "v1alpha1", kind));
    match kind {
        "ClusterVersion" => Api::all_with(client.clone(), &resource),
        _ => Api::namespaced_with(client.clone(), "default", &resource),
    }
}

fn object(kind: &str, name: &str, rest: &Value) -> DynamicObject {
    let mut object =
        json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": kind, "metadata": {"name": name}});
    for (key, value) in rest.as_object().expect("an object").clone() {
        object[key] = value;
    }
    serde_json::from_value(object).expect("an object with metadata")
}

/// What a user is told: one line per fault, as kubectl prints them, in an order that does not change.
fn told<T>(answer: Result<T, kube::Error>) -> String {
    let status = match answer {
        Ok(_) => return "accepted".into(),
        Err(kube::Error::Api(status)) => status,
        Err(error) => panic!("no answer: {error}"),
    };
    assert_eq!(
        (status.code, status.reason.as_str()),
        (422, "Invalid"),
        "{status:?}"
    );
    let causes = status.details.as_ref().map(|details| details.causes.clone());
    let lines: BTreeSet<_> = causes
        .unwrap_or_default()
        .into_iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

async fn create(client: &Client, kind: &str, name: &str, rest: Value) -> String {
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    told(
        raw(client, kind)
            .create(&dry_run, &object(kind, name, &rest))
            .await,
    )
}

fn remove(value: &mut Value, pointer: &str) {
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    let parent = value.pointer_mut(parent).and_then(Value::as_object_mut);
    assert!(
        parent.expect("an object").remove(key).is_some(),
        "{pointer} is not there"
    );
}

fn set(value: &mut Value, pointer: &str, to: Value) {
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    value.pointer_mut(parent).expect("it is there")[key] = to;
}

/// A good content, changed.
fn content(change: impl Fn(&mut Value)) -> Value {
    let mut content = templates::full("ClusterIP");
    change(&mut content);
    content
}

fn without_types() -> Value {
    content(|it| {
        for bundle in ["etcd", "apiServer", "controllerManager"] {
            for object in ["statefulset", "service"] {
                if let Some(object) = it[bundle].get_mut(object) {
                    remove(object, "/apiVersion");
                    remove(object, "/kind");
                }
            }
        }
    })
}

fn of_wrong_types() -> Value {
    content(|it| {
        set(it, "/etcd/statefulset/kind", json!("Deployment"));
        set(it, "/etcd/service/kind", json!("Services"));
        set(it, "/apiServer/service/apiVersion", json!("apps/v1"));
        set(it, "/controllerManager/statefulset/apiVersion", json!(""));
    })
}

fn of_wrong_names() -> Value {
    content(|it| {
        set(it, "/etcd/metadata/name", json!("etcdd"));
        set(it, "/etcd/statefulset/metadata/name", json!("etcd-0"));
        set(it, "/apiServer/service/metadata/name", json!(""));
        remove(it, "/apiServer/statefulset/metadata/name");
        remove(it, "/controllerManager/statefulset/metadata");
    })
}

fn without_containers() -> Value {
    content(|it| {
        let path = "statefulset/spec/template";
        set(it, &format!("/etcd/{path}/spec/containers"), json!([]));
        remove(it, &format!("/apiServer/{path}/spec/containers"));
        set(it, &format!("/controllerManager/{path}"), json!({}));
    })
}

fn of_wrong_size() -> Value {
    content(|it| {
        set(it, "/etcd/statefulset/spec/replicas", json!(0));
        set(it, "/apiServer/statefulset/spec/replicas", json!(1001));
        set(it, "/controllerManager/statefulset/spec/replicas", json!(-1));
    })
}

/// Nulls where they mean nothing, and keys that no version of Kubernetes knows.
fn with_nulls_and_unknown_fields() -> Value {
    content(|it| {
        set(it, "/controllerManager/service", Value::Null);
        set(it, "/etcd/metadata/name", Value::Null);
        set(it, "/apiServer/metadata", Value::Null);
        set(it, "/etcd/statefulset/spec/replicas", Value::Null);
        for object in ["/etcd/statefulset", "/etcd/service", "/apiServer/statefulset"] {
            set(it, &format!("{object}/metadata/creationTimestamp"), Value::Null);
            set(
                it,
                &format!("{object}/metadata/future"),
                json!({"a": null, "b": [1, {"c": 0.5}]}),
            );
            set(it, &format!("{object}/future"), json!([null, "x"]));
            set(it, &format!("{object}/status"), json!({"replicas": 1}));
        }
        let template = "/etcd/statefulset/spec/template";
        set(it, &format!("{template}/metadata/creationTimestamp"), Value::Null);
        set(it, &format!("{template}/future"), json!(true));
        set(it, &format!("{template}/spec/future"), json!({"n": null}));
        set(
            it,
            &format!("{template}/spec/containers/0/big"),
            json!(9_007_199_254_740_993_i64),
        );
        set(it, "/etcd/metadata/labels", json!({"kept": "too"}));
        set(it, "/etcd/future", json!(1));
        set(it, "/future", json!({"y": null}));
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_version_is_refused_in_these_words() {
    let client = Scope::new("refused-cv").await.client;
    let refused =
        async |content: Value| create(&client, "ClusterVersion", "refused", json!({"spec": content})).await;
    insta::assert_snapshot!(refused(without_types()).await, @r#"
    spec.apiServer.service.apiVersion: Required value: must be "v1"
    spec.apiServer.service.kind: Required value: must be "Service"
    spec.apiServer.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.apiServer.statefulset.kind: Required value: must be "StatefulSet"
    spec.controllerManager.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.controllerManager.statefulset.kind: Required value: must be "StatefulSet"
    spec.etcd.service.apiVersion: Required value: must be "v1"
    spec.etcd.service.kind: Required value: must be "Service"
    spec.etcd.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.etcd.statefulset.kind: Required value: must be "StatefulSet"
    "#);
    insta::assert_snapshot!(refused(of_wrong_types()).await, @r#"
    spec.apiServer.service.apiVersion: Invalid value: "string": must be "v1", is "apps/v1"
    spec.controllerManager.statefulset.apiVersion: Invalid value: "string": must be "apps/v1", is ""
    spec.etcd.service.kind: Invalid value: "string": must be "Service", is "Services"
    spec.etcd.statefulset.kind: Invalid value: "string": must be "StatefulSet", is "Deployment"
    "#);
    insta::assert_snapshot!(refused(of_wrong_names()).await, @r#"
    spec.apiServer.service.metadata.name: Required value: the name of the Service
    spec.apiServer.statefulset.metadata.name: Required value: must be "apiserver"
    spec.controllerManager.statefulset.metadata.name: Required value: must be "controller-manager"
    spec.etcd.metadata.name: Invalid value: "string": must be "etcd", is "etcdd"
    spec.etcd.statefulset.metadata.name: Invalid value: "string": must be "etcd", is "etcd-0"
    "#);
    insta::assert_snapshot!(refused(without_containers()).await, @"
    spec.apiServer.statefulset.spec.template.spec.containers: Required value: at least one container
    spec.controllerManager.statefulset.spec.template.spec.containers: Required value: at least one container
    spec.etcd.statefulset.spec.template.spec.containers: Invalid value: 0: spec.etcd.statefulset.spec.template.spec.containers in body should have at least 1 items
    ");
    insta::assert_snapshot!(refused(of_wrong_size()).await, @"
    spec.apiServer.statefulset.spec.replicas: Invalid value: 1001: spec.apiServer.statefulset.spec.replicas in body should be less than or equal to 1000
    spec.controllerManager.statefulset.spec.replicas: Invalid value: -1: spec.controllerManager.statefulset.spec.replicas in body should be greater than or equal to 0
    spec.etcd.statefulset.spec.replicas: Invalid value: 0: spec.etcd.statefulset.spec.replicas in body should be greater than or equal to 1
    ");
    insta::assert_snapshot!(refused(json!({"apiServer": {}})).await, @"spec.apiServer.statefulset: Required value: a whole apps/v1 StatefulSet");
    insta::assert_snapshot!(refused(content(|it| set(it, "/etcd/statefulset/spec/replicas", json!("3")))).await, @r#"
    <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation
    spec.etcd.statefulset.spec.replicas: Invalid value: "string": spec.etcd.statefulset.spec.replicas in body must be of type integer: "string"
    "#);
    insta::assert_snapshot!(create(&client, "ClusterVersion", "refused", json!({})).await, @"spec: Required value: the bundles of the control plane's components");
    insta::assert_snapshot!(refused(json!({})).await, @"spec.apiServer: Required value: a tenant without an apiserver cannot be provisioned");
    insta::assert_snapshot!(refused(content(|it| it["upgradePolicy"] = json!({"maxConcurrent": "0%", "surge": "Always", "rollback": "No",
        "certificates": ""}))).await, @r#"
    spec.upgradePolicy.certificates: Invalid value: "string": must be one of Always, IfNeeded
    spec.upgradePolicy.maxConcurrent: Invalid value: "": must be a number from 1, or a percentage from "1%" to "100%"
    spec.upgradePolicy.rollback: Invalid value: "string": must be one of Automatic, Manual
    spec.upgradePolicy.surge: Invalid value: "string": must be one of IfPossible, Never
    "#);
    insta::assert_snapshot!(refused(content(|it| it["upgradePolicy"] = json!({"maxFailures": 0, "soak": "30", "canary": {"count": -1},
        "windows": [{"schedule": "* * * * *"}]}))).await, @r#"
    <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation
    spec.upgradePolicy.canary.count: Invalid value: -1: spec.upgradePolicy.canary.count in body should be greater than or equal to 0
    spec.upgradePolicy.maxFailures: Invalid value: 0: spec.upgradePolicy.maxFailures in body should be greater than or equal to 1
    spec.upgradePolicy.soak: Invalid value: "30": spec.upgradePolicy.soak in body should match '^([0-9]+([.][0-9]*)?(ns|us|ms|s|m|h))+$'
    spec.upgradePolicy.windows[0].duration: Required value
    "#);
    // Nothing that the manager can do without is asked for.
    for accepted in [
        templates::full("NodePort"),
        templates::without_controller_manager(),
        content(|it| set(it, "/etcd", Value::Null)),
        content(|it| {
            it["upgradePolicy"] = json!({"maxConcurrent": "25%", "canary": {"count": 0}, "soak": "1m30s", "maxFailures": 1,
                "stepTimeout": null, "paused": false, "surge": "Never", "rollback": "Manual", "certificates": null,
                "windows": [{"schedule": "0 2 * * 6", "duration": "4h"}]});
        }),
        content(|it| it["upgradePolicy"] = json!({"maxConcurrent": 3, "windows": null})),
        content(|it| remove(it, "/etcd/metadata")),
        content(|it| set(it, "/apiServer/statefulset/spec/replicas", json!(0))),
        with_nulls_and_unknown_fields(),
    ] {
        assert_eq!(refused(accepted.clone()).await, "accepted", "{accepted}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_virtual_cluster_is_refused_in_these_words() {
    let client = Scope::new("refused-vc").await.client;
    let named =
        async |name: &str, spec: Value| create(&client, "VirtualCluster", name, json!({"spec": spec})).await;
    let refused = async |spec: Value| named("refused", spec).await;
    insta::assert_snapshot!(refused(json!({"clusterVersionName": ""})).await, @"spec.clusterVersionName: Required value: the name of a ClusterVersion");
    insta::assert_snapshot!(refused(json!({"clusterVersionName": "v", "pkiExpireDays": 0})).await, @"spec.pkiExpireDays: Invalid value: 0: spec.pkiExpireDays in body should be greater than or equal to 1");
    insta::assert_snapshot!(refused(json!({"clusterVersionName": "v", "pkiExpireDays": 3651})).await, @"spec.pkiExpireDays: Invalid value: 3651: spec.pkiExpireDays in body should be less than or equal to 3650");
    insta::assert_snapshot!(refused(json!({"clusterVersionName": "v", "clusterDomain": "Cluster.local"})).await, @r#"spec.clusterDomain: Invalid value: "string": must be a DNS domain such as cluster.local: lower-case letters, digits, - and ., at most 253 characters"#);
    insta::assert_snapshot!(named("with.dot", json!({"clusterVersionName": "v"})).await, @r#"metadata.name: Invalid value: "object": must be at most 54 characters, none of them a dot: it becomes part of the name of a namespace"#);
    insta::assert_snapshot!(named(&"n".repeat(55), json!({"clusterVersionName": "v"})).await, @r#"metadata.name: Invalid value: "object": must be at most 54 characters, none of them a dot: it becomes part of the name of a namespace"#);
    insta::assert_snapshot!(create(&client, "VirtualCluster", "refused", json!({})).await, @"spec: Required value: what the tenant is made from");
    for domain in [json!(""), Value::Null, json!("cluster.local"), json!("x")] {
        let spec = json!({"clusterVersionName": "v", "clusterDomain": domain, "pkiExpireDays": 3650});
        assert_eq!(named(&"n".repeat(54), spec).await, "accepted", "{domain}");
    }

    let api = raw(&client, "VirtualCluster");
    let stored = object(
        "VirtualCluster",
        "stored",
        &json!({"spec": {"clusterVersionName": "v"}}),
    );
    api.create(&PostParams::default(), &stored)
        .await
        .expect("a good one");
    let patched = async |patch: Value| {
        let answer = api
            .patch("stored", &PatchParams::default(), &Patch::Merge(patch))
            .await;
        told(answer)
    };
    insta::assert_snapshot!(patched(json!({"spec": {"clusterVersionName": "w"}})).await, @r#"spec.clusterVersionName: Invalid value: "string": may not change: make another VirtualCluster"#);
    insta::assert_snapshot!(patched(json!({"spec": null})).await, @"spec: Required value: what the tenant is made from");
    let status = async |patch: Value| {
        let answer = api
            .patch_status("stored", &PatchParams::default(), &Patch::Merge(patch))
            .await;
        told(answer)
    };
    assert_eq!(status(json!({"status": {"phase": "Running"}})).await, "accepted");
    let mut words = BTreeSet::new();
    for emptied in [json!({"phase": ""}), json!({"phase": null}), Value::Null] {
        words.insert(status(json!({"status": emptied})).await);
    }
    insta::assert_snapshot!(Vec::from_iter(words).join("\n"), @r#"status.phase: Invalid value: "object": cannot set virtualcluster.Status.Phase to empty"#);
    assert_eq!(status(json!({"status": {"phase": "Error"}})).await, "accepted");
}

/// What is not looked at is kept as it is, unknown fields of embedded metadata included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_are_kept_as_they_are() {
    let client = Scope::new("kept").await.client;
    let sent = with_nulls_and_unknown_fields();
    let api = raw(&client, "ClusterVersion");
    api.create(
        &PostParams::default(),
        &object("ClusterVersion", "kept", &json!({"spec": sent})),
    )
    .await
    .expect("it is accepted");
    assert_eq!(api.get("kept").await.unwrap().data["spec"], sent);
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    api.patch("kept", &PatchParams::default(), &Patch::Merge(label))
        .await
        .unwrap();
    assert_eq!(api.get("kept").await.unwrap().data["spec"], sent);
}

/// Rules have a budget; the largest object that etcd takes stays far below it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_megabyte_is_within_the_budget_of_the_rules() {
    let client = Scope::new("large").await.client;
    let api = raw(&client, "ClusterVersion");
    let long = "x".repeat(1024);
    let container = json!({"name": "c", "image": "i", "args": [long]});
    let mut large = content(|it| {
        let path = "/apiServer/statefulset/spec/template/spec/containers";
        set(it, path, Value::from(vec![container.clone(); 1000]));
    });
    assert!(large.to_string().len() > 1 << 20, "{}", large.to_string().len());
    let stored = object("ClusterVersion", "large", &json!({"spec": large}));
    api.create(&PostParams::default(), &stored)
        .await
        .expect("it is accepted");
    let edit = json!({"spec": {"etcd": {"statefulset": {"spec": {"replicas": 3}}}}});
    api.patch("large", &PatchParams::default(), &Patch::Merge(edit))
        .await
        .expect("an edit is accepted, too");
    // A message that quotes what was sent is bounded, too.
    set(&mut large, "/etcd/statefulset/kind", json!("K".repeat(100_000)));
    insta::assert_snapshot!(create(&client, "ClusterVersion", "larger", json!({"spec": large})).await, @r#"spec.etcd.statefulset.kind: Invalid value: "string": must be "StatefulSet""#);
}

/// The definitions as the Go manager installs them: of a ClusterVersion nothing is checked, and none has a status.
fn permissive() -> [CustomResourceDefinition; 2] {
    let definition = |kind: &str, plural: &str, short: &str, scope: &str, schema: Value| {
        serde_json::from_value(json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.tenancy.x-k8s.io")},
            "spec": {
                "group": "tenancy.x-k8s.io",
                "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural,
                    "singular": kind.to_lowercase(), "shortNames": [short]},
                "scope": scope,
                "versions": [{"name": "v1alpha1", "served": true, "storage": true,
                    "schema": {"openAPIV3Schema": schema}}],
            },
        }))
        .expect("a definition")
    };
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let strings = json!({"type": "array", "items": {"type": "string"}});
    let tenant = json!({"type": "object", "properties": {
        "spec": {"type": "object", "required": ["clusterVersionName"], "properties": {
            "clusterVersionName": {"type": "string"}, "clusterDomain": {"type": "string"},
            "pkiExpireDays": {"type": "integer", "format": "int64"}, "serviceCidr": {"type": "string"},
            "transparentMetaPrefixes": strings, "opaqueMetaPrefixes": strings,
        }},
        "status": {"type": "object", "required": ["phase"], "properties": {
            "phase": {"type": "string"}, "clusterNamespace": {"type": "string"},
            "message": {"type": "string"}, "reason": {"type": "string"},
            "conditions": {"type": "array", "items": {"type": "object", "required": ["status"], "properties": {
                "status": {"type": "string"}, "reason": {"type": "string"}, "message": {"type": "string"},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
            }}},
        }},
    }});
    [
        definition("ClusterVersion", "clusterversions", "cv", "Cluster", anything),
        definition("VirtualCluster", "virtualclusters", "vc", "Namespaced", tenant),
    ]
}

/// Objects that break each rule, with names of their own, and the same repaired: kind, name, broken, whole.
fn broken_objects() -> Vec<(&'static str, String, Value, Value)> {
    let whole = json!({"spec": templates::full("ClusterIP")});
    let with_nulls = content(|it| {
        set(it, "/etcd/statefulset/kind", Value::Null);
        set(it, "/etcd/statefulset/apiVersion", Value::Null);
        set(it, "/etcd/statefulset/metadata", Value::Null);
        set(it, "/apiServer/statefulset", Value::Null);
        set(it, "/apiServer/service", Value::Null);
        set(it, "/controllerManager", Value::Null);
    });
    let bad_metadata = content(|it| {
        let metadata = "/etcd/statefulset/metadata";
        set(it, &format!("{metadata}/creationTimestamp"), json!("yesterday"));
        set(it, &format!("{metadata}/labels"), json!({"no such key!": 1}));
        set(it, &format!("{metadata}/future"), json!({"a": null}));
    });
    let versions = [
        ("no-types", json!({"spec": without_types()})),
        ("wrong-types", json!({"spec": of_wrong_types()})),
        ("wrong-names", json!({"spec": of_wrong_names()})),
        ("no-containers", json!({"spec": without_containers()})),
        ("wrong-size", json!({"spec": of_wrong_size()})),
        ("null-fields", json!({"spec": with_nulls})),
        ("bad-metadata", json!({"spec": bad_metadata})),
        ("unknown-fields", json!({"spec": with_nulls_and_unknown_fields()})),
        ("empty-bundle", json!({"spec": {"etcd": {}}})),
        ("no-spec", json!({})),
        ("null-spec", json!({"spec": null})),
    ];
    let long = "n".repeat(60);
    let spec = |more: Value| {
        let mut spec = json!({"clusterVersionName": "v"});
        for (key, value) in more.as_object().expect("an object").clone() {
            spec[key] = value;
        }
        json!({"spec": spec})
    };
    let running = json!({
        "spec": {"clusterVersionName": "v"},
        "status": {"phase": "Running", "message": "m", "reason": "r", "clusterNamespace": "n",
            "conditions": [{"status": "True", "reason": "r", "lastTransitionTime": "2026-12-01T05:39:39Z"}]},
    });
    let tenants = [
        ("no-version", spec(json!({"clusterVersionName": ""}))),
        ("no-spec", json!({})),
        ("days", spec(json!({"pkiExpireDays": 36_500}))),
        ("domain", spec(json!({"clusterDomain": "Not_A_Domain"}))),
        ("with.dot", spec(json!({}))),
        (long.as_str(), spec(json!({}))),
        ("running", running),
    ];
    let versions = versions
        .into_iter()
        .map(|(name, broken)| ("ClusterVersion", name.to_owned(), broken, whole.clone()));
    let tenants = tenants
        .into_iter()
        .map(|(name, broken)| ("VirtualCluster", name.to_owned(), broken, spec(json!({}))));
    versions.chain(tenants).collect()
}

/// Puts this version's definitions in the place of those installed, and waits until the rules are in force.
async fn update_definitions(client: &Client) {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for definition in crds() {
        let name = definition.metadata.name.clone().expect("a name");
        let apply = PatchParams::apply("test").force();
        api.patch(&name, &apply, &Patch::Apply(&definition))
            .await
            .expect("it replaces the old one");
    }
    for (kind, broken) in [
        ("ClusterVersion", without_types()),
        ("VirtualCluster", json!({"clusterVersionName": ""})),
    ] {
        eventually("the rules to be in force", async || {
            let answer = create(client, kind, "probe", json!({"spec": broken})).await;
            (answer != "accepted").then_some(())
        })
        .await;
    }
}

/// Whatever was stored before the rules can be labelled, finalized, given a status, repaired and deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_before_the_rules_is_not_locked_in() {
    let server = tokio::task::spawn_blocking(|| {
        let server = ApiServer::start();
        server.install(&permissive());
        server
    })
    .await
    .expect("the API server starts");
    let client = server.client().await;
    for (kind, name, broken, _) in broken_objects() {
        for name in [name.clone(), format!("{name}-x")] {
            let stored = raw(&client, kind)
                .create(&PostParams::default(), &object(kind, &name, &broken))
                .await;
            stored.unwrap_or_else(|error| panic!("{kind} {name}: {error}"));
        }
    }
    let left = left_by_the_go_manager();
    for left in &left {
        let kind = &left.types.as_ref().expect("a kind").kind;
        let stored = raw(&client, kind).create(&PostParams::default(), left).await;
        stored.unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
    // A value of another type: the one thing that must be repaired first.
    let twisted = json!({"spec": {"etcd": {"statefulset": "a text"}, "apiServer": 7}});
    for name in ["twisted", "twisted-x"] {
        raw(&client, "ClusterVersion")
            .create(&PostParams::default(), &object("ClusterVersion", name, &twisted))
            .await
            .expect("anything is accepted");
    }
    update_definitions(&client).await;

    for (kind, name, broken, whole) in broken_objects() {
        let api = raw(&client, kind);
        let what = format!("{kind} {name}");
        let merge = async |patch: Value| {
            let answer = api
                .patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
                .await;
            assert_eq!(told(answer), "accepted", "{what}: {patch}");
        };
        merge(json!({"metadata": {"labels": {"tenancy.x-k8s.io/ready-for-upgrade": "true"}}})).await;
        merge(json!({"metadata": {"annotations": {"a": "b"}, "finalizers": ["test/held"]}})).await;
        let status = Patch::Merge(json!({"status": {"observedGeneration": 1}}));
        let answer = api.patch_status(&name, &PatchParams::default(), &status).await;
        assert_eq!(told(answer), "accepted", "{what}: status");
        // Nothing of it was changed by that, but for nulls in the place of what must be there.
        let stored = api.get(&name).await.expect("it is there").data;
        assert_eq!(
            without_nulls(stored["spec"].clone()),
            without_nulls(broken["spec"].clone()),
            "{what}"
        );
        // Deleted while broken: the finalizer must come off.
        api.delete(&name, &DeleteParams::default())
            .await
            .expect("it is deleted");
        merge(json!({"metadata": {"finalizers": null}})).await;
        assert!(
            api.get_opt(&name).await.unwrap().is_none(),
            "{what} is still there"
        );

        let name = format!("{name}-x");
        let mut repaired = api.get(&name).await.expect("it is there");
        repaired.data["spec"] = whole["spec"].clone();
        let answer = api.replace(&name, &PostParams::default(), &repaired).await;
        assert_eq!(told(answer), "accepted", "{what}: repair");
        assert_eq!(
            api.get(&name).await.unwrap().data["spec"],
            whole["spec"],
            "{what}"
        );
    }
    for left in &left {
        let (kind, name) = (&left.types.as_ref().expect("a kind").kind, left.name_any());
        let api = raw(&client, kind);
        let stored = api.get(&name).await.expect("it is there").data;
        assert_eq!(stored.get("spec"), left.data.get("spec"), "{kind} {name}");
        assert_eq!(stored.get("status"), left.data.get("status"), "{kind} {name}");
        let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
        let answer = api.patch(&name, &PatchParams::default(), &label).await;
        assert_eq!(told(answer), "accepted", "{kind} {name}");
        let status = Patch::Merge(json!({"status": {"observedGeneration": 1}}));
        let answer = api.patch_status(&name, &PatchParams::default(), &status).await;
        assert_eq!(told(answer), "accepted", "{kind} {name}");
    }
    let api = raw(&client, "ClusterVersion");
    let mut repaired = api.get("twisted").await.expect("it is there");
    repaired.data["spec"] = templates::full("ClusterIP");
    let answer = api.replace("twisted", &PostParams::default(), &repaired).await;
    assert_eq!(told(answer), "accepted", "twisted: repair");
    api.delete("twisted-x", &DeleteParams::default())
        .await
        .expect("it is deleted");
    assert!(api.get_opt("twisted-x").await.unwrap().is_none());
}

/// What a Go manager left behind, if the machine has it: `VCM_COMPAT_DIR` or `../shared/compat`. Names are made to differ.
fn left_by_the_go_manager() -> Vec<DynamicObject> {
    let Some(folder) = samples::of_the_go_manager() else {
        return Vec::new();
    };
    let files = std::fs::read_dir(folder.join("left-by-upstream")).expect("a folder");
    let mut left = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("a text");
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
        for mut document in documents {
            if document["apiVersion"] == "tenancy.x-k8s.io/v1alpha1" {
                let finalizers = document["metadata"]["finalizers"].take();
                document["metadata"] =
                    json!({"name": format!("left-{}", left.len()), "finalizers": finalizers});
                left.push(serde_json::from_value(document).expect("an object"));
            }
        }
    }
    assert!(
        left.len() > 5,
        "only {} objects in {}",
        left.len(),
        folder.display()
    );
    left
}

/// `value` without members that are null, at any depth: those may be dropped.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key, without_nulls(value)))
            .collect(),
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// A rule binds what is written from now on: what was right may not be made wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_cannot_take_away_what_is_required() {
    let client = Scope::new("taken-away").await.client;
    let api = raw(&client, "ClusterVersion");
    let spec = json!({"spec": templates::full("ClusterIP")});
    api.create(
        &PostParams::default(),
        &object("ClusterVersion", "taken-away", &spec),
    )
    .await
    .expect("a good one");
    let mut broken = api.get("taken-away").await.unwrap();
    broken.data["spec"] = without_types();
    remove(&mut broken.data["spec"], "/apiServer/statefulset/metadata/name");
    remove(
        &mut broken.data["spec"],
        "/etcd/statefulset/spec/template/spec/containers",
    );
    let answer = api.replace("taken-away", &PostParams::default(), &broken).await;
    insta::assert_snapshot!(told(answer), @r#"
    spec.apiServer.service.apiVersion: Required value: must be "v1"
    spec.apiServer.service.kind: Required value: must be "Service"
    spec.apiServer.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.apiServer.statefulset.kind: Required value: must be "StatefulSet"
    spec.apiServer.statefulset.metadata.name: Required value: must be "apiserver"
    spec.controllerManager.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.controllerManager.statefulset.kind: Required value: must be "StatefulSet"
    spec.etcd.service.apiVersion: Required value: must be "v1"
    spec.etcd.service.kind: Required value: must be "Service"
    spec.etcd.statefulset.apiVersion: Required value: must be "apps/v1"
    spec.etcd.statefulset.kind: Required value: must be "StatefulSet"
    spec.etcd.statefulset.spec.template.spec.containers: Required value: at least one container
    "#);
}
