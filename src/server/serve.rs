//! The accept loop of one listener, plain or TLS.
//!
//! Invariants: a connection holds one of a fixed number of permits from before it is accepted until it is closed, and
//! each of its phases ends by a timer at the latest: TLS handshake, request head, idleness, drain. A peer can thus
//! neither exhaust the process nor hold up its end.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::{ServiceExt as _, service_fn};
use tracing::{Instrument as _, debug, debug_span, info, warn};

use super::tls::ALPN_HTTP2;

/// What a listener allows its peers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections open at once; further ones wait in the kernel's backlog.
    pub connections: usize,
    /// Time for the TLS handshake.
    pub handshake: Duration,
    /// Time for the head of a request, and for the first request on a connection.
    pub request_head: Duration,
    /// Time without a request after which a connection is closed.
    pub idle: Duration,
    /// Time between HTTP/2 pings.
    pub http2_ping: Duration,
    /// Time for the answer to an HTTP/2 ping.
    pub http2_ping_timeout: Duration,
    /// Pause after the system refused a new connection for want of resources.
    pub accept_pause: Duration,
    /// Time for what is in flight at shutdown.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            handshake: Duration::from_secs(10),
            request_head: Duration::from_secs(10),
            idle: Duration::from_mins(3),
            http2_ping: Duration::from_secs(30),
            http2_ping_timeout: Duration::from_secs(20),
            accept_pause: Duration::from_millis(500),
            drain: Duration::from_secs(10),
        }
    }
}

/// Time for the first request on a connection once the listener is to stop.
const FIRST_REQUEST_AT_SHUTDOWN: Duration = Duration::from_millis(500);

/// How the end of a listener went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every connection came to its own end.
    Clean,
    /// So many connections were cut when the time was up.
    Cut(usize),
}

/// Serves `router` on `listener` until `stop` is cancelled, then drains. With `tls` the listener speaks TLS, and
/// HTTP/2 or HTTP/1.1 as negotiated; without, HTTP/1.1.
pub async fn serve(
    name: &'static str,
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) -> Drained {
    let local = listener.local_addr().ok().map(tracing::field::display);
    info!(listener = name, address = local, tls = tls.is_some(), "listening");
    let permits = Arc::new(Semaphore::new(limits.connections));
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    let peer = Arc::new(Peer {
        tls: tls.map(TlsAcceptor::from),
        router,
        limits,
        stop: stop.clone(),
        cut: cut.clone(),
    });
    while let Some((stream, address, permit)) = accept(name, &listener, &permits, &peer).await {
        let peer = Arc::clone(&peer);
        let span = debug_span!("connection", listener = name, peer = %address);
        connections.spawn(async move { peer.handle(stream, permit).await }.instrument(span));
    }
    // New connections are refused from here on.
    drop(listener);
    connections.close();
    let open = connections.len();
    debug!(listener = name, connections = open, "draining");
    if timeout(limits.drain, connections.wait()).await.is_ok() {
        info!(listener = name, "stopped");
        return Drained::Clean;
    }
    let left = connections.len();
    warn!(
        listener = name,
        connections = left,
        "drain took too long, cutting connections"
    );
    cut.cancel();
    connections.wait().await;
    Drained::Cut(left)
}

/// The next connection, or `None` once the listener is to stop.
async fn accept(
    name: &str,
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    peer: &Peer,
) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    loop {
        // The permit comes first: a connection that cannot be served must not be accepted.
        let next = async {
            let permit = Arc::clone(permits).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            biased;
            () = peer.stop.cancelled() => return None,
            next = next => next,
        };
        // The semaphore is never closed.
        let permit = permit.ok()?;
        match accepted {
            Ok((stream, address)) => return Some((stream, address, permit)),
            // The peer was gone before it could be accepted; says nothing of us.
            Err(error) if is_peer_error(&error) => {
                debug!(listener = name, %error, "connection lost before accept");
            }
            Err(error) => {
                // Out of descriptors or memory. Without a pause this loop would spin until there are some.
                warn!(listener = name, %error, "cannot accept connections");
                tokio::select! {
                    () = peer.stop.cancelled() => return None,
                    () = sleep(peer.limits.accept_pause) => {}
                }
            }
        }
    }
}

fn is_peer_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// What every connection of a listener needs.
struct Peer {
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Limits,
    /// Finish what is in flight.
    stop: CancellationToken,
    /// Give up at once.
    cut: CancellationToken,
}

impl Peer {
    /// Serves one connection to its end.
    async fn handle(&self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        let _permit = permit;
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let Some(tls) = &self.tls else {
            return self.serve(stream, false).await;
        };
        let handshake = timeout(self.limits.handshake, tls.accept(stream));
        let accepted = tokio::select! {
            () = self.stop.cancelled() => return,
            accepted = handshake => accepted,
        };
        match accepted {
            Ok(Ok(stream)) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP2);
                // Boxed: the TLS state is large and would otherwise be part of every plain connection's future too.
                Box::pin(self.serve(stream, http2)).await;
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
            Err(_) => debug!("TLS handshake took too long"),
        }
    }

    async fn serve<S>(&self, stream: S, http2: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Arc::new(Activity::default());
        let service = {
            let (router, activity) = (self.router.clone(), Arc::clone(&activity));
            service_fn(move |request: Request<Incoming>| {
                let guard = activity.begin();
                let response = router.clone().oneshot(request);
                async move {
                    let _guard = guard;
                    response.await
                }
            })
        };
        let builder = self.builder(http2);
        let mut connection =
            pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)));
        // hyper's own timers cover neither a peer that negotiates HTTP/2 and then stays silent nor one that answers
        // pings for ever without asking for anything.
        let first = Instant::now() + self.limits.request_head;
        let mut check = interval_at(first, self.limits.idle);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut seen, mut closing) = (0, false);
        loop {
            tokio::select! {
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        debug!(error = %error, "connection ended");
                    }
                    return;
                }
                () = self.cut.cancelled() => return,
                () = self.stop.cancelled(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                    // HTTP/2 waits for the peer's preface even so; one that is not on its way by now is not coming.
                    if activity.requests.load(Ordering::Relaxed) == 0 {
                        check.reset_after(FIRST_REQUEST_AT_SHUTDOWN);
                    }
                }
                _ = check.tick() => {
                    let served = activity.requests.load(Ordering::Relaxed);
                    let busy = activity.in_flight.load(Ordering::Relaxed) > 0;
                    if !busy && served == seen {
                        if served == 0 || closing {
                            debug!("connection closed: no request in time");
                            return;
                        }
                        // Once more round the timer for a response that is still being sent.
                        closing = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    seen = served;
                }
            }
        }
    }

    fn builder(&self, http2: bool) -> auto::Builder<TokioExecutor> {
        // The protocol is fixed beforehand, as the builder's own detection waits for first bytes without a timer.
        let builder = auto::Builder::new(TokioExecutor::new());
        let mut builder = if http2 {
            builder.http2_only()
        } else {
            builder.http1_only()
        };
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.request_head);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(self.limits.http2_ping)
            .keep_alive_timeout(self.limits.http2_ping_timeout)
            .max_concurrent_streams(128);
        builder
    }
}

/// Requests of one connection.
#[derive(Default)]
struct Activity {
    requests: AtomicU64,
    in_flight: AtomicUsize,
}

impl Activity {
    fn begin(self: &Arc<Self>) -> InFlight {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }
}

/// Counts a request as in flight until dropped.
struct InFlight(Arc<Activity>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
