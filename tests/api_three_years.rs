//! Three years of three tenants on a real API server, with the whole manager: its clock is set from renewal to renewal,
//! and what it makes is judged by openssl.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod support;

use std::{
    collections::BTreeMap,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use k8s_openapi::{
    api::{apps::v1::StatefulSet, core::v1::Secret},
    jiff::{SignedDuration, Timestamp},
};
use kube::api::{ListParams, PostParams};
use serde_json::json;
use tempfile::TempDir;
use vc_manager::{
    api::{Component, VirtualCluster, VirtualClusterSpec, virtual_cluster::CertificatesStatus},
    controller::{
        Clock,
        render::{TenantSecret, hashes, hashes_of},
    },
    pki::kubeconfig,
};

use support::{Driver, Manager, Options, Scope, condition, data, root_of, templates};

/// How long it goes on.
const YEARS: i64 = 3;
/// The manager is away from the first of these days to the second.
const AWAY: (i64, i64) = (500, 560);
/// From the first of these days to the second, the owner of the first tenant asks for leaves of four weeks: a life may
/// become longer and shorter, and hundreds of renewals of the same kind show no more than the first hundred.
const LONGER: (i64, i64) = (180, 820);
/// Every so many renewals openssl is asked.
const SAMPLED: usize = 24;
/// The tenants, and days their leaves live. The last one is paused.
const TENANTS: [(&str, i64); 3] = [("week", 7), ("quarter", 90), ("year", 365)];

/// A clock that stands still until it is set.
#[derive(Clone)]
struct Hands(Arc<AtomicI64>);

impl Hands {
    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.0.load(Ordering::SeqCst)).expect("a time")
    }

    fn set(&self, now: Timestamp) {
        self.0.store(now.as_second(), Ordering::SeqCst);
    }

    fn options(&self) -> Options {
        let hands = self.clone();
        Options {
            clock: Clock::new(move || hands.now()),
            ..Options::default()
        }
    }
}

/// A tenant, and what is known of it.
struct Subject {
    name: &'static str,
    root: String,
    days: i64,
    renew_at: Timestamp,
    renewals: i64,
    /// What is made once, as it was made.
    once: [Secret; 2],
    /// Generations of its StatefulSets when it began to run.
    generations: BTreeMap<Component, i64>,
}

impl Subject {
    fn ca(&self) -> String {
        data(&self.once[0])["tls.crt"].clone()
    }
}

/// The three years.
struct Years {
    scope: Scope,
    hands: Hands,
    subjects: Vec<Subject>,
}

impl Years {
    async fn begin(scope: Scope, hands: Hands) -> Self {
        let mut subjects = Vec::new();
        for (name, days) in TENANTS {
            let spec = VirtualClusterSpec {
                cluster_version_name: scope.namespace.clone(),
                pki_expire_days: Some(days),
                paused: name == TENANTS[2].0,
                ..VirtualClusterSpec::default()
            };
            let tenant = VirtualCluster::new(name, spec);
            scope
                .tenants()
                .create(&PostParams::default(), &tenant)
                .await
                .expect("a VirtualCluster");
        }
        for (name, days) in TENANTS {
            let tenant = scope.settled(name).await;
            let root = root_of(&tenant);
            subjects.push(Subject {
                name,
                days,
                renew_at: renew_at(&tenant).expect("it is known"),
                renewals: 0,
                once: once(&scope, &root).await,
                generations: generations(&scope, &root).await,
                root,
            });
        }
        Self {
            scope,
            hands,
            subjects,
        }
    }

    /// From renewal to renewal until then.
    async fn go_on_until(&mut self, end: Timestamp) {
        while let Some(next) = self.next().filter(|next| self.subjects[*next].renew_at <= end) {
            let subject = &self.subjects[next];
            let (name, at) = (subject.name, subject.renew_at);
            self.hands.set(at);
            // Any change of it has it looked at.
            let poke = json!({"metadata": {"annotations": {"looked-at": at.to_string()}}});
            self.scope.merge(name, &poke).await;
            self.renewed(next).await;
            let count: i64 = self.subjects.iter().map(|subject| subject.renewals).sum();
            if usize::try_from(count).expect("few").is_multiple_of(SAMPLED) {
                self.judge_all().await;
            }
        }
        self.hands.set(end);
        self.judge_all().await;
    }

    fn next(&self) -> Option<usize> {
        (0..self.subjects.len()).min_by_key(|index| self.subjects[*index].renew_at)
    }

    /// The owner of a tenant asks for leaves of this life.
    async fn ask_for(&mut self, index: usize, life: i64) {
        let now = self.hands.now();
        let subject = &mut self.subjects[index];
        let shorter = life < subject.days;
        subject.days = life;
        let asked = json!({"spec": {"pkiExpireDays": life}});
        self.scope.merge(subject.name, &asked).await;
        if !shorter {
            // Given with the next renewal.
            return;
        }
        let tenant = self
            .scope
            .when(subject.name, "to be renewed sooner", |tenant| {
                renew_at(tenant).is_some_and(|at| now < at && at < now + days(life))
                    && condition(tenant, "Ready").status == "True"
            })
            .await;
        let renewed = not_after(&tenant) == now + days(life);
        subject.renewals += i64::from(renewed);
        self.found(index, &tenant).await;
    }

    /// Waits until the certificates of a tenant are renewed, and who has to is restarted.
    async fn renewed(&mut self, index: usize) {
        let now = self.hands.now();
        let subject = &mut self.subjects[index];
        let tenant = self
            .scope
            .when(subject.name, "renewed", |tenant| {
                renew_at(tenant).is_some_and(|at| at > now) && condition(tenant, "Ready").status == "True"
            })
            .await;
        assert_eq!(not_after(&tenant), now + days(subject.days), "{}", subject.name);
        subject.renewals += 1;
        self.found(index, &tenant).await;
    }

    /// A tenant that is at rest: its components were restarted as often as it was renewed, if at all.
    async fn found(&mut self, index: usize, tenant: &VirtualCluster) {
        let now = self.hands.now();
        assert_eq!(condition(tenant, "CertificatesValid").status, "True");
        let subject = &mut self.subjects[index];
        subject.renew_at = renew_at(tenant).expect("a time");
        for (component, generation) in generations(&self.scope, &subject.root).await {
            // Without a probe nobody sees what the apiserver serves. etcd is never restarted.
            let restarts = if component == Component::Etcd {
                0
            } else {
                subject.renewals
            };
            assert_eq!(
                generation - subject.generations[&component],
                restarts,
                "{}: restarts of {component} at {now}",
                subject.name
            );
        }
    }

    /// All certificates of all tenants, by openssl.
    async fn judge_all(&self) {
        let now = self.hands.now();
        for subject in &self.subjects {
            judge(&self.scope, subject, now).await;
        }
    }
}

fn days(count: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * count)
}

fn certificates(tenant: &VirtualCluster) -> Option<&CertificatesStatus> {
    tenant.status.as_ref()?.certificates.as_ref()
}

fn renew_at(tenant: &VirtualCluster) -> Option<Timestamp> {
    Some(certificates(tenant)?.renew_at.as_ref()?.0)
}

fn not_after(tenant: &VirtualCluster) -> Timestamp {
    let certificates = certificates(tenant).expect("certificates");
    certificates.not_after.as_ref().expect("a time").0
}

async fn once(scope: &Scope, root: &str) -> [Secret; 2] {
    let [ca, accounts] = [TenantSecret::RootCa, TenantSecret::ServiceAccount].map(TenantSecret::name);
    [scope.get(root, ca).await, scope.get(root, accounts).await]
}

async fn generations(scope: &Scope, root: &str) -> BTreeMap<Component, i64> {
    let mut found = BTreeMap::new();
    for component in Component::ALL {
        let set: StatefulSet = scope.get(root, component.name()).await;
        found.insert(component, set.metadata.generation.expect("a generation"));
    }
    found
}

/// The five leaves of a tenant are valid now for what they are for, and their keys belong to them; who cannot take up a
/// certificate while it runs was started with the one that is there; what is made once is what it was.
async fn judge(scope: &Scope, subject: &Subject, now: Timestamp) {
    let Subject { name, root, .. } = subject;
    assert_eq!(once(scope, root).await, subject.once, "{name}");
    let secrets: BTreeMap<String, Secret> = scope
        .api::<Secret>(root)
        .list(&ListParams::default())
        .await
        .expect("a list")
        .into_iter()
        .map(|secret| (secret.metadata.name.clone().expect("a name"), secret))
        .collect();
    let folder = TempDir::new().expect("a folder");
    let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).expect("a file");
    let openssl = |arguments: &str| {
        let output = Command::new("openssl")
            .args(arguments.split(' '))
            .current_dir(folder.path())
            .output()
            .expect("openssl is installed");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{name} at {now}: openssl {arguments}: {complaint}"
        );
        String::from_utf8(output.stdout).expect("text")
    };
    write("root.crt", &data(&secrets["root-ca"])["tls.crt"]);
    let mut files = [Vec::new(), Vec::new()];
    for which in TenantSecret::ALL
        .into_iter()
        .filter(|which| which.leaf().is_some())
    {
        let data = data(&secrets[which.name()]);
        let (certificate, key) = if which.is_kubeconfig() {
            let config = kubeconfig::parse(&data[which.name()]).expect("a kubeconfig");
            assert_eq!(config.ca_pem, subject.ca(), "{name}: {which}");
            (config.client.certificate_pem, config.client.key_pem.to_string())
        } else {
            (data["tls.crt"].clone(), data["tls.key"].clone())
        };
        let file = format!("{which}.crt");
        write(&file, &certificate);
        write("leaf.key", &key);
        let serves = matches!(which, TenantSecret::ApiServer | TenantSecret::Etcd);
        assert_eq!(
            openssl("pkey -in leaf.key -pubout"),
            openssl(&format!("x509 -in {file} -noout -pubkey")),
            "{name}: {which}"
        );
        files[usize::from(serves)].push(file);
    }
    let at = now.as_second();
    for (purpose, files) in ["sslclient", "sslserver"].into_iter().zip(&files) {
        let verified = openssl(&format!(
            "verify -attime {at} -CAfile root.crt -purpose {purpose} {}",
            files.join(" ")
        ));
        assert_eq!(verified.matches(": OK\n").count(), files.len());
    }
    let set: StatefulSet = scope.get(root, Component::ControllerManager.name()).await;
    assert_eq!(
        hashes_of(&set),
        hashes(Component::ControllerManager, &secrets),
        "{name} at {now}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_years_from_renewal_to_renewal() {
    let begin = Timestamp::from_second(Timestamp::now().as_second()).expect("a time");
    let hands = Hands(Arc::new(AtomicI64::new(begin.as_second())));
    let content = templates::full("ClusterIP");
    let (scope, _driver, manager): (Scope, Driver, Manager) =
        Scope::with_manager("years", hands.options(), content).await;
    let mut years = Years::begin(scope, hands.clone()).await;
    years.judge_all().await;
    years.go_on_until(begin + days(LONGER.0)).await;
    years.ask_for(0, 28).await;
    years.go_on_until(begin + days(AWAY.0)).await;

    manager.kill();
    let back = begin + days(AWAY.1);
    hands.set(back);
    let manager = Manager::start(&years.scope, hands.options());
    // It finds by itself what has come to its time, or ended, meanwhile.
    for index in 0..years.subjects.len() {
        if years.subjects[index].renew_at <= back {
            years.renewed(index).await;
        }
    }
    assert!(
        years.subjects[0].renew_at > back && years.subjects[1].renew_at > back,
        "60 days are longer than four weeks, and than two thirds of a quarter"
    );
    years.judge_all().await;
    years.go_on_until(begin + days(LONGER.1)).await;
    years.ask_for(0, 7).await;
    years.go_on_until(begin + days(365 * YEARS)).await;

    assert!(years.subjects[0].renewals > 120, "{}", years.subjects[0].renewals);
    for subject in &years.subjects[1..] {
        // At 17 to 20 thirtieths of a life each, but for the absence.
        let fewest = (365 * YEARS - (AWAY.1 - AWAY.0) - subject.days) * 30 / (subject.days * 20) - 1;
        let most = 365 * YEARS * 30 / (subject.days * 17) + 1;
        assert!(
            (fewest..=most).contains(&subject.renewals),
            "{}: {} renewals, not {fewest} to {most}",
            subject.name,
            subject.renewals
        );
    }
    let restarts = |component: &str| {
        let series = format!("vc_manager_credential_restarts_total{{component=\"{component}\"}}");
        manager.metric(&series)
    };
    assert!(restarts("controller-manager").is_some());
    assert_eq!(restarts("controller-manager"), restarts("apiserver"));
    assert_eq!(restarts("etcd").filter(|count| count != "0"), None);
}
