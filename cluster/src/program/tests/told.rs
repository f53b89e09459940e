//! Messages to remote actors that nobody waits for.

use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;

use super::*;

/// Notes what it is told, when it is let.
struct Slow {
    heard: Arc<Mutex<Vec<u32>>>,
    lets: Arc<Semaphore>,
}

impl Actor for Slow {
    type Request = u32;
    type Reply = Option<String>;

    async fn handle(&mut self, number: u32) -> Result<Option<String>, Fault> {
        assert!(number != u32::MAX, "asked to die");
        if let Ok(permit) = self.lets.acquire().await {
            permit.forget();
        }
        self.heard.lock().unwrap().push(number);
        Ok(current_call().and_then(|call| call.context.baggage.get("user").map(str::to_owned)))
    }
}

async fn spawn(nodes: &Nodes, lets: usize) -> (RemoteActor<Slow>, Arc<Mutex<Vec<u32>>>, Arc<Semaphore>) {
    let (heard, lets) = (Arc::<Mutex<Vec<u32>>>::default(), Arc::new(Semaphore::new(lets)));
    let (for_actor, let_actor) = (heard.clone(), lets.clone());
    let make = move || Slow { heard: for_actor.clone(), lets: let_actor.clone() };
    nodes.b().spawn("slow", Restart::Permanent, make).await.unwrap();
    (nodes.a().actor_on(nodes.b().node(), "slow").unwrap(), heard, lets)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_arrives_in_order_and_a_slow_actor_fills_a_bounded_outbox() {
    let nodes = Nodes::new(2).await;
    let (slow, heard, lets) = spawn(&nodes, 0).await;
    // One in the actor's hands, its mailbox, the stream's window and the outbox: then it is full.
    let mut told = 0;
    let fill = async {
        loop {
            match slow.tell(&told) {
                Ok(()) => told += 1,
                Err(error) => {
                    assert_eq!((&error, error.advice()), (&TellError::Full, Advice::RetryAfter(100)));
                    if told >= 2_112 {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
    };
    within("the outbox is full", fill).await;
    assert!(told <= 2_200, "{told} messages wait");
    lets.add_permits(10_000);
    until("all were heard", || heard.lock().unwrap().len() == told as usize).await;
    assert_eq!(*heard.lock().unwrap(), (0..told).collect::<Vec<_>>());
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_reaches_the_next_life_of_its_actor() {
    let nodes = Nodes::new(2).await;
    let (slow, heard, _lets) = spawn(&nodes, 1_000).await;
    slow.ask(&u32::MAX).await.unwrap_err();
    // What is told while it dies may be lost with it: at most once. What is told to the next life arrives.
    let row = || nodes.b().book().snapshot().into_iter().find(|row| row.path == "programs/slow").unwrap();
    until("its next life runs", || row().restarts == 1 && row().state.label() == "running").await;
    for number in 0..10 {
        slow.tell(&number).unwrap();
    }
    until("all were heard", || heard.lock().unwrap().len() == 10).await;
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_arrive_is_told_as_such() {
    let nodes = Nodes::new(2).await;
    let (slow, _heard, _lets) = spawn(&nodes, 1_000).await;
    let nobody = nodes.a().actor_on::<Slow>(nodes.b().node(), "nobody").unwrap();
    // The first one finds it out.
    nobody.tell(&1).unwrap();
    let refused = async {
        loop {
            match nobody.tell(&2) {
                Ok(()) => tokio::time::sleep(Duration::from_millis(1)).await,
                Err(error) => return error,
            }
        }
    };
    let refused = within("a refusal", refused).await;
    assert_eq!(refused.to_string(), "no actor \"nobody\" runs on b");
    let node = nodes.b().node().clone();
    kill(nodes.b()).await;
    until("b is down", || nodes.a().snapshot().node(&node).is_none()).await;
    let down = slow.tell(&1).unwrap_err();
    assert_eq!(down, TellError::Directory(DirectoryFault::Down(node)));
    assert_eq!(down.advice(), Advice::RetryElsewhere);
    within("nothing is on its way any more", nodes.a().programs().outgoing().empty()).await;
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_delivers_what_was_told() {
    let nodes = Nodes::new(2).await;
    let (slow, heard, _lets) = spawn(&nodes, 10_000).await;
    for number in 0..500 {
        slow.tell(&number).unwrap();
    }
    nodes.a().leave().await;
    until("all were heard", || heard.lock().unwrap().len() == 500).await;
    assert_eq!(slow.tell(&1), Err(TellError::Closed));
    nodes.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_carries_the_context_of_the_call_it_was_sent_in() {
    let nodes = Nodes::new(2).await;
    let seen = Arc::<Mutex<Option<Option<String>>>>::default();
    let noted = seen.clone();
    let make = move || Listener(noted.clone());
    nodes.b().spawn("listener", Restart::Permanent, make).await.unwrap();
    let listener = nodes.a().actor_on::<Listener>(nodes.b().node(), "listener").unwrap();
    let served = endpoint::<(), ()>(nodes.a(), "relay").serve(move |()| {
        let told = listener.tell(&()).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()));
        async move { told }
    });
    let _served = served.unwrap();
    let relay = endpoint::<(), ()>(nodes.a(), "relay").client();
    let relay = relay.context(|context| context.baggage.set("user", "Ada").unwrap());
    relay.unary(&()).await.unwrap();
    until("it was told", || seen.lock().unwrap().is_some()).await;
    assert_eq!(*seen.lock().unwrap(), Some(Some("Ada".to_owned())));
    nodes.leave().await;
}

struct Listener(Arc<Mutex<Option<Option<String>>>>);

impl Actor for Listener {
    type Request = ();
    type Reply = ();

    async fn handle(&mut self, (): ()) -> Result<(), Fault> {
        let user = current_call().and_then(|call| call.context.baggage.get("user").map(str::to_owned));
        *self.0.lock().unwrap() = Some(user);
        Ok(())
    }
}
