//! What a planner goes by: targets, bounds, and how long it looks before it does something. Pure.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use super::predict::PredictorKind;

/// What becomes of decisions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// None are taken.
    Off,
    /// They are shown, and nothing is touched.
    #[default]
    Advise,
    /// They are carried out.
    Act,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Advise => "advise",
            Self::Act => "act",
        })
    }
}

/// A word that is no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no mode; modes are off, advise and act")]
pub struct NoMode(String);

impl FromStr for Mode {
    type Err = NoMode;

    fn from_str(text: &str) -> Result<Self, NoMode> {
        match text {
            "off" => Ok(Self::Off),
            "advise" => Ok(Self::Advise),
            "act" => Ok(Self::Act),
            other => Err(NoMode(other.to_owned())),
        }
    }
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// What becomes of decisions.
    pub mode: Mode,
    /// There is something that starts and stops workers.
    pub scales: bool,
    /// Time to the first token to keep, milliseconds.
    pub ttft_ms: f64,
    /// Time between two tokens to keep, milliseconds.
    pub itl_ms: f64,
    /// Workers that must stay able to compute prompts, and to answer; at least 1.
    pub min: u32,
    /// Workers of a model at most, all roles together.
    pub max: u32,
    /// Between two looks.
    pub interval: Duration,
    /// How the next interval is guessed.
    pub predictor: PredictorKind,
    /// Share of a worker's time that is planned with: the rest is for what comes unevenly.
    pub use_max: f64,
    /// Looks in a row that must show a want before it is met.
    pub up_looks: usize,
    /// Looks in a row that must show too much before a worker goes.
    pub down_looks: usize,
    /// Looks in which nothing more is done after something changed.
    pub cool_looks: u32,
    /// Looks after which what was begun is given up.
    pub expire_looks: u32,
    /// Workers that one decision adds at most.
    pub step_max: u32,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            scales: false,
            ttft_ms: 500.0,
            itl_ms: 50.0,
            min: 1,
            max: 8,
            interval: Duration::from_secs(10),
            predictor: PredictorKind::default(),
            use_max: 0.8,
            up_looks: 2,
            down_looks: 12,
            cool_looks: 3,
            expire_looks: 30,
            step_max: 8,
        }
    }
}

impl Rules {
    /// How long nothing more is done after something changed.
    #[must_use]
    pub fn cool(&self) -> Duration {
        self.interval * self.cool_looks
    }

    /// When what was begun is given up.
    #[must_use]
    pub fn expiry(&self) -> Duration {
        self.interval * self.expire_looks
    }
}
