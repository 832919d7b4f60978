//! Reading certificates: what is in them, who signed them, when to renew them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::PublicKeyData;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use sha2::{Digest, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::time::ASN1Time;

use super::authority::Authority;
use super::encoding;
use super::error::PkiError;
use super::hierarchy::{ExtendedUsage, LeafRequest};

/// What a certificate says. Parsing checks form only; see [`Self::is_issued_by`] for its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// Start of its life.
    pub not_before: Timestamp,
    /// End of its life.
    pub not_after: Timestamp,
    /// CN of the subject; empty if there is none.
    pub common_name: String,
    /// O of the subject, in order.
    pub organizations: Vec<String>,
    /// DNS names it is for, in order.
    pub dns_names: Vec<String>,
    /// IP addresses it is for, in order.
    pub ip_addresses: Vec<IpAddr>,
    /// Whether it may serve TLS.
    pub server_auth: bool,
    /// Whether it may authenticate a TLS client.
    pub client_auth: bool,
    /// Whether it is a CA.
    pub is_ca: bool,
    /// Its public key: DER of a `SubjectPublicKeyInfo`.
    pub public_key_der: Vec<u8>,
    der: Vec<u8>,
}

impl CertificateInfo {
    /// Reads the first certificate in `pem`.
    pub fn parse(pem: &str) -> Result<Self, PkiError> {
        Self::from_der(encoding::first_block(pem, encoding::CERTIFICATE, "certificate")?)
    }

    /// Reads every certificate in a bundle, in order and each once. What cannot be read is passed over, as TLS
    /// clients do.
    #[must_use]
    pub fn parse_bundle(pem: &[u8]) -> Vec<Self> {
        let mut bundle: Vec<Self> = Vec::new();
        for der in CertificateDer::pem_slice_iter(pem).flatten() {
            if let Ok(info) = Self::from_der(der.to_vec())
                && !bundle.contains(&info)
            {
                bundle.push(info);
            }
        }
        bundle
    }

    /// Reads a certificate.
    pub fn from_der(der: Vec<u8>) -> Result<Self, PkiError> {
        let certificate = parse_der(&der)?;
        let unreadable = |error: x509_parser::error::X509Error| PkiError::CertificateUnreadable {
            reason: error.to_string(),
        };
        let names = certificate.subject_alternative_name().map_err(unreadable)?;
        let names = names.map_or(&[][..], |extension| &extension.value.general_names);
        let usage = certificate
            .extended_key_usage()
            .map_err(unreadable)?
            .map(|extension| extension.value);
        let constraints = certificate.basic_constraints().map_err(unreadable)?;
        let subject = certificate.subject();
        let texts = |attributes: Vec<&x509_parser::x509::AttributeTypeAndValue<'_>>| {
            attributes
                .iter()
                .filter_map(|a| a.as_str().ok().map(str::to_owned))
                .collect::<Vec<_>>()
        };
        let info = Self {
            not_before: timestamp(certificate.validity().not_before),
            not_after: timestamp(certificate.validity().not_after),
            common_name: texts(subject.iter_common_name().collect())
                .pop()
                .unwrap_or_default(),
            organizations: texts(subject.iter_organization().collect()),
            dns_names: names.iter().filter_map(dns_name).collect(),
            ip_addresses: names.iter().filter_map(ip_address).collect(),
            server_auth: usage.is_some_and(|usage| usage.any || usage.server_auth),
            client_auth: usage.is_some_and(|usage| usage.any || usage.client_auth),
            is_ca: constraints.is_some_and(|extension| extension.value.ca),
            public_key_der: certificate.public_key().raw.to_vec(),
            der: Vec::new(),
        };
        drop(certificate);
        Ok(Self { der, ..info })
    }

    /// The certificate itself.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// The certificate itself, one PEM block.
    #[must_use]
    pub fn pem(&self) -> String {
        encoding::block(encoding::CERTIFICATE, &self.der)
    }

    /// Whether `key_pem` is this certificate's private key. A key that can't be read is not.
    #[must_use]
    pub fn matches_key(&self, key_pem: &str) -> bool {
        let (Ok(certificate), Ok(key)) = (
            parse_der(&self.der),
            encoding::private_key(key_pem, "private key"),
        ) else {
            return false;
        };
        *certificate.public_key().subject_public_key.data == *key.der_bytes()
    }

    /// Whether `authority` signed it: the issuer is the authority's subject and the signature verifies. Says nothing
    /// about time.
    #[must_use]
    pub fn is_issued_by(&self, authority: &Authority) -> bool {
        let (Ok(leaf), Ok(root)) = (parse_der(&self.der), parse_der(authority.certificate_der())) else {
            return false;
        };
        leaf.issuer().as_raw() == root.subject().as_raw()
            && leaf.verify_signature(Some(root.public_key())).is_ok()
    }

    /// Whether its names and usages are those of `request`; the order of alternative names is of no account.
    #[must_use]
    pub fn satisfies(&self, request: &LeafRequest) -> bool {
        let LeafRequest {
            common_name,
            organization,
            usages,
            dns_names,
            ip_addresses,
        } = request;
        self.common_name == *common_name
            && self.organizations.iter().eq(organization.iter())
            && self.server_auth == usages.contains(&ExtendedUsage::ServerAuth)
            && self.client_auth == usages.contains(&ExtendedUsage::ClientAuth)
            && same_set(&self.dns_names, dns_names)
            && same_set(&self.ip_addresses, ip_addresses)
            && !self.is_ca
    }

    /// When to renew it; see [`renew_at`].
    #[must_use]
    pub fn renew_at(&self) -> Timestamp {
        renew_at(self.not_before, self.not_after)
    }
}

/// When a certificate is due for renewal: after two thirds of its life, in whole seconds.
#[must_use]
pub fn renew_at(not_before: Timestamp, not_after: Timestamp) -> Timestamp {
    let life = not_after
        .as_second()
        .saturating_sub(not_before.as_second())
        .max(0);
    later(not_before, life / 3 * 2 + life % 3 * 2 / 3)
}

/// [`renew_at`], moved earlier by up to a tenth of the life. How much depends on `seed` alone, so tenants made on the
/// same day are not all due at once, and asking again gives the same answer.
#[must_use]
pub fn renew_at_spread(not_before: Timestamp, not_after: Timestamp, seed: &str) -> Timestamp {
    let life = not_after
        .as_second()
        .saturating_sub(not_before.as_second())
        .max(0);
    let hash = Sha256::digest(seed.as_bytes());
    let share = i64::from(u16::from_be_bytes([hash[0], hash[1]]));
    later(
        renew_at(not_before, not_after),
        -(life / 10 * share / i64::from(u16::MAX)),
    )
}

fn later(from: Timestamp, seconds: i64) -> Timestamp {
    from.checked_add(SignedDuration::from_secs(seconds))
        .unwrap_or(from)
}

/// Parses exactly one certificate.
pub(super) fn parse_der(der: &[u8]) -> Result<X509Certificate<'_>, PkiError> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err(PkiError::CertificateUnreadable {
            reason: "there are bytes after it".to_owned(),
        }),
        Err(error) => Err(PkiError::CertificateUnreadable {
            reason: error.to_string(),
        }),
    }
}

/// The instant, clamped to what a [`Timestamp`] holds (RFC 5280's "no end", 9999-12-31, lies just beyond).
pub(super) fn timestamp(time: ASN1Time) -> Timestamp {
    let second = time.timestamp();
    Timestamp::from_second(second).unwrap_or(if second < 0 {
        Timestamp::MIN
    } else {
        Timestamp::MAX
    })
}

fn dns_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    }
}

fn ip_address(name: &GeneralName<'_>) -> Option<IpAddr> {
    let GeneralName::IPAddress(octets) = name else {
        return None;
    };
    match octets.len() {
        4 => <[u8; 4]>::try_from(*octets)
            .ok()
            .map(|octets| Ipv4Addr::from(octets).into()),
        16 => <[u8; 16]>::try_from(*octets)
            .ok()
            .map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

fn same_set<T: Ord>(left: &[T], right: &[T]) -> bool {
    let sorted = |items: &[T]| -> Vec<usize> {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by(|a, b| items[*a].cmp(&items[*b]));
        order.dedup_by(|a, b| items[*a] == items[*b]);
        order
    };
    let (l, r) = (sorted(left), sorted(right));
    l.len() == r.len() && l.iter().zip(&r).all(|(a, b)| left[*a] == right[*b])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pki::testing::{authority, now, self_signed, tenant};
    use crate::pki::{KeyAlgorithm, Leaf, Validity, request};

    #[test]
    fn only_its_own_authority_counts_as_issuer() {
        let (root, pair) = authority();
        let info = CertificateInfo::parse(&pair.certificate_pem).unwrap();
        assert!(info.is_ca && info.is_issued_by(&root) && info.matches_key(&pair.key_pem));
        assert_eq!(info.organizations, [crate::pki::ROOT_ORGANIZATION]);

        // Same subject, another key: the name alone must not convince.
        let (certificate, key) = self_signed(|params| {
            params.distinguished_name = crate::pki::authority::distinguished_name(
                crate::pki::ROOT_COMMON_NAME,
                Some(crate::pki::ROOT_ORGANIZATION),
            );
        });
        let impostor = Authority::load(&certificate, &key, now()).unwrap();
        let wanted = request(Leaf::ApiServer, &tenant()).unwrap();
        let leaf = impostor
            .issue(&wanted, KeyAlgorithm::EcdsaP256, Validity::default(), now())
            .unwrap();
        let leaf = CertificateInfo::parse(&leaf.certificate_pem).unwrap();
        assert!(leaf.is_issued_by(&impostor) && !leaf.is_issued_by(&root));
        assert!(!leaf.matches_key(&pair.key_pem) && !leaf.matches_key("junk"));
    }

    #[test]
    fn a_changed_wish_is_noticed() {
        let (root, _) = authority();
        let wanted = request(Leaf::ApiServer, &tenant()).unwrap();
        let pair = root
            .issue(&wanted, KeyAlgorithm::EcdsaP256, Validity::default(), now())
            .unwrap();
        let info = CertificateInfo::parse(&pair.certificate_pem).unwrap();
        let mut turned = wanted.clone();
        turned.dns_names.reverse();
        assert!(info.satisfies(&wanted) && info.satisfies(&turned));
        let changes: [fn(&mut LeafRequest); 6] = [
            |r| r.common_name.push('x'),
            |r| r.organization = Some("system:masters".into()),
            |r| r.usages = &[ExtendedUsage::ClientAuth],
            |r| r.dns_names.push("more".into()),
            |r| r.dns_names[0] = "other".into(),
            |r| r.ip_addresses.clear(),
        ];
        for change in changes {
            let mut other = wanted.clone();
            change(&mut other);
            assert!(!info.satisfies(&other), "{other:?}");
        }
    }

    #[test]
    fn hostile_input_is_an_error() {
        let (_, pair) = authority();
        let der = encoding::first_block(&pair.certificate_pem, "CERTIFICATE", "x").unwrap();
        for cut in 0..der.len() {
            CertificateInfo::parse(&encoding::block("CERTIFICATE", &der[..cut])).unwrap_err();
        }
        let longer = encoding::block("CERTIFICATE", &[&der[..], &[0]].concat());
        assert!(
            CertificateInfo::parse(&longer)
                .unwrap_err()
                .to_string()
                .contains("bytes after it")
        );
    }

    #[test]
    fn renewal_is_due_after_two_thirds() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(renew_at(at(0), at(300)), at(200));
        assert_eq!(renew_at(at(10), at(10)), at(10));
        assert_eq!(
            renew_at(at(10), at(5)),
            at(10),
            "a life that ends before it starts"
        );
        let end = 365 * 86_400;
        let due = renew_at_spread(at(0), at(end), "a");
        assert_eq!(due, renew_at_spread(at(0), at(end), "a"));
        assert_ne!(due, renew_at_spread(at(0), at(end), "b"));
    }

    proptest! {
        #[test]
        fn renewal_lies_within_the_life(start in -1_000_000_000_i64..4_000_000_000, life in 0_i64..400_000_000, seed: String) {
            let (from, to) = (Timestamp::from_second(start).unwrap(), Timestamp::from_second(start + life).unwrap());
            let due = renew_at(from, to);
            prop_assert_eq!(due.as_second(), start + life * 2 / 3);
            let spread = renew_at_spread(from, to, &seed);
            prop_assert!(spread <= due && due.as_second() - spread.as_second() <= life / 10);
        }

        #[test]
        fn no_text_makes_the_parser_panic(bytes: Vec<u8>) {
            let _ = CertificateInfo::parse(&encoding::block("CERTIFICATE", &bytes));
            let _ = encoding::private_key(&encoding::block("RSA PRIVATE KEY", &bytes), "key");
        }
    }
}
