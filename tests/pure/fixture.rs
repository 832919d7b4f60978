//! A template, a tenant, and the time.

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vc_manager::{api::template::Template, controller::render::Tenant};

/// Content of `tests/fixtures/template.yaml`.
pub(crate) fn content() -> Value {
    serde_saphyr::from_str(include_str!("../fixtures/template.yaml")).expect("the fixture is YAML")
}

/// The template of that content.
pub(crate) fn template() -> Template {
    Template::parse(&content()).expect("the fixture is a template")
}

/// The tenant of the contract's test vector.
pub(crate) fn tenant() -> Tenant {
    Tenant {
        name: "name".into(),
        namespace: "ns".into(),
        uid: "d64ea0c0-91f8-46f5-8643-c0cab32ab0cd".into(),
        root_namespace: "ns-fd1b34-name".into(),
        cluster_domain: "cluster.local".into(),
        external_domain: None,
        pki_expire_days: None,
    }
}

pub(crate) fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().expect("a time")
}
