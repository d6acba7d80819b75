//! `docs/coverage.md`: which operations have a gradient and which kernels, determined from the passes, and which of
//! ONNX's tests pass, by the lists of `tests/conformance`. `UPDATE_EXPECT=1` writes it again.

use crate::conformance::{SETS, list};
use crate::support::file;
use expect_test::expect_file;
use frit::config::Config;
use frit::target::Backend;
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, FusionKind, Init, Input, LogicalFn, Op, Param, ParamKind,
    PredicateFn, Reduce, ReduceFn, UnaryFn,
};
use frit_ir::{DType, Graph, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use frit_passes::differentiate::Differentiate;
use frit_passes::{Pass, PassContext};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Whether an operation can be differentiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Gradient {
    /// Its results are no floats, or none of its operands is.
    NotAsked,
    /// It is flat almost everywhere.
    Zero,
    Yes,
    No,
}

impl Gradient {
    fn word(self) -> &'static str {
        match self {
            Gradient::NotAsked => "–",
            Gradient::Zero => "zero",
            Gradient::Yes => "yes",
            Gradient::No => "no",
        }
    }
}

/// What an operation has.
#[derive(Clone, Debug, PartialEq)]
struct Coverage {
    gradient: Gradient,
    cpu: &'static str,
    cuda: &'static str,
}

fn ty(text: &str) -> TensorType {
    let (dtype, dims) = text.split_once('[').expect("a type such as f32[2,3]");
    let dims = dims.trim_end_matches(']').split(',').filter(|d| !d.is_empty());
    let dims: Vec<usize> = dims.map(|d| d.parse().expect("a size")).collect();
    TensorType::new(dtype.parse::<DType>().expect("a dtype"), dims)
}

/// One use of each operation that models hold, with the types of its operands.
fn samples() -> Vec<(Op, Vec<TensorType>)> {
    let square = "f32[4,8]";
    let (q, image) = ("f32[2,4,8,16]", "f32[2,4,8,8]");
    let window = json!({"strides": [1, 1], "dilations": [1, 1], "low": [1, 1], "high": [1, 1]});
    let conv = json!({"window": window, "groups": 1});
    let pool = json!({"window": window, "taps": [3, 3]});
    let softmax = json!({"axis": 1});
    let norm = json!({"axis": 1, "eps": 1e-5});
    let listed: Vec<(&str, Value, Vec<&str>)> = vec![
        ("arg_reduce", json!({"axis": 1, "largest": true, "last": false}), vec![square]),
        ("attention", json!({"scale": 0.25, "causal": true}), vec![q, q, q]),
        ("batch_norm", json!({"eps": 1e-5}), vec![image, "f32[4]", "f32[4]"]),
        ("cast", json!({"to": "bf16"}), vec![square]),
        ("clip", json!({"min": 0.0, "max": 1.0}), vec![square]),
        ("concat", json!({"axis": 0}), vec![square, square]),
        ("conv", conv.clone(), vec![image, "f32[8,4,3,3]"]),
        (
            "conv_grad_input",
            json!({"window": window, "groups": 1, "size": [8, 8]}),
            vec!["f32[2,8,8,8]", "f32[8,4,3,3]"],
        ),
        ("cross_entropy", json!({"ignore_index": -100}), vec![square, "i64[4]"]),
        ("cum_sum", json!({"axis": 1, "exclusive": false, "reverse": false}), vec![square]),
        ("embedding", json!({}), vec![square, "i64[6]"]),
        ("expand", json!({"shape": [3, 4, 8]}), vec![square]),
        ("gather", json!({"axis": 0}), vec![square, "i64[6]"]),
        ("gather_elements", json!({"axis": 1}), vec![square, "i64[4,2]"]),
        ("gather_nd", json!({"batch_dims": 0}), vec![square, "i64[6,1]"]),
        ("layer_norm", norm.clone(), vec![square, "f32[8]", "f32[8]"]),
        ("log_softmax", softmax.clone(), vec![square]),
        ("matmul", json!({}), vec![square, "f32[8,16]"]),
        ("max_pool", pool.clone(), vec![image]),
        ("pad", json!({"low": [1, 0], "high": [0, 1], "value": 0.0}), vec![square]),
        (
            "random",
            json!({"f": "normal", "shape": [4, 8], "offset": 0.5, "scale": 2.0, "id": 0}),
            vec!["i64[5]"],
        ),
        ("random_mask", json!({"shape": [4, 8], "keep": 0.9, "id": 0}), vec!["i64[5]"]),
        ("reduce", json!({"f": "sum", "axes": [1], "keep_dims": false}), vec![square]),
        ("reshape", json!({"shape": [32]}), vec![square]),
        ("rms_norm", norm, vec![square, "f32[8]"]),
        ("scatter_elements", json!({"axis": 1, "f": "add"}), vec![square, "i64[4,2]", "f32[4,2]"]),
        ("scatter_nd", json!({"batch_dims": 0, "f": "add"}), vec![square, "i64[6,1]", "f32[6,8]"]),
        ("select", json!({}), vec!["bool[4,8]", square, square]),
        ("slice", json!({"start": [0, 1], "size": [4, 4], "step": [1, 1]}), vec![square]),
        ("softmax", softmax, vec![square]),
        ("split", json!({"axis": 1, "sizes": [2, 6]}), vec![square]),
        ("sum_pool", pool, vec![image]),
        ("sum_to", json!({"shape": [8]}), vec![square]),
        ("top_k", json!({"axis": 1, "k": 2, "largest": true}), vec![square]),
        ("transpose", json!({"perm": [1, 0]}), vec![square]),
    ];
    let mut samples = Vec::new();
    for (name, attributes, operands) in listed {
        let attributes = attributes.as_object().cloned().unwrap_or_default();
        let op = Op::from_parts(name, attributes).unwrap_or_else(|e| panic!("{name}: {e}"));
        samples.push((op, operands.into_iter().map(ty).collect()));
    }
    let float = || ty(square);
    for &f in UnaryFn::ALL {
        let operand = if f == UnaryFn::Not { ty("bool[4,8]") } else { float() };
        samples.push((Op::Unary(f), vec![operand]));
    }
    samples.extend(PredicateFn::ALL.iter().map(|f| (Op::Predicate(*f), vec![float()])));
    let integer = |f: BinaryFn| Op::Binary(f).infer(&[&float(), &float()]).is_err();
    for &f in BinaryFn::ALL {
        let operand = if integer(f) { ty("i64[4,8]") } else { float() };
        samples.push((Op::Binary(f), vec![operand.clone(), operand]));
    }
    samples.extend(CompareFn::ALL.iter().map(|f| (Op::Compare(*f), vec![float(), float()])));
    let flags = || ty("bool[4,8]");
    samples.extend(LogicalFn::ALL.iter().map(|f| (Op::Logical(*f), vec![flags(), flags()])));
    samples
}

fn add(g: &mut Graph, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
    g.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
}

/// The operation as the body of a kernel.
fn body(op: &Op, operands: &[TensorType]) -> Graph {
    let mut g = Graph::new("kernel");
    let mut inputs = Vec::new();
    for (i, ty) in operands.iter().enumerate() {
        let input = Op::Input(Input { name: i.to_string(), ty: ty.clone() });
        inputs.push(add(&mut g, input, &[])[0]);
    }
    for (i, result) in add(&mut g, op.clone(), &inputs).into_iter().enumerate() {
        g.add_output(&i.to_string(), result, OutputKind::Result);
    }
    g
}

/// Whether the operation's first result can be differentiated for a float operand.
fn gradient(op: &Op, operands: &[TensorType]) -> Gradient {
    let mut g = Graph::new("g");
    let mut inputs = Vec::new();
    for (i, ty) in operands.iter().enumerate() {
        let name = format!("p{i}");
        let leaf = if ty.dtype.is_float() {
            let (kind, init) = (ParamKind::Trainable, Init::Weights);
            let (reason, unit) = (String::new(), None);
            let (held, sharded) = (None, false);
            Op::Param(Param { name, ty: ty.clone(), kind, reason, init, held, unit, sharded })
        } else {
            Op::Input(Input { name, ty: ty.clone() })
        };
        inputs.push(add(&mut g, leaf, &[])[0]);
    }
    let y = add(&mut g, op.clone(), &inputs)[0];
    let result = g.ty(y).clone();
    if !result.dtype.is_float() || operands.iter().all(|t| !t.dtype.is_float()) {
        return Gradient::NotAsked;
    }
    let axes = (0..result.shape.rank()).collect();
    let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes, keep_dims: false });
    let loss = add(&mut g, sum, &[y])[0];
    let count = frit_ir::ops::Constant { value: Tensor::scalar(1.0) };
    let count = add(&mut g, Op::Constant(count), &[])[0];
    g.add_output("loss", loss, OutputKind::LossSum);
    g.add_output("count", count, OutputKind::LossCount);
    let pass = Differentiate { accumulation: 1, capacity: 1.0 };
    let found = pass.run(&mut g, &mut PassContext::default());
    match (found.is_ok(), g.outputs.iter().any(|o| o.kind == OutputKind::Gradient)) {
        (true, true) => Gradient::Yes,
        (true, false) => Gradient::Zero,
        (false, _) => Gradient::No,
    }
}

/// The kernel that executes a body; `fallback` where there is none.
fn kernel(backend: &Backend, body: &Graph, fallback: &'static str) -> &'static str {
    let kinds = [FusionKind::Pointwise, FusionKind::RowReduce, FusionKind::ColReduce];
    if kinds.iter().any(|kind| (backend.generates())(body, *kind)) {
        "compiled"
    } else if (backend.has_library_kernel())(body) {
        "library"
    } else {
        fallback
    }
}

fn config(settings: &[&str]) -> Config {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"))
}

/// The names of all operations in the page.
pub(crate) fn operations() -> BTreeSet<String> {
    let samples = samples().into_iter().map(|(op, _)| op.name().to_string());
    samples.filter(|name| !name.ends_with("_grad")).collect()
}

fn table() -> BTreeMap<String, Coverage> {
    let cpu = Backend::of(&config(&["target.arch=x86-64-v3"])).expect("a CPU");
    let cuda = Backend::of(&config(&["target.device=cuda"])).expect("a GPU");
    let cover = |(op, operands): (Op, Vec<TensorType>)| {
        let body = body(&op, &operands);
        // Another view of the same bytes.
        let free = matches!(op, Op::Reshape(_));
        let coverage = Coverage {
            gradient: gradient(&op, &operands),
            cpu: if free { "free" } else { kernel(&cpu, &body, "interpreter") },
            cuda: if free { "free" } else { kernel(&cuda, &body, "none") },
        };
        (op.name().to_string(), coverage)
    };
    // Gradients of functions are asked for by the gradient itself.
    samples().into_iter().filter(|(op, _)| !op.name().ends_with("_grad")).map(cover).collect()
}

/// One line per operator of `tests/conformance/operators.txt`: name, tests that pass, tests in scope, and
/// the operations it becomes.
fn operators() -> Vec<(String, usize, usize, Vec<String>)> {
    let text = std::fs::read_to_string(file("tests/conformance/operators.txt")).expect("operators");
    text.lines()
        .map(|line| {
            let (name, rest) = line.split_once(": ").expect("a line such as `Abs: 2/2 abs`");
            let mut words = rest.split(' ').filter(|w| !w.is_empty());
            let (passed, all) = words.next().and_then(|w| w.split_once('/')).expect("counts");
            let ops = words.map(str::to_string).collect();
            (name.into(), passed.parse().expect("a count"), all.parse().expect("a count"), ops)
        })
        .collect()
}

/// What an ONNX operator has: what all the operations that it becomes have.
fn joined(ops: &[String], table: &BTreeMap<String, Coverage>) -> (String, String, String) {
    let known: Vec<&Coverage> = ops.iter().filter_map(|name| table.get(name)).collect();
    let gradient = known.iter().map(|c| c.gradient).max().unwrap_or(Gradient::NotAsked).word();
    let all = |kernels: BTreeSet<&'static str>| -> String {
        let others: Vec<&str> = kernels.iter().copied().filter(|k| *k != "free").collect();
        match (ops.is_empty(), others.is_empty()) {
            (true, _) => "computed at import".into(),
            (_, true) => "free".into(),
            _ if others.contains(&"none") => "none".into(),
            _ => others.join(", "),
        }
    };
    let cpu = all(known.iter().map(|c| c.cpu).collect());
    let cuda = all(known.iter().map(|c| c.cuda).collect());
    (gradient.into(), cpu, cuda)
}

fn page() -> String {
    let table = table();
    let mut text = String::from(
        "# Coverage\n\n\
         Generated by a test from the passes, the code generator, the kernel libraries, and\n\
         the lists in `tests/conformance` (`UPDATE_EXPECT=1 cargo test coverage` regenerates it).\n\n\
         ## ONNX's backend tests\n\n\
         The tests of the wheel `onnx==1.22.0`, imported and evaluated; `make test` fetches them. Tests out of\n\
         scope are listed with the reason in `tests/conformance/<set>/out_of_scope.txt`.\n\n\
         | set | tests | in scope | pass | open |\n|---|---|---|---|---|\n",
    );
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for (set, n) in SETS {
        let out = list(set, "out_of_scope.txt");
        out.values().for_each(|reason| *reasons.entry(reason.clone()).or_default() += 1);
        let (passes, open) = (list(set, "passes.txt").len(), list(set, "open.txt").len());
        let inside = n - out.len();
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {set} | {n} | {inside} | {passes} | {open} |");
    }
    text += "\n| reason for being out of scope | tests |\n|---|---|\n";
    let mut reasons: Vec<(String, usize)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(reason, n)| (std::cmp::Reverse(*n), reason.clone()));
    for (reason, n) in reasons {
        let _ = writeln!(text, "| {reason} | {n} |");
    }
    text += "\n## ONNX operators\n\n\
             Tests are those of the operator alone. Operators become the operations of the next table; a gradient\n\
             is there if all of these have one, and `none` for CUDA means that one of them has no kernel there yet.\n\n\
             | operator | tests passing | gradient | CPU | CUDA |\n|---|---|---|---|---|\n";
    for (name, passed, all, ops) in operators() {
        let (gradient, cpu, cuda) = match passed {
            0 => ("–".into(), "not read".into(), "not read".into()),
            _ => joined(&ops, &table),
        };
        let _ = writeln!(text, "| {name} | {passed} of {all} | {gradient} | {cpu} | {cuda} |");
    }
    text += "\n## Operations\n\n\
             `compiled`: generated through MLIR, fused with its neighbors; `library`: a hand-written kernel;\n\
             `interpreter`: the reference interpreter executes it; for f32 operands.\n\n\
             | operation | gradient | CPU | CUDA |\n|---|---|---|---|\n";
    for (name, c) in &table {
        let _ = writeln!(text, "| {name} | {} | {} | {} |", c.gradient.word(), c.cpu, c.cuda);
    }
    text
}

#[test]
fn the_page_is_what_the_program_says() {
    expect_file![file("docs/coverage.md")].assert_eq(&page());
}

#[test]
fn every_operation_of_models_is_in_the_table() {
    // Leaves, exchange between ranks, the update, rounding to fp8, gradients of other operations, and boundaries of functions.
    let others = |name: &str| {
        name.contains("_grad")
            || [
                "adafactor",
                "all_gather",
                "all_reduce",
                "by_param_group",
                "constant",
                "cotangent",
                "ema_step",
                "enter_precision",
                "grad_stats",
                "hyper",
                "muon_momentum",
                "muon_step",
                "input",
                "learning_rate",
                "leave_precision",
                "loss_scale",
                "optimizer_step",
                "param",
                "quantize",
                "reduce_scatter",
                "round_stats",
                "scaled_cast",
                "state",
                "tree_sum",
                "unscale",
                "update_loss_scale",
                "update_step",
            ]
            .contains(&name)
    };
    let table = table();
    let missing: Vec<&str> =
        Op::names().into_iter().filter(|n| !others(n) && !table.contains_key(*n)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    // The columns say something: each value occurs.
    for wanted in ["compiled", "library"] {
        assert!(table.values().any(|c| c.cpu == wanted), "{wanted}");
    }
    assert!(table.values().any(|c| c.gradient == Gradient::Yes));
}

/// The dtypes that plans compute in.
const DTYPES: [DType; 7] = {
    use DType::*;
    [F32, F16, BF16, I64, I32, U8, Bool]
};

#[test]
fn every_operation_has_a_cuda_kernel_for_every_dtype_that_it_takes() {
    let cuda = Backend::of(&config(&["target.device=cuda"])).expect("a GPU");
    let mut uses = samples();
    for f in [ReduceFn::Sum, ReduceFn::Mean, ReduceFn::Prod, ReduceFn::Max, ReduceFn::Min] {
        for axes in [vec![1], vec![0], vec![0, 1]] {
            let op = Op::Reduce(Reduce { f, axes, keep_dims: false });
            uses.push((op, vec![ty("f32[4,8]")]));
        }
    }
    uses.extend(DTYPES.map(|to| (Op::Cast(Cast { to }), vec![ty("f32[4,8]")])));
    let mut missing = Vec::new();
    for (op, operands) in uses {
        for dtype in DTYPES {
            // Operands of the first one's dtype change together; indices and parameters stay.
            let same = |t: &TensorType| t.dtype == operands[0].dtype && t.shape.rank() > 1;
            let operands: Vec<TensorType> = operands
                .iter()
                .map(|t| TensorType::new(if same(t) { dtype } else { t.dtype }, t.shape.clone()))
                .collect();
            let free = matches!(op, Op::Reshape(_));
            if free || op.infer(&operands.iter().collect::<Vec<_>>()).is_err() {
                continue;
            }
            if kernel(&cuda, &body(&op, &operands), "none") == "none" {
                missing.push(format!("{} of {operands:?}", op.name()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
