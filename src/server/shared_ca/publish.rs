//! The bundle in the webhook configurations.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::pki::CertificateInfo;
use crate::server::configurations::{Configuration, Webhook};

/// Certificates as one text.
pub(super) fn bundle(trusted: &[CertificateInfo]) -> String {
    trusted.iter().map(CertificateInfo::pem).collect()
}

/// What to apply so that every webhook of `configuration` trusts exactly `trusted`; `None` if it does, or if another one
/// sees to it.
///
/// All of them are named, also those that are right already: what an apply leaves out it gives up. The version is the
/// guard: a bundle newer than `trusted` cannot be there unless the configuration has changed since it was read.
pub(super) fn patch(configuration: &Configuration, trusted: &[CertificateInfo]) -> Option<Value> {
    let Configuration {
        kind,
        resource_version,
        injected,
        webhooks,
    } = configuration;
    // Two who write the same field would go on for ever.
    if *injected || webhooks.iter().all(|webhook| webhook.trusted == trusted) {
        return None;
    }
    let bundle = STANDARD.encode(bundle(trusted));
    let webhooks: Vec<Value> = webhooks
        .iter()
        .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": bundle}}))
        .collect();
    Some(json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind.kind(),
        "metadata": {"name": kind.name(), "resourceVersion": resource_version},
        "webhooks": webhooks,
    }))
}

/// Whether each webhook of each configuration trusts `ca`. Where there are none, nobody is in the way.
pub(super) fn is_everywhere(ca: &[u8], configurations: &[Configuration]) -> bool {
    webhooks(configurations).all(|webhook| webhook.trusted.iter().any(|trusted| trusted.der() == ca))
}

/// The CAs that are trusted somewhere.
pub(super) fn published(configurations: &[Configuration]) -> Vec<CertificateInfo> {
    let mut all: Vec<CertificateInfo> = Vec::new();
    for ca in webhooks(configurations).flat_map(|webhook| &webhook.trusted) {
        if !all.contains(ca) {
            all.push(ca.clone());
        }
    }
    all
}

fn webhooks(configurations: &[Configuration]) -> impl Iterator<Item = &Webhook> {
    configurations
        .iter()
        .flat_map(|configuration| &configuration.webhooks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::testing::self_signed;
    use crate::server::configurations::Kind;

    fn ca() -> CertificateInfo {
        CertificateInfo::parse(&self_signed(|_| {}).0).unwrap()
    }

    fn webhook(name: &str, trusted: &[&CertificateInfo]) -> Webhook {
        Webhook {
            name: name.into(),
            host: None,
            trusted: trusted.iter().copied().cloned().collect(),
        }
    }

    fn configuration(webhooks: Vec<Webhook>) -> Configuration {
        Configuration {
            kind: Kind::Validating,
            resource_version: "7".into(),
            injected: false,
            webhooks,
        }
    }

    #[test]
    fn all_or_nothing_is_applied() {
        let (one, two) = (ca(), ca());
        let right = configuration(vec![webhook("a", &[&two, &one]), webhook("b", &[&two, &one])]);
        let trusted = [two.clone(), one.clone()];
        assert_eq!(patch(&right, &trusted), None);
        assert_eq!(patch(&configuration(vec![]), &trusted), None);
        let half = configuration(vec![webhook("a", &[&two, &one]), webhook("b", &[&one])]);
        let of_cert_manager = Configuration {
            injected: true,
            ..half.clone()
        };
        assert_eq!(patch(&of_cert_manager, &trusted), None);
        let bundle = STANDARD.encode(two.pem() + &one.pem());
        let expected = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "virtualcluster-validating-webhook-configuration", "resourceVersion": "7"},
            "webhooks": [
                {"name": "a", "clientConfig": {"caBundle": bundle}},
                {"name": "b", "clientConfig": {"caBundle": bundle}},
            ],
        });
        assert_eq!(patch(&half, &trusted), Some(expected));
    }

    #[test]
    fn everywhere_means_every_webhook() {
        let (one, two) = (ca(), ca());
        let half = [
            configuration(vec![webhook("a", &[&two, &one])]),
            configuration(vec![webhook("b", &[&one])]),
        ];
        assert!(is_everywhere(one.der(), &half) && !is_everywhere(two.der(), &half));
        assert!(is_everywhere(two.der(), &[]));
        assert_eq!(published(&half), [two, one]);
    }
}
