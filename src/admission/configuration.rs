//! The webhook configurations that tell the API server to ask, and the names they are known by.

/// Name of the `ValidatingWebhookConfiguration`, that of the Go manager.
pub const VALIDATING_CONFIGURATION: &str = "virtualcluster-validating-webhook-configuration";
/// Name of the `MutatingWebhookConfiguration`.
pub const MUTATING_CONFIGURATION: &str = "virtualcluster-mutating-webhook-configuration";
/// Name of the Service, in the manager's namespace, that the configurations point at; that of the Go manager.
pub const SERVICE: &str = "virtualcluster-webhook-service";
/// Port of that Service, and of the pods behind it.
pub const PORT: u16 = 9443;
/// Name of the webhook that mutates ClusterVersions.
pub const MUTATE_CLUSTER_VERSION: &str = "clusterversion.mutating.webhook";
/// Name of the webhook that validates ClusterVersions.
pub const VALIDATE_CLUSTER_VERSION: &str = "clusterversion.validating.webhook";
/// Name of the webhook that validates VirtualClusters, that of the Go manager.
pub const VALIDATE_VIRTUAL_CLUSTER: &str = "virtualcluster.validating.webhook";
