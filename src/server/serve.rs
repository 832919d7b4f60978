//! The accept loop of one listener, plain or TLS.
//!
//! Invariants: a connection holds one of a fixed number of permits until it is closed; at most one more is accepted and
//! waits for one, for which the longest idle connection makes room. Each phase of a connection ends by a timer at the
//! latest: TLS handshake, request head, idleness, drain. A peer can thus neither exhaust the process, nor keep others
//! out, nor hold up its end.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
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
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::{ServiceExt as _, service_fn};
use tracing::{Instrument as _, debug, debug_span, info, warn};

use super::connections::{Connections, Entered};
use super::tls::ALPN_HTTP2;

/// What a listener allows its peers.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections open at once. For a further one the longest idle is closed; if all are busy, it waits.
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
            connections: 256,
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

/// Time for a connection to close by itself when it has to make room.
const EVICTION: Duration = Duration::from_millis(100);
/// Time before the next one has to.
const EVICTION_PAUSE: Duration = Duration::from_millis(20);
/// What a connection may have sent that nobody has read yet. (hyper's own limits are 400 KiB and 1 MiB.)
const UNREAD: u32 = 128 * 1024;
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
    let registry = Arc::new(Connections::new());
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    let peer = Arc::new(Peer {
        tls: tls.map(TlsAcceptor::from),
        router,
        limits,
        stop: stop.clone(),
        cut: cut.clone(),
    });
    while let Some((stream, address, permit)) = accept(name, &listener, &permits, &registry, &peer).await {
        let peer = Arc::clone(&peer);
        let entered = registry.enter();
        let span = debug_span!("connection", listener = name, peer = %address);
        connections.spawn(async move { peer.handle(stream, permit, entered).await }.instrument(span));
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
    registry: &Connections,
    peer: &Peer,
) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    loop {
        let next = async {
            let accepted = listener.accept().await;
            (accepted, permit(name, permits, registry).await)
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

/// A permit for the connection just accepted, for which others make room.
async fn permit(
    name: &str,
    permits: &Arc<Semaphore>,
    registry: &Connections,
) -> Result<OwnedSemaphorePermit, AcquireError> {
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Ok(permit);
    }
    let waiting = Arc::clone(permits).acquire_owned();
    let mut waiting = pin!(waiting);
    loop {
        // Again and again, for one that was busy may be idle now.
        if registry.evict() {
            debug!(listener = name, "full: the longest idle connection makes room");
        }
        if let Ok(permit) = timeout(EVICTION_PAUSE, waiting.as_mut()).await {
            return permit;
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
    async fn handle(&self, stream: TcpStream, permit: OwnedSemaphorePermit, entered: Entered) {
        let _permit = permit;
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let Some(tls) = &self.tls else {
            return self.serve(stream, false, &entered).await;
        };
        let handshake = timeout(self.limits.handshake, tls.accept(stream));
        let accepted = tokio::select! {
            () = self.stop.cancelled() => return,
            () = entered.activity.evicted.cancelled() => return,
            accepted = handshake => accepted,
        };
        match accepted {
            Ok(Ok(stream)) => {
                let http2 = stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP2);
                // Boxed: the TLS state is large and would otherwise be part of every plain connection's future too.
                Box::pin(self.serve(stream, http2, &entered)).await;
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
            Err(_) => debug!("TLS handshake took too long"),
        }
    }

    async fn serve<S>(&self, stream: S, http2: bool, entered: &Entered)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = &entered.activity;
        let service = {
            let (router, activity) = (self.router.clone(), Arc::clone(activity));
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
        let (mut seen, mut closing, mut evicted) = (0, false, false);
        loop {
            tokio::select! {
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        debug!(error = %error, "connection ended");
                    }
                    return;
                }
                () = self.cut.cancelled() => return,
                () = activity.evicted.cancelled(), if !evicted => {
                    if activity.requests() == 0 {
                        return;
                    }
                    (evicted, closing, seen) = (true, true, activity.requests());
                    connection.as_mut().graceful_shutdown();
                    check.reset_after(EVICTION);
                }
                () = self.stop.cancelled(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                    // HTTP/2 waits for the peer's preface even so; one that is not on its way by now is not coming.
                    if activity.requests() == 0 {
                        check.reset_after(FIRST_REQUEST_AT_SHUTDOWN);
                    }
                }
                _ = check.tick() => {
                    let served = activity.requests();
                    let busy = activity.in_flight() > 0;
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
            .max_buf_size(UNREAD as usize)
            .header_read_timeout(self.limits.request_head);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(self.limits.http2_ping)
            .keep_alive_timeout(self.limits.http2_ping_timeout)
            .initial_stream_window_size(UNREAD)
            .initial_connection_window_size(UNREAD)
            .max_concurrent_streams(128);
        builder
    }
}
