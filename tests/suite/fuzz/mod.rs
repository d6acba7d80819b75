//! Whatever Frit reads, changed at random: no panic, abort, hang, gigabytes, or internal error.
//!
//! A mutant is made of a target, the files that it starts from (`tests/fuzz/corpus/<target>` and models of the
//! repository) and a number, and is the same for the same three. Mutants run in worker processes of this test binary,
//! so that one that aborts or hangs is only one mutant, and is named.
//!
//! - `FRIT_FUZZ=N` makes N mutants of every target; without it a few thousand in all.
//! - `FRIT_FUZZ_TARGET=onnx` leaves the others out, `FRIT_FUZZ_FIRST=N` begins at number N.
//! - Inputs that failed are kept in `target/fuzz/`.
//!
//! The workers are limited by `ulimit -v`; the bars are [`MOST_SECONDS`] and [`MOST_BYTES`].

mod mutate;
mod targets;
mod worker;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use targets::TARGETS;

/// Seconds of processor time that a mutant may take.
const MOST_SECONDS: u64 = 10;
/// Bytes of resident memory that a mutant may take.
const MOST_BYTES: u64 = 1 << 30;
/// KiB of address space of a worker: well above what it may use, below what hurts the machine.
const ADDRESS_SPACE: u64 = 8 << 20;

/// What came of the mutants of one target.
#[derive(Debug, Default)]
struct Outcome {
    accepted: u64,
    refused: u64,
    failures: Vec<String>,
    seconds: f64,
}

/// What a line of a worker says.
enum Line {
    /// A mutant begins.
    Begins(u64),
    /// It was accepted, or refused by a diagnostic.
    Ended { accepted: bool },
    /// It did what no mutant may.
    Failed(String),
}

fn parse(line: &str) -> Option<Line> {
    let (word, rest) = line.strip_prefix("fuzz ")?.split_once(' ')?;
    match word {
        "begins" => rest.parse().ok().map(Line::Begins),
        "ended" => Some(Line::Ended { accepted: rest == "accepted" }),
        "failed" => Some(Line::Failed(rest.to_string())),
        _ => None,
    }
}

/// Runs mutants `first..first + count` of a target, with a new worker after each one that ended its own.
fn fuzz(target: &str, first: u64, count: u64) -> Outcome {
    let (mut outcome, begun) = (Outcome::default(), Instant::now());
    let mut next = first;
    while next < first + count {
        next = run_worker(target, next, first + count, &mut outcome);
    }
    outcome.seconds = begun.elapsed().as_secs_f64();
    outcome
}

/// One worker; returns the number of the mutant after the last one that it began.
fn run_worker(target: &str, first: u64, end: u64, outcome: &mut Outcome) -> u64 {
    let program = std::env::current_exe().expect("this test");
    let mut worker = Command::new("sh");
    let limited = format!("ulimit -v {ADDRESS_SPACE}; exec \"$0\" \"$@\"");
    worker.arg("-c").arg(limited).arg(program);
    worker.args(["--exact", "fuzz::worker::work", "--ignored", "--nocapture"]);
    worker.env("FRIT_FUZZ_WORK", format!("{target} {first} {end}"));
    let mut worker =
        worker.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a worker starts");
    let output = worker.stdout.take().expect("it is piped");
    let (tell, hear) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                break;
            }
        }
    });
    let mut at = None;
    let patience = Duration::from_secs(3 * MOST_SECONDS);
    let died = loop {
        // The first mutant waits for what the target prepares.
        let patience = if at.is_none() { 10 * patience } else { patience };
        match hear.recv_timeout(patience) {
            Ok(line) => match parse(&line) {
                Some(Line::Begins(number)) => at = Some(number),
                Some(Line::Ended { accepted: true }) => outcome.accepted += 1,
                Some(Line::Ended { accepted: false }) => outcome.refused += 1,
                Some(Line::Failed(what)) => outcome.failures.push(what),
                None => {}
            },
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                let _ = worker.kill();
                break Some("hangs");
            }
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break None,
        }
    };
    let status = worker.wait().expect("it ends");
    reader.join().expect("it reads");
    let at = at.unwrap_or_else(|| panic!("the worker of {target} ended before its first mutant"));
    if let Some(what) = died.map(str::to_string).or((!status.success()).then(|| status.to_string()))
    {
        outcome.failures.push(format!("{target} {at}: {what}"));
        let (_, bytes) = targets::mutant(target, at);
        keep(target, at, &bytes);
    }
    at + 1
}

/// Keeps an input that failed.
fn keep(target: &str, number: u64, bytes: &[u8]) {
    let dir: PathBuf = crate::support::file("target/fuzz");
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::write(dir.join(format!("{target}-{number}")), bytes).expect("written");
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

#[test]
fn mutants_of_all_inputs_are_accepted_or_refused() {
    let only = std::env::var("FRIT_FUZZ_TARGET").ok();
    let (count, first) = (number("FRIT_FUZZ"), number("FRIT_FUZZ_FIRST").unwrap_or(0));
    let mut outcomes: BTreeMap<&str, Outcome> = BTreeMap::new();
    for target in TARGETS.iter().filter(|t| only.as_deref().is_none_or(|name| name == t.name)) {
        outcomes.insert(target.name, fuzz(target.name, first, count.unwrap_or(target.few)));
    }
    assert!(!outcomes.is_empty(), "FRIT_FUZZ_TARGET is one of {:?}", TARGETS.map(|t| t.name));
    let mut failures = Vec::new();
    for (name, o) in outcomes {
        eprintln!(
            "{name}: {} accepted, {} refused, {} failed in {:.0} s",
            o.accepted,
            o.refused,
            o.failures.len(),
            o.seconds
        );
        assert!(o.refused > 0 && o.accepted + o.refused > 0, "{name}: nothing was refused");
        failures.extend(o.failures);
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
