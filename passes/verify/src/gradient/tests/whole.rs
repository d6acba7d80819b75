//! Whole graphs: what `differentiated` gives, and what it says of what it does not state.

use super::{add, add_loss, param};
use crate::gradient::differentiated;
use frit_ir::interpret::{Options, run_ranks};
use frit_ir::ops::*;
use frit_ir::verify::verify;
use frit_ir::{DType, Graph, Op, OutputKind, Tensor, TensorType, ValueId};
use std::collections::HashMap;

fn trained(g: &mut Graph, name: &str, shape: &[usize]) -> ValueId {
    let ty = TensorType::new(DType::F64, shape);
    add(g, param(name, ty, ParamKind::Trainable), &[])[0]
}

fn unary(g: &mut Graph, f: UnaryFn, x: ValueId) -> ValueId {
    add(g, Op::Unary(f), &[x])[0]
}

fn binary(g: &mut Graph, f: BinaryFn, a: ValueId, b: ValueId) -> ValueId {
    add(g, Op::Binary(f), &[a, b])[0]
}

fn feeds(values: &[(&str, &[f64])]) -> HashMap<String, Tensor> {
    let tensor = |values: &[f64]| Tensor::floats(DType::F64, [values.len()], values.to_vec());
    values.iter().map(|(name, values)| (name.to_string(), tensor(values))).collect()
}

#[test]
fn uses_are_summed_and_outputs_are_gradients_in_the_order_of_parameters() {
    let mut g = Graph::new("g");
    let names = ["c", "flat", "a", "unused", "empty", "b"];
    let [c, flat, a, unused, empty, b] =
        names.map(|name| trained(&mut g, name, if name == "empty" { &[0] } else { &[2] }));
    let held = param("held", TensorType::new(DType::F64, [2]), ParamKind::Frozen);
    let held = add(&mut g, held, &[])[0];
    let rounded = unary(&mut g, UnaryFn::Round, flat);
    // c·a + a + a·a + b·b·held + round(flat)
    let mut total = binary(&mut g, BinaryFn::Mul, c, a);
    let (square, power) =
        (binary(&mut g, BinaryFn::Mul, a, a), binary(&mut g, BinaryFn::Mul, b, b));
    let power = binary(&mut g, BinaryFn::Mul, power, held);
    for term in [a, square, power, rounded] {
        total = binary(&mut g, BinaryFn::Add, total, term);
    }
    let whole = add(&mut g, Op::Concat(Concat { axis: 0 }), &[total, empty])[0];
    g.add_output("y", whole, OutputKind::Result);
    add_loss(&mut g, &[(whole, vec![1.0, 10.0])]);
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: false };
    let metric = add(&mut g, Op::Reduce(sum), &[unused])[0];
    g.add_output("metric", metric, OutputKind::Metric);
    let found = differentiated(&g, 4, 0.5).expect("every operation is stated");
    verify(&found).unwrap_or_else(|broken| panic!("{broken:?}\n{found}"));
    let kinds: Vec<_> = found.outputs.iter().map(|o| (&*o.name, o.kind)).collect();
    let gradients = ["c", "a", "b"].map(|name| (name, OutputKind::Gradient));
    let others = [("loss", OutputKind::LossSum), ("metric", OutputKind::Metric)];
    assert_eq!(kinds, [&others[..], &gradients[..]].concat());
    let kind = |p: &Param| (p.name.clone(), p.kind == ParamKind::Trainable);
    let kinds: HashMap<String, bool> = found.params().map(|(_, p)| kind(p)).collect();
    let trained = |name: &str| ["c", "a", "b"].contains(&name);
    assert!(kinds.iter().all(|(name, kind)| *kind == trained(name)), "{kinds:?}");
    let values = feeds(&[
        ("a", &[1.0, 2.0]),
        ("b", &[3.0, 4.0]),
        ("c", &[5.0, 6.0]),
        ("flat", &[0.1, 0.2]),
        ("held", &[0.5, 0.25]),
        ("empty", &[]),
        ("unused", &[0.0, 0.0]),
    ]);
    let results = run_ranks(&found, &[values], Options::EXACT).expect("it runs").remove(0);
    // Seeded with 1/(½·4), as the loss scale is 1 at first.
    let elements = |i: usize| results[i].1.to_f64s();
    assert_eq!(elements(2), [0.5, 10.0]);
    assert_eq!(elements(3), [0.5 * (5.0 + 1.0 + 2.0), 5.0 * (6.0 + 1.0 + 4.0)]);
    assert_eq!(elements(4), [0.5 * 3.0, 5.0 * 2.0]);
}

#[test]
fn nothing_is_added_where_the_loss_depends_on_no_trainable_parameter() {
    let mut g = Graph::new("g");
    let x = trained(&mut g, "x", &[2]);
    let y = unary(&mut g, UnaryFn::Detach, x);
    add_loss(&mut g, &[(y, vec![1.0, 2.0])]);
    let found = differentiated(&g, 1, 1.0).expect("it is stated");
    assert_eq!(found.outputs.len(), 1);
    assert!(found.params().all(|(_, p)| p.kind == ParamKind::Frozen));
    assert_eq!(found.len(), g.len());
}

/// The loss is the mean of the ranks' losses, and so is the gradient.
#[test]
fn the_mean_over_ranks_has_the_mean_of_their_cotangents() {
    let mut g = Graph::new("g");
    let x = trained(&mut g, "x", &[3]);
    let of_rank = Op::Input(Input { name: "w".into(), ty: TensorType::new(DType::F64, [3]) });
    let of_rank = add(&mut g, of_rank, &[])[0];
    let part = binary(&mut g, BinaryFn::Mul, x, of_rank);
    let part = unary(&mut g, UnaryFn::Sin, part);
    let mean = AllReduce { reduce: ReduceKind::Mean, unit: None, dtype: None };
    let mean = add(&mut g, Op::AllReduce(mean), &[part])[0];
    let product = binary(&mut g, BinaryFn::Mul, mean, part);
    add_loss(&mut g, &[(product, vec![1.0, -2.0, 0.5])]);
    let found = differentiated(&g, 1, 1.0).expect("it is stated");
    let x = [0.3, -0.7, 1.1];
    let ranks = |x: [f64; 3]| {
        let of = |w: [f64; 3]| feeds(&[("x", &x), ("w", &w)]);
        [of([1.0, 2.0, -1.0]), of([0.5, -0.25, 2.0])]
    };
    let loss = |x| {
        let losses = run_ranks(&g, &ranks(x), Options::EXACT).expect("it runs");
        losses.iter().map(|outputs| outputs[0].1.to_f64s()[0]).sum::<f64>() / 2.0
    };
    let gradients = run_ranks(&found, &ranks(x), Options::EXACT).expect("it runs");
    for i in 0..3 {
        let shifted = |by: f64| {
            let mut x = x;
            x[i] += by;
            loss(x)
        };
        let difference = (shifted(1e-4) - shifted(-1e-4)) / 2e-4;
        let of_ranks = gradients.iter().map(|outputs| outputs[1].1.to_f64s()[i]);
        let mean = of_ranks.sum::<f64>() / 2.0;
        assert!((mean - difference).abs() < 1e-7, "{mean} {difference}");
    }
}

#[test]
fn what_is_not_stated_is_named() {
    let unstated = |build: fn(&mut Graph, ValueId) -> ValueId| {
        let mut g = Graph::new("g");
        let x = trained(&mut g, "x", &[2, 2]);
        let y = build(&mut g, x);
        let weights = vec![1.0; g.ty(y).shape.numel()];
        add_loss(&mut g, &[(y, weights)]);
        differentiated(&g, 1, 1.0).map(|_| ()).expect_err("it is not stated")
    };
    let sum = unstated(|g, x| {
        let sum = AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None };
        add(g, Op::AllReduce(sum), &[x])[0]
    });
    assert_eq!(sum.what, "all_reduce");
    let second = unstated(|g, x| binary(g, BinaryFn::TanhGrad, x, x));
    assert_eq!(second.what, "tanh_grad");
    let text = "no statement of `tanh_grad` at the graph: no lemma gives its gradient";
    assert_eq!(second.to_string(), text);
    let statistics = unstated(|g, x| {
        let scale = trained(g, "scale", &[2]);
        add(g, Op::RmsNorm(RmsNorm { axis: 1, eps: 0.1 }), &[x, scale])[1]
    });
    assert_eq!(statistics.what, "rms_norm");

    let mut g = Graph::new("g");
    let x = trained(&mut g, "x", &[2, 2]);
    assert_eq!(differentiated(&g, 1, 1.0).map(|_| ()).expect_err("no loss").what, "graph");
    g.add_output("loss", x, OutputKind::LossSum);
    let matrix = differentiated(&g, 1, 1.0).map(|_| ()).expect_err("no scalar");
    assert_eq!((matrix.what, &*matrix.reason), ("param", "a loss of type f64[2, 2]"));
}
