//! The supervisor against real actors: restart, escalation, ordered stop, and resources that come back.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};

use super::*;

/// A resource: counted while held, and it notes the order of release.
struct Held {
    name: &'static str,
    count: Arc<AtomicUsize>,
    released: Arc<Mutex<Vec<&'static str>>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
        self.released.lock().unwrap().push(self.name);
    }
}

#[derive(Clone, Default)]
struct Ledger {
    count: Arc<AtomicUsize>,
    released: Arc<Mutex<Vec<&'static str>>>,
}

impl Ledger {
    fn hold(&self, name: &'static str) -> Held {
        self.count.fetch_add(1, Ordering::SeqCst);
        Held { name, count: self.count.clone(), released: self.released.clone() }
    }

    fn held(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

struct Holder;

enum HolderMsg {
    Ping(RpcReplyPort<u32>),
    Panic,
    Fail,
    Hang,
}

impl ractor::Message for HolderMsg {}

impl Actor for Holder {
    type Msg = HolderMsg;
    type State = Held;
    type Arguments = (&'static str, Ledger);

    async fn pre_start(
        &self,
        _myself: ActorRef<HolderMsg>,
        (name, ledger): (&'static str, Ledger),
    ) -> Result<Held, ActorProcessingErr> {
        Ok(ledger.hold(name))
    }

    async fn handle(
        &self,
        _myself: ActorRef<HolderMsg>,
        message: HolderMsg,
        _state: &mut Held,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            HolderMsg::Ping(reply) => reply.send(7).map_err(|_| "nobody asked".into()),
            HolderMsg::Panic => panic!("asked to"),
            HolderMsg::Fail => Err("asked to".into()),
            HolderMsg::Hang => std::future::pending().await,
        }
    }
}

fn quick() -> Policy {
    Policy { backoff_min: Duration::from_millis(1), stop_max: Duration::from_millis(500), ..Policy::default() }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn ping(handle: &Handle<HolderMsg>) -> Option<u32> {
    handle.call(HolderMsg::Ping, Duration::from_secs(5)).await.ok()
}

async fn holder(at: &SupervisorHandle, name: &'static str, ledger: &Ledger, restart: Restart) -> Handle<HolderMsg> {
    let (handle, ledger) = (Handle::new(), ledger.clone());
    at.add(child(name, "holder", restart, &handle, move || (Holder, (name, ledger.clone())))).await.unwrap();
    handle
}

#[tokio::test]
async fn act_01_resources_come_back_under_panic_error_kill_stop_and_drain() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    type Way = (&'static str, fn(&Handle<HolderMsg>));
    let ways: [Way; 6] = [
        ("panic", |h| h.cast(HolderMsg::Panic).unwrap()),
        ("error", |h| h.cast(HolderMsg::Fail).unwrap()),
        ("kill", |h| h.actor().unwrap().kill()),
        ("kill while busy", |h| {
            h.cast(HolderMsg::Hang).unwrap();
            h.actor().unwrap().kill();
        }),
        ("stop", |h| h.actor().unwrap().stop(None)),
        ("drain", |h| h.actor().unwrap().drain().unwrap()),
    ];
    for (way, end) in ways {
        let ledger = Ledger::default();
        let handle = holder(&root, "temporary", &ledger, Restart::Temporary).await;
        assert_eq!(ledger.held(), 1, "{way}");
        end(&handle);
        until(way, || ledger.held() == 0).await;
        until("it is listed no more", || !handle.is_running() && handle.stats().state() == ActorState::Stopped).await;
        assert!(ping(&handle).await.is_none(), "{way}");
    }
    // Under a parent that dies, whatever the way.
    for kill in [true, false] {
        let ledger = Ledger::default();
        let parent = root.child_supervisor("parent", quick()).await.unwrap();
        holder(&parent, "leaf", &ledger, Restart::Temporary).await;
        if kill {
            let panicked = root.book().inject_panic("parent").await;
            assert!(panicked);
        }
        parent.stop_all().await.ok();
        until("a leaf goes with its parent", || ledger.held() == 0).await;
    }
    root.stop_all().await.unwrap();
}

#[tokio::test]
async fn a_permanent_child_is_restarted_and_its_handle_goes_on() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let ledger = Ledger::default();
    let handle = holder(&root, "a", &ledger, Restart::Permanent).await;
    for restarts in 1..=3u64 {
        match restarts {
            1 => handle.cast(HolderMsg::Panic).unwrap(),
            2 => handle.actor().unwrap().kill(),
            _ => assert!(root.book().inject_panic("a").await),
        }
        until("restarted", || handle.stats().restarts() == restarts && handle.is_running()).await;
        assert_eq!(ping(&handle).await, Some(7));
        assert_eq!(ledger.held(), 1);
        assert_eq!(handle.stats().mailbox_depth(), 0);
    }
    let rows = root.book().snapshot();
    assert_eq!(rows.iter().map(|row| row.path.as_str()).collect::<Vec<_>>(), ["a", "root"]);
    assert_eq!((rows[0].restarts, rows[0].state), (3, ActorState::Running));
    root.stop_all().await.unwrap();
    assert!(root.book().snapshot().is_empty());
}

#[tokio::test]
async fn a_transient_child_that_stops_by_itself_stays_away() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let ledger = Ledger::default();
    let handle = holder(&root, "t", &ledger, Restart::Transient).await;
    handle.cast(HolderMsg::Fail).unwrap();
    until("restarted after a failure", || handle.stats().restarts() == 1 && handle.is_running()).await;
    handle.actor().unwrap().stop(None);
    until("gone after a stop", || root.book().snapshot().len() == 1).await;
    assert_eq!(root.remove("t").await, Err(SuperviseError::Unknown("t".into())));
    root.stop_all().await.unwrap();
}

#[tokio::test]
async fn too_many_failures_climb_and_the_subtree_comes_back() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let branch = root.child_supervisor("branch", Policy { failures_max: 2, ..quick() }).await.unwrap();
    let ledger = Ledger::default();
    let (bad, good) = (
        holder(&branch, "bad", &ledger, Restart::Permanent).await,
        holder(&branch, "good", &ledger, Restart::Permanent).await,
    );
    for restarts in 0..3 {
        until("up", || bad.is_running() && bad.stats().restarts() == restarts).await;
        bad.cast(HolderMsg::Panic).unwrap();
    }
    until("the branch was restarted", || good.stats().restarts() == 1 && good.is_running() && bad.is_running()).await;
    assert_eq!(ping(&good).await, Some(7));
    let branch_row = root.book().snapshot().into_iter().find(|row| row.path == "branch").unwrap();
    assert_eq!(branch_row.restarts, 1);
    root.stop_all().await.unwrap();
    until("all is given back", || ledger.held() == 0).await;
}

#[tokio::test]
async fn the_root_ends_when_its_limit_is_passed() {
    let root = SupervisorHandle::root(ActorBook::default(), Policy { failures_max: 0, ..quick() }).await.unwrap();
    let ledger = Ledger::default();
    let handle = holder(&root, "a", &ledger, Restart::Permanent).await;
    handle.cast(HolderMsg::Panic).unwrap();
    tokio::time::timeout(Duration::from_secs(20), root.ended()).await.unwrap();
    until("given back", || ledger.held() == 0).await;
}

#[tokio::test]
async fn act_01_the_tree_stops_from_leaf_to_root_and_a_hung_child_is_killed() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let ledger = Ledger::default();
    holder(&root, "first", &ledger, Restart::Permanent).await;
    let branch = root.child_supervisor("branch", quick()).await.unwrap();
    holder(&branch, "leaf-1", &ledger, Restart::Permanent).await;
    holder(&branch, "leaf-2", &ledger, Restart::Permanent).await;
    holder(&root, "last", &ledger, Restart::Permanent).await;
    root.stop_all().await.unwrap();
    assert_eq!(*ledger.released.lock().unwrap(), ["last", "leaf-2", "leaf-1", "first"]);

    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let hung = holder(&root, "hung", &ledger, Restart::Permanent).await;
    hung.cast(HolderMsg::Hang).unwrap();
    tokio::time::timeout(Duration::from_secs(20), root.stop_all()).await.unwrap().unwrap();
    until("given back", || ledger.held() == 0).await;
}

#[tokio::test]
async fn names_are_unique_and_a_failed_first_start_is_not_kept() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let ledger = Ledger::default();
    holder(&root, "a", &ledger, Restart::Permanent).await;
    let second = Handle::<HolderMsg>::new();
    let (for_child, make_ledger) = (second.clone(), ledger.clone());
    let spec = child("a", "holder", Restart::Permanent, &for_child, move || (Holder, ("a", make_ledger.clone())));
    assert_eq!(root.add(spec).await, Err(SuperviseError::Duplicate("a".into())));

    let refused = Handle::<RefuserMsg>::new();
    let spec = child("no", "refuser", Restart::Permanent, &refused, || (Refuser, ()));
    let error = root.add(spec).await.unwrap_err().to_string();
    assert!(error.contains("no such port"), "{error}");
    assert_eq!(root.book().snapshot().len(), 2);
    assert_eq!(root.remove("a").await, Ok(()));
    assert_eq!(ledger.held(), 0);
    root.stop_all().await.unwrap();
}

struct Refuser;
struct RefuserMsg;
impl ractor::Message for RefuserMsg {}

impl Actor for Refuser {
    type Msg = RefuserMsg;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _myself: ActorRef<RefuserMsg>, (): ()) -> Result<(), ActorProcessingErr> {
        Err("no such port".into())
    }
}

#[tokio::test]
async fn act_03_every_message_that_was_taken_before_a_drain_is_handled() {
    let root = SupervisorHandle::root(ActorBook::default(), quick()).await.unwrap();
    let counted = Arc::new(AtomicUsize::new(0));
    let (handle, for_child) = (Handle::<CountMsg>::new(), counted.clone());
    let spec = child("count", "counter", Restart::Temporary, &handle, move || (Counter, for_child.clone()));
    root.add(spec).await.unwrap();
    let sender = handle.clone();
    let sending = tokio::task::spawn_blocking(move || (0..100_000).filter(|_| sender.cast(CountMsg).is_ok()).count());
    until("some were sent", || counted.load(Ordering::Relaxed) > 100).await;
    let actor = handle.actor().unwrap();
    actor.drain_and_wait(Some(Duration::from_secs(20))).await.unwrap();
    assert_eq!(sending.await.unwrap(), counted.load(Ordering::Relaxed));
    root.stop_all().await.unwrap();
}

struct Counter;
struct CountMsg;
impl ractor::Message for CountMsg {}

impl Actor for Counter {
    type Msg = CountMsg;
    type State = Arc<AtomicUsize>;
    type Arguments = Arc<AtomicUsize>;

    async fn pre_start(
        &self,
        _myself: ActorRef<CountMsg>,
        count: Arc<AtomicUsize>,
    ) -> Result<Arc<AtomicUsize>, ActorProcessingErr> {
        Ok(count)
    }

    async fn handle(
        &self,
        _myself: ActorRef<CountMsg>,
        _message: CountMsg,
        count: &mut Arc<AtomicUsize>,
    ) -> Result<(), ActorProcessingErr> {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[tokio::test]
async fn tasks_end_with_their_owner_and_are_bounded() {
    let tasks = Tasks::closed(2);
    assert!(!tasks.spawn(async {}));
    let owner = TaskOwner::open(&tasks);
    let ledger = Ledger::default();
    for _ in 0..2 {
        let held = ledger.hold("task");
        assert!(tasks.spawn(async move {
            std::future::pending::<()>().await;
            drop(held);
        }));
    }
    assert!(!tasks.spawn(async {}), "full");
    drop(owner);
    until("aborted", || ledger.held() == 0).await;
    assert!(!tasks.spawn(async {}), "closed");
}
