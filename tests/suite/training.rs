//! The update, against independent loops: optimizers, schedule and clipping in f64; loss scaling against the rule of
//! PyTorch's GradScaler; the state that a skipped step leaves unchanged.

use crate::support::{Planned, plan_at, train, train_on};
use frit_runtime::run::RunOptions;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A linear layer without bias: `y[batch, 2] = x[batch, 3] · w`.
const LINEAR: &str = r#"{ "frit_model": 1, "name": "linear",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "w", "shape": [3, 2], "init": { "constant": 0.5 } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "w"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

const BATCH: usize = 4;

/// Numbers between −1 and 1 that f16 holds exactly.
fn number(i: usize, seed: usize) -> f64 {
    (((i * 7919 + seed * 104_729) % 2039) as f64 / 1024.0 - 1.0).clamp(-1.0, 1.0)
}

fn f32s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect()
}

/// Writes `x[n, 3]` and `labels[n, 2]`.
fn write_data(path: &Path, x: &[f64], labels: &[f64]) {
    let (x_bytes, label_bytes) = (f32s(x), f32s(labels));
    let view = |bytes, n, width| TensorView::new(Dtype::F32, vec![n, width], bytes).expect("fits");
    let tensors = [
        ("x", view(&x_bytes, x.len() / 3, 3)),
        ("labels", view(&label_bytes, labels.len() / 2, 2)),
    ];
    safetensors::serialize_to_file(tensors, None, path).expect("written");
}

struct Linear {
    dir: tempfile::TempDir,
}

impl Linear {
    fn new() -> Linear {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("model.json"), LINEAR).expect("written");
        Linear { dir }
    }

    fn plan(&self, batch: usize, settings: &[&str]) -> Planned {
        let settings = [&["loss.kind=mse", "loss.logits=y"], settings].concat();
        plan_at(&self.dir.path().join("model.json"), batch, &settings)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Losses and other metrics by step.
fn run(planned: &Planned, data: &Path, steps: usize) -> Vec<Value> {
    let metrics = planned.dir.path().join("metrics.jsonl");
    // A run appends.
    let _ = std::fs::remove_file(&metrics);
    train_on(planned, data, steps, Some(metrics.clone()));
    let text = std::fs::read_to_string(metrics).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn series(metrics: &[Value], key: &str) -> Vec<f64> {
    metrics.iter().map(|m| m[key].as_f64().unwrap_or(f64::NAN)).collect()
}

fn skipped(metrics: &[Value]) -> Vec<bool> {
    metrics.iter().map(|m| m["skipped"].as_bool().expect("a bool")).collect()
}

/// The optimizers by their formulas, with a linear warm-up, a cosine, and clipping, all in f64.
fn by_hand(kind: &str, x: &[f64], labels: &[f64], steps: usize) -> Vec<f64> {
    let (lr, decay, beta1, beta2, eps, momentum) = (0.05, 0.1, 0.9, 0.99, 1e-8, 0.8);
    let (clip, warmup, total, least) = (0.5, 4.0, 16.0, 0.005);
    let mut w = [0.5_f64; 6];
    let (mut m, mut v) = ([0.0; 6], [0.0; 6]);
    let mut losses = Vec::new();
    for step in 0..steps {
        let (x, labels) = (&x[step * BATCH * 3..], &labels[step * BATCH * 2..]);
        let (mut loss, mut gradient) = (0.0, [0.0; 6]);
        for b in 0..BATCH {
            for j in 0..2 {
                let y: f64 = (0..3).map(|i| x[b * 3 + i] * w[i * 2 + j]).sum();
                let error = y - labels[b * 2 + j];
                loss += error * error / (BATCH * 2) as f64;
                for i in 0..3 {
                    gradient[i * 2 + j] += 2.0 * error * x[b * 3 + i] / (BATCH * 2) as f64;
                }
            }
        }
        losses.push(loss);
        let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        let factor = (clip / (norm + 1e-6)).min(1.0);
        let t = step as f64;
        let rate = if t < warmup {
            lr * (t + 1.0) / warmup
        } else {
            let done = ((t - warmup) / (total - warmup)).min(1.0);
            least + (lr - least) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
        };
        for i in 0..6 {
            let g = gradient[i] * factor;
            match kind {
                "adamw" => {
                    m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                    v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                    let (m_hat, v_hat) =
                        (m[i] / (1.0 - beta1.powf(t + 1.0)), v[i] / (1.0 - beta2.powf(t + 1.0)));
                    w[i] *= 1.0 - rate * decay;
                    w[i] -= rate * m_hat / (v_hat.sqrt() + eps);
                }
                // As in PyTorch: decay joins the gradient, and the first momentum is the gradient.
                _ => {
                    let g = g + decay * w[i];
                    let momentum = if kind == "momentum" { momentum } else { 0.0 };
                    m[i] = if step == 0 { g } else { momentum * m[i] + g };
                    w[i] -= rate * m[i];
                }
            }
        }
    }
    losses
}

const STEPS: usize = 20;

#[test]
fn optimizers_follow_their_formulas() {
    let linear = Linear::new();
    let n = BATCH * STEPS;
    let x: Vec<f64> = (0..n * 3).map(|i| number(i, 1)).collect();
    let labels: Vec<f64> = (0..n * 2).map(|i| number(i, 2)).collect();
    let data = linear.file("data.safetensors");
    write_data(&data, &x, &labels);
    for kind in ["adamw", "sgd", "momentum"] {
        let expected = by_hand(kind, &x, &labels, STEPS);
        for ranks in [1, 2] {
            let settings = [
                "precision.compute=fp32".to_string(),
                format!("sharding.ranks={ranks}"),
                format!("optimizer.kind={kind}"),
                "optimizer.lr=0.05".into(),
                "optimizer.betas=[0.9, 0.99]".into(),
                "optimizer.weight_decay=0.1".into(),
                "optimizer.momentum=0.8".into(),
                "optimizer.clip_grad_norm=0.5".into(),
                "schedule.kind=cosine".into(),
                "schedule.warmup_steps=4".into(),
                "schedule.total_steps=16".into(),
                "schedule.min_lr=0.005".into(),
            ];
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let planned = linear.plan(BATCH / ranks, &settings);
            let losses = series(&run(&planned, &data, STEPS), "loss");
            for (step, (a, b)) in losses.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() < 1e-5, "{kind}, {ranks} ranks, step {step}: {a} for {b}");
            }
        }
    }
}

/// Data whose listed batches have one element that overflows f16.
fn data_with_overflows(path: &Path, steps: usize, bad: &[usize], example: usize) {
    let mut x: Vec<f64> = (0..steps * BATCH * 3).map(|i| number(i, 3)).collect();
    let labels: Vec<f64> = (0..steps * BATCH * 2).map(|i| number(i, 4)).collect();
    for step in bad {
        x[(step * BATCH + example) * 3] = 1e6;
    }
    write_data(path, &x, &labels);
}

const F16: [&str; 5] = [
    "precision.compute=fp16",
    "precision.loss_scale=dynamic",
    "precision.growth_interval=2",
    "schedule.kind=linear",
    "schedule.total_steps=30",
];

#[test]
fn the_loss_scale_follows_the_rule_of_gradscaler() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    let bad = [0, 3, 4, 9];
    for (ranks, example) in [(1, 0), (2, 0), (2, 3)] {
        // On two ranks only one of them sees the overflow.
        data_with_overflows(&data, 14, &bad, example);
        let ranks_key = format!("sharding.ranks={ranks}");
        let settings = [&F16[..], &[&ranks_key, "precision.init_scale=1024"]].concat();
        let metrics = run(&linear.plan(BATCH / ranks, &settings), &data, 14);
        let expected: Vec<bool> = (0..14).map(|step| bad.contains(&step)).collect();
        assert_eq!(skipped(&metrics), expected, "{ranks} ranks");
        let (mut scale, mut good) = (1024.0, 0);
        for (step, found) in series(&metrics, "loss_scale").into_iter().enumerate() {
            assert_eq!(found, scale, "step {step} on {ranks} ranks");
            if bad.contains(&step) {
                (scale, good) = (scale * 0.5, 0);
            } else {
                good += 1;
                if good == 2 {
                    (scale, good) = (scale * 2.0, 0);
                }
            }
        }
    }
}

/// Drops the first batches of a data file.
fn without_first(path: &Path, to: &Path, batches: usize) {
    let bytes = std::fs::read(path).expect("data");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let cut = |name: &str| {
        let view = tensors.tensor(name).expect("a tensor");
        let (n, width) = (view.shape()[0], view.shape()[1]);
        let first = batches * BATCH;
        let data = view.data()[first * width * 4..].to_vec();
        (vec![n - first, width], data)
    };
    let (x, labels) = (cut("x"), cut("labels"));
    fn view((shape, data): &(Vec<usize>, Vec<u8>)) -> TensorView<'_> {
        TensorView::new(Dtype::F32, shape.clone(), data).expect("fits")
    }
    safetensors::serialize_to_file([("x", view(&x)), ("labels", view(&labels))], None, to)
        .expect("written");
}

#[test]
fn a_skipped_step_leaves_parameters_moments_and_schedule_alone() {
    let linear = Linear::new();
    let (data, rest) = (linear.file("data.safetensors"), linear.file("rest.safetensors"));
    data_with_overflows(&data, 10, &[0, 1], 2);
    without_first(&data, &rest, 2);
    for ranks in [1, 2] {
        let ranks_key = format!("sharding.ranks={ranks}");
        let start = |scale: &'static str| [&F16[..], &[&ranks_key, scale]].concat();
        let with = linear.plan(BATCH / ranks, &start("precision.init_scale=4096"));
        let without = linear.plan(BATCH / ranks, &start("precision.init_scale=1024"));
        let (with, without) = (run(&with, &data, 10), run(&without, &rest, 8));
        assert_eq!(&skipped(&with)[..3], [true, true, false]);
        for key in ["loss", "grad_norm", "lr", "loss_scale"] {
            let bits = |m: &[Value]| series(m, key).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&with[2..]), bits(&without), "{key} on {ranks} ranks");
        }
    }
}

/// The linear layer, times 10⁻⁴: its gradients are about 10⁻⁹, far below f16's least number, 6 · 10⁻⁸.
const FAINT: &str = r#"{ "frit_model": 1, "name": "faint",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "w", "shape": [3, 2], "init": { "constant": 0.5 } },
              { "name": "c", "shape": [1], "init": { "constant": 1e-4 }, "trainable": false } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "w"], "outputs": ["h"] },
             { "op": "mul", "inputs": ["h", "c"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

#[test]
fn without_a_scale_f16_stops_learning_from_small_gradients() {
    let linear = Linear::new();
    std::fs::write(linear.file("model.json"), FAINT).expect("written");
    let data = linear.file("data.safetensors");
    let x: Vec<f64> = (0..8 * BATCH * 3).map(|i| number(i % (BATCH * 3), 5)).collect();
    let labels: Vec<f64> = (0..8 * BATCH * 2).map(|i| number(i % (BATCH * 2), 6) * 1e-4).collect();
    write_data(&data, &x, &labels);
    let losses = |compute: &str, scale: &str| {
        let settings = [
            compute,
            scale,
            "optimizer.kind=sgd",
            "optimizer.lr=1e8",
            "optimizer.weight_decay=0",
            "optimizer.clip_grad_norm=0",
        ];
        series(&run(&linear.plan(BATCH, &settings), &data, 8), "loss")
    };
    let unscaled = losses("precision.compute=fp16", "precision.loss_scale=none");
    let scaled = losses("precision.compute=fp16", "precision.loss_scale=dynamic");
    let exact = losses("precision.compute=fp32", "precision.loss_scale=none");
    assert!(unscaled.iter().all(|l| *l == unscaled[0]), "{unscaled:?}");
    assert!(scaled[7] < 0.5 * scaled[0], "{scaled:?}");
    assert!((scaled[7] / exact[7] - 1.0).abs() < 0.05, "{scaled:?} for {exact:?}");
}

#[test]
fn accumulated_micro_steps_are_one_large_step() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    data_with_overflows(&data, 12, &[], 0);
    let fp32 = ["precision.compute=fp32"];
    let whole = series(&run(&linear.plan(BATCH, &fp32), &data, 10), "loss");
    for (ranks, accumulation) in [(1, 2), (1, 4), (2, 2)] {
        let keys = [format!("run.accumulation={accumulation}"), format!("sharding.ranks={ranks}")];
        let settings = [&fp32[..], &[&keys[0], &keys[1]]].concat();
        let planned = linear.plan(BATCH / accumulation / ranks, &settings);
        let parts = series(&run(&planned, &data, 10), "loss");
        for (a, b) in parts.iter().zip(&whole) {
            assert!((a - b).abs() < 1e-6, "{accumulation} micro-steps, {ranks} ranks: {a}, {b}");
        }
    }
}

#[test]
fn parameters_that_the_last_update_breaks_are_not_saved() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    data_with_overflows(&data, 4, &[], 0);
    let broken = ["optimizer.kind=sgd", "optimizer.lr=3.3e38", "optimizer.clip_grad_norm=0"];
    for more in [
        "sharding.ranks=1",
        "sharding.ranks=2",
        "precision.compute=bf16",
        "precision.compute=bf16-pure",
    ] {
        let batch = if more == "sharding.ranks=2" { BATCH / 2 } else { BATCH };
        let planned =
            linear.plan(batch, &[&broken[..], &["optimizer.weight_decay=10", more]].concat());
        let save = planned.dir.path().join("trained.safetensors");
        let options = RunOptions {
            steps: 1,
            data: data.clone().into(),
            save: Some(save.clone()),
            threads: Some(1),
            ..RunOptions::default()
        };
        let report = frit_runtime::run::run(&planned.path(), &options).expect("it runs");
        let stopped = report.stopped.map(|why| why.to_string()).unwrap_or_default();
        assert!(stopped.contains("is not finite"), "{more}: {stopped}");
        assert!(!save.exists(), "{more}");
    }
}

#[test]
fn nan_in_the_data_reaches_the_loss_and_skips_the_step() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    let mut x: Vec<f64> = (0..6 * BATCH * 3).map(|i| number(i, 3)).collect();
    x[2 * BATCH * 3 + 5] = f64::NAN;
    let labels: Vec<f64> = (0..6 * BATCH * 2).map(|i| number(i, 4)).collect();
    write_data(&data, &x, &labels);
    for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
        let batch = if ranks.ends_with('1') { BATCH } else { BATCH / 2 };
        let metrics = run(&linear.plan(batch, &["precision.compute=fp32", ranks]), &data, 6);
        let finite: Vec<bool> = series(&metrics, "loss").iter().map(|l| l.is_finite()).collect();
        assert_eq!(finite, [true, true, false, true, true, true], "{ranks}");
        assert_eq!(skipped(&metrics), [false, false, true, false, false, false], "{ranks}");
    }
}

#[test]
fn what_is_read_without_a_slope_has_a_gradient_of_zero() {
    // Both tables are read at a padding row alone, so that nothing is left of their gradients to compute.
    const PADDED: &str = r#"{ "frit_model": 1, "name": "padded",
      "dims": { "batch": null },
      "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
      "params": [ { "name": "w", "shape": [3, 2], "init": { "constant": 0.5 } },
                  { "name": "a", "shape": [5, 2], "init": "ones" },
                  { "name": "b", "shape": [5, 2], "init": "ones" } ],
      "nodes": [
        { "op": "constant", "outputs": ["row"], "attrs": { "ty": { "dtype": "i64", "shape": [1] }, "values": [1] } },
        { "op": "embedding", "inputs": ["a", "row"], "outputs": ["p"], "attrs": { "padding_idx": 1 } },
        { "op": "embedding", "inputs": ["b", "row"], "outputs": ["q"], "attrs": { "padding_idx": 1 } },
        { "op": "matmul", "inputs": ["x", "w"], "outputs": ["h"] },
        { "op": "add", "inputs": ["h", "p"], "outputs": ["g"] },
        { "op": "add", "inputs": ["g", "q"], "outputs": ["y"] } ],
      "outputs": ["y"] }"#;
    let linear = Linear::new();
    std::fs::write(linear.file("model.json"), PADDED).expect("written");
    let data = linear.file("data.safetensors");
    let x: Vec<f64> = (0..8 * BATCH * 3).map(|i| number(i, 1)).collect();
    let labels: Vec<f64> = (0..8 * BATCH * 2).map(|i| number(i, 2)).collect();
    write_data(&data, &x, &labels);
    for settings in [
        &["run.accumulation=1"][..],
        &["run.accumulation=2"],
        &["run.accumulation=2", "sharding.ranks=2"],
        &["run.accumulation=2", "sharding.ranks=2", "sharding.strategy=no_shard"],
        &["run.accumulation=2", "sharding.ranks=2", "sharding.strategy=shard_optimizer"],
    ] {
        let planned = linear.plan(BATCH, settings);
        train(&planned, &data.to_string_lossy(), 2, false);
        let bytes = std::fs::read(planned.dir.path().join("grads.safetensors")).expect("gradients");
        let gradients = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        for (name, is_zero) in [("w", false), ("a", true), ("b", true)] {
            let gradient = gradients.tensor(name).expect("a gradient of every parameter");
            assert_eq!(gradient.data().iter().all(|b| *b == 0), is_zero, "{name}, {settings:?}");
        }
    }
}

#[test]
fn gradients_reduced_in_low_precision_stay_close() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    data_with_overflows(&data, 12, &[], 0);
    let losses = |batch: usize, settings: &[&str]| {
        let settings = [&["precision.compute=fp32", "optimizer.lr=0.05"], settings].concat();
        series(&run(&linear.plan(batch, &settings), &data, 10), "loss")
    };
    let exact = losses(BATCH, &[]);
    for strategy in ["sharding.strategy=full_shard", "sharding.strategy=no_shard"] {
        // fp16 needs no loss scale here: gradients are near 1.
        for (dtype, ranks, tolerance) in [("bf16", 2, 2e-2), ("fp16", 2, 2e-3), ("fp16", 4, 2e-3)] {
            let keys =
                [format!("sharding.ranks={ranks}"), format!("sharding.reduce_dtype={dtype}")];
            let low = losses(BATCH / ranks, &[strategy, &keys[0], &keys[1]]);
            assert_ne!(low, exact, "{dtype} rounds nothing");
            for (a, b) in low.iter().zip(&exact) {
                assert!((a - b).abs() < tolerance, "{strategy} {dtype}, {ranks} ranks: {a}, {b}");
            }
        }
    }
}

/// Gradients whose sum over ranks overflows f16, though neither they nor their mean do.
#[test]
fn the_division_of_an_f16_mean_is_split() {
    let linear = Linear::new();
    let data = linear.file("data.safetensors");
    // One example per rank, all the same: the gradient of every rank is 2 · 150 · 200 / 2 per output.
    let (x, labels) = ([200.0, 0.0, 0.0].repeat(4), [-50.0, 100.0].repeat(4));
    write_data(&data, &x, &labels);
    for (reduce, strategy) in [("fp16", "full_shard"), ("fp16", "no_shard"), ("fp32", "full_shard")]
    {
        let keys =
            [format!("sharding.reduce_dtype={reduce}"), format!("sharding.strategy={strategy}")];
        let settings = [
            "precision.compute=fp32",
            "precision.loss_scale=none",
            "sharding.ranks=4",
            "optimizer.clip_grad_norm=0",
            &keys[0],
            &keys[1],
        ];
        let metrics = run(&linear.plan(1, &settings), &data, 1);
        assert_eq!(skipped(&metrics), [false], "{reduce}, {strategy}");
        let norm = series(&metrics, "grad_norm")[0];
        // The first weights of both outputs have the gradients 150 · 200 and 0.
        assert!((norm - 30000.0).abs() < 16.0, "{reduce}, {strategy}: {norm}");
    }
}
