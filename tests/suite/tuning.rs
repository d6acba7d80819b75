//! The choice of kernels at the first start on a GPU: what is measured, within which time, and what is written of it.

use crate::cuda::step;
use crate::pairs::rows;
use crate::stand_ins::Gpu;
use crate::support::{Planned, file, plan, plan_at};
use frit_cuda::recording::{Call, Recording};
use frit_ir::plan::{CandidateName, Entry, Launch, Plan};
use frit_runtime::RunError;
use frit_runtime::device::Device;
use frit_runtime::device::cuda::{Cuda, Limits, Ranks, times};
use frit_runtime::plan_dir::PlanDir;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

fn planned(model: &str) -> (Planned, PlanDir) {
    let settings = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &settings);
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    (planned, dir)
}

/// Opens a plan with so many seconds for measuring.
fn open(dir: &PlanDir, driver: Recording, seconds: u64) -> Result<Cuda<'_, Recording>, RunError> {
    let ranks = Ranks { rank: 0, rendezvous: None, timeout: Duration::from_secs(60) };
    Cuda::new(dir, driver, ranks, Limits::of(Some(seconds)))
}

/// What the file says of every GEMM and choice.
fn written(plan: &Path) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(plan.join("tuning.json")).unwrap_or_else(|_| "{}".into());
    let all: BTreeMap<String, BTreeMap<String, Value>> =
        serde_json::from_str(&text).expect("a tuning file");
    all.into_values().flatten().collect()
}

fn of(measured: &Value, key: &str) -> Vec<Option<f64>> {
    let times = measured["candidates"].as_array().expect("candidates").iter();
    times.map(|timed| timed[key].as_f64()).collect()
}

/// Whether something was measured.
fn is_measured(call: &Call) -> bool {
    matches!(call, Call::Multiply(..) | Call::Execute(..) | Call::BeginCapture(_))
}

#[test]
fn the_best_four_of_all_algorithms_are_measured_again_in_a_graph() {
    let (planned, dir) = planned("mlp");
    let mut driver = Recording::new((9, 0));
    driver.n_algorithms = 7;
    let times = [90.0, 20.0, 10.0, 50.0, 30.0, 40.0, 25.0];
    let names = ["algorithm 1", "algorithm 2", "algorithm 3", "algorithm 4", "algorithm 5"];
    let names = names.into_iter().chain(["algorithm 6", "algorithm 7"]);
    driver.durations = names.zip(times).collect();
    // Fast by itself is not fast in a graph.
    driver.captured_durations = vec![("algorithm 3", 60.0), ("algorithm 7", 5.0)];
    let mut device = open(&dir, driver, 100).unwrap_or_else(|e| panic!("{e}"));
    let mut n_gemms = 0;
    for (key, measured) in written(&planned.path()) {
        if key.contains(" or ") {
            continue;
        }
        n_gemms += 1;
        let us: Vec<i64> = of(&measured, "us").iter().map(|t| t.expect("a time") as i64).collect();
        assert_eq!(us, times.map(|t| t as i64), "{key}: every algorithm is measured");
        let in_graph = of(&measured, "graph_us").iter().map(Option::is_some).collect::<Vec<_>>();
        assert_eq!(in_graph, [false, true, true, false, true, false, true], "{key}");
        assert_eq!(measured["chosen"]["with"][0], 7, "{key}: {measured}");
    }
    assert!(n_gemms >= 4, "{n_gemms}");
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
    let gemms = calls.iter().filter_map(|c| match c {
        Call::Multiply(name, ..) => Some(name),
        _ => None,
    });
    assert!(gemms.clone().count() > 0 && gemms.clone().all(|n| n.ends_with("algorithm 7")));
}

#[test]
fn every_result_is_written_at_once_and_a_start_that_ended_goes_on_there() {
    let (planned, dir) = planned("gpt2");
    let with = |lost_after| {
        let mut driver = Recording::new((9, 0));
        driver.engines = Some(2);
        driver.lost_after.set(lost_after);
        driver.durations = vec![("algorithm 2", 0.5)];
        driver
    };
    let path = planned.path();
    let mut known: BTreeMap<String, Value> = BTreeMap::new();
    let mut starts = 0;
    loop {
        let all = open(&dir, with(Some(120)), 1000);
        let now = written(&path);
        for (key, measured) in &known {
            assert_eq!(now.get(key), Some(measured), "what was chosen stays");
        }
        assert!(now.len() > known.len(), "each start gets further");
        known = now;
        starts += 1;
        if all.is_ok() {
            break;
        }
    }
    assert!(starts > 3, "{starts}");
    // In one go the same is chosen.
    std::fs::remove_file(path.join("tuning.json")).expect("removed");
    open(&dir, with(None), 1000).unwrap_or_else(|e| panic!("{e}"));
    let chosen = |all: &BTreeMap<String, Value>| -> BTreeMap<String, Value> {
        all.iter().map(|(key, measured)| (key.clone(), measured["chosen"].clone())).collect()
    };
    assert_eq!(chosen(&written(&path)), chosen(&known));
    let names = std::fs::read_dir(&path).expect("a folder");
    let left = names.map(|f| f.expect("a file").file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().contains("partial")));
}

/// Engines take seconds to be made ready; the recording driver's clock says so.
#[test]
fn what_is_not_measured_in_time_is_chosen_without_and_said() {
    const COMPILE: f64 = 20e6;
    let (planned, dir) = planned("resnet");
    let slow = || {
        let mut driver = Recording::new((9, 0));
        driver.engines = Some(3);
        driver.plan_us = COMPILE;
        driver.durations = vec![("algorithm 2", 0.1), ("conv", 100.0)];
        driver
    };
    let (path, seconds) = (planned.path(), 100);
    let mut device = open(&dir, slow(), seconds).unwrap_or_else(|e| panic!("{e}"));
    let note = device.note().expect("a note").to_string();
    for part in ["were made before all", "tuning.json", "--tuning-seconds", "100"] {
        assert!(note.contains(part), "{note}");
    }
    let first = written(&path);
    let choices = || first.iter().filter(|(key, _)| key.contains("cudnn or "));
    let hurried = choices().filter(|(_, m)| m["unmeasured"].as_u64() > Some(0));
    let (n, n_hurried) = (choices().count(), hurried.clone().count());
    assert!(n_hurried > 0 && n_hurried < n, "{n_hurried} of {n}");
    let n_all = first.values().filter(|m| m["unmeasured"].as_u64() > Some(0)).count();
    assert!(note.starts_with(&format!("{n_all} of {} choices", first.len())), "{note}");
    // The first had all the time that it needed, the last none.
    let by_engine = choices().filter(|(_, m)| m["chosen"]["candidate"] == "cudnn").count();
    assert!((1..n).contains(&by_engine), "{by_engine} of {n}");
    for (key, measured) in hurried.filter(|(_, m)| of(m, "us").is_empty()) {
        assert_eq!(measured["chosen"]["candidate"], "frit", "{key}");
    }
    // Every GEMM is measured, at least once.
    for (key, measured) in first.iter().filter(|(key, _)| !key.contains(" or ")) {
        assert!(!of(measured, "us").is_empty(), "{key}");
    }
    let executed = |device: &mut Cuda<'_, Recording>| -> Vec<String> {
        let calls = step(device, &dir.plan, dir.plan.tasks.next_key());
        let name = |c: Call| match c {
            Call::Execute(name, ..) | Call::Multiply(name, ..) => Some(name),
            _ => None,
        };
        calls.into_iter().filter_map(name).collect()
    };
    let names = executed(&mut device);
    drop(device);
    // The choice is kept, and said again; more time changes nothing until the file is gone.
    let mut device = open(&dir, slow(), 10_000).unwrap_or_else(|e| panic!("{e}"));
    assert!(!device.driver().take().iter().any(is_measured), "nothing is measured again");
    assert!(device.note().is_some_and(|note| note.starts_with(&format!("{n_all} of "))));
    assert_eq!(executed(&mut device), names);
    assert_eq!(written(&path), first);
    drop(device);
    std::fs::remove_file(path.join("tuning.json")).expect("removed");
    let device = open(&dir, slow(), 10_000).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(device.note(), None);
    assert!(written(&path).values().all(|m| m["unmeasured"].is_null()));
}

#[test]
fn without_time_every_gemm_has_an_algorithm_and_no_engine_is_compiled() {
    let (planned, dir) = planned("gpt2");
    let mut driver = Recording::new((9, 0));
    (driver.engines, driver.n_algorithms) = (Some(3), 5);
    let mut device = open(&dir, driver, 0).unwrap_or_else(|e| panic!("{e}"));
    for (key, measured) in written(&planned.path()) {
        if key.contains(" or ") {
            assert!(of(&measured, "us").is_empty() && measured["unmeasured"].as_u64() > Some(1));
            let chosen = if key.starts_with("cudnn") { "frit" } else { "cublaslt" };
            assert_eq!(measured["chosen"]["candidate"], chosen, "{key}");
        } else {
            assert_eq!(of(&measured, "us").len(), 1, "{key}: {measured}");
            assert_eq!(measured["unmeasured"], 4, "{key}");
        }
    }
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
    assert!(!calls.iter().any(|c| matches!(c, Call::Execute(..))));
}

#[test]
fn operands_are_random_and_the_same_in_every_start() {
    let (planned, dir) = planned("gpt2");
    let copies = || {
        let device = open(&dir, Recording::new((9, 0)), 100).unwrap_or_else(|e| panic!("{e}"));
        let calls = device.driver().take();
        let freed = calls.iter().position(|c| matches!(c, Call::Free(_))).expect("memory is lent");
        let multiplied = calls.iter().position(is_measured).expect("something is measured");
        let filled = |c: &&Call| matches!(c, Call::CopyIn(_, bytes, _) | Call::Copy(_, _, bytes, _) if *bytes > 0);
        assert!(calls[..multiplied].iter().any(|c| filled(&c)), "before it is measured");
        let copies: Vec<Call> = calls[..freed].iter().filter(filled).cloned().collect();
        std::fs::remove_file(planned.path().join("tuning.json")).expect("removed");
        copies
    };
    let first = copies();
    let places: BTreeSet<u64> = first
        .iter()
        .filter_map(|c| match c {
            Call::CopyIn(to, ..) => Some(*to),
            _ => None,
        })
        .collect();
    assert!(places.len() > 3, "{places:?}");
    assert_eq!(first, copies());
}

#[test]
fn the_library_is_asked_for_32_algorithms() {
    let (planned, _dir) = planned("mlp");
    let data = file("tests/models/mlp/data.safetensors");
    let path = planned.path();
    let [plan, data] = [path.as_path(), &data].map(|p| p.to_str().expect("Unicode").to_string());
    let gpu = Gpu::new();
    let ended = gpu.run(&["run", &plan, "--data", &data, "--tuning-seconds", "1000"]);
    ended.expect_success();
    let asked: u64 = ended
        .log
        .iter()
        .filter(|(what, _)| what.starts_with("heuristics of"))
        .map(|(_, n)| n)
        .sum();
    assert!(asked > 0 && ended.count("heuristics of 32") == asked, "{:?}", ended.log);
    let entries = written(&path);
    let gemms = entries.iter().filter(|(key, _)| !key.contains(" or ")).count();
    assert_eq!(gemms as u64, asked);
    // With no time the run says what it did without.
    std::fs::remove_file(path.join("tuning.json")).expect("removed");
    let ended = gpu.run(&["run", &plan, "--data", &data, "--tuning-seconds", "0"]);
    ended.expect_success();
    assert!(
        ended.said.contains("warning: ") && ended.said.contains("--tuning-seconds"),
        "{}",
        ended.said
    );
}

/// A language model whose attention has as many queries and keys as the gradient's engines take.
fn planned_of_text(settings: &[&str]) -> (Planned, PlanDir) {
    let text = std::fs::read_to_string(file("examples/char_gpt2/model.json")).expect("a model");
    let longer = text.replace("\"seq\": 64", "\"seq\": 128");
    assert_ne!(text, longer, "the model has another length");
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("model.json");
    std::fs::write(&path, longer).expect("written");
    let cuda = ["target.device=cuda", "target.arch=sm_80"];
    let planned = plan_at(&path, 2, &[&cuda, settings].concat());
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    (planned, dir)
}

/// The names of the candidates of all choices.
fn candidates(plan: &Plan) -> BTreeSet<&'static str> {
    let entries = plan.kernels.iter().filter_map(|kernel| match &kernel.entry {
        Entry::Launches(selected) => Some(selected.every_launch()),
        _ => None,
    });
    let names = |launch: &Launch| match launch {
        Launch::Choice(all) => all.iter().map(|c| c.name.word()).collect(),
        _ => vec![],
    };
    entries.flatten().flat_map(names).collect()
}

#[test]
fn without_determinism_a_faster_order_of_additions_is_taken_and_both_times_are_kept() {
    let fast = || {
        let mut driver = Recording::new((9, 0));
        driver.engines = Some(2);
        driver.durations = vec![("any order", 10.0), ("attention_grad", 30.0), ("attention", 20.0)];
        driver
    };
    for (setting, expected) in [("true", "cudnn"), ("false", "cudnn_any_order")] {
        let deterministic = format!("run.deterministic={setting}");
        let (planned, dir) = planned_of_text(&["precision.compute=bf16", &deterministic]);
        assert_eq!(dir.plan.deterministic, setting == "true");
        drop(open(&dir, fast(), 1000).unwrap_or_else(|e| panic!("{e}")));
        let all = times(&planned.path());
        let all: Vec<_> = all.values().flatten().collect();
        let gradient = all.iter().find(|c| c.choice.contains(": attention_grad")).expect("one");
        assert_eq!(gradient.chosen, expected);
        let us = |name: &str| gradient.us.get(name).map(|us| us.round());
        assert_eq!(us("cudnn"), Some(30.0));
        assert_eq!(us("cudnn_any_order"), (setting == "false").then_some(10.0));
        assert!(us("frit").is_some_and(|us| us > 30.0));
    }
}

#[test]
fn a_deterministic_plan_adds_in_one_order() {
    let (_planned, dir) = planned_of_text(&["precision.compute=bf16", "run.deterministic=false"]);
    let mut plan = dir.plan.clone();
    frit_ir::plan::check(&plan).expect("the plan is well-formed");
    plan.deterministic = true;
    let error = frit_ir::plan::check(&plan).expect_err("it is not").to_string();
    assert!(error.contains("any order"), "{error}");
}

/// Engines get what the plan leaves of the device's memory.
#[test]
fn an_engine_that_needs_more_memory_than_there_is_is_not_taken() {
    let (planned, dir) = planned_of_text(&["precision.compute=bf16"]);
    const ENGINE: usize = (32 << 20) + (64 << 10);
    let with = |memory_bytes: usize| {
        let mut driver = Recording::new((9, 0));
        (driver.engines, driver.engine_bytes) = (Some(1), ENGINE);
        driver.memory_bytes = memory_bytes;
        driver.durations = vec![("algorithm", 0.1), ("attention", 50.0)];
        driver
    };
    let gradients = |memory_bytes| {
        let mut device = open(&dir, with(memory_bytes), 1000).unwrap_or_else(|e| panic!("{e}"));
        let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
        let executed = |c: &&Call| matches!(c, Call::Execute(name, ..) if name.contains("_grad"));
        calls.iter().filter(executed).count()
    };
    let arenas = dir.plan.persistent_bytes + dir.plan.workspace_bytes;
    let extra = frit_runtime::device::cuda::extra_bytes(&dir.plan).expect("known");
    assert_eq!(gradients(arenas + extra + (16 << 20)), 0);
    std::fs::remove_file(planned.path().join("tuning.json")).expect("removed");
    assert!(gradients(80 << 30) > 0);
    // What was chosen with more memory is chosen again with less.
    assert_eq!(gradients(arenas + extra + (16 << 20)), 0);
}

/// What is measured depends on the moment, and on the ranks of a plan: a reproducible one takes what is first, or what its file
/// has.
#[test]
fn a_reproducible_plan_measures_only_if_it_is_told_to_and_keeps_to_its_file() {
    let settings = ["target.device=cuda", "model.batch_norm=train", "run.reproducible=2"];
    let planned = plan("tests/models/resnet/model.onnx", 4, &settings);
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    let path = planned.path();
    let start = |seconds, engine_bytes| {
        let mut driver = Recording::new((9, 0));
        (driver.engines, driver.engine_bytes) = (Some(2), engine_bytes);
        driver.durations = vec![("algorithm 2", 0.1), ("algorithm 1", 0.5)];
        let ranks = Ranks { rank: 0, rendezvous: None, timeout: Duration::from_secs(60) };
        Cuda::new(&dir, driver, ranks, Limits::of(seconds))
    };
    let chosen = || -> Vec<Value> {
        let all = written(&path).into_values();
        all.filter(|m| m["candidates"].as_array().is_some()).map(|m| m["chosen"].clone()).collect()
    };
    let device = start(None, 0).unwrap_or_else(|e| panic!("{e}"));
    let note = device.note().expect("a note").to_string();
    assert!(note.contains("libraries' first ones") && note.contains("reproducible.md"), "{note}");
    let first = chosen();
    assert!(first.iter().any(|c| c["candidate"] == "frit"), "{first:?}");
    for choice in &first {
        let algorithm = choice["with"].as_array().map(|words| &words[0]);
        assert!(algorithm.is_none_or(|number| *number == 1), "{choice}");
        assert!(choice["with"]["engine"].is_null(), "{choice}");
    }
    drop(device);
    std::fs::remove_file(path.join("tuning.json")).expect("removed");
    let device = start(Some(1000), 0).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(device.note(), None);
    let measured = chosen();
    assert!(measured.iter().any(|c| c["with"]["engine"] == 2), "{measured:?}");
    assert!(measured.iter().any(|c| c["with"][0] == 2), "{measured:?}");
    drop(device);
    let file = std::fs::read(path.join("tuning.json")).expect("a file");
    drop(start(None, 0).unwrap_or_else(|e| panic!("{e}")));
    // Another plan makes the same choices of its file, or none.
    let refused = start(None, usize::MAX).err().expect("refused").to_string();
    assert!(
        refused.contains("tuning.json") && refused.contains("cannot be made ready"),
        "{refused}"
    );
    assert_eq!(std::fs::read(path.join("tuning.json")).expect("a file"), file);
}

/// What `run.deterministic` is crossed with.
const FACTORS: [&[&str]; 7] = [
    &["run.deterministic=true", "run.deterministic=false"],
    &["sharding.ranks=1", "sharding.ranks=2"],
    &[
        "sharding.strategy=full_shard",
        "sharding.strategy=shard_grad_op",
        "sharding.strategy=no_shard",
    ],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit"],
    &["memory.offload=none", "memory.offload=optimizer"],
];

#[test]
fn candidates_that_add_in_any_order_are_listed_only_if_they_may_be_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, |_| true);
    assert!((9..16).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let settings: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (_planned, dir) = planned_of_text(&settings);
        let narrow = !settings.contains(&"precision.compute=fp32");
        let any_order = narrow && settings.contains(&"run.deterministic=false");
        let names = candidates(&dir.plan);
        assert_eq!(names.contains(CandidateName::Cudnn.word()), narrow, "{settings:?}");
        assert_eq!(names.contains(CandidateName::CudnnAnyOrder.word()), any_order, "{settings:?}");
        frit_passes::verify_plan::verify_plan(&dir.plan).unwrap_or_else(|e| panic!("{e:?}"));
    }
}
