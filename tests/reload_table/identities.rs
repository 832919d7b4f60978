//! The two authorities of the test, what they issue, and TLS with it.

use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs::default_provider},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
};
use vc_manager::pki::{Authority, CertifiedPair, ExtendedUsage, KeyAlgorithm, LeafRequest};

/// An authority and its pair.
pub(crate) struct Ca {
    authority: Authority,
    pub(crate) pair: CertifiedPair,
}

impl Ca {
    pub(crate) fn make() -> Self {
        let (authority, pair) = Authority::create(Timestamp::now()).unwrap();
        Self { authority, pair }
    }

    /// A leaf for both ends of a connection on loopback.
    pub(crate) fn leaf(&self, common_name: &str, organization: Option<&str>) -> CertifiedPair {
        let request = LeafRequest {
            common_name: common_name.to_owned(),
            organization: organization.map(str::to_owned),
            usages: &[ExtendedUsage::ServerAuth, ExtendedUsage::ClientAuth],
            dns_names: Vec::new(),
            ip_addresses: vec!["127.0.0.1".parse().unwrap()],
        };
        let now = Timestamp::now();
        self.authority
            .issue_between(
                &request,
                KeyAlgorithm::EcdsaP256,
                now - SignedDuration::from_hours(1),
                now + SignedDuration::from_hours(1),
                now,
            )
            .unwrap()
    }

    /// Whether it signed the first certificate of `pem`.
    pub(crate) fn signed(&self, pem: &str) -> bool {
        vc_manager::pki::CertificateInfo::parse(pem)
            .unwrap()
            .is_issued_by(&self.authority)
    }
}

/// DER of the first certificate in `pem`.
pub(crate) fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn key(pair: &CertifiedPair) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(pair.key_pem.as_bytes()).unwrap()
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(default_provider())
}

fn roots(ca: &Ca) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(der(&ca.pair.certificate_pem)).unwrap();
    roots
}

/// A client that trusts `ca`. Every connection is a handshake of its own: a resumed one would show nothing.
pub(crate) fn client(ca: &Ca, identity: Option<&CertifiedPair>, alpn: Option<&str>) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(ca));
    let mut config = match identity {
        Some(pair) => builder
            .with_client_auth_cert(vec![der(&pair.certificate_pem)], key(pair))
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    config.alpn_protocols = alpn.map(|name| name.as_bytes().to_vec()).into_iter().collect();
    Arc::new(config)
}

/// A server that asks for a certificate of `ca`, and takes clients without one, too.
pub(crate) fn server(ca: &Ca, pair: &CertifiedPair, alpn: &str) -> Arc<ServerConfig> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)), provider())
        .allow_unauthenticated()
        .build()
        .unwrap();
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![der(&pair.certificate_pem)], key(pair))
        .unwrap();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    Arc::new(config)
}
