//! Selection for embedding and its gradient.

use crate::assembler::Assembler;
use crate::routine::elem;
use crate::sort;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::plan::Pointer;
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::Routine;
use frit_kernels::routine::embedding::{Embedding, IndexElem};

/// Bytes that a thread moves per step.
const STEP_BYTES: usize = 16;
/// Sorted positions that a block sums, as in `embedding_grad.cu`.
const RUN: usize = 64;
/// Threads per block there.
const COLUMNS: usize = 256;

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    match node.op {
        Op::Embedding(_) => rows(a, node),
        Op::EmbeddingGrad(_) => gradient(a, node),
        _ => None,
    }
}

fn rows(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (table, ids) = (a.ty(node.inputs[0]), a.ty(node.inputs[1]));
    let out = a.ty(node.outputs[0]);
    let (from, index) = (a.read(node.inputs[0])?, a.read(node.inputs[1])?);
    let to = a.write(node.outputs[0]);
    let kernel = SourceKernel::new("embedding", "embedding")
        .define("TABLE", c_type(table.dtype)?)
        .define("OUT", c_type(out.dtype)?)
        .define("INDEX", c_type(ids.dtype)?)
        .threads(out.bytes().div_ceil(STEP_BYTES))
        .pointer(to)
        .pointer(from)
        .pointer(index)
        .i64(ids.shape.numel())
        .i64(table.shape.0[0])
        .i64(table.shape.0[1])
        .pointer(Pointer::Fault);
    if out.shape.numel() > 0 {
        a.run(kernel);
    }
    Some(())
}

fn gradient(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (dy, ids) = (a.ty(node.inputs[0]), a.ty(node.inputs[1]));
    let out = a.ty(node.outputs[0]);
    let (gradient, index) = (a.read(node.inputs[0])?, a.read(node.inputs[1])?);
    let to = a.write(node.outputs[0]);
    let (size, width, count) = (out.shape.0[0], out.shape.0[1], ids.shape.numel());
    match node.inputs.get(2) {
        None => a.fill(to, out, 0.0)?,
        Some(added) => {
            let added = a.read(*added)?;
            a.copy_bytes(to, added, out.bytes());
        }
    }
    if count == 0 || out.shape.numel() == 0 {
        return Some(());
    }
    let kernel = |entry| -> Option<SourceKernel> {
        let kernel = SourceKernel::new("embedding_grad", entry)
            .define("DY", c_type(dy.dtype)?)
            .define("OUT", c_type(out.dtype)?)
            .define("INDEX", c_type(ids.dtype)?)
            .define("ADDS", u32::from(node.inputs.len() > 2));
        Some(kernel)
    };
    let rows = a.scratch(count * 4);
    a.run(
        kernel("embedding_rows")?
            .threads(count)
            .pointer(rows)
            .pointer(index)
            .i64(count)
            .i64(size)
            .pointer(Pointer::Fault),
    );
    // Positions with an index outside the table are sorted behind its last row.
    let sorted = sort::sort(a, rows, count, size)?;
    let wide = if dy.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let runs = count.div_ceil(RUN);
    let parts = a.scratch(runs * 2 * width * wide.size());
    let over = |kernel: SourceKernel| -> Option<SourceKernel> {
        let mut kernel = kernel.grid(runs)?;
        kernel.grid[1] = width.div_ceil(COLUMNS).min(64) as u32;
        kernel.block = COLUMNS as u32;
        Some(kernel.pointer(to).pointer(parts))
    };
    let sums = over(kernel("embedding_sums")?)?.pointer(gradient).pointer(sorted.keys);
    a.run(sums.pointer(sorted.places).i64(count).i64(size).i64(width));
    let joins = over(kernel("embedding_joins")?)?.pointer(sorted.keys);
    a.run(joins.i64(count).i64(size).i64(width));
    Some(())
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let of = |table: &TensorType, rows: &TensorType| {
        Some(Embedding {
            rows: table.shape.0[0],
            width: table.shape.0[1],
            count: ins[1].shape.numel(),
            index: if ins[1].dtype == DType::I32 { IndexElem::I32 } else { IndexElem::I64 },
            table: elem(table.dtype)?,
            out: elem(rows.dtype)?,
        })
    };
    match op {
        Op::Embedding(_) => of(ins[0], outs[0]).map(Routine::Embedding),
        Op::EmbeddingGrad(_) => of(outs[0], ins[0]).map(Routine::EmbeddingGrad),
        _ => None,
    }
}
