//! What the words and keys of an engine's event mean.

use super::StoredBlocks;
use crate::index::Tier;

/// The tier that an engine's word for a place means; `None` for places that are not its own.
pub(super) fn tier(medium: Option<&str>) -> Option<Tier> {
    let Some(medium) = medium else { return Some(Tier::Device) };
    let medium = medium.to_ascii_uppercase();
    let is = |words: &[&str]| words.iter().any(|word| medium.starts_with(word));
    if is(&["GPU", "DEVICE"]) {
        Some(Tier::Device)
    } else if is(&["CPU", "HOST"]) {
        Some(Tier::Host)
    } else if is(&["DISK", "SSD", "FILE", "STORAGE"]) {
        Some(Tier::Disk)
    } else {
        None
    }
}

/// The keys of a block beside its tokens and its adapter.
fn keys(stored: &StoredBlocks, at: usize) -> impl Iterator<Item = Option<&str>> {
    let adapter = stored.adapter.as_ref().ok().and_then(|name| name.as_deref());
    let keys = stored.extra.get(at).map(Vec::as_slice).unwrap_or_default();
    keys.iter().map(|key| key.as_deref()).filter(move |key| key.is_none() || *key != adapter)
}

/// The salt of a sequence: told as such, or the one text that its first block has as a key. Were that a digest of an image
/// instead, the name would be one that no prompt has.
pub(super) fn salt(stored: &StoredBlocks) -> Option<&str> {
    let mut first = keys(stored, 0);
    stored.salt.as_deref().or_else(|| first.next().flatten().filter(|_| first.next().is_none()))
}

/// Whether all that a block's content depends on is known.
pub(super) fn is_named(stored: &StoredBlocks, at: usize) -> bool {
    let salt = if at == 0 && stored.parent.is_none() { salt(stored) } else { None };
    stored.adapter.is_ok() && keys(stored, at).all(|key| key.is_some() && key == salt)
}
