//! A small deterministic engine with faults on request, and a node around it, for the tests of this crate.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use starling_cluster::{config::ClusterConfig, discovery::InstanceKind, mesh::Mesh, security::ClusterKey};
use starling_engine::{
    Capabilities, Engine, EngineError, EngineLimits, EngineLoad, FinishReason, LoadedModel, ModelCard, SampledToken,
    SamplingParams, SequenceDelta, SequenceId, SequenceRequest, StepOutput, StopParams, SubmitError, TokenizerBundle,
    contract::ExportedBlock,
};
use starling_ids::{BlockHash, ModelId, NodeId, RequestId, TokenId};
use starling_kv::{
    events::KvEvent,
    hash::{HashSeed, SeedParts, block_hashes},
};

use crate::{
    client::{Call, GenerateStream},
    generate::{GenerateError, GenerateFrame, GenerateSpec},
    route::queue::QueueConfig,
    route::split::Role,
    tree::{Node, NodeOptions, WorkerRole},
};

/// A prompt with this token makes the engine panic in its next step.
pub(crate) const PANIC_TOKEN: TokenId = 6_666;
/// A prompt with this token makes the engine end that sequence with an error.
pub(crate) const ERROR_TOKEN: TokenId = 4_444;
const BLOCK_TOKENS: usize = 16;
const CONTEXT: u32 = 4_096;

/// The knobs of a test model.
#[derive(Debug, Clone)]
pub(crate) struct TestModel {
    pub(crate) step_takes: Duration,
    /// Added to a step for each prompt token it computes.
    pub(crate) prefill_takes: Duration,
    pub(crate) sequences_max: u32,
    pub(crate) waiting_max: u32,
    /// The most sequences that any engine of this model had at one time.
    pub(crate) peak: Arc<AtomicUsize>,
    pub(crate) card: ModelCard,
    pub(crate) bundle: TokenizerBundle,
}

impl TestModel {
    pub(crate) fn new() -> Self {
        let bundle = TokenizerBundle {
            tokenizer_json: "x".repeat(200_000),
            chat_template: None,
            bos_token: None,
            eos_token: None,
            add_bos: false,
        };
        let parts = SeedParts { model: "test", tokenizer_digest: "t", ..SeedParts::default() };
        let card = ModelCard {
            id: ModelId::new("test").expect("name"),
            architecture: "test".to_owned(),
            context_length: CONTEXT,
            vocab_size: 10_000,
            block_tokens: BLOCK_TOKENS as u32,
            bundle_digest: bundle.digest(),
            eos_ids: Vec::new(),
            hash_seed: HashSeed::new(parts),
        };
        Self {
            step_takes: Duration::ZERO,
            prefill_takes: Duration::ZERO,
            sequences_max: 64,
            waiting_max: 64,
            peak: Arc::default(),
            card,
            bundle,
        }
    }

    pub(crate) fn slow(ms: u64) -> Self {
        Self { step_takes: Duration::from_millis(ms), ..Self::new() }
    }
}

impl LoadedModel for TestModel {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    fn engine(&self) -> Box<dyn Engine> {
        let limits = EngineLimits {
            sequences_max: self.sequences_max,
            waiting_max: self.waiting_max,
            batch_tokens_max: 512,
            kv_blocks: 1_024,
        };
        let capabilities = Capabilities { card: self.card.clone(), layout_digest: 1, limits };
        Box::new(TestEngine {
            capabilities,
            peak: self.peak.clone(),
            takes: self.step_takes,
            prefill_takes: self.prefill_takes,
            waiting: VecDeque::new(),
            running: Vec::new(),
            cache: HashSet::new(),
            chains: HashMap::new(),
            load: EngineLoad::default(),
        })
    }
}

struct Running {
    request: SequenceRequest,
    sampled: u32,
    cached: u32,
}

struct TestEngine {
    capabilities: Capabilities,
    peak: Arc<AtomicUsize>,
    takes: Duration,
    prefill_takes: Duration,
    waiting: VecDeque<SequenceRequest>,
    running: Vec<Running>,
    cache: HashSet<BlockHash>,
    chains: HashMap<BlockHash, Option<BlockHash>>,
    load: EngineLoad,
}

impl TestEngine {
    fn start(&mut self, request: SequenceRequest, events: &mut Vec<KvEvent>) {
        let hashes = block_hashes(request.hash_seed, &request.prompt, BLOCK_TOKENS);
        let hits = hashes.iter().take_while(|hash| self.cache.contains(hash)).count();
        let cached = (hits * BLOCK_TOKENS).min(request.prompt.len() - 1) as u32;
        self.load.tokens_cached += u64::from(cached);
        self.load.tokens_prefilled += request.prompt.len() as u64 - u64::from(cached);
        let parent = hits.checked_sub(1).map(|last| hashes[last]);
        let mut before = parent;
        for hash in &hashes[hits..] {
            self.cache.insert(*hash);
            self.chains.insert(*hash, before);
            before = Some(*hash);
        }
        if hits < hashes.len() {
            events.push(KvEvent::Stored { parent, blocks: hashes[hits..].to_vec() });
        }
        let sampled = request.answered;
        self.running.push(Running { request, sampled, cached });
    }
}

impl Engine for TestEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, request: SequenceRequest) -> Result<(), SubmitError> {
        let limit = self.capabilities.limits.waiting_max as usize;
        if request.prompt.is_empty() {
            return Err(SubmitError::Empty);
        }
        if self.waiting.len() >= limit {
            return Err(SubmitError::Full { waiting: self.waiting.len(), limit });
        }
        self.waiting.push_back(request);
        self.peak.fetch_max(self.waiting.len() + self.running.len(), Ordering::Relaxed);
        Ok(())
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|request| request.id != id);
        self.running.retain(|running| running.request.id != id);
        before != self.waiting.len() + self.running.len()
    }

    fn step(&mut self) -> Result<StepOutput, EngineError> {
        let mut output = StepOutput::default();
        let before = self.load.tokens_prefilled;
        while self.running.len() < self.capabilities.limits.sequences_max as usize {
            let Some(request) = self.waiting.pop_front() else { break };
            self.start(request, &mut output.events);
        }
        output.idle = self.running.is_empty();
        let prefilled = u32::try_from(self.load.tokens_prefilled - before).unwrap_or(u32::MAX);
        output.takes = if output.idle { Duration::ZERO } else { self.takes + self.prefill_takes * prefilled };
        for running in &mut self.running {
            let prompt = &running.request.prompt;
            assert!(!prompt.contains(&PANIC_TOKEN), "the engine was asked to panic");
            let first = running.sampled == running.request.answered;
            running.sampled += 1;
            self.load.tokens_generated += 1;
            let finish = if prompt.contains(&ERROR_TOKEN) {
                Some(FinishReason::Error)
            } else {
                (running.sampled - running.request.answered >= running.request.stop.tokens_max)
                    .then_some(FinishReason::Length)
            };
            let seed = running.request.sampling.seed as TokenId;
            let token = SampledToken { id: seed * 1_000 + running.sampled, logprob: None, top: Vec::new() };
            output.deltas.push(SequenceDelta {
                id: running.request.id,
                tokens: vec![token],
                cached_tokens: first.then_some(running.cached),
                finish,
            });
        }
        let ended: Vec<_> = output.deltas.iter().filter(|delta| delta.finish.is_some()).map(|delta| delta.id).collect();
        self.running.retain(|running| !ended.contains(&running.request.id));
        Ok(output)
    }

    fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            prefill_tokens: self.waiting.iter().map(|request| request.prompt.len() as u64).sum(),
            blocks_cached: self.cache.len() as u32,
            ..self.load
        }
    }

    fn inventory(&self) -> Vec<(Option<BlockHash>, BlockHash)> {
        self.chains.iter().map(|(hash, parent)| (*parent, *hash)).collect()
    }

    fn export_block(&self, _hash: BlockHash) -> Option<ExportedBlock> {
        None
    }

    fn import_block(&mut self, _block: &ExportedBlock) -> Result<Vec<KvEvent>, EngineError> {
        Err(EngineError::Block("not in tests".to_owned()))
    }

    fn clear_cache(&mut self) -> Vec<KvEvent> {
        self.cache.clear();
        vec![KvEvent::Cleared]
    }
}

/// A whole node in this process.
pub(crate) struct Rig {
    pub(crate) mesh: Mesh,
    pub(crate) node: Node,
    _dir: tempfile::TempDir,
}

impl Rig {
    pub(crate) async fn start(name: &str, model: TestModel, count: u16, router: bool) -> Self {
        Self::join(name, Some((model, count)), router, Vec::new()).await
    }

    /// Every worker of this model serving and heard.
    pub(crate) async fn with_model(name: &str, model: Arc<dyn LoadedModel>, count: u16) -> Self {
        let role = WorkerRole { model, engine: "simulated".to_owned(), count, duty: Role::Both };
        let options = NodeOptions { worker: Some(role), router: true, ..NodeOptions::default() };
        let rig = Self::begin(name, options, Vec::new()).await;
        rig.heard(count).await;
        rig
    }

    /// The same as [`Rig::ready`] with another queue.
    pub(crate) async fn queueing(name: &str, model: TestModel, count: u16, queue: QueueConfig) -> Self {
        let role = WorkerRole { model: Arc::new(model), engine: "test".to_owned(), count, duty: Role::Both };
        let options = NodeOptions { worker: Some(role), router: true, queue, ..NodeOptions::default() };
        let rig = Self::begin(name, options, Vec::new()).await;
        rig.heard(count).await;
        rig
    }

    /// A node with workers of this model and without a router, which joins others through seeds.
    pub(crate) async fn join_model(name: &str, model: Arc<dyn LoadedModel>, count: u16, seeds: Vec<String>) -> Self {
        let role = WorkerRole { model, engine: "simulated".to_owned(), count, duty: Role::Both };
        let rig = Self::begin(name, NodeOptions { worker: Some(role), ..NodeOptions::default() }, seeds).await;
        within("ready", rig.node.ready()).await;
        rig
    }

    /// A node that joins others through seeds.
    pub(crate) async fn join(name: &str, workers: Option<(TestModel, u16)>, router: bool, seeds: Vec<String>) -> Self {
        let role =
            |(model, count)| WorkerRole { model: Arc::new(model), engine: "test".to_owned(), count, duty: Role::Both };
        Self::begin(name, NodeOptions { worker: workers.map(role), router, ..NodeOptions::default() }, seeds).await
    }

    pub(crate) async fn begin(name: &str, options: NodeOptions, seeds: Vec<String>) -> Self {
        let options = NodeOptions { joins: !seeds.is_empty(), ..options };
        let dir = tempfile::tempdir().expect("a temporary folder");
        let config = ClusterConfig {
            name: NodeId::new(name).expect("name"),
            bind: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            seeds,
            data_dir: dir.path().to_owned(),
            keys: ClusterKey::from_bytes([7; 32]).into(),
            roles: Vec::new(),
            http: None,
            labels: std::collections::BTreeMap::new(),
            software: "test".to_owned(),
            timings: starling_cluster::config::Timings::default(),
        };
        let mesh = Mesh::start(config).await.expect("a mesh");
        let node = Node::start(&mesh, options).await.expect("a node");
        Self { mesh, node, _dir: dir }
    }

    /// Started, every worker serving and heard by the indexer.
    pub(crate) async fn ready(name: &str, model: TestModel, count: u16) -> Self {
        let rig = Self::start(name, model, count, true).await;
        rig.heard(count).await;
        rig
    }

    async fn heard(&self, count: u16) {
        within("ready", self.node.ready()).await;
        eventually("every worker heard", || self.node.heard() == usize::from(count)).await;
        // Without it the first requests are decided by their client, and not counted.
        let routers = || self.mesh.snapshot().routable(InstanceKind::Router).count();
        eventually("the router listed", || routers() > 0).await;
    }

    pub(crate) async fn generate(&self, spec: GenerateSpec) -> Result<GenerateStream, GenerateError> {
        self.generate_within(spec, Duration::from_secs(20)).await
    }

    pub(crate) async fn generate_within(
        &self,
        spec: GenerateSpec,
        time_left: Duration,
    ) -> Result<GenerateStream, GenerateError> {
        self.node.client().generate(self.call(spec, time_left)).await
    }

    pub(crate) fn call(&self, spec: GenerateSpec, time_left: Duration) -> Call {
        Call {
            request: RequestId(rand::random()),
            spec,
            time_left,
            trace_parent: None,
            baggage: Default::default(),
            tenant: String::new(),
            priority: 0,
            weight: 1,
            budget: 0,
            session: None,
            wishes: Default::default(),
            slip: None,
        }
    }

    /// Generates and reads to the end.
    pub(crate) async fn complete(&self, spec: GenerateSpec) -> Result<Vec<GenerateFrame>, GenerateError> {
        all(self.generate(spec).await?).await
    }

    /// Nothing is held anywhere.
    pub(crate) async fn at_rest(&self) {
        eventually("nothing in flight and nothing reserved", || {
            self.node.in_flight() == 0 && self.node.reservations() == 0 && self.node.waiting() == 0
        })
        .await;
    }

    pub(crate) fn restarts(&self, path: &str) -> u64 {
        self.mesh.book().snapshot().iter().find(|row| row.path == path).map_or(0, |row| row.restarts)
    }

    pub(crate) async fn end(self) {
        self.at_rest().await;
        self.node.stop().await;
        self.mesh.leave().await;
    }
}

pub(crate) async fn all(stream: GenerateStream) -> Result<Vec<GenerateFrame>, GenerateError> {
    within("a whole answer", stream.collect::<Vec<_>>()).await.into_iter().collect()
}

pub(crate) fn spec(prompt: Vec<TokenId>, tokens_max: u32) -> GenerateSpec {
    GenerateSpec {
        model: ModelId::new("test").expect("name"),
        prompt,
        choices: 1,
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max, tokens_min: 0, token_ids: Vec::new(), ignore_eos: true },
        logprobs: None,
        cache_salt: None,
        adapter: None,
        so_far: Vec::new(),
    }
}

/// A prompt of this many tokens that shares no block with one of another `kind`.
pub(crate) fn prompt(kind: TokenId, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| (kind * 31 + at) % 4_000).collect()
}

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(20), future).await {
        Ok(value) => value,
        Err(_) => panic!("waited too long for: {what}"),
    }
}

pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    within(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
