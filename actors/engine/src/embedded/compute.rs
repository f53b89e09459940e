//! The threads that compute, shared by all engines of one loaded model.
//!
//! An engine takes a [`Turn`], in order of arrival, and has every thread for one step: two workers on two cores
//! never run four threads. Within a turn, [`Turn::run`] forks a job into numbered tasks and returns when all
//! are done; the caller computes too. A thread between two jobs spins for a moment, then parks.
//! Called by the forward pass and the repacker. Never: leaves a thread behind; dropping the pool joins them all.
//! Bounds: one job at a time. If a task panics: the job ends, [`Turn::run`] says so, the pool stays usable.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::{self, JoinHandle},
};

use thiserror::Error;

/// Spins of an idle thread before it parks: about 50 µs, longer than any gap within a step.
const SPINS: u32 = 3_000;
/// Spins between two looks at whether the other threads run at all.
const SPINS_BEFORE_YIELD: u32 = 500;

/// A task panicked; its job's results are void.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a compute task panicked")]
pub(super) struct TaskPanicked;

/// A job: `(thread index, task index)`.
type Job<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A job as two words, readable by threads that may come too late for it.
struct Shared {
    /// Tasks of the current job in the upper half, the next one to start in the lower.
    /// Both in one word: a late thread can never start a task of one job with the count of another.
    state: AtomicU64,
    /// Address of the `&Job` on the stack of the thread in [`Turn::run`].
    job: AtomicPtr<()>,
    finished: AtomicUsize,
    panicked: AtomicBool,
    stopping: AtomicBool,
    parked: AtomicUsize,
    queue: Mutex<Queue>,
    turn_over: Condvar,
}

/// A ticket lock: engines step in the order in which they asked.
#[derive(Default)]
struct Queue {
    next: u64,
    serving: u64,
}

/// The threads. Dropping it stops and joins them.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.width()).finish()
    }
}

impl Pool {
    /// A pool in which `width` threads compute, the caller among them; 0 means one per core. Threads that
    /// cannot be started are done without.
    pub(super) fn new(width: usize) -> Self {
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let width = if width == 0 { cores() } else { width };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            finished: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            parked: AtomicUsize::new(0),
            queue: Mutex::new(Queue::default()),
            turn_over: Condvar::new(),
        });
        let threads = (1..width).map_while(|index| {
            let shared = Arc::clone(&shared);
            let spawned = thread::Builder::new().name(format!("compute-{index}")).spawn(move || shared.serve(index));
            spawned.inspect_err(|error| tracing::warn!(%error, "computing with fewer threads")).ok()
        });
        let threads = threads.collect();
        Self { shared, threads }
    }

    /// Threads that compute, the caller among them.
    pub(super) fn width(&self) -> usize {
        self.threads.len() + 1
    }

    /// Waits until the pool is free and takes all of it.
    pub(super) fn turn(&self) -> Turn<'_> {
        let mut queue = self.shared.lock();
        let ticket = queue.next;
        queue.next += 1;
        while queue.serving != ticket {
            queue = self.shared.turn_over.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        Turn { pool: self }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a compute thread ended by panic");
            }
        }
    }
}

/// The pool, for one step of one engine.
pub(super) struct Turn<'a> {
    pool: &'a Pool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.pool.shared.lock().serving += 1;
        self.pool.shared.turn_over.notify_all();
    }
}

impl Turn<'_> {
    /// Threads that compute.
    pub(super) fn width(&self) -> usize {
        self.pool.width()
    }

    /// Runs `job` once for every task index below `tasks`, each on some thread; returns when all are done.
    pub(super) fn run(&self, tasks: usize, job: &Job<'_>) -> Result<(), TaskPanicked> {
        let shared = &*self.pool.shared;
        if tasks <= 1 || self.pool.threads.is_empty() {
            let all = || (0..tasks).for_each(|task| job(0, task));
            return catch_unwind(AssertUnwindSafe(all)).map_err(|_| TaskPanicked);
        }
        debug_assert!(tasks < u32::MAX as usize / 2, "a job has fewer tasks than half a word counts");
        shared.finished.store(0, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let address: *const &Job<'_> = &job;
        shared.job.store(address.cast_mut().cast(), Ordering::Relaxed);
        shared.state.store((tasks as u64) << 32, Ordering::Release);
        fence(Ordering::SeqCst);
        if shared.parked.load(Ordering::SeqCst) > 0 {
            self.pool.threads.iter().for_each(|thread| thread.thread().unpark());
        }
        shared.help(0);
        let mut spins = 0u32;
        while shared.finished.load(Ordering::Acquire) < tasks {
            spins += 1;
            if spins.is_multiple_of(SPINS_BEFORE_YIELD) { thread::yield_now() } else { std::hint::spin_loop() }
        }
        if shared.panicked.load(Ordering::Relaxed) { Err(TaskPanicked) } else { Ok(()) }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_work(&self) -> bool {
        let state = self.state.load(Ordering::SeqCst);
        (state & 0xFFFF_FFFF) < state >> 32
    }

    /// Computes tasks of the current job until none is left to start.
    fn help(&self, index: usize) {
        while self.has_work() {
            let state = self.state.fetch_add(1, Ordering::AcqRel);
            let (tasks, task) = (state >> 32, state & 0xFFFF_FFFF);
            if task >= tasks {
                return;
            }
            let address: *const &Job<'_> = self.job.load(Ordering::Relaxed).cast_const().cast();
            // SAFETY: this task was started and is not finished, so `Turn::run` has not returned: the reference
            // on its stack is alive. It was stored before `state`, which was read with acquire.
            let job: &Job<'_> = unsafe { *address };
            if catch_unwind(AssertUnwindSafe(|| job(index, task as usize))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.finished.fetch_add(1, Ordering::Release);
        }
    }

    /// The life of one thread.
    fn serve(&self, index: usize) {
        while !self.stopping.load(Ordering::SeqCst) {
            self.help(index);
            let worked = (0..SPINS).any(|_| {
                std::hint::spin_loop();
                self.has_work()
            });
            if worked {
                continue;
            }
            self.parked.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // Looked at again after `parked` is visible: a job published in between is seen here or unparks us.
            if !self.has_work() && !self.stopping.load(Ordering::SeqCst) {
                thread::park();
            }
            self.parked.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_width() {
        for width in [1, 2, 5] {
            let pool = Pool::new(width);
            let turn = pool.turn();
            for round in 0..300usize {
                let tasks = round % 17;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                turn.run(tasks, &|_, task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "width {width} round {round}");
            }
        }
    }

    #[test]
    fn a_panicking_task_ends_its_job_and_nothing_else() {
        let pool = Pool::new(2);
        let turn = pool.turn();
        let job = |_: usize, task: usize| assert!(task != 3, "task 3 fails by intent");
        assert_eq!(turn.run(8, &job), Err(TaskPanicked));
        assert_eq!(turn.run(3, &job), Ok(()));
    }

    #[test]
    fn engines_take_turns() {
        let pool = Pool::new(2);
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let turn = pool.turn();
                        let before = total.load(Ordering::Relaxed);
                        turn.run(4, &|_, _| {
                            total.fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                        assert_eq!(total.load(Ordering::Relaxed), before + 4, "two turns overlapped");
                    }
                });
            }
        });
    }
}
