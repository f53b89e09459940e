//! The worker of running answers is killed: they go on elsewhere, and nobody can tell from what they say.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Cluster, Events, Node, PATIENCE, ask, ask_long, model, until};

/// One answer of a request.
#[derive(Debug, Default, Clone, PartialEq)]
struct Answer {
    text: String,
    /// The tokens as log-probabilities name them; empty when none were asked for.
    tokens: Vec<String>,
    finish: Option<String>,
}

/// A request's answers, and when something of them came.
#[derive(Debug, Default)]
struct Heard {
    answers: Vec<Answer>,
    pieces: Vec<Instant>,
    usage: Value,
    error: Option<Value>,
}

impl Heard {
    /// Reads to the end; counts every piece.
    async fn all(mut events: Events, pieces: Arc<AtomicUsize>) -> Self {
        let mut heard = Self::default();
        while let Some(data) = events.next().await {
            let Ok(event) = serde_json::from_str::<Value>(&data) else { continue };
            heard.error = heard.error.or_else(|| event.get("error").cloned());
            if event["usage"].is_object() {
                heard.usage = event["usage"]["completion_tokens"].clone();
            }
            for choice in event["choices"].as_array().into_iter().flatten() {
                let index = choice["index"].as_u64().unwrap() as usize;
                heard.answers.resize_with(heard.answers.len().max(index + 1), Answer::default);
                let answer = &mut heard.answers[index];
                answer.text += choice["delta"]["content"].as_str().unwrap_or_default();
                let tokens = choice["logprobs"]["content"].as_array().into_iter().flatten();
                answer.tokens.extend(tokens.map(|token| token["bytes"].to_string()));
                answer.finish = choice["finish_reason"].as_str().map(str::to_owned).or(answer.finish.take());
                if !choice["delta"]["content"].as_str().unwrap_or_default().is_empty() {
                    heard.pieces.push(Instant::now());
                    pieces.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        heard
    }

    /// Longest silence that began or ended after `since`.
    fn stall(&self, since: Instant) -> Duration {
        let gaps = self.pieces.windows(2).filter(|pair| pair[1] > since);
        gaps.map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    /// The usual time between two pieces before `until`.
    fn pace(&self, until: Instant) -> Duration {
        let before = self.pieces.windows(2).filter(|pair| pair[1] < until);
        median(before.map(|pair| pair[1] - pair[0]).collect())
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Asks all at once, and kills `doomed` when each has given `spoken` pieces, if there is one.
#[expect(clippy::disallowed_methods, reason = "answers are read while the test goes on; it awaits them all at its end")]
async fn hear(gateway: &Node, bodies: &[Value], doomed: Option<(&mut Node, usize)>) -> (Vec<Heard>, Instant) {
    let mut following = Vec::new();
    for body in bodies {
        let (events, pieces) = (gateway.stream(body).await, Arc::new(AtomicUsize::new(0)));
        following.push((pieces.clone(), tokio::spawn(Heard::all(events, pieces))));
    }
    let mut killed = Instant::now();
    if let Some((doomed, spoken)) = doomed {
        let all = async || following.iter().all(|(pieces, _)| pieces.load(Ordering::Relaxed) >= spoken);
        until("every answer has begun", 3 * PATIENCE, all).await;
        let running = doomed.metric("starling_worker_sequences_running", "").await;
        let wanted: u64 = bodies.iter().map(|body| body["n"].as_u64().unwrap_or(1)).sum();
        assert_eq!(running, wanted as f64, "all answers come from the worker that is killed");
        killed = Instant::now();
        doomed.child.kill().await.unwrap();
    }
    let heard = join_all(following.into_iter().map(async |(_, task)| task.await.unwrap())).await;
    (heard, killed)
}

fn same(broken: &[Heard], calm: &[Heard]) {
    for (at, (broken, calm)) in broken.iter().zip(calm).enumerate() {
        assert!(broken.error.is_none() && calm.error.is_none(), "request {at}: {broken:?}");
        assert_eq!(broken.answers, calm.answers, "request {at}");
        assert_eq!(broken.usage, calm.usage, "request {at}");
        assert!(broken.answers.iter().all(|answer| answer.finish.is_some()), "request {at}: {broken:?}");
    }
}

/// Gives the first worker of a node a role, and waits until routers know.
async fn give_role(cluster: &Cluster, name: &str, role: &str, by: &Node) {
    let (worker, key) = (format!("{name}/0"), cluster.key());
    let at = ["--node", &by.address, "--key-file", key.to_str().unwrap()];
    let told = cluster.run(&[&["role", &worker, role], &at[..]].concat()).await;
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let known = async || {
        let rows = cluster.rows("instances", by).await;
        let mut rows = rows.as_array().into_iter().flatten();
        rows.any(|row| row["node"] == name && row["kind"] == "worker" && row["labels"]["role"] == role)
    };
    until("the role is known", PATIENCE, known).await;
}

/// Requests whose sampling has a memory: what was said, how often, how much of it, where the draws stand.
fn with_memories(model: &str) -> Vec<Value> {
    let with = |mut body: Value, more: Value| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body["stream_options"] = json!({"include_usage": true});
        body
    };
    let drawn = json!({"temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 3});
    let counted = json!({"presence_penalty": 0.7, "frequency_penalty": 0.5});
    let letters = json!({"temperature": 1.0, "seed": 3, "repetition_penalty": 1.1});
    vec![
        with(with(ask_long(model, "Describe the sea.", 50), drawn), counted),
        with(ask(model, "Answer with yes.", 60), json!({"min_tokens": 40})),
        with(ask_long(model, "Write this again and again: ありがとう 😀🎉 Привет, мир", 60), letters),
        with(ask_long(model, "Name ten animals.", 50), json!({"logprobs": true, "frequency_penalty": 1.0})),
    ]
}

/// Words in the second half of a text that stand nowhere before: an answer that stops there stops late.
fn late_words(text: &str) -> String {
    let starts = text.char_indices().map(|(at, _)| at).skip(text.chars().count() / 2);
    let mut words = starts.map(|at| (at, text[at..].chars().take(14).collect::<String>()));
    words.find(|(at, words)| text.find(words) == Some(*at)).expect("a story says something new").1
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_answers_equal_undisturbed_ones_greedy_and_with_every_memory_of_sampling() {
    let cluster = Cluster::new().await;
    let gateway = cluster.up("gw", &["--role", "router,gateway"]).await;
    let path = model();
    let real = ["--engine", "embedded", "--model", path.to_str().unwrap(), "--threads", "1", "--kv-mib", "128"];
    let args = [&real[..], &["--http", "127.0.0.1:0"]].concat();
    // Workers for prompts take whole requests only when nobody else is left: only the first answers now.
    let idle = [&args[..], &["--worker-role", "prefill"]].concat();
    let mut w1 = cluster.join("w1", &[&gateway.address], &args).await;
    let mut w2 = cluster.join("w2", &[&gateway.address], &idle).await;
    let _w3 = cluster.join("w3", &[&gateway.address], &idle).await;
    let model = w1.model.clone();
    for name in ["w1", "w2", "w3"] {
        until("the worker serves", PATIENCE, async || cluster.serving_workers(name, &gateway).await == 1).await;
    }

    let stories: Vec<Value> = (0..8).map(|n| ask_long(&model, &format!("{n}: tell me a long story"), 80)).collect();
    let (broken, killed) = hear(&gateway, &stories, Some((&mut w1, 6))).await;
    let calm = hear(&gateway, &stories, None).await.0;
    same(&broken, &calm);
    report(&gateway, &model, &broken, killed).await;

    give_role(&cluster, "w2", "both", &gateway).await;
    let mut bodies = with_memories(&model);
    let stop = late_words(&calm[0].answers[0].text);
    let mut stopped = stories[0].clone();
    stopped["stop"] = json!([stop, "never said by anyone"]);
    bodies.push(stopped);
    let calm = hear(&gateway, &bodies, None).await.0;
    assert_eq!(calm[4].answers[0].finish.as_deref(), Some("stop"), "{calm:?}");
    let (broken, _) = hear(&gateway, &bodies, Some((&mut w2, 10))).await;
    same(&broken, &calm);
    assert!(broken[2].answers[0].text.chars().any(|letter| letter.len_utf8() > 2), "{:?}", broken[2].answers[0].text);
}

/// Prints how long the answers were silent, beside what computing their prompts and words anew takes.
async fn report(gateway: &Node, model: &str, broken: &[Heard], killed: Instant) {
    let stalls: Vec<Duration> = broken.iter().map(|heard| heard.stall(killed)).collect();
    let added = broken.iter().map(|heard| heard.stall(killed).saturating_sub(heard.pace(killed))).collect();
    let said = broken.iter().map(|heard| heard.pieces.iter().filter(|at| **at < killed).count()).max().unwrap_or(0);
    let filler = "word ".repeat(said);
    let prefills = join_all((0..8).map(async |n| {
        let mut events = gateway.stream(&ask_long(model, &format!("{n} {n} another: {filler}"), 2)).await;
        let begun = Instant::now();
        events.first_text().await;
        begun.elapsed()
    }));
    let prefill = median(prefills.await);
    let (added, longest) = (median(added), stalls.iter().max().copied().unwrap_or_default());
    eprintln!(
        "after the kill: added stall p50 {added:?}, longest silence {longest:?}; prefill of 8 such at once p50 {prefill:?}"
    );
    assert!(longest < Duration::from_secs(60), "silent for {longest:?}");
}
