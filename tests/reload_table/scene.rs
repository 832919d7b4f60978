//! A control plane with the flags of the samples, its programs run directly, with an endpoint of the test in every
//! place where one of them is a client.

use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::ClientConfig;
use serde_json::{Value, json};
use tempfile::TempDir;
use vc_manager::pki::{self, CertifiedPair, kubeconfig};

use crate::{
    caller::{self, Answer},
    endpoint::{Behind, Endpoint},
    identities::{Ca, client, server},
    process::Process,
    volume::{Files, Volume, pair},
};

/// How long anything may take to come up on a busy machine.
const START: Duration = Duration::from_mins(1);
/// What an endpoint answers that has nothing behind it. An aggregated API server would.
const ANSWER: &str =
    r#"{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"reload.test/v1","resources":[]}"#;
/// The kubeconfigs of the controller-manager, as its flags call them.
pub(crate) const KUBECONFIGS: [&str; 3] = [
    "kubeconfig",
    "authentication-kubeconfig",
    "authorization-kubeconfig",
];

/// A running control plane. Dropping it ends it and leaves nothing.
pub(crate) struct Scene {
    processes: Vec<Process>,
    kubernetes: PathBuf,
    etcd_program: PathBuf,
    /// The authority of the tenant, and the one that comes to it later.
    pub(crate) ours: Ca,
    pub(crate) others: Ca,
    volumes: BTreeMap<&'static str, Volume>,
    /// Ports of the programs.
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) apiserver: u16,
    pub(crate) controllers: u16,
    unused: [u16; 2],
    /// Between the apiserver and etcd.
    pub(crate) to_etcd: Endpoint,
    /// Between the controller-manager and the apiserver, one for each kubeconfig.
    pub(crate) to_apiserver: Vec<Endpoint>,
    /// In the place of a kubelet, of an aggregated API server, of a member of etcd.
    pub(crate) kubelet: Endpoint,
    pub(crate) aggregated: Endpoint,
    pub(crate) member: Endpoint,
    /// The administrator.
    admin: Arc<ClientConfig>,
    dir: TempDir,
}

impl Scene {
    /// Starts one with the programs of these folders.
    pub(crate) async fn start(kubernetes: &Path, etcd_program: &Path) -> Self {
        let dir = tempfile::Builder::new().prefix("vcm-reload-").tempdir().unwrap();
        let [etcd, etcd_peer, apiserver, controllers, unused @ ..] = free_ports::<6>();
        let (ours, others) = (Ca::make(), Ca::make());
        let admin = ours.leaf("admin", Some("system:masters"));
        let endpoint = ours.leaf("endpoint", None);
        let through = |port| Behind::Server(port, client(&ours, Some(&admin), Some("h2")));
        let fixed = async || {
            let tls = server(&ours, &endpoint, "http/1.1");
            Endpoint::start(tls, Behind::Answer(ANSWER)).await
        };
        let mut to_apiserver = Vec::new();
        for _ in KUBECONFIGS {
            let tls = server(&ours, &endpoint, "h2");
            to_apiserver.push(Endpoint::start(tls, through(apiserver)).await);
        }
        let mut scene = Self {
            processes: Vec::new(),
            kubernetes: kubernetes.to_owned(),
            etcd_program: etcd_program.to_owned(),
            volumes: BTreeMap::new(),
            etcd,
            etcd_peer,
            apiserver,
            controllers,
            unused,
            to_etcd: Endpoint::start(server(&ours, &endpoint, "h2"), through(etcd)).await,
            to_apiserver,
            kubelet: fixed().await,
            aggregated: fixed().await,
            member: fixed().await,
            admin: client(&ours, Some(&admin), None),
            ours,
            others,
            dir,
        };
        scene.mount();
        scene.run().await;
        scene.furnish().await;
        scene
    }

    /// What is mounted under this name.
    pub(crate) fn volume(&self, name: &str) -> &Volume {
        &self.volumes[name]
    }

    /// Replaces all that is mounted.
    pub(crate) fn renew(&self) {
        self.volumes.values().for_each(Volume::replace);
    }

    /// Ends all programs and starts them again.
    pub(crate) async fn restart(&mut self) {
        self.processes.clear();
        self.run().await;
    }

    /// Panics if a program has ended.
    pub(crate) fn check(&self) {
        self.processes.iter().for_each(Process::check);
    }

    /// The ends of all logs.
    pub(crate) fn logs(&self) -> String {
        let logs = self.processes.iter().map(Process::log);
        logs.collect::<Vec<_>>().join("\n---\n")
    }

    /// A request of the administrator.
    pub(crate) async fn ask(&self, request: &str, body: Option<&Value>) -> Result<Answer, String> {
        caller::send(self.apiserver, &self.admin, request, None, body)
            .await
            .map_err(|error| format!("{request}: {error}"))
    }

    /// What the administrator gets or makes.
    pub(crate) async fn object(&self, request: &str, body: Option<&Value>) -> Result<Value, String> {
        let answer = self.ask(request, body).await?;
        answer.object().map_err(|error| format!("{request}: {error}"))
    }

    fn mount(&mut self) {
        let leaf = |name: &str| (self.ours.leaf(name, None), self.ours.leaf(name, None));
        let authorities = || (self.ours.pair.clone(), self.others.pair.clone());
        let own = &self.ours.pair.certificate_pem;
        // Later it holds both: what is in use must go on.
        let bundle = |ca: &CertifiedPair| {
            let other = Some(&ca.certificate_pem).filter(|pem| *pem != own);
            vec![("tls.crt", own.clone() + other.map_or("", String::as_str))]
        };
        let accounts = || pki::service_account::generate().unwrap();
        let mut mounted = BTreeMap::new();
        let mut mount = |name, (old, new), content: &dyn Fn(&CertifiedPair) -> Files| {
            mounted.insert(name, Volume::mount(self.dir.path().join(name), old, new, content));
        };
        mount("root", authorities(), &bundle);
        mount("root-with-key", authorities(), &pair);
        mount("apiserver", leaf("tenant"), &pair);
        mount("frontproxy", leaf("front-proxy-client"), &pair);
        mount("etcd", leaf("kube-etcd"), &pair);
        mount("service-account", (accounts(), accounts()), &pair);
        for (name, endpoint) in KUBECONFIGS.into_iter().zip(&self.to_apiserver) {
            let url = format!("https://127.0.0.1:{}", endpoint.port);
            let user = "system:kube-controller-manager";
            mount(name, leaf(user), &|pair| {
                let text = kubeconfig::render("test", &url, own, user, pair).unwrap();
                vec![("controller-manager-kubeconfig", text.to_string())]
            });
        }
        // Not the tenant's: by it the test may speak to the controller-manager.
        let fixed = self.ours.leaf("controllers", None);
        mount("controllers", (fixed.clone(), fixed), &pair);
        self.volumes = mounted;
    }

    fn file(&self, volume: &str, name: &str) -> String {
        self.volume(volume).file(name)
    }

    fn spawn(&mut self, name: &'static str, program: &Path, arguments: &[String]) {
        let process = Process::start(self.dir.path(), name, program, arguments);
        self.processes.push(process);
    }

    async fn run(&mut self) {
        let etcd = self.etcd_program.clone();
        self.spawn("etcd", &etcd, &self.etcd_arguments());
        self.spawn("member", &etcd, &self.member_arguments());
        self.come_up("etcd", self.etcd, "GET /health").await;
        let program = self.kubernetes.join("kube-apiserver");
        self.spawn("apiserver", &program, &self.apiserver_arguments());
        self.come_up("the apiserver", self.apiserver, "GET /readyz").await;
        let program = self.kubernetes.join("kube-controller-manager");
        self.spawn("controllers", &program, &self.controllers_arguments());
        self.come_up("the controller-manager", self.controllers, "GET /healthz")
            .await;
    }

    async fn come_up(&self, what: &str, port: u16, request: &str) {
        let began = Instant::now();
        loop {
            self.check();
            let answer = caller::send(port, &self.admin, request, None, None).await;
            if answer.as_ref().is_ok_and(|answer| answer.status == 200) {
                return;
            }
            assert!(began.elapsed() < START, "{what} is not ready:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Makes the objects that the looks need.
    async fn furnish(&self) {
        let objects = [
            (
                "/api/v1/namespaces/default/serviceaccounts",
                json!({"metadata": {"name": "probe"}}),
            ),
            (
                "/api/v1/nodes",
                json!({"metadata": {"name": "node"}, "status": {
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": self.kubelet.port}},
                }}),
            ),
            (
                "/api/v1/namespaces/default/pods",
                json!({"metadata": {"name": "pod"}, "spec": {
                    "nodeName": "node", "containers": [{"name": "container", "image": "image"}],
                }}),
            ),
            (
                "/api/v1/namespaces/default/services",
                json!({"metadata": {"name": "aggregated"}, "spec": {
                    "type": "ExternalName", "externalName": "127.0.0.1",
                }}),
            ),
            (
                "/apis/apiregistration.k8s.io/v1/apiservices",
                json!({"metadata": {"name": "v1.reload.test"}, "spec": {
                    "group": "reload.test", "version": "v1", "groupPriorityMinimum": 1000, "versionPriority": 10,
                    "insecureSkipTLSVerify": true,
                    "service": {"name": "aggregated", "namespace": "default", "port": self.aggregated.port},
                }}),
            ),
        ];
        let began = Instant::now();
        for (path, object) in objects {
            let request = format!("POST {path}");
            // The namespace "default" comes a moment after the server is ready.
            while let Err(error) = self.object(&request, Some(&object)).await {
                assert!(began.elapsed() < START, "{error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    fn etcd_arguments(&self) -> Vec<String> {
        let [unused, _] = self.unused;
        let url = format!("https://127.0.0.1:{}", self.etcd);
        vec![
            format!("--data-dir={}/etcd-data", self.dir.path().display()),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
            format!("--listen-client-urls={url}"),
            format!("--advertise-client-urls={url}"),
            format!("--listen-peer-urls=http://127.0.0.1:{unused}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{unused}"),
            format!("--initial-cluster=default=http://127.0.0.1:{unused}"),
            "--client-cert-auth=true".into(),
            format!("--trusted-ca-file={}", self.file("root", "tls.crt")),
            format!("--cert-file={}", self.file("etcd", "tls.crt")),
            format!("--key-file={}", self.file("etcd", "tls.key")),
        ]
    }

    /// A member of two, the other one of which is an endpoint of the test: never a cluster, but always trying.
    fn member_arguments(&self) -> Vec<String> {
        let [_, unused] = self.unused;
        let url = format!("https://127.0.0.1:{}", self.etcd_peer);
        let other = format!("https://127.0.0.1:{}", self.member.port);
        vec![
            format!("--data-dir={}/member-data", self.dir.path().display()),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
            "--name=one".into(),
            format!("--listen-client-urls=http://127.0.0.1:{unused}"),
            format!("--advertise-client-urls=http://127.0.0.1:{unused}"),
            format!("--listen-peer-urls={url}"),
            format!("--initial-advertise-peer-urls={url}"),
            format!("--initial-cluster=one={url},two={other}"),
            "--peer-client-cert-auth=true".into(),
            format!("--peer-trusted-ca-file={}", self.file("root", "tls.crt")),
            format!("--peer-cert-file={}", self.file("etcd", "tls.crt")),
            format!("--peer-key-file={}", self.file("etcd", "tls.key")),
        ]
    }

    /// Without `--enable-aggregator-routing`: with it the Service of an aggregated API server cannot be one of another
    /// host, as is that of the test.
    fn apiserver_arguments(&self) -> Vec<String> {
        let root = self.file("root", "tls.crt");
        let certificate = self.file("apiserver", "tls.crt");
        let key = self.file("apiserver", "tls.key");
        vec![
            "--bind-address=127.0.0.1".into(),
            "--advertise-address=127.0.0.1".into(),
            format!("--secure-port={}", self.apiserver),
            format!("--tls-cert-file={certificate}"),
            format!("--tls-private-key-file={key}"),
            format!("--client-ca-file={root}"),
            "--authorization-mode=RBAC".into(),
            // It would have pods wait for ServiceAccounts.
            "--disable-admission-plugins=ServiceAccount".into(),
            format!("--etcd-servers=https://127.0.0.1:{}", self.to_etcd.port),
            format!("--etcd-cafile={root}"),
            format!("--etcd-certfile={certificate}"),
            format!("--etcd-keyfile={key}"),
            format!("--kubelet-client-certificate={certificate}"),
            format!("--kubelet-client-key={key}"),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            format!(
                "--service-account-signing-key-file={}",
                self.file("service-account", "tls.key")
            ),
            format!(
                "--service-account-key-file={}",
                self.file("service-account", "tls.crt")
            ),
            "--service-cluster-ip-range=10.32.0.0/16".into(),
            format!("--requestheader-client-ca-file={root}"),
            "--requestheader-allowed-names=front-proxy-client".into(),
            "--requestheader-username-headers=X-Remote-User".into(),
            "--requestheader-group-headers=X-Remote-Group".into(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
            format!("--proxy-client-cert-file={}", self.file("frontproxy", "tls.crt")),
            format!("--proxy-client-key-file={}", self.file("frontproxy", "tls.key")),
            "--profiling=false".into(),
        ]
    }

    fn controllers_arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            "--bind-address=127.0.0.1".into(),
            format!("--secure-port={}", self.controllers),
            format!("--tls-cert-file={}", self.file("controllers", "tls.crt")),
            format!("--tls-private-key-file={}", self.file("controllers", "tls.key")),
            "--leader-elect=false".into(),
            // Those that use what is looked at.
            "--controllers=serviceaccount-token-controller,root-ca-certificate-publisher-controller,\
             certificatesigningrequest-signing-controller"
                .into(),
            format!("--root-ca-file={}", self.file("root-with-key", "tls.crt")),
            format!(
                "--service-account-private-key-file={}",
                self.file("service-account", "tls.key")
            ),
            format!(
                "--cluster-signing-cert-file={}",
                self.file("root-with-key", "tls.crt")
            ),
            format!(
                "--cluster-signing-key-file={}",
                self.file("root-with-key", "tls.key")
            ),
            "--profiling=false".into(),
        ];
        for name in KUBECONFIGS {
            let file = self.file(name, "controller-manager-kubeconfig");
            arguments.push(format!("--{name}={file}"));
        }
        arguments
    }
}

/// Ports nobody listens on. All are held before any is let go, so they differ.
fn free_ports<const N: usize>() -> [u16; N] {
    let sockets = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    sockets.map(|socket| socket.local_addr().expect("bound").port())
}
