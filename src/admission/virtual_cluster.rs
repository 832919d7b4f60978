//! Reviews of VirtualClusters.

use serde_json::Value;

use super::{
    cluster::Questions,
    review::{Object, Operation, Review},
    verdict::{Findings, Verdict},
};
use crate::{
    api::{
        FieldError, labels,
        names::{is_dns_name, is_object_name},
        root_namespace,
    },
    pki::Validity,
};

/// Characters that the API server appends to a `generateName`.
const GENERATED: usize = 5;

/// Whether a VirtualCluster may be stored.
pub async fn validate(review: &Review, cluster: Questions<'_>) -> Verdict {
    let Findings { faults, mut warnings } = check(review);
    if review.operation == Operation::Create
        && let Some(object) = &review.object
    {
        warnings.extend(unknown_version(object, cluster).await);
    }
    Verdict::invalid(faults, warnings)
}

/// What is wrong with it, as far as the review itself shows. Pure. Nothing is wrong with a deletion, a subresource, and
/// what is on its way out.
#[must_use]
pub fn check(review: &Review) -> Findings {
    let mut findings = Findings::default();
    let Some(object) = review.object.as_ref().filter(|_| review.subresource.is_empty()) else {
        return findings;
    };
    if object.metadata.deletion_timestamp.is_some() {
        return findings;
    }
    let old = match (review.operation, &review.old_object) {
        (Operation::Create, _) => {
            creation(review, object, &mut findings.faults);
            None
        }
        (Operation::Update, Some(old)) => {
            update(review, object, old, &mut findings.faults);
            Some(old)
        }
        _ => return findings,
    };
    version_name_is_one(object, old, &mut findings.faults);
    values(object, old, &mut findings.faults);
    findings.warnings.extend(consent(object, old));
    findings
}

fn creation(review: &Review, object: &Object, faults: &mut Vec<FieldError>) {
    name(review, object, faults);
    if version_name(object).is_empty() {
        faults.push(FieldError::required(
            "spec.clusterVersionName",
            "the ClusterVersion that the control plane is made from; it cannot be given later",
        ));
    }
}

fn update(review: &Review, object: &Object, old: &Object, faults: &mut Vec<FieldError>) {
    // An empty one, which the Go manager's definition let pass, is of no use; it may be filled in.
    if !version_name(old).is_empty() && version_name(object) != version_name(old) {
        faults.push(FieldError::invalid(
            "spec.clusterVersionName",
            &object.spec["clusterVersionName"],
            "may not change: make another VirtualCluster",
        ));
    }
    // In the words of the Go manager, which shows the object's name as the bad value. (The definition has a status
    // subresource now, so this can only come by way of one that has not.)
    let phase = |object: &Object| {
        object.status["phase"]
            .as_str()
            .is_some_and(|phase| !phase.is_empty())
    };
    if phase(old) && !phase(object) {
        faults.push(FieldError::invalid(
            "status.phase",
            &Value::from(review.name.as_str()),
            "cannot set virtualcluster.Status.Phase to empty",
        ));
    }
}

/// The root namespace is named after namespace and name, and both have to fit in.
fn name(review: &Review, object: &Object, faults: &mut Vec<FieldError>) {
    let generated = object.metadata.name.is_empty();
    let (field, text) = if generated {
        ("metadata.generateName", &object.metadata.generate_name)
    } else {
        ("metadata.name", &object.metadata.name)
    };
    if text.is_empty() {
        // The API server's own rule.
        return;
    }
    let more = if generated { GENERATED } else { 0 };
    let root = root_namespace::name(&review.namespace, text, "");
    let length = root.len() + more;
    if length > root_namespace::MAX_LENGTH {
        faults.push(FieldError::invalid(
            field,
            &text.as_str().into(),
            format_args!(
                "the control plane's namespace, \"{}-<6 digits>-<name>\", would have {length} characters, and may have \
                 {}: the name is {} too long",
                review.namespace,
                root_namespace::MAX_LENGTH,
                length - root_namespace::MAX_LENGTH
            ),
        ));
    }
    let is_label = text
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if !is_label {
        faults.push(FieldError::invalid(
            field,
            &text.as_str().into(),
            "the control plane's namespace is named after it: only lower-case letters, digits and '-'",
        ));
    }
}

/// What cannot be the name of a ClusterVersion will never be one, and cannot be changed later.
fn version_name_is_one(object: &Object, old: Option<&Object>, faults: &mut Vec<FieldError>) {
    let name = version_name(object);
    if !name.is_empty() && !is_object_name(name) && old.is_none_or(|old| version_name(old) != name) {
        faults.push(FieldError::invalid(
            "spec.clusterVersionName",
            &name.into(),
            "no ClusterVersion can have this name: lower-case letters, digits, '-' and '.', at most 253 characters",
        ));
    }
}

/// Values that the manager reads. One that stands there already is not refused again.
fn values(object: &Object, old: Option<&Object>, faults: &mut Vec<FieldError>) {
    let written = |key: &str| {
        let value = &object.spec[key];
        (!value.is_null() && old.is_none_or(|old| old.spec[key] != *value)).then_some(value)
    };
    if let Some(days) = written("pkiExpireDays")
        && !days
            .as_i64()
            .is_some_and(|days| (1..=i64::from(Validity::MAX_DAYS)).contains(&days))
    {
        faults.push(FieldError::invalid(
            "spec.pkiExpireDays",
            days,
            format_args!("must be from 1 to {}", Validity::MAX_DAYS),
        ));
    }
    if let Some(domain) = written("clusterDomain")
        && !domain
            .as_str()
            .is_some_and(|domain| domain.is_empty() || is_dns_name(domain))
    {
        faults.push(FieldError::invalid(
            "spec.clusterDomain",
            domain,
            "must be a DNS name such as cluster.local",
        ));
    }
}

/// A label that looks like a consent and is none.
fn consent(object: &Object, old: Option<&Object>) -> Vec<String> {
    match object.consent() {
        Some(value) if value != "true" && old.is_none_or(|old| old.consent() != Some(value)) => {
            vec![format!(
                "metadata.labels[{}]: {value:?} agrees to nothing; only \"true\" does",
                labels::READY_FOR_UPGRADE
            )]
        }
        _ => Vec::new(),
    }
}

fn version_name(object: &Object) -> &str {
    object.spec["clusterVersionName"].as_str().unwrap_or_default()
}

/// A ClusterVersion may come after its tenants, so one that does not exist is no fault.
async fn unknown_version(object: &Object, cluster: Questions<'_>) -> Option<String> {
    let name = version_name(object);
    if !is_object_name(name) {
        return None;
    }
    match cluster.has_cluster_version(name).await {
        Ok(false) => Some(format!(
            "spec.clusterVersionName: there is no ClusterVersion {name:?} yet; nothing is made before there is"
        )),
        // That it could not be asked is of no interest to whoever makes a tenant.
        Ok(true) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn review(name: &str, namespace: &str, object: &Value, old: Option<&Value>) -> Review {
        let operation = if old.is_some() { "UPDATE" } else { "CREATE" };
        let value = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": {"group": "tenancy.x-k8s.io", "kind": "VirtualCluster"}, "name": name, "namespace": namespace,
            "operation": operation, "object": object, "oldObject": old,
        }});
        Review::parse(value.to_string().as_bytes()).unwrap()
    }

    fn told(review: &Review) -> Vec<String> {
        let Findings { faults, warnings } = check(review);
        faults.iter().map(ToString::to_string).chain(warnings).collect()
    }

    fn created(name: &str, namespace: &str, object: &Value) -> Vec<String> {
        told(&review(name, namespace, object, None))
    }

    fn updated(object: &Value, old: &Value) -> Vec<String> {
        told(&review("t", "ns", object, Some(old)))
    }

    #[test]
    fn a_name_has_to_fit_into_a_namespace() {
        let object = |name: &str| json!({"metadata": {"name": name}, "spec": {"clusterVersionName": "v"}});
        let longest = "n".repeat(63 - 8 - 4);
        assert!(created(&longest, "team", &object(&longest)).is_empty());
        let long = format!("{longest}n");
        assert_eq!(
            created(&long, "team", &object(&long)),
            [format!(
                "metadata.name: Invalid value: \"{long}\": the control plane's namespace, \"team-<6 digits>-<name>\", would \
                 have 64 characters, and may have 63: the name is 1 too long"
            )]
        );
        let dotted = created("a.b", "team", &object("a.b"));
        assert!(
            dotted[0].starts_with("metadata.name: Invalid value: \"a.b\": the control plane's namespace")
        );

        let generated =
            json!({"metadata": {"generateName": "n".repeat(47)}, "spec": {"clusterVersionName": "v"}});
        let told = created("", "team", &generated);
        assert!(
            told[0].starts_with("metadata.generateName: ") && told[0].ends_with("1 too long"),
            "{told:?}"
        );
    }

    #[test]
    fn values_of_a_new_one() {
        let object = json!({"metadata": {"name": "t", "labels": {"tenancy.x-k8s.io/ready-for-upgrade": "yes"}},
            "spec": {"clusterVersionName": "", "pkiExpireDays": 0, "clusterDomain": "Cluster_local"}});
        assert_eq!(
            created("t", "ns", &object),
            [
                "spec.clusterVersionName: Required value: the ClusterVersion that the control plane is made from; it cannot be given later",
                "spec.pkiExpireDays: Invalid value: 0: must be from 1 to 3650",
                "spec.clusterDomain: Invalid value: \"Cluster_local\": must be a DNS name such as cluster.local",
                "metadata.labels[tenancy.x-k8s.io/ready-for-upgrade]: \"yes\" agrees to nothing; only \"true\" does",
            ]
        );
        for bad in ["inj?x=y", "used/status", "Bad Name!"] {
            let object = json!({"metadata": {"name": "t"}, "spec": {"clusterVersionName": bad}});
            let told = created("t", "ns", &object);
            assert!(
                told[0].contains("no ClusterVersion can have this name"),
                "{told:?}"
            );
            assert!(updated(&object, &object).is_empty());
        }
        let good = json!({"metadata": {"name": "t", "labels": {"tenancy.x-k8s.io/ready-for-upgrade": "true"}},
            "spec": {"clusterVersionName": "v", "pkiExpireDays": 3650, "clusterDomain": ""}});
        assert!(created("t", "ns", &good).is_empty());
    }

    #[test]
    fn what_may_not_change() {
        let old =
            json!({"spec": {"clusterVersionName": "v", "pkiExpireDays": -1}, "status": {"phase": "Running"}});
        assert!(updated(&old, &old).is_empty());
        let new = json!({"spec": {"clusterVersionName": "w", "pkiExpireDays": -1}, "status": {"phase": ""}});
        assert_eq!(
            updated(&new, &old),
            [
                "spec.clusterVersionName: Invalid value: \"w\": may not change: make another VirtualCluster",
                "status.phase: Invalid value: \"t\": cannot set virtualcluster.Status.Phase to empty",
            ]
        );
        let unread =
            json!({"spec": {"clusterVersionName": "v", "pkiExpireDays": 4000}, "status": {"phase": "Error"}});
        assert_eq!(
            updated(&unread, &old),
            ["spec.pkiExpireDays: Invalid value: 4000: must be from 1 to 3650"]
        );
        // What names none may get one.
        let nameless = json!({"spec": {"clusterVersionName": ""}});
        let named = json!({"spec": {"clusterVersionName": "v"}});
        assert!(updated(&named, &nameless).is_empty());
        // Not yet set, in any of its forms.
        for status in [json!(null), json!({}), json!({"phase": ""})] {
            let mut young = old.clone();
            young["status"] = status;
            assert!(updated(&young, &young).is_empty());
        }
    }

    #[test]
    fn what_always_passes() {
        let bad = json!({"metadata": {"name": "A.B"}, "spec": {}});
        let mut review = review("A.B", "ns", &bad, None);
        assert!(!told(&review).is_empty());
        review.subresource = "status".into();
        assert!(told(&review).is_empty());
        review.subresource.clear();
        let going = Some("2026-01-01T00:00:00Z".to_owned());
        review.object.as_mut().unwrap().metadata.deletion_timestamp = going;
        assert!(told(&review).is_empty());
        review.object = None;
        review.operation = Operation::Delete;
        assert!(told(&review).is_empty());
    }
}
