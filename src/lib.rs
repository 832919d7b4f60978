//! vc-manager: the manager of VirtualClusters, tenant Kubernetes control planes that run as pods in a super cluster.

pub mod pki;
