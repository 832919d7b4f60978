//! Makes golden files: has the present manager provision a tenant of each template, and takes out what is the tenant's own.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::{ControllerRevision, StatefulSet},
    core::v1::{Namespace, Secret, Service},
};
use kube::{Api, ResourceExt as _};
use serde_json::{Map, Value, json};
use vc_manager::{
    api::{Component, VirtualCluster, template::Template},
    controller::{
        managed_fields,
        render::{self, Kind, Rendered, Tenant, TenantSecret},
    },
    pki::CertificateInfo,
};

use crate::{
    at_rest,
    golden::{self, Golden, LeafNames, Placeholders},
    hashes,
    store::RENDERED_HASH,
    support::{Driver, Manager, Options, Scope, data, root_of},
};

/// Namespace of the recorded tenants. Like their name and that of their ClusterVersion, it is a word that is in no template.
const NAMESPACE: &str = "goldenspace";
const TENANT: &str = "goldentenant";

/// A golden file of each template, by name.
pub(crate) async fn all() -> Vec<(String, Golden)> {
    let scope = Scope::new(NAMESPACE).await;
    let _driver = Driver::start(&scope);
    let manager = Manager::start(&scope, Options::default());
    let mut recorded = Vec::new();
    for (name, content) in golden::templates() {
        let cluster_version = format!("goldenversion-{name}");
        scope.create_cluster_version(&cluster_version, content).await;
        let tenant: VirtualCluster = serde_json::from_value(json!({
            "metadata": {"name": TENANT}, "spec": {"clusterVersionName": cluster_version},
        }))
        .unwrap();
        scope
            .tenants()
            .create(&kube::api::PostParams::default(), &tenant)
            .await
            .unwrap();
        scope.settled(TENANT).await;
        at_rest(&manager).await;
        recorded.push((name, one(&scope, &cluster_version).await));
        scope.delete(TENANT).await;
    }
    recorded
}

async fn one(scope: &Scope, cluster_version: &str) -> Golden {
    let tenant = scope.tenant(TENANT).await;
    let root = root_of(&tenant);
    let version = scope.cluster_versions().get(cluster_version).await.unwrap();
    let revisions = scope.api::<ControllerRevision>(&scope.manager_namespace());
    let revision = revisions.get(tenant.pin().unwrap()).await.unwrap();
    let namespaces = Api::<Namespace>::all(scope.client.clone());
    let namespace = namespaces.get(&root).await.unwrap();
    let service: Service = scope.get(&root, "apiserver-svc").await;
    let mut secrets = BTreeMap::new();
    for which in TenantSecret::ALL {
        let secret: Secret = scope.get(&root, which.name()).await;
        secrets.insert(which.name().to_owned(), secret);
    }

    let mut placeholders = Placeholders::default();
    placeholders.set("name", TENANT);
    placeholders.set("namespace", NAMESPACE);
    placeholders.set("uid", tenant.uid().unwrap());
    placeholders.set("root-namespace", &root);
    placeholders.set("cluster-version", cluster_version);
    placeholders.set("cluster-version-uid", version.uid().unwrap());
    placeholders.set("manager-namespace", scope.manager_namespace());
    placeholders.set("address", service.spec.clone().unwrap().cluster_ip.unwrap());
    for (name, secret) in &secrets {
        placeholders.set(&format!("hash:{name}"), hashes::of_secret(&data(secret)));
    }
    let objects = objects(scope, &tenant, &revision, &secrets).await;
    let golden = Golden {
        cluster_version: json!({
            "metadata": {"finalizers": version.finalizers()},
            "status": placeholders.take_out(&serde_json::to_value(&version.status).unwrap()),
        }),
        revision: placeholders.take_out(&left(&revision)),
        namespace: placeholders.take_out(&left(&namespace)),
        leaves: secrets
            .iter()
            .filter_map(|(name, secret)| Some((name.clone(), leaf(secret, &placeholders)?)))
            .collect(),
        secrets: secrets
            .iter()
            .map(|(name, secret)| (name.clone(), without_keys(secret, &placeholders)))
            .collect(),
        objects: objects
            .iter()
            .map(|object| placeholders.take_out(object))
            .collect(),
        tenant: tenant_of(&tenant, &placeholders),
    };
    check(&golden, &tenant, &secrets);
    golden
}

/// An object without what the API server writes.
fn left<K: serde::Serialize>(object: &K) -> Value {
    let mut value = serde_json::to_value(object).unwrap();
    let metadata = value["metadata"].as_object_mut().unwrap();
    for key in [
        "creationTimestamp",
        "generation",
        "managedFields",
        "resourceVersion",
        "uid",
    ] {
        metadata.remove(key);
    }
    if value["kind"] == "Namespace" {
        // The API server's own.
        let labels = value["metadata"]["labels"].as_object_mut().unwrap();
        labels.remove("kubernetes.io/metadata.name");
        let value = value.as_object_mut().unwrap();
        value.remove("spec");
        value.remove("status");
    }
    value
}

/// What was applied, as it was before its hash was written onto it.
async fn objects(
    scope: &Scope,
    tenant: &VirtualCluster,
    revision: &ControllerRevision,
    secrets: &BTreeMap<String, Secret>,
) -> Vec<Value> {
    let template = Template::parse(&revision.data.as_ref().unwrap().0).unwrap();
    let tenant = Tenant::of(tenant);
    let mut objects = Vec::new();
    for component in Component::ALL {
        let rendered = [
            render::service(&template, component, &tenant),
            render::stateful_set(&template, component, &tenant, secrets),
        ];
        for object in rendered.into_iter().flatten() {
            assert_applied(scope, &tenant.root_namespace, &object).await;
            objects.push(unhashed(&object));
        }
    }
    objects
}

/// That is what the manager has applied.
async fn assert_applied(scope: &Scope, root: &str, object: &Rendered) {
    let meta = match object.kind {
        Kind::Service => scope.get::<Service>(root, &object.name).await.metadata,
        Kind::StatefulSet => scope.get::<StatefulSet>(root, &object.name).await.metadata,
    };
    assert_eq!(managed_fields::drift(&object.value, &meta), [], "{}", object.name);
    assert_eq!(
        meta.annotations.unwrap()[RENDERED_HASH],
        object.hash(),
        "{}",
        object.name
    );
}

fn unhashed(object: &Rendered) -> Value {
    let mut value = object.value.clone();
    let metadata = value["metadata"].as_object_mut().unwrap();
    let annotations = metadata["annotations"].as_object_mut().unwrap();
    annotations.remove(RENDERED_HASH);
    // Whether the author wrote an empty map, or none.
    if annotations.is_empty() && hashes::of_json(&value) != object.hash() {
        value["metadata"].as_object_mut().unwrap().remove("annotations");
    }
    assert_eq!(
        hashes::of_json(&value),
        object.hash(),
        "{}: the hash of a rendering",
        object.name
    );
    value
}

/// What the certificate in a Secret is for, if it holds a leaf.
fn leaf(secret: &Secret, placeholders: &Placeholders) -> Option<LeafNames> {
    let name = secret.name_any();
    if ["root-ca", "serviceaccount-rsa"].contains(&name.as_str()) {
        return None;
    }
    let data = data(secret);
    let pem = match data.get("tls.crt") {
        Some(pem) => pem.clone(),
        None => {
            vc_manager::pki::kubeconfig::parse(&data[&name])
                .unwrap()
                .client
                .certificate_pem
        }
    };
    let certificate = CertificateInfo::parse(&pem).unwrap();
    let texts = |texts: &[String]| {
        texts
            .iter()
            .map(|text| placeholders.take_out_text(text))
            .collect()
    };
    let addresses: Vec<_> = certificate.ip_addresses.iter().map(ToString::to_string).collect();
    let life = certificate.not_after.duration_since(certificate.not_before);
    Some(LeafNames {
        common_name: placeholders.take_out_text(&certificate.common_name),
        organizations: certificate.organizations.clone(),
        server: certificate.server_auth,
        client: certificate.client_auth,
        dns_names: texts(&certificate.dns_names),
        ip_addresses: texts(&addresses),
        // It begins a little before it is issued.
        days: life.as_hours() / 24,
    })
}

/// A Secret with placeholders for all that is issued.
fn without_keys(secret: &Secret, placeholders: &Placeholders) -> Value {
    let mut value = left(secret);
    let data = data(secret).into_iter().map(|(key, text)| {
        let text = match key.as_str() {
            "tls.crt" => "${certificate}".to_owned(),
            "tls.key" => "${key}".to_owned(),
            _ => {
                let lines = text.lines().map(|line| {
                    for (field, placeholder) in [
                        ("certificate-authority-data: ", "${ca-data}"),
                        ("client-certificate-data: ", "${client-certificate-data}"),
                        ("client-key-data: ", "${client-key-data}"),
                    ] {
                        if let Some((before, _)) = line.split_once(field) {
                            return format!("{before}{field}{placeholder}\n");
                        }
                    }
                    format!("{}\n", placeholders.take_out_text(line))
                });
                lines.collect()
            }
        };
        (key, Value::String(text))
    });
    let data: Map<_, _> = data.collect();
    value = placeholders.take_out(&value);
    value["data"] = data.into();
    value
}

fn tenant_of(tenant: &VirtualCluster, placeholders: &Placeholders) -> Value {
    let mut value = placeholders.take_out(&left(tenant));
    // A number, which may stand for anything elsewhere.
    value["metadata"]["labels"]["tenancy.x-k8s.io/cluster-version-applied"] =
        "${cluster-version-resource-version}".into();
    let certificates = value["status"]["certificates"].as_object_mut().unwrap();
    for (field, placeholder) in [
        ("notAfter", "${not-after}"),
        ("renewAt", "${renew-at}"),
        ("rootCANotAfter", "${root-ca-not-after}"),
    ] {
        let known = certificates.insert(field.into(), placeholder.into());
        assert!(
            known.is_some(),
            "status.certificates.{field} is not there any more"
        );
    }
    for (field, value) in certificates {
        let text = value.as_str().unwrap_or_default();
        assert!(text.starts_with("${"), "{field} needs a placeholder");
    }
    value
}

/// Nothing is left of what is this tenant's own.
fn check(golden: &Golden, tenant: &VirtualCluster, secrets: &BTreeMap<String, Secret>) {
    let text = golden.text();
    for own in [tenant.uid().unwrap().as_str(), NAMESPACE, TENANT, "goldenversion"] {
        assert!(!text.contains(own), "{own} is left");
    }
    for secret in secrets.values() {
        for line in data(secret).values().flat_map(|text| text.lines()) {
            let value = line.rsplit(' ').next().unwrap_or_default();
            assert!(
                value.len() < 60 || !text.contains(value),
                "data of {} is left",
                secret.name_any()
            );
        }
    }
}
