//! `frit export`: a trained model back as ONNX, or its parameters as one file.

use crate::diagnostics::Report;
use crate::export::{self, Trained};
use frit_ir::Diagnostic;
use frit_runtime::checkpoint::Checkpoint;
use std::path::PathBuf;

/// Arguments of `frit export`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit run plan --data data.safetensors --steps 100 --checkpoint ckpt
  frit export ckpt --onnx trained.onnx
  frit export ckpt/step-00000100 --safetensors trained.safetensors
  frit export plan --weights trained.safetensors -o trained.onnx")]
pub struct Args {
    /// A checkpoint, a directory of checkpoints, or, with --weights, a plan directory.
    #[arg(value_name = "CHECKPOINT|PLAN")]
    pub from: PathBuf,
    /// The weights for a plan, as `frit run --save` writes them.
    #[arg(long, value_name = "FILE.safetensors")]
    pub weights: Option<PathBuf>,
    /// Write the model: the original graph with the trained weights.
    #[arg(
        short = 'o',
        long,
        visible_alias = "output",
        value_name = "FILE.onnx",
        required_unless_present = "safetensors"
    )]
    pub onnx: Option<PathBuf>,
    /// Write the parameters of a checkpoint under the model's own names.
    #[arg(long, value_name = "FILE.safetensors", conflicts_with = "weights")]
    pub safetensors: Option<PathBuf>,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let mut written = String::new();
    let trained = match &args.weights {
        Some(weights) => Trained::of_plan(&args.from, weights)?,
        None if args.from.join("plan.json").is_file() => {
            let what = format!("{} is a plan: its weights are not trained", args.from.display());
            return Err(Diagnostic::error("E111", what)
                .help(
                    "give a checkpoint, or the weights that `frit run --save` wrote with --weights",
                )
                .into());
        }
        None => {
            let refuse = |e: frit_runtime::RunError| Diagnostic::error("E111", e.to_string());
            let checkpoint = Checkpoint::open(&args.from).map_err(refuse)?;
            if let Some(path) = &args.safetensors {
                checkpoint.write_parameters(path).map_err(refuse)?;
                written += &format!("{}\n", path.display());
            }
            Trained::of_checkpoint(checkpoint)
        }
    };
    if let Some(path) = &args.onnx {
        write_aside(path, &export::onnx(&trained)?)?;
        written += &format!("{}\n", path.display());
    }
    Ok(written)
}

/// Writes a file beside `path` and moves it there.
fn write_aside(path: &std::path::Path, bytes: &[u8]) -> Result<(), Diagnostic> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let aside = path.with_file_name(name);
    let written = std::fs::write(&aside, bytes).and_then(|()| std::fs::rename(&aside, path));
    written.map_err(|e| {
        // There may be nothing to remove.
        let _ = std::fs::remove_file(&aside);
        Diagnostic::error("E091", format!("cannot write {}: {e}", path.display()))
    })
}
