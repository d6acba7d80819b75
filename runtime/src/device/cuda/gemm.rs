//! Matrix products without their addresses: what an algorithm is chosen for.

use super::driver::{Address, ProductAddresses};
use super::recipe::{Epilogue, Gemm, Matrix};
use frit_ir::DType;
use frit_ir::plan::ALIGNMENT;
use std::fmt;

/// `d = a · b (+ bias)` of row-major matrices, batched; see [`Gemm`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of `d`.
    pub m: usize,
    /// Columns of `d`.
    pub n: usize,
    /// Contracted size.
    pub k: usize,
    /// Number of products.
    pub batch: usize,
    /// `[m, k]`, or `[k, m]` if transposed.
    pub a: Operand,
    /// `[k, n]`, or `[n, k]` if transposed.
    pub b: Operand,
    /// `[m, n]`.
    pub d: Operand,
    /// Whether a vector of `n` elements of the result's dtype is added to each row.
    pub bias: bool,
}

/// A row-major matrix.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its elements.
    pub dtype: DType,
    /// Elements from one row, as stored, to the next.
    pub row_stride: usize,
    /// Elements from one product's matrix to the next.
    pub batch_stride: usize,
    /// Whether it is stored with its axes swapped.
    pub transposed: bool,
    /// The power of two that its address is a multiple of, at most [`ALIGNMENT`].
    pub alignment_bytes: usize,
}

impl Operand {
    fn of(m: &Matrix, at: Address) -> Operand {
        let Matrix { dtype, row_stride, batch_stride, transposed, .. } = *m;
        let alignment_bytes = ALIGNMENT.min(1 << at.trailing_zeros().min(16));
        Operand { dtype, row_stride, batch_stride, transposed, alignment_bytes }
    }
}

impl Product {
    /// The product of a recipe at these addresses.
    pub(super) fn of(g: &Gemm, at: &ProductAddresses) -> Product {
        Product {
            m: g.m,
            n: g.n,
            k: g.k,
            batch: g.batch,
            a: Operand::of(&g.a, at.a),
            b: Operand::of(&g.b, at.b),
            d: Operand::of(&g.d, at.d),
            bias: matches!(g.epilogue, Epilogue::Bias(_)),
        }
    }
}

/// Everything that distinguishes it, in one word per operand: the key of the tuning file.
impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)?;
        if self.batch != 1 {
            write!(f, " batch {}", self.batch)?;
        }
        for (name, operand) in [("a", &self.a), ("b", &self.b), ("d", &self.d)] {
            write!(f, " {name}:{}:{}", operand.dtype, operand.row_stride)?;
            if self.batch != 1 {
                write!(f, ":{}", operand.batch_stride)?;
            }
            if operand.transposed {
                write!(f, ":t")?;
            }
            if operand.alignment_bytes < ALIGNMENT {
                write!(f, " aligned {}", operand.alignment_bytes)?;
            }
        }
        if self.bias { write!(f, " bias") } else { Ok(()) }
    }
}
