//! Three years of tenants in a super cluster in memory, from renewal to renewal: no certificate in use ever ends while
//! the manager is there, and nothing is restarted that could have taken it up.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vc_manager::{
    api::Component,
    controller::{
        plan::Effect,
        reload,
        render::{self, TenantSecret},
    },
    pki::CertifiedPair,
};

use crate::{
    fixture::now,
    real::{LEAVES, Plane, ROOT, Rest, days, name, names, root, with_claims},
};

const YEARS: i64 = 3;
/// How long the manager is away, once, in the middle of the second year.
const AWAY: i64 = 60;
/// Time for the kubelet and for pods that are replaced.
const A_WHILE: SignedDuration = SignedDuration::from_mins(15);

/// What a tenant is like.
#[derive(Clone, Copy, Debug)]
struct Kind {
    days: i64,
    paused: bool,
    adopted: bool,
    probe: bool,
}

/// How a tenant fared.
struct Life {
    plane: Plane,
    renewals: Vec<Timestamp>,
}

impl Life {
    fn begin(kind: Kind, root: &CertifiedPair) -> Self {
        let mut plane = if kind.adopted {
            Plane::left_by_go(now() + days(3), root)
        } else {
            let mut plane = Plane::new(with_claims(), root);
            plane.tenant.pki_expire_days = Some(kind.days);
            plane.provision();
            plane
        };
        plane.tenant.pki_expire_days = Some(kind.days);
        plane.paused = kind.paused;
        plane.probe = kind.probe;
        plane.later(SignedDuration::ZERO);
        plane.settle_well();
        assert!(plane.log.is_empty(), "{kind:?}");
        Self {
            plane,
            renewals: Vec::new(),
        }
    }

    /// The manager is there until then, and looks whenever something is due.
    fn watched_until(&mut self, end: Timestamp) {
        loop {
            let status = self.plane.credentials().status;
            let renew_at = status.renew_at.expect("a time").0;
            assert!(renew_at > self.plane.now);
            if self.renewals.len().is_multiple_of(16) {
                self.looks_in_vain(self.plane.now + renew_at.duration_since(self.plane.now) / 2);
            }
            if renew_at > end {
                break;
            }
            self.renewal(renew_at);
            // As it stands all the time until it is due.
            self.plane.at(self.plane.now + A_WHILE);
            self.assert_well();
        }
        self.plane.at(end);
        self.assert_well();
    }

    fn renewal(&mut self, at: Timestamp) {
        self.plane.at(at);
        self.assert_well();
        let once = self.plane.once();
        let done = self.plane.log.len();
        self.catch_up(at);
        let effects = names(&self.plane.log[done..]);
        let mut expected = vec![
            "issue apiserver-ca etcd-ca front-proxy-ca controller-manager-kubeconfig admin-kubeconfig",
            "restart controller-manager",
        ];
        if !self.plane.probe {
            // Nobody sees what it serves.
            expected.insert(1, "restart apiserver");
        }
        assert_eq!(effects, expected, "at {at}");
        let kept = self.plane.once();
        assert_eq!(kept, once, "made once");
    }

    fn catch_up(&mut self, at: Timestamp) {
        let rest = self.plane.settle();
        assert_eq!(rest, Rest::Done);
        self.renewals.push(at);
    }

    fn looks_in_vain(&mut self, at: Timestamp) {
        let done = self.plane.log.len();
        self.plane.at(at);
        self.assert_well();
        assert_eq!(self.plane.look(), Rest::Done);
        assert_eq!(self.plane.log.len(), done);
    }

    fn assert_well(&self) {
        assert_eq!(self.plane.expired(), [""; 0], "in use at {}", self.plane.now);
    }
}

fn three_years(kind: Kind, root: &CertifiedPair) -> Life {
    let mut life = Life::begin(kind, root);
    let first = life.plane.once();
    life.watched_until(now() + days(365 + 180));
    // Nobody is there: what ends meanwhile has ended.
    let status = life.plane.credentials().status;
    let (due, end) = (
        status.renew_at.expect("a time").0,
        status.not_after.expect("a time").0,
    );
    let back = now() + days(365 + 180 + AWAY);
    life.plane.at(back);
    assert_eq!(life.plane.expired().is_empty(), back <= end, "{kind:?}");
    assert!(kind.days > 7 || end < back);
    if due <= back {
        life.catch_up(back);
        life.plane.at(life.plane.now + A_WHILE);
    }
    life.assert_well();
    life.watched_until(now() + days(365 * YEARS));

    let Life { plane, renewals } = &life;
    let kept = plane.once();
    assert_eq!(kept, first, "{kind:?}: the keys that are made once");
    let count = u32::try_from(renewals.len()).expect("few");
    for which in LEAVES {
        assert_eq!(plane.issued[&which], count, "{kind:?}: {which}");
    }
    for component in Component::ALL {
        // What the table demands, and for who cannot see, the apiserver.
        let hashed = render::hashed(component).iter();
        let cannot_take_up = hashed
            .filter(|which| which.leaf().is_some())
            .any(|which| !reload::reloads(component, *which));
        let unseen = component == Component::ApiServer && !kind.probe;
        let demanded = if cannot_take_up || unseen { count } else { 0 };
        assert_eq!(plane.restarts(component), demanded, "{kind:?}: {component}");
    }
    assert_eq!(plane.restarts(Component::ControllerManager), count);
    assert_eq!(plane.restarts(Component::Etcd), 0);
    for effect in &plane.log {
        assert!(
            matches!(effect, Effect::Issue { .. } | Effect::Restart(_)),
            "{kind:?}: {}",
            name(effect)
        );
    }
    life
}

/// As many renewals as lives of this length need, all but the years' ends and the absence being full.
fn assert_count(kind: Kind, life: &Life) {
    let begin = if kind.adopted { 365 * 17 / 30 } else { 0 };
    // At 17 to 20 thirtieths of a life.
    let (fewest, most) = (
        (365 * YEARS - begin - AWAY - 365) * 30 / (kind.days * 20) - 1,
        (365 * YEARS - begin) * 30 / (kind.days * 17) + 2,
    );
    let count = i64::try_from(life.renewals.len()).expect("few");
    assert!(
        fewest <= count && count <= most,
        "{kind:?}: {count} of {fewest} to {most}"
    );
}

fn all(days: i64, probe: bool) -> [Kind; 4] {
    [(false, false), (true, false), (false, true), (true, true)].map(|(paused, adopted)| Kind {
        days,
        paused,
        adopted,
        probe,
    })
}

#[test]
fn of_tenants_with_leaves_for_a_year() {
    for kind in all(365, true).into_iter().chain(all(365, false)) {
        assert_count(kind, &three_years(kind, &ROOT));
    }
}

#[test]
fn of_tenants_with_leaves_for_a_quarter() {
    for kind in all(90, true).into_iter().chain(all(90, false)) {
        assert_count(kind, &three_years(kind, &ROOT));
    }
}

#[test]
fn of_a_tenant_with_leaves_for_a_week() {
    // A smaller root CA: there are hundreds of renewals.
    let root = root(now() - days(1), now() + days(3650));
    let [kind, ..] = all(7, true);
    let life = three_years(kind, &root);
    assert_count(kind, &life);
    assert!(life.renewals.len() > 200);
}

#[test]
fn of_one_that_is_taken_over_and_paused_with_leaves_for_a_week() {
    let root = root(now() - days(1), now() + days(3650));
    let [.., kind] = all(7, true);
    assert_count(kind, &three_years(kind, &root));
}

/// A world in which files do not follow their Secrets at all: certificates would end in use, were the apiserver not seen
/// to serve the old one.
#[test]
fn of_a_tenant_whose_files_do_not_follow() {
    let mut plane = Plane::running();
    plane.files_follow = false;
    for _ in 0..4 {
        let renew_at = plane.credentials().status.renew_at.expect("a time").0;
        plane.at(renew_at);
        assert_eq!(plane.settle(), Rest::Done);
        plane.at(renew_at + A_WHILE);
        assert_eq!(plane.settle(), Rest::Done);
        plane.roll_out_all();
        let stale: Vec<_> = plane
            .processes
            .iter()
            .filter(|(component, process)| {
                process.uses.iter().any(|(which, der)| {
                    Some(der) != plane.certificate(*which).as_ref() && **component != Component::Etcd
                })
            })
            .map(|(component, _)| *component)
            .collect();
        assert_eq!(stale, []);
    }
    assert_eq!(plane.restarts(Component::ApiServer), 4);
    assert_eq!(plane.restarts(Component::ControllerManager), 4);
    assert_eq!(plane.restarts(Component::Etcd), 0);
    // So it would be with etcd, which is never restarted for it: it is told instead.
    let etcd = &plane.observed.secrets[TenantSecret::Etcd.name()];
    let told = vc_manager::controller::plan::serving_older(&plane.observed, Component::Etcd, etcd, plane.now);
    assert_eq!(told, ["etcd-0"]);
}
