//! The pass trace: it has the graphs of the compilation, it is the same every time, and an edited one certifies no other plan.

use crate::certificate::{changed, compiled, configured, near, numbers, places, plans};
use crate::pairs::rows;
use crate::simulate::frit;
use crate::support::{file, plan};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use frit::certificate::{Plans, Verdict, certify};
use frit::compilation::{Compiled, Observer, Passed, Request, compile, imported, lowered};
use frit::config::Config;
use frit::pass_trace::{Recorder, Stage, read};
use frit::{pipeline, plan_dir};
use frit_ir::interpret::Options;
use frit_ir::ops::UnaryFn;
use frit_ir::plan::{Plan, layout, seal, sha256_hex};
use frit_ir::{Code, Graph, Op, Origin, Region};
use frit_passes::chunk_loss::{ChunkLoss, Chunks};
use frit_passes::cost::Device;
use frit_passes::index_ranges::IndexRanges;
use frit_passes::recompute::Recompute;
use frit_passes::{Pass, PassContext, loss};
use frit_verify::step;
use serde_json::{Number, Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

/// The graphs of a training and of the evaluation beside it, after each pass.
#[derive(Default)]
struct Seen([Vec<(String, Graph)>; 2], usize);

impl Observer for Seen {
    fn begin(&mut self, evaluation: bool, _: &Graph) -> bool {
        self.1 = usize::from(evaluation);
        true
    }

    fn after(&mut self, _: usize, name: &str, graph: &Graph) {
        self.0[self.1].push((name.into(), graph.clone()));
    }
}

pub(crate) fn begin(request: &Request, config: &Config) -> Arc<Graph> {
    Arc::new(imported(request, config).unwrap_or_else(|e| panic!("{e}")).graph)
}

/// A trace has the graphs after each pass, and is the same every time.
fn has_its_graphs(model: &str, batch: usize, settings: &[&str]) {
    let (request, config) = configured(model, batch, settings);
    let request = Request { without_code: true, evaluation: true, ..request };
    let mut seen = Seen::default();
    let first = compile(&request, &config, &mut seen).unwrap_or_else(|e| panic!("{model}: {e}"));
    let first = first.expect("a plan");
    assert_eq!(first.pass_trace, compiled(&request, &config).pass_trace, "{model} {settings:?}");
    assert_eq!(first.plan.pass_trace, Some(sha256_hex(&first.pass_trace)));
    assert!(first.pass_trace.len() < 100 << 10, "{model}: {} bytes", first.pass_trace.len());

    let (training, evaluation) =
        read(&first.pass_trace, &begin(&request, &config)).unwrap_or_else(|e| panic!("{e}"));
    for (stages, seen) in [training, evaluation].into_iter().zip(seen.0) {
        assert_eq!(stages.len(), seen.len(), "{model} {settings:?}");
        for (stage, (pass, graph)) in stages.into_iter().zip(seen) {
            assert_eq!(stage.pass, pass);
            assert!(stage.graph.is_like(&graph), "{model} {settings:?}: after {pass}");
            assert_eq!(stage.graph.to_string(), graph.to_string());
        }
    }
}

#[test]
fn traces_have_the_graphs_of_all_passes() {
    for (model, batch, loss) in [
        ("mlp/model.onnx", 4, "loss.kind=cross_entropy"),
        ("gpt2/model.onnx", 2, "loss.kind=cross_entropy"),
        ("llama/model.onnx", 2, "loss.kind=cross_entropy"),
        ("bert/model.onnx", 2, "loss.kind=cross_entropy"),
        ("t5/model.onnx", 2, "loss.kind=cross_entropy"),
        ("vit/model.onnx", 2, "loss.kind=cross_entropy"),
        ("resnet/model.onnx", 2, "loss.kind=cross_entropy"),
        ("unet/model.onnx", 2, "loss.kind=mse"),
        ("gru/model.onnx", 2, "loss.kind=cross_entropy"),
        ("moe_dispatch/model.onnx", 2, "loss.kind=cross_entropy"),
        ("bloom/model.onnx", 2, "loss.kind=none"),
    ] {
        for more in [
            &["precision.compute=fp32"][..],
            &["sharding.ranks=4", "precision.compute=bf16", "run.accumulation=2"],
            &["sharding.ranks=2", "sharding.strategy=no_shard", "memory.recompute=unit"],
        ] {
            has_its_graphs(&format!("tests/models/{model}"), batch, &[&[loss], more].concat());
        }
    }
}

#[test]
fn traces_have_the_graphs_under_every_pair_of_settings() {
    let factors: [&[&str]; 7] = [
        &["precision.compute=fp32", "precision.fp8=true", "precision.compute=fp16"],
        &["data.document_separator=none", "data.document_separator=0"],
        &["adapter.kind=none", "adapter.kind=lora"],
        &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
        &["sharding.strategy=full_shard", "sharding.strategy=shard_optimizer"],
        &["memory.loss_chunks=1", "memory.loss_chunks=2"],
        &["sharding.prefetch=auto", "sharding.prefetch=fixed"],
    ];
    for row in rows(&factors, |_| true) {
        let mut settings: Vec<&str> =
            row.iter().zip(&factors).map(|(level, f)| f[*level]).collect();
        settings.retain(|setting| *setting != "data.document_separator=none");
        settings.push("sharding.ranks=2");
        if settings.contains(&"adapter.kind=lora") {
            settings.push("adapter.targets=[\"**\"]");
        }
        let model = "tests/museum/models/lm.json";
        has_its_graphs(model, 2, &settings);
        let (request, config) = configured(model, 2, &settings);
        let made = compiled(&request, &config);
        let found = certify(&request, &config, &made.pass_trace, plans(&made));
        let found = found.unwrap_or_else(|e| panic!("{settings:?}: {e}"));
        assert!(found.edited.is_empty(), "{settings:?}: {:?}", found.edited);
    }
}

/// The JSON of a trace.
fn unpacked(trace: &[u8]) -> Value {
    let mut json = String::new();
    GzDecoder::new(trace).read_to_string(&mut json).expect("a trace");
    serde_json::from_str(&json).expect("JSON")
}

/// The file of a trace.
fn packed(trace: &Value) -> Vec<u8> {
    let mut file = GzEncoder::new(vec![], Compression::fast());
    file.write_all(trace.to_string().as_bytes()).expect("memory");
    file.finish().expect("memory")
}

/// The trace of passes that made these graphs, for the model and for its evaluation.
fn recorded(begin: &Graph, stages: &[Stage], evaluation: &[Stage]) -> Vec<u8> {
    let mut recorder = Recorder::default();
    for stages in [stages, evaluation] {
        recorder.begin(begin);
        for Stage { pass, graph } in stages {
            recorder.after(pass, graph);
        }
    }
    recorder.finish()
}

/// A plan that is lowered from the last graph of a trace, as one that was made from it would be.
fn plan_of(request: &Request, config: &Config, own: &Plan, stages: &[Stage]) -> Option<Plan> {
    let mut context = PassContext::default();
    let at = |name: &str| stages.iter().position(|stage| stage.pass == name).expect("it ran");
    let mut graph = Graph::clone(&stages[at("index_ranges")].graph);
    IndexRanges {}.run(&mut graph, &mut context).ok()?;
    let loss_elements = loss::capacity(&stages[at("differentiate") - 1].graph)?;
    let graph = &stages.last().expect("passes").graph;
    let passed = Passed { graph, context, loss_elements, plan: own };
    let weights = imported(request, config).ok()?.weights;
    Some(lowered(request, config, &weights, passed, None).ok()?.0.plan)
}

/// Changes a trace at random: two operands of a node exchanged, a number of an operation, an operand, an operation, a place in the order
/// or an output.
fn change(trace: &mut Value, random: &mut fastrand::Rng) {
    let passes = trace["passes"].as_array_mut().expect("passes");
    let edits: Vec<usize> = (0..passes.len()).filter(|i| !passes[*i]["graph"].is_null()).collect();
    let graph = &mut passes[random.choice(edits).expect("a pass that changed something")]["graph"];
    let list = |value: &mut Value| value.as_array().cloned().unwrap_or_default();
    match random.u8(0..8) {
        0..4 => {
            let sizes = list(&mut graph["nodes"]["sizes"]);
            let operands = sizes.iter().map(|size| size[1].as_u64().expect("a number") as usize);
            let operands: Vec<usize> = operands.collect();
            let Some(node) = random.choice(0..operands.len()) else { return };
            let (first, n) = (operands[..node].iter().sum::<usize>(), operands[node].max(1));
            let (a, b) = (first + random.usize(..n), first + random.usize(..n));
            if n > 1 {
                graph["nodes"]["operands"].as_array_mut().expect("operands").swap(a, b);
            }
        }
        4 | 5 => {
            let operations = trace["operations"].as_array_mut().expect("operations");
            let operation = random.choice(operations).expect("operations");
            let (mut paths, mut at) = (vec![], String::new());
            places(operation, &mut at, &mut paths);
            let path = random.choice(paths).expect("an operation is not empty");
            match operation.pointer_mut(&path).expect("it was found there") {
                Value::Number(n) if n.is_f64() => *n = Number::from_f64(0.5).expect("finite"),
                Value::Number(n) => *n = (n.as_i64().unwrap_or(0) + 1).into(),
                Value::Bool(b) => *b = !*b,
                _ => {}
            }
        }
        _ => {
            let columns = ["/nodes/operands", "/nodes/operations", "/order", "/outputs/values"];
            let column = graph.pointer_mut(random.choice(columns).expect("columns"));
            let Some(Value::Array(column)) = column else { return };
            let Some(i) = random.choice(0..column.len()) else { return };
            match &mut column[i] {
                Value::Number(n) => *n = (n.as_i64().unwrap_or(0) + random.i64(-2..=2)).into(),
                _ => column.swap(0, i),
            }
        }
    }
}

/// Whether two graphs compute the same on all ranks.
pub(crate) fn compute_the_same(a: &Graph, b: &Graph) -> bool {
    match (numbers(a, Options::EXACT), numbers(b, Options::EXACT)) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| near(a, b)),
        _ => false,
    }
}

const SETTINGS: [&[&str]; 2] = [
    &["sharding.ranks=3", "precision.compute=fp32", "optimizer.clip_grad_norm=1.0"],
    &["sharding.ranks=3", "precision.compute=bf16", "memory.recompute=unit"],
];

/// Whoever edits the file of a trace and lowers a plan from it gets no certificate for a step that computes something else.
#[test]
fn edited_traces_certify_no_other_step() {
    let mut random = fastrand::Rng::with_seed(11);
    let (mut unreadable, mut different, mut same) = (0, 0, 0);
    for settings in SETTINGS {
        let (request, config) = configured("tests/museum/models/lm.json", 2, settings);
        let made = compiled(&request, &config);
        let (begin, original) = (begin(&request, &config), unpacked(&made.pass_trace));
        let (stages, _) = read(&made.pass_trace, &begin).unwrap_or_else(|e| panic!("{e}"));
        let expected = stages.last().expect("passes").graph.clone();
        for _ in 0..300 {
            let mut trace = original.clone();
            change(&mut trace, &mut random);
            if trace == original {
                continue;
            }
            let file = packed(&trace);
            let Ok((stages, _)) = read(&file, &begin) else {
                unreadable += 1;
                continue;
            };
            let Some(plan) = plan_of(&request, &config, &made.plan, &stages) else { continue };
            let found = certify(
                &request,
                &config,
                &file,
                Plans { plan: &plan, evaluation: None, source: None },
            );
            let holds = found.is_ok_and(|certificate| certificate.holds());
            let is_same = compute_the_same(&expected, &stages.last().expect("passes").graph);
            *if is_same { &mut same } else { &mut different } += 1;
            assert!(is_same || !holds, "{settings:?}: certified\n{trace}");
        }
    }
    assert!(unreadable > 50 && different + same > 20, "{unreadable} {different} {same}");
}

/// The same for one that has other graphs from a pass on, up to the one that the plan is lowered from.
#[test]
fn other_graphs_from_a_pass_on_are_not_certified() {
    let mut random = fastrand::Rng::with_seed(12);
    let mut different = 0;
    for settings in SETTINGS {
        let (request, config) = configured("tests/museum/models/lm.json", 2, settings);
        let made = compiled(&request, &config);
        let begin = begin(&request, &config);
        let (stages, _) = read(&made.pass_trace, &begin).unwrap_or_else(|e| panic!("{e}"));
        let last = stages.last().expect("passes").graph.clone();
        for _ in 0..200 {
            let Some(other) = changed(&last, &mut random).map(Arc::new) else { continue };
            if compute_the_same(&last, &other) {
                continue;
            }
            let from = random.usize(stages.len() / 2..stages.len());
            let mut stages = stages.clone();
            stages[from..].iter_mut().for_each(|stage| stage.graph = other.clone());
            let Some(plan) = plan_of(&request, &config, &made.plan, &stages) else { continue };
            let (file, plans) = (
                recorded(&begin, &stages, &[]),
                Plans { plan: &plan, evaluation: None, source: None },
            );
            let found = certify(&request, &config, &file, plans);
            different += 1;
            let holds = found.is_ok_and(|certificate| certificate.holds());
            assert!(!holds, "{settings:?}, from {}:\n{other}", stages[from].pass);
        }
    }
    assert!(different > 30, "{different}");
}

/// A pass that hides a matrix from the rule which Muon steps, and keeps every bit of what is computed, is refused at `update`.
#[test]
fn no_pass_decides_what_muon_steps() {
    let settings = ["precision.compute=fp32", "optimizer.kind=muon"];
    let (request, config) = configured("tests/models/mlp/model.onnx", 4, &settings);
    let made = compiled(&request, &config);
    let begin = begin(&request, &config);
    let (own, _) = read(&made.pass_trace, &begin).unwrap_or_else(|e| panic!("{e}"));
    let options = pipeline::Options::new(&config).unwrap_or_else(|e| panic!("{e}"));
    let n_forward = pipeline::forward(&options).len();
    for hides in [false, true] {
        let mut stages = own[..n_forward].to_vec();
        let mut graph = Graph::clone(&stages[n_forward - 1].graph);
        let (matrix, _) = graph
            .params()
            .find(|(_, param)| step::matrices(&graph).contains(&param.name))
            .expect("a matrix of a hidden layer");
        if hides {
            let readers = graph.users()[matrix.0 as usize].clone();
            let mut turned = matrix;
            for _ in 0..2 {
                let node = (Op::Unary(UnaryFn::Neg), Origin::none(), Region::Forward);
                turned = graph.add1(node.0, &[turned], node.1, node.2).expect("fits");
            }
            for reader in readers {
                let inputs = graph.node(reader).inputs.iter();
                let inputs = inputs.map(|v| if *v == matrix { turned } else { *v }).collect();
                graph.set_inputs(reader, inputs).expect("of this type");
            }
            graph.sort().expect("no cycle");
            stages[n_forward - 1].graph = Arc::new(graph.clone());
        }
        let capacity = loss::capacity(&graph).expect("a loss") as f64;
        let mut passes = pipeline::training(&options, capacity);
        passes.extend(pipeline::holding(&options));
        let chunk_loss = ChunkLoss { chunks: Chunks::Fixed(1), device: Device::cpu("") };
        let small = BTreeSet::new();
        passes.extend(pipeline::distribution(&options, chunk_loss, Recompute::NONE, &small));
        let mut context = PassContext::default();
        for pass in passes {
            pass.run(&mut graph, &mut context).unwrap_or_else(|e| panic!("{e}"));
            stages.push(Stage { pass: pass.info().name.into(), graph: Arc::new(graph.clone()) });
        }
        let plan = plan_of(&request, &config, &made.plan, &stages).expect("a plan");
        let (file, plans) =
            (recorded(&begin, &stages, &[]), Plans { plan: &plan, evaluation: None, source: None });
        let found = certify(&request, &config, &file, plans).unwrap_or_else(|e| panic!("{e}"));
        let open: Vec<&str> = found.open().iter().map(|checked| checked.pass.as_str()).collect();
        assert_eq!(open, if hides { vec!["update"] } else { vec![] }, "{found:?}");
    }
}

/// The plan and trace of another model are not those of this one, also if the trace says that it begins here.
#[test]
fn a_plan_of_another_model_is_not_certified() {
    let (request, config) = configured("tests/museum/models/lm.json", 2, SETTINGS[0]);
    let text = std::fs::read_to_string(&request.model).expect("a model");
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("lm.json");
    std::fs::write(&model, text.replace("1e-05", "0.01").replace("1e-5", "0.01")).expect("written");
    let own = compiled(&request, &config);
    let other = compiled(&Request { model, ..request.clone() }, &config);
    assert_ne!(own.pass_trace, other.pass_trace);
    let mut trace = unpacked(&other.pass_trace);
    trace["imported"] = unpacked(&own.pass_trace)["imported"].clone();
    let found = certify(&request, &config, &packed(&trace), plans(&other));
    assert!(!found.is_ok_and(|found| found.holds()));
}

/// Each with what a message says of it.
#[test]
fn traces_of_something_else_are_refused() {
    let (request, config) = configured("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let made = compiled(&request, &config);
    let own = unpacked(&made.pass_trace);
    let refused = |trace: &[u8], plans: Plans| {
        let refused = certify(&request, &config, trace, plans).map(|found| found.edited);
        let refused = refused.unwrap_err();
        assert_eq!(refused.diagnostics[0].code, Code::PlanEdited.id());
        refused.to_string()
    };
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut trace = own.clone();
        edit(&mut trace);
        assert_ne!(trace, own);
        refused(&packed(&trace), plans(&made))
    };
    let begin = begin(&request, &config);
    let (stages, evaluation) = read(&made.pass_trace, &begin).unwrap_or_else(|e| panic!("{e}"));
    let with_passes = |stages: &[Stage]| recorded(&begin, stages, &evaluation);
    let without = |pass: &str| {
        let others: Vec<Stage> = stages.iter().filter(|s| s.pass != pass).cloned().collect();
        refused(&with_passes(&others), Plans { evaluation: None, ..plans(&made) })
    };
    let half = &made.pass_trace[..made.pass_trace.len() / 2];
    let other = |model: &str, batch, settings: &[&str]| {
        let (request, config) = configured(model, batch, settings);
        compiled(&request, &config).pass_trace
    };
    let mut other_evaluation = evaluation.clone();
    other_evaluation[0].graph = begin.clone();
    let other_evaluation = recorded(&begin, &stages, &other_evaluation);
    for (message, part) in [
        (refused(&[], plans(&made)), "cannot be read"),
        (refused(half, plans(&made)), "cannot be read"),
        (refused(&other("tests/museum/models/lm.json", 2, &[]), plans(&made)), "another graph"),
        (edited(&|t| t["version"] = json!(9)), "version 9"),
        (edited(&|t| t["passes"][0]["pass"] = json!("evaluate")), "loss"),
        (edited(&|t| t["passes"].as_array_mut().unwrap().swap(2, 3)), "not those of this"),
        (without("shard"), "shard"),
        (without("update"), "update"),
        (refused(&other_evaluation, plans(&made)), "`evaluate` makes something else"),
        (edited(&|t| t["evaluation"] = json!([])), "requires"),
    ] {
        assert!(message.contains(part), "`{part}`: {message}");
    }
    // Passes that do nothing do not do what is stated of them: another does it, or none.
    for pass in ["loss", "differentiate", "update", "shard"] {
        let mut others = stages.clone();
        let i = others.iter().position(|stage| stage.pass == pass).expect("it ran");
        others[i].graph = if i == 0 { begin.clone() } else { others[i - 1].graph.clone() };
        let plans = Plans { evaluation: None, ..plans(&made) };
        let found = certify(&request, &config, &with_passes(&others), plans).expect("it is read");
        assert_eq!(found.passes[i].verdict, Verdict::NotShown, "{pass}");
    }
    // The trace of another configuration leads to another plan.
    let ranks = other("tests/models/mlp/model.onnx", 4, &["sharding.ranks=4"]);
    let found = certify(&request, &config, &ranks, plans(&made)).expect("it can be read");
    assert!(!found.holds() && !found.edited.is_empty(), "{found:?}");
}

fn put(dir: &Path, trace: &[u8]) {
    std::fs::write(dir.join(layout::PASS_TRACE), trace).expect("written");
}

#[test]
fn verification_says_what_is_wrong_with_a_trace() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let (dir, model) = (planned.path(), file("tests/models/mlp/model.onnx"));
    let verify = |more: &[&str]| {
        let dir = dir.to_str().expect("UTF-8");
        frit(&[&["verify", dir][..], more].concat())
    };
    let thorough = ["--model", model.to_str().expect("UTF-8")];
    let own = std::fs::read(dir.join(layout::PASS_TRACE)).expect("a trace");
    put(&dir, &own[..own.len() - 9]);
    for more in [&thorough[..], &["--quick"]] {
        let refused = verify(more).unwrap_err();
        assert!(refused.contains(layout::PASS_TRACE) && refused.contains("changed"), "{refused}");
    }
    std::fs::remove_file(dir.join(layout::PASS_TRACE)).expect("removed");
    assert!(verify(&thorough).unwrap_err().contains(layout::PASS_TRACE));
    // A plan that came without one.
    let mut plan = plan_dir::read(&dir).unwrap_or_else(|e| panic!("{e}"));
    plan.pass_trace = None;
    std::fs::write(dir.join(layout::PLAN), seal(&plan.to_json())).expect("written");
    let refused = verify(&thorough).unwrap_err();
    assert!(
        refused.contains("no trace") && refused.contains("compile the model again"),
        "{refused}"
    );
    assert!(verify(&["--quick"]).expect("sound").contains("sound"));
    // One whose digest was made anew.
    put(&dir, &own[..own.len() - 9]);
    plan.pass_trace = Some(sha256_hex(&own[..own.len() - 9]));
    std::fs::write(dir.join(layout::PLAN), seal(&plan.to_json())).expect("written");
    let refused = verify(&thorough).unwrap_err();
    assert!(refused.contains("cannot be read"), "{refused}");
}

/// Passes that were left out are not those of the configuration alone, and the plan is certified as it is.
#[test]
fn plans_without_a_pass_are_certified() {
    for pass in ["fuse", "simplify", "pad_tensor_cores"] {
        let (request, config) = configured("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
        let disabled = vec![pass.to_string()];
        let made: Compiled = compiled(&Request { disabled, ..request.clone() }, &config);
        let found = certify(&request, &config, &made.pass_trace, plans(&made));
        let found = found.unwrap_or_else(|e| panic!("{pass}: {e}"));
        assert!(found.holds(), "{pass}: {found:?}");
        assert!(found.passes.iter().all(|checked| checked.pass != pass));
    }
}
