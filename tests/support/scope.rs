//! What belongs to one test: a namespace for its VirtualClusters, a label for its ClusterVersions, and what is
//! often asked of them.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::{ControllerRevision, StatefulSet},
    core::v1::{Namespace, Secret, Service},
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    runtime::wait::await_condition,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vc_manager::api::{
    ClusterVersion, VirtualCluster, VirtualClusterSpec, labels,
    virtual_cluster::{Condition, phase},
};

use super::{ApiServer, Driver, Manager, Options, PATIENCE};

/// Label on the ClusterVersions of a test; the value is the test's namespace.
const LABEL: &str = "vc-manager-test/scope";

/// Phase, message, reason.
pub type Tuple = (String, String, String);

/// A test's part of the server.
pub struct Scope {
    /// The server.
    pub server: &'static ApiServer,
    /// Its administrator.
    pub client: Client,
    /// Namespace of the test's VirtualClusters; all its other names begin with it.
    pub namespace: String,
}

impl Scope {
    /// One on the shared server. `name` is short and the test's own.
    pub async fn new(name: &str) -> Self {
        let server = tokio::task::spawn_blocking(ApiServer::shared)
            .await
            .expect("the API server starts");
        let client = server.client().await;
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        Api::all(client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .expect("a name no other test uses");
        Self {
            server,
            client,
            namespace: name.to_owned(),
        }
    }

    /// One with a driver, a manager and a ClusterVersion named as the scope.
    pub async fn with_manager(name: &str, options: Options, content: Value) -> (Self, Driver, Manager) {
        let scope = Self::new(name).await;
        let driver = Driver::start(&scope);
        let manager = Manager::start(&scope, options);
        scope.create_cluster_version(&scope.namespace, content).await;
        (scope, driver, manager)
    }

    /// Namespace of the managers.
    pub fn manager_namespace(&self) -> String {
        format!("{}-system", self.namespace)
    }

    /// Selects the test's ClusterVersions.
    pub fn selector(&self) -> String {
        format!("{LABEL}={}", self.namespace)
    }

    /// The test's VirtualClusters.
    pub fn tenants(&self) -> Api<VirtualCluster> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// All ClusterVersions.
    pub fn cluster_versions(&self) -> Api<ClusterVersion> {
        Api::all(self.client.clone())
    }

    /// Makes a ClusterVersion.
    pub async fn create_cluster_version(&self, name: &str, content: Value) -> ClusterVersion {
        let mut object = ClusterVersion::new(name, serde_json::from_value(content).expect("an object"));
        object.labels_mut().insert(LABEL.into(), self.namespace.clone());
        self.cluster_versions()
            .create(&PostParams::default(), &object)
            .await
            .expect("a ClusterVersion")
    }

    /// Changes the spec of the ClusterVersion named as the scope, as `kubectl edit` would.
    pub async fn edit(&self, change: impl Fn(&mut Value)) -> ClusterVersion {
        self.edit_named(&self.namespace, change).await
    }

    /// Changes the spec of a ClusterVersion.
    pub async fn edit_named(&self, name: &str, change: impl Fn(&mut Value)) -> ClusterVersion {
        super::eventually("an edit without conflict", async || {
            let mut object = self
                .cluster_versions()
                .get(name)
                .await
                .expect("the ClusterVersion");
            let mut content = Value::Object(std::mem::take(&mut object.spec.raw));
            change(&mut content);
            object.spec = serde_json::from_value(content).expect("an object");
            match self
                .cluster_versions()
                .replace(name, &PostParams::default(), &object)
                .await
            {
                Ok(edited) => Some(edited),
                Err(kube::Error::Api(status)) if status.code == 409 => None,
                Err(error) => panic!("the edit is refused: {error}"),
            }
        })
        .await
    }

    /// Makes a VirtualCluster of the ClusterVersion named as the scope.
    pub async fn create_tenant(&self, name: &str) -> VirtualCluster {
        let spec = VirtualClusterSpec {
            cluster_version_name: self.namespace.clone(),
            ..VirtualClusterSpec::default()
        };
        let tenant = VirtualCluster::new(name, spec);
        self.tenants()
            .create(&PostParams::default(), &tenant)
            .await
            .expect("a VirtualCluster")
    }

    /// Makes a VirtualCluster and waits until it is Running.
    pub async fn provision(&self, name: &str) -> VirtualCluster {
        self.create_tenant(name).await;
        self.settled(name).await
    }

    /// A VirtualCluster as it is.
    pub async fn tenant(&self, name: &str) -> VirtualCluster {
        self.tenants().get(name).await.expect("the VirtualCluster")
    }

    /// Waits until the VirtualCluster is as `wanted`.
    pub async fn when(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&VirtualCluster) -> bool,
    ) -> VirtualCluster {
        let condition = |tenant: Option<&VirtualCluster>| tenant.is_some_and(&wanted);
        let waiting = await_condition(self.tenants(), name, condition);
        if let Ok(tenant) = tokio::time::timeout(PATIENCE, waiting).await {
            let tenant = tenant.expect("the watch works");
            return tenant.expect("the condition holds only for one that is there");
        }
        let tenant = self.tenants().get_opt(name).await.expect("an answer");
        let labels_and_status = tenant.map(|tenant| (tenant.metadata.labels, tenant.status));
        panic!("{name} is not {what} after {PATIENCE:?}, but {labels_and_status:#?}")
    }

    /// Waits until the VirtualCluster is Running, without an upgrade or a consent to one, and says what was applied.
    pub async fn settled(&self, name: &str) -> VirtualCluster {
        self.when(name, "settled", |tenant| {
            tenant.phase() == phase::RUNNING
                && !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
                && tenant.labels().contains_key(labels::CLUSTER_VERSION_APPLIED)
                && tenant
                    .status
                    .as_ref()
                    .is_some_and(|status| status.upgrade.is_none())
        })
        .await
    }

    /// Waits for this reason in the status, and for the consent to be used up.
    pub async fn ended_with(&self, name: &str, reason: &str) -> VirtualCluster {
        self.when(name, reason, |tenant| {
            tuple(tenant).2 == reason && !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
        })
        .await
    }

    /// Agrees to an upgrade, as `kubectl label` would.
    pub async fn opt_in(&self, name: &str) {
        self.label(name, labels::READY_FOR_UPGRADE, json!("true")).await;
    }

    /// Sets a label of a VirtualCluster.
    pub async fn label(&self, name: &str, key: &str, value: Value) {
        self.merge(name, &json!({"metadata": {"labels": {key: value}}}))
            .await;
    }

    /// Merges into a VirtualCluster.
    pub async fn merge(&self, name: &str, patch: &Value) {
        self.tenants()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("it is accepted");
    }

    /// Agrees to an upgrade and waits until it has succeeded.
    pub async fn upgrade(&self, name: &str) -> VirtualCluster {
        self.opt_in(name).await;
        let tenant = self
            .when(name, "upgraded", |tenant| {
                !tenant.labels().contains_key(labels::READY_FOR_UPGRADE)
                    && tenant
                        .status
                        .as_ref()
                        .is_some_and(|status| status.upgrade.is_none())
            })
            .await;
        assert_eq!(
            tuple(&tenant).2,
            "TenantControlPlaneUpgradeCompleted",
            "{:?}",
            tuple(&tenant)
        );
        tenant
    }

    /// Objects of a kind in `namespace`.
    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// One object.
    pub async fn get<K>(&self, namespace: &str, name: &str) -> K
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let got = self.api::<K>(namespace).get(name).await;
        got.unwrap_or_else(|error| panic!("{} {namespace}/{name}: {error}", K::kind(&())))
    }

    /// Everything a manager writes in `namespace`, as kind/name → resourceVersion.
    pub async fn versions(&self, namespace: &str) -> BTreeMap<String, String> {
        let mut versions = self.versions_of::<Secret>(namespace).await;
        versions.extend(self.versions_of::<Service>(namespace).await);
        versions.extend(self.versions_of::<StatefulSet>(namespace).await);
        versions
    }

    async fn versions_of<K>(&self, namespace: &str) -> BTreeMap<String, String>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let all = self
            .api::<K>(namespace)
            .list(&ListParams::default())
            .await
            .expect("a list");
        all.into_iter()
            .map(|object| {
                (
                    format!("{}/{}", K::kind(&()), object.name_any()),
                    object.resource_version().unwrap_or_default(),
                )
            })
            .collect()
    }

    /// The seven Secrets' data by name.
    pub async fn secrets(&self, namespace: &str) -> BTreeMap<String, BTreeMap<String, String>> {
        let all = self
            .api::<Secret>(namespace)
            .list(&ListParams::default())
            .await
            .expect("a list");
        all.into_iter()
            .map(|secret| (secret.name_any(), data(&secret)))
            .collect()
    }

    /// Revisions of the test's ClusterVersions.
    pub async fn revisions(&self) -> Vec<ControllerRevision> {
        let api = self.api::<ControllerRevision>(&self.manager_namespace());
        api.list(&ListParams::default()).await.expect("a list").items
    }

    /// Deletes a VirtualCluster and waits until it is gone.
    pub async fn delete(&self, name: &str) {
        self.tenants()
            .delete(name, &DeleteParams::default())
            .await
            .expect("it may be deleted");
        super::eventually("the VirtualCluster to be gone", async || {
            self.tenants()
                .get_opt(name)
                .await
                .expect("an answer")
                .is_none()
                .then_some(())
        })
        .await;
    }
}

/// Phase, message and reason.
pub fn tuple(tenant: &VirtualCluster) -> Tuple {
    tenant
        .status
        .as_ref()
        .map(|status| {
            (
                status.phase.clone(),
                status.message.clone(),
                status.reason.clone(),
            )
        })
        .unwrap_or_default()
}

/// The tuples `name` went through, each once in a row, without the empty one before the first status.
pub fn tuples(states: &[VirtualCluster], name: &str) -> Vec<Tuple> {
    let of_it = states.iter().filter(|tenant| tenant.name_any() == name);
    let mut all: Vec<_> = of_it.map(tuple).filter(|tuple| !tuple.0.is_empty()).collect();
    all.dedup();
    all
}

/// A condition by type.
pub fn condition<'a>(tenant: &'a VirtualCluster, type_: &str) -> &'a Condition {
    let conditions = &tenant.status.as_ref().expect("a status").conditions;
    let found = conditions
        .iter()
        .find(|condition| condition.type_.as_deref() == Some(type_));
    found.unwrap_or_else(|| panic!("no condition {type_} in {conditions:?}"))
}

/// The data of a Secret as text.
pub fn data(secret: &Secret) -> BTreeMap<String, String> {
    let data = secret.data.iter().flatten();
    data.map(|(key, value)| (key.clone(), String::from_utf8(value.0.clone()).expect("text")))
        .collect()
}

/// The root namespace of a VirtualCluster that has one.
pub fn root_of(tenant: &VirtualCluster) -> String {
    tenant
        .status
        .as_ref()
        .and_then(|status| status.cluster_namespace.clone())
        .expect("a root namespace")
}
