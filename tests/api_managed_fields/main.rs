//! What `metadata.managedFields` of a real API server tells of an object that we applied and others changed: each in
//! the way it is done, by kubectl itself where a person would; and what is recorded by it of a tenant.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod adopt;
mod contents;
mod drift;
mod objects;
mod scene;
#[path = "../support/mod.rs"]
mod support;

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PostParams},
};
use serde_json::{Value, json};
use vc_manager::{
    api::FIELD_MANAGER,
    controller::{
        kubernetes::apply_params,
        managed_fields::{is_applied_by_us, owned},
        render::{Kind, Rendered},
    },
};

use contents::{charts, fixture, oddities, of_file, rendered};
use objects::{api, by};
use scene::told;
use support::{Scope, samples, templates};

/// Applies all of `content` in a namespace of its own, and again; nothing has drifted either time, nor after others
/// wrote what is theirs, and what is said to be owned is what was applied. Gives the number of objects.
async fn settles(client: &Client, namespace: &str, content: &Value, origin: &str) -> usize {
    let object: Namespace =
        serde_json::from_value(json!({"metadata": {"name": namespace}})).expect("a namespace");
    Api::all(client.clone())
        .create(&PostParams::default(), &object)
        .await
        .expect("a name no other test uses");
    let objects = rendered(content, namespace);
    for object in &objects {
        let what = format!("{origin}: {:?} {}", object.kind, object.name);
        let api = api(client, namespace, object.kind);
        for round in ["1", "2"] {
            let applied = api
                .patch(&object.name, &apply_params(false), &Patch::Apply(&object.value))
                .await
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(is_applied_by_us(&applied.metadata), "{what}");
            assert_eq!(
                told(&object.value, &applied.metadata),
                [""; 0],
                "{what}, round {round}"
            );
            let noted = note(&api, object, round).await;
            assert_eq!(
                told(&object.value, &noted.metadata),
                [""; 0],
                "{what}, noted in round {round}"
            );
            let stored = serde_json::to_value(&noted).expect("JSON");
            let part = owned(&stored, &noted.metadata, FIELD_MANAGER).expect("something is ours");
            assert_contains(&stored, &part, &what);
            let again = api
                .patch(&object.name, &apply_params(true), &Patch::Apply(&part))
                .await
                .unwrap_or_else(|error| panic!("{what}: what is owned is refused: {error}\n{part:#}"));
            assert_eq!(again.data["spec"], noted.data["spec"], "{what}");
            assert_eq!(again.metadata.annotations, noted.metadata.annotations, "{what}");
            assert_eq!(again.metadata.labels, noted.metadata.labels, "{what}");
        }
    }
    objects.len()
}

/// Writes a status and a note, as others do.
async fn note(api: &Api<DynamicObject>, object: &Rendered, text: &str) -> DynamicObject {
    let status = match object.kind {
        Kind::StatefulSet => json!({"replicas": 1, "observedGeneration": text.len()}),
        Kind::Service => {
            json!({"conditions": [{"type": "Seen", "status": "True", "reason": "Seen", "message": text,
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
        }
    };
    let status = Patch::Merge(json!({"status": status}));
    api.patch_status(&object.name, &by("kube-controller-manager"), &status)
        .await
        .expect("a status");
    let note = json!({"example.com/note": text});
    let note = Patch::Merge(json!({"metadata": {"annotations": note, "labels": note}}));
    api.patch(&object.name, &by("other"), &note)
        .await
        .expect("a note")
}
fn assert_contains(whole: &Value, part: &Value, what: &str) {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            for (key, value) in part {
                assert_contains(
                    whole.get(key).unwrap_or(&Value::Null),
                    value,
                    &format!("{what}.{key}"),
                );
            }
        }
        (Value::Array(whole), Value::Array(part)) if whole.len() == part.len() => {
            for (whole, part) in whole.iter().zip(part) {
                assert_contains(whole, part, &format!("{what}[]"));
            }
        }
        _ => assert_eq!(whole, part, "{what}"),
    }
}
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_has_drifted_right_after_it_was_applied() {
    let scope = Scope::new("fields-own").await;
    let mut contents = vec![
        ("oddities".to_owned(), oddities()),
        ("fixture".to_owned(), fixture()),
        ("NodePort".to_owned(), templates::full("NodePort")),
    ];
    for file in samples::files(&charts()) {
        let found = of_file(&file).into_iter();
        contents.extend(found.map(|content| (file.display().to_string(), content)));
    }
    assert_eq!(contents.len(), 5);
    for (index, (origin, content)) in contents.iter().enumerate() {
        settles(&scope.client, &format!("fields-own-{index}"), content, origin).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_has_drifted_in_what_users_of_the_go_manager_have() {
    let Some(folder) = samples::of_the_go_manager() else {
        return;
    };
    let scope = Scope::new("fields-go").await;
    let mut contents = 0;
    let mut applied = 0;
    for file in samples::files(&folder) {
        for content in of_file(&file) {
            contents += 1;
            let namespace = format!("fields-go-{contents}");
            applied += settles(&scope.client, &namespace, &content, &file.display().to_string()).await;
        }
    }
    println!("{applied} objects of {contents} ClusterVersions");
    assert!(
        contents >= 8,
        "only {contents} ClusterVersions found in {}",
        folder.display()
    );
}
