//! The certificate's statements of losses and updates give the numbers of the graphs that the passes make, at every pair of settings.

use crate::pairs::rows;
use crate::support::file;
use frit::compilation::{Request, imported};
use frit::config::Config;
use frit::pipeline::{self, Options};
use frit::statement;
use frit_ir::interpret::{self, leaf_key, run_ranks};
use frit_ir::ops::{ParamKind, StateName};
use frit_ir::{Graph, Op, Output, OutputKind, Tensor, TensorData};
use frit_passes::loss::capacity;
use frit_passes::{Pass, PassContext};
use frit_verify::step::{matrices, updated, with_loss};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A model, its batch, and settings that it needs.
type Model<'a> = (&'a str, usize, &'a [&'a str]);

fn config(toml: &str, settings: &[&str]) -> Config {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    Config::parse(toml, "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs the passes up to `update` and compares what `loss` and `update` make with what is stated.
fn check(what: &str, (model, batch, settings): Model<'_>, toml: &str, more: &[&str]) {
    let config = config(toml, &[settings, more].concat());
    let request = Request {
        model: file(&format!("tests/models/{model}/model.onnx")),
        binds: [("batch".to_string(), batch)].into(),
        ..Request::default()
    };
    let mut graph = imported(&request, &config).unwrap_or_else(|e| panic!("{what}: {e}")).graph;
    let options = Options::new(&config).unwrap_or_else(|e| panic!("{what}: {e}"));
    let ranks = config.sharding.ranks;
    let mut context = PassContext::default();
    // The graphs before and after each pass.
    let mut run = |passes: Vec<Box<dyn Pass>>, graph: &mut Graph| {
        let mut around = BTreeMap::new();
        for pass in passes {
            let before = graph.clone();
            pass.run(graph, &mut context).unwrap_or_else(|e| panic!("{what}: {e}"));
            around.insert(pass.info().name, [before, graph.clone()]);
        }
        around
    };
    let around = run(pipeline::forward(&options), &mut graph);
    let [before, made] = &around["loss"];
    let terms = statement::losses(&config).unwrap_or_else(|e| panic!("{what}: {e}"));
    let with_loss = with_loss(before, &terms, ranks).unwrap_or_else(|e| panic!("{what}: {e}"));
    compare(&format!("{what}, loss"), ranks, &with_loss, made);

    let elements = capacity(&graph).expect("a loss") as f64;
    let around = run(pipeline::training(&options, elements), &mut graph);
    let ([before, _], [_, made]) = (&around["loss_scale"], &around["update"]);
    let update = statement::update(&config, elements, matrices(&with_loss));
    let stated = updated(before, &update).unwrap_or_else(|e| panic!("{what}: {e}"));
    compare(&format!("{what}, update"), ranks, &stated, made);
}

/// Name, kind and, if it is carried, leaf of every output.
fn keys(graph: &Graph) -> Vec<String> {
    let key = |o: &Output| match o.kind {
        OutputKind::Carry(leaf) => format!("{} for {:?}", o.name, leaf_key(&graph.def(leaf).op)),
        kind => format!("{} {kind:?}", o.name),
    };
    graph.outputs.iter().map(key).collect()
}

/// The leaves on which outputs depend, with their first values.
fn leaves(graph: &Graph) -> BTreeSet<String> {
    let mut live = graph.clone();
    live.remove_dead();
    let leaves = live.nodes().filter(|(_, n)| leaf_key(&n.op).is_some());
    leaves.map(|(_, n)| format!("{:?}", n.op)).collect()
}

/// Compares all outputs on as many ranks as the graphs are for, with numbers that every operation is defined for.
fn compare(what: &str, ranks: usize, stated: &Graph, made: &Graph) {
    let (names, found_names) = (keys(stated), keys(made));
    let sorted = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(sorted(&found_names), sorted(&names), "{what}");
    assert_eq!(leaves(made), leaves(stated), "{what}");
    let feeds: Vec<HashMap<String, Tensor>> = (0..ranks).map(|rank| feeds(stated, rank)).collect();
    let run = |graph: &Graph| {
        run_ranks(graph, &feeds, interpret::Options::EXACT)
            .unwrap_or_else(|e| panic!("{what}: {e}"))
    };
    let (expected, found) = (run(stated), run(made));
    for (expected, found) in expected.iter().zip(&found) {
        let expected: HashMap<&String, &Tensor> =
            names.iter().zip(expected.iter().map(|o| &o.1)).collect();
        for (name, found) in found_names.iter().zip(found.iter().map(|o| &o.1)) {
            assert_eq!(found.ty, expected[name].ty, "{what}: {name}");
            for (a, b) in found.to_f64s().into_iter().zip(expected[name].to_f64s()) {
                let close = (a - b).abs() <= 1e-9 * (1e-3 + a.abs().max(b.abs()));
                assert!(close, "{what}: {name} is {a}, stated as {b}");
            }
        }
    }
}

/// Numbers for every leaf but hyper-parameters and the loss scale: integers from 0 to 1, of parameters small ones, of all else between 0.1
/// and 0.9. Inputs differ between ranks.
fn feeds(graph: &Graph, rank: usize) -> HashMap<String, Tensor> {
    let mut feeds = HashMap::new();
    for (_, node) in graph.nodes() {
        let Some(key) = leaf_key(&node.op) else { continue };
        let (ty, seed, small) = match &node.op {
            Op::Input(input) => (&input.ty, rank, false),
            Op::Param(param) => (&param.ty, 0, param.kind == ParamKind::Trainable),
            Op::State(state) if state.name != StateName::LossScale => (&state.ty, 0, false),
            _ => continue,
        };
        let seed = key.bytes().fold(seed as u64, |seed, b| 31 * seed % (1 << 50) + u64::from(b));
        let mut rng = fastrand::Rng::with_seed(seed);
        let n = ty.shape.numel();
        let tensor = match &node.op {
            Op::State(state) if state.name == StateName::Rng => {
                Tensor::vector_i64(vec![7, rank as i64, 5, 2, 3])
            }
            _ if ty.dtype.is_float() => {
                let number = |_| if small { rng.f64() * 0.2 - 0.1 } else { rng.f64() * 0.8 + 0.1 };
                Tensor::exact(ty.clone(), TensorData::Float((0..n).map(number).collect()))
            }
            _ => Tensor::ints(ty.dtype, ty.shape.clone(), (0..n).map(|_| rng.i64(0..2)).collect()),
        };
        feeds.insert(key, tensor);
    }
    feeds
}

#[test]
fn losses_are_what_the_passes_attach() {
    let text = std::fs::read_to_string(file("tests/models/losses/reference.json"));
    let cases: Value = serde_json::from_str(&text.expect("the reference")).expect("JSON");
    for (name, case) in cases.as_object().expect("cases") {
        let settings = case["settings"].as_array().expect("settings");
        let settings: Vec<&str> = settings.iter().map(|s| s.as_str().expect("a text")).collect();
        for ranks in [1, 2] {
            let ranks = format!("sharding.ranks={ranks}");
            let more = [&["run.accumulation=2", ranks.as_str()], &settings[..]].concat();
            check(&format!("{name}, {ranks}"), ("losses", 4, &[]), "", &more);
        }
    }
}

/// Models with a batch, and settings that they need.
const MODELS: [Model<'_>; 5] = [
    ("mlp", 2, &[]),
    ("gpt2", 1, &[]),
    ("resnet", 2, &["model.batch_norm=train"]),
    ("dropout", 2, &[]),
    ("tied", 2, &[]),
];

/// What is crossed: of each, settings.
const FACTORS: [&[&str]; 9] = [
    &["0", "1", "2", "3", "4"],
    &["sgd", "momentum", "nesterov", "adam", "adamw", "lion", "adafactor", "muon"],
    &[
        "schedule.kind=constant schedule.warmup_steps=3",
        "schedule.kind=linear schedule.total_steps=20",
        "schedule.kind=cosine schedule.total_steps=20 schedule.min_lr=1e-4",
        "schedule.kind=step schedule.step_size=2",
        "schedule.kind=one_cycle schedule.total_steps=20",
    ],
    &["run.accumulation=1", "run.accumulation=3"],
    &["sharding.ranks=1", "sharding.ranks=2"],
    &["precision.loss_scale=none", "precision.loss_scale=512", "precision.loss_scale=dynamic"],
    &["precision.compute=fp32", "precision.compute=bf16"],
    &["optimizer.ema=0", "optimizer.ema=0.9 optimizer.clip_grad_value=0.01"],
    &["", "optimizer.decay=matrices", "group"],
];

#[test]
fn updates_are_what_the_passes_add() {
    let rows = rows(&FACTORS, |_| true);
    assert!(rows.len() >= 40, "{} rows", rows.len());
    for row in rows {
        let [model, optimizer, .., groups] = &row[..] else { panic!("a level of each factor") };
        let kind = format!("optimizer.kind={}", FACTORS[1][*optimizer]);
        let mut settings = vec![kind.as_str()];
        settings.extend((2..8).flat_map(|f| FACTORS[f][row[f]].split(' ')));
        let mut toml = "";
        match FACTORS[8][*groups] {
            "" => {}
            "group" => {
                toml = "[[optimizer.group]]\nscope = \"**.weight\"\nlr = 0.25\n\
                    [[optimizer.group]]\nscope = \"**.b*\"\nlr = 0.5\nweight_decay = 0.125\n";
            }
            setting => settings.push(setting),
        }
        if kind.ends_with("muon") && !toml.is_empty() {
            settings.extend(["optimizer.adamw_lr=0.01", "optimizer.adamw_weight_decay=0.02"]);
        }
        let model = MODELS[*model];
        check(&format!("{}, {settings:?} {toml}", model.0), model, toml, &settings);
    }
}

#[test]
fn muon_steps_the_same_matrices() {
    for model in [
        ("llama", 1, &[][..]),
        ("bert", 1, &[]),
        ("t5", 1, &[]),
        ("vit", 1, &[]),
        ("unet", 1, &["loss.kind=mse"]),
        ("moe_einsum", 2, &[]),
    ] {
        check(model.0, model, "", &["optimizer.kind=muon"]);
    }
}
