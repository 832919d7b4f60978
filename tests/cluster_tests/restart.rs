//! A manager that is killed in the middle of its work, and started again.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Pod, Secret},
};
use kube::{Api, ResourceExt as _};
use vc_manager::api::VirtualCluster;

use crate::{
    control_plane::{Before, PODS, kept, succeeded},
    support::{
        PATIENCE, Recorder, Scene, Tenant, contents, manager, restarts,
        templates::{self, Kubernetes},
    },
};

/// Without a Lease the next one need not wait for it to run out.
const FLAGS: [&str; 1] = ["--leader-election=false"];

pub(crate) async fn killed_in_the_middle(scene: Scene) {
    manager::start(&FLAGS).await;
    let version = scene.cluster_version("tenants", templates::standard()).await;
    let tenant = scene.tenant("tenant", &version).await;
    let secrets = Recorder::start(tenant.api::<Secret>());
    let pods = Recorder::start(tenant.api::<Pod>());

    killed_when(&tenant, "the first Secret is there", async || {
        !tenant.secrets().await.is_empty()
    })
    .await;
    let sets: Api<StatefulSet> = tenant.api();
    killed_when(&tenant, "etcd is made", async || exists(&sets, "etcd").await).await;
    killed_when(&tenant, "the apiserver is made", async || {
        exists(&sets, "apiserver").await
    })
    .await;
    tenant.running().await;
    tenant.expect_pods(&PODS).await;
    // A controller-manager gives up, and is restarted, when its API goes away while it still starts its controllers.
    tenant.expect_controllers("after-provisioning").await;
    let once: BTreeMap<_, _> = contents(secrets.states().iter().map(|(_, secret)| secret));
    assert!(
        once.len() == 7 && once.values().all(|count| *count == 1),
        "contents each Secret has had: {once:?}"
    );
    let usage = tenant.use_it().await;
    let before = Before::of(&tenant).await;

    scene
        .edit_content(&version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
        })
        .await;
    let edited = scene.recorded(&version).await;
    tenant.opt_in().await;
    let step = async |wanted: &str| {
        let status = tenant.get().await.status.unwrap_or_default();
        status
            .upgrade
            .is_some_and(|upgrade| upgrade.step.name() == wanted)
    };
    killed_when(&tenant, "the upgrade begins", async || step("ApiServer").await).await;
    let old = before.pod_uids["apiserver-0"].clone();
    killed_when(&tenant, "the old apiserver goes", async || {
        let pod = tenant.pods().await.remove("apiserver-0");
        pod.is_none_or(|pod| pod.uid().as_deref() != Some(&old) || pod.metadata.deletion_timestamp.is_some())
    })
    .await;
    killed_when(&tenant, "it is the controller-manager's turn", async || {
        step("ControllerManager").await
    })
    .await;
    tenant.upgraded().await;
    // Events wait in memory to be written, so that one told just before a kill is lost; the last manager told this one.
    let resource_version = edited.metadata.resource_version.as_deref();
    succeeded(&tenant, resource_version, &["UpgradeSucceeded"]).await;
    kept(&tenant, &before).await;
    tenant.expect_usable(&usage).await;
    tenant.expect_controllers("after-the-upgrade").await;

    let all = contents(secrets.states().iter().map(|(_, secret)| secret));
    for (name, count) in all {
        let allowed = if ["root-ca", "serviceaccount-rsa", "etcd-ca"].contains(&name.as_str()) {
            1
        } else {
            2
        };
        assert_eq!(count, allowed, "contents that {name} has had");
    }
    for (_, pod) in pods.states() {
        assert_eq!(restarts(&pod), 0, "{} was restarted", pod.name_any());
    }
    let uids: std::collections::BTreeSet<_> = pods
        .states()
        .into_iter()
        .filter(|(_, pod)| pod.name_any() == "apiserver-0")
        .filter_map(|(_, pod)| pod.uid())
        .collect();
    assert_eq!(uids.len(), 2, "one apiserver before, one after");
    tenant.delete().await;
    tenant.gone().await;
}

/// Kills the manager as soon as `moment` has come, and starts another.
async fn killed_when(tenant: &Tenant, what: &str, moment: impl AsyncFn() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !moment().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{what}: not after {PATIENCE:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    manager::kill();
    let state = tenant.get().await;
    tenant.scene.say(format!(
        "killed when {what}; it says {:?}",
        phase_and_step(&state)
    ));
    manager::start(&FLAGS).await;
}

async fn exists(sets: &Api<StatefulSet>, name: &str) -> bool {
    sets.get_opt(name).await.expect("an answer").is_some()
}

fn phase_and_step(tenant: &VirtualCluster) -> (String, Option<&'static str>) {
    let upgrade = tenant.status.as_ref().and_then(|status| status.upgrade.as_ref());
    (
        tenant.phase().to_owned(),
        upgrade.map(|upgrade| upgrade.step.name()),
    )
}
