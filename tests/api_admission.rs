//! The webhooks as a user meets them: kubectl, a real API server, the real program over TLS.
//!
//! The definitions installed here have no rules of their own, so that every refusal is one of the webhooks. The texts
//! are kept as snapshots: they are what people read.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::sync::OnceLock;

use serde_json::{Value, json};

use support::{
    PATIENCE, samples, templates,
    webhook::{Printed, Webhooked},
};

/// The API server and the manager that all tests share, registered with it; and how it was before.
fn shared() -> &'static Webhooked {
    static SHARED: OnceLock<Webhooked> = OnceLock::new();
    SHARED.get_or_init(|| {
        let scene = Webhooked::start();
        scene.create_namespace();
        // From before the rules.
        let mut broken = good("old");
        for bundle in ["etcd", "apiServer"] {
            let set = broken["spec"][bundle]["statefulset"].as_object_mut().unwrap();
            set.remove("apiVersion");
            set.remove("kind");
        }
        scene.create(&broken);
        for (namespace, name) in [("default", "old"), ("default", "old-gone")] {
            scene.create(&tenant(namespace, name, "old"));
        }
        scene.register(&["v1", "v1beta1"]);
        scene
    })
}

trait Kubectl {
    fn create(&self, object: &Value) -> Printed;
    fn apply(&self, object: &Value, flags: &[&str]) -> Printed;
    fn read(&self, kind: &str, name: &str) -> Value;
}

impl Kubectl for Webhooked {
    /// Creates what has to be accepted.
    fn create(&self, object: &Value) -> Printed {
        let printed = self.kubectl(&["create", "-f", "-"], &object.to_string());
        assert!(printed.ok, "{}", printed.text);
        printed
    }

    fn apply(&self, object: &Value, flags: &[&str]) -> Printed {
        let arguments = [&["apply", "-f", "-"], flags].concat();
        self.kubectl(&arguments, &object.to_string())
    }

    fn read(&self, kind: &str, name: &str) -> Value {
        let printed = self.kubectl(&["get", kind, name, "-o", "json"], "");
        serde_json::from_str(&printed.text).unwrap_or_else(|_| panic!("{}", printed.text))
    }
}

fn cluster_version(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "ClusterVersion", "metadata": {"name": name}, "spec": spec})
}

/// A ClusterVersion that nothing is wrong with, but for its update strategies.
fn good(name: &str) -> Value {
    let mut spec = templates::full("ClusterIP");
    spec["etcd"]["statefulset"]["spec"]["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}]);
    cluster_version(name, &spec)
}

fn tenant(namespace: &str, name: &str, cluster_version: &str) -> Value {
    json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "VirtualCluster",
        "metadata": {"name": name, "namespace": namespace}, "spec": {"clusterVersionName": cluster_version}})
}

fn strategies(object: &Value) -> [&Value; 3] {
    ["etcd", "apiServer", "controllerManager"]
        .map(|bundle| &object["spec"][bundle]["statefulset"]["spec"]["updateStrategy"])
}

#[test]
fn stateful_sets_are_made_to_roll_however_they_are_written() {
    let scene = shared();
    let rolling = json!({"type": "RollingUpdate"});

    let mut object = good("rolling");
    object["spec"]["etcd"]["statefulset"]["spec"]["updateStrategy"] = json!(null);
    object["spec"]["apiServer"]["statefulset"]["spec"]["updateStrategy"] =
        json!({"type": "OnDelete", "rollingUpdate": {"partition": 1}});
    object["spec"]["future"] = json!({"b": [1, null]});
    let printed = scene.apply(&object, &["--validate=ignore"]);
    assert!(printed.ok, "{}", printed.text);
    insta::assert_snapshot!("changed", printed.text);
    let stored = scene.read("clusterversion", "rolling");
    assert_eq!(
        strategies(&stored),
        [
            &rolling,
            &json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}),
            &rolling
        ]
    );
    assert_eq!(stored["spec"]["future"], object["spec"]["future"]);

    // Again: the same content is the same object.
    scene.apply(&object, &["--validate=ignore"]);
    let again = scene.read("clusterversion", "rolling");
    assert_eq!(again["metadata"]["generation"], stored["metadata"]["generation"]);

    let patch =
        json!({"spec": {"apiServer": {"statefulset": {"spec": {"updateStrategy": {"type": "OnDelete"}}}}}});
    let printed = scene.kubectl(
        &[
            "patch",
            "clusterversion",
            "rolling",
            "--type=merge",
            "-p",
            &patch.to_string(),
        ],
        "",
    );
    assert!(
        printed.ok && printed.text.contains("changed from \"OnDelete\""),
        "{}",
        printed.text
    );
    assert_eq!(
        strategies(&scene.read("clusterversion", "rolling"))[1]["type"],
        "RollingUpdate"
    );

    // By the server's own apply, twice, and in a dry run, which answers alike and stores nothing.
    let server_side = ["--server-side", "--field-manager=test"];
    let mut other = good("rolling-ssa");
    let dry = scene.apply(
        &other,
        &[&server_side[..], &["--dry-run=server", "-o", "json"]].concat(),
    );
    assert!(
        dry.ok && dry.text.contains("\"RollingUpdate\"") && !dry.text.contains(": \"OnDelete\""),
        "{}",
        dry.text
    );
    assert!(!scene.kubectl(&["get", "clusterversion", "rolling-ssa"], "").ok);
    assert!(scene.apply(&other, &server_side).ok);
    let stored = scene.read("clusterversion", "rolling-ssa");
    assert_eq!(strategies(&stored), [&rolling, &rolling, &rolling]);
    assert!(scene.apply(&other, &server_side).ok);
    assert_eq!(
        scene.read("clusterversion", "rolling-ssa")["metadata"]["generation"],
        stored["metadata"]["generation"]
    );
    other["spec"]["etcd"] = json!(null);
    other["spec"].as_object_mut().unwrap().remove("controllerManager");
    assert!(scene.apply(&other, &server_side).ok, "absent bundles are fine");
}

#[test]
fn all_faults_are_told_at_once() {
    let scene = shared();
    let mut object = good("faulty");
    let spec = &mut object["spec"];
    for (bundle, key) in [("etcd", "statefulset"), ("apiServer", "service")] {
        let embedded = spec[bundle][key].as_object_mut().unwrap();
        embedded.remove("apiVersion");
        embedded.remove("kind");
    }
    spec["etcd"]["statefulset"]["spec"]["replicas"] = json!(0);
    spec["etcd"]["service"]["apiVersion"] = json!("apps/v1");
    spec["apiServer"]["metadata"]["name"] = json!("kube-apiserver");
    let pods = &mut spec["apiServer"]["statefulset"]["spec"]["template"];
    pods["metadata"]["labels"] = json!({"other": "label"});
    pods["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "one"}});
    pods["spec"]["containers"][0]["ports"][0]["containerPort"] = json!(70_000);
    // Only the API server knows these.
    spec["controllerManager"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] =
        json!("Sometimes");
    spec["controllerManager"]["statefulset"]["spec"]["unheardOf"] = json!(true);
    spec["apiServer"]["service"]["spec"]["ports"][0]["protocol"] = json!("HTTP");
    for (name, flags) in [
        ("faults", &[][..]),
        ("faults-server-side", &["--server-side"][..]),
    ] {
        let printed = scene.apply(&object, flags);
        assert!(!printed.ok);
        insta::assert_snapshot!(name, printed.text);
    }
    let printed = scene.kubectl(
        &["create", "-f", "-"],
        &cluster_version("empty", &json!({})).to_string(),
    );
    insta::assert_snapshot!("nothing-in-it", printed.text);
}

#[test]
fn what_only_the_api_server_knows_is_asked_of_it() {
    let scene = shared();
    let pod = "/spec/apiServer/statefulset/spec/template/spec";
    let container = format!("{pod}/containers/0");
    let mut told = String::new();
    for (what, pointer, value) in [
        ("an unknown field", format!("{pod}/hostNetwrk"), json!(true)),
        ("a wrong type", format!("{pod}/hostNetwork"), json!("yes")),
        (
            "two ports alike",
            format!("{container}/ports"),
            json!([
            {"name": "a", "containerPort": 1, "protocol": "TCP"}, {"name": "b", "containerPort": 1, "protocol": "TCP"}]),
        ),
        (
            "two variables alike",
            format!("{container}/env"),
            json!([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        ),
        (
            "a mount without a volume",
            format!("{container}/volumeMounts"),
            json!([{"name": "v", "mountPath": "/v"}]),
        ),
        (
            "a bad label",
            "/spec/apiServer/statefulset/metadata/labels".into(),
            json!({"a b": "c"}),
        ),
        (
            "a Service type",
            "/spec/apiServer/service/spec/type".into(),
            json!("Cluster"),
        ),
        (
            "a field the API server sets",
            "/spec/apiServer/statefulset/metadata/uid".into(),
            json!("u"),
        ),
    ] {
        let mut object = good("asked");
        for bundle in ["etcd", "apiServer", "controllerManager"] {
            object["spec"][bundle]["statefulset"]["spec"]["updateStrategy"] =
                json!({"type": "RollingUpdate"});
        }
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[key] = value;
        let printed = scene.kubectl(
            &["create", "--dry-run=server", "--validate=ignore", "-f", "-"],
            &object.to_string(),
        );
        told.extend([what, ": ", &printed.text]);
    }
    insta::assert_snapshot!("asked", told);
}

#[test]
fn what_tenants_use_stays_and_keeps_its_frozen_fields() {
    let scene = shared();
    scene.create(&good("used"));
    for n in 1..=7 {
        scene.create(&tenant("default", &format!("user-{n}"), "used"));
    }
    let mut edited = good("used");
    for bundle in ["etcd", "apiServer", "controllerManager"] {
        let spec = &mut edited["spec"][bundle]["statefulset"]["spec"];
        spec["serviceName"] = json!("another");
        spec["podManagementPolicy"] = json!("Parallel");
    }
    edited["spec"]["etcd"]["statefulset"]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]
        ["storage"] = json!("2Gi");
    edited["spec"]["apiServer"]["service"]["spec"]["clusterIP"] = json!("None");
    let printed = scene.apply(&edited, &["--server-side", "--force-conflicts"]);
    assert!(!printed.ok);
    insta::assert_snapshot!("frozen", printed.text);

    let printed = scene.kubectl(&["delete", "clusterversion", "used", "--wait=false"], "");
    assert!(!printed.ok);
    insta::assert_snapshot!("in-use", printed.text);

    // What can change may, and what nobody uses.
    let mut allowed = good("used");
    allowed["spec"]["apiServer"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["image"] =
        json!("i:2");
    assert!(scene.apply(&allowed, &["--server-side", "--force-conflicts"]).ok);
    edited["metadata"]["name"] = json!("unused");
    scene.create(&good("unused"));
    let printed = scene.apply(&edited, &["--server-side", "--force-conflicts"]);
    assert!(printed.ok, "{}", printed.text);
    let printed = scene.kubectl(&["delete", "clusterversion", "unused"], "");
    assert!(printed.ok, "{}", printed.text);

    // Deleting tenants never asks us; when they are gone, so may it be.
    let users: Vec<_> = (1..=7).map(|n| format!("user-{n}")).collect();
    let arguments: Vec<_> = ["delete", "vc"]
        .into_iter()
        .chain(users.iter().map(String::as_str))
        .collect();
    let printed = scene.kubectl(&arguments, "");
    assert!(printed.ok, "{}", printed.text);
    let printed = scene.kubectl(&["delete", "clusterversion", "used"], "");
    assert!(printed.ok, "{}", printed.text);
}

#[test]
fn a_whole_collection_is_not_deleted_either() {
    let scene = shared();
    scene.create(&good("kept"));
    scene.create(&tenant("default", "keeper", "kept"));
    let printed = scene.kubectl(
        &[
            "delete",
            "--raw",
            "/apis/tenancy.x-k8s.io/v1alpha1/clusterversions?fieldSelector=metadata.name%3Dkept",
        ],
        "",
    );
    assert!(
        !printed.ok
            && printed
                .text
                .contains("ClusterVersion \"kept\" is in use by VirtualCluster default/keeper"),
        "{}",
        printed.text
    );
    assert_eq!(
        scene.read("clusterversion", "kept")["metadata"]["deletionTimestamp"],
        Value::Null
    );
}

#[test]
fn what_a_tenant_has_of_the_cluster_is_no_fault_of_its_cluster_version() {
    let scene = shared();
    let mut object = good("pinned");
    object["spec"]["apiServer"]["service"]["spec"] = json!({"type": "NodePort", "selector": {"component-name": "apiserver"},
        "clusterIP": "10.0.7.7", "ports": [{"port": 6443, "protocol": "TCP", "targetPort": "api", "nodePort": 31443}]});
    scene.create(&object);
    // As a tenant has it.
    scene.create(&json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "apiserver-svc", "namespace": "default"},
        "spec": object["spec"]["apiServer"]["service"]["spec"]}));
    object["spec"]["apiServer"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["image"] =
        json!("i:2");
    let printed = scene.apply(&object, &["--server-side", "--force-conflicts"]);
    assert!(printed.ok, "{}", printed.text);
}

#[test]
fn a_policy_of_the_managers_namespace_is_no_fault_either() {
    let scene = Webhooked::start();
    scene.create_namespace();
    scene.create(&json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "team"},
        "spec": {"failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["statefulsets"]}]},
            "validations": [{"expression": "has(object.metadata.labels) && 'team' in object.metadata.labels", "message": "label team is missing"}]}}));
    scene.create(&json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": "team"},
        "spec": {"policyName": "team", "validationActions": ["Deny"], "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "vc-manager"}}}}}));
    scene.register(&["v1"]);
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let printed = scene.kubectl(
            &["create", "--dry-run=server", "-f", "-"],
            &good("ruled").to_string(),
        );
        assert!(printed.ok, "{}", printed.text);
        // The API server learns of the policy a moment later.
        if printed
            .text
            .contains("the embedded objects could not be tried out")
            && printed.text.contains("label team is missing")
        {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "the policy is not heard: {}",
            printed.text
        );
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

#[test]
fn an_object_older_than_the_rules_can_be_worked_with() {
    let scene = shared();
    let run = |arguments: &[&str]| {
        let printed = scene.kubectl(arguments, "");
        assert!(printed.ok, "{arguments:?}: {}", printed.text);
        printed.text
    };
    run(&["label", "clusterversion", "old", "a=b"]);
    run(&["annotate", "clusterversion", "old", "a=b"]);
    run(&[
        "patch",
        "clusterversion",
        "old",
        "--subresource=status",
        "--type=merge",
        "-p",
        r#"{"status":{"revision":"x"}}"#,
    ]);
    let finalizers = r#"[{"op":"add","path":"/metadata/finalizers/-","value":"example.com/a"}]"#;
    run(&["patch", "clusterversion", "old", "--type=json", "-p", finalizers]);
    // Policy may change: what is wrong besides is told.
    let told = run(&[
        "patch",
        "clusterversion",
        "old",
        "--type=merge",
        "-p",
        r#"{"spec":{"upgradePolicy":{"paused":true}}}"#,
    ]);
    insta::assert_snapshot!("old-and-told", told);
    assert_eq!(
        strategies(&scene.read("clusterversion", "old"))[0],
        &json!({"type": "OnDelete"}),
        "a bundle that is not edited is no new revision"
    );
    // Half of it mended is not enough for the half that is edited.
    let half = r#"{"spec":{"etcd":{"statefulset":{"kind":"StatefulSet"}}}}"#;
    let refused = scene.kubectl(
        &["patch", "clusterversion", "old", "--type=merge", "-p", half],
        "",
    );
    assert!(
        !refused.ok
            && refused
                .text
                .contains("spec.etcd.statefulset.apiVersion: Required value"),
        "{}",
        refused.text
    );
    let of_the_other = |line: &&str| line.trim_start_matches("* ").starts_with("spec.apiServer");
    assert_eq!(
        refused.text.lines().find(of_the_other),
        None,
        "what is not edited is not refused"
    );
    let repaired = scene.apply(&good("old"), &["--server-side", "--force-conflicts"]);
    assert!(repaired.ok, "{}", repaired.text);

    // Deleted while a finalizer holds it, it can still lose that, whatever is in it.
    for name in ["old", "old-gone"] {
        run(&["delete", "vc", name]);
    }
    run(&["delete", "clusterversion", "old", "--wait=false"]);
    let broken = r#"{"metadata":{"finalizers":null},"spec":{"etcd":7}}"#;
    run(&["patch", "clusterversion", "old", "--type=merge", "-p", broken]);
    run(&["wait", "--for=delete", "clusterversion/old", "--timeout=60s"]);
}

#[test]
fn virtual_clusters() {
    let scene = shared();
    scene.create(&good("for-tenants"));
    scene.create(&tenant("default", "steady", "for-tenants"));
    let mut told = String::new();
    let mut say = |what: &str, printed: &Printed, ok: bool| {
        assert_eq!(printed.ok, ok, "{what}: {}", printed.text);
        told.extend([what, ": ", &printed.text]);
    };
    let patch =
        |name: &str, patch: &str| scene.kubectl(&["patch", "vc", name, "--type=merge", "-p", patch], "");
    say(
        "another ClusterVersion",
        &patch("steady", r#"{"spec":{"clusterVersionName":"other"}}"#),
        false,
    );
    say(
        "a bad value",
        &patch("steady", r#"{"spec":{"pkiExpireDays":0,"clusterDomain":"a_b"}}"#),
        false,
    );
    say(
        "a good value",
        &patch("steady", r#"{"spec":{"pkiExpireDays":30}}"#),
        true,
    );
    let create =
        |object: &Value| scene.kubectl(&["create", "--dry-run=server", "-f", "-"], &object.to_string());
    say(
        "a long name",
        &create(&tenant("default", &"n".repeat(49), "for-tenants")),
        false,
    );
    say(
        "a dotted name",
        &create(&tenant("default", "a.b", "for-tenants")),
        false,
    );
    say(
        "no ClusterVersion",
        &create(&tenant("default", "t", "nowhere")),
        true,
    );
    say("an empty one", &create(&tenant("default", "t", "")), false);
    let mut labelled = tenant("default", "t", "for-tenants");
    labelled["metadata"]["labels"] = json!({"tenancy.x-k8s.io/ready-for-upgrade": "yes"});
    say("a consent that is none", &create(&labelled), true);
    insta::assert_snapshot!("tenants", told);

    // What the manager writes itself, and what operators do.
    for arguments in [
        &["label", "vc", "steady", "tenancy.x-k8s.io/ready-for-upgrade=true"][..],
        &[
            "patch",
            "vc",
            "steady",
            "--subresource=status",
            "--type=merge",
            "-p",
            r#"{"status":{"phase":"Running"}}"#,
        ],
        &["delete", "vc", "steady"],
        &["delete", "clusterversion", "for-tenants"],
    ] {
        let printed = scene.kubectl(arguments, "");
        assert!(printed.ok, "{arguments:?}: {}", printed.text);
    }
}

#[test]
fn refusals_are_logged_and_counted_without_the_object() {
    let scene = shared();
    let mut object = good("secretive");
    object["spec"]["apiServer"]["service"]["kind"] = json!("s3cr3t");
    object["spec"]["apiServer"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["env"] =
        json!([{"name": "PASSWORD", "value": "s3cr3t"}]);
    assert!(!scene.apply(&object, &[]).ok);
    let log = scene.log();
    let line = log
        .lines()
        .find(|line| line.contains("secretive") && line.contains("refused"))
        .expect("a line");
    for part in [
        "\"user\":\"jane\"",
        "\"operation\":\"create\"",
        "\"webhook\":\"clusterversion.validating.webhook\"",
        "spec.apiServer.service.kind: Unsupported value",
        "\"code\":422",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    assert!(!log.contains("s3cr3t"));
    let metrics = support::webhook::get(scene, "/metrics");
    for series in [
        r#"vc_manager_admission_reviews_total{operation="create",result="refused",webhook="clusterversion.validating.webhook"}"#,
        r#"vc_manager_admission_review_seconds_count{webhook="clusterversion.validating.webhook"}"#,
    ] {
        let value = metrics
            .lines()
            .find_map(|line| line.strip_prefix(series))
            .unwrap_or_else(|| panic!("{series} is not in {metrics}"));
        assert!(value.trim().parse::<f64>().unwrap() >= 1.0);
    }
}

#[test]
fn an_edit_that_is_refused_is_not_lost() {
    let scene = shared();
    scene.create(&good("edited"));
    let printed = scene.edit("edited", "s/image: registry.example\\/apiserver:1/image: \"\"/");
    assert!(!printed.ok);
    let text = printed.text;
    assert!(
        text.contains("clusterversions.tenancy.x-k8s.io \"edited\" is invalid"),
        "{text}"
    );
    // kubectl keeps the text and says where.
    let kept = text
        .split_whitespace()
        .find(|word| word.contains("kubectl-edit-"))
        .expect("a file");
    assert!(
        std::fs::read_to_string(kept.trim_matches('"'))
            .unwrap()
            .contains("image: \"\"")
    );
    std::fs::remove_file(kept.trim_matches('"')).unwrap();
    assert!(scene.edit("edited", "s/apiserver:1/apiserver:2/").ok);
}

/// The Go manager's own samples: which pass, and what is said of the others.
#[test]
fn samples_of_the_go_manager() {
    let Some(folder) = samples::of_the_go_manager() else {
        return;
    };
    let scene = shared();
    let mut told = String::new();
    for set in [
        "sampleswithspec",
        "release-0.1/sampleswithspec",
        "pre-pr301/sampleswithspec",
        "adapted",
    ] {
        for file in samples::files(&folder.join(set)) {
            let name = file
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if !name.starts_with("clusterversion_") && !name.starts_with("virtualcluster_")
                || name.contains("capi")
            {
                continue;
            }
            let text = std::fs::read_to_string(&file).expect("a file");
            let printed = scene.kubectl(
                &["create", "--dry-run=server", "--validate=ignore", "-f", "-"],
                &text,
            );
            let text = printed.text.replace(&*folder.to_string_lossy(), "");
            let outcome = if printed.ok { "passes" } else { "is refused" };
            told.extend([
                set, "/", &name, ": ", outcome, "
", &text, "
",
            ]);
        }
    }
    insta::assert_snapshot!("samples", told);
}

#[test]
fn when_nothing_can_be_asked_it_is_allowed_and_said() {
    let scene = Webhooked::start();
    // The namespace that dry runs go to does not exist here. And the older version of reviews is spoken as well.
    scene.register(&["v1beta1"]);
    let printed = scene.apply(&good("untried"), &[]);
    assert!(printed.ok, "{}", printed.text);
    assert!(
        printed
            .text
            .contains("the embedded objects could not be tried out"),
        "{}",
        printed.text
    );
}
