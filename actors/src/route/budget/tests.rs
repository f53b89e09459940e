//! A simulation on a virtual clock: clients with delays between them and their owner, owners that die, split or fall silent.

use std::time::Duration;

use proptest::prelude::*;

use starling_ids::NodeId;

use super::{
    BURST_S, LEASE, Lease, LeaseAsk,
    lessee::{Lessee, Spend},
    owner::Owner,
    owners,
};

/// A well mixed number of two others (the finalizer of SplitMix64).
fn mix(seed: u64, number: u64) -> u64 {
    let mut x = seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const TICK_MS: u64 = 20;
const WINDOW_MS: u64 = 60_000;

fn asked(per_minute: u64) -> LeaseAsk {
    LeaseAsk { tenant: "t".to_owned(), per_minute, want: 0, owed: 0 }
}

fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// What the world does to a run.
#[derive(Debug, Clone)]
struct World {
    seed: u64,
    clients: usize,
    per_minute: u64,
    largest: u64,
    seconds: u64,
    /// An owner dies this often, milliseconds; 0 never.
    owner_dies_ms: u64,
    /// Clients of odd number have an owner of their own.
    split: bool,
    /// Questions of a thousand that are lost, after which a client takes its own part.
    lost_per_mille: u64,
    /// A client dies this often and comes back without a memory, milliseconds; 0 never.
    client_dies_ms: u64,
    delay_ms: u64,
    /// Clocks run fast or slow by up to so many in a thousand, and start anywhere.
    drift_per_mille: u64,
    /// Requests also have answers, of other lengths than was expected, that end up to 20 s later.
    answers: bool,
}

impl World {
    /// What a clock shows: clients have the numbers from 0, owners those from 100.
    fn clock(&self, whose: usize, now: u64) -> Duration {
        let draw = mix(self.seed ^ 0xc10c, whose as u64);
        let drift = (draw % (2 * self.drift_per_mille + 1)) as f64 - self.drift_per_mille as f64;
        let started_s = if self.drift_per_mille == 0 { 0.0 } else { ((draw >> 32) % 1_000_000) as f64 };
        Duration::from_secs_f64(started_s + now as f64 / 1e3 * (1.0 + drift / 1e3))
    }
}

/// A question on its way, or its answer.
struct Mail {
    due_ms: u64,
    sent_ms: u64,
    client: usize,
    owed: u64,
    want: u64,
    lease: Option<Lease>,
    lost: bool,
}

#[derive(Default)]
struct Seen {
    /// When and how much was let in.
    charges: Vec<(u64, u64)>,
    /// When each owner's life granted something.
    grants: Vec<Vec<u64>>,
    /// When a client got tokens back that it had paid, and how many.
    credits: Vec<(u64, u64)>,
    /// Times that a client granted to itself.
    alone: Vec<u64>,
    lives: usize,
}

struct Run<'a> {
    world: &'a World,
    clients: Vec<(Lessee, bool)>,
    owners: [(Owner, usize); 2],
    mail: Vec<Mail>,
    /// Answers: when they end, whose they are in which life, what was expected and what they will have had.
    answers: Vec<(u64, usize, usize, u64, u64)>,
    lives: Vec<usize>,
    seen: Seen,
    draws: u64,
}

impl Run<'_> {
    fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        mix(self.world.seed, self.draws) % below.max(1)
    }

    fn ask(&mut self, client: usize, (owed, want): (u64, u64), now: u64) {
        self.clients[client].1 = true;
        let lost = self.draw(1_000) < self.world.lost_per_mille;
        let due_ms = now + 1 + self.draw(self.world.delay_ms);
        self.mail.push(Mail { due_ms, sent_ms: now, client, owed, want, lease: None, lost });
    }

    fn deliver(&mut self, now: u64) {
        let (due, rest) = std::mem::take(&mut self.mail).into_iter().partition(|mail| mail.due_ms <= now);
        self.mail = rest;
        for mut mail in due {
            let (lessee, asking) = &mut self.clients[mail.client];
            match mail.lease {
                _ if mail.lost => {
                    let clock = self.world.clock(mail.client, now);
                    lessee.alone("t", self.world.per_minute, self.world.clients, clock);
                    self.seen.alone.push(now);
                    *asking = false;
                }
                Some(lease) => {
                    lessee.leased("t", lease, self.world.clock(mail.client, mail.sent_ms));
                    *asking = false;
                }
                None => {
                    let at = usize::from(self.world.split && mail.client % 2 == 1);
                    let (owner, life) = &mut self.owners[at];
                    let ask = LeaseAsk { want: mail.want, owed: mail.owed, ..asked(self.world.per_minute) };
                    let lease = owner.grant(&ask, self.world.clock(100 + at, now));
                    if lease.tokens > 0 {
                        self.seen.grants[*life].push(now);
                    }
                    mail.lease = Some(lease);
                    mail.due_ms = now + 1 + self.draw(self.world.delay_ms);
                    self.mail.push(mail);
                }
            }
        }
    }

    fn deaths(&mut self, now: u64) {
        let every = |period: u64| period > 0 && now > 0 && now.is_multiple_of(period);
        if every(self.world.owner_dies_ms / TICK_MS * TICK_MS) {
            let at = self.draw(2) as usize;
            self.owners[at] = (Owner::default(), self.seen.grants.len());
            self.seen.grants.push(Vec::new());
        }
        if every(self.world.client_dies_ms / TICK_MS * TICK_MS) {
            let client = self.draw(self.world.clients as u64) as usize;
            // What is on its way to the dead is read by nobody.
            self.mail.retain(|mail| mail.client != client);
            self.clients[client] = (Lessee::default(), false);
            self.seen.lives += 1;
            self.lives[client] += 1;
        }
    }

    fn end_answers(&mut self, now: u64) {
        let (ended, rest) = std::mem::take(&mut self.answers).into_iter().partition(|(end, ..)| *end <= now);
        self.answers = rest;
        for (_, client, life, expected, real) in ended {
            // The answers of a client that died are settled by nobody.
            if self.lives[client] == life {
                self.clients[client].0.settle("t", expected, real, self.world.clock(client, now));
                self.seen.credits.push((now, expected.saturating_sub(real)));
            }
        }
    }

    fn request(&mut self, client: usize, now: u64) {
        let clock = self.world.clock(client, now);
        let mut tokens = 1 + self.draw(self.world.largest);
        let mut expected = 0;
        if self.world.answers {
            expected = self.clients[client].0.answer_expected("t", self.world.largest, clock).min(tokens);
            tokens = tokens.max(expected);
        }
        match self.clients[client].0.spend("t", tokens, clock) {
            Spend::Paid => {
                self.seen.charges.push((now, tokens));
                if self.world.answers {
                    let (end, real) = (now + self.draw(20_000), self.draw(2 * expected + 1));
                    self.answers.push((end, client, self.lives[client], expected, real));
                }
            }
            Spend::Ask { owed, want } if !self.clients[client].1 => self.ask(client, (owed, want), now),
            Spend::Ask { .. } | Spend::Denied(_) => {}
        }
    }
}

fn run(world: &World) -> Seen {
    let seen = Seen { grants: vec![Vec::new(), Vec::new()], lives: world.clients, ..Seen::default() };
    let clients = (0..world.clients).map(|_| (Lessee::default(), false)).collect();
    let owners = [(Owner::default(), 0), (Owner::default(), 1)];
    let mut run = Run {
        world,
        clients,
        owners,
        mail: Vec::new(),
        answers: Vec::new(),
        lives: vec![0; world.clients],
        seen,
        draws: 0,
    };
    for now in (0..world.seconds * 1_000).step_by(TICK_MS as usize) {
        run.deaths(now);
        run.deliver(now);
        run.end_answers(now);
        for client in 0..world.clients {
            run.request(client, now);
        }
    }
    run.seen
}

/// The module's bound, for the worst minute; the largest share of it that was used.
fn check(world: &World, seen: &Seen) -> Result<f64, TestCaseError> {
    let rate = world.per_minute as f64 / 60.0;
    let (mut end, mut sum, mut worst, mut next) = (0, 0u64, 0.0f64, 0);
    for (from, tokens) in &seen.charges {
        while end < seen.charges.len() && seen.charges[end].0 < from + WINDOW_MS {
            sum += seen.charges[end].1;
            end += 1;
        }
        sum -= tokens;
        // A window every fifth of a second stands for those that begin meanwhile.
        if *from < next {
            continue;
        }
        next = from + 200;
        let earliest = from.saturating_sub(LEASE.as_millis() as u64);
        let inside = |times: &Vec<u64>| times.iter().any(|at| (earliest..from + WINDOW_MS).contains(at));
        let lives = seen.grants.iter().filter(|times| inside(times)).count() as f64;
        let burst = rate * BURST_S + 1.0;
        let seconds = WINDOW_MS as f64 / 1e3 + LEASE.as_secs_f64() * (1.0 + world.drift_per_mille as f64 / 500.0);
        let (mut at_once, mut bursts) = (if world.split { 2.0 } else { 1.0 }, lives * burst);
        if inside(&seen.alone) {
            at_once += 1.0;
            // Each life of a client begins with its part anew.
            bursts += seen.lives as f64 / world.clients as f64 * rate * BURST_S + seen.lives as f64;
        }
        let fast = 1.0 + world.drift_per_mille as f64 / 1e3;
        let credits = seen.credits.iter().filter(|(at, _)| (earliest..from + WINDOW_MS).contains(at));
        let given_back: u64 = credits.map(|(_, tokens)| tokens).sum();
        let granted = at_once * rate * fast * seconds + bursts;
        let bound = granted + given_back as f64 + seen.lives as f64 * (world.largest + 1) as f64;
        let sum = sum + tokens;
        prop_assert!(sum as f64 <= bound, "{sum} tokens from {from} ms, bound {bound}, {lives} owners' lives");
        worst = worst.max(sum as f64 / bound);
    }
    Ok(worst)
}

fn calm() -> World {
    World {
        seed: 1,
        clients: 8,
        per_minute: 60_000,
        largest: 200,
        seconds: 180,
        owner_dies_ms: 0,
        split: false,
        lost_per_mille: 0,
        client_dies_ms: 0,
        delay_ms: 40,
        drift_per_mille: 0,
        answers: false,
    }
}

#[test]
fn eight_greedy_clients_get_the_budget_and_no_more() {
    let world = calm();
    let seen = run(&world);
    let worst = check(&world, &seen).expect("within the bound");
    let last_two: u64 = seen.charges.iter().filter(|(at, _)| *at >= 60_000).map(|(_, tokens)| tokens).sum();
    eprintln!("two minutes of 60,000 tokens each: {last_two} let in; worst minute {worst:.2} of the bound");
    assert!((114_000..=124_000).contains(&last_two), "{last_two} in two minutes of 60,000 each");
}

#[test]
fn without_an_owner_each_has_its_part() {
    let world = World { lost_per_mille: 1_000, ..calm() };
    let seen = run(&world);
    check(&world, &seen).expect("within the bound");
    let last_two: u64 = seen.charges.iter().filter(|(at, _)| *at >= 60_000).map(|(_, tokens)| tokens).sum();
    assert!((90_000..=130_000).contains(&last_two), "{last_two} in two minutes of 60,000 each");
}

#[test]
fn an_owner_that_dies_every_ten_seconds_costs_one_burst_a_life() {
    let world = World { owner_dies_ms: 10_000, ..calm() };
    let seen = run(&world);
    let worst = check(&world, &seen).expect("within the bound");
    assert!(worst > 0.5, "a bound that is never neared says little: {worst:.2}");
}

#[test]
fn a_tenant_has_one_owner_and_its_death_moves_no_other() {
    let nodes: Vec<NodeId> = (0..5).map(|at| NodeId::new(&format!("r{at}")).expect("name")).collect();
    let owner = |tenant: u32, nodes: &[NodeId]| owners(&format!("t{tenant}"), nodes.to_vec())[0].clone();
    let mut owned = [0; 5];
    for tenant in 0..500 {
        let (all, less) = (owner(tenant, &nodes), owner(tenant, &nodes[1..]));
        owned[nodes.iter().position(|node| *node == all).expect("one of them")] += 1;
        assert!(all == nodes[0] || all == less);
    }
    assert!(owned.iter().all(|count| (60..140).contains(count)), "{owned:?}");
}

#[test]
fn what_is_owed_is_paid_before_more_is_let_in() {
    let (mut owner, mut lessee) = (Owner::default(), Lessee::default());
    let mut lease = |lessee: &mut Lessee, owed, want, now| {
        let lease = owner.grant(&LeaseAsk { owed, want, ..asked(6_000) }, now);
        lessee.leased("t", lease, now);
    };
    assert_eq!(lessee.spend("t", 100, ms(0)), Spend::Ask { owed: 0, want: 100 });
    lease(&mut lessee, 0, 100, ms(0));
    assert_eq!(lessee.spend("t", 100, ms(0)), Spend::Paid);
    // It was to be 100 tokens of prompt and answer; the answer was 2,000 longer.
    lessee.settle("t", 50, 2_050, ms(10));
    // The last lease was used up at once, so twice of it beside the debt.
    let Spend::Ask { owed: 2_000, want } = lessee.spend("t", 100, ms(20)) else { panic!("it owes") };
    assert_eq!(want, 2_200);
    lease(&mut lessee, 2_000, want, ms(20));
    // Half of the 1,400 that were left came; the other 1,301 take 13 seconds at 100 a second.
    let Spend::Denied(wait) = lessee.spend("t", 100, ms(20)) else { panic!("the budget is used up") };
    assert!(wait >= Duration::from_secs(12) && wait <= Duration::from_secs(14), "{wait:?}");
}

#[test]
fn a_lease_ends_and_what_is_left_of_it_is_void() {
    let mut lessee = Lessee::default();
    lessee.leased("t", Lease { tokens: 1_000, retry_after_ms: 0, left: 0 }, ms(0));
    assert_eq!(lessee.spend("t", 10, LEASE - ms(1)), Spend::Paid);
    assert_eq!(lessee.spend("t", 10, LEASE), Spend::Ask { owed: 0, want: 10 });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whoever dies, whatever is lost or late: no minute costs more than the bound says.
    #[test]
    fn no_minute_is_above_the_bound(
        seed: u64,
        clients in 1usize..9,
        per_minute in 600u64..120_000,
        largest in 1u64..3_000,
        owner_dies_ms in prop_oneof![Just(0u64), 3_000u64..40_000],
        split: bool,
        lost_per_mille in prop_oneof![Just(0u64), 0u64..400],
        client_dies_ms in prop_oneof![Just(0u64), 20_000u64..60_000],
        delay_ms in 1u64..800,
        drift_per_mille in prop_oneof![Just(0u64), 1u64..20],
        answers: bool,
    ) {
        let world = World {
            seed, clients, per_minute, largest, seconds: 100, owner_dies_ms, split, lost_per_mille, client_dies_ms, delay_ms,
            drift_per_mille, answers,
        };
        check(&world, &run(&world))?;
    }
}

#[test]
fn a_client_knows_how_its_budget_stands() {
    let (mut lessee, mut owner) = (Lessee::default(), Owner::default());
    let standing = |lessee: &Lessee, at| {
        let standing = lessee.standing("t", 600, ms(at));
        (standing.remaining, standing.reset.as_secs())
    };
    // Fifteen seconds of ten tokens can be spent at once.
    assert_eq!(standing(&lessee, 0), (150, 0));
    assert_eq!(lessee.spend("t", 40, ms(0)), Spend::Ask { owed: 0, want: 40 });
    let lease = owner.grant(&LeaseAsk { want: 40, ..asked(600) }, ms(0));
    assert_eq!((lease.tokens, lease.left), (40, 110));
    lessee.leased("t", lease, ms(0));
    assert_eq!(standing(&lessee, 0), (150, 0), "leased is not spent");
    assert_eq!(lessee.spend("t", 60, ms(0)), Spend::Paid);
    assert_eq!(standing(&lessee, 0), (90, 6));
    assert_eq!(standing(&lessee, 2_000), (110, 4));
    // An owner that has nothing: the debt is all there is.
    lessee.leased("t", Lease { tokens: 0, retry_after_ms: 3_000, left: 0 }, ms(2_000));
    assert_eq!(standing(&lessee, 2_000), (0, 17));
    assert_eq!(standing(&lessee, 60_000), (130, 2), "what is owed is still to be paid");
}
