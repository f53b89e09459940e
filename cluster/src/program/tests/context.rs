//! What crosses every hop.

use std::sync::{Arc, Mutex};

use starling_ids::AttemptId;

use super::*;
use crate::stream::Context;

type Seen = Arc<Mutex<Vec<(String, Context, Duration)>>>;

fn note(seen: &Seen) {
    let call = current_call().unwrap();
    seen.lock().unwrap().push((call.peer.to_string(), call.context.clone(), call.time_left().unwrap()));
}

fn adjust(context: &mut Context) {
    context.tenant = "acme".to_owned();
    context.priority = -4;
    context.attempt = AttemptId(3);
    context.trace_parent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned());
    context.baggage.set("user", "Ada").unwrap();
    context.baggage.set("zone", "north").unwrap();
    // Cannot be made longer.
    context.time_left = Duration::from_secs(10_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_crosses_three_hops_and_the_time_only_shrinks() {
    let nodes = Nodes::new(3).await;
    let seen = Seen::default();
    // The last hop is an actor, asked in a task of its own.
    nodes.c().register_factory("last", {
        let seen = seen.clone();
        move |(): ()| Ok(Last(seen.clone()))
    });
    let last = nodes.b().spawn_on::<Last>(nodes.c().node(), "last", &()).await.unwrap();
    let noted = seen.clone();
    let middle = endpoint::<(), u32>(nodes.b(), "middle").serve_stream(move |()| {
        let (last, noted) = (last.clone(), noted.clone());
        async move {
            note(&noted);
            Ok(emit(move |out| async move {
                let call = current_call().unwrap();
                let mut own = tokio::task::JoinSet::new();
                own.spawn(call.scope(async move { last.ask(&()).await }));
                out.send(own.join_next().await.unwrap().unwrap()?).await
            }))
        }
    });
    let _middle = middle.unwrap();
    let client = endpoint::<(), u32>(nodes.a(), "middle").client();
    ready(&client, 1).await;
    let noted = seen.clone();
    let first = endpoint::<(), u32>(nodes.a(), "first").serve(move |()| {
        let (client, noted) = (client.clone(), noted.clone());
        async move {
            note(&noted);
            Ok(client.stream(&()).await?.all().await?[0])
        }
    });
    let _first = first.unwrap();
    let outer = endpoint::<(), u32>(nodes.c(), "first").client().deadline(Duration::from_secs(20)).context(adjust);
    ready(&outer, 1).await;
    assert_eq!(outer.unary(&()).await.unwrap(), 42);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.iter().map(|(peer, ..)| peer.as_str()).collect::<Vec<_>>(), ["c", "a", "b"]);
    let mut time = Duration::from_secs(20);
    for (peer, context, left) in &seen {
        assert_eq!(Context { time_left: Duration::ZERO, ..context.clone() }, expected(&seen[0].1), "asked by {peer}");
        assert!(context.time_left < time && *left <= context.time_left, "asked by {peer}: {seen:?}");
        time = context.time_left;
    }
    assert!(current_call().is_none());
    nodes.leave().await;
}

fn expected(first: &Context) -> Context {
    let mut expected = Context::new(first.request, Duration::ZERO);
    adjust(&mut expected);
    Context { time_left: Duration::ZERO, ..expected }
}

struct Last(Seen);

impl Actor for Last {
    type Request = ();
    type Reply = u32;

    async fn handle(&mut self, (): ()) -> Result<u32, Fault> {
        note(&self.0);
        Ok(42)
    }
}
