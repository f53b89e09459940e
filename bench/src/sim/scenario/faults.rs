//! What goes wrong around healthy nodes: cuts, stopped processes, clocks, names.

use super::{Figure, Options, Outcome, PATIENCE};
use crate::sim::{MS, SECOND, World, seconds};

fn false_deaths(world: &World) -> Figure {
    Figure::at_most("false deaths", world.invariants.false_deaths() as f64, "", 0.0)
}

pub(super) fn split(options: &Options) -> Outcome {
    let half = options.nodes / 2;
    cut_off(options, &(0..half).collect::<Vec<_>>())
}

pub(super) fn isolate(options: &Options) -> Outcome {
    cut_off(options, &[0])
}

/// A minute apart, then whole again.
fn cut_off(options: &Options, nodes: &[usize]) -> Outcome {
    let mut world = options.settled();
    (0..options.nodes).for_each(|node| world.excuse(node));
    nodes.iter().for_each(|node| world.move_to(*node, 1));
    world.network.split(0, 1);
    world.run(60 * SECOND);
    let together = (0..options.nodes).filter(|node| world.views.listed(*node) == options.nodes - 1).count();
    world.network.heal();
    let took = options.agree(&mut world, "the heal");
    (0..options.nodes).for_each(|node| world.trust(node));
    world.run(20 * SECOND);
    options.agree(&mut world, "the rest");
    let figures = vec![
        Figure::at_most("one cluster again", took, "s", 15.0),
        Figure::at_most("nodes that saw no split after a minute", together as f64, "", 0.0),
        false_deaths(&world),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn oneway(options: &Options) -> Outcome {
    let mut world = options.settled();
    let cut = options.nodes - 1;
    world.move_to(cut, 1);
    let (mut took, mut deaths) = (0.0_f64, [0.0; 2]);
    for (phase, (from, to)) in [(1, 0), (0, 1)].into_iter().enumerate() {
        let before = world.invariants.false_deaths();
        world.excuse(cut);
        world.network.cut(from, to);
        world.run(300 * SECOND);
        deaths[phase] = (world.invariants.false_deaths() - before) as f64;
        world.network.heal();
        took = took.max(options.agree(&mut world, "the cut"));
        world.run(10 * SECOND);
        options.agree(&mut world, "the rest");
        world.trust(cut);
    }
    let figures = vec![
        Figure::at_most("false deaths among the others while one is not heard", deaths[0], "", 0.0),
        Figure::at_most("false deaths among the others while one is deaf", deaths[1], "", 0.0),
        Figure { name: "false deaths among the others, in all", ..false_deaths(&world) },
        Figure::at_most("one cluster again", took, "s", 15.0),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn freeze(options: &Options) -> Outcome {
    let mut world = options.settled();
    let frozen = options.nodes / 2;
    world.excuse(frozen);
    world.freeze(frozen);
    let known = world.until(60 * SECOND, |world| world.views.listed_by(frozen) == 0);
    let rest = 60 * SECOND - known.unwrap_or(60 * SECOND);
    world.run(rest);
    world.thaw(frozen);
    let took = options.agree(&mut world, "the thaw");
    world.trust(frozen);
    world.run(20 * SECOND);
    options.agree(&mut world, "the rest");
    let figures = vec![
        Figure::at_most("alive everywhere after it runs again", took, "s", 5.0),
        Figure::told("down everywhere after it stopped", known.map_or(f64::INFINITY, seconds), "s"),
        false_deaths(&world),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn clash(options: &Options) -> Outcome {
    let mut world = options.settled();
    let (name, one, two) = (options.nodes, options.nodes, options.nodes + 1);
    world.start_as(one, name, one, 1);
    world.run(100 * MS);
    world.start_as(two, name, two, 1);
    let took = world.until(PATIENCE, |world| {
        world.outranked(one).is_some() != world.outranked(two).is_some() && world.views.agreed()
    });
    world.run(20 * SECOND);
    options.agree(&mut world, "the clash");
    let told = [one, two].iter().filter(|slot| world.outranked(**slot).is_some()).count() as f64;
    let figures = vec![
        Figure::at_most("one of the two is told, the others agree", took.map_or(f64::INFINITY, seconds), "s", 10.0),
        Figure::at_most("nodes told to end beyond one", (told - 1.0).abs(), "", 0.0),
        Figure::told("times that the holder was told", world.clashes as f64, ""),
        false_deaths(&world),
    ];
    Outcome::of(&mut world, figures)
}

pub(super) fn clock(options: &Options) -> Outcome {
    let mut world = options.settled();
    let jumps = options.nodes / 2;
    for by in [30 * SECOND as i64, -30 * SECOND as i64] {
        world.jump(jumps, by);
        world.run(60 * SECOND);
    }
    let took = options.agree(&mut world, "the jumps");
    let figures = vec![false_deaths(&world), Figure::told("agreement after the jumps", took, "s")];
    Outcome::of(&mut world, figures)
}

pub(super) fn slow(options: &Options) -> Outcome {
    let mut world = options.settled();
    let slow = options.nodes / 2;
    world.slow_down(slow, 400 * MS);
    world.run(120 * SECOND);
    world.slow_down(slow, 0);
    options.agree(&mut world, "the end");
    let figures = vec![false_deaths(&world)];
    Outcome::of(&mut world, figures)
}
