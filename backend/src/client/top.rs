//! `polypath top`: a disk at work, live, with keys to take paths out and put them back.

mod screen;
mod state;

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::json;

use super::connection::Connection;
use super::{Failure, Target, find};
use state::{Act, State};

/// Watches the disk that is meant, until a key ends it.
pub(super) fn run(target: &Target, interval: Duration) -> Result<(), Failure> {
    if target.json || !std::io::stdout().is_terminal() {
        return Err(Failure::Refused(
            "top needs a terminal; for programs there is `polypath show --json`".to_owned(),
        ));
    }
    let socket = find::one(target)?;
    let mut connection = Connection::open(&socket, target.timeout())?;
    let mut state = State::new(find::name(&socket));
    look(&mut connection, &mut state)?;
    let mut terminal = ratatui::try_init()?;
    let result = watch(&mut terminal, &mut connection, &mut state, interval);
    // Whatever has happened, the terminal is as it was.
    ratatui::restore();
    result
}

fn look(connection: &mut Connection, state: &mut State) -> Result<(), Failure> {
    let show = connection.ask(json!({ "command": "show" }))?;
    let counters = connection.ask(json!({ "command": "counters" }))?;
    state.take(show, &counters, Instant::now());
    Ok(())
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    connection: &mut Connection,
    state: &mut State,
    interval: Duration,
) -> Result<(), Failure> {
    let mut next = Instant::now() + interval;
    loop {
        terminal
            .draw(|frame| screen::draw(frame, state))
            .map_err(|error| Failure::Refused(error.to_string()))?;
        let act =
            if event::poll(next.saturating_duration_since(Instant::now()))? { key(state)? } else { None };
        match act {
            Some(Act::Quit) => return Ok(()),
            Some(Act::Tell { command, path }) => {
                let told = connection.ask(json!({ "command": command, "path": path }));
                state.said(match told {
                    Ok(_) => format!("{command} {path}: done"),
                    Err(Failure::Refused(why)) => why,
                    Err(failure) => return Err(failure),
                });
            }
            None => {}
        }
        if Instant::now() >= next {
            look(connection, state)?;
            next = Instant::now() + interval;
        }
    }
}

fn key(state: &mut State) -> Result<Option<Act>, Failure> {
    let Event::Key(key) = event::read()? else { return Ok(None) };
    if key.kind != KeyEventKind::Press {
        return Ok(None);
    }
    // In raw mode the terminal makes no signal of it.
    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
        return Ok(Some(Act::Quit));
    }
    Ok(state.key(key.code))
}
