//! Packed documents: no value of a document depends on another document.

use crate::pairs::{Row, rows};
use crate::parity;
use crate::support::{Planned, file, plan, plan_at, plan_to_evaluate, resumed_losses};
use frit_runtime::run::{RunOptions, run};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::{Path, PathBuf};

/// Models with the lengths of their sequences, their largest token, which separates documents here, with positions
/// that are learned, rotate, or are learned with an offset.
const MODELS: [(&str, usize, i64); 5] = [
    ("gpt2/model.onnx", 32, 256),
    ("gpt2/model_sdpa.onnx", 32, 256),
    ("gpt2/model_torchscript.onnx", 32, 256),
    ("llama/model.onnx", 32, 259),
    ("opt/model.onnx", 16, 150),
];

/// One step of plain gradient descent in f32.
const DESCENT: [&str; 5] = [
    "optimizer.kind=sgd",
    "optimizer.lr=0.5",
    "optimizer.weight_decay=0",
    "optimizer.clip_grad_norm=0",
    "precision.compute=fp32",
];

/// Tokens of a document that ends with the separator.
fn document(seed: usize, length: usize, separator: i64) -> Vec<i64> {
    let token = |i: usize| ((seed * 37 + i * i * 11 + i * 5) % 97) as i64;
    (0..length - 1).map(token).chain([separator]).collect()
}

/// The labels of tokens: the next ones.
fn labels(tokens: &[i64]) -> Vec<i64> {
    tokens[1..].iter().copied().chain([3]).collect()
}

fn save(path: &Path, length: usize, ids: &[Vec<i64>], labels: &[Vec<i64>]) -> PathBuf {
    let bytes = |rows: &[Vec<i64>]| -> Vec<u8> {
        rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect()
    };
    let (ids, labels, n) = (bytes(ids), bytes(labels), ids.len());
    let view = |bytes| TensorView::new(Dtype::I64, vec![n, length], bytes).expect("fits");
    let tensors = [("input_ids", view(&ids)), ("labels", view(&labels))];
    safetensors::serialize_to_file(tensors, None, path).expect("written");
    path.into()
}

/// A step over all examples of a file: its loss, and the parameters after it.
fn step(planned: &Planned, data: &Path) -> (f64, Vec<u8>) {
    let saved = planned.dir.path().join("saved.safetensors");
    let options = RunOptions {
        steps: 1,
        data: data.to_path_buf().into(),
        save: Some(saved.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    (report.losses[0], std::fs::read(saved).expect("parameters"))
}

/// The parameters of a file of weights, as numbers.
fn numbers(file: &[u8]) -> Vec<f64> {
    let tensors = safetensors::SafeTensors::deserialize(file).expect("parameters");
    let mut all: Vec<_> = tensors.tensors();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let floats = |view: &TensorView<'_>| -> Vec<f64> {
        let (words, _) = view.data().as_chunks::<4>();
        words.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    };
    all.iter().flat_map(|(_, view)| floats(view)).collect()
}

fn separated(separator: i64) -> String {
    format!("data.document_separator={separator}")
}

#[test]
fn a_packed_sequence_trains_as_its_documents_do() {
    let dir = tempfile::tempdir().expect("a directory");
    for (model, length, separator) in MODELS {
        let sizes = [length / 2 - 3, 1, length / 4, length - length / 2 - length / 4 + 2];
        let documents: Vec<Vec<i64>> =
            sizes.iter().enumerate().map(|(i, n)| document(i, *n, separator)).collect();
        let packed = documents.concat();
        assert_eq!(packed.len(), length);
        // Each by itself: what follows it neither counts nor is attended to.
        let filled = |document: &Vec<i64>| {
            let rest = vec![5; length - document.len()];
            [document.clone(), rest].concat()
        };
        let rows: Vec<Vec<i64>> = documents.iter().map(filled).collect();
        let own_labels = |document: &Vec<i64>| {
            let mut own = labels(document);
            own.pop();
            own.resize(length, -100);
            own
        };
        let of_rows: Vec<Vec<i64>> = documents.iter().map(own_labels).collect();
        let alone = save(&dir.path().join("alone.safetensors"), length, &rows, &of_rows);
        let of_packed = [labels(&packed)];
        let packed = save(&dir.path().join("packed.safetensors"), length, &[packed], &of_packed);

        let path = format!("tests/models/{model}");
        let setting = separated(separator);
        let together = plan(&path, 1, &[&DESCENT[..], &[&setting]].concat());
        let apart = plan(&path, documents.len(), &DESCENT);
        let (a, b) = (step(&together, &packed), step(&apart, &alone));
        assert!((a.0 - b.0).abs() < 1e-5, "{model}: {} and {}", a.0, b.0);
        let deviation = parity::largest(&numbers(&a.1), &numbers(&b.1));
        assert!(deviation < 1e-5, "{model}: {deviation}");
        // Without the separator these are other numbers.
        let mixed = step(&plan(&path, 1, &DESCENT), &packed);
        assert!((a.0 - mixed.0).abs() > 1e-4, "{model}: {} and {}", a.0, mixed.0);
    }
}

#[test]
fn the_gradient_of_a_token_does_not_depend_on_another_document() {
    let dir = tempfile::tempdir().expect("a directory");
    for (model, length, separator) in MODELS {
        let setting = separated(separator);
        for compute in ["precision.compute=fp32", "precision.compute=bf16"] {
            let settings = [&DESCENT[..4], &[setting.as_str(), compute]].concat();
            let planned = plan(&format!("tests/models/{model}"), 1, &settings);
            // Three documents, of which only the second has labels; the others change, in their lengths too.
            let (first, n) = (length / 4, length / 4 + 2);
            let kept = document(7, n, separator);
            let trained = |seed: usize| {
                let before = document(seed, first, separator);
                let after = document(seed + 1, length - first - n - seed, separator);
                let rest = vec![separator; seed];
                let ids = [before, kept.clone(), after, rest].concat();
                let own = labels(&ids);
                let counts = |i: usize| (first..first + n).contains(&i);
                let own = (0..length).map(|i| if counts(i) { own[i] } else { -100 }).collect();
                step(&planned, &save(&dir.path().join("data.safetensors"), length, &[ids], &[own]))
            };
            let (a, b) = (trained(0), trained(1));
            assert!(a == b, "{model}, {compute}: {} and {}", a.0, b.0);
        }
    }
}

/// A model is refused with this code and text.
fn refused(model: &Path, settings: &[&str], code: &str, part: &str) {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = frit::config::Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
    let request = frit::compilation::Request {
        model: model.into(),
        binds: [("batch".to_string(), 2)].into(),
        ..Default::default()
    };
    let report = frit::compilation::compile(&request, &config, &mut ());
    let report = report.expect_err("it is refused");
    let first = &report.diagnostics[0];
    let text = report.to_string();
    assert!(first.code == code && text.contains(part), "{model:?}: {} {text}", first.code);
}

#[test]
fn models_that_join_tokens_otherwise_are_refused() {
    let setting = "data.document_separator=1";
    let of = |name: &str| file(&format!("tests/models/{name}/model.onnx"));
    // The classifier reads the first token.
    refused(&of("bert"), &[setting], "E240", "reads along the axis of tokens");
    refused(&of("bloom"), &[setting], "E240", "no known attention");
    refused(&of("t5"), &[setting], "E240", "several inputs of tokens");
    refused(&of("vit"), &[setting], "E240", "no input of tokens");
    refused(&of("gpt2"), &[setting, "loss.kind=mse"], "E053", "only a cross_entropy");
    let beyond = "data.document_separator=50256";
    refused(&of("gpt2"), &[beyond], "E240", "is no token of the model, which has 257");
    // A mean over all tokens, and a running sum.
    let dir = tempfile::tempdir().expect("a directory");
    for (op, what) in [
        (
            r#"{ "op": "reduce", "inputs": ["x"], "outputs": ["m"], "attrs": { "f": "mean", "axes": [1], "keep_dims": true } }"#,
            "mean",
        ),
        (
            r#"{ "op": "cum_sum", "inputs": ["x"], "outputs": ["m"], "attrs": { "axis": 1, "exclusive": false, "reverse": false } }"#,
            "cum_sum",
        ),
    ] {
        let text = format!(
            r#"{{ "frit_model": 1, "name": "joins", "dims": {{ "batch": null, "t": 8, "vocab": 12 }},
              "inputs": [{{ "name": "ids", "dtype": "i64", "shape": ["batch", "t"] }}],
              "params": [{{ "name": "wte", "shape": ["vocab", "vocab"], "init": {{ "uniform": {{ "bound": 0.5 }} }} }}],
              "nodes": [{{ "op": "embedding", "inputs": ["wte", "ids"], "outputs": ["x"] }}, {op},
                        {{ "op": "add", "inputs": ["x", "m"], "outputs": ["logits"] }}],
              "outputs": ["logits"] }}"#
        );
        let model = dir.path().join(format!("{what}.json"));
        std::fs::write(&model, text).expect("written");
        refused(&model, &[setting], "E240", "documents cannot be kept apart");
    }
}

/// A linear function whose gradient is stated, and how the gradient of its operand is computed.
fn with_gradient(dx: &str) -> String {
    format!(
        r#"{{ "frit_model": 1, "name": "stated", "dims": {{ "batch": null, "t": 8, "vocab": 12, "c": 6 }},
          "inputs": [{{ "name": "ids", "dtype": "i64", "shape": ["batch", "t"] }}],
          "params": [{{ "name": "wte", "shape": ["vocab", "c"], "init": {{ "uniform": {{ "bound": 0.5 }} }} }},
                     {{ "name": "w", "shape": ["c", "vocab"], "init": {{ "uniform": {{ "bound": 0.5 }} }} }}],
          "functions": [
            {{ "name": "f", "inputs": ["x", "w"], "outputs": ["y"], "gradient": "g", "precision": "f32",
              "nodes": [{{ "op": "matmul", "inputs": ["x", "w"], "outputs": ["y"] }}] }},
            {{ "name": "g", "inputs": ["x", "w", "y", "dy"], "outputs": ["dx", "dw"], "nodes": [
              {{ "op": "reshape", "inputs": ["x"], "outputs": ["rows"], "attrs": {{ "shape": [16, 6] }} }},
              {{ "op": "reshape", "inputs": ["dy"], "outputs": ["drows"], "attrs": {{ "shape": [16, 12] }} }},
              {{ "op": "matmul", "inputs": ["rows", "drows"], "outputs": ["dw"], "attrs": {{ "trans_a": true }} }},
              {{ "op": "matmul", "inputs": ["dy", "w"], "outputs": ["own"], "attrs": {{ "trans_b": true }} }},
              {dx} ] }} ],
          "nodes": [{{ "op": "embedding", "inputs": ["wte", "ids"], "outputs": ["x"] }},
                    {{ "call": "f", "inputs": ["x", "w"], "outputs": ["logits"] }}],
          "outputs": ["logits"] }}"#
    )
}

#[test]
fn stated_gradients_keep_to_the_tokens_of_their_operands() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    let own = r#"{ "op": "neg", "inputs": ["own"], "outputs": ["minus"] },
                 { "op": "neg", "inputs": ["minus"], "outputs": ["dx"] }"#;
    std::fs::write(&model, with_gradient(own)).expect("written");
    let planned = plan_at(&model, 2, &[&DESCENT[..], &["data.document_separator=1"]].concat());
    let ids: Vec<Vec<i64>> = (0..2).map(|seed| document(seed, 8, 1)).collect();
    let ids: Vec<Vec<i64>> =
        ids.iter().map(|row| row.iter().map(|token| token % 12).collect()).collect();
    let labels = ids.iter().map(|row| labels(row)).collect::<Vec<_>>();
    let data = dir.path().join("data.safetensors");
    let bytes = |rows: &[Vec<i64>]| -> Vec<u8> {
        rows.iter().flatten().flat_map(|x| x.to_le_bytes()).collect()
    };
    let (ids, labels) = (bytes(&ids), bytes(&labels));
    let view = |bytes| TensorView::new(Dtype::I64, vec![2, 8], bytes).expect("fits");
    let tensors = [("ids", view(&ids)), ("labels", view(&labels))];
    safetensors::serialize_to_file(tensors, None, &data).expect("written");
    assert!(step(&planned, &data).0.is_finite());
    // The gradient of a token that is divided by a sum over all of them.
    let joined = r#"{ "op": "reduce", "inputs": ["own"], "outputs": ["all"], "attrs": { "f": "sum", "axes": [1], "keep_dims": true } },
                    { "op": "div", "inputs": ["own", "all"], "outputs": ["dx"] }"#;
    std::fs::write(&model, with_gradient(joined)).expect("written");
    refused(&model, &["data.document_separator=1"], "E240", "reads a sum over tokens");
}

/// What is crossed: of each, settings.
const FACTORS: [&[&str]; 9] = [
    &["0", "2", "3", "4"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["memory.loss_chunks=1", "memory.loss_chunks=2"],
    &["data.shuffle=false", "data.shuffle=true"],
];
const MODEL: usize = 0;
const RANKS: usize = 1;
const STRATEGY: usize = 2;
const PRECISION: usize = 6;
const STEPS: usize = 3;

/// Losses and validation losses of a run over shards of tokens that is resumed.
fn losses(planned: &Planned, data: &Path) -> Vec<f64> {
    let data = data.to_path_buf().into();
    let options = RunOptions { steps: STEPS, data, threads: Some(1), ..RunOptions::default() };
    resumed_losses(planned, options)
}

#[test]
fn losses_are_those_of_one_rank_whatever_packed_documents_are_crossed_with() {
    let rows = rows(&FACTORS, |_: &Row| true);
    assert!((12..=30).contains(&rows.len()), "{} rows", rows.len());
    let dir = tempfile::tempdir().expect("a directory");
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let number: usize = FACTORS[MODEL][row[MODEL]].parse().expect("a number");
        let (model, length, separator) = MODELS[number];
        let setting = separated(separator);
        let own = [&[setting.as_str(), "optimizer.lr=0.01"], &words[3..4], &words[6..]].concat();
        let strategy = format!("sharding.strategy={}", FACTORS[STRATEGY][row[STRATEGY]]);
        let all = [&own[..], &[words[RANKS], &strategy, words[4], words[5]]].concat();
        let tokens: Vec<u8> = (0..40)
            .flat_map(|i| document(i, 3 + i * 7 % 40, separator))
            .take(12 * length + 1)
            .flat_map(|token| (token as u16).to_le_bytes())
            .collect();
        let data = dir.path().join("tokens.bin");
        std::fs::write(&data, tokens).expect("written");
        let path = format!("tests/models/{model}");
        let ranks = row[RANKS] + 1;
        let spread = losses(&plan_to_evaluate(&path, 1, &all), &data);
        let alone = losses(&plan_to_evaluate(&path, ranks, &own), &data);
        assert_eq!(spread.len(), 2 * STEPS, "{words:?}");
        let tolerance = if words[PRECISION].ends_with("fp32") { 1e-5 } else { 1e-2 };
        let deviation = parity::largest(&spread, &alone);
        assert!(deviation < tolerance, "{words:?}: {deviation}: {spread:?} {alone:?}");
    }
}
