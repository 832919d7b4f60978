//! A manager is killed at every single write, before it is sent and after, and the next one finishes: the result is
//! that of an undisturbed run, and no key or certificate was made twice.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, Secret, Service},
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, ObjectMeta, PostParams},
};
use serde_json::{Value, json};
use vc_manager::api::{VirtualCluster, labels, virtual_cluster::UpgradeResult};

use support::{Cut, Driver, Manager, Options, Recorder, Scope, data, eventually, root_of, templates, tuple};

/// Runs at once. More would only wait for each other.
const LANES: usize = 4;
const KEPT: [&str; 3] = ["root-ca", "serviceaccount-rsa", "etcd-ca"];

/// Both ways to die at each of the writes 1 to `last`.
fn cuts(last: usize) -> Vec<Cut> {
    (1..=last).flat_map(|n| [Cut::Before(n), Cut::After(n)]).collect()
}

fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().unwrap().parse().unwrap()
}

/// Waits until everything is done, the bookkeeping of the ClusterVersion, too.
async fn done(scope: &Scope, revision_is_new: impl Fn(&str) -> bool) -> VirtualCluster {
    let tenant = scope.when("one", "done", |tenant| {
        tenant.phase() == "Running"
            && tenant.pin().is_some_and(&revision_is_new)
            && !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
            && tenant.labels().contains_key(labels::CLUSTER_VERSION_APPLIED)
            && tenant
                .status
                .as_ref()
                .is_some_and(|status| status.upgrade.is_none())
    });
    let tenant = tenant.await;
    eventually("the revision in the ClusterVersion's status", async || {
        let version = scope.cluster_versions().get(&scope.namespace).await.unwrap();
        let status = version.status.clone()?;
        let is_seen = status.observed_generation == version.metadata.generation;
        (is_seen && status.revision.as_deref() == tenant.pin() && version.finalizers().len() == 1)
            .then_some(())
    })
    .await;
    tenant
}

/// Runs a manager into its cut, or to the end if that comes before, and a fresh one to the end. Whether it was cut.
async fn interrupted(
    scope: &Scope,
    cut: Cut,
    revision_is_new: impl Fn(&str) -> bool,
) -> (bool, VirtualCluster) {
    let first = Manager::start(scope, Options::cut(cut));
    let was_cut = tokio::select! {
        () = first.traffic.when_cut() => true,
        _ = done(scope, &revision_is_new) => first.traffic.is_cut(),
    };
    first.kill();
    let _second = Manager::start(scope, Options::default());
    (was_cut, done(scope, &revision_is_new).await)
}

/// What a tenant looks like, apart from names, addresses, keys and times.
async fn shape(scope: &Scope, tenant: &VirtualCluster) -> Value {
    let root = root_of(tenant);
    let namespace: Namespace = Api::all(scope.client.clone()).get(&root).await.unwrap();
    let mut secrets = BTreeMap::new();
    for secret in scope
        .api::<Secret>(&root)
        .list(&ListParams::default())
        .await
        .unwrap()
    {
        let keys: Vec<_> = data(&secret).into_keys().collect();
        secrets.insert(secret.name_any(), json!([secret.type_, keys]));
    }
    let mut sets = BTreeMap::new();
    for set in scope
        .api::<StatefulSet>(&root)
        .list(&ListParams::default())
        .await
        .unwrap()
    {
        let mut spec = serde_json::to_value(&set.spec).unwrap();
        if let Some(hashes) = spec
            .pointer_mut("/template/metadata/annotations")
            .and_then(Value::as_object_mut)
        {
            hashes.values_mut().for_each(|hash| *hash = json!("a hash"));
        }
        sets.insert(set.name_any(), json!([spec, set.metadata.generation]));
    }
    let mut services = BTreeMap::new();
    for service in scope
        .api::<Service>(&root)
        .list(&ListParams::default())
        .await
        .unwrap()
    {
        let spec = service.spec.as_ref().unwrap();
        services.insert(
            service.name_any(),
            json!([service.metadata.labels, spec.ports, spec.selector, spec.type_]),
        );
    }
    let status = tenant.status.as_ref().unwrap();
    let conditions: Vec<_> = status
        .conditions
        .iter()
        .map(|c| json!([c.type_, c.status, c.reason]))
        .collect();
    let history: Vec<_> = status
        .history
        .iter()
        .map(|entry| json!([entry.revision, entry.result]))
        .collect();
    let labels: Vec<_> = tenant.labels().keys().collect();
    let revisions: BTreeMap<_, _> = scope
        .revisions()
        .await
        .into_iter()
        .map(|r| (r.name_any(), json!([r.revision, r.data.unwrap().0])))
        .collect();
    let shape = json!({
        "namespace": namespace.annotations(), "secrets": secrets, "sets": sets, "services": services,
        "status": [tuple(tenant), status.revision, conditions, history, status.provisioning],
        "labels": labels, "finalizers": tenant.finalizers(), "revisions": revisions,
    });
    let text = shape
        .to_string()
        .replace(&root, "ROOT")
        .replace(&tenant.uid().unwrap(), "UID");
    serde_json::from_str(&text.replace(&scope.namespace, "SCOPE")).unwrap()
}

/// The contents each Secret of a root namespace had after the API server's number `since`.
async fn contents(
    scope: &Scope,
    record: &Recorder<Secret>,
    root: &str,
    since: u64,
) -> BTreeMap<String, BTreeSet<String>> {
    let current = scope
        .api::<Secret>(root)
        .list(&ListParams::default())
        .await
        .unwrap()
        .items;
    let newest: BTreeSet<_> = current.iter().map(|secret| version(&secret.metadata)).collect();
    let states = eventually("the record to catch up", async || {
        let mut states = record.states();
        states.retain(|secret| secret.namespace().as_deref() == Some(root));
        let seen: BTreeSet<_> = states.iter().map(|secret| version(&secret.metadata)).collect();
        newest.is_subset(&seen).then_some(states)
    })
    .await;
    let mut contents: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for secret in states.iter().filter(|secret| version(&secret.metadata) > since) {
        contents
            .entry(secret.name_any())
            .or_default()
            .insert(format!("{:?}", data(secret)));
    }
    contents
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_any_write_of_provisioning_leaves_no_trace() {
    let (scope, _driver) = prepared("prov").await;
    let record = &Recorder::<Secret>::start(Api::all(scope.client.clone())).await;
    let manager = Manager::start(&scope, Options::default());
    let tenant = done(&scope, |_| true).await;
    let writes = manager.traffic.writes().len();
    drop(manager);
    assert!(writes > 17, "{writes}");
    let expected = &shape(&scope, &tenant).await;
    assert_eq!(expected["revisions"].as_object().unwrap().len(), 1);

    let runs = cuts(writes)
        .into_iter()
        .enumerate()
        .map(|(index, cut)| async move {
            let (scope, _driver) = prepared(&format!("prov{index:03}")).await;
            let (was_cut, tenant) = interrupted(&scope, cut, |_| true).await;
            assert_eq!(&shape(&scope, &tenant).await, expected, "{cut:?}");
            let root = root_of(&tenant);
            let contents = contents(&scope, record, &root, 0).await;
            assert_eq!(contents.len(), 7, "{cut:?}");
            for (secret, contents) in contents {
                assert_eq!(
                    contents.len(),
                    1,
                    "{cut:?}: Secret {secret} had {} contents",
                    contents.len()
                );
            }
            let secrets = scope.secrets(&root).await;
            let keys: BTreeSet<_> = secrets.values().filter_map(|data| data.get("tls.key")).collect();
            assert_eq!(keys.len(), 5, "{cut:?}: each its own key");
            was_cut
        });
    let outcomes: Vec<_> = stream::iter(runs).buffer_unordered(LANES).collect().await;
    let cut = outcomes.iter().filter(|was_cut| **was_cut).count();
    println!("{cut} of {} runs were cut", outcomes.len());
    // The last few are bookkeeping that may come after the tenant is done.
    assert!(cut >= 2 * 17, "only {cut} runs were cut");
}

/// A scope with a ClusterVersion, a VirtualCluster and a driver, before any manager has seen them.
async fn prepared(name: &str) -> (Scope, Driver) {
    let scope = Scope::new(name).await;
    let driver = Driver::start(&scope);
    let system = Namespace {
        metadata: ObjectMeta {
            name: Some(scope.manager_namespace()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    Api::all(scope.client.clone())
        .create(&PostParams::default(), &system)
        .await
        .unwrap();
    scope
        .create_cluster_version(name, templates::full("ClusterIP"))
        .await;
    scope.create_tenant("one").await;
    (scope, driver)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_any_write_of_an_upgrade_leaves_no_trace() {
    let (scope, _driver) = prepared("upgr").await;
    let record = &Recorder::<Secret>::start(Api::all(scope.client.clone())).await;
    let manager = Manager::start(&scope, Options::default());
    let old = done(&scope, |_| true).await.pin().unwrap().to_owned();
    let mark = manager.traffic.mark();
    scope.edit(|content| templates::verbosity(content, 1)).await;
    scope.opt_in("one").await;
    done(&scope, |revision| revision != old).await;
    let writes = manager
        .traffic
        .since(mark)
        .iter()
        .filter(|call| call.is_write())
        .count();
    drop(manager);
    assert!(writes >= 11, "{writes}");

    // Each lane is one tenant that is upgraded again and again.
    let all = cuts(writes);
    let lanes = (0..LANES).map(|lane| {
        let cuts: Vec<_> = all.iter().copied().skip(lane).step_by(LANES).collect();
        async move {
            let (scope, _driver) = prepared(&format!("upgr{lane}")).await;
            let manager = Manager::start(&scope, Options::default());
            done(&scope, |_| true).await;
            manager.stop().await.unwrap();
            let mut cut_runs = 0;
            for (round, cut) in cuts.into_iter().enumerate() {
                cut_runs += usize::from(upgrade(&scope, record, cut, round + 1).await);
            }
            cut_runs
        }
    });
    let cut: usize = futures::future::join_all(lanes).await.into_iter().sum();
    println!("{cut} of {} runs were cut", all.len());
    assert!(cut >= 2 * 10, "only {cut} runs were cut");
}

/// One upgrade with a kill in it. Whether it came to the kill.
async fn upgrade(scope: &Scope, record: &Recorder<Secret>, cut: Cut, round: usize) -> bool {
    let before = scope.tenant("one").await;
    let root = root_of(&before);
    let old = before.pin().unwrap().to_owned();
    let versions = scope.versions(&root).await;
    let since = versions.iter().filter(|(name, _)| name.starts_with("Secret/"));
    let since = since.map(|(_, version)| version.parse().unwrap()).max().unwrap();
    let generation = async |set: &str| {
        scope
            .get::<StatefulSet>(&root, set)
            .await
            .metadata
            .generation
            .unwrap()
    };
    let generations = (
        generation("apiserver").await,
        generation("controller-manager").await,
    );
    let revisions = scope.revisions().await.len();
    let edited = scope.edit(|content| templates::verbosity(content, round)).await;
    scope.opt_in("one").await;

    let (was_cut, tenant) = interrupted(scope, cut, |revision| revision != old).await;

    assert_eq!(tuple(&tenant).2, "TenantControlPlaneUpgradeCompleted", "{cut:?}");
    // The status of the ClusterVersion is written at the same time, which gives it another resourceVersion.
    let present = scope.cluster_versions().get(&scope.namespace).await.unwrap();
    let applied: u64 = tenant.labels()[labels::CLUSTER_VERSION_APPLIED].parse().unwrap();
    assert!(
        (version(&edited.metadata)..=version(&present.metadata)).contains(&applied),
        "{cut:?}: {applied}"
    );
    let status = tenant.status.as_ref().unwrap();
    let pins = status.revision.as_ref().unwrap();
    assert_eq!((&pins.target, &pins.last_good), (&None, &pins.current), "{cut:?}");
    let newest = &status.history[0];
    assert_eq!(
        (Some(&newest.revision), newest.result),
        (pins.current.as_ref(), UpgradeResult::Succeeded),
        "{cut:?}"
    );
    let recorded = status
        .history
        .iter()
        .filter(|entry| entry.revision == newest.revision)
        .count();
    assert_eq!(recorded, 1, "{cut:?}: one entry for one upgrade");
    assert_eq!(
        scope.revisions().await.len(),
        revisions + 1,
        "{cut:?}: one revision for one content"
    );
    // The pods were replaced once, not twice.
    let now = (
        generation("apiserver").await,
        generation("controller-manager").await,
    );
    assert_eq!(now, (generations.0 + 1, generations.1 + 1), "{cut:?}");
    let after = scope.versions(&root).await;
    let untouched = KEPT.map(|name| format!("Secret/{name}"));
    for name in untouched
        .iter()
        .map(String::as_str)
        .chain(["StatefulSet/etcd", "Service/etcd"])
    {
        assert_eq!(after[name], versions[name], "{cut:?}: {name} was written");
    }
    let contents = contents(scope, record, &root, since).await;
    let renewed: Vec<_> = contents.keys().map(String::as_str).collect();
    assert_eq!(
        renewed,
        [
            "admin-kubeconfig",
            "apiserver-ca",
            "controller-manager-kubeconfig",
            "front-proxy-ca"
        ],
        "{cut:?}"
    );
    for (secret, contents) in contents {
        assert_eq!(
            contents.len(),
            1,
            "{cut:?}: Secret {secret} was made {} times",
            contents.len()
        );
    }
    was_cut
}
