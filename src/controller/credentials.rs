//! Whether the credentials of a tenant are what they must be: which leaves are to be issued anew and why, and whether
//! root CA and service-account key are still those that the tenant lives by. Pure.
//!
//! Leaves are this manager's to make: one that is missing, damaged, of another CA, for other names, or due, is issued
//! again. The other two are made once. Whatever is wrong with them is told, and nothing in the tenant is touched until
//! a person has put it right: a new root CA cuts off every client, a new service-account key every token.

use std::{collections::BTreeMap, fmt, net::IpAddr, time::Duration};

use k8s_openapi::{
    api::core::v1::Secret,
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt as _;

use super::{
    plan::{Goal, Observed, made_by},
    render::{self, TenantSecret, data_of},
};
use crate::{
    api::{labels, virtual_cluster::CertificatesStatus},
    pki::{
        self, Authority, CertificateInfo, CertifiedPair, EtcdNames, LeafRequest, PkiError, TenantNames,
        Validity, kubeconfig,
    },
};

/// Port in every kubeconfig, whatever the Service's port: the contract fixes it.
const KUBECONFIG_PORT: u16 = 6443;
/// How long before its end a root CA is told of: replacing one takes all clients of the tenant, and so time.
const ROOT_NOTICE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// A leaf that is to be shortened is not due for less than this part of the life it should have.
const WORTHWHILE: i32 = 10;

/// What certificates are judged by, besides what is stored.
#[derive(Clone, Copy, Debug)]
pub struct Judge<'a> {
    /// What was recorded of root CA and service-account key, if anything was.
    pub recorded: Option<&'a CertificatesStatus>,
    /// Whether the tenant is as the Go manager left it: then a leaf is good as long as it works.
    pub adopted: bool,
    /// Limit of the life of leaves (`--max-certificate-life`).
    pub max_life: Option<Duration>,
    /// The time.
    pub now: Timestamp,
}

/// Why a leaf is issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its Secret does not exist.
    Missing,
    /// This key of its Secret cannot be used; what is wrong with it.
    Damaged(&'static str, String),
    /// The root CA did not sign it.
    OtherAuthority,
    /// It is made for other names or another address than the tenant has now.
    OtherNames,
    /// Two thirds of its life are over.
    Due,
}

impl Why {
    /// As the value of a metric's label.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Damaged(..) => "damaged",
            Self::OtherAuthority => "other_authority",
            Self::OtherNames => "other_names",
            Self::Due => "due",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("it does not exist"),
            Self::Damaged(key, problem) => write!(f, "its key {key} cannot be used: {problem}"),
            Self::OtherAuthority => f.write_str("it is not signed by the tenant's root CA"),
            Self::OtherNames => f.write_str("the names or addresses of the tenant are others now"),
            Self::Due => f.write_str("two thirds of its life are over"),
        }
    }
}

/// What is wrong with a credential that is made once: nothing is done for the tenant until a person acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// One word for the condition.
    pub reason: &'static str,
    /// Which key of which Secret, what is wrong, what to do.
    pub message: String,
}

/// The credentials of a tenant whose root CA and service-account key are in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Credentials {
    /// Leaves to issue now, in the order their Secrets are written.
    pub due: Vec<(TenantSecret, Why)>,
    /// What the status says of them.
    pub status: CertificatesStatus,
    /// Whether the root CA is in its last year.
    pub root_nears_its_end: bool,
    /// What the VirtualCluster asks for that no certificate can have; it is left out. In one word, in words.
    pub complaint: Option<(&'static str, String)>,
}

impl Credentials {
    /// The Secrets to write.
    #[must_use]
    pub fn due_secrets(&self) -> Vec<TenantSecret> {
        self.due.iter().map(|(secret, _)| *secret).collect()
    }
}

/// Judges the credentials of the tenant of `goal`, which is provisioned.
pub fn judge(goal: &Goal<'_>, observed: &Observed, judge: &Judge<'_>) -> Result<Credentials, Fault> {
    let root = root_ca(goal, observed, judge)?;
    let service_account_key_hash = service_account_key(goal, observed, judge)?;

    let mut leaves = Vec::new();
    for secret in TenantSecret::ALL {
        if secret.leaf().is_none() || (secret == TenantSecret::Etcd && goal.template.etcd.is_none()) {
            continue;
        }
        leaves.push((secret, leaf(goal, observed, secret, &root.authority, judge)));
    }
    for (secret, leaf) in &leaves {
        if let Some(why @ (Why::Damaged(..) | Why::OtherAuthority)) = &leaf.why
            && let Some(stored) = observed.secrets.get(secret.name())
            && !render::is_ours(&stored.metadata)
        {
            return Err(not_ours(goal, *secret, why, stored));
        }
    }
    // With a record, it is certain that the root CA is the one of before. Without one, leaves tell: if it signed none
    // of them, not they were swapped, but it was.
    let unknown = judge
        .recorded
        .and_then(|recorded| recorded.root_ca_hash.as_ref())
        .is_none();
    let readable = || {
        leaves
            .iter()
            .filter(|(_, leaf)| !matches!(leaf.why, Some(Why::Missing | Why::Damaged(..))))
    };
    if unknown && readable().count() > 0 && readable().all(|(_, leaf)| leaf.why == Some(Why::OtherAuthority))
    {
        return Err(replaced(
            goal,
            TenantSecret::RootCa,
            &root.hash,
            "did not sign any of the tenant's certificates",
        ));
    }

    let ends = |pick: fn(&Leaf) -> Option<Timestamp>| {
        leaves.iter().filter_map(|(_, leaf)| pick(leaf)).min().map(Time)
    };
    let not_after = root.authority.not_after();
    let status = CertificatesStatus {
        not_after: ends(|leaf| leaf.not_after),
        renew_at: ends(|leaf| leaf.renew_at),
        root_ca_not_after: Some(Time(not_after)),
        root_ca_hash: Some(root.hash),
        service_account_key_hash: Some(service_account_key_hash),
    };
    let due = leaves
        .into_iter()
        .filter_map(|(secret, leaf)| Some((secret, leaf.why?)));
    Ok(Credentials {
        due: due.collect(),
        status,
        root_nears_its_end: not_after.duration_since(judge.now) < ROOT_NOTICE,
        complaint: complaint(goal, observed),
    })
}

struct Root {
    authority: Authority,
    hash: String,
}

fn root_ca(goal: &Goal<'_>, observed: &Observed, judge: &Judge<'_>) -> Result<Root, Fault> {
    let which = TenantSecret::RootCa;
    let secret = once(goal, observed, which)?;
    let unusable = |error: PkiError| {
        let reason = match error {
            PkiError::Expired { .. } => "RootCAExpired",
            _ => "RootCAUnusable",
        };
        damaged(goal, which, reason, &error)
    };
    let data = data_of(secret);
    let pair = CertifiedPair::from_tls_data(which.name(), &data).map_err(unusable)?;
    let authority = Authority::load(&pair.certificate_pem, &pair.key_pem, judge.now).map_err(unusable)?;
    let hash = pki::hash::annotation_hash(which.name(), &data).map_err(unusable)?;
    let recorded = judge.recorded.and_then(|recorded| recorded.root_ca_hash.as_ref());
    if recorded.is_some_and(|recorded| *recorded != hash) {
        return Err(replaced(
            goal,
            which,
            &hash,
            "is not the root CA that this tenant was made with",
        ));
    }
    Ok(Root { authority, hash })
}

fn service_account_key(goal: &Goal<'_>, observed: &Observed, judge: &Judge<'_>) -> Result<String, Fault> {
    let which = TenantSecret::ServiceAccount;
    let secret = once(goal, observed, which)?;
    let unusable = |error: PkiError| damaged(goal, which, "ServiceAccountKeyUnusable", &error);
    let data = data_of(secret);
    let pair = CertifiedPair::from_tls_data(which.name(), &data).map_err(unusable)?;
    pki::service_account::check(&pair).map_err(unusable)?;
    let hash = pki::hash::annotation_hash(which.name(), &data).map_err(unusable)?;
    let recorded = judge
        .recorded
        .and_then(|recorded| recorded.service_account_key_hash.as_ref());
    if recorded.is_some_and(|recorded| *recorded != hash) {
        return Err(replaced(
            goal,
            which,
            &hash,
            "is not the key that this tenant was made with",
        ));
    }
    Ok(hash)
}

/// The Secret of a credential that is made once; to lose it is a fault.
fn once<'a>(goal: &Goal<'_>, observed: &'a Observed, which: TenantSecret) -> Result<&'a Secret, Fault> {
    observed.secrets.get(which.name()).ok_or_else(|| Fault {
        reason: match which {
            TenantSecret::RootCa => "RootCALost",
            _ => "ServiceAccountKeyLost",
        },
        message: lost(&goal.tenant.root_namespace, which),
    })
}

/// What is said when a credential that is made once is gone.
#[must_use]
pub fn lost(root_namespace: &str, which: TenantSecret) -> String {
    let cost = match which {
        TenantSecret::ServiceAccount => "a new key would end every ServiceAccount token",
        _ => "a new one would cut off every client of the tenant",
    };
    format!(
        "Secret {root_namespace}/{which} does not exist, and is not made anew: {cost}. Restore it from a backup (the \
         pods that still run have it mounted), or delete the VirtualCluster"
    )
}

fn damaged(goal: &Goal<'_>, which: TenantSecret, reason: &'static str, error: &PkiError) -> Fault {
    Fault {
        reason,
        message: format!(
            "Secret {}/{which}, key {}: {error}. Nothing is changed in this tenant until that is put right; the Secret is \
             never overwritten",
            goal.tenant.root_namespace,
            data_key(error)
        ),
    }
}

fn replaced(goal: &Goal<'_>, which: TenantSecret, hash: &str, what: &str) -> Fault {
    let (reason, field) = match which {
        TenantSecret::RootCa => ("RootCAReplaced", "rootCAHash"),
        _ => ("ServiceAccountKeyReplaced", "serviceAccountKeyHash"),
    };
    Fault {
        reason,
        message: format!(
            "Secret {}/{which}, key {}: what it holds {what}. Nothing is changed in this tenant until the right one is \
             restored; to accept this one, set status.certificates.{field} of the VirtualCluster to {hash}",
            goal.tenant.root_namespace,
            pki::TLS_CERTIFICATE_KEY
        ),
    }
}

/// A leaf that somebody else put there and that is of no use to the tenant: it is theirs.
fn not_ours(goal: &Goal<'_>, which: TenantSecret, why: &Why, stored: &Secret) -> Fault {
    Fault {
        reason: "SecretNotOurs",
        message: format!(
            "Secret {}/{which} was made by {} and cannot be used: {why}. It is left alone, and nothing is changed in this \
             tenant until it is deleted (it is issued anew then), or annotated with {} to give it to the tenant",
            goal.tenant.root_namespace,
            made_by(&stored.metadata),
            labels::ISSUED_FOR
        ),
    }
}

/// The key of a `kubernetes.io/tls` Secret that an error is about.
fn data_key(error: &PkiError) -> &'static str {
    match error {
        PkiError::SecretData { key, .. } if key == pki::TLS_PRIVATE_KEY_KEY => pki::TLS_PRIVATE_KEY_KEY,
        PkiError::Pem { what, .. } | PkiError::KeyUnreadable { what } if what.contains("private key") => {
            pki::TLS_PRIVATE_KEY_KEY
        }
        _ => pki::TLS_CERTIFICATE_KEY,
    }
}

/// A leaf as it is stored: why it is to be issued, if it is, and its times, if it can be read.
#[derive(Default)]
struct Leaf {
    why: Option<Why>,
    not_after: Option<Timestamp>,
    renew_at: Option<Timestamp>,
}

impl Leaf {
    fn because(why: Why) -> Self {
        Self {
            why: Some(why),
            ..Self::default()
        }
    }
}

fn leaf(
    goal: &Goal<'_>,
    observed: &Observed,
    which: TenantSecret,
    authority: &Authority,
    judge: &Judge<'_>,
) -> Leaf {
    let Some(secret) = observed.secrets.get(which.name()) else {
        return Leaf::because(Why::Missing);
    };
    let read = match read(which, &data_of(secret)) {
        Ok(read) => read,
        Err((key, problem)) => return Leaf::because(Why::Damaged(key, problem)),
    };
    let Stored {
        certificate,
        server,
        ca,
    } = read;
    let by_root =
        certificate.is_issued_by(authority) && ca.is_none_or(|ca| ca.der() == authority.certificate_der());
    let ours = is_issued_by_us(secret);
    // Leaves of the Go manager are dated back to the start of the root CA, and live for a year from their issue.
    let begin = if ours {
        certificate.not_before
    } else {
        certificate
            .not_before
            .max(minus(certificate.not_after, Validity::default().life()))
    };
    let two_thirds = renew_at(goal, begin, certificate.not_after, ours, judge);
    let renew_at = worth_renewing_at(two_thirds, goal, &certificate, authority, judge);
    let why = if !by_root {
        Some(Why::OtherAuthority)
    } else if renew_at.is_some_and(|at| judge.now >= at) {
        Some(Why::Due)
    } else if !judge.adopted && !fits(goal, observed, which, &certificate, server.as_deref()) {
        Some(Why::OtherNames)
    } else {
        None
    };
    Leaf {
        why,
        not_after: Some(certificate.not_after),
        renew_at,
    }
}

/// After two thirds of its life, spread over tenants; earlier if the tenant now wants shorter lives.
fn renew_at(goal: &Goal<'_>, begin: Timestamp, end: Timestamp, ours: bool, judge: &Judge<'_>) -> Timestamp {
    let seed = &goal.tenant.uid;
    let by_life = pki::renew_at_spread(begin, end, seed);
    if !ours {
        return by_life;
    }
    let wanted = life(goal, judge.max_life);
    let life = wanted.life() + wanted.dated_back();
    by_life.min(pki::renew_at_spread(
        begin,
        begin.checked_add(life).unwrap_or(end),
        seed,
    ))
}

/// The first time from `renew_at` on when a new leaf would be a better one: it would end later, or is to end noticeably
/// sooner. `None` if there is no such time, because a root CA near its end has nothing better to give. However short the
/// time that is gained, it is gained once: no leaf outlives the root CA.
fn worth_renewing_at(
    renew_at: Timestamp,
    goal: &Goal<'_>,
    certificate: &CertificateInfo,
    authority: &Authority,
    judge: &Judge<'_>,
) -> Option<Timestamp> {
    let life = life(goal, judge.max_life).life();
    let begin = renew_at.max(judge.now);
    let end = begin
        .checked_add(life)
        .unwrap_or(Timestamp::MAX)
        .min(authority.not_after());
    let gain = end.duration_since(certificate.not_after);
    if gain.is_positive() || gain < -(life / WORTHWHILE) {
        return Some(renew_at);
    }
    // Its life is about what it should be from now on, and one issued later would end later.
    (authority.not_after() > certificate.not_after)
        .then(|| minus(certificate.not_after, life - SignedDuration::from_secs(1)))
}

/// What the tenant asks of its certificates that cannot be.
fn complaint(goal: &Goal<'_>, observed: &Observed) -> Option<(&'static str, String)> {
    if let Err(error) = validity(goal, None) {
        let days = Validity::DEFAULT_DAYS;
        return Some((
            "InvalidExpireDays",
            format!("{error}; until it is put right, certificates are issued for {days} days"),
        ));
    }
    let error = pki::request(pki::Leaf::ApiServer, &names(goal, observed)).err()?;
    Some((
        "InvalidName",
        format!("{error}; until it is put right, certificates are issued without it"),
    ))
}

/// Life of the leaves of this tenant; the default where what it asks for cannot be.
#[must_use]
pub fn life(goal: &Goal<'_>, max_life: Option<Duration>) -> Validity {
    validity(goal, max_life).unwrap_or_else(|_| Validity::default().at_most(max_life))
}

/// Life of the leaves of this tenant.
pub fn validity(goal: &Goal<'_>, max_life: Option<Duration>) -> Result<Validity, PkiError> {
    Validity::from_expire_days(goal.tenant.pki_expire_days).map(|validity| validity.at_most(max_life))
}

fn minus(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.checked_sub(by).unwrap_or(Timestamp::MIN)
}

/// Whether a leaf is for the names that the tenant has now.
fn fits(
    goal: &Goal<'_>,
    observed: &Observed,
    which: TenantSecret,
    certificate: &CertificateInfo,
    server: Option<&str>,
) -> bool {
    // Until the apiserver's Service is there again, its address is not known, and says nothing.
    if goal.template.has_cluster_ip_service() && cluster_ip(goal, observed).is_none() {
        return true;
    }
    // Names that no certificate can have are told when one is issued.
    request(goal, observed, which).is_none_or(|request| certificate.satisfies(&request))
        && server.is_none_or(|server| server == server_of(goal, observed))
}

fn request(goal: &Goal<'_>, observed: &Observed, which: TenantSecret) -> Option<LeafRequest> {
    pki::request(which.leaf()?, &names(goal, observed)).ok()
}

/// A leaf's certificate, and what the kubeconfig round it says.
struct Stored {
    certificate: CertificateInfo,
    server: Option<String>,
    ca: Option<CertificateInfo>,
}

/// Reads a leaf; the data key that cannot be used, and what is wrong with it.
fn read(which: TenantSecret, data: &BTreeMap<String, Vec<u8>>) -> Result<Stored, (&'static str, String)> {
    let (pair, server, ca) = if which.is_kubeconfig() {
        let key = which.name();
        let text = data.get(key).and_then(|bytes| std::str::from_utf8(bytes).ok());
        let text = text.ok_or_else(|| (key, "there is no text in it".to_owned()))?;
        let parsed = kubeconfig::parse(text).map_err(|error| (key, error.to_string()))?;
        let ca = CertificateInfo::parse(&parsed.ca_pem).map_err(|error| (key, error.to_string()))?;
        (parsed.client, Some(parsed.server), Some(ca))
    } else {
        let pair = CertifiedPair::from_tls_data(which.name(), data)
            .map_err(|error| (data_key(&error), "there is no text in it".to_owned()))?;
        (pair, None, None)
    };
    let (certificate_key, private_key) = if which.is_kubeconfig() {
        (which.name(), which.name())
    } else {
        (pki::TLS_CERTIFICATE_KEY, pki::TLS_PRIVATE_KEY_KEY)
    };
    let certificate = CertificateInfo::parse(&pair.certificate_pem)
        .map_err(|error| (certificate_key, error.to_string()))?;
    if !certificate.matches_key(&pair.key_pem) {
        return Err((
            private_key,
            "it is not the private key of the certificate".to_owned(),
        ));
    }
    Ok(Stored {
        certificate,
        server,
        ca,
    })
}

/// Whether this manager issued what a Secret holds.
#[must_use]
pub fn is_issued_by_us(secret: &Secret) -> bool {
    secret.annotations().contains_key(labels::ISSUED_FOR)
}

/// The certificate of a leaf that is stored as a pair, if it can be read.
#[must_use]
pub fn certificate_of(secret: &Secret) -> Option<CertificateInfo> {
    let pem = data_of(secret).remove(pki::TLS_CERTIFICATE_KEY)?;
    CertificateInfo::parse(std::str::from_utf8(&pem).ok()?).ok()
}

/// The names that the certificates of the tenant of `goal` are made for.
#[must_use]
pub fn names(goal: &Goal<'_>, observed: &Observed) -> TenantNames {
    let template = goal.template;
    TenantNames {
        cluster_key: goal.tenant.root_namespace.clone(),
        cluster_domain: goal.tenant.cluster_domain.clone(),
        virtual_cluster: goal.tenant.name.clone(),
        api_server_service: template.api_server_service.clone(),
        api_server_ip: cluster_ip(goal, observed),
        external_domain: goal.tenant.external_domain.clone(),
        etcd: template
            .etcd
            .as_ref()
            .zip(template.etcd_service.as_ref())
            .map(|(etcd, service)| EtcdNames {
                statefulset: etcd.stateful_set_name.clone(),
                service: service.clone(),
                replicas: etcd.replicas,
            }),
    }
}

/// The apiserver's address, if its Service is of type ClusterIP: it is then named in certificate and kubeconfigs.
#[must_use]
pub fn cluster_ip(goal: &Goal<'_>, observed: &Observed) -> Option<IpAddr> {
    if !goal.template.has_cluster_ip_service() {
        return None;
    }
    let service = observed.services.get(&goal.template.api_server_service)?;
    service.spec.as_ref()?.cluster_ip.as_deref()?.parse().ok()
}

/// URL of the tenant's API inside the super cluster, as kubeconfigs and the status name it.
#[must_use]
pub fn server_of(goal: &Goal<'_>, observed: &Observed) -> String {
    let host = cluster_ip(goal, observed).map_or_else(
        || {
            format!(
                "{}.{}",
                goal.template.api_server_service, goal.tenant.root_namespace
            )
        },
        |ip| ip.to_string(),
    );
    kubeconfig::server_url(&host, KUBECONFIG_PORT)
}
