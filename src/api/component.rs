//! The three components of a tenant control plane and their names in the different places they are named.

use std::fmt;

/// A component of a tenant control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// The tenant's etcd. Made once; an upgrade never touches it.
    Etcd,
    /// The tenant's kube-apiserver.
    ApiServer,
    /// The tenant's kube-controller-manager. Optional.
    ControllerManager,
}

impl Component {
    /// All components, in the order they are started.
    pub const ALL: [Self; 3] = [Self::Etcd, Self::ApiServer, Self::ControllerManager];

    /// Key of the component's bundle below `spec` of a ClusterVersion.
    #[must_use]
    pub const fn spec_key(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "apiServer",
            Self::ControllerManager => "controllerManager",
        }
    }

    /// Name of the component: of its bundle (`metadata.name`) and of its StatefulSet in every sample.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "apiserver",
            Self::ControllerManager => "controller-manager",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
