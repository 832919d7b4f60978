//! The main job: tenants are provisioned, two that agree are upgraded side by side, one that does not stays as it is,
//! and one whose new version cannot run fails alone and is repaired.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, ResourceExt as _};
use vc_manager::api::{VirtualCluster, labels, virtual_cluster::UpgradeResult};

use crate::{
    deletion, edits, failures,
    support::{
        Outages, Prober, Recorder, Scene, Tenant, condition, contents, is_ready, manager, restarts,
        templates::{self, Kubernetes},
        tuple,
    },
};

/// All pods of a tenant.
pub(crate) const PODS: [&str; 3] = ["apiserver-0", "controller-manager-0", "etcd-0"];
/// Secrets that an upgrade refreshes.
const REFRESHED: [&str; 4] = [
    "admin-kubeconfig",
    "apiserver-ca",
    "controller-manager-kubeconfig",
    "front-proxy-ca",
];
/// Secrets that it must not.
const KEPT: [&str; 3] = ["etcd-ca", "root-ca", "serviceaccount-rsa"];

pub(crate) async fn main(scene: Scene) {
    let history = Recorder::start(Api::<VirtualCluster>::namespaced(
        scene.client.clone(),
        &scene.namespace(),
    ));
    let version = scene.cluster_version("tenants", templates::standard()).await;
    let other_version = scene.cluster_version("broken", templates::standard()).await;
    let first = scene.tenant("first", &version).await;
    let second = scene.tenant("second", &version).await;
    let bystander = scene.tenant("bystander", &version).await;
    let unlucky = scene.tenant("unlucky", &other_version).await;
    futures::join!(
        first.running(),
        second.running(),
        bystander.running(),
        unlucky.running()
    );
    provisioned(&first, &version, &history).await;
    scene.say("provisioning is as it should be");

    let broken = failures::Broken::new(&unlucky, &other_version).await;
    scene
        .edit_content(&other_version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
            *templates::image(content, "apiServer") = failures::NO_IMAGE.into();
        })
        .await;
    unlucky.opt_in().await;
    Box::pin(upgraded(&scene, &version, [&first, &second], &bystander)).await;
    scene.say("two upgrades side by side are as they should be");

    let repaired = async {
        failures::missing_image(&broken, &first.newest().await).await;
        scene.say("an image that does not exist fails as it should, and is repaired");
        unlucky.delete().await;
    };
    let edited = async {
        edits::metadata_only(&second, &version).await;
        scene.say("an edit of metadata costs nothing");
        edits::service_only(&second, &version).await;
        scene.say("an edit of a Service arrives");
        failures::refused(&first, &version).await;
        scene.say("an edit that cannot be applied changes nothing, and is repaired");
    };
    futures::join!(repaired, edited);
    deletion::in_use(&version, [&first, &second, &bystander]).await;
}

/// A tenant that has just become Running.
async fn provisioned(tenant: &Tenant, version: &str, history: &Recorder<VirtualCluster>) {
    let all = history.states();
    let own = all
        .iter()
        .map(|(_, vc)| vc)
        .filter(|vc| vc.name_any() == tenant.name);
    let mut tuples: Vec<_> = own.map(tuple).filter(|[phase, ..]| !phase.is_empty()).collect();
    tuples.dedup();
    assert_eq!(
        tuples,
        [
            ["Pending", "retry: 3", "ClusterCreating"],
            [
                "Running",
                "tenant control plane is running",
                "TenantControlPlaneRunning"
            ],
        ]
    );
    let object = tenant.get().await;
    let status = object.status.clone().unwrap_or_default();
    assert_eq!(status.cluster_namespace.as_deref(), Some(tenant.root.as_str()));
    assert_eq!(condition(&object, "Ready"), ("True".into(), "Running".into()));
    assert!(status.provisioning.is_none() && status.upgrade.is_none() && status.history.is_empty());
    let address = tenant.address().await;
    assert_eq!(status.endpoint, Some(format!("https://{address}:6443")));
    let cluster_version = tenant
        .scene
        .cluster_versions()
        .get(version)
        .await
        .expect("the ClusterVersion");
    let applied = object.labels().get(labels::CLUSTER_VERSION_APPLIED);
    assert_eq!(applied, cluster_version.metadata.resource_version.as_ref());
    let revision = status.revision.unwrap_or_default();
    assert!(
        revision.current.is_some() && revision.current == revision.last_good && revision.target.is_none()
    );
    tenant
        .expect_events(&[
            "Provisioning",
            "NamespaceCreated",
            "CredentialsIssued",
            "EtcdApplied",
            "ApiServerApplied",
            "ControllerManagerApplied",
            "Running",
        ])
        .await;

    tenant.expect_pods(&PODS).await;
    assert_eq!(tenant.version().await, Kubernetes::First.git_version());
    tenant.expect_controllers("after-provisioning").await;
    let kubeconfig = &tenant.secrets().await["admin-kubeconfig"]["admin-kubeconfig"];
    let server = format!("https://{address}:6443");
    assert!(
        kubeconfig
            .lines()
            .any(|line| line.trim() == format!("server: {server}")),
        "the kubeconfig leads to {server}"
    );
    let address = address.clone();
    let names = [
        "kubernetes.default.svc".to_owned(),
        format!("apiserver-svc.{}", tenant.root),
    ];
    let root_ca = tenant.secrets().await["root-ca"]["tls.crt"].clone();
    tokio::task::spawn_blocking(move || served_certificate(&address, &names, &root_ca))
        .await
        .expect("openssl");
}

/// What the tenant serves with, as a program that is not ours sees it.
fn served_certificate(address: &str, names: &[String], root_ca: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let ca = folder.path().join("ca.crt");
    std::fs::write(&ca, root_ca).expect("a file");
    let connect = |check: [&str; 2]| {
        let output = Command::new("openssl")
            .args([
                "s_client",
                "-connect",
                &format!("{address}:6443"),
                "-verify_return_error",
                "-showcerts",
            ])
            .arg("-CAfile")
            .arg(&ca)
            .args(check)
            .stdin(Stdio::null())
            .output()
            .expect("openssl");
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        (
            output.status.success() && text.contains("Verify return code: 0 (ok)"),
            text,
        )
    };
    let (accepted, text) = connect(["-verify_ip", address]);
    assert!(accepted, "the certificate is not good for {address}: {text}");
    for name in names {
        let (accepted, text) = connect(["-verify_hostname", name]);
        assert!(accepted, "the certificate is not good for {name}: {text}");
    }
    let (accepted, _) = connect(["-verify_hostname", "elsewhere.example"]);
    assert!(!accepted, "the certificate is good for any name");

    let begin = text.find("-----BEGIN CERTIFICATE-----").expect("a certificate");
    let end = text.find("-----END CERTIFICATE-----").expect("its end") + "-----END CERTIFICATE-----".len();
    let leaf = folder.path().join("leaf.crt");
    std::fs::write(&leaf, &text[begin..end]).expect("a file");
    let verified = Command::new("openssl")
        .args(["verify", "-x509_strict", "-purpose", "sslserver", "-CAfile"])
        .args([&ca, &leaf])
        .output()
        .expect("openssl");
    assert!(
        verified.status.success(),
        "{}",
        String::from_utf8_lossy(&verified.stderr)
    );
}

/// From one Kubernetes to the next, with one flag besides.
async fn upgraded(scene: &Scene, version: &str, pair: [&Tenant; 2], bystander: &Tenant) {
    let mut usages = Vec::new();
    for tenant in [pair[0], pair[1], bystander] {
        usages.push(tenant.use_it().await);
    }
    let before = futures::future::join_all(pair.map(Before::of)).await;
    let untouched = Before::of(bystander).await;
    let pods = pair.map(|tenant| Recorder::start(tenant.api::<Pod>()));
    let secrets = pair.map(|tenant| Recorder::start(tenant.api::<Secret>()));
    let mut probers = Vec::new();
    for tenant in [pair[0], pair[1], bystander] {
        probers.push(Prober::start(tenant.admin_config().await));
    }

    scene
        .edit_content(version, |content| {
            templates::set_kubernetes(content, Kubernetes::Next);
            templates::set_flag(content, "apiServer", "--event-ttl=2h");
        })
        .await;
    let edited = scene.recorded(version).await;
    for tenant in pair {
        tenant.opt_in().await;
    }
    futures::join!(pair[0].upgraded(), pair[1].upgraded());
    let mut outages = Vec::new();
    for prober in probers {
        outages.push(prober.stop().await);
    }

    for (index, tenant) in pair.into_iter().enumerate() {
        succeeded(
            tenant,
            edited.metadata.resource_version.as_deref(),
            &UPGRADE_EVENTS,
        )
        .await;
        kept(tenant, &before[index]).await;
        for state in pods[index].states() {
            assert_eq!(
                restarts(&state.1),
                0,
                "{} of {} was restarted",
                state.1.name_any(),
                tenant.name
            );
        }
        let contents = contents(secrets[index].states().iter().map(|(_, secret)| secret));
        let expected = KEPT
            .map(|name| (name.to_owned(), 1))
            .into_iter()
            .chain(REFRESHED.map(|name| (name.to_owned(), 2)));
        assert_eq!(contents, expected.collect(), "contents each Secret has had");
        tenant.expect_usable(&usages[index]).await;
        tenant.expect_controllers("after-the-upgrade").await;
        downtime(tenant, &outages[index], &pods[index].states());
    }
    let [one, two] = [pair[0].newest().await, pair[1].newest().await];
    assert!(
        one.started.0 < two.ended.0 && two.started.0 < one.ended.0,
        "not side by side: {one:?}, {two:?}"
    );

    assert_eq!(bystander.version().await, Kubernetes::First.git_version());
    assert_eq!(bystander.pod_uids().await, untouched.pod_uids);
    assert_eq!(
        bystander.versions().await,
        untouched.versions,
        "nothing of a tenant that did not agree is written"
    );
    bystander.expect_usable(&usages[2]).await;
    assert!(
        outages[2].spans.is_empty(),
        "the tenant that did not agree was away: {:?}",
        outages[2]
    );

    let series = [
        format!("cluster_version=\"{version}\""),
        format!(
            "resource_version=\"{}\"",
            edited.resource_version().unwrap_or_default()
        ),
    ];
    let series = [series[0].as_str(), series[1].as_str()];
    assert_eq!(manager::count("clusters_upgraded", &series), 2);
    assert_eq!(manager::count("clusters_upgrade_seconds_count", &series), 2);
    assert_eq!(manager::count("clusters_upgrade_failed", &series[..1]), 0);
}

/// What is recorded of an upgrade that succeeded, and what the tenant itself says.
pub(crate) async fn succeeded(tenant: &Tenant, resource_version: Option<&str>, events: &[&str]) {
    assert_eq!(tenant.version().await, Kubernetes::Next.git_version());
    tenant.expect_pods(&PODS).await;
    let object = tenant.get().await;
    assert_eq!(
        object
            .labels()
            .get(labels::CLUSTER_VERSION_APPLIED)
            .map(String::as_str),
        resource_version
    );
    assert_eq!(
        condition(&object, "Upgrading"),
        ("False".into(), "Succeeded".into())
    );
    assert_eq!(condition(&object, "Ready"), ("True".into(), "Running".into()));
    let newest = tenant.newest().await;
    assert_eq!((newest.result, newest.reason), (UpgradeResult::Succeeded, None));
    let pins = object
        .status
        .and_then(|status| status.revision)
        .unwrap_or_default();
    assert_eq!(
        (pins.current, pins.last_good),
        (Some(newest.revision.clone()), Some(newest.revision))
    );
    tenant.expect_events(events).await;
}

/// Reasons of the Events of an upgrade, a step each.
pub(crate) const UPGRADE_EVENTS: [&str; 6] = [
    "UpgradeStarted",
    "CredentialsIssued",
    "ApiServerApplied",
    "ApiServerUpgraded",
    "ControllerManagerApplied",
    "UpgradeSucceeded",
];

/// A tenant before an upgrade.
pub(crate) struct Before {
    pub(crate) pod_uids: std::collections::BTreeMap<String, String>,
    pub(crate) versions: std::collections::BTreeMap<String, String>,
}

impl Before {
    pub(crate) async fn of(tenant: &Tenant) -> Self {
        Self {
            pod_uids: tenant.pod_uids().await,
            versions: tenant.versions().await,
        }
    }
}

/// What no upgrade may touch: etcd, the root CA, the key of the ServiceAccount tokens.
pub(crate) async fn kept(tenant: &Tenant, before: &Before) {
    let pods = tenant.pods().await;
    for (name, uid) in before
        .pod_uids
        .iter()
        .filter(|(name, _)| name.starts_with("etcd-"))
    {
        let pod = pods.get(name).unwrap_or_else(|| panic!("{name} is gone"));
        assert_eq!(
            pod.uid().as_ref(),
            Some(uid),
            "{name} of {} was replaced",
            tenant.name
        );
        assert_eq!(restarts(pod), 0, "{name} of {} was restarted", tenant.name);
    }
    let versions = tenant.versions().await;
    let objects = ["StatefulSet/etcd", "Service/etcd"].map(str::to_owned);
    for object in objects
        .into_iter()
        .chain(KEPT.map(|name| format!("Secret/{name}")))
    {
        assert_eq!(
            versions.get(&object),
            before.versions.get(&object),
            "{object} of {} was written",
            tenant.name
        );
    }
    for secret in REFRESHED.map(|name| format!("Secret/{name}")) {
        assert_ne!(
            versions.get(&secret),
            before.versions.get(&secret),
            "{secret} of {} is the old one",
            tenant.name
        );
    }
}

/// The API is away no longer than its pod is: from the order to go until the new one is ready.
fn downtime(tenant: &Tenant, outages: &Outages, pods: &[(Instant, Pod)]) {
    let apiserver = || pods.iter().filter(|(_, pod)| pod.name_any() == "apiserver-0");
    let old = apiserver().next().and_then(|(_, pod)| pod.uid());
    let left = apiserver()
        .find(|(_, pod)| pod.metadata.deletion_timestamp.is_some())
        .expect("the old pod goes")
        .0;
    let came = apiserver()
        .find(|(_, pod)| pod.uid() != old && is_ready(pod))
        .expect("the new pod comes")
        .0;
    let without_pod = came - left;
    let longest = outages.longest();
    tenant.scene.say(format!(
        "{}: API away {:.1} s of {} requests, {} times; without a pod {:.1} s",
        tenant.name,
        longest.as_secs_f64(),
        outages.asked,
        outages.spans.len(),
        without_pod.as_secs_f64()
    ));
    // The margin is for Endpoints to follow, on a machine where every core is busy.
    assert!(
        longest < without_pod + Duration::from_secs(5),
        "{outages:?}, but without a pod only {without_pod:?}"
    );
    assert!(outages.spans.len() <= 3, "it comes and goes: {outages:?}");
}
