//! Words of a line: splitting, quoting, numbers.

use super::error::{Rule, TextError};

/// One word with its place.
#[derive(Debug)]
pub(super) struct Word {
    /// Without quoting; no control characters, never empty.
    pub text: String,
    /// From 1.
    pub number: usize,
    /// Where it starts, in characters from 1.
    pub column: usize,
}

/// A line as words.
#[derive(Debug)]
pub(super) struct Words {
    words: Vec<Word>,
    /// Just behind the last word.
    end_column: usize,
}

/// What separates words: the ASCII part of the kernel's `isspace()`.
fn is_space(c: char) -> bool {
    c.is_ascii_whitespace() || c == '\x0b'
}

impl Words {
    /// Splits as the kernel does: white space separates, a backslash takes away the meaning of the next character.
    ///
    /// Unlike the kernel, refuses words with control characters: such a name would break every line it is printed in.
    pub fn split(line: &str) -> Result<Self, TextError> {
        let mut result = Self { words: Vec::new(), end_column: 1 };
        let mut word: Option<Word> = None;
        let mut quoted = false;
        let mut chars = (1..).zip(line.chars()).peekable();
        while let Some((column, c)) = chars.next() {
            if !quoted && is_space(c) {
                result.push(word.take())?;
                continue;
            }
            let number = result.words.len() + 1;
            let word = word.get_or_insert(Word { text: String::new(), number, column });
            result.end_column = column + 1;
            quoted = !quoted && c == '\\' && chars.peek().is_some();
            if !quoted {
                word.text.push(c);
            }
        }
        result.push(word)?;
        Ok(result)
    }

    fn push(&mut self, word: Option<Word>) -> Result<(), TextError> {
        let Some(word) = word else { return Ok(()) };
        if word.text.chars().any(char::is_control) {
            return Err(TextError::new(&word, Rule::Control));
        }
        self.words.push(word);
        Ok(())
    }

    /// To read them one by one.
    pub fn cursor(&self) -> Cursor<'_> {
        let end = Word { text: String::new(), number: self.words.len() + 1, column: self.end_column };
        Cursor { left: &self.words, end }
    }
}

/// Reads words one by one.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    left: &'a [Word],
    end: Word,
}

impl<'a> Cursor<'a> {
    /// How many words are left.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// The next word, or an error that says what should have come.
    pub fn word(&mut self, expected: &'static str) -> Result<&'a Word, TextError> {
        let (word, left) = self.left.split_first().ok_or_else(|| self.ended(Rule::Missing { expected }))?;
        self.left = left;
        Ok(word)
    }

    /// So many words that were announced and counted already.
    pub fn words(&mut self, count: usize) -> &'a [Word] {
        let (words, left) = self.left.split_at(count.min(self.left.len()));
        self.left = left;
        words
    }

    /// The next word, a number.
    pub fn number<T: TryFrom<u64>>(
        &mut self,
        name: &'static str,
        least: u64,
        most: u64,
    ) -> Result<(T, &'a Word), TextError> {
        let word = self.word(name)?;
        Ok((number_in(&word.text, name, least, most).map_err(|rule| TextError::new(word, rule))?, word))
    }

    /// The next word, the number of the words that follow it.
    pub fn count(&mut self, name: &'static str, most: u64) -> Result<usize, TextError> {
        let (count, word) = self.number(name, 0, most)?;
        if count > self.left() {
            return Err(TextError::new(word, Rule::CountBeyondEnd { left: self.left() }));
        }
        Ok(count)
    }

    /// An error of the kind that something is missing.
    pub fn ended(&self, rule: Rule) -> TextError {
        TextError::new(&self.end, rule)
    }
}

/// A number in decimal digits and nothing else; the kernel would take 2^32 + 1 for 1.
pub(super) fn number_in<T: TryFrom<u64>>(
    given: &str,
    name: &'static str,
    least: u64,
    most: u64,
) -> Result<T, Rule> {
    let digits = !given.is_empty() && given.bytes().all(|byte| byte.is_ascii_digit());
    digits
        .then(|| given.parse::<u64>().ok())
        .flatten()
        .filter(|number| (least..=most).contains(number))
        .and_then(|number| T::try_from(number).ok())
        .ok_or(Rule::Number { name, least, most })
}

/// A line that is being written.
#[derive(Debug, Default)]
pub(super) struct Line(String);

impl Line {
    /// Appends words that need no quoting; nothing if there are none.
    pub fn words(&mut self, words: impl ToString) -> &mut Self {
        let words = words.to_string();
        if !self.0.is_empty() && !words.is_empty() {
            self.0.push(' ');
        }
        self.0.push_str(&words);
        self
    }

    /// Appends one word, quoted such that [`Words::split`] and the kernel read it back.
    pub fn quoted(&mut self, word: &str) -> &mut Self {
        let mut quoted = String::with_capacity(word.len());
        for c in word.chars() {
            if c == '\\' || is_space(c) {
                quoted.push('\\');
            }
            quoted.push(c);
        }
        self.words(quoted)
    }

    /// Appends a number of words and the words.
    pub fn counted<S: AsRef<str>>(&mut self, words: &[S]) -> &mut Self {
        self.words(words.len());
        words.iter().for_each(|word| _ = self.quoted(word.as_ref()));
        self
    }

    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(line: &str) -> Vec<(String, usize)> {
        Words::split(line).unwrap().words.into_iter().map(|word| (word.text, word.column)).collect()
    }

    #[test]
    fn splits_and_unquotes_as_the_kernel() {
        let table: [(&str, &[(&str, usize)]); 9] = [
            ("", &[]),
            (" \t\n\x0b\x0c\r ", &[]),
            ("a bb  ccc", &[("a", 1), ("bb", 3), ("ccc", 7)]),
            ("  a\n", &[("a", 3)]),
            (r"/dev/a\ b c", &[("/dev/a b", 1), ("c", 11)]),
            (r"a\\b \c", &[(r"a\b", 1), ("c", 6)]),
            (r"\ ", &[(" ", 1)]),
            // The last character cannot be quoted away.
            (r"a \", &[("a", 1), (r"\", 3)]),
            ("é ü\u{a0}x", &[("é", 1), ("ü\u{a0}x", 3)]),
        ];
        for (line, words) in table {
            let words: Vec<_> = words.iter().map(|&(word, column)| (word.to_owned(), column)).collect();
            assert_eq!(split(line), words, "{line:?}");
        }
    }

    #[test]
    fn control_characters_are_refused_in_one_line() {
        for line in ["a b\0c", "a b\\\nc", "a b\u{85}c", "a b\x1bc"] {
            let error = Words::split(line).unwrap_err();
            assert_eq!((error.number, error.column, &error.rule), (2, 3, &Rule::Control), "{line:?}");
            assert!(!error.to_string().contains(char::is_control), "{error}");
        }
    }

    #[test]
    fn other_characters_are_shown_as_they_are() {
        let word = Word { text: "it's \\ \"é\"\u{7f}".into(), number: 1, column: 1 };
        let error = TextError::new(&word, Rule::Feature).to_string();
        assert!(error.starts_with("word 1, column 1: `it's \\ \"é\"\\u{7f}` is not a feature"), "{error}");
    }

    #[test]
    fn numbers_are_digits_only() {
        let read = |given| number_in::<u16>(given, "a test", 1, 1024).ok();
        assert_eq!((read("1"), read("0001024")), (Some(1), Some(1024)));
        for given in
            ["", "0", "1025", "+1", "-1", "1x", "0x1", "1 ", "1.0", "4294967297", "18446744073709551617"]
        {
            assert_eq!(read(given), None, "`{given}`");
        }
        assert_eq!(
            number_in::<u8>("256", "a test", 0, 1024),
            Err(Rule::Number { name: "a test", least: 0, most: 1024 })
        );
    }

    #[test]
    fn missing_words_are_placed_behind_the_last() {
        for (line, number, column) in [("", 1, 1), ("  ", 1, 1), ("0 100", 3, 6), (" 0 100  ", 3, 7)] {
            let words = Words::split(line).unwrap();
            let mut cursor = words.cursor();
            cursor.words(2);
            let error = cursor.word("a test").unwrap_err();
            assert_eq!((error.number, error.column, error.word.as_str()), (number, column, ""), "{line:?}");
            assert!(error.to_string().ends_with("the line ends where a test is expected"));
        }
    }

    proptest! {
        #[test]
        fn any_words_survive_quoting(words in prop::collection::vec("[^\\p{Cc}]{1,9}", 0..5)) {
            let mut line = Line::default();
            line.counted(&words);
            let read: Vec<_> = split(&line.finish()).into_iter().map(|(word, _)| word).skip(1).collect();
            prop_assert_eq!(read, words);
        }

        #[test]
        fn any_line_splits_or_is_refused(line in any::<String>()) {
            if let Err(error) = Words::split(&line) {
                prop_assert!(line.chars().nth(error.column - 1).is_some());
                prop_assert!(!error.to_string().contains(char::is_control));
            }
        }
    }
}
