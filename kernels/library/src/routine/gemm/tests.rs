//! GEMMs of each type and layout against a naive f64 reference.

use super::*;

/// A tensor that a stride pattern addresses, filled with small reproducible values.
struct Tensor {
    elem: Elem,
    bytes: Vec<u64>,
}

impl Tensor {
    fn new(elem: Elem, len: usize, seed: usize) -> Tensor {
        let mut tensor = Tensor { elem, bytes: vec![0; (len * elem.size()).div_ceil(8)] };
        for i in 0..len {
            let value = ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
            tensor.set(i, value);
        }
        tensor
    }

    fn set(&mut self, index: usize, value: f32) {
        // SAFETY: callers stay inside the tensor.
        unsafe { self.elem.store(self.bytes.as_mut_ptr().cast(), index as isize, value) };
    }

    fn get(&self, index: isize) -> f64 {
        // SAFETY: callers stay inside the tensor.
        f64::from(unsafe { self.elem.load(self.bytes.as_ptr().cast(), index) })
    }
}

/// Elements that an operand spans.
fn span(operand: &Operand, rows: usize, cols: usize, batch: usize) -> usize {
    let last = |n: usize, stride: isize| n.saturating_sub(1) * stride as usize;
    last(rows, operand.row) + last(cols, operand.col) + last(batch, operand.batch) + 1
}

/// Runs the GEMM on one and on three threads and serially, compares all with the reference and
/// with each other.
fn check(gemm: &Gemm) {
    let Gemm { m, n, k, batch, .. } = *gemm;
    let a = Tensor::new(gemm.a.elem, span(&gemm.a, m, k, batch), 1);
    let b = Tensor::new(gemm.b.elem, span(&gemm.b, k, n, batch), 2);
    let c_len = span(&gemm.c, m, n, batch);
    let bias = gemm.bias.map(|elem| Tensor::new(elem, n, 4));
    let before = Tensor::new(gemm.c.elem, c_len, 3);
    let run = |threads: usize| {
        let mut c = Tensor::new(gemm.c.elem, c_len, 3);
        let bias = bias.as_ref().map_or(std::ptr::null(), |bias| bias.bytes.as_ptr().cast());
        let (a, b) = (a.bytes.as_ptr().cast(), b.bytes.as_ptr().cast());
        let at = c.bytes.as_mut_ptr().cast();
        let pool = Pool::new(threads.max(1));
        // SAFETY: the tensors span what the strides reach.
        unsafe {
            if threads > 0 {
                gemm.run(&pool, a, b, at, bias);
            } else {
                let sent = Shareable::new((a, b, at, bias));
                pool.run_workers(1, &|_, worker| {
                    let (a, b, at, bias) = sent.get();
                    gemm.run_serial(&mut worker.packing, a, b, at, bias);
                });
            }
        }
        c
    };
    let got = run(1);
    assert!(got.bytes == run(3).bytes, "the bits depend on the threads: {gemm:?}");
    // By itself a GEMM may be multiplied in parts of numbers or of depths.
    let in_parts = gemm.folded().is_by_parts(THIN) || k >= 4096;
    let is_same = in_parts || got.bytes == run(0).bytes;
    assert!(is_same, "the serial bits differ: {gemm:?}");

    let unit = match gemm.c.elem {
        Elem::F32 => 1.2e-7,
        Elem::BF16 => 4.0e-3,
        Elem::F16 => 5.0e-4,
    };
    // An emulated processor takes longest for the reference: of large results it has one of several in each row and column.
    let each = if crate::tests::path().is_some() { (m * n).div_ceil(2048) as isize } else { 1 };
    let mut touched = vec![false; c_len];
    for z in 0..batch as isize {
        let depths = |start: isize, stride: isize| {
            (0..k as isize).map(move |p| start + p * stride).collect::<Vec<isize>>()
        };
        let numbers = |of: &Tensor, at: Vec<isize>| at.into_iter().map(|i| of.get(i)).collect();
        let column = |j: isize| numbers(&b, depths(z * gemm.b.batch + j * gemm.b.col, gemm.b.row));
        let columns: Vec<Vec<f64>> = (0..n as isize).map(column).collect();
        for i in 0..m as isize {
            let row: Vec<f64> = numbers(&a, depths(z * gemm.a.batch + i * gemm.a.row, gemm.a.col));
            for (j, column) in (0..).zip(&columns) {
                let at = z * gemm.c.batch + i * gemm.c.row + j * gemm.c.col;
                touched[at as usize] = true;
                if (i + j) % each != 0 {
                    continue;
                }
                let products = row.iter().zip(column).map(|(x, y)| x * y);
                let (sum, size) = products.fold((0.0, 0.0), |(s, t), p| (s + p, t + p.abs()));
                let mut want = f64::from(gemm.alpha) * sum;
                if gemm.accumulate {
                    want += before.get(at);
                }
                if let Some(bias) = &bias {
                    want += bias.get(j);
                }
                let sums = 6e-8 * (2.0 + (k as f64).sqrt());
                let tolerance = want.abs() * unit + sums * (size + 3.0);
                let error = (got.get(at) - want).abs();
                assert!(error <= tolerance, "{gemm:?} at {z} {i} {j}: {} {want}", got.get(at));
            }
        }
    }
    for (i, _) in touched.iter().enumerate().filter(|(_, touched)| !**touched) {
        assert_eq!(got.get(i as isize), before.get(i as isize), "{gemm:?} wrote a gap at {i}");
    }
}

/// Row-major, column-major, and row-major with a gap after each row.
fn layouts(elem: Elem, rows: usize, cols: usize) -> [Operand; 3] {
    let gap = Operand { elem, row: cols as isize + 5, col: 1, batch: (rows * (cols + 5)) as isize };
    let plain = Operand::row_major(elem, rows, cols);
    [plain, Operand::row_major(elem, cols, rows).transposed(), gap]
}

const TYPES: [(Elem, Elem); 7] = [
    (Elem::F32, Elem::F32),
    (Elem::BF16, Elem::F32),
    (Elem::BF16, Elem::BF16),
    (Elem::BF16, Elem::F16),
    (Elem::F16, Elem::F32),
    (Elem::F16, Elem::F16),
    (Elem::F32, Elem::BF16),
];

/// Where a test program is told its path (`crate::tests`), GEMMs take it.
#[test]
fn the_path_is_the_one_asked_for() {
    let Some(path) = crate::tests::path() else { return };
    let [single, pairs] = [Elem::F32, Elem::BF16].map(name_of);
    match path.as_str() {
        "baseline" => assert_eq!([single, pairs], ["gemm"; 2]),
        "avx2" | "avx512" | "neon" => assert_eq!([single, pairs], [path.as_str(); 2]),
        _ => assert_eq!(pairs, path),
    }
}

#[test]
fn every_layout_and_type() {
    for (elem, out) in TYPES {
        for (m, n, k) in [(1, 1, 1), (13, 33, 7), (37, 33, 70)] {
            let plain = Gemm::row_major(elem, out, m, n, k);
            for a in layouts(elem, m, k) {
                for b in layouts(elem, k, n) {
                    for c in layouts(out, m, n) {
                        check(&Gemm { a, b, c, ..plain });
                    }
                }
            }
        }
    }
}

#[test]
fn strides_without_a_contiguous_dimension() {
    let every_third = |elem, rows: usize, cols: usize| Operand {
        elem,
        row: (cols * 3) as isize,
        col: 3,
        batch: (rows * cols * 3) as isize,
    };
    for (elem, out) in TYPES {
        let plain = Gemm::row_major(elem, out, 29, 43, 19);
        check(&Gemm {
            a: every_third(elem, 29, 19),
            b: every_third(elem, 19, 43),
            c: every_third(out, 29, 43),
            bias: Some(elem),
            accumulate: true,
            ..plain
        });
    }
}

#[test]
fn bias_accumulation_and_factor() {
    for (elem, out) in TYPES {
        for accumulate in [false, true] {
            for bias in [None, Some(Elem::F32), Some(elem)] {
                for c in layouts(out, 50, 70) {
                    let plain = Gemm::row_major(elem, out, 50, 70, 33);
                    check(&Gemm { c, bias, accumulate, alpha: -0.75, ..plain });
                }
            }
        }
    }
}

#[test]
fn several_depth_and_column_blocks() {
    for (elem, out) in TYPES {
        for (m, n, k) in [(30, 40, 2500), (21, 2100, 21), (201, 33, 1031), (13, 97, 1031)] {
            for c in layouts(out, m, n) {
                let plain = Gemm::row_major(elem, out, m, n, k);
                check(&Gemm { c, bias: Some(elem), accumulate: true, ..plain });
            }
        }
    }
}

#[test]
fn few_results_of_many_depths() {
    for (elem, out) in TYPES {
        for (m, n, k) in [(1, 1, 4096), (3, 50, 3500), (33, 20, 3003)] {
            for c in layouts(out, m, n) {
                let plain = Gemm::row_major(elem, out, m, n, k);
                let a = Operand::row_major(elem, k, m).transposed();
                check(&Gemm { a, c, alpha: 0.5, ..plain });
                check(&Gemm { a, c, accumulate: true, ..plain });
                check(&Gemm { c, bias: Some(elem), ..plain });
            }
        }
    }
}

#[test]
fn partial_sums_over_several_row_blocks() {
    check(&Gemm::row_major(Elem::BF16, Elem::BF16, 2200, 33, 1100));
}

#[test]
fn batches() {
    for (elem, out) in TYPES {
        let plain = Gemm { batch: 5, ..Gemm::row_major(elem, out, 17, 35, 21) };
        check(&plain);
        check(&Gemm { bias: Some(elem), accumulate: true, ..plain });
        check(&Gemm { a: plain.a.broadcast(), ..plain });
        check(&Gemm { b: plain.b.broadcast(), ..plain });
        // Heads interleaved with time: the batch stride is smaller than the row stride.
        let heads = |elem, cols: usize| Operand {
            elem,
            row: (5 * cols) as isize,
            col: 1,
            batch: cols as isize,
        };
        check(&Gemm { a: heads(elem, 21), c: heads(out, 35), ..plain });
        check(&Gemm { a: heads(elem, 21), b: plain.b.broadcast(), c: heads(out, 35), ..plain });
    }
    // Too large to be spread as whole GEMMs.
    let large = Gemm::row_major(Elem::BF16, Elem::F32, 130, 190, 180);
    check(&Gemm { batch: 2, ..large });
}

#[test]
fn empty_dimensions() {
    for (elem, out) in TYPES {
        let plain = Gemm::row_major(elem, out, 9, 10, 0);
        check(&plain);
        check(&Gemm { bias: Some(Elem::F32), ..plain });
        check(&Gemm { accumulate: true, bias: Some(Elem::F32), ..plain });
        check(&Gemm { accumulate: true, ..plain });
        check(&Gemm::row_major(elem, out, 0, 10, 4));
        check(&Gemm::row_major(elem, out, 10, 0, 4));
        check(&Gemm { batch: 0, ..Gemm::row_major(elem, out, 3, 3, 4) });
    }
}

#[test]
fn blocks_agree_with_the_micro_kernels() {
    for elem in [Elem::F32, Elem::BF16] {
        let gemm = Gemm { bias: Some(elem), ..Gemm::row_major(elem, Elem::F32, 60, 80, 600) };
        let a = Tensor::new(elem, 60 * 600, 1);
        let b = Tensor::new(elem, 600 * 80, 2);
        let bias = Tensor::new(elem, 80, 4);
        let (mut own, mut fallback) = (vec![0f32; 4800], vec![0f32; 4800]);
        let pool = Pool::new(2);
        let at = |c: &mut Vec<f32>| Buffers {
            a: a.bytes.as_ptr().cast(),
            b: b.bytes.as_ptr().cast(),
            c: c.as_mut_ptr().cast(),
            bias: bias.bytes.as_ptr().cast(),
        };
        let (at_own, at_fallback) = (at(&mut own), at(&mut fallback));
        // SAFETY: the tensors have the shapes' sizes.
        unsafe {
            gemm.run(&pool, at_own.a, at_own.b, at_own.c, at_own.bias);
            blocked::run(&gemm, &pool, at_fallback);
        }
        for (x, y) in own.iter().zip(&fallback) {
            assert!((x - y).abs() < 1e-4, "{elem:?}: {x} {y}");
        }
    }
}

#[test]
fn nan_and_infinity_reach_exactly_their_row_and_column() {
    for (elem, out) in TYPES {
        let gemm = Gemm::row_major(elem, out, 40, 70, 50);
        let mut a = Tensor::new(elem, 2000, 1);
        let mut b = Tensor::new(elem, 3500, 2);
        a.set(39 * 50 + 49, f32::NAN);
        b.set(49 * 70 + 69, f32::INFINITY);
        let mut c = Tensor::new(out, 2800, 3);
        // SAFETY: the tensors have the shapes' sizes.
        unsafe {
            let (a, b) = (a.bytes.as_ptr().cast(), b.bytes.as_ptr().cast());
            let at = c.bytes.as_mut_ptr().cast();
            gemm.run(&Pool::new(2), a, b, at, std::ptr::null());
        }
        for i in 0..40 {
            for j in 0..70 {
                let value = c.get(i * 70 + j);
                assert_eq!(value.is_nan(), i == 39, "{elem:?} {i} {j}");
                assert_eq!(value.is_finite(), i != 39 && j != 69, "{elem:?} {i} {j}");
            }
        }
    }
}
