//! Field sets by the letter of the format. What real ones look like, `tests/api_managed_fields.rs` knows.

use serde_json::json;

use super::*;

/// Metadata with these entries: manager, operation, subresource, second, fields.
fn meta(entries: &[(&str, &str, &str, u8, Value)]) -> ObjectMeta {
    let entries: Vec<_> = entries
        .iter()
        .map(|(manager, operation, subresource, second, fields)| {
            let mut entry = json!({"manager": manager, "operation": operation, "apiVersion": "v1",
                "fieldsType": "FieldsV1", "fieldsV1": fields});
            if *second > 0 {
                entry["time"] = json!(format!("2026-01-01T00:00:{second:02}Z"));
            }
            if !subresource.is_empty() {
                entry["subresource"] = json!(subresource);
            }
            entry
        })
        .collect();
    serde_json::from_value(json!({"managedFields": entries})).expect("metadata")
}

/// An entry of ours, of the second 10.
fn ours(fields: Value) -> (&'static str, &'static str, &'static str, u8, Value) {
    (FIELD_MANAGER, "Apply", "", 10, fields)
}

fn paths(rendered: &Value, meta: &ObjectMeta) -> Vec<String> {
    drift(rendered, meta)
        .into_iter()
        .map(|drift| drift.path)
        .collect()
}

/// What has drifted of a list `spec.list`, of which these keys are ours.
fn of_list(list: &Value, keys: &[&str]) -> Vec<String> {
    let keys: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!({}))).collect();
    paths(
        &json!({"spec": {"list": list}}),
        &meta(&[ours(json!({"f:spec": {"f:list": keys, "f:other": {}}}))]),
    )
}

const NONE: [&str; 0] = [];

#[test]
fn elements_of_lists_are_known_by_their_keys() {
    let ports = json!([{"port": 53}, {"port": 53, "protocol": "UDP"}, {"port": 1.0, "protocol": null}]);
    let tcp = r#"k:{"port":53,"protocol":"TCP"}"#;
    // The order of keys is no part of it.
    let udp = r#"k:{"protocol":"UDP","port":53}"#;
    let one = r#"k:{"port":1,"protocol":"TCP"}"#;
    assert_eq!(of_list(&ports, &[tcp, udp, one]), NONE);
    assert_eq!(of_list(&ports, &[tcp, one]), ["spec.list[port=53,protocol=UDP]"]);
    assert_eq!(of_list(&ports, &[udp, one]), ["spec.list[port=53]"]);
    // Without any key there is nothing to know them by.
    assert_eq!(
        of_list(&json!([{"port": 1}, {"port": 2}]), &["k:{}", one]),
        ["spec.list[port=2]"]
    );
    // What is no key of an element is the server's to fill in.
    let spread = json!([{"topologyKey": "zone"}]);
    assert_eq!(
        of_list(
            &spread,
            &[r#"k:{"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}"#]
        ),
        NONE
    );
}

#[test]
fn elements_of_sets_are_known_by_their_values_and_of_others_by_their_places() {
    let set = json!(["a", "b\"", 1]);
    assert_eq!(of_list(&set, &[r#"v:"a""#, r#"v:"b\"""#, "v:1"]), NONE);
    assert_eq!(of_list(&set, &[r#"v:"a""#]), ["spec.list[=b\"]", "spec.list[2]"]);
    assert_eq!(of_list(&json!(["a", "a"]), &["i:0", "i:1"]), NONE);
    assert_eq!(of_list(&json!(["a", "a"]), &["i:0"]), ["spec.list[=a]"]);
    // What a later version may write, and what nobody should.
    for odd in ["x:1", "k:[]", "k:{", "v:", "i:-1", "i", ":", ""] {
        assert_eq!(
            of_list(&json!([{"name": "a"}]), &["v:1", odd]),
            ["spec.list[name=a]"],
            "{odd}"
        );
    }
}

#[test]
fn a_node_without_children_is_owned_with_all_that_is_in_it() {
    let rendered = json!({"spec": {"map": {"a": 1, "b": {"c": [1]}}, "list": [{"name": "a"}]}});
    let of = |map: Value| {
        paths(
            &rendered,
            &meta(&[ours(json!({"f:spec": {"f:map": map, "f:list": {}}}))]),
        )
    };
    assert_eq!(of(json!({})), NONE);
    assert_eq!(of(json!({".": {}})), NONE);
    assert_eq!(of(json!({"x:unknown": {}})), NONE);
    assert_eq!(of(json!({"f:a": {}})), ["spec.map.b.c"]);
    assert_eq!(of(json!({".": {}, "f:a": {}})), ["spec.map.b.c"]);
    assert_eq!(of(json!({"f:z": {}})), ["spec.map.a", "spec.map.b.c"]);
}

#[test]
fn two_entries_of_ours_are_one() {
    let rendered = json!({"spec": {"a": 1, "b": 1}});
    let entries = [
        ours(json!({"f:spec": {"f:a": {}}})),
        ours(json!({"f:spec": {"f:b": {}}})),
    ];
    assert_eq!(paths(&rendered, &meta(&entries)), NONE);
    assert_eq!(paths(&rendered, &meta(&entries[..1])), ["spec.b"]);
    // Of another subresource, or not applied, they are not what we applied.
    let status = (
        FIELD_MANAGER,
        "Apply",
        "status",
        11,
        json!({"f:spec": {"f:b": {}}}),
    );
    let applied = meta(&[entries[0].clone(), status.clone()]);
    assert!(is_applied_by_us(&applied) && !is_applied_by_us(&meta(&[status])));
    // No drift all the same: it was our own request.
    assert_eq!(paths(&rendered, &applied), NONE);
}

#[test]
fn what_nobody_can_own_is_not_missed() {
    let rendered = json!({
        "apiVersion": "v1", "kind": "Service", "status": {"a": 1},
        "metadata": {"name": "a", "namespace": "b", "uid": "c", "labels": {"name": "d"}, "annotations": null},
        "spec": {"status": 1, "kind": null, "none": {}, "empty": [], "nothing": null},
    });
    let meta = meta(&[ours(json!({"f:spec": {"f:none": {}}}))]);
    assert_eq!(paths(&rendered, &meta), ["metadata.labels.name", "spec.status"]);
}

#[test]
fn an_empty_map_that_others_have_filled_is_there() {
    let rendered = json!({"spec": {"map": {}, "list": [], "atomic": [], "a": 1}});
    let of = |others: Value| {
        paths(
            &rendered,
            &meta(&[
                ours(json!({"f:spec": {"f:a": {}}})),
                ("other", "Update", "", 11, json!({"f:spec": others})),
            ]),
        )
    };
    let map = json!({".": {}, "f:b": {}});
    assert_eq!(
        of(json!({"f:map": map, "f:list": {r#"k:{"name":"a"}"#: {}}})),
        NONE
    );
    // Instead of an empty list that has one owner, they have set another.
    assert_eq!(of(json!({"f:map": map, "f:atomic": {}})), ["spec.atomic"]);
    assert_eq!(of(json!({})), ["spec.map"]);
}

#[test]
fn what_is_gone_as_a_whole_is_told_once() {
    let container =
        |name: &str| json!({"name": name, "image": "a", "probe": {"http": {"port": 1, "path": "/"}}});
    let rendered = json!({"spec": {"containers": [container("a"), container("b")], "c": 1}});
    let of = |containers: Value| {
        paths(
            &rendered,
            &meta(&[ours(json!({"f:spec": {"f:c": {}, "f:containers": containers}}))]),
        )
    };
    let whole =
        json!({".": {}, "f:name": {}, "f:image": {}, "f:probe": {"f:http": {"f:port": {}, "f:path": {}}}});
    let (a, b) = (r#"k:{"name":"a"}"#, r#"k:{"name":"b"}"#);
    assert_eq!(of(json!({a: whole, b: whole})), NONE);
    assert_eq!(of(json!({b: whole})), ["spec.containers[name=a]"]);
    assert_eq!(
        of(json!({"k:{\"name\":\"z\"}": {}})),
        ["spec.containers[name=a]", "spec.containers[name=b]"]
    );
    assert_eq!(
        paths(&rendered, &meta(&[ours(json!({"f:spec": {"f:c": {}}}))])),
        ["spec.containers"]
    );
    // The element is there, but nothing of what was in it, or all but one thing.
    assert_eq!(
        of(json!({a: {".": {}, "f:name": {}}, b: whole})),
        [
            "spec.containers[name=a].image",
            "spec.containers[name=a].probe.http"
        ]
    );
    let mut all_but_port = whole.clone();
    all_but_port["f:probe"]["f:http"] = json!({"f:path": {}});
    assert_eq!(
        of(json!({a: all_but_port, b: whole})),
        ["spec.containers[name=a].probe.http.port"]
    );
}

#[test]
fn who_set_it_is_its_newest_owner() {
    let rendered = json!({"spec": {"a": 1, "b": {"c": 1, "d": 1}}});
    let of = |entries: &[_]| drift(&rendered, &meta(entries));
    let ours = ours(json!({"f:spec": {"f:a": {}}}));
    let first = ("first", "Update", "", 11, json!({"f:spec": {"f:b": {"f:c": {}}}}));
    let second = ("second", "Apply", "", 12, json!({"f:spec": {"f:b": {"f:d": {}}}}));
    let scale = (
        "third",
        "Update",
        "scale",
        0,
        json!({"f:spec": {"f:b": {"f:d": {}}}}),
    );
    let status = (
        "fourth",
        "Update",
        "status",
        13,
        json!({"f:spec": {"f:b": {"f:d": {}}}}),
    );
    let drifts = of(&[ours, second, first, scale, status]);
    assert_eq!(drifts.len(), 1);
    assert_eq!(
        drifts[0].to_string(),
        "spec.b (set by second at 2026-01-01T00:00:12Z)"
    );
    assert_eq!(drifts[0].by.as_ref().expect("someone").operation, "Apply");
}

#[test]
fn a_deletion_may_be_of_who_wrote_last_after_us() {
    let rendered = json!({"spec": {"a": 1, "b": 1}});
    let of = |entries: &[_]| {
        let mut all = vec![ours(json!({"f:spec": {"f:a": {}}}))];
        all.extend_from_slice(entries);
        drift(&rendered, &meta(&all))
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let other = json!({"f:spec": {"f:z": {}}});
    assert_eq!(of(&[]), ["spec.b (deleted)"]);
    assert_eq!(
        of(&[
            ("later", "Update", "", 12, other.clone()),
            ("last", "Update", "", 13, other.clone()),
            ("applier", "Apply", "", 14, other.clone()),
            ("controller", "Update", "status", 15, other.clone()),
            (FIELD_MANAGER, "Update", "", 16, other.clone()),
        ]),
        ["spec.b (deleted; last written by last at 2026-01-01T00:00:13Z)"]
    );
    // Before us, in our second, or nobody knows when.
    for second in [9, 10, 0] {
        assert_eq!(
            of(&[("other", "Update", "", second, other.clone())]),
            ["spec.b (deleted)"]
        );
    }
}

#[test]
fn an_object_of_which_nothing_is_ours_has_drifted_as_a_whole() {
    let rendered = json!({"spec": {"a": 1}});
    let told = |meta: &ObjectMeta| {
        drift(&rendered, meta)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(told(&ObjectMeta::default()), ["the whole object"]);
    let all = json!({"f:spec": {"f:a": {}}});
    let others = meta(&[
        ("vc-manager", "Update", "", 11, all.clone()),
        (
            "kube-controller-manager",
            "Update",
            "status",
            12,
            json!({"f:status": {}}),
        ),
        ("argocd", "Apply", "", 0, all),
    ]);
    assert_eq!(
        told(&others),
        ["the whole object (set by vc-manager at 2026-01-01T00:00:11Z)"]
    );
    // An entry without fields: those of nobody.
    let broken = meta(&[ours(json!({})), ours(json!("f:spec"))]);
    assert_eq!(told(&broken), ["spec.a (deleted)"]);
}

#[test]
fn an_autoscaler_is_who_uses_the_subresource_and_is_not_kubectl() {
    let rendered = json!({"spec": {"replicas": 1, "a": 1}});
    let replicas = json!({"f:spec": {"f:replicas": {}}});
    let of = |manager, subresource, fields: &Value| {
        let meta = meta(&[
            ours(json!({"f:spec": {"f:a": {}}})),
            (manager, "Update", subresource, 0, fields.clone()),
        ]);
        (scaled_by_other(&meta), paths(&rendered, &meta).len())
    };
    let someone = |manager: &str| Some(manager.to_owned());
    assert_eq!(
        of("kube-controller-manager", "scale", &replicas),
        (someone("kube-controller-manager"), 0)
    );
    assert_eq!(of("keda", "scale", &replicas), (someone("keda"), 0));
    assert_eq!(of("kubectl", "scale", &replicas), (None, 1));
    assert_eq!(of("kubectl-scale", "scale", &replicas), (None, 1));
    assert_eq!(of("keda", "", &replicas), (None, 1));
    assert_eq!(of("keda", "scale", &json!({"f:status": {}})), (None, 1));
}

#[test]
fn what_is_owned_is_what_was_applied() {
    let object = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "a", "namespace": "b", "uid": "c", "labels": {"ours": "1", "theirs": "1"}},
        "spec": {
            "replicas": 1, "default": "d", "selector": {"matchLabels": {"a": "b"}}, "none": {}, "filled": {"theirs": 1},
            "containers": [
                {"name": "theirs", "image": "a"},
                {"name": "ours", "image": "a", "default": "d", "args": ["a", "b"], "ports": [
                    {"containerPort": 1, "protocol": "TCP"}, {"containerPort": 1, "protocol": "UDP"}]},
            ],
            "set": ["a", "b"], "null": null,
        },
        "status": {"replicas": 1},
    });
    let meta = meta(&[
        ours(json!({
            "f:metadata": {"f:labels": {".": {}, "f:ours": {}, "f:gone": {}}},
            "f:spec": {
                "f:replicas": {}, "f:selector": {}, "f:none": {}, "f:filled": {}, "f:gone": {"f:a": {}}, "f:null": {},
                "f:containers": {r#"k:{"name":"ours"}"#: {".": {}, "f:image": {}, "f:args": {}, "f:gone": {}, "f:ports": {
                    r#"k:{"containerPort":1,"protocol":"TCP"}"#: {".": {}, "f:gone": {}},
                    r#"k:{"containerPort":1,"protocol":"UDP"}"#: {".": {}, "f:containerPort": {}},
                }}},
                "f:set": {r#"v:"b""#: {}},
            },
        })),
        (
            "other",
            "Update",
            "",
            11,
            json!({
                "f:metadata": {"f:labels": {"f:theirs": {}}}, "f:spec": {"f:filled": {".": {}, "f:theirs": {}}, "f:set": {r#"v:"a""#: {}}},
            }),
        ),
    ]);
    let expected = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "a", "namespace": "b", "labels": {"ours": "1"}},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "none": {}, "filled": {},
            // The keys come with an element, but for what the server would say itself.
            "containers": [{"name": "ours", "image": "a", "args": ["a", "b"], "ports": [
                {"containerPort": 1}, {"containerPort": 1, "protocol": "UDP"}]}],
            "set": ["b"],
        },
    });
    assert_eq!(owned(&object, &meta, FIELD_MANAGER), Some(expected));
    assert_eq!(
        owned(&object, &meta, "other"),
        None,
        "it has not applied anything"
    );
    let theirs = owned_by(&object, &meta, |entry| entry.manager.as_deref() == Some("other")).expect("a part");
    assert_eq!(theirs["spec"], json!({"filled": {"theirs": 1}, "set": ["a"]}));
    for odd in [json!(null), json!([1]), json!("a"), json!({})] {
        assert_eq!(owned(&odd, &meta, FIELD_MANAGER), None);
    }
}
