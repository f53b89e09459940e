//! What two directories say to one another, and the answers.
//!
//! Called by [`super::DirectoryEngine`] and by the actor that carries the bytes. Pure. One question, one answer; each within
//! the bounds below, so that no message is large and no answer takes long.
//!
//! ```text
//! Root  ──▶ Same | Sums                  every now and then, with a member drawn at random: 12 bytes when nothing is new
//! List  ──▶ Entries, in pages            only the buckets that differ
//! Hint  ──▶ Noted                        what the other side lacks; it pulls
//! Pull  ──▶ Patches                      the records themselves, as differences where possible
//! ```

use serde::{Deserialize, Serialize};
use starling_ids::{Incarnation, NodeId};

use super::{DirectoryCore, Entry, Patch, Tally, patch::encoded_len, tally::BUCKETS};

/// Entries in one message.
pub const ENTRIES_MAX: usize = 512;
/// Records asked for in one message.
pub const WANTS_MAX: usize = 128;
/// Encoded bytes of patches in one message; one patch alone may have [`super::RECORD_MAX`].
pub const PATCHES_BYTES_MAX: usize = 48 * 1024;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Is everything the same?
    #[serde(rename = "r")]
    Root(u64),
    /// Which versions do you hold in these buckets, from behind this name on?
    #[serde(rename = "l")]
    List(Vec<u8>, Option<NodeId>),
    /// These are newer here than there; at most [`ENTRIES_MAX`].
    #[serde(rename = "h")]
    Hint(Vec<Entry>),
    /// Give me these records; `vital`: only what comes first. At most [`WANTS_MAX`].
    #[serde(rename = "p")]
    Pull {
        /// Only the vital parts.
        vital: bool,
        /// Of whom.
        wants: Vec<Want>,
    },
}

/// One record asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Whose.
    pub node: NodeId,
    /// In which life.
    pub incarnation: Incarnation,
    /// The version held whole; 0: none.
    pub since: u64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// Nothing differs.
    #[serde(rename = "s")]
    Same,
    /// Something does: the sum of each bucket.
    #[serde(rename = "b")]
    Sums(Vec<u64>),
    /// What is held, in the order of the buckets asked for; and whether there is more behind the last one.
    #[serde(rename = "e")]
    Entries(Vec<Entry>, bool),
    /// Thank you.
    #[serde(rename = "n")]
    Noted,
    /// The records that are held and newer, for the first `served` of the wants; the others had no room.
    #[serde(rename = "p")]
    Patches {
        /// Wants looked at.
        served: u32,
        /// What was found.
        patches: Vec<Patch>,
    },
}

impl Ask {
    /// Whether it keeps the bounds; one that does not is refused unread.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        match self {
            Self::Root(_) => true,
            Self::List(buckets, _) => buckets.len() <= BUCKETS,
            Self::Hint(entries) => entries.len() <= ENTRIES_MAX,
            Self::Pull { wants, .. } => wants.len() <= WANTS_MAX,
        }
    }

    /// The word for metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Root(_) => "root",
            Self::List(..) => "list",
            Self::Hint(_) => "hint",
            Self::Pull { .. } => "pull",
        }
    }
}

impl Told {
    /// Whether it keeps the bounds; one that does not is dropped.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        match self {
            Self::Same | Self::Noted => true,
            Self::Sums(sums) => sums.len() == BUCKETS,
            Self::Entries(entries, _) => entries.len() <= ENTRIES_MAX,
            Self::Patches { patches, .. } => patches.len() <= WANTS_MAX,
        }
    }
}

/// Answers everything but a hint, which is for the engine.
#[must_use]
pub(super) fn answer(core: &DirectoryCore, ask: &Ask) -> Told {
    match ask {
        Ask::Root(root) if *root == core.tally().root() => Told::Same,
        Ask::Root(_) => Told::Sums(core.tally().sums().to_vec()),
        Ask::List(buckets, after) => {
            let mut buckets = buckets.clone();
            buckets.sort_unstable();
            buckets.dedup();
            let (entries, more) = core.tally().entries(&buckets, after.as_ref(), ENTRIES_MAX);
            Told::Entries(entries, more)
        }
        Ask::Hint(_) => Told::Noted,
        Ask::Pull { vital, wants } => serve(core, *vital, wants),
    }
}

fn serve(core: &DirectoryCore, vital: bool, wants: &[Want]) -> Told {
    let (mut left, mut patches) = (PATCHES_BYTES_MAX, Vec::new());
    for (at, want) in wants.iter().enumerate() {
        let Some(record) = core.record(&want.node).filter(|record| record.incarnation == want.incarnation) else {
            continue;
        };
        let patch = if vital { Patch::vital(record) } else { Patch::whole(record, want.since) };
        if !vital && (record.partial || record.version <= want.since) {
            continue;
        }
        let len = encoded_len(&patch);
        if len > left && !patches.is_empty() {
            return Told::Patches { served: u32::try_from(at).unwrap_or(u32::MAX), patches };
        }
        left = left.saturating_sub(len);
        patches.push(patch);
    }
    Told::Patches { served: u32::try_from(wants.len()).unwrap_or(u32::MAX), patches }
}

/// What a page of the other side's entries says: theirs that are newer, and ours that they lack or hold older.
///
/// `buckets` and `after` are those of the question, `more` of the answer: they bound the part that the page speaks about.
#[must_use]
pub(super) fn compare(
    ours: &Tally,
    buckets: &[u8],
    after: Option<&NodeId>,
    (theirs, more): (&[Entry], bool),
) -> (Vec<Entry>, Vec<Entry>) {
    let newer = theirs.iter().filter(|entry| ours.stamp(&entry.node).is_none_or(|stamp| stamp < entry.stamp));
    let newer: Vec<Entry> = newer.cloned().collect();
    // Ours in the same stretch; an honest page is in order, so its end is its last entry.
    let (stretch, _) = ours.entries(buckets, after, usize::MAX);
    let place = |node: &NodeId| (Tally::bucket(node), node.clone());
    let end = theirs.last().filter(|_| more).map(|entry| place(&entry.node));
    let known: std::collections::BTreeMap<&NodeId, _> = theirs.iter().map(|entry| (&entry.node, entry.stamp)).collect();
    let within = |entry: &Entry| end.as_ref().is_none_or(|end| place(&entry.node) <= *end);
    let lacking = |entry: &Entry| known.get(&entry.node).is_none_or(|stamp| *stamp < entry.stamp);
    (newer, stretch.into_iter().filter(|entry| within(entry) && lacking(entry)).collect())
}
