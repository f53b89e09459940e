//! The plan of a batch and the text of an offer: what is written is read back, and no text makes the reader fall.

use proptest::prelude::*;

use super::{
    super::batch::Page,
    offer::{Reach, Window},
    plan::pieces,
};

fn window() -> impl Strategy<Value = Window> {
    (any::<u64>(), prop::collection::vec(any::<u8>(), 1..60)).prop_map(|(base, key)| Window { base, key })
}

proptest! {
    #[test]
    fn pieces_cover_every_byte_once_and_lie_together(
        steps in prop::collection::vec((any::<bool>(), 1_u32..3_000_000), 0..40),
    ) {
        let (mut at, mut pages) = (0_u64, Vec::new());
        for (gap, len) in steps {
            at += if gap { 4_096 } else { 0 };
            pages.push(Page { local: at, remote: at + 77, len });
            at += u64::from(len);
        }
        let mut done: Vec<u32> = vec![0; pages.len()];
        for piece in pieces(&pages) {
            prop_assert!(piece.bytes > 0 && piece.bytes <= 1 << 20);
            let first = piece.pages.start;
            if piece.pages.len() == 1 {
                prop_assert_eq!(done[first], piece.skip);
                done[first] += piece.bytes;
                prop_assert_eq!(piece.ends_page, done[first] == pages[first].len);
                continue;
            }
            prop_assert!(piece.skip == 0 && piece.ends_page);
            let last = pages[piece.pages.end - 1];
            prop_assert_eq!(last.local + u64::from(last.len) - pages[first].local, u64::from(piece.bytes));
            piece.pages.for_each(|page| done[page] += pages[page].len);
        }
        prop_assert!(done.iter().zip(&pages).all(|(done, page)| *done == page.len));
    }

    #[test]
    fn an_offer_is_read_back(
        port: u16,
        window in window(),
        probe in window(),
        cut: prop::sample::Index,
    ) {
        let reach = Reach { control: ([10, 0, 0, 7], port).into(), window, probe };
        let text = reach.to_string();
        prop_assert!(text.len() < 400);
        let cut = &text[..cut.index(text.len())];
        prop_assert!(cut.parse::<Reach>().as_ref() != Ok(&reach));
        prop_assert_eq!(text.parse::<Reach>(), Ok(reach));
    }

    #[test]
    fn no_text_makes_the_reader_fall(text in "[0-9a-f:./\u{e9}]{0,80}") {
        let _read = text.parse::<Reach>();
    }
}
