//! Training resumed from a checkpoint equals uninterrupted training.

use crate::support::{Planned, file, plan};
use frit::export::Trained;
use frit_ir::plan::sha256_hex;
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::run::{RunOptions, RunReport, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

const GPT2: &str = "tests/models/gpt2/model.onnx";

fn data(model: &str) -> PathBuf {
    file(&format!("tests/models/{model}/data.safetensors"))
}

fn options(data: &Path, steps: usize, dir: &Path) -> RunOptions {
    let (dir, every) = (dir.to_path_buf(), None);
    let checkpoint = CheckpointOptions { dir, every, resume: true, keep: None };
    RunOptions {
        steps,
        data: data.into(),
        checkpoint: Some(checkpoint),
        threads: Some(1),
        ..RunOptions::default()
    }
}

/// Runs up to step `steps`, from the latest checkpoint of `dir` on.
fn go_on(planned: &Planned, data: &Path, steps: usize, dir: &Path) -> RunReport {
    run(&planned.path(), &options(data, steps, dir)).unwrap_or_else(|e| panic!("{e}"))
}

fn refused(planned: &Planned, options: &RunOptions, parts: &[&str]) {
    let message = run(&planned.path(), options).expect_err("refused").to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|x| x.to_bits()).collect()
}

/// Every tensor of the latest checkpoint, by its key.
fn tensors(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(dir).unwrap_or_else(|e| panic!("{e}"));
    let read = |key: &String| checkpoint.tensor(key).unwrap_or_else(|e| panic!("{e}"));
    checkpoint.index.tensors.keys().map(|key| (key.clone(), read(key))).collect()
}

#[test]
fn resumed_training_is_bit_for_bit_the_uninterrupted_one() {
    for (model, batch, settings) in [
        ("gpt2", 2, &["sharding.ranks=4", "precision.compute=bf16"][..]),
        ("gpt2", 4, &["sharding.ranks=2", "precision.compute=fp16", "run.accumulation=2"]),
        ("mlp", 4, &["sharding.ranks=2", "data.shuffle=true", "optimizer.kind=momentum"]),
        (
            "mlp",
            4,
            &[
                "sharding.ranks=3",
                "sharding.strategy=no_shard",
                "schedule.kind=cosine",
                "schedule.total_steps=6",
            ],
        ),
        (
            "gpt2",
            1,
            &[
                "sharding.ranks=4",
                "sharding.strategy=hybrid_shard",
                "sharding.shard_group=2",
                "run.accumulation=2",
            ],
        ),
        (
            "gpt2",
            1,
            &["sharding.ranks=3", "sharding.strategy=shard_optimizer", "run.accumulation=2"],
        ),
        ("gpt2", 2, &["sharding.ranks=2", "precision.compute=fp8", "run.accumulation=2"]),
        ("gpt2", 2, &["sharding.ranks=3", "optimizer.kind=adafactor"]),
        ("gpt2", 2, &["sharding.ranks=3", "optimizer.kind=muon"]),
        ("dropout", 4, &["sharding.ranks=2"]),
        ("resnet", 4, &["model.batch_norm=train"]),
    ] {
        let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, settings);
        let (whole, parts) = (planned.dir.path().join("whole"), planned.dir.path().join("parts"));
        let expected = go_on(&planned, &data(model), 7, &whole);
        let first = go_on(&planned, &data(model), 3, &parts);
        let second = go_on(&planned, &data(model), 7, &parts);
        assert_eq!((first.start, second.start), (0, 3));
        let losses = [first.losses, second.losses].concat();
        assert_eq!(bits(&losses), bits(&expected.losses), "{model} {settings:?}");
        assert_eq!(tensors(&parts), tensors(&whole), "{model} {settings:?}");
        // Nothing is left to do, and nothing is lost.
        let third = go_on(&planned, &data(model), 7, &parts);
        assert_eq!((third.start, third.losses.len()), (7, 0));
    }
}

/// gpt2 in fp32 on so many ranks, 24 examples a step.
fn gpt2(ranks: usize, more: &[&str]) -> Planned {
    let ranks_key = format!("sharding.ranks={ranks}");
    let micro_steps = if more.contains(&"run.accumulation=2") { 2 } else { 1 };
    plan(GPT2, 24 / ranks / micro_steps, &[&["precision.compute=fp32", &ranks_key], more].concat())
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).expect("copied");
        }
    }
}

#[test]
fn checkpoints_move_between_world_sizes_and_strategies() {
    let no_shard = &["sharding.strategy=no_shard"];
    let hybrid = &["sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    moves(
        &[],
        1e-6,
        &[
            (1, &[]),
            (2, &[]),
            (3, &[]),
            (8, &[]),
            (4, &["sharding.wrap=size=20000"]),
            (2, no_shard),
            (4, hybrid),
            (3, &["sharding.strategy=shard_optimizer", "run.accumulation=2"]),
        ],
    );
    moves(&["optimizer.kind=adafactor"], 1e-6, &[(1, &[]), (3, &[]), (2, no_shard), (4, hybrid)]);
    // Muon rounds to bf16 what depends on the order of sums over ranks.
    moves(&["optimizer.kind=muon"], 1e-4, &[(1, &[]), (3, &[]), (2, no_shard), (4, hybrid)]);
}

#[test]
fn what_is_switched_on_later_begins_at_a_checkpoint() {
    let data = data("gpt2");
    let plain = gpt2(2, &[]);
    let start = plain.dir.path().join("start");
    go_on(&plain, &data, 3, &start);
    let expected = go_on(&plain, &data, 6, &plain.dir.path().join("whole")).losses;
    for (more, bound) in [("optimizer.ema=0.9", 1e-6), ("precision.compute=fp8", 0.2)] {
        for ranks in [1, 2, 3] {
            let other = gpt2(ranks, &[more]);
            let (dir, averages) = (other.dir.path().join("moved"), other.dir.path().join("ema"));
            copy_dir(&start, &dir);
            let ema = more.contains("ema").then(|| averages.clone());
            let options = RunOptions { save_ema: ema, ..options(&data, 6, &dir) };
            let report = run(&other.path(), &options).unwrap_or_else(|e| panic!("{more}: {e}"));
            for (a, b) in report.losses.iter().zip(&expected[3..]) {
                assert!((a - b).abs() < bound, "{more}, {ranks} ranks: {a} for {b}");
            }
            if !more.contains("ema") {
                continue;
            }
            // 0.9³·p₃ + 0.1·(0.9²·p₄ + 0.9·p₅ + p₆) is near the parameters, not near zero.
            let trained = Checkpoint::open(&dir).expect("a checkpoint");
            let numbers = |bytes: &[u8]| -> Vec<f32> {
                let (all, _) = bytes.as_chunks::<4>();
                all.iter().map(|b| f32::from_le_bytes(*b)).collect()
            };
            let file = std::fs::read(&averages).expect("the averages");
            for (name, view) in safetensors::SafeTensors::deserialize(&file).expect("a file").iter()
            {
                let last = numbers(&trained.tensor(&format!("param/{name}")).expect("it is saved"));
                for (a, b) in numbers(view.data()).iter().zip(&last) {
                    assert!((a - b).abs() < 0.02, "{name}: {a} is the average of {b}");
                }
            }
        }
    }
}

/// Half of the way on four ranks, a quarter on others, and the rest on four; losses are within `bound` of those of four.
fn moves(settings: &[&str], bound: f64, others: &[(usize, &[&str])]) {
    let data = data("gpt2");
    let four = gpt2(4, settings);
    let (whole, start) = (four.dir.path().join("whole"), four.dir.path().join("start"));
    let expected = go_on(&four, &data, 8, &whole).losses;
    go_on(&four, &data, 4, &start);
    for &(ranks, more) in others {
        let other = gpt2(ranks, &[settings, more].concat());
        let dir = other.dir.path().join("moved");
        copy_dir(&start, &dir);
        let report = go_on(&other, &data, 6, &dir);
        // And back to where it came from.
        let back = go_on(&four, &data, 8, &dir);
        let losses = [report.losses, back.losses].concat();
        assert_eq!(losses.len(), 4);
        for (a, b) in losses.iter().zip(&expected[4..]) {
            assert!((a - b).abs() < bound, "{ranks} ranks {more:?}: {a} for {b}");
        }
    }
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn metrics_go_on_where_the_checkpoint_is() {
    let planned = plan("tests/models/mlp/model.onnx", 8, &["sharding.ranks=2"]);
    let (dir, metrics) = (planned.dir.path().join("ckpt"), planned.dir.path().join("m.jsonl"));
    let mut options = options(&data("mlp"), 3, &dir);
    options.metrics = Some(metrics.clone());
    let run = |options: &RunOptions| run(&planned.path(), options).expect("runs");
    run(&options);
    // Steps that ran after the checkpoint, the last line of which the system cut.
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    std::fs::write(&metrics, format!("{text}{{\"step\":3,\"loss\":7}}\n{{\"step\":4,\"l"))
        .expect("written");
    options.steps = 5;
    run(&options);
    let found = lines(&metrics);
    let steps: Vec<u64> = found.iter().map(|l| l["step"].as_u64().expect("a number")).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4]);
    assert_ne!(found[3]["loss"], 7);
}

#[test]
fn as_many_checkpoints_are_kept_as_were_asked_for() {
    let planned = plan("tests/models/mlp/model.onnx", 8, &["sharding.ranks=2"]);
    let dir = planned.dir.path().join("ckpt");
    let mut options = options(&data("mlp"), 7, &dir);
    let checkpoint = options.checkpoint.as_mut().expect("set above");
    (checkpoint.every, checkpoint.keep) = (Some(2), Some(2));
    run(&planned.path(), &options).expect("runs");
    let mut names: Vec<String> = std::fs::read_dir(&dir)
        .expect("the directory")
        .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    assert_eq!(names, ["latest", "lock", "step-00000006", "step-00000007"]);
    assert_eq!(std::fs::read_to_string(dir.join("latest")).expect("latest"), "step-00000007\n");
    // Without --resume, what is there is not overwritten.
    let checkpoint = options.checkpoint.as_mut().expect("set above");
    checkpoint.resume = false;
    refused(&planned, &options, &["ckpt", "--resume"]);
}

#[test]
fn changed_hyper_parameters_stay_changed() {
    let planned = plan("tests/models/mlp/model.onnx", 8, &["sharding.ranks=2"]);
    let (a, b) = (planned.dir.path().join("a"), planned.dir.path().join("b"));
    let set = |steps, dir: &Path, lr: Option<f64>| {
        let hyper = lr.map(|lr| ("optimizer.lr".to_string(), lr)).into_iter().collect();
        let options = RunOptions { hyper, ..options(&data("mlp"), steps, dir) };
        run(&planned.path(), &options).expect("runs").losses
    };
    let whole = set(6, &a, Some(0.02));
    let parts = [set(3, &b, Some(0.02)), set(6, &b, None)].concat();
    assert_eq!(bits(&parts), bits(&whole));
}

#[test]
fn damaged_and_foreign_checkpoints_are_refused() {
    let planned = plan("tests/models/mlp/model.onnx", 8, &["sharding.ranks=2"]);
    let dir = planned.dir.path().join("ckpt");
    go_on(&planned, &data("mlp"), 2, &dir);
    let step = dir.join("step-00000002");
    let options = options(&data("mlp"), 4, &dir);
    let shard = step.join("rank-00001.safetensors");
    let good = std::fs::read(&shard).expect("the shard");
    let mut flipped = good.clone();
    *flipped.last_mut().expect("bytes") ^= 1;
    for broken in [&flipped[..], &good[..good.len() / 2], b""] {
        std::fs::write(&shard, broken).expect("written");
        refused(&planned, &options, &["step-00000002", "rank-00001.safetensors"]);
    }
    std::fs::remove_file(&shard).expect("removed");
    refused(&planned, &options, &["rank-00001.safetensors"]);
    std::fs::write(&shard, &good).expect("written");
    let source = step.join("source/train.toml");
    let good = std::fs::read(&source).expect("the configuration");
    std::fs::write(&source, [&good[..], b"\n"].concat()).expect("written");
    let checkpoint = Checkpoint::open(&step).unwrap_or_else(|e| panic!("{e}"));
    let error = Trained::of_checkpoint(checkpoint).err().expect("it is damaged").to_string();
    assert!(error.contains("source/train.toml") && error.contains("checksum"), "{error}");
    std::fs::write(&source, &good).expect("written");
    let index = step.join("index.json");
    let text = std::fs::read_to_string(&index).expect("the index");
    std::fs::write(&index, text.replace("\"step\": 2", "\"step\": 1")).expect("written");
    refused(&planned, &options, &["index.json", "checksum"]);
    std::fs::write(&index, &text).expect("written");
    // Whoever writes a checkpoint can write its checksums.
    let sums = step.join("SHA256SUMS");
    let good_sums = std::fs::read_to_string(&sums).expect("the sums");
    let whole: Value = serde_json::from_str(&text).expect("JSON");
    let huge = Value::from(usize::MAX / 2);
    for (place, other, says) in [
        (
            "parts/0/file",
            Value::from("../step-00000002/rank-00000.safetensors"),
            "no name of a file",
        ),
        ("parts/0/len", huge.clone(), "lacks the elements"),
        ("shape/0", huge, "too large"),
    ] {
        let mut bad = whole.clone();
        let place = format!("/tensors/param~1fc1.weight/{place}");
        *bad.pointer_mut(&place).unwrap_or_else(|| panic!("{place}")) = other;
        let bad = bad.to_string();
        std::fs::write(&index, &bad).expect("written");
        let [old, new] = [&text, &bad].map(|text| sha256_hex(text.as_bytes()));
        std::fs::write(&sums, good_sums.replace(&old, &new)).expect("written");
        refused(&planned, &options, &["step-00000002", says]);
    }
    std::fs::write(&index, &text).expect("written");
    std::fs::write(&sums, &good_sums).expect("written");
    std::fs::write(dir.join("latest"), "nonsense").expect("written");
    refused(&planned, &options, &["latest"]);
    std::fs::write(dir.join("latest"), "step-00000009\n").expect("written");
    refused(&planned, &options, &["step-00000009"]);
    std::fs::write(dir.join("latest"), "step-00000002\n").expect("written");

    let gpt2 = plan(GPT2, 4, &["sharding.ranks=2"]);
    let foreign = RunOptions { data: data("gpt2").into(), ..options.clone() };
    refused(&gpt2, &foreign, &["another model"]);
    let momentum = plan("tests/models/mlp/model.onnx", 8, &["optimizer.kind=momentum"]);
    refused(&momentum, &options, &["momentum/fc1.weight", "optimizer"]);
    go_on(&planned, &data("mlp"), 4, &dir);
}

#[test]
fn exported_parameters_are_those_that_save_writes() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=4"]);
    let (dir, saved) =
        (planned.dir.path().join("ckpt"), planned.dir.path().join("saved.safetensors"));
    let options = RunOptions { save: Some(saved.clone()), ..options(&data("mlp"), 3, &dir) };
    run(&planned.path(), &options).expect("runs");
    let exported = planned.dir.path().join("exported.safetensors");
    let checkpoint = Checkpoint::open(&dir).expect("a checkpoint");
    checkpoint.write_parameters(&exported).expect("written");
    let (saved, exported) = (std::fs::read(&saved).unwrap(), std::fs::read(&exported).unwrap());
    let (saved, exported) = (
        safetensors::SafeTensors::deserialize(&saved).unwrap(),
        safetensors::SafeTensors::deserialize(&exported).unwrap(),
    );
    assert_eq!(saved.len(), exported.len());
    for (name, view) in saved.iter() {
        assert_eq!(view, exported.tensor(name).unwrap(), "{name}");
    }
}
