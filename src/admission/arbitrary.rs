//! Any JSON, for tests that hold for any.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    cluster_version::{self, default, frozen, rules, trial, versions},
    review::Review,
    virtual_cluster,
};

/// JSON in which the keys and values that rules look at are likely.
pub(super) fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z~/\"]{0,6}".prop_map(Value::from),
        prop::sample::select(
            &[
                "OnDelete",
                "RollingUpdate",
                "apps/v1",
                "StatefulSet",
                "a:v1.34.0",
                "None"
            ][..]
        )
        .prop_map(Value::from),
    ];
    let key = prop_oneof![
        4 => prop::sample::select(&["etcd", "apiServer", "controllerManager"][..]).prop_map(str::to_owned),
        4 => prop::sample::select(&["statefulset", "service", "spec", "metadata"][..]).prop_map(str::to_owned),
        4 => prop::sample::select(
            &[
                "updateStrategy", "type", "template", "containers", "ports", "resources", "requests", "selector",
                "matchLabels", "labels", "volumeClaimTemplates", "rollingUpdate", "image", "name", "object",
            ][..]
        )
        .prop_map(str::to_owned),
        1 => "[a-z~/]{0,4}",
    ];
    leaf.prop_recursive(9, 160, 6, move |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            3 => prop::collection::btree_map(key.clone(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_rule_panics(spec in json_value(), old in json_value()) {
        let _ = rules::check(&spec, None);
        let _ = rules::check(&spec, Some(&old));
        let _ = frozen::changed(&spec, &old);
        let _ = versions::warnings(&spec, &old);
        let _ = trial::trials(&spec, Some(&old), "ns");
        let _ = default::patch(&spec, Some(&old));
    }

    #[test]
    fn no_review_panics(request in json_value(), object in json_value(), old in json_value(), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request});
        let _ = Review::parse(review.to_string().as_bytes());
        let _ = Review::parse(&bytes);
        for operation in ["CREATE", "UPDATE", "DELETE"] {
            let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                "uid": "u", "kind": {"kind": "k"}, "operation": operation, "object": {"spec": object, "status": old},
                "oldObject": {"spec": old, "status": object}}});
            let review = Review::parse(review.to_string().as_bytes()).expect("a review");
            let _ = virtual_cluster::check(&review);
            let verdict = cluster_version::mutate(&review);
            prop_assert!(review.answer(&verdict).is_ok());
        }
    }
}
