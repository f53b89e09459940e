//! What the next interval brings, from those before it. Pure.

use std::{fmt, str::FromStr};

/// How it is guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PredictorKind {
    /// As the last one.
    #[default]
    Constant,
    /// Level and trend, both smoothed (Holt): a ramp is met on its way, not after it.
    Trend,
}

impl fmt::Display for PredictorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Constant => "constant",
            Self::Trend => "trend",
        })
    }
}

/// A word that is no predictor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no predictor; predictors are constant and trend")]
pub struct NoPredictor(String);

impl FromStr for PredictorKind {
    type Err = NoPredictor;

    fn from_str(text: &str) -> Result<Self, NoPredictor> {
        match text {
            "constant" => Ok(Self::Constant),
            "trend" => Ok(Self::Trend),
            other => Err(NoPredictor(other.to_owned())),
        }
    }
}

/// Weight of the newest value in the level.
const LEVEL: f64 = 0.5;
/// Weight of the newest step in the trend.
const TREND: f64 = 0.3;
/// Intervals ahead.
const AHEAD: f64 = 2.0;
/// A trend never more than doubles what was last seen.
const RISE_MAX: f64 = 2.0;

/// A row of values and its next one.
#[derive(Debug, Clone)]
pub struct Predictor {
    kind: PredictorKind,
    last: Option<f64>,
    level: f64,
    trend: f64,
}

impl Predictor {
    /// One that has seen nothing.
    #[must_use]
    pub fn new(kind: PredictorKind) -> Self {
        Self { kind, last: None, level: 0.0, trend: 0.0 }
    }

    /// Takes the value of an interval; one that is not a number or below zero is passed over.
    pub fn see(&mut self, value: f64) {
        if !value.is_finite() || value < 0.0 {
            return;
        }
        if self.last.is_none() {
            self.level = value;
        } else {
            let level = LEVEL * value + (1.0 - LEVEL) * (self.level + self.trend);
            self.trend = TREND * (level - self.level) + (1.0 - TREND) * self.trend;
            self.level = level;
        }
        self.last = Some(value);
    }

    /// The next value, at least 0; 0 before anything was seen.
    #[must_use]
    pub fn next(&self) -> f64 {
        let Some(last) = self.last else { return 0.0 };
        match self.kind {
            PredictorKind::Constant => last,
            // Nothing came at all: then the trend has nothing to add to.
            PredictorKind::Trend => (self.level + AHEAD * self.trend).clamp(0.0, last.max(self.level) * RISE_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_trend_is_ahead_of_a_ramp_and_meets_a_plateau() {
        let (mut constant, mut trend) = (Predictor::new(PredictorKind::Constant), Predictor::new(PredictorKind::Trend));
        for at in 0..20 {
            constant.see(f64::from(at));
            trend.see(f64::from(at));
        }
        assert!((constant.next() - 19.0).abs() < 1e-9 && trend.next() > 20.0, "{}", trend.next());
        (0..40).for_each(|_| trend.see(19.0));
        assert!((trend.next() - 19.0).abs() < 0.1, "{}", trend.next());
        (0..60).for_each(|_| trend.see(0.0));
        assert!(trend.next() < 0.01);
    }

    proptest! {
        #[test]
        fn a_prediction_is_a_number_in_bounds(
            kind in prop_oneof![Just(PredictorKind::Constant), Just(PredictorKind::Trend)],
            values in proptest::collection::vec(prop_oneof![0.0f64..1e6, Just(f64::NAN), Just(-3.0)], 0..40),
        ) {
            let mut predictor = Predictor::new(kind);
            values.iter().for_each(|value| predictor.see(*value));
            let most = values.iter().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
            let next = predictor.next();
            prop_assert!(next.is_finite() && next >= 0.0 && next <= most * 4.0 + 1e-9, "{} of {}", next, most);
            prop_assert_eq!(kind.to_string().parse::<PredictorKind>(), Ok(kind));
        }
    }
}
