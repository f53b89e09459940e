//! Who is called down while it lives: by a node that was cut off, or by word of mouth alone.

use foca::{Header, Message};

use super::{cluster::*, *};

/// Whether each of `others` lists each other one of them.
fn all_listed(sim: &Sim, others: &[usize]) -> Result<(), (usize, usize)> {
    for one in others {
        for other in others.iter().filter(|other| *other != one) {
            knows(&sim.nodes[*one], &format!("n{other}")).ok_or((*one, *other))?;
        }
    }
    Ok(())
}

/// When a cut is mended the node hears one answer first, and has waited for all the others for long.
#[test]
fn a_node_whose_cut_is_mended_accuses_nobody() {
    for seed in 100..103 {
        for mute in [true, false] {
            let mut sim = Sim::joined(seed, 0.0, 10);
            let cut = if mute { &mut sim.mute } else { &mut sim.deaf };
            cut.insert(address(9));
            let others: Vec<usize> = (0..9).collect();
            sim.run(15 * SECOND + Duration::from_millis(37 * (seed - 100)));
            sim.mute.clear();
            sim.deaf.clear();
            for step in 0..120 {
                sim.run(SECOND / 40);
                assert_eq!(all_listed(&sim, &others), Ok(()), "seed {seed}, mute {mute}, step {step}");
            }
            sim.until(10 * SECOND, "healed", Sim::agreed);
            assert!(others.iter().all(|one| sim.nodes[*one].driver.identity().generation == 0), "seed {seed}");
        }
    }
}

#[test]
fn the_word_of_one_that_another_is_down_is_checked_with_that_one() {
    for seed in 110..114 {
        let mut sim = Sim::joined(seed, 0.05, 10);
        let [teller, told, accused] = [1, 2, 5].map(|node: usize| sim.nodes[node].driver.identity().clone());
        let header = Header { src: teller.clone(), src_incarnation: 0, dst: told.clone(), message: Message::Gossip };
        let packet = message::packet(&header, Some(&Member::down(accused))).expect("encodes");
        sim.deliver(teller.address(), told.address(), message::swim(&packet));
        let all: Vec<usize> = (0..10).collect();
        for step in 0..100 {
            sim.run(SECOND / 40);
            assert_eq!(all_listed(&sim, &all), Ok(()), "seed {seed}, step {step}");
        }
        assert_eq!(sim.nodes[5].driver.identity().generation, 1, "seed {seed}: it was told, and came back");
        assert!(sim.agreed());
    }
}

/// Who comes back from the dead keeps what it found out about others to itself.
#[test]
fn who_was_down_forgets_whom_it_held_for_down() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    let life = |node: usize| Identity::new(name(&format!("n{node}")), address(node), Incarnation(1));
    driver.import((1..4).map(|node| Member::alive(life(node))).collect(), SECOND);
    driver.learn(vec![Member::down(life(1))], learn::PassOn::Yes);
    assert!(driver.export().iter().any(|member| *member == Member::down(life(1))));
    let own = driver.identity().clone();
    driver.learn(vec![Member::down(own)], learn::PassOn::Yes);
    driver.settle();
    assert_eq!(driver.identity().generation, 1);
    assert!(!driver.export().iter().any(|member| member.state() == State::Down));
    driver.believe(&[Member::alive(life(1))]);
    driver.learn(vec![Member::alive(life(1))], learn::PassOn::Yes);
    assert_eq!(driver.member_count(), 3, "others say that it lives");
}
