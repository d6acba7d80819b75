//! Data: every format, type, number of files and assignment of examples gives equal training, and data that does not
//! fit is refused before the first step.

use crate::stand_ins::Gpu;
use crate::support::{Planned, file, plan, plan_at, plan_to_evaluate, train_on};
use frit::import::onnx::messages::{
    AttributeProto, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use frit_runtime::RunError;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::data::{Element, Source, TokenDType};
use frit_runtime::eval;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use npyz::WriterBuilder;
use prost::Message;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const DIGITS: &str = "examples/digits_mlp/model.json";
const CHARS: &str = "examples/char_gpt2/model.json";
const CROSS_ENTROPY: [&str; 3] =
    ["loss.kind=cross_entropy", "loss.logits=logits", "loss.labels=labels"];
const PIXELS: usize = 64;

/// A tensor of a file: name, type, shape, values.
type Values<'a> = (&'a str, Element, Vec<usize>, Vec<f64>);

fn bytes_of(element: Element, values: &[f64]) -> Vec<u8> {
    let each = |x: &f64| match element {
        Element::F64 => x.to_le_bytes().to_vec(),
        Element::F32 => (*x as f32).to_le_bytes().to_vec(),
        Element::F16 => half::f16::from_f64(*x).to_le_bytes().to_vec(),
        Element::BF16 => half::bf16::from_f64(*x).to_le_bytes().to_vec(),
        Element::I64 => (*x as i64).to_le_bytes().to_vec(),
        Element::I32 => (*x as i32).to_le_bytes().to_vec(),
        Element::I16 => (*x as i16).to_le_bytes().to_vec(),
        Element::I8 => (*x as i8).to_le_bytes().to_vec(),
        Element::U64 => (*x as u64).to_le_bytes().to_vec(),
        Element::U32 => (*x as u32).to_le_bytes().to_vec(),
        Element::U16 => (*x as u16).to_le_bytes().to_vec(),
        Element::U8 | Element::Bool => (*x as u8).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

fn dtype(element: Element) -> Dtype {
    match element {
        Element::F64 => Dtype::F64,
        Element::F32 => Dtype::F32,
        Element::F16 => Dtype::F16,
        Element::BF16 => Dtype::BF16,
        Element::I64 => Dtype::I64,
        Element::I32 => Dtype::I32,
        Element::I16 => Dtype::I16,
        Element::I8 => Dtype::I8,
        Element::U64 => Dtype::U64,
        Element::U32 => Dtype::U32,
        Element::U16 => Dtype::U16,
        Element::U8 => Dtype::U8,
        Element::Bool => Dtype::BOOL,
    }
}

fn save(path: &Path, tensors: &[Values<'_>]) -> PathBuf {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, e, _, v)| bytes_of(*e, v)).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, element, shape, _), bytes)| {
        (*name, TensorView::new(dtype(*element), shape.clone(), bytes).expect("it fits"))
    });
    safetensors::serialize_to_file(views, None, path).expect("written");
    path.into()
}

/// Pixels of `n` examples, small whole numbers, and their labels.
fn digits(n: usize) -> (Vec<f64>, Vec<f64>) {
    let pixels = (0..n * PIXELS).map(|i| ((i * 37 + i / 11) % 17) as f64);
    let labels = (0..n).map(|i| ((i * 7) % 10) as f64);
    (pixels.collect(), labels.collect())
}

fn save_digits(path: &Path, x: Element, labels: Element, n: usize) -> PathBuf {
    let (pixels, classes) = digits(n);
    save(path, &[("x", x, vec![n, PIXELS], pixels), ("labels", labels, vec![n], classes)])
}

fn digits_plan(more: &[&str]) -> Planned {
    plan(DIGITS, 4, &[&CROSS_ENTROPY[..], more].concat())
}

fn attempt(planned: &Planned, data: impl Into<Source>) -> Result<RunReport, String> {
    let options =
        RunOptions { steps: 2, data: data.into(), threads: Some(1), ..RunOptions::default() };
    run(&planned.path(), &options).map_err(|e| e.to_string())
}

fn refused(planned: &Planned, data: impl Into<Source>, parts: &[&str]) {
    let message = attempt(planned, data).expect_err("it is refused");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn labels_out_of_range_are_refused_before_the_first_step() {
    let dir = tempfile::tempdir().expect("a directory");
    let with = |name: &str, element: Element, change: fn(f64) -> f64| {
        let (pixels, classes) = digits(32);
        let classes = classes.into_iter().map(change).collect();
        let tensors =
            [("x", Element::F32, vec![32, PIXELS], pixels), ("labels", element, vec![32], classes)];
        save(&dir.path().join(name), &tensors)
    };
    let from_one = with("one.safetensors", Element::I64, |c| c + 1.0);
    let bytes = with("bytes.safetensors", Element::U8, |c| c + 1.0);
    let negative = with("negative.safetensors", Element::I32, |c| if c == 4.0 { -1.0 } else { c });
    let ignored = with("ignored.safetensors", Element::I16, |c| if c == 4.0 { -100.0 } else { c });
    let parts = ["`labels`", "example 7: 10", "0..=9 or -100", "begin at 1: subtract 1"];
    for settings in
        [&["precision.compute=fp32"][..], &["precision.compute=bf16", "sharding.ranks=2"]]
    {
        let planned = digits_plan(settings);
        refused(&planned, from_one.clone(), &[&parts[..], &["one.safetensors"]].concat());
        refused(&planned, bytes.clone(), &[&parts[..], &["bytes.safetensors"]].concat());
        refused(&planned, negative.clone(), &["example 2: -1", "the ignored label is -100"]);
        let losses = attempt(&planned, ignored.clone()).expect("it trains").losses;
        assert!(losses.iter().all(|l| l.is_finite()));
    }
    // What is evaluated, while it trains and by itself.
    let planned = plan_to_evaluate(DIGITS, 4, &CROSS_ENTROPY);
    let validation = Some(ValidationOptions { data: from_one.clone().into(), every: None });
    let options = RunOptions { steps: 1, data: ignored.into(), validation, ..Default::default() };
    let message = run(&planned.path(), &options).expect_err("refused").to_string();
    assert!(message.contains("one.safetensors") && message.contains("subtract 1"), "{message}");
    let options =
        eval::Options { plan: planned.path(), data: vec![from_one], ..Default::default() };
    let message = eval::evaluate(&options).expect_err("refused").to_string();
    assert!(message.contains("example 7: 10"), "{message}");
}

/// Token ids, labels in the file, of [batch, 8].
fn save_tokens(path: &Path, ids: &[f64], labels: &[f64]) -> PathBuf {
    let shape = || vec![ids.len() / 8, 8];
    let tensors = [
        ("ids", Element::I64, shape(), ids.to_vec()),
        ("labels", Element::I64, shape(), labels.to_vec()),
    ];
    save(path, &tensors)
}

const EMBEDDING: &str = r#"{
  "frit_model": 1, "name": "bigram",
  "dims": { "batch": null, "t": 8, "vocab": 12 },
  "inputs": [{ "name": "ids", "dtype": "i64", "shape": ["batch", "t"] }],
  "params": [{ "name": "wte", "shape": ["vocab", "vocab"], "init": { "uniform": { "bound": 0.5 } } }],
  "nodes": [{ "op": "embedding", "inputs": ["wte", "ids"], "outputs": ["logits"] }],
  "outputs": ["logits"]
}"#;

/// A plan for a model that is given as text.
fn plan_text(text: &str, settings: &[&str]) -> Planned {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    std::fs::write(&model, text).expect("written");
    plan_at(&model, 2, settings)
}

#[test]
fn indices_out_of_range_are_refused_and_negative_ones_count_from_the_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan_text(EMBEDDING, &CROSS_ENTROPY);
    let ids: Vec<f64> = (0..64).map(|i| f64::from((i * 5) % 12)).collect();
    let labels: Vec<f64> = ids.iter().map(|i| (i + 1.0) % 12.0).collect();
    let good = save_tokens(&dir.path().join("good.safetensors"), &ids, &labels);
    let mut beyond = ids.clone();
    beyond[29] = 12.0;
    let beyond = save_tokens(&dir.path().join("beyond.safetensors"), &beyond, &labels);
    let parts = ["`ids`", "example 3 at [5]: 12", "-12..=11", "`wte`", "12 rows"];
    refused(&planned, beyond, &parts);
    let from_end: Vec<f64> = ids.iter().map(|i| i - 12.0).collect();
    let from_end = save_tokens(&dir.path().join("end.safetensors"), &from_end, &labels);
    let losses = |data: PathBuf| attempt(&planned, data).expect("it trains").losses;
    assert_eq!(losses(from_end), losses(good));
}

/// Of a value that the model computes, only the kernels know whether it is an index.
#[test]
fn computed_indices_are_checked_by_kernels_on_both_devices() {
    let text = EMBEDDING
        .replace(r#""dtype": "i64""#, r#""dtype": "f32""#)
        .replace(r#""nodes": ["#, r#""nodes": [{ "op": "cast", "attrs": { "to": "i64" }, "inputs": ["ids"], "outputs": ["whole"] }, "#)
        .replace(r#"["wte", "ids"]"#, r#"["wte", "whole"]"#);
    let dir = tempfile::tempdir().expect("a directory");
    let shape = || vec![8, 8];
    let labels = ("labels", Element::U8, shape(), vec![3.0; 64]);
    let with = |name: &str, value: f64| {
        let tensors = [("ids", Element::F32, shape(), vec![value; 64]), labels.clone()];
        save(&dir.path().join(name), &tensors)
    };
    let (good, bad) = (with("good.safetensors", 2.0), with("bad.safetensors", 12.0));
    let planned = plan_text(&text, &CROSS_ENTROPY);
    attempt(&planned, good.clone()).expect("it trains");
    refused(&planned, bad.clone(), &["index 12", "12", "task `"]);
    let gpu = plan_text(&text, &[&CROSS_ENTROPY[..], &CUDA].concat());
    on_gpu(&gpu, &good).expect("it trains");
    let said = on_gpu(&gpu, &bad).expect_err("it is refused");
    assert!(said.contains("index 12 is outside of an axis of 12"), "{said}");
}

/// Labels that the model computes from a float.
const COMPUTED_LABELS: &str = r#"{
  "frit_model": 1, "name": "rounded",
  "dims": { "batch": null, "classes": 5 },
  "inputs": [
    { "name": "x", "dtype": "f32", "shape": ["batch", 3] }, { "name": "c", "dtype": "f32", "shape": ["batch"] }
  ],
  "params": [{ "name": "w", "shape": [3, "classes"], "init": { "uniform": { "bound": 0.5 } } }],
  "nodes": [
    { "op": "matmul", "inputs": ["x", "w"], "outputs": ["logits"] },
    { "op": "cast", "attrs": { "to": "i64" }, "inputs": ["c"], "outputs": ["labels"] },
    { "op": "cross_entropy", "scope": "head", "attrs": { "ignore_index": -100 }, "inputs": ["logits", "labels"],
      "outputs": ["losses", "_"] },
    { "op": "reduce", "attrs": { "f": "mean", "axes": [0] }, "inputs": ["losses"], "outputs": ["loss"] }
  ],
  "outputs": ["loss"]
}"#;

#[test]
fn a_computed_label_that_is_no_class_is_named_as_the_cause() {
    let dir = tempfile::tempdir().expect("a directory");
    let with = |name: &str, class: f64| {
        let x = ("x", Element::F32, vec![4, 3], vec![0.25; 12]);
        save(&dir.path().join(name), &[x, ("c", Element::F32, vec![4], vec![class; 4])])
    };
    let (good, bad) = (with("good.safetensors", 4.0), with("bad.safetensors", 5.0));
    for compute in ["precision.compute=fp32", "precision.compute=bf16"] {
        let planned =
            plan_text(COMPUTED_LABELS, &["loss.kind=output", "loss.logits=loss", compute]);
        assert!(attempt(&planned, good.clone()).expect("it trains").losses[0].is_finite());
        let options = RunOptions {
            steps: 1,
            data: bad.clone().into(),
            check_numerics: true,
            threads: Some(1),
            ..Default::default()
        };
        let Err(RunError::NotFinite(found)) = run(&planned.path(), &options) else {
            panic!("it is refused");
        };
        assert_eq!((found.value, found.op.as_str()), ("NaN", "cross_entropy"));
        assert_eq!(found.cause, "the label 5 is not one of 5 classes, 0 to 4");
        assert!(!found.remedy.contains("lr"), "{}", found.remedy);
    }
}

const CUDA: [&str; 2] = ["target.device=cuda", "target.arch=sm_90"];

/// The losses on a GPU in software, or what was said.
fn on_gpu(planned: &Planned, data: &Path) -> Result<Vec<String>, String> {
    let gpu = Gpu::new();
    let metrics = gpu.dir.path().join("metrics.jsonl");
    let (plan, text) = (planned.path().display().to_string(), metrics.display().to_string());
    let data = data.display().to_string();
    let ended = gpu.run(&["run", &plan, "--data", &data, "--steps", "2", "--metrics", &text]);
    if ended.code != Some(0) {
        assert_eq!(ended.code, Some(2));
        return Err(ended.said);
    }
    ended.expect_success();
    let lines = std::fs::read_to_string(metrics).expect("metrics");
    let loss = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("an object");
        line["loss"].to_string()
    };
    Ok(lines.lines().map(loss).collect())
}

#[test]
fn narrow_elements_train_as_wide_ones_on_both_devices() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = |x: Element, labels: Element| {
        let name = format!("{x}-{labels}.safetensors");
        save_digits(&dir.path().join(name), x, labels, 16)
    };
    let wide = data(Element::F32, Element::I64);
    let floats =
        [Element::F16, Element::BF16, Element::I16, Element::I8, Element::U16, Element::U8];
    let integers = [
        Element::I32,
        Element::I16,
        Element::I8,
        Element::U64,
        Element::U32,
        Element::U16,
        Element::U8,
    ];
    let all: Vec<PathBuf> = floats
        .iter()
        .map(|x| data(*x, Element::I64))
        .chain(integers.iter().map(|labels| data(Element::F32, *labels)))
        .collect();
    let planned = digits_plan(&[]);
    let expected = attempt(&planned, wide.clone()).expect("it trains").losses;
    for narrow in &all {
        let found = attempt(&planned, narrow.clone()).expect("it trains").losses;
        assert_eq!(found, expected, "{}", narrow.display());
    }
    let gpu = digits_plan(&CUDA);
    let expected = on_gpu(&gpu, &wide).expect("it trains");
    for narrow in [data(Element::U8, Element::U16), data(Element::BF16, Element::I8)]
        .into_iter()
        .chain([data(Element::F16, Element::U32), data(Element::I16, Element::I16)])
    {
        assert_eq!(on_gpu(&gpu, &narrow).expect("it trains"), expected, "{}", narrow.display());
    }
    let said = on_gpu(&gpu, &data(Element::F32, Element::F32)).expect_err("it is refused");
    assert!(said.contains("`labels` is f32"), "{said}");
    // Where something would be lost.
    refused(&planned, data(Element::F64, Element::I64), &["`x` is f64", "f32[examples, 64]"]);
    refused(&planned, data(Element::I64, Element::I64), &["`x` is i64", "takes f32, f16"]);
}

#[test]
fn wider_elements_are_narrowed_where_all_of_them_fit() {
    let text = EMBEDDING.replace(r#""dtype": "i64""#, r#""dtype": "i32""#);
    let planned = plan_text(&text, &CROSS_ENTROPY);
    let dir = tempfile::tempdir().expect("a directory");
    let with = |name: &str, element: Element, last: f64| {
        let mut ids = vec![5.0; 64];
        ids[63] = last;
        let labels = ("labels", Element::I32, vec![8, 8], vec![3.0; 64]);
        save(&dir.path().join(name), &[("ids", element, vec![8, 8], ids), labels])
    };
    let narrow = with("narrow.safetensors", Element::I32, 7.0);
    let expected = attempt(&planned, narrow).expect("it trains").losses;
    for element in [Element::I64, Element::U32, Element::U64] {
        let wide = with(&format!("{element}.safetensors"), element, 7.0);
        assert_eq!(attempt(&planned, wide).expect("it trains").losses, expected);
    }
    let large = with("large.safetensors", Element::I64, 4294967296.0);
    refused(&planned, large, &["example 7 at [7]: 4294967296 does not fit i32"]);
}

#[test]
fn messages_list_what_there_is() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = digits_plan(&[]);
    let path = dir.path().join("other.safetensors");
    let (pixels, labels) = digits(8);
    let image = ("x", Element::U8, vec![8, 8, 8], pixels.clone());
    let named = ("y", Element::I64, vec![8], labels.clone());
    save(&path, &[("x", Element::U8, vec![8, 64], pixels), named]);
    let parts = ["no tensor `labels`", "i64[examples]", "`x` u8[8, 64], `y` i64[8]"];
    refused(&planned, path.clone(), &parts);
    save(&path, &[image, ("labels", Element::I64, vec![8], labels)]);
    refused(&planned, path, &["`x` has shape [8, 8, 8]", "f32[examples, 64]"]);
    refused(&planned, dir.path().join("*.npz"), &["no file matches"]);
    refused(&planned, dir.path().join("none.npz"), &["none.npz"]);
}

/// The examples in three files of different sizes.
fn in_three(dir: &Path, n: usize) -> Vec<PathBuf> {
    let (pixels, labels) = digits(n);
    let (a, b) = (n / 5, n / 2);
    let part = |(name, range): (&str, std::ops::Range<usize>)| {
        let x = pixels[range.start * PIXELS..range.end * PIXELS].to_vec();
        let (len, classes) = (range.len(), labels[range].to_vec());
        let tensors =
            [("x", Element::U8, vec![len, PIXELS], x), ("labels", Element::U8, vec![len], classes)];
        save(&dir.join(name), &tensors)
    };
    [("part-0.safetensors", 0..a), ("part-1.safetensors", a..b), ("part-2.safetensors", b..n)]
        .map(part)
        .to_vec()
}

#[test]
fn several_files_train_as_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = save_digits(&dir.path().join("whole.safetensors"), Element::U8, Element::U8, 43);
    let parts = in_three(dir.path(), 43);
    let pattern = dir.path().join("part-*.safetensors");
    for settings in [
        &[][..],
        &["sharding.ranks=2", "data.shuffle=true"],
        &["sharding.ranks=2", "run.accumulation=3", "data.drop_last=false"],
        &["sharding.ranks=3", "data.shuffle=true", "run.accumulation=2", "data.drop_last=false"],
    ] {
        let planned = digits_plan(settings);
        let train = |data: Source, checkpoint: Option<CheckpointOptions>, steps: usize| {
            let options =
                RunOptions { steps, data, checkpoint, threads: Some(1), ..Default::default() };
            run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}")).losses
        };
        let expected = train(whole.clone().into(), None, 9);
        assert_eq!(train(Source::new(parts.clone(), None), None, 9), expected, "{settings:?}");
        // Continued on the pattern after steps on the one file.
        let ckpt = planned.dir.path().join("ckpt");
        let checkpoint = |resume: bool| {
            Some(CheckpointOptions { dir: ckpt.clone(), every: None, resume, keep: None })
        };
        train(whole.clone().into(), checkpoint(false), 4);
        let rest = train(pattern.clone().into(), checkpoint(true), 9);
        assert_eq!(rest, expected[4..], "{settings:?}");
    }
    let planned = digits_plan(&[]);
    let odd = save_digits(&dir.path().join("odd.safetensors"), Element::I8, Element::U8, 8);
    let mixed = Source::new(vec![parts[0].clone(), odd], None);
    refused(&planned, mixed, &["odd.safetensors", "`x` is i8, and u8 in the files before"]);
}

#[test]
fn several_files_are_evaluated_as_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = save_digits(&dir.path().join("whole.safetensors"), Element::U8, Element::U8, 23);
    let parts = in_three(dir.path(), 23);
    let planned = plan_to_evaluate(DIGITS, 4, &CROSS_ENTROPY);
    let loss = |data: Vec<PathBuf>| {
        let options = eval::Options { plan: planned.path(), data, ..Default::default() };
        let report = eval::evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
        (report.loss, report.examples)
    };
    let expected = loss(vec![whole.clone()]);
    assert_eq!(expected.1, 23);
    assert_eq!(loss(parts), expected);
    let pattern = dir.path().join("part-*.safetensors");
    assert_eq!(loss(vec![pattern.clone()]), expected);
    let validated = |data: PathBuf| {
        let validation = Some(ValidationOptions { data: data.into(), every: None });
        let options = RunOptions {
            steps: 1,
            data: whole.clone().into(),
            validation,
            threads: Some(1),
            ..Default::default()
        };
        run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}")).validation
    };
    assert_eq!(validated(pattern), validated(whole.clone()));
}

/// A shard as GPT-2's and Llama's are written.
fn shard(magic: i32, version: i32, count: usize, tokens: &[u8]) -> Vec<u8> {
    let mut header = vec![0_i32; 256];
    (header[0], header[1], header[2]) = (magic, version, count as i32);
    header.iter().flat_map(|x| x.to_le_bytes()).chain(tokens.iter().copied()).collect()
}

#[test]
fn token_files_say_their_type_or_are_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan(CHARS, 2, &CROSS_ENTROPY);
    let path = |name: &str| dir.path().join(name);
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(path(name), bytes).expect("written");
        path(name)
    };
    let narrow = std::fs::read(file("examples/char_gpt2/data.bin")).expect("tokens");
    let narrow = &narrow[..2 * 4001];
    let ids: Vec<u32> =
        narrow.as_chunks::<2>().0.iter().map(|b| u32::from(u16::from_le_bytes(*b))).collect();
    let wide: Vec<u8> = ids.iter().flat_map(|x| x.to_le_bytes()).collect();
    let n = ids.len();
    let losses = |data: PathBuf, tokens: Option<TokenDType>| {
        let data = Source::new(vec![data], tokens);
        attempt(&planned, data).unwrap_or_else(|e| panic!("{e}")).losses
    };
    let plain = write("plain.bin", narrow);
    let expected = losses(plain.clone(), None);
    assert_eq!(losses(plain, Some(TokenDType::U16)), expected);
    let of_gpt2 = write("gpt2.bin", &shard(20240520, 1, n, narrow));
    assert_eq!(losses(of_gpt2.clone(), None), expected);
    assert_eq!(losses(write("llama.bin", &shard(20240801, 7, n, &wide)), None), expected);
    let unsaid = write("wide.bin", &wide);
    assert_eq!(losses(unsaid.clone(), Some(TokenDType::U32)), expected);
    refused(&planned, unsaid, &["wide.bin", "uint32", "--token-dtype u32"]);
    let odd = write("odd.bin", &narrow[1..]);
    refused(&planned, odd, &["odd.bin", "--token-dtype"]);
    let newer = write("newer.bin", &shard(20240520, 2, n, narrow));
    refused(&planned, newer, &["version 2"]);
    let cut = write("cut.bin", &shard(20240520, 1, n + 1, narrow));
    refused(&planned, cut, &["4002 tokens", "4001"]);
    let joined = write("joined.bin", &shard(20240520, 1, n - 9, narrow));
    refused(&planned, joined, &["3992 tokens", "4001", "give each by itself"]);
    refused(&planned, write("head.bin", &shard(20240520, 1, n, narrow)[..900]), &["truncated"]);
    let told = Source::new(vec![of_gpt2], Some(TokenDType::U32));
    refused(&planned, told, &["its header says u16"]);
    let foreign: Vec<u8> = narrow.iter().map(|b| b ^ 0x40).collect();
    let parts = ["foreign.bin", "example 0 at ", "72 rows", "--token-dtype"];
    refused(&planned, write("foreign.bin", &foreign), &parts);
    // Windows end with their file.
    let halves = [write("a.bin", &narrow[..4000]), write("b.bin", &narrow[4000..])];
    let both = Source::new(halves.to_vec(), None);
    assert!(attempt(&planned, both).expect("it trains").losses.iter().all(|l| l.is_finite()));
}

#[test]
fn npz_files_train_whether_packed_or_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = digits_plan(&[]);
    let (pixels, labels) = digits(16);
    let mut losses = Vec::new();
    for method in [npyz::zip::CompressionMethod::Stored, npyz::zip::CompressionMethod::Deflated] {
        let path = dir.path().join(format!("{method:?}.npz"));
        let mut npz = npyz::npz::NpzWriter::create(&path).expect("a file");
        let options = npyz::zip::write::FileOptions::default().compression_method(method);
        let x = npz.array("x", options).expect("an array");
        let mut x = x.default_dtype().shape(&[16, 64]).begin_nd().expect("a header");
        x.extend(pixels.iter().map(|p| *p as u8)).expect("written");
        x.finish().expect("written");
        let y = npz.array("labels", options).expect("an array");
        let mut y = y.default_dtype().shape(&[16]).begin_nd().expect("a header");
        y.extend(labels.iter().map(|c| *c as u16)).expect("written");
        y.finish().expect("written");
        drop(npz);
        losses.push(train_on(&planned, &path, 2, None).losses);
    }
    let same = save_digits(&dir.path().join("same.safetensors"), Element::F32, Element::I64, 16);
    losses.push(attempt(&planned, same).expect("it trains").losses);
    assert!(losses.windows(2).all(|w| w[0] == w[1]), "{losses:?}");
}

/// ONNX's numbers of element types, and the same in files.
const DECLARED: [(i32, Element); 12] = [
    (1, Element::F32),
    (2, Element::U8),
    (3, Element::I8),
    (4, Element::U16),
    (5, Element::I16),
    (6, Element::I32),
    (7, Element::I64),
    (9, Element::Bool),
    (10, Element::F16),
    (12, Element::U32),
    (13, Element::U64),
    (16, Element::BF16),
];

/// `y = cast(x) · w` for an input of this type.
fn declared(elem_type: i32) -> ModelProto {
    let info = |name: &str, elem_type: i32, width: i64| {
        let batch = DimensionProto { dim_param: Some("batch".into()), ..Default::default() };
        let width = DimensionProto { dim_value: Some(width), ..Default::default() };
        let shape = Some(TensorShapeProto { dim: vec![batch, width] });
        let ty = TypeProto { tensor_type: Some(TensorTypeProto { elem_type, shape }) };
        ValueInfoProto { name: name.into(), r#type: Some(ty) }
    };
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        name: output.into(),
        input: inputs.iter().map(|i| i.to_string()).collect(),
        output: vec![output.into()],
        ..Default::default()
    };
    let to = AttributeProto { name: "to".into(), i: 1, r#type: 2, ..Default::default() };
    let w: Vec<u8> = (0..12).flat_map(|i| (i as f32 * 0.25 - 1.0).to_le_bytes()).collect();
    let w = TensorProto {
        name: "w".into(),
        dims: vec![4, 3],
        data_type: 1,
        raw_data: Some(w.into()),
        ..Default::default()
    };
    let cast = NodeProto { attribute: vec![to], ..node("Cast", &["x"], "wide") };
    let graph = GraphProto {
        name: "declared".into(),
        node: vec![cast, node("MatMul", &["wide", "w"], "y")],
        initializer: vec![w],
        input: vec![info("x", elem_type, 4)],
        output: vec![info("y", 1, 3)],
        ..Default::default()
    };
    let opset = OperatorSetIdProto { domain: String::new(), version: 18 };
    ModelProto {
        ir_version: 8,
        graph: Some(graph),
        opset_import: vec![opset],
        ..Default::default()
    }
}

#[test]
fn inputs_of_every_declared_type_train_alike_on_both_devices() {
    let dir = tempfile::tempdir().expect("a directory");
    let of = |elem_type: i32, element: Element, more: &[&str]| {
        let model = dir.path().join("model.onnx");
        std::fs::write(&model, declared(elem_type).encode_to_vec()).expect("written");
        let settings = ["loss.kind=mse", "loss.logits=y", "precision.compute=fp32"];
        let planned = plan_at(&model, 2, &[&settings, more].concat());
        let (x, labels) = ((0..32).map(|i| f64::from(i % 3 == 0)), (0..24).map(f64::from));
        let tensors: [Values<'_>; 2] = [
            ("x", element, vec![8, 4], x.collect()),
            ("labels", Element::F32, vec![8, 3], labels.collect()),
        ];
        let data = save(&dir.path().join(format!("{element}.safetensors")), &tensors);
        (planned, data)
    };
    let (planned, data) = of(1, Element::F32, &[]);
    let expected = attempt(&planned, data).expect("it trains").losses;
    let (planned, data) = of(1, Element::F32, &CUDA);
    let on_cuda = on_gpu(&planned, &data).expect("it trains");
    for (elem_type, element) in DECLARED {
        let (planned, data) = of(elem_type, element, &["sharding.ranks=1"]);
        let found = attempt(&planned, data).unwrap_or_else(|e| panic!("{element}: {e}"));
        assert_eq!(found.losses, expected, "{element}");
        let (planned, data) = of(elem_type, element, &CUDA);
        let found = on_gpu(&planned, &data).unwrap_or_else(|e| panic!("{element}: {e}"));
        assert_eq!(found, on_cuda, "{element} on a GPU");
    }
}

/// A file of more than 8 GiB of indices, all of them 0 but `bad` at example `at`; most of it is a hole.
fn large_tokens(path: &Path, at: u64, bad: i64) -> PathBuf {
    let examples: u64 = (1 << 27) + 64;
    let bytes = examples * 8 * 8;
    let tensor = |name: &str, from: u64| {
        let to = from + bytes;
        format!(r#""{name}":{{"dtype":"I64","shape":[{examples},8],"data_offsets":[{from},{to}]}}"#)
    };
    let header = format!("{{{},{}}}", tensor("ids", 0), tensor("labels", bytes));
    let begin = 8 + header.len() as u64;
    let mut file = std::fs::File::create(path).expect("created");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
    file.write_all(header.as_bytes()).expect("written");
    file.set_len(begin + 2 * bytes).expect("a hole");
    file.seek(SeekFrom::Start(begin + at * 64)).expect("within the file");
    file.write_all(&bad.to_le_bytes()).expect("written");
    path.into()
}

#[test]
fn more_than_8_gib_of_indices_are_checked_batch_by_batch() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = plan_text(EMBEDDING, &["loss.kind=cross_entropy"]);
    let early = large_tokens(&dir.path().join("early.safetensors"), 3, 99);
    refused(&planned, early, &["`ids`", "example 3 at [0]: 99", "early.safetensors"]);
    // Two steps do not come as far.
    let late = large_tokens(&dir.path().join("late.safetensors"), 1 << 27, 99);
    attempt(&planned, late).expect("it trains");
}

/// An archive that names the same packed bytes again and again could be unpacked to any size.
#[test]
fn arrays_that_overlap_in_an_archive_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = digits_plan(&[]);
    let path = dir.path().join("x.npz");
    let mut npz = npyz::npz::NpzWriter::create(&path).expect("a file");
    let options = npyz::zip::write::FileOptions::default()
        .compression_method(npyz::zip::CompressionMethod::Deflated);
    for name in ["x", "y"] {
        let array = npz.array(name, options).expect("an array");
        let mut array = array.default_dtype().shape(&[1 << 16]).begin_nd().expect("a header");
        array.extend(vec![0_f32; 1 << 16]).expect("written");
        array.finish().expect("written");
    }
    drop(npz);
    let mut bytes = std::fs::read(&path).expect("the archive");
    // The second entry of the directory is at the place of the first, and as long as all.
    let entries: Vec<usize> =
        (0..bytes.len() - 4).filter(|i| bytes[*i..].starts_with(b"PK\x01\x02")).collect();
    let [first, second] = entries[..] else { panic!("two entries") };
    bytes.copy_within(first + 42..first + 46, second + 42);
    let all = (bytes.len() as u32).to_le_bytes();
    bytes[second + 20..second + 24].copy_from_slice(&all);
    std::fs::write(&path, &bytes).expect("written");
    refused(&planned, path, &["overlap"]);
}
