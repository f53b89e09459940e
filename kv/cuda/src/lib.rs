//! KV blocks in the memory of NVIDIA GPUs.
//!
//! Called by workers whose engine computes on a GPU, and by `bench/gpu`; calls the CUDA driver, which is opened at run time.
//! A machine without one builds this crate, passes its tests, and gets [`CudaError::Missing`] from [`Gpu::open`] with what
//! is missing in one line.
//!
//! How blocks leave a GPU:
//!
//! - **To this process's host memory, a disk or another machine:** [`Staging`] is host memory that the GPU can reach and
//!   that is also a [`starling_kv::transport::Region`]. [`Stream::copy`] gathers scattered pages into a lease of it with
//!   one kernel, and any transport (`shm`, `tcp`, `ucx`) moves it from there. The other side scatters from its own.
//! - **To another process on the same machine:** [`DeviceMemory::share`] gives a ticket that [`PeerMemory::open`] maps. The
//!   same kernel then copies from GPU to GPU, without the host.
//! - **Between tiers:** the device pool is [`starling_kv::pool::BlockPool`] over a [`DevicePool`]; what it evicts is gathered
//!   for the host tier.
//!
//! [`Stream::sums`] hashes pages on the GPU to the same numbers as [`starling_kv::transport::page_sum`], so a block that
//! never touched the host is verified like every other. A [`Fence`] is a future: no thread waits for a GPU.
//!
//! What is trusted: as with shared memory, a process that opened a ticket can read all of the shared memory.

mod error;
mod fence;
mod gpu;
mod kernels;
mod memory;
mod pages;
mod peer;
mod pool;
mod staging;
mod stream;

pub use error::CudaError;
pub use fence::Fence;
pub use gpu::Gpu;
pub use kernels::{PTX, SOURCE, compile};
pub use memory::{DeviceMemory, ShareTicket};
pub use pages::{GPU_PAGES_MAX, PAGE_ALIGN, Place, SUM_BYTES_MIN, Span};
pub use peer::PeerMemory;
pub use pool::DevicePool;
pub use staging::{Lease, Staging};
pub use stream::{End, Stream, Sums};
