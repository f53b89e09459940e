//! Random faults on random clusters, with nothing asked but the invariants and that all agree at the end.
//!
//! Called by the command's `--fuzz` and by tests. Pure: one seed decides the cluster and all that happens to it.

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{Delay, MS, Micros, Outcome, SECOND, Setup, World};

/// Slots beyond the first nodes, for nodes that join later.
const JOINERS: usize = 4;
/// Time that the cluster gets to agree once nothing happens to it any more.
const PATIENCE: Micros = 60 * SECOND;

/// One random run. `told` is given each deed in words.
pub fn fuzz(seed: u64, mut told: impl FnMut(String)) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let nodes = rng.random_range(3..=40);
    let loss = [0.0, 0.0, 0.02, 0.1, 0.2][rng.random_range(0..5)];
    let delay = if rng.random() {
        Delay::default()
    } else {
        Delay { most: 30 * MS, tail_share: 0.05, tail: 200 * MS, least: MS }
    };
    let mut world = World::new(Setup { seed, loss, delay, machines_die: rng.random() });
    told(format!("{nodes} nodes, {loss} lost, machines die: {}", world.setup.machines_die));
    world.start_all(nodes, rng.random_range(0..10) * SECOND / 2);
    if rng.random() {
        world.until(PATIENCE, |world| world.views.agreed());
    }
    for _ in 0..rng.random_range(3..=25) {
        let deed = deed(&mut world, nodes, &mut rng);
        told(format!("{:.3} s: {deed}", super::seconds(world.now())));
        let pause = if rng.random() { rng.random_range(0..=SECOND) } else { rng.random_range(0..=20 * SECOND) };
        world.run(pause);
    }
    mend(&mut world, nodes);
    told(format!("{:.3} s: all is mended", super::seconds(world.now())));
    if world.until(PATIENCE, |world| world.views.agreed()).is_none() {
        world.invariants.breach(world.now(), || "no agreement 60 s after all was mended".to_owned());
    }
    if loss == 0.0 {
        world.run(15 * SECOND);
        if !world.views.agreed() {
            world.invariants.breach(world.now(), || "what was agreed did not last".to_owned());
        }
    }
    Outcome::of(&mut world, Vec::new())
}

/// Does something to the cluster, and says what.
fn deed(world: &mut World, nodes: usize, rng: &mut StdRng) -> String {
    let slot = rng.random_range(0..nodes);
    match rng.random_range(0..14) {
        // Node 0 is the seed that is always to be found: without one, nodes that start know nobody and nobody knows them.
        0 | 1 if slot > 0 && world.is_live(slot) => {
            world.kill(slot);
            format!("{slot} is killed")
        }
        2 | 3 if !world.is_frozen(slot) => {
            world.start(slot);
            format!("{slot} starts in its next life")
        }
        4 if slot > 0 && !world.is_frozen(slot) => {
            world.start_at(slot, slot, 100 + slot);
            format!("{slot} starts in its next life at another address")
        }
        5 | 6 if world.is_live(slot) => {
            world.excuse(slot);
            world.freeze(slot);
            format!("{slot} is stopped")
        }
        7 => thaw_one(world, nodes),
        8 if slot > 0 && world.is_live(slot) => {
            world.leave(slot);
            format!("{slot} says goodbye")
        }
        9 => {
            let (from, to) = if rng.random() { (0, 1) } else { (1, 0) };
            world.move_to(slot, 1);
            world.network.cut(from, to);
            format!("{slot} moves to side 1; side {to} does not hear side {from}")
        }
        10 => {
            let members: Vec<usize> = (0..nodes).filter(|_| rng.random()).collect();
            members.iter().for_each(|slot| world.move_to(*slot, 1));
            world.network.split(0, 1);
            format!("{members:?} and the others are cut off from each other")
        }
        11 => {
            whole(world, nodes);
            "the network is whole again".to_owned()
        }
        12 if world.is_live(slot) => {
            let by = rng.random_range(-20..=20) * SECOND as i64;
            world.jump(slot, by);
            format!("the clock of {slot} jumps by {} s", by / SECOND as i64)
        }
        13 => {
            let joiner = nodes + rng.random_range(0..JOINERS);
            world.start(joiner);
            format!("{joiner} joins, or starts again")
        }
        _ => "nothing".to_owned(),
    }
}

fn whole(world: &mut World, nodes: usize) {
    (0..nodes).for_each(|slot| world.move_to(slot, 0));
    world.network.heal();
}

fn thaw_one(world: &mut World, nodes: usize) -> String {
    match (0..nodes).find(|slot| world.is_frozen(*slot)) {
        Some(slot) => {
            world.thaw(slot);
            world.trust(slot);
            format!("{slot} runs on")
        }
        None => "nothing".to_owned(),
    }
}

/// Everything works again, and all seeds run.
fn mend(world: &mut World, nodes: usize) {
    whole(world, nodes);
    while (0..nodes).any(|slot| world.is_frozen(slot)) {
        thaw_one(world, nodes);
    }
    for seed in 0..3 {
        if !world.is_live(seed) {
            world.start_at(seed, seed, seed);
        }
    }
}
