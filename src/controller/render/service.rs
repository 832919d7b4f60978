//! The Service of a bundle.

use serde_json::Value;

use super::{Kind, Tenant};

/// The author's Service, placed into the root namespace. For a controller-manager's, too: the Go manager left
/// its namespace unset, so that it could not be applied.
pub(super) fn service(service: &Value, tenant: &Tenant) -> Value {
    super::placed(service.clone(), Kind::Service, &tenant.root_namespace)
}
