//! Indexed operations of the graph as parameters of the library's kernel.

use super::library::Routine;
use super::operand::elem;
use frit_ir::ops::ScatterFn;
use frit_ir::{Graph, Node, Tensor, TensorType, ValueId};
use frit_kernels::dtype::Elem;
use frit_kernels::index::Combine;
use frit_select::places::scattered;

/// The routine of a scatter whose indices and updates are operands; its data are one, or all one
/// element.
pub(super) fn scatter(
    body: &Graph,
    node: &Node,
    position: &impl Fn(ValueId) -> Option<usize>,
) -> Option<Routine> {
    let (data, ids, updates) = (node.inputs[0], node.inputs[1], node.inputs[2]);
    let constant = body.constant(data).and_then(Tensor::as_splat);
    let first = usize::from(constant.is_none());
    let in_order = [(ids, first), (updates, first + 1)];
    let in_order = in_order.iter().all(|(v, i)| position(*v) == Some(*i));
    if !in_order || (constant.is_none() && position(data) != Some(0)) {
        return None;
    }
    let (ty, ids) = (body.ty(data), body.ty(ids));
    let (f, indexed) = scattered(&node.op, ty, ids)?;
    let combine = match f {
        ScatterFn::Replace => Combine::Replace,
        ScatterFn::Add => Combine::Add,
        ScatterFn::Mul => Combine::Mul,
        ScatterFn::Max => Combine::Max,
        ScatterFn::Min => Combine::Min,
    };
    // What is only moved may be of any type.
    let elem = match combine {
        Combine::Replace => elem(ty.dtype).unwrap_or(Elem::F32),
        _ => elem(ty.dtype)?,
    };
    let fill = constant.map(|x| Tensor::splat(TensorType::scalar(ty.dtype), x).to_bytes());
    Some(Routine::Scatter { indexed, combine, elem, fill })
}
