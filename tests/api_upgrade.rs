//! Partial upgrades on a real API server: who is touched and who is not, what is written and what is counted, and
//! how a failed one ends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Pod, Secret, Service},
};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vc_manager::api::{UpgradeStep, VirtualCluster, labels, virtual_cluster::UpgradeResult};

use support::{Call, Manager, Options, Recorder, Scope, condition, eventually, root_of, templates, tuple};

/// Secrets that an upgrade makes anew, and those it must not touch.
const REFRESHED: [&str; 4] = [
    "apiserver-ca",
    "front-proxy-ca",
    "controller-manager-kubeconfig",
    "admin-kubeconfig",
];
const KEPT: [&str; 3] = ["root-ca", "serviceaccount-rsa", "etcd-ca"];

fn label<'a>(tenant: &'a VirtualCluster, key: &str) -> Option<&'a str> {
    tenant.labels().get(key).map(String::as_str)
}

fn in_root<'a>(calls: &'a [Call], root: &str) -> Vec<&'a Call> {
    calls
        .iter()
        .filter(|call| call.is_write() && call.namespace == root)
        .collect()
}

/// Writes on behalf of one tenant: to it and to its root namespace.
fn of_tenant(calls: &[Call], name: &str, root: &str) -> Vec<Call> {
    let concerns = |call: &&Call| {
        call.is_write()
            && (call.namespace == root || (call.resource == "virtualclusters" && call.name == name))
    };
    calls.iter().filter(concerns).cloned().collect()
}

fn args(set: &StatefulSet) -> Vec<String> {
    set.spec
        .as_ref()
        .unwrap()
        .template
        .spec
        .as_ref()
        .unwrap()
        .containers[0]
        .args
        .clone()
        .unwrap_or_default()
}

/// An edit reaches nobody; one who agrees is moved, and of that one etcd and the keys stay as they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_who_agreed_is_moved_and_etcd_is_not_touched() {
    let (scope, _driver, manager) =
        Scope::with_manager("moved", Options::default(), templates::full("ClusterIP")).await;
    let (one, two) = tokio::join!(scope.provision("one"), scope.provision("two"));
    let (first, second) = (root_of(&one), root_of(&two));
    let before = (scope.versions(&first).await, scope.versions(&second).await);
    let secrets = scope.secrets(&first).await;
    let mark = manager.traffic.mark();
    let edited = scope
        .edit(|content| {
            templates::verbosity(content, 5);
            content["etcd"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["image"] =
                json!("registry.example/etcd:2");
            content["etcd"]["statefulset"]["spec"]["replicas"] = json!(3);
            content["etcd"]["service"]["metadata"]["labels"] = json!({"new": "label"});
        })
        .await;
    // The manager has seen the edit once its revision is recorded.
    eventually("the new revision", async || {
        let status = scope.cluster_versions().get("moved").await.unwrap().status?;
        (status.observed_generation == edited.metadata.generation).then_some(())
    })
    .await;
    // An annotation makes it look at both tenants.
    for name in ["one", "two"] {
        scope
            .merge(name, &json!({"metadata": {"annotations": {"note": "look"}}}))
            .await;
    }
    eventually("a look at both", async || {
        let calls = manager.traffic.since(mark);
        let looked = |name: &str| calls.iter().any(|call| call.verb == "get" && call.name == name);
        (looked("one") && looked("two")).then_some(())
    })
    .await;
    assert_eq!(
        (scope.versions(&first).await, scope.versions(&second).await),
        before
    );

    let from = one.pin().unwrap().to_owned();
    let upgraded = scope.upgrade("one").await;
    let after = scope.versions(&first).await;
    for name in [
        "StatefulSet/etcd",
        "Service/etcd",
        "Secret/etcd-ca",
        "Secret/root-ca",
        "Secret/serviceaccount-rsa",
    ] {
        assert_eq!(after[name], before.0[name], "{name} was written");
    }
    let renewed = scope.secrets(&first).await;
    for name in KEPT {
        assert_eq!(renewed[name], secrets[name], "{name}");
    }
    for name in REFRESHED {
        assert_ne!(renewed[name], secrets[name], "{name}");
    }
    for set in ["apiserver", "controller-manager"] {
        assert_eq!(args(&scope.get(&first, set).await)[0], "-v=5");
    }
    // Who did not agree stays exactly as it was.
    assert_eq!(scope.versions(&second).await, before.1);
    assert_eq!(scope.tenant("two").await.pin(), Some(from.as_str()));

    let version = scope.cluster_versions().get("moved").await.unwrap();
    assert_eq!(
        label(&upgraded, labels::CLUSTER_VERSION_APPLIED),
        version.metadata.resource_version.as_deref()
    );
    let status = upgraded.status.as_ref().unwrap();
    let pins = status.revision.clone().unwrap();
    assert_ne!(pins.current.as_deref(), Some(from.as_str()));
    assert_eq!((pins.target, pins.last_good), (None, pins.current.clone()));
    assert_eq!(status.history.len(), 1);
    assert_eq!(
        (Some(&status.history[0].revision), status.history[0].result),
        (pins.current.as_ref(), UpgradeResult::Succeeded)
    );
    assert_eq!(
        condition(&upgraded, "Upgrading").reason.as_deref(),
        Some("Succeeded")
    );

    let series = format!(
        "{{cluster_version=\"moved\",resource_version=\"{}\"}}",
        version.resource_version().unwrap()
    );
    assert_eq!(
        manager.metric(&format!("clusters_upgraded{series}")).as_deref(),
        Some("1")
    );
    assert_eq!(
        manager
            .metric(&format!("clusters_upgrade_seconds_count{series}"))
            .as_deref(),
        Some("1")
    );
    assert_eq!(manager.metric(&format!("clusters_upgrade_failed{series}")), None);
}

/// Steps, phases and tuples as the watch shows them: Running throughout, apiserver before controller-manager.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_phase_stays_running_and_the_apiserver_goes_first() {
    let (scope, driver, manager) =
        Scope::with_manager("steps", Options::default(), templates::full("ClusterIP")).await;
    let tenant = scope.provision("one").await;
    let root = root_of(&tenant);
    let record = Recorder::start(scope.tenants()).await;
    driver.hold("one", "apiserver");
    scope.edit(|content| templates::verbosity(content, 2)).await;
    scope.opt_in("one").await;
    let pending = eventually("the apiserver to be rolling out", async || {
        let set: StatefulSet = scope.get(&root, "apiserver").await;
        (args(&set)[0] == "-v=2" && set.status.as_ref()?.observed_generation == set.metadata.generation)
            .then_some(set)
    })
    .await;
    assert_eq!(pending.status.unwrap().ready_replicas.unwrap_or(0), 0);
    let under_way = scope.tenant("one").await.status.unwrap();
    let upgrade = under_way.upgrade.unwrap();
    assert_eq!(upgrade.step, UpgradeStep::ApiServer);
    assert!(upgrade.waiting_for.is_some());
    assert_eq!(under_way.revision.unwrap().target, Some(upgrade.revision));
    assert_ne!(
        args(&scope.get(&root, "controller-manager").await)[0],
        "-v=2",
        "it waits for the apiserver"
    );
    driver.release("one", "apiserver");
    scope
        .ended_with("one", "TenantControlPlaneUpgradeCompleted")
        .await;
    assert_eq!(args(&scope.get(&root, "controller-manager").await)[0], "-v=2");
    eventually("the end to be recorded", async || {
        record
            .states()
            .last()
            .is_some_and(|state| !state.labels().contains_key(labels::READY_FOR_UPGRADE))
            .then_some(())
    })
    .await;
    let states = record.states();
    assert!(
        states.iter().all(|state| state.phase() == "Running"),
        "the phase is never another one"
    );
    let mut tuples: Vec<_> = states.iter().map(tuple).collect();
    tuples.dedup();
    let reasons: Vec<_> = tuples
        .iter()
        .map(|(_, message, reason)| (message.as_str(), reason.as_str()))
        .collect();
    assert_eq!(
        reasons,
        [
            ("tenant control plane is running", "TenantControlPlaneRunning"),
            (
                "tenant control plane is upgraded",
                "TenantControlPlaneUpgradeCompleted"
            ),
        ]
    );
    // The consent does not outlive the attempt it was given for: a crash would start another upgrade on it.
    let outlived = |state: &&VirtualCluster| {
        let said = state.status.clone().unwrap_or_default();
        let ended = said.upgrade.is_none() && !said.history.is_empty();
        ended && label(state, labels::READY_FOR_UPGRADE).is_some()
    };
    assert_eq!(states.iter().find(outlived).map(tuple), None);
    // And the applied version is not told before the attempt is through its last step.
    let applied =
        |state: &VirtualCluster| label(state, labels::CLUSTER_VERSION_APPLIED).map(ToOwned::to_owned);
    let last = states.last().and_then(applied);
    let first = states
        .iter()
        .find(|state| applied(state) == last)
        .expect("it is told");
    let step = first
        .status
        .as_ref()
        .and_then(|status| status.upgrade.as_ref())
        .map(|upgrade| upgrade.step);
    assert_eq!(step, Some(vc_manager::api::UpgradeStep::ControllerManager));
    // Nothing was written into the root namespace before the dry runs of both StatefulSets and the Service.
    let calls: Vec<_> = manager.traffic.calls();
    let last_dry = calls.iter().rposition(|call| call.dry_run).unwrap();
    let dry: BTreeSet<_> = calls
        .iter()
        .filter(|call| call.dry_run)
        .map(|call| call.name.as_str())
        .collect();
    assert_eq!(dry, ["apiserver", "apiserver-svc", "controller-manager"].into());
    let first_write = calls
        .iter()
        .rposition(|call| call.is_write() && call.namespace == root && call.resource == "secrets");
    assert!(
        calls[..last_dry]
            .iter()
            .filter(|call| call.is_write() && call.namespace == root)
            .count()
            <= 12
    );
    assert!(last_dry < first_write.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures_of_writes_are_kept() {
    let (scope, _driver, manager) =
        Scope::with_manager("figures", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    let provision = of_tenant(&manager.traffic.calls(), "one", &root);
    // The root namespace itself is about the whole cluster, and so are the ClusterVersion and its revision.
    assert!(
        provision.len() < 17,
        "{} writes and the namespace: {provision:#?}",
        provision.len()
    );

    scope.edit(|content| templates::verbosity(content, 3)).await;
    let mark = manager.traffic.mark();
    scope.upgrade("one").await;
    let calls = manager.traffic.since(mark);
    let upgrade = of_tenant(&calls, "one", &root);
    assert!(upgrade.len() <= 12, "{} writes: {upgrade:#?}", upgrade.len());
    assert!(in_root(&calls, &root).len() <= 7, "{:#?}", in_root(&calls, &root));

    // Metadata of the ClusterVersion alone is nothing to upgrade to, though its resourceVersion is another.
    let annotate = json!({"metadata": {"annotations": {"owner": "somebody"}}});
    let version = scope
        .cluster_versions()
        .patch("figures", &PatchParams::default(), &Patch::Merge(annotate))
        .await
        .unwrap();
    let before = scope.versions(&root).await;
    let mark = manager.traffic.mark();
    let tenant = scope.upgrade("one").await;
    let calls = manager.traffic.since(mark);
    assert!(
        of_tenant(&calls, "one", &root).len() <= 2,
        "{:#?}",
        of_tenant(&calls, "one", &root)
    );
    assert!(in_root(&calls, &root).is_empty());
    assert_eq!(scope.versions(&root).await, before);
    assert_eq!(
        label(&tenant, labels::CLUSTER_VERSION_APPLIED),
        version.metadata.resource_version.as_deref()
    );
    let series = format!(
        "{{cluster_version=\"figures\",resource_version=\"{}\"}}",
        version.resource_version().unwrap()
    );
    assert_eq!(
        manager.metric(&format!("clusters_upgraded{series}")).as_deref(),
        Some("1"),
        "as the Go manager counts it"
    );
}

/// Once all is done nothing is asked or written any more: only watches are open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_rest_nothing_is_sent() {
    let (scope, _driver, manager) =
        Scope::with_manager("rest", Options::default(), templates::full("ClusterIP")).await;
    tokio::join!(scope.provision("one"), scope.provision("two"));
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.upgrade("one").await;
    // Events that its own last writes caused are still on their way: it is at rest when a second passes in silence.
    let mut mark = manager.traffic.mark();
    eventually("a second of silence", async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let quiet = manager
            .traffic
            .since(mark)
            .iter()
            .all(|call| call.verb == "watch");
        mark = manager.traffic.mark();
        quiet.then_some(())
    })
    .await;
    // This is no waiting for something, but the measurement.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let mut sent = manager.traffic.since(mark);
    sent.retain(|call| call.verb != "watch");
    assert!(sent.is_empty(), "{sent:#?}");
}

/// Server-side apply under one name: what is dropped from the ClusterVersion goes, what others own stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_fields_are_pruned_and_those_of_others_kept() {
    let mut content = templates::full("ClusterIP");
    content["apiServer"]["service"]["metadata"]["labels"] = json!({"dropped": "soon", "stays": "here"});
    content["apiServer"]["statefulset"]["spec"]["template"]["spec"]["priorityClassName"] =
        json!("system-cluster-critical");
    content["apiServer"]["statefulset"]["spec"]
        .as_object_mut()
        .unwrap()
        .remove("replicas");
    let (scope, _driver, _manager) = Scope::with_manager("pruned", Options::default(), content).await;
    let root = root_of(&scope.provision("one").await);
    // Others: an autoscaler, someone's labels, and one who overrides what is ours.
    let sets = scope.api::<StatefulSet>(&root);
    let theirs = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "apiserver",
        "labels": {"team": "blue"}, "annotations": {"someone": "else"}}, "spec": {"replicas": 2}});
    sets.patch(
        "apiserver",
        &PatchParams::apply("autoscaler"),
        &Patch::Apply(theirs),
    )
    .await
    .unwrap();
    let services = scope.api::<Service>(&root);
    let fought = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "apiserver-svc",
        "labels": {"stays": "overridden", "extra": "label"}}});
    services
        .patch(
            "apiserver-svc",
            &PatchParams::apply("meddler").force(),
            &Patch::Apply(fought),
        )
        .await
        .unwrap();
    eventually("two replicas", async || {
        let set = sets.get("apiserver").await.unwrap();
        (set.status?.ready_replicas == Some(2)).then_some(())
    })
    .await;

    scope
        .edit(|content| {
            content["apiServer"]["service"]["metadata"]["labels"]
                .as_object_mut()
                .unwrap()
                .remove("dropped");
            let pod = content["apiServer"]["statefulset"]["spec"]["template"]["spec"]
                .as_object_mut()
                .unwrap();
            pod.remove("priorityClassName");
        })
        .await;
    scope.upgrade("one").await;
    let set = sets.get("apiserver").await.unwrap();
    assert_eq!(
        (
            set.labels()["team"].as_str(),
            set.annotations()["someone"].as_str()
        ),
        ("blue", "else")
    );
    let spec = set.spec.unwrap();
    assert_eq!(
        spec.replicas,
        Some(2),
        "the ClusterVersion says nothing of replicas: they are the autoscaler's"
    );
    assert_eq!(spec.template.spec.unwrap().priority_class_name, None);
    let service = services.get("apiserver-svc").await.unwrap();
    assert!(!service.labels().contains_key("dropped"));
    assert_eq!(
        (
            service.labels()["stays"].as_str(),
            service.labels()["extra"].as_str()
        ),
        ("here", "label")
    );
}

/// A change of the Service alone reaches it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_of_the_service_alone_is_an_upgrade() {
    let (scope, _driver, _manager) =
        Scope::with_manager("service", Options::default(), templates::full("NodePort")).await;
    let root = root_of(&scope.provision("one").await);
    let before: Service = scope.get(&root, "apiserver-svc").await;
    scope
        .edit(|content| content["apiServer"]["service"]["spec"]["sessionAffinity"] = json!("ClientIP"))
        .await;
    scope.upgrade("one").await;
    let after: Service = scope.get(&root, "apiserver-svc").await;
    assert_eq!(
        after.spec.as_ref().unwrap().session_affinity.as_deref(),
        Some("ClientIP")
    );
    assert_eq!(
        after.spec.as_ref().unwrap().cluster_ip,
        before.spec.as_ref().unwrap().cluster_ip
    );
    assert_eq!(
        after.spec.unwrap().ports.unwrap()[0].node_port,
        before.spec.unwrap().ports.unwrap()[0].node_port
    );
}

/// Without the bundle a controller-manager is neither needed nor touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_controller_manager_may_be_absent() {
    let content = templates::without_controller_manager();
    let (scope, _driver, _manager) = Scope::with_manager("nocm", Options::default(), content).await;
    let root = root_of(&scope.provision("one").await);
    let sets = scope.api::<StatefulSet>(&root);
    assert!(sets.get_opt("controller-manager").await.unwrap().is_none());
    scope.edit(|content| templates::verbosity(content, 4)).await;
    scope.upgrade("one").await;
    assert!(sets.get_opt("controller-manager").await.unwrap().is_none());
    // A version that has one brings it, and the next one without leaves it as it is.
    scope
        .edit(|content| {
            content["controllerManager"] = templates::full("ClusterIP")["controllerManager"].clone();
        })
        .await;
    scope.upgrade("one").await;
    let added = sets.get("controller-manager").await.unwrap();
    scope
        .edit(|content| {
            content.as_object_mut().unwrap().remove("controllerManager");
            templates::verbosity(content, 6);
        })
        .await;
    scope.upgrade("one").await;
    let left = sets.get("controller-manager").await.unwrap();
    assert_eq!(
        (left.uid(), left.metadata.generation),
        (added.uid(), added.metadata.generation)
    );
}

/// What the API server refuses is found before anything is written into the root namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_change_leaves_everything_as_it_was() {
    let (scope, _driver, manager) =
        Scope::with_manager("refused", Options::default(), templates::full("ClusterIP")).await;
    let tenant = scope.provision("one").await;
    let root = root_of(&tenant);
    let (before, pin) = (scope.versions(&root).await, tenant.pin().unwrap().to_owned());
    let applied = label(&tenant, labels::CLUSTER_VERSION_APPLIED)
        .unwrap()
        .to_owned();
    let version = scope
        .edit(|content| {
            templates::verbosity(content, 9);
            // Immutable.
            content["controllerManager"]["statefulset"]["spec"]["serviceName"] = json!("another");
        })
        .await;
    scope.opt_in("one").await;
    let failed = scope.ended_with("one", "TenantControlPlaneUpgradeFailed").await;
    let (phase, message, _) = tuple(&failed);
    assert_eq!(phase, "Running");
    assert!(
        message.starts_with("fail to upgrade: cannot apply StatefulSet"),
        "{message}"
    );
    assert!(
        message.contains("controller-manager") && message.contains("updates to statefulset spec"),
        "{message}"
    );
    assert_eq!(scope.versions(&root).await, before, "nothing was written");
    assert_eq!(failed.pin(), Some(pin.as_str()));
    assert_eq!(
        label(&failed, labels::CLUSTER_VERSION_APPLIED),
        Some(applied.as_str()),
        "nothing claims success"
    );
    let status = failed.status.as_ref().unwrap();
    assert_eq!(status.history[0].result, UpgradeResult::Failed);
    assert!(
        status.history[0]
            .reason
            .as_ref()
            .unwrap()
            .contains("controller-manager")
    );
    assert_eq!(condition(&failed, "Upgrading").reason.as_deref(), Some("Failed"));
    assert_eq!(condition(&failed, "Ready").status, "True", "it runs as before");
    // The status of the ClusterVersion may have been written between the edit and the upgrade.
    let present = scope.cluster_versions().get("refused").await.unwrap();
    let versions: BTreeSet<_> = [version.resource_version(), present.resource_version()].into();
    let counted = |family: &str| {
        let of = |version: &Option<String>| {
            let version = version.as_deref().unwrap_or_default();
            manager.metric(&format!(
                "{family}{{cluster_version=\"refused\",resource_version=\"{version}\"}}"
            ))
        };
        versions.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(counted("clusters_upgrade_failed"), ["1"]);
    assert!(counted("clusters_upgraded").is_empty());

    // A field that no schema knows.
    scope
        .edit(|content| {
            content["controllerManager"]["statefulset"]["spec"]["serviceName"] =
                json!("controller-manager-svc");
            content["apiServer"]["statefulset"]["spec"]["template"]["spec"]["noSuchField"] = json!(1);
        })
        .await;
    scope.opt_in("one").await;
    let failed = scope
        .when("one", "failed anew", |tenant| {
            tuple(tenant).1.contains("noSuchField") && label(tenant, labels::READY_FOR_UPGRADE).is_none()
        })
        .await;
    assert_eq!(scope.versions(&root).await, before);
    assert_eq!(failed.status.unwrap().history.len(), 2);

    // Repaired and agreed to again, it succeeds.
    scope
        .edit(|content| {
            let pod = content["apiServer"]["statefulset"]["spec"]["template"]["spec"]
                .as_object_mut()
                .unwrap();
            pod.remove("noSuchField");
        })
        .await;
    let upgraded = scope.upgrade("one").await;
    assert_ne!(upgraded.pin(), Some(pin.as_str()));
    assert_eq!(args(&scope.get(&root, "apiserver").await)[0], "-v=9");
}

/// A rollout that does not end fails in time, says what it waited for, and may be tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_that_hangs_fails_and_is_tried_again() {
    let flags = Options::flags(&["--provisioner-timeout=3s"]);
    let (scope, driver, manager) = Scope::with_manager("hangs", flags, templates::full("ClusterIP")).await;
    let tenant = scope.provision("one").await;
    let root = root_of(&tenant);
    let untouched = args(&scope.get(&root, "controller-manager").await);
    driver.hold("one", "apiserver");
    scope.edit(|content| templates::verbosity(content, 8)).await;
    scope.opt_in("one").await;
    let set: StatefulSet = eventually("the apiserver to be rolling out", async || {
        let set: StatefulSet = scope.get(&root, "apiserver").await;
        (args(&set)[0] == "-v=8").then_some(set)
    })
    .await;
    let state = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}});
    driver
        .make_pod(&root, &set.name_any(), json!({"state": state}))
        .await;
    let failed = scope.ended_with("one", "TenantControlPlaneUpgradeFailed").await;
    let (phase, message, _) = tuple(&failed);
    assert_eq!(phase, "Running");
    assert!(
        message.contains("apiserver")
            && message.contains("image registry.example/apiserver:1 cannot be pulled"),
        "{message}"
    );
    assert_eq!(failed.pin(), tenant.pin());
    assert_eq!(
        label(&failed, labels::CLUSTER_VERSION_APPLIED),
        label(&tenant, labels::CLUSTER_VERSION_APPLIED)
    );
    assert_eq!(
        condition(&failed, "Ready").status,
        "False",
        "its apiserver is down"
    );
    assert_eq!(
        args(&scope.get(&root, "controller-manager").await),
        untouched,
        "it is not moved before the apiserver is up"
    );

    // The same version again: what was left unready is no reason not to begin.
    let mark = manager.traffic.mark();
    driver.release("one", "apiserver");
    scope
        .api::<Pod>(&root)
        .delete("apiserver-0", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let upgraded = scope.upgrade("one").await;
    assert_ne!(upgraded.pin(), tenant.pin());
    assert_eq!(condition(&upgraded, "Ready").status, "True");
    assert_eq!(args(&scope.get(&root, "controller-manager").await)[0], "-v=8");
    assert!(in_root(&manager.traffic.since(mark), &root).len() <= 7);
    let results: Vec<_> = upgraded
        .status
        .unwrap()
        .history
        .iter()
        .map(|entry| entry.result)
        .collect();
    assert_eq!(results, [UpgradeResult::Succeeded, UpgradeResult::Failed]);
}

/// A container that cannot ever start ends the upgrade at once, long before its time is up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hopeless_pod_fails_the_upgrade_early() {
    let (scope, driver, _manager) =
        Scope::with_manager("hopeless", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    driver.hold("one", "apiserver");
    scope.edit(|content| templates::verbosity(content, 8)).await;
    scope.opt_in("one").await;
    eventually("the apiserver to be rolling out", async || {
        (args(&scope.get(&root, "apiserver").await)[0] == "-v=8").then_some(())
    })
    .await;
    let crash = json!({
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
    });
    driver.make_pod(&root, "apiserver", crash).await;
    let failed = scope.ended_with("one", "TenantControlPlaneUpgradeFailed").await;
    let message = tuple(&failed).1;
    assert!(
        message.contains("pod apiserver-0") && message.contains("exit code 1") && message.contains("4 times"),
        "{message}"
    );

    // The repaired version comes, but the controller waits for the broken pod for ever: it is deleted.
    driver.release("one", "apiserver");
    scope.edit(|content| templates::verbosity(content, 1)).await;
    scope.upgrade("one").await;
    let pods = scope
        .api::<Pod>(&root)
        .list(&ListParams::default())
        .await
        .unwrap();
    assert!(
        pods.items.is_empty(),
        "the pod of the broken revision is still there"
    );
}

/// What others write to the VirtualCluster during an upgrade is not lost, and keeps it from nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_of_others_survive_an_upgrade() {
    let (scope, driver, _manager) =
        Scope::with_manager("others", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    driver.hold("one", "controller-manager");
    scope.edit(|content| templates::verbosity(content, 2)).await;
    let meddle = async |rounds: std::ops::Range<u32>| {
        for round in rounds {
            let key = format!("round-{round}");
            scope
                .merge(
                    "one",
                    &json!({"metadata": {"labels": {&key: "x"}, "annotations": {&key: "x"}}}),
                )
                .await;
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
    };
    // While it begins, while it waits in the middle, and while it ends.
    tokio::join!(scope.opt_in("one"), meddle(0..40));
    eventually("the controller-manager to be rolling out", async || {
        (args(&scope.get(&root, "controller-manager").await)[0] == "-v=2").then_some(())
    })
    .await;
    meddle(40..50).await;
    driver.release("one", "controller-manager");
    meddle(50..80).await;
    let tenant = scope
        .ended_with("one", "TenantControlPlaneUpgradeCompleted")
        .await;
    for round in 0..80 {
        let key = format!("round-{round}");
        assert!(
            tenant.labels().contains_key(&key) && tenant.annotations().contains_key(&key),
            "{key} is lost"
        );
    }
    assert_eq!(tenant.status.unwrap().history.len(), 1);
}

/// No more than so many at once; who is stuck holds up nobody but its own place; all get there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twelve_tenants_go_a_few_at_a_time() {
    let flags = Options::flags(&["--max-upgrading-tenants=3"]);
    let (scope, driver, _manager) = Scope::with_manager("many", flags, templates::full("ClusterIP")).await;
    let names: Vec<_> = (0..12).map(|n| format!("t{n:02}")).collect();
    futures::future::join_all(names.iter().map(|name| scope.provision(name))).await;
    driver.hold("t00", "apiserver");
    let record = Recorder::<VirtualCluster>::start(scope.tenants()).await;
    scope.edit(|content| templates::verbosity(content, 3)).await;
    // The stuck one first, so that it has its turn.
    scope.opt_in("t00").await;
    scope
        .when("t00", "upgrading", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.upgrade.is_some())
        })
        .await;
    futures::future::join_all(names[1..].iter().map(|name| scope.opt_in(name))).await;
    futures::future::join_all(
        names[1..]
            .iter()
            .map(|name| scope.ended_with(name, "TenantControlPlaneUpgradeCompleted")),
    )
    .await;
    let stuck = scope.tenant("t00").await.status.unwrap();
    assert!(stuck.upgrade.is_some(), "it is still at it");
    driver.release("t00", "apiserver");
    scope
        .ended_with("t00", "TenantControlPlaneUpgradeCompleted")
        .await;

    // Who was upgrading at any moment, by the order of the API server's own numbers.
    let mut states = record.states();
    states.sort_by_key(|state| state.resource_version().unwrap().parse::<u64>().unwrap());
    let mut upgrading = BTreeSet::new();
    let mut most = 0;
    for state in states {
        let name = state.name_any();
        if state.status.is_some_and(|status| status.upgrade.is_some()) {
            upgrading.insert(name);
        } else {
            upgrading.remove(&name);
        }
        most = most.max(upgrading.len());
    }
    assert!((2..=3).contains(&most), "{most} at once");
}

/// The gate is off: nothing is upgraded, and the label stays for a manager that has it on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_gate_nothing_is_upgraded() {
    let flags = Options::flags(&["--feature-gates=ClusterVersionPartialUpgrade=false"]);
    let (scope, _driver, manager) = Scope::with_manager("gate", flags, templates::full("ClusterIP")).await;
    scope.create_tenant("one").await;
    let tenant = scope
        .when("one", "running", |tenant| tenant.phase() == "Running")
        .await;
    assert_eq!(label(&tenant, labels::CLUSTER_VERSION_APPLIED), None);
    let root = root_of(&tenant);
    let before = scope.versions(&root).await;
    scope.edit(|content| templates::verbosity(content, 3)).await;
    let mark = manager.traffic.mark();
    scope.opt_in("one").await;
    eventually("a look at it", async || {
        let calls = manager.traffic.since(mark);
        calls
            .iter()
            .any(|call| call.verb == "get" && call.name == "one")
            .then_some(())
    })
    .await;
    // A manager with the gate on finds the consent, and only then anything changes.
    assert_eq!(scope.versions(&root).await, before);
    assert_eq!(
        label(&scope.tenant("one").await, labels::READY_FOR_UPGRADE),
        Some("true")
    );
    manager.stop().await.unwrap();
    let _manager = Manager::start(&scope, Options::default());
    scope
        .ended_with("one", "TenantControlPlaneUpgradeCompleted")
        .await;
    assert_ne!(scope.versions(&root).await, before);
}

/// Only exactly `true` agrees.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_other_value_of_the_label_is_no_consent() {
    let (scope, _driver, manager) =
        Scope::with_manager("value", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    scope.edit(|content| templates::verbosity(content, 3)).await;
    let before = scope.versions(&root).await;
    for value in ["True", "yes", "1", ""] {
        let mark = manager.traffic.mark();
        scope.label("one", labels::READY_FOR_UPGRADE, json!(value)).await;
        eventually("a look at it", async || {
            let calls = manager.traffic.since(mark);
            calls
                .iter()
                .any(|call| call.verb == "get" && call.name == "one")
                .then_some(())
        })
        .await;
    }
    assert_eq!(scope.versions(&root).await, before);
    assert_eq!(
        label(&scope.tenant("one").await, labels::READY_FOR_UPGRADE),
        Some("")
    );
}

/// Going back to an earlier text is going back to its revision, with the keys of before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_text_is_its_earlier_revision() {
    let (scope, _driver, _manager) =
        Scope::with_manager("back", Options::default(), templates::full("ClusterIP")).await;
    let first = scope.provision("one").await;
    let root = root_of(&first);
    scope.edit(|content| templates::verbosity(content, 3)).await;
    let second = scope.upgrade("one").await;
    scope
        .edit(|content| *content = templates::full("ClusterIP"))
        .await;
    let third = scope.upgrade("one").await;
    assert_ne!(first.pin(), second.pin());
    assert_eq!(first.pin(), third.pin());
    let mut contents: BTreeMap<String, Value> = BTreeMap::new();
    for revision in scope.revisions().await {
        contents.insert(revision.name_any(), revision.data.unwrap().0);
    }
    assert_eq!(contents.len(), 2);
    assert_eq!(contents[third.pin().unwrap()], templates::full("ClusterIP"));
    let admin: Secret = scope.get(&root, "admin-kubeconfig").await;
    assert!(admin.annotations()[labels::ISSUED_FOR].starts_with(third.pin().unwrap()));
}
