//! Kicks, wakes, timeouts, signals.

use super::*;

impl Case {
    fn assert_kick(&mut self) {
        match self.next() {
            Event::Kick => {}
            event => panic!("{event:?}"),
        }
    }

    fn assert_wake(&mut self) {
        match self.next() {
            Event::Wake => {}
            event => panic!("{event:?}"),
        }
    }

    /// Watches a new eventfd; gives the guest's end.
    fn watch(&mut self) -> OwnedFd {
        let kick = event();
        self.engine.watch_kick(Some(kick.try_clone().unwrap()));
        kick
    }
}

#[test]
fn each_kick_is_heard() {
    for mut case in Case::new(1) {
        let kick = case.watch();
        case.assert_quiet();
        for _ in 0..5 {
            signal(&kick);
            case.assert_kick();
            case.assert_quiet();
        }
        // Several at once are heard at least once.
        (0..3).for_each(|_| signal(&kick));
        case.assert_kick();
    }
}

#[test]
fn f08_a_kick_from_before_the_watch_is_heard() {
    for mut case in Case::new(1) {
        let kick = event();
        signal(&kick);
        case.engine.watch_kick(Some(kick.try_clone().unwrap()));
        case.assert_kick();
        signal(&kick);
        case.assert_kick();
    }
}

#[test]
fn a_kick_descriptor_that_was_replaced_is_heard_no_more() {
    for mut case in Case::new(1) {
        let first = case.watch();
        signal(&first);
        case.assert_kick();
        let second = case.watch();
        case.assert_quiet();
        signal(&first);
        case.assert_quiet();
        signal(&second);
        case.assert_kick();
        case.engine.watch_kick(None);
        signal(&second);
        case.assert_quiet();
        let third = case.watch();
        signal(&third);
        case.assert_kick();
    }
}

#[test]
fn a_kick_that_waits_when_its_descriptor_is_replaced_does_no_harm() {
    for mut case in Case::new(1) {
        let first = case.watch();
        case.assert_quiet();
        signal(&first);
        // It is in the completion queue, and the replacement is made before anyone looks.
        case.engine.wait(Some(SOON), Wanted::ONE).unwrap();
        let second = case.watch();
        case.assert_quiet();
        signal(&second);
        case.assert_kick();
    }
}

#[test]
fn replacing_many_times_leaks_no_entry() {
    for mut case in Case::new(1) {
        for _ in 0..1000 {
            let kick = case.watch();
            signal(&kick);
            case.assert_kick();
        }
        // Without a look in between as well.
        for _ in 0..1000 {
            case.watch();
        }
        let kick = case.watch();
        signal(&kick);
        case.assert_kick();
    }
}

#[test]
fn a_wake_ends_any_wait() {
    for mut case in Case::new(1) {
        let wake = case.wake.try_clone().unwrap();
        for _ in 0..3 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(10));
                    signal(&wake);
                });
                case.engine.wait(None, Wanted::ONE).unwrap();
            });
            case.assert_wake();
        }
        case.assert_quiet();
    }
}

#[test]
fn a_wake_from_before_the_first_wait_is_heard() {
    for mut case in Case::new(1) {
        signal(&case.wake);
        case.assert_wake();
    }
}

#[test]
fn events_of_all_kinds_come_together() {
    for mut case in Case::new(2) {
        let kick = case.watch();
        case.assert_quiet();
        signal(&kick);
        signal(&case.wake);
        case.start(Operation::Read { offset: 0 }, &[(0, 512)]);
        let mut seen = [0; 3];
        for _ in 0..3 {
            match case.next() {
                Event::Kick => seen[0] += 1,
                Event::Wake => seen[1] += 1,
                Event::Done(transfer, result) => {
                    assert_eq!(result, 512);
                    end(transfer);
                    seen[2] += 1;
                }
            }
        }
        assert_eq!(seen, [1; 3]);
    }
}

#[test]
fn a_wait_ends_when_its_time_is_over_and_not_before() {
    for mut case in Case::new(1) {
        let before_ns = case.engine.now_ns();
        case.engine.wait(Some(Duration::from_millis(30)), Wanted::ONE).unwrap();
        let waited_ns = case.engine.now_ns() - before_ns;
        assert!((29_000_000..5_000_000_000).contains(&waited_ns), "{waited_ns} ns");
        assert!(case.engine.next_event().is_none());
        let start = Instant::now();
        (0..100).for_each(|_| case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap());
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn f27_more_than_one_event_is_waited_for_only_so_long() {
    for within in [GATHER_TIME, SURE_GATHER_TIME] {
        for mut case in Case::new(4) {
            let kick = case.watch();
            case.assert_quiet();
            // One event of two that were wanted: it is not kept for as long as nothing else happens.
            signal(&kick);
            let start = Instant::now();
            case.engine.wait(None, Wanted { nr: 2, within }).unwrap();
            case.assert_kick();
            assert!(start.elapsed() < SOON);
            // An earlier timeout counts.
            case.engine.wait(Some(Duration::from_millis(1)), Wanted { nr: 2, within }).unwrap();
            // Both of two.
            signal(&kick);
            signal(&case.wake);
            case.engine.wait(None, Wanted { nr: 2, within: SOON }).unwrap();
            assert!(case.engine.next_event().is_some() && case.engine.next_event().is_some());
        }
    }
}

/// The time for more than one is over when the only one comes, and the timeout is a long one.
#[test]
fn f27_one_event_that_comes_late_is_not_kept() {
    for mut case in Case::new(4) {
        let kick = case.watch();
        case.assert_quiet();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                signal(&kick);
            });
            let start = Instant::now();
            while !case.engine.has_event() {
                case.engine.wait(Some(SOON * 2), Wanted { nr: 4, within: GATHER_TIME }).unwrap();
            }
            assert!(start.elapsed() < SOON);
        });
        case.assert_kick();
    }
}

#[test]
fn looking_without_waiting_sends_what_is_queued() {
    for mut case in Case::new(1) {
        case.start(Operation::Read { offset: 0 }, &[(0, 512)]);
        let start = Instant::now();
        let transfer = loop {
            assert!(start.elapsed() < SOON);
            case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap();
            if let Some(Event::Done(transfer, 512)) = case.engine.next_event() {
                break transfer;
            }
        };
        end(transfer);
    }
}

#[test]
fn f28_signals_disturb_nothing() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    const NR_SIGNALS: usize = 100;

    let nr_heard = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&nr_heard);
    // SAFETY: the handler does one atomic addition, which is allowed in a signal handler.
    let hook = unsafe {
        signal_hook::low_level::register(signal_hook::consts::SIGWINCH, move || {
            counter.fetch_add(1, Ordering::Relaxed);
        })
    }
    .unwrap();
    // SAFETY: has no conditions.
    let worker = unsafe { libc::pthread_self() };
    for mut case in Case::new(32) {
        nr_heard.store(0, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                while nr_heard.load(Ordering::Relaxed) < NR_SIGNALS && start.elapsed() < SOON {
                    // SAFETY: the thread that the handle names waits for this one.
                    unsafe { libc::pthread_kill(worker, signal_hook::consts::SIGWINCH) };
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            let start = Instant::now();
            while nr_heard.load(Ordering::Relaxed) < NR_SIGNALS && start.elapsed() < SOON {
                for i in 0..32 {
                    case.start(Operation::Read { offset: i * 512 }, &[(i * 512, 512)]);
                }
                for _ in 0..32 {
                    let (transfer, result) = case.next_done();
                    assert_eq!(result, 512);
                    end(transfer);
                }
            }
        });
        assert!(nr_heard.load(Ordering::Relaxed) >= NR_SIGNALS);
    }
    signal_hook::low_level::unregister(hook);
}
