//! Installs the recorder of all metrics once, with a description and sane buckets for each.
//!
//! Called first at start, before anything counts. The render function goes to the HTTP server.

use std::sync::{Mutex, PoisonError};

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use starling_ids::{Metric, MetricKind};

/// Waits that people notice: from a cached first token to a long prompt on a slow machine.
const WAIT_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// One token or one engine step.
/// What a moving answer stands still: fine around the 60 ms that it may.
const PAUSE_SECONDS: &[f64] =
    &[0.002_5, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0];
const STEP_SECONDS: &[f64] = &[0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Installs the recorder of this process. A second call, for a node that is started again, gives the same one.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    static INSTALLED: Mutex<Option<PrometheusHandle>> = Mutex::new(None);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*installed {
        return Ok(handle.clone());
    }
    let handle = build()?;
    *installed = Some(handle.clone());
    Ok(handle)
}

fn build() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in Metric::ALL.iter().filter(|metric| metric.kind() == MetricKind::Histogram) {
        let buckets = match metric {
            Metric::GatewayTtft => WAIT_SECONDS,
            Metric::WorkerMovePause | Metric::GatewayMoveSeconds => PAUSE_SECONDS,
            _ => STEP_SECONDS,
        };
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name().to_owned()), buckets)?;
    }
    let handle = builder.install_recorder()?;
    describe();
    Ok(handle)
}

fn describe() {
    for metric in Metric::ALL {
        match metric.kind() {
            MetricKind::Counter => metrics::describe_counter!(metric.name(), metric.help()),
            MetricKind::Histogram => metrics::describe_histogram!(metric.name(), metric.help()),
            MetricKind::Gauge => {
                metrics::describe_gauge!(metric.name(), metric.help());
                // A gauge nobody has touched yet reads 0, not "absent": alerts and tests at rest rely on it.
                metrics::gauge!(metric.name()).set(0.0);
            }
        }
    }
}
