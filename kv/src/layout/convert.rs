//! Blocks of one layout as blocks of another: other orders, block sizes, and shares of the heads.
//!
//! Called where blocks cross an engine's border and the verdict was [`Verdict::Convertible`]. Never: changes a number;
//! the same bytes lie elsewhere. Bounds: touches what both pieces have and nothing else of the target.

use super::{KvLayout, KvOrder, LayoutError, Mismatch};

/// Whether blocks of one layout can be used under another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// As they are.
    Equal,
    /// After [`convert`]; what differs.
    Convertible(Vec<Mismatch>),
    /// Not at all; what stands in the way.
    Refused(Vec<Mismatch>),
}

/// A block's bytes in their layout, from a token on.
#[derive(Debug)]
pub struct Piece<'a, B> {
    /// The layout.
    pub layout: &'a KvLayout,
    /// The whole block.
    pub bytes: B,
    /// The first token meant, below the layout's `block_tokens`.
    pub token: usize,
}

impl KvLayout {
    /// Heads of all shards together.
    #[must_use]
    pub fn all_heads(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.tp_size)
    }

    /// First head of this shard, counted over all shards.
    fn first_head(&self) -> usize {
        self.tp_rank as usize * self.kv_heads as usize
    }

    /// Whether blocks of `theirs` can be used here. Orders convert always; block sizes and numbers of shards when one is a
    /// multiple of the other; layers, head size, number format and the number of all heads must be the same.
    #[must_use]
    pub fn verdict(&self, theirs: &Self) -> Verdict {
        let Err(LayoutError::Differs(differ)) = self.accepts(theirs) else { return Verdict::Equal };
        let multiple = |a: u32, b: u32| a.max(b).is_multiple_of(a.min(b).max(1));
        let stands = |mismatch: &Mismatch| match mismatch.field {
            "layers" | "head_dim" | "dtype" => true,
            "kv_heads" => self.all_heads() != theirs.all_heads(),
            "block_tokens" => !multiple(self.block_tokens, theirs.block_tokens),
            "tp_size" => self.all_heads() != theirs.all_heads() || !multiple(self.tp_size, theirs.tp_size),
            _ => false,
        };
        let (refused, convertible): (Vec<_>, Vec<_>) = differ.into_iter().partition(stands);
        if refused.is_empty() { Verdict::Convertible(convertible) } else { Verdict::Refused(refused) }
    }

    /// Whether blocks of `theirs` become blocks of this one by another order of their numbers and nothing else: then one
    /// takes the place of one, and both have as many bytes.
    #[must_use]
    pub fn differs_in_order_alone(&self, theirs: &Self) -> bool {
        self.order != theirs.order && Self { order: self.order, ..*theirs } == *self
    }

    /// Number of an element: key (0) or value (1) of a head of this shard.
    fn element(&self, layer: usize, kv: usize, token: usize, head: usize) -> (usize, usize) {
        let (heads, dim, tokens) = (self.kv_heads as usize, self.head_dim as usize, self.block_tokens as usize);
        match self.order {
            KvOrder::LayerKvTokenHeadDim => ((((layer * 2 + kv) * tokens + token) * heads + head) * dim, 1),
            KvOrder::LayerKvHeadTokenDim => ((((layer * 2 + kv) * heads + head) * tokens + token) * dim, 1),
            KvOrder::LayerHeadKeysTransposed => {
                let at = (layer * heads + head) * 2 * tokens * dim;
                if kv == 0 { (at + token, tokens) } else { (at + (tokens + token) * dim, 1) }
            }
        }
    }
}

/// Copies `tokens` tokens of the heads that both shards have, and says how many heads these are.
///
/// A block of more tokens is filled by one call for each smaller one, a shard of more heads by one for each smaller shard.
///
/// # Errors
/// The layouts do not convert, or a piece is not one block of its layout or ends before so many tokens.
pub fn convert(
    source: &Piece<'_, &[u8]>,
    target: &mut Piece<'_, &mut [u8]>,
    tokens: usize,
) -> Result<usize, LayoutError> {
    let (from, to) = (source.layout.validated()?, target.layout.validated()?);
    if let Verdict::Refused(reasons) = to.verdict(&from) {
        return Err(LayoutError::Differs(reasons));
    }
    let fits = |layout: &KvLayout, len: usize, token: usize| {
        len == layout.block_bytes() && token.saturating_add(tokens) <= layout.block_tokens as usize
    };
    if !fits(&from, source.bytes.len(), source.token) || !fits(&to, target.bytes.len(), target.token) {
        return Err(LayoutError::Piece);
    }
    let first = from.first_head().max(to.first_head());
    let last = (from.first_head() + from.kv_heads as usize).min(to.first_head() + to.kv_heads as usize);
    for layer in 0..from.layers as usize {
        for kv in 0..2 {
            for head in first..last {
                for token in 0..tokens {
                    let read = from.element(layer, kv, source.token + token, head - from.first_head());
                    let write = to.element(layer, kv, target.token + token, head - to.first_head());
                    copy_row(source.bytes, read, target.bytes, write, (from.head_dim as usize, from.dtype.bytes()));
                }
            }
        }
    }
    Ok(last.saturating_sub(first))
}

/// One row of a head: `dim` numbers, each so many numbers behind the one before.
fn copy_row(
    source: &[u8],
    (read, read_step): (usize, usize),
    target: &mut [u8],
    (write, write_step): (usize, usize),
    (dim, width): (usize, usize),
) {
    if read_step == 1 && write_step == 1 {
        let (from, to) = (read * width, write * width);
        target[to..to + dim * width].copy_from_slice(&source[from..from + dim * width]);
        return;
    }
    for d in 0..dim {
        let (from, to) = ((read + d * read_step) * width, (write + d * write_step) * width);
        target[to..to + width].copy_from_slice(&source[from..from + width]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::KvDtype;

    fn layout(order: KvOrder, block_tokens: u32, (tp_rank, tp_size): (u32, u32)) -> KvLayout {
        let (layers, head_dim, dtype) = (2, 2, KvDtype::F16);
        KvLayout { layers, kv_heads: 4 / tp_size, head_dim, dtype, block_tokens, order, tp_rank, tp_size }
    }

    const ORDERS: [KvOrder; 3] =
        [KvOrder::LayerKvTokenHeadDim, KvOrder::LayerKvHeadTokenDim, KvOrder::LayerHeadKeysTransposed];

    /// `tokens` tokens of all heads: each number tells its layer, K or V, token, head and dim.
    fn whole(layout: &KvLayout, first_token: usize) -> Vec<u8> {
        let mut bytes = vec![0; layout.block_bytes()];
        for layer in 0..2 {
            for (kv, head) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)] {
                let Some(own) =
                    usize::checked_sub(head, layout.first_head()).filter(|own| *own < layout.kv_heads as usize)
                else {
                    continue;
                };
                for token in 0..layout.block_tokens as usize {
                    let (at, step) = layout.element(layer, kv, token, own);
                    for d in 0..2 {
                        let place = (at + d * step) * 2;
                        bytes[place] = (layer * 16 + kv * 8 + head * 2 + d) as u8;
                        bytes[place + 1] = (first_token + token) as u8;
                    }
                }
            }
        }
        bytes
    }

    #[test]
    fn orders_are_those_of_their_names() {
        let small = |order| KvLayout { layers: 1, kv_heads: 2, dtype: KvDtype::F8E4m3, ..layout(order, 3, (0, 2)) };
        // Key of (token, head, dim) as token, head, dim digits; values carry an 8 in front of the token.
        let mut tokens_first = Vec::new();
        for kv in [0, 100] {
            for token in 0..3 {
                tokens_first.extend([0, 1, 10, 11].map(|rest| (kv + token * 20 + rest) as u8));
            }
        }
        let read = small(ORDERS[0]);
        let as_order = |order| {
            let to = small(order);
            let mut bytes = vec![0; to.block_bytes()];
            let source = Piece { layout: &read, bytes: tokens_first.as_slice(), token: 0 };
            let mut target = Piece { layout: &to, bytes: bytes.as_mut_slice(), token: 0 };
            assert_eq!(convert(&source, &mut target, 3), Ok(2));
            bytes
        };
        assert_eq!(as_order(ORDERS[0]), tokens_first);
        let keys_then_values_by_head =
            [0, 1, 20, 21, 40, 41, 10, 11, 30, 31, 50, 51, 100, 101, 120, 121, 140, 141, 110, 111, 130, 131, 150, 151];
        assert_eq!(as_order(ORDERS[1]), keys_then_values_by_head);
        let heads_with_keys_transposed =
            [0, 20, 40, 1, 21, 41, 100, 101, 120, 121, 140, 141, 10, 30, 50, 11, 31, 51, 110, 111, 130, 131, 150, 151];
        assert_eq!(as_order(ORDERS[2]), heads_with_keys_transposed);
    }

    /// Four heads of one number; K and V of (token, head) as its digits, V with 100 more.
    fn digits(tokens: std::ops::Range<u8>, heads: std::ops::Range<u8>) -> Vec<u8> {
        let token = |kv: u8, token: u8| heads.clone().map(move |head| kv + token * 10 + head);
        [0, 100]
            .into_iter()
            .flat_map(|kv| tokens.clone().flat_map(move |at| token(kv, at)).collect::<Vec<_>>())
            .collect()
    }

    fn one_number(block_tokens: u32, (tp_rank, tp_size): (u32, u32)) -> KvLayout {
        let (layers, head_dim, dtype) = (1, 1, KvDtype::F8E4m3);
        KvLayout { layers, kv_heads: 4 / tp_size, head_dim, dtype, block_tokens, order: ORDERS[0], tp_rank, tp_size }
    }

    #[test]
    fn shards_have_the_heads_of_their_rank_and_become_whole_again() {
        let sizes = [1_u32, 2, 4];
        let share = |(rank, size): (u32, u32)| {
            let heads = (4 / size) as u8;
            digits(0..2, rank as u8 * heads..(rank as u8 + 1) * heads)
        };
        assert_eq!(share((1, 2)), [2, 3, 12, 13, 102, 103, 112, 113]);
        assert_eq!(share((3, 4)), [3, 13, 103, 113]);
        for (from_size, to_size) in sizes.iter().flat_map(|from| sizes.map(|to| (*from, to))) {
            for rank in 0..to_size {
                let to = one_number(2, (rank, to_size));
                let (mut bytes, mut heads) = (vec![255; to.block_bytes()], 0);
                for from_rank in 0..from_size {
                    let (from, source) = (one_number(2, (from_rank, from_size)), share((from_rank, from_size)));
                    let source = Piece { layout: &from, bytes: source.as_slice(), token: 0 };
                    let mut target = Piece { layout: &to, bytes: bytes.as_mut_slice(), token: 0 };
                    heads += convert(&source, &mut target, 2).expect("converts");
                }
                assert_eq!((bytes, heads), (share((rank, to_size)), to.kv_heads as usize), "{from_size} to {to_size}");
            }
        }
    }

    #[test]
    fn small_blocks_become_a_large_one_and_again_small_ones() {
        let (small, large) = (one_number(2, (0, 1)), one_number(4, (0, 1)));
        let mut bytes = vec![255; large.block_bytes()];
        for first in [0, 2] {
            let source = digits(first..first + 2, 0..4);
            let source = Piece { layout: &small, bytes: source.as_slice(), token: 0 };
            let mut target = Piece { layout: &large, bytes: bytes.as_mut_slice(), token: usize::from(first) };
            assert_eq!(convert(&source, &mut target, 2), Ok(4));
        }
        assert_eq!(bytes, digits(0..4, 0..4));
        assert_eq!(bytes[12..20], [30, 31, 32, 33, 100, 101, 102, 103]);
        for first in [0, 2] {
            let mut back = vec![255; small.block_bytes()];
            let source = Piece { layout: &large, bytes: bytes.as_slice(), token: usize::from(first) };
            let mut target = Piece { layout: &small, bytes: back.as_mut_slice(), token: 0 };
            assert_eq!(convert(&source, &mut target, 2), Ok(4));
            assert_eq!(back, digits(first..first + 2, 0..4));
        }
    }

    #[test]
    fn xfr_09_a_difference_is_converted_or_refused_by_name() {
        let ours = layout(ORDERS[0], 16, (0, 1));
        let names = |verdict: Verdict| match verdict {
            Verdict::Equal => (true, vec![]),
            Verdict::Convertible(differ) => (true, differ.into_iter().map(|mismatch| mismatch.field).collect()),
            Verdict::Refused(differ) => (false, differ.into_iter().map(|mismatch| mismatch.field).collect()),
        };
        let of = |theirs: KvLayout| names(ours.verdict(&theirs));
        assert_eq!(of(ours), (true, vec![]));
        assert_eq!(of(layout(ORDERS[2], 16, (0, 1))), (true, vec!["order"]));
        assert_eq!(of(layout(ORDERS[0], 32, (0, 1))), (true, vec!["block_tokens"]));
        assert_eq!(of(layout(ORDERS[0], 24, (0, 1))), (false, vec!["block_tokens"]));
        assert_eq!(of(layout(ORDERS[0], 16, (1, 2))), (true, vec!["kv_heads", "tp_rank", "tp_size"]));
        assert_eq!(of(KvLayout { dtype: KvDtype::Bf16, ..ours }), (false, vec!["dtype"]));
        assert_eq!(of(KvLayout { layers: 3, ..ours }), (false, vec!["layers"]));
        assert_eq!(of(KvLayout { kv_heads: 8, ..ours }), (false, vec!["kv_heads"]));
        let (two, three) = (layout(ORDERS[0], 16, (0, 2)), KvLayout { kv_heads: 4, tp_size: 3, ..ours });
        assert!(!names(two.verdict(&three)).0);
        assert!(ours.differs_in_order_alone(&layout(ORDERS[2], 16, (0, 1))) && !ours.differs_in_order_alone(&ours));
        assert!(!ours.differs_in_order_alone(&layout(ORDERS[2], 32, (0, 1))));
        let source = vec![0; 10];
        let mut target = vec![0; ours.block_bytes()];
        let source = Piece { layout: &ours, bytes: source.as_slice(), token: 0 };
        let mut target = Piece { layout: &ours, bytes: target.as_mut_slice(), token: 0 };
        assert_eq!(convert(&source, &mut target, 16), Err(LayoutError::Piece));
    }

    proptest! {
        /// From any shards, order and block size into any others and the numbers are where they belong.
        #[test]
        fn numbers_find_their_place(
            from_order in 0usize..3, to_order in 0usize..3,
            from_tokens in prop::sample::select(vec![4u32, 8, 16]), to_tokens in prop::sample::select(vec![4u32, 8, 16]),
            from_tp in prop::sample::select(vec![1u32, 2, 4]), to_tp in prop::sample::select(vec![1u32, 2, 4]),
        ) {
            for rank in 0..to_tp {
                let to = layout(ORDERS[to_order], to_tokens, (rank, to_tp));
                for block in 0..16 / to_tokens as usize {
                    let first = block * to_tokens as usize;
                    let mut bytes = vec![0xff; to.block_bytes()];
                    for from_rank in 0..from_tp {
                        let from = layout(ORDERS[from_order], from_tokens, (from_rank, from_tp));
                        for from_first in (0..16).step_by(from_tokens as usize) {
                            let begin = first.max(from_first);
                            let end = (first + to_tokens as usize).min(from_first + from_tokens as usize);
                            if begin >= end {
                                continue;
                            }
                            let source = whole(&from, from_first);
                            let source = Piece { layout: &from, bytes: source.as_slice(), token: begin - from_first };
                            let mut target = Piece { layout: &to, bytes: bytes.as_mut_slice(), token: begin - first };
                            convert(&source, &mut target, end - begin).expect("converts");
                        }
                    }
                    prop_assert_eq!(&bytes, &whole(&to, first));
                }
            }
        }
    }
}
