//! The webhook configurations as they are in the cluster: where they send the API server, and whom they trust.

use std::fmt;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Notify;
use tracing::warn;

use super::upkeep::{self, Pauses};
use crate::admission::{
    self,
    configuration::{MUTATING_CONFIGURATION, VALIDATING_CONFIGURATION},
};
use crate::client::{CallError, deadline};
use crate::pki::CertificateInfo;

/// How the annotations begin by which cert-manager's injector is told to write `caBundle`s.
const INJECTED: &str = "cert-manager.io/inject-";

/// Which of the two configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The one of webhooks that only judge.
    Validating,
    /// The one of webhooks that change objects.
    Mutating,
}

impl Kind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Validating, Self::Mutating];

    /// Kind of the object.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Validating => "ValidatingWebhookConfiguration",
            Self::Mutating => "MutatingWebhookConfiguration",
        }
    }

    /// Name of the object.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Validating => VALIDATING_CONFIGURATION,
            Self::Mutating => MUTATING_CONFIGURATION,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.name())
    }
}

/// One configuration, as far as certificates go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Which one.
    pub kind: Kind,
    /// What a write is guarded by.
    pub resource_version: String,
    /// Whether an annotation says that cert-manager's injector writes its `caBundle`s.
    pub injected: bool,
    /// Those of its webhooks that are ours. What else stands there is its author's business.
    pub webhooks: Vec<Webhook>,
}

/// One webhook of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    /// Its name.
    pub name: String,
    /// Whom the API server calls, and so the name it verifies: a Service's or a URL's. `None` if neither makes sense.
    pub host: Option<ServerName<'static>>,
    /// The CA certificates the API server trusts for the call.
    pub trusted: Vec<CertificateInfo>,
}

impl Webhook {
    fn new(name: String, client: WebhookClientConfig) -> Self {
        let host = match (client.service, client.url) {
            (Some(service), _) => Some(format!("{}.{}.svc", service.name, service.namespace)),
            (None, Some(url)) => host(&url),
            (None, None) => None,
        };
        let ByteString(bundle) = client.ca_bundle.unwrap_or_default();
        Self {
            name,
            host: host.and_then(|host| ServerName::try_from(host).ok()),
            trusted: CertificateInfo::parse_bundle(&bundle),
        }
    }
}

/// The host of a URL, an IPv6 address without its brackets.
fn host(url: &str) -> Option<String> {
    let url: http::Uri = url.parse().ok()?;
    let host = url.host()?;
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    Some(address.unwrap_or(host).to_owned())
}

/// The configurations of a cluster.
#[derive(Clone)]
pub struct Configurations {
    client: Client,
    limit: Duration,
}

impl Configurations {
    /// Those that `client` reaches; no call takes longer than `limit`.
    #[must_use]
    pub fn new(client: Client, limit: Duration) -> Self {
        Self { client, limit }
    }

    /// Those that exist, fresh from the API server.
    pub async fn read(&self) -> Result<Vec<Configuration>, CallError> {
        let validating = self
            .get::<ValidatingWebhookConfiguration>(Kind::Validating)
            .await?;
        let mutating = self.get::<MutatingWebhookConfiguration>(Kind::Mutating).await?;
        let validating = validating.map(Configuration::from);
        let mutating = mutating.map(Configuration::from);
        Ok(validating.into_iter().chain(mutating).collect())
    }

    async fn get<K>(&self, kind: Kind) -> Result<Option<K>, CallError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let api = Api::<K>::all(self.client.clone());
        deadline(self.limit, format!("get {kind}"), api.get_opt(kind.name())).await
    }

    /// Applies `patch` to an existing configuration, as `manager`.
    pub async fn apply(&self, kind: Kind, manager: &str, patch: &Value) -> Result<Configuration, CallError> {
        match kind {
            Kind::Validating => self
                .apply_as::<ValidatingWebhookConfiguration>(kind, manager, patch)
                .await
                .map(Configuration::from),
            Kind::Mutating => self
                .apply_as::<MutatingWebhookConfiguration>(kind, manager, patch)
                .await
                .map(Configuration::from),
        }
    }

    async fn apply_as<K>(&self, kind: Kind, manager: &str, patch: &Value) -> Result<K, CallError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let api = Api::<K>::all(self.client.clone());
        let params = PatchParams::apply(manager).force();
        let patch = Patch::Apply(patch);
        let call = api.patch(kind.name(), &params, &patch);
        deadline(self.limit, format!("apply caBundle to {kind}"), call).await
    }

    /// Wakes `woken` whenever one of them may have changed.
    pub async fn watch(&self, woken: Arc<Notify>) {
        let validating = Api::<PartialObjectMeta<ValidatingWebhookConfiguration>>::all(self.client.clone());
        let mutating = Api::<PartialObjectMeta<MutatingWebhookConfiguration>>::all(self.client.clone());
        tokio::join!(
            watch(validating, Kind::Validating.name(), Arc::clone(&woken)),
            watch(mutating, Kind::Mutating.name(), woken),
        );
    }
}

/// Wakes `woken` whenever the object called `name` may have changed. What it is like is then read, not taken from
/// the event: events may be late.
pub(super) async fn watch<K>(api: Api<PartialObjectMeta<K>>, name: &str, woken: Arc<Notify>)
where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = std::pin::pin!(watcher(api, only));
    let mut pauses = Pauses::default();
    let mut told = String::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => {
                pauses = Pauses::default();
                told.clear();
                woken.notify_one();
            }
            // Comes before each attempt, so it is no success.
            Ok(Event::Init | Event::InitApply(_)) => {}
            Err(error) => {
                let reason = upkeep::told(&anyhow::Error::from(error));
                if reason != told {
                    warn!(error = %reason, "cannot watch {} {name}", K::kind(&()));
                    told = reason;
                }
                tokio::time::sleep(pauses.next()).await;
            }
        }
    }
}

impl From<ValidatingWebhookConfiguration> for Configuration {
    fn from(object: ValidatingWebhookConfiguration) -> Self {
        let webhooks = object.webhooks.unwrap_or_default().into_iter();
        let webhooks = webhooks.map(|webhook| Webhook::new(webhook.name, webhook.client_config));
        Self::new(Kind::Validating, object.metadata, webhooks)
    }
}

impl From<MutatingWebhookConfiguration> for Configuration {
    fn from(object: MutatingWebhookConfiguration) -> Self {
        let webhooks = object.webhooks.unwrap_or_default().into_iter();
        let webhooks = webhooks.map(|webhook| Webhook::new(webhook.name, webhook.client_config));
        Self::new(Kind::Mutating, object.metadata, webhooks)
    }
}

impl Configuration {
    fn new(kind: Kind, metadata: ObjectMeta, webhooks: impl Iterator<Item = Webhook>) -> Self {
        let annotations = metadata.annotations.unwrap_or_default();
        Self {
            kind,
            resource_version: metadata.resource_version.unwrap_or_default(),
            injected: annotations.keys().any(|key| key.starts_with(INJECTED)),
            webhooks: webhooks
                .filter(|webhook| {
                    admission::Webhook::ALL
                        .iter()
                        .any(|ours| ours.name() == webhook.name)
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::admissionregistration::v1::ServiceReference;

    use super::*;

    #[test]
    fn hosts() {
        let url = |url: &str| WebhookClientConfig {
            url: Some(url.to_owned()),
            ..WebhookClientConfig::default()
        };
        let service = WebhookClientConfig {
            service: Some(ServiceReference {
                name: "hook".into(),
                namespace: "ns".into(),
                ..ServiceReference::default()
            }),
            ..WebhookClientConfig::default()
        };
        for (client, expected) in [
            (service, Some("hook.ns.svc")),
            (url("https://127.0.0.1:9443/path"), Some("127.0.0.1")),
            (url("https://[::1]:9443/path"), Some("::1")),
            (url("https://hook.example.com"), Some("hook.example.com")),
            (url("/no/host"), None),
            (url("https://:9443"), None),
            (WebhookClientConfig::default(), None),
        ] {
            let shown = format!("{client:?}");
            let host = Webhook::new("w".into(), client).host;
            assert_eq!(
                host.as_ref().map(|host| host.to_str().into_owned()).as_deref(),
                expected,
                "{shown}"
            );
        }
    }
}
