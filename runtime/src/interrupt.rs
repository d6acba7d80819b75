//! Handles Ctrl-C and SIGTERM as a request to stop after the current step.

use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// A request to stop a run: zero, or the signal.
pub type Stop = Arc<AtomicUsize>;

/// Handles SIGINT and SIGTERM: the first requests a stop, a second one ends the program immediately.
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

/// Ends the program as the unhandled signal would have, so that a shell sees the signal.
pub fn leave(signal: i32) -> ! {
    // It fails only for signals that cannot be raised; the exit code is equivalent.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
