//! A cluster at rest: false deaths, traffic, and how news of a record spreads.

use super::{Figure, Options, Outcome, traffic_bar};
use crate::sim::{SECOND, seconds};

/// Node-hours that the bar for false deaths speaks of.
const NODE_HOURS: f64 = 1_000.0;

pub(super) fn steady(options: &Options) -> Outcome {
    let mut world = options.settled();
    let (mark, before) = (world.mark(), world.invariants.false_deaths());
    for minute in 0..options.minutes {
        world.run(60 * SECOND);
        if minute % 10 == 9 {
            options.tell(&world, &format!("{} false deaths", world.invariants.false_deaths() - before));
        }
    }
    let rates = world.rates(&mark);
    let deaths = (world.invariants.false_deaths() - before) as f64;
    let node_hours = options.nodes as f64 * options.minutes as f64 / 60.0;
    options.agree(&mut world, "the end");
    // One death more or less says nothing about so short a time: the bar is one, or one in 1,000 node-hours.
    let bar = (node_hours / NODE_HOURS).max(1.0);
    let figures = vec![
        Figure::at_most("false deaths", deaths, "", bar.floor()),
        Figure::told("false deaths in 1,000 node-hours", deaths * NODE_HOURS / node_hours, ""),
        Figure::told("longest false death", seconds(world.invariants.longest_false_death(world.now())), "s"),
        Figure::at_most("healthy nodes down at the end", world.invariants.dead_wrongly() as f64, "", 0.0),
        Figure::at_most("datagrams sent, mean node", rates.udp, "B/s", traffic_bar(options.nodes)),
        Figure::told("datagrams sent, busiest node", rates.udp_most, "B/s"),
        Figure::told("TCP sent, mean node", rates.tcp, "B/s"),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn rumour(options: &Options) -> Outcome {
    let mut world = options.settled();
    let mut took = 0.0_f64;
    for version in 2..7 {
        let from = world.draw(options.nodes);
        world.announce(from, version);
        let everybody = options.nodes - 1;
        let spread = world.until(60 * SECOND, |world| world.heard(from, version) == everybody);
        took = took.max(spread.map_or(f64::INFINITY, seconds));
        world.run(10 * SECOND);
    }
    options.agree(&mut world, "the end");
    Outcome::of(&mut world, vec![Figure::at_most("new version heard of everywhere, worst of 5", took, "s", 3.0)])
}
