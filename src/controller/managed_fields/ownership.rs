//! Who owns what, at one path of an object after the other.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta},
    jiff::Timestamp,
};
use serde_json::{Map, Value};

use super::{Culprit, is_applied_by};
use crate::api::FIELD_MANAGER;

/// What an entry says of one path of the object.
#[derive(Clone, Copy, Debug)]
pub(super) enum FieldSet<'a> {
    /// Neither it nor anything in it.
    Nothing,
    /// Itself, but nothing in it.
    Itself,
    /// Some of what is in it, and perhaps itself.
    Part(&'a Map<String, Value>),
    /// It and all that is in it.
    Whole,
}

impl<'a> FieldSet<'a> {
    fn read(node: &'a Value) -> Self {
        match node {
            Value::Object(children) if children.keys().any(|key| is_path_element(key)) => {
                Self::Part(children)
            }
            _ => Self::Whole,
        }
    }

    fn field(self, name: &str) -> Self {
        match self {
            Self::Part(children) => children
                .get(&format!("f:{name}"))
                .map_or(Self::Nothing, Self::read),
            Self::Whole => Self::Whole,
            Self::Nothing | Self::Itself => Self::Nothing,
        }
    }

    fn element(self, index: usize, element: &Value) -> Self {
        match self {
            Self::Part(children) => children
                .iter()
                .find(|(key, _)| is_key_of(key, index, element))
                .map_or(Self::Nothing, |(_, node)| Self::read(node)),
            Self::Whole => Self::Whole,
            Self::Nothing | Self::Itself => Self::Nothing,
        }
    }

    pub(super) fn owns_itself(self) -> bool {
        match self {
            Self::Part(children) => children.contains_key("."),
            Self::Itself | Self::Whole => true,
            Self::Nothing => false,
        }
    }
}

fn is_path_element(key: &str) -> bool {
    ["f:", "k:", "v:", "i:"].iter().any(|kind| key.starts_with(kind))
}

/// Whether `key`, a key of a field set, is that of this list element.
fn is_key_of(key: &str, index: usize, element: &Value) -> bool {
    let Some((kind, text)) = key.split_once(':') else {
        return false;
    };
    match kind {
        "k" => keys(text).is_some_and(|keys| {
            let has = |(name, value): (&String, &Value)| match element.get(name) {
                Some(Value::Null) | None => is_default_key(name, value),
                Some(own) => same(own, value),
            };
            !keys.is_empty() && keys.iter().all(has)
        }),
        "v" => serde_json::from_str(text).is_ok_and(|value: Value| same(&value, element)),
        "i" => text.parse() == Ok(index),
        _ => false,
    }
}

/// The keys of a list element, of the text after `k:`.
fn keys(text: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(text).ok()
}

/// Whether an element that does not say `name` may be one of that value. Of the keys of lists in Kubernetes' own kinds
/// only the protocol of a port has a default.
pub(super) fn is_default_key(name: &str, value: &Value) -> bool {
    name != "protocol" || value == "TCP"
}

/// Equal as the API server sees it: 1 and 1.0 are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        _ => a == b,
    }
}

/// Whether an entry owns what is at this path of fields, or anything in it.
pub(super) fn is_owned(entry: &ManagedFieldsEntry, path: &[&str]) -> bool {
    let set = path.iter().fold(field_set(entry), |set, name| set.field(name));
    !matches!(set, FieldSet::Nothing)
}

/// The set of an entry, from the root of the object.
fn field_set(entry: &ManagedFieldsEntry) -> FieldSet<'_> {
    match entry.fields_v1.as_ref().map(|fields| FieldSet::read(&fields.0)) {
        // An empty set is nothing here, while an empty node below is all.
        Some(FieldSet::Whole) | None => FieldSet::Nothing,
        Some(set) => set,
    }
}

/// An entry of `metadata.managedFields`.
pub(super) struct Entry<'a> {
    pub(super) source: &'a ManagedFieldsEntry,
    /// Whether it is one of those that are asked for.
    pub(super) ours: bool,
}

impl<'a> Entry<'a> {
    /// All entries; ours are those of what we applied.
    pub(super) fn all(stored: &'a ObjectMeta) -> Vec<Self> {
        let entries = stored.managed_fields.iter().flatten();
        entries
            .map(|source| Self {
                source,
                ours: is_applied_by(source, FIELD_MANAGER),
            })
            .collect()
    }

    pub(super) fn has_our_name(&self) -> bool {
        self.source.manager.as_deref() == Some(FIELD_MANAGER)
    }

    pub(super) fn subresource(&self) -> &str {
        self.source.subresource.as_deref().unwrap_or_default()
    }

    pub(super) fn at(&self) -> Option<Timestamp> {
        self.source.time.as_ref().map(|time| time.0)
    }

    pub(super) fn culprit(&self) -> Culprit {
        Culprit {
            manager: self.source.manager.clone().unwrap_or_default(),
            operation: self.source.operation.clone().unwrap_or_default(),
            at: self.at(),
        }
    }
}

/// A path of the object with what each entry says of it; entries that say nothing are not there.
pub(super) struct Place<'a> {
    owners: Vec<(&'a Entry<'a>, FieldSet<'a>)>,
}

impl<'a> Place<'a> {
    pub(super) fn root(entries: &'a [Entry<'a>]) -> Self {
        Self::of(entries.iter().map(|entry| (entry, field_set(entry.source))))
    }

    fn of(sets: impl Iterator<Item = (&'a Entry<'a>, FieldSet<'a>)>) -> Self {
        let mut owners: Vec<_> = sets
            .filter(|(_, set)| !matches!(set, FieldSet::Nothing))
            .collect();
        // What one owns in parts is not atomic: who owns it without parts has set it to an empty map.
        if owners.iter().any(|(_, set)| matches!(set, FieldSet::Part(_))) {
            for (_, set) in &mut owners {
                if matches!(set, FieldSet::Whole) {
                    *set = FieldSet::Itself;
                }
            }
        }
        Self { owners }
    }

    pub(super) fn field(&self, name: &str) -> Self {
        Self::of(self.owners.iter().map(|(entry, set)| (*entry, set.field(name))))
    }

    pub(super) fn element(&self, index: usize, element: &Value) -> Self {
        Self::of(
            self.owners
                .iter()
                .map(|(entry, set)| (*entry, set.element(index, element))),
        )
    }

    pub(super) fn ours(&self) -> impl Iterator<Item = FieldSet<'a>> {
        let ours = self.owners.iter().filter(|(entry, _)| entry.ours);
        ours.map(|(_, set)| *set)
    }

    pub(super) fn is_ours(&self) -> bool {
        self.ours().next().is_some()
    }

    pub(super) fn is_ours_as_a_whole(&self) -> bool {
        self.ours().any(|set| matches!(set, FieldSet::Whole))
    }

    /// Whether someone owns it as a whole, so that there is nothing in it that has an owner of its own.
    pub(super) fn is_atomic(&self) -> bool {
        self.owners.iter().any(|(_, set)| matches!(set, FieldSet::Whole))
    }

    pub(super) fn is_in_parts(&self) -> bool {
        self.owners
            .iter()
            .any(|(_, set)| matches!(set, FieldSet::Part(_)))
    }

    /// Whether it was changed on the way of a request of our own.
    pub(super) fn is_ours_by_update(&self) -> bool {
        self.owners
            .iter()
            .any(|(entry, _)| !entry.ours && entry.has_our_name())
    }

    pub(super) fn culprit(&self) -> Option<Culprit> {
        self.owners
            .iter()
            .map(|(entry, _)| entry)
            .filter(|entry| !entry.has_our_name() && entry.subresource() != "status")
            .max_by_key(|entry| entry.at())
            .map(|entry| entry.culprit())
    }

    /// Names of the keys of this list's elements, as far as an entry knows any.
    pub(super) fn key_names(&self) -> Option<Vec<String>> {
        self.owners.iter().find_map(|(_, set)| match set {
            FieldSet::Part(children) => children
                .keys()
                .find_map(|key| keys(key.strip_prefix("k:")?))
                .map(|keys| keys.into_iter().map(|(name, _)| name).collect()),
            _ => None,
        })
    }
}
