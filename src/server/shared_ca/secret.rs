//! The Secret of the shared CA. Every write is guarded: it fails if anyone else wrote meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use tokio::sync::Notify;

use super::plan::Stored;
use super::{FIELD_MANAGER, SECRET};
use crate::client::{CallError, deadline};
use crate::controller::kubernetes::Kubernetes;
use crate::pki::{CertificateInfo, CertifiedPair};
use crate::server::configurations;

/// Data key of the CAs to be trusted.
const TRUSTED_KEY: &str = "ca.crt";
/// Label that says whose it is.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "vc-manager");

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It is stored.
    Stored,
    /// Someone else was first; read again.
    Overtaken,
}

/// The Secret in our namespace.
#[derive(Clone)]
pub(super) struct SecretStore {
    client: Client,
    namespace: String,
    limit: Duration,
}

impl SecretStore {
    pub(super) fn new(client: Client, namespace: &str, limit: Duration) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            limit,
        }
    }

    fn api(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Wakes `woken` whenever it may have changed.
    pub(super) async fn watch(&self, woken: Arc<Notify>) {
        let api = Api::<PartialObjectMeta<Secret>>::namespaced(self.client.clone(), &self.namespace);
        configurations::watch(api, SECRET, woken).await;
    }

    /// The Secret, fresh from the API server.
    pub(super) async fn read(&self) -> Result<Option<Secret>, CallError> {
        deadline(self.limit, self.what("get"), self.api().get_opt(SECRET)).await
    }

    /// Writes a CA and the list of trusted ones over what was `found`.
    pub(super) async fn write(
        &self,
        found: Option<Secret>,
        pair: Option<&CertifiedPair>,
        trusted: &[CertificateInfo],
    ) -> Result<Written, CallError> {
        let mut data = found
            .as_ref()
            .and_then(|secret| secret.data.clone())
            .unwrap_or_default();
        let bundle = super::publish::bundle(trusted);
        data.insert(TRUSTED_KEY.to_owned(), ByteString(bundle.into_bytes()));
        if let Some(pair) = pair {
            data.extend(
                pair.to_tls_data()
                    .into_iter()
                    .map(|(key, bytes)| (key, ByteString(bytes))),
            );
        }
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        // What tells that it was overtaken: a version that is no more, and a name that is taken.
        let (written, overtaken) = if let Some(found) = found {
            let secret = Secret {
                data: Some(data),
                ..found
            };
            let api = self.api();
            let call = api.replace(SECRET, &params, &secret);
            let written = deadline(self.limit, self.what("update"), call).await;
            (written, &[404, 409][..])
        } else {
            (self.create(&params, &new(data)).await, &[409][..])
        };
        match written {
            Ok(_) => Ok(Written::Stored),
            Err(error) if error.code().is_some_and(|code| overtaken.contains(&code)) => {
                Ok(Written::Overtaken)
            }
            Err(error) => Err(error),
        }
    }

    /// Creates it, and the namespace first if there is none: a manager outside the cluster may be the first to need
    /// its own.
    async fn create(&self, params: &PostParams, secret: &Secret) -> Result<Secret, CallError> {
        let create = async || {
            let api = self.api();
            let call = api.create(params, secret);
            deadline(self.limit, self.what("create"), call).await
        };
        match create().await {
            Err(error) if error.code() == Some(404) => {
                let kubernetes = Kubernetes::new(self.client.clone(), self.limit);
                if let Err(error) = kubernetes.ensure_namespace(&self.namespace).await {
                    tracing::warn!(%error, "the namespace of the webhook CA is missing");
                }
                create().await
            }
            other => other,
        }
    }

    fn what(&self, verb: &str) -> String {
        format!("{verb} Secret {}/{SECRET}", self.namespace)
    }
}

/// What a Secret holds.
pub(super) fn stored(secret: &Secret) -> Stored {
    let data = secret.data.iter().flatten();
    let data: BTreeMap<String, Vec<u8>> = data.map(|(key, bytes)| (key.clone(), bytes.0.clone())).collect();
    let labels = secret.metadata.labels.iter().flatten();
    Stored {
        ours: labels
            .into_iter()
            .any(|(key, value)| (key.as_str(), value.as_str()) == MANAGED_BY),
        pair: CertifiedPair::from_tls_data(SECRET, &data),
        trusted: data
            .get(TRUSTED_KEY)
            .map_or_else(Vec::new, |bundle| CertificateInfo::parse_bundle(bundle)),
    }
}

fn new(data: BTreeMap<String, ByteString>) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            labels: Some(BTreeMap::from([(
                MANAGED_BY.0.to_owned(),
                MANAGED_BY.1.to_owned(),
            )])),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(data),
        ..Secret::default()
    }
}
