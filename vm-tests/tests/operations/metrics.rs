//! Metrics: what they say, and a real Prometheus that scrapes a real run, with the dashboard's queries and the alert rules.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use polypath_vm_tests::faulty::{Kind, Rule};
use polypath_vm_tests::front_end::Op;
use polypath_vm_tests::server::{Process, Server, wait_for, wait_until};
use polypath_vm_tests::skip::skip;
use serde_json::Value;

use crate::common::{Image, MIB, SOON, need};
use crate::rig::Rig;
use crate::run::{run_to_end, told};

/// A port that is free now.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The answer's head and body.
fn get(stream: &mut (impl std::io::Read + std::io::Write), path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
    (head.to_owned(), body.to_owned())
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

fn scrape(address: SocketAddr) -> String {
    let (head, body) = get(&mut connect(address), "/metrics");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body
}

/// The value of the first line that begins so and has these labels.
#[track_caller]
fn value(metrics: &str, name: &str, labels: &[&str]) -> f64 {
    let line = metrics.lines().find(|line| {
        let rest = line.strip_prefix(name).unwrap_or_default();
        rest.starts_with([' ', '{']) && labels.iter().all(|label| line.contains(label))
    });
    let line = line.unwrap_or_else(|| panic!("no {name} {labels:?} in\n{metrics}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn programs() -> Result<PathBuf, String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/out/monitoring/usr/bin");
    if dir.join("prometheus").exists() { Ok(dir) } else { Err("no Prometheus: run images/build".to_owned()) }
}

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(name)
}

#[test]
fn metrics_say_what_happens() {
    need!(faulty);
    let address = free_address();
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--metrics", &address.to_string()]);
    let (a, b) = (format!("path=\"{}\"", rig.dev("a")), format!("path=\"{}\"", rig.dev("b")));
    let before = scrape(address);
    assert_eq!(value(&before, "polypath_paths", &[]), 2.0);
    assert_eq!(value(&before, "polypath_path_up", &[&a, "group=\"1\""]), 1.0);
    assert_eq!(value(&before, "polypath_disk_size_bytes", &[]), MIB as f64);
    assert_eq!(value(&before, "polypath_front_end_connected", &[]), 0.0);
    assert!(before.ends_with("# EOF\n"), "{before}");
    let mut disk = rig.disk(1);
    wait_until("the front-end", SOON, || value(&scrape(address), "polypath_front_end_connected", &[]) == 1.0)
        .unwrap();
    for name in ["a", "b"] {
        rig.fs.rule(name, Rule::errno(libc::EIO).on(&[Kind::Read, Kind::Write]));
    }
    disk.q().submit(&Op::read(0, 8)).unwrap();
    wait_until("the request to wait", SOON, || value(&scrape(address), "polypath_held_requests", &[]) == 1.0)
        .unwrap();
    let now = scrape(address);
    assert_eq!(value(&now, "polypath_held_bytes", &[]), 4096.0);
    assert_eq!(value(&now, "polypath_paths_active", &[]), 0.0);
    for label in [&a, &b] {
        assert_eq!(value(&now, "polypath_path_up", &[label]), 0.0);
        assert_eq!(value(&now, "polypath_path_failures_total", &[label]), 1.0);
    }
    wait_until("time to pass", SOON, || value(&scrape(address), "polypath_no_path_seconds", &[]) > 0.0)
        .unwrap();
    wait_until("events", SOON, || {
        value(&scrape(address), "polypath_events_total", &["event=\"path_failed\""]) == 2.0
    })
    .unwrap();
    ["a", "b"].iter().for_each(|name| rig.fs.clear(name));
    assert_eq!(disk.q().done().unwrap().status, 0);
    let now = scrape(address);
    let reads = |name: &str, label: &str| value(&now, name, &[label, "kind=\"read\""]);
    assert_eq!(reads("polypath_path_bytes_total", &a) + reads("polypath_path_bytes_total", &b), 4096.0);
    assert_eq!(reads("polypath_path_errors_total", &a) + reads("polypath_path_errors_total", &b), 2.0);
    assert_eq!(reads("polypath_queue_ios_total", "queue=\"0\""), 1.0);
    assert_eq!(reads("polypath_queue_latency_seconds_count", "queue=\"0\""), 1.0);
    // What Prometheus' own tool has to say about names and forms.
    if let Ok(dir) = programs() {
        let mut command = Command::new(dir.join("promtool"));
        command.args(["check", "metrics"]);
        let ran = run_to_end(command, &scrape(address));
        let said: Vec<&str> = ran.err.lines().filter(|line| !line.contains("no help text")).collect();
        assert!(ran.code == 0 || said.is_empty(), "{ran:?}");
    }
}

#[test]
fn f57_metrics_are_off_unless_asked_for_and_private_on_a_unix_socket() {
    use std::os::unix::fs::PermissionsExt as _;
    let image = Image::empty(MIB);
    let socket = image.dir().join("metrics");
    let mut server =
        Server::polypath().path(&image.path).arg("--metrics").arg(&socket).umask(0).start().unwrap();
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let sockets =
        |server: &Server| server.open_files().iter().filter(|file| file.starts_with("socket:")).count();
    let with = sockets(&server);
    let get = |path| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        get(&mut stream, path)
    };
    assert!(get("/metrics").1.contains("polypath_build_info"));
    assert!(get("/").0.starts_with("HTTP/1.1 404"));
    // Clients that say nothing, and that are gone, delay nobody.
    let silent: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    drop(UnixStream::connect(&socket).unwrap().write_all(b"GET /metr"));
    assert!(get("/metrics").1.contains("polypath_paths 1\n"));
    drop(silent);
    assert_eq!(server.terminate(SOON).unwrap(), 0);
    assert!(!socket.exists());
    // Nobody listens if nobody asked.
    let server = Server::polypath().path(&image.path).start().unwrap();
    assert!(sockets(&server) < with, "{:?}", server.open_files());
    for address in ["nowhere", "127.0.0.1", "127.0.0.1:99999"] {
        let exited =
            Server::polypath().path(&image.path).arg("--metrics").arg(address).run_to_exit(SOON).unwrap();
        assert!(exited.code > 0 && exited.stderr.contains("--metrics"), "{exited:?}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let exited =
        Server::polypath().path(&image.path).arg("--metrics").arg(&address).run_to_exit(SOON).unwrap();
    assert!(exited.code > 0 && exited.stderr.contains(&address) && !exited.socket_left, "{exited:?}");
}

/// A Prometheus that scrapes `target` every second.
struct Prometheus {
    process: Process,
    address: SocketAddr,
}

impl Prometheus {
    fn start(dir: &Path, target: SocketAddr) -> Self {
        // As shipped, but without waiting for the alerts.
        let rules = std::fs::read_to_string(packaging("prometheus/alerts.yml")).unwrap();
        let rules: Vec<&str> = rules.lines().filter(|line| !line.trim_start().starts_with("for:")).collect();
        std::fs::write(dir.join("alerts.yml"), rules.join("\n")).unwrap();
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [alerts.yml]\n\
             scrape_configs: [{{ job_name: polypath, static_configs: [{{ targets: ['{target}'] }}] }}]\n"
        );
        std::fs::write(dir.join("prometheus.yml"), config).unwrap();
        let address = free_address();
        let mut command = Command::new(programs().unwrap().join("prometheus"));
        command
            .arg(format!("--config.file={}", dir.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("data").display()))
            .arg(format!("--web.listen-address={address}"));
        let process = Process::spawn(command, dir, "prometheus").unwrap();
        Self { process, address }
    }

    fn ask(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(SOON)).unwrap();
        let (head, body) = get(&mut stream, path);
        // Bodies may come in chunks; a size line is no JSON.
        let body: String =
            if head.contains("chunked") { body.split("\r\n").skip(1).step_by(2).collect() } else { body };
        serde_json::from_str(&body).ok()
    }

    /// What a query gives.
    fn query(&self, query: &str) -> Value {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let mut answer = self.ask(&format!("/api/v1/query?query={encoded}")).unwrap_or_default();
        assert_ne!(answer["status"], "error", "{query}: {answer}");
        answer["data"]["result"].take()
    }

    fn firing(&self) -> Vec<String> {
        let answer = self.ask("/api/v1/alerts").unwrap_or_default();
        let alerts = answer["data"]["alerts"].as_array().cloned().unwrap_or_default();
        alerts.iter().filter_map(|alert| Some(alert["labels"]["alertname"].as_str()?.to_owned())).collect()
    }
}

/// Every query of the dashboard.
fn dashboard_queries() -> Vec<String> {
    let text = std::fs::read_to_string(packaging("grafana/polypath.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_real_prometheus_scrapes_evaluates_the_rules_and_answers_the_dashboard() {
    need!(faulty);
    let dir = match programs() {
        Ok(dir) => dir,
        Err(why) => return skip("metrics::a_real_prometheus", why),
    };
    let mut command = Command::new(dir.join("promtool"));
    command.args(["check", "rules"]).arg(packaging("prometheus/alerts.yml"));
    let ran = run_to_end(command, "");
    assert_eq!(ran.code, 0, "{ran:?}");

    let target = free_address();
    let rig = Rig::start(Image::filled(MIB), &["a", "b"], &["--metrics", &target.to_string()]);
    rig.fs.logging(false);
    let home = tempfile::tempdir().unwrap();
    let mut prometheus = Prometheus::start(home.path(), target);
    let mut disk = rig.disk(1);
    let data = disk.q().read(0, 8).unwrap();
    let load = |q: &mut polypath_vm_tests::front_end::BlkQueue| {
        for sector in 0..16 {
            q.write(sector * 8, &data).unwrap();
            q.read(sector * 8, 8).unwrap();
        }
        q.flush().unwrap();
    };
    let up = wait_for("the first scrape", Duration::from_secs(30), || {
        assert!(prometheus.process.is_alive(), "{}", prometheus.process.stderr());
        load(disk.q());
        Some(prometheus.query("up")).filter(|up| up[0]["value"][1] == "1")
    });
    up.unwrap_or_else(|e| panic!("{e:#}\n{}", prometheus.process.stderr()));
    // Every query of the dashboard has an answer, while there is something to see.
    let queries = dashboard_queries();
    assert!(queries.len() >= 10, "{queries:?}");
    let start = Instant::now();
    let mut left: Vec<String> = queries;
    while !left.is_empty() {
        load(disk.q());
        left.retain(|query| {
            let query = query
                .replace("$__rate_interval", "10s")
                .replace("$instance", ".*")
                .replace("$__range", "10s");
            prometheus.query(&query).as_array().is_none_or(Vec::is_empty)
        });
        assert!(start.elapsed() < Duration::from_secs(30), "no answer to {left:#?}\n{}", scrape(target));
    }
    assert_eq!(prometheus.firing(), Vec::<String>::new());
    // One path down, then both with a request that waits, then a path to another disk, then one that comes and goes.
    let fires = |name: &str| {
        wait_until(&format!("the alert {name}"), Duration::from_secs(20), || {
            prometheus.firing().iter().any(|a| a == name)
        })
        .unwrap_or_else(|e| panic!("{e:#}: {:?}", prometheus.firing()));
    };
    told(&rig.socket.path(), &["fail-path", &rig.dev("a")]).ok();
    fires("PolypathPathDown");
    fires("PolypathNoRedundancy");
    let other = Image::filled(MIB);
    assert_eq!(told(&rig.socket.path(), &["path", "add", other.path.to_str().unwrap()]).code, 1);
    told(&rig.socket.path(), &["fail-path", &rig.dev("b")]).ok();
    disk.q().submit(&Op::read(0, 8)).unwrap();
    fires("PolypathNoPath");
    fires("PolypathRequestsHeld");
    fires("PolypathWrongDisk");
    for _ in 0..5 {
        for name in ["a", "b"] {
            rig.forgive(name);
        }
        std::thread::sleep(Duration::from_millis(1100));
    }
    assert_eq!(disk.q().done().unwrap().status, 0);
    fires("PolypathPathFlapping");
    wait_until("the others to end", Duration::from_secs(20), || {
        let firing = prometheus.firing();
        ["PolypathPathDown", "PolypathNoPath", "PolypathRequestsHeld"]
            .iter()
            .all(|name| !firing.iter().any(|f| f == name))
    })
    .unwrap();
}
