//! The manager under test, in this process but in a runtime of its own, so that it can be killed.

use std::{sync::Arc, time::Duration};

use kube::client::ClientBuilder;
use tokio::{runtime::Runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use vc_manager::{
    args::{self, Command},
    controller::{Clock, Setup, run},
    metrics::Metrics,
};

use super::{Cut, Scope, Traffic};

/// How a manager under test runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Flags besides those every test needs.
    pub flags: Vec<String>,
    /// Where it dies.
    pub cut: Cut,
    /// What it takes the time from.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            flags: Vec::new(),
            cut: Cut::Never,
            clock: Clock::system(),
        }
    }
}

impl Options {
    /// With these flags.
    pub fn flags(flags: &[&str]) -> Self {
        Self {
            flags: flags.iter().map(ToString::to_string).collect(),
            ..Self::default()
        }
    }

    /// One that dies at `cut`.
    pub fn cut(cut: Cut) -> Self {
        Self {
            cut,
            ..Self::default()
        }
    }
}

/// A running manager. Dropping it kills it.
pub struct Manager {
    runtime: Option<Runtime>,
    task: JoinHandle<anyhow::Result<()>>,
    stop: CancellationToken,
    /// What it sends.
    pub traffic: Traffic,
    /// What it counts.
    pub metrics: Arc<Metrics>,
}

impl Manager {
    /// Starts one that sees the objects of `scope`.
    pub fn start(scope: &Scope, options: Options) -> Self {
        let mut words: Vec<String> = [
            "--leader-election=false",
            "--feature-gates=ClusterVersionPartialUpgrade=true",
            // There are no tenants to ask.
            "--tenant-probe=false",
            "--max-starting-tenants=20",
        ]
        .map(str::to_owned)
        .into();
        words.push(format!("--namespace={}", scope.manager_namespace()));
        words.extend(options.flags);
        let Ok(Command::Run(config)) = args::parse(words, None) else {
            panic!("flags that run the manager")
        };
        let traffic = Traffic::new(&scope.namespace, &scope.selector(), options.cut);
        let metrics = Arc::new(Metrics::new(true).expect("metrics"));
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("manager")
            .enable_all()
            .build()
            .expect("a runtime");
        let task = {
            let (server, traffic, metrics, stop) =
                (scope.server, traffic.clone(), Arc::clone(&metrics), stop.clone());
            runtime.spawn(async move {
                let mut kube_config = server.config().await;
                kube_config.default_retry = false;
                let client = ClientBuilder::try_from(kube_config)?.with_layer(&traffic).build();
                let outcome = run(
                    Setup {
                        clock: options.clock,
                        client,
                        config: Arc::from(config),
                        metrics,
                    },
                    stop,
                )
                .await;
                if let Err(error) = &outcome {
                    eprintln!("the manager ended: {error:#}");
                }
                outcome
            })
        };
        Self {
            runtime: Some(runtime),
            task,
            stop,
            traffic,
            metrics,
        }
    }

    /// Ends it as `kill -9` would: nothing more is sent, nothing is finished.
    pub fn kill(mut self) {
        self.kill_now();
    }

    /// Ends it as SIGTERM would.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.outcome().await
    }

    /// What `run` returns.
    pub async fn outcome(&mut self) -> anyhow::Result<()> {
        let limit = Duration::from_secs(30);
        let task = &mut self.task;
        tokio::time::timeout(limit, task)
            .await
            .expect("it ends in time")
            .expect("it does not panic")
    }

    /// The value of a series, as `/metrics` shows it: `name{label="value",…}`.
    pub fn metric(&self, series: &str) -> Option<String> {
        let text = String::from_utf8(self.metrics.encode().expect("metrics")).expect("text");
        text.lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ').map(str::to_owned))
    }

    fn kill_now(&mut self) {
        self.traffic.cut_off();
        self.task.abort();
        if let Some(runtime) = self.runtime.take() {
            // The loop has to be gone before the tasks it waits for are: it would complain of them.
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                runtime.shutdown_background();
            });
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.kill_now();
    }
}
