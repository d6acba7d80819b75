//! Launches: how a GPU computes a kernel that is not generated, in order on the task's stream.
//!
//! Launches are selected from a kernel's body alone, on a machine that needs no GPU. A device prepares the
//! modules when it loads the plan and afterwards only launches. A candidate may launch generated kernels of the plan.

use super::{ALIGNMENT, KernelId, Operation};
use crate::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The launches of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Launches {
    /// In order.
    pub launches: Vec<Launch>,
    /// Scratch memory of all launches, in bytes; candidates may have more, see [`Pointer::Scratch`].
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub scratch_bytes: usize,
}

/// One thing that is put on a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    /// A kernel of CUDA C++, compiled when the plan is loaded.
    Source(SourceKernel),
    /// A GEMM by cuBLASLt.
    Gemm(Gemm),
    /// A generated kernel of the plan.
    Generated(GeneratedLaunch),
    /// An operation by cuDNN; only within a candidate.
    Operation(OperationLaunch),
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
    /// Several ways to compute the same, of which one runs. The last is the fallback, which every GPU can run; the others
    /// need an algorithm, or an engine, that a library may not have.
    Choice(Vec<Candidate>),
}

/// A candidate: launches that compute the same result as the others of the choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its implementation.
    pub name: CandidateName,
    /// Scratch memory of this candidate alone, in bytes, behind that of the launches around the choice.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub scratch_bytes: usize,
    /// In order.
    pub launches: Vec<Launch>,
}

/// The implementation of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CandidateName {
    /// A GEMM of cuBLASLt with an epilogue.
    Cublaslt,
    /// An operation of cuDNN.
    Cudnn,
    /// An operation of cuDNN that may add in any order.
    CudnnAnyOrder,
    /// A GEMM without the epilogue, and generated kernels.
    Unfused,
    /// Hand-written kernels, and GEMMs without an epilogue.
    Frit,
}

/// Device memory, in terms of the task that is launched: `read 0`, `write 1 + 64`, `scratch + 256`, `fault` in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Pointer {
    /// The task's `i`-th operand, from this byte on.
    Read(usize, usize),
    /// The task's `i`-th result, from this byte on.
    Write(usize, usize),
    /// Scratch memory of the kernel, from this byte on: first that of all launches, then that of the candidate that runs.
    /// Its content is lost between tasks.
    Scratch(usize),
    /// Three i64 of the task, zero at first, where a kernel reports an index outside of its axis: a
    /// nonzero number, the index, the size of the axis.
    Fault,
}

/// A generated kernel of the plan with its operands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratedLaunch {
    /// Index among the plan's kernels. Its entry is [`Entry::Cuda`](super::Entry::Cuda).
    pub kernel: KernelId,
    /// Where its operands are.
    pub reads: Vec<Pointer>,
    /// Where it writes its results; one may be in the place of an operand that the kernel reads element by element.
    pub writes: Vec<Pointer>,
    /// Its scratch memory, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<Pointer>,
}

/// A kernel of CUDA C++ with its sizes bound.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceKernel {
    /// The file in `kernels/library/cuda`, by its name without `.cu`.
    pub file: String,
    /// Preprocessor definitions: macros and their values. Equal files with equal definitions are
    /// compiled once.
    pub defines: Vec<(String, String)>,
    /// The `extern "C" __global__` function.
    pub entry: String,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block, in x.
    pub block: u32,
    /// Dynamic shared memory per block, in bytes; above 48 KiB a kernel must be allowed to have it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_bytes: u32,
    /// Its parameters.
    pub arguments: Vec<Argument>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "ArgumentText", from = "ArgumentText")]
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
    /// A structure of pointers, by value.
    Pointers(Vec<Pointer>),
}

/// An argument as it is written: a string, an integer, a list of either (an empty one is of integers), or a number under its
/// type.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ArgumentText {
    I64(i64),
    Pointer(Pointer),
    Words(Vec<i64>),
    Pointers(Vec<Pointer>),
    F32 {
        f32: f32,
    },
    F64 {
        #[serde(with = "crate::ops::number")]
        f64: f64,
    },
}

/// `d = epilogue(a · b)` of row-major matrices, batched, accumulated in f32 (f64 for f64 operands).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// Rows of `d`.
    pub m: usize,
    /// Columns of `d`.
    pub n: usize,
    /// Contracted size.
    pub k: usize,
    /// Number of GEMMs; operands advance by their strides.
    pub batch: usize,
    /// `[m, k]`, or `[k, m]` if transposed.
    pub a: Matrix,
    /// `[k, n]`, or `[n, k]` if transposed.
    pub b: Matrix,
    /// `[m, n]`; never transposed.
    pub d: Matrix,
    /// The epilogue, applied before rounding.
    #[serde(default, skip_serializing_if = "Epilogue::is_none")]
    pub epilogue: Epilogue,
}

/// A row-major matrix in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Its first element.
    pub at: Pointer,
    /// Its elements.
    pub dtype: DType,
    /// Elements from one row, as stored, to the next.
    pub row_stride: usize,
    /// Elements from one GEMM's matrix to the next; 0 if all share it.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub batch_stride: usize,
    /// Whether it is stored with its axes swapped.
    #[serde(default, skip_serializing_if = "is_false")]
    pub transposed: bool,
    /// An f32 that its elements are multiplied by, if they are 8-bit floats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Pointer>,
}

/// Operations that a GEMM applies to its result before rounding, or computes in addition. Vectors
/// and matrices have the result's dtype; matrices have its shape, without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds a vector of `n` elements to each row.
    Bias(Pointer),
    /// Adds a matrix, and a vector to each row.
    Add {
        /// `[m, n]`; it may be where the result is written.
        matrix: Pointer,
        /// `n` elements.
        bias: Option<Pointer>,
    },
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

/// An operation of cuDNN and where its tensors are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationLaunch {
    /// What is computed.
    pub operation: Operation,
    /// Where its tensors are, in their order.
    pub at: Vec<Pointer>,
}

impl CandidateName {
    /// In a word, as the plan has it.
    pub fn word(self) -> &'static str {
        match self {
            CandidateName::Cublaslt => "cublaslt",
            CandidateName::Cudnn => "cudnn",
            CandidateName::CudnnAnyOrder => "cudnn_any_order",
            CandidateName::Unfused => "unfused",
            CandidateName::Frit => "frit",
        }
    }
}

impl Launches {
    /// All launches, those of every candidate among them.
    pub fn every_launch(&self) -> Vec<&Launch> {
        let mut all = Vec::new();
        self.launches.iter().for_each(|launch| launch.collect(&mut all));
        all
    }

    /// Scratch memory of the launches and of the candidate that has most, in bytes.
    pub fn most_scratch_bytes(&self) -> usize {
        self.scratch_bytes.saturating_add(of_candidates(&self.launches))
    }

    /// Gives every launch of a generated kernel its kernel, which it names by its index in `kernels`, and appends the
    /// scratch memory of that kernel, so many bytes, to that of the candidate.
    pub fn link(&mut self, kernels: &[(KernelId, usize)]) {
        self.scratch_bytes = link(&mut self.launches, self.scratch_bytes, kernels);
    }

    /// Whether generated kernels compute any of it.
    pub fn launches_generated(&self) -> bool {
        self.every_launch().iter().any(|launch| matches!(launch, Launch::Generated(_)))
    }

    /// Whether libraries compute any of it, with an algorithm that is chosen.
    pub fn leaves_a_choice(&self) -> bool {
        self.launches.iter().any(|l| matches!(l, Launch::Gemm(_) | Launch::Choice(_)))
    }
}

impl Launch {
    /// Adds this launch and those that it chooses from.
    fn collect<'a>(&'a self, all: &mut Vec<&'a Launch>) {
        all.push(self);
        let Launch::Choice(candidates) = self else { return };
        candidates.iter().flat_map(|c| &c.launches).for_each(|launch| launch.collect(all));
    }
}

/// Scratch memory of the candidates of some launches, in bytes: only one of them runs at a time.
fn of_candidates(launches: &[Launch]) -> usize {
    let of_launch = |launch: &Launch| match launch {
        Launch::Choice(candidates) => candidates
            .iter()
            .map(|c| c.scratch_bytes.saturating_add(of_candidates(&c.launches)))
            .max()
            .unwrap_or(0),
        _ => 0,
    };
    launches.iter().map(of_launch).max().unwrap_or(0)
}

/// [`Launches::link`] for launches whose scratch memory has `end` bytes; returns how many it then has.
fn link(launches: &mut [Launch], mut end: usize, kernels: &[(KernelId, usize)]) -> usize {
    for launch in &mut *launches {
        let Launch::Generated(launch) = launch else { continue };
        let (kernel, bytes) = kernels[launch.kernel.0];
        launch.kernel = kernel;
        launch.scratch = (bytes > 0).then_some(Pointer::Scratch(end));
        end += bytes.next_multiple_of(ALIGNMENT);
    }
    for launch in launches {
        let Launch::Choice(candidates) = launch else { continue };
        for candidate in candidates {
            let all = link(&mut candidate.launches, end + candidate.scratch_bytes, kernels);
            candidate.scratch_bytes = all - end;
        }
    }
    end
}

impl Epilogue {
    /// Whether nothing is applied.
    pub fn is_none(&self) -> bool {
        *self == Epilogue::None
    }
}

impl Pointer {
    /// The byte at which it begins within its operand, result or scratch memory.
    pub fn offset_bytes(self) -> usize {
        match self {
            Pointer::Read(_, at) | Pointer::Write(_, at) | Pointer::Scratch(at) => at,
            Pointer::Fault => 0,
        }
    }

    /// So many bytes further.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Pointer {
        match self {
            Pointer::Read(i, at) => Pointer::Read(i, at + bytes),
            Pointer::Write(i, at) => Pointer::Write(i, at + bytes),
            Pointer::Scratch(at) => Pointer::Scratch(at + bytes),
            Pointer::Fault => Pointer::Fault,
        }
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pointer::Read(i, _) => write!(f, "read {i}")?,
            Pointer::Write(i, _) => write!(f, "write {i}")?,
            Pointer::Scratch(_) => f.write_str("scratch")?,
            Pointer::Fault => f.write_str("fault")?,
        }
        match self.offset_bytes() {
            0 => Ok(()),
            at => write!(f, " + {at}"),
        }
    }
}

impl FromStr for Pointer {
    type Err = String;

    fn from_str(text: &str) -> Result<Pointer, String> {
        let refuse = || format!("`{text}` is no pointer");
        let number = |text: &str| text.parse::<usize>().map_err(|_| refuse());
        let (base, at) = match text.split_once(" + ") {
            Some((base, at)) => (base, number(at)?),
            None => (text, 0),
        };
        match (base.split_once(' '), base) {
            (Some(("read", i)), _) => Ok(Pointer::Read(number(i)?, at)),
            (Some(("write", i)), _) => Ok(Pointer::Write(number(i)?, at)),
            (None, "scratch") => Ok(Pointer::Scratch(at)),
            (None, "fault") if at == 0 => Ok(Pointer::Fault),
            _ => Err(refuse()),
        }
    }
}

impl From<Pointer> for String {
    fn from(pointer: Pointer) -> String {
        pointer.to_string()
    }
}

impl TryFrom<String> for Pointer {
    type Error = String;

    fn try_from(text: String) -> Result<Pointer, String> {
        text.parse()
    }
}

impl From<Argument> for ArgumentText {
    fn from(argument: Argument) -> ArgumentText {
        match argument {
            Argument::Pointer(pointer) => ArgumentText::Pointer(pointer),
            Argument::I64(x) => ArgumentText::I64(x),
            Argument::F32(f32) => ArgumentText::F32 { f32 },
            Argument::F64(f64) => ArgumentText::F64 { f64 },
            Argument::Words(words) => ArgumentText::Words(words),
            Argument::Pointers(pointers) => ArgumentText::Pointers(pointers),
        }
    }
}

impl From<ArgumentText> for Argument {
    fn from(text: ArgumentText) -> Argument {
        match text {
            ArgumentText::Pointer(pointer) => Argument::Pointer(pointer),
            ArgumentText::I64(x) => Argument::I64(x),
            ArgumentText::F32 { f32 } => Argument::F32(f32),
            ArgumentText::F64 { f64 } => Argument::F64(f64),
            ArgumentText::Words(words) => Argument::Words(words),
            ArgumentText::Pointers(pointers) => Argument::Pointers(pointers),
        }
    }
}

/// Whether a count of bytes need not be written.
pub(super) fn is_zero(n: &u32) -> bool {
    *n == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}
