//! etcd, kube-apiserver and the two controllers that delete, on free ports of loopback.

use std::{
    fs,
    io::Write as _,
    net::TcpListener,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Mutex, OnceLock},
    time::{Duration, Instant},
};

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition, jiff::Timestamp,
};
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use vc_manager::{
    api::crd::crds,
    pki::{self, Authority, CertifiedPair, ExtendedUsage, KeyAlgorithm, LeafRequest, Validity},
};

/// How long a server may take to become ready on a busy machine.
const START: Duration = Duration::from_mins(2);
const SEPARATOR: &str = "\x1f";

/// A running API server. Dropping it, or the end of the process that started it, ends it and leaves nothing.
pub struct ApiServer {
    dir: PathBuf,
    url: String,
    authority: Authority,
    guard: Mutex<Guard>,
}

/// The process that keeps the others; see `guard.sh`.
struct Guard {
    child: Child,
    input: Option<ChildStdin>,
}

impl ApiServer {
    /// The server that all tests of this binary share, with this version's definitions installed.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<ApiServer> = OnceLock::new();
        SHARED.get_or_init(|| {
            let server = Self::start();
            server.install(&crds());
            server
        })
    }

    /// Starts a server of its own, without any definitions.
    pub fn start() -> Self {
        super::log();
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let programs = ["VCM_ETCD", "VCM_KUBE_APISERVER", "VCM_KUBE_CONTROLLER_MANAGER"].map(program);
        let dir = tempfile::Builder::new()
            .prefix("vcm-api-")
            .tempdir()
            .expect("a temporary folder")
            .keep();
        let guard = Guard::start(&dir);
        let (authority, _) = Authority::create(Timestamp::now()).expect("a CA");
        let [etcd, peer, port, unused] = free_ports();
        let url = format!("https://127.0.0.1:{port}");
        let server = Self {
            dir,
            url,
            authority,
            guard: Mutex::new(guard),
        };
        server.lay_down_credentials();
        let [etcd_program, apiserver_program, controllers_program] = programs;
        let dir = server.dir.display().to_string();

        let etcd_url = format!("http://127.0.0.1:{etcd}");
        let peer_url = format!("http://127.0.0.1:{peer}");
        server.spawn(
            "etcd",
            &etcd_program,
            &[
                format!("--data-dir={dir}/etcd"),
                "--unsafe-no-fsync".into(),
                "--log-level=warn".into(),
                format!("--listen-client-urls={etcd_url}"),
                format!("--advertise-client-urls={etcd_url}"),
                format!("--listen-peer-urls={peer_url}"),
                format!("--initial-advertise-peer-urls={peer_url}"),
                format!("--initial-cluster=default={peer_url}"),
            ],
        );
        server.spawn(
            "apiserver",
            &apiserver_program,
            &[
                format!("--etcd-servers={etcd_url}"),
                "--bind-address=127.0.0.1".into(),
                "--advertise-address=127.0.0.1".into(),
                format!("--secure-port={port}"),
                format!("--cert-dir={dir}"),
                format!("--client-ca-file={dir}/ca.crt"),
                format!("--tls-cert-file={dir}/server.crt"),
                format!("--tls-private-key-file={dir}/server.key"),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                format!("--service-account-signing-key-file={dir}/accounts.key"),
                format!("--service-account-key-file={dir}/accounts.pub"),
                "--service-cluster-ip-range=10.0.0.0/16".into(),
                "--authorization-mode=RBAC".into(),
                // It waits for a controller that is not run.
                "--disable-admission-plugins=ServiceAccount".into(),
                "--profiling=false".into(),
            ],
        );
        server.wait_ready();
        // Without these no namespace and no dependent would ever go.
        server.spawn(
            "controllers",
            &controllers_program,
            &[
                format!("--kubeconfig={dir}/admin.kubeconfig"),
                "--controllers=namespace-controller,garbage-collector-controller".into(),
                "--leader-elect=false".into(),
                "--bind-address=127.0.0.1".into(),
                format!("--secure-port={unused}"),
                format!("--cert-dir={dir}"),
                "--profiling=false".into(),
            ],
        );
        server
    }

    /// Installs definitions and waits until their kinds are served.
    pub fn install(&self, definitions: &[CustomResourceDefinition]) {
        self.block_on(async |client: Client| {
            let api = Api::<CustomResourceDefinition>::all(client.clone());
            for definition in definitions {
                api.create(&PostParams::default(), definition)
                    .await
                    .expect("the definition is accepted");
            }
            for definition in definitions {
                super::eventually("the definition to be established", async || {
                    let stored = api.get(&definition.name_any()).await.ok()?;
                    let conditions = stored.status?.conditions.unwrap_or_default();
                    conditions
                        .iter()
                        .any(|c| c.type_ == "Established" && c.status == "True")
                        .then_some(())
                })
                .await;
                // Established is not served: the storage is set up after it.
                let spec = &definition.spec;
                let path = format!(
                    "/apis/{}/{}/{}",
                    spec.group, spec.versions[0].name, spec.names.plural
                );
                super::eventually("the kind to be served", async || {
                    let request = http::Request::get(&path).body(Vec::new()).expect("a request");
                    client.request_text(request).await.ok()
                })
                .await;
            }
        });
    }

    /// Client of the administrator, to be used in the runtime it is made in.
    pub async fn client(&self) -> Client {
        Client::try_from(self.config().await).expect("a client")
    }

    /// Configuration of the administrator's client.
    pub async fn config(&self) -> Config {
        self.config_as("admin", Some("system:masters")).await
    }

    /// Configuration of a client for `user` in `group`.
    pub async fn config_as(&self, user: &str, group: Option<&str>) -> Config {
        let kubeconfig = Kubeconfig::from_yaml(&self.kubeconfig(user, group)).expect("a kubeconfig");
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("a configuration");
        config.proxy_url = None;
        config
    }

    /// A kubeconfig for `user` in `group`.
    pub fn kubeconfig(&self, user: &str, group: Option<&str>) -> String {
        let pair = self.issue(user, group, &[ExtendedUsage::ClientAuth], Vec::new());
        let ca = self.authority.certificate_pem();
        pki::kubeconfig::render("test", &self.url, ca, user, &pair)
            .expect("a kubeconfig")
            .to_string()
    }

    /// A folder that goes with the server.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn issue(
        &self,
        name: &str,
        group: Option<&str>,
        usages: &'static [ExtendedUsage],
        ip_addresses: Vec<std::net::IpAddr>,
    ) -> CertifiedPair {
        let request = LeafRequest {
            common_name: name.to_owned(),
            organization: group.map(str::to_owned),
            usages,
            dns_names: Vec::new(),
            ip_addresses,
        };
        self.authority
            .issue(
                &request,
                KeyAlgorithm::EcdsaP256,
                Validity::default(),
                Timestamp::now(),
            )
            .expect("a certificate")
    }

    fn lay_down_credentials(&self) {
        let write = |name: &str, text: &str| fs::write(self.dir.join(name), text).expect("a file");
        let serving = self.issue(
            "kube-apiserver",
            None,
            &[ExtendedUsage::ServerAuth],
            vec!["127.0.0.1".parse().unwrap()],
        );
        write("ca.crt", self.authority.certificate_pem());
        write("server.crt", &serving.certificate_pem);
        write("server.key", &serving.key_pem);
        let accounts = pki::service_account::generate().expect("a key");
        write("accounts.pub", &accounts.certificate_pem);
        write("accounts.key", &accounts.key_pem);
        write(
            "admin.kubeconfig",
            &self.kubeconfig("admin", Some("system:masters")),
        );
    }

    /// Starts a process that ends with the server, whatever becomes of the test. Its log and its process id are in
    /// [`Self::dir`], in `<name>.log` and `<name>.pid`.
    pub fn spawn(&self, name: &str, program: &Path, arguments: &[String]) {
        let words = [name.to_owned(), program.display().to_string()];
        let line: Vec<_> = words.iter().chain(arguments).map(String::as_str).collect();
        let mut guard = self.guard.lock().expect("nobody panicked in it");
        let input = guard.input.as_mut().expect("open until dropped");
        writeln!(input, "{}", line.join(SEPARATOR)).expect("the guard reads");
    }

    fn wait_ready(&self) {
        let started = Instant::now();
        self.block_on(async |client: Client| {
            let mut last = String::from("not asked");
            while started.elapsed() < START {
                for name in ["etcd", "apiserver"] {
                    self.check_alive(name);
                }
                let request = http::Request::get("/readyz").body(Vec::new()).expect("a request");
                match client.request_text(request).await {
                    Ok(_) => return,
                    Err(error) => last = error.to_string(),
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            panic!(
                "the API server is not ready after {START:?}: {last}\n{}",
                self.tail("apiserver")
            );
        });
    }

    /// Panics with the end of its log if the process has ended.
    fn check_alive(&self, name: &str) {
        let Ok(pid) = fs::read_to_string(self.dir.join(format!("{name}.pid"))) else {
            return;
        };
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("X", |(_, rest)| &rest[..1]);
        assert!(!matches!(state, "Z" | "X"), "{name} ended:\n{}", self.tail(name));
    }

    fn tail(&self, name: &str) -> String {
        let log = fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Runs `work` to its end, whether or not the caller is in a runtime.
    fn block_on(&self, work: impl AsyncFnOnce(Client) + Send) {
        std::thread::scope(|threads| {
            let outcome = threads
                .spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .expect("a runtime");
                    runtime.block_on(async { work(self.client().await).await });
                })
                .join();
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
        });
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Ok(guard) = self.guard.get_mut() {
            drop(guard.input.take());
            let _ = guard.child.wait();
        }
    }
}

impl Guard {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new("bash")
            .args(["-c", include_str!("guard.sh"), "guard"])
            .arg(dir)
            .stdin(Stdio::piped())
            // Not those of the test: a reader of its output must not wait for this process, too.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir(dir)
            // Not reached by Ctrl-C: it has to clean up then.
            .process_group(0)
            .spawn()
            .expect("bash is installed");
        let input = child.stdin.take();
        Self { child, input }
    }
}

fn program(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable)
        .map(PathBuf::from)
        .filter(|path| path.is_file());
    path.unwrap_or_else(|| {
        panic!("{variable} names no program: these tests need a built kube-apiserver; run `make test`")
    })
}

/// Ports nobody listens on. All are held before any is let go, so they differ.
fn free_ports<const N: usize>() -> [u16; N] {
    let sockets = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    sockets.map(|socket| socket.local_addr().expect("bound").port())
}
