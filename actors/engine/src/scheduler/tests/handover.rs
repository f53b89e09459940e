//! Sequences that go from one scheduler to another, with the memory of their blocks copied between the two.

use super::*;

/// One sequence on its way.
struct Mover {
    id: SequenceId,
    /// Blocks lent so far, by their place in the memory they come from.
    lent: Vec<BlockSlot>,
}

impl Mover {
    /// Lends what is full by now, while the sequence goes on.
    fn lend(&mut self, from: &mut Harness) {
        self.lent.extend(from.scheduler.lend_live(self.id, self.lent.len()).unwrap_or_default());
        from.scheduler.check().expect("nothing is lost");
    }

    /// Ends it there and goes on here; false when it had ended there.
    fn hand_over(mut self, from: &mut Harness, to: &mut Harness, original: &SequenceRequest) -> bool {
        let Some(left) = from.scheduler.hand_over(self.id, self.lent.len()) else {
            from.scheduler.give_back(&self.lent);
            return false;
        };
        self.lent.extend(left.slots);
        from.scheduler.check().expect("nothing is lost");
        let answered = (left.tokens.len() - original.prompt.len()) as u32;
        let mut stop = original.stop.clone();
        stop.tokens_max -= answered;
        let request = SequenceRequest { prompt: left.tokens.as_slice().into(), answered, stop, ..original.clone() };
        let full = left.tokens.len() / BLOCK;
        let hashes = starling_kv::hash::block_hashes(request.hash_seed, &left.tokens, BLOCK);
        let here = to.scheduler.lend(&hashes[..full.min(self.lent.len())], &left.tokens, 0);
        let came = to.scheduler.reserve(self.lent.len() - here.len()).unwrap_or_default();
        for (source, target) in self.lent[here.len()..].iter().zip(&came) {
            let (source, target) = (source.0 as usize * BLOCK, target.0 as usize * BLOCK);
            to.memory[target..target + BLOCK].copy_from_slice(&from.memory[source..source + BLOCK]);
        }
        from.scheduler.give_back(&self.lent);
        let carried = Carried { here, came, computed: left.computed };
        to.scheduler.take_over(&request, carried).expect("taken");
        to.scheduler.check().expect("nothing is lost");
        true
    }
}

fn joined(from: &Harness, to: &Harness, id: SequenceId) -> Vec<TokenId> {
    [from, to].iter().flat_map(|harness| harness.answers.get(&id).cloned().unwrap_or_default()).collect()
}

#[test]
fn a_sequence_goes_on_elsewhere_and_nothing_is_computed_twice() {
    let (mut from, mut to) = (Harness::new(limits(4, 16, 32)), Harness::new(limits(4, 16, 32)));
    let prompt: Vec<TokenId> = (40..55).collect();
    let original = endless(&prompt, 20);
    from.scheduler.submit(&original).expect("room");
    let mut mover = Mover { id: original.id, lent: Vec::new() };
    for _ in 0..4 {
        from.step();
        mover.lend(&mut from);
    }
    assert_eq!(mover.lent.len(), 4, "18 computed tokens in blocks of 4");
    assert!(mover.hand_over(&mut from, &mut to, &original));
    from.run();
    assert_eq!((from.scheduler.guests(), to.scheduler.guests()), (0, 0));
    let before = from.computed;
    to.run();
    assert_eq!(joined(&from, &to, original.id), answer_past_eos(&prompt, 20));
    assert_eq!(before + to.computed, 15 + 19, "each token once, the last one never");
    assert_eq!(to.scheduler.load().tokens_recomputed, 0);
    assert_eq!(to.cached[&original.id], 18);
}

/// A request that an end token does not end.
fn endless(prompt: &[TokenId], tokens_max: u32) -> SequenceRequest {
    let plain = request(1, prompt, tokens_max);
    SequenceRequest { stop: StopParams { ignore_eos: true, ..plain.stop.clone() }, ..plain }
}

/// As `answer`, but it does not end with an end token.
fn answer_past_eos(prompt: &[TokenId], tokens_max: usize) -> Vec<TokenId> {
    let mut state = prompt.iter().fold(7, |state, token| digest(state, *token));
    let mut tokens = Vec::new();
    for _ in 0..tokens_max {
        tokens.push(token_after(state));
        state = digest(state, token_after(state));
    }
    tokens
}

#[test]
fn one_that_comes_to_a_full_batch_waits_and_one_that_cannot_come_leaves_nothing() {
    let (mut from, mut to) = (Harness::new(limits(4, 16, 32)), Harness::new(limits(1, 16, 32)));
    to.scheduler.submit(&request(7, &[3, 2, 1], 8)).expect("room");
    to.step();
    let original = endless(&(40..55).collect::<Vec<_>>(), 12);
    from.scheduler.submit(&original).expect("room");
    from.step();
    assert!(Mover { id: original.id, lent: Vec::new() }.hand_over(&mut from, &mut to, &original));
    assert_eq!(to.scheduler.load().waiting, 1);
    from.run();
    to.run();
    assert_eq!(joined(&from, &to, original.id), answer_past_eos(&original.prompt, 12));
    assert_eq!(to.cached[&original.id], 15, "it waited with its blocks, the partly filled one too");
    assert_eq!(to.scheduler.load().tokens_recomputed, 0);
    let here = to.scheduler.reserve(3).expect("room");
    let refused = to.scheduler.take_over(&request(2, &[], 4), Carried { came: here, ..Carried::default() });
    assert_eq!(refused, Err(SubmitError::Empty));
    to.scheduler.check().expect("nothing is lost");
    assert_eq!(to.scheduler.hand_over(SequenceId(99), 0), None);
}

#[test]
fn one_that_waits_with_its_blocks_gives_them_to_a_running_one_that_has_no_other() {
    let (mut from, mut to) = (Harness::new(limits(4, 16, 32)), Harness::new(limits(1, 16, 8)));
    let local = endless(&[3, 2, 1], 24);
    to.scheduler.submit(&SequenceRequest { id: SequenceId(7), ..local.clone() }).expect("room");
    to.step();
    let original = endless(&(40..55).collect::<Vec<_>>(), 8);
    from.scheduler.submit(&original).expect("room");
    from.step();
    assert!(Mover { id: original.id, lent: Vec::new() }.hand_over(&mut from, &mut to, &original));
    assert_eq!(to.scheduler.load().blocks_pinned, 1 + 4, "both hold theirs");
    to.run();
    assert_eq!(to.answers[&SequenceId(7)], answer_past_eos(&local.prompt, 24));
    assert_eq!(joined(&from, &to, original.id), answer_past_eos(&original.prompt, 8));
    assert_eq!(to.scheduler.preemptions(), 0, "nobody who runs lost a block");
}

#[test]
fn one_that_comes_to_a_full_batch_without_blocks_counts_as_cached_what_it_finds_when_its_turn_comes() {
    let mut to = Harness::new(limits(1, 16, 32));
    let prompt: Vec<TokenId> = (40..55).collect();
    to.scheduler.submit(&endless(&prompt, 2)).expect("room");
    to.run();
    let first = answer_past_eos(&prompt, 1)[0];
    let prompt_after: Vec<TokenId> = prompt.iter().copied().chain([first]).collect();
    for (at, strange) in [(0, false), (1, true)] {
        let local = SequenceRequest { id: SequenceId(70 + at), ..endless(&[3, 2, 1 + at as TokenId], 8) };
        to.scheduler.submit(&local).expect("room");
        to.step();
        // What it carries is nothing, or pins of another chain: no block is its own either way.
        let other: Vec<TokenId> = prompt[..4].to_vec();
        let hashes = starling_kv::hash::block_hashes(HashSeed(1), &other, BLOCK);
        let here = if strange { to.scheduler.lend(&hashes, &other, 0) } else { Vec::new() };
        let different: Vec<TokenId> = (60..75).collect();
        let (tokens, cached) = if strange { (&different, 0) } else { (&prompt_after, 12) };
        assert_eq!(here.len(), usize::from(strange));
        let moved = SequenceRequest { id: SequenceId(20 + at), answered: 1, ..endless(tokens, 4) };
        let before = to.scheduler.load();
        to.scheduler.take_over(&moved, Carried { here, ..Carried::default() }).expect("taken");
        assert_eq!((to.scheduler.load().waiting, to.scheduler.guests()), (1, 0));
        to.run();
        let after = to.scheduler.load();
        assert_eq!(to.answers[&moved.id], answer_past_eos(tokens, 4));
        assert_eq!(to.cached[&moved.id], cached, "found when its turn came");
        assert_eq!(after.tokens_cached - before.tokens_cached, u64::from(cached));
        let recomputed = after.tokens_recomputed - before.tokens_recomputed;
        assert_eq!(recomputed, tokens.len() as u64 - 1 - u64::from(cached), "what was not there is computed again");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever is lent and handed over when, under preemption and sharing: every answer is whole, every block comes back.
    #[test]
    fn answers_are_whole_and_blocks_come_back(
        jobs in proptest::collection::vec((1usize..20, 0u32..3, 1u32..24, 0usize..30, any::<bool>()), 1..6),
        batch in 1u32..4,
        blocks in 20u32..40,
    ) {
        let mut from = Harness::new(limits(4, 16, blocks));
        let mut to = Harness::new(limits(batch, 16, blocks));
        let prompts = jobs.iter().map(|(len, kind, tokens, ..)| {
            let prompt: Vec<TokenId> = (0..*len as u32).map(|at| 1 + (kind * 7 + at * (1 + kind)) % 90).collect();
            (prompt, *tokens)
        });
        let requests: Vec<SequenceRequest> =
            (0..).zip(prompts).map(|(id, (prompt, tokens))| request(id, &prompt, tokens)).collect();
        for request in &requests {
            prop_assert!(from.scheduler.submit(request).is_ok());
        }
        let mut movers: Vec<Option<Mover>> =
            requests.iter().map(|request| Some(Mover { id: request.id, lent: Vec::new() })).collect();
        for step in 0..40 {
            if !from.scheduler.is_idle() {
                from.step();
            }
            if !to.scheduler.is_idle() {
                to.step();
            }
            for (at, (.., when, early)) in jobs.iter().enumerate() {
                match &mut movers[at] {
                    Some(mover) if *early && step < *when => mover.lend(&mut from),
                    Some(_) if step == *when => {
                        let mover = movers[at].take().expect("there");
                        mover.hand_over(&mut from, &mut to, &requests[at]);
                    }
                    _ => {}
                }
            }
        }
        from.run();
        to.run();
        prop_assert_eq!((from.scheduler.guests(), to.scheduler.guests()), (0, 0));
        for request in &requests {
            let wanted = answer(&request.prompt, request.stop.tokens_max as usize);
            prop_assert_eq!(joined(&from, &to, request.id), wanted);
        }
    }
}
