//! Policies by name and from a file; pickers and sessions of the latter.

use super::*;

#[test]
fn every_name_builds_and_reads_back() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse::<PolicyName>(), Ok(name));
        let mut bench = Bench::new(name, 3);
        bench.decide(&hashes(1, 4), &[], None);
        assert_eq!(bench.desk.explain(RequestId(1))[0].policy, name.as_str());
    }
    let error = "nope".parse::<PolicyName>().expect_err("unknown").to_string();
    assert!(error.contains("nope") && error.contains("round-robin"), "{error}");
}

#[test]
fn a_policy_is_composed_from_a_file_and_nonsense_is_named() {
    let both = "scorers = [{ name = 'ms', harm = 0 }, { name = 'load', weight = 2.5 }, 'kv']\npicker = 'lowest'";
    let config = read(both).expect("reads");
    let policy = config.build().expect("a policy");
    let named: Vec<_> = policy.scorers.iter().map(|(weight, scorer)| (*weight, scorer.name())).collect();
    assert_eq!(named, [(1.0, "ms"), (2.5, "load"), (1.0, "kv")]);
    assert_eq!(policy.name, "composed");
    let filtered = read("name = 'dynamo'\nfilters = ['topology']").expect("reads").build().expect("a policy");
    assert_eq!((filtered.name, filtered.filters.len()), ("dynamo", 7));
    for (text, key, right) in [
        ("scorers = [{ name = 'luck' }]", "policy.scorers[0].name", "prefix-hash"),
        ("scorers = ['ms', { name = 'laod' }]", "policy.scorers[1].name", "did you mean load?"),
        ("scorers = [{ name = 'ms', weight = 0.0 }]", "policy.scorers[0].weight", "not 0"),
        ("scorers = [{ name = 'ms', weight = 'much' }]", "policy.scorers[0].weight", "finite number"),
        ("scorers = [{ name = 'ms', ham = 1 }]", "policy.scorers[0].ham", "did you mean harm?"),
        ("scorers = [{ weight = 1 }]", "policy.scorers[0].name", "missing"),
        ("scorers = 'ms'", "policy.scorers", "must be a list"),
        ("picker = 'best'", "policy.picker.name", "two-draws"),
        ("picker = { name = 'softmin', temperature = -1 }", "policy.picker.temperature", "from 0 to 100"),
        ("picker = { name = 'lowest', temperature = 1 }", "policy.picker.temperature", "no settings"),
        ("filters = [{ name = 'labels' }]", "policy.filters[0].need", "missing"),
        ("filters = [{ name = 'labels', need = 'a b' }]", "policy.filters[0].need", "KEY=VALUE"),
        ("naem = 'dynamo'", "policy.naem", "did you mean name?"),
        ("name = 'dinamo'", "policy.name", "did you mean dynamo?"),
    ] {
        let error = read(text).and_then(|config| config.build().map_err(|error| error.to_string())).expect_err(text);
        assert!(error.contains(key) && error.contains(right), "{text}: {error}");
    }
}

#[test]
fn a_program_brings_its_own_parts_by_name() {
    #[derive(Debug)]
    struct Late(f64);
    impl Scorer for Late {
        fn name(&self) -> &'static str {
            "late"
        }
        fn cost(&self, _question: &Question<'_>, slot: Slot) -> f64 {
            self.0 * (3.0 - slot as f64)
        }
    }
    let config = read("scorers = [{ name = 'late', by = 2.0 }]").expect("reads");
    assert!(config.build().expect_err("not known yet").to_string().contains("late"));
    let config = config.with_scorer("late", |params| Ok(Late(params.number("by", 0.0..=9.0, 1.0)?)));
    let mut bench = Bench::of(config.build().expect("a policy"), 3);
    assert_eq!(bench.decide(&hashes(1, 4), &[], None).worker, worker(2));
    let receipt = &bench.desk.explain(RequestId(1))[0];
    assert_eq!((receipt.policy.as_str(), receipt.candidates[0].terms[0].1), ("composed", 2.0));
}

#[test]
fn softmin_draws_the_cheaper_more_often() {
    let share = |temperature: f64| {
        let text = format!("scorers = ['load']\npicker = {{ name = 'softmin', temperature = {temperature} }}");
        let mut bench = Bench::of(read(&text).expect("reads").build().expect("a policy"), 2);
        let busy = Heard { at: bench.now, running: 1_000_000, ..Heard::default() };
        bench.desk.hear(&worker(1), Incarnation(1), busy);
        bench.counts(400, |at| hashes(at as u128, 1))
    };
    assert_eq!(share(0.0), [400, 0]);
    // Of two that lie one temperature apart, the dearer one gets 1 / (1 + e) = 27 %.
    let counts = share(1.0);
    assert!((80..=140).contains(&counts[1]), "{counts:?}");
    assert!(share(100.0)[1] > 150);
}

#[test]
fn a_hard_session_never_moves_while_its_worker_lives() {
    let hard = "scorers = [{ name = 'session', hard = true }]";
    let mut bench = Bench::of(read(hard).expect("reads").build().expect("a policy"), 4);
    let first = bench.decide(&hashes(1, 4), &[], Some("s")).worker;
    for _ in 0..50 {
        assert_eq!(bench.decide(&hashes(2, 4), &[], Some("s")).worker, first);
    }
    bench.desk.vacate(&first);
    assert_ne!(bench.decide(&hashes(2, 4), &[], Some("s")).worker, first);
}
