//! What can go wrong with a tenant's credentials.

use k8s_openapi::jiff::Timestamp;

use super::hierarchy::ETCD_REPLICAS_MAX;
use super::issue::Validity;

/// What is wrong, and where it helps, what to do. No variant ever carries key material or file contents, so messages
/// may go to logs, Events and conditions as they are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A PEM block of the expected kind isn't there.
    #[error("the {what} holds no readable PEM block of type {expected}; restore it from a backup")]
    Pem {
        /// Which credential.
        what: &'static str,
        /// The block type looked for, such as `CERTIFICATE`.
        expected: &'static str,
    },
    /// The PEM block doesn't hold a certificate.
    #[error("the certificate cannot be parsed: {reason}")]
    CertificateUnreadable {
        /// The parser's reason; names ASN.1 structures, not contents.
        reason: String,
    },
    /// The private key is damaged, encrypted or of a kind not supported.
    #[error(
        "the {what} cannot be read; RSA (2048 bits or more), P-256 and P-384 keys without a passphrase are supported"
    )]
    KeyUnreadable {
        /// Which credential.
        what: &'static str,
    },
    /// The public key is damaged.
    #[error("the {what} cannot be read as a PKIX public key")]
    PublicKeyUnreadable {
        /// Which credential.
        what: &'static str,
    },
    /// The certificate in the root CA's place is not a CA.
    #[error(
        "the root CA certificate is not a CA (basicConstraints CA:TRUE is missing); restore the right certificate"
    )]
    NotACertificateAuthority,
    /// The CA's key usage forbids signing certificates.
    #[error("the root CA certificate may not sign certificates (its key usage lacks keyCertSign)")]
    MayNotSign,
    /// The CA's subject can't be repeated byte for byte as an issuer.
    #[error(
        "the root CA certificate's subject has a form that cannot be reproduced in the certificates it signs"
    )]
    SubjectUnsupported,
    /// Certificate (or public key) and private key are from different pairs.
    #[error("the {what} does not belong to its private key; restore both halves from the same backup")]
    KeyMismatch {
        /// Which credential.
        what: &'static str,
    },
    /// The CA is from the future.
    #[error("the root CA certificate is not valid before {not_before}; check this machine's clock")]
    NotYetValid {
        /// Start of its life.
        not_before: Timestamp,
    },
    /// The CA is past its end.
    #[error(
        "the root CA certificate expired at {not_after}; the tenant needs a new root CA, which all its clients must be given"
    )]
    Expired {
        /// End of its life.
        not_after: Timestamp,
    },
    /// A time that X.509 or the calendar cannot express.
    #[error("the time {at} plus or minus the validity cannot be expressed in a certificate")]
    TimeOutOfRange {
        /// The time started from.
        at: Timestamp,
    },
    /// Key generation failed.
    #[error("cannot generate a key")]
    Generate(#[source] rcgen::Error),
    /// Building or signing a certificate failed.
    #[error("cannot sign the certificate for {common_name}")]
    Sign {
        /// The certificate's common name.
        common_name: String,
        /// What the library says.
        source: rcgen::Error,
    },
    /// A freshly signed certificate did not verify against its own CA.
    #[error("the certificate just signed for {common_name} does not verify against the root CA")]
    SelfCheck {
        /// The certificate's common name.
        common_name: String,
    },
    /// A key came out in a form that could not be rewritten.
    #[error("cannot encode a generated RSA key as PKCS#1")]
    Encode,
    /// A name that cannot be a DNS name.
    #[error("{name:?} ({role}) is not a DNS name: {reason}")]
    InvalidName {
        /// The name refused.
        name: String,
        /// What it was wanted for.
        role: &'static str,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// The etcd leaf was asked for but the tenant has no etcd of its own.
    #[error(
        "the etcd certificate needs the names of an etcd StatefulSet and Service, and the ClusterVersion has none"
    )]
    EtcdNamesMissing,
    /// More members than any etcd could have.
    #[error("etcd with {replicas} replicas is not supported; at most {ETCD_REPLICAS_MAX} are")]
    TooManyEtcdReplicas {
        /// The number asked for.
        replicas: u32,
    },
    /// `spec.pkiExpireDays` out of range.
    #[error("spec.pkiExpireDays is {days}; it must be from 1 to {}", Validity::MAX_DAYS)]
    InvalidExpireDays {
        /// The number asked for.
        days: i64,
    },
    /// Not the name of a key algorithm.
    #[error("unknown key algorithm {given:?}; use ecdsa-p256 or rsa-2048")]
    UnknownKeyAlgorithm {
        /// The name given.
        given: String,
    },
    /// A Secret lacks data it must have, or the data isn't text.
    #[error("Secret {secret} has no text under the data key {key:?}")]
    SecretData {
        /// Name of the Secret.
        secret: String,
        /// The data key.
        key: String,
    },
    /// A kubeconfig that isn't one, or not of the kind this manager writes.
    #[error("the kubeconfig cannot be used: {problem}")]
    Kubeconfig {
        /// What is wrong with it.
        problem: String,
    },
}
