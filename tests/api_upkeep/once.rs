//! Root CA and service-account key are made once: when one is lost, damaged or swapped, nothing in the tenant is
//! touched until it is restored.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret, jiff::SignedDuration};
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use vc_manager::controller::render::Kind;

use crate::{
    scene::{ONE, Scene},
    secrets::key_material,
    support::{condition, root_of},
};

const CONFIDENTIAL: &str = "confidential-garbage-9876543210";

/// Replaces a Secret by `data`, as a restore from a backup does; or only deletes it.
async fn replace(scene: &Scene, secret: &str, data: Option<&BTreeMap<String, String>>) {
    let api = scene.scope.api::<Secret>(&scene.root);
    let _ = api.delete(secret, &DeleteParams::default()).await;
    let Some(data) = data else { return };
    let data = data.iter();
    let data = data.map(|(key, text)| (key.clone(), ByteString(text.clone().into_bytes())));
    let mut object: Secret = serde_json::from_value(json!({"metadata": {"name": secret}})).unwrap();
    object.type_ = Some("kubernetes.io/tls".into());
    object.data = Some(data.collect());
    api.create(&PostParams::default(), &object).await.unwrap();
}

/// With `data` in the place of this Secret, nothing is done but to say so, whatever else is wrong; restored, all is
/// well again.
async fn stops(
    scene: &mut Scene,
    secret: &str,
    data: Option<&BTreeMap<String, String>>,
    reason: &str,
    words: &[&str],
) {
    let good = scene.scope.secrets(&scene.root).await;
    let told = scene.told(reason).await.len();
    scene
        .without_manager(async |scene: &Scene| {
            replace(scene, secret, data).await;
            // Things that would be put right.
            scene.delete_secret("front-proxy-ca").await;
            scene
                .edit(
                    Kind::StatefulSet,
                    "apiserver",
                    json!({"metadata": {"labels": {"tier": "other"}}}),
                )
                .await;
        })
        .await;
    let before = scene.scope.versions(&scene.root).await;
    let message = scene.says("CertificatesValid", "False", reason).await;
    let named = format!("Secret {}/{secret}", scene.root);
    for word in words.iter().chain([&named.as_str()]) {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
    scene.tells(reason, &[&named]).await;
    scene.look().await;
    assert_eq!(
        scene.scope.versions(&scene.root).await,
        before,
        "{reason}: nothing is written"
    );
    assert_eq!(scene.told(reason).await.len(), told + 1, "told once");
    // It is not looked at over and over, either: it rests.
    scene.assert_settled().await;
    assert_eq!(
        condition(&scene.tenant().await, "Ready").status,
        "True",
        "it runs as it did"
    );

    // What is wrong besides is said, and left.
    let message = scene.says("Drifted", "True", "CredentialsAtFault").await;
    assert!(message.contains("metadata.labels.tier"), "{message}");
    scene.delete(Kind::StatefulSet, "controller-manager").await;
    scene.says("Ready", "False", "NotReady").await;
    scene.assert_settled().await;
    assert!(
        scene
            .shape(Kind::StatefulSet, "controller-manager")
            .await
            .is_none()
    );

    replace(scene, secret, Some(&good[secret])).await;
    scene.says("CertificatesValid", "True", "Valid").await;
    scene.at_rest().await;
    let restored = scene.scope.secrets(&scene.root).await;
    assert_eq!(restored[secret], good[secret]);
    // And what had to wait is done.
    assert!(restored.contains_key("front-proxy-ca"));
    scene.says("Ready", "True", "Running").await;
    scene.says("Drifted", "False", "InSync").await;
    scene.assert_certified().await;
    scene.assert_settled().await;
    let texts = scene.all_texts().await;
    for text in key_material(&restored)
        .iter()
        .map(String::as_str)
        .chain([CONFIDENTIAL, "-----BEGIN"])
    {
        assert!(!texts.contains(text), "{text} is told");
    }
    // There is a limit to what is put back within an hour.
    scene.pass(SignedDuration::from_hours(2));
}

fn with(good: &BTreeMap<String, String>, key: &str, text: &str) -> BTreeMap<String, String> {
    let mut data = good.clone();
    data.insert(key.to_owned(), text.to_owned());
    data
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_ca_is_never_made_again() {
    let mut scene = Scene::start("up-root-ca").await;
    let other = root_of(&scene.scope.provision("two").await);
    let others = scene.scope.secrets(&other).await;
    let own = scene.scope.secrets(&scene.root).await;
    let ca = &own["root-ca"];
    stops(
        &mut scene,
        "root-ca",
        None,
        "RootCALost",
        &["does not exist", "is not made anew", "Restore it"],
    )
    .await;
    for (key, text) in [
        ("tls.crt", CONFIDENTIAL),
        ("tls.crt", &ca["tls.key"]),
        ("tls.crt", &own["apiserver-ca"]["tls.crt"]),
        ("tls.key", CONFIDENTIAL),
    ] {
        let data = with(ca, key, text);
        let words = [format!("key {key}"), "never overwritten".to_owned()];
        let words = words.each_ref().map(String::as_str);
        stops(&mut scene, "root-ca", Some(&data), "RootCAUnusable", &words).await;
    }
    let data = with(ca, "tls.key", &others["root-ca"]["tls.key"]);
    stops(
        &mut scene,
        "root-ca",
        Some(&data),
        "RootCAUnusable",
        &["does not belong to its private key"],
    )
    .await;
    let words = [
        "is not the root CA that this tenant was made with",
        "status.certificates.rootCAHash",
    ];
    stops(
        &mut scene,
        "root-ca",
        Some(&others["root-ca"]),
        "RootCAReplaced",
        &words,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_account_key_is_never_made_again() {
    let mut scene = Scene::start("up-accounts").await;
    let other = root_of(&scene.scope.provision("two").await);
    let others = scene.scope.secrets(&other).await;
    let own = scene.scope.secrets(&scene.root).await;
    let secret = "serviceaccount-rsa";
    let words = ["does not exist", "end every ServiceAccount token", "Restore it"];
    stops(&mut scene, secret, None, "ServiceAccountKeyLost", &words).await;
    for (key, text) in [
        ("tls.crt", CONFIDENTIAL),
        ("tls.key", CONFIDENTIAL),
        ("tls.crt", &own[secret]["tls.key"]),
    ] {
        let data = with(&own[secret], key, text);
        let words = [format!("key {key}")];
        stops(
            &mut scene,
            secret,
            Some(&data),
            "ServiceAccountKeyUnusable",
            &[&words[0]],
        )
        .await;
    }
    let words = [
        "is not the key that this tenant was made with",
        "status.certificates.serviceAccountKeyHash",
    ];
    stops(
        &mut scene,
        secret,
        Some(&others[secret]),
        "ServiceAccountKeyReplaced",
        &words,
    )
    .await;
}

/// In its last year, once, with the words of what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_root_ca_is_told_a_year_before() {
    let scene = Scene::start("up-old-ca").await;
    let certificates = scene.tenant().await.status.unwrap().certificates.unwrap();
    let end = certificates.root_ca_not_after.unwrap().0;
    let series = format!(
        "vc_manager_tenant_root_ca_not_after_seconds{{namespace=\"up-old-ca\",virtualcluster=\"{ONE}\"}}"
    );
    let problem = "vc_manager_virtualclusters_with_problem{problem=\"root_ca_near_expiry\"}";
    scene.metric_is(&series, &end.as_second().to_string()).await;
    scene.metric_is(problem, "0").await;
    let left = end.duration_since(scene.now());
    scene.pass(left - SignedDuration::from_hours(24 * 366));
    scene.look().await;
    let status = scene.tenant().await.status.unwrap();
    assert!(
        !status
            .conditions
            .iter()
            .any(|told| told.type_.as_deref() == Some("RootCANearsExpiry"))
    );
    let ca = scene.scope.secrets(&scene.root).await.remove("root-ca");

    scene.pass(SignedDuration::from_hours(24 * 2));
    scene.poke(ONE).await;
    let message = scene.says("RootCANearsExpiry", "True", "LastYear").await;
    assert!(message.contains(&end.to_string()), "{message}");
    scene.tells("LastYear", &[&end.to_string()]).await;
    scene.assert_settled().await;
    scene.pass(SignedDuration::from_hours(24 * 30));
    scene.assert_settled().await;
    assert_eq!(scene.told("LastYear").await.len(), 1, "told once");
    scene.metric_is(problem, "1").await;
    assert_eq!(scene.scope.secrets(&scene.root).await.remove("root-ca"), ca);
    scene.says("CertificatesValid", "True", "Valid").await;

    // Leaves end with it, and are not issued over and over for that.
    let left = end.duration_since(scene.now());
    scene.pass(left - SignedDuration::from_hours(24 * 20));
    scene.look().await;
    scene.assert_settled().await;
    // And when it has ended nothing is touched any more.
    scene.pass(SignedDuration::from_hours(24 * 21));
    let before = scene.scope.versions(&scene.root).await;
    scene.poke(ONE).await;
    scene.says("CertificatesValid", "False", "RootCAExpired").await;
    scene.at_rest().await;
    assert_eq!(scene.scope.versions(&scene.root).await, before);
}

impl Scene {
    async fn metric_is(&self, series: &str, value: &str) {
        crate::support::eventually(&format!("{series} to be {value}"), async || {
            (self.manager().metric(series).as_deref() == Some(value)).then_some(())
        })
        .await;
    }
}
