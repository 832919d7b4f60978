//! Signing leaves.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    PKCS_RSA_SHA256, SanType,
};
use zeroize::Zeroizing;

use super::authority::{Authority, CLOCK_SKEW, days, distinguished_name, x509_time};
use super::certificate::CertificateInfo;
use super::encoding;
use super::error::PkiError;
use super::hierarchy::{ExtendedUsage, LeafRequest};
use super::pair::CertifiedPair;

/// Kind of key a leaf gets. The root CA and the service-account key are RSA-2048 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyAlgorithm {
    /// ECDSA on P-256: made in microseconds, cheap handshakes. The default.
    #[default]
    EcdsaP256,
    /// RSA with 2048 bits, for clients that know nothing else. CPU heavy to make.
    Rsa2048,
}

impl KeyAlgorithm {
    fn generate(self) -> Result<Zeroizing<KeyPair>, PkiError> {
        let algorithm = match self {
            Self::EcdsaP256 => &PKCS_ECDSA_P256_SHA256,
            Self::Rsa2048 => &PKCS_RSA_SHA256,
        };
        KeyPair::generate_for(algorithm)
            .map(Zeroizing::new)
            .map_err(PkiError::Generate)
    }

    /// RFC 8813 section 3 forbids keyEncipherment for elliptic curve keys; kubeadm makes the same difference.
    fn key_usages(self) -> Vec<KeyUsagePurpose> {
        match self {
            Self::EcdsaP256 => vec![KeyUsagePurpose::DigitalSignature],
            Self::Rsa2048 => vec![
                KeyUsagePurpose::DigitalSignature,
                KeyUsagePurpose::KeyEncipherment,
            ],
        }
    }
}

impl fmt::Display for KeyAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EcdsaP256 => "ecdsa-p256",
            Self::Rsa2048 => "rsa-2048",
        })
    }
}

impl FromStr for KeyAlgorithm {
    type Err = PkiError;

    fn from_str(text: &str) -> Result<Self, PkiError> {
        match text {
            "ecdsa-p256" => Ok(Self::EcdsaP256),
            "rsa-2048" => Ok(Self::Rsa2048),
            other => Err(PkiError::UnknownKeyAlgorithm {
                given: other.to_owned(),
            }),
        }
    }
}

/// How long a leaf lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    life: SignedDuration,
}

impl Validity {
    /// Without `spec.pkiExpireDays`.
    pub const DEFAULT_DAYS: u32 = 365;
    /// The longest a leaf may be asked to live: a new root CA's life.
    pub const MAX_DAYS: u32 = 3650;

    /// From `spec.pkiExpireDays`, in days of 24 hours: the default if unset, an error outside 1 to [`Self::MAX_DAYS`].
    pub fn from_expire_days(asked: Option<i64>) -> Result<Self, PkiError> {
        let Some(asked) = asked else {
            return Ok(Self::default());
        };
        match u32::try_from(asked) {
            Ok(count @ 1..=Self::MAX_DAYS) => Ok(Self { life: days(count) }),
            _ => Err(PkiError::InvalidExpireDays { days: asked }),
        }
    }

    /// The shorter of this and `limit`.
    #[must_use]
    pub fn at_most(self, limit: Option<Duration>) -> Self {
        let limit = limit.and_then(|limit| SignedDuration::try_from(limit).ok());
        Self {
            life: limit.map_or(self.life, |limit| self.life.min(limit)),
        }
    }

    /// From the moment of issue to the end.
    #[must_use]
    pub const fn life(self) -> SignedDuration {
        self.life
    }

    /// How far a leaf is dated back, so that a machine whose clock is behind takes it: an hour, less if it is to live
    /// for less than a day.
    #[must_use]
    pub fn dated_back(self) -> SignedDuration {
        CLOCK_SKEW.min(self.life / 24)
    }
}

impl Default for Validity {
    fn default() -> Self {
        Self {
            life: days(Self::DEFAULT_DAYS),
        }
    }
}

impl Authority {
    /// Signs a leaf with a fresh key.
    ///
    /// It is valid from [`Validity::dated_back`] before `now` for `validity`, never outside the CA's own life. The serial number is
    /// derived from the fresh key: positive, 159 bits, unique. Before it is handed out the leaf is read back and
    /// verified against the CA. CPU heavy with [`KeyAlgorithm::Rsa2048`]: call it in `spawn_blocking`.
    pub fn issue(
        &self,
        request: &LeafRequest,
        algorithm: KeyAlgorithm,
        validity: Validity,
        now: Timestamp,
    ) -> Result<CertifiedPair, PkiError> {
        let moved = |by| {
            now.checked_add(by)
                .map_err(|_| PkiError::TimeOutOfRange { at: now })
        };
        let (not_before, not_after) = (moved(-validity.dated_back())?, moved(validity.life())?);
        self.issue_between(request, algorithm, not_before, not_after, now)
    }

    /// As [`Authority::issue`], with a life to the second.
    pub fn issue_between(
        &self,
        request: &LeafRequest,
        algorithm: KeyAlgorithm,
        not_before: Timestamp,
        not_after: Timestamp,
        now: Timestamp,
    ) -> Result<CertifiedPair, PkiError> {
        self.check_time(now)?;
        let LeafRequest {
            common_name,
            organization,
            usages,
            dns_names,
            ip_addresses,
        } = request;
        let sign_error = |source| PkiError::Sign {
            common_name: common_name.clone(),
            source,
        };

        let mut params = CertificateParams::default();
        params.not_before = x509_time(not_before.max(self.not_before()), days(0))?;
        params.not_after = x509_time(not_after.min(self.not_after()), days(0))?;
        params.distinguished_name = distinguished_name(common_name, organization.as_deref());
        params.is_ca = IsCa::NoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = algorithm.key_usages();
        params.extended_key_usages = usages
            .iter()
            .map(|usage| match usage {
                ExtendedUsage::ServerAuth => ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedUsage::ClientAuth => ExtendedKeyUsagePurpose::ClientAuth,
            })
            .collect();
        for name in dns_names {
            params
                .subject_alt_names
                .push(SanType::DnsName(name.as_str().try_into().map_err(sign_error)?));
        }
        params
            .subject_alt_names
            .extend(ip_addresses.iter().copied().map(SanType::IpAddress));

        let key = algorithm.generate()?;
        let certificate = params.signed_by(&*key, &self.issuer()?).map_err(sign_error)?;
        let pair = CertifiedPair {
            certificate_pem: encoding::block(encoding::CERTIFICATE, certificate.der()),
            key_pem: encoding::private_key_pem(&key)?,
        };
        if !CertificateInfo::parse(&pair.certificate_pem)?.is_issued_by(self) {
            return Err(PkiError::SelfCheck {
                common_name: common_name.clone(),
            });
        }
        Ok(pair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::certificate::parse_der;
    use crate::pki::testing::{NOW, authority, now, self_signed, tenant};
    use crate::pki::{Leaf, request};

    #[test]
    fn algorithms_have_names() {
        for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
            assert_eq!(algorithm.to_string().parse::<KeyAlgorithm>().unwrap(), algorithm);
        }
        let error = "RSA".parse::<KeyAlgorithm>().unwrap_err().to_string();
        assert_eq!(error, "unknown key algorithm \"RSA\"; use ecdsa-p256 or rsa-2048");
    }

    #[test]
    fn expire_days_have_bounds() {
        let life = |days| Validity::from_expire_days(days).unwrap().life();
        assert_eq!(life(None), SignedDuration::from_hours(365 * 24));
        for days in [1, 90, 3650] {
            assert_eq!(life(Some(days)), SignedDuration::from_hours(days * 24));
        }
        let short = Validity::default().at_most(Some(Duration::from_mins(10)));
        assert_eq!(short.life(), SignedDuration::from_mins(10));
        assert_eq!(short.dated_back(), SignedDuration::from_secs(25));
        assert_eq!(Validity::default().at_most(None), Validity::default());
        for days in [i64::MIN, -1, 0, 3651, i64::from(u32::MAX) + 2, i64::MAX] {
            let message = Validity::from_expire_days(Some(days)).unwrap_err().to_string();
            assert_eq!(
                message,
                format!("spec.pkiExpireDays is {days}; it must be from 1 to 3650")
            );
        }
    }

    #[test]
    fn leaves_carry_what_was_asked_and_nothing_else() {
        let (authority, _) = authority();
        for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
            for leaf in Leaf::ALL {
                let wanted = request(leaf, &tenant()).unwrap();
                let pair = authority
                    .issue(&wanted, algorithm, Validity::default(), now())
                    .unwrap();
                let info = CertificateInfo::parse(&pair.certificate_pem).unwrap();
                assert!(
                    info.satisfies(&wanted) && info.matches_key(&pair.key_pem) && !info.is_ca,
                    "{leaf}"
                );
                assert_eq!(info.dns_names, wanted.dns_names, "order kept");
                assert_eq!(info.not_before.as_second(), NOW - 3600);
                assert_eq!(info.not_after.as_second(), NOW + 365 * 86_400);

                let der = encoding::first_block(&pair.certificate_pem, "CERTIFICATE", "leaf").unwrap();
                let certificate = parse_der(&der).unwrap();
                assert!(certificate.basic_constraints().unwrap().is_none());
                assert!(certificate.serial > 0u8.into() && certificate.raw_serial()[0] & 0x80 == 0);
                let usage = certificate.key_usage().unwrap().unwrap().value.flags;
                assert_eq!(
                    usage,
                    if algorithm == KeyAlgorithm::Rsa2048 {
                        0b101
                    } else {
                        0b1
                    }
                );
                let has = |oid| certificate.iter_extensions().any(|e| e.oid.to_id_string() == oid);
                assert!(has("2.5.29.35"), "AKI");
            }
        }
    }

    #[test]
    fn no_leaf_lives_outside_its_authority() {
        let (authority, _) = authority();
        let wanted = request(Leaf::FrontProxy, &tenant()).unwrap();
        let issue = |at| {
            let validity = Validity::from_expire_days(Some(3650)).unwrap();
            let pair = authority.issue(&wanted, KeyAlgorithm::EcdsaP256, validity, at)?;
            CertificateInfo::parse(&pair.certificate_pem)
        };
        let early = issue(authority.not_before()).unwrap();
        assert_eq!(early.not_before, authority.not_before());
        let late = issue(authority.not_after() - SignedDuration::from_hours(2)).unwrap();
        assert_eq!(late.not_after, authority.not_after());
        assert!(matches!(
            issue(authority.not_after() + SignedDuration::from_secs(1)),
            Err(PkiError::Expired { .. })
        ));
    }

    #[test]
    fn an_authority_on_an_elliptic_curve_signs_too() {
        let (certificate, key) = self_signed(|_| {});
        let authority = Authority::load(&certificate, &key, now()).unwrap();
        let wanted = request(Leaf::ApiServer, &tenant()).unwrap();
        authority
            .issue(&wanted, KeyAlgorithm::EcdsaP256, Validity::default(), now())
            .unwrap();
    }

    #[test]
    fn serials_and_keys_are_never_reused() {
        let (authority, _) = authority();
        let wanted = request(Leaf::Admin, &tenant()).unwrap();
        let issue = || {
            authority
                .issue(&wanted, KeyAlgorithm::EcdsaP256, Validity::default(), now())
                .unwrap()
        };
        let (one, two) = (issue(), issue());
        assert_ne!(one.key_pem, two.key_pem);
        let serial = |pair: &CertifiedPair| {
            let der = encoding::first_block(&pair.certificate_pem, "CERTIFICATE", "leaf").unwrap();
            parse_der(&der).unwrap().raw_serial().to_vec()
        };
        assert_ne!(serial(&one), serial(&two));
    }
}
