//! Shell: The wire's bytes: what is written is read back, and no bytes make the reader fall.

use proptest::prelude::*;

use super::super::{
    proto::{ANSWER, HEADER, Header, Op, Request, answer, read_answer},
    *,
};

fn read(bytes: &[u8]) -> Result<Request, Refusal> {
    let (header, body) = bytes.split_at(HEADER);
    let header = Header::decode(header.try_into().expect("64 bytes"))?;
    header.with_body(body)
}

fn op() -> impl Strategy<Value = Op> {
    prop::sample::select(vec![
        Op::Pull,
        Op::Push,
        Op::Map,
        Op::MapWritable,
        Op::BeginPull,
        Op::BeginPush,
        Op::End,
        Op::Lane,
        Op::Still,
    ])
}

proptest! {
    #[test]
    fn a_request_is_read_back(
        op in op(),
        region: u32,
        token: [u8; 16],
        limit_ms: u32,
        pages in prop::collection::vec(any::<(u64, u32)>(), 0..20),
        kind in 0_u32..4,
    ) {
        let checksums = match kind {
            _ if pages.is_empty() => Checksums::None,
            0 => Checksums::None,
            1 => Checksums::Pages(pages.iter().map(|page| page.0 ^ 5).collect()),
            size => Checksums::Groups { pages: size, sums: pages.chunks(size as usize).map(|page| page[0].0).collect() },
        };
        let request = Request { op, region: RegionId(region), token: GrantToken(token), limit_ms, pages, checksums };
        prop_assert_eq!(read(&request.encode()), Ok(request));
    }

    #[test]
    fn no_bytes_make_the_reader_fall(mut bytes in prop::collection::vec(any::<u8>(), HEADER..200), known: bool) {
        if known {
            let start = Request {
                op: Op::Pull,
                region: RegionId(0),
                token: GrantToken([0; 16]),
                limit_ms: 0,
                pages: vec![],
                checksums: Checksums::None,
            };
            bytes[..8].copy_from_slice(&start.encode()[..8]);
        }
        if let Ok(request) = read(&bytes) {
            prop_assert_eq!(request.pages.len() * 12 <= bytes.len(), true);
        }
    }

    #[test]
    fn no_answer_makes_the_reader_fall(bytes: [u8; ANSWER]) {
        prop_assert!(read_answer(&bytes).is_err() || bytes[4] == 0);
    }
}

#[test]
fn every_refusal_is_read_back() {
    let refusals = [
        Refusal::UnknownGrant,
        Refusal::Expired,
        Refusal::WrongDirection,
        Refusal::NotGranted { page: 77 },
        Refusal::NoRegion,
        Refusal::Busy,
        Refusal::Version,
        Refusal::Malformed,
        Refusal::NotOffered,
    ];
    for refusal in refusals {
        let error = TransferError::Refused(refusal);
        assert_eq!(read_answer(&answer(Err(&error), 0)), Err(error));
    }
    let error = TransferError::Checksum { page: 5 };
    assert_eq!(read_answer(&answer(Err(&error), 0)), Err(error));
    assert_eq!(read_answer(&answer(Ok(()), 12)), Ok(12));
}
