//! A checked load that is run over and over until it is told to end, and belongs to no script that is waited for: it goes on
//! while the guest moves to another machine, whose agent knows nothing of it.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Fio, FioResult, Guest};

/// What all passes of a load did together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Passes {
    /// How many there were.
    pub nr: u64,
    /// What they did.
    pub result: FioResult,
}

impl Passes {
    fn parse(said: &str) -> Result<Self> {
        let mut reports = said.split("END OF PASS\n");
        let summary = reports.next().unwrap_or_default();
        let Some(nr) = summary.strip_prefix("passes ").and_then(|nr| nr.trim().parse::<u64>().ok()) else {
            bail!("the load failed: {}", said.chars().take(4000).collect::<String>());
        };
        let mut passes = Self::default();
        for report in reports {
            passes.nr += 1;
            passes.result.add(FioResult::parse(report).with_context(|| format!("fio printed: {report}"))?);
        }
        ensure!(passes.nr == nr, "{} reports of {nr} passes", passes.nr);
        ensure!(passes.result.errors == 0, "the load had errors: {passes:?}");
        Ok(passes)
    }
}

impl Guest {
    /// Starts a load that begins anew whenever it has ended. Each pass goes by a seed of its own, the first one by `seed`: what a
    /// pass before has written is then no longer right.
    pub fn start_passes(&self, fio: &Fio, seed: u32) -> Result<()> {
        let command = fio.command();
        self.sh(&format!(
            "rm -f /tmp/passes.*
cat >/tmp/passes.sh <<'END OF SCRIPT'
n=0
cd /tmp
while :; do
  if ! {command} --randseed=$(({seed} + n)) --eta=never --output-format=json --output=passes.report >passes.log 2>&1; then
    {{ echo failed in pass $n; cat passes.log; dmesg | tail -n 5; cat passes.report; }} >passes.new
    break
  fi
  n=$((n + 1))
  {{ echo END OF PASS; cat passes.report; }} >>passes.all
  [ ! -e passes.stop ] || {{ {{ echo passes $n; cat passes.all; }} >passes.new; break; }}
done
mv passes.new passes.result
END OF SCRIPT
sh /tmp/passes.sh </dev/null >/dev/null 2>&1 &"
        ))
        .map(drop)
    }

    /// What the load says that has failed.
    pub fn failed_passes(&self) -> Result<Option<String>> {
        let said = self.sh("cat /tmp/passes.result 2>/dev/null; true")?;
        Ok(said.starts_with("failed").then(|| said.chars().take(4000).collect()))
    }

    /// Ends the load after the pass that is under way, which must be within `timeout`. Failed requests and wrong data are errors.
    pub fn end_passes(&self, timeout: Duration) -> Result<Passes> {
        let script = "touch /tmp/passes.stop; while [ ! -e /tmp/passes.result ]; do sleep 0.05; done; cat /tmp/passes.result";
        let said = self.sh_within(script, timeout)?;
        Passes::parse(&said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_added_up_and_what_failed_is_an_error() {
        let report = r#"note: something {"jobs": [{"read": {"total_ios": 7}, "write": {"total_ios": 5}, "total_err": 0}]}"#;
        let said = format!("passes 2\nEND OF PASS\n{report}\nEND OF PASS\n{report}\n");
        let passes = Passes::parse(&said).unwrap();
        assert_eq!((passes.nr, passes.result.reads, passes.result.writes), (2, 14, 10));
        for wrong in [
            "failed in pass 3\nfio: bad header".to_owned(),
            said.replace("passes 2", "passes 3"),
            said.replacen(r#""total_err": 0"#, r#""total_err": 1"#, 1),
            said.replacen("jobs", "none", 1),
            String::new(),
        ] {
            assert!(Passes::parse(&wrong).is_err(), "{wrong}");
        }
    }
}
