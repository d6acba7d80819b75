//! The gradient of a weight that many short matmuls read, as in every step of an unrolled recurrence: one matmul over the rows of all steps,
//! where the sum of their gradients would read and write a matrix of the weight's size for each.

use super::builder::{Builder, Rule};
use frit_ir::ops::{Concat, MatMul};
use frit_ir::{DType, Graph, Op, ValueId};

/// The fewest matmuls that become one.
const FEWEST: usize = 4;

/// The cotangents of a value, with one in place of those that are short matmuls of one kind, if these are many. They come from the last step
/// to the first.
pub(super) fn joined(b: &mut Builder<'_>, cotangents: &[ValueId]) -> Rule<Vec<ValueId>> {
    let unchanged = Ok(cotangents.to_vec());
    let Some(kind) = cotangents.iter().find_map(|v| short(b.graph, *v)) else { return unchanged };
    let (steps, mut joined): (Vec<ValueId>, Vec<ValueId>) =
        cotangents.iter().partition(|v| short(b.graph, **v).as_ref() == Some(&kind));
    let [left, right] = [0, 1].map(|i| -> Vec<ValueId> {
        steps.iter().rev().map(|v| b.graph.def(*v).inputs[i]).collect()
    });
    // Rows of one value need no copy where they are, and steps that are independent could be one.
    let are_cut = |rows: &[ValueId]| rows.iter().all(|v| is_cut(b.graph, *v));
    if steps.len() < FEWEST || (are_cut(&left) && are_cut(&right)) {
        return unchanged;
    }
    let (op, _) = kind;
    let left = b.emit(Op::Concat(Concat { axis: usize::from(!op.trans_a) }), &left)?;
    let right = b.emit(Op::Concat(Concat { axis: usize::from(op.trans_b) }), &right)?;
    joined.push(b.emit(Op::MatMul(op), &[left, right])?);
    Ok(joined)
}

/// The matmul of two matrices that computes a value, and the dtype of these, if they have fewer elements together than the result.
fn short(graph: &Graph, value: ValueId) -> Option<(MatMul, DType)> {
    let node = graph.def(value);
    let Op::MatMul(op) = &node.op else { return None };
    let [left, right] = [0, 1].map(|i| graph.ty(node.inputs[i]));
    let elements = left.shape.numel() + right.shape.numel();
    let are_matrices = left.shape.rank() == 2 && right.shape.rank() == 2;
    (are_matrices && elements < graph.ty(value).shape.numel()).then(|| (op.clone(), left.dtype))
}

/// Whether a value is a part of another one.
fn is_cut(graph: &Graph, mut value: ValueId) -> bool {
    while let Op::Reshape(_) | Op::Cast(_) = graph.def(value).op {
        value = graph.def(value).inputs[0];
    }
    matches!(graph.def(value).op, Op::Slice(_) | Op::Split(_))
}

#[cfg(test)]
mod tests {
    use crate::differentiate::Differentiate;
    use crate::{Pass, PassContext};
    use frit_ir::{Graph, Op, text};

    /// Matmuls and concatenations that compute the gradient of a weight `w[8, 8]`, by which these lines multiply rows of `x[10, 8]`.
    fn backward(lines: &[String], last: &str) -> [usize; 2] {
        let leaf = |sizes: &str| format!(r#"ty = {{"dtype":"f32","shape":[{sizes}]}}"#);
        let param = |name: &str, sizes: &str| {
            let ty = leaf(sizes);
            format!(
                "%{name}: f32[{sizes}] = param {{init = \"weights\", kind = \"trainable\", name = \"{name}\", reason = \"\", {ty}}}\n"
            )
        };
        let text = format!(
            "graph @g world=1 {{\n{}{}{}\n\
             %loss: f32[] = reduce {last} {{axes = [0, 1], f = \"sum\", keep_dims = false}}\n\
             return %loss as \"loss\" loss_sum\n}}",
            param("w", "8, 8"),
            param("x", "10, 8"),
            lines.join("\n")
        );
        let mut graph: Graph = text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
        let pass = Differentiate { accumulation: 1, capacity: 1.0 };
        pass.run(&mut graph, &mut PassContext::default()).expect("a gradient");
        let gradient = graph.outputs.iter().find(|o| o.name == "w").expect("that of the weight");
        let (mut open, mut found) = (vec![gradient.value], [0; 2]);
        while let Some(value) = open.pop() {
            let node = graph.def(value);
            match &node.op {
                Op::Binary(_) => open.extend(&node.inputs),
                Op::MatMul(_) => {
                    found[0] += 1;
                    let concats = node.inputs.iter().map(|v| &graph.def(*v).op);
                    found[1] += concats.filter(|op| matches!(op, Op::Concat(_))).count();
                }
                _ => {}
            }
        }
        found
    }

    fn matmul(result: &str, left: &str, rows: usize) -> String {
        format!(
            "%{result}: f32[{rows}, 8] = matmul %{left}, %w {{trans_a = false, trans_b = false}}"
        )
    }

    fn slice(result: &str, of: &str, start: usize, rows: usize) -> String {
        format!(
            "%{result}: f32[{rows}, 8] = slice %{of} {{size = [{rows}, 8], start = [{start}, 0], step = [1, 1]}}"
        )
    }

    /// So many steps of a recurrence of so many rows.
    fn recurrence(steps: usize, rows: usize) -> [usize; 2] {
        let mut lines = vec![slice("h0", "x", 0, rows)];
        for step in 0..steps {
            lines.push(matmul(&format!("z{step}"), &format!("h{step}"), rows));
            lines.push(format!("%h{}: f32[{rows}, 8] = tanh %z{step}", step + 1));
        }
        backward(&lines, &format!("%h{steps}"))
    }

    #[test]
    fn many_short_steps_are_one_matmul() {
        assert_eq!(recurrence(5, 2), [1, 2]);
        assert_eq!(recurrence(4, 3), [1, 2]);
    }

    #[test]
    fn few_steps_and_long_ones_are_summed() {
        assert_eq!(recurrence(3, 2), [3, 0]);
        assert_eq!(recurrence(5, 4), [5, 0]);
    }

    #[test]
    fn parts_of_one_value_stay_where_they_are() {
        let mut lines = vec![];
        for step in 0..5 {
            lines.push(slice(&format!("x{step}"), "x", 2 * step, 2));
            lines.push(matmul(&format!("y{step}"), &format!("x{step}"), 2));
        }
        let parts: Vec<String> = (0..5).map(|step| format!("%y{step}")).collect();
        lines.push(format!("%y: f32[10, 8] = concat {} {{axis = 0}}", parts.join(", ")));
        lines.push("%z: f32[10, 8] = tanh %y".into());
        assert_eq!(backward(&lines, "%z"), [5, 0]);
    }
}
