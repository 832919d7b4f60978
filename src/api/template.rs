//! The read-only view of a revision's content: which bundles it has and what in them is load-bearing.
//!
//! Everything else in a template is the author's business and passes through as it is.

use serde_json::Value;

use super::{Component, FieldError};

/// A bundle: a component's StatefulSet and, where it has one, its Service.
#[derive(Clone, Debug, PartialEq)]
pub struct Bundle {
    /// Which component this is.
    pub component: Component,
    /// The StatefulSet as the author wrote it.
    pub stateful_set: Value,
    /// Name of the StatefulSet.
    pub stateful_set_name: String,
    /// `spec.replicas` of the StatefulSet; 1 when absent, as the API server defaults it.
    pub replicas: u32,
    /// The Service as the author wrote it.
    pub service: Option<Value>,
}

/// The content of a revision, checked for what rendering relies on.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// The etcd of a tenant; absent when its apiserver uses one elsewhere.
    pub etcd: Option<Bundle>,
    /// The apiserver; always there.
    pub api_server: Bundle,
    /// The controller-manager; optional.
    pub controller_manager: Option<Bundle>,
    /// Name of the apiserver's Service.
    pub api_server_service: String,
    /// Port of the apiserver's Service that a client connects to.
    pub api_server_port: u16,
    /// Name of etcd's Service, which is the domain of its members.
    pub etcd_service: Option<String>,
}

impl Template {
    /// Reads the content of a ClusterVersion; all problems at once.
    pub fn parse(content: &Value) -> Result<Self, Vec<FieldError>> {
        let mut errors = Vec::new();
        let etcd = bundle(content, Component::Etcd, &mut errors);
        let api_server = bundle(content, Component::ApiServer, &mut errors);
        let controller_manager = bundle(content, Component::ControllerManager, &mut errors);

        if api_server.is_none() && content.get("apiServer").is_none_or(Value::is_null) {
            errors.push(FieldError::required(
                "spec.apiServer",
                "a tenant without an apiserver cannot be provisioned",
            ));
        }
        let api_server_service = api_server.as_ref().and_then(|b| b.service_name(&mut errors));
        let api_server_port = api_server
            .as_ref()
            .and_then(|b| b.service.as_ref())
            .map_or(6443, first_port);
        let etcd_service = etcd.as_ref().and_then(|b| b.service_name(&mut errors));
        if let Some(service) = controller_manager.as_ref().filter(|b| b.service.is_some()) {
            let _ = service.service_name(&mut errors);
        }

        match (api_server, api_server_service) {
            (Some(api_server), Some(api_server_service)) if errors.is_empty() => Ok(Self {
                etcd,
                api_server,
                controller_manager,
                api_server_service,
                api_server_port,
                etcd_service,
            }),
            _ => Err(errors),
        }
    }

    /// The bundle of `component`, if this revision has one.
    #[must_use]
    pub fn bundle(&self, component: Component) -> Option<&Bundle> {
        match component {
            Component::Etcd => self.etcd.as_ref(),
            Component::ApiServer => Some(&self.api_server),
            Component::ControllerManager => self.controller_manager.as_ref(),
        }
    }

    /// Whether the apiserver's Service is of type `ClusterIP`, said so in words.
    ///
    /// The Service is then made first, because its address goes into the certificate and the kubeconfigs.
    #[must_use]
    pub fn has_cluster_ip_service(&self) -> bool {
        let service = self.api_server.service.as_ref();
        let field = |path: &str| service.and_then(|s| s.pointer(path)).and_then(Value::as_str);
        // A headless one has none.
        field("/spec/type") == Some("ClusterIP") && field("/spec/clusterIP") != Some("None")
    }
}

impl Bundle {
    fn service_name(&self, errors: &mut Vec<FieldError>) -> Option<String> {
        let path = format!("spec.{}.service", self.component.spec_key());
        let Some(service) = &self.service else {
            errors.push(FieldError::required(
                path,
                format_args!("the certificates of the {} are made for its name", self.component),
            ));
            return None;
        };
        name_of(service, &path, errors)
    }
}

/// Port that clients of a Service use: the first one's.
fn first_port(service: &Value) -> u16 {
    service
        .pointer("/spec/ports/0/port")
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok())
        .unwrap_or(6443)
}

fn name_of(object: &Value, path: &str, errors: &mut Vec<FieldError>) -> Option<String> {
    match object.pointer("/metadata/name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => Some(name.to_owned()),
        _ => {
            errors.push(FieldError::required(
                format!("{path}.metadata.name"),
                "it is part of the tenant's DNS names",
            ));
            None
        }
    }
}

fn bundle(content: &Value, component: Component, errors: &mut Vec<FieldError>) -> Option<Bundle> {
    let path = format!("spec.{}", component.spec_key());
    let value = content
        .get(component.spec_key())
        .filter(|value| !value.is_null())?;
    // Upstream dispatches on this name; a wrong one was an error there, too.
    if let Some(name) = value.pointer("/metadata/name").filter(|name| !name.is_null())
        && name != component.name()
    {
        errors.push(FieldError::not_supported(
            format!("{path}.metadata.name"),
            name,
            &[component.name()],
        ));
    }
    if !value.is_object() {
        errors.push(FieldError::invalid(
            path,
            value,
            "must be an object with statefulset and service",
        ));
        return None;
    }
    let Some(stateful_set) = value.get("statefulset").filter(|value| value.is_object()) else {
        errors.push(FieldError::required(
            format!("{path}.statefulset"),
            "a whole apps/v1 StatefulSet",
        ));
        return None;
    };
    let replicas = stateful_set.pointer("/spec/replicas");
    let count = match replicas {
        None | Some(Value::Null) => Some(1),
        Some(value) => value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n <= 1000),
    };
    if count.is_none() {
        errors.push(FieldError::invalid(
            format!("{path}.statefulset.spec.replicas"),
            replicas.unwrap_or(&Value::Null),
            "must be an integer from 0 to 1000",
        ));
    }
    if !stateful_set
        .pointer("/spec/template/spec/containers")
        .and_then(Value::as_array)
        .is_some_and(|containers| !containers.is_empty() && containers.iter().all(Value::is_object))
    {
        errors.push(FieldError::required(
            format!("{path}.statefulset.spec.template.spec.containers"),
            "a list of at least one container",
        ));
    }
    let service = value.get("service").filter(|value| !value.is_null());
    if let Some(service) = service.filter(|service| !service.is_object()) {
        errors.push(FieldError::invalid(
            format!("{path}.service"),
            service,
            "must be a whole v1 Service",
        ));
        return None;
    }
    let stateful_set_name = name_of(stateful_set, &format!("{path}.statefulset"), errors)?;
    // Other programs find it by this name, and so did the Go manager.
    if stateful_set_name != component.name() {
        errors.push(FieldError::not_supported(
            format!("{path}.statefulset.metadata.name"),
            &Value::from(stateful_set_name.as_str()),
            &[component.name()],
        ));
    }
    Some(Bundle {
        component,
        stateful_set: stateful_set.clone(),
        stateful_set_name,
        replicas: count?,
        service: service.cloned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stateful_set(name: &str) -> Value {
        json!({"metadata": {"name": name}, "spec": {"template": {"spec": {"containers": [{"name": "c"}]}}}})
    }

    #[test]
    fn bundles_may_be_absent_but_for_the_apiserver() {
        let content = json!({"apiServer": {
            "statefulset": stateful_set("apiserver"),
            "service": {"metadata": {"name": "apiserver-svc"}, "spec": {"type": "ClusterIP", "ports": [{"port": 443}]}},
        }});
        let template = Template::parse(&content).expect("valid");
        assert!(template.etcd.is_none() && template.controller_manager.is_none());
        assert_eq!((template.api_server.replicas, template.api_server_port), (1, 443));
        assert!(template.has_cluster_ip_service());

        let errors = Template::parse(&json!({})).expect_err("no apiserver");
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].field, "spec.apiServer");
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let errors = Template::parse(&json!({
            "etcd": {"metadata": {"name": "etcdd"}, "statefulset": {"spec": {"replicas": -1}}},
            "apiServer": {"statefulset": stateful_set("apiserver")},
            "controllerManager": {"statefulset": 1},
        }))
        .expect_err("broken");
        let paths: Vec<_> = errors.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(
            paths,
            [
                "spec.etcd.metadata.name",
                "spec.etcd.statefulset.spec.replicas",
                "spec.etcd.statefulset.spec.template.spec.containers",
                "spec.etcd.statefulset.metadata.name",
                "spec.controllerManager.statefulset",
                "spec.apiServer.service",
            ]
        );
    }
}
