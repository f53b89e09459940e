mod rows;

use starling_engine::{EngineKind, KernelChoice, LoadedModel, ModelOptions, StopParams, simulated::SimulatedModel};
use starling_ids::{ModelId, TokenId, WorkerId};
use starling_kv::hash::block_hashes;

use crate::{
    generate::{GenerateFrame, GenerateSpec},
    route::{receipt::Receipt, split::Role},
    testing::{Rig, all, eventually, spec, within},
};
use std::sync::Arc;

mod moving;
mod raised;
mod relaid;
mod worth;

fn simulated() -> Arc<dyn LoadedModel> {
    let options = ModelOptions {
        kind: EngineKind::Simulated,
        path: None,
        served_name: None,
        threads: 1,
        kv_bytes: 64 << 20,
        sequences_max: 8,
        waiting_max: 64,
        batch_tokens_max: 256,
        kernel: KernelChoice::Auto,
        activations: starling_engine::Activations::default(),
    };
    Arc::new(SimulatedModel::load(&options).expect("a model"))
}

/// A long prompt; `salt` keeps the caches of two runs of it apart.
fn long(kind: TokenId, tokens: u32, salt: &str) -> GenerateSpec {
    let prompt = (0..tokens).map(|at| (kind * 37 + at * at) % 200).collect();
    let stop = StopParams { tokens_max: 40, tokens_min: 0, token_ids: Vec::new(), ignore_eos: true };
    let model = ModelId::new("simulated").expect("name");
    GenerateSpec { model, stop, cache_salt: Some(salt.to_owned()), ..spec(prompt, 40) }
}

fn text(frames: &[GenerateFrame]) -> Vec<TokenId> {
    frames.iter().flat_map(|frame| frame.tokens.iter().map(|token| token.id)).collect()
}

/// One answer, by whom, and why there.
async fn answer(rig: &Rig, spec: GenerateSpec) -> (Vec<TokenId>, WorkerId, Receipt) {
    let call = rig.call(spec, std::time::Duration::from_secs(20));
    let request = call.request;
    let stream = rig.node.client().generate(call).await.expect("accepted");
    let worker = stream.worker.clone();
    let frames = all(stream).await.expect("an answer");
    let finishes = frames.iter().filter(|frame| frame.finish.is_some()).count();
    assert_eq!(finishes, 1, "one end");
    let receipts = rig.node.explain(request).await;
    (text(&frames), worker, receipts.last().cloned().expect("a receipt"))
}

/// Gives the workers of a node their roles, and waits until its router knows them and hears how blocks come to them.
async fn roles(rig: &Rig, others: &[&Rig], roles: &[Role]) {
    let workers = others.iter().flat_map(|rig| rig.node.workers()).collect::<Vec<_>>();
    for (worker, role) in rig.node.workers().iter().chain(workers).zip(roles) {
        worker.set_duty(*role);
    }
    // Decided by the router at its next look; a split request says that it has looked.
    for at in 0..100 {
        let (_, _, receipt) = answer(rig, long(90 + at, 400, "warm")).await;
        if receipt.source.is_some() {
            return;
        }
    }
    panic!("no request was ever split");
}

fn tickets(rig: &Rig) -> (usize, usize) {
    let faces = rig.node.workers().iter().filter_map(|worker| worker.seat.now());
    let open = faces.filter_map(|port| port.kv.get().map(|kv| kv.open_tickets()));
    open.fold((0, 0), |sum, open| (sum.0 + open.0, sum.1 + open.1))
}

/// Nothing is pinned, reserved or under a ticket.
async fn empty(rig: &Rig) {
    rig.at_rest().await;
    eventually("no tickets", || tickets(rig) == (0, 0)).await;
    let pinned = || {
        let ports = rig.node.workers().iter().filter_map(|worker| worker.seat.now());
        ports.map(|port| port.load.borrow().load.blocks_pinned).sum::<u32>()
    };
    eventually("no pins", || pinned() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_answers_are_those_of_one_worker() {
    let rig = Rig::with_model("split-equal", simulated(), 2).await;
    let mut whole = Vec::new();
    for kind in 0..6 {
        whole.push(answer(&rig, long(kind, 700 + kind * 13, "whole")).await.0);
    }
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    for (kind, whole) in (0..6).zip(&whole) {
        let (split, worker, receipt) = answer(&rig, long(kind, 700 + kind * 13, "split")).await;
        assert_eq!(split, *whole, "prompt {kind}");
        assert_eq!((worker.index, receipt.source.map(|(_, source)| source.worker.index)), (1, Some(0)));
    }
    let decode = rig.node.workers()[1].seat.now().expect("alive");
    let prefilled = decode.load.borrow().load;
    empty(&rig).await;
    let after = decode.load.borrow().load;
    assert!(after.tokens_cached > after.tokens_prefilled, "{prefilled:?}: most of its prompts came as blocks");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_split_requests_at_once_and_clients_that_leave() {
    let rig = Rig::with_model("split-many", simulated(), 2).await;
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    let whole: Vec<_> = futures::future::join_all((0..12).map(|kind| answer(&rig, long(kind, 600, "many")))).await;
    let mut left = Vec::new();
    for kind in 20..32 {
        left.push(rig.generate(long(kind, 900, "left")).await.expect("accepted"));
        if kind % 2 == 0 {
            drop(left.pop());
        }
        tokio::task::yield_now().await;
    }
    drop(left);
    empty(&rig).await;
    for (kind, (text, _, _)) in (0..12).zip(whole) {
        assert_eq!(answer(&rig, long(kind, 600, "again")).await.0, text);
    }
    empty(&rig).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_02_a_peer_whose_memory_is_new_is_reached_anew() {
    let rig = Rig::with_model("split-restart", simulated(), 2).await;
    let whole = answer(&rig, long(1, 800, "whole")).await.0;
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    for path in ["workers/0", "workers/1", "workers/transfer"] {
        let salt = path.replace('/', "-");
        // While it dies: whole, on whatever worker.
        let (during, panicked) = futures::join!(answer(&rig, long(1, 800, &salt)), rig.mesh.book().inject_panic(path));
        assert!(panicked);
        assert_eq!(during.0, whole, "while {path} dies");
        eventually("it lives again", || rig.restarts(path) == 1).await;
        eventually("both serve", || rig.node.client().models().first().is_some_and(|model| model.workers == 2)).await;
        let (after, ..) = answer(&rig, long(1, 800, &format!("{salt}-after"))).await;
        assert_eq!(after, whole, "after {path} died");
    }
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    empty(&rig).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_cross_between_nodes() {
    let router = Rig::with_model("split-one", simulated(), 1).await;
    let seeds = vec![router.mesh.address().to_string()];
    let other = Rig::join_model("split-two", simulated(), 1, seeds).await;
    eventually("both heard", || router.node.heard() == 2).await;
    let whole = answer(&router, long(5, 900, "whole")).await.0;
    roles(&router, &[&other], &[Role::Prefill, Role::Decode]).await;
    let (split, worker, receipt) = answer(&router, long(5, 900, "split")).await;
    assert_eq!(split, whole);
    assert_eq!(&worker.node, other.mesh.node());
    assert_eq!(receipt.source.map(|(_, source)| source.worker.node), Some(router.mesh.node().clone()));
    empty(&router).await;
    empty(&other).await;
    within("it leaves", other.end()).await;
    router.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_is_pulled_from_a_peer_and_the_text_is_the_same() {
    let router = Rig::with_model("pull-one", simulated(), 1).await;
    let seeds = vec![router.mesh.address().to_string()];
    let other = Rig::join_model("pull-two", simulated(), 1, seeds).await;
    eventually("both heard", || router.node.heard() == 2).await;
    let whole = answer(&router, long(7, 900, "whole")).await.0;
    let (first, holder, _) = answer(&router, long(7, 900, "pull")).await;
    let card = simulated().card().clone();
    let prompt = long(7, 900, "pull").prompt;
    let chain = block_hashes(card.hash_seed.scoped(None, Some("pull")), &prompt, card.block_tokens as usize);
    eventually("indexed", || router.node.hit_blocks(&holder, &chain) == chain.len()).await;
    // More at once than the one that has it all has places for.
    let all = futures::future::join_all((0..24).map(|_| answer(&router, long(7, 900, "pull")))).await;
    let mut pulled = 0;
    for (text, worker, receipt) in all {
        assert_eq!((&text, &text), (&first, &whole));
        if let Some((to, source)) = receipt.source {
            assert_eq!((source.compute, &source.worker, &worker), (false, &holder, &to));
            pulled += 1;
        }
    }
    assert!(pulled > 0, "the other one took its blocks");
    let prefilled = |rig: &Rig| {
        let ports = rig.node.workers().iter().filter_map(|worker| worker.seat.now());
        ports.map(|port| port.load.borrow().load.tokens_prefilled).sum::<u64>()
    };
    let without = if *router.mesh.node() == holder.node { &other } else { &router };
    empty(without).await;
    let computed = prefilled(without);
    assert!(computed < 1_800, "{computed} tokens: what was pulled was not computed");
    empty(&router).await;
    empty(&other).await;
    within("it leaves", other.end()).await;
    router.end().await;
}
