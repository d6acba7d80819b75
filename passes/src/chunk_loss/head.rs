//! Finds what is computed row by row from the logits of a cross-entropy: the head of a model and its gradients.

use crate::fuse::factor_of;
use frit_ir::{Graph, Node, NodeId, Op, ValueId};
use std::collections::{HashMap, HashSet};

/// How a node's results depend on the rows of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Row by row: of each row of its operands, one of its results.
    Rows,
    /// As `Rows`, with a matmul whose second operand has no rows.
    MatMul,
    /// A sum over all rows.
    Sum,
}

/// The nodes between the hidden states and the loss, and between the gradient of the loss and those of hidden states and weights.
pub(super) struct Head {
    /// The logits that the loss reads.
    pub(super) logits: ValueId,
    /// Rows of the logits.
    pub(super) rows: usize,
    /// The nodes, in topological order.
    pub(super) members: Vec<(NodeId, Role)>,
    /// The values with one element for each row and class.
    pub(super) wide: HashSet<ValueId>,
    /// Nodes of the backward pass that operands of members depend on; they belong into the forward pass.
    pub(super) moved: Vec<NodeId>,
    /// The loss.
    pub(super) loss: NodeId,
}

/// The search for the members of a head.
struct Search<'g> {
    graph: &'g Graph,
    rows: usize,
    classes: usize,
    roles: HashMap<NodeId, Role>,
    /// Wide values whose nodes are to be visited.
    open: Vec<ValueId>,
}

impl Head {
    /// The head around a cross-entropy.
    ///
    /// # Errors
    /// Why it cannot be computed in chunks.
    pub(super) fn of(graph: &Graph, loss: NodeId) -> Result<Head, &'static str> {
        let node = graph.node(loss);
        let [logits, labels] = node.inputs[..] else { return Err("it has no logits") };
        let classes = graph.ty(logits).shape.0.last().copied().unwrap_or(0);
        let rows = graph.ty(labels).shape.numel();
        if graph.ty(logits).shape.numel() != rows * classes || rows * classes == 0 {
            return Err("the classes of its logits are not their last axis");
        }
        let mut search = Search { graph, rows, classes, roles: HashMap::new(), open: vec![logits] };
        let wide = search.spread()?;
        let mut members: Vec<(NodeId, Role)> = Vec::new();
        for id in graph.order() {
            members.extend(search.roles.get(id).map(|role| (*id, *role)));
        }
        let is_logits = |id: NodeId| wide.contains(&graph.node(id).outputs[0]);
        if !members.iter().any(|(id, role)| *role == Role::MatMul && is_logits(*id)) {
            return Err("its logits are not the result of a matmul");
        }
        let moved = moved(graph, &members, &wide, rows)?;
        Ok(Head { logits, rows, members, wide, moved, loss })
    }
}

/// The nodes of the backward pass that operands of members depend on.
fn moved(
    graph: &Graph,
    members: &[(NodeId, Role)],
    wide: &HashSet<ValueId>,
    rows: usize,
) -> Result<Vec<NodeId>, &'static str> {
    let ids: HashSet<NodeId> = members.iter().map(|(id, _)| *id).collect();
    let operands: Vec<ValueId> = members
        .iter()
        .flat_map(|(id, _)| graph.node(*id).inputs.iter().copied())
        .filter(|v| !wide.contains(v) && !ids.contains(&graph.value(*v).def))
        .map(|v| base(graph, v))
        .collect();
    if graph.ancestors(operands.iter().copied()).iter().any(|id| ids.contains(id)) {
        return Err("the gradient of its loss depends on the loss");
    }
    factor_of(graph, &operands, rows).ok_or("the gradient of its loss is made in the backward pass")
}

/// What a value is a reshape of.
pub(super) fn base(graph: &Graph, mut value: ValueId) -> ValueId {
    while let Op::Reshape(_) = graph.def(value).op {
        value = graph.def(value).inputs[0];
    }
    value
}

impl Search<'_> {
    /// Visits every node that reads or computes a wide value, and returns the wide values.
    fn spread(&mut self) -> Result<HashSet<ValueId>, &'static str> {
        let users = self.graph.users();
        let mut wide = HashSet::new();
        while let Some(value) = self.open.pop() {
            if !wide.insert(value) {
                continue;
            }
            if self.graph.outputs.iter().any(|o| o.value == value) {
                return Err("its logits are an output");
            }
            for &id in users[value.0 as usize].iter().chain([&self.graph.value(value).def]) {
                let role = self.role(self.graph.node(id), value)?;
                if self.roles.insert(id, role).is_some_and(|other| other != role) {
                    return Err("a matmul reads logits and computes such");
                }
            }
        }
        Ok(wide)
    }

    fn is_wide(&self, value: ValueId) -> bool {
        let shape = &self.graph.ty(value).shape;
        shape.numel() == self.rows * self.classes && shape.0.last() == Some(&self.classes)
    }

    /// The role of a node that reads or computes the wide value `v`; its other wide values are opened.
    fn role(&mut self, node: &Node, v: ValueId) -> Result<Role, &'static str> {
        match &node.op {
            Op::MatMul(_) => self.matmul(node, v),
            Op::CrossEntropy(_) if node.inputs[0] == v => Ok(Role::Rows),
            Op::CrossEntropyGrad(_) if node.inputs[1] == v || node.outputs[0] == v => {
                self.open.extend([node.inputs[1], node.outputs[0]]);
                Ok(Role::Rows)
            }
            Op::SumTo(_) if self.is_per_class(node.outputs[0]) => Ok(Role::Sum),
            op if op.is_pointwise() || matches!(op, Op::Reshape(_)) => {
                for &value in node.inputs.iter().chain(&node.outputs) {
                    match self.is_wide(value) {
                        true => self.open.push(value),
                        false if self.is_per_class(value) && node.inputs.contains(&value) => {}
                        false => return Err("an elementwise operation of its logits broadcasts"),
                    }
                }
                Ok(Role::Rows)
            }
            _ => Err(
                "an operation that is neither elementwise nor a matmul reads its logits, as of label smoothing and fp8",
            ),
        }
    }

    /// Whether a value has one element, or one for each class.
    fn is_per_class(&self, value: ValueId) -> bool {
        let shape = &self.graph.ty(value).shape;
        let n = shape.numel();
        n == 1 || n == self.classes && shape.0.last() == Some(&self.classes)
    }

    fn matmul(&self, node: &Node, v: ValueId) -> Result<Role, &'static str> {
        let Op::MatMul(op) = &node.op else { return Err("it is no matmul") };
        let [a, b] = [node.inputs[0], node.inputs[1]].map(|v| self.graph.ty(v));
        let dims = op.dims(a, b);
        let is_flat = a.shape.0.len() == 2 && b.shape.0.len() == 2;
        let floats = a.dtype.size() > 1 && b.dtype.size() > 1;
        match () {
            () if !floats => Err("its matmuls quantize their operands"),
            // Rows of logits, or of the gradient of hidden states.
            () if node.outputs[0] == v || node.inputs[0] == v && !op.trans_a => {
                let fits = dims.batch == 1 && dims.m == self.rows && b.shape.0.len() == 2;
                if fits && !op.trans_a {
                    Ok(Role::MatMul)
                } else {
                    Err("a matmul of its logits has a batch")
                }
            }
            () if is_flat && dims.k == self.rows => Ok(Role::Sum),
            () => Err("a matmul of its logits has a batch"),
        }
    }
}
