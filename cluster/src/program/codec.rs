//! Bodies of the programming model as bytes: MessagePack with field names.
//!
//! Called wherever a typed value becomes a frame or the other way round. Pure.

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};

use super::error::RequestFault;
use crate::stream::{Fault, FaultKind};

/// Encodes a value of this process; one that serde cannot express is a fault of the program.
pub(super) fn encode<T: Serialize>(value: &T) -> Result<Bytes, RequestFault> {
    let encoded = rmp_serde::to_vec_named(value).map_err(|error| RequestFault::Encode(error.to_string()))?;
    Ok(encoded.into())
}

/// Decodes what the other side sent.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RequestFault> {
    rmp_serde::from_slice(bytes).map_err(|error| RequestFault::Decode(error.to_string()))
}

/// The same on the side that answers, as what its asker is told.
pub(super) fn encode_reply<T: Serialize>(value: &T) -> Result<Bytes, Fault> {
    encode(value).map_err(|error| Fault::new(FaultKind::Internal, error.to_string()))
}

/// The same on the side that answers: a request that cannot be read is the asker's fault.
pub(super) fn decode_request<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    decode(bytes).map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Old {
        a: u8,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct New {
        a: u8,
        #[serde(default)]
        b: Option<String>,
    }

    #[test]
    fn two_versions_of_a_type_understand_one_another() {
        assert_eq!(decode::<New>(&encode(&Old { a: 7 }).unwrap()), Ok(New { a: 7, b: None }));
        assert_eq!(decode::<Old>(&encode(&New { a: 7, b: Some("x".into()) }).unwrap()), Ok(Old { a: 7 }));
        assert_eq!(decode_request::<Old>(b"\xc1").unwrap_err().kind, FaultKind::Invalid);
        assert!(!encode(&()).unwrap().is_empty(), "an empty body means that no value follows yet");
    }
}
