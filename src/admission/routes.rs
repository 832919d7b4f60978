//! The webhooks over HTTP: a path each, a review in, an answer out.
//!
//! A body that is a review is always answered with 200 and a review, refused or not; anything else gets a status and a
//! line of text.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::{HeaderMap, StatusCode, header};
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::{
    body::{self, Budget, Rejected},
    cluster::Cluster,
    cluster_version,
    configuration::{
        MUTATE_CLUSTER_VERSION, MUTATE_CLUSTER_VERSION_PATH, TIMEOUT, VALIDATE_CLUSTER_VERSION,
        VALIDATE_CLUSTER_VERSION_PATH, VALIDATE_VIRTUAL_CLUSTER, VALIDATE_VIRTUAL_CLUSTER_PATH,
    },
    metrics::AdmissionMetrics,
    review::Review,
    verdict::Verdict,
    virtual_cluster,
};

/// Time for one review, from its head to its answer: all that is waited for on its account has to fit in.
const PATIENCE: Duration = Duration::from_secs(7);
// The way here and back is part of what the API server waits for.
const _: () = assert!(PATIENCE.as_secs() + 2 < TIMEOUT as u64);
/// Longest name that is logged; the longest that an object can have.
const LOGGED: usize = 253;

/// A webhook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Webhook {
    /// Mutates ClusterVersions.
    MutateClusterVersion,
    /// Validates ClusterVersions.
    ValidateClusterVersion,
    /// Validates VirtualClusters.
    ValidateVirtualCluster,
}

impl Webhook {
    /// All of them.
    pub const ALL: [Self; 3] = [
        Self::MutateClusterVersion,
        Self::ValidateClusterVersion,
        Self::ValidateVirtualCluster,
    ];

    /// Path it is served at, as controller-runtime forms it.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::MutateClusterVersion => MUTATE_CLUSTER_VERSION_PATH,
            Self::ValidateClusterVersion => VALIDATE_CLUSTER_VERSION_PATH,
            Self::ValidateVirtualCluster => VALIDATE_VIRTUAL_CLUSTER_PATH,
        }
    }

    /// Name it has in the configurations, and in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MutateClusterVersion => MUTATE_CLUSTER_VERSION,
            Self::ValidateClusterVersion => VALIDATE_CLUSTER_VERSION,
            Self::ValidateVirtualCluster => VALIDATE_VIRTUAL_CLUSTER,
        }
    }

    /// Kind it is asked of, in the group `tenancy.x-k8s.io`.
    const fn kind(self) -> &'static str {
        match self {
            Self::MutateClusterVersion | Self::ValidateClusterVersion => "ClusterVersion",
            Self::ValidateVirtualCluster => "VirtualCluster",
        }
    }
}

/// What the webhooks need.
pub struct Admission {
    cluster: Cluster,
    metrics: AdmissionMetrics,
    budget: Budget,
}

impl Admission {
    /// Webhooks that ask `cluster` and are counted in `metrics`.
    #[must_use]
    pub fn new(cluster: Cluster, metrics: AdmissionMetrics) -> Self {
        Self {
            cluster,
            metrics,
            budget: Budget::default(),
        }
    }

    /// The routes of all webhooks.
    pub fn routes(self) -> Router {
        let admission = Arc::new(self);
        Webhook::ALL.into_iter().fold(Router::new(), |router, webhook| {
            let handler =
                move |State(admission): State<Arc<Self>>, headers: HeaderMap, body: Body| async move {
                    admission.answer(webhook, &headers, body).await
                };
            router.merge(
                Router::new()
                    .route(webhook.path(), post(handler))
                    .with_state(Arc::clone(&admission)),
            )
        })
    }

    async fn answer(&self, webhook: Webhook, headers: &HeaderMap, body: Body) -> Response {
        match self.review(webhook, headers, body).await {
            Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer).into_response(),
            Err((status, text)) => {
                self.metrics.rejected(webhook, status);
                warn!(
                    webhook = webhook.name(),
                    status = status.as_u16(),
                    reason = short(text.trim()),
                    "request is no review"
                );
                (status, text).into_response()
            }
        }
    }

    async fn review(
        &self,
        webhook: Webhook,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Vec<u8>, (StatusCode, String)> {
        if !is_json(headers) {
            body::drain(body).await;
            return Err(text((
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "the content type has to be application/json\n",
            )));
        }
        let deadline = Instant::now() + PATIENCE;
        let body = self.budget.read(body, deadline).await.map_err(text)?;
        let started = Instant::now();
        let review =
            Review::parse(&body.bytes).map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))?;
        let verdict = self.verdict(webhook, &review, deadline).await;
        self.metrics
            .answered(webhook, review.operation, &verdict, started.elapsed());
        log(webhook, &review, &verdict);
        review.answer(&verdict).map_err(|error| {
            error!(%error, "cannot write an answer");
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                "cannot write the answer\n".to_owned(),
            )
        })
    }

    async fn verdict(&self, webhook: Webhook, review: &Review, deadline: Instant) -> Verdict {
        if (review.group.as_str(), review.kind.as_str()) != ("tenancy.x-k8s.io", webhook.kind()) {
            return Verdict::bad_request(format!(
                "{} is asked of {}.tenancy.x-k8s.io only, and not of {}.{}: see the rules of the webhook configuration",
                webhook.name(),
                webhook.kind(),
                short(&review.kind),
                short(&review.group)
            ));
        }
        let cluster = self.cluster.until(deadline);
        match webhook {
            Webhook::MutateClusterVersion => cluster_version::mutate(review),
            Webhook::ValidateClusterVersion => cluster_version::validate(review, cluster).await,
            Webhook::ValidateVirtualCluster => virtual_cluster::validate(review, cluster).await,
        }
    }
}

/// What a stranger sends may be of any length.
fn short(text: &str) -> &str {
    text.char_indices()
        .nth(LOGGED)
        .map_or(text, |(end, _)| &text[..end])
}

fn text((status, text): Rejected) -> (StatusCode, String) {
    (status, text.to_owned())
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    content_type
        .and_then(|value| value.split(';').next())
        .is_some_and(|value| value.trim().eq_ignore_ascii_case("application/json"))
}

/// A refusal is told with who, what and why, but without any value of the object.
fn log(webhook: Webhook, review: &Review, verdict: &Verdict) {
    if let Verdict::Refused { refusal, .. } = verdict {
        info!(
            webhook = webhook.name(),
            operation = review.operation.as_str(),
            kind = short(&review.kind),
            namespace = short(&review.namespace),
            name = short(&review.name),
            user = short(&review.user),
            code = refusal.code,
            reasons = refusal.reasons(),
            "refused"
        );
    }
}
