//! What each worker has in flight, as far as this shard gave it.
//!
//! Called by [`super::decide`] and by the guard that gives a reservation back. A reservation is counted under
//! (worker, incarnation), so the late end of a request to an earlier life touches only that life's row, and a
//! row that holds nothing is dropped. Counts can therefore never fall below zero nor leak.
//! Bounds: one entry per reservation held. Never: a clock; times are given.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use starling_ids::{Incarnation, RequestId, WorkerId};

/// What a request takes up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// Sequences: its choices.
    pub sequences: u32,
    /// Prompt tokens that are not expected in the worker's cache.
    pub uncached_tokens: u64,
    /// Token budget of the answer, all choices together.
    pub answer_tokens: u64,
}

/// Names one reservation; given back once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReservationKey {
    /// Where.
    pub worker: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// For which request.
    pub request: RequestId,
    /// Tells two reservations of one request apart.
    pub serial: u64,
}

/// What a worker has in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Requests.
    pub requests: u32,
    /// Sequences.
    pub sequences: u32,
    /// Uncached prompt tokens reserved and not yet in the worker's own report.
    pub unreported_tokens: u64,
    /// Answer budgets.
    pub answer_tokens: u64,
}

#[derive(Debug, Default)]
struct Row {
    requests: u32,
    sequences: u32,
    answer_tokens: u64,
    /// (serial, when reserved, uncached tokens), oldest first.
    recent: VecDeque<(u64, Duration, u64)>,
}

/// The book of one shard.
#[derive(Debug, Default)]
pub struct LoadBook {
    rows: HashMap<(WorkerId, Incarnation), Row>,
    held: HashMap<ReservationKey, Need>,
    serial: u64,
}

impl LoadBook {
    /// Counts a request on a worker until [`LoadBook::release`].
    pub fn reserve(
        &mut self,
        worker: &WorkerId,
        incarnation: Incarnation,
        request: RequestId,
        (need, now): (Need, Duration),
    ) -> ReservationKey {
        self.serial += 1;
        let row = self.rows.entry((worker.clone(), incarnation)).or_default();
        row.requests += 1;
        row.sequences += need.sequences;
        row.answer_tokens += need.answer_tokens;
        row.recent.push_back((self.serial, now, need.uncached_tokens));
        let key = ReservationKey { worker: worker.clone(), incarnation, request, serial: self.serial };
        self.held.insert(key.clone(), need);
        key
    }

    /// Gives a reservation back. False when it was given back before.
    pub fn release(&mut self, key: &ReservationKey) -> bool {
        let Some(need) = self.held.remove(key) else { return false };
        let place = (key.worker.clone(), key.incarnation);
        if let Some(row) = self.rows.get_mut(&place) {
            row.requests -= 1;
            row.sequences -= need.sequences;
            row.answer_tokens -= need.answer_tokens;
            row.recent.retain(|(serial, ..)| *serial != key.serial);
            if row.requests == 0 {
                self.rows.remove(&place);
            }
        }
        true
    }

    /// What a worker's life has in flight. `heard` is when its last report came: prompt tokens reserved before
    /// it are in the report already.
    #[must_use]
    pub fn in_flight(&self, worker: &WorkerId, incarnation: Incarnation, heard: Option<Duration>) -> InFlight {
        let Some(row) = self.rows.get(&(worker.clone(), incarnation)) else { return InFlight::default() };
        let since = |at: &Duration| heard.is_none_or(|heard| *at > heard);
        let unreported_tokens = row.recent.iter().rev().take_while(|(_, at, _)| since(at)).map(|(.., n)| n).sum();
        InFlight {
            requests: row.requests,
            sequences: row.sequences,
            unreported_tokens,
            answer_tokens: row.answer_tokens,
        }
    }

    /// Reservations held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use starling_ids::NodeId;

    use super::*;

    fn worker(index: u16) -> WorkerId {
        WorkerId { node: NodeId::new("n").expect("name"), index }
    }

    fn need() -> Need {
        Need { sequences: 2, uncached_tokens: 100, answer_tokens: 64 }
    }

    const AT: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn cnt_03_a_late_end_of_an_earlier_life_leaves_the_new_one_alone() {
        let mut book = LoadBook::default();
        let w = worker(0);
        let old = book.reserve(&w, Incarnation(1), RequestId(1), (need(), AT(0)));
        let new = book.reserve(&w, Incarnation(2), RequestId(2), (need(), AT(1)));
        assert!(book.release(&old));
        assert!(!book.release(&old), "given back once");
        assert_eq!(book.in_flight(&w, Incarnation(2), None).requests, 1);
        assert_eq!(book.in_flight(&w, Incarnation(1), None), InFlight::default());
        assert!(book.release(&new));
        assert!(book.is_empty());
        assert!(book.rows.is_empty());
    }

    #[test]
    fn tokens_that_a_report_covers_are_not_counted_twice() {
        let mut book = LoadBook::default();
        let w = worker(0);
        book.reserve(&w, Incarnation(1), RequestId(1), (need(), AT(10)));
        book.reserve(&w, Incarnation(1), RequestId(2), (need(), AT(30)));
        let tokens = |heard| book.in_flight(&w, Incarnation(1), heard).unreported_tokens;
        assert_eq!(tokens(None), 200);
        assert_eq!(tokens(Some(AT(20))), 100);
        assert_eq!(tokens(Some(AT(30))), 0);
        assert_eq!(book.in_flight(&w, Incarnation(1), Some(AT(30))).sequences, 4);
    }

    proptest! {
        /// Whatever the order of reservations and releases, double releases included, the book counts what is held.
        #[test]
        fn the_book_counts_what_is_held(steps in proptest::collection::vec((0u16..3, 0u64..2, any::<bool>()), 0..80)) {
            let mut book = LoadBook::default();
            let mut held: Vec<ReservationKey> = Vec::new();
            let mut given: Vec<ReservationKey> = Vec::new();
            for (at, (index, life, take)) in steps.into_iter().enumerate() {
                if take {
                    held.push(book.reserve(&worker(index), Incarnation(life), RequestId(7), (need(), AT(at as u64))));
                } else if let Some(key) = held.pop() {
                    prop_assert!(book.release(&key));
                    given.push(key);
                } else if let Some(key) = given.last() {
                    prop_assert!(!book.release(key));
                }
                for index in 0..3 {
                    for life in 0..2 {
                        let count = held.iter().filter(|k| k.worker.index == index && k.incarnation.0 == life).count();
                        let seen = book.in_flight(&worker(index), Incarnation(life), None);
                        prop_assert_eq!(seen.requests as usize, count);
                        prop_assert_eq!(seen.sequences as usize, 2 * count);
                    }
                }
            }
            prop_assert_eq!(book.len(), held.len());
        }
    }
}
