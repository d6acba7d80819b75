//! The certificate of every test of the suite that Frit compiles: no pass is without a proof.

use super::case::Case;
use super::{SETS, list};
use frit_tests::requirements::Requirement;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, scope};

/// Whether the tests are trained, the settings, and how many are certified. Of the others there is nothing to train, or they cannot be
/// compiled so.
const CONFIGURATIONS: [(bool, &[&str], usize); 3] = [
    (false, &["precision.compute=fp32"], 1477),
    (true, &["precision.compute=fp32"], 1180),
    (true, &["precision.compute=bf16", "sharding.ranks=3", "run.accumulation=2"], 1180),
];

/// Of each test the passes that are not proved, of those that can be compiled.
fn certificates(trains: bool, settings: &[&str]) -> BTreeMap<String, Vec<String>> {
    let Some(folder) = Requirement::OnnxTests.find() else { return BTreeMap::new() };
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let of_set = |set| list(set, "passes.txt").into_keys().map(move |name| format!("{set}/{name}"));
    let tests: Vec<String> = SETS.into_iter().flat_map(|(set, _)| of_set(set)).collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some(name) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let case = Case::read(&folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let Ok(Some(certificate)) = case.certified(trains, &settings) else { continue };
            let open = certificate.open().into_iter();
            let open = open.map(|p| format!("{}: {}", p.pass, p.differences.join("; ")));
            let open = open.chain(certificate.edited.clone()).collect();
            found.lock().expect("no panic").insert(name.clone(), open);
        }
    };
    scope(|scope| {
        let n = available_parallelism().map_or(1, |n| n.get());
        let threads: Vec<_> = (0..n).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
    });
    found.into_inner().expect("no panic")
}

#[test]
fn every_pass_is_proved_of_every_onnx_test() {
    if Requirement::OnnxTests.find().is_none() {
        return;
    }
    let mut wrong = vec![];
    for (trains, settings, expected) in CONFIGURATIONS {
        let found = certificates(trains, settings);
        for (name, open) in found.iter().filter(|(_, open)| !open.is_empty()) {
            wrong.push(format!("{name} {settings:?}, trained: {trains}: {}", open.join("; ")));
        }
        if found.len() != expected {
            wrong.push(format!("{settings:?}, trained: {trains}: {} tests", found.len()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
