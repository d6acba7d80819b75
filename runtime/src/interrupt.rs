//! Handles Ctrl-C and SIGTERM as a request to stop after the current step.

use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Asks for the end of a run: zero, or the signal that asked.
pub type Stop = Arc<AtomicUsize>;

/// Watches SIGINT and SIGTERM. The first asks; a second one ends the program at once.
///
/// # Errors
/// If the system refuses.
pub fn watch() -> std::io::Result<Stop> {
    let stop = Stop::default();
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
        signal_hook::flag::register(signal, Arc::clone(&asked))?;
        signal_hook::flag::register_usize(signal, Arc::clone(&stop), signal as usize)?;
    }
    Ok(stop)
}

/// Ends the program as the signal would have without being watched, so that a shell sees that it was sent.
pub fn leave(signal: i32) -> ! {
    // It fails only for signals that cannot be raised; the exit says the same.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
