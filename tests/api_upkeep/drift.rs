//! What others change is put back and told of; what they add stays.

use k8s_openapi::{api::apps::v1::StatefulSet, api::autoscaling::v1::Scale, jiff::SignedDuration};
use kube::api::{Patch, PostParams};
use serde_json::{Value, json};
use vc_manager::controller::render::Kind;

use crate::{
    scene::{ONE, Scene},
    support::eventually,
};

const HOUR: SignedDuration = SignedDuration::from_hours(1);

impl Scene {
    /// `change` makes an object drift; it is put back, and one Event has these words.
    async fn repairs(&self, kind: Kind, name: &str, words: &[&str], change: impl AsyncFnOnce()) {
        let before = self.shape(kind, name).await.expect("it is there");
        let told = self.told("DriftRepaired").await.len();
        // Whoever changes the same object again and again is not followed; that is another test.
        self.pass(HOUR);
        change().await;
        let note = eventually(&format!("the Event that {name} is put back"), async || {
            let notes = self.told("DriftRepaired").await;
            notes.get(told).cloned()
        })
        .await;
        let object = format!("{kind:?} {name}");
        for word in words.iter().chain([&object.as_str()]) {
            assert!(note.contains(word), "{word:?} is not in {note:?}");
        }
        self.at_rest().await;
        assert_eq!(self.shape(kind, name).await.as_ref(), Some(&before), "{note}");
        assert_eq!(self.told("DriftRepaired").await.len(), told + 1, "told once");
    }
}

fn container(name: &str, fields: &Value) -> Value {
    let mut container = json!({"name": name});
    json_patch::merge(&mut container, fields);
    json!({"spec": {"template": {"spec": {"containers": [container]}}}})
}

fn bare(kind: Kind, name: &str, rest: &Value) -> Value {
    let mut object = match kind {
        Kind::StatefulSet => json!({"apiVersion": "apps/v1", "kind": "StatefulSet"}),
        Kind::Service => json!({"apiVersion": "v1", "kind": "Service"}),
    };
    json_patch::merge(&mut object, &json!({"metadata": {"name": name}}));
    json_patch::merge(&mut object, rest);
    object
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_of_a_stateful_set_are_put_back() {
    let scene = Scene::start("up-sets").await;
    let set = Kind::StatefulSet;
    let of = |name: &str, path: &str| format!("spec.template.spec.containers[name={name}].{path}");
    let edits = [
        ("apiserver", json!({"image": "example.com/other:1"}), "image"),
        ("etcd", json!({"image": "example.com/other:1"}), "image"),
        (
            "controller-manager",
            json!({"args": ["--leader-elect=true"]}),
            "args",
        ),
        (
            "apiserver",
            json!({"env": [{"name": "MODE", "value": "loud"}]}),
            "env[name=MODE].value",
        ),
        (
            "apiserver",
            json!({"resources": {"requests": {"cpu": "4"}}}),
            "resources.requests.cpu",
        ),
        (
            "apiserver",
            json!({"ports": [{"containerPort": 6443, "protocol": "TCP", "name": "other"}]}),
            "ports[containerPort=6443,protocol=TCP].name",
        ),
    ];
    for (name, change, path) in edits {
        let words = [of(name, path), "set by kubectl-edit at ".to_owned()];
        scene
            .repairs(set, name, &words.each_ref().map(String::as_str), async || {
                scene.edit(set, name, container(name, &change)).await;
            })
            .await;
    }
    scene.assert_settled().await;
    let count = scene
        .manager()
        .metric("vc_manager_drift_repairs_total{kind=\"StatefulSet\"}");
    assert_eq!(count.as_deref(), Some("6"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_deleted_taken_over_or_scaled_by_hand_is_put_back() {
    let scene = Scene::start("up-taken").await;
    let set = Kind::StatefulSet;
    let of = |path: &str| format!("spec.template.spec.containers[name=apiserver].{path}");
    let labels = [
        (
            json!({"metadata": {"labels": {"tier": "other"}}}),
            "metadata.labels.tier",
        ),
        (
            json!({"spec": {"template": {"metadata": {"labels": {"tenancy.x-k8s.io/cluster": "another"}}}}}),
            "spec.template.metadata.labels[tenancy.x-k8s.io/cluster]",
        ),
        (
            json!({"spec": {"template": {"metadata": {"annotations": {"example.com/scrape": "false"}}}}}),
            "spec.template.metadata.annotations[example.com/scrape]",
        ),
        (
            json!({"spec": {"template": {"metadata": {"annotations": {
                "root-ca-hash": "0", "controller-manager-kubeconfig-hash": "0",
            }}}}}),
            "spec.template.metadata.annotations.root-ca-hash",
        ),
        (
            json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}}),
            "spec.updateStrategy.type",
        ),
    ];
    for (change, path) in labels {
        scene
            .repairs(set, "controller-manager", &[path, "kubectl-edit"], async || {
                scene.edit(set, "controller-manager", change).await;
            })
            .await;
    }

    // Who deletes leaves no trace.
    for (path, words) in [
        ("/spec/template/spec/containers/0/args", of("args")),
        ("/spec/template/spec/containers/0/env/1", of("env[name=ZONE]")),
        ("/metadata/labels/tier", "metadata.labels".to_owned()),
        (
            "/metadata/annotations/tenancy.x-k8s.io~1rendered-hash",
            "metadata.annotations[tenancy.x-k8s.io/rendered-hash]".to_owned(),
        ),
    ] {
        scene
            .repairs(set, "apiserver", &[&words, "deleted"], async || {
                let patch = json!([{"op": "remove", "path": path}]);
                scene.json_patch(set, "apiserver", "janitor", patch).await;
            })
            .await;
    }

    scene
        .repairs(
            set,
            "apiserver",
            &[&of("image"), "set by argocd at "],
            async || {
                let theirs = container("apiserver", &json!({"image": "example.com/argo:1"}));
                let theirs = Patch::Apply(bare(set, "apiserver", &theirs));
                scene.patch(set, "apiserver", "argocd", theirs).await;
            },
        )
        .await;
    // Nobody owns anything any more.
    scene
        .repairs(set, "apiserver", &["the whole object"], async || {
            let nobody = json!({"metadata": {"managedFields": [{}]}});
            scene
                .patch(set, "apiserver", "restore", Patch::Merge(nobody))
                .await;
        })
        .await;
    scene
        .repairs(
            set,
            "apiserver",
            &["spec.replicas", "set by kubectl"],
            async || {
                scene.kubectl(&["scale", "statefulset/apiserver", "--replicas=3"]);
            },
        )
        .await;
    scene.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_of_a_service_are_put_back() {
    let scene = Scene::start("up-services").await;
    let service = Kind::Service;
    let before = scene.scope.secrets(&scene.root).await;
    for (change, path) in [
        (
            json!({"spec": {"ports": [{"port": 6443, "targetPort": 8443}]}}),
            "spec.ports[port=6443,protocol=TCP].targetPort",
        ),
        (
            json!({"spec": {"selector": {"component-name": "decoy"}}}),
            "spec.selector",
        ),
        (json!({"spec": {"type": "NodePort"}}), "spec.type"),
        (json!({"spec": {"type": "LoadBalancer"}}), "spec.type"),
    ] {
        scene
            .repairs(
                service,
                "apiserver-svc",
                &[path, "set by kubectl-edit at "],
                async || {
                    scene.edit(service, "apiserver-svc", change).await;
                },
            )
            .await;
    }
    scene
        .repairs(service, "apiserver-svc", &["spec.ports", "deleted"], async || {
            let ports = json!([{"op": "replace", "path": "/spec/ports/0/port", "value": 443}]);
            scene.json_patch(service, "apiserver-svc", "janitor", ports).await;
        })
        .await;
    scene
        .repairs(service, "etcd", &["spec.publishNotReadyAddresses"], async || {
            let change = json!({"spec": {"publishNotReadyAddresses": false}});
            scene.edit(service, "etcd", change).await;
        })
        .await;
    scene.assert_settled().await;
    assert_eq!(
        scene.scope.secrets(&scene.root).await,
        before,
        "it has kept its address, and so all certificates are good"
    );
}

/// A port is known by its number: with another number it is another port, beside which ours would be refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_of_ports_are_put_back() {
    let mut content = crate::scene::content();
    content["apiServer"]["service"]["spec"]["type"] = json!("NodePort");
    let scene = Scene::of("up-ports", content, &[]).await;
    let ports = |from: u16, to: &Value| json!({"spec": {"ports": [to, {"port": from, "$patch": "delete"}]}});
    // Without a name, and with one; the node port stays.
    for (name, from, to) in [
        ("apiserver-svc", 6443, json!({"port": 443, "targetPort": "api"})),
        ("etcd", 2379, json!({"name": "client", "port": 2380})),
    ] {
        scene
            .repairs(Kind::Service, name, &["spec.ports", "deleted"], async || {
                scene.edit(Kind::Service, name, ports(from, &to)).await;
            })
            .await;
    }
    // What is added beside ours, and may stay there, stays.
    let more = json!({"spec": {"ports": [{"name": "metrics", "port": 2381}]}});
    scene.edit(Kind::Service, "etcd", more).await;
    scene.assert_settled().await;
    let service = scene.shape(Kind::Service, "etcd").await.unwrap();
    assert_eq!(service["spec"]["ports"].as_array().unwrap().len(), 2);
    let container = container(
        "apiserver",
        &json!({"ports": [
            {"name": "api", "containerPort": 7443}, {"containerPort": 6443, "$patch": "delete"},
        ]}),
    );
    let words = ["containers[name=apiserver].ports", "deleted"];
    scene
        .repairs(Kind::StatefulSet, "apiserver", &words, async || {
            scene.edit(Kind::StatefulSet, "apiserver", container).await;
        })
        .await;
    scene.assert_settled().await;
}

/// A Service that becomes none loses its address, and gets another one when it is put back: certificates follow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_loses_its_address_is_put_back_and_certificates_follow() {
    let mut scene = Scene::start("up-address").await;
    let service = Kind::Service;
    // At the same time as something that needs the address.
    scene.without_manager(async |scene: &Scene| {
        let change = json!({"spec": {"type": "ExternalName", "externalName": "example.com", "clusterIP": null,
            "clusterIPs": null}});
        scene
            .patch(service, "apiserver-svc", "kubectl-edit", Patch::Merge(change))
            .await;
        scene.delete_secret("admin-kubeconfig").await;
    })
    .await;
    scene
        .tells("DriftRepaired", &["Service apiserver-svc", "spec.type"])
        .await;
    scene.at_rest().await;
    scene.says("Ready", "True", "Running").await;
    scene.assert_certified().await;
    scene.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_are_deleted_are_made_anew() {
    let mut scene = Scene::start("up-deleted").await;
    for (kind, name) in [
        (Kind::StatefulSet, "controller-manager"),
        (Kind::StatefulSet, "apiserver"),
        (Kind::Service, "etcd"),
        (Kind::Service, "apiserver-svc"),
    ] {
        let words = ["was deleted", "made anew"];
        scene
            .repairs(kind, name, &words, async || scene.delete(kind, name).await)
            .await;
    }
    // With the Service its address has gone; all that it is in was issued again.
    scene.assert_certified().await;
    scene.says("Ready", "True", "Running").await;
    scene.assert_settled().await;

    // All at once.
    scene.pass(HOUR);
    scene
        .without_manager(async |scene: &Scene| {
            for (kind, name) in [
                (Kind::Service, "apiserver-svc"),
                (Kind::StatefulSet, "apiserver"),
                (Kind::StatefulSet, "controller-manager"),
            ] {
                scene.delete(kind, name).await;
            }
        })
        .await;
    eventually("all of them", async || {
        let shapes = [
            scene.shape(Kind::Service, "apiserver-svc").await,
            scene.shape(Kind::StatefulSet, "apiserver").await,
            scene.shape(Kind::StatefulSet, "controller-manager").await,
        ];
        shapes.iter().all(Option::is_some).then_some(())
    })
    .await;
    scene.at_rest().await;
    scene.assert_certified().await;
    scene.says("Ready", "True", "Running").await;
    scene.assert_settled().await;
}

/// Nothing of what others add is touched, or told of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_add_stays() {
    let mut scene = Scene::start("up-added").await;
    let mark = scene.at_rest().await;
    let set = Kind::StatefulSet;
    let note = json!({"labels": {"team": "blue"}, "annotations": {"example.com/owner": "blue"}});
    scene
        .patch(
            set,
            "apiserver",
            "someone",
            Patch::Merge(json!({"metadata": note})),
        )
        .await;
    let theirs = Patch::Apply(bare(Kind::Service, "apiserver-svc", &json!({"metadata": note})));
    scene
        .patch(Kind::Service, "apiserver-svc", "argocd", theirs)
        .await;
    let sidecar = json!({"spec": {"template": {"spec": {
        "containers": [{"name": "proxy", "image": "example.com/proxy:1"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
    }}}});
    scene
        .patch(set, "apiserver", "sidecar-injector", Patch::Strategic(sidecar))
        .await;
    scene.kubectl(&["rollout", "restart", "statefulset/controller-manager"]);
    scene.kubectl(&["set", "env", "statefulset/controller-manager", "EXTRA=1"]);
    let changed = [
        scene.shape(set, "apiserver").await,
        scene.shape(Kind::Service, "apiserver-svc").await,
        scene.shape(set, "controller-manager").await,
    ];
    scene.look().await;
    let text = serde_json::to_string(&changed).unwrap();
    for theirs in ["blue", "proxy:1", "more", "restartedAt", "EXTRA"] {
        assert!(text.contains(theirs), "{theirs}");
    }
    // The pods were replaced, and that shows in the status; nothing else is written.
    let written: Vec<_> = scene
        .writes(mark)
        .into_iter()
        .filter(|call| call.resource != "virtualclusters")
        .collect();
    assert_eq!(written, []);
    scene.assert_settled().await;

    // When something of ours is put back, theirs stays.
    scene
        .repairs(set, "apiserver", &["image"], async || {
            let change = container("apiserver", &json!({"image": "example.com/other:1"}));
            scene.edit(set, "apiserver", change).await;
        })
        .await;
    assert_eq!(scene.shape(set, "apiserver").await, changed[0]);

    // And a manager that has just started has nothing to say to it, either.
    scene.restart_manager().await;
    scene.looked_into(&scene.root, 0).await;
    scene.at_rest().await;
    assert_eq!(scene.writes(0), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_has_the_say_in_replicas() {
    let mut scene = Scene::start("up-autoscaled").await;
    let set = Kind::StatefulSet;
    let scaled = async |scene: &Scene, replicas: i32| {
        let api = scene.scope.api::<StatefulSet>(&scene.root);
        let mut scale: Scale = api.get_scale("apiserver").await.unwrap();
        scale.spec.as_mut().unwrap().replicas = Some(replicas);
        let params = PostParams {
            field_manager: Some("kube-controller-manager".into()),
            ..PostParams::default()
        };
        api.replace_scale("apiserver", &params, &scale).await.unwrap();
        eventually("the pods", async || {
            let set = api.get("apiserver").await.unwrap();
            (set.status?.ready_replicas == Some(replicas)).then_some(())
        })
        .await;
        scene.look().await;
        let set = api.get("apiserver").await.unwrap();
        assert_eq!(set.spec.unwrap().replicas, Some(replicas));
    };
    scaled(&scene, 3).await;
    // The manager no longer claims the number for itself; from then on it writes nothing at all.
    let mark = scene.at_rest().await;
    scaled(&scene, 2).await;
    scaled(&scene, 4).await;
    let mut writes = scene.writes(mark);
    writes.retain(|call| call.resource != "virtualclusters");
    assert_eq!(writes, []);
    assert_eq!(scene.told("DriftRepaired").await, [""; 0]);
    assert_eq!(scene.told("Contested").await, [""; 0]);
    scene.assert_settled().await;

    scene
        .repairs(set, "apiserver", &["image"], async || {
            let change = container("apiserver", &json!({"image": "example.com/other:1"}));
            scene.edit(set, "apiserver", change).await;
        })
        .await;
    // An upgrade leaves it to the autoscaler, too.
    scene
        .scope
        .edit(|content| crate::support::templates::verbosity(content, 4))
        .await;
    scene.scope.upgrade(ONE).await;
    let upgraded: StatefulSet = scene.scope.get(&scene.root, "apiserver").await;
    assert_eq!(upgraded.spec.unwrap().replicas, Some(4));
    scene.restart_manager().await;
    scene.looked_into(&scene.root, 0).await;
    scene.at_rest().await;
    assert_eq!(scene.writes(0), []);
}

/// Nothing differs: a manager that starts only reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_manager_writes_nothing() {
    let mut scene = Scene::start("up-restart").await;
    let before = scene.scope.versions(&scene.root).await;
    for _ in 0..2 {
        scene.restart_manager().await;
        scene.looked_into(&scene.root, 0).await;
        scene.at_rest().await;
        assert_eq!(scene.writes(0), []);
    }
    assert_eq!(scene.scope.versions(&scene.root).await, before);
}
