//! No model or configuration gives an internal error: the result is either a verified plan, or an error that says what
//! to change. The codes `V`, `P` and `B` are for bugs of the compiler.

use frit::compilation::{Request, compile};
use frit::config::Config;
use std::collections::BTreeSet;

/// Compiles a JSON model with its evaluation; the codes of the errors, with all that is said.
fn outcome(model: &str, settings: &[&str]) -> Result<(), (BTreeSet<String>, String)> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    std::fs::write(&path, model).expect("written");
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let result = Config::parse("", "", &settings).and_then(|config| {
        let request = Request { model: path, evaluation: true, ..Request::default() };
        compile(&request, &config, &mut ()).map(|_| ())
    });
    result.map_err(|report| {
        let codes = report.diagnostics.iter().map(|d| d.code.clone()).collect();
        (codes, report.to_string())
    })
}

/// A model with a batch of 2, its parts as JSON.
fn model(inputs: &str, params: &str, nodes: &str, outputs: &str) -> String {
    format!(
        r#"{{"frit_model": 1, "name": "m", "inputs": [{inputs}], "params": [{params}],
            "nodes": [{nodes}], "outputs": [{outputs}]}}"#
    )
}

const X: &str = r#"{"name": "x", "dtype": "f32", "shape": [2, 3]}"#;
const W: &str = r#"{"name": "w", "shape": [3], "init": "ones"}"#;
const XW: &str = r#"{"op": "mul", "inputs": ["x", "w"], "outputs": ["y"]}"#;

/// What takes part in almost every pass.
const CROSSINGS: [&[&str]; 5] = [
    &["precision.compute=fp32"],
    &["sharding.ranks=2", "run.accumulation=2", "sharding.prefetch=auto"],
    &[
        "sharding.ranks=2",
        "memory.recompute=selective",
        "memory.offload=parameters",
        "optimizer.ema=0.9",
    ],
    &[
        "sharding.ranks=2",
        "sharding.strategy=no_shard",
        "optimizer.kind=adafactor",
        "precision.fp8=true",
    ],
    &[
        "sharding.ranks=4",
        "sharding.strategy=hybrid_shard",
        "sharding.shard_group=2",
        "precision.compute=fp16",
        "memory.recompute=unit",
        "optimizer.decay=matrices",
    ],
];

/// The losses that a model's output `y` may have.
const LOSSES: [&str; 5] = ["mse", "cross_entropy", "kl", "output", "none"];

/// Every loss with half of the crossings is a plan, or one of these errors; at least one of it is a plan.
fn crosses(name: &str, model: &str, errors: &[&str]) {
    let mut plans = 0;
    for (i, crossing) in CROSSINGS.iter().enumerate() {
        for loss in LOSSES.iter().skip(i % 2).step_by(2) {
            let loss = format!("loss.kind={loss}");
            let settings = [&[loss.as_str(), "loss.logits=y"], *crossing].concat();
            match outcome(model, &settings) {
                Ok(()) => plans += 1,
                Err((codes, text)) => assert!(
                    codes.iter().all(|code| errors.contains(&code.as_str())),
                    "{name}, crossing {i}, {loss}: {text}"
                ),
            }
        }
    }
    assert!(plans > 0, "{name}: no plan");
}

/// The loss does not fit, or nothing trains.
const LOSS: [&str; 4] = ["E213", "E214", "E064", "E217"];

#[test]
fn two_outputs_of_one_name_are_refused_by_name() {
    for outputs in [r#""y", "y""#, r#""x", "y", "x""#] {
        for loss in LOSSES {
            let loss = format!("loss.kind={loss}");
            let found = outcome(&model(X, W, XW, outputs), &[&loss, "loss.logits=y"]);
            let (codes, text) = found.expect_err("two outputs");
            assert_eq!(codes, BTreeSet::from(["E019".to_string()]), "{text}");
            assert!(text.contains("twice") && text.contains("rename"), "{text}");
        }
    }
}

#[test]
fn reserved_names_are_refused_and_all_others_are_free() {
    let output = XW.replace("\"y\"", "\"frit.statistics\"");
    let settings = ["loss.kind=mse", "loss.logits=frit.statistics"];
    let (codes, _) = outcome(&model(X, W, &output, r#""frit.statistics""#), &settings).unwrap_err();
    assert_eq!(codes, BTreeSet::from(["E018".to_string()]));
    let examples = X.replace("\"x\"", "\"frit.examples\"");
    let mul = XW.replace("\"x\"", "\"frit.examples\"");
    let (codes, _) = outcome(&model(&examples, W, &mul, r#""y""#), &["loss.logits=y"]).unwrap_err();
    assert_eq!(codes, BTreeSet::from(["E018".to_string()]));
    let (weight, mul) =
        (W.replace("\"w\"", "\"__metadata__\""), XW.replace("\"w\"", "\"__metadata__\""));
    let (codes, _) = outcome(&model(X, &weight, &mul, r#""y""#), &["loss.logits=y"]).unwrap_err();
    assert_eq!(codes, BTreeSet::from(["E018".to_string()]));
    // Names of Frit's own state, hyper-parameters, metrics and outputs.
    for (more, (input, param, output)) in CROSSINGS.iter().zip([
        ("step", "loss_scale", "loss"),
        ("optimizer.lr", "step", "loss_sum"),
        ("loss_count", "adam_m.w", "grad_norm"),
        ("grad_sum.w", "frng", "w"),
        ("labels", "p", "labels"),
    ]) {
        let rename = |text: &str| {
            text.replace("\"x\"", &format!("\"{input}\""))
                .replace("\"w\"", &format!("\"{param}\""))
                .replace("\"y\"", &format!("\"{output} \""))
        };
        let renamed = rename(&model(X, W, XW, r#""y""#));
        let logits = format!("loss.logits=\"{output} \"");
        let settings = [&["loss.kind=mse", logits.as_str()], *more].concat();
        outcome(&renamed, &settings).unwrap_or_else(|(_, text)| panic!("{input}: {text}"));
    }
}

#[test]
fn parameters_without_elements_are_no_work() {
    let empty = r#"{"name": "w", "shape": [3], "init": "ones"}, {"name": "e", "shape": [0, 3], "init": "ones"}"#;
    let nodes = r#"{"op": "mul", "inputs": ["x", "w"], "outputs": ["h"]},
        {"op": "concat", "inputs": ["h", "e"], "outputs": ["y"], "attrs": {"axis": 0}}"#;
    crosses("empty beside others", &model(X, empty, nodes, r#""y""#), &LOSS);
    let only = r#"{"name": "e", "shape": [3, 0], "init": "ones"}"#;
    let nodes = r#"{"op": "matmul", "inputs": ["x", "e"], "outputs": ["h"]},
        {"op": "reduce", "inputs": ["h"], "outputs": ["y"], "attrs": {"f": "sum", "axes": [1]}}"#;
    crosses("nothing but empty ones", &model(X, only, nodes, r#""y""#), &LOSS);
}

#[test]
fn a_parameter_may_be_an_output() {
    let w = r#"{"name": "y", "shape": [1, 1], "init": "ones"}"#;
    crosses("one element", &model("", w, "", r#""y""#), &LOSS);
    let w = r#"{"name": "y", "shape": [2, 3], "init": "ones"}"#;
    crosses("several", &model("", w, "", r#""y""#), &LOSS);
}

#[test]
fn gradients_that_are_always_zero_train_nothing() {
    let constant = |splat: &str| {
        format!(
            r#"{{"op": "constant", "outputs": ["c"], "attrs": {{"ty": {{"dtype": "f32", "shape": []}}, "splat": {splat}}}}},
               {{"op": "mul", "inputs": ["x", "w"], "outputs": ["h"]}}"#
        )
    };
    let nodes = |op: &str, splat: &str, inputs: &str| {
        format!(r#"{}, {{"op": "{op}", "inputs": [{inputs}], "outputs": ["y"]}}"#, constant(splat))
    };
    for (op, splat, inputs) in [("pow", "0", r#""h", "c""#), ("min", "\"-inf\"", r#""h", "c""#)] {
        crosses(op, &model(X, W, &nodes(op, splat, inputs), r#""y""#), &LOSS);
    }
}

/// The gradient of what only counts by its mean, or its sum over an axis, is computed once and broadcast.
#[test]
fn gradients_that_are_the_same_along_an_axis() {
    let more = r#", {"name": "v", "shape": [2, 3], "init": "ones"}"#;
    for (axes, keep) in [("0, 1", false), ("0", false), ("1", true)] {
        for f in ["mean", "sum"] {
            let nodes = format!(
                r#"{XW}, {{"op": "reduce", "inputs": ["v"], "outputs": ["m"],
                    "attrs": {{"f": "{f}", "axes": [{axes}], "keep_dims": {keep}}}}},
                   {{"op": "add", "inputs": ["h", "m"], "outputs": ["y"]}}"#
            );
            let nodes = nodes.replacen(r#"["y"]"#, r#"["h"]"#, 1);
            crosses(axes, &model(X, &format!("{W}{more}"), &nodes, r#""y""#), &LOSS);
        }
    }
}

#[test]
fn indices_without_elements_need_no_range() {
    let ids = r#"{"name": "ids", "dtype": "i64", "shape": [2, 0]}"#;
    let w = r#"{"name": "w", "shape": [3, 4], "init": "ones"}"#;
    let nodes = r#"{"op": "embedding", "inputs": ["w", "ids"], "outputs": ["h"]},
        {"op": "reduce", "inputs": ["h"], "outputs": ["y"], "attrs": {"f": "sum", "axes": [1]}}"#;
    crosses("no indices", &model(ids, w, nodes, r#""y""#), &LOSS);
}

#[test]
fn one_class_has_a_cross_entropy() {
    let w = r#"{"name": "w", "shape": [3, 1], "init": "ones"}"#;
    let nodes = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["y"]}"#;
    crosses("one class", &model(X, w, nodes, r#""y""#), &LOSS);
    let x = X.replace("2, 3", "1, 3");
    crosses("one example of one class", &model(&x, w, nodes, r#""y""#), &LOSS);
}
