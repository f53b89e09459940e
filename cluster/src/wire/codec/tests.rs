//! Frames come back whatever the portions, and no bytes whatever make the decoder panic or grow.

use std::time::Duration;

use proptest::{prelude::*, strategy::ValueTree};
use starling_ids::{EndpointName, Incarnation, NodeId, RequestId};

use super::*;
use crate::{
    stream::{Context, Fault, FaultKind},
    wire::{Closing, FailWhy, Hello, OpenHead, Party, fuzz},
};

fn fault() -> impl Strategy<Value = Fault> {
    (".{0,40}", proptest::option::of(any::<u64>()), proptest::option::of(".{0,9}")).prop_map(
        |(message, retry_after_ms, param)| Fault { param, retry_after_ms, ..Fault::new(FaultKind::Invalid, message) },
    )
}

fn context() -> impl Strategy<Value = Context> {
    (any::<u128>(), any::<u64>(), ".{0,20}", any::<i32>(), any::<bool>()).prop_map(
        |(request, seconds, tenant, priority, subscription)| Context {
            tenant,
            priority,
            subscription,
            trace_parent: subscription.then(|| "00-ab-cd-01".to_owned()),
            ..Context::new(RequestId(request), Duration::from_secs(seconds))
        },
    )
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..50).prop_map(Bytes::from),
        (limits::COPY_BELOW - 2..limits::COPY_BELOW + 3).prop_map(|len| Bytes::from(vec![len as u8; len])),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let node = NodeId::new("node-7").unwrap();
    let hello = Hello {
        wanted: Some((node.clone(), Incarnation(u64::MAX))),
        ..Hello::new(Party::Node, node, Incarnation(3), "starling 1".into())
    };
    let endpoint = EndpointName::new("a/b/c").unwrap();
    prop_oneof![
        Just(Frame::Hello(Box::new(hello))),
        (any::<u32>(), context(), bytes()).prop_map(move |(stream, context, body)| Frame::Open {
            stream,
            head: Box::new(OpenHead { endpoint: endpoint.clone(), context }),
            body
        }),
        (any::<u32>(), bytes()).prop_map(|(stream, reply)| Frame::Accept { stream, reply }),
        (any::<u32>(), fault()).prop_map(|(stream, fault)| Frame::Reject { stream, fault: Box::new(fault) }),
        (any::<u32>(), bytes()).prop_map(|(stream, payload)| Frame::Data { stream, payload }),
        (any::<u32>(), any::<u32>()).prop_map(|(stream, amount)| Frame::Credit { stream, amount }),
        any::<u32>().prop_map(|stream| Frame::Cancel { stream }),
        any::<u32>().prop_map(|stream| Frame::End { stream }),
        (any::<u32>(), fault())
            .prop_map(|(stream, fault)| Frame::Fail { stream, why: Box::new(FailWhy::Fault(fault)) }),
        (any::<u32>(), ".{0,9}").prop_map(|(stream, why)| Frame::Fail { stream, why: Box::new(FailWhy::Dropped(why)) }),
        any::<u64>().prop_map(Frame::Ping),
        any::<u64>().prop_map(Frame::Pong),
        any::<u64>().prop_map(|n| Frame::Goodbye(Closing::Stale { current: Incarnation(n) })),
    ]
}

proptest! {
    #[test]
    fn frames_come_back_whatever_the_portions(
        frames in proptest::collection::vec(frame(), 1..8),
        cuts in proptest::collection::vec(1usize..300, 1..40),
    ) {
        let mut wire = BytesMut::new();
        frames.iter().for_each(|frame| encode(frame, &mut wire));
        let mut decoder = Decoder::default();
        let (mut got, mut cuts) = (Vec::new(), cuts.iter().cycle());
        while !wire.is_empty() {
            let portion = wire.split_to((*cuts.next().unwrap()).min(wire.len()));
            decoder.buffer().extend_from_slice(&portion);
            while let Some(frame) = decoder.decode().unwrap() {
                got.push(frame);
            }
        }
        prop_assert_eq!(got, frames);
        prop_assert!(decoder.buffer.is_empty());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut decoder = Decoder::default();
        decoder.buffer().extend_from_slice(&bytes);
        while let Ok(Some(_)) = decoder.decode() {}
    }

    #[test]
    fn arbitrary_rests_of_every_kind_never_panic(
        kind in 0u8..20,
        rest in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut decoder = Decoder::default();
        decoder.buffer().put_u32((FIXED + rest.len()) as u32);
        decoder.buffer().put_u8(kind);
        decoder.buffer().put_u32(1);
        decoder.buffer().extend_from_slice(&rest);
        let _frame_or_error = decoder.decode();
    }
}

#[test]
fn impossible_lengths_are_refused_before_they_are_awaited() {
    for length in [0, FIXED - 1, limits::FRAME_MAX + 1, u32::MAX as usize] {
        let mut decoder = Decoder::default();
        decoder.buffer().put_u32(length as u32);
        assert_eq!(decoder.decode(), Err(WireError::Length(length)));
    }
}

#[test]
fn large_payloads_are_slices_and_small_ones_are_not() {
    let (small, large) = (vec![1; limits::COPY_BELOW], vec![2; limits::COPY_BELOW + 1]);
    let mut decoder = Decoder::default();
    for payload in [&small, &large] {
        encode(&Frame::Data { stream: 1, payload: payload.clone().into() }, decoder.buffer());
    }
    let range = decoder.buffer.as_ptr_range();
    let mut inside = || match decoder.decode().unwrap().unwrap() {
        Frame::Data { payload, .. } => range.contains(&payload.as_ptr()),
        other => panic!("{other:?}"),
    };
    assert!(!inside());
    assert!(inside());
}

/// Whole frames, spoiled in one way or another, in portions: whatever comes out, nothing panics and the buffer never
/// grows beyond one frame and one read.
#[test]
fn spoiled_frames_never_panic_and_never_grow_the_buffer() {
    fuzz::seeds("frames", 200, |random| {
        let seed: Vec<u8> = (0..4).flat_map(|_| random.next().to_be_bytes()).collect();
        let rng = proptest::test_runner::TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &seed);
        let mut runner = proptest::test_runner::TestRunner::new_with_rng(ProptestConfig::default(), rng);
        let mut wire = BytesMut::new();
        for _ in 0..1 + random.below(20) {
            let at = wire.len();
            encode(&frame().new_tree(&mut runner).unwrap().current(), &mut wire);
            spoil(random, &mut wire, at);
        }
        let mut decoder = Decoder::default();
        'wire: while !wire.is_empty() {
            let portion = wire.split_to((1 + random.below(3000)).min(wire.len()));
            decoder.buffer().extend_from_slice(&portion);
            loop {
                match decoder.decode() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => break 'wire,
                }
            }
            assert!(decoder.buffer.capacity() <= limits::FRAME_MAX + 2 * limits::READ_BUFFER);
        }
    });
}

fn spoil(random: &mut fuzz::Random, wire: &mut BytesMut, from: usize) {
    let at = from + random.below(wire.len() - from);
    match random.below(8) {
        0 => wire[at] = random.next() as u8,
        1 => wire[at] ^= 1 << random.below(8),
        2 => wire.truncate(at),
        3 => wire[from..].reverse(),
        4 => {
            let length = random.below(2 * limits::FRAME_MAX) as u32;
            if let Some(prefix) = wire.get_mut(from..from + 4) {
                prefix.copy_from_slice(&length.to_be_bytes());
            }
        }
        5 => wire.extend_from_slice(&random.next().to_be_bytes()),
        _ => {}
    }
}
