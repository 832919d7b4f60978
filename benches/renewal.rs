//! What it costs to renew the certificates of a thousand tenants, in seconds of CPU on one core: `cargo bench --bench
//! renewal`. Prints a table, and whether the goal is kept.
//!
//! The whole is measured as the manager does it: the root CA is loaded for each tenant, five leaves are issued, two of
//! them are put into kubeconfigs, and all into Secrets. Then the steps that could matter are measured on their own; what
//! remains is spent on names and encodings.

#![allow(
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "it prints, and may fail loudly"
)]

use std::{collections::BTreeMap, fs, hint::black_box};

use k8s_openapi::{api::core::v1::Secret, jiff::Timestamp};
use rcgen::{CertificateParams, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256};
use vc_manager::{
    api::template::Template,
    controller::{
        credentials::{Judge, judge},
        plan::{Goal, Observed},
        render::{self, Tenant, TenantSecret},
    },
    pki::{
        Authority, CertificateInfo, CertifiedPair, EtcdNames, KeyAlgorithm, TenantNames, Validity,
        kubeconfig, request, service_account,
    },
};

/// Tenants whose leaves are renewed.
const TENANTS: u32 = 1000;
/// To make a root CA takes longer than all the rest: these are taken in turn.
const ROOTS: usize = 20;
/// Tenants that RSA keys are made for; the figure is multiplied.
const RSA_TENANTS: u32 = 20;
/// Leaves of a tenant.
const LEAVES: u32 = 5;
/// What a thousand tenants may cost with the default key algorithm.
const GOAL: f64 = 2.0;

fn main() {
    let now = Timestamp::now();
    let roots: Vec<_> = (0..ROOTS)
        .map(|_| Authority::create(now).expect("a root CA").1)
        .collect();
    let in_turn = |count: u32| (0..count).zip(roots.iter().cycle()).map(|(_, root)| root);

    println!("{TENANTS} tenants with {LEAVES} leaves each, seconds of CPU");
    let took = cpu(|| {
        in_turn(TENANTS).for_each(|root| renew(root, KeyAlgorithm::EcdsaP256, now));
    });
    row("ecdsa-p256: renewed", took);

    let load =
        |root: &CertifiedPair| Authority::load(&root.certificate_pem, &root.key_pem, now).expect("a root CA");
    row(
        "  root CA loaded",
        cpu(|| in_turn(TENANTS).for_each(|root| drop(black_box(load(root))))),
    );
    row(
        "  keys made",
        generated(&PKCS_ECDSA_P256_SHA256, TENANTS * LEAVES),
    );
    row("  RSA-2048 signatures", signed(&roots[0], TENANTS * LEAVES));
    let authority = load(&roots[0]);
    let leaf = issue(&authority, TenantSecret::ApiServer, KeyAlgorithm::EcdsaP256, now);
    let check = || {
        let info = CertificateInfo::parse(&leaf.certificate_pem).expect("a certificate");
        assert!(info.is_issued_by(&authority));
    };
    row("  leaves checked", cpu(|| repeat(TENANTS * LEAVES, check)));
    let config = || {
        let server = "https://10.96.0.1:6443";
        let text = kubeconfig::render("tenant", server, &roots[0].certificate_pem, "admin", &leaf);
        drop(black_box(text.expect("a kubeconfig")));
    };
    row("  kubeconfigs written", cpu(|| repeat(TENANTS * 2, config)));
    let verdict = if took <= GOAL { "kept" } else { "MISSED" };
    println!("goal of {GOAL} s: {verdict}\n");

    let factor = f64::from(TENANTS) / f64::from(RSA_TENANTS);
    let rsa = cpu(|| {
        in_turn(RSA_TENANTS).for_each(|root| renew(root, KeyAlgorithm::Rsa2048, now));
    });
    row(
        &format!("rsa-2048: renewed (of {RSA_TENANTS} tenants)"),
        rsa * factor,
    );
    row(
        "  keys made",
        generated(&PKCS_RSA_SHA256, RSA_TENANTS * LEAVES) * factor,
    );

    // Not part of a renewal, but of every look at a tenant.
    let looks: Vec<_> = roots.iter().map(|root| Look::at(root, now)).collect();
    let took = cpu(|| {
        (0..TENANTS)
            .zip(looks.iter().cycle())
            .for_each(|(_, look)| look.judge(now));
    });
    println!();
    row("judged, nothing being due", took);
}

/// Renews the leaves of a tenant with this root CA as the manager does.
fn renew(root: &CertifiedPair, algorithm: KeyAlgorithm, now: Timestamp) {
    let authority = Authority::load(&root.certificate_pem, &root.key_pem, now).expect("a root CA");
    for which in TenantSecret::ALL {
        if which.leaf().is_some() {
            black_box(secret(root, &authority, which, algorithm, now));
        }
    }
}

fn secret(
    root: &CertifiedPair,
    authority: &Authority,
    which: TenantSecret,
    algorithm: KeyAlgorithm,
    now: Timestamp,
) -> serde_json::Value {
    let pair = issue(authority, which, algorithm, now);
    let issued_for = Some("renewal@2026-01-01T00:00:00Z");
    if which.is_kubeconfig() {
        let server = "https://10.96.0.1:6443";
        let text =
            kubeconfig::render("name", server, &root.certificate_pem, "admin", &pair).expect("a kubeconfig");
        let data = BTreeMap::from([(which.name(), text.as_str())]);
        return render::secret(which, &tenant(), &data, issued_for);
    }
    render::secret(which, &tenant(), &data_of(&pair), issued_for)
}

fn data_of(pair: &CertifiedPair) -> BTreeMap<&str, &str> {
    BTreeMap::from([
        ("tls.crt", pair.certificate_pem.as_str()),
        ("tls.key", pair.key_pem.as_str()),
    ])
}

fn issue(
    authority: &Authority,
    which: TenantSecret,
    algorithm: KeyAlgorithm,
    now: Timestamp,
) -> CertifiedPair {
    let request = request(which.leaf().expect("a leaf"), &names()).expect("names of certificates");
    authority
        .issue(&request, algorithm, Validity::default(), now)
        .expect("a leaf")
}

/// Keys made, by the library that the leaves' are made with.
fn generated(algorithm: &'static rcgen::SignatureAlgorithm, count: u32) -> f64 {
    cpu(|| {
        repeat(count, || {
            drop(black_box(KeyPair::generate_for(algorithm).expect("a key")));
        });
    })
}

/// Certificates signed with the root CA's key, and nothing else.
fn signed(root: &CertifiedPair, count: u32) -> f64 {
    let der = pem::parse(root.key_pem.as_str()).expect("PEM").into_contents();
    let key = KeyPair::try_from(der).expect("a key");
    let issuer = Issuer::from_ca_cert_pem(&root.certificate_pem, &key).expect("a CA");
    let leaf = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    let params = CertificateParams::default();
    cpu(|| {
        repeat(count, || {
            drop(black_box(
                params.signed_by(&leaf, &issuer).expect("a certificate"),
            ));
        });
    })
}

/// A tenant as it is looked at.
struct Look {
    tenant: Tenant,
    template: Template,
    observed: Observed,
}

impl Look {
    fn at(root: &CertifiedPair, now: Timestamp) -> Self {
        let authority = Authority::load(&root.certificate_pem, &root.key_pem, now).expect("a root CA");
        let accounts = service_account::generate().expect("a key");
        let mut observed = Observed::default();
        let service = serde_json::json!({"spec": {"clusterIP": "10.96.0.1"}});
        let service = serde_json::from_value(service).expect("a Service");
        observed.services.insert("apiserver-svc".into(), service);
        for which in TenantSecret::ALL {
            let value = match which {
                TenantSecret::RootCa => render::secret(which, &tenant(), &data_of(root), None),
                TenantSecret::ServiceAccount => render::secret(which, &tenant(), &data_of(&accounts), None),
                leaf => secret(root, &authority, leaf, KeyAlgorithm::EcdsaP256, now),
            };
            let secret: Secret = serde_json::from_value(value).expect("a Secret");
            observed.secrets.insert(which.name().into(), secret);
        }
        let content = serde_saphyr::from_str(include_str!("../tests/fixtures/template.yaml")).expect("YAML");
        Self {
            tenant: tenant(),
            template: Template::parse(&content).expect("a template"),
            observed,
        }
    }

    fn judge(&self, now: Timestamp) {
        let goal = Goal {
            tenant: &self.tenant,
            template: &self.template,
            revision: "r1",
            super_cluster_labelling: false,
        };
        let by = Judge {
            recorded: None,
            adopted: true,
            max_life: None,
            now,
        };
        let credentials = judge(&goal, &self.observed, &by).expect("nothing is wrong");
        assert!(credentials.due.is_empty(), "{:?}", credentials.due);
    }
}

fn tenant() -> Tenant {
    Tenant {
        name: "name".into(),
        namespace: "ns".into(),
        uid: "d64ea0c0-91f8-46f5-8643-c0cab32ab0cd".into(),
        root_namespace: "ns-fd1b34-name".into(),
        cluster_domain: "cluster.local".into(),
        external_domain: None,
        pki_expire_days: None,
    }
}

fn names() -> TenantNames {
    TenantNames {
        cluster_key: "ns-fd1b34-name".into(),
        cluster_domain: "cluster.local".into(),
        virtual_cluster: "name".into(),
        api_server_service: "apiserver-svc".into(),
        api_server_ip: Some("10.96.0.1".parse().expect("an address")),
        external_domain: None,
        etcd: Some(EtcdNames {
            statefulset: "etcd".into(),
            service: "etcd".into(),
            replicas: 3,
        }),
    }
}

fn repeat(count: u32, mut work: impl FnMut()) {
    (0..count).for_each(|_| work());
}

/// Seconds of CPU that this thread spends on `work`. Wall-clock time would be that of the machine's other work, too.
fn cpu(work: impl FnOnce()) -> f64 {
    let spent = || {
        let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux with schedstat");
        let nanoseconds: u64 = text
            .split(' ')
            .next()
            .and_then(|first| first.parse().ok())
            .expect("nanoseconds");
        std::time::Duration::from_nanos(nanoseconds)
    };
    let before = spent();
    work();
    spent().saturating_sub(before).as_secs_f64()
}

fn row(what: &str, seconds: f64) {
    println!("{what:<40} {seconds:>8.3}");
}
