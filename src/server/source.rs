//! Where the serving certificate comes from, and how it stays fresh.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose,
};
use rustls::sign::CertifiedKey;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::tls::{CertificateError, ReloadableCertificate, certified_key};
use crate::admission::configuration;
use crate::metrics::Metrics;

/// How often files are compared with what is in use. A Secret volume changes by a swap of symbolic links, which
/// watches on the files would miss.
const POLL: Duration = Duration::from_secs(10);
/// Validity of a self-issued certificate. It is replaced after two thirds of this.
const SELF_ISSUED_VALIDITY: Duration = Duration::from_hours(365 * 24);
/// How far a self-issued certificate's validity begins in the past, for peers whose clock is behind.
const CLOCK_SKEW: Duration = Duration::from_hours(1);

/// Why no certificate could be had.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The files hold nothing that can be served.
    #[error("cannot use certificate from {}", dir.display())]
    Unusable {
        /// The directory of the files.
        dir: PathBuf,
        /// What is wrong with them.
        source: CertificateError,
    },
    /// A certificate could not be issued.
    #[error("cannot issue a serving certificate")]
    Issue(#[from] rcgen::Error),
    /// The issued certificate cannot be served.
    #[error("cannot use the issued serving certificate")]
    Issued(#[source] CertificateError),
}

/// A source of serving certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateSource {
    /// `tls.crt` and `tls.key` (PEM) in a directory, for example a mounted Secret.
    Files {
        /// The directory.
        dir: PathBuf,
    },
    /// Self-issued, in memory only; every replica has its own, and nobody is expected to verify it.
    SelfIssued {
        /// DNS names in the certificate.
        names: Vec<String>,
    },
}

/// The bytes of both files.
#[derive(PartialEq, Eq)]
struct Pair {
    chain: Zeroizing<Vec<u8>>,
    key: Zeroizing<Vec<u8>>,
}

/// What identifies the certificate in use.
enum Current {
    /// What the files held.
    Files(Pair),
    /// When to issue a new one, by the wall clock.
    Until(SystemTime),
}

impl CertificateSource {
    /// Files in `dir` if it is given, otherwise self-issued for the Services of this program in `namespace`.
    #[must_use]
    pub fn new(dir: Option<PathBuf>, namespace: &str) -> Self {
        match dir {
            Some(dir) => Self::Files { dir },
            None => Self::SelfIssued {
                names: service_names(namespace),
            },
        }
    }

    /// Puts a certificate into `target`. What is returned keeps it fresh.
    pub async fn install(self, target: ReloadableCertificate) -> Result<Refresh, SourceError> {
        let (key, current) = self.load(SystemTime::now()).await?;
        target.set(key);
        Ok(Refresh {
            source: self,
            target,
            current,
            rejected: None,
        })
    }

    async fn load(&self, now: SystemTime) -> Result<(CertifiedKey, Current), SourceError> {
        match self {
            Self::Files { dir } => {
                let pair = read(dir).await?;
                let certified =
                    certified_key(&pair.chain, &pair.key).map_err(|source| SourceError::Unusable {
                        dir: dir.clone(),
                        source,
                    })?;
                Ok((certified, Current::Files(pair)))
            }
            Self::SelfIssued { names } => {
                let certified = self_issue(names, now)?;
                Ok((certified, Current::Until(now + SELF_ISSUED_VALIDITY * 2 / 3)))
            }
        }
    }
}

/// Keeps an installed certificate fresh.
pub struct Refresh {
    source: CertificateSource,
    target: ReloadableCertificate,
    current: Current,
    /// The bytes that were last found unusable, so as to complain of them once.
    rejected: Option<Pair>,
}

impl Refresh {
    /// Looks for a newer certificate every ten seconds until `stop` is cancelled. One that cannot be used is logged
    /// and counted, and the previous one stays in use.
    pub async fn run(self, metrics: Arc<Metrics>, stop: CancellationToken) {
        self.run_every(POLL, metrics, stop).await;
    }

    /// As [`Refresh::run`], with the time between two looks.
    pub async fn run_every(mut self, poll: Duration, metrics: Arc<Metrics>, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(poll) => {}
            }
            match self.check(SystemTime::now()).await {
                Ok(false) => {}
                Ok(true) => info!("serving certificate replaced"),
                Err(error) => {
                    metrics.certificate_reload_failed();
                    let error = &error as &dyn std::error::Error;
                    warn!(
                        error,
                        "cannot use new serving certificate, keeping the previous one"
                    );
                }
            }
        }
    }

    /// Replaces the certificate if there is a newer one, and says whether it did.
    async fn check(&mut self, now: SystemTime) -> Result<bool, SourceError> {
        match (&self.source, &self.current) {
            (CertificateSource::Files { dir }, Current::Files(pair)) => {
                let new = read(dir).await?;
                if new == *pair || self.rejected.as_ref() == Some(&new) {
                    return Ok(false);
                }
                match certified_key(&new.chain, &new.key) {
                    Ok(certified) => self.target.set(certified),
                    Err(source) => {
                        let dir = dir.clone();
                        self.rejected = Some(new);
                        return Err(SourceError::Unusable { dir, source });
                    }
                }
                self.current = Current::Files(new);
                self.rejected = None;
            }
            (_, Current::Until(until)) if now < *until => return Ok(false),
            _ => {
                let (certified, current) = self.source.load(now).await?;
                self.target.set(certified);
                self.current = current;
            }
        }
        Ok(true)
    }
}

/// Both files of a directory.
async fn read(dir: &Path) -> Result<Pair, SourceError> {
    let read = async |name: &str| {
        let path = dir.join(name);
        match tokio::fs::read(&path).await {
            Ok(bytes) => Ok(Zeroizing::new(bytes)),
            Err(source) => Err(SourceError::Read { path, source }),
        }
    };
    Ok(Pair {
        chain: read("tls.crt").await?,
        key: read("tls.key").await?,
    })
}

/// The names our Services have in `namespace`, and localhost.
pub(super) fn service_names(namespace: &str) -> Vec<String> {
    let services = ["vc-manager", configuration::SERVICE]
        .into_iter()
        .flat_map(|service| {
            ["", ".svc", ".svc.cluster.local"].map(|suffix| match suffix {
                "" => format!("{service}.{namespace}"),
                _ => format!("{service}.{namespace}{suffix}"),
            })
        });
    services.chain(["localhost".to_owned()]).collect()
}

/// A certificate signed by its own fresh key, good for a server of `names`.
fn self_issue(names: &[String], now: SystemTime) -> Result<CertifiedKey, SourceError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(names.to_vec())?;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::OrganizationName, "tenancy.x-k8s.io");
    params.distinguished_name.push(DnType::CommonName, "vc-manager");
    params.not_before = OffsetDateTime::from(now - CLOCK_SKEW);
    params.not_after = OffsetDateTime::from(now + SELF_ISSUED_VALIDITY);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.self_signed(&key)?;
    let pem = Zeroizing::new(key.serialize_pem());
    certified_key(certificate.pem().as_bytes(), pem.as_bytes()).map_err(SourceError::Issued)
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

    use super::*;

    #[test]
    fn self_issued_certificate() {
        let names = service_names("ns");
        let now = SystemTime::now();
        let key = self_issue(&names, now).unwrap();
        let (_, certificate) = X509Certificate::from_der(&key.cert[0]).unwrap();
        let alternatives = certificate.subject_alternative_name().unwrap().unwrap();
        let shown: Vec<&str> = alternatives
            .value
            .general_names
            .iter()
            .map(|name| match name {
                GeneralName::DNSName(name) => *name,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(
            shown,
            [
                "vc-manager.ns",
                "vc-manager.ns.svc",
                "vc-manager.ns.svc.cluster.local",
                "virtualcluster-webhook-service.ns",
                "virtualcluster-webhook-service.ns.svc",
                "virtualcluster-webhook-service.ns.svc.cluster.local",
                "localhost",
            ]
        );
        let validity = certificate.validity();
        assert!(validity.is_valid());
        assert_eq!(
            validity.not_after.timestamp() - validity.not_before.timestamp(),
            i64::try_from((SELF_ISSUED_VALIDITY + CLOCK_SKEW).as_secs()).unwrap()
        );
        assert!(!certificate.is_ca());
    }

    #[tokio::test]
    async fn self_issued_is_replaced_by_the_wall_clock() {
        let target = ReloadableCertificate::default();
        let mut refresh = CertificateSource::new(None, "ns").install(target).await.unwrap();
        let now = SystemTime::now();
        assert!(!refresh.check(now).await.unwrap());
        assert!(!refresh.check(now + SELF_ISSUED_VALIDITY / 2).await.unwrap());
        let later = now + SELF_ISSUED_VALIDITY * 3 / 4;
        assert!(refresh.check(later).await.unwrap());
        assert!(!refresh.check(later).await.unwrap());
    }

    #[tokio::test]
    async fn files_are_compared_and_bad_ones_refused_once() {
        let dir = tempfile::tempdir().unwrap();
        let write = |chain: &str, key: &str| {
            std::fs::write(dir.path().join("tls.crt"), chain).unwrap();
            std::fs::write(dir.path().join("tls.key"), key).unwrap();
        };
        let pair = || {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(vec!["x".to_owned()])
                .unwrap()
                .self_signed(&key)
                .unwrap();
            (certificate.pem(), key.serialize_pem())
        };
        let source = CertificateSource::new(Some(dir.path().to_owned()), "ns");
        let error = source
            .clone()
            .install(ReloadableCertificate::default())
            .await
            .err()
            .unwrap();
        assert!(error.to_string().starts_with("cannot read /"), "{error}");

        let (first, second) = (pair(), pair());
        write(&first.0, &first.1);
        let mut refresh = source
            .clone()
            .install(ReloadableCertificate::default())
            .await
            .unwrap();
        let now = SystemTime::now();
        assert!(!refresh.check(now).await.unwrap());
        // Half of a swap: the new certificate with the old key.
        write(&second.0, &first.1);
        assert!(matches!(
            refresh.check(now).await,
            Err(SourceError::Unusable {
                source: CertificateError::Pair(_),
                ..
            })
        ));
        assert!(!refresh.check(now).await.unwrap());
        write(&second.0, &second.1);
        assert!(refresh.check(now).await.unwrap());
        assert!(!refresh.check(now).await.unwrap());
        for (chain, key) in [
            ("", second.1.as_str()),
            (&second.0, ""),
            ("-----BEGIN CERTIFICATE-----\n!", &second.1),
        ] {
            write(chain, key);
            assert!(
                matches!(refresh.check(now).await, Err(SourceError::Unusable { .. })),
                "{chain}"
            );
            assert!(
                source
                    .clone()
                    .install(ReloadableCertificate::default())
                    .await
                    .is_err()
            );
        }
    }
}
