//! The command line of the soak.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};

/// Text of `--help`.
pub const HELP: &str = "\
Load on four queues that checks every answer, with faults from a seed, for as long as wanted; what polypath uses is watched
for drift. Ends with 0 if nothing was found. Results: Markdown and JSON; after a finding the seed and the log as well.

  --guest                   with a real guest under QEMU, in which fio loads the queues and checks every block
  --seconds N, --hours H    how long              [default: 120 seconds]
  --seed S                  what happens          [default: by the clock]
  --out DIR                 where the results go  [default: vm-tests/results]
  -h, --help
";

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether a real guest makes the load.
    pub guest: bool,
    /// How long.
    pub time: Duration,
    /// What happens.
    pub seed: u64,
    /// Where the results go.
    pub out: PathBuf,
}

impl Options {
    /// Reads the arguments; `None` if help is asked for.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Option<Self>> {
        let clock =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
        let mut options = Self {
            guest: false,
            time: Duration::from_secs(120),
            seed: clock.into(),
            out: concat!(env!("CARGO_MANIFEST_DIR"), "/results").into(),
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            let number = |word: String| -> Result<f64> {
                word.parse().ok().with_context(|| format!("{arg}: `{word}` is not a number"))
            };
            match arg.as_str() {
                "-h" | "--help" => return Ok(None),
                "--guest" => options.guest = true,
                "--seconds" => options.time = Duration::try_from_secs_f64(number(value()?)?)?,
                "--hours" => options.time = Duration::try_from_secs_f64(number(value()?)? * 3600.0)?,
                "--seed" => {
                    let word = value()?;
                    options.seed =
                        word.parse().ok().with_context(|| format!("--seed: `{word}` is no number"))?;
                }
                "--out" => options.out = value()?.into(),
                _ => bail!("unknown option {arg}\n\n{HELP}"),
            }
        }
        ensure!(options.time >= Duration::from_secs(1), "at least a second");
        Ok(Some(options))
    }

    /// The command that does the same again.
    pub fn command(&self) -> String {
        let form = if self.guest { " --guest" } else { "" };
        format!("vm-tests/soak{form} --seconds {} --seed {}", self.time.as_secs(), self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_wrong_ones_refused() {
        let parse = |words: &[&str]| Options::parse(words.iter().map(|word| (*word).to_owned()));
        let options = parse(&["--hours", "1.5", "--seed", "7"]).unwrap().unwrap();
        assert_eq!((options.time.as_secs(), options.seed), (5400, 7));
        assert_eq!(options.command(), "vm-tests/soak --seconds 5400 --seed 7");
        let options = parse(&["--seed", "7", "--guest"]).unwrap().unwrap();
        assert_eq!(options.command(), "vm-tests/soak --guest --seconds 120 --seed 7");
        assert!(parse(&["--help"]).unwrap().is_none());
        for words in [&["--seconds", "0"][..], &["--seconds", "-3"], &["--seed", "x"], &["--forever"]] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
