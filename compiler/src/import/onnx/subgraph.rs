//! If, Loop and Scan with control flow known at import.
//!
//! An If is replaced by the branch taken; the body of a Loop or Scan is unrolled. Subgraphs read outer values by name. Source:
//! ONNX If-13, Loop-13, Scan-11.

use super::context::{self, Bound, Fault, Outcome, misfit};
use super::messages::{AttributeProto, GraphProto, NodeProto};
use super::{Importer, tensor};
use crate::import::limits::Resource;
use frit_ir::ops::{Concat, Constant, Reshape, Slice};
use frit_ir::{DType, Op, Origin, Shape, Tensor, ValueId};
use std::collections::HashSet;

/// The operators.
pub(super) const OPERATORS: [&str; 3] = ["If", "Loop", "Scan"];

/// Names that a node reads: its operands, and outer values that its subgraphs read.
pub(crate) fn operands(node: &NodeProto) -> Vec<&str> {
    let mut names: Vec<&str> = node.input.iter().map(String::as_str).collect();
    for graph in node.attribute.iter().filter_map(|a| a.g.as_ref()) {
        free(graph, &mut names);
    }
    names
}

fn free<'g>(graph: &'g GraphProto, names: &mut Vec<&'g str>) {
    let mut own: HashSet<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
    own.extend(graph.initializer.iter().map(|t| t.name.as_str()));
    own.extend(graph.node.iter().flat_map(|n| n.output.iter().map(String::as_str)));
    let inner = graph.node.iter().flat_map(operands);
    let results = graph.output.iter().map(|o| o.name.as_str());
    names.extend(inner.chain(results).filter(|name| !name.is_empty() && !own.contains(name)));
}

/// Whether the operator holds graphs.
pub(super) fn holds_graphs(node: &NodeProto) -> bool {
    let default = node.domain.is_empty() || node.domain == "ai.onnx";
    default && OPERATORS.contains(&node.op_type.as_str())
}

fn attribute<'n>(node: &'n NodeProto, name: &str) -> Option<&'n AttributeProto> {
    node.attribute.iter().find(|a| a.name == name)
}

fn graph<'n>(node: &'n NodeProto, name: &str) -> Result<&'n GraphProto, Fault> {
    attribute(node, name)
        .and_then(|a| a.g.as_deref())
        .ok_or_else(|| Fault::Misfit(format!("there is no graph `{name}`")))
}

impl<'a> Importer<'a> {
    /// The results of an operator that holds graphs.
    pub(super) fn control(
        &mut self,
        node: &'a NodeProto,
        origin: &Origin,
        inputs: &[Option<Bound>],
    ) -> Outcome {
        match node.op_type.as_str() {
            "If" => self.branch(node, inputs),
            "Loop" => self.repeat(node, origin, inputs),
            _ => self.scan(node, origin, inputs),
        }
    }

    /// The elements of a tensor that must be known at import.
    fn known(&self, bound: Option<&Option<Bound>>, what: &str) -> Result<Option<i64>, Fault> {
        match bound.and_then(Option::as_ref) {
            None => Ok(None),
            Some(Bound::Value(value)) if self.selections.is_size(*value) => {
                Err(Fault::Dynamic(what.into()))
            }
            Some(Bound::Value(value)) => match self.graph.constant(*value).map(Tensor::to_i64s) {
                Some(values) if values.len() == 1 => Ok(Some(values[0])),
                Some(_) => misfit(format!("{what} is not one value")),
                None => Err(Fault::Dynamic(what.into())),
            },
            Some(Bound::Failed) => Err(Fault::Upstream),
            Some(Bound::Sequence(_)) => misfit(format!("{what} is a sequence")),
        }
    }

    fn branch(&mut self, node: &'a NodeProto, inputs: &[Option<Bound>]) -> Outcome {
        let condition = self.known(inputs.first(), "the condition")?;
        let name = if condition == Some(0) { "else_branch" } else { "then_branch" };
        if condition.is_none() {
            return misfit("the condition is missing");
        }
        self.body(graph(node, name)?, Vec::new())
    }

    /// `(trips, condition, carried…)` → `(carried…, collected…)`.
    fn repeat(
        &mut self,
        node: &'a NodeProto,
        origin: &Origin,
        inputs: &[Option<Bound>],
    ) -> Outcome {
        let body = graph(node, "body")?;
        let trips = self.known(inputs.first(), "the trip count")?;
        let mut goes_on = self.known(inputs.get(1), "the condition")?.is_none_or(|c| c != 0);
        let mut carried: Vec<Bound> =
            inputs.iter().skip(2).map(|b| b.clone().unwrap_or(Bound::Failed)).collect();
        let Some(n_collected) = body.output.len().checked_sub(1 + carried.len()) else {
            return misfit("the body has fewer results than carried values");
        };
        let mut collected: Vec<Vec<ValueId>> = vec![Vec::new(); n_collected];
        let mut i = 0;
        while goes_on && trips.is_none_or(|n| i < n) {
            let counter = self.constant(Tensor::ints(DType::I64, Shape::scalar(), vec![i]))?;
            let condition = self.constant(Tensor::ints(DType::Bool, Shape::scalar(), vec![1]))?;
            let mut operands = vec![Bound::Value(counter), Bound::Value(condition)];
            operands.append(&mut carried);
            let mut results = self.body(body, operands)?;
            let rest = results.split_off(1);
            goes_on = self.known(Some(&results.pop()), "the condition")?.is_none_or(|c| c != 0);
            let n_carried = rest.len() - n_collected;
            for (at, bound) in rest.into_iter().enumerate() {
                match bound {
                    bound if at < n_carried => carried.push(bound),
                    Bound::Value(value) => collected[at - n_carried].push(value),
                    Bound::Failed => return Err(Fault::Upstream),
                    Bound::Sequence(_) => return misfit("a collected result is a sequence"),
                }
            }
            i += 1;
        }
        for values in collected {
            carried.push(Bound::Value(self.stack(&values, 0, origin)?));
        }
        Ok(carried)
    }

    /// `(states…, scanned…)` → `(states…, collected…)`.
    fn scan(&mut self, node: &'a NodeProto, origin: &Origin, inputs: &[Option<Bound>]) -> Outcome {
        let body = graph(node, "body")?;
        let n_scanned = attribute(node, "num_scan_inputs").map_or(0, |a| a.i);
        let n_states = usize::try_from(n_scanned).ok().and_then(|n| inputs.len().checked_sub(n));
        let Some(n_states) = n_states else {
            return misfit(format!("num_scan_inputs is {n_scanned} of {} operands", inputs.len()));
        };
        let list = |name: &str, i: usize| {
            attribute(node, name).and_then(|a| a.ints.get(i)).copied().unwrap_or(0)
        };
        let mut states: Vec<Bound> =
            inputs[..n_states].iter().map(|b| b.clone().unwrap_or(Bound::Failed)).collect();
        let mut scanned = Vec::new();
        for (i, bound) in inputs[n_states..].iter().enumerate() {
            let Some(Bound::Value(value)) = bound else { return Err(Fault::Upstream) };
            let rank = self.graph.ty(*value).shape.rank() as i64;
            let axis = list("scan_input_axes", i);
            let axis =
                usize::try_from(if axis < 0 { axis + rank } else { axis }).unwrap_or(usize::MAX);
            let Some(&size) = self.graph.ty(*value).shape.0.get(axis) else {
                return misfit(format!("scan axis of operand {} is no axis", n_states + i));
            };
            scanned.push((*value, axis, size, list("scan_input_directions", i) != 0));
        }
        let Some(&(_, _, steps, _)) = scanned.first() else { return misfit("nothing is scanned") };
        if scanned.iter().any(|s| s.2 != steps) {
            return misfit("scanned operands have different lengths");
        }
        let Some(n_collected) = body.output.len().checked_sub(n_states) else {
            return misfit("the body has fewer results than states");
        };
        let mut collected: Vec<Vec<ValueId>> = vec![Vec::new(); n_collected];
        for step in 0..steps {
            let mut operands = std::mem::take(&mut states);
            for &(value, axis, size, reverse) in &scanned {
                let at = if reverse { size - 1 - step } else { step };
                operands.push(Bound::Value(self.element(value, axis, at, origin)?));
            }
            let mut results = self.body(body, operands)?;
            for (values, bound) in collected.iter_mut().zip(results.split_off(n_states)) {
                let Bound::Value(value) = bound else { return Err(Fault::Upstream) };
                values.push(value);
            }
            states = results;
        }
        for (i, mut values) in collected.into_iter().enumerate() {
            if list("scan_output_directions", i) != 0 {
                values.reverse();
            }
            let axis = list("scan_output_axes", i);
            states.push(Bound::Value(self.stack(&values, axis, origin)?));
        }
        Ok(states)
    }

    /// Reads a graph inside; its results.
    fn body(&mut self, graph: &'a GraphProto, operands: Vec<Bound>) -> Outcome {
        self.budget.room(Resource::Depth, self.depth + 1)?;
        // An iteration counts even if its graph is empty.
        self.budget.charge(Resource::Nodes, 1)?;
        self.depth += 1;
        let around = self.calls.enter();
        let results = self.inside(graph, operands);
        self.calls.leave(around);
        self.depth -= 1;
        results
    }

    fn inside(&mut self, graph: &'a GraphProto, operands: Vec<Bound>) -> Outcome {
        if graph.input.len() != operands.len() {
            let (n, m) = (graph.input.len(), operands.len());
            return misfit(format!("a graph inside has {n} inputs and is given {m}"));
        }
        for (input, bound) in graph.input.iter().zip(operands) {
            self.values.insert(&input.name, bound);
        }
        for proto in &graph.initializer {
            let value = tensor::read(proto, &mut self.files).and_then(|s| s.tensor());
            let value = value.map_err(|e| Fault::Misfit(format!("\"{}\": {e}", proto.name)))?;
            let value = self.constant(value)?;
            self.values.insert(&proto.name, Bound::Value(value));
        }
        for node in &graph.node {
            self.convert_node(None, node);
            if self.is_over() {
                return Err(Fault::Upstream);
            }
        }
        let result = |name: &String| self.values.get(name.as_str()).cloned();
        graph.output.iter().map(|o| result(&o.name).ok_or(Fault::Upstream)).collect()
    }

    fn constant(&mut self, value: Tensor) -> Result<ValueId, Fault> {
        self.node(Op::Constant(Constant { value }), &[], &Origin::none())
    }

    fn node(&mut self, op: Op, inputs: &[ValueId], origin: &Origin) -> Result<ValueId, Fault> {
        let (graph, budget) = (&mut self.graph, &mut self.budget);
        let values = match self.selections.emit(graph, budget, origin, &op, inputs)? {
            Some(values) => values,
            None => context::emit(graph, budget, origin, op, inputs)?,
        };
        values.first().copied().ok_or_else(|| Fault::Misfit("there is no result".into()))
    }

    /// Element `at` of an axis, without the axis.
    fn element(
        &mut self,
        x: ValueId,
        axis: usize,
        at: usize,
        origin: &Origin,
    ) -> Result<ValueId, Fault> {
        let mut dims = self.graph.ty(x).shape.0.clone();
        let mut cut =
            Slice { start: vec![0; dims.len()], size: dims.clone(), step: vec![1; dims.len()] };
        (cut.start[axis], cut.size[axis]) = (at, 1);
        dims.remove(axis);
        let part = self.node(Op::Slice(cut), &[x], origin)?;
        self.node(Op::Reshape(Reshape { shape: Shape(dims) }), &[part], origin)
    }

    /// The values along a new axis.
    fn stack(&mut self, values: &[ValueId], axis: i64, origin: &Origin) -> Result<ValueId, Fault> {
        let Some(&first) = values.first() else {
            return misfit("the shape of a result of zero iterations is not known");
        };
        let mut dims = self.graph.ty(first).shape.0.clone();
        let rank = dims.len() as i64 + 1;
        let axis = usize::try_from(if axis < 0 { axis + rank } else { axis }).unwrap_or(usize::MAX);
        if axis > dims.len() {
            return misfit("the axis of a collected result is no axis");
        }
        dims.insert(axis, 1);
        let mut parts = Vec::with_capacity(values.len());
        for &value in values {
            let op = Op::Reshape(Reshape { shape: Shape(dims.clone()) });
            parts.push(self.node(op, &[value], origin)?);
        }
        if let [only] = parts[..] {
            return Ok(only);
        }
        self.node(Op::Concat(Concat { axis }), &parts, origin)
    }
}
