//! The wire between namespaces: carries every packet, and loses, delays or cuts what a test says.
//!
//! A thread with a runtime of its own, so that a busy test slows no packet. Bounds: the kernel's queue of each device;
//! [`CAPTURE_MAX`] bytes of captured packets. When it is dropped the devices are gone.

use std::{
    collections::HashSet,
    fs::File,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
    task::JoinSet,
};

use super::packet::{Nat, head};

/// Captured bytes; what comes later is only counted.
const CAPTURE_MAX: usize = 64 << 20;

/// What happens to packets. Packets of the test itself always pass.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// From whom to whom nothing passes.
    pub(crate) cuts: HashSet<(Ipv4Addr, Ipv4Addr)>,
    /// Part of all packets that is lost, from 0 to 1.
    pub(crate) loss: f64,
    /// Every packet is late by this, and by up to as much again.
    pub(crate) delay: Duration,
    /// Translated addresses. The inner ones cannot be reached from elsewhere.
    pub(crate) nats: Vec<Nat>,
    /// Whether packets are kept.
    pub(crate) capture: bool,
    host: Option<Ipv4Addr>,
    random: u64,
    seen: Seen,
}

/// What was carried.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// Packets delivered.
    pub(crate) passed: u64,
    /// Packets lost or cut.
    pub(crate) dropped: u64,
    /// Payload of the largest UDP datagram, in bytes.
    pub(crate) datagram_max: usize,
    /// Packets that were pieces of larger ones.
    pub(crate) fragments: u64,
    /// Captured packets, one after the other.
    pub(crate) captured: Vec<u8>,
}

impl Rules {
    /// Where a packet goes, and how late; `None` when it is lost.
    fn carry(&mut self, entered: Ipv4Addr, packet: &mut [u8]) -> Option<(Ipv4Addr, Duration)> {
        let first = head(packet)?;
        let nats = std::mem::take(&mut self.nats);
        for nat in &nats {
            nat.leave(packet);
        }
        let inside = nats.iter().any(|nat| *nat.inner.ip() == first.to && first.to != entered);
        for nat in &nats {
            nat.enter(packet);
        }
        self.nats = nats;
        let to = head(packet)?.to;
        self.seen.datagram_max = self.seen.datagram_max.max(first.datagram.unwrap_or(0));
        self.seen.fragments += u64::from(first.fragment);
        let own = Some(entered) == self.host || Some(to) == self.host;
        if self.capture && !own && self.seen.captured.len() < CAPTURE_MAX {
            self.seen.captured.extend_from_slice(packet);
        }
        let lost = !own && (inside || self.cuts.contains(&(entered, to)) || self.draw() < self.loss);
        self.seen.dropped += u64::from(lost);
        self.seen.passed += u64::from(!lost);
        let delay = if own { Duration::ZERO } else { self.delay.mul_f64(1.0 + self.draw()) };
        (!lost).then_some((to, delay))
    }

    /// A number from 0 to 1 (splitmix64).
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The running wire.
#[derive(Debug)]
pub(crate) struct Fabric {
    rules: Arc<Mutex<Rules>>,
    plug: Option<mpsc::UnboundedSender<(Ipv4Addr, File)>>,
    thread: Option<JoinHandle<()>>,
}

impl Fabric {
    /// Starts with no ports. `host` is the address of the test itself.
    pub(crate) fn start(host: Ipv4Addr, seed: u64) -> Self {
        let rules = Arc::new(Mutex::new(Rules { host: Some(host), random: seed, ..Rules::default() }));
        let (plug, ports) = mpsc::unbounded_channel();
        let shared = rules.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(run(&shared, ports));
        });
        Self { rules, plug: Some(plug), thread: Some(thread) }
    }

    /// Connects a device.
    pub(crate) fn plug(&self, address: Ipv4Addr, device: File) {
        let plug = self.plug.as_ref().expect("it runs");
        plug.send((address, device)).expect("the wire's thread lives");
    }

    /// Changes what happens to packets from now on.
    pub(crate) fn rules<T>(&self, change: impl FnOnce(&mut Rules) -> T) -> T {
        change(&mut self.rules.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What was carried up to now.
    pub(crate) fn seen(&self) -> Seen {
        self.rules(|rules| rules.seen.clone())
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        drop(self.plug.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the wire failed");
        }
    }
}

type Ports = std::cell::RefCell<std::collections::HashMap<Ipv4Addr, std::rc::Rc<AsyncFd<File>>>>;

async fn run(rules: &Arc<Mutex<Rules>>, mut plugged: mpsc::UnboundedReceiver<(Ipv4Addr, File)>) {
    let ports = std::rc::Rc::new(Ports::default());
    let all = tokio::task::LocalSet::new();
    all.run_until(async {
        let mut tasks = JoinSet::new();
        while let Some((address, device)) = plugged.recv().await {
            // SAFETY: `File` keeps its descriptor open and the same until the `AsyncFd` that owns it is dropped.
            let registered = unsafe { AsyncFd::register_with_interest(device, Interest::READABLE) };
            let device = std::rc::Rc::new(registered.expect("a device"));
            ports.borrow_mut().insert(address, device.clone());
            tasks.spawn_local(port(rules.clone(), ports.clone(), address, device));
        }
    })
    .await;
}

/// Carries what one device sends, until the device is gone.
async fn port(
    rules: Arc<Mutex<Rules>>,
    ports: std::rc::Rc<Ports>,
    address: Ipv4Addr,
    device: std::rc::Rc<AsyncFd<File>>,
) {
    let mut buffer = vec![0; 65_536];
    loop {
        let read = device.async_io(Interest::READABLE, |mut file| std::io::Read::read(&mut file, &mut buffer)).await;
        let Ok(length) = read else { return };
        let packet = &mut buffer[..length];
        let carried = rules.lock().unwrap_or_else(PoisonError::into_inner).carry(address, packet);
        let Some((to, delay)) = carried else { continue };
        let Some(target) = ports.borrow().get(&to).cloned() else { continue };
        if delay.is_zero() {
            deliver(&target, packet);
        } else {
            let packet = packet.to_vec();
            tokio::task::spawn_local(async move {
                tokio::time::sleep(delay).await;
                deliver(&target, &packet);
            });
        }
    }
}

/// Writes a packet; a full queue or a device that is down loses it, as a real one does.
fn deliver(to: &AsyncFd<File>, packet: &[u8]) {
    let written = std::io::Write::write(&mut to.get_ref(), packet);
    drop(written);
}
