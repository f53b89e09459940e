//! `starling why`: why a request went where it went, and what came of it.

use clap::Args;
use starling_actors::route::receipt::Receipt;
use starling_ids::RequestId;

use super::{
    Failure,
    inspect::{Inspect, print_json},
    table,
};
use crate::control::{Why as Found, op};

const EXAMPLES: &str = "\
Examples:
  curl -si http://127.0.0.1:8000/v1/chat/completions ... | grep -i x-request-id
  starling why 6f1c9a0e5b7d4f2a8c3e1d0b9a876543

Each decision with its cheapest candidates: blocks of the prompt expected in the
worker's cache, what was in flight and queued there, and the cost by its terms
(milliseconds, with the default policy). Then what really came of it. A router
remembers its last 1,024 decisions for each model.

Exit codes: 0 printed, 1 no router remembers it, 2 wrong command line, 3 no node
answered.";

/// Explain why a request went where it went.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Why {
    /// The request's id: 32 hex digits, as in the header x-request-id
    request: RequestId,
    #[command(flatten)]
    inspect: Inspect,
}

impl Why {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let found: Found = self.inspect.ask(op::WHY, self.request.to_string().into_bytes()).await?;
        for missing in &found.missing {
            eprintln!("no answer from router {}: {}", missing.node, missing.reason);
        }
        if self.inspect.json {
            return print_json(&found);
        }
        if found.receipts.is_empty() {
            return Err(Failure::Failed(format!("no router remembers request {}", self.request)));
        }
        for (router, receipt) in &found.receipts {
            print_receipt(router, receipt);
        }
        Ok(())
    }
}

#[allow(clippy::print_stdout, reason = "the answer of a verb")]
fn print_receipt(router: &str, receipt: &Receipt) {
    println!(
        "router {router}, policy {}: {} workers, prompt of {} tokens, {} as good as the cheapest",
        receipt.policy, receipt.workers, receipt.prompt_tokens, receipt.near_equals
    );
    let terms: Vec<&str> = receipt
        .candidates
        .first()
        .map_or_else(Vec::new, |first| first.terms.iter().map(|(name, _)| name.as_str()).collect());
    let mut head = vec!["", "worker", "hit blocks", "in flight", "queued tokens", "cost"];
    head.extend(terms);
    let mut out = table::table(&head);
    for (at, candidate) in receipt.candidates.iter().enumerate() {
        let mut row = vec![
            if at == receipt.chosen { "chosen" } else { "" }.to_owned(),
            candidate.worker.to_string(),
            candidate.hit_blocks.to_string(),
            candidate.in_flight.to_string(),
            candidate.queued_tokens.to_string(),
            format!("{:.1}", candidate.cost),
        ];
        row.extend(candidate.terms.iter().map(|(_, value)| format!("{value:.1}")));
        out.add_row(row);
    }
    table::print(out);
    if receipt.waited_ms > 0.0 {
        println!("it had waited {:.0} ms for a worker with room", receipt.waited_ms);
    }
    for (worker, breaker) in &receipt.cut_off {
        println!("{worker} was passed over, it keeps failing: breaker {breaker}");
    }
    if let Some((decode, source)) = &receipt.source {
        let what = if source.compute { "computes the prompt" } else { "gives its first blocks" };
        println!("{} {what} ({} blocks), {decode} answers", source.worker, source.blocks);
    }
    if let Some((to, here, there)) = &receipt.shifted {
        println!("it was asked to go on elsewhere: a step took {here:.0} ms here and would take {there:.0} ms at {to}");
    }
    match receipt.outcome {
        Some(outcome) => println!(
            "came of it: {} of {} prompt tokens cached, first token after {:.0} ms, {} tokens in {:.0} ms, {} workers lost",
            outcome.cached_tokens,
            receipt.prompt_tokens,
            outcome.ttft_ms,
            outcome.answer_tokens,
            outcome.total_ms,
            outcome.resumed
        ),
        None => println!("came of it: it runs, or was refused or lost there"),
    }
}
