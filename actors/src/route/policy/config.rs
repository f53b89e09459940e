//! Policies by name and from configuration.
//!
//! ```toml
//! [policy]
//! name = "starling"          # a preset: its filters, scorers and picker
//! # or composed, costs added up with weights:
//! scorers = [{ use = "ms", weight = 1.0 }, { use = "load", weight = 2.0 }]
//! picker = "lowest"
//! ```

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{
    AnyOf, Cost, Dynamo, DynamoWeights, Excluded, Fairest, LeastLoaded, Lowest, Picker, Policy, PrefixHash, Scorer,
    Session, Turns, TwoDraws,
};

/// The presets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// Cost in milliseconds; the default.
    #[default]
    Starling,
    /// NVIDIA Dynamo's published cost in blocks.
    Dynamo,
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// The less loaded of two drawn.
    P2c,
    /// The fewest requests.
    LeastLoaded,
    /// Sticky by session while the worker is not overloaded.
    Session,
    /// Sticky by the beginning of the prompt while the worker is not overloaded.
    PrefixHash,
}

impl PolicyName {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Starling,
        Self::Dynamo,
        Self::RoundRobin,
        Self::Random,
        Self::P2c,
        Self::LeastLoaded,
        Self::Session,
        Self::PrefixHash,
    ];

    /// As it is written.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starling => "starling",
            Self::Dynamo => "dynamo",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::P2c => "p2c",
            Self::LeastLoaded => "least-loaded",
            Self::Session => "session",
            Self::PrefixHash => "prefix-hash",
        }
    }
}

impl FromStr for PolicyName {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let found = Self::ALL.into_iter().find(|name| name.as_str() == text);
        found.ok_or_else(|| PolicyError::Unknown { what: "policy", name: text.to_owned(), known: Self::names() })
    }
}

impl PolicyName {
    fn names() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

/// Why a policy cannot be composed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PolicyError {
    /// No such name.
    #[error("there is no {what} {name:?}; there are: {known}")]
    Unknown {
        /// `policy`, `scorer` or `picker`.
        what: &'static str,
        /// What was given.
        name: String,
        /// What would be right.
        known: String,
    },
    /// A weight that is no weight.
    #[error("weight of scorer {scorer:?} is {weight}; it must be finite and not 0")]
    Weight {
        /// Which.
        scorer: String,
        /// What was given.
        weight: f64,
    },
}

/// One scorer in a composed policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScorerConfig {
    /// `ms`, `dynamo`, `load`, `session` or `prefix-hash`.
    #[serde(rename = "use")]
    pub name: String,
    /// Times its cost; 1 when absent.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

/// What a file says about the policy. Scorers, when given, replace those of the preset.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// The preset.
    pub name: PolicyName,
    /// Scorers of its own.
    pub scorers: Vec<ScorerConfig>,
    /// `fairest`, `lowest`, `two-draws`, `turns` or `any`; the preset's when absent.
    pub picker: Option<String>,
    /// Constants of the `dynamo` scorer.
    pub dynamo: DynamoWeights,
}

/// Blocks that `prefix-hash` looks at, and how far over the mean load sticky policies go.
const PREFIX_BLOCKS: usize = 16;
const OVERLOAD: f64 = 1.25;

impl PolicyConfig {
    /// A preset.
    #[must_use]
    pub fn named(name: PolicyName) -> Self {
        Self { name, ..Self::default() }
    }

    /// The policy.
    ///
    /// # Errors
    /// Names what is not known, and what would be.
    pub fn build(&self) -> Result<Policy, PolicyError> {
        let (scorer, picker): (Option<&str>, &str) = match self.name {
            PolicyName::Starling => (Some("ms"), "fairest"),
            PolicyName::Dynamo => (Some("dynamo"), "lowest"),
            PolicyName::RoundRobin => (None, "turns"),
            PolicyName::Random => (None, "any"),
            PolicyName::P2c => (Some("load"), "two-draws"),
            PolicyName::LeastLoaded => (Some("load"), "lowest"),
            PolicyName::Session => (Some("session"), "lowest"),
            PolicyName::PrefixHash => (Some("prefix-hash"), "lowest"),
        };
        let mut scorers = Vec::new();
        if self.scorers.is_empty() {
            scorers.extend(scorer.map(|name| self.scorer(name).map(|scorer| (1.0, scorer))).transpose()?);
        }
        for ScorerConfig { name, weight } in &self.scorers {
            if !weight.is_finite() || *weight == 0.0 {
                return Err(PolicyError::Weight { scorer: name.clone(), weight: *weight });
            }
            scorers.push((*weight, self.scorer(name)?));
        }
        Ok(Policy {
            name: self.name.as_str().to_owned(),
            filters: vec![Box::new(Excluded)],
            scorers,
            picker: picker_named(self.picker.as_deref().unwrap_or(picker))?,
        })
    }

    fn scorer(&self, name: &str) -> Result<Box<dyn Scorer>, PolicyError> {
        Ok(match name {
            "ms" => Box::new(Cost::default()),
            "dynamo" => Box::new(Dynamo::new(self.dynamo)),
            "load" => Box::new(LeastLoaded),
            "session" => Box::new(Session::new(false, OVERLOAD)),
            "prefix-hash" => Box::new(PrefixHash::new(PREFIX_BLOCKS, OVERLOAD)),
            _ => {
                let known = "ms, dynamo, load, session, prefix-hash".to_owned();
                return Err(PolicyError::Unknown { what: "scorer", name: name.to_owned(), known });
            }
        })
    }
}

fn picker_named(name: &str) -> Result<Box<dyn Picker>, PolicyError> {
    Ok(match name {
        "fairest" => Box::new(Fairest::default()),
        "lowest" => Box::new(Lowest),
        "two-draws" => Box::new(TwoDraws),
        "turns" => Box::new(Turns),
        "any" => Box::new(AnyOf),
        _ => {
            let known = "fairest, lowest, two-draws, turns, any".to_owned();
            return Err(PolicyError::Unknown { what: "picker", name: name.to_owned(), known });
        }
    })
}
