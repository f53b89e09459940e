//! What the machine can do without any of this: memcpy within a process, and a bare TCP connection over loopback.
//!
//! Called by `transfer limits`. The copies run between two shared mappings, as the transports' regions are, and between
//! two private ones. No checksums.

use std::{
    io::{IoSlice, IoSliceMut, Read, Write},
    net::{TcpListener, TcpStream},
    ptr,
    time::{Duration, Instant},
};

use starling_kv::transport::Region;

use crate::{
    Failure,
    loads::{Chance, LOADS, Load, MEMORY, line},
    peer::spawn,
};

/// Slices of one vectored call.
const SLICES: usize = 512;

/// Prints a line for each limit and load.
#[allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
pub(crate) fn measure() -> Result<(), Failure> {
    let shared = (touched(Region::shared("a", MEMORY)?)?, touched(Region::shared("b", MEMORY)?)?);
    for load in LOADS {
        println!("{}", line("memcpy", "copy", load, &copies(&shared, load)?));
    }
    drop(shared);
    let private = (touched(Region::private(MEMORY)?)?, touched(Region::private(MEMORY)?)?);
    for load in LOADS {
        println!("{}", line("memcpy, private memory", "copy", load, &copies(&private, load)?));
    }
    drop(private);
    let (mut child, address) = spawn("serve-bare")?;
    let outcome = LOADS.into_iter().try_for_each(|load| {
        println!("{}", line("bare tcp", "pull", load, &pulls(address.trim(), load)?));
        Ok(())
    });
    child.kill()?;
    child.wait()?;
    outcome
}

fn touched(region: Region) -> Result<Region, Failure> {
    region.populate()?;
    region.write(0, &vec![7; MEMORY]).ok_or("the memory is smaller than asked")?;
    Ok(region)
}

fn at(region: &Region, offset: usize, bytes: usize) -> Result<*mut u8, Failure> {
    Ok(region.at(offset as u64, bytes as u64).ok_or("a page outside of the memory")?)
}

fn copies((from, to): &(Region, Region), load: Load) -> Result<Vec<Duration>, Failure> {
    let mut chance = Chance::new(5);
    let mut took = Vec::with_capacity(load.repeats);
    for _ in 0..load.repeats {
        let pages = chance.pages(load);
        let start = Instant::now();
        for (here, there) in pages {
            let (to, from) = (at(to, here, load.page)?, at(from, there, load.page)?);
            // SAFETY: both ranges were checked against their mappings, which do not overlap and which nobody else uses.
            unsafe { ptr::copy_nonoverlapping(from, to, load.page) };
        }
        took.push(start.elapsed());
    }
    Ok(took)
}

fn pulls(address: &str, load: Load) -> Result<Vec<Duration>, Failure> {
    let memory = touched(Region::shared("here", MEMORY)?)?;
    let mut socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    let mut chance = Chance::new(5);
    let mut took = Vec::with_capacity(load.repeats);
    for _ in 0..=load.repeats {
        let pages = chance.pages(load);
        let start = Instant::now();
        let mut ask = Vec::with_capacity(16 + pages.len() * 8);
        ask.extend_from_slice(&(pages.len() as u64).to_le_bytes());
        ask.extend_from_slice(&(load.page as u64).to_le_bytes());
        pages.iter().for_each(|(_, there)| ask.extend_from_slice(&(*there as u64).to_le_bytes()));
        socket.write_all(&ask)?;
        for some in pages.chunks(SLICES) {
            let mut slices = Vec::with_capacity(some.len());
            for (here, _) in some {
                let start = at(&memory, *here, load.page)?;
                // SAFETY: the range was checked against the mapping; the pages of one transfer are apart.
                slices.push(IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, load.page) }));
            }
            let mut left = &mut slices[..];
            while !left.is_empty() {
                let got = socket.read_vectored(left)?;
                if got == 0 {
                    return Err("the other process ended".into());
                }
                IoSliceMut::advance_slices(&mut left, got);
            }
        }
        took.push(start.elapsed());
    }
    took.remove(0);
    Ok(took)
}

/// The other process's side: answers one connection after another with the pages it asks for.
#[allow(clippy::print_stdout, reason = "the way to the measuring process")]
pub(crate) fn serve() -> Result<(), Failure> {
    let memory = touched(Region::shared("there", MEMORY)?)?;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{}", listener.local_addr()?);
    loop {
        let (socket, _) = listener.accept()?;
        socket.set_nodelay(true)?;
        // The measuring process closes it when a load is done.
        let _closed = answer(socket, &memory);
    }
}

fn answer(mut socket: TcpStream, memory: &Region) -> Result<(), Failure> {
    let mut word = [0; 8];
    loop {
        socket.read_exact(&mut word)?;
        let pages = u64::from_le_bytes(word) as usize;
        socket.read_exact(&mut word)?;
        let page = u64::from_le_bytes(word) as usize;
        let mut list = vec![0; pages * 8];
        socket.read_exact(&mut list)?;
        let mut offsets = Vec::with_capacity(pages);
        for bytes in list.chunks_exact(8) {
            offsets.push(u64::from_le_bytes(bytes.try_into()?) as usize);
        }
        for some in offsets.chunks(SLICES) {
            let mut slices = Vec::with_capacity(some.len());
            for offset in some {
                let start = at(memory, *offset, page)?;
                // SAFETY: the range was checked against the mapping, and nobody writes it.
                slices.push(IoSlice::new(unsafe { std::slice::from_raw_parts(start, page) }));
            }
            let mut left = &mut slices[..];
            while !left.is_empty() {
                let sent = socket.write_vectored(left)?;
                IoSlice::advance_slices(&mut left, sent);
            }
        }
    }
}
