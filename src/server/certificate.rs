//! Which of the ways to a serving certificate is taken, and who keeps it right from then on.

use std::sync::Arc;

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use super::configurations::Configurations;
use super::health::Readiness;
use super::self_check::{SelfCheck, Watched};
use super::shared_ca::{Lifetimes, Setup, SharedCa};
use super::source::{CertificateSource, Refresh};
use super::tls::ReloadableCertificate;
use crate::args::ManagerConfig;
use crate::metrics::Metrics;

/// Keeps the serving certificate right, and readiness with it.
#[derive(Default)]
pub struct Upkeep {
    refresh: Option<Refresh>,
    shared: Option<SharedCa>,
    check: Option<Watched>,
}

/// A certificate to serve, and its upkeep.
///
/// With the webhooks on it comes from the shared CA, or from files whose upkeep is somebody else's; readiness then
/// depends on the API server trusting it. With the webhooks off it comes from files, or is self-issued. Fails only for
/// files that cannot be used.
pub async fn prepare(
    config: &ManagerConfig,
    client: &kube::Client,
    metrics: &Arc<Metrics>,
    readiness: &Readiness,
) -> anyhow::Result<(ReloadableCertificate, Upkeep)> {
    let latch = readiness.latch("certificate");
    let certificate = ReloadableCertificate::with_gauge(metrics.serving_certificate_not_after().clone());
    let mut upkeep = Upkeep::default();
    let check = config.enable_webhook.then(|| {
        let latch = readiness.latch("webhook-certificate");
        SelfCheck::new(certificate.clone(), latch)
    });
    match check {
        Some(check) if config.webhook_cert_dir.is_none() => {
            let mut shared = SharedCa::new(Setup {
                client: client.clone(),
                namespace: config.namespace.clone(),
                limit: config.kube_api_timeout,
                lifetimes: Lifetimes {
                    ca: config.webhook_ca_validity,
                    leaf: config.webhook_cert_validity,
                },
                certificate: certificate.clone(),
                check,
                metrics: Arc::clone(metrics),
            });
            shared.start().await;
            if certificate.current().is_none() {
                // Health and metrics have to be served meanwhile. The refresh is dropped: it would compete.
                let stopgap = CertificateSource::new(None, &config.namespace);
                let _ = stopgap
                    .install(certificate.clone())
                    .await
                    .context("no serving certificate")?;
            }
            upkeep.shared = Some(shared);
        }
        check => {
            let source = CertificateSource::new(config.webhook_cert_dir.clone(), &config.namespace);
            let refresh = source
                .install(certificate.clone())
                .await
                .context("no serving certificate")?;
            upkeep.refresh = Some(refresh);
            upkeep.check = check.map(|check| {
                let configurations = Configurations::new(client.clone(), config.kube_api_timeout);
                Watched::new(check, configurations)
            });
        }
    }
    latch.set(true);
    Ok((certificate, upkeep))
}

impl Upkeep {
    /// Starts it; it ends with `stop`.
    pub fn spawn(self, metrics: &Arc<Metrics>, stop: &CancellationToken) {
        if let Some(refresh) = self.refresh {
            tokio::spawn(refresh.run(Arc::clone(metrics), stop.clone()));
        }
        if let Some(shared) = self.shared {
            tokio::spawn(shared.run(stop.clone()));
        }
        if let Some(check) = self.check {
            tokio::spawn(check.run(stop.clone()));
        }
    }
}
