//! Feature gates: which optional behaviours are on.
//!
//! The registry is the one the Go manager shared with its syncer, so that a deployment's existing `--feature-gates`
//! keeps working: every name is known and off by default, though the manager itself acts on few of them.
//!
//! The flag has the form of component-base's map of booleans, `Name=bool,Name2=bool`, and may be repeated.

use std::collections::BTreeMap;

use crate::args::go;

/// A gate of the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Syncer: tenants schedule over a pool of super clusters. No effect here.
    SuperClusterPooling,
    /// Syncer: super-cluster service network in tenants. No effect here.
    SuperClusterServiceNetwork,
    /// Labels what is created in the super cluster, so that the syncer may select it.
    SuperClusterLabelling,
    /// Syncer: watches only labelled objects of the super cluster. No effect here.
    SuperClusterLabelFilter,
    /// Syncer: virtual nodes by Service. No effect here.
    VNodeProviderService,
    /// Syncer: tenants choose a pod's DNS policy. No effect here.
    TenantAllowDnsPolicy,
    /// Syncer: virtual nodes by pod address. No effect here.
    VNodeProviderPodIp,
    /// A labelled tenant is brought to the current state of its `ClusterVersion`, etcd excepted.
    ClusterVersionPartialUpgrade,
    /// Syncer: tenants may exclude resources from syncing. No effect here.
    TenantAllowResourceNoSync,
    /// Syncer: strict schemas for synced CRDs. No effect here.
    DisableCrdPreserveUnknownFields,
    /// Syncer: `kube-root-ca.crt` in tenant namespaces. No effect here.
    RootCaCertConfigMapSupport,
    /// Syncer: external addresses of tenant Services. No effect here.
    VServiceExternalIp,
    /// Syncer: pods reach their tenant's API. No effect here.
    KubeApiAccessSupport,
    /// Syncer: status of tenants' volume claims. No effect here.
    SyncTenantPvcStatusPhase,
}

impl Feature {
    /// Every gate, in the registry's order.
    pub const ALL: [Self; 14] = [
        Self::SuperClusterPooling,
        Self::SuperClusterServiceNetwork,
        Self::SuperClusterLabelling,
        Self::SuperClusterLabelFilter,
        Self::VNodeProviderService,
        Self::TenantAllowDnsPolicy,
        Self::VNodeProviderPodIp,
        Self::ClusterVersionPartialUpgrade,
        Self::TenantAllowResourceNoSync,
        Self::DisableCrdPreserveUnknownFields,
        Self::RootCaCertConfigMapSupport,
        Self::VServiceExternalIp,
        Self::KubeApiAccessSupport,
        Self::SyncTenantPvcStatusPhase,
    ];

    /// The gate's name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SuperClusterPooling => "SuperClusterPooling",
            Self::SuperClusterServiceNetwork => "SuperClusterServiceNetwork",
            Self::SuperClusterLabelling => "SuperClusterLabelling",
            Self::SuperClusterLabelFilter => "SuperClusterLabelFilter",
            Self::VNodeProviderService => "VNodeProviderService",
            Self::TenantAllowDnsPolicy => "TenantAllowDNSPolicy",
            Self::VNodeProviderPodIp => "VNodeProviderPodIP",
            Self::ClusterVersionPartialUpgrade => "ClusterVersionPartialUpgrade",
            Self::TenantAllowResourceNoSync => "TenantAllowResourceNoSync",
            Self::DisableCrdPreserveUnknownFields => "DisableCRDPreserveUnknownFields",
            Self::RootCaCertConfigMapSupport => "RootCACertConfigMapSupport",
            Self::VServiceExternalIp => "VServiceExternalIP",
            Self::KubeApiAccessSupport => "KubeAPIAccessSupport",
            Self::SyncTenantPvcStatusPhase => "SyncTenantPVCStatusPhase",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|feature| feature.name() == name)
    }
}

/// Why a `--feature-gates` value was refused. The texts are those of the Go program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeatureGateError {
    /// An item without `=`.
    #[error("malformed pair, expect string=bool")]
    MalformedPair,
    /// The text after `=` is no boolean.
    #[error("invalid value of {name}: {value}, err: strconv.ParseBool: parsing {value:?}: invalid syntax")]
    NotBoolean {
        /// The gate as written.
        name: String,
        /// What stood after its `=`.
        value: String,
    },
    /// No gate has this name.
    #[error("unrecognized feature-gate key: {name}")]
    Unknown {
        /// The gate as written.
        name: String,
    },
}

/// The state of every gate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureGates(BTreeMap<Feature, bool>);

impl FeatureGates {
    /// Reads the values of all `--feature-gates` flags, in order; a later mention of a gate wins.
    ///
    /// A syntax error anywhere is reported before an unknown name, as in the Go program, where the one fails the
    /// flag and the other the start.
    pub fn parse<S: AsRef<str>>(values: &[S]) -> Result<Self, FeatureGateError> {
        let pairs = values
            .iter()
            .flat_map(|value| value.as_ref().split(','))
            .filter(|pair| !pair.is_empty());
        let pairs = pairs.map(parse_pair).collect::<Result<Vec<_>, _>>()?;
        let mut gates = Self::default();
        for (name, on) in pairs {
            let feature = Feature::from_name(name).ok_or_else(|| FeatureGateError::Unknown {
                name: name.to_owned(),
            })?;
            gates.0.insert(feature, on);
        }
        Ok(gates)
    }

    /// Whether the gate is on.
    #[must_use]
    pub fn enabled(&self, feature: Feature) -> bool {
        self.0.get(&feature).copied().unwrap_or(false)
    }

    /// These gates with one of them set.
    #[must_use]
    pub fn with(mut self, feature: Feature, on: bool) -> Self {
        self.0.insert(feature, on);
        self
    }
}

fn parse_pair(pair: &str) -> Result<(&str, bool), FeatureGateError> {
    let (name, value) = pair.split_once('=').ok_or(FeatureGateError::MalformedPair)?;
    let (name, value) = (name.trim(), value.trim());
    let on = go::parse_bool(value).map_err(|_| FeatureGateError::NotBoolean {
        name: name.to_owned(),
        value: value.to_owned(),
    })?;
    Ok((name, on))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gate_is_known_and_off() {
        let none = FeatureGates::parse::<&str>(&[]).unwrap();
        for feature in Feature::ALL {
            assert!(!none.enabled(feature));
            let on = FeatureGates::parse(&[format!("{}=true", feature.name())]).unwrap();
            assert!(on.enabled(feature), "{}", feature.name());
            assert_eq!(
                Feature::ALL
                    .into_iter()
                    .filter(|other| on.enabled(*other))
                    .count(),
                1
            );
        }
    }

    #[test]
    fn values_as_component_base_reads_them() {
        let gates = FeatureGates::parse(&["ClusterVersionPartialUpgrade=T, SuperClusterLabelling = 1,,", ""])
            .unwrap();
        assert!(gates.enabled(Feature::ClusterVersionPartialUpgrade));
        assert!(gates.enabled(Feature::SuperClusterLabelling));
        let gates = FeatureGates::parse(&["SuperClusterPooling=true", "SuperClusterPooling=FALSE"]).unwrap();
        assert!(!gates.enabled(Feature::SuperClusterPooling));
    }

    #[test]
    fn errors_have_the_go_programs_texts() {
        for (value, text) in [
            ("Nope=true", "unrecognized feature-gate key: Nope"),
            ("=true", "unrecognized feature-gate key: "),
            (
                "ClusterVersionPartialUpgrade",
                "malformed pair, expect string=bool",
            ),
            (
                "SuperClusterPooling=foo",
                "invalid value of SuperClusterPooling: foo, err: strconv.ParseBool: parsing \"foo\": invalid syntax",
            ),
            ("Nope=true,X", "malformed pair, expect string=bool"),
        ] {
            assert_eq!(FeatureGates::parse(&[value]).unwrap_err().to_string(), text);
        }
    }
}
