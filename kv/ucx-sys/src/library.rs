//! Finds and opens the library, once a process, and checks that it is one that the bindings fit.
//!
//! Called by whoever starts UCX; calls the dynamic loader. Never: unloads it. UCX has threads' and exit handlers of its
//! own that must not lose their code.

use std::{
    ffi::{CStr, c_char, c_int, c_uint},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};
use thiserror::Error;

use crate::bindings::{Api, UCS_ERR_LAST, UCS_INPROGRESS, ucs_status_ptr_t, ucs_status_t};

/// The oldest version of UCX that was tried with these bindings.
pub const OLDEST: Version = Version { major: 1, minor: 13, patch: 0 };

/// The name by which the system's loader knows the library.
const SYSTEM: &str = "libucp.so.0";
/// Its parts, each before those that need it.
const PARTS: [&str; 4] = ["libucm.so.0", "libucs.so.0", "libuct.so.0", SYSTEM];

/// A version of UCX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes with the ABI.
    pub major: u32,
    /// Changes with additions.
    pub minor: u32,
    /// Changes with repairs.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why there is no UCX here.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LoadError {
    /// The loader found no library, or it lacks a part or a function.
    #[error("{0}")]
    Absent(String),
    /// There is one that the bindings do not fit.
    #[error("UCX {0} is not supported, 1.x from {OLDEST} on is")]
    Version(Version),
    /// Another copy is in use in this process.
    #[error("UCX was loaded from {0} already")]
    Another(PathBuf),
}

/// A call that UCX refused or that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call}: {text}")]
pub struct Fault {
    /// The function.
    pub call: &'static str,
    /// UCX's status, below 0.
    pub code: i8,
    /// What UCX says of it.
    pub text: String,
}

/// UCX, loaded.
#[derive(Debug)]
pub struct Library {
    pub(crate) api: Api,
    version: Version,
    path: PathBuf,
}

static LOADED: Mutex<Option<(Option<PathBuf>, Arc<Library>)>> = Mutex::new(None);

impl Library {
    /// Opens the library at `path` (`libucp.so.0` with its parts beside it, as in a wheel of PyPI's `libucx`), or the
    /// system's. A second call returns the first one's. `quiet` turns UCX's own messages to standard output off.
    pub fn load(path: Option<&Path>, quiet: bool) -> Result<Arc<Self>, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((asked, library)) = &*loaded {
            return match asked.as_deref() == path {
                true => Ok(Arc::clone(library)),
                false => Err(LoadError::Another(library.path.clone())),
            };
        }
        let library = Arc::new(open(path, quiet)?);
        *loaded = Some((path.map(Path::to_owned), Arc::clone(&library)));
        Ok(library)
    }

    /// What was loaded.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file that was asked for.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `Err` for a status below 0.
    pub(crate) fn check(&self, call: &'static str, status: ucs_status_t) -> Result<(), Fault> {
        if status >= 0 { Ok(()) } else { Err(self.fault(call, status)) }
    }

    pub(crate) fn fault(&self, call: &'static str, status: ucs_status_t) -> Fault {
        // SAFETY: it takes any number and returns a constant text.
        let text = unsafe { CStr::from_ptr((self.api.ucs_status_string)(status)) };
        Fault { call, code: status, text: text.to_string_lossy().into_owned() }
    }

    /// What an operation returned: `None` when it is complete, a request that is under way, or an error.
    pub(crate) fn begun(
        &self,
        call: &'static str,
        pointer: ucs_status_ptr_t,
    ) -> Result<Option<ucs_status_ptr_t>, Fault> {
        // UCX puts a status where no address can be: in the last hundred bytes of memory.
        let number = pointer as isize;
        if number == 0 {
            Ok(None)
        } else if (isize::from(UCS_ERR_LAST)..0).contains(&number) {
            Err(self.fault(call, number as ucs_status_t))
        } else {
            Ok(Some(pointer))
        }
    }

    /// Whether a request is over.
    ///
    /// # Safety
    /// `request` was returned by an operation and not freed.
    pub(crate) unsafe fn over(&self, call: &'static str, request: ucs_status_ptr_t) -> Result<bool, Fault> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.api.ucp_request_check_status)(request) };
        self.check(call, status)?;
        Ok(status != UCS_INPROGRESS)
    }
}

/// The loader's own words: they name the file.
fn absent(error: impl std::error::Error) -> LoadError {
    LoadError::Absent(error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

fn handle(name: impl libloading::AsFilename, flags: c_int) -> Result<Handle, LoadError> {
    // SAFETY: UCX's initialisers set up its own state and signal handlers, which `settle` takes back.
    unsafe { Handle::open(Some(name), flags) }.map_err(absent)
}

fn open(path: Option<&Path>, quiet: bool) -> Result<Library, LoadError> {
    let library = match path {
        None => handle(SYSTEM, RTLD_NOW | RTLD_LOCAL)?,
        Some(path) => {
            // A wheel's libraries look for each other where they were built. Loaded by their paths first, they are found
            // by their names. The first ones need each other, so their functions are looked up when they are called.
            for part in &PARTS[..3] {
                // Never unloaded: the last one needs it.
                std::mem::forget(handle(path.with_file_name(part), RTLD_LAZY | RTLD_GLOBAL)?);
            }
            handle(path, RTLD_NOW | RTLD_GLOBAL)?
        }
    };
    let library = libloading::Library::from(library);
    let version = version(&library)?;
    if version.major != OLDEST.major || version < OLDEST {
        std::mem::forget(library);
        return Err(LoadError::Version(version));
    }
    settle(&library, quiet);
    // SAFETY: the version is one whose functions have these signatures, and the library is never unloaded.
    let api = unsafe { Api::find(&library) };
    std::mem::forget(library);
    Ok(Library { api: api.map_err(absent)?, version, path: path.unwrap_or(Path::new(SYSTEM)).to_owned() })
}

fn version(library: &libloading::Library) -> Result<Version, LoadError> {
    type GetVersion = unsafe extern "C" fn(major: *mut c_uint, minor: *mut c_uint, patch: *mut c_uint);
    // SAFETY: this function has had this signature in every UCX.
    let get = unsafe { library.get::<GetVersion>("ucp_get_version\0") }.map_err(absent)?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: three places for three numbers.
    unsafe { get(&raw mut major, &raw mut minor, &raw mut patch) };
    Ok(Version { major, minor, patch })
}

/// Takes back what UCX does to a process when it is loaded: handlers of fatal signals, messages on standard output.
/// A library without these functions keeps them, and that is all.
fn settle(library: &libloading::Library, quiet: bool) {
    type Disable = unsafe extern "C" fn();
    // SAFETY: `void ucs_debug_disable_signals(void)` since UCX 1.6; it puts back the handlers that were there before.
    if let Ok(disable) = unsafe { library.get::<Disable>("ucs_debug_disable_signals\0") } {
        // SAFETY: as above.
        unsafe { disable() };
    }
    type Set = unsafe extern "C" fn(name: *const c_char, value: *const c_char) -> ucs_status_t;
    // SAFETY: `ucs_status_t ucs_global_opts_set_value(const char *, const char *)` since UCX 1.4.
    if let Ok(set) = unsafe { library.get::<Set>("ucs_global_opts_set_value\0") }
        && quiet
    {
        // SAFETY: two texts that end with zero. A name that it does not know it refuses.
        let _unknown = unsafe { set(c"LOG_LEVEL".as_ptr(), c"fatal".as_ptr()) };
    }
}
