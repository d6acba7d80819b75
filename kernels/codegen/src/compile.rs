//! Public interface: which regions can be compiled, and compiling them for a target.

use crate::emit::region::{self, Program};
use crate::emit::{cuda_function, cuda_multi_tensor, host_function, pointwise};
use crate::error::{CodegenError, Unsupported};
use crate::host::{self, HostTarget};
use crate::memo::{self, Memo};
use crate::mlir::Mlir;
use crate::ptx;
use frit_ir::ops::FusionKind;
use frit_ir::plan::CudaLaunch;
use frit_ir::{Graph, TensorType};
use std::cell::LazyCell;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Minimum elements per thread: fewer do not repay the cost of starting it.
const GRAIN_ELEMENTS: usize = 16 << 10;

/// Stack of a compiling thread.
const STACK_BYTES: usize = 32 << 20;

/// The unit in which a kernel's range is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Rows of the iteration space, or equal blocks of long rows.
    Rows,
    /// Groups of 16 columns; the last may be partial.
    Columns,
}

/// How a kernel is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelMeta {
    /// Its symbol in the shared object: `extern "C" fn(operands: *const *mut u8, begin: i64, end: i64)`, with the
    /// addresses of operands and results, aligned for their elements.
    pub symbol: String,
    /// The kind it was compiled as.
    pub kind: FusionKind,
    /// What `begin` and `end` count.
    pub unit: Unit,
    /// Ranges are within `0..parallel_extent`; disjoint ranges may run concurrently, and results are bit-identical
    /// however the range is divided.
    pub parallel_extent: usize,
    /// Minimum units per thread.
    pub grain: usize,
    /// Types of the operands, in order.
    pub operands: Vec<TensorType>,
    /// Types of the results, in order.
    pub results: Vec<TensorType>,
    /// Pairs of operand and result that may share memory: the last read of each element of the operand precedes the
    /// write of the result's element at the same offset.
    pub in_place: Vec<(usize, usize)>,
}

/// Kernels for one CPU.
#[derive(Clone, Debug)]
pub struct HostObject {
    /// A shared object whose only undefined symbols are the C library's `memset` and `memcpy`.
    pub so_bytes: Vec<u8>,
    /// Its kernels, in the order of the regions.
    pub kernels: Vec<KernelMeta>,
}

/// Whether [`compile_host`] compiles this region. Cheap: no code is generated.
///
/// An integer division whose divisor may be 0 is executed by the interpreter, which reports where that happens; on CUDA
/// its result is 0.
///
/// # Errors
/// The operation that is not compiled, and why.
pub fn supported(body: &Graph, kind: FusionKind) -> Result<(), Unsupported> {
    let program = host_program(body, kind)?;
    match program.divides_by_zero() {
        true => Err(Unsupported::new("fusion", "an integer may be divided by 0")),
        false => Ok(()),
    }
}

/// Analyzes a region to be compiled for the host.
fn host_program(body: &Graph, kind: FusionKind) -> Result<Program, Unsupported> {
    match kind {
        FusionKind::RowColReduce => {
            Err(Unsupported::new("fusion", "rows and columns are reduced by two kernels on a CPU"))
        }
        _ => region::analyze(body, kind),
    }
}

/// How the region's kernel will be called, without compiling it.
///
/// # Errors
/// As [`supported`].
pub fn region_metadata(
    symbol: &str,
    body: &Graph,
    kind: FusionKind,
) -> Result<KernelMeta, Unsupported> {
    host_program(body, kind).map(|program| metadata(symbol, &program))
}

/// Compiles regions, each a symbol, a body and its kind, into one shared object.
///
/// Equal regions and targets give equal bytes. Uses all cores.
///
/// # Errors
/// [`CodegenError::Unsupported`] for a region that [`supported`] refuses; a missing linker; a target
/// without AVX2, FMA and F16C.
///
/// # Panics
/// If a symbol has 255 bytes or more.
pub fn compile_host(
    regions: &[(&str, &Graph, FusionKind)],
    target: &HostTarget,
) -> Result<HostObject, CodegenError> {
    /// Of regions as MLIR.
    static OBJECTS: Memo = Memo::new();

    target.check()?;
    let any = memo::any_symbol();
    let mut kernels = Vec::with_capacity(regions.len());
    let mut functions = Vec::with_capacity(regions.len());
    for &(symbol, body, kind) in regions {
        let program = analyze(symbol, body, kind)?;
        let text = host_function::emit(&program, &any, target.converts_bf16());
        functions.push((symbol, text));
        kernels.push(metadata(symbol, &program));
    }
    let objects = in_parallel(&functions, |mlir, (symbol, text)| {
        let object = OBJECTS.code(text, &target.llvm(), || host::object(mlir, text, target))?;
        Ok(memo::named(object, symbol))
    })?;
    let so_bytes = host::link(&objects, &target.linker)?;
    Ok(HostObject { so_bytes, kernels })
}

/// The assembly of one region, for inspection.
///
/// # Errors
/// As [`compile_host`].
pub fn host_assembly(
    symbol: &str,
    body: &Graph,
    kind: FusionKind,
    target: &HostTarget,
) -> Result<String, CodegenError> {
    target.check()?;
    let program = analyze(symbol, body, kind)?;
    let text = host_function::emit(&program, symbol, target.converts_bf16());
    host::assembly(&Mlir::new(), &text, target)
}

/// Kernels for one kind of GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaModule {
    /// PTX, version 8.0.
    pub ptx: String,
    /// How each region is launched, in the order of the regions.
    pub kernels: Vec<CudaKernel>,
}

/// How a region is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaKernel {
    /// Launches, in order: each takes a pointer per operand, then one per result, then one to scratch
    /// memory if there is any, all aligned to 16 bytes.
    pub launches: Vec<CudaLaunch>,
    /// Scratch memory, in bytes.
    pub scratch_bytes: usize,
    /// Types of the operands, in order.
    pub operands: Vec<TensorType>,
    /// Types of the results, in order.
    pub results: Vec<TensorType>,
}

/// Whether [`compile_cuda`] compiles this region.
///
/// # Errors
/// The operation that is not compiled, and why.
pub fn supported_on_cuda(body: &Graph, kind: FusionKind) -> Result<(), Unsupported> {
    cuda_kernel("kernel", body, kind).map(drop)
}

/// How the region's kernel will be launched, without compiling it.
///
/// # Errors
/// As [`supported_on_cuda`].
pub fn cuda_metadata(
    symbol: &str,
    body: &Graph,
    kind: FusionKind,
) -> Result<CudaKernel, Unsupported> {
    cuda_kernel(symbol, body, kind).map(|(kernel, _)| kernel)
}

/// Compiles regions, each a symbol, a body and its kind, into one PTX module for a chip such as
/// `sm_90`.
///
/// Equal regions give equal text. Uses all cores; needs no CUDA toolkit.
///
/// # Errors
/// [`CodegenError::Unsupported`] for a region that [`supported_on_cuda`] refuses; an unknown chip.
pub fn compile_cuda(
    regions: &[(&str, &Graph, FusionKind)],
    chip: &str,
) -> Result<CudaModule, CodegenError> {
    /// Of regions as MLIR.
    static TEXTS: Memo = Memo::new();

    let any = memo::any_symbol();
    let mut kernels = Vec::with_capacity(regions.len());
    let mut sources = Vec::with_capacity(regions.len());
    for &(symbol, body, kind) in regions {
        let (mut kernel, text) = cuda_kernel(&any, body, kind)
            .map_err(|reason| CodegenError::Unsupported { symbol: symbol.into(), reason })?;
        let blocks: Vec<_> = kernel.launches.iter().map(|l| (l.symbol.clone(), l.block)).collect();
        for launch in &mut kernel.launches {
            launch.symbol = launch.symbol.replace(&any, symbol);
        }
        sources.push((symbol, text, blocks));
        kernels.push(kernel);
    }
    let target = ptx::target(chip)?;
    let texts = in_parallel(&sources, |mlir, (symbol, source, blocks)| {
        let text = TEXTS.code(source, &target, || ptx::ptx(mlir, source, blocks, &target))?;
        Ok(String::from_utf8_lossy(&text).replace(&any, symbol))
    })?;
    Ok(CudaModule { ptx: ptx::join(&texts), kernels })
}

/// How a region is launched, and its kernels as MLIR.
fn cuda_kernel(
    symbol: &str,
    body: &Graph,
    kind: FusionKind,
) -> Result<(CudaKernel, String), Unsupported> {
    let (function, [operands, results]) = match kind {
        FusionKind::MultiTensor => cuda_multi_tensor::emit(body, symbol)?,
        _ => {
            let program = region::analyze(body, kind)?;
            let (operands, results) = program.types.split_at(program.n_inputs);
            let types = [operands.to_vec(), results.to_vec()];
            (cuda_function::emit(&program, symbol)?, types)
        }
    };
    let blocks = |n: usize, most: usize| match u32::try_from(n) {
        Ok(blocks) if n <= most => Ok(blocks),
        _ => Err(Unsupported::new("fusion", "it needs more blocks than a grid may have")),
    };
    let mut launches = Vec::with_capacity(function.launches.len());
    for l in function.launches {
        let grid = [blocks(l.grid[0], i32::MAX as usize)?, blocks(l.grid[1], 65535)?];
        launches.push(CudaLaunch {
            symbol: l.symbol,
            grid,
            block: l.block as u32,
            shared_bytes: l.shared_bytes as u32,
            grid_stride: l.grid_stride,
        });
    }
    let scratch_bytes = function.scratch_bytes;
    let kernel = CudaKernel { launches, scratch_bytes, operands, results };
    Ok((kernel, function.text))
}

fn analyze(symbol: &str, body: &Graph, kind: FusionKind) -> Result<Program, CodegenError> {
    host_program(body, kind)
        .map_err(|reason| CodegenError::Unsupported { symbol: symbol.into(), reason })
}

fn metadata(symbol: &str, program: &Program) -> KernelMeta {
    let (unit, parallel_extent, unit_elements) = match program.kind {
        FusionKind::ColReduce => {
            let lanes = host_function::LANES;
            (Unit::Columns, program.cols().div_ceil(lanes), program.rows() * lanes)
        }
        FusionKind::RowReduce => (Unit::Rows, program.rows(), program.cols()),
        _ => {
            let (blocks, cols) = pointwise::blocks(program);
            (Unit::Rows, program.rows() * blocks, cols)
        }
    };
    let (operands, results) = program.types.split_at(program.n_inputs);
    KernelMeta {
        symbol: symbol.into(),
        kind: program.kind,
        unit,
        parallel_extent,
        grain: GRAIN_ELEMENTS.div_ceil(unit_elements).min(parallel_extent).max(1),
        operands: operands.to_vec(),
        results: results.to_vec(),
        in_place: region::in_place(program),
    }
}

/// An MLIR context, made where it is needed.
type Context = LazyCell<Mlir>;

/// Applies `f` to every item on all cores, with a context of the core; results in order, or the first error in order.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    f: impl Fn(&Context, &T) -> Result<R, CodegenError> + Sync,
) -> Result<Vec<R>, CodegenError> {
    let next = AtomicUsize::new(0);
    let done: Vec<Mutex<Option<Result<R, CodegenError>>>> =
        items.iter().map(|_| Mutex::new(None)).collect();
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(items.len());
    let work = || {
        let mlir = Context::new(Mlir::new);
        while let Some((i, item)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            items.get(i).map(|item| (i, item))
        } {
            *done[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(f(&mlir, item));
        }
    };
    std::thread::scope(|scope| -> Result<(), CodegenError> {
        // MLIR and LLVM recurse over long expressions.
        let thread = || std::thread::Builder::new().stack_size(STACK_BYTES);
        let begun = (0..threads).map(|_| thread().spawn_scoped(scope, work));
        let begun = begun.collect::<Result<Vec<_>, _>>()?;
        // Joined, because glibc 2.36 may read a thread that ends while it is let go after it was freed.
        for thread in begun {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        Ok(())
    })?;
    done.into_iter()
        .map(|slot| {
            let result = slot.into_inner().unwrap_or_else(PoisonError::into_inner);
            result.expect("invariant: every item was taken by a thread")
        })
        .collect()
}
