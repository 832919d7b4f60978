//! What is remembered of objects that were put back: so that nobody fights over one for ever.
//!
//! It lives in memory. After a restart of the manager an object may be put back a few times more; the condition that
//! says it was contested goes only when it is as it should be.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Mutex, PoisonError},
};

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{
    TenantKey,
    plan::{Known, ObjectId},
};

/// Times an object is put back within [`WINDOW`]; after that it is left.
const LIMIT: usize = 4;
/// In which they are counted, and for how long it is left the first time. Each time it comes to that again, it is left for
/// twice as long as before.
const WINDOW: SignedDuration = SignedDuration::from_hours(1);
/// The longest it is left. Whoever has not changed it for so long has given up.
const LONGEST: SignedDuration = SignedDuration::from_hours(24);

/// What was put back, by tenant and object.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    tenants: Mutex<BTreeMap<TenantKey, BTreeMap<ObjectId, Memory>>>,
}

#[derive(Debug, Default)]
struct Memory {
    times: VecDeque<Timestamp>,
    /// Until when it is left.
    left_until: Option<Timestamp>,
    /// For how long it was left the last time.
    left_for: Option<SignedDuration>,
    settled: BTreeSet<String>,
}

impl Repairs {
    /// What is known of the objects of a tenant.
    pub(super) fn known(&self, key: &TenantKey, now: Timestamp) -> BTreeMap<ObjectId, Known> {
        let mut tenants = self.lock();
        let Some(objects) = tenants.get_mut(key) else {
            return BTreeMap::new();
        };
        objects
            .iter_mut()
            .map(|(id, memory)| {
                memory.forget_old(now);
                let known = Known {
                    contested: memory.left_until.is_some_and(|until| now < until),
                    settled: memory.settled.clone(),
                };
                (id.clone(), known)
            })
            .collect()
    }

    /// When an object that is contested now may be put back again.
    pub(super) fn again(&self, key: &TenantKey, now: Timestamp) -> Option<Timestamp> {
        let tenants = self.lock();
        let objects = tenants.get(key)?.values();
        objects
            .filter_map(|memory| memory.left_until)
            .filter(|until| now < *until)
            .min()
    }

    /// An object was put back.
    pub(super) fn put_back(&self, key: &TenantKey, id: ObjectId, now: Timestamp) {
        let mut tenants = self.lock();
        let memory = tenants.entry(key.clone()).or_default().entry(id).or_default();
        memory.forget_old(now);
        memory.times.push_back(now);
        if memory.times.len() >= LIMIT {
            let pause = memory.left_for.map_or(WINDOW, |before| (before * 2).min(LONGEST));
            memory.left_for = Some(pause);
            memory.left_until = now.checked_add(pause).ok();
            memory.times.clear();
        }
    }

    /// An object was applied because of these paths, and nothing changed.
    pub(super) fn settled(&self, key: &TenantKey, id: ObjectId, paths: impl Iterator<Item = String>) {
        let mut tenants = self.lock();
        let memory = tenants.entry(key.clone()).or_default().entry(id).or_default();
        memory.settled.extend(paths);
    }

    /// Drops what is known of a tenant.
    pub(super) fn forget(&self, key: &TenantKey) {
        self.lock().remove(key);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<TenantKey, BTreeMap<ObjectId, Memory>>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn forget_old(&mut self, now: Timestamp) {
        while self
            .times
            .front()
            .is_some_and(|time| now.duration_since(*time) >= WINDOW)
        {
            self.times.pop_front();
        }
        if self
            .left_until
            .is_some_and(|until| now.duration_since(until) > LONGEST)
        {
            self.left_until = None;
            self.left_for = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_left_after_a_few_times_and_taken_up_again_later() {
        let key = TenantKey {
            namespace: "ns".into(),
            name: "tenant".into(),
        };
        let id: ObjectId = ("Service", "apiserver-svc".into());
        let at = |minutes: i64| Timestamp::from_second(minutes * 60).expect("a time");
        let repairs = Repairs::default();
        let contested = |now| {
            repairs
                .known(&key, now)
                .get(&id)
                .is_some_and(|known| known.contested)
        };
        for minute in 0..3 {
            repairs.put_back(&key, id.clone(), at(minute));
            assert!(!contested(at(minute)));
        }
        assert_eq!(repairs.again(&key, at(2)), None);
        repairs.put_back(&key, id.clone(), at(3));
        assert!(contested(at(3)) && contested(at(62)));
        assert_eq!(repairs.again(&key, at(3)), Some(at(63)));
        assert!(!contested(at(63)));
        // Whoever goes on is met ever more seldom.
        for minute in 63..67 {
            repairs.put_back(&key, id.clone(), at(minute));
        }
        assert_eq!(repairs.again(&key, at(66)), Some(at(66 + 120)));
        assert!(contested(at(66 + 119)) && !contested(at(66 + 120)));
        repairs.forget(&key);
        assert!(repairs.known(&key, at(300)).is_empty());
    }
}
