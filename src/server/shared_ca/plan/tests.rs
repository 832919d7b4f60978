//! CAs are letters here: `a` is made at hour 0, `b` at 610, `c` at 1220; each lives for 900 hours, a leaf for 100.

use std::time::Duration;

use k8s_openapi::jiff::SignedDuration;

use super::*;
use crate::pki::testing::now;
use crate::pki::{KeyAlgorithm, LeafRequest};
use crate::server::shared_ca::lifetimes::later;

const LIVES: Lifetimes = Lifetimes {
    ca: Duration::from_hours(900),
    leaf: Duration::from_hours(100),
};

fn at(hours: i64) -> Timestamp {
    later(now(), SignedDuration::from_hours(hours))
}

fn made(hour: i64) -> (CertificateInfo, CertifiedPair) {
    let (from, to) = LIVES.of_ca(at(hour));
    let (authority, pair) = Authority::create_for_leaves("ca", from, to, at(hour)).unwrap();
    let info = CertificateInfo::from_der(authority.certificate_der().to_vec()).unwrap();
    (info, pair)
}

/// Everything there is to choose from.
struct World(Vec<(char, CertificateInfo, CertifiedPair)>);

impl World {
    fn new() -> Self {
        let [a, b, c] = [0, 610, 1220].map(made);
        let signer = Authority::load(&a.1.certificate_pem, &a.1.key_pem, now()).unwrap();
        let request = LeafRequest {
            common_name: "leaf".into(),
            organization: None,
            usages: &[],
            dns_names: Vec::new(),
            ip_addresses: Vec::new(),
        };
        let leaf = signer.issue_between(&request, KeyAlgorithm::EcdsaP256, at(0), at(100), at(1));
        let leaf = leaf.unwrap();
        let with_key = |key: &str| CertifiedPair {
            key_pem: key.to_owned().into(),
            ..a.1.clone()
        };
        Self(vec![
            // The certificate of a, with a key of another and with none; a leaf of a.
            ('x', a.0.clone(), with_key(&b.1.key_pem)),
            ('-', a.0.clone(), with_key("")),
            ('l', CertificateInfo::parse(&leaf.certificate_pem).unwrap(), leaf),
            ('a', a.0, a.1),
            ('b', b.0, b.1),
            ('c', c.0, c.1),
        ])
    }

    fn of(&self, letter: char) -> &(char, CertificateInfo, CertifiedPair) {
        self.0.iter().find(|(name, ..)| *name == letter).unwrap()
    }

    fn list(&self, letters: &str) -> Vec<CertificateInfo> {
        letters.chars().map(|letter| self.of(letter).1.clone()).collect()
    }

    fn letters(&self, list: &[CertificateInfo]) -> String {
        let letter = |ca: &CertificateInfo| self.0.iter().rfind(|(_, info, _)| info == ca).unwrap().0;
        list.iter().map(letter).collect()
    }

    /// The letter of the pair, then those of the list; `?` before them if it is not ours; nothing if there is none.
    fn stored(&self, text: &str) -> Option<Stored> {
        let ours = !text.starts_with('?');
        let mut letters = text.trim_start_matches('?').chars();
        let (_, _, pair) = self.of(letters.next()?);
        Some(Stored {
            ours,
            pair: Ok(pair.clone()),
            trusted: self.list(letters.as_str()),
        })
    }

    /// The plan in a word, and whom it trusts.
    fn told(&self, hour: i64, stored: &str, published: &str) -> (&'static str, String) {
        let plan = plan(at(hour), self.stored(stored), &self.list(published), LIVES);
        let (word, list) = match &plan {
            Plan::Keep(usable) => ("keep", &usable.trusted),
            Plan::Amend(usable) => ("amend", &usable.trusted),
            Plan::Replace { because, retired } => match because {
                Reason::Missing => ("missing", retired),
                Reason::Due(_) => ("due", retired),
                Reason::Unusable(_) => ("unusable", retired),
            },
            Plan::NotYet(_) => return ("not yet", String::new()),
            Plan::Foreign(_) => return ("foreign", String::new()),
        };
        (word, self.letters(list))
    }
}

#[test]
fn table() {
    let world = World::new();
    for (case, hour, stored, published, word, trusted) in [
        ("the very first", 0, "", "", "missing", ""),
        ("deleted", 1, "", "a", "missing", "a"),
        ("deleted amid a rotation", 620, "", "bab", "missing", "ba"),
        ("what is expired is not kept", 901, "", "ba", "missing", "b"),
        ("nor what is no CA", 1, "", "la", "missing", "a"),
        ("in order", 1, "aa", "a", "keep", "a"),
        ("still young enough", 598, "aa", "a", "keep", "a"),
        ("two thirds over", 601, "aa", "a", "due", "a"),
        ("expired", 901, "aa", "a", "unusable", ""),
        ("not begun", -2, "aa", "", "not yet", ""),
        ("halves of two", 1, "xa", "a", "unusable", "a"),
        ("no key", 1, "-a", "", "unusable", "a"),
        ("no key, no list", 1, "-", "a", "unusable", "a"),
        ("a leaf", 1, "la", "a", "unusable", "a"),
        ("overlap", 709, "bba", "ba", "keep", "ba"),
        ("overlap is over", 711, "bba", "ba", "amend", "b"),
        ("a retired one expired", 1230, "cca", "", "amend", "c"),
        ("the third", 1230, "ccb", "", "keep", "cb"),
        ("wrong order", 620, "bab", "", "amend", "ba"),
        ("signer not listed", 620, "ba", "", "amend", "ba"),
        ("twice in the list", 1, "aaa", "", "amend", "a"),
        ("somebody else's, usable", 1, "?a", "", "keep", "a"),
        ("is not renewed", 700, "?aa", "", "keep", "a"),
        ("nor trimmed", 800, "?bba", "", "keep", "ba"),
        ("nor replaced", 901, "?aa", "a", "foreign", ""),
        ("nor mended", 1, "?-a", "a", "foreign", ""),
    ] {
        let told = world.told(hour, stored, published);
        assert_eq!(told, (word, trusted.to_owned()), "{case}");
    }
}

#[test]
fn the_next_look_is_when_the_plan_changes() {
    let world = World::new();
    let review = |hour, stored| match plan(at(hour), world.stored(stored), &[], LIVES) {
        Plan::Keep(usable) => usable.review,
        other => panic!("{other:?}"),
    };
    let due = review(1, "aa");
    assert!(matches!(
        plan(due, world.stored("aa"), &[], LIVES),
        Plan::Replace { .. }
    ));
    let done = review(620, "bba");
    assert!(matches!(
        plan(done, world.stored("bba"), &[], LIVES),
        Plan::Amend(_)
    ));
    assert_eq!(
        done.duration_since(at(710)).as_secs(),
        10,
        "a leaf's life and settling"
    );
}

#[test]
fn the_list_is_bounded() {
    let many: Vec<CertificateInfo> = (0..20).map(|hour| made(hour).0).collect();
    let Plan::Replace { retired, .. } = plan(at(30), None, &many, LIVES) else {
        panic!("there was none")
    };
    assert_eq!(retired.len(), RETIRED_MAX);
    assert_eq!(retired[0], many[19]);
}

#[test]
fn reasons_do_not_speak_of_tenants() {
    let world = World::new();
    for (hour, stored, text) in [
        (601, "aa", "two thirds of its life are over; it expires at "),
        (901, "aa", "it expired at "),
        (1, "xa", "its key belongs to another certificate"),
        (1, "la", "it may not sign certificates"),
        (1, "-a", "it cannot be read: "),
        (1, "", "there is none"),
    ] {
        let Plan::Replace { because, .. } = plan(at(hour), world.stored(stored), &[], LIVES) else {
            panic!("{stored}")
        };
        assert!(because.to_string().starts_with(text), "{because}");
    }
}
