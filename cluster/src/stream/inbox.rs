//! The queue between a carrier and the reader of one direction, and what of the window lies in it.
//!
//! Filled by a link's reader or by the sender of a local stream, emptied by [`super::StreamRx`]. One short lock for each
//! frame, one wake for as many frames as come before the reader runs. Bounds: the reader's window; a sender that
//! sends more is told by [`Delivery::Over`]. Holds no memory while nothing lies in it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;

use super::{Fault, window::Window};
use crate::wire::limits;

/// The last word on a direction.
#[derive(Debug)]
pub(crate) enum Last {
    /// All was sent.
    End,
    /// The sender, or this side for it, says why not.
    Fail(Fault),
    /// The sender or its carrier vanished.
    Broken(Arc<str>),
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It lies in the queue.
    Taken,
    /// Nobody reads any more, or the last word was said; it is dropped.
    Gone,
    /// The window does not allow it.
    Over,
}

/// What a reader finds.
#[derive(Debug)]
pub(crate) enum Next {
    /// A frame, and how much of the window is to be given back to the sender now, often nothing.
    Frame(Bytes, u32),
    /// Nothing more comes.
    Last(Last),
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Bytes>,
    last: Option<Last>,
    /// Nothing is taken any more.
    closed: bool,
    waker: Option<Waker>,
    /// Bytes of the frames in the queue.
    held: usize,
    /// Of the window: sent and not given back.
    used: u32,
    /// Of that: taken by the reader and not given back yet.
    taken: u32,
    /// By how much less than a portion the first giving back is.
    early: u32,
}

/// A queue that many frames made large is not kept when it is empty.
const KEEP_FRAMES: usize = 8;
/// In so many parts the first giving back is spread over streams: one for each small frame of a portion.
const PARTS: u32 = limits::STREAM_WINDOW_FRAMES as u32 / 4;

impl Inbox {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The same for one of many streams that one link carries: each gives back for the first time after another part of
    /// a portion. Streams that began together and run at one rate would else all do so at the same time.
    pub(crate) fn one_of_many(number: u32) -> Arc<Self> {
        let inbox = Self::default();
        inbox.lock().early = Window::OURS.portion() / PARTS * (number % PARTS);
        Arc::new(inbox)
    }

    /// Takes one frame, in order.
    pub(crate) fn deliver(&self, frame: Bytes) -> Delivery {
        let mut state = self.lock();
        if state.closed {
            return Delivery::Gone;
        }
        let used = state.used + Window::OURS.cost(frame.len());
        if used > Window::OURS.size() {
            return Delivery::Over;
        }
        state.used = used;
        state.held += frame.len();
        state.frames.push_back(frame);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        Delivery::Taken
    }

    /// Says the last word, behind all frames. Only the first one counts.
    pub(crate) fn finish(&self, last: Last) {
        self.close(last, false);
    }

    /// Says the last word instead of the frames that lie unread.
    pub(crate) fn cut(&self, last: Last) {
        self.close(last, true);
    }

    fn close(&self, last: Last, cut: bool) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.closed = true;
        state.last = Some(last);
        let dropped = if cut { state.drop_frames() } else { VecDeque::new() };
        let waker = state.waker.take();
        drop(state);
        drop(dropped);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Bytes that lie unread.
    pub(crate) fn held(&self) -> usize {
        self.lock().held
    }

    /// The next frame or the last word.
    pub(crate) fn poll_next(&self, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.lock();
        if let Some(frame) = state.frames.pop_front() {
            state.held -= frame.len();
            state.taken += Window::OURS.cost(frame.len());
            if state.frames.is_empty() && state.frames.capacity() > KEEP_FRAMES {
                state.frames = VecDeque::new();
            }
            // Given back before the sender hears of it, so that what it then sends is within the window.
            let enough = state.taken + state.early >= Window::OURS.portion();
            let back = if enough { std::mem::take(&mut state.taken) } else { 0 };
            if enough {
                state.early = 0;
            }
            state.used -= back;
            return Poll::Ready(Next::Frame(frame, back));
        }
        if let Some(last) = state.last.take() {
            return Poll::Ready(Next::Last(last));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Nobody reads any more. Whether the last word had been said.
    pub(crate) fn leave(&self) -> bool {
        let mut state = self.lock();
        let finished = std::mem::replace(&mut state.closed, true);
        let (dropped, last) = (state.drop_frames(), state.last.take());
        drop(state);
        drop((dropped, last));
        finished
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn drop_frames(&mut self) -> VecDeque<Bytes> {
        self.held = 0;
        std::mem::take(&mut self.frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(inbox: &Inbox) -> Poll<Next> {
        inbox.poll_next(&Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_full_window_is_refused_and_comes_back_in_portions() {
        let inbox = Inbox::new();
        for _ in 0..64 {
            assert_eq!(inbox.deliver(Bytes::from_static(b"x")), Delivery::Taken);
        }
        assert_eq!(inbox.deliver(Bytes::new()), Delivery::Over);
        assert_eq!(inbox.held(), 64);
        for n in 1..=16 {
            let Poll::Ready(Next::Frame(_, back)) = next(&inbox) else { panic!("a frame") };
            assert_eq!(back, if n == 16 { Window::OURS.portion() } else { 0 }, "{n}");
        }
        for _ in 0..16 {
            assert_eq!(inbox.deliver(Bytes::new()), Delivery::Taken);
        }
        assert_eq!(inbox.deliver(Bytes::new()), Delivery::Over);
    }

    #[test]
    fn streams_of_one_link_first_give_back_after_different_numbers_of_frames() {
        let mut firsts = Vec::new();
        for number in 0..2 * PARTS {
            let inbox = Inbox::one_of_many(number);
            let backs: Vec<u32> = (1..=2 * PARTS)
                .filter(|_| {
                    assert_eq!(inbox.deliver(Bytes::new()), Delivery::Taken);
                    matches!(next(&inbox), Poll::Ready(Next::Frame(_, back)) if back > 0)
                })
                .collect();
            assert_eq!(backs[1] - backs[0], PARTS, "a whole portion from then on");
            firsts.push(backs[0]);
        }
        firsts.sort_unstable();
        assert_eq!(firsts, (1..=PARTS).flat_map(|n| [n, n]).collect::<Vec<_>>());
    }

    #[test]
    fn a_frame_over_the_window_passes_alone() {
        let inbox = Inbox::new();
        let large = Bytes::from(vec![0; 2 * Window::OURS.size() as usize]);
        assert_eq!(inbox.deliver(large.clone()), Delivery::Taken);
        assert_eq!(inbox.deliver(large.clone()), Delivery::Over);
        assert!(matches!(next(&inbox), Poll::Ready(Next::Frame(_, back)) if back > 0));
        assert_eq!(inbox.deliver(large), Delivery::Taken);
    }

    #[test]
    fn the_first_last_word_counts_and_comes_behind_the_frames_or_instead_of_them() {
        let inbox = Inbox::new();
        inbox.deliver(Bytes::from_static(b"x"));
        inbox.finish(Last::End);
        inbox.cut(Last::Broken("late".into()));
        assert_eq!(inbox.deliver(Bytes::new()), Delivery::Gone);
        assert!(matches!(next(&inbox), Poll::Ready(Next::Frame(..))));
        assert!(matches!(next(&inbox), Poll::Ready(Next::Last(Last::End))));
        assert!(inbox.leave());

        let inbox = Inbox::new();
        inbox.deliver(Bytes::from_static(b"x"));
        inbox.cut(Last::Broken("cut".into()));
        assert_eq!(inbox.held(), 0);
        assert!(matches!(next(&inbox), Poll::Ready(Next::Last(Last::Broken(_)))));
        assert!(next(&inbox).is_pending());
    }
}
