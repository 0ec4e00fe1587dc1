//! Prints a table as TOML.

use polypath_selector::{GroupArgs, Kind, PathArgs};

use super::super::spec::{GroupSpec, NoPathRetry, PathSpec, QueueMode, TableSpec, path_words};
use super::quoted;

impl TableSpec {
    /// The table as a TOML file, with the keys of [`TableSection`](super::TableSection). What it leaves out is what
    /// the reader takes by default.
    ///
    /// ```
    /// use polypath_paths::text::TableSpec;
    ///
    /// let spec = TableSpec::parse_dm("0 1563037696 multipath 0 0 1 1 service-time 0 1 2 /dev/skd0 1 4")?;
    /// let toml = "\
    /// [table]
    /// length_sectors = 1563037696
    /// initial_group = 1
    ///
    /// [[table.group]]
    /// selector = \"service-time\"
    ///
    /// [[table.group.path]]
    /// device = \"/dev/skd0\"
    /// weight = 4
    /// ";
    /// assert_eq!(spec.to_toml(), toml);
    /// assert_eq!(TableSpec::parse_toml(toml)?, spec);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut lines = vec!["[table]".into()];
        let mut key = |name, value: String| lines.push(format!("{name} = {value}"));
        if let Some(length_sectors) = self.length_sectors {
            key("length_sectors", length_sectors.to_string());
        }
        match self.no_path_retry {
            Some(NoPathRetry::Seconds(seconds)) => key("no_path_retry", seconds.to_string()),
            Some(word) => key("no_path_retry", quoted(&word.to_string())),
            None => {}
        }
        if self.initial_group > 0 {
            key("initial_group", self.initial_group.to_string());
        }
        if self.features.retain_attached_hw_handler {
            key("retain_attached_hw_handler", "true".into());
        }
        if let Some(retries) = self.features.pg_init_retries {
            key("pg_init_retries", retries.to_string());
        }
        if let Some(delay_msecs) = self.features.pg_init_delay_msecs {
            key("pg_init_delay_msecs", delay_msecs.to_string());
        }
        if self.features.queue_mode != QueueMode::default() {
            key("queue_mode", quoted(self.features.queue_mode.name()));
        }
        if !self.hw_handler.is_empty() {
            key("hw_handler", array(&self.hw_handler));
        }
        self.groups.iter().for_each(|spec| group(spec, &mut lines));
        lines.join("\n") + "\n"
    }
}

fn group(spec: &GroupSpec, lines: &mut Vec<String>) {
    lines.extend([String::new(), "[[table.group]]".into()]);
    lines.push(format!("selector = {}", quoted(spec.selector.name())));
    let words = spec.arg_words();
    let own = GroupSpec { args: GroupArgs::default(), ..spec.clone() }.arg_words();
    if words != own {
        lines.push(format!("selector_args = {}", array(&words)));
    }
    spec.paths.iter().for_each(|path| self::path(spec.selector, path, lines));
}

fn path(selector: Kind, spec: &PathSpec, lines: &mut Vec<String>) {
    lines.extend([String::new(), "[[table.group.path]]".into()]);
    lines.push(format!("device = {}", quoted(&spec.device)));
    let own_repeat_count = spec.args.repeat_count == PathArgs::default().repeat_count;
    match selector {
        Kind::ServiceTime if own_repeat_count => {
            lines.push(format!("weight = {}", spec.args.relative_throughput));
        }
        // The reader's own mask depends on all paths of the group; a mask that is written down does not.
        _ if !own_repeat_count || selector == Kind::IoAffinity => {
            lines.push(format!("args = {}", array(&path_words(selector, &spec.args))));
        }
        _ => {}
    }
}

fn array(words: &[String]) -> String {
    let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
    format!("[{}]", words.join(", "))
}
