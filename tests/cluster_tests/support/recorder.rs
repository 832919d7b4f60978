//! Records every state that objects of a kind went through, as a watch shows them.

use std::{
    fmt::Debug,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use futures::StreamExt as _;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

/// States of objects in the order they came, each with the moment it was seen. A deleted object's last state is not
/// told apart: it carries its deletion timestamp.
pub(crate) struct Recorder<K> {
    states: Arc<Mutex<Vec<(Instant, K)>>>,
    task: JoinHandle<()>,
}

impl<K> Recorder<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Starts recording all that `api` shows.
    pub(crate) fn start(api: Api<K>) -> Self {
        let states = Arc::<Mutex<Vec<_>>>::default();
        let seen = Arc::clone(&states);
        let task = tokio::spawn(async move {
            let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
            while let Some(event) = events.next().await {
                use watcher::Event::{Apply, Delete, InitApply};
                if let Ok(Apply(object) | InitApply(object) | Delete(object)) = event {
                    lock(&seen).push((Instant::now(), object));
                }
            }
        });
        Self { states, task }
    }

    /// All states so far.
    pub(crate) fn states(&self) -> Vec<(Instant, K)> {
        lock(&self.states).clone()
    }
}

impl<K> Drop for Recorder<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
