//! The bars: which scenarios are run, at which sizes and losses, with how many seeds. What each is held to stands in it.
//!
//! Called by the command's `--all` and by tests. Pure: a table.

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Which scenario.
    pub scenario: &'static str,
    /// Nodes.
    pub nodes: usize,
    /// Share of the datagrams lost.
    pub loss: f64,
    /// It is run with seeds 1 to this one.
    pub seeds: u64,
    /// Whether a node that dies takes its machine along.
    pub machines_die: bool,
    /// Whether it takes many minutes: left out unless asked for.
    pub long: bool,
}

const fn row(scenario: &'static str, nodes: usize, loss: f64, seeds: u64) -> Row {
    Row { scenario, nodes, loss, seeds, machines_die: false, long: false }
}

const fn machine(row: Row) -> Row {
    Row { machines_die: true, ..row }
}

const fn long(row: Row) -> Row {
    Row { long: true, ..row }
}

/// All of them.
pub const BARS: &[Row] = &[
    row("start", 10, 0.0, 10),
    row("start", 100, 0.0, 10),
    row("start", 1_000, 0.0, 3),
    row("join", 3, 0.0, 10),
    row("join", 10, 0.0, 10),
    row("join", 100, 0.0, 5),
    row("kill", 3, 0.0, 10),
    machine(row("kill", 3, 0.0, 10)),
    row("kill", 10, 0.0, 10),
    machine(row("kill", 10, 0.0, 10)),
    row("kill", 10, 0.2, 10),
    row("kill", 100, 0.0, 5),
    machine(row("kill", 100, 0.0, 5)),
    row("kill", 100, 0.2, 5),
    machine(row("kill", 100, 0.2, 5)),
    row("kill", 1_000, 0.0, 2),
    machine(row("kill", 1_000, 0.0, 2)),
    row("kill", 1_000, 0.2, 2),
    machine(row("kill", 1_000, 0.2, 2)),
    row("half", 16, 0.0, 10),
    machine(row("half", 16, 0.0, 10)),
    row("restart", 100, 0.0, 5),
    row("leave", 30, 0.0, 10),
    row("split", 6, 0.0, 10),
    row("split", 100, 0.0, 3),
    row("isolate", 6, 0.0, 10),
    row("oneway", 10, 0.0, 10),
    row("freeze", 10, 0.0, 10),
    row("freeze", 100, 0.0, 3),
    row("clash", 6, 0.0, 10),
    row("clock", 10, 0.0, 10),
    row("slow", 10, 0.0, 10),
    row("rumour", 100, 0.0, 5),
    row("directory", 500, 0.0, 1),
    row("steady", 10, 0.0, 3),
    row("steady", 100, 0.0, 1),
    row("steady", 100, 0.05, 3),
    long(row("steady", 1_000, 0.05, 1)),
    long(row("growth", 10_000, 0.0, 1)),
];
