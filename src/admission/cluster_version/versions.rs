//! Steps between Kubernetes versions that are not supported: more than one minor version at once, or back. Told as
//! warnings, since the version is only guessed, from the tag of the first container's image.

use serde_json::Value;

use crate::api::Component;

/// A line for each component whose version takes a step that Kubernetes does not support.
#[must_use]
pub fn warnings(spec: &Value, old: &Value) -> Vec<String> {
    [Component::ApiServer, Component::ControllerManager]
        .into_iter()
        .filter_map(|component| {
            let (from, to) = (version(old, component)?, version(spec, component)?);
            let problem = match (to.minor.cmp(&from.minor), to.minor.abs_diff(from.minor)) {
                _ if to.major != from.major => "another major version",
                (std::cmp::Ordering::Less, _) => "a step back, which Kubernetes does not support",
                (_, 2..) => "more than one minor version at once, which Kubernetes does not support",
                _ => return None,
            };
            Some(format!(
                "spec.{}: {} to {} is {problem}",
                component.spec_key(),
                from.tag,
                to.tag
            ))
        })
        .collect()
}

struct Version<'a> {
    tag: &'a str,
    major: u32,
    minor: u32,
}

/// The version in the image's tag, as in `registry/kube-apiserver:v1.34.4@sha256:…`.
fn version(spec: &Value, component: Component) -> Option<Version<'_>> {
    let containers = &spec[component.spec_key()]["statefulset"]["spec"]["template"]["spec"]["containers"];
    let image = containers[0]["image"].as_str()?;
    let image = image.split('@').next()?;
    let (_, tag) = image.rsplit('/').next()?.split_once(':')?;
    let mut parts = tag.strip_prefix('v').unwrap_or(tag).split(['.', '-', '+']);
    Some(Version {
        tag,
        major: parts.next()?.parse().ok()?,
        minor: parts.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(image: &str) -> Value {
        json!({"apiServer": {"statefulset": {"spec": {"template": {"spec": {"containers": [{"image": image}]}}}}}})
    }

    #[test]
    fn steps() {
        for (from, to, told) in [
            ("r.io:5000/a:v1.34.4", "r.io:5000/a:v1.35.0", None),
            ("a:v1.34.4", "a:v1.34.9@sha256:00", None),
            (
                "a:v1.34.4",
                "a:v1.36.0",
                Some("v1.34.4 to v1.36.0 is more than one minor version"),
            ),
            (
                "a:1.35.0-eks.1",
                "a:v1.34.0",
                Some("1.35.0-eks.1 to v1.34.0 is a step back"),
            ),
            ("a:v1.34.0", "a:v2.0.0", Some("another major version")),
            ("a:latest", "a:v1.34.0", None),
            ("a", "r.io:5000/a", None),
            ("a:v1", "a:v1.36.0", None),
        ] {
            let warnings = warnings(&spec(to), &spec(from));
            match told {
                None => assert!(warnings.is_empty(), "{from} {to}: {warnings:?}"),
                Some(text) => assert!(warnings[0].contains(text), "{warnings:?}"),
            }
        }
        assert!(super::warnings(&json!(7), &Value::Null).is_empty());
    }
}
