//! What engines do with requests, and what gateways and routers hear of it.

use std::{sync::Arc, time::Duration};

use starling_actors::{
    report::LoadReport,
    route::{fleet::Heard, receipt::Outcome},
};
use starling_engine::{SamplingParams, SequenceDelta, SequenceId, SequenceRequest, StopParams};
use starling_ids::TokenId;
use starling_kv::events::KvEvent;

use super::{Cluster, Event, Following, LIFE, SimError};

impl Cluster<'_> {
    pub(super) fn submit(&mut self, worker: usize, request: usize) {
        let live = &mut self.live[request];
        let prompt: Arc<[TokenId]> = live.tokens.clone().unwrap_or_default();
        if live.followers.is_empty() {
            live.tokens = None;
        }
        let sequence = SequenceRequest {
            id: SequenceId(request as u64),
            prompt,
            answered: 0,
            hash_seed: self.seed,
            sampling: SamplingParams::greedy(),
            stop: StopParams {
                tokens_max: self.asked[request].answer,
                tokens_min: 0,
                token_ids: Vec::new(),
                ignore_eos: true,
            },
            logprobs: None,
            priority: 0,
        };
        // One that is refused counts as failed: it never ends.
        let Ok(number) = self.workers[worker].submit(sequence) else { return };
        self.after(self.setup.wire * 2, Event::Confirmed { request, number });
        self.tell(worker, Vec::new());
    }

    pub(super) fn step(&mut self, worker: usize) -> Result<(), SimError> {
        if let Some((takes, started)) = self.workers[worker].begin(self.now)? {
            for id in started {
                let served = &mut self.live[id.0 as usize].served;
                served.queued = self.now.saturating_sub(served.at);
            }
            self.after(takes, Event::Stepped { worker });
        }
        Ok(())
    }

    pub(super) fn stepped(&mut self, worker: usize) {
        let Some(output) = self.workers[worker].end_step() else { return };
        for delta in output.deltas {
            self.deliver(&delta);
        }
        self.tell(worker, output.events);
    }

    /// Tokens reach the gateway; one that stands still reads them when it goes on.
    fn deliver(&mut self, delta: &SequenceDelta) {
        let request = delta.id.0 as usize;
        let gateway = self.live[request].gateway;
        let arrived = self.thaws(gateway).unwrap_or(self.now) + self.setup.wire;
        let live = &mut self.live[request];
        live.served.cached += delta.cached_tokens.unwrap_or(0);
        live.count += delta.tokens.len() as u32;
        if !live.followers.is_empty() {
            live.said.extend(delta.tokens.iter().map(|token| token.id));
        }
        let first = live.first.is_none();
        if first {
            live.first = Some(arrived);
            live.served.ttft = arrived - live.served.at;
        }
        let over = delta.finish.is_some();
        if over {
            live.done = true;
            live.served.e2e = arrived - live.served.at;
            live.served.answer = live.count;
            let gaps = live.count.saturating_sub(1).max(1);
            live.served.itl_mean = live.served.e2e.saturating_sub(live.served.ttft) / gaps;
        }
        let way = arrived + self.setup.wire - self.now;
        if first {
            self.after(way, Event::Prefilled(request));
        }
        if over {
            self.after(way, Event::Ended(request));
        }
    }

    /// The gateway has the whole answer: everything held for it goes back, and who waited for it comes.
    pub(super) fn ended(&mut self, request: usize) {
        self.run.ended.push(self.now);
        let live = &self.live[request];
        let outcome = Outcome { answer_tokens: live.count, ..Outcome::default() };
        let (gateway, worker) = (live.gateway, live.served.worker);
        self.at_desk(request, |desk, ticket| {
            desk.ended(ticket, outcome);
            desk.release(ticket);
        });
        self.live[request].ticket = None;
        self.live[request].hashes = Arc::default();
        let own = &mut self.gateways[gateway].own[worker];
        *own = own.saturating_sub(1);
        for follower in self.live[request].followers.clone() {
            self.live[follower].waits -= 1;
            if self.live[follower].waits == 0 {
                self.after(self.asked[follower].at, Event::Arrive(follower));
            }
        }
        self.forget_text(request);
        // In a closed loop a session keeps its place until its last turn.
        if self.setup.concurrency.is_some() && self.live[request].followers.is_empty() {
            self.arrive_next();
        }
    }

    fn tell(&mut self, worker: usize, events: Vec<KvEvent>) {
        let report = self.workers[worker].report(self.now).map(Box::new);
        if !events.is_empty() || report.is_some() {
            self.after(self.setup.wire, Event::News { worker, events, report });
        }
    }

    pub(super) fn hear(
        &mut self,
        worker: usize,
        events: Vec<KvEvent>,
        report: Option<Box<LoadReport>>,
    ) -> Result<(), SimError> {
        match &mut self.following[worker] {
            Following::Nobody => {}
            Following::Catching(waiting) => waiting.extend(events),
            Following::Live => {
                for event in &events {
                    self.index.apply(&self.workers[worker].id, LIFE, event)?;
                }
            }
        }
        if let Some(report) = report {
            let heard = account(&report, self.now);
            self.heard[worker] = Some(heard);
            self.tell_desks(worker, heard);
        }
        Ok(())
    }

    fn tell_desks(&mut self, worker: usize, heard: Heard) {
        let id = &self.workers[worker].id;
        for desk in self.desks.iter_mut().flatten() {
            desk.hear(id, LIFE, heard);
        }
    }
}

fn account(report: &LoadReport, at: Duration) -> Heard {
    Heard {
        at,
        running: report.load.running,
        waiting: report.load.waiting,
        prefill_tokens: report.load.prefill_tokens,
        blocks_pinned: report.load.blocks_pinned,
        admitted: report.admitted,
        rates: report.rates,
        link: report.link,
        tiers: report.tiers,
    }
}
