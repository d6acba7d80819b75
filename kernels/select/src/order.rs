//! Selection for top-k and arg-reductions.

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::Routine;
use frit_kernels::routine::order::{Ordered, TopK};

/// Maximum length of a line that one warp scans.
const SHORT: usize = 512;

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (axis, k, largest, last) = match &node.op {
        Op::TopK(op) => (op.axis, op.k, op.largest, false),
        Op::ArgReduce(op) => (op.axis, 1, op.largest, op.last),
        _ => return None,
    };
    let x = a.ty(node.inputs[0]);
    let from = a.read(node.inputs[0])?;
    let results: Vec<_> = node.outputs.iter().map(|v| a.write(*v)).collect();
    // If indices are the only result, their pointer is also passed for the values, which are not written.
    let (values, indices) = (results[0], *results.last()?);
    let dims = x.shape.dims();
    let outer: usize = dims[..axis].iter().product();
    let inner: usize = dims[axis + 1..].iter().product();
    if outer * inner * k == 0 {
        return Some(());
    }
    let mut kernel = SourceKernel::new("top_k", "top_k")
        .define("T", c_type(x.dtype)?)
        .define("LARGEST", u8::from(largest))
        .define("LAST", u8::from(last))
        .define("VALUES", u8::from(results.len() == 2))
        .blocks(outer * inner);
    kernel.block = if dims[axis] <= SHORT { 32 } else { 256 };
    let kernel = kernel.pointer(values).pointer(indices).pointer(from);
    a.run(kernel.i64(outer).i64(dims[axis]).i64(inner).i64(k));
    Some(())
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    let x = ins.first()?;
    let dims = x.shape.dims();
    let elem = match x.dtype {
        DType::F32 => Ordered::F32,
        DType::BF16 => Ordered::BF16,
        DType::F16 => Ordered::F16,
        DType::I32 => Ordered::I32,
        DType::I64 => Ordered::I64,
        DType::Bool => Ordered::Bool,
        _ => return None,
    };
    let top = |axis: usize, k: usize, largest: bool, last: bool| {
        Some(TopK {
            outer: dims[..axis].iter().product(),
            size: dims[axis],
            inner: dims[axis + 1..].iter().product(),
            k,
            largest,
            last,
            elem,
        })
    };
    match op {
        Op::TopK(op) => top(op.axis, op.k, op.largest, false).map(Routine::TopK),
        Op::ArgReduce(op) => top(op.axis, 1, op.largest, op.last).map(Routine::ArgReduce),
        _ => None,
    }
}
