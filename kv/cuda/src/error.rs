//! What can go wrong with a GPU. Built where it happens; matched by the worker, which then keeps to host memory.

use cudarc::driver::result::DriverError;
use starling_kv::transport::TransferError;

/// A fault of the GPU, its driver, or a request that does not fit its memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no usable GPU here. Nothing else of this crate can be used; nothing else is wrong.
    #[error("no GPU: {0}")]
    Missing(String),
    /// The driver refused or failed. After a fault of the kind "launch failed" or "illegal address" the process must make no
    /// further use of this GPU: every later call fails alike.
    #[error("{doing}: {message}")]
    Driver {
        /// What was asked of it.
        doing: &'static str,
        /// Its own words.
        message: String,
    },
    /// A page does not lie inside its memory. Nothing was copied.
    #[error("page {page} does not lie inside its memory")]
    OutOfBounds {
        /// Its place in the list.
        page: usize,
    },
    /// A page does not begin and end at a multiple of [`PAGE_ALIGN`](crate::PAGE_ALIGN) bytes, or is empty. Nothing was copied.
    #[error("page {page} does not begin and end at a multiple of 16 bytes, or is empty or too short to be hashed")]
    Misaligned {
        /// Its place in the list.
        page: usize,
    },
    /// More pages than one call takes. Nothing was copied.
    #[error("{pages} pages in one call, at most {}", crate::GPU_PAGES_MAX)]
    TooMany {
        /// How many there were.
        pages: usize,
    },
    /// All staging memory is leased, or the lease asked for is larger than all of it.
    #[error("{wanted} bytes of staging memory are wanted, {free} are free in one piece")]
    StagingFull {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes in the largest free piece.
        free: usize,
    },
    /// A ticket of another machine, another GPU, or of no GPU at all.
    #[error("the ticket of shared GPU memory cannot be used here: {0}")]
    Ticket(String),
    /// Host memory could not be had.
    #[error("staging memory: {0}")]
    Host(#[from] TransferError),
}

/// Names what was asked of the driver when it fails.
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, CudaError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, doing: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| {
            let text = error.error_string().ok().and_then(|text| text.to_str().ok());
            CudaError::Driver { doing, message: text.map_or_else(|| format!("{:?}", error.0), str::to_owned) }
        })
    }
}
