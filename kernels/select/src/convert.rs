//! Selection for casts.

use crate::assembler::Assembler;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::plan::Pointer;
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::Routine;

/// Maximum elements that a thread converts per step.
const WIDTH: usize = 8;

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let Op::Cast(_) = node.op else { return None };
    let (x, y) = (a.ty(node.inputs[0]), a.ty(node.outputs[0]));
    let (from, to) = (a.read(node.inputs[0])?, a.write(node.outputs[0]));
    convert(a, (from, x.dtype), (to, y.dtype), x.shape.numel())
}

/// Converts `n` elements.
pub(super) fn convert(
    a: &mut Assembler<'_>,
    (from, from_type): (Pointer, DType),
    (to, to_type): (Pointer, DType),
    n: usize,
) -> Option<()> {
    if from_type == to_type {
        a.copy_bytes(to, from, n * to_type.size());
        return Some(());
    }
    let kernel = SourceKernel::new("convert", "convert")
        .define("FROM", c_type(from_type)?)
        .define("TO", c_type(to_type)?)
        .threads(n.div_ceil(WIDTH))
        .pointer(to)
        .pointer(from)
        .i64(n);
    if n > 0 {
        a.run(kernel);
    }
    Some(())
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let Op::Cast(_) = op else { return None };
    let (from, to) = (elem(ins[0].dtype)?, elem(outs[0].dtype)?);
    Some(Routine::Convert { from, to, len: ins[0].shape.numel() })
}
