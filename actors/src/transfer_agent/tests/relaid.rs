//! Workers whose engines lay the numbers of their blocks out in different orders give each other blocks: the one that takes
//! them puts them into its own order.
//!
//! The other order comes from [`Relaid`]: any engine behind a memory of its own, in which its blocks lie as another engine's
//! would. What it lends is written there first, and what came is read from there; the engine itself computes as ever.

use std::{path::PathBuf, time::Duration};

use starling_engine::{
    Capabilities, Engine, ModelCard, SequenceId, SequenceRequest, SubmitError, TokenizerBundle,
    backend::{BlockSlot, KvMemory},
    scheduler::{Adoption, Carried, HandedOver},
};
use starling_ids::BlockHash;
use starling_kv::{
    hash::HashSeed,
    layout::{KvLayout, KvOrder, Piece, convert},
    transport::Region,
};

use super::*;

/// A model whose engines lay their blocks out in another order.
struct Relaid {
    inner: Arc<dyn LoadedModel>,
    order: KvOrder,
}

impl LoadedModel for Relaid {
    fn card(&self) -> &ModelCard {
        self.inner.card()
    }

    fn bundle(&self) -> &TokenizerBundle {
        self.inner.bundle()
    }

    fn engine(&self) -> Box<dyn Engine> {
        let (inner, theirs) = (self.inner.engine(), self.inner.layout().expect("it says"));
        let memory = inner.memory().expect("it can be reached");
        let region = Region::shared("relaid", memory.region.len()).expect("memory");
        let ours = self.layout().expect("said above");
        let capabilities = Capabilities { layout_digest: ours.digest(), ..inner.capabilities().clone() };
        let outside = KvMemory { region, block_bytes: memory.block_bytes };
        Box::new(Behind { inner, capabilities, inside: (memory, theirs), outside: (outside, ours) })
    }

    fn layout(&self) -> Option<KvLayout> {
        self.inner.layout().map(|layout| KvLayout { order: self.order, ..layout })
    }

    fn numbers(&self) -> u64 {
        self.inner.numbers()
    }
}

/// An engine behind a memory of another order.
struct Behind {
    inner: Box<dyn Engine>,
    capabilities: Capabilities,
    inside: (KvMemory, KvLayout),
    outside: (KvMemory, KvLayout),
}

fn copy((from, from_layout): &(KvMemory, KvLayout), (to, to_layout): &(KvMemory, KvLayout), slots: &[BlockSlot]) {
    let mut bytes = (vec![0; from_layout.block_bytes()], vec![0; to_layout.block_bytes()]);
    for slot in slots {
        let at = u64::from(slot.0) * from.block_bytes;
        from.region.read(at, &mut bytes.0).expect("inside");
        let source = Piece { layout: from_layout, bytes: bytes.0.as_slice(), token: 0 };
        let mut target = Piece { layout: to_layout, bytes: bytes.1.as_mut_slice(), token: 0 };
        convert(&source, &mut target, from_layout.block_tokens as usize).expect("converts");
        to.region.write(at, &bytes.1).expect("inside");
    }
}

impl Engine for Behind {
    starling_engine::hand_on! {
        submit cancel step load inventory export_block import_block give_back reserve take_events clear_cache
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Option<KvMemory> {
        Some(self.outside.0.clone())
    }

    fn lend(&mut self, hashes: &[BlockHash], tokens: &[TokenId], from: usize) -> Vec<BlockSlot> {
        let slots = self.inner.lend(hashes, tokens, from);
        copy(&self.inside, &self.outside, &slots);
        slots
    }

    fn adopt(&mut self, seed: HashSeed, tokens: &[TokenId], first: usize, slots: &[BlockSlot]) -> Adoption {
        copy(&self.outside, &self.inside, slots);
        self.inner.adopt(seed, tokens, first, slots)
    }

    fn lend_live(&mut self, id: SequenceId, from: usize) -> Option<Vec<BlockSlot>> {
        let slots = self.inner.lend_live(id, from)?;
        copy(&self.inside, &self.outside, &slots);
        Some(slots)
    }

    fn hand_over(&mut self, id: SequenceId, from: usize) -> Option<HandedOver> {
        let over = self.inner.hand_over(id, from)?;
        copy(&self.inside, &self.outside, &over.slots);
        Some(over)
    }

    fn take_over(&mut self, request: SequenceRequest, carried: Carried) -> Result<(), SubmitError> {
        copy(&self.outside, &self.inside, &carried.came);
        self.inner.take_over(request, carried)
    }
}

/// Two nodes of one model: the first with a router, the second with its blocks in another order.
async fn two(name: &str, model: &Arc<dyn LoadedModel>, order: KvOrder) -> (Rig, Rig) {
    let first = Rig::with_model(&format!("{name}-one"), model.clone(), 1).await;
    let seeds = vec![first.mesh.address().to_string()];
    let other = Relaid { inner: model.clone(), order };
    assert_ne!(other.layout(), model.layout());
    let second = Rig::join_model(&format!("{name}-two"), Arc::new(other), 1, seeds).await;
    eventually("both heard", || first.node.heard() == 2).await;
    (first, second)
}

fn prefilled(rig: &Rig) -> u64 {
    let ports = rig.node.workers().iter().filter_map(|worker| worker.seat.now());
    ports.map(|port| port.load.borrow().load.tokens_prefilled).sum()
}

fn request(model: &Arc<dyn LoadedModel>, kind: TokenId, tokens: u32, salt: &str) -> GenerateSpec {
    GenerateSpec { model: model.card().id.clone(), ..long(kind, tokens, salt) }
}

/// Prompts are computed by one and answered by the other, in both directions; none is computed twice.
async fn split_both_ways(first: &Rig, second: &Rig, model: &Arc<dyn LoadedModel>) {
    let mut whole = Vec::new();
    for kind in 0..4 {
        whole.push(answer(first, request(model, kind, 500 + kind * 13, "whole")).await.0);
    }
    for (turn, duties) in [[Role::Prefill, Role::Decode], [Role::Decode, Role::Prefill]].into_iter().enumerate() {
        for (rig, duty) in [first, second].into_iter().zip(duties) {
            rig.node.workers()[0].set_duty(duty);
        }
        let (prefills, decodes) = if turn == 0 { (first, second) } else { (second, first) };
        let mut split = 0;
        // The router looks now and then; until it does, requests are not split.
        for at in 0..100 {
            let salt = format!("split-{turn}-{at}");
            let before = prefilled(decodes);
            let kind = at % 4;
            let (text, worker, receipt) = answer(first, request(model, kind, 500 + kind * 13, &salt)).await;
            assert_eq!(text, whole[kind as usize], "prompt {kind}, turn {turn}");
            let Some((_, source)) = receipt.source.filter(|(decode, _)| *decode == worker) else { continue };
            if &source.worker.node == prefills.mesh.node() && &worker.node == decodes.mesh.node() {
                empty(decodes).await;
                assert!(prefilled(decodes) - before < 16, "its prompt came as blocks");
                split += 1;
            }
            if split == 4 {
                break;
            }
        }
        assert_eq!(split, 4, "turn {turn}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_09_blocks_of_another_order_are_converted_by_the_one_that_takes_them() {
    let model = simulated();
    let (first, second) = two("relaid", &model, KvOrder::LayerHeadKeysTransposed).await;
    split_both_ways(&first, &second, &model).await;
    empty(&first).await;
    within("it leaves", second.end()).await;
    first.end().await;
}

/// Running requests of a worker that drains go on at one of another order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_requests_move_to_a_worker_of_another_order() {
    let model = simulated();
    let (first, second) = two("relaid-move", &model, KvOrder::LayerHeadKeysTransposed).await;
    let spec = |kind: TokenId, salt: &str| {
        let mut spec = request(&model, kind, 300 + kind * 11, salt);
        spec.stop.tokens_max = 250;
        spec
    };
    let whole = async |kind| text(&first.complete(spec(kind, "whole")).await.expect("an answer"));
    let whole = futures::future::join_all((0..6).map(whole)).await;
    let streams = futures::future::join_all((0..6).map(|kind| first.generate(spec(kind, "moved")))).await;
    let streams: Vec<_> = streams.into_iter().map(|stream| stream.expect("accepted")).collect();
    let moved = streams.iter().filter(|stream| &stream.worker.node == second.mesh.node()).count();
    assert!(moved > 0, "the test is about those that move");
    second.node.workers()[0].set_duty(Role::Prefill);
    let texts = futures::future::join_all(streams.into_iter().map(all)).await;
    for (kind, frames) in texts.into_iter().enumerate() {
        assert_eq!(text(&frames.expect("a whole answer")), whole[kind], "request {kind}");
    }
    let recomputed: u64 = [&first, &second]
        .iter()
        .flat_map(|rig| rig.node.workers().iter().filter_map(|worker| worker.seat.now()))
        .map(|port| port.load.borrow().load.tokens_recomputed)
        .sum();
    assert_eq!(recomputed, 0, "moved with their blocks");
    empty(&first).await;
    within("it leaves", second.end()).await;
    first.end().await;
}

/// The same with the embedded engine and the real model, where it is at hand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_09_the_real_models_blocks_are_converted_and_its_text_is_the_same() {
    let given = std::env::var_os("STARLING_TEST_MODEL").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let path = given.unwrap_or_else(|| home.join(".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf"));
    if !path.exists() {
        return;
    }
    let options = ModelOptions {
        kind: EngineKind::Embedded,
        path: Some(path),
        served_name: None,
        threads: 1,
        kv_bytes: 128 << 20,
        sequences_max: 8,
        waiting_max: 64,
        batch_tokens_max: 256,
        kernel: KernelChoice::Auto,
        activations: starling_engine::Activations::default(),
    };
    let model = starling_engine::load(&options, &mut |_| {}).expect("loads");
    let (first, second) = two("relaid-real", &model, KvOrder::LayerKvTokenHeadDim).await;
    let spec = |salt: &str| {
        let mut spec = request(&model, 3, 300, salt);
        spec.stop.tokens_max = 12;
        spec
    };
    let whole = tokio::time::timeout(Duration::from_secs(120), first.complete(spec("whole"))).await;
    let whole = text(&whole.expect("in time").expect("an answer"));
    assert_eq!(whole.len(), 12);
    first.node.workers()[0].set_duty(Role::Prefill);
    second.node.workers()[0].set_duty(Role::Decode);
    let mut split = 0;
    for at in 0..40 {
        let before = prefilled(&second);
        let (text, worker, receipt) = answer(&first, spec(&format!("split-{at}"))).await;
        assert_eq!(text, whole);
        if receipt.source.is_some() && &worker.node == second.mesh.node() {
            empty(&second).await;
            assert!(prefilled(&second) - before < 16, "its prompt came as blocks");
            split += 1;
        }
        if split == 2 {
            break;
        }
    }
    assert_eq!(split, 2);
    empty(&first).await;
    within("it leaves", second.end()).await;
    first.end().await;
}
