//! One sequence's call: posted, its answer read event by event, the end told in any case.
//!
//! Called by `io`, as a task of its thread, which ends when the engine drops the other end of `given_up`. Bounds: [`BEGIN_WITHIN`]
//! to the first byte, [`SILENT_MAX`] between two; the news channel, on which it waits, and the server with it.

use std::time::Duration;

use serde_json::Value;
use starling_ids::Metric;
use tokio::time::timeout;

use super::{
    dialect::{Chunk, End, message},
    http::{Answer, Failure},
    io::{Launch, News, Outlet, Shared},
    sse::Events,
};
use crate::contract::SequenceFault;

/// How long a server may be silent before its answer begins: a long prompt behind others takes its time, and one that hangs is
/// noticed by its health.
const BEGIN_WITHIN: Duration = Duration::from_secs(300);
/// How long it may be silent within an answer.
const SILENT_MAX: Duration = Duration::from_secs(60);

/// Runs a call to its end.
pub(super) async fn run(shared: &Shared, launch: Launch, outlet: &Outlet) {
    let Launch { id, call, mut reader, .. } = launch;
    let mut outcome = "answered";
    let spoken = async {
        let posted = timeout(BEGIN_WITHIN, shared.server.post(call.path, &call.body)).await;
        let answer = posted.map_err(|_| Failure::Late(BEGIN_WITHIN))??;
        if answer.status() != 200 {
            return Ok(Some(refused(answer).await));
        }
        listen(answer, |data| {
            let chunk = match data {
                Some(data) => reader.read(data),
                None => Ok(reader.close()),
            };
            let chunk = chunk.unwrap_or_else(|reason| failed(SequenceFault::Gone(reason)));
            if let Some(End::Fault(fault)) = &chunk.end {
                outcome = label(fault);
            }
            let last = chunk.end.is_some();
            async move {
                outlet.send(News::Chunk(id, chunk)).await;
                last
            }
        })
        .await
    };
    let spoken: Result<Option<SequenceFault>, Failure> = spoken.await;
    let fault = match spoken {
        Ok(None) => None,
        Ok(Some(fault)) => Some(fault),
        Err(failure) => {
            shared.doubt.notify_one();
            Some(SequenceFault::Gone(format!("{} at {}: {failure}", shared.dialect, shared.server.place())))
        }
    };
    let outcome = fault.as_ref().map_or(outcome, label);
    metrics::counter!(Metric::EngineCalls.name(), "engine" => shared.dialect.label(), "outcome" => outcome)
        .increment(1);
    if let Some(fault) = fault {
        outlet.send(News::Chunk(id, failed(fault))).await;
    }
}

fn label(fault: &SequenceFault) -> &'static str {
    match fault {
        SequenceFault::Gone(_) => "gone",
        SequenceFault::Busy(_) => "busy",
        SequenceFault::Refused(_) => "refused",
    }
}

fn failed(fault: SequenceFault) -> Chunk {
    Chunk { end: Some(End::Fault(fault)), ..Chunk::default() }
}

/// Gives each event to `take`, and `None` at the end of the stream; until that says that it was the last one. A fault when it
/// never does.
async fn listen<F: Future<Output = bool>>(
    mut answer: Answer,
    mut take: impl FnMut(Option<&Value>) -> F,
) -> Result<Option<SequenceFault>, Failure> {
    let (mut events, mut data) = (Events::default(), Vec::new());
    loop {
        let next = timeout(SILENT_MAX, answer.bytes()).await.map_err(|_| Failure::Late(SILENT_MAX))?;
        let Some(bytes) = next? else { break };
        events.push(&bytes, &mut data).map_err(|_| Failure::TooLong)?;
        for data in data.drain(..) {
            if data == b"[DONE]" {
                return Ok((!take(None).await).then(unfinished));
            }
            let Ok(value) = serde_json::from_slice::<Value>(&data) else {
                return Ok(Some(SequenceFault::Gone("the server sent an event that is not JSON".to_owned())));
            };
            if take(Some(&value)).await {
                return Ok(None);
            }
        }
    }
    Ok((!take(None).await).then(unfinished))
}

fn unfinished() -> SequenceFault {
    SequenceFault::Gone("the server ended the stream before the answer".to_owned())
}

/// What a status that is not 200 means.
async fn refused(answer: Answer) -> SequenceFault {
    let status = answer.status();
    let body = timeout(SILENT_MAX, answer.rest()).await.ok().and_then(Result::ok).unwrap_or_default();
    let said = serde_json::from_slice(&body).ok().and_then(|value: Value| message(&value));
    let said = said.map_or_else(|| format!("status {status}"), |said| format!("status {status}: {said}"));
    match status {
        400 | 413 | 422 => SequenceFault::Refused(said),
        429 | 503 => SequenceFault::Busy(said),
        _ => SequenceFault::Gone(said),
    }
}
