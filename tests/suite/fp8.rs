//! Matmuls of 8-bit floats: against an independent simulation, and through the command line.

use crate::parity::{largest, mean, reference, run};
use crate::support::write_f32;
use crate::support::{Planned, file, plan, plan_at, plan_to_evaluate, train, train_on};
use frit::config::Config;
use frit_ir::ops::StateName;
use frit_ir::plan::Plan;
use frit_ir::{DType, Op};
use frit_runtime::run::RunOptions;
use std::path::Path;

/// Examples of a rank's micro-batch, terms of every sum, and results of each example.
const SIZES: [usize; 3] = [16, 32, 16];
const STEPS: usize = 5;
const LR: f64 = 0.25;

const LINEAR: &str = r#"{ "frit_model": 1, "name": "linear", "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 32] } ],
  "params": [ { "name": "w", "shape": [32, 16], "init": { "normal": { "std": 0.1 } } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "w"], "outputs": ["y"], "scope": "fc" } ],
  "outputs": ["y"] }"#;

fn linear(dir: &Path, ranks: usize, more: &[&str]) -> Planned {
    let path = dir.join("model.json");
    std::fs::write(&path, LINEAR).expect("written");
    let (ranks, lr) = (format!("sharding.ranks={ranks}"), format!("optimizer.lr={LR}"));
    let settings = [
        "loss.kind=mse",
        "loss.logits=y",
        "precision.compute=fp8",
        "precision.fp8_history=2",
        "optimizer.kind=sgd",
        "optimizer.weight_decay=0",
        "optimizer.clip_grad_norm=0",
        &ranks,
        &lr,
    ];
    plan_at(&path, SIZES[0], &[&settings[..], more].concat())
}

/// Pseudo-random numbers between −1 and 1.
fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| f64::from(2.0 * random.f32() - 1.0)).collect()
}

/// The positive numbers of an 8-bit float, in the order of their encodings.
fn magnitudes(to: DType) -> Vec<f64> {
    let (bits, bias, count) = if to == DType::F8E4M3 { (3, 7, 127) } else { (2, 15, 124) };
    let of = |code: i32| {
        let (exponent, fraction) = (code >> bits, f64::from(code % (1 << bits)));
        let (lead, exponent) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent) };
        (lead + fraction / f64::from(1 << bits)) * 2f64.powi(exponent - bias)
    };
    (0..count).map(of).collect()
}

/// Rounding with delayed scaling, by search among all numbers of the format.
struct Scaled {
    all: Vec<f64>,
    history: Vec<f64>,
}

impl Scaled {
    fn new(to: DType) -> Scaled {
        Scaled { all: magnitudes(to), history: vec![0.0; 2] }
    }

    fn round(&self, values: &[f64]) -> Vec<f64> {
        let values: Vec<f64> = values.iter().map(|x| DType::BF16.round(*x)).collect();
        let own = values.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let recent = self.history.iter().fold(0.0, |m: f64, x| m.max(*x));
        let most = self.all[self.all.len() - 1];
        let scale = (most / if recent > 0.0 { recent } else { own }).log2().floor().exp2();
        let nearest = |x: &f64| {
            let distance = |code: usize| (self.all[code] - x.abs() * scale).abs();
            let order = |a: &usize, b: &usize| {
                distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)))
            };
            let code = (0..self.all.len()).min_by(order).expect("numbers");
            (self.all[code] / scale).copysign(*x)
        };
        values.iter().map(nearest).collect()
    }

    fn renew(&mut self, parts: &[Vec<f64>]) {
        let all = parts.iter().flatten().map(|x| DType::BF16.round(*x).abs());
        self.history.rotate_right(1);
        self.history[0] = all.fold(0.0, f64::max);
    }
}

/// Losses of the linear layer on so many ranks, trained in f64 with rounding where fp8 has it.
fn simulate(w: &[f64], x: &[f64], labels: &[f64], ranks: usize) -> Vec<f64> {
    let [m, k, n] = SIZES;
    let mut w = w.to_vec();
    let mut of_x = Scaled::new(DType::F8E4M3);
    let mut of_w = Scaled::new(DType::F8E4M3);
    let mut of_dy = Scaled::new(DType::F8E5M2);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let qw = of_w.round(&w);
        let (mut total, mut gradient) = (0.0, vec![0.0; k * n]);
        let (mut xs, mut dys) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let part = step * ranks + rank;
            let (x, t) = (&x[part * m * k..][..m * k], &labels[part * m * n..][..m * n]);
            let qx = of_x.round(x);
            let dy: Vec<f64> = (0..m * n)
                .map(|at| {
                    let (i, j) = (at / n, at % n);
                    let y: f64 = (0..k).map(|l| qx[i * k + l] * qw[l * n + j]).sum();
                    let difference = f64::from(y as f32) - t[at];
                    total += difference * difference;
                    2.0 * difference / (m * n) as f64
                })
                .collect();
            let qdy = of_dy.round(&dy);
            for (at, g) in gradient.iter_mut().enumerate() {
                let (l, j) = (at / n, at % n);
                *g += (0..m).map(|i| qx[i * k + l] * qdy[i * n + j]).sum::<f64>() / ranks as f64;
            }
            xs.push(x.to_vec());
            dys.push(dy);
        }
        losses.push(total / (ranks * m * n) as f64);
        of_x.renew(&xs);
        of_w.renew(&[w.clone()]);
        of_dy.renew(&dys);
        w.iter_mut().zip(&gradient).for_each(|(w, g)| *w = f64::from((*w - LR * g) as f32));
    }
    losses
}

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

/// The first weights of a plan.
fn weights(planned: &Planned, data: &Path) -> Vec<f64> {
    let save = planned.dir.path().join("first.safetensors");
    let options = RunOptions {
        steps: 1,
        data: data.into(),
        hyper: [("optimizer.lr".to_string(), 0.0)].into(),
        save: Some(save.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    frit_runtime::run::run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let bytes = std::fs::read(save).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor("w").expect("the weights");
    view.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

#[test]
fn gemms_are_those_of_a_simulation() {
    let dir = tempfile::tempdir().expect("a directory");
    let [m, k, n] = SIZES;
    for ranks in [1, 2] {
        let examples = STEPS * ranks * m;
        let mut x = numbers(examples * k, 7);
        // The third step outgrows its history; on two ranks, only what the second sees.
        let third = (2 * ranks + ranks - 1) * m * k;
        x[third..third + m * k].iter_mut().for_each(|x| *x *= 5.0);
        let labels = numbers(examples * n, 8);
        let data = dir.path().join("data.safetensors");
        let tensors =
            [("x", vec![examples, k], single(&x)), ("labels", vec![examples, n], single(&labels))];
        write_f32(&data, &tensors);
        let planned = linear(dir.path(), ranks, &[]);
        let w = weights(&planned, &data);
        let expected = simulate(&w, &x, &labels, ranks);
        let found = train_on(&planned, &data, STEPS, None).losses;
        let close = |a: &[f64], b: &[f64]| {
            a.iter().zip(b).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max)
        };
        assert!(close(&found, &expected) < 1e-5, "{ranks} ranks: {found:?}, not {expected:?}");
        let bf16 = linear(dir.path(), ranks, &["precision.compute=bf16"]);
        let bf16 = train_on(&bf16, &data, STEPS, None).losses;
        assert!(close(&bf16, &expected) > 1e-3, "nothing is rounded: {bf16:?}");
    }
}

#[test]
fn what_is_not_finite_skips_the_step_and_leaves_no_trace_in_the_scales() {
    let dir = tempfile::tempdir().expect("a directory");
    let [m, k, n] = SIZES;
    let mut x = numbers(STEPS * 2 * m * k, 7);
    // In the last example of the second step, on the second rank.
    x[4 * m * k - 1] = f64::INFINITY;
    let labels = numbers(STEPS * 2 * m * n, 8);
    let data = dir.path().join("data.safetensors");
    let examples = STEPS * 2 * m;
    let tensors =
        [("x", vec![examples, k], single(&x)), ("labels", vec![examples, n], single(&labels))];
    write_f32(&data, &tensors);
    let planned = linear(dir.path(), 2, &[]);
    let metrics = dir.path().join("metrics.jsonl");
    let losses = train_on(&planned, &data, STEPS, Some(metrics.clone())).losses;
    let lines = std::fs::read_to_string(metrics).expect("metrics");
    let skipped: Vec<bool> = lines.lines().map(|l| l.contains("\"skipped\":true")).collect();
    assert_eq!(skipped, [false, true, false, false, false]);
    let finite: Vec<bool> = losses.iter().map(|l| l.is_finite()).collect();
    assert_eq!(finite, [true, false, true, true, true], "{losses:?}");
}

fn rounds(plan: &Plan, to: DType) -> usize {
    let of = |k: &frit_ir::plan::Kernel| {
        k.body.nodes().any(|(_, n)| matches!(&n.op, Op::Quantize(q) if q.to == to))
    };
    plan.kernels.iter().filter(|k| of(k)).count()
}

#[test]
fn gpt2_learns_nearly_as_in_bf16() {
    let exact = reference("gpt2", "fp64");
    let (one, losses) = run("gpt2", "model.onnx", 8, 1, &["precision.compute=fp8"]);
    let (_, bf16) = run("gpt2", "model.onnx", 8, 1, &["precision.compute=bf16"]);
    let (ours, theirs) = (mean(&losses, &exact), mean(&bf16, &exact));
    eprintln!("gpt2: mean deviation from fp64 {ours:.5} in fp8, {theirs:.5} in bf16");
    assert!(largest(&losses, &exact) < 0.02, "{losses:?} for {exact:?}");
    assert!(ours > theirs, "nothing is rounded to fp8");
    let plan = &one.compiled.plan;
    assert!(rounds(plan, DType::F8E4M3) > 0 && rounds(plan, DType::F8E5M2) > 0);
    let history = plan.states.iter().find(|s| s.name == StateName::AmaxHistory).expect("a history");
    assert_eq!(history.ty.shape.dims()[1], 16);
    // Ranks agree on the scales, so that only the order of sums differs.
    let (_, two) = run("gpt2", "model.onnx", 8, 2, &["precision.compute=fp8"]);
    assert!(largest(&losses, &two) < 0.01, "{two:?} for {losses:?}");
    // The kernel rounds as the interpreter does.
    let interpreted = train(&one, "tests/models/gpt2/data.safetensors", 2, true).losses;
    assert!(largest(&losses[..2], &interpreted) < 1e-3, "{interpreted:?} for {losses:?}");
}

#[test]
fn sizes_that_are_padded_are_rounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    let model = LINEAR.replace("[32, 16]", "[40, 24]").replace("\"batch\", 32", "\"batch\", 40");
    std::fs::write(&path, model).expect("written");
    let data = dir.path().join("data.safetensors");
    let (x, labels) = (single(&numbers(24 * 40 * STEPS, 1)), single(&numbers(24 * 24 * STEPS, 2)));
    let n = 24 * STEPS;
    write_f32(&data, &[("x", vec![n, 40], x), ("labels", vec![n, 24], labels)]);
    let losses = |compute: &str, padding: &str| {
        let settings = [
            "loss.kind=mse",
            "loss.logits=y",
            &format!("precision.compute={compute}"),
            &format!("padding.tensor_cores={padding}"),
        ];
        let planned = plan_at(&path, 24, &settings);
        let rounded = rounds(&planned.compiled.plan, DType::F8E4M3);
        (train_on(&planned, &data, STEPS, None).losses, rounded)
    };
    let (bf16, none) = losses("bf16", "always");
    let (as_it_is, left) = losses("fp8", "never");
    assert_eq!((none, left), (0, 0));
    assert_eq!(as_it_is, bf16, "nothing is rounded");
    let (padded, rounded) = losses("fp8", "always");
    assert!(rounded > 0 && padded != bf16, "{padded:?}");
    assert!(largest(&padded, &bf16) < 0.02, "{padded:?} for {bf16:?}");
}

#[test]
fn the_strategy_changes_no_rounding() {
    let losses = |strategy: &str| {
        let strategy = format!("sharding.strategy={strategy}");
        let settings = ["precision.compute=fp8", "optimizer.clip_grad_norm=0", &strategy];
        run("gpt2", "model.onnx", 8, 2, &settings).1
    };
    let replicated = losses("no_shard");
    for strategy in ["full_shard", "shard_grad_op", "shard_optimizer"] {
        assert_eq!(losses(strategy), replicated, "{strategy}");
    }
}

#[test]
fn an_exception_and_an_evaluation() {
    let attn = "[[precision.override]]\nscope = \"net.transformer.h.*.attn.*\"\ndtype = \"bf16\"\n";
    let model = file("tests/models/gpt2/model.onnx");
    let all = plan("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp8"]).compiled.plan;
    let some = crate::support::plan_configured(&model, 4, attn, &["precision.compute=fp8"]);
    let tensors = |plan: &Plan| {
        let history =
            plan.states.iter().find(|s| s.name == StateName::AmaxHistory).expect("a history");
        history.ty.shape.dims()[0]
    };
    assert!(tensors(&some.compiled.plan) < tensors(&all));
    let planned = plan_to_evaluate("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp8"]);
    let evaluation = &planned.compiled.evaluation.as_ref().expect("an evaluation").plan;
    assert!(rounds(evaluation, DType::F8E4M3) > 0);
    assert_eq!(rounds(evaluation, DType::F8E5M2), 0);
}

#[test]
fn the_plan_names_what_is_rounded() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = linear(dir.path(), 1, &[]);
    let path = planned.path();
    let text =
        frit(&["inspect", path.to_str().expect("UTF-8"), "--view", "casts"]).expect("a view");
    for what in ["rounded to f8e4m3, tensor 0", "rounded to f8e5m2, tensor 2"] {
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn fp8_is_of_bf16_and_needs_a_gpu_with_units_for_it() {
    let refused = |settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        Config::parse("", "train.toml", &settings).expect_err("refused").to_string()
    };
    let message = refused(&["precision.compute=fp16", "precision.fp8=true"]);
    assert!(message.contains("precision.compute = \"fp8\""), "{message}");
    let path = file("tests/models/mlp/model.onnx");
    let model = path.to_str().expect("UTF-8");
    for arch in ["native", "sm_80", "sm_86"] {
        let arch = format!("target.arch={arch}");
        let settings = ["precision.compute=fp8", "target.device=cuda", &arch];
        let args = settings.iter().flat_map(|s| ["--set", s]);
        let args: Vec<&str> =
            ["compile", model, "--bind", "batch=16"].into_iter().chain(args).collect();
        let message = frit(&args).expect_err("refused");
        assert!(message.contains("no tensor cores for 8-bit floats"), "{message}");
        assert!(message.contains("sm_89"), "{message}");
    }
}

/// Every matmul with quantized operands, and what quantizes them, in the bodies of a plan's kernels.
fn bodies(plan: &Plan) -> (usize, usize, usize) {
    let (mut together, mut apart, mut magnitudes) = (0, 0, 0);
    for kernel in &plan.kernels {
        let count = |is: fn(&Op) -> bool| kernel.body.nodes().filter(|(_, n)| is(&n.op)).count();
        let rounded = count(|op| matches!(op, Op::Quantize(_)));
        let gemms = count(|op| matches!(op, Op::MatMul(_)));
        together += usize::from(rounded > 0 && gemms == 1);
        apart += usize::from(rounded > 0 && gemms == 0);
        magnitudes += kernel
            .body
            .outputs
            .iter()
            .filter(|o| kernel.body.ty(o.value).shape.rank() == 0)
            .count();
    }
    (together, apart, magnitudes)
}

#[test]
fn on_a_gpu_gemms_round_their_operands_themselves() {
    for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
        let settings = ["precision.compute=fp8", "target.device=cuda", "target.arch=sm_90", ranks];
        let planned = plan("tests/models/gpt2/model.onnx", 4, &settings);
        let (together, apart, magnitudes) = bodies(&planned.compiled.plan);
        assert!(together > 4 && apart == 0 && magnitudes > 0, "{together} {apart} {magnitudes}");
        let on_cpu = plan("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp8", ranks]);
        let (together, apart, _) = bodies(&on_cpu.compiled.plan);
        assert!(together == 0 && apart > 0, "{together} {apart}");
    }
}

fn frit(args: &[&str]) -> Result<String, String> {
    use clap::Parser;
    let cli = frit::commands::Cli::try_parse_from([&["frit"], args].concat());
    frit::commands::execute(&cli.map_err(|e| e.to_string())?).map_err(|report| report.to_string())
}
