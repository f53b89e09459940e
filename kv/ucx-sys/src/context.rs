//! A UCX instance and the memory it knows.
//!
//! Called by whoever starts UCX. Shared by all threads: UCX is asked for its own locks.

use std::{
    ffi::{CString, c_void},
    mem::zeroed,
    ptr,
    sync::Arc,
};

use crate::{
    bindings::*,
    library::{Fault, Library},
};

/// The library's status for a call that cannot be made with these arguments.
pub(crate) const INVALID: ucs_status_t = -5;

/// A UCX instance. It outlives every handle made from it.
#[derive(Debug)]
pub struct Context {
    pub(crate) library: Arc<Library>,
    pub(crate) raw: ucp_context_h,
    memory_types: u64,
}

// SAFETY: it was made with `mt_workers_shared`, and `open` checked that UCX then locks by itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// UCX's configuration, until it is given back.
struct Config<'a>(&'a Library, ucp_config_h);

impl Drop for Config<'_> {
    fn drop(&mut self) {
        // SAFETY: it was read by `ucp_config_read` and is released once.
        unsafe { (self.0.api.ucp_config_release)(self.1) };
    }
}

fn config<'a>(library: &'a Library, options: &[(&str, &str)]) -> Result<Config<'a>, Fault> {
    let mut raw = ptr::null_mut();
    // SAFETY: no prefix and no file are allowed; `raw` is a place for the result.
    let status = unsafe { (library.api.ucp_config_read)(ptr::null(), ptr::null(), &raw mut raw) };
    library.check("ucp_config_read", status)?;
    let config = Config(library, raw);
    for (name, value) in options {
        let text = |text: &str| CString::new(text).map_err(|_| library.fault("ucp_config_modify", INVALID));
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: a living configuration and two texts that end with zero.
        let status = unsafe { (library.api.ucp_config_modify)(config.1, name.as_ptr(), value.as_ptr()) };
        library.check("ucp_config_modify", status)?;
    }
    Ok(config)
}

impl Context {
    /// An instance for one-sided operations and messages, with wake-up. `options` are UCX's own, by the names of its variables without
    /// `UCX_`; they go before the environment. Fails on a library that was built without threads.
    pub fn open(library: &Arc<Library>, options: &[(&str, &str)]) -> Result<Arc<Self>, Fault> {
        let config = config(library, options)?;
        // SAFETY: for this structure zeroes are values; the mask says which count.
        let mut params: ucp_params_t = unsafe { zeroed() };
        params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
        params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
        params.mt_workers_shared = 1;
        let (version, mut raw) = (library.version(), ptr::null_mut());
        // The library's own version: with another one it warns.
        // SAFETY: living parameters and configuration, and a place for the result.
        let status = unsafe {
            (library.api.ucp_init_version)(version.major, version.minor, &raw const params, config.1, &raw mut raw)
        };
        library.check("ucp_init", status)?;
        let mut context = Self { library: Arc::clone(library), raw, memory_types: 0 };
        // SAFETY: for this structure zeroes are values; the mask says which are asked for.
        let mut attr: ucp_context_attr_t = unsafe { zeroed() };
        attr.field_mask = UCP_ATTR_FIELD_THREAD_MODE | UCP_ATTR_FIELD_MEMORY_TYPES;
        // SAFETY: a living context and a place for the result.
        let status = unsafe { (library.api.ucp_context_query)(context.raw, &raw mut attr) };
        library.check("ucp_context_query", status)?;
        if attr.thread_mode != UCS_THREAD_MODE_MULTI {
            return Err(library.fault("ucp_init with threads", INVALID));
        }
        context.memory_types = attr.memory_types;
        Ok(Arc::new(context))
    }

    /// The library it runs on.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Whether this build of UCX moves CUDA's device memory.
    #[must_use]
    pub fn has_cuda(&self) -> bool {
        self.memory_types & 0b10 != 0
    }

    /// Makes host memory known, so that peers can be given keys to it.
    ///
    /// # Safety
    /// `len` bytes from `start` on stay mapped until the handle is dropped and no worker that a peer may reach is left.
    pub unsafe fn register(self: &Arc<Self>, start: *mut u8, len: usize) -> Result<Memory, Fault> {
        // SAFETY: for this structure zeroes are values; the mask says which count.
        let mut params: ucp_mem_map_params_t = unsafe { zeroed() };
        params.field_mask =
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.address = start.cast::<c_void>();
        params.length = len;
        params.memory_type = UCS_MEMORY_TYPE_HOST;
        let mut raw = ptr::null_mut();
        // SAFETY: a living context and parameters; the caller promises the memory.
        let status = unsafe { (self.library.api.ucp_mem_map)(self.raw, &raw const params, &raw mut raw) };
        self.library.check("ucp_mem_map", status)?;
        Ok(Memory { context: Arc::clone(self), raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every handle made from it holds it, so none is left.
        unsafe { (self.library.api.ucp_cleanup)(self.raw) };
    }
}

/// Memory that UCX knows.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    pub(crate) raw: ucp_mem_h,
}

// SAFETY: an address that UCX reads under the context's locks; nothing in it belongs to a thread.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// The key that lets a peer reach it, as bytes for [`crate::Endpoint::key`]: some dozens.
    pub fn key(&self) -> Result<Vec<u8>, Fault> {
        let library = &self.context.library;
        let (mut bytes, mut len) = (ptr::null_mut(), 0);
        // SAFETY: living handles of one context, and places for the results.
        let status = unsafe { (library.api.ucp_rkey_pack)(self.context.raw, self.raw, &raw mut bytes, &raw mut len) };
        library.check("ucp_rkey_pack", status)?;
        // SAFETY: UCX returned `len` bytes there, which stay until they are released below.
        let key = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) }.to_vec();
        // SAFETY: packed above, released once.
        unsafe { (library.api.ucp_rkey_buffer_release)(bytes) };
        Ok(key)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by this context and unmapped once. A failure leaves it mapped, which only costs memory.
        let _stays = unsafe { (self.context.library.api.ucp_mem_unmap)(self.context.raw, self.raw) };
    }
}
