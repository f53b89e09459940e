//! One transfer: some blocks of one ticket, from a holder's memory into room that is reserved here.
//!
//! Called by [`super::face`]; calls a session. A [`Flight`] is held by the transfer's task and by every batch of it; the
//! last of them to let go lands it. So a task that is aborted lands its flight only when no transport writes any more.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use starling_ids::Metric;
use starling_kv::{
    layout::KvLayout,
    transport::{Batch, Checksums, Direction, Page, Refusal, TransferError},
};

use super::{
    face::{KvFace, Leg},
    reorder::Reorder,
};
use crate::transfer::{End, Party, TakerTicket, taker::Piece};

/// How long a transfer may take beside what its bytes need at 64 MiB/s.
const SLACK: Duration = Duration::from_millis(1_500);

/// See the module.
#[derive(Debug)]
pub(crate) struct Flight {
    kv: Arc<KvFace>,
    holder: Party,
    ticket: TakerTicket,
    pieces: Vec<Piece>,
    result: Mutex<Result<(), End>>,
}

impl Flight {
    pub(crate) fn new(kv: &Arc<KvFace>, holder: &Party, ticket: TakerTicket, pieces: Vec<Piece>) -> Arc<Self> {
        // What nobody says otherwise of was not brought.
        let result = Mutex::new(Err(End::Broken));
        Arc::new(Self { kv: kv.clone(), holder: holder.clone(), ticket, pieces, result })
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let result = *self.result.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.kv.landed(self.ticket, &self.pieces, result);
        // Dropped on a transport's thread only when its task is gone; the sweep goes on with what waits then.
        if tokio::runtime::Handle::try_current().is_ok() {
            self.kv.pump(&self.holder);
        }
    }
}

/// Brings the pieces of a flight.
pub(crate) async fn fly(flight: Arc<Flight>, leg: Leg) {
    let mut outcome = bring(&flight, &leg).await;
    if let (Ok(()), Some(theirs)) = (&outcome, leg.way.order) {
        outcome = reorder(&flight, theirs).await;
    }
    let result = outcome.map_err(|error| {
        tracing::debug!(ticket = ?flight.ticket, %error, "blocks were not brought");
        if matches!(error, TransferError::PeerGone | TransferError::Unreachable(_) | TransferError::Timeout) {
            flight.kv.agent.forget(leg.way.session.peer(), leg.way.region);
        }
        reason(&error)
    });
    *flight.result.lock().unwrap_or_else(PoisonError::into_inner) = result;
}

async fn bring(flight: &Arc<Flight>, leg: &Leg) -> Result<(), TransferError> {
    let transport = leg.way.session.kind().name();
    for batch in batches(flight, leg) {
        let bytes = batch.bytes();
        let transfer = leg.way.session.post(batch);
        let mut over = leg.over.subscribe();
        let outcome = tokio::select! {
            biased;
            _ = over.wait_for(|over| *over) => Err(TransferError::Cancelled),
            outcome = transfer => outcome,
        };
        let done = outcome?;
        metrics::counter!(Metric::TransferBytes.name(), "transport" => transport).increment(bytes);
        metrics::histogram!(Metric::TransferSeconds.name(), "transport" => transport).record(done.took.as_secs_f64());
        if let Some(rate) = leg.way.session.bandwidth() {
            metrics::gauge!(Metric::TransferRate.name(), "transport" => transport).set(rate);
            flight.kv.agent.learn(rate);
        }
    }
    Ok(())
}

/// Puts what came, verified as it was sent, into the order of this worker. No runtime thread waits for it; the blocks are the
/// flight's alone until it lands.
async fn reorder(flight: &Arc<Flight>, theirs: KvLayout) -> Result<(), TransferError> {
    let flight = flight.clone();
    let work = move || {
        let kv = &flight.kv;
        let ours = kv.shape.ok_or_else(|| TransferError::Local("the own layout is not known".to_owned()))?;
        let mut blocks = Reorder::new(&kv.memory, theirs, ours);
        flight.pieces.iter().try_for_each(|piece| blocks.turn(piece.to))?;
        metrics::counter!(Metric::TransferConverted.name()).increment(flight.pieces.len() as u64);
        Ok(())
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(TransferError::Local(error.to_string())))
}

/// One batch for each grant that the pieces lie under.
fn batches(flight: &Arc<Flight>, leg: &Leg) -> Vec<Batch> {
    let len = flight.kv.memory.block_bytes;
    let mut waves: BTreeMap<u32, (Vec<Page>, Vec<u64>)> = BTreeMap::new();
    for piece in &flight.pieces {
        let (local, remote) = (u64::from(piece.to.0) * len, u64::from(piece.granted.slot.0) * len);
        let (pages, sums) = waves.entry(piece.granted.wave).or_default();
        pages.push(Page { local, remote, len: u32::try_from(len).unwrap_or(u32::MAX) });
        sums.push(piece.granted.checksum);
    }
    let batch = |(wave, (pages, sums)): (u32, (Vec<Page>, Vec<u64>))| {
        let grant = *leg.grants.get(wave as usize)?;
        let bytes = len * pages.len() as u64;
        let batch = Batch::new(Direction::Pull, &flight.kv.memory.region, leg.way.region, pages, grant);
        let deadline = SLACK + Duration::from_millis(bytes.saturating_mul(1_000) >> 26);
        Some(batch.with_checksums(Checksums::Pages(sums)).within(deadline).holding(flight.clone()))
    };
    waves.into_iter().filter_map(batch).collect()
}

fn reason(error: &TransferError) -> End {
    match error {
        TransferError::Checksum { .. } => End::Corrupt,
        TransferError::Refused(Refusal::Expired) => End::Expired,
        TransferError::PeerGone | TransferError::Unreachable(_) => End::PeerGone,
        TransferError::Cancelled => End::Aborted,
        _ => End::Broken,
    }
}
