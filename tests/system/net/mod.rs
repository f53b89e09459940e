//! A network of its own for real processes: one namespace a node, every packet carried by the test.
//!
//! [`lab::Lab`] is what tests use. Needs root, `ip` of iproute2 and `/dev/net/tun`; where one is missing a test says
//! so in one line, is counted in a file and passes. Nothing of the kernel's traffic control is needed.

pub(crate) mod eyes;
pub(crate) mod fabric;
pub(crate) mod figures;
pub(crate) mod forward;
pub(crate) mod lab;
pub(crate) mod namespace;
pub(crate) mod packet;
pub(crate) mod tun;
