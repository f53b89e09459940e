//! Bit-equality: an item's logits depend on its sequence's tokens and positions alone.

use starling_ids::TokenId;

use super::{
    bits, dense, feed, slots,
    tiny::{Store, Tiny, VOCAB},
};
use crate::{
    backend::{Backend, Batch, BatchItem},
    loader::{Activations, KernelChoice},
};

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) % VOCAB as u32).collect()
}

#[test]
fn any_chunk_size_thread_count_and_kernel_gives_the_same_bits() {
    let tiny = Tiny::new(1);
    let tokens = prompt(5, 530);
    let stores = [Store::Q4_1, Store::Q8_0].into_iter();
    for (store, width) in stores.flat_map(|store| [Activations::Int8, Activations::Int16].map(|width| (store, width))) {
        let model = tiny.load_with(store, 1, KernelChoice::Auto, width);
        let expected = bits(&feed(&mut model.backend().unwrap().0, &slots(0, 34), &tokens, 0, 512));
        for threads in [1, 2, 3] {
            let model = tiny.load_with(store, threads, KernelChoice::Auto, width);
            let (mut backend, _) = model.backend().unwrap();
            for chunk in [1, 7, 16, 100, 512, 4096] {
                let blocks: Vec<_> = slots(threads as u32, 34).into_iter().rev().collect();
                let logits = feed(&mut backend, &blocks, &tokens, 0, chunk);
                assert_eq!(bits(&logits), expected, "{store:?}, {width:?}, {threads} threads, chunks of {chunk}");
            }
        }
        let model = tiny.load_with(store, 2, KernelChoice::Portable, width);
        let logits = feed(&mut model.backend().unwrap().0, &slots(0, 34), &tokens, 0, 100);
        assert_eq!(bits(&logits), expected, "{store:?}, {width:?}, portable kernels");
    }
}

#[test]
fn a_batch_of_many_sequences_gives_each_its_own_bits() {
    let model = Tiny::new(2).load(Store::Q4_1, 2, KernelChoice::Auto);
    let lengths = [1usize, 3, 17, 32, 33, 61, 100, 128];
    let mut alone = Vec::new();
    for (index, len) in lengths.into_iter().enumerate() {
        let (mut backend, _) = model.backend().unwrap();
        alone.push(bits(&feed(&mut backend, &slots(3, 9), &prompt(index as u32, len), 0, 4096)));
    }
    let (mut backend, _) = model.backend().unwrap();
    let prompts: Vec<_> = lengths.iter().enumerate().map(|(index, len)| prompt(index as u32, *len)).collect();
    let blocks: Vec<_> = (0..lengths.len() as u32).map(|index| slots(index * 10, 9)).collect();
    // All but the last token first, in mixed chunks; then the last ones together, prefill and decode in one batch.
    for (index, prompt) in prompts.iter().enumerate() {
        let ready = if index.is_multiple_of(2) { prompt.len() - 1 } else { prompt.len() / 2 };
        if ready > 0 {
            feed(&mut backend, &blocks[index], &prompt[..ready], 0, 13);
        }
    }
    let items = prompts.iter().enumerate().map(|(index, prompt)| {
        let start = if index.is_multiple_of(2) { prompt.len() - 1 } else { prompt.len() / 2 };
        BatchItem { tokens: &prompt[start..], start, blocks: &blocks[index], wants_logits: true }
    });
    let computed = backend.forward(&Batch { items: items.collect() }).unwrap();
    assert_eq!(computed.rows.len(), lengths.len());
    for (index, row) in computed.rows.iter().enumerate() {
        assert_eq!(bits(&dense(*row)), alone[index], "sequence {index}");
    }
}

#[test]
fn blocks_moved_to_another_cache_continue_with_the_same_bits() {
    let model = Tiny::new(3).load(Store::Q4_1, 2, KernelChoice::Auto);
    let tokens = prompt(9, 200);
    let (mut first, _) = model.backend().unwrap();
    let expected = bits(&feed(&mut first, &slots(0, 13), &tokens, 0, 64));
    let (mut second, _) = model.backend().unwrap();
    let moved: Vec<_> = slots(20, 13).into_iter().rev().collect();
    // The last full block is computed again, as after a prefix hit.
    for (from, to) in slots(0, 12).iter().zip(&moved) {
        let bytes = first.read_block(*from);
        assert_eq!(bytes.len(), model.block_bytes());
        second.write_block(*to, &bytes).unwrap();
        assert_eq!(second.read_block(*to), bytes);
    }
    let logits = feed(&mut second, &moved, &tokens[192..], 192, 5);
    assert_eq!(bits(&logits), expected);
    assert!(second.write_block(moved[0], &[0; 12]).is_err());
}

#[test]
fn what_would_reach_outside_is_refused() {
    let model = Tiny::new(4).load(Store::Q4_1, 1, KernelChoice::Auto);
    let (mut backend, blocks) = model.backend().unwrap();
    let mut refused = |tokens: &[TokenId], start: usize, from: u32| {
        let blocks = slots(from, 2);
        let item = BatchItem { tokens, start, blocks: &blocks, wants_logits: true };
        assert!(backend.forward(&Batch { items: vec![item] }).is_err(), "{tokens:?} at {start}, blocks from {from}");
    };
    refused(&[], 0, 0);
    refused(&[VOCAB as u32], 0, 0);
    refused(&[1], 32, 0);
    refused(&[1], 0, blocks - 1);
}
