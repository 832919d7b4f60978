//! Labels, annotations and finalizers that are on the wire, all with the meaning the Go manager gave them
//! unless said otherwise.

/// Label on a VirtualCluster by which its owner agrees to one upgrade; exactly [`READY_FOR_UPGRADE_YES`] counts.
pub const READY_FOR_UPGRADE: &str = "tenancy.x-k8s.io/ready-for-upgrade";
/// The only value of [`READY_FOR_UPGRADE`] that opts in.
pub const READY_FOR_UPGRADE_YES: &str = "true";
/// Label on a VirtualCluster: `metadata.resourceVersion` of the ClusterVersion last applied to it with success.
///
/// Written for those who read it from the Go manager; nothing here decides by it.
pub const CLUSTER_VERSION_APPLIED: &str = "tenancy.x-k8s.io/cluster-version-applied";
/// Label on a VirtualCluster: one more DNS name its apiserver is reached by (a SAN of the serving certificate).
pub const EXTERNAL_APISERVER_DOMAIN: &str = "tenancy.x-k8s.io/external-apiserver-domain";
/// Label on the pod templates of a tenant: the name of its root namespace.
pub const CLUSTER: &str = "tenancy.x-k8s.io/cluster";
/// Label on a root namespace, value `true`, written with the feature gate `SuperClusterLabelling`.
pub const CONTROLLED: &str = "tenancy.x-k8s.io/controlled";

/// Annotation on a root namespace: name of its VirtualCluster.
pub const VC_NAME: &str = "tenancy.x-k8s.io/vcname";
/// Annotation on a root namespace: namespace of its VirtualCluster.
pub const VC_NAMESPACE: &str = "tenancy.x-k8s.io/vcnamespace";
/// Annotation on a root namespace: uid of its VirtualCluster.
pub const VC_UID: &str = "tenancy.x-k8s.io/vcuid";
/// Annotation on a root namespace, value `true`.
pub const VC_ROOT_NS: &str = "tenancy.x-k8s.io/vcrootns";

/// Annotation (ours) on StatefulSets and Services of a tenant: hash of the object as it was last rendered.
///
/// An object whose rendering did not change is not written again. It stands on the object, never on the pod
/// template, so that it restarts nothing.
pub const RENDERED_HASH: &str = "tenancy.x-k8s.io/rendered-hash";
/// Annotation (ours) on a Secret of a tenant: the upgrade attempt it was last issued for, or the revision that the
/// tenant was provisioned from.
///
/// After a crash in the middle of an upgrade it tells which certificates were refreshed already.
pub const ISSUED_FOR: &str = "tenancy.x-k8s.io/issued-for";
/// Annotation (ours) on a VirtualCluster, value `true`: its owner accepts that an etcd which lost its data begins empty.
pub const ACCEPT_EMPTY_ETCD: &str = "tenancy.x-k8s.io/accept-empty-etcd";
/// Label (ours) on a ControllerRevision: uid of the ClusterVersion whose content it keeps.
pub const CLUSTER_VERSION_UID: &str = "tenancy.x-k8s.io/cluster-version-uid";

/// Finalizer of a VirtualCluster that the native provisioner made.
pub const VIRTUAL_CLUSTER_FINALIZER: &str = "virtualcluster.finalizer.native";
/// Finalizer of a ClusterVersion (the capital letter is on the wire).
pub const CLUSTER_VERSION_FINALIZER: &str = "clusterVersion.finalizers";
