//! Whether credentials are judged as they must be, on real keys and certificates: what is issued anew and why, what only
//! a person may put right, when leaves are renewed, and that no text holds a piece of a key.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::{
    ByteString,
    jiff::{SignedDuration, Timestamp},
};
use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use vc_manager::{
    api::labels,
    controller::{
        credentials::{Credentials, Fault, Why},
        plan::{Effect, Plan},
        render::{TenantSecret, data_of},
    },
    pki::{self, CertifiedPair},
};

use crate::{
    fixture::now,
    real::{ACCOUNTS, Data, LEAVES, OTHER_ACCOUNTS, Plane, ROOT, Rest, days, pair_of, root, with_claims},
};

const SECOND: SignedDuration = SignedDuration::from_secs(1);

fn text(data: &Data, key: &str) -> String {
    String::from_utf8(data[key].0.clone()).expect("text")
}

fn put(data: &mut Data, key: &str, text: impl Into<Vec<u8>>) {
    data.insert(key.to_owned(), ByteString(text.into()));
}

fn put_pair(data: &mut Data, pair: &CertifiedPair) {
    put(data, "tls.crt", pair.certificate_pem.as_str());
    put(data, "tls.key", pair.key_pem.as_bytes());
}

/// Changes the kubeconfig in the data of `which`.
fn reconfigure(data: &mut Data, which: TenantSecret, change: impl FnOnce(&mut Value)) {
    let mut config: Value = serde_saphyr::from_str(&text(data, which.name())).expect("YAML");
    change(&mut config);
    // JSON is YAML.
    put(data, which.name(), config.to_string());
}

/// The keys in the Secrets of a tenant, each as base64 in one piece: of the key, and of its PEM as kubeconfigs have it.
fn keys_of(plane: &Plane) -> Vec<String> {
    let mut keys = Vec::new();
    for which in TenantSecret::ALL {
        let pair = pair_of(which, &plane.observed.secrets[which.name()]).expect("a pair");
        let body: String = pair
            .key_pem
            .lines()
            .filter(|line| !line.contains("-----"))
            .collect();
        keys.push(body);
        keys.push(STANDARD.encode(pair.key_pem.as_bytes()));
    }
    assert!(keys.iter().all(|key| key.len() > 100));
    keys
}

/// Fails if `text` holds a piece of a key, however short it may reasonably be.
fn assert_silent(keys: &[String], text: &str) {
    const PIECE: usize = 12;
    let is_base64 = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'+' | b'/' | b'=');
    for piece in text.as_bytes().windows(PIECE) {
        if piece.iter().copied().all(is_base64) {
            let piece = std::str::from_utf8(piece).expect("ASCII");
            assert!(
                keys.iter().all(|key| !key.contains(piece)),
                "a key is shown: {piece} in {text}"
            );
        }
    }
}

/// All that is said of a judgement.
fn told(judged: &Result<Credentials, Fault>) -> String {
    let reasons = judged.iter().flat_map(|credentials| &credentials.due);
    let reasons: Vec<_> = reasons.map(|(secret, why)| format!("{secret}: {why}")).collect();
    format!("{judged:?} {reasons:?}")
}

/// What is due, and that nothing said of it shows a key.
fn due(plane: &Plane, keys: &[String]) -> Vec<(TenantSecret, Why)> {
    let judged = plane.judge();
    assert_silent(keys, &told(&judged));
    judged.unwrap_or_else(|fault| panic!("{fault:?}")).due
}

/// The fault that there is, without a word of a key.
fn fault(plane: &Plane, keys: &[String]) -> Fault {
    let judged = plane.judge();
    assert_silent(keys, &told(&judged));
    judged.expect_err("a fault")
}

#[test]
fn the_search_for_pieces_of_keys_finds_them() {
    let plane = Plane::running();
    let keys = keys_of(&plane);
    for which in TenantSecret::ALL {
        let pair = pair_of(which, &plane.observed.secrets[which.name()]).expect("a pair");
        let encoded = STANDARD.encode(pair.key_pem.as_bytes());
        for shown in [pair.key_pem.lines().nth(1).expect("a line"), &encoded] {
            let text = format!("it says {}...", &shown[20..32]);
            std::panic::catch_unwind(|| assert_silent(&keys, &text)).expect_err("it is found");
        }
    }
}

#[test]
fn nothing_is_due_in_a_new_tenant_and_its_status_is_true() {
    let plane = Plane::unrecorded();
    let credentials = plane.credentials();
    assert_eq!(credentials.due, []);
    assert!(!credentials.root_nears_its_end);
    let status = credentials.status;
    let time = |time: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>| time.expect("known").0;
    assert_eq!(time(status.not_after), now() + days(365));
    assert_eq!(time(status.root_ca_not_after), now() + days(3650));
    let renew_at = time(status.renew_at);
    assert!(
        now() + days(206) < renew_at && renew_at < now() + days(244),
        "{renew_at}"
    );
    for (which, hash) in [
        (TenantSecret::RootCa, status.root_ca_hash),
        (TenantSecret::ServiceAccount, status.service_account_key_hash),
    ] {
        let data = data_of(&plane.observed.secrets[which.name()]);
        assert_eq!(
            hash,
            Some(pki::hash::annotation_hash(which.name(), &data).expect("a hash"))
        );
    }
    assert_eq!(credentials.due, plane.credentials().due, "judged twice alike");
}

/// A way to damage a leaf: its name, what is done, the key of the Secret that is named, a part of what is said.
struct Damage {
    name: &'static str,
    change: fn(&mut Data, TenantSecret),
    key: Key,
    says: &'static str,
}

#[derive(Clone, Copy)]
enum Key {
    Certificate,
    Private,
}

impl Key {
    fn of(self, which: TenantSecret) -> &'static str {
        match self {
            _ if which.is_kubeconfig() => which.name(),
            Self::Certificate => "tls.crt",
            Self::Private => "tls.key",
        }
    }
}

const NO_KEY: &str = "not the private key of the certificate";

/// Damages of a Secret with a certificate and a key.
const OF_PAIRS: [Damage; 16] = [
    Damage {
        name: "no data",
        change: |data, _| data.clear(),
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "no certificate",
        change: |data, _| drop(data.remove("tls.crt")),
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "no key",
        change: |data, _| drop(data.remove("tls.key")),
        key: Key::Private,
        says: "no text",
    },
    Damage {
        name: "an empty certificate",
        change: |data, _| put(data, "tls.crt", ""),
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
    Damage {
        name: "an empty key",
        change: |data, _| put(data, "tls.key", ""),
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "a certificate that is no text",
        change: |data, _| put(data, "tls.crt", [0xff, 0xfe, 0x00]),
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "a key that is no text",
        change: |data, _| put(data, "tls.key", [0xff, 0xfe, 0x00]),
        key: Key::Private,
        says: "no text",
    },
    Damage {
        name: "another text for a certificate",
        change: |data, _| put(data, "tls.crt", "to be filled in"),
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
    Damage {
        name: "another text for a key",
        change: |data, _| put(data, "tls.key", "to be filled in"),
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "half a certificate",
        change: |data, _| {
            let whole = text(data, "tls.crt");
            put(data, "tls.crt", &whole[..whole.len() / 2]);
        },
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
    Damage {
        name: "half a key",
        change: |data, _| {
            let whole = text(data, "tls.key");
            put(data, "tls.key", &whole[..whole.len() / 2]);
        },
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "the key in both places",
        change: |data, _| {
            let key = text(data, "tls.key");
            put(data, "tls.crt", key);
        },
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
    Damage {
        name: "the key as if it were a certificate",
        change: |data, _| {
            let key = text(data, "tls.key").replace("PRIVATE KEY", "CERTIFICATE");
            put(data, "tls.crt", key);
        },
        key: Key::Certificate,
        says: "cannot be parsed",
    },
    Damage {
        name: "the certificate in both places",
        change: |data, _| {
            let certificate = text(data, "tls.crt");
            put(data, "tls.key", certificate);
        },
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "another's key",
        change: |data, _| put(data, "tls.key", ACCOUNTS.key_pem.as_bytes()),
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "the root CA's certificate with the leaf's key",
        change: |data, _| put(data, "tls.crt", ROOT.certificate_pem.as_str()),
        key: Key::Private,
        says: NO_KEY,
    },
];

/// Damages of a Secret with a kubeconfig.
const OF_KUBECONFIGS: [Damage; 13] = [
    Damage {
        name: "no data",
        change: |data, _| data.clear(),
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "under another key",
        change: |data, which| {
            let config = data.remove(which.name()).expect("it has one");
            data.insert("value".into(), config);
        },
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "no text",
        change: |data, which| put(data, which.name(), [0xff, 0xfe]),
        key: Key::Certificate,
        says: "no text",
    },
    Damage {
        name: "empty",
        change: |data, which| put(data, which.name(), ""),
        key: Key::Certificate,
        says: "cannot be used",
    },
    Damage {
        name: "half of it",
        change: |data, which| {
            let whole = text(data, which.name());
            put(data, which.name(), &whole[..whole.len() / 2]);
        },
        key: Key::Certificate,
        says: "cannot be used",
    },
    Damage {
        name: "not YAML",
        change: |data, which| {
            let whole = text(data, which.name());
            put(data, which.name(), format!("{{{whole}"));
        },
        key: Key::Certificate,
        says: "not a kubeconfig in YAML (line",
    },
    Damage {
        name: "no current context",
        change: |data, which| reconfigure(data, which, |config| config["current-context"] = json!("other")),
        key: Key::Certificate,
        says: "current context is missing",
    },
    Damage {
        name: "no user",
        change: |data, which| reconfigure(data, which, |config| config["users"] = json!([])),
        key: Key::Certificate,
        says: "user is missing",
    },
    Damage {
        name: "a certificate that is not base64",
        change: |data, which| {
            reconfigure(data, which, |config| {
                config["users"][0]["user"]["client-certificate-data"] = json!("%%%");
            });
        },
        key: Key::Certificate,
        says: "client-certificate-data",
    },
    Damage {
        name: "a key that is not base64",
        change: |data, which| {
            reconfigure(data, which, |config| {
                let key = &mut config["users"][0]["user"]["client-key-data"];
                *key = json!(format!("{}%", key.as_str().expect("text")));
            });
        },
        key: Key::Certificate,
        says: "client-key-data",
    },
    Damage {
        name: "certificate and key exchanged",
        change: |data, which| {
            reconfigure(data, which, |config| {
                let user = &mut config["users"][0]["user"];
                let (certificate, key) = (
                    user["client-certificate-data"].take(),
                    user["client-key-data"].take(),
                );
                *user = json!({"client-certificate-data": key, "client-key-data": certificate});
            });
        },
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
    Damage {
        name: "another's key",
        change: |data, which| {
            reconfigure(data, which, |config| {
                config["users"][0]["user"]["client-key-data"] =
                    json!(STANDARD.encode(ACCOUNTS.key_pem.as_bytes()));
            });
        },
        key: Key::Private,
        says: NO_KEY,
    },
    Damage {
        name: "a CA that is no certificate",
        change: |data, which| {
            reconfigure(data, which, |config| {
                config["clusters"][0]["cluster"]["certificate-authority-data"] = json!(STANDARD.encode("CA"));
            });
        },
        key: Key::Certificate,
        says: "PEM block of type CERTIFICATE",
    },
];

#[test]
fn a_damaged_leaf_is_issued_anew_and_the_key_of_its_secret_is_named() {
    let whole = Plane::running();
    let keys = keys_of(&whole);
    for which in LEAVES {
        let damages: &[Damage] = if which.is_kubeconfig() {
            &OF_KUBECONFIGS
        } else {
            &OF_PAIRS
        };
        for damage in damages {
            let mut plane = whole.clone();
            plane.edit(which, |data| (damage.change)(data, which));
            let due = due(&plane, &keys);
            let [(secret, why)] = &due[..] else {
                panic!("{which}, {}: {due:?}", damage.name)
            };
            let Why::Damaged(key, problem) = why else {
                panic!("{which}, {}: {why:?}", damage.name)
            };
            assert_eq!(
                (*secret, *key),
                (which, damage.key.of(which)),
                "{}: {problem}",
                damage.name
            );
            assert!(
                problem.contains(damage.says),
                "{which}, {}: {problem}",
                damage.name
            );
            assert!(why.to_string().contains(&format!("key {key} ")), "{why}");
            assert_eq!(why.label(), "damaged");
            // What is said of the others is not less true.
            assert_eq!(plane.credentials().status, whole.credentials().status);
            plane.settle_well();
            assert_eq!(plane.issued, BTreeMap::from([(which, 1)]), "{}", damage.name);
        }
    }
}

#[test]
fn a_leaf_that_is_gone_is_issued_anew() {
    let whole = Plane::running();
    for which in LEAVES {
        let mut plane = whole.clone();
        plane.observed.secrets.remove(which.name());
        assert_eq!(plane.credentials().due, [(which, Why::Missing)]);
    }
    let mut plane = whole.clone();
    for which in LEAVES {
        plane.observed.secrets.remove(which.name());
    }
    for recorded in [whole.recorded.clone(), None] {
        plane.recorded = recorded;
        let credentials = plane.credentials();
        assert_eq!(credentials.due, LEAVES.map(|which| (which, Why::Missing)));
        assert_eq!(credentials.due_secrets(), LEAVES);
        assert_eq!(
            (credentials.status.not_after, credentials.status.renew_at),
            (None, None)
        );
    }
}

#[test]
fn a_leaf_of_etcd_is_wanted_only_by_who_has_an_etcd() {
    let mut content = crate::fixture::content();
    content.as_object_mut().expect("an object").remove("etcd");
    let template = vc_manager::api::template::Template::parse(&content).expect("a template");
    let mut plane = Plane::new(template, &ROOT);
    plane.provision();
    assert!(!plane.observed.secrets.contains_key("etcd-ca"));
    assert_eq!(plane.credentials().due, []);
}

/// Another tenant: other names, other keys, another root CA.
fn another() -> Plane {
    let mut plane = Plane::new(with_claims(), &root(now() - days(1), now() + days(3650)));
    plane.tenant.name = "other".into();
    plane.tenant.root_namespace = "ns-000000-other".into();
    plane.tenant.uid = "0".into();
    plane.provision();
    plane
}

fn take(from: &Plane, to: &mut Plane, which: TenantSecret) {
    let secret = from.observed.secrets[which.name()].clone();
    to.observed.secrets.insert(which.name().into(), secret);
}

#[test]
fn leaves_of_another_tenant_are_known_by_their_signature() {
    let (own, other) = (Plane::running(), another());
    let keys = [keys_of(&own), keys_of(&other)].concat();
    for which in LEAVES {
        for recorded in [own.recorded.clone(), None] {
            let mut plane = own.clone();
            plane.recorded = recorded;
            take(&other, &mut plane, which);
            assert_eq!(due(&plane, &keys), [(which, Why::OtherAuthority)]);
        }
    }
    // All of them: the root CA is known to be the one of before, or it is what was swapped.
    let mut plane = own.clone();
    for which in LEAVES {
        take(&other, &mut plane, which);
    }
    assert_eq!(
        due(&plane, &keys),
        LEAVES.map(|which| (which, Why::OtherAuthority))
    );
    plane.recorded = None;
    let replaced = fault(&plane, &keys);
    assert_eq!(replaced.reason, "RootCAReplaced");
    assert!(
        replaced
            .message
            .contains("Secret ns-fd1b34-name/root-ca, key tls.crt"),
        "{}",
        replaced.message
    );
    // Those that cannot be read tell nothing of it.
    plane.edit(TenantSecret::Etcd, |data| put(data, "tls.crt", ""));
    plane.observed.secrets.remove(TenantSecret::FrontProxy.name());
    assert_eq!(fault(&plane, &keys).reason, "RootCAReplaced");
    // One of its own is enough.
    take(&own, &mut plane, TenantSecret::AdminKubeconfig);
    assert_eq!(
        due(&plane, &keys),
        [
            (TenantSecret::ApiServer, Why::OtherAuthority),
            (
                TenantSecret::Etcd,
                Why::Damaged(
                    "tls.crt",
                    "the certificate holds no readable PEM block of type CERTIFICATE; restore it from a backup".into()
                )
            ),
            (TenantSecret::FrontProxy, Why::Missing),
            (TenantSecret::ControllerManagerKubeconfig, Why::OtherAuthority),
        ]
    );
}

#[test]
fn a_secret_that_somebody_else_made_is_left_alone_if_it_is_of_no_use() {
    let (own, other) = (Plane::running(), another());
    let keys = [keys_of(&own), keys_of(&other)].concat();
    let by_somebody = |plane: &mut Plane, which: TenantSecret| {
        let secret = plane.observed.secrets.get_mut(which.name()).expect("the Secret");
        secret.metadata.annotations = None;
        let entry = json!({"manager": "helm", "operation": "Update", "fieldsV1": {"f:data": {}}});
        secret.metadata.managed_fields = Some(vec![serde_json::from_value(entry).expect("an entry")]);
    };
    for which in LEAVES {
        let mut plane = own.clone();
        by_somebody(&mut plane, which);
        // It is of use: restored from a backup, say.
        assert_eq!(due(&plane, &keys), []);
        plane.edit(which, Data::clear);
        let damaged = fault(&plane, &keys);
        take(&other, &mut plane, which);
        by_somebody(&mut plane, which);
        let foreign = fault(&plane, &keys);
        for fault in [damaged, foreign] {
            assert_eq!(fault.reason, "SecretNotOurs");
            let named = format!("Secret ns-fd1b34-name/{which} was made by helm");
            assert!(fault.message.starts_with(&named), "{}", fault.message);
        }
        // Given to the tenant, it is issued anew.
        let secret = plane.observed.secrets.get_mut(which.name()).expect("the Secret");
        secret.metadata.annotations = Some(BTreeMap::from([(labels::ISSUED_FOR.into(), String::new())]));
        assert_eq!(due(&plane, &keys), [(which, Why::OtherAuthority)]);
    }
}

#[test]
fn leaves_of_the_same_tenant_in_each_others_place_are_known_by_their_names() {
    let own = Plane::running();
    for (one, two) in [
        (TenantSecret::ApiServer, TenantSecret::Etcd),
        (TenantSecret::Etcd, TenantSecret::FrontProxy),
        (TenantSecret::FrontProxy, TenantSecret::ApiServer),
    ] {
        let mut plane = own.clone();
        let data = [one, two].map(|which| own.observed.secrets[which.name()].data.clone().expect("data"));
        let [of_one, of_two] = data;
        plane.edit(one, |data| *data = of_two);
        plane.edit(two, |data| *data = of_one);
        let due: BTreeSet<_> = plane.credentials().due_secrets().into_iter().collect();
        assert_eq!(due, BTreeSet::from([one, two]));
        assert!(
            plane
                .credentials()
                .due
                .iter()
                .all(|(_, why)| *why == Why::OtherNames)
        );
    }
    // The controller-manager's certificate does not make an administrator, nor the other way round.
    let mut plane = own.clone();
    let admin = text(
        own.observed.secrets["admin-kubeconfig"]
            .data
            .as_ref()
            .expect("data"),
        "admin-kubeconfig",
    );
    plane.edit(TenantSecret::ControllerManagerKubeconfig, |data| {
        put(data, "controller-manager-kubeconfig", admin);
    });
    let expected = [(TenantSecret::ControllerManagerKubeconfig, Why::OtherNames)];
    assert_eq!(plane.credentials().due, expected);
    // Nor does the root CA, which has signed itself, make a leaf.
    let mut plane = own.clone();
    plane.edit(TenantSecret::ApiServer, |data| put_pair(data, &ROOT));
    assert_eq!(
        plane.credentials().due,
        [(TenantSecret::ApiServer, Why::OtherNames)]
    );
}

#[test]
fn a_kubeconfig_is_for_this_server_and_this_root() {
    let own = Plane::running();
    for which in [
        TenantSecret::ControllerManagerKubeconfig,
        TenantSecret::AdminKubeconfig,
    ] {
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut plane = own.clone();
            plane.edit(which, |data| reconfigure(data, which, change));
            plane.credentials().due
        };
        let server = |config: &mut Value, to: &str| config["clusters"][0]["cluster"]["server"] = json!(to);
        assert_eq!(changed(&|_| {}), [], "rewritten, and the same");
        assert_eq!(
            changed(&|config| server(config, "https://10.9.9.9:6443")),
            [(which, Why::OtherNames)]
        );
        assert_eq!(
            changed(&|config| server(config, "https://10.0.0.1:443")),
            [(which, Why::OtherNames)]
        );
        assert_eq!(
            changed(&|config| {
                let other = root(now() - days(1), now() + days(1));
                config["clusters"][0]["cluster"]["certificate-authority-data"] =
                    json!(STANDARD.encode(other.certificate_pem));
            }),
            [(which, Why::OtherAuthority)]
        );
    }
}

#[test]
fn other_names_of_the_tenant_make_other_leaves() {
    let own = Plane::running();
    let due = |change: fn(&mut Plane)| {
        let mut plane = own.clone();
        change(&mut plane);
        let due = plane.credentials().due;
        assert!(due.iter().all(|(_, why)| *why == Why::OtherNames), "{due:?}");
        due.into_iter().map(|(secret, _)| secret).collect::<Vec<_>>()
    };
    let api_server = [TenantSecret::ApiServer];
    assert_eq!(
        due(|plane| plane.tenant.cluster_domain = "other.local".into()),
        api_server
    );
    assert_eq!(
        due(|plane| plane.tenant.external_domain = Some("name.example.com".into())),
        api_server
    );
    assert_eq!(
        due(|plane| plane.template.etcd.as_mut().expect("etcd").replicas = 5),
        [TenantSecret::Etcd]
    );
    let address = |plane: &mut Plane, address: Option<&str>| {
        let service = plane
            .observed
            .services
            .get_mut("apiserver-svc")
            .expect("a Service");
        service.spec.as_mut().expect("a spec").cluster_ip = address.map(Into::into);
    };
    let moved = [
        TenantSecret::ApiServer,
        TenantSecret::ControllerManagerKubeconfig,
        TenantSecret::AdminKubeconfig,
    ];
    let mut plane = own.clone();
    address(&mut plane, Some("10.9.9.9"));
    assert_eq!(
        plane.credentials().due,
        moved.map(|which| (which, Why::OtherNames))
    );
    // What is not known says nothing.
    address(&mut plane, None);
    assert_eq!(plane.credentials().due, []);
    plane.lose_service("apiserver-svc");
    assert_eq!(plane.credentials().due, []);
    // A name that no certificate can have is told, and does not keep any from being renewed.
    let mut plane = own.clone();
    plane.tenant.external_domain = Some("not a name".into());
    assert_eq!(plane.credentials().due, []);
    let complaint = plane.credentials().complaint.expect("it is told");
    assert_eq!(complaint.0, "InvalidName");
    assert!(complaint.1.contains("not a name"), "{}", complaint.1);
    plane.at(times(&plane).0);
    plane.settle_well();
    assert_eq!(plane.issued, LEAVES.map(|which| (which, 1)).into());
}

/// A certificate made with `change`, self-signed.
fn self_signed(change: impl FnOnce(&mut CertificateParams)) -> CertifiedPair {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    change(&mut params);
    CertifiedPair {
        certificate_pem: params.self_signed(&key).expect("a certificate").pem(),
        key_pem: key.serialize_pem().into(),
    }
}

/// Ways in which what is made once can be wrong: name, what is done, reason, key of the Secret.
type Wrong = (&'static str, fn(&mut Data), &'static str, &'static str);

const UNUSABLE: &str = "RootCAUnusable";
const OF_ROOTS: [Wrong; 17] = [
    ("no data", Data::clear, UNUSABLE, "tls.crt"),
    (
        "no certificate",
        |data| drop(data.remove("tls.crt")),
        UNUSABLE,
        "tls.crt",
    ),
    ("no key", |data| drop(data.remove("tls.key")), UNUSABLE, "tls.key"),
    (
        "not text",
        |data| put(data, "tls.crt", [0xff]),
        UNUSABLE,
        "tls.crt",
    ),
    (
        "key not text",
        |data| put(data, "tls.key", [0xff]),
        UNUSABLE,
        "tls.key",
    ),
    ("empty", |data| put(data, "tls.crt", ""), UNUSABLE, "tls.crt"),
    ("empty key", |data| put(data, "tls.key", ""), UNUSABLE, "tls.key"),
    (
        "half a certificate",
        |data| {
            let whole = text(data, "tls.crt");
            put(data, "tls.crt", &whole[..whole.len() / 2]);
        },
        UNUSABLE,
        "tls.crt",
    ),
    (
        "half a key",
        |data| {
            let whole = text(data, "tls.key");
            put(data, "tls.key", &whole[..whole.len() / 2]);
        },
        UNUSABLE,
        "tls.key",
    ),
    (
        "a key whose middle is gone",
        |data| {
            let lines = text(data, "tls.key");
            let lines: Vec<_> = lines.lines().collect();
            let holed = [&lines[..5], &lines[7..]].concat().join("\n");
            put(data, "tls.key", holed);
        },
        UNUSABLE,
        "tls.key",
    ),
    (
        "the key as if it were a certificate",
        |data| {
            let key = text(data, "tls.key").replace("RSA PRIVATE KEY", "CERTIFICATE");
            put(data, "tls.crt", key);
        },
        UNUSABLE,
        "tls.crt",
    ),
    (
        "certificate and key exchanged",
        |data| {
            let (certificate, key) = (text(data, "tls.crt"), text(data, "tls.key"));
            put(data, "tls.crt", key);
            put(data, "tls.key", certificate);
        },
        UNUSABLE,
        "tls.crt",
    ),
    (
        "mixed halves",
        |data| put(data, "tls.key", ACCOUNTS.key_pem.as_bytes()),
        UNUSABLE,
        "tls.crt",
    ),
    (
        "no CA",
        |data| put_pair(data, &self_signed(|params| params.is_ca = IsCa::ExplicitNoCa)),
        UNUSABLE,
        "tls.crt",
    ),
    (
        "no CA, and no word of it",
        |data| put_pair(data, &self_signed(|params| params.is_ca = IsCa::NoCa)),
        UNUSABLE,
        "tls.crt",
    ),
    (
        "a CA that may not sign",
        |data| {
            put_pair(
                data,
                &self_signed(|params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]),
            );
        },
        UNUSABLE,
        "tls.crt",
    ),
    (
        "ended",
        |data| put_pair(data, &root(now() - days(3650), now() - SECOND)),
        "RootCAExpired",
        "tls.crt",
    ),
];

const NO_ACCOUNTS: &str = "ServiceAccountKeyUnusable";
const OF_ACCOUNTS: [Wrong; 9] = [
    ("no data", Data::clear, NO_ACCOUNTS, "tls.crt"),
    (
        "no public half",
        |data| drop(data.remove("tls.crt")),
        NO_ACCOUNTS,
        "tls.crt",
    ),
    (
        "no key",
        |data| drop(data.remove("tls.key")),
        NO_ACCOUNTS,
        "tls.key",
    ),
    ("empty", |data| put(data, "tls.crt", ""), NO_ACCOUNTS, "tls.crt"),
    (
        "empty key",
        |data| put(data, "tls.key", ""),
        NO_ACCOUNTS,
        "tls.key",
    ),
    (
        "no key but text",
        |data| put(data, "tls.key", "x"),
        NO_ACCOUNTS,
        "tls.key",
    ),
    (
        "a certificate",
        |data| put(data, "tls.crt", ROOT.certificate_pem.as_str()),
        NO_ACCOUNTS,
        "tls.crt",
    ),
    (
        "mixed halves",
        |data| put(data, "tls.key", OTHER_ACCOUNTS.key_pem.as_bytes()),
        NO_ACCOUNTS,
        "tls.crt",
    ),
    (
        "a public key that is none",
        |data| {
            put(
                data,
                "tls.crt",
                "-----BEGIN PUBLIC KEY-----\nMAA=\n-----END PUBLIC KEY-----\n",
            );
        },
        NO_ACCOUNTS,
        "tls.crt",
    ),
];

#[test]
fn what_is_made_once_is_never_made_anew_but_told_with_the_key_of_its_secret() {
    for own in [Plane::running(), Plane::unrecorded()] {
        let keys = keys_of(&own);
        let cases = OF_ROOTS.iter().map(|wrong| (TenantSecret::RootCa, wrong)).chain(
            OF_ACCOUNTS
                .iter()
                .map(|wrong| (TenantSecret::ServiceAccount, wrong)),
        );
        for (which, (name, change, reason, key)) in cases {
            let mut plane = own.clone();
            plane.edit(which, change);
            // It matters more than any leaf.
            plane.observed.secrets.remove("apiserver-ca");
            let fault = fault(&plane, &keys);
            assert_eq!(fault.reason, *reason, "{name}: {}", fault.message);
            let named = format!("Secret ns-fd1b34-name/{which}, key {key}: ");
            assert!(fault.message.starts_with(&named), "{name}: {}", fault.message);
            assert_eq!(plane.look(), Rest::Fault(fault), "{name}");
            assert!(plane.log.is_empty(), "{name}: {:?}", plane.log);
        }
        for (which, reason) in [
            (TenantSecret::RootCa, "RootCALost"),
            (TenantSecret::ServiceAccount, "ServiceAccountKeyLost"),
        ] {
            let mut plane = own.clone();
            plane.observed.secrets.remove(which.name());
            let fault = fault(&plane, &keys);
            assert_eq!(fault.reason, reason);
            let lost = format!("Secret ns-fd1b34-name/{which} does not exist");
            assert!(fault.message.starts_with(&lost), "{}", fault.message);
        }
    }
}

#[test]
fn a_root_from_the_future_is_not_worked_with() {
    let mut plane = Plane::running();
    plane.at(now() - SignedDuration::from_hours(2));
    let fault = plane.judge().expect_err("not valid yet");
    assert_eq!(fault.reason, "RootCAUnusable");
    assert!(fault.message.contains("clock"), "{}", fault.message);
}

#[test]
fn a_root_expires_to_the_second() {
    let mut plane = Plane::running();
    let end = now() + days(3650);
    // Its leaves have ended long before, and end with it now.
    plane.at(end);
    assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
    plane.at(end + SECOND);
    let fault = plane.judge().expect_err("a fault");
    assert_eq!(fault.reason, "RootCAExpired");
    assert!(fault.message.contains(&end.to_string()), "{}", fault.message);
}

#[test]
fn another_root_in_the_place_of_the_first_is_not_worked_with() {
    let own = Plane::running();
    let keys = keys_of(&own);
    let swapped = |pair: &CertifiedPair, own: &Plane| {
        let mut plane = own.clone();
        plane.edit(TenantSecret::RootCa, |data| put_pair(data, pair));
        plane
    };
    let other = root(now() - days(1), now() + days(3650));
    for (own, says) in [
        (own.clone(), "is not the root CA that this tenant was made with"),
        (
            Plane::unrecorded(),
            "did not sign any of the tenant's certificates",
        ),
    ] {
        let fault = fault(&swapped(&other, &own), &keys);
        assert_eq!(fault.reason, "RootCAReplaced");
        assert!(fault.message.contains(says), "{}", fault.message);
        assert!(
            fault
                .message
                .contains("Secret ns-fd1b34-name/root-ca, key tls.crt")
                && fault.message.contains("status.certificates.rootCAHash"),
            "{}",
            fault.message
        );
    }
    // The first one again, with a longer life: its leaves are still good, and yet it is another.
    let der = pem::parse(ROOT.key_pem.as_str()).expect("PEM").into_contents();
    let key = KeyPair::try_from(der).expect("a key");
    let mut params = rcgen::Issuer::from_ca_cert_pem(&ROOT.certificate_pem, &key)
        .map(|_| CertificateParams::default())
        .expect("a CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let mut name = rcgen::DistinguishedName::new();
    name.push(rcgen::DnType::OrganizationName, pki::ROOT_ORGANIZATION);
    name.push(rcgen::DnType::CommonName, pki::ROOT_COMMON_NAME);
    params.distinguished_name = name;
    let prolonged = CertifiedPair {
        certificate_pem: params.self_signed(&key).expect("a certificate").pem(),
        key_pem: ROOT.key_pem.clone(),
    };
    assert_eq!(fault(&swapped(&prolonged, &own), &keys).reason, "RootCAReplaced");
    // Its owner accepts it by removing the record: only what carries the CA itself is written anew.
    let accepted = swapped(&prolonged, &Plane::unrecorded());
    let kubeconfigs = [
        TenantSecret::ControllerManagerKubeconfig,
        TenantSecret::AdminKubeconfig,
    ];
    assert_eq!(
        due(&accepted, &keys),
        kubeconfigs.map(|which| (which, Why::OtherAuthority))
    );
}

#[test]
fn another_service_account_key_is_worked_with_only_if_nothing_is_recorded() {
    let mut plane = Plane::running();
    let keys = [
        keys_of(&plane),
        vec![STANDARD.encode(OTHER_ACCOUNTS.key_pem.as_bytes())],
    ]
    .concat();
    plane.edit(TenantSecret::ServiceAccount, |data| {
        put_pair(data, &OTHER_ACCOUNTS);
    });
    let fault = fault(&plane, &keys);
    assert_eq!(fault.reason, "ServiceAccountKeyReplaced");
    assert!(
        fault
            .message
            .starts_with("Secret ns-fd1b34-name/serviceaccount-rsa, key tls.crt: ")
            && fault
                .message
                .contains("status.certificates.serviceAccountKeyHash"),
        "{}",
        fault.message
    );
    plane
        .recorded
        .as_mut()
        .expect("recorded")
        .service_account_key_hash = None;
    assert_eq!(due(&plane, &keys), []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever becomes of the bytes: a leaf is good or issued anew, and never a fault; what is made once is as it was or
    /// a fault, and never issued. Nothing said of it shows a key.
    #[test]
    fn no_damage_is_mistaken(
        which in proptest::sample::select(&TenantSecret::ALL[..]),
        second: bool,
        at in any::<prop::sample::Index>(),
        cut in 0_usize..80,
        insert in proptest::collection::vec(any::<u8>(), 0..40),
        recorded: bool,
    ) {
        let own = if recorded { Plane::running() } else { Plane::unrecorded() };
        let keys = keys_of(&own);
        let mut plane = own.clone();
        plane.edit(which, |data| {
            let key = data.keys().nth(usize::from(second) % data.len()).expect("a key").clone();
            let bytes = &mut data.get_mut(&key).expect("a value").0;
            let at = at.index(bytes.len());
            let end = bytes.len().min(at + cut);
            bytes.splice(at..end, insert);
        });
        let judged = plane.judge();
        assert_silent(&keys, &told(&judged));
        match judged {
            Ok(credentials) => {
                let due = credentials.due_secrets();
                if which.leaf().is_none() {
                    prop_assert!(due.is_empty());
                    prop_assert!(own.recorded.is_none() || own.recorded == Some(credentials.status));
                    // What it does is the same.
                    let pair = |plane: &Plane| pair_of(which, &plane.observed.secrets[which.name()]);
                    prop_assert!(pair(&plane).is_some());
                } else if due.is_empty() {
                    prop_assert!(plane.leaf(which) == own.leaf(which));
                } else {
                    prop_assert_eq!(due, [which]);
                }
            }
            Err(fault) => {
                prop_assert!(which.leaf().is_none(), "{:?}", fault);
                let named = format!("Secret ns-fd1b34-name/{which}, key tls.");
                prop_assert!(fault.message.starts_with(&named), "{}", fault.message);
            }
        }
    }
}

/// When the first leaf is renewed, and when it ends.
fn times(plane: &Plane) -> (Timestamp, Timestamp) {
    let status = plane.credentials().status;
    (
        status.renew_at.expect("a time").0,
        status.not_after.expect("a time").0,
    )
}

/// A tenant that asks for this life.
fn lives(days: Option<i64>) -> Plane {
    let mut plane = Plane::new(with_claims(), &ROOT);
    plane.tenant.pki_expire_days = days;
    plane.provision();
    plane
}

#[test]
fn leaves_are_due_to_the_second_that_the_status_tells() {
    for wanted in [None, Some(7), Some(90), Some(3000)] {
        let mut plane = lives(wanted);
        let (renew_at, not_after) = times(&plane);
        plane.at(renew_at - SECOND);
        assert_eq!(plane.credentials().due, []);
        plane.at(renew_at);
        assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
        // As long as nobody does it, also when it is late.
        plane.at(not_after + days(1));
        assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
        assert_eq!(plane.settle(), Rest::Done);
        let status = plane.credentials().status;
        let (renew_at, not_after) = (
            status.renew_at.map(|time| time.0),
            status.not_after.expect("a time").0,
        );
        let end = plane.last_issue() + days(wanted.unwrap_or(365));
        assert_eq!(not_after, end.min(now() + days(3650)));
        if wanted == Some(3000) {
            assert_eq!(renew_at, None);
            continue;
        }
        assert!(renew_at > Some(plane.now));
    }
}

#[test]
fn a_shorter_life_is_given_once_two_thirds_of_it_are_over() {
    let mut plane = lives(None);
    plane.tenant.pki_expire_days = Some(90);
    let (renew_at, _) = times(&plane);
    assert!(
        renew_at <= now() + days(60) && renew_at >= now() + days(50),
        "{renew_at}"
    );
    plane.at(now() + days(10));
    assert_eq!(plane.credentials().due, []);
    plane.at(now() + days(100));
    assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
    plane.settle_well();
    assert_eq!(plane.issued, LEAVES.map(|which| (which, 1)).into());
    let life = times(&plane).1.duration_since(now() + days(100));
    assert_eq!(life, days(90));
}

#[test]
fn a_longer_life_is_given_when_the_shorter_one_is_renewed() {
    let mut plane = lives(Some(90));
    let before = times(&plane);
    plane.tenant.pki_expire_days = Some(365);
    assert_eq!(times(&plane), before);
    plane.at(before.0);
    plane.settle_well();
    assert!(times(&plane).1 >= before.0 + days(365));
}

#[test]
fn a_life_that_nobody_can_give_is_told_and_does_not_keep_leaves_from_being_renewed() {
    for wanted in [0, -1, 3651, i64::MIN, i64::MAX] {
        let mut plane = lives(None);
        assert_eq!(plane.credentials().complaint, None);
        let before = times(&plane);
        plane.tenant.pki_expire_days = Some(wanted);
        let complaint = plane.credentials().complaint.expect("it is told");
        assert_eq!(complaint.0, "InvalidExpireDays");
        let told = format!("spec.pkiExpireDays is {wanted}; it must be from 1 to 3650");
        assert!(complaint.1.starts_with(&told), "{}", complaint.1);
        assert_eq!(times(&plane), before);
        plane.at(before.0 - SECOND);
        assert_eq!(plane.look(), Rest::Done);
        plane.at(before.0);
        assert_eq!(plane.credentials().due.len(), 5);
        plane.settle_well();
        assert_eq!(times(&plane).1, before.0 + days(365));
        assert!(plane.credentials().complaint.is_some());
    }
    // The manager's limit holds even so.
    let mut plane = lives(None);
    plane.tenant.pki_expire_days = Some(0);
    plane.max_life = Some(Duration::from_hours(24));
    plane.at(now() + days(2));
    plane.settle_well();
    assert_eq!(times(&plane).1, now() + days(3));
}

#[test]
fn the_managers_limit_of_lives_holds_for_leaves_that_are_there() {
    let mut plane = lives(None);
    plane.max_life = Some(Duration::from_mins(10));
    let (renew_at, _) = times(&plane);
    let life = SignedDuration::from_mins(10);
    assert!(renew_at <= now() + life, "{renew_at}");
    for round in 1..4 {
        plane.at(times(&plane).0);
        assert_eq!(plane.settle(), Rest::Done);
        assert_eq!(plane.issued[&TenantSecret::Etcd], round);
        let leaf = plane.leaf(TenantSecret::Etcd);
        let lived = leaf.not_after.duration_since(leaf.not_before);
        assert_eq!(
            lived,
            life + life / 24,
            "it is not dated back for longer than it lives"
        );
    }
    // A limit above what is asked for is none.
    let mut plane = lives(Some(7));
    let before = times(&plane);
    plane.max_life = Some(Duration::from_hours(24 * 30));
    assert_eq!(times(&plane), before);
    plane.at(before.0);
    plane.settle_well();
    assert_eq!(
        plane.leaf(TenantSecret::Etcd).not_after.duration_since(before.0),
        days(7)
    );
}

#[test]
fn leaves_of_the_go_manager_are_renewed_by_the_year_they_were_issued_for() {
    // Issued two years after the root CA was made, and dated back to then.
    let issued = now() + days(730);
    let mut plane = Plane::left_by_go(issued, &ROOT);
    let leaf = plane.leaf(TenantSecret::ApiServer);
    assert!(leaf.not_after.duration_since(leaf.not_before) > days(1095));
    let (renew_at, not_after) = times(&plane);
    assert_eq!(not_after, issued + days(365));
    assert!(
        issued + days(206) <= renew_at && renew_at <= issued + days(244),
        "{renew_at}"
    );
    for at in [issued, issued + days(200), renew_at - SECOND] {
        plane.at(at);
        assert_eq!(plane.credentials().due, []);
    }
    // Never for its names, as long as it is what the Go manager made.
    plane.tenant.cluster_domain = "other.local".into();
    plane.tenant.external_domain = Some("name.example.com".into());
    let etcd = plane.template.etcd.as_mut().expect("etcd");
    etcd.replicas = 5;
    // Nor by what it now asks for: its leaves are what they are.
    plane.tenant.pki_expire_days = Some(30);
    assert_eq!(plane.credentials().due, []);
    plane.adopted = false;
    assert_eq!(
        plane.credentials().due,
        [TenantSecret::ApiServer, TenantSecret::Etcd].map(|which| (which, Why::OtherNames))
    );
    plane.adopted = true;
    plane.at(renew_at);
    assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
    // What is damaged or of another root CA is issued even so.
    plane.at(issued);
    plane.edit(TenantSecret::FrontProxy, |data| put(data, "tls.key", ""));
    take(&another(), &mut plane, TenantSecret::Etcd);
    let due = plane.credentials().due_secrets();
    assert_eq!(due, [TenantSecret::Etcd, TenantSecret::FrontProxy]);
}

#[test]
fn one_made_by_go_is_renewed_once_and_then_as_any_other() {
    let mut plane = Plane::left_by_go(now() + days(400), &ROOT);
    plane.at(times(&plane).0);
    plane.settle_well();
    assert_eq!(plane.issued, LEAVES.map(|which| (which, 1)).into());
    let leaf = plane.leaf(TenantSecret::ApiServer);
    assert_eq!(
        leaf.not_before,
        plane.last_issue() - SignedDuration::from_hours(1)
    );
    for which in LEAVES {
        let annotations = plane.observed.secrets[which.name()].metadata.annotations.as_ref();
        assert!(
            annotations.is_some_and(|all| all.contains_key(labels::ISSUED_FOR)),
            "{which}"
        );
    }
}

/// Renews the leaves of a tenant whenever they are due, until its root CA ends: when each renewal was.
fn renewals_until_the_end(wanted: Option<i64>, end: Timestamp, uid: &str) -> Vec<Timestamp> {
    let mut plane = Plane::new(with_claims(), &root(now() - days(1), end));
    plane.tenant.uid = uid.into();
    plane.tenant.pki_expire_days = wanted;
    plane.provision();
    let mut renewals = Vec::new();
    loop {
        let status = plane.credentials().status;
        let not_after = status.not_after.expect("a time").0;
        let Some(renew_at) = status.renew_at.map(|time| time.0) else {
            assert_eq!(
                not_after, end,
                "not renewed any more, yet it ends before the root CA"
            );
            break;
        };
        assert!(renew_at > plane.now, "told to be renewed in the past");
        assert!(renew_at < not_after, "renewed when it has ended: {renew_at}");
        plane.at(renew_at - SECOND);
        assert_eq!(plane.credentials().due, []);
        plane.at(renew_at);
        let due = plane.credentials().due;
        assert_eq!(due, LEAVES.map(|which| (which, Why::Due)), "at {renew_at}");
        let effect = Effect::Issue {
            secrets: LEAVES.into(),
            attempt: Some(format!("renewal@{renew_at}")),
        };
        plane.apply(&effect);
        renewals.push(renew_at);
        assert!(renewals.len() < 400, "over and over: {:?}", &renewals[390..]);
    }
    plane.at(end);
    assert_eq!(plane.credentials().due, []);
    renewals
}

#[test]
fn near_the_end_of_a_root_its_leaves_end_with_it_and_are_not_renewed_over_and_over() {
    for (wanted, lives) in [
        (7, &[730][..]),
        (90, &[730, 751, 790]),
        (365, &[730, 743, 761, 851, 1000]),
        (3650, &[730, 3649]),
    ] {
        for life in lives {
            let end = now() + days(*life);
            let renewals = renewals_until_the_end(Some(wanted), end, "d64ea0c0-91f8-46f5-8643-c0cab32ab0cd");
            let last_two_years = renewals.iter().filter(|at| **at >= end - days(730)).count();
            // The earliest is after 17 thirtieths of a life: two thirds less a tenth.
            let most = 730 * 30 / (wanted * 17) + 1;
            assert!(
                i64::try_from(last_two_years).expect("few") <= most,
                "{wanted} days: {last_two_years} renewals in the last two years of {life} days"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whenever a root CA ends: until then some leaf is valid, and each renewal gains something.
    #[test]
    fn leaves_last_until_the_root_ends(
        wanted in 20_i64..3650,
        hours in 24_i64..(3 * 365 * 24),
        seconds in 0_i64..3600,
        uid: u64,
    ) {
        let end = now() + SignedDuration::from_hours(hours) + SignedDuration::from_secs(seconds);
        let renewals = renewals_until_the_end(Some(wanted), end, &uid.to_string());
        // By half of a life each, but for the last one.
        let most = hours / (wanted * 12) + 1;
        prop_assert!(i64::try_from(renewals.len()).expect("few") <= most, "{} of at most {}", renewals.len(), most);
    }
}

#[test]
fn a_leaf_that_ends_with_its_root_is_shortened_all_the_same() {
    let mut plane = lives(Some(3650));
    assert_eq!(
        plane.credentials().status.renew_at,
        None,
        "there is nothing better to give"
    );
    plane.at(now() + days(300));
    assert_eq!(plane.credentials().due, []);
    plane.tenant.pki_expire_days = Some(30);
    assert_eq!(plane.credentials().due, LEAVES.map(|which| (which, Why::Due)));
    plane.settle_well();
    assert_eq!(times(&plane).1, now() + days(330));
}

#[test]
fn a_root_nears_its_end_exactly_a_year_ahead() {
    let mut plane = Plane::running();
    let end = now() + days(3650);
    for (at, nears) in [
        (end - days(365) - SECOND, false),
        (end - days(365), false),
        (end - days(365) + SECOND, true),
        (end, true),
    ] {
        plane.at(at);
        assert_eq!(plane.credentials().root_nears_its_end, nears, "{at}");
    }
}

/// The uid of the n-th tenant: random, and the same each time.
fn uid(n: u32) -> String {
    let hash = vc_manager::api::cluster_version::canonical_hash(&json!(n));
    format!(
        "{}-{}-4{}-a{}-{}",
        &hash[..8],
        &hash[8..12],
        &hash[12..15],
        &hash[15..18],
        &hash[18..30]
    )
}

#[test]
fn tenants_of_the_same_hour_are_not_renewed_in_the_same_hour() {
    const TENANTS: u32 = 1000;
    let life = days(365) + SignedDuration::from_hours(1);
    let latest = |begin: Timestamp| begin + life * 2 / 3;
    let mut times: Vec<_> = (0..TENANTS)
        .map(|n| {
            // Within the hour.
            let made = now() + SignedDuration::from_secs(i64::from(n) * 3);
            let begin = made - SignedDuration::from_hours(1);
            let at = pki::renew_at_spread(begin, made + days(365), &uid(n));
            assert_eq!(
                at,
                pki::renew_at_spread(begin, made + days(365), &uid(n)),
                "asked again"
            );
            assert!(at <= latest(begin), "later than two thirds");
            assert!(at >= latest(begin) - life / 10, "earlier by more than a tenth");
            at
        })
        .collect();
    times.sort();
    let range = times[times.len() - 1].duration_since(times[0]);
    assert!(range >= life / 20, "all within {range:?}");
    // And not in heaps: no day of the 36 has more than three times its share.
    for (first, at) in times.iter().enumerate() {
        let of_the_day = times[first..].partition_point(|other| other.duration_since(*at) < days(1));
        assert!(of_the_day < 90, "{of_the_day} tenants within the day of {at}");
    }
}

#[test]
fn the_spread_is_that_of_the_tenant_and_of_nothing_else() {
    let plane = Plane::running();
    let leaf = plane.leaf(TenantSecret::ApiServer);
    let mut seen = BTreeSet::new();
    for n in 0..20 {
        let mut plane = plane.clone();
        plane.tenant.uid = uid(n);
        let renew_at = times(&plane).0;
        assert_eq!(
            renew_at,
            pki::renew_at_spread(leaf.not_before, leaf.not_after, &uid(n))
        );
        plane.tenant.name = "other".into();
        plane.tenant.namespace = "other".into();
        assert_eq!(times(&plane).0, renew_at);
        seen.insert(renew_at);
    }
    assert!(seen.len() > 15, "{seen:?}");
}

#[test]
fn a_judgement_changes_nothing_and_plans_hold_no_keys() {
    let mut plane = Plane::running();
    let keys = keys_of(&plane);
    plane.observed.secrets.remove("apiserver-ca");
    plane.edit(TenantSecret::AdminKubeconfig, |data| {
        put(data, "admin-kubeconfig", "x");
    });
    plane.set_by_hand(
        vc_manager::controller::render::Kind::Service,
        "apiserver-svc",
        &["spec", "type"],
        Some(&json!("NodePort")),
    );
    let before = plane.observed.secrets.clone();
    let plan = plane.plan();
    assert_eq!(plane.observed.secrets, before);
    assert!(matches!(&plan, Plan::Do(effects) if !effects.is_empty()));
    assert_silent(&keys, &format!("{plan:?}"));
    plane.settle_well();
    assert_silent(&keys, &format!("{:?}", plane.log));
}
