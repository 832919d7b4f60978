//! The serving certificate, which may change while connections are open.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use prometheus::IntGaugeVec;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::metrics::NO_LABELS;
use crate::pki::CertificateInfo;

/// The name of HTTP/2 in protocol negotiation.
pub(crate) const ALPN_HTTP2: &[u8] = b"h2";

/// Why a certificate cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The certificate file is no PEM.
    #[error("cannot read certificate chain")]
    Chain(#[source] rustls::pki_types::pem::Error),
    /// The certificate file has no certificate in it.
    #[error("no certificate found")]
    NoCertificate,
    /// The key file is no PEM, or has no private key in it.
    #[error("cannot read private key")]
    Key(#[source] rustls::pki_types::pem::Error),
    /// The key is of an unknown kind, or is not the certificate's.
    #[error("certificate and key cannot be used together")]
    Pair(#[source] rustls::Error),
}

/// Reads a certificate chain and its key from PEM, and checks that the key belongs to the first certificate.
pub fn certified_key(chain: &[u8], key: &[u8]) -> Result<CertifiedKey, CertificateError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<_, _>>()
        .map_err(CertificateError::Chain)?;
    if chain.is_empty() {
        return Err(CertificateError::NoCertificate);
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(CertificateError::Key)?;
    CertifiedKey::from_der(chain, key, &provider()).map_err(CertificateError::Pair)
}

/// A certificate that can be replaced. Open connections keep the one they began with. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ReloadableCertificate(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    current: ArcSwapOption<CertifiedKey>,
    /// Its end of life, as a metric.
    not_after: Option<IntGaugeVec>,
    changed: watch::Sender<()>,
}

impl ReloadableCertificate {
    /// One that shows its end of life, in seconds since 1970, in the only series of `not_after`.
    #[must_use]
    pub fn with_gauge(not_after: IntGaugeVec) -> Self {
        Self(Arc::new(Shared {
            not_after: Some(not_after),
            ..Shared::default()
        }))
    }

    /// Uses `key` for every handshake from now on.
    pub fn set(&self, key: CertifiedKey) {
        if let Some(gauge) = &self.0.not_after
            && let Some(end_entity) = key.cert.first()
            && let Ok(info) = CertificateInfo::from_der(end_entity.to_vec())
        {
            gauge.with_label_values(NO_LABELS).set(info.not_after.as_second());
        }
        self.0.current.store(Some(Arc::new(key)));
        self.0.changed.send_replace(());
    }

    /// The one in use.
    #[must_use]
    pub fn current(&self) -> Option<Arc<CertifiedKey>> {
        self.0.current.load_full()
    }

    /// Is told of each replacement from now on.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// The configuration of a TLS server that presents this certificate, whatever name the client asks for: the API
    /// server calls webhooks by address as well.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(self.clone()));
        config.alpn_protocols = vec![ALPN_HTTP2.to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for ReloadableCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current()
    }
}

/// The one cryptographic provider of this program.
pub(super) fn provider() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}
