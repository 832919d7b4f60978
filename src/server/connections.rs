//! The open connections of a listener, and which of them has to make room for a new one.
//!
//! A listener takes so many connections and no more. When all are taken, the one that has been idle the longest goes,
//! so that peers who open connections and leave them lying keep nobody else out. One that is busy never goes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio_util::sync::CancellationToken;

/// All open connections.
pub(super) struct Connections {
    began: Instant,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    by_id: BTreeMap<u64, Arc<Activity>>,
}

/// What a connection has been doing.
pub(super) struct Activity {
    began: Instant,
    requests: AtomicU64,
    in_flight: AtomicUsize,
    /// When it was last busy, in milliseconds since the listener began.
    last: AtomicU64,
    /// It has to make room.
    pub(super) evicted: CancellationToken,
}

impl Connections {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            open: Mutex::default(),
        }
    }

    /// Notes a new connection, for as long as what is returned lives.
    pub(super) fn enter(self: &Arc<Self>) -> Entered {
        let activity = Arc::new(Activity {
            began: self.began,
            requests: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            last: AtomicU64::new(millis(self.began)),
            evicted: CancellationToken::new(),
        });
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let id = open.next;
        open.next += 1;
        open.by_id.insert(id, Arc::clone(&activity));
        Entered {
            connections: Arc::clone(self),
            id,
            activity,
        }
    }

    /// Asks the connection that has been idle the longest to go. False if all are busy or going.
    pub(super) fn evict(&self) -> bool {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = open
            .by_id
            .values()
            .filter(|activity| activity.in_flight() == 0 && !activity.evicted.is_cancelled());
        // Of those idle for the same time the first to come goes first.
        let longest = idle.min_by_key(|activity| activity.last.load(Ordering::Relaxed));
        longest.map(|activity| activity.evicted.cancel()).is_some()
    }
}

/// A connection's place among the open ones.
pub(super) struct Entered {
    connections: Arc<Connections>,
    id: u64,
    pub(super) activity: Arc<Activity>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut open = self
            .connections
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        open.by_id.remove(&self.id);
    }
}

impl Activity {
    /// Notes a request, in flight for as long as what is returned lives.
    pub(super) fn begin(self: &Arc<Self>) -> InFlight {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Requests that have no answer yet.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// A request in flight.
pub(super) struct InFlight(Arc<Activity>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.last.store(millis(self.0.began), Ordering::Relaxed);
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_idle_goes_and_a_busy_one_never() {
        let connections = Arc::new(Connections::new());
        let (busy, served, silent) = (connections.enter(), connections.enter(), connections.enter());
        let _request = busy.activity.begin();
        std::thread::sleep(std::time::Duration::from_millis(5));
        drop(served.activity.begin());
        let evicted = || [&busy, &served, &silent].map(|entered| entered.activity.evicted.is_cancelled());
        assert!(connections.evict());
        assert_eq!(evicted(), [false, false, true]);
        assert!(connections.evict());
        assert_eq!(evicted(), [false, true, true]);
        assert!(!connections.evict());
        drop(silent);
        assert_eq!(connections.open.lock().unwrap().by_id.len(), 2);
    }
}
