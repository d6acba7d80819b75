//! The certificate of every test of the suite that Frit compiles: no pass is without a proof.

use super::case::Case;
use super::{SETS, list};
use frit_tests::requirements::Requirement;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Whether the tests are trained, under these settings, and how many are certified; of the others there is nothing to train, or they
/// cannot be compiled so.
const CONFIGURATIONS: [(bool, &[&str], usize); 3] = [
    (false, &["precision.compute=fp32"], 0),
    (true, &["precision.compute=fp32"], 0),
    (true, &["precision.compute=bf16", "sharding.ranks=3", "run.accumulation=2"], 0),
];

/// What became of a test under settings.
type Outcomes = BTreeMap<String, Result<bool, String>>;

/// Certifies all tests.
fn outcomes(trains: bool, settings: &[&str]) -> Outcomes {
    let Some(folder) = Requirement::OnnxTests.find() else { return Outcomes::new() };
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let mut tests = Vec::new();
    for (set, _) in SETS {
        tests.extend(list(set, "passes.txt").into_keys().map(|name| (set, name)));
    }
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Outcomes::new()));
    let work = || {
        while let Some((set, name)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let case = Case::read(&folder.join(set).join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let begin = std::time::Instant::now();
            let certificate = case.certified(trains, &settings);
            let outcome = certificate.map(|found| {
                found.map(|found| {
                    let open = found.open().into_iter();
                    let open = open.map(|p| format!("{}: {}", p.pass, p.differences.join("; ")));
                    open.chain(found.edited.clone()).collect::<Vec<_>>().join(" AND ")
                })
            });
            let line = match &outcome { Ok(None) => "none".into(), Ok(Some(s)) if s.is_empty() => "certified".into(), Ok(Some(s)) => format!("OPEN {s}"), Err(e) => format!("ERR {}", e.lines().next().unwrap_or_default()) };
            eprintln!("{set}/{name} {trains} {:?} {line}", begin.elapsed());
            found.lock().expect("no panic").insert(format!("{set}/{name}"), Ok(true));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    found.into_inner().expect("no panic")
}

#[test]
fn certificates_of_onnx_tests() {
    for (trains, settings, _) in CONFIGURATIONS {
        eprintln!("CONFIG {trains} {settings:?}");
        outcomes(trains, settings);
    }
}
