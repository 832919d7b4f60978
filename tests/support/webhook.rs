//! The program itself with its webhooks on, called by a real API server, and kubectl to make it call.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition, jiff::Timestamp,
};
use serde_json::{Value, json};
use vc_manager::{
    api::crd::crds,
    pki::{Authority, ExtendedUsage, KeyAlgorithm, LeafRequest, Validity},
};

use super::{ApiServer, PATIENCE, PROGRAM, replica::free_port};

/// An API server whose definitions have no rules of their own, and a manager that it asks. What is refused is thus
/// refused by the webhooks.
pub struct Webhooked {
    /// The API server.
    pub server: ApiServer,
    /// Where the manager listens, `127.0.0.1:<port>`.
    pub address: String,
    /// The authority of its certificate, as PEM.
    pub ca: String,
    kubeconfig: PathBuf,
}

/// What a command printed.
#[derive(Clone, Debug)]
pub struct Printed {
    /// Whether it succeeded.
    pub ok: bool,
    /// Both outputs, errors first.
    pub text: String,
}

impl Webhooked {
    /// Starts both. The webhooks are not registered yet.
    pub fn start() -> Self {
        let server = ApiServer::start();
        server.install(&crds().map(without_rules));
        let authority = Authority::create(Timestamp::now()).expect("a CA").0;
        let leaf = authority
            .issue(
                &LeafRequest {
                    common_name: "vc-manager".into(),
                    organization: None,
                    usages: &[ExtendedUsage::ServerAuth],
                    dns_names: Vec::new(),
                    ip_addresses: vec!["127.0.0.1".parse().expect("an address")],
                },
                KeyAlgorithm::EcdsaP256,
                Validity::default(),
                Timestamp::now(),
            )
            .expect("a certificate");
        let dir = server.dir().to_owned();
        let certificates = dir.join("webhook");
        fs::create_dir_all(&certificates).expect("a folder");
        fs::write(certificates.join("tls.crt"), &leaf.certificate_pem).expect("a file");
        fs::write(certificates.join("tls.key"), leaf.key_pem.as_str()).expect("a file");
        let kubeconfig = dir.join("manager.kubeconfig");
        fs::write(&kubeconfig, server.kubeconfig("manager", Some("system:masters"))).expect("a file");
        let port = free_port();
        let health = free_port();
        let arguments = [
            "-u",
            "KUBERNETES_SERVICE_HOST",
            PROGRAM,
            "--enable-webhook=true",
            "--leader-election=false",
            "--tenant-probe=false",
            "--metrics-auth=false",
            "--log-format=json",
            "--feature-gates=ClusterVersionPartialUpgrade=true",
        ];
        let mut arguments: Vec<_> = arguments.map(str::to_owned).into();
        arguments.extend([
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--webhook-cert-dir={}", certificates.display()),
            format!("--https-addr=127.0.0.1:{port}"),
            format!("--health-addr=127.0.0.1:{health}"),
        ]);
        server.spawn("manager", Path::new("env"), &arguments);
        let this = Self {
            address: format!("127.0.0.1:{port}"),
            ca: authority.certificate_pem().to_owned(),
            kubeconfig: dir.join("kubectl.kubeconfig"),
            server,
        };
        fs::write(
            &this.kubeconfig,
            this.server.kubeconfig("jane", Some("system:masters")),
        )
        .expect("a file");
        this.wait(&format!("127.0.0.1:{health}"));
        this
    }

    /// Makes the manager's namespace, where dry runs go; an installation has it.
    pub fn create_namespace(&self) {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "vc-manager"}});
        let made = self.kubectl(&["create", "-f", "-"], &namespace.to_string());
        assert!(made.ok, "{}", made.text);
    }

    fn wait(&self, address: &str) {
        let deadline = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(address).is_err() {
            assert!(Instant::now() < deadline, "the manager is not up: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Registers the webhooks, as `webhook-config/` does, and waits until the API server asks them.
    pub fn register(&self, reviews: &[&str]) {
        let printed = Command::new(PROGRAM)
            .args(["webhook-config", "--url"])
            .arg(format!("https://{}", self.address))
            .output()
            .expect("the program starts");
        assert!(printed.status.success(), "{printed:?}");
        let text = String::from_utf8(printed.stdout).expect("text");
        let bundle = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &self.ca);
        for document in text.split("\n---\n").skip(1) {
            let mut object: Value = serde_saphyr::from_str(document).expect("YAML");
            for webhook in object["webhooks"].as_array_mut().expect("webhooks") {
                webhook["clientConfig"]["caBundle"] = json!(bundle);
                webhook["admissionReviewVersions"] = json!(reviews);
            }
            let applied = self.kubectl(&["apply", "--server-side", "-f", "-"], &object.to_string());
            assert!(applied.ok, "{}", applied.text);
        }
        // The API server learns of it by a watch.
        let deadline = Instant::now() + PATIENCE;
        let probe = json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "ClusterVersion",
            "metadata": {"name": "probe"}, "spec": {}});
        while self
            .kubectl(&["create", "--dry-run=server", "-f", "-"], &probe.to_string())
            .ok
        {
            assert!(Instant::now() < deadline, "the webhooks are not asked");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs kubectl as the user jane.
    pub fn kubectl(&self, arguments: &[&str], input: &str) -> Printed {
        self.run(arguments, input, &[])
    }

    fn run(&self, arguments: &[&str], input: &str, environment: &[(&str, &str)]) -> Printed {
        let program = std::env::var("VCM_KUBECTL").expect("VCM_KUBECTL names kubectl; run `make test`");
        let mut child = Command::new(program)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--cache-dir")
            .arg(self.server.dir().join("kubectl"))
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        child
            .stdin
            .take()
            .expect("piped")
            .write_all(input.as_bytes())
            .expect("kubectl reads");
        let output = child.wait_with_output().expect("kubectl ends");
        let text = [output.stderr, output.stdout].concat();
        Printed {
            ok: output.status.success(),
            text: String::from_utf8(text).expect("text"),
        }
    }

    /// Runs kubectl edit on a ClusterVersion, with sed for an editor.
    pub fn edit(&self, name: &str, script: &str) -> Printed {
        let editor = self.server.dir().join("editor.sh");
        fs::write(&editor, format!("#!/bin/sh\nsed -i '{script}' \"$1\"\n")).expect("a file");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&editor, mode).expect("a mode");
        self.run(
            &["edit", "clusterversion", name],
            "",
            &[("KUBE_EDITOR", &editor.display().to_string())],
        )
    }

    /// What the manager has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.server.dir().join("manager.log")).unwrap_or_default()
    }

    /// Resident memory of the manager, in KiB.
    pub fn memory(&self) -> u64 {
        let pid = fs::read_to_string(self.server.dir().join("manager.pid")).expect("it was started");
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.trim().strip_suffix(" kB"))
            .and_then(|number| number.trim().parse().ok())
            .expect("a number")
    }
}

/// The definition without the rules that a schema can say, as one from before them.
fn without_rules(definition: CustomResourceDefinition) -> CustomResourceDefinition {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for key in [
                    "x-kubernetes-validations",
                    "minLength",
                    "minimum",
                    "maximum",
                    "pattern",
                    "enum",
                ] {
                    map.remove(key);
                }
                map.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(definition).expect("JSON");
    let schema = &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    strip(schema);
    if value["spec"]["names"]["kind"] == "ClusterVersion" {
        value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] =
            json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    }
    serde_json::from_value(value).expect("a definition")
}

/// The body of a GET over TLS, by curl.
pub fn get(scene: &Webhooked, path: &str) -> String {
    let ca = scene.server.dir().join("webhook/ca.crt");
    fs::write(&ca, &scene.ca).expect("a file");
    let output = Command::new("curl")
        .args([
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "20",
            "--cacert",
        ])
        .arg(&ca)
        .arg(format!("https://{}{path}", scene.address))
        .output()
        .expect("curl is installed");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}
