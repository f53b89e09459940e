//! Whole clusters of drivers on a virtual clock. Every failure names the seed that shows it.

mod accused;
mod cluster;

use cluster::*;

use super::*;

#[test]
fn a_frozen_node_is_back_within_five_seconds_everywhere() {
    for (seed, n) in [(11, 10), (12, 30)] {
        let mut sim = Sim::cluster(seed, 0.0, n);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.freeze(4);
        sim.until(6 * SECOND, "freeze known", Sim::agreed);
        sim.run(24 * SECOND);
        sim.thaw(4);
        let back = sim.until(5 * SECOND, "thawed node back", Sim::agreed);
        sim.run(10 * SECOND);
        assert!(sim.agreed(), "seed {seed}: nobody was accused by the thawed node");
        println!("seed {seed}: {n} nodes: back after {back:?}");
    }
}

#[test]
fn mem_01_an_isolated_node_finds_back_with_and_without_seeds() {
    for (seed, isolated) in [(21, 2), (22, 0), (23, 5)] {
        let mut sim = Sim::new(seed, 0.0);
        sim.start("n0", 0, 1, &[]);
        for node in 1..6 {
            sim.start(&format!("n{node}"), node, 1, &[0]);
        }
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.cut.insert(address(isolated));
        sim.run(60 * SECOND);
        assert!(sim.nodes[isolated].driver.members().is_empty(), "mem_03, seed {seed}: it knows it is alone");
        sim.cut.clear();
        let healed = sim.until(30 * SECOND, "healed", Sim::agreed);
        println!("seed {seed}: node {isolated} back after {healed:?}");
        assert!(sim.nodes.iter().all(|node| node.outranked.is_none()), "seed {seed}");
    }
}

#[test]
fn two_halves_become_one_cluster_again() {
    let mut sim = Sim::cluster(25, 0.02, 12);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.cut.extend((0..6).map(address));
    sim.run(40 * SECOND);
    sim.cut.clear();
    let healed = sim.until(30 * SECOND, "healed", Sim::agreed);
    println!("seed 25: halves merged after {healed:?}");
}

#[test]
fn seeds_may_start_in_any_order_and_later_than_the_others() {
    for seed in 31..34 {
        let mut sim = Sim::new(seed, 0.0);
        for node in [3, 4, 5] {
            sim.start(&format!("n{node}"), node, 1, &[0, 1]);
        }
        sim.run(20 * SECOND);
        for node in [1, 0] {
            sim.start(&format!("n{node}"), node, 1, &[0, 1]);
        }
        sim.until(5 * SECOND, "joined", Sim::agreed);
    }
}

#[test]
fn mem_05_a_restart_on_another_port_replaces_the_earlier_life() {
    for seed in 41..44 {
        let mut sim = Sim::cluster(seed, 0.0, 8);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.nodes[5].running = false;
        sim.run(Duration::from_millis(300));
        sim.start("n5", 25, 2, &[0, 1]);
        let replaced = sim.until(3 * SECOND, "restart known", Sim::agreed);
        println!("seed {seed}: new life known after {replaced:?}");
        sim.run(20 * SECOND);
        assert!(sim.agreed(), "seed {seed}: news about the earlier life does not hurt the new one");
    }
}

#[test]
fn mem_06_an_address_under_a_new_name_leaves_one_entry() {
    let mut sim = Sim::cluster(45, 0.0, 6);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[5].running = false;
    sim.start("renamed", 5, 1, &[0]);
    sim.until(6 * SECOND, "old name down", Sim::agreed);
    assert_eq!(knows(&sim.nodes[0], "n5"), None);
    assert_eq!(knows(&sim.nodes[0], "renamed"), Some(Incarnation(1)));
}

#[test]
fn mem_07_of_two_nodes_with_one_name_one_is_told_and_the_rest_is_unharmed() {
    for (seed, boots) in [(51, (1, 1)), (52, (3, 1)), (53, (1, 3))] {
        let mut sim = Sim::cluster(seed, 0.0, 6);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        let one = sim.start("w", 20, boots.0, &[0]);
        let two = sim.start("w", 21, boots.1, &[1]);
        sim.until(10 * SECOND, "one is told", |sim| {
            sim.nodes[one].outranked.is_some() != sim.nodes[two].outranked.is_some() && sim.agreed()
        });
        sim.run(20 * SECOND);
        assert!(sim.agreed(), "seed {seed}");
        let loser = if boots.0 <= boots.1 { one } else { two };
        let told = sim.nodes[loser].outranked.clone().expect("told");
        assert!(!told.down && told.holder.is_some(), "seed {seed}: {told:?}");
    }
}

#[test]
fn a_node_that_lost_its_counter_is_told_that_its_name_was_held_later() {
    let mut sim = Sim::cluster(55, 0.0, 4);
    sim.start("w", 20, 7, &[0]);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[4].running = false;
    sim.until(6 * SECOND, "down", Sim::agreed);
    let again = sim.start("w", 20, 1, &[0]);
    sim.until(5 * SECOND, "told", |sim| sim.nodes[again].outranked.is_some());
    let told = sim.nodes[again].outranked.clone().expect("told");
    assert!(told.down && told.holder.is_some_and(|holder| holder.incarnation == Incarnation(7)));
}

#[test]
fn a_goodbye_is_heard_at_once_and_a_new_life_is_welcome() {
    let mut sim = Sim::cluster(71, 0.0, 8);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    let now = sim.now;
    sim.nodes[3].driver.leave(now);
    sim.perform(3);
    sim.nodes[3].running = false;
    let known = sim.until(SECOND, "goodbye known", Sim::agreed);
    println!("goodbye known after {known:?}");
    sim.start("n3", 3, 2, &[0]);
    sim.until(3 * SECOND, "mem_16: back", Sim::agreed);
}

#[test]
fn mem_09_a_goodbye_is_heard_by_all_although_most_members_have_just_died() {
    for seed in 73..76 {
        let mut sim = Sim::cluster(seed, 0.0, 30);
        sim.until(10 * SECOND, "joined", Sim::agreed);
        for dead in 3..29 {
            sim.nodes[dead].running = false;
        }
        let now = sim.now;
        sim.nodes[29].driver.leave(now);
        sim.perform(29);
        sim.nodes[29].running = false;
        let unknown = |sim: &Sim| (0..3).all(|node| knows(&sim.nodes[node], "n29").is_none());
        sim.until(SECOND / 2, "goodbye known", unknown);
    }
}

#[test]
fn a_goodbye_of_an_earlier_life_or_under_another_address_changes_nothing() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    let now = Identity::new(name("w"), address(9), Incarnation(5)).in_generation(2);
    driver.import(vec![Member::alive(now.clone())], SECOND);
    let others = [
        Identity::new(name("w"), address(9), Incarnation(4)),
        Identity::new(name("w"), address(8), Incarnation(5)),
        now.clone().in_generation(1),
        Identity::new(name("stranger"), address(7), Incarnation(1)),
    ];
    for other in others {
        let word = message::word(&message::Word::Leaving(other)).expect("encodes");
        driver.receive(address(9), &word, SECOND).expect("well formed");
        assert_eq!(driver.members().len(), 1);
    }
    let word = message::word(&message::Word::Leaving(now)).expect("encodes");
    driver.receive(address(9), &word, SECOND).expect("well formed");
    assert!(driver.members().is_empty());
}

#[test]
fn a_stranger_at_the_address_of_a_seed_is_found_in_seconds() {
    for seed in 35..38 {
        let mut sim = Sim::new(seed, 0.0);
        for node in [0, 3, 4, 5] {
            sim.start(&format!("n{node}"), node, 1, &[0]);
        }
        sim.until(10 * SECOND, "joined", Sim::agreed);
        sim.nodes[0].running = false;
        sim.run(20 * SECOND);
        sim.start("successor", 0, 1, &[]);
        let found = sim.until(6 * SECOND, "found", Sim::agreed);
        println!("seed {seed}: found after {found:?}");
    }
}

#[test]
fn mem_11_late_news_of_an_earlier_life_revives_nobody() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    let life = |boot| Identity::new(name("w"), address(9), Incarnation(boot));
    let told = [Member::alive(life(1)), Member::down(life(1)), Member::down(life(10)), Member::alive(life(2))];
    for news in told {
        driver.import(vec![news], SECOND);
    }
    assert!(driver.members().is_empty());
    assert_eq!(driver.holder(&name("w")), Some((life(10), true)));
}

#[test]
fn mem_12_a_hundred_renewals_leave_one_entry() {
    let mut driver = Driver::new(Identity::new(name("me"), address(0), Incarnation(1)), 1, SECOND);
    for generation in 0..100 {
        let renewed = Identity::new(name("w"), address(9), Incarnation(1)).in_generation(generation);
        driver.import(vec![Member::alive(renewed.clone()), Member::down(renewed)], SECOND);
    }
    assert_eq!(driver.export().len(), 2, "the member and the node itself");
}

#[test]
fn rumours_reach_everybody_within_a_second_or_two() {
    let mut sim = Sim::cluster(81, 0.0, 20);
    sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.nodes[7].driver.announce_version(42, None);
    let everybody = |sim: &Sim| {
        let told = |node: &Node| node.rumours.iter().any(|rumour| rumour.version == 42);
        sim.live().all(|(at, node)| at == 7 || told(node))
    };
    let spread = sim.until(2 * SECOND, "rumour spread", everybody);
    println!("rumour known to 20 nodes after {spread:?}");
}

fn generations(sim: &Sim) -> u32 {
    sim.nodes.iter().map(|node| node.driver.identity().generation).sum()
}

/// Payload, seal, UDP and IP headers of one node in a second, on average.
fn traffic(sim: &mut Sim, time: Duration) -> f64 {
    let (packets, bytes) = (sim.sent, sim.nodes.iter().map(|node| node.bytes).sum::<u64>());
    sim.run(time);
    let bytes = sim.nodes.iter().map(|node| node.bytes).sum::<u64>() - bytes;
    let overhead = (crate::security::SEAL_OVERHEAD as u64 + 28) * (sim.sent - packets);
    (bytes + overhead) as f64 / time.as_secs_f64() / sim.nodes.len() as f64
}

#[test]
fn a_join_is_known_everywhere_within_a_second_in_small_clusters() {
    for (seed, n) in [(1, 3), (2, 10), (3, 10)] {
        let mut sim = Sim::joined(seed, 0.0, n - 1);
        sim.start("late", 90, 1, &[0]);
        let known = sim.until(SECOND, "join known", Sim::agreed);
        println!("seed {seed}: {n} nodes: join known after {known:?}");
    }
}

#[test]
fn a_killed_node_is_down_everywhere_in_time_and_so_is_one_without_power() {
    for (seed, n, loss, limit) in [(4, 3, 0.0, 4), (5, 10, 0.0, 4), (6, 10, 0.05, 4), (7, 50, 0.0, 5), (8, 50, 0.2, 6)]
    {
        let mut sim = Sim::joined(seed, loss, n);
        sim.kill(n - 1);
        let killed = sim.until(limit * SECOND, "kill known", Sim::agreed);
        sim.run(5 * SECOND);
        sim.unplug(n - 2);
        let unplugged = sim.until(limit * SECOND, "loss of power known", Sim::agreed);
        println!("seed {seed}: {n} nodes, loss {loss}: killed {killed:?}, unplugged {unplugged:?}");
        assert_eq!(generations(&sim), 0, "seed {seed}");
    }
}

#[test]
fn a_hundred_nodes_find_each_other_and_a_death_at_a_fifth_of_all_packets_lost() {
    let mut sim = Sim::cluster(9, 0.2, 100);
    let joined = sim.until(10 * SECOND, "joined", Sim::agreed);
    sim.run(5 * SECOND);
    sim.unplug(50);
    let known = sim.until(6 * SECOND, "death known", Sim::agreed);
    println!("seed 9: joined {joined:?}, death known {known:?}");
    assert_eq!(generations(&sim), 0);
}

#[test]
fn a_broken_link_makes_a_kill_known_in_a_second() {
    for (seed, n) in [(10, 5), (11, 10)] {
        let mut sim = Sim::joined(seed, 0.0, n);
        sim.kill(0);
        let now = sim.now;
        sim.nodes[1].driver.suspect_hint(&name("n0"), Incarnation(1), now);
        sim.perform(1);
        let known = sim.until(SECOND, "kill known", Sim::agreed);
        println!("seed {seed}: {n} nodes: known after {known:?}");
        // A hint about a node that is well does it no harm, nor one about an earlier life.
        for incarnation in [1, 7] {
            let now = sim.now;
            sim.nodes[1].driver.suspect_hint(&name("n2"), Incarnation(incarnation), now);
            sim.perform(1);
        }
        sim.run(5 * SECOND);
        assert!(sim.agreed() && generations(&sim) == 0);
    }
}

#[test]
fn half_of_a_cluster_and_nearly_all_of_one_may_die_at_once() {
    for (seed, n, dead, limit) in [(12, 16, 8, 8), (13, 30, 27, 12)] {
        for power in [true, false] {
            let mut sim = Sim::joined(seed, 0.0, n);
            for node in n - dead..n {
                if power { sim.kill(node) } else { sim.unplug(node) }
            }
            let known = sim.until(limit * SECOND, "deaths known", Sim::agreed);
            println!("seed {seed}: {dead} of {n} dead, power {power}: known after {known:?}");
            assert_eq!(generations(&sim), 0, "seed {seed}: the survivors never doubted each other aloud");
        }
    }
}

/// None of the others is ever declared down, by anybody, and none has to rejoin.
#[test]
fn one_way_cuts_of_one_node_in_ten_hurt_no_other() {
    for (seed, mute) in [(14, true), (15, false)] {
        let mut sim = Sim::joined(seed, 0.0, 10);
        if mute {
            sim.mute.insert(address(4))
        } else {
            sim.deaf.insert(address(4))
        };
        let others: Vec<usize> = (0..10).filter(|node| *node != 4).collect();
        for _ in 0..300 {
            sim.run(SECOND);
            for one in &others {
                for other in others.iter().filter(|other| *other != one) {
                    assert!(knows(&sim.nodes[*one], &format!("n{other}")).is_some(), "seed {seed}: {one} lost {other}");
                }
                assert_eq!(sim.nodes[*one].driver.identity().generation, 0, "seed {seed}: {one} had to rejoin");
            }
        }
        let generation = sim.nodes[4].driver.identity().generation;
        assert!(generation <= 2, "seed {seed}: {generation} rejoins of the one that is cut");
        assert!(others.iter().all(|one| knows(&sim.nodes[*one], "n4").is_none()), "seed {seed}");
        sim.mute.clear();
        sim.deaf.clear();
        let healed = sim.until(10 * SECOND, "healed", Sim::agreed);
        sim.run(5 * SECOND);
        assert!(sim.agreed() && others.iter().all(|one| sim.nodes[*one].driver.identity().generation == 0));
        println!("seed {seed}, mute {mute}: healed after {healed:?}");
    }
}

#[test]
fn a_frozen_node_accuses_nobody_and_keeps_its_table() {
    for seed in [16, 17] {
        let mut sim = Sim::joined(seed, 0.0, 10);
        sim.freeze(4);
        sim.run(60 * SECOND);
        assert_eq!(sim.nodes[4].driver.member_count(), 9);
        sim.thaw(4);
        let back = sim.until(5 * SECOND, "back", Sim::agreed);
        for _ in 0..40 {
            sim.run(SECOND / 2);
            assert!(sim.agreed(), "seed {seed}");
        }
        let own = sim.nodes[4].driver.identity().generation;
        assert_eq!(generations(&sim), own, "seed {seed}: nobody else had to rejoin");
        println!("seed {seed}: back after {back:?}");
    }
}

#[test]
fn a_standstill_of_a_second_is_no_death() {
    let mut sim = Sim::joined(18, 0.0, 10);
    for node in [3, 5, 7] {
        sim.freeze(node);
        sim.run(Duration::from_millis(1200));
        sim.thaw(node);
        sim.run(2 * SECOND);
        assert!(sim.agreed());
    }
    assert_eq!(generations(&sim), 0);
}

#[test]
fn lost_packets_kill_nobody_and_fill_no_packets() {
    for (seed, n, loss, most) in
        [(61, 20, 0.0, 800.0), (62, 20, 0.05, 1000.0), (63, 20, 0.2, 1500.0), (64, 60, 0.2, 1500.0)]
    {
        let mut sim = Sim::cluster(seed, loss, n);
        sim.until(20 * SECOND, "joined", Sim::agreed);
        sim.run(20 * SECOND);
        let bytes = traffic(&mut sim, if n > 20 { 20 * SECOND } else { 60 * SECOND });
        println!("seed {seed}: {n} nodes, loss {loss}: {bytes:.0} bytes a second");
        assert!(bytes < most, "seed {seed}: {bytes} bytes a second");
        assert!(sim.agreed());
        assert_eq!(generations(&sim), 0, "seed {seed}: somebody was declared down");
    }
}

#[test]
fn both_are_told_of_a_clash_of_names() {
    for seed in [65, 66] {
        let mut sim = Sim::joined(seed, 0.0, 6);
        let first = sim.start("w", 20, 2, &[0]);
        sim.until(5 * SECOND, "joined", Sim::agreed);
        let second = sim.start("w", 21, 1, &[1]);
        sim.until(5 * SECOND, "both told", |sim| {
            let loser = &sim.nodes[second];
            loser.outranked.is_some() && sim.nodes[first].rivals.iter().any(|rival| rival == loser.driver.identity())
        });
        sim.run(5 * SECOND);
        assert!(sim.agreed() && sim.nodes[first].outranked.is_none());
    }
}

/// Two drivers that exchange states, and the bytes of it.
fn exchange(asker: &mut Driver, asked: &mut Driver) -> (usize, usize) {
    let (mut bytes, mut steps, mut ask) = (0, 0, Some(asker.exchange_open()));
    while let Some(question) = ask {
        let reply = asked.exchange_serve(&question, SECOND).expect("a question");
        assert!(question.len().max(reply.len()) <= EXCHANGE_MAX);
        bytes += question.len() + reply.len();
        steps += 1;
        ask = asker.exchange_next(&reply, SECOND).expect("a reply");
    }
    (bytes, steps)
}

fn driver(port: usize) -> Driver {
    Driver::new(Identity::new(name(&format!("n{port}")), address(port), Incarnation(1)), port as u64, SECOND)
}

fn crowd(from: usize, to: usize) -> Vec<Member<Identity>> {
    let id = |at| Identity::new(name(&format!("crowd-{at}")), address(at), Incarnation(1));
    (from..to).map(|at| Member::alive(id(at))).collect()
}

#[test]
fn an_exchange_tells_both_sides_what_only_one_knew_and_little_when_they_agree() {
    let (mut one, mut other) = (driver(1), driver(2));
    one.import(crowd(0, 300), SECOND);
    other.import(crowd(200, 500), SECOND);
    exchange(&mut one, &mut other);
    assert_eq!(one.fingerprint(), other.fingerprint());
    assert_eq!((one.member_count(), other.member_count()), (501, 501));
    let (bytes, steps) = exchange(&mut one, &mut other);
    assert!(bytes < 700 && steps == 1, "{bytes} bytes in {steps} steps for nothing");
    one.import(crowd(600, 601), SECOND);
    let (bytes, steps) = exchange(&mut one, &mut other);
    assert!(bytes < 2000 && steps <= 2, "{bytes} bytes in {steps} steps for one member");
    assert_eq!(one.fingerprint(), other.fingerprint());
}

#[test]
fn an_exchange_of_many_members_goes_in_pieces() {
    let (mut joiner, mut member) = (driver(1), driver(2));
    member.import(crowd(0, 5000), SECOND);
    let (bytes, steps) = exchange(&mut joiner, &mut member);
    assert!(steps >= 3, "{steps} steps");
    assert_eq!(joiner.fingerprint(), member.fingerprint());
    println!("5000 members in {steps} steps of {bytes} bytes");
}

/// mem_09, mem_11: who is down is told where it matters, and the memory of it ends.
#[test]
fn mem_09_an_exchange_ends_the_belief_in_a_dead_member_and_does_not_hand_its_memory_on() {
    let (mut knows, mut believes, mut fresh) = (driver(1), driver(2), driver(3));
    let dead = Identity::new(name("dead"), address(9), Incarnation(4));
    believes.import(vec![Member::alive(dead.clone())], SECOND);
    knows.import(vec![Member::down(dead.clone())], SECOND);
    exchange(&mut believes, &mut knows);
    assert_eq!(believes.knows(&name("dead")), Some((Incarnation(4), false)), "not at the first word");
    (1..=5).for_each(|step| believes.tick(SECOND + step * SECOND / 10));
    assert_eq!(believes.knows(&name("dead")), Some((Incarnation(4), true)));
    for asked in [&mut knows, &mut believes] {
        exchange(&mut fresh, asked);
    }
    for other in [&mut knows, &mut believes] {
        exchange(other, &mut fresh);
    }
    assert!(!fresh.members().contains_key(&name("dead")));
    exchange(&mut fresh, &mut believes);
    let before = believes.export().len();
    exchange(&mut believes, &mut fresh);
    assert_eq!(believes.export().len(), before);
}

#[test]
fn a_joiner_exchanges_at_once_and_everybody_knows_it() {
    let mut sim = Sim::joined(91, 0.0, 40);
    let joiner = sim.start("late", 60, 1, &[0]);
    let knows_all = |sim: &Sim| sim.nodes[joiner].driver.member_count() == 40;
    let known = sim.until(SECOND / 2, "the joiner knows all", knows_all);
    let seen = sim.until(2 * SECOND, "joiner known", Sim::agreed);
    println!("the joiner knew all after {known:?} and was known after {seen:?}");
    assert!(sim.exchanged > 0);
}

#[test]
fn the_settings_follow_the_size_of_the_cluster() {
    let mut one = driver(1);
    let class = |driver: &Driver| driver.class;
    one.import(crowd(0, 60), SECOND);
    assert_eq!(class(&one), 1);
    let downs = |from, to| crowd(from, to).into_iter().map(|m| Member::down(m.id().clone())).collect();
    one.import(downs(0, 12), SECOND);
    assert_eq!((one.member_count(), class(&one)), (48, 1), "not at once");
    one.import(downs(12, 25), SECOND);
    assert_eq!(class(&one), 0);
}
