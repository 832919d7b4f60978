//! Certificates from files, as cert-manager mounts them: bundles are read, never written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use vc_manager::admission::configuration::VALIDATING_CONFIGURATION;

use super::caller::handshake;
use super::scene::Scene;
use super::support::eventually;

/// Lays down a certificate as kubelet updates a Secret volume: a new folder, and a link to it that is swapped.
fn mount(dir: &Path, version: &str) -> String {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, version);
    params.subject_alt_names = vec![SanType::IpAddress("127.0.0.1".parse().unwrap())];
    params.not_after = time::OffsetDateTime::now_utc() + Duration::from_hours(1);
    let certificate = params.self_signed(&key).unwrap().pem();
    fs::create_dir(dir.join(version)).unwrap();
    fs::write(dir.join(version).join("tls.crt"), &certificate).unwrap();
    fs::write(dir.join(version).join("tls.key"), key.serialize_pem()).unwrap();
    symlink(version, dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        let _ = symlink(Path::new("..data").join(name), dir.join(name));
    }
    certificate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_published_bundle() {
    let scene = Scene::with_configurations("files").await;
    let dir = tempfile::tempdir().unwrap();
    let first = mount(dir.path(), "..first");
    let flag = format!("--webhook-cert-dir={}", dir.path().display());
    let mut replica = scene.replica("a", &[&flag]);
    replica
        .says("has no CA certificate in the caBundle of webhook")
        .await;
    handshake(replica.https, first.as_bytes()).await.unwrap();
    assert!(!replica.is_ready("/webhook-certificate").await);

    scene.overwrite_all(&first).await;
    replica.ready().await;
    let second = mount(dir.path(), "..second");
    eventually("the new certificate", async || {
        handshake(replica.https, second.as_bytes()).await.ok()
    })
    .await;
    replica.says("does not verify for 127.0.0.1").await;
    assert!(!replica.is_ready("/webhook-certificate").await);
    // Both, as a rotation would have it.
    scene.overwrite_all(&format!("{second}{first}")).await;
    replica.ready().await;

    let configuration = scene.validating().get(VALIDATING_CONFIGURATION).await.unwrap();
    let managers = configuration.metadata.managed_fields.unwrap();
    assert!(
        managers
            .iter()
            .all(|entry| entry.manager.as_deref() != Some("vc-manager-webhook"))
    );
    assert!(
        scene
            .secrets()
            .list(&kube::api::ListParams::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
}
