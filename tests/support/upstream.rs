//! Tenants as the Go manager leaves them: what this one finds when it is started in its place.
//!
//! Made by code of its own, from the rules that both managers keep to; nothing of this manager's renderer is in it, so
//! that a mistake there is not made here once more. The real objects of a Go manager are compared with these where a
//! machine has some (`api_adoption`).
//!
//! It uses nothing but a client: the tests on a real cluster have it, too.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Namespace, Secret, Service},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
    SerialNumber,
};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use vc_manager::{
    api::{ClusterVersion, VirtualCluster, root_namespace},
    pki::{Authority, CertifiedPair, ExtendedUsage, KeyAlgorithm, LeafRequest, service_account},
};

/// Field manager of its server-side applies.
pub const FIELD_MANAGER: &str = "virtualcluster/provisioner/native";
/// Field manager of its other writes: the name of its program, which differs between builds.
pub const PROGRAM: &str = "vc-manager";
/// The same of builds without server-side apply.
pub const OLD_PROGRAM: &str = "manager";
/// Attempts it makes to provision a tenant.
const ATTEMPTS: u32 = 3;

/// Which builds of the Go manager made a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The last ones: server-side apply, hashes and a label on pod templates, one condition for each reason.
    Applied,
    /// Those that knew no upgrades: plain creates, pod templates as the author wrote them, conditions without a
    /// status, one more for each change.
    Created,
}

/// How far provisioning came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reached {
    /// The VirtualCluster was seen.
    Nothing,
    /// The root namespace and the Secrets are there, and an apiserver's Service of type ClusterIP.
    Secrets,
    /// etcd is applied and does not become ready.
    Etcd,
    /// The apiserver is.
    ApiServer,
    /// The controller-manager is.
    ControllerManager,
}

/// What became of a tenant under the Go manager. `from` is what its ClusterVersion said before the upgrade.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It runs, and was never upgraded.
    Running,
    /// It was upgraded to what its ClusterVersion says.
    Upgraded {
        /// What it was provisioned from.
        from: Value,
    },
    /// The apiserver's StatefulSet was refused: the Secrets are new already, and nothing else is.
    UpgradeRefused {
        /// What it was provisioned from.
        from: Value,
    },
    /// The new apiserver did not become ready; the controller-manager was not reached.
    UpgradeStuck {
        /// What it was provisioned from.
        from: Value,
    },
    /// So many attempts to provision it are left.
    Pending {
        /// Those left, at most three.
        retries: u32,
        /// Where all of them end.
        reached: Reached,
    },
    /// There are none left.
    Error {
        /// Where all of them ended.
        reached: Reached,
    },
}

/// A tenant to make. There must be no manager at work.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Namespace of the VirtualCluster.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Name of its ClusterVersion, which exists.
    pub cluster_version: String,
    /// More of its spec.
    pub spec: Value,
    /// Who made it.
    pub layout: Layout,
    /// What became of it.
    pub state: State,
    /// Whether the Go manager ran with the feature gate `ClusterVersionPartialUpgrade`: it then wrote down which
    /// resource version it had applied.
    pub gate: bool,
    /// How long ago that was.
    pub age: SignedDuration,
    /// How long a component that is to become ready may take.
    pub patience: Duration,
}

/// What has been made.
#[derive(Clone, Debug)]
pub struct Left {
    /// The root namespace.
    pub root: String,
    /// The VirtualCluster.
    pub object: DynamicObject,
}

impl Tenant {
    /// One that runs, made by the last build without its feature gate.
    pub fn new(namespace: &str, name: &str, cluster_version: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            cluster_version: cluster_version.to_owned(),
            spec: json!({}),
            layout: Layout::Applied,
            state: State::Running,
            gate: false,
            age: SignedDuration::ZERO,
            patience: Duration::from_mins(1),
        }
    }

    /// The same, made by others.
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// The same in another state.
    #[must_use]
    pub fn state(mut self, state: State) -> Self {
        self.state = state;
        self
    }

    /// The same by a manager with the feature gate.
    #[must_use]
    pub fn gate(mut self) -> Self {
        self.gate = true;
        self
    }

    /// The same, made so many days ago.
    #[must_use]
    pub fn days_ago(mut self, days: i64) -> Self {
        self.age = days_long(days);
        self
    }

    /// Makes it. Components that are to be ready are, afterwards.
    pub async fn leave(&self, client: &Client) -> Left {
        let tenants = raw::<VirtualCluster>(client, Some(&self.namespace));
        let mut spec = json!({"clusterVersionName": self.cluster_version});
        merge(&mut spec, &self.spec);
        let mut object = json!({
            "apiVersion": "tenancy.x-k8s.io/v1alpha1",
            "kind": "VirtualCluster",
            "metadata": {"annotations": {}, "name": self.name, "namespace": self.namespace},
            "spec": spec,
        });
        let applied = format!("{object}\n");
        object["metadata"]["annotations"] =
            json!({"kubectl.kubernetes.io/last-applied-configuration": applied});
        let made = create(&tenants, "kubectl-client-side-apply", object).await;
        let uid = made.uid().unwrap_or_default();
        let work = Work {
            client,
            tenant: self,
            root: root_namespace::name(&self.namespace, &self.name, &uid),
            uid,
        };
        work.save(|object| {
            object
                .finalizers_mut()
                .push("virtualcluster.finalizer.native".into());
        })
        .await;
        work.save(|object| object.data["status"] = work.status(&work.tuples()[..1]))
            .await;

        let version = raw::<ClusterVersion>(client, None)
            .get(&self.cluster_version)
            .await
            .expect("the ClusterVersion");
        let present = version.data["spec"].clone();
        match &self.state {
            State::Running | State::Pending { .. } | State::Error { .. } => {
                work.provision(&present).await;
            }
            State::Upgraded { from } | State::UpgradeRefused { from } | State::UpgradeStuck { from } => {
                assert_eq!(self.layout, Layout::Applied, "builds before it knew no upgrades");
                let authority = work.provision(from).await;
                work.upgrade(&present, authority.expect("a root CA")).await;
            }
        }
        let tuples = work.tuples();
        let told = self.layout == Layout::Applied && (self.gate || self.was_upgraded()) && tuples.len() > 1;
        work.save(|object| {
            object.data["status"] = work.status(&tuples);
            if told {
                let applied = version.resource_version().unwrap_or_default();
                object
                    .labels_mut()
                    .insert("tenancy.x-k8s.io/cluster-version-applied".into(), applied);
            }
        })
        .await;
        Left {
            object: tenants.get(&self.name).await.expect("the VirtualCluster"),
            root: work.root,
        }
    }

    /// Upgrades one that runs, whoever made it, to what its ClusterVersion says, as its owner agreed by label.
    pub async fn upgrade(&self, client: &Client) {
        let tenants = raw::<VirtualCluster>(client, Some(&self.namespace));
        let object = tenants.get(&self.name).await.expect("the VirtualCluster");
        let root = object.data["status"]["clusterNamespace"].as_str();
        let upgraded = Self {
            state: State::Upgraded { from: Value::Null },
            ..self.clone()
        };
        let work = Work {
            client,
            tenant: &upgraded,
            root: root.expect("a root namespace").to_owned(),
            uid: object.uid().unwrap_or_default(),
        };
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &work.root);
        let authority = RootCa::load(&secrets.get("root-ca").await.expect("a root CA"));
        let version = raw::<ClusterVersion>(client, None)
            .get(&self.cluster_version)
            .await
            .expect("the ClusterVersion");
        work.upgrade(&version.data["spec"], authority).await;
        let (message, reason) = work.tuples().pop().expect("the end");
        work.save(|object| {
            let status = &mut object.data["status"];
            status["message"] = json!(message);
            status["reason"] = json!(reason);
            let conditions = status["conditions"].as_array_mut().expect("conditions");
            if !conditions.iter().any(|known| known["reason"] == *reason) {
                conditions.push(
                    json!({"lastTransitionTime": now().to_string(), "message": message,
                    "reason": reason, "status": "True"}),
                );
            }
            let labels = object.labels_mut();
            labels.remove("tenancy.x-k8s.io/ready-for-upgrade");
            let applied = version.resource_version().unwrap_or_default();
            labels.insert("tenancy.x-k8s.io/cluster-version-applied".into(), applied);
        })
        .await;
    }

    fn made(&self) -> Timestamp {
        now() - self.age
    }

    fn was_upgraded(&self) -> bool {
        matches!(
            self.state,
            State::Upgraded { .. } | State::UpgradeRefused { .. } | State::UpgradeStuck { .. }
        )
    }

    fn reached(&self) -> Reached {
        match self.state {
            State::Pending { reached, .. } | State::Error { reached } => reached,
            _ => Reached::ControllerManager,
        }
    }

    /// Whether what was reached last is ready.
    fn came_up(&self) -> bool {
        !matches!(self.state, State::Pending { .. } | State::Error { .. })
    }
}

/// The definitions of the Go manager: no status subresource, and of a ClusterVersion nothing is checked.
pub fn definitions() -> [CustomResourceDefinition; 2] {
    let string = json!({"type": "string"});
    let strings = json!({"type": "array", "items": string});
    let condition = json!({
        "type": "object",
        "required": ["status"],
        "properties": {"status": string, "reason": string, "message": string,
            "lastTransitionTime": {"type": "string", "format": "date-time"}},
    });
    let tenant = json!({
        "type": "object",
        "properties": {
            "apiVersion": string,
            "kind": string,
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "required": ["clusterVersionName"],
                "properties": {
                    "clusterVersionName": string, "clusterDomain": string, "serviceCidr": string,
                    "pkiExpireDays": {"type": "integer", "format": "int64"},
                    "transparentMetaPrefixes": strings, "opaqueMetaPrefixes": strings,
                },
            },
            "status": {
                "type": "object",
                "required": ["phase"],
                "properties": {
                    "phase": string, "message": string, "reason": string, "clusterNamespace": string,
                    "conditions": {"type": "array", "items": condition},
                },
            },
        },
    });
    let version = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let column = |name: &str, path: &str, type_: &str| json!({"name": name, "jsonPath": path, "type": type_});
    let mut columns = vec![
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Phase", ".status.phase", "string"),
        column("ClusterVersion", ".spec.clusterVersionName", "string"),
        column("ClusterNamespace", ".status.clusterNamespace", "string"),
    ];
    columns[3]["priority"] = json!(1);
    let definition = |kind: &str, short: &str, scope: &str, schema: &Value, columns: &[Value]| {
        let singular = kind.to_lowercase();
        let mut definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{singular}s.tenancy.x-k8s.io")},
            "spec": {
                "group": "tenancy.x-k8s.io",
                "scope": scope,
                "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": format!("{singular}s"),
                    "singular": singular, "shortNames": [short]},
                "versions": [{"name": "v1alpha1", "served": true, "storage": true,
                    "schema": {"openAPIV3Schema": schema}}],
            },
        });
        if !columns.is_empty() {
            definition["spec"]["versions"][0]["additionalPrinterColumns"] = json!(columns);
        }
        serde_json::from_value(definition).expect("a definition")
    };
    [
        definition("ClusterVersion", "cv", "Cluster", &version, &[]),
        definition("VirtualCluster", "vc", "Namespaced", &tenant, &columns),
    ]
}

/// The work on one tenant.
struct Work<'a> {
    client: &'a Client,
    tenant: &'a Tenant,
    root: String,
    uid: String,
}

/// The three bundles of a ClusterVersion, in the order they are brought up.
const COMPONENTS: [(&str, Reached); 3] = [
    ("etcd", Reached::Etcd),
    ("apiServer", Reached::ApiServer),
    ("controllerManager", Reached::ControllerManager),
];

impl Work<'_> {
    /// What it said of the tenant so far, in order: message and reason.
    fn tuples(&self) -> Vec<(String, String)> {
        let said = |message: &str, reason: &str| (message.to_owned(), reason.to_owned());
        let creating = said("retry: 3", "ClusterCreating");
        let running = said("tenant control plane is running", "TenantControlPlaneRunning");
        let slow = |component: &str| format!("{}/{component} is not ready in 600 seconds", self.root);
        let failed = |left: u32| {
            let name = &self.tenant.name;
            let error = match self.tenant.reached() {
                Reached::Nothing => "desired ClusterVersion nowhere not found".to_owned(),
                Reached::Secrets => format!("secrets \"root-ca\" is forbidden in {}", self.root),
                Reached::Etcd => slow("etcd"),
                Reached::ApiServer => slow("apiserver"),
                Reached::ControllerManager => slow("controller-manager"),
            };
            (
                format!("retry: {left}"),
                format!("fail to create virtualcluster({name}): {error}"),
            )
        };
        let refused = "StatefulSet.apps \"apiserver\" is invalid: spec: Forbidden: updates to statefulset spec for fields other than 'replicas' are forbidden";
        match &self.tenant.state {
            State::Running => vec![creating, running],
            State::Upgraded { .. } => {
                let upgraded = said(
                    "tenant control plane is upgraded",
                    "TenantControlPlaneUpgradeCompleted",
                );
                vec![creating, running, upgraded]
            }
            State::UpgradeRefused { .. } | State::UpgradeStuck { .. } => {
                let why = match self.tenant.state {
                    State::UpgradeRefused { .. } => refused.to_owned(),
                    _ => slow("apiserver"),
                };
                let failed = (
                    format!("fail to upgrade: {why}"),
                    "TenantControlPlaneUpgradeFailed".to_owned(),
                );
                vec![creating, running, failed]
            }
            State::Pending { retries, .. } => {
                let failures = (*retries..ATTEMPTS).rev().map(failed);
                std::iter::once(creating).chain(failures).collect()
            }
            State::Error { .. } => {
                let failures = (0..ATTEMPTS).rev().map(failed);
                let error = said("fail to create virtualcluster", "TenantControlPlaneError");
                std::iter::once(creating)
                    .chain(failures)
                    .chain(std::iter::once(error))
                    .collect()
            }
        }
    }

    /// The status after it said these.
    fn status(&self, tuples: &[(String, String)]) -> Value {
        let mut conditions: Vec<Value> = Vec::new();
        for (message, reason) in tuples {
            let applied = self.tenant.layout == Layout::Applied;
            if applied && conditions.iter().any(|known| known["reason"] == **reason) {
                continue;
            }
            conditions.push(json!({
                "lastTransitionTime": self.tenant.made().to_string(),
                "message": message,
                "reason": reason,
                "status": if applied { "True" } else { "" },
            }));
        }
        let (message, reason) = &tuples[tuples.len() - 1];
        let phase = match self.tenant.state {
            _ if tuples.len() == 1 => "Pending",
            State::Pending { .. } => "Pending",
            State::Error { .. } => "Error",
            _ => "Running",
        };
        json!({"clusterNamespace": self.root, "conditions": conditions, "message": message, "phase": phase,
            "reason": reason})
    }

    fn program(&self) -> &'static str {
        match self.tenant.layout {
            Layout::Applied => PROGRAM,
            Layout::Created => OLD_PROGRAM,
        }
    }

    /// Changes the VirtualCluster as a whole.
    async fn save(&self, change: impl FnOnce(&mut DynamicObject)) {
        let api = raw::<VirtualCluster>(self.client, Some(&self.tenant.namespace));
        let name = &self.tenant.name;
        let mut object = api.get(name).await.expect("the VirtualCluster");
        change(&mut object);
        let params = PostParams {
            field_manager: Some(self.program().into()),
            ..PostParams::default()
        };
        let saved = api.replace(name, &params, &object).await.expect("it is accepted");
        // Where the definition has a status subresource already, that write was one without the status.
        if saved.data.get("status") != object.data.get("status") {
            object.metadata.resource_version = saved.metadata.resource_version;
            api.replace_status(name, &params, &object)
                .await
                .expect("it is accepted");
        }
    }

    /// Provisions it from `content`, as often and as far as its state says. The root CA, if it came to that.
    async fn provision(&self, content: &Value) -> Option<RootCa> {
        let reached = self.tenant.reached();
        if reached == Reached::Nothing {
            return None;
        }
        let namespace = json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": self.root,
                "annotations": {
                    "tenancy.x-k8s.io/vcname": self.tenant.name,
                    "tenancy.x-k8s.io/vcnamespace": self.tenant.namespace,
                    "tenancy.x-k8s.io/vcrootns": "true",
                    "tenancy.x-k8s.io/vcuid": self.uid,
                },
            },
        });
        create(&raw::<Namespace>(self.client, None), self.program(), namespace).await;
        // The attempt after the last that failed is under way.
        let rounds = match self.tenant.state {
            // What is there already was left as it was.
            _ if self.tenant.layout == Layout::Created => 1,
            State::Pending { retries, .. } => (ATTEMPTS - retries + 1).min(ATTEMPTS),
            State::Error { .. } => ATTEMPTS,
            _ => 1,
        };
        let address = self.address(content).await;
        // Each attempt had keys of its own. What remains is one set of them, and pods that were replaced as often.
        let (issued, authority) = self.issue(content, address, None).await;
        for _ in 0..rounds {
            let hashes = hashes(&issued);
            for (bundle, component) in COMPONENTS {
                if component <= reached && content.get(bundle).is_some() {
                    let waits = component < reached || self.tenant.came_up();
                    self.bring_up(content, bundle, &hashes, waits).await;
                }
            }
        }
        Some(authority)
    }

    /// Everything but etcd once more, from `content`; keys and certificates, too, but for the root CA.
    async fn upgrade(&self, content: &Value, authority: RootCa) {
        let address = self.address(content).await;
        let (issued, _) = self.issue(content, address, Some(authority)).await;
        let hashes = hashes(&issued);
        match self.tenant.state {
            State::UpgradeRefused { .. } => {}
            State::UpgradeStuck { .. } => self.bring_up(content, "apiServer", &hashes, false).await,
            _ => {
                self.bring_up(content, "apiServer", &hashes, true).await;
                if content.get("controllerManager").is_some() {
                    self.bring_up(content, "controllerManager", &hashes, true).await;
                }
            }
        }
    }

    /// The apiserver's Service and its address, if it is of a type that has one for certificate and kubeconfigs.
    async fn address(&self, content: &Value) -> Option<IpAddr> {
        let service = &content["apiServer"]["service"];
        if service["spec"]["type"] != "ClusterIP" {
            return None;
        }
        self.write::<Service>(self.placed(service, "v1", "Service")).await;
        let service = raw::<Service>(self.client, Some(&self.root))
            .get(name_of(service))
            .await
            .expect("the Service");
        service.data["spec"]["clusterIP"].as_str()?.parse().ok()
    }

    /// StatefulSet and Service of one component, in this order, and the wait for it.
    async fn bring_up(&self, content: &Value, bundle: &str, hashes: &BTreeMap<&str, String>, waits: bool) {
        let parts = &content[bundle];
        let set = self.stateful_set(parts, bundle, hashes);
        let name = name_of(&set).to_owned();
        self.write::<StatefulSet>(set).await;
        let service = &parts["service"];
        let is_there = bundle == "apiServer" && service["spec"]["type"] == "ClusterIP";
        if service.is_object() && !is_there {
            self.write::<Service>(self.placed(service, "v1", "Service")).await;
        }
        if waits {
            self.ready(&name).await;
        }
    }

    async fn ready(&self, name: &str) {
        let sets: Api<StatefulSet> = Api::namespaced(self.client.clone(), &self.root);
        let deadline = Instant::now() + self.tenant.patience;
        loop {
            let set = sets.get(name).await.expect("the StatefulSet");
            let status = set.status.clone().unwrap_or_default();
            let wanted = set.spec.as_ref().and_then(|spec| spec.replicas);
            if status.observed_generation == set.metadata.generation && status.ready_replicas == wanted {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{}/{name} is not ready after {:?}: {status:?}",
                self.root,
                self.tenant.patience
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// An object of a bundle where it belongs. Types were filled in by the client of builds that created.
    fn placed(&self, object: &Value, api_version: &str, kind: &str) -> Value {
        let mut object = object.clone();
        object["apiVersion"] = api_version.into();
        object["kind"] = kind.into();
        object["metadata"]["namespace"] = self.root.as_str().into();
        object
    }

    fn stateful_set(&self, parts: &Value, bundle: &str, hashes: &BTreeMap<&str, String>) -> Value {
        let mut set = self.placed(&parts["statefulset"], "apps/v1", "StatefulSet");
        let members = members(parts).join(",");
        let template = &mut set["spec"]["template"];
        // Go's types say these when nobody does.
        template["metadata"]["creationTimestamp"] = Value::Null;
        let containers = template["spec"]["containers"].as_array_mut().expect("containers");
        for container in containers.iter_mut() {
            let fields = container.as_object_mut().expect("an object");
            fields.entry("resources").or_insert_with(|| json!({}));
        }
        if bundle == "etcd" {
            let fields = containers[0].as_object_mut().expect("an object");
            let args = fields.entry("args").or_insert_with(|| json!([]));
            let args = args.as_array_mut().expect("arguments");
            args.extend([json!("--initial-cluster"), json!(members)]);
        }
        if self.tenant.layout == Layout::Created {
            return set;
        }
        template["metadata"]["labels"]["tenancy.x-k8s.io/cluster"] = self.root.as_str().into();
        let secrets: &[&str] = match bundle {
            "apiServer" => &["root-ca", "apiserver-ca", "front-proxy-ca", "serviceaccount-rsa"],
            "controllerManager" => &["root-ca", "serviceaccount-rsa", "controller-manager-kubeconfig"],
            _ => &[],
        };
        for secret in secrets {
            template["metadata"]["annotations"][format!("{secret}-hash")] = hashes[secret].as_str().into();
        }
        set
    }

    /// The seven Secrets, all anew but for the root CA if there is one.
    async fn issue(
        &self,
        content: &Value,
        address: Option<IpAddr>,
        authority: Option<RootCa>,
    ) -> (Issued, RootCa) {
        let names = Names {
            root: self.root.clone(),
            tenant: self.tenant.name.clone(),
            domain: self.tenant.spec["clusterDomain"]
                .as_str()
                .unwrap_or("cluster.local")
                .to_owned(),
            service: name_of(&content["apiServer"]["service"]).to_owned(),
            address,
            etcd: etcd_names(&content["etcd"]),
        };
        let made = self.tenant.made();
        let work = move || {
            let authority = authority.unwrap_or_else(|| RootCa::make(made));
            let issued = names.secrets(&authority);
            (issued, authority)
        };
        let (issued, authority) = tokio::task::spawn_blocking(work).await.expect("keys");
        for (name, data) in &issued {
            let kind = if data.contains_key(name) {
                "Opaque"
            } else {
                "kubernetes.io/tls"
            };
            let data: Map<_, _> = data
                .iter()
                .map(|(key, text)| ((*key).to_owned(), STANDARD.encode(text).into()))
                .collect();
            self.write::<Secret>(json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": self.root},
                "type": kind,
                "data": data,
            }))
            .await;
        }
        (issued, authority)
    }

    /// Writes an object of the root namespace the way the builds did.
    async fn write<K: Resource<DynamicType = ()>>(&self, object: Value) {
        let api = raw::<K>(self.client, Some(&self.root));
        match self.tenant.layout {
            Layout::Applied => {
                let params = PatchParams::apply(FIELD_MANAGER).force();
                api.patch(name_of(&object), &params, &Patch::Apply(&object))
                    .await
                    .expect("it is accepted");
            }
            Layout::Created => {
                create(&api, OLD_PROGRAM, object).await;
            }
        }
    }
}

/// The Secrets of a tenant and their data, in the order they were written.
type Issued = Vec<(&'static str, BTreeMap<&'static str, String>)>;

/// What it wrote on pod templates: of a kubeconfig the hash of the text, of all else one of how its memory looked,
/// which was another one each time.
fn hashes(issued: &Issued) -> BTreeMap<&'static str, String> {
    let hash = |(name, data): &(&'static str, BTreeMap<_, String>)| match data.get(name) {
        Some(text) => (*name, hex(&Sha256::digest(text))),
        None => (*name, hex(&rand::random::<[u8; 32]>())),
    };
    issued.iter().map(hash).collect()
}

/// What certificates and kubeconfigs name.
struct Names {
    root: String,
    tenant: String,
    domain: String,
    service: String,
    address: Option<IpAddr>,
    etcd: Vec<String>,
}

impl Names {
    /// Data of the seven Secrets, in the order they were written.
    fn secrets(&self, ca: &RootCa) -> Issued {
        let api_server = [
            "kubernetes".to_owned(),
            "kubernetes.default".into(),
            "kubernetes.default.svc".into(),
            format!("kubernetes.default.svc.{}", self.domain),
            format!("{}.{}", self.service, self.root),
            self.tenant.clone(),
        ];
        let in_namespace = self.etcd.iter().map(|name| format!("{name}.{}", self.root));
        let etcd: Vec<_> = self.etcd.iter().cloned().chain(in_namespace).collect();
        let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let controllers = "system:kube-controller-manager";
        vec![
            ("root-ca", tls(&ca.pair)),
            (
                "apiserver-ca",
                tls(&ca.leaf(&self.root, None, true, &api_server, self.address.as_slice())),
            ),
            (
                "etcd-ca",
                tls(&ca.leaf("kube-etcd", None, true, &etcd, &[localhost])),
            ),
            (
                "front-proxy-ca",
                tls(&ca.leaf("front-proxy-client", None, false, &[], &[])),
            ),
            (
                "controller-manager-kubeconfig",
                BTreeMap::from([(
                    "controller-manager-kubeconfig",
                    self.kubeconfig(ca, controllers, None),
                )]),
            ),
            (
                "admin-kubeconfig",
                BTreeMap::from([(
                    "admin-kubeconfig",
                    self.kubeconfig(ca, "admin", Some("system:masters")),
                )]),
            ),
            (
                "serviceaccount-rsa",
                tls(&service_account::generate().expect("a key")),
            ),
        ]
    }

    fn kubeconfig(&self, ca: &RootCa, user: &str, group: Option<&str>) -> String {
        let client = ca.leaf(user, group, false, &[], &[]);
        let server = match self.address {
            Some(IpAddr::V4(address)) => address.to_string(),
            // Names, too: that is why their controller-managers did not come up on newer versions.
            Some(IpAddr::V6(address)) => format!("[{address}]"),
            None => format!("[{}.{}]", self.service, self.root),
        };
        let (certificate, key) = (
            STANDARD.encode(&client.certificate_pem),
            STANDARD.encode(client.key_pem.as_bytes()),
        );
        let (authority, cluster) = (STANDARD.encode(&ca.pair.certificate_pem), &self.tenant);
        format!(
            "
kind: Config
apiVersion: v1
users:
- name: {user}
  user:
    client-certificate-data: {certificate}
    client-key-data: {key}
clusters:
- name: {cluster}
  cluster:
    certificate-authority-data: {authority}
    server: https://{server}:6443
contexts:
- context:
    cluster: {cluster}
    user: {user}
  name: default
current-context: default
preferences: {{}}
"
        )
    }
}

/// A root CA as Go's libraries made one: with serial number 0, and not valid before it was made.
struct RootCa {
    made: Timestamp,
    authority: Authority,
    pair: CertifiedPair,
}

impl RootCa {
    fn make(made: Timestamp) -> Self {
        let (_, pair) = Authority::create(made).expect("a key");
        let key = KeyPair::from_pem(&pair.key_pem).expect("the key just made");
        let mut params = CertificateParams::default();
        params.not_before = date(made);
        params.not_after = date(made + days_long(3650));
        params.serial_number = Some(SerialNumber::from(0));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(
            DnType::OrganizationName,
            "kubernetes-sig.kubernetes-sigs/multi-tenancy.virtualcluster",
        );
        params.distinguished_name.push(DnType::CommonName, "kubernetes");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
            KeyUsagePurpose::KeyCertSign,
        ];
        let certificate = params.self_signed(&key).expect("a certificate");
        let authority = Authority::load(&certificate.pem(), &pair.key_pem, made).expect("a CA");
        let pair = CertifiedPair {
            certificate_pem: authority.certificate_pem().to_owned(),
            key_pem: pair.key_pem,
        };
        Self {
            made,
            authority,
            pair,
        }
    }

    /// One that exists. Of its key this is the one form that the Go manager reads.
    fn load(secret: &Secret) -> Self {
        let data = secret.data.clone().unwrap_or_default();
        let text = |key: &str| String::from_utf8(data[key].0.clone()).expect("text");
        let (certificate_pem, key_pem) = (text("tls.crt"), text("tls.key"));
        let key = pem::parse(&key_pem).expect("a key");
        assert_eq!(key.tag(), "RSA PRIVATE KEY", "it reads PKCS#1 only");
        let made = now();
        Self {
            made,
            authority: Authority::load(&certificate_pem, &key_pem, made).expect("a CA"),
            pair: CertifiedPair {
                certificate_pem,
                key_pem: key_pem.into(),
            },
        }
    }

    /// A leaf that is valid since the CA is, for a year.
    fn leaf(
        &self,
        name: &str,
        group: Option<&str>,
        serves: bool,
        dns_names: &[String],
        addresses: &[IpAddr],
    ) -> CertifiedPair {
        let request = LeafRequest {
            common_name: name.to_owned(),
            organization: group.map(str::to_owned),
            usages: if serves {
                &[ExtendedUsage::ServerAuth, ExtendedUsage::ClientAuth]
            } else {
                &[ExtendedUsage::ClientAuth]
            },
            dns_names: dns_names.to_vec(),
            ip_addresses: addresses.to_vec(),
        };
        self.authority
            .issue_between(
                &request,
                KeyAlgorithm::Rsa2048,
                self.authority.not_before(),
                self.made + days_long(365),
                self.made,
            )
            .expect("a certificate")
    }
}

fn tls(pair: &CertifiedPair) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("tls.crt", pair.certificate_pem.clone()),
        ("tls.key", pair.key_pem.to_string()),
    ])
}

/// etcd's members, as they find each other.
fn members(parts: &Value) -> Vec<String> {
    let (set, service) = (name_of(&parts["statefulset"]), name_of(&parts["service"]));
    let member = |ordinal| format!("{set}-{ordinal}=https://{set}-{ordinal}.{service}:2380");
    (0..replicas(parts)).map(member).collect()
}

/// Names of etcd's members and of its Service.
fn etcd_names(parts: &Value) -> Vec<String> {
    let (set, service) = (name_of(&parts["statefulset"]), name_of(&parts["service"]));
    let members = (0..replicas(parts)).map(|ordinal| format!("{set}-{ordinal}.{service}"));
    members.chain([service.to_owned()]).collect()
}

fn replicas(parts: &Value) -> u64 {
    parts["statefulset"]["spec"]["replicas"].as_u64().unwrap_or(1)
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Objects of a kind as the server has them.
pub fn raw<K: Resource<DynamicType = ()>>(client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
    let resource = ApiResource::erase::<K>(&());
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

async fn create(api: &Api<DynamicObject>, manager: &str, object: Value) -> DynamicObject {
    let params = PostParams {
        field_manager: Some(manager.to_owned()),
        ..PostParams::default()
    };
    let object: DynamicObject = serde_json::from_value(object).expect("an object");
    api.create(&params, &object).await.expect("it is accepted")
}

fn merge(into: &mut Value, more: &Value) {
    for (key, value) in more.as_object().into_iter().flatten() {
        into[key.as_str()] = value.clone();
    }
}

fn days_long(days: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * days)
}

/// Whole seconds, as certificates and statuses have them.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).expect("a time")
}

fn date(at: Timestamp) -> time::OffsetDateTime {
    time::OffsetDateTime::from_unix_timestamp(at.as_second()).expect("a date")
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
