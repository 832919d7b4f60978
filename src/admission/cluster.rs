//! What admission asks the API server: who uses a ClusterVersion, whether there is one, and whether the embedded
//! objects can be applied. Few reviews need any of it, and each question has a deadline shorter than the API server's
//! patience with us.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, StatefulSet},
    core::v1::Service,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams, Patch, PostParams},
};
use serde_json::Value;
use tokio::{sync::Semaphore, time::Instant};

use super::cluster_version::trial::{self, Outcome, Trial};
use crate::{
    api::{ClusterVersion, FIELD_MANAGER, FieldError, VirtualCluster, names::is_object_name},
    client::{CallError, deadline},
    controller::{kubernetes::apply_params, render::Kind},
};

/// Questions that may be under way at once; others wait for their turn, which counts as asking.
const TURNS: usize = 8;
/// Objects read per page of a list: only a name is kept of each.
const PAGE: u32 = 100;

/// The super cluster, as admission asks it.
pub struct Cluster {
    client: Client,
    namespace: String,
    limit: Duration,
    turns: Semaphore,
}

/// The super cluster, as one review asks it: until its deadline.
#[derive(Clone, Copy)]
pub struct Questions<'a> {
    cluster: &'a Cluster,
    deadline: Instant,
}

/// A VirtualCluster of some ClusterVersion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// `<namespace>/<name>`.
    pub key: String,
    /// Names of the revisions it runs or is brought to; none before its first.
    pub pins: Vec<String>,
}

impl User {
    fn of(tenant: &DynamicObject) -> Self {
        let revision = &tenant.data["status"]["revision"];
        let pins = ["current", "target"]
            .into_iter()
            .filter_map(|pin| revision[pin].as_str());
        Self {
            key: format!("{}/{}", tenant.namespace().unwrap_or_default(), tenant.name_any()),
            pins: pins
                .filter(|name| is_object_name(name))
                .map(str::to_owned)
                .collect(),
        }
    }
}

/// What came of a dry run of embedded objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tried {
    /// What the API server would refuse.
    pub faults: Vec<FieldError>,
    /// Why it could not be told of some of them.
    pub untold: Option<String>,
}

impl Cluster {
    /// Asks by way of `client`; dry runs go to `namespace`. No call takes longer than `limit`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, limit: Duration) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            limit,
            turns: Semaphore::new(TURNS),
        }
    }

    /// Asks until `deadline`.
    #[must_use]
    pub fn until(&self, deadline: Instant) -> Questions<'_> {
        Questions {
            cluster: self,
            deadline,
        }
    }
}

impl Questions<'_> {
    /// Where dry runs go.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.cluster.namespace
    }

    /// What is left of the time, and no more than one call may take.
    fn limit(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.min(self.cluster.limit)
    }

    /// `call`, when it is its turn.
    async fn in_turn<T>(&self, call: impl Future<Output = T>) -> T {
        // Nobody closes it.
        let _turn = self.cluster.turns.acquire().await;
        call.await
    }

    /// Whether there is a ClusterVersion of this name.
    pub async fn has_cluster_version(&self, name: &str) -> Result<bool, CallError> {
        let api = Api::<ClusterVersion>::all(self.cluster.client.clone());
        let found = deadline(
            self.limit(),
            format!("get ClusterVersion {name}"),
            self.in_turn(api.get_metadata_opt(name)),
        )
        .await?;
        Ok(found.is_some())
    }

    /// What the revisions of these names hold. One that does not exist is left out.
    pub async fn contents(&self, revisions: BTreeSet<String>) -> Result<BTreeMap<String, Value>, CallError> {
        let api = Api::<ControllerRevision>::namespaced(self.cluster.client.clone(), self.namespace());
        let all = async {
            let mut contents = BTreeMap::new();
            for name in revisions {
                if let Some(RawExtension(content)) = api.get_opt(&name).await?.and_then(|stored| stored.data)
                {
                    contents.insert(name, content);
                }
            }
            Ok(contents)
        };
        deadline(self.limit(), "get ControllerRevisions", self.in_turn(all)).await
    }

    /// The VirtualClusters of ClusterVersion `name`. Read afresh; broken ones count, too.
    pub async fn tenants_of(&self, name: &str) -> Result<Vec<User>, CallError> {
        let kind = ApiResource::erase::<VirtualCluster>(&());
        let api = Api::<DynamicObject>::all_with(self.cluster.client.clone(), &kind);
        let all = async {
            let mut params = ListParams::default().limit(PAGE);
            let mut users = Vec::new();
            loop {
                let page = api.list(&params).await?;
                let of_it = page
                    .items
                    .iter()
                    .filter(|tenant| tenant.data["spec"]["clusterVersionName"] == name);
                users.extend(of_it.map(User::of));
                match page.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => params = params.continue_token(&token),
                    None => return Ok(users),
                }
            }
        };
        deadline(self.limit(), "list VirtualClusters", self.in_turn(all)).await
    }

    /// Applies each object in a dry run.
    pub async fn try_out(&self, trials: &[Trial]) -> Tried {
        if trials.is_empty() {
            return Tried::default();
        }
        let limit = self.limit();
        let all = self.in_turn(join_all(trials.iter().map(|trial| self.try_one(trial))));
        let Ok(outcomes) = tokio::time::timeout(limit, all).await else {
            return Tried {
                faults: Vec::new(),
                untold: Some(format!("no answer within {limit:.1?}")),
            };
        };
        let mut tried = Tried::default();
        for outcome in outcomes {
            match outcome {
                Outcome::Accepted => {}
                Outcome::Refused(faults) | Outcome::Misshapen(faults) => tried.faults.extend(faults),
                Outcome::Untold(why) => tried.untold = Some(why),
            }
        }
        tried
    }

    async fn try_one(&self, trial: &Trial) -> Outcome {
        let kind = match trial.kind {
            Kind::StatefulSet => ApiResource::erase::<StatefulSet>(&()),
            Kind::Service => ApiResource::erase::<Service>(&()),
        };
        let api = Api::<DynamicObject>::namespaced_with(self.cluster.client.clone(), self.namespace(), &kind);
        let name = trial.object["metadata"]["name"].as_str().unwrap_or_default();
        let outcome = match api
            .patch(name, &apply_params(true), &Patch::Apply(&trial.object))
            .await
        {
            Ok(_) => return Outcome::Accepted,
            Err(kube::Error::Api(status)) => trial::outcome(&trial.path, &status),
            Err(error) => return Outcome::Untold(error.to_string()),
        };
        let Outcome::Misshapen(faults) = outcome else {
            return outcome;
        };
        let more = match self.create(&api, &trial.object).await {
            Some(status) => match trial::outcome(&trial.path, &status) {
                Outcome::Refused(faults) => faults,
                _ => Vec::new(),
            },
            None => Vec::new(),
        };
        Outcome::Refused(trial::joined(faults, more))
    }

    /// The error of a create in a dry run, if it is one of the API server.
    async fn create(&self, api: &Api<DynamicObject>, object: &Value) -> Option<Box<kube::core::Status>> {
        let object = serde_json::from_value(object.clone()).ok()?;
        let params = PostParams {
            dry_run: true,
            field_manager: Some(FIELD_MANAGER.into()),
        };
        match api.create(&params, &object).await {
            Err(kube::Error::Api(status)) => Some(status),
            _ => None,
        }
    }
}
