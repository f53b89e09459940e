//! What a mistyped name may have meant: the similar names that exist, or some that do. Pure.
//!
//! Called where a name is not found, to finish the sentence. Bounds: [`LOOKED_AT`] names are looked at, [`TOLD`] told.

use std::{collections::BTreeSet, fmt::Write};

/// Names that are compared; a larger cluster has more, and a hint is not worth more.
const LOOKED_AT: usize = 512;
/// Names that are told.
const TOLD: usize = 3;

/// The end of a sentence that says that `wanted` does not exist: `; did you mean "greet"?`, or `; there are "a", "b"
/// and 4 more`, or `none`.
pub(crate) fn hint<'a>(wanted: &str, names: impl Iterator<Item = &'a str>, none: &str) -> String {
    let names: BTreeSet<&str> = names.take(LOOKED_AT).collect();
    if names.is_empty() {
        return none.to_owned();
    }
    let similar = similar(wanted, names.iter().copied());
    if similar.is_empty() {
        let told: Vec<&str> = names.iter().copied().take(TOLD).collect();
        let more = names.len() - told.len();
        let mut text = format!("; there {} {}", if names.len() == 1 { "is" } else { "are" }, quoted(&told));
        if more > 0 {
            // Writing to a string cannot fail.
            write!(text, " and {more} more").ok();
        }
        return text;
    }
    format!("; did you mean {}?", quoted(&similar))
}

/// The names that `wanted` may be a slip of, the likeliest first; at most three.
pub fn similar<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let allowed = (wanted.chars().count() / 4).clamp(1, 4);
    let distances = names.map(|name| (distance(wanted, name), name));
    let mut similar: Vec<(usize, &str)> = distances.filter(|(distance, _)| *distance <= allowed).collect();
    similar.sort_unstable();
    similar.into_iter().map(|(_, name)| name).take(TOLD).collect()
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

/// Letters to add, drop, change or swap with their neighbour to make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let changed = last[j] + usize::from(from != to);
            let mut least = changed.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *from == b[j - 1] && a[i - 1] == *to {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typos_are_near_and_strangers_are_listed() {
        assert_eq!(
            [distance("greet", "gret"), distance("ab", "ba"), distance("", "abc"), distance("x", "x")],
            [1, 1, 3, 0]
        );
        let names = ["shop/desk/greet", "shop/desk/count", "shop/stock/count", "shop/till/pay"];
        let hint = |wanted| hint(wanted, names.into_iter(), "; there is none");
        assert_eq!(hint("shop/desk/gret"), "; did you mean \"shop/desk/greet\"?");
        assert_eq!(hint("shop/stock/cuont"), "; did you mean \"shop/stock/count\"?");
        let listed = "; there are \"shop/desk/count\", \"shop/desk/greet\", \"shop/stock/count\" and 1 more";
        assert_eq!(hint("bank/vault/open"), listed);
        assert_eq!(super::hint("a", std::iter::empty(), "; there is none"), "; there is none");
        assert_eq!(super::hint("a", ["counter"].into_iter(), ""), "; there is \"counter\"");
    }
}
