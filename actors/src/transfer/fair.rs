//! Who is served next from one peer: deficit round robin over requests.
//!
//! Called by [`super::taker`]. Each request in its turn gets a quantum of bytes; what it does not use is lost when its queue
//! is empty and kept while its next piece is larger. Never: starves a request. Bounds: those of what is pushed.
//! The method is that of Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin" (1995).

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
};

#[derive(Debug)]
struct Queue<T> {
    deficit: u64,
    pieces: VecDeque<(T, u64)>,
}

/// Pieces of requests `K`, each with a size in bytes.
#[derive(Debug)]
pub struct Fair<K, T> {
    quantum: u64,
    turns: VecDeque<K>,
    queues: HashMap<K, Queue<T>>,
}

impl<K: Copy + Eq + Hash, T> Fair<K, T> {
    /// Nothing queued; `quantum` bytes a turn, at least 1.
    #[must_use]
    pub fn new(quantum: u64) -> Self {
        Self { quantum: quantum.max(1), turns: VecDeque::new(), queues: HashMap::new() }
    }

    /// Queues a piece behind the others of its request.
    pub fn push(&mut self, key: K, piece: T, bytes: u64) {
        let queue = self.queues.entry(key).or_insert_with(|| {
            self.turns.push_back(key);
            Queue { deficit: 0, pieces: VecDeque::new() }
        });
        queue.pieces.push_back((piece, bytes));
    }

    /// The pieces of one turn: of one request, at most a quantum and what it saved. `None` when nothing is queued.
    pub fn turn(&mut self) -> Option<(K, Vec<T>)> {
        loop {
            let key = self.turns.pop_front()?;
            let Some(queue) = self.queues.get_mut(&key) else { continue };
            queue.deficit = queue.deficit.saturating_add(self.quantum);
            let mut taken = Vec::new();
            while let Some((_, bytes)) = queue.pieces.front() {
                if *bytes > queue.deficit {
                    break;
                }
                queue.deficit -= bytes;
                taken.extend(queue.pieces.pop_front().map(|(piece, _)| piece));
            }
            if queue.pieces.is_empty() {
                self.queues.remove(&key);
            } else {
                self.turns.push_back(key);
            }
            // A piece larger than a quantum waits for its request to save up; others go on meanwhile.
            if !taken.is_empty() {
                return Some((key, taken));
            }
        }
    }

    /// Forgets a request.
    pub fn remove(&mut self, key: K) {
        if self.queues.remove(&key).is_some() {
            self.turns.retain(|other| *other != key);
        }
    }

    /// Whether nothing is queued.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_large_request_does_not_hold_up_a_small_one() {
        let mut fair = Fair::new(100);
        (0..50).for_each(|piece| fair.push('l', piece, 30));
        fair.push('s', 0, 30);
        assert_eq!(fair.turn(), Some(('l', vec![0, 1, 2])));
        assert_eq!(fair.turn(), Some(('s', vec![0])));
        assert_eq!(fair.turn(), Some(('l', vec![3, 4, 5])), "10 were saved: 110 is three of 30");
        fair.remove('l');
        assert_eq!(fair.turn(), None);
        assert!(fair.is_empty());
    }

    proptest! {
        /// Every piece comes once and in order, and while two requests both wait neither is more than a quantum and its
        /// largest piece ahead.
        #[test]
        fn everything_comes_and_shares_are_even(
            sizes in proptest::collection::vec((0usize..3, 1u64..250), 1..80),
        ) {
            let mut fair = Fair::new(100);
            let mut left = [0usize; 3];
            for (at, (key, bytes)) in sizes.iter().enumerate() {
                fair.push(*key, at, *bytes);
                left[*key] += 1;
            }
            let (mut had, mut last) = ([0u64; 3], [None; 3]);
            while let Some((key, pieces)) = fair.turn() {
                for piece in pieces {
                    prop_assert!(last[key] < Some(piece));
                    last[key] = Some(piece);
                    had[key] += sizes[piece].1;
                    left[key] -= 1;
                }
                for a in 0..3 {
                    for b in 0..3 {
                        if left[a] > 0 && left[b] > 0 {
                            prop_assert!(had[a].abs_diff(had[b]) <= 100 + 2 * 250, "{had:?}");
                        }
                    }
                }
            }
            prop_assert_eq!(left, [0; 3]);
        }
    }
}
