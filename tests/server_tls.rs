//! The accept loop and its certificate, over real sockets, with curl and openssl as outside judges.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails its test"
)]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use vc_manager::metrics::Metrics;
use vc_manager::server::health::Readiness;
use vc_manager::server::metrics_endpoint::Access;
use vc_manager::server::router;
use vc_manager::server::serve::{Drained, Limits, serve};
use vc_manager::server::source::CertificateSource;
use vc_manager::server::tls::ReloadableCertificate;

const SECOND: Duration = Duration::from_secs(1);

/// A running listener.
struct Server {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<Drained>,
}

impl Server {
    async fn start(tls: Option<&ReloadableCertificate>, router: Router, limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let tls = tls.map(|certificate| certificate.server_config().unwrap());
        let task = tokio::spawn(serve("test", listener, tls, router, limits, stop.clone()));
        Self { address, stop, task }
    }

    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

/// A certificate directory for localhost; the common name tells certificates apart.
fn write_pair(dir: &Path, name: &str) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.not_after = time::OffsetDateTime::now_utc() + Duration::from_hours(1);
    std::fs::write(dir.join("tls.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
}

async fn from_files(dir: &Path) -> ReloadableCertificate {
    let certificate = ReloadableCertificate::default();
    let source = CertificateSource::new(Some(dir.to_owned()), "ns");
    source.install(certificate.clone()).await.unwrap();
    certificate
}

async fn tls_client(server: &Server, dir: &Path, alpn: &[u8]) -> TlsStream<TcpStream> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(dir.join("tls.crt")).unwrap())
        .unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, server.tcp().await)
        .await
        .unwrap()
}

/// One HTTP/1.1 exchange on a connection that stays open.
async fn exchange(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), path: &str) -> std::io::Result<String> {
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    loop {
        let mut bytes = [0; 1024];
        let read = stream.read(&mut bytes).await?;
        answer.extend_from_slice(&bytes[..read]);
        let text = String::from_utf8_lossy(&answer);
        let whole = text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            length.is_some_and(|length| length.parse() == Ok(body.len()))
        });
        if whole {
            return Ok(text.into_owned());
        }
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// How long until the peer closes, having sent whatever it sends.
async fn until_closed(stream: &mut (impl AsyncRead + Unpin)) -> Duration {
    let start = Instant::now();
    let mut rest = Vec::new();
    let _ = timeout(20 * SECOND, stream.read_to_end(&mut rest))
        .await
        .expect("never closed");
    start.elapsed()
}

async fn output(program: &str, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

fn hello() -> Router {
    Router::new().route("/", get(|| async { "hello" })).route(
        "/slow",
        get(|| async {
            sleep(SECOND).await;
            "slow"
        }),
    )
}

fn short() -> Limits {
    Limits {
        handshake: SECOND / 2,
        request_head: SECOND / 2,
        ..Limits::default()
    }
}

#[tokio::test]
async fn curl_and_openssl_accept_the_self_issued_certificate() {
    let certificate = ReloadableCertificate::default();
    CertificateSource::new(None, "ns")
        .install(certificate.clone())
        .await
        .unwrap();
    let metrics = Arc::new(Metrics::new(true).unwrap());
    let router = router::https(&Readiness::new(), metrics, Access::Open, Router::new());
    let server = Server::start(Some(&certificate), router, Limits::default()).await;
    let address = server.address.to_string();

    // What the server presents is fetched with openssl, and then trusted by openssl and curl.
    let (_, shown) = output("openssl", &["s_client", "-connect", &address, "-showcerts"]).await;
    let end = "-----END CERTIFICATE-----";
    let pem =
        &shown[shown.find("-----BEGIN CERTIFICATE-----").unwrap()..shown.find(end).unwrap() + end.len()];
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    std::fs::write(&ca, format!("{pem}\n")).unwrap();
    let ca = ca.to_str().unwrap();
    for (version, protocol) in [("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")] {
        let name = "virtualcluster-webhook-service.ns.svc";
        let verify = [
            "-verify_return_error",
            "-verify_hostname",
            name,
            "-CAfile",
            ca,
            version,
        ];
        let (ok, text) = output(
            "openssl",
            &[&["s_client", "-connect", &address][..], &verify].concat(),
        )
        .await;
        assert!(
            ok && text.contains("Verify return code: 0 (ok)") && text.contains(protocol),
            "{text}"
        );
    }
    let port = server.address.port();
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        for (path, expected) in [
            ("/readyz?verbose", "readyz check passed"),
            ("/metrics", "vc_manager_build_info"),
        ] {
            let resolve = format!("vc-manager.ns.svc:{port}:127.0.0.1");
            let url = format!("https://vc-manager.ns.svc:{port}{path}");
            let format = "\nversion %{http_version}\n";
            let arguments = [
                "-sS",
                flag,
                "--cacert",
                ca,
                "--resolve",
                &resolve,
                "-w",
                format,
                &url,
            ];
            let (ok, text) = output("curl", &arguments).await;
            assert!(
                ok && text.contains(expected) && text.contains(&format!("version {version}\n")),
                "{text}"
            );
        }
    }
    let (ok, _) = output("openssl", &["s_client", "-connect", &address, "-tls1_1"]).await;
    assert!(!ok, "TLS 1.1 accepted");
    server.stop.cancel();
    assert_eq!(server.task.await.unwrap(), Drained::Clean);
}

#[tokio::test]
async fn certificate_is_replaced_while_connections_go_on() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path(), "first");
    let certificate = ReloadableCertificate::default();
    let source = CertificateSource::new(Some(dir.path().to_owned()), "ns");
    let refresh = source.install(certificate.clone()).await.unwrap();
    let metrics = Arc::new(Metrics::new(true).unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(refresh.run_every(SECOND / 20, Arc::clone(&metrics), stop.clone()));
    let server = Server::start(Some(&certificate), hello(), Limits::default()).await;

    let mut old = tls_client(&server, dir.path(), b"http/1.1").await;
    let first = std::fs::read(dir.path().join("tls.crt")).unwrap();
    assert!(exchange(&mut old, "/").await.unwrap().ends_with("hello"));

    // A key that is not the certificate's: the first pair stays.
    let good = std::fs::read(dir.path().join("tls.key")).unwrap();
    std::fs::write(
        dir.path().join("tls.key"),
        KeyPair::generate().unwrap().serialize_pem(),
    )
    .unwrap();
    sleep(SECOND / 2).await;
    let errors = || {
        let text = String::from_utf8(metrics.encode().unwrap()).unwrap();
        text.contains("vc_manager_serving_certificate_reload_errors_total 1\n")
    };
    assert!(errors());
    tls_client(&server, dir.path(), b"http/1.1").await;
    std::fs::write(dir.path().join("tls.key"), good).unwrap();

    write_pair(dir.path(), "second");
    sleep(SECOND / 2).await;
    let mut new = tls_client(&server, dir.path(), b"http/1.1").await;
    let presented = new.get_ref().1.peer_certificates().unwrap()[0].clone();
    assert_ne!(presented, CertificateDer::from_pem_slice(&first).unwrap());
    assert!(exchange(&mut new, "/").await.unwrap().ends_with("hello"));
    assert!(exchange(&mut old, "/").await.unwrap().ends_with("hello"));
    stop.cancel();
}

/// A Secret volume: the files are links through `..data`, itself a link that kubelet swaps for one to a new folder.
#[tokio::test]
async fn a_swap_of_the_links_of_a_secret_volume_is_noticed() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let update = |version: &str| {
        std::fs::create_dir(dir.join(version)).unwrap();
        write_pair(&dir.join(version), version);
        symlink(version, dir.join("..data_tmp")).unwrap();
        std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    };
    update("..first");
    for name in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(name), dir.join(name)).unwrap();
    }
    let certificate = ReloadableCertificate::default();
    let source = CertificateSource::new(Some(dir.to_owned()), "ns");
    let refresh = source.install(certificate.clone()).await.unwrap();
    let metrics = Arc::new(Metrics::new(true).unwrap());
    let stop = CancellationToken::new();
    tokio::spawn(refresh.run_every(SECOND / 20, metrics, stop.clone()));
    let server = Server::start(Some(&certificate), hello(), Limits::default()).await;
    for version in ["..second", "..third"] {
        tls_client(&server, dir, b"h2").await;
        update(version);
        std::fs::remove_dir_all(dir.join("..first")).ok();
        sleep(SECOND / 2).await;
        // Trusts what the files hold now.
        tls_client(&server, dir, b"h2").await;
    }
    stop.cancel();
}

#[tokio::test]
async fn peers_that_dawdle_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path(), "x");
    let certificate = from_files(dir.path()).await;
    let tls = Server::start(Some(&certificate), hello(), short()).await;
    let plain = Server::start(None, hello(), short()).await;

    // No handshake.
    assert!(until_closed(&mut tls.tcp().await).await < 3 * SECOND);
    // A handshake, then silence, in either protocol.
    for alpn in [&b"h2"[..], b"http/1.1"] {
        assert!(until_closed(&mut tls_client(&tls, dir.path(), alpn).await).await < 3 * SECOND);
    }
    // Silence on the plain listener; the first letters of HTTP/2.
    assert!(until_closed(&mut plain.tcp().await).await < 3 * SECOND);
    let mut stream = plain.tcp().await;
    stream.write_all(b"PRI * HT").await.unwrap();
    assert!(until_closed(&mut stream).await < 3 * SECOND);

    // Slow-loris: a header that never ends, sent so that there is never silence; also as second request.
    for warm in [false, true] {
        let mut stream = tls_client(&tls, dir.path(), b"http/1.1").await;
        if warm {
            exchange(&mut stream, "/").await.unwrap();
        }
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n").await.unwrap();
        let start = Instant::now();
        let (mut read, mut write) = tokio::io::split(stream);
        let writer = tokio::spawn(async move {
            while write.write_all(b"x: y\r\n").await.is_ok() && write.flush().await.is_ok() {
                sleep(SECOND / 20).await;
            }
        });
        until_closed(&mut read).await;
        assert!(start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());
        writer.abort();
    }
}

#[tokio::test]
async fn idle_http2_connection_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path(), "x");
    let certificate = from_files(dir.path()).await;
    let limits = Limits {
        idle: SECOND,
        ..short()
    };
    let server = Server::start(Some(&certificate), hello(), limits).await;
    // Preface, empty SETTINGS, and a HEADERS frame of GET / over https (RFC 7541 static table, authority "x").
    let mut stream = tls_client(&server, dir.path(), b"h2").await;
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    stream
        .write_all(b"\0\0\x06\x01\x05\0\0\0\x01\x82\x84\x87\x41\x01x")
        .await
        .unwrap();
    let start = Instant::now();
    let mut rest = Vec::new();
    let _ = timeout(20 * SECOND, stream.read_to_end(&mut rest))
        .await
        .expect("never closed");
    assert!(rest.windows(5).any(|window| window == b"hello"), "{rest:?}");
    assert!(
        start.elapsed() > SECOND / 2 && start.elapsed() < 5 * SECOND,
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn drain_lets_a_request_finish() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path(), "x");
    let certificate = from_files(dir.path()).await;
    let server = Server::start(Some(&certificate), hello(), Limits::default()).await;
    let mut idle = tls_client(&server, dir.path(), b"http/1.1").await;
    exchange(&mut idle, "/").await.unwrap();
    let mut busy = tls_client(&server, dir.path(), b"http/1.1").await;
    let busy = tokio::spawn(async move { exchange(&mut busy, "/slow").await });
    let url = format!("https://localhost:{}/slow", server.address.port());
    let ca = dir.path().join("tls.crt").to_str().unwrap().to_owned();
    let http2 = tokio::spawn(async move { output("curl", &["-sS", "--http2", "--cacert", &ca, &url]).await });
    sleep(SECOND / 2).await;
    server.stop.cancel();
    assert!(until_closed(&mut idle).await < SECOND / 2);
    assert!(TcpStream::connect(server.address).await.is_err());
    assert!(busy.await.unwrap().unwrap().ends_with("slow"));
    assert_eq!(http2.await.unwrap(), (true, "slow".to_owned()));
    assert_eq!(server.task.await.unwrap(), Drained::Clean);
}

#[tokio::test]
async fn unused_connections_do_not_hold_up_the_drain() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path(), "x");
    let certificate = from_files(dir.path()).await;
    let tls = Server::start(Some(&certificate), hello(), Limits::default()).await;
    let plain = Server::start(None, hello(), Limits::default()).await;
    let _plain = (plain.tcp().await, tls.tcp().await);
    let _tls = (
        tls_client(&tls, dir.path(), b"http/1.1").await,
        tls_client(&tls, dir.path(), b"h2").await,
    );
    sleep(SECOND / 4).await;
    for server in [tls, plain] {
        server.stop.cancel();
        assert_eq!(
            timeout(2 * SECOND, server.task).await.unwrap().unwrap(),
            Drained::Clean
        );
    }
}

#[tokio::test]
async fn drain_has_a_deadline() {
    let never = Router::new().route("/", get(std::future::pending::<String>));
    let server = Server::start(
        None,
        never,
        Limits {
            drain: SECOND / 4,
            ..Limits::default()
        },
    )
    .await;
    let mut stream = server.tcp().await;
    let request = tokio::spawn(async move { exchange(&mut stream, "/").await });
    sleep(SECOND / 4).await;
    let start = Instant::now();
    server.stop.cancel();
    assert_eq!(server.task.await.unwrap(), Drained::Cut(1));
    assert!(start.elapsed() < 2 * SECOND);
    assert!(request.await.unwrap().is_err());
}

#[tokio::test]
async fn connections_are_limited_and_idle_ones_make_room() {
    let server = Server::start(
        None,
        hello(),
        Limits {
            connections: 2,
            ..Limits::default()
        },
    )
    .await;
    let (mut first, mut second) = (server.tcp().await, server.tcp().await);
    exchange(&mut first, "/").await.unwrap();
    exchange(&mut second, "/").await.unwrap();
    let mut third = server.tcp().await;
    timeout(SECOND, exchange(&mut third, "/")).await.unwrap().unwrap();
    assert!(
        exchange(&mut first, "/").await.is_err(),
        "the longest idle was closed"
    );

    // Busy ones are not: the next waits for them.
    let start = Instant::now();
    let busy = [second, third].map(|mut stream| {
        tokio::spawn(async move {
            exchange(&mut stream, "/slow").await.unwrap();
            stream
        })
    });
    sleep(SECOND / 4).await;
    let mut fourth = server.tcp().await;
    timeout(10 * SECOND, exchange(&mut fourth, "/"))
        .await
        .unwrap()
        .unwrap();
    assert!(start.elapsed() >= SECOND);
    for stream in busy {
        drop(stream.await.unwrap());
    }
    // The limit does not keep the listener from stopping.
    server.stop.cancel();
    drop(fourth);
    assert_eq!(
        timeout(5 * SECOND, server.task).await.unwrap().unwrap(),
        Drained::Clean
    );
}
