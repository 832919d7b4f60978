//! Deletes root namespaces whose VirtualCluster is gone without them: deleted under the Go manager, which deletes
//! nothing, or robbed of its finalizer by hand.
//!
//! A namespace says by its annotations whose it is. It is an orphan only if every proof agrees: the annotations are
//! all there and its name is the one the name rule gives for them, the API server says afresh that there is no such
//! VirtualCluster (another one of the same name is another one), and no VirtualCluster claims the namespace. What
//! contradicts itself is left alone, and a person is told. The annotations are those by which the syncer of the Go
//! manager collects these namespaces, too; it asks for less.
//!
//! Even then it is deleted only when it has been an orphan for [`PATIENCE`], unless the API server told this very
//! process of the deletion: one that has just forgotten its objects may be about to get them back from a backup.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{ListParams, ObjectMeta},
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{Context, TenantKey, error::Error, kubernetes::Kubernetes, run::jittered};
use crate::{
    api::{VirtualCluster, labels, root_namespace},
    client::deadline,
};

/// How long a namespace must have been an orphan before it is deleted.
pub const PATIENCE: Duration = Duration::from_mins(5);
/// Time between sweeps when nothing calls for one.
const INTERVAL: Duration = Duration::from_hours(1);
/// How soon a sweep that failed is tried again.
const RETRY: Duration = Duration::from_mins(1);
/// How soon it is looked after what a VirtualCluster left that was seen to go. Others often go with it.
const SOON: Duration = Duration::from_secs(2);
/// Namespaces read at once.
const PAGE: u32 = 500;

/// A namespace that says it is a root namespace, and whose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The VirtualCluster that its annotations name; empty where they do not.
    pub tenant: TenantKey,
    /// Uid of that VirtualCluster.
    pub tenant_uid: String,
}

impl Root {
    /// What the namespace with this metadata says of itself; `None` if it does not say that it is a root namespace,
    /// and if it is being deleted.
    #[must_use]
    pub fn of(meta: &ObjectMeta) -> Option<Self> {
        let annotations = meta.annotations.as_ref()?;
        let says = |key: &str| annotations.get(key).cloned().unwrap_or_default();
        if says(labels::VC_ROOT_NS) != "true" || meta.deletion_timestamp.is_some() {
            return None;
        }
        Some(Self {
            name: meta.name.clone()?,
            uid: meta.uid.clone()?,
            tenant: TenantKey {
                namespace: says(labels::VC_NAMESPACE),
                name: says(labels::VC_NAME),
            },
            tenant_uid: says(labels::VC_UID),
        })
    }
}

/// A VirtualCluster, as far as it claims a namespace. It can be read whatever else somebody wrote into the object.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = VirtualCluster)]
pub struct Claimant {
    metadata: ObjectMeta,
    #[serde(rename = "status", default, deserialize_with = "cluster_namespace")]
    cluster_namespace: Option<String>,
}

/// `clusterNamespace` of a status of whatever shape.
fn cluster_namespace<'de, D: Deserializer<'de>>(status: D) -> Result<Option<String>, D::Error> {
    let status = Value::deserialize(status)?;
    let name = status.get("clusterNamespace").and_then(Value::as_str);
    Ok(name.filter(|name| !name.is_empty()).map(ToOwned::to_owned))
}

impl Claimant {
    fn root_namespace(&self) -> String {
        self.cluster_namespace.clone().unwrap_or_else(|| {
            root_namespace::name(
                &self.namespace().unwrap_or_default(),
                &self.name_any(),
                &self.uid().unwrap_or_default(),
            )
        })
    }
}

/// Which VirtualClusters there are, by what they claim.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    by_root_namespace: BTreeMap<String, Vec<(TenantKey, String)>>,
    uids: BTreeSet<String>,
}

impl Extend<Claimant> for Claims {
    fn extend<I: IntoIterator<Item = Claimant>>(&mut self, all: I) {
        for claimant in all {
            let uid = claimant.uid().unwrap_or_default();
            let key = TenantKey {
                namespace: claimant.namespace().unwrap_or_default(),
                name: claimant.name_any(),
            };
            let claimed = self.by_root_namespace.entry(claimant.root_namespace());
            claimed.or_default().push((key, uid.clone()));
            self.uids.insert(uid);
        }
    }
}

/// What a root namespace is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its VirtualCluster exists.
    InUse,
    /// Its VirtualCluster is gone.
    Orphaned,
    /// What it says is contradicted: not to be touched. Why, and what to do.
    Doubtful(String),
}

/// What `root` is if there are no other VirtualClusters than those of `claims`.
#[must_use]
pub fn orphaned(root: &Root, claims: &Claims) -> Verdict {
    let Root {
        name,
        tenant,
        tenant_uid,
        ..
    } = root;
    if let Some(claimants) = claims.by_root_namespace.get(name) {
        let is_named = |(key, uid): &(TenantKey, String)| key == tenant && uid == tenant_uid;
        if claimants.iter().any(is_named) {
            return Verdict::InUse;
        }
        let all: Vec<_> = claimants
            .iter()
            .map(|(key, uid)| format!("{key} (uid {uid})"))
            .collect();
        return Verdict::Doubtful(format!(
            "VirtualCluster {} claims it, but its annotations do not name that one; put right {}, {} and {}",
            all.join(", "),
            labels::VC_NAME,
            labels::VC_NAMESPACE,
            labels::VC_UID
        ));
    }
    if [&tenant.namespace, &tenant.name, tenant_uid]
        .iter()
        .any(|text| text.is_empty())
    {
        return Verdict::Doubtful(format!(
            "it lacks some of the annotations {}, {} and {}, which say whose it is; delete it if nobody needs it",
            labels::VC_NAME,
            labels::VC_NAMESPACE,
            labels::VC_UID
        ));
    }
    if claims.uids.contains(tenant_uid) {
        return Verdict::Doubtful(format!(
            "its annotations name VirtualCluster {tenant} (uid {tenant_uid}), which exists and has another root namespace; delete it if nobody needs it"
        ));
    }
    if *name != root_namespace::name(&tenant.namespace, &tenant.name, tenant_uid) {
        return Verdict::Doubtful(format!(
            "its annotations name VirtualCluster {tenant} (uid {tenant_uid}), whose root namespace would have another name; delete it if nobody needs it"
        ));
    }
    Verdict::Orphaned
}

/// What a sweep found and did.
#[derive(Debug, Default)]
pub struct Report {
    /// Deleted, and whether the VirtualCluster was seen to go.
    pub deleted: Vec<(Root, bool)>,
    /// Seen as orphans for the first time.
    pub suspected: Vec<Root>,
    /// Left alone, and why.
    pub left_alone: Vec<(Root, String)>,
    /// Why the sweep ended before it was through.
    pub ended_by: Option<Error>,
}

/// Looks through all namespaces for orphans, and remembers since when they are.
pub struct Sweeper {
    kubernetes: Kubernetes,
    limit: Duration,
    patience: Duration,
    /// Uids of namespaces that were orphans in the last sweep, and when they were first.
    suspects: BTreeMap<String, Instant>,
}

impl Sweeper {
    /// One that reads by way of `kubernetes`, each page within `limit`, and deletes what has been an orphan for
    /// `patience` ([`PATIENCE`], but for tests).
    #[must_use]
    pub fn new(kubernetes: Kubernetes, limit: Duration, patience: Duration) -> Self {
        Self {
            kubernetes,
            limit,
            patience,
            suspects: BTreeMap::new(),
        }
    }

    /// Whether there are orphans that are not deleted yet.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// One sweep. Of `gone`, uids of VirtualClusters that were seen to go, orphans are deleted at once. Fails, and
    /// nothing is deleted, if the VirtualClusters or the namespaces cannot be listed: also when there is no such kind.
    pub async fn sweep(&mut self, gone: &BTreeSet<String>, now: Instant) -> Result<Report, Error> {
        let all = Api::<Claimant>::all(self.kubernetes.client());
        let mut claims = Claims::default();
        claims.extend(self.kubernetes.list(&all, &ListParams::default()).await?);
        let mut report = Report::default();
        let mut suspects = BTreeMap::new();
        // Namespaces are listed after the VirtualClusters: one that is not in use was made before its VirtualCluster
        // went, or belongs to one that came meanwhile, which is found by the second look.
        for root in self.roots().await? {
            let mut verdict = orphaned(&root, &claims);
            if verdict == Verdict::Orphaned {
                claims.extend(self.named(&root.tenant).await?);
                verdict = orphaned(&root, &claims);
            }
            match verdict {
                Verdict::InUse => {}
                Verdict::Doubtful(why) => report.left_alone.push((root, why)),
                Verdict::Orphaned => {
                    let since = self.suspects.get(&root.uid).copied();
                    if since.is_none() {
                        report.suspected.push(root.clone());
                    }
                    suspects.insert(root.uid.clone(), (since.unwrap_or(now), root));
                }
            }
        }
        self.suspects = suspects
            .iter()
            .map(|(uid, (since, _))| (uid.clone(), *since))
            .collect();
        for (since, root) in suspects.into_values() {
            let seen = gone.contains(&root.tenant_uid);
            if !seen && now.saturating_duration_since(since) < self.patience {
                continue;
            }
            match self.kubernetes.delete_namespace(&root.name, &root.uid).await {
                Ok(()) => {
                    self.suspects.remove(&root.uid);
                    report.suspected.retain(|suspect| suspect.uid != root.uid);
                    report.deleted.push((root, seen));
                }
                // Another one by now, or one that somebody forbids to delete: the rest is none the worse for it.
                Err(error) if error.is_final() || matches!(error, Error::Conflict { .. }) => {
                    report.left_alone.push((root, error.to_string()));
                }
                Err(error) => {
                    report.ended_by = Some(error);
                    break;
                }
            }
        }
        Ok(report)
    }

    /// All namespaces that say they are root namespaces. Nothing else of a page is kept.
    async fn roots(&self) -> Result<Vec<Root>, Error> {
        let api = Api::<Namespace>::all(self.kubernetes.client());
        let mut params = ListParams::default().limit(PAGE);
        let mut roots = Vec::new();
        loop {
            let page = deadline(
                self.limit,
                "list namespaces",
                Box::pin(api.list_metadata(&params)),
            )
            .await?;
            roots.extend(
                page.items
                    .iter()
                    .filter_map(|namespace| Root::of(&namespace.metadata)),
            );
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(roots),
            }
        }
    }

    /// The VirtualCluster of this name, fresh from the API server. A list of one: where a read answers "not found"
    /// also when it is the kind that is not found, a list fails. The name is that of an orphan by the name rule, so
    /// that each part of it can be part of a request.
    async fn named(&self, key: &TenantKey) -> Result<Vec<Claimant>, Error> {
        let api = Api::<Claimant>::namespaced(self.kubernetes.client(), &key.namespace);
        let only = ListParams::default().fields(&format!("metadata.name={}", key.name));
        self.kubernetes.list(&api, &only).await
    }
}

/// A VirtualCluster whose deletion was told by the API server.
#[derive(Clone, Debug)]
struct Lost {
    key: TenantKey,
    uid: String,
}

impl Lost {
    fn of(vc: &PartialObjectMeta<VirtualCluster>) -> Self {
        Self {
            key: TenantKey {
                namespace: vc.namespace().unwrap_or_default(),
                name: vc.name_any(),
            },
            uid: vc.uid().unwrap_or_default(),
        }
    }
}

/// Sweeps at once, then every hour, and when a VirtualCluster went without its root namespace; until `shutdown`.
///
/// It has a watch of its own: the controller is not told of deletions, and what a list lacks was not deleted before
/// our eyes.
pub(super) async fn run(context: Arc<Context>, shutdown: CancellationToken) {
    let limit = context.config.kube_api_timeout;
    let mut sweeper = Sweeper::new(context.kubernetes.clone(), limit, PATIENCE);
    let tenants = Api::<PartialObjectMeta<VirtualCluster>>::all(context.kubernetes.client());
    let events = watcher(tenants, watcher::Config::default()).default_backoff();
    let mut events = pin!(events);
    let mut lost = Vec::new();
    let mut next_sweep = Instant::now();
    let mut next_look = None;
    loop {
        let wake = next_look.map_or(next_sweep, |look: Instant| look.min(next_sweep));
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep_until(wake.into()) => {}
            // Errors are those of the controller's watch, which are in the log.
            Some(event) = events.next() => {
                if let Ok(watcher::Event::Delete(vc)) = event {
                    lost.push(Lost::of(&vc));
                    next_look.get_or_insert_with(|| Instant::now() + SOON);
                }
                continue;
            }
        }
        let is_due = Instant::now() >= next_sweep;
        let outcome = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            outcome = Box::pin(round(&context, &mut sweeper, &mut lost, is_due)) => outcome,
        };
        next_look = None;
        match outcome {
            Ok(None) => {}
            Ok(Some(pause)) => next_sweep = Instant::now() + jittered(pause),
            Err(error) => {
                tracing::warn!(%error, retry_in = ?RETRY, "cannot look for orphaned root namespaces");
                next_sweep = Instant::now() + jittered(RETRY);
            }
        }
    }
}

/// A sweep, if it is due or one of `lost` left something; those are done with then. When the next one is due.
async fn round(
    context: &Context,
    sweeper: &mut Sweeper,
    lost: &mut Vec<Lost>,
    is_due: bool,
) -> Result<Option<Duration>, Error> {
    *lost = left_behind(context, std::mem::take(lost)).await;
    if lost.is_empty() && !is_due {
        return Ok(None);
    }
    let gone = lost.iter().map(|lost| lost.uid.clone()).collect();
    let report = sweeper.sweep(&gone, Instant::now()).await?;
    tell(context, &report);
    if let Some(error) = report.ended_by {
        return Err(error);
    }
    lost.clear();
    Ok(Some(if sweeper.is_waiting() { PATIENCE } else { INTERVAL }))
}

/// Those of `lost` whose root namespace is still there, and not on its way out. In good order it goes first.
async fn left_behind(context: &Context, lost: Vec<Lost>) -> Vec<Lost> {
    let namespaces = Api::<Namespace>::all(context.kubernetes.client());
    let mut left = Vec::new();
    for one in lost {
        let root = root_namespace::name(&one.key.namespace, &one.key.name, &one.uid);
        let gone = match context.kubernetes.get(&namespaces, &root).await {
            Ok(found) => found.is_none_or(|found| found.metadata.deletion_timestamp.is_some()),
            // The sweep will see.
            Err(_) => false,
        };
        if !gone {
            left.push(one);
        }
    }
    left
}

/// Says in the log, and as Events on the namespaces, what a sweep found and did.
fn tell(context: &Context, report: &Report) {
    for root in &report.suspected {
        let note = format!(
            "VirtualCluster {} (uid {}), whose root namespace this is, does not exist; it is deleted if that is still so in {} minutes",
            root.tenant,
            root.tenant_uid,
            PATIENCE.as_secs() / 60
        );
        tracing::warn!(namespace = %root.name, tenant = %root.tenant, uid = %root.tenant_uid, "a root namespace without its VirtualCluster");
        context
            .events
            .of_namespace(&root.name, &root.uid, "Orphaned", note);
    }
    for (root, seen) in &report.deleted {
        let why = if *seen {
            "was seen to go without it".to_owned()
        } else {
            format!(
                "has not existed for {} minutes or longer",
                PATIENCE.as_secs() / 60
            )
        };
        tracing::warn!(namespace = %root.name, tenant = %root.tenant, uid = %root.tenant_uid, "root namespace deleted: its VirtualCluster {why}");
        let note = format!(
            "deleted: VirtualCluster {} (uid {}), whose root namespace this is, {why}",
            root.tenant, root.tenant_uid
        );
        context
            .events
            .of_namespace(&root.name, &root.uid, "OrphanDeleted", note);
    }
    for (root, why) in &report.left_alone {
        tracing::warn!(namespace = %root.name, %why, "a root namespace is left alone");
        let note = format!("left alone: {why}");
        context
            .events
            .of_namespace(&root.name, &root.uid, "NamespaceLeftAlone", note);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const UID: &str = "d64ea0c0-91f8-46f5-8643-c0cab32ab0cd";
    const NAME: &str = "ns-fd1b34-name";

    fn root(name: &str, annotations: &Value) -> Root {
        let mut annotations = annotations.clone();
        annotations["tenancy.x-k8s.io/vcrootns"] = json!("true");
        let meta = json!({"name": name, "uid": "u", "annotations": annotations});
        Root::of(&serde_json::from_value(meta).expect("metadata")).expect("it says that it is one")
    }

    fn named(uid: &str) -> Value {
        json!({
            "tenancy.x-k8s.io/vcname": "name",
            "tenancy.x-k8s.io/vcnamespace": "ns",
            "tenancy.x-k8s.io/vcuid": uid,
        })
    }

    fn claims(all: &[(&str, &str, Value)]) -> Claims {
        let claimant = |(name, uid, status): &(&str, &str, Value)| {
            let object = json!({"metadata": {"namespace": "ns", "name": name, "uid": uid}, "status": status});
            serde_json::from_value::<Claimant>(object).expect("a VirtualCluster")
        };
        let mut claims = Claims::default();
        claims.extend(all.iter().map(claimant));
        claims
    }

    fn why(verdict: Verdict) -> String {
        let Verdict::Doubtful(why) = verdict else {
            panic!("{verdict:?}")
        };
        why
    }

    #[test]
    fn an_orphan_is_whose_virtual_cluster_is_gone() {
        let root = root(NAME, &named(UID));
        assert_eq!(orphaned(&root, &Claims::default()), Verdict::Orphaned);
        // Others there may be, one of the same name among them.
        let others = claims(&[("name", "another", Value::Null), ("other", "one", json!({}))]);
        assert_eq!(orphaned(&root, &others), Verdict::Orphaned);
        let alive = claims(&[("name", UID, json!({"phase": ["not", "a", "text"]}))]);
        assert_eq!(orphaned(&root, &alive), Verdict::InUse);
    }

    #[test]
    fn what_is_claimed_is_none() {
        let by_status = claims(&[("other", "another", json!({"clusterNamespace": NAME}))]);
        assert!(
            why(orphaned(&root(NAME, &named(UID)), &by_status))
                .contains("VirtualCluster ns/other (uid another) claims it")
        );
        // Its annotations were edited while it lives.
        let alive = claims(&[("name", UID, Value::Null)]);
        for annotations in [named("another"), json!({})] {
            assert!(why(orphaned(&root(NAME, &annotations), &alive)).contains("do not name that one"));
        }
        let elsewhere = claims(&[("name", UID, json!({"clusterNamespace": "kept"}))]);
        assert_eq!(orphaned(&root("kept", &named(UID)), &elsewhere), Verdict::InUse);
        assert!(why(orphaned(&root(NAME, &named(UID)), &elsewhere)).contains("has another root namespace"));
    }

    #[test]
    fn what_contradicts_itself_is_none() {
        let mut partly = named(UID);
        partly["tenancy.x-k8s.io/vcnamespace"] = json!("");
        for (name, annotations, part) in [
            ("kube-system", named(UID), "would have another name"),
            (NAME, named("another"), "would have another name"),
            ("ns-fd1b34-../../x", named(UID), "would have another name"),
            (NAME, json!({}), "lacks some"),
            (NAME, partly, "lacks some"),
        ] {
            let verdict = orphaned(&root(name, &annotations), &Claims::default());
            assert!(why(verdict).contains(part), "{name} {annotations}");
        }
    }

    #[test]
    fn only_root_namespaces_that_stay_are_looked_at() {
        let meta = |value: Value| serde_json::from_value::<ObjectMeta>(value).expect("metadata");
        let mut annotations = named(UID);
        // As the syncer annotates the namespaces of a tenant.
        assert_eq!(
            Root::of(&meta(
                json!({"name": NAME, "uid": "u", "annotations": annotations})
            )),
            None
        );
        annotations["tenancy.x-k8s.io/vcrootns"] = json!("false");
        assert_eq!(
            Root::of(&meta(
                json!({"name": NAME, "uid": "u", "annotations": annotations})
            )),
            None
        );
        annotations["tenancy.x-k8s.io/vcrootns"] = json!("true");
        let going = json!({"name": NAME, "uid": "u", "annotations": annotations, "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(Root::of(&meta(going)), None);
    }
}
