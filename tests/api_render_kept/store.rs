//! Stores what a golden file says, as the manager of before left it.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::{ControllerRevision, StatefulSet},
        core::v1::{Namespace, Secret, Service},
    },
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt as _,
    api::{
        ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, ValidationDirective,
    },
};
use serde_json::{Value, json};
use vc_manager::{
    api::VirtualCluster,
    pki::{
        self, Authority, CertificateInfo, CertifiedPair, ExtendedUsage, KeyAlgorithm, LeafRequest, Validity,
    },
};

use crate::{
    golden::{Golden, LeafNames, Placeholders},
    hashes,
    support::{Scope, eventually},
};

/// Annotation with the hash of the object itself.
pub(crate) const RENDERED_HASH: &str = "tenancy.x-k8s.io/rendered-hash";

/// The field manager of all versions so far. Under another name the present one would own nothing of what there is.
const FIELD_MANAGER: &str = "virtualcluster/provisioner/native";

/// The manager of before. All its tenants have the same root CA and the same service-account key: both cost time.
pub(crate) struct Earlier<'a> {
    scope: &'a Scope,
    authority: Authority,
    root: CertifiedPair,
    accounts: CertifiedPair,
}

impl<'a> Earlier<'a> {
    pub(crate) async fn new(scope: &'a Scope) -> Self {
        let namespace: Namespace =
            serde_json::from_value(json!({"metadata": {"name": scope.manager_namespace()}})).unwrap();
        Api::all(scope.client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        let (authority, root) = Authority::create(Timestamp::now()).unwrap();
        Self {
            scope,
            authority,
            root,
            accounts: pki::service_account::generate().unwrap(),
        }
    }

    /// Leaves a ClusterVersion of this name and so many tenants of it. Their root namespaces.
    pub(crate) async fn left(&self, golden: &Golden, cluster_version: &str, tenants: usize) -> Vec<String> {
        let mut placeholders = Placeholders::default();
        let resource_version = self
            .cluster_version(golden, cluster_version, &mut placeholders)
            .await;
        placeholders.set("cluster-version-resource-version", resource_version);
        let mut roots = Vec::new();
        for n in 0..tenants {
            let name = format!("{cluster_version}-t{n:02}");
            roots.push(self.tenant(golden, &name, placeholders.clone()).await);
        }
        roots
    }

    async fn cluster_version(&self, golden: &Golden, name: &str, placeholders: &mut Placeholders) -> String {
        let made = self
            .scope
            .create_cluster_version(name, golden.content().clone())
            .await;
        placeholders.set("cluster-version", name);
        placeholders.set("cluster-version-uid", made.uid().unwrap());
        placeholders.set("manager-namespace", self.scope.manager_namespace());
        let left = placeholders.fill(&golden.cluster_version);
        let api = self.scope.cluster_versions();
        let finalizers = Patch::Merge(json!({"metadata": {"finalizers": left["metadata"]["finalizers"]}}));
        api.patch(name, &PatchParams::default(), &finalizers)
            .await
            .unwrap();
        let status = Patch::Merge(json!({"status": left["status"]}));
        let stored = api
            .patch_status(name, &PatchParams::default(), &status)
            .await
            .unwrap();
        assert_eq!(
            left["status"]["observedGeneration"],
            json!(stored.metadata.generation)
        );

        let revision: ControllerRevision =
            serde_json::from_value(placeholders.fill(&golden.revision)).unwrap();
        let digits = &hashes::of_json(golden.content())[..10];
        assert_eq!(
            revision.name_any(),
            format!("{name}-{digits}"),
            "the name of a revision"
        );
        let api = self
            .scope
            .api::<ControllerRevision>(&self.scope.manager_namespace());
        api.create(&PostParams::default(), &revision).await.unwrap();
        stored.resource_version().unwrap()
    }

    async fn tenant(&self, golden: &Golden, name: &str, mut placeholders: Placeholders) -> String {
        placeholders.set("name", name);
        placeholders.set("namespace", &self.scope.namespace);
        let mut tenant = golden.tenant.clone();
        let status = tenant.as_object_mut().unwrap().remove("status").unwrap();
        let tenant: VirtualCluster = serde_json::from_value(placeholders.fill(&tenant)).unwrap();
        let made = self
            .scope
            .tenants()
            .create(&PostParams::default(), &tenant)
            .await
            .unwrap();
        let uid = made.uid().unwrap();
        let root = hashes::root_namespace(&self.scope.namespace, name, &uid);
        placeholders.set("uid", &uid);
        placeholders.set("root-namespace", &root);

        let namespace: Namespace = serde_json::from_value(placeholders.fill(&golden.namespace)).unwrap();
        let namespaces = Api::all(self.scope.client.clone());
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        // Certificates are for the address of a Service, and StatefulSets carry hashes of certificates.
        let (services, sets): (Vec<_>, Vec<_>) = golden
            .objects
            .iter()
            .partition(|object| object["kind"] == "Service");
        for object in services {
            self.apply(&root, &placeholders.fill(object)).await;
        }
        let service: Service = self.scope.get(&root, "apiserver-svc").await;
        placeholders.set("address", service.spec.unwrap().cluster_ip.unwrap());
        self.secrets(golden, &root, &mut placeholders).await;
        for object in sets {
            self.apply(&root, &placeholders.fill(object)).await;
        }
        self.rolled_out(&root).await;

        let patch = json!({"status": placeholders.fill(&status)});
        let stored = self.scope.tenants();
        let stored = stored
            .patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        let stored = serde_json::to_value(stored.unwrap()).unwrap();
        assert_eq!(stored["status"], patch["status"], "all of the status is stored");
        root
    }

    /// Issues what is to be in the Secrets, and stores it.
    async fn secrets(&self, golden: &Golden, root: &str, placeholders: &mut Placeholders) {
        let mut ends = Vec::new();
        let mut renewals = Vec::new();
        let uid = placeholders.fill_text("${uid}");
        for (name, secret) in &golden.secrets {
            let pair = match golden.leaves.get(name) {
                Some(leaf) => {
                    let pair = self.issue(leaf, placeholders);
                    let certificate = CertificateInfo::parse(&pair.certificate_pem).unwrap();
                    let (begin, end) = (certificate.not_before, certificate.not_after);
                    ends.push(end);
                    // When exactly that is may change from version to version.
                    renewals.push(pki::renew_at_spread(begin, end, &uid));
                    pair
                }
                None if name == "root-ca" => self.root.clone(),
                None => self.accounts.clone(),
            };
            placeholders.set("certificate", &pair.certificate_pem);
            placeholders.set("key", pair.key_pem.as_str());
            placeholders.set("ca-data", STANDARD.encode(&self.root.certificate_pem));
            placeholders.set("client-certificate-data", STANDARD.encode(&pair.certificate_pem));
            placeholders.set("client-key-data", STANDARD.encode(pair.key_pem.as_str()));
            let filled = placeholders.fill(secret);
            let data: BTreeMap<String, String> = serde_json::from_value(filled["data"].clone()).unwrap();
            placeholders.set(&format!("hash:{name}"), hashes::of_secret(&data));
            let mut value = filled;
            let bytes = data
                .into_iter()
                .map(|(key, text)| (key, ByteString(text.into_bytes())));
            value["data"] = serde_json::to_value(bytes.collect::<BTreeMap<_, _>>()).unwrap();
            let api = self.scope.api::<Secret>(root);
            if golden.leaves.contains_key(name) {
                api.patch(name, &as_manager(), &Patch::Apply(&value))
                    .await
                    .unwrap();
            } else {
                let secret = serde_json::from_value(value).unwrap();
                let params = PostParams {
                    field_manager: Some(FIELD_MANAGER.into()),
                    ..PostParams::default()
                };
                api.create(&params, &secret).await.unwrap();
            }
        }
        placeholders.set("not-after", ends.into_iter().min().unwrap().to_string());
        placeholders.set("renew-at", renewals.into_iter().min().unwrap().to_string());
        placeholders.set("root-ca-not-after", self.authority.not_after().to_string());
    }

    fn issue(&self, leaf: &LeafNames, placeholders: &Placeholders) -> CertifiedPair {
        let usages: &'static [ExtendedUsage] = match (leaf.server, leaf.client) {
            (true, true) => &[ExtendedUsage::ServerAuth, ExtendedUsage::ClientAuth],
            (true, false) => &[ExtendedUsage::ServerAuth],
            (false, true) => &[ExtendedUsage::ClientAuth],
            (false, false) => &[],
        };
        let text = |text: &String| placeholders.fill_text(text);
        let request = LeafRequest {
            common_name: text(&leaf.common_name),
            organization: leaf.organizations.first().map(text),
            usages,
            dns_names: leaf.dns_names.iter().map(text).collect(),
            ip_addresses: placeholders.addresses(&leaf.ip_addresses),
        };
        let validity = Validity::from_expire_days(Some(leaf.days)).unwrap();
        self.authority
            .issue(&request, KeyAlgorithm::EcdsaP256, validity, Timestamp::now())
            .unwrap()
    }

    /// Applies an object with the hash of what it says.
    async fn apply(&self, root: &str, object: &Value) {
        let hash = hashes::of_json(object);
        let mut object = object.clone();
        object["metadata"]["annotations"][RENDERED_HASH] = hash.into();
        let gvk = match object["kind"].as_str() {
            Some("Service") => GroupVersionKind::gvk("", "v1", "Service"),
            Some("StatefulSet") => GroupVersionKind::gvk("apps", "v1", "StatefulSet"),
            other => panic!("{other:?} is not known"),
        };
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.scope.client.clone(), root, &ApiResource::from_gvk(&gvk));
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        api.patch(&name, &as_manager(), &Patch::Apply(&object))
            .await
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    async fn rolled_out(&self, root: &str) {
        let api = self.scope.api::<StatefulSet>(root);
        eventually("the pods", async || {
            let sets = api.list(&kube::api::ListParams::default()).await.unwrap();
            let is_ready = |set: &StatefulSet| {
                let wanted = set.spec.as_ref()?.replicas.unwrap_or(1);
                let status = set.status.as_ref()?;
                let seen = status.observed_generation == set.metadata.generation;
                let new = status.current_revision == status.update_revision;
                (seen && new && status.ready_replicas == Some(wanted)).then_some(())
            };
            sets.iter().all(|set| is_ready(set).is_some()).then_some(())
        })
        .await;
    }
}

/// How the manager of before applied things.
fn as_manager() -> PatchParams {
    PatchParams {
        dry_run: false,
        force: true,
        field_manager: Some(FIELD_MANAGER.into()),
        field_validation: Some(ValidationDirective::Strict),
    }
}
