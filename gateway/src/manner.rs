//! What a request's headers say about how it is to be routed: its session, and wishes about the worker.
//!
//! Called by the handlers once the key is known. A header that asks for more than the key allows is refused, never
//! ignored: who pins a request must not believe that it was pinned.

use hyper::HeaderMap;
use starling_actors::route::wishes::{Selector, Wishes};
use starling_ids::{NodeId, WorkerId};

use crate::{
    caller::{Caller, Scope},
    error::HttpFault,
};

/// Only this worker: `NODE/INDEX`.
pub(crate) const WORKER: &str = "x-starling-worker";
/// Only workers of these labels.
pub(crate) const SELECT: &str = "x-starling-select";
/// Taints that are borne, joined by commas.
pub(crate) const TOLERATE: &str = "x-starling-tolerate";
/// Only workers of this revision of the model, by their label `revision`.
pub(crate) const REVISION: &str = "x-starling-revision";
/// The LoRA adapter to compute with; only workers that have it.
pub(crate) const ADAPTER: &str = "x-starling-adapter";
/// `1`: the decision is told in the reply, under the same name.
pub(crate) const RECEIPT: &str = "x-starling-receipt";

/// Longest session name, bytes.
const SESSION_BYTES_MAX: usize = 256;
/// Longest name of a revision or an adapter, bytes.
const NAME_BYTES_MAX: usize = 128;
/// Taints that one request may name.
const TAINTS_MAX: usize = 16;

/// How a request is to be routed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Manner {
    pub(crate) session: Option<String>,
    pub(crate) wishes: Wishes,
    pub(crate) adapter: Option<String>,
}

impl Manner {
    /// From a request's head. `session_header` is in lower case.
    pub(crate) fn of(headers: &HeaderMap, session_header: &str, caller: &Caller) -> Result<Self, HttpFault> {
        let mut wishes = Wishes::default();
        if let Some(text) = text(headers, WORKER)? {
            caller.need(Scope::Pin, WORKER)?;
            wishes.worker = Some(worker(text)?);
        }
        if let Some(text) = text(headers, SELECT)? {
            caller.need(Scope::Select, SELECT)?;
            Selector::parse(text).map_err(|reason| wrong(SELECT, reason))?;
            text.clone_into(&mut wishes.select);
        }
        if let Some(text) = text(headers, TOLERATE)? {
            caller.need(Scope::Select, TOLERATE)?;
            wishes.tolerate = text.split(',').map(|taint| taint.trim().to_owned()).collect();
            if wishes.tolerate.len() > TAINTS_MAX || wishes.tolerate.iter().any(String::is_empty) {
                return Err(wrong(TOLERATE, format!("names 1 to {TAINTS_MAX} taints, joined by commas")));
            }
        }
        wishes.revision = name(headers, REVISION)?;
        let adapter = name(headers, ADAPTER)?;
        wishes.receipt = match text(headers, RECEIPT)? {
            None | Some("0") => false,
            Some("1") => true,
            Some(_) => return Err(wrong(RECEIPT, "is 1 or 0".to_owned())),
        };
        let session = headers.get(session_header).map(|value| {
            let bytes = value.as_bytes();
            // Any bytes are a name; they are compared, never shown.
            let good = (1..=SESSION_BYTES_MAX).contains(&bytes.len());
            good.then(|| String::from_utf8_lossy(bytes).into_owned()).ok_or_else(|| HttpFault::Header {
                name: session_header.to_owned(),
                rule: format!("has 1 to {SESSION_BYTES_MAX} bytes"),
            })
        });
        Ok(Self { session: session.transpose()?, wishes, adapter })
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<Option<&'a str>, HttpFault> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    value.to_str().map(|text| Some(text.trim())).map_err(|_| wrong(name, "is ASCII text".to_owned()))
}

/// A name of which every caller may ask for.
fn name(headers: &HeaderMap, header: &'static str) -> Result<Option<String>, HttpFault> {
    let Some(name) = text(headers, header)? else { return Ok(None) };
    let good = (1..=NAME_BYTES_MAX).contains(&name.len());
    good.then(|| Some(name.to_owned())).ok_or_else(|| wrong(header, format!("has 1 to {NAME_BYTES_MAX} bytes")))
}

fn worker(text: &str) -> Result<WorkerId, HttpFault> {
    let read = || {
        let (node, index) = text.rsplit_once('/')?;
        Some(WorkerId { node: NodeId::new(node).ok()?, index: index.parse().ok()? })
    };
    read().ok_or_else(|| wrong(WORKER, "is NODE/INDEX, for example box/0".to_owned()))
}

fn wrong(name: &'static str, rule: String) -> HttpFault {
    HttpFault::Header { name: name.to_owned(), rule }
}
