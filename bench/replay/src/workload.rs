//! Made-up traffic: conversations of several turns, and agents that branch.
//!
//! Called by `starling bench replay --sessions` and `--agentic`. Pure; a seed gives the same traffic every time.

use std::time::Duration;

use super::trace::{Asked, Piece, mix};

/// Conversations of several turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sessions {
    /// How many.
    pub count: usize,
    /// Of them begin in a second, Poisson.
    pub rate: f64,
    /// Turns of one, mean of a geometric distribution; at least 1.
    pub turns: f64,
    /// Applications, each with a system prompt of its own that all its sessions begin with.
    pub applications: u64,
    /// Tokens of a system prompt.
    pub system: u32,
    /// Tokens of the first question after it, mean; half to one and a half times that.
    pub first: u32,
    /// Tokens of each later question, mean likewise.
    pub question: u32,
    /// Tokens of an answer, mean likewise.
    pub answer: u32,
    /// Between an answer and the next question, mean, exponential.
    pub think: Duration,
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            count: 1_000,
            rate: 10.0,
            turns: 4.0,
            applications: 16,
            system: 512,
            first: 1_536,
            question: 96,
            answer: 128,
            think: Duration::from_secs(5),
        }
    }
}

/// Agents: each works in steps, and at some of them sends out helpers that go on from its context at the same time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agents {
    /// How many.
    pub count: usize,
    /// Of them begin in a second, Poisson.
    pub rate: f64,
    /// Steps of one before and after it branches.
    pub steps: u32,
    /// Helpers at once.
    pub branches: u32,
    /// Steps of each helper.
    pub depth: u32,
    /// Tokens of instructions and tools, the same for all.
    pub system: u32,
    /// Tokens of a tool's result, mean; half to one and a half times that.
    pub result: u32,
    /// Tokens of an answer, mean likewise.
    pub answer: u32,
    /// A tool's run, mean, exponential.
    pub tool: Duration,
}

impl Default for Agents {
    fn default() -> Self {
        Self {
            count: 200,
            rate: 1.0,
            steps: 3,
            branches: 4,
            depth: 3,
            system: 4_096,
            result: 768,
            answer: 160,
            tool: Duration::from_secs(2),
        }
    }
}

/// The requests of such sessions; those of a session stand behind each other.
#[must_use]
pub fn sessions(what: &Sessions, seed: u64) -> Vec<Asked> {
    let mut draws = Draws(mix(seed, 1));
    let (mut asked, mut begin) = (Vec::new(), 0.0);
    for session in 0..what.count as u64 {
        begin += draws.exponential(1.0 / what.rate.max(1e-9));
        let application = draws.below(what.applications.max(1));
        let own = mix(mix(seed, 2), session);
        let system = Piece { id: mix(mix(seed, 3), application), tokens: what.system };
        let mut pieces = vec![system, Piece { id: own, tokens: draws.around(what.first) }];
        let (mut last, mut turn): (Option<usize>, u64) = (None, 0);
        loop {
            let at = match last {
                None => Duration::from_secs_f64(begin),
                Some(_) => draws.pause(what.think),
            };
            let answer = draws.around(what.answer);
            asked.push(follow(&asked, std::mem::take(&mut pieces), last.into_iter().collect(), at, answer));
            if draws.unit() >= 1.0 - 1.0 / what.turns.max(1.0) {
                break;
            }
            (last, turn) = (Some(asked.len() - 1), turn + 1);
            pieces.push(Piece { id: mix(own, turn), tokens: draws.around(what.question) });
        }
    }
    asked
}

/// The requests of such agents.
#[must_use]
pub fn agents(what: &Agents, seed: u64) -> Vec<Asked> {
    let mut draws = Draws(mix(seed, 11));
    let (mut asked, mut begin) = (Vec::new(), 0.0);
    for agent in 0..what.count as u64 {
        begin += draws.exponential(1.0 / what.rate.max(1e-9));
        let mut script = Script { what, draws: &mut draws, asked: &mut asked, own: mix(mix(seed, 12), agent), said: 0 };
        let system = Piece { id: mix(seed, 13), tokens: what.system };
        let task = script.piece();
        let first = script.ask(vec![system, task], Vec::new(), Duration::from_secs_f64(begin));
        let before = script.chain(first, what.steps.saturating_sub(1));
        let helpers: Vec<usize> = (0..what.branches).map(|_| script.helper(before)).collect();
        // The agent goes on from its own context with what each helper found.
        let found: Vec<Piece> = (0..what.branches.max(1)).map(|_| script.piece()).collect();
        let pause = script.draws.pause(what.tool);
        let waits = std::iter::once(before).chain(helpers).collect();
        let joined = script.ask(found, waits, pause);
        script.chain(joined, what.steps.saturating_sub(1));
    }
    asked
}

/// One agent as it is written down.
struct Script<'a> {
    what: &'a Agents,
    draws: &'a mut Draws,
    asked: &'a mut Vec<Asked>,
    own: u64,
    said: u64,
}

impl Script<'_> {
    fn piece(&mut self) -> Piece {
        self.said += 1;
        Piece { id: mix(self.own, self.said), tokens: self.draws.around(self.what.result) }
    }

    fn ask(&mut self, pieces: Vec<Piece>, after: Vec<usize>, at: Duration) -> usize {
        let answer = self.draws.around(self.what.answer);
        self.asked.push(follow(self.asked, pieces, after, at, answer));
        self.asked.len() - 1
    }

    /// So many more steps, each after the one before it.
    fn chain(&mut self, from: usize, steps: u32) -> usize {
        (0..steps).fold(from, |last, _| {
            let piece = self.piece();
            let pause = self.draws.pause(self.what.tool);
            self.ask(vec![piece], vec![last], pause)
        })
    }

    /// A helper goes on from the agent's context with a task of its own; its first step comes at once.
    fn helper(&mut self, from: usize) -> usize {
        let task = self.piece();
        let first = self.ask(vec![task], vec![from], Duration::from_millis(10));
        self.chain(first, self.what.depth.saturating_sub(1))
    }
}

fn follow(earlier: &[Asked], pieces: Vec<Piece>, after: Vec<usize>, at: Duration, answer: u32) -> Asked {
    let base = after.first().and_then(|base| earlier.get(*base)).map_or(0, |base| base.prompt + base.answer);
    let prompt = base + pieces.iter().map(|piece| piece.tokens).sum::<u32>();
    Asked { at, prompt, answer, pieces, after }
}

/// A sequence of random numbers.
#[derive(Debug)]
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0, 0x5eed)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    fn pause(&mut self, mean: Duration) -> Duration {
        Duration::from_secs_f64(self.exponential(mean.as_secs_f64()))
    }

    /// Evenly from half to one and a half times the mean, at least 1.
    fn around(&mut self, mean: u32) -> u32 {
        (f64::from(mean) * (0.5 + self.unit())).round().max(1.0) as u32
    }
}
