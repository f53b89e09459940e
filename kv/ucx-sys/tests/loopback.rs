//! The real library, between two contexts of this process: what is put can be got back, and a peer that is gone is an
//! error. Where there is no UCX, one line says so.

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use ucx_sys::{Context, Endpoint, Library, LoadError, Memory, OLDEST, Request, Worker};

const BYTES: usize = 1 << 20;

/// Shared memory of UCX with peers that can fail.
const OPTIONS: &[(&str, &str)] = &[("TLS", "posix,sysv,self"), ("MM_ERROR_HANDLING", "y")];

fn library() -> Option<Arc<Library>> {
    let path = std::env::var_os("STARLING_UCX_LIB").map(PathBuf::from);
    match Library::load(path.as_deref(), true) {
        Ok(library) => Some(library),
        Err(error) => {
            let test = thread::current().name().unwrap_or("a test").to_owned();
            let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join("skipped.txt");
            let list = std::fs::File::options().create(true).append(true).open(list);
            let line = format!("ucx-sys {test}: no UCX: {error}\n");
            list.and_then(|mut list| list.write_all(line.as_bytes())).expect("the list can be written");
            None
        }
    }
}

/// A peer: a thread with a worker and memory, until it is dropped.
struct Peer {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<Vec<u8>>>,
    address: Vec<u8>,
    key: Vec<u8>,
    base: u64,
}

fn serve(library: &Arc<Library>, stop: &AtomicBool, told: &mpsc::Sender<(Vec<u8>, Vec<u8>, u64)>) -> Vec<u8> {
    let context = Context::open(library, OPTIONS).expect("a context");
    let mut bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let base = bytes.as_mut_ptr();
    // SAFETY: `bytes` outlives the memory and the worker.
    let memory = unsafe { context.register(base, BYTES) }.expect("registered");
    let worker = Worker::new(&context).expect("a worker");
    let told = told.send((worker.address().expect("an address"), memory.key().expect("a key"), base as u64));
    told.expect("somebody waits");
    while !stop.load(Ordering::Acquire) {
        if !worker.progress() {
            thread::yield_now();
        }
    }
    drop(worker);
    drop(memory);
    bytes
}

impl Peer {
    fn start(library: &Arc<Library>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, tell) = mpsc::channel();
        let (theirs, library) = (Arc::clone(&stop), Arc::clone(library));
        let thread = thread::spawn(move || serve(&library, &theirs, &told));
        let (address, key, base) = tell.recv().expect("the peer starts");
        Self { stop, thread: Some(thread), address, key, base }
    }

    fn end(mut self) -> Vec<u8> {
        self.stop.store(true, Ordering::Release);
        self.thread.take().expect("once").join().expect("the peer ends")
    }
}

fn connect(worker: &Worker, peer: &Peer) -> Endpoint {
    // SAFETY: it comes from `Worker::address`.
    unsafe { worker.connect(&peer.address) }.expect("an endpoint")
}

/// How an operation ends.
fn end(worker: &Worker, request: &Request) -> Result<(), ucx_sys::Fault> {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !request.over()? {
        assert!(Instant::now() < give_up, "an operation does not end");
        if !worker.progress() {
            thread::yield_now();
        }
    }
    Ok(())
}

fn local(context: &Arc<Context>) -> (Vec<u8>, Memory) {
    let mut bytes = vec![0_u8; BYTES];
    // SAFETY: the vector's memory stays where it is, and the tests drop it last.
    let memory = unsafe { context.register(bytes.as_mut_ptr(), BYTES) }.expect("registered");
    (bytes, memory)
}

#[test]
fn what_is_put_is_got_back() {
    let Some(library) = library() else { return };
    assert!(library.version() >= OLDEST);
    let peer = Peer::start(&library);
    let context = Context::open(&library, OPTIONS).expect("a context");
    let (mut bytes, memory) = local(&context);
    let worker = Worker::new(&context).expect("a worker");
    let endpoint = connect(&worker, &peer);
    // SAFETY: it comes from `Memory::key`.
    let key = unsafe { endpoint.key(&peer.key) }.expect("a key");
    // SAFETY: `bytes` outlives the worker.
    let get = unsafe { key.get(bytes.as_mut_ptr(), 5_000, peer.base + 3, Some(&memory)) }.expect("begun");
    assert_eq!(end(&worker, &get), Ok(()));
    assert!(bytes[..5_000].iter().zip(3..).all(|(byte, at)| usize::from(*byte) == at % 251));
    bytes.fill(7);
    // SAFETY: as above.
    let put = unsafe { key.put(bytes.as_ptr(), 300_000, peer.base + 1_000, Some(&memory)) }.expect("begun");
    assert_eq!(end(&worker, &put), Ok(()));
    let flush = endpoint.flush().expect("begun");
    assert_eq!(end(&worker, &flush), Ok(()));
    assert_eq!(endpoint.alive(), Ok(()));
    drop((get, put, flush, endpoint));
    drop(key);
    drop((worker, memory));
    let there = peer.end();
    assert!(there[999] == (999 % 251) as u8 && there[1_000..301_000].iter().all(|byte| *byte == 7));
}

#[test]
fn an_idle_worker_can_sleep_and_an_endpoint_closes_with_work_under_way() {
    let Some(library) = library() else { return };
    let peer = Peer::start(&library);
    let context = Context::open(&library, OPTIONS).expect("a context");
    let (mut bytes, memory) = local(&context);
    for _ in 0..3 {
        let worker = Worker::new(&context).expect("a worker");
        while !worker.arm().expect("it can be armed") {
            let _more = worker.progress();
        }
        let endpoint = connect(&worker, &peer);
        // SAFETY: it comes from `Memory::key`.
        let key = unsafe { endpoint.key(&peer.key) }.expect("a key");
        // SAFETY: `bytes` outlives the worker.
        let begun: Vec<Request> = (0..50)
            .map(|_| unsafe { key.get(bytes.as_mut_ptr(), BYTES, peer.base, Some(&memory)) }.expect("begun"))
            .collect();
        drop((begun, key, endpoint));
    }
    drop(memory);
    assert_eq!(peer.end().len(), BYTES);
}

#[test]
fn a_library_that_is_not_there_is_said_in_one_line() {
    let error = Library::load(Some(Path::new("/nowhere/libucp.so.0")), true).expect_err("nothing is there");
    let LoadError::Absent(text) = &error else { panic!("{error}") };
    assert!(text.contains("/nowhere/"), "{text}");
    assert!(!text.contains('\n'));
}
