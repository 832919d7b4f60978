//! What the API server itself says of the embedded objects: each is applied in a dry run, in the manager's own
//! namespace, under a name nobody has. Unknown fields, wrong types, port and selector mistakes are found when the
//! ClusterVersion is written that way, and not tenants later.
//!
//! This module is the pure part: which objects to try, and what an answer means for the ClusterVersion.

use std::net::IpAddr;

use kube::core::Status;
use serde_json::Value;

use super::rules::same;
use crate::{
    api::{
        Component, FieldError,
        field::{self, FieldErrorReason},
    },
    client::is_misshapen,
    controller::render::{self, Kind},
};

/// Most characters of an answer that are passed on.
const MAX_TEXT: usize = 400;

/// One embedded object, as it is tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// Path of the object in the ClusterVersion.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// The object.
    pub object: Value,
}

/// The embedded objects of `spec` that are to be tried in `namespace`: all, or in an update those whose bundle has
/// changed.
#[must_use]
pub fn trials(spec: &Value, old: Option<&Value>, namespace: &str) -> Vec<Trial> {
    let mut trials = Vec::new();
    for component in Component::ALL {
        let key = component.spec_key();
        if old.is_some_and(|old| same(spec.get(key), old.get(key))) {
            continue;
        }
        let Some(bundle) = spec.get(key) else {
            continue;
        };
        for (root, kind) in [("statefulset", Kind::StatefulSet), ("service", Kind::Service)] {
            let Some(object) = bundle.get(root).filter(|object| object.is_object()) else {
                continue;
            };
            let mut object = render::placed(object.clone(), kind, namespace);
            match kind {
                Kind::StatefulSet => object["metadata"]["name"] = SET.into(),
                Kind::Service => prepare_service(&mut object),
            }
            trials.push(Trial {
                path: format!("spec.{key}.{root}"),
                kind,
                object,
            });
        }
    }
    trials
}

/// The name StatefulSets are tried under. A rule of ours has looked at their own.
const SET: &str = "vc-manager-dry-run";
/// What is appended to a Service's name: what names may be differs between versions of Kubernetes.
const SERVICE_SUFFIX: &str = "-dry-run";
/// Longest name of a Service.
const MAX_NAME: usize = 63;

/// Makes a Service one that nobody has, and takes from it what one Service only may have: a tenant may have it.
fn prepare_service(service: &mut Value) {
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    let kept: String = name.chars().take(MAX_NAME - SERVICE_SUFFIX.len()).collect();
    service["metadata"]["name"] = format!("{kept}{SERVICE_SUFFIX}").into();
    let Some(spec) = service.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    spec.remove("healthCheckNodePort");
    let has_address = |value: &Value| value.as_str().is_some_and(|text| text.parse::<IpAddr>().is_ok());
    if spec.get("clusterIP").is_some_and(has_address) {
        spec.remove("clusterIP");
        spec.remove("clusterIPs");
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

/// What an answer to a dry run means.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The object can be applied.
    Accepted,
    /// It can not, for these reasons.
    Refused(Vec<FieldError>),
    /// It has not the shape of its kind, for these reasons; the rest of it was not looked at.
    Misshapen(Vec<FieldError>),
    /// The answer says nothing of the object: another policy of the manager's namespace, a quota, an outage.
    Untold(String),
}

/// What an error answer to the apply of the object at `path` means.
#[must_use]
pub fn outcome(path: &str, status: &Status) -> Outcome {
    let message = status.message.as_str();
    let causes = status.details.as_ref().map_or(&[][..], |details| &details.causes);
    // Policies of the manager's own namespace, which say nothing of those of tenants.
    let is_policy =
        |text: &str| text.starts_with("admission webhook \"") || text.contains("ValidatingAdmissionPolicy ");
    if is_policy(message) || causes.iter().any(|cause| is_policy(&cause.message)) {
        return Outcome::Untold(shortened(message));
    }
    if status.code == 422 {
        let placed = causes.iter().filter(|cause| !cause.field.is_empty());
        let faults: Vec<_> = placed
            .map(|cause| {
                FieldError::new(
                    format!("{path}.{}", cause.field),
                    FieldErrorReason::parse(&cause.reason),
                    shortened(&cause.message),
                )
            })
            .collect();
        return if faults.is_empty() {
            Outcome::Untold(shortened(message))
        } else {
            Outcome::Refused(faults)
        };
    }
    if is_misshapen(message) {
        let error = ["): ", " to proper version: "]
            .iter()
            .filter_map(|mark| message.split_once(mark))
            .min_by_key(|(before, _)| before.len())
            .map_or(message, |(_, error)| error);
        // A value in a message may have lines of its own; each error has a path, and begins with it.
        let errors = error.strip_prefix("errors:").unwrap_or(error).trim();
        let errors = errors
            .split("\n  .")
            .map(|line| schema_fault(path, line.trim_start_matches('.')));
        return Outcome::Misshapen(errors.collect());
    }
    if status.code == 400 && message.contains("cannot be handled as a ") {
        return Outcome::Misshapen(vec![unplaced(path, message)]);
    }
    Outcome::Untold(shortened(message))
}

/// One failed match with the schema, as in `spec.foo: field not declared in schema`.
fn schema_fault(path: &str, line: &str) -> FieldError {
    let Some((field, problem)) = line
        .split_once(": ")
        .filter(|(field, _)| field.starts_with("spec") || field.starts_with("metadata"))
    else {
        return unplaced(path, line);
    };
    let field = format!("{path}.{field}");
    if problem == "field not declared in schema" {
        return FieldError::new(
            field,
            FieldErrorReason::Invalid,
            "Invalid value: unknown field, not in the schema of this API server",
        );
    }
    let reason = if problem.starts_with("duplicate entries") {
        FieldErrorReason::Duplicate
    } else {
        FieldErrorReason::Invalid
    };
    FieldError::new(field, reason, format!("Invalid value: {}", shortened(problem)))
}

/// A fault that no field is named for.
fn unplaced(path: &str, message: &str) -> FieldError {
    FieldError::new(
        path,
        FieldErrorReason::Invalid,
        format!("Invalid value: {}", shortened(message)),
    )
}

fn shortened(text: &str) -> String {
    field::shortened(text, MAX_TEXT)
}

/// Faults in the shape of an object and those that were found besides. The same duplicate is told by both.
#[must_use]
pub fn joined(shape: Vec<FieldError>, besides: Vec<FieldError>) -> Vec<FieldError> {
    let told = |fault: &FieldError| {
        fault.reason == FieldErrorReason::Duplicate
            && besides
                .iter()
                .any(|other| other.reason == fault.reason && other.field.starts_with(&fault.field))
    };
    let mut all: Vec<_> = shape.into_iter().filter(|fault| !told(fault)).collect();
    all.extend(besides);
    all
}

/// `own` and `tried` together. What the API server says is left out where a rule of ours has said it of the same
/// field, and so are its unplaced words about an object in which ours have found a place.
#[must_use]
pub fn merged(own: Vec<FieldError>, tried: Vec<FieldError>) -> Vec<FieldError> {
    let known = |fault: &FieldError| {
        own.iter().any(|known| {
            known.field == fault.field
                || (is_object(&fault.field) && known.field.starts_with(&format!("{}.", fault.field)))
        })
    };
    let new: Vec<_> = tried.into_iter().filter(|fault| !known(fault)).collect();
    own.into_iter().chain(new).collect()
}

/// Whether a path is that of a whole embedded object.
fn is_object(path: &str) -> bool {
    path.split('.').count() == 3
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PATH: &str = "spec.etcd.statefulset";

    fn status(value: Value) -> Status {
        serde_json::from_value(value).unwrap()
    }

    fn refused(value: Value) -> Vec<String> {
        match outcome(PATH, &status(value)) {
            Outcome::Refused(faults) | Outcome::Misshapen(faults) => {
                faults.iter().map(ToString::to_string).collect()
            }
            other @ (Outcome::Accepted | Outcome::Untold(_)) => panic!("{other:?}"),
        }
    }

    #[test]
    fn causes_are_put_below_the_path_of_the_object() {
        let faults = refused(
            json!({"status": "Failure", "code": 422, "reason": "Invalid", "message": "long", "details": {"causes": [
                {"reason": "FieldValueDuplicate", "message": "Duplicate value: \"c\"", "field": "spec.template.spec.containers[1].name"},
                {"reason": "SomethingNew", "message": "x", "field": "spec"}, {"reason": "FieldValueInvalid", "message": "unplaced", "field": ""},
            ]}}),
        );
        assert_eq!(
            faults,
            [
                "spec.etcd.statefulset.spec.template.spec.containers[1].name: Duplicate value: \"c\"",
                "spec.etcd.statefulset.spec: x"
            ]
        );
    }

    #[test]
    fn a_wrong_shape_is_a_fault_although_the_answer_is_a_500() {
        // As kube-apiserver 1.34 answers.
        let one = "failed to create typed patch object (ns/dr; apps/v1, Kind=StatefulSet): .spec.replicas: expected numeric (int or float), got string";
        let two = "failed to create typed patch object (ns/dr; apps/v1, Kind=StatefulSet): errors:\n  .spec.template.spec.bar: field not declared in schema\n  .spec.ports: duplicate entries for key [port=443,protocol=\"TCP\"]";
        let quantity = "failed to convert new object (ns/dr; apps/v1, Kind=StatefulSet) to proper version: unable to convert unstructured object to apps/v1, Kind=StatefulSet: quantities must match the regular expression '^x$'";
        for (message, faults) in [
            (
                one,
                vec![
                    "spec.etcd.statefulset.spec.replicas: Invalid value: expected numeric (int or float), got string",
                ],
            ),
            (
                two,
                vec![
                    "spec.etcd.statefulset.spec.template.spec.bar: Invalid value: unknown field, not in the schema of this API server",
                    "spec.etcd.statefulset.spec.ports: Invalid value: duplicate entries for key [port=443,protocol=\"TCP\"]",
                ],
            ),
            (
                quantity,
                vec![
                    "spec.etcd.statefulset: Invalid value: unable to convert unstructured object to apps/v1, Kind=StatefulSet: quantities must match the regular expression '^x$'",
                ],
            ),
        ] {
            assert_eq!(
                refused(json!({"status": "Failure", "code": 500, "message": message})),
                faults
            );
        }
    }

    #[test]
    fn what_says_nothing_of_the_object_is_no_fault() {
        for (code, message) in [
            (403, "exceeded quota"),
            (404, "namespaces \"x\" not found"),
            (409, "conflict"),
            (429, "too many requests"),
            (500, "etcdserver: request timed out"),
            (
                400,
                "admission webhook \"policy.example.com\" denied the request: label team is missing",
            ),
            (
                400,
                "admission webhook \"policy.example.com\" does not support dry run",
            ),
            (
                422,
                "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            ),
            (400, "the server rejected our request for an unknown reason"),
        ] {
            let status = status(json!({"status": "Failure", "code": code, "message": message}));
            assert_eq!(outcome(PATH, &status), Outcome::Untold(message.into()));
        }
    }

    #[test]
    fn what_one_service_only_may_have_is_not_tried() {
        let service = json!({"metadata": {"name": "n".repeat(63)}, "spec": {"clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"],
            "healthCheckNodePort": 30001, "ports": [{"port": 1, "nodePort": 30000}, 7]}});
        let tried = |service: &Value| {
            let spec = json!({"etcd": {"service": service}});
            trials(&spec, None, "ns").remove(0).object
        };
        let object = tried(&service);
        assert_eq!(object["spec"], json!({"ports": [{"port": 1}, 7]}));
        assert_eq!(object["metadata"]["name"], format!("{}-dry-run", "n".repeat(55)));
        let headless =
            json!({"metadata": {"name": "a"}, "spec": {"clusterIP": "None", "clusterIPs": ["None"]}});
        assert_eq!(tried(&headless)["spec"], headless["spec"]);
        for odd in [
            json!({}),
            json!({"spec": 7}),
            json!({"metadata": {"name": 7}, "spec": {"ports": {}}}),
        ] {
            assert_eq!(tried(&odd)["kind"], "Service");
        }
    }

    #[test]
    fn only_changed_bundles_are_tried() {
        let spec = json!({
            "etcd": {"statefulset": {"metadata": {"name": "etcd", "uid": "u"}}, "service": {}},
            "apiServer": {"statefulset": {}, "service": null},
            "controllerManager": null,
        });
        let paths = |old: Option<&Value>| -> Vec<String> {
            trials(&spec, old, "ns")
                .into_iter()
                .map(|trial| trial.path)
                .collect()
        };
        assert_eq!(
            paths(None),
            [
                "spec.etcd.statefulset",
                "spec.etcd.service",
                "spec.apiServer.statefulset"
            ]
        );
        let mut old = spec.clone();
        old["apiServer"]["statefulset"] = json!({"a": 1});
        assert_eq!(paths(Some(&old)), ["spec.apiServer.statefulset"]);
        let etcd = trials(&spec, None, "ns").remove(0).object;
        assert_eq!(
            etcd["metadata"],
            json!({"name": "vc-manager-dry-run", "namespace": "ns"})
        );
        assert_eq!(etcd["apiVersion"], "apps/v1");
    }

    #[test]
    fn nothing_is_told_twice() {
        let own = vec![FieldError::required("spec.etcd.statefulset.spec.a", "x")];
        let tried = vec![
            FieldError::required("spec.etcd.statefulset.spec.a", "y"),
            FieldError::required("spec.etcd.statefulset", "quantities must match"),
            FieldError::required("spec.etcd.service", "z"),
        ];
        let fields: Vec<_> = merged(own, tried).into_iter().map(|fault| fault.field).collect();
        assert_eq!(fields, ["spec.etcd.statefulset.spec.a", "spec.etcd.service"]);
    }
}
