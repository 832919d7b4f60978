//! A table for each rule.

use serde_json::json;

use super::*;

fn bundle(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "statefulset": {
            "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name},
            "spec": {
                "replicas": 1, "serviceName": name, "selector": {"matchLabels": {"a": name}},
                "volumeClaimTemplates": [{"metadata": {"name": "data"}}],
                "template": {
                    "metadata": {"labels": {"a": name, "b": "c"}},
                    "spec": {"containers": [{"name": name, "image": "i:v1.34.0", "ports": [{"containerPort": 1}],
                        "resources": {"requests": {"cpu": "250m", "memory": "1.5Gi", "x": 2}, "limits": {"cpu": "1e3"}}}]},
                },
            },
        },
        "service": {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": {"a": name}, "ports": [{"name": "a", "port": 443}, {"name": "b", "port": 444}]}},
    })
}

fn spec() -> Value {
    json!({"etcd": bundle("etcd"), "apiServer": bundle("apiserver"), "controllerManager": bundle("controller-manager")})
}

fn told(spec: &Value, old: Option<&Value>) -> (Vec<String>, Vec<String>) {
    let findings = check(spec, old);
    (
        findings.faults.iter().map(ToString::to_string).collect(),
        findings.warnings,
    )
}

/// The faults of the good spec with one thing changed.
fn with(pointer: &str, value: Value) -> Vec<String> {
    let mut spec = spec();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = spec.pointer_mut(parent).expect(pointer);
    match parent {
        Value::Array(items) => items[key.parse::<usize>().unwrap()] = value,
        _ if value.is_null() => {
            parent.as_object_mut().unwrap().remove(key);
        }
        _ => parent[key] = value,
    }
    told(&spec, None).0
}

#[test]
fn nothing_is_wrong_with_what_is_right() {
    assert_eq!(told(&spec(), None), (vec![], vec![]));
    let only_apiserver = json!({"apiServer": bundle("apiserver"), "etcd": null});
    assert_eq!(told(&only_apiserver, None), (vec![], vec![]));
}

#[test]
fn each_rule_says_where_and_what() {
    let set = "/apiServer/statefulset";
    for (pointer, value, fault) in [
        (
            "/apiServer",
            json!(null),
            "spec.apiServer: Required value: a tenant without an apiserver cannot be provisioned",
        ),
        (
            "/apiServer",
            json!([]),
            "spec.apiServer: Invalid value: []: must be an object with statefulset and service",
        ),
        (
            "/apiServer/metadata/name",
            json!("api"),
            "spec.apiServer.metadata.name: Unsupported value: \"api\": supported values: \"apiserver\"",
        ),
        (
            "/apiServer/statefulset",
            json!(null),
            "spec.apiServer.statefulset: Required value: a whole apps/v1 StatefulSet",
        ),
        (
            "/apiServer/service",
            json!(null),
            "spec.apiServer.service: Required value: the certificates of the apiserver are made for its name",
        ),
        (
            "/apiServer/service",
            json!("x"),
            "spec.apiServer.service: Invalid value: \"x\": must be a whole v1 Service",
        ),
        (
            &format!("{set}/apiVersion"),
            json!(null),
            "spec.apiServer.statefulset.apiVersion: Required value: must be \"apps/v1\"",
        ),
        (
            &format!("{set}/apiVersion"),
            json!(""),
            "spec.apiServer.statefulset.apiVersion: Required value: must be \"apps/v1\"",
        ),
        (
            &format!("{set}/kind"),
            json!("Deployment"),
            "spec.apiServer.statefulset.kind: Unsupported value: \"Deployment\": supported values: \"StatefulSet\"",
        ),
        (
            &format!("{set}/metadata/name"),
            json!("x"),
            "spec.apiServer.statefulset.metadata.name: Unsupported value: \"x\": supported values: \"apiserver\"",
        ),
    ] {
        assert_eq!(with(pointer, value), [fault], "{pointer}");
    }
    assert_eq!(
        told(&json!([1]), None).0,
        ["spec: Required value: the templates of tenants"]
    );
}

#[test]
fn each_rule_of_services_says_where_and_what() {
    for (pointer, value, fault) in [
        (
            "/apiServer/service/apiVersion",
            json!("apps/v1"),
            "spec.apiServer.service.apiVersion: Unsupported value: \"apps/v1\": supported values: \"v1\"",
        ),
        (
            "/apiServer/service/kind",
            json!(null),
            "spec.apiServer.service.kind: Required value: must be \"Service\"",
        ),
        (
            "/apiServer/service/metadata/name",
            json!(null),
            "spec.apiServer.service.metadata.name: Required value: it is part of the tenant's DNS names",
        ),
        (
            "/apiServer/service/metadata/name",
            json!("-a"),
            "spec.apiServer.service.metadata.name: Invalid value: \"-a\": must be a DNS label: lower-case letters, digits and '-', no '-' at its ends, at most 63 characters",
        ),
        (
            "/apiServer/service/metadata/name",
            json!("etcd"),
            "spec.apiServer.service.metadata.name: Duplicate value: \"etcd\"",
        ),
        (
            "/apiServer/service/spec/clusterIP",
            json!("none"),
            "spec.apiServer.service.spec.clusterIP: Invalid value: \"none\": must be empty, \"None\" or an IP address",
        ),
        (
            "/apiServer/service/spec/ports/0",
            json!({"name": "a", "port": 1, "nodePort": 99999}),
            "spec.apiServer.service.spec.ports[0].nodePort: Invalid value: 99999: must be between 1 and 65535, inclusive",
        ),
        (
            "/apiServer/service/spec/ports/0",
            json!({"name": "a", "port": 0}),
            "spec.apiServer.service.spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
        ),
        (
            "/apiServer/service/spec/ports/0",
            json!({"name": "b", "port": 1}),
            "spec.apiServer.service.spec.ports[1].name: Duplicate value: \"b\"",
        ),
        (
            "/etcd/statefulset/spec/replicas",
            json!(0),
            "spec.etcd.statefulset.spec.replicas: Invalid value: 0: must be at least 1: a tenant without etcd has no apiserver",
        ),
        (
            "/etcd/statefulset/spec/replicas",
            json!("1"),
            "spec.etcd.statefulset.spec.replicas: Invalid value: \"1\": must be an integer from 0 to 1000",
        ),
    ] {
        assert_eq!(with(pointer, value), [fault], "{pointer}");
    }
}

#[test]
fn each_rule_of_pods_says_where_and_what() {
    let set = "/apiServer/statefulset";
    let container = "/apiServer/statefulset/spec/template/spec/containers/0";
    for (pointer, value, fault) in [
        (
            &format!("{set}/spec/selector"),
            json!({}),
            "spec.apiServer.statefulset.spec.selector.matchLabels: Required value: the labels of the pods",
        ),
        (
            &format!("{set}/spec/selector/matchLabels"),
            json!({"a": "b"}),
            "spec.apiServer.statefulset.spec.template.metadata.labels: Invalid value: {\"a\":\"apiserver\",\"b\":\"c\"}: `selector` does not match template `labels`",
        ),
        (
            &format!("{set}/spec/updateStrategy"),
            json!("OnDelete"),
            "spec.apiServer.statefulset.spec.updateStrategy: Invalid value: \"OnDelete\": must be an object such as {\"type\": \"RollingUpdate\"}",
        ),
        (
            &format!("{set}/spec/template/spec/containers"),
            json!([]),
            "spec.apiServer.statefulset.spec.template.spec.containers: Required value: a list of at least one container",
        ),
        (
            &format!("{container}/name"),
            json!(""),
            "spec.apiServer.statefulset.spec.template.spec.containers[0].name: Required value: the name of the container",
        ),
        (
            &format!("{container}/image"),
            json!(null),
            "spec.apiServer.statefulset.spec.template.spec.containers[0].image: Required value: what it runs",
        ),
        (
            &format!("{container}/ports/0"),
            json!({}),
            "spec.apiServer.statefulset.spec.template.spec.containers[0].ports[0].containerPort: Required value: a port",
        ),
        (
            &format!("{container}/ports/0"),
            json!({"containerPort": 70000}),
            "spec.apiServer.statefulset.spec.template.spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        ),
        (
            &format!("{container}/resources/requests/cpu"),
            json!("1x"),
            "spec.apiServer.statefulset.spec.template.spec.containers[0].resources.requests[cpu]: Invalid value: \"1x\": must be a quantity such as 250m, 2 or 1Gi",
        ),
    ] {
        assert_eq!(with(pointer, value), [fault], "{pointer}");
    }
}

#[test]
fn all_faults_come_at_once_in_the_order_of_the_bundles() {
    let mut spec = spec();
    for component in ["controllerManager", "etcd", "apiServer"] {
        spec[component]["statefulset"]
            .as_object_mut()
            .unwrap()
            .remove("apiVersion");
        spec[component]["service"]["kind"] = json!("x");
    }
    let fields: Vec<_> = check(&spec, None)
        .faults
        .into_iter()
        .map(|fault| fault.field)
        .collect();
    assert_eq!(
        fields,
        [
            "spec.etcd.statefulset.apiVersion",
            "spec.etcd.service.kind",
            "spec.apiServer.statefulset.apiVersion",
            "spec.apiServer.service.kind",
            "spec.controllerManager.statefulset.apiVersion",
            "spec.controllerManager.service.kind",
        ]
    );
}

#[test]
fn what_was_so_before_is_told_and_not_refused() {
    let mut old = spec();
    old["etcd"]["statefulset"].as_object_mut().unwrap().remove("kind");
    old["apiServer"]["service"]
        .as_object_mut()
        .unwrap()
        .remove("kind");
    let mut new = old.clone();
    new["upgradePolicy"] = json!({"paused": true});
    let (faults, warnings) = told(&new, Some(&old));
    assert!(faults.is_empty());
    assert_eq!(
        warnings[1],
        "spec.etcd.statefulset.kind: Required value: must be \"StatefulSet\" (not refused, as it was so before)"
    );
    // Whoever edits a bundle mends it.
    new["apiServer"]["service"]["spec"] = json!({});
    assert_eq!(
        told(&new, Some(&old)).0,
        ["spec.apiServer.service.kind: Required value: must be \"Service\""]
    );
}

#[test]
fn what_works_but_hurts() {
    let mut spec = spec();
    let etcd = &mut spec["etcd"]["statefulset"]["spec"];
    etcd["replicas"] = json!(2);
    etcd.as_object_mut().unwrap().remove("volumeClaimTemplates");
    etcd["template"]["spec"]["volumes"] =
        json!([{"name": "data", "emptyDir": {}}, {"name": "c", "secret": {}}]);
    spec["apiServer"]["statefulset"]["spec"]["updateStrategy"] =
        json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 1}});
    spec["apiServer"]["statefulSet"] = json!({});
    spec["apiServer"]["statefulset"]["spec"]["replicas"] = json!(0);
    spec["apiServer"]["service"]["spec"] =
        json!({"clusterIP": "10.0.0.1", "ports": [{"port": 1, "nodePort": 30000}]});
    spec["etcd"]["statefulset"]["spec"]["serviceName"] = json!("other");
    spec["extra"] = json!(1);
    let (faults, warnings) = told(&spec, None);
    assert!(faults.is_empty(), "{faults:?}");
    assert_eq!(
        warnings,
        [
            "spec.etcd.statefulset.spec.replicas: 2 members tolerate no more losses than 1",
            "spec.etcd.statefulset: no persistent volume: the tenant's data is lost with its pod; use spec.volumeClaimTemplates",
            "spec.etcd.statefulset.spec.serviceName: is not the name of the Service, by which members find each other",
            "spec.apiServer.statefulSet: unknown, and ignored; did you mean \"statefulset\"?",
            "spec.apiServer.statefulset.spec.replicas: 0: a tenant without an apiserver never runs",
            "spec.apiServer.statefulset.spec.updateStrategy.rollingUpdate.partition: 1: an upgrade is never complete, as pods below it keep what they run",
            "spec.apiServer.service.spec.ports[0].nodePort: one Service only can have it, so one tenant",
            "spec.apiServer.service.spec.clusterIP: one Service only can have it, so one tenant",
            "spec.apiServer.service.spec.selector: chooses none of the pods of the StatefulSet, so that nobody reaches them by it",
            "spec.extra: unknown, and ignored",
        ]
    );
    spec["etcd"]["statefulset"]["spec"]["template"]["spec"]["volumes"] =
        json!([{"name": "data", "persistentVolumeClaim": {"claimName": "x"}}]);
    assert_eq!(told(&spec, None).1.len(), 9);
}
