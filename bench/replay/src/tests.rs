use std::{io::Write, time::Duration};

use starling_actors::route::policy::PolicyName;

use super::{
    cluster::{Cluster, Run},
    plot::svg,
    report::{Slo, Summary, summary},
    setup::{Faults, Setup},
    sweep::{Pace, Sweep},
    trace::{Asked, Piece, mooncake, seen_before},
    workload::{Agents, Sessions, agents, sessions},
};

fn small() -> Setup {
    Setup { workers: 4, gateways: 2, blocks: 4_096, sequences: 64, step_tokens: 2_048, ..Setup::default() }
}

fn talk(count: usize, rate: f64) -> Vec<Asked> {
    let what = Sessions { count, rate, system: 256, first: 512, answer: 24, question: 48, ..Sessions::default() };
    sessions(&Sessions { think: Duration::from_secs(1), turns: 3.0, ..what }, 7)
}

fn run(setup: &Setup, asked: &[Asked]) -> Run {
    Cluster::new(setup, asked).expect("a cluster").run(|_, _| {}).expect("runs")
}

fn figures(setup: &Setup, asked: &[Asked]) -> Summary {
    summary(&run(setup, asked), setup, &seen_before(asked), Slo::default())
}

#[test]
fn a_seed_gives_the_same_run_and_another_one_does_not() {
    let asked = talk(60, 20.0);
    let outcome = |seed| {
        let run = run(&Setup { seed, ..small() }, &asked);
        run.served.iter().map(|one| (one.worker, one.ttft, one.e2e)).collect::<Vec<_>>()
    };
    assert_eq!(outcome(1), outcome(1));
    assert_ne!(outcome(1), outcome(2));
    assert_eq!(sessions(&Sessions::default(), 3), sessions(&Sessions::default(), 3));
}

#[test]
fn every_turn_goes_on_from_the_answer_before_it() {
    let asked = talk(40, 10.0);
    let figures = figures(&small(), &asked);
    assert_eq!((figures.requests, figures.failed), (asked.len(), 0));
    assert!(figures.follow_up_share > 0.97 * figures.follow_up_ideal, "{figures:?}");
    assert!(figures.follow_up_share <= figures.follow_up_ideal + 0.01, "{figures:?}");
}

#[test]
fn agents_branch_and_meet_again() {
    let what = Agents { count: 6, rate: 2.0, system: 512, result: 64, answer: 16, ..Agents::default() };
    let asked = agents(&what, 5);
    let joined = asked.iter().filter(|one| one.after.len() == 1 + what.branches as usize).count();
    assert_eq!(joined, what.count);
    let figures = figures(&small(), &asked);
    assert_eq!((figures.requests, figures.failed), (asked.len(), 0));
    assert!(figures.hit_rate > 0.7, "{figures:?}");
}

/// BAL-07 with eight gateways.
#[test]
fn bal_07_eight_gateways_at_a_barrier_spread_evenly() {
    let piece = |id| vec![Piece { id, tokens: 640 }];
    let one = |id| Asked { prompt: 640, answer: 8, pieces: piece(id), ..Asked::default() };
    let asked: Vec<Asked> = (0..64).map(one).collect();
    for seed in 1..=5 {
        let run = run(&Setup { gateways: 8, seed, ..small() }, &asked);
        let mut given = [0u32; 4];
        run.served.iter().for_each(|one| given[one.worker] += 1);
        let (least, most) = (given.iter().min().expect("four"), given.iter().max().expect("four"));
        assert!(most - least <= 2, "{given:?}");
    }
}

/// As loaded as in the measurement with 240 workers: follow-ups stay where their conversation is cached, and still all have as
/// much to do, whether one gateway asks or eight.
#[test]
fn bal_conversations_keep_their_workers_however_many_gateways_ask() {
    let asked = sessions(&Sessions { count: 200, rate: 10.0, ..Sessions::default() }, 1);
    let of = |gateways| figures(&Setup { workers: 4, gateways, blocks: 16_384, ..Setup::default() }, &asked);
    let (one, eight) = (of(1), of(8));
    for figures in [&one, &eight] {
        assert_eq!((figures.requests, figures.failed, figures.fallbacks), (asked.len(), 0, 0));
        assert!(figures.follow_up_share > figures.follow_up_ideal - 0.02, "{figures:?}");
        assert!(figures.request_cov < 0.1 && figures.load_cov < 0.12, "{figures:?}");
    }
    assert!((one.follow_up_share - eight.follow_up_share).abs() < 0.01, "{one:?} {eight:?}");
}

#[test]
fn a_killed_owner_and_a_frozen_gateway_fail_no_request() {
    let asked = talk(300, 20.0);
    let calm = figures(&Setup { gateways: 4, ..small() }, &asked);
    assert_eq!(calm.fallbacks, 0);
    let faults = Faults {
        kill_owner: Some(Duration::from_secs(5)),
        freeze_gateway: Some((Duration::from_secs(7), Duration::from_secs(6))),
    };
    let hurt = figures(&Setup { gateways: 4, faults, ..small() }, &asked);
    assert_eq!((hurt.requests, hurt.failed), (asked.len(), 0));
    assert!(hurt.fallbacks > 0, "gateways chose by themselves meanwhile");
    assert!((hurt.fallbacks as f64) < 0.2 * asked.len() as f64, "{hurt:?}");
    assert!(hurt.follow_up_share > calm.follow_up_share - 0.1, "{} {}", hurt.follow_up_share, calm.follow_up_share);
    assert!(hurt.ttft.p99 > calm.ttft.p99, "those that came to the frozen gateway waited");
}

#[test]
fn faults_and_prompts_that_cannot_be_are_refused() {
    let refused = |setup: &Setup, asked: &[Asked]| Cluster::new(setup, asked).err().expect("refused").to_string();
    let faults = Faults { kill_owner: Some(Duration::from_secs(1)), ..Faults::default() };
    assert!(refused(&Setup { gateways: 1, faults, ..small() }, &talk(1, 1.0)).contains("two gateways"));
    let long = Asked { prompt: 100_000, answer: 1, pieces: vec![Piece { id: 1, tokens: 100_000 }], ..Asked::default() };
    assert!(refused(&small(), &[long]).contains("request 1 needs 6251 KV blocks"));
}

#[test]
fn a_trace_is_read_and_its_faults_are_named() {
    let mut file = std::env::temp_dir();
    file.push(format!("starling-trace-{}.jsonl", std::process::id()));
    let write = |text: &str| std::fs::File::create(&file).expect("a file").write_all(text.as_bytes()).expect("written");
    let line = |at, length, ids: &str| {
        format!("{{\"timestamp\":{at},\"input_length\":{length},\"output_length\":5,\"hash_ids\":[{ids}]}}\n")
    };
    write(&(line(0, 700, "1,2") + &line(0, 1_030, "1,3,4") + "\n" + &line(1_000, 2_000, "9")));
    let asked = mooncake(&file).expect("read");
    assert_eq!(asked.iter().map(|one| one.at.as_millis()).collect::<Vec<_>>(), [0, 500, 1_000]);
    assert_eq!(asked[1].pieces.iter().map(|piece| piece.tokens).collect::<Vec<_>>(), [512, 512, 6]);
    assert_eq!(asked[2].pieces.len(), 2, "what no id stands for is its own");
    assert_eq!(seen_before(&asked), [0, 512, 0]);
    write(&(line(0, 700, "1,2") + "{\"timestamp\":1}\n"));
    let error = mooncake(&file).expect_err("refused").to_string();
    assert!(error.contains("line 2") && error.contains("input_length"), "{error}");
    write(&line(0, 0, ""));
    assert!(mooncake(&file).expect_err("refused").to_string().contains("input_length 0"));
    write("\n");
    assert!(mooncake(&file).expect_err("refused").to_string().contains("no requests"));
    std::fs::remove_file(&file).expect("removed");
}

#[test]
fn a_sweep_has_a_point_for_each_run_and_a_picture() {
    let asked = talk(40, 10.0);
    let sweep = Sweep::new(&asked, small(), Slo::default());
    let mut points = Vec::new();
    for policy in [PolicyName::Starling, PolicyName::RoundRobin] {
        for speedup in [1.0, 4.0] {
            points.push(sweep.run(policy, Pace::Speedup(speedup), 0.0, |_, _| {}).expect("runs"));
        }
    }
    points.push(sweep.run(PolicyName::Starling, Pace::Closed(8), 0.0, |_, _| {}).expect("runs"));
    assert!(points.iter().all(|point| point.summary.failed == 0 && point.rate > 0.0));
    let picture = svg(&points, "a <small> cluster");
    assert!(picture.contains("&lt;small&gt;") && picture.contains("round-robin") && picture.ends_with("</svg>\n"));
    assert!(!picture.contains("NaN") && !picture.contains("inf"));
}

/// Documents that many ask about, faster than two engines can answer.
fn crowd() -> Vec<Asked> {
    let ask = |at: u64| {
        let document = Piece { id: at * 7 % 40, tokens: 2_048 };
        let own = Piece { id: 1_000 + at, tokens: 32 };
        let at = Duration::from_millis(at * 12);
        Asked { at, prompt: 2_080, answer: 40, pieces: vec![document, own], after: Vec::new() }
    };
    (0..400).map(ask).collect()
}

fn crowded() -> Setup {
    Setup { workers: 2, gateways: 3, blocks: 1_536, sequences: 64, step_tokens: 2_048, ..Setup::default() }
}

#[test]
fn in_an_overload_requests_that_wait_unbound_find_more_in_the_caches() {
    let (asked, late) = (crowd(), crowded());
    let early = Setup { queue: None, ..late.clone() };
    let waited = run(&late, &asked).waited;
    let (late, early) = (figures(&late, &asked), figures(&early, &asked));
    assert_eq!((late.failed, early.failed), (0, 0));
    assert!(waited > 100, "{waited}");
    assert!(late.hit_rate > early.hit_rate + 0.1, "{late:?} {early:?}");
    assert!(late.ttft.p50 < 0.9 * early.ttft.p50 && late.ttft.p99 < 0.9 * early.ttft.p99, "{late:?} {early:?}");
}

#[test]
fn who_waits_when_the_owner_of_the_shard_dies_is_served_all_the_same() {
    let asked = crowd();
    let faults = Faults { kill_owner: Some(Duration::from_secs(2)), ..Faults::default() };
    let run = run(&Setup { faults, ..crowded() }, &asked);
    assert_eq!((run.failed, run.served.len()), (0, asked.len()));
    assert!(run.waited > 50 && run.fallbacks > 50, "{} waited, {} fell back", run.waited, run.fallbacks);
}
