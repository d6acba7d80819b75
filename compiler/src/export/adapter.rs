//! Writes the adapter of a model in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

use super::trained::Trained;
use crate::config::Config;
use crate::diagnostics::Report;
use crate::source::Origin;
use frit_ir::plan::layout;
use frit_ir::{Code, Diagnostic};
use frit_passes::adapter;
use frit_runtime::weight_files::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX};
use frit_runtime::{files, tensors};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Writes the adapter into a folder; returns its files.
///
/// # Errors
/// If the plan has no adapter, its matrices are missing, or a file cannot be written.
pub fn peft(trained: &Trained, folder: &Path) -> Result<Vec<PathBuf>, Report> {
    let origin = Origin::read(&trained.source)?;
    if origin.adapters.is_empty() {
        let what = "the plan was compiled without an adapter";
        let help = "compile with adapter.kind = \"lora\", or export the model with -o";
        return Err(Diagnostic::error(Code::ExportSource, what).help(help).into());
    }
    let config = Config::load(Some(&trained.source.join(layout::CONFIGURATION)), &[])?;
    let mut matrices = Vec::new();
    for name in origin.matrices() {
        let matrix = trained.tensor(&name)?.ok_or_else(|| {
            let what = format!("{} holds no `{name}`", trained.path().display());
            Diagnostic::error(Code::ExportWeights, what).help("give weights of this model")
        })?;
        matrices.push((format!("{PEFT_PREFIX}{name}"), matrix));
    }
    let modules: Vec<&str> = origin.adapters.keys().map(|weight| adapter::module(weight)).collect();
    let description = json!({
        "peft_type": "LORA",
        "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha,
        "lora_dropout": config.adapter.dropout,
        "target_modules": modules,
        "fan_in_fan_out": origin.adapters.values().all(|a| !a.out_first),
        "bias": "none",
        "inference_mode": true,
        "base_model_name_or_path": null,
        "task_type": null,
    });
    let refuse = |path: &Path, e: String| {
        Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {e}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(|e| refuse(folder, e.to_string()))?;
    let (weights, text) = (folder.join(ADAPTER_WEIGHTS), folder.join(ADAPTER_CONFIG));
    let metadata = Some(("format".to_string(), "pt".to_string()));
    tensors::write(&weights, matrices, metadata).map_err(|e| refuse(&weights, e.to_string()))?;
    let pretty = format!("{description:#}\n");
    files::deliver(&text, |out| out.write_all(pretty.as_bytes()))
        .map_err(|e| refuse(&text, e.to_string()))?;
    Ok(vec![weights, text])
}
