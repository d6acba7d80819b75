//! `frit export`: writes a trained model as ONNX, or its parameters as one file.

use crate::diagnostics::{Report, of_run};
use crate::export::{self, Options, Trained};
use crate::render;
use frit_ir::{Code, Diagnostic};
use frit_runtime::checkpoint::Checkpoint;
use frit_runtime::outputs;
use frit_runtime::plan_dir::is_plan;
use std::path::{Path, PathBuf};

/// Arguments of `frit export`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit run plan --data data.safetensors --steps 100 --checkpoint ckpt
  frit export ckpt --onnx trained.onnx
  frit export ckpt/step-00000100 --safetensors trained.safetensors
  frit export plan --weights trained.safetensors -o trained.onnx
  frit export ckpt --training -o continue.onnx
  frit export ckpt --adapter adapter -o merged.onnx

The model is in inference mode: BatchNormalization uses its trained running statistics, Dropout keeps everything.
Adapters are merged into the weights beside which they were trained.
Weights over 2 GiB are stored in FILE.onnx.data.")]
pub struct Args {
    /// A checkpoint, a directory of checkpoints, or, with --weights, a plan directory.
    #[arg(value_name = "CHECKPOINT|PLAN")]
    pub from: PathBuf,
    /// The weights for a plan, as `frit run --save` writes them.
    #[arg(long, value_name = "FILE.safetensors")]
    pub weights: Option<PathBuf>,
    /// Write the model: the original graph with the trained weights, in inference mode.
    #[arg(
        short = 'o',
        long,
        visible_alias = "output",
        value_name = "FILE.onnx",
        required_unless_present_any = ["safetensors", "adapter"]
    )]
    pub onnx: Option<PathBuf>,
    /// Write the adapter in PEFT's format into this folder.
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Keep BatchNormalization, Dropout and random masks in training mode.
    #[arg(long)]
    pub training: bool,
    /// Store the weights in FILE.onnx.data even if the model is smaller than 2 GiB.
    #[arg(long)]
    pub external_data: bool,
    /// Path of the model that the plan was compiled from, if it was moved.
    #[arg(long, value_name = "FILE.onnx")]
    pub model: Option<PathBuf>,
    /// Write the parameters of a checkpoint under the model's own names.
    #[arg(long, value_name = "FILE.safetensors", conflicts_with = "weights")]
    pub safetensors: Option<PathBuf>,
}

/// The files of a checkpoint, or of a directory of them.
fn files_within(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let inside = entries(folder);
    let deeper: Vec<PathBuf> = inside.iter().flat_map(|path| entries(path)).collect();
    inside.into_iter().chain(deeper).filter(|path| path.is_file()).collect()
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let kept = outputs::files_of(&args.from);
    let read = kept.iter().map(|path| ("the plan", path.as_path()));
    let mut read: Vec<_> =
        read.chain(args.weights.iter().map(|path| ("--weights", path.as_path()))).collect();
    let of_checkpoint = if is_plan(&args.from) { vec![] } else { files_within(&args.from) };
    read.extend(of_checkpoint.iter().map(|path| ("the checkpoint", path.as_path())));
    read.extend(args.model.iter().map(|path| ("--model", path.as_path())));
    let written =
        [("--onnx", args.onnx.as_deref()), ("--safetensors", args.safetensors.as_deref())];
    outputs::check(&written, &read).map_err(of_run)?;
    let mut written = String::new();
    let trained = match &args.weights {
        Some(weights) => Trained::of_plan(&args.from, weights)?,
        None if is_plan(&args.from) => {
            let what = format!("{} is a plan: its weights are not trained", args.from.display());
            return Err(Diagnostic::error(Code::ExportWeights, what)
                .help(
                    "give a checkpoint, or the weights that `frit run --save` wrote with --weights",
                )
                .into());
        }
        None => {
            let refuse =
                |e: frit_runtime::RunError| Diagnostic::error(Code::ExportWeights, e.to_string());
            let checkpoint = Checkpoint::open(&args.from).map_err(refuse)?;
            if let Some(path) = &args.safetensors {
                checkpoint.write_parameters(path).map_err(refuse)?;
                written += &format!("{}\n", path.display());
            }
            Trained::of_checkpoint(checkpoint)?
        }
    };
    if let Some(folder) = &args.adapter {
        for file in export::peft(&trained, folder)? {
            written += &format!("{}\n", file.display());
        }
    }
    if let Some(path) = &args.onnx {
        let options = Options {
            training: args.training,
            external_data: args.external_data,
            model: args.model.clone(),
            ..Options::default()
        };
        let found = export::onnx(&trained, &options, path)?;
        render::print(&found.warnings);
        for file in found.files {
            written += &format!("{}\n", file.display());
        }
    }
    Ok(written)
}
