//! Every gauge of streams and links is exactly zero at rest, whatever way streams and links ended.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use starling_ids::{Incarnation, Metric, RequestId};

use super::setup::*;
use crate::{
    config::Timings,
    stream::{Context, Opened, StreamError},
    wire::limits::STREAM_WINDOW_BYTES,
};

/// Remembers gauges and counters of this thread, where a test's whole runtime lives.
#[derive(Default)]
struct Numbers(Mutex<HashMap<String, Arc<Number>>>);

#[derive(Default)]
struct Number(Mutex<f64>);

impl GaugeFn for Number {
    fn increment(&self, by: f64) {
        *self.0.lock().unwrap() += by;
    }
    fn decrement(&self, by: f64) {
        *self.0.lock().unwrap() -= by;
    }
    fn set(&self, to: f64) {
        *self.0.lock().unwrap() = to;
    }
}

impl CounterFn for Number {
    fn increment(&self, by: u64) {
        *self.0.lock().unwrap() += by as f64;
    }
    fn absolute(&self, to: u64) {
        *self.0.lock().unwrap() = to as f64;
    }
}

impl Numbers {
    fn number(&self, name: &str) -> Arc<Number> {
        self.0.lock().unwrap().entry(name.to_owned()).or_default().clone()
    }

    fn get(&self, metric: Metric) -> f64 {
        *self.number(metric.name()).0.lock().unwrap()
    }
}

impl Recorder for Numbers {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.number(key.name()))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.number(key.name()))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn zero(numbers: &Numbers) -> bool {
    let gauges = [Metric::StreamsOpen, Metric::SubscriptionsOpen, Metric::StreamCreditsOut];
    gauges.into_iter().all(|gauge| numbers.get(gauge) == 0.0)
}

#[tokio::test]
async fn gauges_are_zero_at_rest_whatever_way_streams_end() {
    let numbers = Numbers::default();
    let _here = metrics::set_default_local_recorder(&numbers);
    let (a, mut b) = two(Timings::default()).await;

    // Ended in good order, with frames in both directions.
    let (Opened { tx: near_tx, rx: mut near_rx, .. }, (tx, mut rx)) = a.stream(&mut b).await;
    assert_eq!((numbers.get(Metric::StreamsOpen), numbers.get(Metric::LinksOpen)), (2.0, 2.0));
    for n in 0..100 {
        tx.send(frame(n)).await.unwrap();
        near_rx.recv().await.unwrap().unwrap();
    }
    assert!(numbers.get(Metric::StreamCreditsOut) < STREAM_WINDOW_BYTES as f64);
    near_tx.end();
    tx.end();
    assert_eq!((near_rx.recv().await, rx.recv().await), (None, None));
    drop((near_rx, rx));
    until("ended", || zero(&numbers)).await;

    // Cancelled with a window of frames under way.
    let (near, (tx, rx)) = a.stream(&mut b).await;
    while tx.try_send(frame(1)).is_ok() {}
    assert_eq!(numbers.get(Metric::StreamCreditsOut), STREAM_WINDOW_BYTES as f64);
    drop(near);
    soon(tx.cancelled()).await;
    drop((tx, rx));
    until("cancelled", || zero(&numbers)).await;

    // Broken with the link.
    let (mut near, (tx, rx)) = a.stream(&mut b).await;
    while tx.try_send(frame(1)).is_ok() {}
    let subscription = Context::subscription(RequestId(2));
    let kept = b.open(&a, "t/t/yes", subscription, Bytes::new()).await.unwrap();
    assert_eq!(numbers.get(Metric::SubscriptionsOpen), 2.0);
    assert!(a.root.book().inject_panic("links/b").await);
    while soon(near.rx.recv()).await.is_some_and(|item| item.is_ok()) {}
    assert!(numbers.get(Metric::StreamsBroken) > 0.0);
    let mut a = a;
    drop((near, tx, rx, kept, a.far.recv().await));
    until("broken", || zero(&numbers)).await;

    // Refused, withdrawn, local, stale.
    a.open(&b, "t/t/no", context(), Bytes::new()).await.unwrap_err();
    let short = Context::new(RequestId(1), Duration::from_millis(20));
    a.open(&b, "t/t/sit", short, Bytes::new()).await.unwrap_err();
    a.knows(&[(&b.name, Incarnation(9), b.address)]);
    let head = crate::wire::OpenHead { endpoint: endpoint("t/t/yes"), context: context() };
    let stale = a.layer.open(&b.name, Incarnation(9), head, Bytes::new()).await;
    assert!(matches!(stale, Err(StreamError::Stale { .. })));
    assert_eq!(numbers.get(Metric::StaleRefused), 1.0);
    until("refused", || zero(&numbers)).await;

    a.stop().await;
    b.stop().await;
    until("no links", || numbers.get(Metric::LinksOpen) == 0.0 && zero(&numbers)).await;
}
