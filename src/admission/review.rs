//! `AdmissionReview` on the wire, versions v1 and v1beta1 of `admission.k8s.io`, which are alike in all that is used.
//!
//! The types are our own. kube's write the patch as a list of numbers, where the API says base64, and say nothing of
//! codes and causes; its typed `metadata` also drops what it does not know. Here `spec` and `status` stay JSON as the
//! API server sent it, and the parts nobody looks at, `managedFields` above all, are skipped unread.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use json_patch::PatchOperation;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::verdict::{Refusal, Verdict};
use crate::api::labels;

/// Versions of the review that are spoken.
const API_VERSIONS: [&str; 2] = ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"];

/// Most characters of a version that is not spoken that are said again.
const SHOWN: usize = 60;

/// Why a body is no review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// No JSON, or JSON of another shape. Only where and how: the words would repeat what stands there.
    #[error("the body is no AdmissionReview: {} at line {}, column {}", category(.0), .0.line(), .0.column())]
    Malformed(#[from] serde_json::Error),
    /// A version that is not spoken.
    #[error("apiVersion {0:?} is not spoken here: {one} and {two} are", one = API_VERSIONS[0], two = API_VERSIONS[1])]
    Version(String),
    /// Another kind than `AdmissionReview`, or one without a request.
    #[error("the body is no AdmissionReview with a request")]
    NoRequest,
}

fn category(error: &serde_json::Error) -> &'static str {
    match error.classify() {
        serde_json::error::Category::Eof => "it ends too soon",
        serde_json::error::Category::Data => "a value of another type than expected",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "no JSON, or too deep",
    }
}

/// What is being done to the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// It is made.
    Create,
    /// It is changed.
    Update,
    /// It is deleted.
    Delete,
    /// Anything else; nothing of it is our business.
    Other,
}

impl Operation {
    /// Value of the label `operation`, and the word in a log line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Other => "other",
        }
    }
}

/// A question of the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    /// Version of the review, which the answer has to have, too.
    api_version: &'static str,
    /// Which question this is; the answer says it again.
    uid: String,
    /// Group of the object.
    pub group: String,
    /// Kind of the object.
    pub kind: String,
    /// Subresource that is written, or empty.
    pub subresource: String,
    /// Namespace of the object, or empty.
    pub namespace: String,
    /// What is being done.
    pub operation: Operation,
    /// Who does it.
    pub user: String,
    /// Name of the object. While it is being made from a `generateName`, that.
    pub name: String,
    /// The object as it would be stored; absent when it is deleted.
    pub object: Option<Object>,
    /// The object as it is stored; absent when it is made.
    pub old_object: Option<Object>,
}

/// The parts of an object that rules look at.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Object {
    /// Its metadata.
    #[serde(deserialize_with = "or_default")]
    pub metadata: Metadata,
    /// Its spec; null when it has none.
    pub spec: Value,
    /// Its status; null when it has none.
    pub status: Value,
}

/// The parts of an object's metadata that rules look at.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// Name; empty while it is being made from a `generateName`.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// What the API server makes the name from.
    #[serde(deserialize_with = "or_default")]
    pub generate_name: String,
    /// Set once it is being deleted.
    pub deletion_timestamp: Option<String>,
    /// Labels.
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
}

impl Object {
    /// The label by which the owner agrees to an upgrade.
    #[must_use]
    pub fn consent(&self) -> Option<&str> {
        self.metadata
            .labels
            .get(labels::READY_FOR_UPGRADE)
            .map(String::as_str)
    }
}

/// Null is what is absent.
fn or_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: serde::Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<Request>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: GroupKind,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    operation: String,
    #[serde(default)]
    user_info: UserInfo,
    object: Option<Object>,
    old_object: Option<Object>,
}

#[derive(Deserialize)]
struct GroupKind {
    #[serde(default)]
    group: String,
    kind: String,
}

#[derive(Default, Deserialize)]
struct UserInfo {
    #[serde(default)]
    username: String,
}

impl Review {
    /// Reads the body of a request.
    pub fn parse(body: &[u8]) -> Result<Self, ReviewError> {
        let envelope: Envelope = serde_json::from_slice(body)?;
        let api_version = API_VERSIONS
            .into_iter()
            .find(|version| *version == envelope.api_version)
            .ok_or_else(|| ReviewError::Version(envelope.api_version.chars().take(SHOWN).collect()))?;
        let request = envelope
            .request
            .filter(|_| envelope.kind == "AdmissionReview")
            .ok_or(ReviewError::NoRequest)?;
        let metadata = |object: &'_ Option<Object>| object.as_ref().map(|object| object.metadata.clone());
        let (new, old) = (metadata(&request.object), metadata(&request.old_object));
        // In a deletion of a whole collection the request itself names none.
        let name = [
            Some(request.name.as_str()),
            new.as_ref().map(|metadata| metadata.name.as_str()),
            new.as_ref().map(|metadata| metadata.generate_name.as_str()),
            old.as_ref().map(|metadata| metadata.name.as_str()),
        ]
        .into_iter()
        .flatten()
        .find(|name| !name.is_empty())
        .unwrap_or_default()
        .to_owned();
        Ok(Self {
            api_version,
            uid: request.uid,
            group: request.kind.group,
            kind: request.kind.kind,
            subresource: request.sub_resource,
            namespace: request.namespace,
            operation: match request.operation.as_str() {
                "CREATE" => Operation::Create,
                "UPDATE" => Operation::Update,
                "DELETE" => Operation::Delete,
                _ => Operation::Other,
            },
            user: request.user_info.username,
            name,
            object: request.object,
            old_object: request.old_object,
        })
    }

    /// The answer, as JSON.
    pub fn answer(&self, verdict: &Verdict) -> Result<Vec<u8>, serde_json::Error> {
        let patch = match verdict {
            Verdict::Allowed { patch, .. } if !patch.is_empty() => Some(encode(patch)?),
            _ => None,
        };
        serde_json::to_vec(&Answer {
            api_version: self.api_version,
            kind: "AdmissionReview",
            response: Response {
                uid: &self.uid,
                allowed: matches!(verdict, Verdict::Allowed { .. }),
                patch_type: patch.is_some().then_some("JSONPatch"),
                patch,
                warnings: match verdict {
                    Verdict::Allowed { warnings, .. } | Verdict::Refused { warnings, .. } => warnings,
                },
                status: match verdict {
                    Verdict::Allowed { .. } => None,
                    Verdict::Refused { refusal, .. } => Some(self.status(refusal)),
                },
            },
        })
    }

    fn status<'a>(&'a self, refusal: &'a Refusal) -> Status<'a> {
        Status {
            outcome: "Failure",
            code: refusal.code,
            reason: refusal.reason,
            message: refusal.message(self),
            details: Details {
                name: &self.name,
                group: &self.group,
                kind: &self.kind,
                causes: refusal
                    .causes
                    .iter()
                    .map(|cause| Cause {
                        reason: cause.reason.as_str(),
                        message: &cause.message,
                        field: &cause.field,
                    })
                    .collect(),
            },
        }
    }
}

/// A patch as the API wants it: base64 of RFC 6902.
fn encode(patch: &[PatchOperation]) -> Result<String, serde_json::Error> {
    Ok(STANDARD.encode(serde_json::to_vec(patch)?))
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    api_version: &'a str,
    kind: &'a str,
    response: Response<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    // Never one without the other: the API server refuses that.
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    warnings: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status<'a>>,
}

/// A `Status` of meta/v1.
#[derive(Serialize)]
struct Status<'a> {
    #[serde(rename = "status")]
    outcome: &'a str,
    code: u16,
    reason: &'a str,
    message: String,
    details: Details<'a>,
}

#[derive(Serialize)]
struct Details<'a> {
    name: &'a str,
    group: &'a str,
    kind: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<Cause<'a>>,
}

#[derive(Serialize)]
struct Cause<'a> {
    reason: &'a str,
    message: &'a str,
    field: &'a str,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::FieldError;

    fn body(version: &str) -> Value {
        json!({
            "apiVersion": version, "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "kind": {"group": "tenancy.x-k8s.io", "version": "v1alpha1", "kind": "ClusterVersion"},
                "resource": {"group": "tenancy.x-k8s.io", "version": "v1alpha1", "resource": "clusterversions"},
                "name": "demo", "operation": "UPDATE", "userInfo": {"username": "jane", "groups": ["a"]},
                "object": {"metadata": {"name": "demo", "managedFields": [{"a": 1}], "labels": null,
                    "deletionTimestamp": null}, "spec": {"etcd": null, "big": 9_007_199_254_740_993_u64}},
                "oldObject": null, "dryRun": true, "options": {"kind": "UpdateOptions"},
            },
        })
    }

    fn parse(value: &Value) -> Result<Review, ReviewError> {
        Review::parse(value.to_string().as_bytes())
    }

    #[test]
    fn both_versions_are_spoken() {
        for version in API_VERSIONS {
            let review = parse(&body(version)).unwrap();
            assert_eq!(
                (review.name.as_str(), review.user.as_str(), review.operation),
                ("demo", "jane", Operation::Update)
            );
            assert_eq!(review.old_object, None);
            assert_eq!(
                review.object.as_ref().unwrap().spec,
                json!({"etcd": null, "big": 9_007_199_254_740_993_u64})
            );
            let answer: Value = serde_json::from_slice(&review.answer(&Verdict::allowed()).unwrap()).unwrap();
            assert_eq!(
                answer,
                json!({"apiVersion": version, "kind": "AdmissionReview", "response": {"uid": "u-1", "allowed": true}})
            );
        }
    }

    #[test]
    fn a_name_that_is_yet_to_be_made() {
        let mut value = body(API_VERSIONS[0]);
        value["request"]["name"] = json!("");
        value["request"]["object"]["metadata"] = json!({"generateName": "team-"});
        assert_eq!(parse(&value).unwrap().name, "team-");
        value["request"]["object"] = json!(null);
        value["request"]["oldObject"] = json!({"metadata": {"name": "old"}});
        assert_eq!(parse(&value).unwrap().name, "old");
    }

    #[test]
    fn what_is_no_review() {
        for (change, text) in [
            (
                ("/apiVersion", json!("admission.k8s.io/v2")),
                "apiVersion \"admission.k8s.io/v2\" is not spoken here: admission.k8s.io/v1 and admission.k8s.io/v1beta1 are",
            ),
            (
                ("/kind", json!("Pod")),
                "the body is no AdmissionReview with a request",
            ),
            (
                ("/request", json!(null)),
                "the body is no AdmissionReview with a request",
            ),
            (
                ("/request/object/metadata", json!(7)),
                "the body is no AdmissionReview: ",
            ),
        ] {
            let mut value = body(API_VERSIONS[0]);
            *value.pointer_mut(change.0).unwrap() = change.1;
            let error = parse(&value).unwrap_err().to_string();
            assert!(error.starts_with(text), "{error}");
        }
        let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
        for text in ["", "{", "[]", "null", deep.as_str()] {
            assert!(Review::parse(text.as_bytes()).is_err());
        }
    }

    #[test]
    fn a_refusal_is_an_invalid_error_of_the_api_server() {
        let review = parse(&body(API_VERSIONS[0])).unwrap();
        let verdict = Verdict::invalid(
            vec![
                FieldError::required("spec.a", "must be \"v1\""),
                FieldError::forbidden("spec.b", "no"),
            ],
            vec!["careful".into()],
        );
        let answer: Value = serde_json::from_slice(&review.answer(&verdict).unwrap()).unwrap();
        assert_eq!(
            answer["response"],
            json!({"uid": "u-1", "allowed": false, "warnings": ["careful"], "status": {
                "status": "Failure", "code": 422, "reason": "Invalid",
                "message": "ClusterVersion.tenancy.x-k8s.io \"demo\" is invalid: [spec.a: Required value: must be \"v1\", spec.b: Forbidden: no]",
                "details": {"name": "demo", "group": "tenancy.x-k8s.io", "kind": "ClusterVersion", "causes": [
                    {"reason": "FieldValueRequired", "message": "Required value: must be \"v1\"", "field": "spec.a"},
                    {"reason": "FieldValueForbidden", "message": "Forbidden: no", "field": "spec.b"},
                ]},
            }})
        );
    }
}
