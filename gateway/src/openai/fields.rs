//! Reads a JSON object field by field. Each reader takes its field out; what is left at the end was not
//! understood, and is refused by name. `null` is the same as absent.

use serde_json::{Map, Value};

use crate::openai::validate::ValidateError;

/// The fields of one object that have not been read yet.
#[derive(Debug)]
pub struct Fields {
    /// The object's own name with its dot, empty at the top.
    path: String,
    map: Map<String, Value>,
}

type Read<T> = Result<Option<T>, ValidateError>;

impl Fields {
    /// The fields of `value`, which must be an object; `param` names it.
    pub fn of(param: &str, value: Value) -> Result<Self, ValidateError> {
        match value {
            Value::Object(map) if param.is_empty() => Ok(Self { path: String::new(), map }),
            Value::Object(map) => Ok(Self { path: format!("{param}."), map }),
            other => Err(wrong(param, "an object", &other)),
        }
    }

    /// The body of a request. A body that is not JSON is refused with the place, and the field around it.
    pub fn parse(body: &[u8]) -> Result<Self, ValidateError> {
        if let Err(error) = std::str::from_utf8(body) {
            let at = error.valid_up_to();
            let reason = format!("it is not UTF-8 at byte {at}");
            return Err(ValidateError::Json { reason, param: field_around(&body[..at]) });
        }
        match serde_json::from_slice::<Value>(body) {
            Ok(value @ Value::Object(_)) => Self::of("", value),
            Ok(other) => {
                let reason = format!("it must be an object, not {}", kind(&other));
                Err(ValidateError::Json { reason, param: None })
            }
            Err(error) => {
                let at = offset(body, error.line(), error.column());
                Err(ValidateError::Json { reason: error.to_string(), param: field_around(&body[..at]) })
            }
        }
    }

    /// The full name of a field.
    #[must_use]
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// Any value.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        self.map.shift_remove(field).filter(|value| !value.is_null())
    }

    /// A string.
    pub fn string(&mut self, field: &str) -> Read<String> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.name(field), "a string", &other)),
        }
    }

    /// True or false.
    pub fn boolean(&mut self, field: &str) -> Read<bool> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(&self.name(field), "true or false", &other)),
        }
    }

    /// A whole number within bounds.
    pub fn integer(&mut self, field: &str, min: i64, max: i64) -> Read<i64> {
        let Some(value) = self.take(field) else { return Ok(None) };
        integer_of(&self.name(field), &value, min, max).map(Some)
    }

    /// A finite number within bounds.
    pub fn number(&mut self, field: &str, min: f64, max: f64) -> Read<f32> {
        let Some(value) = self.take(field) else { return Ok(None) };
        number_of(&self.name(field), &value, min, max).map(Some)
    }

    /// A finite number above 0.
    pub fn positive(&mut self, field: &str, max: f64) -> Read<f32> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let param = self.name(field);
        let number = value.as_f64().ok_or_else(|| wrong(&param, "a number", &value))?;
        // Smaller than any f32 is 0 for an engine.
        if number <= max && number as f32 > 0.0 {
            return Ok(Some(number as f32));
        }
        Err(ValidateError::value(param, format!("must be above 0 and at most {max}, not {number}")))
    }

    /// A list.
    pub fn list(&mut self, field: &str) -> Read<Vec<Value>> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.name(field), "a list", &other)),
        }
    }

    /// The object in a field.
    pub fn object(&mut self, field: &str) -> Read<Fields> {
        let Some(value) = self.take(field) else { return Ok(None) };
        Fields::of(&self.name(field), value).map(Some)
    }

    /// Refuses what was not read. `unsupported` are fields that OpenAI documents, with a hint each.
    pub fn finish(self, unsupported: &[(&str, &'static str)]) -> Result<(), ValidateError> {
        let Some((field, _)) = self.map.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
        let param = format!("{}{}", self.path, field.chars().take(100).collect::<String>());
        match unsupported.iter().find(|(name, _)| name == field) {
            Some((_, hint)) => Err(ValidateError::Unsupported { param, hint }),
            None => Err(ValidateError::Unknown(param)),
        }
    }
}

/// What a JSON value is, for people.
#[must_use]
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal number",
        Value::Number(_) => "a whole number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The fault of a value of another type.
#[must_use]
pub fn wrong(param: &str, expected: &'static str, found: &Value) -> ValidateError {
    ValidateError::Type { param: param.to_owned(), expected, found: kind(found) }
}

/// A whole number within bounds.
pub fn integer_of(param: &str, value: &Value, min: i64, max: i64) -> Result<i64, ValidateError> {
    let Value::Number(number) = value else { return Err(wrong(param, "a whole number", value)) };
    if number.is_f64() {
        return Err(wrong(param, "a whole number", value));
    }
    // Above i64 there are only numbers too large for every field.
    match number.as_i64() {
        Some(whole) if (min..=max).contains(&whole) => Ok(whole),
        _ => Err(ValidateError::value(param, format!("must be within {min} to {max}, not {number}"))),
    }
}

/// A finite number within bounds.
pub fn number_of(param: &str, value: &Value, min: f64, max: f64) -> Result<f32, ValidateError> {
    let Some(number) = value.as_f64() else { return Err(wrong(param, "a number", value)) };
    if (min..=max).contains(&number) {
        return Ok(number as f32);
    }
    Err(ValidateError::value(param, format!("must be within {min} to {max}, not {number}")))
}

/// The byte before which the parser stopped.
fn offset(body: &[u8], line: usize, column: usize) -> usize {
    let start = match line {
        0 | 1 => 0,
        _ => body.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(line - 2).map_or(0, |(at, _)| at + 1),
    };
    (start + column).min(body.len())
}

/// The top-level field that `body`, the beginning of a JSON object, ends in.
fn field_around(body: &[u8]) -> Option<String> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    let (mut string_from, mut key) = (0, None);
    let mut expects_key = false;
    for (at, byte) in body.iter().enumerate() {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (true, b'"') => {
                in_string = false;
                if depth == 1 && expects_key {
                    key = std::str::from_utf8(&body[string_from..at]).ok();
                    expects_key = false;
                }
            }
            (true, _) => {}
            (false, b'"') => (in_string, string_from) = (true, at + 1),
            (false, b'{' | b'[') => {
                depth += 1;
                expects_key |= depth == 1;
            }
            (false, b'}' | b']') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    key = None;
                }
            }
            (false, b',') if depth == 1 => (expects_key, key) = (true, None),
            _ => {}
        }
    }
    key.map(|name| name.chars().take(100).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of("", value).expect("an object")
    }

    #[test]
    fn null_is_absent_and_what_is_left_is_named() {
        let mut read = fields(json!({"a": null, "b": 1, "c": null, "old": 2}));
        assert_eq!(read.string("a"), Ok(None));
        assert_eq!(read.integer("b", 0, 1), Ok(Some(1)));
        let error = read.finish(&[("old", "")]).expect_err("one field is left");
        assert_eq!((error.code(), error.param()), ("unsupported_parameter", Some("old")));
    }

    #[test]
    fn numbers_are_checked_for_kind_and_bounds() {
        let mut read = fields(json!({"a": 1.5, "b": "1", "c": 9, "d": 1e20, "e": 18446744073709551615u64, "f": 1}));
        assert_eq!(read.integer("a", 0, 9).expect_err("decimal").code(), "invalid_type");
        assert_eq!(read.number("b", 0.0, 9.0).expect_err("string").to_string(), "`b` must be a number, not a string");
        assert_eq!(read.integer("c", 0, 8).expect_err("large").to_string(), "`c` must be within 0 to 8, not 9");
        assert_eq!(read.integer("d", 0, 8).expect_err("decimal").code(), "invalid_type");
        assert_eq!(read.integer("e", 0, 8).expect_err("huge").code(), "invalid_value");
        assert_eq!(read.number("f", 0.0, 1.0), Ok(Some(1.0)));
        let mut read = fields(json!({"a": 0, "b": 1e-60, "c": 1, "d": "x"}));
        let error = read.positive("a", 1.0).expect_err("zero").to_string();
        assert_eq!(error, "`a` must be above 0 and at most 1, not 0");
        assert_eq!(read.positive("b", 1.0).expect_err("no f32").code(), "invalid_value");
        assert_eq!(read.positive("c", 1.0), Ok(Some(1.0)));
        assert_eq!(read.positive("d", 1.0).expect_err("string").code(), "invalid_type");
    }

    #[test]
    fn a_body_that_is_not_json_is_refused_with_its_field() {
        let deep = format!(r#"{{"model": "m", "messages": {}1{}}}"#, "[".repeat(200), "]".repeat(200));
        let cases: [(&[u8], Option<&str>); 8] = [
            (deep.as_bytes(), Some("messages")),
            (b"{\"model\": \"\xFF\"}", Some("model")),
            (br#"{"a": {"x": 1}, "b": nope}"#, Some("b")),
            (br#"{"a": "\ud800"}"#, Some("a")),
            (br#"{"a": 1}{"b": 2}"#, None),
            (b"[1]", None),
            (b"", None),
            (b"{", None),
        ];
        for (body, param) in cases {
            let error = Fields::parse(body).expect_err("refused");
            assert_eq!((error.code(), error.param()), ("invalid_json", param), "{error}");
        }
    }
}
