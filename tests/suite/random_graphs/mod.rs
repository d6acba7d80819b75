//! Random graphs with random options: every plan is verified, its compiled kernels agree with the interpreter, one step
//! agrees with that of one rank without options, that one with the interpreted graph, and its gradients with finite
//! differences in f64.
//!
//! `FRIT_GRAPHS` sets how many graphs are tried, `FRIT_GRAPHS_FROM` the first seed.

mod generate;

use frit::compilation::{Compiled, Observer, Request, compile};
use frit::config::Config;
use frit::diagnostics::Report;
use frit::plan_dir::{Stored, write};
use frit_ir::interpret::{Options, leaf_key, run as interpret};
use frit_ir::{DType, Graph, Op, OutputKind, Tensor};
use frit_runtime::run::{RunOptions, run};
pub(crate) use generate::generate;
use generate::{BATCH, DRAWS, Generated, ROWS, Random};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Graphs, unless `FRIT_GRAPHS` says otherwise.
const GRAPHS: u64 = 8;
const STEPS: usize = 2;
const EXAMPLES: usize = 48;
/// Elements of each parameter whose gradients are compared with finite differences.
const ELEMENTS: usize = 2;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn plans_of_random_graphs_compute_what_the_graphs_say() {
    let (first, n) = (number("FRIT_GRAPHS_FROM", 1), number("FRIT_GRAPHS", GRAPHS));
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    for seed in first..first + n {
        let model = generate(seed);
        let case = Case::new(seed, &model);
        if let Err(what) = case.check(&mut counts) {
            let text = format!("seed {seed}, {:?}: {what}\n{}", case.settings, model.json);
            eprintln!("{text}");
            failures.push(text);
        }
    }
    eprintln!("{n} graphs: {counts:?}, {} failures", failures.len());
    assert!(failures.is_empty(), "{} failures, the first: {}", failures.len(), failures[0]);
    // Most graphs have a plan with any options; the others need what a device or a strategy does not have.
    let enough = 3 * n / 5;
    assert!(counts.compared >= enough, "only {} of {n} graphs were compared", counts.compared);
}

/// What was compared.
#[derive(Debug, Default)]
struct Counts {
    /// Graphs whose plans were compared.
    compared: u64,
    /// With a loss that is not finite.
    infinite: u64,
    /// Without a plan, by the code of the message, before options came in and with them.
    refused: BTreeMap<String, u64>,
    excluded: BTreeMap<String, u64>,
    /// Of those compared: with matmuls of 8-bit floats, and with random masks.
    narrow: u64,
    masked: u64,
    /// Elements of gradients that were compared with finite differences, and of those that have a kink too near.
    differences: u64,
    kinks: u64,
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
    /// How far compiled kernels may be from the interpreter.
    close: f64,
    /// Whether the update is smooth in the gradients.
    smooth: bool,
}

impl Case {
    fn new(seed: u64, model: &Generated) -> Case {
        let r = &mut Random::new(!seed);
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("model.json"), &model.json).expect("written");
        let optimizer =
            r.pick(&["sgd", "momentum", "adamw", "adafactor", "muon", "lion", "nesterov"]);
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
        let precision = r.pick(&["fp32", "fp32", "fp32", "bf16", "fp16", "fp8"]);
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
        if precision == "fp16" {
            // At the first scale of the dynamic one a gradient may overflow in the interpreter, which rounds every
            // value, and not within a fused kernel.
            settings.push("precision.loss_scale=1024".into());
        }
        let smooth = matches!(optimizer, "sgd" | "momentum" | "nesterov");
        let micro_steps = ranks * accumulation;
        let close = match precision {
            "fp32" => 1e-3,
            // A matmul's operand may be rounded to an adjacent 8-bit float.
            "fp8" => 0.3,
            _ => 5e-2,
        };
        Case { dir, settings, micro_steps, exact: precision == "fp32", close, smooth, shared }
    }

    /// Compares what can be compared, and counts it.
    fn check(&self, counts: &mut Counts) -> Result<(), String> {
        let plain = [
            "precision.compute=fp32".to_string(),
            format!("run.accumulation={}", self.micro_steps),
        ];
        let (base, graph) = match self.compiled(&plain)? {
            Ok(compiled) => compiled,
            Err(code) => {
                *counts.refused.entry(code).or_default() += 1;
                return Ok(());
            }
        };
        self.data(&graph);
        let expected = self.trained("base", &base, true)?;
        if expected.losses.iter().any(|loss| !loss.is_finite()) {
            counts.infinite += 1;
            return Ok(());
        }
        self.graph(&graph, &base, &expected, counts)?;
        let (plan, _) = match self.compiled(&self.settings)? {
            Ok(compiled) => compiled,
            Err(code) => {
                *counts.excluded.entry(code).or_default() += 1;
                return Ok(());
            }
        };
        let compiled = self.trained("compiled", &plan, false)?;
        let interpreted = self.trained("interpreted", &plan, true)?;
        let steps = if self.smooth { STEPS } else { 1 };
        compare("compiled and interpreted", &compiled, &interpreted, self.close, steps)?;
        if self.exact {
            compare("with options and without", &compiled, &expected, self.close, steps)?;
        }
        let has = |is: fn(&Op) -> bool| {
            let bodies = plan.plan.kernels.iter().map(|k| &k.body);
            u64::from(bodies.flat_map(Graph::nodes).any(|(_, n)| is(&n.op)))
        };
        counts.compared += 1;
        counts.narrow += has(|op| matches!(op, Op::Quantize(_)));
        counts.masked += has(|op| matches!(op, Op::RandomMask(_)));
        Ok(())
    }

    /// Compiles with the shared settings and these; the code of the message if there is no plan for a reason that the
    /// user can read.
    fn compiled(&self, settings: &[String]) -> Result<Result<(Compiled, Graph), String>, String> {
        let sets = [&self.shared[..], settings].concat();
        let config = Config::parse("", "", &sets).map_err(|e| e.to_string())?;
        let model = self.dir.path().join("model.json");
        let request = Request { model, evaluation: true, ..Request::default() };
        let mut after = AfterLoss::default();
        match compile(&request, &config, &mut after) {
            Ok(compiled) => {
                let compiled = compiled.expect("no pass was asked to stop");
                Ok(Ok((compiled, after.0.unwrap_or_default())))
            }
            Err(report) if is_explained(&report) => Ok(Err(report.diagnostics[0].code.clone())),
            Err(report) => Err(report.to_string()),
        }
    }

    /// Writes examples for all inputs of a graph.
    fn data(&self, graph: &Graph) {
        let mut r = Random::new(7);
        let mut tensors: Vec<(String, Vec<usize>, DType, Vec<u8>)> = Vec::new();
        for (_, node) in graph.nodes() {
            let Op::Input(input) = &node.op else { continue };
            let mut shape = input.ty.shape.dims().to_vec();
            if shape.first() == Some(&BATCH) {
                shape[0] = EXAMPLES;
            }
            let n: usize = shape.iter().product();
            let bytes = match input.ty.dtype {
                DType::I64 if input.name == DRAWS => 1_i64.to_le_bytes().to_vec(),
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

    /// Compares the first loss with that of the graph, interpreted, and the gradients with differences of such losses; of
    /// one micro-step.
    fn graph(
        &self,
        graph: &Graph,
        base: &Compiled,
        expected: &Trained,
        counts: &mut Counts,
    ) -> Result<(), String> {
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
        near("the plan's loss and the graph's", expected.losses[0], loss(graph, &feeds)?, 1e-4)?;
        for (name, gradient) in &expected.gradients {
            let key = graph.params().find(|(_, p)| p.name == *name);
            let Some((value, _)) = key else { continue };
            let key = leaf_key(&graph.def(value).op).expect("a leaf");
            // A few elements stand for all.
            for at in (0..gradient.len()).step_by(gradient.len().div_ceil(ELEMENTS)) {
                let slope = |h: f64| {
                    let [up, down] = [h, -h].map(|h| loss(graph, &moved(&feeds, &key, at, h)));
                    Ok::<f64, String>((up? - down?) / (2.0 * h))
                };
                let (wide, narrow) = (slope(1e-4)?, slope(1e-5)?);
                if (wide - narrow).abs() > 1e-4 * narrow.abs().max(1.0) {
                    counts.kinks += 1;
                    continue;
                }
                counts.differences += 1;
                let what = format!("gradient of {name}[{at}] and the finite difference");
                near(&what, f64::from(gradient[at]), narrow, 1e-2)?;
            }
        }
        Ok(())
    }
}

type Feeds = HashMap<String, Tensor>;

/// The mean loss of a graph, in f64.
fn loss(graph: &Graph, feeds: &Feeds) -> Result<f64, String> {
    let results = interpret(graph, feeds, Options::EXACT).map_err(|e| e.to_string())?;
    let of = |kind: OutputKind| {
        let i = graph.outputs.iter().position(|o| o.kind == kind).expect("an output");
        results[i].1.to_f64s()[0]
    };
    Ok(of(OutputKind::LossSum) / of(OutputKind::LossCount))
}

/// The feeds with one element of one of them moved.
fn moved(feeds: &Feeds, key: &str, at: usize, by: f64) -> Feeds {
    let mut feeds = feeds.clone();
    let tensor = &feeds[key];
    let mut values = tensor.to_f64s();
    values[at] += by;
    let tensor = Tensor::floats(tensor.dtype(), tensor.ty.shape.clone(), values);
    feeds.insert(key.into(), tensor);
    feeds
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
