//! The upkeep of a tenant that runs, on real keys and certificates: what is put back and what is left, what is restarted
//! and what never is, and that from any damage it comes to rest.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{ByteString, api::core::v1::Pod, jiff::SignedDuration};
use proptest::prelude::*;
use serde_json::{Value, json};
use vc_manager::{
    api::{Component, template::Template},
    controller::{
        credentials::Why,
        plan::{self, Answer, Deaf, Effect, Known, Plan},
        render::{self, Kind, TenantSecret},
    },
};

use crate::{
    fixture::{content, now},
    real::{LEAVES, Plane, ROOT, Rest, all_claims, days, names},
    world::World,
};

const MINUTE: SignedDuration = SignedDuration::from_mins(1);
/// To the container, in a StatefulSet.
const CONTAINER: [&str; 5] = ["spec", "template", "spec", "containers", "0"];
const KUBECONFIG: TenantSecret = TenantSecret::ControllerManagerKubeconfig;

/// The leaves come to their time.
fn due(plane: &mut Plane) {
    let renew_at = plane.credentials().status.renew_at.expect("a time").0;
    plane.at(renew_at);
}

const RENEWED: &str =
    "issue apiserver-ca etcd-ca front-proxy-ca controller-manager-kubeconfig admin-kubeconfig";

#[test]
fn where_nothing_is_to_be_done_nothing_is() {
    for probe in [true, false] {
        for paused in [true, false] {
            for adopted in [true, false] {
                let mut plane = Plane::running();
                (plane.probe, plane.paused, plane.adopted) = (probe, paused, adopted);
                plane.at(now() + days(30));
                assert_eq!(plane.plan(), Plan::Done);
                plane.settle_well();
                assert!(plane.log.is_empty());
            }
        }
    }
    let mut plane = Plane::left_by_go(now() + days(90), &ROOT);
    assert_eq!(plane.settle(), Rest::Done);
    assert!(plane.log.is_empty(), "one that was taken over is left as it is");
}

#[test]
fn nothing_is_done_without_a_namespace_that_is_the_tenants_own() {
    let mut plane = Plane::running();
    due(&mut plane);
    let own = plane.observed.namespace.take();
    let Plan::Blocked(why) = plane.plan() else {
        panic!("it is gone")
    };
    assert!(
        why.contains("root namespace ns-fd1b34-name does not exist"),
        "{why}"
    );
    let mut others = own.clone().expect("a namespace");
    others
        .metadata
        .annotations
        .as_mut()
        .expect("annotations")
        .insert("tenancy.x-k8s.io/vcuid".into(), "another".into());
    plane.observed.namespace = Some(others);
    assert!(matches!(plane.plan(), Plan::Blocked(_)));
    let mut going = own.clone().expect("a namespace");
    going.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    plane.observed.namespace = Some(going);
    assert!(matches!(plane.plan(), Plan::Wait(wait) if !wait.watched));
    plane.observed.namespace = own;
    assert_eq!(names(&plane.effects()), [RENEWED]);
}

/// A change by hand: of which object, which field, to what (`None`: removed), and how the drift is told.
type Edit = (Kind, &'static str, Vec<&'static str>, Option<Value>, &'static str);

fn edits() -> Vec<Edit> {
    let container = |field: &'static str| CONTAINER.into_iter().chain([field]).collect::<Vec<_>>();
    vec![
        (
            Kind::StatefulSet,
            "apiserver",
            container("image"),
            Some(json!("example.com/other:1")),
            "spec.template.spec.containers[name=apiserver].image (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::StatefulSet,
            "controller-manager",
            container("image"),
            Some(json!("example.com/other:1")),
            "spec.template.spec.containers[name=controller-manager].image (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::StatefulSet,
            "etcd",
            container("args"),
            Some(json!(["--quota-backend-bytes=1"])),
            "spec.template.spec.containers[name=etcd].args (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::StatefulSet,
            "apiserver",
            container("command"),
            None,
            "spec.template.spec.containers[name=apiserver].command (deleted)",
        ),
        (
            Kind::StatefulSet,
            "apiserver",
            vec![
                "spec",
                "template",
                "metadata",
                "labels",
                "tenancy.x-k8s.io/cluster",
            ],
            Some(json!("another")),
            "spec.template.metadata.labels[tenancy.x-k8s.io/cluster] (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::StatefulSet,
            "apiserver",
            vec!["spec", "template", "metadata", "annotations", "root-ca-hash"],
            None,
            "spec.template.metadata.annotations.root-ca-hash (deleted)",
        ),
        (
            Kind::StatefulSet,
            "controller-manager",
            vec!["spec", "replicas"],
            Some(json!(0)),
            "spec.replicas (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::Service,
            "apiserver-svc",
            vec!["spec", "type"],
            Some(json!("NodePort")),
            "spec.type (set by kubectl-edit at 2026-01-01T00:00:00Z)",
        ),
        (
            Kind::Service,
            "etcd",
            vec!["spec", "publishNotReadyAddresses"],
            None,
            "spec.publishNotReadyAddresses (deleted)",
        ),
    ]
}

#[test]
fn what_was_changed_by_hand_is_put_back_alone_and_told() {
    for (kind, object, path, value, told) in edits() {
        let mut plane = Plane::running();
        plane.set_by_hand(kind, object, &path, value.as_ref());
        let effects = plane.effects();
        let [Effect::PutBack { object: put, drift }] = &effects[..] else {
            panic!("{told}: {effects:?}")
        };
        assert_eq!((put.kind, put.name.as_str()), (kind, object));
        let drift: Vec<_> = drift.iter().map(ToString::to_string).collect();
        assert_eq!(drift, [told]);
        assert_eq!(effects[0].replaces_pods(), kind == Kind::StatefulSet);
        plane.settle_well();
        assert_eq!(plane.log, effects, "once, and nothing else");
    }
}

#[test]
fn what_was_deleted_is_made_anew_as_it_was() {
    let whole = Plane::running();
    for component in Component::ALL {
        let mut plane = whole.clone();
        plane.claims = all_claims();
        plane.lose_set(component);
        let effects = plane.effects();
        let [Effect::PutBack { object, drift }] = &effects[..] else {
            panic!("{effects:?}")
        };
        assert!(drift.is_empty());
        let stored = &whole.observed.stateful_sets[component.name()];
        let hash = stored
            .metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get("tenancy.x-k8s.io/rendered-hash"));
        assert_eq!(Some(object.hash()), hash.map(String::as_str), "{component}");
        plane.settle_well();
        assert_eq!(names(&plane.log), [format!("put back StatefulSet {component}")]);
    }
    let mut plane = whole.clone();
    plane.lose_service("etcd");
    plane.settle_well();
    assert_eq!(names(&plane.log), ["put back Service etcd"]);
    // All at once, one after the other.
    let mut plane = whole.clone();
    plane.claims = all_claims();
    for component in Component::ALL {
        plane.lose_set(component);
    }
    plane.lose_service("etcd");
    plane.settle_well();
    assert_eq!(
        names(&plane.log),
        [
            "put back StatefulSet etcd",
            "put back Service etcd",
            "put back StatefulSet apiserver",
            "put back StatefulSet controller-manager",
        ]
    );
}

#[test]
fn what_others_add_and_scale_is_left() {
    let mut plane = Plane::running();
    plane.set_by_hand(
        Kind::StatefulSet,
        "apiserver",
        &["metadata", "labels"],
        Some(&json!({"team": "a"})),
    );
    plane.set_by_hand(
        Kind::StatefulSet,
        "apiserver",
        &["metadata", "annotations", "team"],
        Some(&json!("kept")),
    );
    let resources = [&CONTAINER[..], &["resources"]].concat();
    let limits = json!({"limits": {"cpu": "2"}});
    plane.set_by_hand(Kind::StatefulSet, "etcd", &resources, Some(&limits));
    plane.roll_out_all();
    assert_eq!(plane.plan(), Plan::Done);

    // An autoscaler: what it says stays, and the hash of what is applied is that of an object without replicas.
    let set = plane
        .observed
        .stateful_sets
        .get_mut("apiserver")
        .expect("a StatefulSet");
    set.spec.as_mut().expect("a spec").replicas = Some(3);
    let entry = json!({"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:replicas": {}}}});
    let entries = set.metadata.managed_fields.as_mut().expect("managed fields");
    entries.push(serde_json::from_value(entry).expect("an entry"));
    let effects = plane.effects();
    assert!(
        matches!(&effects[..], [Effect::Apply(object)] if object.value["spec"].get("replicas").is_none()),
        "not by anybody's hand: {effects:?}"
    );
    plane.settle_well();
    let spec = plane.observed.stateful_sets["apiserver"].spec.as_ref();
    assert_eq!(spec.and_then(|spec| spec.replicas), Some(3));
}

#[test]
fn in_a_pause_and_before_its_first_upgrade_here_nothing_is_put_back_but_told() {
    let left = |plane: &mut Plane, object: &str| {
        assert!(plane.log.is_empty(), "{:?}", plane.log);
        let told = plan::differing(&plane.goal(), &plane.observed, &plane.known);
        let told: Vec<_> = told.iter().map(|(rendered, _)| rendered.name.as_str()).collect();
        assert_eq!(told, [object]);
    };
    let pause: fn(&mut Plane) = |plane| plane.paused = true;
    let adopt: fn(&mut Plane) = |plane| plane.adopted = true;
    for stop in [pause, adopt] {
        for (kind, object, path, value, _) in edits() {
            let mut plane = Plane::running();
            stop(&mut plane);
            plane.set_by_hand(kind, object, &path, value.as_ref());
            plane.roll_out_all();
            assert_eq!(plane.settle(), Rest::Done, "{object} {path:?}");
            left(&mut plane, object);
        }
        // What is gone is missing, and so the tenant is not well.
        for component in Component::ALL {
            let mut plane = Plane::running();
            stop(&mut plane);
            plane.lose_set(component);
            let Rest::Wait(wait) = plane.settle() else {
                panic!("{component} is gone, and all is well?")
            };
            assert!(wait.message.contains(component.name()), "{}", wait.message);
            left(&mut plane, component.name());
        }
        for probe in [true, false] {
            let mut plane = Plane::running();
            stop(&mut plane);
            plane.probe = probe;
            plane.lose_service("apiserver-svc");
            assert!(matches!(plane.settle(), Rest::Wait(_)));
            left(&mut plane, "apiserver-svc");
        }
    }
}

#[test]
fn what_was_put_back_too_often_is_left_and_the_rest_is_not() {
    let contested = |kind: Kind, name: &str| {
        let known = Known {
            contested: true,
            ..Known::default()
        };
        BTreeMap::from([((kind.name(), name.to_owned()), known)])
    };
    let image = [&CONTAINER[..], &["image"]].concat();
    let mut plane = Plane::running();
    plane.known = contested(Kind::StatefulSet, "apiserver");
    plane.set_by_hand(Kind::StatefulSet, "apiserver", &image, Some(&json!("other")));
    plane.roll_out_all();
    assert_eq!(plane.plan(), Plan::Done);
    plane.set_by_hand(
        Kind::StatefulSet,
        "controller-manager",
        &image,
        Some(&json!("other")),
    );
    plane.lose_service("etcd");
    plane.settle_well();
    assert_eq!(
        names(&plane.log),
        ["put back Service etcd", "put back StatefulSet controller-manager"]
    );
    let told = plan::differing(&plane.goal(), &plane.observed, &plane.known);
    assert_eq!((told.len(), told[0].0.name.as_str()), (1, "apiserver"));
    // Its time has come again.
    plane.known.clear();
    assert_eq!(names(&plane.effects()), ["put back StatefulSet apiserver"]);

    // One that is deleted over and over, too; and for its address no certificate is made.
    let mut plane = Plane::running();
    plane.known = contested(Kind::Service, "apiserver-svc");
    plane.lose_service("apiserver-svc");
    assert!(matches!(plane.plan(), Plan::Wait(_)));
    due(&mut plane);
    assert!(matches!(plane.plan(), Plan::Blocked(_)));
}

#[test]
fn fields_that_the_api_server_does_not_keep_track_of_are_not_put_back_for_ever() {
    let image = [&CONTAINER[..], &["image"]].concat();
    let mut plane = Plane::running();
    plane.set_by_hand(Kind::StatefulSet, "apiserver", &image, None);
    let effects = plane.effects();
    let [Effect::PutBack { drift, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    let known = Known {
        settled: drift.iter().map(plan::settled_as).collect(),
        contested: false,
    };
    plane.known = BTreeMap::from([(("StatefulSet", "apiserver".to_owned()), known)]);
    plane.roll_out_all();
    assert_eq!(plane.plan(), Plan::Done);
    assert_eq!(plan::differing(&plane.goal(), &plane.observed, &plane.known), []);
    // Another field of the same object is another matter.
    let command = [&CONTAINER[..], &["command"]].concat();
    plane.set_by_hand(Kind::StatefulSet, "apiserver", &command, Some(&json!(["true"])));
    let effects = plane.effects();
    assert!(matches!(&effects[..], [Effect::PutBack { drift, .. }] if drift.len() == 1));
}

/// A tenant whose etcd keeps its data like this.
fn etcd_with(change: impl FnOnce(&mut Value)) -> Plane {
    let mut content = content();
    change(&mut content["etcd"]["statefulset"]["spec"]);
    let mut plane = Plane::new(Template::parse(&content).expect("a template"), &ROOT);
    plane.provision();
    plane
}

fn member(ordinal: u32, leaving: bool) -> Pod {
    let mut pod = json!({"metadata": {"name": format!("etcd-{ordinal}"), "uid": ordinal.to_string()}});
    if leaving {
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    serde_json::from_value(pod).expect("a pod")
}

#[test]
fn an_etcd_without_its_data_is_not_made_anew() {
    let lost = |mut plane: Plane| {
        plane.lose_set(Component::Etcd);
        plane
    };
    let blocked = |plane: &Plane| match plane.plan() {
        Plan::Blocked(why) => {
            assert!(
                why.contains("StatefulSet ns-fd1b34-name/etcd")
                    && why.contains("tenancy.x-k8s.io/accept-empty-etcd=true"),
                "{why}"
            );
            true
        }
        Plan::Do(effects) => {
            assert_eq!(names(&effects)[0], "put back StatefulSet etcd");
            false
        }
        other => panic!("{other:?}"),
    };
    let claims = |names: &[&str]| {
        let mut plane = Plane::running();
        plane.claims = names.iter().map(ToString::to_string).collect();
        lost(plane)
    };
    assert!(blocked(&claims(&[])));
    assert!(
        blocked(&claims(&["data-etcd-0", "data-etcd-2"])),
        "a member's data is lost"
    );
    assert!(blocked(&claims(&[
        "data-etcd-0",
        "data-etcd-1",
        "data-etcd-3",
        "other"
    ])));
    assert!(!blocked(&claims(&["data-etcd-0", "data-etcd-1", "data-etcd-2"])));
    assert!(!blocked(&claims(&[
        "data-etcd-0",
        "data-etcd-1",
        "data-etcd-2",
        "data-etcd-3"
    ])));

    // The samples' own: data in the container.
    let mut plane = lost(etcd_with(|_| {}));
    assert!(blocked(&plane));
    // Deleted with its pods left: they are taken up again.
    plane.observed.pods = (0..3).map(|ordinal| member(ordinal, false)).collect();
    assert!(!blocked(&plane));
    plane.observed.pods[1] = member(1, true);
    assert!(blocked(&plane), "one is on its way out");
    plane.observed.pods.remove(1);
    assert!(blocked(&plane), "one is gone");
    plane.accept_empty_etcd = true;
    assert!(!blocked(&plane));

    // One claim for all, and data on the node.
    let mut plane = etcd_with(|spec| {
        spec["template"]["spec"]["volumes"] =
            json!([{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}]);
    });
    plane.claims = BTreeSet::from(["shared".into()]);
    assert!(!blocked(&lost(plane.clone())));
    plane.claims.clear();
    assert!(blocked(&lost(plane)));
    let volumes = |volumes: Value| lost(etcd_with(|spec| spec["template"]["spec"]["volumes"] = volumes));
    assert!(!blocked(&volumes(
        json!([{"name": "data", "hostPath": {"path": "/data"}}])
    )));
    assert!(blocked(&volumes(json!([{"name": "data", "emptyDir": {}}]))));
}

#[test]
fn only_a_volume_where_etcd_keeps_its_data_counts() {
    let made_anew = |container: Value, volume: Value, template: bool| {
        let mut plane = etcd_with(|spec| {
            let of_it = &mut spec["template"]["spec"]["containers"][0];
            for (key, value) in container.as_object().expect("an object") {
                of_it[key.as_str()] = value.clone();
            }
            if template {
                spec["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"}, "spec": {}}]);
            } else {
                let mut volume = volume;
                volume["name"] = json!("data");
                spec["template"]["spec"]["volumes"] = json!([volume]);
            }
        });
        plane.claims = all_claims();
        plane.claims.insert("shared".into());
        plane.lose_set(Component::Etcd);
        matches!(plane.plan(), Plan::Do(_))
    };
    let on_node = || json!({"hostPath": {"path": "/x"}});
    let mounts =
        |at: &str| json!([{"name": "secret", "mountPath": "/pki"}, {"name": "data", "mountPath": at}]);
    for (at, holds) in [
        ("/var/lib/etcd", true),
        ("/var/lib/etcd/", true),
        ("/var/lib/etcd/data", true),
        ("/var", true),
        ("/", true),
        ("/var/lib/etcd/data/member", false),
        ("/var/lib/etc", false),
        ("/etc/localtime", false),
    ] {
        for container in [
            json!({"args": ["--data-dir=/var/lib/etcd/data"]}),
            json!({"args": ["--name=x", "--data-dir", "/var/lib/etcd/data"]}),
            json!({"command": ["etcd", "--data-dir=/var/lib/etcd/data"], "args": null}),
            json!({"env": [{"name": "ETCD_DATA_DIR", "value": "/var/lib/etcd/data"}]}),
        ] {
            let mut container = container;
            container["volumeMounts"] = mounts(at);
            let found = [
                made_anew(container.clone(), on_node(), false),
                made_anew(
                    container.clone(),
                    json!({"persistentVolumeClaim": {"claimName": "shared"}}),
                    false,
                ),
                made_anew(container.clone(), Value::Null, true),
            ];
            assert_eq!(found, [holds; 3], "{container}");
        }
    }
    // Where it keeps it is not known: any will do.
    let anywhere = json!({"volumeMounts": mounts("/anywhere")});
    assert!(made_anew(anywhere, on_node(), false));
    // Data in the container, and a claim for something else.
    assert!(!made_anew(
        json!({"args": ["--data-dir=/data"]}),
        on_node(),
        false
    ));
}

#[test]
fn a_lost_etcd_does_not_keep_certificates_from_being_renewed() {
    let mut plane = Plane::running();
    plane.lose_set(Component::Etcd);
    due(&mut plane);
    assert!(matches!(plane.look(), Rest::Blocked(_)));
    plane.roll_out_all();
    assert!(matches!(plane.look(), Rest::Blocked(_)));
    assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
}

#[test]
fn the_service_is_put_back_before_certificates_are_made_for_its_address() {
    for due_too in [false, true] {
        let mut plane = Plane::running();
        let before = render::data_of(&plane.observed.secrets["admin-kubeconfig"]);
        plane.lose_service("apiserver-svc");
        if due_too {
            due(&mut plane);
        }
        plane.settle_well();
        let reissued = if due_too {
            RENEWED
        } else {
            "issue apiserver-ca controller-manager-kubeconfig admin-kubeconfig"
        };
        assert_eq!(
            names(&plane.log),
            [
                "put back Service apiserver-svc",
                reissued,
                "restart controller-manager"
            ]
        );
        let Some(address) = plane.observed.services["apiserver-svc"]
            .spec
            .as_ref()
            .and_then(|spec| spec.cluster_ip.clone())
        else {
            panic!("an address")
        };
        let after = String::from_utf8(
            render::data_of(&plane.observed.secrets["admin-kubeconfig"])["admin-kubeconfig"].clone(),
        );
        assert!(after.expect("text").contains(&format!("https://{address}:6443")));
        assert_ne!(
            before,
            render::data_of(&plane.observed.secrets["admin-kubeconfig"])
        );
        let leaf = plane.leaf(TenantSecret::ApiServer);
        assert_eq!(
            leaf.ip_addresses,
            [address.parse::<std::net::IpAddr>().expect("an address")]
        );
    }
    // In a pause nobody puts it back: no certificate is made for an address that is not known.
    let mut plane = Plane::running();
    plane.paused = true;
    plane.lose_service("apiserver-svc");
    due(&mut plane);
    let Plan::Blocked(why) = plane.plan() else {
        panic!("not without the Service")
    };
    assert!(why.contains("Service ns-fd1b34-name/apiserver-svc"), "{why}");
}

#[test]
fn one_whose_service_has_no_address_is_renewed_without() {
    let mut content = content();
    content["apiServer"]["service"]["spec"]["type"] = json!("NodePort");
    let mut plane = Plane::new(Template::parse(&content).expect("a template"), &ROOT);
    plane.provision();
    plane.lose_service("apiserver-svc");
    due(&mut plane);
    plane.settle_well();
    assert_eq!(
        names(&plane.log),
        [
            RENEWED,
            "put back Service apiserver-svc",
            "restart controller-manager"
        ]
    );
}

#[test]
fn a_renewal_restarts_the_controller_manager_once_and_nothing_else() {
    let mut plane = Plane::running();
    for round in 1..4 {
        due(&mut plane);
        plane.log.clear();
        plane.settle_well();
        assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
        assert_eq!(plane.restarts(Component::ControllerManager), round);
        assert_eq!(plane.restarts(Component::ApiServer), 0);
        assert_eq!(plane.restarts(Component::Etcd), 0);
        // Once the files have been taken up, nothing more.
        plane.later(SignedDuration::from_hours(1));
        plane.settle_well();
        assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
    }
}

#[test]
fn a_restart_changes_its_annotation_and_nothing_that_would_be_put_back() {
    for (paused, adopted) in [(false, false), (true, false), (false, true)] {
        let mut plane = Plane::running();
        (plane.paused, plane.adopted) = (paused, adopted);
        due(&mut plane);
        let before = plane.observed.stateful_sets["controller-manager"].clone();
        plane.settle_well();
        let mut after = plane.observed.stateful_sets["controller-manager"].clone();
        let hashes = render::hashes(Component::ControllerManager, &plane.observed.secrets);
        assert_eq!(render::hashes_of(&after), hashes);
        // But for the hash, the template is what it was.
        let spec = after.spec.as_mut().expect("a spec");
        let meta = spec.template.metadata.as_mut().expect("metadata");
        meta.annotations = before
            .spec
            .as_ref()
            .and_then(|spec| spec.template.metadata.as_ref()?.annotations.clone());
        assert_eq!(after.spec, before.spec);
        // It is what the pin says, with the new hash: no drift, now or after a pause.
        (plane.paused, plane.adopted) = (false, false);
        plane.settle_well();
        assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
    }
}

#[test]
fn what_differs_from_the_pin_is_restarted_and_still_differs() {
    let mut plane = Plane::running();
    plane.paused = true;
    let image = [&CONTAINER[..], &["image"]].concat();
    plane.set_by_hand(
        Kind::StatefulSet,
        "controller-manager",
        &image,
        Some(&json!("other")),
    );
    plane.roll_out_all();
    due(&mut plane);
    plane.settle_well();
    assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
    let told = plan::differing(&plane.goal(), &plane.observed, &plane.known);
    assert_eq!((told.len(), told[0].0.name.as_str()), (1, "controller-manager"));
    plane.paused = false;
    plane.log.clear();
    plane.settle_well();
    assert_eq!(names(&plane.log), ["put back StatefulSet controller-manager"]);
}

#[test]
fn one_taken_over_with_on_delete_is_restarted_all_the_same() {
    let mut plane = Plane::left_by_go(now() + days(30), &ROOT);
    let set = plane
        .observed
        .stateful_sets
        .get_mut("controller-manager")
        .expect("a StatefulSet");
    set.spec.as_mut().expect("a spec").update_strategy =
        serde_json::from_value(json!({"type": "OnDelete"})).expect("a strategy");
    due(&mut plane);
    assert_eq!(names(&plane.effects()), [RENEWED]);
    let effects = plane.effects();
    effects.iter().for_each(|effect| plane.apply(effect));
    let effects = plane.effects();
    let [Effect::Restart(restart)] = &effects[..] else {
        panic!("{effects:?}")
    };
    let patch = restart.patch();
    assert_eq!(patch["spec"]["updateStrategy"], json!({"type": "RollingUpdate"}));
    // It carries no hash of a rendering, and gets none.
    assert_eq!(patch["metadata"].as_object().expect("an object").len(), 1);
    let annotations = patch["spec"]["template"]["metadata"]["annotations"].as_object();
    let changed: Vec<_> = annotations.expect("annotations").keys().collect();
    assert_eq!(changed, ["controller-manager-kubeconfig-hash"]);
    plane.settle_well();
    assert_eq!(plane.restarts(Component::ApiServer), 0);
    assert_eq!(plane.restarts(Component::ControllerManager), 1);
}

#[test]
fn an_apiserver_that_goes_on_with_the_old_certificate_is_restarted_when_patience_ends() {
    let mut plane = Plane::running();
    // Files that do not follow their Secret: mounted with subPath, say.
    plane.files_follow = false;
    due(&mut plane);
    plane.settle_until_minutes(4);
    assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
    let issued = plane.last_issue();
    plane.at(issued + 5 * MINUTE);
    assert!(plan::awaits_reload(&plane.observed, plane.now));
    assert_eq!(plane.plan(), Plan::Done, "within its patience");
    plane.at(issued + 5 * MINUTE + SignedDuration::from_secs(1));
    assert!(!plan::awaits_reload(&plane.observed, plane.now));
    plane.log.clear();
    plane.settle_well();
    assert_eq!(names(&plane.log), ["restart apiserver"]);
    let Effect::Restart(restart) = &plane.log[0] else {
        panic!("a restart")
    };
    assert!(restart.why.contains("apiserver-ca"), "{}", restart.why);
    assert_eq!(plane.restarts(Component::ApiServer), 1);
    assert!(
        plane
            .observed
            .served
            .keys()
            .all(|pod| !pod.starts_with("apiserver"))
    );
    // etcd does the same, and is never restarted; that it is told is another's business.
    assert_eq!(plane.restarts(Component::Etcd), 0);
    let etcd = &plane.observed.secrets["etcd-ca"];
    assert_eq!(
        plan::serving_older(&plane.observed, Component::Etcd, etcd, plane.now),
        ["etcd-0"]
    );
}

impl Plane {
    /// Looks every minute, for as many.
    fn settle_until_minutes(&mut self, minutes: u32) {
        for _ in 0..minutes {
            self.look();
            self.roll_out_all();
            self.later(MINUTE);
        }
    }
}

#[test]
fn who_cannot_see_what_is_served_restarts_the_apiserver_once_per_renewal() {
    let mut plane = Plane::running();
    plane.probe = false;
    for round in 1..4 {
        due(&mut plane);
        plane.log.clear();
        plane.settle_well();
        assert_eq!(
            names(&plane.log),
            [RENEWED, "restart apiserver", "restart controller-manager"]
        );
        let restart = plane.log.iter().find_map(|effect| match effect {
            Effect::Restart(restart) => Some(restart),
            _ => None,
        });
        let restart = restart.expect("a restart");
        assert!(
            restart.why.contains("apiserver-ca and front-proxy-ca"),
            "both at once: {}",
            restart.why
        );
        assert_eq!(plane.restarts(Component::ApiServer), round);
        assert_eq!(plane.restarts(Component::ControllerManager), round);
        assert_eq!(plane.restarts(Component::Etcd), 0);
    }
    // From now on it can: what was renewed before is settled.
    plane.probe = true;
    plane.later(days(1));
    plane.log.clear();
    plane.settle_well();
    assert!(plane.log.is_empty());
    due(&mut plane);
    plane.settle_well();
    assert_eq!(names(&plane.log), [RENEWED, "restart controller-manager"]);
    // And a renewal that nobody saw is made good by whoever comes after.
    plane.probe = false;
    due(&mut plane);
    plane.log.clear();
    let effects = plane.effects();
    effects.iter().for_each(|effect| plane.apply(effect));
    plane.probe = true;
    plane.later(MINUTE);
    plane.settle_well();
    assert_eq!(
        names(&plane.log),
        [RENEWED, "restart apiserver", "restart controller-manager"]
    );
}

#[test]
fn the_controller_manager_waits_for_the_apiserver() {
    let mut plane = Plane::running();
    plane.probe = false;
    due(&mut plane);
    // Held: pods that are replaced do not become ready.
    for _ in 0..3 {
        assert!(matches!(plane.look(), Rest::Wait(wait) if wait.component == Some(Component::ApiServer)));
        assert_eq!(names(&plane.log), [RENEWED, "restart apiserver"]);
        plane.later(MINUTE);
    }
    plane.settle_well();
    assert_eq!(
        names(&plane.log).last().map(String::as_str),
        Some("restart controller-manager")
    );

    // Nor is it restarted beside an apiserver that does not answer, or does not run, until it has waited for long.
    let not_answering: fn(&mut Plane) = |plane| plane.observed.answer = Some(Answer::NotReady("no".into()));
    let not_running: fn(&mut Plane) = |plane| {
        let set = plane
            .observed
            .stateful_sets
            .get_mut("apiserver")
            .expect("a StatefulSet");
        set.status.as_mut().expect("a status").ready_replicas = Some(0);
    };
    for harm in [not_answering, not_running] {
        let mut plane = Plane::running();
        due(&mut plane);
        plane.effects().iter().for_each(|effect| plane.apply(effect));
        let well = plane.clone();
        let issued = plane.last_issue();
        for minutes in [0, 30] {
            plane.at(issued + MINUTE * minutes);
            harm(&mut plane);
            let plan = plane.plan();
            assert!(
                matches!(&plan, Plan::Wait(wait) if wait.component == Some(Component::ApiServer)),
                "after {minutes} minutes: {plan:?}"
            );
        }
        // It has a certificate that ends.
        plane.at(issued + MINUTE * 31);
        harm(&mut plane);
        assert_eq!(names(&plane.effects()), ["restart controller-manager"]);
        assert_eq!(names(&well.effects()), ["restart controller-manager"]);
    }
}

#[test]
fn a_leaf_that_cannot_be_issued_or_is_fought_over_holds_up_no_other() {
    for which in LEAVES {
        let contested: fn(&mut Plane, TenantSecret) = |plane, which| {
            let known = Known {
                contested: true,
                ..Known::default()
            };
            plane.known = BTreeMap::from([(plan::id_of(which), known)]);
        };
        let refused: fn(&mut Plane, TenantSecret) = |plane, which| {
            plane.refused.secrets.insert(which);
        };
        for leave in [contested, refused] {
            let mut plane = Plane::running();
            due(&mut plane);
            leave(&mut plane, which);
            plane.settle_well();
            let issued: BTreeSet<_> = plane.issued.keys().copied().collect();
            let others = LEAVES.into_iter().filter(|other| *other != which);
            assert_eq!(issued, others.collect(), "{which}");
            let restarts = u32::from(which != KUBECONFIG);
            assert_eq!(plane.restarts(Component::ControllerManager), restarts, "{which}");
        }
    }
}

#[test]
fn an_object_that_is_refused_is_left_and_the_rest_is_put_back() {
    let mut plane = Plane::running();
    let id = ("StatefulSet", "apiserver".to_owned());
    plane.refused.objects.insert(id, "no".into());
    plane.claims = all_claims();
    for component in Component::ALL {
        plane.lose_set(component);
    }
    let Rest::Wait(wait) = plane.settle() else {
        panic!("one is missing")
    };
    assert!(wait.message.contains("apiserver"), "{}", wait.message);
    assert_eq!(
        names(&plane.log),
        [
            "put back StatefulSet etcd",
            "put back StatefulSet controller-manager"
        ]
    );
}

#[test]
fn what_a_failed_upgrade_left_stays_and_what_was_changed_of_the_pin_does_not() {
    let mut plane = Plane::running();
    plane.after_failure = true;
    let image = [&CONTAINER[..], &["image"]].concat();
    plane.set_by_hand(
        Kind::StatefulSet,
        "controller-manager",
        &image,
        Some(&json!("other")),
    );
    plane.settle_well();
    assert_eq!(names(&plane.log), ["put back StatefulSet controller-manager"]);

    // The upgrade's own: it says so by its hash.
    let mut plane = Plane::running();
    plane.after_failure = true;
    let hash = ["metadata", "annotations", "tenancy.x-k8s.io/rendered-hash"];
    plane.set_by_hand(
        Kind::StatefulSet,
        "apiserver",
        &hash,
        Some(&json!("of the upgrade")),
    );
    plane.set_by_hand(Kind::StatefulSet, "apiserver", &image, Some(&json!("newer")));
    plane.roll_out_all();
    plane.settle_well();
    assert!(plane.log.is_empty());
}

#[test]
fn a_leaf_alone_restarts_only_who_cannot_take_it_up() {
    for which in LEAVES {
        let mut plane = Plane::running();
        plane.observed.secrets.remove(which.name());
        plane.settle_well();
        let mut expected = vec![format!("issue {which}")];
        if which == KUBECONFIG {
            expected.push("restart controller-manager".into());
        }
        assert_eq!(names(&plane.log), expected, "{which}");
    }
}

#[test]
fn without_a_controller_manager_nothing_is_restarted() {
    let mut content = content();
    content
        .as_object_mut()
        .expect("an object")
        .remove("controllerManager");
    let mut plane = Plane::new(Template::parse(&content).expect("a template"), &ROOT);
    plane.provision();
    due(&mut plane);
    plane.settle_well();
    assert_eq!(names(&plane.log), [RENEWED]);
}

#[test]
fn what_a_secret_held_that_nobody_here_issued_restarts_nothing() {
    let mut plane = Plane::left_by_go(now() + days(30), &ROOT);
    // The hashes of the Go manager are of another form: that is no reason.
    for which in [TenantSecret::ApiServer, KUBECONFIG] {
        let component = if which == KUBECONFIG {
            Component::ControllerManager
        } else {
            Component::ApiServer
        };
        let key = render::hash_key(which);
        let running = render::hashes_of(&plane.observed.stateful_sets[component.name()]);
        let present = render::hashes(component, &plane.observed.secrets);
        assert!(running[&key] != present[&key]);
    }
    for probe in [true, false] {
        plane.probe = probe;
        plane.at(now() + days(60));
        assert_eq!(plane.plan(), Plan::Done);
    }
}

#[test]
fn what_somebody_else_put_in_the_place_of_ours_is_neither_restarted_nor_put_back() {
    for component in [Component::ApiServer, Component::ControllerManager] {
        let mut plane = Plane::running();
        plane.probe = false;
        let set = plane.observed.stateful_sets.get_mut(component.name());
        let meta = &mut set.expect("a StatefulSet").metadata;
        meta.annotations = None;
        let entry = json!({"manager": "kubectl-create", "operation": "Update", "fieldsV1": {"f:spec": {}}});
        meta.managed_fields = Some(vec![serde_json::from_value(entry).expect("an entry")]);
        due(&mut plane);
        plane.settle_well();
        let other = if component == Component::ApiServer {
            Component::ControllerManager
        } else {
            Component::ApiServer
        };
        assert_eq!(
            names(&plane.log),
            [RENEWED.to_owned(), format!("restart {other}")]
        );
        let told = plan::differing(&plane.goal(), &plane.observed, &plane.known);
        assert_eq!((told.len(), told[0].0.name.as_str()), (1, component.name()));
    }
}

#[test]
fn a_pod_that_blocks_a_restart_makes_way() {
    let mut plane = Plane::running();
    due(&mut plane);
    assert!(matches!(plane.look(), Rest::Wait(_)));
    // The controller-manager of before crashes; its StatefulSet has seen the new template and waits for it.
    let set = plane
        .observed
        .stateful_sets
        .get_mut("controller-manager")
        .expect("a StatefulSet");
    let status = set.status.as_mut().expect("a status");
    status.observed_generation = set.metadata.generation;
    status.update_revision = Some("new".into());
    status.updated_replicas = Some(0);
    let mut world = World::default();
    world.break_pod(Component::ControllerManager, "old");
    plane.observed.pods = world.observed.pods;
    assert_eq!(names(&plane.effects()), ["delete pod controller-manager-0"]);

    // An apiserver that has stopped listening makes room.
    let mut plane = Plane::running();
    let deaf = Deaf {
        pod: "apiserver-0".into(),
        uid: "1".into(),
    };
    plane.observed.deaf = vec![deaf];
    assert_eq!(names(&plane.effects()), ["make room for apiserver-0"]);
}

#[test]
fn a_tenant_that_is_not_well_is_waited_for() {
    for component in Component::ALL {
        let mut plane = Plane::running();
        let set = plane
            .observed
            .stateful_sets
            .get_mut(component.name())
            .expect("a StatefulSet");
        set.status.as_mut().expect("a status").ready_replicas = Some(0);
        let Plan::Wait(wait) = plane.plan() else {
            panic!("{component} is not ready")
        };
        assert_eq!(wait.component, Some(component));
        // Its certificates are renewed nevertheless.
        due(&mut plane);
        assert_eq!(names(&plane.effects()), [RENEWED], "{component}");
    }
    let mut plane = Plane::running();
    plane.observed.answer = Some(Answer::NotReady("503".into()));
    assert!(matches!(plane.plan(), Plan::Wait(wait) if wait.message.contains("503") && !wait.watched));
}

/// What may be wrong with a tenant.
#[derive(Clone, Copy, Debug)]
enum Harm {
    Gone(TenantSecret),
    Damaged(TenantSecret),
    Set(Component),
    Service(&'static str),
    Edited(usize),
    Due,
}

fn harms() -> Vec<Harm> {
    let mut harms: Vec<_> = LEAVES
        .into_iter()
        .flat_map(|which| [Harm::Gone(which), Harm::Damaged(which)])
        .collect();
    harms.extend(Component::ALL.map(Harm::Set));
    harms.extend(["apiserver-svc", "etcd"].map(Harm::Service));
    harms.extend((0..edits().len()).map(Harm::Edited));
    harms.push(Harm::Due);
    harms
}

fn harm(plane: &mut Plane, harm: Harm) {
    match harm {
        Harm::Gone(which) => drop(plane.observed.secrets.remove(which.name())),
        Harm::Damaged(which) if plane.observed.secrets.contains_key(which.name()) => {
            plane.edit(which, |data| {
                for value in data.values_mut() {
                    *value = ByteString(value.0[..value.0.len() / 2].into());
                }
            });
        }
        Harm::Damaged(_) => {}
        Harm::Set(component) => plane.lose_set(component),
        Harm::Service(name) => plane.lose_service(name),
        Harm::Edited(index) => {
            let (kind, name, path, value, _) = edits().swap_remove(index);
            let exists = match kind {
                Kind::StatefulSet => plane.observed.stateful_sets.contains_key(name),
                Kind::Service => plane.observed.services.contains_key(name),
            };
            if exists {
                plane.set_by_hand(kind, name, &path, value.as_ref());
            }
        }
        Harm::Due => plane.at(now() + days(250)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 64, ..ProptestConfig::with_cases(48) })]

    /// From any damage, repeated looks come to rest within the bound on passes, everything is as it should be then, and
    /// stays so. What is made once is byte for byte what it was, and etcd's processes are not replaced unless somebody
    /// else's doing has replaced them.
    #[test]
    fn from_any_damage_a_tenant_comes_to_rest(
        wrong in proptest::sample::subsequence(harms(), 0..8),
        probe: bool,
        files_follow: bool,
    ) {
        let mut plane = Plane::running();
        plane.probe = probe;
        plane.files_follow = files_follow;
        plane.claims = all_claims();
        let whole = plane.clone();
        for wrong in &wrong {
            harm(&mut plane, *wrong);
        }
        plane.settle_well();
        prop_assert_eq!(plane.once(), whole.once());
        let specs = |plane: &Plane| {
            let sets = plane.observed.stateful_sets.values();
            sets.map(|set| {
                let mut spec = set.spec.clone().expect("a spec");
                let hashes = spec.template.metadata.as_mut().and_then(|meta| meta.annotations.as_mut());
                hashes.into_iter().for_each(|all| all.retain(|key, _| !key.ends_with("-hash")));
                spec
            })
            .collect::<Vec<_>>()
        };
        prop_assert_eq!(specs(&plane), specs(&whole));
        prop_assert_eq!(plane.observed.services.len(), whole.observed.services.len());
        prop_assert_eq!(plane.credentials().due, Vec::<(TenantSecret, Why)>::new());
        // What cannot take up its kubeconfig runs with it.
        let uses = &plane.processes[&Component::ControllerManager].uses;
        prop_assert!(uses.get(&KUBECONFIG) == plane.certificate(KUBECONFIG).as_ref());
        // Nothing is done twice: each leaf is issued at most once, or twice if the address changed with it.
        for (which, count) in &plane.issued {
            prop_assert!(*count <= 2, "{} was issued {} times: {:?}", which, count, names(&plane.log));
        }
        for effect in &plane.log {
            prop_assert!(!matches!(effect, Effect::Restart(restart) if restart.component == Component::Etcd));
        }
        // Later it is still well, and nothing was left over.
        let done = plane.log.len();
        plane.later(SignedDuration::from_mins(10));
        plane.settle_well();
        let later: Vec<_> = names(&plane.log[done..]);
        let expected: &[&str] = if later.is_empty() { &[] } else { &["restart apiserver"] };
        prop_assert!(later == expected && (later.is_empty() || !files_follow), "{:?}", later);
        plane.later(SignedDuration::from_mins(10));
        plane.settle_well();
        prop_assert_eq!(plane.log.len(), done + later.len());
    }
}

#[test]
fn the_damages_of_the_property_are_noticed() {
    for wrong in harms() {
        let mut plane = Plane::running();
        plane.claims = all_claims();
        harm(&mut plane, wrong);
        assert!(matches!(plane.plan(), Plan::Do(_)), "{wrong:?}");
    }
}
