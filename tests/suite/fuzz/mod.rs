//! Fuzzing of everything that Frit reads: no panic, abort, hang, excessive memory, or internal error.
//!
//! A mutant is determined by a target, its seed files (`tests/fuzz/corpus/<target>` and models of the repository) and a
//! number. Mutants run in worker processes of this test binary, so that one that aborts or hangs affects no other, and
//! is reported.
//!
//! - `FRIT_FUZZ=N` tries N mutants of every target; by default a few thousand in total.
//! - `FRIT_FUZZ_TARGET=onnx` leaves the others out, `FRIT_FUZZ_FIRST=N` begins at number N.
//! - `FRIT_FUZZ_INPUT=FILE` runs one input of `FRIT_FUZZ_TARGET` as it is.
//! - Inputs that failed are kept in `target/fuzz/`.
//!
//! Where the libraries count branches (`tests/fuzz/instrument.sh`), mutants that execute new ones are kept in
//! `target/fuzz/pool/` and mutated further; a mutant then depends on earlier ones.
//!
//! The workers are limited by `ulimit -v`; the limits are [`MOST_SECONDS`] and [`MOST_BYTES`].

mod guide;
mod mutant;
mod mutate;
mod origins;
mod rendezvous;
mod targets;
mod worker;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
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
    /// Refused for what they say.
    deep: u64,
    /// Refused at the door.
    refused: u64,
    failures: Vec<String>,
    /// How often it was refused for what.
    reasons: BTreeMap<String, u64>,
    /// Branches that ran, where they are counted.
    reached: u64,
    seconds: f64,
}

/// What a line of a worker says.
enum Line {
    /// A mutant begins.
    Begins(u64),
    Accepted,
    /// Refused for what it says, and why.
    Deep(String),
    /// Refused at the door, and why.
    Refused(String),
    /// It did what no mutant may.
    Failed(String),
    /// So many branches ran so far.
    Reached(u64),
}

fn parse(line: &str) -> Option<Line> {
    let (word, rest) = line.strip_prefix("fuzz ")?.split_once(' ')?;
    match (word, rest) {
        ("begins", number) => number.parse().ok().map(Line::Begins),
        ("accepted", _) => Some(Line::Accepted),
        ("deep", why) => Some(Line::Deep(why.to_string())),
        ("refused", why) => Some(Line::Refused(why.to_string())),
        ("failed", what) => Some(Line::Failed(what.to_string())),
        ("reached", number) => number.parse().ok().map(Line::Reached),
        _ => None,
    }
}

/// Runs mutants `first..first + count` of a target, with a new worker after each one that ended its own.
fn fuzz(target: &str, first: u64, count: u64) -> Outcome {
    let (mut outcome, begun) = (Outcome::default(), Instant::now());
    let mut next = first;
    while next < first + count {
        let work = format!("{target} {next} {}", first + count);
        next = run_worker(target, &work, &mut outcome);
    }
    outcome.seconds = begun.elapsed().as_secs_f64();
    outcome
}

/// One worker; returns the number of the mutant after the last one that it began.
fn run_worker(target: &str, work: &str, outcome: &mut Outcome) -> u64 {
    let program = std::env::current_exe().expect("this test");
    let mut worker = Command::new("sh");
    let limited = format!("ulimit -v {ADDRESS_SPACE}; exec \"$0\" \"$@\"");
    worker.arg("-c").arg(limited).arg(program);
    worker.args(["--exact", "fuzz::worker::work", "--ignored", "--nocapture"]);
    worker.env("FRIT_FUZZ_WORK", work);
    let mut worker =
        worker.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a worker starts");
    let output = worker.stdout.take().expect("it is piped");
    let (tell, hear) = channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                break;
            }
        }
    });
    let (mut at, mut since) = (None, (Instant::now(), 0));
    let died = loop {
        match hear.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                since = (Instant::now(), worker::processor_milliseconds(worker.id()));
                match parse(&line) {
                    Some(Line::Begins(number)) => at = Some(number),
                    Some(line) => outcome.hears(line),
                    None => {}
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                // Other load does not count, but who waits for ever takes no time either. The first mutant waits for
                // what the target prepares.
                let used = worker::processor_milliseconds(worker.id()).saturating_sub(since.1);
                let busy = at.is_some() && used > 3000 * MOST_SECONDS;
                if busy || since.0.elapsed() > Duration::from_secs(90 * MOST_SECONDS) {
                    let _ = worker.kill();
                    break Some("hangs");
                }
            }
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    let status = worker.wait().expect("it ends");
    reader.join().expect("it reads");
    let at = at.unwrap_or_else(|| panic!("the worker of {target} ended before its first mutant"));
    if let Some(what) = died.map(str::to_string).or((!status.success()).then(|| status.to_string()))
    {
        outcome.fails(format!("{target} {at}: {what}"));
        // What it was at is what failed.
        for entry in std::fs::read_dir(running(target)).into_iter().flatten().map_while(Result::ok)
        {
            let _ = std::fs::rename(entry.path(), kept().join(entry.file_name()));
        }
    }
    at + 1
}

impl Outcome {
    fn hears(&mut self, line: Line) {
        let count = match line {
            Line::Begins(_) => return,
            Line::Accepted => return self.accepted += 1,
            Line::Failed(what) => return self.fails(what),
            Line::Reached(branches) => return self.reached = branches,
            Line::Deep(why) => {
                self.deep += 1;
                self.reasons.entry(why)
            }
            Line::Refused(why) => {
                self.refused += 1;
                self.reasons.entry(why)
            }
        };
        *count.or_default() += 1;
    }

    fn fails(&mut self, what: String) {
        eprintln!("{what}");
        self.failures.push(what);
    }

    fn say(&self, name: &str) {
        let total = self.accepted + self.deep + self.refused + self.failures.len() as u64;
        eprintln!(
            "{name}: {total} mutants, {} accepted, {} refused for what they say, {} at the door, {} failed in {:.0} s",
            self.accepted,
            self.deep,
            self.refused,
            self.failures.len(),
            self.seconds
        );
        let mut reasons: Vec<(u64, &String)> = self.reasons.iter().map(|(w, n)| (*n, w)).collect();
        reasons.sort_by(|a, b| b.cmp(a));
        for (n, why) in reasons.iter().take(12) {
            eprintln!("{name}: {n} times {why}");
        }
        if self.reached > 0 {
            eprintln!("{name}: {} branches ran", self.reached);
        }
    }
}

/// Where inputs are kept.
fn kept() -> PathBuf {
    crate::support::file("target/fuzz")
}

/// Where a worker leaves what it is at.
fn running(target: &str) -> PathBuf {
    kept().join("running").join(target)
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

#[test]
fn mutants_of_all_inputs_are_accepted_or_refused() {
    let only = std::env::var("FRIT_FUZZ_TARGET").ok();
    let (count, first) = (number("FRIT_FUZZ"), number("FRIT_FUZZ_FIRST").unwrap_or(0));
    let input = std::env::var("FRIT_FUZZ_INPUT").ok();
    let mut outcomes: BTreeMap<&str, Outcome> = BTreeMap::new();
    for target in TARGETS.iter().filter(|t| only.as_deref().is_none_or(|name| name == t.name)) {
        let outcome = match &input {
            Some(path) => {
                let path = Path::new(path).canonicalize().expect("FRIT_FUZZ_INPUT is a file");
                let mut outcome = Outcome::default();
                run_worker(
                    target.name,
                    &format!("{} file {}", target.name, path.display()),
                    &mut outcome,
                );
                outcome
            }
            None => fuzz(target.name, first, count.unwrap_or(target.few)),
        };
        outcome.say(target.name);
        outcomes.insert(target.name, outcome);
    }
    assert!(!outcomes.is_empty(), "FRIT_FUZZ_TARGET is one of {:?}", TARGETS.map(|t| t.name));
    let enough = |o: &Outcome| count == Some(1) || input.is_some() || o.accepted + o.deep > 0;
    let shallow: Vec<&str> = outcomes.iter().filter(|(_, o)| !enough(o)).map(|(n, _)| *n).collect();
    assert!(shallow.is_empty(), "no mutant of {shallow:?} came past the door");
    let failures: Vec<&String> = outcomes.values().flat_map(|o| &o.failures).collect();
    assert!(failures.is_empty(), "{} failures:\n{failures:#?}", failures.len());
}
