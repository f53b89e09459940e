//! How Python writes values: chat templates are written for it.
//!
//! `json.dumps` with its spaces after `,` and `:`, `repr` for what a template prints whole, and `strftime`.

use minijinja::{Value, value::ValueKind};

/// The switches of Hugging Face's `tojson`.
#[derive(Debug, Clone, Default)]
pub struct JsonStyle {
    /// Spaces per level, each value on its own line.
    pub indent: Option<usize>,
    /// Keys in byte order.
    pub sort_keys: bool,
    /// Escape everything that is not ASCII.
    pub ensure_ascii: bool,
    /// Between values, and between key and value.
    pub separators: Option<(String, String)>,
}

/// `json.dumps(value)`. What JSON has no word for is written as its text.
#[must_use]
pub fn json_dumps(value: &Value, style: &JsonStyle) -> String {
    let (item, key) = style
        .separators
        .clone()
        .unwrap_or_else(|| (if style.indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()));
    let mut out = String::new();
    JsonWriter { style, item, key }.write(value, 1, &mut out);
    out
}

struct JsonWriter<'a> {
    style: &'a JsonStyle,
    item: String,
    key: String,
}

impl JsonWriter<'_> {
    fn write(&self, value: &Value, level: usize, out: &mut String) {
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => out.push_str("null"),
            ValueKind::Bool | ValueKind::Number => out.push_str(&value.to_string().to_lowercase()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter().map(Iterator::collect).unwrap_or_default();
                if self.style.sort_keys {
                    keys.sort_by_key(ToString::to_string);
                }
                let pair = |key: &Value| {
                    let mut text = String::new();
                    self.string(&key.to_string(), &mut text);
                    text.push_str(&self.key);
                    self.write(&value.get_item(key).unwrap_or_default(), level + 1, &mut text);
                    text
                };
                self.group(['{', '}'], keys.iter().map(pair), level, out);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let item = |item: Value| {
                    let mut text = String::new();
                    self.write(&item, level + 1, &mut text);
                    text
                };
                self.group(['[', ']'], value.try_iter().into_iter().flatten().map(item), level, out);
            }
            _ => self.string(&value.to_string(), out),
        }
    }

    fn group(&self, brackets: [char; 2], items: impl Iterator<Item = String>, level: usize, out: &mut String) {
        out.push(brackets[0]);
        let mut empty = true;
        for item in items {
            if !empty {
                out.push_str(&self.item);
            }
            empty = false;
            self.line(level, out);
            out.push_str(&item);
        }
        if !empty {
            self.line(level - 1, out);
        }
        out.push(brackets[1]);
    }

    fn line(&self, level: usize, out: &mut String) {
        if let Some(indent) = self.style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.style.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// What Python's `str(value)` shows; `repr` inside lists and dicts.
#[must_use]
pub fn text_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Map | ValueKind::Seq => repr(value),
        _ => value.to_string(),
    }
}

fn repr(value: &Value) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => {
            let text = value.to_string();
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            let mut out = String::from(quote);
            for c in text.chars() {
                match c {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => out.extend(['\\', c]),
                    c => out.push(c),
                }
            }
            out.push(quote);
            out
        }
        ValueKind::Map => {
            let pair = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            format!("{{{}}}", items().map(pair).collect::<Vec<_>>().join(", "))
        }
        ValueKind::Seq => format!("[{}]", items().map(|item| repr(&item)).collect::<Vec<_>>().join(", ")),
        _ => text_of(value),
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `strftime` of a UTC time in seconds since 1970, for the directives that dates in prompts use. An
/// unknown directive is left as it stands.
#[must_use]
pub fn strftime(unix_s: i64, format: &str) -> String {
    let (days, second) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
    let (year, month, day) = civil_from_days(days);
    let weekday = DAYS[days.rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let hour = second / 3_600;
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{hour12:02}")),
            Some('M') => out.push_str(&format!("{:02}", second / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", second % 60)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('j') => out.push_str(&format!("{:03}", days - days_from_civil(year, 1, 1) + 1)),
            Some('Z') => out.push_str("UTC"),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day number, 0 being 1970-01-01, in the Gregorian calendar.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    // Counted from 0000-03-01, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        // 2024-02-29 13:05:09 UTC, a Thursday.
        let leap_day = 1_709_211_909;
        assert_eq!(strftime(leap_day, "%d %b %Y"), "29 Feb 2024");
        assert_eq!(
            strftime(leap_day, "%A %B %y %I:%M:%S %p %j %F %q %%"),
            "Thursday February 24 01:05:09 PM 060 2024-02-29 %q %"
        );
        assert_eq!(strftime(-1, "%F %H"), "1969-12-31 23");
        for days in (-200_000..200_000).step_by(97) {
            let (year, month, day) = civil_from_days(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let value =
            Value::from(minijinja::value::Serde(serde_json::json!({"b": [1, 1.5, true, null], "a": "é\"\n<'>"})));
        assert_eq!(json_dumps(&value, &JsonStyle::default()), r#"{"b": [1, 1.5, true, null], "a": "é\"\n<'>"}"#);
        let style = JsonStyle { indent: Some(2), sort_keys: true, ensure_ascii: true, separators: None };
        assert_eq!(
            json_dumps(&value, &style),
            "{\n  \"a\": \"\\u00e9\\\"\\n<'>\",\n  \"b\": [\n    1,\n    1.5,\n    true,\n    null\n  ]\n}"
        );
        assert_eq!(text_of(&value), r#"{'b': [1, 1.5, True, None], 'a': 'é"\n<\'>'}"#);
        assert_eq!(text_of(&Value::from(())), "None");
    }
}
