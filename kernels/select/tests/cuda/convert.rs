//! Casts between element types.

use crate::check::check;
use frit_ir::ops::Cast;
use frit_ir::{DType, Op, Tensor};

const TYPES: [DType; 8] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::U8,
    DType::Bool,
];

#[test]
fn every_type_to_and_from_wide_ones() {
    let floats = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.5,
        0.999,
        65504.0,
        65520.0,
        65519.9,
        1e-8,
        3e-8,
        6e-5,
        -7e4,
        3e9,
        -3e9,
        1e19,
        -1e19,
        1e39,
        300.0,
        -3.0,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1.00390625,
        1.01171875,
        // Halfway for a narrow type, except for a bit that f32 does not have.
        1.0 + 1.0 / 256.0 + 1e-12,
        1.0 + 1.0 / 2048.0 + 1e-13,
    ];
    let ints = [
        0,
        1,
        -1,
        127,
        128,
        255,
        256,
        -300,
        65535,
        1 << 24 | 1,
        i64::MAX,
        i64::MIN,
        1 << 31,
        -(1 << 31),
    ];
    let pairs = TYPES.iter().flat_map(|a| TYPES.iter().map(move |b| (*a, *b)));
    // Each type is read and written by one code path; these pairs cover all paths.
    let wide = |t: DType| matches!(t, DType::F32 | DType::I64);
    for (from, to) in pairs.filter(|(from, to)| from != to && (wide(*from) || wide(*to))) {
        let x = match from.is_float() {
            true => Tensor::floats(from, [floats.len()], floats.to_vec()),
            false => Tensor::ints(from, [ints.len()], ints.to_vec()),
        };
        check(Op::Cast(Cast { to }), &[x], 0.0);
    }
}
