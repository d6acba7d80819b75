//! Runs a plan directory: all that a training node needs.

use clap::Parser;
use frit_runtime::run::{RunOptions, run};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run training steps from a plan directory.
#[derive(Parser)]
#[command(version, after_help = "Example:\n  frit-run plan --data data.safetensors --steps 100")]
struct Args {
    /// The plan directory.
    plan: PathBuf,
    /// A .safetensors or .npz file with one tensor per input, or a token .bin (uint16).
    #[arg(long)]
    data: PathBuf,
    /// Steps, counted from the start of training.
    #[arg(long, default_value_t = 1)]
    steps: usize,
    /// Append one JSON object per step to this file.
    #[arg(long)]
    metrics: Option<PathBuf>,
    /// Write the first step's gradients to this safetensors file.
    #[arg(long)]
    dump_grads: Option<PathBuf>,
    /// Write the parameters after the last step to this safetensors file.
    #[arg(long, value_name = "FILE.safetensors")]
    save: Option<PathBuf>,
    /// Execute the kernels' bodies by the IR interpreter (slow).
    #[arg(long)]
    interpret: bool,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    threads: Option<usize>,
    /// Change a hyper-parameter of the plan.
    #[arg(long, value_name = "KEY=NUMBER", value_parser = setting)]
    set: Vec<(String, f64)>,
}

fn setting(text: &str) -> Result<(String, f64), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=NUMBER")?;
    Ok((key.into(), value.parse().map_err(|e| format!("{e}"))?))
}

fn main() -> ExitCode {
    let args = Args::parse();
    let options = RunOptions {
        steps: args.steps,
        data: args.data,
        metrics: args.metrics,
        dump_grads: args.dump_grads,
        save: args.save,
        interpret: args.interpret,
        threads: args.threads,
        hyper: args.set,
        progress: true,
    };
    match run(&args.plan, &options) {
        Ok(report) => {
            if let Some(loss) = report.losses.last() {
                // A reader that closed the pipe has seen what it wanted.
                let _ = writeln!(std::io::stdout(), "loss {loss:.4}");
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "error: {e}");
            ExitCode::from(2)
        }
    }
}
