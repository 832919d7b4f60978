//! Everything `/metrics` shows. One [`Metrics`] owns its registry; there is no global one.
//!
//! The three `clusters_*` families keep the names, labels and help texts of the Go manager, and like there exist only
//! while the gate `ClusterVersionPartialUpgrade` is on. Their label `resource_version` takes a new value with every
//! edit of a `ClusterVersion`; [`Metrics::drop_superseded`] keeps the number of series bounded.

mod upkeep;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

pub use upkeep::{End, UpkeepMetrics};

use crate::build_info;

/// Labels of a family that has one series, and that only once it has a value.
pub const NO_LABELS: &[&str] = &[];
const UPGRADE_LABELS: [&str; 2] = ["cluster_version", "resource_version"];
const UPGRADE_BUCKETS: [f64; 13] = [
    0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0, 300.0, 600.0, 900.0,
];

/// How an upgrade of a tenant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeOutcome {
    /// Brought to the revision.
    Upgraded,
    /// Was at the revision already. Counts as upgraded, as in the Go manager.
    Unchanged,
    /// Not brought to the revision.
    Failed,
}

/// How a pass over one object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileOutcome {
    /// Nothing is left to do.
    Completed,
    /// Waits for something in the cluster; not an error.
    Waiting,
    /// Another writer was faster; tried again soon.
    Conflict,
    /// Failed.
    Failed,
}

impl ReconcileOutcome {
    /// Every outcome.
    pub const ALL: [Self; 4] = [Self::Completed, Self::Waiting, Self::Conflict, Self::Failed];

    /// Value of the label `outcome`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Waiting => "waiting",
            Self::Conflict => "conflict",
            Self::Failed => "failed",
        }
    }
}

/// The families of the partial upgrade, and which series of them exist.
#[derive(Debug)]
struct UpgradeMetrics {
    upgraded: IntCounterVec,
    failed: IntCounterVec,
    seconds: HistogramVec,
    /// Resource versions that have series, by `ClusterVersion`.
    series: Mutex<BTreeMap<String, BTreeSet<String>>>,
}

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    upgrades: Option<UpgradeMetrics>,
    upkeep: UpkeepMetrics,
    virtual_clusters: IntGaugeVec,
    /// Phases that have a series.
    phases: Mutex<BTreeSet<String>>,
    reconciles: IntCounterVec,
    reconcile_seconds: HistogramVec,
    leader: IntGauge,
    certificate_reload_errors: IntCounter,
    serving_certificate_not_after: IntGaugeVec,
    webhook_ca_not_after: IntGaugeVec,
}

impl Metrics {
    /// Makes and registers all families; those of the partial upgrade only if `partial_upgrade` is set.
    ///
    /// Fails only on a mistake in this file: an invalid or doubly registered name.
    pub fn new(partial_upgrade: bool) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let upgrades = if partial_upgrade {
            Some(UpgradeMetrics::new(&registry)?)
        } else {
            None
        };
        #[cfg(target_os = "linux")]
        registry.register(Box::new(
            prometheus::process_collector::ProcessCollector::for_self(),
        ))?;
        let build = register(
            &registry,
            IntGaugeVec::new(
                Opts::new(
                    "vc_manager_build_info",
                    "Always 1; the labels say what this binary was built from",
                ),
                &["version", "commit", "build_date"],
            )?,
        )?;
        build
            .with_label_values(&[build_info::VERSION, build_info::COMMIT, build_info::BUILD_DATE])
            .set(1);
        Ok(Self {
            upgrades,
            upkeep: UpkeepMetrics::new(&registry)?,
            phases: Mutex::default(),
            virtual_clusters: register(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "vc_manager_virtualclusters",
                        "VirtualClusters by phase, as the leader sees them",
                    ),
                    &["phase"],
                )?,
            )?,
            reconciles: register(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "vc_manager_reconcile_total",
                        "Passes over one object, by how they ended",
                    ),
                    &["controller", "outcome"],
                )?,
            )?,
            reconcile_seconds: register(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "vc_manager_reconcile_seconds",
                        "Duration of one pass over one object",
                    ),
                    &["controller"],
                )?,
            )?,
            leader: register(
                &registry,
                IntGauge::new(
                    "vc_manager_leader",
                    "1 while this replica runs the reconcile loop, otherwise 0",
                )?,
            )?,
            certificate_reload_errors: register(
                &registry,
                IntCounter::new(
                    "vc_manager_serving_certificate_reload_errors_total",
                    "Changed serving certificates that could not be used; the previous one stays in use",
                )?,
            )?,
            serving_certificate_not_after: register(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "vc_manager_serving_certificate_not_after_seconds",
                        "When the certificate of the HTTPS listener expires, in seconds since 1970",
                    ),
                    NO_LABELS,
                )?,
            )?,
            webhook_ca_not_after: register(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "vc_manager_webhook_ca_not_after_seconds",
                        "When the CA that signs the replicas' certificates expires, in seconds since 1970; \
                         it is replaced after two thirds of its life",
                    ),
                    NO_LABELS,
                )?,
            )?,
            registry,
        })
    }

    /// Where further collectors are registered.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The families of tenants that run.
    #[must_use]
    pub fn upkeep(&self) -> &UpkeepMetrics {
        &self.upkeep
    }

    /// Notes the end of an upgrade attempt. `resource_version` is the applied version's label value, empty if there
    /// is none. Does nothing while the gate is off.
    pub fn upgrade_finished(
        &self,
        cluster_version: &str,
        resource_version: &str,
        duration: Duration,
        outcome: UpgradeOutcome,
    ) {
        let Some(upgrades) = &self.upgrades else { return };
        let labels = [cluster_version, resource_version];
        // Held until the series exist, so that a concurrent drop_superseded sees all of them or none.
        let mut series = upgrades.series.lock().unwrap_or_else(PoisonError::into_inner);
        series
            .entry(cluster_version.to_owned())
            .or_default()
            .insert(resource_version.to_owned());
        upgrades
            .seconds
            .with_label_values(&labels)
            .observe(duration.as_secs_f64());
        let counter = match outcome {
            UpgradeOutcome::Upgraded | UpgradeOutcome::Unchanged => &upgrades.upgraded,
            UpgradeOutcome::Failed => &upgrades.failed,
        };
        counter.with_label_values(&labels).inc();
    }

    /// Removes the upgrade series of a `ClusterVersion` for all resource versions but those in `keep`; with an empty
    /// `keep` (the `ClusterVersion` is gone) all of them.
    pub fn drop_superseded(&self, cluster_version: &str, keep: &[String]) {
        let Some(upgrades) = &self.upgrades else { return };
        let mut series = upgrades.series.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(versions) = series.get_mut(cluster_version) else {
            return;
        };
        versions.retain(|version| {
            if keep.contains(version) {
                return true;
            }
            let labels = [cluster_version, version.as_str()];
            // An error means that the series never was: a version has only failures, or none.
            let _ = upgrades.upgraded.remove_label_values(&labels);
            let _ = upgrades.failed.remove_label_values(&labels);
            let _ = upgrades.seconds.remove_label_values(&labels);
            false
        });
        if versions.is_empty() {
            series.remove(cluster_version);
        }
    }

    /// Sets how many `VirtualClusters` are in each phase. Phases not named are no longer shown.
    pub fn set_virtual_clusters<'a>(&self, by_phase: impl IntoIterator<Item = (&'a str, usize)>) {
        // Set first, then removed, so that a scrape in between sees no gap.
        let mut shown = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gone = std::mem::take(&mut *shown);
        for (phase, count) in by_phase {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.virtual_clusters.with_label_values(&[phase]).set(count);
            gone.remove(phase);
            shown.insert(phase.to_owned());
        }
        for phase in gone {
            // Cannot fail: what was shown has a series.
            let _ = self.virtual_clusters.remove_label_values(&[phase.as_str()]);
        }
    }

    /// Notes the end of a pass of the controller named.
    pub fn reconciled(&self, controller: &str, outcome: ReconcileOutcome, duration: Duration) {
        self.reconciles
            .with_label_values(&[controller, outcome.as_str()])
            .inc();
        self.reconcile_seconds
            .with_label_values(&[controller])
            .observe(duration.as_secs_f64());
    }

    /// Notes whether this replica runs the loop.
    pub fn set_leader(&self, leader: bool) {
        self.leader.set(i64::from(leader));
    }

    /// Notes that a changed serving certificate could not be used.
    pub fn certificate_reload_failed(&self) {
        self.certificate_reload_errors.inc();
    }

    /// The family that shows the end of the serving certificate's life.
    #[must_use]
    pub fn serving_certificate_not_after(&self) -> &IntGaugeVec {
        &self.serving_certificate_not_after
    }

    /// Notes the end of the webhook CA's life, in seconds since 1970.
    pub fn set_webhook_ca_not_after(&self, seconds: i64) {
        self.webhook_ca_not_after
            .with_label_values(NO_LABELS)
            .set(seconds);
    }

    /// The content type of [`Metrics::encode`].
    #[must_use]
    pub fn content_type() -> String {
        TextEncoder::new().format_type().to_owned()
    }

    /// All metrics in the Prometheus text format.
    pub fn encode(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

impl UpgradeMetrics {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| IntCounterVec::new(Opts::new(name, help), &UPGRADE_LABELS);
        Ok(Self {
            upgraded: register(
                registry,
                counter(
                    "clusters_upgraded",
                    "Amount of clusters upgraded by reconciler in featuregate.ClusterVersionPartialUpgrade",
                )?,
            )?,
            failed: register(
                registry,
                counter(
                    "clusters_upgrade_failed",
                    "Amount of clusters failed to upgrade by reconciler in featuregate.ClusterVersionPartialUpgrade",
                )?,
            )?,
            seconds: register(
                registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "clusters_upgrade_seconds",
                        "Duration of cluster upgrade by reconciler in featuregate.ClusterVersionPartialUpgrade",
                    )
                    .buckets(UPGRADE_BUCKETS.to_vec()),
                    &UPGRADE_LABELS,
                )?,
            )?,
            series: Mutex::default(),
        })
    }
}

fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    collector: C,
) -> Result<C, prometheus::Error> {
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics) -> String {
        String::from_utf8(metrics.encode().unwrap()).unwrap()
    }

    #[test]
    fn upgrade_families_are_those_of_the_go_manager() {
        let metrics = Metrics::new(true).unwrap();
        metrics.upgrade_finished("cv", "7", Duration::from_secs(15), UpgradeOutcome::Upgraded);
        metrics.upgrade_finished("cv", "7", Duration::from_millis(1), UpgradeOutcome::Unchanged);
        metrics.upgrade_finished("cv", "7", Duration::from_secs(700), UpgradeOutcome::Failed);
        let text = text(&metrics);
        let ours: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("clusters_upgrade"))
            .collect();
        insta::assert_snapshot!(ours.join("\n"), @r#"
        # HELP clusters_upgrade_failed Amount of clusters failed to upgrade by reconciler in featuregate.ClusterVersionPartialUpgrade
        # TYPE clusters_upgrade_failed counter
        clusters_upgrade_failed{cluster_version="cv",resource_version="7"} 1
        # HELP clusters_upgrade_seconds Duration of cluster upgrade by reconciler in featuregate.ClusterVersionPartialUpgrade
        # TYPE clusters_upgrade_seconds histogram
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="0.1"} 1
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="0.5"} 1
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="1"} 1
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="5"} 1
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="10"} 1
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="20"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="30"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="60"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="90"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="120"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="300"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="600"} 2
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="900"} 3
        clusters_upgrade_seconds_bucket{cluster_version="cv",resource_version="7",le="+Inf"} 3
        clusters_upgrade_seconds_sum{cluster_version="cv",resource_version="7"} 715.001
        clusters_upgrade_seconds_count{cluster_version="cv",resource_version="7"} 3
        # HELP clusters_upgraded Amount of clusters upgraded by reconciler in featuregate.ClusterVersionPartialUpgrade
        # TYPE clusters_upgraded counter
        clusters_upgraded{cluster_version="cv",resource_version="7"} 2
        "#);
    }

    #[test]
    fn nothing_of_the_upgrade_while_the_gate_is_off() {
        let metrics = Metrics::new(false).unwrap();
        metrics.upgrade_finished("cv", "7", Duration::ZERO, UpgradeOutcome::Upgraded);
        metrics.drop_superseded("cv", &[]);
        assert!(!text(&metrics).contains("clusters_upgrade"));
    }

    #[test]
    fn superseded_series_go() {
        let metrics = Metrics::new(true).unwrap();
        for version in ["", "1", "2", "3"] {
            metrics.upgrade_finished("cv", version, Duration::ZERO, UpgradeOutcome::Failed);
            metrics.upgrade_finished("other", version, Duration::ZERO, UpgradeOutcome::Upgraded);
        }
        metrics.drop_superseded("cv", &["2".to_owned(), "3".to_owned()]);
        let shown = text(&metrics);
        for (version, kept) in [("", false), ("1", false), ("2", true), ("3", true)] {
            let series = format!("cluster_version=\"cv\",resource_version=\"{version}\"");
            assert_eq!(shown.contains(&series), kept, "{version}");
        }
        assert!(shown.contains("cluster_version=\"other\",resource_version=\"1\""));
        metrics.drop_superseded("cv", &[]);
        assert!(!text(&metrics).contains("cluster_version=\"cv\""));
    }

    #[test]
    fn own_families() {
        let metrics = Metrics::new(true).unwrap();
        metrics.set_leader(true);
        metrics.set_virtual_clusters([("Running", 3), ("Pending", 1)]);
        metrics.set_virtual_clusters([("Running", 2)]);
        metrics.reconciled(
            "virtualcluster",
            ReconcileOutcome::Waiting,
            Duration::from_millis(3),
        );
        metrics.certificate_reload_failed();
        assert!(!text(&metrics).contains("not_after"), "no value, no series");
        metrics
            .serving_certificate_not_after()
            .with_label_values(NO_LABELS)
            .set(7);
        metrics.set_webhook_ca_not_after(8);
        let text = text(&metrics);
        for line in [
            "vc_manager_leader 1",
            "vc_manager_virtualclusters{phase=\"Running\"} 2",
            "vc_manager_reconcile_total{controller=\"virtualcluster\",outcome=\"waiting\"} 1",
            "vc_manager_reconcile_seconds_count{controller=\"virtualcluster\"} 1",
            "vc_manager_serving_certificate_reload_errors_total 1",
            "vc_manager_serving_certificate_not_after_seconds 7",
            "vc_manager_webhook_ca_not_after_seconds 8",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} not in\n{text}");
        }
        assert!(!text.contains("Pending"));
        assert!(text.contains("vc_manager_build_info{"));
        assert!(text.contains("process_resident_memory_bytes"));
    }
}
