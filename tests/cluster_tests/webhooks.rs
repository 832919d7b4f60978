//! The webhooks of two replicas, as they are installed, under a steady load of writes: whatever happens to one replica,
//! to the CA or to the API server, no write fails for their sake.

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{Pod, Secret},
    },
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{Scene, cluster, templates, until};

/// Namespace of the installation.
const NAMESPACE: &str = "vc-manager";
/// The CA of the webhooks.
const CA: &str = "vc-manager-webhook-ca";
/// Time for a Deployment, a certificate or a server to be as it should.
const PATIENCE: Duration = Duration::from_mins(3);
/// How long after a kill a write may fail: until its Service has learnt of it.
const AFTER_KILL: Duration = Duration::from_secs(10);
/// Time between two writes of one writer.
const PACE: Duration = Duration::from_millis(50);

pub(crate) async fn survive(scene: Scene) {
    let installation = Installation::new();
    installation.apply();
    rolled_out(&scene.client).await;
    ready_to_answer(&scene).await;
    scene.say("two replicas are ready, and the API server asks them");

    let version = scene.cluster_version("load", templates::standard()).await;
    let load = Load::start(&scene, &version).await;
    load.calm("before anything happens").await;

    let pods: Api<Pod> = Api::namespaced(scene.client.clone(), NAMESPACE);
    for replica in replicas(&pods).await {
        pods.delete(&replica, &DeleteParams::default())
            .await
            .expect("a pod may be deleted");
        rolled_out(&scene.client).await;
        load.calm("after a replica was ended").await;
    }
    scene.say("either replica may end");

    let deployments: Api<Deployment> = Api::namespaced(scene.client.clone(), NAMESPACE);
    deployments
        .restart("vc-manager")
        .await
        .expect("it may be restarted");
    rolled_out(&scene.client).await;
    load.calm("after both were rolled").await;
    scene.say("both may be rolled");

    let secrets: Api<Secret> = Api::namespaced(scene.client.clone(), NAMESPACE);
    let spoilt = Patch::Merge(json!({"data": {"tls.key": ""}}));
    let before = authority(&secrets).await.expect("a CA");
    secrets
        .patch(CA, &PatchParams::default(), &spoilt)
        .await
        .expect("an administrator may");
    replaced(&scene.client, &secrets, &before).await;
    load.calm("after the CA was replaced by force").await;
    let before = authority(&secrets).await.expect("a CA");
    secrets
        .delete(CA, &DeleteParams::default())
        .await
        .expect("an administrator may");
    replaced(&scene.client, &secrets, &before).await;
    load.calm("after the Secret of the CA was deleted").await;
    scene.say("the CA may be replaced and lost");

    restart_api_server().await;
    load.calm("after the API server was restarted").await;
    scene.say("the API server may be restarted");

    let (writes, failures) = load.stop().await;
    scene.say(format!("{writes} writes, {} failed", failures.len()));
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(writes > 500, "a load of {writes} writes proves little");
    killed(&scene, &version, &pods).await;

    drop(installation);
}

/// A replica that is killed tells nobody. Its connection breaks, and until its Service knows, new ones may be sent to
/// where it was: nothing can be promised of those seconds but that they end by themselves.
async fn killed(scene: &Scene, version: &str, pods: &Api<Pod>) {
    let load = Load::start(scene, version).await;
    let victim = replicas(pods).await.remove(0);
    let uid = pods.get(&victim).await.expect("a pod").uid().expect("a uid");
    let processes = Command::new("pgrep")
        .args(["-f", "^/vc-manager "])
        .output()
        .expect("pgrep runs");
    let ids = String::from_utf8(processes.stdout).expect("text");
    let of_victim = ids.lines().find(|id| {
        let cgroup = std::fs::read_to_string(format!("/proc/{id}/cgroup")).unwrap_or_default();
        cgroup.contains(&uid)
    });
    let id = of_victim.unwrap_or_else(|| panic!("no process of pod {victim} ({uid}) among {ids}"));
    let killed = Command::new("kill")
        .args(["-KILL", id])
        .status()
        .expect("kill runs");
    assert!(killed.success());
    tokio::time::sleep(AFTER_KILL).await;
    load.forget();
    load.calm("long after a replica was killed").await;
    rolled_out(&scene.client).await;
    let (writes, failures) = load.stop().await;
    scene.say(format!(
        "after a kill -9: {writes} writes, {} failed later",
        failures.len()
    ));
    assert!(failures.is_empty(), "{failures:#?}");
}

/// What a user installs, and takes away.
struct Installation;

impl Installation {
    fn new() -> Self {
        Self
    }

    fn files() -> [String; 2] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        ["charts/vc-manager.yaml", "webhook-config"].map(|path| root.join(path).display().to_string())
    }

    fn apply(&self) {
        let _ = self;
        let [manager, webhooks] = Self::files();
        kubectl(&["apply", "-f", &manager]);
        kubectl(&["apply", "-f", &webhooks]);
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let [manager, webhooks] = Self::files();
        for file in [webhooks, manager] {
            kubectl(&["delete", "--ignore-not-found", "-f", &file]);
        }
    }
}

fn kubectl(arguments: &[&str]) {
    let program = std::env::var("VCM_KUBECTL").expect("VCM_KUBECTL names kubectl; run `make test`");
    let output = Command::new(program)
        .arg("--kubeconfig")
        .arg(cluster::kubeconfig())
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("kubectl starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "kubectl {arguments:?}: {text}");
}

async fn restart_api_server() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/restart-apiserver.sh");
    let run = move || Command::new(&script).stdout(Stdio::null()).status();
    let status = tokio::task::spawn_blocking(run)
        .await
        .expect("it ends")
        .expect("it starts");
    assert!(status.success(), "the API server is not back");
}

/// Waits until both replicas are the newest and ready, and no other is left.
async fn rolled_out(client: &Client) {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    until("both replicas to be ready", PATIENCE, async || {
        let deployment = deployments
            .get("vc-manager")
            .await
            .map_err(|error| error.to_string())?;
        let status = deployment.status.unwrap_or_default();
        let whole = status.observed_generation == deployment.metadata.generation
            && [status.replicas, status.updated_replicas, status.ready_replicas] == [Some(2); 3];
        let left = replicas(&pods).await.len();
        if whole && left == 2 {
            Ok(())
        } else {
            Err(format!("{status:?}, {left} pods"))
        }
    })
    .await;
}

/// Names of the replicas' pods.
async fn replicas(pods: &Api<Pod>) -> Vec<String> {
    let chosen = ListParams::default().labels("app.kubernetes.io/name=vc-manager");
    let all = pods.list(&chosen).await;
    all.map_or_else(
        |_| Vec::new(),
        |all| all.iter().map(kube::ResourceExt::name_any).collect(),
    )
}

/// Waits until a write that the webhooks have to refuse is refused by them.
async fn ready_to_answer(scene: &Scene) {
    until("the webhooks to be asked", PATIENCE, async || {
        let mut content = templates::standard();
        content["etcd"]["statefulset"]["spec"]["unheardOf"] = json!(true);
        let object = vc_manager::api::ClusterVersion::new(
            &format!("{}-never", scene.namespace()),
            serde_json::from_value(content).expect("an object"),
        );
        let params = kube::api::PostParams {
            dry_run: true,
            ..kube::api::PostParams::default()
        };
        match scene.cluster_versions().create(&params, &object).await {
            Err(kube::Error::Api(status))
                if status.message.contains("spec.etcd.statefulset.spec.unheardOf") =>
            {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// The certificate of the CA that signs.
async fn authority(secrets: &Api<Secret>) -> Option<Vec<u8>> {
    let secret = secrets.get_opt(CA).await.ok()??;
    secret.data?.remove("tls.crt").map(|ByteString(bytes)| bytes)
}

/// Waits until another CA than `before` signs, is published, and has had the time to be used by every replica.
async fn replaced(client: &Client, secrets: &Api<Secret>, before: &[u8]) {
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    until("a new CA to be published", PATIENCE, async || {
        let now = authority(secrets)
            .await
            .filter(|now| now != before)
            .ok_or("the CA is the old one")?;
        let configuration = configurations
            .get("virtualcluster-validating-webhook-configuration")
            .await
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8(now).map_err(|error| error.to_string())?;
        let everywhere = configuration.webhooks.iter().flatten().all(|webhook| {
            let bundle = webhook.client_config.ca_bundle.as_ref();
            bundle.is_some_and(|ByteString(bundle)| String::from_utf8_lossy(bundle).contains(text.trim()))
        });
        if everywhere {
            Ok(())
        } else {
            Err("it is not published".to_owned())
        }
    })
    .await;
    // Certificates of it are taken ten seconds after it was published.
    tokio::time::sleep(Duration::from_secs(15)).await;
}

/// Writers that go on until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    writes: Arc<AtomicUsize>,
    failures: Arc<Mutex<Vec<String>>>,
    writers: Vec<JoinHandle<()>>,
}

impl Load {
    /// One that edits a ClusterVersion and one that edits a VirtualCluster, each write one that the webhooks judge.
    async fn start(scene: &Scene, version: &str) -> Self {
        let tenants: Api<vc_manager::api::VirtualCluster> =
            Api::namespaced(scene.client.clone(), &scene.namespace());
        // Of a ClusterVersion that there is not, so that nothing comes of it but its spec.
        let tenant = vc_manager::api::VirtualCluster::new(
            "load",
            vc_manager::api::VirtualClusterSpec {
                cluster_version_name: format!("{}-none", scene.namespace()),
                ..Default::default()
            },
        );
        if tenants.get_opt("load").await.expect("an answer").is_none() {
            tenants
                .create(&kube::api::PostParams::default(), &tenant)
                .await
                .expect("it is accepted");
        }
        let load = Self {
            stop: Arc::default(),
            writes: Arc::default(),
            failures: Arc::default(),
            writers: Vec::new(),
        };
        let versions = scene.cluster_versions();
        let version = version.to_owned();
        let edit = move |n: usize| {
            let (versions, version) = (versions.clone(), version.clone());
            let patch = json!({"spec": {"controllerManager": {"statefulset": {"metadata": {"annotations": {"n": n.to_string()}}}}}});
            async move { patched(&versions, &version, &patch).await }
        };
        let edit_tenant = move |n: usize| {
            let tenants = tenants.clone();
            let patch = json!({"spec": {"pkiExpireDays": 1 + n % 3000}});
            async move { patched(&tenants, "load", &patch).await }
        };
        let writers = vec![load.writer(edit), load.writer(edit_tenant)];
        Self { writers, ..load }
    }

    fn writer<F>(&self, write: impl Fn(usize) -> F + Send + 'static) -> JoinHandle<()>
    where
        F: Future<Output = Result<(), kube::Error>> + Send,
    {
        let (stop, writes, failures) = (
            Arc::clone(&self.stop),
            Arc::clone(&self.writes),
            Arc::clone(&self.failures),
        );
        tokio::spawn(async move {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                match write(n).await {
                    Ok(()) => {
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                    // The API server itself is away, or has just come back and knows nobody yet.
                    Err(error) if !is_of_webhook(&error) => {}
                    Err(error) => failures
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(error.to_string()),
                }
                tokio::time::sleep(PACE).await;
            }
        })
    }

    /// Lets some writes happen, and fails if any has failed so far.
    async fn calm(&self, when: &str) {
        let goal = self.writes.load(Ordering::Relaxed) + 40;
        let deadline = Instant::now() + PATIENCE;
        while self.writes.load(Ordering::Relaxed) < goal {
            assert!(Instant::now() < deadline, "{when} nothing can be written");
            tokio::time::sleep(PACE).await;
        }
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(
            failures.is_empty(),
            "{when}: {} failed, the first: {}",
            failures.len(),
            failures[0]
        );
    }

    /// Forgets failures so far.
    fn forget(&self) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        println!("failed right after the kill: {}", failures.len());
        failures.clear();
    }

    /// Ends the writers; how many writes there were, and what failed.
    async fn stop(self) -> (usize, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        for writer in self.writers {
            writer.await.expect("it ends");
        }
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        (self.writes.load(Ordering::Relaxed), failures.clone())
    }
}

async fn patched<K>(api: &Api<K>, name: &str, patch: &Value) -> Result<(), kube::Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(|_| ())
}

/// Whether a write failed for the webhooks' sake: they were not reached, did not answer, or refused what is right.
fn is_of_webhook(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.message.contains("webhook"))
}
