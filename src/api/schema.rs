//! The rules that the definitions themselves carry, so that a cluster whose webhook is down is not open.
//!
//! Only what rendering relies on is a rule here, and no rule may change what is stored: unknown fields are kept
//! at every level, there are no defaults, and an object that broke a rule before there was one can still get
//! labels, finalizers and a status, and be repaired and deleted. The API server does that by itself for a value
//! that did not change ("ratcheting"), but only where the schema knows the whole value: an object with preserved
//! unknown fields never counts as unchanged. Hence two forms of rule:
//!
//! * on a scalar, where the server's ratcheting works: `must be "v1"`;
//! * on an object, for what is missing in it: [`required`], which itself lets pass what was missing before.
//!
//! A stored value of another type than the schema says (a text where an object belongs) is the exception: CEL cannot
//! look at it, so such an object has to be repaired before it can be labelled, or lose a finalizer. The Go manager could
//! not read one either.
//!
//! The rules need Kubernetes 1.30, which is the first to know `optionalOldSelf`.
//!
//! The schema type "embedded resource" is not used. It drops unknown fields of the embedded metadata, it is not
//! ratcheted at all, and one stored object that does not conform makes every list fail.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, ValidationRule,
};
use schemars::{Schema, json_schema};
use serde_json::{Value, json};

use super::Component;

/// Most pods of a component, as the view of a template has it.
const MAX_REPLICAS: u32 = 1000;

/// Schema of a component's bundle below `spec` of a ClusterVersion.
pub(super) fn bundle(component: Component, description: &str) -> Schema {
    let name = component.name();
    json_schema!({
        "description": description,
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
        // That etcd and the apiserver need a Service is left to the webhook: CEL takes a null, which may stay where
        // it is, for a field that is missing.
        "x-kubernetes-validations": [required("statefulset", "a whole apps/v1 StatefulSet")],
        "properties": {
            "metadata": {
                "description": "Its name, when given, says which component this is.",
                "type": "object",
                "nullable": true,
                "x-kubernetes-preserve-unknown-fields": true,
                "properties": {
                    "name": exactly(name, "Name of the component; another one is refused.", true),
                },
            },
            "statefulset": stateful_set(component),
            "service": service(),
        },
    })
}

fn stateful_set(component: Component) -> Value {
    let name = component.name();
    let at_least = u32::from(component == Component::Etcd);
    json!({
        "description": "A whole apps/v1 StatefulSet.",
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-validations": [
            required("apiVersion", "must be \"apps/v1\""),
            required("kind", "must be \"StatefulSet\""),
            required("metadata.name", &format!("must be {name:?}")),
            required("spec.template.spec.containers", "at least one container"),
        ],
        "properties": {
            "apiVersion": exactly("apps/v1", "Always apps/v1.", false),
            "kind": exactly("StatefulSet", "Always StatefulSet.", false),
            "metadata": open_object(&json!({
                "name": exactly(name, "Name of the component: other programs find the StatefulSet by it.", false),
            })),
            "spec": open_object(&json!({
                "replicas": {
                    "description": "Number of pods; 1 when absent.",
                    "type": "integer",
                    "nullable": true,
                    "minimum": at_least,
                    "maximum": MAX_REPLICAS,
                },
                "template": open_object(&json!({
                    "spec": open_object(&json!({
                        "containers": {
                            "description": "The containers; arguments of ours are added to the first.",
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                        },
                    })),
                })),
            })),
        },
    })
}

fn service() -> Value {
    json!({
        "description": "A whole v1 Service.",
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-validations": [
            required("apiVersion", "must be \"v1\""),
            required("kind", "must be \"Service\""),
            required("metadata.name", "the name of the Service"),
        ],
        "properties": {
            "apiVersion": exactly("v1", "Always v1.", false),
            "kind": exactly("Service", "Always Service.", false),
            "metadata": open_object(&json!({
                "name": {
                    "description": "Name of the Service.",
                    "type": "string",
                    "x-kubernetes-validations": [
                        {"rule": "self != ''", "reason": "FieldValueRequired", "message": "the name of the Service"},
                    ],
                },
            })),
        },
    })
}

/// Schema of `spec.upgradePolicy`. What a schedule or a selector says is for the webhook.
pub(super) fn upgrade_policy() -> Value {
    let duration = || {
        json!({
            "description": "A duration such as 30s or 1h30m.",
            "type": "string",
            "nullable": true,
            "pattern": "^([0-9]+([.][0-9]*)?(ns|us|ms|s|m|h))+$",
        })
    };
    json!({
        "description": "How tenants are brought to a new revision. This version does not act on it.",
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "maxConcurrent": {
                "description": "Tenants that are upgraded at once: a number, or a percentage.",
                "x-kubernetes-int-or-string": true,
                "nullable": true,
                "x-kubernetes-validations": [{
                    "rule": "type(self) == int ? self >= 1 : type(self) == string && self.matches('^([1-9][0-9]?|100)%$')",
                    "message": "must be a number from 1, or a percentage from \"1%\" to \"100%\"",
                }],
            },
            "maxFailures": {
                "description": "Failures at which a rollout halts.",
                "type": "integer",
                "nullable": true,
                "minimum": 1,
            },
            "paused": {"description": "No upgrade starts.", "type": "boolean", "nullable": true},
            "soak": duration(),
            "stepTimeout": duration(),
            "surge": one_of(&["IfPossible", "Never"]),
            "rollback": one_of(&["Automatic", "Manual"]),
            "certificates": one_of(&["Always", "IfNeeded"]),
            "canary": {
                "description": "Tenants that are upgraded first.",
                "type": "object",
                "nullable": true,
                "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"count": {"type": "integer", "nullable": true, "minimum": 0}},
            },
            "windows": {
                "description": "When upgrades may start; at any time when there are none.",
                "type": "array",
                "nullable": true,
                "items": {
                    "type": "object",
                    "x-kubernetes-preserve-unknown-fields": true,
                    "required": ["schedule", "duration"],
                    "properties": {
                        "schedule": {"description": "Five fields of cron.", "type": "string"},
                        "duration": {"description": "How long the window is open.", "type": "string"},
                        "timeZone": {"description": "Name of a time zone; UTC when absent.", "type": "string", "nullable": true},
                    },
                },
            },
        },
    })
}

/// A string that can have these values only; by CEL, as in [`exactly`].
fn one_of(values: &[&str]) -> Value {
    json!({
        "type": "string",
        "nullable": true,
        "x-kubernetes-validations": [{
            "rule": format!("self in [{}]", values.iter().map(|value| format!("'{value}'")).collect::<Vec<_>>().join(", ")),
            "message": format!("must be one of {}", values.join(", ")),
        }],
    })
}

/// An object of which only `properties` are looked at.
fn open_object(properties: &Value) -> Value {
    json!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": properties,
    })
}

/// A string that can have one value only. A CEL rule and not an enum, because the API server stops at a wrong
/// enum and would not tell the other faults.
fn exactly(value: &str, description: &str, nullable: bool) -> Value {
    let mut schema = json!({
        "description": description,
        "type": "string",
        "x-kubernetes-validations": [{
            "rule": format!("self == '{value}'"),
            "message": format!("must be {value:?}"),
            "messageExpression": format!("'must be \"{value}\", is \"' + self + '\"'"),
        }],
    });
    if nullable {
        schema["nullable"] = Value::Bool(true);
    }
    schema
}

/// The rule, on an object, that it must have a field, unless it had none before.
pub(super) fn required(path: &str, what: &str) -> Value {
    let rule = required_rule(path);
    json!({
        "rule": rule,
        "optionalOldSelf": true,
        "fieldPath": format!(".{path}"),
        "reason": "FieldValueRequired",
        "message": what,
    })
}

fn required_rule(path: &str) -> String {
    let now = has("self", path);
    let before = has("old", path);
    format!("{now} || oldSelf.optMap(old, !({before})).orValue(false)")
}

/// CEL for "`object` has the field at `path`"; each step has to be asked for, as a missing one is an error.
fn has(object: &str, path: &str) -> String {
    let mut so_far = object.to_owned();
    let steps = path.split('.').map(|step| {
        so_far = format!("{so_far}.{step}");
        format!("has({so_far})")
    });
    steps.collect::<Vec<_>>().join(" && ")
}

/// Puts what cannot be said at a field into the root of a definition: that there is a `spec`.
///
/// The type says so, too, but as a plain `required`, which would also bind objects stored without one.
pub(super) fn require_spec(definition: &mut CustomResourceDefinition, what: &str) {
    for_each_root(definition, |root| {
        root.required = None;
        add_rule(
            root,
            ValidationRule {
                rule: required_rule("spec"),
                optional_old_self: Some(true),
                field_path: Some(".spec".into()),
                reason: Some("FieldValueRequired".into()),
                message: Some(what.into()),
                ..ValidationRule::default()
            },
        );
    });
}

/// Puts the rules on the name and the phase into the root of the definition of VirtualClusters.
pub(super) fn restrict_virtual_cluster(definition: &mut CustomResourceDefinition) {
    let longest = super::root_namespace::MAX_LENGTH - "n-000000-".len();
    for_each_root(definition, |root| {
        // A field path needs a declared field. The API server knows this one anyhow.
        let name = JSONSchemaProps {
            type_: Some("string".into()),
            ..JSONSchemaProps::default()
        };
        let metadata = JSONSchemaProps {
            type_: Some("object".into()),
            properties: Some([("name".to_owned(), name)].into()),
            ..JSONSchemaProps::default()
        };
        let properties = root.properties.get_or_insert_default();
        properties.insert("metadata".into(), metadata);
        // Of the namespace's length CEL knows nothing: with a longer one the webhook, then the manager refuse.
        add_rule(
            root,
            ValidationRule {
                rule: format!(
                    "oldSelf.hasValue() || (self.metadata.name.size() <= {longest} && !self.metadata.name.contains('.'))"
                ),
                optional_old_self: Some(true),
                field_path: Some(".metadata.name".into()),
                message: Some(format!(
                    "must be at most {longest} characters, none of them a dot: it becomes part of the name of a namespace"
                )),
                ..ValidationRule::default()
            },
        );
        add_rule(
            root,
            ValidationRule {
                rule: "!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase == '' || \
                       (has(self.status) && has(self.status.phase) && self.status.phase != '')"
                    .into(),
                field_path: Some(".status.phase".into()),
                message: Some("cannot set virtualcluster.Status.Phase to empty".into()),
                ..ValidationRule::default()
            },
        );
    });
}

fn for_each_root(definition: &mut CustomResourceDefinition, change: impl Fn(&mut JSONSchemaProps)) {
    for version in &mut definition.spec.versions {
        let schema = version.schema.as_mut();
        if let Some(root) = schema.and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            change(root);
        }
    }
}

fn add_rule(root: &mut JSONSchemaProps, rule: ValidationRule) {
    root.x_kubernetes_validations.get_or_insert_default().push(rule);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_asked_for() {
        assert_eq!(
            required_rule("metadata.name"),
            "has(self.metadata) && has(self.metadata.name) || \
             oldSelf.optMap(old, !(has(old.metadata) && has(old.metadata.name))).orValue(false)"
        );
    }
}
