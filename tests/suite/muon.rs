//! Muon: PyTorch's numbers (`tests/models/muon/make.py`), which parameters it steps, and its crossings.

use crate::pairs::{Row, rows};
use crate::parity;
use crate::support::{
    Planned, compile_at, file, plan_configured, plan_to_evaluate_configured, resumed_losses,
    write_f32,
};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Request, compile};
use frit::config::Config;
use frit_ir::Diagnostic;
use frit_ir::ops::StateName;
use frit_ir::plan::{Group, Plan};
use frit_runtime::run::{RunOptions, run};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The network of `make.py`.
const RESIDUAL: &str = r#"{ "frit_model": 1, "name": "residual",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 6] } ],
  "params": [ { "name": "a", "shape": [6, 8] }, { "name": "b", "shape": [8, 8] },
              { "name": "c", "shape": [8, 20] }, { "name": "d", "shape": [20, 8] },
              { "name": "bias", "shape": [8] }, { "name": "head", "shape": [8, 2] },
              { "name": "head_bias", "shape": [2] } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "a"], "outputs": ["h0"] },
             { "op": "add", "inputs": ["h0", "bias"], "outputs": ["h1"] },
             { "op": "tanh", "inputs": ["h1"], "outputs": ["h2"] },
             { "op": "matmul", "inputs": ["h2", "b"], "outputs": ["h3"] },
             { "op": "tanh", "inputs": ["h3"], "outputs": ["h4"] },
             { "op": "add", "inputs": ["h2", "h4"], "outputs": ["h5"] },
             { "op": "matmul", "inputs": ["h5", "c"], "outputs": ["h6"] },
             { "op": "tanh", "inputs": ["h6"], "outputs": ["h7"] },
             { "op": "matmul", "inputs": ["h7", "d"], "outputs": ["h8"] },
             { "op": "add", "inputs": ["h5", "h8"], "outputs": ["h9"] },
             { "op": "matmul", "inputs": ["h9", "head"], "outputs": ["p"] },
             { "op": "add", "inputs": ["p", "head_bias"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

const SHAPES: [(&str, &[usize]); 7] = [
    ("a", &[6, 8]),
    ("b", &[8, 8]),
    ("c", &[8, 20]),
    ("d", &[20, 8]),
    ("bias", &[8]),
    ("head", &[8, 2]),
    ("head_bias", &[2]),
];
/// A twentieth of a step of the reference. The iteration amplifies small singular values a hundredfold, and with them a last bit that is
/// rounded to bf16 in another way: PyTorch's own runs in f32 and f64 differ as much.
const PARAMS_BOUND: f64 = 2.5e-5;
const BATCH: usize = 4;
const STEPS: usize = 10;

/// Numbers between −1 and 1, as in `make.py`.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2039) as f32 / 1024.0 - 1.0).collect()
}

struct Bench {
    dir: tempfile::TempDir,
}

/// What a run leaves: losses, skipped steps, parameters, and their averages.
struct Ran {
    losses: Vec<f64>,
    skipped: Vec<usize>,
    params: BTreeMap<String, Vec<f32>>,
    averages: BTreeMap<String, Vec<f32>>,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { dir: tempfile::tempdir().expect("a directory") };
        std::fs::write(bench.file("model.json"), RESIDUAL).expect("written");
        let weights = SHAPES.iter().enumerate().map(|(i, (name, shape))| {
            let values = numbers(shape.iter().product(), i).iter().map(|x| x / 2.0).collect();
            (*name, shape.to_vec(), values)
        });
        write_f32(&bench.file("weights.safetensors"), &weights.collect::<Vec<_>>());
        bench
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn plan(&self, batch: usize, toml: &str, settings: &[&str]) -> Planned {
        let common = ["loss.kind=mse", "loss.logits=y", "optimizer.kind=muon"];
        let settings = [&common, settings].concat();
        plan_configured(&self.file("model.json"), batch, toml, &settings)
    }

    /// Trains on these inputs, and labels that go with them.
    fn train(&self, planned: &Planned, (x, labels): (Vec<f32>, Vec<f32>), averages: bool) -> Ran {
        let data = self.file("data.safetensors");
        let n = x.len() / 6;
        write_f32(&data, &[("x", vec![n, 6], x), ("labels", vec![n, 2], labels)]);
        let file = |name| planned.dir.path().join(name);
        let (params, average, metrics) = (file("params"), file("averages"), file("metrics"));
        let options = RunOptions {
            steps: n / BATCH,
            data: data.into(),
            weights: vec![self.file("weights.safetensors")],
            metrics: Some(metrics.clone()),
            save: Some(params.clone()),
            save_ema: averages.then(|| average.clone()),
            threads: Some(1),
            ..RunOptions::default()
        };
        let _ = std::fs::remove_file(&metrics);
        let report = run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
        let lines = std::fs::read_to_string(metrics).expect("metrics");
        let skips = |line: &str| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["skipped"].as_bool().expect("a flag")
        };
        let skipped = lines.lines().enumerate().filter(|(_, l)| skips(l)).map(|(i, _)| i);
        Ran {
            losses: report.losses,
            skipped: skipped.collect(),
            params: tensors(&params),
            averages: if averages { tensors(&average) } else { BTreeMap::new() },
        }
    }
}

fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |data: &[u8]| -> Vec<f32> {
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    file.iter().map(|(name, view)| (name.to_string(), floats(view.data()))).collect()
}

fn examples(n: usize, seed: usize) -> (Vec<f32>, Vec<f32>) {
    (numbers(n * 6, seed), numbers(n * 2, seed + 1))
}

fn close(found: &BTreeMap<String, Vec<f32>>, expected: &Value, what: &str) {
    for (name, values) in expected.as_object().expect("tensors") {
        let values = values.as_array().expect("numbers").iter();
        assert_eq!(values.len(), found[name].len(), "{what}: {name}");
        for (a, b) in found[name].iter().zip(values) {
            let b = b.as_f64().expect("a number");
            assert!((f64::from(*a) - b).abs() < PARAMS_BOUND, "{what}: {name} is {a}, not {b}");
        }
    }
}

#[test]
fn muon_takes_the_steps_of_torch() {
    let bench = Bench::new();
    let text = std::fs::read_to_string(file("tests/models/muon/reference.json"));
    let reference: Value = serde_json::from_str(&text.expect("a reference")).expect("JSON");
    for (name, case) in reference["cases"].as_object().expect("cases") {
        let list = case["settings"].as_array().expect("settings").iter();
        let mut settings = vec![
            "precision.compute=fp32",
            "optimizer.lr=0.0005",
            "optimizer.weight_decay=0.1",
            "optimizer.betas=[0.9, 0.99]",
            "optimizer.clip_grad_norm=0",
        ];
        settings.extend(list.map(|s| s.as_str().expect("a text")));
        let seed = case["seed"].as_u64().expect("a number") as usize;
        let toml = case["toml"].as_str().expect("a text");
        let expected: Vec<f64> =
            case["losses"].as_array().expect("losses").iter().flat_map(Value::as_f64).collect();
        for more in [
            &["sharding.ranks=1"][..],
            &["sharding.ranks=2", "sharding.strategy=full_shard"],
            &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
            &["sharding.ranks=4", "sharding.strategy=no_shard"],
        ] {
            let what = format!("{name} with {more:?}");
            let ranks = more[0].trim_start_matches("sharding.ranks=").parse::<usize>();
            let batch = BATCH / ranks.expect("a number");
            let planned = bench.plan(batch, toml, &[&settings[..], more].concat());
            let averages = case.get("ema").is_some();
            let ran = bench.train(&planned, examples(BATCH * STEPS, seed), averages);
            for (step, (a, b)) in ran.losses.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() < 1e-5, "{what}: loss {a} at step {step}, not {b}");
            }
            close(&ran.params, &case["params"], &what);
            if let Some(averages) = case.get("ema") {
                close(&ran.averages, averages, &what);
            }
        }
    }
}

#[test]
fn a_step_that_is_skipped_changes_no_bit() {
    let bench = Bench::new();
    let (mut x, mut labels) = examples(BATCH * 8, 10);
    // The fourth batch overflows f16 in the last example, which only the last rank sees.
    let (start, width) = (3 * BATCH, 6);
    x[(start + BATCH) * width - 1] = 1e6;
    let with = (x.clone(), labels.clone());
    x.drain(start * width..(start + BATCH) * width);
    labels.drain(start * 2..(start + BATCH) * 2);
    for ranks in [1, 2] {
        let ranks_key = format!("sharding.ranks={ranks}");
        let settings = [
            "precision.compute=fp16",
            "precision.init_scale=1024",
            "optimizer.ema=0.75",
            &ranks_key,
        ];
        let planned = bench.plan(BATCH / ranks, "", &settings);
        let with = bench.train(&planned, with.clone(), true);
        let without = bench.train(&planned, (x.clone(), labels.clone()), true);
        assert_eq!((with.skipped, without.skipped), (vec![3], vec![]), "on {ranks} ranks");
        assert_eq!(with.params, without.params, "on {ranks} ranks");
        assert_eq!(with.averages, without.averages, "on {ranks} ranks");
    }
}

fn is_muon(group: &Group) -> bool {
    group.states.iter().any(|s| s.name == StateName::MuonMomentum)
}

/// The parameters that Muon steps, and those that AdamW does.
fn stepped(plan: &Plan) -> [BTreeSet<&str>; 2] {
    let of = |muon| {
        let groups = plan.groups.iter().filter(|g| g.trainable && is_muon(g) == muon);
        groups.flat_map(|g| &g.segments).map(|s| plan.params[s.param].name.as_str()).collect()
    };
    [of(true), of(false)]
}

fn errors(model: &Path, toml: &str, settings: &[&str]) -> Vec<Diagnostic> {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::parse(toml, "train.toml", &settings).unwrap_or_else(|e| panic!("{e}"));
    let binds = [("batch".to_string(), 2)].into();
    let request = Request { model: model.into(), binds, ..Request::default() };
    match compile(&request, &config, &mut ()) {
        Err(report) => report.diagnostics,
        Ok(compiled) => compiled.expect("no pass was asked to stop").plan.lints,
    }
}

#[test]
fn muon_steps_matrices_alone() {
    let muon = "optimizer.kind=muon";
    // Of each model a hidden matrix, and parts of the names of all matrices that are not hidden.
    for (model, hidden, others) in [
        ("gpt2", "mlp.c_fc.weight", &["wte", "wpe", "lm_head"][..]),
        ("llama", "mlp.down_proj.weight", &["embed", "lm_head"]),
        ("bert", "attention.output.dense.weight", &["embed", "classifier", "cls"]),
        ("t5", "SelfAttention.q.weight", &["shared", "relative", "lm_head"]),
        ("tied", "MatMul_12", &["table", "MatMul_13"]),
        ("resnet", "", &["head"]),
    ] {
        let compiled = compile_at(&file(&format!("tests/models/{model}/model.onnx")), 2, &[muon]);
        let plan = &compiled.plan;
        let [by_muon, by_adamw] = stepped(plan);
        let matrix =
            |name: &&&str| plan.params.iter().any(|p| p.name == **name && p.ty.shape.rank() == 2);
        let other = |name: &&str| others.iter().any(|part| name.contains(part));
        assert!(by_muon.iter().all(|name| matrix(&name) && !other(name)), "{model}: {by_muon:?}");
        let left: Vec<&&str> = by_adamw.iter().filter(matrix).filter(|n| !other(n)).collect();
        assert!(left.is_empty(), "{model}: {left:?}");
        let ends = |name: &&str| name.ends_with(hidden);
        assert_eq!(by_muon.iter().any(ends), !hidden.is_empty(), "{model}: {by_muon:?}");
    }
    let bench = Bench::new();
    let model = bench.file("model.json");
    let group = |kind: &str, scope: &str| {
        format!("[[optimizer.group]]\nscope = \"{scope}\"\nkind = \"{kind}\"\n")
    };
    let found = |toml: &str| {
        let planned = bench.plan(2, toml, &[]);
        stepped(&planned.compiled.plan)[0].iter().map(|s| s.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(found(""), ["a", "b", "c", "d"]);
    assert_eq!(found(&group("adamw", "b")), ["a", "c", "d"]);
    assert_eq!(found(&group("muon", "head")), ["a", "b", "c", "d", "head"]);
    let settings = ["loss.kind=mse", "loss.logits=y", muon];
    let refused = &errors(&model, &group("muon", "*bias"), &settings)[0];
    assert_eq!((refused.code.as_str(), refused.message.contains("`bias`")), ("E068", true));
    let nothing = errors(&model, &group("adamw", "**"), &settings);
    assert!(nothing.iter().any(|d| d.code == "W068"), "{nothing:?}");
}

#[test]
fn settings_change_without_compiling_again() {
    let bench = Bench::new();
    let settings = ["optimizer.lr=0.01", "optimizer.adamw_lr=0.002"];
    let changed = [
        "optimizer.lr=0.02",
        "optimizer.adamw_lr=0.001",
        "optimizer.muon_momentum=0.5",
        "optimizer.muon_ns_coefficients=[3.0, -3.2, 1.2]",
    ];
    let data = bench.file("data.safetensors");
    let (x, labels) = examples(BATCH * 3, 10);
    write_f32(&data, &[("x", vec![BATCH * 3, 6], x), ("labels", vec![BATCH * 3, 2], labels)]);
    let losses = |settings: &[&str], hyper: &[(&str, f64)]| {
        let planned = bench.plan(BATCH, "", settings);
        let options = RunOptions {
            steps: 3,
            data: data.clone().into(),
            weights: vec![bench.file("weights.safetensors")],
            hyper: hyper.iter().map(|(name, x)| (name.to_string(), *x)).collect(),
            threads: Some(1),
            ..RunOptions::default()
        };
        run(&planned.path(), &options).map(|report| report.losses)
    };
    let sets = [
        ("optimizer.lr", 0.02),
        ("optimizer.adamw_lr", 0.001),
        ("optimizer.muon_momentum", 0.5),
        ("optimizer.muon_ns_a", 3.0),
        ("optimizer.muon_ns_b", -3.2),
        ("optimizer.muon_ns_c", 1.2),
    ];
    let [found, expected] = [losses(&settings, &sets), losses(&changed, &[])];
    assert_eq!(found.unwrap_or_else(|e| panic!("{e}")), expected.unwrap_or_else(|e| panic!("{e}")));
    let refused = losses(&settings, &[("optimizer.muon_momentum", -0.5)]).expect_err("refused");
    assert!(refused.to_string().contains("cannot be -0.5"), "{refused}");
}

#[test]
fn views_tell_which_parameters_muon_steps() {
    let bench = Bench::new();
    let planned = bench.plan(2, "", &["sharding.ranks=2"]);
    let path = planned.path();
    let frit = |args: &[&str]| {
        let cli = Cli::try_parse_from([&["frit"], args].concat()).unwrap_or_else(|e| panic!("{e}"));
        execute(&cli).unwrap_or_else(|e| panic!("{e}"))
    };
    let path = path.to_str().expect("UTF-8");
    let units = frit(&["inspect", path, "--view", "units"]);
    let line = |name: &str| {
        let starts = |l: &&str| l.split_whitespace().next() == Some(name);
        units.lines().find(starts).unwrap_or_else(|| panic!("{name}: {units}")).to_string()
    };
    assert!(line("c").contains("muon") && line("head").contains("adamw"), "{units}");
    let reports = format!("{:?}", planned.compiled.plan.reports);
    for part in ["Muon steps 4 of 7 parameters", "AdamW steps `head`: of the last layer"] {
        assert!(reports.contains(part), "{reports}");
    }
}

/// What is crossed: of each, settings.
const FACTORS: [&[&str]; 9] = [
    &["gpt2", "llama", "mlp", "tied"],
    &["", "optimizer.muon_adjust_lr=match_rms_adamw", "group", "optimizer.adamw_lr=0.001"],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=4"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["optimizer.ema=0", "optimizer.ema=0.9", "sharding.prefetch=auto", "schedule.warmup_steps=2"],
];
const RANKS: usize = 2;
const STRATEGY: usize = 3;
const CROSSED_STEPS: usize = 3;

/// A replica is two ranks.
fn is_possible(row: &Row) -> bool {
    let hybrid = row[STRATEGY].is_some_and(|s| FACTORS[STRATEGY][s] == "hybrid_shard");
    !hybrid || row[RANKS].is_none_or(|ranks| ranks > 0)
}

#[test]
fn losses_are_those_of_one_rank_whatever_muon_is_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    assert!((15..=40).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        let [model, own, ranks, strategy, accumulation, recompute, offload, precision, more] =
            words[..]
        else {
            panic!("nine words")
        };
        let toml = match own {
            "group" => "[[optimizer.group]]\nscope = \"**.weight\"\nlr = 1e-3\n",
            _ => "",
        };
        let mut common =
            vec!["optimizer.kind=muon", "optimizer.lr=0.002", accumulation, precision, more];
        common.extend(Some(own).filter(|own| own.contains('=')));
        let strategy = format!("sharding.strategy={strategy}");
        let mut spread = vec![ranks, &strategy, recompute, offload];
        spread.extend(strategy.ends_with("hybrid_shard").then_some("sharding.shard_group=2"));
        let n = [1, 2, 4][row[RANKS]];
        let path = format!("tests/models/{model}/model.onnx");
        let losses = |batch: usize, settings: &[&str]| {
            let settings = [&common, settings].concat();
            let planned = plan_to_evaluate_configured(&path, batch, toml, &settings);
            let data = file(&format!("tests/models/{model}/data.safetensors"));
            let (steps, threads) = (CROSSED_STEPS, Some(1));
            let options = RunOptions { steps, data: data.into(), threads, ..RunOptions::default() };
            resumed_losses(&planned, options)
        };
        let (found, expected) = (losses(1, &spread), losses(n, &[]));
        assert_eq!(found.len(), 2 * CROSSED_STEPS, "{words:?}");
        let tolerance = if precision.ends_with("fp32") { 1e-4 } else { 1e-2 };
        let deviation = parity::largest(&found, &expected);
        assert!(deviation < tolerance, "{words:?}: {deviation}: {found:?} {expected:?}");
    }
}
