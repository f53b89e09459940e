//! What becomes of a ticket when the two workers lay their blocks out differently.

use starling_kv::layout::{KvDtype, KvLayout, KvOrder};

use super::*;

#[test]
fn xfr_09_other_layouts_are_refused_by_name() {
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits());
    for (layout, bytes) in [(8, 100), (7, 200), (0, 0)] {
        let error = holder.open(ms(0), Asked { layout, block_bytes: bytes, ..asked(1, 1, 1) }).expect_err("refused");
        assert!(matches!(error, Refusal::Layout { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{bytes} there")), "{error}");
    }
    let stale = Asked { holder: party("p", 2), ..asked(1, 1, 1) };
    assert!(matches!(holder.open(ms(0), stale), Err(Refusal::Stale { .. })));
    assert_eq!(holder.open_tickets(), 0);
}

#[test]
fn xfr_09_what_differs_between_two_layouts_is_said() {
    let (dtype, order) = (KvDtype::F16, KvOrder::LayerKvTokenHeadDim);
    let ours = KvLayout { layers: 2, kv_heads: 4, head_dim: 8, dtype, block_tokens: 16, order, tp_rank: 0, tp_size: 1 };
    let mut holder = Holder::new(party("p", 1), LAYOUT, limits()).shaped(Some(ours), 5);
    let mut refused = |shape| {
        let other = Asked { layout: 8, shape, ..asked(1, 1, 1) };
        holder.open(ms(0), other).expect_err("refused").to_string()
    };
    let cases = [
        (KvLayout { block_tokens: 32, ..ours }, "there: block_tokens 16 here, 32 there (these could be converted)"),
        (KvLayout { dtype: KvDtype::Bf16, ..ours }, "there: dtype F16 here, Bf16 there"),
        (KvLayout { layers: 3, block_tokens: 32, ..ours }, "there: layers 2 here, 3 there"),
        (
            KvLayout { kv_heads: 2, tp_size: 2, ..ours },
            "kv_heads 4 here, 2 there; tp_size 1 here, 2 there (these could be",
        ),
        (ours, "there: one shape, filled differently"),
    ];
    for (theirs, reason) in cases {
        let said = refused(Some(theirs));
        assert!(said.contains(reason), "{said}");
    }
    assert!(refused(None).ends_with("with 100 there"));
    let order = KvOrder::LayerHeadKeysTransposed;
    assert!(
        refused(Some(KvLayout { order, ..ours })).contains("(these could be converted)"),
        "its numbers are unknown"
    );
}

#[test]
fn xfr_09_another_order_of_the_same_numbers_is_taken_by_whoever_can_convert_it() {
    let (dtype, order) = (KvDtype::F16, KvOrder::LayerKvTokenHeadDim);
    let ours = KvLayout { layers: 2, kv_heads: 4, head_dim: 8, dtype, block_tokens: 16, order, tp_rank: 0, tp_size: 1 };
    let theirs = KvLayout { order: KvOrder::LayerHeadKeysTransposed, ..ours };
    let opens = |numbers, asked: Asked| {
        Holder::new(party("p", 1), LAYOUT, limits()).shaped(Some(ours), numbers).open(ms(0), asked).is_ok()
    };
    let other = Asked { layout: 8, shape: Some(theirs), numbers: 5, ..asked(1, 1, 1) };
    assert!(opens(5, other.clone()));
    assert!(!opens(6, other.clone()) && !opens(0, Asked { numbers: 0, ..other.clone() }), "other numbers, or unknown");
    assert!(!opens(5, Asked { block_bytes: 200, ..other.clone() }));
    assert!(!opens(5, Asked { shape: Some(KvLayout { block_tokens: 32, ..theirs }), ..other.clone() }));
    assert!(!opens(5, Asked { shape: Some(KvLayout { tp_size: 2, ..theirs }), ..other.clone() }));
    assert!(!opens(5, Asked { shape: None, ..other }));
}
