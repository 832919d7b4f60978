//! The serving certificate, which may change while connections are open.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

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

/// A certificate that can be replaced. Open connections keep the one they began with.
#[derive(Clone, Debug, Default)]
pub struct ReloadableCertificate(Arc<ArcSwapOption<CertifiedKey>>);

impl ReloadableCertificate {
    /// Uses `key` for every handshake from now on.
    pub fn set(&self, key: CertifiedKey) {
        self.0.store(Some(Arc::new(key)));
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
        self.0.load_full()
    }
}

/// The one cryptographic provider of this program.
fn provider() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}
