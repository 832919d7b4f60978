//! The client of the super cluster.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use http::HeaderValue;
use http::header::USER_AGENT;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tower::timeout::Timeout;

use crate::build_info;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const TOKEN_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Makes the client, from the first of: `path`, `$KUBECONFIG`, the pod's service account, `~/.kube/config`. A source
/// that is there but broken is an error, not a reason to try the next.
///
/// The client does not retry: whoever calls it knows when a second try makes sense. It also has no read timeout, as
/// that would end watches; single calls belong in [`deadline`].
pub async fn client(path: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = config(path).await?;
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    let agent = format!("vc-manager/{}", build_info::VERSION);
    let agent = HeaderValue::try_from(agent).context("the version is no valid user agent")?;
    config.headers.push((USER_AGENT, agent));
    tracing::info!(server = %config.cluster_url, "using Kubernetes API");
    Client::try_from(config).context("cannot make a Kubernetes client")
}

async fn config(path: Option<&Path>) -> anyhow::Result<Config> {
    let options = KubeConfigOptions::default();
    if let Some(path) = path {
        let kubeconfig = Kubeconfig::read_from(path)
            .with_context(|| format!("cannot read kubeconfig {}", path.display()))?;
        return Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .with_context(|| format!("cannot use kubeconfig {}", path.display()));
    }
    if std::env::var_os("KUBECONFIG").is_some_and(|value| !value.is_empty()) {
        return Config::from_kubeconfig(&options)
            .await
            .context("cannot use $KUBECONFIG");
    }
    if in_cluster() {
        return Config::incluster().context("cannot use the pod's service account");
    }
    let home = Config::from_kubeconfig(&options).await;
    home.context("no --kubeconfig, no $KUBECONFIG, not in a pod, and cannot use ~/.kube/config")
}

/// Whether this process runs in a pod that has a service account.
#[must_use]
pub fn in_cluster() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some_and(|host| !host.is_empty())
        && Path::new(TOKEN_FILE).exists()
}

/// Why a call wrapped in [`deadline`] has no result.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No answer in time. Whether a write took effect is unknown.
    #[error("{what}: no answer within {limit:?}")]
    Deadline {
        /// What was tried, as in `get Secret a/b`.
        what: String,
        /// The time it was given.
        limit: Duration,
    },
    /// The call failed.
    #[error("{what}")]
    Api {
        /// What was tried.
        what: String,
        /// How it failed.
        source: Box<kube::Error>,
    },
}

impl CallError {
    /// The HTTP status the API server answered with, if it did answer.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            Self::Deadline { .. } => None,
        }
    }
}

/// Whether a server-side apply was refused because the object has not the shape of its kind: an unknown field, a wrong
/// type, an item that is there twice. The API server says so with a 500, in one of these texts.
#[must_use]
pub fn is_misshapen(message: &str) -> bool {
    [
        "failed to create typed patch object (",
        "failed to convert new object (",
    ]
    .iter()
    .any(|text| message.starts_with(text))
}

/// A client that shares `client`'s connections and gives up on a request that gets no answer within `limit`. For
/// code that calls the API on its own terms; not for watches, which may be silent for longer.
#[must_use]
pub fn with_deadline(client: Client, limit: Duration) -> Client {
    let namespace = client.default_namespace().to_owned();
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let client = client.clone();
        async move { client.send(request).await }
    });
    Client::new(Timeout::new(service, limit), namespace)
}

/// Runs one API call with a deadline. `what` names it in errors, as in `get Secret a/b`.
pub async fn deadline<T>(
    limit: Duration,
    what: impl Into<String>,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(CallError::Api {
            what: what.into(),
            source: Box::new(source),
        }),
        Err(_) => Err(CallError::Deadline {
            what: what.into(),
            limit,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn deadline_names_the_call() {
        let never = std::future::pending::<kube::Result<()>>();
        let error = deadline(Duration::from_millis(20), "get Secret a/b", never)
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "get Secret a/b: no answer within 20ms");
        assert_eq!(error.code(), None);
        let refused = async { Err::<(), _>(kube::Error::LinesCodecMaxLineLengthExceeded) };
        let error = deadline(Duration::from_secs(15), "get Secret a/b", refused)
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "get Secret a/b");
        assert!(std::error::Error::source(&error).is_some());
        assert_eq!(
            deadline(Duration::from_secs(1), "x", async { Ok(3) })
                .await
                .unwrap(),
            3
        );
    }

    #[tokio::test]
    async fn client_with_a_deadline() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, tower::BoxError>>()
        });
        let client = with_deadline(Client::new(silent, "ns"), Duration::from_millis(20));
        assert_eq!(client.default_namespace(), "ns");
        let answer = tokio::time::timeout(Duration::from_secs(5), client.apiserver_version()).await;
        assert!(answer.unwrap().is_err());
    }

    #[tokio::test]
    async fn named_kubeconfig_must_be_readable() {
        let error = client(Some(Path::new("/nonexistent/kubeconfig")))
            .await
            .err()
            .unwrap();
        assert_eq!(
            error.to_string(),
            "cannot read kubeconfig /nonexistent/kubeconfig"
        );
    }

    #[tokio::test]
    async fn named_kubeconfig_makes_a_client() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                    clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}], users: [{name: u, user: {token: t}}]}";
        std::fs::write(file.path(), text).unwrap();
        client(Some(file.path())).await.unwrap();
    }
}
