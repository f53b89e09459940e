//! Faults of a simulated engine on command: what a real one does on its worst days.
//!
//! A [`FaultSwitch`] is shared by a worker and whoever commands it; the [`Faulty`] engine looks at it in each step. Called by the
//! worker's engine thread. It waits, which other engines never do: a fault that hangs is one that does not come back.
//! Bounds: one fault at a time; a crash is one crash.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use starling_ids::{BlockHash, TokenId};
use starling_kv::events::KvEvent;
use thiserror::Error;

use crate::contract::{
    Engine, EngineError, ExportedBlock, FinishReason, SampledToken, SequenceDelta, SequenceId, SequenceRequest,
    StepOutput, SubmitError,
};

/// How many times as long a step may be made to take.
pub const SLOW_MAX: f64 = 1_000.0;

/// Tokens that it may be made to say.
pub const SAY_MAX: usize = 1_024;

/// What is wrong with an engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Its next step does not come back before there is another fault, or none.
    Hang,
    /// Its next step panics; then there is no fault any more.
    Crash,
    /// Its steps take so many times as long, above 1 and at most [`SLOW_MAX`].
    Slow(f64),
    /// It refuses every new sequence as if its queue were full.
    Reject,
    /// What it tells of its blocks is wrong: removals are kept to itself, and stores are told of blocks that nobody has.
    WrongEvents,
    /// Every answer is these tokens and then ends, whatever was asked: pieces of a character, a stop text in two halves. At
    /// least one and at most [`SAY_MAX`].
    Say(Vec<TokenId>),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Hang => f.write_str("hang"),
            Self::Crash => f.write_str("crash"),
            Self::Slow(factor) => write!(f, "slow={factor}"),
            Self::Reject => f.write_str("reject"),
            Self::WrongEvents => f.write_str("wrong-events"),
            Self::Say(tokens) => {
                let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                write!(f, "say={}", tokens.join(","))
            }
        }
    }
}

/// Text that names no fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no fault; write none, hang, crash, slow=FACTOR with a factor above 1 and at most 1000, reject, wrong-events or \
     say=ID,ID with 1 to 1024 ids of tokens"
)]
pub struct NoFault(String);

impl FromStr for Fault {
    type Err = NoFault;

    fn from_str(text: &str) -> Result<Self, NoFault> {
        let wrong = || NoFault(text.to_owned());
        match text {
            "none" => Ok(Self::None),
            "hang" => Ok(Self::Hang),
            "crash" => Ok(Self::Crash),
            "reject" => Ok(Self::Reject),
            "wrong-events" => Ok(Self::WrongEvents),
            other if other.starts_with("say=") => {
                let tokens: Option<Vec<TokenId>> = other[4..].split(',').map(|id| id.trim().parse().ok()).collect();
                tokens.and_then(|tokens| Self::Say(tokens).checked()).ok_or_else(wrong)
            }
            other => {
                let factor: f64 = other.strip_prefix("slow=").and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
                Self::Slow(factor).checked().ok_or_else(wrong)
            }
        }
    }
}

impl Fault {
    /// The same, unless a number in it makes no sense.
    #[must_use]
    pub fn checked(self) -> Option<Self> {
        match self {
            // A factor that is no number fails both comparisons.
            Self::Slow(factor) if !(factor > 1.0 && factor <= SLOW_MAX) => None,
            Self::Say(tokens) if !(1..=SAY_MAX).contains(&tokens.len()) => None,
            sound => Some(sound),
        }
    }
}

/// Sets the fault of one engine, also of its later lives. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct FaultSwitch(Arc<(Mutex<Fault>, Condvar)>);

impl FaultSwitch {
    /// From now on this is wrong; what was before.
    pub fn set(&self, fault: Fault) -> Fault {
        let before = std::mem::replace(&mut *self.lock(), fault);
        self.0.1.notify_all();
        before
    }

    /// What is wrong now.
    #[must_use]
    pub fn now(&self) -> Fault {
        self.lock().clone()
    }

    /// The fault for a step: waits while it is to hang.
    fn for_step(&self) -> Fault {
        let mut fault = self.lock();
        while *fault == Fault::Hang {
            fault = self.0.1.wait_timeout(fault, Duration::from_secs(1)).unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = fault.clone();
        if now == Fault::Crash {
            *fault = Fault::None;
        }
        now
    }

    fn lock(&self) -> MutexGuard<'_, Fault> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine that does wrong what its switch says; else it is the one inside.
pub struct Faulty {
    inner: Box<dyn Engine>,
    switch: FaultSwitch,
    /// How many tokens of what they are made to say answers have said.
    said: HashMap<SequenceId, usize>,
}

impl Faulty {
    /// Puts an engine under a switch.
    #[must_use]
    pub fn new(inner: Box<dyn Engine>, switch: FaultSwitch) -> Self {
        Self { inner, switch, said: HashMap::new() }
    }

    /// Puts other tokens in the place of those that were sampled, and ends answers that have said all of them.
    fn say(&mut self, tokens: &[TokenId], deltas: &mut [SequenceDelta]) {
        for delta in deltas {
            let said = self.said.entry(delta.id).or_default();
            delta.tokens.truncate(tokens.len().saturating_sub(*said));
            for (sampled, id) in delta.tokens.iter_mut().zip(&tokens[(*said).min(tokens.len())..]) {
                *sampled = SampledToken { id: *id, logprob: sampled.logprob, top: Vec::new() };
            }
            *said += delta.tokens.len();
            let whole = *said >= tokens.len();
            if whole && delta.finish.is_none() {
                delta.finish = Some(FinishReason::Length);
                self.inner.cancel(delta.id);
            }
            if delta.finish.is_some() {
                self.said.remove(&delta.id);
            }
        }
    }

    fn told(&self, events: Vec<KvEvent>) -> Vec<KvEvent> {
        if self.switch.now() == Fault::WrongEvents { events.into_iter().filter_map(wrong).collect() } else { events }
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({})", self.switch.now())
    }
}

/// What is told instead of an event.
fn wrong(event: KvEvent) -> Option<KvEvent> {
    match event {
        KvEvent::Stored { parent, blocks } => {
            let blocks = blocks.into_iter().map(|hash| BlockHash(hash.0 ^ 1)).collect();
            Some(KvEvent::Stored { parent, blocks })
        }
        KvEvent::Removed { .. } => None,
        other => Some(other),
    }
}

impl Engine for Faulty {
    crate::hand_on! {
        capabilities load inventory export_block memory lend give_back reserve adopt lend_live hand_over take_over
        open_tiers tier_inventory tier_stats tier_reader close
    }

    fn submit(&mut self, request: SequenceRequest) -> Result<(), SubmitError> {
        if self.switch.now() == Fault::Reject {
            let waiting = self.inner.load().waiting as usize;
            return Err(SubmitError::Full { waiting, limit: waiting });
        }
        self.inner.submit(request)
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        self.said.remove(&id);
        self.inner.cancel(id)
    }

    fn step(&mut self) -> Result<StepOutput, EngineError> {
        let fault = self.switch.for_step();
        assert!(fault != Fault::Crash, "a crash was commanded");
        let mut output = self.inner.step()?;
        output.events = self.told(output.events);
        if let Fault::Slow(factor) = fault {
            output.takes = output.takes.mul_f64(factor);
        }
        match &fault {
            Fault::Say(tokens) => self.say(tokens, &mut output.deltas),
            _ => self.said.clear(),
        }
        Ok(output)
    }

    fn import_block(&mut self, block: &ExportedBlock) -> Result<Vec<KvEvent>, EngineError> {
        let events = self.inner.import_block(block)?;
        Ok(self.told(events))
    }

    fn take_events(&mut self) -> Vec<KvEvent> {
        let events = self.inner.take_events();
        self.told(events)
    }

    fn clear_cache(&mut self) -> Vec<KvEvent> {
        let events = self.inner.clear_cache();
        self.told(events)
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::ModelId;

    use super::*;
    use crate::{
        contract::{SamplingParams, StopParams},
        loader::{LoadedModel, ModelOptions},
        simulated::SimulatedModel,
    };

    fn faulty() -> (Faulty, FaultSwitch, SimulatedModel) {
        let served_name = Some(ModelId::new("faulty").expect("name"));
        let options = ModelOptions { served_name, ..super::super::tests::options() };
        let model = SimulatedModel::load(&options).expect("loads");
        let switch = FaultSwitch::default();
        (Faulty::new(model.engine(), switch.clone()), switch, model)
    }

    fn request(model: &SimulatedModel) -> SequenceRequest {
        SequenceRequest {
            id: SequenceId(1),
            prompt: (0..64).map(|at| 40 + at % 50).collect(),
            answered: 0,
            hash_seed: model.card().hash_seed,
            sampling: SamplingParams::greedy(),
            stop: StopParams { tokens_max: 4, tokens_min: 0, token_ids: Vec::new(), ignore_eos: true },
            logprobs: None,
            priority: 0,
        }
    }

    #[test]
    fn faults_are_written_as_they_are_read() {
        let say = Fault::Say(vec![7, 8, 9]);
        let all = [Fault::None, Fault::Hang, Fault::Crash, Fault::Slow(2.5), Fault::Reject, Fault::WrongEvents, say];
        for fault in all {
            assert_eq!(fault.to_string().parse(), Ok(fault));
        }
        for text in
            ["", "slow", "slow=", "slow=1", "slow=NaN", "slow=1001", "slow=-3", "Hang", "explode", "say=", "say=1,x"]
        {
            let error = text.parse::<Fault>().expect_err(text);
            assert!(error.to_string().contains("write none, hang"), "{error}");
        }
        assert_eq!((Fault::Slow(f64::INFINITY).checked(), Fault::Hang.checked()), (None, Some(Fault::Hang)));
    }

    #[test]
    fn a_slow_one_takes_longer_and_a_rejecting_one_takes_nothing() {
        let (mut engine, switch, model) = faulty();
        engine.submit(request(&model)).expect("taken");
        let usual = engine.step().expect("steps").takes;
        engine.cancel(SequenceId(1));
        engine.clear_cache();
        switch.set(Fault::Slow(3.0));
        engine.submit(request(&model)).expect("taken");
        assert_eq!(engine.step().expect("steps").takes, usual.mul_f64(3.0));
        assert_eq!(switch.set(Fault::Reject), Fault::Slow(3.0));
        assert!(matches!(engine.submit(request(&model)), Err(SubmitError::Full { .. })));
    }

    #[test]
    fn an_answer_is_what_it_is_made_to_say() {
        let (mut engine, switch, model) = faulty();
        switch.set("say=201, 5,5".parse().expect("a fault"));
        for id in [1, 2] {
            let stop = StopParams { tokens_max: 40, ..request(&model).stop };
            engine.submit(SequenceRequest { id: SequenceId(id), stop, ..request(&model) }).expect("taken");
        }
        let (mut said, mut ends) = (HashMap::<u64, Vec<TokenId>>::new(), 0);
        loop {
            let output = engine.step().expect("steps");
            for delta in output.deltas {
                said.entry(delta.id.0).or_default().extend(delta.tokens.iter().map(|token| token.id));
                ends += usize::from(delta.finish == Some(FinishReason::Length));
            }
            if output.idle {
                break;
            }
        }
        assert_eq!((ends, &said[&1], &said[&2]), (2, &vec![201, 5, 5], &vec![201, 5, 5]));
        assert!(engine.said.is_empty() && engine.load().running == 0);
    }

    #[test]
    fn wrong_events_name_blocks_that_the_inventory_does_not() {
        let (mut engine, switch, model) = faulty();
        switch.set(Fault::WrongEvents);
        engine.submit(request(&model)).expect("taken");
        let mut told = Vec::new();
        while !engine
            .step()
            .map(|output| {
                told.extend(output.events);
                output.idle
            })
            .expect("steps")
        {}
        let held: Vec<BlockHash> = engine.inventory().into_iter().map(|(_, hash)| hash).collect();
        let stored = told.iter().filter_map(|event| match event {
            KvEvent::Stored { blocks, .. } => Some(blocks.clone()),
            _ => None,
        });
        let stored: Vec<BlockHash> = stored.flatten().collect();
        assert!(!held.is_empty() && !stored.is_empty() && stored.iter().all(|hash| !held.contains(hash)));
        engine.clear_cache();
    }

    #[test]
    fn a_crash_is_one_crash_and_a_hang_ends_when_it_is_told_to() {
        let (mut engine, switch, model) = faulty();
        switch.set(Fault::Crash);
        let crashed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(engine.step())));
        assert!(crashed.is_err() && switch.now() == Fault::None);
        engine.submit(request(&model)).expect("taken");
        switch.set(Fault::Hang);
        let stepping = std::thread::spawn(move || engine.step().map(|output| output.idle));
        assert_eq!(switch.now(), Fault::Hang);
        switch.set(Fault::None);
        assert!(!stepping.join().expect("it comes back").expect("steps"));
    }
}
