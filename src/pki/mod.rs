//! The PKI of one tenant control plane: what its Secrets hold, how they are made, and how they are judged. The CA of
//! the webhooks uses the same parts.
//!
//! # Invariants
//!
//! - **The root CA is made once.** Tenants, their operators and the syncer hold copies of it; a second one cuts all
//!   of them off. An existing one is loaded, and checked, with [`Authority::load`]; only a Secret the API server
//!   (not a cache) says is absent justifies [`Authority::create`].
//! - **The service-account key is made once.** Replacing it invalidates every token the tenant ever issued.
//! - **Key material never reaches `Debug`, an error or a published hash.** Private keys live in
//!   [`zeroize::Zeroizing`]; wiping is best effort, since codecs below keep copies for a moment.
//! - Nothing here reads a clock or talks to a cluster: `now` is an argument, so every rule can be tested at any date.
//!   Randomness comes from AWS-LC.
//!
//! # Hierarchy
//!
//! One root CA per tenant signs everything: it is the client CA, the etcd CA and the front-proxy CA at once.
//!
//! | Secret | common name | organization | extended usage | subject alternative names |
//! |---|---|---|---|---|
//! | `root-ca` | `kubernetes` | [`ROOT_ORGANIZATION`] | none (a CA) | none |
//! | `apiserver-ca` | root namespace | none | server, client | the API server's names and `ClusterIP` |
//! | `etcd-ca` | `kube-etcd` | none | server, client | every member and the Service, bare and with the namespace; `127.0.0.1` |
//! | `front-proxy-ca` | `front-proxy-client` | none | client | none |
//! | `controller-manager-kubeconfig` | `system:kube-controller-manager` | none | client | none |
//! | `admin-kubeconfig` | `admin` | `system:masters` | client | none |
//! | `serviceaccount-rsa` | (an RSA key pair, no certificate) | | | |
//!
//! The `-ca` in the names of three leaves is historical. Other components mount and read these Secrets by name, so
//! names, data keys and PEM block types are fixed.
//!
//! # Cost
//!
//! Making an RSA-2048 key takes from tens to hundreds of milliseconds of CPU. Async callers run [`Authority::create`],
//! [`service_account::generate`] and [`Authority::issue`] in `tokio::task::spawn_blocking`.

mod authority;
mod certificate;
mod encoding;
mod error;
pub mod hash;
mod hierarchy;
mod issue;
pub mod kubeconfig;
mod pair;
pub mod service_account;

pub use authority::{Authority, ROOT_COMMON_NAME, ROOT_ORGANIZATION, ROOT_VALIDITY_DAYS};
pub use certificate::{CertificateInfo, renew_at, renew_at_spread};
pub use error::PkiError;
pub use hierarchy::{
    ETCD_REPLICAS_MAX, EtcdNames, ExtendedUsage, Leaf, LeafRequest, ROOT_CA_SECRET, SECRETS_IN_APPLY_ORDER,
    SERVICE_ACCOUNT_SECRET, TenantNames, request,
};
pub use issue::{KeyAlgorithm, Validity};
pub use pair::{CertifiedPair, TLS_CERTIFICATE_KEY, TLS_PRIVATE_KEY_KEY};

#[cfg(test)]
pub(crate) mod testing;
