//! A choice without the shard: the less loaded of two drawn at random.
//!
//! Called by the client while no router shard answers. Two draws keep many gateways, none of which knows the
//! others, from running to the same worker. Never: a random generator; the draws are arguments.

/// The index of the less loaded of two candidates, given each one's load and two random numbers.
#[must_use]
pub fn two_choices(loads: &[u32], draws: (u32, u32)) -> Option<usize> {
    let at = |draw: u32| (draw as usize).checked_rem(loads.len());
    let first = at(draws.0)?;
    // The second is drawn among the others.
    let others = loads.len() - 1;
    let second = (draws.1 as usize).checked_rem(others).map(|skip| (first + 1 + skip) % loads.len());
    match second {
        Some(second) if loads[second] < loads[first] => Some(second),
        _ => Some(first),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nobody_of_none_and_the_only_one_of_one() {
        assert_eq!(two_choices(&[], (1, 2)), None);
        assert_eq!(two_choices(&[9], (1, 2)), Some(0));
    }

    proptest! {
        #[test]
        fn never_the_most_loaded_of_three(draws: (u32, u32), most in 0usize..3) {
            let mut loads = [1, 1, 1];
            loads[most] = 9;
            prop_assert_ne!(two_choices(&loads, draws), Some(most));
        }
    }
}
