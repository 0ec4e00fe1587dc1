//! Where metrics are served.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `IP:PORT`.
    Tcp(SocketAddr),
    /// A path, which has a `/` in it.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            return Ok(Self::Unix(PathBuf::from(text)));
        }
        let wrong = |_| "must be IP:PORT (such as 127.0.0.1:9470) or the path of a Unix socket".to_owned();
        text.parse().map(Self::Tcp).map_err(wrong)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_of_two_kinds() {
        for text in ["127.0.0.1:9470", "[::1]:0", "/run/polypath/disk0.metrics", "./s"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "9470", ":9470", "localhost:9470", "127.0.0.1", "127.0.0.1:99999", "s"] {
            assert!(text.parse::<Address>().unwrap_err().contains("IP:PORT"), "{text}");
        }
    }
}
