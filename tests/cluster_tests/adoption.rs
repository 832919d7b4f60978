//! Tenants that the Go manager left, with real pods: what runs goes on running, what crash-loops comes up, and none
//! loses what it holds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ObjectMeta, PostParams},
};
use serde_json::{Value, json};
use vc_manager::api::VirtualCluster;

use crate::{
    control_plane::{Before, PODS, UPGRADE_EVENTS, kept, succeeded},
    support::{
        PATIENCE, Prober, Recorder, Scene, Tenant, condition, manager, restarts,
        templates::{self, Kubernetes, at},
        tuple, until,
    },
    upstream::{self, Layout, Reached, State},
};

/// How long nothing may happen to a tenant that is taken over.
const WATCHED: Duration = Duration::from_mins(1);
/// There is nobody to hand a Lease over from.
const FLAGS: [&str; 1] = ["--leader-election=false"];

pub(crate) async fn taken_over(scene: Scene) {
    let version = scene
        .cluster_version("running", as_in_samples(templates::standard()))
        .await;
    let mut behind_port = as_in_samples(templates::standard());
    *at(&mut behind_port, "/apiServer/service/spec/type") = json!("NodePort");
    let other_version = scene.cluster_version("pending", behind_port).await;

    let make = |name: &str, version: &str| upstream::Tenant {
        patience: PATIENCE,
        ..upstream::Tenant::new(&scene.namespace(), name, version)
    };
    let pending = State::Pending {
        retries: 1,
        reached: Reached::ControllerManager,
    };
    let (plain, old, pending) = futures::join!(
        left(&scene, make("plain", &version).gate()),
        left(&scene, make("old", &version).layout(Layout::Created)),
        left(&scene, make("pending", &other_version).state(pending)),
    );
    scene.say("the Go manager's tenants are there");
    let data = Data::write(&pending).await;
    crash_loops(&pending).await;
    let mut running = Vec::new();
    for tenant in [plain, old] {
        tenant.expect_pods(&PODS).await;
        running.push(Running::of(tenant).await);
    }

    manager::start(&FLAGS).await;
    for tenant in &running {
        tenant.taken_over().await;
    }
    let started = Instant::now();
    comes_up(&pending, &data).await;
    tokio::time::sleep(WATCHED.saturating_sub(started.elapsed())).await;
    for tenant in &mut running {
        tenant.expect_untouched().await;
    }
    scene.say("who runs was not touched");

    scene
        .edit_content(&version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
        })
        .await;
    let edited = scene.recorded(&version).await;
    for tenant in &running {
        tenant.tenant.opt_in().await;
    }
    let resource_version = edited.resource_version();
    let upgrades = running
        .into_iter()
        .map(|tenant| tenant.upgrades(resource_version.as_deref()));
    futures::future::join_all(upgrades).await;
    data.expect_kept(&pending).await;
    pending.delete().await;
    pending.gone().await;
}

/// With the update strategy that all samples of the Go manager have.
fn as_in_samples(mut content: Value) -> Value {
    for bundle in ["etcd", "apiServer", "controllerManager"] {
        *at(
            &mut content,
            &format!("/{bundle}/statefulset/spec/updateStrategy"),
        ) = json!({"type": "OnDelete"});
    }
    content
}

async fn left(scene: &Scene, tenant: upstream::Tenant) -> Tenant {
    let left = tenant.leave(&scene.client).await;
    Tenant::new(scene.clone(), tenant.name, left.root)
}

/// A tenant that runs, and what it was before the manager came.
struct Running {
    tenant: Tenant,
    object: VirtualCluster,
    before: Before,
    usage: crate::support::tenant::Usage,
    pods: Recorder<Pod>,
    prober: Option<Prober>,
}

impl Running {
    async fn of(tenant: Tenant) -> Self {
        Self {
            usage: tenant.use_it().await,
            object: tenant.get().await,
            before: Before::of(&tenant).await,
            pods: Recorder::start(tenant.api()),
            prober: Some(Prober::start(tenant.admin_config().await)),
            tenant,
        }
    }

    /// Waits until it is pinned to what it runs.
    async fn taken_over(&self) {
        self.tenant
            .when("taken over", PATIENCE, |vc| {
                let status = vc.status.clone().unwrap_or_default();
                status
                    .revision
                    .is_some_and(|revision| revision.adopted && revision.current.is_some())
            })
            .await;
        self.tenant.expect_events(&["Adopted"]).await;
    }

    /// Fails if anything happened to it, or if it was away.
    async fn expect_untouched(&mut self) {
        let name = &self.tenant.name;
        assert_eq!(self.tenant.versions().await, self.before.versions, "{name}");
        assert_eq!(self.tenant.pod_uids().await, self.before.pod_uids, "{name}");
        for (_, pod) in self.pods.states() {
            let going = pod.metadata.deletion_timestamp.is_some();
            assert!(restarts(&pod) == 0 && !going, "{} of {name}", pod.name_any());
        }
        let outages = self.prober.take().expect("it was started").stop().await;
        assert!(outages.spans.is_empty(), "{name} was away: {outages:?}");
        let now = self.tenant.get().await;
        assert_eq!(tuple(&now), tuple(&self.object), "{name}");
        let told = |vc: &VirtualCluster| {
            let all = vc.status.clone().unwrap_or_default().conditions;
            let old = all.into_iter().filter(|condition| condition.type_.is_none());
            old.collect::<Vec<_>>()
        };
        assert_eq!(told(&now), told(&self.object), "{name}");
    }

    /// Waits for the end of its first upgrade, which leaves etcd alone and all clients good.
    async fn upgrades(self, resource_version: Option<&str>) {
        self.tenant.upgraded().await;
        succeeded(&self.tenant, resource_version, &UPGRADE_EVENTS).await;
        kept(&self.tenant, &self.before).await;
        self.tenant.expect_usable(&self.usage).await;
        self.tenant.expect_controllers("after-the-upgrade").await;
        let status = self.tenant.get().await.status.unwrap_or_default();
        assert!(
            status.revision.is_some_and(|revision| !revision.adopted),
            "{} runs what was made here",
            self.tenant.name
        );
        self.tenant.delete().await;
        self.tenant.gone().await;
    }
}

/// Waits until the controller-manager has given up once, for the reason it does.
async fn crash_loops(tenant: &Tenant) {
    until("the controller-manager to give up", PATIENCE, async || {
        let pods = tenant.pods().await;
        let again = pods.get("controller-manager-0").map_or(0, restarts);
        if again > 0 {
            Ok(())
        } else {
            Err(format!("{again} restarts"))
        }
    })
    .await;
    let kubeconfig =
        &tenant.secrets().await["controller-manager-kubeconfig"]["controller-manager-kubeconfig"];
    assert!(kubeconfig.contains(&format!("server: https://[apiserver-svc.{}]:6443", tenant.root)));
    tenant
        .scene
        .say("pending: its controller-manager refuses its kubeconfig");
}

async fn comes_up(tenant: &Tenant, data: &Data) {
    let object = tenant.running().await;
    assert_eq!(condition(&object, "Ready"), ("True".into(), "Running".into()));
    let secrets = tenant.secrets().await;
    for name in ["admin-kubeconfig", "controller-manager-kubeconfig"] {
        let server = format!("server: https://apiserver-svc.{}:6443", tenant.root);
        assert!(
            secrets[name][name].lines().any(|line| line.trim() == server),
            "{name}"
        );
    }
    data.expect_kept(tenant).await;
    tenant.expect_controllers("after-it-came-up").await;
}

/// What a tenant holds before it ever came up.
struct Data {
    config_map: Option<String>,
    etcd: String,
    for_life: BTreeMap<String, BTreeMap<String, String>>,
}

impl Data {
    async fn write(tenant: &Tenant) -> Self {
        let config_map = ConfigMap {
            metadata: ObjectMeta {
                name: Some("early".into()),
                ..ObjectMeta::default()
            },
            ..ConfigMap::default()
        };
        let made = config_maps(tenant)
            .await
            .create(&PostParams::default(), &config_map)
            .await
            .expect("its API takes it");
        Self {
            config_map: made.uid(),
            etcd: tenant.pod_uids().await["etcd-0"].clone(),
            for_life: for_life(tenant).await,
        }
    }

    async fn expect_kept(&self, tenant: &Tenant) {
        let kept = config_maps(tenant)
            .await
            .get("early")
            .await
            .expect("what it held");
        assert_eq!(kept.uid(), self.config_map, "what it held");
        let etcd = tenant.pods().await.remove("etcd-0").expect("etcd");
        assert_eq!(
            (etcd.uid(), restarts(&etcd)),
            (Some(self.etcd.clone()), 0),
            "etcd"
        );
        assert_eq!(for_life(tenant).await, self.for_life);
    }
}

async fn for_life(tenant: &Tenant) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut secrets = tenant.secrets().await;
    secrets.retain(|name, _| ["root-ca", "serviceaccount-rsa"].contains(&name.as_str()));
    secrets
}

/// Where a tenant keeps a ConfigMap; its kubeconfig may be one that newer clients refuse.
async fn config_maps(tenant: &Tenant) -> Api<ConfigMap> {
    let kubeconfig = &tenant.secrets().await["admin-kubeconfig"]["admin-kubeconfig"];
    let config = tenant.config_of(&kubeconfig.replace(['[', ']'], "")).await;
    Api::namespaced(Client::try_from(config).expect("a client"), "default")
}
