//! Values as strided views of the operands and results of a body.
//!
//! A kernel that accepts strides needs no copy if only layout operations lie between its operand and memory.
//! [`read`] follows them up to an operand of the body, [`written`] down to a result.

use crate::{Graph, Node, Op, ValueId};

/// Where the elements of a value lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Position of the tensor in memory among the body's `input` leaves, or among its outputs.
    pub operand: usize,
    /// The value's first element within that tensor, in elements.
    pub offset: usize,
    /// Distance between consecutive elements of each axis, in elements.
    pub strides: Vec<usize>,
}

impl Strided {
    /// Whether the elements lie one after the other, row-major, for a value of these sizes.
    pub fn is_dense(&self, dims: &[usize]) -> bool {
        let mut expected = 1;
        dims.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        })
    }
}

/// The value as a view of an operand, if reshape, transpose, split and forward slices are all that stands
/// between them.
pub fn read(body: &Graph, value: ValueId) -> Option<Strided> {
    // From the value to the operand; such chains may be long.
    let (mut source, mut chain) = (value, Vec::new());
    while !matches!(body.def(source).op, Op::Input(_)) {
        let node = body.def(source);
        if !matches!(node.op, Op::Reshape(_) | Op::Transpose(_) | Op::Split(_) | Op::Slice(_)) {
            return None;
        }
        chain.push(source);
        source = *node.inputs.first()?;
    }
    let mut inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let operand = inputs.position(|(_, n)| n.outputs[0] == source)?;
    let strides = body.ty(source).shape.strides();
    let mut view = Strided { operand, offset: 0, strides };
    for value in chain.into_iter().rev() {
        view.follow(body, value)?;
    }
    Some(view)
}

/// The value as a view of a result, if reshape, transpose and concat are all that stands between them and
/// nothing else reads it.
pub fn written(body: &Graph, value: ValueId) -> Option<Strided> {
    // From the value to the result.
    let (mut last, mut chain) = (value, Vec::new());
    let operand = loop {
        let mut users = body.nodes().map(|(_, n)| n).filter(|n| n.inputs.contains(&last));
        let user = users.next();
        let mut results = body.outputs.iter().enumerate().filter(|(_, o)| o.value == last);
        match (user, users.next(), results.next(), results.next()) {
            (None, None, Some((operand, _)), None) => break operand,
            (Some(node), None, None, None) => {
                if !matches!(node.op, Op::Reshape(_) | Op::Transpose(_) | Op::Concat(_)) {
                    return None;
                }
                chain.push((last, node));
                last = *node.outputs.first()?;
            }
            _ => return None,
        }
    };
    let mut view = Strided { operand, offset: 0, strides: body.ty(last).shape.strides() };
    for (value, node) in chain.into_iter().rev() {
        view.precede(body, value, node)?;
    }
    Some(view)
}

impl Strided {
    /// The view of a layout operation's result, of that of its operand.
    fn follow(&mut self, body: &Graph, value: ValueId) -> Option<()> {
        let node = body.def(value);
        match &node.op {
            Op::Reshape(_) => {
                let from = body.ty(*node.inputs.first()?).shape.dims();
                self.strides = reshape(from, &self.strides, body.ty(value).shape.dims())?;
            }
            Op::Transpose(op) => self.strides = op.perm.iter().map(|&p| self.strides[p]).collect(),
            Op::Split(op) => {
                let before: usize = op.sizes[..body.value(value).index].iter().sum();
                self.offset += before * self.strides[op.axis];
            }
            Op::Slice(op) => {
                for (i, stride) in self.strides.iter_mut().enumerate() {
                    self.offset += op.start[i] * *stride;
                    *stride *= usize::try_from(op.step[i]).ok()?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The view of the operand `value` of a layout operation, of that of its result.
    fn precede(&mut self, body: &Graph, value: ValueId, node: &Node) -> Option<()> {
        let dims = body.ty(value).shape.dims();
        match &node.op {
            Op::Reshape(_) => {
                let to = body.ty(*node.outputs.first()?).shape.dims();
                self.strides = reshape(to, &self.strides, dims)?;
            }
            Op::Transpose(op) => {
                let mut strides = vec![0; dims.len()];
                for (&p, &stride) in op.perm.iter().zip(&self.strides) {
                    strides[p] = stride;
                }
                self.strides = strides;
            }
            Op::Concat(op) => {
                let mut parts = node.inputs.iter().enumerate().filter(|(_, v)| **v == value);
                let (Some((part, _)), None) = (parts.next(), parts.next()) else { return None };
                let size = |v: &ValueId| body.ty(*v).shape.0[op.axis];
                let before: usize = node.inputs[..part].iter().map(size).sum();
                self.offset += before * self.strides[op.axis];
            }
            _ => return None,
        }
        Some(())
    }
}

/// The results of a node as views of the body's results, if they fill them: nothing else writes there.
pub fn results(body: &Graph, node: &Node) -> Option<Vec<Strided>> {
    let views: Vec<Strided> =
        node.outputs.iter().map(|v| written(body, *v)).collect::<Option<_>>()?;
    let numel = |v: ValueId| body.ty(v).shape.numel();
    for (i, output) in body.outputs.iter().enumerate() {
        let parts = node.outputs.iter().zip(&views).filter(|(_, view)| view.operand == i);
        if parts.map(|(v, _)| numel(*v)).sum::<usize>() != numel(output.value) {
            return None;
        }
    }
    Some(views)
}

/// Strides that see a tensor of sizes `from` as one of sizes `to`; `None` if its elements would have to
/// move, or there are none.
fn reshape(from: &[usize], strides: &[usize], to: &[usize]) -> Option<Vec<usize>> {
    if from.contains(&0) {
        return None;
    }
    let old: Vec<(usize, usize)> =
        from.iter().copied().zip(strides.iter().copied()).filter(|(size, _)| *size > 1).collect();
    // Axes of one element may have any stride.
    let mut new = vec![1; to.len()];
    let (mut o, mut n) = (0, 0);
    while o < old.len() && n < to.len() {
        // The fewest axes of both sides that hold equally many elements.
        let (mut o_end, mut n_end) = (o + 1, n + 1);
        let (mut o_size, mut n_size) = (old[o].0, to[n]);
        while o_size != n_size {
            if n_size < o_size {
                n_size *= to.get(n_end)?;
                n_end += 1;
            } else {
                o_size *= old.get(o_end)?.0;
                o_end += 1;
            }
        }
        let joined = old[o..o_end].windows(2).all(|w| w[0].1 == w[1].0 * w[1].1);
        if !joined {
            return None;
        }
        let mut stride = old[o_end - 1].1;
        for axis in (n..n_end).rev() {
            new[axis] = stride;
            stride *= to[axis];
        }
        (o, n) = (o_end, n_end);
    }
    Some(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    fn body(lines: &str) -> Graph {
        parse(&format!("graph @g world=1 {{\n{lines}\n}}\n")).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The first result of the first node of this operation.
    fn result_of(graph: &Graph, op: &str) -> ValueId {
        graph.nodes().find(|(_, n)| n.op.name() == op).unwrap().1.outputs[0]
    }

    #[test]
    fn reshapes_join_and_cut_axes_where_the_elements_allow_it() {
        assert_eq!(reshape(&[2, 12], &[12, 1], &[2, 3, 4]), Some(vec![12, 4, 1]));
        assert_eq!(reshape(&[2, 3, 4], &[12, 4, 1], &[6, 4]), Some(vec![4, 1]));
        assert_eq!(reshape(&[2, 3, 4], &[36, 4, 1], &[6, 4]), None);
        assert_eq!(reshape(&[2, 3, 4], &[36, 4, 1], &[2, 1, 12]), Some(vec![36, 12, 1]));
        assert_eq!(reshape(&[1, 1], &[7, 9], &[1]), Some(vec![1]));
        assert_eq!(reshape(&[2, 0], &[0, 1], &[0]), None);
    }

    #[test]
    fn the_heads_of_a_packed_projection_are_views() {
        let graph = body(
            r#"%x: f32[2,5,24] = input {name = "0", ty = {"dtype":"f32","shape":[2,5,24]}}
               %q: f32[2,5,8], %k: f32[2,5,8], %v: f32[2,5,8] = split %x {axis = 2, sizes = [8,8,8]}
               %s: f32[2,4,8] = slice %k {size = [2,4,8], start = [0,1,0], step = [1,1,1]}
               %h: f32[2,4,4,2] = reshape %s {shape = [2,4,4,2]}
               %t: f32[2,4,4,2] = transpose %h {perm = [0,2,1,3]}
               %e: f32[2,4,4,2] = exp %t
               return %e as "0""#,
        );
        let view = read(&graph, result_of(&graph, "transpose")).unwrap();
        assert_eq!(view, Strided { operand: 0, offset: 8 + 24, strides: vec![120, 2, 24, 1] });
        assert!(!view.is_dense(&[2, 4, 4, 2]));
        assert_eq!(read(&graph, result_of(&graph, "exp")), None);
    }

    #[test]
    fn heads_are_written_into_a_packed_projection() {
        let graph = body(
            r#"%a: f32[2,4,5,2] = input {name = "0", ty = {"dtype":"f32","shape":[2,4,5,2]}}
               %b: f32[2,5,4] = input {name = "1", ty = {"dtype":"f32","shape":[2,5,4]}}
               %e: f32[2,4,5,2] = exp %a
               %t: f32[2,5,4,2] = transpose %e {perm = [0,2,1,3]}
               %r: f32[2,5,8] = reshape %t {shape = [2,5,8]}
               %n: f32[2,5,4] = neg %b
               %c: f32[2,5,12] = concat %n, %r {axis = 2}
               return %c as "0""#,
        );
        let view = written(&graph, result_of(&graph, "exp")).unwrap();
        assert_eq!(view, Strided { operand: 0, offset: 4, strides: vec![60, 2, 12, 1] });
        let exp = graph.nodes().find(|(_, n)| n.op.name() == "exp").unwrap().1;
        assert_eq!(results(&graph, exp), None, "the concat has another part");
        assert!(written(&graph, result_of(&graph, "concat")).unwrap().is_dense(&[2, 5, 12]));
        assert_eq!(written(&graph, result_of(&graph, "input")), None);
    }
}
