//! `/healthz`, `/livez` and `/readyz`, with the texts of a Kubernetes component.
//!
//! Liveness asks only whether this process still answers; it must not depend on the API server, or an outage there
//! would restart every replica. Readiness is the state of named latches, which whoever is responsible sets. No latch
//! depends on holding the Lease: a standby serves webhooks just as well.

use std::fmt::Write as _;
use std::sync::{Arc, PoisonError, RwLock};

use axum::Router;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};

/// What `/readyz` asks. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<RwLock<Vec<(&'static str, bool)>>>);

/// One named condition of readiness; not fulfilled until set.
#[derive(Clone, Debug)]
pub struct Latch {
    readiness: Readiness,
    name: &'static str,
}

impl Readiness {
    /// Nothing but the process itself to wait for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The latch of this name, made if need be. From here on the process is ready only while it is set.
    #[must_use]
    pub fn latch(&self, name: &'static str) -> Latch {
        let mut checks = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !checks.iter().any(|(known, _)| *known == name) {
            checks.push((name, false));
        }
        Latch {
            readiness: self.clone(),
            name,
        }
    }

    /// Makes the process unready for good: endpoints are to stop sending requests here.
    pub fn begin_shutdown(&self) {
        self.latch("shutdown").set(false);
    }

    /// Whether every latch is set.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.checks().iter().all(|(_, ok)| *ok)
    }

    fn checks(&self) -> Vec<(&'static str, bool)> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Latch {
    /// Sets or resets the latch.
    pub fn set(&self, fulfilled: bool) {
        let mut checks = self.readiness.0.write().unwrap_or_else(PoisonError::into_inner);
        for (name, ok) in checks.iter_mut() {
            if *name == self.name {
                *ok = fulfilled;
            }
        }
    }
}

/// The three endpoints, each with its checks below it, as in `/readyz/ping`.
pub fn routes(readiness: &Readiness) -> Router {
    let mut router = Router::new();
    for endpoint in [Endpoint::Healthz, Endpoint::Livez, Endpoint::Readyz] {
        let state = Health {
            endpoint,
            readiness: readiness.clone(),
        };
        let endpoint = Router::new()
            .route(endpoint.path(), get(all))
            .route(&format!("{}/{{check}}", endpoint.path()), get(one))
            .with_state(state);
        router = router.merge(endpoint);
    }
    router
}

#[derive(Clone, Copy, Debug)]
enum Endpoint {
    Healthz,
    Livez,
    Readyz,
}

impl Endpoint {
    const fn path(self) -> &'static str {
        match self {
            Self::Healthz => "/healthz",
            Self::Livez => "/livez",
            Self::Readyz => "/readyz",
        }
    }
}

#[derive(Clone)]
struct Health {
    endpoint: Endpoint,
    readiness: Readiness,
}

impl Health {
    fn checks(&self) -> Vec<(&'static str, bool)> {
        let mut checks = vec![("ping", true)];
        if matches!(self.endpoint, Endpoint::Readyz) {
            checks.extend(self.readiness.checks());
        }
        checks
    }
}

async fn all(State(health): State<Health>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let parameter = |name: &str| {
        let name = name.to_owned();
        query.split('&').filter_map(move |pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then_some(value)
        })
    };
    let verbose = parameter("verbose").next().is_some();
    let excluded: Vec<&str> = parameter("exclude").collect();
    answer(health.endpoint, &health.checks(), verbose, &excluded)
}

async fn one(State(health): State<Health>, Path(name): Path<String>) -> Response {
    match health.checks().iter().find(|(check, _)| *check == name) {
        Some((_, true)) => text(StatusCode::OK, "ok".to_owned()),
        Some((_, false)) => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("{name} not fulfilled\n"),
        ),
        None => text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()),
    }
}

fn answer(endpoint: Endpoint, checks: &[(&str, bool)], verbose: bool, excluded: &[&str]) -> Response {
    let mut report = String::new();
    let mut passed = true;
    for (name, ok) in checks {
        // Writing to a String cannot fail.
        let _ = if excluded.contains(name) {
            writeln!(report, "[+]{name} excluded: ok")
        } else if *ok {
            writeln!(report, "[+]{name} ok")
        } else {
            passed = false;
            writeln!(report, "[-]{name} failed: not fulfilled")
        };
    }
    let endpoint = endpoint.path().trim_start_matches('/');
    match (passed, verbose) {
        (true, false) => text(StatusCode::OK, "ok".to_owned()),
        (true, true) => text(StatusCode::OK, format!("{report}{endpoint} check passed\n")),
        (false, _) => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("{report}{endpoint} check failed\n"),
        ),
    }
}

fn text(status: StatusCode, body: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache, private"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (status, headers, body).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use tower::ServiceExt as _;

    use super::*;

    async fn get(readiness: &Readiness, uri: &str) -> (u16, String) {
        let request = http::Request::get(uri).body(Body::empty()).unwrap();
        let response = routes(readiness).oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 4096).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    fn ok(text: &str) -> (u16, String) {
        (200, text.to_owned())
    }

    #[tokio::test]
    async fn liveness_is_independent_of_readiness() {
        let readiness = Readiness::new();
        let _ = readiness.latch("certificate");
        for path in ["/healthz", "/livez", "/livez/ping", "/healthz?x=y"] {
            assert_eq!(get(&readiness, path).await, ok("ok"), "{path}");
        }
        assert_eq!(
            get(&readiness, "/livez?verbose").await,
            ok("[+]ping ok\nlivez check passed\n")
        );
        assert_eq!(get(&readiness, "/healthz/certificate").await.0, 404);
    }

    #[tokio::test]
    async fn readiness_is_all_latches() {
        let readiness = Readiness::new();
        let (certificate, caches) = (readiness.latch("certificate"), readiness.latch("caches"));
        certificate.set(true);
        assert!(!readiness.is_ready());
        let report = "[+]ping ok\n[+]certificate ok\n[-]caches failed: not fulfilled\nreadyz check failed\n";
        assert_eq!(get(&readiness, "/readyz").await, (500, report.to_owned()));
        assert_eq!(get(&readiness, "/readyz?exclude=caches").await, ok("ok"));
        assert_eq!(
            get(&readiness, "/readyz?verbose=true&exclude=caches").await,
            ok("[+]ping ok\n[+]certificate ok\n[+]caches excluded: ok\nreadyz check passed\n")
        );
        assert_eq!(get(&readiness, "/readyz/certificate").await, ok("ok"));
        assert_eq!(get(&readiness, "/readyz/caches").await.0, 500);
        assert_eq!(get(&readiness, "/readyz/none").await.0, 404);
        caches.set(true);
        // The same latch, not a new one.
        let _ = readiness.latch("caches");
        assert_eq!(get(&readiness, "/readyz").await, ok("ok"));
        readiness.begin_shutdown();
        assert!(!readiness.is_ready());
        assert_eq!(get(&readiness, "/readyz").await.0, 500);
        assert_eq!(get(&readiness, "/livez").await, ok("ok"));
    }
}
