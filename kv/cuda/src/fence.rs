//! Shell: the end of work on a GPU, as a future.
//!
//! The GPU itself reports it (`cuLaunchHostFunc`), so nothing polls and no thread waits. Bounds: the caller's deadline. A
//! GPU that failed reports nothing; [`Fence::wait`] and every poll ask it too, and the fault is the outcome.

use std::{
    any::Any,
    ffi::c_void,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use cudarc::driver::{CudaStream, sys};
use futures::task::AtomicWaker;

use crate::error::{CudaError, Doing};

/// Between two questions to the GPU while a thread waits.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// What the GPU's report sets. It owns nothing of the GPU: the report's thread must not call the driver.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    waker: AtomicWaker,
    sleepers: Condvar,
    asleep: Mutex<()>,
}

/// One piece of work: whether it is over, and what must stay alive until then.
#[derive(Default)]
pub(crate) struct Work {
    bell: Arc<Bell>,
    kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Work {
    fn kept(&self) -> MutexGuard<'_, Vec<Arc<dyn Any + Send + Sync>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep(&self, what: Arc<dyn Any + Send + Sync>) {
        self.kept().push(what);
    }

    pub(crate) fn over(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// Lets go of what it kept, if it is over.
    pub(crate) fn reap(&self) -> bool {
        let over = self.over();
        if over {
            let kept = std::mem::take(&mut *self.kept());
            drop(kept);
        }
        over
    }

    /// It never reached the GPU, or the GPU was waited for.
    pub(crate) fn end(&self) {
        self.bell.ring();
        self.reap();
    }

    /// Has the GPU report when everything that was put into `stream` so far is over.
    pub(crate) fn report(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let data = Arc::into_raw(Arc::clone(&self.bell)).cast_mut().cast::<c_void>();
        // SAFETY: `ring` takes back the count that `data` carries, once; the bell needs no thread of ours.
        let result = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(ring), data) }.result();
        if result.is_err() {
            // SAFETY: a refused call never runs, so the count is still ours.
            drop(unsafe { Arc::from_raw(data.cast_const().cast::<Bell>()) });
        }
        result.doing("asking for a report")
    }
}

impl Bell {
    fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        self.waker.wake();
        drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.sleepers.notify_all();
    }
}

unsafe extern "C" fn ring(data: *mut c_void) {
    // SAFETY: `data` is the count that `report` gave away for this one call.
    let bell = unsafe { Arc::from_raw(data.cast_const().cast::<Bell>()) };
    bell.ring();
}

/// The end of one call of a [`Stream`](crate::Stream). Dropping it does not stop the work; its memory stays alive until
/// the work is over.
#[must_use = "the bytes are not there before the fence resolves"]
pub struct Fence {
    pub(crate) work: Arc<Work>,
    pub(crate) stream: Arc<CudaStream>,
}

impl std::fmt::Debug for Fence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fence").field("over", &self.work.over()).finish_non_exhaustive()
    }
}

impl Fence {
    /// The outcome, if it is known by now.
    fn outcome(&self) -> Option<Result<(), CudaError>> {
        if self.work.reap() {
            return Some(Ok(()));
        }
        if let Err(error) = self.stream.context().bind_to_thread().doing("binding the GPU to a thread") {
            return Some(Err(error));
        }
        // SAFETY: the stream is alive; a query changes nothing.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY => None,
            failed => Some(failed.result().doing("working on the GPU")),
        }
    }

    /// Blocks this thread until it is over, `false` when `within` has passed before.
    pub fn wait(&self, within: Duration) -> Result<bool, CudaError> {
        let until = Instant::now() + within;
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome.map(|()| true);
            }
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return Ok(false);
            };
            let bell = &self.work.bell;
            let asleep = bell.asleep.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.work.over() {
                drop(bell.sleepers.wait_timeout(asleep, left.min(ASK_EVERY)));
            }
        }
    }
}

impl Future for Fence {
    type Output = Result<(), CudaError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.work.bell.waker.register(cx.waker());
        self.outcome().map_or(Poll::Pending, Poll::Ready)
    }
}
