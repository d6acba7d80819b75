//! Progress output: a bar on a terminal, otherwise a line every few seconds.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Progress of an operation.
pub struct Progress {
    shown: bool,
    bar: ProgressBar,
    lines: Option<Lines>,
}

struct Lines {
    /// What is counted, such as `step`.
    unit: &'static str,
    /// Units that were done before it began.
    first: usize,
    total: usize,
    done: usize,
    began: Instant,
    said: Instant,
}

impl Progress {
    /// Shows nothing.
    pub fn hidden() -> Progress {
        Progress { shown: false, bar: ProgressBar::hidden(), lines: None }
    }

    /// Shows how much of `first..total` is done.
    pub fn new(unit: &'static str, first: usize, total: usize) -> Progress {
        let now = Instant::now();
        if !std::io::stderr().is_terminal() {
            let lines = Lines { unit, first, total, done: first, began: now, said: now };
            return Progress { shown: true, bar: ProgressBar::hidden(), lines: Some(lines) };
        }
        let bar = ProgressBar::new(total.saturating_sub(first) as u64);
        let bar = match ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {eta}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        Progress { shown: true, bar, lines: None }
    }

    /// Counts one more unit; `what` is the current message.
    pub fn advance(&mut self, what: &str) {
        self.bar.set_message(what.to_string());
        self.bar.inc(1);
        let Some(lines) = &mut self.lines else { return };
        lines.done += 1;
        if lines.said.elapsed() >= PAUSE {
            lines.said = Instant::now();
            let line = lines.line(what, lines.began.elapsed());
            say(&line);
        }
    }

    /// Shows a message.
    pub fn message(&self, what: &str) {
        self.bar.set_message(what.to_string());
    }

    /// Shows a warning.
    pub fn warn(&self, text: &str) {
        if self.shown {
            self.bar.suspend(|| say(&format!("warning: {text}")));
        }
    }

    /// Removes the display.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Lines {
    fn line(&self, what: &str, elapsed: Duration) -> String {
        let Lines { unit, first, total, done, .. } = self;
        let rate = (done - first) as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = total.saturating_sub(*done) as f64 / rate;
        let comma = if what.is_empty() { "" } else { ", " };
        format!("{unit} {done} of {total}{comma}{what}, {rate:.3} per s, {} left", duration(left))
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 90.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

fn say(line: &str) {
    // Nothing can be done if this fails.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints the current activity every few seconds, where there is no terminal for a progress bar.
pub struct Heartbeat {
    what: Arc<Mutex<String>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Begins, unless standard error is a terminal.
    pub fn start(what: &str) -> Heartbeat {
        let shared = Arc::new(Mutex::new(what.to_string()));
        if std::io::stderr().is_terminal() {
            return Heartbeat { what: shared, stop: None, thread: None };
        }
        let (stop, stopped) = channel();
        let (said, began) = (Arc::clone(&shared), Instant::now());
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                let what = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
                say(&format!("{what}, {} so far", duration(began.elapsed().as_secs_f64())));
            }
        });
        Heartbeat { what: shared, stop: Some(stop), thread: Some(thread) }
    }

    /// Changes the current activity.
    pub fn now(&self, what: &str) {
        *self.what.lock().unwrap_or_else(PoisonError::into_inner) = what.into();
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread does not panic, and nothing depends on its result.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is_and_how_long_it_takes() {
        let now = Instant::now();
        let lines =
            Lines { unit: "step", first: 100, total: 1100, done: 200, began: now, said: now };
        let line = lines.line("loss 0.5000", Duration::from_secs(10));
        assert_eq!(line, "step 200 of 1100, loss 0.5000, 10.000 per s, 2 min left");
        assert_eq!(duration(7200.0), "2.0 h");
    }
}
