//! The given models: their loss on the first batch equals PyTorch's in fp64.

use super::build::{bind, run};
use crate::import::{Imported, load};
use frit_ir::{DType, Tensor, TensorType};
use safetensors::SafeTensors;
use std::path::PathBuf;

fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(model)
}

/// The first `n` examples of a tensor of the data.
fn first(data: &SafeTensors<'_>, name: &str, n: usize) -> Tensor {
    let view = data.tensor(name).expect("the tensor");
    let mut dims = view.shape().to_vec();
    let bytes = &view.data()[..view.data().len() / dims[0] * n];
    dims[0] = n;
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::I64 => DType::I64,
        other => panic!("{other:?}"),
    };
    Tensor::from_bytes(TensorType::new(dtype, dims), bytes).expect("the bytes fit")
}

/// Mean cross-entropy of logits `[.., V]`.
fn cross_entropy(logits: &Tensor, labels: &Tensor) -> f64 {
    let labels = labels.to_i64s();
    let logits = logits.to_f64s();
    let width = logits.len() / labels.len();
    let rows = logits.chunks(width).zip(&labels).map(|(row, label)| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max - row[*label as usize]
    });
    rows.sum::<f64>() / labels.len() as f64
}

/// Imports every file of the model and compares its loss; the models by file name.
fn check(model: &str, batch: usize) -> Vec<(String, Imported)> {
    let folder = folder(model);
    let data = std::fs::read(folder.join("data.safetensors")).expect("the data");
    let data = SafeTensors::deserialize(&data).expect("safetensors");
    let reference = std::fs::read_to_string(folder.join("reference.json")).expect("the reference");
    let reference: serde_json::Value = serde_json::from_str(&reference).expect("JSON");
    let expected = reference["fp64"]["loss"][0].as_f64().expect("a loss");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("the folder")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "onnx"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    let mut models = Vec::new();
    for file in files {
        let imported = load(&file, &bind(&[("batch", batch)])).unwrap_or_else(|e| panic!("{e}"));
        let names = data.names();
        let feeds: Vec<(&str, Tensor)> = names
            .iter()
            .filter(|n| **n != "labels")
            .map(|n| (&**n, first(&data, n, batch)))
            .collect();
        let logits = run(&imported, &feeds).remove(0);
        let loss = cross_entropy(&logits, &first(&data, "labels", batch));
        assert!((loss - expected).abs() < 1e-5, "{}: {loss} is not {expected}", file.display());
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        models.push((name, imported));
    }
    models
}

fn ops(imported: &Imported) -> Vec<String> {
    imported.graph.nodes().map(|(_, n)| n.op.name().to_string()).collect()
}

#[test]
fn mlp_computes_pytorchs_loss() {
    for (_, imported) in check("mlp", 16) {
        let (graph, ops) = (&imported.graph, ops(&imported));
        assert_eq!(graph.params().count(), 6);
        assert_eq!(ops.iter().filter(|o| *o == "matmul").count(), 3);
        assert!(!ops.iter().any(|o| o == "constant"));
        let scopes: Vec<&str> = graph.nodes().map(|(_, n)| &*n.origin.scope).collect();
        assert!(scopes.contains(&"fc2"), "{scopes:?}");
        assert_eq!(graph.outputs[0].name, "logits");
    }
}

#[test]
fn gpt2_computes_pytorchs_loss() {
    for (file, imported) in check("gpt2", 8) {
        let ops = ops(&imported);
        let count = |name: &str| ops.iter().filter(|o| *o == name).count();
        // The exporter's own optimizer gathers the constant positions itself.
        let tables = if file == "model_optimized.onnx" { 1 } else { 2 };
        assert_eq!(count("embedding"), tables, "{file}: {ops:?}");
        assert_eq!(count("cum_sum") + count("gather_nd") + count("slice"), 0, "{ops:?}");
        let scopes: Vec<&str> = imported.graph.nodes().map(|(_, n)| &*n.origin.scope).collect();
        assert!(scopes.iter().any(|s| s.ends_with("h.1.attn")), "{scopes:?}");
        for (value, param) in imported.graph.params() {
            assert_eq!(param.kind, frit_ir::ops::ParamKind::Trainable, "{}", param.name);
            assert_eq!(imported.graph.value(value).name.as_deref(), Some(&*param.name));
        }
    }
}

#[test]
fn a_damaged_model_file_does_not_crash() {
    let bytes = std::fs::read(folder("mlp").join("model.onnx")).expect("the model");
    let load = |bytes: Vec<u8>| {
        let folder = std::path::Path::new("/nonexistent");
        crate::import::onnx::import(bytes.into(), "mlp", folder, &bind(&[("batch", 2)]))
    };
    let edges = (0..600).chain(bytes.len() - 600..bytes.len());
    for n in edges.chain((600..bytes.len()).step_by(9973)) {
        assert!(load(bytes[..n].to_vec()).is_err(), "cut at {n}");
        let mut damaged = bytes.clone();
        damaged[n] ^= 1 << (n % 8);
        let _ = load(damaged);
    }
}
