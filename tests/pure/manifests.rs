//! What is checked in equals what the program prints.

use std::{fs, path::Path};

use serde_json::{Value, json};
use vc_manager::admission::configuration::{CERTIFICATE, SERVICE, WebhookConfig};

fn assert_checked_in(file: &str, printed: &str, command: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let checked_in = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        checked_in == printed,
        "{file} is not what is printed: run `cargo run -- {command} > {file}`"
    );
}

#[test]
fn the_definitions_under_charts_are_those_of_the_types() {
    let printed = vc_manager::api::crds_yaml().expect("they can be written as YAML");
    assert_checked_in("charts/vc-manager/crds/tenancy.x-k8s.io.yaml", &printed, "crds");
}

fn webhook_config(cert_manager: bool, url: Option<&str>) -> WebhookConfig {
    WebhookConfig {
        namespace: "vc-manager".into(),
        url: url.map(Into::into),
        cert_manager,
    }
}

#[test]
fn the_webhook_configurations_are_those_of_the_program() {
    for (file, cert_manager, command) in [
        ("webhook-config/webhook-config.yaml", false, "webhook-config"),
        ("certs/webhook-config.yaml", true, "webhook-config --cert-manager"),
    ] {
        let printed = webhook_config(cert_manager, None).to_yaml().expect("YAML");
        assert_checked_in(file, &printed, command);
    }
}

#[test]
fn a_manager_outside_the_cluster_has_a_url_and_no_service() {
    let objects = webhook_config(false, Some("https://manager:9443")).objects();
    let kinds: Vec<_> = objects
        .iter()
        .map(|object| object["kind"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"]
    );
    let clients: Vec<_> = objects
        .iter()
        .flat_map(|object| object["webhooks"].as_array().unwrap())
        .map(|webhook| webhook["clientConfig"].clone())
        .collect();
    let url = |path: &str| json!({"url": format!("https://manager:9443{path}")});
    assert_eq!(
        clients,
        [
            url("/mutate-tenancy-x-k8s-io-v1alpha1-clusterversion"),
            url("/validate-tenancy-x-k8s-io-v1alpha1-clusterversion"),
            url("/validate-tenancy-x-k8s-io-v1alpha1-virtualcluster"),
        ]
    );
}

/// The files for cert-manager name each other, the Service and the configurations.
#[test]
fn the_certificate_is_the_one_that_is_mounted_and_trusted() {
    let read = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("certs").join(file);
        fs::read_to_string(path).expect("it is there")
    };
    let text = read("certificate.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let served = objects
        .iter()
        .find(|object| object["kind"] == "Certificate" && object["metadata"]["name"] == CERTIFICATE)
        .expect("the certificate that the configurations name");
    assert_eq!(served["metadata"]["namespace"], "vc-manager");
    assert_eq!(served["spec"]["dnsNames"][0], format!("{SERVICE}.vc-manager.svc"));
    let issuer = objects
        .iter()
        .find(|object| {
            object["kind"] == "Issuer" && object["metadata"]["name"] == served["spec"]["issuerRef"]["name"]
        })
        .expect("its issuer");
    let authority = objects
        .iter()
        .find(|object| object["spec"]["isCA"] == true)
        .expect("a CA");
    assert_eq!(
        issuer["spec"]["ca"]["secretName"],
        authority["spec"]["secretName"]
    );

    let patch: Value = serde_saphyr::from_str(&read("deployment-patch.yaml")).expect("YAML");
    assert_eq!(
        patch[0]["value"][0]["secret"]["secretName"],
        served["spec"]["secretName"]
    );
    let mounted = patch[1]["value"][0]["mountPath"].as_str().expect("a path");
    assert_eq!(patch[2]["value"], format!("--webhook-cert-dir={mounted}"));
    for configuration in webhook_config(true, None).objects() {
        if configuration["kind"] != "Service" {
            assert_eq!(
                configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"],
                format!("vc-manager/{CERTIFICATE}")
            );
        }
    }
}

#[test]
fn the_definitions_say_what_they_must() {
    let [cluster_version, virtual_cluster] = vc_manager::api::crd::crds();
    for crd in [&cluster_version, &virtual_cluster] {
        let version = &crd.spec.versions[0];
        assert_eq!(
            (crd.spec.group.as_str(), version.name.as_str()),
            ("tenancy.x-k8s.io", "v1alpha1")
        );
        assert!(version.served && version.storage);
        assert!(
            version
                .subresources
                .as_ref()
                .is_some_and(|sub| sub.status.is_some())
        );
    }
    assert_eq!(cluster_version.spec.scope, "Cluster");
    assert_eq!(
        cluster_version.spec.names.short_names,
        Some(vec!["cv".to_owned()])
    );
    assert_eq!(virtual_cluster.spec.scope, "Namespaced");
    assert_eq!(
        virtual_cluster.spec.names.short_names,
        Some(vec!["vc".to_owned()])
    );
    let columns: Vec<_> = virtual_cluster.spec.versions[0]
        .additional_printer_columns
        .iter()
        .flatten()
        .map(|column| column.name.as_str())
        .collect();
    // The first three are those of the Go manager, in its order.
    assert_eq!(columns[..3], ["Age", "Phase", "ClusterVersion"]);
    assert!(columns.contains(&"ClusterNamespace"));
}
