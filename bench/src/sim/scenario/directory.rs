//! Directories at size: many nodes that each offer many models, one of which changes.

use std::collections::BTreeMap;

use starling_cluster::discovery::{Instance, InstanceKind, Lifecycle, NodeRecord};
use starling_ids::{EndpointName, ModelId};

use super::{Figure, Options, Outcome};
use crate::sim::{MS, Micros, SECOND, World, seconds};

/// Models on each node.
const MODELS: usize = 20;
const STEP: Micros = 10 * MS;

pub(super) fn directory(options: &Options) -> Outcome {
    let mut world = options.settled();
    for slot in 0..options.nodes {
        world.offer(slot, |record| record.instances = (0..MODELS).filter_map(instance).collect());
    }
    let begun = world.mark();
    let filled = wait(&mut world, |world| world.records_agree());
    let filling = world.rates(&begun);
    options.tell(&world, "all hold all records");
    let filling_bytes = filling.tcp * filled;
    world.run(20 * SECOND);
    let (mut small, mut large) = (0.0_f64, 0.0_f64);
    for round in 0..5 {
        let slot = world.draw(options.nodes);
        small = small.max(change(&mut world, options, slot, |record| {
            if let Some(instance) = record.instances.first_mut() {
                instance.labels.insert("load".to_owned(), round.to_string());
            }
        }));
        large = large.max(change(&mut world, options, slot, |record| {
            record.instances.extend(instance(MODELS + round));
        }));
    }
    options.tell(&world, "all have heard of all changes");
    let mark = world.mark();
    world.run(60 * SECOND);
    let rest = world.rates(&mark);
    options.agree(&mut world, "the end");
    let figures = vec![
        Figure::at_most("all records everywhere, after all were offered at once", filled, "s", 10.0),
        Figure::told("TCP sent for that, mean node", filling_bytes / 1e3, "kB"),
        Figure::at_most("a changed label everywhere, worst of 5", small, "s", 3.0),
        Figure::at_most("a new instance everywhere, worst of 5", large, "s", 3.0),
        Figure::told("datagrams sent at rest, mean node", rest.udp, "B/s"),
        Figure::told("TCP sent at rest, mean node", rest.tcp, "B/s"),
    ];
    Outcome::of(&mut world, figures)
}

fn change(world: &mut World, options: &Options, slot: usize, how: impl FnOnce(&mut NodeRecord)) -> f64 {
    let version = world.publish(slot, how);
    let took = wait(world, |world| world.holders(slot, version) == options.nodes);
    world.run(5 * SECOND);
    took
}

fn wait(world: &mut World, done: impl Fn(&World) -> bool) -> f64 {
    let begun = world.now();
    while !done(world) {
        if world.now() - begun > 60 * SECOND {
            return f64::INFINITY;
        }
        world.run(STEP);
    }
    seconds(world.now() - begun)
}

/// What a worker says of one model.
fn instance(model: usize) -> Option<Instance> {
    let endpoint = EndpointName::new(&format!("starling/worker/{model}")).ok()?;
    let labels = [("engine", "embedded"), ("quantization", "q4_1"), ("zone", "eu-west-1a")];
    Some(Instance {
        model: ModelId::new(&format!("org/model-{model:02}-instruct")).ok(),
        labels: BTreeMap::from(labels.map(|(key, value)| (key.to_owned(), value.to_owned()))),
        capacity: Some(64),
        layout: Some(model as u64),
        ..Instance::new(endpoint, InstanceKind::Worker, Lifecycle::Serving)
    })
}
