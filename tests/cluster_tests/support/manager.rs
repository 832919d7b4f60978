//! The manager under test: the real binary, as a process outside of the cluster.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::cluster::{PREFIX, kubeconfig};

/// What a component may take to become ready, before that counts as a failure.
pub(crate) const COMPONENT_TIMEOUT: Duration = Duration::from_secs(90);

/// The manager that runs now.
static RUNNING: LazyLock<Mutex<Option<Manager>>> = LazyLock::new(Mutex::default);

/// A manager process. Dropping it kills it.
pub(crate) struct Manager {
    child: Child,
    metrics: SocketAddr,
    health: SocketAddr,
}

/// Starts the manager, and waits until it says that it is ready. There must be none.
pub(crate) async fn start(flags: &[&str]) {
    let manager = Manager::start(flags).await;
    let previous = running().replace(manager);
    assert!(previous.is_none(), "one manager at a time");
}

/// Kills it as `kill -9` does.
pub(crate) fn kill() {
    running().take();
}

/// Asks it to end, as a kubelet does.
pub(crate) fn terminate() -> (ExitStatus, Duration) {
    let manager = running().take().expect("a manager runs");
    manager.terminate()
}

/// `GET path` on its listener for metrics: status and body.
pub(crate) fn metrics(path: &str) -> (u16, String) {
    let address = running().as_ref().expect("a manager runs").metrics;
    get(address, path).expect("it answers")
}

/// `GET path` on its listener for health: status and body.
pub(crate) fn health(path: &str) -> (u16, String) {
    let address = running().as_ref().expect("a manager runs").health;
    get(address, path).expect("it answers")
}

/// Sum of the series of a family whose labels hold all of `labels`, such as `cluster_version="x"`.
pub(crate) fn count(family: &str, labels: &[&str]) -> u64 {
    let (_, text) = metrics("/metrics");
    let of_family = text
        .lines()
        .filter_map(|line| line.strip_prefix(family)?.strip_prefix('{')?.split_once("} "));
    let chosen = of_family.filter(|(own, _)| labels.iter().all(|label| own.contains(label)));
    chosen
        .map(|(_, value)| value.parse::<u64>().expect("a number"))
        .sum()
}

/// The most memory it had resident so far, in KiB.
pub(crate) fn peak_memory() -> u64 {
    let pid = running().as_ref().expect("a manager runs").child.id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it is a process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .expect("a peak");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Where its log is.
pub(crate) fn log_file() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cluster-tests-manager.log")
}

/// Forgets the log of an earlier run.
pub(crate) fn clear_log() {
    let _ = std::fs::remove_file(log_file());
}

/// The newest lines of its log that hold `word`.
pub(crate) fn log_about(word: &str, count: usize) -> String {
    let text = std::fs::read_to_string(log_file()).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| line.contains(word)).collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn running() -> MutexGuard<'static, Option<Manager>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    async fn start(flags: &[&str]) -> Self {
        let (metrics, health) = (free_address(), free_address());
        let log = File::options()
            .create(true)
            .append(true)
            .open(log_file())
            .expect("a log");
        // It ends with the thread that started it, however that ends: no test run leaves a manager behind.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_vc-manager")])
            .arg("--kubeconfig")
            .arg(kubeconfig())
            .arg(format!("--namespace={PREFIX}-system"))
            .arg("--feature-gates=ClusterVersionPartialUpgrade=true")
            .arg(format!("--provisioner-timeout={}s", COMPONENT_TIMEOUT.as_secs()))
            .arg(format!("--metrics-addr={metrics}"))
            .arg(format!("--health-addr={health}"))
            .args([
                "--https-addr=127.0.0.1:0",
                "--log-format=text",
                "--log-level=info,vc_manager=debug",
            ])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("setpriv (util-linux) starts the manager");
        let mut manager = Self {
            child,
            metrics,
            health,
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !get(health, "/readyz").is_ok_and(|(status, _)| status == 200) {
            let ended = manager.child.try_wait().expect("it can be waited for");
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "the manager is not ready ({ended:?}); the end of its log:\n{}",
                log_about("", 20)
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        manager
    }

    fn terminate(mut self) -> (ExitStatus, Duration) {
        let started = Instant::now();
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().expect("kill");
        assert!(sent.success(), "SIGTERM reaches it");
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return (status, started.elapsed());
            }
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "it does not end after SIGTERM"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address on loopback that is free now.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("an address")
}

fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: manager\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .unwrap_or(0);
    Ok((status, body.to_owned()))
}
