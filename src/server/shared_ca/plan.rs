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
mod tests {
    use std::time::Duration;

    use k8s_openapi::jiff::SignedDuration;

    use super::*;
    use crate::pki::testing::now;
    use crate::server::shared_ca::lifetimes::later;

    const HOUR: Duration = Duration::from_hours(1);
    const LIVES: Lifetimes = Lifetimes {
        ca: Duration::from_hours(900),
        leaf: Duration::from_hours(100),
    };

    fn at(hours: i64) -> Timestamp {
        later(now(), SignedDuration::from_hours(hours))
    }

    /// A CA made at an hour.
    fn made(hour: i64) -> (CertificateInfo, CertifiedPair) {
        let (from, to) = LIVES.of_ca(at(hour));
        let (authority, pair) = Authority::create_for_leaves("ca", from, to, at(hour)).unwrap();
        let info = CertificateInfo::from_der(authority.certificate_der().to_vec()).unwrap();
        (info, pair)
    }

    fn stored(pair: &CertifiedPair, trusted: &[&CertificateInfo]) -> Option<Stored> {
        Some(Stored {
            ours: true,
            pair: Ok(pair.clone()),
            trusted: trusted.iter().copied().cloned().collect(),
        })
    }

    fn foreign(pair: &CertifiedPair, trusted: &[&CertificateInfo]) -> Option<Stored> {
        let stored = stored(pair, trusted)?;
        Some(Stored {
            ours: false,
            ..stored
        })
    }

    /// The plan in a word, and whom it trusts.
    fn told(plan: &Plan) -> (&'static str, &[CertificateInfo]) {
        match plan {
            Plan::Keep(usable) => ("keep", &usable.trusted),
            Plan::Amend(usable) => ("amend", &usable.trusted),
            Plan::Replace { because, retired } => match because {
                Reason::Missing => ("missing", retired),
                Reason::Due(_) => ("due", retired),
                Reason::Unusable(_) => ("unusable", retired),
            },
            Plan::Foreign(_) => ("foreign", &[]),
        }
    }

    #[test]
    fn table() {
        let (first, first_pair) = made(0);
        let (second, second_pair) = made(610);
        let (third, third_pair) = made(1220);
        let leaf = {
            let authority = Authority::load(&first_pair.certificate_pem, &first_pair.key_pem, now()).unwrap();
            let request = crate::pki::LeafRequest {
                common_name: "leaf".into(),
                organization: None,
                usages: &[],
                dns_names: Vec::new(),
                ip_addresses: Vec::new(),
            };
            authority
                .issue_between(
                    &request,
                    crate::pki::KeyAlgorithm::EcdsaP256,
                    at(0),
                    at(100),
                    at(1),
                )
                .unwrap()
        };
        let leaf_info = CertificateInfo::parse(&leaf.certificate_pem).unwrap();
        let half = CertifiedPair {
            certificate_pem: first_pair.certificate_pem.clone(),
            key_pem: second_pair.key_pem.clone(),
        };
        let no_key = CertifiedPair {
            certificate_pem: first_pair.certificate_pem.clone(),
            key_pem: String::new().into(),
        };
        let (first, second, third) = (&first, &second, &third);
        let cases: Vec<(
            &str,
            i64,
            Option<Stored>,
            Vec<&CertificateInfo>,
            &str,
            Vec<&CertificateInfo>,
        )> = vec![
            ("the very first", 0, None, vec![], "missing", vec![]),
            ("deleted", 1, None, vec![first], "missing", vec![first]),
            (
                "deleted amid a rotation",
                620,
                None,
                vec![second, first, second],
                "missing",
                vec![second, first],
            ),
            (
                "what is expired is not kept",
                901,
                None,
                vec![second, first],
                "missing",
                vec![second],
            ),
            (
                "nor what is no CA",
                1,
                None,
                vec![&leaf_info, first],
                "missing",
                vec![first],
            ),
            (
                "in order",
                1,
                stored(&first_pair, &[first]),
                vec![first],
                "keep",
                vec![first],
            ),
            (
                "still young enough",
                598,
                stored(&first_pair, &[first]),
                vec![first],
                "keep",
                vec![first],
            ),
            (
                "two thirds over",
                601,
                stored(&first_pair, &[first]),
                vec![first],
                "due",
                vec![first],
            ),
            (
                "expired",
                901,
                stored(&first_pair, &[first]),
                vec![first],
                "unusable",
                vec![],
            ),
            (
                "not begun",
                -2,
                stored(&first_pair, &[first]),
                vec![],
                "unusable",
                vec![first],
            ),
            (
                "halves of two",
                1,
                stored(&half, &[first]),
                vec![first],
                "unusable",
                vec![first],
            ),
            (
                "no key",
                1,
                stored(&no_key, &[first]),
                vec![],
                "unusable",
                vec![first],
            ),
            (
                "no key, no list",
                1,
                stored(&no_key, &[]),
                vec![first],
                "unusable",
                vec![first],
            ),
            (
                "a leaf",
                1,
                stored(&leaf, &[first]),
                vec![first],
                "unusable",
                vec![first],
            ),
            (
                "overlap",
                709,
                stored(&second_pair, &[second, first]),
                vec![second, first],
                "keep",
                vec![second, first],
            ),
            (
                "overlap is over",
                711,
                stored(&second_pair, &[second, first]),
                vec![second, first],
                "amend",
                vec![second],
            ),
            (
                "a retired one expired",
                1230,
                stored(&third_pair, &[third, first]),
                vec![],
                "amend",
                vec![third],
            ),
            (
                "third of three",
                1230,
                stored(&third_pair, &[third, second]),
                vec![],
                "keep",
                vec![third, second],
            ),
            (
                "wrong order",
                620,
                stored(&second_pair, &[first, second]),
                vec![],
                "amend",
                vec![second, first],
            ),
            (
                "signer not listed",
                620,
                stored(&second_pair, &[first]),
                vec![],
                "amend",
                vec![second, first],
            ),
            (
                "twice in the list",
                1,
                stored(&first_pair, &[first, first]),
                vec![],
                "amend",
                vec![first],
            ),
            (
                "another's, usable",
                1,
                foreign(&first_pair, &[]),
                vec![],
                "keep",
                vec![first],
            ),
            (
                "another's is not renewed",
                700,
                foreign(&first_pair, &[first]),
                vec![],
                "keep",
                vec![first],
            ),
            (
                "nor trimmed",
                800,
                foreign(&second_pair, &[second, first]),
                vec![],
                "keep",
                vec![second, first],
            ),
            (
                "nor replaced",
                901,
                foreign(&first_pair, &[first]),
                vec![first],
                "foreign",
                vec![],
            ),
            (
                "nor mended",
                1,
                foreign(&no_key, &[first]),
                vec![first],
                "foreign",
                vec![],
            ),
        ];
        for (name, hour, stored, published, word, trusted) in cases {
            let published: Vec<CertificateInfo> = published.into_iter().cloned().collect();
            let plan = plan(at(hour), stored, &published, LIVES);
            let (told, kept) = told(&plan);
            assert_eq!(told, word, "{name}");
            assert!(kept.iter().eq(trusted), "{name}: {kept:#?}");
        }
    }

    #[test]
    fn the_next_look_is_when_the_plan_changes() {
        let (first, first_pair) = made(0);
        let (second, second_pair) = made(610);
        let review = |hour, stored| match plan(at(hour), stored, &[], LIVES) {
            Plan::Keep(usable) => usable.review,
            other => panic!("{other:?}"),
        };
        let due = review(1, stored(&first_pair, &[&first]));
        assert_eq!(
            told(&plan(due, stored(&first_pair, &[&first]), &[], LIVES)).0,
            "due"
        );
        let done = review(620, stored(&second_pair, &[&second, &first]));
        let amended = plan(done, stored(&second_pair, &[&second, &first]), &[], LIVES);
        assert_eq!(told(&amended).0, "amend");
        assert_eq!(done.duration_since(at(710)).as_secs(), 10, "leaf and settling");
    }

    #[test]
    fn the_list_is_bounded() {
        let many: Vec<CertificateInfo> = (0..20).map(|hour| made(hour).0).collect();
        let plan = plan(at(30), None, &many, LIVES);
        let (_, kept) = told(&plan);
        assert_eq!(kept.len(), RETIRED_MAX);
        assert_eq!(kept[0], many[19]);
        assert!(at(30) < later(at(0), SignedDuration::try_from(HOUR * 900).unwrap()));
    }

    #[test]
    fn reasons_are_told_without_speaking_of_tenants() {
        let (first, first_pair) = made(0);
        for (hour, pair, text) in [
            (901, first_pair.clone(), "it expired at "),
            (-2, first_pair.clone(), "it is valid from "),
            (
                1,
                CertifiedPair {
                    key_pem: String::new().into(),
                    ..first_pair
                },
                "it cannot be read: ",
            ),
        ] {
            let Plan::Replace { because, .. } = plan(at(hour), stored(&pair, &[&first]), &[], LIVES) else {
                panic!("replaced")
            };
            assert!(because.to_string().starts_with(text), "{because}");
        }
    }
}
