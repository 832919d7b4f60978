//! What the scenarios share.

pub(crate) mod cluster;
mod explain;
pub(crate) mod manager;
mod prober;
mod recorder;
mod scene;
pub(crate) mod templates;
pub(crate) mod tenant;

use std::time::{Duration, Instant};

pub(crate) use explain::explain_all;
pub(crate) use prober::{Outages, Prober};
pub(crate) use recorder::Recorder;
pub(crate) use scene::Scene;
pub(crate) use tenant::{Tenant, condition, contents, is_ready, restarts, tuple};

/// How long a tenant may take to come up, or to be upgraded, while others do on the same two cores.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);

/// Asks `probe` until it gives something; panics with what it said last when the time is over.
pub(crate) async fn until<T>(
    what: &str,
    limit: Duration,
    mut probe: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        let said = match probe().await {
            Ok(value) => return value,
            Err(said) => said,
        };
        assert!(
            Instant::now() < deadline,
            "waited {limit:?} in vain for {what}: {said}"
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
