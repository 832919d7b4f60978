//! What must be told, or survived: Secrets that somebody overwrites for ever, names that are none, records that are lost.

use std::time::Duration;

use k8s_openapi::{
    api::{
        apps::v1::{ControllerRevision, StatefulSet},
        core::v1::{Namespace, Secret},
    },
    jiff::SignedDuration,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;
use vc_manager::api::labels;

use crate::support::{Driver, Manager, Options, Scope, condition, eventually, root_of, templates, tuple};

use crate::help::*;

async fn wiped(name: &str, edit: bool) {
    let (scope, _driver, manager) =
        Scope::with_manager(name, Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    // A leaf that etcd serves is renewed, as in the life of any tenant.
    scope
        .api::<Secret>(&root)
        .delete("etcd-ca", &DeleteParams::default())
        .await
        .unwrap();
    eventually("another leaf", async || {
        scope.api::<Secret>(&root).get_opt("etcd-ca").await.unwrap()
    })
    .await;
    at_rest(&manager).await;
    if edit {
        scope
            .edit(|content| {
                templates::verbosity(content, 7);
                *content
                    .pointer_mut("/etcd/statefulset/spec/template/spec/containers/0/image")
                    .unwrap() = json!("registry.example/etcd:2");
            })
            .await;
        at_rest(&manager).await;
    }
    let (before, secrets) = (templates_of(&scope, &root).await, scope.secrets(&root).await);
    let pin = scope.tenant("one").await.pin().map(ToOwned::to_owned);
    wipe_status(&scope, "one").await;
    scope.settled("one").await;
    at_rest(&manager).await;
    let (after, secrets_after) = (templates_of(&scope, &root).await, scope.secrets(&root).await);
    for which in FOR_LIFE {
        assert_eq!(secrets[which], secrets_after[which], "{which}");
    }
    let changed: Vec<_> = before
        .iter()
        .filter(|(name, template)| after[*name] != **template)
        .map(|(name, _)| name)
        .collect();
    let reissued: Vec<_> = secrets
        .iter()
        .filter(|(name, data)| secrets_after[*name] != **data)
        .map(|(name, _)| name)
        .collect();
    println!(
        "{name}: pods replaced of {changed:?}; reissued {reissued:?}; pin {pin:?} -> {:?}",
        scope.tenant("one").await.pin()
    );
    assert!(changed.is_empty(), "pods replaced of {changed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_status_replaces_no_pods() {
    wiped("br-wipe", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_status_is_no_consent_to_an_upgrade() {
    wiped("br-wipe-edit", true).await;
}

/// A controller that syncs back old content, at once or after a while; writes of Secrets within ten seconds.
async fn fight(name: &str, pause: Duration) {
    let (scope, _driver, manager) =
        Scope::with_manager(name, Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    let mark = at_rest(&manager).await;
    let until = tokio::time::Instant::now() + Duration::from_secs(10);
    let mut meddled = 0;
    while tokio::time::Instant::now() < until {
        put_text(&scope, &root, "apiserver-ca", "tls.crt", "from the vault").await;
        meddled += 1;
        tokio::time::sleep(pause).await;
    }
    let writes = secret_writes(&manager, mark);
    let tenant = scope.tenant("one").await;
    let restarts = set_writes(&manager, mark);
    println!(
        "{name}: {meddled} changes, {writes} issues, {restarts} StatefulSet writes in 10 s; {:?}",
        conditions(&tenant)
    );
    assert!(
        writes <= 8,
        "{writes} certificates issued in 10 s against {meddled} changes"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_synced_from_elsewhere_every_second_is_not_fought_over() {
    fight("br-fight1", Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_synced_from_elsewhere_at_once_is_not_fought_over() {
    fight("br-fight0", Duration::from_millis(50)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leaf_deleted_in_a_loop_is_no_storm() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-delete", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    let mark = at_rest(&manager).await;
    let until = tokio::time::Instant::now() + Duration::from_secs(10);
    let mut deleted = 0;
    while tokio::time::Instant::now() < until {
        let gone = scope
            .api::<Secret>(&root)
            .delete("front-proxy-ca", &DeleteParams::default())
            .await;
        deleted += usize::from(gone.is_ok());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let writes = secret_writes(&manager, mark);
    println!(
        "delete: {deleted} deletions, {writes} issues in 10 s; {:?}",
        conditions(&scope.tenant("one").await)
    );
    assert!(
        writes <= 8,
        "{writes} certificates issued in 10 s against {deleted} deletions"
    );
}

/// A name that is none must not keep the other certificates from being renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_domain_that_is_none_is_told_and_keeps_nothing_else_from_renewal() {
    let ahead = Ahead::default();
    let (scope, _driver, manager) =
        Scope::with_manager("br-domain", ahead.options(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    scope
        .label("one", labels::EXTERNAL_APISERVER_DOMAIN, json!("a..b"))
        .await;
    look(&scope, &manager, "one").await;
    println!("domain, early: {:?}", conditions(&scope.tenant("one").await));
    ahead.pass(SignedDuration::from_hours(24 * 300));
    let mark = manager.traffic.mark();
    look(&scope, &manager, "one").await;
    look(&scope, &manager, "one").await;
    let after = scope.secrets(&root).await;
    let kept: Vec<_> = before
        .iter()
        .filter(|(name, data)| !FOR_LIFE.contains(&name.as_str()) && after[*name] == **data)
        .map(|(name, _)| name)
        .collect();
    println!(
        "domain, due: not renewed {kept:?}, {} writes; {:?}",
        secret_writes(&manager, mark),
        conditions(&scope.tenant("one").await)
    );
    assert!(kept.len() <= 1, "not renewed: {kept:?}");
}

/// What a root namespace's annotations say is changed by somebody: that is told, not a lost root CA.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_that_loses_its_annotations_is_told() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-ns", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    let before = scope.versions(&root).await;
    let namespaces: Api<Namespace> = Api::all(scope.client.clone());
    // First what does no harm.
    let harmless =
        json!({"metadata": {"annotations": {"other": "x"}, "labels": {"istio-injection": "enabled"}}});
    namespaces
        .patch(&root, &PatchParams::default(), &Patch::Merge(&harmless))
        .await
        .unwrap();
    look(&scope, &manager, "one").await;
    assert_eq!(scope.versions(&root).await, before);
    let patch = json!({"metadata": {"annotations": {"tenancy.x-k8s.io/vcuid": null}}});
    namespaces
        .patch(&root, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    println!("ns: {:?}", conditions(&tenant));
    assert_eq!(scope.versions(&root).await, before);
    let told = conditions(&tenant).join("\n");
    assert!(told.contains("do not name this VirtualCluster"), "{told}");
    assert!(!told.contains("RootCALost"), "{told}");
}

async fn after_failed_upgrade(scope: &Scope, driver: &Driver, name: &str) {
    driver.hold(name, "apiserver");
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.opt_in(name).await;
    scope
        .when(name, "failed", |tenant| {
            !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
        })
        .await;
}

/// After a failed upgrade certificates are renewed all the same, and what is gone shows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failed_upgrade_certificates_are_renewed_and_a_lost_etcd_shows() {
    let ahead = Ahead::default();
    let mut options = ahead.options();
    options.flags = vec!["--provisioner-timeout=3s".into()];
    let (scope, driver, manager) =
        Scope::with_manager("br-failed", options, templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    after_failed_upgrade(&scope, &driver, "one").await;
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    ahead.pass(SignedDuration::from_hours(24 * 300));
    look(&scope, &manager, "one").await;
    let after = scope.secrets(&root).await;
    for (name, data) in &before {
        assert_eq!(FOR_LIFE.contains(&name.as_str()), after[name] == *data, "{name}");
    }
    driver.release("one", "apiserver");
    eventually("readiness", async || {
        let set: StatefulSet = scope.get(&root, "apiserver").await;
        (set.status?.ready_replicas == Some(1)).then_some(())
    })
    .await;
    look(&scope, &manager, "one").await;
    println!(
        "failed, renewed: {:?} {:?}",
        tuple(&scope.tenant("one").await),
        conditions(&scope.tenant("one").await)
    );
    scope
        .api::<StatefulSet>(&root)
        .delete("etcd", &DeleteParams::default())
        .await
        .unwrap();
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    println!("failed, etcd lost: {:?}", conditions(&tenant));
    assert_eq!(
        condition(&tenant, "Ready").status,
        "False",
        "{:?}",
        conditions(&tenant)
    );
}

/// A tenant that was taken over loses its apiserver: it is not ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_taken_over_that_loses_its_apiserver_is_not_ready() {
    let scope = Scope::new("br-adopt").await;
    let _driver = Driver::start(&scope);
    scope
        .create_cluster_version("br-adopt", templates::full("ClusterIP"))
        .await;
    let left = crate::support::upstream::Tenant::new("br-adopt", "one", "br-adopt")
        .leave(&scope.client)
        .await;
    let manager = Manager::start(&scope, Options::default());
    scope
        .when("one", "taken over", vc_manager::api::VirtualCluster::is_adopted)
        .await;
    at_rest(&manager).await;
    look(&scope, &manager, "one").await;
    scope
        .api::<StatefulSet>(&left.root)
        .delete("apiserver", &DeleteParams::default())
        .await
        .unwrap();
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    println!("adopted: {:?}", conditions(&tenant));
    assert_eq!(
        condition(&tenant, "Ready").status,
        "False",
        "{:?}",
        conditions(&tenant)
    );
}

/// The revision a tenant is pinned to is gone: its certificates end all the same if nobody renews them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_revision_a_tenant_is_told_of_and_certificates_are_renewed() {
    let ahead = Ahead::default();
    let (scope, driver, manager) =
        Scope::with_manager("br-rev", ahead.options(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    manager.stop().await.unwrap();
    // Edited first, or it would be recorded again.
    scope.edit(|content| templates::verbosity(content, 3)).await;
    let api = scope.api::<ControllerRevision>(&scope.manager_namespace());
    let pin = one.pin().unwrap();
    api.delete(pin, &DeleteParams::default()).await.unwrap();
    let manager = Manager::start(&scope, ahead.options());
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    ahead.pass(SignedDuration::from_hours(24 * 400));
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    let after = scope.secrets(&root).await;
    println!(
        "revision lost: renewed {}; {:?}",
        before != after,
        conditions(&tenant)
    );
    for which in FOR_LIFE {
        assert_eq!(before[which], after[which]);
    }
    assert!(
        tenant.is_adopted() && tenant.pin() != Some(pin),
        "pinned to what runs"
    );
    assert_eq!(condition(&tenant, "CertificatesValid").status, "True");
    // And it goes on from there.
    scope.opt_in("one").await;
    let tenant = scope
        .when("one", "through", |t| {
            !t.labels().contains_key(labels::READY_FOR_UPGRADE)
        })
        .await;
    println!(
        "revision lost, upgrade: {:?} {:?}",
        tuple(&tenant),
        conditions(&tenant)
    );
    drop(driver);
    assert_ne!(
        before["admin-kubeconfig"], after["admin-kubeconfig"],
        "nothing is renewed"
    );
}

/// One leaf that cannot be written keeps the others from renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leaf_that_cannot_be_written_keeps_no_other_from_renewal() {
    let ahead = Ahead::default();
    let (scope, _driver, manager) =
        Scope::with_manager("br-immut", ahead.options(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    let patch = Patch::Merge(json!({"immutable": true}));
    scope
        .api::<Secret>(&root)
        .patch("apiserver-ca", &PatchParams::default(), &patch)
        .await
        .unwrap();
    ahead.pass(SignedDuration::from_hours(24 * 300));
    look(&scope, &manager, "one").await;
    let after = scope.secrets(&root).await;
    let kept: Vec<_> = before
        .iter()
        .filter(|(name, data)| !FOR_LIFE.contains(&name.as_str()) && after[*name] == **data)
        .map(|(name, _)| name)
        .collect();
    println!(
        "immutable: not renewed {kept:?}; {:?}",
        conditions(&scope.tenant("one").await)
    );
    assert_eq!(kept.len(), 1, "not renewed: {kept:?}");
}

/// As `type: ClusterIP`, but without an address: it comes up, so it must be renewed, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_with_a_headless_service_is_renewed() {
    let ahead = Ahead::default();
    let mut content = templates::full("ClusterIP");
    content["apiServer"]["service"]["spec"]["clusterIP"] = json!("None");
    let (scope, _driver, manager) = Scope::with_manager("br-headless", ahead.options(), content).await;
    let root = root_of(&scope.provision("one").await);
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    ahead.pass(SignedDuration::from_hours(24 * 300));
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    println!("headless: {:?} {:?}", tuple(&tenant), conditions(&tenant));
    let after = scope.secrets(&root).await;
    assert_ne!(
        before["admin-kubeconfig"], after["admin-kubeconfig"],
        "not renewed"
    );
}

/// A leaf is swapped for one of another CA by a controller, and a root CA for that other one: nothing is done to either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_whose_certificates_record_is_wiped_and_key_swapped_is_told() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-swap", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    let other = root_of(&scope.provision("two").await);
    at_rest(&manager).await;
    manager.stop().await.unwrap();
    let mine = scope.secrets(&root).await;
    let theirs = scope.secrets(&other).await;
    for (key, text) in &theirs["serviceaccount-rsa"] {
        put_text(&scope, &root, "serviceaccount-rsa", key, text).await;
    }
    patch_status(&scope, "one", json!({"status": {"certificates": null}})).await;
    let manager = Manager::start(&scope, Options::default());
    at_rest(&manager).await;
    let tenant = scope.tenant("one").await;
    println!("swap: {:?}", conditions(&tenant));
    assert_ne!(mine["serviceaccount-rsa"], theirs["serviceaccount-rsa"]);
    assert_eq!(
        scope.secrets(&root).await["serviceaccount-rsa"],
        theirs["serviceaccount-rsa"],
        "never overwritten"
    );
}

/// A root namespace that is gone is told as that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_namespace_that_is_gone_is_told_as_that() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-gone", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    at_rest(&manager).await;
    let namespaces: Api<Namespace> = Api::all(scope.client.clone());
    namespaces.delete(&root, &DeleteParams::default()).await.unwrap();
    eventually("it to be gone", async || {
        namespaces.get_opt(&root).await.unwrap().is_none().then_some(())
    })
    .await;
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    println!("gone: {:?}", conditions(&tenant));
    let told = conditions(&tenant).join("\n");
    assert!(
        told.contains("root namespace") && told.contains("does not exist: the control plane"),
        "{told}"
    );
    assert_eq!(condition(&tenant, "Ready").status, "False");
}
