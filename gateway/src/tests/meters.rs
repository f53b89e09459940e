//! What is counted: MET faults.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use serde_json::json;
use starling_actors::engine::FinishReason;
use starling_ids::Metric;
use tokio::sync::mpsc;

use super::client::Local;
use crate::fixtures::{
    IM_END, byte,
    cluster::{Accept, Cluster, Frames, Plan},
    frame,
};

/// Keeps counters and gauges by their whole key.
#[derive(Default)]
struct Meter(Mutex<BTreeMap<String, Arc<Mutex<f64>>>>);

struct Cell(Arc<Mutex<f64>>);

impl CounterFn for Cell {
    fn increment(&self, value: u64) {
        *self.0.lock().expect("not poisoned") += value as f64;
    }
    fn absolute(&self, value: u64) {
        *self.0.lock().expect("not poisoned") = value as f64;
    }
}

impl GaugeFn for Cell {
    fn increment(&self, value: f64) {
        *self.0.lock().expect("not poisoned") += value;
    }
    fn decrement(&self, value: f64) {
        *self.0.lock().expect("not poisoned") -= value;
    }
    fn set(&self, value: f64) {
        *self.0.lock().expect("not poisoned") = value;
    }
}

impl Meter {
    fn cell(&self, key: &Key) -> Arc<Cell> {
        let name =
            key.labels().fold(key.name().to_owned(), |name, label| format!("{name} {}={}", label.key(), label.value()));
        Arc::new(Cell(self.0.lock().expect("not poisoned").entry(name).or_default().clone()))
    }

    fn value(&self, name: &str) -> f64 {
        let cells = self.0.lock().expect("not poisoned");
        *cells.get(name).unwrap_or_else(|| panic!("no {name}")).lock().expect("not poisoned")
    }

    fn series(&self) -> usize {
        self.0.lock().expect("not poisoned").len()
    }
}

impl Recorder for Meter {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.cell(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.cell(key))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test]
async fn met_01_clients_cannot_make_series() {
    let meter = Meter::default();
    let _guard = metrics::set_default_local_recorder(&meter);
    let local = Local::new(&Cluster::new(|_| Plan::text("x", FinishReason::Stop)));
    let before = meter.series();
    for at in 0..200 {
        local.chat(json!({"model": format!("name-{at}")})).await;
        local.get(&format!("/path/{at}")).await;
    }
    assert_eq!(meter.series(), before);
    let name = Metric::GatewayRequests.name();
    assert_eq!(meter.value(&format!("{name} route=chat_completions class=4xx")), 200.0);
    assert_eq!(meter.value(&format!("{name} route=unknown class=4xx")), 200.0);
}

#[tokio::test]
async fn met_03_a_stream_is_in_flight_until_its_end_and_a_leaver_is_counted() {
    let meter = Meter::default();
    let _guard = metrics::set_default_local_recorder(&meter);
    let feeds = Arc::new(Mutex::new(Vec::new()));
    let keep = feeds.clone();
    let cluster = Cluster::new(move |_| {
        let (feed, fed) = mpsc::unbounded_channel();
        keep.lock().expect("not poisoned").push(feed);
        Plan { accept: Accept::Now, frames: Frames::Fed(fed) }
    });
    let local = Local::new(&cluster);
    let (in_flight, permits) = (Metric::GatewayInFlight.name(), Metric::GatewayPermits.name());
    let gauges = || (meter.value(in_flight), meter.value(permits));
    let script = async {
        cluster.running(1).await;
        let feed = feeds.lock().expect("not poisoned").remove(0);
        for _ in 0..5 {
            feed.send(frame(0, &[byte(b'a')], None)).expect("still read");
            tokio::task::yield_now().await;
            assert_eq!(gauges(), (1.0, 1.0));
        }
        feed.send(frame(0, &[IM_END], Some(FinishReason::Stop))).expect("still read");
    };
    let (reply, ()) = tokio::join!(local.chat(json!({"stream": true})), script);
    assert_eq!(reply.streamed(1)[0].0, "aaaaa");
    assert_eq!(gauges(), (0.0, 0.0));
    // A handler dropped in the middle.
    let left = async {
        tokio::select! {
            _ = local.chat(json!({})) => unreachable!("nobody feeds it"),
            () = cluster.running(1) => {}
        }
    };
    left.await;
    cluster.running(0).await;
    assert_eq!(gauges(), (0.0, 0.0));
    assert_eq!(meter.value(Metric::GatewayCancelled.name()), 1.0);
    let name = Metric::GatewayRequests.name();
    assert_eq!(meter.value(&format!("{name} route=chat_completions class=cancelled")), 1.0);
    assert_eq!(meter.value(&format!("{name} route=chat_completions class=2xx")), 1.0);
}
