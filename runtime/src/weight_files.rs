//! Files of weights as other libraries write them: shards with an index and folders (Hugging Face), adapters (PEFT).

use crate::RunError;
use crate::checkpoint::Checkpoint;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The name of a PEFT model within its wrapper, with which the names of an adapter's tensors begin.
pub const PEFT_PREFIX: &str = "base_model.model.";
/// Weights of an adapter, and its configuration beside them.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// See [`ADAPTER_WEIGHTS`].
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// How the index of shards ends.
const INDEX: &str = ".safetensors.index.json";
/// Files of a folder, of which the first there is counts.
const IN_FOLDER: [&str; 3] = ["model.safetensors.index.json", "model.safetensors", ADAPTER_WEIGHTS];

/// The files that a path names: itself, the shards of an index, or the weights of a folder.
///
/// # Errors
/// If a folder has no weights, or an index is damaged or names a file elsewhere.
pub fn expand(path: &Path) -> Result<Vec<PathBuf>, RunError> {
    let mut path = path.to_owned();
    if path.is_dir() {
        let found = IN_FOLDER.iter().map(|name| path.join(name)).find(|file| file.exists());
        path = found.ok_or_else(|| {
            let reason = match Checkpoint::open(&path) {
                Ok(_) => "the folder is of a checkpoint: continue it with `frit run --checkpoint DIR --resume`, evaluate it \
                          with `frit eval --checkpoint DIR`, or export it with `frit export DIR -o FILE`"
                    .into(),
                Err(_) => format!(
                    "the folder has no {}; give a file that `frit run --save` wrote, or a folder of Hugging Face libraries",
                    IN_FOLDER.join(", no ")
                ),
            };
            RunError::data(&path, reason)
        })?;
    }
    match path.to_string_lossy().ends_with(INDEX) {
        true => shards(&path),
        false => Ok(vec![path]),
    }
}

/// The files of an index, each once.
fn shards(index: &Path) -> Result<Vec<PathBuf>, RunError> {
    let map = read(index)?;
    let named = map["weight_map"].as_object().into_iter().flat_map(|m| m.values());
    let named: BTreeSet<&str> = named.filter_map(Value::as_str).collect();
    if named.is_empty() {
        return Err(RunError::data(index, "no index of shards: it has no `weight_map`"));
    }
    if let Some(name) = named.iter().find(|name| Path::new(name).components().count() != 1) {
        return Err(RunError::data(index, format!("the shard `{name}` is not beside it")));
    }
    Ok(named.into_iter().map(|name| index.with_file_name(name)).collect())
}

fn read(path: &Path) -> Result<Value, RunError> {
    let text = std::fs::read_to_string(path).map_err(RunError::io(path))?;
    serde_json::from_str(&text).map_err(|e| RunError::data(path, e.to_string()))
}

/// The last parts of names of float buffers that do not show by their content: what older versions of transformers added where a mask
/// is zero, and the frequencies of rotary embeddings.
const BUFFERS: [&str; 3] = ["masked_bias", "inv_freq", "original_inv_freq"];

/// Whether a tensor that is no parameter of the plan is none of any model: it has integers, is a causal mask, or has the name of a buffer.
pub(crate) fn is_buffer(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => {
            let last = name.rsplit('.').next().unwrap_or(name);
            BUFFERS.contains(&last) || is_causal_mask(shape, bytes)
        }
        Dtype::BOOL | Dtype::U8 | Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => true,
        _ => false,
    }
}

/// Whether the last two dimensions are equal, all others 1, and the elements are zero above the diagonal and else equal and not zero.
fn is_causal_mask(shape: &[usize], bytes: &[u8]) -> bool {
    let [others @ .., rows, columns] = shape else { return false };
    if rows != columns || *rows < 2 || others.iter().any(|n| *n != 1) {
        return false;
    }
    let size = bytes.len() / (rows * columns);
    let one = &bytes[..size];
    let is_zero = |element: &[u8]| element.iter().all(|byte| *byte == 0);
    let mut elements = bytes.chunks_exact(size).enumerate();
    !is_zero(one)
        && elements.all(|(i, element)| match i % columns <= i / columns {
            true => element == one,
            false => is_zero(element),
        })
}

/// Whether a tensor is of an adapter, as those of PEFT and of plans are named.
pub fn is_of_adapter(name: &str) -> bool {
    name.split('.').any(|part| part.starts_with("lora_"))
}

/// Keys of a configuration of PEFT that do not change what a trained adapter computes, whatever their values.
const NEUTRAL: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];
/// Initial values of an adapter with which the weights of the model stay as they were; others subtract from them.
const INITIAL: &[&str] = &["gaussian", "eva", "orthogonal"];

/// Whether an adapter of PEFT computes what the plan does: its configuration beside it, if it is there, is that of a plain LoRA with the
/// plan's `alpha / rank`.
///
/// # Errors
/// If it computes something else, or its configuration cannot be read.
pub(crate) fn check_adapter(weights: &Path, config: &str) -> Result<(), RunError> {
    let path = weights.with_file_name(ADAPTER_CONFIG);
    let Some(own) = scale(config).filter(|_| path.exists()) else { return Ok(()) };
    let adapter = read(&path)?;
    let (Some(alpha), Some(rank)) = (adapter["lora_alpha"].as_f64(), adapter["r"].as_f64()) else {
        return Err(RunError::data(&path, "it has no `lora_alpha` and `r`"));
    };
    let keys = adapter.as_object().into_iter().flatten();
    if let Some((key, value)) = keys.into_iter().find(|(key, value)| !is_plain(key, value)) {
        let reason = format!("an adapter with `{key}` = {value} is not supported");
        return Err(RunError::data(&path, reason));
    }
    let stabilized = adapter["use_rslora"].as_bool() == Some(true);
    let theirs = alpha / if stabilized { rank.sqrt() } else { rank };
    if (theirs - own).abs() <= 1e-12 * own.abs() {
        return Ok(());
    }
    let reason = format!(
        "the adapter's factor is {theirs}, the plan's adapter.alpha / adapter.rank is {own}; compile with --set \
         adapter.rank={rank} --set adapter.alpha={}",
        theirs * rank
    );
    Err(RunError::data(&path, reason))
}

/// Whether an entry of a configuration of PEFT leaves an adapter a plain LoRA. What is absent, off or empty does.
fn is_plain(key: &str, value: &Value) -> bool {
    let is_off = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    };
    match (key, value) {
        _ if is_off || NEUTRAL.contains(&key) => true,
        ("peft_type", Value::String(kind)) => kind == "LORA",
        ("bias", Value::String(trained)) => trained == "none",
        ("init_lora_weights", Value::Bool(_)) => true,
        ("init_lora_weights", Value::String(name)) => INITIAL.contains(&name.as_str()),
        _ => false,
    }
}

/// `adapter.alpha / adapter.rank` of a plan's configuration, which is TOML as the compiler prints it, if it has an adapter.
fn scale(config: &str) -> Option<f64> {
    let section = config.split("\n[").find_map(|s| s.strip_prefix("adapter]\n"))?;
    let number = |key: &str| -> Option<f64> {
        let mut lines = section.lines().filter_map(|line| line.split_once(" = "));
        lines.find(|(k, _)| *k == key)?.1.parse().ok()
    };
    section.contains("kind = \"lora\"").then_some(number("alpha")? / number("rank")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_indices_name_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let error = expand(dir.path()).unwrap_err().to_string();
        assert!(error.contains("has no model.safetensors.index.json"), "{error}");
        std::fs::write(at("model.safetensors"), "").unwrap();
        assert_eq!(expand(dir.path()).unwrap(), [at("model.safetensors")]);
        let index = at("model.safetensors.index.json");
        let put = |text: &str| std::fs::write(&index, text).unwrap();
        put(
            r#"{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}"#,
        );
        let both = [at("1.safetensors"), at("2.safetensors")];
        assert_eq!(expand(dir.path()).unwrap(), both);
        assert_eq!(expand(&index).unwrap(), both);
        assert_eq!(expand(&at("x.safetensors")).unwrap(), [at("x.safetensors")]);
        put(r#"{"weight_map": {"a": "../2.safetensors"}}"#);
        assert!(expand(&index).unwrap_err().to_string().contains("not beside it"));
        put("{}");
        assert!(expand(&index).unwrap_err().to_string().contains("weight_map"));
    }

    #[test]
    fn an_adapter_of_another_factor_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let weights = dir.path().join(ADAPTER_WEIGHTS);
        let plan =
            "[model]\n\n[adapter]\nkind = \"lora\"\nrank = 8\nalpha = 16.0\n\n[loss]\nalpha = 3\n";
        check_adapter(&weights, plan).unwrap();
        let put = |text: &str| std::fs::write(dir.path().join(ADAPTER_CONFIG), text).unwrap();
        put(r#"{"r": 4, "lora_alpha": 8}"#);
        check_adapter(&weights, plan).unwrap();
        check_adapter(&weights, "[adapter]\nkind = \"none\"\n").unwrap();
        put(
            r#"{"r": 4, "lora_alpha": 8, "peft_type": "LORA", "bias": "none", "use_dora": false, "rank_pattern": {},
            "megatron_core": "megatron.core", "init_lora_weights": "gaussian", "target_modules": ["q"]}"#,
        );
        check_adapter(&weights, plan).unwrap();
        for other in [
            r#""use_dora": true"#,
            r#""alpha_pattern": {"q": 3}"#,
            r#""rank_pattern": {"q": 3}"#,
            r#""peft_type": "LOHA""#,
            r#""bias": "all""#,
            r#""init_lora_weights": "pissa_niter_4""#,
            r#""a_later_variant": 1"#,
        ] {
            put(&format!(r#"{{"r": 4, "lora_alpha": 8, {other}}}"#));
            let error = check_adapter(&weights, plan).unwrap_err().to_string();
            assert!(error.contains("is not supported"), "{error}");
        }
        put(r#"{"r": 4, "lora_alpha": 8, "use_rslora": true}"#);
        let error = check_adapter(&weights, plan).unwrap_err().to_string();
        assert!(error.contains("adapter.alpha=16"), "{error}");
    }
}
