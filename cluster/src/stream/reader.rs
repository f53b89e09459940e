//! The receiving half of a stream, the same for local streams and for those on a link.
//!
//! Called by handlers and openers; built by [`super::local`] and by links. Waits for a frame, the last word, the
//! deadline or the inactivity limit. Bounds: this side's window ([`super::window`]) of frames lies in its queue.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{self, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use starling_ids::Metric;
use tokio::time::{Instant, Sleep, sleep_until};

use super::{
    Context, StreamError,
    gauges::OpenGuard,
    inbox::{Inbox, Last, Next},
};
use crate::wire::limits::STREAM_INACTIVITY;

/// What a reader tells the other side.
pub(crate) trait Feedback: Send + Sync + std::fmt::Debug {
    /// This much of the window is free again.
    fn credit(&self, amount: u32);
    /// Nothing more will be read. Not called after the direction's end was seen.
    fn cancel(&self);
    /// The direction is over on this side, by whatever way. Called exactly once.
    fn closed(&self);
}

/// The receiving half.
#[derive(Debug)]
pub struct StreamRx {
    inbox: Arc<Inbox>,
    feedback: Arc<dyn Feedback>,
    deadline: Option<Instant>,
    inactivity: Option<Duration>,
    /// Since when the reader waits; none while there are frames.
    waiting_since: Option<Instant>,
    alarm: Option<Alarm>,
    over: bool,
    _open: Arc<OpenGuard>,
}

/// A timer that lives as long as the stream. It is set once and looked at again when it fires, because most frames
/// come long before it does, and setting a timer costs more than taking a frame.
#[derive(Debug)]
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    /// Whom it wakes.
    waker: Option<Waker>,
}

impl StreamRx {
    pub(crate) fn new(
        inbox: Arc<Inbox>,
        feedback: Arc<dyn Feedback>,
        deadline: Option<Instant>,
        open: Arc<OpenGuard>,
    ) -> Self {
        let (inactivity, waiting_since, alarm) = (None, None, None);
        Self { inbox, feedback, deadline, inactivity, waiting_since, alarm, over: false, _open: open }
    }

    /// The default of the side that opened a request stream.
    pub(crate) fn with_default_inactivity(mut self, context: &Context) -> Self {
        self.inactivity = (!context.subscription).then_some(STREAM_INACTIVITY);
        self
    }

    /// Sets how long a wait for a frame may take; `None` for ever. The side that opened a request stream starts
    /// with 30 s, the other side and subscriptions with none.
    pub fn set_inactivity(&mut self, limit: Option<Duration>) {
        self.inactivity = limit;
        self.waiting_since = None;
    }

    /// The next frame; `None` after a clean end. After an error there is nothing more.
    ///
    /// Cancelling the wait loses nothing; the inactivity limit goes on from its beginning.
    pub async fn recv(&mut self) -> Option<Result<Bytes, StreamError>> {
        if self.over {
            return None;
        }
        match poll_fn(|cx| self.poll(cx)).await {
            Ok(Next::Frame(frame, back)) => {
                if back > 0 {
                    self.feedback.credit(back);
                }
                Some(Ok(frame))
            }
            Ok(Next::Last(last)) => {
                self.close();
                match last {
                    Last::End => None,
                    Last::Fail(fault) => Some(Err(StreamError::Failed(fault))),
                    Last::Broken(reason) => {
                        count_broken("broken");
                        Some(Err(StreamError::Broken(reason.to_string())))
                    }
                }
            }
            Err(error) => Some(Err(self.give_up(error))),
        }
    }

    fn poll(&mut self, cx: &mut task::Context<'_>) -> Poll<Result<Next, StreamError>> {
        // A reader whose frames never run out must still let other tasks run.
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        if let Poll::Ready(next) = self.inbox.poll_next(cx) {
            coop.made_progress();
            self.waiting_since = None;
            return Poll::Ready(Ok(next));
        }
        let Some((due, error)) = self.due() else { return Poll::Pending };
        match self.poll_alarm(due, cx) {
            Poll::Ready(()) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// When a wait that is under way now is over, and what it is called then.
    fn due(&mut self) -> Option<(Instant, StreamError)> {
        let silent = match self.inactivity {
            Some(limit) => self.waiting_since.get_or_insert_with(Instant::now).checked_add(limit),
            None => None,
        };
        match (self.deadline, silent) {
            (Some(deadline), Some(silent)) if silent < deadline => Some((silent, self.inactive())),
            (None, Some(silent)) => Some((silent, self.inactive())),
            (Some(deadline), _) => Some((deadline, StreamError::Deadline)),
            (None, None) => None,
        }
    }

    fn poll_alarm(&mut self, due: Instant, cx: &mut task::Context<'_>) -> Poll<()> {
        let alarm = self.alarm.get_or_insert_with(|| Alarm { sleep: Box::pin(sleep_until(due)), waker: None });
        let same = alarm.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        let (set_for, fired) = (alarm.sleep.deadline(), alarm.sleep.is_elapsed());
        if fired && set_for >= due {
            return Poll::Ready(());
        }
        if same && !fired && set_for <= due {
            // It fires no later than it must, and wakes this task.
            return Poll::Pending;
        }
        if fired || set_for > due {
            alarm.sleep.as_mut().reset(due);
        }
        if !same {
            alarm.waker = Some(cx.waker().clone());
        }
        while alarm.sleep.as_mut().poll(cx).is_ready() {
            if alarm.sleep.deadline() >= due {
                return Poll::Ready(());
            }
            alarm.sleep.as_mut().reset(due);
        }
        Poll::Pending
    }

    fn inactive(&self) -> StreamError {
        let limit = self.inactivity.unwrap_or_default();
        StreamError::Inactive(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX))
    }

    fn give_up(&mut self, error: StreamError) -> StreamError {
        count_broken(if error == StreamError::Deadline { "deadline" } else { "inactive" });
        self.feedback.cancel();
        self.inbox.leave();
        self.close();
        error
    }

    fn close(&mut self) {
        self.over = true;
        self.alarm = None;
        self.feedback.closed();
    }
}

impl Drop for StreamRx {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        // An end that lies in the queue unread is an end: the other side has nothing to stop.
        if !self.inbox.leave() {
            self.feedback.cancel();
        }
        self.close();
    }
}

fn count_broken(reason: &'static str) {
    metrics::counter!(Metric::StreamsBroken.name(), "reason" => reason).increment(1);
}
