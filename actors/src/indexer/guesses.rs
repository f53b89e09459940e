//! What a worker that tells nothing of its blocks may hold: the prompts that were given to it, for a while.
//!
//! Kept by [`super::knowledge`], one for each such worker; what it names goes into the prefix index like events. A prompt's
//! blocks are new again whenever they are used; the end of a prompt goes before its beginning, as in an engine's own cache.
//! Pure: time is an argument. Bounds: the blocks of the worker's pool; those used longest ago make way.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use starling_ids::BlockHash;

/// How long a prompt is believed to be kept after its last use.
pub(super) const GUESS_MAX: Duration = Duration::from_secs(120);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    /// Until when a block is believed to be there.
    until: HashMap<BlockHash, Duration>,
    /// In the order of those times; entries that were used again since are passed over.
    order: VecDeque<(Duration, BlockHash)>,
}

impl Guesses {
    /// A prompt was given to it; which blocks must have made way in a pool of so many.
    pub(super) fn expect(&mut self, chain: &[BlockHash], blocks_max: usize, now: Duration) -> Vec<BlockHash> {
        let until = now + GUESS_MAX;
        for hash in chain.iter().rev() {
            self.until.insert(*hash, until);
            self.order.push_back((until, *hash));
        }
        let mut gone = Vec::new();
        while self.until.len() > blocks_max.max(1)
            && let Some((due, hash)) = self.order.pop_front()
        {
            self.drop_if(due, hash, &mut gone);
        }
        if self.order.len() > 2 * self.until.len() + 1_024 {
            let Self { until, order } = self;
            order.retain(|(due, hash)| until.get(hash) == Some(due));
        }
        gone
    }

    /// Blocks that are too old to be believed in.
    pub(super) fn expire(&mut self, now: Duration) -> Vec<BlockHash> {
        let mut gone = Vec::new();
        while let Some((due, hash)) = self.order.front().copied().filter(|(due, _)| *due <= now) {
            self.order.pop_front();
            self.drop_if(due, hash, &mut gone);
        }
        gone
    }

    fn drop_if(&mut self, due: Duration, hash: BlockHash, gone: &mut Vec<BlockHash>) {
        if self.until.get(&hash) == Some(&due) {
            self.until.remove(&hash);
            gone.push(hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn chain(blocks: std::ops::Range<u128>) -> Vec<BlockHash> {
        blocks.map(BlockHash).collect()
    }

    #[test]
    fn a_prompt_used_again_stays_and_its_end_goes_first() {
        let mut guesses = Guesses::default();
        let s = Duration::from_secs;
        assert!(guesses.expect(&chain(0..3), 100, s(0)).is_empty());
        guesses.expect(&chain(10..12), 100, s(1));
        guesses.expect(&chain(0..2), 100, s(60));
        assert_eq!(guesses.expire(s(119)), []);
        assert_eq!(guesses.expire(s(120)), [BlockHash(2)], "the rest was used again");
        assert_eq!(guesses.expire(s(125)), [BlockHash(11), BlockHash(10)]);
        assert_eq!(guesses.expect(&chain(20..22), 3, s(126)), [BlockHash(1)]);
    }

    proptest! {
        /// Never more than the pool holds, nothing named twice, and memory follows what is believed.
        #[test]
        fn what_is_believed_is_what_was_given_and_not_taken_back(
            given in prop::collection::vec((0u128..200, 1u128..30, 0u64..20), 1..200),
            most in 1usize..100,
        ) {
            let (mut guesses, mut believed, mut now) = (Guesses::default(), HashSet::new(), Duration::ZERO);
            for (from, len, pause) in given {
                now += Duration::from_secs(pause);
                for hash in guesses.expire(now) {
                    prop_assert!(believed.remove(&hash));
                }
                let gone = guesses.expect(&chain(from..from + len), most, now);
                believed.extend(chain(from..from + len));
                for hash in gone {
                    prop_assert!(believed.remove(&hash));
                }
                prop_assert!(believed.len() <= most);
                prop_assert_eq!(believed.len(), guesses.until.len());
                prop_assert!(guesses.order.len() <= 2 * believed.len() + 1_024);
            }
            now += GUESS_MAX;
            prop_assert_eq!(guesses.expire(now).len(), believed.len());
        }
    }
}
