//! The extension module `frit._frit`: compilation, plans and trainers for the Python package `frit`.
//!
//! Everything here calls the compiler and the runtime; the package's Python files make arguments and results convenient.
//! Work is done without the interpreter's lock, which is taken several times per second to look for Ctrl-C.

mod compile;
mod error;
mod plan;
mod tensors;
mod trainer;
mod wait;

use pyo3::prelude::*;
use std::ffi::OsString;

/// As in the program `frit`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs a program with these arguments, of which the first is its name; returns the exit code.
#[pyfunction]
fn program(py: Python<'_>, name: &str, arguments: Vec<OsString>) -> u8 {
    py.detach(|| match name {
        "frit-run" => frit_runtime::program::main(arguments),
        _ => frit::commands::main(arguments),
    })
}

#[pymodule]
fn _frit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(program, module)?)?;
    module.add_function(wrap_pyfunction!(compile::compile, module)?)?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<trainer::Trainer>()?;
    Ok(())
}
