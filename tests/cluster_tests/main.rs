//! The real binary on a real cluster: a kubelet runs the tenants' etcd, kube-apiserver and kube-controller-manager,
//! and what is asserted is what the tenants themselves answer.
//!
//! One manager serves all scenarios but those that kill it. They run side by side, as far as the manager lets
//! tenants start; each has a namespace of its own. `make test` runs them; with a word as argument only those whose
//! name holds it: `cargo test --test cluster_tests -- restart`.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::panic,
    reason = "a test ends by a panic and tells by printing; clippy knows that only of what libtest runs"
)]

mod adoption;
mod certificates;
mod control_plane;
mod deletion;
mod edits;
mod failures;
mod process;
mod restart;
mod shapes;
mod support;
#[path = "../support/upstream.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with the tests on an API server alone, and not all of it is used here"
)]
mod upstream;
mod webhooks;

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    process::ExitCode,
    time::{Duration, Instant},
};

use futures::{FutureExt as _, future::LocalBoxFuture};
use kube::Client;
use tokio::sync::Semaphore;

use support::{Scene, cluster, manager};

/// Scenarios that run at once. The manager paces the starts of tenants; this bounds what waits beside them.
const AT_ONCE: usize = 5;
/// No scenario takes longer.
const LIMIT: Duration = Duration::from_mins(40);

type Run = fn(Scene) -> LocalBoxFuture<'static, ()>;

/// Those that share a manager, the longest first.
const SHARED: &[(&str, Run)] = &[
    ("main", |scene| control_plane::main(scene).boxed_local()),
    ("crash", |scene| failures::crash(scene).boxed_local()),
    ("flags", |scene| failures::flags(scene).boxed_local()),
    ("members", |scene| shapes::three_members(scene).boxed_local()),
    ("unborn", |scene| {
        deletion::before_it_ever_ran(scene).boxed_local()
    }),
    ("nodeport", |scene| shapes::node_port(scene).boxed_local()),
    ("headless", |scene| {
        shapes::without_controller_manager(scene).boxed_local()
    }),
];

/// The one that looks at the shared manager itself, and ends it.
const PROCESS: (&str, Run) = ("process", |scene| {
    process::looks_after_itself(scene).boxed_local()
});

/// Those that have managers of their own.
const ALONE: &[(&str, Run)] = &[
    ("restart", |scene| {
        restart::killed_in_the_middle(scene).boxed_local()
    }),
    ("adoption", |scene| adoption::taken_over(scene).boxed_local()),
    ("webhooks", |scene| webhooks::survive(scene).boxed_local()),
    ("certificates", |scene| certificates::renewed(scene).boxed_local()),
];

fn main() -> ExitCode {
    // Flags are libtest's; words choose.
    let words: Vec<_> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let chosen = |list: &[(&'static str, Run)]| -> Vec<(&'static str, Run)> {
        let wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
        list.iter().filter(|(name, _)| wanted(name)).copied().collect()
    };
    let (shared, process, alone) = (chosen(SHARED), chosen(&[PROCESS]), chosen(ALONE));
    if std::env::args().any(|word| word == "--list") {
        for (name, _) in shared.iter().chain(&process).chain(&alone) {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    if shared.is_empty() && process.is_empty() && alone.is_empty() {
        return ExitCode::SUCCESS;
    }
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(run(shared, process, alone))
}

async fn run(
    shared: Vec<(&'static str, Run)>,
    process: Vec<(&'static str, Run)>,
    alone: Vec<(&'static str, Run)>,
) -> ExitCode {
    let client = cluster::client().await;
    cluster::install_definitions(&client).await;
    cluster::clear(&client).await;
    cluster::assert_no_manager(&client).await;
    // As an installation does.
    cluster::make_namespace(&client, &format!("{}-system", cluster::PREFIX)).await;
    manager::clear_log();
    let started = Instant::now();
    let mut results = Vec::new();
    if !shared.is_empty() || !process.is_empty() {
        manager::start(&["--leader-election=true"]).await;
        results.extend(side_by_side(&client, shared).await);
        results.extend(side_by_side(&client, process).await);
        manager::kill();
    }
    for scenario in alone {
        results.extend(side_by_side(&client, vec![scenario]).await);
        manager::kill();
    }
    cluster::clear(&client).await;

    println!(
        "\nscenarios on a real cluster, {:.0} s in all:",
        started.elapsed().as_secs_f64()
    );
    for (name, took, failure) in &results {
        let verdict = if failure.is_none() { "ok" } else { "FAILED" };
        println!("  {name:<10} {:>6.1} s  {verdict}", took.as_secs_f64());
    }
    for (name, failure) in results
        .iter()
        .filter_map(|(name, _, failure)| Some((name, failure.as_ref()?)))
    {
        println!("\n{name} FAILED: {failure}");
    }
    if results.iter().all(|(_, _, failure)| failure.is_none()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

type Outcome = (&'static str, Duration, Option<String>);

async fn side_by_side(client: &Client, scenarios: Vec<(&'static str, Run)>) -> Vec<Outcome> {
    let turns = Semaphore::new(AT_ONCE);
    let one = async |(name, run): (&'static str, Run)| {
        let _turn = turns.acquire().await.expect("nobody closes it");
        let started = Instant::now();
        let scene = async { run(Scene::new(client.clone(), name).await).await };
        let guarded = AssertUnwindSafe(tokio::time::timeout(LIMIT, scene))
            .catch_unwind()
            .await;
        let failure = match guarded {
            Ok(Ok(())) => None,
            Ok(Err(_)) => Some(format!("not over after {LIMIT:?}")),
            Err(panic) => Some(words(panic.as_ref())),
        };
        let took = started.elapsed();
        if failure.is_some() {
            let explained = support::explain_all(client, &format!("{}-{name}", cluster::PREFIX)).await;
            println!("{name} FAILED after {:.1} s\n{explained}", took.as_secs_f64());
        }
        (name, took, failure)
    };
    futures::future::join_all(scenarios.into_iter().map(one)).await
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").to_owned()
}
