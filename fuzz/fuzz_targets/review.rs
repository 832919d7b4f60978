//! Reviews of any bytes: nothing panics, and what is answered is right whatever was asked.
//!
//! bytes → [`Review::parse`] → every rule that is a pure function → the answer, which has to be JSON; the patch in it
//! has to fit, to leave all else as it is, and to have nothing to do a second time.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use serde_json::{Value, json};
use vc_manager::admission::cluster::User;
use vc_manager::admission::cluster_version::{self, default, frozen, rules, trial, versions};
use vc_manager::admission::review::Review;
use vc_manager::admission::verdict::{Findings, Verdict};
use vc_manager::admission::virtual_cluster;

fuzz_target!(|bytes: &[u8]| {
    let Ok(review) = Review::parse(bytes) else {
        return;
    };
    mutated(&review);
    validated(&review);
    let Findings { faults, warnings } = virtual_cluster::check(&review);
    answered(&review, &Verdict::invalid(faults, warnings));
    for verdict in [Verdict::allowed(), Verdict::forbidden(review.name.as_str())] {
        answered(&review, &verdict);
    }
});

/// Mutation refuses nothing, and its patch makes the object it is meant to make.
fn mutated(review: &Review) {
    let verdict = cluster_version::mutate(review);
    let Verdict::Allowed { patch, .. } = &verdict else {
        panic!("mutation refuses: {verdict:?}");
    };
    let answer = answered(review, &verdict);
    assert_eq!(answer["response"].get("patch").is_some(), !patch.is_empty());
    if patch.is_empty() {
        return;
    }
    let spec = review
        .object
        .as_ref()
        .map(|object| &object.spec)
        .expect("it is patched");
    let old = review.old_object.as_ref().map(|object| &object.spec);
    let mut patched = json!({"spec": spec});
    json_patch::patch(&mut patched, patch).expect("the patch fits");
    assert_eq!(
        default::patch(&patched["spec"], old),
        (vec![], vec![]),
        "a second pass"
    );
    // Without the one field, both are the same.
    let mut before = json!({"spec": spec});
    for object in [&mut before, &mut patched] {
        for bundle in ["etcd", "apiServer", "controllerManager"] {
            if let Some(Value::Object(set)) =
                object["spec"].pointer_mut(&format!("/{bundle}/statefulset/spec"))
            {
                set.remove("updateStrategy");
            }
        }
    }
    assert_eq!(before, patched);
}

/// One that has no revision yet, so that the stored text is what counts.
fn tenant() -> User {
    User {
        key: "namespace/name".into(),
        pins: Vec::new(),
    }
}

/// The rules hold for any spec, and what they find can be told.
fn validated(review: &Review) {
    let (object, old) = (review.object.as_ref(), review.old_object.as_ref());
    let old = old.map(|object| &object.spec);
    if let Some(old) = old {
        let _ = rules::check(old, None);
    }
    let Some(spec) = object.map(|object| &object.spec) else {
        return;
    };
    let found = rules::check(spec, old);
    let mut warnings = found.warnings;
    let trials = trial::trials(spec, old, "vc-manager");
    for trial in &trials {
        assert_eq!(trial.object["metadata"]["namespace"], "vc-manager");
    }
    let mut faults = found.faults;
    if let Some(old) = old {
        warnings.extend(versions::warnings(spec, old));
        faults.extend(frozen::faults(spec, old, &[tenant()], &BTreeMap::new()));
        if spec == old && spec.is_object() {
            assert!(
                faults.is_empty() && trials.is_empty(),
                "nothing has changed: {faults:?}"
            );
        }
    }
    let verdict = Verdict::invalid(trial::merged(faults.clone(), faults), warnings);
    if let Verdict::Refused { refusal, .. } = &verdict {
        assert!(!refusal.message(review).is_empty() && !refusal.reasons().is_empty());
    }
    answered(review, &verdict);
}

/// The answer as the API server reads it.
fn answered(review: &Review, verdict: &Verdict) -> Value {
    let answer = review.answer(verdict).expect("an answer");
    let answer: Value = serde_json::from_slice(&answer).expect("an answer in JSON");
    assert_eq!(
        answer["response"]["allowed"],
        matches!(verdict, Verdict::Allowed { .. })
    );
    answer
}

// --- Mutations --------------------------------------------------------------------------------------------------------

// Half of the time one that keeps it JSON: bytes alone seldom get past the parser.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut chance = Chance(u64::from(seed) | 1 << 32);
    if chance.below(2) == 0
        && let Ok(mut value) = serde_json::from_slice::<Value>(&data[..size])
    {
        for _ in 0..=chance.below(3) {
            change(&mut value, &mut chance);
        }
        let text = value.to_string();
        if text.len() <= max_size.min(data.len()) {
            data[..text.len()].copy_from_slice(text.as_bytes());
            return text.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
});

/// Keys that rules look for.
const KEYS: [&str; 26] = [
    "apiVersion",
    "kind",
    "metadata",
    "name",
    "generateName",
    "deletionTimestamp",
    "labels",
    "spec",
    "status",
    "etcd",
    "apiServer",
    "controllerManager",
    "upgradePolicy",
    "canary",
    "windows",
    "statefulset",
    "service",
    "updateStrategy",
    "type",
    "template",
    "containers",
    "ports",
    "selector",
    "volumeClaimTemplates",
    "a/b~c",
    "",
];

/// Puts something else in one place.
fn change(value: &mut Value, chance: &mut Chance) {
    let count = count(value);
    let other = nth(value, chance.below(count)).cloned().unwrap_or_default();
    let Some(place) = nth_mut(value, chance.below(count)) else {
        return;
    };
    match (chance.below(5), place) {
        (0, Value::Object(map)) => {
            map.insert(KEYS[chance.below(KEYS.len())].to_owned(), other);
        }
        (1, Value::Object(map)) => {
            if let Some(key) = map.keys().nth(chance.below(map.len().max(1))).cloned() {
                map.remove(&key);
            }
        }
        (0 | 1, Value::Array(items)) => items.push(other),
        (2, place) => *place = other,
        (_, place) => {
            *place = match chance.below(8) {
                0 => Value::Null,
                1 => json!({}),
                2 => json!([]),
                3 => json!(""),
                4 => json!(-1),
                5 => json!(u64::MAX),
                6 => json!("ä".repeat(chance.below(300))),
                _ => json!(chance.below(2) == 0),
            }
        }
    }
}

fn children(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(map) => Box::new(map.values()),
        _ => Box::new(std::iter::empty()),
    }
}

/// Values in `value`, itself included.
fn count(value: &Value) -> usize {
    1 + children(value).map(count).sum::<usize>()
}

fn nth(value: &Value, mut index: usize) -> Option<&Value> {
    if index == 0 {
        return Some(value);
    }
    index -= 1;
    for child in children(value) {
        let size = count(child);
        if index < size {
            return nth(child, index);
        }
        index -= size;
    }
    None
}

fn nth_mut(value: &mut Value, mut index: usize) -> Option<&mut Value> {
    if index == 0 {
        return Some(value);
    }
    index -= 1;
    let children: Box<dyn Iterator<Item = &mut Value>> = match value {
        Value::Array(items) => Box::new(items.iter_mut()),
        Value::Object(map) => Box::new(map.values_mut()),
        _ => return None,
    };
    for child in children {
        let size = count(child);
        if index < size {
            return nth_mut(child, index);
        }
        index -= size;
    }
    None
}

/// Random numbers that a seed decides (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit.max(1) as u64).unwrap_or_default()
    }
}
