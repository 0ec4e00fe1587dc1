//! Which files stay open, and for how long.

use super::*;

/// Whether nobody else has the file open: a write lease is given to the only one (fcntl(2), F_SETLEASE).
fn is_closed(file: &File) -> bool {
    // SAFETY: plain numbers; the descriptor is the file's own.
    let lease = |what: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, what) };
    let got = lease(libc::F_WRLCK) == 0;
    if got {
        assert_eq!(lease(libc::F_UNLCK), 0);
    }
    got
}

impl Case {
    /// The file, opened in a way that does not count.
    fn onlooker(&self) -> File {
        File::open(self.links.name(0)).unwrap()
    }

    /// The worker goes by a table without the paths of now.
    fn leave(&mut self) {
        let other = Links::new(1, DISK_BYTES);
        self.table = Rc::new(View::new(Arc::new(other.table(1, CACHED, 1)), Some(&self.table), 0));
        self.engine.note_new_view();
    }
}

#[test]
fn a_path_that_leaves_is_closed_when_its_requests_are_done() {
    for mut case in Case::new(4) {
        let file = case.onlooker();
        let read = case.transfer(Operation::Read { offset: 0 }, &[(0, 4096)], &[]);
        assert_eq!(case.run(read), 4096);
        assert!(!is_closed(&file));
        let late = case.transfer(Operation::Read { offset: 0 }, &[(0, 4096)], &[]);
        case.leave();
        case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap();
        assert!(!is_closed(&file), "a request has it still");
        assert_eq!(case.run(late), 4096);
        assert!(!is_closed(&file), "nobody has looked since");
        case.engine.wait(Some(Duration::ZERO), Wanted::ONE).unwrap();
        assert!(is_closed(&file));
    }
}

#[test]
fn paths_come_and_go_more_often_than_there_is_room_for() {
    for mut case in Case::new(4) {
        for i in 0..300 {
            let links = Links::new(2, DISK_BYTES);
            case.table = Rc::new(View::new(Arc::new(links.table(2, CACHED, 1)), Some(&case.table), 0));
            // Every other time nobody says so in time: descriptors do then.
            if i % 2 == 0 {
                case.engine.note_new_view();
            }
            case.links = links;
            case.file().write_all_at(&letters(512), 0).unwrap();
            let read = case.transfer(Operation::Read { offset: 0 }, &[(0, 512)], &[]);
            assert_eq!(case.run(read), 512);
            assert!(case.get(0, 512) == letters(512));
            case.put(0, &[0; 512]);
        }
    }
}

#[test]
fn nothing_is_open_after_the_ring() {
    for mut case in Case::new(4) {
        let file = case.onlooker();
        let read = case.transfer(Operation::Read { offset: 0 }, &[(0, 4096)], &[]);
        assert_eq!(case.run(read), 4096);
        let Case { links: _links, engine, table, .. } = case;
        drop(engine);
        drop(table);
        assert!(is_closed(&file));
    }
}
