//! Test of several processes on one node that fill the same caches at once: a read finds a complete file or none.

use super::cubins;
use super::tuning::Tuning;
use frit_ir::plan::sha256_hex;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

/// Gives a process the directory of the caches, and its number.
const FOLDER: &str = "FRIT_TEST_CACHES";
const NUMBER: &str = "FRIT_TEST_NUMBER";
const PROCESSES: usize = 4;
const ROUNDS: usize = 60;
/// Large enough that a write can be observed half done.
const CODE_BYTES: usize = 1 << 19;
const PROBLEMS: usize = 2000;

fn content(path: &Path) -> Option<Vec<u8>> {
    match std::fs::read(path) {
        Ok(bytes) => Some(bytes),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => panic!("{}: {e}", path.display()),
    }
}

/// One process: writes and reads both caches, and occasionally deletes them.
fn work(folder: &Path, number: usize) {
    let (code_path, tuning_path) = (folder.join("fill.cubin"), folder.join("tuning.json"));
    // Code is named by its inputs, so all processes write the same.
    let code: Vec<u8> = (0..CODE_BYTES).map(|i| (i * 31 % 251) as u8).collect();
    let whole = [&code[..], sha256_hex(&code).as_bytes()].concat();
    let chosen = format!("{{\"candidate\": \"cublaslt\", \"with\": {:?}}}", [number; 8]);
    let measured = format!("{{\"chosen\": {chosen}, \"candidates\": []}}");
    let problems: Vec<String> =
        (0..PROBLEMS).map(|i| format!("\"problem {i}\": {measured}")).collect();
    let text = format!("{{\"device\": {{{}}}}}", problems.join(", "));
    let tuning = Tuning::parse(text.as_bytes()).unwrap();
    for round in 0..ROUNDS {
        cubins::write(&code_path, &code);
        if let Some(found) = content(&code_path) {
            assert!(found == whole, "code of {} bytes in round {round}", found.len());
        }
        assert!(cubins::read(&code_path).is_none_or(|found| found == code));
        tuning.write(&tuning_path);
        if let Some(found) = content(&tuning_path) {
            let read = Tuning::parse(&found);
            assert!(read.is_some(), "{} bytes in round {round}", found.len());
            // All algorithms come from one writer: their value is the number of its thread.
            let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
            let problems = found["device"].as_object().unwrap().values();
            let writers: Vec<u64> =
                problems.map(|measured| measured["chosen"]["with"][0].as_u64().unwrap()).collect();
            assert_eq!(writers.len(), PROBLEMS);
            assert!(writers.iter().all(|w| *w == writers[0]), "parts of two writers");
        }
        if round % 5 == number {
            let _ = std::fs::remove_file(&code_path);
            let _ = std::fs::remove_file(&tuning_path);
        }
    }
}

#[test]
fn what_processes_write_at_once_is_never_read_in_parts() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let number = std::env::var(NUMBER).ok().and_then(|n| n.parse().ok());
        return work(Path::new(&folder), number.expect("a number"));
    }
    let folder = tempfile::tempdir().unwrap();
    let name = std::thread::current().name().expect("the name of this test").to_owned();
    let start = |number: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--test-threads", "1"])
            .env(FOLDER, folder.path())
            .env(NUMBER, number.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let started: Vec<_> = (0..PROCESSES).map(start).collect();
    for process in started {
        let output = process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("1 passed"), "the process did nothing: {said}");
    }
    // No temporary files remain.
    let names = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name());
    for name in names {
        assert!(name == "fill.cubin" || name == "tuning.json", "{name:?} is left");
    }
}
