//! A sample of the suite, end to end: compiled into a plan directory, verified, and evaluated by the runtime, on the
//! CPU and on an emulated GPU. All tests run in the interpreter; this shows that kernels and plans agree with it, also
//! in training: gradients of both devices are compared.
//!
//! `tests/conformance/compiled.txt` and `compiled_for_cuda.txt` list those of the sample that cannot be compiled, and
//! why; `trained.txt` those that lack a kernel or a gradient.

use super::case::Case;
use super::{SETS, list};
use crate::support::file;
use frit_tests::requirements::Requirement;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One test of so many is in the sample.
const ONE_OF: usize = 9;

/// Tests in the sample that have separate code paths: matmuls whose leading axes broadcast in both directions, and a
/// mask of half precision.
const ALWAYS: [&str; 2] =
    ["test_matmul_bcast", "test_attention_4d_gqa_with_past_and_present_fp16_expanded"];

/// Whether a test is in the sample: by its name, so that it stays there.
fn chosen(name: &str) -> bool {
    let sum = name.bytes().map(usize::from).sum::<usize>();
    sum.is_multiple_of(ONE_OF) || ALWAYS.contains(&name)
}

#[test]
fn a_sample_of_onnx_tests_is_compiled_and_evaluated() {
    check_sample("compiled.txt", Case::compiled);
}

#[test]
fn a_sample_of_onnx_tests_is_evaluated_on_a_gpu() {
    check_sample("compiled_for_cuda.txt", Case::compiled_for_cuda);
}

#[test]
fn a_sample_of_onnx_tests_trains_on_both_devices() {
    check_sample("trained.txt", Case::trained);
}

/// Does something with every test of the sample; those that it is wrong with are on this list.
fn check_sample(listed: &str, of: fn(&Case) -> Result<(), String>) {
    let Some(folder) = Requirement::OnnxTests.find() else { return };
    let mut tests = Vec::new();
    for (set, _) in SETS {
        let passes = list(set, "passes.txt");
        tests.extend(passes.into_keys().filter(|name| chosen(name)).map(|name| (set, name)));
    }
    assert!(tests.len() > 100, "only {} tests", tests.len());
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some((set, name)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = Case::read(&folder.join(set).join(name)).and_then(|case| of(&case));
            if let Err(why) = found {
                let why = why.lines().next().unwrap_or("fails").to_string();
                wrong.lock().expect("no panic").insert(format!("{set}/{name}"), why);
            }
        }
    };
    std::thread::scope(|scope| {
        let n = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads: Vec<_> = (0..n).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
    });
    let wrong = wrong.into_inner().expect("no panic");
    let text: String = wrong.iter().map(|(name, why)| format!("{name}: {why}\n")).collect();
    let path = file(&format!("tests/conformance/{listed}"));
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(path, text).expect("written");
        return;
    }
    let stored = std::fs::read_to_string(path).expect(listed);
    let names = |text: &str| -> Vec<String> {
        text.lines().filter_map(|l| l.split_once(": ")).map(|(name, _)| name.into()).collect()
    };
    assert_eq!(names(&text), names(&stored), "UPDATE_EXPECT=1 writes {listed}:\n{text}");
}
