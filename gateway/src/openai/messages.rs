//! The turns of a conversation: checked, and put into the form that chat templates read.

use serde_json::{Map, Value};

use crate::openai::{
    fields::{Fields, wrong},
    validate::{MESSAGES_MAX, NAME_BYTES_MAX, ValidateError},
};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Checks `messages` and returns one object per turn with `role`, `content` (text or null) and, where they were
/// given, `name`, `tool_calls`, `tool_call_id` and `reasoning_content`. Nothing else survives, nothing is dropped.
pub fn read(value: Option<Value>) -> Result<Vec<Value>, ValidateError> {
    let items = match value {
        None => return Err(ValidateError::Missing("messages".into())),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong("messages", "a list", &other)),
    };
    if items.is_empty() || items.len() > MESSAGES_MAX {
        let rule = format!("must hold 1 to {MESSAGES_MAX} messages, not {}", items.len());
        return Err(ValidateError::value("messages", rule));
    }
    items.into_iter().enumerate().map(|(index, item)| message(&format!("messages[{index}]"), item)).collect()
}

fn message(param: &str, item: Value) -> Result<Value, ValidateError> {
    let mut fields = Fields::of(param, item)?;
    let role = fields.string("role")?.ok_or_else(|| ValidateError::Missing(fields.name("role")))?;
    if !ROLES.contains(&role.as_str()) {
        return Err(ValidateError::value(fields.name("role"), format!("must be one of {}", ROLES.join(", "))));
    }
    let content = content(&mut fields)?;
    let tool_calls = tool_calls(&mut fields)?;
    if tool_calls.is_some() && role != "assistant" {
        return Err(ValidateError::value(fields.name("tool_calls"), "belongs to the role assistant only"));
    }
    let may_lack_content = role == "assistant" && tool_calls.is_some();
    if content.is_none() && !may_lack_content {
        return Err(ValidateError::Missing(fields.name("content")));
    }
    let mut turn = Map::new();
    turn.insert("role".into(), role.into());
    turn.insert("content".into(), content.map_or(Value::Null, Value::String));
    if let Some(name) = short_string(&mut fields, "name")? {
        turn.insert("name".into(), name.into());
    }
    if let Some(calls) = tool_calls {
        turn.insert("tool_calls".into(), calls);
    }
    if let Some(id) = short_string(&mut fields, "tool_call_id")? {
        turn.insert("tool_call_id".into(), id.into());
    }
    if let Some(thought) = fields.string("reasoning_content")? {
        turn.insert("reasoning_content".into(), thought.into());
    }
    // Replies carry these; a client that sends a reply back as it came means nothing by them when empty.
    if fields.list("annotations")?.is_some_and(|list| !list.is_empty()) {
        return Err(ValidateError::Unsupported { param: fields.name("annotations"), hint: "" });
    }
    fields.finish(&[("refusal", ""), ("audio", ""), ("function_call", ": use tool_calls")])?;
    Ok(Value::Object(turn))
}

/// A string, or text parts, which are joined by line ends.
fn content(fields: &mut Fields) -> Result<Option<String>, ValidateError> {
    let param = fields.name("content");
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong(&param, "a string or a list of parts", &other)),
    };
    if parts.is_empty() {
        return Err(ValidateError::value(param, "must not be an empty list"));
    }
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::of(&format!("{param}[{index}]"), part)?;
        let kind = fields.string("type")?.ok_or_else(|| ValidateError::Missing(fields.name("type")))?;
        if kind != "text" {
            return Err(ValidateError::value(fields.name("type"), "must be \"text\": this server reads text only"));
        }
        texts.push(fields.string("text")?.ok_or_else(|| ValidateError::Missing(fields.name("text")))?);
        fields.finish(&[])?;
    }
    Ok(Some(texts.join("\n")))
}

/// The calls of an assistant turn. Arguments that are a JSON object are handed on as one, which is what
/// templates expect; an empty text is an empty object; any other text stays as it is.
fn tool_calls(fields: &mut Fields) -> Result<Option<Value>, ValidateError> {
    let param = fields.name("tool_calls");
    let Some(items) = fields.list("tool_calls")? else { return Ok(None) };
    if items.is_empty() {
        return Ok(None);
    }
    let mut calls = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let mut call = Fields::of(&format!("{param}[{index}]"), item)?;
        let id = short_string(&mut call, "id")?;
        if call.string("type")?.is_some_and(|kind| kind != "function") {
            return Err(ValidateError::value(call.name("type"), "must be \"function\""));
        }
        let mut function = call.object("function")?.ok_or_else(|| ValidateError::Missing(call.name("function")))?;
        let name = short_string(&mut function, "name")?.ok_or_else(|| ValidateError::Missing(function.name("name")))?;
        let arguments = match function.string("arguments")? {
            None => Value::Object(Map::new()),
            Some(text) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(text) => match serde_json::from_str::<Value>(&text) {
                Ok(object @ Value::Object(_)) => object,
                _ => Value::String(text),
            },
        };
        function.finish(&[])?;
        // A call's place in a streamed list; it says nothing that the order does not.
        call.integer("index", 0, i64::MAX)?;
        call.finish(&[])?;
        let mut made = Map::new();
        if let Some(id) = id {
            made.insert("id".into(), id.into());
        }
        made.insert("type".into(), "function".into());
        made.insert("function".into(), serde_json::json!({"name": name, "arguments": arguments}));
        calls.push(Value::Object(made));
    }
    Ok(Some(Value::Array(calls)))
}

/// A string of bounded length.
pub(super) fn short_string(fields: &mut Fields, field: &str) -> Result<Option<String>, ValidateError> {
    let text = fields.string(field)?;
    if text.as_ref().is_some_and(|text| text.is_empty() || text.len() > NAME_BYTES_MAX) {
        return Err(ValidateError::value(fields.name(field), format!("must have 1 to {NAME_BYTES_MAX} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn req_02_no_messages_is_the_clients_fault_by_name() {
        for value in [None, Some(json!([])), Some(json!("hi"))] {
            assert_eq!(read(value).expect_err("refused").param(), Some("messages"));
        }
    }

    #[test]
    fn req_06_tool_history_survives() {
        let history = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "refusal": null, "annotations": [], "tool_calls":
                [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}},
                 {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
                 {"id": "c3", "type": "function", "function": {"name": "h", "arguments": "{broken"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]);
        let turns = read(Some(history)).expect("good");
        assert_eq!(turns[0], json!({"role": "user", "content": "a\nb"}));
        assert_eq!(turns[1]["tool_calls"][0]["function"].to_string(), r#"{"name":"f","arguments":{"b":1,"a":2}}"#);
        assert_eq!(turns[1]["tool_calls"][1]["function"]["arguments"], json!({}));
        assert_eq!(turns[1]["tool_calls"][2]["function"]["arguments"], "{broken");
        assert_eq!(turns[2], json!({"role": "tool", "content": "42", "tool_call_id": "c1"}));
    }

    #[test]
    fn a_fault_names_its_place() {
        let cases = [
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "user", "content": "a"}, {"role": "tool_use", "content": "a"}]), "messages[1].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "user", "content": "a", "mood": "x"}]), "messages[0].mood"),
            (json!([{"role": "user", "content": "a", "tool_calls": [{}]}]), "messages[0].tool_calls[0].function"),
            (json!(["hi"]), "messages[0]"),
        ];
        for (messages, param) in cases {
            assert_eq!(read(Some(messages.clone())).expect_err("refused").param(), Some(param), "{messages}");
        }
    }
}
