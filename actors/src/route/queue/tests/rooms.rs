//! When a worker counts as taken.

use proptest::prelude::*;

use super::{super::rooms::Need, *};

#[test]
fn a_worker_is_taken_by_its_batch_what_is_ahead_and_the_prompts_that_wait() {
    use crate::route::fleet::{Fleet, Heard, Places};
    let worker = starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index: 0 };
    let mut fleet = Fleet::default();
    let places = Places { sequences: 8, waiting: 16, step_tokens: 512, blocks: 4_096, ..Places::default() };
    let slot = fleet.seat(&worker, starling_ids::Incarnation(1), places);
    let rooms = Rooms::default();
    let mut at = |running, waiting, prefill_tokens| {
        fleet.hear(slot, Heard { running, waiting, prefill_tokens, ..Heard::default() });
        (rooms.open(&fleet, slot, 16), rooms.fits(&fleet, slot, Need { sequences: 1, blocks: 1 }, 16))
    };
    assert_eq!(at(8, 1, 0), (true, true));
    assert_eq!(at(8, 2, 0), (false, true));
    assert_eq!(at(8, 15, 0), (false, true));
    assert_eq!(at(8, 16, 0), (false, false));
    assert_eq!(at(1, 1, 3 * 512 - 1), (true, true));
    assert_eq!(at(1, 1, 3 * 512), (false, true));
    at(0, 0, 0);
    let huge = Need { sequences: 100, blocks: 100_000 };
    assert!(
        rooms.open(&fleet, slot, 16) && rooms.fits(&fleet, slot, huge, 16),
        "nobody else would ever have room for it"
    );
}

#[test]
fn a_worker_is_taken_by_the_blocks_that_are_pinned_promised_and_waited_for() {
    use crate::route::fleet::{Fleet, Heard, Places};
    let worker = starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index: 0 };
    let mut fleet = Fleet::default();
    let places = Places { sequences: 8, waiting: 16, step_tokens: 512, blocks: 200, ..Places::default() };
    let slot = fleet.seat(&worker, starling_ids::Incarnation(1), places);
    let rooms = Rooms { kv_percent: 100, ..Rooms::default() };
    let mut at = |blocks_pinned, prefill_tokens, blocks| {
        fleet.hear(slot, Heard { running: 1, blocks_pinned, prefill_tokens, ..Heard::default() });
        (rooms.open(&fleet, slot, 16), rooms.fits(&fleet, slot, Need { sequences: 1, blocks }, 16))
    };
    // Two of the 200 are the worker's own reserve.
    assert_eq!(at(190, 0, 8), (true, true));
    assert_eq!(at(190, 0, 9), (true, false));
    assert_eq!(at(190, 33, 5), (true, true));
    assert_eq!(at(190, 33, 6), (true, false));
    assert_eq!(at(190, 8 * 16, 1), (false, false));
    assert_eq!(at(198, 0, 0), (false, true), "one that leaves the wait to the worker");
    let any = Rooms { kv_percent: 0, ..Rooms::default() };
    assert!(any.open(&fleet, slot, 16) && any.fits(&fleet, slot, Need { sequences: 1, blocks: 1_000 }, 16));
}

proptest! {
    /// However many gateways ask, in whatever order requests come, get on and end: what is promised on a busy worker never
    /// exceeds its pool, as far as the worker's own account can be known.
    #[test]
    fn kv_blocks_are_never_promised_beyond_the_pool(
        asks in prop::collection::vec((1u32..1_200, 0u8..4), 1..120),
        pool in 64u32..400,
    ) {
        use crate::route::{desk::{Ask, Desk}, fleet::{Heard, Places, Standing}, policy::PolicyConfig};
        let policy = PolicyConfig::default().build().expect("composed");
        let rooms = Rooms { kv_percent: 100, ahead_percent: 1_000, prefill_steps: 0 };
        let mut desk = Desk::new(policy, 3).with_rooms(rooms);
        let worker = |index| starling_ids::WorkerId { node: starling_ids::NodeId::new("n").expect("name"), index };
        let life = starling_ids::Incarnation(1);
        let places = Places { sequences: 512, waiting: 512, step_tokens: 512, blocks: pool, ..Places::default() };
        for index in 0..3 {
            desk.seat(&worker(index), life, places, Standing::Sound);
        }
        // Blocks of what runs at each worker, by ticket.
        let mut running: Vec<(u16, crate::route::desk::Ticket, u64)> = Vec::new();
        let mut admitted = [0u64; 3];
        for (at, (prompt_tokens, turn)) in asks.into_iter().enumerate() {
            let now = Duration::from_millis(at as u64);
            let request = starling_ids::RequestId(at as u128);
            if let Some(decision) = desk.decide(&Ask { request, prompt_tokens, ..Ask::default() }, &[], now) {
                let index = decision.worker.index;
                let blocks = u64::from(prompt_tokens.div_ceil(16));
                let there = running.iter().filter(|(other, ..)| *other == index).map(|(.., blocks)| blocks);
                let promised: u64 = there.clone().sum();
                prop_assert!(there.count() == 0 || promised + blocks <= u64::from(pool - pool / 100), "{promised} and {blocks}");
                admitted[usize::from(index)] += 1;
                desk.confirm(decision.ticket, admitted[usize::from(index)]);
                running.push((index, decision.ticket, blocks));
            }
            if turn == 0 && !running.is_empty() {
                let (_, ticket, _) = running.swap_remove(at % running.len());
                desk.release(ticket);
            }
            if turn <= 1 {
                for index in 0..3u16 {
                    let there = running.iter().filter(|(other, ..)| *other == index);
                    let blocks: u64 = there.clone().map(|(.., blocks)| blocks).sum();
                    let running = there.count() as u32;
                    let blocks_pinned = blocks as u32;
                    let admitted = admitted[usize::from(index)];
                    desk.hear(&worker(index), life, Heard { at: now, running, blocks_pinned, admitted, ..Heard::default() });
                }
            }
        }
    }
}
