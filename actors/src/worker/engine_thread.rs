//! The thread that steps an engine: commands in between steps, deltas out after each.
//!
//! Owned by the worker actor, joined when its state is dropped. Owns the engine, the ledger of live requests and
//! the event publisher. Never: waits for a client (outboxes hold a request's whole budget), nor for a subscriber.
//! Bounds: [`super::port::COMMANDS_MAX`] commands; the engine's own limits on sequences.
//! If it dies: the actor hears of it and fails, every outbox closes, streams end with a typed fault.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use starling_cluster::{
    stream::{Fault, FaultKind},
    supervise::Tasks,
};
use starling_engine::{
    Capabilities, Engine, EngineLimits, LoadedModel, SequenceDelta, SequenceFault, SequenceId, SequenceRequest,
    StepOutput, SubmitError,
    contract::Carried,
    simulated::faults::{FaultSwitch, Faulty},
};
use starling_ids::{Incarnation, WorkerId};
use starling_kv::tier::{TierOptions, TierStats};
use tokio::sync::{mpsc, watch};

use super::{
    blocks::{Blocks, Lending, Returns},
    leaving::{Departures, Luggage, TakenOver},
    ledger::{Applied, Ledger, RequestKey},
    meter::Meter,
    port::{AnswerStart, Cancels, Command, Delivery, Pulse, Submission},
    publisher::Publisher,
};
use crate::{
    report::LoadReport,
    transfer::Party,
    transfer_agent::{AgentShared, KvFace, Place},
};

/// Longest wait for a command while an engine says it is idle with requests in it.
const RECHECK: Duration = Duration::from_millis(20);

/// How long a step waits at most for running requests that are on their way from their worker, and at most half of a step.
const ARRIVAL_MAX: Duration = Duration::from_millis(40);

/// How long an engine that ends in order may write what is to outlive it.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// What the thread tells its actor.
#[derive(Debug)]
pub(crate) enum EngineNews {
    /// The engine is built, or back, and takes requests.
    Ready(Box<Capabilities>),
    /// The engine runs elsewhere and cannot be asked now.
    Away(String),
    /// The thread ends by itself, which it never should.
    Ended(String),
}

/// What the thread works with.
pub(crate) struct EngineArgs {
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) model: Arc<dyn LoadedModel>,
    pub(crate) commands: Receiver<Command>,
    pub(crate) cancels: Arc<Cancels>,
    pub(crate) load: watch::Sender<LoadReport>,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) limits: Arc<OnceLock<EngineLimits>>,
    /// Which tiers it has below its device.
    pub(crate) tiers: TierOptions,
    pub(crate) tiers_told: watch::Sender<Option<TierStats>>,
    /// Which life of the engine it is.
    pub(crate) epoch: u64,
    /// Its blocks are not told to routers.
    pub(crate) silent: bool,
    /// What is wrong with it on command.
    pub(crate) faults: Option<FaultSwitch>,
    pub(crate) returns: Arc<Returns>,
    pub(crate) kv: Arc<OnceLock<Arc<KvFace>>>,
    pub(crate) agent: Arc<AgentShared>,
    pub(crate) tasks: Tasks,
    pub(crate) tell: Box<dyn Fn(EngineNews) + Send>,
}

/// The running thread. Dropping it stops it after the step under way and waits for that.
#[derive(Debug)]
pub(crate) struct EngineThread {
    stop: Arc<AtomicBool>,
    wake: SyncSender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Starts the thread, named `engine-N`.
    pub(crate) fn start(args: EngineArgs, wake: SyncSender<Command>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let name = format!("engine-{}", args.worker.index);
        let thread = std::thread::Builder::new().name(name).spawn(move || run(args, &asked))?;
        Ok(Self { stop, wake, thread: Some(thread) })
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A full channel wakes it as well; a closed one means that it has ended.
        self.wake.try_send(Command::Wake).ok();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("an engine thread panicked outside of its guard");
        }
    }
}

fn run(args: EngineArgs, stop: &AtomicBool) {
    let worker = args.worker.clone();
    let body = AssertUnwindSafe(|| EngineLoop::new(&args).run(stop));
    let reason = match catch_unwind(body) {
        Ok(Ok(())) => return,
        Ok(Err(reason)) => reason,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            format!("panic: {}", text.unwrap_or("no text"))
        }
    };
    tracing::error!(%worker, reason, "the engine ended");
    (args.tell)(EngineNews::Ended(reason));
}

struct EngineLoop<'a> {
    args: &'a EngineArgs,
    engine: Box<dyn Engine>,
    ledger: Ledger<mpsc::Sender<Delivery>>,
    publisher: Publisher,
    meter: Meter,
    lending: Lending,
    departures: Departures,
    /// Requests that came from elsewhere and have not said anything here: when they stopped there.
    paused: HashMap<RequestKey, Instant>,
    /// Requests taken.
    admitted: u64,
    /// Whether the engine could be asked, as the actor was told.
    told_available: Option<bool>,
}

impl<'a> EngineLoop<'a> {
    fn new(args: &'a EngineArgs) -> Self {
        let mut engine = args.model.engine();
        if let Some(switch) = &args.faults {
            engine = Box::new(Faulty::new(engine, switch.clone()));
        }
        if let Err(error) = engine.open_tiers(&args.tiers) {
            tracing::error!(worker = %args.worker, %error, "the worker goes on without a disk tier");
        }
        engine.wake_by(args.returns.waker());
        let capabilities = engine.capabilities().clone();
        if let Some(memory) = engine.memory() {
            let party = Party { worker: args.worker.clone(), incarnation: args.incarnation };
            let (layout, shape, numbers) = (capabilities.layout_digest, args.model.layout(), args.model.numbers());
            let place = Place { layout, shape, numbers, memory, lower: engine.tier_reader() };
            let face = KvFace::new(party, place, &args.returns, &args.agent, &args.tasks);
            args.kv.get_or_init(|| Arc::new(face));
        }
        let publisher = Publisher::new(args.worker.clone(), args.incarnation, args.epoch, args.silent);
        let lends = args.kv.get().is_some_and(|kv| kv.lower.is_some());
        let meter = Meter::new(&args.worker, lends);
        let (lending, departures) = (Lending::new(args.returns.clone()), Departures::new(args.returns.clone()));
        let paused = HashMap::new();
        let (ledger, admitted, told_available) = (Ledger::new(), 0, None);
        Self { args, engine, ledger, publisher, meter, lending, departures, paused, admitted, told_available }
    }

    /// Tells the actor when the engine can be asked, and when it cannot any more.
    fn tell_available(&mut self) {
        let available = self.engine.available();
        if self.told_available.replace(available.is_ok()) == Some(available.is_ok()) {
            return;
        }
        (self.args.tell)(match available {
            Ok(()) => {
                let capabilities = self.engine.capabilities().clone();
                self.args.limits.get_or_init(|| capabilities.limits.clone());
                EngineNews::Ready(Box::new(capabilities))
            }
            Err(why) => EngineNews::Away(why),
        });
    }

    fn run(mut self, stop: &AtomicBool) -> Result<(), String> {
        self.turn(stop)?;
        self.engine.close(CLOSE_WITHIN);
        Ok(())
    }

    /// Steps until it is told to end.
    fn turn(&mut self, stop: &AtomicBool) -> Result<(), String> {
        let (mut ended, mut step) = (Instant::now(), Duration::ZERO);
        loop {
            self.args.pulse.beat(false);
            self.tell_available();
            if !self.take_commands(stop) {
                return Ok(());
            }
            // Whoever leaves goes before the next step.
            self.departures.serve(&mut *self.engine, &mut self.ledger, ended);
            self.await_arrivals(step, stop);
            let began = Instant::now();
            let output = self.engine.step().map_err(|error| error.to_string())?;
            let StepOutput { deltas, events, takes, idle, measured } = output;
            self.publisher.publish(events);
            if !idle {
                self.publisher.stir();
            }
            self.tell_digests();
            self.wait_until(began + takes, stop);
            ended = Instant::now();
            for delta in deltas {
                self.deliver(delta, began);
            }
            self.lend();
            let took = if takes.is_zero() { began.elapsed() } else { takes };
            let own = measured.is_none() && !idle;
            measured.iter().flatten().for_each(|step| self.meter.learn(step));
            step = if idle { Duration::ZERO } else { took };
            if let Some(stats) = self.engine.tier_stats() {
                self.meter.observe_tiers(&stats);
                self.args.tiers_told.send_replace(Some(stats));
            }
            self.meter.observe(&self.args.load, (self.engine.load(), self.admitted), own.then_some(took));
            if idle && !self.wait_for_command() {
                return Ok(());
            }
        }
    }

    /// Tells what the engine holds, when it is time.
    fn tell_digests(&mut self) {
        let now = Instant::now();
        if self.publisher.digests_due(now) == Some(Duration::ZERO) {
            self.publisher.publish(self.engine.take_events());
            self.publisher.tell_digests(&self.engine.inventory(), &self.engine.tier_inventory(), now);
        }
    }

    /// Applies all that waits. False when the thread is to end.
    fn take_commands(&mut self, stop: &AtomicBool) -> bool {
        loop {
            if stop.load(Ordering::Acquire) {
                return false;
            }
            self.apply_cancels();
            match self.args.commands.try_recv() {
                Ok(command) => self.apply(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Nothing to compute: waits. False when nobody can send commands any more.
    fn wait_for_command(&mut self) -> bool {
        self.args.pulse.beat(true);
        let command = if self.ledger.len() > 0 {
            self.args.commands.recv_timeout(RECHECK)
        } else if let Some(due) = self.publisher.digests_due(Instant::now()) {
            self.args.commands.recv_timeout(due)
        } else {
            self.args.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match command {
            Ok(command) => self.apply(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    /// Running requests have left their worker and are a moment away: one that misses the next step waits for all of it.
    fn await_arrivals(&mut self, step: Duration, stop: &AtomicBool) {
        let Some(arrivals) = self.args.kv.get().map(|kv| kv.arrivals.clone()) else { return };
        let patience = if step.is_zero() { ARRIVAL_MAX } else { ARRIVAL_MAX.min(step / 2) };
        while let Some(until) = arrivals.until(patience) {
            let left = until.saturating_duration_since(Instant::now());
            match self.args.commands.recv_timeout(left) {
                Ok(command) if !stop.load(Ordering::Acquire) => self.apply(command),
                _ => return arrivals.lapse(),
            }
            self.apply_cancels();
        }
    }

    /// Lets the time pass that a simulated step takes, with commands applied meanwhile.
    fn wait_until(&mut self, due: Instant, stop: &AtomicBool) {
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() || stop.load(Ordering::Acquire) {
                return;
            }
            self.args.pulse.beat(false);
            match self.args.commands.recv_timeout(left) {
                Ok(command) => self.apply(command),
                Err(_) => return,
            }
            self.apply_cancels();
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Subscribe(wants, reply) => {
                let queue = self.publisher.resume(wants).or_else(|| {
                    let (device, below) = (self.engine.inventory(), self.engine.tier_inventory());
                    self.publisher.subscribe(&device, &below, wants)
                });
                // A subscriber that has gone leaves a closed queue, which the next batch removes.
                reply.send(queue).ok();
            }
            Command::Buckets(to, ask) => {
                self.publisher.publish(self.engine.take_events());
                let (device, below) = (self.engine.inventory(), self.engine.tier_inventory());
                self.publisher.tell_buckets(to, ask, &device, &below);
            }
            Command::Lend(watch) => {
                self.lending.watch(*watch);
                self.lend();
            }
            Command::Room(ask) => self.lending.room(&mut *self.engine, *ask),
            Command::Arrived(mut arrived) => {
                self.lending.adopt(&mut *self.engine, &mut arrived);
                self.publisher.publish(self.engine.take_events());
                if let Some(submission) = arrived.then {
                    self.submit(*submission);
                }
            }
            Command::Leave(leaving) => self.departures.begin(*leaving),
            Command::TakeOver(taken) => self.take_over(*taken),
            Command::Wake => {}
        }
    }

    fn lend(&mut self) {
        let ledger = &self.ledger;
        self.lending.serve(&mut *self.engine, |key| ledger.outbox(key).is_some());
    }

    fn apply_cancels(&mut self) {
        self.lending.collect(&mut *self.engine);
        for key in self.args.cancels.take() {
            self.give_up(key, None);
        }
    }

    /// All choices or none.
    fn submit(&mut self, submission: Submission) {
        let key = submission.key;
        let choices = submission.answers.iter().map(|answer| answer.choice);
        let ids = self.ledger.admit(key, choices, submission.outbox.clone());
        let refused = ids.into_iter().zip(&submission.answers).find_map(|(id, answer)| {
            let request = sequence(&submission, id, answer);
            self.engine.submit(request).err()
        });
        self.conclude(submission, refused);
    }

    /// Says what became of a submission.
    fn conclude(&mut self, submission: Submission, refused: Option<SubmitError>) {
        let key = submission.key;
        if let Some(error) = refused {
            self.give_up(key, None);
            // An asker that has gone needs no reason.
            submission.verdict.send(Err(error)).ok();
        } else {
            self.admitted += 1;
            if submission.verdict.send(Ok(self.admitted)).is_err() {
                self.give_up(key, None);
            }
        }
    }

    /// Goes on with a request that was handed over elsewhere.
    fn take_over(&mut self, taken: TakenOver) {
        let TakenOver { submission, luggage, paused, coming } = taken;
        drop(coming);
        self.paused.extend(paused.map(|paused| (submission.key, paused)));
        let choices = submission.answers.iter().map(|answer| answer.choice);
        let ids = self.ledger.admit(submission.key, choices, submission.outbox.clone());
        let mut refused = (ids.len() != luggage.len() || ids.is_empty()).then_some(SubmitError::Empty);
        for ((id, answer), Luggage { here, ready, computed }) in ids.into_iter().zip(&submission.answers).zip(luggage) {
            if refused.is_some() {
                // Dropping its blocks gives them back.
                break;
            }
            let came = ready.map(Blocks::take).unwrap_or_default();
            let carried = Carried { here: here.take(), came, computed };
            refused = self.engine.take_over(sequence(&submission, id, answer), carried).err();
        }
        self.publisher.publish(self.engine.take_events());
        self.conclude(submission, refused);
    }

    /// Passes on what a step brought that began then.
    fn deliver(&mut self, delta: SequenceDelta, began: Instant) {
        let id = delta.id;
        match self.ledger.apply(delta) {
            Applied::Unknown => {}
            Applied::Frame { key, frame, last } => {
                if let Some(paused) = self.paused.remove(&key) {
                    self.meter.observe_move(began.saturating_duration_since(paused));
                }
                let sent = |outbox: &mpsc::Sender<Delivery>| outbox.try_send(Delivery::Frame(frame)).is_ok();
                if !self.ledger.outbox(key).is_some_and(sent) {
                    self.give_up(key, None);
                } else if last && let Some((outbox, _)) = self.ledger.remove(key) {
                    // A client that left with its last token misses nothing.
                    outbox.try_send(Delivery::End).ok();
                }
            }
            Applied::Failed { key } => {
                let fault = self.engine.fault(id).map_or_else(unsaid, |fault| told(&fault));
                self.give_up(key, Some(fault));
            }
        }
    }

    /// Ends a request early: its sequences are cancelled, its blocks given back.
    fn give_up(&mut self, key: RequestKey, fault: Option<Fault>) {
        self.paused.remove(&key);
        let Some((outbox, live)) = self.ledger.remove(key) else { return };
        for id in live {
            // False for a sequence the engine refused or ended already.
            self.engine.cancel(id);
        }
        if let Some(fault) = fault {
            // Nobody to tell when the stream is gone.
            outbox.try_send(Delivery::Fail(fault)).ok();
        }
        self.meter.observe(&self.args.load, (self.engine.load(), self.admitted), None);
    }
}

/// What the client is told of a sequence that failed.
fn told(fault: &SequenceFault) -> Fault {
    let kind = match fault {
        SequenceFault::Gone(_) => FaultKind::Unavailable,
        SequenceFault::Busy(_) => FaultKind::Overloaded,
        SequenceFault::Refused(_) => FaultKind::Invalid,
    };
    Fault::new(kind, fault.to_string())
}

fn unsaid() -> Fault {
    Fault::new(FaultKind::Internal, "the engine failed on this request")
}

/// One answer of a request, which samples with its own seed and has what is left of the budget.
fn sequence(submission: &Submission, id: SequenceId, answer: &AnswerStart) -> SequenceRequest {
    let mut sampling = submission.sampling.clone();
    sampling.seed = sampling.seed.wrapping_add(u64::from(answer.choice));
    let mut stop = submission.stop.clone();
    stop.tokens_max = stop.tokens_max.saturating_sub(answer.answered).max(1);
    SequenceRequest {
        id,
        prompt: answer.tokens.clone(),
        answered: answer.answered,
        hash_seed: submission.hash_seed,
        sampling,
        stop,
        logprobs: submission.logprobs,
        priority: submission.priority,
    }
}
