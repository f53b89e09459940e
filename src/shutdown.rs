//! The two ways to end: in order on the first signal, at once on the second.
//!
//! Called by the verbs that run a node. Nothing else in the process listens to signals.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C and SIGTERM, from the moment of [`Ending::listen`].
#[derive(Debug)]
pub struct Ending {
    interrupt: Signal,
    terminate: Signal,
}

impl Ending {
    /// Starts to listen. Before this call a signal ends the process the usual way.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Resolves at the next signal. Cancel-safe: a signal is never lost between two calls.
    pub async fn signal(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
