//! Certificates that live for minutes: renewed while the tenant is asked all the time, damaged in every way, and run out
//! while no manager is there.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::{Namespace, Pod, Secret},
        rbac::v1::{ClusterRoleBinding, RoleRef, Subject},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, Config, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::AuthInfo,
};
use serde_json::json;
use tokio::sync::watch;
use vc_manager::{
    api::VirtualCluster,
    pki::{self, Authority, CertificateInfo, CertifiedPair, KeyAlgorithm},
};

use crate::support::{Outages, Prober, Scene, Tenant, condition, manager, restarts, templates, until};

/// Life of every leaf. The kubelet takes up to a minute and a half to bring a new one to the processes, so that much
/// less would not do. Another one can be given in minutes: the renewals of ten minutes are those that were asked for.
const LIFE: Duration = Duration::from_mins(5);
const LIFE_VARIABLE: &str = "VCM_CERTIFICATE_MINUTES";
/// Renewals that are watched, unless told otherwise; more follow.
const RENEWALS: usize = 1;
const RENEWALS_VARIABLE: &str = "VCM_CERTIFICATE_RENEWALS";
const LEAVES: [&str; 5] = [
    "apiserver-ca",
    "etcd-ca",
    "front-proxy-ca",
    "controller-manager-kubeconfig",
    "admin-kubeconfig",
];
/// How long it may take until a process has a new certificate: the kubelet's minute and a half, and the process's own.
const TAKEN_UP: Duration = Duration::from_mins(3);

fn seen(is_so: bool) -> Result<(), String> {
    is_so.then_some(()).ok_or_else(|| "not yet".to_owned())
}

fn told<T: std::str::FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok()?.parse().ok()
}

pub(crate) async fn renewed(scene: Scene) {
    let life = told(LIFE_VARIABLE).map_or(LIFE, Duration::from_mins);
    let count = told(RENEWALS_VARIABLE).unwrap_or(RENEWALS);
    let limit = format!("--max-certificate-life={}s", life.as_secs());
    let flags = ["--leader-election=false", limit.as_str()];
    manager::start(&flags).await;
    let version = scene.cluster_version("tenants", templates::standard()).await;
    let tenant = scene.provisioned("tenant", &version).await;
    let once = once_made(&tenant).await;
    let token = token(&tenant).await;
    until(
        "the token to be allowed to read",
        Duration::from_secs(10),
        async || {
            let client = Client::try_from(token.clone()).map_err(|error| error.to_string())?;
            let namespaces: Api<Namespace> = Api::all(client);
            namespaces
                .get("kube-system")
                .await
                .map_err(|error| error.to_string())
        },
    )
    .await;

    let old_token = Prober::start(token.clone());
    let (present, following) = watch::channel(tenant.admin_config().await);
    let administrator = Prober::follow(following);
    let follower = {
        let tenant = tenant.clone();
        async move {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                present.send_replace(tenant.admin_config().await);
            }
        }
    };
    tokio::select! {
        () = follower => unreachable!("it follows for ever"),
        () = renewals(&tenant, life, count) => {}
    }
    let old_token = old_token.stop().await;
    let administrator = administrator.stop().await;
    tenant.scene.say(format!(
        "{count} renewals of certificates of {life:?}: token {}, administrator {}",
        seen_by(&old_token),
        seen_by(&administrator)
    ));
    assert!(old_token.spans.is_empty(), "the token of before: {old_token:?}");
    assert!(
        administrator.spans.is_empty(),
        "the administrator: {administrator:?}"
    );
    assert_eq!(once_made(&tenant).await, once, "root CA and service-account key");

    damaged(&tenant).await;
    assert_eq!(once_made(&tenant).await, once, "root CA and service-account key");
    lost_root(&tenant).await;

    run_out(&tenant, life, &flags).await;
    assert_eq!(once_made(&tenant).await, once, "root CA and service-account key");
    let after = Prober::start(token);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = after.stop().await;
    assert!(
        after.asked > 5 && after.spans.is_empty(),
        "the token of before: {after:?}"
    );
    tenant.expect_controllers("after-all").await;
}

fn seen_by(outages: &Outages) -> String {
    format!(
        "asked {} times, {} outages, longest {:?} {:?}",
        outages.asked,
        outages.spans.len(),
        outages.longest(),
        outages.reasons
    )
}

/// Watches renewals: nobody agreed to an upgrade, only the controller-manager is replaced, and what is served is new.
async fn renewals(tenant: &Tenant, life: Duration, count: usize) {
    for number in 1..=count {
        let before = Leaves::of(tenant).await;
        let pods = tenant.pods().await;
        let due = renew_at(&tenant.get().await);
        tenant.when("renewed", life, |vc| renew_at(vc) > due).await;
        let after = Leaves::of(tenant).await;
        for leaf in LEAVES {
            assert_ne!(after.ends[leaf], before.ends[leaf], "{leaf}");
        }
        taken_up(tenant, &after).await;
        let replaced: Vec<_> = tenant
            .pods()
            .await
            .iter()
            .filter(|(name, pod)| pods[*name].uid() != pod.uid() || restarts(pod) > restarts(&pods[*name]))
            .map(|(name, _)| name.clone())
            .collect();
        assert_eq!(replaced, ["controller-manager-0"], "renewal {number}");
        tenant.scene.say(format!("renewal {number} is taken up"));
    }
    tenant.expect_controllers("after-renewals").await;
}

/// Waits until apiserver and etcd serve their present certificates and the controller-manager runs with its own.
async fn taken_up(tenant: &Tenant, leaves: &Leaves) {
    until(
        "the apiserver to serve its new certificate",
        TAKEN_UP,
        async || {
            let served = served(&pod_address(tenant, "apiserver-0").await, 6443).await;
            seen(served.as_ref() == Some(&leaves.der["apiserver-ca"]))
        },
    )
    .await;
    until("etcd to serve its new certificate", TAKEN_UP, async || {
        let served = served(&pod_address(tenant, "etcd-0").await, 2379).await;
        seen(served.as_ref() == Some(&leaves.der["etcd-ca"]))
    })
    .await;
    tenant
        .when("Ready", TAKEN_UP, |vc| condition(vc, "Ready").0 == "True")
        .await;
}

async fn pod_address(tenant: &Tenant, pod: &str) -> String {
    let pod = tenant.api::<Pod>().get(pod).await.expect("the pod");
    pod.status.and_then(|status| status.pod_ip).unwrap_or_default()
}

/// The certificate (DER) that is served at an address, asked for with another program than the manager uses.
async fn served(address: &str, port: u16) -> Option<Vec<u8>> {
    let to = format!("{address}:{port}");
    let ask = move || {
        Command::new("openssl")
            .args(["s_client", "-connect", &to, "-showcerts"])
            .stdin(Stdio::null())
            .output()
    };
    let asked = tokio::task::spawn_blocking(ask)
        .await
        .expect("it does not panic")
        .expect("openssl is installed");
    let text = String::from_utf8_lossy(&asked.stdout).into_owned();
    let begin = text.find("-----BEGIN CERTIFICATE-----")?;
    Some(CertificateInfo::parse(&text[begin..]).ok()?.der().to_vec())
}

fn renew_at(vc: &VirtualCluster) -> Option<Timestamp> {
    let certificates = vc.status.as_ref()?.certificates.as_ref()?;
    Some(certificates.renew_at.as_ref()?.0)
}

/// The leaf certificates as they are stored.
struct Leaves {
    ends: BTreeMap<&'static str, Timestamp>,
    der: BTreeMap<&'static str, Vec<u8>>,
}

impl Leaves {
    async fn of(tenant: &Tenant) -> Self {
        let secrets = tenant.secrets().await;
        let mut leaves = Self {
            ends: BTreeMap::new(),
            der: BTreeMap::new(),
        };
        for leaf in LEAVES {
            let pem = match secrets[leaf].get(leaf) {
                Some(text) => {
                    pki::kubeconfig::parse(text)
                        .expect("a kubeconfig")
                        .client
                        .certificate_pem
                }
                None => secrets[leaf]["tls.crt"].clone(),
            };
            let certificate = CertificateInfo::parse(&pem).expect("a certificate");
            leaves.ends.insert(leaf, certificate.not_after);
            leaves.der.insert(leaf, certificate.der().to_vec());
        }
        leaves
    }
}

/// What is made once.
async fn once_made(tenant: &Tenant) -> [BTreeMap<String, String>; 2] {
    let mut secrets = tenant.secrets().await;
    ["root-ca", "serviceaccount-rsa"].map(|name| secrets.remove(name).expect("it is there"))
}

/// A configuration that reads the tenant by a token of now.
async fn token(tenant: &Tenant) -> Config {
    let usage = tenant.use_it().await;
    let bindings: Api<ClusterRoleBinding> = Api::all(tenant.admin().await);
    let binding = ClusterRoleBinding {
        metadata: ObjectMeta {
            name: Some("robot-views".into()),
            ..ObjectMeta::default()
        },
        role_ref: RoleRef {
            api_group: "rbac.authorization.k8s.io".into(),
            kind: "ClusterRole".into(),
            name: "cluster-admin".into(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".into(),
            name: "robot".into(),
            namespace: Some("kube-system".into()),
            ..Subject::default()
        }]),
    };
    bindings
        .create(&PostParams::default(), &binding)
        .await
        .expect("it is accepted");
    let mut config = tenant.admin_config().await;
    config.auth_info = AuthInfo {
        token: Some(usage.token.clone().into()),
        ..AuthInfo::default()
    };
    config
}

/// Leaves are shortened, swapped, corrupted and deleted: each is issued again.
async fn damaged(tenant: &Tenant) {
    let root = once_made(tenant).await[0].clone();
    let now = Timestamp::now();
    let authority = Authority::load(&root["tls.crt"], &root["tls.key"], now).expect("the root CA");
    let request = {
        let served = CertificateInfo::parse(&tenant.secrets().await["apiserver-ca"]["tls.crt"])
            .expect("a certificate");
        pki::LeafRequest {
            common_name: served.common_name,
            organization: None,
            usages: &[pki::ExtendedUsage::ServerAuth, pki::ExtendedUsage::ClientAuth],
            dns_names: served.dns_names,
            ip_addresses: served.ip_addresses,
        }
    };
    let moved = |by: SignedDuration| now.checked_add(by).expect("a time");
    let short = authority
        .issue_between(
            &request,
            KeyAlgorithm::EcdsaP256,
            moved(-SignedDuration::from_mins(10)),
            moved(SignedDuration::from_mins(2)),
            now,
        )
        .expect("a certificate");
    let (other, _) = Authority::create(now).expect("a CA");
    let foreign = other
        .issue(&request, KeyAlgorithm::EcdsaP256, pki::Validity::default(), now)
        .expect("a certificate");
    let corrupt = CertifiedPair {
        certificate_pem: "-----BEGIN CERTIFICATE-----\nbm90IG9uZQ==\n-----END CERTIFICATE-----\n".into(),
        ..foreign.clone()
    };
    for (what, pair) in [("shortened", short), ("swapped", foreign), ("corrupted", corrupt)] {
        let before = tenant.secrets().await["apiserver-ca"].clone();
        let data: BTreeMap<_, _> = pair
            .to_tls_data()
            .into_iter()
            .map(|(key, value)| (key, k8s_openapi::ByteString(value)))
            .collect();
        let patch = json!({"data": data});
        tenant
            .api::<Secret>()
            .patch("apiserver-ca", &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("it is accepted");
        let put_in = pair.certificate_pem.clone();
        until(
            "apiserver-ca to be issued again",
            Duration::from_secs(30),
            async || {
                let present = tenant.secrets().await["apiserver-ca"]["tls.crt"].clone();
                seen(present != put_in && present != before["tls.crt"])
            },
        )
        .await;
        tenant
            .scene
            .say(format!("apiserver-ca was {what}, and issued again"));
    }
    tenant
        .api::<Secret>()
        .delete("etcd-ca", &DeleteParams::default())
        .await
        .expect("it is deleted");
    until(
        "etcd-ca to be issued again",
        Duration::from_secs(30),
        async || seen(tenant.secrets().await.contains_key("etcd-ca")),
    )
    .await;
    taken_up(tenant, &Leaves::of(tenant).await).await;
    tenant
        .expect_events(&["CertificatesRenewed", "CertificatesReissued"])
        .await;
}

/// A root CA that is gone is not made anew; restored, all is well.
async fn lost_root(tenant: &Tenant) {
    let secrets = tenant.api::<Secret>();
    let mut kept = secrets.get("root-ca").await.expect("the root CA");
    secrets
        .delete("root-ca", &DeleteParams::default())
        .await
        .expect("it is deleted");
    let told = tenant
        .when("without a root CA", Duration::from_secs(30), |vc| {
            condition(vc, "CertificatesValid").0 == "False"
        })
        .await;
    let told = told.status.expect("a status").conditions;
    let message = told
        .iter()
        .find(|condition| condition.type_.as_deref() == Some("CertificatesValid"))
        .and_then(|condition| condition.message.clone())
        .unwrap_or_default();
    assert!(message.contains("root-ca does not exist"), "{message}");
    assert!(secrets.get_opt("root-ca").await.expect("an answer").is_none());
    kept.metadata = ObjectMeta {
        name: Some("root-ca".into()),
        ..ObjectMeta::default()
    };
    secrets
        .create(&PostParams::default(), &kept)
        .await
        .expect("it is restored");
    tenant
        .when("well again", Duration::from_secs(30), |vc| {
            condition(vc, "CertificatesValid").0 == "True"
        })
        .await;
}

/// No manager for longer than the certificates live: once there is one again, the tenant is well without a person.
async fn run_out(tenant: &Tenant, life: Duration, flags: &[&str]) {
    manager::kill();
    let pods = tenant.pod_uids().await;
    let ends = Leaves::of(tenant).await.ends;
    let last = ends.values().max().copied().expect("leaves");
    let left = Duration::try_from(last.duration_since(Timestamp::now())).unwrap_or_default();
    assert!(left <= life);
    tenant.scene.say(format!(
        "no manager until all certificates have ended, in {left:.0?}"
    ));
    tokio::time::sleep(left + Duration::from_secs(5)).await;
    manager::start(flags).await;
    until("the leaves to be issued", Duration::from_mins(1), async || {
        let leaves = Leaves::of(tenant).await;
        seen(leaves.ends.values().all(|end| *end > last))
    })
    .await;
    taken_up(tenant, &Leaves::of(tenant).await).await;
    let after = tenant.pod_uids().await;
    for pod in ["apiserver-0", "etcd-0"] {
        assert_eq!(
            after[pod], pods[pod],
            "{pod} takes its certificate up while it runs"
        );
    }
    assert_ne!(after["controller-manager-0"], pods["controller-manager-0"]);
    tenant
        .scene
        .say("the tenant is well again after all its certificates had ended");
}
