//! Who lists whom, in which life, and whether that is true: kept up to date change by change.
//!
//! Called by the world whenever a node's member list changes, and whenever the truth does. Pure. Nodes are slots, names
//! and lives are small numbers, so that 10,000 views of 10,000 names fit in 200 MB and a change costs one entry.
//!
//! An entry is *right* when it lists the life that the name has in truth, *wrong* when it lists another or a
//! dead one, and *dropped* when it once listed the true life and does not any more: a false death, believed.

use super::Micros;

/// Names are numbered, and a process of a name is its life, from 1; 0 stands for "none".
pub(super) type Life = u8;

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    listed: Life,
    /// The latest one ever listed.
    seen: Life,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Right,
    Wrong,
    Dropped,
    Unknown,
}

impl Entry {
    fn class(self, truth: Life) -> Class {
        match self.listed {
            0 if truth != 0 && self.seen == truth => Class::Dropped,
            0 => Class::Unknown,
            listed if listed == truth => Class::Right,
            _ => Class::Wrong,
        }
    }
}

#[derive(Debug, Default)]
struct Row {
    name: usize,
    entries: Vec<Entry>,
    right: usize,
    wrong: usize,
    listed: usize,
    /// Whether it runs and answers; only then its view counts.
    live: bool,
    agrees: bool,
    apart_since: Micros,
}

/// What a change of a view means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing that needs attention.
    Plain,
    /// A life was listed although a later one had been.
    Stale,
    /// The true life was listed and is not any more.
    Dropped,
}

/// All views, and the truth.
#[derive(Debug, Default)]
pub struct Views {
    rows: Vec<Row>,
    truth: Vec<Life>,
    known_by: Vec<usize>,
    listed_by: Vec<usize>,
    dropped_by: Vec<usize>,
    names_live: usize,
    rows_live: usize,
    rows_agreeing: usize,
}

impl Views {
    /// A view without entries for a new process of `name` in `slot`, which is live.
    pub(super) fn open(&mut self, slot: usize, name: usize, now: Micros) {
        if self.rows.len() <= slot {
            self.rows.resize_with(slot + 1, Row::default);
        }
        self.close(slot);
        if self.truth.len() <= name {
            self.truth.resize(name + 1, 0);
            for by in [&mut self.known_by, &mut self.listed_by, &mut self.dropped_by] {
                by.resize(name + 1, 0);
            }
        }
        self.rows[slot] = Row { name, live: true, apart_since: now, ..Row::default() };
        self.rows_live += 1;
        self.judge(slot, now);
    }

    /// The process in `slot` has ended; its view is forgotten.
    pub(super) fn close(&mut self, slot: usize) {
        self.pause(slot);
        let row = std::mem::take(&mut self.rows[slot]);
        for (name, entry) in row.entries.iter().enumerate() {
            self.count(name, *entry, -1);
        }
    }

    /// The process in `slot` does not answer for now; its view stays and does not count.
    pub(super) fn pause(&mut self, slot: usize) {
        let row = &mut self.rows[slot];
        self.rows_live -= usize::from(row.live);
        self.rows_agreeing -= usize::from(row.live && row.agrees);
        row.live = false;
        row.agrees = false;
    }

    /// It answers again.
    pub(super) fn resume(&mut self, slot: usize, now: Micros) {
        if !self.rows[slot].live {
            self.rows[slot].live = true;
            self.rows[slot].apart_since = now;
            self.rows_live += 1;
            self.judge(slot, now);
        }
    }

    /// From now on `name` is, in truth, in this life; 0: it is gone.
    pub(super) fn set_truth(&mut self, name: usize, life: Life, now: Micros) {
        let before = self.truth[name];
        if before == life {
            return;
        }
        (self.known_by[name], self.dropped_by[name]) = (0, 0);
        self.names_live = self.names_live + usize::from(life != 0) - usize::from(before != 0);
        self.truth[name] = life;
        for slot in 0..self.rows.len() {
            let row = &mut self.rows[slot];
            if let Some(entry) = row.entries.get(name) {
                let (was, is) = (entry.class(before), entry.class(life));
                row.right = row.right + usize::from(is == Class::Right) - usize::from(was == Class::Right);
                row.wrong = row.wrong + usize::from(is == Class::Wrong) - usize::from(was == Class::Wrong);
                self.known_by[name] += usize::from(is == Class::Right);
                self.dropped_by[name] += usize::from(is == Class::Dropped);
            }
            self.judge(slot, now);
        }
    }

    /// The node in `slot` lists `name` in this life now; 0: not any more.
    pub(super) fn set_listed(&mut self, slot: usize, name: usize, life: Life, now: Micros) -> Change {
        let row = &mut self.rows[slot];
        if row.entries.len() <= name {
            row.entries.resize((name + 1).max(self.truth.len()), Entry::default());
        }
        let before = row.entries[name];
        if before.listed == life {
            return Change::Plain;
        }
        let after = Entry { listed: life, seen: before.seen.max(life) };
        row.entries[name] = after;
        row.listed = row.listed + usize::from(life != 0) - usize::from(before.listed != 0);
        let truth = self.truth[name];
        let (was, is) = (before.class(truth), after.class(truth));
        row.right = row.right + usize::from(is == Class::Right) - usize::from(was == Class::Right);
        row.wrong = row.wrong + usize::from(is == Class::Wrong) - usize::from(was == Class::Wrong);
        self.count(name, before, -1);
        self.count(name, after, 1);
        self.judge(slot, now);
        match (life != 0 && life < before.seen, is) {
            (true, _) => Change::Stale,
            (false, Class::Dropped) => Change::Dropped,
            _ => Change::Plain,
        }
    }

    fn count(&mut self, name: usize, entry: Entry, by: isize) {
        let class = entry.class(self.truth[name]);
        let add = |counter: &mut usize, counts: bool| {
            if counts {
                *counter = counter.saturating_add_signed(by);
            }
        };
        add(&mut self.listed_by[name], entry.listed != 0);
        add(&mut self.known_by[name], class == Class::Right);
        add(&mut self.dropped_by[name], class == Class::Dropped);
    }

    /// Whether the view of `slot` is the truth now.
    fn judge(&mut self, slot: usize, now: Micros) {
        let row = &mut self.rows[slot];
        if !row.live {
            return;
        }
        let others = self.names_live - usize::from(self.truth[row.name] != 0);
        let agrees = row.wrong == 0 && row.right == others;
        if agrees == row.agrees {
            return;
        }
        row.agrees = agrees;
        if agrees {
            self.rows_agreeing += 1;
        } else {
            self.rows_agreeing -= 1;
            row.apart_since = now;
        }
    }

    /// Whether every live node lists every other live node in its true life, and nobody else.
    #[must_use]
    pub fn agreed(&self) -> bool {
        self.rows_agreeing == self.rows_live
    }

    /// Whether the view of `slot` is the truth.
    #[must_use]
    pub fn agrees(&self, slot: usize) -> bool {
        self.rows.get(slot).is_some_and(|row| row.agrees)
    }

    /// Names listed by `slot`.
    #[must_use]
    pub fn listed(&self, slot: usize) -> usize {
        self.rows[slot].listed
    }

    /// The life in which `slot` lists `name`; 0: not at all.
    pub(super) fn life(&self, slot: usize, name: usize) -> Life {
        self.rows[slot].entries.get(name).map_or(0, |entry| entry.listed)
    }

    /// The names listed by `slot`.
    pub(super) fn names_listed(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        let entries = self.rows[slot].entries.iter().enumerate();
        entries.filter(|(_, entry)| entry.listed != 0).map(|(name, _)| name)
    }

    /// How many processes list `name`, in whatever life.
    #[must_use]
    pub fn listed_by(&self, name: usize) -> usize {
        self.listed_by[name]
    }

    /// How many processes list `name` in its true life.
    #[must_use]
    pub fn known_by(&self, name: usize) -> usize {
        self.known_by[name]
    }

    /// How many processes have listed the true life of `name` and do not any more.
    #[must_use]
    pub fn dropped_by(&self, name: usize) -> usize {
        self.dropped_by[name]
    }

    /// Live processes.
    #[must_use]
    pub fn live(&self) -> usize {
        self.rows_live
    }

    /// Live processes whose view has not been the truth since `before` or earlier.
    pub(super) fn apart_since(&self, before: Micros) -> impl Iterator<Item = usize> + '_ {
        let rows = self.rows.iter().enumerate();
        rows.filter(move |(_, row)| row.live && !row.agrees && row.apart_since <= before).map(|(slot, _)| slot)
    }

    /// The first name about which the view of `slot` errs, and what it lists and what is true: for error messages.
    pub(super) fn first_error(&self, slot: usize) -> Option<(usize, Life, Life)> {
        let row = &self.rows[slot];
        self.truth.iter().enumerate().filter(|(name, _)| *name != row.name).find_map(|(name, truth)| {
            let listed = row.entries.get(name).map_or(0, |entry| entry.listed);
            (listed != *truth).then_some((name, listed, *truth))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_false_death_and_a_stale_life_are_told_from_plain_changes() {
        let mut views = Views::default();
        for node in 0..2 {
            views.open(node, node, 0);
            views.set_truth(node, 1, 0);
        }
        assert!(!views.agreed());
        assert_eq!(views.set_listed(0, 1, 1, 5), Change::Plain);
        assert_eq!(views.set_listed(1, 0, 1, 6), Change::Plain);
        assert!(views.agreed());
        assert_eq!(views.set_listed(0, 1, 0, 7), Change::Dropped);
        assert_eq!((views.dropped_by(1), views.agreed()), (1, false));
        assert_eq!(views.apart_since(7).collect::<Vec<_>>(), [0]);
        assert_eq!(views.first_error(0), Some((1, 0, 1)));
        views.set_truth(1, 2, 8);
        assert_eq!(views.dropped_by(1), 0);
        assert_eq!(views.set_listed(0, 1, 2, 9), Change::Plain);
        assert_eq!(views.set_listed(0, 1, 1, 9), Change::Stale);
        views.close(1);
        views.set_truth(1, 0, 10);
        assert_eq!((views.live(), views.agreed()), (1, false));
        views.set_listed(0, 1, 0, 11);
        assert!(views.agreed());
    }

    proptest! {
        /// The counters are what counting everything anew gives.
        #[test]
        fn counters_equal_a_recount(steps in proptest::collection::vec((0..6u8, 0..4usize, 0..4usize, 0..3u8), 1..120)) {
            let mut views = Views::default();
            for node in 0..4 {
                views.open(node, node, 0);
                views.set_truth(node, 1, 0);
            }
            for (kind, slot, name, life) in steps {
                match kind {
                    0 => views.set_truth(name, life, 1),
                    1 => views.pause(slot),
                    2 => views.resume(slot, 1),
                    3 if life == 0 => views.open(slot, slot, 1),
                    _ if slot != name => { views.set_listed(slot, name, life, 1); }
                    _ => {}
                }
                for name in 0..4 {
                    let entries = views.rows.iter().filter_map(|row| row.entries.get(name));
                    let classes: Vec<Class> = entries.map(|entry| entry.class(views.truth[name])).collect();
                    let count = |class| classes.iter().filter(|is| **is == class).count();
                    prop_assert_eq!(views.known_by(name), count(Class::Right));
                    prop_assert_eq!(views.dropped_by(name), count(Class::Dropped));
                }
                for slot in 0..4 {
                    let agrees = views.rows[slot].live && views.first_error(slot).is_none();
                    prop_assert_eq!(views.agrees(slot), agrees);
                }
                let live = (0..4).filter(|slot| views.rows[*slot].live);
                prop_assert_eq!(views.agreed(), live.clone().all(|slot| views.agrees(slot)));
                prop_assert_eq!(views.live(), live.count());
            }
        }
    }
}
