//! The commands of the program `frit`, one file each.

pub mod audit;
pub mod bench;
pub mod calibrate;
pub mod check_gradients;
pub mod compile;
pub mod completions;
pub mod diff;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod export;
pub mod init;
pub mod inspect;
pub mod man;
pub mod passes;
pub mod plan_search;
pub mod report;
pub mod run;
pub mod simulate;
pub mod tokenize;
pub mod verify;

use crate::diagnostics::Report;
use crate::render;
use clap::{Parser, Subcommand};
use frit_ir::{Code, Diagnostic};
use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};

/// A graph compiler for mixed-precision, fully sharded training.
#[derive(Debug, Parser)]
#[command(name = "frit", version, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "Examples:
  frit compile model.onnx --config train.toml --bind batch=8 -o plan
  frit inspect plan --view units
  frit run plan --data data.safetensors --steps 100 --metrics metrics.jsonl";

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Look at a model and write a configuration to start from.
    Init(init::Args),
    /// Compile a model into a plan.
    Compile(compile::Args),
    /// Show a plan.
    Inspect(inspect::Args),
    /// Write a plan as one self-contained HTML page.
    Report(report::Args),
    /// Prove that a plan is sound, or name the broken invariant.
    Verify(verify::Args),
    /// Compare a step of a plan with differences, rules, one rank and the interpreter.
    Audit(audit::Args),
    /// Predict a step of a plan on a cluster.
    Simulate(simulate::Args),
    /// Measure this machine, and describe it for predictions.
    Calibrate(calibrate::Args),
    /// Find the fastest plans for a model on a cluster.
    PlanSearch(plan_search::Args),
    /// Turn text into token shards.
    Tokenize(tokenize::Args),
    /// Train from a plan.
    Run(Box<run::Args>),
    /// Evaluate a model: its loss over a data set, or its outputs.
    Eval(frit_runtime::eval::Options),
    /// Compare two plans.
    Diff(diff::Args),
    /// Compare a plan with the same model in fp32: time, memory, loss.
    Bench(bench::Args),
    /// Compare the gradients that a model's functions state with finite differences.
    CheckGradients(check_gradients::Args),
    /// Check whether this machine can run plans on GPUs.
    Doctor(doctor::Args),
    /// Write a trained model as ONNX.
    Export(export::Args),
    /// Explain an error code or a lint.
    Explain(explain::Args),
    /// List the passes in order.
    Passes(passes::Args),
    /// Print a completion script for a shell.
    Completions(completions::Args),
    /// Write man pages.
    Man(man::Args),
}

/// Runs the program `frit` with these arguments, of which the first is its name. Returns the exit code: 0 if all went
/// well, 1 if a run failed, 2 if something must be changed.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let written = written(error.print());
            return written.map_or_else(|e| failed(&e.into()), |()| error.exit_code() as u8);
        }
    };
    match execute(&cli).and_then(|text| Ok(print(&text)?)) {
        Ok(()) => 0,
        Err(report) => failed(&report),
    }
}

/// Prints what is wrong; the exit code.
fn failed(report: &Report) -> u8 {
    render::print(&report.diagnostics);
    report.exit_code()
}

/// Writes to standard output.
///
/// # Errors
/// If it cannot be written, such as a file on a full disk. A reader may close a pipe early.
fn print(text: &str) -> Result<(), Diagnostic> {
    let mut out = anstream::stdout();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

fn written(result: io::Result<()>) -> Result<(), Diagnostic> {
    match result {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Diagnostic::error(Code::FileUnwritable, format!("standard output: {e}"))
                .help("the result is incomplete: free disk space, or write it elsewhere"))
        }
        _ => Ok(()),
    }
}

/// Runs one command; its standard output is returned.
///
/// # Errors
/// What the user must change.
pub fn execute(cli: &Cli) -> Result<String, Report> {
    match &cli.command {
        Command::Init(args) => init::execute(args),
        Command::Compile(args) => compile::execute(args),
        Command::Inspect(args) => inspect::execute(args),
        Command::Report(args) => report::execute(args),
        Command::Verify(args) => verify::execute(args),
        Command::Audit(args) => audit::execute(args),
        Command::CheckGradients(args) => check_gradients::execute(args),
        Command::Doctor(args) => doctor::execute(args),
        Command::Simulate(args) => simulate::execute(args),
        Command::Calibrate(args) => calibrate::execute(args),
        Command::PlanSearch(args) => plan_search::execute(args),
        Command::Tokenize(args) => tokenize::execute(args),
        Command::Run(args) => run::execute(args),
        Command::Eval(args) => eval::execute(args),
        Command::Diff(args) => diff::execute(args),
        Command::Bench(args) => bench::execute(args),
        Command::Export(args) => export::execute(args),
        Command::Explain(args) => explain::execute(args),
        Command::Passes(args) => passes::execute(args),
        Command::Completions(args) => completions::execute(args),
        Command::Man(args) => man::execute(args),
    }
}
