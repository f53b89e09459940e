//! Which sequence of the engine belongs to which answer of which request. Pure.
//!
//! Called by the engine thread. Fans a request out into one sequence per choice and turns what a step did to a
//! sequence into the frame of an answer. `O` is where a request's frames go; the ledger only keeps it.
//! Bounds: one entry per live sequence and request, gone with the last answer.

use std::collections::HashMap;

use starling_engine::{FinishReason, SequenceDelta, SequenceId};

use crate::generate::GenerateFrame;

/// A request at one worker; chosen by the worker, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RequestKey(pub(crate) u64);

#[derive(Debug)]
struct Entry<O> {
    outbox: O,
    /// Tokens of all its answers.
    said: u64,
    live: Vec<SequenceId>,
}

/// What a step's delta means for its request.
#[derive(Debug, PartialEq)]
pub(crate) enum Applied {
    /// The sequence was given up meanwhile.
    Unknown,
    /// News of an answer; `last` when it ends the whole request.
    Frame { key: RequestKey, frame: GenerateFrame, last: bool },
    /// The engine failed on it, or ended it without being asked.
    Failed { key: RequestKey },
}

/// The live requests of one engine.
#[derive(Debug)]
pub(crate) struct Ledger<O> {
    next: u64,
    sequences: HashMap<SequenceId, (RequestKey, u32)>,
    requests: HashMap<RequestKey, Entry<O>>,
}

impl<O> Ledger<O> {
    pub(crate) fn new() -> Self {
        Self { next: 0, sequences: HashMap::new(), requests: HashMap::new() }
    }

    /// Enters a request; returns the sequence of each of these choices, in order.
    pub(crate) fn admit(
        &mut self,
        key: RequestKey,
        choices: impl IntoIterator<Item = u32>,
        outbox: O,
    ) -> Vec<SequenceId> {
        let live: Vec<SequenceId> = choices
            .into_iter()
            .map(|choice| {
                let id = SequenceId(self.next);
                self.next += 1;
                self.sequences.insert(id, (key, choice));
                id
            })
            .collect();
        self.requests.insert(key, Entry { outbox, live: live.clone(), said: 0 });
        live
    }

    /// The sequence of one answer of a request, until it has ended.
    pub(crate) fn sequence(&self, key: RequestKey, choice: u32) -> Option<SequenceId> {
        let live = &self.requests.get(&key)?.live;
        live.iter().copied().find(|id| self.sequences.get(id).is_some_and(|(_, known)| *known == choice))
    }

    /// Answers of a request that have not ended.
    pub(crate) fn live(&self, key: RequestKey) -> usize {
        self.requests.get(&key).map_or(0, |entry| entry.live.len())
    }

    /// An answer goes on elsewhere; with the last one the request is struck out, and its outbox returned.
    pub(crate) fn leave(&mut self, key: RequestKey, id: SequenceId) -> Option<O> {
        self.sequences.remove(&id);
        let entry = self.requests.get_mut(&key)?;
        entry.live.retain(|other| *other != id);
        let gone = entry.live.is_empty();
        if gone { self.remove(key).map(|(outbox, _)| outbox) } else { None }
    }

    /// Tokens that a request has said, all its answers together.
    pub(crate) fn said(&self, key: RequestKey) -> u64 {
        self.requests.get(&key).map_or(0, |entry| entry.said)
    }

    /// Where a request's frames go.
    pub(crate) fn outbox(&self, key: RequestKey) -> Option<&O> {
        self.requests.get(&key).map(|entry| &entry.outbox)
    }

    /// Strikes a request out; returns its outbox and the sequences still to be cancelled.
    pub(crate) fn remove(&mut self, key: RequestKey) -> Option<(O, Vec<SequenceId>)> {
        let entry = self.requests.remove(&key)?;
        for id in &entry.live {
            self.sequences.remove(id);
        }
        Some((entry.outbox, entry.live))
    }

    /// Enters what a step did. A request that ended or failed stays until [`Ledger::remove`].
    pub(crate) fn apply(&mut self, delta: SequenceDelta) -> Applied {
        let Some(&(key, choice)) = self.sequences.get(&delta.id) else { return Applied::Unknown };
        if delta.finish.is_some() {
            self.sequences.remove(&delta.id);
        }
        let Some(entry) = self.requests.get_mut(&key) else { return Applied::Unknown };
        if delta.finish.is_some() {
            entry.live.retain(|id| *id != delta.id);
        }
        if matches!(delta.finish, Some(FinishReason::Cancelled | FinishReason::Error)) {
            return Applied::Failed { key };
        }
        entry.said += delta.tokens.len() as u64;
        let last = entry.live.is_empty();
        let SequenceDelta { tokens, cached_tokens, finish, .. } = delta;
        Applied::Frame { key, frame: GenerateFrame { choice, tokens, cached_tokens, finish }, last }
    }

    /// Requests that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn delta(id: SequenceId, finish: Option<FinishReason>) -> SequenceDelta {
        SequenceDelta { id, tokens: Vec::new(), cached_tokens: None, finish }
    }

    #[test]
    fn a_request_ends_with_its_last_choice() {
        let mut ledger = Ledger::new();
        let ids = ledger.admit(RequestKey(1), 0..2, ());
        let last = |applied| matches!(applied, Applied::Frame { last: true, .. });
        assert!(!last(ledger.apply(delta(ids[1], Some(FinishReason::Stop)))));
        assert!(!last(ledger.apply(delta(ids[0], None))));
        assert!(last(ledger.apply(delta(ids[0], Some(FinishReason::Length)))));
        assert_eq!(ledger.remove(RequestKey(1)), Some(((), Vec::new())));
        assert_eq!(ledger.len(), 0);
    }

    #[test]
    fn a_failed_choice_fails_the_request_and_names_what_is_left_to_cancel() {
        let mut ledger = Ledger::new();
        let ids = ledger.admit(RequestKey(1), 0..3, ());
        assert_eq!(ledger.apply(delta(ids[1], Some(FinishReason::Error))), Applied::Failed { key: RequestKey(1) });
        assert_eq!(ledger.remove(RequestKey(1)), Some(((), vec![ids[0], ids[2]])));
        assert_eq!(ledger.apply(delta(ids[0], None)), Applied::Unknown);
    }

    proptest! {
        /// Any order of finishes and removals leaves nothing behind.
        #[test]
        fn zero_at_rest(steps in proptest::collection::vec((0u64..6, 0usize..3, 0u8..3), 0..60)) {
            let mut ledger = Ledger::new();
            let ids: Vec<Vec<SequenceId>> = (0..6).map(|key| ledger.admit(RequestKey(key), 0..3, key)).collect();
            for (key, at, what) in steps {
                let key_name = RequestKey(key);
                let id = ids[key as usize][at];
                match what {
                    0 => drop(ledger.apply(delta(id, None))),
                    1 => match ledger.apply(delta(id, Some(FinishReason::Stop))) {
                        Applied::Frame { key, last: true, .. } => prop_assert!(ledger.remove(key).is_some()),
                        Applied::Failed { .. } => prop_assert!(false),
                        _ => {}
                    },
                    _ => drop(ledger.remove(key_name)),
                }
                prop_assert_eq!(ledger.outbox(key_name).is_some(), ledger.requests.contains_key(&key_name));
            }
            for key in 0..6 {
                drop(ledger.remove(RequestKey(key)));
            }
            prop_assert!(ledger.sequences.is_empty() && ledger.requests.is_empty());
        }
    }
}
