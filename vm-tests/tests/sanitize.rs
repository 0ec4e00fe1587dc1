//! Memory safety, as far as it can be looked at quickly: the cells that workers share, under every order of their loads and
//! stores; and where `unsafe` is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn f16_no_order_of_loads_and_stores_hides_a_write_from_a_flush() {
    let command = Path::new(env!("CARGO_MANIFEST_DIR")).join("sanitize");
    let output = Command::new(command).arg("loom").output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}\n{}", text[0], text[1]);
    assert!(text[0].contains("3 passed"), "{}", text[0]);
}

/// Files of source code below `dir`, without tests and what only tests use.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match path.is_dir() {
            true if name != "tests" && name != "sim" => sources(&path, found),
            false if name.ends_with(".rs") && name != "tests.rs" => found.push(path),
            _ => {}
        }
    }
}

#[test]
fn unsafe_code_is_where_the_architecture_says_and_says_why() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let section = text.split("\n## ").find(|section| section.starts_with("Unsafe")).unwrap();
    let (mut files, mut nr) = (Vec::new(), 0);
    for room in ["selector", "paths", "backend"] {
        sources(&root.join(room).join("src"), &mut files);
    }
    let mut nr_files = 0;
    for file in files {
        let code = fs::read_to_string(&file).unwrap();
        let code = code.split("#[cfg(test)]\nmod ").next().unwrap();
        let is_unsafe = |line: &&str| {
            let line = line.split("//").next().unwrap_or_default();
            ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|word| line.contains(word))
        };
        let here = code.lines().filter(is_unsafe).count();
        if here == 0 {
            continue;
        }
        let name = file.strip_prefix(root.join("backend/src")).unwrap_or(&file).display().to_string();
        println!("{here:3} {name}");
        assert!(section.contains(&format!("`{name}`")), "{name} has {here} unsafe places and no address");
        let nr_reasons = code.matches("SAFETY:").count() + code.matches("# Safety").count();
        assert!(nr_reasons >= here, "{name}: {here} unsafe places, {nr_reasons} reasons");
        (nr, nr_files) = (nr + here, nr_files + 1);
    }
    println!("{nr} unsafe places in {nr_files} files");
    assert!(nr > 0, "nothing was looked at");
}
