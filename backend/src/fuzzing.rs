//! What the fuzz targets (`fuzz/`) need beside the public interface. Built with `--cfg fuzzing` alone, which only they are:
//! no promise is made here, and nothing of the product's behaviour changes.

use std::cell::RefCell;

pub use crate::control::fuzzing::ControlLoop;
pub use crate::crash::at_step;

use crate::cli::Options;
use crate::config::Launch;

type Hook = Box<dyn FnMut()>;

thread_local! {
    static LOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Calls `hook` before each look at guest memory on this thread: a guest changes what lies there between two of them.
pub fn on_look(hook: Option<Hook>) {
    LOOK.set(hook);
}

/// Guest memory is about to be looked at.
pub(crate) fn looked() {
    // Not held while it is called: it may look at guest memory itself.
    if let Some(mut hook) = LOOK.take() {
        hook();
        LOOK.set(Some(hook));
    }
}

/// The options that a configuration file with this text makes.
///
/// # Errors
/// What is wrong with it.
pub fn read_config(text: &str) -> anyhow::Result<Options> {
    let options = <Options as clap::Parser>::try_parse_from(["polypath"])?;
    Launch { options, given: Default::default() }.read(text)
}
