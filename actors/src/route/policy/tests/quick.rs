//! The quick ways over all workers say what the plain ones say, one worker at a time.

use proptest::prelude::*;

use super::{super::pickers, *};
use crate::route::queue::rooms::{Need, Rooms};

/// What a worker is made of: running, waiting, prompt tokens queued, blocks taken, speed, places.
type Made = (u32, u32, u64, u32, u32, u32);

fn fleet(workers: &[Made]) -> Desk {
    let mut desk = Desk::new(PolicyConfig::named(PolicyName::Starling).build().expect("a policy"), 7);
    for (index, (running, waiting, queued, taken, speed, sequences)) in workers.iter().copied().enumerate() {
        let places = Places { sequences, waiting: 4, step_tokens: 300, blocks: 900, ..Places::default() };
        desk.seat(&worker(index), Incarnation(1), places, Standing::Sound);
        let speed = f64::from(speed);
        let rates = Rates { prefill_ms_per_token: speed / 64.0, decode_ms_per_sequence: speed / 9.0, step_ms: speed };
        let heard = Heard {
            at: Duration::from_secs(1),
            running,
            waiting,
            prefill_tokens: queued,
            blocks_pinned: taken,
            rates: Some(rates),
            ..Heard::default()
        };
        desk.hear(&worker(index), Incarnation(1), heard);
    }
    desk
}

proptest! {
    #[test]
    fn a_column_of_costs_is_the_cost_of_each(
        workers in prop::collection::vec((0u32..9, 0u32..4, 0u64..3_000, 0u32..1_200, 1u32..5, 0u32..8), 1..70),
        depths in prop::collection::vec(0u32..20, 70),
        harm in 0.0f64..3.0,
    ) {
        let desk = fleet(&workers);
        let ask = Ask { prompt_tokens: 311, block_tokens: 16, answer_expected: 70.0, ..Ask::default() };
        let hits = &depths[..desk.fleet().width()];
        let question = Question { ask: &ask, fleet: desk.fleet(), hits, below: &[], draw: 0 };
        let mut cost = Cost::new(harm, 2.0);
        cost.prepare(&question);
        let mut costs = vec![0.0; hits.len()];
        cost.add(&question, 1.0, &mut costs);
        for (slot, quick) in costs.iter().enumerate() {
            prop_assert_eq!(quick.to_bits(), cost.cost(&question, slot).to_bits(), "worker {}", slot);
        }
    }

    #[test]
    fn the_cheapest_are_those_that_a_sort_puts_first(
        costs in prop::collection::vec(0u32..30, 1..90), count in 0usize..10, limit in 0u32..40,
    ) {
        let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
        let slots: Vec<usize> = (0..costs.len()).map(|at| at * 2).collect();
        let scratch = Scratch { costs: Vec::new(), slots: slots.clone(), left: costs.clone() };
        let mut best = Vec::new();
        scratch.cheapest(count, &mut best);
        let mut sorted: Vec<(usize, f64)> = slots.iter().copied().zip(costs.iter().copied()).collect();
        sorted.sort_by(|a, b| a.1.total_cmp(&b.1));
        prop_assert_eq!(&best[..], &sorted[..count.min(sorted.len())]);
        let first = costs.iter().position(|cost| *cost <= sorted[0].1);
        prop_assert_eq!(pickers::lowest(&costs), first);
        // Among the near ones the lowest rank, here: the one whose number is lowest when read backwards.
        let (limit, rank) = (f64::from(limit), |slot: usize| slot.reverse_bits());
        let near: Vec<usize> = slots.iter().zip(&costs).filter(|(_, c)| **c <= limit).map(|(slot, _)| *slot).collect();
        let plain = near.iter().copied().min_by_key(|slot| (rank(*slot), *slot)).map(|slot| (slot, near.len()));
        let found = pickers::pick_among(&slots, &costs, limit, rank);
        prop_assert_eq!(found, plain.unwrap_or((slots[0], slots.len())));
    }

    #[test]
    fn who_is_sound_and_has_room_is_the_same_for_few_and_all(
        workers in prop::collection::vec((0u32..9, 0u32..4, 0u64..3_000, 0u32..1_200, Just(1u32), 0u32..8), 1..70),
        (sequences, blocks, kv_percent) in (1u32..6, 0u64..400, prop::sample::select(vec![0u32, 50, 100, 125])),
    ) {
        let (rooms, need) = (Rooms { kv_percent, ..Rooms::default() }, Need { sequences, blocks });
        let mut desk = fleet(&workers).with_rooms(rooms);
        let ask = Ask { block_tokens: 16, prompt_tokens: 16, ..Ask::default() };
        // By the first request it is known how large blocks are.
        desk.decide(&ask, &[], Duration::from_secs(1));
        let fleet = desk.fleet();
        let plain = |slot: usize| {
            let (places, in_flight) = (fleet.places[slot], fleet.in_flight(slot));
            places.sequences == 0 || in_flight == 0 || in_flight + sequences <= places.sequences + places.waiting
        };
        for slot in 0..fleet.width() {
            prop_assert_eq!(fleet.room(slot) >= sequences, plain(slot));
            prop_assert_eq!(fleet.columns.open[slot], rooms.open(fleet, slot, 16));
        }
        let open = fleet.columns.open.iter().filter(|open| **open).count();
        prop_assert_eq!(fleet.columns.open_count, open);
        let fit = (0..fleet.width()).all(|slot| rooms.fits(fleet, slot, need, 16));
        prop_assert_eq!(fleet.columns.all_take(sequences, blocks as f64 * 16.0, 16.0), fit);
        prop_assert!(fleet.all_sound(Duration::from_secs(1)));
    }
}
