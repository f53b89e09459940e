//! Rows of the fault list at the door of a real worker: tickets opened by hand, takers that leave, holders that die.

use std::time::{Duration, Instant};

use starling_cluster::stream::{Context, FaultKind, Opened, StreamError};
use starling_engine::backend::KvMemory;
use starling_ids::{AttemptId, RequestId, TokenId, WorkerId};
use starling_kv::transport::{
    Batch, Direction, Fabric, FabricConfig, GrantToken, HostId, Page, Refusal, Region, TransferError,
};

use super::{answer, empty, long, roles, simulated, tickets};
use crate::{
    generate::GenerateSpec,
    names,
    route::split::Role,
    testing::{Rig, eventually, within},
    transfer::{
        Granted, HolderTicket, Limits, Party, TakerTicket,
        holder::{Asked, Word},
    },
    transfer_agent::{
        KvFace,
        wire::{KvAsk, KvOpened, Say, Told},
    },
};

/// Somebody who asks the first worker for blocks and may do it wrongly.
struct Hand<'a> {
    rig: &'a Rig,
    face: std::sync::Arc<KvFace>,
    request: RequestId,
    spec: GenerateSpec,
}

impl<'a> Hand<'a> {
    /// Asks for the blocks of a prompt of 700 tokens that the worker has.
    async fn new(rig: &'a Rig, salt: &str) -> Self {
        let spec = long(3, 700, salt);
        answer(rig, spec.clone()).await;
        let port = rig.node.workers()[0].seat.now().expect("it lives");
        let face = port.kv.get().cloned().expect("its memory can be reached");
        Self { rig, face, request: RequestId(rand::random()), spec }
    }

    fn memory(&self) -> &KvMemory {
        &self.face.memory
    }

    fn asked(&self, attempt: u32) -> Asked {
        let node = starling_ids::NodeId::new("somebody").expect("name");
        let taker = Party { worker: WorkerId { node, index: 9 }, incarnation: self.face.party.incarnation };
        Asked {
            taker,
            ticket: TakerTicket(77),
            holder: self.face.party.clone(),
            request: self.request,
            attempt: AttemptId(attempt),
            layout: self.face.layout,
            block_bytes: self.memory().block_bytes,
            choice: 0,
            shape: self.face.shape,
            numbers: self.face.numbers,
        }
    }

    async fn ask(&self, asked: Asked, blocks: u32) -> Result<(KvOpened, Opened), (FaultKind, String)> {
        let ask = KvAsk {
            asked,
            spec: self.spec.clone(),
            compute: false,
            blocks,
            priority: 0,
            live: None,
            first: 0,
            whole: false,
        };
        let body = rmp_serde::to_vec(&ask).expect("encoded");
        let (node, endpoint) = (self.rig.mesh.node(), names::worker_kv(0));
        let context = Context::new(self.request, Duration::from_secs(20));
        let opening = self.rig.mesh.open(node, self.rig.mesh.incarnation(), &endpoint, context, body.into());
        let opened = within("an answer", opening).await.map_err(|error| match error {
            StreamError::Rejected(fault) => (fault.kind, fault.message),
            other => panic!("{other}"),
        })?;
        Ok((rmp_serde::from_slice(&opened.reply).expect("decoded"), opened))
    }
}

/// The next word that is not only a sign of life; `None` at the end of the stream.
async fn told(opened: &mut Opened) -> Option<Told> {
    loop {
        let bytes = within("a word", opened.rx.recv()).await?.ok()?;
        match rmp_serde::from_slice(&bytes).expect("decoded") {
            Told::Alive => {}
            told => return Some(told),
        }
    }
}

async fn granted(opened: &mut Opened) -> (GrantToken, Vec<Granted>) {
    match told(opened).await {
        Some(Told::Blocks(token, blocks)) => (token, blocks),
        other => panic!("no blocks: {other:?}"),
    }
}

fn say(opened: &Opened, ticket: HolderTicket, attempt: u32, word: Word) {
    let say = Say { ticket, attempt: AttemptId(attempt), word };
    opened.tx.try_send(rmp_serde::to_vec(&say).expect("encoded").into()).expect("sent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_03_a_lease_that_ran_out_opens_nothing_and_an_old_attempt_closes_nothing() {
    let rig = Rig::with_model("rows-lease", simulated(), 1).await;
    let hand = Hand::new(&rig, "lease").await;
    let begun = Instant::now();
    let (ours, mut old) = hand.ask(hand.asked(1), 8).await.expect("accepted");
    let (token, blocks) = granted(&mut old).await;
    assert_eq!((blocks.len(), tickets(&rig)), (8, (1, 0)));
    // It never says that it still wants them: the lease ends, and with it what was granted.
    while told(&mut old).await.is_some() {}
    assert!(begun.elapsed() >= Limits::default().lease, "given up after {:?}", begun.elapsed());
    eventually("the ticket is closed", || tickets(&rig) == (0, 0)).await;
    let (fabric, local) = (late(), Region::private(4_096).expect("memory"));
    let page = Page { local: 0, remote: u64::from(blocks[0].slot.0) * hand.memory().block_bytes, len: 64 };
    let session = fabric.choose(&ours.memory).expect("a session");
    let batch = Batch::new(Direction::Pull, &local, ours.memory.region, vec![page], token);
    let late = tokio::task::spawn_blocking(move || session.post(batch).wait()).await.expect("waited");
    let refused = [Refusal::Expired, Refusal::UnknownGrant].map(|refusal| Err(TransferError::Refused(refusal)));
    assert!(refused.contains(&late), "{late:?}");

    // A later attempt takes the place of an earlier one, whose words then close nothing.
    let (first, mut one) = hand.ask(hand.asked(2), 8).await.expect("accepted");
    granted(&mut one).await;
    let (second, mut two) = hand.ask(hand.asked(3), 8).await.expect("accepted");
    assert!(told(&mut one).await.is_none_or(|told| told == Told::Sealed), "the earlier one is over");
    granted(&mut two).await;
    say(&two, first.ticket, 2, Word::Complete);
    say(&two, second.ticket, 2, Word::Complete);
    let (kind, _) = hand.ask(hand.asked(2), 8).await.expect_err("an old attempt");
    assert_eq!((kind, tickets(&rig)), (FaultKind::StaleIncarnation, (1, 0)));
    say(&two, second.ticket, 3, Word::Complete);
    eventually("closed by its own word", || tickets(&rig) == (0, 0)).await;
    empty(&rig).await;
    rig.end().await;
}

/// A data plane of the one who comes late.
fn late() -> Fabric {
    Fabric::start(FabricConfig::new(HostId(rand::random()), GrantToken(rand::random()))).expect("started")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_06_takers_that_leave_and_holders_that_die_leave_no_pin_and_no_room() {
    let rig = Rig::with_model("rows-leave", simulated(), 2).await;
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    let mut started: TokenId = 0;
    for wave in 0..10_u64 {
        let mut streams = Vec::new();
        for at in 0..10 {
            started += 1;
            let spec = long(started, 500 + started % 7 * 40, &format!("leave-{wave}-{at}"));
            // While its worker restarts a request may be refused; then it holds nothing.
            streams.extend(rig.generate(spec).await);
            if at == 5 && matches!(wave, 3 | 7) {
                assert!(rig.mesh.book().inject_panic("workers/0").await);
            }
            (0..wave).for_each(|_| std::thread::yield_now());
            tokio::task::yield_now().await;
        }
        drop(streams);
        if matches!(wave, 3 | 7) {
            let restarts = 1 + u64::from(wave == 7);
            eventually("it lives again", || rig.restarts("workers/0") == restarts).await;
        }
    }
    eventually("both serve", || rig.node.client().models().first().is_some_and(|model| model.workers == 2)).await;
    empty(&rig).await;
    let whole = answer(&rig, long(1, 800, "rows-after")).await.0;
    roles(&rig, &[], &[Role::Prefill, Role::Decode]).await;
    assert_eq!(answer(&rig, long(1, 800, "rows-after-split")).await.0, whole);
    empty(&rig).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn xfr_09_memory_of_another_layout_is_refused_with_the_reason_and_the_worker_serves_on() {
    let rig = Rig::with_model("rows-layout", simulated(), 1).await;
    let hand = Hand::new(&rig, "layout").await;
    let ours = hand.asked(1);
    for (layout, block_bytes) in [(ours.layout ^ 1, ours.block_bytes), (ours.layout, ours.block_bytes * 2), (0, 0)] {
        let (kind, reason) = hand.ask(Asked { layout, block_bytes, ..ours.clone() }, 8).await.expect_err("refused");
        assert_eq!(kind, FaultKind::Invalid, "{reason}");
        assert!(reason.contains("KV layout") && reason.contains(&format!("{block_bytes} there")), "{reason}");
        assert_eq!(tickets(&rig), (0, 0));
    }
    // No blocks at all are given at once.
    let (opened, mut stream) = hand.ask(ours.clone(), 0).await.expect("accepted");
    assert_eq!(told(&mut stream).await, Some(Told::Sealed));
    say(&stream, opened.ticket, 1, Word::Complete);
    assert_eq!(told(&mut stream).await, None);
    let (opened, mut stream) = hand.ask(Asked { attempt: AttemptId(2), ..ours }, 8).await.expect("accepted");
    assert_eq!(granted(&mut stream).await.1.len(), 8);
    say(&stream, opened.ticket, 2, Word::Abort);
    while told(&mut stream).await.is_some() {}
    empty(&rig).await;
    rig.end().await;
}
