//! Provisioning and deletion on a real API server: the objects, names, certificates and statuses of the contract
//! with the Go manager.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use k8s_openapi::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{Namespace, Secret, Service},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{
        ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
        PostParams,
    },
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use vc_manager::{
    api::{
        ClusterVersion, FIELD_MANAGER, VirtualCluster, VirtualClusterSpec, crd::crds, labels, root_namespace,
        virtual_cluster::phase,
    },
    args::{self, Command},
    controller::{Setup, run},
    metrics::Metrics,
    pki::{self, Authority, CertificateInfo, kubeconfig},
};

use support::{
    ApiServer, Driver, Manager, Options, Recorder, Scope, condition, data, eventually, root_of, samples,
    templates, tuples,
};

const SECRETS: [&str; 7] = [
    "root-ca",
    "apiserver-ca",
    "etcd-ca",
    "front-proxy-ca",
    "controller-manager-kubeconfig",
    "admin-kubeconfig",
    "serviceaccount-rsa",
];

fn rv(object: &impl kube::Resource) -> u64 {
    object
        .meta()
        .resource_version
        .as_deref()
        .unwrap()
        .parse()
        .unwrap()
}

/// The flow of the Go manager's own suite (U1 to U14), from the ClusterVersion to the end of both objects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::too_many_lines, reason = "it is one flow")]
async fn the_life_of_a_tenant() {
    let scope = Scope::new("life").await;
    let driver = Driver::start(&scope);
    let spec = VirtualClusterSpec {
        cluster_version_name: "life".into(),
        ..VirtualClusterSpec::default()
    };
    let mut tenant = VirtualCluster::new("", spec);
    tenant.metadata.name = None;
    tenant.metadata.generate_name = Some("vc-".into());
    let name = scope
        .tenants()
        .create(&PostParams::default(), &tenant)
        .await
        .unwrap()
        .name_any();
    for set in ["etcd", "apiserver", "controller-manager"] {
        driver.hold(&name, set);
    }
    let sets = Recorder::<StatefulSet>::start(Api::all(scope.client.clone())).await;
    scope
        .create_cluster_version("life", templates::full("ClusterIP"))
        .await;
    let _manager = Manager::start(&scope, Options::default());

    let versions = scope.cluster_versions();
    eventually("the finalizer of the ClusterVersion", async || {
        let finalizers = versions.get("life").await.unwrap().finalizers().to_vec();
        (finalizers == ["clusterVersion.finalizers"]).then_some(())
    })
    .await;
    let tenant = scope
        .when(&name, "pending", |tenant| tenant.phase() == phase::PENDING)
        .await;
    assert_eq!(tenant.finalizers(), ["virtualcluster.finalizer.native"]);
    let root = root_of(&tenant);
    assert_eq!(root, root_namespace::name("life", &name, &tenant.uid().unwrap()));

    // One after the other: nothing of the next component before the last one is ready.
    let mut there = BTreeSet::new();
    for set in ["etcd", "apiserver", "controller-manager"] {
        there.insert(set.to_owned());
        eventually("the StatefulSet to be seen by its controller", async || {
            scope
                .api::<StatefulSet>(&root)
                .get_opt(set)
                .await
                .unwrap()?
                .status?
                .observed_generation
        })
        .await;
        let all = scope
            .api::<StatefulSet>(&root)
            .list(&ListParams::default())
            .await
            .unwrap();
        assert_eq!(
            all.iter().map(ResourceExt::name_any).collect::<BTreeSet<_>>(),
            there
        );
        assert_eq!(scope.tenant(&name).await.phase(), phase::PENDING);
        if set == "etcd" {
            let namespace: Namespace = Api::all(scope.client.clone()).get(&root).await.unwrap();
            let annotations = namespace.annotations();
            for (key, value) in [
                ("tenancy.x-k8s.io/vcname", name.as_str()),
                ("tenancy.x-k8s.io/vcnamespace", "life"),
                ("tenancy.x-k8s.io/vcuid", &tenant.uid().unwrap()),
                ("tenancy.x-k8s.io/vcrootns", "true"),
            ] {
                assert_eq!(annotations.get(key).map(String::as_str), Some(value), "{key}");
            }
            for service in ["apiserver-svc", "etcd"] {
                scope.get::<Service>(&root, service).await;
            }
            let secrets = scope.secrets(&root).await;
            assert_eq!(
                secrets.keys().map(String::as_str).collect::<BTreeSet<_>>(),
                SECRETS.into()
            );
        }
        driver.release(&name, set);
    }
    let tenant = scope.settled(&name).await;
    let applied = tenant.labels()["tenancy.x-k8s.io/cluster-version-applied"].clone();
    assert_eq!(
        Some(applied),
        versions.get("life").await.unwrap().resource_version()
    );
    let states = sets.states();
    let first = |set: &str, ready: i32| {
        let of_it = states
            .iter()
            .filter(|state| state.name_any() == set && state.namespace().as_deref() == Some(&root));
        let is_ready = |state: &&StatefulSet| {
            state
                .status
                .as_ref()
                .and_then(|status| status.ready_replicas)
                .unwrap_or(0)
                >= ready
        };
        of_it.filter(is_ready).map(rv).min().unwrap()
    };
    assert!(
        first("etcd", 1) < first("apiserver", 0) && first("apiserver", 1) < first("controller-manager", 0)
    );

    // Another field manager edits the ClusterVersion, and another yet labels the tenant.
    let mut content = templates::full("ClusterIP");
    templates::verbosity(&mut content, 7);
    content["apiServer"]["service"]["metadata"]["labels"] = json!({"test-label": "test"});
    let edited = json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "ClusterVersion",
        "metadata": {"name": "life"}, "spec": content});
    versions
        .patch(
            "life",
            &PatchParams::apply("editor").force(),
            &Patch::Apply(edited),
        )
        .await
        .unwrap();
    let label = json!({"apiVersion": "tenancy.x-k8s.io/v1alpha1", "kind": "VirtualCluster", "metadata": {
        "name": name, "namespace": "life", "labels": {"tenancy.x-k8s.io/ready-for-upgrade": "true"}}});
    scope
        .tenants()
        .patch(&name, &PatchParams::apply("operator"), &Patch::Apply(label))
        .await
        .unwrap();
    scope
        .ended_with(&name, "TenantControlPlaneUpgradeCompleted")
        .await;
    assert_eq!(
        scope.get::<Service>(&root, "apiserver-svc").await.labels()["test-label"],
        "test"
    );
    for set in ["apiserver", "controller-manager"] {
        let set: StatefulSet = scope.get(&root, set).await;
        let container = &set.spec.unwrap().template.spec.unwrap().containers[0];
        assert_eq!(container.args.as_ref().unwrap()[0], "-v=7");
    }

    // A ClusterVersion in use stays until its last tenant is gone.
    versions.delete("life", &DeleteParams::default()).await.unwrap();
    scope.delete(&name).await;
    let namespaces: Api<Namespace> = Api::all(scope.client.clone());
    assert!(
        namespaces.get_opt(&root).await.unwrap().is_none(),
        "the finalizer goes after the namespace"
    );
    eventually("the ClusterVersion to be gone", async || {
        versions.get_opt("life").await.unwrap().is_none().then_some(())
    })
    .await;
    eventually("its revisions to be gone", async || {
        scope.revisions().await.is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_version_in_use_is_kept() {
    let (scope, _driver, _manager) =
        Scope::with_manager("used", Options::default(), templates::full("ClusterIP")).await;
    scope.provision("user").await;
    scope
        .cluster_versions()
        .delete("used", &DeleteParams::default())
        .await
        .unwrap();
    // A second tenant comes up from it all the same: until it is gone it is there.
    scope.provision("latecomer").await;
    let kept = scope.cluster_versions().get("used").await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_some());
    assert_eq!(kept.finalizers(), ["clusterVersion.finalizers"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statuses_are_those_of_the_go_manager_in_its_order() {
    let scope = Scope::new("tuples").await;
    let record = Recorder::start(scope.tenants()).await;
    let _driver = Driver::start(&scope);
    let _manager = Manager::start(&scope, Options::default());
    scope
        .create_cluster_version("tuples", templates::full("ClusterIP"))
        .await;
    let tenant = scope.provision("one").await;
    let expected = [
        ("Pending", "retry: 3", "ClusterCreating"),
        (
            "Running",
            "tenant control plane is running",
            "TenantControlPlaneRunning",
        ),
    ];
    assert_tuples(&record, "one", &expected).await;
    let ready = condition(&tenant, "Ready");
    assert_eq!(
        (ready.status.as_str(), ready.reason.as_deref()),
        ("True", Some("Running"))
    );
    let status = tenant.status.as_ref().unwrap();
    assert_eq!(status.observed_generation, tenant.metadata.generation);
    assert!(status.provisioning.is_none());
    // It is pinned to a revision that holds the ClusterVersion's content, and is owned by it.
    let pin = tenant.pin().unwrap();
    let revisions = scope.revisions().await;
    assert_eq!(
        revisions.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
        [pin]
    );
    let version = scope.cluster_versions().get("tuples").await.unwrap();
    assert_eq!(
        revisions[0].data.as_ref().unwrap().0,
        templates::full("ClusterIP")
    );
    assert_eq!(revisions[0].owner_references()[0].uid, version.uid().unwrap());
    eventually("the revision in the ClusterVersion's status", async || {
        let status = scope.cluster_versions().get("tuples").await.unwrap().status?;
        (status.revision.as_deref() == Some(pin)).then_some(())
    })
    .await;
    // The status never named a state it was not in: the admin's kubeconfig was there before Running.
    let running = record
        .states()
        .iter()
        .find(|state| state.phase() == phase::RUNNING)
        .map(rv)
        .unwrap();
    let admin: Secret = scope.get(&root_of(&tenant), "admin-kubeconfig").await;
    assert!(rv(&admin) < running);
}

/// The record may be a moment behind.
async fn assert_tuples(record: &Recorder<VirtualCluster>, name: &str, expected: &[(&str, &str, &str)]) {
    let seen = eventually("the last state to be recorded", async || {
        let seen = tuples(&record.states(), name);
        (seen.len() >= expected.len()).then_some(seen)
    })
    .await;
    let seen: Vec<_> = seen
        .iter()
        .map(|(phase, message, reason)| (phase.as_str(), message.as_str(), reason.as_str()))
        .collect();
    assert_eq!(seen, expected);
}

/// Secrets, certificates and kubeconfigs, read back from the API server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_with_a_cluster_ip() {
    let scope = Scope::new("creds").await;
    let _driver = Driver::start(&scope);
    let _manager = Manager::start(&scope, Options::default());
    let mut content = templates::full("ClusterIP");
    content["etcd"]["statefulset"]["spec"]["replicas"] = json!(3);
    scope.create_cluster_version("creds", content).await;
    let spec = json!({"clusterVersionName": "creds", "clusterDomain": "tenant.example", "pkiExpireDays": 30});
    let mut tenant = VirtualCluster::new("one", serde_json::from_value(spec).unwrap());
    tenant
        .labels_mut()
        .insert(labels::EXTERNAL_APISERVER_DOMAIN.into(), "one.example.com".into());
    scope
        .tenants()
        .create(&PostParams::default(), &tenant)
        .await
        .unwrap();
    let tenant = scope.settled("one").await;
    let root = root_of(&tenant);
    let ip = scope
        .get::<Service>(&root, "apiserver-svc")
        .await
        .spec
        .unwrap()
        .cluster_ip
        .unwrap();
    let address: IpAddr = ip.parse().unwrap();
    assert_eq!(
        tenant.status.unwrap().endpoint.unwrap(),
        format!("https://{ip}:6443")
    );

    let authority = check_secrets(&scope, &root, &format!("https://{ip}:6443")).await;
    let leaf =
        |data: &std::collections::BTreeMap<String, String>| CertificateInfo::parse(&data["tls.crt"]).unwrap();
    let secrets = scope.secrets(&root).await;
    let apiserver = leaf(&secrets["apiserver-ca"]);
    assert_eq!(
        (apiserver.common_name.as_str(), apiserver.organizations.len()),
        (root.as_str(), 0)
    );
    let service = format!("apiserver-svc.{root}");
    let names: BTreeSet<_> = apiserver.dns_names.iter().map(String::as_str).collect();
    let expected = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.tenant.example",
        &service,
        "one",
        "one.example.com",
    ];
    assert_eq!(names, expected.into());
    assert_eq!(apiserver.ip_addresses, [address]);
    assert!(apiserver.server_auth && apiserver.client_auth && !apiserver.is_ca);

    let etcd = leaf(&secrets["etcd-ca"]);
    assert_eq!(etcd.common_name, "kube-etcd");
    let mut expected: BTreeSet<_> = (0..3)
        .map(|i| format!("etcd-{i}.etcd"))
        .chain(["etcd".to_owned()])
        .collect();
    expected.extend(expected.clone().iter().map(|name| format!("{name}.{root}")));
    assert_eq!(etcd.dns_names.iter().cloned().collect::<BTreeSet<_>>(), expected);
    assert_eq!(etcd.ip_addresses, ["127.0.0.1".parse::<IpAddr>().unwrap()]);
    assert!(etcd.server_auth && etcd.client_auth);

    let proxy = leaf(&secrets["front-proxy-ca"]);
    assert_eq!(proxy.common_name, "front-proxy-client");
    assert!(proxy.client_auth && !proxy.server_auth && proxy.dns_names.is_empty());
    for certificate in [&apiserver, &etcd, &proxy] {
        assert!(certificate.is_issued_by(&authority));
        let days = certificate.not_after.duration_since(Timestamp::now()).as_hours() / 24;
        assert!((29..=30).contains(&days), "{days} days");
    }
    let ca = CertificateInfo::parse(&secrets["root-ca"]["tls.crt"]).unwrap();
    assert!(ca.is_ca);
    assert_eq!(ca.common_name, "kubernetes");
    assert!(ca.not_after.duration_since(Timestamp::now()).as_hours() / 24 > 3600);

    // The members of etcd are appended to its arguments as two elements.
    let etcd: StatefulSet = scope.get(&root, "etcd").await;
    let args = etcd.spec.unwrap().template.spec.unwrap().containers[0]
        .args
        .clone()
        .unwrap();
    let members =
        "etcd-0=https://etcd-0.etcd:2380,etcd-1=https://etcd-1.etcd:2380,etcd-2=https://etcd-2.etcd:2380";
    assert_eq!(args, ["--data-dir=/data", "--initial-cluster", members]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_with_a_node_port() {
    let flags = Options::flags(&["--leaf-key-algorithm=rsa-2048"]);
    let (scope, _driver, _manager) = Scope::with_manager("port", flags, templates::full("NodePort")).await;
    let tenant = scope.provision("one").await;
    let root = root_of(&tenant);
    let server = format!("https://apiserver-svc.{root}:6443");
    check_secrets(&scope, &root, &server).await;
    assert_eq!(tenant.status.unwrap().endpoint, Some(server));
    let secrets = scope.secrets(&root).await;
    let apiserver = CertificateInfo::parse(&secrets["apiserver-ca"]["tls.crt"]).unwrap();
    assert!(apiserver.ip_addresses.is_empty(), "only a ClusterIP is named");
    assert!(
        apiserver
            .dns_names
            .contains(&"kubernetes.default.svc.cluster.local".to_owned())
    );
    for secret in ["apiserver-ca", "etcd-ca", "front-proxy-ca"] {
        assert!(
            secrets[secret]["tls.key"].starts_with("-----BEGIN RSA PRIVATE KEY-----\n"),
            "{secret}"
        );
    }
    assert_eq!(
        scope
            .get::<Service>(&root, "apiserver-svc")
            .await
            .spec
            .unwrap()
            .type_
            .unwrap(),
        "NodePort"
    );
}

/// What holds for the seven Secrets of any tenant. Returns the root CA.
async fn check_secrets(scope: &Scope, root: &str, server: &str) -> Authority {
    for name in SECRETS {
        let secret: Secret = scope.get(root, name).await;
        let data = data(&secret);
        let keys: Vec<_> = data.keys().map(String::as_str).collect();
        if name.ends_with("kubeconfig") {
            assert_eq!((secret.type_.as_deref(), keys), (Some("Opaque"), vec![name]));
        } else {
            assert_eq!(
                (secret.type_.as_deref(), keys),
                (Some("kubernetes.io/tls"), vec!["tls.crt", "tls.key"]),
                "{name}"
            );
            let block = if name == "serviceaccount-rsa" {
                "PUBLIC KEY"
            } else {
                "CERTIFICATE"
            };
            assert!(
                data["tls.crt"].starts_with(&format!("-----BEGIN {block}-----\n")),
                "{name}"
            );
            assert_eq!(
                data["tls.crt"].matches("-----BEGIN").count(),
                1,
                "{name}: no chain"
            );
        }
        assert!(secret.metadata.owner_references.is_none());
    }
    let secrets = scope.secrets(root).await;
    for secret in ["root-ca", "serviceaccount-rsa"] {
        assert!(
            secrets[secret]["tls.key"].starts_with("-----BEGIN RSA PRIVATE KEY-----\n"),
            "{secret}"
        );
    }
    let ca = &secrets["root-ca"];
    let authority = Authority::load(&ca["tls.crt"], &ca["tls.key"], Timestamp::now()).unwrap();
    for secret in ["apiserver-ca", "etcd-ca", "front-proxy-ca"] {
        assert!(
            CertificateInfo::parse(&secrets[secret]["tls.crt"])
                .unwrap()
                .matches_key(&secrets[secret]["tls.key"]),
            "{secret}"
        );
    }
    for (secret, user, group) in [
        ("admin-kubeconfig", "admin", Some("system:masters")),
        (
            "controller-manager-kubeconfig",
            "system:kube-controller-manager",
            None,
        ),
    ] {
        let text = &secrets[secret][secret];
        let shape: Value = serde_saphyr::from_str(text).unwrap();
        assert_eq!(
            (&shape["kind"], &shape["apiVersion"]),
            (&json!("Config"), &json!("v1"))
        );
        assert_eq!(
            (&shape["current-context"], &shape["contexts"][0]["name"]),
            (&json!("default"), &json!("default"))
        );
        assert_eq!(
            (&shape["clusters"][0]["name"], &shape["users"][0]["name"]),
            (&json!("one"), &json!(user))
        );
        assert_eq!(shape["clusters"][0]["cluster"]["server"], json!(server));
        let parsed = kubeconfig::parse(text).unwrap();
        assert_eq!(parsed.ca_pem, ca["tls.crt"]);
        let client = CertificateInfo::parse(&parsed.client.certificate_pem).unwrap();
        assert_eq!(
            (
                client.common_name.as_str(),
                client.organizations.first().map(String::as_str)
            ),
            (user, group)
        );
        assert!(client.client_auth && !client.server_auth && client.is_issued_by(&authority));
        assert!(client.matches_key(&parsed.client.key_pem));
    }
    authority
}

/// Who owns the fields, and what is added to the author's templates.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_applied_as_the_go_manager_did() {
    let (scope, _driver, _manager) =
        Scope::with_manager("owned", Options::default(), templates::full("ClusterIP")).await;
    let root = root_of(&scope.provision("one").await);
    let applied = |object: &dyn Fn() -> k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta| {
        let meta = object();
        let fields = meta.managed_fields.unwrap_or_default();
        let ours: Vec<_> = fields
            .iter()
            .filter(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER))
            .collect();
        assert_eq!(FIELD_MANAGER, "virtualcluster/provisioner/native");
        ours.iter()
            .any(|entry| entry.operation.as_deref() == Some("Apply"))
    };
    let leaves = SECRETS
        .into_iter()
        .filter(|name| !matches!(*name, "root-ca" | "serviceaccount-rsa"));
    for name in leaves {
        let secret: Secret = scope.get(&root, name).await;
        assert!(applied(&|| secret.metadata.clone()), "Secret {name}");
    }
    for name in ["etcd", "apiserver-svc"] {
        let service: Service = scope.get(&root, name).await;
        assert!(applied(&|| service.metadata.clone()), "Service {name}");
    }
    let secrets = scope.secrets(&root).await;
    for (name, hashes) in [
        ("etcd", &[][..]),
        (
            "apiserver",
            &["root-ca", "apiserver-ca", "front-proxy-ca", "serviceaccount-rsa"][..],
        ),
        (
            "controller-manager",
            &["root-ca", "serviceaccount-rsa", "controller-manager-kubeconfig"][..],
        ),
    ] {
        let set: StatefulSet = scope.get(&root, name).await;
        assert!(applied(&|| set.metadata.clone()), "StatefulSet {name}");
        assert!(set.metadata.owner_references.is_none());
        let spec = set.spec.unwrap();
        assert_eq!(
            spec.update_strategy.unwrap().type_.as_deref(),
            Some("RollingUpdate")
        );
        let meta = spec.template.metadata.unwrap();
        assert_eq!(meta.labels.unwrap()["tenancy.x-k8s.io/cluster"], root);
        let annotations = meta.annotations.unwrap_or_default();
        let expected: BTreeSet<_> = hashes.iter().map(|secret| format!("{secret}-hash")).collect();
        assert_eq!(
            annotations.keys().cloned().collect::<BTreeSet<_>>(),
            expected,
            "{name}"
        );
        for secret in hashes {
            let bytes = secrets[*secret]
                .iter()
                .map(|(key, text)| (key.clone(), text.clone().into_bytes()))
                .collect();
            let hash = pki::hash::annotation_hash(secret, &bytes).unwrap();
            assert_eq!(annotations[&format!("{secret}-hash")], hash);
            assert!(hash.len() == 64 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')));
        }
    }
}

/// Three attempts, then Error, and all is well once the ClusterVersion appears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_cluster_version_is_said_and_waited_for() {
    let scope = Scope::new("absent").await;
    let record = Recorder::start(scope.tenants()).await;
    let _driver = Driver::start(&scope);
    let _manager = Manager::start(&scope, Options::default());
    scope.create_tenant("one").await;
    let tenant = scope
        .when("one", "in Error", |tenant| tenant.phase() == phase::ERROR)
        .await;
    let ready = condition(&tenant, "Ready");
    assert_eq!(
        ready.message.as_deref(),
        Some("desired ClusterVersion absent not found")
    );
    let retry = "fail to create virtualcluster(one): desired ClusterVersion absent not found";
    let mut expected = vec![
        ("Pending", "retry: 3", "ClusterCreating"),
        ("Pending", "retry: 2", retry),
        ("Pending", "retry: 1", retry),
        (
            "Error",
            "fail to create virtualcluster",
            "TenantControlPlaneError",
        ),
    ];
    assert_tuples(&record, "one", &expected).await;
    scope
        .create_cluster_version("absent", templates::full("ClusterIP"))
        .await;
    scope.settled("one").await;
    expected.push((
        "Running",
        "tenant control plane is running",
        "TenantControlPlaneRunning",
    ));
    assert_tuples(&record, "one", &expected).await;
}

/// A component that does not come up is named, and provisioning goes on where it was once it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_component_that_does_not_start_is_named() {
    let scope = Scope::new("stuck").await;
    let driver = Driver::start(&scope);
    driver.hold("one", "apiserver");
    let _manager = Manager::start(&scope, Options::flags(&["--provisioner-timeout=2s"]));
    scope
        .create_cluster_version("stuck", templates::full("ClusterIP"))
        .await;
    scope.create_tenant("one").await;
    let tenant = scope
        .when("one", "failed once", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.message == "retry: 2")
        })
        .await;
    let root = root_of(&tenant);
    let reason = tenant.status.unwrap().reason;
    assert!(
        reason.starts_with(&format!(
            "fail to create virtualcluster(one): {root}/apiserver is not ready in "
        )),
        "{reason}"
    );
    let keys = scope.secrets(&root).await;
    driver.release("one", "apiserver");
    scope.settled("one").await;
    assert_eq!(
        scope.secrets(&root).await,
        keys,
        "a retry makes no new credentials"
    );
}

/// A namespace of the root namespace's name that is somebody else's is never touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_that_is_not_ours_is_left_alone() {
    let scope = Scope::new("foreign").await;
    let _driver = Driver::start(&scope);
    scope
        .create_cluster_version("foreign", templates::full("ClusterIP"))
        .await;
    let tenant = scope.create_tenant("one").await;
    let root = root_namespace::of(&tenant);
    let namespaces: Api<Namespace> = Api::all(scope.client.clone());
    // All but the uid is right: it is that of an earlier VirtualCluster of this name.
    let theirs: Namespace = serde_json::from_value(json!({"metadata": {"name": root, "annotations": {
        labels::VC_NAME: "one", labels::VC_NAMESPACE: "foreign", labels::VC_UID: "another", labels::VC_ROOT_NS: "true"}}}))
    .unwrap();
    namespaces.create(&PostParams::default(), &theirs).await.unwrap();
    let manager = Manager::start(&scope, Options::default());
    let tenant = scope
        .when("one", "failed once", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.message == "retry: 2")
        })
        .await;
    let reason = tenant.status.unwrap().reason;
    assert!(
        reason.contains(&root) && reason.contains("left alone"),
        "{reason}"
    );
    assert!(scope.versions(&root).await.is_empty());
    scope.delete("one").await;
    let kept = namespaces.get(&root).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none());
    assert_eq!(kept.annotations()[labels::VC_UID], "another");
    assert!(
        manager
            .traffic
            .writes()
            .iter()
            .all(|call| call.namespace != root && call.name != root)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_is_too_long_is_refused_in_words() {
    let (scope, _driver, _manager) =
        Scope::with_manager("long", Options::default(), templates::full("ClusterIP")).await;
    // The definition cannot know how long the name of the namespace is.
    let name = "x".repeat(54);
    scope.create_tenant(&name).await;
    let tenant = scope
        .when(&name, "failed once", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.message == "retry: 2")
        })
        .await;
    let reason = tenant.status.unwrap().reason;
    assert!(
        reason.contains("has 66 characters; at most 63 are allowed"),
        "{reason}"
    );
    scope.delete(&name).await;
}

/// A root CA that vanished is not made anew: every client of the tenant would be cut off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_root_ca_is_not_replaced() {
    let scope = Scope::new("lost").await;
    let driver = Driver::start(&scope);
    driver.hold("one", "etcd");
    let manager = Manager::start(&scope, Options::default());
    scope
        .create_cluster_version("lost", templates::full("ClusterIP"))
        .await;
    scope.create_tenant("one").await;
    let root = root_of(
        &scope
            .when("one", "pending", |tenant| tenant.phase() == phase::PENDING)
            .await,
    );
    eventually("etcd to be made", async || {
        scope.api::<StatefulSet>(&root).get_opt("etcd").await.unwrap()
    })
    .await;
    manager.kill();
    scope
        .api::<Secret>(&root)
        .delete("root-ca", &DeleteParams::default())
        .await
        .unwrap();
    driver.release("one", "etcd");
    let _manager = Manager::start(&scope, Options::default());
    let tenant = scope
        .when("one", "failed once", |tenant| {
            tenant
                .status
                .as_ref()
                .is_some_and(|status| status.message == "retry: 2")
        })
        .await;
    let reason = tenant.status.unwrap().reason;
    assert!(reason.contains("root-ca is gone"), "{reason}");
    assert!(
        scope
            .api::<Secret>(&root)
            .get_opt("root-ca")
            .await
            .unwrap()
            .is_none()
    );
}

/// The API's rules: what is stored comes back as it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_are_stored_unchanged() {
    let scope = Scope::new("raw").await;
    let mut content = templates::full("ClusterIP");
    let future = json!({"nothing": null, "big": 9_007_199_254_740_993_i64, "max": i64::MAX, "list": [null, 0.5, {"a": {}}]});
    content["etcd"]["statefulset"]["spec"]["futureField"] = future.clone();
    content["apiServer"]["service"]["metadata"]["unknown"] = json!("kept");
    content["apiServer"]["metadata"]["odd"] = json!({});
    content["scheduler"] = future;
    scope.create_cluster_version("raw", content.clone()).await;
    let stored = scope.cluster_versions().get("raw").await.unwrap();
    assert_eq!(Value::Object(stored.spec.raw), content);
    // Also as anyone else reads it.
    let request = http::Request::get("/apis/tenancy.x-k8s.io/v1alpha1/clusterversions/raw")
        .body(Vec::new())
        .unwrap();
    let text = scope.client.request_text(request).await.unwrap();
    assert!(text.contains("9007199254740993"), "{text}");
}

/// What the Go manager's users have in their clusters and repositories is accepted as it is, and kept; but for
/// samples from before it used server-side apply, whose embedded objects do not say what they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_and_leftovers_of_the_go_manager_are_accepted() {
    let Some(folder) = samples::of_the_go_manager() else {
        return;
    };
    let scope = Scope::new("samples").await;
    let mut files = samples::files(&folder);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    let mut checked = 0;
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        for document in text.split("\n---") {
            if !document.contains("tenancy.x-k8s.io/v1alpha1") {
                continue;
            }
            let Ok(value) = serde_saphyr::from_str::<Value>(document) else {
                continue;
            };
            let kind = value["kind"].as_str().unwrap_or_default().to_owned();
            if value["apiVersion"] != "tenancy.x-k8s.io/v1alpha1"
                || !matches!(kind.as_str(), "VirtualCluster" | "ClusterVersion")
            {
                continue;
            }
            checked += 1;
            check_sample(
                &scope,
                &kind,
                value,
                &format!("s{checked}"),
                &file.display().to_string(),
            )
            .await;
        }
    }
    println!("{checked} objects of {} files", files.len());
    assert!(
        checked >= 10,
        "only {checked} objects found in {}",
        folder.display()
    );
}

/// Whether an embedded object of a ClusterVersion lacks the right apiVersion or kind, as in the oldest samples.
fn is_untyped(value: &Value) -> bool {
    let right = [
        ("statefulset", "apps/v1", "StatefulSet"),
        ("service", "v1", "Service"),
    ];
    ["etcd", "apiServer", "controllerManager"].iter().any(|bundle| {
        right.iter().any(|(key, api_version, kind)| {
            let object = &value["spec"][bundle][key];
            !object.is_null() && (object["apiVersion"] != *api_version || object["kind"] != *kind)
        })
    })
}

/// Stores the object under another name, its status too, and compares all but the metadata that servers set.
async fn check_sample(scope: &Scope, kind: &str, mut value: Value, name: &str, file: &str) {
    let gvk = GroupVersionKind::gvk("tenancy.x-k8s.io", "v1alpha1", kind);
    let resource = ApiResource::from_gvk(&gvk);
    let namespaced = kind == "VirtualCluster";
    let api: Api<DynamicObject> = if namespaced {
        Api::namespaced_with(scope.client.clone(), &scope.namespace, &resource)
    } else {
        Api::all_with(scope.client.clone(), &resource)
    };
    let metadata = value["metadata"].as_object_mut().unwrap();
    for key in [
        "creationTimestamp",
        "generation",
        "managedFields",
        "resourceVersion",
        "uid",
        "namespace",
        "finalizers",
    ] {
        metadata.remove(key);
    }
    metadata.insert("name".into(), name.into());
    let object: DynamicObject = serde_json::from_value(value.clone()).unwrap();
    let strict = PostParams::default();
    let created = match api.create(&strict, &object).await {
        Ok(created) => created,
        Err(kube::Error::Api(status)) if is_untyped(&value) => {
            // It could not be applied to a tenant: the definition says so, where each fault is.
            let faults = status.details.as_ref().map_or(0, |details| details.causes.len());
            assert!(status.code == 422 && faults > 0, "{file}: {kind}: {status:?}");
            return;
        }
        Err(error) => panic!("{file}: {kind}: {error}"),
    };
    assert!(!is_untyped(&value), "{file}: {kind} is accepted");
    let mut stored = serde_json::to_value(created).unwrap();
    if value
        .get("status")
        .is_some_and(|status| status.as_object().is_some_and(|status| !status.is_empty()))
    {
        let patch = json!({"status": value["status"]});
        let patched = api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        stored =
            serde_json::to_value(patched.unwrap_or_else(|error| panic!("{file}: status of {kind}: {error}")))
                .unwrap();
        assert_eq!(stored["status"], value["status"], "{file}: status of {kind}");
    }
    assert_eq!(stored.get("spec"), value.get("spec"), "{file}: spec of {kind}");
    for key in ["labels", "annotations"] {
        assert_eq!(
            stored["metadata"].get(key),
            value["metadata"].get(key),
            "{file}: {key} of {kind}"
        );
    }
    // And the types read what the server gives.
    let unread = if namespaced {
        serde_json::from_value::<VirtualCluster>(stored).err()
    } else {
        serde_json::from_value::<ClusterVersion>(stored).err()
    };
    assert!(unread.is_none(), "{file}: {kind}: {unread:?}");
}

/// With the Go manager's definitions every status written would be lost: the manager does not start, and says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_without_a_status_subresource_are_refused() {
    let server = tokio::task::spawn_blocking(ApiServer::start).await.unwrap();
    let client = server.client().await;
    let absent = start(&client).await.unwrap_err().to_string();
    assert!(
        absent.contains("is not installed") && absent.contains("vc-manager crds | kubectl apply"),
        "{absent}"
    );
    let mut old = crds();
    for version in old
        .iter_mut()
        .flat_map(|definition| &mut definition.spec.versions)
    {
        version.subresources = None;
    }
    let server = tokio::task::spawn_blocking(move || {
        server.install(&old);
        server
    })
    .await
    .unwrap();
    let outdated = start(&client).await.unwrap_err().to_string();
    assert!(
        outdated.contains("no status subresource") && outdated.contains("vc-manager crds | kubectl apply"),
        "{outdated}"
    );
    drop(server);
}

async fn start(client: &Client) -> anyhow::Result<()> {
    let Ok(Command::Run(config)) = args::parse(["--leader-election=false".to_owned()], None) else {
        panic!("flags")
    };
    let setup = Setup {
        clock: vc_manager::controller::Clock::system(),
        client: client.clone(),
        config: Arc::from(config),
        metrics: Arc::new(Metrics::new(false).unwrap()),
    };
    run(setup, CancellationToken::new()).await
}
