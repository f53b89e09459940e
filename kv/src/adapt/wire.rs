//! Bytes of an engine's KV event socket to events.
//!
//! vLLM and SGLang publish the same three frames: topic, number of the message (u64, big-endian), and MessagePack
//! `[timestamp, events, data-parallel rank]`. An event is a map with `type`, or an array that begins with it (SGLang, older
//! vLLM). Format: `vllm/distributed/kv_events.py` and `sglang/srt/disaggregation/kv_events.py` of those projects. Called by
//! whoever reads the socket; never keeps anything. Bounds: [`PAYLOAD_MAX`], [`BLOCK_TOKENS_MAX`]. Fields and kinds of events that are
//! not known here are passed over.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use starling_ids::TokenId;
use twox_hash::XxHash3_128;

use super::loose::Loose;

/// Bytes of one message; an engine's step stores far less.
pub const PAYLOAD_MAX: usize = 16 << 20;

/// Tokens of an engine's block.
pub const BLOCK_TOKENS_MAX: usize = 4096;

/// An engine's own name of a block: a number of 64 bits, or, when it is bytes, their xxh3-128 with its highest bit set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u128);

impl EngineHash {
    fn of_bytes(bytes: &[u8]) -> Self {
        Self(XxHash3_128::oneshot(bytes) | 1 << 127)
    }
}

/// Blocks that became ready, each the child of the one before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlocks {
    /// The engine's names.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one, `None` when that is a first block.
    pub parent: Option<EngineHash>,
    /// All their tokens: `hashes.len() * block_tokens`.
    pub tokens: Vec<TokenId>,
    /// Tokens a block, 1 to [`BLOCK_TOKENS_MAX`].
    pub block_tokens: usize,
    /// The LoRA adapter they were computed with. `Err` when there is one that has no name.
    pub adapter: Result<Option<String>, Unnameable>,
    /// Tenant's cache salt, where the engine names it as such.
    pub salt: Option<String>,
    /// What else went into the engine's name of a block, block by block: empty for none at all. A key that is no text is `None`.
    pub extra: Vec<Vec<Option<String>>>,
    /// Where they lie (`GPU`, `CPU`, …); `None` is the engine's own memory.
    pub medium: Option<String>,
    /// Which group of layers, in engines whose layers keep their cache in several ways.
    pub group: Option<u32>,
    /// The kind of that group: `full_attention`, `sliding_window`, ….
    pub kind: Option<String>,
}

/// Something of which an engine gives no name that another program could know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unnameable;

/// Blocks that are gone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovedBlocks {
    /// The engine's names.
    pub hashes: Vec<EngineHash>,
    /// From where.
    pub medium: Option<String>,
    /// Of which group of layers.
    pub group: Option<u32>,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks became ready.
    Stored(StoredBlocks),
    /// Blocks are gone.
    Removed(RemovedBlocks),
    /// All are gone.
    Cleared,
    /// A kind that is not known here.
    Other,
}

/// What one message says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineBatch {
    /// In the order in which they happened.
    pub events: Vec<EngineEvent>,
    /// Data-parallel rank of the engine; 0 if it does not say.
    pub rank: u32,
}

/// Why a message cannot be used. The one who reads goes on as if it had been lost.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Longer than anything an engine sends.
    #[error("an event message of {0} bytes; at most {PAYLOAD_MAX} are read")]
    TooLong(usize),
    /// Not what the format says.
    #[error("an event message that does not follow the format: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// As many tokens as blocks have is wrong.
    #[error("block_size {block_tokens} and {blocks} block_hashes want {want} token_ids, there are {tokens}", want = block_tokens * blocks)]
    Tokens {
        /// Tokens a block.
        block_tokens: usize,
        /// Blocks.
        blocks: usize,
        /// Tokens that came.
        tokens: usize,
    },
    /// A block of no tokens, or of very many.
    #[error("block_size {0}; 1 to {BLOCK_TOKENS_MAX} are read")]
    BlockTokens(usize),
}

/// The events of a message's third frame.
///
/// # Errors
/// See [`WireError`].
pub fn decode(payload: &[u8]) -> Result<EngineBatch, WireError> {
    if payload.len() > PAYLOAD_MAX {
        return Err(WireError::TooLong(payload.len()));
    }
    let batch: EngineBatch = rmp_serde::from_slice(payload)?;
    for event in &batch.events {
        let EngineEvent::Stored(stored) = event else { continue };
        let (block_tokens, blocks, tokens) = (stored.block_tokens, stored.hashes.len(), stored.tokens.len());
        if !(1..=BLOCK_TOKENS_MAX).contains(&block_tokens) {
            return Err(WireError::BlockTokens(block_tokens));
        }
        if tokens != block_tokens * blocks {
            return Err(WireError::Tokens { block_tokens, blocks, tokens });
        }
    }
    Ok(batch)
}

impl<'de> Deserialize<'de> for EngineBatch {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Batch;
        impl<'de> Visitor<'de> for Batch {
            type Value = EngineBatch;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[timestamp, events, rank], or a map of these")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EngineBatch, A::Error> {
                seq.next_element::<IgnoredAny>()?;
                let events = seq.next_element()?.ok_or_else(|| A::Error::missing_field("events"))?;
                let rank = seq.next_element::<Option<u32>>()?.flatten().unwrap_or(0);
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(EngineBatch { events, rank })
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EngineBatch, A::Error> {
                let mut batch = EngineBatch::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "events" => batch.events = map.next_value()?,
                        "data_parallel_rank" => batch.rank = map.next_value::<Option<u32>>()?.unwrap_or(0),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(batch)
            }
        }
        from.deserialize_any(Batch)
    }
}

/// The fields of an event, by their place behind the type in the array form.
const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// All fields that any event may have, until its type is known: in the map form that may come last.
#[derive(Default)]
struct Fields {
    hashes: Vec<EngineHash>,
    parent: Option<EngineHash>,
    tokens: Vec<TokenId>,
    block_tokens: usize,
    lora_id: Option<i64>,
    lora: Loose,
    salt: Option<String>,
    extra: Loose,
    medium: Option<String>,
    group: Option<u32>,
    kind: Option<String>,
}

/// Where the next value is, in either form.
trait Values<'de> {
    type Error: serde::de::Error;
    fn value<T: Deserialize<'de> + Default>(&mut self) -> Result<T, Self::Error>;
}

struct InSeq<'a, A>(&'a mut A);
struct InMap<'a, A>(&'a mut A);

impl<'de, A: SeqAccess<'de>> Values<'de> for InSeq<'_, A> {
    type Error = A::Error;
    fn value<T: Deserialize<'de> + Default>(&mut self) -> Result<T, A::Error> {
        Ok(self.0.next_element()?.unwrap_or_default())
    }
}

impl<'de, A: MapAccess<'de>> Values<'de> for InMap<'_, A> {
    type Error = A::Error;
    fn value<T: Deserialize<'de> + Default>(&mut self) -> Result<T, A::Error> {
        self.0.next_value()
    }
}

impl Fields {
    fn read<'de, V: Values<'de>>(&mut self, name: &str, values: &mut V) -> Result<(), V::Error> {
        match name {
            "block_hashes" => self.hashes = values.value()?,
            "parent_block_hash" => self.parent = values.value()?,
            "token_ids" => self.tokens = values.value()?,
            "block_size" => self.block_tokens = values.value()?,
            "lora_id" => self.lora_id = values.value()?,
            "lora_name" => self.lora = values.value()?,
            "cache_salt" => self.salt = values.value()?,
            "extra_keys" => self.extra = values.value()?,
            "medium" => self.medium = values.value()?,
            "group_idx" => self.group = values.value()?,
            "kv_cache_spec_kind" => self.kind = values.value()?,
            _ => drop(values.value::<Loose>()?),
        }
        Ok(())
    }

    fn event(self, kind: &str) -> EngineEvent {
        match kind {
            "BlockStored" => EngineEvent::Stored(self.stored()),
            "BlockRemoved" => {
                EngineEvent::Removed(RemovedBlocks { hashes: self.hashes, medium: self.medium, group: self.group })
            }
            "AllBlocksCleared" => EngineEvent::Cleared,
            _ => EngineEvent::Other,
        }
    }

    fn stored(self) -> StoredBlocks {
        // SGLang has a map with the salt in the adapter's place.
        let salt = self.salt.or_else(|| self.lora.get("cache_salt").and_then(Loose::text).map(str::to_owned));
        let adapter = match (self.lora.text(), self.lora_id) {
            (Some(name), _) => Ok(Some(name.to_owned())),
            (None, None | Some(0)) => Ok(None),
            (None, Some(_)) => Err(Unnameable),
        };
        let keys = |block: &Loose| block.items().iter().map(|key| key.text().map(str::to_owned)).collect();
        StoredBlocks {
            extra: self.extra.items().iter().map(keys).collect(),
            hashes: self.hashes,
            parent: self.parent,
            tokens: self.tokens,
            block_tokens: self.block_tokens,
            adapter,
            salt,
            medium: self.medium,
            group: self.group,
            kind: self.kind,
        }
    }
}

impl<'de> Deserialize<'de> for EngineEvent {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Event;
        impl<'de> Visitor<'de> for Event {
            type Value = EngineEvent;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event: a map with `type`, or an array that begins with it")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EngineEvent, A::Error> {
                let kind: String = seq.next_element()?.ok_or_else(|| A::Error::missing_field("type"))?;
                let names: &[&str] = match kind.as_str() {
                    "BlockStored" => &STORED,
                    "BlockRemoved" => &REMOVED,
                    _ => &[],
                };
                let mut fields = Fields::default();
                for name in names {
                    fields.read(name, &mut InSeq(&mut seq))?;
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(fields.event(&kind))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EngineEvent, A::Error> {
                let (mut kind, mut fields) = (None, Fields::default());
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "type" => kind = Some(map.next_value::<String>()?),
                        name => fields.read(name, &mut InMap(&mut map))?,
                    }
                }
                Ok(fields.event(&kind.ok_or_else(|| A::Error::missing_field("type"))?))
            }
        }
        from.deserialize_any(Event)
    }
}

impl<'de> Deserialize<'de> for EngineHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = EngineHash;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block hash: a number of 64 bits, or bytes")
            }
            fn visit_u64<E>(self, number: u64) -> Result<EngineHash, E> {
                Ok(EngineHash(u128::from(number)))
            }
            fn visit_i64<E>(self, number: i64) -> Result<EngineHash, E> {
                Ok(EngineHash(u128::from(number.cast_unsigned())))
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<EngineHash, E> {
                Ok(EngineHash::of_bytes(bytes))
            }
            fn visit_str<E>(self, text: &str) -> Result<EngineHash, E> {
                Ok(EngineHash::of_bytes(text.as_bytes()))
            }
        }
        from.deserialize_any(Name)
    }
}
