//! A tenant that runs, a manager whose clock can be moved, and what others do to the tenant's objects.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Secret, Service},
        events::v1::Event,
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vc_manager::{
    api::VirtualCluster,
    controller::{Clock, render::Kind},
    pki::{self, Authority, CertificateInfo, CertifiedPair},
};

use crate::support::{Call, Driver, Manager, Options, Scope, condition, eventually, root_of, templates};

/// Name of the tenant that every scene has.
pub(crate) const ONE: &str = "one";

/// Secrets that hold leaves.
pub(crate) const LEAVES: [&str; 5] = [
    "apiserver-ca",
    "etcd-ca",
    "front-proxy-ca",
    "controller-manager-kubeconfig",
    "admin-kubeconfig",
];

pub(crate) struct Scene {
    pub(crate) scope: Scope,
    pub(crate) driver: Driver,
    manager: Option<Manager>,
    flags: Vec<String>,
    ahead: Arc<AtomicI64>,
    /// Root namespace of [`ONE`].
    pub(crate) root: String,
}

impl Scene {
    /// One with the usual content; `name` is the test's own.
    pub(crate) async fn start(name: &str) -> Self {
        Self::of(name, content(), &[]).await
    }

    /// One whose tenants are made from `content`, with a manager that has these flags.
    pub(crate) async fn of(name: &str, content: Value, flags: &[&str]) -> Self {
        let scope = Scope::new(name).await;
        let driver = Driver::start(&scope);
        scope.create_cluster_version(name, content).await;
        let mut scene = Self {
            scope,
            driver,
            manager: None,
            flags: flags.iter().map(ToString::to_string).collect(),
            ahead: Arc::default(),
            root: String::new(),
        };
        scene.start_manager();
        scene.root = root_of(&scene.scope.provision(ONE).await);
        scene.at_rest().await;
        scene
    }

    /// Ends the manager, as by SIGTERM, and starts another one.
    pub(crate) async fn restart_manager(&mut self) {
        self.without_manager(async |_| ()).await;
    }

    /// Ends the manager, and starts one with these flags.
    pub(crate) async fn restart_manager_with(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(ToString::to_string).collect();
        self.restart_manager().await;
    }

    /// Something happens while no manager runs.
    pub(crate) async fn without_manager(&mut self, happens: impl AsyncFnOnce(&Self)) {
        let manager = self.manager.take().expect("it runs");
        manager.stop().await.expect("it ends well");
        happens(self).await;
        self.start_manager();
    }

    fn start_manager(&mut self) {
        let ahead = Arc::clone(&self.ahead);
        let clock =
            Clock::new(move || Timestamp::now() + SignedDuration::from_secs(ahead.load(Ordering::Relaxed)));
        let options = Options {
            flags: self.flags.clone(),
            clock,
            ..Options::default()
        };
        self.manager = Some(Manager::start(&self.scope, options));
    }

    pub(crate) fn manager(&self) -> &Manager {
        self.manager.as_ref().expect("it runs")
    }

    /// The time, as the manager sees it.
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::now() + SignedDuration::from_secs(self.ahead.load(Ordering::Relaxed))
    }

    /// Moves the manager's clock. It does not notice by itself.
    pub(crate) fn pass(&self, time: SignedDuration) {
        self.ahead.fetch_add(time.as_secs(), Ordering::Relaxed);
    }

    /// Waits until the manager has been silent for a second; a mark of its traffic then.
    pub(crate) async fn at_rest(&self) -> usize {
        let traffic = &self.manager().traffic;
        let mut mark = traffic.mark();
        eventually("a second of silence", async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let quiet = traffic.since(mark).iter().all(|call| call.verb == "watch");
            mark = traffic.mark();
            quiet.then_some(mark)
        })
        .await
    }

    /// Waits until the manager has looked into the root namespace `root` since `mark`.
    pub(crate) async fn looked_into(&self, root: &str, mark: usize) {
        eventually("a look at the tenant", async || {
            let calls = self.manager().traffic.since(mark);
            let looks = calls.iter().any(|call| match call.verb {
                "list" => call.resource == "statefulsets" && call.namespace == root,
                // If there is none, nothing else is asked for.
                "get" => call.resource == "namespaces" && call.name == root,
                _ => false,
            });
            looks.then_some(())
        })
        .await;
    }

    /// Has the manager look at the tenant, and waits until it is through with it.
    pub(crate) async fn look(&self) {
        let mark = self.manager().traffic.mark();
        self.poke(ONE).await;
        self.looked_into(&self.root, mark).await;
        self.at_rest().await;
    }

    /// Has the manager look at a tenant.
    pub(crate) async fn poke(&self, tenant: &str) {
        let note = json!({"metadata": {"annotations": {"poke": Timestamp::now().to_string()}}});
        self.scope.merge(tenant, &note).await;
    }

    /// What the manager has written since `mark`, Events among it.
    pub(crate) fn writes(&self, mark: usize) -> Vec<Call> {
        let mut calls = self.manager().traffic.since(mark);
        calls.retain(|call| call.is_write() || (call.resource == "events" && call.verb != "watch"));
        calls
    }

    /// Another look changes nothing and tells nothing.
    pub(crate) async fn assert_settled(&self) {
        let mark = self.at_rest().await;
        self.look().await;
        assert_eq!(self.writes(mark), []);
    }

    pub(crate) async fn tenant(&self) -> VirtualCluster {
        self.scope.tenant(ONE).await
    }

    /// Waits until a condition of the tenant has this status and reason; its message.
    pub(crate) async fn says(&self, type_: &str, status: &str, reason: &str) -> String {
        self.says_of(ONE, type_, status, reason).await
    }

    /// As [`Self::says`], of another tenant.
    pub(crate) async fn says_of(&self, tenant: &str, type_: &str, status: &str, reason: &str) -> String {
        let what = format!("{type_}={status} {reason}");
        let tenant = self
            .scope
            .when(tenant, &what, |tenant| {
                let conditions = tenant.status.iter().flat_map(|status| &status.conditions);
                conditions
                    .filter(|condition| condition.type_.as_deref() == Some(type_))
                    .any(|condition| {
                        condition.status == status && condition.reason.as_deref() == Some(reason)
                    })
            })
            .await;
        condition(&tenant, type_).message.clone().unwrap_or_default()
    }

    /// Notes of the Events with this reason about a tenant, each as often as it was told.
    pub(crate) async fn told_of(&self, tenant: &str, reason: &str) -> Vec<String> {
        let events = self.events().await.into_iter();
        let about_it = |event: &Event| {
            let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
            regarding == Some(tenant) && event.reason.as_deref() == Some(reason)
        };
        events
            .filter(about_it)
            .flat_map(|event| {
                let count = event.series.as_ref().map_or(1, |series| series.count);
                let note = event.note.unwrap_or_default();
                (0..count).map(move |_| note.clone())
            })
            .collect()
    }

    /// Notes of the Events with this reason about the tenant.
    pub(crate) async fn told(&self, reason: &str) -> Vec<String> {
        self.told_of(ONE, reason).await
    }

    /// Waits for an Event with this reason whose note has all these words.
    pub(crate) async fn tells(&self, reason: &str, words: &[&str]) -> String {
        eventually(&format!("the Event {reason} with {words:?}"), async || {
            let notes = self.told(reason).await;
            notes
                .into_iter()
                .find(|note| words.iter().all(|word| note.contains(word)))
        })
        .await
    }

    async fn events(&self) -> Vec<Event> {
        let api = self.scope.api::<Event>(&self.scope.namespace);
        let mut events = api.list(&ListParams::default()).await.expect("a list").items;
        events.sort_by_key(|event| event.event_time.as_ref().map(|time| time.0));
        events
    }

    /// Everything a person can read about the tenants: Events, and the VirtualClusters themselves.
    pub(crate) async fn all_texts(&self) -> String {
        let tenants = self.scope.tenants().list(&ListParams::default()).await;
        let events = serde_json::to_string(&self.events().await).expect("JSON");
        events + &serde_json::to_string(&tenants.expect("a list").items).expect("JSON")
    }

    pub(crate) fn api(&self, kind: Kind) -> Api<DynamicObject> {
        let gvk = match kind {
            Kind::StatefulSet => GroupVersionKind::gvk("apps", "v1", "StatefulSet"),
            Kind::Service => GroupVersionKind::gvk("", "v1", "Service"),
        };
        Api::namespaced_with(
            self.scope.client.clone(),
            &self.root,
            &ApiResource::from_gvk(&gvk),
        )
    }

    /// Changes an object as `kubectl edit` does.
    pub(crate) async fn edit(&self, kind: Kind, name: &str, change: Value) {
        self.patch(kind, name, "kubectl-edit", Patch::Strategic(change))
            .await;
    }

    /// Changes an object as the field manager `manager`; an apply is forced.
    pub(crate) async fn patch(&self, kind: Kind, name: &str, manager: &str, patch: Patch<Value>) {
        let params = PatchParams {
            force: matches!(patch, Patch::Apply(_)),
            ..by(manager)
        };
        let patched = self.api(kind).patch(name, &params, &patch).await;
        patched.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Changes an object by a JSON patch.
    pub(crate) async fn json_patch(&self, kind: Kind, name: &str, manager: &str, patch: Value) {
        let patch: json_patch::Patch = serde_json::from_value(patch).expect("a patch");
        let patch = Patch::Json::<()>(patch);
        let patched = self.api(kind).patch(name, &by(manager), &patch).await;
        patched.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    pub(crate) async fn delete(&self, kind: Kind, name: &str) {
        let deleted = self.api(kind).delete(name, &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// The part of an object that people write, or nothing if it is gone.
    pub(crate) async fn shape(&self, kind: Kind, name: &str) -> Option<Value> {
        let object = self.api(kind).get_opt(name).await.expect("an answer")?;
        let mut spec = object.data["spec"].clone();
        // One that is made anew has another.
        for key in ["clusterIP", "clusterIPs"] {
            if spec[key] != json!("None") && spec[key] != json!(["None"]) {
                spec.as_object_mut().expect("an object").remove(key);
            }
        }
        Some(
            json!({"labels": object.metadata.labels, "annotations": object.metadata.annotations, "spec": spec}),
        )
    }

    /// The tenant's StatefulSets, each with its generation.
    pub(crate) async fn generations(&self) -> BTreeMap<String, Option<i64>> {
        let sets = self.scope.api::<StatefulSet>(&self.root);
        let sets = sets.list(&ListParams::default()).await.expect("a list");
        sets.into_iter()
            .map(|set| (set.name_any(), set.metadata.generation))
            .collect()
    }

    /// Merges into the data of a Secret (null deletes a key), as `manager`.
    pub(crate) async fn set_data(&self, secret: &str, manager: &str, data: &BTreeMap<String, String>) {
        let data: BTreeMap<_, _> = data
            .iter()
            .map(|(key, text)| (key, json!(k8s_openapi::ByteString(text.clone().into_bytes()))))
            .collect();
        let patch = Patch::Merge(json!({"data": data}));
        let api = self.scope.api::<Secret>(&self.root);
        api.patch(secret, &by(manager), &patch)
            .await
            .expect("it is accepted");
    }

    pub(crate) async fn delete_secret(&self, name: &str) {
        let api = self.scope.api::<Secret>(&self.root);
        let deleted = api.delete(name, &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// All leaves of the tenant are good: pairs of a key and a certificate of its root CA, for the address it has, and
    /// where processes had to be restarted for them, they were.
    pub(crate) async fn assert_certified(&self) {
        let service: Service = self.scope.get(&self.root, "apiserver-svc").await;
        let address = service.spec.and_then(|spec| spec.cluster_ip).expect("an address");
        let secrets = self.scope.secrets(&self.root).await;
        let pair = |name: &str| CertifiedPair {
            certificate_pem: secrets[name]["tls.crt"].clone(),
            key_pem: secrets[name]["tls.key"].clone().into(),
        };
        let root = pair("root-ca");
        let root = Authority::load(&root.certificate_pem, &root.key_pem, self.now()).expect("a root CA");
        for name in LEAVES {
            let (pair, server) = if name.ends_with("kubeconfig") {
                let parsed = pki::kubeconfig::parse(&secrets[name][name]).expect("a kubeconfig");
                (parsed.client, Some(parsed.server))
            } else {
                (pair(name), None)
            };
            let certificate = CertificateInfo::parse(&pair.certificate_pem).expect("a certificate");
            assert!(certificate.matches_key(&pair.key_pem), "{name}");
            assert!(certificate.is_issued_by(&root), "{name}");
            assert!(certificate.not_after > self.now(), "{name}");
            if let Some(server) = server {
                assert_eq!(server, format!("https://{address}:6443"), "{name}");
            }
            if name == "apiserver-ca" {
                assert_eq!(certificate.ip_addresses, [address.parse::<IpAddr>().unwrap()]);
            }
        }
        for (set, carried) in [
            (
                "apiserver",
                ["root-ca", "apiserver-ca", "front-proxy-ca", "serviceaccount-rsa"].as_slice(),
            ),
            (
                "controller-manager",
                &["root-ca", "serviceaccount-rsa", "controller-manager-kubeconfig"],
            ),
        ] {
            let set: StatefulSet = self.scope.get(&self.root, set).await;
            let template = set.spec.expect("a spec").template;
            let annotations = template
                .metadata
                .and_then(|meta| meta.annotations)
                .expect("annotations");
            for name in carried {
                let data = secrets[*name].iter();
                let data = data
                    .map(|(key, text)| (key.clone(), text.clone().into_bytes()))
                    .collect();
                let hash = pki::hash::annotation_hash(name, &data).expect("a hash");
                assert_eq!(annotations[&format!("{name}-hash")], hash, "{name}");
            }
        }
        let endpoint = self.tenant().await.status.and_then(|status| status.endpoint);
        assert_eq!(endpoint, Some(format!("https://{address}:6443")));
    }

    /// Runs kubectl in the root namespace.
    pub(crate) fn kubectl(&self, arguments: &[&str]) {
        let program = std::env::var("VCM_KUBECTL").expect("VCM_KUBECTL names kubectl; run `make test`");
        let folder = self.scope.server.dir();
        let kubeconfig = folder.join(&self.scope.namespace).with_extension("kubeconfig");
        let text = self.scope.server.kubeconfig("jane", Some("system:masters"));
        fs::write(&kubeconfig, text).expect("a file");
        let output = Command::new(program)
            .arg("--kubeconfig")
            .arg(&kubeconfig)
            .arg("--cache-dir")
            .arg(folder.join("kubectl"))
            .args(["--namespace", &self.root])
            .args(arguments)
            .output()
            .expect("kubectl starts");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
}

/// Parameters of a patch by this field manager.
fn by(manager: &str) -> PatchParams {
    PatchParams {
        field_manager: Some(manager.into()),
        ..PatchParams::default()
    }
}

/// What tenants are made from: with some of everything that people change.
pub(crate) fn content() -> Value {
    let mut content = templates::full("ClusterIP");
    for bundle in ["etcd", "apiServer", "controllerManager"] {
        let set = &mut content[bundle]["statefulset"];
        set["metadata"]["labels"] = json!({"tier": "control-plane"});
        let pod = &mut set["spec"]["template"];
        pod["metadata"]["annotations"] = json!({"example.com/scrape": "true"});
        let container = &mut pod["spec"]["containers"][0];
        container["env"] = json!([{"name": "MODE", "value": "quiet"}, {"name": "ZONE", "value": "a"}]);
        container["resources"] = json!({"requests": {"cpu": "100m"}});
    }
    content["etcd"]["service"]["spec"]["ports"] = json!([{"name": "client", "port": 2379}]);
    content
}
