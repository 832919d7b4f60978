//! The life of the process.
//!
//! Start: cryptographic provider, signals, client, serving certificate, listeners, loop, ready. Every replica serves;
//! the loop runs only while this one holds the Lease.
//!
//! Stop, at the first SIGTERM or SIGINT: not ready; serve on for a moment, as endpoints lag behind; stop accepting and
//! finish what is in flight; stop the loop; release the Lease. The second signal ends the process at once.
//!
//! Who loses the Lease, as in an outage of the API server, or cannot begin its work, stops its loop and stands for
//! election again. The process goes on: it serves webhooks, and after a restart in the middle of an outage it would have
//! no certificate for them.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use k8s_controller::LeaderElection;
use rand::RngExt as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::admission::{Admission, AdmissionMetrics, Cluster};
use crate::args::ManagerConfig;
use crate::client;
use crate::controller::{self, kubernetes::Kubernetes};
use crate::features::Feature;
use crate::metrics::Metrics;
use crate::server::certificate;
use crate::server::health::Readiness;
use crate::server::listen::ListenAddr;
use crate::server::metrics_endpoint::{Access, Authorizer};
use crate::server::router;
use crate::server::serve::{Drained, Limits, serve};

/// Timings of the Lease, those of the Go manager.
const LEASE_DURATION: Duration = Duration::from_secs(15);
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Longest pause after the loop ended with an error, or the Lease was lost.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long to serve on after becoming unready, when in a cluster: what it takes for endpoints to follow.
const ENDPOINT_LAG: Duration = Duration::from_secs(3);
/// Time for requests in flight at shutdown.
const DRAIN: Duration = Duration::from_secs(8);
/// The same after a failure: less than another replica has to wait before it takes over.
const DRAIN_AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Time to cut connections that are still open then.
const CUT: Duration = Duration::from_millis(200);
/// Time for the loop to stop at shutdown.
const LOOP_STOP: Duration = Duration::from_secs(8);
/// Time to hand back the Lease. All of these stay below the 30 s a pod has by default.
const RELEASE: Duration = Duration::from_secs(5);
/// Threads beyond these would only cost memory.
const MAX_THREADS: usize = 4;

/// Runs the manager until a signal ends it.
///
/// An error means that it could not start, or that a part of it ended unasked; without leader election also that the
/// loop could not begin.
pub fn run(config: ManagerConfig) -> anyhow::Result<()> {
    // Fails only if another provider is installed already, which then is as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let threads = std::thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(MAX_THREADS);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        // Keys are made and names are resolved there, rarely and briefly: each thread more is memory that stays.
        .max_blocking_threads(MAX_THREADS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let result = runtime.block_on(manage(config));
    // Tasks left over, such as a blocking read, must not keep the process from ending.
    runtime.shutdown_background();
    result
}

async fn manage(config: ManagerConfig) -> anyhow::Result<()> {
    let shutdown = shutdown_token()?;
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let config = Arc::new(config);
    info!(
        version = crate::build_info::VERSION,
        namespace = config.namespace,
        "starting vc-manager"
    );
    let metrics = Arc::new(
        Metrics::new(config.features.enabled(Feature::ClusterVersionPartialUpgrade))
            .context("cannot register metrics")?,
    );
    let client = client::client(config.kubeconfig.as_deref()).await?;
    let readiness = Readiness::new();
    let started = readiness.latch("started");
    let mut listeners = Listeners::new();
    tokio::select! {
        () = shutdown.cancelled() => return Ok(()),
        opened = listeners.start(&config, &client, &metrics, &readiness) => opened?,
    }

    let context = controller::Setup {
        clock: controller::Clock::system(),
        client: client.clone(),
        config: Arc::clone(&config),
        metrics: Arc::clone(&metrics),
    };
    let mut work = Work::start(context);
    started.set(true);
    let outcome = tokio::select! {
        // A signal that comes together with an end of the loop is a shutdown, not a failure.
        biased;
        () = shutdown.cancelled() => Ok(()),
        outcome = work.ended() => outcome.and_then(|()| bail!("the reconcile loop ended unasked")),
        name = listeners.ended() => Err(anyhow!("the {name} listener ended unasked")),
    };

    readiness.begin_shutdown();
    if outcome.is_ok() {
        info!("shutting down");
        if config.kubeconfig.is_none() && client::in_cluster() {
            tokio::time::sleep(ENDPOINT_LAG).await;
        }
    }
    let drain = if outcome.is_ok() {
        DRAIN
    } else {
        DRAIN_AFTER_FAILURE
    };
    listeners.stop(drain).await;
    work.stop().await;
    if outcome.is_ok() {
        info!("stopped");
    }
    outcome
}

/// Cancelled at the first signal. At the second the process exits.
fn shutdown_token() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let token = CancellationToken::new();
    let cancel = token.clone();
    tokio::spawn(async move {
        let mut next = async || received(&mut terminate, &mut interrupt).await;
        let name = next().await;
        info!(signal = name, "received signal");
        cancel.cancel();
        let name = next().await;
        warn!(signal = name, "received second signal, exiting at once");
        std::process::exit(1);
    });
    Ok(token)
}

async fn received(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

/// The listeners of this process, and the upkeep of their certificate.
struct Listeners {
    tasks: JoinSet<&'static str>,
    stop: CancellationToken,
    stop_upkeep: CancellationToken,
}

impl Listeners {
    fn new() -> Self {
        Self {
            tasks: JoinSet::new(),
            stop: CancellationToken::new(),
            stop_upkeep: CancellationToken::new(),
        }
    }

    /// Opens all sockets first, so that a taken port fails the start before anything is served.
    async fn start(
        &mut self,
        config: &ManagerConfig,
        client: &kube::Client,
        metrics: &Arc<Metrics>,
        readiness: &Readiness,
    ) -> anyhow::Result<()> {
        let https = match &config.https_addr {
            Some(address) => {
                // The address first: one that is taken must not cost the time to get a certificate.
                let listener = bind("https", address).await?;
                let (certificate, upkeep) = certificate::prepare(config, client, metrics, readiness).await?;
                let tls = certificate.server_config().context("cannot set up TLS")?;
                Some((listener, tls, upkeep))
            }
            None => None,
        };
        let health = match &config.health_addr {
            Some(address) => Some(bind("health", address).await?),
            None => None,
        };
        let plain_metrics = match &config.metrics_addr {
            Some(address) => Some(bind("metrics", address).await?),
            None => None,
        };
        if let Some((listener, tls, upkeep)) = https {
            upkeep.spawn(metrics, &self.stop_upkeep);
            let access = if config.metrics_auth {
                Access::Authorized(Arc::new(Authorizer::new(client.clone(), config.kube_api_timeout)))
            } else {
                Access::Open
            };
            let admission = admission(config, client, metrics)?;
            let router = router::https(readiness, Arc::clone(metrics), access, admission);
            self.spawn("https", listener, Some(tls), router);
        }
        if let Some(listener) = health {
            self.spawn("health", listener, None, router::health(readiness));
        }
        if let Some(listener) = plain_metrics {
            self.spawn("metrics", listener, None, router::metrics(Arc::clone(metrics)));
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        name: &'static str,
        listener: TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
        router: axum::Router,
    ) {
        let limits = Limits {
            drain: DRAIN,
            ..Limits::default()
        };
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            if let Drained::Cut(connections) = serve(name, listener, tls, router, limits, stop).await {
                warn!(listener = name, connections, "connections were cut");
            }
            name
        });
    }

    /// The name of a listener that ended unasked. Never, if there are none.
    async fn ended(&mut self) -> &'static str {
        match self.tasks.join_next().await {
            Some(Ok(name)) => name,
            Some(Err(error)) => {
                error!(%error, "listener task failed");
                "failed"
            }
            None => std::future::pending().await,
        }
    }

    /// Stops accepting, and waits for what is in flight.
    async fn stop(mut self, drain: Duration) {
        self.stop.cancel();
        self.stop_upkeep.cancel();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if timeout(drain + CUT, all).await.is_err() {
            warn!("listeners took too long to stop");
        }
    }
}

/// The webhooks, if they are enabled.
fn admission(
    config: &ManagerConfig,
    client: &kube::Client,
    metrics: &Metrics,
) -> anyhow::Result<axum::Router> {
    if !config.enable_webhook {
        return Ok(axum::Router::new());
    }
    let counted =
        AdmissionMetrics::new(metrics.registry()).context("cannot register metrics of admission")?;
    let cluster = Cluster::new(client.clone(), &config.namespace, config.kube_api_timeout);
    Ok(Admission::new(cluster, counted).routes())
}

async fn bind(name: &str, address: &ListenAddr) -> anyhow::Result<TcpListener> {
    address
        .bind()
        .await
        .with_context(|| format!("cannot listen on {address} ({name})"))
}

/// The reconcile loop, under the Lease if there is leader election.
struct Work {
    task: JoinHandle<anyhow::Result<()>>,
    stop: CancellationToken,
    election: Option<LeaderElection>,
}

impl Work {
    fn start(context: controller::Setup) -> Self {
        let stop = CancellationToken::new();
        let config = Arc::clone(&context.config);
        if !config.leader_election {
            let task = tokio::spawn(work(context, stop.clone()));
            return Self {
                task,
                stop,
                election: None,
            };
        }
        // A candidate would otherwise wait without end for an answer lost on the way.
        let lease_client = client::with_deadline(context.client.clone(), RENEW_DEADLINE / 3);
        let (namespace, name) = (&config.namespace, &config.leader_election_name);
        let election = LeaderElection::new(lease_client, namespace, name, &identity())
            .with_lease_duration(LEASE_DURATION)
            .with_renew_deadline(RENEW_DEADLINE)
            .with_retry_period(RETRY_PERIOD);
        let task = tokio::spawn(lead(election.clone(), context, stop.clone()));
        Self {
            task,
            stop,
            election: Some(election),
        }
    }

    /// The end of the loop, or of the Lease.
    async fn ended(&mut self) -> anyhow::Result<()> {
        (&mut self.task).await.context("the reconcile loop failed")?
    }

    /// Stops the loop, then gives back the Lease. A loop that has ended before has given it back or lost it.
    async fn stop(mut self) {
        if self.task.is_finished() {
            return;
        }
        self.stop.cancel();
        match timeout(LOOP_STOP, &mut self.task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => warn!(error = format!("{error:#}"), "reconcile loop ended with an error"),
            Ok(Err(error)) => warn!(%error, "reconcile loop failed"),
            Err(_) => {
                warn!("reconcile loop took too long to stop");
                self.task.abort();
                let _ = (&mut self.task).await;
            }
        }
        if let Some(election) = self.election
            && timeout(RELEASE, election.release()).await.is_err()
        {
            warn!("could not release the Lease in time");
        }
    }
}

/// Waits for the Lease, then runs the loop while holding it.
async fn lead(
    election: LeaderElection,
    context: controller::Setup,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    if !client::in_cluster() {
        // The Lease has nowhere to be otherwise. In a pod the namespace is the pod's own.
        let kubernetes = Kubernetes::new(context.client.clone(), context.config.kube_api_timeout);
        if let Err(error) = kubernetes.ensure_namespace(&context.config.namespace).await {
            warn!(%error, "the namespace of the Lease may be missing");
        }
    }
    let mut pause = RETRY_PERIOD;
    loop {
        let leading = AtomicBool::new(false);
        let loop_under_lease = async {
            leading.store(true, Ordering::Relaxed);
            work(context.clone(), stop.clone()).await
        };
        // Of use to a candidate only: a leader's loop heeds the token itself, and keeps the Lease until it is through.
        let resigned = async {
            stop.cancelled().await;
            if leading.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            outcome = election.with_lease(loop_under_lease) => match outcome {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => {
                    error!(error = format!("{error:#}"), retry_in = ?pause, "the reconcile loop ended; it is tried again");
                }
                // All of the loop went with its future: it leaves no task behind.
                None => warn!("lost the Lease: the loop is stopped, and stands for election again"),
            },
            () = resigned => return Ok(()),
        }
        // Another one may have better luck meanwhile: the Lease is free.
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => return Ok(()),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The loop itself.
async fn work(context: controller::Setup, stop: CancellationToken) -> anyhow::Result<()> {
    let _leading = Leading::new(Arc::clone(&context.metrics));
    controller::run(context, stop).await
}

/// Shows in the metrics that this replica runs the loop, until dropped.
struct Leading(Arc<Metrics>);

impl Leading {
    fn new(metrics: Arc<Metrics>) -> Self {
        metrics.set_leader(true);
        Self(metrics)
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.set_leader(false);
        // Another one sees them now.
        self.0.set_virtual_clusters([]);
    }
}

/// A name no other candidate has: that of the host, and a random UUID, as client-go's users form it.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() {
        "vc-manager"
    } else {
        host.trim()
    };
    format!("{host}_{}", uuid_v4(rand::rng().random()))
}

/// Random bits in the form of a version 4 UUID.
fn uuid_v4(random: u128) -> String {
    let bits = random & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities() {
        assert_eq!(uuid_v4(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(uuid_v4(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_ne!(identity(), identity());
        assert!(identity().contains('_'));
    }
}
