//! A way to the API server that can be cut.

use std::sync::Arc;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Passes connections on while it is open.
pub(crate) struct Proxy {
    /// Where it listens.
    pub(crate) port: u16,
    open: Arc<watch::Sender<bool>>,
}

impl Proxy {
    /// One to a port of loopback, closed at first.
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().port();
        let open = Arc::new(watch::channel(false).0);
        let state = Arc::clone(&open);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut closed = state.subscribe();
                tokio::spawn(async move {
                    if !*closed.borrow_and_update() {
                        return;
                    }
                    let mut target = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                    tokio::select! {
                        _ = copy_bidirectional(&mut stream, &mut target) => {}
                        _ = closed.changed() => {}
                    }
                });
            }
        });
        Self { port: own, open }
    }

    /// Opens it, or cuts all connections and lets none through.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.send_replace(open);
    }
}
