//! Decides which sets of nodes are a region, and of which kind.
//!
//! A region has an iteration space, a grid of rows and columns, and every value that it computes has a [`Role`] in it. Guarantees of
//! each kind to code generation:
//!
//! - *Pointwise*: every result has one element per point of the space. Values computed inside are
//!   never broadcast, except scalars.
//! - *RowReduce*: reductions over all columns. Values computed inside, and results, have an element per
//!   point or per row; a value per row may be broadcast over its row. Logits of `cross_entropy` are an operand. No
//!   transcendental function precedes an operation that reads its rows more than once. All cross-entropies read the
//!   same logits.
//! - *ColReduce*: every result is one reduction over all rows, preceded only by elementwise operations on values with
//!   an element per point, and followed by nothing.
//! - *RowColReduce*: a row reduction that has results per column as well, each a reduction over all rows of full values
//!   and values per row; nothing inside reads them.
//! - In all of them, the shapes of values computed inside cut the flat space along one chain of divisors, so that
//!   reshapes split and join whole axes. Operands are broadcast by numpy's rules.
//! - *Gemm*: see [`super::gemm`].

use super::facts::Facts;
use super::{col_reduce, row_reduce};
use frit_ir::ops::{BinaryFn, FusionKind, Op, UnaryFn};
use frit_ir::{Node, Shape, TensorType, ValueId};

/// How the elements of a value map to the space of its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// One element per point.
    Full,
    /// One element per row.
    Row,
    /// One element per column.
    Col,
    /// One element.
    Scalar,
}

/// A grid of points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    rows: usize,
    cols: usize,
}

impl Space {
    /// The elements of a shape, rows before axis `split` and columns from there on.
    pub(super) fn new(shape: &Shape, split: usize) -> Self {
        let (rows, cols) = shape.0.split_at(split);
        Space { rows: rows.iter().product(), cols: cols.iter().product() }
    }
}

/// How a node is computed in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Pointwise,
    Rows(Space),
    Cols(Space),
}

fn action(facts: &Facts<'_>, node: &Node) -> Option<Action> {
    let operands: Vec<&TensorType> = node.inputs.iter().map(|v| facts.graph.ty(*v)).collect();
    if node.op.is_pointwise() || matches!(node.op, Op::Expand(_) | Op::LossScale(_)) {
        return Some(Action::Pointwise);
    }
    if matches!(node.op, Op::Reduce(_) | Op::SumTo(_))
        && operands[0].shape.numel() == facts.numel(node.outputs[0])
    {
        // Nothing is reduced: each result is the corresponding element.
        return Some(Action::Pointwise);
    }
    match row_reduce::space(&node.op, &operands) {
        Some(space) => Some(Action::Rows(space)),
        None => col_reduce::space(&node.op, &operands).map(Action::Cols),
    }
}

/// Whether the node can be in a region at all.
pub(super) fn is_fusable(facts: &Facts<'_>, node: &Node) -> bool {
    let empty = node.inputs.iter().chain(&node.outputs).any(|v| facts.numel(*v) == 0);
    !empty && !facts.is_sharded(node) && action(facts, node).is_some()
}

/// Whether an operation costs no more than a few instructions per element, so that computing it twice is cheaper than
/// storing its result.
pub(super) fn is_cheap(op: &Op) -> bool {
    use UnaryFn::*;
    match op {
        Op::Unary(f) => matches!(f, Neg | Abs | Sign | Floor | Ceil | Round | Relu | Not | Detach),
        Op::Binary(f) => {
            matches!(
                f,
                BinaryFn::Add
                    | BinaryFn::Sub
                    | BinaryFn::Mul
                    | BinaryFn::Max
                    | BinaryFn::Min
                    | BinaryFn::ReluGrad
            )
        }
        Op::LossScale(_) | Op::Expand(_) => true,
        op => op.is_pointwise(),
    }
}

/// Whether all cross-entropies among these nodes read the same logits: those of one chunk of tokens are not kept until the
/// next chunk is there.
fn has_one_loss(facts: &Facts<'_>, members: &[usize]) -> bool {
    let mut logits = members.iter().filter_map(|member| {
        let node = facts.node(*member);
        match node.op {
            Op::CrossEntropy(_) => Some(facts.base(node.inputs[0])),
            Op::CrossEntropyGrad(_) => Some(facts.base(node.inputs[1])),
            _ => None,
        }
    });
    let first = logits.next();
    logits.all(|other| Some(other) == first)
}

/// The kind of the region that these nodes (positions, ascending) form, if they form one.
pub(super) fn kind(facts: &Facts<'_>, members: &[usize]) -> Option<FusionKind> {
    if !has_one_loss(facts, members) {
        return None;
    }
    let mut actions = Vec::with_capacity(members.len());
    for &member in members {
        actions.push(action(facts, facts.node(member))?);
    }
    let mut spaces = actions.iter().filter_map(|action| match action {
        Action::Rows(space) | Action::Cols(space) => Some(*space),
        Action::Pointwise => None,
    });
    let first = spaces.next();
    if spaces.any(|space| Some(space) != first) {
        return None;
    }
    let rows = actions.iter().any(|a| matches!(a, Action::Rows(_)));
    let cols = actions.iter().any(|a| matches!(a, Action::Cols(_)));
    let (kind, space) = match (first, rows, cols) {
        (Some(space), true, false) => (FusionKind::RowReduce, space),
        (Some(space), false, true) => (FusionKind::ColReduce, space),
        (Some(space), ..) => (FusionKind::RowColReduce, space),
        (None, ..) => {
            let outputs = members.iter().map(|&m| facts.numel(facts.node(m).outputs[0]));
            (FusionKind::Pointwise, Space { rows: 1, cols: outputs.max()? })
        }
    };
    let check = Check { facts, members, actions: &actions, kind, space };
    let mut cuts = vec![space.cols];
    for (&member, action) in members.iter().zip(&actions) {
        check.node(facts.node(member), *action, &mut cuts)?;
    }
    cuts.sort_unstable();
    cuts.windows(2).all(|w| w[1].is_multiple_of(w[0])).then_some(kind)
}

struct Check<'a, 'g> {
    facts: &'a Facts<'g>,
    members: &'a [usize],
    actions: &'a [Action],
    kind: FusionKind,
    space: Space,
}

impl Check<'_, '_> {
    /// Checks the operands that are computed inside, and collects the divisors at which shapes cut the flat space.
    fn node(&self, node: &Node, action: Action, cuts: &mut Vec<usize>) -> Option<()> {
        for i in 0..node.outputs.len() {
            let role = self.role(node, action, i)?;
            let shape = &self.facts.graph.ty(node.outputs[i]).shape;
            self.cut(role, shape, cuts);
        }
        for (i, &input) in node.inputs.iter().enumerate() {
            let source = self.facts.source(input);
            let Ok(at) = self.members.binary_search(&source) else { continue };
            if matches!(node.op, Op::CrossEntropy(_)) && i == 0 {
                return None;
            }
            let producer = self.facts.node(source);
            let index = self.facts.graph.value(self.facts.base(input)).index;
            let found = self.role(producer, self.actions[at], index)?;
            if found == Role::Col || found != self.expected(node, action, i, input)? {
                return None;
            }
            self.cut(found, &self.facts.graph.ty(input).shape, cuts);
        }
        let reads_often = matches!(action, Action::Rows(_)) && row_reduce::is_multi_pass(&node.op);
        (!(reads_often && self.is_behind_costly(node))).then_some(())
    }

    /// Whether a value may have one element per row.
    fn reduces_rows(&self) -> bool {
        matches!(self.kind, FusionKind::RowReduce | FusionKind::RowColReduce)
    }

    /// The role of result `index` of a member.
    fn role(&self, node: &Node, action: Action, index: usize) -> Option<Role> {
        match action {
            Action::Rows(_) => Some(row_reduce::result(&node.op, index)),
            Action::Cols(_) => Some(Role::Col),
            Action::Pointwise => {
                let n = self.facts.numel(node.outputs[index]);
                let by_row = self.reduces_rows();
                match n {
                    n if n == self.space.rows * self.space.cols => Some(Role::Full),
                    n if by_row && n == self.space.rows => Some(Role::Row),
                    1 => Some(Role::Scalar),
                    _ => None,
                }
            }
        }
    }

    /// The role that operand `i` must have if it is computed inside.
    fn expected(&self, node: &Node, action: Action, i: usize, input: ValueId) -> Option<Role> {
        match action {
            Action::Rows(_) => return Some(row_reduce::operand(&node.op, i)),
            Action::Cols(_) => return Some(col_reduce::operand(&node.op, i)),
            Action::Pointwise => {}
        }
        let own = self.role(node, action, 0)?;
        let (from, to) = (self.facts.graph.ty(input), self.facts.graph.ty(node.outputs[0]));
        if from.shape.numel() == to.shape.numel() {
            return Some(own);
        }
        match own {
            Role::Full if self.is_per_row(&from.shape, &to.shape) => Some(Role::Row),
            _ if from.shape.numel() == 1 => Some(Role::Scalar),
            _ => None,
        }
    }

    /// Whether an operand broadcast to one element per point is repeated along the columns only.
    fn is_per_row(&self, from: &Shape, to: &Shape) -> bool {
        let missing = to.rank() - from.rank();
        let mut rows = 1;
        let split = to.0.iter().position(|&d| {
            let reached = rows == self.space.rows && d != 1;
            rows *= d;
            reached
        });
        let split = split.unwrap_or(to.rank());
        self.reduces_rows()
            && to.0[..split].iter().product::<usize>() == self.space.rows
            && (0..to.rank()).all(|i| {
                let repeated = to.0[i] != 1 && (i < missing || from.0[i - missing] == 1);
                to.0[i] == 1 || repeated == (i >= split)
            })
    }

    fn cut(&self, role: Role, shape: &Shape, cuts: &mut Vec<usize>) {
        let mut inner = match role {
            Role::Full | Role::Col => 1,
            Role::Row => self.space.cols,
            Role::Scalar => return,
        };
        for &dim in shape.0.iter().rev() {
            inner *= dim;
            cuts.push(inner);
        }
    }

    /// Whether an earlier member computes an expensive function.
    fn is_behind_costly(&self, node: &Node) -> bool {
        let mut stack = node.inputs.clone();
        let mut seen = vec![false; self.members.len()];
        while let Some(value) = stack.pop() {
            let Ok(at) = self.members.binary_search(&self.facts.source(value)) else { continue };
            if std::mem::replace(&mut seen[at], true) || self.actions[at] != Action::Pointwise {
                continue;
            }
            let before = self.facts.node(self.members[at]);
            if !is_cheap(&before.op) {
                return true;
            }
            stack.extend(&before.inputs);
        }
        false
    }
}

/// Whether a node may produce a result of a region of this kind: results of a column reduction are reductions.
pub(super) fn may_be_result(facts: &Facts<'_>, kind: FusionKind, node: &Node) -> bool {
    kind != FusionKind::ColReduce || matches!(action(facts, node), Some(Action::Cols(_)))
}

/// Whether the results suit the kind: every result of a pointwise region has an element per point.
pub(super) fn results_fit(facts: &Facts<'_>, kind: FusionKind, results: &[ValueId]) -> bool {
    if kind != FusionKind::Pointwise {
        return true;
    }
    let n = results.first().map_or(0, |v| facts.numel(*v));
    results.iter().all(|v| facts.numel(*v) == n)
}

#[cfg(test)]
mod tests {
    use crate::fuse::tests::{fuse, outline, parse};

    fn regions(nodes: &str) -> String {
        outline(&fuse(&parse(nodes)))
    }

    #[test]
    fn the_gradients_of_a_norm_and_the_bias_gradient_before_it_are_one_region() {
        let nodes = r#"
            %dy: bf16[4, 6] = input {name = "dy", ty = {"dtype":"bf16","shape":[4,6]}}
            %x: f32[4, 6] = input {name = "x", ty = {"dtype":"f32","shape":[4,6]}}
            %w: f32[6] = input {name = "w", ty = {"dtype":"f32","shape":[6]}}
            %m: f32[4] = input {name = "m", ty = {"dtype":"f32","shape":[4]}}
            %r: f32[4] = input {name = "r", ty = {"dtype":"f32","shape":[4]}}
            %skip: f32[4, 6] = input {name = "skip", ty = {"dtype":"f32","shape":[4,6]}}
            %c: f32[4, 6] = cast %dy {to = "f32"} @backward
            %dw: f32[6], %db: f32[6] = layer_norm_grad_affine %c, %x, %m, %r {axis = 1} @backward
            %g: f32[4, 6] = layer_norm_grad_input %c, %x, %w, %m, %r {axis = 1} @backward
            %dx: f32[4, 6] = add %g, %skip @backward
            %h: bf16[4, 6] = cast %dx {to = "bf16"} @backward
            %dbias: f32[6] = sum_to %dx {shape = [6]} @backward
            return %dw as "dw"
            return %db as "db"
            return %dx as "dx"
            return %h as "h"
            return %dbias as "dbias""#;
        let one = "row_col_reduce(cast layer_norm_grad_affine layer_norm_grad_input add cast sum_to) 6->5";
        assert_eq!(regions(nodes), one);
        let rms = nodes
            .replace(
                ", %db: f32[6] = layer_norm_grad_affine %c, %x, %m,",
                " = rms_norm_grad_scale %c, %x,",
            )
            .replace("layer_norm_grad_input %c, %x, %w, %m,", "rms_norm_grad_input %c, %x, %w,")
            .replace("return %db as \"db\"", "");
        let one =
            "row_col_reduce(cast rms_norm_grad_scale rms_norm_grad_input add cast sum_to) 5->4";
        assert_eq!(regions(&rms), one);
    }

    #[test]
    fn what_reads_a_reduction_over_the_rows_stands_behind_the_region() {
        // The sum and the statistics of a row have one shape.
        let nodes = r#"
            %x: f32[6, 6] = input {name = "x", ty = {"dtype":"f32","shape":[6,6]}}
            %y: f32[6, 6] = softmax %x {axis = 1}
            %b: f32[6] = sum_to %y {shape = [6]}
            %e: f32[6] = neg %b
            %z: f32[6, 6] = add %y, %b
            return %e as "e"
            return %z as "z""#;
        let expected =
            "row_col_reduce(softmax sum_to) 1->2; pointwise(neg) 1->1; pointwise(add) 2->1";
        assert_eq!(regions(nodes), expected);
    }

    #[test]
    fn rows_and_columns_of_different_grids_stay_apart() {
        let nodes = r#"
            %x: f32[4, 2, 3] = input {name = "x", ty = {"dtype":"f32","shape":[4,2,3]}}
            %y: f32[4, 2, 3] = softmax %x {axis = 2}
            %b: f32[2, 3] = sum_to %y {shape = [2,3]}
            return %y as "y"
            return %b as "b""#;
        assert_eq!(regions(nodes), "row_reduce(softmax) 1->1; col_reduce(sum_to) 1->1");
    }
}
