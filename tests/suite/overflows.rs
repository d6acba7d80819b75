//! Overflows at known steps of whole models: which steps are skipped, which state they leave unchanged, and how the
//! loss scale continues. And gradients that ranks reduce in low precision, with every reduction setting.

use crate::parity::{largest, reference, run};
use crate::support::{Planned, file, plan};
use frit_ir::DType;
use frit_ir::plan::{Action, PhaseName, Plan};
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::run::{RunOptions, RunReport, run as run_plan};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: usize = 10;
/// The steps whose last example overflows.
const BAD: [usize; 3] = [2, 3, 7];
const INIT_SCALE: f64 = 4096.0;
/// Good steps before the scale grows.
const INTERVAL: usize = 3;

/// Data of a model, one element of which is too large at the listed steps. Token models, which read no
/// floats, have it in labels that are probabilities.
fn planted(model: &str, global: usize, path: &Path) {
    let bytes =
        std::fs::read(file(&format!("tests/models/{model}/data.safetensors"))).expect("data");
    let given = SafeTensors::deserialize(&bytes).expect("safetensors");
    let examples = STEPS * global;
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in given.iter() {
        let mut shape = view.shape().to_vec();
        let per_example = view.data().len() / shape[0];
        shape[0] = examples;
        let data = view.data()[..examples * per_example].to_vec();
        tensors.push((name.to_string(), view.dtype(), shape, data));
    }
    let labels = tensors.iter().position(|(name, ..)| name == "labels").expect("labels");
    if model == "gpt2" {
        const VOCABULARY: usize = 257;
        let (_, _, shape, ids) = &tensors[labels];
        let mut dense = vec![0.0_f32; ids.len() / 8 * VOCABULARY];
        for (row, id) in ids.as_chunks::<8>().0.iter().enumerate() {
            dense[row * VOCABULARY + i64::from_le_bytes(*id) as usize] = 1.0;
        }
        let shape = [&shape[..], &[VOCABULARY]].concat();
        let bytes = dense.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors[labels] = ("labels".into(), Dtype::F32, shape, bytes);
    }
    // The last element of the last example of the step: only the last rank sees it.
    let (.., data) = &mut tensors[if model == "gpt2" { labels } else { 1 - labels }];
    let per_step = data.len() / STEPS;
    for step in BAD {
        let end = (step + 1) * per_step;
        data[end - 4..end].copy_from_slice(&1e20_f32.to_le_bytes());
    }
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("fits"))
    });
    safetensors::serialize_to_file(views, None, path).expect("written");
}

/// Goes on to step `steps` from the checkpoint of `dir`.
fn go_on(planned: &Planned, data: &Path, steps: usize, dir: &Path) -> RunReport {
    let checkpoint =
        CheckpointOptions { dir: dir.to_path_buf(), every: None, resume: true, keep: None };
    let options = RunOptions {
        steps,
        data: data.into(),
        checkpoint: Some(checkpoint),
        metrics: Some(dir.with_extension("jsonl")),
        threads: Some(1),
        ..RunOptions::default()
    };
    run_plan(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

fn tensors(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(dir).unwrap_or_else(|e| panic!("{e}"));
    let read = |key: &String| checkpoint.tensor(key).unwrap_or_else(|e| panic!("{e}"));
    checkpoint.index.tensors.keys().map(|key| (key.clone(), read(key))).collect()
}

#[test]
fn planted_overflows_skip_their_steps_and_leave_everything_else_alone() {
    for (model, global, loss) in
        [("gpt2", 8, &["loss.targets=probabilities"][..]), ("unet", 4, &["loss.kind=mse"])]
    {
        for ranks in [1, 2, 4] {
            let keys = [
                format!("sharding.ranks={ranks}"),
                format!("precision.init_scale={INIT_SCALE}"),
                format!("precision.growth_interval={INTERVAL}"),
            ];
            let settings = [
                "precision.compute=fp16",
                "optimizer.ema=0.9",
                "schedule.kind=cosine",
                "schedule.total_steps=30",
                &keys[0],
                &keys[1],
                &keys[2],
            ];
            let path = format!("tests/models/{model}/model.onnx");
            let planned = plan(&path, global / ranks, &[&settings[..], loss].concat());
            let data = planned.dir.path().join("data.safetensors");
            planted(model, global, &data);
            let dir = planned.dir.path().join("run");
            let what = |step: usize| format!("step {step} of {model} on {ranks} ranks");
            let mut before = BTreeMap::new();
            for step in 0..STEPS {
                go_on(&planned, &data, step + 1, &dir);
                let after = tensors(&dir);
                let changed: Vec<&str> = after
                    .iter()
                    .filter(|(key, bytes)| before.get(*key).is_some_and(|old| old != *bytes))
                    .map(|(key, _)| key.as_str())
                    .collect();
                let scaler = |key: &&str| key.contains("loss_scale") || key.contains("growth");
                if BAD.contains(&step) {
                    assert!(changed.iter().all(scaler), "{}: {changed:?}", what(step));
                    assert!(changed.iter().any(|k| k.contains("loss_scale")), "{}", what(step));
                } else if step > 0 {
                    for state in ["adam_m", "adam_v", "ema", "step"] {
                        let renewed = changed.iter().any(|k| k.contains(state));
                        assert!(renewed, "{}: no {state} in {changed:?}", what(step));
                    }
                }
                before = after;
            }
            let metrics = std::fs::read_to_string(dir.with_extension("jsonl")).expect("metrics");
            let (mut scale, mut good) = (INIT_SCALE, 0);
            for (step, line) in metrics.lines().enumerate() {
                let line: Value = serde_json::from_str(line).expect("JSON");
                assert_eq!(line["loss_scale"].as_f64(), Some(scale), "{}", what(step));
                assert_eq!(line["skipped"].as_bool(), Some(BAD.contains(&step)), "{}", what(step));
                good = if BAD.contains(&step) { 0 } else { good + 1 };
                if BAD.contains(&step) {
                    scale *= 0.5;
                } else if good == INTERVAL {
                    (scale, good) = (2.0 * scale, 0);
                }
            }
            assert_eq!(metrics.lines().count(), STEPS);
        }
    }
}

/// Types in which gradients are exchanged, and how many of these exchanges are part of a micro-step.
fn exchanges(plan: &Plan) -> (Vec<DType>, usize) {
    let micro_step = plan.phase(PhaseName::MicroStep).expect("a phase");
    let (mut dtypes, mut within) = (Vec::new(), 0);
    for (i, task) in plan.tasks.iter_enumerated() {
        let send = match &task.action {
            Action::ReduceScatter { send, .. } | Action::AllReduce { group: Some(_), send, .. } => {
                send
            }
            _ => continue,
        };
        dtypes.push(send.ty.dtype);
        within += usize::from((micro_step.begin..micro_step.end).contains(&i));
    }
    (dtypes, within)
}

#[test]
fn low_precision_reductions_under_every_way_to_reduce() {
    let exact = reference("gpt2", "fp64");
    let hybrid = ["sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    let ways: [(&[&str], bool); 5] = [
        (&["sharding.strategy=full_shard"], true),
        (&["sharding.strategy=shard_grad_op", "sharding.no_sync=true"], false),
        (&["sharding.strategy=shard_optimizer"], false),
        (&["sharding.strategy=no_shard"], true),
        (&hybrid, true),
    ];
    for (way, overlaps) in ways {
        for (compute, reduce, accumulation, tolerance) in
            [("fp32", "bf16", 2, 1e-3), ("fp16", "fp16", 2, 1e-2), ("fp16", "fp16", 1, 1e-2)]
        {
            let keys = [
                format!("precision.compute={compute}"),
                format!("sharding.reduce_dtype={reduce}"),
                format!("run.accumulation={accumulation}"),
            ];
            let settings = [way, &[&keys[0], &keys[1], &keys[2]]].concat();
            let (planned, losses) = run("gpt2", "model.onnx", 8 / accumulation, 4, &settings);
            let what = format!("{settings:?}");
            assert!(largest(&losses, &exact) < tolerance, "{what}: {losses:?}");
            let (dtypes, within) = exchanges(&planned.compiled.plan);
            let low = if reduce == "fp16" { DType::F16 } else { DType::BF16 };
            assert!(!dtypes.is_empty() && dtypes.iter().all(|d| *d == low), "{what}: {dtypes:?}");
            // Without accumulation the only micro-step is all there is.
            assert_eq!(within > 0, overlaps || accumulation == 1, "{what}");
        }
    }
}
