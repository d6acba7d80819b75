//! Writes the adapter of a model in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.
//!
//! Parameters of the model that train beside the adapter are PEFT's `modules_to_save`, which are whole modules.

use super::trained::Trained;
use crate::config::Config;
use crate::diagnostics::Report;
use crate::source::Origin;
use frit_ir::plan::layout;
use frit_ir::{Code, Diagnostic, pattern};
use frit_passes::adapter;
use frit_runtime::weight_files::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX};
use frit_runtime::{files, tensors};
use serde_json::json;
use std::collections::BTreeSet;
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
    let lacks = |name: &str| {
        let what = format!("{} holds no `{name}`", trained.path().display());
        Diagnostic::error(Code::ExportWeights, what).help("give weights of this model")
    };
    let mut stored = Vec::new();
    let matrices: BTreeSet<String> = origin.matrices().collect();
    let (also, saved) = trained_beside(trained, &matrices, &config)?;
    for name in matrices.iter().map(String::as_str).chain(also) {
        let tensor = trained.tensor(name)?.ok_or_else(|| lacks(name))?;
        stored.push((format!("{PEFT_PREFIX}{name}"), tensor));
    }
    let modules: Vec<&str> = origin.adapters.keys().map(|weight| adapter::module(weight)).collect();
    let description = json!({
        "peft_type": "LORA",
        "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha,
        "lora_dropout": config.adapter.dropout,
        "target_modules": modules,
        "modules_to_save": if saved.is_empty() { json!(null) } else { json!(saved) },
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
    tensors::write(&weights, stored, metadata).map_err(|e| refuse(&weights, e.to_string()))?;
    let pretty = format!("{description:#}\n");
    files::deliver(&text, |out| out.write_all(pretty.as_bytes()))
        .map_err(|e| refuse(&text, e.to_string()))?;
    Ok(vec![weights, text])
}

/// The parameters of modules of which a parameter of the model trains, and these modules. What the weights leave out is as the model
/// has it.
fn trained_beside<'t>(
    trained: &'t Trained,
    matrices: &BTreeSet<String>,
    config: &Config,
) -> Result<(Vec<&'t str>, BTreeSet<&'t str>), Diagnostic> {
    let params = &config.params;
    let named: Vec<String> = adapter::trainable(&params.trainable);
    let module_of = |name: &'t str| name.rsplit_once('.').map(|(module, _)| module);
    let mut modules = BTreeSet::new();
    let own = || trained.names.iter().filter(|name| !matrices.contains(*name));
    for name in own() {
        if !pattern::any(&named, name) || pattern::any(&params.frozen, name) {
            continue;
        }
        modules.insert(module_of(name).ok_or_else(|| {
            let what = format!("`{name}` trains and is in no module, so that PEFT cannot load it");
            let help = "export the model with -o, or the parameters with --safetensors";
            Diagnostic::error(Code::ExportWeights, what).help(help)
        })?);
    }
    let names = own().map(String::as_str);
    let also = names.filter(|name| module_of(name).is_some_and(|m| modules.contains(m)));
    Ok((also.collect(), modules))
}
