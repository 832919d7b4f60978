//! Which credential files the components of a tenant read again while they run. Pure.
//!
//! A Secret that is mounted as a volume reaches a running container: the kubelet replaces its files within a minute or
//! two of a change. Whether the process then uses them is up to the process. This is [`TABLE`], in which every file is
//! named that the control planes of the samples take from a tenant's Secrets:
//!
//! | component | Secret | what for | flags | reads again | seen |
//! |---|---|---|---|---|---|
//! | apiserver | apiserver-ca | serving certificate | `--tls-cert-file`, `--tls-private-key-file` | yes | at once, for new connections |
//! | apiserver | apiserver-ca | client of etcd | `--etcd-certfile`, `--etcd-keyfile` | yes | at once, for new connections |
//! | apiserver | apiserver-ca | client of kubelets | `--kubelet-client-certificate`, `--kubelet-client-key` | yes | a second later, for new connections |
//! | apiserver | front-proxy-ca | client of aggregated API servers | `--proxy-client-cert-file`, `--proxy-client-key-file` | yes | at once, on new connections only |
//! | apiserver | root-ca | CA of clients | `--client-ca-file` | yes | at once: clients of a CA that was added are let in |
//! | apiserver | root-ca | CA of front proxies | `--requestheader-client-ca-file` | yes | at once: proxies of a CA that was added are believed |
//! | apiserver | root-ca | CA of etcd | `--etcd-cafile` | no | an etcd of the new CA is refused |
//! | apiserver | serviceaccount-rsa | keys that verify tokens | `--service-account-key-file` | no | tokens of the new key are refused |
//! | apiserver | serviceaccount-rsa | key that signs tokens | `--service-account-signing-key-file` | no | `TokenRequest` gives tokens of the old key |
//! | controller-manager | controller-manager-kubeconfig | client of the apiserver | `--kubeconfig`, `--authentication-kubeconfig`, `--authorization-kubeconfig` | no | new connections are made with the old certificate, by each of the three |
//! | controller-manager | root-ca | CA published to namespaces | `--root-ca-file` | no | new namespaces get the old CA |
//! | controller-manager | root-ca | CA that signs certificates | `--cluster-signing-cert-file`, `--cluster-signing-key-file` | yes | at once: the next `CertificateSigningRequest` is signed by the new CA |
//! | controller-manager | serviceaccount-rsa | key that signs tokens | `--service-account-private-key-file` | no | Secrets get tokens of the old key |
//! | etcd | etcd-ca | serving certificate | `--cert-file`, `--key-file` | yes | at once, for new connections |
//! | etcd | etcd-ca | serving certificate for peers | `--peer-cert-file`, `--peer-key-file` | yes | at once, for new connections |
//! | etcd | etcd-ca | client of peers | `--peer-cert-file`, `--peer-key-file` | yes | at once, for new connections |
//! | etcd | root-ca | CA of clients | `--trusted-ca-file` | no | clients of the new CA are refused |
//! | etcd | root-ca | CA of peers | `--peer-trusted-ca-file` | no | peers of the new CA are refused, and not connected to |
//!
//! # How it was found
//!
//! By looking, at Kubernetes 1.34 and 1.35, which do not differ in this, and etcd 3.6: the test `reload_table` starts the
//! programs, replaces every file as the kubelet does, and sees from outside which content is used. "Yes": the new one,
//! within seconds. "No": after more than a minute, which is how often Kubernetes looks at files that it cannot watch,
//! still the old one, and the new one after a restart. The test fails when a program does other than is written here.
//! Other versions were not looked at.
//!
//! # What follows
//!
//! Only leaves are renewed, and one of them needs a restart: that in the kubeconfig of the controller-manager, of the
//! controller-manager. The root CA and the service-account key are the same as long as the tenant lives. Should one be
//! changed after all, say restored from a backup, every component that mounts it goes on with the old one for some
//! purpose, and has to be restarted. See [`reloads`].
//!
//! All this holds for volumes that follow their Secret. A file that is mounted with `subPath`, or copied by an init
//! container, stays as it is as long as the pod.
//!
//! New connections are what was looked at. Open ones keep the certificate they began with. Those of the apiserver to
//! kubelets are closed within five minutes of a renewal (`CertCallbackRefreshDuration` in client-go); those to etcd last
//! until they break, and may: etcd looks at the certificate of a client when it connects.

use super::render::TenantSecret;
use crate::api::Component;

/// Versions of Kubernetes that [`TABLE`] was seen on, for the apiserver and the controller-manager.
pub const KUBERNETES_VERSIONS: [&str; 2] = ["1.34", "1.35"];

/// Version of etcd that [`TABLE`] was seen on.
pub const ETCD_VERSION: &str = "3.6";

/// Whether a running process takes up what a file newly holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reloads {
    /// Yes, soon after the file has changed.
    Yes,
    /// No: it goes on with what it read at its start.
    No,
}

/// One use that a component makes of one of a tenant's Secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Who uses it.
    pub component: Component,
    /// What it uses.
    pub secret: TenantSecret,
    /// What for. Differs between the rows of a component.
    pub purpose: &'static str,
    /// The flags that name the files.
    pub flags: &'static [&'static str],
    /// Whether a new file is taken up.
    pub reloads: Reloads,
    /// What was seen of it, or is to be known besides.
    pub note: &'static str,
}

/// Every use of a tenant's Secrets by its control plane, as the samples write it. See the module for how it was found.
pub const TABLE: [Row; 18] = [
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::ApiServer,
        purpose: "serving certificate",
        flags: &["--tls-cert-file", "--tls-private-key-file"],
        reloads: Reloads::Yes,
        note: "at once, for new connections",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::ApiServer,
        purpose: "client of etcd",
        flags: &["--etcd-certfile", "--etcd-keyfile"],
        reloads: Reloads::Yes,
        note: "at once, for new connections",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::ApiServer,
        purpose: "client of kubelets",
        flags: &["--kubelet-client-certificate", "--kubelet-client-key"],
        reloads: Reloads::Yes,
        note: "a second later, for new connections",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::FrontProxy,
        purpose: "client of aggregated API servers",
        flags: &["--proxy-client-cert-file", "--proxy-client-key-file"],
        reloads: Reloads::Yes,
        note: "at once, on new connections only",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::RootCa,
        purpose: "CA of clients",
        flags: &["--client-ca-file"],
        reloads: Reloads::Yes,
        note: "at once: clients of a CA that was added are let in",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::RootCa,
        purpose: "CA of front proxies",
        flags: &["--requestheader-client-ca-file"],
        reloads: Reloads::Yes,
        note: "at once: proxies of a CA that was added are believed",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::RootCa,
        purpose: "CA of etcd",
        flags: &["--etcd-cafile"],
        reloads: Reloads::No,
        note: "an etcd of the new CA is refused",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::ServiceAccount,
        purpose: "keys that verify tokens",
        flags: &["--service-account-key-file"],
        reloads: Reloads::No,
        note: "tokens of the new key are refused",
    },
    Row {
        component: Component::ApiServer,
        secret: TenantSecret::ServiceAccount,
        purpose: "key that signs tokens",
        flags: &["--service-account-signing-key-file"],
        reloads: Reloads::No,
        note: "`TokenRequest` gives tokens of the old key",
    },
    Row {
        component: Component::ControllerManager,
        secret: TenantSecret::ControllerManagerKubeconfig,
        purpose: "client of the apiserver",
        flags: &[
            "--kubeconfig",
            "--authentication-kubeconfig",
            "--authorization-kubeconfig",
        ],
        reloads: Reloads::No,
        note: "new connections are made with the old certificate, by each of the three",
    },
    Row {
        component: Component::ControllerManager,
        secret: TenantSecret::RootCa,
        purpose: "CA published to namespaces",
        flags: &["--root-ca-file"],
        reloads: Reloads::No,
        note: "new namespaces get the old CA",
    },
    Row {
        component: Component::ControllerManager,
        secret: TenantSecret::RootCa,
        purpose: "CA that signs certificates",
        flags: &["--cluster-signing-cert-file", "--cluster-signing-key-file"],
        reloads: Reloads::Yes,
        note: "at once: the next `CertificateSigningRequest` is signed by the new CA",
    },
    Row {
        component: Component::ControllerManager,
        secret: TenantSecret::ServiceAccount,
        purpose: "key that signs tokens",
        flags: &["--service-account-private-key-file"],
        reloads: Reloads::No,
        note: "Secrets get tokens of the old key",
    },
    Row {
        component: Component::Etcd,
        secret: TenantSecret::Etcd,
        purpose: "serving certificate",
        flags: &["--cert-file", "--key-file"],
        reloads: Reloads::Yes,
        note: "at once, for new connections",
    },
    Row {
        component: Component::Etcd,
        secret: TenantSecret::Etcd,
        purpose: "serving certificate for peers",
        flags: &["--peer-cert-file", "--peer-key-file"],
        reloads: Reloads::Yes,
        note: "at once, for new connections",
    },
    Row {
        component: Component::Etcd,
        secret: TenantSecret::Etcd,
        purpose: "client of peers",
        flags: &["--peer-cert-file", "--peer-key-file"],
        reloads: Reloads::Yes,
        note: "at once, for new connections",
    },
    Row {
        component: Component::Etcd,
        secret: TenantSecret::RootCa,
        purpose: "CA of clients",
        flags: &["--trusted-ca-file"],
        reloads: Reloads::No,
        note: "clients of the new CA are refused",
    },
    Row {
        component: Component::Etcd,
        secret: TenantSecret::RootCa,
        purpose: "CA of peers",
        flags: &["--peer-trusted-ca-file"],
        reloads: Reloads::No,
        note: "peers of the new CA are refused, and not connected to",
    },
];

/// Whether a change of `secret` needs no restart of `component`: all that it does with it follows the files. So it is,
/// too, for a Secret that it does nothing with.
#[must_use]
pub fn reloads(component: Component, secret: TenantSecret) -> bool {
    TABLE
        .iter()
        .filter(|row| row.component == component && row.secret == secret)
        .all(|row| row.reloads == Reloads::Yes)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::*;

    const SAMPLES: [&str; 2] = [
        include_str!("../../charts/samples/clusterversion-1.34.yaml"),
        include_str!("../../charts/samples/clusterversion-1.35.yaml"),
    ];

    #[test]
    fn the_documentation_shows_the_table() {
        let written: Vec<_> = include_str!("reload.rs")
            .lines()
            .filter(|line| line.starts_with("//! | "))
            .skip(1)
            .collect();
        let table: Vec<_> = TABLE.iter().map(line).collect();
        assert_eq!(written, table);
    }

    fn line(row: &Row) -> String {
        let flags: Vec<_> = row.flags.iter().map(|flag| format!("`{flag}`")).collect();
        let reloads = match row.reloads {
            Reloads::Yes => "yes",
            Reloads::No => "no",
        };
        format!(
            "//! | {} | {} | {} | {} | {reloads} | {} |",
            row.component,
            row.secret,
            row.purpose,
            flags.join(", "),
            row.note
        )
    }

    #[test]
    fn purposes_of_a_component_differ() {
        let purposes: BTreeSet<_> = TABLE.iter().map(|row| (row.component, row.purpose)).collect();
        assert_eq!(purposes.len(), TABLE.len());
    }

    #[test]
    fn a_secret_needs_no_restart_if_all_its_uses_follow_it() {
        let needed: Vec<_> = Component::ALL
            .into_iter()
            .flat_map(|component| TenantSecret::ALL.map(|secret| (component, secret)))
            .filter(|(component, secret)| !reloads(*component, *secret))
            .collect();
        assert_eq!(
            needed,
            [
                (Component::Etcd, TenantSecret::RootCa),
                (Component::ApiServer, TenantSecret::RootCa),
                (Component::ApiServer, TenantSecret::ServiceAccount),
                (Component::ControllerManager, TenantSecret::RootCa),
                (
                    Component::ControllerManager,
                    TenantSecret::ControllerManagerKubeconfig
                ),
                (Component::ControllerManager, TenantSecret::ServiceAccount),
            ]
        );
    }

    #[test]
    fn the_table_has_each_file_of_the_samples_and_no_other() {
        let table: BTreeSet<_> = TABLE
            .iter()
            .flat_map(|row| {
                row.flags
                    .iter()
                    .map(|flag| (row.component, row.secret.name().to_owned(), (*flag).to_owned()))
            })
            .collect();
        for sample in SAMPLES {
            let sample: Value = serde_saphyr::from_str(sample).unwrap();
            let used: BTreeSet<_> = Component::ALL
                .into_iter()
                .flat_map(|component| files(component, &sample["spec"][component.spec_key()]))
                .collect();
            assert_eq!(used, table);
        }
    }

    /// The Secrets that arguments of a bundle name files of, and the flags of those.
    fn files(component: Component, bundle: &Value) -> Vec<(Component, String, String)> {
        let pod = &bundle["statefulset"]["spec"]["template"]["spec"];
        let secrets: BTreeMap<_, _> = items(&pod["volumes"])
            .filter_map(|volume| Some((text(&volume["name"])?, text(&volume["secret"]["secretName"])?)))
            .collect();
        let container = &pod["containers"][0];
        let folders: Vec<_> = items(&container["volumeMounts"])
            .filter_map(|mount| Some((text(&mount["mountPath"])?, *secrets.get(text(&mount["name"])?)?)))
            .collect();
        items(&container["args"])
            .filter_map(|argument| text(argument)?.split_once('='))
            .filter_map(|(flag, path)| {
                let (_, secret) = folders.iter().find(|(folder, _)| {
                    path.strip_prefix(folder)
                        .is_some_and(|rest| rest.starts_with('/'))
                })?;
                Some((component, (*secret).to_owned(), flag.to_owned()))
            })
            .collect()
    }

    fn items(list: &Value) -> impl Iterator<Item = &Value> {
        list.as_array().into_iter().flatten()
    }

    fn text(value: &Value) -> Option<&str> {
        value.as_str()
    }
}
