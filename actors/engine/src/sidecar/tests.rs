//! A sidecar in front of a server that speaks each dialect, and is wrong in every way that servers are.

use std::{
    collections::{BTreeSet, HashMap},
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use serde_json::json;
use starling_ids::TokenId;
use starling_kv::{
    adapt::{Adapter, decode},
    events::KvEvent,
    hash::{HashSeed, block_hashes},
    index::Tier,
    tier::TierInventory,
};

use super::*;
use crate::{
    contract::{
        FinishReason, SamplingParams, SequenceDelta, SequenceFault, SequenceId, SequenceRequest, StopParams,
        SubmitError,
    },
    loader::{Activations, EngineKind, KernelChoice},
    simulated::SimulatedModel,
};

#[path = "../../../../tests/system/foreign.rs"]
mod foreign;

use foreign::{Foreign, Wrong, answer};

/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(30);

fn options(kind: EngineKind, path: Option<PathBuf>) -> ModelOptions {
    ModelOptions {
        kind,
        path,
        served_name: Some("ours".parse().expect("a name")),
        threads: 1,
        kv_bytes: 1 << 20,
        sequences_max: 4,
        waiting_max: 8,
        batch_tokens_max: 64,
        kernel: KernelChoice::Auto,
        activations: Activations::default(),
    }
}

/// A model whose tokenizer is at hand.
pub(super) fn simulated() -> SimulatedModel {
    SimulatedModel::load(&options(EngineKind::Simulated, None)).expect("a model")
}

/// A greedy one of at most 8 tokens, salted with nothing.
pub(super) fn request(id: u64, prompt: &[TokenId]) -> SequenceRequest {
    SequenceRequest {
        id: SequenceId(id),
        prompt: prompt.into(),
        answered: 0,
        hash_seed: HashSeed(5),
        sampling: SamplingParams::greedy(),
        stop: StopParams { tokens_max: 8, tokens_min: 0, token_ids: Vec::new(), ignore_eos: false },
        logprobs: None,
        priority: 0,
    }
}

/// A folder as Hugging Face has it, without weights.
fn folder() -> tempfile::TempDir {
    let (folder, model) = (tempfile::tempdir().expect("a folder"), simulated());
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).expect("written");
    write("tokenizer.json", model.bundle().tokenizer_json.clone());
    let config = json!({
        "architectures": ["SomethingElse"], "text_config": {"vocab_size": 258, "max_position_embeddings": 8_192},
        "eos_token_id": 257,
    });
    write("config.json", config.to_string());
    folder
}

/// An engine in front of a server, and what it said.
struct Rig {
    engine: Box<dyn Engine>,
    seed: HashSeed,
    woken: Receiver<()>,
    deltas: Vec<SequenceDelta>,
    events: Vec<KvEvent>,
    faults: HashMap<SequenceId, SequenceFault>,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(dialect: Dialect, server: &Foreign, (events, replay): (bool, bool)) -> Self {
        let folder = folder();
        let at = |address: std::net::SocketAddr| format!("tcp://{address}").parse().expect("an endpoint");
        let server = ServerOptions {
            dialect,
            url: server.url().parse().expect("an address"),
            events: events.then(|| at(server.events)),
            replay: replay.then(|| at(server.replay)),
            key_file: None,
        };
        let options = options(EngineKind::Sidecar(dialect), Some(folder.path().to_owned()));
        let model = SidecarModel::load(&options, &server).expect("a model");
        let mut engine = model.engine();
        let (ring, woken) = sync_channel(1);
        // A full channel wakes as well.
        engine.wake_by(Arc::new(move || ring.try_send(()).unwrap_or_default()));
        let seed = model.card().hash_seed;
        let (deltas, events, faults) = (Vec::new(), Vec::new(), HashMap::new());
        Self { engine, seed, woken, deltas, events, faults, _folder: folder }
    }

    /// One that is up.
    fn up(dialect: Dialect, server: &Foreign) -> Self {
        let mut rig = Self::new(dialect, server, (false, false));
        rig.until("it is up", |rig| rig.engine.available().is_ok());
        rig
    }

    fn step(&mut self) {
        let output = self.engine.step().expect("steps");
        for delta in &output.deltas {
            if let Some(fault) = self.engine.fault(delta.id) {
                self.faults.insert(delta.id, fault);
            }
        }
        self.deltas.extend(output.deltas);
        self.events.extend(output.events);
    }

    /// Steps whenever it is woken, until something holds.
    fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        loop {
            self.step();
            if holds(self) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}; {:?}", self.deltas);
            // What the server does is no news of the engine.
            self.woken.recv_timeout(Duration::from_millis(50)).unwrap_or_default();
        }
    }

    fn submit(&mut self, request: SequenceRequest) {
        let request = SequenceRequest { hash_seed: self.seed, ..request };
        self.engine.submit(request).expect("is taken");
    }

    fn ended(&self, id: u64) -> Option<FinishReason> {
        self.deltas.iter().filter(|delta| delta.id == SequenceId(id)).find_map(|delta| delta.finish)
    }

    fn tokens(&self, id: u64) -> Vec<u64> {
        let own = self.deltas.iter().filter(|delta| delta.id == SequenceId(id));
        own.flat_map(|delta| &delta.tokens).map(|token| u64::from(token.id)).collect()
    }

    /// Submits, and steps to the end of it.
    fn finish(&mut self, request: SequenceRequest) -> FinishReason {
        let id = request.id.0;
        self.submit(request);
        self.until("it has ended", |rig| rig.ended(id).is_some());
        self.ended(id).expect("has ended")
    }

    fn cached(&self, id: u64) -> Option<u32> {
        self.deltas.iter().filter(|delta| delta.id == SequenceId(id)).find_map(|delta| delta.cached_tokens)
    }
}

fn prompt(len: u64) -> Vec<TokenId> {
    (0..len).map(|at| ((at * 31 + len) % foreign::SPAN) as TokenId).collect()
}

fn wide(prompt: &[TokenId]) -> Vec<u64> {
    prompt.iter().copied().map(u64::from).collect()
}

#[test]
fn every_dialect_with_tokens_says_what_the_server_says() {
    for dialect in [Dialect::Vllm, Dialect::Sglang, Dialect::LlamaCpp] {
        let server = Foreign::start();
        let mut rig = Rig::up(dialect, &server);
        let prompt = prompt(40);
        for id in 1..=2 {
            assert_eq!(rig.finish(request(id, &prompt)), FinishReason::Length, "{dialect}");
            assert_eq!(rig.tokens(id), answer(&wide(&prompt), 8), "{dialect}");
        }
        assert_eq!((rig.cached(1), rig.cached(2)), (Some(0), Some(32)), "{dialect}");
        server.set(Wrong::Stop(3, 257));
        assert_eq!(rig.finish(request(3, &prompt)), FinishReason::Stop, "{dialect}");
        assert_eq!((rig.tokens(3).len(), rig.tokens(3)[3]), (4, 257), "{dialect}");
        let load = rig.engine.load();
        assert_eq!((load.running, load.waiting, load.prefill_tokens), (0, 0, 0), "{dialect}");
        assert_eq!((load.tokens_generated, load.tokens_cached), (20, 64), "{dialect}");
        rig.until("every answer is closed", |_| server.open() == 0);
    }
}

#[test]
fn sglang_may_give_only_what_is_new() {
    let server = Foreign::start();
    server.shared.repeats.store(0, std::sync::atomic::Ordering::SeqCst);
    let mut rig = Rig::up(Dialect::Sglang, &server);
    assert_eq!(rig.finish(request(1, &prompt(20))), FinishReason::Length);
    assert_eq!(rig.tokens(1), answer(&wide(&prompt(20)), 8));
}

#[test]
fn a_server_of_text_says_words_and_an_end_token_is_added() {
    let server = Foreign::start();
    server.set(Wrong::Stop(3, 257));
    let mut rig = Rig::up(Dialect::OpenAi, &server);
    let mut wish = request(1, &prompt(20));
    wish.stop.tokens_max = 40;
    assert_eq!(rig.finish(wish), FinishReason::Stop);
    let text = simulated();
    let words = Words::new(text.bundle(), &[257], 258).expect("a tokenizer");
    let mut wanted: Vec<u64> = wide(&words.tokens(" word").expect("tokens")).repeat(4);
    wanted.push(257);
    assert_eq!(rig.tokens(1), wanted);
    // A budget counts our tokens, of which a word has several.
    assert_eq!(rig.finish(request(2, &prompt(20))), FinishReason::Length);
    assert_eq!(rig.tokens(2), wanted[..8]);
    assert_eq!(server.calls()[0].1["model"], "theirs");
}

#[test]
fn a_continued_answer_is_sent_as_a_longer_prompt() {
    let server = Foreign::start();
    let mut rig = Rig::up(Dialect::Vllm, &server);
    let whole = answer(&wide(&prompt(20)), 8);
    let mut so_far = prompt(20);
    so_far.extend(whole[..5].iter().map(|token| *token as TokenId));
    let stop = StopParams { tokens_max: 3, tokens_min: 6, token_ids: Vec::new(), ignore_eos: false };
    rig.finish(SequenceRequest { answered: 5, stop, ..request(1, &so_far) });
    assert_eq!(rig.tokens(1), whole[5..]);
    assert_eq!(server.calls()[0].1["min_tokens"], 1);
    assert_eq!(rig.engine.load().tokens_recomputed, 25);
}

#[test]
fn stop_tokens_and_budgets_are_kept_where_the_server_goes_on() {
    let server = Foreign::start();
    let mut rig = Rig::up(Dialect::LlamaCpp, &server);
    let whole = answer(&wide(&prompt(20)), 8);
    let mut wish = request(1, &prompt(20));
    wish.stop.token_ids = vec![whole[2] as TokenId];
    assert_eq!(rig.finish(wish), FinishReason::Stop);
    assert_eq!(rig.tokens(1), whole[..3]);
    rig.until("the call is dropped", |_| server.open() == 0);
}

#[test]
fn log_probabilities_come_with_their_tokens() {
    let server = Foreign::start();
    let mut rig = Rig::up(Dialect::Vllm, &server);
    rig.finish(SequenceRequest { logprobs: Some(2), ..request(1, &prompt(5)) });
    let token = rig.deltas.iter().find_map(|delta| delta.tokens.first()).expect("a token");
    assert_eq!((token.logprob, token.top[0].id), (Some(-0.5), token.id));
    assert_eq!((token.top.len(), token.top[1].id), (2, 1));
}

#[test]
fn every_fault_of_a_server_is_a_typed_end() {
    let server = Foreign::start();
    let mut rig = Rig::up(Dialect::Vllm, &server);
    let faults = [
        (Wrong::Status(400), "as you wished", 0),
        (Wrong::Status(503), "as you wished", 1),
        (Wrong::Status(429), "429", 1),
        (Wrong::Status(500), "status 500", 2),
        (Wrong::Cut(0), "vllm at http", 2),
        (Wrong::Cut(3), "broke", 2),
        (Wrong::Malformed(2), "not JSON", 2),
        (Wrong::Token(900), "--model", 2),
    ];
    for (id, (wrong, text, kind)) in faults.into_iter().enumerate() {
        server.set(wrong.clone());
        assert_eq!(rig.finish(request(id as u64, &prompt(20))), FinishReason::Error, "{wrong:?}");
        let fault = &rig.faults[&SequenceId(id as u64)];
        let found = match fault {
            SequenceFault::Refused(_) => 0,
            SequenceFault::Busy(_) => 1,
            SequenceFault::Gone(_) => 2,
        };
        assert!(fault.to_string().contains(text) && found == kind, "{wrong:?}: {fault:?}");
        rig.until("it is up", |rig| rig.engine.available().is_ok());
    }
    // What the server had sent and the break did not take along.
    assert!((1..=3).contains(&rig.tokens(5).len()));
    server.set(Wrong::Nothing);
    assert_eq!(rig.finish(request(99, &prompt(20))), FinishReason::Length);
}

#[test]
fn a_cancelled_sequence_ends_its_call() {
    let server = Foreign::start();
    server.set(Wrong::Hang(2));
    let mut rig = Rig::up(Dialect::Vllm, &server);
    rig.submit(request(1, &prompt(20)));
    rig.until("it speaks", |rig| rig.tokens(1).len() == 2);
    assert_eq!((server.open(), rig.engine.load().running), (1, 1));
    assert!(rig.engine.cancel(SequenceId(1)) && !rig.engine.cancel(SequenceId(1)));
    rig.until("the server is told", |_| server.open() == 0);
    assert_eq!((rig.ended(1), rig.engine.load().running), (None, 0));
}

#[test]
fn what_is_too_much_waits_here_by_priority() {
    let server = Foreign::start();
    server.set(Wrong::Hang(0));
    let mut rig = Rig::up(Dialect::Vllm, &server);
    for id in 0..12 {
        let priority = if id == 11 { -1 } else { 0 };
        rig.submit(SequenceRequest { priority, ..request(id, &prompt(id + 1)) });
        rig.step();
    }
    let refused = rig.engine.submit(SequenceRequest { hash_seed: rig.seed, ..request(50, &prompt(3)) });
    assert_eq!(refused, Err(SubmitError::Full { waiting: 8, limit: 8 }));
    let load = rig.engine.load();
    assert_eq!((load.running, load.waiting, load.prefill_tokens), (4, 8, 78));
    rig.until("four are sent", |_| server.calls().len() == 4);
    assert!(rig.engine.cancel(SequenceId(0)) && rig.engine.cancel(SequenceId(9)));
    rig.until("the most urgent one is next", |_| server.calls().len() == 5);
    assert_eq!(server.calls()[4].1["prompt"].as_array().map(Vec::len), Some(12));
}

#[test]
fn what_a_server_cannot_be_given_is_refused() {
    let server = Foreign::start();
    let mut rig = Rig::up(Dialect::LlamaCpp, &server);
    let seed = rig.seed;
    let of = |request: SequenceRequest| SequenceRequest { hash_seed: seed, ..request };
    let salted = request(1, &prompt(3));
    let error = SubmitError::Unsupported { param: "cache_salt", engine: "llama.cpp" };
    assert_eq!(rig.engine.submit(salted), Err(error));
    assert_eq!(rig.engine.submit(of(request(1, &[]))), Err(SubmitError::Empty));
    assert_eq!(rig.engine.submit(of(request(1, &[258]))), Err(SubmitError::UnknownToken { id: 258, vocab: 258 }));
    let long = rig.engine.submit(of(request(1, &prompt(8_192))));
    assert_eq!(long, Err(SubmitError::TooLong { prompt: 8_192, context: 8_192 }));
    let mut rig = Rig::up(Dialect::Vllm, &server);
    let long = rig.engine.submit(SequenceRequest { hash_seed: rig.seed, ..request(1, &prompt(4_096)) });
    assert_eq!(long, Err(SubmitError::TooLong { prompt: 4_096, context: 4_096 }), "the server's own limit");
    rig.until("it says how large it is", |rig| rig.engine.load().blocks_total == 512);
    assert_eq!((rig.engine.load().blocks_pinned, rig.engine.capabilities().limits.kv_blocks), (256, 512));
}

#[test]
fn a_server_that_goes_takes_its_sequences_along_and_comes_back() {
    let server = Foreign::start();
    server.set(Wrong::Hang(2));
    let mut rig = Rig::up(Dialect::Vllm, &server);
    rig.submit(request(1, &prompt(20)));
    rig.until("it speaks", |rig| rig.tokens(1).len() == 2);
    let ports = server.ports();
    drop(server);
    rig.until("its answer has failed", |rig| rig.ended(1) == Some(FinishReason::Error));
    assert!(matches!(rig.faults[&SequenceId(1)], SequenceFault::Gone(_)));
    rig.until("it is away", |rig| rig.engine.available().is_err());
    let away = rig.engine.submit(SequenceRequest { hash_seed: rig.seed, ..request(2, &prompt(3)) });
    assert!(matches!(away, Err(SubmitError::Away(_))), "{away:?}");
    let server = Foreign::at(ports);
    rig.until("it is back", |rig| rig.engine.available().is_ok());
    assert_eq!(rig.finish(request(3, &prompt(20))), FinishReason::Length);
    server.set(Wrong::Ill);
    rig.until("one that is not well is away, too", |rig| rig.engine.available().is_err());
}

/// Our names of a prompt's blocks.
fn names(rig: &Rig, prompt: &[TokenId]) -> Vec<starling_ids::BlockHash> {
    block_hashes(rig.seed, prompt, 16)
}

fn holds(rig: &Rig, prompt: &[TokenId]) -> bool {
    let listed: Vec<_> = rig.engine.inventory().into_iter().map(|(_, hash)| hash).collect();
    names(rig, prompt).iter().all(|name| listed.contains(name))
}

#[test]
fn its_kv_events_tell_which_blocks_it_has() {
    let server = Foreign::start();
    let mut rig = Rig::new(Dialect::Vllm, &server, (true, true));
    let (first, second) = (prompt(40), prompt(70));
    rig.until("it is up", |rig| rig.engine.available().is_ok());
    // Before anybody listens, perhaps: the replay has it.
    rig.finish(request(1, &first));
    rig.until("the first prompt is known", |rig| holds(rig, &first));
    server.shared.lose.store(2, std::sync::atomic::Ordering::SeqCst);
    rig.until("somebody listens", |_| server.listeners() == 1);
    rig.finish(request(2, &second));
    rig.until("what was lost on the way was sent again", |rig| holds(rig, &second) && holds(rig, &first));
    assert!(!rig.events.contains(&KvEvent::Cleared));
    assert_eq!(rig.engine.load().blocks_cached, 6);
    assert_eq!(rig.engine.tier_inventory(), Vec::<TierInventory>::new());
    server.clear();
    rig.until("all is forgotten", |rig| rig.engine.inventory().is_empty());
    assert!(rig.events.contains(&KvEvent::Cleared));
}

#[test]
fn without_a_replay_a_gap_forgets_and_a_lost_connection_does() {
    let server = Foreign::start();
    let mut rig = Rig::new(Dialect::Vllm, &server, (true, false));
    rig.until("somebody listens", |rig| server.listeners() == 1 && rig.engine.available().is_ok());
    rig.finish(request(1, &prompt(40)));
    rig.until("it is known", |rig| holds(rig, &prompt(40)));
    server.shared.lose.store(1, std::sync::atomic::Ordering::SeqCst);
    rig.finish(request(2, &prompt(20)));
    rig.finish(request(3, &prompt(50)));
    rig.until("only what came after the gap is known", |rig| holds(rig, &prompt(50)) && !holds(rig, &prompt(40)));
    drop(server);
    rig.until("nothing is known of one that is gone", |rig| rig.engine.inventory().is_empty());
}

#[test]
fn what_cannot_be_read_counts_as_lost() {
    let server = Foreign::start();
    let mut rig = Rig::new(Dialect::Vllm, &server, (true, false));
    rig.until("somebody listens", |rig| server.listeners() == 1 && rig.engine.available().is_ok());
    server.shared.tell_bytes(b"nonsense".to_vec());
    rig.finish(request(1, &prompt(40)));
    rig.until("what comes after it is known", |rig| holds(rig, &prompt(40)));
}

#[test]
fn a_recorded_stream_of_vllm_is_named_as_routers_name_it() {
    let server = Foreign::start();
    let mut rig = Rig::new(Dialect::Vllm, &server, (true, false));
    rig.until("somebody listens", |rig| server.listeners() == 1 && rig.engine.available().is_ok());
    let (mut adapter, mut told) = (Adapter::new(rig.seed, 16, 1_000), Vec::new());
    for payload in recorded() {
        for event in decode(&payload).expect("an event").events {
            adapter.apply(&event, &mut told).expect("fits");
        }
        server.shared.tell_bytes(payload);
    }
    let wanted: BTreeSet<_> = adapter.blocks(Tier::Device).collect();
    assert!(wanted.len() >= 20);
    rig.until("its blocks are known", |rig| {
        rig.engine.inventory().into_iter().map(|(_, hash)| hash).collect::<BTreeSet<_>>() == wanted
    });
}

/// The payloads of the recording beside the adapter: for each message how many frames, for each frame its length and bytes.
fn recorded() -> Vec<Vec<u8>> {
    fn take<'a>(rest: &mut &'a [u8], len: usize) -> &'a [u8] {
        let (taken, left) = rest.split_at(len);
        *rest = left;
        taken
    }
    fn number(rest: &mut &[u8]) -> usize {
        u32::from_le_bytes(take(rest, 4).try_into().expect("four bytes")) as usize
    }
    let mut rest = &include_bytes!("../../../../kv/src/adapt/vllm_kv_events.bin")[..];
    let mut payloads = Vec::new();
    while !rest.is_empty() {
        let mut payload = Vec::new();
        for _ in 0..number(&mut rest) {
            let len = number(&mut rest);
            payload = take(&mut rest, len).to_vec();
        }
        payloads.push(payload);
    }
    payloads
}
