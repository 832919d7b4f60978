//! Requests on connections of their own.

use std::{io, sync::Arc, time::Duration};

use rustls::{ClientConfig, pki_types::ServerName};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// How long a request may take.
const LIMIT: Duration = Duration::from_secs(10);

/// What was answered.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Answer {
    /// The object that is in it.
    pub(crate) fn object(&self) -> Result<Value, String> {
        if !(200..300).contains(&self.status) {
            return Err(format!("{}: {}", self.status, self.text));
        }
        serde_json::from_str(&self.text).map_err(|error| format!("{error}: {}", self.text))
    }
}

/// The certificate that is presented at a port of loopback, in DER.
pub(crate) async fn presented(port: u16, tls: &Arc<ClientConfig>) -> io::Result<Vec<u8>> {
    let stream = timeout(LIMIT, connect(port, tls)).await??;
    Ok(stream.get_ref().1.peer_certificates().unwrap_or_default()[0].to_vec())
}

/// One request to a port of loopback. `header` is a line of its own besides those that every request has.
pub(crate) async fn send(
    port: u16,
    tls: &Arc<ClientConfig>,
    request: &str,
    header: Option<&str>,
    body: Option<&Value>,
) -> io::Result<Answer> {
    timeout(LIMIT, exchange(port, tls, request, header, body)).await?
}

async fn exchange(
    port: u16,
    tls: &Arc<ClientConfig>,
    request: &str,
    header: Option<&str>,
    body: Option<&Value>,
) -> io::Result<Answer> {
    let mut stream = connect(port, tls).await?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let header = header.map(|line| format!("{line}\r\n")).unwrap_or_default();
    let length = body.len();
    // HTTP/1.0: the answer comes in one piece and ends with the connection.
    let text = format!(
        "{request} HTTP/1.0\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n{header}\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(text.as_bytes()).await?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer).await {
        // Go's servers need not say good-bye.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !answer.is_empty() => {}
        other => drop(other?),
    }
    let answer = String::from_utf8_lossy(&answer);
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no answer: {head:?}")))?;
    let text = text.to_owned();
    Ok(Answer { status, text })
}

async fn connect(port: u16, tls: &Arc<ClientConfig>) -> io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(("127.0.0.1", port)).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(Arc::clone(tls)).connect(name, tcp).await
}
