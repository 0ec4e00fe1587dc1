//! `polypath events`.

use serde_json::{Value, json};

use super::{Failure, Target, format};

pub(super) fn run(target: &Target, follow: bool, last: usize) -> Result<(), Failure> {
    let mut connection = target.connect()?;
    let answer = connection.ask(json!({ "command": "events", "last": last, "follow": follow }))?;
    for event in answer["events"].as_array().into_iter().flatten() {
        print(event, target.json)?;
    }
    if follow {
        connection.wait_for_ever()?;
        loop {
            print(&connection.next()?, target.json)?;
        }
    }
    Ok(())
}

fn print(event: &Value, json: bool) -> Result<(), Failure> {
    if json {
        return format::print(&format!("{event}\n"));
    }
    let word = |name: &str| event[name].as_str().unwrap_or_default();
    format::print(&format!("{}  {}\n", word("time"), word("text")))
}
