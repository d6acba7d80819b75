//! The process in which mutants run, in sequence.

use super::guide::Guide;
use super::mutant::{Sources, mutant};
use super::origins::{Input, origins};
use super::targets::{self, Verdict};
use super::{MOST_BYTES, MOST_SECONDS, kept, running};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// What the last panic said.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Milliseconds that an input may take from which others are made.
const MOST_MILLISECONDS: u64 = 200;
/// Bytes that such an input may have.
const LONGEST: usize = 64 << 10;

/// Runs the mutants that `FRIT_FUZZ_WORK` names: a target and two numbers, or a target and a file.
#[test]
#[ignore = "the processes that mutants run in"]
fn work() {
    let Ok(work) = std::env::var("FRIT_FUZZ_WORK") else { return };
    std::panic::set_hook(Box::new(|info| {
        // Of any thread, whoever catches it.
        *PANIC.lock().expect("nobody panics with it") = Some(info.to_string());
    }));
    let words: Vec<&str> = work.splitn(3, ' ').collect();
    match words[..] {
        [target, "file", path] => {
            let input = Input::read(Path::new(path));
            Worker::new(target).try_input(0, &input);
        }
        [target, first, end] => {
            let numbers = first.parse().expect("first")..end.parse().expect("end");
            let mut worker = Worker::new(target);
            worker.warm_up();
            for number in numbers {
                let input = mutant(target, number, &worker.sources);
                worker.try_input(number, &input);
            }
        }
        _ => panic!("FRIT_FUZZ_WORK={work}"),
    }
}

struct Worker<'a> {
    target: &'a str,
    run: Box<dyn Fn(&Input) -> Verdict>,
    guide: Guide,
    sources: Sources,
}

impl Worker<'_> {
    fn new(target: &str) -> Worker<'_> {
        let (run, guide) = (targets::prepare(target), Guide::new());
        let sources = Sources { origins: origins(target), deep: vec![], shallow: vec![] };
        Worker { target, run, guide, sources }
    }

    /// Where earlier workers left what led somewhere new.
    fn pool(&self) -> PathBuf {
        kept().join("pool").join(self.target)
    }

    /// Runs what mutants start from, so that only what is new to all of it counts as new.
    fn warm_up(&mut self) {
        if !self.guide.sees() {
            return;
        }
        for input in &self.sources.origins {
            self.verdict(input);
        }
        let pool = std::fs::read_dir(self.pool()).into_iter().flatten().map_while(Result::ok);
        let mut paths: Vec<PathBuf> = pool.map(|e| e.path()).collect();
        paths.sort();
        for path in paths {
            let input = Input::read(&path);
            let verdict = self.verdict(&input);
            self.keep(input, verdict.as_ref());
        }
        self.guide.is_new();
    }

    /// Runs an input; nothing if it panics.
    fn verdict(&self, input: &Input) -> Option<Verdict> {
        catch_unwind(AssertUnwindSafe(|| (self.run)(input))).ok()
    }

    /// Makes mutants of an input, too.
    fn keep(&mut self, input: Input, verdict: Option<&Verdict>) {
        match verdict {
            Some(Verdict::Accepted | Verdict::Refused { deep: true, .. }) => {
                self.sources.deep.push(input);
            }
            _ => self.sources.shallow.push(input),
        }
    }

    fn try_input(&mut self, number: u64, input: &Input) {
        input.write(&running(self.target), self.target, number);
        say(&format!("begins {number}"));
        forget_peak();
        let begun = processor_milliseconds(std::process::id());
        let verdict = self.verdict(input);
        let took = processor_milliseconds(std::process::id()).saturating_sub(begun);
        let panicked = PANIC.lock().expect("nobody panics with it").take();
        let failure = match &verdict {
            _ if panicked.is_some() => panicked,
            None => Some("unwinds".into()),
            Some(Verdict::Internal(what)) => Some(format!("internal error {what}")),
            Some(_) if took >= 1000 * MOST_SECONDS => Some(format!("takes {} s", took / 1000)),
            Some(_) if peak() > MOST_BYTES => Some(format!("takes {} MiB", peak() >> 20)),
            Some(Verdict::Accepted) => {
                say("accepted ");
                None
            }
            Some(Verdict::Refused { deep, why }) => {
                let why: String = why.chars().filter(|c| !c.is_control()).take(60).collect();
                say(&format!("{} {why}", if *deep { "deep" } else { "refused" }));
                None
            }
        };
        if let Some(what) = failure {
            input.write(&kept(), self.target, number);
            let what = what.replace('\n', " / ");
            say(&format!("failed {} {number} of {}: {what}", self.target, input.origin));
        } else if self.guide.is_new() && took < MOST_MILLISECONDS && input.bytes.len() < LONGEST {
            input.write(&self.pool(), self.target, number);
            self.keep(input.clone(), verdict.as_ref());
            say(&format!("reached {}", self.guide.covered()));
        }
        input.remove(&running(self.target), self.target, number);
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nfuzz {text}").and_then(|()| out.flush()).expect("somebody listens");
}

/// Milliseconds of processor time of a process so far, where the system tells: other load does not count.
pub(super) fn processor_milliseconds(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // User and system time, in hundredths, are the 12th and 13th word after the name in parentheses.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    ticks.filter_map(|t| t.parse::<u64>().ok()).sum::<u64>() * 10
}

/// The most resident bytes since [`forget_peak`], where the system tells.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn forget_peak() {
    // A system without it counts what an earlier mutant took once more.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
