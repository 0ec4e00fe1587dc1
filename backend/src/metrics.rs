//! Metrics for Prometheus, by HTTP, on threads of their own: who scrapes slowly delays nobody.
//!
//! Everything is read off counters and gauges that exist anyway, at the time of the scrape.

mod address;
mod collect;
mod http;
mod work;

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

pub use address::Address;
pub(crate) use collect::Source;

use crate::listen::{Access, Listener, SocketFile};
use http::{Answer, Stream};

/// The format, with the version of it that is written (Prometheus asks for it first).
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The HTTP server.
#[derive(Debug)]
pub(crate) struct Metrics {
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// Removes its file at the end.
    Unix(Listener),
}

impl Metrics {
    /// Listens on `address`; nobody is answered yet.
    pub(crate) fn bind(address: &Address) -> anyhow::Result<Self> {
        let socket = match address {
            Address::Tcp(at) => {
                Socket::Tcp(TcpListener::bind(at).with_context(|| format!("--metrics {address}"))?)
            }
            Address::Unix(path) => Socket::Unix(Listener::bind_for("--metrics", path, Access::default())?),
        };
        log::info!("metrics: {address}");
        Ok(Self { socket })
    }

    /// Leaves the removing of its socket's file, if it has one, to somebody else.
    pub(crate) fn take_file(&mut self) -> Option<SocketFile> {
        match &mut self.socket {
            Socket::Tcp(_) => None,
            Socket::Unix(listener) => listener.take_file(),
        }
    }

    /// Serves what `source` has.
    pub(crate) fn serve(&self, source: Source) -> std::io::Result<()> {
        let mut registry = Registry::with_prefix("polypath");
        registry.register_collector(Box::new(source));
        let answer = Arc::new(move |path: &str| answer(path, &registry));
        match &self.socket {
            Socket::Tcp(listener) => {
                let listener = listener.try_clone()?;
                http::serve(move || listener.accept().map(|(stream, _)| Stream::Tcp(stream)), answer)
            }
            Socket::Unix(listener) => {
                let socket = listener.socket().try_clone()?;
                http::serve(move || socket.accept().map(|(stream, _)| Stream::Unix(stream)), answer)
            }
        }
    }
}

fn answer(path: &str, registry: &Registry) -> Answer {
    if path != "/metrics" {
        return Answer::text(404, "metrics are at /metrics\n");
    }
    let mut body = String::new();
    match text::encode(&mut body, registry) {
        Ok(()) => Answer { status: 200, content_type: CONTENT_TYPE, body },
        Err(_) => Answer::text(500, "the metrics cannot be written\n"),
    }
}
