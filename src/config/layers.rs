//! Puts the layers of configuration on top of each other: default, file, environment, flag.
//!
//! Called by [`super::Config::load`]; pure: the caller reads the file and hands in the variables.
//! Never: interprets a value; that is [`super::parse`], which can then say where a wrong one came from.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use super::{
    ConfigError,
    settings::{SETTINGS, Setting, setting, suggest},
};

/// Where a value came from. Later ones win.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Nobody said anything.
    Default,
    /// A key of the configuration file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A flag or an argument.
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag => f.write_str("flag"),
        }
    }
}

/// One value as text, and who said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// As written; a list joined by commas.
    pub text: String,
    /// By whom.
    pub source: Source,
}

/// The winning value of every setting; one without a value is derived at start.
pub type Layered = BTreeMap<&'static str, Value>;

/// All layers in one.
///
/// `file` is the path and text of the configuration file, `variable` looks one environment variable up, `flags`
/// are (setting, text). An empty variable counts as not set, which is how most tools unset one.
pub(super) fn layer(
    join: bool,
    file: Option<(PathBuf, String)>,
    variable: &dyn Fn(&str) -> Option<String>,
    flags: &[(&'static str, String)],
) -> Result<Layered, ConfigError> {
    let mut values = Layered::new();
    for setting in SETTINGS {
        if let Some(text) = setting.default_value(join) {
            values.insert(setting.name, Value { text: text.to_owned(), source: Source::Default });
        }
    }
    if let Some((path, text)) = file {
        for (setting, text) in read_file(&path, &text)? {
            values.insert(setting.name, Value { text, source: Source::File(path.clone()) });
        }
    }
    for setting in SETTINGS {
        let name = setting.variable();
        if let Some(text) = variable(&name).filter(|text| !text.is_empty()) {
            values.insert(setting.name, Value { text, source: Source::Environment(name) });
        }
    }
    for (name, text) in flags {
        values.insert(name, Value { text: text.clone(), source: Source::Flag });
    }
    Ok(values)
}

/// The keys of a TOML file, each a known setting with a plain value or a list of plain values.
fn read_file(path: &std::path::Path, text: &str) -> Result<Vec<(&'static Setting, String)>, ConfigError> {
    let malformed = |reason: String| ConfigError::File { path: path.to_owned(), reason };
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| malformed(e.to_string().trim_end().to_owned()))?;
    let mut values = Vec::with_capacity(table.len());
    for (key, value) in &table {
        let Some(known) = setting(key) else {
            let hint = suggest(key).map_or_else(
                || "`starling config` lists all keys".to_owned(),
                |near| format!("did you mean `{near}`?"),
            );
            return Err(malformed(format!("unknown key `{key}`: {hint}")));
        };
        let text = match value {
            // The one setting that may be a table; it is checked as a whole.
            toml::Value::Table(_) if known.name == "policy" => Some(value.to_string()),
            _ => plain(value),
        };
        let text =
            text.ok_or_else(|| malformed(format!("key `{key}` is a {}; it must be {}", value.type_str(), known.rule)))?;
        values.push((known, text));
    }
    Ok(values)
}

/// A plain value as text; lists joined by commas. `None` for tables and dates.
fn plain(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        toml::Value::Array(items) => {
            let items: Option<Vec<String>> = items.iter().filter(|item| !item.is_array()).map(plain).collect();
            items.map(|items| items.join(","))
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    fn file(text: &str) -> Option<(PathBuf, String)> {
        Some(("/etc/starling.toml".into(), text.to_owned()))
    }

    #[test]
    fn flags_beat_variables_beat_the_file_beats_defaults() {
        let env = |name: &str| (name == "STARLING_WORKERS" || name == "STARLING_KV_MIB").then(|| "5".to_owned());
        let values =
            layer(false, file("workers = 4\nkv-mib = 64\nthreads = 3"), &env, &[("workers", "6".into())]).unwrap();
        assert_eq!((values["workers"].text.as_str(), &values["workers"].source), ("6", &Source::Flag));
        assert_eq!(values["kv-mib"].source, Source::Environment("STARLING_KV_MIB".into()));
        assert_eq!(values["threads"].source, Source::File("/etc/starling.toml".into()));
        assert_eq!(values["waiting-max"].source, Source::Default);
        assert!(!values.contains_key("model"), "derived values stay open");
    }

    #[test]
    fn an_unknown_key_is_refused_by_name_with_a_suggestion() {
        let error = layer(false, file("worker = 4"), &none, &[]).unwrap_err().to_string();
        assert!(error.contains("`worker`") && error.contains("`workers`"), "{error}");
        let error = layer(false, file("[engine]\nkind = 1"), &none, &[]).unwrap_err().to_string();
        assert!(error.contains("`engine`") && error.contains("table"), "{error}");
    }

    #[test]
    fn the_policy_may_be_a_table_and_stays_one_line() {
        let text = "[policy]\nscorers = [\"ms\", { name = \"load\", weight = 2 }]\n[policy.picker]\nname = \"softmin\"";
        let values = layer(false, file(text), &none, &[]).unwrap();
        let line = &values["policy"].text;
        assert!(line.starts_with('{') && !line.contains('\n') && line.contains("weight = 2"), "{line}");
        assert!(layer(false, file("[workers]\na = 1"), &none, &[]).unwrap_err().to_string().contains("table"));
    }

    #[test]
    fn lists_become_commas_and_empty_variables_do_not_count() {
        let empty = |_: &str| Some(String::new());
        let values = layer(true, file("role = [\"router\", \"gateway\"]"), &empty, &[]).unwrap();
        assert_eq!(values["role"].text, "router,gateway");
    }
}
