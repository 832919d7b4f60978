//! The golden files: where they are, what is in them, and how placeholders are filled in.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a version left of one tenant, and of what it was made from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Golden {
    /// Finalizers and status of the ClusterVersion; its content is that of the revision.
    pub(crate) cluster_version: Value,
    /// The ControllerRevision.
    pub(crate) revision: Value,
    /// The root namespace.
    pub(crate) namespace: Value,
    /// What the certificates are for, by Secret.
    pub(crate) leaves: BTreeMap<String, LeafNames>,
    /// The Secrets, by name, their data as text.
    pub(crate) secrets: BTreeMap<String, Value>,
    /// Services and StatefulSets as they were applied, but for the hash of the rendering: in the order of application.
    pub(crate) objects: Vec<Value>,
    /// The VirtualCluster.
    pub(crate) tenant: Value,
}

/// What a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct LeafNames {
    pub(crate) common_name: String,
    pub(crate) organizations: Vec<String>,
    pub(crate) server: bool,
    pub(crate) client: bool,
    pub(crate) dns_names: Vec<String>,
    /// Addresses, or the placeholder of the apiserver's.
    pub(crate) ip_addresses: Vec<String>,
    pub(crate) days: i64,
}

impl Golden {
    /// As it is stored.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("JSON") + "\n"
    }

    /// The content of the ClusterVersion.
    pub(crate) fn content(&self) -> &Value {
        &self.revision["data"]
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The contents that golden files are made of, by name.
pub(crate) fn templates() -> Vec<(String, Value)> {
    let files = entries(&folder().join("templates"));
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).expect("it can be read");
        let content =
            serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (stem(path), content)
    };
    files.iter().map(read).collect()
}

/// All golden files, as `<version>/<template>`.
pub(crate) fn all() -> Vec<(String, Golden)> {
    let versions = entries(&folder())
        .into_iter()
        .filter(|path| is_version(&stem_of_folder(path)));
    versions
        .flat_map(|version| {
            entries(&version).into_iter().map(move |file| {
                let name = format!("{}/{}", stem_of_folder(&version), stem(&file));
                let text = fs::read_to_string(&file).expect("it can be read");
                let golden = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
                (name, golden)
            })
        })
        .collect()
}

/// Where the files of a new version go. What there is already is never written again.
pub(crate) fn new_folder(version: &str) -> PathBuf {
    assert!(is_version(version), "{version:?} is no version such as 0.2.0");
    let folder = folder().join(version);
    assert!(
        !folder.exists(),
        "{} exists: what a version left does not change any more",
        folder.display()
    );
    folder
}

/// Writes files into a folder that does not exist.
pub(crate) fn write(folder: &Path, recorded: &[(String, Golden)]) {
    fs::create_dir(folder).expect("there is no such folder yet");
    for (name, golden) in recorded {
        let path = folder.join(name).with_extension("json");
        fs::write(&path, golden.text()).expect("it can be written");
        eprintln!("{} is made", path.display());
    }
}

fn is_version(name: &str) -> bool {
    let parts: Vec<_> = name.split('.').collect();
    parts.len() == 3
        && parts
            .iter()
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = read.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

fn stem(path: &Path) -> String {
    path.file_stem().expect("a name").to_string_lossy().into_owned()
}

fn stem_of_folder(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

/// Values of placeholders.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placeholders(BTreeMap<String, String>);

impl Placeholders {
    pub(crate) fn set(&mut self, name: &str, value: impl Into<String>) {
        self.0.insert(format!("${{{name}}}"), value.into());
    }

    /// `value` with all placeholders filled in; panics if one is not known.
    pub(crate) fn fill(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.fill_text(text)),
            Value::Array(items) => items.iter().map(|item| self.fill(item)).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| (key.clone(), self.fill(value)))
                .collect(),
            scalar => scalar.clone(),
        }
    }

    /// As [`Self::fill`], of a text.
    pub(crate) fn fill_text(&self, text: &str) -> String {
        let mut filled = text.to_owned();
        for (placeholder, value) in &self.0 {
            filled = filled.replace(placeholder, value);
        }
        assert!(!filled.contains("${"), "a placeholder is not known in {filled:?}");
        filled
    }

    /// Filled-in addresses.
    pub(crate) fn addresses(&self, texts: &[String]) -> Vec<IpAddr> {
        let parse = |text: &String| self.fill_text(text).parse().expect("an address");
        texts.iter().map(parse).collect()
    }

    /// The other way round: `value` with placeholders for what differs from tenant to tenant.
    pub(crate) fn take_out(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.take_out_text(text)),
            Value::Array(items) => items.iter().map(|item| self.take_out(item)).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(key, value)| (key.clone(), self.take_out(value)))
                .collect(),
            scalar => scalar.clone(),
        }
    }

    /// As [`Self::take_out`], of a text.
    pub(crate) fn take_out_text(&self, text: &str) -> String {
        // The longest first: the root namespace holds the name.
        let mut values: Vec<_> = self.0.iter().filter(|(_, value)| !value.is_empty()).collect();
        values.sort_by_key(|(_, value)| std::cmp::Reverse(value.len()));
        let mut text = text.to_owned();
        for (placeholder, value) in values {
            text = text.replace(value, placeholder);
        }
        text
    }
}
