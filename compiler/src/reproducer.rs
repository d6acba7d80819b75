//! Writes a reproducer for an internal error: a folder with the configuration, the graph before the failing pass, and the
//! command.
//!
//! The graph is obtained by compiling again, so successful compilations pay nothing.

use crate::compilation::{Observer, Request, compile};
use crate::config::Config;
use crate::diagnostics::Report;
use crate::render::quoted;
use frit_ir::Graph;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Compiles by `run`; if that ends in an internal error or a panic, a reproducer is written into the system's
/// temporary directory and named.
///
/// # Errors
/// Those of `run`, with a note that names the folder.
///
/// # Panics
/// If `run` does.
pub fn guarded<T>(
    request: &Request,
    config: &Config,
    run: impl FnOnce() -> Result<T, Report>,
) -> Result<T, Report> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Err(mut report)) if report.is_internal() => {
            let why = report.to_string();
            let note = note(write(request, config, &why, &std::env::temp_dir()));
            if let Some(last) = report.diagnostics.last_mut() {
                last.notes.push(note);
            }
            Err(report)
        }
        Ok(result) => result,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let why = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            let note = note(write(request, config, why, &std::env::temp_dir()));
            anstream::eprintln!("this is a bug in frit; {note}");
            resume_unwind(panic)
        }
    }
}

fn note(written: io::Result<PathBuf>) -> String {
    match written {
        Ok(folder) => format!("a reproducer was written to {}", folder.display()),
        Err(e) => format!("a reproducer could not be written: {e}"),
    }
}

/// Writes what repeats an internal error into a folder of `parent`, whose name depends on the compilation and on `why`.
///
/// # Errors
/// What keeps a file from being written.
pub fn write(request: &Request, config: &Config, why: &str, parent: &Path) -> io::Result<PathBuf> {
    let model = fs::canonicalize(&request.model).unwrap_or_else(|_| request.model.clone());
    let toml = config.to_toml();
    let digest = Sha256::digest(format!("{}\n{toml}\n{why}", model.display()));
    let name: String = digest[..6].iter().map(|b| format!("{b:02x}")).collect();
    let folder = parent.join(format!("frit-internal-error-{name}"));
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("train.toml"), toml)?;
    let mut last = Last::default();
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    // How it ends is known; what it saw before is what is asked.
    let _ = catch_unwind(AssertUnwindSafe(|| compile(request, config, &mut last).map(|_| ())));
    set_hook(hook);
    let mut text = format!("#!/bin/sh\n# frit {}\n", env!("CARGO_PKG_VERSION"));
    for line in why.lines() {
        let _ = writeln!(text, "# {line}");
    }
    if let Some((after, graph)) = last.0 {
        fs::write(folder.join("before.frit"), graph.to_string())?;
        let _ = writeln!(
            text,
            "# before.frit is the graph after pass `{after}`, the last that succeeded"
        );
    }
    text += &command(request, &model);
    fs::write(folder.join("repeat.sh"), text)?;
    Ok(folder)
}

/// The command that repeats a compilation, beside its configuration.
fn command(request: &Request, model: &Path) -> String {
    let mut line = format!(
        "cd \"$(dirname \"$0\")\" && exec frit compile {} --config train.toml --verify-each -o plan",
        quoted(&model.display().to_string())
    );
    for (dim, n) in &request.binds {
        line += &format!(" --bind {}", quoted(&format!("{dim}={n}")));
    }
    for pass in &request.disabled {
        line += &format!(" --disable-pass {}", quoted(pass));
    }
    if let Some(pass) = &request.stop_after {
        line += &format!(" --stop-after {}", quoted(pass));
    }
    if request.allow_external_data {
        line += " --allow-external-data";
    }
    line + "\n"
}

/// The last pass that succeeded, and the graph after it.
#[derive(Default)]
struct Last(Option<(String, Graph)>);

impl Observer for Last {
    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        self.0 = Some((name.to_string(), graph.clone()));
    }
}
