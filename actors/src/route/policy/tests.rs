//! Every preset on small fleets, and the traits on their own.

use std::{sync::Arc, time::Duration};

use starling_ids::{BlockHash, Incarnation, NodeId, RequestId, WorkerId};

use super::*;
use crate::route::{
    desk::{Decision, Desk},
    fleet::{Heard, Places, Standing},
    rates::Rates,
    receipt::Outcome,
    wishes::{Labels, Wishes},
};

mod quick;

fn worker(index: usize) -> WorkerId {
    WorkerId { node: NodeId::new(&format!("n{index}")).expect("name"), index: 0 }
}

fn hashes(kind: u128, count: u128) -> Vec<BlockHash> {
    (0..count).map(|at| BlockHash((kind << 64) + at + 1)).collect()
}

struct Bench {
    desk: Desk,
    now: Duration,
    request: u128,
}

impl Bench {
    fn new(name: PolicyName, workers: usize) -> Self {
        Self::of(PolicyConfig::named(name).build().expect("a policy"), workers)
    }

    fn of(policy: Policy, workers: usize) -> Self {
        let mut desk = Desk::new(policy, 7);
        let places = Places { sequences: 8, waiting: 64, step_tokens: 512, blocks: 4_096, ..Places::default() };
        for index in 0..workers {
            desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        }
        Self { desk, now: Duration::from_secs(1), request: 0 }
    }

    /// Each worker has room for all of a test's sequences; how fast they are.
    fn large_machines(&mut self) -> Rates {
        let places = Places { sequences: 256, waiting: 64, step_tokens: 8_192, blocks: 65_536, ..Places::default() };
        for index in 0..self.desk.fleet().len() {
            self.desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        }
        Rates { prefill_ms_per_token: 0.0155, decode_ms_per_sequence: 0.1, step_ms: 6.0 }
    }

    fn decide(&mut self, hashes: &[BlockHash], hits: &[(usize, u32)], session: Option<&str>) -> Decision {
        self.request += 1;
        self.now += Duration::from_millis(1);
        let ask = Ask {
            request: RequestId(self.request),
            prompt_tokens: 16 * hashes.len() as u32,
            block_tokens: 16,
            hashes,
            answer_tokens_max: 64,
            session,
            ..Ask::default()
        };
        let slots: Vec<_> = hits
            .iter()
            .map(|(index, depth)| (self.desk.fleet().slot(&worker(*index)).expect("seated"), *depth))
            .collect();
        self.desk.decide(&ask, &slots, self.now).expect("somebody")
    }

    fn counts(&mut self, asks: usize, of: impl Fn(usize) -> Vec<BlockHash>) -> Vec<u32> {
        let mut counts = vec![0; self.desk.fleet().len()];
        for at in 0..asks {
            let decision = self.decide(&of(at), &[], None);
            let index = (0..counts.len()).find(|index| worker(*index) == decision.worker).expect("known");
            counts[index] += 1;
        }
        counts
    }
}

#[test]
fn every_name_builds_and_reads_back() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse::<PolicyName>(), Ok(name));
        let mut bench = Bench::new(name, 3);
        bench.decide(&hashes(1, 4), &[], None);
        assert_eq!(bench.desk.explain(RequestId(1))[0].policy, name.as_str());
    }
    let error = "nope".parse::<PolicyName>().expect_err("unknown").to_string();
    assert!(error.contains("nope") && error.contains("round-robin"), "{error}");
}

fn read(text: &str) -> Result<PolicyConfig, String> {
    toml::from_str(text).map_err(|error| error.to_string())
}

#[test]
fn a_policy_is_composed_from_a_file_and_nonsense_is_named() {
    let both = "scorers = [{ name = 'ms', harm = 0 }, { name = 'load', weight = 2.5 }, 'kv']\npicker = 'lowest'";
    let config = read(both).expect("reads");
    let policy = config.build().expect("a policy");
    let named: Vec<_> = policy.scorers.iter().map(|(weight, scorer)| (*weight, scorer.name())).collect();
    assert_eq!(named, [(1.0, "ms"), (2.5, "load"), (1.0, "kv")]);
    assert_eq!(policy.name, "composed");
    let filtered = read("name = 'dynamo'\nfilters = ['topology']").expect("reads").build().expect("a policy");
    assert_eq!((filtered.name, filtered.filters.len()), ("dynamo", 7));
    for (text, key, right) in [
        ("scorers = [{ name = 'luck' }]", "policy.scorers[0].name", "prefix-hash"),
        ("scorers = ['ms', { name = 'laod' }]", "policy.scorers[1].name", "did you mean load?"),
        ("scorers = [{ name = 'ms', weight = 0.0 }]", "policy.scorers[0].weight", "not 0"),
        ("scorers = [{ name = 'ms', weight = 'much' }]", "policy.scorers[0].weight", "finite number"),
        ("scorers = [{ name = 'ms', ham = 1 }]", "policy.scorers[0].ham", "did you mean harm?"),
        ("scorers = [{ weight = 1 }]", "policy.scorers[0].name", "missing"),
        ("scorers = 'ms'", "policy.scorers", "must be a list"),
        ("picker = 'best'", "policy.picker.name", "two-draws"),
        ("picker = { name = 'softmin', temperature = -1 }", "policy.picker.temperature", "from 0 to 100"),
        ("picker = { name = 'lowest', temperature = 1 }", "policy.picker.temperature", "no settings"),
        ("filters = [{ name = 'labels' }]", "policy.filters[0].need", "missing"),
        ("filters = [{ name = 'labels', need = 'a b' }]", "policy.filters[0].need", "KEY=VALUE"),
        ("naem = 'dynamo'", "policy.naem", "did you mean name?"),
        ("name = 'dinamo'", "policy.name", "did you mean dynamo?"),
    ] {
        let error = read(text).and_then(|config| config.build().map_err(|error| error.to_string())).expect_err(text);
        assert!(error.contains(key) && error.contains(right), "{text}: {error}");
    }
}

#[test]
fn a_program_brings_its_own_parts_by_name() {
    #[derive(Debug)]
    struct Late(f64);
    impl Scorer for Late {
        fn name(&self) -> &'static str {
            "late"
        }
        fn cost(&self, _question: &Question<'_>, slot: Slot) -> f64 {
            self.0 * (3.0 - slot as f64)
        }
    }
    let config = read("scorers = [{ name = 'late', by = 2.0 }]").expect("reads");
    assert!(config.build().expect_err("not known yet").to_string().contains("late"));
    let config = config.with_scorer("late", |params| Ok(Late(params.number("by", 0.0..=9.0, 1.0)?)));
    let mut bench = Bench::of(config.build().expect("a policy"), 3);
    assert_eq!(bench.decide(&hashes(1, 4), &[], None).worker, worker(2));
    let receipt = &bench.desk.explain(RequestId(1))[0];
    assert_eq!((receipt.policy.as_str(), receipt.candidates[0].terms[0].1), ("composed", 2.0));
}

fn label(bench: &mut Bench, index: usize, pairs: &[(&str, &str)]) {
    let labels: Labels = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    bench.desk.set_labels(&worker(index), &Arc::new(labels));
}

/// Workers that get something of 40 requests with these wishes.
fn reached(bench: &mut Bench, wishes: &Wishes, origin: Option<&Labels>) -> Vec<usize> {
    let mut seen = std::collections::BTreeSet::new();
    for at in 0..40 {
        let ask = Ask { request: RequestId(at), prompt_tokens: 16, wishes: Some(wishes), origin, ..Ask::default() };
        let decision = bench.desk.decide(&ask, &[], bench.now);
        seen.extend(decision.and_then(|decision| (0..9).find(|index| worker(*index) == decision.worker)));
    }
    seen.into_iter().collect()
}

#[test]
fn wishes_and_taints_leave_workers_out() {
    let mut bench = Bench::new(PolicyName::RoundRobin, 4);
    label(&mut bench, 0, &[("zone", "north")]);
    label(&mut bench, 1, &[("zone", "north"), ("taint.batch", "yes")]);
    label(&mut bench, 2, &[("zone", "south")]);
    let select = |text: &str| Wishes { select: text.to_owned(), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &Wishes::default(), None), [0, 2, 3]);
    assert_eq!(reached(&mut bench, &select("zone=north"), None), [0]);
    assert_eq!(reached(&mut bench, &select("!zone"), None), [3]);
    assert_eq!(reached(&mut bench, &select("zone=east"), None), Vec::<usize>::new());
    let bears = Wishes { tolerate: vec!["batch".to_owned()], ..select("zone=north") };
    assert_eq!(reached(&mut bench, &bears, None), [0, 1]);
    let pinned = |index| Wishes { worker: Some(worker(index)), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &pinned(2), None), [2]);
    assert_eq!(reached(&mut bench, &pinned(8), None), Vec::<usize>::new());
    label(&mut bench, 3, &[("revision", "2")]);
    let of = |revision: &str| Wishes { revision: Some(revision.to_owned()), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &of("2"), None), [3]);
    assert_eq!(reached(&mut bench, &of("1"), None), Vec::<usize>::new());
    label(&mut bench, 3, &[]);
    // A doubtful worker is taken when nobody else may.
    bench.desk.set_standing(&worker(2), Standing::Doubtful);
    assert_eq!(reached(&mut bench, &pinned(2), None), [2]);
    // Labels that changed count at once, and a seat given to another worker has none.
    label(&mut bench, 0, &[("zone", "south")]);
    assert_eq!(reached(&mut bench, &select("zone=south"), None), [0]);
    bench.desk.vacate(&worker(0));
    bench.desk.seat(&worker(5), Incarnation(1), Places::default(), Standing::Sound);
    assert_eq!(reached(&mut bench, &select("zone=south"), None), [2]);
    assert_eq!(reached(&mut bench, &select("!zone"), None), [3, 5]);
}

#[test]
fn filters_of_the_configuration_need_or_prefer() {
    let composed = |text: &str| {
        let mut bench = Bench::of(read(text).expect("reads").build().expect("a policy"), 3);
        label(&mut bench, 0, &[("zone", "north"), ("gpu", "a")]);
        label(&mut bench, 1, &[("zone", "south"), ("gpu", "b")]);
        bench
    };
    let here = |zone: &str| Labels::from([("zone".to_owned(), zone.to_owned())]);
    let any = Wishes::default();
    let turns = "picker = 'turns'\nfilters = ";
    let mut needed = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=a|b' }}]"));
    assert_eq!(reached(&mut needed, &any, None), [0, 1]);
    let mut nobody = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=c' }}]"));
    assert_eq!(reached(&mut nobody, &any, None), Vec::<usize>::new());
    let mut preferred = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=c', prefer = true }}]"));
    assert_eq!(reached(&mut preferred, &any, None), [0, 1, 2]);
    let mut zone = composed(&format!("{turns}['topology']"));
    assert_eq!(reached(&mut zone, &any, Some(&here("south"))), [1]);
    assert_eq!(reached(&mut zone, &any, Some(&here("east"))), Vec::<usize>::new());
    assert_eq!(reached(&mut zone, &any, None), [0, 1, 2]);
    let mut zone = composed(&format!("{turns}[{{ name = 'topology', prefer = true }}]"));
    assert_eq!(reached(&mut zone, &any, Some(&here("north"))), [0]);
    assert_eq!(reached(&mut zone, &any, Some(&here("east"))), [0, 1, 2]);
    // As a cost it is weighed: 30 requests nearby are worth the way.
    let mut far = composed("scorers = ['load', { name = 'topology', weight = 30 }]");
    assert_eq!(reached(&mut far, &any, Some(&here("north"))), [0, 1, 2]);
    assert_eq!(far.desk.fleet().requests, [33, 4, 3]);
}

#[test]
fn a_wish_is_worth_waiting_for_and_a_preference_only_while_its_workers_take_more() {
    let text = "picker = 'turns'\nfilters = [{ name = 'topology', prefer = true }]";
    let mut bench = Bench::of(read(text).expect("reads").build().expect("a policy"), 2);
    let rooms = crate::route::queue::rooms::Rooms::default();
    bench.desk = std::mem::replace(&mut bench.desk, Desk::new(PolicyConfig::default().build().expect("one"), 1))
        .with_rooms(rooms);
    label(&mut bench, 0, &[("zone", "north")]);
    let (pinned, any) = (Wishes { worker: Some(worker(0)), ..Wishes::default() }, Wishes::default());
    let north = Labels::from([("zone".to_owned(), "north".to_owned())]);
    // Ten fill the batch and what is handed out ahead of it.
    let mut decide = |wishes| {
        let ask = Ask { prompt_tokens: 16, wishes: Some(wishes), origin: Some(&north), ..Ask::default() };
        bench.desk.decide(&ask, &[], bench.now).map(|decision| decision.worker)
    };
    let first: Vec<_> = (0..10).map(|_| decide(&any)).collect();
    assert!(first.iter().all(|chosen| *chosen == Some(worker(0))), "{first:?}");
    assert_eq!(decide(&pinned), None);
    // While somebody has room, one that may go anywhere may also wait at the worker that is preferred, up to that one's bound.
    let queued: Vec<_> = (0..62).map(|_| decide(&any)).collect();
    assert!(queued.iter().all(|chosen| *chosen == Some(worker(0))), "{queued:?}");
    assert_eq!(decide(&any), Some(worker(1)));
    let elsewhere = Wishes { worker: Some(worker(9)), ..Wishes::default() };
    let mut possible = |wishes| bench.desk.anyone_for(&Ask { wishes: Some(wishes), ..Ask::default() });
    assert!(possible(&pinned) && possible(&any) && !possible(&elsewhere));
}

#[test]
fn softmin_draws_the_cheaper_more_often() {
    let share = |temperature: f64| {
        let text = format!("scorers = ['load']\npicker = {{ name = 'softmin', temperature = {temperature} }}");
        let mut bench = Bench::of(read(&text).expect("reads").build().expect("a policy"), 2);
        let busy = Heard { at: bench.now, running: 1_000_000, ..Heard::default() };
        bench.desk.hear(&worker(1), Incarnation(1), busy);
        bench.counts(400, |at| hashes(at as u128, 1))
    };
    assert_eq!(share(0.0), [400, 0]);
    // Of two that lie one temperature apart, the dearer one gets 1 / (1 + e) = 27 %.
    let counts = share(1.0);
    assert!((80..=140).contains(&counts[1]), "{counts:?}");
    assert!(share(100.0)[1] > 150);
}

#[test]
fn a_hard_session_never_moves_while_its_worker_lives() {
    let hard = "scorers = [{ name = 'session', hard = true }]";
    let mut bench = Bench::of(read(hard).expect("reads").build().expect("a policy"), 4);
    let first = bench.decide(&hashes(1, 4), &[], Some("s")).worker;
    for _ in 0..50 {
        assert_eq!(bench.decide(&hashes(2, 4), &[], Some("s")).worker, first);
    }
    bench.desk.vacate(&first);
    assert_ne!(bench.decide(&hashes(2, 4), &[], Some("s")).worker, first);
}

#[test]
fn round_robin_goes_round_and_random_and_two_draws_reach_everybody() {
    assert_eq!(Bench::new(PolicyName::RoundRobin, 4).counts(40, |at| hashes(at as u128, 2)), [10; 4]);
    for name in [PolicyName::Random, PolicyName::P2c, PolicyName::LeastLoaded, PolicyName::Starling, PolicyName::Dynamo]
    {
        let counts = Bench::new(name, 4).counts(400, |at| hashes(at as u128, 2));
        assert!(counts.iter().all(|count| (60..=140).contains(count)), "{name:?} {counts:?}");
    }
}

#[test]
fn sticky_policies_stick_until_the_worker_is_overloaded() {
    for name in [PolicyName::Session, PolicyName::PrefixHash] {
        let mut bench = Bench::new(name, 4);
        let first = bench.decide(&hashes(5, 20), &[], Some("conversation"));
        let again = bench.decide(&hashes(5, 20), &[], Some("conversation"));
        assert_eq!(first.worker, again.worker, "{name:?}");
        let mut places = std::collections::HashSet::new();
        for _ in 0..12 {
            places.insert(bench.decide(&hashes(5, 20), &[], Some("conversation")).worker);
        }
        assert!(places.len() > 1, "{name:?}: one worker is not buried under one session");
    }
}

#[test]
fn cost_weighs_a_hit_against_a_queue_in_milliseconds() {
    let mut bench = Bench::new(PolicyName::Starling, 2);
    let rates = Rates { prefill_ms_per_token: 0.1, decode_ms_per_sequence: 0.1, step_ms: 5.0 };
    let idle = Heard { at: bench.now, rates: Some(rates), ..Heard::default() };
    for index in 0..2 {
        bench.desk.hear(&worker(index), Incarnation(1), idle);
    }
    let warm = bench.decide(&hashes(1, 60), &[(1, 60)], None);
    assert_eq!(warm.worker, worker(1));
    // 40,000 tokens wait there: 4 s, and computing 960 anew takes a tenth of a second.
    let busy = Heard { at: bench.now, prefill_tokens: 40_000, waiting: 3, admitted: 1, ..idle };
    bench.desk.confirm(warm.ticket, 1);
    bench.desk.hear(&worker(1), Incarnation(1), busy);
    assert_eq!(bench.decide(&hashes(1, 60), &[(1, 60)], None).worker, worker(0));
    let receipt = &bench.desk.explain(RequestId(2))[0];
    let total = |at: usize| receipt.candidates[at].terms.iter().map(|(_, value)| value).sum::<f64>();
    assert!((total(0) - receipt.candidates[0].cost).abs() < 1e-6);
    assert_eq!(receipt.candidates[1].terms[0].0, "queue");
    assert!(receipt.candidates[1].terms[0].1 > 4_000.0);
}

/// Everybody begins with the same system prompt; its first holders must not get everything.
#[test]
fn bal_a_prompt_that_all_share_does_not_draw_all_to_its_first_holders() {
    let mut bench = Bench::new(PolicyName::Starling, 8);
    let rates = bench.large_machines();
    for index in 0..8 {
        let heard = Heard { at: bench.now, rates: Some(rates), running: 2, admitted: 2, ..Heard::default() };
        bench.desk.hear(&worker(index), Incarnation(1), heard);
    }
    let mut holders: Vec<usize> = vec![0];
    let mut given = [0u32; 8];
    for session in 0..160u128 {
        // 32 shared blocks, 96 of its own.
        let shared: Vec<(usize, u32)> = holders.iter().map(|slot| (*slot, 32)).collect();
        let decision = bench.decide(&hashes(session + 1, 128), &shared, None);
        let slot = bench.desk.fleet().slot(&decision.worker).expect("seated");
        if !holders.contains(&slot) {
            holders.push(slot);
        }
        given[slot] += 1;
        // Its prompt is computed at once and it goes on to answer: nothing queues anywhere.
        let admitted = 2 + u64::from(given[slot]);
        bench.desk.confirm(decision.ticket, admitted);
        let running = 2 + given[slot];
        let heard = Heard { at: bench.now, rates: Some(rates), running, admitted, ..Heard::default() };
        bench.desk.hear(&decision.worker, Incarnation(1), heard);
    }
    // Nothing queues, so all that spreads them is what running answers lose: the first holders keep more, not everything.
    let (least, most) = (given.iter().min().expect("eight"), given.iter().max().expect("eight"));
    assert!(*least >= 4 && *most <= 60, "{given:?}");
}

/// The first that knows its rates tells them for its equals: it must not look sixty times as fast as they.
#[test]
fn bal_the_first_to_know_its_rates_does_not_draw_all() {
    let mut bench = Bench::new(PolicyName::Starling, 8);
    let rates = bench.large_machines();
    let heard = Heard { at: bench.now, rates: Some(rates), running: 1, ..Heard::default() };
    bench.desk.hear(&worker(0), Incarnation(1), heard);
    let fleet = bench.desk.fleet();
    assert!((0..8).all(|slot| fleet.rates[slot] == rates), "{:?}", fleet.rates);
}

/// A conversation goes on where it was, though others have less to do and all hold the system prompt.
#[test]
fn bal_a_conversation_stays_with_its_worker() {
    let mut bench = Bench::new(PolicyName::Starling, 8);
    let rates = bench.large_machines();
    for index in 0..8 {
        let running = if index == 3 { 20 } else { 8 };
        let heard = Heard { at: bench.now, rates: Some(rates), running, ..Heard::default() };
        bench.desk.hear(&worker(index), Incarnation(1), heard);
    }
    let mut held: Vec<(usize, u32)> = (0..8).map(|slot| (slot, 32)).collect();
    held[3].1 = 140;
    let decision = bench.decide(&hashes(9, 146), &held, None);
    assert_eq!(decision.worker, worker(3));
    let receipt = &bench.desk.explain(RequestId(1))[0];
    let total = |at: usize| receipt.candidates[at].terms.iter().map(|(_, value)| value).sum::<f64>();
    assert!((total(0) - receipt.candidates[0].cost).abs() < 1e-6, "{receipt:?}");
}

/// Its queue is longer than the prefill elsewhere would be, but not by as much as that prefill takes from those that come later.
#[test]
fn bal_a_conversation_waits_a_while_rather_than_have_others_pay_for_its_move() {
    let mut bench = Bench::new(PolicyName::Starling, 8);
    let rates = bench.large_machines();
    // 2,336 tokens, all but 96 of them held there.
    let mut placed = |queued: f64| {
        for index in 0..8 {
            let prefill_tokens = if index == 3 { queued as u64 } else { 0 };
            let heard = Heard { at: bench.now, rates: Some(rates), running: 8, prefill_tokens, ..Heard::default() };
            bench.desk.hear(&worker(index), Incarnation(1), heard);
        }
        let decision = bench.decide(&hashes(9, 146), &[(3, 140)], None);
        bench.desk.release(decision.ticket);
        decision.worker == worker(3)
    };
    assert!(placed(0.0) && placed(2_240.0 * 2.0), "it stays");
    assert!(!placed(2_240.0 * 5.0), "it goes");
}

/// The first worker that holds a system prompt gets no more for it than the prefill it spares: moving is what is dear, not a copy.
#[test]
fn bal_a_common_beginning_is_no_conversation() {
    let mut bench = Bench::new(PolicyName::Starling, 8);
    let rates = bench.large_machines();
    for index in 0..8 {
        // At their only holder more waits than the shared blocks take.
        let prefill_tokens = if index == 3 { 700 } else { 0 };
        let heard = Heard { at: bench.now, rates: Some(rates), running: 8, prefill_tokens, ..Heard::default() };
        bench.desk.hear(&worker(index), Incarnation(1), heard);
    }
    assert_ne!(bench.decide(&hashes(9, 128), &[(3, 32)], None).worker, worker(3));
    let terms = bench.desk.explain(RequestId(1))[0].candidates[0].terms.clone();
    assert!(terms.iter().any(|(name, ms)| *name == "later" && *ms == 0.0), "{terms:?}");
}

/// One of equal workers drew the long conversations: new ones go to the others until all had as much.
#[test]
fn bal_new_conversations_make_up_for_the_luck_of_old_ones() {
    let mut bench = Bench::new(PolicyName::Starling, 4);
    let rates = bench.large_machines();
    for index in 0..4 {
        let heard = Heard { at: bench.now, rates: Some(rates), ..Heard::default() };
        bench.desk.hear(&worker(index), Incarnation(1), heard);
    }
    let mut turn = |hits: &[(usize, u32)], prompt: u128| {
        let decision = bench.decide(&hashes(prompt, 64), hits, None);
        let slot = bench.desk.fleet().slot(&decision.worker).expect("seated");
        bench.desk.release(decision.ticket);
        slot
    };
    // Each turn ends before the next, so nothing is loaded when a new one comes.
    for _ in 0..30 {
        assert_eq!(turn(&[(2, 60)], 7), 2);
    }
    let mut begun = [0u32; 4];
    for prompt in 0..40 {
        begun[turn(&[], 100 + prompt)] += 1;
    }
    assert!(begun[2] < 5 && begun.iter().sum::<u32>() == 40, "{begun:?}");
    let (least, most) = ([0, 1, 3].map(|slot| begun[slot])).iter().fold((99, 0), |(l, m), n| (l.min(*n), m.max(*n)));
    assert!(most - least <= 1, "{begun:?}");
}

#[test]
fn the_dynamo_cost_is_the_published_one() {
    let mut bench = Bench::new(PolicyName::Dynamo, 2);
    // 10 blocks cold: prefill 10, decode 10.
    let first = bench.decide(&hashes(1, 10), &[], None);
    assert!((first.choice.cost - 20.0).abs() < 1e-9, "{first:?}");
    let other = worker(usize::from(first.worker == worker(0)));
    // There: booked 10 + own 10 - cached 10, decode the same 10 blocks. On the other one: 20.
    let second = bench.decide(&hashes(1, 10), &[((other == worker(0)) as usize, 10)], None);
    assert!((second.choice.cost - 20.0).abs() < 1e-9, "{second:?}");
    bench.desk.prefilled(first.ticket);
    let third = bench.decide(&hashes(1, 10), &[((other == worker(0)) as usize, 10)], None);
    assert_eq!(third.worker, first.worker);
}

#[test]
fn cnt_03_what_is_reserved_comes_back_once_whatever_happens_to_its_worker() {
    let mut bench = Bench::new(PolicyName::Starling, 2);
    let decisions: Vec<_> = (0..6).map(|kind| bench.decide(&hashes(kind, 4), &[], None)).collect();
    let places = Places { sequences: 8, ..Places::default() };
    // A new life begins with nothing; late ends of the earlier one change nothing there.
    bench.desk.seat(&worker(0), Incarnation(2), places, Standing::Sound);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    assert_eq!((bench.desk.fleet().requests[slot], bench.desk.fleet().unreported_tokens[slot]), (0, 0));
    for decision in &decisions {
        let of_old_life = decision.worker == worker(0);
        bench.desk.confirm(decision.ticket, 1);
        bench.desk.ended(decision.ticket, Outcome::default());
        assert_eq!(bench.desk.release(decision.ticket), !of_old_life);
        assert!(!bench.desk.release(decision.ticket), "once");
    }
    assert_eq!(bench.desk.reservations(), 0);
    let fleet = bench.desk.fleet();
    for (_, slot) in fleet.workers() {
        assert_eq!((fleet.requests[slot], fleet.sequences[slot], fleet.unreported[slot]), (0, 0, 0));
        assert_eq!((fleet.unreported_tokens[slot], fleet.unreported_blocks[slot]), (0, 0));
    }
}

#[test]
fn a_reservation_is_counted_once_beside_the_workers_own_account() {
    let mut bench = Bench::new(PolicyName::LeastLoaded, 1);
    let slot = bench.desk.fleet().slot(&worker(0)).expect("seated");
    let (one, two) = (bench.decide(&hashes(1, 4), &[], None), bench.decide(&hashes(2, 4), &[], None));
    assert_eq!(bench.desk.fleet().queued_tokens(slot), 128);
    // The account comes before the confirmation of what it covers.
    let heard = Heard { at: bench.now, running: 1, prefill_tokens: 64, admitted: 1, ..Heard::default() };
    bench.desk.hear(&worker(0), Incarnation(1), heard);
    bench.desk.confirm(one.ticket, 1);
    bench.desk.confirm(two.ticket, 2);
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { running: 2, prefill_tokens: 128, admitted: 2, ..heard });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (2, 128));
    assert!(bench.desk.release(one.ticket) && bench.desk.release(two.ticket));
    bench.desk.hear(&worker(0), Incarnation(1), Heard { admitted: 2, at: bench.now, ..Heard::default() });
    assert_eq!((bench.desk.fleet().in_flight(slot), bench.desk.fleet().queued_tokens(slot)), (0, 0));
}

#[test]
fn doubtful_and_cooling_workers_are_the_last_resort_and_excluded_ones_none() {
    let mut bench = Bench::new(PolicyName::RoundRobin, 3);
    bench.desk.set_standing(&worker(0), Standing::Doubtful);
    let ask = |exclude: &[WorkerId], failed: &[WorkerId], bench: &mut Bench| {
        let hashes = hashes(1, 2);
        let ask = Ask {
            request: RequestId(1),
            prompt_tokens: 32,
            block_tokens: 16,
            hashes: &hashes,
            exclude,
            failed,
            ..Ask::default()
        };
        bench.desk.decide(&ask, &[], bench.now).map(|decision| decision.worker)
    };
    for _ in 0..4 {
        assert_ne!(ask(&[], &[], &mut bench), Some(worker(0)));
    }
    assert_eq!(ask(&[worker(1)], &[worker(1)], &mut bench), Some(worker(2)));
    assert_eq!(ask(&[], &[], &mut bench), Some(worker(2)), "worker 1 cools");
    assert_eq!(ask(&[worker(1), worker(2)], &[], &mut bench), Some(worker(0)));
    assert_eq!(ask(&[worker(0), worker(1), worker(2)], &[], &mut bench), None);
}
