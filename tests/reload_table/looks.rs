//! Looks from outside at which file a running program uses: one for each row of the table.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use k8s_openapi::jiff::Timestamp;
use rcgen::{CertificateParams, DnType, KeyPair, SigningKey as _};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::sleep;
use vc_manager::{api::Component, controller::reload::Row, pki::CertifiedPair};

use crate::{
    caller,
    endpoint::{Endpoint, Met},
    identities::{client, der, server},
    scene::{KUBECONFIGS, Scene},
    volume::Volume,
};

/// How often what is waited for is looked at.
const PAUSE: Duration = Duration::from_millis(100);
/// How long connections that were cut may take to be made again, and controllers to do their work.
const SOON: Duration = Duration::from_secs(20);

/// Which content of a file is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Old,
    New,
}

/// What could not be told now, and may be a moment later.
pub(crate) type Look = Result<Seen, String>;

/// Looks at what `row` is about.
pub(crate) async fn look(scene: &Scene, row: &Row) -> Look {
    match (row.component, row.purpose) {
        (Component::ApiServer, "serving certificate") => presented(scene, scene.apiserver, "apiserver").await,
        (Component::ApiServer, "client of etcd") => {
            let mark = scene.to_etcd.cut();
            shown(scene.volume("apiserver"), &met(&scene.to_etcd, mark).await?)
        }
        (Component::ApiServer, "client of kubelets") => kubelet_client(scene).await,
        (Component::ApiServer, "client of aggregated API servers") => front_proxy_client(scene).await,
        (Component::ApiServer, "CA of clients") => client_ca(scene).await,
        (Component::ApiServer, "CA of front proxies") => front_proxy_ca(scene).await,
        (Component::ApiServer, "CA of etcd") => connects_to_others(scene, &scene.to_etcd, "h2").await,
        (Component::ApiServer, "keys that verify tokens") => verifying_key(scene).await,
        (Component::ApiServer, "key that signs tokens") => requested_token(scene).await,
        (Component::ControllerManager, "client of the apiserver") => kubeconfigs(scene).await,
        (Component::ControllerManager, "CA published to namespaces") => published_ca(scene).await,
        (Component::ControllerManager, "CA that signs certificates") => signing_ca(scene).await,
        (Component::ControllerManager, "key that signs tokens") => token_in_secret(scene).await,
        (Component::Etcd, "serving certificate") => presented(scene, scene.etcd, "etcd").await,
        (Component::Etcd, "serving certificate for peers") => presented(scene, scene.etcd_peer, "etcd").await,
        (Component::Etcd, "client of peers") => {
            let mark = scene.member.mark();
            shown(scene.volume("etcd"), &met(&scene.member, mark).await?)
        }
        (Component::Etcd, "CA of clients") => lets_others_in(scene, scene.etcd).await,
        (Component::Etcd, "CA of peers") => {
            let inwards = lets_others_in(scene, scene.etcd_peer).await?;
            let outwards = connects_to_others(scene, &scene.member, "http/1.1").await?;
            alike([inwards, outwards])
        }
        _ => panic!("nobody knows how to look at {row:?}"),
    }
}

fn alike(seen: impl IntoIterator<Item = Seen>) -> Look {
    let seen: Vec<_> = seen.into_iter().collect();
    match seen.first() {
        Some(first) if seen.iter().all(|other| other == first) => Ok(*first),
        _ => Err(format!("not alike: {seen:?}")),
    }
}

/// A number that was not used before.
fn number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Which certificate of `volume` this one is.
fn which(volume: &Volume, certificate: &[u8]) -> Look {
    [(&volume.old, Seen::Old), (&volume.new, Seen::New)]
        .into_iter()
        .find(|(pair, _)| *der(&pair.certificate_pem) == *certificate)
        .map(|(_, seen)| seen)
        .ok_or_else(|| "neither the old nor the new certificate".to_owned())
}

async fn presented(scene: &Scene, port: u16, volume: &str) -> Look {
    let admin = scene.ours.leaf("admin", None);
    let tls = client(&scene.ours, Some(&admin), None);
    let certificate = caller::presented(port, &tls)
        .await
        .map_err(|error| error.to_string())?;
    which(scene.volume(volume), &certificate)
}

/// Waits for connections to `endpoint`, and a moment longer, so that each of several clients gets its turn.
async fn met(endpoint: &Endpoint, mark: usize) -> Result<Vec<Met>, String> {
    let met = async {
        while endpoint.met(mark).is_empty() {
            sleep(PAUSE).await;
        }
        sleep(5 * PAUSE).await;
        endpoint.met(mark)
    };
    tokio::time::timeout(SOON, met)
        .await
        .map_err(|_| "nobody connects".to_owned())
}

/// Which certificate of `volume` all these clients showed.
fn shown(volume: &Volume, met: &[Met]) -> Look {
    let seen = met.iter().map(|met| match met {
        Met::Client(Some(certificate)) => which(volume, certificate),
        other => Err(format!("{other:?}")),
    });
    alike(seen.collect::<Result<Vec<_>, _>>()?)
}

/// Whether clients of `endpoint` take it when it shows a certificate of the other authority.
async fn connects_to_others(scene: &Scene, endpoint: &Endpoint, alpn: &str) -> Look {
    let [own, other] = [&scene.ours, &scene.others].map(|ca| ca.leaf("endpoint", None));
    let mark = endpoint.present(server(&scene.ours, &other, alpn));
    let met = met(endpoint, mark).await;
    endpoint.present(server(&scene.ours, &own, alpn));
    alike(met?.iter().map(|met| match met {
        Met::Client(_) => Seen::New,
        Met::Refused => Seen::Old,
    }))
}

/// Whether etcd takes a client of the other authority.
async fn lets_others_in(scene: &Scene, port: u16) -> Look {
    let stranger = scene.others.leaf("stranger", None);
    let tls = client(&scene.ours, Some(&stranger), None);
    match caller::send(port, &tls, "GET /version", None, None).await {
        Ok(answer) if answer.status == 200 => Ok(Seen::New),
        Ok(answer) => Err(answer.text),
        // A client of TLS 1.3 hears of it when it reads.
        Err(error) if error.to_string().contains("received fatal alert") => Ok(Seen::Old),
        Err(error) => Err(error.to_string()),
    }
}

async fn kubelet_client(scene: &Scene) -> Look {
    let mark = scene.kubelet.mark();
    let answer = scene
        .ask("GET /api/v1/namespaces/default/pods/pod/log", None)
        .await?;
    if answer.status != 200 {
        return Err(answer.text);
    }
    shown(scene.volume("apiserver"), &scene.kubelet.met(mark))
}

async fn front_proxy_client(scene: &Scene) -> Look {
    let mark = scene.aggregated.mark();
    scene.object("GET /apis/reload.test/v1/things", None).await?;
    shown(scene.volume("frontproxy"), &scene.aggregated.met(mark))
}

/// Whom the apiserver takes a client for; `None` when it refuses it.
async fn who(
    scene: &Scene,
    identity: Option<&CertifiedPair>,
    header: Option<&str>,
) -> Result<Option<String>, String> {
    let tls = client(&scene.ours, identity, None);
    let request = "POST /apis/authentication.k8s.io/v1/selfsubjectreviews";
    let answer = caller::send(scene.apiserver, &tls, request, header, Some(&json!({})))
        .await
        .map_err(|error| error.to_string())?;
    if answer.status == 401 {
        return Ok(None);
    }
    let name = answer.object()?["status"]["userInfo"]["username"].take();
    Ok(name.as_str().map(str::to_owned))
}

async fn client_ca(scene: &Scene) -> Look {
    let stranger = scene.others.leaf("stranger", None);
    match who(scene, Some(&stranger), None).await?.as_deref() {
        Some("stranger") => Ok(Seen::New),
        None => Ok(Seen::Old),
        other => Err(format!("{other:?}")),
    }
}

async fn front_proxy_ca(scene: &Scene) -> Look {
    let proxy = scene.others.leaf("front-proxy-client", None);
    match who(scene, Some(&proxy), Some("X-Remote-User: carried"))
        .await?
        .as_deref()
    {
        Some("carried") => Ok(Seen::New),
        // The second: known to the CA of clients already.
        None | Some("front-proxy-client") => Ok(Seen::Old),
        other => Err(format!("{other:?}")),
    }
}

async fn verifying_key(scene: &Scene) -> Look {
    let account = scene
        .object("GET /api/v1/namespaces/default/serviceaccounts/probe", None)
        .await?;
    let now = Timestamp::now().as_second();
    let subject = "system:serviceaccount:default:probe";
    let claims = json!({
        "iss": "https://kubernetes.default.svc", "aud": ["https://kubernetes.default.svc"], "sub": subject,
        "iat": now, "nbf": now, "exp": now + 600,
        "kubernetes.io": {"namespace": "default", "serviceaccount": {
            "name": "probe", "uid": account["metadata"]["uid"],
        }},
    });
    let [header, claims] =
        [json!({"alg": "RS256", "typ": "JWT"}), claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
    let key = KeyPair::from_pem(&scene.volume("service-account").new.key_pem).unwrap();
    let signature = key.sign(format!("{header}.{claims}").as_bytes()).unwrap();
    let token = format!("{header}.{claims}.{}", URL_SAFE_NO_PAD.encode(signature));
    match who(scene, None, Some(&format!("Authorization: Bearer {token}")))
        .await?
        .as_deref()
    {
        Some(name) if name == subject => Ok(Seen::New),
        None => Ok(Seen::Old),
        other => Err(format!("{other:?}")),
    }
}

/// Which key signed a token, by the name of the key in it: the hash of the public half.
fn signer(scene: &Scene, token: &str) -> Look {
    let header = token.split('.').next().unwrap_or_default();
    let header = URL_SAFE_NO_PAD
        .decode(header)
        .map_err(|error| error.to_string())?;
    let header: Value = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let volume = scene.volume("service-account");
    [(&volume.old, Seen::Old), (&volume.new, Seen::New)]
        .into_iter()
        .find(|(pair, _)| {
            let public = pem::parse(&pair.certificate_pem).unwrap();
            header["kid"] == URL_SAFE_NO_PAD.encode(Sha256::digest(public.contents()))
        })
        .map(|(_, seen)| seen)
        .ok_or_else(|| format!("signed by neither key: {header}"))
}

async fn requested_token(scene: &Scene) -> Look {
    let request = "POST /api/v1/namespaces/default/serviceaccounts/probe/token";
    let review = scene.object(request, Some(&json!({}))).await?;
    signer(scene, review["status"]["token"].as_str().unwrap_or_default())
}

/// Reads an object until a controller has filled it in.
async fn filled(scene: &Scene, path: &str, pointer: &str) -> Result<String, String> {
    let filled = async {
        loop {
            let object = scene.object(&format!("GET {path}"), None).await;
            if let Ok(object) = object
                && let Some(text) = object.pointer(pointer).and_then(Value::as_str)
            {
                return text.to_owned();
            }
            sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(SOON, filled)
        .await
        .map_err(|_| format!("nobody fills in {pointer} of {path}"))
}

async fn token_in_secret(scene: &Scene) -> Look {
    let secrets = "/api/v1/namespaces/default/secrets";
    let name = format!("token-{}", number());
    let secret = json!({
        "metadata": {"name": name, "annotations": {"kubernetes.io/service-account.name": "probe"}},
        "type": "kubernetes.io/service-account-token",
    });
    scene.object(&format!("POST {secrets}"), Some(&secret)).await?;
    let token = filled(scene, &format!("{secrets}/{name}"), "/data/token").await?;
    let token = STANDARD.decode(token).map_err(|error| error.to_string())?;
    signer(scene, &String::from_utf8_lossy(&token))
}

async fn published_ca(scene: &Scene) -> Look {
    let name = format!("namespace-{}", number());
    let namespace = json!({"metadata": {"name": name}});
    scene.object("POST /api/v1/namespaces", Some(&namespace)).await?;
    let path = format!("/api/v1/namespaces/{name}/configmaps/kube-root-ca.crt");
    let bundle = filled(scene, &path, "/data/ca.crt").await?;
    which(scene.volume("root-with-key"), &der(&bundle))
}

async fn signing_ca(scene: &Scene) -> Look {
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let name = format!("request-{}", number());
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "somebody");
    let asked = params.serialize_request(&KeyPair::generate().unwrap()).unwrap();
    let mut request = json!({"metadata": {"name": name}, "spec": {
        "request": STANDARD.encode(asked.pem().unwrap()),
        "signerName": "kubernetes.io/kube-apiserver-client",
        "usages": ["digital signature", "client auth"],
    }});
    scene.object(&format!("POST {requests}"), Some(&request)).await?;
    request["status"]["conditions"] = json!([{"type": "Approved", "status": "True", "reason": "Test"}]);
    let approval = format!("PUT {requests}/{name}/approval");
    scene.object(&approval, Some(&request)).await?;
    let certificate = filled(scene, &format!("{requests}/{name}"), "/status/certificate").await?;
    let certificate = STANDARD.decode(certificate).map_err(|error| error.to_string())?;
    let certificate = String::from_utf8_lossy(&certificate);
    match [&scene.ours, &scene.others].map(|ca| ca.signed(&certificate)) {
        [true, false] => Ok(Seen::Old),
        [false, true] => Ok(Seen::New),
        other => Err(format!("{other:?}")),
    }
}

async fn kubeconfigs(scene: &Scene) -> Look {
    let marks: Vec<_> = scene.to_apiserver.iter().map(Endpoint::cut).collect();
    // Nobody holds a connection for reviews: these requests call for one of the token, and one of the access.
    let tls = client(&scene.ours, None, None);
    let (token, path) = (number(), number());
    let header = format!("Authorization: Bearer unknown-{token}");
    let asked = caller::send(scene.controllers, &tls, "GET /metrics", Some(&header), None).await;
    asked.map_err(|error| error.to_string())?;
    let request = format!("GET /nothing/{path}");
    let asked = caller::send(scene.controllers, &tls, &request, None, None).await;
    asked.map_err(|error| error.to_string())?;
    let mut seen = Vec::new();
    for ((name, endpoint), mark) in KUBECONFIGS.iter().zip(&scene.to_apiserver).zip(marks) {
        let told = match met(endpoint, mark).await {
            Ok(met) => shown(scene.volume(name), &met),
            Err(error) => Err(error),
        };
        seen.push(told.map_err(|error| format!("{name}: {error}"))?);
    }
    alike(seen)
}
