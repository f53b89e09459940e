//! Nodes that join: all at once, one more, a hundred a second.

use super::{Figure, Options, Outcome, PATIENCE, detection_bar, traffic_bar};
use crate::sim::{MS, SECOND, World, seconds};

pub(super) fn start(options: &Options) -> Outcome {
    let mut world = options.world();
    world.start_all(options.nodes, SECOND);
    let took = options.agree(&mut world, "the start") + 1.0;
    options.tell(&world, "all know all");
    world.run(10 * SECOND);
    options.agree(&mut world, "the rest");
    let figures = vec![
        Figure::at_most("all know all, since the first started", took, "s", 10.0),
        Figure::at_most("false deaths", world.invariants.false_deaths() as f64, "", 0.0),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn join(options: &Options) -> Outcome {
    let mut world = options.settled();
    let (mut known, mut knows) = (0.0_f64, 0.0_f64);
    for joiner in options.nodes..options.nodes + 5 {
        world.start(joiner);
        let everybody = world.live().count() - 1;
        let took = world.until(PATIENCE, |world| world.views.known_by(joiner) == everybody);
        known = known.max(took.map_or(f64::INFINITY, seconds));
        let more = options.agree(&mut world, "a join");
        knows = knows.max(took.map_or(f64::INFINITY, seconds) + more);
        world.run(5 * SECOND);
    }
    let bar = if options.nodes <= 10 { 1.0 } else { 3.0 };
    let figures = vec![
        Figure::at_most("joiner known everywhere, worst of 5", known, "s", bar),
        Figure::at_most("and knows everybody, worst of 5", knows, "s", bar),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn growth(options: &Options) -> Outcome {
    let mut world = options.world();
    let begun = std::time::Instant::now();
    for node in 0..options.nodes {
        world.start(node);
        world.run(10 * MS);
        if node % 250 == 249 {
            tell_growth(options, &world, node + 1, begun);
        }
    }
    let last = options.nodes - 1;
    let knows = world.until(PATIENCE, |world| world.views.agrees(last)).map_or(f64::INFINITY, seconds);
    options.tell(&world, "the last knows all");
    let known = knows + options.agree(&mut world, "the last join");
    options.tell(&world, "all know all");
    world.run(20 * SECOND);
    let mark = world.mark();
    world.run(20 * SECOND);
    let rates = world.rates(&mark);
    options.tell(&world, "traffic was measured");
    let victim = options.nodes / 2;
    world.kill(victim);
    let down = world.until(PATIENCE, |world| world.views.listed_by(victim) == 0).map_or(f64::INFINITY, seconds);
    options.agree(&mut world, "the kill");
    let figures = vec![
        Figure::at_most("the last to join knows all, since it joined", knows, "s", 60.0),
        Figure::told("all know all, since the last joined", known, "s"),
        Figure::at_most("killed node down everywhere", down, "s", detection_bar(options.nodes)),
        Figure::at_most("datagrams sent at rest, mean node", rates.udp, "B/s", traffic_bar(options.nodes)),
        Figure::told("datagrams sent at rest, busiest node", rates.udp_most, "B/s"),
        Figure::told("TCP sent at rest, mean node", rates.tcp, "B/s"),
        Figure::told("most datagrams of one node in one second", rates.peak / 1e3, "kB"),
        Figure::at_most("false deaths", world.invariants.false_deaths() as f64, "", 0.0),
    ];
    Outcome::of(&mut world, figures)
}

/// The work grows with the square of the nodes, and so does the estimate.
fn tell_growth(options: &Options, world: &World, joined: usize, begun: std::time::Instant) {
    let spent = begun.elapsed().as_secs_f64();
    let left = spent * ((options.nodes as f64 / joined as f64).powi(2) - 1.0);
    options.tell(world, &format!("{joined} joined, {spent:.0} s spent, about {left:.0} s until all have"));
}
