//! What happens next: events by time, those of one instant in the order in which they were added.
//!
//! Called by the world for every event. Pure. Bounds: what is in flight, plus one tick for each node and outdated ones.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::Micros;

/// A priority queue of events.
#[derive(Debug)]
pub(super) struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    added: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Micros,
    order: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Micros, u64) {
        (self.at, self.order)
    }
}

// The heap yields the greatest: the earliest compares as that.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> Queue<E> {
    pub(super) fn with_capacity(events: usize) -> Self {
        Self { heap: BinaryHeap::with_capacity(events), added: 0 }
    }

    pub(super) fn add(&mut self, at: Micros, event: E) {
        self.added += 1;
        self.heap.push(Entry { at, order: self.added, event });
    }

    /// The next event if it is due by `until`, and when.
    pub(super) fn pop_by(&mut self, until: Micros) -> Option<(Micros, E)> {
        if self.heap.peek()?.at > until {
            return None;
        }
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earliest_first_and_of_one_instant_in_order() {
        let mut queue = Queue::with_capacity(4);
        for (at, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            queue.add(at, event);
        }
        let order: Vec<char> = std::iter::from_fn(|| queue.pop_by(5)).map(|(_, event)| event).collect();
        assert_eq!(order, ['a', 'b', 'c', 'd']);
        queue.add(9, 'e');
        assert_eq!(queue.pop_by(8), None);
    }
}
