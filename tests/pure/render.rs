//! Golden files of every rendered object. A tenant is rolled when these change: a change here must be meant.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Namespace, Secret};
use serde_json::json;
use vc_manager::{
    api::Component,
    controller::render::{self, TenantSecret},
};

use crate::fixture::{template, tenant};

/// Secrets with known content, by name.
fn secrets() -> BTreeMap<String, Secret> {
    let secret = |which: TenantSecret| {
        let data = if which.is_kubeconfig() {
            BTreeMap::from([(which.name(), "not a kubeconfig")])
        } else {
            BTreeMap::from([("tls.crt", "certificate"), ("tls.key", "key")])
        };
        let value = render::secret(which, &tenant(), &data, None);
        (
            which.name().to_owned(),
            serde_json::from_value(value).expect("a Secret"),
        )
    };
    TenantSecret::ALL.into_iter().map(secret).collect()
}

#[test]
fn stateful_sets() {
    for component in Component::ALL {
        let set =
            render::stateful_set(&template(), component, &tenant(), &secrets()).expect("in the template");
        assert_eq!(set.hash().len(), 64);
        insta::assert_yaml_snapshot!(format!("statefulset-{component}"), set.value);
    }
}

#[test]
fn services() {
    for component in [Component::Etcd, Component::ApiServer] {
        let service = render::service(&template(), component, &tenant()).expect("in the template");
        insta::assert_yaml_snapshot!(format!("service-{component}"), service.value);
    }
    assert!(render::service(&template(), Component::ControllerManager, &tenant()).is_none());
}

#[test]
fn namespace_and_secrets() {
    insta::assert_yaml_snapshot!("namespace", render::namespace(&tenant(), false));
    insta::assert_yaml_snapshot!("namespace-labelled", render::namespace(&tenant(), true));
    for which in [TenantSecret::ApiServer, TenantSecret::AdminKubeconfig] {
        let data = BTreeMap::from([("tls.crt", "certificate")]);
        insta::assert_yaml_snapshot!(
            format!("secret-{which}"),
            render::secret(which, &tenant(), &data, Some("r2@then"))
        );
    }
}

#[test]
fn a_namespace_is_ours_only_if_all_its_annotations_say_so() {
    let ours: Namespace = serde_json::from_value(render::namespace(&tenant(), false)).expect("a Namespace");
    assert!(render::belongs_to(&ours, &tenant()));
    for key in ["vcname", "vcnamespace", "vcuid", "vcrootns"] {
        let mut other = ours.clone();
        let annotations = other.metadata.annotations.as_mut().expect("some");
        annotations.insert(format!("tenancy.x-k8s.io/{key}"), "other".into());
        assert!(!render::belongs_to(&other, &tenant()), "{key}");
    }
    assert!(!render::belongs_to(&Namespace::default(), &tenant()));
}

#[test]
fn pods_are_replaced_exactly_when_what_they_read_has_changed() {
    let hash_of_pods = |component: Component, secrets: &BTreeMap<String, Secret>| {
        let set = render::stateful_set(&template(), component, &tenant(), secrets).expect("in the template");
        set.value.pointer("/spec/template").cloned()
    };
    let before = secrets();
    for which in TenantSecret::ALL {
        let mut after = before.clone();
        let data = after
            .get_mut(which.name())
            .and_then(|secret| secret.data.as_mut())
            .expect("data");
        for value in data.values_mut() {
            value.0.extend(b" renewed");
        }
        let replaced = |component| hash_of_pods(component, &before) != hash_of_pods(component, &after);
        assert!(!replaced(Component::Etcd), "{which}");
        let read_by_apiserver = matches!(
            which,
            TenantSecret::RootCa
                | TenantSecret::ApiServer
                | TenantSecret::FrontProxy
                | TenantSecret::ServiceAccount
        );
        assert_eq!(replaced(Component::ApiServer), read_by_apiserver, "{which}");
    }
}

#[test]
fn unknown_fields_nulls_and_big_integers_travel() {
    let set = render::stateful_set(&template(), Component::ApiServer, &tenant(), &secrets())
        .expect("in the template");
    let container = set.value.pointer("/spec/template/spec/containers/0/futureField");
    assert_eq!(
        container,
        Some(&json!({"big": 9_007_199_254_740_993_i64, "nothing": null}))
    );
}

#[test]
fn no_private_key_feeds_a_rendering() {
    let before = secrets();
    let mut after = before.clone();
    for secret in after.values_mut() {
        if let Some(key) = secret.data.as_mut().and_then(|data| data.get_mut("tls.key")) {
            key.0 = b"another key".to_vec();
        }
    }
    for component in Component::ALL {
        let set =
            |secrets| render::stateful_set(&template(), component, &tenant(), secrets).map(|set| set.value);
        assert_eq!(set(&before), set(&after));
    }
}
