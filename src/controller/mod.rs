//! The reconcile loop.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::args::ManagerConfig;
use crate::metrics::Metrics;

/// What the loop works with. Built once; there are no globals.
pub struct Setup {
    /// Client of the super cluster.
    pub client: kube::Client,
    /// The command line.
    pub config: Arc<ManagerConfig>,
    /// Where passes and upgrades are counted.
    pub metrics: Arc<Metrics>,
}

/// Runs until `stop` is cancelled.
pub async fn run(setup: Setup, stop: CancellationToken) -> anyhow::Result<()> {
    let _setup = setup;
    stop.cancelled().await;
    Ok(())
}
