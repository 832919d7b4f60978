//! Does what a plan says, in its order, and nothing it does not say. The first effect that fails ends the pass.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use k8s_openapi::{
    api::core::v1::{Namespace, Secret},
    jiff::Timestamp,
};
use kube::Api;
use serde_json::Value;

use super::{
    error::Error,
    kubernetes::Kubernetes,
    plan::{Effect, Goal, Observed},
    render::{self, TenantSecret},
};
use crate::pki::{
    self, Authority, CertifiedPair, EtcdNames, KeyAlgorithm, PkiError, TenantNames, Validity, kubeconfig,
};

/// Port in every kubeconfig, whatever the Service's port: the contract fixes it.
const KUBECONFIG_PORT: u16 = 6443;

/// Does one effect for the tenant of `goal`. `observed` is what the plan was made from.
pub(super) async fn apply(
    kubernetes: &Kubernetes,
    goal: &Goal<'_>,
    observed: &Observed,
    effect: &Effect,
    algorithm: KeyAlgorithm,
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
                algorithm,
                now,
            )
            .await
        }
        Effect::Apply(object) => kubernetes.apply(root, object, false).await,
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
    algorithm: KeyAlgorithm,
    now: Timestamp,
) -> Result<(), Error> {
    let root = &goal.tenant.root_namespace;
    let failed = |secret: TenantSecret| {
        move |source: PkiError| Error::Pki {
            what: format!("issue Secret {root}/{secret}"),
            source: Box::new(source),
        }
    };
    let names = names(goal, observed);
    let validity =
        Validity::from_expire_days(goal.tenant.pki_expire_days).map_err(failed(TenantSecret::ApiServer))?;
    let server = server_of(goal, observed);

    let stored = observed.secrets.get(TenantSecret::RootCa.name());
    let mut authority = match stored {
        Some(secret) => Some(load_authority(secret, now).map_err(|source| Error::Pki {
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
                crypto(move || ca.issue(&request, algorithm, validity, now))
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

/// What would keep credentials from being issued for the tenant of `goal`: told before an upgrade begins.
pub(super) fn check_credentials(goal: &Goal<'_>, observed: &Observed, now: Timestamp) -> Result<(), Error> {
    let root = &goal.tenant.root_namespace;
    let failed = |what: String| {
        move |source: PkiError| Error::Pki {
            what,
            source: Box::new(source),
        }
    };
    Validity::from_expire_days(goal.tenant.pki_expire_days).map_err(failed("issue certificates".into()))?;
    if let Some(secret) = observed.secrets.get(TenantSecret::RootCa.name()) {
        load_authority(secret, now).map_err(failed(format!("use Secret {root}/root-ca")))?;
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

fn names(goal: &Goal<'_>, observed: &Observed) -> TenantNames {
    let template = goal.template;
    TenantNames {
        cluster_key: goal.tenant.root_namespace.clone(),
        cluster_domain: goal.tenant.cluster_domain.clone(),
        virtual_cluster: goal.tenant.name.clone(),
        api_server_service: template.api_server_service.clone(),
        api_server_ip: cluster_ip(goal, observed),
        external_domain: goal.tenant.external_domain.clone(),
        etcd: template
            .etcd
            .as_ref()
            .zip(template.etcd_service.as_ref())
            .map(|(etcd, service)| EtcdNames {
                statefulset: etcd.stateful_set_name.clone(),
                service: service.clone(),
                replicas: etcd.replicas,
            }),
    }
}

/// The apiserver's address, if its Service is of type ClusterIP: it is then named in certificate and kubeconfigs.
fn cluster_ip(goal: &Goal<'_>, observed: &Observed) -> Option<IpAddr> {
    if !goal.template.has_cluster_ip_service() {
        return None;
    }
    let service = observed.services.get(&goal.template.api_server_service)?;
    service.spec.as_ref()?.cluster_ip.as_deref()?.parse().ok()
}

/// URL of the tenant's API inside the super cluster, as kubeconfigs and the status name it.
#[must_use]
pub(super) fn server_of(goal: &Goal<'_>, observed: &Observed) -> String {
    let host = cluster_ip(goal, observed).map_or_else(
        || {
            format!(
                "{}.{}",
                goal.template.api_server_service, goal.tenant.root_namespace
            )
        },
        |ip| ip.to_string(),
    );
    kubeconfig::server_url(&host, KUBECONFIG_PORT)
}

fn decode<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T, Error> {
    serde_json::from_value(value.clone())
        .map_err(|error| Error::Blocked(format!("a rendered object is not valid: {error}")))
}
