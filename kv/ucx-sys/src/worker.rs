//! A worker: one thread's queue of UCX operations.
//!
//! Called by the thread that owns it. Never: leaves that thread (`Rc` sees to it), which is why it can be made in UCX's
//! fastest mode.

use std::{
    cell::OnceCell,
    ffi::{c_uint, c_void},
    fmt,
    mem::zeroed,
    os::fd::{BorrowedFd, RawFd},
    ptr,
    rc::Rc,
    slice,
    sync::Arc,
};

use crate::{
    bindings::*,
    context::{Context, INVALID},
    endpoint::Endpoint,
    library::{Fault, Library},
};

/// The number by which UCX knows this crate's one kind of message.
pub(crate) const MESSAGE: c_uint = 1;

type Take = dyn Fn(&[u8], &[u8]);

/// Who takes messages: their header and their bytes.
struct Taker(Box<Take>);

impl fmt::Debug for Taker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Taker")
    }
}

/// Called by UCX in `ucp_worker_progress`, so on the worker's thread.
unsafe extern "C" fn on_message(
    taker: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: UCX passes a living parameter.
    let apart = unsafe { (*param).recv_attr } & UCP_AM_RECV_ATTR_FLAG_RNDV != 0;
    let bytes = |start: *const c_void, len: usize| match len {
        0 => [].as_slice(),
        // SAFETY: UCX passes that many bytes, for the time of this call.
        _ => unsafe { slice::from_raw_parts(start.cast::<u8>(), len) },
    };
    // Where the bytes would have to be fetched, `data` is none of them: nobody here sends so.
    let data = if apart { [].as_slice() } else { bytes(data, length) };
    // SAFETY: the address of the worker's taker, which is dropped after the worker and never changed.
    let Taker(take) = unsafe { &*taker.cast::<Taker>() };
    take(bytes(header, header_length), data);
    UCS_OK
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    pub(crate) inner: Rc<Inner>,
}

/// What a worker's handles hold.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: ucp_worker_h,
    event: RawFd,
    /// In a box, because UCX knows its address; dropped after the worker.
    taker: OnceCell<Box<Taker>>,
}

impl Inner {
    pub(crate) fn library(&self) -> &Library {
        &self.context.library
    }

    pub(crate) fn progress(&self) -> bool {
        // SAFETY: a living worker, on its own thread.
        unsafe { (self.library().api.ucp_worker_progress)(self.raw) > 0 }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: endpoints, keys and requests hold this, so none is left; it is its own thread.
        unsafe { (self.library().api.ucp_worker_destroy)(self.raw) };
    }
}

impl Worker {
    /// A worker of this thread.
    pub fn new(context: &Arc<Context>) -> Result<Self, Fault> {
        let library = &context.library;
        // SAFETY: for this structure zeroes are values; the mask says which count.
        let mut params: ucp_worker_params_t = unsafe { zeroed() };
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        params.thread_mode = UCS_THREAD_MODE_SINGLE;
        let mut raw = ptr::null_mut();
        // SAFETY: a living context and parameters, and a place for the result.
        let status = unsafe { (library.api.ucp_worker_create)(context.raw, &raw const params, &raw mut raw) };
        library.check("ucp_worker_create", status)?;
        let mut inner = Inner { context: Arc::clone(context), raw, event: -1, taker: OnceCell::new() };
        // SAFETY: a living worker and a place for the result.
        let status = unsafe { (library.api.ucp_worker_get_efd)(raw, &raw mut inner.event) };
        library.check("ucp_worker_get_efd", status)?;
        Ok(Self { inner: Rc::new(inner) })
    }

    /// Gives every message that comes from now on to `take`: its header and its bytes, which are UCX's and gone after the
    /// call. It is called by [`Worker::progress`] and must not call that. Once for each worker; messages before it are lost.
    pub fn on_message(&self, take: impl Fn(&[u8], &[u8]) + 'static) -> Result<(), Fault> {
        let library = self.inner.library();
        let call = "ucp_worker_set_am_recv_handler";
        let fresh = self.inner.taker.set(Box::new(Taker(Box::new(take)))).is_ok();
        let taker = self.inner.taker.get().filter(|_| fresh).ok_or_else(|| library.fault(call, INVALID))?;
        // SAFETY: for this structure zeroes are values; the mask says which count.
        let mut params: ucp_am_handler_param_t = unsafe { zeroed() };
        params.field_mask =
            UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        params.id = MESSAGE;
        params.cb = Some(on_message);
        params.arg = ptr::from_ref::<Taker>(taker).cast_mut().cast();
        // SAFETY: a living worker and parameters.
        library.check(call, unsafe { (library.api.ucp_worker_set_am_recv_handler)(self.inner.raw, &raw const params) })
    }

    /// Does what can be done now; false when there was nothing.
    #[must_use]
    pub fn progress(&self) -> bool {
        self.inner.progress()
    }

    /// Prepares for sleep: true when [`Worker::event`] will become readable with the next thing to do, false when there is
    /// something already.
    pub fn arm(&self) -> Result<bool, Fault> {
        // SAFETY: a living worker, on its own thread.
        let status = unsafe { (self.inner.library().api.ucp_worker_arm)(self.inner.raw) };
        if status == UCS_ERR_BUSY {
            return Ok(false);
        }
        self.inner.library().check("ucp_worker_arm", status).map(|()| true)
    }

    /// Becomes readable when an armed worker has something to do. Only to be waited on.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps it open as long as the worker lives.
        unsafe { BorrowedFd::borrow_raw(self.inner.event) }
    }

    /// How peers reach this worker, as bytes for [`Worker::connect`]: some dozens for each network device.
    pub fn address(&self) -> Result<Vec<u8>, Fault> {
        let library = self.inner.library();
        let (mut address, mut len) = (ptr::null_mut(), 0);
        // SAFETY: a living worker, and places for the results.
        let status = unsafe { (library.api.ucp_worker_get_address)(self.inner.raw, &raw mut address, &raw mut len) };
        library.check("ucp_worker_get_address", status)?;
        // SAFETY: UCX returned `len` bytes there, which stay until they are released below.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: made above, released once.
        unsafe { (library.api.ucp_worker_release_address)(self.inner.raw, address) };
        Ok(bytes)
    }

    /// A connection to the worker with this address. Fails when no way of UCX leads there; a peer that is gone shows
    /// later.
    ///
    /// # Safety
    /// `address` is what [`Worker::address`] returned in a process that is trusted: UCX reads it without checks.
    pub unsafe fn connect(&self, address: &[u8]) -> Result<Endpoint, Fault> {
        // SAFETY: the caller's promise.
        unsafe { Endpoint::new(&self.inner, address) }
    }
}
