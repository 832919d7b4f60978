//! A record of every state that objects go through, by way of a watch, which leaves none out.

use std::{
    fmt::Debug,
    sync::{Arc, Mutex},
};

use futures::TryStreamExt as _;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

/// Every state of the objects of one kind since it was started, in order.
pub struct Recorder<K> {
    states: Arc<Mutex<Vec<K>>>,
    task: JoinHandle<()>,
}

impl<K> Recorder<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Starts recording; returns once the watch stands.
    pub async fn start(api: Api<K>) -> Self {
        let states = Arc::new(Mutex::new(Vec::new()));
        let (standing, stands) = tokio::sync::oneshot::channel();
        let task = {
            let states = Arc::clone(&states);
            tokio::spawn(async move {
                let mut standing = Some(standing);
                let events = watcher(api, watcher::Config::default()).default_backoff();
                let recorded = events.try_for_each(|event| {
                    match event {
                        watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                            states.lock().expect("nobody panicked in it").push(object);
                        }
                        watcher::Event::InitDone => {
                            if let Some(standing) = standing.take() {
                                let _ = standing.send(());
                            }
                        }
                        _ => {}
                    }
                    futures::future::ready(Ok(()))
                });
                recorded.await.expect("the watch goes on");
            })
        };
        stands.await.expect("the watch begins");
        Self { states, task }
    }

    /// What was recorded so far.
    pub fn states(&self) -> Vec<K> {
        assert!(!self.task.is_finished(), "the watch broke off");
        self.states.lock().expect("nobody panicked in it").clone()
    }
}

impl<K> Drop for Recorder<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}
