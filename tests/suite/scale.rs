//! The work of a compilation is linear in the number of blocks, and work that identical blocks share is done once.
//! Times are in docs/performance.md.

use crate::support::file;
use frit::compilation::{Compiled, Request, compile};
use frit::config::Config;
use frit::diagnostics::Report;
use frit_ir::Op;
use frit_ir::plan::Plan;

fn plan(layers: usize) -> Plan {
    let settings = ["sharding.ranks=64", "memory.recompute=unit", "target.device=cuda"];
    let config = Config::load(None, &settings.map(String::from)).unwrap_or_else(|e| panic!("{e}"));
    let sizes = [("batch", 1), ("layers", layers), ("width", 256), ("heads", 2), ("kv_heads", 1)];
    let more = [("ffn", 512), ("vocab", 1024), ("seq", 128)];
    let request = Request {
        model: file("examples/llama/model.json"),
        binds: sizes.into_iter().chain(more).map(|(name, n)| (name.to_string(), n)).collect(),
        ..Request::default()
    };
    let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{e}"));
    compiled.expect("no pass was asked to stop").plan
}

/// The number before these words in the report of a pass.
fn reported(plan: &Plan, pass: &str, words: &str) -> usize {
    let reports = plan.reports.iter().filter(|r| r.pass == pass).flat_map(|r| &r.remarks);
    let mut numbers = reports.filter_map(|(text, _)| text.strip_suffix(words)?.trim().parse().ok());
    numbers.next().unwrap_or_else(|| panic!("{pass} reports no number of {words}"))
}

#[test]
fn work_grows_with_the_number_of_blocks_and_no_faster() {
    // With more blocks the statistics of all flat groups are no single sum.
    let [three, six, twelve] = [3, 6, 12].map(plan);
    // Every block adds the same.
    let grows = |of: fn(&Plan) -> usize| {
        let (first, second) = (of(&six) - of(&three), of(&twelve) - of(&six));
        // Launches for several flat groups each, steps and casts, are rounded up.
        assert!(second.abs_diff(2 * first) <= 4, "{first}, then {second}");
    };
    grows(|p| p.tasks.len());
    grows(|p| p.buffers.iter().filter(|b| b.bytes > 0).count());
    grows(|p| p.tasks.iter().map(|t| t.waits.len()).sum());
    // Kernels are compiled once, but those of several flat groups, full launches and the last; windows of one form are solved
    // once.
    let (few, many) = (six.kernels.len(), twelve.kernels.len());
    assert!(many <= few + 2, "{few}, then {many}");
    let solved = |plan: &Plan| reported(plan, "simplify", "of them differ");
    assert_eq!(solved(&twelve), solved(&six));
    assert!(solved(&six) < six.tasks.len() / 4);
}

/// Compiles a JSON model of one input `x`, one parameter `w` and these nodes up to machine code.
fn proved(shape: &str, nodes: &str, settings: &[&str]) -> Result<Compiled, Report> {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    let text = format!(
        r#"{{"frit_model": 1, "name": "m", "inputs": [{{"name": "x", "dtype": "f32", "shape": {shape}}}],
            "params": [{{"name": "w", "shape": {shape}, "init": "ones"}}], "nodes": [{nodes}], "outputs": ["y"]}}"#
    );
    std::fs::write(&model, text).expect("written");
    let sets: Vec<String> =
        ["loss.kind=mse"].iter().chain(settings).map(|s| s.to_string()).collect();
    let config = Config::load(None, &sets)?;
    let request = Request { model, evaluation: true, without_code: true, ..Request::default() };
    Ok(compile(&request, &config, &mut ())?.expect("no pass was asked to stop"))
}

/// A block that reads its value `h` twice, repeated: there are 2^60 ways from its end to its beginning.
fn doubled(first: &str, op: &str, last: &str) -> String {
    let twice = format!(r#"{{"op": "{op}", "inputs": ["h", "h"], "outputs": ["h"]}}"#);
    format!(r#"{first}, {{"repeat": 60, "carry": ["h"], "nodes": [{twice}]}}, {last}"#)
}

#[test]
fn what_is_read_twice_is_looked_at_once() {
    let product = r#"{"op": "mul", "inputs": ["x", "w"], "outputs": ["h"]}"#;
    let softmax = r#"{"op": "softmax", "attrs": {"axis": 1}, "inputs": ["h"], "outputs": ["y"]}"#;
    let tanh = r#"{"op": "tanh", "inputs": ["h"], "outputs": ["y"]}"#;
    let mut cases = Vec::new();
    for op in ["add", "mul", "sub", "max", "div"] {
        cases.extend([softmax, tanh].map(|last| doubled(product, op, last)));
    }
    // Scores under a mask that is made of itself.
    let compared = r#"{"op": "gt", "inputs": ["x", "w"], "outputs": ["h"]}"#;
    let masked = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["m"]},
        {"op": "constant", "outputs": ["low"], "attrs": {"ty": {"dtype": "f32", "shape": []}, "splat": "-inf"}},
        {"op": "select", "inputs": ["h", "m", "low"], "outputs": ["s"]},
        {"op": "softmax", "attrs": {"axis": 1}, "inputs": ["s"], "outputs": ["y"]}"#;
    cases.extend(["and", "or", "xor"].map(|op| doubled(compared, op, masked)));
    for case in cases {
        for settings in
            [&["precision.compute=fp32"][..], &["memory.recompute=selective", "precision.fp8=true"]]
        {
            proved("[4, 4]", &case, settings).unwrap_or_else(|e| panic!("{case}: {e}"));
        }
    }
}

/// Of a value with many parts that nothing reads, the gradient is zero where it does not matter: there is one zero.
#[test]
fn zeros_of_gradients_are_not_stored() {
    let nodes = r#"{"op": "mul", "inputs": ["x", "w"], "outputs": ["h"]},
        {"op": "split", "attrs": {"axis": 1, "sizes": [8, 4096]}, "inputs": ["h"], "outputs": ["y", "_"]}"#;
    let plan = proved("[8, 4104]", nodes, &["precision.compute=fp32"])
        .unwrap_or_else(|e| panic!("{e}"))
        .plan;
    let stored =
        plan.kernels.iter().flat_map(|k| k.body.nodes()).filter_map(|(_, n)| match &n.op {
            Op::Constant(c) => Some(c.value.numel()),
            _ => None,
        });
    let stored = stored.max().unwrap_or_default();
    let of_plan = plan.constants.iter().map(|c| c.ty.shape.numel()).max().unwrap_or_default();
    assert!(stored < 4096 && of_plan < 4096, "{stored} and {of_plan} elements are stored");
}

/// As many nodes in a row as an import may make.
#[test]
fn long_chains_are_compiled() {
    for (op, inputs) in [("tanh", r#""y""#), ("add", r#""y", "w""#)] {
        let nodes = format!(
            r#"{{"op": "mul", "inputs": ["x", "w"], "outputs": ["y"]}},
               {{"repeat": 2000, "carry": ["y"], "nodes": [{{"op": "{op}", "inputs": [{inputs}], "outputs": ["y"]}}]}}"#
        );
        proved("[4, 4]", &nodes, &[]).unwrap_or_else(|e| panic!("{op}: {e}"));
    }
}
