//! The VirtualCluster: one tenant control plane.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::labels;

/// What a VirtualCluster asks for.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "tenancy.x-k8s.io",
    version = "v1alpha1",
    kind = "VirtualCluster",
    namespaced,
    shortname = "vc",
    status = "VirtualClusterStatus",
    derive = "PartialEq",
    doc = "VirtualCluster is a tenant Kubernetes control plane (etcd, kube-apiserver, kube-controller-manager) that runs as pods in the super cluster.",
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"ClusterVersion","type":"string","jsonPath":".spec.clusterVersionName"}"#,
    printcolumn = r#"{"name":"Revision","type":"string","jsonPath":".status.revision.current"}"#,
    printcolumn = r#"{"name":"Upgrade","type":"string","jsonPath":".status.upgrade.step"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"ClusterNamespace","type":"string","jsonPath":".status.clusterNamespace","priority":1}"#,
    printcolumn = r#"{"name":"CertificatesUntil","type":"string","jsonPath":".status.certificates.notAfter","priority":1}"#,
    printcolumn = r#"{"name":"Endpoint","type":"string","jsonPath":".status.endpoint","priority":1}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualClusterSpec {
    /// Name of the ClusterVersion this control plane is made from. It cannot change.
    // An empty one is of no use, but the Go manager's definition let it be stored: it may be filled in.
    #[schemars(extend("x-kubernetes-validations" = [
        {"rule": "self == oldSelf || oldSelf == ''", "message": "may not change: make another VirtualCluster"},
        {"rule": "self != ''", "reason": "FieldValueRequired", "message": "the name of a ClusterVersion"},
        {"rule": "self.size() <= 253 && self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$')",
         "message": "no ClusterVersion can have this name: lower-case letters, digits, - and ., at most 253 characters"},
    ]))]
    pub cluster_version_name: String,
    /// DNS domain of the tenant cluster; `cluster.local` when absent or empty.
    // 253 is the longest name in DNS; the limit also bounds what the rule costs.
    #[schemars(extend("x-kubernetes-validations" = [{
        "rule": "self.size() <= 253 && self.matches('^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*)?$')",
        "message": "must be a DNS domain such as cluster.local: lower-case letters, digits, - and ., at most 253 characters",
    }]))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_domain: Option<String>,
    /// Days that certificates of the tenant (but not its root CA) are valid; 365 when absent.
    // Ten years are what the root CA has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3650))]
    pub pki_expire_days: Option<i64>,
    /// While true, no upgrade begins and nothing that was changed by hand is put back. Certificates are renewed all the
    /// same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Prefixes of labels and annotations that the syncer copies from the super cluster back to the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transparent_meta_prefixes: Option<Vec<String>>,
    /// Prefixes of labels and annotations that the syncer keeps from the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opaque_meta_prefixes: Option<Vec<String>>,
    /// Accepted for compatibility; not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_cidr: Option<String>,
}

/// DNS domain of a tenant that names none.
pub const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";

/// Values of `status.phase`. The syncer connects to a tenant that is `Running` and tears down one that is in
/// `Error`, so the phase stays `Running` during and after an upgrade, a failed one included.
pub mod phase {
    /// Being provisioned.
    pub const PENDING: &str = "Pending";
    /// Provisioned; its API answered when this was written.
    pub const RUNNING: &str = "Running";
    /// Three attempts to provision failed. The manager goes on trying.
    pub const ERROR: &str = "Error";
}

/// What the manager says of a VirtualCluster.
///
/// `phase`, `message` and `reason` carry exactly the texts of the Go manager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VirtualClusterStatus {
    /// Pending, Running or Error. Stays Running during an upgrade and after a failed one.
    #[serde(default)]
    pub phase: String,
    /// The root namespace: where this control plane runs in the super cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_namespace: Option<String>,
    /// Message for the phase.
    #[serde(default)]
    pub message: String,
    /// Reason for the phase.
    #[serde(default)]
    pub reason: String,
    /// Conditions by type: `Ready`, `Upgrading`, `CertificatesValid`, `RootCANearsExpiry`, `Drifted`. Entries without a type were written by the Go manager.
    // No limit in the schema: early builds of the Go manager appended without bound, and those objects are valid.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// `metadata.generation` this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Revisions of the ClusterVersion that this tenant runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<RevisionStatus>,
    /// How provisioning goes; absent once the tenant has been Running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning: Option<ProvisioningStatus>,
    /// The upgrade under way; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeStatus>,
    /// The newest ten upgrades, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub history: Vec<HistoryEntry>,
    /// URL of the tenant's API inside the super cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The tenant's certificates, as they were last looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates: Option<CertificatesStatus>,
}

/// What is known of the credentials of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CertificatesStatus {
    /// When the first of the leaf certificates ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<Time>,
    /// When the first of the leaf certificates is renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_at: Option<Time>,
    /// When the root CA ends. It is never replaced by the manager.
    #[serde(rename = "rootCANotAfter", default, skip_serializing_if = "Option::is_none")]
    pub root_ca_not_after: Option<Time>,
    /// Hash of the root CA's certificate. A root CA with another is not worked with until this says so.
    #[serde(rename = "rootCAHash", default, skip_serializing_if = "Option::is_none")]
    pub root_ca_hash: Option<String>,
    /// Hash of the public half of the service-account key. A key with another is not worked with until this says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_key_hash: Option<String>,
}

/// A condition. As `metav1.Condition`, but for the entries of the Go manager, which have no type.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type, such as Ready. Absent in entries of the Go manager.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    /// True, False or Unknown.
    pub status: String,
    /// When the status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// Why, as one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why, in words a person can act on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// `metadata.generation` this condition was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// Names of ControllerRevisions in the manager's namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// The revision this tenant is pinned to: what it was provisioned with or last upgraded to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The revision it is being moved to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The last revision it was healthy on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_good: Option<String>,
    /// The revision that etcd is made from, where that is not `current`: an upgrade does not touch etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<String>,
    /// Whether `current` was recorded from what the Go manager had made. Until its first upgrade such a tenant is left
    /// as it is: only its certificates are renewed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
}

/// Bookkeeping of a tenant that has not been Running yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProvisioningStatus {
    /// Attempts that failed so far. The phase says Error from the third on; trying goes on.
    pub failures: u32,
    /// When the present attempt began.
    pub since: Time,
}

/// The steps of an upgrade, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum UpgradeStep {
    /// Leaves are refreshed and the new apiserver is brought up.
    ApiServer,
    /// The new apiserver answers; the new controller-manager is brought up.
    ControllerManager,
}

impl UpgradeStep {
    /// The step's name as the status shows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ApiServer => "ApiServer",
            Self::ControllerManager => "ControllerManager",
        }
    }
}

/// An upgrade under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeStatus {
    /// The revision the tenant is being moved to.
    pub revision: String,
    /// `metadata.resourceVersion` the ClusterVersion had when this upgrade began.
    pub cluster_version_resource_version: String,
    /// The step under way.
    pub step: UpgradeStep,
    /// When the step under way began. It fails when it takes longer than `--provisioner-timeout`.
    pub step_since: Time,
    /// When this upgrade began.
    pub started: Time,
    /// What the step waits for, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// Which leaf certificates this upgrade refreshes: `spec.upgradePolicy.certificates` of the ClusterVersion when it
    /// began.
    #[serde(default)]
    pub certificates: CertificatePolicy,
}

/// Which leaf certificates an upgrade refreshes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CertificatePolicy {
    /// All but etcd's, as the Go manager did.
    #[default]
    Always,
    /// Those that are due, or no longer fit. An upgrade that changes nothing else in a pod restarts nothing.
    IfNeeded,
}

impl UpgradeStatus {
    /// Identity of this attempt. Certificates issued for it carry it as an annotation.
    #[must_use]
    pub fn attempt(&self) -> String {
        format!("{}@{}", self.revision, self.started.0)
    }
}

/// How an upgrade ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradeResult {
    /// The tenant runs the revision and answers.
    Succeeded,
    /// It does not; `reason` says why.
    Failed,
}

/// An upgrade that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    /// The revision the tenant was moved to.
    pub revision: String,
    /// When the upgrade began.
    pub started: Time,
    /// When it ended.
    pub ended: Time,
    /// How it ended.
    pub result: UpgradeResult,
    /// Why it failed, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Entries kept in `status.history`.
pub const HISTORY_LIMIT: usize = 10;

impl VirtualCluster {
    /// Whether the owner agreed, by label, to one upgrade.
    #[must_use]
    pub fn opted_in(&self) -> bool {
        self.label(labels::READY_FOR_UPGRADE) == Some(labels::READY_FOR_UPGRADE_YES)
    }

    /// Value of the label `key`, if it is set and not empty.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.metadata
            .labels
            .as_ref()?
            .get(key)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    }

    /// `status.phase`, empty for an object that has none yet.
    #[must_use]
    pub fn phase(&self) -> &str {
        self.status.as_ref().map_or("", |status| status.phase.as_str())
    }

    /// Whether it has been Running.
    #[must_use]
    pub fn has_run(&self) -> bool {
        let revision = self.status.as_ref().and_then(|status| status.revision.as_ref());
        revision.is_some_and(|revision| revision.current.is_some())
    }

    /// Whether its owner accepts that an etcd which lost its data begins empty.
    #[must_use]
    pub fn accepts_empty_etcd(&self) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations
            .and_then(|annotations| annotations.get(labels::ACCEPT_EMPTY_ETCD))
            .map(String::as_str)
            == Some("true")
    }

    /// The revision that its etcd is made from, where that is not the one it is pinned to.
    #[must_use]
    pub fn etcd_pin(&self) -> Option<&str> {
        self.status.as_ref()?.revision.as_ref()?.etcd.as_deref()
    }

    /// Whether it runs what another manager made, and was not upgraded since.
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        let revision = self.status.as_ref().and_then(|status| status.revision.as_ref());
        revision.is_some_and(|revision| revision.adopted)
    }

    /// The revision this tenant is rendered from: the one it runs, or, before it has been Running, the one it
    /// is provisioned with.
    #[must_use]
    pub fn pin(&self) -> Option<&str> {
        let revision = self.status.as_ref()?.revision.as_ref()?;
        revision.current.as_deref().or(revision.target.as_deref())
    }
}
