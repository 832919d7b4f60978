//! When to look again: as soon as something changed, when it is time, and after an error sooner or later.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rand::RngExt as _;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{info, warn};

/// The first pause after an error; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after an error.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// How often the wall clock is looked at: timers stand still while a machine is suspended.
const TICK: Duration = Duration::from_secs(30);
/// Between two passes, whatever calls for them.
const BREATH: Duration = Duration::from_millis(100);

/// Pauses after errors that come one after another: jittered, each twice as long as the one before.
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(FIRST_PAUSE)
    }
}

impl Pauses {
    /// The next one.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST_PAUSE);
        pause.mul_f64(rand::rng().random_range(0.8..1.2))
    }
}

/// Something that is kept right by passes. A pass reads what it needs, does what is missing, and can be repeated.
pub(super) trait Pass {
    /// One pass. Says when the next one is due even if nothing changes.
    fn pass(&mut self) -> impl Future<Output = anyhow::Result<Option<Timestamp>>> + Send;

    /// What to do when a pass failed.
    fn failed(&mut self);
}

/// Makes passes for ever: one at once, then whenever woken or due.
pub(super) async fn run(mut work: impl Pass + Send, woken: &Notify) {
    let mut said: Option<String> = None;
    let mut pauses = Pauses::default();
    loop {
        let due = match work.pass().await {
            Ok(due) => {
                if said.take().is_some() {
                    info!("webhook certificates: works again");
                }
                pauses = Pauses::default();
                due
            }
            Err(error) => {
                work.failed();
                let text = told(&error);
                if said.as_ref() != Some(&text) {
                    warn!(error = %text, "webhook certificates: trying again");
                    said = Some(text);
                }
                Timestamp::now().checked_add(pauses.next()).ok()
            }
        };
        tokio::join!(sleep(BREATH), async {
            tokio::select! {
                () = woken.notified() => {}
                () = until(due) => {}
            }
        });
    }
}

/// An error in words, with what to do about it if a right is missing.
pub(super) fn told(error: &anyhow::Error) -> String {
    let mut words: Vec<String> = Vec::new();
    for cause in error.chain() {
        // Its own text has the status once more, as a structure.
        let status = match status(cause) {
            Some(status) => status,
            None => {
                words.push(cause.to_string());
                continue;
            }
        };
        words.push(status.message.clone());
        if status.code == 403 {
            words.push("is the ClusterRole or Role of charts/vc-manager.yaml missing?".to_owned());
        }
        break;
    }
    words.join(": ")
}

/// What the API server answered, if that is the error.
fn status<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a kube::core::Status> {
    let boxed = error.downcast_ref::<Box<kube::Error>>().map(Box::as_ref);
    match boxed.or_else(|| error.downcast_ref::<kube::Error>())? {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// Waits until the wall clock shows `due`, for ever if there is none.
async fn until(due: Option<Timestamp>) {
    let Some(due) = due else {
        return std::future::pending().await;
    };
    loop {
        let left = Timestamp::now().duration_until(due);
        match Duration::try_from(left) {
            Ok(left) if !left.is_zero() => sleep(left.min(TICK)).await,
            _ => return,
        }
    }
}

/// `at` if it is still to come. Whole seconds are over only when the next one has begun.
pub(super) fn after(at: Timestamp, now: Timestamp) -> Option<Timestamp> {
    let over = at.checked_add(SignedDuration::from_secs(1)).ok()?;
    (over > now).then_some(over)
}
