//! Asks a tenant's API all the time, as its clients do, and tells when it did not answer.

use std::time::{Duration, Instant};

use http::Request;
use kube::{Client, Config};
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
};

/// How often it is asked, each time over a new connection.
const PERIOD: Duration = Duration::from_millis(100);
/// How long an answer may take. On a machine where every core is busy a slow one is no outage: a server that is not
/// there refuses the connection, or does not take it in the much shorter time that the configuration allows.
const LIMIT: Duration = Duration::from_secs(10);

/// A client that asks and asks.
pub(crate) struct Prober {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Outages>,
}

/// What a [`Prober`] has seen.
#[derive(Debug, Default)]
pub(crate) struct Outages {
    /// Requests made.
    pub(crate) asked: usize,
    /// From the first request that was not answered to the next one that was.
    pub(crate) spans: Vec<Duration>,
    /// Why the first of each of them was not answered.
    pub(crate) reasons: Vec<String>,
}

impl Outages {
    /// The longest one.
    pub(crate) fn longest(&self) -> Duration {
        self.spans.iter().max().copied().unwrap_or_default()
    }
}

impl Prober {
    /// Starts asking the tenant that `config` leads to, with the credentials in it.
    pub(crate) fn start(config: Config) -> Self {
        // Nobody says anything else.
        Self::follow(watch::channel(config).1)
    }

    /// Starts asking the tenant that the present value of `config` leads to.
    pub(crate) fn follow(config: watch::Receiver<Config>) -> Self {
        let (stop, stopped) = oneshot::channel();
        Self {
            stop,
            task: tokio::spawn(probe(config, stopped)),
        }
    }

    /// Stops asking.
    pub(crate) async fn stop(self) -> Outages {
        let _ = self.stop.send(());
        self.task.await.expect("the prober does not panic")
    }
}

async fn probe(config: watch::Receiver<Config>, mut stopped: oneshot::Receiver<()>) -> Outages {
    let mut outages = Outages::default();
    let mut since: Option<Instant> = None;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = &mut stopped => break,
        }
        let asked = Instant::now();
        outages.asked += 1;
        let present = config.borrow().clone();
        match (ask(present).await, since) {
            (Ok(()), Some(start)) => {
                outages.spans.push(start.elapsed());
                since = None;
            }
            (Err(why), None) => {
                outages.reasons.push(why);
                since = Some(asked);
            }
            _ => {}
        }
    }
    outages.spans.extend(since.map(|start| start.elapsed()));
    outages
}

/// A request that only its administrator's certificate is allowed.
async fn ask(config: Config) -> Result<(), String> {
    let client = Client::try_from(config).map_err(|error| error.to_string())?;
    let request = Request::get("/api/v1/namespaces/kube-system")
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    match tokio::time::timeout(LIMIT, client.request_text(request)).await {
        Ok(answer) => answer.map(|_| ()).map_err(|error| format!("{error:?}")),
        Err(_) => Err(format!("no answer within {LIMIT:?}")),
    }
}
