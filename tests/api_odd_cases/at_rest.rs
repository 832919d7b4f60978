//! What must come to rest, whatever others do: two managers at once, objects that stand where ours would, Secrets with more in
//! them than ours.

use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::StatefulSet,
        core::v1::{Secret, Service},
    },
    jiff::SignedDuration,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use vc_manager::api::labels;

use crate::support::{Manager, Options, Scope, condition, eventually, root_of, templates};

use crate::help::*;

/// Two managers at once, and everything becomes due.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_managers_renew_the_same_tenants() {
    let ahead = Ahead::default();
    let (scope, _driver, one) =
        Scope::with_manager("br-two", ahead.options(), templates::full("ClusterIP")).await;
    let two = Manager::start(&scope, ahead.options());
    let names = ["a", "b", "c"];
    for name in names {
        scope.create_tenant(name).await;
    }
    let mut roots = Vec::new();
    for name in names {
        roots.push(root_of(&scope.settled(name).await));
    }
    at_rest(&one).await;
    at_rest(&two).await;
    let mut before = Vec::new();
    for root in &roots {
        before.push(scope.secrets(root).await);
    }
    let (first, second) = (one.traffic.mark(), two.traffic.mark());
    ahead.pass(SignedDuration::from_hours(24 * 300));
    for name in names {
        look(&scope, &one, name).await;
    }
    at_rest(&two).await;
    at_rest(&one).await;
    let (issued_one, issued_two) = (secret_writes(&one, first), secret_writes(&two, second));
    for (root, before) in roots.iter().zip(before) {
        let after = scope.secrets(root).await;
        for which in FOR_LIFE {
            assert_eq!(after[which], before[which], "{which}");
        }
    }
    for name in names {
        let tenant = scope.tenant(name).await;
        assert_eq!(condition(&tenant, "CertificatesValid").status, "True");
        assert_eq!(condition(&tenant, "Ready").status, "True");
    }
    assert!(issued_one + issued_two <= 45, "{issued_one} + {issued_two}");
}

/// Someone deletes the apiserver's Service and makes another: kubeconfigs follow, and it comes to rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_made_anew_by_hand_comes_to_rest() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-svc", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    let api = scope.api::<Service>(&root);
    let mut service: Service = scope.get(&root, "apiserver-svc").await;
    let had = service.spec.as_ref().unwrap().cluster_ip.clone();
    api.delete("apiserver-svc", &DeleteParams::default())
        .await
        .unwrap();
    service.metadata = serde_json::from_value(json!({"name": "apiserver-svc"})).unwrap();
    let spec = service.spec.as_mut().unwrap();
    spec.cluster_ip = Some("10.0.99.99".into());
    spec.cluster_ips = None;
    let params = PostParams {
        field_manager: Some("kubectl-create".into()),
        ..PostParams::default()
    };
    let made = api.create(&params, &service).await;
    at_rest(&manager).await;
    let now: Service = scope.get(&root, "apiserver-svc").await;
    let ip = now.spec.unwrap().cluster_ip.unwrap();
    let config = scope.secrets(&root).await["admin-kubeconfig"]["admin-kubeconfig"].clone();
    println!(
        "FOUND svc: made by hand {}, {had:?} -> {ip}; {:?}",
        made.is_ok(),
        conditions(&scope.tenant("one").await)
    );
    assert!(config.contains(&format!("https://{ip}:6443")), "{config}");
}

/// From ClusterIP to `NodePort` and back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_of_another_type_and_back_comes_to_rest() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-type", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    for type_ in ["NodePort", "ClusterIP"] {
        scope
            .edit(|content| *content.pointer_mut("/apiServer/service/spec/type").unwrap() = json!(type_))
            .await;
        scope.upgrade("one").await;
        at_rest(&manager).await;
        let service: Service = scope.get(&root, "apiserver-svc").await;
        let spec = service.spec.unwrap();
        assert_eq!(spec.type_.as_deref(), Some(type_));
        let host = match type_ {
            "ClusterIP" => spec.cluster_ip.unwrap(),
            _ => format!("apiserver-svc.{root}"),
        };
        let secrets = scope.secrets(&root).await;
        for which in ["admin-kubeconfig", "controller-manager-kubeconfig"] {
            assert!(
                secrets[which][which].contains(&format!("https://{host}:6443")),
                "{type_} {which}"
            );
        }
        let tenant = scope.tenant("one").await;
        assert_eq!(
            tenant.status.as_ref().unwrap().endpoint.as_deref(),
            Some(format!("https://{host}:6443").as_str())
        );
        let mark = manager.traffic.mark();
        look(&scope, &manager, "one").await;
        let writes: Vec<_> = manager
            .traffic
            .since(mark)
            .into_iter()
            .filter(crate::support::Call::is_write)
            .collect();
        assert_eq!(writes, [], "{type_}");
    }
}

/// A shorter life is taken up in time, and not over and over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shorter_life_is_taken_up() {
    let ahead = Ahead::default();
    let (scope, _driver, manager) =
        Scope::with_manager("br-days", ahead.options(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    let before = scope.secrets(&root).await;
    scope.merge("one", &json!({"spec": {"pkiExpireDays": 1}})).await;
    look(&scope, &manager, "one").await;
    ahead.pass(SignedDuration::from_hours(20));
    let mark = manager.traffic.mark();
    look(&scope, &manager, "one").await;
    assert_eq!(secret_writes(&manager, mark), 5);
    let mark = manager.traffic.mark();
    look(&scope, &manager, "one").await;
    assert_eq!(secret_writes(&manager, mark), 0);
    let after = scope.secrets(&root).await;
    for which in FOR_LIFE {
        assert_eq!(after[which], before[which]);
    }
}

/// etcd is lost while an upgrade is under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_lost_during_an_upgrade_shows() {
    let options = Options::flags(&["--provisioner-timeout=5s"]);
    let (scope, driver, manager) =
        Scope::with_manager("br-etcd", options, templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    driver.hold("one", "apiserver");
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.opt_in("one").await;
    scope
        .when("one", "upgrading", |tenant| {
            tenant.status.as_ref().is_some_and(|s| s.upgrade.is_some())
        })
        .await;
    scope
        .api::<StatefulSet>(&root)
        .delete("etcd", &DeleteParams::default())
        .await
        .unwrap();
    driver.release("one", "apiserver");
    scope
        .when("one", "ended", |tenant| {
            !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
                && tenant.status.as_ref().is_some_and(|s| s.upgrade.is_none())
        })
        .await;
    look(&scope, &manager, "one").await;
    let tenant = scope.tenant("one").await;
    assert!(
        scope
            .api::<StatefulSet>(&root)
            .get_opt("etcd")
            .await
            .unwrap()
            .is_none()
    );
    assert_eq!(
        condition(&tenant, "Ready").status,
        "False",
        "{:?}",
        conditions(&tenant)
    );
}

/// More contexts and users than ours in a kubeconfig, more keys in Secrets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_added_to_secrets_comes_to_rest() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-extra", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    let before = scope.secrets(&root).await;
    for (secret, key) in [
        ("root-ca", "ca.crt"),
        ("apiserver-ca", "ca.crt"),
        ("serviceaccount-rsa", "tls.pub"),
    ] {
        put_text(&scope, &root, secret, key, "something more").await;
    }
    let mut big = Secret::default();
    big.metadata.name = Some("big".into());
    big.data = Some([("x".to_owned(), ByteString(vec![b'x'; 1_000_000]))].into());
    scope
        .api::<Secret>(&root)
        .create(&PostParams::default(), &big)
        .await
        .unwrap();
    look(&scope, &manager, "one").await;
    let after = scope.secrets(&root).await;
    for secret in ["root-ca", "apiserver-ca", "serviceaccount-rsa"] {
        assert_eq!(before[secret]["tls.crt"], after[secret]["tls.crt"], "{secret}");
    }
    let config = before["admin-kubeconfig"]["admin-kubeconfig"].clone();
    let config = config
        .replace(
            "contexts:\n",
            "contexts:\n- name: other\n  context: {cluster: other, user: other}\n",
        )
        .replace("users:\n", "users:\n- name: other\n  user: {token: abc}\n");
    let mark = manager.traffic.mark();
    put_text(&scope, &root, "admin-kubeconfig", "admin-kubeconfig", &config).await;
    at_rest(&manager).await;
    assert!(secret_writes(&manager, mark) <= 1);
    assert_eq!(
        condition(&scope.tenant("one").await, "CertificatesValid").status,
        "True"
    );
}

/// Paused, agreed to an upgrade, and all certificates have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_and_agreed_and_expired() {
    let ahead = Ahead::default();
    let (scope, _driver, manager) =
        Scope::with_manager("br-paused", ahead.options(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    let before = scope.secrets(&root).await;
    scope.merge("one", &json!({"spec": {"paused": true}})).await;
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.opt_in("one").await;
    at_rest(&manager).await;
    ahead.pass(SignedDuration::from_hours(24 * 400));
    look(&scope, &manager, "one").await;
    let after = scope.secrets(&root).await;
    for (name, data) in &before {
        assert_eq!(FOR_LIFE.contains(&name.as_str()), after[name] == *data, "{name}");
    }
    let tenant = scope.tenant("one").await;
    assert!(tenant.opted_in());
    assert_eq!(condition(&tenant, "CertificatesValid").status, "True");
    // Its record is lost: what is there is trusted again, and nothing is written.
    let mark = manager.traffic.mark();
    patch_status(&scope, "one", json!({"status": {"certificates": null}})).await;
    at_rest(&manager).await;
    assert_eq!(secret_writes(&manager, mark), 0);
    assert!(scope.tenant("one").await.status.unwrap().certificates.is_some());
}

/// An object that very many have written: found and told, without a storm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_hundreds_of_managers_comes_to_rest() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-many", Options::default(), templates::full("ClusterIP")).await;
    let one = scope.provision("one").await;
    let root = root_of(&one);
    at_rest(&manager).await;
    let api = scope.api::<Service>(&root);
    for number in 0..200 {
        let params = PatchParams::apply(&format!("operator-{number}-{}", "x".repeat(90))).force();
        let value = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "apiserver-svc",
            "annotations": {format!("a{number}"): "x"}}, "spec": {"selector": {"component-name": "apiserver"}}});
        api.patch("apiserver-svc", &params, &Patch::Apply(&value))
            .await
            .unwrap();
    }
    at_rest(&manager).await;
    let mark = manager.traffic.mark();
    look(&scope, &manager, "one").await;
    let writes: Vec<_> = manager
        .traffic
        .since(mark)
        .into_iter()
        .filter(crate::support::Call::is_write)
        .collect();
    println!(
        "FOUND many: {writes:?} {:?}",
        conditions(&scope.tenant("one").await)
    );
    assert_eq!(writes, []);
    let params = PatchParams::apply("meddler").force();
    let value = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "apiserver-svc"},
        "spec": {"selector": {"component-name": "decoy"}}});
    api.patch("apiserver-svc", &params, &Patch::Apply(&value))
        .await
        .unwrap();
    eventually("the selector to be put back", async || {
        let service: Service = scope.get(&root, "apiserver-svc").await;
        (service.spec?.selector?["component-name"] == "apiserver").then_some(())
    })
    .await;
    at_rest(&manager).await;
}

/// A phase set by hand, as our own Event says one may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_tenant_set_to_pending_keeps_its_pods() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-pending", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    at_rest(&manager).await;
    scope
        .api::<Secret>(&root)
        .delete("etcd-ca", &DeleteParams::default())
        .await
        .unwrap();
    at_rest(&manager).await;
    let before = templates_of(&scope, &root).await;
    patch_status(&scope, "one", json!({"status": {"phase": "Pending"}})).await;
    scope.settled("one").await;
    at_rest(&manager).await;
    let after = templates_of(&scope, &root).await;
    let changed: Vec<_> = before
        .iter()
        .filter(|(name, t)| after[*name] != **t)
        .map(|(name, _)| name)
        .collect();
    assert!(changed.is_empty(), "pods replaced of {changed:?}");
}

/// A long story makes no Event that the API server refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_of_much_is_told() {
    let (scope, _driver, manager) =
        Scope::with_manager("br-event", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    at_rest(&manager).await;
    let params = PatchParams {
        field_manager: Some("m".repeat(128)),
        ..PatchParams::default()
    };
    let patch = json!([
        {"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "x"},
        {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["x"]},
        {"op": "replace", "path": "/spec/template/spec/containers/0/command", "value": ["x"]},
        {"op": "replace", "path": "/spec/updateStrategy", "value": {"type": "OnDelete"}},
        {"op": "replace", "path": "/spec/template/spec/containers/0/ports/0/name", "value": "x"},
        {"op": "replace", "path": "/spec/replicas", "value": 2},
    ]);
    let patch: Patch<()> = Patch::Json(serde_json::from_value(patch).unwrap());
    scope
        .api::<StatefulSet>(&root)
        .patch("apiserver", &params, &patch)
        .await
        .unwrap();
    eventually("it to be put back", async || {
        let set: StatefulSet = scope.get(&root, "apiserver").await;
        (set.spec?.template.spec?.containers[0].image.as_deref() == Some("registry.example/apiserver:1"))
            .then_some(())
    })
    .await;
    at_rest(&manager).await;
    let events: Api<k8s_openapi::api::events::v1::Event> =
        Api::namespaced(scope.client.clone(), &scope.namespace);
    let told: Vec<_> = events
        .list(&kube::api::ListParams::default())
        .await
        .unwrap()
        .into_iter()
        .filter(|event| event.reason.as_deref() == Some("DriftRepaired"))
        .map(|event| event.note.unwrap_or_default())
        .collect();
    println!(
        "FOUND event: {:?}",
        told.iter().map(String::len).collect::<Vec<_>>()
    );
    assert!(!told.is_empty());
}
