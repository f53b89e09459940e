//! Whether blocks of a peer come sooner than they are computed here, and how long to wait for them. Pure.
//!
//! Called before a ticket is opened, with this worker's own rates: a router's choice may rest on an older account, and on the
//! mean of many workers. The same comparison as the lower tiers make ([`starling_kv::tier`]), with the link in place of a disk.

use std::time::Duration;

use crate::route::{rates::Rates, split::KvLink};

/// What a ticket costs besides its bytes, milliseconds.
const TICKET_MS: f64 = 5.0;
/// Shortest and longest wait.
const WAIT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(3));

/// What is known here of moving blocks and of computing them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    /// How fast blocks come.
    pub(crate) link: KvLink,
    /// How fast they are computed; `None` before that was learned.
    pub(crate) rates: Option<Rates>,
    /// Tokens in one block.
    pub(crate) block_tokens: u32,
    /// Tokens computed in one step.
    pub(crate) step_tokens: u32,
    /// What the peer is expected to take for reading them from its own slower tiers, milliseconds; they move meanwhile.
    pub(crate) reading_ms: u32,
}

impl Known {
    /// How long to wait for so many blocks; `None` when they are computed sooner than they come. What is not known speaks
    /// for the blocks: whoever chose them had a reason.
    pub(crate) fn patience(&self, blocks: u32) -> Option<Duration> {
        let (Some(rates), Some(moving)) = (self.rates, self.link.transfer_ms(blocks)) else { return Some(WAIT.1) };
        let tokens = f64::from(blocks) * f64::from(self.block_tokens);
        let steps = (tokens / f64::from(self.step_tokens.max(1))).ceil();
        let computing = tokens * rates.prefill_ms_per_token + steps * rates.step_ms;
        // Rates that are no numbers say nothing.
        if moving.max(f64::from(self.reading_ms)) + TICKET_MS >= computing {
            return None;
        }
        // Twice as long as computing: what has come by then is kept, and whatever a moment's load cost is not paid twice.
        Some(Duration::try_from_secs_f64(computing * 2.0 / 1e3).unwrap_or(WAIT.1).clamp(WAIT.0, WAIT.1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(bytes_per_ms: f64, prefill_ms_per_token: f64) -> Known {
        let rates = Rates { prefill_ms_per_token, decode_ms_per_sequence: 1.0, step_ms: 2.0 };
        let link = KvLink { block_bytes: 1_000, bytes_per_ms };
        Known { link, rates: Some(rates), block_tokens: 16, step_tokens: 256, reading_ms: 0 }
    }

    #[test]
    fn a_link_that_is_slower_than_computing_is_not_used() {
        // 64 blocks: 64 ms and 5 beside 4 steps of 2 ms and a token's time 1,024 times.
        assert_eq!(known(1_000.0, 0.01).patience(64), None, "18 ms to compute");
        assert_eq!(known(1_000.0, 0.05).patience(64), None, "59 ms to compute");
        assert_eq!(known(1_000.0, 0.1).patience(64), Some(WAIT.0), "110 ms to compute");
        assert_eq!(known(1_000.0, 1.0).patience(64), Some(Duration::from_millis(2_064)));
        assert_eq!(known(1_000.0, 9.0).patience(64), Some(WAIT.1));
        assert_eq!(known(1.0, 1.0).patience(64), None, "a link of 1 kB/s");
    }

    #[test]
    fn a_peer_that_reads_them_slower_than_they_are_computed_is_not_waited_for() {
        // 110 ms to compute, 64 ms to move.
        let reading = |reading_ms| Known { reading_ms, ..known(1_000.0, 0.1) }.patience(64);
        assert_eq!((reading(60), reading(100), reading(106)), (Some(WAIT.0), Some(WAIT.0), None));
    }

    #[test]
    fn what_is_not_known_speaks_for_the_blocks() {
        assert_eq!(Known { rates: None, ..known(1.0, 1.0) }.patience(64), Some(WAIT.1));
        assert_eq!(known(0.0, 1.0).patience(64), Some(WAIT.1));
    }

    proptest! {
        #[test]
        fn blocks_are_waited_for_only_where_that_is_sooner(
            bytes_per_ms in 0.1f64..1e6, ms in 0.0001f64..10.0, blocks in 1u32..4_000,
        ) {
            let known = known(bytes_per_ms, ms);
            let computing = f64::from(blocks * 16) * ms + (f64::from(blocks) / 16.0).ceil() * 2.0;
            let moving = f64::from(blocks) * 1_000.0 / bytes_per_ms + TICKET_MS;
            let patience = known.patience(blocks);
            prop_assert_eq!(patience.is_some(), moving < computing);
            prop_assert!(patience.is_none_or(|wait| (WAIT.0..=WAIT.1).contains(&wait)));
        }
    }
}
