//! What these tests share.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::{
    ByteString,
    api::{apps::v1::StatefulSet, core::v1::Secret},
    jiff::{SignedDuration, Timestamp},
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use vc_manager::{api::VirtualCluster, controller::Clock};

use crate::support::{Manager, Options, Scope, eventually};

pub(crate) const FOR_LIFE: [&str; 2] = ["root-ca", "serviceaccount-rsa"];

/// A manager's clock that can be put forward.
#[derive(Clone, Default)]
pub(crate) struct Ahead(Arc<AtomicI64>);

impl Ahead {
    pub(crate) fn pass(&self, time: SignedDuration) {
        self.0.fetch_add(time.as_secs(), Ordering::Relaxed);
    }

    pub(crate) fn options(&self) -> Options {
        let ahead = Arc::clone(&self.0);
        Options {
            clock: Clock::new(move || {
                Timestamp::now() + SignedDuration::from_secs(ahead.load(Ordering::Relaxed))
            }),
            ..Options::default()
        }
    }
}

pub(crate) async fn at_rest(manager: &Manager) -> usize {
    eventually("silence", async || {
        let mark = manager.traffic.mark();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let quiet = manager
            .traffic
            .since(mark)
            .iter()
            .all(|call| call.verb == "watch");
        quiet.then(|| manager.traffic.mark())
    })
    .await
}

/// Has the manager look at a tenant, and waits until it is through.
pub(crate) async fn look(scope: &Scope, manager: &Manager, name: &str) {
    let mark = manager.traffic.mark();
    let note = json!({"metadata": {"annotations": {"poke": Timestamp::now().to_string()}}});
    scope.merge(name, &note).await;
    eventually("a look", async || {
        let calls = manager.traffic.since(mark);
        calls
            .iter()
            .any(|call| call.verb == "get" && call.name == name)
            .then_some(())
    })
    .await;
    at_rest(manager).await;
}

pub(crate) async fn templates_of(scope: &Scope, root: &str) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for set in ["etcd", "apiserver", "controller-manager"] {
        let got: StatefulSet = scope.get(root, set).await;
        all.insert(
            set.to_owned(),
            serde_json::to_value(got.spec.unwrap().template).unwrap(),
        );
    }
    all
}

pub(crate) async fn patch_status(scope: &Scope, name: &str, patch: Value) {
    scope
        .tenants()
        .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
}

/// Sets `Pending`, the least that the API server accepts, and drops the rest of the status.
pub(crate) async fn wipe_status(scope: &Scope, name: &str) {
    let pending = json!({"phase": "Pending", "message": "", "reason": ""});
    let patch = json!([{"op": "replace", "path": "/status", "value": pending}]);
    let patch: Patch<()> = Patch::Json(serde_json::from_value(patch).unwrap());
    scope
        .tenants()
        .patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

pub(crate) fn conditions(tenant: &VirtualCluster) -> Vec<String> {
    let status = tenant.status.clone().unwrap_or_default();
    status
        .conditions
        .iter()
        .map(|c| {
            format!(
                "{}={} {} {}",
                c.type_.clone().unwrap_or_default(),
                c.status,
                c.reason.clone().unwrap_or_default(),
                c.message.clone().unwrap_or_default()
            )
        })
        .collect()
}

pub(crate) async fn put_text(scope: &Scope, root: &str, secret: &str, key: &str, text: &str) {
    let data: BTreeMap<_, _> = [(key, ByteString(text.as_bytes().to_vec()))].into();
    let params = PatchParams {
        field_manager: Some("external-secrets".into()),
        ..PatchParams::default()
    };
    let _ = scope
        .api::<Secret>(root)
        .patch(secret, &params, &Patch::Merge(json!({"data": data})))
        .await;
}

pub(crate) fn secret_writes(manager: &Manager, mark: usize) -> usize {
    manager
        .traffic
        .since(mark)
        .iter()
        .filter(|call| call.is_write() && call.resource == "secrets")
        .count()
}

pub(crate) fn set_writes(manager: &Manager, mark: usize) -> usize {
    manager
        .traffic
        .since(mark)
        .iter()
        .filter(|call| call.is_write() && call.resource == "statefulsets")
        .count()
}
