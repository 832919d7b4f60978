//! Admission: what the API server asks before it stores a ClusterVersion or a VirtualCluster.

pub mod configuration;
