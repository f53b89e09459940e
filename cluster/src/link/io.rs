//! Bytes of one link: a loop that reads, one that writes, one that watches for silence.
//!
//! Run as tasks that the link's owner holds. Each returns why it ended. Never: knows what a frame means
//! (that is [`super::incoming`]). Frames are put together while a write is in flight; an idle writer writes at once. One
//! that has written just now lets the tasks that can run have a turn, until as many frames wait as [`super::pace`] says;
//! it never waits for a timer. Bounds: about [`crate::wire::limits::WRITE_COALESCE`] bytes put together, large payloads are
//! written without a copy.

use std::{
    future::poll_fn,
    io::{ErrorKind, IoSlice},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    time::{Instant, MissedTickBehavior, interval},
};

use super::{
    mux::{Ended, Mux},
    outgoing::Batch,
    pace::Pace,
};
use crate::{
    config::Timings,
    security::Connection,
    wire::{Closing, Decoder, Frame},
};

/// A peer that is heard, and takes what was queued before the goodbye slowly, gets this many times the longest silence.
const GOODBYE_PATIENCE: u32 = 6;

/// Parts of a batch that are written with one call.
const SLICES: usize = 32;

/// What a user reads about a process that ended without a goodbye.
const CUT: &str = "the other side closed the connection";

/// Reads until the other side ends, breaks, or breaks the rules.
pub(super) async fn read(mux: Arc<Mux>, mut from: ReadHalf<Connection>, mut decoder: Decoder) -> Ended {
    loop {
        match mux.take_all(&mut decoder) {
            Ok(None) => {}
            Ok(Some(why)) => return goodbye(&why),
            Err(misuse) => return broken(misuse.to_string()),
        }
        match from.read_buf(decoder.buffer()).await {
            Ok(0) => return broken(CUT.to_owned()),
            Ok(_) => mux.heard(),
            Err(error) => return failed("read", &error),
        }
    }
}

fn goodbye(why: &Closing) -> Ended {
    Ended { reason: format!("closed by the other side: {why:?}").into(), orderly: true }
}

fn broken(reason: String) -> Ended {
    Ended { reason: reason.into(), orderly: false }
}

/// A process that was killed says no TLS farewell, or its kernel answers with a reset: it is gone, and the words of
/// system and library for that help no user.
fn failed(what: &str, error: &std::io::Error) -> Ended {
    match error.kind() {
        ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe
        | ErrorKind::NotConnected => broken(CUT.to_owned()),
        _ => broken(format!("{what}: {error}")),
    }
}

/// Writes what is queued until a goodbye was written or the connection breaks.
pub(super) async fn write(mux: Arc<Mux>, mut to: WriteHalf<Connection>) -> Ended {
    let (mut batch, mut pace) = (Batch::default(), Pace::new(std::time::Instant::now()));
    loop {
        let mut waited = false;
        poll_fn(|cx| {
            let ready = mux.out.poll_ready(cx);
            waited |= ready.is_pending();
            ready
        })
        .await;
        let together = pace.together(std::time::Instant::now());
        if waited && together > 1 {
            gather(&mux, together).await;
        }
        mux.out.take(&mut batch);
        let written = write_batch(&mut to, &batch).await;
        if let Err(error) = written {
            return failed("write", &error);
        }
        mux.written(&mut batch);
        pace.wrote(std::time::Instant::now(), batch.frames);
        if batch.last {
            return match to.shutdown().await {
                Ok(()) => Ended { reason: "said goodbye".into(), orderly: true },
                Err(error) => failed("write", &error),
            };
        }
    }
}

/// Lets the tasks that can run now queue more, until so many frames wait.
async fn gather(mux: &Mux, frames: usize) {
    poll_fn(|cx| {
        mux.out.gather(frames, cx);
        Poll::Ready(())
    })
    .await;
    // Goes on after all of them have had a turn, or when the one that makes them enough wakes it.
    tokio::task::yield_now().await;
}

async fn write_batch(to: &mut WriteHalf<Connection>, batch: &Batch) -> std::io::Result<()> {
    let mut at = 0;
    while at < batch.len() {
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES);
        batch.slices(at, &mut slices);
        let written = to.write_vectored(&slices).await?;
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        at += written;
    }
    to.flush().await
}

/// Pings a silent link that has streams, ends it when nothing answers, and closes one without streams.
///
/// The side that dialled closes it: its own opens cannot cross its goodbye. The other side does so only when that has
/// not happened for as long again.
pub(super) async fn watch(mux: Arc<Mux>, timings: Timings) -> Ended {
    let idle_max = if mux.dialled { timings.link_idle } else { timings.link_idle.saturating_mul(2) };
    let mut ticks = interval(timings.ping_every.min(timings.link_idle).max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut asked, mut leaving): (Option<Instant>, Option<Instant>) = (None, None);
    for number in 0.. {
        ticks.tick().await;
        if mux.ended().is_some() {
            // The writer ends the link once the goodbye is written. A frozen peer takes none.
            let since = leaving.get_or_insert_with(Instant::now).elapsed();
            let silent = since.min(mux.silence()) >= timings.silence_max;
            if silent || since >= timings.silence_max.saturating_mul(GOODBYE_PATIENCE) {
                return broken(format!("the other side took no goodbye within {since:?}"));
            }
            continue;
        }
        let (streams, empty_for) = mux.load();
        if streams == 0 && empty_for >= idle_max {
            mux.close(Closing::Idle);
        }
        if streams == 0 || mux.silence() < timings.ping_every {
            asked = None;
            continue;
        }
        mux.out.control(&Frame::Ping(number));
        let since = *asked.get_or_insert_with(Instant::now);
        // The silence began one period before the first ping.
        if since.elapsed() + timings.ping_every >= timings.silence_max {
            return broken(format!("nothing heard for {:?}", timings.silence_max));
        }
    }
    broken("the watch ended".to_owned())
}
