//! Functions that name their gradients: PyTorch's numbers, and every other option beside them.

use crate::pairs::{Row, rows};
use crate::parity;
use crate::support::{
    Planned, compile_at, file, plan, plan_to_evaluate, plan_to_evaluate_at, resumed_losses, train,
};
use frit::commands::{Cli, execute};
use frit_ir::Op;
use frit_runtime::run::RunOptions;
use std::path::{Path, PathBuf};

const ONNX: &str = "tests/models/custom_gradients/model.onnx";
const JSON: &str = "tests/models/custom_gradients/model.json";
const DATA: &str = "tests/models/custom_gradients/data.safetensors";
/// Rows of a step.
const BATCH: usize = 6;

#[test]
fn losses_and_gradients_are_pytorchs() {
    let exact = parity::reference("custom_gradients", "fp64");
    // Neither the loss scale nor what is done with values in between is seen by a gradient function.
    for more in [
        &[][..],
        &["precision.loss_scale=1024"],
        &["precision.loss_scale=dynamic", "precision.init_scale=65536"],
        &["memory.recompute=unit", "memory.offload=parameters"],
    ] {
        let settings = [&["precision.compute=fp32", "optimizer.lr=0.01"], more].concat();
        let planned = plan(ONNX, BATCH, &settings);
        let losses = train(&planned, DATA, 20, false).losses;
        let deviation = parity::largest(&losses, &exact);
        assert!(deviation < 1e-5, "{more:?}: losses deviate by {deviation}: {losses:?}");
        let error = parity::gradient_error(&planned, "custom_gradients");
        assert!(error < 1e-5, "{more:?}: gradients deviate by {error}");
    }
}

#[test]
fn low_precision_stays_close_and_a_stated_precision_holds() {
    let exact = parity::reference("custom_gradients", "fp64");
    for compute in ["bf16", "fp16"] {
        let settings = [&format!("precision.compute={compute}"), "optimizer.lr=0.01"];
        let planned = plan(ONNX, BATCH, &settings);
        let losses = train(&planned, DATA, 20, false).losses;
        assert!(parity::mean(&losses, &exact) < 0.1, "{compute}: {losses:?}");
        // Both directions of `log1pexp` run in f32.
        let kernels = &planned.compiled.plan.kernels;
        let nodes = kernels.iter().flat_map(|k| k.body.nodes().map(move |(_, n)| (&k.body, n)));
        let mut seen = 0;
        for (body, node) in nodes {
            let name = node.op.name();
            // No other function has one of these.
            if matches!(name, "exp" | "sigmoid") {
                assert_eq!(body.ty(node.inputs[0]).dtype.name(), "f32", "{name}");
                seen += 1;
            }
        }
        assert!(seen > 0, "neither is there");
    }
}

#[test]
fn a_plan_has_no_boundaries_and_its_evaluation_no_gradient_functions() {
    let planned = plan_to_evaluate(ONNX, BATCH, &["precision.compute=bf16"]);
    let evaluation = planned.compiled.evaluation.as_ref().expect("an evaluation");
    for (plan, trains) in [(&planned.compiled.plan, true), (&evaluation.plan, false)] {
        let ops = || plan.kernels.iter().flat_map(|k| k.body.nodes().map(|(_, n)| &n.op));
        let is_boundary = |op: &Op| {
            matches!(
                op,
                Op::CustomGradient(_)
                    | Op::Cotangent(_)
                    | Op::EnterPrecision(_)
                    | Op::LeavePrecision(_)
            )
        };
        assert!(!ops().any(is_boundary));
        assert_eq!(ops().any(|op| matches!(op, Op::Clip(_))), trains);
    }
}

/// What is crossed: of each, settings.
const FACTORS: [&[&str]; 8] = [
    &[JSON, ONNX],
    &["sharding.ranks=1", "sharding.ranks=2", "sharding.ranks=3"],
    &["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"],
    &["run.accumulation=1", "run.accumulation=2"],
    &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
    &["memory.offload=none", "memory.offload=optimizer", "memory.offload=parameters"],
    &["precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp16"],
    &["adapter.kind=none", "adapter.kind=lora"],
];
const MODEL: usize = 0;
const RANKS: usize = 1;
const STRATEGY: usize = 2;
const ACCUMULATION: usize = 3;
const PRECISION: usize = 6;
const ADAPTER: usize = 7;
const STEPS: usize = 3;

/// The clipping of cotangents in the ONNX model depends on how many rows a rank has, as in PyTorch.
fn is_possible(row: &Row) -> bool {
    row[MODEL].is_none_or(|m| FACTORS[MODEL][m] == JSON) || row[RANKS].is_none_or(|r| r == 0)
}

/// Losses and validation losses of a run that is resumed.
fn losses(planned: &Planned) -> Vec<f64> {
    let data = file(DATA).into();
    let options = RunOptions { steps: STEPS, data, threads: Some(1), ..RunOptions::default() };
    resumed_losses(planned, options)
}

#[test]
fn losses_are_those_of_one_rank_whatever_custom_gradients_are_crossed_with() {
    let rows = rows(&FACTORS, is_possible);
    assert!((12..=30).contains(&rows.len()), "{} rows", rows.len());
    for row in rows {
        let words: Vec<&str> = row.iter().zip(FACTORS).map(|(level, f)| f[*level]).collect();
        // With a larger scale, ranks of few rows overflow where one rank does not.
        let scale = "precision.init_scale=64";
        let mut own =
            vec!["optimizer.lr=0.01", scale, words[ACCUMULATION], words[PRECISION], words[ADAPTER]];
        if words[ADAPTER].ends_with("lora") {
            own.extend(["adapter.rank=2", "adapter.targets=[\"fc4\", \"fc1\"]"]);
        }
        let ranks = row[RANKS] + 1;
        let strategy = format!("sharding.strategy={}", words[STRATEGY]);
        let all = [&own[..], &[words[RANKS], words[4], words[5], &strategy]].concat();
        let spread = plan_to_evaluate(words[MODEL], 2, &all);
        let alone = plan_to_evaluate(words[MODEL], 2 * ranks, &own);
        let (found, expected) = (losses(&spread), losses(&alone));
        assert_eq!(found.len(), 2 * STEPS, "{words:?}");
        // Rounding to a grid amplifies what low precision rounds.
        let tolerance = if words[PRECISION].ends_with("fp32") { 1e-5 } else { 5e-2 };
        let deviation = parity::largest(&found, &expected);
        assert!(deviation < tolerance, "{words:?}: {deviation}: {found:?} {expected:?}");
    }
}

#[test]
fn an_adapter_never_replaces_what_a_gradient_function_reads() {
    // The weights of `product` are read by its gradient function, which knows no adapter.
    let targets = ["adapter.kind=lora", "adapter.targets=[\"**\"]"];
    let plan = compile_at(&file(JSON), 2, &targets).plan;
    let changed = plan.params.iter_enumerated().filter(|(i, _)| plan.is_changed(*i));
    let names: Vec<&str> = changed.map(|(_, p)| p.name.as_str()).collect();
    assert!(names.contains(&"fc1.lora_A.weight") && names.contains(&"fc4.lora_B.weight"));
    assert!(names.iter().all(|name| !name.starts_with("h.")), "{names:?}");
}

fn written(dir: &Path, edit: impl Fn(&str) -> String) -> PathBuf {
    let path = dir.join("model.json");
    let text = std::fs::read_to_string(file(JSON)).expect("it is there");
    std::fs::write(&path, edit(&text)).expect("written");
    path
}

/// Output, or code and messages.
fn check(model: &Path, more: &[&str]) -> Result<String, (u8, String)> {
    use clap::Parser;
    let given = ["frit", "check-gradients", model.to_str().expect("text"), "--bind", "batch=2"];
    let cli = Cli::try_parse_from(given.iter().chain(more)).expect("arguments");
    execute(&cli)
        .map_err(|report| (report.exit_code(), format!("{} {report}", report.diagnostics[0].code)))
}

#[test]
fn gradients_are_checked_against_finite_differences() {
    let dir = tempfile::tempdir().expect("a directory");
    // Estimators and reversals are meant to differ; what is a derivative agrees.
    for model in [ONNX, JSON] {
        let (code, text) = check(&file(model), &[]).expect_err("estimators");
        assert!(code == 1 && text.contains("E108"), "{code}: {text}");
        let of = |name: &str, word: &str| {
            let line = |l: &&str| l.contains(name) && l.trim_end().ends_with(word);
            text.lines().filter(line).count()
        };
        assert!(of("round_to", "differs") > 0 && of("reverse", "differs") > 0, "{text}");
        assert!(of("log1pexp", "agrees") > 0 && of("log1pexp", "differs") == 0, "{text}");
    }
    // Only the derivatives.
    let honest = |text: &str| {
        text.replace(", \"gradient\": \"straight_through\"", "")
            .replace(", \"gradient\": \"reversed\"", "")
    };
    let text = check(&written(dir.path(), honest), &[]).unwrap_or_else(|(_, e)| panic!("{e}"));
    assert!(text.contains("product") && !text.contains("differs"), "{text}");
    // A sign is a mistake that is found.
    let wrong = |text: &str| honest(text).replace("\"op\": \"sigmoid\"", "\"op\": \"tanh\"");
    let (code, text) = check(&written(dir.path(), wrong), &[]).expect_err("a mistake");
    let line = text.lines().find(|l| l.contains("log1pexp")).expect("its line");
    assert!(code == 1 && line.trim_end().ends_with("differs"), "{text}");
    let none = check(&file("examples/digits_mlp/model.json"), &[]).expect("nothing to check");
    assert!(none.contains("no function"), "{none}");
}

#[test]
fn gradients_of_json_functions_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let refused = |from: &str, to: &str| {
        let path = written(dir.path(), |text| {
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1)
        });
        let (code, text) = check(&path, &[]).expect_err(to);
        assert_eq!(code, 2, "{text}");
        text
    };
    for (from, to, parts) in [
        (
            "\"gradient\": \"reversed\"",
            "\"gradient\": \"revered\"",
            &["E062", "no function `revered`", "reversed"][..],
        ),
        (
            "[\"x\", \"y\", \"dy\"], \"outputs\": [\"dx\"], \"attrs\": { \"factor\"",
            "[\"x\", \"dy\"], \"outputs\": [\"dx\"], \"attrs\": { \"factor\"",
            &["E062", "has 2 inputs", "it is given 3"],
        ),
        (
            "\"outputs\": [\"dx\", \"dw\"]",
            "\"outputs\": [\"dw\", \"dx\"]",
            &["E062", "result 0 of `product_grad` is f32[16, 16]"],
        ),
        ("\"precision\": \"f32\"", "\"precision\": \"f8\"", &["E065", "`f8`"]),
        ("\"call\": \"log1pexp\"", "\"call\": \"softplus\"", &["E041", "no function `softplus`"]),
        ("\"call\": \"product\"", "\"call\": \"block\"", &["E041", "`block` calls itself"]),
        ("{ \"limit\": 1e9 }", "{ \"limits\": 1e9 }", &["E041", "no attribute `limits`"]),
        ("{ \"attr\": \"limit\" }", "{ \"attr\": \"bound\" }", &["E041", "no attribute `bound`"]),
        (
            "\"inputs\": [\"h\", \"weight\"]",
            "\"inputs\": [\"h\"]",
            &["E041", "`block` has 2 inputs, but 1 are given"],
        ),
    ] {
        let text = refused(from, to);
        for part in parts {
            assert!(text.contains(part), "`{part}` is not in {text}");
        }
    }
}

#[test]
fn a_function_in_bf16_is_no_function_in_eight_bits() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = written(dir.path(), |text| {
        text.replace(
            "\"gradient\": \"product_grad\"",
            "\"gradient\": \"product_grad\", \"precision\": \"bf16\"",
        )
    });
    // With everything else in f32, and against a compute dtype that is another.
    let planned = plan_to_evaluate_at(&path, 2, &["precision.compute=fp32"]);
    let products = planned.compiled.plan.kernels.iter().flat_map(|k| k.body.nodes());
    let low = products.filter(|(_, n)| matches!(n.op, Op::MatMul(_))).count();
    assert!(low > 0 && losses(&planned).iter().all(|loss| loss.is_finite()));
    let settings = ["precision.compute=fp16".to_string()];
    let config = frit::config::Config::parse("", "train.toml", &settings).expect("valid");
    let request = frit::compilation::Request {
        model: path,
        binds: [("batch".to_string(), 2)].into(),
        ..Default::default()
    };
    let report = frit::compilation::compile(&request, &config, &mut ()).expect_err("refused");
    assert_eq!(report.diagnostics[0].code, "E220");
}
