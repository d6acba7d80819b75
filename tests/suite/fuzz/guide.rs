//! Coverage guidance: which inputs execute new branches, by counters that `tests/fuzz/instrument.sh` compiles into
//! Frit's libraries. Without them no input is new.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

/// The counters of each library, as the compiler's code announces them before `main`.
static COUNTERS: Mutex<Vec<&'static [AtomicU8]>> = Mutex::new(Vec::new());

/// What instrumented code calls for the counters of every module.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *const AtomicU8, end: *const AtomicU8) {
    let length = (end as usize).saturating_sub(start as usize);
    if length == 0 {
        return;
    }
    // SAFETY: the section of counters lies between the two for as long as the process lives, and bytes that others
    // write are as good as atomic ones.
    let counters = unsafe { std::slice::from_raw_parts(start, length) };
    let mut all = COUNTERS.lock().expect("nobody panics with it");
    if all.iter().all(|known| known.as_ptr() != start) {
        all.push(counters);
    }
}

/// Which branches ran so far.
pub(super) struct Guide {
    counters: Vec<&'static [AtomicU8]>,
    seen: Vec<bool>,
}

impl Guide {
    pub(super) fn new() -> Guide {
        let counters = COUNTERS.lock().expect("nobody panics with it").clone();
        let seen = vec![false; counters.iter().map(|c| c.len()).sum()];
        Guide { counters, seen }
    }

    /// Whether there are counters.
    pub(super) fn sees(&self) -> bool {
        !self.counters.is_empty()
    }

    /// Branches that ran so far.
    pub(super) fn covered(&self) -> usize {
        self.seen.iter().filter(|seen| **seen).count()
    }

    /// Takes what ran since the last call; whether any of it had not run before.
    pub(super) fn is_new(&mut self) -> bool {
        let mut new = false;
        for (counter, seen) in self.counters.iter().copied().flatten().zip(&mut self.seen) {
            if counter.load(Ordering::Relaxed) > 0 {
                counter.store(0, Ordering::Relaxed);
                new |= !*seen;
                *seen = true;
            }
        }
        new
    }
}
