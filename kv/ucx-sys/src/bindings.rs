//! Types and constants of UCP as bindgen 0.60.1 wrote them from UCX 1.22.0's `ucp/api/ucp.h`, cut to what this crate
//! names. The sizes and offsets at the end are a C compiler's for the same headers.
//!
//! A library from 1.13 on reads them alike: since then structures grew at their ends only, and a mask in each says which
//! fields count. Two traps are left out on purpose: `UCS_MEMORY_TYPE_UNKNOWN` (5 in 1.13, 10 in 1.22) and the status as
//! an enum (a library may return a number that its headers do not name).
#![allow(non_camel_case_types, reason = "the names are those of the C headers")]
#![allow(dead_code, reason = "fields are there for the layout")]

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

pub(crate) type ucs_status_t = i8;
pub(crate) type ucs_status_ptr_t = *mut c_void;
pub(crate) type ucs_memory_type_t = c_uint;
pub(crate) type ucs_thread_mode_t = c_uint;
pub(crate) type ucp_err_handling_mode_t = c_uint;
pub(crate) type ucp_datatype_t = u64;

pub(crate) const UCS_OK: ucs_status_t = 0;
pub(crate) const UCS_INPROGRESS: ucs_status_t = 1;
pub(crate) const UCS_ERR_BUSY: ucs_status_t = -15;
pub(crate) const UCS_ERR_LAST: ucs_status_t = -100;

pub(crate) const UCS_MEMORY_TYPE_HOST: ucs_memory_type_t = 0;
pub(crate) const UCS_THREAD_MODE_SINGLE: ucs_thread_mode_t = 0;
pub(crate) const UCS_THREAD_MODE_MULTI: ucs_thread_mode_t = 2;

pub(crate) const UCP_FEATURE_RMA: u64 = 2;
pub(crate) const UCP_FEATURE_WAKEUP: u64 = 16;
pub(crate) const UCP_FEATURE_AM: u64 = 64;

pub(crate) const UCP_AM_SEND_FLAG_EAGER: u32 = 2;
pub(crate) const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;
pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1;
pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 4;
pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_ARG: u64 = 8;

pub(crate) const UCP_PARAM_FIELD_FEATURES: u64 = 1;
pub(crate) const UCP_PARAM_FIELD_MT_WORKERS_SHARED: u64 = 32;

pub(crate) const UCP_ATTR_FIELD_THREAD_MODE: u64 = 2;
pub(crate) const UCP_ATTR_FIELD_MEMORY_TYPES: u64 = 4;

pub(crate) const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;

pub(crate) const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 2;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 4;
pub(crate) const UCP_ERR_HANDLING_MODE_PEER: ucp_err_handling_mode_t = 1;
pub(crate) const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;

pub(crate) const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1;
pub(crate) const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 2;
pub(crate) const UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE: u64 = 16;

pub(crate) const UCP_OP_ATTR_FIELD_FLAGS: u32 = 16;
pub(crate) const UCP_OP_ATTR_FIELD_MEMH: u32 = 256;

macro_rules! opaque {
    ($($name:ident = $handle:ident),*) => {$(
        #[repr(C)]
        #[derive(Debug)]
        pub(crate) struct $name {
            _unused: [u8; 0],
        }
        pub(crate) type $handle = *mut $name;
    )*};
}

opaque!(
    ucp_context = ucp_context_h,
    ucp_config = ucp_config_h,
    ucp_worker = ucp_worker_h,
    ucp_address = ucp_address_h,
    ucp_ep = ucp_ep_h,
    ucp_conn_request = ucp_conn_request_h,
    ucp_mem = ucp_mem_h,
    ucp_rkey = ucp_rkey_h
);

/// A callback that this crate never sets: one pointer, null.
pub(crate) type unused_callback_t = Option<unsafe extern "C" fn()>;
pub(crate) type ucp_err_handler_cb_t =
    Option<unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t)>;

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucs_sock_addr_t {
    pub(crate) addr: *const c_void,
    pub(crate) addrlen: c_uint,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucs_cpu_set_t {
    pub(crate) ucs_bits: [c_ulong; 16],
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_params_t {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: unused_callback_t,
    pub(crate) request_cleanup: unused_callback_t,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
    pub(crate) node_local_id: usize,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_context_attr_t {
    pub(crate) field_mask: u64,
    pub(crate) request_size: usize,
    pub(crate) thread_mode: ucs_thread_mode_t,
    pub(crate) memory_types: u64,
    pub(crate) name: [c_char; 32],
    pub(crate) device_counter_size: usize,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_worker_params_t {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: ucs_thread_mode_t,
    pub(crate) cpu_mask: ucs_cpu_set_t,
    pub(crate) events: c_uint,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
    pub(crate) name: *const c_char,
    pub(crate) am_alignment: usize,
    pub(crate) client_id: u64,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_err_handler_t {
    pub(crate) cb: ucp_err_handler_cb_t,
    pub(crate) arg: *mut c_void,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_ep_params_t {
    pub(crate) field_mask: u64,
    pub(crate) address: *const ucp_address,
    pub(crate) err_mode: ucp_err_handling_mode_t,
    pub(crate) err_handler: ucp_err_handler_t,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: c_uint,
    pub(crate) sockaddr: ucs_sock_addr_t,
    pub(crate) conn_request: ucp_conn_request_h,
    pub(crate) name: *const c_char,
    pub(crate) local_sockaddr: ucs_sock_addr_t,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_mem_map_params_t {
    pub(crate) field_mask: u64,
    pub(crate) address: *mut c_void,
    pub(crate) length: usize,
    pub(crate) flags: c_uint,
    pub(crate) prot: c_uint,
    pub(crate) memory_type: ucs_memory_type_t,
    pub(crate) exported_memh_buffer: *const c_void,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_request_param_t {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    /// A union of four kinds of callback in C.
    pub(crate) cb: unused_callback_t,
    pub(crate) datatype: ucp_datatype_t,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: ucs_memory_type_t,
    /// A union of two pointers in C.
    pub(crate) recv_info: *mut c_void,
    pub(crate) memh: ucp_mem_h,
    pub(crate) remote_datatype: ucp_datatype_t,
    pub(crate) remote: *const c_void,
    pub(crate) remote_count: usize,
}

pub(crate) type ucp_am_recv_callback_t = Option<
    unsafe extern "C" fn(
        arg: *mut c_void,
        header: *const c_void,
        header_length: usize,
        data: *mut c_void,
        length: usize,
        param: *const ucp_am_recv_param_t,
    ) -> ucs_status_t,
>;

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_am_handler_param_t {
    pub(crate) field_mask: u64,
    pub(crate) id: c_uint,
    pub(crate) flags: u32,
    pub(crate) cb: ucp_am_recv_callback_t,
    pub(crate) arg: *mut c_void,
}

#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub(crate) struct ucp_am_recv_param_t {
    pub(crate) recv_attr: u64,
    pub(crate) reply_ep: ucp_ep_h,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ucp_params_t>() == 88 && offset_of!(ucp_params_t, mt_workers_shared) == 48);
    assert!(size_of::<ucp_context_attr_t>() == 72 && offset_of!(ucp_context_attr_t, memory_types) == 24);
    assert!(size_of::<ucp_worker_params_t>() == 200 && offset_of!(ucp_worker_params_t, events) == 144);
    assert!(size_of::<ucp_ep_params_t>() == 104 && offset_of!(ucp_ep_params_t, err_mode) == 16);
    assert!(offset_of!(ucp_ep_params_t, err_handler) == 24 && offset_of!(ucp_ep_params_t, flags) == 48);
    assert!(size_of::<ucp_mem_map_params_t>() == 48 && offset_of!(ucp_mem_map_params_t, memory_type) == 32);
    assert!(size_of::<ucp_request_param_t>() == 96 && offset_of!(ucp_request_param_t, memh) == 64);
    assert!(offset_of!(ucp_request_param_t, datatype) == 24 && offset_of!(ucp_request_param_t, memory_type) == 48);
    assert!(size_of::<ucp_am_handler_param_t>() == 32 && offset_of!(ucp_am_handler_param_t, cb) == 16);
    assert!(size_of::<ucp_am_recv_param_t>() == 16 && offset_of!(ucp_am_recv_param_t, reply_ep) == 8);
};

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $out:ty)?;)*) => {
        /// The functions that this crate calls, as addresses in the loaded library.
        #[derive(Debug)]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument: $kind),*) $(-> $out)?,)*
        }

        impl Api {
            /// Finds them all, or says which is missing.
            ///
            /// # Safety
            /// `library` is a libucp of a version whose functions have these signatures, and stays loaded as long as
            /// one of them may be called.
            pub(crate) unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0"))? },)*
                })
            }
        }
    };
}

functions! {
    ucs_status_string(status: ucs_status_t) -> *const c_char;
    ucp_config_read(prefix: *const c_char, file: *const c_char, config: *mut ucp_config_h) -> ucs_status_t;
    ucp_config_modify(config: ucp_config_h, name: *const c_char, value: *const c_char) -> ucs_status_t;
    ucp_config_release(config: ucp_config_h);
    ucp_init_version(
        major: c_uint,
        minor: c_uint,
        params: *const ucp_params_t,
        config: ucp_config_h,
        context: *mut ucp_context_h
    ) -> ucs_status_t;
    ucp_cleanup(context: ucp_context_h);
    ucp_context_query(context: ucp_context_h, attr: *mut ucp_context_attr_t) -> ucs_status_t;
    ucp_worker_create(
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker: *mut ucp_worker_h
    ) -> ucs_status_t;
    ucp_worker_destroy(worker: ucp_worker_h);
    ucp_worker_progress(worker: ucp_worker_h) -> c_uint;
    ucp_worker_get_efd(worker: ucp_worker_h, fd: *mut c_int) -> ucs_status_t;
    ucp_worker_arm(worker: ucp_worker_h) -> ucs_status_t;
    ucp_worker_get_address(worker: ucp_worker_h, address: *mut ucp_address_h, len: *mut usize) -> ucs_status_t;
    ucp_worker_release_address(worker: ucp_worker_h, address: ucp_address_h);
    ucp_ep_create(worker: ucp_worker_h, params: *const ucp_ep_params_t, ep: *mut ucp_ep_h) -> ucs_status_t;
    ucp_ep_close_nbx(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_flush_nbx(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_worker_set_am_recv_handler(worker: ucp_worker_h, param: *const ucp_am_handler_param_t) -> ucs_status_t;
    ucp_am_send_nbx(
        ep: ucp_ep_h,
        id: c_uint,
        header: *const c_void,
        header_length: usize,
        from: *const c_void,
        len: usize,
        param: *const ucp_request_param_t
    ) -> ucs_status_ptr_t;
    ucp_put_nbx(
        ep: ucp_ep_h,
        from: *const c_void,
        len: usize,
        to: u64,
        rkey: ucp_rkey_h,
        param: *const ucp_request_param_t
    ) -> ucs_status_ptr_t;
    ucp_get_nbx(
        ep: ucp_ep_h,
        to: *mut c_void,
        len: usize,
        from: u64,
        rkey: ucp_rkey_h,
        param: *const ucp_request_param_t
    ) -> ucs_status_ptr_t;
    ucp_mem_map(context: ucp_context_h, params: *const ucp_mem_map_params_t, memh: *mut ucp_mem_h) -> ucs_status_t;
    ucp_mem_unmap(context: ucp_context_h, memh: ucp_mem_h) -> ucs_status_t;
    ucp_rkey_pack(
        context: ucp_context_h,
        memh: ucp_mem_h,
        rkey: *mut *mut c_void,
        len: *mut usize
    ) -> ucs_status_t;
    ucp_rkey_buffer_release(rkey: *mut c_void);
    ucp_ep_rkey_unpack(ep: ucp_ep_h, packed: *const c_void, rkey: *mut ucp_rkey_h) -> ucs_status_t;
    ucp_rkey_destroy(rkey: ucp_rkey_h);
    ucp_request_check_status(request: *mut c_void) -> ucs_status_t;
    ucp_request_free(request: *mut c_void);
}
