//! What is told of an object after others have changed it.

use std::time::Duration;

use axum::{Json, Router, routing::post};
use k8s_openapi::{
    ByteString, api::admissionregistration::v1::MutatingWebhookConfiguration, jiff::Timestamp,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, Patch, PostParams},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use vc_manager::{
    api::FIELD_MANAGER,
    controller::{
        kubernetes::apply_params,
        managed_fields::{drift, is_applied_by_us, scaled_by_other},
        render::Kind,
    },
    pki::{Authority, ExtendedUsage, KeyAlgorithm, LeafRequest, Validity},
    server::{
        serve::{Limits, serve},
        tls::{ReloadableCertificate, certified_key},
    },
};

use super::{
    contents::oddities,
    scene::{Scene, told},
    support::eventually,
};

const CONTAINER: &str = "spec.template.spec.containers[name=apiserver]";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_person_sets_with_kubectl_has_drifted() {
    let scene = Scene::stateful_set("fields-kubectl").await;

    scene.kubectl(&[
        "set",
        "image",
        "statefulset/apiserver",
        "apiserver=example.com/other:1",
    ]);
    scene
        .assert_repairable([&format!("{CONTAINER}.image: kubectl-set Update")])
        .await;
    scene.edit("s/--event-ttl=1h/--event-ttl=2h/");
    scene
        .assert_repairable([&format!("{CONTAINER}.args: kubectl-edit Update")])
        .await;
    scene.kubectl(&["scale", "statefulset/apiserver", "--replicas=3"]);
    assert_eq!(scaled_by_other(&scene.meta().await), None);
    scene.assert_repairable(["spec.replicas: kubectl Update"]).await;
    scene.kubectl(&[
        "patch",
        "statefulset/apiserver",
        "-p",
        r#"{"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}}"#,
    ]);
    scene
        .assert_repairable(["spec.updateStrategy.type: kubectl-patch Update"])
        .await;
    // Two in one object, and one of two in a list.
    scene.kubectl(&[
        "patch",
        "statefulset/apiserver",
        "-p",
        &json!({"spec": {"template": {"spec": {"containers": [{
            "name": "apiserver",
            "resources": {"requests": {"cpu": null, "memory": "1Gi"}},
            "volumeMounts": [{"mountPath": "/etc/kubernetes/pki/root", "readOnly": false}],
        }]}}}})
        .to_string(),
    ]);
    scene
        .assert_repairable([
            // One of its two deleted, the other one set: nothing of it is left.
            &format!("{CONTAINER}.resources.requests: kubectl-patch Update"),
            // False is not stored.
            &format!("{CONTAINER}.volumeMounts[mountPath=/etc/kubernetes/pki/root].readOnly: deleted"),
        ])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_person_adds_or_sets_to_what_it_is_has_not_drifted() {
    let scene = Scene::stateful_set("fields-added").await;
    let set = "statefulset/apiserver";
    scene.kubectl(&["rollout", "restart", set]);
    scene.kubectl(&["annotate", set, "example.com/a=b"]);
    scene.kubectl(&["label", set, "example.com/a=b"]);
    scene.kubectl(&["set", "env", set, "A=b"]);
    scene.kubectl(&[
        "patch",
        set,
        "-p",
        &json!({"spec": {"template": {"spec": {
            "containers": [{"name": "sidecar", "image": "example.com/sidecar"}],
            "volumes": [{"name": "more", "emptyDir": {}}],
            "priorityClassName": "system-cluster-critical",
        }}}})
        .to_string(),
    ]);
    scene.assert_untouched().await;

    // The whole object, as it is: only what nobody had set is this one's now.
    let image = scene
        .object
        .value
        .pointer("/spec/template/spec/containers/0/image")
        .expect("an image");
    let same = json!({"spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "apiserver", "image": image}]}}}});
    scene.patch("equal", Patch::Strategic(same.clone())).await;
    let mut whole = scene.api().get("apiserver").await.expect("it is there");
    whole.metadata.managed_fields = None;
    let params = PostParams {
        field_manager: Some("equal".into()),
        ..PostParams::default()
    };
    scene
        .api()
        .replace("apiserver", &params, &whole)
        .await
        .expect("it is accepted");
    scene.assert_untouched().await;
    scene
        .patch("equal-applied", Patch::Apply(scene.bare(&same)))
        .await;
    scene.assert_untouched().await;

    // Theirs stays when ours is applied again.
    scene.apply().await;
    let stored = scene.api().get("apiserver").await.expect("it is there");
    assert_eq!(stored.annotations()["example.com/a"], "b");
    let containers = stored
        .data
        .pointer("/spec/template/spec/containers")
        .expect("containers");
    assert_eq!(containers.as_array().expect("a list").len(), 2);
    scene.assert_untouched().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_deleted_has_drifted() {
    let scene = Scene::stateful_set("fields-deleted").await;
    let container = "/spec/template/spec/containers/0";

    // An argument of an atomic list: a new value of it.
    scene
        .json_patch(
            "a",
            json!([{"op": "remove", "path": format!("{container}/args/0")}]),
        )
        .await;
    scene
        .assert_repairable([&format!("{CONTAINER}.args: a Update")])
        .await;
    // All of it: a deletion leaves no trace of who did it.
    scene
        .json_patch(
            "b",
            json!([{"op": "remove", "path": format!("{container}/args")}]),
        )
        .await;
    scene
        .assert_repairable([&format!("{CONTAINER}.args: deleted")])
        .await;
    scene
        .json_patch(
            "c",
            json!([{"op": "remove", "path": "/metadata/annotations/tenancy.x-k8s.io~1rendered-hash"}]),
        )
        .await;
    scene
        .assert_repairable(["metadata.annotations[tenancy.x-k8s.io/rendered-hash]: deleted"])
        .await;
    scene
        .json_patch(
            "d",
            json!([
                {"op": "remove", "path": "/spec/template/metadata/labels/tenancy.x-k8s.io~1cluster"},
                {"op": "remove", "path": "/spec/template/metadata/annotations"},
                {"op": "remove", "path": format!("{container}/ports/0")},
                {"op": "remove", "path": "/spec/template/spec/enableServiceLinks"},
                {"op": "add", "path": "/metadata/labels", "value": {"d": "d"}},
            ]),
        )
        .await;
    scene
        .assert_repairable([
            // Of what is gone as a whole the topmost, once; but a single field is named.
            "spec.template.metadata.annotations: deleted",
            "spec.template.metadata.labels[tenancy.x-k8s.io/cluster]: deleted",
            &format!("{CONTAINER}.ports[containerPort=6443]: deleted"),
            // What the server then puts there by default is nobody's.
            "spec.template.spec.enableServiceLinks: deleted",
        ])
        .await;

    // A container, and with it all that is in it.
    scene
        .json_patch(
            "e",
            json!([{"op": "replace", "path": "/spec/template/spec/containers",
            "value": [{"name": "instead", "image": "example.com/instead"}]}]),
        )
        .await;
    scene.assert_repairable([&format!("{CONTAINER}: deleted")]).await;
    // An element whose keys were changed is another one.
    let at = scene.api().get("apiserver").await.expect("it is there").data["spec"]["template"]["spec"]["containers"]
        .as_array()
        .and_then(|containers| containers.iter().position(|container| container["name"] == "apiserver"))
        .expect("it is back");
    scene
        .json_patch("f", json!([{"op": "replace", "path": format!("/spec/template/spec/containers/{at}/ports/0/containerPort"), "value": 7443}]))
        .await;
    assert_eq!(
        scene.drift().await,
        [format!(
            "{CONTAINER}.ports[containerPort=6443,protocol=TCP]: deleted"
        )]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_is_laid_to_who_wrote_last_after_us_if_anyone() {
    let scene = Scene::stateful_set("fields-blame").await;
    let by = async || {
        let mut drifts = drift(&scene.object.value, &scene.meta().await);
        assert_eq!(drifts.len(), 1, "{drifts:?}");
        drifts.remove(0).to_string()
    };
    let deletion = json!({"op": "remove", "path": "/spec/template/spec/containers/0/args"});
    let path = format!("{CONTAINER}.args");
    let a_second = || tokio::time::sleep(Duration::from_millis(1100));

    a_second().await;
    scene
        .json_patch(
            "a",
            json!([deletion, {"op": "add", "path": "/metadata/labels", "value": {"a": "a"}}]),
        )
        .await;
    let told = by().await;
    assert!(
        told.starts_with(&format!("{path} (deleted; last written by a at 20")),
        "{told}"
    );
    a_second().await;
    scene.apply().await;
    scene.json_patch("a", json!([deletion])).await;
    assert_eq!(
        by().await,
        format!("{path} (deleted)"),
        "that leaves no trace, and what a did before was undone"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_are_not_stored_are_missed_when_they_are_set() {
    let scene = Scene::of("fields-zero", &oddities(), Kind::StatefulSet).await;
    let pod = "spec.template.spec";
    let volumes = json!([{"name": "a", "emptyDir": null, "hostPath": {"path": "/a"}}]);
    let set = json!({"spec": {"template": {"spec": {
        "hostNetwork": true,
        "volumes": volumes,
        "nodeSelector": {"a": "b"},
        "imagePullSecrets": [{"name": "a"}],
        "containers": [{"name": "apiserver", "args": ["a"], "env": [{"name": "EMPTY", "value": "a"}, {"name": "NOTHING", "value": "a"}],
            "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}],
    }}}});
    scene.patch("other", Patch::Strategic(set)).await;
    assert_eq!(
        scene.drift().await,
        [
            format!("{CONTAINER}.args: other Update"),
            // Who said NOTHING said no value.
            format!("{CONTAINER}.env[name=EMPTY].value: other Update"),
            format!("{CONTAINER}.securityContext.capabilities.add: other Update"),
            format!("{pod}.hostNetwork: other Update"),
            format!("{pod}.nodeSelector: other Update"),
            format!("{pod}.volumes[name=a].emptyDir: deleted"),
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_applies_by_force_has_drifted() {
    let scene = Scene::stateful_set("fields-applied").await;
    let value = &scene.object.value;
    let args = value
        .pointer("/spec/template/spec/containers/0/args")
        .expect("arguments")
        .clone();
    let theirs = |image: &str, replicas: u32| {
        scene.bare(
            &json!({"spec": {"replicas": replicas, "template": {"spec": {"containers": [
            {"name": "apiserver", "image": image, "args": args, "env": [{"name": "A", "value": "b"}]}]}}}}),
        )
    };
    // Our values, of which there are two owners then.
    let image = value
        .pointer("/spec/template/spec/containers/0/image")
        .and_then(Value::as_str)
        .expect("an image");
    scene.patch("argocd", Patch::Apply(theirs(image, 1))).await;
    scene.assert_untouched().await;
    // Who deletes what two own takes it from both.
    scene
        .json_patch(
            "a",
            json!([{"op": "remove", "path": "/spec/template/spec/containers/0/args"}]),
        )
        .await;
    scene
        .assert_repairable([&format!("{CONTAINER}.args: deleted")])
        .await;

    scene
        .patch("argocd", Patch::Apply(theirs("example.com/other", 2)))
        .await;
    scene
        .assert_repairable([
            "spec.replicas: argocd Apply",
            &format!("{CONTAINER}.image: argocd Apply"),
        ])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autoscaler_has_the_replicas_until_we_set_them() {
    let scene = Scene::stateful_set("fields-scaled").await;
    // What it is already is nobody's news.
    scene.autoscale(1).await;
    assert_eq!(scaled_by_other(&scene.meta().await), None);
    scene.autoscale(4).await;
    assert_eq!(
        scaled_by_other(&scene.meta().await).as_deref(),
        Some("kube-controller-manager")
    );
    scene.assert_untouched().await;

    // Without them, as is right, it is as it was; with them it is ours again.
    let mut without = scene.object.value.clone();
    without["spec"]
        .as_object_mut()
        .expect("an object")
        .remove("replicas");
    let applied = scene
        .api()
        .patch("apiserver", &apply_params(false), &Patch::Apply(&without))
        .await
        .expect("it is accepted");
    assert_eq!(applied.data["spec"]["replicas"], 4);
    assert_eq!(told(&without, &applied.metadata), [""; 0]);
    assert!(scaled_by_other(&applied.metadata).is_some());
    scene.apply().await;
    assert_eq!(scaled_by_other(&scene.meta().await), None);

    // By way of the object itself it is a change like any other.
    scene
        .patch("autoscaler", Patch::Merge(json!({"spec": {"replicas": 5}})))
        .await;
    assert_eq!(scaled_by_other(&scene.meta().await), None);
    scene
        .assert_repairable(["spec.replicas: autoscaler Update"])
        .await;
    // And who scaled by hand after the autoscaler is who has it.
    scene.autoscale(4).await;
    scene.kubectl(&["scale", "statefulset/apiserver", "--replicas=2"]);
    assert_eq!(scaled_by_other(&scene.meta().await), None);
    scene.assert_repairable(["spec.replicas: kubectl Update"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_are_no_different() {
    let scene = Scene::service("fields-service").await;
    scene.kubectl(&["label", "service/apiserver-svc", "a=b"]);
    scene.kubectl(&[
        "patch",
        "service/apiserver-svc",
        "-p",
        r#"{"spec": {"ports": [{"port": 80, "name": "http"}]}}"#,
    ]);
    scene.assert_untouched().await;
    scene.kubectl(&[
        "patch",
        "service/apiserver-svc",
        "-p",
        r#"{"spec": {"type": "NodePort"}}"#,
    ]);
    scene.assert_repairable(["spec.type: kubectl-patch Update"]).await;
    scene.edit("s/targetPort: api/targetPort: 7443/");
    scene
        .assert_repairable(["spec.ports[port=6443,protocol=TCP].targetPort: kubectl-edit Update"])
        .await;
    scene.kubectl(&["set", "selector", "service/apiserver-svc", "a=b"]);
    scene
        .assert_repairable(["spec.selector: kubectl-set Update"])
        .await;
    scene
        .json_patch(
            "a",
            json!([{"op": "replace", "path": "/spec/ports", "value": [{"port": 443, "name": "a"}]}]),
        )
        .await;
    scene
        .assert_repairable(["spec.ports[port=6443,protocol=TCP]: deleted"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_was_never_applied_is_not_ours() {
    let scene = Scene::service("fields-foreign").await;
    scene
        .api()
        .delete("apiserver-svc", &DeleteParams::default())
        .await
        .expect("it may go");
    let object: DynamicObject = serde_json::from_value(scene.object.value.clone()).expect("an object");
    let params = PostParams {
        field_manager: Some("somebody".into()),
        ..PostParams::default()
    };
    scene
        .api()
        .create(&params, &object)
        .await
        .expect("it is accepted");
    assert!(!is_applied_by_us(&scene.meta().await));
    scene.assert_repairable([": somebody Update"]).await;
    assert!(is_applied_by_us(&scene.meta().await));

    // One whose managed fields were cleared.
    scene
        .json_patch(
            "a",
            json!([{"op": "replace", "path": "/metadata/managedFields", "value": [{}]}]),
        )
        .await;
    scene.assert_repairable([": ?"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_on_our_own_way_has_not_drifted() {
    let scene = Scene::stateful_set("fields-way").await;
    let image = |image: &str| json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": image}]);
    scene
        .json_patch(FIELD_MANAGER, image("example.com/by-our-name"))
        .await;
    scene.assert_untouched().await;
    // But what others then make of it has.
    scene.json_patch("other", image("example.com/other")).await;
    scene
        .assert_repairable([&format!("{CONTAINER}.image: other Update")])
        .await;

    // A webhook leaves the owners as they are, whoever's request it changes.
    let stop = CancellationToken::new();
    let authority = redirect_images(&scene, "example.com/mirror", stop.clone()).await;
    scene.apply().await;
    let stored = scene.api().get("apiserver").await.expect("it is there");
    let container = |object: &DynamicObject| object.data["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!(container(&stored)["image"], "example.com/mirror");
    assert_eq!(container(&stored)["env"][0]["name"], "INJECTED");
    scene.assert_untouched().await;
    scene.kubectl(&["label", "statefulset/apiserver", "a=b"]);
    scene.assert_untouched().await;
    scene.json_patch("other", image("example.com/other")).await;
    let stored = scene.api().get("apiserver").await.expect("it is there");
    assert_eq!(
        container(&stored)["image"],
        "example.com/mirror",
        "the webhook has the last word"
    );
    // The request would have changed it.
    scene
        .assert_repairable([&format!("{CONTAINER}.image: other Update")])
        .await;
    drop(authority);
    stop.cancel();
}

/// Has a webhook put `image` into the first container of whatever StatefulSet is written in the scene's namespace, and
/// a variable, and waits until it does.
async fn redirect_images(scene: &Scene, image: &'static str, stop: CancellationToken) -> Authority {
    let answer = async move |Json(review): Json<Value>| {
        let container = "/spec/template/spec/containers/0";
        let mut patch = vec![json!({"op": "replace", "path": format!("{container}/image"), "value": image})];
        let env = review["request"]["object"].pointer(&format!("{container}/env"));
        if env.is_none() {
            patch.push(json!({"op": "add", "path": format!("{container}/env"),
                "value": [{"name": "INJECTED", "value": "a"}]}));
        }
        let patch = ByteString(Value::Array(patch).to_string().into_bytes());
        Json(
            json!({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": {
            "uid": review["request"]["uid"], "allowed": true, "patchType": "JSONPatch", "patch": patch}}),
        )
    };
    let (authority, _) = Authority::create(Timestamp::now()).expect("a CA");
    let request = LeafRequest {
        common_name: "webhook".into(),
        organization: None,
        usages: &[ExtendedUsage::ServerAuth],
        dns_names: Vec::new(),
        ip_addresses: vec!["127.0.0.1".parse().expect("an address")],
    };
    let pair = authority
        .issue(
            &request,
            KeyAlgorithm::EcdsaP256,
            Validity::default(),
            Timestamp::now(),
        )
        .expect("a certificate");
    let certificate = ReloadableCertificate::default();
    certificate.set(certified_key(pair.certificate_pem.as_bytes(), pair.key_pem.as_bytes()).expect("a pair"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!("https://{}/", listener.local_addr().expect("bound"));
    let tls = Some(certificate.server_config().expect("TLS"));
    let router = Router::new().route("/", post(answer));
    tokio::spawn(serve("webhook", listener, tls, router, Limits::default(), stop));

    let configuration: MutatingWebhookConfiguration = serde_json::from_value(json!({
        "metadata": {"name": scene.scope.namespace},
        "webhooks": [{
            "name": "images.example.com",
            "clientConfig": {"url": url, "caBundle": ByteString(authority.certificate_pem().as_bytes().to_vec())},
            "rules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["statefulsets"]}],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.scope.namespace}},
            "sideEffects": "None", "failurePolicy": "Fail", "admissionReviewVersions": ["v1"],
        }],
    }))
    .expect("a configuration");
    Api::all(scene.scope.client.clone())
        .create(&PostParams::default(), &configuration)
        .await
        .expect("it is accepted");
    eventually("the webhook to be asked", async || {
        let tried = scene
            .api()
            .patch(
                "apiserver",
                &apply_params(true),
                &Patch::Apply(&scene.object.value),
            )
            .await
            .ok()?;
        (tried.data["spec"]["template"]["spec"]["containers"][0]["image"] == image).then_some(())
    })
    .await;
    authority
}
