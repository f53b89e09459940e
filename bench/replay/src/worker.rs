//! One engine on the virtual clock: the product's scheduler and block pool over a timing model.
//!
//! Called by the cluster. Never: looks at the real clock.

use std::time::Duration;

use starling_actors::{
    report::LoadReport,
    worker::rates::{RateBook, StepFacts},
};
use starling_engine::{
    Engine, EngineError, EngineLoad, SequenceId, SequenceRequest, StepOutput, SubmitError, core::CoreEngine,
    simulated::SimBackend,
};
use starling_ids::{Incarnation, WorkerId};

/// A worker that has told nothing for this long tells again.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// See the module.
#[derive(Debug)]
pub struct SimWorker {
    /// Who.
    pub id: WorkerId,
    /// In which life.
    pub incarnation: Incarnation,
    /// What it runs.
    pub engine: CoreEngine<SimBackend>,
    /// A step is under way; its end is an event.
    pub stepping: Option<StepOutput>,
    /// When the step under way ends.
    pub until: Duration,
    /// Time spent in steps.
    pub busy: Duration,
    rates: RateBook,
    told: Option<(Duration, LoadReport)>,
    admitted: u64,
    /// Taken, and not in the batch yet.
    queued: Vec<SequenceId>,
    /// Prompt tokens of the step under way: not computed before it ends.
    computing: u64,
}

impl SimWorker {
    /// An idle worker.
    #[must_use]
    pub fn new(id: WorkerId, engine: CoreEngine<SimBackend>) -> Self {
        Self {
            id,
            incarnation: Incarnation(1),
            engine,
            stepping: None,
            until: Duration::ZERO,
            busy: Duration::ZERO,
            rates: RateBook::default(),
            told: None,
            admitted: 0,
            queued: Vec::new(),
            computing: 0,
        }
    }

    /// Takes a request; its number among those taken.
    ///
    /// # Errors
    /// As the engine.
    pub fn submit(&mut self, sequence: SequenceRequest) -> Result<u64, SubmitError> {
        let id = sequence.id;
        self.engine.submit(sequence)?;
        self.admitted += 1;
        self.queued.push(id);
        Ok(self.admitted)
    }

    /// Begins a step if none is under way: how long it takes, and who came into the batch.
    ///
    /// # Errors
    /// As the engine.
    pub fn begin(&mut self, now: Duration) -> Result<Option<(Duration, Vec<SequenceId>)>, EngineError> {
        if self.stepping.is_some() {
            return Ok(None);
        }
        let before = self.engine.load();
        let output = self.engine.step()?;
        if output.idle {
            return Ok(None);
        }
        let after = self.engine.load();
        let takes = output.takes;
        self.busy += takes;
        self.until = now + takes;
        self.computing = after.tokens_prefilled - before.tokens_prefilled;
        self.rates.learn(StepFacts {
            took: takes,
            prefilled: after.tokens_prefilled - before.tokens_prefilled,
            sampled: after.tokens_generated - before.tokens_generated,
        });
        self.stepping = Some(output);
        let scheduler = self.engine.scheduler();
        let begun = |id: &SequenceId| scheduler.sequence(*id).is_none_or(|sequence| !sequence.blocks().is_empty());
        let started: Vec<SequenceId> = self.queued.extract_if(.., |id| begun(id)).collect();
        Ok(Some((takes, started)))
    }

    /// What the step under way gives when it has ended.
    pub fn end_step(&mut self) -> Option<StepOutput> {
        self.computing = 0;
        self.stepping.take()
    }

    /// Its account. The engine computes a step before its time has passed; whoever asks meanwhile hears what a real one
    /// would say, that the step's prompt tokens are still to come.
    #[must_use]
    pub fn load(&self) -> EngineLoad {
        let load = self.engine.load();
        EngineLoad { prefill_tokens: load.prefill_tokens + self.computing, ..load }
    }

    /// What it tells routers now, if it is time to.
    pub fn report(&mut self, now: Duration) -> Option<LoadReport> {
        let report = LoadReport {
            worker: self.id.clone(),
            incarnation: self.incarnation,
            draining: false,
            load: self.load(),
            rates: self.rates.rates(),
            turn_age_ms: 0,
            admitted: self.admitted,
            link: starling_actors::route::split::KvLink::default(),
            tiers: None,
        };
        let due = self.told.as_ref().is_none_or(|(at, told)| now >= *at + HEARTBEAT || report.differs_much(told));
        if !due {
            return None;
        }
        self.told = Some((now, report.clone()));
        Some(report)
    }
}
