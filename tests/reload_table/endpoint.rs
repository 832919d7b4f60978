//! A TLS server that the programs connect to, and that notes the certificate of each connection.

use std::sync::{Arc, Mutex};

use rustls::{ClientConfig, ServerConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, server::TlsStream};
use tokio_util::sync::CancellationToken;

/// What is behind it.
pub(crate) enum Behind {
    /// Nothing: requests are answered by this text, one for each connection.
    Answer(&'static str),
    /// Another server, on this port of loopback.
    Server(u16, Arc<ClientConfig>),
}

/// How a connection began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Met {
    /// With this certificate of the client, in DER; none if it showed none.
    Client(Option<Vec<u8>>),
    /// The client refused the certificate it was shown.
    Refused,
}

/// A running one.
pub(crate) struct Endpoint {
    /// Port of loopback.
    pub(crate) port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    behind: Behind,
    tls: Mutex<Arc<ServerConfig>>,
    open: Mutex<CancellationToken>,
    met: Mutex<Vec<Met>>,
}

impl Endpoint {
    /// Starts one.
    pub(crate) async fn start(tls: Arc<ServerConfig>, behind: Behind) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            behind,
            tls: Mutex::new(tls),
            open: Mutex::default(),
            met: Mutex::default(),
        });
        let state = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let state = Arc::clone(&state);
                tokio::spawn(async move {
                    let cut = state.open.lock().unwrap().clone();
                    cut.run_until_cancelled(state.serve(tcp)).await;
                });
            }
        });
        Self { port, shared, task }
    }

    /// Ends all connections, so that new ones are made. Gives the place in the notes where those will be.
    pub(crate) fn cut(&self) -> usize {
        std::mem::take(&mut *self.shared.open.lock().unwrap()).cancel();
        self.mark()
    }

    /// As [`Self::cut`], and shows another certificate from now on.
    pub(crate) fn present(&self, tls: Arc<ServerConfig>) -> usize {
        *self.shared.tls.lock().unwrap() = tls;
        self.cut()
    }

    /// The end of the notes.
    pub(crate) fn mark(&self) -> usize {
        self.shared.met.lock().unwrap().len()
    }

    /// How the connections since `mark` began.
    pub(crate) fn met(&self, mark: usize) -> Vec<Met> {
        self.shared.met.lock().unwrap()[mark..].to_vec()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.cut();
        self.task.abort();
    }
}

impl Shared {
    async fn serve(&self, tcp: TcpStream) {
        let tls = Arc::clone(&self.tls.lock().unwrap());
        let accepted = TlsAcceptor::from(tls).accept(tcp).await;
        let met = match &accepted {
            Ok(stream) => {
                let chain = stream.get_ref().1.peer_certificates();
                Met::Client(chain.map(|chain| chain[0].to_vec()))
            }
            Err(error) => {
                let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
                if !matches!(cause, Some(rustls::Error::AlertReceived(_))) {
                    return;
                }
                Met::Refused
            }
        };
        self.met.lock().unwrap().push(met);
        if let Ok(stream) = accepted {
            // The other side may leave whenever it likes.
            let _ = match &self.behind {
                Behind::Answer(text) => answer(stream, text).await,
                Behind::Server(port, tls) => pass_on(stream, *port, tls).await,
            };
        }
    }
}

async fn answer(mut stream: TlsStream<TcpStream>, text: &str) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let length = text.len();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
    let answer = format!("{head}\r\nContent-Length: {length}\r\n\r\n{text}");
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

async fn pass_on(
    mut stream: TlsStream<TcpStream>,
    port: u16,
    tls: &Arc<ClientConfig>,
) -> std::io::Result<()> {
    let tcp = TcpStream::connect(("127.0.0.1", port)).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut server = TlsConnector::from(Arc::clone(tls)).connect(name, tcp).await?;
    copy_bidirectional(&mut stream, &mut server).await.map(drop)
}
