//! What a manager sends to its API server: written down, narrowed to its test's objects, and cut off at a given
//! write, as if the process had been killed there.

use std::{
    fmt,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::{Method, Request, Uri};
use kube::client::Body;
use tokio::sync::watch;
use tower::{BoxError, Layer, Service};

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// `get`, `list`, `watch`, `create`, `update`, `patch` or `delete`.
    pub verb: &'static str,
    /// Empty for one about the whole cluster.
    pub namespace: String,
    /// Plural name of the kind.
    pub resource: String,
    /// Empty when it is about the collection.
    pub name: String,
    /// Such as `status`; mostly empty.
    pub subresource: String,
    /// Whether it only asks what would happen.
    pub dry_run: bool,
}

impl Call {
    /// Whether it changes anything of a tenant. Events and the Lease are kept apart.
    pub fn is_write(&self) -> bool {
        matches!(self.verb, "create" | "update" | "patch" | "delete")
            && !self.dry_run
            && !matches!(self.resource.as_str(), "events" | "leases")
    }

    fn of(request: &Request<Body>) -> Self {
        let query = request.uri().query().unwrap_or_default();
        let parts: Vec<_> = request
            .uri()
            .path()
            .split('/')
            .filter(|part| !part.is_empty())
            .collect();
        let rest = match parts.first() {
            Some(&"api") => parts.get(2..),
            Some(&"apis") => parts.get(3..),
            _ => None,
        };
        let mut rest = rest.unwrap_or_default();
        let mut namespace = "";
        if rest.len() > 2 && rest[0] == "namespaces" && !matches!(rest[2], "status" | "finalize") {
            namespace = rest[1];
            rest = &rest[2..];
        }
        let part = |index: usize| (*rest.get(index).unwrap_or(&"")).to_owned();
        let (resource, name, subresource) = (part(0), part(1), part(2));
        let verb = match *request.method() {
            Method::GET
                if query
                    .split('&')
                    .any(|pair| matches!(pair, "watch=true" | "watch=1")) =>
            {
                "watch"
            }
            Method::GET if name.is_empty() => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "other",
        };
        let dry_run = query.split('&').any(|pair| pair == "dryRun=All");
        Self {
            verb,
            namespace: namespace.to_owned(),
            resource,
            name,
            subresource,
            dry_run,
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.verb, self.resource, self.name)?;
        if !self.subresource.is_empty() {
            write!(f, "/{}", self.subresource)?;
        }
        if !self.namespace.is_empty() {
            write!(f, " in {}", self.namespace)?;
        }
        if self.dry_run {
            f.write_str(" (dry run)")
        } else {
            Ok(())
        }
    }
}

/// Where a process dies. Writes are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nowhere.
    Never,
    /// The n-th write is not sent any more.
    Before(usize),
    /// The n-th write is sent, and its answer is lost.
    After(usize),
}

/// The traffic of one manager.
#[derive(Clone)]
pub struct Traffic(Arc<Inner>);

struct Inner {
    cut: Cut,
    namespace: String,
    label: String,
    state: Mutex<State>,
    dead: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    writes: usize,
}

enum Fate {
    Sent,
    AnswerLost,
    Lost,
}

impl Traffic {
    /// Traffic of a manager that is shown the VirtualClusters of `namespace` and the ClusterVersions with `label`.
    pub fn new(namespace: &str, label: &str, cut: Cut) -> Self {
        Self(Arc::new(Inner {
            cut,
            namespace: namespace.to_owned(),
            label: label.to_owned(),
            state: Mutex::default(),
            dead: watch::channel(false).0,
        }))
    }

    /// Everything so far.
    pub fn calls(&self) -> Vec<Call> {
        self.0.state.lock().expect("nobody panicked in it").calls.clone()
    }

    /// Writes so far.
    pub fn writes(&self) -> Vec<Call> {
        let mut calls = self.calls();
        calls.retain(Call::is_write);
        calls
    }

    /// How many requests there were so far; a mark to give to [`Self::since`].
    pub fn mark(&self) -> usize {
        self.0.state.lock().expect("nobody panicked in it").calls.len()
    }

    /// What came after `mark`.
    pub fn since(&self, mark: usize) -> Vec<Call> {
        self.calls().split_off(mark)
    }

    /// From now on every request fails.
    pub fn cut_off(&self) {
        self.0.dead.send_replace(true);
    }

    /// Whether the cut has come.
    pub fn is_cut(&self) -> bool {
        *self.0.dead.borrow()
    }

    /// Returns when the cut has come.
    pub async fn when_cut(&self) {
        let mut dead = self.0.dead.subscribe();
        let _ = dead.wait_for(|dead| *dead).await;
    }

    fn judge(&self, call: Call) -> Fate {
        let mut state = self.0.state.lock().expect("nobody panicked in it");
        if self.is_cut() {
            return Fate::Lost;
        }
        let is_write = call.is_write();
        if is_write {
            state.writes += 1;
        }
        let nth = state.writes;
        let fate = match self.0.cut {
            Cut::Before(n) if is_write && n == nth => Fate::Lost,
            Cut::After(n) if is_write && n == nth => Fate::AnswerLost,
            _ => Fate::Sent,
        };
        if !matches!(fate, Fate::Sent) {
            self.cut_off();
        }
        if !matches!(fate, Fate::Lost) {
            state.calls.push(call);
        }
        fate
    }

    /// Adds the selector that shows a manager only its own test's objects.
    fn narrowed(&self, uri: &Uri) -> Option<Uri> {
        let selector = match uri.path() {
            "/apis/tenancy.x-k8s.io/v1alpha1/virtualclusters" => {
                format!("fieldSelector=metadata.namespace%3D{}", self.0.namespace)
            }
            "/apis/tenancy.x-k8s.io/v1alpha1/clusterversions" => {
                format!("labelSelector={}", self.0.label.replace('=', "%3D"))
            }
            _ => return None,
        };
        let query = uri
            .query()
            .map_or_else(|| selector.clone(), |query| format!("{query}&{selector}"));
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(format!("{}?{query}", uri.path()).parse().expect("a path"));
        Some(Uri::from_parts(parts).expect("a URI"))
    }
}

impl<S> Layer<S> for Traffic {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Observed {
            inner,
            traffic: self.clone(),
        }
    }
}

/// A client's service with [`Traffic`] around it.
pub struct Observed<S> {
    inner: S,
    traffic: Traffic,
}

impl<S> Service<Request<Body>> for Observed<S>
where
    S: Service<Request<Body>, Error = BoxError>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if request.method() == Method::GET
            && let Some(uri) = self.traffic.narrowed(request.uri())
        {
            *request.uri_mut() = uri;
        }
        match self.traffic.judge(Call::of(&request)) {
            Fate::Sent => Box::pin(self.inner.call(request)),
            Fate::AnswerLost => {
                let answer = self.inner.call(request);
                Box::pin(async move {
                    let _ = answer.await;
                    Err("the process is dead: the answer is lost".into())
                })
            }
            Fate::Lost => Box::pin(async { Err("the process is dead: nothing is sent".into()) }),
        }
    }
}
