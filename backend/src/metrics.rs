//! Metrics for Prometheus, by HTTP, on threads of their own: who scrapes slowly delays nobody.
//!
//! Everything is read off counters and gauges that exist anyway, at the time of the scrape.

mod address;
mod collect;
mod http;
mod work;

use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

pub use address::Address;
pub(crate) use collect::Source;

use crate::listen::{Access, Listener};
use http::{Answer, Stream};

/// The format, with the version of it that is written (Prometheus asks for it first).
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The HTTP server.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Removes the socket's file at the end, if there is one.
    _listener: Option<Listener>,
}

impl Metrics {
    /// Serves what `source` has, on `address`.
    pub(crate) fn serve(address: &Address, source: Source) -> anyhow::Result<Self> {
        let option = || format!("--metrics {address}");
        let mut registry = Registry::with_prefix("polypath");
        registry.register_collector(Box::new(source));
        let answer = Arc::new(move |path: &str| answer(path, &registry));
        let mut kept = None;
        match address {
            Address::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address).with_context(option)?;
                let accept = move || listener.accept().map(|(stream, _)| Stream::Tcp(stream));
                http::serve(accept, answer)?;
            }
            Address::Unix(path) => {
                let listener = Listener::bind_for("--metrics", path, Access::default())?;
                let socket = listener.socket().try_clone().with_context(option)?;
                kept = Some(listener);
                http::serve(move || socket.accept().map(|(stream, _)| Stream::Unix(stream)), answer)?;
            }
        }
        log::info!("metrics: {address}");
        Ok(Self { _listener: kept })
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
