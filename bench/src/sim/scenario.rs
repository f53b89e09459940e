//! What is tried, and what is measured: a list of scenarios, each a function from options to figures.
//!
//! Called by the command, the table of bars and tests; builds a [`World`] and does things to it. Pure but for the wall clock
//! of the caller. Each scenario ends with a cluster in which all live nodes agree, or says that they did not.

mod deaths;
mod directory;
mod faults;
mod joins;
mod steady;

use super::{Delay, Micros, SECOND, Setup, World, seconds};

/// Virtual time that nodes get to find each other at the beginning of a scenario, and to agree at its end.
const PATIENCE: Micros = 120 * SECOND;

/// What a scenario is run with.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Nodes.
    pub nodes: usize,
    /// Share of the datagrams lost, 0 to 1.
    pub loss: f64,
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// How long the steady scenario lasts, in virtual minutes.
    pub minutes: u64,
    /// How long packets travel.
    pub delay: Delay,
    /// Whether a node that dies takes its machine along.
    pub machines_die: bool,
    /// Whether progress goes to stderr.
    pub progress: bool,
    /// Whether false deaths are told one by one.
    pub trace: bool,
}

impl Options {
    fn world(&self) -> World {
        let mut world =
            World::new(Setup { seed: self.seed, loss: self.loss, delay: self.delay, machines_die: self.machines_die });
        if self.nodes > 1_000 {
            world.invariants.patience = 120 * SECOND;
        }
        world
    }

    /// A cluster whose nodes started within a second, know each other and have come to rest.
    fn settled(&self) -> World {
        let mut world = self.world();
        world.start_all(self.nodes, SECOND);
        self.agree(&mut world, "the start");
        world.run(5 * SECOND);
        world
    }

    /// Runs until all live nodes agree; that they do not is a breach. Infinite when they did not.
    fn agree(&self, world: &mut World, after: &str) -> f64 {
        let took = world.until(PATIENCE, |world| world.views.agreed());
        if took.is_none() {
            world.invariants.breach(world.now(), || format!("no agreement {:.0} s after {after}", seconds(PATIENCE)));
        }
        took.map_or(f64::INFINITY, seconds)
    }

    fn tell(&self, world: &World, what: &str) {
        if self.progress {
            eprintln!("{:>9.1} s of virtual time, {} events: {what}", seconds(world.now()), world.events);
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        let delay = Delay::default();
        Self { nodes: 10, loss: 0.0, seed: 1, minutes: 60, delay, machines_die: false, progress: false, trace: false }
    }
}

/// Something measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    /// Of what.
    pub name: &'static str,
    /// How much; infinite for what did not happen in time.
    pub value: f64,
    /// In which unit.
    pub unit: &'static str,
    /// The most it may be, where something is expected of it.
    pub bar: Option<f64>,
}

impl Figure {
    /// One with a bar.
    #[must_use]
    pub fn at_most(name: &'static str, value: f64, unit: &'static str, bar: f64) -> Self {
        Self { name, value, unit, bar: Some(bar) }
    }

    /// One that is only told.
    #[must_use]
    pub fn told(name: &'static str, value: f64, unit: &'static str) -> Self {
        Self { name, value, unit, bar: None }
    }

    /// Whether it is what is expected.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.bar.is_none_or(|bar| self.value <= bar)
    }
}

/// What a scenario came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What was measured.
    pub figures: Vec<Figure>,
    /// Invariants that did not hold, in words.
    pub broken: Vec<String>,
    /// Who took whom for dead without reason, in words.
    pub log: Vec<String>,
    /// Virtual time it took.
    pub time: Micros,
    /// Events it took.
    pub events: u64,
}

impl Outcome {
    /// Whether all bars and all invariants hold.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.broken.is_empty() && self.figures.iter().all(Figure::ok)
    }

    /// Of a world at its end.
    pub(super) fn of(world: &mut World, figures: Vec<Figure>) -> Self {
        world.compare();
        let (broken, log) = (world.invariants.broken().to_vec(), world.invariants.log().to_vec());
        Self { figures, broken, log, time: world.now(), events: world.events }
    }
}

/// One thing to try.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// On the command line.
    pub name: &'static str,
    /// In one line.
    pub about: &'static str,
    /// Nodes where the command does not say.
    pub nodes: usize,
    /// Does it.
    pub run: fn(&Options) -> Outcome,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scenario({})", self.name)
    }
}

/// All of them.
pub const SCENARIOS: &[Scenario] = &[
    scenario("start", "all nodes start within a second; until each knows all", 1_000, joins::start),
    scenario("join", "one node more joins a cluster at rest, five times over", 10, joins::join),
    scenario("growth", "nodes join at 100 a second; then one is killed", 10_000, joins::growth),
    scenario("kill", "a node is killed and started again, five times over", 100, deaths::kill),
    scenario("half", "half of the nodes are killed at once", 16, deaths::half),
    scenario("restart", "twenty nodes are killed at once and started in their next life", 100, deaths::restart),
    scenario("leave", "a node says goodbye", 30, deaths::leave),
    scenario("steady", "nothing happens but loss, for --minutes", 100, steady::steady),
    scenario("rumour", "the record of a node gets a new version", 100, steady::rumour),
    scenario("directory", "each node offers 20 models; then records change", 500, directory::directory),
    scenario("split", "two halves are cut off from each other for a minute", 6, faults::split),
    scenario("isolate", "one seed is cut off from all others for a minute", 6, faults::isolate),
    scenario("oneway", "one node is not heard for five minutes, then deaf for five", 10, faults::oneway),
    scenario("freeze", "a process is stopped for a minute", 10, faults::freeze),
    scenario("clash", "two nodes claim one name", 6, faults::clash),
    scenario("clock", "the clock of a node jumps ahead by 30 s, later back by 30 s", 10, faults::clock),
    scenario("slow", "a node gets the processor every 400 ms only, for two minutes", 10, faults::slow),
];

const fn scenario(name: &'static str, about: &'static str, nodes: usize, run: fn(&Options) -> Outcome) -> Scenario {
    Scenario { name, about, nodes, run }
}

impl Scenario {
    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        SCENARIOS.iter().find(|scenario| scenario.name == name)
    }
}

/// Longest time until a death is known everywhere, in seconds, by cluster size.
fn detection_bar(nodes: usize) -> f64 {
    match nodes {
        0..=10 => 4.0,
        11..=100 => 6.0,
        101..=1_000 => 10.0,
        _ => 20.0,
    }
}

/// Most bytes a second that a node sends at rest, by cluster size.
fn traffic_bar(nodes: usize) -> f64 {
    if nodes <= 1_000 { 1_500.0 } else { 2_500.0 }
}
