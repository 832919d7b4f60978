//! The documented hashes, computed here by themselves: a change of a rule must show, for it would roll every tenant.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
    digits.collect::<Vec<_>>().concat()
}

/// SHA-256 of the JSON of `value` without any space and with sorted keys.
pub(crate) fn of_json(value: &Value) -> String {
    hex(&Sha256::digest(canonical(value)))
}

fn canonical(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<_, _> = fields.iter().collect();
            let fields = sorted
                .iter()
                .map(|(key, value)| format!("{}:{}", serde_json::to_string(key).unwrap(), canonical(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(","))
        }
        scalar => serde_json::to_string(scalar).unwrap(),
    }
}

/// What the annotation `<secret>-hash` says of a Secret: of a pair its certificate alone, of a kubeconfig server, CA and
/// client certificate. Each key and each value is preceded by its length as eight bytes, the highest first.
pub(crate) fn of_secret(data: &BTreeMap<String, String>) -> String {
    let decoded = |line: &str| STANDARD.decode(field(data, line)).expect("base64");
    let parts: Vec<(&str, Vec<u8>)> = match data.get("tls.crt") {
        Some(certificate) => vec![("tls.crt", certificate.clone().into_bytes())],
        None => vec![
            ("certificate-authority", decoded("certificate-authority-data")),
            ("client-certificate", decoded("client-certificate-data")),
            ("server", field(data, "server").into_bytes()),
        ],
    };
    let mut bytes = Vec::new();
    for part in parts.iter().flat_map(|(key, value)| [key.as_bytes(), value]) {
        bytes.extend((part.len() as u64).to_be_bytes());
        bytes.extend(part);
    }
    hex(&Sha256::digest(bytes))
}

/// The value of a line of the one kubeconfig in `data`.
fn field(data: &BTreeMap<String, String>, name: &str) -> String {
    let lines = data.values().flat_map(|text| text.lines());
    let mut values = lines.filter_map(|line| {
        line.trim()
            .trim_start_matches("- ")
            .strip_prefix(&format!("{name}: "))
    });
    let value = values.next().expect("the kubeconfig has it");
    value.trim_matches('"').to_owned()
}

/// The root namespace of a VirtualCluster: `<namespace>-<first six digits of the hash of its uid>-<name>`.
pub(crate) fn root_namespace(namespace: &str, name: &str, uid: &str) -> String {
    format!("{namespace}-{}-{name}", &hex(&Sha256::digest(uid))[..6])
}
