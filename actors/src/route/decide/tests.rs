use starling_ids::NodeId;

use super::*;

fn worker(index: u16) -> WorkerId {
    WorkerId { node: NodeId::new("n").expect("name"), index }
}

fn candidates(count: u16) -> Vec<Candidate> {
    (0..count)
        .map(|index| Candidate {
            worker: worker(index),
            incarnation: Incarnation(1),
            hit_blocks: 0,
            sequences_max: 8,
            heard: None,
            doubtful: false,
        })
        .collect()
}

struct Asker {
    model: ModelId,
    prompt_tokens: u32,
    now: Duration,
}

impl Asker {
    fn new(prompt_tokens: u32) -> Self {
        Self { model: ModelId::new("m").expect("name"), prompt_tokens, now: Duration::ZERO }
    }

    fn ask(&self) -> Ask<'_> {
        Ask {
            request: RequestId(1),
            model: &self.model,
            prompt_tokens: self.prompt_tokens,
            block_tokens: 16,
            choices: 1,
            answer_tokens_max: 64,
            exclude: &[],
            failed: &[],
        }
    }

    fn once(&mut self, decider: &mut Decider, candidates: &[Candidate]) -> Decision {
        self.now += Duration::from_millis(1);
        decider.decide(&self.ask(), candidates, self.now).expect("a worker")
    }
}

fn counts(decisions: &[Decision], workers: u16) -> Vec<usize> {
    (0..workers).map(|index| decisions.iter().filter(|d| d.key.worker.index == index).count()).collect()
}

fn heard(at_ms: u64, sequences: u32) -> Option<Heard> {
    let at = Duration::from_millis(at_ms);
    Some(Heard { at, sequences, prefill_tokens: 0, rates: None })
}

#[test]
fn bal_02_own_choices_count_between_two_reports() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(32);
    let mut two = candidates(2);
    two[0].heard = heard(0, 0);
    two[1].heard = heard(0, 1);
    let decisions: Vec<_> = (0..8).map(|_| asker.once(&mut decider, &two)).collect();
    assert!(counts(&decisions, 2).iter().all(|count| (3..=5).contains(count)), "{:?}", counts(&decisions, 2));
}

#[test]
fn bal_03_paced_distinct_prompts_go_to_every_worker() {
    for seed in 0..8 {
        let mut decider = Decider::new(seed);
        let mut asker = Asker::new(300);
        let mut decisions = Vec::new();
        for _ in 0..200 {
            let decision = asker.once(&mut decider, &candidates(4));
            assert!(decider.release(&decision.key));
            decisions.push(decision);
        }
        assert!(counts(&decisions, 4).iter().all(|count| (30..=70).contains(count)), "{:?}", counts(&decisions, 4));
    }
}

#[test]
fn bal_06_a_short_shared_prefix_leaves_no_worker_idle() {
    let mut decider = Decider::new(3);
    let mut asker = Asker::new(120);
    let mut five = candidates(5);
    five[2].hit_blocks = 1;
    let decisions: Vec<_> = (0..500).map(|_| asker.once(&mut decider, &five)).collect();
    assert!(counts(&decisions, 5).iter().all(|count| *count >= 50), "{:?}", counts(&decisions, 5));
}

#[test]
fn bal_07_choice_and_count_are_one_step() {
    let mut decider = Decider::new(5);
    let mut asker = Asker::new(500);
    let decisions: Vec<_> = (0..64).map(|_| asker.once(&mut decider, &candidates(4))).collect();
    assert!(counts(&decisions, 4).iter().all(|count| (15..=17).contains(count)), "{:?}", counts(&decisions, 4));
    assert_eq!(decider.reservations(), 64);
    for decision in &decisions {
        assert!(decider.release(&decision.key));
    }
    assert_eq!(decider.reservations(), 0);
}

#[test]
fn the_holder_of_a_prefix_gets_it_unless_it_is_busy() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(1_500);
    let mut two = candidates(2);
    two[1].hit_blocks = 93;
    for _ in 0..3 {
        let decision = asker.once(&mut decider, &two);
        assert_eq!((decision.key.worker.index, decision.hit_blocks), (1, 93));
        decider.release(&decision.key);
    }
    two[1].heard = heard(10_000, 24);
    assert_eq!(asker.once(&mut decider, &two).key.worker.index, 0, "24 sequences on 8 places outweigh the prefix");
}

#[test]
fn cnt_03_a_restarted_worker_begins_at_zero_and_stays_even() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(100);
    let mut two = candidates(2);
    let old: Vec<_> = (0..4).map(|_| asker.once(&mut decider, &two)).collect();
    two[0].incarnation = Incarnation(2);
    let mut fresh = Vec::new();
    for _ in 0..20 {
        fresh.push(asker.once(&mut decider, &two));
        // The old life's requests end late and one by one.
        if let Some(late) = old.get(fresh.len()) {
            decider.release(&late.key);
        }
    }
    let split = counts(&fresh, 2);
    assert!(split[0].abs_diff(split[1]) <= 4, "{split:?}");
}

#[test]
fn an_excluded_worker_is_never_chosen_and_nobody_left_is_none() {
    let mut decider = Decider::new(1);
    let asker = Asker::new(100);
    let (first, both) = ([worker(0)], [worker(0), worker(1)]);
    let two = candidates(2);
    let ask = Ask { exclude: &first, ..asker.ask() };
    assert_eq!(decider.decide(&ask, &two, Duration::ZERO).expect("the other").key.worker.index, 1);
    let ask = Ask { exclude: &both, ..asker.ask() };
    assert_eq!(decider.decide(&ask, &two, Duration::ZERO), None);
    assert_eq!(decider.reservations(), 1);
}

#[test]
fn ded_08_a_worker_that_failed_cools_for_others_and_comes_back() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(1_000);
    let mut two = candidates(2);
    two[0].hit_blocks = 60;
    let failed = [worker(0)];
    let ask = Ask { exclude: &failed, failed: &failed, ..asker.ask() };
    assert_eq!(decider.decide(&ask, &two, Duration::ZERO).expect("the other").key.worker.index, 1);
    assert_eq!(asker.once(&mut decider, &two).key.worker.index, 1, "cooling");
    asker.now = COOLING;
    assert_eq!(asker.once(&mut decider, &two).key.worker.index, 0, "cooled");
}

#[test]
fn a_doubtful_worker_is_better_than_none() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(100);
    let mut two = candidates(2);
    two[0].doubtful = true;
    two[0].hit_blocks = 6;
    assert_eq!(asker.once(&mut decider, &two).key.worker.index, 1);
    two.truncate(1);
    assert_eq!(asker.once(&mut decider, &two).key.worker.index, 0);
}

#[test]
fn a_worker_that_has_learned_nothing_is_judged_like_its_peers() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(300);
    let fast = |noise: f64| {
        let rates = Rates { prefill_ms_per_token: 0.02 * noise, decode_ms_per_sequence: 0.03 * noise, step_ms: 7.0 };
        Some(Heard { rates: Some(rates), ..heard(0, 0).expect("heard") })
    };
    let mut four = candidates(4);
    for (candidate, noise) in four.iter_mut().zip([0.8, 1.0, 1.2]) {
        candidate.heard = fast(noise);
    }
    let decisions: Vec<_> = (0..80).map(|_| asker.once(&mut decider, &four)).collect();
    assert!(counts(&decisions, 4).iter().all(|count| (19..=21).contains(count)), "{:?}", counts(&decisions, 4));
}

#[test]
fn every_decision_leaves_a_receipt() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(100);
    let decision = asker.once(&mut decider, &candidates(3));
    let receipts = decider.explain(RequestId(1));
    assert_eq!(receipts.len(), 1);
    assert_eq!(receipts[0].candidates.len(), 3);
    assert_eq!(receipts[0].near_equals, 3);
    assert_eq!(receipts[0].candidates[receipts[0].chosen].worker, decision.key.worker);
}

#[test]
fn memory_about_workers_is_bounded_under_churn() {
    let mut decider = Decider::new(1);
    let mut asker = Asker::new(100);
    for index in 0..2_000 {
        let mut one = candidates(1);
        one[0].worker = worker(index);
        let decision = asker.once(&mut decider, &one);
        decider.release(&decision.key);
    }
    assert!(decider.chosen_at.len() <= 128, "{}", decider.chosen_at.len());
}
