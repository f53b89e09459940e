//! Which model a request names.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::text::NameError;

/// The name a model is served under: 1 to 256 bytes, any script, slashes and inner spaces allowed,
/// no control characters, no space at either end. Compared byte for byte.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelId(Arc<str>);

impl ModelId {
    /// Checks and wraps a name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let fits = !name.is_empty() && name.len() <= 256;
        if fits && name.trim() == name && !name.chars().any(char::is_control) {
            return Ok(Self(name.into()));
        }
        Err(NameError::new("model", name, "1 to 256 bytes, no control characters, no space at either end"))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ModelId {
    type Err = NameError;
    fn from_str(s: &str) -> Result<Self, NameError> {
        Self::new(s)
    }
}

impl TryFrom<String> for ModelId {
    type Error = NameError;
    fn try_from(s: String) -> Result<Self, NameError> {
        Self::new(&s)
    }
}

impl From<ModelId> for String {
    fn from(id: ModelId) -> Self {
        id.0.as_ref().into()
    }
}
