//! What a test of the certificates begins with: the API server to itself, and a namespace of its own.

use std::sync::OnceLock;

use base64::Engine as _;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use vc_manager::admission::configuration::{
    MUTATE_CLUSTER_VERSION, MUTATING_CONFIGURATION, VALIDATE_CLUSTER_VERSION, VALIDATE_VIRTUAL_CLUSTER,
    VALIDATING_CONFIGURATION,
};
use vc_manager::pki::CertificateInfo;
use vc_manager::server::shared_ca::SECRET;

use crate::support::{ApiServer, Replica, eventually};

/// There is only one of each configuration in a cluster.
static TURN: OnceLock<Mutex<()>> = OnceLock::new();

/// A test's turn.
pub(crate) struct Scene {
    /// The server.
    pub(crate) server: &'static ApiServer,
    /// Its administrator.
    pub(crate) client: Client,
    /// Namespace of the managers.
    pub(crate) namespace: String,
    _turn: MutexGuard<'static, ()>,
}

impl Scene {
    /// Waits for the turn. There are no configurations then.
    pub(crate) async fn new(name: &str) -> Self {
        let turn = TURN.get_or_init(Mutex::default).lock().await;
        let server = tokio::task::spawn_blocking(ApiServer::shared).await.unwrap();
        let client = server.client().await;
        let scene = Self {
            server,
            client,
            namespace: name.to_owned(),
            _turn: turn,
        };
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        let api = Api::<Namespace>::all(scene.client.clone());
        api.create(&PostParams::default(), &namespace).await.unwrap();
        let _ = scene
            .validating()
            .delete(VALIDATING_CONFIGURATION, &DeleteParams::default())
            .await;
        let _ = scene
            .mutating()
            .delete(MUTATING_CONFIGURATION, &DeleteParams::default())
            .await;
        scene
    }

    /// With both configurations.
    pub(crate) async fn with_configurations(name: &str) -> Self {
        let scene = Self::new(name).await;
        scene.configure().await;
        scene
    }

    pub(crate) fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn validating(&self) -> Api<ValidatingWebhookConfiguration> {
        Api::all(self.client.clone())
    }

    pub(crate) fn mutating(&self) -> Api<MutatingWebhookConfiguration> {
        Api::all(self.client.clone())
    }

    /// Makes both configurations, without a bundle. They are for a kind that nobody writes.
    pub(crate) async fn configure(&self) {
        let params = PostParams::default();
        let validating = configuration(
            VALIDATING_CONFIGURATION,
            &[VALIDATE_CLUSTER_VERSION, VALIDATE_VIRTUAL_CLUSTER],
        );
        let validating = serde_json::from_value(validating).unwrap();
        self.validating().create(&params, &validating).await.unwrap();
        let mutating = configuration(MUTATING_CONFIGURATION, &[MUTATE_CLUSTER_VERSION]);
        let mutating = serde_json::from_value(mutating).unwrap();
        self.mutating().create(&params, &mutating).await.unwrap();
    }

    /// Starts a replica with the webhook on. Replicas of a test share its namespace.
    pub(crate) fn replica(&self, name: &str, flags: &[&str]) -> Replica {
        let kubeconfig = self.server.kubeconfig(name, Some("system:masters"));
        self.replica_as(name, &kubeconfig, flags)
    }

    /// The same, with this kubeconfig.
    pub(crate) fn replica_as(&self, name: &str, kubeconfig: &str, flags: &[&str]) -> Replica {
        let namespace = format!("--namespace={}", self.namespace);
        let mut all = vec![
            "--enable-webhook",
            "--leader-election=false",
            "--log-format=text",
            &namespace,
        ];
        all.extend(flags);
        Replica::start_as(
            self.server,
            &format!("{}-{name}", self.namespace),
            kubeconfig,
            &all,
        )
    }

    /// The Secret of the CA.
    pub(crate) async fn secret(&self) -> Secret {
        eventually("the Secret", async || {
            self.secrets().get_opt(SECRET).await.unwrap()
        })
        .await
    }

    /// Deletes it.
    pub(crate) async fn lose_the_secret(&self) {
        let params = DeleteParams::default();
        self.secrets().delete(SECRET, &params).await.unwrap();
    }

    /// The CA that signs, and all that are trusted, as stored.
    pub(crate) async fn stored(&self) -> (CertificateInfo, Vec<CertificateInfo>) {
        let data = self.secret().await.data.unwrap();
        let signer = CertificateInfo::parse(std::str::from_utf8(&data["tls.crt"].0).unwrap()).unwrap();
        (signer, CertificateInfo::parse_bundle(&data["ca.crt"].0))
    }

    /// Waits until every webhook trusts exactly what the Secret says.
    pub(crate) async fn is_published(&self) {
        eventually("the bundle to be published", async || {
            let (_, trusted) = self.stored().await;
            let published = published(&self.client).await;
            let right = published
                .iter()
                .all(|(_, bundle)| CertificateInfo::parse_bundle(bundle) == trusted);
            (published.len() == 3 && right).then_some(())
        })
        .await;
    }

    /// Merges into an object, as kubectl would.
    pub(crate) async fn merge<K>(&self, api: &Api<K>, name: &str, patch: &Value)
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    /// Puts `bundle` into every webhook, as cert-manager would.
    pub(crate) async fn overwrite_all(&self, bundle: &str) {
        self.overwrite(Some(bundle)).await;
        let mut object = self.validating().get(VALIDATING_CONFIGURATION).await.unwrap();
        for webhook in object.webhooks.iter_mut().flatten() {
            webhook.client_config.ca_bundle = Some(k8s_openapi::ByteString(bundle.as_bytes().to_vec()));
        }
        let params = PostParams::default();
        self.validating()
            .replace(VALIDATING_CONFIGURATION, &params, &object)
            .await
            .unwrap();
    }

    /// Puts `bundle` into the only webhook of the mutating configuration, or takes it out.
    pub(crate) async fn overwrite(&self, bundle: Option<&str>) {
        let bundle = bundle.map(|text| base64::engine::general_purpose::STANDARD.encode(text));
        let pointer = "/webhooks/0/clientConfig/caBundle";
        let operation = match bundle {
            Some(bundle) => json!([{"op": "add", "path": pointer, "value": bundle}]),
            None => json!([{"op": "remove", "path": pointer}]),
        };
        let patch = Patch::Json::<()>(serde_json::from_value(operation).unwrap());
        self.mutating()
            .patch(MUTATING_CONFIGURATION, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

/// A configuration whose webhooks are called at 127.0.0.1, if ever.
fn configuration(name: &str, webhooks: &[&str]) -> Value {
    let webhook = |name: &&str| {
        json!({
            "name": name,
            "clientConfig": {"url": "https://127.0.0.1:9443/path"},
            "rules": [{"apiGroups": ["none.example.com"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nothings"]}],
            "failurePolicy": "Fail",
            "matchPolicy": "Exact",
            "sideEffects": "None",
            "timeoutSeconds": 7,
            "admissionReviewVersions": ["v1"],
        })
    };
    let webhooks: Vec<Value> = webhooks.iter().map(webhook).collect();
    json!({"metadata": {"name": name}, "webhooks": webhooks})
}

/// What each webhook trusts at this moment.
pub(crate) async fn published(client: &Client) -> Vec<(String, Vec<u8>)> {
    let validating = Api::<ValidatingWebhookConfiguration>::all(client.clone());
    let mutating = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let validating = validating.get_opt(VALIDATING_CONFIGURATION).await.unwrap();
    let mutating = mutating.get_opt(MUTATING_CONFIGURATION).await.unwrap();
    let validating = validating
        .and_then(|object| object.webhooks)
        .unwrap_or_default()
        .into_iter();
    let mutating = mutating
        .and_then(|object| object.webhooks)
        .unwrap_or_default()
        .into_iter();
    let validating = validating.map(|webhook| (webhook.name, webhook.client_config));
    let mutating = mutating.map(|webhook| (webhook.name, webhook.client_config));
    validating
        .chain(mutating)
        .map(|(name, client)| (name, client.ca_bundle.unwrap_or_default().0))
        .collect()
}
