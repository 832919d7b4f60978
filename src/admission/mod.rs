//! Admission: what the API server asks before it stores a ClusterVersion or a VirtualCluster.
//!
//! bytes → [`review::Review`] → rules → [`verdict::Verdict`] → bytes. The rules are pure functions of raw JSON; what
//! only the cluster knows is asked beforehand ([`cluster`]), with a deadline, and only by the few reviews that need it.
//!
//! Nobody is ever locked out: what is on its way out, a subresource, and a write that leaves `spec` as it is always
//! pass, and what an old object did not obey before is not held against it until it is edited.

#[cfg(test)]
mod arbitrary;
pub mod body;
pub mod cluster;
pub mod cluster_version;
pub mod configuration;
pub mod metrics;
pub mod review;
pub mod routes;
pub mod verdict;
pub mod virtual_cluster;

pub use cluster::Cluster;
pub use metrics::AdmissionMetrics;
pub use routes::{Admission, Webhook};
