//! The file server with scripted faults; see the library's `faulty` module.

fn main() -> anyhow::Result<()> {
    polypath_vm_tests::faulty::program::main()
}
