//! The engine that a worker steps: gives sequences to the server, takes what came, keeps its account.
//!
//! Called by one thread, which it wakes when there is news; it never waits. Sequences beyond `sequences_max` wait here, lower
//! priorities first, since servers differ in what they make of a priority. Bounds: `sequences_max` calls, `waiting_max` sequences
//! behind them. Never: exports, imports or clears blocks, which are the server's.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use starling_ids::BlockHash;
use starling_kv::{events::KvEvent, hash::block_hashes, tier::TierInventory};
use tokio::sync::{Notify, oneshot};

use super::{
    BLOCK_TOKENS, Dialect, ServerOptions,
    dialect::{self, Chunk, Setting},
    flight::Flight,
    gauges::ServerLoad,
    http::Server,
    inventory::Inventory,
    io::{Facts, Io, Launch, News, Shared},
    words::Words,
};
use crate::contract::{
    Capabilities, Engine, EngineError, EngineLoad, ExportedBlock, FinishReason, Measured, SequenceDelta, SequenceFault,
    SequenceId, SequenceRequest, StepOutput, SubmitError, Waker,
};

/// A sequence that the server has; dropping it ends the call.
struct Airborne {
    flight: Flight,
    _stop: oneshot::Sender<()>,
}

/// See the module.
pub(super) struct SidecarEngine {
    capabilities: Capabilities,
    dialect: Dialect,
    words: Arc<Words>,
    io: Result<Io, String>,
    /// Why the server cannot be asked; `None` while it can.
    away: Option<String>,
    facts: Facts,
    server: ServerLoad,
    inventory: Inventory,
    /// By priority and arrival.
    waiting: BTreeMap<(i32, u64), SequenceRequest>,
    order: u64,
    flights: BTreeMap<SequenceId, Airborne>,
    faults: HashMap<SequenceId, SequenceFault>,
    /// What was counted since start; the rest of it is made when asked.
    totals: EngineLoad,
    /// When a first token last came.
    first: Option<Instant>,
}

impl SidecarEngine {
    /// Starts the thread of its sockets, which looks for the server at once.
    pub(super) fn start(
        capabilities: Capabilities,
        server: Arc<Server>,
        words: Arc<Words>,
        options: &ServerOptions,
    ) -> Self {
        let card = &capabilities.card;
        let shared = Shared {
            dialect: options.dialect,
            server,
            words: words.clone(),
            naming: (card.hash_seed, BLOCK_TOKENS as usize),
            options: options.clone(),
            doubt: Notify::new(),
        };
        Self {
            dialect: options.dialect,
            words,
            io: Io::start(shared).map_err(|error| format!("the thread for its sockets did not start: {error}")),
            away: Some(format!("{} has not been asked yet", options.url)),
            facts: Facts::default(),
            server: ServerLoad::default(),
            inventory: Inventory::default(),
            waiting: BTreeMap::new(),
            order: 0,
            flights: BTreeMap::new(),
            faults: HashMap::new(),
            totals: EngineLoad::default(),
            first: None,
            capabilities,
        }
    }

    /// Longest prompt plus answer.
    fn context(&self) -> usize {
        let own = self.capabilities.card.context_length;
        self.facts.context.map_or(own, |theirs| theirs.min(own)) as usize
    }

    /// Takes a piece of news.
    fn take(&mut self, news: News, now: Instant, output: &mut StepOutput) {
        match news {
            News::Chunk(id, chunk) => self.chunk(id, chunk, now, output),
            News::Blocks(events) => {
                events.iter().for_each(|event| self.inventory.apply(event));
                output.events.extend(events);
            }
            News::Load(load) => {
                self.server = load;
                if let Some(blocks) = self.pool() {
                    self.capabilities.limits.kv_blocks = blocks;
                }
            }
            News::Up(facts) => (self.facts, self.away) = (facts, None),
            News::Away(why) => {
                self.server = ServerLoad::default();
                self.abandon(&why, output);
                self.away = Some(why);
            }
        }
    }

    /// Blocks of the server's pool, counted in ours.
    fn pool(&self) -> Option<u32> {
        let blocks = self.server.kv_tokens?.div_ceil(BLOCK_TOKENS.into());
        Some(u32::try_from(blocks).unwrap_or(u32::MAX))
    }

    /// Ends every sequence: nobody can go on with them here.
    fn abandon(&mut self, why: &str, output: &mut StepOutput) {
        let waiting = std::mem::take(&mut self.waiting).into_values().map(|request| request.id);
        let flying = std::mem::take(&mut self.flights).into_keys();
        for id in flying.chain(waiting) {
            self.fail(id, SequenceFault::Gone(why.to_owned()), output);
        }
    }

    fn fail(&mut self, id: SequenceId, fault: SequenceFault, output: &mut StepOutput) {
        self.faults.insert(id, fault);
        let finish = Some(FinishReason::Error);
        output.deltas.push(SequenceDelta { id, tokens: Vec::new(), cached_tokens: None, finish });
    }

    fn chunk(&mut self, id: SequenceId, chunk: Chunk, now: Instant, output: &mut StepOutput) {
        // One that was given up meanwhile.
        let Some(airborne) = self.flights.get_mut(&id) else { return };
        let landed = airborne.flight.take(chunk, (&self.words.eos, self.words.vocab));
        if let Some(fault) = landed.fault {
            self.end(id);
            return self.fail(id, fault, output);
        }
        let Some(delta) = landed.delta else { return };
        self.totals.tokens_generated += delta.tokens.len() as u64;
        if !delta.tokens.is_empty() {
            output.measured.get_or_insert_default().extend(self.measure(id, delta.tokens.len(), now));
        }
        if delta.finish.is_some() {
            self.end(id);
        }
        output.deltas.push(delta);
    }

    /// What the coming of tokens tells of a step: a first token of the prompt's time, one of the oldest answer's of a step without
    /// prompts.
    fn measure(&mut self, id: SequenceId, tokens: usize, now: Instant) -> Option<Measured> {
        let speaking = |airborne: &&Airborne| airborne.flight.last.is_some();
        let running = self.flights.values().filter(speaking).count();
        let quiet = running == self.flights.len();
        let pilot = self.flights.iter().find(|(_, airborne)| speaking(airborne)).map(|(id, _)| *id);
        let flight = &mut self.flights.get_mut(&id)?.flight;
        match flight.last.replace(now) {
            Some(last) => {
                let took = now.saturating_duration_since(last) / u32::try_from(tokens).unwrap_or(u32::MAX).max(1);
                (quiet && pilot == Some(id)).then_some(Measured { took, prefilled: 0, sampled: running as u64 })
            }
            None => {
                // Prompts are taken to be computed one after the other.
                let begun = self.first.replace(now).map_or(flight.sent, |first| first.max(flight.sent));
                let known = flight.cached_told || self.inventory.len() > 0;
                let prefilled = (flight.request.prompt.len() as u64).saturating_sub(flight.cached.into());
                let took = now.saturating_duration_since(begun);
                known.then_some(Measured { took, prefilled: prefilled.max(1), sampled: running as u64 + 1 })
            }
        }
    }

    /// Strikes a sequence out and counts its prompt, if that was computed.
    fn end(&mut self, id: SequenceId) {
        let Some(Airborne { flight, .. }) = self.flights.remove(&id) else { return };
        if flight.last.is_none() {
            return;
        }
        let computed = (flight.request.prompt.len() as u64).saturating_sub(flight.cached.into());
        self.totals.tokens_prefilled += computed;
        self.totals.tokens_cached += u64::from(flight.cached);
        if flight.request.answered > 0 {
            self.totals.tokens_recomputed += computed;
        }
    }

    /// Gives the server what waits, as far as it may have it.
    fn launch(&mut self, now: Instant, output: &mut StepOutput) {
        let most = self.capabilities.limits.sequences_max as usize;
        while self.away.is_none() && self.flights.len() < most {
            let Some((place, mut request)) = self.waiting.pop_first() else { return };
            let room = self.context().saturating_sub(request.prompt.len());
            request.stop.tokens_max = request.stop.tokens_max.min(u32::try_from(room).unwrap_or(u32::MAX)).max(1);
            let (seed, id) = (self.capabilities.card.hash_seed, request.id);
            let setting = Setting { model: self.facts.model.as_deref(), words: &self.words, seed };
            let call = match dialect::write(self.dialect, &request, &setting) {
                Ok(call) => call,
                Err(reason) => {
                    self.fail(id, SequenceFault::Refused(reason), output);
                    continue;
                }
            };
            let reader = dialect::reader(self.dialect, &request, &self.words);
            let (stop, given_up) = oneshot::channel();
            let launched = self.io.as_ref().is_ok_and(|io| io.launch(Launch { id, call, reader, given_up }).is_ok());
            if !launched {
                self.waiting.insert(place, request);
                return;
            }
            let cached = self.guess(&request);
            self.flights.insert(id, Airborne { flight: Flight::new(request, cached, now), _stop: stop });
        }
    }

    /// Prompt tokens that its events say the server has.
    fn guess(&self, request: &SequenceRequest) -> u32 {
        if self.inventory.len() == 0 {
            return 0;
        }
        let hashes = block_hashes(request.hash_seed, &request.prompt, BLOCK_TOKENS as usize);
        // A server computes at least the last token.
        let most = request.prompt.len().saturating_sub(1);
        u32::try_from((self.inventory.leading(&hashes) * BLOCK_TOKENS as usize).min(most)).unwrap_or(u32::MAX)
    }
}

impl Engine for SidecarEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, request: SequenceRequest) -> Result<(), SubmitError> {
        let (prompt, context) = (request.prompt.len(), self.context());
        let vocab = self.words.vocab;
        if prompt == 0 {
            return Err(SubmitError::Empty);
        }
        if prompt >= context {
            return Err(SubmitError::TooLong { prompt, context });
        }
        if let Some(id) = request.prompt.iter().copied().find(|id| *id >= vocab) {
            return Err(SubmitError::UnknownToken { id, vocab });
        }
        let seed = self.capabilities.card.hash_seed;
        if let Some(param) = dialect::unsupported(self.dialect, &request, seed) {
            return Err(SubmitError::Unsupported { param, engine: self.dialect.label() });
        }
        if let Some(why) = &self.away {
            return Err(SubmitError::Away(why.clone()));
        }
        let (waiting, limit) = (self.waiting.len(), self.capabilities.limits.waiting_max as usize);
        if waiting >= limit {
            return Err(SubmitError::Full { waiting, limit });
        }
        self.order += 1;
        self.waiting.insert((request.priority, self.order), request);
        Ok(())
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        self.faults.remove(&id);
        let known = self.waiting.len() + self.flights.len();
        self.waiting.retain(|_, request| request.id != id);
        self.end(id);
        self.waiting.len() + self.flights.len() < known
    }

    fn step(&mut self) -> Result<StepOutput, EngineError> {
        let news = self.io.as_mut().map_err(|why| EngineError::Step(why.clone()))?.news();
        let now = Instant::now();
        let idle = news.is_empty();
        let mut output =
            StepOutput { measured: Some(Vec::new()), takes: Duration::ZERO, idle, ..StepOutput::default() };
        for news in news {
            self.take(news, now, &mut output);
        }
        self.launch(now, &mut output);
        Ok(output)
    }

    fn load(&self) -> EngineLoad {
        let narrow = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let (flying, queued) = (self.flights.len() as u64, u64::from(self.server.waiting.unwrap_or(0)));
        // Others may ask the same server.
        let theirs = u64::from(self.server.running.unwrap_or(0)) + queued;
        let blocks_total = self.pool().unwrap_or(self.capabilities.limits.kv_blocks);
        let share = self.server.kv_share.zip(self.pool()).map(|(share, pool)| (share * f64::from(pool)) as u32);
        let flights = || self.flights.values().map(|airborne| &airborne.flight);
        let own = || narrow(flights().map(|flight| flight.blocks(BLOCK_TOKENS as usize)).sum());
        let unread = flights().filter(|flight| flight.last.is_none());
        let unread: u64 = unread.map(|flight| flight.request.prompt.len() as u64 - u64::from(flight.cached)).sum();
        let behind: u64 = self.waiting.values().map(|request| request.prompt.len() as u64).sum();
        EngineLoad {
            running: narrow(flying.max(theirs).saturating_sub(queued)),
            waiting: narrow(self.waiting.len() as u64 + queued),
            prefill_tokens: unread + behind,
            blocks_pinned: share.unwrap_or_else(own),
            blocks_cached: narrow(self.inventory.len() as u64),
            blocks_total,
            ..self.totals
        }
    }

    fn available(&self) -> Result<(), String> {
        self.away.clone().map_or(Ok(()), Err)
    }

    fn wake_by(&mut self, wake: Waker) {
        if let Ok(io) = &self.io {
            io.wake_by(wake);
        }
    }

    fn fault(&mut self, id: SequenceId) -> Option<SequenceFault> {
        self.faults.remove(&id)
    }

    fn inventory(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        self.inventory.list()
    }

    fn tier_inventory(&self) -> Vec<TierInventory> {
        self.inventory.below()
    }

    fn export_block(&self, _hash: BlockHash) -> Option<ExportedBlock> {
        None
    }

    fn import_block(&mut self, _block: &ExportedBlock) -> Result<Vec<KvEvent>, EngineError> {
        Err(EngineError::Block(format!("{} keeps its own blocks", self.dialect)))
    }

    /// The server's cache is its own: nothing is forgotten.
    fn clear_cache(&mut self) -> Vec<KvEvent> {
        Vec::new()
    }
}
