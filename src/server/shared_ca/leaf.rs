//! The certificate of this replica: when to take a new one, and for which names. Pure, but for the signing.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use tokio::time::Instant;

use super::lifetimes::Lifetimes;
use crate::pki::{Authority, CertificateInfo, ExtendedUsage, KeyAlgorithm, LeafRequest, renew_at_spread};
use crate::server::configurations::Configuration;
use crate::server::source::service_names;
use crate::server::tls::certified_key;

/// The names a certificate is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    dns: BTreeSet<String>,
    ips: BTreeSet<IpAddr>,
}

impl Names {
    /// Those of our Services in `namespace`, and those the API server is sent to.
    pub(super) fn wanted(namespace: &str, configurations: &[Configuration]) -> Self {
        let mut names = Self {
            dns: service_names(namespace).into_iter().collect(),
            ips: BTreeSet::new(),
        };
        let webhooks = configurations
            .iter()
            .flat_map(|configuration| &configuration.webhooks);
        for host in webhooks.filter_map(|webhook| webhook.host.as_ref()) {
            match host {
                ServerName::DnsName(name) => {
                    names.dns.insert(name.as_ref().to_owned());
                }
                ServerName::IpAddress(address) => {
                    names.ips.insert(IpAddr::from(*address));
                }
                _ => {}
            }
        }
        names
    }
}

/// A certificate in use. Its key is in memory only.
#[derive(Debug)]
pub(super) struct Leaf {
    /// The CA that signed it (DER).
    issuer: Vec<u8>,
    names: Names,
    renew_at: Timestamp,
    not_after: Timestamp,
}

/// How the CAs of a leaf and of the Secret stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing<'a> {
    /// The CA that signs now (DER).
    pub(super) signer: &'a [u8],
    /// End of its life.
    pub(super) signer_not_after: Timestamp,
    /// Whether that one has been trusted everywhere for long enough.
    pub(super) settled: bool,
}

/// What to do about the certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Take a new one, for the reason given.
    Issue(&'static str),
    /// Keep it; look again then.
    Keep(Timestamp),
}

impl Leaf {
    /// Signs one, with a fresh key.
    pub(super) fn issue(
        signer: &Authority,
        names: Names,
        lifetimes: Lifetimes,
        seed: &str,
        now: Timestamp,
    ) -> anyhow::Result<(Self, CertifiedKey)> {
        let request = LeafRequest {
            common_name: "vc-manager".to_owned(),
            organization: None,
            usages: &[ExtendedUsage::ServerAuth],
            dns_names: names.dns.iter().cloned().collect(),
            ip_addresses: names.ips.iter().copied().collect(),
        };
        let (not_before, not_after) = lifetimes.of_leaf(now);
        let pair = signer.issue_between(&request, KeyAlgorithm::EcdsaP256, not_before, not_after, now)?;
        let info = CertificateInfo::parse(&pair.certificate_pem)?;
        let certified = certified_key(pair.certificate_pem.as_bytes(), pair.key_pem.as_bytes())?;
        let leaf = Self {
            issuer: signer.certificate_der().to_vec(),
            names,
            renew_at: renew_at_spread(info.not_before, info.not_after, seed),
            not_after: info.not_after,
        };
        Ok((leaf, certified))
    }

    /// Whether this CA (DER) signed it.
    pub(super) fn is_from(&self, signer: &[u8]) -> bool {
        self.issuer == signer
    }

    /// When to take the next one, if nothing else calls for it.
    pub(super) fn renew_at(&self) -> Timestamp {
        self.renew_at
    }

    /// End of its life.
    pub(super) fn not_after(&self) -> Timestamp {
        self.not_after
    }

    /// What to do about it. `trusts` says whether a CA is, or will be, trusted by those who call.
    pub(super) fn decide(
        &self,
        names: &Names,
        standing: Standing<'_>,
        trusts: impl FnOnce(&[u8]) -> bool,
        now: Timestamp,
    ) -> Decision {
        if now > self.not_after {
            return Decision::Issue("the previous one has expired");
        }
        if !self.is_from(standing.signer) {
            if standing.settled {
                return Decision::Issue("its CA was replaced");
            }
            // Nobody takes the present one, so there is nothing to wait for.
            if !trusts(&self.issuer) {
                return Decision::Issue("its CA is no longer trusted");
            }
            return Decision::Keep(self.not_after);
        }
        if *names != self.names {
            return Decision::Issue("its names have changed");
        }
        // A CA near its end, which somebody else has to replace, has nothing longer to give.
        if standing.signer_not_after <= self.not_after {
            return Decision::Keep(self.not_after);
        }
        if now >= self.renew_at {
            return Decision::Issue("two thirds of its life are over");
        }
        Decision::Keep(self.renew_at)
    }
}

/// For how long the CA that signs has been trusted everywhere without a break, as far as this replica saw.
#[derive(Debug, Default)]
pub(super) struct Settling {
    signer: Vec<u8>,
    since: Option<Instant>,
}

impl Settling {
    /// Notes what is seen `now`. Says how long is left of `settle`, if it has begun at all.
    pub(super) fn observe(
        &mut self,
        signer: &[u8],
        everywhere: bool,
        settle: Duration,
        now: Instant,
    ) -> Option<Duration> {
        if self.signer != signer {
            signer.clone_into(&mut self.signer);
            self.since = None;
        }
        if !everywhere {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(now);
        Some(settle.saturating_sub(now.duration_since(since)))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::SignedDuration;

    use super::*;
    use crate::pki::testing::now;
    use crate::server::configurations::{Kind, Webhook};
    use crate::server::shared_ca::lifetimes::later;

    const LIVES: Lifetimes = Lifetimes {
        ca: Duration::from_hours(900),
        leaf: Duration::from_hours(90),
    };

    fn at(hours: i64) -> Timestamp {
        later(now(), SignedDuration::from_hours(hours))
    }

    fn authority() -> Authority {
        let (from, to) = LIVES.of_ca(at(0));
        Authority::create_for_leaves("ca", from, to, at(0)).unwrap().0
    }

    fn configuration(hosts: &[&str]) -> Configuration {
        let webhook = |host: &&str| Webhook {
            name: (*host).to_owned(),
            host: ServerName::try_from((*host).to_owned()).ok(),
            trusted: Vec::new(),
        };
        Configuration {
            kind: Kind::Mutating,
            resource_version: String::new(),
            injected: false,
            webhooks: hosts.iter().map(webhook).collect(),
        }
    }

    #[test]
    fn names_are_ours_and_those_that_are_called() {
        let names = Names::wanted("ns", &[configuration(&["127.0.0.1", "::1", "hook.example.com"])]);
        let signer = authority();
        let (_, certified) = Leaf::issue(&signer, names, LIVES, "seed", at(0)).unwrap();
        let info = CertificateInfo::from_der(certified.cert[0].to_vec()).unwrap();
        assert!(info.is_issued_by(&signer) && info.server_auth && !info.client_auth);
        for name in [
            "localhost",
            "hook.example.com",
            "vc-manager.ns.svc",
            "virtualcluster-webhook-service.ns.svc",
        ] {
            assert!(info.dns_names.iter().any(|dns| dns == name), "{name}");
        }
        let addresses: Vec<String> = info.ip_addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["127.0.0.1", "::1"]);
        assert_eq!((info.not_before, info.not_after), (at(-1), at(90)));
    }

    #[test]
    fn when_to_take_a_new_one() {
        use Decision::{Issue, Keep};
        let signer = authority();
        let names = Names::wanted("ns", &[]);
        let other = Names::wanted("ns", &[configuration(&["127.0.0.1"])]);
        let (leaf, _) = Leaf::issue(&signer, names.clone(), LIVES, "seed", at(0)).unwrap();
        let (own, new) = (signer.certificate_der(), &b"another"[..]);
        let due = leaf.renew_at;
        assert!(due <= at(60) && due >= at(50), "{due}");
        let renewal = Issue("two thirds of its life are over");
        let replaced = Issue("its CA was replaced");
        let lost = Issue("its CA is no longer trusted");
        let expired = Issue("the previous one has expired");
        let renamed = Issue("its names have changed");
        // Who signs, settled or not, are we trusted; names; the hour.
        for (signer, settled, trusted, names, now, expected) in [
            (own, true, true, &names, at(1), Keep(due)),
            (own, false, false, &names, at(1), Keep(due)),
            (own, true, true, &names, due, renewal),
            (own, true, true, &other, at(1), renamed),
            (own, true, true, &names, at(91), expired),
            (new, false, true, &names, at(1), Keep(at(90))),
            (new, false, true, &other, at(80), Keep(at(90))),
            (new, true, true, &names, at(1), replaced),
            (new, false, false, &names, at(1), lost),
            (new, false, true, &names, at(91), expired),
        ] {
            let standing = Standing {
                signer,
                signer_not_after: at(900),
                settled,
            };
            let decision = leaf.decide(names, standing, |issuer| trusted && issuer == own, now);
            assert_eq!(decision, expected, "{settled} {trusted} {now}");
        }
        // A CA that ends with the leaf: a new one would be no better.
        let ending = Standing {
            signer: own,
            signer_not_after: at(90),
            settled: true,
        };
        assert_eq!(leaf.decide(&names, ending, |_| true, at(80)), Keep(at(90)));
    }

    #[test]
    fn settling_begins_anew_with_every_break() {
        let second = Duration::from_secs(1);
        let mut settling = Settling::default();
        let start = Instant::now();
        let mut observe = |signer: &[u8], everywhere, seconds| {
            settling.observe(signer, everywhere, second * 3, start + second * seconds)
        };
        assert_eq!(observe(b"a", false, 0), None);
        assert_eq!(observe(b"a", true, 1), Some(second * 3));
        assert_eq!(observe(b"a", true, 3), Some(second));
        assert_eq!(observe(b"a", false, 3), None);
        assert_eq!(observe(b"a", true, 4), Some(second * 3));
        assert_eq!(observe(b"a", true, 8), Some(Duration::ZERO));
        assert_eq!(observe(b"b", true, 9), Some(second * 3));
    }
}
