//! Paths without a device: I/O ends at once and moves nothing, like Linux' null_blk. For measuring everything else.

use std::path::Path as StdPath;

/// What a name like `null:SIZE[,inline][,NUMBER]` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Null {
    pub(crate) size_bytes: u64,
    /// Answered by the worker itself, without io_uring.
    pub(crate) is_inline: bool,
}

impl Null {
    /// None if the name is that of a file. The size is in bytes, or with K, M, G, T behind it; a number at the end only
    /// tells several such paths apart.
    pub(crate) fn parse(name: &StdPath) -> Option<Result<Self, String>> {
        let words = name.to_str()?.strip_prefix("null:")?;
        let mut words = words.split(',');
        let size = words.next().unwrap_or_default();
        let Some(size_bytes) = parse_size(size) else {
            return Some(Err(format!("null: `{size}` is no size in bytes (such as 1G)")));
        };
        let mut is_inline = false;
        for word in words {
            match word {
                "inline" => is_inline = true,
                _ if word.parse::<u32>().is_ok() => {}
                _ => return Some(Err(format!("null: unknown word `{word}`, known: inline, or a number"))),
            }
        }
        Some(Ok(Self { size_bytes, is_inline }))
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<Result<Null, String>> {
        Null::parse(StdPath::new(name))
    }

    #[test]
    fn names_and_mistakes() {
        let null = |size_bytes, is_inline| Some(Ok(Null { size_bytes, is_inline }));
        assert_eq!(parse("null:1G"), null(1 << 30, false));
        assert_eq!(parse("null:4096,inline"), null(4096, true));
        assert_eq!(parse("null:64M,inline,2"), null(64 << 20, true));
        assert_eq!(parse("null:64M,3"), null(64 << 20, false));
        assert_eq!(parse("/dev/null"), None);
        for name in ["null:", "null:x", "null:1GG", "null:-1", "null:1G,fast", "null:99999999999T"] {
            assert!(matches!(parse(name), Some(Err(_))), "{name}");
        }
    }
}
