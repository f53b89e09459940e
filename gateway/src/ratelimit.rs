//! How a tenant's budget stands, in the headers that clients of the OpenAI API look at.
//!
//! Called by the handlers for every reply to a tenant with a budget, good or refused. Pure.

use std::time::Duration;

use hyper::{HeaderMap, header::HeaderValue};
use starling_actors::route::budget::Standing;

/// Tokens per minute that the tenant may spend.
const LIMIT: &str = "x-ratelimit-limit-tokens";
/// Tokens that it could spend now: at most as many as may be spent at once.
const REMAINING: &str = "x-ratelimit-remaining-tokens";
/// When it can spend as much at once as ever.
const RESET: &str = "x-ratelimit-reset-tokens";

/// Adds the headers.
pub(crate) fn tell(headers: &mut HeaderMap, standing: Standing) {
    let Standing { limit, remaining, reset } = standing;
    let texts = [(LIMIT, limit.to_string()), (REMAINING, remaining.to_string()), (RESET, duration(reset))];
    for (name, text) in texts {
        // Digits and letters always make a header.
        if let Ok(value) = HeaderValue::from_str(&text) {
            headers.insert(name, value);
        }
    }
}

/// A duration as OpenAI writes it: `120ms`, `1.5s`, `6m0s`.
fn duration(time: Duration) -> String {
    let ms = time.as_millis();
    match ms {
        0 => "0s".to_owned(),
        1..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}s", (ms.div_ceil(10) as f64) / 100.0),
        _ => {
            let seconds = ms.div_ceil(1_000);
            let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
            let hours = if hours > 0 { format!("{hours}h") } else { String::new() };
            format!("{hours}{minutes}m{seconds}s")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_clients_read_them() {
        let written = |ms| duration(Duration::from_millis(ms));
        assert_eq!([0, 7, 999, 1_000, 1_500, 59_990].map(written), ["0s", "7ms", "999ms", "1s", "1.5s", "59.99s"]);
        assert_eq!([60_000, 360_001, 3_600_000].map(written), ["1m0s", "6m1s", "1h0m0s"]);
    }

    #[test]
    fn the_headers_are_the_ones_that_clients_look_for() {
        let mut headers = HeaderMap::new();
        tell(&mut headers, Standing { limit: 600, remaining: 42, reset: Duration::from_millis(10_800) });
        assert_eq!(headers["x-ratelimit-limit-tokens"], "600");
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "42");
        assert_eq!(headers["x-ratelimit-reset-tokens"], "10.8s");
    }
}
