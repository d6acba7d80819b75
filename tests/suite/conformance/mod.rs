//! ONNX's own backend suite: the tests in the Python wheel `onnx==1.22.0`, each a model with inputs and expected
//! outputs.
//!
//! Every test of a set is on exactly one list of `tests/conformance/<set>/`: `passes.txt`, those that give the expected
//! outputs; `out_of_scope.txt`, those that need features outside of Frit's scope, with the reason; and `open.txt`,
//! those that should pass and do not, with the cause. A test that moves between passing and failing, in either
//! direction, fails here; `UPDATE_EXPECT=1` writes `passes.txt` and `open.txt` again.
//!
//! The wheel comes from `.ci/setup.sh --onnx-tests`, which prints its path as `FRIT_ONNX_TESTS`.

mod case;
mod certified;
mod compiled;

mod proto;

use crate::support::file;
use case::Case;
use expect_test::expect_file;
use frit_tests::requirements::Requirement;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The sets and how many tests each has.
pub(super) const SETS: [(&str, usize); 4] =
    [("node", 1765), ("simple", 23), ("pytorch-operator", 35), ("pytorch-converted", 82)];

/// Names and reasons of a list; `passes.txt` has no reasons.
pub(super) fn list(set: &str, name: &str) -> BTreeMap<String, String> {
    let path = file(&format!("tests/conformance/{set}/{name}"));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let entry = |line: &str| match line.split_once(": ") {
        Some((test, reason)) => (test.to_string(), reason.to_string()),
        None => (line.to_string(), String::new()),
    };
    text.lines().filter(|l| !l.is_empty()).map(entry).collect()
}

/// The tests of a set, sorted.
fn tests(set: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(set).unwrap_or_else(|e| panic!("{}: {e}", set.display()));
    let mut names: Vec<String> = entries
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| set.join(name).join("model.onnx").exists())
        .collect();
    names.sort();
    names
}

/// What became of a test.
#[derive(Default)]
struct Outcome {
    /// What is wrong; empty if nothing is.
    wrong: String,
    /// The operator that it tests, if the model has only one.
    operator: Option<String>,
    /// The operations that the model became.
    operations: BTreeSet<String>,
}

fn outcome(dir: &Path) -> Outcome {
    let case = match Case::read(dir) {
        Ok(case) => case,
        Err(wrong) => return Outcome { wrong, ..Outcome::default() },
    };
    let operator = case.operator();
    let mut operations = BTreeSet::new();
    let checked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.check(&mut operations)));
    let wrong = match checked {
        Ok(Ok(())) => String::new(),
        Ok(Err(wrong)) => wrong.lines().next().unwrap_or("fails").to_string(),
        Err(_) => "panics".into(),
    };
    Outcome { wrong, operator, operations }
}

/// What becomes of each test.
fn outcomes(set: &Path, names: &[&str]) -> BTreeMap<String, Outcome> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(BTreeMap::new());
    let work = || {
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = outcome(&set.join(name));
            found.lock().expect("no panic").insert(name.to_string(), outcome);
        }
    };
    std::thread::scope(|scope| {
        let n = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads: Vec<_> = (0..n).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
    });
    found.into_inner().expect("no panic")
}

/// Runs a set and compares with its lists.
fn check(set: &str, expected: usize) {
    let Some(folder) = Requirement::OnnxTests.find() else { return };
    let folder = folder.join(set);
    let names = tests(&folder);
    assert_eq!(names.len(), expected, "tests of {set}");
    let out = list(set, "out_of_scope.txt");
    let strange: Vec<&String> = out.keys().filter(|n| !names.contains(n)).collect();
    assert!(strange.is_empty(), "not tests of {set}: {strange:?}");
    let inside: Vec<&str> =
        names.iter().map(String::as_str).filter(|n| !out.contains_key(*n)).collect();
    let found = outcomes(&folder, &inside);
    if set == SETS[0].0 {
        check_operators(&found);
    }
    let found: BTreeMap<&str, &str> =
        found.iter().map(|(name, o)| (name.as_str(), o.wrong.as_str())).collect();
    let passes: BTreeSet<&str> =
        found.iter().filter(|(_, w)| w.is_empty()).map(|(n, _)| *n).collect();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let write = |name: &str, lines: Vec<String>| {
            let path = file(&format!("tests/conformance/{set}/{name}"));
            std::fs::write(path, lines.iter().map(|l| l.clone() + "\n").collect::<String>())
                .expect("written");
        };
        write("passes.txt", passes.iter().map(|n| n.to_string()).collect());
        let open = found.iter().filter(|(_, w)| !w.is_empty());
        write("open.txt", open.map(|(n, w)| format!("{n}: {w}")).collect());
        return;
    }
    let listed = list(set, "passes.txt");
    let open = list(set, "open.txt");
    let mut drift = Vec::new();
    for (name, wrong) in &found {
        match (listed.contains_key(*name), wrong.is_empty()) {
            (true, false) => drift.push(format!("{name} no longer passes: {wrong}")),
            (false, true) => drift.push(format!("{name} passes, but is not in passes.txt")),
            (false, false) if !open.contains_key(*name) => {
                drift.push(format!("{name} is on no list: {wrong}"));
            }
            _ => {}
        }
    }
    assert!(drift.is_empty(), "{set} (UPDATE_EXPECT=1 writes the lists):\n{}", drift.join("\n"));
}

/// Compares `operators.txt`: of every operator, how many tests of it alone pass, and what it becomes.
fn check_operators(found: &BTreeMap<String, Outcome>) {
    let mut operators: BTreeMap<&str, (usize, usize, BTreeSet<&str>)> = BTreeMap::new();
    for outcome in found.values() {
        let Some(name) = &outcome.operator else { continue };
        let (passed, all, operations) = operators.entry(name).or_default();
        *passed += usize::from(outcome.wrong.is_empty());
        *all += 1;
        operations.extend(outcome.operations.iter().map(String::as_str));
    }
    let mut text = String::new();
    for (name, (passed, all, operations)) in operators {
        let operations: Vec<&str> = operations.into_iter().collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}: {passed}/{all} {}", operations.join(" "));
    }
    let path = file("tests/conformance/operators.txt");
    expect_file![path].assert_eq(&text);
}

#[test]
fn onnx_node_tests() {
    check(SETS[0].0, SETS[0].1);
}

#[test]
fn onnx_simple_tests() {
    check(SETS[1].0, SETS[1].1);
}

#[test]
fn onnx_pytorch_operator_tests() {
    check(SETS[2].0, SETS[2].1);
}

#[test]
fn onnx_pytorch_converted_tests() {
    check(SETS[3].0, SETS[3].1);
}
