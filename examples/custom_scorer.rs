//! A scorer of one's own: a router that sends requests where the sun shines while the way there is worth it.
//!
//! `cargo run --example custom_scorer -- HOST:PORT KEY_FILE`, beside workers started with `--label power=sun` and without.
#![allow(clippy::print_stdout)] // an example talks to a person

use starling::routing::{self, Question, Scorer, Slot};
use starling::worker::{Node, NodeOptions};
use starling::{JoinConfig, Mesh};

/// What a request costs on a node without sunshine, in the unit of the other scorers.
#[derive(Debug)]
struct Grid(f64);

impl Scorer for Grid {
    fn name(&self) -> &'static str {
        "grid"
    }

    fn cost(&self, question: &Question<'_>, slot: Slot) -> f64 {
        let power = question.fleet.labels(slot).and_then(|labels| labels.get("power"));
        if power.is_some_and(|power| power == "sun") { 0.0 } else { self.0 }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [seed, key] = &args[..] else { return Err("usage: custom_scorer HOST:PORT KEY_FILE".into()) };
    let policy = routing::policy("scorers = ['ms', { name = 'grid', ms = 2000 }]")?
        .with_scorer("grid", |settings| Ok(Grid(settings.number("ms", 0.0..=60_000.0, 50.0)?)));
    let mesh = Mesh::join(JoinConfig::new("solar-router").key_file(key).seed(seed)).await?;
    let node = Node::start(&mesh, NodeOptions { router: true, policy, ..NodeOptions::default() }).await?;
    println!("ready {}", mesh.address());
    println!("ended: {}", mesh.failed().await);
    drop(node);
    Ok(())
}
