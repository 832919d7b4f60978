//! What the status says of a tenant that runs and is looked after.

use super::{READY, UPGRADING, current, message_of, ready, set, shortened};
use crate::{
    api::{VirtualCluster, VirtualClusterStatus, virtual_cluster::RevisionStatus},
    controller::{
        credentials::{Credentials, Fault},
        plan::Plan,
    },
};
use k8s_openapi::jiff::Timestamp;

const CERTIFICATES_VALID: &str = "CertificatesValid";
const ROOT_CA_NEARS_EXPIRY: &str = "RootCANearsExpiry";
const DRIFTED: &str = "Drifted";

/// Problems that are counted: what they are called, the condition, and its status then.
pub(in crate::controller) const PROBLEMS: [(&str, &str, &str); 4] = [
    ("not_ready", READY, "False"),
    ("certificates", CERTIFICATES_VALID, "False"),
    ("root_ca_near_expiry", ROOT_CA_NEARS_EXPIRY, "True"),
    ("drifted", DRIFTED, "True"),
];

/// What a pass found.
#[derive(Clone, Debug)]
pub(in crate::controller) struct Found<'a> {
    /// The credentials, or what is wrong with them.
    pub(in crate::controller) credentials: Result<&'a Credentials, &'a Fault>,
    /// Why leaves that are due were not issued.
    pub(in crate::controller) not_issued: Option<&'a Fault>,
    /// What else is wrong with the certificates: in one word, in words.
    pub(in crate::controller) uneasy: Option<(&'static str, String)>,
    /// What is next.
    pub(in crate::controller) plan: &'a Plan,
    /// What differs from the revision and is left.
    pub(in crate::controller) difference: Option<Difference>,
    /// URL of the tenant's API.
    pub(in crate::controller) endpoint: Option<String>,
}

/// What differs from the revision and is left.
#[derive(Clone, Debug)]
pub(in crate::controller) struct Difference {
    /// Why it is left, in one word.
    pub(in crate::controller) reason: &'static str,
    /// What and why, in words.
    pub(in crate::controller) message: String,
}

/// A tenant of another manager is pinned to `revision`. Phase, message and reason stay as they are.
#[must_use]
pub(in crate::controller) fn adopted(
    vc: &VirtualCluster,
    root_namespace: &str,
    revision: &str,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    status
        .cluster_namespace
        .get_or_insert_with(|| root_namespace.to_owned());
    status.revision = Some(RevisionStatus {
        current: Some(revision.to_owned()),
        target: None,
        last_good: Some(revision.to_owned()),
        etcd: None,
        adopted: true,
    });
    let message = format!("runs what another manager made, recorded as {revision}");
    set(&mut status, vc, UPGRADING, "False", "Adopted", &message, now);
    status
}

/// Nothing can be done for the tenant until a person acts.
#[must_use]
pub(in crate::controller) fn blocked(vc: &VirtualCluster, why: &str, now: Timestamp) -> VirtualClusterStatus {
    let mut status = current(vc);
    set(&mut status, vc, READY, "False", "Blocked", &shortened(why), now);
    status
}

/// The tenant as a pass found it.
#[must_use]
pub(in crate::controller) fn kept(
    vc: &VirtualCluster,
    found: &Found<'_>,
    now: Timestamp,
) -> VirtualClusterStatus {
    let mut status = current(vc);
    if found.endpoint.is_some() {
        status.endpoint.clone_from(&found.endpoint);
    }
    match found.plan {
        Plan::Done | Plan::Do(_) => ready(&mut status, vc, now),
        Plan::Wait(wait) => {
            let told = status.conditions.iter().any(|condition| {
                condition.type_.as_deref() == Some(READY)
                    && condition.status == "False"
                    && condition.reason.as_deref() == Some("UpgradeFailed")
            });
            // What made it unready is told already.
            if !told {
                let problem = wait.problem.as_ref().map_or_else(String::new, |problem| {
                    format!(": pod {}: {}", problem.pod, problem.message)
                });
                let message = shortened(&format!("waits for {}{problem}", wait.message));
                set(&mut status, vc, READY, "False", "NotReady", &message, now);
            }
        }
        Plan::Blocked(why) => set(&mut status, vc, READY, "False", "Blocked", &shortened(why), now),
    }
    told(&mut status, vc, of_credentials(found), now);
    told(
        &mut status,
        vc,
        vec![of_difference(found.difference.as_ref())],
        now,
    );
    if let Ok(credentials) = found.credentials {
        status.certificates = Some(credentials.status.clone());
    }
    status
}

/// Says of a tenant whose certificates were just issued what they are.
pub(super) fn certified(
    status: &mut VirtualClusterStatus,
    vc: &VirtualCluster,
    credentials: &Credentials,
    now: Timestamp,
) {
    let found = Found {
        credentials: Ok(credentials),
        not_issued: None,
        uneasy: credentials.complaint.clone(),
        plan: &Plan::Done,
        difference: None,
        endpoint: None,
    };
    told(status, vc, of_credentials(&found), now);
    status.certificates = Some(credentials.status.clone());
}

fn told(status: &mut VirtualClusterStatus, vc: &VirtualCluster, conditions: Vec<Told>, now: Timestamp) {
    for (type_, value, reason, message) in conditions {
        let is_there = message_of(vc, type_).is_some();
        // Those that tell of a problem come with the problem.
        if value || is_there || type_ == CERTIFICATES_VALID {
            let text = if value { "True" } else { "False" };
            set(status, vc, type_, text, reason, &shortened(&message), now);
        }
    }
}

type Told = (&'static str, bool, &'static str, String);

fn of_credentials(found: &Found<'_>) -> Vec<Told> {
    let Found {
        credentials,
        not_issued,
        uneasy,
        ..
    } = found;
    let mut told = Vec::new();
    match (credentials, not_issued, uneasy) {
        (Err(fault), _, _) | (Ok(_), Some(fault), _) => {
            told.push((CERTIFICATES_VALID, false, fault.reason, fault.message.clone()));
        }
        (Ok(_), None, Some((reason, message))) => {
            told.push((CERTIFICATES_VALID, false, *reason, message.clone()));
        }
        (Ok(_), None, None) => told.push((
            CERTIFICATES_VALID,
            true,
            "Valid",
            "all certificates are valid, and renewed after two thirds of their life".into(),
        )),
    }
    if let Ok(credentials) = credentials {
        let end = credentials
            .status
            .root_ca_not_after
            .as_ref()
            .map_or_else(String::new, |time| time.0.to_string());
        told.push(if credentials.root_nears_its_end {
            (
                ROOT_CA_NEARS_EXPIRY,
                true,
                "LastYear",
                format!(
                    "the root CA ends at {end}, and every certificate with it. It is never replaced by the manager, since all \
                     clients of the tenant must be given the new one: plan its replacement (README, \"The end of a root CA\")"
                ),
            )
        } else {
            (ROOT_CA_NEARS_EXPIRY, false, "InTime", format!("the root CA ends at {end}"))
        });
    }
    told
}

fn of_difference(difference: Option<&Difference>) -> Told {
    match difference {
        Some(difference) => (DRIFTED, true, difference.reason, difference.message.clone()),
        None => (
            DRIFTED,
            false,
            "InSync",
            "everything is as the revision says".into(),
        ),
    }
}

/// Whether `vc` says already that nothing can be done because of this.
#[must_use]
pub(in crate::controller) fn is_blocked_by(vc: &VirtualCluster, why: &str) -> bool {
    message_of(vc, READY).as_deref() == Some(shortened(why).as_str())
}

/// Conditions of `found` that a person must learn of and that `vc` does not say yet: type, reason, message.
#[must_use]
pub(in crate::controller) fn news(
    vc: &VirtualCluster,
    found: &Found<'_>,
) -> Vec<(&'static str, &'static str, String)> {
    let blocked = match found.plan {
        Plan::Blocked(why) => Some((READY, false, "Blocked", why.clone())),
        _ => None,
    };
    of_credentials(found)
        .into_iter()
        .chain([of_difference(found.difference.as_ref())])
        .chain(blocked)
        // The status that tells of a problem.
        .filter(|(type_, value, ..)| [CERTIFICATES_VALID, READY].contains(type_) != *value)
        .filter(|(type_, _, _, message)| {
            message_of(vc, type_).as_deref() != Some(shortened(message).as_str())
        })
        .map(|(type_, _, reason, message)| (type_, reason, message))
        .collect()
}
