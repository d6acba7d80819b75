//! Matrix products as a recipe asks the library for them, by the definition.

use crate::memory::{load, store};
use frit_ir::DType;
use frit_runtime::device::cuda::recipe::{Gemm, Matrix};

/// Where element (`row`, `column`) of product `batch` is.
fn place(matrix: &Matrix, batch: usize, row: usize, column: usize) -> usize {
    let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
    batch * matrix.batch_stride + row * matrix.row_stride + column
}

/// What cuBLASLt can do, as far as recipes may use it.
fn check(gemm: &Gemm) {
    let (a, d) = (gemm.a.dtype, gemm.d.dtype);
    assert_eq!(a, gemm.b.dtype, "operands of one type");
    let low = matches!(a, DType::F16 | DType::BF16);
    assert!(a == d || (low && d == DType::F32), "{a} products written as {d}");
    assert!(!gemm.d.transposed && gemm.m * gemm.n * gemm.k * gemm.batch > 0);
}

/// Runs a product on the bytes of its operands; `bias` if there is one.
pub(crate) fn run(gemm: &Gemm, a: &[u8], b: &[u8], bias: Option<&[u8]>, d: &mut [u8]) {
    check(gemm);
    for batch in 0..gemm.batch {
        for i in 0..gemm.m {
            for j in 0..gemm.n {
                let mut sum = 0.0;
                for p in 0..gemm.k {
                    sum += load(a, gemm.a.dtype, place(&gemm.a, batch, i, p))
                        * load(b, gemm.b.dtype, place(&gemm.b, batch, p, j));
                }
                sum += bias.map_or(0.0, |bias| load(bias, gemm.d.dtype, j));
                store(d, gemm.d.dtype, place(&gemm.d, batch, i, j), sum);
            }
        }
    }
}
