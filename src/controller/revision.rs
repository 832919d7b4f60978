//! Revisions: the contents a ClusterVersion has had, each kept as an immutable ControllerRevision.
//!
//! A tenant is rendered from the revision it is pinned to, never from the ClusterVersion's present text. A
//! revision is named by the hash of its content, so that an edit of metadata or of the upgrade policy alone is
//! none, and going back to an earlier text is going back to its revision.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use k8s_openapi::{
    api::apps::v1::ControllerRevision,
    apimachinery::pkg::{apis::meta::v1::OwnerReference, runtime::RawExtension},
};
use kube::{
    Api, Resource as _, ResourceExt as _,
    api::{ListParams, ObjectMeta},
};
use serde_json::{Value, json};

use super::{error::Error, kubernetes::Kubernetes};
use crate::api::{
    ClusterVersion, VirtualCluster, cluster_version::canonical_hash, labels, template::Template,
};

/// Revisions kept of each ClusterVersion beyond those in use.
const KEPT: usize = 10;
/// Hex digits of the content hash in a revision's name.
const HASH_DIGITS: usize = 10;
/// Templates kept in memory. They are small, and most tenants share a few.
const CACHED: usize = 64;
/// Longest name the API server accepts for a ControllerRevision (DNS subdomain).
const MAX_NAME: usize = 253;

/// The revisions in the manager's namespace.
pub(super) struct Revisions {
    kubernetes: Kubernetes,
    namespace: String,
    /// Parsed templates by revision name, most recently used last. A revision never changes, so neither do they.
    cache: Mutex<Vec<(String, Arc<Template>)>>,
}

/// Name of the revision that keeps the present content of `cluster_version`.
#[must_use]
pub(super) fn name(cluster_version: &ClusterVersion) -> String {
    name_of(&cluster_version.name_any(), &cluster_version.spec.content_hash())
}

fn name_of(base: &str, hash: &str) -> String {
    // Names of objects are ASCII; a text that is none has no revision to be found by it.
    let base: String = base.chars().take(MAX_NAME - HASH_DIGITS - 1).collect();
    format!("{base}-{}", &hash[..HASH_DIGITS])
}

impl Revisions {
    /// Revisions in `namespace`.
    #[must_use]
    pub(super) fn new(kubernetes: Kubernetes, namespace: &str) -> Self {
        Self {
            kubernetes,
            namespace: namespace.to_owned(),
            cache: Mutex::new(Vec::new()),
        }
    }

    fn api(&self) -> Api<ControllerRevision> {
        Api::namespaced(self.kubernetes.client(), &self.namespace)
    }

    /// The revision that keeps the present content of `cluster_version`, made if it does not exist. Its name.
    pub(super) async fn ensure(&self, cluster_version: &ClusterVersion) -> Result<String, Error> {
        let content = cluster_version.spec.content();
        self.record(&cluster_version.name_any(), Some(cluster_version), &content)
            .await
    }

    /// The revision that keeps `content`, made if it does not exist. Its name. `cluster_version` is the ClusterVersion
    /// called `base`, if there is one: without it, nobody collects the revision.
    pub(super) async fn record(
        &self,
        base: &str,
        cluster_version: Option<&ClusterVersion>,
        content: &Value,
    ) -> Result<String, Error> {
        let name = name_of(base, &canonical_hash(content));
        if let Some(stored) = self.kubernetes.get(&self.api(), &name).await? {
            self.check(&stored, cluster_version)?;
            return Ok(name);
        }
        let known = match cluster_version {
            Some(cluster_version) => self.of(cluster_version).await?,
            None => Vec::new(),
        };
        let number = known.iter().map(|revision| revision.revision).max().unwrap_or(0) + 1;
        let revision = ControllerRevision {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(self.namespace.clone()),
                labels: cluster_version.map(|owner| {
                    [(
                        labels::CLUSTER_VERSION_UID.to_owned(),
                        owner.uid().unwrap_or_default(),
                    )]
                    .into()
                }),
                owner_references: cluster_version.map(|owner| {
                    vec![OwnerReference {
                        api_version: ClusterVersion::api_version(&()).into_owned(),
                        kind: ClusterVersion::kind(&()).into_owned(),
                        name: owner.name_any(),
                        uid: owner.uid().unwrap_or_default(),
                        controller: Some(true),
                        block_owner_deletion: Some(false),
                    }]
                }),
                ..ObjectMeta::default()
            },
            data: Some(RawExtension(content.clone())),
            revision: number,
        };
        match self.kubernetes.create(&self.api(), &revision).await {
            Ok(_) => {
                tracing::info!(cluster_version = base, revision = %name, "revision recorded");
            }
            // Another replica, or the answer to an earlier request that was lost.
            Err(Error::Conflict { .. }) => {
                if let Some(stored) = self.kubernetes.get(&self.api(), &name).await? {
                    self.check(&stored, cluster_version)?;
                }
            }
            Err(Error::Api { source, .. }) if super::kubernetes::is_not_found(&source) => {
                self.kubernetes.ensure_namespace(&self.namespace).await?;
                self.kubernetes.create(&self.api(), &revision).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(name)
    }

    /// The template that revision `name` keeps.
    pub(super) async fn template(&self, name: &str) -> Result<Arc<Template>, Error> {
        if let Some(template) = self.cached(name) {
            return Ok(template);
        }
        let stored = self.kubernetes.get(&self.api(), name).await?.ok_or_else(|| {
            Error::Blocked(format!(
                "ControllerRevision {}/{name}, which this tenant is made from, does not exist; restore it, or delete and recreate the VirtualCluster",
                self.namespace
            ))
        })?;
        self.check(&stored, None)?;
        let content = stored.data.map(|data| data.0).unwrap_or_default();
        let template = Template::parse(&content).map_err(|problems| {
            let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
            Error::Blocked(format!("revision {name} cannot be used: {}", problems.join("; ")))
        })?;
        let template = Arc::new(template);
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= CACHED {
            cache.remove(0);
        }
        cache.push((name.to_owned(), Arc::clone(&template)));
        Ok(template)
    }

    /// The template that a tenant is rendered from when it is moved to, or pinned to, `revision`: that revision's, but for
    /// etcd, which stays as it was made.
    pub(super) async fn template_for(
        &self,
        vc: &VirtualCluster,
        revision: &str,
    ) -> Result<Arc<Template>, Error> {
        let template = self.template(revision).await?;
        // Before its first upgrade that is the revision it runs; before it runs, the one it is brought up from.
        let Some(of_etcd) = vc.etcd_pin().or_else(|| vc.pin()).filter(|pin| *pin != revision) else {
            return Ok(template);
        };
        let made = self.template(of_etcd).await?;
        Ok(Arc::new(Template {
            etcd: made.etcd.clone(),
            etcd_service: made.etcd_service.clone(),
            ..Template::clone(&template)
        }))
    }

    fn cached(&self, name: &str) -> Option<Arc<Template>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let index = cache.iter().position(|(cached, _)| cached == name)?;
        let entry = cache.remove(index);
        let template = Arc::clone(&entry.1);
        cache.push(entry);
        Some(template)
    }

    /// A revision whose content is not what its name says was tampered with, or belongs to another.
    fn check(
        &self,
        stored: &ControllerRevision,
        cluster_version: Option<&ClusterVersion>,
    ) -> Result<(), Error> {
        let name = stored.name_any();
        let hash = canonical_hash(
            stored
                .data
                .as_ref()
                .map_or(&serde_json::Value::Null, |data| &data.0),
        );
        if !name.ends_with(&hash[..HASH_DIGITS]) {
            return Err(Error::Blocked(format!(
                "ControllerRevision {}/{name} does not hold the content its name stands for; delete it if no tenant uses it",
                self.namespace
            )));
        }
        // One that was recorded while there was no ClusterVersion is nobody's, and good.
        if let Some(cluster_version) = cluster_version
            && !stored.owner_references().is_empty()
            && !stored
                .owner_references()
                .iter()
                .any(|owner| Some(&owner.uid) == cluster_version.metadata.uid.as_ref())
        {
            // A ClusterVersion deleted and made again: its old revisions are about to be collected.
            return Err(Error::Conflict {
                what: format!("record revision {name}, while that of an earlier ClusterVersion is collected"),
            });
        }
        Ok(())
    }

    async fn of(&self, cluster_version: &ClusterVersion) -> Result<Vec<ControllerRevision>, Error> {
        let selector = format!(
            "{}={}",
            labels::CLUSTER_VERSION_UID,
            cluster_version.uid().unwrap_or_default()
        );
        self.kubernetes
            .list(&self.api(), &ListParams::default().labels(&selector))
            .await
    }

    /// Deletes the revisions of `cluster_version` that are neither in `used` nor among the newest ten.
    pub(super) async fn collect(
        &self,
        cluster_version: &ClusterVersion,
        used: &BTreeSet<String>,
    ) -> Result<(), Error> {
        let mut revisions = self.of(cluster_version).await?;
        revisions.sort_by_key(|revision| std::cmp::Reverse(revision.revision));
        let present = name(cluster_version);
        for revision in revisions.iter().skip(KEPT) {
            let name = revision.name_any();
            if used.contains(&name) || name == present {
                continue;
            }
            self.kubernetes
                .delete(&self.api(), &name, &revision.uid().unwrap_or_default())
                .await?;
            tracing::info!(cluster_version = %cluster_version.name_any(), revision = %name, "old revision deleted");
        }
        Ok(())
    }
}

/// A patch that names the revision `name` in the status of a ClusterVersion.
#[must_use]
pub(super) fn status_patch(cluster_version: &ClusterVersion, name: &str) -> serde_json::Value {
    json!({"status": {"observedGeneration": cluster_version.metadata.generation, "revision": name}})
}
