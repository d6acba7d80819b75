//! A sample of the suite through the whole program: compiled into a plan directory, proved, and evaluated
//! by the runtime. All tests run on the interpreter; this shows that kernels and plans say the same.
//!
//! `tests/conformance/compiled.txt` lists those of the sample that cannot be compiled, and why.

use super::case::Case;
use super::{SETS, folder, list};
use crate::support::file;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One test of so many is in the sample.
const ONE_OF: usize = 9;

/// Whether a test is in the sample: by its name, so that it stays there.
fn chosen(name: &str) -> bool {
    name.bytes().map(usize::from).sum::<usize>().is_multiple_of(ONE_OF)
}

#[test]
fn a_sample_of_onnx_tests_is_compiled_and_evaluated() {
    let Some(folder) = folder() else {
        eprintln!("skipped: compiling ONNX's tests; `.ci/setup.sh --onnx-tests` fetches them");
        return;
    };
    let mut tests = Vec::new();
    for (set, _) in SETS {
        let passes = list(set, "passes.txt");
        tests.extend(passes.into_keys().filter(|name| chosen(name)).map(|name| (set, name)));
    }
    assert!(tests.len() > 100, "only {} tests", tests.len());
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some((set, name)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = Case::read(&folder.join(set).join(name)).and_then(|case| case.compiled());
            if let Err(why) = found {
                let why = why.lines().next().unwrap_or("fails").to_string();
                wrong.lock().expect("no panic").insert(format!("{set}/{name}"), why);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    let text: String = wrong.iter().map(|(name, why)| format!("{name}: {why}\n")).collect();
    let path = file("tests/conformance/compiled.txt");
    if std::env::var_os("FRIT_BLESS").is_some() {
        std::fs::write(path, text).expect("written");
        return;
    }
    let stored = std::fs::read_to_string(path).expect("compiled.txt");
    let names = |text: &str| -> Vec<String> {
        text.lines().filter_map(|l| l.split_once(": ")).map(|(name, _)| name.into()).collect()
    };
    assert_eq!(names(&text), names(&stored), "FRIT_BLESS=1 writes compiled.txt:\n{text}");
}
