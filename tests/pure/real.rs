//! A tenant with real keys and certificates, in a super cluster in memory: does what a plan says, as the API server, the
//! StatefulSet controller, the kubelet and the processes would.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
    time::Duration,
};

use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::StatefulSet,
        core::v1::{Namespace, Pod, Secret, Service},
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::api::ObjectMeta;
use serde_json::{Map, Value, json};
use vc_manager::{
    api::{
        Component, FIELD_MANAGER, cluster_version::canonical_hash, template::Template,
        virtual_cluster::CertificatesStatus,
    },
    controller::{
        credentials::{self, Credentials, Fault, Judge, judge, server_of},
        plan::{self, Answer, Care, Effect, Goal, Known, ObjectId, Observed, Plan, Refused, Wait},
        reload,
        render::{self, Kind, Rendered, Tenant, TenantSecret},
        rollout,
    },
    pki::{self, Authority, CertificateInfo, CertifiedPair, KeyAlgorithm, kubeconfig},
};

use crate::fixture::{content, now, tenant};

/// A root CA made when the tests' time begins. RSA keys are slow to make: it is made once.
pub(crate) static ROOT: LazyLock<CertifiedPair> =
    LazyLock::new(|| Authority::create(now()).expect("a root CA").1);
/// A service-account key.
pub(crate) static ACCOUNTS: LazyLock<CertifiedPair> =
    LazyLock::new(|| pki::service_account::generate().expect("a key"));
/// Another one.
pub(crate) static OTHER_ACCOUNTS: LazyLock<CertifiedPair> =
    LazyLock::new(|| pki::service_account::generate().expect("a key"));

/// Passes of one look; as many as the manager has.
const PASSES: usize = 16;
/// Looks until a tenant has come to rest.
const LOOKS: usize = 12;
/// How long the kubelet takes to write a Secret's files.
const FILES: SignedDuration = SignedDuration::from_mins(2);

/// The secrets that hold leaves, in order.
pub(crate) const LEAVES: [TenantSecret; 5] = [
    TenantSecret::ApiServer,
    TenantSecret::Etcd,
    TenantSecret::FrontProxy,
    TenantSecret::ControllerManagerKubeconfig,
    TenantSecret::AdminKubeconfig,
];

/// The data of a Secret.
pub(crate) type Data = BTreeMap<String, ByteString>;

pub(crate) fn days(count: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * count)
}

/// A root CA on P-256 with this life: quickly made, and another one each time.
pub(crate) fn root(not_before: Timestamp, not_after: Timestamp) -> CertifiedPair {
    Authority::create_for_leaves("kubernetes", not_before, not_after, not_before)
        .expect("a root CA")
        .1
}

/// How a look at a tenant ends.
#[derive(Debug, PartialEq)]
pub(crate) enum Rest {
    Done,
    Wait(Wait),
    Blocked(String),
    /// What is wrong with root CA or service-account key.
    Fault(Fault),
}

/// A process with the certificates that it uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    /// Hash of the pod template it was made from.
    template: String,
    /// What it uses, by Secret.
    pub(crate) uses: BTreeMap<TenantSecret, Vec<u8>>,
    /// How often it was replaced.
    pub(crate) restarts: u32,
}

/// A tenant, its super cluster, and a manager.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "they are as independent as they look"
)]
pub(crate) struct Plane {
    pub(crate) tenant: Tenant,
    pub(crate) template: Template,
    pub(crate) now: Timestamp,
    pub(crate) observed: Observed,
    /// `status.certificates`.
    pub(crate) recorded: Option<CertificatesStatus>,
    pub(crate) adopted: bool,
    pub(crate) paused: bool,
    /// Whether the manager can reach its tenants.
    pub(crate) probe: bool,
    pub(crate) accept_empty_etcd: bool,
    pub(crate) max_life: Option<Duration>,
    pub(crate) known: BTreeMap<ObjectId, Known>,
    pub(crate) refused: Refused,
    /// Whether the last upgrade failed.
    pub(crate) after_failure: bool,
    /// Pods besides those of the processes.
    pub(crate) others: Vec<Pod>,
    /// Claims with etcd's data.
    pub(crate) claims: BTreeSet<String>,
    /// Every effect so far.
    pub(crate) log: Vec<Effect>,
    /// How often each Secret was issued.
    pub(crate) issued: BTreeMap<TenantSecret, u32>,
    pub(crate) processes: BTreeMap<Component, Process>,
    /// Whether processes take up new files, as `reload` says they do.
    pub(crate) files_follow: bool,
    /// Root CA and service-account key it is made with.
    once: [CertifiedPair; 2],
    /// When each Secret was last written.
    written: BTreeMap<TenantSecret, Timestamp>,
    /// Certificates as they were read from these data: to read them takes long.
    read: BTreeMap<TenantSecret, (Data, Option<Vec<u8>>)>,
    version: u64,
    addresses: u8,
}

impl Plane {
    /// One that does not exist yet.
    pub(crate) fn new(template: Template, root: &CertifiedPair) -> Self {
        Self {
            tenant: tenant(),
            template,
            now: now(),
            observed: Observed::default(),
            recorded: None,
            adopted: false,
            paused: false,
            probe: true,
            accept_empty_etcd: false,
            max_life: None,
            known: BTreeMap::new(),
            refused: Refused::default(),
            after_failure: false,
            others: Vec::new(),
            claims: BTreeSet::new(),
            log: Vec::new(),
            issued: BTreeMap::new(),
            processes: BTreeMap::new(),
            files_follow: true,
            once: [root.clone(), ACCOUNTS.clone()],
            written: BTreeMap::new(),
            read: BTreeMap::new(),
            version: 0,
            addresses: 0,
        }
    }

    /// One of the fixture, provisioned; etcd has claims for its data.
    pub(crate) fn running() -> Self {
        static RUNNING: LazyLock<Plane> = LazyLock::new(|| {
            let mut plane = Plane::new(with_claims(), &ROOT);
            plane.provision();
            plane
        });
        RUNNING.clone()
    }

    /// The same, not looked at yet: nothing is recorded of its root CA and service-account key.
    pub(crate) fn unrecorded() -> Self {
        Self {
            recorded: None,
            ..Self::running()
        }
    }

    /// One as the Go manager leaves it: its leaves are dated back to the root CA's start, nothing carries an annotation
    /// of this manager's, and hashes are of another form.
    pub(crate) fn left_by_go(issued: Timestamp, root: &CertifiedPair) -> Self {
        let mut plane = Self::new(with_claims(), root);
        plane.now = issued;
        plane.provision();
        let begin = CertificateInfo::parse(&root.certificate_pem)
            .expect("a certificate")
            .not_before;
        for which in LEAVES {
            plane.issue_between(which, begin, issued + days(365), None);
        }
        for set in plane.observed.stateful_sets.values_mut() {
            set.metadata.annotations = None;
            let spec = set.spec.as_mut().expect("a spec");
            let annotations = spec
                .template
                .metadata
                .as_mut()
                .and_then(|metadata| metadata.annotations.as_mut());
            for (key, value) in annotations.into_iter().flatten() {
                if key.ends_with("-hash") {
                    *value = canonical_hash(&json!(value));
                }
            }
        }
        for service in plane.observed.services.values_mut() {
            service.metadata.annotations = None;
        }
        plane.processes.clear();
        plane.roll_out_all();
        plane.recorded = None;
        plane.adopted = true;
        plane.log.clear();
        plane.issued.clear();
        plane
    }

    pub(crate) fn goal(&self) -> Goal<'_> {
        Goal {
            tenant: &self.tenant,
            template: &self.template,
            revision: "r1",
            super_cluster_labelling: false,
        }
    }

    pub(crate) fn judge(&self) -> Result<Credentials, Fault> {
        let by = Judge {
            recorded: self.recorded.as_ref(),
            adopted: self.adopted,
            max_life: self.max_life,
            now: self.now,
        };
        judge(&self.goal(), &self.observed, &by)
    }

    /// The credentials, which are in order.
    pub(crate) fn credentials(&self) -> Credentials {
        self.judge().unwrap_or_else(|fault| panic!("{fault:?}"))
    }

    /// What upkeep does next.
    pub(crate) fn plan(&self) -> Plan {
        let credentials = self.credentials();
        let plan = self.plan_with(&credentials);
        assert_eq!(
            plan,
            self.plan_with(&credentials),
            "the same observation, the same plan"
        );
        plan
    }

    fn plan_with(&self, credentials: &Credentials) -> Plan {
        let care = Care {
            credentials,
            repair: !self.paused && !self.adopted,
            after_failure: self.after_failure,
            known: &self.known,
            refused: &self.refused,
            accept_empty_etcd: self.accept_empty_etcd,
        };
        plan::upkeep(&self.goal(), &self.observed, &care, self.now)
    }

    /// As [`Self::plan`], where that is to do this.
    pub(crate) fn effects(&self) -> Vec<Effect> {
        match self.plan() {
            Plan::Do(effects) => effects,
            other => panic!("nothing is to be done, but {other:?}"),
        }
    }

    /// Everything that is there is brought up, from nothing.
    pub(crate) fn provision(&mut self) {
        for _ in 0..60 {
            match plan::provision(&self.goal(), &self.observed, None, true, self.now) {
                Plan::Do(effects) => effects.iter().for_each(|effect| self.apply(effect)),
                Plan::Wait(wait) => self.roll_out(wait.component.expect("a component")),
                Plan::Blocked(why) => panic!("blocked: {why}"),
                Plan::Done => {
                    self.recorded = Some(self.credentials().status);
                    self.log.clear();
                    self.issued.clear();
                    return;
                }
            }
        }
        panic!("it is not brought up: {:?}", self.log);
    }

    /// One look as the manager takes it: passes until there is nothing to do, then the status.
    pub(crate) fn look(&mut self) -> Rest {
        for _ in 0..PASSES {
            let credentials = match self.judge() {
                Ok(credentials) => credentials,
                Err(fault) => return Rest::Fault(fault),
            };
            match self.plan_with(&credentials) {
                Plan::Do(effects) => {
                    assert!(!effects.is_empty(), "a plan to do nothing would be made for ever");
                    for effect in &effects {
                        self.apply(effect);
                    }
                }
                rest => {
                    self.recorded = Some(credentials.status);
                    return match rest {
                        Plan::Wait(wait) => Rest::Wait(wait),
                        Plan::Blocked(why) => Rest::Blocked(why),
                        _ => Rest::Done,
                    };
                }
            }
        }
        panic!("it does not come to rest within {PASSES} passes: {:?}", self.log);
    }

    /// Looks again and again while pods come up, until there is nothing to wait for.
    pub(crate) fn settle(&mut self) -> Rest {
        let mut last = None;
        for _ in 0..LOOKS {
            match self.look() {
                Rest::Wait(wait) => {
                    last = Some(wait);
                    self.later(SignedDuration::from_mins(3));
                    self.roll_out_all();
                }
                rest => return rest,
            }
        }
        Rest::Wait(last.expect("it waits"))
    }

    /// Looks until everything is as it should be, and stays so.
    pub(crate) fn settle_well(&mut self) {
        let rest = self.settle();
        assert_eq!(rest, Rest::Done, "{:?}", self.log);
        let done = self.log.len();
        assert_eq!(self.look(), Rest::Done);
        assert_eq!(self.log.len(), done, "at rest, yet: {:?}", &self.log[done..]);
    }

    /// Time passes.
    pub(crate) fn later(&mut self, time: SignedDuration) {
        self.at(self.now + time);
    }

    /// It is then.
    pub(crate) fn at(&mut self, now: Timestamp) {
        self.now = now;
        self.refresh();
    }

    /// Does one effect.
    pub(crate) fn apply(&mut self, effect: &Effect) {
        self.log.push(effect.clone());
        match effect {
            Effect::CreateNamespace(value) => {
                let namespace: Namespace = serde_json::from_value(value.clone()).expect("a Namespace");
                assert!(self.observed.namespace.replace(namespace).is_none(), "made twice");
            }
            Effect::Issue { secrets, attempt } => {
                for which in secrets {
                    self.issue(*which, attempt.as_deref());
                }
            }
            Effect::Apply(object) | Effect::PutBack { object, .. } => self.apply_object(object),
            Effect::Restart(restart) => self.restart(restart),
            Effect::DeletePod(pod) => self
                .others
                .retain(|known| known.metadata.uid.as_ref() != Some(&pod.uid)),
            Effect::MakeRoom(pod) => self.observed.deaf.retain(|known| known != pod),
        }
        self.refresh();
    }

    /// The StatefulSet of `component` rolls out, if it exists: its processes are replaced if its template is another.
    pub(crate) fn roll_out(&mut self, component: Component) {
        if let Some(set) = self.observed.stateful_sets.get_mut(component.name()) {
            let spec = set.spec.as_ref().expect("a spec");
            let replicas = spec.replicas.unwrap_or(1);
            let template = canonical_hash(&serde_json::to_value(&spec.template).expect("JSON"));
            let revision = format!("{component}-{}", &template[..10]);
            set.status = serde_json::from_value(json!({
                "observedGeneration": set.metadata.generation, "replicas": replicas, "readyReplicas": replicas,
                "updatedReplicas": replicas, "currentRevision": revision, "updateRevision": revision,
            }))
            .expect("a status");
            let restarts = match self.processes.get(&component) {
                Some(process) if process.template == template => None,
                Some(process) => Some(process.restarts + 1),
                None => Some(0),
            };
            if let Some(restarts) = restarts {
                let secrets = used_by(component);
                let uses = secrets.filter_map(|which| Some((which, self.certificate(which)?)));
                let process = Process {
                    template,
                    uses: uses.collect(),
                    restarts,
                };
                self.processes.insert(component, process);
            }
        }
        self.refresh();
    }

    /// All StatefulSets roll out.
    pub(crate) fn roll_out_all(&mut self) {
        for component in Component::ALL {
            self.roll_out(component);
        }
    }

    /// How often the processes of `component` were replaced.
    pub(crate) fn restarts(&self, component: Component) -> u32 {
        self.processes[&component].restarts
    }

    /// Somebody deletes a StatefulSet.
    pub(crate) fn lose_set(&mut self, component: Component) {
        self.observed.stateful_sets.remove(component.name());
        self.processes.remove(&component);
        self.refresh();
    }

    /// Somebody deletes a Service.
    pub(crate) fn lose_service(&mut self, name: &str) {
        self.observed.services.remove(name);
        self.refresh();
    }

    /// Somebody changes the data of a Secret.
    pub(crate) fn edit(&mut self, which: TenantSecret, change: impl FnOnce(&mut Data)) {
        let secret = self.observed.secrets.get_mut(which.name()).expect("the Secret");
        change(secret.data.as_mut().expect("data"));
        self.written.insert(which, self.now);
        self.refresh();
    }

    /// Somebody sets a field of a StatefulSet or Service, or removes it: as the API server keeps the managed fields, it
    /// is no longer among ours.
    pub(crate) fn set_by_hand(&mut self, kind: Kind, name: &str, path: &[&str], value: Option<&Value>) {
        self.version += 1;
        let (version, now) = (self.version.to_string(), self.now);
        match kind {
            Kind::StatefulSet => {
                let stored = self.observed.stateful_sets.get_mut(name).expect("a StatefulSet");
                let object = serde_json::to_value(&*stored).expect("JSON");
                let changed = by_hand(object, path, value, &version, now);
                *stored = serde_json::from_value(changed).expect("a StatefulSet");
            }
            Kind::Service => {
                let stored = self.observed.services.get_mut(name).expect("a Service");
                let object = serde_json::to_value(&*stored).expect("JSON");
                let changed = by_hand(object, path, value, &version, now);
                *stored = serde_json::from_value(changed).expect("a Service");
            }
        }
        self.refresh();
    }

    /// The certificate in a Secret, DER, if it can be used with its key.
    pub(crate) fn certificate(&self, which: TenantSecret) -> Option<Vec<u8>> {
        let secret = self.observed.secrets.get(which.name())?;
        match self.read.get(&which) {
            Some((data, certificate)) if Some(data) == secret.data.as_ref() => certificate.clone(),
            _ => usable(which, secret),
        }
    }

    /// The leaf in a Secret.
    pub(crate) fn leaf(&self, which: TenantSecret) -> CertificateInfo {
        CertificateInfo::from_der(self.certificate(which).expect("a usable leaf")).expect("a certificate")
    }

    /// When the apiserver's leaf was renewed.
    pub(crate) fn last_issue(&self) -> Timestamp {
        plan::issued_at(&self.observed.secrets["apiserver-ca"]).expect("a time")
    }

    /// The bytes of what is made once.
    pub(crate) fn once(&self) -> Vec<Option<Data>> {
        [TenantSecret::RootCa, TenantSecret::ServiceAccount]
            .map(|which| self.observed.secrets.get(which.name())?.data.clone())
            .into()
    }

    /// Certificates in use that have ended: of the processes, and what the syncer and people take from the Secret.
    pub(crate) fn expired(&self) -> Vec<String> {
        let of_processes = self.processes.iter().flat_map(|(component, process)| {
            let uses = process.uses.iter();
            uses.map(move |(which, der)| (format!("{component}: {which}"), Some(der.clone())))
        });
        let stored = LEAVES.map(|which| (format!("Secret {which}"), self.certificate(which)));
        of_processes
            .chain(stored)
            .filter(|(_, der)| !der.as_ref().is_some_and(|der| self.is_valid(der)))
            .map(|(what, _)| what)
            .collect()
    }

    fn is_valid(&self, der: &[u8]) -> bool {
        CertificateInfo::from_der(der.to_vec())
            .is_ok_and(|info| info.not_before <= self.now && self.now <= info.not_after)
    }

    /// Issues a leaf, or takes what is made once from where it lies ready.
    fn issue(&mut self, which: TenantSecret, attempt: Option<&str>) {
        *self.issued.entry(which).or_default() += 1;
        let pair = match which {
            TenantSecret::RootCa => &self.once[0],
            TenantSecret::ServiceAccount => &self.once[1],
            _ => {
                let validity = credentials::life(&self.goal(), self.max_life);
                let (from, to) = (self.now - validity.dated_back(), self.now + validity.life());
                return self.issue_between(which, from, to, attempt);
            }
        };
        assert!(
            !self.observed.secrets.contains_key(which.name()),
            "{which} is made anew"
        );
        let pair = pair.clone();
        self.store(which, &tls(&pair), attempt);
    }

    /// Writes a leaf of this life.
    pub(crate) fn issue_between(
        &mut self,
        which: TenantSecret,
        from: Timestamp,
        to: Timestamp,
        attempt: Option<&str>,
    ) {
        let root = pair_of(TenantSecret::RootCa, &self.observed.secrets["root-ca"]).expect("a root CA");
        let authority = Authority::load(&root.certificate_pem, &root.key_pem, self.now).expect("a root CA");
        let mut names = credentials::names(&self.goal(), &self.observed);
        if pki::request(pki::Leaf::ApiServer, &names).is_err() {
            names.external_domain = None;
        }
        let request = pki::request(which.leaf().expect("a leaf"), &names).expect("names of certificates");
        let pair = authority
            .issue_between(&request, KeyAlgorithm::EcdsaP256, from, to, self.now)
            .expect("a leaf");
        if which.is_kubeconfig() {
            let server = server_of(&self.goal(), &self.observed);
            let text = kubeconfig::render(&self.tenant.name, &server, &root.certificate_pem, "user", &pair);
            let text = text.expect("a kubeconfig");
            self.store(which, &BTreeMap::from([(which.name(), text.as_str())]), attempt);
        } else {
            self.store(which, &tls(&pair), attempt);
        }
    }

    fn store(&mut self, which: TenantSecret, data: &BTreeMap<&str, &str>, attempt: Option<&str>) {
        let mut value = render::secret(which, &self.tenant, data, attempt);
        value["metadata"]["managedFields"] =
            json!([{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:data": {}}}]);
        let secret: Secret = serde_json::from_value(value).expect("a Secret");
        self.observed.secrets.insert(which.name().into(), secret);
        self.written.insert(which, self.now);
    }

    fn apply_object(&mut self, object: &Rendered) {
        self.version += 1;
        match object.kind {
            Kind::Service => {
                let mut service: Service = serde_json::from_value(object.value.clone()).expect("a Service");
                let old = self.observed.services.get(&object.name);
                self.stamp(&mut service.metadata, object, old.map(|old| &old.metadata));
                let old = old.and_then(|old| old.spec.as_ref()?.cluster_ip.clone());
                let spec = service.spec.as_mut().expect("a spec");
                if spec.cluster_ip.is_none() {
                    // One that was deleted comes back with another address.
                    self.addresses += u8::from(old.is_none());
                    spec.cluster_ip = Some(old.unwrap_or_else(|| format!("10.0.0.{}", self.addresses)));
                }
                self.observed.services.insert(object.name.clone(), service);
            }
            Kind::StatefulSet => {
                let mut set: StatefulSet =
                    serde_json::from_value(object.value.clone()).expect("a StatefulSet");
                let old = self.observed.stateful_sets.get(&object.name);
                self.stamp(&mut set.metadata, object, old.map(|old| &old.metadata));
                set.status = old.and_then(|old| old.status.clone());
                let spec = set.spec.as_mut().expect("a spec");
                if spec.replicas.is_none() {
                    spec.replicas = old.and_then(|old| old.spec.as_ref()?.replicas);
                }
                self.observed.stateful_sets.insert(object.name.clone(), set);
            }
        }
    }

    /// What the API server writes into the metadata of what is applied by force.
    fn stamp(&self, meta: &mut ObjectMeta, object: &Rendered, old: Option<&ObjectMeta>) {
        let generation = old.and_then(|old| old.generation).unwrap_or(0) + 1;
        meta.generation = Some(generation);
        meta.resource_version = Some(self.version.to_string());
        let applied = json!({"manager": FIELD_MANAGER, "operation": "Apply", "time": self.now.to_string(),
            "fieldsType": "FieldsV1", "fieldsV1": fields_of(&object.value)});
        let mut entries = vec![serde_json::from_value(applied).expect("an entry")];
        // Whoever scales it goes on doing so.
        let others = old
            .and_then(|old| old.managed_fields.as_ref())
            .into_iter()
            .flatten();
        entries.extend(others.filter(|entry| entry.subresource.is_some()).cloned());
        meta.managed_fields = Some(entries);
    }

    fn restart(&mut self, restart: &plan::Restart) {
        let stored = self.observed.stateful_sets.remove(&restart.stateful_set);
        let mut value = serde_json::to_value(stored.expect("a StatefulSet")).expect("JSON");
        let patch = restart.patch();
        assert_eq!(
            patch["metadata"]["resourceVersion"], value["metadata"]["resourceVersion"],
            "a conflict"
        );
        json_patch::merge(&mut value, &patch);
        self.version += 1;
        value["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let mut set: StatefulSet = serde_json::from_value(value).expect("a StatefulSet");
        set.metadata.generation = Some(set.metadata.generation.unwrap_or(0) + 1);
        // Written by update, these are no longer among what we applied.
        let mut fields = patch;
        fields["metadata"]
            .as_object_mut()
            .expect("an object")
            .remove("resourceVersion");
        for entry in set.metadata.managed_fields.iter_mut().flatten() {
            if let Some(owned) = &mut entry.fields_v1 {
                subtract(&mut owned.0, &fields_of(&fields));
            }
        }
        let entry = json!({"manager": FIELD_MANAGER, "operation": "Update", "time": self.now.to_string(),
            "fieldsType": "FieldsV1", "fieldsV1": fields_of(&fields)});
        let entries = set.metadata.managed_fields.get_or_insert_default();
        entries.push(serde_json::from_value(entry).expect("an entry"));
        self.observed
            .stateful_sets
            .insert(restart.stateful_set.clone(), set);
    }

    /// What follows from what was done: files are written, processes take them up, the manager sees what it can.
    fn refresh(&mut self) {
        for which in LEAVES {
            let secret = self.observed.secrets.get(which.name());
            if let Some(secret) = secret
                && let Some(data) = &secret.data
                && self.read.get(&which).is_none_or(|(read, _)| read != data)
            {
                let certificate = usable(which, secret);
                self.read.insert(which, (data.clone(), certificate));
            }
        }
        let sets = &self.observed.stateful_sets;
        self.processes
            .retain(|component, _| sets.contains_key(component.name()));
        for component in Component::ALL {
            let fresh: Vec<_> = used_by(component)
                .filter(|which| self.files_follow && reload::reloads(component, *which))
                .filter(|which| {
                    let written = self.written.get(which);
                    written.is_some_and(|written| self.now.duration_since(*written) >= FILES)
                })
                // What cannot be read is passed over.
                .filter_map(|which| Some((which, self.certificate(which)?)))
                .collect();
            if let Some(process) = self.processes.get_mut(&component) {
                process.uses.extend(fresh);
            }
        }
        self.observed.pods = self
            .processes
            .keys()
            .map(|component| pod_of(*component))
            .collect();
        self.observed.pods.extend(self.others.iter().cloned());
        self.observed.claims.clear();
        if !self.observed.stateful_sets.contains_key("etcd") {
            self.observed.claims.clone_from(&self.claims);
        }
        self.observed.served = if self.probe {
            self.served()
        } else {
            BTreeMap::new()
        };
        self.observed.answer = if self.probe {
            self.answer()
        } else {
            Some(Answer::NotAsked)
        };
    }

    /// As the manager looks: only where the StatefulSet says that its pods began with another certificate.
    fn served(&self) -> BTreeMap<String, Vec<u8>> {
        let mut served = BTreeMap::new();
        for (component, which) in [
            (Component::ApiServer, TenantSecret::ApiServer),
            (Component::Etcd, TenantSecret::Etcd),
        ] {
            if let Some(secret) = self.observed.secrets.get(which.name())
                && let Some(process) = self.processes.get(&component)
                && let Some(der) = process.uses.get(&which)
                && !plan::began_with(&self.observed, component, which)
                && plan::issued_at(secret).is_some()
            {
                served.insert(format!("{component}-0"), der.clone());
            }
        }
        served
    }

    fn answer(&self) -> Option<Answer> {
        let set = self.observed.stateful_sets.get(Component::ApiServer.name())?;
        let process = self.processes.get(&Component::ApiServer)?;
        if rollout::pending(set).is_some() {
            return None;
        }
        let serves = process.uses.get(&TenantSecret::ApiServer);
        let admin = self.certificate(TenantSecret::AdminKubeconfig);
        let problem = if !self
            .observed
            .services
            .contains_key(&self.template.api_server_service)
        {
            "no Service"
        } else if !serves.is_some_and(|der| self.is_valid(der)) {
            "its certificate has expired"
        } else if !admin.is_some_and(|der| self.is_valid(&der)) {
            "401"
        } else {
            return Some(Answer::Ready);
        };
        Some(Answer::NotReady(problem.into()))
    }
}

/// The fixture, with claims for etcd's data.
pub(crate) fn with_claims() -> Template {
    let mut content = content();
    content["etcd"]["statefulset"]["spec"]["volumeClaimTemplates"] =
        json!([{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}]);
    Template::parse(&content).expect("a template")
}

/// The claims of [`with_claims`].
pub(crate) fn all_claims() -> BTreeSet<String> {
    (0..3).map(|ordinal| format!("data-etcd-{ordinal}")).collect()
}

/// The pod of a process, which is well.
fn pod_of(component: Component) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": format!("{component}-0"), "uid": component.name(), "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": component.name(), "uid": "s", "controller": true}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .expect("a pod")
}

fn usable(which: TenantSecret, secret: &Secret) -> Option<Vec<u8>> {
    let pair = pair_of(which, secret)?;
    let info = CertificateInfo::parse(&pair.certificate_pem).ok()?;
    info.matches_key(&pair.key_pem).then(|| info.der().to_vec())
}

/// Certificates that a component uses.
fn used_by(component: Component) -> impl Iterator<Item = TenantSecret> {
    let rows = reload::TABLE.iter().filter(move |row| row.component == component);
    let secrets: BTreeSet<_> = rows.map(|row| row.secret).collect();
    secrets.into_iter().filter(|which| which.leaf().is_some())
}

/// The pair in a Secret, if there is one.
pub(crate) fn pair_of(which: TenantSecret, secret: &Secret) -> Option<CertifiedPair> {
    let data = render::data_of(secret);
    if which.is_kubeconfig() {
        let text = data.get(which.name())?;
        return Some(kubeconfig::parse(std::str::from_utf8(text).ok()?).ok()?.client);
    }
    CertifiedPair::from_tls_data(which.name(), &data).ok()
}

fn tls(pair: &CertifiedPair) -> BTreeMap<&str, &str> {
    BTreeMap::from([
        ("tls.crt", pair.certificate_pem.as_str()),
        ("tls.key", pair.key_pem.as_str()),
    ])
}

/// As effects are told in a test: certificates that are issued one after the other are issued at once.
pub(crate) fn names(effects: &[Effect]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for effect in effects {
        let name = name(effect);
        match (names.last_mut(), name.strip_prefix("issue")) {
            (Some(last), Some(more)) if last.starts_with("issue") => last.push_str(more),
            _ => names.push(name),
        }
    }
    names
}

/// As an effect is told in a test.
pub(crate) fn name(effect: &Effect) -> String {
    let object = |object: &Rendered| format!("{:?} {}", object.kind, object.name);
    match effect {
        Effect::CreateNamespace(_) => "namespace".into(),
        Effect::Issue { secrets, .. } => {
            let names: Vec<_> = secrets.iter().map(|secret| secret.name()).collect();
            format!("issue {}", names.join(" "))
        }
        Effect::Apply(applied) => object(applied),
        Effect::PutBack { object: put, .. } => format!("put back {}", object(put)),
        Effect::Restart(restart) => format!("restart {}", restart.component),
        Effect::DeletePod(pod) => format!("delete pod {}", pod.pod),
        Effect::MakeRoom(pod) => format!("make room for {}", pod.pod),
    }
}

/// `fieldsV1` of what an object says. Elements of lists are owned one by one where they have names, else all together.
fn fields_of(value: &Value) -> Value {
    match value {
        Value::Object(fields) if !fields.is_empty() => fields
            .iter()
            .filter(|(key, value)| !matches!(key.as_str(), "apiVersion" | "kind") && !value.is_null())
            .map(|(key, value)| (format!("f:{key}"), fields_of(value)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(list) if !list.is_empty() && list.iter().all(|element| element["name"].is_string()) => {
            list.iter()
                .map(|element| (element_key(element), fields_of(element)))
                .collect::<Map<_, _>>()
                .into()
        }
        _ => json!({}),
    }
}

fn element_key(element: &Value) -> String {
    format!("k:{}", json!({"name": element["name"]}))
}

/// `fieldsV1` of the one field at `path`, whose indices count elements in `object`.
fn field_at(path: &[&str], object: &Value) -> Value {
    let Some((part, rest)) = path.split_first() else {
        return json!({});
    };
    match part.parse::<usize>().ok().and_then(|index| object.get(index)) {
        Some(element) => json!({element_key(element): field_at(rest, element)}),
        None => json!({format!("f:{part}"): field_at(rest, &object[*part])}),
    }
}

/// Removes from `owned` what is in `gone`, and what is empty then.
fn subtract(owned: &mut Value, gone: &Value) {
    let (Some(owned), Some(gone)) = (owned.as_object_mut(), gone.as_object()) else {
        return;
    };
    for (key, inner) in gone {
        let Some(of_it) = owned.get_mut(key) else { continue };
        if inner.as_object().is_some_and(|inner| !inner.is_empty()) {
            subtract(of_it, inner);
        } else {
            *of_it = json!({});
        }
        if of_it.as_object().is_some_and(Map::is_empty) {
            owned.remove(key);
        }
    }
}

/// `object` after somebody set or removed a field of it.
fn by_hand(mut object: Value, path: &[&str], value: Option<&Value>, version: &str, now: Timestamp) -> Value {
    let field = field_at(path, &object);
    let (last, parents) = path.split_last().expect("a path");
    let place = parents
        .iter()
        .fold(&mut object, |place, part| match part.parse::<usize>() {
            Ok(index) => &mut place[index],
            Err(_) => &mut place[*part],
        });
    match value {
        Some(value) => place[*last] = value.clone(),
        None => drop(place.as_object_mut().expect("an object").remove(*last)),
    }
    let metadata = &mut object["metadata"];
    metadata["resourceVersion"] = json!(version);
    metadata["generation"] = json!(metadata["generation"].as_i64().unwrap_or(0) + 1);
    for entry in metadata["managedFields"].as_array_mut().into_iter().flatten() {
        subtract(&mut entry["fieldsV1"], &field);
    }
    if value.is_some()
        && let Some(entries) = metadata["managedFields"].as_array_mut()
    {
        entries.push(
            json!({"manager": "kubectl-edit", "operation": "Update", "time": now.to_string(),
            "fieldsType": "FieldsV1", "fieldsV1": field}),
        );
    }
    object
}
