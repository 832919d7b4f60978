//! The name rule of root namespaces: where the control plane of a VirtualCluster lives in the super cluster.
//!
//! The same name is the tenant's *cluster key*: the common name of its apiserver certificate (by which the node
//! agent tells tenants apart) and the prefix of all namespaces that the syncer makes for it. It must never
//! change during a tenant's life, so a name once stored in the status is the authority.

use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

use super::VirtualCluster;
use crate::hex;

/// Longest name the API server accepts for a namespace (RFC 1123 label).
pub const MAX_LENGTH: usize = 63;

/// Name of the root namespace of `vc`: what its status says, else the name rule.
#[must_use]
pub fn of(vc: &VirtualCluster) -> String {
    match vc.status.as_ref().and_then(|s| s.cluster_namespace.as_deref()) {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => name(
            &vc.namespace().unwrap_or_default(),
            &vc.name_any(),
            &vc.uid().unwrap_or_default(),
        ),
    }
}

/// `<namespace>-<h>-<name>`, where h is the first six hex digits of the SHA-256 of the uid's text.
///
/// The result may be longer than [`MAX_LENGTH`]; the caller must refuse it then.
#[must_use]
pub fn name(namespace: &str, name: &str, uid: &str) -> String {
    let digest = Sha256::digest(uid.as_bytes());
    let short = hex::encode(&digest[..3]);
    format!("{namespace}-{short}-{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_of_the_go_manager() {
        assert_eq!(
            name("ns", "name", "d64ea0c0-91f8-46f5-8643-c0cab32ab0cd"),
            "ns-fd1b34-name"
        );
    }

    #[test]
    fn the_status_is_the_authority() {
        let mut vc = VirtualCluster::new("name", crate::api::VirtualClusterSpec::default());
        vc.metadata.namespace = Some("ns".into());
        vc.metadata.uid = Some("d64ea0c0-91f8-46f5-8643-c0cab32ab0cd".into());
        assert_eq!(of(&vc), "ns-fd1b34-name");
        vc.status = Some(crate::api::VirtualClusterStatus {
            cluster_namespace: Some("kept".into()),
            ..Default::default()
        });
        assert_eq!(of(&vc), "kept");
    }
}
