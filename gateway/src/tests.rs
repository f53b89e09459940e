//! The gateway as a client meets it, with a scripted cluster behind it.

mod api;
mod cancel;
mod client;
mod connections;
mod console;
mod drain;
mod limits;
mod malformed;
mod manner;
mod meters;
mod streams;
