//! Where a stream is opened to: `namespace/component/endpoint`.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::text::{NameError, is_label};

/// The name of an endpoint: three labels of 1 to 48 bytes of `a-z 0-9 . _ -`, joined by `/`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EndpointName(Arc<str>);

impl EndpointName {
    /// Checks and wraps a name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if name.split('/').count() == 3 && name.split('/').all(|label| is_label(label, 48)) {
            return Ok(Self(name.into()));
        }
        Err(NameError::new("endpoint", name, "namespace/component/endpoint, each 1 to 48 of a-z 0-9 . _ -"))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for EndpointName {
    type Err = NameError;
    fn from_str(s: &str) -> Result<Self, NameError> {
        Self::new(s)
    }
}

impl TryFrom<String> for EndpointName {
    type Error = NameError;
    fn try_from(s: String) -> Result<Self, NameError> {
        Self::new(&s)
    }
}

impl From<EndpointName> for String {
    fn from(name: EndpointName) -> Self {
        name.0.as_ref().into()
    }
}
