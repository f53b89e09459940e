//! Shell: waiting on sockets with a deadline, and waking a thread that does.
//!
//! Called by sessions and by the serving side. Sockets are in non-blocking mode; a call is tried first and waits only when
//! the kernel says so. Never: waits without a deadline or a kick that can end it.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::{self, Errno},
};

use super::error::TransferError;

/// How long a thread that has just worked looks for more before it sleeps: about what waking it would cost. One that has had
/// nothing to do sleeps without a look, so an idle one costs nothing.
pub(crate) const SPIN: Duration = Duration::from_micros(30);

/// Looks again and again for at most [`SPIN`], and lets others run meanwhile: where they share this core, they are what is waited
/// for.
pub(crate) fn watch<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if began.elapsed() >= SPIN {
            return None;
        }
        thread::yield_now();
    }
}

/// A flag that a thread in [`ready`] sees at once.
#[derive(Debug)]
pub(crate) struct Kick(OwnedFd);

impl Kick {
    /// Not raised.
    pub(crate) fn new() -> Result<Self, TransferError> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Raises it.
    pub(crate) fn now(&self) {
        // The only failure is a counter that is full: then it is raised.
        let _full = io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Lowers it.
    pub(crate) fn clear(&self) {
        // The only failure is a counter that is empty: then it is lowered.
        let _empty = io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What bounds a wait.
pub(crate) trait Bounds {
    /// Raised when `halted` is worth a look.
    fn kick(&self) -> &Kick;
    /// The end of the wait; `None` only where a kick alone may end it.
    fn until(&self) -> Option<Instant>;
    /// Why to stop now.
    fn halted(&self) -> Result<(), TransferError>;
    /// Whether what is waited for is likely to come in a moment.
    fn soon(&self) -> bool;
}

/// The time left as poll wants it, rounded up so that it is not asked again too early.
fn left(until: Option<Instant>) -> Option<Timespec> {
    let left = until?.saturating_duration_since(Instant::now());
    let secs = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
    Some(Timespec { tv_sec: secs, tv_nsec: i64::from(left.subsec_nanos()) })
}

/// Waits until `fd` can do what `want` says, or has failed, or the bounds end it.
pub(crate) fn ready(fd: BorrowedFd<'_>, want: PollFlags, bounds: &impl Bounds) -> Result<(), TransferError> {
    wait_any(&[fd], want, bounds)
}

/// Waits until one of `fds` can do what `want` says, or has failed, or the bounds end it.
pub(crate) fn wait_any(fds: &[BorrowedFd<'_>], want: PollFlags, bounds: &impl Bounds) -> Result<(), TransferError> {
    let kick = bounds.kick();
    loop {
        bounds.halted()?;
        let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, want)).collect();
        polled.push(PollFd::new(kick, PollFlags::IN));
        match poll(&mut polled, left(bounds.until()).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let raised = |polled: &PollFd<'_>| !polled.revents().is_empty();
        if polled[..fds.len()].iter().any(raised) {
            return Ok(());
        }
        if polled.last().is_some_and(raised) {
            // A kick that ends more than this wait stays raised for the other threads that wait on it.
            bounds.halted()?;
            kick.clear();
        }
    }
}

/// Whether the other side closed the connection. A look, no wait.
pub(crate) fn hung_up(fd: BorrowedFd<'_>) -> bool {
    look(fd, PollFlags::RDHUP).intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR)
}

/// Whether something has come, be it the end. A look, no wait.
pub(crate) fn readable(fd: BorrowedFd<'_>) -> bool {
    !look(fd, PollFlags::IN).is_empty()
}

fn look(fd: BorrowedFd<'_>, want: PollFlags) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(fd, want)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&now)) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

/// Runs `call` until it moves at least one byte.
fn patient(
    fd: BorrowedFd<'_>,
    want: PollFlags,
    bounds: &impl Bounds,
    mut call: impl FnMut() -> io::Result<usize>,
) -> Result<usize, TransferError> {
    let moved = |result: &io::Result<usize>| !matches!(result, Err(Errno::AGAIN));
    let mut first = bounds.soon().then(|| watch(|| Some(call()).filter(moved))).flatten();
    loop {
        match first.take().unwrap_or_else(&mut call) {
            Ok(0) => return Err(TransferError::PeerGone),
            Ok(moved) => return Ok(moved),
            Err(Errno::AGAIN) => ready(fd, want, bounds)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Fills `into`.
pub(crate) fn receive(fd: BorrowedFd<'_>, into: &mut [u8], bounds: &impl Bounds) -> Result<(), TransferError> {
    let mut at = 0;
    while at < into.len() {
        at += patient(fd, PollFlags::IN, bounds, || io::read(fd, &mut into[at..]))?;
    }
    Ok(())
}

/// Sends all of `from`.
pub(crate) fn send(fd: BorrowedFd<'_>, from: &[u8], bounds: &impl Bounds) -> Result<(), TransferError> {
    let mut at = 0;
    while at < from.len() {
        at += patient(fd, PollFlags::OUT, bounds, || io::write(fd, &from[at..]))?;
    }
    Ok(())
}

/// Fills all of `into`, in order.
pub(crate) fn receive_all(
    fd: BorrowedFd<'_>,
    into: &mut [IoSliceMut<'_>],
    bounds: &impl Bounds,
) -> Result<(), TransferError> {
    let mut left = into;
    while !left.is_empty() {
        let moved = patient(fd, PollFlags::IN, bounds, || io::readv(fd, left))?;
        IoSliceMut::advance_slices(&mut left, moved);
        bounds.halted()?;
    }
    Ok(())
}

/// Sends all of `from`, in order.
pub(crate) fn send_all(
    fd: BorrowedFd<'_>,
    from: &mut [IoSlice<'_>],
    bounds: &impl Bounds,
) -> Result<(), TransferError> {
    let mut left = from;
    while !left.is_empty() {
        let moved = patient(fd, PollFlags::OUT, bounds, || io::writev(fd, left))?;
        IoSlice::advance_slices(&mut left, moved);
        bounds.halted()?;
    }
    Ok(())
}
