//! A public half and its private key, as a `kubernetes.io/tls` Secret holds them.

use std::collections::BTreeMap;
use std::fmt;

use zeroize::Zeroizing;

use super::error::PkiError;

/// Data key of the public half in a `kubernetes.io/tls` Secret.
pub const TLS_CERTIFICATE_KEY: &str = "tls.crt";
/// Data key of the private key in a `kubernetes.io/tls` Secret.
pub const TLS_PRIVATE_KEY_KEY: &str = "tls.key";

/// A certificate and its private key, both PEM. In the service-account pair the public half is a `PUBLIC KEY` block.
///
/// Holding one proves nothing: use [`Authority::load`](super::Authority::load),
/// [`CertificateInfo::matches_key`](super::CertificateInfo::matches_key) or
/// [`service_account::check`](super::service_account::check).
#[derive(Clone, PartialEq, Eq)]
pub struct CertifiedPair {
    /// The public half: a certificate, or a public key for service accounts.
    pub certificate_pem: String,
    /// The private key; wiped on drop.
    pub key_pem: Zeroizing<String>,
}

impl CertifiedPair {
    /// Reads the pair from the data of the Secret called `secret_name` (which only serves messages).
    pub fn from_tls_data(secret_name: &str, data: &BTreeMap<String, Vec<u8>>) -> Result<Self, PkiError> {
        let text = |key: &str| {
            data.get(key)
                .and_then(|bytes| std::str::from_utf8(bytes).ok())
                .ok_or_else(|| PkiError::SecretData {
                    secret: secret_name.to_owned(),
                    key: key.to_owned(),
                })
        };
        Ok(Self {
            certificate_pem: text(TLS_CERTIFICATE_KEY)?.to_owned(),
            key_pem: Zeroizing::new(text(TLS_PRIVATE_KEY_KEY)?.to_owned()),
        })
    }

    /// The data of the `kubernetes.io/tls` Secret that holds this pair.
    #[must_use]
    pub fn to_tls_data(&self) -> BTreeMap<String, Vec<u8>> {
        BTreeMap::from([
            (
                TLS_CERTIFICATE_KEY.to_owned(),
                self.certificate_pem.clone().into_bytes(),
            ),
            (TLS_PRIVATE_KEY_KEY.to_owned(), self.key_pem.as_bytes().to_vec()),
        ])
    }
}

impl fmt::Debug for CertifiedPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertifiedPair")
            .field("certificate_pem", &self.certificate_pem)
            .field("key_pem", &"[redacted]")
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> CertifiedPair {
        CertifiedPair {
            certificate_pem: "public".into(),
            key_pem: Zeroizing::new("private".into()),
        }
    }

    #[test]
    fn debug_shows_the_public_half_only() {
        let text = format!("{:?}", pair());
        assert!(text.contains("public") && !text.contains("private"), "{text}");
    }

    #[test]
    fn secret_data_round_trips_and_gaps_are_named() {
        let data = pair().to_tls_data();
        assert_eq!(CertifiedPair::from_tls_data("root-ca", &data).unwrap(), pair());
        for key in [TLS_CERTIFICATE_KEY, TLS_PRIVATE_KEY_KEY] {
            let mut less = data.clone();
            less.remove(key);
            let message = CertifiedPair::from_tls_data("root-ca", &less)
                .unwrap_err()
                .to_string();
            assert_eq!(
                message,
                format!("Secret root-ca has no text under the data key {key:?}")
            );
        }
    }
}
