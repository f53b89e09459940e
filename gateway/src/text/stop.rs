//! Stop strings in a text that arrives in pieces.
//!
//! The stop that is complete first wins; of two complete at the same character, the longer. That is the
//! only rule a streaming reader can follow without taking text back, and it does not depend on how
//! the text is cut. Text that may be the beginning of a stop is held until it is known.

use std::sync::Arc;

/// The search state of one answer. Holds back at most the length of the longest stop.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    held: String,
}

impl StopMatcher {
    /// A search for any of `stops`, none of them empty.
    #[must_use]
    pub fn new(stops: Arc<[String]>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Appends to `out` what is certainly before any stop. True when a stop is complete: the text is over.
    pub fn push(&mut self, piece: &str, out: &mut String) -> bool {
        if self.stops.is_empty() {
            out.push_str(piece);
            return false;
        }
        self.held.push_str(piece);
        if let Some(start) = self.first_complete() {
            out.push_str(&self.held[..start]);
            self.held.clear();
            return true;
        }
        let keep = self.possible_beginning();
        out.push_str(&self.held[..keep]);
        self.held.drain(..keep);
        false
    }

    /// Appends what was held back: the text is over without a stop.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Where the stop that is complete first begins.
    fn first_complete(&self) -> Option<usize> {
        let found = |stop: &String| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start));
        self.stops.iter().filter_map(found).min().map(|(_, start)| start)
    }

    /// Where the longest tail that begins a stop starts.
    fn possible_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest.saturating_sub(1));
        let begins =
            |at: usize| self.held.get(at..).is_some_and(|tail| self.stops.iter().any(|stop| stop.starts_with(tail)));
        (from..self.held.len()).find(|at| begins(*at)).unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out) {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    #[test]
    fn txt_03_the_first_stop_in_the_text_wins_in_any_order_of_the_list() {
        assert_eq!(cut(&["re", "he"], &["there"]), ("t".into(), true));
        assert_eq!(cut(&["he", "re"], &["there"]), ("t".into(), true));
        assert_eq!(cut(&["he", "re"], &["t", "h", "e", "r", "e"]), ("t".into(), true));
    }

    #[test]
    fn a_stop_over_pieces_is_found_and_a_false_beginning_comes_out() {
        assert_eq!(cut(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(cut(&["END"], &["a E", "N", "d b"]), ("a ENd b".into(), false));
        assert_eq!(cut(&["END"], &["a E", "N"]), ("a EN".into(), false));
        assert_eq!(cut(&["살"], &["삼겹", "살"]), ("삼겹".into(), true));
    }

    proptest! {
        #[test]
        fn any_cut_of_the_text_gives_the_same_answer(
            text in "[ab]{0,24}",
            stops in prop::collection::vec("[ab]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..24, 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let singles: Vec<String> = text.chars().map(String::from).collect();
            let one_by_one = cut(&stops, &singles.iter().map(String::as_str).collect::<Vec<_>>());
            let mut places: Vec<usize> = cuts.into_iter().filter(|at| *at <= text.len()).collect();
            places.extend([0, text.len()]);
            places.sort_unstable();
            let pieces: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(cut(&stops, &pieces), one_by_one.clone());
            prop_assert_eq!(cut(&stops, &[&text]), one_by_one);
        }
    }
}
