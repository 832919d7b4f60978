//! One who calls all replicas all the time, as API servers do: trusting what is published at that moment, and what was
//! published a moment ago, as one does that hears of it late.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kube::Client;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::scene::published;

/// The end-entity certificate that is served, once it is verified against `bundle` for 127.0.0.1.
pub(crate) async fn handshake(port: u16, bundle: &[u8]) -> Result<CertificateDer<'static>, String> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(bundle) {
        roots.add(root.unwrap()).unwrap();
    }
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(("127.0.0.1", port))
        .await
        .map_err(|error| error.to_string())?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
        .map_err(|error| error.to_string())?;
    Ok(stream.get_ref().1.peer_certificates().unwrap()[0].clone())
}

/// A caller at work.
pub(crate) struct Caller {
    stop: Arc<AtomicBool>,
    task: JoinHandle<(usize, Vec<String>)>,
}

impl Caller {
    /// Calls these ports until stopped. `lag` is how late one may hear of a bundle.
    pub(crate) fn start(client: Client, ports: Vec<u16>, lag: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let (mut calls, mut failures) = (0, Vec::new());
            let mut heard = VecDeque::new();
            while !stopped.load(Ordering::Relaxed) {
                heard.push_back((Instant::now(), published(&client).await));
                while heard.front().is_some_and(|(at, _)| at.elapsed() > lag) {
                    heard.pop_front();
                }
                let first_and_last = [heard.front().cloned(), heard.back().cloned()];
                for (at, bundles) in first_and_last.into_iter().flatten() {
                    for (webhook, bundle) in &bundles {
                        for port in &ports {
                            let outcome = handshake(*port, bundle).await;
                            let age = at.elapsed();
                            // On a busy machine that took too long to count.
                            if age > lag {
                                continue;
                            }
                            calls += 1;
                            if let Err(error) = outcome {
                                let roots = CertificateDer::pem_slice_iter(bundle).count();
                                failures.push(format!(
                                    "{webhook} at {port}, {roots} roots, {age:?} old: {error}"
                                ));
                            }
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            (calls, failures)
        });
        Self { stop, task }
    }

    /// Stops; there must have been calls, and none may have failed.
    pub(crate) async fn was_never_refused(self) {
        self.stop.store(true, Ordering::Relaxed);
        let (calls, failures) = self.task.await.unwrap();
        eprintln!("{calls} handshakes, {} failed", failures.len());
        assert!(calls > 100, "{calls}");
        assert!(
            failures.is_empty(),
            "{} of {calls}: {failures:#?}",
            failures.len()
        );
    }
}
