//! Asks a tenant whether it works: `/readyz`, and a read that its administrator's certificate must allow.
//!
//! The question goes the way a client's would, through the tenant's own Service. Names inside the super cluster
//! do not resolve where the manager runs outside of it, so the Service's address is dialled, and the certificate
//! is checked for a name that every apiserver certificate has.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::Request;
use k8s_openapi::{
    api::core::v1::{Pod, Secret, Service},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::{Client, Config, config::Kubeconfig};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};
use tokio_rustls::TlsConnector;

use super::{
    plan::Answer,
    render::{TenantSecret, data_of},
};
use crate::pki::{TLS_CERTIFICATE_KEY, TLS_PRIVATE_KEY_KEY, kubeconfig};

/// How long a tenant may take to answer. Short, because a tenant that hangs must not hold a worker.
const LIMIT: Duration = Duration::from_secs(3);
/// A name in every apiserver certificate (contract: subject alternative names).
const SERVER_NAME: &str = "kubernetes.default.svc";

/// Asks the tenant behind `service` with the certificate of `admin` (Secret `admin-kubeconfig`).
pub(super) async fn ask(service: &Service, port: u16, admin: &Secret) -> Answer {
    let client = match client(service, port, admin).await {
        Ok(client) => client,
        Err(why) => return Answer::NotReady(why),
    };
    // The path of the read is one that anonymous clients may not see: it proves the certificate is accepted.
    for path in ["/readyz", "/api/v1/namespaces/kube-system"] {
        let request = match Request::get(path).body(Vec::new()) {
            Ok(request) => request,
            Err(error) => return Answer::NotReady(error.to_string()),
        };
        match tokio::time::timeout(LIMIT, client.request_text(request)).await {
            Ok(Ok(_)) => {}
            Ok(Err(kube::Error::Api(status))) => {
                return Answer::NotReady(format!(
                    "GET {path} is answered with {}: {}",
                    status.code, status.message
                ));
            }
            Ok(Err(error)) => return Answer::NotReady(format!("GET {path}: {}", chain(&error))),
            Err(_) => return Answer::NotReady(format!("GET {path}: no answer within {LIMIT:?}")),
        }
    }
    Answer::Ready
}

/// Whether nothing listens any more where `service` sends its clients to in `pod`: the connection is refused.
/// Any other failure proves nothing.
pub(super) async fn refuses_connections(pod: &Pod, service: &Service) -> bool {
    let Some((address, port)) = address_of(pod).zip(target_port(pod, service)) else {
        return false;
    };
    let connect = tokio::net::TcpStream::connect((address, port));
    matches!(
        tokio::time::timeout(Duration::from_millis(500), connect).await,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused
    )
}

/// The certificate (DER) that `pod` serves on `port`; `None` if it does not get to that.
///
/// The certificate is not judged, as it is only compared with one that is known; nothing is sent to who serves it.
/// `client` is the Secret of a certificate to show, if that is asked for: etcd would otherwise log that somebody had none.
pub(super) async fn served_certificate(pod: &Pod, port: u16, client: Option<&Secret>) -> Option<Vec<u8>> {
    let address = address_of(pod)?;
    let provider = CryptoProvider::get_default()
        .cloned()
        .unwrap_or_else(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
    let seen = Arc::new(Seen {
        certificate: Mutex::new(None),
        provider: Arc::clone(&provider),
    });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .ok()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&seen) as Arc<dyn ServerCertVerifier>);
    let config = match client.and_then(identity) {
        Some((certificate, key)) => config.with_client_auth_cert(vec![certificate], key).ok()?,
        None => config.with_no_client_auth(),
    };
    let name = ServerName::try_from(SERVER_NAME).ok()?;
    let shake = async {
        let stream = tokio::net::TcpStream::connect((address, port)).await?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    };
    // One that refuses this client has shown its own certificate before.
    let _ = tokio::time::timeout(LIMIT, shake).await;
    seen.certificate
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
}

/// Takes any certificate, and remembers it. The server must prove that it has the key.
#[derive(Debug)]
struct Seen {
    certificate: Mutex<Option<Vec<u8>>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Seen {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        *self.certificate.lock().unwrap_or_else(PoisonError::into_inner) = Some(end_entity.to_vec());
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Certificate and key of a Secret that holds a pair.
fn identity(secret: &Secret) -> Option<(CertificateDer<'static>, PrivateKeyDer<'static>)> {
    let data = data_of(secret);
    let certificate = CertificateDer::from_pem_slice(data.get(TLS_CERTIFICATE_KEY)?).ok()?;
    let key = PrivateKeyDer::from_pem_slice(data.get(TLS_PRIVATE_KEY_KEY)?).ok()?;
    Some((certificate, key))
}

fn address_of(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_deref()?.parse().ok()
}

/// The port of `pod` that the first port of `service` stands for.
pub(super) fn target_port(pod: &Pod, service: &Service) -> Option<u16> {
    let port = service.spec.as_ref()?.ports.as_ref()?.first()?;
    let number = match &port.target_port {
        None => port.port,
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(name)) => {
            let mut ports = pod
                .spec
                .as_ref()?
                .containers
                .iter()
                .flat_map(|container| container.ports.iter().flatten());
            ports
                .find(|port| port.name.as_ref() == Some(name))?
                .container_port
        }
    };
    u16::try_from(number).ok()
}

async fn client(service: &Service, port: u16, admin: &Secret) -> Result<Client, String> {
    let address = service
        .spec
        .as_ref()
        .and_then(|spec| spec.cluster_ip.as_deref())
        .filter(|ip| !ip.is_empty() && *ip != "None");
    let text = data_of(admin)
        .remove(TenantSecret::AdminKubeconfig.name())
        .unwrap_or_default();
    let text = String::from_utf8(text).map_err(|_| "its admin-kubeconfig is not text".to_owned())?;
    let parsed =
        kubeconfig::parse(&text).map_err(|error| format!("its admin-kubeconfig cannot be used: {error}"))?;
    let server = match address {
        Some(ip) => kubeconfig::server_url(ip, port),
        // Headless: the name is all there is.
        None => parsed.server.clone(),
    };
    let user = TenantSecret::AdminKubeconfig.name();
    let rendered = kubeconfig::render(user, &server, &parsed.ca_pem, user, &parsed.client)
        .map_err(|error| format!("its admin-kubeconfig cannot be used: {error}"))?;
    let kubeconfig = Kubeconfig::from_yaml(&rendered).map_err(|error| chain(&error))?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &kube::config::KubeConfigOptions::default())
        .await
        .map_err(|error| chain(&error))?;
    config.tls_server_name = address.map(|_| SERVER_NAME.to_owned());
    config.connect_timeout = Some(LIMIT);
    config.read_timeout = Some(LIMIT);
    config.default_retry = false;
    config.proxy_url = None;
    Client::try_from(config).map_err(|error| chain(&error))
}

/// An error with its causes, which is where TLS and connection errors say what happened.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
