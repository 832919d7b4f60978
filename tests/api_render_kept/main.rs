//! A new version of the manager rolls nobody: what earlier ones left is as the present one would write it.
//!
//! `tests/golden/README.md` says what the golden files are and how those of a new version are made.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod golden;
mod hashes;
mod record;
mod store;
#[path = "../support/mod.rs"]
mod support;

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use kube::{
    ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use golden::Golden;
use store::Earlier;
use support::{Driver, Manager, Options, Scope, eventually};

/// Tenants of each golden file, of which there are two of each version.
const TENANTS: usize = 10;

/// Waits until the manager has been silent for a second.
async fn at_rest(manager: &Manager) {
    let mut mark = manager.traffic.mark();
    eventually("a second of silence", async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let quiet = manager
            .traffic
            .since(mark)
            .iter()
            .all(|call| call.verb == "watch");
        mark = manager.traffic.mark();
        quiet.then_some(())
    })
    .await;
}

/// Everything that a manager could write, as kind, namespace and name → resourceVersion.
async fn versions(scope: &Scope, roots: &[String]) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for root in roots {
        let of_it = scope.versions(root).await.into_iter();
        all.extend(of_it.map(|(name, version)| (format!("{root} {name}"), version)));
    }
    let mut add = |kind: &str, name: String, version: Option<String>| {
        all.insert(format!("{kind} {name}"), version.unwrap_or_default());
    };
    for tenant in scope.tenants().list(&ListParams::default()).await.unwrap() {
        add("VirtualCluster", tenant.name_any(), tenant.resource_version());
    }
    let own = ListParams::default().labels(&scope.selector());
    for version in scope.cluster_versions().list(&own).await.unwrap() {
        add("ClusterVersion", version.name_any(), version.resource_version());
    }
    let revisions = scope.api::<ControllerRevision>(&scope.manager_namespace());
    for revision in revisions.list(&ListParams::default()).await.unwrap() {
        add(
            "ControllerRevision",
            revision.name_any(),
            revision.resource_version(),
        );
    }
    all
}

async fn generations(scope: &Scope, roots: &[String]) -> BTreeMap<String, Option<i64>> {
    let mut all = BTreeMap::new();
    for root in roots {
        let sets = scope.api::<StatefulSet>(root).list(&ListParams::default()).await;
        let sets = sets.unwrap().into_iter();
        all.extend(sets.map(|set| (format!("{root}/{}", set.name_any()), set.metadata.generation)));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_earlier_versions_left_is_left_alone() {
    let scope = Scope::new("kept").await;
    let driver = Driver::start(&scope);
    let earlier = Earlier::new(&scope).await;
    let files = golden::all();
    assert!(!files.is_empty());
    let mut roots = Vec::new();
    let mut cluster_versions = Vec::new();
    for (index, (name, golden)) in files.iter().enumerate() {
        eprintln!("{TENANTS} tenants of {name}");
        let cluster_version = format!("kept-{index}");
        roots.extend(earlier.left(golden, &cluster_version, TENANTS).await);
        cluster_versions.push(cluster_version);
    }
    drop(driver);
    let before = versions(&scope, &roots).await;
    let generations_before = generations(&scope, &roots).await;
    assert_eq!(generations_before.len(), 3 * roots.len());

    let manager = Manager::start(&scope, Options::default());
    eventually("a look at everything", async || {
        let calls = manager.traffic.calls();
        // The last that is read of a tenant.
        let looked_into = |root: &String| {
            calls
                .iter()
                .any(|call| call.verb == "list" && call.resource == "pods" && call.namespace == *root)
        };
        let looked_at = |name: &String| {
            calls
                .iter()
                .any(|call| call.resource == "clusterversions" && call.name == *name)
        };
        (roots.iter().all(looked_into) && cluster_versions.iter().all(looked_at)).then_some(())
    })
    .await;
    at_rest(&manager).await;
    let mut written = manager.traffic.calls();
    written.retain(|call| call.is_write() || (call.resource == "events" && call.verb != "watch"));
    let count = written.len();
    let written: Vec<_> = written.iter().take(20).map(ToString::to_string).collect();
    eprintln!("{count} writes");
    assert_eq!(
        written, [""; 0],
        "a new version of the manager writes to tenants that differ in nothing"
    );
    assert_eq!(generations(&scope, &roots).await, generations_before);
    assert_eq!(versions(&scope, &roots).await, before);

    // That is because nothing differs, and not because it does not look after them.
    let _driver = Driver::start(&scope);
    for root in [roots.first().unwrap(), roots.last().unwrap()] {
        let sets = scope.api::<StatefulSet>(root);
        let change =
            json!({"spec": {"template": {"metadata": {"labels": {"tenancy.x-k8s.io/cluster": "other"}}}}});
        let changed = sets
            .patch("apiserver", &PatchParams::default(), &Patch::Merge(change))
            .await
            .unwrap();
        let label = |set: &StatefulSet| {
            let template = &set.spec.as_ref().unwrap().template;
            template.metadata.as_ref().unwrap().labels.as_ref().unwrap()["tenancy.x-k8s.io/cluster"].clone()
        };
        assert_eq!(label(&changed), "other");
        eventually("it to be put back", async || {
            (label(&sets.get("apiserver").await.unwrap()) == *root).then_some(())
        })
        .await;
    }
}

/// Makes the golden files of a version, if it is named in `GOLDEN_UPDATE`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn golden_files_of_a_new_version() {
    let Some(version) = std::env::var_os("GOLDEN_UPDATE") else {
        eprintln!("nothing to do: GOLDEN_UPDATE names no version");
        return;
    };
    let version = version.into_string().expect("text");
    let folder = golden::new_folder(&version);
    let recorded = record::all().await;
    golden::write(&folder, &recorded);
}

/// They say what they are meant to say, and hold no key.
#[test]
fn golden_files_have_placeholders_for_all_that_differs() {
    for (name, golden) in golden::all() {
        let text = golden.text();
        assert!(
            !text.contains("PRIVATE KEY") && !text.contains("BEGIN CERTIFICATE"),
            "{name}"
        );
        for placeholder in [
            "${root-namespace}",
            "${hash:root-ca}",
            "${hash:apiserver-ca}",
            "${hash:front-proxy-ca}",
            "${hash:serviceaccount-rsa}",
            "${hash:controller-manager-kubeconfig}",
            "${client-key-data}",
        ] {
            assert!(text.contains(placeholder), "{placeholder} is not in {name}");
        }
        let by_address = text.contains("${address}");
        assert_eq!(by_address, name.ends_with("cluster-ip"), "{name}");
        let Golden {
            leaves,
            secrets,
            objects,
            ..
        } = golden;
        assert_eq!((leaves.len(), secrets.len()), (5, 7), "{name}");
        assert!(objects.len() >= 5, "{name}");
    }
}
