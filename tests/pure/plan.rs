//! The plan as tables and properties: from any partial state it reaches the goal and is then empty, its order is
//! never violated, and the same observation gives the same plan.

use proptest::prelude::*;
use serde_json::Value;
use vc_manager::{
    api::{Component, UpgradeStep, template::Template, virtual_cluster::CertificatePolicy},
    controller::{
        plan::{self, Answer, Attempt, Deaf, Effect, Goal, Plan},
        render::{Kind, Tenant, TenantSecret},
        rollout,
    },
};

use crate::{
    fixture::{content, now, template, tenant},
    world::World,
};

/// More passes than there are stages, with waits in between.
const PASSES: usize = 40;

fn goal<'a>(tenant: &'a Tenant, template: &'a Template) -> Goal<'a> {
    Goal {
        tenant,
        template,
        revision: "r1",
        super_cluster_labelling: false,
    }
}

/// Provisions until done; checks the order on the way.
/// An upgrade called `name` that is at `step` and refreshes every leaf.
fn at(step: UpgradeStep, name: &str) -> Attempt<'_> {
    Attempt {
        name,
        step,
        certificates: CertificatePolicy::Always,
        due: &[],
    }
}

fn provision(world: &mut World, template: &Template) {
    let tenant = tenant();
    let goal = goal(&tenant, template);
    for _ in 0..PASSES {
        let plan = plan::provision(&goal, &world.observed, None, true, now());
        assert_eq!(
            plan,
            plan::provision(&goal, &world.observed, None, true, now()),
            "the same observation, the same plan"
        );
        match plan {
            Plan::Do(effects) => {
                assert!(!effects.is_empty(), "a plan to do nothing would be made for ever");
                for effect in &effects {
                    check_order(world, effect);
                    world.apply(effect);
                }
            }
            Plan::Wait(wait) => world.roll_out(wait.component.expect("its turn has come")),
            Plan::Blocked(why) => panic!("blocked: {why}"),
            Plan::Done => {
                for component in Component::ALL
                    .into_iter()
                    .filter(|component| template.bundle(*component).is_some())
                {
                    assert!(rolled_out(world, component), "{component}");
                }
                return;
            }
        }
    }
    panic!("not done after {PASSES} passes: {:?}", world.log);
}

fn rolled_out(world: &World, component: Component) -> bool {
    let set = world.observed.stateful_sets.get(component.name());
    set.is_some_and(|set| rollout::pending(set).is_none())
}

/// What must be there before `effect`.
fn check_order(world: &World, effect: &Effect) {
    let observed = &world.observed;
    match effect {
        Effect::CreateNamespace(_) => {}
        Effect::Issue { .. } => {
            assert!(observed.namespace.is_some());
            assert!(
                observed.services.contains_key("apiserver-svc"),
                "its address goes into the certificate"
            );
        }
        Effect::Apply(object) if object.kind == Kind::StatefulSet => {
            assert!(
                TenantSecret::ALL
                    .iter()
                    .all(|secret| observed.secrets.contains_key(secret.name()))
            );
            if object.component >= Component::ApiServer && observed.stateful_sets.contains_key("etcd") {
                assert!(rolled_out(world, Component::Etcd));
            }
            if object.component == Component::ControllerManager {
                assert!(rolled_out(world, Component::ApiServer));
                assert_eq!(
                    observed.answer,
                    Some(Answer::Ready),
                    "not before the apiserver answers"
                );
            }
        }
        Effect::Apply(_)
        | Effect::PutBack { .. }
        | Effect::Restart(_)
        | Effect::DeletePod(_)
        | Effect::MakeRoom(_) => {}
    }
}

/// Upgrades until done, step by step; returns the effects.
fn upgrade(world: &mut World, template: &Template, attempt: &str) -> Vec<Effect> {
    let tenant = tenant();
    let goal = goal(&tenant, template);
    let from = world.log.len();
    for step in [UpgradeStep::ApiServer, UpgradeStep::ControllerManager] {
        let mut done = false;
        for _ in 0..PASSES {
            match plan::upgrade(&goal, &world.observed, &at(step, attempt), now()) {
                Plan::Do(effects) => effects.iter().for_each(|effect| {
                    check_order(world, effect);
                    world.apply(effect);
                }),
                Plan::Wait(wait) => world.roll_out(wait.component.expect("a component")),
                Plan::Blocked(why) => panic!("blocked: {why}"),
                Plan::Done => {
                    done = true;
                    break;
                }
            }
        }
        assert!(done, "{step:?} is not done after {PASSES} passes");
    }
    world.log[from..].to_vec()
}

/// The fixture with another image, and one more change.
fn edited(change: impl FnOnce(&mut Value)) -> Template {
    let mut content = content();
    change(&mut content);
    Template::parse(&content).expect("a template")
}

fn newer() -> Template {
    edited(|content| {
        for pointer in ["apiServer", "controllerManager"] {
            content[pointer]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["image"] =
                "example.com/new:v1.35.4".into();
        }
        // A new etcd is in the revision as well: an upgrade must not care.
        content["etcd"]["statefulset"]["spec"]["template"]["spec"]["containers"][0]["image"] =
            "example.com/etcd:9".into();
        content["etcd"]["service"]["metadata"]["labels"] = serde_json::json!({"new": "label"});
    })
}

#[test]
fn from_nothing_in_the_order_of_the_contract() {
    let mut world = World::default();
    provision(&mut world, &template());
    let names: Vec<_> = world.log.iter().map(name).collect();
    assert_eq!(
        names,
        [
            "namespace",
            "Service apiserver-svc",
            "issue root-ca apiserver-ca etcd-ca front-proxy-ca controller-manager-kubeconfig admin-kubeconfig serviceaccount-rsa",
            "StatefulSet etcd",
            "Service etcd",
            "StatefulSet apiserver",
            "StatefulSet controller-manager",
        ]
    );
}

#[test]
fn a_node_port_service_goes_after_its_stateful_set() {
    let template = edited(|content| content["apiServer"]["service"]["spec"]["type"] = "NodePort".into());
    let mut world = World::default();
    let tenant = tenant();
    for _ in 0..PASSES {
        match plan::provision(&goal(&tenant, &template), &world.observed, None, true, now()) {
            Plan::Do(effects) => effects.iter().for_each(|effect| world.apply(effect)),
            Plan::Wait(wait) => world.roll_out(wait.component.expect("a component")),
            _ => break,
        }
    }
    let names: Vec<_> = world.log.iter().map(name).collect();
    assert_eq!(names[0], "namespace");
    assert!(names[1].starts_with("issue"));
    assert_eq!(
        names[2..6],
        [
            "StatefulSet etcd",
            "Service etcd",
            "StatefulSet apiserver",
            "Service apiserver-svc"
        ]
    );
}

#[test]
fn only_pods_wait_for_their_turn() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    while let Plan::Do(effects) = plan::provision(&goal, &world.observed, None, false, now()) {
        effects.iter().for_each(|effect| world.apply(effect));
    }
    assert!(world.observed.stateful_sets.is_empty());
    assert_eq!(world.observed.secrets.len(), 7);
    let Plan::Wait(wait) = plan::provision(&goal, &world.observed, None, false, now()) else {
        panic!("it waits")
    };
    assert_eq!(wait.component, None);
}

#[test]
fn an_upgrade_refreshes_leaves_and_touches_neither_etcd_nor_the_roots() {
    let mut world = World::default();
    provision(&mut world, &template());
    let etcd = (
        world.observed.stateful_sets["etcd"].clone(),
        world.observed.services["etcd"].clone(),
    );
    let names: Vec<_> = upgrade(&mut world, &newer(), "r2@t").iter().map(name).collect();
    assert_eq!(
        names,
        [
            "issue apiserver-ca front-proxy-ca controller-manager-kubeconfig admin-kubeconfig",
            "StatefulSet apiserver",
            "StatefulSet controller-manager",
        ]
    );
    assert_eq!(
        etcd,
        (
            world.observed.stateful_sets["etcd"].clone(),
            world.observed.services["etcd"].clone()
        )
    );
}

#[test]
fn an_edit_of_a_service_writes_the_service() {
    let mut world = World::default();
    provision(&mut world, &template());
    let service = edited(|content| {
        content["apiServer"]["service"]["metadata"]["labels"] = serde_json::json!({"new": "label"});
    });
    let names: Vec<_> = upgrade(&mut world, &service, "r2@t").iter().map(name).collect();
    assert_eq!(names[0], "Service apiserver-svc");
}

#[test]
fn without_a_controller_manager() {
    let without = edited(|content| {
        content
            .as_object_mut()
            .expect("an object")
            .remove("controllerManager");
    });
    let mut world = World::default();
    provision(&mut world, &without);
    assert!(!world.observed.stateful_sets.contains_key("controller-manager"));
    let names: Vec<_> = upgrade(&mut world, &without, "r2@t").iter().map(name).collect();
    assert_eq!(names.len(), 2);
}

#[test]
fn lost_roots_are_not_made_anew() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut whole = World::default();
    provision(&mut whole, &template);
    for lost in [TenantSecret::RootCa, TenantSecret::ServiceAccount] {
        let mut world = whole.clone();
        world.observed.secrets.remove(lost.name());
        for plan in [
            plan::provision(&goal, &world.observed, None, true, now()),
            plan::upgrade(&goal, &world.observed, &at(UpgradeStep::ApiServer, "r2@t"), now()),
            plan::preflight(&goal, &world.observed, false, now()),
        ] {
            let Plan::Blocked(why) = plan else {
                panic!("{lost} is lost, yet {plan:?}")
            };
            assert!(why.contains(lost.name()), "{why}");
        }
    }
}

#[test]
fn another_ones_namespace_is_left_alone() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    provision(&mut world, &template);
    let annotations = world
        .observed
        .namespace
        .as_mut()
        .and_then(|namespace| namespace.metadata.annotations.as_mut());
    annotations
        .expect("annotations")
        .insert("tenancy.x-k8s.io/vcuid".into(), "another".into());
    for plan in [
        plan::provision(&goal, &world.observed, None, true, now()),
        plan::upgrade(&goal, &world.observed, &at(UpgradeStep::ApiServer, "r2@t"), now()),
        plan::preflight(&goal, &world.observed, false, now()),
    ] {
        assert!(matches!(plan, Plan::Blocked(_)), "{plan:?}");
    }
}

#[test]
fn preflight_wants_a_healthy_tenant_unless_the_last_upgrade_broke_it() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut whole = World::default();
    provision(&mut whole, &template);
    assert_eq!(plan::preflight(&goal, &whole.observed, false, now()), Plan::Done);

    for component in Component::ALL {
        let mut world = whole.clone();
        let set = world
            .observed
            .stateful_sets
            .get_mut(component.name())
            .expect("provisioned");
        set.status.as_mut().expect("a status").ready_replicas = Some(0);
        assert!(
            matches!(
                plan::preflight(&goal, &world.observed, false, now()),
                Plan::Wait(_)
            ),
            "{component}"
        );
        let repairs = plan::preflight(&goal, &world.observed, true, now());
        // Nothing is upgraded over an etcd that is not healthy.
        assert_eq!(
            matches!(repairs, Plan::Wait(_)),
            component == Component::Etcd,
            "{component}: {repairs:?}"
        );
    }

    let mut world = whole.clone();
    world.observed.answer = Some(Answer::NotReady("no".into()));
    assert!(matches!(
        plan::preflight(&goal, &world.observed, false, now()),
        Plan::Wait(_)
    ));
}

#[test]
fn the_gate_asks_the_tenant() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    provision(&mut world, &template);
    upgrade(&mut world, &template, "r2@t");
    world.observed.answer = Some(Answer::NotReady("401".into()));
    for step in [UpgradeStep::ApiServer, UpgradeStep::ControllerManager] {
        let Plan::Wait(wait) = plan::upgrade(&goal, &world.observed, &at(step, "r2@t"), now()) else {
            panic!("it waits")
        };
        assert!(wait.message.contains("401") && !wait.watched);
    }
    world.observed.answer = Some(Answer::NotAsked);
    assert_eq!(
        plan::upgrade(&goal, &world.observed, &at(UpgradeStep::ApiServer, "r2@t"), now()),
        Plan::Done
    );
}

#[test]
fn no_success_while_the_apiserver_is_down_again() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    provision(&mut world, &template);
    upgrade(&mut world, &template, "r2@t");
    let set = world
        .observed
        .stateful_sets
        .get_mut("apiserver")
        .expect("provisioned");
    set.status.as_mut().expect("a status").ready_replicas = Some(0);
    world.observed.answer = None;
    let plan = plan::upgrade(
        &goal,
        &world.observed,
        &at(UpgradeStep::ControllerManager, "r2@t"),
        now(),
    );
    assert!(
        matches!(&plan, Plan::Wait(wait) if wait.component == Some(Component::ApiServer)),
        "{plan:?}"
    );
}

#[test]
fn before_it_ever_ran_a_tenant_gets_leaves_for_the_revision_it_agreed_to() {
    let (tenant, template) = (tenant(), template());
    let mut world = World::default();
    provision(&mut world, &template);
    let other = Goal {
        revision: "r2",
        ..goal(&tenant, &template)
    };
    let Plan::Do(effects) = plan::provision(&other, &world.observed, None, true, now()) else {
        panic!("it issues")
    };
    let leaves = "issue apiserver-ca etcd-ca front-proxy-ca controller-manager-kubeconfig admin-kubeconfig";
    assert_eq!(effects.iter().map(name).collect::<Vec<_>>(), [leaves]);
}

#[test]
fn a_stuck_pod_of_an_older_revision_is_removed_and_one_of_the_newest_is_not() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    provision(&mut world, &template);
    upgrade(&mut world, &template, "r2@t");
    let newest = world.observed.stateful_sets["apiserver"]
        .status
        .as_ref()
        .and_then(|status| status.update_revision.clone());

    let mut of_newest = world.clone();
    of_newest.break_pod(Component::ApiServer, &newest.expect("rolled out"));
    let plan = plan::upgrade(
        &goal,
        &of_newest.observed,
        &at(UpgradeStep::ApiServer, "r2@t"),
        now(),
    );
    assert!(!matches!(plan, Plan::Do(_)), "{plan:?}");

    world.break_pod(Component::ApiServer, "apiserver-older");
    let Plan::Do(effects) = plan::upgrade(&goal, &world.observed, &at(UpgradeStep::ApiServer, "r2@t"), now())
    else {
        panic!("it acts")
    };
    assert!(matches!(&effects[..], [Effect::DeletePod(pod)] if pod.uid == "apiserver-apiserver-older"));
}

#[test]
fn room_is_made_for_the_successor_of_a_deaf_apiserver() {
    let (tenant, template) = (tenant(), template());
    let goal = goal(&tenant, &template);
    let mut world = World::default();
    provision(&mut world, &template);
    upgrade(&mut world, &template, "r2@t");
    world.observed.deaf = vec![Deaf {
        pod: "apiserver-0".into(),
        uid: "u".into(),
    }];
    let act =
        |world: &World| plan::upgrade(&goal, &world.observed, &at(UpgradeStep::ApiServer, "r2@t"), now());
    assert_eq!(
        act(&world),
        Plan::Do(vec![Effect::MakeRoom(world.observed.deaf[0].clone())])
    );

    let set = world
        .observed
        .stateful_sets
        .get_mut("apiserver")
        .and_then(|set| set.spec.as_mut())
        .expect("a spec");
    set.volume_claim_templates = Some(vec![k8s_openapi::api::core::v1::PersistentVolumeClaim::default()]);
    assert_eq!(act(&world), Plan::Done, "two pods cannot mount its volume");
}

/// Short name of an effect.
fn name(effect: &Effect) -> String {
    match effect {
        Effect::CreateNamespace(_) => "namespace".into(),
        Effect::Issue { secrets, .. } => {
            let names: Vec<_> = secrets.iter().map(|secret| secret.name()).collect();
            format!("issue {}", names.join(" "))
        }
        Effect::Apply(object) => format!("{:?} {}", object.kind, object.name),
        Effect::DeletePod(pod) => format!("delete pod {}", pod.pod),
        Effect::MakeRoom(pod) => format!("make room for {}", pod.pod),
        Effect::PutBack { object, .. } => format!("put back {:?} {}", object.kind, object.name),
        Effect::Restart(restart) => format!("restart {}", restart.component),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Objects are missing in any combination that a crash or a hand can leave behind.
    #[test]
    fn provisioning_reaches_the_goal_from_any_partial_state(
        namespace: bool,
        lost in proptest::collection::vec(any::<bool>(), 14),
        rolled in proptest::collection::vec(any::<bool>(), 3),
    ) {
        let template = template();
        let mut world = World::default();
        provision(&mut world, &template);
        let mut lost = lost.into_iter();
        let observed = &mut world.observed;
        if !namespace {
            *observed = plan::Observed::default();
        }
        observed.stateful_sets.retain(|_, _| !lost.next().unwrap_or_default());
        observed.services.retain(|_, _| !lost.next().unwrap_or_default());
        let started = !observed.stateful_sets.is_empty();
        observed.secrets.retain(|name, _| {
            let root = name == "root-ca" || name == "serviceaccount-rsa";
            !lost.next().unwrap_or_default() || (root && started)
        });
        if !observed.secrets.contains_key("root-ca") {
            // Without it nothing can have been issued.
            observed.secrets.clear();
        }
        for (set, rolled) in observed.stateful_sets.values_mut().zip(rolled) {
            if !rolled {
                set.status = None;
            }
        }
        let before = world.issued.clone();
        let there: Vec<_> = world.observed.secrets.keys().cloned().collect();
        provision(&mut world, &template);
        // What was there is not made a second time.
        for secret in TenantSecret::ALL.into_iter().filter(|secret| there.contains(&secret.name().to_owned())) {
            prop_assert_eq!(before.get(&secret), world.issued.get(&secret));
        }
        // And then there is nothing to do.
        let tenant = tenant();
        prop_assert_eq!(plan::provision(&goal(&tenant, &template), &world.observed, None, true, now()), Plan::Done);
    }

    /// A crash after any number of effects of an upgrade: it is taken up where it was, no leaf is made twice.
    #[test]
    fn an_upgrade_resumes_after_a_crash_anywhere(crash_after in 0usize..12) {
        let (old, new, tenant) = (template(), newer(), tenant());
        let goal = goal(&tenant, &new);
        let mut world = World::default();
        provision(&mut world, &old);
        let mut left = crash_after;
        'crashed: for step in [UpgradeStep::ApiServer, UpgradeStep::ControllerManager] {
            loop {
                match plan::upgrade(&goal, &world.observed, &at(step, "r2@t"), now()) {
                    Plan::Do(effects) => for effect in &effects {
                        // Secrets are written one by one.
                        let parts: Vec<_> = match effect {
                            Effect::Issue { secrets, attempt } => secrets
                                .iter()
                                .map(|secret| Effect::Issue { secrets: vec![*secret], attempt: attempt.clone() })
                                .collect(),
                            other => vec![other.clone()],
                        };
                        for part in parts {
                            if left == 0 { break 'crashed; }
                            left -= 1;
                            world.apply(&part);
                        }
                    },
                    Plan::Wait(wait) => world.roll_out(wait.component.expect("a component")),
                    Plan::Blocked(why) => panic!("blocked: {why}"),
                    Plan::Done => break,
                }
            }
        }
        upgrade(&mut world, &new, "r2@t");
        for secret in TenantSecret::ALL {
            let times = if TenantSecret::REFRESHED.contains(&secret) { 2 } else { 1 };
            prop_assert_eq!(world.issued.get(&secret).copied(), Some(times), "{}", secret);
        }
        prop_assert!(upgrade(&mut world, &new, "r2@t").is_empty(), "and then there is nothing to do");
    }
}
