//! Progress output: a live line on a terminal, otherwise a line every few seconds.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Columns that a terminal needs for a bar beside the line.
const WIDE: u16 = 100;

/// What separates the parts of the live line.
const SEPARATOR: &str = " · ";

/// Progress of an operation.
pub struct Progress {
    display: Display,
    count: Count,
    /// Kept in the live line until it is replaced.
    note: Option<String>,
}

enum Display {
    Hidden,
    /// One line of a terminal, drawn anew.
    Live(ProgressBar),
    /// Lines, the last of them printed then.
    Lines(Instant),
}

struct Count {
    /// What is counted, such as `step`.
    unit: &'static str,
    /// Units that were done before it began.
    first: usize,
    total: usize,
    done: usize,
    began: Instant,
}

/// Whether standard error is a terminal on which a line can be drawn anew.
fn is_live() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stderr().is_terminal() && !dumb
}

impl Progress {
    fn of(display: Display, unit: &'static str, first: usize, total: usize) -> Progress {
        let count = Count { unit, first, total, done: first, began: Instant::now() };
        Progress { display, count, note: None }
    }

    /// Shows nothing.
    pub fn hidden() -> Progress {
        Progress::of(Display::Hidden, "", 0, 0)
    }

    /// Shows how much of `first..total` is done.
    pub fn new(unit: &'static str, first: usize, total: usize) -> Progress {
        if !is_live() {
            return Progress::of(Display::Lines(Instant::now()), unit, first, total);
        }
        let columns = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |s| s.ws_col);
        let template = if columns < WIDE { "{wide_msg}" } else { "{bar:24.cyan/dim} {wide_msg}" };
        let style = ProgressStyle::with_template(template);
        let style = style.expect("invariant: the template is valid").progress_chars("━╸─");
        let bar = ProgressBar::new(total as u64).with_style(style).with_position(first as u64);
        Progress::of(Display::Live(bar), unit, first, total)
    }

    /// Counts one more unit. `what` is the current message; the live line also has `details`.
    pub fn advance(&mut self, what: &str, details: &[String]) {
        self.count.done += 1;
        let count = &self.count;
        match &mut self.display {
            Display::Hidden => {}
            Display::Live(bar) => {
                let details = self.note.iter().chain(details).map(String::as_str);
                bar.set_message(count.live(what, details, count.began.elapsed()));
                bar.set_position(count.done as u64);
            }
            Display::Lines(said) if said.elapsed() >= PAUSE => {
                *said = Instant::now();
                say(&count.line(what, count.began.elapsed()));
            }
            Display::Lines(_) => {}
        }
    }

    /// Replaces the live line by what is being done, until the next unit.
    pub fn doing(&self, what: &str) {
        if let Display::Live(bar) = &self.display {
            bar.set_message(format!("{}{SEPARATOR}{what}", self.count.position()));
            bar.tick();
        }
    }

    /// Keeps a note in the live line, in place of the last one.
    pub fn note(&mut self, note: String) {
        self.note = Some(note);
    }

    /// Prints on the same terminal while the live line is away.
    pub fn beside<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.display {
            Display::Live(bar) => bar.suspend(print),
            _ => print(),
        }
    }

    /// Shows a warning.
    pub fn warn(&self, text: &str) {
        if !matches!(self.display, Display::Hidden) {
            self.beside(|| say(&format!("warning: {text}")));
        }
    }

    /// Removes the display.
    pub fn finish(&self) {
        if let Display::Live(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

impl Count {
    fn position(&self) -> String {
        format!("{} {} of {}", self.unit, self.done, self.total)
    }

    /// Units per second.
    fn rate(&self, elapsed: Duration) -> f64 {
        (self.done - self.first) as f64 / elapsed.as_secs_f64().max(1e-9)
    }

    fn left(&self, elapsed: Duration) -> String {
        let left = self.total.saturating_sub(self.done) as f64 / self.rate(elapsed);
        format!("{} left", duration(left))
    }

    fn line(&self, what: &str, elapsed: Duration) -> String {
        let comma = if what.is_empty() { "" } else { ", " };
        let (position, rate) = (self.position(), self.rate(elapsed));
        format!("{position}{comma}{what}, {rate:.3} per s, {}", self.left(elapsed))
    }

    fn live<'a>(
        &self,
        what: &'a str,
        details: impl Iterator<Item = &'a str>,
        elapsed: Duration,
    ) -> String {
        let mut text = self.position();
        for part in [what].into_iter().chain(details).filter(|part| !part.is_empty()) {
            text += SEPARATOR;
            text += part;
        }
        text + SEPARATOR + &self.left(elapsed)
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
        let count =
            Count { unit: "step", first: 100, total: 1100, done: 200, began: Instant::now() };
        let elapsed = Duration::from_secs(10);
        let line = count.line("loss 0.5000", elapsed);
        assert_eq!(line, "step 200 of 1100, loss 0.5000, 10.000 per s, 2 min left");
        let live = count.live("loss 0.5000", ["1.2k tokens/s", "3.5 GiB"].into_iter(), elapsed);
        let expected = "step 200 of 1100 · loss 0.5000 · 1.2k tokens/s · 3.5 GiB · 2 min left";
        assert_eq!(live, expected);
        assert_eq!(duration(7200.0), "2.0 h");
    }
}
