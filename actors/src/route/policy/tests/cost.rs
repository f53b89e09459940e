//! The cost in milliseconds, and how it spreads load.

use super::*;

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
