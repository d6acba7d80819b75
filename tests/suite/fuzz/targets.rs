//! What reads an input from outside, and what its mutants are made from.

use super::mutate::{change_bytes, change_protobuf, change_value};
use crate::machine::Random;
use crate::support::{file, plan_at, write_f32};
use frit::config::Config;
use frit::diagnostics::Report;
use frit::driver::{Request, compile};
use frit_passes::verify_plan::verify_plan;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::comm::launch::Launch;
use frit_runtime::comm::rendezvous::Rendezvous;
use frit_runtime::comm::secret::{Secret, SecretSource};
use frit_runtime::run::{RunOptions, run};
use serde_json::Value;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// What became of one input.
pub(super) enum Verdict {
    Accepted,
    /// One or more diagnostics that a user can do something about.
    Refused,
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
    Target { name: "rendezvous", few: 20 },
];

const MODEL: &str = r#"{ "frit_model": 1, "name": "layers",
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

const SETTINGS: [&str; 3] = ["loss.kind=mse", "loss.logits=a", "sharding.ranks=2"];

/// The configurations that mutants of `toml` start from, besides those of the examples.
const CONFIGURATION: &str = r#"
[sharding]
ranks = 4
strategy = "hybrid_shard"
shard_group = 2
[precision]
compute = "bf16"
[loss]
kind = "mse"
logits = "a"
[optimizer]
kind = "adamw"
lr = 1e-3
decay = "matrices"
schedule = { kind = "cosine", warmup = 10, steps = 100 }
[[optimizer.group]]
scope = "h.*"
lr = 1e-4
[memory]
recompute = "selective"
offload = "optimizer"
[run]
accumulation = 2
seed = 7
"#;

fn read_dir(path: &Path, extension: Option<&str>) -> Vec<Named> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(path) else { return found };
    for entry in entries.map_while(Result::ok) {
        let path = entry.path();
        let fits = extension.is_none_or(|e| path.extension().is_some_and(|x| x == e));
        if path.is_file() && fits {
            let name = path.file_name().expect("a file").to_string_lossy().into_owned();
            found.push((name, std::fs::read(&path).expect("a file")));
        }
    }
    found.sort();
    found
}

/// The inputs that the mutants of a target start from, with their names.
fn origins(target: &str) -> Vec<Named> {
    let mut found = read_dir(&file("tests/fuzz/corpus").join(target), None);
    let mut add = |name: &str, bytes: Vec<u8>| found.push((name.to_string(), bytes));
    match target {
        "onnx" => {
            for model in ["mlp", "gpt2", "resnet", "dropout"] {
                let path = format!("tests/models/{model}/model.onnx");
                add(model, std::fs::read(file(&path)).expect("a model"));
            }
        }
        "json" => {
            add("layers", MODEL.into());
            add("digits", std::fs::read(file("examples/digits_mlp/model.json")).expect("a model"));
        }
        "toml" => {
            add("all", CONFIGURATION.into());
            for example in ["digits_mlp", "char_gpt2"] {
                let path = format!("examples/{example}/train.toml");
                add(example, std::fs::read(file(&path)).expect("a configuration"));
            }
        }
        "plan" => {
            let plan = std::fs::read(trained().plan.join("plan.json")).expect("a plan");
            add("layers", plan);
            let plan = std::fs::read(trained().plan.join("eval/plan.json"));
            found.extend(plan.ok().map(|p| ("evaluation".to_string(), p)));
        }
        "checkpoint" => found.extend(checkpoint_files()),
        "data" => add("data.safetensors", std::fs::read(&trained().data).expect("data")),
        "text" => {
            for pass in ["autocast", "canonicalize", "fuse", "raise", "shard", "simplify", "loss"] {
                found.extend(read_dir(&file("tests/golden").join(pass), None));
            }
        }
        "rendezvous" => {
            add("greeting", b"\x0b\x00\x00\x001 2 digests\x00".to_vec());
            add(
                "words",
                b"\x07\x00\x00\x001 2 abcs\x04\x00\x00\x00\x01\x00\x00\x00d\x00\x00\x00\x00"
                    .to_vec(),
            );
        }
        other => panic!("there is no target {other}"),
    }
    found
}

/// An input and its name.
type Named = (String, Vec<u8>);

/// The origins of a target, read once.
fn all_origins(target: &str) -> &'static [Named] {
    static ORIGINS: [OnceLock<Vec<Named>>; TARGETS.len()] =
        [const { OnceLock::new() }; TARGETS.len()];
    let at = TARGETS.iter().position(|t| t.name == target);
    let at = at.unwrap_or_else(|| panic!("there is no target {target}"));
    ORIGINS[at].get_or_init(|| origins(target))
}

/// The `number`-th mutant of a target, and what it was made from.
pub(super) fn mutant(target: &str, number: u64) -> (&'static str, Vec<u8>) {
    let salt = target.bytes().fold(0_u64, |h, b| h.wrapping_mul(31) + u64::from(b));
    let mut random = Random::new(number.wrapping_mul(0x9e37_79b9).wrapping_add(salt << 32));
    let all = all_origins(target);
    let (origin, bytes) = &all[random.below(all.len())];
    let mut bytes = bytes.clone();
    let structured = random.below(8) > 0;
    match target {
        "onnx" if structured => change_protobuf(&mut random, &mut bytes),
        "json" if structured => match serde_json::from_slice(&bytes) {
            Ok(value) => bytes = changed_value(&mut random, value).to_string().into_bytes(),
            Err(_) => change_bytes(&mut random, &mut bytes),
        },
        // Under its old seal a changed plan would be refused for that alone.
        "plan" if structured => match serde_json::from_slice::<Value>(&bytes) {
            Ok(mut value) => {
                value.as_object_mut().map(|fields| fields.remove("sha256"));
                let changed = changed_value(&mut random, value);
                let text = serde_json::to_string_pretty(&changed).expect("invariant: it was JSON");
                bytes = frit_ir::plan::seal(&text).into_bytes();
            }
            Err(_) => change_bytes(&mut random, &mut bytes),
        },
        "toml" if structured => match std::str::from_utf8(&bytes).ok().and_then(as_value) {
            Some(value) => {
                let changed = changed_value(&mut random, value);
                bytes = toml::to_string(&changed).unwrap_or_default().into_bytes();
            }
            None => change_bytes(&mut random, &mut bytes),
        },
        "checkpoint" if structured && bytes.first() == Some(&b'{') => {
            if let Ok(value) = serde_json::from_slice(&bytes) {
                bytes = changed_value(&mut random, value).to_string().into_bytes();
            }
        }
        _ => change_bytes(&mut random, &mut bytes),
    }
    (origin, bytes)
}

fn changed_value(random: &mut Random, mut value: Value) -> Value {
    change_value(random, &mut value);
    value
}

fn as_value(text: &str) -> Option<Value> {
    toml::from_str::<Value>(text).ok()
}

/// A plan, data for it, and checkpoints of it, in a directory that lives as long as the process.
struct Trained {
    dir: TempDir,
    plan: PathBuf,
    data: PathBuf,
}

impl Trained {
    fn options(&self, data: PathBuf, steps: usize, checkpoints: Option<PathBuf>) -> RunOptions {
        let checkpoint = checkpoints.map(|dir| CheckpointOptions {
            dir,
            every: Some(1),
            resume: true,
            keep: None,
        });
        RunOptions {
            steps,
            data: data.into(),
            checkpoint,
            threads: Some(1),
            ..RunOptions::default()
        }
    }
}

fn trained() -> &'static Trained {
    static TRAINED: OnceLock<Trained> = OnceLock::new();
    TRAINED.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let model = dir.path().join("model.json");
        std::fs::write(&model, MODEL).expect("written");
        let planned = plan_at(&model, 2, &SETTINGS);
        let (plan, data) = (dir.path().join("plan"), dir.path().join("data.safetensors"));
        std::fs::rename(planned.path(), &plan).expect("on one file system");
        let values = |n: usize| (0..n).map(|i| (i * 7919 % 2039) as f32 / 1024.0 - 1.0).collect();
        write_f32(&data, &[("x", vec![8, 3], values(24)), ("labels", vec![8, 4], values(32))]);
        let trained = Trained { dir, plan, data };
        let checkpoints = trained.dir.path().join("checkpoints");
        let options = trained.options(trained.data.clone(), 2, Some(checkpoints));
        run(&trained.plan, &options).unwrap_or_else(|e| panic!("{e}"));
        trained
    })
}

/// The files of the latest checkpoint, by their path within the directory of checkpoints.
fn checkpoint_files() -> Vec<Named> {
    let root = trained().dir.path().join("checkpoints");
    let latest = root.join("step-00000002");
    let mut found = read_dir(&latest, None);
    for (name, _) in &mut found {
        *name = format!("step-00000002/{name}");
    }
    assert!(!found.is_empty(), "no checkpoint in {}", latest.display());
    found.extend(read_dir(&root, None));
    found
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

/// Diagnostics whose codes are of the graph's laws, of the plan's proof, or of a broken pass are the compiler's fault.
fn judge<T>(result: Result<T, Report>) -> Verdict {
    let Err(report) = result else { return Verdict::Accepted };
    let internal = |d: &&frit_ir::Diagnostic| d.code.starts_with(['V', 'P', 'B']);
    match report.diagnostics.iter().find(internal) {
        Some(d) => Verdict::Internal(format!("{}: {}", d.code, d.message)),
        None => Verdict::Refused,
    }
}

fn judge_run<T, E>(result: Result<T, E>) -> Verdict {
    if result.is_ok() { Verdict::Accepted } else { Verdict::Refused }
}

type Run = Box<dyn Fn(&[u8]) -> Verdict>;

/// Makes ready to run inputs of a target.
pub(super) fn prepare(target: &str) -> Run {
    let dir = tempfile::tempdir().expect("a directory");
    match target {
        "onnx" => Box::new(move |bytes| compiled(&written(&dir, "model.onnx", bytes), "", bytes)),
        "json" => Box::new(move |bytes| compiled(&written(&dir, "model.json", bytes), "", bytes)),
        "toml" => {
            let model = written(&dir, "model.json", MODEL.as_bytes());
            Box::new(move |bytes| {
                let _dir = &dir;
                match std::str::from_utf8(bytes) {
                    Ok(text) => compiled(&model, text, &[]),
                    Err(_) => Verdict::Refused,
                }
            })
        }
        "plan" => {
            let copy = dir.path().join("plan");
            copy_all(&trained().plan, &copy);
            Box::new(move |bytes| {
                let _dir = &dir;
                std::fs::write(copy.join("plan.json"), bytes).expect("written");
                let Ok(plan) = frit::plan_dir::read(&copy) else { return Verdict::Refused };
                let proved = verify_plan(&plan);
                plan.summary();
                judge_run(proved)
            })
        }
        "checkpoint" => Box::new(move |bytes| resumed(&dir, bytes)),
        "data" => Box::new(move |bytes| {
            let trained = trained();
            let names = ["data.safetensors", "data.npz", "data.bin"];
            let data = written(&dir, names[bytes.len() % 3], bytes);
            judge_run(run(&trained.plan, &trained.options(data, 1, None)))
        }),
        "text" => Box::new(text),
        "rendezvous" => Box::new(rendezvous),
        other => panic!("there is no target {other}"),
    }
}

fn written(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).expect("written");
    path
}

/// Compiles a model; every few with machine code and several ranks, most only as far as predictions need.
fn compiled(model: &Path, toml: &str, bytes: &[u8]) -> Verdict {
    let kind = bytes.iter().fold(0_usize, |h, b| h.wrapping_mul(31).wrapping_add(usize::from(*b)));
    let sets: &[&str] = match (toml.is_empty(), kind % 4) {
        (false, _) => &[],
        (_, 0) => &["loss.kind=mse", "precision.compute=bf16", "sharding.ranks=2"],
        (_, 1) => &["sharding.ranks=1", "memory.recompute=selective"],
        (_, 2) => &["loss.kind=none"],
        _ => {
            &["loss.kind=mse", "sharding.ranks=3", "run.accumulation=2", "memory.offload=optimizer"]
        }
    };
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let compile = || {
        let config = Config::parse(toml, "train.toml", &sets)?;
        let request = Request {
            model: model.into(),
            binds: [("batch".to_string(), 2)].into(),
            evaluation: true,
            verify_each: true,
            ..Request::default()
        };
        compile(&request, &config, &mut ())
    };
    judge(compile())
}

/// Goes on from checkpoints of which one file was changed.
fn resumed(dir: &TempDir, bytes: &[u8]) -> Verdict {
    let trained = trained();
    let copy = dir.path().join("checkpoints");
    let _ = std::fs::remove_dir_all(&copy);
    copy_all(&trained.dir.path().join("checkpoints"), &copy);
    // The mutant is of the file that it differs least from in length; which one matters little.
    let nearest =
        all_origins("checkpoint").iter().min_by_key(|(_, b)| b.len().abs_diff(bytes.len()));
    let (name, _) = nearest.expect("there are files");
    std::fs::write(copy.join(name), bytes).expect("written");
    judge_run(run(&trained.plan, &trained.options(trained.data.clone(), 3, Some(copy))))
}

/// A text that is read is printed and read again the same.
fn text(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(graph) = frit_ir::text::parse(text) else { return Verdict::Refused };
    // A graph that breaks a law is what the verifier is for.
    let lawful = frit_ir::verify::verify(&graph);
    let printed = graph.to_string();
    match frit_ir::text::parse(&printed) {
        Ok(again) if again.to_string() == printed => judge_run(lawful),
        Ok(again) => Verdict::Internal(format!("{printed} is read as {again}")),
        Err(e) => Verdict::Internal(format!(
            "{printed} cannot be read again: line {}: {}",
            e.line, e.message
        )),
    }
}

/// Rank 0 of two hears `bytes` from one that knows the secret, then the real rank 1 may be too late.
fn rendezvous(bytes: &[u8]) -> Verdict {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let patience = Duration::from_millis(60);
    let source = SecretSource::Known(Secret::from_bytes(b"the secret of mutants"));
    let launch = Launch {
        rank: 0,
        world_size: 2,
        local_rank: None,
        local_size: None,
        master: Some(("127.0.0.1".into(), port)),
        by_mpirun: false,
    };
    let bytes = bytes.to_vec();
    let speaker = std::thread::spawn(move || {
        for _ in 0..50 {
            if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                // It may be hung up on.
                let _ = stream.write_all(&bytes);
                std::thread::sleep(Duration::from_millis(40));
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    let met = Rendezvous::meet_with(&launch, &source, "abc", patience);
    speaker.join().expect("it does not panic");
    judge_run(met)
}
