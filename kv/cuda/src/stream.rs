//! Shell: a queue of work on a GPU: copies of scattered pages, and their sums.
//!
//! Called by workers and by `bench/gpu`. Work of one stream runs in order; two streams run side by side. Bounds: the page
//! lists of all work on its way fit `LIST_BYTES` of pinned memory; work that does not fit is refused at once.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg, sys};

use crate::{
    error::{CudaError, Doing},
    fence::{Fence, Work},
    gpu::Gpu,
    memory::{DeviceMemory, Memory},
    pages::{self, GPU_PAGES_MAX, KernelPage, Span},
    peer::PeerMemory,
    staging::{Lease, Staging},
};

/// Pinned memory for lists and sums: four calls of the largest size on their way.
const LIST_BYTES: usize = 4 * GPU_PAGES_MAX * (size_of::<KernelPage>() + size_of::<u64>());
/// Threads of a thread block, as the kernels expect.
const THREADS: u32 = 256;
/// Pages that one thread block hashes, as the kernel expects.
const SUMMED_EACH: u32 = 32;

/// A queue of work on one GPU.
pub struct Stream {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    /// Kernels read their lists, and write sums, over the bus: a few bytes for each page.
    lists: Staging,
    /// Work whose end nobody may be waiting for; what it keeps is let go here.
    under_way: Mutex<Vec<Arc<Work>>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // After a failed GPU nothing runs any more, so letting go is right in both cases.
        let ended = self.gpu.bind().and_then(|()| self.stream.synchronize().doing("waiting for the GPU"));
        debug_assert!(ended.is_ok() || cfg!(not(test)), "{ended:?}");
        self.under_way().drain(..).for_each(|work| work.end());
    }
}

/// What a copy reads or writes: memory of this GPU, of a peer, or staging.
#[derive(Debug, Clone, Copy)]
pub enum End<'a> {
    /// Memory of this process on the GPU.
    Device(&'a DeviceMemory),
    /// Memory of another process.
    Peer(&'a PeerMemory),
    /// Pinned host memory.
    Staged(&'a Lease),
}

impl<'a> End<'a> {
    fn memory(self) -> &'a dyn Memory {
        match self {
            Self::Device(memory) => memory,
            Self::Peer(memory) => memory,
            Self::Staged(memory) => memory,
        }
    }
}

impl Stream {
    /// A new queue beside all others.
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let stream = gpu.context().new_stream().doing("making a stream")?;
        let lists = Staging::new(gpu, LIST_BYTES)?;
        Ok(Self { gpu: gpu.clone(), stream, lists, under_way: Mutex::default() })
    }

    /// Copies spans from one memory to another with one kernel. Spans of one call must not overlap where they are written.
    /// All of them are checked before any byte moves. The memories stay alive until the copy is over, whatever happens to
    /// the fence.
    pub fn copy(&self, from: End<'_>, to: End<'_>, spans: &[Span]) -> Result<Fence, CudaError> {
        let (from, to) = (from.memory(), to.memory());
        let list = pages::list(from.place(), to.place(), spans)?;
        let slices = pages::slices(&list, self.gpu.blocks());
        self.gpu.bind()?;
        let work = self.work(&[from, to]);
        if !list.is_empty() {
            let address = self.listed(&list, &work)?;
            let mut launch = self.stream.launch_builder(self.gpu.copy_pages());
            launch.arg(&address).arg(&slices);
            // SAFETY: the arguments are those of `copy_pages`; every address in the list lies, with its length, in memory
            // that `work` keeps until the kernel is over.
            unsafe { launch.launch(grid(list.len() as u32 * slices)) }.doing("starting a copy")?;
        }
        self.submitted(work)
    }

    /// Copies one span with the GPU's copy engine instead of a kernel: for what lies together on both sides. Bounds and
    /// lifetimes as in [`Stream::copy`]; the span need not be aligned.
    pub fn copy_whole(&self, from: End<'_>, to: End<'_>, span: Span) -> Result<Fence, CudaError> {
        let (from, to) = (from.memory(), to.memory());
        let ends = (from.place().at(span.from, span.len), to.place().at(span.to, span.len));
        let (Some(begin), Some(target)) = ends else { return Err(CudaError::OutOfBounds { page: 0 }) };
        let len = usize::try_from(span.len).map_err(|_| CudaError::OutOfBounds { page: 0 })?;
        self.gpu.bind()?;
        let work = self.work(&[from, to]);
        // SAFETY: both ranges were checked against memory that `work` keeps until the copy is over.
        let started = unsafe { sys::cuMemcpyAsync(target, begin, len, self.stream.cu_stream()) };
        started.result().doing("starting a copy")?;
        self.submitted(work)
    }

    /// The xxh3-64 of each span (`to` is not looked at), the same numbers as [`starling_kv::transport::page_sum`].
    pub fn sums(&self, memory: End<'_>, spans: &[Span]) -> Result<Sums, CudaError> {
        let memory = memory.memory();
        let list = pages::hashed(memory.place(), spans)?;
        let result = self.lists.lease(list.len() * size_of::<u64>())?;
        let work = self.work(&[memory, &result]);
        if !list.is_empty() {
            let (address, count, sums) = (self.listed(&list, &work)?, list.len() as u32, result.place().base);
            let mut launch = self.stream.launch_builder(self.gpu.sum_pages());
            launch.arg(&address).arg(&count).arg(&sums);
            // SAFETY: the arguments are those of `sum_pages`; the list is as for a copy, and `sums` has room for `count`.
            unsafe { launch.launch(grid(count.div_ceil(SUMMED_EACH))) }.doing("starting a hash")?;
        }
        Ok(Sums { fence: self.submitted(work)?, lists: self.lists.clone(), result, count: spans.len() })
    }

    fn under_way(&self) -> MutexGuard<'_, Vec<Arc<Work>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// New work that keeps these memories; what is over is let go first.
    fn work(&self, memories: &[&dyn Memory]) -> Arc<Work> {
        self.under_way().retain(|work| !work.reap());
        let work = Arc::new(Work::default());
        memories.iter().for_each(|memory| work.keep(memory.keep()));
        work
    }

    /// Puts a list where the kernel reads it, and says where that is.
    fn listed(&self, list: &[KernelPage], work: &Work) -> Result<u64, CudaError> {
        let lease = self.lists.lease(size_of_val(list))?;
        let words = list.iter().flat_map(|page| [page.from, page.to, page.bytes]);
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        self.lists.region().write(lease.offset(), &bytes).ok_or(CudaError::OutOfBounds { page: 0 })?;
        work.keep(lease.keep());
        Ok(lease.place().base)
    }

    /// The fence behind all that was put into the stream.
    fn submitted(&self, work: Arc<Work>) -> Result<Fence, CudaError> {
        self.gpu.bind()?;
        if let Err(error) = work.report(&self.stream) {
            // Nobody would be told of the end, so it is awaited here.
            self.stream.synchronize().doing("waiting for the GPU")?;
            work.end();
            return Err(error);
        }
        self.under_way().push(Arc::clone(&work));
        Ok(Fence { work, stream: Arc::clone(&self.stream) })
    }
}

fn grid(blocks: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// The sums of one call of [`Stream::sums`], when they are there.
#[derive(Debug)]
#[must_use = "the sums are not there before it resolves"]
pub struct Sums {
    fence: Fence,
    lists: Staging,
    result: Lease,
    count: usize,
}

impl Sums {
    /// Blocks this thread until they are there; `None` when `within` has passed before.
    pub fn wait(&self, within: Duration) -> Result<Option<Vec<u64>>, CudaError> {
        Ok(if self.fence.wait(within)? { Some(self.read()?) } else { None })
    }

    fn read(&self) -> Result<Vec<u64>, CudaError> {
        let mut bytes = vec![0; self.count * size_of::<u64>()];
        self.lists.region().read(self.result.offset(), &mut bytes).ok_or(CudaError::OutOfBounds { page: 0 })?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
    }
}

impl Future for Sums {
    type Output = Result<Vec<u64>, CudaError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.fence).poll(cx) {
            Poll::Ready(Ok(())) => Poll::Ready(self.read()),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}
