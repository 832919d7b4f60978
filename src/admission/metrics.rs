//! What is counted of reviews. All labels have few values, whatever is sent.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

use super::{review::Operation, routes::Webhook, verdict::Verdict};

/// Seconds, from a review that needs nothing to one that asks the API server to the end of its patience.
const BUCKETS: [f64; 10] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5, 10.0];

/// The metrics of admission.
#[derive(Clone, Debug)]
pub struct AdmissionMetrics {
    reviews: IntCounterVec,
    seconds: HistogramVec,
    rejected: IntCounterVec,
}

impl AdmissionMetrics {
    /// Registers the families with `registry`; fails if they are there already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            reviews: IntCounterVec::new(
                Opts::new(
                    "vc_manager_admission_reviews_total",
                    "Reviews that were answered, by webhook, operation and result",
                ),
                &["webhook", "operation", "result"],
            )?,
            seconds: HistogramVec::new(
                HistogramOpts::new(
                    "vc_manager_admission_review_seconds",
                    "Time from the end of a review's body to its answer",
                )
                .buckets(BUCKETS.to_vec()),
                &["webhook"],
            )?,
            rejected: IntCounterVec::new(
                Opts::new(
                    "vc_manager_admission_rejected_requests_total",
                    "Requests to a webhook that were no reviews or found no room, by HTTP status",
                ),
                &["webhook", "code"],
            )?,
        };
        registry.register(Box::new(metrics.reviews.clone()))?;
        registry.register(Box::new(metrics.seconds.clone()))?;
        registry.register(Box::new(metrics.rejected.clone()))?;
        Ok(metrics)
    }

    /// Notes an answer.
    pub(super) fn answered(&self, webhook: Webhook, operation: Operation, verdict: &Verdict, took: Duration) {
        let result = match verdict {
            Verdict::Allowed { patch, .. } if patch.is_empty() => "allowed",
            Verdict::Allowed { .. } => "changed",
            Verdict::Refused { refusal, .. } if refusal.code == 503 => "undecided",
            Verdict::Refused { .. } => "refused",
        };
        self.reviews
            .with_label_values(&[webhook.name(), operation.as_str(), result])
            .inc();
        self.seconds
            .with_label_values(&[webhook.name()])
            .observe(took.as_secs_f64());
    }

    /// Notes a request that is no review.
    pub(super) fn rejected(&self, webhook: Webhook, status: http::StatusCode) {
        self.rejected
            .with_label_values(&[webhook.name(), status.as_str()])
            .inc();
    }
}
