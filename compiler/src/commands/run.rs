//! `frit run`: trains with a plan.

use crate::diagnostics::{Report, of_run};
use frit_ir::{Code, Diagnostic};
use frit_runtime::arguments::Arguments;
use frit_runtime::interrupt;
use frit_runtime::plan_dir::limit_kernels_to;
use frit_runtime::run::run;
use std::io::Write;

/// Arguments of `frit run`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit run plan --data data.safetensors --steps 100 --metrics metrics.jsonl
  frit run plan --data tokens.bin --steps 1 --dump-grads grads.safetensors
  frit run plan --data data.npz --steps 100 --save trained.safetensors
  frit run plan --data data.npz --steps 100 --weights pretrained.safetensors
  frit run plan --data data.npz --steps 1000 --checkpoint ckpt --checkpoint-every 100 --keep 2 --resume
  frit run plan --data train.npz --validation test.npz --steps 1000 --checkpoint ckpt --checkpoint-every 100
  frit run plan --data train.npz --validation test.npz --steps 100000 --validate-every 100 --patience 5
  frit run plan --data data.npz --steps 3 --interpret
  frit run plan --data data.npz --steps 5 --trace trace.json    # open in ui.perfetto.dev
  torchrun --no-python --nproc-per-node 4 frit run plan --data data.npz    # a plan for 4 GPUs
  frit run plan --data data.npz --steps 100 --check-numerics
  frit run plan --data data.npz --steps 5 --numerics numerics.json
  frit inspect plan --numerics numerics.json")]
pub struct Args {
    #[command(flatten)]
    arguments: Arguments,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let arguments = args.arguments.clone();
    let plan = arguments.plan.clone();
    limit_kernels_to(&plan);
    let is_taken = arguments.writes_to_standard_output();
    let report = arguments.options().and_then(|options| run(&plan, &options)).map_err(of_run)?;
    if let Some(stopped) = &report.stopped {
        let message = format!("{stopped} ({})", report.summary());
        return Err(Diagnostic::error(Code::Diverged, message).help(stopped.help()).into());
    }
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
    let text = report.summary() + "\n";
    if is_taken {
        // As above.
        let _ = write!(anstream::stderr(), "{text}");
        return Ok(String::new());
    }
    Ok(text)
}
