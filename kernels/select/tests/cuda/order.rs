//! Top-k and random masks.

use crate::check::{check, random};
use frit_ir::ops::{ArgReduce, Random, RandomFn, RandomMask, TopK};
use frit_ir::{DType, Op, Tensor};

#[test]
fn first_elements_with_ties_and_nan() {
    let values = vec![1.0, 3.0, f64::NAN, 3.0, -1.0, 1.0, 0.0, -0.0];
    for dtype in [DType::F32, DType::F16] {
        let x = Tensor::floats(dtype, [8], values.clone());
        for largest in [true, false] {
            check(Op::TopK(TopK { axis: 0, k: 8, largest }), std::slice::from_ref(&x), 0.0);
            for last in [true, false] {
                let op = ArgReduce { axis: 0, largest, last };
                check(Op::ArgReduce(op), std::slice::from_ref(&x), 0.0);
            }
        }
    }
    let many = random(DType::I64, &[2, 700, 2], 1);
    check(Op::TopK(TopK { axis: 1, k: 5, largest: true }), &[many], 0.0);
    let lines = random(DType::BF16, &[3, 40, 5], 2);
    check(Op::TopK(TopK { axis: 1, k: 3, largest: false }), std::slice::from_ref(&lines), 0.0);
    check(Op::ArgReduce(ArgReduce { axis: 2, largest: true, last: false }), &[lines], 0.0);
}

#[test]
fn masks_are_those_of_the_cpu() {
    for (n, keep, id) in [(1003, 0.9, 0), (64, 0.5, 7), (5, 1.0, 1), (5, 0.0, 1)] {
        check(Op::RandomMask(RandomMask { shape: [n].into(), keep, id }), &[state(17)], 0.0);
    }
}

/// A generator's state after so many micro-steps.
fn state(count: i64) -> Tensor {
    Tensor::vector_i64(vec![1 << 40 | 12345, 1, 1 << 33 | count, 3, 2])
}

#[test]
fn numbers_are_those_of_the_interpreter() {
    for (f, tolerance) in [(RandomFn::Uniform, 0.0), (RandomFn::Normal, 5e-6)] {
        for (n, count) in [(1003, 0), (1003, 1), (1003, 2), (64, 3), (1, 7), (3, 1)] {
            for (offset, scale) in [(0.0, 1.0), (3.0, 7.0), (-0.3, 0.1), (2.0, 0.0)] {
                let op = Random { f, shape: [n].into(), offset, scale, id: 1 << 31 | 5 };
                check(Op::Random(op), &[state(count)], tolerance);
            }
        }
    }
}

#[test]
fn numbers_have_the_bits_of_the_cpu() {
    for f in [RandomFn::Uniform, RandomFn::Normal] {
        let op = Random { f, shape: [4099].into(), offset: 0.1, scale: 1.7, id: 3 };
        let (normal, most) = (f == RandomFn::Normal, Some(op.most()));
        let (offset, scale) = (op.offset as f32, op.scale as f32);
        let draws = frit_kernels::routine::random::Random {
            len: 4099,
            normal,
            offset,
            scale,
            most,
            id: op.id,
        };
        let state = state(5);
        let words: Vec<i64> = state.to_i64s();
        let mut expected = vec![0.0_f32; 4099];
        let words = words.try_into().expect("five words");
        // SAFETY: the vector holds the numbers.
        unsafe { draws.run(&frit_kernels::pool::Pool::new(1), words, expected.as_mut_ptr()) };
        let found = crate::check::result(&Op::Random(op), &[state]);
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        assert_eq!(found.to_f64s(), expected, "{f:?}");
    }
}
