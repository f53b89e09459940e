//! What crosses every hop with a request.
//!
//! Written by whoever opens a stream, read by whoever answers it. Pure. On the wire a field with its usual value is
//! left out, and one that is missing has it: both sides may gain fields.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use starling_ids::{AttemptId, RequestId};

use super::Baggage;
use crate::wire::limits::STREAM_INACTIVITY;

/// Carried by every stream, from the gateway to the last actor that works for the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// The client request this stream works for.
    pub request: RequestId,
    /// Which try at it: those made before, at this hop and at those above.
    #[serde(default, skip_serializing_if = "usual")]
    pub attempt: AttemptId,
    /// W3C `traceparent`, when the client sent one.
    #[serde(default, skip_serializing_if = "usual")]
    pub trace_parent: Option<String>,
    /// Time left until the request must have ended, as of sending. Clocks of two nodes are never compared.
    pub time_left: Duration,
    /// Whose request, for fairness and budgets.
    #[serde(default, skip_serializing_if = "usual")]
    pub tenant: String,
    /// Lower runs first.
    #[serde(default, skip_serializing_if = "usual")]
    pub priority: i32,
    /// What the client and those above want those below to know.
    #[serde(default, skip_serializing_if = "usual")]
    pub baggage: Baggage,
    /// A long-lived internal stream: no deadline, no inactivity limit, counted apart from requests.
    #[serde(default, skip_serializing_if = "usual")]
    pub subscription: bool,
}

fn usual<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Context {
    /// A context for a request that must end within `time_left`.
    #[must_use]
    pub fn new(request: RequestId, time_left: Duration) -> Self {
        Self {
            request,
            attempt: AttemptId(0),
            trace_parent: None,
            time_left,
            tenant: String::new(),
            priority: 0,
            baggage: Baggage::default(),
            subscription: false,
        }
    }

    /// A context for a long-lived internal stream, that may be silent and ends with one of its sides.
    #[must_use]
    pub fn subscription(request: RequestId) -> Self {
        Self { subscription: true, ..Self::new(request, Duration::MAX) }
    }

    /// The context of a request made on behalf of this one, `passed` after it arrived: the same in everything, with
    /// less time left. It is a request, also below a subscription.
    #[must_use]
    pub fn child(&self, passed: Duration) -> Self {
        Self { time_left: self.time_left.saturating_sub(passed), subscription: false, ..self.clone() }
    }

    /// When the time is over by this node's clock; `None` for subscriptions.
    pub(crate) fn deadline(&self) -> Option<tokio::time::Instant> {
        if self.subscription { None } else { tokio::time::Instant::now().checked_add(self.time_left) }
    }

    /// How long an opener waits for accept or reject.
    pub(crate) fn answer_within(&self) -> Duration {
        self.time_left.min(STREAM_INACTIVITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Context {
        let mut context = Context::new(RequestId(7), Duration::from_secs(9));
        context.attempt = AttemptId(2);
        context.trace_parent = Some("00-ab-cd-01".to_owned());
        context.tenant = "t".to_owned();
        context.priority = -3;
        context.baggage.set("user", "Ada").unwrap();
        context
    }

    #[test]
    fn a_child_has_less_time_and_nothing_else_changed() {
        let child = full().child(Duration::from_secs(4));
        assert_eq!(child, Context { time_left: Duration::from_secs(5), ..full() });
        assert_eq!(full().child(Duration::from_secs(99)).time_left, Duration::ZERO);
        assert!(!Context::subscription(RequestId(1)).child(Duration::ZERO).subscription);
    }

    #[test]
    fn usual_values_take_no_bytes_and_unknown_fields_are_passed_over() {
        for context in [full(), Context::new(RequestId(1), Duration::from_secs(1)), Context::subscription(RequestId(2))]
        {
            let bytes = rmp_serde::to_vec_named(&context).unwrap();
            assert_eq!(rmp_serde::from_slice::<Context>(&bytes).unwrap(), context);
        }
        let plain = rmp_serde::to_vec_named(&Context::new(RequestId(1), Duration::from_secs(1))).unwrap();
        assert!(plain.len() <= 60, "{} bytes", plain.len());

        #[derive(Serialize)]
        struct Later {
            request: RequestId,
            time_left: Duration,
            shoe_size: u8,
        }
        let later = Later { request: RequestId(1), time_left: Duration::from_secs(1), shoe_size: 42 };
        let read: Context = rmp_serde::from_slice(&rmp_serde::to_vec_named(&later).unwrap()).unwrap();
        assert_eq!(read, Context::new(RequestId(1), Duration::from_secs(1)));
    }
}
