//! The webhook configurations on a real API server: that they are accepted as they are checked in, and what goes on
//! while nobody answers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{net::TcpListener, path::Path, process::Command};

use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::Namespace,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::{admission::configuration::WebhookConfig, api::crd::crds, pki::Authority};

use support::{ApiServer, eventually, templates};

async fn server() -> ApiServer {
    tokio::task::spawn_blocking(|| {
        let server = ApiServer::start();
        server.install(&crds());
        server
    })
    .await
    .expect("the API server starts")
}

/// What kubectl says; it has to succeed.
fn kubectl(server: &ApiServer, arguments: &[&str]) -> String {
    let program = std::env::var_os("VCM_KUBECTL").expect("VCM_KUBECTL names kubectl: run `make test`");
    let output = Command::new(program)
        .arg(format!(
            "--kubeconfig={}/admin.kubeconfig",
            server.dir().display()
        ))
        .arg(format!("--cache-dir={}/kubectl", server.dir().display()))
        .args(arguments)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .env_remove("HTTPS_PROXY")
        .env_remove("https_proxy")
        .output()
        .expect("kubectl runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {text}{complaints}");
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_checked_in_is_accepted() {
    let server = server().await;
    kubectl(&server, &["apply", "-f", "charts/vc-manager.yaml"]);
    for folder in ["webhook-config/", "certs/webhook-config.yaml"] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(kubectl(&server, &["create", "--dry-run=server", "--validate=strict", "-f", folder]), @"
            service/virtualcluster-webhook-service created (server dry run)
            mutatingwebhookconfiguration.admissionregistration.k8s.io/virtualcluster-mutating-webhook-configuration created (server dry run)
            validatingwebhookconfiguration.admissionregistration.k8s.io/virtualcluster-validating-webhook-configuration created (server dry run)
            ");
        }
    }
    let mounted = kubectl(
        &server,
        &[
            "--namespace=vc-manager",
            "patch",
            "deployment",
            "vc-manager",
            "--type=json",
            "--patch-file=certs/deployment-patch.yaml",
            "--dry-run=server",
            "--output=jsonpath={.spec.template.spec.volumes[*].secret.secretName} {..volumeMounts[*].mountPath}",
        ],
    );
    insta::assert_snapshot!(mounted, @"vc-manager-webhook-cert /etc/vc-manager/webhook-cert");

    // Over what the Go manager left, and again when the CA is in: it stays.
    let name = "virtualcluster-validating-webhook-configuration";
    let left = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name, "labels": {"virtualcluster-webhook": "true"}},
        "webhooks": [{
            "name": "virtualcluster.validating.webhook",
            "admissionReviewVersions": ["v1", "v1beta1"],
            "clientConfig": {"caBundle": "", "service": {
                "name": "virtualcluster-webhook-service", "namespace": "vc-manager", "port": 9443,
                "path": "/validate-tenancy-x-k8s-io-v1alpha1-virtualcluster"}},
            "rules": [{"apiGroups": ["tenancy.x-k8s.io"], "apiVersions": ["v1alpha1"], "operations": ["*"],
                "resources": ["virtualclusters"]}],
            "failurePolicy": "Fail",
            "sideEffects": "None",
        }],
    });
    let api = Api::<ValidatingWebhookConfiguration>::all(server.client().await);
    let left = serde_json::from_value(left).expect("a configuration");
    api.create(&PostParams::default(), &left)
        .await
        .expect("it is new");
    let apply = || {
        kubectl(
            &server,
            &[
                "apply",
                "--server-side",
                "--force-conflicts",
                "-f",
                "webhook-config/",
            ],
        )
    };
    apply();
    let (authority, _) = Authority::create(Timestamp::now()).expect("a CA");
    let bundle = ByteString(authority.certificate_pem().as_bytes().to_vec());
    let names = [
        "clusterversion.validating.webhook",
        "virtualcluster.validating.webhook",
    ];
    let webhooks = names.map(|name| json!({"name": name, "clientConfig": {"caBundle": bundle}}));
    let patch = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": webhooks,
    });
    api.patch(
        name,
        &PatchParams::apply("vc-manager-webhook").force(),
        &Patch::Apply(patch),
    )
    .await
    .expect("the CA is accepted");
    apply();
    let stored = api.get(name).await.expect("it is there");
    let webhooks = stored.webhooks.unwrap_or_default();
    let found: Vec<_> = webhooks.iter().map(|webhook| webhook.name.as_str()).collect();
    assert_eq!(found, names);
    for webhook in &webhooks {
        assert_eq!(
            webhook.client_config.ca_bundle.as_ref(),
            Some(&bundle),
            "{}",
            webhook.name
        );
    }
    let operations: Vec<_> = webhooks
        .iter()
        .flat_map(|webhook| webhook.rules.iter().flatten())
        .flat_map(|rule| rule.operations.clone().unwrap_or_default())
        .collect();
    assert_eq!(operations, ["CREATE", "UPDATE", "DELETE", "CREATE", "UPDATE"]);
}

/// Configurations that point at a port where nobody listens.
async fn configure(client: &Client) {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let config = WebhookConfig {
        namespace: "vc-manager".into(),
        url: Some(format!("https://127.0.0.1:{port}")),
        cert_manager: false,
    };
    let client = || client.clone();
    for object in config.objects() {
        let new = PostParams::default();
        let created = if object["kind"] == "MutatingWebhookConfiguration" {
            let object: MutatingWebhookConfiguration = serde_json::from_value(object).unwrap();
            Api::all(client()).create(&new, &object).await.map(drop)
        } else {
            let object: ValidatingWebhookConfiguration = serde_json::from_value(object).unwrap();
            Api::all(client()).create(&new, &object).await.map(drop)
        };
        created.expect("it is accepted");
    }
}

struct Caller(Client);

impl Caller {
    fn objects(&self, kind: &str, namespace: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("tenancy.x-k8s.io", "v1alpha1", kind));
        match kind {
            "ClusterVersion" => Api::all_with(self.0.clone(), &resource),
            _ => Api::namespaced_with(self.0.clone(), namespace, &resource),
        }
    }

    async fn create(&self, kind: &str, namespace: &str, name: &str, spec: &Value) -> bool {
        let object = json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": kind,
            "metadata": {"name": name}, "spec": spec});
        let object = serde_json::from_value(object).expect("an object");
        passes(
            self.objects(kind, namespace)
                .create(&PostParams::default(), &object)
                .await,
        )
    }

    async fn merge(&self, kind: &str, name: &str, patch: Value) -> bool {
        let api = self.objects(kind, "default");
        passes(
            api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
                .await,
        )
    }

    async fn status(&self, kind: &str, name: &str, patch: Value) -> bool {
        let api = self.objects(kind, "default");
        passes(
            api.patch_status(
                name,
                &PatchParams::default(),
                &Patch::Json::<()>(serde_json::from_value(patch).expect("a JSON patch")),
            )
            .await,
        )
    }

    async fn delete(&self, kind: &str, name: &str) -> bool {
        passes(
            self.objects(kind, "default")
                .delete(name, &DeleteParams::default())
                .await,
        )
    }
}

/// Whether it was let through; the only other answer is that the webhook cannot be asked.
fn passes<T>(answer: Result<T, kube::Error>) -> bool {
    match answer {
        Ok(_) => true,
        Err(kube::Error::Api(status)) => {
            assert!(
                status.code == 500 && status.message.contains("failed to call webhook"),
                "{status:?}"
            );
            false
        }
        Err(error) => panic!("no answer: {error}"),
    }
}

/// A ClusterVersion of more than a mebibyte, in few large values or in many small ones.
fn large(many: bool) -> Value {
    let mut content = templates::full("ClusterIP");
    let container = if many {
        json!({"name": "c", "image": "i", "env": [{"name": "a", "value": "b"}, {"name": "c", "value": "d"}]})
    } else {
        json!({"name": "c", "image": "i", "args": ["x".repeat(1024)]})
    };
    let count = (1 << 20) / container.to_string().len() + 1;
    content["apiServer"]["statefulset"]["spec"]["template"]["spec"]["containers"] =
        Value::from(vec![container; count]);
    content
}

/// What must go on while nobody answers does, also for objects as large as they get; what is to be asked about waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_holds_up_only_what_is_to_be_checked() {
    let server = server().await;
    let anyone = Caller(server.client().await);
    let account = "system:serviceaccount:vc-manager:vc-manager";
    let config = server.config_as(account, Some("system:masters")).await;
    let manager = Caller(Client::try_from(config).expect("a client"));
    let own: Namespace = serde_json::from_value(json!({"metadata": {"name": "vc-manager"}})).unwrap();
    Api::all(anyone.0.clone())
        .create(&PostParams::default(), &own)
        .await
        .expect("it is new");

    let version = "ClusterVersion";
    let tenant = "VirtualCluster";
    let tenant_spec = json!({"clusterVersionName": "small"});
    let versions = [
        ("small", templates::full("ClusterIP")),
        ("long", large(false)),
        ("many", large(true)),
    ];
    for (name, content) in &versions {
        assert!(anyone.create(version, "", name, content).await);
    }
    for name in ["plain", "null-status", "running"] {
        assert!(anyone.create(tenant, "default", name, &tenant_spec).await);
    }
    let null = json!([{"op": "add", "path": "/status", "value": null}]);
    assert!(anyone.status(tenant, "null-status", null).await);
    let running = json!([{"op": "add", "path": "/status", "value": {"phase": "Running"}}]);
    assert!(anyone.status(tenant, "running", running.clone()).await);

    configure(&anyone.0).await;
    eventually("the configurations to be in force", async || {
        (!anyone.create(tenant, "default", "probe", &tenant_spec).await).then_some(())
    })
    .await;
    eventually("the configurations to be in force", async || {
        (!anyone.create(version, "", "probe", &versions[0].1).await).then_some(())
    })
    .await;

    let label = || json!({"metadata": {"labels": {"tenancy.x-k8s.io/ready-for-upgrade": "true"}}});
    let finalizer = || json!({"metadata": {"annotations": {"a": "b"}, "finalizers": ["test/held"]}});
    let no_finalizer = || json!({"metadata": {"finalizers": null}});
    for (name, _) in &versions {
        let edit = || json!({"spec": {"note": name}});
        assert!(anyone.merge(version, name, label()).await, "{name}");
        assert!(anyone.merge(version, name, finalizer()).await, "{name}");
        let status = json!([{"op": "add", "path": "/status", "value": {"revision": "r"}}]);
        assert!(anyone.status(version, name, status).await, "{name}");
        assert!(!anyone.merge(version, name, edit()).await, "{name}: an edit");
        assert!(manager.merge(version, name, edit()).await, "{name}");
        assert!(!anyone.delete(version, name).await, "{name}: deletion");
        assert!(manager.delete(version, name).await, "{name}");
        assert!(anyone.merge(version, name, no_finalizer()).await, "{name}");
    }
    for name in ["plain", "null-status", "running"] {
        let edit = |days: i64| json!({"spec": {"pkiExpireDays": days}});
        assert!(anyone.merge(tenant, name, label()).await, "{name}");
        assert!(anyone.merge(tenant, name, finalizer()).await, "{name}");
        assert!(!anyone.merge(tenant, name, edit(7)).await, "{name}: an edit");
        assert!(manager.merge(tenant, name, edit(7)).await, "{name}");
        assert!(anyone.status(tenant, name, running.clone()).await, "{name}");
        assert!(anyone.delete(tenant, name).await, "{name}");
        assert!(
            anyone.merge(tenant, name, edit(8)).await,
            "{name}: an edit while it is deleted"
        );
        assert!(anyone.merge(tenant, name, no_finalizer()).await, "{name}");
    }
    assert!(anyone.create(tenant, "vc-manager", "own", &tenant_spec).await);
}
