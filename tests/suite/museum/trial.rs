//! Compiles and trains the models of the museum, and compares what came of it.

use super::data;
use crate::support::{file, write_f32};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Compiled, Request, compile};
use frit::config::Config;
use frit::diagnostics::{Report, of_run};
use frit::plan_dir::Stored;
use frit_passes::verify_plan::verify_plan;
use frit_runtime::RunError;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, RunReport, run};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Parameters by name.
pub(super) type Params = BTreeMap<String, Vec<f64>>;

/// A model with settings and data.
pub(super) struct Setup {
    /// A file of `tests/museum/models` without its extension, or a path of the workspace.
    pub(super) model: String,
    /// Texts of the model that are replaced by others.
    pub(super) changes: Vec<(String, String)>,
    /// Text of the configuration beside the settings.
    pub(super) toml: String,
    /// Settings, `batch=N` for the examples of one rank and micro-step (2), `steps=N` (1) and `examples=N`; `reordered` declares the parameters of
    /// a model in the opposite order.
    pub(super) with: String,
    /// Changes of the data; see [`data::write`].
    pub(super) data: Vec<String>,
}

/// What a training left behind.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) losses: Vec<f64>,
    pub(super) warnings: Vec<String>,
    pub(super) params: Params,
    grad_norms: Vec<f64>,
    rates: Vec<f64>,
}

impl Outcome {
    /// The largest relative difference of losses, gradient norms, learning rates and parameters, each relative to
    /// the largest of its kind; infinite if there are more of one than of the other.
    pub(super) fn difference(&self, other: &Outcome) -> f64 {
        let lists = |o: &Outcome| {
            let mut all = vec![o.losses.clone(), o.grad_norms.clone(), o.rates.clone()];
            all.extend(o.params.values().cloned());
            all
        };
        let (ours, theirs) = (lists(self), lists(other));
        if !self.params.keys().eq(other.params.keys()) {
            return f64::INFINITY;
        }
        let of = |(a, b): (&Vec<f64>, &Vec<f64>)| {
            let largest = b.iter().fold(0.0f64, |m, x| m.max(x.abs())).max(1e-30);
            let differences = a.iter().zip(b).map(|(x, y)| (x - y).abs() / largest);
            if a.len() == b.len() { differences.fold(0.0, f64::max) } else { f64::INFINITY }
        };
        ours.iter().zip(&theirs).map(of).fold(0.0, f64::max)
    }

    /// The norm of the update of all parameters since they were these.
    pub(super) fn moved(&self, initial: &Params) -> f64 {
        let squares = self
            .params
            .iter()
            .flat_map(|(name, now)| now.iter().zip(&initial[name]).map(|(a, b)| (a - b) * (a - b)));
        squares.sum::<f64>().sqrt()
    }
}

/// Messages as the program prints them, with their codes.
pub(super) fn said(report: &Report) -> String {
    let lines = report.diagnostics.iter().map(|d| format!("error[{}]: {d}", d.code));
    lines.collect::<Vec<_>>().join("\n")
}

/// Settings among words, and the numbers that are none.
struct Words {
    settings: Vec<String>,
    batch: usize,
    steps: usize,
    examples: usize,
    reordered: bool,
}

impl Setup {
    fn words(&self, with: &str) -> Words {
        let mut words =
            Words { settings: vec![], batch: 2, steps: 1, examples: 24, reordered: false };
        for word in self.with.split_whitespace().chain(with.split_whitespace()) {
            let number = |text: &str| text.parse().expect("a number");
            match word.split_once('=') {
                Some(("batch", n)) => words.batch = number(n),
                Some(("steps", n)) => words.steps = number(n),
                Some(("examples", n)) => words.examples = number(n),
                None if word == "reordered" => words.reordered = true,
                None => panic!("`{word}` is no setting"),
                Some(_) => words.settings.push(word.into()),
            }
        }
        words
    }

    /// The model's file, changed.
    fn model(&self, dir: &Path, reordered: bool) -> PathBuf {
        if self.model.contains('/') {
            return file(&self.model);
        }
        let mut text =
            std::fs::read_to_string(file(&format!("tests/museum/models/{}.json", self.model)))
                .expect("a model");
        for (from, to) in &self.changes {
            assert!(text.contains(from.as_str()), "`{from}` is not in {}", self.model);
            text = text.replace(from.as_str(), to);
        }
        if reordered {
            let mut model: Value = serde_json::from_str(&text).expect("JSON");
            model["params"].as_array_mut().expect("parameters").reverse();
            text = model.to_string();
        }
        let path = dir.join("model.json");
        std::fs::write(&path, text).expect("written");
        path
    }

    /// What a plan follows from, in words.
    pub(super) fn key(&self, with: &str) -> String {
        let Words { settings, batch, reordered, .. } = self.words(with);
        format!("{:?}", (&self.model, &self.changes, &self.toml, settings, batch, reordered))
    }

    /// What is compiled with more settings; its model is in `dir`.
    pub(super) fn request(
        &self,
        with: &str,
        evaluation: bool,
        dir: &Path,
    ) -> Result<(Request, Config), String> {
        let Words { settings, batch, reordered, .. } = self.words(with);
        let config = Config::parse(&self.toml, "train.toml", &settings).map_err(|e| said(&e))?;
        let model = self.model(dir, reordered);
        let binds = [("batch".to_string(), batch)].into();
        Ok((Request { model, binds, evaluation, ..Request::default() }, config))
    }

    /// Writes a plan directory.
    pub(super) fn write(&self, compiled: &Compiled, to: &Path) -> Result<(), String> {
        frit::plan_dir::write(to, compiled, Stored::Copy).map_err(|e| said(&e))
    }

    /// Compiles with more settings, and verifies the plan.
    pub(super) fn compile(&self, with: &str) -> Result<Rc<Compiled>, String> {
        self.compiled(with, false)
    }

    /// Compiles, also the evaluation if asked for; what this thread has compiled before, not again.
    pub(super) fn compiled(&self, with: &str, evaluation: bool) -> Result<Rc<Compiled>, String> {
        thread_local!(static KNOWN: RefCell<HashMap<String, Rc<Compiled>>> = RefCell::default());
        let key = format!("{} {evaluation}", self.key(with));
        if let Some(known) = KNOWN.with_borrow(|known| known.get(&key).cloned()) {
            return Ok(known);
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (request, config) = self.request(with, evaluation, dir.path())?;
        let compiled = compile(&request, &config, &mut ()).map_err(|e| said(&e))?;
        let compiled = Rc::new(compiled.expect("no pass was asked to stop"));
        verify_plan(&compiled.plan).map_err(|found| format!("{found:?}"))?;
        KNOWN.with_borrow_mut(|known| known.insert(key, Rc::clone(&compiled)));
        Ok(compiled)
    }

    /// The parameters before the first step.
    pub(super) fn initial(&self, with: &str) -> Result<Params, String> {
        let with = format!("{with} steps=1 optimizer.lr=0 optimizer.weight_decay=0");
        self.train(&with, Path::new("")).map(|outcome| outcome.params)
    }

    /// Trains with more settings; in this directory of checkpoints, unless its name is empty.
    pub(super) fn train(&self, with: &str, checkpoints: &Path) -> Result<Outcome, String> {
        let compiled = self.compile(with)?;
        let words = self.words(with);
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path();
        let plan = at.join("plan");
        self.write(&compiled, &plan)?;
        let changes: Vec<&str> = self.data.iter().map(String::as_str).collect();
        let data = data::write(&compiled.plan, words.examples, &changes, at);
        let checkpoint =
            CheckpointOptions { dir: checkpoints.into(), every: None, resume: true, keep: None };
        let (save, metrics) = (at.join("saved.safetensors"), at.join("metrics.jsonl"));
        let options = RunOptions {
            steps: words.steps,
            data: data.as_path().into(),
            save: Some(save.clone()),
            metrics: Some(metrics.clone()),
            threads: Some(1),
            checkpoint: (!checkpoints.as_os_str().is_empty()).then_some(checkpoint),
            ..RunOptions::default()
        };
        let report = run(&plan, &options).map_err(|e| said(&of_run(e).into()))?;
        if let Some(stopped) = &report.stopped {
            return Err(said(&of_run(RunError::Diverged(stopped.clone())).into()));
        }
        let rates = std::fs::read_to_string(&metrics).expect("metrics");
        let rate = |line: &str| {
            serde_json::from_str::<Value>(line).expect("JSON")["lr"].as_f64().expect("a rate")
        };
        let rates = rates.lines().map(rate).collect();
        let RunReport { losses, grad_norms, warnings, .. } = report;
        Ok(Outcome { losses, grad_norms, warnings, rates, params: params(&save) })
    }
}

/// The float tensors of a file.
fn params(path: &Path) -> Params {
    let bytes = std::fs::read(path).expect("tensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("tensors");
    let value = |view: safetensors::tensor::TensorView<'_>| match view.dtype() {
        Dtype::F32 => floats(view.data(), |b| f64::from(f32::from_le_bytes(b))),
        Dtype::F64 => floats(view.data(), f64::from_le_bytes),
        Dtype::BF16 => floats(view.data(), |b| half::bf16::from_le_bytes(b).to_f64()),
        other => panic!("parameters of {other:?}"),
    };
    tensors.tensors().into_iter().map(|(name, view)| (name, value(view))).collect()
}

fn floats<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.chunks_exact(N).map(|c| value(c.try_into().expect("whole elements"))).collect()
}

/// Runs a command of `frit`.
pub(super) fn command(words: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], words].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

/// Compares a run that ends at a step and goes on with other settings with one that does not end there.
pub(super) fn resumed(setup: &Setup, with: &str, at: usize) -> Result<(), String> {
    let whole = setup.train("", Path::new(""))?;
    let dir = tempfile::tempdir().expect("a directory");
    setup.train(&format!("steps={at}"), dir.path())?;
    let rest = setup.train(with, dir.path())?;
    let taken = whole.losses.len() - at;
    if rest.losses[..] != whole.losses[at..] || rest.params != whole.params {
        let tail = Outcome { losses: whole.losses[at..].to_vec(), ..whole };
        let differences = tail.losses.iter().zip(&rest.losses).map(|(a, b)| (a - b).abs());
        let largest = differences.fold(0.0, f64::max);
        return Err(format!(
            "{} of {taken} steps were taken, losses differ by {largest:e}",
            rest.losses.len()
        ));
    }
    Ok(())
}

/// Compares the gradient with the slope of the loss along directions in which every parameter changes.
pub(super) fn gradient(setup: &Setup) -> Result<(), String> {
    let compiled = setup.compile("precision.compute=fp32")?;
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let plan = at.join("plan");
    setup.write(&compiled, &plan)?;
    let data = data::write(&compiled.plan, setup.words("").examples, &[], at);
    let loss = |weights: Option<&PathBuf>, dump_grads: Option<PathBuf>| {
        let options = RunOptions {
            steps: 1,
            data: data.as_path().into(),
            weights: weights.into_iter().cloned().collect(),
            dump_grads,
            threads: Some(1),
            ..RunOptions::default()
        };
        run(&plan, &options).map(|r| r.losses[0]).map_err(|e| e.to_string())
    };
    let (grads, moved) = (at.join("grads.safetensors"), at.join("moved.safetensors"));
    loss(None, Some(grads.clone()))?;
    let (grads, base) = (params(&grads), setup.initial("precision.compute=fp32")?);
    let shapes: BTreeMap<&str, &[usize]> =
        compiled.plan.params.iter().map(|p| (p.name.as_str(), p.ty.shape.dims())).collect();
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..3 {
        let (mut slope, mut sides) = (0.0, [Vec::new(), Vec::new()]);
        for (name, values) in &base {
            let Some(grad) = grads.get(name) else {
                // Frozen.
                let same: Vec<f32> = values.iter().map(|v| *v as f32).collect();
                let tensor = (name.as_str(), shapes[name.as_str()].to_vec(), same);
                sides.iter_mut().for_each(|side| side.push(tensor.clone()));
                continue;
            };
            let steps: Vec<f64> = grad.iter().map(|_| (random.f64() - 0.5) / 64.0).collect();
            let values = values.iter().zip(&steps);
            let (up, down): (Vec<f32>, Vec<f32>) =
                values.map(|(v, s)| ((v + s) as f32, (v - s) as f32)).unzip();
            // What is stored is rounded: the direction is that of the stored parameters.
            let apart = up.iter().zip(&down).map(|(u, d)| f64::from(*u) - f64::from(*d));
            slope += apart.zip(grad).map(|(d, g)| d * g).sum::<f64>();
            let shape = shapes[name.as_str()].to_vec();
            sides[0].push((name.as_str(), shape.clone(), up));
            sides[1].push((name.as_str(), shape, down));
        }
        let mut losses = [0.0; 2];
        for (side, there) in sides.iter().zip(&mut losses) {
            write_f32(&moved, side);
            *there = loss(Some(&moved), None)?;
        }
        let measured = losses[0] - losses[1];
        if slope.abs() < 1e-4 || (measured / slope - 1.0).abs() > 5e-3 {
            return Err(format!("the loss changes by {measured:e}, by the gradient {slope:e}"));
        }
    }
    Ok(())
}
