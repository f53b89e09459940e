//! `starling why`: why a request went where it went, and what came of it.

use clap::Args;
use starling_actors::{
    generate::KvSource,
    route::receipt::{Lower, Receipt},
};
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
remembers its last 1,024 decisions for each model. The term load is what blocks
on the worker's slower tiers take to the device, where that is sooner than
computing them; what was assumed of these tiers is printed below.

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
    let terms = term_names(receipt);
    let mut head = vec!["", "worker", "hit blocks", "in flight", "queued tokens", "cost"];
    head.extend(&terms);
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
        row.extend(terms.iter().map(|term| {
            let value = candidate.terms.iter().find(|(name, _)| name == term);
            table::or_dash(value.map(|(_, value)| format!("{value:.1}")))
        }));
        out.add_row(row);
    }
    table::print(out);
    for candidate in &receipt.candidates {
        if let Some(lower) = &candidate.lower {
            println!("{}", lower_line(&candidate.worker.to_string(), lower));
        }
    }
    if receipt.waited_ms > 0.0 {
        let what = if receipt.waited_for.is_empty() { "a worker with room" } else { &receipt.waited_for };
        println!("it had waited {:.0} ms in the router's queue, for {what}", receipt.waited_ms);
    }
    for (worker, breaker) in &receipt.cut_off {
        println!("{worker} was passed over, it keeps failing: breaker {breaker}");
    }
    if let Some((decode, source)) = &receipt.source {
        println!("{}, {decode} answers", source_line(source));
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

/// Every term that some candidate has, in their order.
fn term_names(receipt: &Receipt) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in receipt.candidates.iter().flat_map(|candidate| &candidate.terms) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

/// Who computes the prompt, or gives blocks of it, and from which of its tiers.
fn source_line(source: &KvSource) -> String {
    let KvSource { worker, compute, blocks, host, disk, reading_ms, .. } = source;
    if *compute {
        return format!("{worker} computes the prompt ({blocks} blocks)");
    }
    let tiers = [(*host, "its host memory"), (*disk, "its disk")].into_iter().filter(|(blocks, _)| *blocks > 0);
    let tiers: Vec<String> = tiers.map(|(blocks, tier)| format!("{blocks} from {tier}")).collect();
    let read =
        if tiers.is_empty() { String::new() } else { format!(", {}, read in {reading_ms} ms", tiers.join(" and ")) };
    format!("{worker} gives its first blocks ({blocks} blocks{read})")
}

/// What a candidate has on its slower tiers, and what was assumed of them.
fn lower_line(worker: &str, lower: &Lower) -> String {
    let Lower { host_blocks, disk_blocks, loaded, rates } = lower;
    let mut tiers = Vec::new();
    if *host_blocks > 0 {
        tiers.push(format!("{host_blocks} blocks in host memory, {:.2} ms each", rates.host_ms));
    }
    if *disk_blocks > 0 {
        tiers.push(format!(
            "{disk_blocks} blocks on disk, {:.2} ms each after {:.1} ms",
            rates.disk_ms, rates.disk_wait_ms
        ));
    }
    let rest = host_blocks + disk_blocks - loaded.min(&(host_blocks + disk_blocks));
    let done = match (*loaded, rest) {
        (0, _) => "computing them is sooner".to_owned(),
        (_, 0) => "loading them is sooner than computing them".to_owned(),
        (loaded, rest) => format!("loads {loaded}, computes {rest} sooner"),
    };
    format!("{worker} has {}: {done}", tiers.join(" and "))
}

#[cfg(test)]
mod tests {
    use starling_actors::route::below::TierRates;
    use starling_ids::{Incarnation, NodeId, WorkerId};

    use super::*;

    #[test]
    fn the_tiers_that_a_peer_gives_from_are_said() {
        let worker = WorkerId { node: NodeId::new("a").expect("name"), index: 0 };
        let mut source = KvSource {
            worker,
            incarnation: Incarnation(1),
            compute: false,
            blocks: 93,
            host: 0,
            disk: 0,
            reading_ms: 0,
        };
        assert_eq!(source_line(&source), "a/0 gives its first blocks (93 blocks)");
        (source.host, source.disk, source.reading_ms) = (20, 40, 61);
        assert_eq!(
            source_line(&source),
            "a/0 gives its first blocks (93 blocks, 20 from its host memory and 40 from its disk, read in 61 ms)"
        );
        source.compute = true;
        assert_eq!(source_line(&source), "a/0 computes the prompt (93 blocks)");
    }

    #[test]
    fn what_was_assumed_of_slower_tiers_is_said() {
        let rates = TierRates { host_ms: 0.1, disk_ms: 1.5, disk_wait_ms: 0.5, lends: true };
        let mut lower = Lower { host_blocks: 60, disk_blocks: 30, loaded: 90, rates };
        assert_eq!(
            lower_line("a/0", &lower),
            "a/0 has 60 blocks in host memory, 0.10 ms each and 30 blocks on disk, 1.50 ms each after 0.5 ms: \
             loading them is sooner than computing them"
        );
        lower.loaded = 60;
        assert!(lower_line("a/0", &lower).ends_with("loads 60, computes 30 sooner"));
        lower = Lower { host_blocks: 0, loaded: 0, ..lower };
        assert!(lower_line("a/0", &lower).ends_with("after 0.5 ms: computing them is sooner"));
    }
}
