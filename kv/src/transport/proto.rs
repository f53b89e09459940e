//! The data plane's wire: what a session asks of a host, and the answer, as bytes.
//!
//! Called by sessions and by the serving side. Pure. Never: trusts a length. Bounds: `PAGES_MAX` pages a request.
//!
//! Request: 64 bytes, all numbers little-endian: magic u32, version u16, operation u8, zero u8, region u32, pages u32,
//! token 16 bytes, time limit in ms u32, checksums u32, pages of a checksum group u32 (0: one sum a page), zeroes. Then
//! for each page its offset u64 and length u32, then the checksums, u64 each.
//! Answer: 16 bytes: magic u32, code u8, three zeroes, page u32, number u32.

use super::{
    batch::{Checksums, PAGES_MAX, RegionId},
    descriptor::VERSION,
    error::{Refusal, TransferError},
    grant::GrantToken,
};

const MAGIC: u32 = u32::from_le_bytes(*b"SKV1");
/// Bytes before a request's lists.
pub(crate) const HEADER: usize = 64;
/// Bytes of an answer.
pub(crate) const ANSWER: usize = 16;
const PAGE: usize = 12;
/// Bytes of a UCX worker's address at most; some dozens for each network device.
pub(crate) const ADDRESS_MAX: usize = 16 << 10;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Op {
    /// Send me these pages.
    Pull = 1,
    /// Take these pages; I send them when you say yes.
    Push = 2,
    /// Give me the region's memory, to read.
    Map = 3,
    /// Give me the region's memory, to write. Answered only with a grant to push.
    MapWritable = 4,
    /// I read these pages myself; tell me whether I may.
    BeginPull = 5,
    /// I write these pages myself; tell me whether I may.
    BeginPush = 6,
    /// I have done so; tell me whether the lease still ran and whether what I wrote is what I promised.
    End = 7,
    /// Open a UCX worker for me and tell me its address. The time limit is the number of bytes that follow: the address of
    /// my worker, for messages; none for operations of my own.
    Lane = 8,
    /// I am still at the pages of my begin; tell me how long the lease runs.
    Still = 9,
    /// Send me these pages as messages to my worker.
    LanePull = 10,
    /// Take these pages; I send them as messages to your worker when you say yes.
    LanePush = 11,
}

impl Op {
    fn of(byte: u8) -> Option<Self> {
        [
            Self::Pull,
            Self::Push,
            Self::Map,
            Self::MapWritable,
            Self::BeginPull,
            Self::BeginPush,
            Self::End,
            Self::Lane,
            Self::Still,
            Self::LanePull,
            Self::LanePush,
        ]
        .into_iter()
        .find(|op| *op as u8 == byte)
    }
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) region: RegionId,
    pub(crate) token: GrantToken,
    /// How long it may take, ms.
    pub(crate) limit_ms: u32,
    /// (offset in the region, bytes).
    pub(crate) pages: Vec<(u64, u32)>,
    pub(crate) checksums: Checksums,
}

/// The fixed part of a request: what its lists will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    op: Op,
    region: RegionId,
    token: GrantToken,
    limit_ms: u32,
    pages: usize,
    sums: usize,
    group: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl Request {
    /// As bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (group, sums): (u32, &[u64]) = match &self.checksums {
            Checksums::None => (0, &[]),
            Checksums::Pages(sums) => (0, sums),
            Checksums::Groups { pages, sums } => (*pages, sums),
        };
        let mut out = Vec::with_capacity(HEADER + self.pages.len() * PAGE + sums.len() * 8);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[self.op as u8, 0]);
        out.extend_from_slice(&self.region.0.to_le_bytes());
        out.extend_from_slice(&(self.pages.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.token.0);
        for number in [self.limit_ms, sums.len() as u32, group] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.resize(HEADER, 0);
        for (at, len) in &self.pages {
            out.extend_from_slice(&at.to_le_bytes());
            out.extend_from_slice(&len.to_le_bytes());
        }
        sums.iter().for_each(|sum| out.extend_from_slice(&sum.to_le_bytes()));
        out
    }
}

impl Header {
    /// Reads the fixed part.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, Refusal> {
        let number = |at| u32_at(bytes, at).ok_or(Refusal::Malformed);
        if number(0)? != MAGIC {
            return Err(Refusal::Malformed);
        }
        if u16::from_le_bytes([bytes[4], bytes[5]]) != VERSION {
            return Err(Refusal::Version);
        }
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[16..32]);
        let header = Self {
            op: Op::of(bytes[6]).ok_or(Refusal::Malformed)?,
            region: RegionId(number(8)?),
            token: GrantToken(token),
            limit_ms: number(32)?,
            pages: number(12)? as usize,
            sums: number(36)? as usize,
            group: number(40)?,
        };
        let sums = match header.group {
            0 => header.pages,
            group => header.pages.div_ceil(group as usize),
        };
        let whole = header.pages <= PAGES_MAX && (header.sums == 0 || header.sums == sums);
        if whole { Ok(header) } else { Err(Refusal::Malformed) }
    }

    /// Bytes of the lists that follow.
    pub(crate) fn body(&self) -> usize {
        self.pages * PAGE + self.sums * 8
    }

    /// Reads the lists.
    pub(crate) fn with_body(self, body: &[u8]) -> Result<Request, Refusal> {
        if body.len() != self.body() {
            return Err(Refusal::Malformed);
        }
        let (pages, sums) = body.split_at(self.pages * PAGE);
        let page = |bytes: &[u8]| Some((u64_at(bytes, 0)?, u32_at(bytes, 8)?));
        let pages: Option<Vec<(u64, u32)>> = pages.chunks_exact(PAGE).map(page).collect();
        let sums: Option<Vec<u64>> = sums.chunks_exact(8).map(|bytes| u64_at(bytes, 0)).collect();
        let (Some(pages), Some(sums)) = (pages, sums) else { return Err(Refusal::Malformed) };
        let checksums = match (sums.is_empty(), self.group) {
            (true, _) => Checksums::None,
            (false, 0) => Checksums::Pages(sums),
            (false, group) => Checksums::Groups { pages: group, sums },
        };
        let Self { op, region, token, limit_ms, .. } = self;
        Ok(Request { op, region, token, limit_ms, pages, checksums })
    }
}

/// Code of a checksum that differs; the codes of refusals are below it.
const CHECKSUM: u8 = 100;

/// The code of an outcome, and the page it names.
fn code(outcome: Result<(), &TransferError>) -> (u8, u32) {
    let page = |page: usize| u32::try_from(page).unwrap_or(u32::MAX);
    match outcome {
        Ok(()) => (0, 0),
        Err(TransferError::Refused(refusal)) => match refusal {
            Refusal::UnknownGrant => (1, 0),
            Refusal::Expired => (2, 0),
            Refusal::WrongDirection => (3, 0),
            Refusal::NotGranted { page } => (4, *page),
            Refusal::NoRegion => (5, 0),
            Refusal::Busy => (6, 0),
            Refusal::Version => (7, 0),
            Refusal::Malformed => (8, 0),
            Refusal::NotOffered => (9, 0),
        },
        Err(TransferError::Checksum { page: wrong }) => (CHECKSUM, page(*wrong)),
        Err(_) => (6, 0),
    }
}

fn outcome(code: u8, page: u32) -> Result<(), TransferError> {
    let refusal = match code {
        0 => return Ok(()),
        CHECKSUM => return Err(TransferError::Checksum { page: page as usize }),
        1 => Refusal::UnknownGrant,
        2 => Refusal::Expired,
        3 => Refusal::WrongDirection,
        4 => Refusal::NotGranted { page },
        5 => Refusal::NoRegion,
        6 => Refusal::Busy,
        7 => Refusal::Version,
        9 => Refusal::NotOffered,
        _ => Refusal::Malformed,
    };
    Err(refusal.into())
}

/// An answer as bytes. `number` is for the operation to use.
pub(crate) fn answer(result: Result<(), &TransferError>, number: u32) -> [u8; ANSWER] {
    let (code, page) = code(result);
    let mut out = [0; ANSWER];
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4] = code;
    out[8..12].copy_from_slice(&page.to_le_bytes());
    out[12..].copy_from_slice(&number.to_le_bytes());
    out
}

/// Reads an answer: its number, or what went wrong there.
pub(crate) fn read_answer(bytes: &[u8; ANSWER]) -> Result<u32, TransferError> {
    if u32_at(bytes, 0) != Some(MAGIC) {
        return Err(Refusal::Malformed.into());
    }
    outcome(bytes[4], u32_at(bytes, 8).unwrap_or(0))?;
    Ok(u32_at(bytes, 12).unwrap_or(0))
}
