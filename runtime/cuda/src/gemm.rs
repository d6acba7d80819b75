//! Descriptions of GEMMs without addresses: the key for selecting an algorithm.

use super::driver::{Address, GemmAddresses};
use frit_ir::DType;
use frit_ir::plan::ALIGNMENT;
use frit_ir::plan::{Epilogue, Gemm, Matrix};
use std::fmt;

/// `d = epilogue(a · b)` of row-major matrices, batched; see [`Gemm`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// Rows of `d`.
    pub m: usize,
    /// Columns of `d`.
    pub n: usize,
    /// Contracted size.
    pub k: usize,
    /// Batch size.
    pub batch: usize,
    /// `[m, k]`, or `[k, m]` if transposed.
    pub a: Operand,
    /// `[k, n]`, or `[n, k]` if transposed.
    pub b: Operand,
    /// `[m, n]`.
    pub d: Operand,
    /// The epilogue.
    pub epilogue: Kind,
}

/// An [`Epilogue`] without its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    None,
    Bias,
    Add { bias: bool },
    Gelu { bias: bool, before: bool },
    GeluGrad { rows: bool },
    SumA,
    SumB,
}

impl Kind {
    fn of(epilogue: &Epilogue) -> Kind {
        match *epilogue {
            Epilogue::None => Kind::None,
            Epilogue::Bias(_) => Kind::Bias,
            Epilogue::Add { bias, .. } => Kind::Add { bias: bias.is_some() },
            Epilogue::Gelu { bias, before } => {
                Kind::Gelu { bias: bias.is_some(), before: before.is_some() }
            }
            Epilogue::GeluGrad { rows, .. } => Kind::GeluGrad { rows: rows.is_some() },
            Epilogue::SumA(_) => Kind::SumA,
            Epilogue::SumB(_) => Kind::SumB,
        }
    }

    /// Whether the library may have no algorithm with it; the plan then has a fallback.
    pub fn is_optional(self) -> bool {
        !matches!(self, Kind::None | Kind::Add { bias: false })
    }

    /// Whether a vector is read or written.
    pub(super) fn has_vector(self) -> bool {
        match self {
            Kind::None => false,
            Kind::Add { bias } => bias,
            Kind::Gelu { bias, .. } => bias,
            Kind::GeluGrad { rows } => rows,
            Kind::Bias | Kind::SumA | Kind::SumB => true,
        }
    }

    /// Whether an epilogue of the library reads or writes a second matrix.
    pub(super) fn has_matrix(self) -> bool {
        matches!(self, Kind::GeluGrad { .. } | Kind::Gelu { before: true, .. })
    }

    fn name(self) -> &'static str {
        match self {
            Kind::None => "",
            Kind::Bias => " bias",
            Kind::Add { bias: false } => " add",
            Kind::Add { bias: true } => " add_bias",
            Kind::Gelu { bias: false, before: false } => " gelu",
            Kind::Gelu { bias: false, before: true } => " gelu_aux",
            Kind::Gelu { bias: true, before: false } => " gelu_bias",
            Kind::Gelu { bias: true, before: true } => " gelu_aux_bias",
            Kind::GeluGrad { rows: false } => " dgelu",
            Kind::GeluGrad { rows: true } => " dgelu_bgrad",
            Kind::SumA => " bgrad a",
            Kind::SumB => " bgrad b",
        }
    }
}

/// A row-major matrix.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its elements.
    pub dtype: DType,
    /// Row stride as stored, in elements.
    pub row_stride: usize,
    /// Batch stride, in elements.
    pub batch_stride: usize,
    /// Whether it is stored with its axes swapped.
    pub transposed: bool,
    /// The largest power of two, at most [`ALIGNMENT`], that divides its address.
    pub alignment_bytes: usize,
}

impl Operand {
    fn of(m: &Matrix, at: Address) -> Operand {
        let Matrix { dtype, row_stride, batch_stride, transposed, .. } = *m;
        Operand { dtype, row_stride, batch_stride, transposed, alignment_bytes: alignment(at) }
    }
}

/// The largest power of two, at most [`ALIGNMENT`], that divides an address.
fn alignment(at: Address) -> usize {
    ALIGNMENT.min(1 << at.trailing_zeros().min(16))
}

impl GemmProblem {
    /// The GEMM of a launch at these addresses. Operands of the epilogue count toward the alignment of the result, the
    /// only one of these that the library takes.
    pub fn of(g: &Gemm, at: &GemmAddresses) -> GemmProblem {
        let mut d = Operand::of(&g.d, at.d);
        for beside in [at.vector, at.matrix] {
            d.alignment_bytes = d.alignment_bytes.min(alignment(beside));
        }
        GemmProblem {
            m: g.m,
            n: g.n,
            k: g.k,
            batch: g.batch,
            a: Operand::of(&g.a, at.a),
            b: Operand::of(&g.b, at.b),
            d,
            epilogue: Kind::of(&g.epilogue),
        }
    }
}

impl GemmProblem {
    /// The same with operands that are known to be aligned to no more than so many bytes.
    pub fn aligned_to(mut self, bytes: usize) -> GemmProblem {
        for operand in [&mut self.a, &mut self.b, &mut self.d] {
            operand.alignment_bytes = operand.alignment_bytes.min(bytes);
        }
        self
    }
}

/// Everything that distinguishes it: the key in the tuning file.
impl fmt::Display for GemmProblem {
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
        f.write_str(self.epilogue.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::plan::Pointer;

    #[test]
    fn a_result_is_as_aligned_as_what_lies_beside_it() {
        let matrix = |at| Matrix {
            at,
            dtype: DType::BF16,
            row_stride: 64,
            batch_stride: 0,
            transposed: false,
            scale: None,
        };
        let gemm = Gemm {
            m: 64,
            n: 64,
            k: 64,
            batch: 1,
            a: matrix(Pointer::Read(0, 0)),
            b: matrix(Pointer::Read(1, 0)),
            d: matrix(Pointer::Write(0, 0)),
            epilogue: Epilogue::Bias(Pointer::Read(2, 0)),
        };
        let alignments = |vector, matrix| {
            let workspace = (0, 0);
            let at =
                GemmAddresses { a: 256, b: 16, d: 512, scales: [0; 2], vector, matrix, workspace };
            let problem = GemmProblem::of(&gemm, &at);
            [problem.a, problem.b, problem.d].map(|operand| operand.alignment_bytes)
        };
        assert_eq!(alignments(0, 0), [256, 16, 256]);
        assert_eq!(alignments(1024 + 6, 0), [256, 16, 2]);
        assert_eq!(alignments(1024 + 48, 1024 + 8), [256, 16, 8]);
    }
}
