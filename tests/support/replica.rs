//! The program itself, as a process.

use std::{
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{ApiServer, PATIENCE, eventually};

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_vc-manager");

/// A running vc-manager. Dropping it kills it.
pub struct Replica {
    child: Child,
    /// Port of plain health.
    pub health: u16,
    /// Port of plain metrics.
    pub metrics: u16,
    /// Port of HTTPS.
    pub https: u16,
    log: PathBuf,
}

/// A port nobody listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

impl Replica {
    /// Starts one, as administrator, with the given flags and those that keep it to free ports of loopback.
    pub fn start(server: &ApiServer, name: &str, flags: &[&str]) -> Self {
        Self::start_as(
            server,
            name,
            &server.kubeconfig(name, Some("system:masters")),
            flags,
        )
    }

    /// Starts one with this kubeconfig.
    pub fn start_as(server: &ApiServer, name: &str, kubeconfig: &str, flags: &[&str]) -> Self {
        let path = server.dir().join(format!("{name}.kubeconfig"));
        fs::write(&path, kubeconfig).unwrap();
        let log = server.dir().join(format!("{name}.log"));
        let (health, metrics, https) = (free_port(), free_port(), free_port());
        let child = Command::new(PROGRAM)
            .arg("--kubeconfig")
            .arg(&path)
            .arg("--feature-gates=ClusterVersionPartialUpgrade=true")
            // There are no tenants to ask.
            .arg("--tenant-probe=false")
            .arg(format!("--metrics-addr=127.0.0.1:{metrics}"))
            .arg(format!("--health-addr=127.0.0.1:{health}"))
            .arg(format!("--https-addr=127.0.0.1:{https}"))
            .args(flags)
            .env_remove("KUBERNETES_SERVICE_HOST")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self {
            child,
            health,
            metrics,
            https,
            log,
        }
    }

    /// Status code and body of a GET on loopback; nothing when nobody listens.
    pub async fn get(port: u16, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let code = answer.split(' ').nth(1)?.parse().ok()?;
        Some((code, answer.split_once("\r\n\r\n")?.1.to_owned()))
    }

    /// Whether `/readyz`, or one check of it, is fulfilled.
    pub async fn is_ready(&self, check: &str) -> bool {
        let path = format!("/readyz{check}");
        matches!(Self::get(self.health, &path).await, Some((200, _)))
    }

    /// Waits until it is ready.
    pub async fn ready(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_ready("").await {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "{ended:?}: {}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// What it counts.
    pub async fn metrics(&self) -> String {
        Self::get(self.metrics, "/metrics")
            .await
            .map(|(_, body)| body)
            .unwrap_or_default()
    }

    /// What it has said so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it says something.
    pub async fn says(&self, words: &str) {
        eventually(words, async || self.log().contains(words).then_some(())).await;
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Sends SIGTERM and waits for the end.
    pub async fn terminate(&mut self) -> ExitStatus {
        let sent = Command::new("kill")
            .arg("-TERM")
            .arg(self.child.id().to_string())
            .status()
            .unwrap();
        assert!(sent.success());
        eventually("the process to end", async || self.child.try_wait().unwrap()).await
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}
