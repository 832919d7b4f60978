//! The tenant's root CA: made once, then loaded and checked on every use.

use std::fmt;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256, PublicKeyData,
};
use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use zeroize::Zeroizing;

use super::certificate::{parse_der, timestamp};
use super::encoding;
use super::error::PkiError;
use super::pair::CertifiedPair;

/// Common name of every root CA.
pub const ROOT_COMMON_NAME: &str = "kubernetes";
/// Organization of every root CA, as the Go implementation writes it.
pub const ROOT_ORGANIZATION: &str = "kubernetes-sig.kubernetes-sigs/multi-tenancy.virtualcluster";
/// Life of a new root CA in days of 24 hours.
pub const ROOT_VALIDITY_DAYS: u32 = 10 * 365;

/// How far certificates are dated back, so that a machine whose clock is behind takes a fresh one.
pub(super) const CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);

const CERTIFICATE: &str = "root CA certificate";
const KEY: &str = "root CA private key";

/// A root CA whose halves belong together and which may sign; the only way to issue leaves.
pub struct Authority {
    certificate_pem: String,
    certificate_der: Vec<u8>,
    key: Zeroizing<KeyPair>,
    not_before: Timestamp,
    not_after: Timestamp,
}

impl Authority {
    /// Makes a root CA: RSA-2048, SHA-256, valid for [`ROOT_VALIDITY_DAYS`] from `now` (and an hour back).
    ///
    /// Returns it with the pair to store; the key is PKCS#1, the one form the Go implementation reads back.
    /// CPU heavy: call it in `spawn_blocking`.
    pub fn create(now: Timestamp) -> Result<(Self, CertifiedPair), PkiError> {
        let key = Zeroizing::new(KeyPair::generate_for(&PKCS_RSA_SHA256).map_err(PkiError::Generate)?);
        let mut params = CertificateParams::default();
        params.not_before = x509_time(now, -CLOCK_SKEW)?;
        params.not_after = x509_time(now, days(ROOT_VALIDITY_DAYS))?;
        params.distinguished_name = distinguished_name(ROOT_COMMON_NAME, Some(ROOT_ORGANIZATION));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
            KeyUsagePurpose::KeyCertSign,
        ];
        Self::self_signed(ROOT_COMMON_NAME, &params, &key, now)
    }

    /// Makes a CA on P-256 that signs leaves and nothing below them, valid from `not_before` to `not_after`.
    ///
    /// Returns it with the pair to store. `now` must be within its life.
    pub fn create_for_leaves(
        common_name: &str,
        not_before: Timestamp,
        not_after: Timestamp,
        now: Timestamp,
    ) -> Result<(Self, CertifiedPair), PkiError> {
        let key = Zeroizing::new(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(PkiError::Generate)?);
        let mut params = CertificateParams::default();
        params.not_before = x509_time(not_before, days(0))?;
        params.not_after = x509_time(not_after, days(0))?;
        params.distinguished_name = distinguished_name(common_name, None);
        params.use_authority_key_identifier_extension = true;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
        Self::self_signed(common_name, &params, &key, now)
    }

    fn self_signed(
        common_name: &str,
        params: &CertificateParams,
        key: &KeyPair,
        now: Timestamp,
    ) -> Result<(Self, CertifiedPair), PkiError> {
        let certificate = params.self_signed(key).map_err(|source| PkiError::Sign {
            common_name: common_name.to_owned(),
            source,
        })?;
        let pair = CertifiedPair {
            certificate_pem: encoding::block(encoding::CERTIFICATE, certificate.der()),
            key_pem: encoding::private_key_pem(key)?,
        };
        Ok((Self::load(&pair.certificate_pem, &pair.key_pem, now)?, pair))
    }

    /// Loads an existing root CA, whoever made it, and refuses one that cannot serve.
    ///
    /// Keys may be PKCS#1, PKCS#8 or SEC1, on RSA, P-256 or P-384. Serial 0 and a missing subject key identifier, as
    /// older Go libraries leave them, are fine; so is a missing key usage extension (RFC 5280 then allows all uses).
    pub fn load(certificate_pem: &str, key_pem: &str, now: Timestamp) -> Result<Self, PkiError> {
        let certificate_der = encoding::first_block(certificate_pem, encoding::CERTIFICATE, CERTIFICATE)?;
        let key = encoding::private_key(key_pem, KEY)?;
        if ![&PKCS_RSA_SHA256, &PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384].contains(&key.algorithm()) {
            return Err(PkiError::KeyUnreadable { what: KEY });
        }
        let certificate = parse_der(&certificate_der)?;
        check_signs(&certificate)?;
        check_subject(&certificate)?;
        if *certificate.public_key().subject_public_key.data != *key.der_bytes() {
            return Err(PkiError::KeyMismatch { what: CERTIFICATE });
        }
        let authority = Self {
            certificate_pem: encoding::block(encoding::CERTIFICATE, &certificate_der),
            key,
            not_before: timestamp(certificate.validity().not_before),
            not_after: timestamp(certificate.validity().not_after),
            certificate_der,
        };
        authority.check_time(now)?;
        authority.issuer()?;
        Ok(authority)
    }

    /// The certificate, one PEM block.
    #[must_use]
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Start of its life.
    #[must_use]
    pub fn not_before(&self) -> Timestamp {
        self.not_before
    }

    /// End of its life; no leaf outlives it.
    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        self.not_after
    }

    /// Refuses a `now` outside the CA's life.
    pub(super) fn check_time(&self, now: Timestamp) -> Result<(), PkiError> {
        if now < self.not_before {
            return Err(PkiError::NotYetValid {
                not_before: self.not_before,
            });
        }
        if now > self.not_after {
            return Err(PkiError::Expired {
                not_after: self.not_after,
            });
        }
        Ok(())
    }

    /// The certificate as DER.
    #[must_use]
    pub fn certificate_der(&self) -> &[u8] {
        &self.certificate_der
    }

    /// What rcgen signs with.
    pub(super) fn issuer(&self) -> Result<Issuer<'_, &KeyPair>, PkiError> {
        let certificate = self.certificate_der.as_slice().into();
        Issuer::from_ca_cert_der(&certificate, &*self.key).map_err(|_| PkiError::SubjectUnsupported)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("not_before", &self.not_before)
            .field("not_after", &self.not_after)
            .field("key", &"[redacted]")
            .finish_non_exhaustive()
    }
}

/// A subject with the organization before the common name, the order Go writes.
pub(super) fn distinguished_name(common_name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common_name);
    name
}

/// `at` moved by `by`, in whole seconds as X.509 has them.
pub(super) fn x509_time(at: Timestamp, by: SignedDuration) -> Result<OffsetDateTime, PkiError> {
    let moved = at.checked_add(by).map_err(|_| PkiError::TimeOutOfRange { at })?;
    OffsetDateTime::from_unix_timestamp(moved.as_second()).map_err(|_| PkiError::TimeOutOfRange { at })
}

/// `count` days of 24 hours.
pub(super) fn days(count: u32) -> SignedDuration {
    SignedDuration::from_hours(24 * i64::from(count))
}

fn check_signs(certificate: &X509Certificate<'_>) -> Result<(), PkiError> {
    let is_ca = certificate
        .basic_constraints()
        .ok()
        .flatten()
        .is_some_and(|extension| extension.value.ca);
    if !is_ca {
        return Err(PkiError::NotACertificateAuthority);
    }
    match certificate.key_usage() {
        Ok(Some(usage)) if !usage.value.key_cert_sign() => Err(PkiError::MayNotSign),
        Ok(_) => Ok(()),
        Err(error) => Err(PkiError::CertificateUnreadable {
            reason: error.to_string(),
        }),
    }
}

/// rcgen keeps one value per attribute type and panics on an empty RDN, so anything else is refused first: leaves
/// whose issuer isn't the CA's subject byte for byte verify nowhere.
fn check_subject(certificate: &X509Certificate<'_>) -> Result<(), PkiError> {
    let mut seen = Vec::new();
    for rdn in certificate.subject().iter() {
        let mut attributes = rdn.iter();
        let (Some(attribute), None) = (attributes.next(), attributes.next()) else {
            return Err(PkiError::SubjectUnsupported);
        };
        if seen.contains(&attribute.attr_type()) {
            return Err(PkiError::SubjectUnsupported);
        }
        seen.push(attribute.attr_type());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::testing::{NOW, authority, now, self_signed, tenant};
    use crate::pki::{KeyAlgorithm, Leaf, Validity, request};

    #[test]
    fn a_new_root_can_be_loaded_again_and_is_what_the_table_says() {
        let (_, pair) = authority();
        let loaded = Authority::load(&pair.certificate_pem, &pair.key_pem, now()).unwrap();
        assert_eq!(loaded.certificate_pem(), pair.certificate_pem);
        assert_eq!(loaded.not_before().as_second(), NOW - 3600);
        assert_eq!(loaded.not_after().as_second(), NOW + 10 * 365 * 86_400);

        let certificate = parse_der(loaded.certificate_der()).unwrap();
        assert_eq!(
            certificate.subject().to_string(),
            format!("O={ROOT_ORGANIZATION}, CN=kubernetes")
        );
        assert_eq!(certificate.subject().as_raw(), certificate.issuer().as_raw());
        let usage = certificate.key_usage().unwrap().unwrap().value;
        assert_eq!(
            usage.flags, 0b10_0101,
            "digitalSignature, keyEncipherment, keyCertSign"
        );
        let constraints = certificate.basic_constraints().unwrap().unwrap();
        assert!(constraints.critical && constraints.value.ca);
        assert_eq!(constraints.value.path_len_constraint, None);
        assert!(certificate.serial > 0u8.into() && certificate.raw_serial()[0] & 0x80 == 0);
        assert!(
            certificate
                .iter_extensions()
                .any(|e| e.oid.to_id_string() == "2.5.29.14"),
            "SKI"
        );
        assert!(pair.key_pem.starts_with("-----BEGIN RSA PRIVATE KEY-----\n"));
    }

    #[test]
    fn a_ca_for_leaves_signs_them_and_no_further_ca() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let make = |now| Authority::create_for_leaves("webhooks", at(NOW - 1), at(NOW + 10), at(now));
        assert!(matches!(make(NOW + 11), Err(PkiError::Expired { .. })));
        let (authority, pair) = make(NOW).unwrap();
        let certificate = parse_der(authority.certificate_der()).unwrap();
        assert_eq!(certificate.subject().to_string(), "CN=webhooks");
        let constraints = certificate.basic_constraints().unwrap().unwrap();
        assert!(constraints.critical && constraints.value.ca);
        assert_eq!(constraints.value.path_len_constraint, Some(0));
        let has = |oid| certificate.iter_extensions().any(|e| e.oid.to_id_string() == oid);
        assert!(has("2.5.29.14") && has("2.5.29.35"), "SKI, AKI");
        Authority::load(&pair.certificate_pem, &pair.key_pem, now()).unwrap();
        let wanted = request(Leaf::Admin, &tenant()).unwrap();
        let leaf = authority
            .issue_between(
                &wanted,
                KeyAlgorithm::EcdsaP256,
                at(NOW - 100),
                at(NOW + 5),
                now(),
            )
            .unwrap();
        let leaf = crate::pki::CertificateInfo::parse(&leaf.certificate_pem).unwrap();
        assert!(leaf.is_issued_by(&authority));
        assert_eq!((leaf.not_before, leaf.not_after), (at(NOW - 1), at(NOW + 5)));
    }

    #[test]
    fn debug_tells_no_key() {
        let (authority, pair) = authority();
        let text = format!("{authority:?}");
        let secret = pair.key_pem.lines().nth(1).unwrap();
        assert!(text.contains("[redacted]") && !text.contains(secret), "{text}");
    }

    #[test]
    fn halves_of_different_pairs_are_refused() {
        let (_, pair) = authority();
        let (_, other) = self_signed(|_| {});
        let error = Authority::load(&pair.certificate_pem, &other, now()).unwrap_err();
        assert!(matches!(error, PkiError::KeyMismatch { .. }), "{error}");
    }

    #[test]
    fn a_certificate_that_is_no_ca_is_refused() {
        for is_ca in [IsCa::NoCa, IsCa::ExplicitNoCa] {
            let (certificate, key) = self_signed(|params| params.is_ca = is_ca);
            let error = Authority::load(&certificate, &key, now()).unwrap_err();
            assert!(matches!(error, PkiError::NotACertificateAuthority), "{error}");
        }
    }

    #[test]
    fn key_usage_decides_only_if_present() {
        let (certificate, key) = self_signed(|params| params.key_usages = vec![KeyUsagePurpose::CrlSign]);
        let error = Authority::load(&certificate, &key, now()).unwrap_err();
        assert!(matches!(error, PkiError::MayNotSign), "{error}");
        let (certificate, key) = self_signed(|params| params.key_usages = Vec::new());
        Authority::load(&certificate, &key, now()).unwrap();
    }

    #[test]
    fn its_life_is_respected_to_the_second() {
        let (_, pair) = authority();
        let load = |second| {
            Authority::load(
                &pair.certificate_pem,
                &pair.key_pem,
                Timestamp::from_second(second).unwrap(),
            )
        };
        let (start, end) = (NOW - 3600, NOW + 10 * 365 * 86_400);
        assert!(matches!(load(start - 1), Err(PkiError::NotYetValid { .. })));
        assert!(matches!(load(end + 1), Err(PkiError::Expired { .. })));
        load(start).unwrap();
        load(end).unwrap();
    }

    #[test]
    fn a_subject_with_an_attribute_of_another_type_signs_all_the_same() {
        let (certificate, key) = self_signed(|params| {
            params
                .distinguished_name
                .push(DnType::CustomDnType(vec![2, 5, 4, 5]), "serial");
        });
        let authority = Authority::load(&certificate, &key, now()).unwrap();
        let wanted = request(Leaf::Admin, &tenant()).unwrap();
        authority
            .issue(&wanted, KeyAlgorithm::default(), Validity::default(), now())
            .unwrap();
    }

    #[test]
    fn garbage_is_refused_with_the_part_named() {
        let (_, pair) = authority();
        let error = Authority::load("nothing", &pair.key_pem, now()).unwrap_err();
        assert!(
            error.to_string().starts_with("the root CA certificate holds no"),
            "{error}"
        );
        let error = Authority::load(&pair.certificate_pem, "nothing", now()).unwrap_err();
        assert!(
            error.to_string().starts_with("the root CA private key holds no"),
            "{error}"
        );
        let error = Authority::load(&pair.key_pem, &pair.key_pem, now()).unwrap_err();
        assert!(
            matches!(
                error,
                PkiError::Pem {
                    expected: "CERTIFICATE",
                    ..
                }
            ),
            "{error}"
        );
        let broken = encoding::block("CERTIFICATE", &[0x30, 3, 2, 1, 1]);
        let error = Authority::load(&broken, &pair.key_pem, now()).unwrap_err();
        assert!(matches!(error, PkiError::CertificateUnreadable { .. }), "{error}");
    }
}
