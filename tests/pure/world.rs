//! A super cluster in memory: does what a plan says and lets StatefulSets roll out.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Namespace, Pod, Secret, Service},
};
use serde_json::json;
use vc_manager::{
    api::{Component, cluster_version::canonical_hash},
    controller::{
        plan::{Answer, Effect, Observed},
        render::{self, Kind, TenantSecret},
        rollout,
    },
};

use crate::fixture::tenant;

#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    pub(crate) observed: Observed,
    /// Every effect so far.
    pub(crate) log: Vec<Effect>,
    /// How often each Secret was issued.
    pub(crate) issued: BTreeMap<TenantSecret, u32>,
}

impl World {
    pub(crate) fn apply(&mut self, effect: &Effect) {
        self.log.push(effect.clone());
        match effect {
            Effect::CreateNamespace(value) => {
                self.observed.namespace =
                    Some(serde_json::from_value::<Namespace>(value.clone()).expect("a Namespace"));
            }
            Effect::Issue { secrets, attempt } => {
                for which in secrets {
                    *self.issued.entry(*which).or_default() += 1;
                    let text = format!("{which} no. {}", self.issued[which]);
                    let key = if which.is_kubeconfig() {
                        which.name()
                    } else {
                        "tls.crt"
                    };
                    let value = render::secret(
                        *which,
                        &tenant(),
                        &BTreeMap::from([(key, text.as_str())]),
                        attempt.as_deref(),
                    );
                    let secret: Secret = serde_json::from_value(value).expect("a Secret");
                    self.observed.secrets.insert(which.name().into(), secret);
                }
            }
            Effect::Apply(object) | Effect::PutBack { object, .. } if object.kind == Kind::Service => {
                let mut service: Service = serde_json::from_value(object.value.clone()).expect("a Service");
                if let Some(spec) = &mut service.spec {
                    spec.cluster_ip.get_or_insert_with(|| "10.0.0.1".into());
                }
                self.observed.services.insert(object.name.clone(), service);
            }
            Effect::Apply(object) | Effect::PutBack { object, .. } => {
                let mut set: StatefulSet =
                    serde_json::from_value(object.value.clone()).expect("a StatefulSet");
                let old = self.observed.stateful_sets.get(&object.name);
                set.metadata.generation = Some(old.and_then(|old| old.metadata.generation).unwrap_or(0) + 1);
                set.status = old.and_then(|old| old.status.clone());
                self.observed.stateful_sets.insert(object.name.clone(), set);
            }
            Effect::Restart(restart) => {
                let set = self
                    .observed
                    .stateful_sets
                    .remove(&restart.stateful_set)
                    .expect("a StatefulSet");
                let mut value = serde_json::to_value(set).expect("JSON");
                json_patch::merge(&mut value, &restart.patch());
                let mut set: StatefulSet = serde_json::from_value(value).expect("a StatefulSet");
                set.metadata.generation = Some(set.metadata.generation.unwrap_or(0) + 1);
                self.observed
                    .stateful_sets
                    .insert(restart.stateful_set.clone(), set);
            }
            Effect::DeletePod(pod) => self
                .observed
                .pods
                .retain(|known| known.metadata.uid.as_ref() != Some(&pod.uid)),
            Effect::MakeRoom(pod) => self.observed.deaf.retain(|known| known != pod),
        }
        self.answer();
    }

    /// The StatefulSet of `component` rolls out, if it exists.
    pub(crate) fn roll_out(&mut self, component: Component) {
        if let Some(set) = self.observed.stateful_sets.get_mut(component.name()) {
            let spec = set.spec.as_ref().expect("a spec");
            let replicas = spec.replicas.unwrap_or(1);
            let template = serde_json::to_value(&spec.template).expect("JSON");
            let revision = format!("{component}-{}", &canonical_hash(&template)[..10]);
            set.status = serde_json::from_value(json!({
                "observedGeneration": set.metadata.generation, "replicas": replicas, "readyReplicas": replicas,
                "updatedReplicas": replicas, "currentRevision": revision, "updateRevision": revision,
            }))
            .expect("a status");
        }
        self.answer();
    }

    /// A pod of `component` that cannot pull its image, of revision `revision`.
    pub(crate) fn break_pod(&mut self, component: Component, revision: &str) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": format!("{component}-0"), "uid": format!("{component}-{revision}"),
                "labels": {"controller-revision-hash": revision},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": component.name(), "uid": "s", "controller": true}]},
            "status": {"containerStatuses": [{"name": "c", "image": "example.com/none:v0", "imageID": "", "ready": false,
                "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull"}}}]},
        }))
        .expect("a Pod");
        self.observed.pods.push(pod);
    }

    /// The tenant answers once its apiserver has rolled out.
    fn answer(&mut self) {
        let apiserver = self.observed.stateful_sets.get(Component::ApiServer.name());
        self.observed.answer = apiserver
            .filter(|set| rollout::pending(set).is_none())
            .map(|_| Answer::Ready);
    }
}
