//! Serving certificates of the webhooks: the program itself, as processes, with a real API server.
//!
//! The tests take turns, as there is one of each webhook configuration in a cluster.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod caller;
mod files;
mod proxy;
mod rights;
mod scene;
#[path = "../support/mod.rs"]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use vc_manager::admission::configuration::{MUTATING_CONFIGURATION, VALIDATING_CONFIGURATION};
use vc_manager::pki::CertificateInfo;
use vc_manager::server::configurations::{Configurations, Kind};
use vc_manager::server::shared_ca::SECRET;

use caller::{Caller, handshake};
use proxy::Proxy;
use scene::{Scene, published};
use support::{Replica, eventually};

const SECOND: Duration = Duration::from_secs(1);
/// Short enough to see renewals, and two seconds for a new CA to settle.
const SHORT: &[&str] = &["--webhook-cert-validity=20s", "--webhook-ca-validity=1h"];

/// Waits until a replica serves a certificate of this very CA.
async fn serves_from(replica: &Replica, ca: &CertificateInfo) {
    let bundle = ca.pem();
    eventually("a certificate of the new CA", async || {
        handshake(replica.https, bundle.as_bytes()).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_start_makes_the_ca_and_publishes_it() {
    let scene = Scene::with_configurations("first").await;
    let before = scene.validating().get(VALIDATING_CONFIGURATION).await.unwrap();
    let mut replica = scene.replica("a", &[]);
    replica.ready().await;
    scene.is_published().await;

    let secret = scene.secret().await;
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
    let labels = secret.metadata.labels.unwrap();
    assert_eq!(labels["app.kubernetes.io/managed-by"], "vc-manager");
    let (signer, trusted) = scene.stored().await;
    assert_eq!(trusted, std::slice::from_ref(&signer));
    assert_eq!(signer.common_name, "vc-manager webhook CA");
    let life = signer.not_after.duration_since(signer.not_before);
    assert_eq!(life.as_hours(), 8760 + 1);

    // The judgement of others.
    let ca = scene.server.dir().join("first-ca.pem");
    std::fs::write(&ca, signer.pem()).unwrap();
    let ca = ca.to_str().unwrap();
    let address = format!("127.0.0.1:{}", replica.https);
    for name in [
        ["-verify_ip", "127.0.0.1"],
        ["-verify_hostname", "localhost"],
        ["-verify_hostname", "virtualcluster-webhook-service.first.svc"],
    ] {
        let output = Command::new("openssl")
            .args([
                "s_client",
                "-connect",
                &address,
                "-CAfile",
                ca,
                "-verify_return_error",
                "-x509_strict",
            ])
            .args(name)
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Verify return code: 0 (ok)"), "{name:?}: {text}");
    }
    let served = handshake(replica.https, signer.pem().as_bytes()).await.unwrap();
    let served = CertificateInfo::from_der(served.to_vec()).unwrap();
    assert!(served.server_auth && !served.client_auth && !served.is_ca);
    assert_eq!(
        served.not_after.duration_since(served.not_before).as_hours(),
        720 + 1
    );

    // Nothing but the bundle changed.
    let mut after = scene.validating().get(VALIDATING_CONFIGURATION).await.unwrap();
    let managers = after.metadata.managed_fields.take().unwrap();
    assert!(
        managers
            .iter()
            .any(|entry| entry.manager.as_deref() == Some("vc-manager-webhook")
                && entry.operation.as_deref() == Some("Apply"))
    );
    for webhook in after.webhooks.iter_mut().flatten() {
        webhook.client_config.ca_bundle = None;
    }
    assert_eq!(after.webhooks, before.webhooks);
    assert_eq!(after.metadata.uid, before.metadata.uid);

    let metrics = replica.metrics().await;
    for (name, expected) in [
        (
            "vc_manager_serving_certificate_not_after_seconds",
            served.not_after,
        ),
        ("vc_manager_webhook_ca_not_after_seconds", signer.not_after),
    ] {
        let sample = format!("{name} {}", expected.as_second());
        assert!(
            metrics.lines().any(|shown| shown == sample),
            "{sample} not in\n{metrics}"
        );
    }
    assert!(replica.is_ready("/webhook-certificate").await);
    assert!(replica.terminate().await.success());
    let log = replica.log();
    assert!(!log.contains("PRIVATE KEY") && !log.contains("WARN"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_start_at_once_agree_on_one_ca() {
    let scene = Scene::with_configurations("both").await;
    for round in 0..3 {
        let mut replicas = ["a", "b", "c"].map(|name| scene.replica(&format!("{name}{round}"), &[]));
        for replica in &mut replicas {
            replica.ready().await;
        }
        scene.is_published().await;
        let (signer, trusted) = scene.stored().await;
        assert_eq!(trusted.len(), round + 1, "those of the rounds before are retired");
        for replica in &replicas {
            handshake(replica.https, signer.pem().as_bytes()).await.unwrap();
        }
        drop(replicas);
        scene.lose_the_secret().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_ca_is_replaced_and_no_call_fails() {
    let scene = Scene::with_configurations("lost").await;
    let mut replicas = [scene.replica("a", SHORT), scene.replica("b", SHORT)];
    for replica in &mut replicas {
        replica.ready().await;
    }
    let caller = Caller::start(
        scene.client.clone(),
        replicas.iter().map(|replica| replica.https).collect(),
        SECOND,
    );
    let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
    for (round, harm) in [
        ("deleted", None),
        ("without its key", Some(json!({"data": {"tls.key": ""}}))),
        (
            "with another key",
            Some(json!({"data": {"tls.key": base64_of(&other)}})),
        ),
        (
            "no certificate",
            Some(json!({"data": {"tls.crt": base64_of("junk")}})),
        ),
    ] {
        let (old, _) = scene.stored().await;
        match harm {
            Some(patch) => scene.merge(&scene.secrets(), SECRET, &patch).await,
            None => scene.lose_the_secret().await,
        }
        let new = eventually("a new CA", async || {
            let secret = scene.secrets().get_opt(SECRET).await.unwrap()?;
            let pem = String::from_utf8(secret.data?.remove("tls.crt")?.0).ok()?;
            CertificateInfo::parse(&pem).ok().filter(|signer| *signer != old)
        })
        .await;
        for replica in &replicas {
            serves_from(replica, &new).await;
        }
        let (_, trusted) = scene.stored().await;
        assert!(trusted.contains(&old), "{round}: they overlap");
        scene.is_published().await;
    }
    caller.was_never_refused().await;
    for replica in &mut replicas {
        assert!(replica.is_ready("").await && replica.terminate().await.success());
        assert!(!replica.log().contains("not ready"), "{}", replica.log());
    }
}

fn base64_of(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// It has no certificate of the old CA, and cannot know whether API servers have heard of the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_starts_amid_a_rotation_is_ready_when_that_has_settled() {
    let scene = Scene::with_configurations("amid").await;
    let mut first = scene.replica("a", &[]);
    first.ready().await;
    scene.lose_the_secret().await;
    scene.is_published().await;
    let published = Instant::now();
    let mut second = scene.replica("b", &[]);
    second.says("was published only just now").await;
    assert!(first.is_ready("").await && !second.is_ready("").await);
    second.ready().await;
    assert!(published.elapsed() > 8 * SECOND, "{:?}", published.elapsed());
    // Long after, there is nothing to wait for.
    let mut third = scene.replica("c", &SHORT[..1]);
    third.ready().await;
    assert!(!third.log().contains("not ready"), "{}", third.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_rotations_and_no_call_fails() {
    let scene = Scene::with_configurations("rotation").await;
    let flags = ["--webhook-cert-validity=10s", "--webhook-ca-validity=24s"];
    let mut replicas = [scene.replica("a", &flags), scene.replica("b", &flags)];
    for replica in &mut replicas {
        replica.ready().await;
    }
    let caller = Caller::start(
        scene.client.clone(),
        replicas.iter().map(|replica| replica.https).collect(),
        SECOND / 2,
    );
    let (mut last, _) = scene.stored().await;
    for _ in 0..3 {
        last = eventually("a rotation", async || {
            let (signer, trusted) = scene.stored().await;
            (signer != last).then(|| {
                assert!(trusted.contains(&last), "they overlap");
                signer
            })
        })
        .await;
        for replica in &replicas {
            serves_from(replica, &last).await;
        }
        eventually("the retired CA to go", async || {
            let (_, trusted) = scene.stored().await;
            (trusted == [last.clone()]).then_some(())
        })
        .await;
    }
    scene.is_published().await;
    caller.was_never_refused().await;
    for replica in &replicas {
        assert!(!replica.log().contains("WARN"), "{}", replica.log());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_of_somebody_else_is_left_alone() {
    let scene = Scene::with_configurations("foreign").await;
    let foreign: Secret = serde_json::from_value(json!({
        "metadata": {"name": SECRET},
        "data": {"tls.crt": base64_of("theirs"), "tls.key": base64_of("theirs")},
    }))
    .unwrap();
    let foreign = scene
        .secrets()
        .create(&PostParams::default(), &foreign)
        .await
        .unwrap();
    let mut replica = scene.replica("a", &[]);
    replica.says("is not vc-manager's").await;
    replica
        .says("delete it, or put a CA into its tls.crt and tls.key")
        .await;
    // Health is served, by a certificate that nobody trusts.
    eventually("the health listener", async || {
        matches!(Replica::get(replica.health, "/livez").await, Some((200, _))).then_some(())
    })
    .await;
    let any = rcgen::generate_simple_self_signed(vec!["x".to_owned()]).unwrap();
    let refused = handshake(replica.https, any.cert.pem().as_bytes())
        .await
        .unwrap_err();
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    assert!(!replica.is_ready("/webhook-certificate").await);
    let still = scene.secret().await;
    assert_eq!(still.metadata.resource_version, foreign.metadata.resource_version);

    scene.lose_the_secret().await;
    replica.ready().await;
    scene.is_published().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ca_of_somebody_else_is_used_and_not_written() {
    let scene = Scene::with_configurations("theirs").await;
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.not_after = time::OffsetDateTime::now_utc() + Duration::from_hours(1);
    let certificate = params.self_signed(&key).unwrap();
    let theirs: Secret = serde_json::from_value(json!({
        "metadata": {"name": SECRET},
        "type": "kubernetes.io/tls",
        "data": {"tls.crt": base64_of(&certificate.pem()), "tls.key": base64_of(&key.serialize_pem())},
    }))
    .unwrap();
    let theirs = scene
        .secrets()
        .create(&PostParams::default(), &theirs)
        .await
        .unwrap();
    let mut replica = scene.replica("a", &[]);
    replica.ready().await;
    handshake(replica.https, certificate.pem().as_bytes())
        .await
        .unwrap();
    let still = scene.secret().await;
    assert_eq!(still.metadata.resource_version, theirs.metadata.resource_version);
    // It is as old as 1975, so two thirds of its life are over.
    replica.says("its CA is not renewed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_that_someone_overwrote_is_put_back() {
    let scene = Scene::with_configurations("overwritten").await;
    let mut replicas = [scene.replica("a", &[]), scene.replica("b", &[])];
    for replica in &mut replicas {
        replica.ready().await;
    }
    let other = rcgen::generate_simple_self_signed(vec!["x".to_owned()]).unwrap();
    let before = scene.secret().await;
    for bundle in [Some(other.cert.pem()), None, Some(String::new())] {
        scene.overwrite(bundle.as_deref()).await;
        scene.is_published().await;
    }
    let after = scene.secret().await;
    assert_eq!(after.metadata.resource_version, before.metadata.resource_version);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configurations_may_come_late() {
    let scene = Scene::new("late").await;
    let mut replica = scene.replica("a", &[]);
    replica.ready().await;
    let log = replica.log();
    for name in [VALIDATING_CONFIGURATION, MUTATING_CONFIGURATION] {
        assert!(log.contains(&format!("{name} does not exist")), "{log}");
    }
    assert!(log.contains("vc-manager webhook-config | kubectl apply --server-side --force-conflicts -f -"));
    tokio::time::sleep(SECOND).await;
    assert!(
        published(&scene.client).await.is_empty(),
        "they are not made here"
    );

    scene.configure().await;
    scene.is_published().await;
    let (signer, _) = scene.stored().await;
    // Only now is it known that it is called by address.
    serves_from(&replica, &signer).await;
    eventually("to be ready again", async || {
        replica.is_ready("").await.then_some(())
    })
    .await;

    scene
        .mutating()
        .delete(MUTATING_CONFIGURATION, &DeleteParams::default())
        .await
        .unwrap();
    tokio::time::sleep(2 * SECOND).await;
    assert!(
        scene
            .mutating()
            .get_opt(MUTATING_CONFIGURATION)
            .await
            .unwrap()
            .is_none()
    );
    assert!(replica.is_ready("").await);
    assert_eq!(replica.log().matches("does not exist").count(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_serves_on_while_the_api_server_is_away() {
    let scene = Scene::with_configurations("away").await;
    let url = scene.server.config().await.cluster_url;
    let proxy = Proxy::to(url.port_u16().unwrap()).await;
    let kubeconfig = scene.server.kubeconfig("away", Some("system:masters"));
    let kubeconfig = kubeconfig.replace(
        &format!(":{}", url.port_u16().unwrap()),
        &format!(":{}", proxy.port),
    );

    // Away from the start: alive, not ready.
    let mut replica = scene.replica_as("a", &kubeconfig, &["--kube-api-timeout=1s"]);
    eventually("the health listener", async || {
        matches!(Replica::get(replica.health, "/livez").await, Some((200, _))).then_some(())
    })
    .await;
    assert!(!replica.is_ready("/webhook-certificate").await);
    assert!(replica.is_ready("/certificate").await);
    replica.says("webhook certificates: trying again").await;
    proxy.set_open(true);
    replica.ready().await;
    scene.is_published().await;

    // Away later: it goes on.
    let (signer, _) = scene.stored().await;
    proxy.set_open(false);
    for _ in 0..10 {
        tokio::time::sleep(SECOND / 2).await;
        handshake(replica.https, signer.pem().as_bytes()).await.unwrap();
        assert!(replica.is_ready("").await);
    }
    scene.overwrite(None).await;
    scene.lose_the_secret().await;
    tokio::time::sleep(SECOND).await;
    handshake(replica.https, signer.pem().as_bytes()).await.unwrap();
    proxy.set_open(true);
    scene.is_published().await;
    let (new, trusted) = scene.stored().await;
    assert!(
        new != signer && trusted.contains(&signer),
        "from the configuration that had it still"
    );
}

/// Who read a configuration before it was changed, or deleted, cannot write it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_is_not_put_into_what_has_changed_since() {
    let scene = Scene::with_configurations("guard").await;
    let configurations = Configurations::new(scene.client.clone(), 15 * SECOND);
    let read = configurations.read().await.unwrap().pop().unwrap();
    assert_eq!(read.kind, Kind::Mutating);
    let ca = rcgen::generate_simple_self_signed(vec!["x".to_owned()])
        .unwrap()
        .cert
        .pem();
    let patch = |bundle: &str| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": MUTATING_CONFIGURATION, "resourceVersion": read.resource_version},
            "webhooks": [{"name": read.webhooks[0].name, "clientConfig": {"caBundle": base64_of(bundle)}}],
        })
    };
    scene.overwrite(Some(&ca)).await;
    let refused = configurations
        .apply(Kind::Mutating, "test", &patch(&ca))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Some(409));
    scene
        .mutating()
        .delete(MUTATING_CONFIGURATION, &DeleteParams::default())
        .await
        .unwrap();
    let refused = configurations
        .apply(Kind::Mutating, "test", &patch(&ca))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Some(422), "it would have no rules");
    assert_eq!(configurations.read().await.unwrap().len(), 1);
}

/// Requests for the kinds that matter here, as the API server counts them, watches apart.
async fn requests(scene: &Scene) -> Vec<String> {
    let request = http::Request::get("/metrics").body(Vec::new()).unwrap();
    let text = scene.client.request_text(request).await.unwrap();
    let mut lines: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("apiserver_request_total{"))
        .filter(|line| {
            [
                "secrets",
                "validatingwebhookconfigurations",
                "mutatingwebhookconfigurations",
            ]
            .iter()
            .any(|resource| line.contains(&format!("resource=\"{resource}\"")))
        })
        .filter(|line| !line.contains("verb=\"WATCH\""))
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_asked_while_nothing_happens() {
    let scene = Scene::with_configurations("idle").await;
    let mut replicas = [scene.replica("a", &[]), scene.replica("b", &[])];
    for replica in &mut replicas {
        replica.ready().await;
    }
    scene.is_published().await;
    // The events of what was written have come by then.
    tokio::time::sleep(3 * SECOND).await;
    let before = requests(&scene).await;
    assert!(before.iter().any(|line| line.contains("secrets")), "{before:#?}");
    tokio::time::sleep(20 * SECOND).await;
    assert_eq!(requests(&scene).await, before);
}
