//! From an arrival to a worker: which gateway, which router, which decision; as the product's client and shard do it.
//!
//! A gateway asks the first two routers of its own ranking in turn; when neither decides it takes the less loaded of two
//! drawn, by the last accounts it heard. A frozen gateway does nothing until it thaws; the load balancer stops giving it
//! requests [`BALANCER_NOTICES`] after it froze.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use starling_actors::route::{
    desk::Decision,
    fallback::two_choices,
    queue::turns::{self, Caches, Waits},
    slots::{rank, slot_of},
};
use starling_ids::{BlockHash, TokenId};
use starling_kv::hash::block_hashes;

use super::{
    Cluster, Event, Router, Served, alone_ms,
    waiting::{Known, Waiter},
};
use crate::{
    setup::BLOCK,
    trace::{mix, write_tokens},
};

/// Token ids that made-up prompts use.
const VOCABULARY: u32 = 256;
/// Routers asked before a gateway decides by itself.
const ROUTERS_TRIED: usize = 2;
/// How long a load balancer goes on to give requests to a gateway that does not answer.
const BALANCER_NOTICES: Duration = Duration::from_secs(2);
/// One decision of so many is compared with the best there was.
const SAMPLED: usize = 8;

impl Cluster<'_> {
    /// Routers as a gateway ranks them for this model, by its own view of who is alive.
    pub(super) fn ranked(&self, gateway: usize) -> Vec<usize> {
        let slot = slot_of(None, None, 1);
        let alive = self.gateways[gateway].routers.clone();
        let place = |node| self.nodes.iter().position(|known| *known == node);
        rank(&self.model, slot, alive).into_iter().filter_map(place).collect()
    }

    pub(super) fn arrive(&mut self, request: usize) {
        let asked = &self.asked[request];
        let tokens = self.prompt(request);
        let base = tokens.len() as u32 - asked.pieces.iter().map(|piece| piece.tokens).sum::<u32>();
        let hashes: Arc<[BlockHash]> = block_hashes(self.seed, &tokens, BLOCK as usize).into();
        let served = Served { at: self.now, index: request, prompt: tokens.len() as u32, base, ..Served::default() };
        let gateway = self.balance(request);
        let live = &mut self.live[request];
        (live.tokens, live.hashes, live.served, live.gateway) = (Some(tokens), hashes, served, gateway);
        let held = self.thaws(gateway).map_or(Duration::ZERO, |thaws| thaws - self.now);
        self.after(held, Event::Ask { request, tried: 0 });
    }

    /// Prompt and answer of the one it goes on from, then its own pieces.
    fn prompt(&mut self, request: usize) -> Arc<[TokenId]> {
        let asked = &self.asked[request];
        let mut tokens = Vec::with_capacity(asked.prompt as usize);
        if let Some(base) = asked.after.first() {
            let base = &mut self.live[*base];
            tokens.extend_from_slice(base.tokens.as_deref().unwrap_or_default());
            tokens.extend_from_slice(&base.said);
        }
        write_tokens(&asked.pieces, VOCABULARY, &mut tokens);
        for before in &asked.after {
            self.live[*before].followers.retain(|follower| *follower != request);
            self.forget_text(*before);
        }
        tokens.into()
    }

    /// Text that nobody goes on from is not kept.
    pub(super) fn forget_text(&mut self, request: usize) {
        let live = &mut self.live[request];
        if live.done && live.followers.is_empty() {
            (live.tokens, live.said) = (None, Vec::new());
        }
    }

    /// The load balancer's choice: any gateway, but not one that has not answered for a while.
    fn balance(&self, request: usize) -> usize {
        let count = self.gateways.len() as u64;
        let drawn = (mix(self.setup.seed ^ 0xba1a, request as u64) % count) as usize;
        match self.frozen {
            Some((gateway, from, until))
                if gateway == drawn && (from + BALANCER_NOTICES..until).contains(&self.now) && count > 1 =>
            {
                (drawn + 1 + (mix(request as u64, 7) % (count - 1)) as usize) % count as usize
            }
            _ => drawn,
        }
    }

    /// When a gateway that stands still now goes on.
    pub(super) fn thaws(&self, gateway: usize) -> Option<Duration> {
        self.frozen
            .filter(|(frozen, from, until)| *frozen == gateway && (*from..*until).contains(&self.now))
            .map(|(_, _, until)| until)
    }

    pub(super) fn ask(&mut self, request: usize, tried: usize) {
        let gateway = self.live[request].gateway;
        if self.setup.decide_apart {
            if self.decide(request, gateway) {
                self.send(request, 1);
            }
            return;
        }
        match self.ranked(gateway).get(tried).filter(|_| tried < ROUTERS_TRIED) {
            Some(router) => {
                let way = if *router == gateway { Duration::ZERO } else { self.setup.wire };
                self.after(way, Event::Decide { request, router: *router, tried });
            }
            None => self.fall_back(request),
        }
    }

    pub(super) fn decide_at(&mut self, request: usize, router: usize, tried: usize) {
        let own = router == self.live[request].gateway;
        match self.routers[router] {
            Router::Decides(desk) => {
                if self.line.is_empty() && self.decide(request, desk) {
                    self.send(request, if own { 1 } else { 2 });
                } else if self.setup.queue.is_some() {
                    self.wait_in_line(request, desk);
                }
            }
            // A dead process refuses, one that does not know the workers yet says so: the answer comes back at once.
            Router::Dead | Router::Standby | Router::Rebuilding => {
                let way = if own { Duration::ZERO } else { self.setup.wire };
                self.after(way, Event::Ask { request, tried: tried + 1 });
            }
        }
    }

    /// What a request asks for.
    pub(super) fn waiter(&self, request: usize) -> Waiter {
        let live = &self.live[request];
        Waiter { request, hashes: live.hashes.clone(), prompt: live.served.prompt, answer_max: self.context }
    }

    /// Chooses and reserves. False when there is no worker: without a queue that fails the request.
    fn decide(&mut self, request: usize, at: usize) -> bool {
        let waiter = self.waiter(request);
        let Some(Some(desk)) = self.desks.get_mut(at) else { return false };
        let began = Instant::now();
        let known = Known(&self.index);
        let overlaps = known.overlaps(&waiter.hashes);
        let decision = turns::decide(desk, &known, (waiter.ask(), Duration::ZERO), &overlaps, self.now);
        self.run.deciding += began.elapsed();
        let Some(decision) = decision else { return false };
        self.granted(request, at, &decision);
        true
    }

    /// A worker was found.
    pub(super) fn granted(&mut self, request: usize, at: usize, decision: &Decision) {
        let worker = self.workers.iter().position(|worker| worker.id == decision.worker).unwrap_or_default();
        let live = &mut self.live[request];
        live.ticket = Some((at, decision.ticket));
        (live.served.worker, live.served.predicted) = (worker, decision.hit_blocks * BLOCK);
        if request.is_multiple_of(SAMPLED) {
            self.compare(request);
        }
    }

    /// How much sooner the answer could have begun, by what the engines really have to do.
    fn compare(&mut self, request: usize) {
        let found = self.index.matches(&self.live[request].hashes, usize::MAX);
        let Served { worker: chosen, prompt, .. } = self.live[request].served;
        let wait = |at: usize| {
            let worker = &self.workers[at];
            let held = found.iter().find(|hit| hit.worker == worker.id);
            let hit = held.map_or(0, |hit| hit.depth as u32 * BLOCK);
            let left = if worker.stepping.is_some() { worker.until.saturating_sub(self.now) } else { Duration::ZERO };
            let queued =
                u32::try_from(starling_engine::Engine::load(&worker.engine).prefill_tokens).unwrap_or(u32::MAX);
            let work = prompt.saturating_sub(hit).max(1).saturating_add(queued);
            left.as_secs_f64() * 1e3 + alone_ms(&self.setup.timing, work, self.setup.step_tokens)
        };
        let best = (0..self.workers.len()).map(wait).min_by(f64::total_cmp).unwrap_or_default();
        let regret = wait(chosen) - best;
        self.run.regrets.push(regret);
    }

    fn fall_back(&mut self, request: usize) {
        self.run.fallbacks += 1;
        let own = &self.gateways[self.live[request].gateway].own;
        let load = |(at, heard): (usize, &Option<_>)| {
            let heard: Option<starling_actors::route::fleet::Heard> = *heard;
            own[at].max(heard.map_or(0, |heard| heard.running + heard.waiting))
        };
        let loads: Vec<u32> = self.heard.iter().enumerate().map(load).collect();
        let draw = mix(self.setup.seed ^ 0xfa11, request as u64);
        let Some(worker) = two_choices(&loads, (draw as u32, (draw >> 32) as u32)) else { return };
        self.live[request].served.worker = worker;
        self.send(request, 1);
    }

    /// To its worker, so many hops away.
    pub(super) fn send(&mut self, request: usize, hops: u32) {
        let live = &self.live[request];
        let worker = live.served.worker;
        self.gateways[live.gateway].own[worker] += 1;
        self.after(self.setup.wire * hops, Event::Submit { worker, request });
    }
}
