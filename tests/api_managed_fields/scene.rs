//! One object that is applied as the manager applies it, and then changed.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use k8s_openapi::api::{apps::v1::StatefulSet, autoscaling::v1::Scale};
use kube::{
    Api,
    api::{DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vc_manager::{
    api::Component,
    controller::{
        kubernetes::Kubernetes,
        managed_fields::drift,
        render::{Kind, Rendered},
    },
};

use super::{
    contents::{rendered, sample},
    objects::{api, by},
    support::Scope,
};

/// One object that is applied as the manager applies it, and then changed.
pub(crate) struct Scene {
    pub(crate) scope: Scope,
    pub(crate) object: Rendered,
}

impl Scene {
    /// The apiserver's StatefulSet of the sample ClusterVersion, in a namespace `name`.
    pub(crate) async fn stateful_set(name: &str) -> Self {
        Self::of(name, &sample(), Kind::StatefulSet).await
    }

    /// The apiserver's Service of the sample ClusterVersion, in a namespace `name`.
    pub(crate) async fn service(name: &str) -> Self {
        Self::of(name, &sample(), Kind::Service).await
    }

    pub(crate) async fn of(name: &str, content: &Value, kind: Kind) -> Self {
        let scope = Scope::new(name).await;
        let object = rendered(content, name)
            .into_iter()
            .find(|object| object.component == Component::ApiServer && object.kind == kind)
            .expect("the content has it");
        let scene = Self { scope, object };
        scene.apply().await;
        scene.assert_untouched().await;
        scene
    }

    pub(crate) async fn apply(&self) {
        Kubernetes::new(self.scope.client.clone(), Duration::from_secs(30))
            .apply(&self.scope.namespace, &self.object, false)
            .await
            .expect("it is accepted");
    }

    pub(crate) fn api(&self) -> Api<DynamicObject> {
        api(&self.scope.client, &self.scope.namespace, self.object.kind)
    }

    pub(crate) async fn meta(&self) -> ObjectMeta {
        self.api()
            .get(&self.object.name)
            .await
            .expect("it is there")
            .metadata
    }

    pub(crate) async fn drift(&self) -> Vec<String> {
        told(&self.object.value, &self.meta().await)
    }

    /// This has drifted, and is put right by applying the object again.
    pub(crate) async fn assert_repairable<const N: usize>(&self, drifts: [&str; N]) {
        assert_eq!(self.drift().await, drifts);
        self.apply().await;
        assert_eq!(self.drift().await, [""; 0], "applied again after {drifts:?}");
    }

    pub(crate) async fn assert_untouched(&self) {
        assert_eq!(self.drift().await, [""; 0]);
    }

    /// Changes the object by a patch, as the field manager `manager`.
    pub(crate) async fn patch(&self, manager: &str, patch: Patch<Value>) {
        let params = PatchParams {
            force: matches!(patch, Patch::Apply(_)),
            ..by(manager)
        };
        self.api()
            .patch(&self.object.name, &params, &patch)
            .await
            .expect("it is accepted");
    }

    pub(crate) async fn json_patch(&self, manager: &str, patch: Value) {
        let patch: json_patch::Patch = serde_json::from_value(patch).expect("a patch");
        self.api()
            .patch(&self.object.name, &by(manager), &Patch::Json::<()>(patch))
            .await
            .expect("it is accepted");
    }

    /// The object with nothing but its type, its name and `rest`.
    pub(crate) fn bare(&self, rest: &Value) -> Value {
        let value = &self.object.value;
        let mut bare = json!({"apiVersion": value["apiVersion"], "kind": value["kind"],
            "metadata": {"name": value["metadata"]["name"]}});
        json_patch::merge(&mut bare, rest);
        bare
    }

    /// Sets the number of replicas as the horizontal autoscaler does.
    pub(crate) async fn autoscale(&self, replicas: i32) {
        let api = self.scope.api::<StatefulSet>(&self.scope.namespace);
        let mut scale: Scale = api.get_scale(&self.object.name).await.expect("a scale");
        scale.spec.as_mut().expect("a spec").replicas = Some(replicas);
        let params = PostParams {
            field_manager: Some("kube-controller-manager".into()),
            ..PostParams::default()
        };
        api.replace_scale(&self.object.name, &params, &scale)
            .await
            .expect("it is accepted");
    }

    /// Runs kubectl in the namespace.
    pub(crate) fn kubectl(&self, arguments: &[&str]) {
        self.kubectl_with(arguments, "", None);
    }

    /// Runs kubectl edit, with sed for an editor.
    pub(crate) fn edit(&self, script: &str) {
        let editor = self.file("editor");
        fs::write(&editor, format!("#!/bin/sh\nsed -i '{script}' \"$1\"\n")).expect("a file");
        fs::set_permissions(&editor, fs::Permissions::from_mode(0o755)).expect("a mode");
        let kind = self.object.value["kind"].as_str().expect("a kind");
        self.kubectl_with(&["edit", kind, &self.object.name], "", Some(&editor));
    }

    fn kubectl_with(&self, arguments: &[&str], input: &str, editor: Option<&Path>) {
        let program = std::env::var("VCM_KUBECTL").expect("VCM_KUBECTL names kubectl; run `make test`");
        let kubeconfig = self.file("kubeconfig");
        fs::write(
            &kubeconfig,
            self.scope.server.kubeconfig("jane", Some("system:masters")),
        )
        .expect("a file");
        let mut child = Command::new(program)
            .arg("--kubeconfig")
            .arg(&kubeconfig)
            .arg("--cache-dir")
            .arg(self.scope.server.dir().join("kubectl"))
            .args(["--namespace", &self.scope.namespace])
            .args(arguments)
            .env("KUBE_EDITOR", editor.unwrap_or(Path::new("false")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).expect("kubectl reads");
        drop(stdin);
        let output = child.wait_with_output().expect("kubectl ends");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    fn file(&self, extension: &str) -> PathBuf {
        self.scope
            .server
            .dir()
            .join(&self.scope.namespace)
            .with_extension(extension)
    }
}

/// What has drifted, as `path: manager operation`.
pub(crate) fn told(rendered: &Value, meta: &ObjectMeta) -> Vec<String> {
    let drifts = drift(rendered, meta).into_iter();
    drifts
        .map(|drift| {
            let path = &drift.path;
            // Times are whole seconds: who wrote last is not sure in tests that do not wait.
            match (drift.deleted, drift.by) {
                (false, Some(by)) => format!("{path}: {} {}", by.manager, by.operation),
                (false, None) => format!("{path}: ?"),
                (true, _) => format!("{path}: deleted"),
            }
        })
        .collect()
}
