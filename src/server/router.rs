//! What each listener answers.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::StatusCode;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;

use super::health::{self, Readiness};
use super::metrics_endpoint::{self, Access};
use crate::metrics::Metrics;

/// Time for one request, its body included: as long as the API server waits for a webhook at most.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The plain health listener.
pub fn health(readiness: &Readiness) -> Router {
    guarded(health::routes(readiness))
}

/// The plain metrics listener, open to whoever reaches it.
pub fn metrics(metrics: Arc<Metrics>) -> Router {
    guarded(metrics_endpoint::routes(metrics, Access::Open))
}

/// The HTTPS listener: health, metrics for those who have `access`, and the routes of `admission`, which bound the
/// bodies they read themselves; nothing else here reads one.
pub fn https(readiness: &Readiness, metrics: Arc<Metrics>, access: Access, admission: Router) -> Router {
    let own = health::routes(readiness).merge(metrics_endpoint::routes(metrics, access));
    guarded(own.merge(admission))
}

/// A handler that panics answers 500 and one that dawdles 503; neither takes the connection with it.
fn guarded(router: Router) -> Router {
    router
        .layer(TimeoutLayer::with_status_code(
            StatusCode::SERVICE_UNAVAILABLE,
            REQUEST_TIMEOUT,
        ))
        .layer(CatchPanicLayer::new())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use axum::routing::{get, post};
    use tower::ServiceExt as _;

    use super::*;

    async fn status(router: &Router, request: Request) -> u16 {
        router.clone().oneshot(request).await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn https_has_it_all() {
        let admission = Router::new()
            .route("/review", post(|| async {}))
            .route("/panic", get(|| async { panic!("for the test") as String }));
        let metrics = Arc::new(Metrics::new(true).unwrap());
        let router = https(&Readiness::new(), metrics, Access::Open, admission);
        let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
        for (path, expected) in [
            ("/healthz", 200),
            ("/livez", 200),
            ("/readyz", 200),
            ("/metrics", 200),
            ("/", 404),
            ("/panic", 500),
        ] {
            assert_eq!(status(&router, get(path)).await, expected, "{path}");
        }
        let review = Request::post("/review").body(Body::empty()).unwrap();
        assert_eq!(status(&router, review).await, 200);
    }

    #[tokio::test]
    async fn plain_listeners_have_one_concern() {
        let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
        let health = health(&Readiness::new());
        assert_eq!(status(&health, get("/healthz")).await, 200);
        assert_eq!(status(&health, get("/metrics")).await, 404);
        let metrics = metrics(Arc::new(Metrics::new(true).unwrap()));
        assert_eq!(status(&metrics, get("/metrics")).await, 200);
        assert_eq!(status(&metrics, get("/healthz")).await, 404);
    }
}
