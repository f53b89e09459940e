//! How fast pages move beside plain copies of the driver, and how soon the end of work is known.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Wake, Waker},
    thread::{self, Thread},
    time::Instant,
};

use starling_cuda::{DeviceMemory, End, Gpu, Span, Staging, Stream};

use crate::{
    Outcome,
    work::{PATIENCE, awaited, back, check, median, rate, scattered},
};

const TOTAL: u64 = 64 << 20;

/// All of them.
pub(crate) fn all(gpu: &Gpu) -> Outcome<()> {
    let stream = Stream::new(gpu)?;
    let (memory, other) = (DeviceMemory::new(gpu, 256 << 20)?, DeviceMemory::new(gpu, 256 << 20)?);
    let staging = Staging::new(gpu, TOTAL as usize)?;
    let lease = staging.lease(TOTAL as usize)?;
    let (device, target, host) = (End::Device(&memory), End::Device(&other), End::Staged(&lease));
    let whole = Span { from: 0, to: 0, len: TOTAL };
    for (what, from, to) in
        [("host to GPU", host, device), ("GPU to host", device, host), ("GPU to GPU", device, target)]
    {
        let plain = median(|| awaited(&stream.copy_whole(from, to, whole)?))?;
        let plain = rate(&format!("{what}, 64 MiB, plain copy"), TOTAL, plain);
        for (pages, bytes) in [(2000, 16 << 10), (1000, 64 << 10), (64, 1 << 20), (1, 64 << 20)] {
            let spans = scattered(pages, bytes, (256 << 20) / bytes);
            // Only the GPU's side is scattered: host memory is a lease, where pages lie one after another.
            let spans = if matches!(from, End::Staged(_)) { back(&spans) } else { spans };
            let took = median(|| awaited(&stream.copy(from, to, &spans)?))?;
            let kernel = rate(&format!("{what}, {pages} pages of {} KiB, kernel", bytes >> 10), pages * bytes, took);
            println!("{:<64} {:>12.2} of the plain copy", "", kernel / plain);
        }
    }
    let spans = scattered(4000, 16 << 10, (256 << 20) >> 14);
    let took =
        median(|| stream.sums(device, &spans)?.wait(PATIENCE)?.map(drop).ok_or_else(|| "no sums in time".into()))?;
    rate("sums of 4,000 pages of 16 KiB", 4000 << 14, took);
    fence(&stream, device, target)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// From the post of a tiny copy to the wake-up of the task that awaits it.
fn fence(stream: &Stream, from: End<'_>, to: End<'_>) -> Outcome<()> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let took = median(|| {
        let mut fence = pin!(stream.copy(from, to, &[Span { from: 0, to: 0, len: 16 }])?);
        let until = Instant::now() + PATIENCE;
        while fence.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            if Instant::now() > until {
                return Err("the fence did not wake its task".into());
            }
            thread::park_timeout(PATIENCE);
        }
        Ok(())
    })?;
    println!("{:<64} {:>9.3} ms", "post to wake-up of the awaiting task, 16 bytes", took.as_secs_f64() * 1e3);
    check("a fence wakes the task that awaits it", took < PATIENCE / 2)
}
