//! The full-state exchange: two nodes tell each other what only one of them knows.
//!
//! The one that asks: [`Driver::exchange_open`], send it, [`Driver::exchange_next`] with the reply, send what that
//! gives, and so on until it gives nothing. The one that is asked: [`Driver::exchange_serve`]. Messages are at
//! most [`EXCHANGE_MAX`] bytes. Pure.

use std::time::Duration;

use foca::Member;
use serde::{Deserialize, Serialize};

use super::Driver;
use crate::{membership::Identity, security::Dropped};

/// Longest message of an exchange in bytes.
pub const EXCHANGE_MAX: usize = 200 << 10;

#[derive(Serialize, Deserialize)]
struct State(Vec<Member<Identity>>);

impl Driver {
    /// The first question of an exchange.
    pub fn exchange_open(&mut self) -> Vec<u8> {
        rmp_serde::to_vec(&State(self.export())).unwrap_or_default()
    }

    /// Answers a question of another node's exchange.
    pub fn exchange_serve(&mut self, ask: &[u8], now: Duration) -> Result<Vec<u8>, Dropped> {
        let reply = self.exchange_open();
        self.exchange_next(ask, now)?;
        Ok(reply)
    }

    /// Takes a reply; what to ask next, if anything.
    pub fn exchange_next(&mut self, reply: &[u8], now: Duration) -> Result<Option<Vec<u8>>, Dropped> {
        let State(members) = rmp_serde::from_slice(reply).map_err(|_| Dropped::Malformed)?;
        self.import(members, now);
        Ok(None)
    }

    /// An exchange that [`super::Effect::Exchange`] asked for came to nothing: another one follows soon.
    pub fn exchange_failed(&mut self, now: Duration) {
        self.observe(now);
        self.settle();
    }
}
