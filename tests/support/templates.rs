//! Contents of ClusterVersions, as small as a real API server accepts them.

use serde_json::{Value, json};

/// All three components, the apiserver's Service of this type.
pub fn full(service_type: &str) -> Value {
    json!({
        "etcd": {
            "metadata": {"name": "etcd"},
            "statefulset": stateful_set("etcd", "etcd", &json!(["--data-dir=/data"])),
            "service": {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "etcd"},
                "spec": {"type": "ClusterIP", "clusterIP": "None", "publishNotReadyAddresses": true,
                    "selector": {"component-name": "etcd"}},
            },
        },
        "apiServer": {
            "metadata": {"name": "apiserver"},
            "statefulset": stateful_set("apiserver", "apiserver-svc", &json!(["--etcd-servers=https://etcd-0.etcd:2379"])),
            "service": {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "apiserver-svc"},
                "spec": {"type": service_type, "selector": {"component-name": "apiserver"},
                    "ports": [{"port": 6443, "protocol": "TCP", "targetPort": "api"}]},
            },
        },
        "controllerManager": {
            "metadata": {"name": "controller-manager"},
            "statefulset": stateful_set("controller-manager", "controller-manager-svc", &json!(["--leader-elect=false"])),
        },
    })
}

/// The same, without a controller-manager.
pub fn without_controller_manager() -> Value {
    let mut content = full("ClusterIP");
    content
        .as_object_mut()
        .expect("an object")
        .remove("controllerManager");
    content
}

fn stateful_set(name: &str, service: &str, args: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "serviceName": service,
            "selector": {"matchLabels": {"component-name": name}},
            "updateStrategy": {"type": "OnDelete"},
            "template": {
                "metadata": {"labels": {"component-name": name}},
                "spec": {"containers": [{
                    "name": name,
                    "image": format!("registry.example/{name}:1"),
                    "command": [name],
                    "args": args,
                    "ports": [{"name": "api", "containerPort": 6443, "protocol": "TCP"}],
                }]},
            },
        },
    })
}

/// Changes of the apiserver's and the controller-manager's first argument: both restart.
pub fn verbosity(content: &mut Value, level: usize) {
    for bundle in ["apiServer", "controllerManager"] {
        let args = content.pointer_mut(&format!(
            "/{bundle}/statefulset/spec/template/spec/containers/0/args"
        ));
        let Some(args) = args.and_then(Value::as_array_mut) else {
            continue;
        };
        args.retain(|arg| !arg.as_str().is_some_and(|arg| arg.starts_with("-v=")));
        args.insert(0, json!(format!("-v={level}")));
    }
}
