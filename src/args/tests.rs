use super::*;
use crate::features::Feature;

fn parse_line(line: &[&str]) -> Result<Command, UsageError> {
    parse(line.iter().map(|word| (*word).to_owned()), None)
}

fn config(line: &[&str]) -> ManagerConfig {
    match parse_line(line) {
        Ok(Command::Run(config)) => *config,
        other => panic!("{line:?}: {other:?}"),
    }
}

#[test]
fn clap_finds_no_fault() {
    Cli::command().debug_assert();
}

#[test]
fn defaults() {
    assert_eq!(
        config(&[]),
        ManagerConfig {
            namespace: "vc-manager".into(),
            kubeconfig: None,
            health_addr: Some(ListenAddr::new("", 8080)),
            metrics_addr: None,
            https_addr: Some(ListenAddr::new("", 9443)),
            webhook_cert_dir: None,
            metrics_auth: true,
            enable_webhook: false,
            webhook_ca_validity: Duration::from_hours(8760),
            webhook_cert_validity: Duration::from_hours(720),
            leader_election: true,
            leader_election_name: "vc-manager-leaderelection-lock".into(),
            num_reconciles: 10,
            provisioner_timeout: Duration::from_mins(10),
            kube_api_timeout: Duration::from_secs(15),
            max_starting_tenants: 2,
            max_upgrading_tenants: 10,
            tenant_probe: true,
            max_certificate_life: None,
            leaf_key_algorithm: LeafKeyAlgorithm::EcdsaP256,
            features: FeatureGates::default(),
            log: LogConfig {
                format: LogFormat::Json,
                filter: "info,kube_client::client=off".into(),
                file: None
            },
            warnings: vec![],
        }
    );
}

#[test]
fn booleans_in_every_form_of_go() {
    for (value, expected) in [
        ("true", true),
        ("True", true),
        ("TRUE", true),
        ("t", true),
        ("T", true),
        ("1", true),
        ("false", false),
        ("False", false),
        ("FALSE", false),
        ("f", false),
        ("F", false),
        ("0", false),
    ] {
        for dashes in ["-", "--"] {
            let word = |flag: &str| format!("{dashes}{flag}={value}");
            let config = config(&[
                &word("leader-election"),
                &word("metrics-auth"),
                &word("tenant-probe"),
                &word("enable-webhook"),
                &word("disable-stacktrace"),
            ]);
            assert_eq!(config.leader_election, expected, "{value}");
            assert_eq!(config.metrics_auth, expected);
            assert_eq!(config.tenant_probe, expected);
            assert_eq!(config.enable_webhook, expected);
        }
    }
    assert!(config(&["-enable-webhook"]).enable_webhook);
    assert!(config(&["-leader-election=false", "-leader-election"]).leader_election);
}

#[test]
fn every_flag_in_both_value_forms() {
    let line = [
        ("metrics-addr", "127.0.0.1:9101"),
        ("health-addr", ":9102"),
        ("https-addr", "[::1]:9103"),
        ("webhook-cert-dir", "/certs"),
        ("webhook-ca-validity", "48h"),
        ("webhook-cert-validity", "90m"),
        ("provisioner", "native"),
        ("leader-elect-resource-name", "lock"),
        ("leader-elect-resource-lock", "leases"),
        ("num-reconciles", "5"),
        ("max-starting-tenants", "3"),
        ("max-upgrading-tenants", "4"),
        ("leaf-key-algorithm", "rsa-2048"),
        ("provisioner-timeout", "1h30m"),
        ("kube-api-timeout", "1.5s"),
        ("feature-gates", "ClusterVersionPartialUpgrade=true"),
        ("feature-gates", "SuperClusterLabelling=1"),
        ("kubeconfig", "/k"),
        ("namespace", "ns"),
        ("log-file", "/log"),
        ("log-format", "text"),
        ("log-level", "info,vc_manager=debug"),
    ];
    let separate: Vec<String> = line
        .iter()
        .flat_map(|(flag, value)| [format!("-{flag}"), (*value).to_owned()])
        .collect();
    let joined: Vec<String> = line
        .iter()
        .map(|(flag, value)| format!("--{flag}={value}"))
        .collect();
    let expected = ManagerConfig {
        namespace: "ns".into(),
        kubeconfig: Some("/k".into()),
        health_addr: Some(ListenAddr::new("", 9102)),
        metrics_addr: Some(ListenAddr::new("127.0.0.1", 9101)),
        https_addr: Some(ListenAddr::new("::1", 9103)),
        webhook_cert_dir: Some("/certs".into()),
        webhook_ca_validity: Duration::from_hours(48),
        webhook_cert_validity: Duration::from_mins(90),
        leader_election_name: "lock".into(),
        num_reconciles: 5,
        provisioner_timeout: Duration::from_mins(90),
        kube_api_timeout: Duration::from_millis(1500),
        max_starting_tenants: 3,
        max_upgrading_tenants: 4,
        leaf_key_algorithm: LeafKeyAlgorithm::Rsa2048,
        features: FeatureGates::default()
            .with(Feature::ClusterVersionPartialUpgrade, true)
            .with(Feature::SuperClusterLabelling, true),
        log: LogConfig {
            format: LogFormat::Text,
            filter: "info,vc_manager=debug".into(),
            file: Some("/log".into()),
        },
        ..config(&[])
    };
    for words in [separate, joined] {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(config(&words), expected);
    }
}

#[test]
fn listeners_turned_off() {
    for off in ["", "0"] {
        let config = config(&[
            &format!("--metrics-addr={off}"),
            &format!("--health-addr={off}"),
            &format!("--https-addr={off}"),
        ]);
        assert_eq!(
            (config.metrics_addr, config.health_addr, config.https_addr),
            (None, None, None)
        );
    }
}

#[test]
fn deprecated_aliases_win() {
    assert_eq!(
        config(&["-le-cm-name=old", "-leader-elect-resource-name=new"]).leader_election_name,
        "old"
    );
    config(&["-provisioner=capi", "-master-prov=native"]);
    let error = parse_line(&["-master-prov=aliyun", "-provisioner=native"]).unwrap_err();
    assert_eq!(
        error.message,
        "provisioner \"aliyun\" is not implemented; only \"native\" is"
    );
}

#[test]
fn namespace_order() {
    let namespace = |line: &[&str], pod: Option<&str>| match parse(
        line.iter().map(|word| (*word).to_owned()),
        pod.map(str::to_owned),
    ) {
        Ok(Command::Run(config)) => config.namespace,
        other => panic!("{other:?}"),
    };
    assert_eq!(namespace(&[], None), "vc-manager");
    assert_eq!(namespace(&[], Some("pod")), "pod");
    assert_eq!(namespace(&["--namespace=flag"], Some("pod")), "flag");
}

#[test]
fn only_the_configmap_lock_warns() {
    assert_eq!(config(&["--enable-webhook"]).warnings.len(), 0);
    assert_eq!(config(&["--leader-elect-resource-lock=leases"]).warnings.len(), 0);
    assert_eq!(
        config(&["--leader-elect-resource-lock=configmapsleases"])
            .warnings
            .len(),
        0
    );
    assert_eq!(
        config(&["--leader-elect-resource-lock=configmaps"])
            .warnings
            .len(),
        1
    );
}

#[test]
fn other_commands() {
    assert_eq!(parse_line(&["crds"]), Ok(Command::Crds));
    assert_eq!(parse_line(&["-leader-election=false", "crds"]), Ok(Command::Crds));
    assert_eq!(parse_line(&["--version"]), Ok(Command::Version));
    let webhooks = |namespace: &str, url: Option<&str>, cert_manager| {
        Ok(Command::WebhookConfig(WebhookConfig {
            namespace: namespace.into(),
            url: url.map(Into::into),
            cert_manager,
        }))
    };
    assert_eq!(
        parse_line(&["webhook-config"]),
        webhooks("vc-manager", None, false)
    );
    assert_eq!(
        parse_line(&["webhook-config", "--namespace", "ns", "--cert-manager"]),
        webhooks("ns", None, true)
    );
    assert_eq!(
        parse_line(&["webhook-config", "--url=https://[::1]:9443/"]),
        webhooks("vc-manager", Some("https://[::1]:9443"), false)
    );
    assert_eq!(
        parse_line(&["-version=true", "-provisioner=capi"]),
        Ok(Command::Version)
    );
    config(&["-version=false"]);
    for help in ["-h", "--help", "-help"] {
        match parse_line(&[help]) {
            Ok(Command::Help(text)) => assert!(
                text.contains("--feature-gates") && text.contains("crds"),
                "{text}"
            ),
            other => panic!("{other:?}"),
        }
    }
}

/// Command lines, the exit code, and the line on stderr.
const ERRORS: &[(&[&str], u8, &str)] = &[
    (&["-nope"], 2, "flag provided but not defined: -nope"),
    (&["-num-reconciles"], 2, "flag needs an argument: -num-reconciles"),
    (
        &["-num-reconciles=x"],
        2,
        "invalid value \"x\" for flag -num-reconciles: parse error",
    ),
    (
        &["-num-reconciles=0"],
        2,
        "invalid value \"0\" for flag -num-reconciles: must be at least 1",
    ),
    (
        &["-num-reconciles", "-5"],
        2,
        "invalid value \"-5\" for flag -num-reconciles: must be at least 1",
    ),
    (
        &["-num-reconciles=70000"],
        2,
        "invalid value \"70000\" for flag -num-reconciles: value out of range",
    ),
    (
        &["-num-reconciles="],
        2,
        "invalid value \"\" for flag -num-reconciles: parse error",
    ),
    (
        &["-num-reconciles=99999999999999999999"],
        2,
        "invalid value \"99999999999999999999\" for flag -num-reconciles: value out of range",
    ),
    (
        &["-leader-election=no"],
        2,
        "invalid boolean value \"no\" for -leader-election: parse error",
    ),
    (
        &["-leader-election="],
        2,
        "invalid boolean value \"\" for -leader-election: parse error",
    ),
    (
        &["-leader-election", "false"],
        2,
        "unexpected argument \"false\": a boolean flag takes its value as -leader-election=false",
    ),
    (
        &["-provisioner-timeout=10"],
        2,
        "invalid value \"10\" for flag -provisioner-timeout: parse error",
    ),
    (
        &["-kube-api-timeout=0"],
        2,
        "invalid value \"0\" for flag -kube-api-timeout: must be greater than 0",
    ),
    (
        &["-kube-api-timeout=-1s"],
        2,
        "invalid value \"-1s\" for flag -kube-api-timeout: must not be negative",
    ),
    (
        &["-health-addr=8080"],
        2,
        "invalid value \"8080\" for flag -health-addr: missing port in address",
    ),
    (
        &["-leaf-key-algorithm=dsa"],
        2,
        "invalid value \"dsa\" for flag -leaf-key-algorithm: must be one of ecdsa-p256, rsa-2048",
    ),
    (
        &["-leader-elect-resource-lock=endpoints"],
        2,
        "invalid value \"endpoints\" for flag -leader-elect-resource-lock: must be one of configmaps, leases, configmapsleases",
    ),
    (
        &["-log-level=a=b=c"],
        2,
        "invalid value \"a=b=c\" for flag -log-level: error parsing level filter: expected one of \"off\", \
             \"error\", \"warn\", \"info\", \"debug\", \"trace\", or a number 0-5",
    ),
    (&["run"], 2, "unexpected argument \"run\""),
    (&["crds", "x"], 2, "unexpected argument \"x\""),
    (
        &["webhook-config", "--namespace=It's"],
        2,
        "invalid value \"It's\" for flag -namespace: must be the name of a namespace",
    ),
    (
        &["webhook-config", "--url", "http://host:9443"],
        2,
        "invalid value \"http://host:9443\" for flag -url: must be https://host:port",
    ),
    (
        &["webhook-config", "--url=https://host:9443/path"],
        2,
        "invalid value \"https://host:9443/path\" for flag -url: must be https://host:port",
    ),
    (&["crds", "--x"], 2, "unexpected argument \"--x\""),
    (&["--", "x"], 2, "unexpected argument \"x\""),
    (
        &["-feature-gates=SuperClusterPooling"],
        2,
        "invalid value \"SuperClusterPooling\" for flag -feature-gates: malformed pair, expect string=bool",
    ),
    (
        &[
            "-feature-gates=SuperClusterPooling=true",
            "-feature-gates",
            "SuperClusterPooling=x",
        ],
        2,
        "invalid value \"SuperClusterPooling=x\" for flag -feature-gates: invalid value of SuperClusterPooling: x, \
             err: strconv.ParseBool: parsing \"x\": invalid syntax",
    ),
    (
        &["-feature-gates=Nope=true"],
        1,
        "unrecognized feature-gate key: Nope",
    ),
    (
        &["-provisioner=capi"],
        1,
        "provisioner \"capi\" is not implemented; only \"native\" is",
    ),
    (
        &["-provisioner=x"],
        1,
        "virtualcluster provisioner missing: \"x\" is unknown",
    ),
    (
        &["-webhook-cert-validity=4s"],
        2,
        "invalid value \"4s\" for flag -webhook-cert-validity: must be at least 5s",
    ),
    (
        &["-webhook-ca-validity=876001h"],
        2,
        "invalid value \"876001h\" for flag -webhook-ca-validity: must be at most 876000h",
    ),
    (
        &["-webhook-cert-validity=1h", "-webhook-ca-validity=60m"],
        1,
        "-webhook-cert-validity must be shorter than -webhook-ca-validity",
    ),
    (
        &["-enable-webhook", "-https-addr=0"],
        1,
        "-enable-webhook needs an -https-addr",
    ),
    (
        &["-leader-elect-resource-name="],
        1,
        "leader election needs a -leader-elect-resource-name",
    ),
];

#[test]
fn errors() {
    for (line, exit_code, message) in ERRORS {
        let error = parse_line(line).unwrap_err();
        assert_eq!(
            (error.message.as_str(), error.exit_code),
            (*message, *exit_code),
            "{line:?}"
        );
        assert_eq!(error.message.lines().count(), 1);
    }
}

proptest::proptest! {
    #[test]
    fn never_panics(words in proptest::collection::vec("-{0,3}[a-z]{0,3}(leader-election|num-reconciles|feature-gates|health-addr|log-level)?=?[^\\x00]{0,8}", 0..4)) {
        if let Err(error) = parse(words, None) {
            proptest::prop_assert!(error.exit_code != 0);
        }
    }
}
