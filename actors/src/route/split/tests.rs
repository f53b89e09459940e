use std::time::Duration;

use starling_ids::{Incarnation, NodeId, RequestId, WorkerId};

use super::*;
use crate::route::{
    desk::{Ask, Desk},
    fleet::{Heard, Places},
    policy::{PolicyConfig, PolicyName},
};

fn worker(index: u16) -> WorkerId {
    WorkerId { node: NodeId::new("n").expect("name"), index }
}

fn desk(roles: &[Role]) -> Desk {
    desk_of(PolicyName::Starling, roles)
}

fn desk_of(policy: PolicyName, roles: &[Role]) -> Desk {
    let policy = PolicyConfig::named(policy).build().expect("composes");
    let mut desk = Desk::new(policy, 1);
    for (index, role) in (0..).zip(roles) {
        let places = Places { sequences: 16, waiting: 64, step_tokens: 512, blocks: 1_000, role: *role };
        desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        hear(&mut desk, index, 0);
    }
    desk
}

fn hear(desk: &mut Desk, index: u16, prefill_tokens: u64) {
    let link = KvLink { block_bytes: 368_640, bytes_per_ms: 2e6 };
    let heard = Heard { prefill_tokens, link, ..Heard::default() };
    desk.hear(&worker(index), Incarnation(1), heard);
}

fn ask(prompt_tokens: u32) -> Ask<'static> {
    Ask { request: RequestId(1), prompt_tokens, block_tokens: 16, answer_tokens_max: 100, ..Ask::default() }
}

#[test]
fn a_long_prompt_is_computed_by_the_prefill_worker_and_answered_by_the_other() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    let decision = desk.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody");
    assert_eq!(decision.worker, worker(1));
    let source = decision.source.expect("split");
    assert_eq!((source.worker, source.compute, source.blocks), (worker(0), true, 93));
    assert_eq!(desk.reservations(), 2, "the prompt counts where it is computed");
    desk.prefilled(decision.ticket);
    assert_eq!(desk.reservations(), 1);
    desk.release(decision.ticket);
    assert_eq!(desk.reservations(), 0);
    assert_eq!(desk.fleet().requests, [0, 0]);
}

#[test]
fn short_and_mostly_cached_prompts_stay_where_they_are_answered() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    assert_eq!(desk.decide(&ask(100), &[], Duration::ZERO).expect("somebody").source, None);
    let decision = desk.decide(&ask(1_500), &[(1, 80)], Duration::ZERO).expect("somebody");
    assert_eq!((decision.worker, decision.source), (worker(1), None));
    let mut several = ask(1_500);
    several.choices = 2;
    assert_eq!(desk.decide(&several, &[], Duration::ZERO).expect("somebody").source, None);
}

#[test]
fn a_prefill_worker_that_is_far_behind_is_not_waited_for() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    hear(&mut desk, 0, 40_000);
    let decision = desk.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody");
    assert_eq!((decision.worker, decision.source), (worker(1), None));
}

#[test]
fn nothing_is_split_among_equals_and_a_prefill_worker_alone_serves_whole_requests() {
    let mut equals = desk(&[Role::Both, Role::Both]);
    assert_eq!(equals.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody").source, None);
    let mut alone = desk(&[Role::Prefill]);
    let decision = alone.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody");
    assert_eq!((decision.worker, decision.source), (worker(0), None));
}

#[test]
fn a_worker_that_failed_the_request_is_no_source() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    let failed = [worker(0)];
    let decision = desk.decide(&Ask { exclude: &failed, failed: &failed, ..ask(1_500) }, &[], Duration::ZERO);
    assert_eq!(decision.expect("somebody").source, None);
}

#[test]
fn a_prefix_is_pulled_from_a_peer_when_that_is_faster() {
    let mut desk = desk(&[Role::Decode, Role::Decode]);
    // The one that has it is far behind.
    hear(&mut desk, 0, 40_000);
    let decision = desk.decide(&ask(1_500), &[(0, 93)], Duration::ZERO).expect("somebody");
    assert_eq!(decision.worker, worker(1));
    let source = decision.source.expect("pulled");
    assert_eq!((source.worker, source.compute, source.blocks), (worker(0), false, 93));
    assert_eq!(desk.reservations(), 1);
}

#[test]
fn a_worker_with_time_answers_with_the_cached_blocks_of_one_that_is_behind() {
    let mut desk = desk(&[Role::Both, Role::Both]);
    // Computing 1,500 tokens elsewhere costs more than its queue, pulling them does not.
    hear(&mut desk, 0, 1_000);
    let hits = [(0, 93)];
    let alone = desk.decide(&Ask { choices: 2, ..ask(1_500) }, &hits, Duration::ZERO).expect("somebody");
    assert_eq!((alone.worker, alone.source), (worker(0), None), "the policy by itself");
    desk.release(alone.ticket);
    let decision = desk.decide(&ask(1_500), &hits, Duration::ZERO).expect("somebody");
    assert_eq!(decision.worker, worker(1));
    let source = decision.source.expect("pulled");
    assert_eq!((source.worker, source.compute, source.blocks), (worker(0), false, 93));
    desk.release(decision.ticket);
    // One that failed the request answers no more, and gives no blocks.
    for failed in [[worker(0)], [worker(1)]] {
        let decision = desk.decide(&Ask { exclude: &failed, failed: &failed, ..ask(1_500) }, &hits, Duration::ZERO);
        let decision = decision.expect("somebody");
        assert_eq!(decision.source, None);
        desk.release(decision.ticket);
    }
}

#[test]
fn a_worker_that_has_the_prompt_and_time_keeps_it() {
    let mut desk = desk(&[Role::Both, Role::Both]);
    let decision = desk.decide(&ask(1_500), &[(0, 93)], Duration::ZERO).expect("somebody");
    assert_eq!((decision.worker, decision.source), (worker(0), None));
}

#[test]
fn a_policy_that_does_not_go_by_time_keeps_its_choice() {
    let mut desk = desk_of(PolicyName::Session, &[Role::Both, Role::Both]);
    let session = Ask { session: Some("a"), ..ask(1_500) };
    let first = desk.decide(&session, &[], Duration::ZERO).expect("somebody");
    let (with, other) = if first.worker == worker(0) { (0, 1) } else { (1, 0) };
    // Blocks are pulled to it, and it stays.
    let again = desk.decide(&session, &[(other, 93)], Duration::ZERO).expect("somebody");
    assert_eq!((again.worker, again.source.expect("pulled").worker), (worker(with), worker(other as u16)));
}

#[test]
fn roles_are_words() {
    for role in [Role::Both, Role::Prefill, Role::Decode] {
        assert_eq!(role.to_string().parse(), Ok(role));
    }
    assert!("worker".parse::<Role>().is_err());
}

#[test]
fn cnt_03_a_prompt_is_computed_for_nobody_when_its_worker_is_gone() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    let decision = desk.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody");
    assert_eq!(desk.reservations(), 2);
    desk.vacate(&worker(1));
    assert_eq!((desk.reservations(), desk.fleet().requests[0]), (0, 0));
    assert!(!desk.release(decision.ticket));
}

#[test]
fn a_tainted_worker_computes_prompts_for_those_that_bear_it() {
    let mut desk = desk(&[Role::Prefill, Role::Decode]);
    let batch = std::iter::once(("taint.batch".to_owned(), "yes".to_owned())).collect();
    desk.set_labels(&worker(0), &std::sync::Arc::new(batch));
    let decision = desk.decide(&ask(1_500), &[], Duration::ZERO).expect("somebody");
    assert_eq!((decision.worker, decision.source), (worker(1), None));
    let wishes = crate::route::wishes::Wishes { tolerate: vec!["batch".to_owned()], ..Default::default() };
    let bears = Ask { wishes: Some(&wishes), ..ask(1_500) };
    let source = desk.decide(&bears, &[], Duration::ZERO).expect("somebody").source;
    assert_eq!(source.map(|source| source.worker), Some(worker(0)));
}

#[test]
fn a_running_request_of_a_slow_worker_is_named_once_and_its_receipt_says_why() {
    let mut desk = desk(&[Role::Both, Role::Prefill]);
    let decide = |desk: &mut Desk| desk.decide(&ask(100), &[], Duration::ZERO).expect("somebody");
    let decisions = [decide(&mut desk), decide(&mut desk), decide(&mut desk)];
    assert!(decisions.iter().all(|decision| decision.worker == worker(0)), "the other one answers nothing yet");
    // The last one has not said anything: it cannot leave.
    for decision in &decisions[..2] {
        desk.prefilled(decision.ticket);
    }
    let places = Places { sequences: 16, waiting: 64, step_tokens: 512, blocks: 1_000, role: Role::Both };
    desk.seat(&worker(1), Incarnation(1), places, Standing::Sound);
    let link = KvLink { block_bytes: 368_640, bytes_per_ms: 2e6 };
    for (index, running) in [(0, 12), (1, 0)] {
        desk.hear(&worker(index), Incarnation(1), Heard { running, link, ..Heard::default() });
    }
    let mut named = Vec::new();
    for tick in 0..100u64 {
        named.extend(desk.rebalance(Duration::from_millis(tick * 100)).map(|(ticket, shift)| (tick, ticket, shift)));
    }
    let tickets: Vec<_> = named.iter().map(|(_, ticket, _)| *ticket).collect();
    assert_eq!(tickets, [decisions[1].ticket, decisions[0].ticket], "the youngest first, each of them once");
    assert!(named[0].0 >= 30, "{named:?}");
    let shifted = desk.receipt(decisions[0].ticket).and_then(|receipt| receipt.shifted).expect("written down");
    assert_eq!(shifted.0, worker(1));
    assert!(shifted.1 > 2.0 * shifted.2, "{shifted:?}");
}
