//! Links: one TLS connection to each node in use, carrying all streams between the two.
//!
//! Reading order: `handshake` (who is there, which version), `mux` (the streams of one link), `table` (where each is),
//! `incoming` (what the other side's frames do to them), `halves` (how a
//! stream's two halves reach it), `outgoing` (what waits for the writer), `io` (bytes in and out), `actor` (owns one connection), `links` (which link
//! leads to which node, dialling), `listener` (what comes in), `layer` (all of it put together), `client`
//! (a tool's way in).

mod actor;
mod client;
mod halves;
mod handshake;
mod incoming;
mod io;
mod layer;
mod links;
mod listener;
mod mux;
mod outgoing;
mod pace;
mod table;

#[cfg(test)]
mod tests;

pub use client::{CONTROL_ENDPOINT, ClientError, ControlClient, ControlEndpoint};
pub(crate) use layer::{LinkLayer, LinkSetup};
