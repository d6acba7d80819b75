//! Models whose inputs have different first axes, such as the nodes and edges of a graph: an example is all of each input.

use crate::parity;
use crate::support::{Planned, file, plan_to_evaluate};
use frit_runtime::data::{Batch, Element};
use frit_runtime::eval::{self, evaluate};
use frit_runtime::run::{RunOptions, run};
use frit_runtime::trainer::{Trainer, TrainerOptions};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const GRAPHS: usize = 24;
const DATA: &str = "tests/models/graph/data.safetensors";
/// Of the tensors by name: edges, labels, x.
const EDGES: usize = 0;

fn planned(settings: &[&str]) -> Planned {
    let settings = [&["precision.compute=fp32"], settings].concat();
    plan_to_evaluate("tests/models/graph/model.onnx", 0, &settings)
}

/// Name, type, shape and elements.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// Consecutive graphs, behind an axis of graphs; by name.
fn graphs(first: usize, n: usize) -> Vec<Tensor> {
    let bytes = std::fs::read(file(DATA)).expect("data");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let cut = |(name, view): (&str, TensorView<'_>)| {
        let size = view.data().len() / GRAPHS;
        let shape = [&[n], &view.shape()[1..]].concat();
        let bytes = view.data()[first * size..(first + n) * size].to_vec();
        (name.to_string(), view.dtype(), shape, bytes)
    };
    let mut tensors: Vec<Tensor> = all.iter().map(cut).collect();
    tensors.sort();
    tensors
}

/// One graph, as the model declares its inputs.
fn graph(number: usize) -> Vec<Tensor> {
    let mut tensors = graphs(number, 1);
    tensors.iter_mut().for_each(|(_, _, shape, _)| *shape = shape[1..].to_vec());
    tensors
}

fn save(tensors: &[Tensor], path: &Path) -> PathBuf {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("its bytes"))
    });
    safetensors::serialize_to_file(views, None, path).expect("written");
    path.into()
}

fn batch(tensors: Vec<Tensor>) -> Batch {
    let mut batch = Batch::default();
    for (name, dtype, shape, bytes) in tensors {
        let element = if dtype == Dtype::I64 { Element::I64 } else { Element::F32 };
        batch.add(&name, element, shape, bytes).expect("contiguous");
    }
    batch
}

fn losses(planned: &Planned, data: &[PathBuf], steps: usize) -> Result<Vec<f64>, String> {
    let data = frit_runtime::data::Source::new(data.to_vec(), None);
    let options = RunOptions { steps, data, threads: Some(1), ..RunOptions::default() };
    run(&planned.path(), &options).map(|report| report.losses).map_err(|e| e.to_string())
}

#[test]
fn graphs_train_as_in_pytorch() {
    let expected = parity::reference("graph", "fp64");
    for settings in [
        &["run.accumulation=2"][..],
        &["sharding.ranks=2"],
        &["sharding.ranks=2", "sharding.strategy=no_shard"],
    ] {
        let planned = planned(settings);
        let losses = losses(&planned, &[file(DATA)], expected.len()).expect("it trains");
        let deviation = parity::largest(&losses, &expected);
        assert!(deviation < 1e-5, "{settings:?}: losses deviate by {deviation}");
    }
}

#[test]
fn one_graph_is_one_example_in_files_and_batches() {
    let dir = tempfile::tempdir().expect("a directory");
    let planned = planned(&[]);
    let each: Vec<PathBuf> =
        (0..3).map(|i| save(&graph(i), &dir.path().join(format!("{i}.safetensors")))).collect();
    let together = save(&graphs(0, 3), &dir.path().join("all.safetensors"));
    let expected = losses(&planned, &[together], 4).expect("it trains");
    assert_eq!(losses(&planned, &each, 4).expect("it trains"), expected);
    let options = TrainerOptions { threads: Some(1), ..TrainerOptions::default() };
    let mut trainer = Trainer::open(&planned.path(), options, &mut || ()).expect("a trainer");
    for (step, loss) in expected.iter().enumerate() {
        let metrics = trainer.step(&batch(graph(step % 3)), &mut || ()).expect("a step");
        assert_eq!(metrics.loss, *loss);
    }
    // What is the same for all graphs is given once.
    let mut shared = graphs(0, 3);
    let apart: Vec<PathBuf> = (0..3)
        .map(|i| {
            let mut tensors = graph(i);
            tensors[EDGES] = graph(0).swap_remove(EDGES);
            save(&tensors, &dir.path().join(format!("same-{i}.safetensors")))
        })
        .collect();
    shared[EDGES] = graph(0).swap_remove(EDGES);
    let shared = save(&shared, &dir.path().join("shared.safetensors"));
    assert_eq!(losses(&planned, &[shared], 4), losses(&planned, &apart, 4));
}

#[test]
fn what_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let two = planned(&["sharding.ranks=2"]);
    let one = save(&graph(0), &dir.path().join("one.safetensors"));
    let error = losses(&two, &[one], 1).expect_err("one graph for two ranks");
    assert!(error.contains("1 example is fewer than one global batch of 2"), "{error}");
    let mut ragged = graphs(0, 4);
    ragged[EDGES] = graphs(0, 3).swap_remove(EDGES);
    let ragged = save(&ragged, &dir.path().join("ragged.safetensors"));
    let error = losses(&two, &[ragged], 1).expect_err("fewer edges than nodes");
    assert!(error.contains("has 3 examples") && error.contains("has 4"), "{error}");
    let mut flat = graphs(0, 4);
    flat[EDGES].2 = vec![4 * 2 * 14];
    let flat = save(&flat, &dir.path().join("flat.safetensors"));
    let error = losses(&two, &[flat], 1).expect_err("no axes");
    assert!(error.contains("the plan expects i64[examples, 2, 14]"), "{error}");
    let mut outside = graphs(0, 4);
    let last = outside[EDGES].3.len() - 8;
    outside[EDGES].3[last..].copy_from_slice(&9_i64.to_le_bytes());
    let outside = save(&outside, &dir.path().join("outside.safetensors"));
    let error = losses(&two, &[outside], 1).expect_err("no such node");
    assert!(error.contains("example 3 at [1, 13]: 9 is outside of -9..=8"), "{error}");
}

#[test]
fn an_evaluation_writes_the_outputs_of_every_graph() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut found = Vec::new();
    for ranks in ["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"] {
        let planned = planned(&[ranks]);
        let dumped = dir.path().join("outputs.safetensors");
        let options = eval::Options {
            plan: planned.path(),
            data: vec![file(DATA)],
            dump_outputs: Some(dumped.clone()),
            threads: Some(1),
            ..eval::Options::default()
        };
        let report = evaluate(&options).unwrap_or_else(|e| panic!("{e}")).expect("rank 0");
        assert_eq!((report.examples, report.losses[0].count), (GRAPHS, (GRAPHS * 9) as f64));
        let bytes = std::fs::read(dumped).expect("outputs");
        let outputs = SafeTensors::deserialize(&bytes).expect("safetensors");
        let logits = outputs.tensor("logits").expect("logits");
        assert_eq!(logits.shape(), [GRAPHS, 9, 3]);
        found.push((report.loss, logits.data().to_vec()));
    }
    assert!(found.iter().all(|f| f.1 == found[0].1), "outputs depend on the number of ranks");
    // A graph alone has the outputs that it has among others.
    let planned = planned(&[]);
    let dumped = dir.path().join("one.safetensors");
    let options = eval::Options {
        plan: planned.path(),
        inputs: Some(save(&graph(5), &dir.path().join("graph.safetensors"))),
        dump_outputs: Some(dumped.clone()),
        threads: Some(1),
        ..eval::Options::default()
    };
    evaluate(&options).unwrap_or_else(|e| panic!("{e}"));
    let bytes = std::fs::read(dumped).expect("outputs");
    let outputs = SafeTensors::deserialize(&bytes).expect("safetensors");
    let logits = outputs.tensor("logits").expect("logits");
    assert_eq!(logits.shape(), [9, 3]);
    let size = logits.data().len();
    assert_eq!(logits.data(), &found[0].1[5 * size..6 * size]);
}
