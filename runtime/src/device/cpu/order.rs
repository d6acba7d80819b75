//! Sorted order along an axis as parameters of the library's kernel.

use super::operand::elem;
use frit_ir::TensorType;
use frit_kernels::order::TopK;

/// The `k` first elements of `x` along an axis.
pub(super) fn top_k(
    x: &TensorType,
    axis: usize,
    k: usize,
    (largest, last): (bool, bool),
) -> Option<TopK> {
    let dims = x.shape.dims();
    Some(TopK {
        outer: dims[..axis].iter().product(),
        size: dims[axis],
        inner: dims[axis + 1..].iter().product(),
        k,
        largest,
        last,
        elem: elem(x.dtype)?,
    })
}
