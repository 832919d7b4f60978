//! `/metrics`, open on the plain listener, guarded over HTTPS.
//!
//! The guard asks the API server who the bearer of the token is (`TokenReview`) and whether it may `get` the path
//! `/metrics` (`SubjectAccessReview`), so that access is a matter of RBAC as with any Kubernetes component. Answers
//! are kept for a short time and in a bounded number, keyed by the token's hash; questions at once are bounded too.
//! Without an answer nobody gets in.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use crate::client::{CallError, deadline};
use crate::metrics::Metrics;

const PATH: &str = "/metrics";
/// How long a yes holds.
const ALLOW_TTL: Duration = Duration::from_mins(1);
/// How long a no holds: short, so that a new RBAC rule is soon felt.
const DENY_TTL: Duration = Duration::from_secs(10);
const MAX_CACHED: usize = 256;
/// Questions to the API server at once.
const MAX_ASKING: usize = 8;
/// Longer than any token a cluster issues.
const MAX_TOKEN: usize = 16 * 1024;

/// Who may read `/metrics`.
#[derive(Clone)]
pub enum Access {
    /// Whoever reaches the listener.
    Open,
    /// Whoever the API server allows.
    Authorized(Arc<Authorizer>),
}

/// The API server's answer about a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// May read.
    Allowed,
    /// Is no valid token.
    Unauthenticated,
    /// Is someone's, who may not read.
    Forbidden,
}

impl Verdict {
    const fn ttl(self) -> Duration {
        match self {
            Self::Allowed => ALLOW_TTL,
            Self::Unauthenticated | Self::Forbidden => DENY_TTL,
        }
    }
}

/// Asks the API server about tokens, and remembers the answers.
pub struct Authorizer {
    client: kube::Client,
    limit: Duration,
    asking: Semaphore,
    /// Answers by hash of the token, and when they were given.
    answers: Mutex<HashMap<[u8; 32], (Verdict, Instant)>>,
}

impl Authorizer {
    /// Asks through `client`, for at most `limit` per call.
    #[must_use]
    pub fn new(client: kube::Client, limit: Duration) -> Self {
        Self {
            client,
            limit,
            asking: Semaphore::new(MAX_ASKING),
            answers: Mutex::default(),
        }
    }

    /// Whether the bearer of `token` may read.
    pub async fn check(&self, token: &str) -> Result<Verdict, CallError> {
        let key: [u8; 32] = Sha256::digest(token).into();
        if let Some(verdict) = self.cached(&key, Instant::now()) {
            return Ok(verdict);
        }
        // The semaphore is never closed; without a permit the question would merely be asked unbounded.
        let _permit = self.asking.acquire().await.ok();
        // Another request with this token may have asked meanwhile.
        if let Some(verdict) = self.cached(&key, Instant::now()) {
            return Ok(verdict);
        }
        let verdict = self.ask(token).await?;
        self.remember(key, verdict, Instant::now());
        Ok(verdict)
    }

    fn cached(&self, key: &[u8; 32], now: Instant) -> Option<Verdict> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (verdict, given) = answers.get(key)?;
        (now.saturating_duration_since(*given) < verdict.ttl()).then_some(*verdict)
    }

    fn remember(&self, key: [u8; 32], verdict: Verdict, now: Instant) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.len() >= MAX_CACHED {
            answers.retain(|_, (verdict, given)| now.saturating_duration_since(*given) < verdict.ttl());
        }
        if answers.len() >= MAX_CACHED {
            // Refusals go first, so that guessing at tokens cannot push out those in use.
            let worth = |(verdict, given): &(Verdict, Instant)| (*verdict == Verdict::Allowed, *given);
            let least = answers
                .iter()
                .min_by_key(|(_, answer)| worth(answer))
                .map(|(key, _)| *key);
            if let Some(least) = least {
                answers.remove(&least);
            }
        }
        answers.insert(key, (verdict, now));
    }

    async fn ask(&self, token: &str) -> Result<Verdict, CallError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let parameters = PostParams::default();
        let review = deadline(
            self.limit,
            "create TokenReview",
            reviews.create(&parameters, &review),
        )
        .await?;
        let status = review.status.unwrap_or_default();
        let user = status.user.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(Verdict::Unauthenticated);
        }
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username.clone(),
                uid: user.uid,
                groups: user.groups,
                extra: user.extra,
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some(PATH.to_owned()),
                    verb: Some("get".to_owned()),
                }),
                resource_attributes: None,
            },
            ..SubjectAccessReview::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = deadline(
            self.limit,
            "create SubjectAccessReview",
            reviews.create(&parameters, &review),
        )
        .await?;
        if review
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true))
        {
            return Ok(Verdict::Allowed);
        }
        debug!(user = user.username, "not allowed to read metrics");
        Ok(Verdict::Forbidden)
    }
}

/// The route of `/metrics`.
pub fn routes(metrics: Arc<Metrics>, access: Access) -> Router {
    Router::new()
        .route(PATH, get(serve))
        .with_state((metrics, access))
}

async fn serve(State((metrics, access)): State<(Arc<Metrics>, Access)>, headers: HeaderMap) -> Response {
    if let Access::Authorized(authorizer) = &access {
        let verdict = match bearer_token(&headers) {
            Some(token) => authorizer.check(token).await,
            None => Ok(Verdict::Unauthenticated),
        };
        match verdict {
            Ok(Verdict::Allowed) => {}
            Ok(Verdict::Unauthenticated) => {
                let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
                return (StatusCode::UNAUTHORIZED, challenge, "Unauthorized\n").into_response();
            }
            Ok(Verdict::Forbidden) => return (StatusCode::FORBIDDEN, "Forbidden\n").into_response(),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot find out who may read metrics");
                return (StatusCode::SERVICE_UNAVAILABLE, "Authorization is unavailable\n").into_response();
            }
        }
    }
    match metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, Metrics::content_type())], text).into_response(),
        Err(error) => {
            warn!(%error, "cannot encode metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// The token of an `Authorization: Bearer` header.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= MAX_TOKEN).then_some(token)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::{Body, to_bytes};
    use serde_json::{Value, json};
    use tower::ServiceExt as _;

    use super::*;

    /// A client of an API server that knows the tokens `reader` and `nobody`, and fails for `broken`.
    fn authorizer(asked: Arc<AtomicUsize>) -> Arc<Authorizer> {
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let asked = Arc::clone(&asked);
            async move {
                asked.fetch_add(1, Ordering::Relaxed);
                let path = request.uri().path().to_owned();
                let body: Value =
                    serde_json::from_slice(&request.into_body().collect_bytes().await?).unwrap();
                let status = match path.as_str() {
                    "/apis/authentication.k8s.io/v1/tokenreviews" => {
                        match body["spec"]["token"].as_str().unwrap() {
                            "broken" => {
                                return Ok(http::Response::builder()
                                    .status(500)
                                    .body(Body::empty())
                                    .unwrap());
                            }
                            user @ ("reader" | "nobody") => {
                                json!({"authenticated": true, "user": {"username": user, "groups": ["g"], "extra": {"k": ["v"]}}})
                            }
                            _ => json!({"error": "invalid token"}),
                        }
                    }
                    "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                        let spec = &body["spec"];
                        assert_eq!(
                            spec["nonResourceAttributes"],
                            json!({"path": "/metrics", "verb": "get"})
                        );
                        assert_eq!(spec["groups"], json!(["g"]));
                        assert_eq!(spec["extra"], json!({"k": ["v"]}));
                        json!({"allowed": spec["user"] == "reader"})
                    }
                    other => panic!("{other}"),
                };
                let answer = json!({"metadata": {}, "spec": {}, "status": status}).to_string();
                Ok::<_, tower::BoxError>(http::Response::new(Body::from(answer)))
            }
        });
        Arc::new(Authorizer::new(
            kube::Client::new(service, "default"),
            Duration::from_secs(5),
        ))
    }

    async fn get(router: &Router, authorization: Option<&str>) -> (u16, String) {
        let mut request = http::Request::get("/metrics");
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let response = router
            .clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn guarded_by_the_api_server() {
        let asked = Arc::new(AtomicUsize::new(0));
        let access = Access::Authorized(authorizer(Arc::clone(&asked)));
        let router = routes(Arc::new(Metrics::new(true).unwrap()), access);
        for none in [
            None,
            Some("Basic reader"),
            Some("Bearer "),
            Some("Bearer"),
            Some("reader"),
        ] {
            assert_eq!(get(&router, none).await.0, 401, "{none:?}");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0);
        for _ in 0..3 {
            assert_eq!(get(&router, Some("Bearer unknown")).await.0, 401);
            assert_eq!(get(&router, Some("Bearer nobody")).await.0, 403);
            let (status, text) = get(&router, Some("bearer reader")).await;
            assert_eq!(status, 200);
            assert!(text.contains("vc_manager_build_info"));
        }
        // One question for the unknown token, two for each known one.
        assert_eq!(asked.load(Ordering::Relaxed), 5);
        // Failures are not remembered.
        for _ in 0..2 {
            assert_eq!(get(&router, Some("Bearer broken")).await.0, 503);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 7);
    }

    #[tokio::test]
    async fn open() {
        let router = routes(Arc::new(Metrics::new(true).unwrap()), Access::Open);
        assert_eq!(get(&router, None).await.0, 200);
    }

    #[tokio::test]
    async fn answers_expire_and_are_bounded() {
        let authorizer = authorizer(Arc::default());
        let start = Instant::now();
        authorizer.remember([1; 32], Verdict::Allowed, start);
        authorizer.remember([2; 32], Verdict::Forbidden, start);
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(authorizer.cached(&[2; 32], after(9)), Some(Verdict::Forbidden));
        assert_eq!(authorizer.cached(&[2; 32], after(10)), None);
        assert_eq!(authorizer.cached(&[1; 32], after(59)), Some(Verdict::Allowed));
        assert_eq!(authorizer.cached(&[1; 32], after(60)), None);
        for n in 0..1000_u32 {
            let mut key = [3; 32];
            key[..4].copy_from_slice(&n.to_be_bytes());
            authorizer.remember(key, Verdict::Unauthenticated, start);
        }
        assert_eq!(authorizer.answers.lock().unwrap().len(), MAX_CACHED);
        assert_eq!(authorizer.cached(&[1; 32], start), Some(Verdict::Allowed));
    }
}
