//! The certificate: models are certified under every pair of settings, changed graphs are not, and neither are edited plans.

use crate::pairs::rows;
use crate::simulate::frit;
use crate::support::{file, plan};
use frit::certificate::{Certificate, Checked, Checker, Plans, Verdict, certify, edited};
use frit::compilation::{Compiled, Observer, Request, compile, imported};
use frit::config::Config;
use frit::plan_dir;
use frit::source::Source;
use frit_ir::interpret::{Options, leaf_key, run_ranks};
use frit_ir::ops::Cast;
use frit_ir::plan::{Plan, layout, seal};
use frit_ir::{DType, Graph, NodeId, Op, Origin, Tensor, ValueId};
use frit_passes::verify_plan::verify_plan;
use serde_json::Value;
use std::collections::HashMap;

pub(crate) fn configured(model: &str, batch: usize, settings: &[&str]) -> (Request, Config) {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::parse("", "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let binds = [("batch".to_string(), batch)].into();
    (Request { model: file(model), binds, ..Request::default() }, config)
}

/// A compilation with its evaluation and without machine code.
pub(crate) fn compiled(request: &Request, config: &Config) -> Compiled {
    let request = Request { without_code: true, evaluation: true, ..request.clone() };
    let compiled = compile(&request, config, &mut ());
    compiled.unwrap_or_else(|e| panic!("{}: {e}", request.model.display())).expect("a plan")
}

/// The plans of a compilation.
pub(crate) fn plans(compiled: &Compiled) -> Plans<'_> {
    Plans {
        plan: &compiled.plan,
        evaluation: compiled.evaluation.as_ref().map(|e| &e.plan),
        source: Some(&compiled.source),
    }
}

/// The certificate of a compilation.
fn certified(request: &Request, config: &Config) -> Certificate {
    let compiled = compiled(request, config);
    let found = certify(request, config, &compiled.pass_trace, plans(&compiled));
    let found = found.unwrap_or_else(|e| panic!("{}: {e}", request.model.display()));
    assert_eq!(found.edited, Vec::<String>::new(), "{}", request.model.display());
    found
}

/// The passes of which nothing is known, with what is not known; `lower` if tasks are not shown to compute the last graph.
fn open(model: &str, batch: usize, settings: &[&str]) -> Vec<String> {
    let (request, config) = configured(model, batch, settings);
    let found = certified(&request, &config);
    assert!(found.passes.iter().any(|p| p.verdict == Verdict::AsStated), "{model}");
    assert!(!found.evaluation.is_empty(), "{model}");
    let rows = found.passes.iter().chain(&found.evaluation);
    assert_eq!(rows.clone().filter(|p| p.pass == "lower").count(), 2, "{model}");
    let is_open = |p: &&Checked| {
        p.verdict == Verdict::NotShown || p.pass == "lower" && p.verdict == Verdict::Assumed
    };
    let open = rows.filter(is_open);
    open.map(|p| format!("{}: {}", p.pass, p.differences.join("; "))).collect()
}

/// Model, batch of a rank, loss.
const MODELS: [(&str, usize, &str); 15] = [
    ("mlp/model.onnx", 4, "loss.kind=cross_entropy"),
    ("gpt2/model.onnx", 2, "loss.kind=cross_entropy"),
    ("gpt2/model_opset21.onnx", 2, "loss.kind=cross_entropy"),
    ("gpt2/model_sdpa.onnx", 2, "loss.kind=cross_entropy"),
    ("llama/model.onnx", 2, "loss.kind=cross_entropy"),
    ("bert/model.onnx", 2, "loss.kind=cross_entropy"),
    ("t5/model.onnx", 2, "loss.kind=cross_entropy"),
    ("vit/model.onnx", 2, "loss.kind=cross_entropy"),
    ("resnet/model.onnx", 2, "loss.kind=cross_entropy"),
    ("unet/model.onnx", 2, "loss.kind=mse"),
    ("opt/model.onnx", 2, "loss.kind=cross_entropy"),
    ("bloom/model.onnx", 2, "loss.kind=cross_entropy"),
    ("gru/model.onnx", 2, "loss.kind=cross_entropy"),
    ("moe_dispatch/model.onnx", 2, "loss.kind=cross_entropy"),
    ("moe_einsum/model.onnx", 2, "loss.kind=cross_entropy"),
];

#[test]
fn models_are_certified() {
    for (model, batch, loss) in MODELS {
        let model = format!("tests/models/{model}");
        for more in [
            &["precision.compute=fp32"][..],
            &["sharding.ranks=4", "precision.compute=bf16", "run.accumulation=2"],
        ] {
            let settings = [&[loss], more].concat();
            assert_eq!(open(&model, batch, &settings), Vec::<String>::new(), "{model} {more:?}");
        }
    }
}

/// Functions with gradients of their own do not decide which matrices are hidden.
#[test]
fn muon_is_certified_beside_custom_gradients() {
    for model in ["model.onnx", "model.json"] {
        let model = format!("tests/models/custom_gradients/{model}");
        for precision in ["precision.compute=fp32", "precision.compute=bf16"] {
            let settings = ["optimizer.kind=muon", precision];
            assert_eq!(open(&model, 2, &settings), Vec::<String>::new(), "{model} {precision}");
        }
    }
}

#[test]
fn every_pair_of_settings_is_certified() {
    let factors: [&[&str]; 10] = [
        &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=4"],
        &[
            "sharding.strategy=\"full_shard\"",
            "sharding.strategy=\"no_shard\"",
            "sharding.strategy=\"shard_optimizer\"",
            "sharding.strategy=\"shard_grad_op\"",
        ],
        &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
        &["run.accumulation=1", "run.accumulation=2"],
        &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
        &["memory.offload=none", "memory.offload=optimizer"],
        &["padding.tensor_cores=always", "padding.tensor_cores=never"],
        &["optimizer.kind=adamw", "optimizer.kind=sgd", "optimizer.kind=lion"],
        &["optimizer.ema=0", "optimizer.ema=0.9"],
        &["memory.loss_chunks=1", "memory.loss_chunks=2", "memory.loss_chunks=4"],
    ];
    for row in rows(&factors, |_| true) {
        let settings: Vec<&str> = row.iter().zip(&factors).map(|(level, f)| f[*level]).collect();
        let found = open("tests/museum/models/lm.json", 2, &settings);
        assert_eq!(found, Vec::<String>::new(), "{settings:?}");
    }
}

/// The gradient of a weight that is read in parts is a concatenation, of which several tasks write the parts.
#[test]
fn tasks_that_write_parts_of_a_gradient_are_certified() {
    for more in [
        &["precision.compute=fp32"][..],
        &["precision.compute=bf16"],
        &["sharding.ranks=2", "precision.compute=fp32"],
        &["sharding.ranks=2", "precision.compute=fp32", "run.accumulation=2"],
        &["sharding.ranks=4", "precision.compute=fp16", "run.accumulation=2"],
        &["sharding.ranks=2", "sharding.strategy=no_shard", "memory.offload=optimizer"],
        &["run.accumulation=2", "precision.compute=fp32"],
        &["run.reproducible=2", "precision.compute=fp32"],
    ] {
        let settings = [&["loss.kind=cross_entropy"], more].concat();
        let found = open("tests/museum/models/packed.json", 2, &settings);
        assert_eq!(found, Vec::<String>::new(), "{more:?}");
    }
}

/// Of steps that compute the same bits on any number of ranks, too; resnet has buffers that differ between ranks.
#[test]
fn reproducible_steps_are_certified() {
    for model in ["tests/museum/models/lm.json", "tests/models/resnet/model.onnx"] {
        for more in [
            &["sharding.ranks=1", "precision.compute=fp32"][..],
            &["sharding.ranks=2", "precision.compute=bf16"],
            &["sharding.ranks=2", "sharding.strategy=no_shard", "precision.compute=fp16"],
            &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
            &["sharding.ranks=8", "optimizer.clip_grad_norm=0.1"],
        ] {
            let fixed = ["loss.kind=cross_entropy", "memory.loss_chunks=1", "run.reproducible=8"];
            let settings = [&fixed, more].concat();
            assert_eq!(open(model, 2, &settings), Vec::<String>::new(), "{model} {more:?}");
        }
    }
}

/// The graphs of a compilation, after each pass.
#[derive(Default)]
pub(crate) struct Trace(pub(crate) Vec<(String, Graph)>);

impl Observer for Trace {
    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        self.0.push((name.into(), graph.clone()));
    }
}

/// Values for all leaves of a graph on a rank: integers that index everything, and positive floats, as states have roots taken.
pub(crate) fn feeds(graph: &Graph, rank: usize) -> HashMap<String, Tensor> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut feeds = HashMap::new();
    for (_, node) in graph.nodes() {
        let Some(key) = leaf_key(&node.op) else { continue };
        // A parameter is given as the model has it, whatever it is held in.
        let ty = match &node.op {
            Op::Param(param) => param.ty.clone(),
            _ => graph.ty(node.outputs[0]).clone(),
        };
        let own = matches!(node.op, Op::Input(_));
        // By the name, so that a leaf has its value in every graph.
        let seed = key
            .bytes()
            .fold(rank as u64 * u64::from(own), |h, b| h.wrapping_mul(31) + u64::from(b));
        random.seed(seed);
        let n = ty.shape.numel();
        let tensor = match &node.op {
            Op::Input(_) | Op::Param(_) | Op::State(_) if ty.dtype.is_float() => {
                let low = if matches!(node.op, Op::State(_)) { 0.1 } else { -0.5 };
                let values = (0..n).map(|_| low + random.f64()).collect();
                Tensor::floats(ty.dtype, ty.shape, values)
            }
            Op::Input(_) if ty.dtype == DType::I64 => {
                Tensor::ints(ty.dtype, ty.shape, (0..n).map(|_| random.i64(0..7)).collect())
            }
            _ => continue,
        };
        feeds.insert(key, tensor);
    }
    feeds
}

/// The outputs of a graph on three ranks, as numbers.
pub(crate) fn numbers(graph: &Graph, options: Options) -> Option<Vec<Vec<f64>>> {
    let ranks: Vec<_> = (0..3).map(|rank| feeds(graph, rank)).collect();
    let found = run_ranks(graph, &ranks, options).ok()?;
    let outputs = found.into_iter().flatten().map(|(_, tensor)| tensor.to_f64s());
    Some(outputs.collect())
}

/// A change of a graph at random: an operand exchanged or taken from elsewhere, an attribute or a constant changed, or a node left out.
pub(crate) fn changed(graph: &Graph, random: &mut fastrand::Rng) -> Option<Graph> {
    let mut graph = graph.clone();
    let ids: Vec<NodeId> = graph.order().to_vec();
    let id = ids[random.usize(0..ids.len())];
    let node = graph.node(id).clone();
    match random.u8(0..5) {
        0 => {
            let n = node.inputs.len();
            let (a, b) = (random.usize(0..n.max(1)), random.usize(0..n.max(1)));
            let mut inputs = node.inputs.clone();
            if n < 2 || inputs[a] == inputs[b] {
                return None;
            }
            inputs.swap(a, b);
            graph.set_inputs(id, inputs).ok()?;
        }
        1 => {
            let k = random.usize(0..node.inputs.len().max(1));
            let ty = graph.ty(*node.inputs.get(k)?).clone();
            let position = ids.iter().position(|i| *i == id)?;
            let others: Vec<ValueId> = ids[..position]
                .iter()
                .flat_map(|i| graph.node(*i).outputs.clone())
                .filter(|v| *graph.ty(*v) == ty && *v != node.inputs[k])
                .collect();
            let mut inputs = node.inputs.clone();
            inputs[k] = *others.get(random.usize(0..others.len().max(1)))?;
            graph.set_inputs(id, inputs).ok()?;
        }
        2 | 3 => {
            let (name, mut attributes) = node.op.to_parts();
            let keys: Vec<String> = attributes.keys().cloned().collect();
            let key = keys.get(random.usize(0..keys.len().max(1)))?;
            let value = &attributes[key];
            let other = match value {
                serde_json::Value::Bool(b) => serde_json::json!(!b),
                serde_json::Value::Number(x) if x.is_f64() => {
                    serde_json::json!(x.as_f64()? * 1.5 + 0.01)
                }
                serde_json::Value::Number(x) => serde_json::json!(x.as_u64()? + 1),
                serde_json::Value::Array(list) => {
                    let mut list = list.clone();
                    let (a, b) =
                        (random.usize(0..list.len().max(1)), random.usize(0..list.len().max(1)));
                    if list.get(a)? == list.get(b)? {
                        return None;
                    }
                    list.swap(a, b);
                    serde_json::json!(list)
                }
                _ => return None,
            };
            if node.op.is_leaf() && !matches!(node.op, Op::Constant(_) | Op::Hyper(_)) {
                return None;
            }
            attributes.insert(key.clone(), other);
            let op = Op::from_parts(name, attributes).ok()?;
            let types: Vec<_> = node.outputs.iter().map(|v| graph.ty(*v).clone()).collect();
            let inputs: Vec<_> = node.inputs.iter().map(|v| graph.ty(*v)).collect();
            if op.infer(&inputs).ok()? != types {
                return None;
            }
            graph.node_mut(id).op = op;
        }
        _ => {
            let (output, input) = (*node.outputs.first()?, *node.inputs.first()?);
            if graph.ty(output) != graph.ty(input) {
                return None;
            }
            graph.replace_uses(output, input);
        }
    }
    graph.remove_dead();
    frit_ir::verify::verify(&graph).ok()?;
    Some(graph)
}

#[test]
fn changed_graphs_are_not_certified() {
    let settings: [&[&str]; 4] = [
        &["sharding.ranks=3", "run.accumulation=2", "optimizer.clip_grad_norm=1.0"],
        &["sharding.ranks=3", "sharding.strategy=\"no_shard\"", "precision.compute=fp16"],
        &["sharding.ranks=3", "optimizer.kind=sgd", "memory.recompute=unit"],
        &["sharding.ranks=3", "precision.compute=bf16", "optimizer.ema=0.5"],
    ];
    let mut random = fastrand::Rng::with_seed(1);
    let (mut tried, mut different, mut missed) = (0, 0, Vec::new());
    for settings in settings {
        let model = "tests/museum/models/lm.json";
        let settings = [&["memory.loss_chunks=1"], settings].concat();
        let (request, config) = configured(model, 2, &settings);
        let mut trace = Trace::default();
        let request = Request { without_code: true, ..request };
        compile(&request, &config, &mut trace).unwrap_or_else(|e| panic!("{model}: {e}"));
        let first = imported(&request, &config).unwrap_or_else(|e| panic!("{model}: {e}")).graph;
        let mut checker = Checker::new(first.into(), &config).of_training();
        for (pass, graph) in &trace.0 {
            let expected = numbers(graph, Options::EXACT);
            for _ in 0..150 {
                let Some(mutant) = changed(graph, &mut random) else { continue };
                tried += 1;
                let found = numbers(&mutant, Options::EXACT);
                let same = match (&expected, &found) {
                    (Some(a), Some(b)) => {
                        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(a, b))
                    }
                    _ => continue,
                };
                if same || *pass == "loss_scale" {
                    continue;
                }
                different += 1;
                let verdict = checker.clone().check(pass, &mutant).verdict;
                if verdict != Verdict::NotShown {
                    missed.push(format!("{model}, {pass}, {verdict:?}:\n{}", edit(graph, &mutant)));
                }
            }
            let verdict = checker.check(pass, graph);
            assert_ne!(verdict.verdict, Verdict::NotShown, "{model}: {verdict:?}");
        }
    }
    assert!(missed.is_empty(), "{} are certified:\n{}", missed.len(), missed.join("\n"));
    assert!(
        tried >= 2000 && different >= 1000,
        "{tried} changed graphs, {different} of them different"
    );
}

/// The graph with an operand of a node rounded to bf16 once more.
pub(crate) fn rounded(graph: &Graph, random: &mut fastrand::Rng) -> Option<Graph> {
    let mut graph = graph.clone();
    let id = graph.order()[random.usize(0..graph.order().len())];
    let node = graph.node(id).clone();
    let k = random.usize(0..node.inputs.len().max(1));
    let operand = *node.inputs.get(k)?;
    if graph.ty(operand).dtype != DType::F32 {
        return None;
    }
    let mut value = operand;
    for to in [DType::BF16, DType::F32] {
        value = graph.add1(Op::Cast(Cast { to }), &[value], Origin::none(), node.region).ok()?;
    }
    let mut inputs = node.inputs;
    inputs[k] = value;
    graph.set_inputs(id, inputs).ok()?;
    graph.sort().ok()?;
    Some(graph)
}

/// An additional cast is not equal; of what a pass states, roundings are only listed.
#[test]
fn additional_roundings_are_seen() {
    let mut random = fastrand::Rng::with_seed(2);
    let mut different = 0;
    for precision in ["precision.compute=fp32", "precision.compute=bf16"] {
        let settings = ["memory.loss_chunks=1", "sharding.ranks=3", precision];
        let (request, config) = configured("tests/museum/models/lm.json", 2, &settings);
        let request = Request { without_code: true, ..request };
        let mut trace = Trace::default();
        compile(&request, &config, &mut trace).unwrap_or_else(|e| panic!("{e}"));
        let first = imported(&request, &config).unwrap_or_else(|e| panic!("{e}")).graph;
        let mut checker = Checker::new(first.into(), &config).of_training();
        for (pass, graph) in &trace.0 {
            let before = checker.clone();
            let verdict = checker.check(pass, graph).verdict;
            if precision.ends_with("fp32") {
                assert_ne!(verdict, Verdict::Rounded, "{pass}");
            }
            let stated = ["loss", "differentiate", "loss_scale", "update", "shard"];
            let equal = verdict <= Verdict::Equal;
            if !equal || stated.contains(&pass.as_str()) {
                continue;
            }
            let expected = numbers(graph, Options::default());
            for _ in 0..20 {
                let Some(mutant) = rounded(graph, &mut random) else { continue };
                let found = numbers(&mutant, Options::default());
                if expected.is_none() || found.is_none() || found == expected {
                    continue;
                }
                different += 1;
                let verdict = before.clone().check(pass, &mutant).verdict;
                let seen = [Verdict::Rounded, Verdict::NotShown].contains(&verdict);
                assert!(seen, "{precision}, {pass}, {verdict:?}:\n{}", edit(graph, &mutant));
            }
        }
    }
    assert!(different >= 50, "{different} graphs are rounded otherwise");
}

#[test]
fn outputs_say_where_they_are_rounded() {
    let of = |precision| {
        let (request, config) = configured("tests/museum/models/lm.json", 2, &[precision]);
        let found = certified(&request, &config);
        let loss = found.outputs.into_iter().find(|o| o.output == "metric loss");
        loss.expect("the loss").operations
    };
    assert!(of("precision.compute=fp32").is_empty());
    let low = of("precision.compute=bf16");
    assert!(low.contains("matmul to bf16"), "{low:?}");
}

/// The first line in which two graphs differ.
pub(crate) fn edit(graph: &Graph, mutant: &Graph) -> String {
    let (a, b) = (graph.to_string(), mutant.to_string());
    let different = a.lines().zip(b.lines()).find(|(a, b)| a != b);
    different.map_or_else(String::new, |(a, b)| format!("{a}\n{b}"))
}

pub(crate) fn near(a: &[f64], b: &[f64]) -> bool {
    let size = a.iter().map(|x| x.abs()).fold(0.0, f64::max);
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4 * size || (a.is_nan() && b.is_nan()))
}

#[test]
fn an_edited_plan_is_not_what_its_model_compiles_to() {
    let (request, config) = configured("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let compiled = compiled(&request, &config);
    let edited = |plans: Plans| {
        let found = certify(&request, &config, &compiled.pass_trace, plans);
        found.unwrap_or_else(|e| panic!("{e}")).edited
    };
    let all = plans(&compiled);
    assert_eq!(edited(all), Vec::<String>::new());
    assert_eq!(edited(Plans { evaluation: None, ..all }), Vec::<String>::new());
    let mut other = all.evaluation.expect("an evaluation").clone();
    other.tasks.reverse();
    assert_eq!(edited(Plans { evaluation: Some(&other), ..all }), ["eval/tasks"]);

    let mut plan = compiled.plan.clone();
    plan.loss_capacity += 1;
    assert_eq!(edited(Plans { plan: &plan, ..all }), ["loss_capacity"]);
    plan = compiled.plan.clone();
    plan.tasks.reverse();
    assert_eq!(edited(Plans { plan: &plan, ..all }), ["tasks"]);

    let Source { file, mut model, origin } = compiled.source.clone();
    let moved = origin.replace("/model.onnx", "/moved.onnx");
    assert_ne!(moved, origin);
    let moved = Source { file, model: model.clone(), origin: moved };
    assert_eq!(edited(Plans { source: Some(&moved), ..all }), Vec::<String>::new());
    model.pop();
    let other = Source { model, ..moved.clone() };
    assert_eq!(edited(Plans { source: Some(&other), ..all }), ["source/model.onnx"]);
    let other = Source { origin: origin.replace("\"batch\": 4", "\"batch\": 2"), ..moved };
    assert_eq!(edited(Plans { source: Some(&other), ..all }), ["source/origin.json"]);
}

/// Changes one place of a plan: a number or truth value, two strings or elements of lists exchanged, an element removed or doubled.
fn change(plan: &mut Value, random: &mut fastrand::Rng) {
    let mut paths = vec![];
    places(plan, &mut String::new(), &mut paths);
    let path = random.choice(&paths).expect("a plan is not empty").clone();
    let other = random.choice(&paths).and_then(|p| plan.pointer(p)).cloned();
    match plan.pointer_mut(&path).expect("it was found there") {
        Value::Number(n) => *n = (n.as_i64().unwrap_or(0) + 1 + random.i64(0..3)).into(),
        Value::Bool(b) => *b = !*b,
        Value::Array(list) if !list.is_empty() => {
            let (i, j) = (random.usize(..list.len()), random.usize(..list.len()));
            match random.u8(..3) {
                0 => list.swap(i, j),
                1 => drop(list.remove(i)),
                _ => list.insert(i, list[j].clone()),
            }
        }
        text if text.is_string() => *text = other.filter(Value::is_string).unwrap_or_default(),
        _ => {}
    }
}

/// JSON pointers to all values within one.
pub(crate) fn places(value: &Value, at: &mut String, found: &mut Vec<String>) {
    found.push(at.clone());
    let n = at.len();
    let mut inside = |key: &str, value: &Value| {
        *at = format!("{}/{}", &at[..n], key.replace('~', "~0").replace('/', "~1"));
        places(value, at, found);
        at.truncate(n);
    };
    match value {
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| inside(&i.to_string(), v)),
        Value::Object(fields) => fields.iter().for_each(|(key, v)| inside(key, v)),
        _ => {}
    }
}

#[test]
fn plans_that_are_edited_at_random_and_bound_anew_are_refused() {
    let (request, config) = configured("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let compiled = compiled(&request, &config);
    let original = serde_json::to_value(&compiled.plan).expect("JSON");
    let mut random = fastrand::Rng::with_seed(5);
    let (mut tried, mut accepted_without_model) = (0, 0);
    while tried < 2200 {
        let mut value = original.clone();
        change(&mut value, &mut random);
        let Ok(mut plan) = serde_json::from_value::<Plan>(value) else { continue };
        plan.kernels.iter_mut().for_each(frit_ir::plan::Kernel::bind);
        if plan == compiled.plan {
            continue;
        }
        tried += 1;
        accepted_without_model += usize::from(verify_plan(&plan).is_ok());
        let found =
            edited(Plans { plan: &plan, evaluation: None, source: None }, &compiled.plan, None);
        // What is told of a plan, and files beside it, which have digests of their own.
        let Plan { frit_version, cast_baseline, model_bytes, least_bytes, .. } = &compiled.plan;
        plan.frit_version.clone_from(frit_version);
        (plan.cast_baseline, plan.model_bytes) = (*cast_baseline, *model_bytes);
        plan.least_bytes = *least_bytes;
        plan.reports.clone_from(&compiled.plan.reports);
        plan.lints.clone_from(&compiled.plan.lints);
        plan.pass_trace.clone_from(&compiled.plan.pass_trace);
        plan.object.clone_from(&compiled.plan.object);
        for (param, own) in plan.params.iter_mut().zip(&compiled.plan.params) {
            param.digest.clone_from(&own.digest);
        }
        for (constant, own) in plan.constants.iter_mut().zip(&compiled.plan.constants) {
            constant.digest.clone_from(&own.digest);
        }
        assert_eq!(found.is_empty(), plan == compiled.plan, "{found:?}");
    }
    // Otherwise the certificate adds nothing.
    assert!(accepted_without_model > 20, "{accepted_without_model} of {tried}");
}

#[test]
fn plans_that_are_not_certified_are_refused_with_a_code() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let (dir, model) = (planned.path(), file("tests/models/mlp/model.onnx"));
    let mut plan = plan_dir::read(&dir).unwrap_or_else(|e| panic!("{e}"));
    // What the graphs were compiled for is not what the plan says.
    plan.config = plan.config.replacen("clip_grad_norm = 1.0", "clip_grad_norm = 2.0", 1);
    std::fs::write(dir.join(layout::PLAN), seal(&plan.to_json())).expect("written");
    let thorough =
        ["verify", dir.to_str().expect("UTF-8"), "--model", model.to_str().expect("UTF-8")];
    let refused = frit(&thorough).unwrap_err();
    for part in ["is not what its model compiles to", "source/train.toml"] {
        assert!(refused.contains(part), "E118 says `{part}`: {refused}");
    }
    let configuration = dir.join(layout::SOURCE).join(layout::CONFIGURATION);
    std::fs::write(configuration, &plan.config).expect("written");
    let refused = frit(&thorough).unwrap_err();
    for part in ["not certified: not shown of update", "clip_grad_norm"] {
        assert!(refused.contains(part), "E119 says `{part}`: {refused}");
    }
}

#[test]
fn edited_plans_with_new_digests_are_refused_with_a_code() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let (dir, model) = (planned.path(), file("tests/models/mlp/model.onnx"));
    let dir = dir.to_str().expect("UTF-8");
    let thorough = ["verify", dir, "--model", model.to_str().expect("UTF-8")];
    let found = frit(&thorough).unwrap_or_else(|e| panic!("{e}"));
    assert!(found.contains("certified: every rank computes the step of the model"), "{found}");
    let json: Value =
        serde_json::from_str(&frit(&[&thorough[..], &["--json"]].concat()).unwrap()).unwrap();
    assert_eq!(json["certificate"]["passes"][0]["verdict"], "as_stated");
    assert_eq!(json["certificate"]["model"]["path"], model.to_str().expect("UTF-8"));

    let path = planned.path().join(layout::PLAN);
    let mut plan = plan_dir::read(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    plan.name = "another".into();
    std::fs::write(path, seal(&plan.to_json())).expect("written");
    let refused = frit(&thorough).unwrap_err();
    for part in ["is not what its model compiles to", "name"] {
        assert!(refused.contains(part), "E118 says `{part}`: {refused}");
    }
    assert!(frit(&["verify", dir, "--quick"]).unwrap().contains("sound"));
}
