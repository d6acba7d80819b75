//! `frit run`: training steps from a plan.

use crate::diagnostics::Report;
use frit_ir::Diagnostic;
use frit_runtime::RunError;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::interrupt;
use frit_runtime::validation::ValidationOptions;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `frit run`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit run plan --data data.safetensors --steps 100 --metrics metrics.jsonl
  frit run plan --data tokens.bin --steps 1 --dump-grads grads.safetensors
  frit run plan --data data.npz --steps 100 --save trained.safetensors
  frit run plan --data data.npz --steps 1000 --checkpoint ckpt --checkpoint-every 100 --keep 2 --resume
  frit run plan --data train.npz --validation test.npz --steps 1000 --checkpoint ckpt --checkpoint-every 100
  frit run plan --data data.npz --steps 3 --interpret
  frit run plan --data data.npz --steps 5 --trace trace.json    # open in ui.perfetto.dev
  torchrun --no-python --nproc-per-node 4 frit run plan --data data.npz    # a plan for 4 GPUs
  frit run plan --data data.npz --steps 100 --check-numerics
  frit run plan --data data.npz --steps 5 --numerics numerics.json
  frit inspect plan --numerics numerics.json")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// A .safetensors or .npz file with one tensor per input, or a token .bin (uint16).
    #[arg(long)]
    pub data: PathBuf,
    /// Steps, counted from the start of training.
    #[arg(long, default_value_t = 1)]
    pub steps: usize,
    /// Append one JSON object per step to this file.
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Write the first step's gradients, unscaled and unclipped, to this safetensors file.
    #[arg(long, value_name = "FILE")]
    pub dump_grads: Option<PathBuf>,
    /// Write the parameters after the last step to this safetensors file.
    #[arg(long, value_name = "FILE.safetensors")]
    pub save: Option<PathBuf>,
    /// Write checkpoints into this directory: after the last step, on Ctrl-C, and as --checkpoint-every says.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Write a checkpoint after every so many steps.
    #[arg(long, value_name = "STEPS", requires = "checkpoint", value_parser = at_least_one)]
    pub checkpoint_every: Option<usize>,
    /// Continue from the latest checkpoint of the directory; from the start if there is none.
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
    /// Keep only the newest checkpoints.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = at_least_one)]
    pub keep: Option<usize>,
    /// Take the loss over the examples of this file between steps, and after the last; by default the file
    /// of the configuration's data.validation. The file `best` names the best checkpoint.
    #[arg(long, value_name = "FILE")]
    pub validation: Option<PathBuf>,
    /// Steps between two validations; by default those between two checkpoints.
    #[arg(long, value_name = "STEPS", requires = "validation", value_parser = at_least_one)]
    pub validate_every: Option<usize>,
    /// Write when each task of the last step ran, beside its predicted time, as a Chrome trace.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Write the moving average of the parameters (optimizer.ema) after the last step to this file.
    #[arg(long, value_name = "FILE.safetensors")]
    pub save_ema: Option<PathBuf>,
    /// Write what the run used of its device, memory and launches, to this JSON file.
    #[arg(long, value_name = "FILE.json")]
    pub usage: Option<PathBuf>,
    /// Execute the kernels' bodies by the IR interpreter instead of machine code (slow).
    #[arg(long)]
    pub interpret: bool,
    /// Stop at the first task that produces inf or NaN, and say which operation and why (slow).
    #[arg(long)]
    pub check_numerics: bool,
    /// Write histograms of exponents by scope to this JSON file, for `frit inspect --numerics` (slow).
    #[arg(long, value_name = "FILE.json")]
    pub numerics: Option<PathBuf>,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Change a hyper-parameter of the plan, such as optimizer.lr=3e-4.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "give a whole number of at least 1".into())
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let mut hyper = Vec::new();
    for text in &args.set {
        let parsed = text.split_once('=').and_then(|(k, v)| Some((k.to_string(), v.parse().ok()?)));
        hyper.push(parsed.ok_or_else(|| {
            Diagnostic::error("E097", format!("`--set {text}` is not KEY=NUMBER"))
                .help("write for example --set optimizer.lr=3e-4")
        })?);
    }
    let checkpoint = args.checkpoint.clone().map(|dir| CheckpointOptions {
        dir,
        every: args.checkpoint_every,
        resume: args.resume,
        keep: args.keep,
    });
    // Without checkpoints there is nothing to do before leaving.
    let stop = match &checkpoint {
        Some(_) => Some(
            interrupt::watch()
                .map_err(|e| Diagnostic::error("E100", format!("cannot watch for signals: {e}")))?,
        ),
        None => None,
    };
    let options = frit_runtime::run::RunOptions {
        steps: args.steps,
        data: args.data.clone(),
        metrics: args.metrics.clone(),
        dump_grads: args.dump_grads.clone(),
        save: args.save.clone(),
        checkpoint,
        validation: args
            .validation
            .clone()
            .map(|data| ValidationOptions { data, every: args.validate_every }),
        stop,
        trace: args.trace.clone(),
        save_ema: args.save_ema.clone(),
        usage: args.usage.clone(),
        interpret: args.interpret,
        threads: args.threads,
        hyper,
        check_numerics: args.check_numerics,
        numerics: args.numerics.clone(),
        progress: true,
    };
    let report = frit_runtime::run::run(&args.plan, &options).map_err(diagnostic)?;
    if let Some(signal) = report.interrupted {
        if report.rank > 0 {
            interrupt::leave(signal);
        }
        let step = report.start + report.losses.len();
        // Whoever sent the signal may have closed the terminal.
        let _ = writeln!(
            anstream::stderr(),
            "interrupted after {step} steps, which are saved; continue with --resume"
        );
        interrupt::leave(signal);
    }
    if report.rank > 0 {
        return Ok(String::new());
    }
    let (first, last) = (report.losses.first(), report.losses.last());
    Ok(match (first, last) {
        (Some(first), Some(last)) => {
            let validation = report.validation.last();
            let validation = validation.map(|(_, loss)| format!(", validation loss {loss:.4}"));
            let validation = validation.unwrap_or_default();
            format!("{} steps, loss {first:.4} -> {last:.4}{validation}\n", report.losses.len())
        }
        _ if report.start > 0 => format!("nothing to do after {} steps\n", report.start),
        _ => "no steps\n".into(),
    })
}

fn diagnostic(error: RunError) -> Diagnostic {
    let RunError::NotFinite(found) = error else {
        return Diagnostic::error("E100", error.to_string());
    };
    let mut diagnostic = Diagnostic::error("E101", found.to_string()).help(&found.remedy);
    diagnostic.notes.clone_from(&found.facts);
    diagnostic.note(format!("likely cause: {}", found.cause))
}
