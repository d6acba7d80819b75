//! `frit check-gradients`: compares gradients that a model's functions state with finite differences.

use super::compile::binds;
use crate::diagnostics::Report;
use crate::gradient_check::{self, Finding};
use crate::import::{self, ImportOptions};
use crate::render::table;
use frit_ir::{Code, Diagnostic};
use std::path::PathBuf;

/// Arguments of `frit check-gradients`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit check-gradients model.onnx --bind batch=2
  frit check-gradients model.json --tolerance 1e-3 --seed 7")]
pub struct Args {
    /// The model: an .onnx or .pt2 file, or a .json model.
    pub model: PathBuf,
    /// Set the size of a symbolic dimension.
    #[arg(long, value_name = "DIM=N")]
    pub bind: Vec<String>,
    /// The largest relative error that is none.
    #[arg(long, default_value_t = 1e-4)]
    pub tolerance: f64,
    /// Of the random operands.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let options = ImportOptions { binds: binds(&args.bind)?, ..ImportOptions::default() };
    let imported = import::load(&args.model, &options)?;
    let found = gradient_check::check(&imported.graph, args.seed).map_err(|e| {
        Diagnostic::error(Code::GradientsDiffer, format!("a function cannot be evaluated: {e}"))
    })?;
    if found.is_empty() {
        return Ok("no function of the model states a gradient\n".into());
    }
    let differs = |f: &Finding| f.error.is_none_or(|error| error > args.tolerance);
    let words = |f: &Finding| match f.error {
        None => "not finite".to_string(),
        Some(error) => format!("{error:.1e}"),
    };
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|f| {
            let same = if differs(f) { "differs" } else { "agrees" };
            let input = format!("{} {}", f.input, f.ty);
            vec![f.function.clone(), f.origin.to_string(), input, words(f), same.into()]
        })
        .collect();
    let text = table(&["function", "call", "input", "relative error", ""], &rows);
    let n = found.iter().filter(|f| differs(f)).count();
    if n == 0 {
        return Ok(text);
    }
    let message = format!(
        "{n} of {} gradients differ from finite differences of their functions",
        found.len()
    );
    let error = Diagnostic::error(Code::GradientsDiffer, message);
    let error = text.lines().fold(error, |e, line| e.note(line));
    Err(error.help("of an estimator or a reversal this is meant; of any other function the gradient is wrong").into())
}
