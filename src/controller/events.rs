//! Events on VirtualClusters, and on root namespaces that have none: each step a person would ask about.
//!
//! Publishing never holds up a pass and never fails one: Events go through a bounded queue with one writer, and
//! what does not fit is dropped with a line in the log.

use k8s_controller::events::{Event, EventRecorder, EventType, Reporter};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Client, Resource, ResourceExt as _, api::ObjectMeta};
use tokio::sync::mpsc::{Receiver, Sender, channel, error::TrySendError};

use crate::api::VirtualCluster;

/// Events that wait to be written.
const QUEUE: usize = 512;

/// Hands Events to the writer.
#[derive(Clone, Debug)]
pub(super) struct Events {
    queue: Sender<(About, Event)>,
}

/// Writes Events until the last [`Events`] is gone.
pub(super) struct EventWriter {
    recorder: EventRecorder,
    queue: Receiver<(About, Event)>,
}

/// Which object an Event is about. Only what identifies it is kept alive.
#[derive(Debug)]
enum About {
    Tenant(Box<VirtualCluster>),
    Namespace(Box<Namespace>),
}

impl About {
    fn name(&self) -> String {
        match self {
            Self::Tenant(vc) => vc.name_any(),
            Self::Namespace(namespace) => namespace.name_any(),
        }
    }
}

/// A queue of Events and its writer, on behalf of the replica `instance`, if it has a name.
#[must_use]
pub(super) fn events(client: Client, instance: Option<String>) -> (Events, EventWriter) {
    let (sender, receiver) = channel(QUEUE);
    let reporter = Reporter {
        controller: "tenancy.x-k8s.io/vc-manager".into(),
        instance,
    };
    let recorder = EventRecorder::new(client, reporter);
    (
        Events { queue: sender },
        EventWriter {
            recorder,
            queue: receiver,
        },
    )
}

impl Events {
    /// Something went as it should.
    pub(super) fn normal(&self, vc: &VirtualCluster, reason: &str, action: &str, note: impl Into<String>) {
        self.send(vc, EventType::Normal, reason, action, note.into());
    }

    /// Something a person should look at.
    pub(super) fn warning(&self, vc: &VirtualCluster, reason: &str, action: &str, note: impl Into<String>) {
        self.send(vc, EventType::Warning, reason, action, note.into());
    }

    /// Something about a root namespace that has no VirtualCluster; a person should look at it.
    pub(super) fn of_namespace(&self, name: &str, uid: &str, reason: &str, note: impl Into<String>) {
        let about = Namespace {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                uid: Some(uid.to_owned()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let about = About::Namespace(Box::new(about));
        self.queue(about, EventType::Warning, reason, "CollectOrphans", note.into());
    }

    fn send(&self, vc: &VirtualCluster, type_: EventType, reason: &str, action: &str, note: String) {
        // The writer needs to know which object; its spec and status need not be kept alive.
        let mut about = VirtualCluster::new(&vc.name_any(), crate::api::VirtualClusterSpec::default());
        about.meta_mut().namespace = vc.namespace();
        about.meta_mut().uid = vc.uid();
        about.meta_mut().resource_version = vc.resource_version();
        self.queue(About::Tenant(Box::new(about)), type_, reason, action, note);
    }

    fn queue(&self, about: About, type_: EventType, reason: &str, action: &str, note: String) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            action: action.to_owned(),
            note: Some(note),
            related: None,
        };
        if let Err(TrySendError::Full((about, event))) = self.queue.try_send((about, event)) {
            tracing::warn!(object = %about.name(), reason = %event.reason, "too many Events wait to be written; one is dropped");
        }
    }
}

impl EventWriter {
    /// Writes what is queued.
    pub(super) async fn run(mut self) {
        while let Some((about, event)) = self.queue.recv().await {
            let written = match &about {
                About::Tenant(vc) => self.recorder.publish(&**vc, &event).await,
                About::Namespace(namespace) => self.recorder.publish(&**namespace, &event).await,
            };
            if let Err(error) = written {
                tracing::warn!(object = %about.name(), reason = %event.reason, %error, "cannot write an Event");
            }
        }
    }
}
