//! Reviews of ClusterVersions.

pub mod default;
pub mod frozen;
mod policy;
mod quantity;
pub mod rules;
pub mod trial;
pub mod versions;

use serde_json::Value;

use crate::{api::FieldError, client::CallError};

use super::{
    cluster::Questions,
    review::{Operation, Review},
    verdict::{Findings, Verdict},
};

/// Users that are named when a deletion is refused.
const NAMED: usize = 5;

/// What to change in a ClusterVersion before it is stored.
///
/// A write that leaves `spec` as it is, such as a label, a finalizer or a status, does not change it either: it would
/// be a new revision that nobody asked for.
#[must_use]
pub fn mutate(review: &Review) -> Verdict {
    let Some((spec, old)) = written(review) else {
        return Verdict::allowed();
    };
    let (patch, warnings) = default::patch(spec, old);
    Verdict::Allowed { patch, warnings }
}

/// Whether a ClusterVersion may be stored or deleted.
pub async fn validate(review: &Review, cluster: Questions<'_>) -> Verdict {
    if review.operation == Operation::Delete && review.subresource.is_empty() {
        return deletion(review, cluster).await;
    }
    let Some((spec, old)) = written(review) else {
        return Verdict::allowed();
    };
    let Findings { faults, mut warnings } = rules::check(spec, old);
    if let Some(old) = old {
        warnings.extend(versions::warnings(spec, old));
    }
    let trials = trial::trials(spec, old, cluster.namespace());
    let frozen = async {
        match old {
            Some(old) => frozen_faults(review, spec, old, cluster).await,
            None => Ok(Vec::new()),
        }
    };
    let (tried, frozen) = futures::join!(cluster.try_out(&trials), frozen);

    let mut faults = trial::merged(faults, tried.faults);
    match frozen {
        Ok(frozen) => faults.extend(frozen),
        Err(error) if faults.is_empty() => {
            return Verdict::unavailable(format!(
                "cannot tell what the VirtualClusters of ClusterVersion {:?} run, which decides what of it may change: \
                 {error}; try again",
                review.name
            ));
        }
        // There is enough to mend already.
        Err(_) => {}
    }
    faults.sort_by_key(|fault| rules::rank(&fault.field));
    if let Some(why) = tried.untold {
        warnings.push(format!(
            "the embedded objects could not be tried out, and may be refused when a tenant is made: {why}"
        ));
    }
    Verdict::invalid(faults, warnings)
}

/// What may not change for the sake of tenants. They are asked for only if something of the kind differs.
async fn frozen_faults(
    review: &Review,
    spec: &Value,
    old: &Value,
    cluster: Questions<'_>,
) -> Result<Vec<FieldError>, String> {
    if frozen::changed(spec, old).is_empty() && !frozen::comes_or_goes(spec, old) {
        return Ok(Vec::new());
    }
    let users = cluster
        .tenants_of(&review.name)
        .await
        .map_err(|error| words(&error))?;
    let pins = users.iter().flat_map(|user| user.pins.iter().cloned()).collect();
    let contents = cluster.contents(pins).await.map_err(|error| words(&error))?;
    Ok(frozen::faults(spec, old, &users, &contents))
}

/// An error with its cause, in one line.
fn words(error: &CallError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// The spec that is being written and the one that stands there now, if what is written is a spec at all: no
/// subresource, no object on its way out, no spec that stays as it is.
fn written(review: &Review) -> Option<(&Value, Option<&Value>)> {
    let relevant = matches!(review.operation, Operation::Create | Operation::Update);
    if !relevant || !review.subresource.is_empty() {
        return None;
    }
    let object = review.object.as_ref()?;
    if object.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let old = review.old_object.as_ref().map(|old| &old.spec);
    (old != Some(&object.spec)).then_some((&object.spec, old))
}

/// A ClusterVersion that tenants use stays; the finalizer would keep it anyway, but on its way out for good.
async fn deletion(review: &Review, cluster: Questions<'_>) -> Verdict {
    let on_its_way = review
        .old_object
        .as_ref()
        .is_some_and(|old| old.metadata.deletion_timestamp.is_some());
    if on_its_way {
        return Verdict::allowed();
    }
    if review.name.is_empty() {
        return Verdict::bad_request(
            "a ClusterVersion without a name cannot be looked for among those in use",
        );
    }
    match cluster.tenants_of(&review.name).await {
        Ok(users) if users.is_empty() => Verdict::allowed(),
        Ok(users) => {
            let users: Vec<_> = users.into_iter().map(|user| user.key).collect();
            Verdict::forbidden(in_use(&review.name, &users))
        }
        Err(error) => Verdict::unavailable(format!(
            "cannot tell whether VirtualClusters use ClusterVersion {:?}: {}; try again",
            review.name,
            words(&error)
        )),
    }
}

fn in_use(name: &str, users: &[String]) -> String {
    let named = users[..users.len().min(NAMED)].join(", ");
    let users = match users.len() {
        1 => format!("VirtualCluster {named}"),
        many if many <= NAMED => format!("{many} VirtualClusters: {named}"),
        many => format!("{many} VirtualClusters: {named} and {} more", many - NAMED),
    };
    format!("ClusterVersion {name:?} is in use by {users}; delete what uses it first")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn review(change: impl FnOnce(&mut Value)) -> Review {
        let mut value = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "kind": {"group": "tenancy.x-k8s.io", "kind": "ClusterVersion"}, "name": "demo", "operation": "UPDATE",
                "object": {"metadata": {}, "spec": {"etcd": {"statefulset": {"spec": {"a": 1}}}}},
                "oldObject": {"metadata": {}, "spec": {"etcd": {"statefulset": {"spec": {}}}}},
            },
        });
        change(&mut value["request"]);
        Review::parse(value.to_string().as_bytes()).unwrap()
    }

    fn mutated(review: &Review) -> bool {
        matches!(mutate(review), Verdict::Allowed { patch, .. } if !patch.is_empty())
    }

    #[test]
    fn only_a_spec_that_is_written_is_changed() {
        assert!(mutated(&review(|_| {})));
        assert!(mutated(&review(|request| {
            request["operation"] = json!("CREATE");
            request["oldObject"] = Value::Null;
        })));
        let same = review(|_| {})
            .object
            .map(|object| object.spec)
            .unwrap_or_default();
        for (pointer, value) in [
            ("/oldObject/spec", same),
            (
                "/object/metadata",
                json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}),
            ),
            ("/operation", json!("CONNECT")),
            ("/object", Value::Null),
        ] {
            let changed = review(|request| *request.pointer_mut(pointer).unwrap() = value);
            assert!(!mutated(&changed), "{pointer}");
        }
        assert!(!mutated(&review(
            |request| request["subResource"] = json!("status")
        )));
    }

    #[test]
    fn users_are_named_up_to_five() {
        let users: Vec<_> = (1..=7).map(|n| format!("ns/t{n}")).collect();
        for (count, text) in [
            (1, "by VirtualCluster ns/t1;"),
            (2, "by 2 VirtualClusters: ns/t1, ns/t2;"),
            (5, "by 5 VirtualClusters: ns/t1, ns/t2, ns/t3, ns/t4, ns/t5;"),
            (
                7,
                "by 7 VirtualClusters: ns/t1, ns/t2, ns/t3, ns/t4, ns/t5 and 2 more;",
            ),
        ] {
            let told = in_use("demo", &users[..count]);
            assert!(told.contains(text), "{told}");
        }
    }
}
