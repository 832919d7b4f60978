//! What to do next for one tenant. Pure: the same observation gives the same plan.
//!
//! The stages are those of the contract: namespace → apiserver Service, if its address goes into the certificate
//! → credentials → etcd → apiserver → controller-manager. A plan holds the effects of the first stage that is
//! not as it should be, or says what that stage waits for; once it is applied, the tenant is observed and planned
//! again. From any partial state this reaches the goal, and there the plan is empty.

mod foreign;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Namespace, Pod, Secret, Service},
    },
    jiff::Timestamp,
};
use kube::{Resource, ResourceExt as _};
use serde_json::Value;

pub use foreign::made_by;
pub use upkeep::{
    Care, Known, ObjectId, Refused, Restart, awaits_reload, began_with, data_claims, differing, health,
    homeless, id_of, is_stored, issued_at, lost_etcd, only_own_ports, serving_older, settled_as, stored,
    upkeep,
};

use super::{
    credentials,
    diagnose::{self, Diagnosis},
    managed_fields::{self, Drift},
    reload,
    render::{self, Kind, Rendered, Tenant, TenantSecret},
    rollout, terminating,
};
use crate::api::{Component, UpgradeStep, labels, template::Template, virtual_cluster::CertificatePolicy};

/// What exists of a tenant, read from the API server in one pass.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The namespace of the root namespace's name, whosever it is.
    pub namespace: Option<Namespace>,
    /// Secrets in it, by name.
    pub secrets: BTreeMap<String, Secret>,
    /// Services in it, by name.
    pub services: BTreeMap<String, Service>,
    /// StatefulSets in it, by name.
    pub stateful_sets: BTreeMap<String, StatefulSet>,
    /// Pods in it.
    pub pods: Vec<Pod>,
    /// What the tenant answered: `None` when it was not asked.
    pub answer: Option<Answer>,
    /// Apiserver pods that are being deleted and take no connections any more.
    pub deaf: Vec<Deaf>,
    /// The certificate (DER) that a pod of apiserver or etcd serves, by name of the pod, as far as they were asked.
    pub served: BTreeMap<String, Vec<u8>>,
    /// Claims of etcd's data that exist, by name; looked for only when its StatefulSet is gone.
    pub claims: BTreeSet<String>,
}

/// An apiserver pod that is on its way out and has stopped listening.
///
/// All requests it had are answered then; what is left are watches, and for those kube-apiserver lingers until it
/// is killed, at the end of its whole grace period, unless it runs with `--shutdown-watch-termination-grace-period`.
/// A StatefulSet makes the next pod only when it is gone, so that the tenant has no API all the while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deaf {
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod.
    pub uid: String,
}

/// What a tenant's API answered through its Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is ready and accepts its administrator's certificate.
    Ready,
    /// It does not; why, in words.
    NotReady(String),
    /// The manager runs with `--tenant-probe=false`.
    NotAsked,
}

/// One thing to do in the root namespace.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make the root namespace.
    CreateNamespace(Value),
    /// Make keys and certificates and store them: these Secrets, in this order.
    Issue {
        /// The Secrets to write.
        secrets: Vec<TenantSecret>,
        /// What they are issued for: an upgrade attempt, or the revision that a tenant is provisioned from.
        attempt: Option<String>,
    },
    /// Write an object by server-side apply.
    Apply(Rendered),
    /// Write an object that is not as the revision says, because somebody changed or deleted it.
    PutBack {
        /// What is written.
        object: Rendered,
        /// What differs; empty if the object is gone.
        drift: Vec<Drift>,
    },
    /// Replace the pods of a component, because they cannot take up a certificate otherwise.
    Restart(Restart),
    /// Delete a pod that keeps its StatefulSet from rolling out.
    DeletePod(Diagnosis),
    /// Make room for the successor of a pod that lingers with nothing left to do.
    ///
    /// The pod object is removed at once; the kubelet goes on ending the process in its time. (A shorter grace
    /// period would be gentler, but a kubelet does not act on one once it has told the runtime to stop.) Two
    /// processes side by side do no harm: an apiserver keeps nothing, and this one is no longer spoken to.
    MakeRoom(Deaf),
}

impl Effect {
    /// Whether pods that exist are replaced because of it.
    #[must_use]
    pub fn replaces_pods(&self) -> bool {
        match self {
            Self::Restart(_) => true,
            Self::Apply(object) | Self::PutBack { object, .. } => object.kind == Kind::StatefulSet,
            Self::CreateNamespace(_) | Self::Issue { .. } | Self::DeletePod(_) | Self::MakeRoom(_) => false,
        }
    }
}

/// What is next for a tenant.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// Do these, in order, then look again.
    Do(Vec<Effect>),
    /// Nothing to do but wait.
    Wait(Wait),
    /// Nothing can be done until a person acts.
    Blocked(String),
    /// Everything is as the revision says.
    Done,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// The component that is not ready; `None` when the tenant waits for its turn or for its namespace to be gone.
    pub component: Option<Component>,
    /// What is waited for, in words.
    pub message: String,
    /// A pod of it that has a problem.
    pub problem: Option<Diagnosis>,
    /// Whether a watch will tell when it is over. If not, it must be looked at again soon.
    pub watched: bool,
}

/// What a tenant should be.
#[derive(Clone, Copy, Debug)]
pub struct Goal<'a> {
    /// Whose objects.
    pub tenant: &'a Tenant,
    /// The revision they are rendered from.
    pub template: &'a Template,
    /// Name of that revision.
    pub revision: &'a str,
    /// Feature gate `SuperClusterLabelling`.
    pub super_cluster_labelling: bool,
}

/// Next step to bring `goal` up from whatever is there. `may_start` tells whether it is this tenant's turn to
/// start its pods; one whose etcd exists has started already. `due` are leaves that cannot be used as they are; `None`
/// while that cannot be judged.
#[must_use]
pub fn provision(
    goal: &Goal<'_>,
    observed: &Observed,
    due: Option<&[TenantSecret]>,
    may_start: bool,
    now: Timestamp,
) -> Plan {
    let Some(namespace) = &observed.namespace else {
        let value = render::namespace(goal.tenant, goal.super_cluster_labelling);
        return Plan::Do(vec![Effect::CreateNamespace(value)]);
    };
    if let Some(problem) = unusable(namespace, goal.tenant) {
        return match (&problem, terminating::report(namespace, now)) {
            // It does not go by itself.
            (Plan::Wait(_), Some(why)) if terminating::is_overdue(namespace, now) => Plan::Blocked(why),
            _ => problem,
        };
    }
    if let Some(why) = foreign::in_the_way(goal, observed) {
        return Plan::Blocked(why);
    }
    if let Some(plan) = address(goal, observed) {
        return plan;
    }
    let missing: Vec<_> = TenantSecret::ALL
        .into_iter()
        .filter(|secret| *secret != TenantSecret::Etcd || goal.template.etcd.is_some())
        .filter(|secret| match observed.secrets.get(secret.name()) {
            // A tenant that agreed to another revision before it ever ran may have other names now.
            Some(stored) => {
                secret.leaf().is_some()
                    && match due {
                        Some(due) => due.contains(secret) || !credentials::is_issued_by_us(stored),
                        None => annotation(stored, labels::ISSUED_FOR) != Some(goal.revision),
                    }
            }
            None => true,
        })
        .collect();
    if let Some(lost) = lost_root(goal, observed) {
        return Plan::Blocked(lost);
    }
    if !missing.is_empty() {
        return Plan::Do(vec![Effect::Issue {
            secrets: missing,
            attempt: Some(goal.revision.to_owned()),
        }]);
    }
    for component in Component::ALL {
        let Some(bundle) = goal.template.bundle(component) else {
            continue;
        };
        let starts = component == Component::ALL[0] || goal.template.etcd.is_none();
        if starts && !may_start && !observed.stateful_sets.contains_key(&bundle.stateful_set_name) {
            return Plan::Wait(Wait {
                component: None,
                message: "its turn: as many tenants are starting as may at once (--max-starting-tenants)"
                    .into(),
                problem: None,
                watched: true,
            });
        }
        if let Some(plan) = bring_up(goal, observed, component, Hashes::Present, now) {
            return plan;
        }
    }
    Plan::Done
}

/// Next step of an upgrade to `goal`, in the step that is recorded: everything but etcd.
///
#[must_use]
pub fn upgrade(goal: &Goal<'_>, observed: &Observed, attempt: &Attempt<'_>, now: Timestamp) -> Plan {
    if let Some(plan) = standing(goal, observed) {
        return plan;
    }
    if goal.template.etcd.is_some() && !observed.stateful_sets.contains_key(Component::Etcd.name()) {
        return Plan::Blocked(format!(
            "StatefulSet {} does not exist in {}; restore it before upgrading the tenant",
            Component::Etcd,
            goal.tenant.root_namespace
        ));
    }
    let component = match attempt.step {
        UpgradeStep::ApiServer => {
            if let Some(plan) = address(goal, observed) {
                return plan;
            }
            let stale = stale_credentials(goal, observed, attempt);
            if !stale.is_empty() {
                return Plan::Do(vec![Effect::Issue {
                    secrets: stale,
                    attempt: Some(attempt.name.to_owned()),
                }]);
            }
            Component::ApiServer
        }
        UpgradeStep::ControllerManager => Component::ControllerManager,
    };
    let hashes = attempt.hashes();
    bring_up(goal, observed, component, hashes, now)
        // Also when the controller-manager is the one that is waited for: its API must not have gone away meanwhile.
        .or_else(|| bring_up(goal, observed, Component::ApiServer, hashes, now))
        .unwrap_or(Plan::Done)
}

/// An upgrade under way, as far as a plan goes by it.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// Certificates that carry it were refreshed by this upgrade already.
    pub name: &'a str,
    /// The step under way.
    pub step: UpgradeStep,
    /// Which leaves are refreshed.
    pub certificates: CertificatePolicy,
    /// Leaves that cannot be used as they are, or are due.
    pub due: &'a [TenantSecret],
}

impl Attempt<'_> {
    fn hashes(&self) -> Hashes {
        match self.certificates {
            CertificatePolicy::Always => Hashes::Present,
            CertificatePolicy::IfNeeded => Hashes::Kept,
        }
    }
}

/// Which hashes of Secrets a rendered pod template carries. Another one replaces the pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hashes {
    /// Those of the Secrets as they are.
    Present,
    /// Those that the StatefulSet has, of Secrets that the component takes up while it runs.
    Kept,
    /// Those that the StatefulSet has.
    Running,
}

/// Whether the tenant is in a state to be upgraded from. `after_failure` tells that the last upgrade failed: what
/// it left unready is what this one repairs. Nothing is written before this says `Done`.
#[must_use]
pub fn preflight(goal: &Goal<'_>, observed: &Observed, after_failure: bool, now: Timestamp) -> Plan {
    if let Some(plan) = standing(goal, observed) {
        return plan;
    }
    if let Some(why) = foreign::in_the_way_of_upgrade(goal, observed) {
        return Plan::Blocked(why);
    }
    for component in Component::ALL {
        if component != Component::Etcd && after_failure {
            continue;
        }
        let Some(bundle) = goal.template.bundle(component) else {
            continue;
        };
        let Some(set) = observed.stateful_sets.get(&bundle.stateful_set_name) else {
            // A component that only the new revision has.
            if component == Component::ControllerManager {
                continue;
            }
            return Plan::Blocked(format!(
                "StatefulSet {} does not exist in {}; restore the tenant before upgrading it",
                bundle.stateful_set_name, goal.tenant.root_namespace
            ));
        };
        if let Some(plan) = gate(component, set, observed, now) {
            return plan;
        }
    }
    Plan::Done
}

/// The objects an upgrade would apply, for a dry run that finds what the API server refuses.
#[must_use]
pub fn preview(goal: &Goal<'_>, observed: &Observed) -> Vec<Rendered> {
    [Component::ApiServer, Component::ControllerManager]
        .into_iter()
        .flat_map(|component| objects(goal, observed, component, Hashes::Present))
        .collect()
}

/// What must hold before an existing tenant is worked on: its namespace and its keys.
fn standing(goal: &Goal<'_>, observed: &Observed) -> Option<Plan> {
    let root = &goal.tenant.root_namespace;
    let Some(namespace) = &observed.namespace else {
        return Some(Plan::Blocked(format!("root namespace {root} does not exist")));
    };
    if let Some(plan) = unusable(namespace, goal.tenant) {
        return Some(plan);
    }
    [TenantSecret::RootCa, TenantSecret::ServiceAccount]
        .into_iter()
        .find(|secret| !observed.secrets.contains_key(secret.name()))
        .map(|secret| Plan::Blocked(credentials::lost(root, secret)))
}

/// Why the namespace cannot be used, if it cannot.
fn unusable(namespace: &Namespace, tenant: &Tenant) -> Option<Plan> {
    if !render::belongs_to(namespace, tenant) {
        return Some(Plan::Blocked(format!(
            "namespace {} exists and its annotations do not name this VirtualCluster (uid {}): it is left alone; remove it or give the VirtualCluster another name",
            namespace.name_any(),
            tenant.uid
        )));
    }
    namespace.metadata.deletion_timestamp.as_ref().map(|_| {
        Plan::Wait(Wait {
            component: None,
            message: format!(
                "namespace {} to be gone: it is being deleted",
                namespace.name_any()
            ),
            problem: None,
            watched: false,
        })
    })
}

/// The apiserver's Service comes first when its address goes into certificate and kubeconfigs.
fn address(goal: &Goal<'_>, observed: &Observed) -> Option<Plan> {
    if !goal.template.has_cluster_ip_service() {
        return None;
    }
    let service = render::service(goal.template, Component::ApiServer, goal.tenant)?;
    needs_apply(&service, observed).then(|| Plan::Do(vec![Effect::Apply(service)]))
}

/// A root CA or service-account key that is gone while what depends on it is there was lost, not never made.
fn lost_root(goal: &Goal<'_>, observed: &Observed) -> Option<String> {
    let has = |secret: TenantSecret| observed.secrets.contains_key(secret.name());
    let started = !observed.stateful_sets.is_empty();
    let leaves = TenantSecret::ALL
        .into_iter()
        .any(|secret| secret.leaf().is_some() && has(secret));
    let lost = if !has(TenantSecret::RootCa) && (leaves || started) {
        TenantSecret::RootCa
    } else if !has(TenantSecret::ServiceAccount)
        && observed
            .stateful_sets
            .contains_key(&goal.template.api_server.stateful_set_name)
    {
        TenantSecret::ServiceAccount
    } else {
        return None;
    };
    Some(format!(
        "Secret {}/{lost} is gone while objects made from it exist; it is not made anew: restore it, or delete the VirtualCluster",
        goal.tenant.root_namespace
    ))
}

/// Secrets that this upgrade has still to refresh: the leaves, and whatever of the rest is missing.
fn stale_credentials(goal: &Goal<'_>, observed: &Observed, attempt: &Attempt<'_>) -> Vec<TenantSecret> {
    TenantSecret::ALL
        .into_iter()
        .filter(|secret| match observed.secrets.get(secret.name()) {
            Some(stored) => {
                let refreshed = attempt.certificates == CertificatePolicy::Always
                    && TenantSecret::REFRESHED.contains(secret);
                (refreshed || attempt.due.contains(secret))
                    && annotation(stored, labels::ISSUED_FOR) != Some(attempt.name)
            }
            None => {
                secret.leaf().is_some() && (*secret != TenantSecret::Etcd || goal.template.etcd.is_some())
            }
        })
        .collect()
}

/// Brings one component to what the goal says: apply what differs, unstick, wait. `None` when it is there.
fn bring_up(
    goal: &Goal<'_>,
    observed: &Observed,
    component: Component,
    hashes: Hashes,
    now: Timestamp,
) -> Option<Plan> {
    let bundle = goal.template.bundle(component)?;
    let effects: Vec<_> = objects(goal, observed, component, hashes)
        .into_iter()
        .filter(|object| needs_apply(object, observed))
        .map(Effect::Apply)
        .collect();
    if !effects.is_empty() {
        return Some(Plan::Do(effects));
    }
    let set = observed.stateful_sets.get(&bundle.stateful_set_name)?;
    make_way(component, set, observed, now).or_else(|| gate(component, set, observed, now))
}

/// Removes pods that keep a StatefulSet from rolling out, if there are such.
fn make_way(component: Component, set: &StatefulSet, observed: &Observed, now: Timestamp) -> Option<Plan> {
    let name = set.name_any();
    if let Some(revision) = seen_revision(set) {
        let stuck = diagnose::stuck(&observed.pods, &name, revision, now);
        if !stuck.is_empty() {
            return Some(Plan::Do(stuck.into_iter().map(Effect::DeletePod).collect()));
        }
    }
    if component == Component::ApiServer && shares_nothing(set) && !observed.deaf.is_empty() {
        return Some(Plan::Do(
            observed.deaf.iter().cloned().map(Effect::MakeRoom).collect(),
        ));
    }
    None
}

/// Whether two pods of `set` can be there at once: neither has a volume or a port that the other would want.
fn shares_nothing(set: &StatefulSet) -> bool {
    let Some(spec) = &set.spec else { return false };
    let Some(pod) = &spec.template.spec else {
        return false;
    };
    let claims = pod
        .volumes
        .iter()
        .flatten()
        .any(|volume| volume.persistent_volume_claim.is_some());
    let host_ports = pod
        .containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten())
        .any(|port| port.host_port.is_some());
    let own_claims = spec.volume_claim_templates.iter().flatten().count() > 0;
    !claims && !own_claims && !host_ports && pod.host_network != Some(true)
}

/// The newest revision of `set`, once its controller has seen the StatefulSet as it is now.
fn seen_revision(set: &StatefulSet) -> Option<&str> {
    let status = set.status.as_ref()?;
    let seen = status.observed_generation >= set.metadata.generation;
    status.update_revision.as_deref().filter(|_| seen)
}

/// StatefulSet, then Service, as the goal says them. A Service that went first is not there again.
fn objects(goal: &Goal<'_>, observed: &Observed, component: Component, hashes: Hashes) -> Vec<Rendered> {
    let mut carried = render::hashes(component, &observed.secrets);
    if let Some(stored) = observed.stateful_sets.get(component.name()) {
        let running = render::hashes_of(stored);
        for secret in render::hashed(component) {
            let kept = match hashes {
                Hashes::Present => false,
                Hashes::Kept => reload::reloads(component, *secret),
                Hashes::Running => true,
            };
            let key = render::hash_key(*secret);
            if let Some(hash) = running.get(&key).filter(|_| kept) {
                carried.insert(key, hash.clone());
            }
        }
    }
    set_of(goal, observed, component, &carried)
        .into_iter()
        .chain(render::service(goal.template, component, goal.tenant))
        .collect()
}

/// The StatefulSet of a component, with these hashes on its pod template.
fn set_of(
    goal: &Goal<'_>,
    observed: &Observed,
    component: Component,
    hashes: &BTreeMap<String, String>,
) -> Option<Rendered> {
    let set = render::stateful_set_with(goal.template, component, goal.tenant, hashes)?;
    let Some(stored) = observed.stateful_sets.get(component.name()) else {
        return Some(set);
    };
    // How many there are is the business of whoever scales them.
    let set = match managed_fields::scaled_by_other(&stored.metadata) {
        Some(_) => set.without_replicas(),
        None => set,
    };
    if component == Component::Etcd && !has_cluster_label(stored) {
        // Old builds of the Go manager gave pods no label. etcd's would be replaced for it, and may lose its data.
        let unlabelled = set.clone().without_cluster_label();
        let carried = annotation(stored, labels::RENDERED_HASH);
        if carried.is_none_or(|hash| hash == unlabelled.hash()) {
            return Some(unlabelled);
        }
    }
    Some(set)
}

fn has_cluster_label(set: &StatefulSet) -> bool {
    let template = set.spec.as_ref().and_then(|spec| spec.template.metadata.as_ref());
    template
        .and_then(|metadata| metadata.labels.as_ref())
        .is_some_and(|labels| labels.contains_key(labels::CLUSTER))
}

/// What a component that is as it should be waits for, if anything: its rollout, and then, for the two that make
/// up the API, that the tenant answers.
fn gate(component: Component, set: &StatefulSet, observed: &Observed, now: Timestamp) -> Option<Plan> {
    if let Some(pending) = rollout::pending(set) {
        // No watch tells when an apiserver that is on its way out stops listening.
        let leaving = component == Component::ApiServer
            && diagnose::of_set(&observed.pods, &set.name_any())
                .any(|pod| pod.metadata.deletion_timestamp.is_some());
        return Some(Plan::Wait(Wait {
            component: Some(component),
            message: format!("{component}: {pending}"),
            problem: seen_revision(set)
                .and_then(|revision| diagnose::worst(&observed.pods, &set.name_any(), revision, now)),
            watched: !leaving,
        }));
    }
    match &observed.answer {
        Some(Answer::NotReady(why)) if component != Component::Etcd => Some(Plan::Wait(Wait {
            component: Some(component),
            message: format!("the tenant's API to answer: {why}"),
            problem: None,
            watched: false,
        })),
        _ => None,
    }
}

/// Whether `object` is not there as it is rendered.
fn needs_apply(object: &Rendered, observed: &Observed) -> bool {
    let stored = match object.kind {
        Kind::StatefulSet => observed
            .stateful_sets
            .get(&object.name)
            .map(|set| annotation(set, labels::RENDERED_HASH)),
        Kind::Service => observed
            .services
            .get(&object.name)
            .map(|service| annotation(service, labels::RENDERED_HASH)),
    };
    stored.flatten() != Some(object.hash())
}

fn annotation<'a, K: Resource>(object: &'a K, key: &str) -> Option<&'a str> {
    object.meta().annotations.as_ref()?.get(key).map(String::as_str)
}
