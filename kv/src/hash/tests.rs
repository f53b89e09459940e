//! Golden vectors and properties of the block hashes.

use proptest::prelude::*;

use super::*;

fn seed(model: &str, adapter: Option<&str>, salt: Option<&str>) -> HashSeed {
    HashSeed::new(SeedParts { model, tokenizer_digest: "d0", adapter, salt })
}

/// A change here makes old and new nodes disagree about every block: it needs a new wire version.
#[test]
fn golden_vectors_hold() {
    let base = seed("m", None, None);
    let tokens: Vec<TokenId> = (0..32).collect();
    let hashes = block_hashes(base, &tokens, 16);
    let seen: Vec<String> = std::iter::once(format!("{:032x}", base.0))
        .chain([format!("{:032x}", base.scoped(Some("x"), None).0), format!("{:032x}", base.scoped(None, Some("x")).0)])
        .chain(hashes.iter().map(BlockHash::to_string))
        .collect();
    assert_eq!(
        seen,
        [
            "f17231841cca8f3220f2194eb144c606",
            "4e1c1fba4fa5ff1eb5cbce237553c284",
            "a58308631b2f114c58b8aebf790a1b38",
            "97c4de9d41d25e4c8dfdc75365a8c628",
            "10df53bd019d69063097b42fec57d46d",
        ]
    );
}

#[test]
fn idx_10_adapter_salt_and_model_never_share_a_first_block() {
    let tokens = [1, 2, 3, 4];
    let first = |seed: HashSeed| block_hashes(seed, &tokens, 4)[0];
    let plain = seed("a", None, None);
    let four = [
        first(seed("a", Some("x"), None)),
        first(seed("a", None, Some("x"))),
        first(plain),
        first(seed("b", None, None)),
        first(plain.scoped(Some("x"), None)),
        first(plain.scoped(None, Some("x"))),
        first(plain.scoped(Some("x"), Some("x"))),
    ];
    for (i, a) in four.iter().enumerate() {
        for b in &four[i + 1..] {
            assert_ne!(a, b);
        }
    }
    assert_eq!(plain, plain.scoped(None, None));
    assert_ne!(plain, plain.scoped(Some(""), None), "an empty name is a name");
}

#[test]
fn media_part_prompts_from_the_block_they_begin_in() {
    let tokens = [9; 40];
    let hashes = |media: &[Media]| {
        let mut hasher = BlockHasher::new(HashSeed(1), 8).with_media(media.to_vec());
        hasher.extend(&tokens);
        hasher.hashes().to_vec()
    };
    let cat = Media { start: 10, len: 12, digest: 1 };
    let (plain, one) = (hashes(&[]), hashes(&[cat]));
    assert_eq!(plain, block_hashes(HashSeed(1), &tokens, 8), "none is as before");
    let others = [Media { digest: 2, ..cat }, Media { start: 11, ..cat }, Media { len: 30, ..cat }];
    for other in others.map(|other| hashes(&[other])).iter().chain([&plain]) {
        assert_eq!(one[0], other[0]);
    }
    for other in [hashes(&others[..1]), hashes(&others[1..2]), plain] {
        (1..5).for_each(|block| assert_ne!(one[block], other[block], "block {block}"));
    }
    // Longer, it reaches into a block that the other one does not.
    assert_eq!(one[2], hashes(&others[2..])[2]);
    assert_ne!(one[3], hashes(&others[2..])[3]);
    assert_eq!(one[1].to_string(), "15ae200571f960ee9cbcd61a215c49dd", "golden");
}

#[test]
fn blocks_longer_than_the_stack_hash_like_short_ones() {
    let tokens: Vec<TokenId> = (7..7 + STACK_TOKENS as u32 + 1).collect();
    let mut bytes = 5u128.to_le_bytes().to_vec();
    tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    assert_eq!(block_hash(HashSeed(5), None, &tokens), BlockHash(XxHash3_128::oneshot(&bytes)));
    let sixteen = BlockHash(XxHash3_128::oneshot(&bytes[..16 + 64]));
    assert_eq!(block_hash(HashSeed(5), None, &tokens[..16]), sixteen);
    assert_eq!(block_hash(HashSeed(5), None, &tokens[..3]), BlockHash(XxHash3_128::oneshot(&bytes[..16 + 12])));
}

proptest! {
    #[test]
    fn sixteen_tokens_hash_as_the_general_function_says(before: u128, tokens in prop::array::uniform16(any::<u32>())) {
        let mut bytes = before.to_le_bytes().to_vec();
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        prop_assert_eq!(sixteen::hash(before, &tokens), XxHash3_128::oneshot(&bytes));
    }

    #[test]
    fn equal_prefixes_have_equal_hashes_and_others_differ(
        shared in prop::collection::vec(0u32..50, 0..80),
        a in prop::collection::vec(0u32..50, 0..40),
        b in prop::collection::vec(0u32..50, 0..40),
        block in 1usize..9,
    ) {
        let join = |tail: &[u32]| [shared.as_slice(), tail].concat();
        let (left, right) = (join(&a), join(&b));
        let hashes = (block_hashes(HashSeed(1), &left, block), block_hashes(HashSeed(1), &right, block));
        let common = left.iter().zip(&right).take_while(|(x, y)| x == y).count() / block;
        prop_assert_eq!(hashes.0.len(), left.len() / block);
        for (depth, (x, y)) in hashes.0.iter().zip(&hashes.1).enumerate() {
            prop_assert_eq!(x == y, depth < common);
        }
    }

    #[test]
    fn growing_by_pieces_gives_the_hashes_of_the_whole(
        tokens in prop::collection::vec(any::<u32>(), 0..100),
        cuts in prop::collection::vec(0usize..100, 0..8),
        block in 1usize..20,
    ) {
        let mut hasher = BlockHasher::new(HashSeed(9), block);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
        cuts.sort_unstable();
        for cut in cuts {
            hasher.extend(&tokens[..cut]);
        }
        hasher.extend(&tokens);
        prop_assert_eq!(hasher.hashes(), block_hashes(HashSeed(9), &tokens, block));
    }

    #[test]
    fn set_digest_forgets_order_and_undoes_itself(hashes in prop::collection::hash_set(any::<u128>(), 0..30)) {
        let mut forward = SetDigest::default();
        hashes.iter().for_each(|hash| forward.toggle(BlockHash(*hash)));
        let mut sorted: Vec<u128> = hashes.into_iter().collect();
        sorted.sort_unstable();
        let mut again = SetDigest::default();
        sorted.iter().for_each(|hash| again.toggle(BlockHash(*hash)));
        prop_assert_eq!(forward, again);
        sorted.iter().for_each(|hash| again.toggle(BlockHash(*hash)));
        prop_assert_eq!(again, SetDigest::default());
    }
}
