//! Who may be chosen: wishes, taints, filters, those that failed.

use super::*;

fn label(bench: &mut Bench, index: usize, pairs: &[(&str, &str)]) {
    let labels: Labels = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    bench.desk.set_labels(&worker(index), &Arc::new(labels));
}

/// Workers that get something of 40 requests with these wishes.
fn reached(bench: &mut Bench, wishes: &Wishes, origin: Option<&Labels>) -> Vec<usize> {
    let mut seen = std::collections::BTreeSet::new();
    for at in 0..40 {
        let ask = Ask { request: RequestId(at), prompt_tokens: 16, wishes: Some(wishes), origin, ..Ask::default() };
        let decision = bench.desk.decide(&ask, &[], bench.now);
        seen.extend(decision.and_then(|decision| (0..9).find(|index| worker(*index) == decision.worker)));
    }
    seen.into_iter().collect()
}

#[test]
fn wishes_and_taints_leave_workers_out() {
    let mut bench = Bench::new(PolicyName::RoundRobin, 4);
    label(&mut bench, 0, &[("zone", "north")]);
    label(&mut bench, 1, &[("zone", "north"), ("taint.batch", "yes")]);
    label(&mut bench, 2, &[("zone", "south")]);
    let select = |text: &str| Wishes { select: text.to_owned(), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &Wishes::default(), None), [0, 2, 3]);
    assert_eq!(reached(&mut bench, &select("zone=north"), None), [0]);
    assert_eq!(reached(&mut bench, &select("!zone"), None), [3]);
    assert_eq!(reached(&mut bench, &select("zone=east"), None), Vec::<usize>::new());
    let bears = Wishes { tolerate: vec!["batch".to_owned()], ..select("zone=north") };
    assert_eq!(reached(&mut bench, &bears, None), [0, 1]);
    let pinned = |index| Wishes { worker: Some(worker(index)), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &pinned(2), None), [2]);
    assert_eq!(reached(&mut bench, &pinned(8), None), Vec::<usize>::new());
    label(&mut bench, 3, &[("revision", "2")]);
    let of = |revision: &str| Wishes { revision: Some(revision.to_owned()), ..Wishes::default() };
    assert_eq!(reached(&mut bench, &of("2"), None), [3]);
    assert_eq!(reached(&mut bench, &of("1"), None), Vec::<usize>::new());
    label(&mut bench, 3, &[]);
    // A doubtful worker is taken when nobody else may.
    bench.desk.set_standing(&worker(2), Standing::Doubtful);
    assert_eq!(reached(&mut bench, &pinned(2), None), [2]);
    // Labels that changed count at once, and a seat given to another worker has none.
    label(&mut bench, 0, &[("zone", "south")]);
    assert_eq!(reached(&mut bench, &select("zone=south"), None), [0]);
    bench.desk.vacate(&worker(0));
    bench.desk.seat(&worker(5), Incarnation(1), Places::default(), Standing::Sound);
    assert_eq!(reached(&mut bench, &select("zone=south"), None), [2]);
    assert_eq!(reached(&mut bench, &select("!zone"), None), [3, 5]);
}

#[test]
fn filters_of_the_configuration_need_or_prefer() {
    let composed = |text: &str| {
        let mut bench = Bench::of(read(text).expect("reads").build().expect("a policy"), 3);
        label(&mut bench, 0, &[("zone", "north"), ("gpu", "a")]);
        label(&mut bench, 1, &[("zone", "south"), ("gpu", "b")]);
        bench
    };
    let here = |zone: &str| Labels::from([("zone".to_owned(), zone.to_owned())]);
    let any = Wishes::default();
    let turns = "picker = 'turns'\nfilters = ";
    let mut needed = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=a|b' }}]"));
    assert_eq!(reached(&mut needed, &any, None), [0, 1]);
    let mut nobody = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=c' }}]"));
    assert_eq!(reached(&mut nobody, &any, None), Vec::<usize>::new());
    let mut preferred = composed(&format!("{turns}[{{ name = 'labels', need = 'gpu=c', prefer = true }}]"));
    assert_eq!(reached(&mut preferred, &any, None), [0, 1, 2]);
    let mut zone = composed(&format!("{turns}['topology']"));
    assert_eq!(reached(&mut zone, &any, Some(&here("south"))), [1]);
    assert_eq!(reached(&mut zone, &any, Some(&here("east"))), Vec::<usize>::new());
    assert_eq!(reached(&mut zone, &any, None), [0, 1, 2]);
    let mut zone = composed(&format!("{turns}[{{ name = 'topology', prefer = true }}]"));
    assert_eq!(reached(&mut zone, &any, Some(&here("north"))), [0]);
    assert_eq!(reached(&mut zone, &any, Some(&here("east"))), [0, 1, 2]);
    // As a cost it is weighed: 30 requests nearby are worth the way.
    let mut far = composed("scorers = ['load', { name = 'topology', weight = 30 }]");
    assert_eq!(reached(&mut far, &any, Some(&here("north"))), [0, 1, 2]);
    assert_eq!(far.desk.fleet().requests, [33, 4, 3]);
}

#[test]
fn a_wish_is_worth_waiting_for_and_a_preference_only_while_its_workers_take_more() {
    let text = "picker = 'turns'\nfilters = [{ name = 'topology', prefer = true }]";
    let mut bench = Bench::of(read(text).expect("reads").build().expect("a policy"), 2);
    let rooms = crate::route::queue::rooms::Rooms::default();
    bench.desk = std::mem::replace(&mut bench.desk, Desk::new(PolicyConfig::default().build().expect("one"), 1))
        .with_rooms(rooms);
    label(&mut bench, 0, &[("zone", "north")]);
    let (pinned, any) = (Wishes { worker: Some(worker(0)), ..Wishes::default() }, Wishes::default());
    let north = Labels::from([("zone".to_owned(), "north".to_owned())]);
    // Ten fill the batch and what is handed out ahead of it.
    let mut decide = |wishes| {
        let ask = Ask { prompt_tokens: 16, wishes: Some(wishes), origin: Some(&north), ..Ask::default() };
        bench.desk.decide(&ask, &[], bench.now).map(|decision| decision.worker)
    };
    let first: Vec<_> = (0..10).map(|_| decide(&any)).collect();
    assert!(first.iter().all(|chosen| *chosen == Some(worker(0))), "{first:?}");
    assert_eq!(decide(&pinned), None);
    // While somebody has room, one that may go anywhere may also wait at the worker that is preferred, up to that one's bound.
    let queued: Vec<_> = (0..62).map(|_| decide(&any)).collect();
    assert!(queued.iter().all(|chosen| *chosen == Some(worker(0))), "{queued:?}");
    assert_eq!(decide(&any), Some(worker(1)));
    let elsewhere = Wishes { worker: Some(worker(9)), ..Wishes::default() };
    let mut possible = |wishes| bench.desk.anyone_for(&Ask { wishes: Some(wishes), ..Ask::default() });
    assert!(possible(&pinned) && possible(&any) && !possible(&elsewhere));
}

#[test]
fn doubtful_and_cooling_workers_are_the_last_resort_and_excluded_ones_none() {
    let mut bench = Bench::new(PolicyName::RoundRobin, 3);
    bench.desk.set_standing(&worker(0), Standing::Doubtful);
    let ask = |exclude: &[WorkerId], failed: &[WorkerId], bench: &mut Bench| {
        let hashes = hashes(1, 2);
        let ask = Ask {
            request: RequestId(1),
            prompt_tokens: 32,
            block_tokens: 16,
            hashes: &hashes,
            exclude,
            failed,
            ..Ask::default()
        };
        bench.desk.decide(&ask, &[], bench.now).map(|decision| decision.worker)
    };
    for _ in 0..4 {
        assert_ne!(ask(&[], &[], &mut bench), Some(worker(0)));
    }
    assert_eq!(ask(&[worker(1)], &[worker(1)], &mut bench), Some(worker(2)));
    assert_eq!(ask(&[], &[], &mut bench), Some(worker(2)), "worker 1 cools");
    assert_eq!(ask(&[worker(1), worker(2)], &[], &mut bench), Some(worker(0)));
    assert_eq!(ask(&[worker(0), worker(1), worker(2)], &[], &mut bench), None);
}
