//! Compiles and runs the test models through the library, as the command line does.

use frit::compilation::{Compiled, Request, compile};
use frit::config::Config;
use frit::plan_dir::Stored;
use frit_passes::verify_plan::{verify_evaluation, verify_plan};
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::validation::ValidationOptions;
use std::path::{Path, PathBuf};

/// A file of the workspace.
pub(crate) fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(path)
}

/// A compiled model in a directory that goes away with it.
pub(crate) struct Planned {
    pub(crate) compiled: Compiled,
    pub(crate) dir: tempfile::TempDir,
}

impl Planned {
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("plan")
    }
}

/// Compiles a model of the workspace with settings, verifies the plan, and writes it. A `batch` of 0 is for models without that dimension.
pub(crate) fn plan(model: &str, batch: usize, settings: &[&str]) -> Planned {
    plan_at(&file(model), batch, settings)
}

/// Compiles a model with settings, verifies the plan, and writes it.
pub(crate) fn plan_at(model: &Path, batch: usize, settings: &[&str]) -> Planned {
    plan_configured(model, batch, "", settings)
}

/// Compiles a model of the workspace as `frit compile` does, with its evaluation, and verifies both plans.
pub(crate) fn plan_to_evaluate(model: &str, batch: usize, settings: &[&str]) -> Planned {
    planned(compile_configured(&file(model), batch, "", settings, true))
}

/// The same for a model anywhere.
pub(crate) fn plan_to_evaluate_at(model: &Path, batch: usize, settings: &[&str]) -> Planned {
    planned(compile_configured(model, batch, "", settings, true))
}

/// The same with the text of a train.toml.
pub(crate) fn plan_to_evaluate_configured(
    model: &str,
    batch: usize,
    toml: &str,
    settings: &[&str],
) -> Planned {
    planned(compile_configured(&file(model), batch, toml, settings, true))
}

/// Compiles a model with the text of a train.toml and settings, verifies the plan, and writes it.
pub(crate) fn plan_configured(
    model: &Path,
    batch: usize,
    toml: &str,
    settings: &[&str],
) -> Planned {
    planned(compile_configured(model, batch, toml, settings, false))
}

/// Compiles a model with settings and verifies the plan.
pub(crate) fn compile_at(model: &Path, batch: usize, settings: &[&str]) -> Compiled {
    compile_configured(model, batch, "", settings, false)
}

fn planned(compiled: Compiled) -> Planned {
    let planned = Planned { compiled, dir: tempfile::tempdir().expect("a directory") };
    frit::plan_dir::write(&planned.path(), &planned.compiled, Stored::Copy)
        .unwrap_or_else(|e| panic!("{e}"));
    planned
}

fn compile_configured(
    model: &Path,
    batch: usize,
    toml: &str,
    settings: &[&str],
    evaluation: bool,
) -> Compiled {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::parse(toml, "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let request = Request {
        model: model.into(),
        binds: (batch > 0).then(|| ("batch".to_string(), batch)).into_iter().collect(),
        evaluation,
        ..Request::default()
    };
    let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{e}"));
    let compiled = compiled.expect("no pass was asked to stop");
    verify_plan(&compiled.plan).unwrap_or_else(|e| panic!("{e:?}"));
    if let Some(evaluation) = &compiled.evaluation {
        verify_evaluation(&evaluation.plan, &compiled.plan).unwrap_or_else(|e| panic!("{e:?}"));
    }
    compiled
}

/// Runs a plan.
pub(crate) fn train(planned: &Planned, data: &str, steps: usize, interpret: bool) -> RunReport {
    let options = RunOptions {
        steps,
        data: file(data).into(),
        dump_grads: Some(planned.dir.path().join("grads.safetensors")),
        interpret,
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs a plan on a data file anywhere, with metrics.
pub(crate) fn train_on(
    planned: &Planned,
    data: &Path,
    steps: usize,
    metrics: Option<PathBuf>,
) -> RunReport {
    let options =
        RunOptions { steps, data: data.into(), metrics, threads: Some(1), ..RunOptions::default() };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

/// Losses and validation losses of a run, with a validation after every step, that ends before its last step and is resumed from its
/// checkpoint.
pub(crate) fn resumed_losses(planned: &Planned, options: RunOptions) -> Vec<f64> {
    let options = RunOptions {
        validation: Some(ValidationOptions { data: options.data.clone(), every: Some(1) }),
        checkpoint: Some(CheckpointOptions {
            dir: planned.dir.path().join("checkpoints"),
            every: Some(1),
            resume: true,
            keep: None,
        }),
        ..options
    };
    let mut losses = Vec::new();
    for steps in [options.steps - 1, options.steps] {
        let options = RunOptions { steps, ..options.clone() };
        let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(report.start, losses.len() / 2);
        losses.extend(report.losses);
        losses.extend(report.validation.iter().map(|(_, loss)| *loss));
    }
    losses
}

/// Writes f32 tensors as a safetensors file.
pub(crate) fn write_f32(path: &Path, tensors: &[(&str, Vec<usize>, Vec<f32>)]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(.., values)| values.iter().flat_map(|x| x.to_le_bytes()).collect())
        .collect();
    let view = |shape: &Vec<usize>, bytes| {
        let dtype = safetensors::Dtype::F32;
        safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).expect("fits")
    };
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), b)| (*name, view(shape, b)));
    safetensors::serialize_to_file(views, None, path).expect("written");
}
