//! The imported graph, run in the interpreter, against the compiled plan.

use crate::support::{file, plan, train};
use frit::compilation::{Compiled, Observer, Request, compile};
use frit::config::Config;
use frit_ir::interpret::{Options, leaf_key, run};
use frit_ir::{Graph, Op, OutputKind, Tensor, TensorType};
use std::collections::HashMap;

/// Keeps the graph after one pass.
struct After<'a> {
    pass: &'a str,
    graph: Option<Graph>,
}

impl Observer for After<'_> {
    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        if name == self.pass && self.graph.is_none() {
            self.graph = Some(graph.clone());
        }
    }
}

fn compiled(model: &str, batch: usize, settings: &[&str], pass: &str) -> (Graph, Compiled) {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
    let request = Request {
        model: file(&format!("tests/models/{model}/model.onnx")),
        binds: [("batch".to_string(), batch)].into(),
        ..Request::default()
    };
    let mut after = After { pass, graph: None };
    let compiled = compile(&request, &config, &mut after).unwrap_or_else(|e| panic!("{e}"));
    (after.graph.expect("the pass ran"), compiled.expect("a plan"))
}

/// The first batch of the data, and the stored weights, by the interpreter's keys.
fn feeds(model: &str, graph: &Graph, compiled: &Compiled) -> HashMap<String, Tensor> {
    let bytes = std::fs::read(file(&format!("tests/models/{model}/data.safetensors")));
    let bytes = bytes.expect("the data");
    let data = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut feeds = HashMap::new();
    for (_, node) in graph.nodes() {
        let (ty, bytes): (&TensorType, &[u8]) = match &node.op {
            Op::Input(input) => (&input.ty, data.tensor(&input.name).expect("a tensor").data()),
            Op::Param(param) => {
                (&param.ty, compiled.weights.get(&param.name).expect("a weight").bytes())
            }
            _ => continue,
        };
        let tensor = Tensor::from_bytes(ty.clone(), &bytes[..ty.bytes()]).expect("its bytes");
        feeds.insert(leaf_key(&node.op).expect("a leaf"), tensor);
    }
    feeds
}

#[test]
fn the_interpreted_graph_has_the_loss_of_the_compiled_plan() {
    for (model, batch, more) in [
        ("mlp", 16, "loss.kind=cross_entropy"),
        ("gpt2", 8, "loss.kind=cross_entropy"),
        ("llama", 8, "loss.kind=cross_entropy"),
        ("bert", 8, "loss.kind=cross_entropy"),
        ("t5", 8, "loss.kind=cross_entropy"),
        ("vit", 8, "loss.kind=cross_entropy"),
        ("resnet", 8, "loss.kind=cross_entropy"),
        ("unet", 4, "loss.kind=mse"),
    ] {
        let settings = ["precision.compute=fp32", more];
        let (graph, all) = compiled(model, batch, &settings, "loss");
        let results = run(&graph, &feeds(model, &graph, &all), Options::EXACT);
        let results = results.unwrap_or_else(|e| panic!("{model}: {e}"));
        let of = |kind: OutputKind| {
            let i = graph.outputs.iter().position(|o| o.kind == kind).expect("an output");
            results[i].1.to_f64s()[0]
        };
        let expected = of(OutputKind::LossSum) / of(OutputKind::LossCount);
        let planned = plan(&format!("tests/models/{model}/model.onnx"), batch, &settings);
        let data = format!("tests/models/{model}/data.safetensors");
        let found = train(&planned, &data, 1, false).losses[0];
        let deviation = (found - expected).abs() / expected.abs().max(1.0);
        assert!(deviation < 1e-6, "{model}: {found} for {expected}");
    }
}

#[test]
fn simplify_changes_no_bytes_where_there_are_no_casts() {
    for ranks in ["sharding.ranks=1", "sharding.ranks=2"] {
        let bytes = |disabled: &[&str]| {
            let settings = ["precision.compute=fp32".to_string(), ranks.to_string()];
            let config = Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
            let request = Request {
                model: file("tests/models/gpt2/model.onnx"),
                binds: [("batch".to_string(), 4)].into(),
                disabled: disabled.iter().map(|d| d.to_string()).collect(),
                ..Request::default()
            };
            let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{e}"));
            let summary = compiled.expect("a plan").plan.summary();
            (summary.bytes_communicated_per_step, summary.peak_bytes)
        };
        let (with, without) = (bytes(&[]), bytes(&["simplify"]));
        assert_eq!(with.0, without.0, "{ranks}: communicated");
        assert!(with.1 <= without.1, "{ranks}: peak of {} for {}", with.1, without.1);
    }
}
