//! Validation crossed with all settings that determine how parameters are distributed over ranks: every pair of
//! settings once; the loss at each step equals that of `frit eval` on the checkpoint of that step, and a trainer that is
//! fed the same batches computes the same.

use crate::pairs::{Row, rows};
use crate::support::{Planned, file, plan_to_evaluate, plan_to_evaluate_configured};
use frit_ir::ops::BinaryFn;
use frit_ir::plan::{Action, Place, Plan};
use frit_ir::{DType, Op, Region};
use frit_passes::verify_plan::verify_evaluation;
use frit_runtime::checkpoint::{Checkpoint, CheckpointOptions};
use frit_runtime::data::{Batch, Element};
use frit_runtime::eval::{Options, evaluate};
use frit_runtime::run::{RunOptions, RunReport, run};
use frit_runtime::trainer::{Trainer, TrainerOptions};
use frit_runtime::validation::ValidationOptions;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const STEPS: usize = 3;

/// What is crossed: of each, settings, or what is said of it in words.
const FACTORS: [&[&str]; 8] = [
    &["mlp", "dropout", "tied", "graph"],
    &["", "optimizer.decay=matrices", "group"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
];
const MODEL: usize = 0;
const GROUPS: usize = 1;
const RANKS: usize = 2;
const STRATEGY: usize = 3;

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    !hybrid || row[RANKS].is_none_or(|ranks| ranks % 2 == 1)
}

/// Compiles a row; with hyper-parameters of its own for some of the weights of every model.
fn planned(row: &[usize]) -> (Planned, &'static str) {
    let model = FACTORS[MODEL][row[MODEL]];
    let strategy = format!("sharding.strategy={}", FACTORS[STRATEGY][row[STRATEGY]]);
    let mut settings = vec![strategy.as_str(), "optimizer.lr=0.01"];
    if strategy.ends_with("hybrid_shard") {
        settings.push("sharding.shard_group=2");
    }
    let mut toml = "";
    match FACTORS[GROUPS][row[GROUPS]] {
        "" => {}
        "group" => toml = "[[optimizer.group]]\nscope = \"*.weight\"\nlr = 1e-4\n",
        setting => settings.push(setting),
    }
    settings.extend((RANKS..FACTORS.len()).filter(|f| *f != STRATEGY).map(|f| FACTORS[f][row[f]]));
    let batch = if model == "graph" { 0 } else { 2 };
    (plan_to_evaluate_configured(&model_of(model), batch, toml, &settings), model)
}

fn model_of(model: &str) -> String {
    format!("tests/models/{model}/model.onnx")
}

fn train(planned: &Planned, options: RunOptions) -> RunReport {
    let options = RunOptions { threads: Some(1), ..options };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"))
}

fn options(model: &str, dir: &Path, steps: usize) -> RunOptions {
    let data = file(&format!("tests/models/{model}/data.safetensors"));
    RunOptions {
        steps,
        data: data.clone().into(),
        validation: Some(ValidationOptions { data: data.into(), every: Some(1) }),
        checkpoint: Some(CheckpointOptions {
            dir: dir.into(),
            every: Some(1),
            resume: true,
            keep: None,
        }),
        ..RunOptions::default()
    }
}

#[test]
fn validation_is_the_evaluation_of_every_checkpoint_whatever_it_is_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    assert!((20..=30).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let (planned, model) = planned(&row);
        let checkpoints = planned.dir.path().join("checkpoints");
        // One run that ends and is continued.
        let ended = train(&planned, options(model, &checkpoints, STEPS - 1));
        let continued = train(&planned, options(model, &checkpoints, STEPS));
        let losses = [ended.losses, continued.losses].concat();
        let found = [ended.validation, continued.validation].concat();
        a_trainer_computes_the_same(&planned, model, &losses, &found, &words);
        let steps: Vec<usize> = found.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{words:?}");
        for (step, loss) in found {
            let evaluated = Options {
                plan: planned.path(),
                data: vec![file(&format!("tests/models/{model}/data.safetensors"))],
                checkpoint: Some(checkpoints.join(format!("step-{step:08}"))),
                threads: Some(1),
                ..Options::default()
            };
            let report = evaluate(&evaluated).unwrap_or_else(|e| panic!("{words:?}: {e}"));
            let evaluated = report.expect("rank 0").loss;
            assert_eq!(evaluated, Some(loss), "{words:?} after {step} steps");
        }
        bad_indices_are_refused(&planned, model, &words);
    }
}

/// A trainer that is fed the same examples, closed and resumed, has the losses of the run and of its validations.
fn a_trainer_computes_the_same(
    planned: &Planned,
    model: &str,
    losses: &[f64],
    validation: &[(usize, f64)],
    words: &[&str],
) {
    let dir = planned.dir.path().join("trainer");
    let open = || {
        let checkpoint =
            CheckpointOptions { dir: dir.clone(), every: Some(2), resume: true, keep: None };
        let options = TrainerOptions {
            checkpoint: Some(checkpoint),
            threads: Some(1),
            ..TrainerOptions::default()
        };
        Trainer::open(&planned.path(), options, &mut || ())
            .unwrap_or_else(|e| panic!("{words:?}: {e}"))
    };
    let plan = &planned.compiled.plan;
    let n = plan.batch().unwrap_or(1) * plan.world_size * plan.accumulation;
    let mut trainer = open();
    for (step, loss) in losses.iter().enumerate() {
        if step == STEPS - 1 {
            trainer.close(&mut || ()).unwrap_or_else(|e| panic!("{words:?}: {e}"));
            trainer = open();
        }
        assert_eq!(trainer.steps(), step, "{words:?}");
        let metrics = trainer.step(&batch(model, Some((step, n))), &mut || ());
        let metrics = metrics.unwrap_or_else(|e| panic!("{words:?}: {e}"));
        assert_eq!((metrics.step, metrics.loss), (step, *loss), "{words:?}");
        let mut evaluating = trainer.begin_evaluation().unwrap_or_else(|e| panic!("{e}"));
        let evaluated = trainer
            .evaluate(&mut evaluating, &batch(model, None), &mut || ())
            .and_then(|()| trainer.evaluated(&evaluating));
        let evaluated = evaluated.unwrap_or_else(|e| panic!("{words:?}: {e}"));
        assert_eq!((step + 1, evaluated.loss), (validation[step].0, Some(validation[step].1)));
    }
}

/// The examples of a model: all, or those of a step of `n` examples.
fn batch(model: &str, step: Option<(usize, usize)>) -> Batch {
    let bytes = std::fs::read(file(&format!("tests/models/{model}/data.safetensors")));
    let bytes = bytes.expect("readable");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut batch = Batch::default();
    for (name, view) in tensors.iter() {
        let element = match view.dtype() {
            Dtype::I64 => Element::I64,
            Dtype::F32 => Element::F32,
            other => panic!("{name} is {other:?}"),
        };
        let (mut shape, mut data) = (view.shape().to_vec(), view.data());
        if let Some((step, n)) = step {
            let size = data.len() / shape[0];
            let at = step % (shape[0] / n) * n;
            (shape[0], data) = (n, &data[at * size..(at + n) * size]);
        }
        batch.add(name, element, shape, data.to_vec()).expect("contiguous");
    }
    batch
}

/// The data of a model with the last index of every input that has a range far outside of it.
fn with_bad_indices(planned: &Planned, model: &str) -> PathBuf {
    let bytes = std::fs::read(file(&format!("tests/models/{model}/data.safetensors")));
    let bytes = bytes.expect("readable");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let ranged = |name: &str| {
        planned.compiled.plan.inputs.iter().any(|i| i.name == name && !i.ranges.is_empty())
    };
    let mut changed = 0;
    let tensors = tensors.tensors().into_iter().map(|(name, view)| {
        let mut bytes = view.data().to_vec();
        if ranged(&name) {
            assert_eq!(view.dtype(), Dtype::I64, "{name}");
            let last = bytes.len() - 8;
            bytes[last..].copy_from_slice(&(1_i64 << 30).to_le_bytes());
            changed += 1;
        }
        (name, view.dtype(), view.shape().to_vec(), bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    assert!(changed > 0, "{model} reads no indices");
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("its bytes"))
    });
    let path = planned.dir.path().join("bad.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("written");
    path
}

/// An index out of range, in the data or the validation, is said before the first step, and nothing is written.
fn bad_indices_are_refused(planned: &Planned, model: &str, words: &[&str]) {
    let bad = with_bad_indices(planned, model);
    let checkpoints = planned.dir.path().join("never");
    let metrics = planned.dir.path().join("never.jsonl");
    for validates in [false, true] {
        let mut options = options(model, &checkpoints, STEPS);
        options.metrics = Some(metrics.clone());
        match options.validation.as_mut().filter(|_| validates) {
            Some(validation) => validation.data = bad.clone().into(),
            None => options.data = bad.clone().into(),
        }
        let options = RunOptions { threads: Some(1), ..options };
        let error = run(&planned.path(), &options).expect_err("refused").to_string();
        for part in ["bad.safetensors", "1073741824 is outside of"] {
            assert!(error.contains(part), "{words:?}: {error}");
        }
        assert!(Checkpoint::latest(&checkpoints).expect("readable").is_none(), "{words:?}");
        let written = std::fs::read_to_string(&metrics).unwrap_or_default();
        assert_eq!(written, "", "{words:?}");
    }
}

/// What a narrow residual stream is crossed with, and a wide one.
const RESIDUAL: [&[&str]; 7] = [
    &["sharding.ranks=1", "sharding.ranks=2"],
    &[
        "sharding.strategy=full_shard",
        "sharding.strategy=shard_optimizer",
        "sharding.strategy=no_shard",
    ],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &[
        "precision.compute=bf16",
        "precision.compute=fp16",
        "precision.compute=bf16-pure",
        "precision.compute=fp8",
        "precision.compute=fp32",
    ],
    &["precision.residual=fp32", "precision.residual=compute"],
];

/// The dtypes in which a plan adds to the residual stream of GPT-2, four times in a forward pass of two blocks.
fn residual_dtypes(plan: &Plan) -> BTreeSet<DType> {
    let stream = |place: &Place| place.ty.shape.dims().len() == 3;
    let sums = plan.tasks.iter().filter_map(|task| match &task.action {
        Action::Kernel { kernel, writes, .. } if task.region == Region::Forward => {
            let body = &plan.kernels[*kernel].body;
            let norm = body.nodes().any(|(_, n)| matches!(n.op, Op::LayerNorm(_)));
            let adds = body.nodes().any(|(_, n)| matches!(n.op, Op::Binary(BinaryFn::Add)));
            (norm && adds).then(|| writes.first().filter(|p| stream(p)))?
        }
        _ => None,
    });
    sums.map(|place| place.ty.dtype).collect()
}

#[test]
fn a_narrow_residual_stream_trains_whatever_it_is_crossed_with() {
    for row in rows(&RESIDUAL, |_| true) {
        let words: Vec<&str> = row.iter().zip(RESIDUAL).map(|(level, f)| f[*level]).collect();
        let planned = plan_to_evaluate_configured(&model_of("gpt2"), 2, "", &words);
        let is_narrow = words[6].ends_with("compute") && !words[5].ends_with("fp32");
        let low = if words[5].ends_with("fp16") { DType::F16 } else { DType::BF16 };
        let found = residual_dtypes(&planned.compiled.plan);
        // Where a unit is recomputed, what its stream begins with may also be kept in f32.
        let recomputes = !words[3].ends_with("none");
        match is_narrow || words[5].ends_with("pure") {
            true => {
                let wide = found.contains(&DType::F32) && !recomputes;
                assert!(found.contains(&low) && !wide, "{words:?}: {found:?}");
            }
            false => assert!(found.contains(&DType::F32), "{words:?}: {found:?}"),
        }
        let checkpoints = planned.dir.path().join("checkpoints");
        // One run that ends and is continued.
        let mut found = train(&planned, options("gpt2", &checkpoints, 1)).validation;
        found.extend(train(&planned, options("gpt2", &checkpoints, 2)).validation);
        let wide: Vec<&str> = [&words[..5], &["precision.compute=fp32"]].concat();
        let wide = plan_to_evaluate_configured(&model_of("gpt2"), 2, "", &wide);
        let checkpoints = wide.dir.path().join("checkpoints");
        let exact = train(&wide, options("gpt2", &checkpoints, 2)).validation;
        assert_eq!(found.len(), exact.len(), "{words:?}");
        for ((step, loss), (_, exact)) in found.iter().zip(&exact) {
            assert!((loss / exact - 1.0).abs() < 0.02, "{words:?}: {loss} for {exact} at {step}");
        }
    }
}

#[test]
fn block_models_share_the_layout_of_their_units() {
    let group = "[[optimizer.group]]\nscope = \"*h.1*\"\nlr = 1e-4\n";
    for (toml, settings) in [
        ("", &["sharding.ranks=4", "optimizer.decay=matrices"][..]),
        (group, &["sharding.ranks=2", "sharding.reshard_after_forward=1", "run.accumulation=2"]),
        (group, &["sharding.ranks=3", "sharding.prefetch=auto", "optimizer.kind=adafactor"]),
        ("", &["sharding.ranks=2", "params.frozen=[\"*wte*\"]", "optimizer.decay=matrices"]),
        ("", &["sharding.ranks=2", "precision.compute=fp8", "optimizer.decay=matrices"]),
    ] {
        let planned = plan_to_evaluate_configured(&model_of("gpt2"), 1, toml, settings);
        let checkpoints = planned.dir.path().join("checkpoints");
        let report = train(&planned, options("gpt2", &checkpoints, 1));
        let evaluated = Options {
            plan: planned.path(),
            data: vec![file("tests/models/gpt2/data.safetensors")],
            checkpoint: Some(checkpoints),
            threads: Some(1),
            ..Options::default()
        };
        let evaluated = evaluate(&evaluated).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
        assert_eq!(report.validation, [(1, evaluated.loss.expect("a loss"))], "{settings:?}");
    }
}

#[test]
fn an_evaluation_that_holds_parameters_otherwise_is_refused() {
    let of = |decay: &str, ranks: usize| {
        let settings = [format!("optimizer.decay={decay}"), format!("sharding.ranks={ranks}")];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        plan_to_evaluate(&model_of("gpt2"), 1, &settings)
    };
    let (one, other) = (of("all", 2), of("matrices", 2));
    let evaluation = &one.compiled.evaluation.as_ref().expect("an evaluation").plan;
    let found = verify_evaluation(evaluation, &other.compiled.plan).expect_err("refused");
    assert!(found.iter().all(|d| d.code == "P406"), "{found:?}");
    let more = of("all", 3);
    let found = verify_evaluation(evaluation, &more.compiled.plan).expect_err("refused");
    assert_eq!(found[0].code, "P405");
    // A directory put together of two is refused before the first step.
    let eval = other.path().join("eval");
    std::fs::remove_dir_all(&eval).expect("removed");
    std::fs::rename(one.path().join("eval"), &eval).expect("moved");
    let checkpoints = other.dir.path().join("checkpoints");
    let error = run(&other.path(), &options("gpt2", &checkpoints, 1)).expect_err("refused");
    assert!(error.to_string().contains("compile the model again"), "{error}");
    assert!(Checkpoint::latest(&checkpoints).expect("readable").is_none());
}

#[test]
fn patience_stops_at_the_same_step_when_it_is_resumed() {
    let settings =
        ["sharding.ranks=2", "optimizer.kind=sgd", "optimizer.lr=3", "precision.compute=fp32"];
    let planned = plan_to_evaluate(&model_of("mlp"), 4, &settings);
    let impatient = |name: &str, steps| {
        let dir = planned.dir.path().join(name);
        let mut options = options("mlp", &dir, steps);
        options.validation.as_mut().expect("given").every = Some(2);
        train(&planned, RunOptions { patience: Some(2), ..options })
    };
    let whole = impatient("whole", 60);
    let end = whole.losses.len();
    let why = whole.early_end().expect("it stopped");
    assert!(end < 60 && why.starts_with(&format!("stopped early after {end} steps")), "{why}");
    let losses: Vec<f64> = whole.validation.iter().map(|(_, loss)| *loss).collect();
    let (before, last) = losses.split_at(losses.len() - 2);
    let best = before.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(last.iter().all(|loss| loss.is_nan() || *loss >= best), "{losses:?}");
    for cut in 1..end {
        let name = format!("cut-{cut}");
        assert_eq!(impatient(&name, cut).early, None);
        let rest = impatient(&name, 60);
        assert_eq!(rest.start + rest.losses.len(), end, "continued after {cut} steps");
        assert_eq!(rest.early, whole.early);
        // It stays where it stopped.
        assert_eq!(impatient(&name, 60).losses, [0.0; 0]);
    }
}

#[test]
fn patience_without_validations_is_refused() {
    let planned = plan_to_evaluate(&model_of("mlp"), 4, &[]);
    let data = file("tests/models/mlp/data.safetensors");
    let validation = Some(ValidationOptions { data: data.clone().into(), every: None });
    let options =
        RunOptions { steps: 9, data: data.into(), patience: Some(1), ..RunOptions::default() };
    for validation in [None, validation] {
        let options = RunOptions { validation, ..options.clone() };
        let error = run(&planned.path(), &options).expect_err("refused").to_string();
        assert!(error.contains("--validate-every"), "{error}");
    }
}

#[test]
fn a_checkpoint_is_complete_before_the_validation_of_the_same_step() {
    let planned = plan_to_evaluate(&model_of("mlp"), 4, &["sharding.ranks=2"]);
    let dir = planned.dir.path().join("checkpoints");
    let report = train(&planned, options("mlp", &dir, 2));
    // As if the last validation had not come to its end.
    for name in ["step-00000002/validation.json", "best"] {
        std::fs::remove_file(dir.join(name)).expect("removed");
    }
    let before = Checkpoint::open(&dir.join("step-00000002")).expect("complete without it");
    assert_eq!((before.index.step, before.validated), (2, None));
    // It is made up for when the run is continued.
    let again = train(&planned, options("mlp", &dir, 2));
    assert_eq!(again.validation, report.validation[1..]);
    assert_eq!(again.losses, [0.0; 0]);
    let after = Checkpoint::open(&dir.join("step-00000002")).expect("complete");
    assert_eq!(after.validated.expect("validated").loss, Some(report.validation[1].1));
}
