//! From one GPU memory to another over a transport that knows nothing of GPUs: gathered, moved, verified, scattered.

use std::time::{Duration, Instant};

use starling_cuda::{DeviceMemory, End, Gpu, Span, Staging, Stream};
use starling_kv::transport::{
    Batch, Checksums, Direction, Fabric, FabricConfig, Grant, GrantToken, HostId, Page, TransportKind,
};

use crate::{
    Outcome,
    work::{PATIENCE, awaited, back, check, median, pattern, rate, scattered},
};

const PAGE: u64 = 16 << 10;
const PAGES: u64 = 2000;
const BYTES: usize = (PAGE * PAGES) as usize;

/// One side: its GPU memory, its staging, its end of the data plane.
struct Side {
    memory: DeviceMemory,
    staging: Staging,
    stream: Stream,
    fabric: Fabric,
}

impl Side {
    fn new(gpu: &Gpu, id: u128) -> Outcome<Self> {
        let mut config = FabricConfig::new(HostId(id), GrantToken(id.to_le_bytes()));
        config.listen = Some(([127, 0, 0, 1], 0).into());
        let (staging, stream) = (Staging::new(gpu, BYTES)?, Stream::new(gpu)?);
        Ok(Self { memory: DeviceMemory::new(gpu, 2 * BYTES)?, staging, stream, fabric: Fabric::start(config)? })
    }
}

/// Over every transport that two hosts of one machine have.
pub(crate) fn all(gpu: &Gpu) -> Outcome<()> {
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        over(gpu, kind)?;
    }
    Ok(())
}

fn over(gpu: &Gpu, kind: TransportKind) -> Outcome<()> {
    let (giver, taker) = (Side::new(gpu, 1)?, Side::new(gpu, 2)?);
    giver.memory.write(0, &pattern(2 * BYTES, 3))?;
    let region = giver.fabric.register(giver.staging.region())?;
    let peer = giver.fabric.describe(region, 0)?;
    let session = taker.fabric.connect(&peer, kind)?;
    let (out, into) = (giver.staging.lease(BYTES)?, taker.staging.lease(BYTES)?);
    let token = GrantToken([99; 16]);
    let (direction, ranges) = (Direction::Pull, std::iter::once(out.offset()..out.offset() + BYTES as u64).collect());
    giver.fabric.grants().issue(Grant {
        token,
        direction,
        region,
        ranges,
        expires: Instant::now() + Duration::from_secs(600),
    })?;
    let spans = scattered(PAGES, PAGE, 2 * PAGES);
    let page = |span: &Span| Page { local: into.offset() + span.to, remote: out.offset() + span.to, len: PAGE as u32 };
    let pages: Vec<Page> = spans.iter().map(page).collect();
    let took = median(|| {
        let sums = giver.stream.sums(End::Device(&giver.memory), &spans)?;
        awaited(&giver.stream.copy(End::Device(&giver.memory), End::Staged(&out), &spans)?)?;
        let sums = sums.wait(PATIENCE)?.ok_or("no sums in time")?;
        let batch = Batch::new(direction, taker.staging.region(), peer.region, pages.clone(), token);
        session.post(batch.with_checksums(Checksums::Pages(sums))).wait()?;
        awaited(&taker.stream.copy(End::Staged(&into), End::Device(&taker.memory), &back(&spans))?)
    })?;
    rate(&format!("GPU to GPU over {kind:?}, 2,000 pages of 16 KiB, verified"), BYTES as u64, took);
    let sums = |side: &Side| side.stream.sums(End::Device(&side.memory), &spans)?.wait(PATIENCE);
    check(&format!("they arrived over {kind:?}"), sums(&giver)? == sums(&taker)?)
}
