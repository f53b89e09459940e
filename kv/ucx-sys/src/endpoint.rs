//! A connection to a peer's worker: its keys and its operations.
//!
//! Called by the thread of its worker. An operation that fails leaves the endpoint to be dropped: a UCX endpoint in error
//! may accept more and never end it.

use std::{
    cell::{Cell, RefCell},
    ffi::c_void,
    mem::zeroed,
    ptr,
    rc::Rc,
    time::{Duration, Instant},
};

use crate::{
    bindings::*,
    context::Memory,
    library::Fault,
    worker::{Inner as Worker, MESSAGE},
};

/// How long a forced close may take. It ends at once unless the library is broken.
const CLOSING: Duration = Duration::from_millis(200);

/// See the module.
#[derive(Debug)]
pub struct Endpoint {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    worker: Rc<Worker>,
    raw: ucp_ep_h,
    /// The status with which UCX reported its end; in a box, because UCX knows its address.
    failed: Box<Cell<ucs_status_t>>,
    /// Its keys. Operations that wait inside UCX still read them, so they stay until it is closed.
    keys: RefCell<Vec<ucp_rkey_h>>,
}

/// Called by UCX in `ucp_worker_progress`, so on the worker's thread.
unsafe extern "C" fn on_failure(failed: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the address of `Inner::failed`, which lives until the endpoint is closed.
    unsafe { &*failed.cast::<Cell<ucs_status_t>>() }.set(status);
}

fn parameters() -> ucp_request_param_t {
    // SAFETY: for this structure zeroes are values; the mask says which count.
    unsafe { zeroed() }
}

impl Endpoint {
    /// # Safety
    /// As for [`crate::Worker::connect`].
    pub(crate) unsafe fn new(worker: &Rc<Worker>, address: &[u8]) -> Result<Self, Fault> {
        let failed = Box::new(Cell::new(UCS_OK));
        // SAFETY: for this structure zeroes are values; the mask says which count.
        let mut params: ucp_ep_params_t = unsafe { zeroed() };
        params.field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.address = address.as_ptr().cast();
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler = ucp_err_handler_t { cb: Some(on_failure), arg: (&raw const *failed).cast_mut().cast() };
        let mut raw = ptr::null_mut();
        // SAFETY: a living worker on its own thread, living parameters, and a place for the result.
        let status = unsafe { (worker.library().api.ucp_ep_create)(worker.raw, &raw const params, &raw mut raw) };
        worker.library().check("ucp_ep_create", status)?;
        Ok(Self { inner: Rc::new(Inner { worker: Rc::clone(worker), raw, failed, keys: RefCell::default() }) })
    }

    /// `Err` when UCX reported that the peer is gone. Seen only while the worker makes progress.
    pub fn alive(&self) -> Result<(), Fault> {
        self.inner.worker.library().check("endpoint", self.inner.failed.get())
    }

    /// The right to reach a peer's memory, from the bytes of its [`Memory::key`]. It is kept until the endpoint is closed.
    ///
    /// # Safety
    /// `packed` is what [`Memory::key`] returned in the process of the peer: UCX reads it without checks.
    pub unsafe fn key(&self, packed: &[u8]) -> Result<RemoteKey, Fault> {
        let (library, mut raw) = (self.inner.worker.library(), ptr::null_mut());
        // SAFETY: a living endpoint; the caller promises the bytes; a place for the result.
        let status = unsafe { (library.api.ucp_ep_rkey_unpack)(self.inner.raw, packed.as_ptr().cast(), &raw mut raw) };
        library.check("ucp_ep_rkey_unpack", status)?;
        self.inner.keys.borrow_mut().push(raw);
        Ok(RemoteKey { endpoint: Rc::clone(&self.inner), raw })
    }

    /// Makes all puts so far visible at the peer. A put that is complete says nothing of that.
    pub fn flush(&self) -> Result<Request, Fault> {
        let params = parameters();
        // SAFETY: a living endpoint and parameters.
        let pointer = unsafe { (self.inner.worker.library().api.ucp_ep_flush_nbx)(self.inner.raw, &raw const params) };
        self.inner.request("flush", pointer)
    }

    /// Sends a message of `len` bytes from `from` on to the peer's [`crate::Worker::on_message`]. UCX reads the header until
    /// the message is over, whatever became of its request: so it is one that is there for ever.
    ///
    /// # Safety
    /// `from` has `len` readable bytes until the request is over or the worker is gone.
    pub unsafe fn send(&self, header: &'static [u8], from: *const u8, len: usize) -> Result<Request, Fault> {
        let mut params = parameters();
        params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        // The other protocol reads the bytes later, and its requests never end when the peer dies.
        params.flags = UCP_AM_SEND_FLAG_EAGER;
        let api = &self.inner.worker.library().api;
        let (start, bytes) = (header.as_ptr().cast(), header.len());
        // SAFETY: a living endpoint, a header that stays, living parameters; the caller promises the bytes.
        let pointer = unsafe {
            (api.ucp_am_send_nbx)(self.inner.raw, MESSAGE, start, bytes, from.cast(), len, &raw const params)
        };
        self.inner.request("send", pointer)
    }
}

impl Inner {
    fn request(self: &Rc<Self>, call: &'static str, pointer: ucs_status_ptr_t) -> Result<Request, Fault> {
        let pending = self.worker.library().begun(call, pointer)?;
        Ok(Request { endpoint: Rc::clone(self), call, pending: Cell::new(pending) })
    }
}

impl Inner {
    fn close(&self) {
        let library = self.worker.library();
        let mut params = parameters();
        params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: a living endpoint, closed once.
        let pointer = unsafe { (library.api.ucp_ep_close_nbx)(self.raw, &raw const params) };
        // An endpoint that UCX has given up already cannot be closed, and need not be.
        let Ok(Some(request)) = library.begun("close", pointer) else { return };
        let until = Instant::now() + CLOSING;
        // SAFETY: the request just made, freed once, below.
        while unsafe { library.over("close", request) } == Ok(false) && Instant::now() < until {
            self.worker.progress();
        }
        // SAFETY: as above. One that is not over yet is freed by UCX at its end.
        unsafe { (library.api.ucp_request_free)(request) };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
        for key in self.keys.borrow_mut().drain(..) {
            // SAFETY: unpacked by this endpoint, destroyed once; what used it ended with the endpoint.
            unsafe { (self.worker.library().api.ucp_rkey_destroy)(key) };
        }
    }
}

/// The right to reach a peer's memory through one endpoint.
#[derive(Debug)]
pub struct RemoteKey {
    endpoint: Rc<Inner>,
    raw: ucp_rkey_h,
}

impl RemoteKey {
    /// Reads `len` bytes at the peer's address `from` into `to`. `known` is the registration of the memory around `to`, if
    /// there is one.
    ///
    /// # Safety
    /// `to` has `len` writable bytes until the request is over or the worker is gone, and `known` covers them.
    pub unsafe fn get(&self, to: *mut u8, len: usize, from: u64, known: Option<&Memory>) -> Result<Request, Fault> {
        let (api, params) = (&self.endpoint.worker.library().api, with_memory(known));
        // SAFETY: living handles of one endpoint; the caller promises the memory.
        let pointer =
            unsafe { (api.ucp_get_nbx)(self.endpoint.raw, to.cast(), len, from, self.raw, &raw const params) };
        self.endpoint.request("get", pointer)
    }

    /// Writes `len` bytes from `from` to the peer's address `to`. `known` is as for [`RemoteKey::get`].
    ///
    /// # Safety
    /// `from` has `len` readable bytes until the request is over or the worker is gone, and `known` covers them.
    pub unsafe fn put(&self, from: *const u8, len: usize, to: u64, known: Option<&Memory>) -> Result<Request, Fault> {
        let (api, params) = (&self.endpoint.worker.library().api, with_memory(known));
        // SAFETY: living handles of one endpoint; the caller promises the memory.
        let pointer =
            unsafe { (api.ucp_put_nbx)(self.endpoint.raw, from.cast(), len, to, self.raw, &raw const params) };
        self.endpoint.request("put", pointer)
    }
}

fn with_memory(known: Option<&Memory>) -> ucp_request_param_t {
    let mut params = parameters();
    if let Some(memory) = known {
        params.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
        params.memh = memory.raw;
    }
    params
}

/// An operation. Dropping it does not end it: its memory is UCX's until it is over or the worker is gone.
#[derive(Debug)]
#[must_use = "an operation may be under way"]
pub struct Request {
    endpoint: Rc<Inner>,
    call: &'static str,
    pending: Cell<Option<ucs_status_ptr_t>>,
}

impl Request {
    /// Whether it is over; how it ended is told once.
    pub fn over(&self) -> Result<bool, Fault> {
        let Some(request) = self.pending.get() else { return Ok(true) };
        let library = self.endpoint.worker.library();
        // SAFETY: pending, so not freed.
        match unsafe { library.over(self.call, request) } {
            Ok(false) => Ok(false),
            ended => {
                self.free();
                ended
            }
        }
    }

    fn free(&self) {
        if let Some(request) = self.pending.take() {
            // SAFETY: returned by UCX and freed once. One that is not over yet is freed by UCX at its end.
            unsafe { (self.endpoint.worker.library().api.ucp_request_free)(request) };
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.free();
    }
}
