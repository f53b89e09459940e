//! Chat templates, rendered as Hugging Face renders them.
//!
//! Jinja with `trim_blocks` and `lstrip_blocks`, Python's string methods, `raise_exception`, `strftime_now` and
//! a `tojson` that writes like `json.dumps`. A template cannot reach anything but its arguments.

use minijinja::{
    Environment, Error, ErrorKind, State, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde_json::Value as Json;

use crate::prompt::{
    PromptError,
    python::{JsonStyle, json_dumps, strftime, text_of},
};

/// The name of the one template in its environment.
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    shows_tool_calls: bool,
    knows_developer: bool,
}

impl ChatTemplate {
    /// Compiles a template.
    pub fn new(source: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self, PromptError> {
        let mut environment = Environment::new();
        let bad = |error: Error| PromptError::Model { part: "chat template", reason: error.to_string() };
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(bad)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _state, value| match value.as_str() {
            Some(text) => Ok(out.write_str(text)?),
            None => Ok(out.write_str(&text_of(value))?),
        });
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(bad)?;
        Ok(Self {
            environment,
            bos_token: bos_token.map(str::to_owned),
            eos_token: eos_token.map(str::to_owned),
            shows_tool_calls: source.contains("tool_calls"),
            knows_developer: source.contains("developer"),
        })
    }

    /// True when the template can show the calls of an assistant turn.
    #[must_use]
    pub fn shows_tool_calls(&self) -> bool {
        self.shows_tool_calls
    }

    /// True when it has a word for the role `developer`; otherwise that role is the system's.
    #[must_use]
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Renders `messages` and opens the assistant's turn. `unix_s` is the time that `strftime_now` shows, in UTC.
    pub fn render(&self, messages: &[Json], unix_s: i64) -> Result<String, PromptError> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| PromptError::Model { part: "chat template", reason: error.to_string() })?;
        let context = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => true,
            bos_token => self.bos_token.as_deref().unwrap_or(""),
            eos_token => self.eos_token.as_deref().unwrap_or(""),
            tools => (),
            documents => (),
            unix_s_now => unix_s,
        };
        template.render(context).map_err(|error| PromptError::Refused(reason(&error)))
    }
}

/// The sentence of an error, without the place in a template that the client cannot see.
fn reason(error: &Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), str::to_owned)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(state: &State, format: String) -> String {
    let now = state.lookup("unix_s_now").and_then(|value| i64::try_from(value).ok());
    strftime(now.unwrap_or(0), &format)
}

fn tojson(value: Value, indent: Option<usize>, kwargs: Kwargs) -> Result<Value, Error> {
    let style = JsonStyle {
        indent: kwargs.get::<Option<usize>>("indent")?.or(indent),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        separators: kwargs.get::<Option<Vec<String>>>("separators")?.and_then(|pair| {
            let mut parts = pair.into_iter();
            Some((parts.next()?, parts.next()?))
        }),
    };
    kwargs.assert_all_used()?;
    Ok(Value::from_safe_string(json_dumps(&value, &style)))
}

/// Training marks (`{% generation %}`) say nothing at inference: they become blocks that are always shown.
fn without_generation_tags(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + len];
        let inner = tag.trim_matches(['-', '+', ' ', '\n', '\t']);
        let new = match inner {
            "generation" => tag.replace(inner, "if true"),
            "endgeneration" => tag.replace(inner, "endif"),
            _ => tag.to_owned(),
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&new);
        out.push_str("%}");
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
