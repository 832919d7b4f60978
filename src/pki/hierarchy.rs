//! Which certificates a tenant has and what is in each: pure rules, no keys.
//!
//! Names are part of the contract with other programs: a node agent tells tenants apart by the common name of the
//! API server's certificate, so that one is the root namespace and nothing else.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use super::error::PkiError;

/// Secret of the root CA.
pub const ROOT_CA_SECRET: &str = "root-ca";
/// Secret of the service-account key pair.
pub const SERVICE_ACCOUNT_SECRET: &str = "serviceaccount-rsa";
/// The seven Secrets in the order they are written: what others are checked against comes first.
pub const SECRETS_IN_APPLY_ORDER: [&str; 7] = [
    ROOT_CA_SECRET,
    "apiserver-ca",
    "etcd-ca",
    "front-proxy-ca",
    "controller-manager-kubeconfig",
    "admin-kubeconfig",
    SERVICE_ACCOUNT_SECRET,
];
/// Bound on etcd members, far above any real etcd; keeps a typing error from filling a certificate with names.
pub const ETCD_REPLICAS_MAX: u32 = 50;

/// Used when a `VirtualCluster` names no cluster domain.
const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";

/// A certificate signed by the root CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Leaf {
    /// The API server's serving certificate; also its client certificate towards kubelets and etcd.
    ApiServer,
    /// etcd's serving, peer and client certificate.
    Etcd,
    /// The API server's client certificate towards aggregated API servers.
    FrontProxy,
    /// The controller-manager's client certificate, inside its kubeconfig.
    ControllerManager,
    /// The tenant administrator's client certificate, inside the admin kubeconfig.
    Admin,
}

impl Leaf {
    /// All leaves, in the order their Secrets are written.
    pub const ALL: [Self; 5] = [
        Self::ApiServer,
        Self::Etcd,
        Self::FrontProxy,
        Self::ControllerManager,
        Self::Admin,
    ];

    /// The Secret that holds it.
    #[must_use]
    pub fn secret_name(self) -> &'static str {
        match self {
            Self::ApiServer => "apiserver-ca",
            Self::Etcd => "etcd-ca",
            Self::FrontProxy => "front-proxy-ca",
            Self::ControllerManager => "controller-manager-kubeconfig",
            Self::Admin => "admin-kubeconfig",
        }
    }

    /// Whether the Secret is a kubeconfig (one data key, named as the Secret) and not a `tls.crt`/`tls.key` pair.
    #[must_use]
    pub fn in_kubeconfig(self) -> bool {
        matches!(self, Self::ControllerManager | Self::Admin)
    }
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ApiServer => "apiserver",
            Self::Etcd => "etcd",
            Self::FrontProxy => "front-proxy",
            Self::ControllerManager => "controller-manager",
            Self::Admin => "admin",
        })
    }
}

/// The names a tenant's certificates are made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantNames {
    /// The root namespace, which is also the tenant's key.
    pub cluster_key: String,
    /// `spec.clusterDomain`; empty means `cluster.local`.
    pub cluster_domain: String,
    /// Name of the `VirtualCluster`.
    pub virtual_cluster: String,
    /// Name of the API server's Service.
    pub api_server_service: String,
    /// Its cluster IP, if it is of type `ClusterIP` and has one.
    pub api_server_ip: Option<IpAddr>,
    /// Value of the label `tenancy.x-k8s.io/external-apiserver-domain`; an empty one counts as none.
    pub external_domain: Option<String>,
    /// The tenant's own etcd; none if its API server uses one elsewhere.
    pub etcd: Option<EtcdNames>,
}

/// The names of a tenant's etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdNames {
    /// Name of the `StatefulSet`; members are `<statefulset>-<ordinal>`.
    pub statefulset: String,
    /// Name of the headless Service.
    pub service: String,
    /// Number of members.
    pub replicas: u32,
}

/// What a certificate may be used for, beyond its key usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtendedUsage {
    /// TLS server.
    ServerAuth,
    /// TLS client.
    ClientAuth,
}

/// Content of a leaf, but for key, issuer, serial and dates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafRequest {
    /// CN of the subject.
    pub common_name: String,
    /// O of the subject; Kubernetes reads it as a group.
    pub organization: Option<String>,
    /// Extended key usages, in order.
    pub usages: &'static [ExtendedUsage],
    /// DNS names, in order, each once.
    pub dns_names: Vec<String>,
    /// IP addresses, in order, each once.
    pub ip_addresses: Vec<IpAddr>,
}

const SERVER_AND_CLIENT: &[ExtendedUsage] = &[ExtendedUsage::ServerAuth, ExtendedUsage::ClientAuth];
const CLIENT: &[ExtendedUsage] = &[ExtendedUsage::ClientAuth];

/// What `leaf` must contain for the tenant `names`.
///
/// Fails on names no certificate can carry, and for [`Leaf::Etcd`] on a tenant without etcd. An external domain
/// written as an IPv4 address becomes an IP name: clients look for addresses nowhere else.
pub fn request(leaf: Leaf, names: &TenantNames) -> Result<LeafRequest, PkiError> {
    let client = |common_name: &str, organization: Option<&str>| LeafRequest {
        common_name: common_name.to_owned(),
        organization: organization.map(str::to_owned),
        usages: CLIENT,
        dns_names: Vec::new(),
        ip_addresses: Vec::new(),
    };
    match leaf {
        Leaf::ApiServer => api_server(names),
        Leaf::Etcd => etcd(
            names.etcd.as_ref().ok_or(PkiError::EtcdNamesMissing)?,
            &names.cluster_key,
        ),
        Leaf::FrontProxy => Ok(client("front-proxy-client", None)),
        Leaf::ControllerManager => Ok(client("system:kube-controller-manager", None)),
        Leaf::Admin => Ok(client("admin", Some("system:masters"))),
    }
}

fn api_server(names: &TenantNames) -> Result<LeafRequest, PkiError> {
    let TenantNames {
        cluster_key,
        cluster_domain,
        virtual_cluster,
        api_server_service,
        api_server_ip,
        external_domain,
        etcd: _,
    } = names;
    check_dns("root namespace", cluster_key)?;
    let domain = if cluster_domain.is_empty() {
        DEFAULT_CLUSTER_DOMAIN
    } else {
        cluster_domain
    };
    let mut dns = DnsNames::default();
    for name in ["kubernetes", "kubernetes.default", "kubernetes.default.svc"] {
        dns.add("API server", name.to_owned())?;
    }
    dns.add(
        "API server with spec.clusterDomain",
        format!("kubernetes.default.svc.{domain}"),
    )?;
    dns.add(
        "API server Service in the root namespace",
        format!("{api_server_service}.{cluster_key}"),
    )?;
    dns.add("VirtualCluster name", virtual_cluster.clone())?;
    let mut ip_addresses = Vec::from_iter(*api_server_ip);
    match external_domain.as_deref() {
        None | Some("") => {}
        Some(external) => match external.parse() {
            Ok(address) if ip_addresses.contains(&address) => {}
            Ok(address) => ip_addresses.push(address),
            Err(_) => dns.add("external API server domain", external.to_owned())?,
        },
    }
    Ok(LeafRequest {
        common_name: cluster_key.clone(),
        organization: None,
        usages: SERVER_AND_CLIENT,
        dns_names: dns.0,
        ip_addresses,
    })
}

fn etcd(names: &EtcdNames, cluster_key: &str) -> Result<LeafRequest, PkiError> {
    let EtcdNames {
        statefulset,
        service,
        replicas,
    } = names;
    if *replicas > ETCD_REPLICAS_MAX {
        return Err(PkiError::TooManyEtcdReplicas { replicas: *replicas });
    }
    let members = (0..*replicas).map(|ordinal| format!("{statefulset}-{ordinal}.{service}"));
    let short: Vec<String> = members.chain([service.clone()]).collect();
    let mut dns = DnsNames::default();
    for name in &short {
        dns.add("etcd member or Service", name.clone())?;
    }
    for name in &short {
        dns.add(
            "etcd member or Service in the root namespace",
            format!("{name}.{cluster_key}"),
        )?;
    }
    Ok(LeafRequest {
        common_name: "kube-etcd".to_owned(),
        organization: None,
        usages: SERVER_AND_CLIENT,
        dns_names: dns.0,
        ip_addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
    })
}

/// Valid DNS names in order of addition, without repetition.
#[derive(Default)]
struct DnsNames(Vec<String>);

impl DnsNames {
    fn add(&mut self, role: &'static str, name: String) -> Result<(), PkiError> {
        check_dns(role, &name)?;
        if !self.0.contains(&name) {
            self.0.push(name);
        }
        Ok(())
    }
}

/// RFC 1123 host names, with the underscore Go's verifier also takes (label values may hold one).
fn check_dns(role: &'static str, name: &str) -> Result<(), PkiError> {
    let invalid = |reason| {
        Err(PkiError::InvalidName {
            name: name.to_owned(),
            role,
            reason,
        })
    };
    if name.len() > 253 {
        return invalid("it is longer than 253 characters");
    }
    for label in name.split('.') {
        if label.is_empty() {
            return invalid("a part between dots is empty");
        }
        if label.len() > 63 {
            return invalid("a part between dots is longer than 63 characters");
        }
        if label.starts_with('-') || label.ends_with('-') {
            return invalid("a part between dots starts or ends with a hyphen");
        }
        if !label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        {
            return invalid("only letters, digits, hyphens, underscores and dots may be used");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::testing::tenant;

    /// Leaf, Secret, common name, organization, usages, DNS names, IP addresses.
    type Row<'a> = (
        Leaf,
        &'a str,
        &'a str,
        Option<&'a str>,
        &'a [ExtendedUsage],
        &'a [&'a str],
        &'a [&'a str],
    );

    #[test]
    fn every_leaf_is_what_the_table_says() {
        let both: &[ExtendedUsage] = &[ExtendedUsage::ServerAuth, ExtendedUsage::ClientAuth];
        let client: &[ExtendedUsage] = &[ExtendedUsage::ClientAuth];
        let api_server = [
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
            "apiserver-svc.ns-fd1b34-name",
            "name",
            "name.example.com",
        ];
        let etcd = [
            "etcd-0.etcd",
            "etcd-1.etcd",
            "etcd",
            "etcd-0.etcd.ns-fd1b34-name",
            "etcd-1.etcd.ns-fd1b34-name",
            "etcd.ns-fd1b34-name",
        ];
        let table: [Row<'_>; 5] = [
            (
                Leaf::ApiServer,
                "apiserver-ca",
                "ns-fd1b34-name",
                None,
                both,
                &api_server,
                &["10.96.29.243"],
            ),
            (
                Leaf::Etcd,
                "etcd-ca",
                "kube-etcd",
                None,
                both,
                &etcd,
                &["127.0.0.1"],
            ),
            (
                Leaf::FrontProxy,
                "front-proxy-ca",
                "front-proxy-client",
                None,
                client,
                &[],
                &[],
            ),
            (
                Leaf::ControllerManager,
                "controller-manager-kubeconfig",
                "system:kube-controller-manager",
                None,
                client,
                &[],
                &[],
            ),
            (
                Leaf::Admin,
                "admin-kubeconfig",
                "admin",
                Some("system:masters"),
                client,
                &[],
                &[],
            ),
        ];
        assert_eq!(table.map(|row| row.0), Leaf::ALL);
        for (leaf, secret, common_name, organization, usages, dns, ips) in table {
            assert_eq!(leaf.secret_name(), secret);
            let found = request(leaf, &tenant()).unwrap();
            assert_eq!(found.common_name, common_name, "{leaf}");
            assert_eq!(found.organization.as_deref(), organization, "{leaf}");
            assert_eq!(found.usages, usages, "{leaf}");
            assert_eq!(found.dns_names, dns, "{leaf}");
            assert_eq!(
                found
                    .ip_addresses
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>(),
                ips,
                "{leaf}"
            );
        }
    }

    #[test]
    fn every_leaf_has_its_place_in_the_apply_order() {
        assert_eq!(SECRETS_IN_APPLY_ORDER[1..6], Leaf::ALL.map(Leaf::secret_name));
        assert!(
            Leaf::ALL
                .iter()
                .all(|leaf| leaf.in_kubeconfig() == leaf.secret_name().ends_with("kubeconfig"))
        );
    }

    #[test]
    fn what_is_absent_adds_nothing() {
        let mut names = tenant();
        names.api_server_ip = None;
        names.external_domain = Some(String::new());
        names.cluster_domain = String::new();
        let found = request(Leaf::ApiServer, &names).unwrap();
        assert!(found.ip_addresses.is_empty());
        assert_eq!(found.dns_names.len(), 6);
        assert_eq!(found.dns_names[3], "kubernetes.default.svc.cluster.local");
        names.external_domain = None;
        assert_eq!(request(Leaf::ApiServer, &names).unwrap(), found);
        names.etcd = None;
        assert!(matches!(
            request(Leaf::Etcd, &names),
            Err(PkiError::EtcdNamesMissing)
        ));
    }

    #[test]
    fn repetitions_are_dropped_and_addresses_are_addresses() {
        let mut names = tenant();
        names.virtual_cluster = "kubernetes".into();
        names.external_domain = Some("10.96.29.243".into());
        let found = request(Leaf::ApiServer, &names).unwrap();
        assert_eq!(found.dns_names.len(), 5);
        assert_eq!(found.ip_addresses.len(), 1);
        names.external_domain = Some("192.0.2.1".into());
        assert_eq!(request(Leaf::ApiServer, &names).unwrap().ip_addresses.len(), 2);
    }

    #[test]
    fn names_no_certificate_can_carry_are_refused() {
        let long = "a".repeat(64);
        for bad in [
            "",
            "a..b",
            ".a",
            "a.",
            "-a",
            "a-",
            "a b",
            "*.example.com",
            "ü.example",
            &long,
        ] {
            let mut names = tenant();
            names.virtual_cluster = bad.into();
            let error = request(Leaf::ApiServer, &names).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains(&format!("{bad:?} (VirtualCluster name)")),
                "{error}"
            );
        }
        let mut names = tenant();
        names.cluster_domain = ["a".repeat(60).as_str(); 4].join(".");
        let error = request(Leaf::ApiServer, &names).unwrap_err().to_string();
        assert!(error.contains("longer than 253"), "{error}");
        let mut names = tenant();
        names.cluster_key = long.clone();
        assert!(matches!(
            request(Leaf::ApiServer, &names),
            Err(PkiError::InvalidName {
                role: "root namespace",
                ..
            })
        ));
        let mut names = tenant();
        names.external_domain = Some("my_cluster.Example.com".into());
        request(Leaf::ApiServer, &names).unwrap();
        let mut names = tenant();
        names.etcd = Some(EtcdNames {
            statefulset: "etcd".into(),
            service: "etcd".into(),
            replicas: u32::MAX,
        });
        assert!(matches!(
            request(Leaf::Etcd, &names),
            Err(PkiError::TooManyEtcdReplicas { .. })
        ));
    }
}
