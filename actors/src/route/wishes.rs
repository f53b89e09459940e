//! What a client may ask of the choice itself: a worker, labels, taints that it bears, a receipt.
//!
//! Filled in by the gateway from request headers, carried in the question to the shard, looked at by the filters of
//! [`super::policy`]. Pure. Bounds: a selector has at most [`TERMS_MAX`] terms and [`SELECTOR_BYTES_MAX`] bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use starling_ids::WorkerId;

/// Labels of a worker: those of its node and those of its instance.
pub type Labels = BTreeMap<String, String>;

/// Terms of a selector.
pub const TERMS_MAX: usize = 16;
/// Bytes of a selector.
pub const SELECTOR_BYTES_MAX: usize = 512;
/// The label that tells which weights a worker has of its model.
pub const REVISION: &str = "revision";
/// A label of this beginning tells by the rest of its name which LoRA adapter a worker has.
pub const ADAPTER: &str = "adapter.";
/// A label with this beginning keeps requests away that do not tolerate it by the rest of its name.
pub const TAINT: &str = "taint.";

/// See the module. Empty wishes leave everything to the policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    /// Only this worker.
    pub worker: Option<WorkerId>,
    /// Only workers whose labels fit this [`Selector`]; empty for any.
    pub select: String,
    /// Taints that are borne; `*` bears all.
    pub tolerate: Vec<String>,
    /// The decision is told in the reply.
    pub receipt: bool,
    /// Only workers of this revision of the model, by their label [`REVISION`].
    #[serde(default)]
    pub revision: Option<String>,
    /// Only workers that have this LoRA adapter, by a label that begins with [`ADAPTER`].
    #[serde(default)]
    pub adapter: Option<String>,
}

impl Wishes {
    /// What is asked for, for the message that nobody has it; `None` when any worker would do.
    #[must_use]
    pub fn limits(&self) -> Option<String> {
        let mut said = Vec::new();
        said.extend(self.worker.as_ref().map(|worker| format!("is {worker}")));
        said.extend((!self.select.is_empty()).then(|| format!("has the labels {:?}", self.select)));
        said.extend(self.revision.as_ref().map(|revision| format!("has revision {revision:?} of it")));
        said.extend(self.adapter.as_ref().map(|adapter| format!("has its adapter {adapter:?}")));
        (!said.is_empty()).then(|| said.join(" and "))
    }

    /// Whether it is for some workers only.
    #[must_use]
    pub fn limit(&self) -> bool {
        self.worker.is_some() || !self.select.is_empty() || self.revision.is_some() || self.adapter.is_some()
    }

    /// Whether a worker of these labels may have the request, as far as wishes go.
    #[must_use]
    pub fn allow(&self, worker: &WorkerId, labels: &Labels) -> bool {
        self.worker.as_ref().is_none_or(|wanted| wanted == worker)
            && self.tolerates(labels)
            && self.revised(labels)
            && self.adapted(labels)
            && (self.select.is_empty() || Selector::parse(&self.select).is_ok_and(|selector| selector.fits(labels)))
    }

    /// Whether a worker of these labels has the revision that is asked for, if one is.
    #[must_use]
    pub fn revised(&self, labels: &Labels) -> bool {
        self.revision.is_none() || labels.get(REVISION) == self.revision.as_ref()
    }

    /// Whether a worker of these labels has the adapter that is asked for, if one is.
    #[must_use]
    pub fn adapted(&self, labels: &Labels) -> bool {
        let has = |name: &String| labels.keys().any(|key| key.strip_prefix(ADAPTER) == Some(name));
        self.adapter.as_ref().is_none_or(has)
    }

    /// Whether every taint among these labels is borne.
    #[must_use]
    pub fn tolerates(&self, labels: &Labels) -> bool {
        let borne = |taint: &str| self.tolerate.iter().any(|known| known == taint || known == "*");
        labels.keys().filter_map(|key| key.strip_prefix(TAINT)).all(borne)
    }
}

/// Which labels a worker must have: `zone=north|south, gpu, !spot, tier!=dev`, all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    terms: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    key: String,
    /// Any of these; `None` for any value at all.
    values: Option<Vec<String>>,
    not: bool,
}

impl Selector {
    /// Reads a selector.
    ///
    /// # Errors
    /// A sentence that says which term is wrong and what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > SELECTOR_BYTES_MAX {
            return Err(format!("has {} bytes, at most {SELECTOR_BYTES_MAX} are possible", text.len()));
        }
        let terms = text.split(',').map(str::trim).map(|term| {
            Term::parse(term).ok_or_else(|| {
                format!("{term:?} is no term; write KEY, !KEY, KEY=VALUE, KEY!=VALUE or KEY=A|B, joined by commas")
            })
        });
        let terms: Vec<Term> = terms.collect::<Result<_, _>>()?;
        if terms.len() > TERMS_MAX {
            return Err(format!("has {} terms, at most {TERMS_MAX} are possible", terms.len()));
        }
        Ok(Self { terms })
    }

    /// Whether all terms hold.
    #[must_use]
    pub fn fits(&self, labels: &Labels) -> bool {
        self.terms.iter().all(|term| {
            let value = labels.get(&term.key);
            let holds = match &term.values {
                None => value.is_some(),
                Some(values) => value.is_some_and(|value| values.contains(value)),
            };
            holds != term.not
        })
    }
}

impl Term {
    fn parse(text: &str) -> Option<Self> {
        let (key, values, not) = match text.split_once('=') {
            None => match text.strip_prefix('!') {
                Some(key) => (key, None, true),
                None => (text, None, false),
            },
            Some((key, values)) => match key.strip_suffix('!') {
                Some(key) => (key, Some(values), true),
                None => (key, Some(values), false),
            },
        };
        let key = key.trim();
        let good = !key.is_empty() && !key.contains(['!', '|', '=']) && !key.contains(char::is_whitespace);
        let values = values.map(|values| values.split('|').map(|value| value.trim().to_owned()).collect());
        good.then(|| Self { key: key.to_owned(), values, not })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use starling_ids::NodeId;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_selector_asks_for_labels_and_against_them() {
        let north = labels(&[("zone", "north"), ("gpu", "h200")]);
        let fits = |text: &str| Selector::parse(text).expect(text).fits(&north);
        for good in ["zone=north", "zone=south|north", "gpu", "!spot", "zone!=south", "gpu, zone=north,!spot", "x!=y"] {
            assert!(fits(good), "{good}");
        }
        for bad in ["zone=south", "!gpu", "spot", "zone!=north", "gpu,zone=south", "zone="] {
            assert!(!fits(bad), "{bad}");
        }
        for wrong in ["", ",", "=north", "a b", "!!x", "!a=b", "a=b,,c"] {
            assert!(Selector::parse(wrong).is_err(), "{wrong:?}");
        }
        assert!(Selector::parse(&"a,".repeat(20)).is_err() && Selector::parse(&"a".repeat(600)).is_err());
    }

    #[test]
    fn wishes_say_who_may_have_a_request() {
        let worker = |index| WorkerId { node: NodeId::new("n").expect("name"), index };
        let tainted = labels(&[("taint.batch", "yes"), ("zone", "north")]);
        let open = Wishes::default();
        assert!(open.allow(&worker(0), &Labels::new()) && !open.allow(&worker(0), &tainted));
        assert_eq!(open.limits(), None);
        let bears = Wishes { tolerate: vec!["batch".to_owned()], select: "zone=north".to_owned(), ..open.clone() };
        assert!(bears.allow(&worker(0), &tainted) && !bears.allow(&worker(0), &Labels::new()));
        assert!(Wishes { tolerate: vec!["*".to_owned()], ..open.clone() }.allow(&worker(0), &tainted));
        let adapter = labels(&[("adapter.law", "yes"), ("adapterless", "yes")]);
        let wants = |name: &str| Wishes { adapter: Some(name.to_owned()), ..open.clone() };
        assert!(open.allow(&worker(0), &adapter) && wants("law").allow(&worker(0), &adapter));
        assert!(!wants("less").allow(&worker(0), &adapter) && !wants("law").allow(&worker(0), &Labels::new()));
        assert!(wants("law").limit() && wants("law").limits().expect("limits").contains("law"));
        let pinned = Wishes { worker: Some(worker(1)), ..open };
        assert!(pinned.allow(&worker(1), &Labels::new()) && !pinned.allow(&worker(0), &Labels::new()));
        assert!(pinned.limits().expect("limits").contains("n/1"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            if let Ok(selector) = Selector::parse(&text) {
                prop_assert!(selector.fits(&Labels::new()) || !selector.terms.is_empty());
            }
        }
    }
}
