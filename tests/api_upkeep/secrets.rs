//! Leaves that are lost, damaged or swapped are issued again; nothing of a key is ever told.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    ByteString,
    api::{apps::v1::StatefulSet, core::v1::Secret},
    jiff::SignedDuration,
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
};
use serde_json::json;
use vc_manager::{controller::render::Kind, pki::CertificateInfo};

use crate::{
    scene::{LEAVES, ONE, Scene},
    support::{Recorder, condition, eventually, root_of},
};

type Data = BTreeMap<String, String>;

/// What others might put into a key by mistake, and nobody may ever read elsewhere.
const CONFIDENTIAL: &str = "confidential-garbage-0123456789";

impl Scene {
    async fn data(&self, root: &str, secret: &str) -> Data {
        self.scope.secrets(root).await.remove(secret).unwrap_or_default()
    }

    /// `change` damages a leaf, of which this data is the good one; it is issued again, and no other Secret is written.
    async fn reissues(&self, secret: &str, good: &Data, words: &[&str], change: impl AsyncFnOnce()) {
        let before = self.secret_versions().await;
        let told = self.told("CertificatesReissued").await.len();
        change().await;
        let note = eventually(&format!("the Event that {secret} is issued"), async || {
            self.told("CertificatesReissued").await.get(told).cloned()
        })
        .await;
        for word in words.iter().chain([&secret]) {
            assert!(note.contains(word), "{word:?} is not in {note:?}");
        }
        for other in LEAVES.iter().filter(|other| **other != secret) {
            assert!(!note.contains(&format!("{other},")), "{other} is in {note:?}");
        }
        self.at_rest().await;
        let after = self.secret_versions().await;
        let changed: Vec<_> = after
            .iter()
            .filter(|(name, version)| before.get(*name) != Some(version))
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(changed, [secret]);
        assert_ne!(self.data(&self.root, secret).await, *good);
        self.assert_certified().await;
        self.says("CertificatesValid", "True", "Valid").await;
        self.says("Ready", "True", "Running").await;
    }

    async fn secret_versions(&self) -> BTreeMap<String, String> {
        let mut versions = self.scope.versions(&self.root).await;
        versions.retain(|name, _| name.starts_with("Secret/"));
        versions
            .into_iter()
            .map(|(name, version)| (name.trim_start_matches("Secret/").to_owned(), version))
            .collect()
    }
}

/// The lines of every private key in these Secrets, and of their text in base64.
pub(crate) fn key_material(secrets: &BTreeMap<String, Data>) -> Vec<String> {
    let texts = secrets
        .values()
        .flatten()
        .filter_map(|(key, text)| match key.as_str() {
            "tls.crt" => None,
            "tls.key" => Some(text.clone()),
            _ => text
                .lines()
                .find_map(|line| line.trim().strip_prefix("client-key-data: "))
                .map(|data| {
                    let data = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, data);
                    String::from_utf8(data.expect("base64")).expect("PEM")
                }),
        });
    texts
        .flat_map(|pem| {
            pem.lines()
                .filter(|line| line.len() >= 32 && !line.starts_with("-----"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leaf_that_is_deleted_is_issued_again_and_no_other() {
    let scene = Scene::start("up-lost").await;
    for secret in LEAVES {
        let good = scene.data(&scene.root, secret).await;
        let before = scene.generations().await;
        scene
            .reissues(secret, &good, &["it does not exist"], async || {
                scene.delete_secret(secret).await;
            })
            .await;
        let after = scene.generations().await;
        let restarted: Vec<_> = after
            .iter()
            .filter(|(name, generation)| before[*name] != **generation)
            .map(|(name, _)| name.as_str())
            .collect();
        // What the processes serve cannot be seen here: those that hold what was lost are restarted, but never etcd.
        let expected: &[&str] = match secret {
            "apiserver-ca" | "front-proxy-ca" => &["apiserver"],
            "controller-manager-kubeconfig" => &["controller-manager"],
            _ => &[],
        };
        assert_eq!(restarted, expected, "{secret}");
    }
    scene.assert_settled().await;
    for secret in LEAVES {
        let series =
            format!("vc_manager_certificates_issued_total{{reason=\"missing\",secret=\"{secret}\"}}");
        assert_eq!(scene.manager().metric(&series).as_deref(), Some("1"), "{series}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leaf_that_is_damaged_or_swapped_is_issued_again() {
    let scene = Scene::start("up-damaged").await;
    let other = root_of(&scene.scope.provision("two").await);
    scene.at_rest().await;
    let others = scene.scope.secrets(&other).await;
    let mut seen = scene.scope.secrets(&scene.root).await;
    seen.extend(
        others
            .iter()
            .map(|(name, data)| (format!("other {name}"), data.clone())),
    );
    let mut keys = key_material(&seen);
    let entry = |key: &str, text: &str| Data::from([(key.to_owned(), text.to_owned())]);
    let private = others["apiserver-ca"]["tls.key"].clone();
    let certificate = others["apiserver-ca"]["tls.crt"].clone();
    let cases: Vec<(&str, Data, &str)> = vec![
        ("apiserver-ca", entry("tls.crt", CONFIDENTIAL), "key tls.crt"),
        ("etcd-ca", entry("tls.crt", &certificate[..200]), "key tls.crt"),
        ("front-proxy-ca", entry("tls.crt", ""), "key tls.crt"),
        ("apiserver-ca", entry("tls.key", CONFIDENTIAL), "key tls.key"),
        ("apiserver-ca", entry("tls.key", &private), "key tls.key"),
        // A private key in the place of the certificate, and the other way round.
        ("front-proxy-ca", entry("tls.crt", &private), "key tls.crt"),
        ("etcd-ca", entry("tls.key", &certificate), "key tls.key"),
        (
            "admin-kubeconfig",
            entry("admin-kubeconfig", CONFIDENTIAL),
            "key admin-kubeconfig",
        ),
        (
            "admin-kubeconfig",
            entry("admin-kubeconfig", &private),
            "key admin-kubeconfig",
        ),
        (
            "controller-manager-kubeconfig",
            entry("controller-manager-kubeconfig", "apiVersion: v1\nkind: Config\n"),
            "key controller-manager-kubeconfig",
        ),
        ("apiserver-ca", others["apiserver-ca"].clone(), "key tls.crt"),
        ("etcd-ca", others["etcd-ca"].clone(), "key tls.crt"),
        ("front-proxy-ca", others["front-proxy-ca"].clone(), "key tls.crt"),
        (
            "admin-kubeconfig",
            others["admin-kubeconfig"].clone(),
            "key admin-kubeconfig",
        ),
        (
            "controller-manager-kubeconfig",
            others["controller-manager-kubeconfig"].clone(),
            "key controller-manager-kubeconfig",
        ),
    ];
    for (index, (secret, data, words)) in cases.into_iter().enumerate() {
        let good = scene.data(&scene.root, secret).await;
        let meddler = format!("meddler-{index}");
        let by = format!("last written by {meddler}");
        scene
            .reissues(secret, &good, &[words, &by], async || {
                scene.set_data(secret, &meddler, &data).await;
            })
            .await;
        keys.extend(key_material(&scene.scope.secrets(&scene.root).await));
    }
    // One of another leaf of the same tenant: signed by the right root CA, but for other names.
    let own = scene.scope.secrets(&scene.root).await;
    scene
        .reissues("etcd-ca", &own["etcd-ca"], &["names"], async || {
            scene.set_data("etcd-ca", "meddler", &own["apiserver-ca"]).await;
        })
        .await;
    scene.assert_settled().await;
    // The other tenant has nothing to do with it.
    assert_eq!(scene.scope.secrets(&other).await, others);
    assert_eq!(scene.told_of("two", "CertificatesReissued").await, [""; 0]);

    let texts = scene.all_texts().await;
    assert!(keys.len() > 50);
    for text in keys
        .iter()
        .map(String::as_str)
        .chain([CONFIDENTIAL, "-----BEGIN"])
    {
        assert!(!texts.contains(text), "{text} is told");
    }
}

/// After two thirds of their life all are renewed at once, with one Event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaves_are_renewed_in_time() {
    let scene = Scene::start("up-renewal").await;
    let before = scene.scope.secrets(&scene.root).await;
    let status = scene.tenant().await.status.unwrap().certificates.unwrap();
    let due = status.renew_at.unwrap().0;
    let left = due.duration_since(scene.now());
    // A day before, nothing happens.
    scene.pass(left - SignedDuration::from_hours(24));
    scene.assert_settled().await;
    assert_eq!(scene.scope.secrets(&scene.root).await, before);
    // All were issued within seconds of each other; one minute later all are due.
    scene.pass(SignedDuration::from_hours(24) + SignedDuration::from_mins(1));
    scene.look().await;
    scene.assert_certified().await;
    let after = scene.scope.secrets(&scene.root).await;
    for (name, data) in &after {
        assert_eq!(*data != before[name], LEAVES.contains(&name.as_str()), "{name}");
    }
    let told = scene.told("CertificatesRenewed").await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(scene.told("CertificatesReissued").await, [""; 0]);
    let renewed = scene.tenant().await.status.unwrap().certificates.unwrap();
    assert!(renewed.renew_at.unwrap().0.duration_since(due) > SignedDuration::from_hours(24 * 200));
    assert_eq!(renewed.root_ca_hash, status.root_ca_hash);
    let etcd = CertificateInfo::parse(&after["etcd-ca"]["tls.crt"]).unwrap();
    assert!(etcd.not_after > scene.now() + SignedDuration::from_hours(24 * 300));
    scene.says("Ready", "True", "Running").await;
    scene.assert_settled().await;
}

/// Certificates of many tenants may come to their time on one day; only so many restart at once, and all get there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_for_certificates_take_turns() {
    let scene = Scene::of(
        "up-turns",
        crate::scene::content(),
        &["--max-upgrading-tenants=1"],
    )
    .await;
    let names = [ONE, "two", "three", "four"];
    futures::future::join_all(names[1..].iter().map(|name| scene.scope.provision(name))).await;
    scene.at_rest().await;
    let record = Recorder::<StatefulSet>::start(Api::all(scene.scope.client.clone())).await;
    scene.pass(SignedDuration::from_hours(24 * 300));
    futures::future::join_all(names.map(|name| scene.poke(name))).await;
    let prefix = format!("{}-", scene.scope.namespace);
    let restarted = async || {
        let sets = Api::<StatefulSet>::all(scene.scope.client.clone());
        let sets = sets.list(&ListParams::default()).await.unwrap();
        let own = sets
            .iter()
            .filter(|set| set.namespace().unwrap_or_default().starts_with(&prefix));
        let done = own.filter(|set| {
            let status = set.status.clone().unwrap_or_default();
            set.metadata.generation > Some(1)
                && status.observed_generation == set.metadata.generation
                && status.ready_replicas == Some(1)
        });
        (done.count() == 2 * names.len()).then_some(())
    };
    eventually("all of them to be restarted", restarted).await;
    scene.at_rest().await;
    scene.assert_certified().await;

    // Who was restarting at any moment, by the order of the API server's own numbers.
    let mut seen = record.states();
    seen.retain(|set| set.namespace().unwrap_or_default().starts_with(&prefix));
    seen.sort_by_key(|set| set.resource_version().unwrap().parse::<u64>().unwrap());
    let mut unready: BTreeMap<String, BTreeMap<String, bool>> = BTreeMap::new();
    for set in seen {
        let status = set.status.clone().unwrap_or_default();
        let ready = status.observed_generation == set.metadata.generation && status.ready_replicas == Some(1);
        let sets = unready.entry(set.namespace().unwrap()).or_default();
        sets.insert(set.name_any(), ready);
        let restarting = unready
            .values()
            .filter(|sets| sets.values().any(|ready| !ready))
            .count();
        assert!(restarting <= 1, "{unready:?}");
    }
    for name in names {
        scene.says_of(name, "Ready", "True", "Running").await;
        assert_eq!(
            scene.told_of(name, "CertificatesRenewed").await.len(),
            1,
            "{name}"
        );
        assert_eq!(scene.told_of(name, "DriftRepaired").await, [""; 0], "{name}");
    }
}

/// A Secret that cannot be written is told of, and not tried again and again; what else is to be done is done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leaf_that_cannot_be_written_is_told_and_holds_up_nothing_else() {
    let mut scene = Scene::start("up-immutable").await;
    let root = scene.root.clone();
    scene
        .without_manager(async |scene: &Scene| {
            let mut secret: Secret = scene.scope.get(&root, "apiserver-ca").await;
            scene.delete_secret("apiserver-ca").await;
            secret.metadata.resource_version = None;
            secret.metadata.uid = None;
            secret.metadata.managed_fields = None;
            secret.immutable = Some(true);
            let data = secret.data.as_mut().unwrap();
            data.insert("tls.crt".into(), ByteString(CONFIDENTIAL.as_bytes().to_vec()));
            let api = scene.scope.api::<Secret>(&root);
            api.create(&PostParams::default(), &secret).await.unwrap();
            // And things that can be done.
            scene.delete_secret("front-proxy-ca").await;
            scene.delete_secret("admin-kubeconfig").await;
            scene
                .edit(
                    Kind::Service,
                    "etcd",
                    json!({"spec": {"selector": {"component-name": "decoy"}}}),
                )
                .await;
        })
        .await;
    let message = scene.says("CertificatesValid", "False", "CannotIssue").await;
    for words in ["apiserver-ca", "immutable"] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
    scene.tells("CannotIssue", &["apiserver-ca"]).await;
    scene.at_rest().await;
    let mark = scene.manager().traffic.mark();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let mut calls = scene.manager().traffic.since(mark);
    calls.retain(|call| call.verb != "watch");
    assert_eq!(calls, [], "it is not tried over and over");

    let secrets = scene.scope.secrets(&scene.root).await;
    assert!(secrets.contains_key("front-proxy-ca") && secrets.contains_key("admin-kubeconfig"));
    scene.tells("DriftRepaired", &["Service etcd"]).await;
    assert!(!scene.all_texts().await.contains(CONFIDENTIAL));

    // A person removes it: it is issued at once.
    scene.delete_secret("apiserver-ca").await;
    scene.says("CertificatesValid", "True", "Valid").await;
    scene.at_rest().await;
    scene.assert_certified().await;
    assert_eq!(condition(&scene.tenant().await, "Ready").status, "True");
    scene.assert_settled().await;
}
