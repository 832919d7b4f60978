//! Turns: how many tenants may be in some costly state at once.
//!
//! The start of an apiserver costs several seconds of CPU, and one that is starved is killed by its own probes;
//! so only so many tenants start, and only so many upgrade, at once. The rest wait in the order they came.
//! Turns live in memory, which is enough: there is one leader, and after a restart every tenant that is in the
//! middle takes its turn back, above the limit if need be.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::mpsc::UnboundedSender;

/// Whoever waits asks again within this time. One that does not has gone, or cannot go on: its place is another's.
const ABSENT: Duration = Duration::from_secs(90);

/// A queue of turns for tenants, each known by `K`.
#[derive(Debug)]
pub(super) struct Turns<K> {
    limit: usize,
    /// A turn held longer than this no longer counts: its tenant is stuck, and must not keep others waiting.
    patience: Duration,
    state: Mutex<State<K>>,
    /// Who is told that it is its turn.
    wake: UnboundedSender<K>,
}

#[derive(Debug)]
struct State<K> {
    holding: BTreeMap<K, Instant>,
    /// Who waits, and when it last asked.
    waiting: VecDeque<(K, Instant)>,
}

impl<K: Ord + Clone> Turns<K> {
    /// At most `limit` turns at once. Whoever waits is sent to `wake` when a turn is free for it.
    #[must_use]
    pub(super) fn new(limit: usize, patience: Duration, wake: UnboundedSender<K>) -> Self {
        let state = Mutex::new(State {
            holding: BTreeMap::new(),
            waiting: VecDeque::new(),
        });
        Self {
            limit,
            patience,
            state,
            wake,
        }
    }

    /// Takes a turn if one is free and nobody came before; else queues up. Idempotent.
    pub(super) fn take(&self, key: &K, now: Instant) -> bool {
        let mut state = self.lock();
        if state.holding.contains_key(key) {
            return true;
        }
        match state.waiting.iter_mut().find(|(waiting, _)| waiting == key) {
            Some((_, asked)) => *asked = now,
            None => state.waiting.push_back((key.clone(), now)),
        }
        state
            .waiting
            .retain(|(_, asked)| now.duration_since(*asked) < ABSENT);
        let place = state
            .waiting
            .iter()
            .position(|(waiting, _)| waiting == key)
            .unwrap_or(usize::MAX);
        let held = self.held(&state, now);
        if place < self.limit.saturating_sub(held) {
            state.waiting.retain(|(waiting, _)| waiting != key);
            state.holding.insert(key.clone(), now);
            return true;
        }
        false
    }

    /// Whether `key` has its turn, and that still counts.
    pub(super) fn holds(&self, key: &K, now: Instant) -> bool {
        let state = self.lock();
        let since = state.holding.get(key);
        since.is_some_and(|since| now.duration_since(*since) < self.patience)
    }

    /// Holds a turn whatever the limit: its holder is in the middle already.
    pub(super) fn keep(&self, key: &K, now: Instant) {
        let mut state = self.lock();
        state.waiting.retain(|(waiting, _)| waiting != key);
        state.holding.entry(key.clone()).or_insert(now);
    }

    /// Gives a turn back, or leaves the queue, and tells whose turn it is now.
    pub(super) fn give_back(&self, key: &K, now: Instant) {
        let mut state = self.lock();
        state.holding.remove(key);
        state.waiting.retain(|(waiting, _)| waiting != key);
        let free = self.limit.saturating_sub(self.held(&state, now));
        for (next, _) in state.waiting.iter().take(free) {
            // The receiver is gone only when the controller is.
            let _ = self.wake.send(next.clone());
        }
    }

    fn held(&self, state: &State<K>, now: Instant) -> usize {
        let counts = |since: &&Instant| now.duration_since(**since) < self.patience;
        state.holding.values().filter(counts).count()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State<K>> {
        // A panic while it was held leaves a queue that is at worst too strict.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    #[test]
    fn turns_go_round_in_order() {
        let (wake, mut woken) = unbounded_channel();
        let turns = Turns::new(2, PATIENCE, wake);
        let now = Instant::now();
        assert!(turns.take(&1, now) && turns.take(&2, now) && turns.take(&1, now));
        assert!(!turns.take(&3, now) && !turns.take(&4, now));
        turns.give_back(&1, now);
        assert_eq!(woken.try_recv(), Ok(3));
        assert!(!turns.take(&4, now), "3 came before");
        assert!(turns.take(&3, now));
        assert!(!turns.take(&4, now));
    }

    #[test]
    fn a_stuck_holder_does_not_keep_others_waiting() {
        let (wake, _woken) = unbounded_channel();
        let turns = Turns::new(1, PATIENCE, wake);
        let now = Instant::now();
        assert!(turns.take(&1, now));
        assert!(!turns.take(&2, now + PATIENCE / 2));
        assert!(turns.take(&2, now + PATIENCE));
    }

    #[test]
    fn who_is_in_the_middle_keeps_its_turn_above_the_limit() {
        let (wake, mut woken) = unbounded_channel();
        let turns = Turns::new(1, PATIENCE, wake);
        let now = Instant::now();
        turns.keep(&1, now);
        turns.keep(&2, now);
        assert!(!turns.take(&3, now));
        turns.give_back(&1, now);
        assert!(woken.try_recv().is_err(), "2 still holds one");
        turns.give_back(&2, now);
        assert_eq!(woken.try_recv(), Ok(3));
    }

    #[test]
    fn who_does_not_ask_again_loses_its_place() {
        let (wake, _woken) = unbounded_channel();
        let turns = Turns::new(1, Duration::MAX, wake);
        let now = Instant::now();
        assert!(turns.take(&1, now));
        assert!(!turns.take(&2, now) && !turns.take(&3, now + ABSENT / 2));
        turns.give_back(&1, now + ABSENT / 2);
        assert!(!turns.take(&3, now + ABSENT / 2), "2 came before");
        assert!(turns.take(&3, now + ABSENT), "2 has not asked again");
    }

    #[test]
    fn who_leaves_the_queue_makes_room() {
        let (wake, mut woken) = unbounded_channel();
        let turns = Turns::new(1, PATIENCE, wake);
        let now = Instant::now();
        assert!(turns.take(&1, now));
        assert!(!turns.take(&2, now) && !turns.take(&3, now));
        turns.give_back(&2, now);
        assert!(woken.try_recv().is_err());
        turns.give_back(&1, now);
        assert_eq!(woken.try_recv(), Ok(3));
    }
}
