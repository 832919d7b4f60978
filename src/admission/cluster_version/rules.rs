//! What a ClusterVersion has to say, as far as its text alone shows it. Pure.
//!
//! The rules are those that rendering relies on ([`Template`]), the declared types, and the most common mistakes in a
//! StatefulSet or a Service. All else that the API server would refuse is found by asking it, see
//! [`trial`](super::trial); these rules hold also when it cannot be asked.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Map, Value};

use super::{policy, quantity::quantity};
use crate::admission::verdict::Findings;
use crate::api::{
    Component, FieldError,
    names::{MAX_LABEL, is_dns_label},
    template::Template,
};

/// Checks `spec`. In an update `old` is what stands there now: what has not changed is not refused again, as in the
/// API server's own ratcheting (KEP-4008), so that an object older than a rule can still be worked with.
#[must_use]
pub fn check(spec: &Value, old: Option<&Value>) -> Findings {
    let mut findings = Findings::default();
    let Value::Object(map) = spec else {
        findings
            .faults
            .push(FieldError::required("spec", "the templates of tenants"));
        return findings;
    };
    let mut faults = Template::parse(spec).err().unwrap_or_default();
    for component in Component::ALL {
        if let Some(bundle) = map.get(component.spec_key()).filter(|bundle| !bundle.is_null()) {
            Bundle::new(component, bundle).check(&mut faults, &mut findings.warnings);
        }
    }
    if let Some(policy) = map.get("upgradePolicy").filter(|policy| !policy.is_null()) {
        policy::check(policy, &mut faults, &mut findings.warnings);
    }
    services_differ(spec, &mut faults);
    unknown_keys("spec", map, &KEYS_OF_SPEC, &mut findings.warnings);

    for fault in faults {
        match old {
            Some(old) if unchanged(&fault.field, spec, old) => findings
                .warnings
                .push(format!("{fault} (not refused, as it was so before)")),
            _ => findings.faults.push(fault),
        }
    }
    // Ordered by bundle, as they are written, and each told once: the two sources of faults overlap.
    let mut seen = BTreeSet::new();
    findings
        .faults
        .retain(|fault| seen.insert((fault.field.clone(), fault.reason.as_str())));
    findings.faults.sort_by_key(|fault| rank(&fault.field));
    findings
}

/// Two bundles cannot share a Service: each would be applied over the other.
fn services_differ(spec: &Value, faults: &mut Vec<FieldError>) {
    let mut names = BTreeSet::new();
    for component in Component::ALL {
        let name = &spec[component.spec_key()]["service"]["metadata"]["name"];
        if let Some(text) = name.as_str()
            && !names.insert(text)
        {
            let field = format!("spec.{}.service.metadata.name", component.spec_key());
            faults.push(FieldError::duplicate(field, name));
        }
    }
}

const KEYS_OF_SPEC: [&str; 4] = ["etcd", "apiServer", "controllerManager", "upgradePolicy"];
const KEYS_OF_BUNDLE: [&str; 3] = ["metadata", "statefulset", "service"];

/// The place of a field's bundle in the order of components, all else before them.
pub(super) fn rank(field: &str) -> usize {
    let key = field.split('.').nth(1).unwrap_or_default();
    Component::ALL
        .iter()
        .position(|component| component.spec_key() == key)
        .map_or(0, |position| position + 1)
}

/// Whether the bundle that `field` is in is the same in both.
fn unchanged(field: &str, spec: &Value, old: &Value) -> bool {
    field
        .split('.')
        .nth(1)
        .is_some_and(|key| same(spec.get(key), old.get(key)))
}

/// Whether two values say the same; null is what is absent.
pub(super) fn same(one: Option<&Value>, other: Option<&Value>) -> bool {
    one.filter(|value| !value.is_null()) == other.filter(|value| !value.is_null())
}

/// A key that nobody reads is most often a misspelt one that somebody should have.
pub(super) fn unknown_keys(path: &str, map: &Map<String, Value>, known: &[&str], warnings: &mut Vec<String>) {
    for key in map.keys().filter(|key| !known.contains(&key.as_str())) {
        let key: String = key.chars().take(MAX_LABEL).collect();
        let meant = known.iter().find(|known| known.eq_ignore_ascii_case(&key));
        warnings.push(match meant {
            Some(meant) => format!("{path}.{key}: unknown, and ignored; did you mean {meant:?}?"),
            None => format!("{path}.{key}: unknown, and ignored"),
        });
    }
}

/// A bundle with the path it stands at.
struct Bundle<'a> {
    component: Component,
    path: String,
    value: &'a Value,
}

impl<'a> Bundle<'a> {
    fn new(component: Component, value: &'a Value) -> Self {
        Self {
            component,
            path: format!("spec.{}", component.spec_key()),
            value,
        }
    }

    fn check(&self, faults: &mut Vec<FieldError>, warnings: &mut Vec<String>) {
        // Not an object: told already.
        let Value::Object(map) = self.value else { return };
        unknown_keys(&self.path, map, &KEYS_OF_BUNDLE, warnings);
        if let Some(set) = map.get("statefulset").filter(|set| set.is_object()) {
            let path = format!("{}.statefulset", self.path);
            declared(&path, set, "apps/v1", "StatefulSet", faults);
            self.stateful_set(&path, set, faults, warnings);
        }
        if let Some(service) = map.get("service").filter(|service| service.is_object()) {
            let path = format!("{}.service", self.path);
            declared(&path, service, "v1", "Service", faults);
            service_rules(&path, service, faults, warnings);
            self.together(&path, map, service, warnings);
        }
    }

    /// What StatefulSet and Service have to do with each other.
    fn together(&self, path: &str, bundle: &Map<String, Value>, service: &Value, warnings: &mut Vec<String>) {
        let set = bundle.get("statefulset").unwrap_or(&Value::Null);
        let chosen = service["spec"]["selector"].as_object();
        if !chosen.is_some_and(|chosen| !chosen.is_empty() && has_labels(&set["spec"]["template"], chosen)) {
            warnings.push(format!(
                "{path}.spec.selector: chooses none of the pods of the StatefulSet, so that nobody reaches them by it"
            ));
        }
        if self.component == Component::Etcd && set["spec"]["serviceName"] != service["metadata"]["name"] {
            warnings.push(format!(
                "{}.statefulset.spec.serviceName: is not the name of the Service, by which members find each other",
                self.path
            ));
        }
    }

    fn stateful_set(
        &self,
        path: &str,
        set: &Value,
        faults: &mut Vec<FieldError>,
        warnings: &mut Vec<String>,
    ) {
        let spec = &set["spec"];
        if self.component == Component::Etcd {
            match spec["replicas"].as_u64() {
                Some(0) => faults.push(FieldError::invalid(
                    format!("{path}.spec.replicas"),
                    &spec["replicas"],
                    "must be at least 1: a tenant without etcd has no apiserver",
                )),
                Some(even) if even % 2 == 0 => warnings.push(format!(
                    "{path}.spec.replicas: {even} members tolerate no more losses than {}",
                    even - 1
                )),
                _ => {}
            }
            if !keeps_data(spec) {
                warnings.push(format!(
                    "{path}: no persistent volume: the tenant's data is lost with its pod; use spec.volumeClaimTemplates"
                ));
            }
        }
        let strategy = &spec["updateStrategy"];
        if !strategy.is_null() && !strategy.is_object() {
            faults.push(FieldError::invalid(
                format!("{path}.spec.updateStrategy"),
                strategy,
                "must be an object such as {\"type\": \"RollingUpdate\"}",
            ));
        }
        if self.component == Component::ApiServer && spec["replicas"].as_u64() == Some(0) {
            warnings.push(format!(
                "{path}.spec.replicas: 0: a tenant without an apiserver never runs"
            ));
        }
        let partition = &strategy["rollingUpdate"]["partition"];
        if self.component != Component::Etcd && partition.as_u64().is_some_and(|partition| partition > 0) {
            warnings.push(format!(
                "{path}.spec.updateStrategy.rollingUpdate.partition: {partition}: an upgrade is never complete, as pods \
                 below it keep what they run"
            ));
        }
        selector(path, spec, faults);
        let pod = &spec["template"]["spec"];
        for list in ["initContainers", "containers"] {
            let Some(containers) = pod[list].as_array() else {
                continue;
            };
            for (index, container) in containers.iter().enumerate() {
                let path = format!("{path}.spec.template.spec.{list}[{index}]");
                container_rules(&path, container, faults);
            }
            names_once(&format!("{path}.spec.template.spec.{list}"), containers, faults);
        }
    }
}

/// `apiVersion` and `kind` of an embedded object. Without them it cannot be applied, and with others it would be
/// applied as what it is not; samples of the Go manager had neither, or `apps/v1` for a Service.
fn declared(path: &str, object: &Value, api_version: &str, kind: &str, faults: &mut Vec<FieldError>) {
    for (key, right) in [("apiVersion", api_version), ("kind", kind)] {
        let field = format!("{path}.{key}");
        let value = object.get(key).unwrap_or(&Value::Null);
        if value.is_null() || value == "" {
            faults.push(FieldError::required(field, format_args!("must be {right:?}")));
        } else if value != right {
            faults.push(FieldError::not_supported(field, value, &[right]));
        }
    }
}

/// Whether all of `chosen` is among the labels of a StatefulSet's pods.
fn has_labels(pods: &Value, chosen: &Map<String, Value>) -> bool {
    let labels = &pods["metadata"]["labels"];
    chosen
        .iter()
        .all(|(key, value)| labels.get(key.as_str()) == Some(value))
}

/// The selector has to choose the pods that are made.
fn selector(path: &str, spec: &Value, faults: &mut Vec<FieldError>) {
    let selector = &spec["selector"];
    let chosen = selector["matchLabels"].as_object().filter(|map| !map.is_empty());
    let expressions = selector["matchExpressions"]
        .as_array()
        .is_some_and(|e| !e.is_empty());
    let Some(chosen) = chosen else {
        if !expressions {
            faults.push(FieldError::required(
                format!("{path}.spec.selector.matchLabels"),
                "the labels of the pods",
            ));
        }
        return;
    };
    if !has_labels(&spec["template"], chosen) {
        faults.push(FieldError::invalid(
            format!("{path}.spec.template.metadata.labels"),
            &spec["template"]["metadata"]["labels"],
            "`selector` does not match template `labels`",
        ));
    }
}

fn container_rules(path: &str, container: &Value, faults: &mut Vec<FieldError>) {
    // Not an object: told already.
    let Value::Object(_) = container else { return };
    for (key, what) in [("name", "the name of the container"), ("image", "what it runs")] {
        if container[key].as_str().is_none_or(str::is_empty) {
            faults.push(FieldError::required(format!("{path}.{key}"), what));
        }
    }
    for (index, port) in container["ports"].as_array().into_iter().flatten().enumerate() {
        port_number(
            &format!("{path}.ports[{index}].containerPort"),
            &port["containerPort"],
            faults,
        );
    }
    for amounts in ["requests", "limits"] {
        for (name, amount) in container["resources"][amounts].as_object().into_iter().flatten() {
            if quantity(amount).is_none() {
                let name: String = name.chars().take(MAX_LABEL).collect();
                faults.push(FieldError::invalid(
                    format!("{path}.resources.{amounts}[{name}]"),
                    amount,
                    "must be a quantity such as 250m, 2 or 1Gi",
                ));
            }
        }
    }
}

fn service_rules(path: &str, service: &Value, faults: &mut Vec<FieldError>, warnings: &mut Vec<String>) {
    if let Some(name) = service["metadata"]["name"].as_str()
        && !name.is_empty()
        // Whether a digit may come first depends on the version of Kubernetes, which is asked.
        && !is_dns_label(name)
    {
        faults.push(FieldError::invalid(
            format!("{path}.metadata.name"),
            &name.into(),
            "must be a DNS label: lower-case letters, digits and '-', no '-' at its ends, at most 63 characters",
        ));
    }
    let mut one_only = Vec::new();
    let ports = service["spec"]["ports"].as_array();
    for (index, port) in ports.into_iter().flatten().enumerate() {
        port_number(&format!("{path}.spec.ports[{index}].port"), &port["port"], faults);
        if !port["nodePort"].is_null() {
            let field = format!("{path}.spec.ports[{index}].nodePort");
            port_number(&field, &port["nodePort"], faults);
            one_only.push(field);
        }
    }
    let address = &service["spec"]["clusterIP"];
    match address.as_str() {
        None if address.is_null() => {}
        Some("" | "None") => {}
        Some(text) if text.parse::<IpAddr>().is_ok() => one_only.push(format!("{path}.spec.clusterIP")),
        _ => faults.push(FieldError::invalid(
            format!("{path}.spec.clusterIP"),
            address,
            "must be empty, \"None\" or an IP address",
        )),
    }
    for field in one_only {
        warnings.push(format!("{field}: one Service only can have it, so one tenant"));
    }
    if let Some(ports) = ports {
        names_once(&format!("{path}.spec.ports"), ports, faults);
    }
}

fn names_once(path: &str, items: &[Value], faults: &mut Vec<FieldError>) {
    let mut names = BTreeSet::new();
    for (index, item) in items.iter().enumerate() {
        if let Some(name) = item["name"].as_str()
            && !names.insert(name)
        {
            faults.push(FieldError::duplicate(
                format!("{path}[{index}].name"),
                &item["name"],
            ));
        }
    }
}

fn port_number(field: &str, value: &Value, faults: &mut Vec<FieldError>) {
    if value.is_null() {
        faults.push(FieldError::required(field, "a port"));
    } else if !value
        .as_u64()
        .is_some_and(|port| (1..=u64::from(u16::MAX)).contains(&port))
    {
        faults.push(FieldError::invalid(
            field,
            value,
            "must be between 1 and 65535, inclusive",
        ));
    }
}

/// Whether there is a volume that outlives a pod: a claim, or one of the pod's volumes that is neither made with the
/// pod nor a copy of something else.
fn keeps_data(spec: &Value) -> bool {
    const WITH_THE_POD: [&str; 5] = ["emptyDir", "secret", "configMap", "downwardAPI", "projected"];
    if spec["volumeClaimTemplates"]
        .as_array()
        .is_some_and(|claims| !claims.is_empty())
    {
        return true;
    }
    let volumes = spec["template"]["spec"]["volumes"].as_array();
    volumes.into_iter().flatten().any(|volume| {
        volume.as_object().is_some_and(|volume| {
            volume
                .keys()
                .any(|key| key != "name" && !WITH_THE_POD.contains(&key.as_str()))
        })
    })
}

#[cfg(test)]
mod tests;
