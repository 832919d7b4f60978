//! When to look again: as soon as something changed, when it is time, and after an error sooner or later.

use std::time::Duration;

use futures::FutureExt as _;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rand::RngExt as _;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{info, warn};

/// The first pause after an error; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after an error. Short, as whoever has no certificate yet is of no use until it has one.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
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
        // What happened until here is seen by the pass that begins now.
        let _ = woken.notified().now_or_never();
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
        let Some(status) = status(cause) else {
            words.push(cause.to_string());
            continue;
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Notes each pass; fails while it has errors to give.
    struct Work {
        passes: Arc<Mutex<Vec<tokio::time::Instant>>>,
        errors: usize,
        due: Option<Duration>,
    }

    impl Pass for Work {
        async fn pass(&mut self) -> anyhow::Result<Option<Timestamp>> {
            self.passes.lock().unwrap().push(tokio::time::Instant::now());
            if self.errors > 0 {
                self.errors -= 1;
                anyhow::bail!("no");
            }
            Ok(self.due.take().map(|due| Timestamp::now() + due))
        }

        fn failed(&mut self) {}
    }

    async fn passes_of(errors: usize, due: Option<Duration>, wakes: usize) -> usize {
        let passes = Arc::new(Mutex::new(Vec::new()));
        let work = Work {
            passes: Arc::clone(&passes),
            errors,
            due,
        };
        let woken = Notify::new();
        let waking = async {
            for _ in 0..wakes {
                sleep(Duration::from_millis(300)).await;
                woken.notify_one();
                woken.notify_one();
            }
            sleep(Duration::from_millis(400)).await;
        };
        tokio::select! {
            () = run(work, &woken) => {}
            () = waking => {}
        }
        passes.lock().unwrap().len()
    }

    #[tokio::test]
    async fn passes_are_made_when_called_for() {
        assert_eq!(passes_of(0, None, 0).await, 1);
        assert_eq!(passes_of(0, None, 2).await, 3);
        assert_eq!(passes_of(0, Some(Duration::from_millis(200)), 0).await, 2);
        assert_eq!(passes_of(0, Some(Duration::from_hours(1)), 1).await, 2);
        assert_eq!(passes_of(9, None, 0).await, 1, "the pause is longer");
    }

    #[test]
    fn pauses_grow_to_a_limit() {
        let mut pauses = Pauses::default();
        let all: Vec<Duration> = (0..10).map(|_| pauses.next()).collect();
        assert!(all[0] >= FIRST_PAUSE.mul_f64(0.8) && all[0] <= FIRST_PAUSE.mul_f64(1.2));
        assert!(all[2] > all[0] && all[9] <= LONGEST_PAUSE.mul_f64(1.2));
        assert!(all[9] >= LONGEST_PAUSE.mul_f64(0.8));
    }

    #[test]
    fn errors_are_told_once_and_with_advice() {
        let status = kube::core::Status {
            message: "secrets \"x\" is forbidden".into(),
            code: 403,
            ..kube::core::Status::default()
        };
        let error = crate::client::CallError::Api {
            what: "get Secret ns/x".into(),
            source: Box::new(kube::Error::Api(Box::new(status))),
        };
        let told = told(&anyhow::Error::from(error).context("cannot keep the CA"));
        assert_eq!(
            told,
            "cannot keep the CA: get Secret ns/x: secrets \"x\" is forbidden: is the ClusterRole or Role of \
             charts/vc-manager.yaml missing?"
        );
    }
}
