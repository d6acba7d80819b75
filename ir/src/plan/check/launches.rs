//! Launches: every pointer lies within its operand, result or scratch memory, together with all bytes known to be
//! accessed through it. CUDA C++ kernels receive their sizes as arguments; for those only the first byte is
//! checked. A generated kernel is one of the plan, and has its operands and its scratch memory.

use crate::plan::{
    Argument, CUDA_OPERAND_ALIGNMENT, Candidate, Entry, Epilogue, Gemm, GeneratedLaunch, Kernel,
    KernelId, Launch, Launches, Matrix, OperationLaunch, Plan, Pointer, SourceKernel, Strided,
    TiVec,
};
use crate::{DType, Graph, Op};

/// Most threads of a block, and most dynamic shared memory of one, in bytes, on any GPU.
pub(super) const MAX_BLOCK: u32 = 1024;
pub(super) const MAX_SHARED: u32 = 227 << 10;
/// Bytes of a fault.
const FAULT_BYTES: usize = 24;

type Checked = Result<(), String>;

/// The memory of a task.
#[derive(Clone, Copy)]
struct Sizes<'a> {
    reads: &'a [usize],
    writes: &'a [usize],
    scratch: usize,
    /// Whether additions have one order.
    deterministic: bool,
    /// Those of the plan.
    kernels: &'a TiVec<KernelId, Kernel>,
}

/// Checks the launches of a kernel.
///
/// # Errors
/// The first launch that exceeds its memory, or that no device supports.
pub(super) fn check(plan: &Plan, body: &Graph, selected: &Launches) -> Checked {
    let (reads, writes) = operand_bytes(body);
    let sizes = Sizes {
        reads: &reads,
        writes: &writes,
        scratch: selected.scratch_bytes,
        deterministic: plan.deterministic,
        kernels: &plan.kernels,
    };
    sizes.list(&selected.launches, false)
}

/// The sizes of what a body reads and of what it writes.
fn operand_bytes(body: &Graph) -> (Vec<usize>, Vec<usize>) {
    let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let reads = inputs.map(|(_, n)| body.ty(n.outputs[0]).bytes()).collect();
    (reads, body.outputs.iter().map(|o| body.ty(o.value).bytes()).collect())
}

impl Sizes<'_> {
    /// So many bytes from a pointer on are there.
    fn span(&self, at: Pointer, bytes: usize) -> Checked {
        let size = match at {
            Pointer::Read(i, _) => self.reads.get(i).copied(),
            Pointer::Write(i, _) => self.writes.get(i).copied(),
            Pointer::Scratch(_) => Some(self.scratch),
            Pointer::Fault => Some(FAULT_BYTES),
        };
        let end = at.offset_bytes().checked_add(bytes);
        match (size, end) {
            (Some(size), Some(end)) if end <= size => Ok(()),
            _ => Err(format!("{bytes} bytes from `{at}` on are out of bounds")),
        }
    }

    /// Launches; operations of cuDNN are part of a candidate.
    fn list(&self, launches: &[Launch], in_candidate: bool) -> Checked {
        launches.iter().try_for_each(|launch| match launch {
            Launch::Source(kernel) => self.source(kernel),
            Launch::Gemm(gemm) => self.gemm(gemm),
            Launch::Generated(launch) => self.generated(launch),
            Launch::Operation(_) if !in_candidate => {
                Err("an operation of cuDNN has no fallback".into())
            }
            Launch::Operation(launch) => self.operation(launch),
            Launch::Copy { from, to, bytes } => {
                self.span(*from, *bytes)?;
                self.span(*to, *bytes)
            }
            Launch::Zero { at, bytes } => self.span(*at, *bytes),
            Launch::Choice(candidates) => self.choice(candidates),
        })
    }

    fn choice(&self, candidates: &[Candidate]) -> Checked {
        let [others @ .., fallback] = candidates else {
            return Err("a choice has no fallback".into());
        };
        let is_repeated = |i: usize| candidates[..i].iter().any(|c| c.name == candidates[i].name);
        if others.is_empty() || (0..candidates.len()).any(is_repeated) {
            return Err("a choice is not between candidates of different names".into());
        }
        let list = |candidate: &Candidate, in_candidate: bool| {
            let scratch = self.scratch.checked_add(candidate.scratch_bytes);
            let scratch = scratch.ok_or("a candidate has too much scratch memory")?;
            Sizes { scratch, ..*self }.list(&candidate.launches, in_candidate)
        };
        others.iter().try_for_each(|candidate| list(candidate, true))?;
        list(fallback, false)
    }

    fn generated(&self, launch: &GeneratedLaunch) -> Checked {
        let kernel = self.kernels.get(launch.kernel);
        let Some((Kernel { name, body, .. }, Entry::Cuda { scratch_bytes, .. })) =
            kernel.map(|kernel| (kernel, &kernel.entry))
        else {
            return Err(format!("there is no generated kernel {}", launch.kernel));
        };
        let (reads, writes) = operand_bytes(body);
        let GeneratedLaunch { reads: from, writes: to, scratch, .. } = launch;
        let fits = reads.len() == from.len()
            && writes.len() == to.len()
            && scratch.is_some() == (*scratch_bytes > 0);
        if !fits {
            return Err(format!("`{name}` lacks operands, results or scratch memory"));
        }
        let scratch = scratch.iter().map(|at| (at, *scratch_bytes));
        let operands = from.iter().zip(reads).chain(to.iter().zip(writes));
        operands.chain(scratch).try_for_each(|(at, bytes)| {
            self.span(*at, bytes)?;
            match at.offset_bytes().is_multiple_of(CUDA_OPERAND_ALIGNMENT) {
                true => Ok(()),
                false => Err(format!("`{name}` has an operand that is not aligned at `{at}`")),
            }
        })
    }

    fn source(&self, kernel: &SourceKernel) -> Checked {
        let fits = !kernel.grid.contains(&0)
            && (1..=MAX_BLOCK).contains(&kernel.block)
            && kernel.shared_bytes <= MAX_SHARED;
        if !fits {
            return Err(format!("`{}` has an impossible grid", kernel.entry));
        }
        let pointers = kernel.arguments.iter().flat_map(|argument| match argument {
            Argument::Pointer(pointer) => std::slice::from_ref(pointer),
            Argument::Pointers(pointers) => pointers,
            _ => &[],
        });
        pointers.copied().try_for_each(|at| self.span(at, 0))
    }

    fn gemm(&self, gemm: &Gemm) -> Checked {
        let Gemm { m, n, k, batch, ref a, ref b, ref d, epilogue } = *gemm;
        if d.transposed || d.scale.is_some() {
            return Err("the result of a GEMM is transposed or scaled".into());
        }
        self.matrix(a, [m, k], batch)?;
        self.matrix(b, [k, n], batch)?;
        self.matrix(d, [m, n], batch)?;
        let vector = |at: Pointer, n: usize| {
            self.span(at, n.checked_mul(d.dtype.size()).ok_or("a vector is too long")?)
        };
        let all = m.checked_mul(n).ok_or("a matrix is too large")?;
        match epilogue {
            Epilogue::None => Ok(()),
            Epilogue::Bias(at) | Epilogue::SumB(at) => vector(at, n),
            Epilogue::SumA(at) => vector(at, m),
            Epilogue::Add { matrix, bias } => {
                vector(matrix, all)?;
                bias.map_or(Ok(()), |at| vector(at, n))
            }
            Epilogue::Gelu { bias, before } => {
                bias.map_or(Ok(()), |at| vector(at, n))?;
                before.map_or(Ok(()), |at| vector(at, all))
            }
            Epilogue::GeluGrad { before, rows } => {
                vector(before, all)?;
                rows.map_or(Ok(()), |at| vector(at, n))
            }
        }
    }

    fn matrix(&self, matrix: &Matrix, [rows, columns]: [usize; 2], batch: usize) -> Checked {
        if let Some(scale) = matrix.scale {
            self.span(scale, DType::F32.size())?;
        }
        let (lines, line) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
        let sizes = [batch, lines, line];
        let strides = [matrix.batch_stride, matrix.row_stride, 1];
        self.strided(matrix.at, &sizes, &strides, matrix.dtype)
    }

    fn operation(&self, launch: &OperationLaunch) -> Checked {
        let OperationLaunch { operation, at } = launch;
        if at.len() != operation.tensors.len() || !operation.is_complete() {
            return Err("an operation of cuDNN lacks tensors".into());
        }
        if operation.any_order && self.deterministic {
            return Err("an operation of cuDNN adds in any order in a deterministic plan".into());
        }
        at.iter().zip(&operation.tensors).try_for_each(|(at, tensor)| {
            let Strided { dtype, sizes, strides, .. } = tensor;
            if sizes.len() != strides.len() {
                return Err("an axis lacks its stride".into());
            }
            self.strided(*at, sizes, strides, *dtype)
        })
    }

    /// All elements of a grid are there.
    fn strided(&self, at: Pointer, sizes: &[usize], strides: &[usize], dtype: DType) -> Checked {
        if sizes.contains(&0) {
            return self.span(at, 0);
        }
        let last = sizes.iter().zip(strides).try_fold(0_usize, |last, (size, stride)| {
            last.checked_add((size - 1).checked_mul(*stride)?)
        });
        let bytes = last.and_then(|last| last.checked_add(1)?.checked_mul(dtype.size()));
        self.span(at, bytes.ok_or("a tensor is too large")?)
    }
}
