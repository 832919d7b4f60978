//! What the unit tests of this module share.

use std::sync::OnceLock;

use k8s_openapi::jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use super::{Authority, CertifiedPair, EtcdNames, TenantNames};

/// 2026-12-01T00:00:00Z, in seconds.
pub(crate) const NOW: i64 = 1_796_083_200;

/// [`NOW`] as a timestamp.
pub(crate) fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

/// One root CA made at [`NOW`] for all tests, since RSA keys are slow to make.
pub(crate) fn authority() -> (Authority, CertifiedPair) {
    static PAIR: OnceLock<CertifiedPair> = OnceLock::new();
    let pair = PAIR.get_or_init(|| Authority::create(now()).unwrap().1).clone();
    (
        Authority::load(&pair.certificate_pem, &pair.key_pem, now()).unwrap(),
        pair,
    )
}

/// A self-signed P-256 CA with one thing changed; certificate and key as PEM.
pub(crate) fn self_signed(change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    change(&mut params);
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// A tenant with everything set.
pub(crate) fn tenant() -> TenantNames {
    TenantNames {
        cluster_key: "ns-fd1b34-name".into(),
        cluster_domain: "cluster.local".into(),
        virtual_cluster: "name".into(),
        api_server_service: "apiserver-svc".into(),
        api_server_ip: Some("10.96.29.243".parse().unwrap()),
        external_domain: Some("name.example.com".into()),
        etcd: Some(EtcdNames {
            statefulset: "etcd".into(),
            service: "etcd".into(),
            replicas: 2,
        }),
    }
}
