//! Waiting for work without the interpreter's lock, with an eye on Ctrl-C.

use pyo3::prelude::*;

/// Does `work` without the lock. Its argument, called several times per second, looks for signals; what a handler
/// raises, such as `KeyboardInterrupt`, is raised when the work is done.
///
/// # Errors
/// What a signal handler raised.
pub(crate) fn attentively<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut()) -> T + Send,
) -> PyResult<T> {
    let (result, raised) = py.detach(|| {
        let mut raised = None;
        let result = work(&mut || {
            if raised.is_none() {
                raised = Python::attach(|py| py.check_signals()).err();
            }
        });
        (result, raised)
    });
    match raised {
        Some(error) => Err(error),
        None => {
            py.check_signals()?;
            Ok(result)
        }
    }
}
