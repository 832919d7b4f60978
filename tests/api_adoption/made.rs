//! What tests of running tenants begin with.

use futures::future::join_all;
use k8s_openapi::api::{apps::v1::StatefulSet, core::v1::Namespace};
use kube::{
    Api,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::found::Found;
use crate::support::{
    Driver, Scope, templates,
    upstream::{Layout, Left, State, Tenant},
};

/// A scope with a driver and a ClusterVersion named as the scope, before any manager has seen them.
pub(crate) async fn prepared(name: &str, content: Value) -> (Scope, Driver) {
    let scope = Scope::new(name).await;
    let driver = Driver::start(&scope);
    make_namespace(&scope, &scope.manager_namespace()).await;
    scope.create_cluster_version(name, content).await;
    (scope, driver)
}

pub(crate) async fn make_namespace(scope: &Scope, name: &str) {
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    Api::all(scope.client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .expect("a free name");
}

/// Makes tenants and looks at them.
pub(crate) async fn left(scope: &Scope, tenants: &[Tenant]) -> Vec<Found> {
    let left = join_all(tenants.iter().map(|tenant| tenant.leave(&scope.client))).await;
    let all = tenants.iter().zip(left);
    join_all(all.map(async |(tenant, Left { root, .. })| Found::of(scope, &tenant.name, &root).await)).await
}

/// The pods of a StatefulSet are not ready any more.
pub(crate) async fn unready(scope: &Scope, root: &str, set: &str) {
    let status = json!({"status": {"readyReplicas": 0, "availableReplicas": 0, "currentRevision": "before"}});
    scope
        .api::<StatefulSet>(root)
        .patch_status(set, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .expect("it is accepted");
}

/// What a ClusterVersion said before the Go manager's upgrade.
pub(crate) fn earlier(service_type: &str) -> Value {
    templates::full(service_type)
}

/// What it says when this manager comes.
pub(crate) fn present(service_type: &str) -> Value {
    let mut content = earlier(service_type);
    templates::verbosity(&mut content, 1);
    content
}

/// Running tenants of every kind.
pub(crate) fn running(scope: &str, service_type: &str) -> Vec<Tenant> {
    let tenant = |name: &str| Tenant::new(scope, name, scope);
    let from = || earlier(service_type);
    vec![
        tenant("plain"),
        tenant("gated").gate(),
        tenant("old").layout(Layout::Created),
        tenant("upgraded").state(State::Upgraded { from: from() }),
        tenant("refused").state(State::UpgradeRefused { from: from() }),
        tenant("stuck").state(State::UpgradeStuck { from: from() }),
    ]
}
