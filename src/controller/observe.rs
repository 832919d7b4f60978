//! Reads what exists of a tenant. Fresh from the API server, never from a cache: a cache that lags would show a
//! root CA that was just made as absent, and a second one would cut the tenant off.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, PersistentVolumeClaim, Pod, Secret, Service},
};
use kube::{Api, Resource, ResourceExt as _};

use super::{
    diagnose,
    error::Error,
    kubernetes::Kubernetes,
    plan::{self, Answer, Deaf, Observed},
    probe,
    render::{self, Tenant, TenantSecret},
    rollout,
};
use crate::api::{Component, template::Template};

/// Port that clients of etcd use by convention, as the contract's member list does for peers.
const ETCD_CLIENT_PORT: u16 = 2379;

/// Whether the tenant itself is asked, once its apiserver has rolled out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Yes.
    Tenant,
    /// No: the manager cannot reach its tenants (`--tenant-probe=false`).
    Nobody,
}

/// Everything in the root namespace of `tenant`, and what its API answers.
pub(super) async fn observe(
    kubernetes: &Kubernetes,
    tenant: &Tenant,
    template: &Template,
    ask: Ask,
) -> Result<Observed, Error> {
    let mut observed = stored(kubernetes, tenant).await?;
    if observed
        .namespace
        .as_ref()
        .is_none_or(|namespace| !render::belongs_to(namespace, tenant))
    {
        return Ok(observed);
    }
    observed.claims = claims(kubernetes, tenant, template, &observed).await?;
    match ask {
        Ask::Nobody => observed.answer = Some(Answer::NotAsked),
        Ask::Tenant => {
            observed.answer = answer(&observed, template).await;
            observed.deaf = deaf(&observed, template).await;
            observed.served = served(&observed, template).await;
        }
    }
    Ok(observed)
}

/// Everything in the root namespace of `tenant`, if it is its own.
pub(super) async fn stored(kubernetes: &Kubernetes, tenant: &Tenant) -> Result<Observed, Error> {
    let root = &tenant.root_namespace;
    let namespace = kubernetes
        .get(&Api::<Namespace>::all(kubernetes.client()), root)
        .await?;
    let Some(namespace) = namespace else {
        return Ok(Observed::default());
    };
    // Another's namespace is none of our business; the plan says so.
    if !render::belongs_to(&namespace, tenant) {
        return Ok(Observed {
            namespace: Some(namespace),
            ..Observed::default()
        });
    }
    // On the heap, as is the question below: calls are large futures, and every pass holds one of these.
    let lists = Box::pin(async {
        tokio::try_join!(
            kubernetes.list_in::<Secret>(root),
            kubernetes.list_in::<Service>(root),
            kubernetes.list_in::<StatefulSet>(root),
            kubernetes.list_in::<Pod>(root),
        )
    });
    let (secrets, services, stateful_sets, pods) = lists.await?;
    Ok(Observed {
        namespace: Some(namespace),
        secrets: by_name(secrets),
        services: by_name(services),
        stateful_sets: by_name(stateful_sets),
        pods,
        ..Observed::default()
    })
}

/// The claims that hold etcd's data: looked for when its StatefulSet is gone, to know whether the data is, too.
async fn claims(
    kubernetes: &Kubernetes,
    tenant: &Tenant,
    template: &Template,
    observed: &Observed,
) -> Result<BTreeSet<String>, Error> {
    let mut found = BTreeSet::new();
    let Some(etcd) = &template.etcd else {
        return Ok(found);
    };
    if observed.stateful_sets.contains_key(&etcd.stateful_set_name) {
        return Ok(found);
    }
    let api = Api::<PersistentVolumeClaim>::namespaced(kubernetes.client(), &tenant.root_namespace);
    for name in plan::data_claims(&etcd.stateful_set, &etcd.stateful_set_name, etcd.replicas) {
        let claim = kubernetes.get(&api, &name).await?;
        if claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_none()) {
            found.insert(name);
        }
    }
    Ok(found)
}

/// What the pods serve that run with an older certificate than their Secret holds, as far as their StatefulSets say.
async fn served(observed: &Observed, template: &Template) -> BTreeMap<String, Vec<u8>> {
    let mut served = BTreeMap::new();
    for (component, which) in [
        (Component::ApiServer, TenantSecret::ApiServer),
        (Component::Etcd, TenantSecret::Etcd),
    ] {
        let set = component.name();
        let Some(secret) = observed.secrets.get(which.name()) else {
            continue;
        };
        let same = plan::began_with(observed, component, which);
        // Issued before the pods were made, or at the same time: they began with it.
        if same || plan::issued_at(secret).is_none() {
            continue;
        }
        for pod in
            diagnose::of_set(&observed.pods, set).filter(|pod| pod.metadata.deletion_timestamp.is_none())
        {
            // As the apiserver is etcd's client.
            let client = observed
                .secrets
                .get(TenantSecret::ApiServer.name())
                .filter(|_| component == Component::Etcd);
            let port = match component {
                Component::Etcd => Some(ETCD_CLIENT_PORT),
                _ => observed
                    .services
                    .get(&template.api_server_service)
                    .and_then(|service| probe::target_port(pod, service)),
            };
            if let Some(port) = port
                && let Some(certificate) = probe::served_certificate(pod, port, client).await
            {
                served.insert(pod.name_any(), certificate);
            }
        }
    }
    served
}

async fn answer(observed: &Observed, template: &Template) -> Option<Answer> {
    let set = observed
        .stateful_sets
        .get(&template.api_server.stateful_set_name)?;
    if rollout::pending(set).is_some() {
        return None;
    }
    let Some(service) = observed.services.get(&template.api_server_service) else {
        return Some(Answer::NotReady(format!(
            "Service {} does not exist",
            template.api_server_service
        )));
    };
    let Some(admin) = observed.secrets.get(TenantSecret::AdminKubeconfig.name()) else {
        return Some(Answer::NotReady(format!(
            "Secret {} does not exist",
            TenantSecret::AdminKubeconfig
        )));
    };
    Some(Box::pin(probe::ask(service, template.api_server_port, admin)).await)
}

/// Apiserver pods that are being deleted and refuse connections. One that cannot be reached is not among them.
async fn deaf(observed: &Observed, template: &Template) -> Vec<Deaf> {
    let mut deaf = Vec::new();
    let Some(service) = observed.services.get(&template.api_server_service) else {
        return deaf;
    };
    for pod in diagnose::of_set(&observed.pods, &template.api_server.stateful_set_name) {
        if pod.metadata.deletion_timestamp.is_some() && probe::refuses_connections(pod, service).await {
            deaf.push(Deaf {
                pod: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
            });
        }
    }
    deaf
}

fn by_name<K: Resource>(objects: Vec<K>) -> BTreeMap<String, K> {
    objects
        .into_iter()
        .map(|object| (object.name_any(), object))
        .collect()
}
