//! Every interleaving of threads that give blocks back to a pool and the one that owns it.
//!
//! The module of the product is compiled here a second time, with loom's lock and flag in place of the standard library's:
//! what is run through is its own source.

#![allow(unreachable_pub, reason = "the product's module is public, this program is not")]

use std::collections::BTreeMap;

use loom::{
    sync::{Arc, Notify},
    thread,
};
use starling_kv::pool::BlockSlot;

#[path = "../src/pool/returns.rs"]
mod returns;

/// What the module takes from the pool's.
mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use loom::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    };
}

use returns::ReturnBin;

/// A lent block, as the guards of the product: its drop gives it back.
struct Pin {
    slots: Vec<BlockSlot>,
    bin: Arc<ReturnBin>,
    wake: Arc<Notify>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.bin.push(&self.slots, || self.wake.notify());
    }
}

fn count(into: &mut BTreeMap<u32, u32>, slots: Vec<BlockSlot>) {
    for slot in slots {
        *into.entry(slot.0).or_default() += 1;
    }
}

/// Guards dropped on two threads while the owner looks: each pin comes back once, whoever was first.
#[test]
fn every_pin_comes_back_once_whatever_the_order() {
    loom::model(|| {
        let (bin, wake) = (Arc::new(ReturnBin::default()), Arc::new(Notify::new()));
        let pin = |slots: &[u32]| Pin {
            slots: slots.iter().copied().map(BlockSlot).collect(),
            bin: bin.clone(),
            wake: wake.clone(),
        };
        // Block 7 is pinned by both, and 9 twice by one.
        let pins = [pin(&[1, 7]), pin(&[7, 9, 9])];
        let threads = pins.map(|pin| thread::spawn(move || drop(pin)));
        let mut back = BTreeMap::new();
        count(&mut back, bin.take());
        for thread in threads {
            thread.join().expect("ended");
        }
        count(&mut back, bin.take());
        assert_eq!(back, BTreeMap::from([(1, 1), (7, 2), (9, 2)]));
        assert!(bin.take().is_empty(), "once");
    });
}

/// The owner sleeps until it is woken, then looks: it never sleeps on while a block lies there.
#[test]
fn whoever_is_woken_by_a_pin_finds_it() {
    loom::model(|| {
        let (bin, wake) = (Arc::new(ReturnBin::default()), Arc::new(Notify::new()));
        let pin = Pin { slots: vec![BlockSlot(3)], bin: bin.clone(), wake: wake.clone() };
        let other = thread::spawn(move || drop(pin));
        // It looks before it sleeps, like the engine's thread at the end of a turn.
        let mut back = bin.take();
        while back.is_empty() {
            // May come back without a reason, as every wait; one that never came back would be reported as a deadlock.
            wake.wait();
            back = bin.take();
        }
        assert_eq!(back, [BlockSlot(3)]);
        other.join().expect("ended");
    });
}
