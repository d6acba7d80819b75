//! Optimizer steps, moving averages, and settings that differ by segment.

use crate::harness::{Body, COLS, Case, check, normal};
use frit_ir::interpret;
use frit_ir::ops::{
    AdjustLr, ByParamGroup, FusionKind, MuonMomentum, MuonStep, OptimizerKind, OptimizerStep, Slice,
};
use frit_ir::{DType, Op, Tensor};

/// A step of an optimizer on tensors of `n` elements.
fn optimizer(
    kind: OptimizerKind,
    n: usize,
    scalars: &[f64],
    grad: DType,
) -> (Body, Vec<Tensor>, Vec<frit_ir::ValueId>) {
    let mut body = Body::new();
    let mut inputs = vec![normal(DType::F32, &[n], 10, 1.0), normal(grad, &[n], 11, 8.0)];
    for k in 0..kind.n_states() {
        let state = normal(DType::F32, &[n], 12 + k as u64, 0.1);
        let state = state.as_floats().unwrap().iter().map(|x| x.abs()).collect();
        inputs.push(Tensor::floats(DType::F32, [n], state));
    }
    inputs.extend(scalars.iter().map(|&s| Tensor::scalar(s)));
    let values: Vec<_> = inputs.iter().map(|t| body.input(t.dtype(), t.shape().dims())).collect();
    let results = body.all(Op::OptimizerStep(OptimizerStep::of(kind)), &values);
    (body, inputs, results)
}

/// A step against the same by the interpreter, in f64.
fn optimizer_case(kind: OptimizerKind, n: usize, tail: [f64; 4], grad: DType) -> Case {
    let hypers = kind.hypers().iter().map(|key| match *key {
        "optimizer.lr" => 1e-3,
        "optimizer.beta1" => 0.9,
        "optimizer.beta2" => 0.999,
        "optimizer.eps" => 1e-8,
        "optimizer.momentum" => 0.9,
        "optimizer.dampening" => 0.25,
        _ => 0.01,
    });
    let scalars: Vec<f64> = hypers.chain(tail).collect();
    let (body, inputs, results) = optimizer(kind, n, &scalars, grad);
    let skipped = tail[3] != 0.0;
    let graph = body.done(&results);
    let feeds = inputs.iter().enumerate().map(|(i, t)| (format!("x{i}"), t.clone())).collect();
    let exact = interpret::Options { exact: true };
    let expected = interpret::run(&graph, &feeds, exact).expect("it fits");
    Case {
        name: format!("{kind:?} {n} with {tail:?}"),
        body: graph,
        kind: FusionKind::Pointwise,
        inputs,
        expected: expected.into_iter().map(|(_, t)| t.to_f64s()).collect(),
        tolerance: if skipped { 0.0 } else { 5e-7 },
        floor: 1.0,
    }
}

#[test]
fn optimizers_follow_their_formulas_and_skip() {
    let mut cases = Vec::new();
    for kind in OptimizerKind::ALL.iter().copied().filter(|k| k.is_elementwise()) {
        cases.extend(COLS.map(|n| optimizer_case(kind, n, [0.0, 0.0, 0.125, 0.0], DType::F32)));
        cases.push(optimizer_case(kind, 253, [0.25, 9999.0, 0.125, 0.0], DType::BF16));
        cases.push(optimizer_case(kind, 253, [0.0, 3.0, 0.125, 1.0], DType::F32));
    }
    check(&cases);
}

/// The elementwise parts of Muon, with the momentum's other result in bf16.
#[test]
fn muon_follows_its_formula_and_skips() {
    let case = |op: Op, n: usize, scalars: &[f64], along: DType| {
        let mut body = Body::new();
        let mut inputs = vec![normal(DType::F32, &[n], 1, 1.0), normal(along, &[n], 2, 1.0)];
        inputs.extend(scalars.iter().map(|x| Tensor::scalar(*x)));
        let values: Vec<_> =
            inputs.iter().map(|t| body.input(t.dtype(), t.shape().dims())).collect();
        let name = format!("{op:?} of {n} with {scalars:?}");
        let results = body.all(op, &values);
        let graph = body.done(&results);
        let feeds = inputs.iter().enumerate().map(|(i, t)| (format!("x{i}"), t.clone())).collect();
        let expected = interpret::run(&graph, &feeds, interpret::Options::EXACT).expect("it fits");
        let rounds = graph.outputs.len() == 2;
        Case {
            name,
            body: graph,
            kind: FusionKind::Pointwise,
            inputs,
            expected: expected.into_iter().map(|(_, t)| t.to_f64s()).collect(),
            // Half a unit in the last place of bf16.
            tolerance: if rounds { 4e-3 } else { 5e-7 },
            floor: 1.0,
        }
    };
    let mut cases = Vec::new();
    for n in COLS {
        for found_inf in [0.0, 1.0] {
            for nesterov in [false, true] {
                let op = Op::MuonMomentum(MuonMomentum { nesterov });
                cases.push(case(op, n, &[0.75, 0.5, 0.125, found_inf], DType::F32));
            }
            let op = Op::MuonStep(MuonStep { adjust_lr: AdjustLr::Original });
            cases.push(case(op, n, &[0.25, 1.5, 0.125, found_inf], DType::BF16));
        }
    }
    check(&cases);
}

#[test]
fn averages_follow_their_formula_and_skip() {
    let case = |[step, found_inf]: [f64; 2]| {
        let mut body = Body::new();
        let mut inputs =
            vec![normal(DType::F32, &[253], 1, 1.0), normal(DType::F32, &[253], 2, 1.0)];
        inputs.extend([0.75, step, found_inf].map(Tensor::scalar));
        let values: Vec<_> =
            inputs.iter().map(|t| body.input(t.dtype(), t.shape().dims())).collect();
        let y = body.one(Op::EmaStep, &values);
        let [average, param] = [0, 1].map(|i: usize| inputs[i].to_f64s());
        let mix = |(a, p): (&f64, &f64)| match (step, found_inf) {
            (_, 1.0) => *a,
            (0.0, _) => *p,
            _ => 0.75 * a + 0.25 * p,
        };
        Case {
            name: format!("average at step {step}, found_inf {found_inf}"),
            body: body.done(&[y]),
            kind: FusionKind::Pointwise,
            expected: vec![average.iter().zip(&param).map(mix).collect()],
            inputs,
            tolerance: 2e-7,
            floor: 1.0,
        }
    };
    check(&[case([0.0, 0.0]), case([3.0, 0.0]), case([3.0, 1.0])]);
}

/// Plain descent in which two segments have learning rates of their own.
#[test]
fn learning_rates_differ_by_param_group() {
    let case = |begins: [i64; 2]| {
        let mut body = Body::new();
        let n = 253;
        let inputs = vec![
            normal(DType::F32, &[n], 1, 1.0),
            normal(DType::F32, &[n], 2, 1.0),
            Tensor::floats(DType::F32, [3], vec![0.5, 0.25, 0.125]),
            Tensor::ints(DType::I64, [2], begins.to_vec()),
            Tensor::scalar(0.0),
            Tensor::scalar(1.0),
        ];
        let v: Vec<_> = inputs.iter().map(|t| body.input(t.dtype(), t.shape().dims())).collect();
        let mut element = |of, i| {
            body.one(Op::Slice(Slice { start: vec![i], size: vec![1], step: vec![1] }), &[of])
        };
        let parts = [
            element(v[2], 0),
            element(v[3], 0),
            element(v[2], 1),
            element(v[3], 1),
            element(v[2], 2),
        ];
        let lr = body.one(Op::ByParamGroup(ByParamGroup { len: n }), &parts);
        let kind = OptimizerKind::Sgd;
        let operands = [v[0], v[1], lr, v[4], v[4], v[4], v[5], v[4]];
        let y = body.all(Op::OptimizerStep(OptimizerStep::of(kind)), &operands);
        let [p, g] = [0, 1].map(|i: usize| inputs[i].to_f64s());
        let of = |i: usize| {
            let passed = begins.iter().filter(|b| **b <= i as i64).count();
            p[i] - [0.5, 0.25, 0.125][passed] * g[i]
        };
        Case {
            name: format!("segments at {begins:?}"),
            body: body.done(&y),
            kind: FusionKind::Pointwise,
            expected: vec![(0..n).map(of).collect()],
            inputs,
            tolerance: 2e-7,
            floor: 1.0,
        }
    };
    check(&[case([7, 100]), case([-5, 16]), case([300, 400]), case([-9, -4])]);
}
