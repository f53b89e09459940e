//! Shell: Grants against a model, and what one batch may be.

use std::{sync::Arc, time::Duration};

use proptest::prelude::*;

use super::super::{
    batch::{Verifier, segments},
    grant::Ask,
    *,
};
use super::{Instant, token};

fn ask() -> Ask {
    Ask { token: token(1), direction: Direction::Pull, region: RegionId(0) }
}

proptest! {
    #[test]
    fn a_page_is_granted_exactly_when_each_of_its_bytes_is(
        ranges in prop::collection::vec((0_u64..60, 0_u64..20), 0..8),
        page in (0_u64..80, 0_u32..24),
    ) {
        let grants = Arc::new(Grants::new());
        let now = Instant::now();
        let listed = ranges.iter().map(|(start, len)| *start..start + len).collect();
        let expires = now + Duration::from_secs(1);
        let (direction, region) = (Direction::Pull, RegionId(0));
        grants.issue(Grant { token: token(1), direction, region, ranges: listed, expires }).expect("issued");
        let byte = |at: u64| ranges.iter().any(|(start, len)| (*start..start + len).contains(&at));
        let all = page.1 > 0 && (page.0..page.0 + u64::from(page.1)).all(byte);
        prop_assert_eq!(grants.admit(ask(), [page], now).is_ok(), all);
    }

    #[test]
    fn segments_cover_every_byte_once_and_stay_small(lengths in prop::collection::vec(1_u32..3_000_000, 0..40)) {
        let mut done: Vec<u32> = vec![0; lengths.len()];
        for segment in segments(|page| lengths[page], lengths.len()) {
            prop_assert!(segment.bytes > 0 && segment.bytes <= 1 << 20 && segment.pages.len() <= 256);
            if segment.pages.len() == 1 {
                let page = segment.pages.start;
                prop_assert_eq!(done[page], segment.skip);
                done[page] += segment.bytes;
                prop_assert_eq!(segment.ends_page, done[page] == lengths[page]);
            } else {
                let whole: u32 = segment.pages.clone().map(|page| lengths[page]).sum();
                prop_assert!(segment.skip == 0 && segment.ends_page && segment.bytes == whole);
                segment.pages.for_each(|page| done[page] += lengths[page]);
            }
        }
        prop_assert_eq!(done, lengths);
    }
}

#[test]
fn a_grant_lives_until_its_lease_ends_and_its_last_use_goes() {
    let (grants, now) = (Arc::new(Grants::new()), Instant::now());
    let soon = now + Duration::from_millis(10);
    let ranges = std::iter::once(0..100).collect();
    let grant = Grant { token: token(1), direction: Direction::Pull, region: RegionId(0), ranges, expires: soon };
    assert_eq!(grants.issue(grant.clone()), Ok(()));
    assert_eq!(grants.issue(grant), Err(Refusal::Busy), "a token names one grant");
    let first = grants.admit(ask(), [(0, 100)], now).expect("granted");
    assert_eq!(first.alive(now), Ok(()));
    assert_eq!(first.alive(soon), Err(Refusal::Expired));
    assert!(grants.renew(token(1), soon + Duration::from_millis(10), now));
    assert_eq!(first.alive(soon), Ok(()));
    assert!(!grants.renew(token(1), soon, soon + Duration::from_secs(1)), "an ended lease stays ended");
    assert_eq!(grants.sweep(soon + Duration::from_secs(1)), vec![], "in use");
    assert_eq!(grants.revoke(token(1)), 1);
    assert_eq!(first.alive(now), Err(Refusal::UnknownGrant));
    assert!(grants.admit(ask(), [(0, 1)], now).is_err());
    assert_eq!((grants.in_flight(token(1)), grants.len()), (1, 1));
    drop(first);
    assert_eq!((grants.in_flight(token(1)), grants.len()), (0, 0));
}

#[test]
fn groups_are_good_when_complete() {
    let promised = Checksums::Groups { pages: 2, sums: vec![fold(&[1, 2]), fold(&[3])] };
    let mut verifier = Verifier::new(&promised, 3);
    assert_eq!([1, 2, 3].map(|sum| verifier.next(sum)), [Ok(0), Ok(2), Ok(3)]);
}
