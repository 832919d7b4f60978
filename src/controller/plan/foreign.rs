//! What others made where objects of a tenant would go. It is never overwritten.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Goal, Observed, lost_root};
use crate::{
    api::{Component, labels},
    controller::render::{self, TenantSecret},
};

/// Objects of others, in words.
#[derive(Default)]
struct Others(Vec<String>);

impl Others {
    fn look_at(&mut self, kind: &str, root: &str, name: &str, meta: &ObjectMeta) {
        if !render::is_ours(meta) {
            self.0
                .push(format!("{kind} {root}/{name}, made by {}", made_by(meta)));
        }
    }

    fn look_at_objects(&mut self, goal: &Goal<'_>, observed: &Observed, component: Component) {
        let root = &goal.tenant.root_namespace;
        let Some(bundle) = goal.template.bundle(component) else {
            return;
        };
        if let Some(stored) = observed.stateful_sets.get(&bundle.stateful_set_name) {
            self.look_at("StatefulSet", root, &bundle.stateful_set_name, &stored.metadata);
        }
        if let Some(service) = render::service(goal.template, component, goal.tenant)
            && let Some(stored) = observed.services.get(&service.name)
        {
            self.look_at("Service", root, &service.name, &stored.metadata);
        }
    }

    fn told(mut self) -> Option<String> {
        /// Named one by one; a status has no room for more.
        const SHOWN: usize = 3;
        if self.0.is_empty() {
            return None;
        }
        let more = self.0.len().saturating_sub(SHOWN);
        self.0.truncate(SHOWN);
        if more > 0 {
            self.0.push(format!("{more} more"));
        }
        Some(format!(
            "somebody else's objects stand where this tenant's would go, and are left alone; delete them, or, if they are the \
             tenant's own, annotate them (a Secret with {}, others with {}): {}",
            labels::ISSUED_FOR,
            labels::RENDERED_HASH,
            self.0.join("; ")
        ))
    }
}

/// Who made an object, as far as it says.
#[must_use]
pub fn made_by(meta: &ObjectMeta) -> String {
    /// More say nothing more.
    const SHOWN: usize = 3;
    let mut managers = render::field_managers(meta);
    managers.truncate(SHOWN);
    if managers.is_empty() {
        "somebody it does not name".to_owned()
    } else {
        managers.join(", ")
    }
}

/// What somebody else made where objects of this tenant would go, if there is any: it is never overwritten.
///
/// That holds while the tenant is provisioned, when what is not ours was there first. Once it has been Running, what
/// bears these names is its own, also if it comes from a backup and says nothing of who made it. Until then the root
/// CA and the service-account key are the exception, from when on they would be called lost if they were absent: they
/// are then only read, and whoever restores one does it by other means than ours. Before that they count like all
/// else: a CA that was there first is nobody's that the tenant could trust.
pub(super) fn in_the_way(goal: &Goal<'_>, observed: &Observed) -> Option<String> {
    let root = &goal.tenant.root_namespace;
    let mut others = Others::default();
    for secret in TenantSecret::ALL {
        let is_written = secret != TenantSecret::Etcd || goal.template.etcd.is_some();
        if let Some(stored) = observed.secrets.get(secret.name()).filter(|_| is_written)
            && !render::is_ours(&stored.metadata)
            && (secret.leaf().is_some() || !would_be_lost(goal, observed, secret))
        {
            others.look_at("Secret", root, secret.name(), &stored.metadata);
        }
    }
    for component in Component::ALL {
        others.look_at_objects(goal, observed, component);
    }
    others.told()
}

/// The same of what an upgrade writes.
pub(super) fn in_the_way_of_upgrade(goal: &Goal<'_>, observed: &Observed) -> Option<String> {
    let mut others = Others::default();
    for component in [Component::ApiServer, Component::ControllerManager] {
        others.look_at_objects(goal, observed, component);
    }
    others.told()
}

/// Whether `secret`, one of the two that are made once, would be lost and not never made, were it absent: for the sake
/// of what is the tenant's own.
fn would_be_lost(goal: &Goal<'_>, observed: &Observed, secret: TenantSecret) -> bool {
    let mut without = observed.clone();
    without
        .stateful_sets
        .retain(|_, set| render::is_ours(&set.metadata));
    without.secrets.retain(|name, stored| {
        let is_leaf = TenantSecret::ALL
            .into_iter()
            .any(|secret| secret.leaf().is_some() && secret.name() == name);
        name != secret.name() && (!is_leaf || render::is_ours(&stored.metadata))
    });
    lost_root(goal, &without).is_some()
}
