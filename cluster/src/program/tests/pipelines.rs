//! Operators before an endpoint and behind one, over functions and over other nodes.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures::{Stream, StreamExt};

use super::*;

/// Lower case on the way in, numbered on the way out, answer by answer.
struct Numbered;

impl Operator for Numbered {
    type Request = String;
    type Response = (usize, String);
    type InnerRequest = String;
    type InnerResponse = String;

    async fn call(&self, request: String, below: Below<String, String>) -> Result<Answers<(usize, String)>, CallError> {
        if request.is_empty() {
            return Err(Fault::new(FaultKind::Invalid, "nothing to say").into());
        }
        let answers = below.call(request.to_lowercase()).await?;
        Ok(Answers::new(answers.enumerate().map(|(at, word)| Ok((at + 1, word?)))))
    }
}

/// Answers some requests by itself.
struct Known;

impl Operator for Known {
    type Request = String;
    type Response = String;
    type InnerRequest = String;
    type InnerResponse = String;

    async fn call(&self, request: String, below: Below<String, String>) -> Result<Answers<String>, CallError> {
        match request.strip_prefix("ping") {
            Some(_) => Ok(Answers::once("pong".to_owned())),
            None => below.call(request).await,
        }
    }
}

/// Turns failures into words: a refusal before any answer, and one in the middle.
struct Forgiving;

impl Operator for Forgiving {
    type Request = String;
    type Response = String;
    type InnerRequest = String;
    type InnerResponse = String;

    async fn call(&self, request: String, below: Below<String, String>) -> Result<Answers<String>, CallError> {
        let forgiven = |error: CallError| match error.fault() {
            Some(fault) if fault.kind == FaultKind::Invalid => Ok(format!("({})", fault.message)),
            _ => Err(error),
        };
        match below.call(request).await {
            Ok(answers) => Ok(Answers::new(answers.map(move |answer| answer.or_else(forgiven)))),
            Err(error) => forgiven(error).map(Answers::once),
        }
    }
}

/// Words of a text; refuses "no", and fails after the first word of "oh no".
async fn words(text: String) -> Result<impl Stream<Item = Result<String, Fault>> + Send + 'static, Fault> {
    let no = || Fault::new(FaultKind::Invalid, "not that");
    if text == "no" {
        return Err(no());
    }
    let words: Vec<_> =
        text.split(' ').map(|word| if word == "no" { Err(no()) } else { Ok(word.to_owned()) }).collect();
    Ok(futures::stream::iter(words))
}

async fn all<Resp: Send + 'static>(
    service: &impl Service<Request = String, Response = Resp>,
    text: &str,
) -> Result<Vec<Resp>, CallError> {
    service.call(text.to_owned()).await?.all().await
}

fn numbered(words: &[&str]) -> Vec<(usize, String)> {
    words.iter().enumerate().map(|(at, word)| (at + 1, (*word).to_owned())).collect()
}

/// What holds of `numbered → forgiving → known → words`, wherever the pieces are.
async fn check(service: &impl Service<Request = String, Response = (usize, String)>) {
    assert_eq!(all(service, "To BE").await.unwrap(), numbered(&["to", "be"]));
    assert_eq!(all(service, "ping").await.unwrap(), numbered(&["pong"]));
    assert_eq!(all(service, "no").await.unwrap(), numbered(&["(not that)"]));
    assert_eq!(all(service, "oh no oh").await.unwrap(), numbered(&["oh", "(not that)"]));
    let refused = service.call(String::new()).await.unwrap_err();
    assert!(matches!(&refused, CallError::Request(RequestFault::Rejected(_))), "before any data: {refused}");
    assert_eq!(refused.fault().unwrap().message, "nothing to say");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_is_the_same_over_a_function_over_another_node_and_behind_an_endpoint() {
    let nodes = Nodes::new(2).await;
    let counted = Arc::new(AtomicUsize::new(0));
    let counter = counted.clone();
    let _words = endpoint::<String, String>(nodes.b(), "words").serve_stream(move |text| {
        counter.fetch_add(1, Ordering::SeqCst);
        words(text)
    });
    let client = endpoint::<String, String>(nodes.a(), "words").client();
    ready(&client, 1).await;
    check(&Numbered.over(Forgiving.over(Known.over(service_fn(words))))).await;
    assert_eq!(counted.load(Ordering::SeqCst), 0);
    let far = Numbered.over(Forgiving.over(Known.over(client.clone())));
    check(&far).await;
    assert_eq!(counted.load(Ordering::SeqCst), 3, "what an operator answers or refuses itself goes no further");
    // Some behind an endpoint of a, over another node, some before it on b.
    let behind = endpoint::<String, String>(nodes.a(), "behind").serve_service(Forgiving.over(Known.over(client)));
    let _behind = behind.unwrap();
    let behind = endpoint::<String, String>(nodes.b(), "behind").client();
    ready(&behind, 1).await;
    check(&Numbered.over(behind)).await;
    // All of it behind one.
    let _far = endpoint::<String, (usize, String)>(nodes.a(), "far").serve_service(far).unwrap();
    let far = endpoint::<String, (usize, String)>(nodes.b(), "far").client();
    ready(&far, 1).await;
    check(&far).await;
    nodes.leave().await;
}

/// Tries again below, as often as it takes.
struct Stubborn;

impl Operator for Stubborn {
    type Request = u32;
    type Response = u32;
    type InnerRequest = u32;
    type InnerResponse = u32;

    async fn call(&self, request: u32, below: Below<u32, u32>) -> Result<Answers<u32>, CallError> {
        loop {
            match below.call(request).await {
                Err(error) if error.advice() != Advice::GiveUp => {}
                outcome => return outcome,
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_streams_as_it_is_read_and_may_ask_below_again() {
    let nodes = Nodes::new(1).await;
    let (tries, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (tried, made_so_far) = (tries.clone(), made.clone());
    let endless = service_fn(move |from: u32| {
        let (full, made) = (tried.fetch_add(1, Ordering::SeqCst) < 3, made.clone());
        async move {
            if full {
                return Err(Fault::new(FaultKind::Overloaded, "not yet"));
            }
            Ok(futures::stream::iter(from..).map(move |n| {
                made.fetch_add(1, Ordering::SeqCst);
                Ok(n)
            }))
        }
    });
    let _endless = endpoint::<u32, u32>(nodes.a(), "endless").serve_service(Stubborn.over(endless)).unwrap();
    let mut answers = endpoint::<u32, u32>(nodes.a(), "endless").client().stream(&7).await.unwrap();
    for n in 7..17 {
        assert_eq!(answers.next().await, Some(Ok(n)));
    }
    assert_eq!(tries.load(Ordering::SeqCst), 4);
    drop(answers);
    until("nobody is inside any more", || nodes.a().programs().gate_inside() == 0).await;
    assert!(made_so_far.load(Ordering::SeqCst) <= 17 + crate::stream::STREAM_WINDOW_FRAMES + 2);
    nodes.leave().await;
}
