//! Reads a GGUF file: metadata and where each tensor lies, every length checked against the file.
//!
//! Called by the loader; calls nothing but the memory map. Format: version 2 and 3 of
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, little endian.
//! Never: panics on any input, or returns a tensor that reaches past the end of the file.
//! Bounds: arrays nest at most twice; every count is checked against the bytes that are left.

use std::{collections::HashMap, ops::Range};

use super::quant::TensorType;

/// Where a tensor's bytes are and what they mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorInfo {
    /// Element type.
    pub(super) kind: TensorType,
    /// Elements of one row.
    pub(super) cols: usize,
    /// Rows; all dimensions after the first multiplied.
    pub(super) rows: usize,
    /// Byte range in the file.
    pub(super) bytes: Range<usize>,
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// Any unsigned or non-negative integer.
    Unsigned(u64),
    /// A negative integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    Text(String),
    /// Text, many.
    Texts(Vec<String>),
    /// Numbers, many; integers and floats alike.
    Numbers(Vec<f64>),
    /// An array of something that no Llama model needs; counted, not kept.
    Skipped(u64),
}

/// The parsed header of a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Gguf {
    /// Metadata by key.
    pub(super) metadata: HashMap<String, Value>,
    /// Tensors by name.
    pub(super) tensors: HashMap<String, TensorInfo>,
}

const MAGIC: &[u8; 4] = b"GGUF";
/// The format gives tensors at most four dimensions.
const DIMENSIONS_MAX: u32 = 4;
const NESTING_MAX: u32 = 2;
const ALIGNMENT_DEFAULT: usize = 32;

/// A position in the file; every read says what it was reading when it fails.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("{what} at byte {} reaches past the end of the file", self.at))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that each need at least `least` bytes.
    fn count(&mut self, least: usize, what: &str) -> Result<usize, String> {
        let count = self.u64(what)?;
        let left = (self.bytes.len() - self.at) as u64;
        if count.checked_mul(least as u64).is_none_or(|need| need > left) {
            return Err(format!("{what} is {count}, more than the {left} bytes left in the file can hold"));
        }
        usize::try_from(count).map_err(|_| format!("{what} does not fit this machine"))
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let len = self.count(1, what)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| format!("{what} is not UTF-8"))
    }

    fn scalar(&mut self, kind: u32, key: &str) -> Result<Value, String> {
        let signed = |n: i64| u64::try_from(n).map_or(Value::Signed(n), Value::Unsigned);
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(key)?[0])),
            1 => signed(i64::from(i8::from_le_bytes(self.array(key)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(key)?))),
            3 => signed(i64::from(i16::from_le_bytes(self.array(key)?))),
            4 => Value::Unsigned(u64::from(self.u32(key)?)),
            5 => signed(i64::from(i32::from_le_bytes(self.array(key)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            8 => Value::Text(self.text(key)?),
            10 => Value::Unsigned(self.u64(key)?),
            11 => signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(format!("metadata {key:?} has unknown type {other}")),
        })
    }

    fn value(&mut self, kind: u32, key: &str, depth: u32) -> Result<Value, String> {
        if kind != 9 {
            return self.scalar(kind, key);
        }
        if depth >= NESTING_MAX {
            return Err(format!("metadata {key:?} nests arrays deeper than {NESTING_MAX}"));
        }
        let kind = self.u32(key)?;
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 12,
            _ => 8,
        };
        let count = self.count(least, key)?;
        if kind == 8 {
            return Ok(Value::Texts((0..count).map(|_| self.text(key)).collect::<Result<_, _>>()?));
        }
        let mut numbers = Vec::new();
        for _ in 0..count {
            match self.value(kind, key, depth + 1)? {
                Value::Unsigned(n) => numbers.push(n as f64),
                Value::Signed(n) => numbers.push(n as f64),
                Value::Float(x) => numbers.push(x),
                Value::Bool(b) => numbers.push(f64::from(u8::from(b))),
                _ => {}
            }
        }
        Ok(if numbers.len() == count { Value::Numbers(numbers) } else { Value::Skipped(count as u64) })
    }

    fn tensor(&mut self) -> Result<(String, TensorInfo, u64), String> {
        let name = self.text("a tensor's name")?;
        let dimensions = self.u32(&name)?;
        if dimensions == 0 || dimensions > DIMENSIONS_MAX {
            return Err(format!("tensor {name:?} has {dimensions} dimensions, 1 to {DIMENSIONS_MAX} are allowed"));
        }
        let overflow = || format!("tensor {name:?} is too large for this machine");
        let cols = usize::try_from(self.u64(&name)?).map_err(|_| overflow())?;
        let mut rows = 1usize;
        for _ in 1..dimensions {
            let dim = usize::try_from(self.u64(&name)?).map_err(|_| overflow())?;
            rows = rows.checked_mul(dim).ok_or_else(overflow)?;
        }
        let code = self.u32(&name)?;
        let kind = TensorType::from_gguf(code).ok_or_else(|| {
            format!("tensor {name:?} has type {code}, which is not supported: use {}", TensorType::NAMES)
        })?;
        if cols == 0 || cols % kind.elements() != 0 {
            return Err(format!("tensor {name:?} has rows of {cols}, not a multiple of {}", kind.elements()));
        }
        let len = kind.bytes_for(cols).and_then(|row| row.checked_mul(rows)).ok_or_else(overflow)?;
        let offset = self.u64(&name)?;
        Ok((name, TensorInfo { kind, cols, rows, bytes: 0..len }, offset))
    }
}

impl Gguf {
    /// Parses `bytes`, a whole file. The error says what is wrong, not which file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4, "the magic").ok() != Some(MAGIC) {
            return Err("this is not a GGUF file: it does not start with \"GGUF\"".to_owned());
        }
        let version = cursor.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(format!("GGUF version {version} is not supported, versions 2 and 3 are"));
        }
        let tensor_count = cursor.count(24, "the number of tensors")?;
        let metadata_count = cursor.count(13, "the number of metadata entries")?;
        let mut metadata = HashMap::new();
        for _ in 0..metadata_count {
            let key = cursor.text("a metadata key")?;
            let kind = cursor.u32(&key)?;
            let value = cursor.value(kind, &key, 0)?;
            metadata.insert(key, value);
        }
        let mut found = Vec::new();
        for _ in 0..tensor_count {
            found.push(cursor.tensor()?);
        }
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT_DEFAULT,
            Some(&Value::Unsigned(n)) if n.is_power_of_two() && n <= 1 << 20 => n as usize,
            Some(other) => return Err(format!("general.alignment is {other:?}, a power of two is needed")),
        };
        let data = cursor.at.next_multiple_of(alignment);
        let mut tensors = HashMap::new();
        for (name, mut info, offset) in found {
            let start = usize::try_from(offset).ok().and_then(|offset| data.checked_add(offset));
            let end = start.and_then(|start| start.checked_add(info.bytes.end)).filter(|&end| end <= bytes.len());
            let (Some(start), Some(end)) = (start, end) else {
                return Err(format!("tensor {name:?} reaches past the end of the file: is the download complete?"));
            };
            info.bytes = start..end;
            tensors.insert(name, info);
        }
        Ok(Self { metadata, tensors })
    }

    /// A count under `key`, if it is there and one.
    pub(super) fn unsigned(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key)? {
            Value::Unsigned(n) => Some(*n),
            _ => None,
        }
    }

    /// A number under `key`.
    pub(super) fn float(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key)? {
            Value::Float(x) => Some(*x),
            Value::Unsigned(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// True or false under `key`.
    pub(super) fn bool(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key)? {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// Text under `key`.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Texts under `key`.
    pub(super) fn texts(&self, key: &str) -> Option<&[String]> {
        match self.metadata.get(key)? {
            Value::Texts(texts) => Some(texts),
            _ => None,
        }
    }

    /// Numbers under `key`.
    pub(super) fn numbers(&self, key: &str) -> Option<&[f64]> {
        match self.metadata.get(key)? {
            Value::Numbers(numbers) => Some(numbers),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(tensors: u64, metadata: u64) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(metadata.to_le_bytes());
        bytes
    }

    #[test]
    fn a_count_larger_than_the_file_is_refused_before_anything_is_allocated() {
        let error = Gguf::parse(&header(u64::MAX, 0)).unwrap_err();
        assert!(error.contains("number of tensors"), "{error}");
        let error = Gguf::parse(&header(0, 1 << 40)).unwrap_err();
        assert!(error.contains("metadata entries"), "{error}");
    }

    #[test]
    fn another_file_is_named_as_such() {
        assert!(Gguf::parse(b"PK\x03\x04").unwrap_err().contains("not a GGUF file"));
        assert!(Gguf::parse(b"").unwrap_err().contains("not a GGUF file"));
        assert!(Gguf::parse(b"GGUF\x01\0\0\0").unwrap_err().contains("version 1"));
    }

    #[test]
    fn a_tensor_past_the_end_is_refused() {
        let mut bytes = header(1, 0);
        bytes.extend(1u64.to_le_bytes());
        bytes.push(b'x');
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(64u64.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        assert!(Gguf::parse(&bytes).unwrap_err().contains("past the end"));
        let data = bytes.len().next_multiple_of(32);
        bytes.resize(data + 256, 0);
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.tensors["x"].bytes, data..data + 256);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _parsed_or_refused = Gguf::parse(&bytes);
            let mut with_header = header(2, 3);
            with_header.extend(&bytes);
            let _parsed_or_refused = Gguf::parse(&with_header);
        }

        #[test]
        fn a_damaged_file_never_reaches_outside(
            at in 0usize..200, byte in any::<u8>(), cut in 0usize..300,
        ) {
            let mut bytes = header(1, 1);
            bytes.extend(3u64.to_le_bytes());
            bytes.extend(b"key");
            bytes.extend(9u32.to_le_bytes());
            bytes.extend(8u32.to_le_bytes());
            bytes.extend(1u64.to_le_bytes());
            bytes.extend(2u64.to_le_bytes());
            bytes.extend(b"ab");
            bytes.extend(1u64.to_le_bytes());
            bytes.push(b'x');
            bytes.extend(2u32.to_le_bytes());
            bytes.extend(32u64.to_le_bytes());
            bytes.extend(2u64.to_le_bytes());
            bytes.extend(3u32.to_le_bytes());
            bytes.extend(0u64.to_le_bytes());
            bytes.resize(bytes.len().next_multiple_of(32) + 40, 7);
            let len = bytes.len();
            bytes[at % len] = byte;
            bytes.truncate(len.saturating_sub(cut % len));
            if let Ok(gguf) = Gguf::parse(&bytes) {
                for info in gguf.tensors.values() {
                    prop_assert!(info.bytes.end <= bytes.len());
                }
            }
        }
    }
}
