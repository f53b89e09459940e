//! What the router is asked about a request: at its beginning, and again when its answer has begun.
//!
//! Called by the generate loop and by the request's way. A request that goes on elsewhere brings prompt and answer along, so
//! the question counts both: their tokens are what the next worker computes, and their full blocks are what it may hold. Pure.

use starling_engine::ModelCard;
use starling_kv::hash::{HashSeed, block_hash, block_hashes};

use super::Call;
use crate::{
    generate::{GenerateSpec, RouteRequest},
    route::wishes::Wishes,
};

/// How the blocks of one request are hashed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hashing {
    seed: HashSeed,
    block_tokens: usize,
}

impl Hashing {
    pub(super) fn of(spec: &GenerateSpec, card: &ModelCard) -> Self {
        let seed = spec.hash_seed(card.hash_seed);
        Self { seed, block_tokens: (card.block_tokens as usize).max(1) }
    }

    /// The question about a request that has not begun.
    pub(super) fn question(self, call: &Call) -> RouteRequest {
        let spec = &call.spec;
        RouteRequest {
            request: call.request,
            model: spec.model.clone(),
            hashes: block_hashes(self.seed, &spec.prompt, self.block_tokens),
            prompt_tokens: tokens(spec.prompt.len()),
            answer_tokens_max: spec.choices.saturating_mul(spec.stop.tokens_max),
            exclude: Vec::new(),
            failed: Vec::new(),
            leaves: None,
            choices: spec.choices,
            session: call.session.clone(),
            may_wait: true,
            begun: false,
            weight: call.weight,
            wishes: Wishes { receipt: call.slip.is_some(), adapter: spec.adapter.clone(), ..call.wishes.clone() },
        }
    }

    /// Brings the question up to what the answers have said: the longest of those that go on stands for all. Nothing changes
    /// for a request without an answer.
    pub(super) fn go_on(self, ask: &mut RouteRequest, spec: &GenerateSpec) {
        let begun = (0..spec.choices).map(|choice| spec.begun(choice)).filter(|(_, wanted)| *wanted);
        let left = |said: usize| u64::from(spec.stop.tokens_max).saturating_sub(said as u64);
        let (wanted, budget) = begun.clone().fold((0, 0), |(n, sum), (said, _)| (n + 1, sum + left(said.len())));
        let Some((said, _)) = begun.max_by_key(|(said, _)| said.len()).filter(|(said, _)| !said.is_empty()) else {
            return;
        };
        // The prompt's own full blocks stay as they are, whichever answer was the longest the last time.
        ask.hashes.truncate(spec.prompt.len() / self.block_tokens);
        let rest = spec.prompt.get(ask.hashes.len() * self.block_tokens..).unwrap_or_default();
        let tail = [rest, said].concat();
        for block in tail.chunks_exact(self.block_tokens) {
            ask.hashes.push(block_hash(self.seed, ask.hashes.last().copied(), block));
        }
        ask.prompt_tokens = tokens(spec.prompt.len() + said.len());
        ask.answer_tokens_max = u32::try_from(budget).unwrap_or(u32::MAX);
        ask.choices = wanted;
    }
}

fn tokens(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use starling_ids::{ModelId, RequestId, TokenId};

    use super::*;
    use crate::{
        generate::SoFar,
        testing::{TestModel, spec},
    };

    fn asked(spec: &GenerateSpec, hashing: Hashing) -> RouteRequest {
        hashing.question(&Call {
            request: RequestId(1),
            spec: spec.clone(),
            time_left: std::time::Duration::from_secs(1),
            trace_parent: None,
            baggage: Default::default(),
            tenant: String::new(),
            priority: 0,
            weight: 1,
            budget: 0,
            session: None,
            wishes: Wishes::default(),
            slip: None,
        })
    }

    proptest! {
        /// Whatever came in how many pieces: the question is the one about a prompt that ends with the answer.
        #[test]
        fn a_resumed_question_counts_prompt_and_answer(
            prompt in prop::collection::vec(0u32..9_000, 1..90),
            pieces in prop::collection::vec(prop::collection::vec(0u32..9_000, 0..40), 1..4),
        ) {
            let card = TestModel::new().card;
            let mut begun = spec(prompt.clone(), 1_000);
            let hashing = Hashing::of(&begun, &card);
            let mut ask = asked(&begun, hashing);
            begun.so_far = vec![SoFar::default()];
            let mut said: Vec<TokenId> = Vec::new();
            for piece in pieces {
                said.extend(&piece);
                begun.so_far[0].tokens.extend(piece);
                hashing.go_on(&mut ask, &begun);
            }
            let whole = asked(&spec([prompt, said.clone()].concat(), 1_000 - said.len() as u32), hashing);
            prop_assert_eq!(ask, whole);
        }
    }

    #[test]
    fn of_many_answers_the_longest_that_goes_on_is_asked_about() {
        let card = TestModel::new().card;
        let mut begun =
            GenerateSpec { choices: 3, model: ModelId::new("test").expect("name"), ..spec(vec![7; 20], 100) };
        let hashing = Hashing::of(&begun, &card);
        let mut ask = asked(&begun, hashing);
        assert_eq!((ask.choices, ask.answer_tokens_max, ask.hashes.len()), (3, 300, 1));
        let said = |len: usize, ended| SoFar { tokens: vec![9; len], ended };
        begun.so_far = vec![said(90, true), said(13, false), said(2, false)];
        hashing.go_on(&mut ask, &begun);
        assert_eq!((ask.choices, ask.answer_tokens_max), (2, 87 + 98));
        assert_eq!((ask.prompt_tokens, ask.hashes.len()), (33, 2));
        // The other one is the longer now: nothing of the first is left.
        begun.so_far[1].ended = true;
        begun.so_far[2].tokens = vec![8; 40];
        hashing.go_on(&mut ask, &begun);
        assert_eq!((ask.prompt_tokens, ask.hashes.len(), ask.answer_tokens_max), (60, 3, 60));
        let whole = asked(&spec([vec![7; 20], vec![8; 40]].concat(), 60), hashing);
        assert_eq!(ask.hashes, whole.hashes);
    }
}
