//! The reconcile loop: provisions tenants, upgrades those that agreed, deletes those that are gone.
//!
//! Each pass is observe (reads) → plan (pure) → apply (does what the plan says) → status (computed from what was
//! applied). No pass sleeps or polls: watches call for the next one, a jittered requeue is the backstop. So a
//! stuck tenant never holds a worker, and a crash anywhere resumes from what is stored.
//!
//! | module | its concern |
//! |---|---|
//! | `run` | watches, who is reconciled when, backoff |
//! | `virtual_cluster`, `cluster_version` | one pass for an object of the kind |
//! | `provisioning`, `upkeep`, `upgrade`, `cleanup` | what happens to a tenant, from its making to its end |
//! | `adoption` | takes over a tenant of the Go manager |
//! | `orphans` | root namespaces whose VirtualCluster is gone |
//! | `terminating` | why a root namespace does not go (pure) |
//! | `repairs` | what was put back how often |
//! | `credentials` | whether its keys and certificates are what they must be (pure) |
//! | `observe`, `plan`, `apply`, `status` | the four parts of a pass |
//! | `render` | objects of a root namespace (pure) |
//! | `reload` | what components read again while they run, so that no restart is needed (pure) |
//! | `managed_fields` | which fields of what we applied others have changed since (pure) |
//! | `recorded` | the content of a ClusterVersion, recorded from what runs (pure) |
//! | `rollout`, `diagnose`, `probe` | whether a component is up, why not, whether the tenant answers |
//! | `revision` | contents of ClusterVersions as ControllerRevisions |
//! | `tally` | how many tenants are in which state, for the metrics |
//! | `pacing` | how many tenants start or upgrade at once |
//! | `kubernetes`, `error`, `events` | calls with deadlines, what can go wrong, Events |

mod adoption;
mod apply;
mod cleanup;
mod cluster_version;
pub mod credentials;
pub mod diagnose;
pub mod error;
mod events;
pub mod kubernetes;
pub mod managed_fields;
mod observe;
pub mod orphans;
mod pacing;
pub mod plan;
mod probe;
mod provisioning;
pub mod recorded;
pub mod reload;
pub mod render;
mod repairs;
mod revision;
pub mod rollout;
mod run;
mod status;
mod tally;
mod terminating;
mod upgrade;
mod upkeep;
mod virtual_cluster;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use k8s_openapi::jiff::Timestamp;

use self::{
    apply::Issuing,
    diagnose::Diagnosis,
    events::Events,
    kubernetes::Kubernetes,
    pacing::Turns,
    plan::{Effect, Goal},
    render::Tenant,
    repairs::Repairs,
    revision::Revisions,
};
use crate::{
    api::{VirtualCluster, template::Template},
    args::{LeafKeyAlgorithm, ManagerConfig},
    features::Feature,
    metrics::Metrics,
    pki::KeyAlgorithm,
};
pub use run::{Setup, run};

/// What one VirtualCluster is known by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What every pass works with. Made once, when the loop starts.
struct Context {
    kubernetes: Kubernetes,
    config: Arc<ManagerConfig>,
    metrics: Arc<Metrics>,
    events: Events,
    revisions: Revisions,
    clock: Clock,
    repairs: Repairs,
    tenants: Tenants,
    starting: Turns<TenantKey>,
    upgrading: Turns<TenantKey>,
    /// Tenants whose pods are replaced, other than by an upgrade.
    restarting: Turns<TenantKey>,
}

impl Context {
    /// The one place that asks what time it is.
    fn now(&self) -> Timestamp {
        // The API server keeps whole seconds: what is compared with a stored time must be no finer.
        let now = self.clock.now();
        Timestamp::from_second(now.as_second()).unwrap_or(now)
    }

    fn issuing(&self) -> Issuing<'_> {
        Issuing {
            algorithm: match self.config.leaf_key_algorithm {
                LeafKeyAlgorithm::EcdsaP256 => KeyAlgorithm::EcdsaP256,
                LeafKeyAlgorithm::Rsa2048 => KeyAlgorithm::Rsa2048,
            },
            max_life: self.config.max_certificate_life,
            lenient: false,
            signer: None,
        }
    }

    /// What a tenant is made from: the revision `revision`, whose content is `template`.
    fn goal<'a>(&self, tenant: &'a Tenant, template: &'a Template, revision: &'a str) -> Goal<'a> {
        Goal {
            tenant,
            template,
            revision,
            super_cluster_labelling: self.config.features.enabled(Feature::SuperClusterLabelling),
        }
    }

    fn ask(&self) -> observe::Ask {
        if self.config.tenant_probe {
            observe::Ask::Tenant
        } else {
            observe::Ask::Nobody
        }
    }

    /// A problem in words, with the last words of the container if it crashed.
    async fn told(&self, root_namespace: &str, problem: &Diagnosis) -> String {
        let mut text = format!("pod {}: {}", problem.pod, problem.message);
        if problem.crashed
            && let Some(words) = self
                .kubernetes
                .last_words(root_namespace, &problem.pod, &problem.container)
                .await
        {
            text = format!("{text}; it last said: {words}");
        }
        text
    }

    /// Gives back whatever turn a tenant holds.
    fn give_back_turns(&self, key: &TenantKey) {
        let now = Instant::now();
        self.starting.give_back(key, now);
        self.upgrading.give_back(key, now);
        self.restarting.give_back(key, now);
    }

    /// Drops what is remembered of a tenant that is gone.
    fn forget(&self, key: &TenantKey) {
        self.give_back_turns(key);
        self.repairs.forget(key);
        self.tenants.remove(key);
    }
}

/// What time it is.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// The system's.
    #[must_use]
    pub fn system() -> Self {
        Self::new(Timestamp::now)
    }

    /// One that says what `now` says.
    #[must_use]
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

/// Which tenant a root namespace belongs to: events in it are mapped back by its name, because nothing in it
/// carries a reference to its owner (one cannot point into another namespace).
#[derive(Clone, Debug, Default)]
struct Tenants {
    by_root_namespace: Arc<Mutex<BTreeMap<String, TenantKey>>>,
}

impl Tenants {
    /// Whoever claims a namespace that another tenant has claimed before does not get its events.
    fn insert(&self, root_namespace: String, key: TenantKey) {
        self.lock().entry(root_namespace).or_insert(key);
    }

    fn remove(&self, key: &TenantKey) {
        self.lock().retain(|_, known| known != key);
    }

    fn of(&self, root_namespace: &str) -> Option<TenantKey> {
        self.lock().get(root_namespace).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, TenantKey>> {
        self.by_root_namespace
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells, as an Event, what was just done.
fn tell_effect(context: &Context, vc: &VirtualCluster, action: &str, effect: &Effect) {
    match effect {
        Effect::CreateNamespace(_) => {
            context
                .events
                .normal(vc, "NamespaceCreated", action, "the root namespace is made");
        }
        Effect::Issue { secrets, .. } => {
            let names: Vec<_> = secrets.iter().map(|secret| secret.name()).collect();
            context.events.normal(
                vc,
                "CredentialsIssued",
                action,
                format!("issued {}", names.join(", ")),
            );
        }
        Effect::Apply(object) if object.kind == render::Kind::StatefulSet => {
            let reason = match object.component {
                crate::api::Component::Etcd => "EtcdApplied",
                crate::api::Component::ApiServer => "ApiServerApplied",
                crate::api::Component::ControllerManager => "ControllerManagerApplied",
            };
            context.events.normal(
                vc,
                reason,
                action,
                format!("StatefulSet {} is applied; waiting for it", object.name),
            );
        }
        // What is put back is told by who finds it, with who changed it.
        Effect::Apply(_) | Effect::PutBack { .. } => {}
        Effect::Restart(restart) => {
            let reason = match restart.component {
                crate::api::Component::ApiServer => "ApiServerRestarted",
                _ => "ControllerManagerRestarted",
            };
            context.events.normal(vc, reason, action, restart.why.clone());
        }
        Effect::MakeRoom(pod) => {
            let note = format!(
                "pod {} has stopped listening and answered its requests; it is not waited for any longer for the sake of open watches",
                pod.pod
            );
            context.events.normal(vc, "ApiServerMadeRoom", action, note);
        }
        Effect::DeletePod(pod) => {
            let note = format!(
                "pod {} is deleted: it is of an older revision and cannot become ready ({}), so its StatefulSet would wait for it for ever",
                pod.pod, pod.message
            );
            context.events.warning(vc, "StuckPodDeleted", action, note);
        }
    }
}
