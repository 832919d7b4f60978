//! What a tenant that runs needs: leaves renewed, what was changed by hand put back, and processes restarted that
//! cannot take up a new certificate.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Pod, Secret},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::{
    Answer, Effect, Goal, Hashes, Observed, Plan, Wait, annotation, gate, make_way, needs_apply, objects,
    set_of, unusable,
};
use crate::{
    api::{Component, labels},
    controller::{
        credentials::{Credentials, certificate_of, cluster_ip, is_issued_by_us},
        diagnose,
        managed_fields::{self, Drift},
        reload,
        render::{self, Kind, Rendered, TenantSecret},
    },
    pki::CertificateInfo,
};

/// How long a process may go on serving a certificate that its Secret no longer holds. The kubelet writes the files
/// within a minute or two, and the components look at them every minute.
const RELOAD_PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// How long the controller-manager's restart waits for the apiserver to be well.
const RESTART_PATIENCE: SignedDuration = SignedDuration::from_mins(30);
/// What certificates are issued for when they are renewed; the time follows.
const RENEWAL: &str = "renewal@";
/// As [`RENEWAL`], by a manager that cannot see what the processes serve.
const UNSEEN_RENEWAL: &str = "renewal-unseen@";

/// Where a StatefulSet says what its pods are.
const POD_TEMPLATE: &str = "spec.template";

/// One of the objects of a tenant: kind and name.
pub type ObjectId = (&'static str, String);

/// The Secret `which`, as one of the objects that are put back.
#[must_use]
pub fn id_of(which: TenantSecret) -> ObjectId {
    ("Secret", which.name().to_owned())
}

/// What is remembered of an object that was put back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// It was put back so often of late that it is left now.
    pub contested: bool,
    /// Paths that were applied and changed nothing: the API server does not keep track of them.
    pub settled: BTreeSet<String>,
}

/// What was refused just now, and is not tried again until the tenant is looked at the next time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// Leaves that could not be issued.
    pub secrets: BTreeSet<TenantSecret>,
    /// Objects that could not be put back, each with the reason.
    pub objects: BTreeMap<ObjectId, String>,
}

/// What upkeep goes by, besides the goal and what was observed.
#[derive(Clone, Copy, Debug)]
pub struct Care<'a> {
    /// The tenant's credentials.
    pub credentials: &'a Credentials,
    /// Whether what differs from the pin is put back: not while paused, nor in a tenant that was adopted and not yet
    /// upgraded.
    pub repair: bool,
    /// Whether the last upgrade failed: what it left is not of the pin, and stays.
    pub after_failure: bool,
    /// Objects that were put back before.
    pub known: &'a BTreeMap<ObjectId, Known>,
    /// What cannot be done.
    pub refused: &'a Refused,
    /// Whether the owner accepted that etcd begins anew, without data.
    pub accept_empty_etcd: bool,
}

/// The replacement of a component's pods, without any other change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// The component.
    pub component: Component,
    /// Its StatefulSet.
    pub stateful_set: String,
    /// Why, in words.
    pub why: String,
    /// `metadata.resourceVersion` of the StatefulSet it was decided on.
    resource_version: Option<String>,
    /// Annotations of the pod template that change.
    annotations: BTreeMap<String, String>,
    /// Hash of the rendering with them, if the object carries one that holds now.
    rendered_hash: Option<String>,
    /// Whether the StatefulSet would not replace its pods by itself.
    on_delete: bool,
}

impl Restart {
    /// A merge patch of the StatefulSet.
    #[must_use]
    pub fn patch(&self) -> Value {
        let mut patch = json!({
            "metadata": {"resourceVersion": self.resource_version},
            "spec": {"template": {"metadata": {"annotations": self.annotations}}},
        });
        if let Some(hash) = &self.rendered_hash {
            patch["metadata"]["annotations"] = json!({labels::RENDERED_HASH: hash});
        }
        if self.on_delete {
            patch["spec"]["updateStrategy"] = json!({"type": "RollingUpdate"});
        }
        patch
    }
}

/// What keeps a tenant that runs from being looked after at all: its root namespace is gone, another's, or on its way
/// out. Nothing that is read from it means anything then.
#[must_use]
pub fn homeless(goal: &Goal<'_>, observed: &Observed) -> Option<Plan> {
    let root = &goal.tenant.root_namespace;
    let Some(namespace) = &observed.namespace else {
        return Some(Plan::Blocked(format!(
            "root namespace {root} does not exist: the control plane and its data are gone; delete the VirtualCluster \
             and make it anew, or restore the namespace from a backup"
        )));
    };
    unusable(namespace, goal.tenant)
}

/// Next step of the upkeep of a tenant that runs. Its root CA and service-account key are in order, or there would be
/// no [`Credentials`].
#[must_use]
pub fn upkeep(goal: &Goal<'_>, observed: &Observed, care: &Care<'_>, now: Timestamp) -> Plan {
    let root = &goal.tenant.root_namespace;
    if let Some(plan) = homeless(goal, observed) {
        return plan;
    }
    // Its address goes into certificates.
    if care.repair
        && goal.template.has_cluster_ip_service()
        && let Some(service) = render::service(goal.template, Component::ApiServer, goal.tenant)
        && let Some(effect) = put_back(goal, service, observed, care)
    {
        return Plan::Do(vec![effect]);
    }
    let mut due = care.credentials.due_secrets();
    let contested = |secret: &TenantSecret| {
        care.known
            .get(&id_of(*secret))
            .is_some_and(|known| known.contested)
    };
    due.retain(|secret| !care.refused.secrets.contains(secret) && !contested(secret));
    if !due.is_empty() {
        if goal.template.has_cluster_ip_service() && cluster_ip(goal, observed).is_none() {
            return Plan::Blocked(format!(
                "Service {root}/{} does not exist or has no address, and certificates are made for its address; restore it",
                goal.template.api_server_service
            ));
        }
        let kind = if observed.answer == Some(Answer::NotAsked) {
            UNSEEN_RENEWAL
        } else {
            RENEWAL
        };
        // Each by itself: one that cannot be written holds up no other.
        let issue = |secret| Effect::Issue {
            secrets: vec![secret],
            attempt: Some(format!("{kind}{now}")),
        };
        return Plan::Do(due.into_iter().map(issue).collect());
    }
    // Before anything is put back: what keeps that from coming to rest must not keep a certificate from being used.
    if let Some(plan) = restart(goal, observed, care, now) {
        return plan;
    }
    if care.repair
        && let Some(plan) = repair(goal, observed, care)
    {
        return plan;
    }
    health(goal, observed, now)
}

/// Whether all components are there and up, and the tenant answers.
#[must_use]
pub fn health(goal: &Goal<'_>, observed: &Observed, now: Timestamp) -> Plan {
    let template = goal.template;
    for component in Component::ALL {
        let service = match component {
            Component::Etcd => template.etcd_service.as_ref(),
            Component::ApiServer => Some(&template.api_server_service),
            Component::ControllerManager => None,
        };
        let missing = match (observed.stateful_sets.get(component.name()), service) {
            (None, _) if template.bundle(component).is_some() => format!("StatefulSet {component}"),
            (_, Some(service)) if !observed.services.contains_key(service) => format!("Service {service}"),
            (None, _) => continue,
            (Some(set), _) => match gate(component, set, observed, now) {
                Some(plan) => return plan,
                None => continue,
            },
        };
        return Plan::Wait(Wait {
            component: Some(component),
            message: format!("{missing}, which does not exist"),
            problem: None,
            watched: true,
        });
    }
    Plan::Done
}

/// Puts back what differs from the pin: component by component.
fn repair(goal: &Goal<'_>, observed: &Observed, care: &Care<'_>) -> Option<Plan> {
    for component in Component::ALL {
        if component == Component::Etcd
            && let Some(lost) = lost_etcd(goal, observed, care.accept_empty_etcd)
        {
            return Some(Plan::Blocked(lost));
        }
        let effects: Vec<_> = objects(goal, observed, component, Hashes::Running)
            .into_iter()
            .filter_map(|object| put_back(goal, object, observed, care))
            .collect();
        if !effects.is_empty() {
            return Some(Plan::Do(effects));
        }
    }
    None
}

/// What is done about an object; nothing if it is as it should be, or is left.
fn put_back(goal: &Goal<'_>, object: Rendered, observed: &Observed, care: &Care<'_>) -> Option<Effect> {
    let id = object.id();
    let known = care.known.get(&id);
    if known.is_some_and(|known| known.contested) || care.refused.objects.contains_key(&id) {
        return None;
    }
    let rendered_so = has_rendering(&object, observed);
    if object.component == Component::Etcd && !rendered_so {
        return None;
    }
    if care.after_failure && !rendered_so {
        return None;
    }
    // Somebody deleted it and made another of the same name.
    if stored(&object, observed).is_some_and(|meta| !render::is_ours(meta)) {
        return None;
    }
    let drift = difference(&object, observed, known)?;
    if drift.is_empty() && is_stored(&object, observed) {
        // Not by anybody's hand: whoever scales it has come or gone.
        return Some(Effect::Apply(object));
    }
    // Its pods are replaced, and begin with the Secrets as they are. What somebody else wrote there tells nothing.
    let replaces_pods = drift.iter().any(|drift| drift.path.starts_with(POD_TEMPLATE));
    let object = match object.kind {
        Kind::StatefulSet if replaces_pods => {
            let hashes = render::hashes(object.component, &observed.secrets);
            set_of(goal, observed, object.component, &hashes)?
        }
        _ => object,
    };
    Some(Effect::PutBack { object, drift })
}

/// What others changed in a stored object; `None` if it is as it should be. Empty, if it does not exist, or only the
/// rendering differs.
fn difference(object: &Rendered, observed: &Observed, known: Option<&Known>) -> Option<Vec<Drift>> {
    let Some(meta) = stored(object, observed) else {
        return Some(Vec::new());
    };
    let mut drift = managed_fields::drift(&object.value, meta);
    drift.retain(|drift| known.is_none_or(|known| !known.settled.contains(&settled_as(drift))));
    let is_settled = known.is_some_and(|known| known.settled.contains(object.hash()));
    if drift.is_empty() && (is_settled || !needs_apply(object, observed)) {
        return None;
    }
    Some(drift)
}

/// Whether an object of that kind and name exists.
#[must_use]
pub fn is_stored(object: &Rendered, observed: &Observed) -> bool {
    stored(object, observed).is_some()
}

/// Metadata of an object as it is stored.
#[must_use]
pub fn stored<'a>(object: &Rendered, observed: &'a Observed) -> Option<&'a ObjectMeta> {
    match object.kind {
        Kind::StatefulSet => observed.stateful_sets.get(&object.name).map(|set| &set.metadata),
        Kind::Service => observed
            .services
            .get(&object.name)
            .map(|service| &service.metadata),
    }
}

/// What is remembered of a difference that applying did not change.
#[must_use]
pub fn settled_as(drift: &Drift) -> String {
    let how = if drift.deleted { "-" } else { "" };
    format!("{how}{}", drift.path)
}

/// Whether an object is not there, or was last written as this rendering says. What was not is another's, or another
/// revision's: of etcd, that is nothing to be put right, as its pods would be replaced for it, and their data may be lost.
fn has_rendering(object: &Rendered, observed: &Observed) -> bool {
    stored(object, observed).is_none_or(|meta| {
        let annotations = meta.annotations.as_ref();
        annotations
            .and_then(|annotations| annotations.get(labels::RENDERED_HASH))
            .map(String::as_str)
            == Some(object.hash())
    })
}

/// Objects that differ from the pin, each with what others changed in it. What there is nothing of does not exist, or
/// only its rendering differs.
#[must_use]
pub fn differing(
    goal: &Goal<'_>,
    observed: &Observed,
    known: &BTreeMap<ObjectId, Known>,
) -> Vec<(Rendered, Vec<Drift>)> {
    Component::ALL
        .into_iter()
        .flat_map(|component| objects(goal, observed, component, Hashes::Running))
        .filter(|object| object.component != Component::Etcd || has_rendering(object, observed))
        .filter_map(|object| {
            let known = known.get(&object.id());
            let drift = difference(&object, observed, known)?;
            Some((object, drift))
        })
        .collect()
}

/// A strategic merge patch that leaves of the lists of ports only what `object` says, if there is anything else in them.
///
/// What others put beside ours stays, and so does what they made of ours, since that is another element: a port is
/// known by its number. But the API server refuses two ports of one name, or without names, so that ours could not be
/// put back beside it.
#[must_use]
pub fn only_own_ports(object: &Rendered, observed: &Observed) -> Option<Value> {
    let stored = match object.kind {
        Kind::Service => serde_json::to_value(observed.services.get(&object.name)?),
        Kind::StatefulSet => serde_json::to_value(observed.stateful_sets.get(&object.name)?),
    };
    let stored = stored.ok()?;
    let spec = match object.kind {
        Kind::Service => json!({"ports": own_ports(&object.value["spec"], &stored["spec"], "port")?}),
        Kind::StatefulSet => {
            let pod = "/spec/template/spec";
            let mut lists = serde_json::Map::new();
            for list in ["containers", "initContainers"] {
                let items = |value: &Value| {
                    let list = value.pointer(pod).and_then(|pod| pod[list].as_array());
                    list.cloned().unwrap_or_default()
                };
                let stored = items(&stored);
                let changed = items(&object.value).into_iter().filter_map(|container| {
                    let stored = stored.iter().find(|stored| stored["name"] == container["name"])?;
                    let ports = own_ports(&container, stored, "containerPort")?;
                    Some(json!({"name": container["name"], "ports": ports}))
                });
                let changed: Vec<_> = changed.collect();
                if !changed.is_empty() {
                    lists.insert(list.to_owned(), changed.into());
                }
            }
            if lists.is_empty() {
                return None;
            }
            json!({"template": {"spec": lists}})
        }
    };
    Some(json!({"metadata": {"resourceVersion": stored["metadata"]["resourceVersion"]}, "spec": spec}))
}

/// The ports of `rendered`, to replace those of `stored`; `None` if there are no others. `number` is what they are known
/// by, besides the protocol.
fn own_ports(rendered: &Value, stored: &Value, number: &str) -> Option<Value> {
    let own = rendered["ports"].as_array()?;
    let is = |one: &Value, other: &Value| {
        let protocol = |port: &Value| port["protocol"].as_str().unwrap_or("TCP").to_owned();
        one[number] == other[number] && protocol(one) == protocol(other)
    };
    let others = stored["ports"].as_array()?;
    if others.iter().all(|other| own.iter().any(|own| is(own, other))) {
        return None;
    }
    let replace = json!({"$patch": "replace"});
    Some(own.iter().cloned().chain([replace]).collect())
}

/// etcd's StatefulSet is gone and its data, too, as far as can be seen: to make it anew would begin with an empty
/// cluster, and hide the loss.
#[must_use]
pub fn lost_etcd(goal: &Goal<'_>, observed: &Observed, accept_empty: bool) -> Option<String> {
    let bundle = goal.template.etcd.as_ref()?;
    let name = &bundle.stateful_set_name;
    if observed.stateful_sets.contains_key(name) || accept_empty {
        return None;
    }
    let members = || (0..bundle.replicas).map(|ordinal| format!("{name}-{ordinal}"));
    // Deleted with --cascade=orphan: a StatefulSet of the same name takes its pods up again.
    let pods_stay = members().all(|member| {
        observed
            .pods
            .iter()
            .any(|pod| pod.name_any() == member && pod.metadata.deletion_timestamp.is_none())
    });
    let claims = data_claims(&bundle.stateful_set, name, bundle.replicas);
    let claims_stay = !claims.is_empty() && claims.iter().all(|claim| observed.claims.contains(claim));
    let volumes: Vec<_> = data_volumes(&bundle.stateful_set).collect();
    let in_claim = volumes.iter().any(|volume| is_a(volume, "persistentVolumeClaim"));
    // A pod finds there what an earlier one left on the same node.
    let on_node = volumes.iter().any(|volume| is_a(volume, "hostPath"));
    if pods_stay || (claims_stay && in_claim) || on_node {
        return None;
    }
    Some(format!(
        "StatefulSet {}/{name} does not exist, and no volume with its data is left: it is not made anew, since the tenant would \
         begin with an empty etcd. Restore its volumes or the StatefulSet; to begin empty, annotate the VirtualCluster with {}=true",
        goal.tenant.root_namespace,
        labels::ACCEPT_EMPTY_ETCD
    ))
}

/// Names of the claims for volumes that members of etcd keep their data in.
#[must_use]
pub fn data_claims(stateful_set: &Value, name: &str, replicas: u32) -> BTreeSet<String> {
    let text = |value: &Value, path: &str| value.pointer(path).and_then(Value::as_str).map(ToOwned::to_owned);
    let list = |path: &str| {
        stateful_set
            .pointer(path)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    };
    let templates = list("/spec/volumeClaimTemplates")
        .filter_map(|claim| text(claim, "/metadata/name"))
        .flat_map(|claim| (0..replicas).map(move |ordinal| format!("{claim}-{name}-{ordinal}")));
    let volumes = list("/spec/template/spec/volumes")
        .filter_map(|volume| text(volume, "/persistentVolumeClaim/claimName"));
    templates.chain(volumes).collect()
}

/// Volumes that etcd's data may be in: where it says which folder that is, those that are mounted there, else all. Claim
/// templates are volumes with a claim.
fn data_volumes(stateful_set: &Value) -> impl Iterator<Item = Value> {
    let list = |value: &Value, path: &str| {
        value
            .pointer(path)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    let containers = list(stateful_set, "/spec/template/spec/containers");
    let mounted: Option<Vec<String>> = containers.iter().find_map(|container| {
        let folder = data_folder(container)?;
        let holds = |mount: &&Value| {
            let at = mount["mountPath"]
                .as_str()
                .unwrap_or_default()
                .trim_end_matches('/');
            folder
                .strip_prefix(at)
                .is_some_and(|below| below.is_empty() || below.starts_with('/'))
        };
        let mounts = list(container, "/volumeMounts");
        let names = mounts
            .iter()
            .filter(holds)
            .filter_map(|mount| mount["name"].as_str());
        Some(names.map(ToOwned::to_owned).collect())
    });
    let of_templates = list(stateful_set, "/spec/volumeClaimTemplates")
        .into_iter()
        .map(|claim| json!({"name": claim["metadata"]["name"], "persistentVolumeClaim": {}}));
    list(stateful_set, "/spec/template/spec/volumes")
        .into_iter()
        .chain(of_templates)
        .filter(move |volume| {
            mounted.as_ref().is_none_or(|mounted| {
                let name = volume["name"].as_str();
                name.is_some_and(|name| mounted.iter().any(|mounted| mounted == name))
            })
        })
}

/// The folder that a container tells etcd to keep its data in.
fn data_folder(container: &Value) -> Option<&str> {
    const FLAG: &str = "--data-dir";
    let words: Vec<_> = ["command", "args"]
        .into_iter()
        .filter_map(|field| container[field].as_array())
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let by_flag = words
        .iter()
        .enumerate()
        .find_map(|(index, word)| match word.strip_prefix(FLAG)? {
            "" => words.get(index + 1).copied(),
            rest => rest.strip_prefix('='),
        });
    let variables = container["env"].as_array().into_iter().flatten();
    let by_variable = || {
        variables
            .filter(|variable| variable["name"] == "ETCD_DATA_DIR")
            .find_map(|variable| variable["value"].as_str())
    };
    by_flag.or_else(by_variable)
}

fn is_a(volume: &Value, kind: &str) -> bool {
    volume.get(kind).is_some_and(Value::is_object)
}

/// Restarts what runs with a certificate that it cannot exchange: the apiserver first, and the controller-manager when
/// that is well, or when it has waited for that for long.
fn restart(goal: &Goal<'_>, observed: &Observed, care: &Care<'_>, now: Timestamp) -> Option<Plan> {
    for component in [Component::ApiServer, Component::ControllerManager] {
        let Some(set) = observed.stateful_sets.get(component.name()) else {
            continue;
        };
        // One that somebody else put in its place is theirs; what is written to it would make it ours.
        if !render::is_ours(&set.metadata) {
            continue;
        }
        if component == Component::ControllerManager && !may_restart_controllers(observed, now) {
            continue;
        }
        if let Some(restart) = outdated(goal, observed, component, set, care, now) {
            return Some(Plan::Do(vec![Effect::Restart(restart)]));
        }
        // Pods of before that crash, for their certificate has ended, say, would block the new ones.
        if let Some(plan) = make_way(component, set, observed, now) {
            return Some(plan);
        }
    }
    None
}

/// A controller-manager that starts without its API gives up. But its certificate ends, whatever becomes of that.
fn may_restart_controllers(observed: &Observed, now: Timestamp) -> bool {
    let apiserver = observed.stateful_sets.get(Component::ApiServer.name());
    let is_well = apiserver.is_some_and(|set| gate(Component::ApiServer, set, observed, now).is_none());
    let kubeconfig = observed
        .secrets
        .get(TenantSecret::ControllerManagerKubeconfig.name());
    let waited = kubeconfig
        .and_then(issued_at)
        .is_some_and(|issued| now.duration_since(issued) > RESTART_PATIENCE);
    is_well || waited
}

/// The restart that a component needs, if it runs with a certificate that its Secret no longer holds.
fn outdated(
    goal: &Goal<'_>,
    observed: &Observed,
    component: Component,
    set: &StatefulSet,
    care: &Care<'_>,
    now: Timestamp,
) -> Option<Restart> {
    let present = render::hashes(component, &observed.secrets);
    let mut running = render::hashes_of(set);
    running.retain(|key, _| present.contains_key(key));
    let mut annotations = BTreeMap::new();
    let mut names = Vec::new();
    for which in render::hashed(component) {
        let (key, Some(secret)) = (render::hash_key(*which), observed.secrets.get(which.name())) else {
            continue;
        };
        let Some(hash) = present.get(&key).filter(|hash| running.get(&key) != Some(*hash)) else {
            continue;
        };
        // What the Go manager issued runs already, whatever it wrote into its annotation. And with what cannot be used
        // nothing would start again.
        if which.leaf().is_none() || !is_issued_by_us(secret) || care.refused.secrets.contains(which) {
            continue;
        }
        let must = !reload::reloads(component, *which)
            || is_unseen(secret)
            || (*which == TenantSecret::ApiServer && serves_older(observed, component, secret, now));
        if must {
            annotations.insert(key, hash.clone());
            names.push(which.name());
        }
    }
    if annotations.is_empty() {
        return None;
    }
    // An object that carries what it should is made to carry what it should then.
    let hash_with = |hashes: &BTreeMap<String, String>| {
        set_of(goal, observed, component, hashes).map(|set| set.hash().to_owned())
    };
    let stored = annotation(set, labels::RENDERED_HASH);
    let rendered_hash = hash_with(&running)
        .filter(|hash| stored == Some(hash))
        .and_then(|_| {
            let mut hashes = running.clone();
            hashes.extend(annotations.clone());
            hash_with(&hashes)
        });
    let why = format!(
        "{component} cannot take up {} while it runs: its pods are replaced",
        names.join(" and ")
    );
    Some(Restart {
        component,
        stateful_set: set.name_any(),
        why,
        resource_version: set.resource_version(),
        annotations,
        rendered_hash,
        on_delete: set
            .spec
            .as_ref()
            .and_then(|spec| spec.update_strategy.as_ref())
            .is_some_and(|strategy| strategy.type_.as_deref() == Some("OnDelete")),
    })
}

/// Whether a Secret was renewed by a manager that could not see what is served: then nobody waits for it to be.
fn is_unseen(secret: &Secret) -> bool {
    annotation(secret, labels::ISSUED_FOR).is_some_and(|issued| issued.starts_with(UNSEEN_RENEWAL))
}

/// When what a Secret holds was issued, as far as that is written on it.
#[must_use]
pub fn issued_at(secret: &Secret) -> Option<Timestamp> {
    let (_, time) = annotation(secret, labels::ISSUED_FOR)?.rsplit_once('@')?;
    time.parse().ok()
}

/// Pods of `component` that serve a certificate other than that of `secret`, though it is there for long enough.
#[must_use]
pub fn serving_older<'a>(
    observed: &'a Observed,
    component: Component,
    secret: &Secret,
    now: Timestamp,
) -> Vec<&'a str> {
    let patience_ended = issued_at(secret).is_none_or(|issued| now.duration_since(issued) > RELOAD_PATIENCE);
    let Some(certificate) = certificate_of(secret).filter(|_| patience_ended) else {
        return Vec::new();
    };
    observed
        .served
        .iter()
        .filter(|(pod, served)| pod_of(pod, component) && *served != certificate.der())
        .map(|(pod, _)| pod.as_str())
        .collect()
}

fn serves_older(observed: &Observed, component: Component, secret: &Secret, now: Timestamp) -> bool {
    !serving_older(observed, component, secret, now).is_empty()
}

/// Whether a pod of this name is one of the component's.
fn pod_of(pod: &str, component: Component) -> bool {
    pod.rsplit_once('-')
        .is_some_and(|(set, _)| set == component.name())
}

/// Whether some process is still to be seen with the certificate of its Secret, which was issued while it ran.
#[must_use]
pub fn awaits_reload(observed: &Observed, now: Timestamp) -> bool {
    [
        (Component::ApiServer, TenantSecret::ApiServer),
        (Component::Etcd, TenantSecret::Etcd),
    ]
    .into_iter()
    .any(|(component, which)| {
        let Some(secret) = observed.secrets.get(which.name()) else {
            return false;
        };
        let recent = issued_at(secret).is_some_and(|issued| now.duration_since(issued) <= RELOAD_PATIENCE);
        if !recent || began_with(observed, component, which) {
            return false;
        }
        let certificate = certificate_of(secret);
        let has_it = |pod: &Pod| {
            let served = observed.served.get(&pod.name_any());
            served.map(Vec::as_slice) == certificate.as_ref().map(CertificateInfo::der)
        };
        !diagnose::of_set(&observed.pods, component.name()).all(has_it)
    })
}

/// Whether the pods of a component were made for the present content of a Secret, by what their template says.
#[must_use]
pub fn began_with(observed: &Observed, component: Component, which: TenantSecret) -> bool {
    let key = render::hash_key(which);
    let present = render::hashes(component, &observed.secrets).remove(&key);
    let stored = observed
        .stateful_sets
        .get(component.name())
        .map(render::hashes_of);
    let running = stored.and_then(|mut running| running.remove(&key));
    present.is_some() && present == running
}
