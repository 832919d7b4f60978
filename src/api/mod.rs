//! The API `tenancy.x-k8s.io/v1alpha1`: the two kinds, the names and labels that are on the wire, and the
//! read-only views through which the rest of the crate looks at the templates of a ClusterVersion.
//!
//! The API is a superset of the one of the Go manager: its stored objects decode here unchanged, and nothing
//! it reads has another meaning. Templates travel as raw JSON from the ClusterVersion to the tenant, never
//! through typed structs, because those drop every field they do not know.

pub mod cluster_version;
pub mod component;
pub mod crd;
pub mod field;
pub mod labels;
pub mod names;
pub mod root_namespace;
mod schema;
pub mod template;
pub mod virtual_cluster;

pub use cluster_version::{ClusterVersion, ClusterVersionSpec, ClusterVersionStatus};
pub use component::Component;
pub use crd::crds_yaml;
pub use field::FieldError;
pub use virtual_cluster::{UpgradeStep, VirtualCluster, VirtualClusterSpec, VirtualClusterStatus};

/// Field manager of every server-side apply into a root namespace.
///
/// It is the name the Go manager used: keeping it inherits the ownership of the fields that one applied, so
/// that a field dropped from a ClusterVersion is pruned from tenants it provisioned, too.
pub const FIELD_MANAGER: &str = "virtualcluster/provisioner/native";
