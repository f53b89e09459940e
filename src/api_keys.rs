//! The API keys of a gateway, read from their file.
//!
//! Called once, when the HTTP server starts. Never: writes a key anywhere. Bounds: the file at most 1 MiB.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Largest file that is read, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why the file cannot be used.
#[derive(Debug, Error)]
#[error("api-keys-file {path}: {reason}")]
pub struct ApiKeysError {
    path: PathBuf,
    reason: String,
}

/// One key a line; empty lines and lines that begin with `#` are skipped. No key at all is an error, since a gateway
/// that was told to ask for keys must not be open.
pub(crate) fn read(path: &Path) -> Result<Vec<String>, ApiKeysError> {
    let wrong = |reason: String| ApiKeysError { path: path.to_owned(), reason };
    let size = std::fs::metadata(path).map_err(|error| wrong(format!("cannot be read: {error}")))?.len();
    if size > FILE_BYTES_MAX {
        return Err(wrong(format!("has {size} bytes, the limit is {FILE_BYTES_MAX}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let keys = keys(&text);
    if keys.is_empty() {
        return Err(wrong("holds no key; write one a line, 8 to 512 visible ASCII characters".to_owned()));
    }
    Ok(keys)
}

fn keys(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_one_a_line_and_an_empty_file_is_refused() {
        assert_eq!(keys("# team a\nsecret-one\n\n  secret-two \n"), ["secret-one", "secret-two"]);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys");
        std::fs::write(&file, "# none yet\n").expect("written");
        let error = read(&file).expect_err("no key").to_string();
        assert!(error.contains("api-keys-file") && error.contains("one a line"), "{error}");
        assert!(read(&folder.path().join("missing")).is_err());
    }
}
