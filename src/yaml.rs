//! Manifests as text, the same each time: what is checked in can be compared with what is printed.

use serde_json::Value;

/// An object cannot be written as YAML.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {what} as YAML: {message}")]
pub struct YamlError {
    what: String,
    message: String,
}

/// `objects` as one YAML stream with sorted keys, that begins with the comment lines `head`.
pub(crate) fn stream(head: &str, objects: &[Value]) -> Result<String, YamlError> {
    let mut out = String::new();
    for line in head.lines() {
        out.push_str("# ");
        out.push_str(line);
        out.push('\n');
    }
    for object in objects {
        let text = serde_saphyr::to_string(object).map_err(|error| {
            let part = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or("?");
            YamlError {
                what: format!("{} {}", part("/kind"), part("/metadata/name")),
                message: error.to_string(),
            }
        })?;
        out.push_str("---\n");
        out.push_str(text.trim_end());
        out.push('\n');
    }
    Ok(out)
}
