//! What is missing, and objects without managed fields, as very old API servers left them. Tenants of a real API server
//! are recorded in `tests/api_managed_fields/adopt.rs`.

use super::*;

const ROOT: &str = "ns-fd1b34-name";

/// Objects of a tenant as they are stored, made by a plain create before there were managed fields.
fn stored() -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
    let set = |name: &str, service: &str, args: Value| {
        json!({
            "metadata": {
                "name": name, "namespace": ROOT, "uid": "u", "resourceVersion": "7", "generation": 1, "selfLink": "/a",
                "creationTimestamp": "2020-01-01T00:00:00Z", "labels": {"app": name},
                "annotations": {LAST_APPLIED: "{}", labels::RENDERED_HASH: "h"},
            },
            "spec": {
                "replicas": 1, "serviceName": service, "podManagementPolicy": "OrderedReady",
                "selector": {"matchLabels": {"component-name": name}},
                "updateStrategy": {"type": "OnDelete"},
                "template": {
                    "metadata": {
                        "creationTimestamp": null,
                        "labels": {"component-name": name, labels::CLUSTER: ROOT},
                        "annotations": {"root-ca-hash": "a", "apiserver-ca-hash": "b", RESTARTED_AT: "now"},
                    },
                    "spec": {"containers": [{"name": name, "image": "a", "args": args}], "restartPolicy": "Always"},
                },
            },
            "status": {"replicas": 1},
        })
    };
    let service = |name: &str, component: &str, address: &str| {
        json!({
            "metadata": {"name": name, "namespace": ROOT, "uid": "u", "creationTimestamp": "2020-01-01T00:00:00Z",
                "finalizers": ["service.kubernetes.io/load-balancer-cleanup"], "annotations": {"kept": "yes"}},
            "spec": {
                "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"], "healthCheckNodePort": 30001,
                "selector": {"component-name": component}, "loadBalancerIP": "10.0.0.9",
                "ports": [{"port": 1, "protocol": "TCP", "targetPort": 1, "nodePort": 30000}, {"port": 2}],
            },
            "status": {"loadBalancer": {}},
        })
    };
    let members = json!(["--name=a", "--initial-cluster", "etcd-0=https://etcd-0.etcd:2380"]);
    let sets = [
        ("etcd", set("etcd", "etcd", members)),
        ("apiserver", set("apiserver", "apiserver-svc", json!(["--v=1"]))),
        (
            "controller-manager",
            set("controller-manager", "controller-manager-svc", json!([])),
        ),
    ];
    let services = [
        ("etcd", service("etcd", "etcd", "None")),
        ("apiserver-svc", service("apiserver-svc", "apiserver", "10.0.0.1")),
    ];
    (
        sets.map(|(name, set)| (name.to_owned(), set)).into(),
        services.map(|(name, service)| (name.to_owned(), service)).into(),
    )
}

/// What is recorded after a change, or why nothing is.
fn after(
    change: impl FnOnce(&mut BTreeMap<String, Value>, &mut BTreeMap<String, Value>),
) -> Result<Value, String> {
    let (mut sets, mut services) = stored();
    change(&mut sets, &mut services);
    content(&sets, &services, ROOT)
}

fn fault(change: impl FnOnce(&mut BTreeMap<String, Value>, &mut BTreeMap<String, Value>)) -> String {
    after(change).expect_err("nothing can be recorded")
}

#[test]
fn of_what_was_created_all_is_recorded_but_what_is_of_one_tenant() {
    let content = after(|_, _| {}).expect("a content");
    let set = |name: &str, service: &str, pod: Value| {
        json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "replicas": 1, "serviceName": service, "podManagementPolicy": "OrderedReady",
                "selector": {"matchLabels": {"component-name": name}},
                "updateStrategy": {"type": "OnDelete"},
                "template": {
                    "metadata": {"labels": {"component-name": name}},
                    "spec": {"containers": [pod], "restartPolicy": "Always"},
                },
            },
        })
    };
    let ports = json!([{"port": 1, "protocol": "TCP", "targetPort": 1}, {"port": 2}]);
    let service = |name: &str, spec: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "annotations": {"kept": "yes"}}, "spec": spec});
    assert_eq!(
        content,
        json!({
            "etcd": {
                "metadata": {"name": "etcd"},
                "statefulset": set("etcd", "etcd", json!({"name": "etcd", "image": "a", "args": ["--name=a"]})),
                "service": service("etcd", json!({"clusterIP": "None", "clusterIPs": ["None"], "loadBalancerIP": "10.0.0.9",
                    "selector": {"component-name": "etcd"}, "ports": ports})),
            },
            "apiServer": {
                "metadata": {"name": "apiserver"},
                "statefulset": set("apiserver", "apiserver-svc", json!({"name": "apiserver", "image": "a", "args": ["--v=1"]})),
                "service": service("apiserver-svc", json!({"loadBalancerIP": "10.0.0.9",
                    "selector": {"component-name": "apiserver"}, "ports": ports})),
            },
            "controllerManager": {
                "metadata": {"name": "controller-manager"},
                "statefulset": set("controller-manager", "controller-manager-svc",
                    json!({"name": "controller-manager", "image": "a", "args": []})),
            },
        })
    );
}

#[test]
fn an_annotation_of_the_author_is_no_hash_of_ours() {
    let content =
        after(|sets, _| {
            sets.get_mut("apiserver").expect("it is there")["spec"]["template"]["metadata"]["annotations"]
                ["config-hash"] = json!("a");
        })
        .expect("a content");
    let pods = &content["apiServer"]["statefulset"]["spec"]["template"]["metadata"];
    assert_eq!(pods["annotations"], json!({"config-hash": "a"}));
}

#[test]
fn the_service_is_the_one_that_is_named_or_the_one_that_selects_the_pods() {
    let renamed = |services: &mut BTreeMap<String, Value>, to: &[&str]| {
        let service = services.remove("apiserver-svc").expect("it is there");
        for name in to {
            let mut service = service.clone();
            service["metadata"]["name"] = json!(name);
            services.insert((*name).to_owned(), service);
        }
    };
    let name = |content: &Value| content["apiServer"]["service"]["metadata"]["name"].clone();
    assert_eq!(
        name(&after(|_, services| renamed(services, &["other"])).expect("a content")),
        "other"
    );
    assert_eq!(
        name(&after(|_, services| renamed(services, &["another", "apiserver-svc"])).expect("a content")),
        "apiserver-svc"
    );
    assert_eq!(
        fault(|_, services| renamed(services, &["a", "b"])),
        "StatefulSet apiserver in ns-fd1b34-name: its Service cannot be told: its spec.serviceName names none, and a, b \
         select its pods"
    );
    // Unless one of them is the manager's.
    let one_is_ours = after(|_, services| {
        renamed(services, &["a", "b"]);
        services.get_mut("b").expect("it is there")["metadata"]["managedFields"] = json!([{"manager": FIELD_MANAGER,
            "operation": "Apply", "fieldsV1": {"f:spec": {"f:selector": {}, "f:ports": {}}}}]);
    });
    assert_eq!(name(&one_is_ours.expect("a content")), "b");

    assert_eq!(
        fault(|_, services| renamed(services, &[])),
        "StatefulSet apiserver in ns-fd1b34-name has no Service: there is none of the name in its spec.serviceName, and none \
         selects its pods"
    );
    // One that selects everything or nothing is nobody's.
    for selector in [
        json!({}),
        json!(null),
        json!({"component-name": "apiserver", "a": "b"}),
    ] {
        let fault = fault(|_, services| {
            renamed(services, &["other"]);
            services.get_mut("other").expect("it is there")["spec"]["selector"] = selector.clone();
        });
        assert!(fault.contains("has no Service"), "{selector}: {fault}");
    }
    // A controller-manager has its own or none, whatever name it says.
    let shared = after(|sets, _| {
        sets.get_mut("controller-manager").expect("it is there")["spec"]["serviceName"] =
            json!("apiserver-svc");
    });
    assert_eq!(
        shared.expect("a content")["controllerManager"].get("service"),
        None
    );
    let own = after(|_, services| {
        let mut service = services["apiserver-svc"].clone();
        service["metadata"]["name"] = json!("controller-manager-svc");
        services.insert("controller-manager-svc".into(), service);
    });
    let own = own.expect("a content")["controllerManager"]["service"]["metadata"]["name"].clone();
    assert_eq!(own, "controller-manager-svc");
}

#[test]
fn a_tenant_without_controller_manager_has_none_and_others_must_be_there() {
    let without = after(|sets, _| drop(sets.remove("controller-manager"))).expect("a content");
    assert_eq!(without.get("controllerManager"), None);
    for component in ["etcd", "apiserver"] {
        assert_eq!(
            fault(|sets, _| drop(sets.remove(component))),
            format!("StatefulSet {component} does not exist in ns-fd1b34-name")
        );
    }
}

#[test]
fn members_of_etcd_that_would_change_are_not_recorded() {
    let with_args = |args: Value| {
        fault(|sets, _| {
            sets.get_mut("etcd").expect("it is there")["spec"]["template"]["spec"]["containers"][0]["args"] =
                args;
        })
    };
    for args in [
        json!(null),
        json!([]),
        json!(["--initial-cluster"]),
        json!(["--initial-cluster=etcd-0=https://etcd-0.etcd:2380"]),
        json!(["--initial-cluster", "etcd-0=https://etcd-0.etcd:2380", "--v"]),
    ] {
        assert_eq!(
            with_args(args.clone()),
            "StatefulSet etcd in ns-fd1b34-name: the arguments of its first container do not end with --initial-cluster and \
             the members, as the manager writes them",
            "{args}"
        );
    }
    let scaled = fault(|sets, _| sets.get_mut("etcd").expect("it is there")["spec"]["replicas"] = json!(2));
    assert_eq!(
        scaled,
        "StatefulSet etcd in ns-fd1b34-name has other members than its name, replicas and Service say: \
         etcd-0=https://etcd-0.etcd:2380 instead of etcd-0=https://etcd-0.etcd:2380,etcd-1=https://etcd-1.etcd:2380"
    );
    // Nothing but the members: no arguments are left.
    let content = after(|sets, _| {
        sets.get_mut("etcd").expect("it is there")["spec"]["template"]["spec"]["containers"][0]["args"] =
            json!(["--initial-cluster", "etcd-0=https://etcd-0.etcd:2380"]);
    });
    let container =
        content.expect("a content")["etcd"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]
            .clone();
    assert_eq!(container, json!({"name": "etcd", "image": "a"}));
}

#[test]
fn what_is_no_object_of_its_kind_is_told() {
    let broken = |value: Value| fault(|sets, _| drop(sets.insert("apiserver".into(), value)));
    for value in [
        json!(null),
        json!([]),
        json!("a"),
        json!({"spec": []}),
        json!({"metadata": {"name": "apiserver"}}),
    ] {
        assert!(broken(value.clone()).contains("apiserver"), "{value}");
    }
    assert_eq!(
        broken(json!({"metadata": 1, "spec": {"serviceName": "apiserver-svc"}})),
        "StatefulSet apiserver in ns-fd1b34-name: its metadata cannot be read"
    );
    assert_eq!(
        broken(json!({"metadata": {"name": "apiserver"}, "spec": {"serviceName": "apiserver-svc"}})),
        "what runs in ns-fd1b34-name is no content of a ClusterVersion: \
         spec.apiServer.statefulset.spec.template.spec.containers: Required value: a list of at least one container"
    );
}
