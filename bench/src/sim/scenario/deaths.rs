//! Nodes that end: one, half of them, twenty at once, and one in good order.

use super::{Figure, Options, Outcome, PATIENCE, detection_bar};
use crate::sim::{MS, SECOND, seconds};

pub(super) fn kill(options: &Options) -> Outcome {
    let mut world = options.settled();
    let (mut down, mut back) = (0.0_f64, 0.0_f64);
    for round in 0..5 {
        let victim = (options.nodes / 2 + round) % options.nodes;
        world.kill(victim);
        let took = world.until(PATIENCE, |world| world.views.listed_by(victim) == 0);
        down = down.max(took.map_or(f64::INFINITY, seconds));
        options.agree(&mut world, "a kill");
        world.run(2 * SECOND);
        world.start(victim);
        back = back.max(options.agree(&mut world, "a restart"));
        world.run(3 * SECOND);
    }
    let figures = vec![
        Figure::at_most("killed node down everywhere, worst of 5", down, "s", detection_bar(options.nodes)),
        Figure::told("and back everywhere after its start", back, "s"),
        Figure::told("false deaths", world.invariants.false_deaths() as f64, ""),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn half(options: &Options) -> Outcome {
    let mut world = options.settled();
    for victim in 0..options.nodes / 2 {
        world.kill(victim);
    }
    let took = options.agree(&mut world, "the kill");
    world.run(10 * SECOND);
    options.agree(&mut world, "the rest");
    let figures = vec![
        Figure::at_most("all down everywhere", took, "s", detection_bar(options.nodes)),
        Figure::at_most("false deaths", world.invariants.false_deaths() as f64, "", 0.0),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn restart(options: &Options) -> Outcome {
    let mut world = options.settled();
    let restarted = 20.min(options.nodes / 2);
    for victim in 0..restarted {
        world.kill(options.nodes - 1 - victim);
    }
    world.run(300 * MS);
    for victim in 0..restarted {
        world.start(options.nodes - 1 - victim);
    }
    let took = options.agree(&mut world, "the restarts");
    world.run(30 * SECOND);
    options.agree(&mut world, "the rest");
    let figures = vec![
        Figure::at_most("new lives known everywhere", took, "s", 5.0),
        Figure::at_most("false deaths", world.invariants.false_deaths() as f64, "", 0.0),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn leave(options: &Options) -> Outcome {
    let mut world = options.settled();
    let leaver = options.nodes / 2;
    world.leave(leaver);
    let took = world.until(PATIENCE, |world| world.views.listed_by(leaver) == 0).map_or(f64::INFINITY, seconds);
    world.run(10 * SECOND);
    world.start(leaver);
    let back = options.agree(&mut world, "its return");
    let figures = vec![
        Figure::at_most("goodbye known everywhere", took, "s", 1.0),
        Figure::at_most("new life known everywhere", back, "s", 3.0),
    ];
    Outcome::of(&mut world, figures)
}
