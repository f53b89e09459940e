//! A quick part of the table: fixed seeds, small clusters.

use super::*;

fn run(scenario: &str, options: Options) -> Outcome {
    (Scenario::named(scenario).expect("a scenario").run)(&options)
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_one_another() {
    let options = Options { nodes: 8, loss: 0.1, seed: 3, ..Options::default() };
    let (one, again) = (run("kill", options), run("kill", options));
    assert_eq!(one, again);
    let other = run("kill", Options { seed: 4, ..options });
    assert_ne!(one.events, other.events);
}

#[test]
fn small_clusters_keep_their_bars() {
    for (scenario, nodes) in
        [("start", 10), ("join", 5), ("kill", 5), ("leave", 8), ("split", 6), ("clash", 4), ("freeze", 6)]
    {
        let outcome = run(scenario, Options { nodes, ..Options::default() });
        assert!(outcome.ok(), "{scenario} of {nodes}, seed 1: {outcome:#?}");
    }
}

#[test]
fn random_faults_break_no_invariant() {
    for seed in [2, 5] {
        let mut deeds = Vec::new();
        let outcome = fuzz(seed, |deed| deeds.push(deed));
        assert!(outcome.ok(), "seed {seed}: {:#?}\n{}", outcome.broken, deeds.join("\n"));
    }
}

#[test]
fn every_line_of_the_table_names_a_scenario() {
    for row in BARS {
        assert!(Scenario::named(row.scenario).is_some(), "{}", row.scenario);
    }
}
