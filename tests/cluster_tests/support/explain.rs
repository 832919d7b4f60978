//! What a person wants to see of a tenant that is not as expected.

use std::fmt::Write as _;

use k8s_openapi::api::{
    core::v1::{ContainerState, Pod},
    events::v1::Event,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, LogParams},
};
use vc_manager::api::{VirtualCluster, root_namespace};

use super::manager;

/// All that is known of each VirtualCluster in `namespace`.
pub(crate) async fn explain_all(client: &Client, namespace: &str) -> String {
    let tenants: Api<VirtualCluster> = Api::namespaced(client.clone(), namespace);
    let all = match tenants.list(&ListParams::default()).await {
        Ok(all) => all,
        Err(error) => return format!("the VirtualClusters of {namespace} cannot be listed: {error}"),
    };
    let mut text = String::new();
    for tenant in all {
        text.push_str(&explain(client, namespace, &tenant.name_any()).await);
    }
    text
}

/// Status, Events, pods with the end of their logs, and what the manager said of the tenant.
async fn explain(client: &Client, namespace: &str, name: &str) -> String {
    let mut text = format!("\n--- VirtualCluster {namespace}/{name}\n");
    let tenants: Api<VirtualCluster> = Api::namespaced(client.clone(), namespace);
    let root = match tenants.get_opt(name).await {
        Ok(Some(tenant)) => {
            let shown = serde_json::json!({"labels": tenant.labels(), "finalizers": tenant.finalizers(),
                "deletion": tenant.metadata.deletion_timestamp, "status": tenant.status});
            let _ = writeln!(text, "{shown:#}");
            root_namespace::of(&tenant)
        }
        other => {
            let _ = writeln!(
                text,
                "{}",
                other.map_or_else(|error| error.to_string(), |_| "is not there".into())
            );
            String::new()
        }
    };
    text.push_str("--- Events\n");
    for (time, reason, note) in events(client, namespace, name).await {
        let _ = writeln!(text, "{time} {reason}: {note}");
    }
    if !root.is_empty() {
        let _ = writeln!(text, "--- pods of {root}");
        pods(client, &root, &mut text).await;
    }
    let _ = writeln!(text, "--- log of the manager ({})", manager::log_file().display());
    text.push_str(&manager::log_about(&format!("{namespace}/{name}"), 30));
    text
}

/// Events about a VirtualCluster, oldest first: time, reason, note.
pub(crate) async fn events(client: &Client, namespace: &str, name: &str) -> Vec<(String, String, String)> {
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    let Ok(all) = api.list(&ListParams::default()).await else {
        return Vec::new();
    };
    let about = |event: &Event| {
        event
            .regarding
            .as_ref()
            .is_some_and(|of| of.name.as_deref() == Some(name))
    };
    let mut found: Vec<_> = all
        .into_iter()
        .filter(about)
        .map(|event| {
            let time = event
                .event_time
                .map_or_else(String::new, |time| time.0.to_string());
            (
                time,
                event.reason.unwrap_or_default(),
                event.note.unwrap_or_default(),
            )
        })
        .collect();
    found.sort();
    found
}

async fn pods(client: &Client, root: &str, text: &mut String) {
    let api: Api<Pod> = Api::namespaced(client.clone(), root);
    let Ok(all) = api.list(&ListParams::default()).await else {
        return;
    };
    for pod in all {
        let name = pod.name_any();
        let status = pod.status.clone().unwrap_or_default();
        let deleted = if pod.metadata.deletion_timestamp.is_some() {
            ", is being deleted"
        } else {
            ""
        };
        let _ = writeln!(text, "{name}: {}{deleted}", status.phase.unwrap_or_default());
        for container in status.container_statuses.iter().flatten() {
            let _ = writeln!(
                text,
                "  {} {}: ready {}, {} restarts, now {}, before {}",
                container.name,
                container.image,
                container.ready,
                container.restart_count,
                state(container.state.as_ref()),
                state(container.last_state.as_ref()),
            );
        }
        let parameters = LogParams {
            tail_lines: Some(8),
            ..LogParams::default()
        };
        if let Ok(log) = api.logs(&name, &parameters).await {
            for line in log.lines() {
                let _ = writeln!(text, "  | {line}");
            }
        }
    }
}

fn state(state: Option<&ContainerState>) -> String {
    let Some(state) = state else { return "-".into() };
    if let Some(waiting) = &state.waiting {
        return format!("waits ({})", waiting.reason.as_deref().unwrap_or_default());
    }
    if let Some(ended) = &state.terminated {
        return format!(
            "ended with {} ({})",
            ended.exit_code,
            ended.reason.as_deref().unwrap_or_default()
        );
    }
    if state.running.is_some() {
        "runs".into()
    } else {
        "-".into()
    }
}
