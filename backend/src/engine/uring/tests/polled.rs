//! Rings for which a thread of the kernel's sends.

use super::*;

impl Case {
    fn polled(idle_ms: u32) -> Self {
        let case = Self::on(4, Links::new(2, DISK_BYTES), idle_ms);
        assert!(case.engine.is_polled);
        case
    }

    fn wait_asleep(&mut self) {
        let start = Instant::now();
        while !self.engine.ring.submission().need_wakeup() {
            assert!(start.elapsed() < SOON, "the thread does not fall asleep");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn nothing_is_called_for_while_the_thread_looks() {
    // It may begin with a sleep, and then will not sleep before the test is over.
    let mut case = Case::polled(10_000);
    let first = case.transfer(Operation::Read { offset: 0 }, &[(0, 512)], &[]);
    assert_eq!(case.run(first), 512);
    for i in 0..100 {
        case.start(Operation::Read { offset: i * 512 }, &[(i * 512, 512)]);
        let start = Instant::now();
        while !case.engine.has_event() {
            assert!(!case.engine.must_send());
            assert!(start.elapsed() < SOON, "nothing happens");
            std::thread::yield_now();
        }
        let (transfer, result) = case.next_done();
        assert_eq!(result, 512);
        end(transfer);
    }
}

#[test]
fn a_thread_that_has_fallen_asleep_is_woken_by_whatever_sends() {
    let sends: [fn(&mut UringEngine) -> io::Result<()>; 3] = [
        |engine| engine.submit(),
        |engine| engine.wait(Some(Duration::ZERO), Wanted::ONE),
        |engine| engine.wait(None, Wanted::ONE),
    ];
    let mut case = Case::polled(1);
    for send in sends.into_iter().cycle().take(9) {
        case.wait_asleep();
        case.start(Operation::Read { offset: 0 }, &[(0, 512)]);
        assert!(case.engine.must_send());
        send(&mut case.engine).unwrap();
        let start = Instant::now();
        while !case.engine.has_event() {
            assert!(start.elapsed() < SOON, "the thread sleeps on");
            std::thread::yield_now();
        }
        let (transfer, result) = case.next_done();
        assert_eq!(result, 512);
        end(transfer);
    }
}

#[test]
fn waiting_for_nothing_that_is_queued_leaves_the_thread_asleep() {
    let mut case = Case::polled(1);
    // The watches go out first.
    case.assert_quiet();
    case.wait_asleep();
    for _ in 0..20 {
        case.engine.wait(Some(Duration::from_millis(1)), Wanted::ONE).unwrap();
        case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap();
        case.engine.submit().unwrap();
        assert!(case.engine.ring.submission().need_wakeup());
    }
}

#[test]
fn a_thread_that_sleeps_hears_of_kicks_and_of_the_end() {
    for _ in 0..5 {
        let mut case = Case::polled(1);
        let kick = event();
        case.engine.watch_kick(Some(kick.try_clone().unwrap()));
        case.assert_quiet();
        case.wait_asleep();
        signal(&kick);
        assert!(matches!(case.next(), Event::Kick));
        // What is queued goes out before the ring ends.
        case.wait_asleep();
        case.put(0, &letters(4096));
        case.start(Operation::Write { offset: 0 }, &[(0, 4096)]);
        let Case { engine, links, .. } = case;
        drop(engine);
        let mut bytes = vec![0; 4096];
        File::open(links.name(0)).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == letters(4096));
    }
}
