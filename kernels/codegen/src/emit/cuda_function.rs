//! The frame of a CUDA kernel: launch shape and signature. Operands are aligned to 16 bytes.
//!
//! Bodies are in [`super::cuda_pointwise`], [`super::cuda_row_reduce`], [`super::cuda_col_reduce`] and
//! [`super::cuda_row_col_reduce`].

use super::cuda_col_reduce::{self, Stage};
use super::cuda_pointwise::{self, BYTES_IN_FLIGHT, loaded_bytes};
use super::cuda_row_col_reduce;
use super::cuda_row_reduce;
use super::expr::Expr;
use super::load_store::Memory;
use super::point::Emitter;
use super::region::Program;
use super::text::{Elem, Type, Val};
use super::view::Affine;
use crate::error::Unsupported;
use frit_ir::ops::FusionKind;

/// The text of a region's kernels and how they are launched.
pub(crate) struct CudaFunction {
    pub(crate) text: String,
    /// In order.
    pub(crate) launches: Vec<Launch>,
    /// Bytes of the scratch memory that every launch takes as its last argument; 0 for none.
    pub(crate) scratch_bytes: usize,
}

/// One launch.
pub(crate) struct Launch {
    pub(crate) symbol: String,
    /// Threads per block.
    pub(crate) block: usize,
    /// Blocks in x and y.
    pub(crate) grid: [usize; 2],
    /// Dynamic shared memory per block, in bytes.
    pub(crate) shared_bytes: usize,
    /// Whether fewer blocks in x compute the same.
    pub(crate) grid_stride: bool,
}

/// The kernels of the region `symbol`, called with pointers to operands and results.
pub(crate) fn emit(program: &Program, symbol: &str) -> Result<CudaFunction, Unsupported> {
    let width = vector_width(program);
    let splits = match program.kind {
        FusionKind::RowColReduce => Some(cuda_row_col_reduce::parts(program, width)?),
        FusionKind::ColReduce => {
            Some(cuda_col_reduce::row_splits(program, width)).filter(|n| *n > 1)
        }
        _ => None,
    };
    let Some(splits) = splits else {
        let (text, launch) = function(program, symbol, 0, |e, globals| match program.kind {
            FusionKind::RowReduce => cuda_row_reduce::rows(e, symbol, globals),
            FusionKind::ColReduce => cuda_col_reduce::cols(e, symbol, globals, Stage::Whole),
            _ => Ok(cuda_pointwise::emit(e)),
        })?;
        return Ok(CudaFunction { text, launches: vec![launch], scratch_bytes: 0 });
    };
    let scratch = cuda_col_reduce::scratch_len(program, splits);
    let (mut text, mut launches) = (String::new(), Vec::new());
    for (suffix, stage) in [("_parts", Stage::Parts(splits)), ("", Stage::Total(splits))] {
        let symbol = format!("{symbol}{suffix}");
        let (stage, launch) =
            function(program, &symbol, scratch, |e, globals| match (program.kind, stage) {
                (FusionKind::RowColReduce, Stage::Parts(parts)) => {
                    cuda_row_col_reduce::rows(e, &symbol, globals, parts)
                }
                _ => cuda_col_reduce::cols(e, &symbol, globals, stage),
            })?;
        text.push_str(&stage);
        launches.push(launch);
    }
    Ok(CudaFunction { text, launches, scratch_bytes: scratch * 4 })
}

/// Threads per block, and blocks in x and y.
pub(crate) type Shape = (usize, [usize; 2]);

/// One kernel; `scratch` is the number of f32 of its scratch memory.
fn function(
    program: &Program,
    symbol: &str,
    scratch: usize,
    body: impl FnOnce(&mut Emitter<'_>, &mut String) -> Result<Shape, Unsupported>,
) -> Result<(String, Launch), Unsupported> {
    let width = vector_width(program);
    let memory = Memory::CUDA;
    let mut e = Emitter::new(program, width, memory);
    let mut globals = String::new();
    let (block, grid) = body(&mut e, &mut globals)?;
    let mut arguments: Vec<String> =
        (0..program.types.len()).map(|i| format!("%arg{i}: {}", e.buffer(i).ty(memory))).collect();
    if scratch > 0 {
        arguments.push(format!("%arg{}: memref<{scratch}xf32>", program.types.len()));
    }
    let shared_bytes = e.shared_bytes;
    let text = format!(
        "{globals}func.func @{symbol}({}) {{\n{}return\n}}\n",
        arguments.join(", "),
        e.t.finish()
    );
    let grid_stride = program.kind == FusionKind::Pointwise;
    Ok((text, Launch { symbol: symbol.into(), block, grid, shared_bytes, grid_stride }))
}

/// Elements per vector: 16 bytes of the narrowest float; in elementwise kernels 4 where that already reads as many bytes as
/// should be in flight, since more would cost registers. Where that would misalign an access, the widest aligned width, or 1 in
/// reductions, whose order of sums depends on it.
pub(super) fn vector_width(program: &Program) -> usize {
    let sizes = program.types.iter().map(|t| t.dtype.size());
    let narrowest = sizes.filter(|&s| s >= 2).min().unwrap_or(4);
    let mut width = (16 / narrowest).clamp(4, 8);
    if program.kind == FusionKind::Pointwise && loaded_bytes(program, width) > BYTES_IN_FLIGHT {
        width = 4;
    }
    while !is_aligned(program, width) {
        width = if program.kind == FusionKind::Pointwise { width / 2 } else { 1 };
    }
    width
}

/// Whether every access of vectors is at a multiple of their size.
fn is_aligned(program: &Program, width: usize) -> bool {
    let aligned = |at: &Affine| {
        let (col, rows) = at.strides.split_last().expect("invariant: a space has a column");
        let multiple = |x: i64| x % width as i64 == 0;
        *col == 0 || (*col == 1 && multiple(at.constant) && rows.iter().all(|&s| multiple(s)))
    };
    let loads = program.dag.ids().filter(|id| program.live[id.index()]).all(|id| {
        match program.dag.get(id) {
            Expr::Load { at, .. } => aligned(at),
            _ => true,
        }
    });
    let stores = program.stores.iter().all(|s| aligned(&s.at));
    width == 1 || (loads && stores && program.cols().is_multiple_of(width))
}

/// The thread's index in its block and the block's index, both in x.
pub(crate) fn thread_and_block(e: &mut Emitter<'_>) -> (Val, Val) {
    (register(e, "tid.x"), register(e, "ctaid.x"))
}

/// A special register, as an index.
pub(crate) fn register(e: &mut Emitter<'_>, name: &str) -> Val {
    let ty = Type(Elem::I32, 1);
    let value = e.t.def(ty, format_args!("nvvm.read.ptx.sreg.{name} : i32"));
    e.t.convert("arith.index_castui", value, Elem::Index)
}
