//! Seed inputs: small files of the repository, and files that Frit writes.

use crate::random_graphs::generate;
use crate::support::{Planned, file, plan_at, plan_to_evaluate_at, write_f32};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, run};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// An input.
#[derive(Clone, Debug)]
pub(super) struct Input {
    /// What it was made from; for a file of a directory its path within.
    pub(super) origin: String,
    pub(super) bytes: Vec<u8>,
}

impl Input {
    /// The file in which an input is kept: its name has the origin, the number and the target.
    pub(super) fn write(&self, dir: &Path, target: &str, number: u64) {
        std::fs::create_dir_all(dir).expect("a directory");
        std::fs::write(dir.join(self.file(target, number)), &self.bytes).expect("written");
    }

    pub(super) fn remove(&self, dir: &Path, target: &str, number: u64) {
        std::fs::remove_file(dir.join(self.file(target, number))).expect("it was written");
    }

    fn file(&self, target: &str, number: u64) -> String {
        format!("{target}-{number}-{}", self.origin.replace('/', "+"))
    }

    /// Reads what [`Input::write`] wrote.
    pub(super) fn read(path: &Path) -> Input {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.file_name().expect("a file").to_string_lossy();
        let origin = name.splitn(3, '-').nth(2).unwrap_or(&name).replace('+', "/");
        Input { origin, bytes }
    }
}

/// Seeds of the random graphs that `json` and `onnx` start from.
const GRAPHS: u64 = 24;

pub(super) const MODEL: &str = r#"{ "frit_model": 1, "name": "layers",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "up", "shape": [3, 4], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "up"], "outputs": ["a"] },
             { "repeat": 2, "scope": "h.{i}", "carry": ["a"],
               "params": [ { "name": "w", "shape": [4, 4], "init": { "normal": { "std": 0.5 } } },
                           { "name": "b", "shape": [4], "init": { "constant": 0.0 } } ],
               "nodes": [ { "op": "matmul", "inputs": ["a", "w"], "outputs": ["m"] },
                          { "op": "add", "inputs": ["m", "b"], "outputs": ["s"] },
                          { "op": "tanh", "inputs": ["s"], "outputs": ["a"] } ] } ],
  "outputs": ["a"] }"#;

/// A model of tokens, for files of them.
const TOKENS: &str = r#"{ "frit_model": 1, "name": "tokens",
  "dims": { "batch": null },
  "inputs": [ { "name": "ids", "dtype": "i64", "shape": ["batch", 4] } ],
  "params": [ { "name": "table", "shape": [16, 4], "init": { "normal": { "std": 0.5 } } },
              { "name": "head", "shape": [4, 16], "init": { "normal": { "std": 0.5 } } } ],
  "nodes": [ { "op": "embedding", "inputs": ["table", "ids"], "outputs": ["e"] },
             { "op": "matmul", "inputs": ["e", "head"], "outputs": ["logits"] } ],
  "outputs": ["logits"] }"#;

/// The configurations that mutants of `toml` start from, besides those of the examples.
const CONFIGURATION: &str = r#"
[sharding]
ranks = 4
strategy = "hybrid_shard"
shard_group = 2
[precision]
compute = "bf16"
[[precision.override]]
scope = "h.*"
dtype = "fp32"
[loss]
kind = "mse"
logits = "a"
[optimizer]
kind = "adamw"
lr = 1e-3
decay = "matrices"
[[optimizer.group]]
scope = "h.*"
lr = 1e-4
[schedule]
kind = "cosine"
warmup_steps = 10
total_steps = 100
[memory]
recompute = "selective"
offload = "optimizer"
[run]
accumulation = 2
seed = 7
"#;

/// The plans that mutants of `plan` start from, by name, with their settings.
const PLANS: [(&str, &[&str]); 5] = [
    ("layers", &["loss.kind=mse", "sharding.ranks=2"]),
    (
        "accumulated",
        &[
            "loss.kind=mse",
            "sharding.ranks=2",
            "run.accumulation=2",
            "sharding.no_sync=true",
            "optimizer.ema=0.9",
        ],
    ),
    (
        "offloaded",
        &[
            "loss.kind=l1",
            "sharding.ranks=2",
            "memory.offload=parameters",
            "optimizer.kind=adafactor",
        ],
    ),
    (
        "replicated",
        &[
            "loss.kind=mse",
            "sharding.ranks=2",
            "sharding.strategy=no_shard",
            "precision.compute=fp16",
            "optimizer.kind=momentum",
        ],
    ),
    (
        "narrow",
        &[
            "loss.kind=mse",
            "precision.compute=fp8",
            "memory.recompute=unit",
            "precision.fp8_history=2",
        ],
    ),
];

fn read_dir(path: &Path) -> Vec<Input> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(path) else { return found };
    for path in entries.map_while(Result::ok).map(|e| e.path()).filter(|p| p.is_file()) {
        let origin = path.file_name().expect("a file").to_string_lossy().into_owned();
        found.push(Input { origin, bytes: std::fs::read(&path).expect("a file") });
    }
    found.sort_by(|a, b| a.origin.cmp(&b.origin));
    found
}

/// The inputs that the mutants of a target start from.
pub(super) fn origins(target: &str) -> Vec<Input> {
    let mut found = read_dir(&file("tests/fuzz/corpus").join(target));
    found.iter_mut().for_each(|input| input.origin = input.origin.replace('+', "/"));
    let mut add = |name: &str, bytes: &[u8]| {
        found.push(Input { origin: name.into(), bytes: bytes.into() });
    };
    let read = |path: &str| std::fs::read(file(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    match target {
        "onnx" => {
            for model in ["dropout", "inference", "losses", "tied", "gru"] {
                add(model, &read(&format!("tests/models/{model}/model.onnx")));
            }
        }
        "json" => {
            add("layers", MODEL.as_bytes());
            add("tokens", TOKENS.as_bytes());
            add("digits", &read("examples/digits_mlp/model.json"));
            for seed in 1..=GRAPHS {
                add(&format!("graph {seed}"), generate(seed).json.as_bytes());
            }
        }
        "toml" => {
            add("all", CONFIGURATION.as_bytes());
            for example in ["digits_mlp", "char_gpt2"] {
                add(example, &read(&format!("examples/{example}/train.toml")));
            }
        }
        "plan" => {
            for (name, plan) in plans() {
                let read = |path: &str| std::fs::read(plan.path().join(path)).expect("a plan");
                add(name, &read("plan.json"));
                add(&format!("{name}/eval"), &read("eval/plan.json"));
            }
        }
        "checkpoint" => found.extend(checkpoint_files()),
        "data" => {
            for (name, bytes) in data_files() {
                add(name, &bytes);
            }
        }
        "text" => {
            for pass in ["autocast", "canonicalize", "fuse", "raise", "shard", "simplify", "loss"] {
                let files = read_dir(&file("tests/golden").join(pass));
                found.extend(files.iter().flat_map(graphs_of));
            }
        }
        "rendezvous" => {
            add("greeting", b"\x09\x00\x00\x001 2 abc n");
            add("shared", b"\x07\x00\x00\x001 2 abcs\x02\x00\x00\x00hid\x00\x00\x00\x00");
            add("watched", b"\x07\x00\x00\x001 2 abcs\x00\x00\x00\x00n\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00d\x00\x00\x00\x00");
            add("answered", b"s\x00\x00\x00\x00s\x03\x00\x00\x00abcn\x08\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00d\x00\x00\x00\x00");
            add("refused", b"f\x04\x00\x00\x00stop");
        }
        other => panic!("there is no target {other}"),
    }
    found
}

/// The graphs of a golden file.
fn graphs_of(golden: &Input) -> Vec<Input> {
    let text = String::from_utf8_lossy(&golden.bytes).into_owned();
    let graph = |part: &str| Input { origin: golden.origin.clone(), bytes: part.into() };
    text.split("; ==== expected ====\n").map(graph).collect()
}

fn model_in(dir: &TempDir, text: &str) -> PathBuf {
    let model = dir.path().join("model.json");
    std::fs::write(&model, text).expect("written");
    model
}

/// The plans of [`PLANS`], compiled once.
pub(super) fn plans() -> &'static [(&'static str, Planned)] {
    static ALL: OnceLock<Vec<(&str, Planned)>> = OnceLock::new();
    ALL.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let model = model_in(&dir, MODEL);
        let planned = |(name, settings): &(&'static str, &[&str])| {
            (*name, plan_to_evaluate_at(&model, 2, settings))
        };
        PLANS.iter().map(planned).collect()
    })
}

/// A plan that trains, data for it, and checkpoints of it.
pub(super) struct Trained {
    dir: TempDir,
    pub(super) planned: Planned,
    pub(super) tokens: Planned,
}

impl Trained {
    pub(super) fn data(&self) -> PathBuf {
        self.dir.path().join("data.safetensors")
    }

    pub(super) fn checkpoints(&self) -> PathBuf {
        self.dir.path().join("checkpoints")
    }
}

/// One thread for each rank, and checkpoints in a directory, from which the run goes on.
pub(super) fn options(data: PathBuf, steps: usize, checkpoints: Option<PathBuf>) -> RunOptions {
    let options = |dir| CheckpointOptions { dir, every: Some(1), resume: true, keep: None };
    RunOptions {
        steps,
        data: data.into(),
        checkpoint: checkpoints.map(options),
        threads: Some(1),
        ..RunOptions::default()
    }
}

pub(super) fn trained() -> &'static Trained {
    static TRAINED: OnceLock<Trained> = OnceLock::new();
    TRAINED.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let planned = plan_at(&model_in(&dir, MODEL), 2, PLANS[0].1);
        let tokens = plan_at(&model_in(&dir, TOKENS), 2, &["precision.compute=fp32"]);
        let trained = Trained { dir, planned, tokens };
        write_data(&trained.data());
        let options = options(trained.data(), 2, Some(trained.checkpoints()));
        run(&trained.planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        trained
    })
}

/// Writes eight examples for [`MODEL`].
pub(super) fn write_data(path: &Path) {
    let values = |n: usize| (0..n).map(|i| (i * 7919 % 2039) as f32 / 1024.0 - 1.0).collect();
    write_f32(path, &[("x", vec![8, 3], values(24)), ("labels", vec![8, 4], values(32))]);
}

/// The files of the latest checkpoint, by their path within the directory of checkpoints.
fn checkpoint_files() -> Vec<Input> {
    let root = trained().checkpoints();
    let mut found = Vec::new();
    for folder in ["step-00000002", "step-00000002/source"] {
        for input in read_dir(&root.join(folder)) {
            found.push(Input { origin: format!("{folder}/{}", input.origin), ..input });
        }
    }
    assert!(!found.is_empty(), "no checkpoint in {}", root.display());
    found.extend(read_dir(&root).into_iter().filter(|i| i.origin != "lock"));
    found
}

/// A file of each format that data have.
fn data_files() -> Vec<(&'static str, Vec<u8>)> {
    use npyz::zip::CompressionMethod::{Deflated, Stored};
    let tensors = std::fs::read(trained().data()).expect("data");
    let narrow: Vec<u8> = (0..64_u16).flat_map(|i| (i * 7 % 16).to_le_bytes()).collect();
    let mut header = vec![0_i32; 256];
    (header[0], header[1], header[2]) = (20240520, 1, 64);
    let shard = header.iter().flat_map(|x| x.to_le_bytes()).chain(narrow.clone()).collect();
    vec![
        ("stored.npz", archive(&tensors, Stored)),
        ("deflated.npz", archive(&tensors, Deflated)),
        ("data.safetensors", tensors),
        ("tokens.bin", narrow),
        ("shard.bin", shard),
    ]
}

/// The tensors of a safetensors file, all of f32, as `numpy.savez` writes them.
fn archive(tensors: &[u8], method: npyz::zip::CompressionMethod) -> Vec<u8> {
    use npyz::WriterBuilder;
    let tensors = safetensors::SafeTensors::deserialize(tensors).expect("safetensors");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("data.npz");
    let mut npz = npyz::npz::NpzWriter::create(&path).expect("a file");
    let options = npyz::zip::write::FileOptions::default().compression_method(method);
    for (name, view) in tensors.tensors() {
        let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
        let array = npz.array(&name, options).expect("an array");
        let mut array = array.default_dtype().shape(&shape).begin_nd().expect("a header");
        let values = view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        array.extend(values).expect("written");
        array.finish().expect("written");
    }
    drop(npz);
    std::fs::read(&path).expect("the archive")
}
