//! Loss scale, optimizers, schedule.

use super::{assert_close, eval, eval1, f32s};
use crate::ops::training::Unscale;
use crate::ops::{
    Adafactor, AdafactorPart, AdjustLr, ByParamGroup, GradStats, LearningRate, LossScale,
    MuonMomentum, MuonStep, OptimizerKind, OptimizerStep, ScheduleKind, UpdateLossScale,
};
use crate::{DType, Op, Tensor, TensorType};

fn scalars(values: &[f64]) -> Vec<Tensor> {
    values.iter().map(|x| Tensor::scalar(*x)).collect()
}

fn numbers(results: &[Tensor]) -> Vec<f64> {
    results.iter().flat_map(Tensor::to_f64s).collect()
}

#[test]
fn the_seed_is_scaled() {
    let op = Op::LossScale(LossScale { factor: 0.125 });
    assert_eq!(numbers(&eval(op, &scalars(&[1024.0]))), [128.0]);
}

#[test]
fn statistics_count_what_is_not_finite() {
    let finite = [f32s(&[2], &[1.0, 2.0]), Tensor::floats(DType::BF16, [1], vec![3.0])];
    assert_eq!(eval1(Op::GradStats(GradStats::default()), &finite), f32s(&[2], &[0.0, 14.0]));
    let bad = [f32s(&[3], &[f64::NAN, f64::INFINITY, 1.0])];
    let stats = eval1(Op::GradStats(GradStats::default()), &bad).to_f64s();
    assert!(stats[0] == 2.0 && stats[1].is_nan());
    assert_eq!(eval1(Op::GradStats(GradStats::default()), &[]), f32s(&[2], &[0.0, 0.0]));
}

#[test]
fn unscale_and_clip() {
    let unscale = |stats: [f64; 4], scale: f64, clip: f64| {
        let inputs = [vec![f32s(&[4], &stats)], scalars(&[scale, clip])].concat();
        numbers(&eval(Op::Unscale(Unscale { capacity: 8.0 }), &inputs))
    };
    // Nothing ignored: the factor is the inverse scale.
    assert_eq!(unscale([0.0, 64.0, 8.0, 16.0], 4.0, 0.0), [0.25, 0.0, 2.0, 2.0]);
    // Half ignored; the norm of 4 is clipped to 1.
    assert_close(
        &unscale([0.0, 64.0, 4.0, 16.0], 4.0, 1.0),
        &[0.5 / (4.0 + 1e-6), 0.0, 4.0, 4.0],
        1e-7,
    );
    // A small norm is left alone; all ignored gives loss 0.
    assert_eq!(unscale([0.0, 0.0, 0.0, 0.0], 1.0, 1.0), [8.0, 0.0, 0.0, 0.0]);
    assert_eq!(unscale([3.0, 1.0, 8.0, 0.0], 1.0, 0.0)[1], 1.0);
}

fn step(kind: OptimizerKind, tensors: &[Tensor], rest: &[f64]) -> Vec<Tensor> {
    eval(Op::OptimizerStep(OptimizerStep::of(kind)), &[tensors.to_vec(), scalars(rest)].concat())
}

#[test]
fn adamw_takes_the_steps_of_torch() {
    let (lr, b1, b2, eps, decay) = (0.1, 0.5, 0.75, 0.0, 0.5);
    let zero = f32s(&[1], &[0.0]);
    let first = step(
        OptimizerKind::Adamw,
        &[f32s(&[1], &[2.0]), f32s(&[1], &[8.0]), zero.clone(), zero],
        &[lr, b1, b2, eps, decay, 0.0, 0.0, 0.5, 0.0],
    );
    // g = 4, m = 2, v = 4; corrected 4 and 16; p = 2·0.95 − 0.1·4/4.
    assert_close(&numbers(&first), &[1.8, 2.0, 4.0], 1e-7);
    let second = step(
        OptimizerKind::Adamw,
        &[first[0].clone(), f32s(&[1], &[0.0]), first[1].clone(), first[2].clone()],
        &[lr, b1, b2, eps, decay, 0.0, 1.0, 0.5, 0.0],
    );
    // m = 1, v = 3; corrected 1/0.75 and 3/0.4375.
    let p = 1.8 * 0.95 - 0.1 * (1.0 / 0.75) / (3.0f64 / 0.4375).sqrt();
    assert_close(&numbers(&second), &[p, 1.0, 3.0], 1e-7);
}

#[test]
fn sgd_and_momentum_take_the_steps_of_torch() {
    let (p, g) = (f32s(&[1], &[2.0]), f32s(&[1], &[8.0]));
    let sgd = |clip| {
        let rest = [0.125, 0.5, clip, 3.0, 0.5, 0.0];
        numbers(&step(OptimizerKind::Sgd, &[p.clone(), g.clone()], &rest))
    };
    assert_eq!(sgd(0.0), [2.0 - 0.125 * 5.0]);
    // The gradient of 4 is clipped to 3 before the decay joins it.
    assert_eq!(sgd(3.0), [2.0 - 0.125 * 4.0]);
    let momentum = |kind, hypers: &[f64], buffer: f64, n: f64| {
        let tensors = [p.clone(), g.clone(), f32s(&[1], &[buffer])];
        numbers(&step(kind, &tensors, &[hypers, &[0.0, n, 0.5, 0.0]].concat()))
    };
    let plain = |buffer, n| momentum(OptimizerKind::Momentum, &[0.125, 0.5, 0.25, 0.5], buffer, n);
    assert_eq!(plain(7.0, 0.0), [2.0 - 0.125 * 5.0, 5.0]);
    assert_eq!(plain(6.0, 1.0), [2.0 - 0.125 * 6.75, 6.75]);
    let nesterov = |buffer, n| momentum(OptimizerKind::Nesterov, &[0.125, 0.5, 0.5], buffer, n);
    assert_eq!(nesterov(6.0, 1.0), [2.0 - 0.125 * 9.0, 8.0]);
}

#[test]
fn lion_steps_along_the_sign() {
    let lion = |m: f64, g: f64| {
        let tensors = [f32s(&[1], &[2.0]), f32s(&[1], &[g]), f32s(&[1], &[m])];
        let rest = [0.125, 0.5, 0.75, 0.5, 0.0, 3.0, 1.0, 0.0];
        numbers(&step(OptimizerKind::Lion, &tensors, &rest))
    };
    assert_eq!(lion(1.0, 2.0), [2.0 * 0.9375 - 0.125, 1.25]);
    assert_eq!(lion(-4.0, 2.0), [2.0 * 0.9375 + 0.125, -2.5]);
    assert_eq!(lion(-2.0, 2.0), [2.0 * 0.9375, -1.0]);
}

#[test]
fn adafactor_factors_the_second_moment() {
    // Squares 1 4 / 9 16: rows 2.5 12.5, columns 5 10, mean row 7.5. At the first step the weight is 1.
    let tensors =
        [f32s(&[2, 2], &[3.0; 4]), f32s(&[2, 2], &[1.0, -2.0, 3.0, 4.0]), f32s(&[4], &[9.0; 4])];
    let rest = [0.5, 0.8, 0.001, 1.0, 0.5, 0.0, 0.0, 1.0, 0.0];
    let found = step(OptimizerKind::Adafactor, &tensors, &rest);
    assert_eq!(found[1].to_f64s(), [2.5, 12.5, 5.0, 10.0]);
    let update = [
        1.0 / (2.5 * 5.0 / 7.5_f64).sqrt(),
        -2.0 / (2.5 * 10.0 / 7.5_f64).sqrt(),
        3.0 / (12.5 * 5.0 / 7.5_f64).sqrt(),
        4.0 / (12.5 * 10.0 / 7.5_f64).sqrt(),
    ];
    let rms = (update.iter().map(|x| x * x).sum::<f64>() / 4.0).sqrt();
    let expected = update.map(|u| 3.0 * 0.75 - 3.0 * 0.5 * u / rms.max(1.0));
    assert_close(&found[0].to_f64s(), &expected, 1e-6);
    let vector = [f32s(&[2], &[3.0; 2]), f32s(&[2], &[2.0, -4.0]), f32s(&[2], &[0.0; 2])];
    let found = step(OptimizerKind::Adafactor, &vector, &rest);
    assert_eq!(numbers(&found), [0.75, 3.75, 4.0, 16.0]);
}

/// A step in parts of `len` elements of the parameter that begins at `offset` of the flat tensor.
fn adafactor_in_parts(
    [param, grad, state]: &[Tensor; 3],
    scalars: [f64; 9],
    (len, offset): (usize, usize),
) -> [Vec<f64>; 2] {
    let (shape, n) = (param.shape().clone(), param.shape().numel());
    let ranks = (offset + n).div_ceil(len);
    let [lr, exponent, eps, threshold, decay, clip, steps, factor, found_inf] =
        scalars.map(|x| f32s(&[], &[x]));
    let mut own = Vec::new();
    for rank in 0..ranks {
        // Elements outside the parameter are 77.
        let part = |t: &Tensor| {
            let at = |i: usize| (rank * len + i).checked_sub(offset).filter(|i| *i < n);
            let values: Vec<f64> =
                (0..len).map(|i| at(i).map_or(77.0, |i| t.to_f64s()[i])).collect();
            f32s(&[len], &values)
        };
        let begin = Tensor::ints(DType::I64, [1], vec![offset as i64 - (rank * len) as i64]);
        own.push([begin, part(grad), part(param)]);
    }
    let run = |part, operands: &[&Tensor]| {
        let op = Op::Adafactor(Adafactor { part, shape: shape.clone(), share: 1.0 });
        eval(op, &operands.iter().map(|t| (*t).clone()).collect::<Vec<_>>())
    };
    let add = |parts: Vec<Tensor>| {
        let mut all = parts[0].to_f64s();
        for part in &parts[1..] {
            all.iter_mut().zip(part.to_f64s()).for_each(|(a, b)| *a += b);
        }
        all
    };
    let sums = own.iter().map(|[begin, grad, param]| {
        run(AdafactorPart::Sums, &[begin, grad, param, &clip, &factor]).remove(0)
    });
    let sums = add(sums.collect());
    let (of_param, sums) = (f32s(&[1], &sums[sums.len() - 1..]), f32s(&[sums.len()], &sums));
    let moments: Vec<Vec<Tensor>> = own
        .iter()
        .map(|[begin, grad, _]| {
            let operands =
                [begin, grad, &sums, state, &exponent, &clip, &steps, &factor, &found_inf];
            run(AdafactorPart::Moments, &operands)
        })
        .collect();
    let of_update = f32s(&[1], &add(moments.iter().map(|m| m[1].clone()).collect()));
    let state = &moments[0][0];
    let mut params = Vec::new();
    for [begin, grad, param] in &own {
        let operands = [
            begin, grad, param, state, &of_param, &of_update, &lr, &eps, &threshold, &decay, &clip,
            &steps, &factor, &found_inf,
        ];
        params.extend(run(AdafactorPart::Step, &operands).remove(0).to_f64s());
    }
    let around = params[..offset].iter().chain(&params[offset + n..]);
    assert!(around.copied().all(|x| x == 77.0), "others were stepped");
    [params[offset..offset + n].to_vec(), state.to_f64s()]
}

#[test]
fn adafactor_in_parts_is_adafactor() {
    let number = |i: usize, k: usize| ((i * 7919 + k * 31) % 211) as f64 / 100.0 - 1.0;
    for (shape, parts) in [
        (vec![4, 5], vec![(20, 0), (7, 0), (6, 3), (30, 4)]),
        (vec![2, 3, 2], vec![(12, 0), (5, 2)]),
        (vec![6], vec![(6, 0), (4, 1)]),
        (vec![], vec![(1, 0), (2, 1)]),
    ] {
        let n: usize = shape.iter().product();
        let values = |n: usize, k| (0..n).map(|i| number(i, k)).collect::<Vec<f64>>();
        let param = f32s(&shape, &values(n, 1));
        let len = OptimizerKind::Adafactor.state_shape(param.shape()).numel();
        let squares: Vec<f64> = values(len, 3).iter().map(|x| x * x).collect();
        let tensors = [param, f32s(&shape, &values(n, 2)), f32s(&[len], &squares)];
        for found_inf in [0.0, 1.0] {
            let scalars = [0.1, 0.8, 1e-3, 1.0, 0.01, 0.7, 3.0, 0.5, found_inf];
            let whole = step(OptimizerKind::Adafactor, &tensors, &scalars);
            for parts in &parts {
                let [param, state] = adafactor_in_parts(&tensors, scalars, *parts);
                assert_close(&param, &whole[0].to_f64s(), 1e-6);
                assert_close(&state, &whole[1].to_f64s(), 1e-6);
            }
        }
    }
}

/// Of rows that are orthogonal and of one length, every element goes the way of the polynomial.
#[test]
fn muon_steps_along_a_polynomial_of_singular_values() {
    let [lr, decay, momentum] = [0.5, 0.25, 0.75];
    let (a, b, c) = (3.4445, -4.775, 2.0315);
    for (shape, grad) in [
        ([2, 3], vec![3.0, 0.0, 0.0, 0.0, 0.0, -3.0]),
        ([3, 2], vec![3.0, 0.0, 0.0, 0.0, 0.0, -3.0]),
    ] {
        let tensors = [f32s(&shape, &[2.0; 6]), f32s(&shape, &grad), f32s(&shape, &[0.0; 6])];
        let scalars = [lr, momentum, a, b, c, 1e-7, decay, 0.0, 3.0, 0.5, 0.0];
        let found = step(OptimizerKind::Muon, &tensors, &scalars);
        let momenta: Vec<f64> = grad.iter().map(|g| (1.0 - momentum) * 0.5 * g).collect();
        assert_close(&found[1].to_f64s(), &momenta, 1e-6);
        let mut x = 0.5_f64.sqrt();
        for _ in 0..5 {
            x = a * x + b * x.powi(3) + c * x.powi(5);
        }
        let ratio = (shape[0] as f64 / shape[1] as f64).max(1.0).sqrt();
        let along = |g: &f64| if *g == 0.0 { 0.0 } else { g.signum() * x };
        let expected: Vec<f64> =
            grad.iter().map(|g| 2.0 * (1.0 - lr * decay) - lr * ratio * along(g)).collect();
        for (p, expected) in found[0].to_f64s().iter().zip(&expected) {
            assert!((p - expected).abs() < 0.02, "{shape:?}: {p}, not {expected}");
        }
    }
}

/// Momentum and step of a part are those of the whole.
#[test]
fn muon_in_parts_is_muon() {
    let number = |i: usize, k: usize| ((i * 7919 + k * 31) % 211) as f64 / 100.0 - 1.0;
    let values = |k| (0..6).map(|i| number(i, k)).collect::<Vec<f64>>();
    let tensors = [1, 2, 3].map(|k| f32s(&[2, 3], &values(k)));
    let rest = [0.1, 0.9, 3.0, -3.0, 1.0, 1e-7, 0.5, 0.75, 3.0, 0.5, 0.0];
    let whole = step(OptimizerKind::Muon, &tensors, &rest);
    let kept = tensors[1..].to_vec();
    let mixed = eval(
        Op::MuonMomentum(MuonMomentum { nesterov: true }),
        &[kept, scalars(&[0.9, 0.75, 0.5, 0.0])].concat(),
    );
    assert_eq!(mixed[0], whole[1]);
    assert_eq!(mixed[1].dtype(), DType::BF16);
    // Along nothing, only the decay is left.
    let nothing = Tensor::splat(TensorType::new(DType::BF16, [2, 3]), 0.0);
    let op = Op::MuonStep(MuonStep { adjust_lr: AdjustLr::Original });
    let operands = [vec![tensors[0].clone(), nothing], scalars(&[0.1, 1.0, 0.5, 0.0])].concat();
    let decayed: Vec<f64> = tensors[0].to_f64s().iter().map(|p| p * 0.95).collect();
    assert_close(&eval1(op, &operands).to_f64s(), &decayed, 1e-6);
}

#[test]
fn the_average_begins_at_the_first_step() {
    let ema = |n: f64, found_inf: f64| {
        let inputs = [vec![f32s(&[1], &[8.0]), f32s(&[1], &[4.0])], scalars(&[0.75, n, found_inf])];
        numbers(&eval(Op::EmaStep, &inputs.concat()))
    };
    assert_eq!(ema(0.0, 0.0), [4.0]);
    assert_eq!(ema(1.0, 0.0), [7.0]);
    assert_eq!(ema(1.0, 1.0), [8.0]);
}

#[test]
fn values_differ_by_param_group() {
    let by_param_group = |offsets: [i64; 2]| {
        let begin = |b: i64| Tensor::ints(DType::I64, [1], vec![b]);
        let value = |x: f64| f32s(&[1], &[x]);
        let inputs = [value(1.0), begin(offsets[0]), value(2.0), begin(offsets[1]), value(3.0)];
        numbers(&eval(Op::ByParamGroup(ByParamGroup { len: 4 }), &inputs))
    };
    assert_eq!(by_param_group([1, 3]), [1.0, 2.0, 2.0, 3.0]);
    // A part that begins in the second group, and one that ends in the first.
    assert_eq!(by_param_group([-2, 2]), [2.0, 2.0, 3.0, 3.0]);
    assert_eq!(by_param_group([5, 9]), [1.0; 4]);
}

#[test]
fn a_skipped_step_changes_no_bit() {
    for &kind in OptimizerKind::ALL {
        let shape: &[usize] = if kind == OptimizerKind::Muon { &[1, 1] } else { &[1] };
        let kept = [f32s(shape, &[-0.0]), f32s(shape, &[0.3]), f32s(shape, &[0.7])];
        let g = f32s(shape, &[f64::NAN]);
        let n = kind.n_states();
        let tensors = [&kept[..1], std::slice::from_ref(&g), &kept[1..1 + n]].concat();
        let mut rest = vec![0.1; kind.n_scalars()];
        rest[kind.n_scalars() - 1] = 1.0;
        assert_eq!(step(kind, &tensors, &rest), kept[..1 + n], "{kind:?}");
    }
}

#[test]
fn the_scaler_grows_and_backs_off() {
    let update = |scale: f64, tracker: f64, found_inf: f64| {
        let inputs = scalars(&[scale, tracker, found_inf, 2.0, 0.5, 3.0]);
        numbers(&eval(Op::UpdateLossScale(UpdateLossScale {}), &inputs))
    };
    assert_eq!(update(64.0, 0.0, 0.0), [64.0, 1.0]);
    assert_eq!(update(64.0, 2.0, 0.0), [128.0, 0.0]);
    assert_eq!(update(64.0, 2.0, 1.0), [32.0, 0.0]);
    let largest = f64::from(f32::MAX);
    assert_eq!(update(largest, 2.0, 0.0), [largest, 0.0]);
    assert_eq!(numbers(&eval(Op::UpdateStep, &scalars(&[4.0, 0.0]))), [5.0]);
    assert_eq!(numbers(&eval(Op::UpdateStep, &scalars(&[4.0, 1.0]))), [4.0]);
}

fn rate(kind: ScheduleKind, hypers: &[f64], step: f64) -> f64 {
    let inputs = scalars(&[&[1.0], hypers, &[step]].concat());
    numbers(&eval(Op::LearningRate(LearningRate { kind }), &inputs))[0]
}

#[test]
fn schedules() {
    let rate = |kind, warmup: f64, total: f64, step: f64| rate(kind, &[warmup, total, 0.5], step);
    for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
        assert_eq!(rate(kind, 4.0, 12.0, 0.0), 0.25);
        assert_eq!(rate(kind, 4.0, 12.0, 3.0), 1.0);
        assert_eq!(rate(kind, 4.0, 12.0, 4.0), 1.0);
        assert_eq!(rate(kind, 4.0, 0.0, 100.0), 1.0);
    }
    assert_eq!(rate(ScheduleKind::Constant, 4.0, 12.0, 50.0), 1.0);
    assert_eq!(rate(ScheduleKind::Linear, 4.0, 12.0, 8.0), 0.75);
    assert_eq!(rate(ScheduleKind::Linear, 4.0, 12.0, 50.0), 0.5);
    assert_eq!(rate(ScheduleKind::Cosine, 4.0, 12.0, 8.0), 0.75);
    let sixth = 0.5 + 0.25 * (1.0 + 0.5f64.sqrt());
    assert_close(&[rate(ScheduleKind::Cosine, 4.0, 12.0, 6.0)], &[sixth], 1e-7);
    assert_eq!(rate(ScheduleKind::Cosine, 4.0, 12.0, 99.0), 0.5);
    assert_eq!(rate(ScheduleKind::Linear, 4.0, 4.0, 4.0), 0.5);
}

#[test]
fn step_and_one_cycle() {
    let step = |n| rate(ScheduleKind::Step, &[2.0, 3.0, 0.5], n);
    assert_eq!([0.0, 1.0, 2.0, 4.0, 5.0, 8.0].map(step), [0.5, 1.0, 1.0, 1.0, 0.5, 0.25]);
    // Up from 1/4 at step 0 to 1 at step 4, down to 1/8 at step 9.
    let cycle = |n| rate(ScheduleKind::OneCycle, &[10.0, 0.5, 4.0, 2.0], n);
    assert_eq!([0.0, 2.0, 4.0, 9.0, 20.0].map(cycle), [0.25, 0.625, 1.0, 0.125, 0.125]);
}

#[test]
fn a_tree_adds_pairs_of_equal_size() {
    // In f32 a sum from left to right would lose every one.
    let pieces = [16_777_216.0, 0.0, 1.0, 1.0];
    let mut sums = vec![f32s(&[1], &[9.0]); 2];
    for (k, x) in pieces.into_iter().enumerate() {
        let number = Tensor::ints(DType::I64, crate::Shape::scalar(), vec![k as i64]);
        sums = eval(Op::TreeSum, &[vec![f32s(&[1], &[x]), number], sums].concat());
    }
    assert_eq!(numbers(&sums), [16_777_218.0, 16_777_216.0]);
}

#[test]
fn exact_sums_of_squares() {
    let exact = Op::GradStats(GradStats { exact: true });
    let rounded = |stats: &Tensor| {
        let values = [stats.to_f64s(), vec![3.0, 4.0]].concat();
        numbers(&eval(Op::RoundStats, &[f32s(&[values.len()], &values)]))
    };
    let stats = |values: &[f64]| eval1(exact.clone(), &[f32s(&[values.len()], values)]);
    assert_eq!(rounded(&stats(&[1.0, -2.0, 0.5])), [0.0, 5.25, 3.0, 4.0]);
    assert_eq!(rounded(&stats(&[])), [0.0, 0.0, 3.0, 4.0]);
    assert_eq!(rounded(&stats(&[f64::NAN, 1.0])), [1.0, f64::INFINITY, 3.0, 4.0]);
    assert_eq!(rounded(&stats(&[3e38])), [0.0, f64::INFINITY, 3.0, 4.0]);
    // Any order and any division give the same digits, far beyond the digits of a float.
    let small = f64::from(f32::from_bits(1));
    let [a, b] = [stats(&[1.0, small]), stats(&[small, 1.0])];
    assert_eq!(a, b);
    assert_ne!(a, stats(&[1.0]));
}
