//! Hashes of Secrets for pod-template annotations (`<secret>-hash`): pods roll when, and only when, one changes.
//!
//! Values are 64 lower-case hex digits of SHA-256. How they are computed may never change: another value for the same
//! content would restart every tenant at the next manager update. Private bytes feed no published hash; a certificate
//! or public key identifies its pair as well.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::error::PkiError;
use super::hierarchy::Leaf;
use super::kubeconfig;
use super::pair::TLS_CERTIFICATE_KEY;
use crate::hex;

/// Hash of a whole map, keys and values. Each part is preceded by its length as eight big-endian bytes, so no two maps
/// share an encoding.
///
/// Don't publish the result for data that holds a private key: use [`annotation_hash`].
#[must_use]
pub fn content_hash(data: &BTreeMap<String, Vec<u8>>) -> String {
    let mut hasher = Sha256::new();
    let mut feed = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_be_bytes());
        hasher.update(bytes);
    };
    for (key, value) in data {
        feed(key.as_bytes());
        feed(value);
    }
    hex::encode(hasher.finalize())
}

/// Hash of a Secret's public content, the value of the annotation `<secret_name>-hash`.
///
/// - Kubeconfigs: server, CA and client certificate. The server counts without the brackets old ones have.
/// - Pairs (`root-ca`, `serviceaccount-rsa` and the rest): `tls.crt` alone.
pub fn annotation_hash(secret_name: &str, data: &BTreeMap<String, Vec<u8>>) -> Result<String, PkiError> {
    let missing = |key: &str| PkiError::SecretData {
        secret: secret_name.to_owned(),
        key: key.to_owned(),
    };
    let is_kubeconfig = Leaf::ALL
        .iter()
        .any(|leaf| leaf.in_kubeconfig() && leaf.secret_name() == secret_name);
    if !is_kubeconfig {
        let certificate = data
            .get(TLS_CERTIFICATE_KEY)
            .ok_or_else(|| missing(TLS_CERTIFICATE_KEY))?;
        return Ok(content_hash(&BTreeMap::from([(
            TLS_CERTIFICATE_KEY.to_owned(),
            certificate.clone(),
        )])));
    }
    let text = data
        .get(secret_name)
        .and_then(|bytes| std::str::from_utf8(bytes).ok())
        .ok_or_else(|| missing(secret_name))?;
    let kubeconfig::ParsedKubeconfig {
        server,
        ca_pem,
        client,
    } = kubeconfig::parse(text)?;
    Ok(content_hash(&BTreeMap::from([
        ("certificate-authority".to_owned(), ca_pem.into_bytes()),
        (
            "client-certificate".to_owned(),
            client.certificate_pem.into_bytes(),
        ),
        ("server".to_owned(), server.into_bytes()),
    ])))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeroize::Zeroizing;

    use super::*;
    use crate::pki::CertifiedPair;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
        entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    fn kubeconfig(server: &str, ca: &str, certificate: &str, key: &str) -> BTreeMap<String, Vec<u8>> {
        let client = CertifiedPair {
            certificate_pem: certificate.into(),
            key_pem: Zeroizing::new(key.into()),
        };
        let text = kubeconfig::render("name", server, ca, "admin", &client).unwrap();
        map(&[("admin-kubeconfig", &text)])
    }

    #[test]
    fn values_never_change_between_releases() {
        assert_eq!(
            content_hash(&map(&[])),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
        let pair = map(&[("tls.crt", "certificate"), ("tls.key", "key")]);
        assert_eq!(
            content_hash(&pair),
            "9341824a62352eca42fa3ec6e2d76e03e05b63db0c0c769ee8c610b2e527a230"
        );
        assert_eq!(
            annotation_hash("root-ca", &pair).unwrap(),
            "298e48293a10939b9bb1c5a1e111cc66f20829160d4fd016a75b21f413b02b3c"
        );
        let config = kubeconfig("https://h:6443", "ca", "certificate", "key");
        assert_eq!(
            annotation_hash("admin-kubeconfig", &config).unwrap(),
            "8fb8c942d68a7522241d9a8c89c34b602c32494341666c4115d29889516b99b6"
        );
    }

    #[test]
    fn private_keys_feed_no_annotation() {
        for secret in [
            "root-ca",
            "apiserver-ca",
            "etcd-ca",
            "front-proxy-ca",
            "serviceaccount-rsa",
        ] {
            let hash = |certificate, key| {
                annotation_hash(secret, &map(&[("tls.crt", certificate), ("tls.key", key)])).unwrap()
            };
            assert_eq!(hash("a", "one"), hash("a", "two"));
            assert_ne!(hash("a", "one"), hash("b", "one"));
        }
        let hash = |server, ca, certificate, key| {
            annotation_hash("admin-kubeconfig", &kubeconfig(server, ca, certificate, key)).unwrap()
        };
        let base = hash("https://h:1", "ca", "certificate", "one");
        assert_eq!(base, hash("https://h:1", "ca", "certificate", "two"));
        assert_eq!(base, hash("https://[h]:1", "ca", "certificate", "one"));
        assert_ne!(base, hash("https://h:2", "ca", "certificate", "one"));
        assert_ne!(base, hash("https://h:1", "cb", "certificate", "one"));
        assert_ne!(base, hash("https://h:1", "ca", "other", "one"));
    }

    #[test]
    fn incomplete_secrets_are_named() {
        let message = annotation_hash("root-ca", &map(&[("tls.key", "k")]))
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "Secret root-ca has no text under the data key \"tls.crt\""
        );
        let message = annotation_hash("admin-kubeconfig", &map(&[]))
            .unwrap_err()
            .to_string();
        assert!(message.contains("data key \"admin-kubeconfig\""), "{message}");
    }

    proptest! {
        #[test]
        fn different_maps_hash_differently(
            one: BTreeMap<String, Vec<u8>>,
            two: BTreeMap<String, Vec<u8>>,
        ) {
            prop_assert_eq!(content_hash(&one) == content_hash(&two), one == two);
            prop_assert!(content_hash(&one).bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
        }

        #[test]
        fn moving_bytes_between_parts_shows(key in "[a-z]{1,4}", value in "[a-z]{2,6}") {
            let (head, tail) = value.split_at(1);
            let whole = map(&[(&key, &value)]);
            let moved = map(&[(&format!("{key}{head}"), tail)]);
            prop_assert_ne!(content_hash(&whole), content_hash(&moved));
        }
    }
}
