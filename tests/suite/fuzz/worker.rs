//! The process in which mutants run, one after the other.

use super::targets::{self, Verdict};
use super::{MOST_BYTES, MOST_SECONDS, keep};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the mutants that `FRIT_FUZZ_WORK` names.
#[test]
#[ignore = "the processes that mutants run in"]
fn work() {
    let Ok(work) = std::env::var("FRIT_FUZZ_WORK") else { return };
    let words: Vec<&str> = work.split(' ').collect();
    let [target, first, end] = words[..] else { panic!("FRIT_FUZZ_WORK={work}") };
    let (first, end): (u64, u64) = (first.parse().expect("first"), end.parse().expect("end"));
    std::panic::set_hook(Box::new(|_| {}));
    let run = targets::prepare(target);
    for number in first..end {
        let (origin, bytes) = targets::mutant(target, number);
        say(&format!("begins {number}"));
        forget_peak();
        let begun = processor_seconds();
        let verdict = catch_unwind(AssertUnwindSafe(|| run(&bytes)));
        let seconds = processor_seconds().saturating_sub(begun);
        let failure = match verdict {
            Err(panic) => Some(format!("panics: {}", message(panic.as_ref()))),
            Ok(Verdict::Internal(what)) => Some(format!("internal error {what}")),
            Ok(_) if seconds >= MOST_SECONDS => Some(format!("takes {seconds} s")),
            Ok(_) if peak() > MOST_BYTES => Some(format!("takes {} MiB", peak() >> 20)),
            Ok(Verdict::Accepted) => {
                say("ended accepted");
                None
            }
            Ok(Verdict::Refused) => {
                say("ended refused");
                None
            }
        };
        if let Some(what) = failure {
            keep(target, number, &bytes);
            say(&format!("failed {target} {number} of {origin}: {}", what.replace('\n', " / ")));
        }
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nfuzz {text}").and_then(|()| out.flush()).expect("somebody listens");
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("something").to_string()
}

/// Seconds of processor time of this process so far, where the system tells: other load does not count.
fn processor_seconds() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // User and system time, in hundredths, are the 12th and 13th word after the name in parentheses.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    ticks.filter_map(|t| t.parse::<u64>().ok()).sum::<u64>() / 100
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
