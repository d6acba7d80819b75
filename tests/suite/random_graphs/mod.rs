//! Random graphs with random options: every plan is proved, its compiled kernels agree with the interpreter, one step
//! agrees with that of one rank without options, and that one with the interpreted graph.
//!
//! `FRIT_GRAPHS` sets how many graphs are tried, `FRIT_GRAPHS_FROM` the first seed.

mod generate;

use frit::config::Config;
use frit::diagnostics::Report;
use frit::driver::{Compiled, Observer, Request, compile};
use frit::plan_dir::{Stored, write};
use frit_ir::interpret::{Options, leaf_key, run as interpret};
use frit_ir::{DType, Graph, Op, OutputKind, Tensor};
use frit_runtime::run::{RunOptions, run};
pub(crate) use generate::generate;
use generate::{BATCH, Generated, ROWS, Random};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Graphs, unless `FRIT_GRAPHS` says otherwise.
const GRAPHS: u64 = 8;
const STEPS: usize = 2;
const EXAMPLES: usize = 48;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn plans_of_random_graphs_compute_what_the_graphs_say() {
    let (first, n) = (number("FRIT_GRAPHS_FROM", 1), number("FRIT_GRAPHS", GRAPHS));
    let mut compared = 0;
    for seed in first..first + n {
        let model = generate(seed);
        let case = Case::new(seed, &model);
        match case.check() {
            Ok(checked) => compared += u64::from(checked),
            Err(what) => panic!("seed {seed}, {:?}: {what}\n{}", case.settings, model.json),
        }
    }
    assert!(2 * compared >= n, "only {compared} of {n} graphs could be compared");
}

/// One graph with its options.
struct Case {
    dir: tempfile::TempDir,
    /// Loss and optimizer, which are always the same.
    shared: Vec<String>,
    /// What should change no number but by the precision.
    settings: Vec<String>,
    /// Micro-steps of all ranks in a step.
    micro_steps: usize,
    /// Whether all is computed in f32.
    exact: bool,
    /// Whether the update is smooth in the gradients.
    smooth: bool,
}

impl Case {
    fn new(seed: u64, model: &Generated) -> Case {
        let r = &mut Random(!seed);
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("model.json"), &model.json).expect("written");
        let optimizer = r.pick(&["sgd", "momentum", "adamw", "adafactor", "lion", "nesterov"]);
        let shared: Vec<String> = [
            "loss.kind=mse".to_string(),
            format!("loss.logits={}", model.output),
            "optimizer.lr=1e-2".into(),
            format!("optimizer.kind={optimizer}"),
            format!("optimizer.decay={}", r.pick(&["all", "matrices"])),
            format!("optimizer.clip_grad_norm={}", r.pick(&["0", "0.5"])),
        ]
        .into();
        let ranks = [1, 1, 2, 3, 4][r.below(5)];
        let strategies =
            ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"];
        let mut strategy = r.pick(&strategies);
        if strategy == "hybrid_shard" && ranks != 4 {
            strategy = "full_shard";
        }
        let accumulation = 1 + r.below(2);
        let precision = r.pick(&["fp32", "fp32", "fp32", "bf16", "fp16"]);
        let mut settings = vec![
            format!("sharding.ranks={ranks}"),
            format!("sharding.strategy={strategy}"),
            format!("run.accumulation={accumulation}"),
            format!("precision.compute={precision}"),
            format!("sharding.no_sync={}", accumulation > 1 && r.flag()),
            format!("sharding.prefetch={}", r.pick(&["fixed", "auto"])),
            format!("sharding.wrap={}", r.pick(&["blocks", "none", "size=8"])),
            format!("memory.recompute={}", r.pick(&["none", "unit", "selective"])),
            format!("memory.offload={}", r.pick(&["none", "optimizer", "parameters"])),
            format!("padding.tensor_cores={}", r.pick(&["auto", "always"])),
            format!("optimizer.ema={}", r.pick(&["0", "0.9"])),
        ];
        if strategy == "hybrid_shard" {
            settings.push("sharding.shard_group=2".into());
        }
        let smooth = matches!(optimizer, "sgd" | "momentum" | "nesterov");
        let micro_steps = ranks * accumulation;
        Case { dir, settings, micro_steps, exact: precision == "fp32", smooth, shared }
    }

    /// Whether there was a plan to compare.
    fn check(&self) -> Result<bool, String> {
        let plain = [
            "precision.compute=fp32".to_string(),
            format!("run.accumulation={}", self.micro_steps),
        ];
        let (Some(base), graph) = self.compiled(&plain)? else { return Ok(false) };
        self.data(&base);
        let expected = self.trained("base", &base, true)?;
        if expected.losses.iter().any(|loss| !loss.is_finite()) {
            return Ok(false);
        }
        self.graph(&graph, &base, &expected)?;
        let (Some(plan), _) = self.compiled(&self.settings)? else { return Ok(false) };
        let compiled = self.trained("compiled", &plan, false)?;
        let interpreted = self.trained("interpreted", &plan, true)?;
        let close = if self.exact { 1e-3 } else { 5e-2 };
        let steps = if self.smooth { STEPS } else { 1 };
        compare("compiled and interpreted", &compiled, &interpreted, close, steps)?;
        if self.exact {
            compare("with options and without", &compiled, &expected, close, steps)?;
        }
        Ok(true)
    }

    /// Compiles with the shared settings and these; nothing if the graph has no plan for a reason that the user
    /// can read.
    fn compiled(&self, settings: &[String]) -> Result<(Option<Compiled>, Graph), String> {
        let sets = [&self.shared[..], settings].concat();
        let config = Config::parse("", "", &sets).map_err(|e| e.to_string())?;
        let model = self.dir.path().join("model.json");
        let request = Request { model, evaluation: true, ..Request::default() };
        let mut after = AfterLoss::default();
        match compile(&request, &config, &mut after) {
            Ok(compiled) => Ok((compiled, after.0.unwrap_or_default())),
            Err(report) if is_explained(&report) => Ok((None, Graph::default())),
            Err(report) => Err(report.to_string()),
        }
    }

    /// Writes examples for all inputs of a plan.
    fn data(&self, compiled: &Compiled) {
        let mut r = Random(7);
        let mut tensors: Vec<(String, Vec<usize>, DType, Vec<u8>)> = Vec::new();
        for input in &compiled.plan.inputs {
            let mut shape = input.ty.shape.dims().to_vec();
            if shape.first() == Some(&BATCH) {
                shape[0] = EXAMPLES;
            }
            let n: usize = shape.iter().product();
            let bytes = match input.ty.dtype {
                DType::I64 => (0..n).flat_map(|_| (r.below(ROWS) as i64).to_le_bytes()).collect(),
                _ => (0..n).flat_map(|_| r.number().to_le_bytes()).collect(),
            };
            tensors.push((input.name.clone(), shape, input.ty.dtype, bytes));
        }
        let views = tensors.iter().map(|(name, shape, dtype, bytes)| {
            let dtype = frit_runtime::safetensors_dtype(*dtype);
            let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes);
            (name.as_str(), view.expect("fits"))
        });
        let path = self.dir.path().join("data.safetensors");
        safetensors::serialize_to_file(views, None, &path).expect("written");
    }

    fn trained(&self, name: &str, compiled: &Compiled, interpret: bool) -> Result<Trained, String> {
        let path = self.dir.path().join(name);
        write(&path, compiled, Stored::Copy).map_err(|e| e.to_string())?;
        let gradients = self.dir.path().join(format!("{name}.safetensors"));
        let options = RunOptions {
            steps: STEPS,
            data: self.dir.path().join("data.safetensors").into(),
            dump_grads: Some(gradients.clone()),
            interpret,
            threads: Some(1),
            ..RunOptions::default()
        };
        let report = run(&path, &options).map_err(|e| format!("{name}: {e}"))?;
        Ok(Trained { losses: report.losses, gradients: tensors(&gradients) })
    }

    /// Compares the first loss with that of the graph, interpreted; of one micro-step.
    fn graph(&self, graph: &Graph, base: &Compiled, expected: &Trained) -> Result<(), String> {
        if self.micro_steps != 1 {
            return Ok(());
        }
        let data = std::fs::read(self.dir.path().join("data.safetensors")).expect("the data");
        let data = safetensors::SafeTensors::deserialize(&data).expect("safetensors");
        let mut feeds = HashMap::new();
        for (_, node) in graph.nodes() {
            let tensor = match &node.op {
                Op::Input(input) => {
                    let bytes = data.tensor(&input.name).expect("a tensor").data();
                    Tensor::from_bytes(input.ty.clone(), &bytes[..input.ty.bytes()]).expect("fits")
                }
                Op::Param(param) => {
                    let all = 0..param.ty.shape.numel();
                    let seed = base.plan.seed;
                    let values = frit_runtime::init::values(&param.init, seed, &param.name, all);
                    let values = values.expect("made").into_iter().map(f64::from).collect();
                    Tensor::floats(DType::F32, param.ty.shape.clone(), values)
                }
                _ => continue,
            };
            feeds.insert(leaf_key(&node.op).expect("a leaf"), tensor);
        }
        let results = interpret(graph, &feeds, Options::EXACT).map_err(|e| e.to_string())?;
        let of = |kind: OutputKind| {
            let i = graph.outputs.iter().position(|o| o.kind == kind).expect("an output");
            results[i].1.to_f64s()[0]
        };
        let loss = of(OutputKind::LossSum) / of(OutputKind::LossCount);
        near("the plan's loss and the graph's", expected.losses[0], loss, 1e-4)
    }
}

/// Keeps the graph after the loss is attached.
#[derive(Default)]
struct AfterLoss(Option<Graph>);

impl Observer for AfterLoss {
    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        if name == "loss" {
            self.0 = Some(graph.clone());
        }
    }
}

/// Whether all that is said is meant for users.
fn is_explained(report: &Report) -> bool {
    report.diagnostics.iter().all(|d| d.code.starts_with('E') && !d.message.contains("internal"))
}

struct Trained {
    losses: Vec<f64>,
    gradients: BTreeMap<String, Vec<f32>>,
}

fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).expect("the gradients");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats =
        |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    file.tensors().into_iter().map(|(name, view)| (name, floats(view.data()))).collect()
}

fn near(what: &str, a: f64, b: f64, close: f64) -> Result<(), String> {
    let same = a == b || (a.is_nan() && b.is_nan());
    let fits = same || (a - b).abs() <= close * b.abs().max(1.0);
    if fits { Ok(()) } else { Err(format!("{what}: {a} and {b}")) }
}

fn compare(what: &str, a: &Trained, b: &Trained, close: f64, steps: usize) -> Result<(), String> {
    for (step, (a, b)) in a.losses.iter().zip(&b.losses).enumerate().take(steps) {
        near(&format!("{what}, loss of step {step}"), *a, *b, close)?;
    }
    for (name, expected) in &b.gradients {
        let found =
            a.gradients.get(name).ok_or_else(|| format!("{what}: no gradient of {name}"))?;
        for (x, y) in found.iter().zip(expected) {
            near(&format!("{what}, gradient of {name}"), (*x).into(), (*y).into(), close)?;
        }
    }
    Ok(())
}

#[test]
fn the_same_seed_is_the_same_model() {
    assert_eq!(generate(3).json, generate(3).json);
    assert_ne!(generate(3).json, generate(4).json);
}
