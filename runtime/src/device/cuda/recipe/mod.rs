//! What the GPU does for one kernel of a plan: launches, one after the other on the task's stream.
//!
//! A recipe is made from a kernel's body alone, so that it can be made, read and tested on a machine
//! with no GPU. The compiler asks [`Recipe::of`] to refuse a body that has none; the device makes the
//! modules ready when it loads the plan and only launches afterwards.

mod adafactor;
mod assembler;
mod attention;
mod attention_offer;
mod batch_norm;
mod batch_norm_offer;
mod conv;
mod conv_offer;
mod conv_tiles;
mod convert;
mod embedding;
mod epilogue;
mod index;
mod kernel;
mod layout;
mod matmul;
mod operation;
mod order;
mod pool;
mod pool_offer;
mod quantize;
mod random;
mod reduce;
mod sort;

use assembler::Assembler;
use frit_ir::{DType, Graph};

pub(super) use kernel::c_type;
pub use operation::{Direction, Offer, Operation, OperationKind, PoolFunction, Strided};

/// The launches of one kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recipe {
    /// In order.
    pub launches: Vec<Launch>,
    /// Device memory that the launches share among themselves, in bytes; see [`Pointer::Scratch`].
    pub scratch_bytes: usize,
}

/// One thing that is put on a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Launch {
    /// A kernel of CUDA C++, compiled when the plan is loaded.
    Source(SourceKernel),
    /// A matrix product by cuBLASLt.
    Gemm(Gemm),
    /// A matrix product with an epilogue that cuBLASLt may not have for it, and what does the same then.
    Fused(Gemm, Vec<Launch>),
    /// An operation that cuDNN may have an engine for, and what does the same.
    Offer(Box<Offer>),
    /// Copies bytes on the device.
    Copy {
        /// From here.
        from: Pointer,
        /// To here.
        to: Pointer,
        /// Number of bytes.
        bytes: usize,
    },
    /// Sets every byte to zero.
    Zero {
        /// From here on.
        at: Pointer,
        /// Number of bytes.
        bytes: usize,
    },
}

/// Device memory, in terms of the task that a recipe is launched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointer {
    /// The task's `i`-th operand, from this byte on.
    Read(usize, usize),
    /// The task's `i`-th result, from this byte on.
    Write(usize, usize),
    /// The recipe's own memory, from this byte on. Its content is lost between tasks.
    Scratch(usize),
    /// Three i64 of the task, zero at first, where a kernel reports an index outside of its axis: a
    /// nonzero number, the index, the size of the axis.
    Fault,
}

/// A kernel of CUDA C++ with its sizes bound.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceKernel {
    /// The file in `kernels/library/cuda`, by its name without `.cu`.
    pub file: &'static str,
    /// What the file leaves to be defined: macros and their values. Equal files with equal
    /// definitions are compiled once.
    pub defines: Vec<(&'static str, String)>,
    /// The `extern "C" __global__` function.
    pub entry: &'static str,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block, in x.
    pub block: u32,
    /// Dynamic shared memory per block, in bytes; above 48 KiB a kernel must be allowed to have it.
    pub shared_bytes: u32,
    /// Its parameters.
    pub arguments: Vec<Argument>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A pointer.
    Pointer(Pointer),
    /// A `long long`.
    I64(i64),
    /// A `float`.
    F32(f32),
    /// A `double`.
    F64(f64),
    /// A structure of `long long`s, by value.
    Words(Vec<i64>),
}

/// `d = epilogue(a · b)` of row-major matrices, batched, accumulated in f32 (f64 for f64 operands).
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of `d`.
    pub m: usize,
    /// Columns of `d`.
    pub n: usize,
    /// Contracted size.
    pub k: usize,
    /// Number of products; operands advance by their strides.
    pub batch: usize,
    /// `[m, k]`, or `[k, m]` if transposed.
    pub a: Matrix,
    /// `[k, n]`, or `[n, k]` if transposed.
    pub b: Matrix,
    /// `[m, n]`; never transposed.
    pub d: Matrix,
    /// What is applied to the product before it is rounded.
    pub epilogue: Epilogue,
}

/// A row-major matrix in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Its first element.
    pub at: Pointer,
    /// Its elements.
    pub dtype: DType,
    /// Elements from one row, as stored, to the next.
    pub row_stride: usize,
    /// Elements from one product's matrix to the next; 0 if all share it.
    pub batch_stride: usize,
    /// Whether it is stored with its axes swapped.
    pub transposed: bool,
    /// An f32 that its elements are multiplied by, if they are 8-bit floats.
    pub scale: Option<Pointer>,
}

/// What a matrix product applies to its result before it is rounded, or computes beside it. Vectors and
/// matrices have the result's dtype; matrices have its shape, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Adds a vector of `n` elements to each row.
    Bias(Pointer),
    /// Adds `bias`, writes the sum to `before`, applies gelu in its tanh form.
    Gelu {
        /// `n` elements.
        bias: Option<Pointer>,
        /// `[m, n]`.
        before: Option<Pointer>,
    },
    /// Multiplies by the derivative of that function at `before`.
    GeluGrad {
        /// `[m, n]`.
        before: Pointer,
        /// The sum of all rows of the result, `n` elements.
        rows: Option<Pointer>,
    },
    /// Writes the sums of an operand over the contracted axis: of `a`, `m` elements.
    SumA(Pointer),
    /// Of `b`, `n` elements.
    SumB(Pointer),
}

impl Recipe {
    /// The recipe of a body that is not generated code; `None` if there is none.
    pub fn of(body: &Graph) -> Option<Recipe> {
        Assembler::new(body).assemble()
    }

    /// Whether libraries compute any of it, with an algorithm that is chosen.
    pub(in crate::device::cuda) fn leaves_a_choice(&self) -> bool {
        let is_choice =
            |l: &Launch| matches!(l, Launch::Gemm(_) | Launch::Fused(..) | Launch::Offer(_));
        self.launches.iter().any(is_choice)
    }

    /// All launches, those of every choice among them.
    pub fn every_launch(&self) -> Vec<&Launch> {
        let mut all = Vec::new();
        self.launches.iter().for_each(|launch| launch.collect(&mut all));
        all
    }
}

impl Launch {
    /// Adds this launch and those that it chooses from.
    fn collect<'a>(&'a self, all: &mut Vec<&'a Launch>) {
        all.push(self);
        match self {
            Launch::Fused(_, otherwise) => otherwise.iter().for_each(|l| l.collect(all)),
            Launch::Offer(offer) => {
                let Offer { before, after, otherwise, .. } = &**offer;
                before.iter().chain(after).chain(otherwise).for_each(|l| l.collect(all));
            }
            _ => {}
        }
    }
}
