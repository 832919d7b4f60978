//! What is to become of the shared CA: pure, in the time, the Secret, and what is published.

use std::cmp::Reverse;
use std::fmt;

use k8s_openapi::jiff::Timestamp;

use super::lifetimes::Lifetimes;
use crate::pki::{Authority, CertificateInfo, CertifiedPair, PkiError, renew_at};

/// Retired CAs that are kept at most, the newest ones. Only a Secret that is deleted again and again has more.
const RETIRED_MAX: usize = 16;

/// What the Secret holds.
#[derive(Debug)]
pub(super) struct Stored {
    /// Whether it says that it is ours to write.
    pub(super) ours: bool,
    /// The CA that signs; an error if there is no pair at all.
    pub(super) pair: Result<CertifiedPair, PkiError>,
    /// The CAs to be trusted, as they are stored.
    pub(super) trusted: Vec<CertificateInfo>,
}

/// A CA that can sign, and whom to trust besides.
#[derive(Debug)]
pub(super) struct Usable {
    /// The CA that signs.
    pub(super) signer: Authority,
    /// All CAs to be trusted: the signer, and retired ones, newest first.
    pub(super) trusted: Vec<CertificateInfo>,
    /// When to look at this again, though nothing changes.
    pub(super) review: Timestamp,
}

/// What to do about the Secret.
#[derive(Debug)]
pub(super) enum Plan {
    /// Nothing.
    Keep(Usable),
    /// Write the list of trusted CAs: one has to go, or the list is not what it should be.
    Amend(Usable),
    /// Make a CA, and write it with these retired ones.
    Replace {
        /// Why.
        because: Reason,
        /// CAs whose certificates may still be served, newest first.
        retired: Vec<CertificateInfo>,
    },
    /// The CA begins to be valid at this time only. Clocks are wrong, and replicas whose clocks differ must not replace
    /// each other's CAs for ever.
    NotYet(Timestamp),
    /// The Secret is somebody else's and cannot be used. It is left alone.
    Foreign(PkiError),
}

/// Why a CA is made.
#[derive(Debug)]
pub(super) enum Reason {
    /// There is no Secret.
    Missing,
    /// Its life comes to an end.
    Due(Timestamp),
    /// What is stored cannot sign.
    Unusable(PkiError),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is none"),
            Self::Due(not_after) => write!(f, "two thirds of its life are over; it expires at {not_after}"),
            // Its own texts speak of the root CA of a tenant.
            Self::Unusable(PkiError::KeyMismatch { .. }) => {
                f.write_str("its key belongs to another certificate")
            }
            Self::Unusable(PkiError::Expired { not_after }) => write!(f, "it expired at {not_after}"),
            Self::Unusable(PkiError::NotYetValid { not_before }) => {
                write!(f, "it is valid from {not_before} only")
            }
            Self::Unusable(PkiError::NotACertificateAuthority | PkiError::MayNotSign) => {
                f.write_str("it may not sign certificates")
            }
            Self::Unusable(error) => write!(f, "it cannot be read: {error}"),
        }
    }
}

/// What to do, given the Secret and the CAs that are published at the moment.
pub(super) fn plan(
    now: Timestamp,
    stored: Option<Stored>,
    published: &[CertificateInfo],
    lifetimes: Lifetimes,
) -> Plan {
    let Some(stored) = stored else {
        // Running replicas have their certificates from what is published.
        return Plan::Replace {
            because: Reason::Missing,
            retired: retired(published.iter(), now),
        };
    };
    let usable = stored.pair.and_then(|pair| {
        let signer = Authority::load(&pair.certificate_pem, &pair.key_pem, now)?;
        let info = CertificateInfo::from_der(signer.certificate_der().to_vec())?;
        Ok((signer, info))
    });
    let because = match usable {
        Ok((signer, _)) if stored.ours && renew_at(signer.not_before(), signer.not_after()) <= now => {
            Reason::Due(signer.not_after())
        }
        Ok((signer, info)) => return keep(now, stored.ours, signer, info, &stored.trusted, lifetimes),
        Err(error) if !stored.ours => return Plan::Foreign(error),
        Err(PkiError::NotYetValid { not_before }) => return Plan::NotYet(not_before),
        Err(error) => Reason::Unusable(error),
    };
    Plan::Replace {
        because,
        retired: retired(stored.trusted.iter().chain(published), now),
    }
}

fn keep(
    now: Timestamp,
    ours: bool,
    signer: Authority,
    info: CertificateInfo,
    stored: &[CertificateInfo],
    lifetimes: Lifetimes,
) -> Plan {
    let newest = stored.iter().chain([&info]).max_by_key(|ca| ca.not_before);
    let done = newest.map_or(now, |newest| lifetimes.older_are_done(newest));
    let others = stored.iter().filter(|ca| **ca != info && (!ours || now < done));
    let others = retired(others, now);
    let mut review = signer.not_after();
    if ours {
        review = renew_at(signer.not_before(), signer.not_after());
        if !others.is_empty() {
            review = review.min(done);
        }
    }
    let review = others.iter().map(|ca| ca.not_after).fold(review, Ord::min);
    let mut trusted = vec![info];
    trusted.extend(others);
    let as_stored = trusted == stored;
    let usable = Usable {
        signer,
        trusted,
        review,
    };
    if as_stored || !ours {
        Plan::Keep(usable)
    } else {
        Plan::Amend(usable)
    }
}

/// The CAs among `candidates` that are of use still: newest first, each once.
fn retired<'a>(
    candidates: impl Iterator<Item = &'a CertificateInfo>,
    now: Timestamp,
) -> Vec<CertificateInfo> {
    let mut kept: Vec<CertificateInfo> = Vec::new();
    for candidate in candidates {
        if candidate.is_ca && now <= candidate.not_after && !kept.contains(candidate) {
            kept.push(candidate.clone());
        }
    }
    kept.sort_by_key(|ca| Reverse(ca.not_before));
    kept.truncate(RETIRED_MAX);
    kept
}

#[cfg(test)]
mod tests;
