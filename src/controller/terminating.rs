//! A root namespace that is being deleted: since when, what keeps it, what to do about that. Pure.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::Namespace,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt as _;

/// Pods are given 30 s to end, and what is in a namespace goes within a few more.
const ORDINARY: SignedDuration = SignedDuration::from_secs(30);
/// How soon it is looked at again, at first and at last.
const LOOKS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));
/// The finalizer that every namespace has in its spec: that of the namespace controller.
const NAMESPACE_CONTROLLER: &str = "kubernetes";

/// Whether `namespace` has been on its way out for longer than it should take.
#[must_use]
pub(super) fn is_overdue(namespace: &Namespace, now: Timestamp) -> bool {
    age(namespace, now).is_some_and(|age| age > ORDINARY)
}

/// Why `namespace` is not gone and what to do, once that is known or has taken too long; `None` before, and for one
/// that is not being deleted. The text does not change unless the reason does.
#[must_use]
pub(super) fn report(namespace: &Namespace, now: Timestamp) -> Option<String> {
    let since = &namespace.metadata.deletion_timestamp.as_ref()?.0;
    let told: Vec<_> = conditions(namespace).collect();
    let is_known = told
        .iter()
        .any(|(type_, _)| *type_ != "NamespaceContentRemaining");
    if !is_known && !is_overdue(namespace, now) {
        return None;
    }
    let mut why: Vec<_> = told.iter().map(|(_, message)| (*message).to_owned()).collect();
    let holders = holders(namespace);
    if !holders.is_empty() {
        why.push(format!(
            "the namespace itself has the finalizers {}",
            holders.join(", ")
        ));
    }
    if why.is_empty() {
        why.push("its status does not say what remains".into());
    }
    Some(format!(
        "namespace {} is being deleted since {since} and is not gone; {}: {}",
        namespace.name_any(),
        advice(&told, !holders.is_empty()),
        why.join("; ")
    ))
}

/// When to look again at a namespace that is being deleted: the longer it takes, the less often.
#[must_use]
pub(super) fn next_look(namespace: &Namespace, now: Timestamp) -> Duration {
    let age = age(namespace, now).and_then(|age| Duration::try_from(age).ok());
    (age.unwrap_or_default() / 4).clamp(LOOKS.0, LOOKS.1)
}

fn age(namespace: &Namespace, now: Timestamp) -> Option<SignedDuration> {
    let since = namespace.metadata.deletion_timestamp.as_ref()?;
    Some(now.duration_since(since.0))
}

/// What the namespace controller says: type and message of each condition that holds.
fn conditions(namespace: &Namespace) -> impl Iterator<Item = (&str, &str)> {
    let status = namespace.status.as_ref();
    let all = status
        .into_iter()
        .flat_map(|status| status.conditions.iter().flatten());
    all.filter(|condition| condition.status == "True")
        .map(|condition| {
            let message = condition.message.as_deref().unwrap_or(&condition.type_);
            (condition.type_.as_str(), message)
        })
}

/// Finalizers of the namespace object, but for the one that goes when it is empty.
fn holders(namespace: &Namespace) -> Vec<&str> {
    let of_spec = namespace
        .spec
        .as_ref()
        .into_iter()
        .flat_map(|spec| spec.finalizers.iter().flatten())
        .filter(|name| *name != NAMESPACE_CONTROLLER);
    of_spec
        .chain(namespace.finalizers())
        .map(String::as_str)
        .collect()
}

/// What a person can do, for the condition that most keeps everything else from going.
fn advice(told: &[(&str, &str)], held: bool) -> &'static str {
    let says = |type_: &str| told.iter().any(|(known, _)| *known == type_);
    if says("NamespaceDeletionDiscoveryFailure") || says("NamespaceDeletionGroupVersionParsingFailure") {
        "an API of the super cluster does not answer, so that nobody knows what is left; repair its APIService or delete it"
    } else if says("NamespaceDeletionContentFailure") {
        "something refuses the deletion of its content; see to what is named here"
    } else if says("NamespaceFinalizersRemaining") {
        "let those who set these finalizers finish; if they are no more, remove the finalizers from the objects"
    } else if held {
        "let those who set them finish; if they are no more, remove the finalizers from the namespace"
    } else if says("NamespaceContentRemaining") {
        "see why these do not go (a node that does not answer keeps its pods)"
    } else {
        "see whether the kube-controller-manager of the super cluster runs"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + seconds).expect("a time")
    }

    /// One that is being deleted since [`at`]`(0)`.
    fn namespace(conditions: &[(&str, &str, &str)], finalizers: &[&str]) -> Namespace {
        let conditions: Vec<_> = conditions
            .iter()
            .map(|(type_, status, message)| json!({"type": type_, "status": status, "message": message}))
            .collect();
        build(json!({
            "metadata": {"name": "root", "deletionTimestamp": at(0).to_string()},
            "spec": {"finalizers": finalizers},
            "status": {"phase": "Terminating", "conditions": conditions},
        }))
    }

    fn build(value: Value) -> Namespace {
        serde_json::from_value(value).expect("a Namespace")
    }

    #[test]
    fn nothing_is_said_of_what_goes_as_it_should() {
        let alive = build(json!({"metadata": {"name": "root"}}));
        assert_eq!(report(&alive, at(1000)), None);
        assert!(!is_overdue(&alive, at(1000)));
        let going = namespace(
            &[
                (
                    "NamespaceContentRemaining",
                    "True",
                    "Some resources are remaining: pods.",
                ),
                (
                    "NamespaceFinalizersRemaining",
                    "False",
                    "All content-preserving finalizers finished",
                ),
            ],
            &["kubernetes"],
        );
        assert_eq!(report(&going, at(30)), None);
        // Nor when this machine's clock is behind that of the API server.
        assert_eq!(report(&going, at(-60)), None);
    }

    #[test]
    fn what_remains_is_said_at_once_if_it_will_not_go_by_itself() {
        let message = "Some content in the namespace has finalizers remaining: example.com/held in 1 resource instances";
        let text = report(
            &namespace(
                &[("NamespaceFinalizersRemaining", "True", message)],
                &["kubernetes"],
            ),
            at(1),
        )
        .expect("it is known");
        let expected = "namespace root is being deleted since 2026-01-01T00:00:00Z and is not gone; let those who set \
            these finalizers finish; if they are no more, remove the finalizers from the objects: ";
        assert_eq!(text, format!("{expected}{message}"));
    }

    #[test]
    fn what_takes_too_long_is_said() {
        let pods = [(
            "NamespaceContentRemaining",
            "True",
            "Some resources are remaining: pods.",
        )];
        for (conditions, finalizers, part) in [
            (
                &pods[..],
                &["kubernetes"][..],
                "see why these do not go (a node that does not answer keeps its pods): Some resources",
            ),
            (
                &[][..],
                &["kubernetes", "example.com/hold"][..],
                "from the namespace: the namespace itself has the finalizers example.com/hold",
            ),
            (
                &[][..],
                &["kubernetes"][..],
                "of the super cluster runs: its status does not say what remains",
            ),
            (
                &[
                    (
                        "NamespaceDeletionDiscoveryFailure",
                        "True",
                        "Discovery failed for some groups",
                    ),
                    pods[0],
                ][..],
                &["kubernetes"][..],
                "repair its APIService",
            ),
        ] {
            let namespace = namespace(conditions, finalizers);
            let text = report(&namespace, at(31)).expect("it is overdue");
            assert!(text.contains(part), "{text}");
            assert_eq!(
                report(&namespace, at(3600)).as_ref(),
                Some(&text),
                "it stays as it is"
            );
        }
    }

    #[test]
    fn looks_become_rare() {
        let namespace = namespace(&[], &[]);
        let after = |seconds| next_look(&namespace, at(seconds)).as_secs();
        assert_eq!([-60, 0, 8, 40, 120, 86_400].map(after), [2, 2, 2, 10, 30, 30]);
    }
}
