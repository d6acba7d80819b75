//! Matmuls over the rows of several steps: the sum of the matmuls of each.
//!
//! A concatenation is known by its parts. Where a matmul contracts the axis along which both of its operands are concatenations of parts of
//! the same sizes, and these are smaller than the result, its lemma is applied to each pair of parts.

use crate::lemmas::{self, Operand};
use crate::term::{Algebra, TermId, Terms};
use frit_ir::{Node, Op, TensorType, ValueId};
use std::collections::HashMap;

/// Values that are concatenations: the axis, and the parts.
#[derive(Default)]
pub(crate) struct Steps(HashMap<ValueId, (usize, Vec<Operand>)>);

impl Steps {
    /// Gives a value of another graph what is known of one of this.
    pub(crate) fn hand_on(&self, value: ValueId, to: &mut Steps, other: ValueId) {
        if let Some(parts) = self.0.get(&value) {
            to.0.insert(other, parts.clone());
        }
    }

    /// What the result of a node is made of, if it is a concatenation.
    pub(crate) fn note(&mut self, t: &mut Terms, node: &Node, operands: &[Operand]) {
        let made = match &node.op {
            Op::Concat(op) => {
                let parts =
                    node.inputs.iter().zip(operands).flat_map(|(v, x)| match self.0.get(v) {
                        Some((axis, parts)) if *axis == op.axis => parts.clone(),
                        _ => vec![x.clone()],
                    });
                Some((op.axis, parts.collect()))
            }
            Op::Cast(_) => self.0.get(&node.inputs[0]).cloned(),
            Op::Transpose(op) => self.0.get(&node.inputs[0]).and_then(|(axis, parts)| {
                Some((op.perm.iter().position(|from| from == axis)?, parts.clone()))
            }),
            _ => None,
        };
        let Some((axis, mut parts)) = made else { return };
        if !matches!(node.op, Op::Concat(_)) {
            for part in &mut parts {
                let Ok(types) = node.op.infer(&[&part.ty]) else { return };
                let term =
                    lemmas::results(t, &node.op, std::slice::from_ref(part), &[&types[0]])[0];
                *part = Operand { term, ty: types[0].clone(), value: None };
            }
        }
        self.0.insert(node.outputs[0], (axis, parts));
    }

    /// The result of a matmul over the rows of several steps, of which nothing is rounded.
    pub(crate) fn summed(
        &self,
        t: &mut Terms,
        node: &Node,
        types: &[&TensorType],
    ) -> Option<TermId> {
        let Op::MatMul(op) = &node.op else { return None };
        let is_rounded = t.algebra == Algebra::Rounded && types[0].dtype.is_low_precision();
        if t.algebra == Algebra::Bits || is_rounded {
            return None;
        }
        let [(left, lefts), (right, rights)] = [self.of(node, 0)?, self.of(node, 1)?];
        let contracted = |x: &Operand, is_last: bool| x.sizes().len() - if is_last { 1 } else { 2 };
        // Others stay as they are: an operand may be a concatenation in one graph, and not be seen as one in another.
        let elements = |x: &Operand| x.ty.shape.numel();
        let is_short = |(a, b)| elements(a) + elements(b) < types[0].shape.numel();
        let are_alike = lefts.len() == rights.len()
            && lefts.iter().zip(rights).all(is_short)
            && *left == contracted(&lefts[0], !op.trans_a)
            && *right == contracted(&rights[0], op.trans_b)
            && lefts.iter().zip(rights).all(|(a, b)| a.sizes()[*left] == b.sizes()[*right]);
        if !are_alike {
            return None;
        }
        let parts = lefts
            .iter()
            .zip(rights)
            .map(|(a, b)| (lemmas::results(t, &node.op, &[a.clone(), b.clone()], types)[0], 1.0));
        let parts: Vec<(TermId, f64)> = parts.collect();
        Some(t.sum(&parts, 0.0))
    }

    fn of(&self, node: &Node, operand: usize) -> Option<&(usize, Vec<Operand>)> {
        self.0.get(&node.inputs[operand])
    }
}

#[cfg(test)]
mod tests {
    use crate::{Comparer, Ranks};
    use frit_ir::{Graph, text};

    /// A graph over the rows `a0[1, 4]`, `a1[2, 4]`, `a2[1, 4]` and `b0[1, 5]`, `b1[2, 5]`, `b2[1, 5]`.
    fn graph(lines: &str) -> Graph {
        let leaf = |name: &str, rows: usize, columns: usize| {
            let ty = format!(r#"{{"dtype":"f32","shape":[{rows},{columns}]}}"#);
            format!("%{name}: f32[{rows}, {columns}] = input {{name = \"{name}\", ty = {ty}}}\n")
        };
        let leaves: String = [1, 2, 1]
            .iter()
            .enumerate()
            .map(|(k, n)| leaf(&format!("a{k}"), *n, 4) + &leaf(&format!("b{k}"), *n, 5))
            .collect();
        let text = format!("graph @g world=1 {{\n{leaves}{lines}\nreturn %y as \"y\"\n}}");
        text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"))
    }

    /// The sum of the matmuls of these pairs of rows.
    fn sum(pairs: &[(usize, usize)]) -> Graph {
        let mut lines = String::new();
        for (k, (a, b)) in pairs.iter().enumerate() {
            lines += &format!("%p{k}: f32[4, 5] = matmul %a{a}, %b{b} {{trans_a = true}}\n");
            let (result, last) = (
                if k + 1 == pairs.len() { "y".into() } else { format!("s{k}") },
                k.saturating_sub(1),
            );
            let before = if k == 1 { "p0".into() } else { format!("s{last}") };
            if k > 0 {
                lines += &format!("%{result}: f32[4, 5] = add %{before}, %p{k}\n");
            }
        }
        graph(&lines)
    }

    /// The matmul of these rows, as they are or transposed.
    fn joined(a: [usize; 3], b: [usize; 3], transposed: bool) -> Graph {
        let list = |name: &str, order: [usize; 3]| order.map(|k| format!("%{name}{k}")).join(", ");
        let (a, b) = (list("a", a), list("b", b));
        let concat = format!(
            "%a: f32[4, 4] = concat {a} {{axis = 0}}\n%b: f32[4, 5] = concat {b} {{axis = 0}}\n"
        );
        let matmul = match transposed {
            false => "%y: f32[4, 5] = matmul %a, %b {trans_a = true}",
            true => "%t: f32[4, 4] = transpose %a {perm = [1, 0]}\n%y: f32[4, 5] = matmul %t, %b",
        };
        graph(&(concat + matmul))
    }

    fn are_equal(before: &Graph, after: &Graph) -> bool {
        let found = Comparer::of_real_numbers().compare(before, after, Ranks::ONE);
        let rounded = Comparer::of_rounded_numbers().compare(before, after, Ranks::ONE);
        assert_eq!(found.is_empty(), rounded.is_empty());
        assert!(!Comparer::of_bits().compare(before, after, Ranks::ONE).is_empty());
        found.is_empty()
    }

    #[test]
    fn a_matmul_over_all_steps_is_the_sum_of_those_of_each() {
        let steps = sum(&[(0, 0), (1, 1), (2, 2)]);
        for transposed in [false, true] {
            assert!(are_equal(&steps, &joined([0, 1, 2], [0, 1, 2], transposed)));
            assert!(are_equal(&steps, &joined([2, 1, 0], [2, 1, 0], transposed)));
        }
    }

    #[test]
    fn other_pairs_and_other_steps_are_not() {
        let steps = sum(&[(0, 0), (1, 1), (2, 2)]);
        assert!(!are_equal(&steps, &joined([0, 1, 2], [2, 1, 0], false)));
        for wrong in [&[(0, 0), (1, 1)][..], &[(0, 0), (1, 1), (0, 0)], &[(0, 2), (1, 1), (2, 0)]] {
            assert!(!are_equal(&sum(wrong), &joined([0, 1, 2], [0, 1, 2], false)));
        }
    }
}
