//! What must hold: every byte where it belongs, sums equal to the host's, nothing outside its memory touched.

use starling_cuda::{CudaError, DeviceMemory, End, Gpu, Span, Staging, Stream};
use starling_kv::transport::page_sum;

use crate::{
    Outcome,
    work::{PATIENCE, awaited, back, check, pattern, scattered},
};

const PAGE: u64 = 16 << 10;
const PLACES: u64 = 4096;
const PAGES: u64 = 2000;

/// All of them.
pub(crate) fn all(gpu: &Gpu) -> Outcome<()> {
    let stream = Stream::new(gpu)?;
    sums(gpu, &stream)?;
    round_trip(gpu, &stream)?;
    refusals(gpu, &stream)?;
    early_drop(gpu)
}

fn sums(gpu: &Gpu, stream: &Stream) -> Outcome<()> {
    let bytes = pattern(4 << 20, 1);
    let memory = DeviceMemory::new(gpu, bytes.len())?;
    memory.write(0, &bytes)?;
    let sizes = [256, 272, 1008, 1024, 1040, 4096, 16_384, 16_400, 65_600, 1 << 20];
    let begins = sizes.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len)));
    let spans: Vec<Span> = begins.zip(sizes).map(|(from, len)| Span { from, to: 0, len }).collect();
    let on_host: Vec<u64> =
        spans.iter().map(|span| page_sum(&bytes[span.from as usize..(span.from + span.len) as usize])).collect();
    let on_gpu = stream.sums(End::Device(&memory), &spans)?.wait(PATIENCE)?.ok_or("no sums in time")?;
    check("sums of ten page sizes on the GPU are those of the host", on_gpu == on_host)
}

fn round_trip(gpu: &Gpu, stream: &Stream) -> Outcome<()> {
    let bytes = pattern((PAGE * PLACES) as usize, 2);
    let (memory, other) = (DeviceMemory::new(gpu, bytes.len())?, DeviceMemory::new(gpu, bytes.len())?);
    memory.write(0, &bytes)?;
    let staging = Staging::new(gpu, (PAGE * PAGES) as usize)?;
    let lease = staging.lease((PAGE * PAGES) as usize)?;
    let spans = scattered(PAGES, PAGE, PLACES);
    awaited(&stream.copy(End::Device(&memory), End::Staged(&lease), &spans)?)?;
    let mut gathered = vec![0; (PAGE * PAGES) as usize];
    staging.region().read(lease.offset(), &mut gathered).ok_or("the lease lies outside its region")?;
    let page = |at: u64| at as usize..(at + PAGE) as usize;
    let right = spans.iter().all(|span| gathered[page(span.to)] == bytes[page(span.from)]);
    check("2,000 scattered pages of 16 KiB are gathered into staging", right)?;
    awaited(&stream.copy(End::Staged(&lease), End::Device(&other), &back(&spans))?)?;
    let mut scattered = vec![0; bytes.len()];
    other.read(0, &mut scattered)?;
    let taken: std::collections::HashSet<u64> = spans.iter().map(|span| span.from).collect();
    let places = (0..PLACES).map(|place| place * PAGE);
    let right = places.clone().all(|at| {
        let wanted = if taken.contains(&at) { &bytes[page(at)] } else { &[0; PAGE as usize][..] };
        scattered[page(at)] == *wanted
    });
    check("and scattered again, every other page untouched", right)
}

fn refusals(gpu: &Gpu, stream: &Stream) -> Outcome<()> {
    let (memory, other) = (DeviceMemory::new(gpu, 4096)?, DeviceMemory::new(gpu, 4096)?);
    let copy = |from, to, len| stream.copy(End::Device(&memory), End::Device(&other), &[Span { from, to, len }]).err();
    let outside = [copy(4096, 0, 16), copy(0, 4080, 32), copy(u64::MAX - 15, 0, 32)];
    check("a page outside its memory is refused", outside == [0; 3].map(|page| Some(CudaError::OutOfBounds { page })))?;
    check("a crooked page is refused", copy(8, 0, 16) == Some(CudaError::Misaligned { page: 0 }))?;
    let missing = Gpu::open(4096);
    check("a GPU that is not there is missing", matches!(missing, Err(CudaError::Missing(_))))
}

/// The memory of a copy whose fence and handles are dropped at once must stay until it is over.
fn early_drop(gpu: &Gpu) -> Outcome<()> {
    let target = DeviceMemory::new(gpu, 64 << 20)?;
    let stream = Stream::new(gpu)?;
    for round in 0..16 {
        let source = DeviceMemory::new(gpu, 64 << 20)?;
        source.write(0, &pattern(1 << 20, round))?;
        drop(stream.copy(End::Device(&source), End::Device(&target), &[Span { from: 0, to: 0, len: 64 << 20 }])?);
    }
    drop(stream);
    let mut read = vec![0; 1 << 20];
    target.read(0, &mut read)?;
    check("memory dropped early stays until its copy is over", read == pattern(1 << 20, 15))
}
