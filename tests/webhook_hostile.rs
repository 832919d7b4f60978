//! What is sent to the webhooks by peers who are not the API server: each gets a clear answer or none, memory stays
//! bounded, and the API server is served all the while.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use support::{templates, webhook::Webhooked};

const MUTATE: &str = "/mutate-tenancy-x-k8s-io-v1alpha1-clusterversion";
/// What may come on top of idle memory, in KiB: the 64 MiB that reviews may take, and half as much for buffers.
const MEMORY: u64 = 96 * 1024;
/// Connections that are opened and left lying.
const IDLE: usize = 5000;

/// Sends a body by curl, and gives the HTTP status and the answer.
fn post(scene: &Webhooked, content_type: &str, body: &[u8]) -> (u16, String) {
    let ca = scene.server.dir().join("ca.pem");
    fs::write(&ca, &scene.ca).unwrap();
    let mut child = Command::new("curl")
        .args([
            "--silent",
            "--show-error",
            "--max-time",
            "20",
            "--write-out",
            "\n%{http_code}",
            "--cacert",
        ])
        .arg(&ca)
        .args([
            "--header",
            &format!("content-type: {content_type}"),
            "--header",
            "expect:",
        ])
        .args(["--data-binary", "@-"])
        .arg(format!("https://{}{MUTATE}", scene.address))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("curl is installed");
    // A body that is refused half way is not read to its end.
    let _ = child.stdin.take().unwrap().write_all(body);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (answer, code) = text.rsplit_once('\n').unwrap();
    (code.parse().unwrap(), answer.to_owned())
}

fn review(object: &Value) -> Vec<u8> {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {"uid": "u", "kind": {"group": "tenancy.x-k8s.io", "version": "v1alpha1", "kind": "ClusterVersion"},
            "name": "x", "operation": "CREATE", "userInfo": {"username": "nobody"}, "object": object},
    })
    .to_string()
    .into_bytes()
}

/// A good review is answered soon, on a new connection.
fn unharmed(scene: &Webhooked) {
    let started = Instant::now();
    let (code, answer) = post(
        scene,
        "application/json",
        &review(&json!({"metadata": {}, "spec": templates::full("ClusterIP")})),
    );
    assert_eq!(code, 200);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["response"]["allowed"], true);
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    // The API server waits for ten seconds at most.
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
}

fn bodies(scene: &Webhooked) {
    let good = review(&json!({"spec": {}}));
    let with_spec = |spec: &str| {
        let text = String::from_utf8(review(&json!({"spec": "here"}))).unwrap();
        text.replace("\"here\"", spec)
    };
    let deep = with_spec(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)));
    let many = with_spec(&format!("[{}0]", "0,".repeat(3_000_000)));
    let large = vec![b' '; 10 * 1024 * 1024];
    for (what, content_type, body, code, text) in [
        (
            "truncated",
            "application/json",
            &good[..good.len() - 9],
            400,
            "the body is no AdmissionReview: it ends too soon",
        ),
        (
            "empty",
            "application/json",
            b"",
            400,
            "the body is no AdmissionReview: it ends too soon",
        ),
        (
            "no JSON",
            "application/json",
            b"\xff\xfe",
            400,
            "the body is no AdmissionReview: ",
        ),
        (
            "another type",
            "text/plain",
            &good,
            415,
            "the content type has to be application/json",
        ),
        (
            "deep",
            "application/json",
            deep.as_bytes(),
            400,
            "the body is no AdmissionReview: no JSON, or too deep",
        ),
        (
            "many values",
            "application/json",
            many.as_bytes(),
            413,
            "the body has more values",
        ),
        (
            "10 MiB",
            "application/json",
            &large,
            413,
            "the body is larger than 8 MiB",
        ),
        (
            "another kind",
            "application/json; charset=utf-8",
            b"{\"apiVersion\":\"v1\",\"kind\":\"Pod\"}",
            400,
            "apiVersion \"v1\" is not spoken",
        ),
    ] {
        let (status, answer) = post(scene, content_type, body);
        assert_eq!(status, code, "{what}: {answer}");
        assert!(answer.starts_with(text), "{what}: {answer}");
    }
    let mut foreign: Value = serde_json::from_slice(&good).unwrap();
    foreign["request"]["kind"]["kind"] = json!("Pod");
    let (status, answer) = post(scene, "application/json", foreign.to_string().as_bytes());
    assert_eq!(status, 200);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["response"]["allowed"], false);
    assert_eq!(answer["response"]["status"]["code"], 400);
    unharmed(scene);
}

fn wire(scene: &Webhooked) {
    let patience = Some(Duration::from_secs(30));
    for bytes in [
        &b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        b"\x16\x03\x01\xff\xff\x01garbage that is no handshake",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0; 4096],
    ] {
        let mut stream = TcpStream::connect(&scene.address).unwrap();
        stream.set_read_timeout(patience).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // Closed, maybe with an alert, maybe with a reset; never a word of HTTP, and never left to wait.
        if let Err(error) = stream.read_to_end(&mut answer) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    }
    unharmed(scene);
}

/// Connections that say nothing, and ones that say little.
fn idle(scene: &Webhooked) {
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap();
    let soft: usize = files
        .split_ascii_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap_or(usize::MAX);
    assert!(
        soft > IDLE + 100,
        "this test needs {IDLE} open files: ulimit -n {}",
        2 * IDLE
    );
    let before = scene.memory();
    let mut held = Vec::new();
    let mut refused = 0;
    for n in 0..IDLE {
        match TcpStream::connect_timeout(&scene.address.parse().unwrap(), Duration::from_secs(5)) {
            Ok(mut stream) => {
                // The beginning of a handshake, and no more.
                if n % 2 == 0 {
                    let _ = stream.write_all(b"\x16\x03\x01");
                }
                held.push(stream);
            }
            Err(_) => refused += 1,
        }
        if n % 1000 == 999 {
            unharmed(scene);
        }
    }
    assert!(refused < IDLE / 10, "{refused} connections were refused");
    unharmed(scene);
    let printed = scene.kubectl(
        &["create", "--dry-run=server", "-f", "-"],
        &json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "ClusterVersion", "metadata": {"name": "meanwhile"},
            "spec": templates::full("ClusterIP")})
        .to_string(),
    );
    assert!(printed.ok, "{}", printed.text);
    let after = scene.memory();
    eprintln!("{IDLE} idle connections: {before} KiB before, {after} KiB with them");
    assert!(after < before + MEMORY, "{before} KiB, then {after} KiB");
    drop(held);
}

/// Bodies of 8 MiB each, all at once, that are never finished.
fn hoards(scene: &Webhooked) {
    let before = scene.memory();
    let config = {
        let mut roots = rustls::RootCertStore::empty();
        let ca = rustls::pki_types::pem::PemObject::from_pem_slice(scene.ca.as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        std::sync::Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    };
    let chunk = vec![b' '; 64 * 1024];
    let mut peak = before;
    let mut held = Vec::new();
    for held_so_far in 0..16 {
        if held_so_far % 5 == 4 {
            unharmed(scene);
        }
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let stream = TcpStream::connect(&scene.address).unwrap();
        stream
            .set_write_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let client = rustls::ClientConnection::new(std::sync::Arc::clone(&config), name).unwrap();
        let mut tls = rustls::StreamOwned::new(client, stream);
        let request = format!(
            "POST {MUTATE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            8 * 1024 * 1024
        );
        let _ = tls.write_all(request.as_bytes());
        // All but the last byte; what finds no room is not read, and the write ends by its timeout.
        for _ in 0..127 {
            if tls.write_all(&chunk).is_err() {
                break;
            }
        }
        held.push(tls);
        peak = peak.max(scene.memory());
    }
    eprintln!("16 bodies of 8 MiB: {before} KiB before, {peak} KiB at most");
    assert!(peak < before + MEMORY, "{before} KiB, then {peak} KiB");
    // While they wait, others are served: the slowest make room.
    unharmed(scene);
    drop(held);
}

#[test]
fn nobody_takes_the_webhooks_from_the_api_server() {
    let scene = Webhooked::start();
    scene.create_namespace();
    scene.register(&["v1"]);
    bodies(&scene);
    wire(&scene);
    idle(&scene);
    hoards(&scene);
    assert!(!scene.log().contains("panicked"));
}
