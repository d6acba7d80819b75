//! Readers of external input, and the outcome of an input.

use super::origins::{self, Input, MODEL, options, trained};
use super::rendezvous;
use crate::support::Planned;
use frit::compilation::{Observer, Request, compile};
use frit::config::Config;
use frit::diagnostics::Report;
use frit_ir::Graph;
use frit_ir::plan::sha256_hex;
use frit_passes::verify_plan::verify_plan;
use frit_runtime::RunError;
use frit_runtime::run::run;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What became of one input.
pub(super) enum Verdict {
    Accepted,
    /// One or more diagnostics that a user can do something about. It went `deep` if it was read as what it is meant to
    /// be, and refused for what it says.
    Refused {
        deep: bool,
        /// The code of the first diagnostic, or what else tells reasons apart.
        why: String,
    },
    /// An error that is the compiler's fault.
    Internal(String),
}

/// One reader of inputs.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// Mutants of a usual test run.
    pub(super) few: u64,
}

/// All readers of inputs.
pub(super) const TARGETS: [Target; 8] = [
    Target { name: "onnx", few: 400 },
    Target { name: "json", few: 400 },
    Target { name: "toml", few: 300 },
    Target { name: "plan", few: 300 },
    Target { name: "checkpoint", few: 100 },
    Target { name: "data", few: 200 },
    Target { name: "text", few: 1000 },
    Target { name: "rendezvous", few: 100 },
];

/// What models are compiled with; the bytes of a model say with which of these.
const SETTINGS: [&[&str]; 10] = [
    &["loss.kind=mse", "precision.compute=bf16", "sharding.ranks=2"],
    &["sharding.ranks=1", "memory.recompute=selective"],
    &["loss.kind=none"],
    &["loss.kind=mse", "sharding.ranks=3", "run.accumulation=2", "memory.offload=optimizer"],
    &["loss.kind=mse", "target.device=cuda", "target.arch=sm_90", "sharding.ranks=2"],
    &[
        "loss.kind=none",
        "precision.fp8=true",
        "sharding.ranks=2",
        "target.device=cuda",
        "target.arch=sm_90",
    ],
    &[
        "loss.kind=l1",
        "sharding.ranks=2",
        "sharding.strategy=no_shard",
        "optimizer.kind=adafactor",
        "precision.fp8=true",
        "memory.recompute=unit",
    ],
    &[
        "loss.kind=mse",
        "sharding.ranks=4",
        "sharding.strategy=hybrid_shard",
        "sharding.shard_group=2",
        "precision.compute=fp16",
        "optimizer.decay=matrices",
        "optimizer.ema=0.9",
    ],
    &[
        "loss.kind=mse",
        "precision.pure=true",
        "sharding.ranks=2",
        "sharding.prefetch=auto",
        "optimizer.kind=muon",
    ],
    &[
        "loss.kind=mse",
        "model.batch_norm=sync",
        "sharding.ranks=2",
        "sharding.strategy=shard_optimizer",
        "run.accumulation=2",
        "memory.offload=parameters",
        "padding.tensor_cores=always",
    ],
];

/// One of so many compilations makes machine code.
const PER_CODE: usize = 16;

fn judge<T>(result: Result<T, Report>, deep: bool) -> Verdict {
    let Err(report) = result else { return Verdict::Accepted };
    // A kernel that cannot be compiled is the compiler's fault, too: a linker is there.
    match report.is_internal() || report.diagnostics.iter().any(|d| d.code == "E095") {
        true => Verdict::Internal(report.to_string()),
        false => refused(deep, report.diagnostics.first().map_or("", |d| &d.code)),
    }
}

fn refused(deep: bool, why: &str) -> Verdict {
    Verdict::Refused { deep, why: why.into() }
}

fn judge_run<T>(result: Result<T, RunError>, deep: bool) -> Verdict {
    match result {
        Ok(_) => Verdict::Accepted,
        Err(e) => refused(deep, &format!("{e:?}")),
    }
}

type Run = Box<dyn Fn(&Input) -> Verdict>;

/// Makes ready to run inputs of a target.
pub(super) fn prepare(target: &str) -> Run {
    let dir = tempfile::tempdir().expect("a directory");
    match target {
        "onnx" | "json" => {
            let model = format!("model.{target}");
            Box::new(move |input| compiled(&written(&dir, &model, &input.bytes), &input.bytes))
        }
        "toml" => {
            let model = written(&dir, "model.json", MODEL.as_bytes());
            Box::new(move |input| {
                let _dir = &dir;
                configured(&model, &input.bytes)
            })
        }
        "plan" => Box::new(move |input| planned(&dir, input)),
        "checkpoint" => Box::new(move |input| resumed(&dir, input)),
        "data" => Box::new(move |input| fed(&dir, input)),
        "text" => Box::new(|input| text(&input.bytes)),
        "rendezvous" => Box::new(|input| rendezvous::hear(&input.bytes)),
        other => panic!("there is no target {other}"),
    }
}

fn written(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).expect("written");
    path
}

/// Whether a pass ran: the model was read.
#[derive(Default)]
struct Passed(bool);

impl Observer for Passed {
    fn after(&mut self, _: usize, _: &str, _: &Graph) {
        self.0 = true;
    }
}

/// Machine code, which takes ten times as long as all else, is made for one of [`PER_CODE`] inputs.
fn request(model: &Path, kind: usize) -> Request {
    Request {
        model: model.into(),
        evaluation: true,
        verify_each: true,
        without_code: !(kind / SETTINGS.len()).is_multiple_of(PER_CODE),
        ..Request::default()
    }
}

/// A number that depends on all bytes.
fn hash(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |h, b| h.wrapping_mul(31).wrapping_add(usize::from(*b)))
}

fn compiled(model: &Path, bytes: &[u8]) -> Verdict {
    let kind = hash(bytes);
    let sets: Vec<String> = SETTINGS[kind % SETTINGS.len()].iter().map(|s| s.to_string()).collect();
    let config = Config::parse("", "train.toml", &sets).unwrap_or_else(|e| panic!("{e}"));
    // A name that no dimension has would be refused.
    let has = bytes.windows(5).any(|w| w == b"batch");
    let binds = has.then(|| ("batch".to_string(), 2)).into_iter().collect();
    let mut passed = Passed::default();
    let result = compile(&Request { binds, ..request(model, kind) }, &config, &mut passed);
    judge(result, passed.0)
}

fn configured(model: &Path, bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return refused(false, "UTF-8") };
    let config = match Config::parse(text, "train.toml", &[]) {
        Ok(config) => config,
        Err(report) => return judge::<()>(Err(report), false),
    };
    let binds = [("batch".to_string(), 2)].into();
    judge(compile(&Request { binds, ..request(model, hash(bytes)) }, &config, &mut ()), true)
}

/// The plan of this name, in a copy of its directory.
fn copied<'a>(dir: &TempDir, name: &str, planned: &'a Planned) -> (PathBuf, &'a Planned) {
    let copy = dir.path().join(name);
    if !copy.exists() {
        copy_all(&planned.path(), &copy);
    }
    (copy, planned)
}

/// Reads and proves a plan; what is proved is executed.
fn planned(dir: &TempDir, input: &Input) -> Verdict {
    let (name, part) = input.origin.split_once('/').unwrap_or((&input.origin, ""));
    let all = origins::plans();
    let (name, original) = all.iter().find(|(n, _)| *n == name).unwrap_or(&all[0]);
    let (copy, original) = copied(dir, name, original);
    let path = copy.join(part);
    std::fs::write(path.join("plan.json"), &input.bytes).expect("written");
    let plan = match frit::plan_dir::read(&path) {
        Ok(plan) => plan,
        Err(report) => return judge::<()>(Err(report), false),
    };
    plan.summary();
    let proved = verify_plan(&plan);
    if part.is_empty() && proved.is_ok() {
        let data = dir.path().join("data.safetensors");
        if !data.exists() {
            origins::write_data(&data);
        }
        // That there are too few examples, or too many ranks for this machine, is said.
        let _ = run(&path, &options(data, 1, None));
    }
    let original = original.path().join(part).join("plan.json");
    std::fs::copy(original, path.join("plan.json")).expect("copied");
    match proved {
        Ok(()) => Verdict::Accepted,
        Err(diagnostics) => refused(true, &diagnostics[0].code),
    }
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory").map_while(Result::ok) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy_all(&path, &to),
            false => drop(std::fs::copy(&path, &to).expect("copied")),
        }
    }
}

fn fed(dir: &TempDir, input: &Input) -> Verdict {
    let trained = trained();
    let data = written(dir, &input.origin, &input.bytes);
    let plan = if input.origin.ends_with(".bin") { &trained.tokens } else { &trained.planned };
    judge_run(run(&plan.path(), &options(data, 1, None)), false)
}

/// Goes on from checkpoints of which one file was changed.
fn resumed(dir: &TempDir, input: &Input) -> Verdict {
    let trained = trained();
    let copy = dir.path().join("checkpoints");
    let _ = std::fs::remove_dir_all(&copy);
    copy_all(&trained.checkpoints(), &copy);
    std::fs::write(copy.join(&input.origin), &input.bytes).expect("written");
    // Under its old sums most of what is changed would be refused for that alone.
    let sealed = !input.bytes.len().is_multiple_of(8);
    if sealed && let Some((folder, file)) = input.origin.split_once('/') {
        sum_anew(&copy.join(folder), file);
    }
    let deep = frit_runtime::checkpoint::Checkpoint::open(&copy).is_ok();
    judge_run(run(&trained.planned.path(), &options(trained.data(), 3, Some(copy))), deep)
}

/// Gives a changed file of a checkpoint its checksums.
fn sum_anew(checkpoint: &Path, file: &str) {
    let (index, sums) = (checkpoint.join("index.json"), checkpoint.join("SHA256SUMS"));
    let read = |path: &Path| std::fs::read(path).unwrap_or_default();
    let bytes = read(&checkpoint.join(file));
    if let (Ok(tensors), Ok(mut value)) = (
        safetensors::SafeTensors::deserialize(&bytes),
        serde_json::from_slice::<Value>(&read(&index)),
    ) {
        for (name, entry) in value["tensors"].as_object_mut().into_iter().flatten() {
            let parts = entry["parts"].as_array_mut().into_iter().flatten();
            for part in parts.filter(|part| part["file"] == file) {
                if let Ok(tensor) = tensors.tensor(name) {
                    part["sha256"] = sha256_hex(tensor.data()).into();
                }
            }
        }
        std::fs::write(&index, value.to_string()).expect("written");
    }
    let known = String::from_utf8_lossy(&read(&sums)).into_owned();
    let anew = |name: &str| format!("{}  {name}\n", sha256_hex(&read(&checkpoint.join(name))));
    let names = known.lines().filter_map(|line| line.split_once("  "));
    let text: String = names.map(|(_, name)| anew(name)).collect();
    std::fs::write(&sums, if file == "SHA256SUMS" { known } else { text }).expect("written");
}

/// A text that is read is printed and read again the same.
fn text(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return refused(false, "UTF-8") };
    let Ok(graph) = frit_ir::text::parse(text) else { return refused(false, "syntax") };
    // A graph that breaks a law is what the verifier is for.
    let lawful = frit_ir::verify::verify(&graph);
    let printed = graph.to_string();
    match frit_ir::text::parse(&printed) {
        Ok(again) if again.to_string() == printed => match lawful {
            Ok(()) => Verdict::Accepted,
            Err(found) => refused(true, &found[0].code),
        },
        Ok(again) => Verdict::Internal(format!("{printed} is read as {again}")),
        Err(e) => Verdict::Internal(format!(
            "{printed} cannot be read again: line {}: {}",
            e.line, e.message
        )),
    }
}
