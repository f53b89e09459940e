//! Which of several nearly equal workers gets the request.
//!
//! Called by [`super::decide`]. Costs closer than the tolerance are equal, since the cost of a prefill is an estimate;
//! load is counted exactly and gets no tolerance, or a loaded cluster would take every hit for a tie. Among
//! equals the one chosen longest ago wins, and among those never chosen a seeded hash decides. So paced
//! traffic without hits goes round instead of always to the first worker. Never: a random generator.

use std::hash::Hasher;

use starling_ids::WorkerId;
use twox_hash::XxHash3_64;

/// Costs within this share of the best one's uncertain part are equal: learned rates of equal machines differ by about
/// as much.
const TOLERANCE_SHARE: f64 = 0.15;

/// Costs within this many milliseconds of the best are equal: below what a client can notice.
const TOLERANCE_MS: f64 = 0.5;

/// One worker in the running.
#[derive(Debug, Clone, Copy)]
pub struct Runner<'a> {
    /// Who.
    pub worker: &'a WorkerId,
    /// Its cost, milliseconds.
    pub cost: f64,
    /// The part of it that is an estimate.
    pub uncertain: f64,
    /// When it was last chosen, in decisions since the shard began; 0 for never.
    pub last_chosen: u64,
}

/// The index of the winner and how many were nearly equal; `None` of nobody.
#[must_use]
pub fn pick(runners: &[Runner<'_>], seed: u64) -> Option<(usize, usize)> {
    let best = runners.iter().min_by(|a, b| a.cost.total_cmp(&b.cost))?;
    let limit = best.cost + TOLERANCE_MS.max(best.uncertain * TOLERANCE_SHARE);
    let near = || runners.iter().enumerate().filter(|(_, runner)| runner.cost <= limit);
    let (winner, _) = near().min_by_key(|(_, runner)| (runner.last_chosen, lot(runner.worker, seed)))?;
    Some((winner, near().count()))
}

/// A number for a worker that differs from seed to seed.
fn lot(worker: &WorkerId, seed: u64) -> u64 {
    let mut hasher = XxHash3_64::with_seed(seed);
    hasher.write(worker.node.as_str().as_bytes());
    hasher.write_u16(worker.index);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    fn worker(index: u16) -> WorkerId {
        WorkerId { node: NodeId::new("n").expect("name"), index }
    }

    #[test]
    fn nobody_wins_among_none() {
        assert_eq!(pick(&[], 0), None);
    }

    #[test]
    fn a_clearly_cheaper_one_wins_however_recently_it_was_chosen() {
        let (a, b) = (worker(0), worker(1));
        let runners = [
            Runner { worker: &a, cost: 100.0, uncertain: 100.0, last_chosen: 0 },
            Runner { worker: &b, cost: 50.0, uncertain: 50.0, last_chosen: 9 },
        ];
        assert_eq!(pick(&runners, 1), Some((1, 1)));
    }

    #[test]
    fn load_gets_no_tolerance() {
        let (a, b) = (worker(0), worker(1));
        let runners = [
            Runner { worker: &a, cost: 5_100.0, uncertain: 100.0, last_chosen: 0 },
            Runner { worker: &b, cost: 5_000.0, uncertain: 0.0, last_chosen: 9 },
        ];
        assert_eq!(pick(&runners, 1), Some((1, 1)), "the holder of the prefix, though both are busy");
    }

    #[test]
    fn near_equals_go_round() {
        let workers: Vec<_> = (0..4).map(worker).collect();
        let mut last = [0u64; 4];
        let mut counts = [0u32; 4];
        for turn in 1..=200 {
            let runners: Vec<_> = workers
                .iter()
                .zip(last)
                .enumerate()
                .map(|(at, (worker, last_chosen))| Runner {
                    worker,
                    cost: 100.0 + at as f64,
                    uncertain: 100.0,
                    last_chosen,
                })
                .collect();
            let (winner, near) = pick(&runners, 7).expect("somebody");
            assert_eq!(near, 4);
            last[winner] = turn;
            counts[winner] += 1;
        }
        assert_eq!(counts, [50; 4]);
    }

    #[test]
    fn the_first_choice_depends_on_the_seed() {
        let workers: Vec<_> = (0..4).map(worker).collect();
        let runners: Vec<_> =
            workers.iter().map(|worker| Runner { worker, cost: 1.0, uncertain: 0.0, last_chosen: 0 }).collect();
        let firsts: std::collections::BTreeSet<_> =
            (0..32).filter_map(|seed| pick(&runners, seed)).map(|(winner, _)| winner).collect();
        assert_eq!(firsts.len(), 4);
    }
}
