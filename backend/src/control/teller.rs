//! Has the event command run: by a thread of this process, or by the helper, if this one may start no programs.

use std::path::PathBuf;
use std::sync::Arc;

use crate::event_command::EventCommand;
use crate::events::Event;
use crate::helper::{self, Client};

/// Who runs it.
#[derive(Debug)]
pub(super) enum Teller {
    Here(EventCommand),
    Helper { client: &'static Client, is_behind: bool },
}

impl Teller {
    /// `program` is run for every event that is told from now on. The helper knows by itself which it is.
    pub(super) fn start(program: PathBuf) -> std::io::Result<Self> {
        match helper::client() {
            Some(client) => Ok(Self::Helper { client, is_behind: false }),
            None => EventCommand::start(program).map(Self::Here),
        }
    }

    /// These have happened.
    pub(super) fn tell(&mut self, events: &[Arc<Event>]) {
        for event in events {
            let json = event.json();
            let (name, line) = (json["event"].as_str().unwrap_or_default().to_owned(), json.to_string());
            match self {
                Self::Here(command) => command.run(name, line),
                Self::Helper { client, is_behind } => {
                    let is_lost = !client.tell(name, line);
                    if is_lost && !*is_behind {
                        log::warn!("event command: the helper process takes no events, they are left out");
                    }
                    *is_behind = is_lost;
                }
            }
        }
    }
}
