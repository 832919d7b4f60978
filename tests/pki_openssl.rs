//! OpenSSL as an outside judge of the tenant PKI: what this crate makes, OpenSSL must accept; what OpenSSL or the Go
//! implementation makes, this crate must accept.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests may fail loudly"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tempfile::TempDir;
use vc_manager::pki::{
    Authority, CertificateInfo, CertifiedPair, EtcdNames, KeyAlgorithm, Leaf, PkiError, TenantNames,
    Validity, kubeconfig, request, service_account,
};

fn tenant() -> TenantNames {
    TenantNames {
        cluster_key: "ns-fd1b34-name".into(),
        cluster_domain: "cluster.local".into(),
        virtual_cluster: "name".into(),
        api_server_service: "apiserver-svc".into(),
        api_server_ip: Some("10.96.29.243".parse().unwrap()),
        external_domain: Some("name.example.com".into()),
        etcd: Some(EtcdNames {
            statefulset: "etcd".into(),
            service: "etcd".into(),
            replicas: 2,
        }),
    }
}

/// A directory to lay files down in and run `openssl` on them.
struct Judge(TempDir);

impl Judge {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).unwrap()
    }

    /// Runs `openssl` with words split at spaces; its output, or what it complained of.
    fn run(&self, arguments: &str) -> Result<String, String> {
        let output = Command::new("openssl")
            .args(arguments.split(' '))
            .current_dir(self.0.path())
            .output()
            .expect("openssl is installed");
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        if output.status.success() {
            Ok(text)
        } else {
            Err(text)
        }
    }

    fn accepts(&self, arguments: &str) -> String {
        self.run(arguments)
            .unwrap_or_else(|complaint| panic!("openssl {arguments}: {complaint}"))
    }
}

#[test]
fn openssl_accepts_the_root_and_every_leaf_for_its_purposes_only() {
    let judge = Judge::new();
    let now = Timestamp::now();
    let (authority, root) = Authority::create(now).unwrap();
    judge.write("root.crt", &root.certificate_pem);
    judge.write("root.key", &root.key_pem);
    judge.accepts("verify -x509_strict -CAfile root.crt root.crt");
    judge.accepts("rsa -in root.key -check -noout");
    let text = judge.accepts("x509 -in root.crt -noout -text");
    for part in [
        "Public-Key: (2048 bit)",
        "Signature Algorithm: sha256WithRSAEncryption",
        "Digital Signature, Key Encipherment, Certificate Sign\n",
        "CA:TRUE\n",
        "X509v3 Subject Key Identifier:",
        "O = kubernetes-sig.kubernetes-sigs/multi-tenancy.virtualcluster, CN = kubernetes\n",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }

    for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
        for leaf in Leaf::ALL {
            let wanted = request(leaf, &tenant()).unwrap();
            let pair = authority
                .issue(&wanted, algorithm, Validity::default(), now)
                .unwrap();
            judge.write("leaf.crt", &pair.certificate_pem);
            judge.write("leaf.key", &pair.key_pem);
            judge.accepts("verify -CAfile root.crt -purpose sslclient leaf.crt");
            let serves = judge.run("verify -CAfile root.crt -purpose sslserver leaf.crt");
            assert_eq!(
                serves.is_ok(),
                matches!(leaf, Leaf::ApiServer | Leaf::Etcd),
                "{leaf}: {serves:?}"
            );
            judge.accepts("pkey -in leaf.key -check -noout");
            let public = judge.accepts("pkey -in leaf.key -pubout");
            assert_eq!(
                public,
                judge.accepts("x509 -in leaf.crt -noout -pubkey"),
                "{leaf}"
            );
            let text = judge.accepts("x509 -in leaf.crt -noout -text");
            assert!(text.contains("X509v3 Authority Key Identifier"), "{text}");
            assert!(!text.contains("Basic Constraints"), "{text}");
            if algorithm == KeyAlgorithm::Rsa2048 {
                assert!(pair.key_pem.starts_with("-----BEGIN RSA PRIVATE KEY-----"));
                judge.accepts("rsa -in leaf.key -check -noout");
            }
        }
    }
}

#[test]
fn openssl_reads_the_names_of_the_contract() {
    let judge = Judge::new();
    let now = Timestamp::now();
    let (authority, root) = Authority::create(now).unwrap();
    judge.write("root.crt", &root.certificate_pem);
    let names = |leaf| {
        let wanted = request(leaf, &tenant()).unwrap();
        let pair = authority
            .issue(&wanted, KeyAlgorithm::default(), Validity::default(), now)
            .unwrap();
        judge.write("leaf.crt", &pair.certificate_pem);
        judge.accepts("x509 -in leaf.crt -noout -subject -ext subjectAltName")
    };
    assert_eq!(
        names(Leaf::ApiServer),
        "subject=CN = ns-fd1b34-name\nX509v3 Subject Alternative Name: \n    DNS:kubernetes, DNS:kubernetes.default, \
         DNS:kubernetes.default.svc, DNS:kubernetes.default.svc.cluster.local, DNS:apiserver-svc.ns-fd1b34-name, \
         DNS:name, DNS:name.example.com, IP Address:10.96.29.243\n"
    );
    judge.accepts("verify -CAfile root.crt -verify_ip 10.96.29.243 leaf.crt");
    judge.accepts("verify -CAfile root.crt -verify_hostname apiserver-svc.ns-fd1b34-name leaf.crt");
    judge
        .run("verify -CAfile root.crt -verify_hostname other leaf.crt")
        .unwrap_err();
    assert_eq!(
        names(Leaf::Etcd),
        "subject=CN = kube-etcd\nX509v3 Subject Alternative Name: \n    DNS:etcd-0.etcd, DNS:etcd-1.etcd, DNS:etcd, \
         DNS:etcd-0.etcd.ns-fd1b34-name, DNS:etcd-1.etcd.ns-fd1b34-name, DNS:etcd.ns-fd1b34-name, \
         IP Address:127.0.0.1\n"
    );
    assert!(names(Leaf::Admin).starts_with("subject=O = system:masters, CN = admin\n"));
    assert!(names(Leaf::ControllerManager).starts_with("subject=CN = system:kube-controller-manager\n"));
    assert!(names(Leaf::FrontProxy).starts_with("subject=CN = front-proxy-client\n"));
}

#[test]
fn openssl_reads_the_service_account_pair() {
    let judge = Judge::new();
    let pair = service_account::generate().unwrap();
    judge.write("sa.pub", &pair.certificate_pem);
    judge.write("sa.key", &pair.key_pem);
    judge.accepts("rsa -in sa.key -check -noout");
    assert_eq!(judge.accepts("pkey -in sa.key -pubout"), pair.certificate_pem);
    assert!(
        judge
            .accepts("pkey -pubin -in sa.pub -noout -text")
            .contains("(2048 bit)")
    );
}

#[test]
fn roots_made_elsewhere_are_loaded_whatever_their_key_format() {
    let judge = Judge::new();
    // As older client-go versions make them: serial 0, no subject key identifier.
    judge.write(
        "go.cnf",
        "[req]\ndistinguished_name=dn\nprompt=no\nx509_extensions=ca\n[dn]\nO=kubernetes-sig.kubernetes-sigs\nCN=kubernetes\n\
         [ca]\nkeyUsage=critical,digitalSignature,keyEncipherment,keyCertSign\nbasicConstraints=critical,CA:TRUE\n\
         subjectKeyIdentifier=none\n",
    );
    judge.accepts("genrsa -traditional -out rsa-pkcs1.key 2048");
    judge.accepts("pkcs8 -topk8 -nocrypt -in rsa-pkcs1.key -out rsa-pkcs8.key");
    judge.accepts("ecparam -genkey -name prime256v1 -out ec-sec1.key");
    judge.accepts("pkcs8 -topk8 -nocrypt -in ec-sec1.key -out ec-pkcs8.key");
    judge.accepts("ecparam -genkey -name secp384r1 -noout -out ec384.key");
    for key in [
        "rsa-pkcs1.key",
        "rsa-pkcs8.key",
        "ec-sec1.key",
        "ec-pkcs8.key",
        "ec384.key",
    ] {
        judge.accepts(&format!(
            "req -x509 -new -key {key} -set_serial 0 -days 30 -config go.cnf -out root.crt"
        ));
        let text = judge.accepts("x509 -in root.crt -noout -text");
        assert!(
            text.contains("Serial Number: 0 (0x0)") && !text.contains("Subject Key Identifier"),
            "{text}"
        );
        let now = Timestamp::now();
        let authority = Authority::load(&judge.read("root.crt"), &judge.read(key), now).expect(key);
        let wanted = request(Leaf::ApiServer, &tenant()).unwrap();
        let leaf = authority
            .issue(&wanted, KeyAlgorithm::default(), Validity::default(), now)
            .unwrap();
        assert_eq!(
            CertificateInfo::parse(&leaf.certificate_pem).unwrap().not_after,
            authority.not_after()
        );
        judge.write("leaf.crt", &leaf.certificate_pem);
        judge.accepts("verify -CAfile root.crt -purpose sslserver leaf.crt");
    }
}

#[test]
fn roots_that_could_not_serve_are_refused() {
    let judge = Judge::new();
    judge.accepts("ecparam -genkey -name prime256v1 -noout -out key");
    let load = |subject: &str, options: &str| {
        judge.write("empty.cnf", "[req]\ndistinguished_name=dn\n[dn]\n");
        judge.accepts(&format!(
            "req -x509 -new -key key -days 30 -config empty.cnf -subj {subject} -out root.crt {options}"
        ));
        Authority::load(&judge.read("root.crt"), &judge.read("key"), Timestamp::now())
    };
    let ca = "-addext basicConstraints=critical,CA:TRUE";
    load("/CN=ca", ca).unwrap();
    assert!(matches!(
        load("/CN=ca/O=one/O=two", ca),
        Err(PkiError::SubjectUnsupported)
    ));
    assert!(matches!(
        load("/CN=ca+O=one", &format!("{ca} -multivalue-rdn")),
        Err(PkiError::SubjectUnsupported)
    ));
    let no_ca = "-addext basicConstraints=critical,CA:FALSE";
    assert!(matches!(
        load("/CN=ca", no_ca),
        Err(PkiError::NotACertificateAuthority)
    ));
    let no_sign = format!("{ca} -addext keyUsage=critical,digitalSignature");
    assert!(matches!(load("/CN=ca", &no_sign), Err(PkiError::MayNotSign)));
    judge.accepts("pkcs8 -topk8 -in key -out encrypted -passout pass:secret");
    let error = Authority::load(
        &judge.read("root.crt"),
        &judge.read("encrypted"),
        Timestamp::now(),
    )
    .unwrap_err();
    assert!(matches!(error, PkiError::KeyUnreadable { .. }), "{error}");
}

/// Objects a Go manager left behind, if the machine has them: `VCM_COMPAT_DIR` or `../shared/compat`.
fn left_by_go(file: &str) -> Option<String> {
    let directory = std::env::var_os("VCM_COMPAT_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/compat"),
        PathBuf::from,
    );
    let path = directory.join("left-by-upstream").join(file);
    let text = std::fs::read_to_string(&path).ok();
    if text.is_none() {
        println!("{} is not there: nothing to check", path.display());
    }
    text
}

/// The Secrets in a multi-document YAML file or a List, by name.
fn secrets(text: &str) -> BTreeMap<String, BTreeMap<String, Vec<u8>>> {
    use base64::Engine;
    let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(text).unwrap();
    let items = documents
        .iter()
        .flat_map(|document| match document["items"].as_array() {
            Some(items) => items.iter().collect(),
            None => vec![document],
        });
    items
        .filter(|item| item["kind"] == "Secret")
        .map(|secret| {
            let data = secret["data"].as_object().unwrap().iter();
            let decode = |value: &serde_json::Value| {
                base64::engine::general_purpose::STANDARD
                    .decode(value.as_str().unwrap())
                    .unwrap()
            };
            let name = secret["metadata"]["name"].as_str().unwrap().to_owned();
            (
                name,
                data.map(|(key, value)| (key.clone(), decode(value))).collect(),
            )
        })
        .collect()
}

#[test]
fn what_the_go_manager_left_is_taken_over() {
    let Some(text) = left_by_go("running-clusterip.yaml") else {
        return;
    };
    let secrets = secrets(&text);
    let pair = |name: &str| CertifiedPair::from_tls_data(name, &secrets[name]).unwrap();
    let root = pair("root-ca");
    let made = CertificateInfo::parse(&root.certificate_pem).unwrap().not_before;
    let now = made + SignedDuration::from_hours(24);
    let authority = Authority::load(&root.certificate_pem, &root.key_pem, now).unwrap();

    for name in ["apiserver-ca", "etcd-ca", "front-proxy-ca"] {
        let leaf = pair(name);
        let info = CertificateInfo::parse(&leaf.certificate_pem).unwrap();
        assert!(
            info.is_issued_by(&authority) && info.matches_key(&leaf.key_pem),
            "{name}"
        );
    }
    service_account::check(&pair("serviceaccount-rsa")).unwrap();
    for name in ["admin-kubeconfig", "controller-manager-kubeconfig"] {
        let config = kubeconfig::parse(std::str::from_utf8(&secrets[name][name]).unwrap()).unwrap();
        let info = CertificateInfo::parse(&config.client.certificate_pem).unwrap();
        assert!(
            info.is_issued_by(&authority) && info.matches_key(&config.client.key_pem),
            "{name}"
        );
        assert_eq!(config.ca_pem, root.certificate_pem);
    }

    // The names this crate would ask for are those the Go manager put in.
    let names = TenantNames {
        cluster_key: "bench-7b0b2f-f1".into(),
        cluster_domain: String::new(),
        virtual_cluster: "f1".into(),
        api_server_service: "apiserver-svc".into(),
        api_server_ip: Some("10.96.29.243".parse().unwrap()),
        external_domain: None,
        etcd: Some(EtcdNames {
            statefulset: "etcd".into(),
            service: "etcd".into(),
            replicas: 1,
        }),
    };
    for leaf in [Leaf::ApiServer, Leaf::Etcd, Leaf::FrontProxy] {
        let info = CertificateInfo::parse(&pair(leaf.secret_name()).certificate_pem).unwrap();
        let wanted = request(leaf, &names).unwrap();
        assert!(info.satisfies(&wanted), "{leaf}: {info:?}\n{wanted:?}");
        assert_eq!(info.dns_names, wanted.dns_names, "{leaf}: same order");
    }

    let wanted = request(Leaf::ApiServer, &names).unwrap();
    let leaf = authority
        .issue(&wanted, KeyAlgorithm::default(), Validity::default(), now)
        .unwrap();
    let judge = Judge::new();
    judge.write("root.crt", &root.certificate_pem);
    judge.write("leaf.crt", &leaf.certificate_pem);
    let at = now.as_second();
    judge.accepts(&format!(
        "verify -attime {at} -CAfile root.crt -purpose sslserver leaf.crt"
    ));
    judge.accepts(&format!(
        "verify -attime {at} -CAfile root.crt -purpose sslclient leaf.crt"
    ));
}

#[test]
fn kubeconfigs_the_go_manager_left_lose_their_brackets() {
    let Some(text) = left_by_go("pending-nodeport-kubeconfig.yaml") else {
        return;
    };
    let secrets = secrets(&text);
    for name in ["admin-kubeconfig", "controller-manager-kubeconfig"] {
        let Some(data) = secrets.get(name) else { continue };
        let server = kubeconfig::parse(std::str::from_utf8(&data[name]).unwrap())
            .unwrap()
            .server;
        assert!(
            server.starts_with("https://apiserver-svc.") && server.ends_with(":6443"),
            "{server}"
        );
    }
}
