//! The program `frit-run`: runs a plan directory without the compiler.

use crate::RunError;
use crate::arguments::Arguments;
use crate::compare;
use crate::device::cuda::doctor::{self, doctor};
use crate::eval::{self, evaluate};
use crate::interrupt;
use crate::plan_dir::limit_kernels_to;
use crate::run::{RunReport, run};
use clap::{CommandFactory, Parser};
use std::ffi::OsString;
use std::io::{ErrorKind, Write};

/// Run training steps from a plan directory, evaluate its model, compare its kernels with the interpreter, or check this
/// machine.
#[derive(Parser)]
#[command(
    name = "frit-run",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  frit-run plan --data data.safetensors --steps 100
  frit-run eval plan --data test.safetensors --weights trained.safetensors
  frit-run compare plan --data data.safetensors
  frit-run doctor plan"
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    training: Option<Arguments>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Evaluate a model: its loss over a data set, or its outputs.
    Eval(eval::Options),
    /// Compare every kernel of a training step, as the plan's device executes it, with the IR interpreter.
    Compare(compare::Options),
    /// Show which GPU libraries this machine has, which of a plan's requirements are missing, and what a GPU reaches.
    Doctor(doctor::Options),
}

/// The program's arguments, for completions and man pages.
pub fn command() -> clap::Command {
    Args::command()
}

/// Runs the program with these arguments, of which the first is its name. Returns the exit code.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let Args { command, training } = match Args::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Nothing can be done if this fails.
            let _ = error.print();
            return error.exit_code() as u8;
        }
    };
    match (command, training) {
        (Some(Command::Eval(options)), _) => {
            limit_kernels_to(&options.plan);
            match evaluate(&options) {
                Ok(report) => print(&report.map(|r| r.render(options.json)).unwrap_or_default()),
                Err(e) => fail(&e.to_string()),
            }
        }
        (Some(Command::Compare(options)), _) => match compare::compare(&options) {
            Ok(report) => match print(&report.render(options.json)) {
                0 => u8::from(!report.is_close()),
                code => code,
            },
            Err(e) => fail(&e.to_string()),
        },
        (Some(Command::Doctor(options)), _) => match doctor(&options) {
            Ok(findings) => {
                let text = if options.json { findings.json() } else { findings.table() };
                let code = print(&text);
                findings.complaint().map_or(code, |message| fail(&message))
            }
            Err(e) => fail(&e.to_string()),
        },
        (None, Some(training)) => train(training),
        (None, None) => unreachable!("invariant: without a command the plan is required"),
    }
}

fn train(arguments: Arguments) -> u8 {
    let plan = arguments.plan.clone();
    limit_kernels_to(&plan);
    let is_taken = arguments.writes_to_standard_output();
    match arguments.options().and_then(|options| run(&plan, &options)) {
        Ok(RunReport { stopped: Some(stopped), .. }) => {
            fail(&format!("{stopped}; {}", stopped.help()));
            1
        }
        Ok(RunReport { interrupted: Some(signal), .. }) => interrupt::leave(signal),
        Ok(report) => {
            if let Some(loss) = report.losses.last().filter(|_| report.rank == 0) {
                let skipped = match report.skipped {
                    0 => String::new(),
                    n => format!(", {n} of {} steps skipped", report.losses.len()),
                };
                let ended = report.early_end().map(|why| why + "\n").unwrap_or_default();
                let text = format!("loss {loss:.4}{skipped}\n{ended}");
                match is_taken {
                    // Nothing can be done if this fails.
                    true => _ = write!(std::io::stderr(), "{text}"),
                    false => return print(&text),
                }
            }
            0
        }
        Err(e @ RunError::NotFinite(_)) => {
            fail(&e.to_string());
            1
        }
        Err(e) => fail(&e.to_string()),
    }
}

/// Writes to standard output; the exit code. A reader may close a pipe early.
fn print(text: &str) -> u8 {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => fail(&format!("standard output: {e}")),
        _ => 0,
    }
}

fn fail(message: &str) -> u8 {
    // Nothing can be done if this fails.
    let _ = writeln!(std::io::stderr(), "error: {message}");
    2
}
