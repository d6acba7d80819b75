//! The verbs of the program `frit`, one file each.

pub mod bench;
pub mod compile;
pub mod completions;
pub mod diff;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod inspect;
pub(crate) mod launches;
pub mod passes;
pub mod plan_search;
pub mod report;
pub mod run;
pub mod simulate;
pub mod verify;

use crate::diagnostics::Report;
use clap::{Parser, Subcommand};
use std::fmt::Write;

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
    /// Compile a model into a plan.
    Compile(compile::Args),
    /// Show a plan.
    Inspect(inspect::Args),
    /// Write a plan as one self-contained HTML page.
    Report(report::Args),
    /// Prove that a plan is sound, or name the broken invariant.
    Verify(verify::Args),
    /// Predict a step of a plan on a cluster.
    Simulate(simulate::Args),
    /// Find the best ways to train a model on a cluster.
    PlanSearch(plan_search::Args),
    /// Train from a plan.
    Run(run::Args),
    /// Evaluate a model: its loss over a data set, or its outputs.
    Eval(frit_runtime::eval::Options),
    /// Say what changed from one plan to another.
    Diff(diff::Args),
    /// Run a plan against the same model in fp32: time, memory, loss, verdict.
    Bench(bench::Args),
    /// Say what this machine has, and lacks, to run plans on GPUs.
    Doctor(doctor::Args),
    /// Write a trained model as ONNX.
    Export(export::Args),
    /// List the passes in order.
    Passes(passes::Args),
    /// Print a completion script for a shell.
    Completions(completions::Args),
}

/// Runs one command; its standard output is returned.
///
/// # Errors
/// What the person must change.
pub fn execute(cli: &Cli) -> Result<String, Report> {
    match &cli.command {
        Command::Compile(args) => compile::execute(args),
        Command::Inspect(args) => inspect::execute(args),
        Command::Report(args) => report::execute(args),
        Command::Verify(args) => verify::execute(args),
        Command::Doctor(args) => doctor::execute(args),
        Command::Simulate(args) => simulate::execute(args),
        Command::PlanSearch(args) => plan_search::execute(args),
        Command::Run(args) => run::execute(args),
        Command::Eval(args) => eval::execute(args),
        Command::Diff(args) => diff::execute(args),
        Command::Bench(args) => bench::execute(args),
        Command::Export(args) => export::execute(args),
        Command::Passes(args) => passes::execute(args),
        Command::Completions(args) => completions::execute(args),
    }
}

/// A number of bytes for people.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// Rows as aligned columns; numbers, by their first character, to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let number = cell.starts_with(|c: char| c.is_ascii_digit());
            let pad = " ".repeat(width - cell.chars().count());
            let cell = if number { format!("{pad}{cell}") } else { format!("{cell}{pad}") };
            line += &cell;
            line += "  ";
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
