//! Reading of `metadata.managedFields`: who owns which field of an object. Pure.
//!
//! What is applied as [`FIELD_MANAGER`] is owned by its `Apply` entry. Whoever changes such a field takes it out of that
//! entry, and whoever deletes it leaves it without an owner. So what an object has lost of what was applied shows in its
//! metadata alone, and no request is needed to find it.
//!
//! The format, `FieldsV1`, is that of sigs.k8s.io/structured-merge-diff: a tree whose keys are `f:<field>`,
//! `k:<keys of a list element, as JSON>`, `v:<element of a set, as JSON>` and `i:<index>`. A node without children is
//! owned as it is, with all that is in it (a scalar, an atomic list or map, an empty map); one with children is owned
//! itself only if `.` is among them. Keys of other kinds are ignored, as the API server does.

mod extract;
mod migrate;
mod ownership;

use std::fmt;

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, ObjectMeta},
    jiff::{SignedDuration, Timestamp},
};
use serde_json::Value;

pub use extract::{owned, owned_by};
pub use migrate::migrated;
use ownership::{Entry, Place, is_owned};

use crate::api::FIELD_MANAGER;

/// A field of an object that is not as it was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// Where, as in `spec.template.spec.containers[name=apiserver].image`. Empty when nothing of the object is ours.
    pub path: String,
    /// Nobody owns it any more: it was deleted, or set to a `false`, zero or empty text that is stored as no value.
    /// Otherwise someone else has set it.
    pub deleted: bool,
    /// Who did it. Of what was deleted the object does not tell: it is who last wrote to it after we did, if anyone.
    pub by: Option<Culprit>,
}

/// Who changed a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Culprit {
    /// Its field manager, which is the name of the program if that does not name one: `kubectl-edit`, `argocd`.
    pub manager: String,
    /// `Apply`, or `Update` for all other verbs.
    pub operation: String,
    /// When it last changed what it owns.
    pub at: Option<Timestamp>,
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.path.is_empty() {
            "the whole object"
        } else {
            &self.path
        })?;
        match (&self.by, self.deleted) {
            (Some(culprit), false) => write!(f, " (set by {culprit})"),
            (Some(culprit), true) => write!(f, " (deleted; last written by {culprit})"),
            (None, true) => f.write_str(" (deleted)"),
            (None, false) => Ok(()),
        }
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.manager)?;
        match self.at {
            Some(at) => write!(f, " at {at}"),
            None => Ok(()),
        }
    }
}

/// Fields that nobody owns, whoever sets them (apimachinery's `stripMetaManager`), and the status, which is another
/// writer's.
const NEVER_OWNED: [&str; 11] = [
    "apiVersion",
    "kind",
    "metadata.creationTimestamp",
    "metadata.generation",
    "metadata.managedFields",
    "metadata.name",
    "metadata.namespace",
    "metadata.resourceVersion",
    "metadata.selfLink",
    "metadata.uid",
    "status",
];

const APPLY: &str = "Apply";
const REPLICAS: &str = "spec.replicas";

/// What of `rendered`, as it was applied last, is not owned by our `Apply` entry any more: each field that someone
/// changed or deleted, of what is gone as a whole only the topmost.
///
/// No drift is:
/// - what others added;
/// - a field that is owned by an `Update` under our own name: something changed it on the way of our own request, and
///   would again;
/// - the number of replicas while an autoscaler has it, see [`scaled_by_other`].
///
/// What a mutating webhook makes of an applied field does not change its owner, so that it is not seen here. Neither is
/// a field that is set to what it was set to already.
#[must_use]
pub fn drift(rendered: &Value, stored: &ObjectMeta) -> Vec<Drift> {
    let entries = Entry::all(stored);
    let root = Place::root(&entries);
    if !is_applied_by_us(stored) {
        return vec![Drift {
            path: String::new(),
            deleted: false,
            by: root.culprit(),
        }];
    }
    let walk = Walk {
        autoscaled: scaled_by_other(stored).is_some(),
        last_writer: last_other_writer(&entries),
    };
    walk.at(rendered, &root, "").drifts
}

/// Whether anything of the object is owned by what we applied.
#[must_use]
pub fn is_applied_by_us(stored: &ObjectMeta) -> bool {
    let mut entries = stored.managed_fields.iter().flatten();
    entries.any(|entry| is_applied_by(entry, FIELD_MANAGER))
}

/// The field manager that has set the number of replicas through the subresource `scale`, unless it is kubectl: an
/// autoscaler, which has the say in it. A person who scales by hand (`kubectl scale`) has not.
#[must_use]
pub fn scaled_by_other(stored: &ObjectMeta) -> Option<String> {
    let entries = stored.managed_fields.iter().flatten();
    entries
        .filter(|entry| entry.subresource.as_deref() == Some("scale"))
        .filter(|entry| is_owned(entry, &["spec", "replicas"]))
        .filter_map(|entry| entry.manager.as_deref())
        .find(|manager| !is_kubectl(manager) && *manager != FIELD_MANAGER)
        .map(ToOwned::to_owned)
}

/// Whether a field manager is kubectl, and so most likely a person: it calls itself `kubectl`, or that and the verb.
#[must_use]
pub fn is_kubectl(manager: &str) -> bool {
    manager.starts_with("kubectl")
}

/// Whether `entry` is what `manager` owns by server-side apply of the object itself.
#[must_use]
pub fn is_applied_by(entry: &ManagedFieldsEntry, manager: &str) -> bool {
    entry.manager.as_deref() == Some(manager)
        && entry.operation.as_deref() == Some(APPLY)
        && entry.subresource.as_deref().unwrap_or_default().is_empty()
}

/// The last who wrote to the object after we did. A write that does nothing but delete leaves no trace, so that this need
/// not be who deleted something; but it can be none of those who wrote before we did: what they had done was undone.
fn last_other_writer(entries: &[Entry<'_>]) -> Option<Culprit> {
    let applied = entries
        .iter()
        .filter(|entry| entry.ours)
        .filter_map(Entry::at)
        .max();
    entries
        .iter()
        .filter(|entry| !entry.has_our_name())
        .filter(|entry| entry.source.operation.as_deref() != Some(APPLY) && entry.subresource().is_empty())
        // In the same second it is not known who was first.
        .filter(|entry| entry.at() > applied)
        .max_by_key(|entry| entry.at())
        .map(Entry::culprit)
}

/// What [`drift`] has to know at each step.
struct Walk {
    autoscaled: bool,
    /// Who may have deleted what nobody owns.
    last_writer: Option<Culprit>,
}

/// What was found of a value and all in it.
#[derive(Default)]
struct Found {
    /// Something of it is as it was applied, or is no drift.
    kept: bool,
    drifts: Vec<Drift>,
}

impl Walk {
    fn at(&self, value: &Value, place: &Place<'_>, path: &str) -> Found {
        if NEVER_OWNED.contains(&path) {
            return Found::default();
        }
        if place.is_ours_as_a_whole() {
            return Found::kept();
        }
        match value {
            Value::Null => Found::default(),
            // Nobody owns an empty list, whose elements would have owners of their own. An atomic one has an owner.
            Value::Array(elements) if elements.is_empty() && !place.is_atomic() => Found::default(),
            Value::Object(fields) if !fields.is_empty() && !place.is_atomic() => {
                let mut found = Found::default();
                for (name, value) in fields {
                    found.add(self.at(value, &place.field(name), &below(path, name)));
                }
                if found.drifts.len() > 1 {
                    found.gather(self, place, path);
                }
                found
            }
            Value::Array(elements)
                if !place.is_atomic() && (place.is_in_parts() || elements.iter().any(Value::is_object)) =>
            {
                self.at_elements(elements, place, path)
            }
            _ => self.at_leaf(value, place, path),
        }
    }

    fn at_elements(&self, elements: &[Value], place: &Place<'_>, path: &str) -> Found {
        let key_names = place.key_names();
        let mut found = Found::default();
        for (index, element) in elements.iter().enumerate() {
            let path = format!("{path}[{}]", element_name(index, element, key_names.as_deref()));
            let place = place.element(index, element);
            let mut of_it = self.at(element, &place, &path);
            of_it.gather(self, &place, &path);
            found.add(of_it);
        }
        if found.drifts.len() > 1 {
            found.gather(self, place, path);
        }
        found
    }

    fn at_leaf(&self, value: &Value, place: &Place<'_>, path: &str) -> Found {
        // An empty map asks for a map. Whoever fills the first field in where there was none takes it over.
        let filled_by_others = value.is_object() && place.is_in_parts();
        let autoscaled = self.autoscaled && path == REPLICAS;
        if place.is_ours() || place.is_ours_by_update() || filled_by_others || autoscaled {
            return Found::kept();
        }
        Found {
            kept: false,
            drifts: vec![self.drift(place, path)],
        }
    }

    fn drift(&self, place: &Place<'_>, path: &str) -> Drift {
        let set_by = place.culprit();
        Drift {
            path: path.to_owned(),
            deleted: set_by.is_none(),
            by: set_by.or_else(|| self.last_writer.clone()),
        }
    }
}

impl Found {
    fn kept() -> Self {
        Self {
            kept: true,
            drifts: Vec::new(),
        }
    }

    fn add(&mut self, other: Self) {
        self.kept |= other.kept;
        self.drifts.extend(other.drifts);
    }

    /// If nothing is left of what is at `place`, that is one drift, not one for each thing in it.
    fn gather(&mut self, walk: &Walk, place: &Place<'_>, path: &str) {
        if !self.kept && !self.drifts.is_empty() && !place.is_ours() {
            self.drifts = vec![walk.drift(place, path)];
        }
    }
}

fn below(path: &str, name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if path.is_empty() {
        name.to_owned()
    } else if !name.is_empty() && name.chars().all(plain) {
        format!("{path}.{name}")
    } else {
        format!("{path}[{name}]")
    }
}

/// Keys of the lists in StatefulSets and Services, the most telling first, for lists of which nothing is left that
/// would tell.
const LIKELY_KEYS: [&str; 7] = [
    "mountPath",
    "devicePath",
    "containerPort",
    "port",
    "topologyKey",
    "ip",
    "name",
];

/// How a person would call a list element: by its keys if it has any, else by its value or its place.
fn element_name(index: usize, element: &Value, key_names: Option<&[String]>) -> String {
    let key = |name: &str| match element.get(name)? {
        Value::String(text) => Some(format!("{name}={text}")),
        Value::Object(_) | Value::Array(_) | Value::Null => None,
        other => Some(format!("{name}={other}")),
    };
    let keys: Vec<_> = match key_names {
        Some(names) => names.iter().filter_map(|name| key(name)).collect(),
        None => LIKELY_KEYS.into_iter().find_map(key).into_iter().collect(),
    };
    match element {
        _ if !keys.is_empty() => keys.join(","),
        Value::String(text) => format!("={text}"),
        _ => index.to_string(),
    }
}

/// Whether an entry is of the request that made the object, and of nothing since: it owns all that was in the object then,
/// defaults included. (The API server calls it `before-first-apply` if it comes to write one only later.)
#[must_use]
pub fn is_creation(entry: &ManagedFieldsEntry, meta: &ObjectMeta) -> bool {
    let at_once = match (&entry.time, &meta.creation_timestamp) {
        (Some(time), Some(created)) => time.0.duration_since(created.0) <= SignedDuration::from_secs(1),
        _ => false,
    };
    // Controllers may be as quick to write what is theirs. The selector is only there from the start.
    let selector = |fields: &FieldsV1| fields.0.pointer("/f:spec/f:selector").is_some();
    entry.operation.as_deref() == Some("Update")
        && entry.subresource.as_deref().unwrap_or_default().is_empty()
        && entry.fields_v1.as_ref().is_some_and(selector)
        && (at_once || entry.manager.as_deref() == Some("before-first-apply"))
}

#[cfg(test)]
mod tests;
