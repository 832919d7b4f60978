//! PEM in and out, and the key formats behind it.

use pkcs8::PrivateKeyInfoRef;
use rcgen::{KeyPair, PKCS_RSA_SHA256};
use zeroize::Zeroizing;

use super::error::PkiError;

/// PEM block type of a certificate.
pub(super) const CERTIFICATE: &str = "CERTIFICATE";
/// PEM block type of a PKIX public key.
pub(super) const PUBLIC_KEY: &str = "PUBLIC KEY";
/// PEM block type of a PKCS#1 key, the only one Go's controller reads back.
const RSA_PRIVATE_KEY: &str = "RSA PRIVATE KEY";
/// PEM block type of a PKCS#8 key.
const PRIVATE_KEY: &str = "PRIVATE KEY";

/// The bytes of the first block of type `label`.
pub(super) fn first_block(text: &str, label: &'static str, what: &'static str) -> Result<Vec<u8>, PkiError> {
    let missing = PkiError::Pem {
        what,
        expected: label,
    };
    let Ok(blocks) = pem::parse_many(text) else {
        return Err(missing);
    };
    blocks
        .into_iter()
        .find(|block| block.tag() == label)
        .map(pem::Pem::into_contents)
        .ok_or(missing)
}

/// Reads a private key: PKCS#1, PKCS#8 or SEC1, which the block's content tells apart. Blocks before it, such as
/// OpenSSL's `EC PARAMETERS`, are skipped.
pub(super) fn private_key(text: &str, what: &'static str) -> Result<Zeroizing<KeyPair>, PkiError> {
    let missing = PkiError::Pem {
        what,
        expected: PRIVATE_KEY,
    };
    let Ok(blocks) = pem::parse_many(text) else {
        return Err(missing);
    };
    let mut key = None;
    for block in blocks {
        let is_key = block.tag().ends_with(PRIVATE_KEY);
        let contents = Zeroizing::new(block.into_contents());
        if is_key && key.is_none() {
            key = Some(contents);
        }
    }
    let key = key.ok_or(missing)?;
    KeyPair::try_from(key.as_slice())
        .map(Zeroizing::new)
        .map_err(|_| PkiError::KeyUnreadable { what })
}

/// Writes a private key: RSA as PKCS#1 (`RSA PRIVATE KEY`), others as PKCS#8 (`PRIVATE KEY`).
///
/// `key` must be one generated here: rcgen holds those as PKCS#8.
pub(super) fn private_key_pem(key: &KeyPair) -> Result<Zeroizing<String>, PkiError> {
    let der = key.serialized_der();
    if key.algorithm() != &PKCS_RSA_SHA256 {
        return Ok(secret_block(PRIVATE_KEY, der));
    }
    let info = PrivateKeyInfoRef::try_from(der).map_err(|_| PkiError::Encode)?;
    Ok(secret_block(RSA_PRIVATE_KEY, info.private_key.as_bytes()))
}

/// A PEM block with the line ends every reader takes.
pub(super) fn block(label: &str, der: &[u8]) -> String {
    encode(&pem::Pem::new(label, der))
}

fn secret_block(label: &str, der: &[u8]) -> Zeroizing<String> {
    let block = pem::Pem::new(label, der);
    let text = Zeroizing::new(encode(&block));
    drop(Zeroizing::new(block.into_contents()));
    text
}

fn encode(block: &pem::Pem) -> String {
    pem::encode_config(
        block,
        pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rsa_keys_are_written_as_pkcs1_and_read_back() {
        let key = KeyPair::generate_for(&PKCS_RSA_SHA256).unwrap();
        let text = private_key_pem(&key).unwrap();
        assert!(
            text.starts_with("-----BEGIN RSA PRIVATE KEY-----\nMII"),
            "{}",
            &text[..40]
        );
        assert!(!text.contains('\r'));
        assert_eq!(
            private_key(&text, "key").unwrap().public_key_raw(),
            key.public_key_raw()
        );
    }

    #[test]
    fn ec_keys_are_written_as_pkcs8_and_read_back_after_other_blocks() {
        let key = KeyPair::generate().unwrap();
        let text = private_key_pem(&key).unwrap();
        assert!(text.starts_with("-----BEGIN PRIVATE KEY-----\n"));
        let with_parameters = format!("{}{}", block("EC PARAMETERS", &[6, 1, 0]), *text);
        assert_eq!(
            private_key(&with_parameters, "key").unwrap().public_key_raw(),
            key.public_key_raw()
        );
    }

    #[test]
    fn what_is_no_key_is_refused_without_repeating_it() {
        for text in [
            "",
            "c2VjcmV0",
            "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
        ] {
            let error = format!("{:?}", private_key(text, "test key").unwrap_err());
            assert!(error.contains("test key") && !error.contains("c2Vj"), "{error}");
        }
        assert!(matches!(
            private_key(&block("ENCRYPTED PRIVATE KEY", &[0x30, 0]), "k"),
            Err(PkiError::KeyUnreadable { .. })
        ));
    }
}
