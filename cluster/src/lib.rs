//! Who is in the cluster, and how bytes travel between its nodes.
//!
//! Three planes meet here and never mix: gossip says who is a member ([`membership`]), the directory says
//! what each member offers ([`discovery`]), links carry streams of bytes ([`link`], [`stream`]). Sessions
//! ([`session`]) are actor messages for control; [`keys`] rolls the secrets that keep strangers out ([`security`]). [`mesh::Mesh`] is the handle that the rest of the product
//! and other people's programs hold; [`program`] is the typed way to use it. No type here knows what a model, a
//! prompt or a KV block is.

pub mod blobs;
pub mod config;
pub mod discovery;
pub mod keys;
pub mod link;
pub mod membership;
pub mod mesh;
pub mod near;
pub mod program;
pub mod security;
pub mod session;
pub mod stream;
pub mod supervise;
pub mod wire;
