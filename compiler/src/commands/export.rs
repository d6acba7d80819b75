//! `frit export`: a trained model back as ONNX.

use crate::diagnostics::Report;
use crate::export;
use frit_ir::Diagnostic;
use std::path::PathBuf;

/// Arguments of `frit export`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit run plan --data data.safetensors --steps 100 --save trained.safetensors
  frit export plan --weights trained.safetensors -o trained.onnx")]
pub struct Args {
    /// The plan directory.
    pub plan: PathBuf,
    /// The weights, as `frit run --save` writes them.
    #[arg(long, value_name = "FILE.safetensors")]
    pub weights: PathBuf,
    /// The model to write: the original graph with these weights.
    #[arg(short, long, value_name = "FILE.onnx")]
    pub output: PathBuf,
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let model = export::onnx(&args.plan, &args.weights)?;
    let mut name = args.output.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let aside = args.output.with_file_name(name);
    let written =
        std::fs::write(&aside, &model).and_then(|()| std::fs::rename(&aside, &args.output));
    written.map_err(|e| {
        // There may be nothing to remove.
        let _ = std::fs::remove_file(&aside);
        Diagnostic::error("E091", format!("cannot write {}: {e}", args.output.display()))
    })?;
    Ok(format!("{}\n", args.output.display()))
}
