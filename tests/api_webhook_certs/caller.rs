//! One who calls all replicas all the time, as the API server does: trusting what is published at that moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

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
    /// Calls these ports until stopped.
    pub(crate) fn start(client: Client, ports: Vec<u16>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let (mut calls, mut failures) = (0, Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let read = Instant::now();
                let bundles = published(&client).await;
                for (webhook, bundle) in &bundles {
                    for port in &ports {
                        calls += 1;
                        if let Err(error) = handshake(*port, bundle).await {
                            let age = read.elapsed();
                            let roots = CertificateDer::pem_slice_iter(bundle).count();
                            failures.push(format!(
                                "{webhook} at {port}, {roots} roots, {age:?} old: {error}"
                            ));
                        }
                    }
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
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
