//! Compiles a model into a plan directory.

use crate::error;
use frit::compilation::{self, Observer, Request};
use frit::config::Config;
use frit::diagnostics::Report;
use frit::{lints, plan_dir, reproducer};
use frit_ir::{Code, Diagnostic, Graph};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How often Ctrl-C is looked for.
const TICK: Duration = Duration::from_millis(50);

/// Ends the compilation after the pass that runs when nobody waits for it any more.
struct Cancelled(Arc<AtomicBool>);

impl Observer for Cancelled {
    fn after(&mut self, _: usize, _: &str, _: &Graph) {}

    fn stops(&mut self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A configuration: a file, then TOML text, then settings, each `key=value`.
type Written = (Option<PathBuf>, String, Vec<String>);

/// Compiles the model at `model` into the plan directory `output`. The parameters `frozen` are so beside those that the
/// configuration names; `binds` are sizes of symbolic dimensions. Returns the warnings.
#[pyfunction]
#[pyo3(signature = (model, output, config, frozen, binds))]
pub(crate) fn compile<'py>(
    py: Python<'py>,
    model: PathBuf,
    output: PathBuf,
    config: Written,
    frozen: Vec<String>,
    binds: BTreeMap<String, usize>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let refuse = |report: Report| error::of_report(py, &report);
    let mut config = read(&config).map_err(refuse)?;
    // A list that is set replaces the one before it, also that of the file.
    let patterns = &mut config.params.frozen;
    let more: Vec<String> = frozen.into_iter().filter(|name| !patterns.contains(name)).collect();
    patterns.extend(more);
    let request = Request { model, binds, evaluation: true, ..Request::default() };
    let cancelled = Arc::new(AtomicBool::new(false));
    let mut observer = Cancelled(Arc::clone(&cancelled));
    let (sender, mut receiver) = channel();
    // A thread of its own: Ctrl-C does not have to wait for the pass that runs.
    let thread = std::thread::spawn(move || {
        let result = made(&request, &config, &output, &mut observer);
        // Nobody waits any more after Ctrl-C.
        let _ = sender.send(result);
    });
    loop {
        let (next, same) = py.detach(move || (receiver.recv_timeout(TICK), receiver));
        receiver = same;
        match next {
            Ok(Ok(warnings)) => {
                return warnings.iter().map(|d| error::of_diagnostic(py, d)).collect();
            }
            Ok(Err(report)) => return Err(error::of_report(py, &report)),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| cancelled.store(true, Ordering::Relaxed))?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                // The panic was said when it happened.
                let _ = py.detach(|| thread.join());
                return Err(error::of_bug(py, "the compiler panicked, as said above".into()));
            }
        }
    }
}

fn read((path, tables, sets): &Written) -> Result<Config, Report> {
    let Some(path) = path else { return Config::parse(tables, "config", sets) };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| {
        Diagnostic::error(Code::ConfigUnreadable, format!("cannot read {name}: {e}"))
            .help("give the path of a train.toml, or the keys as arguments")
    })?;
    Config::parse(&format!("{text}\n{tables}"), &name, sets)
}

/// Compiles and writes a plan, unless the observer ends it; returns its warnings.
fn made(
    request: &Request,
    config: &Config,
    output: &Path,
    observer: &mut Cancelled,
) -> Result<Vec<Diagnostic>, Report> {
    let compiled =
        reproducer::guarded(request, config, || compilation::compile(request, config, observer))?;
    let Some(compiled) = compiled.filter(|_| !observer.stops()) else { return Ok(vec![]) };
    lints::refuse(&compiled.plan.lints)?;
    plan_dir::write(output, &compiled, plan_dir::Stored::Copy)?;
    let warns = |d: &Diagnostic| d.severity == frit_ir::Severity::Warning;
    let broken = compiled.weights_not_finite();
    let found = compiled.plan.lints.into_iter().filter(warns).chain(broken);
    Ok(config.unused.iter().cloned().chain(found).collect())
}
