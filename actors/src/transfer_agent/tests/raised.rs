//! Blocks that a peer no longer has on its device, but in its host's memory or on its disk.
//!
//! The simulated engine's answers depend on the bytes of its blocks, so a wrong block is a wrong text.

use std::{
    io,
    path::Path,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use starling_cluster::stream::Context;
use starling_engine::EngineLoad;
use starling_ids::RequestId;
use starling_kv::tier::{BlockFile, DiskOptions, TierOptions, TierStats};

use super::*;
use crate::{
    generate::{KvSource, WorkerRequest},
    names,
    tree::{NodeOptions, WorkerRole},
    worker::Port,
};

/// Whole blocks of [`TOKENS`] tokens.
const BLOCKS: u32 = 31;
const TOKENS: u32 = 500;
/// What a block takes on disk, and more than enough for those of this test.
const DISK_BYTES: u64 = 4_096 * 512;

/// Engines with room for two prompts.
fn small() -> Arc<dyn LoadedModel> {
    let options = ModelOptions {
        kind: EngineKind::Simulated,
        path: None,
        served_name: None,
        threads: 1,
        kv_bytes: 0,
        sequences_max: 4,
        waiting_max: 64,
        batch_tokens_max: 256,
        kernel: KernelChoice::Auto,
        activations: starling_engine::Activations::default(),
    };
    Arc::new(SimulatedModel::load(&options).expect("a model"))
}

/// A node with a router and a worker that takes, and one with a worker that has tiers and gives.
struct Two {
    taker: Rig,
    giver: Rig,
}

impl Two {
    async fn new(name: &str, tiers: TierOptions) -> Self {
        let taker = Rig::with_model(&format!("{name}-taker"), small(), 1).await;
        let seeds = vec![taker.mesh.address().to_string()];
        let role = WorkerRole { model: small(), engine: "simulated".to_owned(), count: 1, duty: Role::Both };
        let options = NodeOptions { worker: Some(role), tiers, ..NodeOptions::default() };
        let giver = Rig::begin(&format!("{name}-giver"), options, seeds).await;
        within("ready", giver.node.ready()).await;
        eventually("both heard", || taker.node.heard() == 2).await;
        Self { taker, giver }
    }

    fn port(rig: &Rig) -> Arc<Port> {
        rig.node.workers()[0].seat.now().expect("alive")
    }

    fn load(rig: &Rig) -> EngineLoad {
        Self::port(rig).load.borrow().load
    }

    /// The giver's tiers.
    fn stats(&self) -> TierStats {
        Self::port(&self.giver).tiers.borrow().expect("it has tiers")
    }

    /// A prompt that was computed at the giver and has left its device since, and its text.
    async fn left(&self, kind: TokenId, salt: &str) -> (GenerateSpec, Vec<TokenId>) {
        let spec = long(kind, TOKENS, salt);
        let (whole, computed) = ask(&self.giver, &spec, None).await;
        assert_eq!(computed, u64::from(TOKENS), "new to it");
        let card = small().card().clone();
        let chain = block_hashes(card.hash_seed.scoped(None, Some(salt)), &spec.prompt, card.block_tokens as usize);
        let holder = self.giver.node.workers()[0].id.clone();
        eventually("indexed", || self.taker.node.hit_blocks(&holder, &chain) == chain.len()).await;
        // Two more prompts leave no room for it on the device.
        for other in [1, 2] {
            ask(&self.giver, &long(kind + other, TOKENS, salt), None).await;
        }
        eventually("it left the device", || self.taker.node.hit_blocks(&holder, &chain) == 0).await;
        eventually("it is below", || {
            let stats = self.stats();
            stats.leaving == 0 && stats.host.blocks + stats.disk.blocks >= u64::from(BLOCKS)
        })
        .await;
        (spec, whole)
    }

    /// The same prompt at the taker, with the giver's blocks; its text, and the prompt tokens that it computed.
    async fn pulled(&self, spec: &GenerateSpec) -> (Vec<TokenId>, u64) {
        let worker = self.giver.node.workers()[0].id.clone();
        let incarnation = self.giver.mesh.incarnation();
        let source =
            KvSource { worker, incarnation, compute: false, blocks: BLOCKS, host: BLOCKS, disk: 0, reading_ms: 0 };
        ask(&self.taker, spec, Some(source)).await
    }

    async fn end(self) {
        empty(&self.taker).await;
        empty(&self.giver).await;
        eventually("nothing is read", || self.stats().reading == 0).await;
        within("it leaves", self.giver.end()).await;
        self.taker.end().await;
    }
}

/// One request at the door of a node's worker; its text, and the prompt tokens that the worker computed.
async fn ask(rig: &Rig, spec: &GenerateSpec, source: Option<KvSource>) -> (Vec<TokenId>, u64) {
    let (worker, incarnation) = (rig.node.workers()[0].id.clone(), rig.mesh.incarnation());
    let request = WorkerRequest { spec: spec.clone(), worker, incarnation, source, moves: None, may_move: false };
    let body = rmp_serde::to_vec(&request).expect("encodes");
    let context = Context::new(RequestId(rand::random()), Duration::from_secs(60));
    let before = Two::load(rig).tokens_prefilled;
    let door = names::worker_generate(0);
    let opening = rig.mesh.open(rig.mesh.node(), incarnation, &door, context, body.into());
    let mut opened = within("accepted", opening).await.expect("accepted");
    let mut frames: Vec<GenerateFrame> = Vec::new();
    while let Some(bytes) = within("a frame", opened.rx.recv()).await {
        frames.push(rmp_serde::from_slice(&bytes.expect("well")).expect("a frame"));
    }
    eventually("it ended", || Two::load(rig).running == 0).await;
    (text(&frames), Two::load(rig).tokens_prefilled - before)
}

fn host() -> TierOptions {
    TierOptions { host_bytes: 1 << 20, disk: None }
}

fn disk(folder: &Path, file: Option<Arc<dyn BlockFile>>) -> TierOptions {
    let disk = DiskOptions { folder: folder.to_owned(), bytes: DISK_BYTES, file };
    TierOptions { host_bytes: 0, disk: Some(disk) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_in_a_peers_host_memory_are_read_there_and_pulled() {
    let two = Two::new("raised-host", host()).await;
    for (at, salt) in ["one", "two", "three"].into_iter().enumerate() {
        let (spec, whole) = two.left(10 * at as u32, salt).await;
        let before = two.stats().host.fetched;
        let (text, computed) = two.pulled(&spec).await;
        assert_eq!(text, whole);
        assert_eq!(computed, u64::from(TOKENS - BLOCKS * 16), "only what is in no whole block");
        eventually("counted", || two.stats().host.fetched == before + u64::from(BLOCKS)).await;
    }
    two.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_on_a_peers_disk_are_read_there_and_pulled() {
    let folder = tempfile::tempdir().expect("folder");
    let two = Two::new("raised-disk", disk(folder.path(), None)).await;
    let (spec, whole) = two.left(40, "disk").await;
    let (text, computed) = two.pulled(&spec).await;
    assert_eq!((text, computed), (whole, u64::from(TOKENS - BLOCKS * 16)));
    eventually("counted", || two.stats().disk.fetched == u64::from(BLOCKS)).await;
    two.end().await;
}

/// A file that gives so many blocks and no more, or keeps whoever reads then.
#[derive(Debug)]
struct Failing {
    bytes: Mutex<Vec<u8>>,
    /// Reads that go well.
    left: AtomicI64,
    holds: Mutex<bool>,
    released: Condvar,
}

impl Failing {
    fn new(holds: bool) -> Arc<Self> {
        let (bytes, left) = (Mutex::default(), AtomicI64::new(i64::MAX));
        Arc::new(Self { bytes, left, holds: Mutex::new(holds), released: Condvar::new() })
    }
}

impl BlockFile for Failing {
    fn load_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            let holds = self.holds.lock().expect("lock");
            drop(self.released.wait_while(holds, |holds| *holds).expect("lock"));
            return Err(io::Error::other("unreadable"));
        }
        buffer.copy_from_slice(&self.bytes.lock().expect("lock")[at as usize..at as usize + buffer.len()]);
        Ok(())
    }

    fn store_at(&self, new: &[u8], at: u64) -> io::Result<()> {
        let mut bytes = self.bytes.lock().expect("lock");
        let end = at as usize + new.len();
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        bytes[at as usize..end].copy_from_slice(new);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_10_a_peers_block_that_cannot_be_read_is_computed_with_those_behind_it() {
    let folder = tempfile::tempdir().expect("folder");
    let file = Failing::new(false);
    let two = Two::new("raised-unreadable", disk(folder.path(), Some(file.clone()))).await;
    let (spec, whole) = two.left(50, "unreadable").await;
    file.left.store(20, Ordering::Relaxed);
    let (text, computed) = two.pulled(&spec).await;
    assert_eq!(text, whole);
    let least = u64::from(TOKENS - 20 * 16);
    assert!((least..u64::from(TOKENS)).contains(&computed), "{computed}: some came, at most 20 blocks");
    eventually("counted", || two.stats().disk.unreadable > 0).await;
    // Bytes that are not those that were written.
    file.left.store(i64::MAX, Ordering::Relaxed);
    let (spec, whole) = two.left(60, "changed").await;
    file.bytes.lock().expect("lock").iter_mut().for_each(|byte| *byte ^= 1);
    assert_eq!(two.pulled(&spec).await, (whole, u64::from(TOKENS)));
    eventually("counted", || two.stats().disk.corrupt > 0).await;
    two.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_13_a_peers_disk_that_hangs_costs_the_taker_its_patience_and_no_answer() {
    let folder = tempfile::tempdir().expect("folder");
    let file = Failing::new(true);
    let two = Two::new("raised-hangs", disk(folder.path(), Some(file.clone()))).await;
    let (spec, whole) = two.left(70, "hangs").await;
    file.left.store(9, Ordering::Relaxed);
    let (text, computed) = two.pulled(&spec).await;
    assert_eq!(text, whole);
    assert!(computed >= u64::from(TOKENS - 9 * 16), "{computed}");
    eventually("no tickets", || (tickets(&two.taker), tickets(&two.giver)) == ((0, 0), (0, 0))).await;
    // What hangs holds nobody else up.
    let (other, computed) = ask(&two.giver, &long(75, TOKENS, "hangs"), None).await;
    assert_eq!((other.len(), computed), (40, u64::from(TOKENS)));
    *file.holds.lock().expect("lock") = false;
    file.released.notify_all();
    two.end().await;
}

/// Takers that leave while blocks are read for them leave nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_06_takers_that_leave_while_a_peer_reads_for_them_leave_no_room_taken() {
    let folder = tempfile::tempdir().expect("folder");
    let two = Two::new("raised-left", disk(folder.path(), None)).await;
    let (spec, whole) = two.left(80, "left").await;
    let worker = two.giver.node.workers()[0].id.clone();
    let source = KvSource {
        worker,
        incarnation: two.giver.mesh.incarnation(),
        compute: false,
        blocks: BLOCKS,
        host: 0,
        disk: BLOCKS,
        reading_ms: 0,
    };
    for _ in 0..12 {
        let asking = ask(&two.taker, &spec, Some(source.clone()));
        // The client goes away somewhere on the way.
        tokio::select! {
            biased;
            () = async { for _ in 0..rand::random_range(1..60) { tokio::task::yield_now().await } } => {}
            _ = asking => {}
        }
    }
    eventually("no tickets", || (tickets(&two.taker), tickets(&two.giver)) == ((0, 0), (0, 0))).await;
    empty(&two.giver).await;
    assert_eq!(two.pulled(&spec).await.0, whole);
    two.end().await;
}
