//! The process itself, after all it has done for the other scenarios.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;

use crate::support::{Scene, cluster::PREFIX, manager};

/// What a debug build may have resident. The limit of the release build is checked where that is measured.
const MEMORY_KIB: u64 = 60 * 1024;
/// Less than the 30 s that a pod has to end.
const END: Duration = Duration::from_secs(20);

pub(crate) async fn looks_after_itself(scene: Scene) {
    for path in ["/healthz", "/readyz", "/livez"] {
        assert_eq!(manager::health(path).0, 200, "{path}");
    }
    let (status, text) = manager::metrics("/metrics");
    assert_eq!(status, 200);
    for line in [
        "# TYPE clusters_upgraded counter",
        "# TYPE clusters_upgrade_failed counter",
        "vc_manager_leader 1",
    ] {
        assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
    }
    let leases: Api<Lease> = Api::namespaced(scene.client.clone(), &format!("{PREFIX}-system"));
    let holder = async || {
        let lease = leases
            .get("vc-manager-leaderelection-lock")
            .await
            .expect("the Lease");
        lease
            .spec
            .and_then(|spec| spec.holder_identity)
            .unwrap_or_default()
    };
    assert!(!holder().await.is_empty(), "it holds the Lease");

    let peak = manager::peak_memory();
    scene.say(format!("peak of memory {:.1} MiB", peak_in_mib(peak)));
    assert!(
        peak < MEMORY_KIB,
        "{peak} KiB were resident, more than {MEMORY_KIB}"
    );

    let (status, took) = tokio::task::spawn_blocking(manager::terminate)
        .await
        .expect("it ends");
    scene.say(format!("ended after {:.1} s", took.as_secs_f64()));
    assert!(status.success(), "SIGTERM is no failure: {status}");
    assert!(took < END, "it took {took:?}");
    assert_eq!(holder().await, "", "the Lease is handed back");
}

fn peak_in_mib(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}
