//! The command line: flags of the Go manager, in Go's form too, and ours.
//!
//! Every flag ends in [`ManagerConfig`], which is plain data; nothing after this module knows of clap. A refused
//! command line is one line of text ([`UsageError`]).

pub(crate) mod go;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::admission::configuration::WebhookConfig;
use crate::api::names::is_dns_label;
use crate::features::{FeatureGateError, FeatureGates};
use crate::server::listen::ListenAddr;

/// Where a pod finds the name of its own namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// The namespace assumed outside a cluster.
const DEFAULT_NAMESPACE: &str = "vc-manager";

/// Bounds of what certificates of the webhooks may be asked to live.
const MIN_CERTIFICATE_LIFE: Duration = Duration::from_secs(5);
const MAX_CERTIFICATE_LIFE: Duration = Duration::from_hours(876_000);

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Run the manager.
    Run(Box<ManagerConfig>),
    /// Print the custom resource definitions.
    Crds,
    /// Print the webhook configurations and their Service.
    WebhookConfig(WebhookConfig),
    /// Print the version line.
    Version,
    /// Print this help text.
    Help(String),
}

/// How the manager is to run.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct ManagerConfig {
    /// Our own namespace: of the Lease, and of the names in a self-issued certificate.
    pub namespace: String,
    /// The kubeconfig named on the command line. `None` leaves the choice to [`crate::client`].
    pub kubeconfig: Option<PathBuf>,
    /// Plain-HTTP listener of `/healthz`, `/readyz`, `/livez`. `None` is off.
    pub health_addr: Option<ListenAddr>,
    /// Plain-HTTP listener of `/metrics`, open to all who reach it. `None` is off.
    pub metrics_addr: Option<ListenAddr>,
    /// HTTPS listener of webhooks, `/metrics` and health. `None` is off.
    pub https_addr: Option<ListenAddr>,
    /// Directory of `tls.crt` and `tls.key` (PEM) for the HTTPS listener. `None`: the certificate is from the shared
    /// CA of the webhooks, or self-issued if they are off.
    pub webhook_cert_dir: Option<PathBuf>,
    /// Whether `/metrics` over HTTPS asks the API server who calls and whether it may.
    pub metrics_auth: bool,
    /// Whether the admission webhooks are served and registered.
    pub enable_webhook: bool,
    /// Life of the CA that replicas share for the webhooks.
    pub webhook_ca_validity: Duration,
    /// Life of the certificate that each replica has from it; shorter than that.
    pub webhook_cert_validity: Duration,
    /// Whether the loop runs only under the Lease.
    pub leader_election: bool,
    /// Name of the Lease.
    pub leader_election_name: String,
    /// Reconciles that run at once, per controller; at least 1.
    pub num_reconciles: u16,
    /// How long one component of a tenant may take to become ready.
    pub provisioner_timeout: Duration,
    /// Deadline of a single call to the super cluster's API.
    pub kube_api_timeout: Duration,
    /// Tenants that may be starting (created, not yet ready) at once; at least 1.
    pub max_starting_tenants: u16,
    /// Tenants that may be upgrading at once; at least 1.
    pub max_upgrading_tenants: u16,
    /// Whether a component also has to answer through its Service before it counts as ready.
    pub tenant_probe: bool,
    /// Key type of the leaf certificates issued to tenants.
    pub leaf_key_algorithm: LeafKeyAlgorithm,
    /// Longest life of a leaf certificate issued to a tenant, whatever `spec.pkiExpireDays` says; `None`: no limit.
    pub max_certificate_life: Option<Duration>,
    /// Optional behaviours.
    pub features: FeatureGates,
    /// Logging.
    pub log: LogConfig,
    /// Things to tell the operator once logging works: flags that are accepted but have no effect.
    pub warnings: Vec<String>,
}

/// Where log lines go and what they look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// Form of a line.
    pub format: LogFormat,
    /// Filter in `tracing_subscriber::EnvFilter` syntax; already checked.
    pub filter: String,
    /// A file that gets a copy of what goes to stderr; appended to.
    pub file: Option<PathBuf>,
}

/// Form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// For people.
    Text,
}

/// Key type of tenants' leaf certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LeafKeyAlgorithm {
    /// ECDSA on NIST P-256.
    #[value(name = "ecdsa-p256")]
    EcdsaP256,
    /// RSA with 2048 bits, as the Go manager made them.
    #[value(name = "rsa-2048")]
    Rsa2048,
}

/// Lock kinds of the Go manager. Only the Lease is used, whichever is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
enum ResourceLock {
    ConfigMaps,
    Leases,
    ConfigMapsLeases,
}

/// A command line that was refused: one line for stderr, and the code to exit with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageError {
    /// The line, without a newline.
    pub message: String,
    /// 2 if a flag cannot be read, as in Go; 1 if what it asks for cannot be done.
    pub exit_code: u8,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for UsageError {}

impl UsageError {
    fn flag(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code: 2,
        }
    }

    fn start(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            exit_code: 1,
        }
    }
}

/// Manages tenant Kubernetes control planes that run as pods in a super cluster.
///
/// Flags may be written with one dash or two. A boolean flag takes its value only after `=`.
#[derive(Parser)]
#[command(
    name = "vc-manager",
    disable_version_flag = true,
    disable_help_subcommand = true,
    args_override_self = true,
    max_term_width = 110
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
struct Cli {
    /// Plain-HTTP address of /metrics; empty or 0 turns it off
    #[arg(long, value_name = "ADDR", default_value = "0")]
    metrics_addr: String,
    /// Plain-HTTP address of /healthz, /readyz and /livez; empty or 0 turns it off
    #[arg(long, value_name = "ADDR", default_value = ":8080")]
    health_addr: String,
    /// HTTPS address of webhooks, /metrics and health; empty or 0 turns it off
    #[arg(long, value_name = "ADDR", default_value = ":9443")]
    https_addr: String,
    /// Directory with tls.crt and tls.key for the HTTPS listener; without it replicas share a CA, kept in a Secret
    /// (or, with the webhooks off, issue a certificate in memory)
    #[arg(long, value_name = "DIR", default_value = "")]
    webhook_cert_dir: String,
    /// Ask the API server who calls /metrics over HTTPS, and whether it may
    #[arg(long, value_name = "BOOL", default_value = "true", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    metrics_auth: bool,
    /// How control planes are provisioned; only native is implemented
    #[arg(long, value_name = "NAME", default_value = "native")]
    provisioner: String,
    /// Deprecated: use --provisioner, over which it wins
    #[arg(long, value_name = "NAME", default_value = "")]
    master_prov: String,
    /// Run the loop only while holding the Lease
    #[arg(long, value_name = "BOOL", default_value = "true", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    leader_election: bool,
    /// Name of the Lease
    #[arg(long, value_name = "NAME", default_value = "vc-manager-leaderelection-lock")]
    leader_elect_resource_name: String,
    /// Deprecated: use --leader-elect-resource-name, over which it wins
    #[arg(long, value_name = "NAME", default_value = "")]
    le_cm_name: String,
    /// Accepted for compatibility; the lock is a Lease whichever is named
    #[arg(long, value_name = "KIND", default_value = "configmapsleases", value_enum)]
    leader_elect_resource_lock: ResourceLock,
    /// Reconciles that run at once, per controller
    #[arg(long, value_name = "N", default_value = "10", value_parser = at_least_one)]
    num_reconciles: u16,
    /// Tenants that may be starting at once
    #[arg(long, value_name = "N", default_value = "2", value_parser = at_least_one)]
    max_starting_tenants: u16,
    /// Tenants that may be upgrading at once
    #[arg(long, value_name = "N", default_value = "10", value_parser = at_least_one)]
    max_upgrading_tenants: u16,
    /// A tenant's component is ready only once it answers through its Service
    #[arg(long, value_name = "BOOL", default_value = "true", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    tenant_probe: bool,
    /// Key type of tenants' leaf certificates
    #[arg(long, value_name = "TYPE", default_value = "ecdsa-p256", value_enum)]
    leaf_key_algorithm: LeafKeyAlgorithm,
    /// Longest life of a tenant's leaf certificates, whatever their spec.pkiExpireDays says
    #[arg(long, value_name = "DURATION", value_parser = certificate_life)]
    max_certificate_life: Option<Duration>,
    /// How long one component of a tenant may take to become ready (as in 10m, 1h30m, 1.5s)
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = positive_duration)]
    provisioner_timeout: Duration,
    /// Deadline of one call to the super cluster's API
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = positive_duration)]
    kube_api_timeout: Duration,
    /// Optional behaviours, as Name=bool,Name2=bool; may be repeated
    #[arg(long, value_name = "GATES", action = ArgAction::Append)]
    feature_gates: Vec<String>,
    /// Serve the admission webhooks, and keep the CA in their configurations up to date
    #[arg(long, value_name = "BOOL", default_value = "false", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    enable_webhook: bool,
    /// Life of the CA that replicas share; it is replaced after two thirds of it
    #[arg(long, value_name = "DURATION", default_value = "8760h", value_parser = certificate_life)]
    webhook_ca_validity: Duration,
    /// Life of a replica's certificate from that CA; it is replaced after two thirds of it
    #[arg(long, value_name = "DURATION", default_value = "720h", value_parser = certificate_life)]
    webhook_cert_validity: Duration,
    /// Kubeconfig of the super cluster; otherwise $KUBECONFIG, the pod's service account, ~/.kube/config
    #[arg(long, value_name = "FILE", default_value = "")]
    kubeconfig: String,
    /// Our own namespace; otherwise that of the pod, or vc-manager outside a cluster
    #[arg(long, value_name = "NAME", default_value = "")]
    namespace: String,
    /// Also log to this file
    #[arg(long, value_name = "FILE", default_value = "")]
    log_file: String,
    /// Form of a log line
    #[arg(long, value_name = "FORMAT", default_value = "json", value_enum)]
    log_format: LogFormat,
    /// What is logged: a level, or a filter such as `info,vc_manager=debug`
    // The client library logs each failed connection as an error of its own. Here such errors are answers, such as
    // of a tenant that is starting, and are told where they matter. It also logs the whole of an answer it cannot read.
    #[arg(long, value_name = "FILTER", default_value = "info,kube_client::client=off", value_parser = log_filter)]
    log_level: String,
    /// Accepted for compatibility; log lines carry no stack traces
    #[arg(long, value_name = "BOOL", default_value = "false", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    disable_stacktrace: bool,
    /// Print the version and exit
    #[arg(long, value_name = "BOOL", default_value = "false", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = ArgAction::Set, value_parser = go::parse_bool)]
    version: bool,
    #[command(subcommand)]
    command: Option<Subcommands>,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Print the custom resource definitions as YAML
    Crds,
    /// Print the webhook configurations and their Service as YAML
    WebhookConfig {
        /// Namespace of the manager
        #[arg(long, value_name = "NAME", default_value = DEFAULT_NAMESPACE, value_parser = namespace)]
        namespace: String,
        /// Where the API server reaches a manager outside the cluster, as https://host:port; then there is no Service
        #[arg(long, value_name = "URL", value_parser = webhook_url)]
        url: Option<String>,
        /// Let cert-manager put its CA into the configurations
        #[arg(long)]
        cert_manager: bool,
    },
}

/// The namespace this process runs in, if it runs in a pod.
#[must_use]
pub fn pod_namespace() -> Option<String> {
    let namespace = std::fs::read_to_string(NAMESPACE_FILE).ok()?;
    Some(namespace.trim().to_owned()).filter(|namespace| !namespace.is_empty())
}

/// Reads a command line, without the program's name. `pod_namespace` is the namespace taken unless `--namespace`
/// names one (see [`pod_namespace`]).
pub fn parse(
    words: impl IntoIterator<Item = String>,
    pod_namespace: Option<String>,
) -> Result<Command, UsageError> {
    let mut command = Cli::command();
    let flags = flags(&command);
    let words = go::normalise(words, &flags).map_err(|error| UsageError::flag(error.to_string()))?;
    let name = command.get_name().to_owned();
    let parsed = command
        .try_get_matches_from_mut(std::iter::once(name).chain(words))
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if error.kind() == ErrorKind::DisplayHelp => return Ok(Command::Help(error.to_string())),
        Err(error) => return Err(UsageError::flag(one_line(&error, &flags))),
    };
    if cli.version {
        return Ok(Command::Version);
    }
    match cli.command {
        Some(Subcommands::Crds) => Ok(Command::Crds),
        Some(Subcommands::WebhookConfig {
            namespace,
            url,
            cert_manager,
        }) => Ok(Command::WebhookConfig(WebhookConfig {
            namespace,
            url,
            cert_manager,
        })),
        None => cli
            .into_config(pod_namespace)
            .map(|config| Command::Run(Box::new(config))),
    }
}

impl Cli {
    fn into_config(self, pod_namespace: Option<String>) -> Result<ManagerConfig, UsageError> {
        let provisioner = non_empty(self.master_prov).unwrap_or(self.provisioner);
        match provisioner.as_str() {
            "native" => {}
            "aliyun" | "capi" => {
                return Err(UsageError::start(format!(
                    "provisioner {provisioner:?} is not implemented; only \"native\" is"
                )));
            }
            _ => {
                return Err(UsageError::start(format!(
                    "virtualcluster provisioner missing: {provisioner:?} is unknown"
                )));
            }
        }
        let features = FeatureGates::parse(&self.feature_gates).map_err(|error| match error {
            FeatureGateError::Unknown { .. } => UsageError::start(error.to_string()),
            FeatureGateError::MalformedPair | FeatureGateError::NotBoolean { .. } => {
                let value = self
                    .feature_gates
                    .iter()
                    .find(|value| FeatureGates::parse(&[value]).is_err_and(|e| e == error));
                let value = value.map_or("", String::as_str);
                UsageError::flag(format!(
                    "invalid value {value:?} for flag -feature-gates: {error}"
                ))
            }
        })?;
        let leader_election_name = non_empty(self.le_cm_name).unwrap_or(self.leader_elect_resource_name);
        if self.leader_election && leader_election_name.is_empty() {
            return Err(UsageError::start(
                "leader election needs a -leader-elect-resource-name",
            ));
        }
        let mut warnings = Vec::new();
        if self.leader_elect_resource_lock == ResourceLock::ConfigMaps {
            warnings.push(
                "--leader-elect-resource-lock=configmaps: a Lease is used instead; a Go manager that still holds \
                 the ConfigMap alone is not excluded"
                    .to_owned(),
            );
        }
        if self.webhook_cert_validity >= self.webhook_ca_validity {
            return Err(UsageError::start(
                "-webhook-cert-validity must be shorter than -webhook-ca-validity",
            ));
        }
        let https_addr = address("https-addr", &self.https_addr)?;
        if self.enable_webhook && https_addr.is_none() {
            return Err(UsageError::start("-enable-webhook needs an -https-addr"));
        }
        Ok(ManagerConfig {
            namespace: non_empty(self.namespace)
                .or(pod_namespace)
                .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            kubeconfig: non_empty(self.kubeconfig).map(PathBuf::from),
            health_addr: address("health-addr", &self.health_addr)?,
            metrics_addr: address("metrics-addr", &self.metrics_addr)?,
            https_addr,
            webhook_cert_dir: non_empty(self.webhook_cert_dir).map(PathBuf::from),
            metrics_auth: self.metrics_auth,
            enable_webhook: self.enable_webhook,
            webhook_ca_validity: self.webhook_ca_validity,
            webhook_cert_validity: self.webhook_cert_validity,
            leader_election: self.leader_election,
            leader_election_name,
            num_reconciles: self.num_reconciles,
            provisioner_timeout: self.provisioner_timeout,
            kube_api_timeout: self.kube_api_timeout,
            max_starting_tenants: self.max_starting_tenants,
            max_upgrading_tenants: self.max_upgrading_tenants,
            tenant_probe: self.tenant_probe,
            leaf_key_algorithm: self.leaf_key_algorithm,
            max_certificate_life: self.max_certificate_life,
            features,
            log: LogConfig {
                format: self.log_format,
                filter: self.log_level,
                file: non_empty(self.log_file).map(PathBuf::from),
            },
            warnings,
        })
    }
}

/// The flags clap knows, and which of them are boolean: those whose value may be absent.
fn flags(command: &clap::Command) -> BTreeMap<String, go::Kind> {
    let flags = command.get_arguments().filter_map(|arg| {
        let optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
        let kind = if optional { go::Kind::Bool } else { go::Kind::Value };
        arg.get_long().map(|name| (name.to_owned(), kind))
    });
    flags.collect()
}

/// clap's error in the words of Go's `flag` package.
fn one_line(error: &clap::Error, flags: &BTreeMap<String, go::Kind>) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)
        .and_then(|arg| arg.strip_prefix("--"))
        .map(|arg| arg.split([' ', '=', '[']).next().unwrap_or(arg));
    let value = text(ContextKind::InvalidValue).unwrap_or("");
    match (error.kind(), flag) {
        (ErrorKind::ValueValidation, Some(flag)) => {
            let cause = std::error::Error::source(error).map_or_else(String::new, ToString::to_string);
            match flags.get(flag) {
                Some(go::Kind::Bool) => format!("invalid boolean value {value:?} for -{flag}: {cause}"),
                _ => format!("invalid value {value:?} for flag -{flag}: {cause}"),
            }
        }
        (ErrorKind::InvalidValue, Some(flag)) => match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(valid)) => {
                format!(
                    "invalid value {value:?} for flag -{flag}: must be one of {}",
                    valid.join(", ")
                )
            }
            _ => format!("invalid value {value:?} for flag -{flag}: parse error"),
        },
        (ErrorKind::InvalidSubcommand, _) => {
            format!(
                "unexpected argument {:?}",
                text(ContextKind::InvalidSubcommand).unwrap_or("")
            )
        }
        (ErrorKind::UnknownArgument, _) => {
            format!(
                "unexpected argument {:?}",
                text(ContextKind::InvalidArg).unwrap_or("")
            )
        }
        _ => {
            let rendered = error.to_string();
            let first = rendered.lines().next().unwrap_or("invalid command line");
            first.strip_prefix("error: ").unwrap_or(first).to_owned()
        }
    }
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn address(flag: &str, text: &str) -> Result<Option<ListenAddr>, UsageError> {
    if matches!(text, "" | "0") {
        return Ok(None);
    }
    let parsed = text.parse();
    parsed
        .map(Some)
        .map_err(|error| UsageError::flag(format!("invalid value {text:?} for flag -{flag}: {error}")))
}

fn at_least_one(text: &str) -> Result<u16, &'static str> {
    match text.parse::<i64>().map_err(|error| *error.kind()) {
        Ok(0 | i64::MIN..0) => Err("must be at least 1"),
        Ok(number) => u16::try_from(number).map_err(|_| "value out of range"),
        Err(std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow) => {
            Err("value out of range")
        }
        Err(_) => Err("parse error"),
    }
}

fn positive_duration(text: &str) -> Result<Duration, &'static str> {
    match go::parse_duration(text)? {
        Duration::ZERO => Err("must be greater than 0"),
        duration => Ok(duration),
    }
}

fn certificate_life(text: &str) -> Result<Duration, &'static str> {
    match go::parse_duration(text)? {
        // Certificates know whole seconds only.
        duration if duration < MIN_CERTIFICATE_LIFE => Err("must be at least 5s"),
        duration if duration > MAX_CERTIFICATE_LIFE => Err("must be at most 876000h"),
        duration => Ok(duration),
    }
}

fn namespace(text: &str) -> Result<String, &'static str> {
    if is_dns_label(text) {
        Ok(text.to_owned())
    } else {
        Err("must be the name of a namespace")
    }
}

/// What the API server accepts as the beginning of a webhook's URL.
fn webhook_url(text: &str) -> Result<String, &'static str> {
    let error = "must be https://host:port";
    let url: http::Uri = text.parse().map_err(|_| error)?;
    let authority = url.authority().ok_or(error)?.as_str();
    if url.scheme_str() != Some("https")
        || authority.contains('@')
        || url.path() != "/"
        || url.query().is_some()
    {
        return Err(error);
    }
    Ok(format!("https://{authority}"))
}

fn log_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
