//! `frit audit`: compares a step of a plan with differences, rules, one rank and the interpreter.

use crate::audit::{Options, audit};
use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use frit_runtime::data::{Source, TokenDType};
use std::path::PathBuf;

/// Arguments of `frit audit`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit audit plan
  frit audit plan --data data.safetensors
  frit audit plan --parameters 'h.0.**' --directions 8
  frit audit plan --json | jq '.gradients[] | select(.verdict == \"wrong\")'

Gradients are compared with central differences of the imported model in f64, updates with the optimizer's rule, several ranks with
one, and kernels with the interpreter. Digits are decimal digits that agree; as many as expected are what rounding leaves. A verdict
is `right`, `rounding` (the gradient is smaller than its rounding errors), `stated` (a function states a gradient that is not its
derivative), `kink` (differences say nothing there) or `WRONG`, with exit code 1.
The interpreter is slow: audit a small model of the same layers.")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// Files of data, as for `frit run`; by default random numbers.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// The type of the tokens in .bin files without a header; by default u16.
    #[arg(long, value_name = "TYPE", requires = "data")]
    pub token_dtype: Option<TokenDType>,
    /// Compare only the gradients of parameters of these names or patterns.
    #[arg(long, value_name = "PATTERN", num_args = 1..)]
    pub parameters: Vec<String>,
    /// Random directions of each parameter.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub directions: u64,
    /// Seconds that the differences may take; an audit that would take longer is refused before it begins.
    #[arg(long, default_value_t = 600)]
    pub seconds: u64,
    /// Of the random directions.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE.onnx")]
    pub model: Option<PathBuf>,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Read external data of the model also outside of the model's folder.
    #[arg(long)]
    pub allow_external_data: bool,
    /// As JSON, with stable keys.
    #[arg(long)]
    pub json: bool,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let found = audit(&Options {
        plan: args.plan.clone(),
        data: Source::new(args.data.clone(), args.token_dtype),
        model: args.model.clone(),
        parameters: args.parameters.clone(),
        directions: args.directions as usize,
        seconds: args.seconds,
        seed: args.seed,
        threads: args.threads,
        allow_external_data: args.allow_external_data,
        progress: true,
    })?;
    let (page, wrong) = (found.render(args.json), found.wrong());
    if wrong.is_empty() {
        return Ok(page);
    }
    super::print(&page)?;
    let n = frit_ir::counted(wrong.len(), "comparison");
    let message = format!("{n} of the audit of {} failed", args.plan.display());
    let error = Diagnostic::error(Code::AuditFailed, message);
    let error = wrong.iter().take(NOTES).fold(error, |e, line| e.note(line));
    let help = "do not train with this plan; if it was not edited, this is a bug in frit: please report it with the model";
    Err(error.help(help).into())
}

/// Comparisons that the message lists.
const NOTES: usize = 12;
