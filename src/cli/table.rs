//! Prints rows as a table: ruled on a terminal, plain columns in a pipe.

use std::{collections::BTreeMap, io::IsTerminal};

use comfy_table::{ContentArrangement, Table, presets};

/// A table with these columns.
pub(super) fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    let terminal = std::io::stdout().is_terminal();
    table.load_style(if terminal { presets::UTF8_HORIZONTAL_ONLY } else { presets::NOTHING });
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|column| column.to_uppercase()));
    table
}

/// Columns begin at the left edge and stand two spaces apart.
fn space(table: &mut Table) {
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 2));
    });
}

/// Prints it without spaces at the ends of lines.
pub(super) fn print(mut table: Table) {
    space(&mut table);
    for line in table.lines() {
        println!("{}", line.trim_end());
    }
}

/// A value, or a dash.
pub(super) fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// `key=value` pairs, or a dash.
pub(super) fn labels(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    or_dash((!pairs.is_empty()).then(|| pairs.join(" ")))
}

/// Seconds in the largest two units: `3d 4h`, `5m 12s`, `8s`.
pub(super) fn duration(secs: u64) -> String {
    match secs {
        0..60 => format!("{secs}s"),
        60..3_600 => format!("{}m {}s", secs / 60, secs % 60),
        3_600..86_400 => format!("{}h {}m", secs / 3_600, secs % 3_600 / 60),
        _ => format!("{}d {}h", secs / 86_400, secs % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_show_two_units() {
        assert_eq!([duration(8), duration(312), duration(7_260), duration(90_000)], ["8s", "5m 12s", "2h 1m", "1d 1h"]);
    }
}
