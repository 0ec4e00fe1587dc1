//! A terminal's screen as `tmux capture-pane -e` gives it, drawn as an SVG picture.

use std::fmt::Write as _;

/// Size of a cell and of the letters in it.
const CELL_WIDTH: f64 = 8.4;
const CELL_HEIGHT: usize = 18;
const FONT_SIZE: usize = 14;

/// How letters look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Look {
    bold: bool,
    reversed: bool,
    /// None: the terminal's own.
    colour: Option<&'static str>,
}

impl Look {
    /// Takes over the numbers of an escape sequence (ECMA-48, SGR). Those that are not drawn are passed over.
    fn change(&mut self, numbers: &str) {
        let mut numbers = numbers.split(';').map(|number| number.parse().unwrap_or(0));
        while let Some(number) = numbers.next() {
            match number {
                0 => *self = Self::default(),
                1 => self.bold = true,
                7 => self.reversed = true,
                22 => self.bold = false,
                27 => self.reversed = false,
                30..=37 => self.colour = COLOURS.get(number - 30).copied(),
                90..=97 => self.colour = COLOURS.get(number - 90).copied(),
                39 => self.colour = None,
                // A colour out of a table, whose first are those above, or by its parts: the numbers belong to it.
                38 | 48 => {
                    let nr_parts = if numbers.next() == Some(5) { 1 } else { 3 };
                    let parts: Vec<usize> = numbers.by_ref().take(nr_parts).collect();
                    if let (38, [of_table]) = (number, parts.as_slice()) {
                        self.colour = COLOURS.get(of_table % 8).copied().filter(|_| *of_table < 16);
                    }
                }
                _ => {}
            }
        }
    }
}

const COLOURS: [&str; 8] =
    ["#3b4252", "#ff6b6b", "#8bd649", "#ffd166", "#6ea8fe", "#d291ff", "#5ce1e6", "#e5e9f0"];
const LETTERS: &str = "#d8dee9";
const GROUND: &str = "#1d2129";

/// Pieces of a line that look the same, each with the column that it begins in.
fn pieces(line: &str, look: &mut Look) -> Vec<(usize, Look, String)> {
    let mut pieces: Vec<(usize, Look, String)> = Vec::new();
    let (mut column, mut rest) = (0, line);
    while let Some(c) = rest.chars().next() {
        if let Some(sequence) = rest.strip_prefix("\x1b[") {
            let end = sequence.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(sequence.len());
            let (numbers, behind) = sequence.split_at(end);
            if behind.starts_with('m') {
                look.change(numbers);
            }
            rest = behind.get(1..).unwrap_or_default();
            continue;
        }
        match pieces.last_mut() {
            Some((_, last, text)) if last == look => text.push(c),
            _ => pieces.push((column, look.clone(), c.to_string())),
        }
        column += 1;
        rest = &rest[c.len_utf8()..];
    }
    pieces
}

/// The picture of a screen with so many columns.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "places on a screen")]
pub fn svg(screen: &str, nr_columns: usize) -> String {
    let x = |column: usize| (column + 1) as f64 * CELL_WIDTH;
    let (width, height) = (x(nr_columns + 1), (screen.lines().count() + 1) * CELL_HEIGHT);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height}\" \
         font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"{FONT_SIZE}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"{GROUND}\"/>\n"
    );
    let mut look = Look::default();
    for (row, line) in screen.lines().enumerate() {
        let y = (row + 1) * CELL_HEIGHT;
        for (column, look, text) in pieces(line, &mut look) {
            let (mut letters, mut ground) = (look.colour.unwrap_or(LETTERS), GROUND);
            let length = text.chars().count() as f64 * CELL_WIDTH;
            if look.reversed {
                std::mem::swap(&mut letters, &mut ground);
                let (x, y, height) = (x(column), y - CELL_HEIGHT + 4, CELL_HEIGHT);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{length:.1}\" height=\"{height}\" fill=\"{ground}\"/>"
                );
            }
            if text.trim().is_empty() {
                continue;
            }
            let weight = if look.bold { " font-weight=\"bold\"" } else { "" };
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{y}\" fill=\"{letters}\"{weight} textLength=\"{length:.1}\" \
                 xml:space=\"preserve\">{text}</text>",
                x(column)
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_for_each_look_at_its_column() {
        let mut look = Look::default();
        let found = pieces("ab\x1b[1;31mcd\x1b[39mé\x1b[48;5;4m \x1b[0;38;5;2m!\x1b[0m", &mut look);
        let texts: Vec<(usize, &str)> = found.iter().map(|(at, _, text)| (*at, text.as_str())).collect();
        assert_eq!(texts, [(0, "ab"), (2, "cd"), (4, "é "), (6, "!")]);
        assert!(found[1].1.bold && found[1].1.colour == Some(COLOURS[1]) && found[2].1.colour.is_none());
        assert_eq!((found[3].1.colour, look), (Some(COLOURS[2]), Look::default()));
    }

    #[test]
    fn what_means_something_in_svg_is_written_out() {
        let picture = svg("a<b & c\n\x1b[7mrow\x1b[0m", 10);
        assert!(picture.contains(">a&lt;b &amp; c</text>"), "{picture}");
        assert!(picture.contains(&format!("fill=\"{LETTERS}\"/>")), "{picture}");
        assert!(picture.ends_with("</svg>\n"));
    }
}
