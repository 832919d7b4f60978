//! Counts the tenants: by phase, by problem, and whose certificates end first.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{ResourceExt as _, core::DeserializeGuard, runtime::reflector::Store};

use super::status;
use crate::{
    api::{
        VirtualCluster,
        virtual_cluster::{CertificatesStatus, phase},
    },
    metrics::{End, Metrics},
};

/// Keeps the gauges, from what the watch of VirtualClusters holds in memory.
pub(super) async fn keep(store: Store<DeserializeGuard<VirtualCluster>>, metrics: Arc<Metrics>) {
    loop {
        let tenants = store.state();
        let mut counts = BTreeMap::new();
        for vc in tenants.iter().filter_map(|object| object.0.as_ref().ok()) {
            // Bounded, whatever somebody writes into the status.
            let known = [phase::PENDING, phase::RUNNING, phase::ERROR]
                .into_iter()
                .find(|known| *known == vc.phase());
            *counts.entry(known.unwrap_or("Unknown")).or_insert(0) += 1;
        }
        metrics.set_virtual_clusters(counts);
        let readable = || tenants.iter().filter_map(|object| object.0.as_ref().ok());
        let end = |vc: &VirtualCluster, pick: fn(&CertificatesStatus) -> Option<&Time>| {
            let certificates = vc.status.as_ref()?.certificates.as_ref()?;
            Some(End {
                seconds: pick(certificates)?.0.as_second(),
                namespace: vc.namespace().unwrap_or_default(),
                name: vc.name_any(),
            })
        };
        metrics.upkeep().set_ends(
            readable()
                .filter_map(|vc| end(vc, |certificates| certificates.not_after.as_ref()))
                .collect(),
            readable()
                .filter_map(|vc| end(vc, |certificates| certificates.root_ca_not_after.as_ref()))
                .collect(),
        );
        let problems = status::PROBLEMS.map(|(problem, type_, bad)| {
            let has = |vc: &&VirtualCluster| {
                let conditions = vc.status.iter().flat_map(|status| &status.conditions);
                let mut own = conditions.filter(|condition| condition.type_.as_deref() == Some(type_));
                own.any(|condition| condition.status == bad)
            };
            (problem, readable().filter(has).count())
        });
        metrics.upkeep().set_problems(problems);
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
}
