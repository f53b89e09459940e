//! The table: one line for each figure of a scenario, over all its seeds.
//!
//! Called by the command. Pure.

use super::{Figure, Outcome};

/// A figure over the runs of one scenario.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The scenario, with what it was run with.
    pub scenario: String,
    /// How many seeds.
    pub seeds: usize,
    /// Which figure.
    pub figure: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Least, middle and greatest value.
    pub values: [f64; 3],
    /// The most it may be.
    pub bar: Option<f64>,
    /// Whether the greatest is within the bar and no invariant was broken.
    pub ok: bool,
}

/// One summary for each figure. All outcomes are of one scenario.
#[must_use]
pub(super) fn summaries(scenario: &str, outcomes: &[Outcome]) -> Vec<Summary> {
    let Some(first) = outcomes.first() else { return Vec::new() };
    let sound = outcomes.iter().all(|outcome| outcome.broken.is_empty());
    let summary = |(at, figure): (usize, &Figure)| {
        let mut values: Vec<f64> = outcomes.iter().map(|outcome| outcome.figures[at].value).collect();
        values.sort_by(f64::total_cmp);
        let most = values[values.len() - 1];
        Summary {
            scenario: scenario.to_owned(),
            seeds: outcomes.len(),
            figure: figure.name,
            unit: figure.unit,
            values: [values[0], values[values.len() / 2], most],
            bar: figure.bar,
            ok: sound && figure.bar.is_none_or(|bar| most <= bar),
        }
    };
    first.figures.iter().enumerate().map(summary).collect()
}

impl Summary {
    /// Summaries of outcomes that are all of one scenario.
    #[must_use]
    pub fn all(scenario: &str, outcomes: &[Outcome]) -> Vec<Self> {
        summaries(scenario, outcomes)
    }
}

/// A value with as many digits as are worth reading.
fn number(value: f64) -> String {
    match value {
        value if value.is_infinite() => "never".to_owned(),
        value if value > 0.0 && value < 0.1 => format!("{value:.3}"),
        value if value.fract() == 0.0 || value.abs() >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.2}"),
    }
}

/// The first two lines of the table.
pub const HEAD: &str =
    "| scenario | seeds | figure | least | median | most | bar | ok |\n|---|---|---|---|---|---|---|---|\n";

/// The lines of a Markdown table, without its [`HEAD`].
#[must_use]
pub fn table(summaries: &[Summary]) -> String {
    let mut text = String::new();
    for summary in summaries {
        let [least, median, most] = summary.values.map(number);
        let bar = summary.bar.map_or(String::new(), |bar| format!("≤ {}", number(bar)));
        let ok = match (summary.ok, summary.bar) {
            (false, _) => "**no**",
            (true, Some(_)) => "yes",
            (true, None) => "",
        };
        let unit = if summary.unit.is_empty() { String::new() } else { format!(", {}", summary.unit) };
        text.push_str(&format!(
            "| {} | {} | {}{unit} | {least} | {median} | {most} | {bar} | {ok} |\n",
            summary.scenario, summary.seeds, summary.figure
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_run_decides_and_a_breach_fails_all() {
        let outcome = |value, broken: &[&str]| Outcome {
            figures: vec![Figure::at_most("down", value, "s", 4.0), Figure::told("sent", 1_234.5, "B/s")],
            broken: broken.iter().map(|text| (*text).to_owned()).collect(),
            log: Vec::new(),
            time: 0,
            events: 0,
        };
        let good = Summary::all("kill, 10", &[outcome(3.0, &[]), outcome(1.5, &[]), outcome(2.0, &[])]);
        assert_eq!((good[0].values, good[0].ok), ([1.5, 2.0, 3.0], true));
        assert!(table(&good).contains("| kill, 10 | 3 | down, s | 1.50 | 2 | 3 | ≤ 4 | yes |"), "{}", table(&good));
        assert!(!Summary::all("kill", &[outcome(f64::INFINITY, &[])])[0].ok);
        let broken = Summary::all("kill", &[outcome(1.0, &["a node lists itself"])]);
        assert!(table(&broken).contains("**no**"));
    }
}
