//! One VirtualCluster: what the super cluster says of it, and what it says itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        authentication::v1::{TokenRequest, TokenRequestSpec},
        core::v1::{ConfigMap, Namespace, Pod, Secret, Service, ServiceAccount},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Config, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use vc_manager::api::{
    VirtualCluster, labels,
    virtual_cluster::{HistoryEntry, UpgradeResult, phase},
};

use super::{PATIENCE, Scene, explain, until};

/// A VirtualCluster of a scenario.
#[derive(Clone)]
pub(crate) struct Tenant {
    /// The scenario.
    pub(crate) scene: Scene,
    /// Its name.
    pub(crate) name: String,
    /// Its root namespace.
    pub(crate) root: String,
    /// The upgrades that had ended when it last agreed to one.
    past: Arc<Mutex<Vec<HistoryEntry>>>,
}

impl Tenant {
    pub(crate) fn new(scene: Scene, name: String, root: String) -> Self {
        Self {
            scene,
            name,
            root,
            past: Arc::default(),
        }
    }

    fn say(&self, text: impl AsRef<str>) {
        self.scene.say(format!("{}: {}", self.name, text.as_ref()));
    }

    // What the super cluster says of it.

    /// The VirtualClusters of its scenario.
    pub(crate) fn siblings(&self) -> Api<VirtualCluster> {
        Api::namespaced(self.scene.client.clone(), &self.scene.namespace())
    }

    /// The VirtualCluster.
    pub(crate) async fn get(&self) -> VirtualCluster {
        self.siblings().get(&self.name).await.expect("the VirtualCluster")
    }

    /// Objects of a kind in its root namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.scene.client.clone(), &self.root)
    }

    /// Waits until the VirtualCluster is as `wanted` says.
    pub(crate) async fn when(
        &self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&VirtualCluster) -> bool,
    ) -> VirtualCluster {
        let deadline = Instant::now() + limit;
        loop {
            let object = self.get().await;
            if wanted(&object) {
                return object;
            }
            assert!(
                Instant::now() < deadline,
                "{} is not {what} after {limit:?}",
                self.name
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Waits until it is Running and all about that is recorded.
    pub(crate) async fn running(&self) -> VirtualCluster {
        let object = self
            .when("Running", PATIENCE, |vc| {
                vc.phase() == phase::RUNNING && vc.labels().contains_key(labels::CLUSTER_VERSION_APPLIED)
            })
            .await;
        self.say("is Running");
        object
    }

    /// Agrees to an upgrade, as `kubectl label` does.
    pub(crate) async fn opt_in(&self) {
        *self.past.lock().expect("nobody panics in it") = self.get().await.status.unwrap_or_default().history;
        let patch =
            json!({"metadata": {"labels": {labels::READY_FOR_UPGRADE: labels::READY_FOR_UPGRADE_YES}}});
        self.siblings()
            .patch(&self.name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("it is accepted");
    }

    /// Waits until what it agreed to is over, one way or the other.
    pub(crate) async fn settled(&self) -> VirtualCluster {
        let past = self.past.lock().expect("nobody panics in it").clone();
        self.when("done with its upgrade", PATIENCE, |vc| {
            let status = vc.status.clone().unwrap_or_default();
            status.upgrade.is_none()
                && status.history != past
                && !vc.labels().contains_key(labels::READY_FOR_UPGRADE)
        })
        .await
    }

    /// Waits for the end of the upgrade, which is to be a success.
    pub(crate) async fn upgraded(&self) -> VirtualCluster {
        let object = self.settled().await;
        let expected = [
            "Running",
            "tenant control plane is upgraded",
            "TenantControlPlaneUpgradeCompleted",
        ];
        assert_eq!(tuple(&object), expected, "{}", self.name);
        self.say("is upgraded");
        object
    }

    /// Waits for the end of the upgrade, which is to be a failure whose text holds all of `words`. That it claims
    /// no success is checked here.
    pub(crate) async fn failed(&self, words: &[&str]) -> VirtualCluster {
        let applied = self
            .get()
            .await
            .labels()
            .get(labels::CLUSTER_VERSION_APPLIED)
            .cloned();
        let object = self.settled().await;
        let [phase, message, reason] = tuple(&object);
        assert_eq!(
            (phase.as_str(), reason.as_str()),
            ("Running", "TenantControlPlaneUpgradeFailed")
        );
        self.say(&message);
        for word in words {
            assert!(
                message.starts_with("fail to upgrade: ") && message.contains(word),
                "{word:?} is not in {message:?}"
            );
        }
        assert_eq!(
            object.labels().get(labels::CLUSTER_VERSION_APPLIED).cloned(),
            applied,
            "what was applied before"
        );
        let status = object.status.clone().unwrap_or_default();
        let newest = status.history.first().expect("an entry");
        assert_eq!(newest.result, UpgradeResult::Failed);
        assert!(
            newest
                .reason
                .as_deref()
                .is_some_and(|reason| words.iter().all(|word| reason.contains(word))),
            "{newest:?}"
        );
        let pins = status.revision.unwrap_or_default();
        assert!(
            pins.target.is_none()
                && pins.current == pins.last_good
                && pins.current.as_deref() != Some(&newest.revision)
        );
        let upgrading = condition(&object, "Upgrading");
        assert_eq!((upgrading.0.as_str(), upgrading.1.as_str()), ("False", "Failed"));
        self.expect_events(&["UpgradeFailed"]).await;
        object
    }

    /// The newest upgrade that ended.
    pub(crate) async fn newest(&self) -> HistoryEntry {
        self.get()
            .await
            .status
            .unwrap_or_default()
            .history
            .first()
            .expect("an upgrade has ended")
            .clone()
    }

    /// Reasons of the Events about it, oldest first.
    pub(crate) async fn events(&self) -> Vec<String> {
        let all = explain::events(&self.scene.client, &self.scene.namespace(), &self.name).await;
        all.into_iter().map(|(_, reason, _)| reason).collect()
    }

    /// Waits for Events of all these reasons: they are written after the fact.
    pub(crate) async fn expect_events(&self, reasons: &[&str]) {
        until("Events", Duration::from_secs(15), async || {
            let seen = self.events().await;
            if reasons
                .iter()
                .all(|reason| seen.iter().any(|seen| seen == reason))
            {
                Ok(())
            } else {
                Err(format!("{reasons:?} are not all in {seen:?}"))
            }
        })
        .await;
    }

    /// Its pods, by name.
    pub(crate) async fn pods(&self) -> BTreeMap<String, Pod> {
        let all = self
            .api::<Pod>()
            .list(&ListParams::default())
            .await
            .expect("Pods");
        all.into_iter().map(|pod| (pod.name_any(), pod)).collect()
    }

    /// Uids of its pods, by name.
    pub(crate) async fn pod_uids(&self) -> BTreeMap<String, String> {
        self.pods()
            .await
            .into_iter()
            .map(|(name, pod)| (name, pod.uid().unwrap_or_default()))
            .collect()
    }

    /// Fails unless exactly these pods are there, all ready, and none was ever restarted.
    pub(crate) async fn expect_pods(&self, names: &[&str]) {
        let pods = self.pods().await;
        let actual: Vec<_> = pods.keys().map(String::as_str).collect();
        assert_eq!(actual, names, "pods of {}", self.name);
        for (name, pod) in &pods {
            let (ready, restarts) = (is_ready(pod), restarts(pod));
            assert!(
                ready && restarts == 0,
                "{name} of {}: ready {ready}, {restarts} restarts",
                self.name
            );
        }
    }

    /// Data of its Secrets, by name.
    pub(crate) async fn secrets(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let all = self
            .api::<Secret>()
            .list(&ListParams::default())
            .await
            .expect("Secrets");
        all.into_iter()
            .map(|secret| (secret.name_any(), data(&secret)))
            .collect()
    }

    /// Everything a manager writes in the root namespace: kind/name → uid and resource version.
    pub(crate) async fn versions(&self) -> BTreeMap<String, String> {
        let mut all = self.versions_of::<Secret>().await;
        all.extend(self.versions_of::<Service>().await);
        all.extend(self.versions_of::<StatefulSet>().await);
        all
    }

    async fn versions_of<K>(&self) -> BTreeMap<String, String>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let all = self
            .api::<K>()
            .list(&ListParams::default())
            .await
            .expect("a list");
        let version = |object: &K| format!("{:?} {:?}", object.uid(), object.resource_version());
        all.iter()
            .map(|object| (format!("{}/{}", K::kind(&()), object.name_any()), version(object)))
            .collect()
    }

    /// Deletes it. What is left to do is the manager's.
    pub(crate) async fn delete(&self) {
        self.siblings()
            .delete(&self.name, &DeleteParams::default())
            .await
            .expect("it may be deleted");
    }

    /// Waits until neither it nor its root namespace is there.
    pub(crate) async fn gone(&self) {
        let namespaces: Api<Namespace> = Api::all(self.scene.client.clone());
        let deadline = Instant::now() + Duration::from_mins(2);
        while self
            .siblings()
            .get_opt(&self.name)
            .await
            .expect("an answer")
            .is_some()
        {
            assert!(Instant::now() < deadline, "{} is not gone", self.name);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let left = namespaces.get_opt(&self.root).await.expect("an answer");
        assert!(
            left.is_none(),
            "{} is gone before its root namespace {}",
            self.name,
            self.root
        );
        self.say("is gone");
    }

    // What it says itself.

    /// How its administrator reaches it from outside: through its Service, by its address.
    pub(crate) async fn admin_config(&self) -> Config {
        let secrets = self.secrets().await;
        self.config_of(&secrets["admin-kubeconfig"]["admin-kubeconfig"])
            .await
    }

    /// The same with an administrator's kubeconfig of some time.
    pub(crate) async fn config_of(&self, kubeconfig: &str) -> Config {
        let file = Kubeconfig::from_yaml(kubeconfig).expect("a kubeconfig");
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .expect("a kubeconfig");
        // Names of the super cluster do not resolve outside of it.
        let address = self.address().await;
        config.cluster_url = format!("https://{address}:6443").parse().expect("a URL");
        config.tls_server_name = Some("kubernetes.default.svc".into());
        config.connect_timeout = Some(Duration::from_secs(3));
        config.read_timeout = Some(Duration::from_secs(10));
        config.default_retry = false;
        config.proxy_url = None;
        config
    }

    /// Address of its apiserver's Service.
    pub(crate) async fn address(&self) -> String {
        let service = self
            .api::<Service>()
            .get("apiserver-svc")
            .await
            .expect("the Service");
        service.spec.and_then(|spec| spec.cluster_ip).expect("an address")
    }

    /// Its administrator.
    pub(crate) async fn admin(&self) -> Client {
        Client::try_from(self.admin_config().await).expect("a client")
    }

    /// Its version as it says it.
    pub(crate) async fn version(&self) -> String {
        self.admin()
            .await
            .apiserver_version()
            .await
            .expect("it answers")
            .git_version
    }

    /// Writes something of a user's, and makes a ServiceAccount token.
    pub(crate) async fn use_it(&self) -> Usage {
        let admin = self.admin().await;
        let config_maps: Api<ConfigMap> = Api::namespaced(admin.clone(), "default");
        let metadata = |name: &str| ObjectMeta {
            name: Some(name.into()),
            ..ObjectMeta::default()
        };
        let data = BTreeMap::from([("of".to_owned(), self.root.clone())]);
        let config_map = ConfigMap {
            metadata: metadata("kept"),
            data: Some(data),
            ..ConfigMap::default()
        };
        let uid = config_maps
            .create(&PostParams::default(), &config_map)
            .await
            .expect("it is accepted")
            .uid();

        let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), "kube-system");
        let account = ServiceAccount {
            metadata: metadata("robot"),
            ..ServiceAccount::default()
        };
        accounts
            .create(&PostParams::default(), &account)
            .await
            .expect("it is accepted");
        let request = TokenRequest {
            spec: TokenRequestSpec {
                expiration_seconds: Some(24 * 3600),
                ..TokenRequestSpec::default()
            },
            ..TokenRequest::default()
        };
        let minted = accounts
            .create_token_request("robot", &PostParams::default(), &request)
            .await
            .expect("a token");
        let usage = Usage {
            config_map_uid: uid.expect("a uid"),
            token: minted.status.expect("a token").token,
            admin_kubeconfig: self.secrets().await["admin-kubeconfig"]["admin-kubeconfig"].clone(),
        };
        self.expect_usable(&usage).await;
        usage
    }

    /// Fails unless data, token and administrator's kubeconfig of before are as good as ever.
    pub(crate) async fn expect_usable(&self, usage: &Usage) {
        let old = Client::try_from(self.config_of(&usage.admin_kubeconfig).await).expect("a client");
        let config_maps: Api<ConfigMap> = Api::namespaced(old, "default");
        let kept = config_maps
            .get("kept")
            .await
            .expect("the data and the administrator's certificate of before");
        assert_eq!(
            kept.uid().as_deref(),
            Some(usage.config_map_uid.as_str()),
            "the data of before"
        );
        assert_eq!(
            kept.data.unwrap_or_default()["of"],
            self.root,
            "the data of before"
        );

        let mut config = self.admin_config().await;
        config.auth_info = AuthInfo {
            token: Some(usage.token.clone().into()),
            ..AuthInfo::default()
        };
        let robot = Client::try_from(config).expect("a client");
        let who = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
        let request = http::Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
            .header("content-type", "application/json")
            .body(who.to_string().into_bytes())
            .expect("a request");
        let answer: serde_json::Value = robot
            .request(request)
            .await
            .expect("the token of before is accepted");
        assert_eq!(
            answer["status"]["userInfo"]["username"],
            "system:serviceaccount:kube-system:robot"
        );
    }

    /// Fails unless its controller-manager does its work: it gives a new namespace its ServiceAccount and root CA.
    pub(crate) async fn expect_controllers(&self, namespace: &str) {
        let admin = self.admin().await;
        let metadata = ObjectMeta {
            name: Some(namespace.into()),
            ..ObjectMeta::default()
        };
        let object = Namespace {
            metadata,
            ..Namespace::default()
        };
        Api::all(admin.clone())
            .create(&PostParams::default(), &object)
            .await
            .expect("it is accepted");
        let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), namespace);
        let config_maps: Api<ConfigMap> = Api::namespaced(admin, namespace);
        let root_ca = self.secrets().await["root-ca"]["tls.crt"].clone();
        until(
            "the work of the controller-manager",
            Duration::from_mins(1),
            async || {
                let account = accounts
                    .get_opt("default")
                    .await
                    .map_err(|error| error.to_string())?;
                let ca = config_maps
                    .get_opt("kube-root-ca.crt")
                    .await
                    .map_err(|error| error.to_string())?;
                let published = ca
                    .and_then(|ca| ca.data)
                    .unwrap_or_default()
                    .remove("ca.crt")
                    .unwrap_or_default();
                if account.is_some() && published.trim() == root_ca.trim() {
                    Ok(())
                } else {
                    Err(format!(
                        "ServiceAccount {}, root CA {published:?}",
                        account.is_some()
                    ))
                }
            },
        )
        .await;
    }
}

/// What a user has of a tenant, and must go on having.
#[derive(Clone, Debug)]
pub(crate) struct Usage {
    config_map_uid: String,
    pub(crate) token: String,
    admin_kubeconfig: String,
}

/// Phase, message and reason.
pub(crate) fn tuple(tenant: &VirtualCluster) -> [String; 3] {
    let status = tenant.status.clone().unwrap_or_default();
    [status.phase, status.message, status.reason]
}

/// Status and reason of a condition.
pub(crate) fn condition(tenant: &VirtualCluster, type_: &str) -> (String, String) {
    let conditions = tenant.status.clone().unwrap_or_default().conditions;
    let found = conditions
        .into_iter()
        .find(|condition| condition.type_.as_deref() == Some(type_));
    found
        .map(|condition| (condition.status, condition.reason.unwrap_or_default()))
        .unwrap_or_default()
}

/// The data of a Secret as text.
pub(crate) fn data(secret: &Secret) -> BTreeMap<String, String> {
    let data = secret.data.iter().flatten();
    data.map(|(key, value)| (key.clone(), String::from_utf8(value.0.clone()).expect("text")))
        .collect()
}

/// Whether a pod is ready.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// How often containers of a pod were started again.
pub(crate) fn restarts(pod: &Pod) -> i32 {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.container_statuses.as_ref());
    statuses
        .into_iter()
        .flatten()
        .map(|container| container.restart_count)
        .sum()
}

/// How many contents each Secret has had, by name, among `states`.
pub(crate) fn contents<'a>(states: impl IntoIterator<Item = &'a Secret>) -> BTreeMap<String, usize> {
    let mut seen: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for secret in states {
        seen.entry(secret.name_any())
            .or_default()
            .insert(format!("{:?}", data(secret)));
    }
    seen.into_iter()
        .map(|(name, contents)| (name, contents.len()))
        .collect()
}
