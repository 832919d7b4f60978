//! Plays the StatefulSet controller and the pods of a test's tenants: a StatefulSet rolls out after a moment, unless
//! it is held.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt as _;
use k8s_openapi::api::{apps::v1::StatefulSet, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::{Value, json};
use tokio::{sync::Notify, task::JoinHandle};
use vc_manager::api::cluster_version::canonical_hash;

use super::Scope;

/// How long pods take to start.
const STARTUP: Duration = Duration::from_millis(60);

/// The player. Dropping it ends it.
pub struct Driver {
    stage: Arc<Stage>,
    task: JoinHandle<()>,
}

struct Stage {
    client: Client,
    prefix: String,
    held: Mutex<BTreeSet<(String, String)>>,
    released: Notify,
}

impl Driver {
    /// Starts one for the tenants of `scope`.
    pub fn start(scope: &Scope) -> Self {
        let stage = Arc::new(Stage {
            client: scope.client.clone(),
            prefix: format!("{}-", scope.namespace),
            held: Mutex::default(),
            released: Notify::new(),
        });
        let task = tokio::spawn(play(Arc::clone(&stage)));
        Self { stage, task }
    }

    /// From now on pods of this StatefulSet of this tenant do not become ready.
    pub fn hold(&self, tenant: &str, set: &str) {
        self.stage
            .held
            .lock()
            .expect("nobody panicked in it")
            .insert((tenant.to_owned(), set.to_owned()));
    }

    /// Undoes [`Self::hold`].
    pub fn release(&self, tenant: &str, set: &str) {
        self.stage
            .held
            .lock()
            .expect("nobody panicked in it")
            .remove(&(tenant.to_owned(), set.to_owned()));
        self.stage.released.notify_one();
    }

    /// Makes the pod `<set>-0` of a StatefulSet, with one container in this state (as in `containerStatuses`).
    pub async fn make_pod(&self, root_namespace: &str, set: &str, container: Value) -> Pod {
        let sets: Api<StatefulSet> = Api::namespaced(self.stage.client.clone(), root_namespace);
        let set = sets.get(set).await.expect("the StatefulSet");
        let spec = set.spec.as_ref().expect("a spec");
        let template = &spec.template;
        let mut labels = template
            .metadata
            .as_ref()
            .and_then(|meta| meta.labels.clone())
            .unwrap_or_default();
        labels.insert("controller-revision-hash".into(), revision(&set));
        let name = format!("{}-0", set.name_any());
        let first = &template.spec.as_ref().expect("a pod spec").containers[0];
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels, "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "StatefulSet", "name": set.name_any(), "uid": set.uid(),
                "controller": true, "blockOwnerDeletion": false,
            }]},
            "spec": {
                "automountServiceAccountToken": false,
                "containers": [{"name": first.name, "image": first.image}],
                // Nobody would answer for the end of its containers.
                "terminationGracePeriodSeconds": 0,
            },
        }))
        .expect("a pod");
        let pods: Api<Pod> = Api::namespaced(self.stage.client.clone(), root_namespace);
        pods.create(&PostParams::default(), &pod)
            .await
            .expect("it is accepted");
        let mut status = json!({"name": first.name, "image": first.image, "imageID": "", "ready": false, "restartCount": 0});
        let fields = container.as_object().expect("an object").clone();
        status.as_object_mut().expect("an object").extend(fields);
        let patch = json!({"status": {"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [status]}});
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("it is accepted")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn play(stage: Arc<Stage>) {
    let api = Api::<StatefulSet>::all(stage.client.clone());
    let mut events = watcher(api, watcher::Config::default())
        .default_backoff()
        .applied_objects()
        .boxed();
    let mut seen = BTreeMap::new();
    loop {
        let sets: Vec<StatefulSet> = tokio::select! {
            event = events.next() => match event {
                Some(Ok(set)) => vec![set],
                Some(Err(_)) => continue,
                None => return,
            },
            () = stage.released.notified() => seen.values().cloned().collect(),
        };
        for set in sets {
            let namespace = set.namespace().unwrap_or_default();
            let Some(tenant) = namespace
                .strip_prefix(&stage.prefix)
                .and_then(|rest| rest.get(7..))
            else {
                continue;
            };
            seen.insert((namespace.clone(), set.name_any()), set.clone());
            let tenant = tenant.to_owned();
            tokio::spawn(roll_out(Arc::clone(&stage), tenant, set));
        }
    }
}

/// First the moment where the old pods are gone and the new ones not ready, then the end, if it may come.
async fn roll_out(stage: Arc<Stage>, tenant: String, mut set: StatefulSet) {
    let name = set.name_any();
    let api: Api<StatefulSet> = Api::namespaced(stage.client.clone(), &set.namespace().unwrap_or_default());
    let wanted = set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let update = revision(&set);
    let status = set.status.clone().unwrap_or_default();
    let current = status.current_revision.clone().unwrap_or_else(|| update.clone());
    let is_seen = status.observed_generation == set.metadata.generation;
    let is_same = status.current_revision.as_ref() == Some(&update) && status.ready_replicas == Some(wanted);
    if is_seen && is_same && status.replicas == wanted {
        return;
    }
    let put = async |set: &StatefulSet, ready: i32, current: &str| {
        let patch = json!({
            "metadata": {"resourceVersion": set.metadata.resource_version},
            "status": {
                "observedGeneration": set.metadata.generation, "replicas": wanted,
                "readyReplicas": ready, "availableReplicas": ready,
                "currentReplicas": if current == update { wanted } else { 0 }, "updatedReplicas": wanted,
                "currentRevision": current, "updateRevision": update,
            },
        });
        // One that was changed or deleted meanwhile is played anew, or not at all.
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .ok()
    };
    if !is_seen && !is_same {
        let Some(written) = put(&set, 0, &current).await else {
            return;
        };
        set = written;
    }
    tokio::time::sleep(STARTUP).await;
    let held = stage
        .held
        .lock()
        .expect("nobody panicked in it")
        .contains(&(tenant, name.clone()));
    if !held {
        put(&set, wanted, &update).await;
    }
}

/// Name of the revision of a StatefulSet's pods: another one for another template.
fn revision(set: &StatefulSet) -> String {
    let template = set.spec.as_ref().map(|spec| &spec.template);
    let template = serde_json::to_value(template).expect("JSON");
    format!("{}-{}", set.name_any(), &canonical_hash(&template)[..10])
}
