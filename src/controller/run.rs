//! The loops: who is looked at when, how many at once, and how soon again after an error.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Pod, Secret, Service},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, CustomResourceExt as _, Resource, ResourceExt as _,
    api::ListParams,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::{
        Controller,
        controller::{Action, Config},
        reflector::{ObjectRef, Store},
        watcher,
    },
};
use rand::RngExt as _;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::Instrument as _;

use super::{
    Clock, Context, TenantKey, Tenants, cluster_version, error::Error, events, kubernetes::Kubernetes,
    orphans, pacing::Turns, render::TenantSecret, repairs::Repairs, revision::Revisions, tally,
    virtual_cluster,
};
use crate::{
    api::{ClusterVersion, VirtualCluster, labels, virtual_cluster::phase},
    args::ManagerConfig,
    metrics::{Metrics, ReconcileOutcome},
};

/// Longest pause after repeated errors of one object.
const MAX_BACKOFF: Duration = Duration::from_mins(2);
/// A tenant that has been starting for this long does not keep others from starting.
const TENANT_PATIENCE: Duration = Duration::from_mins(3);
/// How long the API server may be unavailable when the manager starts.
const START_PATIENCE: Duration = Duration::from_mins(1);

/// What the loops work with.
#[derive(Clone)]
pub struct Setup {
    /// Client of the super cluster.
    pub client: Client,
    /// The command line.
    pub config: Arc<ManagerConfig>,
    /// Where passes and upgrades are counted.
    pub metrics: Arc<Metrics>,
    /// What passes take the time from.
    pub clock: Clock,
}

/// Runs the loops until `shutdown`; then lets the passes under way end. Fails only when it cannot start.
pub async fn run(setup: Setup, shutdown: CancellationToken) -> anyhow::Result<()> {
    let Setup {
        client,
        config,
        metrics,
        clock,
    } = setup;
    let kubernetes = Kubernetes::new(client.clone(), config.kube_api_timeout);
    let upgrading = tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        upgrading = survey(&kubernetes) => upgrading?,
    };

    let (wake, woken) = unbounded_channel();
    let (events, writer) = events::events(client.clone(), std::env::var("HOSTNAME").ok());
    let context = Arc::new(Context {
        revisions: Revisions::new(kubernetes.clone(), &config.namespace),
        starting: Turns::new(config.max_starting_tenants.into(), TENANT_PATIENCE, wake.clone()),
        upgrading: Turns::new(config.max_upgrading_tenants.into(), Duration::MAX, wake.clone()),
        restarting: Turns::new(
            config.max_upgrading_tenants.into(),
            config.provisioner_timeout,
            wake,
        ),
        repairs: Repairs::default(),
        clock,
        kubernetes,
        config,
        metrics,
        events,
        tenants: Tenants::default(),
    });
    for key in &upgrading {
        context.upgrading.keep(key, Instant::now());
    }
    let writing = AbortOnDropHandle::new(tokio::spawn(writer.run()));
    tokio::join!(
        virtual_clusters(Arc::clone(&context), woken, shutdown.clone()),
        cluster_versions(Arc::clone(&context), shutdown.clone()),
        orphans::run(Arc::clone(&context), shutdown),
    );
    drop(context);
    // What is queued is written, but not for ever.
    let _ = tokio::time::timeout(Duration::from_secs(5), writing).await;
    Ok(())
}

/// The installed definitions must have a status subresource; those of the Go manager have none, and every status
/// written would be lost.
async fn check_installed(kubernetes: &Kubernetes) -> Result<(), Error> {
    let api = Api::<CustomResourceDefinition>::all(kubernetes.client());
    for name in [ClusterVersion::crd_name(), VirtualCluster::crd_name()] {
        let advice =
            "apply the definitions of this version first: vc-manager crds | kubectl apply --server-side -f -";
        let Some(installed) = kubernetes.get(&api, name).await? else {
            return Err(Error::Blocked(format!(
                "CustomResourceDefinition {name} is not installed; {advice}"
            )));
        };
        let has_status = installed.spec.versions.iter().any(|version| {
            version.name == "v1alpha1"
                && version
                    .subresources
                    .as_ref()
                    .is_some_and(|subresources| subresources.status.is_some())
        });
        if !has_status {
            let what = format!("CustomResourceDefinition {name} has no status subresource");
            return Err(Error::Blocked(format!("{what}; {advice}")));
        }
    }
    Ok(())
}

/// Who is in the middle of an upgrade and gets its turn back before anyone new is asked.
async fn in_upgrade(kubernetes: &Kubernetes) -> Result<Vec<TenantKey>, Error> {
    let (mut all, _) = readable_tenants(kubernetes).await?;
    all.retain(|vc| vc.status.as_ref().is_some_and(|status| status.upgrade.is_some()));
    let key = |vc: &VirtualCluster| TenantKey {
        namespace: vc.namespace().unwrap_or_default(),
        name: vc.name_any(),
    };
    Ok(all.iter().map(key).collect())
}

/// All VirtualClusters that can be read, and how many cannot: one broken object must not stop the rest, but nor does
/// it use nothing.
pub(super) async fn readable_tenants(kubernetes: &Kubernetes) -> Result<(Vec<VirtualCluster>, usize), Error> {
    let api = Api::<GuardedTenant>::all(kubernetes.client());
    let all = kubernetes.list(&api, &ListParams::default()).await?;
    let readable = |object: GuardedTenant| {
        let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        object
            .0
            .inspect_err(|error| tracing::warn!(tenant = %name, %error, "a VirtualCluster cannot be read; it is passed over"))
            .ok()
    };
    let count = all.len();
    let readable: Vec<_> = all.into_iter().filter_map(readable).collect();
    let broken = count - readable.len();
    Ok((readable, broken))
}

/// What must be known before the loops start. Right after the definitions are installed the API server answers for
/// a moment that its storage is not ready, so an error is given a minute to pass; what is missing is told at once.
async fn survey(kubernetes: &Kubernetes) -> anyhow::Result<Vec<TenantKey>> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(250);
    loop {
        let surveyed = async {
            check_installed(kubernetes).await?;
            in_upgrade(kubernetes).await
        };
        match surveyed.await {
            Ok(keys) => return Ok(keys),
            Err(error) if error.is_final() || began.elapsed() > START_PATIENCE => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, retry_in = ?pause, "cannot start yet");
                tokio::time::sleep(jittered(pause)).await;
                pause = (pause * 2).min(Duration::from_secs(5));
            }
        }
    }
}

type GuardedTenant = DeserializeGuard<VirtualCluster>;
type GuardedVersion = DeserializeGuard<ClusterVersion>;

async fn virtual_clusters(
    context: Arc<Context>,
    woken: UnboundedReceiver<TenantKey>,
    shutdown: CancellationToken,
) {
    let client = context.kubernetes.client();
    let controller = Controller::new(
        Api::<GuardedTenant>::all(client.clone()),
        watcher::Config::default(),
    );
    let store = controller.store();
    let counting = tally::keep(controller.store(), Arc::clone(&context.metrics));
    let _counting = AbortOnDropHandle::new(tokio::spawn(counting));
    let woken = futures::stream::unfold(woken, |mut woken| async move {
        let key = woken.recv().await?;
        Some((reference(&key), woken))
    });
    let forgetful = Arc::clone(&context);
    let backoffs = Backoffs::default();
    let errors = backoffs.clone();
    let workers = context.config.num_reconciles;
    watching(controller, &context)
        .with_config(Config::default().concurrency(workers))
        .watches(
            Api::<PartialObjectMeta<ClusterVersion>>::all(client),
            watcher::Config::default(),
            move |version| waiting_for(&store, &version.name_any()),
        )
        .reconcile_on(woken)
        .graceful_shutdown_on(shutdown.cancelled_owned())
        .run(
            move |object, context| {
                let backoffs = backoffs.clone();
                let tenant = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
                let span = tracing::info_span!("virtualcluster", tenant);
                async move {
                    let key = object.uid().unwrap_or_default();
                    let metrics = Arc::clone(&context.metrics);
                    let started = Instant::now();
                    let result = virtual_cluster::reconcile(object, context).await;
                    observe_pass(&metrics, "virtualcluster", &result, started);
                    backoffs.note(&key, &result);
                    result
                }
                .instrument(span)
            },
            move |object, error, context| {
                let action = errors.action(&object.uid().unwrap_or_default(), error);
                if !matches!(error, Error::Conflict { .. })
                    && let Ok(vc) = &object.0
                {
                    context
                        .events
                        .warning(vc, error.category(), "Reconcile", error.to_string());
                }
                action
            },
            context,
        )
        .for_each(|result| {
            if let Err(kube::runtime::controller::Error::ObjectNotFound(gone)) = &result {
                forgetful.forget(&TenantKey {
                    namespace: gone.namespace.clone().unwrap_or_default(),
                    name: gone.name.clone(),
                });
            }
            async move { log_stream(result.map(|_| ())) }
        })
        .await;
}

/// Has a tenant looked at when something in its root namespace changes.
fn watching(controller: Controller<GuardedTenant>, context: &Context) -> Controller<GuardedTenant> {
    let all = watcher::Config::default;
    let controller = watching_kind::<StatefulSet>(controller, context, all());
    let controller = watching_kind::<Service>(controller, context, all());
    let controller = watching_kind::<Pod>(controller, context, all().labels(labels::CLUSTER));
    // By name: whoever syncs tenants fills the cluster with Secrets of theirs, and they are none of our business.
    TenantSecret::ALL
        .into_iter()
        .fold(controller, |controller, secret| {
            let named = all().fields(&format!("metadata.name={secret}"));
            watching_kind::<Secret>(controller, context, named)
        })
}

/// Only names are needed to map objects back to tenants, so only metadata is watched, and none of it is kept.
fn watching_kind<K>(
    controller: Controller<GuardedTenant>,
    context: &Context,
    config: watcher::Config,
) -> Controller<GuardedTenant>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + 'static,
{
    let tenants = context.tenants.clone();
    let api = Api::<PartialObjectMeta<K>>::all(context.kubernetes.client());
    controller.watches(api, config, move |object| {
        object
            .namespace()
            .and_then(|namespace| tenants.of(&namespace))
            .map(|key| reference(&key))
    })
}

async fn cluster_versions(context: Arc<Context>, shutdown: CancellationToken) {
    let api = Api::<GuardedVersion>::all(context.kubernetes.client());
    let backoffs = Backoffs::default();
    let errors = backoffs.clone();
    let workers = context.config.num_reconciles;
    Controller::new(api, watcher::Config::default())
        .with_config(Config::default().concurrency(workers))
        .graceful_shutdown_on(shutdown.cancelled_owned())
        .run(
            move |object, context| {
                let backoffs = backoffs.clone();
                let span = tracing::info_span!("clusterversion", cluster_version = %object.name_any());
                async move {
                    let key = object.uid().unwrap_or_default();
                    let metrics = Arc::clone(&context.metrics);
                    let started = Instant::now();
                    let result = cluster_version::reconcile(object, context).await;
                    observe_pass(&metrics, "clusterversion", &result, started);
                    backoffs.note(&key, &result);
                    result
                }
                .instrument(span)
            },
            move |object, error, _| errors.action(&object.uid().unwrap_or_default(), error),
            context,
        )
        .for_each(|result| async move { log_stream(result.map(|_| ())) })
        .await;
}

/// Tenants that may have waited for a change of the ClusterVersion `name`: those that agreed, those not yet up.
fn waiting_for(store: &Store<GuardedTenant>, name: &str) -> Vec<ObjectRef<GuardedTenant>> {
    let concerned = |vc: &VirtualCluster| {
        vc.spec.cluster_version_name == name && (vc.phase() != phase::RUNNING || vc.opted_in())
    };
    let all = store.state();
    all.iter()
        .filter(|object| object.0.as_ref().is_ok_and(concerned))
        .map(|object| ObjectRef::from_obj(&**object))
        .collect()
}

fn reference(key: &TenantKey) -> ObjectRef<GuardedTenant> {
    ObjectRef::new(&key.name).within(&key.namespace)
}

/// A delay of up to a fifth more, so that a thousand tenants do not come back in the same instant.
pub(super) fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(rand::rng().random_range(1.0..1.2))
}

fn observe_pass(metrics: &Metrics, controller: &str, result: &Result<Action, Error>, started: Instant) {
    let outcome = match result {
        Ok(action) if *action == Action::await_change() => ReconcileOutcome::Completed,
        Ok(_) => ReconcileOutcome::Waiting,
        Err(Error::Conflict { .. }) => ReconcileOutcome::Conflict,
        Err(_) => ReconcileOutcome::Failed,
    };
    metrics.reconciled(controller, outcome, started.elapsed());
}

fn log_stream<T>(result: Result<(), kube::runtime::controller::Error<Error, T>>)
where
    T: std::error::Error + 'static,
{
    use kube::runtime::controller::Error as Stream;
    match result {
        // Gone between the event and the look: nothing to do. Errors of a pass are logged where it ends.
        Ok(()) | Err(Stream::ObjectNotFound(_) | Stream::ReconcilerFailed(..)) => {}
        Err(error) => tracing::warn!(%error, "watch interrupted; it is taken up again"),
    }
}

/// How often in a row each object failed.
#[derive(Clone, Default)]
struct Backoffs {
    failures: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl Backoffs {
    /// A pass that went well forgives all.
    fn note(&self, key: &str, result: &Result<Action, Error>) {
        if result.is_ok() {
            self.failures
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(key);
        }
    }

    /// When to try again: ever later, and very soon at first after a conflict.
    fn action(&self, key: &str, error: &Error) -> Action {
        let conflict = matches!(error, Error::Conflict { .. });
        let first = if conflict { 50 } else { 500 };
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key.to_owned()).or_insert(0);
        *count = count.saturating_add(1);
        let delay = jittered(Duration::from_millis(first << (*count - 1).min(12)).min(MAX_BACKOFF));
        if conflict {
            tracing::info!(%error, retry_in = ?delay, "trying again");
        } else {
            tracing::warn!(%error, failures = *count, retry_in = ?delay, category = error.category(), "pass failed");
        }
        Action::requeue(delay)
    }
}
