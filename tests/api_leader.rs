//! The program itself, as processes: two replicas and the Lease, and the flags it is started with.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use support::{ApiServer, Driver, PROGRAM, Replica, Scope, eventually, templates};

/// How long a Lease is good for without being renewed.
const LEASE: Duration = Duration::from_secs(15);

/// Replicas are whole programs, which see every tenant of the shared server: one test at a time.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

async fn leads(replica: &Replica) -> bool {
    replica
        .metrics()
        .await
        .lines()
        .any(|line| line == "vc_manager_leader 1")
}

async fn has_worked(replica: &Replica) -> bool {
    replica.metrics().await.contains("vc_manager_reconcile_total{")
}

async fn holder(scope: &Scope) -> Option<String> {
    let lease = scope
        .api::<Lease>("leader")
        .get_opt("vc-manager-leaderelection-lock")
        .await
        .unwrap()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_replicas_works_and_the_other_takes_over() {
    let _alone = ALONE.lock().await;
    let scope = Scope::new("leader").await;
    let _driver = Driver::start(&scope);
    let server = scope.server;
    let mut first = Replica::start(server, "first", &["--namespace=leader"]);
    first.ready().await;
    eventually("the first to lead", async || leads(&first).await.then_some(())).await;
    let mut second = Replica::start(server, "second", &["--namespace=leader"]);
    second.ready().await;
    scope
        .create_cluster_version("leader", templates::full("ClusterIP"))
        .await;
    scope.provision("one").await;
    assert!(has_worked(&first).await && !leads(&second).await && !has_worked(&second).await);
    let of_first = holder(&scope).await.unwrap();

    // A clean end hands the Lease over at once.
    let ended = Instant::now();
    assert!(first.terminate().await.success(), "{}", first.log());
    eventually("the second to lead", async || leads(&second).await.then_some(())).await;
    assert!(
        ended.elapsed() < Duration::from_secs(12),
        "it took {:?}: the Lease was not released",
        ended.elapsed()
    );
    let of_second = holder(&scope).await.unwrap();
    assert_ne!(of_first, of_second);
    scope.edit(|content| templates::verbosity(content, 3)).await;
    scope.upgrade("one").await;
    assert!(has_worked(&second).await);

    // A killed leader cannot: its Lease has to run out, and not before that does another one act.
    let mut third = Replica::start(server, "third", &["--namespace=leader"]);
    third.ready().await;
    second.kill();
    let killed = Instant::now();
    scope.edit(|content| templates::verbosity(content, 4)).await;
    scope.opt_in("one").await;
    eventually("the third to lead", async || leads(&third).await.then_some(())).await;
    let took = killed.elapsed();
    assert!(took > LEASE / 3 && took < LEASE * 2, "it took {took:?}");
    assert_ne!(holder(&scope).await, Some(of_second));
    scope
        .ended_with("one", "TenantControlPlaneUpgradeCompleted")
        .await;
}

/// As in an outage of the API server, which ends with another holder of the Lease: the loop stops, the process does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_loses_the_lease_serves_on_and_stands_again() {
    let _alone = ALONE.lock().await;
    let scope = Scope::new("robbed").await;
    let _driver = Driver::start(&scope);
    let mut replica = Replica::start(scope.server, "robbed", &["--namespace=robbed"]);
    replica.ready().await;
    eventually("it to lead", async || leads(&replica).await.then_some(())).await;
    let intruder = json!({"spec": {"holderIdentity": "intruder", "leaseTransitions": 7,
        "renewTime": k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(Timestamp::now())}});
    scope
        .api::<Lease>("robbed")
        .patch(
            "vc-manager-leaderelection-lock",
            &PatchParams::default(),
            &Patch::Merge(&intruder),
        )
        .await
        .unwrap();
    eventually("it to lead no more", async || {
        (!leads(&replica).await).then_some(())
    })
    .await;
    assert!(!replica.metrics().await.contains("vc_manager_virtualclusters{"));
    // It is as ready as before.
    replica.ready().await;
    eventually("it to lead again", async || leads(&replica).await.then_some(())).await;
    scope
        .create_cluster_version("robbed", templates::full("ClusterIP"))
        .await;
    scope.provision("one").await;
    assert!(replica.terminate().await.success(), "{}", replica.log());
}

/// The very command line for a manager outside its cluster. It watches the whole server, so the tenants of this
/// binary's other tests are not its own: it is given another server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_runs_outside_the_cluster_without_an_election() {
    let _alone = ALONE.lock().await;
    let server = tokio::task::spawn_blocking(|| {
        let server = ApiServer::start();
        server.install(&vc_manager::api::crd::crds());
        server
    })
    .await
    .unwrap();
    let mut replica = Replica::start(&server, "outside", &["-leader-election=false"]);
    replica.ready().await;
    for path in ["/healthz", "/livez"] {
        assert_eq!(Replica::get(replica.health, path).await.unwrap().0, 200, "{path}");
    }
    eventually("the loop to run", async || leads(&replica).await.then_some(())).await;
    assert!(replica.terminate().await.success(), "{}", replica.log());
}

#[test]
fn a_wrong_command_line_is_one_clear_line() {
    for (flags, code, words) in [
        (
            &["--feature-gates=Nope=true"][..],
            1,
            "unrecognized feature-gate key: Nope",
        ),
        (
            &["--feature-gates=ClusterVersionPartialUpgrade=perhaps"],
            2,
            "feature-gates",
        ),
        (&["--provisioner=capi"], 1, "not implemented"),
        (&["--provisioner=aliyun"], 1, "not implemented"),
        (&["--provisioner=other"], 1, "virtualcluster provisioner missing"),
        (&["--no-such-flag"], 2, "no-such-flag"),
        (
            &[
                "--kubeconfig=/nonexistent/kubeconfig",
                "--health-addr=0",
                "--https-addr=0",
            ],
            1,
            "/nonexistent/kubeconfig",
        ),
    ] {
        let output = Command::new(PROGRAM)
            .args(flags)
            .env_remove("KUBECONFIG")
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {said}");
        assert!(said.contains(words), "{flags:?}: {said}");
        if !flags[0].starts_with("--kubeconfig") {
            assert_eq!(said.trim_end().lines().count(), 1, "{flags:?}: {said}");
        }
    }
}

#[test]
fn it_prints_what_it_is_asked_for() {
    let version = Command::new(PROGRAM).arg("-version").output().unwrap();
    assert!(version.status.success());
    assert!(
        String::from_utf8(version.stdout)
            .unwrap()
            .starts_with("VirtualCluster ")
    );
    let definitions = Command::new(PROGRAM).arg("crds").output().unwrap();
    assert!(definitions.status.success());
    assert_eq!(
        String::from_utf8(definitions.stdout).unwrap(),
        vc_manager::api::crds_yaml().unwrap()
    );
}
