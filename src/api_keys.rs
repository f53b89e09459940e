//! The API keys of a gateway, read from their file.
//!
//! Called once, when the HTTP server starts. Never: writes a key anywhere, also not in an error. Bounds: the file at most 1 MiB.
//!
//! ```text
//! # KEY [tenant=NAME] [weight=N] [priority=N] [budget=N] [scopes=pin,select,view]
//! 8f3a-very-long-secret
//! c91d-another-one       tenant=search weight=4 priority=-10 budget=60000
//! ```

use std::path::{Path, PathBuf};

use starling_gateway::{ApiKey, Caller, Scope};
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

/// One key a line with what it stands for; empty lines and lines that begin with `#` are skipped. No key at all is an
/// error, since a gateway that was told to ask for keys must not be open.
pub(crate) fn read(path: &Path) -> Result<Vec<ApiKey>, ApiKeysError> {
    let wrong = |reason: String| ApiKeysError { path: path.to_owned(), reason };
    let size = std::fs::metadata(path).map_err(|error| wrong(format!("cannot be read: {error}")))?.len();
    if size > FILE_BYTES_MAX {
        return Err(wrong(format!("has {size} bytes, the limit is {FILE_BYTES_MAX}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let keys = keys(&text).map_err(wrong)?;
    if keys.is_empty() {
        return Err(wrong("holds no key; write one a line, 8 to 512 visible ASCII characters".to_owned()));
    }
    Ok(keys)
}

fn keys(text: &str) -> Result<Vec<ApiKey>, String> {
    let lines = text.lines().map(str::trim).enumerate();
    let written = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    written.map(|(at, line)| entry(line).map_err(|reason| format!("line {}: {reason}", at + 1))).collect()
}

fn entry(line: &str) -> Result<ApiKey, String> {
    let mut words = line.split_whitespace();
    let mut entry = ApiKey::from(words.next().unwrap_or_default());
    for word in words {
        // What is no setting may be a part of a key: it is not repeated.
        let known = "after the key only tenant=NAME, weight=N, priority=N, budget=N and scopes=NAME,.. may stand";
        let unknown = || known.to_owned();
        let (name, value) = word.split_once('=').ok_or_else(unknown)?;
        let caller: &mut Caller = &mut entry.caller;
        let number = |what: &str| value.parse::<i32>().map_err(|_| format!("{what} must be a whole number"));
        match name {
            "tenant" => caller.tenant = value.to_owned(),
            "weight" => caller.weight = u32::try_from(number("weight")?).unwrap_or(0),
            "priority" => caller.priority_min = number("priority")?,
            "budget" => {
                let tokens = value.parse().ok().filter(|tokens| *tokens > 0);
                caller.budget = tokens.ok_or("budget must be a whole number of tokens per minute, 1 or more")?;
            }
            "scopes" => caller.scopes = scopes(value)?,
            _ => return Err(unknown()),
        }
    }
    Ok(entry)
}

fn scopes(names: &str) -> Result<Vec<Scope>, String> {
    let scope = |name: &str| Scope::ALL.into_iter().find(|scope| scope.as_str() == name);
    let unknown = || "a scope is pin, select or view; several are joined by commas".to_owned();
    names.split(',').map(|name| scope(name).ok_or_else(unknown)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_one_a_line_and_an_empty_file_is_refused() {
        assert_eq!(keys("# team a\nsecret-one\n\n  secret-two \n"), Ok(vec!["secret-one".into(), "secret-two".into()]));
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys");
        std::fs::write(&file, "# none yet\n").expect("written");
        let error = read(&file).expect_err("no key").to_string();
        assert!(error.contains("api-keys-file") && error.contains("one a line"), "{error}");
        assert!(read(&folder.path().join("missing")).is_err());
    }

    #[test]
    fn a_key_may_name_its_tenant_and_a_mistake_is_found_without_showing_a_key() {
        let line = "secret-one tenant=search  weight=4 priority=-10 budget=60000 scopes=pin,select";
        let read = keys(line).expect("good").remove(0);
        let scopes = vec![Scope::Pin, Scope::Select];
        let caller = Caller { tenant: "search".into(), weight: 4, priority_min: -10, budget: 60_000, scopes };
        assert_eq!(read.caller, caller);
        for wrong in ["key secret", "\nkey color=secret", "key weight=secret", "key scopes=pin,secret", "key scopes="] {
            let error = keys(wrong).expect_err(wrong);
            assert!(error.starts_with("line ") && !error.contains("secret"), "{error}");
        }
    }
}
