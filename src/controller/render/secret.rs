//! The seven Secrets of a tenant.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::api::core::v1::Secret;
use serde_json::{Value, json};

use super::Tenant;
use crate::{api::labels, pki::Leaf};

/// The Secrets of a tenant, in the order they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TenantSecret {
    /// The root CA. Made once, never replaced.
    RootCa,
    /// Leaf the apiserver serves with and is a client of etcd and kubelets with.
    ApiServer,
    /// Leaf of etcd: server, peer, client.
    Etcd,
    /// Leaf by which the apiserver authenticates to aggregated API servers.
    FrontProxy,
    /// Kubeconfig of the controller-manager.
    ControllerManagerKubeconfig,
    /// Kubeconfig of the tenant's administrator, which the syncer uses.
    AdminKubeconfig,
    /// The key pair that signs ServiceAccount tokens. Made once, never replaced: every token depends on it.
    ServiceAccount,
}

impl TenantSecret {
    /// All of them, in the order they are made.
    pub const ALL: [Self; 7] = [
        Self::RootCa,
        Self::ApiServer,
        Self::Etcd,
        Self::FrontProxy,
        Self::ControllerManagerKubeconfig,
        Self::AdminKubeconfig,
        Self::ServiceAccount,
    ];

    /// Those that every upgrade refreshes. Not etcd's: an upgrade does not touch etcd.
    pub const REFRESHED: [Self; 4] = [
        Self::ApiServer,
        Self::FrontProxy,
        Self::ControllerManagerKubeconfig,
        Self::AdminKubeconfig,
    ];

    /// Name of the Secret. ("-ca" on leaves is historical.)
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RootCa => "root-ca",
            Self::ApiServer => "apiserver-ca",
            Self::Etcd => "etcd-ca",
            Self::FrontProxy => "front-proxy-ca",
            Self::ControllerManagerKubeconfig => "controller-manager-kubeconfig",
            Self::AdminKubeconfig => "admin-kubeconfig",
            Self::ServiceAccount => "serviceaccount-rsa",
        }
    }

    /// The leaf certificate it holds, alone or inside a kubeconfig.
    #[must_use]
    pub const fn leaf(self) -> Option<Leaf> {
        match self {
            Self::RootCa | Self::ServiceAccount => None,
            Self::ApiServer => Some(Leaf::ApiServer),
            Self::Etcd => Some(Leaf::Etcd),
            Self::FrontProxy => Some(Leaf::FrontProxy),
            Self::ControllerManagerKubeconfig => Some(Leaf::ControllerManager),
            Self::AdminKubeconfig => Some(Leaf::Admin),
        }
    }

    /// Whether it holds a kubeconfig (under a key that equals its name).
    #[must_use]
    pub const fn is_kubeconfig(self) -> bool {
        matches!(self, Self::ControllerManagerKubeconfig | Self::AdminKubeconfig)
    }
}

impl fmt::Display for TenantSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The Secret that holds `data` (text by key). `attempt` is the upgrade it is issued for, if any.
#[must_use]
pub fn secret(
    which: TenantSecret,
    tenant: &Tenant,
    data: &BTreeMap<&str, &str>,
    attempt: Option<&str>,
) -> Value {
    let kind = if which.is_kubeconfig() {
        "Opaque"
    } else {
        "kubernetes.io/tls"
    };
    // `data`, not `stringData`: the latter is write-only, so that server-side apply would not own the keys.
    let data: serde_json::Map<_, _> = data
        .iter()
        .map(|(key, text)| {
            (
                (*key).to_owned(),
                json!(k8s_openapi::ByteString(text.as_bytes().to_vec())),
            )
        })
        .collect();
    let mut secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": which.name(), "namespace": tenant.root_namespace},
        "type": kind,
        "data": data,
    });
    if let Some(attempt) = attempt {
        secret["metadata"]["annotations"] = json!({labels::ISSUED_FOR: attempt});
    }
    secret
}

/// The data of a Secret as bytes by key.
#[must_use]
pub fn data_of(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    let data = secret.data.iter().flatten();
    data.map(|(key, value)| (key.clone(), value.0.clone())).collect()
}
