//! Contents of ClusterVersions whose tenants come up on a real cluster, and come up fast.

use std::{collections::BTreeMap, sync::LazyLock};

use serde_json::{Value, json};

/// Versions and images, from the file that all of the test cluster takes them from.
static VERSIONS: LazyLock<BTreeMap<&str, &str>> = LazyLock::new(|| {
    let lines = include_str!("../../cluster/versions.env").lines();
    lines
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .collect()
});

fn pinned(name: &str) -> &'static str {
    VERSIONS
        .get(name)
        .unwrap_or_else(|| panic!("versions.env does not say {name}"))
}

/// A version of Kubernetes that tenants can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kubernetes {
    /// What tenants start with.
    First,
    /// What they are upgraded to.
    Next,
}

impl Kubernetes {
    /// As the tenant's own `/version` says it.
    pub(crate) fn git_version(self) -> String {
        let name = match self {
            Self::First => "KUBERNETES_VERSION",
            Self::Next => "KUBERNETES_NEXT_VERSION",
        };
        format!("v{}", pinned(name))
    }

    fn image(self, component: &str) -> &'static str {
        let next = if self == Self::Next { "_NEXT" } else { "" };
        pinned(&format!("IMAGE_{component}{next}"))
    }
}

/// All three components with one etcd member, the apiserver behind a Service of type ClusterIP.
pub(crate) fn standard() -> Value {
    with_etcd_members(1)
}

/// The same, with this many members of etcd.
pub(crate) fn with_etcd_members(members: usize) -> Value {
    json!({
        "etcd": {
            "metadata": {"name": "etcd"},
            "statefulset": etcd(members),
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
            "statefulset": api_server(members),
            "service": {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "apiserver-svc"},
                "spec": {"type": "ClusterIP", "selector": {"component-name": "apiserver"},
                    "ports": [{"port": 6443, "protocol": "TCP", "targetPort": "api"}]},
            },
        },
        "controllerManager": {
            "metadata": {"name": "controller-manager"},
            "statefulset": controller_manager(),
        },
    })
}

/// Sets the images of apiserver and controller-manager.
pub(crate) fn set_kubernetes(content: &mut Value, version: Kubernetes) {
    *image(content, "apiServer") = version.image("KUBE_APISERVER").into();
    if content.get("controllerManager").is_some() {
        *image(content, "controllerManager") = version.image("KUBE_CONTROLLER_MANAGER").into();
    }
}

/// The image of a component.
pub(crate) fn image<'a>(content: &'a mut Value, bundle: &str) -> &'a mut Value {
    at(
        content,
        &format!("/{bundle}/statefulset/spec/template/spec/containers/0/image"),
    )
}

/// Sets a flag, `--name=value`, of a component: in its place if it is there, else at the end.
pub(crate) fn set_flag(content: &mut Value, bundle: &str, flag: &str) {
    let args = at(
        content,
        &format!("/{bundle}/statefulset/spec/template/spec/containers/0/args"),
    );
    let args = args.as_array_mut().expect("arguments");
    let name = flag.split('=').next().unwrap_or(flag);
    let found = args
        .iter_mut()
        .find(|arg| arg.as_str().and_then(|arg| arg.split('=').next()) == Some(name));
    match found {
        Some(arg) => *arg = flag.into(),
        None => args.push(flag.into()),
    }
}

/// Takes a flag away.
pub(crate) fn unset_flag(content: &mut Value, bundle: &str, name: &str) {
    let args = at(
        content,
        &format!("/{bundle}/statefulset/spec/template/spec/containers/0/args"),
    );
    let args = args.as_array_mut().expect("arguments");
    args.retain(|arg| arg.as_str().and_then(|arg| arg.split('=').next()) != Some(name));
}

/// What `pointer` points to.
pub(crate) fn at<'a>(content: &'a mut Value, pointer: &str) -> &'a mut Value {
    content
        .pointer_mut(pointer)
        .unwrap_or_else(|| panic!("the template has no {pointer}"))
}

fn etcd(members: usize) -> Value {
    let probe = |period: u32, failures: u32| {
        json!({"httpGet": {"path": "/readyz", "port": 2381, "scheme": "HTTP"}, "periodSeconds": period,
            "failureThreshold": failures, "timeoutSeconds": 15})
    };
    let args = [
        "--name=$(HOSTNAME)",
        "--data-dir=/var/lib/etcd/data",
        "--trusted-ca-file=/etc/kubernetes/pki/root/tls.crt",
        "--client-cert-auth",
        "--cert-file=/etc/kubernetes/pki/etcd/tls.crt",
        "--key-file=/etc/kubernetes/pki/etcd/tls.key",
        "--peer-trusted-ca-file=/etc/kubernetes/pki/root/tls.crt",
        "--peer-client-cert-auth",
        "--peer-cert-file=/etc/kubernetes/pki/etcd/tls.crt",
        "--peer-key-file=/etc/kubernetes/pki/etcd/tls.key",
        "--listen-peer-urls=https://0.0.0.0:2380",
        "--listen-client-urls=https://0.0.0.0:2379",
        "--listen-metrics-urls=http://0.0.0.0:2381",
        "--initial-advertise-peer-urls=https://$(HOSTNAME).etcd:2380",
        "--advertise-client-urls=https://$(HOSTNAME).etcd:2379",
        "--initial-cluster-state=new",
        "--initial-cluster-token=vc-etcd",
    ];
    let container = json!({
        "name": "etcd",
        "image": pinned("IMAGE_ETCD"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["etcd"],
        "args": args,
        "env": [{"name": "HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "startupProbe": probe(1, 180),
        "readinessProbe": probe(5, 8),
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/etcd"},
            {"name": "etcd-ca", "mountPath": "/etc/kubernetes/pki/etcd", "readOnly": true},
            {"name": "root-ca", "mountPath": "/etc/kubernetes/pki/root", "readOnly": true},
        ],
    });
    let mut set = stateful_set("etcd", "etcd", &container, &["etcd-ca", "root-ca"]);
    set["spec"]["replicas"] = members.into();
    // A member of a new cluster is not ready before there is a quorum: they must start together.
    set["spec"]["podManagementPolicy"] = "Parallel".into();
    let pod = &mut set["spec"]["template"]["spec"];
    pod["subdomain"] = "etcd".into();
    pod["volumes"]
        .as_array_mut()
        .expect("volumes")
        .push(json!({"name": "data", "emptyDir": {}}));
    set
}

fn api_server(etcd_members: usize) -> Value {
    let probe = |path: &str, period: u32, failures: u32| {
        json!({"httpGet": {"path": path, "port": "api", "scheme": "HTTPS"}, "periodSeconds": period,
            "failureThreshold": failures, "timeoutSeconds": 15})
    };
    let members: Vec<_> = (0..etcd_members)
        .map(|member| format!("https://etcd-{member}.etcd:2379"))
        .collect();
    let etcd_servers = format!("--etcd-servers={}", members.join(","));
    let args = [
        etcd_servers.as_str(),
        "--etcd-cafile=/etc/kubernetes/pki/root/tls.crt",
        "--etcd-certfile=/etc/kubernetes/pki/apiserver/tls.crt",
        "--etcd-keyfile=/etc/kubernetes/pki/apiserver/tls.key",
        "--client-ca-file=/etc/kubernetes/pki/root/tls.crt",
        "--tls-cert-file=/etc/kubernetes/pki/apiserver/tls.crt",
        "--tls-private-key-file=/etc/kubernetes/pki/apiserver/tls.key",
        "--kubelet-client-certificate=/etc/kubernetes/pki/apiserver/tls.crt",
        "--kubelet-client-key=/etc/kubernetes/pki/apiserver/tls.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-account-key-file=/etc/kubernetes/pki/service-account/tls.key",
        "--service-account-signing-key-file=/etc/kubernetes/pki/service-account/tls.key",
        "--service-cluster-ip-range=10.32.0.0/16",
        "--authorization-mode=Node,RBAC",
        "--endpoint-reconciler-type=lease",
        "--requestheader-client-ca-file=/etc/kubernetes/pki/root/tls.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--proxy-client-cert-file=/etc/kubernetes/pki/frontproxy/tls.crt",
        "--proxy-client-key-file=/etc/kubernetes/pki/frontproxy/tls.key",
    ];
    let container = json!({
        "name": "apiserver",
        "image": Kubernetes::First.image("KUBE_APISERVER"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["kube-apiserver"],
        "args": args,
        "ports": [{"name": "api", "containerPort": 6443, "protocol": "TCP"}],
        "startupProbe": probe("/livez", 1, 180),
        "readinessProbe": probe("/readyz", 1, 8),
        "livenessProbe": probe("/livez", 10, 8),
        "volumeMounts": [
            {"name": "apiserver-ca", "mountPath": "/etc/kubernetes/pki/apiserver", "readOnly": true},
            {"name": "front-proxy-ca", "mountPath": "/etc/kubernetes/pki/frontproxy", "readOnly": true},
            {"name": "root-ca", "mountPath": "/etc/kubernetes/pki/root", "readOnly": true},
            {"name": "serviceaccount-rsa", "mountPath": "/etc/kubernetes/pki/service-account", "readOnly": true},
        ],
    });
    let secrets = ["apiserver-ca", "front-proxy-ca", "root-ca", "serviceaccount-rsa"];
    let mut set = stateful_set("apiserver", "apiserver-svc", &container, &secrets);
    set["spec"]["template"]["spec"]["hostname"] = "apiserver".into();
    set["spec"]["template"]["spec"]["subdomain"] = "apiserver-svc".into();
    set
}

fn controller_manager() -> Value {
    let probe = |period: u32, failures: u32| {
        json!({"httpGet": {"path": "/healthz", "port": 10257, "scheme": "HTTPS"}, "periodSeconds": period,
            "failureThreshold": failures, "timeoutSeconds": 15})
    };
    let args = [
        "--kubeconfig=/etc/kubernetes/kubeconfig/controller-manager-kubeconfig",
        "--authentication-kubeconfig=/etc/kubernetes/kubeconfig/controller-manager-kubeconfig",
        "--authorization-kubeconfig=/etc/kubernetes/kubeconfig/controller-manager-kubeconfig",
        "--authorization-always-allow-paths=/healthz,/readyz,/livez",
        "--root-ca-file=/etc/kubernetes/pki/root/tls.crt",
        "--service-account-private-key-file=/etc/kubernetes/pki/service-account/tls.key",
        "--cluster-signing-cert-file=/etc/kubernetes/pki/root/tls.crt",
        "--cluster-signing-key-file=/etc/kubernetes/pki/root/tls.key",
        "--use-service-account-credentials=true",
        "--service-cluster-ip-range=10.32.0.0/16",
        "--controllers=*,-node-lifecycle-controller",
        "--leader-elect=false",
    ];
    let container = json!({
        "name": "controller-manager",
        "image": Kubernetes::First.image("KUBE_CONTROLLER_MANAGER"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["kube-controller-manager"],
        "args": args,
        "startupProbe": probe(1, 180),
        "readinessProbe": probe(5, 8),
        "livenessProbe": probe(10, 8),
        "volumeMounts": [
            {"name": "controller-manager-kubeconfig", "mountPath": "/etc/kubernetes/kubeconfig", "readOnly": true},
            {"name": "root-ca", "mountPath": "/etc/kubernetes/pki/root", "readOnly": true},
            {"name": "serviceaccount-rsa", "mountPath": "/etc/kubernetes/pki/service-account", "readOnly": true},
        ],
    });
    let secrets = ["controller-manager-kubeconfig", "root-ca", "serviceaccount-rsa"];
    stateful_set(
        "controller-manager",
        "controller-manager-svc",
        &container,
        &secrets,
    )
}

fn stateful_set(name: &str, service: &str, container: &Value, secrets: &[&str]) -> Value {
    let volumes: Vec<_> = secrets
        .iter()
        .map(|name| json!({"name": name, "secret": {"secretName": name}}))
        .collect();
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "serviceName": service,
            "selector": {"matchLabels": {"component-name": name}},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {
                "metadata": {"labels": {"component-name": name}},
                "spec": {"automountServiceAccountToken": false, "containers": [container], "volumes": volumes},
            },
        },
    })
}
