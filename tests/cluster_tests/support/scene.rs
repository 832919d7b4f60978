//! What belongs to one scenario: a namespace for its VirtualClusters, and names that tell whose things are.

use std::time::{Duration, Instant};

use kube::{Api, Client, ResourceExt as _, api::PostParams};
use serde_json::Value;
use vc_manager::api::{ClusterVersion, VirtualCluster, VirtualClusterSpec};

use super::{
    Tenant,
    cluster::{PREFIX, make_namespace},
    until,
};

/// A scenario's part of the super cluster.
#[derive(Clone)]
pub(crate) struct Scene {
    /// Administrator of the super cluster.
    pub(crate) client: Client,
    /// Name of the scenario.
    pub(crate) name: &'static str,
    started: Instant,
}

impl Scene {
    /// The one of the scenario `name`, with its namespace.
    pub(crate) async fn new(client: Client, name: &'static str) -> Self {
        let scene = Self {
            client,
            name,
            started: Instant::now(),
        };
        make_namespace(&scene.client, &scene.namespace()).await;
        scene
    }

    /// Namespace of its VirtualClusters.
    pub(crate) fn namespace(&self) -> String {
        format!("{PREFIX}-{}", self.name)
    }

    /// Tells how far it is.
    pub(crate) fn say(&self, text: impl AsRef<str>) {
        println!(
            "{:>7.1}s {}: {}",
            self.started.elapsed().as_secs_f64(),
            self.name,
            text.as_ref()
        );
    }

    /// All ClusterVersions.
    pub(crate) fn cluster_versions(&self) -> Api<ClusterVersion> {
        Api::all(self.client.clone())
    }

    /// Makes a ClusterVersion; `name` is the scenario's own. Its whole name.
    pub(crate) async fn cluster_version(&self, name: &str, content: Value) -> String {
        let name = format!("{}-{name}", self.namespace());
        let object = ClusterVersion::new(&name, serde_json::from_value(content).expect("an object"));
        self.cluster_versions()
            .create(&PostParams::default(), &object)
            .await
            .expect("it is accepted");
        name
    }

    /// Changes a ClusterVersion as `kubectl edit` does.
    pub(crate) async fn edit(&self, name: &str, change: impl Fn(&mut ClusterVersion)) -> ClusterVersion {
        until("an edit without conflict", Duration::from_secs(10), async || {
            let mut object = self
                .cluster_versions()
                .get(name)
                .await
                .expect("the ClusterVersion");
            change(&mut object);
            match self
                .cluster_versions()
                .replace(name, &PostParams::default(), &object)
                .await
            {
                Err(kube::Error::Api(status)) if status.code == 409 => Err(status.message),
                other => Ok(other.expect("it is accepted")),
            }
        })
        .await
    }

    /// Changes what a ClusterVersion says.
    pub(crate) async fn edit_content(&self, name: &str, change: impl Fn(&mut Value)) -> ClusterVersion {
        self.edit(name, |object| {
            let mut content = Value::Object(std::mem::take(&mut object.spec.raw));
            change(&mut content);
            object.spec = serde_json::from_value(content).expect("an object");
        })
        .await
    }

    /// Waits until the manager has recorded what a ClusterVersion says, and gives it with its final resource version.
    pub(crate) async fn recorded(&self, name: &str) -> ClusterVersion {
        until(
            "the revision to be recorded",
            Duration::from_secs(30),
            async || {
                let object = self
                    .cluster_versions()
                    .get(name)
                    .await
                    .map_err(|error| error.to_string())?;
                let observed = object
                    .status
                    .as_ref()
                    .and_then(|status| status.observed_generation);
                if observed == object.metadata.generation {
                    Ok(object)
                } else {
                    Err(format!("{:?}", object.status))
                }
            },
        )
        .await
    }

    /// Makes a VirtualCluster.
    pub(crate) async fn tenant(&self, name: &str, cluster_version: &str) -> Tenant {
        let spec = VirtualClusterSpec {
            cluster_version_name: cluster_version.to_owned(),
            ..VirtualClusterSpec::default()
        };
        let api: Api<VirtualCluster> = Api::namespaced(self.client.clone(), &self.namespace());
        let made = api
            .create(&PostParams::default(), &VirtualCluster::new(name, spec))
            .await
            .expect("it is accepted");
        Tenant::new(
            self.clone(),
            made.name_any(),
            vc_manager::api::root_namespace::of(&made),
        )
    }

    /// Makes a VirtualCluster and waits until it is Running.
    pub(crate) async fn provisioned(&self, name: &str, cluster_version: &str) -> Tenant {
        let tenant = self.tenant(name, cluster_version).await;
        tenant.running().await;
        tenant
    }
}
