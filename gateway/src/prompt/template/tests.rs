//! Renderings equal to those of Python's jinja2 with Hugging Face's settings.

use serde_json::json;

use super::*;

/// 2024-02-29 13:05:09 UTC.
const NOW: i64 = 1_709_211_909;

fn render(source: &str, messages: &[Json]) -> Result<String, PromptError> {
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(messages, NOW)
}

#[test]
fn what_hugging_face_offers_is_there() {
    let messages = [json!({"role": "user", "content": " a,b "})];
    assert_eq!(render("{{ messages[0]['content'].strip().split(',')[-1] }}", &messages), Ok("b".into()));
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &messages), Ok("29 Feb 2024".into()));
    assert_eq!(render("{{ bos_token }}{% if tools is none %}n{% endif %}\n", &messages), Ok("<s>n".into()));
    assert_eq!(render("{{ messages | tojson }}", &messages), Ok(r#"[{"role": "user", "content": " a,b "}]"#.into()));
    assert_eq!(render("{{ none }} {{ true }} {{ ['a'] }}", &messages), Ok("None True ['a']".into()));
    assert_eq!(render("a\n  {%- generation -%} b {% endgeneration %}\nc", &messages), Ok("ab c".into()));
    assert_eq!(
        render("{% for m in messages %}\n    {% if m.role == 'user' %}\nx\n    {% endif %}\n{% endfor %}", &messages),
        Ok("x\n".into())
    );
}

#[test]
fn err_04_a_refusal_carries_the_templates_own_words() {
    let error = render("{{ raise_exception('Only user roles') }}", &[]).expect_err("raises");
    assert_eq!(error, PromptError::Refused("Only user roles".into()));
    assert!(render("{{ 'a' + messages[0].content }}", &[json!({"content": null})]).is_err());
    assert!(matches!(render("{% if %}", &[]), Err(PromptError::Model { .. })));
}

/// `golden.json` was made by jinja2 3 with `trim_blocks`, `lstrip_blocks`, the loop controls and Hugging Face's
/// `tojson`, `raise_exception` and `strftime_now`: SmolLM2's own template, and templates that use what others use.
#[test]
fn golden_renderings_equal_the_reference() {
    let golden: Json = serde_json::from_str(include_str!("golden.json")).expect("JSON");
    let list = |value: &Json| value.as_array().expect("a list").clone();
    let smollm = golden["chat_template"].as_str().expect("text");
    let conversations: Vec<Vec<Json>> = list(&golden["cases"]).iter().map(|case| list(&case["messages"])).collect();
    let template =
        |source: &str| ChatTemplate::new(source, Some("<|im_start|>"), Some("<|im_end|>")).expect("compiles");
    let compiled = template(smollm);
    for (case, messages) in list(&golden["cases"]).iter().zip(&conversations) {
        assert_eq!(compiled.render(messages, NOW).as_deref(), Ok(case["rendered"].as_str().expect("text")));
    }
    for other in list(&golden["templates"]) {
        let source = other["template"].as_str().expect("text");
        let compiled = template(source);
        for (expected, messages) in list(&other["rendered"]).iter().zip(&conversations) {
            let rendered = compiled.render(messages, NOW).ok();
            assert_eq!(rendered.as_deref(), expected.as_str(), "{source}");
        }
    }
}
