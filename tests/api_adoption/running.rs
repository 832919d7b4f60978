//! Tenants that run.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use futures::future::join_all;
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, StatefulSet},
    core::v1::{Namespace, Service},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::api::{VirtualCluster, virtual_cluster::Condition};

use crate::found::{
    FOR_LIFE, Found, assert_second_start_is_silent, assert_untouched, at_rest, footprint,
    has_good_kubeconfigs, marks, object, pin, poke, taken_over,
};
use crate::made::{left, prepared, present, running, unready};
use crate::support::{
    Cut, Manager, Options, Scope, eventually, templates,
    upstream::{Layout, Tenant, raw},
};

/// What no upgrade touches.
const ETCD: [&str; 3] = ["StatefulSet/etcd", "Service/etcd", "Secret/etcd-ca"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_runs_is_taken_over_without_a_write() {
    running_tenants("ownip", "ClusterIP").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_runs_behind_a_node_port_is_taken_over_without_a_write() {
    running_tenants("ownport", "NodePort").await;
}

async fn running_tenants(scope: &str, service_type: &str) {
    let (scope, driver) = prepared(scope, present(service_type)).await;
    let tenants = running(&scope.namespace, service_type);
    let mut found = left(&scope, &tenants).await;
    let stuck = found
        .iter_mut()
        .find(|tenant| tenant.name == "stuck")
        .expect("it is one of them");
    driver.hold("stuck", "apiserver");
    unready(&scope, &stuck.root, "apiserver").await;
    *stuck = Found::of(&scope, "stuck", &stuck.root).await;
    let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();

    let manager = Manager::start(&scope, Options::default());
    let mut pins = BTreeMap::new();
    for name in &names {
        pins.insert(*name, pin(&taken_over(&scope, name).await).to_owned());
    }
    at_rest(&manager, &names).await;
    assert_untouched(&scope, &found, &manager).await;
    let recorded: BTreeSet<_> = scope
        .revisions()
        .await
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    for (name, pin) in &pins {
        assert!(recorded.contains(pin), "{name}: {pin} is not among {recorded:?}");
    }
    // What was left in the middle of an upgrade runs something else.
    for (one, other) in [("plain", "gated"), ("plain", "upgraded")] {
        assert_eq!(pins[one], pins[other], "{one} and {other} run the same");
    }
    for other in ["refused", "stuck"] {
        assert_ne!(
            pins["plain"], pins[other],
            "{other} does not run what its ClusterVersion says"
        );
    }
    assert_ne!(pins["refused"], pins["stuck"]);

    // A look for another reason changes nothing.
    for name in &names {
        poke(&scope, name, "look").await;
    }
    at_rest(&manager, &names).await;
    assert_untouched(&scope, &found, &manager).await;
    manager.stop().await.unwrap();
    assert_second_start_is_silent(&scope, &found).await;

    let manager = Manager::start(&scope, Options::default());
    scope.edit(|content| templates::verbosity(content, 5)).await;
    // Nobody agreed yet.
    at_rest(&manager, &names).await;
    assert_untouched(&scope, &found, &manager).await;
    let repaired = async {
        let root = &found
            .iter()
            .find(|tenant| tenant.name == "stuck")
            .expect("one of them")
            .root;
        eventually(
            "another apiserver in the place of the one that is stuck",
            async || {
                let set: StatefulSet = scope.get(root, "apiserver").await;
                let container = &set.spec?.template.spec?.containers[0];
                container
                    .args
                    .as_ref()?
                    .contains(&"-v=5".to_owned())
                    .then_some(())
            },
        )
        .await;
        driver.release("stuck", "apiserver");
    };
    let upgrades = join_all(found.iter().map(|tenant| first_upgrade(&scope, tenant)));
    tokio::join!(upgrades, repaired);
    // And the next one is one like any other.
    scope.edit(|content| templates::verbosity(content, 6)).await;
    join_all(found.iter().map(|tenant| scope.upgrade(&tenant.name))).await;
    for tenant in &found {
        let sets = marks::<StatefulSet>(&scope, &tenant.root).await;
        assert_eq!(
            sets["StatefulSet/etcd"], tenant.footprint["StatefulSet/etcd"],
            "{}",
            tenant.name
        );
    }
}

/// The first upgrade of a tenant that was taken over, to a content with `-v=5`.
pub(crate) async fn first_upgrade(scope: &Scope, tenant: &Found) {
    first_upgrade_to(scope, tenant, "-v=5").await;
}

/// The same to another verbosity.
pub(crate) async fn first_upgrade_to(scope: &Scope, tenant: &Found, verbosity: &str) {
    let (name, root) = (&tenant.name, &tenant.root);
    let taken = object(scope, name).await;
    scope.upgrade(name).await;
    let upgraded = object(scope, name).await;
    assert_ne!(pin(&upgraded), pin(&taken), "{name}");
    assert_ne!(
        upgraded["status"]["revision"]["adopted"], true,
        "{name} runs what we made"
    );
    let footprint = footprint(scope, root).await;
    for object in ETCD {
        assert_eq!(
            footprint[object], tenant.footprint[object],
            "{name}: {object} was written"
        );
    }
    let secrets = scope.secrets(root).await;
    for secret in FOR_LIFE {
        assert_eq!(secrets[secret], tenant.secrets[secret], "{name}: {secret}");
    }
    for secret in [
        "apiserver-ca",
        "front-proxy-ca",
        "admin-kubeconfig",
        "controller-manager-kubeconfig",
    ] {
        assert_ne!(secrets[secret], tenant.secrets[secret], "{name}: {secret}");
    }
    assert!(has_good_kubeconfigs(&secrets, root), "{name}");
    let hashes = [
        (
            "apiserver",
            vec![
                "apiserver-ca-hash",
                "front-proxy-ca-hash",
                "root-ca-hash",
                "serviceaccount-rsa-hash",
            ],
        ),
        (
            "controller-manager",
            vec![
                "controller-manager-kubeconfig-hash",
                "root-ca-hash",
                "serviceaccount-rsa-hash",
            ],
        ),
    ];
    for (set, hashes) in hashes {
        let set = serde_json::to_value(scope.get::<StatefulSet>(root, set).await).unwrap();
        let spec = &set["spec"];
        let template = &spec["template"];
        assert_eq!(template["spec"]["containers"][0]["args"][0], *verbosity, "{name}");
        assert_eq!(
            spec["updateStrategy"]["type"], "RollingUpdate",
            "{name}: or no pod is replaced"
        );
        assert_eq!(
            template["metadata"]["labels"]["tenancy.x-k8s.io/cluster"], **root,
            "{name}"
        );
        let annotations = template["metadata"]["annotations"]
            .as_object()
            .expect("annotations");
        assert_eq!(annotations.keys().collect::<Vec<_>>(), hashes, "{name}");
    }
}

/// Tenants of one ClusterVersion that run the same are pinned to the same, and nothing is written of any of them then.
///
/// How many there are, and for how many seconds they are watched, can be told: `make measure-fleet`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_shares_one_revision() {
    let told = |variable: &str, otherwise: u64| {
        let text = std::env::var(variable).ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let (count, seconds) = (told("VCM_FLEET", 6), told("VCM_FLEET_SECONDS", 2));
    let (scope, _driver) = prepared("fleet", present("ClusterIP")).await;
    let tenants: Vec<_> = (0..count)
        .map(|nth| {
            let tenant = Tenant::new("fleet", &format!("tenant-{nth}"), "fleet");
            if nth % 2 == 0 { tenant } else { tenant.gate() }
        })
        .collect();
    let found = left(&scope, &tenants).await;
    let began = Instant::now();
    let manager = Manager::start(&scope, Options::default());
    let mut objects = Vec::new();
    for tenant in &found {
        objects.push(taken_over(&scope, &tenant.name).await);
    }
    let took = began.elapsed();
    let pins: BTreeSet<_> = objects.iter().map(pin).collect();
    assert_eq!(pins.len(), 1, "{pins:?}");
    let names: Vec<_> = found.iter().map(|tenant| tenant.name.as_str()).collect();
    at_rest(&manager, &names).await;
    assert_untouched(&scope, &found, &manager).await;
    let written = manager.traffic.writes().len();
    let mark = manager.traffic.mark();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let since = manager.traffic.since(mark);
    let writes = since.iter().filter(|call| call.is_write()).count();
    println!(
        "{count} tenants taken over in {took:.1?} with {written} writes; in the {seconds} s after that {writes} writes and {} \
         other requests",
        since.len() - writes
    );
    assert_eq!(writes, 0, "{since:?}");
    let recorded: Vec<_> = scope
        .revisions()
        .await
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    // The other one is what the ClusterVersion says.
    assert!(recorded.len() <= 2, "{recorded:?}");
}

/// A pause keeps an upgrade from starting, and a tenant from nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_paused_is_taken_over_all_the_same() {
    let (scope, _driver) = prepared("paused", present("ClusterIP")).await;
    let tenants = running("paused", "ClusterIP").into_iter().map(|mut tenant| {
        tenant.spec = json!({"paused": true});
        tenant
    });
    let tenants: Vec<_> = tenants
        .filter(|tenant| ["plain", "old"].contains(&tenant.name.as_str()))
        .collect();
    let found = left(&scope, &tenants).await;
    let manager = Manager::start(&scope, Options::default());
    for tenant in &found {
        taken_over(&scope, &tenant.name).await;
    }
    at_rest(&manager, &["plain", "old"]).await;
    assert_untouched(&scope, &found, &manager).await;
    manager.stop().await.unwrap();
    assert_second_start_is_silent(&scope, &found).await;
}

/// A manager is killed at each write it makes to take a tenant over; the next one finishes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_while_taking_over_leaves_no_trace() {
    let (scope, _driver) = prepared("cutdown", present("NodePort")).await;
    let tenants = [
        Tenant::new("cutdown", "one", "cutdown"),
        Tenant::new("cutdown", "two", "cutdown").gate(),
    ];
    let found = left(&scope, &tenants).await;
    let revisions: Api<ControllerRevision> = scope.api(&scope.manager_namespace());
    // Everything of this manager goes, so that the next one finds what the Go manager left.
    let forget = async || {
        for tenant in &found {
            let api = raw::<VirtualCluster>(&scope.client, Some(&scope.namespace));
            let mut object: DynamicObject = serde_json::from_value(tenant.object.clone()).unwrap();
            object.metadata.resource_version = api.get(&tenant.name).await.unwrap().resource_version();
            object.metadata.managed_fields = None;
            let params = PostParams::default();
            api.replace_status(&tenant.name, &params, &object).await.unwrap();
        }
        let all = ListParams::default();
        revisions
            .delete_collection(&DeleteParams::default(), &all)
            .await
            .unwrap();
    };
    let manager = Manager::start(&scope, Options::default());
    let mut pins = BTreeSet::new();
    for name in ["one", "two"] {
        pins.insert(pin(&taken_over(&scope, name).await).to_owned());
    }
    at_rest(&manager, &["one", "two"]).await;
    let writes = manager.traffic.writes().len();
    manager.stop().await.unwrap();
    assert!(writes >= 3, "{writes}");

    let mut cut = 0;
    for nth in 1..=writes {
        for at in [Cut::Before(nth), Cut::After(nth)] {
            forget().await;
            let first = Manager::start(&scope, Options::cut(at));
            tokio::select! {
                () = first.traffic.when_cut() => cut += 1,
                () = at_rest(&first, &["one", "two"]) => {}
            }
            first.kill();
            let second = Manager::start(&scope, Options::default());
            for name in ["one", "two"] {
                pins.insert(pin(&taken_over(&scope, name).await).to_owned());
            }
            at_rest(&second, &["one", "two"]).await;
            assert_untouched(&scope, &found, &second).await;
            second.stop().await.unwrap();
            assert_eq!(pins.len(), 1, "{at:?}: {pins:?}");
        }
    }
    println!("{cut} of {} runs were cut", 2 * writes);
    // Before the first run the ClusterVersion had to be written, too.
    assert!(cut >= 4, "only {cut} runs were cut");
}

/// What a ClusterVersion drops goes with the first upgrade.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_dropped_goes_with_the_first_upgrade() {
    drops("dropped", Layout::Applied).await;
}

/// So it does where the Go manager only created objects, which would keep it for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_dropped_goes_also_where_it_was_created() {
    drops("dropold", Layout::Created).await;
}

async fn drops(scope: &str, layout: Layout) {
    let mut content = present("ClusterIP");
    let container = "/apiServer/statefulset/spec/template/spec/containers/0";
    content.pointer_mut(container).unwrap()["env"] =
        json!([{"name": "KEPT", "value": "1"}, {"name": "DROPPED", "value": "1"}]);
    for object in ["service", "statefulset"] {
        content["apiServer"][object]["metadata"]["labels"] = json!({"kept": "1", "dropped": "1"});
    }
    let (scope, _driver) = prepared(scope, content).await;
    let tenants = [Tenant::new(&scope.namespace, "one", &scope.namespace).layout(layout)];
    let tenant = left(&scope, &tenants).await.remove(0);
    let _manager = Manager::start(&scope, Options::default());
    taken_over(&scope, "one").await;
    scope
        .edit(|content| {
            templates::verbosity(content, 5);
            content.pointer_mut(container).unwrap()["env"] = json!([{"name": "KEPT", "value": "1"}]);
            for object in ["service", "statefulset"] {
                content["apiServer"][object]["metadata"]["labels"] = json!({"kept": "1"});
            }
        })
        .await;
    first_upgrade(&scope, &tenant).await;
    let set: StatefulSet = scope.get(&tenant.root, "apiserver").await;
    let service: Service = scope.get(&tenant.root, "apiserver-svc").await;
    let labels = |labels: &BTreeMap<String, String>| labels.keys().cloned().collect::<Vec<_>>();
    let pods = set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
    let variables = pods.containers[0].env.iter().flatten();
    let variables: Vec<_> = variables.map(|variable| variable.name.clone()).collect();
    let kept = (labels(set.labels()), labels(service.labels()), variables);
    assert_eq!(
        kept,
        (vec!["kept".into()], vec!["kept".into()], vec!["KEPT".into()])
    );
}

/// A ClusterVersion that is gone, or says what nobody can use, is no reason to leave its tenants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lost_the_cluster_version_is_taken_over_all_the_same() {
    let (scope, _driver) = prepared("lost", present("ClusterIP")).await;
    scope
        .create_cluster_version("lost-other", present("ClusterIP"))
        .await;
    let tenants = [
        Tenant::new("lost", "deleted", "lost"),
        Tenant::new("lost", "useless", "lost-other"),
    ];
    let found = left(&scope, &tenants).await;
    scope
        .cluster_versions()
        .delete("lost", &DeleteParams::default())
        .await
        .unwrap();
    scope
        .edit_named("lost-other", |content| {
            content["apiServer"]["service"] = Value::Null;
        })
        .await;
    let manager = Manager::start(&scope, Options::default());
    for tenant in &found {
        taken_over(&scope, &tenant.name).await;
    }
    at_rest(&manager, &["deleted", "useless"]).await;
    assert_untouched(&scope, &found, &manager).await;
    manager.stop().await.unwrap();
    assert_second_start_is_silent(&scope, &found).await;
}

/// A root namespace that is another's, or lost its mark, is left alone: the tenant is told to be what it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_that_is_not_its_own_is_not_taken() {
    let (scope, _driver) = prepared("alien", present("ClusterIP")).await;
    let tenants = [
        Tenant::new("alien", "other", "alien"),
        Tenant::new("alien", "unmarked", "alien"),
    ];
    let mut found = left(&scope, &tenants).await;
    let namespaces = raw::<Namespace>(&scope.client, None);
    for (tenant, uid) in found
        .iter_mut()
        .zip([json!("d64ea0c0-91f8-46f5-8643-c0cab32ab0cd"), Value::Null])
    {
        let patch = json!({"metadata": {"annotations": {"tenancy.x-k8s.io/vcuid": uid}}});
        namespaces
            .patch(&tenant.root, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .unwrap();
        *tenant = Found::of(&scope, &tenant.name, &tenant.root).await;
    }
    let manager = Manager::start(&scope, Options::default());
    for tenant in &found {
        scope
            .when(&tenant.name, "told why", |vc| {
                let conditions = vc.status.clone().unwrap_or_default().conditions;
                let message = |condition: &Condition| condition.message.clone().unwrap_or_default();
                conditions
                    .iter()
                    .any(|condition| message(condition).contains(&tenant.root))
            })
            .await;
    }
    at_rest(&manager, &["other", "unmarked"]).await;
    assert_untouched(&scope, &found, &manager).await;
    for tenant in &found {
        let now = object(&scope, &tenant.name).await;
        assert_eq!(now["status"].get("revision"), None, "{}", tenant.name);
    }
    manager.stop().await.unwrap();
    assert_second_start_is_silent(&scope, &found).await;
}

/// Certificates that were never renewed, as the Go manager knew no renewal, are: that is more urgent than to leave all as
/// it is. It does not make the tenant one of ours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_end_are_renewed() {
    let (scope, _driver) = prepared("aged", present("ClusterIP")).await;
    let tenants = [
        Tenant::new("aged", "due", "aged").days_ago(300),
        Tenant::new("aged", "ended", "aged").days_ago(400),
        Tenant::new("aged", "old", "aged")
            .days_ago(300)
            .layout(Layout::Created),
        Tenant::new("aged", "young", "aged").days_ago(200),
    ];
    let found = left(&scope, &tenants).await;
    let manager = Manager::start(&scope, Options::default());
    for tenant in &found {
        taken_over(&scope, &tenant.name).await;
    }
    let leaves = [
        "apiserver-ca",
        "front-proxy-ca",
        "etcd-ca",
        "admin-kubeconfig",
        "controller-manager-kubeconfig",
    ];
    for tenant in &found[..3] {
        eventually("other certificates", async || {
            let secrets = scope.secrets(&tenant.root).await;
            leaves
                .iter()
                .all(|leaf| secrets[*leaf] != tenant.secrets[*leaf])
                .then_some(())
        })
        .await;
    }
    at_rest(&manager, &["due", "ended", "old", "young"]).await;
    assert_untouched(&scope, &found[3..], &manager).await;
    for tenant in &found[..3] {
        let (name, now) = (&tenant.name, object(&scope, &tenant.name).await);
        assert_eq!(now["status"]["revision"]["adopted"], true, "{name}");
        assert_eq!(
            now["status"]["reason"], tenant.object["status"]["reason"],
            "{name}"
        );
        let (secrets, marks) = (
            scope.secrets(&tenant.root).await,
            footprint(&scope, &tenant.root).await,
        );
        for secret in FOR_LIFE {
            assert_eq!(secrets[secret], tenant.secrets[secret], "{name}: {secret}");
        }
        for kept in ["StatefulSet/etcd", "Service/etcd", "Service/apiserver-svc"] {
            assert_eq!(marks[kept], tenant.footprint[kept], "{name}: {kept} was written");
        }
        assert!(has_good_kubeconfigs(&secrets, &tenant.root), "{name}");
    }
    manager.stop().await.unwrap();
    let now = join_all(
        found
            .iter()
            .map(|tenant| Found::of(&scope, &tenant.name, &tenant.root)),
    )
    .await;
    assert_second_start_is_silent(&scope, &now).await;
}
