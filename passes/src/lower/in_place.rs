//! Results without separate memory: views of an operand, the gradient of a cross-entropy in the memory of its
//! logits, often the largest value of a step, and the sum of a matmul and a matrix in the memory of that matrix.
//!
//! A region that computes loss and gradient reads a whole row before it writes the row, so logits and gradient may be one buffer if
//! nothing else reads the logits.

use frit_ir::ops::BinaryFn;
use frit_ir::{Graph, Node, NodeId, Op, TensorType, ValueId};

/// Where the result of a reshape or slice begins in an operand of type `ty`, in elements, if its elements are consecutive there.
pub(super) fn elements_before(op: &Op, ty: &TensorType) -> Option<usize> {
    let Op::Slice(slice) = op else { return Some(0) };
    let dims = ty.shape.dims();
    // Only axes up to the first with more than one element in the result may be cut; the others are whole and in order.
    let first = slice.size.iter().position(|size| *size > 1).unwrap_or(dims.len());
    let rest_is_whole = (first + 1..dims.len()).all(|axis| slice.size[axis] == dims[axis]);
    let in_order = (0..dims.len()).all(|axis| slice.size[axis] <= 1 || slice.step[axis] == 1);
    let strides = (0..dims.len()).map(|axis| dims[axis + 1..].iter().product::<usize>());
    (rest_is_whole && in_order)
        .then(|| slice.start.iter().zip(strides).map(|(start, stride)| start * stride).sum())
}

/// The operand and the result of a kernel body that are logits, read for nothing else, and their gradient, of one type.
pub(super) fn logits_and_gradient(body: &Graph) -> Option<(usize, usize)> {
    let inputs: Vec<ValueId> = body
        .nodes()
        .filter(|(_, node)| matches!(node.op, Op::Input(_)))
        .map(|(_, node)| node.outputs[0])
        .collect();
    body.outputs.iter().enumerate().find_map(|(j, output)| {
        let grad = body.def(output.value);
        if !matches!(grad.op, Op::CrossEntropyGrad(_)) {
            return None;
        }
        let i = inputs.iter().position(|v| *v == grad.inputs[1])?;
        let reads_rows = |node: &Node| {
            let place = node.inputs.iter().position(|v| *v == inputs[i]);
            place.is_none_or(|place| match node.op {
                Op::CrossEntropy(_) => place == 0,
                Op::CrossEntropyGrad(_) => place == 1,
                _ => false,
            })
        };
        let fits = body.ty(inputs[i]) == body.ty(output.value);
        (fits && body.nodes().all(|(_, node)| reads_rows(node))).then_some((i, j))
    })
}

/// The operand and the result of a kernel body that adds a matmul to a matrix of the result's type.
pub(super) fn matrix_and_sum(body: &Graph) -> Option<(usize, usize)> {
    let work: Vec<&Node> =
        body.nodes().map(|(_, n)| n).filter(|n| !matches!(n.op, Op::Input(_))).collect();
    let [matmul, add] = work[..] else { return None };
    let (Op::MatMul(_), Op::Binary(BinaryFn::Add)) = (&matmul.op, &add.op) else { return None };
    let matrix = *add.inputs.iter().find(|v| **v != matmul.outputs[0])?;
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let i = inputs.position(|(_, n)| n.outputs[0] == matrix)?;
    (body.ty(matrix) == body.ty(add.outputs[0]) && !matmul.inputs.contains(&matrix))
        .then_some((i, 0))
}

/// The part of a value's elements, from 0 to 1, of which some slice is a view.
pub(super) fn part_in_views(graph: &Graph, users: &[NodeId], ty: &TensorType) -> f64 {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for id in users {
        let node = graph.node(*id);
        if let Op::Slice(slice) = &node.op
            && let Some(begin) = elements_before(&node.op, ty)
        {
            ranges.push((begin, begin + slice.size.iter().product::<usize>()));
        }
    }
    ranges.sort_unstable();
    let (mut end, mut sum) = (0, 0);
    for (from, to) in ranges {
        sum += to.saturating_sub(from.max(end));
        end = end.max(to);
    }
    sum as f64 / ty.shape.numel().max(1) as f64
}

/// Whether a single node reads this value, the values of which it is a view and those of which it may consist, and none of them is an
/// output of the graph.
pub(super) fn is_read_once(graph: &Graph, users: &[Vec<NodeId>], mut value: ValueId) -> bool {
    loop {
        let is_output = graph.outputs.iter().any(|o| o.value == value);
        if users[value.0 as usize].len() != 1 || is_output {
            return false;
        }
        let node = graph.def(value);
        match node.op {
            Op::Reshape(_) | Op::Slice(_) => value = node.inputs[0],
            // Its operands may be computed in its memory.
            Op::Concat(_) => return node.inputs.iter().all(|v| is_read_once(graph, users, *v)),
            _ => return !node.op.is_leaf(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::DType;
    use frit_ir::ops::Slice;

    #[test]
    fn slices_of_consecutive_elements_are_views() {
        let ty = TensorType::new(DType::F32, [4, 3, 5]);
        let at = |start: [usize; 3], size: [usize; 3], step: [isize; 3]| {
            let slice = Slice { start: start.into(), size: size.into(), step: step.into() };
            elements_before(&Op::Slice(slice), &ty)
        };
        assert_eq!(at([0, 0, 0], [3, 3, 5], [1, 1, 1]), Some(0));
        assert_eq!(at([2, 0, 0], [2, 3, 5], [1, 1, 1]), Some(30));
        // Some rows of one matrix; some elements of one row; one element.
        assert_eq!(at([1, 1, 0], [1, 2, 5], [1, 1, 1]), Some(20));
        assert_eq!(at([3, 2, 1], [1, 1, 3], [1, 1, 1]), Some(56));
        assert_eq!(at([3, 2, 4], [1, 1, 1], [1, 1, 1]), Some(59));
        assert_eq!(at([0, 0, 0], [4, 3, 4], [1, 1, 1]), None);
        assert_eq!(at([0, 0, 0], [4, 2, 5], [1, 1, 1]), None);
        assert_eq!(at([0, 0, 0], [2, 3, 5], [2, 1, 1]), None);
        assert_eq!(at([3, 0, 0], [2, 3, 5], [-1, 1, 1]), None);
        // Reversed axes.
        assert_eq!(at([0, 2, 0], [4, 3, 5], [1, -1, 1]), None);
        assert_eq!(at([0, 0, 4], [3, 3, 5], [1, 1, -1]), None);
    }
}
