//! Contents of ClusterVersions, and what is rendered from them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use k8s_openapi::{ByteString, api::core::v1::Secret};
use serde_json::Value;
use vc_manager::{
    api::{Component, template::Template},
    controller::render::{self, Rendered, Tenant, TenantSecret},
};

pub(crate) fn sample() -> Value {
    of_file(&charts().join("clusterversion-1.34.yaml")).remove(0)
}

pub(crate) fn charts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/samples")
}

/// Contents of the ClusterVersions in a file, also of those in a list.
pub(crate) fn of_file(file: &Path) -> Vec<Value> {
    // Octal to kubectl, and not to the parser used here.
    let text = fs::read_to_string(file)
        .expect("it can be read")
        .replace(": 0440", ": 288");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap_or_default();
    let objects = documents
        .into_iter()
        .flat_map(|document| match &document["items"] {
            Value::Array(items) => items.clone(),
            _ => vec![document],
        });
    objects
        .filter(|object| object["kind"] == "ClusterVersion")
        .map(|object| object["spec"].clone())
        .collect()
}

pub(crate) fn tenant(namespace: &str) -> Tenant {
    Tenant {
        name: "name".into(),
        namespace: "ns".into(),
        uid: "uid".into(),
        root_namespace: namespace.into(),
        cluster_domain: "cluster.local".into(),
        external_domain: None,
        pki_expire_days: None,
    }
}

/// All that is applied of `content` in `namespace`, with hashes of Secrets.
pub(crate) fn rendered(content: &Value, namespace: &str) -> Vec<Rendered> {
    let template = Template::parse(content).expect("a template");
    let tenant = tenant(namespace);
    let secrets: BTreeMap<_, _> = TenantSecret::ALL
        .into_iter()
        .map(|which| {
            let keys = if which.is_kubeconfig() {
                vec![which.name()]
            } else {
                vec!["tls.crt", "tls.key"]
            };
            let data = keys
                .into_iter()
                .map(|key| (key.to_owned(), ByteString(b"a".to_vec())));
            let secret = Secret {
                data: Some(data.collect()),
                ..Secret::default()
            };
            (which.name().to_owned(), secret)
        })
        .collect();
    Component::ALL
        .into_iter()
        .flat_map(|component| {
            [
                render::stateful_set(&template, component, &tenant, &secrets),
                render::service(&template, component, &tenant),
            ]
        })
        .flatten()
        .collect()
}

/// Everything a content can say that an API server keeps in another form, or not at all.
pub(crate) fn oddities() -> Value {
    serde_saphyr::from_str(include_str!("../fixtures/oddities.yaml")).expect("the fixture is YAML")
}

/// The fixture of the renderer's tests, without what no API server knows, and with the labels that one asks for.
pub(crate) fn fixture() -> Value {
    let mut content: Value =
        serde_saphyr::from_str(include_str!("../fixtures/template.yaml")).expect("the fixture is YAML");
    let container = content
        .pointer_mut("/apiServer/statefulset/spec/template/spec/containers/0")
        .expect("a container");
    container
        .as_object_mut()
        .expect("an object")
        .remove("futureField");
    let spec = &mut content["controllerManager"]["statefulset"]["spec"];
    spec["template"]["metadata"]["labels"] = spec["selector"]["matchLabels"].clone();
    content
}
