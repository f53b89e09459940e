//! Bytes of one link: a loop that reads, one that writes, one that watches for silence.
//!
//! Run as tasks that the link's owner holds. Each returns why it ended. Never: knows what a frame means
//! (that is [`super::mux`]). The writer flushes at once when idle and puts frames together only while a write
//! is in flight; it never waits for more. Bounds: [`limits::WRITE_COALESCE`] bytes put together, large payloads
//! are written without a copy.

use std::{io::ErrorKind, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    time::{Instant, MissedTickBehavior, interval},
};

use super::mux::{Ended, Mux, Queued, Queues};
use crate::{
    config::Timings,
    security::Connection,
    wire::{Closing, Decoder, Frame, encode_head, limits},
};

/// Payloads from this size on are written by themselves instead of being copied next to others.
const WRITE_ALONE: usize = 32 << 10;

/// What a user reads about a process that ended without a goodbye.
const CUT: &str = "the other side closed the connection";

/// Reads until the other side ends, breaks, or breaks the rules.
pub(super) async fn read(mux: Arc<Mux>, mut from: ReadHalf<Connection>, mut decoder: Decoder) -> Ended {
    loop {
        loop {
            match decoder.decode() {
                Ok(Some(frame)) => match mux.take(frame) {
                    Ok(None) => {}
                    Ok(Some(why)) => return goodbye(&why),
                    Err(violation) => return broken(violation.to_string()),
                },
                Ok(None) => break,
                Err(error) => return broken(error.to_string()),
            }
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
pub(super) async fn write(mux: Arc<Mux>, to: WriteHalf<Connection>, queues: Queues) -> Ended {
    let Queues { control, mut data } = queues;
    let mut writer =
        Writer { mux, to, control, out: BytesMut::with_capacity(2 * limits::WRITE_COALESCE), room: 0, last: false };
    match writer.run(&mut data).await {
        Ok(()) => Ended { reason: "said goodbye".into(), orderly: true },
        Err(error) => failed("write", &error),
    }
}

struct Writer {
    mux: Arc<Mux>,
    to: WriteHalf<Connection>,
    control: tokio::sync::mpsc::UnboundedReceiver<Queued>,
    out: BytesMut,
    /// Reserved bytes of the frames in `out`.
    room: usize,
    /// The goodbye is in `out`.
    last: bool,
}

impl Writer {
    async fn run(&mut self, data: &mut tokio::sync::mpsc::UnboundedReceiver<Queued>) -> std::io::Result<()> {
        loop {
            // The senders live in the mux that this writer holds, so neither queue ever closes.
            tokio::select! {
                biased;
                Some(queued) = self.control.recv() => self.put(queued).await?,
                Some(queued) = data.recv() => self.put_behind_control(queued).await?,
                else => return Ok(()),
            }
            self.drain_control().await?;
            while !self.last && self.out.len() < limits::WRITE_COALESCE {
                let Ok(queued) = data.try_recv() else { break };
                self.put_behind_control(queued).await?;
            }
            self.flush().await?;
            if self.last {
                return self.to.shutdown().await;
            }
        }
    }

    /// A stream's accept is queued as control before its first data: looking at control again after a data frame
    /// was taken keeps that order.
    async fn put_behind_control(&mut self, queued: Queued) -> std::io::Result<()> {
        self.drain_control().await?;
        self.put(queued).await
    }

    async fn drain_control(&mut self) -> std::io::Result<()> {
        while !self.last {
            let Ok(queued) = self.control.try_recv() else { break };
            self.put(queued).await?;
        }
        Ok(())
    }

    async fn put(&mut self, Queued { frame, room }: Queued) -> std::io::Result<()> {
        if self.last {
            return Ok(());
        }
        self.last = matches!(frame, Frame::Goodbye(_));
        self.room += room as usize;
        match encode_head(&frame, &mut self.out) {
            Some(large) if large.len() >= WRITE_ALONE => self.write_alone(&large).await,
            Some(small) => {
                self.out.extend_from_slice(&small);
                if self.out.len() >= 2 * limits::WRITE_COALESCE { self.write_out().await } else { Ok(()) }
            }
            None => Ok(()),
        }
    }

    async fn write_alone(&mut self, payload: &Bytes) -> std::io::Result<()> {
        self.to.write_all(&self.out).await?;
        self.out.clear();
        self.to.write_all(payload).await?;
        self.give_room_back();
        Ok(())
    }

    async fn write_out(&mut self) -> std::io::Result<()> {
        self.to.write_all(&self.out).await?;
        self.out.clear();
        self.give_room_back();
        Ok(())
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        self.write_out().await?;
        self.to.flush().await
    }

    fn give_room_back(&mut self) {
        self.mux.room.add_permits(std::mem::take(&mut self.room));
    }
}

/// Pings a silent link that has streams, ends it when nothing answers, and closes one without streams.
pub(super) async fn watch(mux: Arc<Mux>, timings: Timings) -> Ended {
    let mut ticks = interval(timings.ping_every.min(timings.link_idle).max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asked: Option<Instant> = None;
    for number in 0.. {
        ticks.tick().await;
        let (streams, empty_for) = mux.load();
        if streams == 0 && empty_for >= timings.link_idle {
            mux.close(Closing::Idle);
        }
        if streams == 0 || mux.silence() < timings.ping_every {
            asked = None;
            continue;
        }
        mux.send_control(Frame::Ping(number), 0);
        let since = *asked.get_or_insert_with(Instant::now);
        // The silence began one period before the first ping.
        if since.elapsed() + timings.ping_every >= timings.silence_max {
            return broken(format!("nothing heard for {:?}", timings.silence_max));
        }
    }
    broken("the watch ended".to_owned())
}
