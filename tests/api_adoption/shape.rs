//! What the fixture makes, beside what a real Go manager made.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, Secret, Service},
};
use kube::{
    Resource,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vc_manager::api::VirtualCluster;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::real::{of_kind, real};
use crate::support::{
    Driver, Scope,
    upstream::{Reached, State, Tenant, raw},
};

/// What the fixture makes looks like what a real Go manager makes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fixture_is_like_the_real_ones() {
    let real = real();
    if real.is_empty() {
        return;
    }
    let scope = Scope::new("shape").await;
    let driver = Driver::start(&scope);
    let content = |file: &str| of_kind(&real[file], "ClusterVersion")["spec"].clone();
    let from = content("running-clusterip");
    let cases = [
        ("running-clusterip", State::Running),
        ("running-after-upgrade", State::Upgraded { from }),
        (
            "pending-nodeport-kubeconfig",
            State::Pending {
                retries: 1,
                reached: Reached::ControllerManager,
            },
        ),
        (
            "pending-image-missing",
            State::Pending {
                retries: 2,
                reached: Reached::ApiServer,
            },
        ),
        (
            "error-image-missing",
            State::Error {
                reached: Reached::ApiServer,
            },
        ),
    ];
    let mut differences = String::new();
    for (file, state) in cases {
        let version = format!("shape-{file}");
        scope.create_cluster_version(&version, content(file)).await;
        let objects = &real[file];
        let theirs = of_kind(objects, "VirtualCluster");
        let name = theirs["metadata"]["name"].as_str().unwrap();
        if matches!(state, State::Pending { .. } | State::Error { .. }) {
            driver.hold(name, "controller-manager");
        }
        let made = Tenant::new("shape", name, &version)
            .state(state)
            .gate()
            .leave(&scope.client)
            .await;
        let ours = [
            everything::<Namespace>(&scope, &made.root).await,
            everything::<Secret>(&scope, &made.root).await,
            everything::<Service>(&scope, &made.root).await,
            everything::<StatefulSet>(&scope, &made.root).await,
            vec![serde_json::to_value(&made.object).unwrap()],
        ];
        let ours = shapes(&ours.concat());
        let theirs = shapes(objects);
        assert_eq!(
            ours.keys().collect::<Vec<_>>(),
            theirs.keys().collect::<Vec<_>>(),
            "{file}"
        );
        for (name, shape) in &theirs {
            let (ours, theirs) = (pretty(&ours[name]), pretty(shape));
            if ours != theirs {
                let _ = writeln!(
                    differences,
                    "{file}, {name}:
{}",
                    difference(&theirs, &ours)
                );
            }
        }
        // The same name for the next one.
        let api = raw::<VirtualCluster>(&scope.client, Some("shape"));
        let free = json!({"metadata": {"finalizers": null}});
        api.patch(name, &PatchParams::default(), &Patch::Merge(&free))
            .await
            .unwrap();
        scope.delete(name).await;
    }
    assert!(differences.is_empty(), "{differences}");
}

/// Objects of a kind in a root namespace; the namespace itself if that is the kind.
async fn everything<K: Resource<DynamicType = ()>>(scope: &Scope, root: &str) -> Vec<Value> {
    let kind = K::kind(&()).into_owned();
    let objects = if kind == "Namespace" {
        vec![raw::<K>(&scope.client, None).get(root).await.unwrap()]
    } else {
        let api = raw::<K>(&scope.client, Some(root));
        api.list(&ListParams::default()).await.unwrap().items
    };
    let typed = objects.into_iter().map(|object| {
        let mut object = serde_json::to_value(object).unwrap();
        // Items of a list do not say it.
        object["kind"] = json!(kind);
        object["apiVersion"] = json!(K::api_version(&()));
        object
    });
    typed.collect()
}

/// Objects by kind/name, without what differs between any two tenants.
fn shapes(objects: &[Value]) -> BTreeMap<String, Value> {
    let tenant = of_kind(objects, "VirtualCluster");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let service = objects
        .iter()
        .find(|object| object["kind"] == "Service" && object["metadata"]["name"] == "apiserver-svc")
        .expect("the apiserver's Service");
    let address = text(&service["spec"]["clusterIP"]);
    let words = [
        (text(&tenant["status"]["clusterNamespace"]), "ROOT"),
        (text(&tenant["metadata"]["uid"]), "UID"),
        (text(&tenant["spec"]["clusterVersionName"]), "VERSION"),
        (address.clone(), "ADDRESS"),
        (
            format!("\"{}\"", text(&tenant["metadata"]["namespace"])),
            "\"NAMESPACE\"",
        ),
        (
            format!("\\\"{}\\\"", text(&tenant["metadata"]["namespace"])),
            "\\\"NAMESPACE\\\"",
        ),
        // The same in a certificate.
        (
            format!(
                "{:?}",
                address
                    .split('.')
                    .map(|part| part.parse().unwrap_or(0))
                    .collect::<Vec<u8>>()
            ),
            "ADDRESS",
        ),
        ("40 seconds".into(), "600 seconds"),
    ];
    let wanted = ["VirtualCluster", "Namespace", "Secret", "Service", "StatefulSet"];
    let mut shapes = BTreeMap::new();
    for object in objects
        .iter()
        .filter(|object| wanted.iter().any(|kind| object["kind"] == *kind))
    {
        let mut shape = object.clone();
        strip(&mut shape);
        let mut text = shape.to_string();
        for (word, name) in &words {
            text = text.replace(word, name);
        }
        let shape: Value = serde_json::from_str(&text).unwrap();
        let name = format!(
            "{}/{}",
            object["kind"].as_str().unwrap(),
            shape["metadata"]["name"].as_str().unwrap()
        );
        shapes.insert(name, shape);
    }
    shapes
}

fn strip(object: &mut Value) {
    let kind = object["kind"].as_str().unwrap().to_owned();
    let metadata = object["metadata"].as_object_mut().unwrap();
    for key in ["uid", "resourceVersion", "creationTimestamp"] {
        metadata.remove(key);
    }
    if let Some(Value::Array(entries)) = metadata.get_mut("managedFields") {
        entries.retain(|entry| entry.get("subresource").is_none() || kind == "VirtualCluster");
        for entry in entries {
            entry.as_object_mut().unwrap().remove("time");
        }
    }
    match kind.as_str() {
        "VirtualCluster" => {
            // Here the definition counts status apart.
            metadata.remove("generation");
            let managers: BTreeSet<_> = metadata["managedFields"]
                .as_array()
                .unwrap()
                .iter()
                .map(|entry| entry["manager"].to_string())
                .collect();
            metadata.insert("managedFields".into(), json!(managers));
            metadata["labels"]["tenancy.x-k8s.io/cluster-version-applied"] = json!("RESOURCE VERSION");
            for condition in object["status"]["conditions"].as_array_mut().unwrap() {
                condition["lastTransitionTime"] = json!("TIME");
            }
        }
        "Secret" => {
            for value in object["data"].as_object_mut().unwrap().values_mut() {
                let bytes = STANDARD.decode(value.as_str().unwrap()).unwrap();
                *value = contents(&String::from_utf8(bytes).unwrap());
            }
        }
        "Service" => {
            for port in object["spec"]["ports"].as_array_mut().into_iter().flatten() {
                if port.get("nodePort").is_some() {
                    port["nodePort"] = json!("PORT");
                }
            }
        }
        "StatefulSet" => {
            object.as_object_mut().unwrap().remove("status");
            let annotations = object.pointer_mut("/spec/template/metadata/annotations");
            for (key, value) in annotations.and_then(Value::as_object_mut).into_iter().flatten() {
                let text = value.as_str().unwrap();
                let is_hash = text.len() == 64
                    && text
                        .bytes()
                        .all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
                assert!(is_hash, "{key}: {text}");
                *value = json!("HASH");
            }
        }
        _ => {}
    }
}

/// A kubeconfig or PEM text with what keys and certificates are, in their place.
fn contents(text: &str) -> Value {
    if let Ok(blocks) = pem::parse_many(text)
        && !blocks.is_empty()
    {
        return blocks.iter().map(block).collect();
    }
    let mut shown = String::new();
    for line in text.split('\n') {
        match line.split_once("-data: ") {
            Some((key, data)) => {
                let data = String::from_utf8(STANDARD.decode(data).unwrap()).unwrap();
                let _ = writeln!(shown, "{key}-data: {}", contents(&data));
            }
            None => {
                let _ = writeln!(shown, "{line}");
            }
        }
    }
    json!(shown.lines().collect::<Vec<_>>())
}

fn block(block: &pem::Pem) -> Value {
    if block.tag() != "CERTIFICATE" {
        // Keys of one size differ by a few bytes.
        return json!([block.tag(), block.contents().len() / 50]);
    }
    let (_, certificate) = X509Certificate::from_der(block.contents()).unwrap();
    let validity = certificate.validity();
    let days = (validity.not_after.timestamp() - validity.not_before.timestamp()) / 86_400;
    let mut extensions: Vec<_> = certificate
        .extensions()
        .iter()
        // Identifiers of keys differ.
        .map(|extension| match extension.oid.to_id_string().as_str() {
            id @ ("2.5.29.14" | "2.5.29.35") => id.to_owned(),
            id => format!("{id} {} {:?}", extension.critical, extension.parsed_extension()),
        })
        .collect();
    extensions.sort();
    json!({
        "subject": certificate.subject().to_string(),
        "issuer": certificate.issuer().to_string(),
        "is serial 0": certificate.serial.to_string() == "0",
        "days": days,
        "signature": certificate.signature_algorithm.algorithm.to_id_string(),
        "key": certificate.public_key().algorithm.algorithm.to_id_string(),
        "key size": certificate.public_key().subject_public_key.data.len(),
        "extensions": extensions,
    })
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap()
}

/// Lines that only one of two texts has.
fn difference(one: &str, other: &str) -> String {
    let only = |sign: char, one: &str, other: &str| -> String {
        let known: BTreeSet<_> = other.lines().collect();
        let lines = one.lines().filter(|line| !known.contains(line));
        lines
            .map(|line| format!("{sign} {line}"))
            .collect::<Vec<_>>()
            .join("\n")
    };
    format!("{}\n{}", only('-', one, other), only('+', other, one))
}
