//! The frame of a CUDA kernel: its launch shape, its signature, and pointwise bodies.
//!
//! Operands are aligned to 16 bytes. A thread of a pointwise kernel computes one vector; reductions
//! are in [`super::cuda_reduce`].

use super::cuda_reduce;
use super::expr::Expr;
use super::load_store::Memory;
use super::point::Emitter;
use super::region::Program;
use super::text::{Elem, Type, Val};
use super::view::Affine;
use crate::error::Unsupported;
use frit_ir::ops::FusionKind;

/// Threads of a block of a pointwise kernel.
const THREADS: usize = 256;

/// The text of a kernel and how it is launched.
pub(crate) struct CudaFunction {
    pub(crate) text: String,
    /// Threads per block.
    pub(crate) block: usize,
    /// Blocks.
    pub(crate) grid: usize,
}

/// The kernel `symbol`, called with pointers to operands and results.
pub(crate) fn emit(program: &Program, symbol: &str) -> Result<CudaFunction, Unsupported> {
    let width = match program.kind {
        FusionKind::ColReduce => 1,
        _ => vector_width(program),
    };
    let memory = Memory { converts_bf16: true, alignment: Some(16) };
    let mut e = Emitter::new(program, width, memory);
    let mut globals = String::new();
    let (block, grid) = match program.kind {
        FusionKind::RowReduce => cuda_reduce::rows(&mut e, symbol, &mut globals)?,
        FusionKind::ColReduce => cuda_reduce::cols(&mut e, symbol, &mut globals)?,
        FusionKind::Pointwise | FusionKind::Gemm => pointwise(&mut e),
    };
    let arguments: Vec<String> =
        (0..program.types.len()).map(|i| format!("%arg{i}: {}", e.buffer(i).ty())).collect();
    let text = format!(
        "{globals}func.func @{symbol}({}) {{\n{}return\n}}\n",
        arguments.join(", "),
        e.t.finish()
    );
    Ok(CudaFunction { text, block, grid })
}

/// Elements per vector: 16 bytes of the narrowest float, or 1 if some access would be misaligned.
fn vector_width(program: &Program) -> usize {
    let sizes = program.types.iter().map(|t| t.dtype.size());
    let narrowest = sizes.filter(|&s| s >= 2).min().unwrap_or(4);
    let width = (16 / narrowest).clamp(4, 8);
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
    if loads && stores && program.cols().is_multiple_of(width) { width } else { 1 }
}

/// The thread's index in its block and the block's index.
pub(crate) fn thread_and_block(e: &mut Emitter<'_>) -> (Val, Val) {
    let mut register = |name: &str| {
        let ty = Type(Elem::I32, 1);
        let value = e.t.def(ty, format_args!("nvvm.read.ptx.sreg.{name}.x : i32"));
        e.t.convert("arith.index_castui", value, Elem::Index)
    };
    (register("tid"), register("ctaid"))
}

fn pointwise(e: &mut Emitter<'_>) -> (usize, usize) {
    let program = e.program;
    let per_row = program.cols() / e.width;
    let n = program.rows() * per_row;
    let (thread, block) = thread_and_block(e);
    let (threads, limit) = (e.t.index(THREADS), e.t.index(n));
    let first = e.t.same("arith.muli", &[block, threads]);
    let index = e.t.same("arith.addi", &[first, thread]);
    let inside = e.t.cmpi("ult", index, limit);
    e.t.open_if(inside);
    e.scope(|e| {
        let (per_row, width) = (e.t.index(per_row), e.t.index(e.width));
        let row = e.t.same("arith.divui", &[index, per_row]);
        let col = e.t.same("arith.remui", &[index, per_row]);
        let col = e.t.same("arith.muli", &[col, width]);
        e.set_row(row);
        e.at_col(col, None, |e| e.store_all(&program.stores));
    });
    e.t.close();
    (THREADS, n.div_ceil(THREADS))
}
