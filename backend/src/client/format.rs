//! Output for people: tables, times, sizes, colour where a terminal shows it.

use std::io::{IsTerminal as _, Write as _};

use super::Failure;

/// Writes to stdout.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// How a text is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Paint {
    Plain,
    Bold,
    Red,
    Yellow,
    Green,
}

/// Whether colours are shown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Colours(bool);

impl Colours {
    /// Only on a terminal, and not where the user wants none (no-color.org).
    pub(super) fn of_stdout() -> Self {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self(std::io::stdout().is_terminal() && !unwanted)
    }

    pub(super) fn paint(self, paint: Paint, text: &str) -> String {
        let code = match paint {
            _ if !self.0 => return text.to_owned(),
            Paint::Plain => return text.to_owned(),
            Paint::Bold => 1,
            Paint::Red => 31,
            Paint::Yellow => 33,
            Paint::Green => 32,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Rows of cells in columns.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Vec<(String, Paint)>>,
}

impl Table {
    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = (String, Paint)>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(super) fn head(&mut self, names: &[&str]) {
        self.row(names.iter().map(|name| ((*name).to_owned(), Paint::Bold)));
    }

    /// Each row a line that begins with `indent`.
    pub(super) fn text(&self, indent: &str, colours: Colours) -> String {
        let nr_columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|(text, _)| text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..nr_columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = indent.to_owned();
            for (at, ((cell, paint), width)) in row.iter().zip(&widths).enumerate() {
                line.push_str(&colours.paint(*paint, cell));
                if at + 1 < row.len() {
                    line.push_str(&" ".repeat(width - cell.chars().count() + 2));
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// A time as people say it, with its two largest units.
pub(super) fn duration(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms} ms"),
        1..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86_400, s / 3600 % 24),
    }
}

/// A number of bytes in the largest unit that keeps it short.
pub(super) fn bytes(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    while unit + 1 < units.len() && bytes >> (10 * (unit + 1)) != 0 {
        unit += 1;
    }
    let (whole, rest) = (bytes >> (10 * unit), bytes & ((1 << (10 * unit)) - 1));
    let name = units.get(unit).copied().unwrap_or_default();
    if rest == 0 {
        return format!("{whole} {name}");
    }
    #[expect(clippy::cast_precision_loss, reason = "it is rounded for people")]
    let exact = bytes as f64 / (1_u64 << (10 * unit)) as f64;
    format!("{exact:.1} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_as_people_say_them() {
        let times = [0, 999, 1_000, 59_999, 61_000, 3_600_000, 86_399_000, 90_000_000].map(duration);
        assert_eq!(
            times,
            ["0 ms", "999 ms", "1 s", "59 s", "1 min 1 s", "1 h 0 min", "23 h 59 min", "1 d 1 h"]
        );
        let sizes = [0, 512, 1024, 1536, 256 << 20, 10 << 40, u64::MAX].map(bytes);
        assert_eq!(sizes, ["0 bytes", "512 bytes", "1 KiB", "1.5 KiB", "256 MiB", "10 TiB", "16384.0 PiB"]);
    }

    #[test]
    fn columns_are_aligned_and_colour_takes_no_room() {
        let mut table = Table::default();
        table.head(&["A", "B", "C"]);
        table.row(
            [("äöü", Paint::Red), ("x", Paint::Plain), ("", Paint::Plain)].map(|(t, p)| (t.to_owned(), p)),
        );
        assert_eq!(table.text("  ", Colours(false)), "  A    B  C\n  äöü  x\n");
        let painted = table.text("", Colours(true));
        assert_eq!(painted.lines().nth(1).unwrap(), "\x1b[31mäöü\x1b[0m  x");
    }
}
