//! A language model of one's own behind the OpenAI API: join a running cluster as a worker, in under 60 lines.
//!
//! The model knows which letter follows which. `cargo run --example custom_worker -- HOST:PORT KEY_FILE`, then ask any
//! gateway for the model `alphabet`.
#![allow(clippy::print_stdout)] // an example talks to a person

use std::{error::Error, sync::Arc, time::Duration};

use starling::worker::{
    Backend, Batch, BlockSlot, Computed, EngineError, Node, NodeOptions, Role, Row, TextModel, TokenId, WorkerRole,
};
use starling::{JoinConfig, Mesh};

/// Computes batches; the scheduler, the cache, streaming and cancellation are the cluster's.
struct Alphabet;

impl Backend for Alphabet {
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Computed<'_>, EngineError> {
        let next = |last: TokenId| match TextModel::byte(last) {
            Some(b'z') => TextModel::END,
            Some(letter @ b'a'..=b'y') => TextModel::token(letter + 1),
            _ => TextModel::token(b'a'),
        };
        let asked = batch.items.iter().filter(|item| item.wants_logits);
        let rows = asked.map(|item| Row::Token(next(item.tokens.last().copied().unwrap_or_default())));
        Ok(Computed { rows: rows.collect(), takes: Duration::from_millis(2) })
    }

    fn read_block(&self, _slot: BlockSlot) -> Vec<u8> {
        Vec::new() // no state but the last token, so nothing to move between machines
    }

    fn write_block(&mut self, _slot: BlockSlot, _bytes: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [seed, key] = &args[..] else { return Err("usage: custom_worker HOST:PORT KEY_FILE".into()) };
    let mesh = Mesh::join(JoinConfig::new("alphabet-1").key_file(key).seed(seed)).await?;
    let model = Arc::new(TextModel::new("alphabet", || Alphabet)?);
    let role = WorkerRole { model, engine: "alphabet".to_owned(), count: 1, duty: Role::Both };
    let node = Node::start(&mesh, NodeOptions { worker: Some(role), ..NodeOptions::default() }).await?;
    node.ready().await;
    println!("ready {}", mesh.address());
    println!("ended: {}", mesh.failed().await);
    Ok(())
}
