//! Runs a plan directory: all that a training node needs.

use clap::Parser;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::compare;
use frit_runtime::eval::{self, evaluate};
use frit_runtime::interrupt;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run training steps from a plan directory, evaluate its model, or compare its kernels with the interpreter.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  frit-run plan --data data.safetensors --steps 100
  frit-run eval plan --data test.safetensors --weights trained.safetensors
  frit-run compare plan --data data.safetensors"
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    training: Option<Training>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Evaluate a model: its loss over a data set, or its outputs.
    Eval(eval::Options),
    /// Compare every kernel of a training step, as the plan's device executes it, with the IR interpreter.
    Compare(compare::Options),
}

#[derive(clap::Args)]
struct Training {
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
    /// Write checkpoints into this directory: after the last step, on Ctrl-C, and as --checkpoint-every says.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Write a checkpoint after every so many steps.
    #[arg(long, value_name = "STEPS", requires = "checkpoint", value_parser = at_least_one)]
    checkpoint_every: Option<usize>,
    /// Continue from the latest checkpoint of the directory; from the start if there is none.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Keep only the newest checkpoints.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = at_least_one)]
    keep: Option<usize>,
    /// Take the loss over the examples of this file between steps, and after the last; by default the file
    /// of the configuration's data.validation. The file `best` names the best checkpoint.
    #[arg(long, value_name = "FILE")]
    validation: Option<PathBuf>,
    /// Steps between two validations; by default those between two checkpoints.
    #[arg(long, value_name = "STEPS", requires = "validation", value_parser = at_least_one)]
    validate_every: Option<usize>,
    /// Write when each task of the last step ran, beside its predicted time, as a Chrome trace.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Write the moving average of the parameters (optimizer.ema) after the last step to this file.
    #[arg(long, value_name = "FILE.safetensors")]
    save_ema: Option<PathBuf>,
    /// Write what the run used of its device, memory and launches, to this JSON file.
    #[arg(long, value_name = "FILE.json")]
    usage: Option<PathBuf>,
    /// Execute the kernels' bodies by the IR interpreter (slow).
    #[arg(long)]
    interpret: bool,
    /// Stop at the first task that produces inf or NaN.
    #[arg(long)]
    check_numerics: bool,
    /// Write histograms of exponents by scope to this JSON file.
    #[arg(long, value_name = "FILE.json")]
    numerics: Option<PathBuf>,
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

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "give a whole number of at least 1".into())
}

fn main() -> ExitCode {
    let Args { command, training } = Args::parse();
    match (command, training) {
        (Some(Command::Eval(options)), _) => match evaluate(&options) {
            Ok(report) => {
                let text = report.map(|r| r.render(options.json)).unwrap_or_default();
                // A reader that closed the pipe has seen what it wanted.
                let _ = write!(std::io::stdout(), "{text}");
                ExitCode::SUCCESS
            }
            Err(e) => fail(&e.to_string()),
        },
        (Some(Command::Compare(options)), _) => match compare::compare(&options) {
            Ok(report) => {
                // As above.
                let _ = write!(std::io::stdout(), "{}", report.render(options.json));
                if report.is_close() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(e) => fail(&e.to_string()),
        },
        (None, Some(training)) => train(training),
        (None, None) => unreachable!("invariant: without a command the plan is required"),
    }
}

fn train(args: Training) -> ExitCode {
    let checkpoint = args.checkpoint.clone().map(|dir| CheckpointOptions {
        dir,
        every: args.checkpoint_every,
        resume: args.resume,
        keep: args.keep,
    });
    // Without checkpoints there is nothing to do before leaving.
    let stop = match checkpoint.as_ref().map(|_| interrupt::watch()).transpose() {
        Ok(stop) => stop,
        Err(e) => return fail(&format!("cannot watch for signals: {e}")),
    };
    let options = RunOptions {
        steps: args.steps,
        data: args.data,
        metrics: args.metrics,
        dump_grads: args.dump_grads,
        save: args.save,
        checkpoint,
        validation: args
            .validation
            .map(|data| ValidationOptions { data, every: args.validate_every }),
        stop,
        trace: args.trace,
        save_ema: args.save_ema,
        usage: args.usage,
        interpret: args.interpret,
        threads: args.threads,
        hyper: args.set,
        check_numerics: args.check_numerics,
        numerics: args.numerics,
        progress: true,
    };
    match run(&args.plan, &options) {
        Ok(RunReport { interrupted: Some(signal), .. }) => interrupt::leave(signal),
        Ok(report) => {
            if let Some(loss) = report.losses.last().filter(|_| report.rank == 0) {
                // A reader that closed the pipe has seen what it wanted.
                let _ = writeln!(std::io::stdout(), "loss {loss:.4}");
            }
            ExitCode::SUCCESS
        }
        Err(e) => fail(&e.to_string()),
    }
}

fn fail(message: &str) -> ExitCode {
    // There is no other place to complain to.
    let _ = writeln!(std::io::stderr(), "error: {message}");
    ExitCode::from(2)
}
