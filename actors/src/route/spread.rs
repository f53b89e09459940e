//! Over how many router nodes the decisions about one model are spread.
//!
//! Called by each router shard once in [`WINDOW`] with what it decided meanwhile. A shard that decides more than it should
//! wishes for twice as many parts; what is in force is the highest wish of all live shards, so that one hot shard is enough to
//! split, and all must be calm to merge. Calm is a quarter of the bound: two parts that merge stay below half of it, and
//! nothing swings. A part is found by the prompt's first block or its session ([`super::slots`]), so what belongs together
//! stays together. Pure.

use std::time::Duration;

/// How long decisions are counted before they are looked at.
pub const WINDOW: Duration = Duration::from_secs(1);

/// Parts of one model at most.
pub const PARTS_MAX: u32 = 64;

/// When a shard wishes for more parts, or for fewer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpreadRule {
    /// Decisions in a second for one model that one shard should make at most.
    pub per_second: f64,
    /// How long all must be calm before parts are merged. No setting: merging early or late costs little.
    pub calm: Duration,
}

impl Default for SpreadRule {
    /// 4,000 in a second, about half of what one lock gives away; merged after half a minute.
    fn default() -> Self {
        Self { per_second: 4_000.0, calm: Duration::from_secs(30) }
    }
}

/// One shard's view of one model. See the module.
#[derive(Debug, Default)]
pub struct Spread {
    since: Option<Duration>,
    decided: u64,
    wish: Option<u32>,
    calm_since: Option<Duration>,
}

impl Spread {
    /// One more decision was made.
    pub fn decided(&mut self) {
        self.decided += 1;
    }

    /// How many parts this shard wishes for, a power of two. `parts` are in force, `routers` are there to have them.
    pub fn look(&mut self, rule: SpreadRule, (parts, routers): (u32, usize), now: Duration) -> u32 {
        let since = *self.since.get_or_insert(now);
        let passed = now.saturating_sub(since);
        if passed < WINDOW {
            return self.wish.unwrap_or(1);
        }
        let rate = self.decided as f64 / passed.as_secs_f64();
        (self.since, self.decided) = (Some(now), 0);
        let (parts, before) = (parts.max(1), self.wish.unwrap_or(1));
        let busy = rate * 4.0 >= rule.per_second;
        let calm_since = *self.calm_since.get_or_insert(now);
        let wish = if rate > rule.per_second {
            parts.saturating_mul(2).min(parts_for(routers).max(parts))
        } else if busy {
            parts
        } else if now.saturating_sub(calm_since) >= rule.calm {
            self.calm_since = None;
            parts / 2
        } else {
            // Those who wished for more say when they are too many.
            before.min(parts)
        };
        if busy {
            self.calm_since = None;
        }
        *self.wish.insert(wish.max(1))
    }
}

/// As many parts as are of use with so many routers: each has one of them, or two.
fn parts_for(routers: usize) -> u32 {
    u32::try_from(routers).unwrap_or(u32::MAX).clamp(1, PARTS_MAX).next_power_of_two().min(PARTS_MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULE: SpreadRule = SpreadRule { per_second: 100.0, calm: Duration::from_secs(5) };

    /// Shards that share a load by the parts in force: parts after each second, with who decides in which part.
    struct World {
        shards: Vec<Spread>,
        wishes: Vec<u32>,
        second: u64,
    }

    impl World {
        fn new(shards: usize) -> Self {
            let mut shards: Vec<Spread> = std::iter::repeat_with(Spread::default).take(shards).collect();
            for shard in &mut shards {
                assert_eq!(shard.look(RULE, (1, 1), Duration::ZERO), 1);
            }
            Self { wishes: vec![1; shards.len()], shards, second: 0 }
        }

        fn parts(&self) -> u32 {
            self.wishes.iter().copied().max().unwrap_or(1)
        }

        /// One second of so many decisions, spread evenly over the parts.
        fn pass(&mut self, decisions: u64) -> u32 {
            let (parts, routers) = (self.parts(), self.shards.len());
            for at in 0..decisions {
                let part = at % u64::from(parts);
                self.shards[part as usize % routers].decided();
            }
            self.second += 1;
            let now = Duration::from_secs(self.second);
            for (shard, wish) in self.shards.iter_mut().zip(&mut self.wishes) {
                *wish = shard.look(RULE, (parts, routers), now);
            }
            self.parts()
        }
    }

    #[test]
    fn a_hot_model_is_split_and_a_calm_one_is_merged_after_a_while() {
        let mut world = World::new(4);
        assert_eq!(world.pass(90), 1);
        assert_eq!([world.pass(350), world.pass(350), world.pass(350)], [2, 4, 4]);
        // Far less than before and still too much to merge.
        assert!((0..20).all(|_| world.pass(120) == 4));
        let after: Vec<u32> = (0..14).map(|_| world.pass(20)).collect();
        assert_eq!((after[0], after[4], after[13]), (4, 4, 1), "{after:?}");
    }

    #[test]
    fn there_are_no_more_parts_than_routers_can_have() {
        let mut world = World::new(1);
        assert!((0..10).all(|_| world.pass(100_000) == 1));
        let mut world = World::new(3);
        let parts = (0..10).map(|_| world.pass(100_000)).max();
        assert_eq!(parts, Some(4));
    }

    #[test]
    fn a_shard_that_begins_does_not_undo_what_others_wish() {
        let mut world = World::new(2);
        world.pass(150);
        assert_eq!(world.pass(150), 2);
        world.shards[1] = Spread::default();
        assert!((0..20).all(|_| world.pass(150) == 2));
    }

    proptest! {
        /// A load that stays within a narrow band never makes the number of parts swing.
        #[test]
        fn a_steady_load_settles(load in 0u64..2_000, wobble in prop::collection::vec(0u64..10, 120), shards in 1usize..6) {
            let mut world = World::new(shards);
            let parts: Vec<u32> = wobble.iter().map(|more| world.pass(load + load * more / 100)).collect();
            let turns = parts.windows(2).filter(|pair| pair[0] > pair[1]).count();
            prop_assert!(turns == 0, "{parts:?}");
            prop_assert!(parts.iter().all(|parts| parts.is_power_of_two() && *parts <= PARTS_MAX));
        }
    }
}
