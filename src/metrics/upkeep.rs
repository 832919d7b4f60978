//! What is told of tenants that run: their certificates, and what was put right.

use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use super::register;

/// Tenants that have series of their own, at most: those whose certificates end first.
const SHOWN: usize = 100;

/// Families of the upkeep.
#[derive(Debug)]
pub struct UpkeepMetrics {
    issued: IntCounterVec,
    restarts: IntCounterVec,
    put_back: IntCounterVec,
    problems: IntGaugeVec,
    not_after: IntGaugeVec,
    root_ca_not_after: IntGaugeVec,
}

/// When something of a tenant ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    /// In seconds since 1970.
    pub seconds: i64,
    /// Namespace of the VirtualCluster.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl UpkeepMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let tenant = ["namespace", "virtualcluster"];
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
        };
        let counter = |name: &str, help: &str, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
        };
        Ok(Self {
            issued: counter(
                "vc_manager_certificates_issued_total",
                "Certificates issued to tenants that run, by Secret and reason",
                &["secret", "reason"],
            )?,
            restarts: counter(
                "vc_manager_credential_restarts_total",
                "Components restarted because they cannot take up a certificate while they run",
                &["component"],
            )?,
            put_back: counter(
                "vc_manager_drift_repairs_total",
                "Objects of tenants put back to what their revision says",
                &["kind"],
            )?,
            problems: gauge(
                "vc_manager_virtualclusters_with_problem",
                "VirtualClusters that a person has to look at, by problem",
                &["problem"],
            )?,
            not_after: gauge(
                "vc_manager_tenant_certificate_not_after_seconds",
                "When the first certificate of a tenant expires, in seconds since 1970; of the 100 that expire first",
                &tenant,
            )?,
            root_ca_not_after: gauge(
                "vc_manager_tenant_root_ca_not_after_seconds",
                "When the root CA of a tenant expires, in seconds since 1970; of the 100 that expire first",
                &tenant,
            )?,
        })
    }

    /// A certificate was issued into the Secret `secret`.
    pub fn issued(&self, secret: &str, reason: &str) {
        self.issued.with_label_values(&[secret, reason]).inc();
    }

    /// A component was restarted for a certificate.
    pub fn restarted(&self, component: &str) {
        self.restarts.with_label_values(&[component]).inc();
    }

    /// An object of this kind was put back.
    pub fn put_back(&self, kind: &str) {
        self.put_back.with_label_values(&[kind]).inc();
    }

    /// How many tenants have which problem.
    pub fn set_problems<'a>(&self, counts: impl IntoIterator<Item = (&'a str, usize)>) {
        for (problem, count) in counts {
            self.problems
                .with_label_values(&[problem])
                .set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// When certificates and root CAs of all tenants end.
    pub fn set_ends(&self, certificates: Vec<End>, root_cas: Vec<End>) {
        for (gauge, mut ends) in [
            (&self.not_after, certificates),
            (&self.root_ca_not_after, root_cas),
        ] {
            ends.sort_unstable();
            gauge.reset();
            for end in ends.into_iter().take(SHOWN) {
                gauge
                    .with_label_values(&[end.namespace.as_str(), end.name.as_str()])
                    .set(end.seconds);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_end_first_have_series() {
        let registry = Registry::new();
        let metrics = UpkeepMetrics::new(&registry).expect("names that are valid");
        let end = |seconds: i64| End {
            seconds,
            namespace: "ns".into(),
            name: format!("t{seconds}"),
        };
        metrics.set_ends((0..150).rev().map(end).collect(), vec![end(7)]);
        let names = |family: &str| {
            let families = registry.gather();
            let family = families
                .iter()
                .find(|known| known.name() == family)
                .expect("the family");
            family.get_metric().len()
        };
        assert_eq!(names("vc_manager_tenant_certificate_not_after_seconds"), 100);
        assert_eq!(names("vc_manager_tenant_root_ca_not_after_seconds"), 1);
        // Tenants that are gone have none.
        metrics.set_ends(vec![end(1)], Vec::new());
        assert_eq!(names("vc_manager_tenant_certificate_not_after_seconds"), 1);
    }
}
