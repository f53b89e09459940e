//! A value whose form differs between engines and their versions: read whole, asked afterwards.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};

/// Texts, lists and maps with text keys as they are; anything else is [`Loose::Other`].
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) enum Loose {
    /// Nothing.
    #[default]
    Nil,
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Loose>),
    /// A map.
    Map(Vec<(String, Loose)>),
    /// A number, bytes, a truth value.
    Other,
}

impl Loose {
    /// The text, if it is one.
    pub(super) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The members, if it is a list.
    pub(super) fn items(&self) -> &[Self] {
        if let Self::List(items) = self { items } else { &[] }
    }

    /// The value of a key, if it is a map that has it.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Map(pairs) = self else { return None };
        pairs.iter().find_map(|(name, value)| (name == key).then_some(value))
    }
}

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Loose;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }
            fn visit_unit<E>(self) -> Result<Loose, E> {
                Ok(Loose::Nil)
            }
            fn visit_none<E>(self) -> Result<Loose, E> {
                Ok(Loose::Nil)
            }
            fn visit_str<E>(self, text: &str) -> Result<Loose, E> {
                Ok(Loose::Text(text.to_owned()))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Loose, E> {
                Ok(Loose::Other)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Loose, E> {
                Ok(Loose::Other)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Loose, E> {
                Ok(Loose::Other)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Loose, E> {
                Ok(Loose::Other)
            }
            fn visit_bytes<E>(self, _: &[u8]) -> Result<Loose, E> {
                Ok(Loose::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Loose, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Loose::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Loose, A::Error> {
                let mut pairs = Vec::new();
                while let Some((key, value)) = map.next_entry::<Loose, Loose>()? {
                    if let Loose::Text(name) = key {
                        pairs.push((name, value));
                    }
                }
                Ok(Loose::Map(pairs))
            }
        }
        from.deserialize_any(Any)
    }
}
