//! Blocks on a worker's own slower tiers, in the cost and in what is told of it.

use proptest::prelude::*;
use starling_kv::{
    events::KvEvent,
    index::{IndexLimits, PrefixIndex, Tier},
};

use super::*;
use crate::route::{
    below::{Below, TierRates},
    receipt::Judged,
    split::KvLink,
};

const RATES: Rates = Rates { prefill_ms_per_token: 0.25, decode_ms_per_sequence: 0.1, step_ms: 2.0 };
/// Beside them a block takes 4 ms to compute.
const TIERS: TierRates = TierRates { host_ms: 0.1, disk_ms: 1.0, disk_wait_ms: 0.5, lends: true };

/// Workers and an index of what they have.
struct Indexed {
    bench: Bench,
    index: PrefixIndex,
}

impl Indexed {
    fn new(name: PolicyName, tiers: [Option<TierRates>; 2]) -> Self {
        let mut bench = Bench::new(name, 2);
        let index = PrefixIndex::new(IndexLimits::default());
        for (number, tiers) in tiers.into_iter().enumerate() {
            index.add_worker(worker(number), Incarnation(1)).expect("added");
            let heard = Heard { at: bench.now, rates: Some(RATES), tiers, ..Heard::default() };
            bench.desk.hear(&worker(number), Incarnation(1), heard);
        }
        Self { bench, index }
    }

    fn has(&self, number: usize, tier: Tier, blocks: &[BlockHash]) {
        let blocks = blocks.to_vec();
        let event = match tier {
            Tier::Device => KvEvent::Stored { parent: None, blocks },
            lower => KvEvent::StoredBelow { tier: lower, parent: None, blocks },
        };
        self.index.apply(&worker(number), Incarnation(1), &event).expect("known");
    }

    /// Decides, and how the worker of this number was judged.
    fn decide(&mut self, hashes: &[BlockHash], number: usize) -> (Decision, Judged) {
        self.bench.request += 1;
        let mut overlaps = Vec::new();
        self.index.overlaps(hashes, &mut overlaps);
        let request = RequestId(self.bench.request);
        let prompt_tokens = 16 * hashes.len() as u32;
        let ask = Ask { request, prompt_tokens, hashes, answer_tokens_max: 64, ..Ask::default() };
        let who = |holder| self.index.who(holder).map(|(worker, ..)| worker);
        let decision = self.bench.desk.decide_over(&ask, &overlaps, who, self.bench.now).expect("somebody");
        let receipt = self.bench.desk.explain(request).remove(0);
        let judged = receipt.candidates.into_iter().find(|judged| judged.worker == worker(number));
        self.bench.desk.release(decision.ticket);
        (decision, judged.expect("judged"))
    }
}

fn term(judged: &Judged, name: &str) -> Option<f64> {
    judged.terms.iter().find(|(term, _)| term == name).map(|(_, ms)| *ms)
}

#[test]
fn a_prompt_goes_where_its_blocks_are_loaded_sooner_than_computed() {
    let chain = hashes(1, 64);
    for (tier, load_ms) in [(Tier::Host, 6.3), (Tier::Disk, 63.5)] {
        for holder in 0..2 {
            let mut all = Indexed::new(PolicyName::Starling, [Some(TIERS); 2]);
            all.has(holder, tier, &chain);
            let (decision, judged) = all.decide(&chain, holder);
            assert_eq!((&decision.worker, decision.hit_blocks), (&worker(holder), 0), "nothing is on the device yet");
            // The last block is computed: the answer begins behind it.
            assert!((term(&judged, "load").expect("told") - load_ms).abs() < 1e-9, "{judged:?}");
            assert!((term(&judged, "prefill").expect("told") - (4.0 + 2.0)).abs() < 1e-9, "{judged:?}");
            let lower = judged.lower.expect("told");
            assert_eq!((lower.host_blocks + lower.disk_blocks, lower.loaded, lower.rates), (64, 63, TIERS));
            assert!(judged.ttft_ms > load_ms && judged.ttft_ms < 80.0, "{judged:?}");
            let summed: f64 = judged.terms.iter().map(|(_, ms)| ms).sum();
            assert!((summed - judged.cost).abs() < 1e-6, "{judged:?}");
            let (_, other) = all.decide(&chain, 1 - holder);
            assert_eq!((term(&other, "load"), other.lower), (None, None));
        }
    }
}

#[test]
fn blocks_on_the_device_are_better_than_on_disk_and_those_than_none() {
    let chain = hashes(2, 64);
    let mut all = Indexed::new(PolicyName::Starling, [Some(TIERS); 2]);
    all.has(0, Tier::Disk, &chain);
    all.has(1, Tier::Device, &chain);
    assert_eq!(all.decide(&chain, 0).0.worker, worker(1));
    // What follows a part on the device is loaded behind it.
    let longer = hashes(2, 128);
    all.has(0, Tier::Device, &longer[..32]);
    all.has(0, Tier::Host, &longer[..96]);
    let (decision, judged) = all.decide(&longer, 0);
    assert_eq!((decision.worker, decision.hit_blocks), (worker(0), 32));
    let lower = judged.lower.expect("told");
    assert_eq!((lower.host_blocks, lower.disk_blocks, lower.loaded), (64, 0, 64));
}

#[test]
fn xfr_a_disk_that_does_not_answer_is_no_reason_to_go_there() {
    let chain = hashes(3, 64);
    let hangs = TierRates { disk_wait_ms: 60_000.0, ..TIERS };
    let mut all = Indexed::new(PolicyName::Starling, [Some(hangs), None]);
    all.has(0, Tier::Disk, &chain);
    let (_, judged) = all.decide(&chain, 0);
    assert_eq!((term(&judged, "load"), judged.lower.map(|lower| lower.loaded)), (None, Some(0)));
    let (_, other) = all.decide(&chain, 1);
    assert!((judged.cost - other.cost).abs() < 1e-9, "it computes like the other: {judged:?} {other:?}");
}

#[test]
fn a_worker_that_does_not_say_how_fast_its_tiers_are_is_judged_without_them() {
    let chain = hashes(4, 64);
    let mut all = Indexed::new(PolicyName::Starling, [None, None]);
    all.has(0, Tier::Host, &chain);
    let (_, judged) = all.decide(&chain, 0);
    assert_eq!((term(&judged, "load"), judged.lower), (None, None));
}

#[test]
fn the_dynamo_cost_knows_no_slower_tier() {
    let chain = hashes(5, 64);
    let mut all = Indexed::new(PolicyName::Dynamo, [Some(TIERS); 2]);
    all.has(0, Tier::Host, &chain);
    let (_, judged) = all.decide(&chain, 0);
    let (_, other) = all.decide(&chain, 1);
    assert_eq!((judged.cost, term(&judged, "load")), (other.cost, None));
}

#[test]
fn what_is_loaded_is_not_counted_as_queued() {
    let chain = hashes(6, 64);
    let mut all = Indexed::new(PolicyName::Starling, [Some(TIERS); 2]);
    all.has(0, Tier::Host, &chain);
    let mut overlaps = Vec::new();
    all.index.overlaps(&chain, &mut overlaps);
    let ask = Ask { prompt_tokens: 1_024, hashes: &chain, answer_tokens_max: 1, ..Ask::default() };
    let who = |holder| all.index.who(holder).map(|(worker, ..)| worker);
    let decision = all.bench.desk.decide_over(&ask, &overlaps, who, all.bench.now).expect("somebody");
    let fleet = all.bench.desk.fleet();
    let slot = fleet.slot(&decision.worker).expect("seated");
    assert_eq!((fleet.queued_tokens(slot), fleet.blocks(slot)), (16, 64), "it needs room all the same");
}

/// A peer's blocks are not pulled when the own host memory has them.
#[test]
fn a_pull_is_compared_with_the_own_slower_tiers() {
    let chain = hashes(7, 64);
    let link = KvLink { block_bytes: 1 << 20, bytes_per_ms: 1.0e6 };
    for (tiers, pulls) in [(None, true), (Some(TIERS), false)] {
        let mut all = Indexed::new(PolicyName::Starling, [None, None]);
        all.has(0, Tier::Device, &chain);
        all.has(1, Tier::Host, &chain);
        // The holder is far behind, so the other one answers.
        for (number, queued, tiers) in [(0, 400_000, None), (1, 0, tiers)] {
            let heard = Heard {
                at: all.bench.now,
                rates: Some(RATES),
                prefill_tokens: queued,
                link,
                tiers,
                ..Heard::default()
            };
            all.bench.desk.hear(&worker(number), Incarnation(1), heard);
        }
        let (decision, _) = all.decide(&chain, 1);
        assert_eq!((decision.worker, decision.source.is_some()), (worker(1), pulls));
    }
}

/// What a peer has on its slower tiers is pulled as deep as reading and moving it pays.
#[test]
fn a_peers_slower_tiers_are_read_as_deep_as_that_is_sooner_than_computing() {
    let chain = hashes(8, 64);
    let link = KvLink { block_bytes: 1 << 20, bytes_per_ms: 1.0e6 };
    let slow = TierRates { disk_ms: 6.0, ..TIERS };
    let hangs = TierRates { disk_wait_ms: 60_000.0, ..TIERS };
    // Of 64 blocks the last one is computed in any case.
    for (tiers, gives) in [
        (TIERS, Some((63, 24, 23))),
        (slow, Some((40, 24, 0))),
        (hangs, Some((40, 24, 0))),
        (TierRates { host_ms: f64::NAN, ..slow }, Some((16, 0, 0))),
        (TierRates { lends: false, ..TIERS }, Some((16, 0, 0))),
    ] {
        let mut all = Indexed::new(PolicyName::Starling, [None, None]);
        all.has(0, Tier::Device, &chain[..16]);
        all.has(0, Tier::Host, &chain[..40]);
        all.has(0, Tier::Disk, &chain);
        for (number, queued, tiers) in [(0, 400_000, Some(tiers)), (1, 0, None)] {
            let (at, rates, prefill_tokens) = (all.bench.now, Some(RATES), queued);
            let heard = Heard { at, rates, prefill_tokens, link, tiers, ..Heard::default() };
            all.bench.desk.hear(&worker(number), Incarnation(1), heard);
        }
        let (decision, _) = all.decide(&chain, 1);
        let given = decision.source.as_ref().map(|source| (source.blocks, source.host, source.disk));
        assert_eq!((decision.worker, given), (worker(1), gives), "{tiers:?}");
        let reading = decision.source.map(|source| (source.worker, source.compute, source.reading_ms));
        let ms = match gives {
            Some((_, 24, 23)) => 26,
            Some((_, 24, 0)) => 3,
            _ => 0,
        };
        assert_eq!(reading, Some((worker(0), false, ms)));
    }
}

/// Nobody has anything of it on a device: it is read at a peer, unless computing is sooner.
#[test]
fn blocks_on_a_peers_disk_alone_are_worth_a_pull() {
    let chain = hashes(9, 64);
    let far = KvLink { block_bytes: 1 << 20, bytes_per_ms: 1.0e5 };
    for (link, pulls) in [(KvLink { bytes_per_ms: 1.0e6, ..far }, true), (far, false), (KvLink::default(), false)] {
        let mut all = Indexed::new(PolicyName::Starling, [None, None]);
        all.has(0, Tier::Disk, &chain);
        for (number, queued, tiers) in [(0, 400_000, Some(TIERS)), (1, 0, None)] {
            let (at, rates, prefill_tokens) = (all.bench.now, Some(RATES), queued);
            let heard = Heard { at, rates, prefill_tokens, link, tiers, ..Heard::default() };
            all.bench.desk.hear(&worker(number), Incarnation(1), heard);
        }
        let (decision, _) = all.decide(&chain, 1);
        assert_eq!((decision.worker, decision.source.is_some()), (worker(1), pulls));
    }
}

proptest! {
    /// A prompt of 50 whole blocks: nobody can have more of it.
    #[test]
    fn slower_tiers_only_ever_make_a_worker_cheaper_and_the_column_says_the_same(
        workers in prop::collection::vec((0u64..3_000, 0u32..17, 0u32..16, 0u32..17, prop::bool::ANY), 1..40),
        (host_ms, disk_ms, disk_wait_ms) in (0.0f64..6.0, 0.0f64..6.0, 0.0f64..200.0),
        (harm, later) in (0.0f64..3.0, 0.0f64..3.0),
    ) {
        let mut bench = Bench::new(PolicyName::Starling, workers.len());
        let (mut hits, mut below) = (Vec::new(), Vec::new());
        for (number, (queued, device, host, disk, says)) in workers.iter().copied().enumerate() {
            let tiers = says.then_some(TierRates { host_ms, disk_ms, disk_wait_ms, lends: false });
            let heard = Heard { at: bench.now, rates: Some(RATES), prefill_tokens: queued, tiers, ..Heard::default() };
            bench.desk.hear(&worker(number), Incarnation(1), heard);
            hits.push(device);
            below.push(Below { device, host, disk });
        }
        let ask = Ask { prompt_tokens: 811, answer_expected: 70.0, ..Ask::default() };
        let without = Question { ask: &ask, fleet: bench.desk.fleet(), hits: &hits, below: &[], draw: 0 };
        let with = Question { below: &below, ..without };
        let mut cost = Cost::new(harm, later);
        cost.prepare(&with);
        let mut costs = vec![1.0; hits.len()];
        cost.add(&with, 1.0, &mut costs);
        for (slot, quick) in costs.iter().enumerate() {
            prop_assert_eq!(quick.to_bits(), (1.0 + cost.cost(&with, slot)).to_bits(), "worker {}", slot);
            let (loads, computes) = (cost.judge(&with, slot), cost.judge(&without, slot));
            prop_assert!(loads.first_token() <= computes.first_token() + 1e-9, "{loads:?} {computes:?}");
            prop_assert!(loads.harm + loads.later <= computes.harm + computes.later + 1e-9);
            // One more block in the host's memory never makes it dearer.
            let mut more = below.clone();
            more[slot].host += 1;
            let one_more = cost.judge(&Question { below: &more, ..with }, slot);
            prop_assert!(one_more.first_token() <= loads.first_token() + 1e-9, "{one_more:?} {loads:?}");
        }
    }
}
