//! How long things live, and what follows from that.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::pki::CertificateInfo;

/// How far certificates are dated back at most, for peers whose clock is behind.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);
/// How long a bundle is published at most before certificates that need it are served.
const SETTLE: Duration = Duration::from_secs(10);

/// Lives of the CA and of what it signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    /// Of the CA.
    pub ca: Duration,
    /// Of a replica's certificate; shorter than that.
    pub leaf: Duration,
}

impl Lifetimes {
    /// How long a bundle has to be published before certificates that need it are served: API servers learn of it by
    /// a watch, one later than another. Ten seconds, less if certificates live for less than that is worth.
    #[must_use]
    pub fn settle(self) -> Duration {
        SETTLE.min(self.leaf / 10)
    }

    /// Start and end of a CA made `now`.
    pub(super) fn of_ca(self, now: Timestamp) -> (Timestamp, Timestamp) {
        span(now, self.ca)
    }

    /// Start and end of a leaf made `now`.
    pub(super) fn of_leaf(self, now: Timestamp) -> (Timestamp, Timestamp) {
        span(now, self.leaf)
    }

    /// Whether there may be API servers that have not heard of a CA yet, going by its age. It takes a moment from the
    /// Secret to the configurations, too.
    pub(super) fn is_news(self, ca: &CertificateInfo, now: Timestamp) -> bool {
        now < later(made_at(ca), signed(self.settle() * 2))
    }

    /// From when on no certificate can be alive that an older CA than `newest` has signed: replicas sign with the
    /// newest one they know.
    pub(super) fn older_are_done(self, newest: &CertificateInfo) -> Timestamp {
        later(made_at(newest), signed(self.leaf + self.settle()))
    }
}

/// A tenth of `life`, or an hour if that is less, lies in the past, so that two thirds of the whole still mean
/// something when lives are short.
fn span(now: Timestamp, life: Duration) -> (Timestamp, Timestamp) {
    let life = signed(life);
    (later(now, -(life / 10).min(CLOCK_SKEW)), later(now, life))
}

/// When a certificate was made that begins as [`span`] says.
fn made_at(info: &CertificateInfo) -> Timestamp {
    let whole = info.not_after.duration_since(info.not_before);
    later(info.not_before, (whole / 11).min(CLOCK_SKEW))
}

pub(super) fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.checked_add(by).unwrap_or(at)
}

pub(super) fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::testing::now;
    use crate::pki::{Authority, CertificateInfo};

    #[test]
    fn settling_is_short_against_any_life() {
        let settle = |leaf| Lifetimes { ca: leaf * 3, leaf }.settle();
        assert_eq!(settle(Duration::from_hours(720)), Duration::from_secs(10));
        assert_eq!(settle(Duration::from_secs(10)), Duration::from_secs(1));
    }

    #[test]
    fn the_moment_of_making_is_found_again() {
        for ca in [
            Duration::from_secs(44),
            Duration::from_hours(2),
            Duration::from_hours(8760),
        ] {
            let lifetimes = Lifetimes { ca, leaf: ca / 2 };
            let (from, to) = lifetimes.of_ca(now());
            let (authority, _) = Authority::create_for_leaves("ca", from, to, now()).unwrap();
            let info = CertificateInfo::from_der(authority.certificate_der().to_vec()).unwrap();
            let off = made_at(&info).duration_since(now()).abs();
            assert!(off <= SignedDuration::from_secs(1), "{ca:?}: {off}");
            let done = lifetimes.older_are_done(&info);
            let expected = later(now(), signed(ca / 2 + lifetimes.settle()));
            assert!(done.duration_since(expected).abs() <= SignedDuration::from_secs(1));
        }
    }
}
