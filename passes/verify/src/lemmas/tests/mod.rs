//! Each lemma against the interpreter: its term is evaluated at every index, for operations drawn at random.

mod cases;
mod collectives;
mod evaluate;

use super::{Operand, linear_in, results};
use crate::gradient::tests::cases::cases as differentiable;
use crate::gradient::tests::draw::{Case, Kind};
use crate::gradient::tests::{add, param};
use crate::reading::{Ranks, Reading, key_of_leaf};
use crate::term::{Definition, Term, Terms};
use evaluate::{Leaf, Numbers, Values};
use frit_ir::interpret::{Options, run};
use frit_ir::ops::*;
use frit_ir::{DType, Graph, OutputKind, Tensor, TensorData, TensorType};
use std::collections::{BTreeSet, HashMap};

/// How the operands of a case are given.
#[derive(Clone, Debug, PartialEq)]
enum Given {
    /// As leaves.
    Alone,
    /// Integers as constants, of which the lemma knows the elements.
    Known,
    /// As slices of larger leaves, so that what is outside of an operand has elements.
    Sliced(Box<Given>),
    /// As concatenations of two leaves.
    Joined,
    /// These operands times one factor.
    Scaled(Vec<usize>),
}

/// How far the terms of a graph may be from its results, relatively.
const ROUNDING: f64 = 1e-9;

/// All cases, with the operands that gradients are tested with and others.
fn cases() -> Vec<Case> {
    let exact = |case: &Case| {
        let types = case.operands.iter().map(|(x, _)| x.dtype());
        types.filter(|d| d.is_float()).all(|d| d == DType::F64)
    };
    let seeds = || 0..3;
    let drawn = seeds().flat_map(differentiable).filter(exact);
    drawn.chain(seeds().flat_map(cases::cases)).collect()
}

/// The ways to give operands to a case.
fn ways(case: &Case) -> Vec<Given> {
    let integers = || case.operands.iter().filter(|(x, _)| !x.dtype().is_float());
    let mut ways = vec![Given::Alone];
    if integers().next().is_some() {
        ways.push(Given::Known);
        ways.push(Given::Sliced(Box::new(Given::Known)));
    }
    // Indices that are not known are assumed to be in range.
    if integers().all(|(x, _)| x.to_i64s().iter().all(|ix| *ix >= 0)) {
        ways.push(Given::Sliced(Box::new(Given::Alone)));
        // A choice between scores is a sum of them, in which what is excluded by its size overflows.
        let small = |x: &Tensor| x.to_f64s().into_iter().all(|x| x.abs() < 100.0);
        if case.operands.iter().all(|(x, _)| small(x)) {
            ways.push(Given::Joined);
        }
    }
    for group in linear_in(&case.op, case.operands.len()) {
        let floats = group.iter().all(|k| case.operands[*k].0.dtype().is_float());
        if floats && !group.is_empty() {
            ways.push(Given::Scaled(group));
        }
    }
    ways
}

/// A tensor with another row before the first.
fn with_a_row(x: &Tensor) -> Tensor {
    let mut sizes = x.shape().dims().to_vec();
    let row: usize = sizes[1..].iter().product();
    sizes[0] += 1;
    let ty = TensorType::new(x.dtype(), sizes);
    let data = match x.dtype().is_float() {
        true => TensorData::Float([vec![1.375; row], x.to_f64s()].concat()),
        false => TensorData::Int([vec![1; row], x.to_i64s()].concat()),
    };
    Tensor::exact(ty, data)
}

/// The first rows of a tensor, and the others.
fn halves(x: &Tensor) -> [Tensor; 2] {
    let sizes = x.shape().dims();
    let first = sizes[0] / 2;
    let row: usize = sizes[1..].iter().product();
    [0..first, first..sizes[0]].map(|rows| {
        let ty = TensorType::new(x.dtype(), [&[rows.len()], &sizes[1..]].concat());
        let part = rows.start * row..rows.end * row;
        let data = match x.dtype().is_float() {
            true => TensorData::Float(x.to_f64s()[part].to_vec()),
            false => TensorData::Int(x.to_i64s()[part].to_vec()),
        };
        Tensor::exact(ty, data)
    })
}

/// The graph of a case and the values of its leaves.
fn graph_of(case: &Case, given: &Given) -> (Graph, HashMap<String, Tensor>) {
    let (mut g, mut feeds) = (Graph::new("g"), HashMap::new());
    let (sliced, way) = match given {
        Given::Sliced(way) => (true, &**way),
        way => (false, way),
    };
    let mut operands = vec![];
    for (i, (x, kind)) in case.operands.iter().enumerate() {
        let known = *way == Given::Known && !x.dtype().is_float();
        if *kind == Kind::Constant || known {
            operands.push(add(&mut g, Op::Constant(Constant { value: x.clone() }), &[])[0]);
            continue;
        }
        let name = format!("x{i}");
        let sizes = x.shape().dims();
        let leaf = |name: &str, ty: TensorType| match kind {
            Kind::Trained => param(name, ty, ParamKind::Trainable),
            _ => Op::Input(Input { name: name.into(), ty }),
        };
        if *way == Given::Joined && sizes.first().is_some_and(|n| *n > 1) {
            let parts = halves(x).into_iter().enumerate().map(|(k, half)| {
                let name = format!("{name}.{k}");
                let value = add(&mut g, leaf(&name, half.ty.clone()), &[])[0];
                feeds.insert(name, half);
                value
            });
            let parts: Vec<_> = parts.collect();
            operands.push(add(&mut g, Op::Concat(Concat { axis: 0 }), &parts)[0]);
            continue;
        }
        let part = sliced && !sizes.is_empty();
        let whole = if part { with_a_row(x) } else { x.clone() };
        let mut value = add(&mut g, leaf(&name, whole.ty.clone()), &[])[0];
        if part {
            let mut start = vec![0; sizes.len()];
            start[0] = 1;
            let slice = Slice { start, size: sizes.to_vec(), step: vec![1; sizes.len()] };
            value = add(&mut g, Op::Slice(slice), &[value])[0];
        }
        feeds.insert(name, whole);
        operands.push(value);
    }
    if let Given::Scaled(group) = way {
        for &k in group {
            let dtype = g.ty(operands[k]).dtype;
            let name = format!("factor {dtype}");
            let factor = Tensor::splat(TensorType::scalar(dtype), -1.75);
            let leaf = param(&name, factor.ty.clone(), ParamKind::Trainable);
            let leaf = add(&mut g, leaf, &[])[0];
            operands[k] = add(&mut g, Op::Binary(BinaryFn::Mul), &[operands[k], leaf])[0];
            feeds.insert(name, factor);
        }
    }
    for (k, result) in add(&mut g, case.op.clone(), &operands).into_iter().enumerate() {
        g.add_output(&format!("y{k}"), result, OutputKind::Result);
    }
    (g, feeds)
}

/// Elements of leaves as terms read them: axes of one element are left out, and the last index of inputs is the rank.
fn leaves(graph: &Graph, feeds: &[HashMap<String, Tensor>]) -> HashMap<String, Leaf> {
    let mut leaves = HashMap::new();
    for (_, node) in graph.nodes() {
        let (name, by_rank) = match &node.op {
            Op::Param(p) => (&p.name, false),
            Op::Input(i) => (&i.name, true),
            _ => continue,
        };
        let of_rank: Vec<Vec<f64>> = feeds.iter().map(|f| f[name].to_f64s()).collect();
        let mut sizes = feeds[0][name].shape().dims().to_vec();
        sizes.retain(|n| *n != 1);
        let mut elements = of_rank[0].clone();
        if by_rank {
            sizes.push(feeds.len());
            elements =
                (0..elements.len()).flat_map(|k| of_rank.iter().map(move |x| x[k])).collect();
        }
        let ty = graph.ty(node.outputs[0]);
        leaves.insert(key_of_leaf(&node.op, ty), (sizes, elements));
    }
    leaves
}

/// The types of the operands of each operation.
fn types(graph: &Graph) -> HashMap<&'static str, Vec<DType>> {
    let operands = |inputs: &[_]| inputs.iter().map(|v| graph.ty(*v).dtype).collect();
    graph.nodes().map(|(_, n)| (n.op.name(), operands(&n.inputs))).collect()
}

/// What is wrong with the terms of these numbers, if anything is.
fn wrong(found: &[f64], expected: &[f64]) -> Option<String> {
    let same = |a: f64, b: f64| a == b || (a - b).abs() <= ROUNDING * (1.0 + b.abs());
    let at = (0..expected.len()).find(|k| !same(found[*k], expected[*k]))?;
    Some(format!("element {at} is {}, expected {}", found[at], expected[at]))
}

/// What is wrong with the lemma of a case, if anything is.
fn refuted(case: &Case, given: &Given) -> Option<String> {
    let (graph, feeds) = graph_of(case, given);
    let expected = run(&graph, &feeds, Options::EXACT);
    let expected = expected.unwrap_or_else(|e| panic!("{:?}: {e}", case.op));
    let mut t = Terms::default();
    let reading = Reading::new(&mut t, &graph, Ranks::ONE);
    let leaves = leaves(&graph, std::slice::from_ref(&feeds));
    let mut numbers = Numbers::new(&t, &leaves, types(&graph));
    numbers.integers = case.operands.iter().all(|(x, _)| !x.dtype().is_float());
    graph.outputs.iter().zip(&expected).enumerate().find_map(|(k, (output, (_, tensor)))| {
        let sizes = tensor.shape().dims();
        let (_, found) = numbers.elements(reading.of(output.value), sizes, &Values::new());
        wrong(&found, &tensor.to_f64s()).map(|wrong| format!("result {k}: {wrong}"))
    })
}

/// A query that sees no key has no softmax: its result is 0 by convention.
fn is_defined(case: &Case) -> bool {
    if !matches!(case.op, Op::Attention(_)) {
        return true;
    }
    let (graph, feeds) = graph_of(case, &Given::Alone);
    let results = run(&graph, &feeds, Options::EXACT).expect("evaluates");
    results[1].1.to_f64s().iter().all(|lse| lse.is_finite())
}

#[test]
fn lemmas_agree_with_the_interpreter() {
    let mut n = 0;
    let mut wrong = vec![];
    for case in cases().iter().filter(|case| is_defined(case)) {
        for given in ways(case) {
            n += 1;
            wrong.extend(
                refuted(case, &given).map(|wrong| format!("{wrong} for {case:?} {given:?}")),
            );
        }
    }
    assert!(wrong.is_empty(), "{} of {n}\n{}", wrong.len(), wrong.join("\n"));
    assert!(n > 3000, "{n} cases");
}

/// What has no lemma, but is the same function of the same operands: leaves, random numbers, and steps of optimizers.
const OPAQUE: &[&str] = &[
    "adafactor",
    "by_param_group",
    "cotangent",
    "ema_step",
    "hyper",
    "input",
    "learning_rate",
    "muon_momentum",
    "muon_step",
    "optimizer_step",
    "param",
    "quantize",
    "random",
    "random_mask",
    "state",
    "tree_sum",
    "update_loss_scale",
    "update_step",
];

/// What has a test of its own, on several ranks or as an operand.
const ELSEWHERE: &[&str] = &["all_gather", "all_reduce", "constant", "reduce_scatter"];

#[test]
fn every_operation_has_a_case_or_is_opaque() {
    let tested: BTreeSet<&str> = cases().iter().map(|case| case.op.name()).collect();
    for op in Op::examples() {
        let name = op.name();
        let places = [tested.contains(name), OPAQUE.contains(&name), ELSEWHERE.contains(&name)];
        let n = places.iter().filter(|there| **there).count();
        assert_eq!(n, 1, "`{name}`: {places:?}");
        if !OPAQUE.contains(&name) {
            continue;
        }
        let mut t = Terms::default();
        let ty = TensorType::new(DType::F32, [2, 2]);
        let leaf = t.leaf("x");
        let axes = t.axes(ty.shape.dims());
        let term = t.term(Term::Leaf(leaf, axes.into()));
        let operand = Operand { term, ty: ty.clone(), value: None };
        let found = results(&mut t, &op, &vec![operand; 8], &[&ty])[0];
        let Term::Defined(definition, _) = t.get(found) else { panic!("`{name}` has a lemma") };
        let definition = &t.definitions[*definition as usize];
        assert!(matches!(definition, Definition::Opaque { .. }), "`{name}` has a lemma");
    }
}
