//! Policies by name and from configuration.
//!
//! ```toml
//! [policy]
//! name = "starling"                                    # a preset: its scorers and its picker
//! # or composed; each given list replaces the preset's:
//! filters = [{ name = "labels", need = "!spot" }, { name = "topology", label = "zone", prefer = true }]
//! scorers = [{ name = "ms" }, { name = "topology", weight = 5.0 }]
//! picker = { name = "softmin", temperature = 0.1 }
//! ```
//!
//! Called by the program's configuration, which makes a [`Table`] of a file. Pure.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    Adapted, AnyOf, Cost, Dynamo, DynamoWeights, Excluded, Fairest, Far, Fill, Filter, KvUse, LeastLoaded, Lowest,
    Missing, Needed, Params, Picker, Pinned, Policy, PolicyError, PrefixHash, Revised, Scorer, Selected, Session,
    Softmin, Table, Tainted, Topology, Turns, TwoDraws, Value, params::list,
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

    /// Its scorer, if it looks at costs, and its picker.
    const fn parts(self) -> (Option<&'static str>, &'static str) {
        match self {
            Self::Starling => (Some("ms"), "fairest"),
            Self::Dynamo => (Some("dynamo"), "lowest"),
            Self::RoundRobin => (None, "turns"),
            Self::Random => (None, "any"),
            Self::P2c => (Some("load"), "two-draws"),
            Self::LeastLoaded => (Some("load"), "lowest"),
            Self::Session => (Some("session"), "lowest"),
            Self::PrefixHash => (Some("prefix-hash"), "lowest"),
        }
    }
}

impl FromStr for PolicyName {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let found = Self::ALL.into_iter().find(|name| name.as_str() == text);
        let known = Self::ALL.iter().map(|name| name.as_str());
        found.ok_or_else(|| PolicyError::unknown("policy.name", "policy", text, known))
    }
}

/// One filter, scorer or picker by its name, with its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Of a scorer: times its cost. Finite and not 0.
    pub weight: f64,
    /// What else is said about it.
    pub settings: Table,
}

impl Part {
    /// A part with the settings it has by itself, of weight 1.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), weight: 1.0, settings: Table::new() }
    }

    /// A name, or a table with a name in it.
    fn read(at: &str, value: Value, weighs: bool) -> Result<Self, PolicyError> {
        let mut settings = match value {
            Value::Text(name) => return Ok(Self::named(&name)),
            Value::Table(table) => table,
            _ => return Err(PolicyError::new(at, "must be a name, or a table such as { name = \"load\" }")),
        };
        let name = match settings.remove("name") {
            Some(Value::Text(name)) => name,
            Some(_) => return Err(PolicyError::new(format!("{at}.name"), "must be a text")),
            None => return Err(PolicyError::new(format!("{at}.name"), "is missing")),
        };
        let weight = match settings.remove("weight").filter(|_| weighs) {
            None => 1.0,
            Some(Value::Float(weight)) => weight,
            Some(Value::Int(weight)) => weight as f64,
            Some(_) => f64::NAN,
        };
        if !weight.is_finite() || weight == 0.0 {
            return Err(PolicyError::new(format!("{at}.weight"), "must be a finite number that is not 0"));
        }
        Ok(Self { name, weight, settings })
    }
}

/// What a file says about the policy.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(try_from = "Table")]
pub struct PolicyConfig {
    /// The preset.
    pub name: PolicyName,
    /// Filters beside those that every policy has.
    pub filters: Vec<Part>,
    /// Scorers instead of the preset's.
    pub scorers: Vec<Part>,
    /// A picker instead of the preset's.
    pub picker: Option<Part>,
    /// Parts of the program's own.
    pub custom: Custom,
}

impl TryFrom<Table> for PolicyConfig {
    type Error = PolicyError;

    fn try_from(table: Table) -> Result<Self, PolicyError> {
        let mut params = Params::new("policy", table);
        let name = params.text("name")?.map(|name| name.parse()).transpose()?.unwrap_or_default();
        let parts = |params: &mut Params, key: &'static str, weighs: bool| {
            let numbered = list(params, key)?.into_iter().enumerate();
            numbered
                .map(|(at, value)| Part::read(&format!("policy.{key}[{at}]"), value, weighs))
                .collect::<Result<Vec<_>, _>>()
        };
        let filters: Vec<Part> = parts(&mut params, "filters", false)?;
        let scorers: Vec<Part> = parts(&mut params, "scorers", true)?;
        let picker = params.take("picker").map(|value| Part::read("policy.picker", value, false)).transpose()?;
        params.done()?;
        Ok(Self { name, filters, scorers, picker, custom: Custom::default() })
    }
}

/// Makes a part from its settings.
type Make<T> = dyn Fn(&mut Params) -> Result<Box<T>, PolicyError> + Send + Sync;

/// A part that comes with Starling: its name and how it is made.
type Known<T> = (&'static str, fn(&mut Params) -> Result<Box<T>, PolicyError>);

/// Parts that a program brings, by name.
#[derive(Clone, Default)]
pub struct Custom {
    filters: BTreeMap<String, Arc<Make<dyn Filter>>>,
    scorers: BTreeMap<String, Arc<Make<dyn Scorer>>>,
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.filters.keys()).entries(self.scorers.keys()).finish()
    }
}

impl PartialEq for Custom {
    /// Two are equal when they know the same names.
    fn eq(&self, other: &Self) -> bool {
        self.filters.keys().eq(other.filters.keys()) && self.scorers.keys().eq(other.scorers.keys())
    }
}

/// Blocks that `prefix-hash` looks at, and how far over the mean load sticky policies go.
const PREFIX_BLOCKS: u32 = 16;
const OVERLOAD: f64 = 1.25;

const FILTERS: &[Known<dyn Filter>] = &[
    ("labels", |params| Ok(Box::new(Needed::make(params)?))),
    ("topology", |params| Ok(Box::new(Topology::make(params)?))),
];

const SCORERS: &[Known<dyn Scorer>] = &[
    ("ms", |params| Ok(Box::new(Cost::make(params)?))),
    ("dynamo", |params| Ok(Box::new(Dynamo::new(DynamoWeights::read(params)?)))),
    ("load", |_| Ok(Box::new(LeastLoaded))),
    ("fill", |_| Ok(Box::new(Fill))),
    ("kv", |_| Ok(Box::new(KvUse))),
    ("prefix", |_| Ok(Box::new(Missing))),
    ("topology", |params| Ok(Box::new(Far::make(params)?))),
    ("session", |params| {
        Ok(Box::new(Session::new(params.truth("hard")?, params.number("overload", 1.0..=100.0, OVERLOAD)?)))
    }),
    ("prefix-hash", |params| {
        let blocks = params.count("blocks", 1..=1024, PREFIX_BLOCKS)? as usize;
        Ok(Box::new(PrefixHash::new(blocks, params.number("overload", 1.0..=100.0, OVERLOAD)?)))
    }),
];

const PICKERS: &[Known<dyn Picker>] = &[
    ("fairest", |params| {
        let Fairest { share, ms } = Fairest::default();
        let (share, ms) = (params.number("share", 0.0..=1.0, share)?, params.number("ms", 0.0..=60_000.0, ms)?);
        Ok(Box::new(Fairest { share, ms }))
    }),
    ("lowest", |_| Ok(Box::new(Lowest))),
    ("softmin", |params| Ok(Box::new(Softmin::make(params)?))),
    ("two-draws", |_| Ok(Box::new(TwoDraws))),
    ("turns", |_| Ok(Box::new(Turns))),
    ("any", |_| Ok(Box::new(AnyOf))),
];

impl PolicyConfig {
    /// A preset.
    #[must_use]
    pub fn named(name: PolicyName) -> Self {
        Self { name, ..Self::default() }
    }

    /// As it is, with a scorer of one's own that the configuration may name. One of that name which comes with Starling is
    /// hidden by it.
    #[must_use]
    pub fn with_scorer<S: Scorer + 'static>(
        mut self,
        name: &str,
        make: impl Fn(&mut Params) -> Result<S, PolicyError> + Send + Sync + 'static,
    ) -> Self {
        let boxed = move |params: &mut Params| make(params).map(|made| Box::new(made) as Box<dyn Scorer>);
        self.custom.scorers.insert(name.to_owned(), Arc::new(boxed));
        self
    }

    /// As it is, with a filter of one's own; see [`Self::with_scorer`].
    #[must_use]
    pub fn with_filter<F: Filter + 'static>(
        mut self,
        name: &str,
        make: impl Fn(&mut Params) -> Result<F, PolicyError> + Send + Sync + 'static,
    ) -> Self {
        let boxed = move |params: &mut Params| make(params).map(|made| Box::new(made) as Box<dyn Filter>);
        self.custom.filters.insert(name.to_owned(), Arc::new(boxed));
        self
    }

    /// What receipts call it: the preset, or `composed` when its costs or its picker are not the preset's.
    #[must_use]
    pub fn label(&self) -> &'static str {
        if self.scorers.is_empty() && self.picker.is_none() { self.name.as_str() } else { "composed" }
    }

    /// The policy.
    ///
    /// # Errors
    /// Names the key that is wrong, and what would be right.
    pub fn build(&self) -> Result<Policy, PolicyError> {
        let (scorer, picker) = self.name.parts();
        let mut filters: Vec<Box<dyn Filter>> = vec![
            Box::new(Excluded),
            Box::new(Pinned::default()),
            Box::new(Selected::default()),
            Box::new(Revised::default()),
            Box::new(Adapted::default()),
            Box::new(Tainted::default()),
        ];
        for (at, part) in self.filters.iter().enumerate() {
            filters.push(make(&format!("policy.filters[{at}]"), "filter", part, FILTERS, &self.custom.filters)?);
        }
        let preset = scorer.filter(|_| self.scorers.is_empty()).map(Part::named);
        let mut scorers = Vec::new();
        for (at, part) in preset.iter().chain(&self.scorers).enumerate() {
            let made = make(&format!("policy.scorers[{at}]"), "scorer", part, SCORERS, &self.custom.scorers)?;
            scorers.push((part.weight, made));
        }
        // The tolerance of `fairest` is in milliseconds.
        let in_ms = self.scorers.is_empty() || self.scorers.iter().any(|part| part.name == "ms");
        let picker = Part::named(if in_ms { picker } else { "lowest" });
        let picker = self.picker.as_ref().unwrap_or(&picker);
        let picker = make("policy.picker", "picker", picker, PICKERS, &BTreeMap::new())?;
        Ok(Policy::new(self.label(), filters, scorers, picker))
    }
}

/// A part by its name: the program's own first, then those that come with Starling.
fn make<T: ?Sized>(
    at: &str,
    what: &str,
    part: &Part,
    ours: &[Known<T>],
    custom: &BTreeMap<String, Arc<Make<T>>>,
) -> Result<Box<T>, PolicyError> {
    let mut params = Params::new(at, part.settings.clone());
    let made = match (custom.get(&part.name), ours.iter().find(|(name, _)| *name == part.name)) {
        (Some(make), _) => make(&mut params)?,
        (None, Some((_, make))) => make(&mut params)?,
        (None, None) => {
            let known = ours.iter().map(|(name, _)| *name).chain(custom.keys().map(String::as_str));
            return Err(PolicyError::unknown(format!("{at}.name"), what, &part.name, known));
        }
    };
    params.done()?;
    Ok(made)
}
