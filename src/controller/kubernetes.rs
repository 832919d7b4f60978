//! Calls to the API server of the super cluster: each with a deadline, each error with what was tried on what.

use std::{fmt::Debug, future::Future, time::Duration};

use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::StatefulSet,
        core::v1::{Namespace, Pod, Secret, Service},
    },
    apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::{
    Api, Client, Resource,
    api::{
        ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, ObjectMeta, Patch, PatchParams,
        PostParams, Preconditions, ValidationDirective,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{
    error::Error,
    render::{Kind, Rendered},
};
use crate::{
    api::{FIELD_MANAGER, names::is_object_name},
    client::deadline,
};

/// The super cluster's API server, as the controllers use it.
#[derive(Clone)]
pub struct Kubernetes {
    client: Client,
    limit: Duration,
}

/// Objects read per page of a list.
const PAGE: u32 = 500;

impl Kubernetes {
    /// Calls by way of `client`, none longer than `limit`.
    #[must_use]
    pub fn new(client: Client, limit: Duration) -> Self {
        Self { client, limit }
    }

    /// The client, for watches and elections.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    async fn call<T>(
        &self,
        what: impl Into<String>,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        // Boxed: it would otherwise be in every caller's future twice.
        deadline(self.limit, what, Box::pin(call))
            .await
            .map_err(Error::from)
    }

    fn namespaced<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// An object by name, fresh from the API server; `None` if there is none, or can be none of that name.
    pub async fn get<K>(&self, api: &Api<K>, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        // It comes from objects of others. What can be no name would be read as another path, or as a query.
        if !is_object_name(name) {
            return Ok(None);
        }
        self.call(format!("read {} {name}", K::kind(&())), api.get_opt(name))
            .await
    }

    /// All objects that `params` select.
    pub async fn list<K>(&self, api: &Api<K>, params: &ListParams) -> Result<Vec<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let mut params = params.clone().limit(PAGE);
        let mut items = Vec::new();
        loop {
            let page = self
                .call(format!("list {}", K::plural(&())), api.list(&params))
                .await?;
            items.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(items),
            }
        }
    }

    /// Every object of a kind in `namespace`.
    pub async fn list_in<K>(&self, namespace: &str) -> Result<Vec<K>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        self.list(&self.namespaced::<K>(namespace), &ListParams::default())
            .await
    }

    /// Every object of the kind `K` in `namespace`, as JSON: with fields that `K` does not know.
    pub async fn list_raw<K>(&self, namespace: &str) -> Result<Vec<Value>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        let api = Api::<DynamicObject>::namespaced_with(
            self.client.clone(),
            namespace,
            &ApiResource::erase::<K>(&()),
        );
        let what = format!("list {} in {namespace}", K::plural(&()));
        let params = ListParams::default();
        let objects = self.call(what.clone(), api.list(&params)).await?.items;
        let raw = objects.into_iter().map(serde_json::to_value);
        raw.collect::<Result<_, _>>()
            .map_err(|error| Error::Blocked(format!("cannot {what}: {error}")))
    }

    /// Makes an object that must not exist yet.
    pub async fn create<K>(&self, api: &Api<K>, object: &K) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + Debug,
    {
        let name = object.meta().name.clone().unwrap_or_default();
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.into()),
            ..PostParams::default()
        };
        self.call(
            format!("create {} {name}", K::kind(&())),
            api.create(&params, object),
        )
        .await
    }

    /// Makes a namespace if it does not exist. A manager outside the cluster may be the first to need its own.
    pub async fn ensure_namespace(&self, name: &str) -> Result<(), Error> {
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let api = Api::<Namespace>::all(self.client.clone());
        if self.get(&api, name).await?.is_some() {
            return Ok(());
        }
        match self.create(&api, &namespace).await {
            Ok(_) | Err(Error::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Merges `patch` into an object.
    pub async fn merge<K>(&self, api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let what = format!("update {} {name}", K::kind(&()));
        self.call(
            what,
            api.patch(name, &PatchParams::default(), &Patch::Merge(patch)),
        )
        .await
    }

    /// Merges `patch` into the status of an object.
    pub async fn merge_status<K>(&self, api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let what = format!("update the status of {} {name}", K::kind(&()));
        self.call(
            what,
            api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)),
        )
        .await
    }

    /// Applies a rendered object in `namespace`, or only asks whether it would be accepted. Its `resourceVersion` then:
    /// the one it had, if nothing was to be changed.
    pub async fn apply(
        &self,
        namespace: &str,
        object: &Rendered,
        dry_run: bool,
    ) -> Result<Option<String>, Error> {
        match object.kind {
            Kind::StatefulSet => {
                self.apply_as::<StatefulSet>(namespace, &object.name, &object.value, dry_run)
                    .await
            }
            Kind::Service => {
                self.apply_as::<Service>(namespace, &object.name, &object.value, dry_run)
                    .await
            }
        }
    }

    /// Replaces who owns what of the object that was read with `meta`.
    pub async fn own_fields(
        &self,
        namespace: &str,
        object: &Rendered,
        meta: &ObjectMeta,
        entries: &[ManagedFieldsEntry],
    ) -> Result<(), Error> {
        let patch = json!({"metadata": {
            "resourceVersion": unchanged_since(meta),
            "managedFields": entries,
        }});
        let name = &object.name;
        match object.kind {
            Kind::StatefulSet => {
                let api = self.namespaced::<StatefulSet>(namespace);
                self.merge(&api, name, &patch).await.map(|_| ())
            }
            Kind::Service => {
                let api = self.namespaced::<Service>(namespace);
                self.merge(&api, name, &patch).await.map(|_| ())
            }
        }
    }

    /// Applies a Secret in `namespace`.
    pub async fn apply_secret(&self, namespace: &str, name: &str, value: &Value) -> Result<(), Error> {
        self.apply_as::<Secret>(namespace, name, value, false)
            .await
            .map(|_| ())
    }

    /// Merges `patch` into a StatefulSet, as the field manager that applies it.
    pub async fn patch_stateful_set(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), Error> {
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let api = self.namespaced::<StatefulSet>(namespace);
        self.call(
            format!("update StatefulSet {namespace}/{name}"),
            api.patch(name, &params, &Patch::Merge(patch)),
        )
        .await
        .map(|_| ())
    }

    async fn apply_as<K>(
        &self,
        namespace: &str,
        name: &str,
        value: &Value,
        dry_run: bool,
    ) -> Result<Option<String>, Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let params = apply_params(dry_run);
        let what = format!("apply {} {namespace}/{name}", K::kind(&()));
        let api = self.namespaced::<K>(namespace);
        self.call(what, api.patch(name, &params, &Patch::Apply(value)))
            .await
            .map(|applied| applied.meta().resource_version.clone())
    }

    /// Deletes the very pod that was looked at. `grace` is in seconds; its own when absent.
    pub async fn delete_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        grace: Option<u32>,
    ) -> Result<(), Error> {
        self.delete_within(&self.namespaced::<Pod>(namespace), name, uid, grace)
            .await
    }

    /// Deletes the very namespace that was looked at.
    pub async fn delete_namespace(&self, name: &str, uid: &str) -> Result<(), Error> {
        self.delete(&Api::<Namespace>::all(self.client.clone()), name, uid)
            .await
    }

    /// Deletes an object if it still is the one of this uid. One that is gone is fine.
    pub async fn delete<K>(&self, api: &Api<K>, name: &str, uid: &str) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        self.delete_within(api, name, uid, None).await
    }

    async fn delete_within<K>(
        &self,
        api: &Api<K>,
        name: &str,
        uid: &str,
        grace: Option<u32>,
    ) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let params = DeleteParams {
            grace_period_seconds: grace,
            preconditions: Some(Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let deleted = self
            .call(
                format!("delete {} {name}", K::kind(&())),
                api.delete(name, &params),
            )
            .await;
        match deleted {
            Err(Error::Api { source, .. }) if is_not_found(&source) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// The last line that a container printed before it last ended, shortened; `None` when it is not to be had.
    pub async fn last_words(&self, namespace: &str, pod: &str, container: &str) -> Option<String> {
        let api = self.namespaced::<Pod>(namespace);
        for previous in [true, false] {
            let params = LogParams {
                container: Some(container.to_owned()),
                previous,
                tail_lines: Some(5),
                limit_bytes: Some(4096),
                ..LogParams::default()
            };
            let read = self.call(
                format!("read the log of pod {namespace}/{pod}"),
                api.logs(pod, &params),
            );
            if let Ok(log) = read.await
                && let Some(line) = log.lines().rev().find(|line| !line.trim().is_empty())
                // The kubelet's own words, as the log: the container, or its file, is gone already.
                && !line.starts_with("unable to retrieve container logs for ")
                && !line.starts_with("failed to try resolving symlinks in path ")
            {
                return Some(line.trim().chars().take(240).collect());
            }
        }
        None
    }
}

/// How objects of tenants are applied; what is tried beforehand must be tried in the same way.
#[must_use]
pub fn apply_params(dry_run: bool) -> PatchParams {
    PatchParams {
        dry_run,
        force: true,
        field_manager: Some(FIELD_MANAGER.into()),
        field_validation: Some(ValidationDirective::Strict),
    }
}

/// Whether the API server said that there is no such object.
#[must_use]
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// The object that a merge patch of `metadata` is guarded by: it fails if anyone wrote since `meta` was read.
#[must_use]
pub fn unchanged_since(meta: &ObjectMeta) -> Value {
    meta.resource_version.clone().map_or(Value::Null, Value::String)
}
