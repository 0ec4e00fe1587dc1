//! The channel back to the front-end (`VHOST_USER_SET_BACKEND_REQ_FD`), for the one message that we have for it: the
//! config space has changed.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use rustix::net::{SendFlags, send};

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// Version 1 in the flags of a message. No answer is asked for: nobody here would wait for it.
const VERSION: u32 = 1;

/// The channel of the front-end that is connected, if it gave one.
#[derive(Debug, Default)]
pub struct BackChannel(Mutex<Option<UnixStream>>);

impl BackChannel {
    /// Another channel, or none, takes the place of the one before.
    pub fn set(&self, stream: Option<UnixStream>) {
        if let Ok(mut channel) = self.0.lock() {
            *channel = stream;
        }
    }

    /// Tells the front-end to read the config space anew. Never blocks; a front-end that does not listen is not told.
    pub fn config_changed(&self) {
        let message: Vec<u8> =
            [CONFIG_CHANGE, VERSION, 0].iter().flat_map(|word: &u32| word.to_ne_bytes()).collect();
        if let Ok(channel) = self.0.lock()
            && let Some(stream) = &*channel
            && let Err(error) = send(stream, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        {
            log::warn!("the front-end cannot be told of a changed size: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_message_is_the_protocols() {
        let channel = BackChannel::default();
        channel.config_changed();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        channel.set(Some(ours));
        channel.config_changed();
        channel.set(None);
        channel.config_changed();
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
}
