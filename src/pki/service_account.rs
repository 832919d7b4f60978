//! The key pair that signs a tenant's `ServiceAccount` tokens.
//!
//! Made once per tenant and kept: a new one invalidates every token issued before, in pods and outside.

use rcgen::{KeyPair, PKCS_RSA_SHA256, PublicKeyData};
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::encoding;
use super::error::PkiError;
use super::pair::CertifiedPair;

const PUBLIC: &str = "service-account public key";
const PRIVATE: &str = "service-account private key";

/// Makes an RSA-2048 pair: `PUBLIC KEY` (PKIX) and `RSA PRIVATE KEY` (PKCS#1) blocks.
///
/// CPU heavy: call it in `spawn_blocking`.
pub fn generate() -> Result<CertifiedPair, PkiError> {
    let key = Zeroizing::new(KeyPair::generate_for(&PKCS_RSA_SHA256).map_err(PkiError::Generate)?);
    Ok(CertifiedPair {
        certificate_pem: encoding::block(encoding::PUBLIC_KEY, &key.subject_public_key_info()),
        key_pem: encoding::private_key_pem(&key)?,
    })
}

/// Checks that both halves can be read and belong together.
pub fn check(pair: &CertifiedPair) -> Result<(), PkiError> {
    let public = encoding::first_block(&pair.certificate_pem, encoding::PUBLIC_KEY, PUBLIC)?;
    let unreadable = PkiError::PublicKeyUnreadable { what: PUBLIC };
    let Ok((rest, public)) = SubjectPublicKeyInfo::from_der(&public) else {
        return Err(unreadable);
    };
    if !rest.is_empty() {
        return Err(unreadable);
    }
    let private = encoding::private_key(&pair.key_pem, PRIVATE)?;
    if *public.subject_public_key.data != *private.der_bytes() {
        return Err(PkiError::KeyMismatch { what: PUBLIC });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_pair_belongs_together_and_a_mixed_one_does_not() {
        let (one, two) = (generate().unwrap(), generate().unwrap());
        check(&one).unwrap();
        assert!(one.certificate_pem.starts_with("-----BEGIN PUBLIC KEY-----\n"));
        assert!(one.key_pem.starts_with("-----BEGIN RSA PRIVATE KEY-----\n"));
        let mixed = CertifiedPair {
            key_pem: two.key_pem,
            ..one.clone()
        };
        assert!(matches!(check(&mixed), Err(PkiError::KeyMismatch { .. })));
        let swapped = CertifiedPair {
            certificate_pem: one.key_pem.to_string(),
            key_pem: one.key_pem.clone(),
        };
        assert!(matches!(check(&swapped), Err(PkiError::Pem { .. })));
        let broken = CertifiedPair {
            certificate_pem: encoding::block("PUBLIC KEY", &[0x30, 0]),
            ..one
        };
        assert!(matches!(
            check(&broken),
            Err(PkiError::PublicKeyUnreadable { .. })
        ));
    }
}
