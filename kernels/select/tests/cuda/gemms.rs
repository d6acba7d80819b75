//! Reference implementation of library GEMMs.

use crate::memory::load;
use frit_ir::DType;
use frit_ir::plan::{Epilogue, Gemm, Matrix};

/// Index of element (`row`, `column`) of matrix `batch`.
fn place(matrix: &Matrix, batch: usize, row: usize, column: usize) -> usize {
    let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
    batch * matrix.batch_stride + row * matrix.row_stride + column
}

/// Index of element `i` of the results of all GEMMs.
pub(crate) fn place_of(gemm: &Gemm, i: usize) -> usize {
    let (row, column) = (i / gemm.n, i % gemm.n);
    place(&gemm.d, row / gemm.m, row % gemm.m, column)
}

/// Checks the requirements of cuBLASLt.
fn check(gemm: &Gemm) {
    let (a, d) = (gemm.a.dtype, gemm.d.dtype);
    let eighth = |dtype| matches!(dtype, DType::F8E4M3 | DType::F8E5M2);
    if eighth(a) {
        let (a, b) = (&gemm.a, &gemm.b);
        assert!(eighth(b.dtype) && [a.dtype, b.dtype] != [DType::F8E5M2; 2]);
        assert!(!a.transposed && b.transposed, "the contracted axis comes last");
        assert!([gemm.m, gemm.n, gemm.k].iter().all(|size| size.is_multiple_of(16)));
        assert!(a.scale.is_some() && b.scale.is_some() && d != DType::F64);
        let biased = matches!(gemm.epilogue, Epilogue::Bias(_));
        assert!(!(biased && d == DType::F32), "a bias of f32");
        assert!(!matches!(gemm.epilogue, Epilogue::SumA(_) | Epilogue::SumB(_)));
    } else {
        assert_eq!(a, gemm.b.dtype, "operands of one type");
        let low = matches!(a, DType::F16 | DType::BF16);
        assert!(a == d || (low && d == DType::F32), "{a} matmuls written as {d}");
    }
    assert!(!gemm.d.transposed && gemm.m * gemm.n * gemm.k * gemm.batch > 0);
    let plain = matches!(gemm.epilogue, Epilogue::None | Epilogue::Bias(_) | Epilogue::Add { .. });
    assert!(plain || (gemm.batch == 1 && gemm.d.row_stride == gemm.n && a != DType::F64));
    if let Epilogue::Gelu { .. } | Epilogue::GeluGrad { .. } = gemm.epilogue {
        assert!(
            (a == d || eighth(a)) && gemm.n.is_multiple_of(8),
            "rows of {} elements of {d}",
            gemm.n
        );
    }
}

/// The result of a GEMM, before it is rounded.
#[derive(Default)]
pub(crate) struct Done {
    /// By batch, row and column.
    pub(crate) d: Vec<f64>,
    /// The same before GELU.
    pub(crate) before: Vec<f64>,
    /// Of rows, or of an operand.
    pub(crate) sums: Vec<f64>,
}

/// Multiplies `a` and `b`, each times its scale; `vector` is a bias, `matrix` the input of GELU, or an addend.
pub(crate) fn run(
    gemm: &Gemm,
    [a, b]: [&[u8]; 2],
    scales: [f64; 2],
    vector: Option<&[u8]>,
    matrix: Option<&[u8]>,
) -> Done {
    check(gemm);
    let left = |batch, i, p| scales[0] * load(a, gemm.a.dtype, place(&gemm.a, batch, i, p));
    let right = |batch, p, j| scales[1] * load(b, gemm.b.dtype, place(&gemm.b, batch, p, j));
    let Gemm { m, n, k, .. } = *gemm;
    let mut done = Done::default();
    for i in 0..gemm.batch * m * n {
        let (batch, row, column) = (i / n / m, i / n % m, i % n);
        let mut x: f64 = (0..k).map(|p| left(batch, row, p) * right(batch, p, column)).sum();
        x += vector.map_or(0.0, |bias| load(bias, gemm.d.dtype, column));
        done.before.push(x);
        done.d.push(match gemm.epilogue {
            Epilogue::Gelu { .. } => gelu(x).0,
            Epilogue::GeluGrad { .. } => {
                let before = matrix.map_or(f64::NAN, |m| load(m, gemm.d.dtype, i));
                x * gelu(before).1
            }
            Epilogue::Add { .. } => x + matrix.map_or(f64::NAN, |m| load(m, gemm.d.dtype, i)),
            _ => x,
        });
    }
    done.sums = match gemm.epilogue {
        Epilogue::GeluGrad { rows: Some(_), .. } => {
            (0..n).map(|j| (0..m).map(|i| done.d[i * n + j]).sum()).collect()
        }
        Epilogue::SumA(_) => (0..m).map(|i| (0..k).map(|p| left(0, i, p)).sum()).collect(),
        Epilogue::SumB(_) => (0..n).map(|j| (0..k).map(|p| right(0, p, j)).sum()).collect(),
        _ => vec![],
    };
    done
}

/// GELU in its tanh form, and its derivative.
fn gelu(x: f64) -> (f64, f64) {
    let slope = (2.0 / std::f64::consts::PI).sqrt();
    let t = (slope * (x + 0.044715 * x.powi(3))).tanh();
    let derivative = slope * (1.0 + 3.0 * 0.044715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * derivative)
}
