//! Whose objects and namespaces are, on a real API server: what somebody else made is never overwritten, a tenant
//! takes with it what is its own and nothing else, and what is left of one that is gone is collected.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{ConfigMap, Namespace, Secret, Service},
        events::v1::Event,
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use vc_manager::{
    api::{VirtualCluster, labels, root_namespace, template::Template, virtual_cluster::phase},
    controller::{
        kubernetes::Kubernetes,
        orphans::{PATIENCE, Report, Sweeper},
        plan::{self, Goal, Observed, Plan},
        render::{self, Tenant},
    },
};

use support::{Driver, Manager, Options, Scope, condition, data, eventually, root_of, templates};

/// A sweep sees the whole server: tests with orphans take turns, or each would delete those of the others.
static SWEEPS: Mutex<()> = Mutex::const_new(());

fn namespaces(scope: &Scope) -> Api<Namespace> {
    Api::all(scope.client.clone())
}

/// Makes an object in the name of `manager`.
async fn create_as<K>(api: &Api<K>, manager: &str, object: Value) -> K
where
    K: Resource + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
{
    let params = PostParams {
        field_manager: Some(manager.into()),
        ..PostParams::default()
    };
    let object: K = serde_json::from_value(object).unwrap();
    api.create(&params, &object).await.unwrap()
}

/// The root namespace of a VirtualCluster as a manager makes it, before any has.
async fn make_root(scope: &Scope, tenant: &VirtualCluster) -> String {
    let value = render::namespace(&Tenant::of(tenant), false);
    create_as(&namespaces(scope), "vc-manager", value)
        .await
        .name_any()
}

/// A ConfigMap in `root` that does not go before [`release`].
async fn hold(scope: &Scope, root: &str) {
    let value = json!({"metadata": {"name": "held", "finalizers": ["example.com/hold"]}});
    create_as(&scope.api::<ConfigMap>(root), "test", value).await;
}

async fn release(scope: &Scope, root: &str) {
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let params = PatchParams::default();
    scope
        .api::<ConfigMap>(root)
        .patch("held", &params, &patch)
        .await
        .unwrap();
}

async fn when_gone(scope: &Scope, root: &str) {
    eventually("the namespace to be gone", async || {
        namespaces(scope)
            .get_opt(root)
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
}

async fn is_terminating(scope: &Scope, root: &str) -> bool {
    let namespace = namespaces(scope).get_opt(root).await.unwrap();
    namespace.is_some_and(|namespace| namespace.metadata.deletion_timestamp.is_some())
}

/// Reasons and notes of the Events about the object named `name`.
async fn events(scope: &Scope, namespace: &str, name: &str) -> Vec<(String, String)> {
    let all = scope
        .api::<Event>(namespace)
        .list(&ListParams::default())
        .await
        .unwrap();
    let about = |event: &Event| {
        event
            .regarding
            .as_ref()
            .and_then(|regarding| regarding.name.clone())
    };
    all.into_iter()
        .filter(|event| about(event).as_deref() == Some(name))
        .map(|event| (event.reason.unwrap_or_default(), event.note.unwrap_or_default()))
        .collect()
}

async fn told(scope: &Scope, namespace: &str, name: &str, reason: &str) -> String {
    eventually(reason, async || {
        let events = events(scope, namespace, name).await;
        events
            .into_iter()
            .find(|(known, _)| known == reason)
            .map(|(_, note)| note)
    })
    .await
}

/// Waits until provisioning failed for a reason with `part` in it.
async fn blocked(scope: &Scope, name: &str, part: &str) -> String {
    let message = |tenant: &VirtualCluster| {
        let conditions = &tenant.status.as_ref()?.conditions;
        let ready = conditions
            .iter()
            .find(|condition| condition.type_.as_deref() == Some("Ready"))?;
        ready.message.clone().filter(|message| message.contains(part))
    };
    let tenant = scope.when(name, part, |tenant| message(tenant).is_some()).await;
    let ready = condition(&tenant, "Ready");
    assert_eq!(
        (ready.status.as_str(), ready.reason.as_deref()),
        ("False", Some("ProvisioningFailed"))
    );
    message(&tenant).unwrap()
}

/// A Secret, a Service and a StatefulSet that others made under our names stay as they are, nothing is written beside
/// them, the tenant says so, and goes on when they are gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_others_are_not_overwritten() {
    let scope = Scope::new("theirs").await;
    let _driver = Driver::start(&scope);
    scope
        .create_cluster_version("theirs", templates::full("ClusterIP"))
        .await;
    let tenant = scope.create_tenant("one").await;
    let root = make_root(&scope, &tenant).await;
    let secrets = scope.api::<Secret>(&root);
    let services = scope.api::<Service>(&root);
    let sets = scope.api::<StatefulSet>(&root);
    create_as(
        &secrets,
        "kubectl-create",
        json!({"metadata": {"name": "root-ca"}, "stringData": {"tls.crt": "theirs"}}),
    )
    .await;
    create_as(
        &services,
        "helm",
        json!({"metadata": {"name": "apiserver-svc"}, "spec": {"ports": [{"port": 80}]}}),
    )
    .await;
    let mut set = templates::full("ClusterIP")["controllerManager"]["statefulset"].clone();
    set["spec"]["replicas"] = json!(0);
    create_as(&sets, "argocd-controller", set).await;
    let before = scope.versions(&root).await;
    let manager = Manager::start(&scope, Options::default());

    let message = blocked(&scope, "one", "are left alone").await;
    for part in [
        format!("Secret {root}/root-ca, made by kubectl-create"),
        format!("Service {root}/apiserver-svc, made by helm"),
        format!("StatefulSet {root}/controller-manager, made by argocd-controller"),
        "delete them".into(),
    ] {
        assert!(message.contains(&part), "{message}");
    }
    // It is tried again, with the same result.
    blocked(&scope, "one", "are left alone").await;
    scope
        .when("one", "failed twice", |tenant| {
            tenant.status.as_ref().unwrap().message == "retry: 1"
        })
        .await;
    let mut after = scope.versions(&root).await;
    // Only its status is written, by the player of the StatefulSet controller.
    let set = sets.get("controller-manager").await.unwrap();
    assert_eq!(set.metadata.generation, Some(1));
    after.insert(
        "StatefulSet/controller-manager".into(),
        before["StatefulSet/controller-manager"].clone(),
    );
    assert_eq!(after, before);
    assert!(manager.traffic.writes().iter().all(|call| call.namespace != root));

    let params = DeleteParams::default();
    secrets.delete("root-ca", &params).await.unwrap();
    services.delete("apiserver-svc", &params).await.unwrap();
    sets.delete("controller-manager", &params).await.unwrap();
    scope.settled("one").await;
    assert_eq!(scope.secrets(&root).await.len(), 7);
}

/// Objects of the Go manager's are the tenant's, as are those that a person declares to be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_the_go_manager_and_declared_ones_are_taken_over() {
    let scope = Scope::new("taken").await;
    let _driver = Driver::start(&scope);
    scope
        .create_cluster_version("taken", templates::full("ClusterIP"))
        .await;
    let tenant = scope.create_tenant("one").await;
    let root = make_root(&scope, &tenant).await;
    // Go managers before they applied made objects under the name of their program, later ones apply.
    let set = templates::full("ClusterIP")["etcd"]["statefulset"].clone();
    create_as(&scope.api::<StatefulSet>(&root), "manager", set).await;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "apiserver-svc"},
        "spec": {"selector": {"component-name": "old"}, "ports": [{"port": 6443}]}});
    let params = PatchParams::apply("virtualcluster/provisioner/native").force();
    let services = scope.api::<Service>(&root);
    services
        .patch("apiserver-svc", &params, &Patch::Apply(service))
        .await
        .unwrap();
    let leaf = json!({"metadata": {"name": "front-proxy-ca"}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": "old", "tls.key": "old"}});
    create_as(&scope.api::<Secret>(&root), "kubectl-create", leaf).await;
    let ca = made_elsewhere(&scope).await;
    create_as(&scope.api::<Secret>(&root), "velero", ca.clone()).await;
    let _manager = Manager::start(&scope, Options::default());

    // Now that there is an etcd, a root CA that is there was restored, and is only read.
    let message = blocked(&scope, "one", "are left alone").await;
    assert!(
        message.contains("front-proxy-ca") && !message.contains("root-ca"),
        "{message}"
    );
    let patch = json!({"metadata": {"annotations": {labels::ISSUED_FOR: "by hand"}}});
    let secrets = scope.api::<Secret>(&root);
    secrets
        .patch("front-proxy-ca", &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
    scope.settled("one").await;
    let selector = services
        .get("apiserver-svc")
        .await
        .unwrap()
        .spec
        .unwrap()
        .selector
        .unwrap();
    assert_eq!(selector["component-name"], "apiserver");
    let kept = secrets.get("root-ca").await.unwrap();
    assert_eq!(serde_json::to_value(kept.data).unwrap(), ca["data"]);
    assert_ne!(
        data(&secrets.get("front-proxy-ca").await.unwrap())["tls.key"],
        "old"
    );
}

/// A Secret `root-ca` as a backup has it that says nothing but its content.
async fn made_elsewhere(scope: &Scope) -> Value {
    let (_, pair) =
        tokio::task::spawn_blocking(|| vc_manager::pki::Authority::create(Timestamp::now()).unwrap())
            .await
            .unwrap();
    let text = std::collections::BTreeMap::from([
        ("tls.crt", pair.certificate_pem.as_str()),
        ("tls.key", pair.key_pem.as_str()),
    ]);
    let tenant = Tenant::of(&scope.tenant("one").await);
    render::secret(render::TenantSecret::RootCa, &tenant, &text, None)
}

/// A root CA and a service-account key that are lost are restored by other means than ours, and are used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_keys_may_be_restored() {
    let scope = Scope::new("restored").await;
    let driver = Driver::start(&scope);
    driver.hold("one", "apiserver");
    scope
        .create_cluster_version("restored", templates::full("ClusterIP"))
        .await;
    scope.create_tenant("one").await;
    let manager = Manager::start(&scope, Options::default());
    let tenant = scope
        .when("one", "pending", |tenant| tenant.phase() == phase::PENDING)
        .await;
    let root = root_of(&tenant);
    eventually("the apiserver to be made", async || {
        scope
            .api::<StatefulSet>(&root)
            .get_opt("apiserver")
            .await
            .unwrap()
    })
    .await;
    drop(manager);
    let secrets = scope.api::<Secret>(&root);
    let mut contents = Vec::new();
    for name in ["root-ca", "serviceaccount-rsa"] {
        contents.push(data(&secrets.get(name).await.unwrap()));
        secrets.delete(name, &DeleteParams::default()).await.unwrap();
    }
    driver.release("one", "apiserver");
    let _manager = Manager::start(&scope, Options::default());
    blocked(&scope, "one", "root-ca is gone").await;
    for (name, content) in ["root-ca", "serviceaccount-rsa"].iter().zip(&contents) {
        let secret = json!({"metadata": {"name": name}, "type": "kubernetes.io/tls", "stringData": content});
        create_as(&secrets, "kubectl-client-side-apply", secret).await;
    }
    scope.settled("one").await;
    for (name, content) in ["root-ca", "serviceaccount-rsa"].iter().zip(&contents) {
        let stored = secrets.get(name).await.unwrap();
        assert_eq!((&data(&stored), stored.annotations().len()), (content, 0));
    }
}

/// A namespace of the root namespace's name that is somebody else's is in the way until it is removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_of_others_is_in_the_way_until_it_is_gone() {
    let scope = Scope::new("occupied").await;
    let _driver = Driver::start(&scope);
    scope
        .create_cluster_version("occupied", templates::full("ClusterIP"))
        .await;
    let root = root_namespace::of(&scope.create_tenant("one").await);
    let theirs = json!({"metadata": {"name": root, "annotations": {"owner": "somebody"}}});
    create_as(&namespaces(&scope), "kubectl-create", theirs).await;
    let _manager = Manager::start(&scope, Options::default());
    blocked(&scope, "one", "is left alone").await;
    let kept = namespaces(&scope).get(&root).await.unwrap();
    assert_eq!(kept.annotations().len(), 1);
    namespaces(&scope)
        .delete(&root, &DeleteParams::default())
        .await
        .unwrap();
    scope.settled("one").await;
    let own = namespaces(&scope).get(&root).await.unwrap();
    assert_eq!(own.annotations()[labels::VC_NAME], "one");
}

/// A root namespace that does not go is said on the VirtualCluster, with what holds it and what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_keeps_a_tenant_from_going_is_said() {
    let (scope, _driver, manager) =
        Scope::with_manager("held", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    hold(&scope, &root).await;
    scope
        .tenants()
        .delete("one", &DeleteParams::default())
        .await
        .unwrap();
    let is_told = |tenant: &VirtualCluster| condition(tenant, "Ready").reason.as_deref() == Some("Deleting");
    let tenant = scope.when("one", "told", is_told).await;
    let ready = condition(&tenant, "Ready");
    let message = ready.message.clone().unwrap();
    assert_eq!(ready.status, "False");
    for part in [
        root.as_str(),
        "example.com/hold in 1 resource instances",
        "remove the finalizers from the objects",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(
        tenant.phase(),
        phase::RUNNING,
        "the phases are those of the Go manager"
    );
    let note = told(&scope, "held", "one", "DeletionWaits").await;
    assert!(note.contains("example.com/hold"), "{note}");
    // It is said once, and looked at less and less often.
    let before = manager.traffic.mark();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = manager.traffic.since(before);
    let looks = calls
        .iter()
        .filter(|call| call.verb == "get" && call.name == root)
        .count();
    assert!((1..=3).contains(&looks), "{looks} looks in 5 s");
    assert!(calls.iter().all(|call| !call.is_write()), "{calls:?}");
    assert_eq!(
        events(&scope, "held", "one")
            .await
            .iter()
            .filter(|(reason, _)| reason == "DeletionWaits")
            .count(),
        1
    );

    release(&scope, &root).await;
    when_gone(&scope, &root).await;
    eventually("the VirtualCluster to be gone", async || {
        scope
            .tenants()
            .get_opt("one")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
}

/// A root namespace that somebody deletes while the tenant comes up is waited for, and made anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_that_goes_during_provisioning_is_waited_for() {
    let scope = Scope::new("going").await;
    let driver = Driver::start(&scope);
    driver.hold("one", "etcd");
    scope
        .create_cluster_version("going", templates::full("ClusterIP"))
        .await;
    scope.create_tenant("one").await;
    let manager = Manager::start(&scope, Options::flags(&["--provisioner-timeout=3s"]));
    let tenant = scope
        .when("one", "pending", |tenant| tenant.phase() == phase::PENDING)
        .await;
    let root = root_of(&tenant);
    eventually("etcd to be made", async || {
        scope.api::<StatefulSet>(&root).get_opt("etcd").await.unwrap()
    })
    .await;
    let old = namespaces(&scope).get(&root).await.unwrap().uid();
    hold(&scope, &root).await;
    namespaces(&scope)
        .delete(&root, &DeleteParams::default())
        .await
        .unwrap();
    blocked(&scope, "one", &format!("namespace {root} to be gone")).await;
    let refused = manager.traffic.calls();
    assert!(
        !refused
            .iter()
            .any(|call| call.verb == "delete" && call.resource == "namespaces")
    );
    release(&scope, &root).await;
    driver.release("one", "etcd");
    scope.settled("one").await;
    assert_ne!(namespaces(&scope).get(&root).await.unwrap().uid(), old);
}

/// The same as a table: quiet at first, then in words.
#[test]
fn a_namespace_that_takes_too_long_blocks_provisioning() {
    let mut vc = VirtualCluster::new(
        "one",
        serde_json::from_value(json!({"clusterVersionName": "v"})).unwrap(),
    );
    vc.metadata.namespace = Some("ns".into());
    vc.metadata.uid = Some("u".into());
    let tenant = Tenant::of(&vc);
    let template = Template::parse(&templates::full("ClusterIP")).unwrap();
    let goal = Goal {
        tenant: &tenant,
        template: &template,
        revision: "r1",
        super_cluster_labelling: false,
    };
    let since: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let plan = |annotations: bool, seconds: i64| {
        let mut namespace = render::namespace(&tenant, false);
        namespace["metadata"]["deletionTimestamp"] = json!(since.to_string());
        if !annotations {
            namespace["metadata"]["annotations"] = json!({});
        }
        let observed = Observed {
            namespace: Some(serde_json::from_value(namespace).unwrap()),
            ..Observed::default()
        };
        plan::provision(
            &goal,
            &observed,
            None,
            true,
            since + SignedDuration::from_secs(seconds),
        )
    };
    assert!(matches!(plan(true, 30), Plan::Wait(_)));
    let Plan::Blocked(why) = plan(true, 31) else {
        panic!("{:?}", plan(true, 31))
    };
    assert!(why.contains("is not gone"), "{why}");
    let Plan::Blocked(why) = plan(false, 31) else {
        panic!("{:?}", plan(false, 31))
    };
    assert!(
        why.contains("is left alone"),
        "somebody else's is none of its business: {why}"
    );
}

/// A sweeper like the manager's, for the whole server.
fn sweeper(scope: &Scope) -> Sweeper {
    let limit = Duration::from_secs(10);
    Sweeper::new(Kubernetes::new(scope.client.clone(), limit), limit, PATIENCE)
}

/// The names of namespaces in a report that belong to `scope`: deleted, suspected, left alone.
fn names(report: &Report, scope: &Scope) -> [Vec<String>; 3] {
    assert!(report.ended_by.is_none(), "{report:?}");
    let prefix = format!("{}-", scope.namespace);
    let own = |names: Vec<&String>| {
        let names = names.into_iter().filter(|name| name.starts_with(&prefix));
        let mut names: Vec<_> = names.cloned().collect();
        names.sort();
        names
    };
    [
        own(report.deleted.iter().map(|(root, _)| &root.name).collect()),
        own(report.suspected.iter().map(|root| &root.name).collect()),
        own(report.left_alone.iter().map(|(root, _)| &root.name).collect()),
    ]
}

/// A namespace annotated as the root namespace of the VirtualCluster `name` with this uid.
async fn root_for(scope: &Scope, name: &str, uid: &str) -> String {
    let mut vc = VirtualCluster::new(
        name,
        serde_json::from_value(json!({"clusterVersionName": "v"})).unwrap(),
    );
    vc.metadata.namespace = Some(scope.namespace.clone());
    vc.metadata.uid = Some(uid.into());
    make_root(scope, &vc).await
}

async fn annotate(scope: &Scope, root: &str, key: &str, value: Value) {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {key: value}}}));
    namespaces(scope)
        .patch(root, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Orphans go after two sweeps with time in between, everything else stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_are_collected_and_nothing_else() {
    let _turn = SWEEPS.lock().await;
    let scope = Scope::new("orphans").await;
    let alive = make_root(&scope, &scope.create_tenant("alive").await).await;
    // A VirtualCluster of the same name is another one.
    scope.create_tenant("again").await;
    let again = root_for(&scope, "again", "an-earlier-one").await;
    let absent = root_for(&scope, "absent", "gone").await;
    let going = root_for(&scope, "going", "gone").await;
    hold(&scope, &going).await;
    namespaces(&scope)
        .delete(&going, &DeleteParams::default())
        .await
        .unwrap();
    let claimed = root_for(&scope, "claimed", "gone").await;
    scope.create_tenant("restored").await;
    let claim =
        json!({"status": {"phase": "Running", "clusterNamespace": claimed, "message": "", "reason": ""}});
    scope
        .tenants()
        .patch_status("restored", &PatchParams::default(), &Patch::Merge(claim))
        .await
        .unwrap();
    let edited = root_for(&scope, "edited", "gone").await;
    annotate(&scope, &edited, labels::VC_UID, json!("another")).await;
    let nameless = root_for(&scope, "nameless", "gone").await;
    annotate(&scope, &nameless, labels::VC_NAME, Value::Null).await;
    let misled = make_root(&scope, &scope.create_tenant("misled").await).await;
    annotate(&scope, &misled, labels::VC_UID, json!("another")).await;
    // What the syncer makes for a tenant bears three of the annotations.
    let synced = root_for(&scope, "synced", "gone").await;
    annotate(&scope, &synced, labels::VC_ROOT_NS, Value::Null).await;
    let foreign = json!({"metadata": {"name": "orphans-foreign", "annotations": {
        labels::VC_ROOT_NS: "true", labels::VC_NAME: "absent", labels::VC_NAMESPACE: "orphans", labels::VC_UID: "gone"}}});
    let foreign = create_as(&namespaces(&scope), "helm", foreign).await.name_any();

    let mut sweeper = sweeper(&scope);
    let (nobody, start) = (BTreeSet::new(), Instant::now());
    let sorted = |mut names: Vec<&String>| {
        names.sort();
        names.into_iter().cloned().collect::<Vec<_>>()
    };
    let suspects = sorted(vec![&again, &absent]);
    let doubtful = sorted(vec![&claimed, &edited, &nameless, &misled, &foreign]);
    let first = sweeper.sweep(&nobody, start).await.unwrap();
    assert_eq!(
        names(&first, &scope),
        [vec![], suspects.clone(), doubtful.clone()]
    );
    let why = |name: &String| {
        let mut all = first.left_alone.iter();
        all.find(|(root, _)| root.name == *name).unwrap().1.clone()
    };
    assert!(
        why(&claimed).contains("VirtualCluster orphans/restored"),
        "{}",
        why(&claimed)
    );
    assert!(
        why(&misled).contains("VirtualCluster orphans/misled"),
        "{}",
        why(&misled)
    );
    assert!(
        why(&nameless).contains("lacks some of the annotations"),
        "{}",
        why(&nameless)
    );
    for edited in [&edited, &foreign] {
        assert!(why(edited).contains("would have another name"), "{}", why(edited));
    }

    // Not before its time, and not if its VirtualCluster is there again.
    let almost = start + PATIENCE.checked_sub(Duration::from_secs(1)).unwrap();
    let second = sweeper.sweep(&nobody, almost).await.unwrap();
    assert_eq!(names(&second, &scope), [vec![], vec![], doubtful.clone()]);
    assert!(sweeper.is_waiting());
    let third = sweeper.sweep(&nobody, start + PATIENCE).await.unwrap();
    assert_eq!(
        names(&third, &scope),
        [suspects.clone(), vec![], doubtful.clone()]
    );
    assert!(!sweeper.is_waiting());
    for root in &suspects {
        when_gone(&scope, root).await;
    }
    // Whom the manager itself saw go need not wait.
    let seen = root_for(&scope, "seen", "seen-to-go").await;
    let gone = BTreeSet::from(["seen-to-go".to_owned()]);
    let fourth = sweeper.sweep(&gone, start).await.unwrap();
    assert_eq!(
        names(&fourth, &scope),
        [vec![seen.clone()], vec![], doubtful.clone()]
    );
    when_gone(&scope, &seen).await;

    for root in doubtful.iter().chain([&alive, &synced]) {
        let kept = namespaces(&scope).get(root).await.unwrap();
        assert!(kept.metadata.deletion_timestamp.is_none(), "{root}");
    }
    release(&scope, &going).await;
}

/// Without the kind there is no telling: nothing is an orphan.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_definitions_nothing_is_an_orphan() {
    let server = tokio::task::spawn_blocking(support::ApiServer::start)
        .await
        .unwrap();
    let client = server.client().await;
    let namespaces = Api::<Namespace>::all(client.clone());
    let name = root_namespace::name("ns", "one", "gone");
    let root = json!({"metadata": {"name": name, "annotations": {labels::VC_ROOT_NS: "true",
        labels::VC_NAME: "one", labels::VC_NAMESPACE: "ns", labels::VC_UID: "gone"}}});
    create_as(&namespaces, "vc-manager", root).await;
    let limit = Duration::from_secs(10);
    let mut sweeper = Sweeper::new(Kubernetes::new(client, limit), limit, Duration::ZERO);
    let gone = BTreeSet::from(["gone".to_owned()]);
    for _ in 0..2 {
        let error = sweeper
            .sweep(&gone, Instant::now())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("list virtualclusters"), "{error}");
    }
    assert!(
        namespaces
            .get(&name)
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_none()
    );
    // Once it is there, the same two sweeps delete.
    let server = tokio::task::spawn_blocking(move || {
        server.install(&vc_manager::api::crd::crds());
        server
    })
    .await
    .unwrap();
    let report = sweeper.sweep(&BTreeSet::new(), Instant::now()).await.unwrap();
    assert_eq!(report.deleted.len(), 1, "{report:?}");
    drop(server);
}

/// A tenant that is robbed of its finalizer while a manager runs leaves nothing for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_was_seen_to_go_leaves_nothing() {
    let _turn = SWEEPS.lock().await;
    let (scope, _driver, manager) =
        Scope::with_manager("robbed", Options::default(), templates::full("ClusterIP")).await;
    let names: Vec<_> = (0..8).map(|n| format!("t{n}")).collect();
    let tenants = futures::future::join_all(names.iter().map(|name| scope.provision(name))).await;
    // The manager puts a finalizer back as soon as it sees it gone: whoever strips it has to be quick.
    let mut robbed = Vec::new();
    for (name, tenant) in names.iter().zip(&tenants) {
        let strip = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        scope
            .tenants()
            .patch(name, &PatchParams::default(), &strip)
            .await
            .unwrap();
        scope
            .tenants()
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
        if scope.tenants().get_opt(name).await.unwrap().is_none() {
            robbed.push((name, root_of(tenant)));
        }
    }
    assert!(!robbed.is_empty(), "the manager was quicker every time");
    for (name, root) in &robbed {
        let note = told(&scope, "default", root, "OrphanDeleted").await;
        assert!(note.contains("was seen to go without it"), "{note}");
        assert!(note.contains(&format!("robbed/{name}")), "{note}");
        let writes = manager.traffic.writes();
        assert!(
            writes
                .iter()
                .any(|call| call.verb == "delete" && call.name == *root)
        );
    }
    for tenant in &tenants {
        when_gone(&scope, &root_of(tenant)).await;
    }
}

/// One that was deleted in good order costs one look at its namespace, and no sweep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_that_went_in_good_order_calls_for_no_sweep() {
    let (scope, _driver, manager) =
        Scope::with_manager("order", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    let sweeps = |calls: &[support::Call]| {
        let lists = calls.iter().filter(|call| call.verb == "list");
        lists.filter(|call| call.resource == "namespaces").count()
    };
    assert_eq!(sweeps(&manager.traffic.calls()), 1, "the one at the start");
    scope.delete("one").await;
    let mark = manager.traffic.mark();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = manager.traffic.since(mark);
    let looks = calls
        .iter()
        .filter(|call| call.verb == "get" && call.name == root);
    assert_eq!((looks.count(), sweeps(&calls)), (1, 0), "{calls:?}");
}

/// A root namespace that outlives its tenant because its annotations do not name it is reported and stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_whose_annotations_were_edited_stays() {
    let (scope, _driver, manager) =
        Scope::with_manager("edited", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    annotate(&scope, &root, labels::VC_UID, json!("another")).await;
    let before = namespaces(&scope).get(&root).await.unwrap();
    scope.delete("one").await;
    told(&scope, "edited", "one", "NamespaceNotOurs").await;
    let note = told(&scope, "default", &root, "NamespaceLeftAlone").await;
    assert!(note.contains("delete it if nobody needs it"), "{note}");
    let after = namespaces(&scope).get(&root).await.unwrap();
    assert_eq!(after.resource_version(), before.resource_version());
    assert!(
        manager
            .traffic
            .writes()
            .iter()
            .all(|call| call.verb != "delete" || call.name != root)
    );
}

/// Strips the finalizer and deletes, as somebody does who has lost patience; no manager is there to object.
async fn rob(scope: &Scope, name: &str) {
    let strip = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    scope
        .tenants()
        .patch(name, &PatchParams::default(), &strip)
        .await
        .unwrap();
    // Gone by the strip, if it was being deleted already.
    let _ = scope.tenants().delete(name, &DeleteParams::default()).await;
    eventually("the VirtualCluster to be gone", async || {
        scope
            .tenants()
            .get_opt(name)
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
}

/// A VirtualCluster that is made anew under the same name has a namespace of its own while the old one still goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn made_anew_while_the_old_one_is_terminating() {
    let (scope, _driver, manager) =
        Scope::with_manager("anew", Options::default(), templates::full("ClusterIP")).await;
    let old = root_of(&scope.provision("one").await);
    let old_ca = scope.secrets(&old).await["root-ca"].clone();
    hold(&scope, &old).await;
    scope
        .tenants()
        .delete("one", &DeleteParams::default())
        .await
        .unwrap();
    eventually("the old namespace to be on its way out", async || {
        is_terminating(&scope, &old).await.then_some(())
    })
    .await;
    rob(&scope, "one").await;
    let new = root_of(&scope.provision("one").await);
    assert_ne!(new, old);
    assert_ne!(scope.secrets(&new).await["root-ca"], old_ca);
    assert!(is_terminating(&scope, &old).await);
    let ready = condition(&scope.tenant("one").await, "Ready").clone();
    assert_eq!(ready.status, "True", "{ready:?}");
    release(&scope, &old).await;
    when_gone(&scope, &old).await;
    // What becomes of the old one is none of the new one's business, and it can go itself.
    scope.delete("one").await;
    assert!(namespaces(&scope).get_opt(&new).await.unwrap().is_none());
    let deleted = manager.traffic.writes();
    let times = |root: &String| {
        deleted
            .iter()
            .filter(|call| call.verb == "delete" && call.name == *root)
            .count()
    };
    assert_eq!((times(&old), times(&new)), (1, 1));
}

/// The same with one that was left behind while no manager ran: it is not taken over, and collected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn made_anew_beside_an_orphan() {
    let _turn = SWEEPS.lock().await;
    let (scope, _driver, manager) =
        Scope::with_manager("beside", Options::default(), templates::full("ClusterIP")).await;
    let old = root_of(&scope.provision("one").await);
    manager.stop().await.unwrap();
    rob(&scope, "one").await;
    let before = (
        namespaces(&scope).get(&old).await.unwrap(),
        scope.versions(&old).await,
    );
    let manager = Manager::start(&scope, Options::default());
    let new = root_of(&scope.provision("one").await);
    assert_ne!(new, old);
    let note = told(&scope, "default", &old, "Orphaned").await;
    assert!(
        note.contains("VirtualCluster beside/one") && note.contains("in 5 minutes"),
        "{note}"
    );
    let after = (
        namespaces(&scope).get(&old).await.unwrap(),
        scope.versions(&old).await,
    );
    assert_eq!(after, before, "not touched so soon");
    assert!(
        manager
            .traffic
            .writes()
            .iter()
            .all(|call| call.namespace != old && call.name != old)
    );

    let mut sweeper = sweeper(&scope);
    let (nobody, start) = (BTreeSet::new(), Instant::now());
    assert_eq!(
        names(&sweeper.sweep(&nobody, start).await.unwrap(), &scope)[1],
        [old.as_str()]
    );
    assert_eq!(
        names(&sweeper.sweep(&nobody, start + PATIENCE).await.unwrap(), &scope)[0],
        [old.as_str()]
    );
    when_gone(&scope, &old).await;
    assert!(!is_terminating(&scope, &new).await);
    assert_eq!(scope.versions(&new).await.len(), 7 + 2 + 3);
}

/// A tenant that is deleted in whatever state goes with its namespace, and gives its turn to the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_while_it_is_provisioned_fails_or_upgrades() {
    let scope = Scope::new("whenever").await;
    let driver = Driver::start(&scope);
    scope
        .create_cluster_version("whenever", templates::full("ClusterIP"))
        .await;
    let flags = [
        "--max-starting-tenants=1",
        "--max-upgrading-tenants=1",
        "--provisioner-timeout=2s",
    ];
    let manager = Manager::start(&scope, Options::flags(&flags[..2]));

    // At each stage of provisioning.
    for set in ["etcd", "apiserver", "controller-manager"] {
        driver.hold(set, set);
        scope.create_tenant(set).await;
        let root = root_of(
            &scope
                .when(set, "pending", |tenant| tenant.phase() == phase::PENDING)
                .await,
        );
        eventually("the StatefulSet to be made", async || {
            scope.api::<StatefulSet>(&root).get_opt(set).await.unwrap()
        })
        .await;
        scope.delete(set).await;
        assert!(
            namespaces(&scope).get_opt(&root).await.unwrap().is_none(),
            "{set}"
        );
    }
    // While it upgrades, another one waits for its turn, and gets it.
    scope.provision("first").await;
    scope.provision("second").await;
    driver.hold("first", "apiserver");
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.opt_in("first").await;
    let upgrading = |tenant: &VirtualCluster| {
        tenant
            .status
            .as_ref()
            .is_some_and(|status| status.upgrade.is_some())
    };
    let root = root_of(&scope.when("first", "upgrading", upgrading).await);
    scope.opt_in("second").await;
    scope
        .when("second", "waiting", |tenant| {
            condition_reason(tenant, "Upgrading").as_deref() == Some("Waiting")
        })
        .await;
    scope.delete("first").await;
    assert!(namespaces(&scope).get_opt(&root).await.unwrap().is_none());
    scope
        .ended_with("second", "TenantControlPlaneUpgradeCompleted")
        .await;
    drop(manager);

    // While it fails: a component that never starts, and one that failed to upgrade.
    let _manager = Manager::start(&scope, Options::flags(&flags));
    driver.hold("broken", "etcd");
    scope.create_tenant("broken").await;
    let root = root_of(
        &scope
            .when("broken", "in Error", |tenant| tenant.phase() == phase::ERROR)
            .await,
    );
    scope.delete("broken").await;
    assert!(namespaces(&scope).get_opt(&root).await.unwrap().is_none());
    driver.hold("second", "apiserver");
    scope.edit(|content| templates::verbosity(content, 4)).await;
    scope.opt_in("second").await;
    let root = root_of(
        &scope
            .ended_with("second", "TenantControlPlaneUpgradeFailed")
            .await,
    );
    scope.delete("second").await;
    assert!(namespaces(&scope).get_opt(&root).await.unwrap().is_none());
}

fn condition_reason(tenant: &VirtualCluster, type_: &str) -> Option<String> {
    let conditions = &tenant.status.as_ref()?.conditions;
    let found = conditions
        .iter()
        .find(|condition| condition.type_.as_deref() == Some(type_))?;
    found.reason.clone()
}
