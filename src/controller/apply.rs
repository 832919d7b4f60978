//! Does what a plan says, in its order, and nothing it does not say. The first effect that fails ends the pass.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use k8s_openapi::{
    api::core::v1::{Namespace, Secret},
    jiff::Timestamp,
};
use kube::Api;
use serde_json::Value;

use super::{
    credentials::{life, names, server_of, validity},
    error::Error,
    kubernetes::Kubernetes,
    managed_fields,
    plan::{self, Effect, Goal, Observed},
    render::{self, TenantSecret},
};
use crate::pki::{self, Authority, CertifiedPair, KeyAlgorithm, PkiError, kubeconfig};

/// How leaves are issued: the flags that say so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issuing<'a> {
    /// Kind of their keys.
    pub(super) algorithm: KeyAlgorithm,
    /// Limit of their life.
    pub(super) max_life: Option<Duration>,
    /// Whether what the VirtualCluster asks for and no certificate can have is left out: a tenant that runs must not run
    /// out of certificates for it.
    pub(super) lenient: bool,
    /// What keeps the root CA between effects of one plan, if it has several that issue.
    pub(super) signer: Option<&'a Signer>,
}

/// The root CA that leaves are signed with: loaded for the first of them, and kept for the others. It is for one
/// observation of one tenant.
#[derive(Debug, Default)]
pub(super) struct Signer(OnceLock<Loaded>);

impl Signer {
    fn load(&self, secret: &Secret, now: Timestamp) -> Result<Loaded, PkiError> {
        if let Some(loaded) = self.0.get() {
            return Ok(loaded.clone());
        }
        let loaded = load_authority(secret, now)?;
        Ok(self.0.get_or_init(|| loaded).clone())
    }
}

/// Does one effect for the tenant of `goal`. `observed` is what the plan was made from.
pub(super) async fn apply(
    kubernetes: &Kubernetes,
    goal: &Goal<'_>,
    observed: &Observed,
    effect: &Effect,
    issuing: Issuing<'_>,
    now: Timestamp,
) -> Result<(), Error> {
    let root = &goal.tenant.root_namespace;
    match effect {
        Effect::CreateNamespace(value) => {
            let namespace: Namespace = decode(value)?;
            match kubernetes
                .create(&Api::all(kubernetes.client()), &namespace)
                .await
            {
                // Whose it is shows in the next observation.
                Ok(_) | Err(Error::Conflict { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        }
        Effect::Issue { secrets, attempt } => {
            issue(
                kubernetes,
                goal,
                observed,
                secrets,
                attempt.as_deref(),
                issuing,
                now,
            )
            .await
        }
        Effect::Apply(object) | Effect::PutBack { object, .. } => {
            if let Some(meta) = plan::stored(object, observed)
                && let Some(entries) = managed_fields::migrated(meta, &render::GO_PROGRAMS)
            {
                kubernetes.own_fields(root, object, meta, &entries).await?;
            }
            kubernetes.apply(root, object, false).await.map(|_| ())
        }
        Effect::Restart(restart) => {
            kubernetes
                .patch_stateful_set(root, &restart.stateful_set, &restart.patch())
                .await
        }
        Effect::DeletePod(pod) => kubernetes.delete_pod(root, &pod.pod, &pod.uid, None).await,
        Effect::MakeRoom(pod) => kubernetes.delete_pod(root, &pod.pod, &pod.uid, Some(0)).await,
    }
}

/// Issues Secrets one by one, so that a crash leaves each either as it was or whole.
async fn issue(
    kubernetes: &Kubernetes,
    goal: &Goal<'_>,
    observed: &Observed,
    secrets: &[TenantSecret],
    attempt: Option<&str>,
    issuing: Issuing<'_>,
    now: Timestamp,
) -> Result<(), Error> {
    let root = &goal.tenant.root_namespace;
    let failed = |secret: TenantSecret| {
        move |source: PkiError| Error::Pki {
            what: format!("issue Secret {root}/{secret}"),
            source: Box::new(source),
        }
    };
    let mut names = names(goal, observed);
    let validity = if issuing.lenient {
        if pki::request(pki::Leaf::ApiServer, &names).is_err() {
            names.external_domain = None;
        }
        life(goal, issuing.max_life)
    } else {
        validity(goal, issuing.max_life).map_err(failed(TenantSecret::ApiServer))?
    };
    let server = server_of(goal, observed);

    let stored = observed.secrets.get(TenantSecret::RootCa.name());
    let own = Signer::default();
    let signer = issuing.signer.unwrap_or(&own);
    let mut authority = match stored {
        Some(secret) => Some(signer.load(secret, now).map_err(|source| Error::Pki {
            what: format!("use Secret {root}/root-ca"),
            source: Box::new(source),
        })?),
        None => None,
    };
    for &which in secrets {
        let pair = match (which, which.leaf()) {
            (TenantSecret::RootCa, _) => {
                let (made, pair) = crypto(move || Authority::create(now))
                    .await?
                    .map_err(failed(which))?;
                authority = Some(Loaded {
                    certificate_pem: pair.certificate_pem.clone(),
                    authority: Arc::new(made),
                });
                pair
            }
            (_, None) => crypto(pki::service_account::generate)
                .await?
                .map_err(failed(which))?,
            (_, Some(leaf)) => {
                let Some(ca) = &authority else {
                    return Err(Error::Blocked(format!("Secret {root}/root-ca does not exist")));
                };
                let request = pki::request(leaf, &names).map_err(failed(which))?;
                let ca = Arc::clone(&ca.authority);
                crypto(move || ca.issue(&request, issuing.algorithm, validity, now))
                    .await?
                    .map_err(failed(which))?
            }
        };
        let text;
        let mut data = BTreeMap::new();
        if which.is_kubeconfig() {
            let ca_pem = authority.as_ref().map_or("", |ca| ca.certificate_pem.as_str());
            let user = if which == TenantSecret::AdminKubeconfig {
                "admin"
            } else {
                "system:kube-controller-manager"
            };
            text =
                kubeconfig::render(&goal.tenant.name, &server, ca_pem, user, &pair).map_err(failed(which))?;
            data.insert(which.name(), text.as_str());
        } else {
            data.insert("tls.crt", pair.certificate_pem.as_str());
            data.insert("tls.key", pair.key_pem.as_str());
        }
        let value = render::secret(which, goal.tenant, &data, attempt);
        store(kubernetes, root, which, &value).await?;
    }
    Ok(())
}

/// Writes a Secret. The two that a tenant has once for life are created, never applied: should another manager
/// have made one in between, this one gives way instead of replacing it.
async fn store(kubernetes: &Kubernetes, root: &str, which: TenantSecret, value: &Value) -> Result<(), Error> {
    if which.leaf().is_some() {
        return kubernetes.apply_secret(root, which.name(), value).await;
    }
    let secret: Secret = decode(value)?;
    kubernetes
        .create(&Api::namespaced(kubernetes.client(), root), &secret)
        .await
        .map(|_| ())
}

#[derive(Clone, Debug)]
struct Loaded {
    certificate_pem: String,
    authority: Arc<Authority>,
}

fn load_authority(secret: &Secret, now: Timestamp) -> Result<Loaded, PkiError> {
    let pair = pair_of(secret);
    let authority = Arc::new(Authority::load(&pair.certificate_pem, &pair.key_pem, now)?);
    Ok(Loaded {
        certificate_pem: pair.certificate_pem,
        authority,
    })
}

/// `tls.crt` and `tls.key` of a Secret as text; what is no text is left empty and refused by who parses it.
fn pair_of(secret: &Secret) -> CertifiedPair {
    let mut data = render::data_of(secret);
    let mut take = |key: &str| String::from_utf8(data.remove(key).unwrap_or_default()).unwrap_or_default();
    CertifiedPair {
        certificate_pem: take("tls.crt"),
        key_pem: take("tls.key").into(),
    }
}

/// Key generation costs tenths of a second of CPU: off the threads that serve everything else.
async fn crypto<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::Blocked(format!("the manager failed to make a key: {error}")))
}

fn decode<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T, Error> {
    serde_json::from_value(value.clone())
        .map_err(|error| Error::Blocked(format!("a rendered object is not valid: {error}")))
}
