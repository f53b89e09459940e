//! Two processes and one GPU: the second maps the first one's memory and takes pages from it.

use std::process::Command;

use starling_cuda::{DeviceMemory, End, Gpu, PeerMemory, Span, Stream};

use crate::{
    Outcome,
    work::{PATIENCE, awaited, check, median, pattern, rate, scattered},
};

const PAGE: u64 = 16 << 10;
const PLACES: u64 = 16_384;

/// Shares memory and has another process of this program take from it.
pub(crate) fn parent(gpu: &Gpu) -> Outcome<()> {
    let bytes = pattern((PAGE * PLACES) as usize, 4);
    let memory = DeviceMemory::new(gpu, bytes.len())?;
    memory.write(0, &bytes)?;
    let ticket = memory.share()?;
    let own = PeerMemory::open(gpu, &ticket);
    check("a process does not open its own ticket", own.is_err())?;
    let program = std::env::current_exe()?;
    let ran = Command::new(program).args(["peer", &ticket.to_string(), "2000"]).output()?;
    print!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    check("another process took pages out of this one's GPU memory", ran.status.success())
}

/// The other process.
pub(crate) fn child(ticket: &str, pages: &str) -> Outcome<()> {
    let gpu = Gpu::open(0)?;
    let pages: u64 = pages.parse()?;
    let (theirs, stream) = (PeerMemory::open(&gpu, &ticket.parse()?)?, Stream::new(&gpu)?);
    let mine = DeviceMemory::new(&gpu, (pages * PAGE) as usize)?;
    let spans = scattered(pages, PAGE, PLACES);
    let took = median(|| awaited(&stream.copy(End::Peer(&theirs), End::Device(&mine), &spans)?))?;
    rate(&format!("another process's GPU memory, {pages} pages of 16 KiB, kernel"), pages * PAGE, took);
    let plain = Span { from: 0, to: 0, len: pages * PAGE };
    let other = DeviceMemory::new(&gpu, (pages * PAGE) as usize)?;
    let took = median(|| awaited(&stream.copy_whole(End::Peer(&theirs), End::Device(&other), plain)?))?;
    rate("the same bytes in one plain copy", pages * PAGE, took);
    let here: Vec<Span> = spans.iter().map(|span| Span { from: span.to, ..*span }).collect();
    let theirs = stream.sums(End::Peer(&theirs), &spans)?.wait(PATIENCE)?.ok_or("no sums in time")?;
    let mine = stream.sums(End::Device(&mine), &here)?.wait(PATIENCE)?.ok_or("no sums in time")?;
    check("what was taken is what was there", theirs == mine)
}
