//! vc-manager: the manager of `VirtualClusters`, tenant Kubernetes control planes that run as pods in a super cluster.

pub mod admission;
pub mod api;
pub mod args;
pub mod build_info;
pub mod client;
pub mod controller;
pub mod features;
mod hex;
pub mod metrics;
pub mod pki;
pub mod process;
pub mod server;
pub mod telemetry;
pub mod yaml;
