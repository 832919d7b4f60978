//! The content of a ClusterVersion, recorded from what runs in a root namespace. Pure.
//!
//! A tenant that the Go manager made is pinned to no revision: what it was made from may have been edited since, or be
//! gone. What runs still says it. Recorded here and rendered again, it gives what runs, and, after an upgrade that has
//! failed, what ran before.
//!
//! - The Go manager applied its objects under the name that this one has, so that what it set is known from what the
//!   server filled in ([`managed_fields`](super::managed_fields)). What a person has changed since runs, too, and is
//!   recorded with it.
//! - In its older versions it made objects without applying them. Of these all is recorded but what the server assigns
//!   to each object. Defaults are among it: they are what runs.
//! - What the renderer adds is taken off again, so that tenants of the same templates have the same content.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use serde_json::{Map, Value, json};

use super::{
    managed_fields::{
        is_applied_by, is_applied_by_us, is_creation, is_kubectl, owned, owned_by, scaled_by_other,
    },
    render::{self, Kind, Tenant, TenantSecret},
};
use crate::api::{Component, FIELD_MANAGER, labels, template::Template};

/// Annotation of `kubectl apply`: the whole object once more.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Annotation of `kubectl rollout restart` on pod templates: when one tenant was restarted.
const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";

/// The content recorded from the StatefulSets and Services of `root_namespace`, by name. It is one that
/// [`Template::parse`] accepts.
///
/// The objects are JSON as the API server gave it: structs would drop fields that are newer than they are, and who
/// renders without these would take them from what runs.
///
/// The error says, in words, what is missing or cannot be told.
pub fn content(
    stateful_sets: &BTreeMap<String, Value>,
    services: &BTreeMap<String, Value>,
    root_namespace: &str,
) -> Result<Value, String> {
    let mut content = Map::new();
    let mut used = Vec::new();
    for component in Component::ALL {
        let Some(set) = stateful_sets.get(component.name()) else {
            if component == Component::ControllerManager {
                continue;
            }
            return Err(format!(
                "StatefulSet {component} does not exist in {root_namespace}"
            ));
        };
        let service = service_of(set, services, &used)
            .map_err(|what| format!("StatefulSet {component} in {root_namespace}: {what}"))?;
        if service.is_none() && component != Component::ControllerManager {
            return Err(format!(
                "StatefulSet {component} in {root_namespace} has no Service: there is none of the name in its \
                 spec.serviceName, and none selects its pods"
            ));
        }
        let mut bundle = json!({
            "metadata": {"name": component.name()},
            "statefulset": stateful_set(set, component)
                .map_err(|what| format!("StatefulSet {component} in {root_namespace}: {what}"))?,
        });
        if let Some((name, service)) = service {
            used.push(name);
            bundle["service"] = recorded(service, Kind::Service, component)
                .map_err(|what| format!("Service {name} in {root_namespace}: {what}"))?;
        }
        content.insert(component.spec_key().to_owned(), bundle);
    }
    let content = Value::Object(content);
    let template = Template::parse(&content).map_err(|faults| {
        let faults: Vec<_> = faults.iter().map(ToString::to_string).collect();
        format!(
            "what runs in {root_namespace} is no content of a ClusterVersion: {}",
            faults.join("; ")
        )
    })?;
    check_members(&template, stateful_sets, root_namespace)?;
    Ok(content)
}

/// The Service of a StatefulSet's pods, and its name: the one it names, else the one that selects them. `used` are those
/// of other components.
fn service_of<'a>(
    set: &Value,
    services: &'a BTreeMap<String, Value>,
    used: &[&str],
) -> Result<Option<(&'a str, &'a Value)>, String> {
    let unused = || {
        services
            .iter()
            .map(|(name, service)| (name.as_str(), service))
            .filter(|(name, _)| !used.contains(name))
    };
    let name = set.pointer("/spec/serviceName").and_then(Value::as_str);
    if let Some(named) = unused().find(|(service, _)| Some(*service) == name) {
        return Ok(Some(named));
    }
    let pods = set.pointer("/spec/template/metadata/labels");
    let selecting: Vec<_> = unused().filter(|(_, service)| selects(service, pods)).collect();
    // Others may have made Services of their own beside ours.
    let ours: Vec<_> = selecting
        .iter()
        .filter(|(_, service)| metadata(service).is_ok_and(|meta| is_applied_by_us(&meta)))
        .copied()
        .collect();
    match (selecting.as_slice(), ours.as_slice()) {
        ([], _) => Ok(None),
        ([one], _) | (_, [one]) => Ok(Some(*one)),
        (many, _) => {
            let names: Vec<_> = many.iter().map(|(name, _)| *name).collect();
            Err(format!(
                "its Service cannot be told: its spec.serviceName names none, and {} select its pods",
                names.join(", ")
            ))
        }
    }
}

fn selects(service: &Value, labels: Option<&Value>) -> bool {
    let selector = service.pointer("/spec/selector").and_then(Value::as_object);
    let has = |(key, value): (&String, &Value)| labels.and_then(|labels| labels.get(key)) == Some(value);
    selector.is_some_and(|selector| !selector.is_empty() && selector.iter().all(has))
}

/// A StatefulSet without what the renderer adds to its pod template.
fn stateful_set(set: &Value, component: Component) -> Result<Value, String> {
    let mut set = recorded(set, Kind::StatefulSet, component)?;
    if let Some(pods) = set.pointer_mut("/spec/template/metadata") {
        let hashes = TenantSecret::ALL.map(|secret| format!("{secret}-hash"));
        let hashes = hashes.iter().map(String::as_str);
        remove_keys(pods, "annotations", hashes.chain([RESTARTED_AT]));
        remove_keys(pods, "labels", [labels::CLUSTER]);
    }
    if component == Component::Etcd {
        remove_members(&mut set)?;
    }
    Ok(set)
}

/// Takes the list of members off the arguments that it was appended to.
fn remove_members(set: &mut Value) -> Result<(), String> {
    let container = set.pointer_mut("/spec/template/spec/containers/0");
    let container = container.and_then(Value::as_object_mut);
    let Some(container) = container else {
        return Err("it has no containers".into());
    };
    let args = container.get_mut("args").and_then(Value::as_array_mut);
    match args {
        Some(args) if args.iter().rev().nth(1).is_some_and(|arg| arg == "--initial-cluster") => {
            args.truncate(args.len() - 2);
            if args.is_empty() {
                container.remove("args");
            }
            Ok(())
        }
        _ => Err(
            "the arguments of its first container do not end with --initial-cluster and the members, as the manager writes \
             them"
                .into(),
        ),
    }
}

/// Whether the members that would be rendered are those that run: etcd is not to be restarted by a list that was edited,
/// or by a number of replicas that was.
fn check_members(
    template: &Template,
    stateful_sets: &BTreeMap<String, Value>,
    root_namespace: &str,
) -> Result<(), String> {
    let tenant = Tenant {
        name: String::new(),
        namespace: String::new(),
        uid: String::new(),
        root_namespace: root_namespace.to_owned(),
        cluster_domain: String::new(),
        external_domain: None,
        pki_expire_days: None,
    };
    let Some(rendered) = render::stateful_set(template, Component::Etcd, &tenant, &BTreeMap::new()) else {
        return Ok(());
    };
    let members = |set: &Value| {
        let args = set.pointer("/spec/template/spec/containers/0/args")?.as_array()?;
        args.last()?.as_str().map(ToOwned::to_owned)
    };
    let runs = stateful_sets.get(&rendered.name).and_then(members);
    let would_run = members(&rendered.value);
    if runs == would_run {
        return Ok(());
    }
    Err(format!(
        "StatefulSet {} in {root_namespace} has other members than its name, replicas and Service say: {} instead of {}",
        rendered.name,
        runs.unwrap_or_default(),
        would_run.unwrap_or_default()
    ))
}

/// What a template has to say for an object to be as it is.
fn recorded(object: &Value, kind: Kind, component: Component) -> Result<Value, String> {
    let meta = metadata(object)?;
    let applied = owned(object, &meta, FIELD_MANAGER);
    let mut spec = match &applied {
        Some(_) => owned_by(object, &meta, |entry| is_set(entry, &meta, kind)),
        None => Some(object.clone()),
    }
    .and_then(|mut object| object.get_mut("spec").map(Value::take))
    .filter(Value::is_object)
    .unwrap_or_else(|| json!({}));
    remove_nulls(&mut spec);
    // An autoscaler's number is of this one tenant and of the moment. That of etcd is in its list of members.
    if component != Component::Etcd
        && scaled_by_other(&meta).is_some()
        && let Some(spec) = spec.as_object_mut()
    {
        spec.remove("replicas");
    }

    // What others note down in labels and annotations is theirs, and of this one tenant.
    let created = || owned_by(object, &meta, |entry| is_creation(entry, &meta));
    let made = applied.clone().or_else(created).unwrap_or_else(|| object.clone());
    match kind {
        Kind::StatefulSet => {
            if let Some(pods) = spec.get_mut("template").and_then(Value::as_object_mut) {
                pods.insert("metadata".into(), notes(made.pointer("/spec/template/metadata")));
            }
        }
        Kind::Service => remove_assigned(&mut spec, applied.as_ref().map(|applied| &applied["spec"])),
    }
    let (api_version, kind) = match kind {
        Kind::StatefulSet => ("apps/v1", "StatefulSet"),
        Kind::Service => ("v1", "Service"),
    };
    let mut metadata = notes(made.get("metadata"));
    metadata["name"] = object["metadata"]["name"].clone();
    remove_keys(
        &mut metadata,
        "annotations",
        [labels::RENDERED_HASH, LAST_APPLIED],
    );
    Ok(json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}))
}

/// Labels and annotations; of metadata all else is a server's or of one namespace.
fn notes(metadata: Option<&Value>) -> Value {
    let of = |key: &str| {
        let notes = metadata?.get(key)?;
        notes.is_object().then(|| (key.to_owned(), notes.clone()))
    };
    Value::Object(["labels", "annotations"].into_iter().filter_map(of).collect())
}

fn metadata(object: &Value) -> Result<ObjectMeta, String> {
    let metadata = object.get("metadata").cloned().unwrap_or_default();
    serde_json::from_value(metadata).map_err(|_| "its metadata cannot be read".to_owned())
}

/// Whether what an entry owns was set on purpose, by us or since. What a controller sets in a Service is of this one: its
/// addresses, and what it does for them.
fn is_set(entry: &ManagedFieldsEntry, meta: &ObjectMeta, kind: Kind) -> bool {
    let by_a_person = || entry.manager.as_deref().is_some_and(is_kubectl);
    is_applied_by(entry, FIELD_MANAGER)
        || entry.subresource.as_deref() != Some("status")
            && !is_creation(entry, meta)
            && (kind == Kind::StatefulSet || by_a_person())
}

/// Takes off a Service what the server, or a controller, assigns to it, unless it is among what was `applied`.
fn remove_assigned(spec: &mut Value, applied: Option<&Value>) {
    let was_applied = |key: &str| applied.is_some_and(|applied| applied.get(key).is_some());
    let headless = spec.get("clusterIP").is_some_and(|address| address == "None");
    if let Some(spec) = spec.as_object_mut() {
        let keep_address = |key: &str| was_applied(key) || (headless && applied.is_none());
        spec.retain(|key, _| match key.as_str() {
            "clusterIP" | "clusterIPs" => keep_address(key),
            "ipFamilies" | "healthCheckNodePort" => was_applied(key),
            // An author may have set these in an object that was not applied.
            "externalIPs" | "loadBalancerIP" => was_applied(key) || applied.is_none(),
            _ => true,
        });
    }
    let ports = |spec: &Value| spec.get("ports").and_then(Value::as_array).cloned();
    let applied_ports = applied.and_then(ports).unwrap_or_default();
    if applied_ports.iter().any(|port| port.get("nodePort").is_some()) {
        return;
    }
    for port in spec
        .get_mut("ports")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(port) = port.as_object_mut() {
            port.remove("nodePort");
        }
    }
}

/// Removes keys from the map at `field`, and the map if nothing else is in it.
fn remove_keys<'a>(parent: &mut Value, field: &str, keys: impl IntoIterator<Item = &'a str>) {
    let Some(parent) = parent.as_object_mut() else {
        return;
    };
    let Some(map) = parent.get_mut(field).and_then(Value::as_object_mut) else {
        return;
    };
    for key in keys {
        map.remove(key);
    }
    if map.is_empty() {
        parent.remove(field);
    }
}

/// To Kubernetes null is no value.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(elements) => elements.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
