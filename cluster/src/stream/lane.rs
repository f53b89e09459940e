//! The sender's side of one direction: what of the reader's window is left, and why to stop.
//!
//! Held by [`super::StreamTx`] and by whoever grants credits: a link's table or a local reader. Never waits itself.

use std::sync::{Arc, OnceLock};

use tokio::sync::{Notify, Semaphore, TryAcquireError};

use super::{Context, StreamError, gauges::CreditCount, window::Window};

#[derive(Debug)]
pub(crate) struct Lane {
    /// Bytes of the window that are free.
    credits: Semaphore,
    window: Window,
    stop: OnceLock<StreamError>,
    stopped: Notify,
    count: CreditCount,
}

impl Lane {
    /// A lane to a reader with this window.
    pub(crate) fn new(context: &Context, window: Window) -> Arc<Self> {
        let (credits, count) = (Semaphore::new(window.size() as usize), CreditCount::new(context));
        Arc::new(Self { credits, window, stop: OnceLock::new(), stopped: Notify::new(), count })
    }

    /// What a frame of `len` bytes takes of the window.
    pub(crate) fn cost(&self, len: usize) -> u32 {
        self.window.cost(len)
    }

    /// Takes `cost` of the window if it is free now.
    pub(crate) fn try_take(&self, cost: u32) -> Result<Credit<'_>, TryAcquireError> {
        self.credits.try_acquire_many(cost).map(tokio::sync::SemaphorePermit::forget)?;
        Ok(Credit { lane: self, cost })
    }

    /// Waits until `cost` of the window is free and takes it; in the order of asking.
    pub(crate) async fn take(&self, cost: u32) -> Result<Credit<'_>, StreamError> {
        match self.credits.acquire_many(cost).await {
            Ok(permit) => permit.forget(),
            Err(_) => return Err(self.stopped()),
        }
        Ok(Credit { lane: self, cost })
    }

    /// The reader gave `amount` back. More than is outstanding would let a peer grow our queues, so it is cut.
    pub(crate) fn grant(&self, amount: u32) {
        let room = (self.window.size() as usize).saturating_sub(self.credits.available_permits());
        let amount = (amount as usize).min(room);
        self.count.credited(amount);
        self.credits.add_permits(amount);
    }

    /// Nothing more may be sent; the first reason stays.
    pub(crate) fn stop(&self, reason: StreamError) {
        // Not the first one: the sender knows already.
        self.stop.set(reason).ok();
        self.credits.close();
        self.stopped.notify_waiters();
    }

    /// Why nothing more may be sent, if so.
    pub(crate) fn reason(&self) -> Option<&StreamError> {
        self.stop.get()
    }

    pub(crate) fn stopped(&self) -> StreamError {
        self.stop.get().cloned().unwrap_or(StreamError::Cancelled)
    }

    /// Resolves when nothing more may be sent.
    pub(crate) async fn wait_stopped(&self) -> StreamError {
        loop {
            // Listens before it looks, so that a stop in between is not missed.
            let stopped = self.stopped.notified();
            if let Some(reason) = self.stop.get() {
                return reason.clone();
            }
            stopped.await;
        }
    }

    /// The sender will send no more.
    pub(crate) fn sender_gone(&self) {
        self.count.sender_gone();
    }
}

/// A part of the window that was taken; given back when it is dropped unused.
#[derive(Debug)]
pub(crate) struct Credit<'a> {
    lane: &'a Lane,
    cost: u32,
}

impl Credit<'_> {
    /// The frame is on its way; the reader gives the credit back.
    pub(crate) fn spend(self) {
        self.lane.count.sent(self.cost as usize);
        std::mem::forget(self);
    }
}

impl Drop for Credit<'_> {
    fn drop(&mut self) {
        self.lane.credits.add_permits(self.cost as usize);
    }
}
