//! Evaluation: outputs equal onnxruntime's, losses cover whole data sets, and nothing is changed.

use crate::parity::reference;
use crate::support::{Planned, file, plan_to_evaluate, train_on};
use frit::export::Trained;
use frit_ir::Op;
use frit_ir::ops::{Constant, RandomMask};
use frit_ir::plan::{Action, Arena, GroupId, PhaseId, PhaseName};
use frit_passes::verify_plan::verify_plan;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::eval::{Options, Report, evaluate};
use frit_runtime::run::{RunOptions, run};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::path::{Path, PathBuf};

fn model(name: &str) -> String {
    format!("tests/models/{name}/model.onnx")
}

/// The first `n` examples of a model's data, as a file.
fn first(name: &str, n: usize, dir: &Path) -> PathBuf {
    let bytes =
        std::fs::read(file(&format!("tests/models/{name}/data.safetensors"))).expect("data");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let cut = |view: &TensorView<'_>| {
        let mut shape = view.shape().to_vec();
        let len = view.data().len() / shape[0] * n;
        shape[0] = n;
        (view.dtype(), shape, view.data()[..len].to_vec())
    };
    let parts: Vec<_> = all.iter().map(|(key, view)| (key.to_string(), cut(&view))).collect();
    let views = parts.iter().map(|(key, (dtype, shape, bytes))| {
        (key.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("a view"))
    });
    let path = dir.join(format!("{name}-{n}.safetensors"));
    safetensors::serialize_to_file(views, None, &path).expect("written");
    path
}

fn on(plan: &Planned, data: &Path) -> Report {
    let options = Options { data: vec![data.into()], ..options(plan) };
    evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0")
}

fn options(plan: &Planned) -> Options {
    Options { plan: plan.path(), threads: Some(1), ..Options::default() }
}

/// The elements of a tensor in a file.
fn floats(path: &Path, name: &str) -> (Vec<usize>, Vec<f64>) {
    let bytes = std::fs::read(path).expect("the file");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = tensors.tensor(name).expect("the tensor");
    let (chunks, _) = view.data().as_chunks::<4>();
    let values = chunks.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    (view.shape().to_vec(), values)
}

#[test]
fn outputs_of_the_given_models_are_onnxruntimes() {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["mlp", "gpt2", "llama", "bert", "t5", "vit", "resnet", "unet"] {
        // Three examples in batches of two, and of four over two ranks: neither is full.
        for (batch, settings) in [(4, ""), (2, "sharding.ranks=2")] {
            let mut all = vec!["precision.compute=fp32"];
            all.extend((!settings.is_empty()).then_some(settings));
            if name == "unet" {
                all.push("loss.kind=mse");
            }
            let plan = plan_to_evaluate(&model(name), batch, &all);
            let data = first(name, 3, dir.path());
            let dumped = dir.path().join("outputs.safetensors");
            let dump_outputs = Some(dumped.clone());
            let options = Options { data: vec![data], dump_outputs, ..options(&plan) };
            evaluate(&options).unwrap_or_else(|e| panic!("{name}: {e}")).expect("rank 0");
            let expected = file(&format!("tests/models/{name}/outputs.safetensors"));
            let ((shape, found), (wanted, expected)) =
                (floats(&dumped, "logits"), floats(&expected, "logits"));
            assert_eq!(shape, wanted, "{name}");
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst <= 1e-5, "{name} {settings}: outputs deviate by {worst}");
        }
    }
}

#[test]
fn the_loss_is_that_of_training_and_every_example_counts_once() {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, global) in [("mlp", 16), ("gpt2", 8)] {
        // PyTorch's first loss, in fp64, is that of the first batch with the initial weights.
        let expected = reference(name, "fp64")[0];
        let whole = first(name, global, dir.path());
        for (ranks, batch) in [(1, global), (1, 3), (2, 3)] {
            let ranks = format!("sharding.ranks={ranks}");
            let settings = ["precision.compute=fp32", &ranks];
            let plan = plan_to_evaluate(&model(name), batch, &settings);
            let report = on(&plan, &whole);
            let loss = report.loss.expect("a loss");
            assert!(
                (loss - expected).abs() < 1e-5,
                "{name} {ranks} {batch}: {loss} for {expected}"
            );
            assert_eq!(report.examples, global);
            let elements = if name == "gpt2" { global * 32 } else { global };
            assert_eq!(report.losses[0].count, elements as f64);
        }
    }
}

#[test]
fn bf16_evaluates_with_the_casts_of_training_and_machine_code_is_what_bodies_say() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = plan_to_evaluate(&model("gpt2"), 4, &["sharding.ranks=2"]);
    let data = first("gpt2", 5, dir.path());
    let loss = on(&plan, &data).loss.expect("a loss");
    let interpreted = Options { data: vec![data.clone()], interpret: true, ..options(&plan) };
    let interpreted = evaluate(&interpreted).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
    assert!((loss - interpreted.loss.expect("a loss")).abs() < 2e-3);
    let steps = train_on(&plan, &first("gpt2", 8, dir.path()), 1, None);
    let all = on(&plan, &first("gpt2", 8, dir.path())).loss.expect("a loss");
    assert!((steps.losses[0] - all).abs() < 1e-4, "{} and {all}", steps.losses[0]);
    let eval = plan.compiled.evaluation.as_ref().expect("an evaluation");
    assert!(eval.plan.summary().casts > 0);
    assert_eq!(eval.plan.summary().collectives.reduce_scatter, 0);
    assert!(eval.plan.groups.iter().all(|g| g.states.is_empty()), "no optimizer state");
}

#[test]
fn trained_weights_are_evaluated_under_their_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let settings = ["precision.compute=fp32", "sharding.ranks=2"];
    let plan = plan_to_evaluate(&model("mlp"), 8, &settings);
    let data = file("tests/models/mlp/data.safetensors");
    let weights = dir.path().join("trained.safetensors");
    let checkpoints = dir.path().join("checkpoints");
    let training = RunOptions {
        steps: 20,
        data: data.clone().into(),
        save: Some(weights.clone()),
        checkpoint: Some(CheckpointOptions {
            dir: checkpoints.clone(),
            every: None,
            resume: false,
            keep: None,
        }),
        ..Default::default()
    };
    run(&plan.path(), &training).unwrap_or_else(|e| panic!("{e}"));
    let trained =
        Options { data: vec![data.clone()], weights: vec![weights.clone()], ..options(&plan) };
    let trained =
        evaluate(&trained).unwrap_or_else(|e| panic!("{e}")).expect("rank 0").loss.expect("a loss");
    assert!(trained < on(&plan, &data).loss.expect("a loss") - 0.1);
    let kept =
        Options { data: vec![data.clone()], checkpoint: Some(checkpoints), ..options(&plan) };
    let kept =
        evaluate(&kept).unwrap_or_else(|e| panic!("{e}")).expect("rank 0").loss.expect("a loss");
    assert_eq!(kept.to_bits(), trained.to_bits(), "the checkpoint holds what was saved");
    // The exported model, compiled again, is the same model.
    let parameters = Trained::of_plan(&plan.path(), &weights).unwrap_or_else(|e| panic!("{e}"));
    let exported = dir.path().join("trained.onnx");
    frit::export::onnx(&parameters, &Default::default(), &exported)
        .unwrap_or_else(|e| panic!("{e}"));
    let again =
        crate::support::plan_at(&exported, 8, &["precision.compute=fp32", "loss.kind=none"]);
    let outputs = |plan: &Planned, weights: Option<PathBuf>| {
        let path = dir.path().join("outputs.safetensors");
        let (data, dump_outputs) = (vec![data.clone()], Some(path.clone()));
        let options =
            Options { data, weights: weights.into_iter().collect(), dump_outputs, ..options(plan) };
        let report = evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
        (report.loss, floats(&path, "logits"))
    };
    let (loss, (shape, found)) = outputs(&again, None);
    let (_, (_, expected)) = outputs(&plan, Some(weights));
    // All examples, in batches of one rank and of two.
    assert_eq!((loss, shape), (None, vec![320, 10]));
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn dropout_is_off_and_seeds_do_not_matter() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = file("tests/models/dropout/data.safetensors");
    let dump = |seed: &str| {
        let settings = ["precision.compute=fp32", seed];
        let plan = plan_to_evaluate(&model("dropout"), 4, &settings);
        let path = dir.path().join("outputs.safetensors");
        let options = Options {
            data: vec![data.clone()],
            dump_outputs: Some(path.clone()),
            ..options(&plan)
        };
        evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
        std::fs::read(path).expect("outputs")
    };
    assert_eq!(dump("run.seed=1"), dump("run.seed=2"));
}

#[test]
fn inputs_are_taken_exactly_as_declared() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = crate::support::plan_at(
        &file(&model("mlp")),
        3,
        &["precision.compute=fp32", "loss.kind=none"],
    );
    assert_eq!(plan.compiled.plan.phases[PhaseId(0)].name, PhaseName::Eval);
    let outputs = dir.path().join("outputs.safetensors");
    let given = |n: usize| Options {
        inputs: Some(first("mlp", n, dir.path())),
        dump_outputs: Some(outputs.clone()),
        ..options(&plan)
    };
    let report = evaluate(&given(3)).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
    assert_eq!((report.loss, report.examples), (None, 3));
    assert_eq!(floats(&outputs, "logits").0, [3, 10]);
    let error = evaluate(&given(4)).expect_err("another shape").to_string();
    assert!(error.contains("`x`") && error.contains("[4, 784]"), "{error}");
    assert!(floats(&outputs, "logits").0 == [3, 10], "nothing was written");
}

#[test]
fn what_cannot_be_evaluated_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = file("tests/models/mlp/data.safetensors");
    let training = crate::support::plan_at(&file(&model("mlp")), 4, &[]);
    let refused = |options: Options| evaluate(&options).expect_err("refused").to_string();
    let error = refused(Options { data: vec![data.clone()], ..options(&training) });
    assert!(error.contains("no evaluation"), "{error}");
    let plan = plan_to_evaluate(&model("mlp"), 4, &[]);
    let foreign = file("tests/models/gpt2/data.safetensors");
    let error = refused(Options { data: vec![foreign.clone()], ..options(&plan) });
    assert!(error.contains("no tensor `x`"), "{error}");
    let weights = Options { data: vec![data.clone()], weights: vec![foreign], ..options(&plan) };
    assert!(refused(weights).contains("6 missing: `fc1."));
    let empty = first("mlp", 0, dir.path());
    assert!(refused(Options { data: vec![empty], ..options(&plan) }).contains("no examples"));
}

#[test]
fn broken_evaluations_are_found() {
    let plan = plan_to_evaluate(&model("mlp"), 4, &["sharding.ranks=2"]);
    let sound = plan.compiled.evaluation.expect("an evaluation").plan;
    let codes = |change: &dyn Fn(&mut frit_ir::plan::Plan)| -> Vec<String> {
        let mut plan = sound.clone();
        change(&mut plan);
        let found = verify_plan(&plan).expect_err("it is broken");
        found.into_iter().map(|d| d.code).collect()
    };
    let writes_a_weight = codes(&|plan| {
        let master = plan.groups[GroupId(0)].master;
        let task = plan.tasks.last_mut().expect("tasks");
        let (buffer, ty) = (master, frit_ir::TensorType::new(frit_ir::DType::F32, [1]));
        let place = frit_ir::plan::Place { buffer, offset: 0, ty };
        task.action = Action::Zero { places: vec![place] };
    });
    assert!(writes_a_weight.iter().any(|c| c == "P401"), "{writes_a_weight:?}");
    let drops_an_output = codes(&|plan| {
        let output = plan.eval.as_ref().expect("results").outputs[0].place.buffer;
        for task in &mut plan.tasks {
            if task.action.writes().iter().any(|p| p.buffer == output) {
                task.action = Action::Zero { places: vec![] };
            }
        }
    });
    assert!(drops_an_output.iter().any(|c| c == "P402"), "{drops_an_output:?}");
    let sums_nothing = codes(&|plan| {
        for task in &mut plan.tasks {
            if let Action::AllReduce { send, recv, .. } = &task.action {
                task.action = Action::Copy { from: send.clone(), to: recv.clone() };
            }
        }
    });
    assert!(sums_nothing.iter().any(|c| c == "P403"), "{sums_nothing:?}");
    let draws = codes(&|plan| {
        let kernel = plan.kernels.first_mut().expect("kernels");
        let seed = frit_ir::Tensor::ints(frit_ir::DType::I64, [5], vec![0; 5]);
        let mut add = |op, inputs: &[frit_ir::ValueId]| {
            let (origin, region) = (frit_ir::Origin::none(), frit_ir::Region::Forward);
            kernel.body.add1(op, inputs, origin, region).expect("it fits")
        };
        let seed = add(Op::Constant(Constant { value: seed }), &[]);
        let shape = frit_ir::Shape::from([2]);
        add(Op::RandomMask(RandomMask { shape, keep: 0.5, id: 0 }), &[seed]);
        kernel.bind();
    });
    assert!(draws.iter().any(|c| c == "P404"), "{draws:?}");
    let inputs = sound.inputs.iter().map(|i| i.buffer);
    assert!(inputs.into_iter().all(|b| sound.buffers[b].arena == Arena::Persistent));
}
