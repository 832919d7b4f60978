//! Kubeconfigs: one cluster, one user, one context named `default`, everything inline.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize};
use zeroize::Zeroizing;

use super::error::PkiError;
use super::pair::CertifiedPair;

/// Name of the one context, which is also the current one.
const CONTEXT: &str = "default";

/// The parts of a kubeconfig this manager uses.
#[derive(Clone, PartialEq, Eq)]
pub struct ParsedKubeconfig {
    /// URL of the API server. Square brackets round a name or an IPv4 address, which the Go implementation wrote, are
    /// taken off: newer clients refuse them.
    pub server: String,
    /// Certificates the server is checked against, PEM.
    pub ca_pem: String,
    /// Certificate and key of the client.
    pub client: CertifiedPair,
}

impl fmt::Debug for ParsedKubeconfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParsedKubeconfig")
            .field("server", &self.server)
            .field("key", &"[redacted]")
            .finish_non_exhaustive()
    }
}

/// `https://<host>:<port>`, with brackets round an IPv6 address and nothing else.
///
/// `host` may be a name or an address, the latter with or without brackets.
#[must_use]
pub fn server_url(host: &str, port: u16) -> String {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    match bare.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => format!("https://[{address}]:{port}"),
        _ => format!("https://{bare}:{port}"),
    }
}

/// Writes a kubeconfig; the same input gives the same bytes.
///
/// `cluster_name` is the `VirtualCluster`'s name, `user` the client certificate's common name, `server` a URL such as
/// [`server_url`] makes. `ca_pem` is the root CA's certificate.
pub fn render(
    cluster_name: &str,
    server: &str,
    ca_pem: &str,
    user: &str,
    client: &CertifiedPair,
) -> Result<Zeroizing<String>, PkiError> {
    let key = Zeroizing::new(STANDARD.encode(client.key_pem.as_bytes()));
    let config = Written {
        kind: "Config",
        api_version: "v1",
        users: [WrittenUser {
            name: user,
            user: WrittenCredentials {
                certificate: STANDARD.encode(&client.certificate_pem),
                key: &key,
            },
        }],
        clusters: [WrittenCluster {
            name: cluster_name,
            cluster: WrittenServer {
                ca: STANDARD.encode(ca_pem),
                server,
            },
        }],
        contexts: [WrittenContext {
            context: ContextBody {
                cluster: cluster_name,
                user,
            },
            name: CONTEXT,
        }],
        current_context: CONTEXT,
        preferences: Empty {},
    };
    // Long single-line strings would otherwise be folded, which is valid but unlike any other kubeconfig.
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    serde_saphyr::to_string_with_options(&config, options)
        .map(Zeroizing::new)
        .map_err(|_| PkiError::Kubeconfig {
            problem: "it cannot be written as YAML".to_owned(),
        })
}

/// Reads a kubeconfig, following its current context. Takes what [`render`] and the Go implementation write.
///
/// Errors name the part that is wrong and never repeat the text, which holds a key.
pub fn parse(text: &str) -> Result<ParsedKubeconfig, PkiError> {
    // The library's own message quotes the lines round the fault, so only the position is passed on.
    let read: Read = serde_saphyr::from_str(text).map_err(|error| {
        problem(match error.location() {
            Some(at) => format!(
                "it is not a kubeconfig in YAML (line {}, column {})",
                at.line(),
                at.column()
            ),
            None => "it is not a kubeconfig in YAML".to_owned(),
        })
    })?;
    let Read {
        current_context,
        contexts,
        clusters,
        users,
    } = read;
    let context = named(contexts, &current_context, |c| &c.name)
        .ok_or_else(|| problem("its current context is missing"))?;
    let ReadContextBody { cluster, user } = context.context;
    let cluster =
        named(clusters, &cluster, |c| &c.name).ok_or_else(|| problem("the context's cluster is missing"))?;
    let user = named(users, &user, |u| &u.name).ok_or_else(|| problem("the context's user is missing"))?;
    let ReadCredentials { certificate, key } = user.user;
    Ok(ParsedKubeconfig {
        server: without_brackets(&cluster.cluster.server),
        ca_pem: decode(&cluster.cluster.ca, "certificate-authority-data")?.to_string(),
        client: CertifiedPair {
            certificate_pem: decode(&certificate, "client-certificate-data")?.to_string(),
            key_pem: decode(&key, "client-key-data")?,
        },
    })
}

fn problem(text: impl Into<String>) -> PkiError {
    PkiError::Kubeconfig { problem: text.into() }
}

fn named<T>(items: Vec<T>, wanted: &str, name: impl Fn(&T) -> &String) -> Option<T> {
    items.into_iter().find(|item| name(item) == wanted)
}

fn decode(data: &str, field: &str) -> Result<Zeroizing<String>, PkiError> {
    let unreadable = || problem(format!("{field} is not base64 of PEM text"));
    let bytes = Zeroizing::new(STANDARD.decode(data.trim()).map_err(|_| unreadable())?);
    let text = std::str::from_utf8(&bytes).map_err(|_| unreadable())?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Takes the brackets off a URL's host unless an IPv6 address is in them.
fn without_brackets(server: &str) -> String {
    let bare = || {
        let (scheme, rest) = server.split_once("://[")?;
        let (host, rest) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>()
            .is_err()
            .then(|| format!("{scheme}://{host}{rest}"))
    };
    bare().unwrap_or_else(|| server.to_owned())
}

#[derive(Serialize)]
struct Written<'a> {
    kind: &'a str,
    #[serde(rename = "apiVersion")]
    api_version: &'a str,
    users: [WrittenUser<'a>; 1],
    clusters: [WrittenCluster<'a>; 1],
    contexts: [WrittenContext<'a>; 1],
    #[serde(rename = "current-context")]
    current_context: &'a str,
    preferences: Empty,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct WrittenUser<'a> {
    name: &'a str,
    user: WrittenCredentials<'a>,
}

#[derive(Serialize)]
struct WrittenCredentials<'a> {
    #[serde(rename = "client-certificate-data")]
    certificate: String,
    #[serde(rename = "client-key-data")]
    key: &'a str,
}

#[derive(Serialize)]
struct WrittenCluster<'a> {
    name: &'a str,
    cluster: WrittenServer<'a>,
}

#[derive(Serialize)]
struct WrittenServer<'a> {
    #[serde(rename = "certificate-authority-data")]
    ca: String,
    server: &'a str,
}

#[derive(Serialize)]
struct WrittenContext<'a> {
    context: ContextBody<'a>,
    name: &'a str,
}

#[derive(Serialize)]
struct ContextBody<'a> {
    cluster: &'a str,
    user: &'a str,
}

#[derive(Deserialize)]
struct Read {
    #[serde(rename = "current-context")]
    current_context: String,
    contexts: Vec<ReadContext>,
    clusters: Vec<ReadCluster>,
    users: Vec<ReadUser>,
}

#[derive(Deserialize)]
struct ReadContext {
    name: String,
    context: ReadContextBody,
}

#[derive(Deserialize)]
struct ReadContextBody {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct ReadCluster {
    name: String,
    cluster: ReadServer,
}

#[derive(Deserialize)]
struct ReadServer {
    #[serde(rename = "certificate-authority-data")]
    ca: String,
    server: String,
}

#[derive(Deserialize)]
struct ReadUser {
    name: String,
    user: ReadCredentials,
}

#[derive(Deserialize)]
struct ReadCredentials {
    #[serde(rename = "client-certificate-data")]
    certificate: String,
    #[serde(rename = "client-key-data", deserialize_with = "wiped")]
    key: Zeroizing<String>,
}

fn wiped<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Zeroizing<String>, D::Error> {
    String::deserialize(deserializer).map(Zeroizing::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> CertifiedPair {
        CertifiedPair {
            certificate_pem: format!("certificate {}\n", "c".repeat(2000)),
            key_pem: Zeroizing::new("key\n".to_owned()),
        }
    }

    #[test]
    fn only_ipv6_is_bracketed() {
        for (host, url) in [
            ("10.96.0.1", "https://10.96.0.1:6443"),
            (
                "apiserver-svc.ns-fd1b34-name",
                "https://apiserver-svc.ns-fd1b34-name:6443",
            ),
            ("fd00::1", "https://[fd00::1]:6443"),
            ("[fd00::1]", "https://[fd00::1]:6443"),
            ("[apiserver-svc.ns]", "https://apiserver-svc.ns:6443"),
        ] {
            assert_eq!(server_url(host, 6443), url);
        }
    }

    #[test]
    fn the_text_has_the_shape_clients_know() {
        let text = render("name", "https://10.96.0.1:6443", "ca\n", "admin", &client()).unwrap();
        let certificate = STANDARD.encode(&client().certificate_pem);
        let expected = format!(
            "kind: Config\napiVersion: v1\nusers:\n- name: admin\n  user:\n    client-certificate-data: {certificate}\n    \
             client-key-data: a2V5Cg==\nclusters:\n- name: name\n  cluster:\n    certificate-authority-data: Y2EK\n    \
             server: https://10.96.0.1:6443\ncontexts:\n- context:\n    cluster: name\n    user: admin\n  name: default\n\
             current-context: default\npreferences: {{}}\n"
        );
        assert_eq!(text.as_str(), expected);
    }

    #[test]
    fn what_was_written_is_read_back() {
        // Names that YAML would take for something else must stay names.
        for name in ["name", "123", "true", "1e3", "null", "a.b-c"] {
            let text = render(
                name,
                "https://[fd00::1]:6443",
                "ca\n",
                "system:kube-controller-manager",
                &client(),
            );
            let parsed = parse(&text.unwrap()).unwrap();
            assert_eq!(parsed.server, "https://[fd00::1]:6443");
            assert_eq!(parsed.ca_pem, "ca\n");
            assert_eq!(parsed.client, client());
            assert!(!format!("{parsed:?}").contains("key\\n"));
        }
    }

    #[test]
    fn brackets_round_names_are_taken_off() {
        for (written, read) in [
            ("https://[apiserver-svc.ns]:6443", "https://apiserver-svc.ns:6443"),
            ("https://[10.0.0.1]:6443", "https://10.0.0.1:6443"),
            ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://plain:6443/path", "https://plain:6443/path"),
            ("", ""),
        ] {
            let text = render("name", written, "ca", "admin", &client()).unwrap();
            assert_eq!(parse(&text).unwrap().server, read);
        }
    }

    #[test]
    fn faults_are_named_and_never_quoted() {
        let good = render("name", "https://h:6443", "ca", "admin", &client()).unwrap();
        for (from, to, problem) in [
            (
                "current-context: default",
                "current-context: other",
                "current context",
            ),
            ("cluster: name", "cluster: other", "context's cluster"),
            ("user: admin", "user: other", "context's user"),
            ("a2V5Cg==", "a2V5Cg=!", "client-key-data"),
            (
                "client-key-data: a2V5Cg==",
                "client-key-data: [a2V5Cg==",
                "not a kubeconfig in YAML (line",
            ),
            (
                "client-key-data: a2V5Cg==",
                "other: a2V5Cg==",
                "not a kubeconfig in YAML",
            ),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, *good, "{from}");
            let error = parse(&bad).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
            assert!(!format!("{error:?}").contains("a2V5Cg"), "{error:?}");
        }
    }
}
