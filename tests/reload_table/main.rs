//! The table of what components read again, held against the programs themselves: each version of Kubernetes that it
//! names, and etcd. See [`vc_manager::controller::reload`].
//!
//! Every file is replaced as the kubelet does it. Until the end of a window that is longer than the minute after
//! which followers of files look again, what the table says is read again must be seen to be in use; what it says is
//! not must then still be the old. After a restart everything must be the new: so each look can tell.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod caller;
mod endpoint;
mod identities;
mod looks;
mod process;
mod scene;
mod volume;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use vc_manager::controller::reload::{ETCD_VERSION, KUBERNETES_VERSIONS, Reloads, Row, TABLE};

use looks::{Look, Seen, look};
use scene::Scene;

/// Longer than the minute after which Kubernetes looks again at a file that it cannot watch.
const WINDOW: Duration = Duration::from_secs(62);
/// How long a look may be repeated that cannot tell.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_read_again_what_the_table_says() {
    let etcd = named("VCM_ETCD");
    is_version(&etcd, &format!("etcd Version: {ETCD_VERSION}."));
    // Side by side, as most of it is waiting.
    let versions = KUBERNETES_VERSIONS
        .iter()
        .zip(["VCM_KUBE_DIR", "VCM_KUBE_NEXT_DIR"])
        .map(async |(version, variable)| {
            let folder = named(variable);
            for program in ["kube-apiserver", "kube-controller-manager"] {
                is_version(&folder.join(program), &format!("Kubernetes v{version}."));
            }
            let found = compare(&folder, &etcd).await.into_iter();
            found
                .map(|fault| format!("{version}: {fault}"))
                .collect::<Vec<_>>()
        });
    let faults = futures::future::join_all(versions).await.concat();
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Where one version does not do as the table says.
async fn compare(kubernetes: &Path, etcd: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    let began = Instant::now();
    let mut scene = Scene::start(kubernetes, etcd).await;
    for row in &TABLE {
        expect(&scene, row, Seen::Old, "at first", &mut faults).await;
    }

    let renewed = Instant::now();
    scene.renew();
    for row in rows(Reloads::Yes) {
        let mut last = look(&scene, row).await;
        while last != Ok(Seen::New) && renewed.elapsed() < WINDOW {
            sleep(Duration::from_millis(100)).await;
            last = look(&scene, row).await;
        }
        eprintln!("{}: {last:?} after {:.1?}", title(row), renewed.elapsed());
        note(row, Seen::New, &last, "renewed", &mut faults);
    }
    sleep(WINDOW.saturating_sub(renewed.elapsed())).await;
    for row in rows(Reloads::No) {
        expect(&scene, row, Seen::Old, "renewed", &mut faults).await;
    }
    scene.check();

    scene.restart().await;
    for row in &TABLE {
        expect(&scene, row, Seen::New, "restarted", &mut faults).await;
    }
    eprintln!("{} took {:.0?}", kubernetes.display(), began.elapsed());
    faults
}

fn rows(reloads: Reloads) -> impl Iterator<Item = &'static Row> {
    TABLE.iter().filter(move |row| row.reloads == reloads)
}

/// Looks until it can be told, and notes what is not as expected.
async fn expect(scene: &Scene, row: &Row, expected: Seen, when: &str, faults: &mut Vec<String>) {
    let began = Instant::now();
    let mut last = look(scene, row).await;
    while last.is_err() && began.elapsed() < PATIENCE {
        sleep(Duration::from_millis(100)).await;
        last = look(scene, row).await;
    }
    if last.is_err() {
        eprintln!("{}", scene.logs());
    }
    note(row, expected, &last, when, faults);
}

fn note(row: &Row, expected: Seen, seen: &Look, when: &str, faults: &mut Vec<String>) {
    if *seen != Ok(expected) {
        faults.push(format!("{when}, {}: {seen:?}, not {expected:?}", title(row)));
    }
}

fn title(row: &Row) -> String {
    format!("{} {}", row.component, row.purpose)
}

fn named(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable).map(PathBuf::from);
    path.filter(|path| path.exists()).unwrap_or_else(|| {
        panic!("{variable} names nothing: this test needs built programs; run `make test`")
    })
}

fn is_version(program: &Path, expected: &str) {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with(expected), "{}: {text}", program.display());
}
