//! Objects as raw as the API server gives them.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, PatchParams},
};
use vc_manager::controller::render::Kind;

/// Objects of the kind in `namespace`.
pub(crate) fn api(client: &Client, namespace: &str, kind: Kind) -> Api<DynamicObject> {
    let gvk = match kind {
        Kind::StatefulSet => GroupVersionKind::gvk("apps", "v1", "StatefulSet"),
        Kind::Service => GroupVersionKind::gvk("", "v1", "Service"),
    };
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&gvk))
}
/// Parameters of a patch that is no apply.
pub(crate) fn by(manager: &str) -> PatchParams {
    PatchParams {
        field_manager: Some(manager.into()),
        ..PatchParams::default()
    }
}
