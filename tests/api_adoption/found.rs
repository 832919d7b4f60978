//! What is there before and after: objects, what they say, and what a manager did.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::{
    apps::v1::{ControllerRevision, Deployment, StatefulSet},
    core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, Secret, Service, ServiceAccount},
};
use kube::{
    Resource, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde_json::{Value, json};
use vc_manager::api::VirtualCluster;

use crate::support::{Manager, Options, Scope, eventually, upstream::raw};

/// Secrets that a tenant has once for life.
pub(crate) const FOR_LIFE: [&str; 2] = ["root-ca", "serviceaccount-rsa"];
/// Its kubeconfigs.
const KUBECONFIGS: [&str; 2] = ["admin-kubeconfig", "controller-manager-kubeconfig"];

/// A tenant before this manager saw it.
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) root: String,
    pub(crate) object: Value,
    pub(crate) footprint: BTreeMap<String, String>,
    pub(crate) secrets: BTreeMap<String, BTreeMap<String, String>>,
    pub(crate) etcd: Value,
}

impl Found {
    pub(crate) async fn of(scope: &Scope, name: &str, root: &str) -> Self {
        Self {
            name: name.to_owned(),
            root: root.to_owned(),
            object: object(scope, name).await,
            footprint: footprint(scope, root).await,
            secrets: scope.secrets(root).await,
            etcd: etcd_pods(scope, root).await,
        }
    }
}

/// A VirtualCluster as it is stored.
pub(crate) async fn object(scope: &Scope, name: &str) -> Value {
    let api = raw::<VirtualCluster>(&scope.client, Some(&scope.namespace));
    let object = api.get(name).await.expect("the VirtualCluster");
    serde_json::to_value(object).unwrap()
}

/// The root namespace and all in it: kind/name → uid, resource version, generation. Nothing if it is not there.
pub(crate) async fn footprint(scope: &Scope, root: &str) -> BTreeMap<String, String> {
    let mut footprint = BTreeMap::new();
    let namespaces = raw::<Namespace>(&scope.client, None);
    if let Some(namespace) = namespaces.get_opt(root).await.expect("an answer") {
        footprint.insert("Namespace".into(), mark(&namespace));
    }
    footprint.extend(marks::<Secret>(scope, root).await);
    footprint.extend(marks::<Service>(scope, root).await);
    footprint.extend(marks::<StatefulSet>(scope, root).await);
    footprint.extend(marks::<Deployment>(scope, root).await);
    footprint.extend(marks::<ControllerRevision>(scope, root).await);
    footprint.extend(marks::<ConfigMap>(scope, root).await);
    footprint.extend(marks::<ServiceAccount>(scope, root).await);
    footprint.extend(marks::<PersistentVolumeClaim>(scope, root).await);
    footprint.extend(marks::<Pod>(scope, root).await);
    footprint
}

pub(crate) async fn marks<K: Resource<DynamicType = ()>>(
    scope: &Scope,
    root: &str,
) -> BTreeMap<String, String> {
    let api = raw::<K>(&scope.client, Some(root));
    let all = api.list(&ListParams::default()).await.expect("a list");
    all.iter()
        .map(|object| (format!("{}/{}", K::kind(&()), object.name_any()), mark(object)))
        .collect()
}

pub(crate) fn mark(object: &DynamicObject) -> String {
    let meta = &object.metadata;
    format!("{:?} {:?} {:?}", meta.uid, meta.resource_version, meta.generation)
}

pub(crate) async fn etcd_pods(scope: &Scope, root: &str) -> Value {
    let api = raw::<StatefulSet>(&scope.client, Some(root));
    let set = api.get_opt("etcd").await.expect("an answer");
    set.map_or(Value::Null, |set| set.data["spec"]["template"].clone())
}

/// Conditions without a type: the Go manager's.
pub(crate) fn old_conditions(object: &Value) -> Vec<&Value> {
    let all = object["status"]["conditions"].as_array();
    all.into_iter()
        .flatten()
        .filter(|condition| condition.get("type").is_none())
        .collect()
}

pub(crate) fn pin(object: &Value) -> &str {
    object["status"]["revision"]["current"].as_str().expect("a pin")
}

/// Waits until a tenant is pinned to what runs.
pub(crate) async fn taken_over(scope: &Scope, name: &str) -> Value {
    eventually(&format!("{name} to be taken over"), async || {
        let object = object(scope, name).await;
        let revision = &object["status"]["revision"];
        (revision["adopted"] == true && revision["current"].is_string()).then_some(object)
    })
    .await
}

/// Waits until the manager has looked at all of them and asks for nothing more.
pub(crate) async fn at_rest(manager: &Manager, names: &[&str]) {
    eventually("a look at all tenants", async || {
        let calls = manager.traffic.calls();
        let looked = |name: &&str| {
            calls.iter().any(|call| {
                (call.verb, call.resource.as_str(), call.name.as_str()) == ("get", "virtualclusters", *name)
            })
        };
        names.iter().all(looked).then_some(())
    })
    .await;
    eventually("the manager to be at rest", async || {
        let mark = manager.traffic.mark();
        tokio::time::sleep(Duration::from_secs(1)).await;
        (manager.traffic.mark() == mark).then_some(())
    })
    .await;
}

/// Something that makes the manager look once more.
pub(crate) async fn poke(scope: &Scope, name: &str, note: &str) {
    scope
        .merge(name, &json!({"metadata": {"annotations": {"note": note}}}))
        .await;
}

/// Nothing was written in any of the root namespaces, and what the Go manager said still stands.
pub(crate) async fn assert_untouched(scope: &Scope, found: &[Found], manager: &Manager) {
    for tenant in found {
        let name = &tenant.name;
        let now = object(scope, name).await;
        let marks: BTreeSet<_> = footprint(scope, &tenant.root).await.into_iter().collect();
        let before: BTreeSet<_> = tenant.footprint.clone().into_iter().collect();
        let changed: Vec<_> = marks.symmetric_difference(&before).collect();
        assert!(changed.is_empty(), "{name}: {changed:?}");
        for field in ["phase", "message", "reason", "clusterNamespace"] {
            assert_eq!(
                now["status"][field], tenant.object["status"][field],
                "{name}: {field}"
            );
        }
        assert_eq!(old_conditions(&now), old_conditions(&tenant.object), "{name}");
        assert_eq!(now["spec"], tenant.object["spec"], "{name}");
        for field in ["uid", "finalizers", "labels"] {
            assert_eq!(
                now["metadata"][field], tenant.object["metadata"][field],
                "{name}: {field}"
            );
        }
    }
    let roots: BTreeSet<_> = found.iter().map(|tenant| tenant.root.as_str()).collect();
    let writes = manager.traffic.writes();
    let in_roots: Vec<_> = writes
        .iter()
        .filter(|call| roots.contains(call.namespace.as_str()) || roots.contains(call.name.as_str()))
        .collect();
    assert!(in_roots.is_empty(), "{in_roots:?}");
}

/// A manager that starts where all is taken over already writes nothing, anywhere.
pub(crate) async fn assert_second_start_is_silent(scope: &Scope, found: &[Found]) {
    let manager = Manager::start(scope, Options::default());
    let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();
    at_rest(&manager, &names).await;
    let writes: Vec<_> = manager.traffic.writes().iter().map(ToString::to_string).collect();
    assert!(writes.is_empty(), "{writes:?}");
    assert_untouched(scope, found, &manager).await;
    manager.stop().await.unwrap();
}

/// The server that a kubeconfig leads to.
pub(crate) fn server(kubeconfig: &str) -> &str {
    let mut lines = kubeconfig.lines();
    lines
        .find_map(|line| line.trim().strip_prefix("server: "))
        .expect("a server")
}

/// Whether each kubeconfig of a tenant leads where every client goes.
pub(crate) fn has_good_kubeconfigs(secrets: &BTreeMap<String, BTreeMap<String, String>>, root: &str) -> bool {
    KUBECONFIGS.iter().all(|name| {
        let Some(text) = secrets.get(*name).and_then(|data| data.get(*name)) else {
            return false;
        };
        let host = server(text)
            .trim_start_matches("https://")
            .trim_end_matches(":6443");
        host == format!("apiserver-svc.{root}") || host.parse::<std::net::Ipv4Addr>().is_ok()
    })
}
