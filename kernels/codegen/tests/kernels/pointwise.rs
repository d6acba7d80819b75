//! Pointwise regions: broadcasting, layouts, dtypes, comparisons.

use crate::functions::reference;
use crate::harness::{Body, COLS, Case, FLOATS, check, check_on, normal};
use frit_codegen::{HostTarget, supported, supported_on_cuda};
use frit_ir::ops::{
    BinaryFn, Cast, Clip, CompareFn, CrossEntropyGrad, Expand, FusionKind, Reduce, ReduceFn,
    Reshape, Slice, Split, SumTo, Transpose, UnaryFn,
};
use frit_ir::{DType, Op, Shape, Tensor};
use half::bf16;

fn binary(
    body: &mut Body,
    f: BinaryFn,
    a: frit_ir::ValueId,
    b: frit_ir::ValueId,
) -> frit_ir::ValueId {
    body.one(Op::Binary(f), &[a, b])
}

/// The element of a tensor that broadcasts to `to` at flat index `i`.
fn at(t: &Tensor, to: &[usize], i: usize) -> f64 {
    let to = Shape::from(to);
    let strides = t.shape().broadcast_strides(&to).unwrap();
    let own = to.strides();
    let offset: usize = (0..to.rank()).map(|d| i / own[d] % to.0[d] * strides[d]).sum();
    t.as_floats().unwrap()[offset]
}

fn bias_gelu(dtype: DType, rows: usize, cols: usize) -> Case {
    let mut body = Body::new();
    let (x, b) = (body.input(dtype, &[rows, cols]), body.input(dtype, &[cols]));
    let sum = binary(&mut body, BinaryFn::Add, x, b);
    let y = body.one(Op::Unary(UnaryFn::GeluTanh), &[sum]);
    let inputs = vec![normal(dtype, &[rows, cols], 1, 2.0), normal(dtype, &[cols], 2, 1.0)];
    let of = |i| at(&inputs[0], &[rows, cols], i) + at(&inputs[1], &[rows, cols], i);
    Case {
        name: format!("bias_gelu {dtype}[{rows}, {cols}]"),
        expected: vec![(0..rows * cols).map(|i| reference(UnaryFn::GeluTanh, of(i))).collect()],
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        inputs,
        tolerance: 1e-6,
        floor: 0.1,
    }
}

#[test]
fn rows_of_every_length_and_dtype() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        cases.extend(COLS.map(|cols| bias_gelu(dtype, 5, cols)));
    }
    check(&cases);
}

#[test]
fn long_rows_are_cut_into_blocks() {
    check(&[bias_gelu(DType::F32, 3, 10_000), bias_gelu(DType::BF16, 1, 20_001)]);
}

#[test]
fn bf16_is_rounded_without_the_instruction() {
    let target = HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c,+bmi2");
    check_on(&[bias_gelu(DType::BF16, 3, 253), bias_gelu(DType::F16, 3, 253)], &target);
}

#[test]
fn rounding_to_bf16_is_exact_on_every_target() {
    // Ties, halves, overflow to infinity, and NaN, which integer rounding could turn into infinity.
    let mut bits: Vec<u32> = vec![
        0x3F80_8000,
        0x3F81_8000,
        0x3F80_7FFF,
        0x3F80_8001,
        0x7F7F_FFFF,
        0x7F80_0000,
        0x7F80_0001,
        0xFFFF_FFFF,
        0x7FFF_FFFF,
        0x8000_0000,
    ];
    bits.extend((0..1000).map(|i: u32| 0x3F00_0000 + i.wrapping_mul(0x0001_2345) % 0x0100_0000));
    let values: Vec<f64> = bits.iter().map(|&b| f64::from(f32::from_bits(b))).collect();
    let mut body = Body::new();
    let x = body.input(DType::F32, &[bits.len()]);
    let narrow = body.one(Op::Cast(Cast { to: DType::BF16 }), &[x]);
    let wide = body.one(Op::Cast(Cast { to: DType::F32 }), &[narrow]);
    let case = Case {
        name: "bf16 rounding".into(),
        body: body.done(&[narrow, wide]),
        kind: FusionKind::Pointwise,
        expected: vec![values.iter().map(|&x| bf16::from_f32(x as f32).to_f64()).collect(); 2],
        inputs: vec![Tensor::floats(DType::F32, [bits.len()], values)],
        tolerance: 0.0,
        floor: 0.0,
    };
    check(std::slice::from_ref(&case));
    check_on(&[case], &HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c,+bmi2"));
}

#[test]
fn operands_broadcast_by_numpys_rules() {
    let shape = [2, 3, 5, 20];
    let mut cases = Vec::new();
    for operand in [
        vec![],
        vec![1],
        vec![20],
        vec![5, 1],
        vec![3, 1, 1],
        vec![2, 1, 1, 20],
        vec![2, 3, 5, 20],
        vec![1, 3, 1, 20],
        vec![2, 1, 5, 1],
    ] {
        let mut body = Body::new();
        let (x, y) = (body.input(DType::F32, &shape), body.input(DType::F32, &operand));
        let z = binary(&mut body, BinaryFn::Sub, x, y);
        let inputs = vec![normal(DType::F32, &shape, 3, 1.0), normal(DType::F32, &operand, 4, 1.0)];
        let of = |i| f64::from((at(&inputs[0], &shape, i) - at(&inputs[1], &shape, i)) as f32);
        cases.push(Case {
            name: format!("broadcast of {operand:?}"),
            expected: vec![(0..600).map(of).collect()],
            body: body.done(&[z]),
            kind: FusionKind::Pointwise,
            inputs,
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check(&cases);
}

#[test]
fn layout_operations_fold_into_addresses() {
    let mut cases = Vec::new();
    let x_values = normal(DType::F32, &[4, 6, 10], 5, 1.0);
    let element =
        |i: usize, j: usize, k: usize| x_values.as_floats().unwrap()[(i * 6 + j) * 10 + k];
    let mut case = |name: &str, op: Op, shape: [usize; 3], of: &dyn Fn([usize; 3]) -> f64, late| {
        let mut body = Body::new();
        let x = body.input(DType::F32, &[4, 6, 10]);
        // Applied to a computed value as well as to an operand.
        let source = if late { body.one(Op::Unary(UnaryFn::Neg), &[x]) } else { x };
        let y = body.one(op, &[source]);
        let z = binary(&mut body, BinaryFn::Add, y, y);
        let scale = if late { -2.0 } else { 2.0 };
        let n: usize = shape.iter().product();
        let index = |i: usize| [i / (shape[1] * shape[2]), i / shape[2] % shape[1], i % shape[2]];
        cases.push(Case {
            name: format!("{name}, late: {late}"),
            body: body.done(&[z]),
            kind: FusionKind::Pointwise,
            inputs: vec![x_values.clone()],
            expected: vec![(0..n).map(|i| scale * of(index(i))).collect()],
            tolerance: 0.0,
            floor: 0.0,
        });
    };
    for late in [false, true] {
        let transpose = Op::Transpose(Transpose { perm: vec![2, 0, 1] });
        case("transpose", transpose, [10, 4, 6], &|[k, i, j]| element(i, j, k), late);
        let slice = Slice { start: vec![1, 5, 1], size: vec![2, 3, 4], step: vec![1, -2, 2] };
        let of = |[i, j, k]: [usize; 3]| element(i + 1, 5 - 2 * j, 1 + 2 * k);
        case("slice", Op::Slice(slice), [2, 3, 4], &of, late);
        let reshape = Op::Reshape(Reshape { shape: Shape::from([8, 3, 10]) });
        case("reshape", reshape, [8, 3, 10], &|[i, j, k]| element(i / 2, i % 2 * 3 + j, k), late);
    }
    check(&cases);
}

#[test]
fn halves_of_a_split_meet() {
    // The gate of SwiGLU.
    let mut body = Body::new();
    let x = body.input(DType::F32, &[7, 40]);
    let halves = body.all(Op::Split(Split { axis: 1, sizes: vec![20, 20] }), &[x]);
    let gate = body.one(Op::Unary(UnaryFn::Silu), &[halves[0]]);
    let y = binary(&mut body, BinaryFn::Mul, gate, halves[1]);
    let x = normal(DType::F32, &[7, 40], 6, 1.0);
    let v = x.as_floats().unwrap();
    let of = |i: usize| {
        let at = i / 20 * 40 + i % 20;
        reference(UnaryFn::Silu, v[at]) * v[at + 20]
    };
    check(&[Case {
        name: "split".into(),
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        expected: vec![(0..140).map(of).collect()],
        inputs: vec![x.clone()],
        tolerance: 1e-6,
        floor: 1e-3,
    }]);
}

#[test]
fn integers_and_bools() {
    let mut body = Body::new();
    let ids = body.input(DType::I64, &[33]);
    let mask = body.input(DType::Bool, &[33]);
    let limit = body.constant(DType::I64, 5.0);
    let small = body.one(Op::Compare(CompareFn::Lt), &[ids, limit]);
    let both = body.one(Op::Logical(frit_ir::ops::LogicalFn::And), &[small, mask]);
    let as_float = body.one(Op::Cast(Cast { to: DType::F32 }), &[ids]);
    let zero = body.constant(DType::F32, 0.0);
    let kept = body.one(Op::Select, &[both, as_float, zero]);
    let half = body.constant(DType::F32, 0.5);
    let shifted = binary(&mut body, BinaryFn::Add, kept, half);
    let back = body.one(Op::Cast(Cast { to: DType::I32 }), &[shifted]);
    let ids_values: Vec<i64> = (0..33).map(|i| (i * 7) % 11 - 3).collect();
    let mask_values: Vec<i64> = (0..33).map(|i| i % 3 % 2).collect();
    let keep = |i: usize| ids_values[i] < 5 && mask_values[i] != 0;
    let value = |i: usize| if keep(i) { ids_values[i] as f64 } else { 0.0 };
    check(&[Case {
        name: "integers".into(),
        body: body.done(&[both, kept, back]),
        kind: FusionKind::Pointwise,
        expected: vec![
            (0..33).map(|i| f64::from(u8::from(keep(i)))).collect(),
            (0..33).map(value).collect(),
            (0..33).map(|i| (value(i) + 0.5).trunc()).collect(),
        ],
        inputs: vec![
            Tensor::ints(DType::I64, [33], ids_values.clone()),
            Tensor::ints(DType::Bool, [33], mask_values.clone()),
        ],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn casts_to_integers_saturate_and_nan_becomes_zero() {
    let values = vec![1e30, -1e30, f64::NAN, 2.9, -2.9, 2_147_483_648.0, f64::INFINITY, -0.0];
    let mut body = Body::new();
    let x = body.input(DType::F32, &[8]);
    let outputs =
        [DType::I64, DType::I32, DType::Bool].map(|to| body.one(Op::Cast(Cast { to }), &[x]));
    let x = Tensor::floats(DType::F32, [8], values);
    let expected = [DType::I64, DType::I32].map(|d| {
        let as_int = |&x: &f64| match d {
            DType::I64 => x as i64 as f64,
            _ => f64::from(x as i32),
        };
        x.as_floats().unwrap().iter().map(as_int).collect::<Vec<f64>>()
    });
    let truth = x.as_floats().unwrap().iter().map(|&x| f64::from(u8::from(x != 0.0))).collect();
    check(&[Case {
        name: "casts".into(),
        body: body.done(&outputs),
        kind: FusionKind::Pointwise,
        expected: vec![expected[0].clone(), expected[1].clone(), truth],
        inputs: vec![x.clone()],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn max_min_clip_and_relu_keep_nan() {
    let values = vec![f64::NAN, 1.0, -2.0, f64::INFINITY, f64::NEG_INFINITY, 0.25];
    let mut body = Body::new();
    let (a, b) = (body.input(DType::F32, &[6]), body.input(DType::F32, &[1]));
    let outputs = [
        binary(&mut body, BinaryFn::Max, a, b),
        binary(&mut body, BinaryFn::Min, b, a),
        body.one(Op::Clip(Clip { min: Some(-0.5), max: Some(0.5) }), &[a]),
        body.one(Op::Unary(UnaryFn::Relu), &[a]),
    ];
    let keep = |f: &dyn Fn(f64) -> f64| {
        values.iter().map(|&x| if x.is_nan() { x } else { f(x) }).collect::<Vec<f64>>()
    };
    check(&[Case {
        name: "nan".into(),
        body: body.done(&outputs),
        kind: FusionKind::Pointwise,
        expected: vec![
            keep(&|x| x.max(0.5)),
            keep(&|x| x.min(0.5)),
            keep(&|x| x.clamp(-0.5, 0.5)),
            keep(&|x| x.max(0.0)),
        ],
        inputs: vec![
            Tensor::floats(DType::F32, [6], values.clone()),
            Tensor::floats(DType::F32, [1], vec![0.5]),
        ],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn expand_writes_every_copy() {
    let mut body = Body::new();
    let x = body.input(DType::F32, &[3, 1]);
    let y = body.one(Op::Expand(Expand { shape: Shape::from([2, 3, 19]) }), &[x]);
    check(&[Case {
        name: "expand".into(),
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        inputs: vec![Tensor::floats(DType::F32, [3, 1], vec![1.0, 2.0, 3.0])],
        expected: vec![(0..114).map(|i| (i / 19 % 3 + 1) as f64).collect()],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn cross_entropy_gradient_subtracts_the_label() {
    for dtype in [DType::F32, DType::BF16] {
        let (rows, cols) = (4, 37);
        let mut body = Body::new();
        let dloss = body.input(DType::F32, &[rows]);
        let logits = body.input(dtype, &[rows, cols]);
        let labels = body.input(DType::I64, &[rows]);
        let lse = body.input(DType::F32, &[rows]);
        let op = Op::CrossEntropyGrad(CrossEntropyGrad::ignoring(-100));
        let dx = body.one(op, &[dloss, logits, labels, lse]);
        let x = normal(dtype, &[rows, cols], 20, 2.0);
        let label = [3, -100, 36, 0];
        let v = x.as_floats().unwrap();
        let row = |r: usize| &v[r * cols..(r + 1) * cols];
        let lse: Vec<f64> =
            (0..rows).map(|r| row(r).iter().map(|x| x.exp()).sum::<f64>().ln()).collect();
        let of = |i: usize| {
            let (r, c) = (i / cols, i % cols);
            let hit = f64::from(u8::from(label[r] == c as i64));
            if label[r] < 0 { 0.0 } else { 0.5 * ((v[i] - lse[r]).exp() - hit) }
        };
        check(&[Case {
            name: "cross_entropy_grad".into(),
            body: body.done(&[dx]),
            kind: FusionKind::Pointwise,
            expected: vec![(0..rows * cols).map(of).collect()],
            inputs: vec![
                Tensor::floats(DType::F32, [rows], vec![0.5; rows]),
                x.clone(),
                Tensor::ints(DType::I64, [rows], label.to_vec()),
                Tensor::floats(DType::F32, [rows], lse.clone()),
            ],
            tolerance: 1e-6,
            floor: 0.1,
        }]);
    }
}

#[test]
fn what_is_not_compiled_says_why() {
    let mut body = Body::new();
    let x = body.input(DType::F64, &[4]);
    let y = body.one(Op::Unary(UnaryFn::Neg), &[x]);
    let reason = supported(&body.done(&[y]), FusionKind::Pointwise).unwrap_err();
    assert!(reason.why.contains("element type"), "{reason}");

    let mut body = Body::new();
    let (a, b) = (body.input(DType::I64, &[4]), body.input(DType::I64, &[4]));
    let y = binary(&mut body, BinaryFn::Div, a, b);
    let body = body.done(&[y]);
    let reason = supported(&body, FusionKind::Pointwise).unwrap_err();
    assert!(reason.why.contains("divided by 0"), "{reason}");
    // A GPU has no interpreter to fall back to.
    supported_on_cuda(&body, FusionKind::Pointwise).unwrap();

    let mut body = Body::new();
    let x = body.input(DType::F32, &[4, 4]);
    let y = body.one(Op::Softmax(frit_ir::ops::Softmax { axis: 1 }), &[x]);
    let reason = supported(&body.done(&[y]), FusionKind::Pointwise).unwrap_err();
    assert_eq!(reason.op, "softmax");
}

#[test]
fn every_dtype_is_read_copied_and_gathered() {
    let (rows, cols) = (5, 19);
    let mut cases = Vec::new();
    for dtype in
        [DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool]
    {
        let mut body = Body::new();
        let x = body.input(dtype, &[cols, rows]);
        let t = body.one(Op::Transpose(Transpose { perm: vec![1, 0] }), &[x]);
        let wide = body.one(Op::Cast(Cast { to: DType::F32 }), &[t]);
        let y = body.input(dtype, &[rows, cols]);
        let same = body.one(Op::Compare(CompareFn::Le), &[y, t]);
        let chosen = body.one(Op::Select, &[same, y, t]);
        let integers =
            |seed: i64| (0..95).map(|i| (i * 37 + seed) % 101 % 50).collect::<Vec<i64>>();
        let tensor = |seed, shape: [usize; 2]| match dtype.is_float() {
            true => {
                let values = integers(seed).into_iter().map(|i| i as f64 / 4.0).collect();
                Tensor::floats(dtype, shape, values)
            }
            false => Tensor::ints(dtype, shape, integers(seed)),
        };
        let inputs = vec![tensor(1, [cols, rows]), tensor(9, [rows, cols])];
        let (a, b) = (inputs[0].to_f64s(), inputs[1].to_f64s());
        let transposed: Vec<f64> = (0..95).map(|i| a[i % cols * rows + i / cols]).collect();
        let less = |i: usize| b[i] <= transposed[i];
        cases.push(Case {
            name: format!("{dtype}"),
            body: body.done(&[wide, t, same, chosen]),
            kind: FusionKind::Pointwise,
            expected: vec![
                transposed.clone(),
                transposed.clone(),
                (0..95).map(|i| f64::from(u8::from(less(i)))).collect(),
                (0..95).map(|i| b[i].min(transposed[i])).collect(),
            ],
            inputs,
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check(&cases);
    check_on(&cases, &HostTarget::new("x86-64-v3", "+avx2,+fma,+f16c,+bmi2"));
}

#[test]
fn integer_arithmetic() {
    let mut cases = Vec::new();
    for dtype in [DType::I64, DType::I32] {
        let mut body = Body::new();
        let (a, b) = (body.input(dtype, &[40]), body.input(dtype, &[40]));
        let outputs = [
            binary(&mut body, BinaryFn::Add, a, b),
            binary(&mut body, BinaryFn::Sub, a, b),
            binary(&mut body, BinaryFn::Mul, a, b),
            binary(&mut body, BinaryFn::Max, a, b),
            binary(&mut body, BinaryFn::Min, a, b),
            body.one(Op::Unary(UnaryFn::Neg), &[a]),
            body.one(Op::Unary(UnaryFn::Abs), &[a]),
            body.one(Op::Unary(UnaryFn::Sign), &[a]),
            body.one(Op::Clip(Clip { min: Some(-2.0), max: Some(3.0) }), &[a]),
        ];
        let x: Vec<i64> = (0..40).map(|i| i * 13 % 17 - 8).collect();
        let y: Vec<i64> = (0..40).map(|i| i * 7 % 11 - 5).collect();
        let of = |f: &dyn Fn(i64, i64) -> i64| {
            x.iter().zip(&y).map(|(&x, &y)| f(x, y) as f64).collect::<Vec<f64>>()
        };
        cases.push(Case {
            name: format!("{dtype}"),
            body: body.done(&outputs),
            kind: FusionKind::Pointwise,
            expected: vec![
                of(&|x, y| x + y),
                of(&|x, y| x - y),
                of(&|x, y| x * y),
                of(&|x, y| x.max(y)),
                of(&|x, y| x.min(y)),
                of(&|x, _| -x),
                of(&|x, _| x.abs()),
                of(&|x, _| x.signum()),
                of(&|x, _| x.clamp(-2, 3)),
            ],
            inputs: vec![
                Tensor::ints(dtype, [40], x.clone()),
                Tensor::ints(dtype, [40], y.clone()),
            ],
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check(&cases);
}

#[test]
fn constant_powers_are_products_and_roots() {
    let mut cases = Vec::new();
    for exponent in [-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0] {
        let mut body = Body::new();
        let x = body.input(DType::F32, &[30]);
        let e = body.constant(DType::F32, exponent);
        let y = binary(&mut body, BinaryFn::Pow, x, e);
        let sign = if exponent == exponent.trunc() { -1.0 } else { 1.0 };
        let x: Vec<f64> =
            (1..31).map(|i| f64::from(i) * if i % 2 == 0 { 0.5 } else { sign * 0.25 }).collect();
        cases.push(Case {
            name: format!("power {exponent}"),
            body: body.done(&[y]),
            kind: FusionKind::Pointwise,
            expected: vec![x.iter().map(|x| x.powf(exponent)).collect()],
            inputs: vec![Tensor::floats(DType::F32, [30], x)],
            tolerance: 5e-7,
            floor: 0.0,
        });
    }
    check(&cases);
}

#[test]
fn reductions_of_single_elements_are_pointwise() {
    let mut body = Body::new();
    let x = body.input(DType::F32, &[1, 4, 1, 6]);
    let sum = SumTo { shape: Shape::from([4, 1, 6]), dtype: None };
    let y = body.one(Op::SumTo(sum), &[x]);
    let max = Reduce { f: ReduceFn::Max, axes: vec![1], keep_dims: false };
    let y = body.one(Op::Reduce(max), &[y]);
    let x = normal(DType::F32, &[1, 4, 1, 6], 1, 1.0);
    check(&[Case {
        name: "single elements".into(),
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        expected: vec![x.to_f64s()],
        inputs: vec![x],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn scalar_conditions_of_a_row_are_negated() {
    let mut body = Body::new();
    let (mask, x) = (body.input(DType::Bool, &[2, 1]), body.input(DType::F32, &[2, 5]));
    let not = body.one(Op::Unary(UnaryFn::Not), &[mask]);
    let negative = body.one(Op::Unary(UnaryFn::Neg), &[x]);
    let y = body.one(Op::Select, &[not, x, negative]);
    let values: Vec<f64> = (0..10).map(f64::from).collect();
    let expected = values.iter().enumerate().map(|(i, v)| if i < 5 { -v } else { *v }).collect();
    check(&[Case {
        name: "not of a scalar".into(),
        body: body.done(&[y]),
        kind: FusionKind::Pointwise,
        inputs: vec![
            Tensor::ints(DType::Bool, [2, 1], vec![1, 0]),
            Tensor::floats(DType::F32, [2, 5], values),
        ],
        expected: vec![expected],
        tolerance: 0.0,
        floor: 0.0,
    }]);
}

#[test]
fn integers_have_bitwise_logic() {
    use frit_ir::ops::LogicalFn;
    let (a, b) = ([0i64, 5, -1, 12, 7, 3, 9, 10, 1], [3i64, 6, 5, 10, -8, 1, 2, 3, 4]);
    let mut cases = Vec::new();
    for dtype in [DType::I64, DType::I32] {
        let mut body = Body::new();
        let (x, y) = (body.input(dtype, &[9]), body.input(dtype, &[9]));
        let mut outputs = Vec::new();
        for f in [LogicalFn::And, LogicalFn::Or, LogicalFn::Xor] {
            outputs.push(body.one(Op::Logical(f), &[x, y]));
        }
        outputs.push(body.one(Op::Unary(UnaryFn::Not), &[x]));
        let zip = |f: fn(i64, i64) -> i64| {
            a.iter().zip(&b).map(|(a, b)| f(*a, *b) as f64).collect::<Vec<f64>>()
        };
        cases.push(Case {
            name: format!("bits of {dtype}"),
            body: body.done(&outputs),
            kind: FusionKind::Pointwise,
            inputs: vec![
                Tensor::ints(dtype, [9], a.to_vec()),
                Tensor::ints(dtype, [9], b.to_vec()),
            ],
            expected: vec![zip(|a, b| a & b), zip(|a, b| a | b), zip(|a, b| a ^ b), zip(|a, _| !a)],
            tolerance: 0.0,
            floor: 0.0,
        });
    }
    check(&cases);
}
