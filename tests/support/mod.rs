//! A real API server for tests: kube-apiserver, etcd, and of the controllers only those that delete. No kubelet: a
//! [`Driver`] plays the StatefulSet controller and the pods.
//!
//! One server serves all tests of a binary. A manager watches a whole server, so two of them would fight over each
//! other's tenants; therefore each test has a [`Scope`], a namespace and a label, and its [`Manager`] is shown only
//! the VirtualClusters of that namespace and the ClusterVersions of that label, by selectors that are added to its
//! requests on their way ([`Traffic`]). Apart from that it is the whole manager, and any number of them run side by
//! side.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "a module of every test binary, and none uses all of it"
)]

mod apiserver;
mod driver;
mod manager;
mod record;
mod replica;
pub mod samples;
mod scope;
pub mod templates;
mod traffic;
pub mod upstream;
pub mod webhook;

pub use apiserver::ApiServer;
pub use driver::Driver;
pub use manager::{Manager, Options};
pub use record::Recorder;
pub use replica::{PROGRAM, Replica};
pub use scope::{Scope, Tuple, condition, data, root_of, tuple, tuples};
pub use traffic::{Call, Cut, Traffic};

use std::time::Duration;

/// How long anything is waited for. Generous: it is only ever used up by a test that fails.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Asks `probe` again and again until it gives something; panics with `what` when patience ends.
pub async fn eventually<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "waited {PATIENCE:?} in vain for {what}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Lines of the managers under test, when `VCM_TEST_LOG` holds a filter.
pub fn log() {
    if let Ok(filter) = std::env::var("VCM_TEST_LOG") {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_test_writer()
            .try_init();
    }
}
