//! The context of converting one ONNX node: its operands, attributes, and the graph under construction.
//!
//! A node whose operands are all constants is evaluated at once ([`NodeContext::emit`]), so only the results of exporters' shape
//! arithmetic remain.

use super::function::Calls;
use super::messages::{AttributeProto, NodeProto};
use super::selected::Selections;
use super::tensor::{self, ExternalFiles};
use crate::import::dims::checked_numel;
use crate::import::limits::{Budget, Exceeded, Resource};
use crate::weights::Weights;
use frit_ir::interpret::{self, Options};
use frit_ir::ops::{Constant, Expand, Reshape};
use frit_ir::shape::MAX_ELEMENTS;
use frit_ir::{DType, Graph, Op, Origin, Region, Shape, Tensor, TensorType, ValueId};
use std::collections::HashMap;

/// Results with more elements than this are computed by the plan, not at import.
pub(super) const MAX_FOLDED: usize = 1 << 24;
/// The largest stride, pad or number of taps that is read; times [`MAX_ELEMENTS`] it is no overflow.
const MAX_STEP: usize = 1 << 22;
/// Results with at most so many elements may be shapes, which must be known at import.
const SMALL: usize = 1 << 12;
/// Operations to compute such results.
const SMALL_WORK: u64 = 1 << 20;

/// The value of a name of the ONNX graph.
#[derive(Clone, Debug)]
pub(super) enum Bound {
    /// A tensor.
    Value(ValueId),
    /// A sequence of tensors, known at import.
    Sequence(Vec<ValueId>),
    /// The result of a node that could not be imported; dependents are not reported.
    Failed,
}

impl From<ValueId> for Bound {
    fn from(value: ValueId) -> Self {
        Bound::Value(value)
    }
}

/// Why a node cannot be read.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// It depends on a node that could not be read.
    Upstream,
    /// An attribute, or an operand used like one, has a value that is not supported.
    Attribute(String),
    /// Operands or attributes do not fit the operation.
    Misfit(String),
    /// A gradient function does not fit its function.
    Gradient(String),
    /// An operand must be known at import and is not.
    Dynamic(String),
    /// It asks for more than the import may make.
    Limit(Exceeded),
}

impl From<Exceeded> for Fault {
    fn from(exceeded: Exceeded) -> Self {
        Fault::Limit(exceeded)
    }
}

/// Results of a node, in order.
pub(super) type Outcome = Result<Vec<Bound>, Fault>;

pub(super) fn misfit<T>(message: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Misfit(message.into()))
}

/// One node, while it is being converted.
pub(super) struct NodeContext<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) budget: &'a mut Budget,
    pub(super) files: &'a mut ExternalFiles,
    pub(super) node: &'a NodeProto,
    pub(super) origin: Origin,
    pub(super) inputs: Vec<Option<Bound>>,
    pub(super) opset: i64,
    pub(super) calls: &'a mut Calls,
    pub(super) selections: &'a mut Selections,
    /// Whether every BatchNormalization uses the statistics of its batch.
    pub(super) batch_norm_trains: bool,
    /// Ranks over which a BatchNormalization computes statistics.
    pub(super) batch_norm_ranks: usize,
    /// Whether one of PyTorch's exporters wrote the model.
    pub(super) from_pytorch: bool,
    /// Padding rows of tables, by initializer, where their values show them.
    pub(super) padding_rows: &'a HashMap<&'a str, usize>,
    /// The parameters' values.
    pub(super) weights: &'a Weights,
}

impl NodeContext<'_> {
    /// Operand `i`, if it is given.
    pub(super) fn optional(&self, i: usize) -> Result<Option<ValueId>, Fault> {
        match self.inputs.get(i) {
            None | Some(None) => Ok(None),
            Some(Some(Bound::Value(v))) => Ok(Some(*v)),
            Some(Some(Bound::Failed)) => Err(Fault::Upstream),
            Some(Some(Bound::Sequence(_))) => misfit(format!("input {i} is a sequence")),
        }
    }

    /// Operand `i`.
    pub(super) fn input(&self, i: usize) -> Result<ValueId, Fault> {
        self.optional(i)?.ok_or_else(|| Fault::Misfit(format!("input {i} is missing")))
    }

    /// All operands of a variadic operation, at least one.
    pub(super) fn variadic(&self) -> Result<Vec<ValueId>, Fault> {
        if self.inputs.is_empty() {
            return misfit("there is no input");
        }
        (0..self.inputs.len()).map(|i| self.input(i)).collect()
    }

    /// Operand `i`, which must be a sequence.
    pub(super) fn sequence(&self, i: usize) -> Result<Vec<ValueId>, Fault> {
        match self.inputs.get(i) {
            Some(Some(Bound::Sequence(values))) => Ok(values.clone()),
            Some(Some(Bound::Failed)) => Err(Fault::Upstream),
            _ => misfit(format!("input {i} is not a sequence")),
        }
    }

    /// The value of operand `i`, which must be known at import, if it is given.
    pub(super) fn known(&self, i: usize, what: &str) -> Result<Option<Tensor>, Fault> {
        let value = self.optional(i)?.filter(|v| self.selections.is_size(*v));
        if value.is_some() { Err(Fault::Dynamic(what.into())) } else { self.known_size(i, what) }
    }

    /// The same of sizes for the result, which may be those of a value of which data decide the size.
    pub(super) fn known_size(&self, i: usize, what: &str) -> Result<Option<Tensor>, Fault> {
        let Some(value) = self.optional(i)? else { return Ok(None) };
        match self.graph.constant(value) {
            Some(tensor) => Ok(Some(tensor.clone())),
            None => Err(Fault::Dynamic(what.into())),
        }
    }

    /// The sizes that operand `i` lists for the result, which must be known at import. [`shaped`](NodeContext::shaped) must be told.
    pub(super) fn known_shape(&self, i: usize) -> Result<Vec<i64>, Fault> {
        let known = self.known_size(i, "the shape")?;
        known.map(|t| t.to_i64s()).ok_or_else(|| Fault::Misfit("the shape is missing".into()))
    }

    /// The only result, of the shape that operand `i` lists.
    pub(super) fn shaped(&mut self, value: ValueId, i: usize) -> Outcome {
        let sizes = self.input(i)?;
        self.selections.shaped(value, sizes)?;
        Ok(vec![value.into()])
    }

    /// The integers of operand `i`, which must be known at import, if it is given.
    pub(super) fn known_ints(&self, i: usize, what: &str) -> Result<Option<Vec<i64>>, Fault> {
        Ok(self.known(i, what)?.map(|t| t.to_i64s()))
    }

    /// The one number of operand `i`, which must be known at import, if it is given.
    pub(super) fn known_scalar(&self, i: usize, what: &str) -> Result<Option<f64>, Fault> {
        let Some(tensor) = self.known(i, what)? else { return Ok(None) };
        match tensor.to_f64s().as_slice() {
            [x] => Ok(Some(*x)),
            _ => misfit(format!("{what} must be one number, not {}", tensor.ty)),
        }
    }

    /// Type of a value.
    pub(super) fn ty(&self, value: ValueId) -> TensorType {
        self.graph.ty(value).clone()
    }

    /// Dimensions of a value.
    pub(super) fn dims(&self, value: ValueId) -> Vec<usize> {
        self.graph.ty(value).shape.0.clone()
    }

    /// `axis` counted from the front, for a tensor of `rank` axes.
    pub(super) fn axis_in(&self, rank: usize, axis: i64) -> Result<usize, Fault> {
        let rank_i = rank as i64;
        let resolved = if axis < 0 { axis.saturating_add(rank_i) } else { axis };
        if (0..rank_i).contains(&resolved) {
            return Ok(resolved as usize);
        }
        misfit(format!("axis {axis} of a tensor of rank {rank}"))
    }

    /// `axis` of a value, counted from the front.
    pub(super) fn axis(&self, value: ValueId, axis: i64) -> Result<usize, Fault> {
        self.axis_in(self.graph.ty(value).shape.rank(), axis)
    }

    /// Axes counted from the front, ascending.
    pub(super) fn axes_in(&self, rank: usize, axes: &[i64]) -> Result<Vec<usize>, Fault> {
        let mut out = axes.iter().map(|a| self.axis_in(rank, *a)).collect::<Result<Vec<_>, _>>()?;
        out.sort_unstable();
        if out.windows(2).any(|w| w[0] == w[1]) {
            return misfit(format!("axes {axes:?} name one axis twice"));
        }
        Ok(out)
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.node.attribute.iter().find(|a| a.name == name)
    }

    /// Whether the attribute is given.
    pub(super) fn has(&self, name: &str) -> bool {
        self.attribute(name).is_some()
    }

    /// An integer attribute.
    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |a| a.i)
    }

    /// A float attribute, as the decimal number it was written as: ONNX rounds 1e-5 to an f32.
    pub(super) fn float(&self, name: &str, default: f64) -> f64 {
        self.attribute(name).map_or(default, |a| decimal(a.f))
    }

    /// A list of integers.
    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|a| a.ints.clone())
    }

    /// A text attribute.
    pub(super) fn text(&self, name: &str, default: &str) -> String {
        self.attribute(name)
            .map_or_else(|| default.into(), |a| String::from_utf8_lossy(&a.s).into_owned())
    }

    /// A list of texts; empty if it is not given.
    pub(super) fn strings(&self, name: &str) -> Vec<String> {
        let texts = self.attribute(name).map_or(&[][..], |a| a.strings.as_slice());
        texts.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect()
    }

    /// A tensor attribute.
    pub(super) fn tensor(&mut self, name: &str) -> Result<Option<Tensor>, Fault> {
        let node = self.node;
        let Some(t) = node.attribute.iter().find(|a| a.name == name).and_then(|a| a.t.as_ref())
        else {
            return Ok(None);
        };
        let stored = tensor::read(t, self.files).and_then(|s| s.tensor());
        stored.map(Some).map_err(|e| Fault::Misfit(format!("the tensor in `{name}`: {e}")))
    }

    /// An integer of the table of element types.
    pub(super) fn dtype_attribute(&self, name: &str, code: i64) -> Result<DType, Fault> {
        tensor::computed(code).map_err(|_| Fault::Attribute(format!("{name} = {code}")))
    }

    /// A constant of the graph.
    pub(super) fn constant(&mut self, value: Tensor) -> Result<ValueId, Fault> {
        self.add(Op::Constant(Constant { value }), &[]).map(|v| v[0])
    }

    /// A scalar constant in the element type of `like`.
    pub(super) fn scalar_like(&mut self, like: ValueId, value: f64) -> Result<ValueId, Fault> {
        let ty = TensorType::scalar(self.graph.ty(like).dtype);
        self.constant(Tensor::splat(ty, value))
    }

    /// Adds an operation with one result; computes it at once if its operands are constants.
    pub(super) fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, Fault> {
        let results = self.emit_all(op, inputs)?;
        results.first().copied().ok_or_else(|| Fault::Misfit("there is no result".into()))
    }

    /// Adds an operation; computes it at once if its operands are constants.
    pub(super) fn emit_all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Fault> {
        let (graph, budget, origin) = (&mut *self.graph, &mut *self.budget, &self.origin);
        match self.selections.emit(graph, budget, origin, &op, inputs)? {
            Some(results) => Ok(results),
            None => emit(graph, budget, origin, op, inputs),
        }
    }

    /// Adds an operation as it is.
    pub(super) fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Fault> {
        let (graph, budget, origin) = (&mut *self.graph, &mut *self.budget, &self.origin);
        match self.selections.emit(graph, budget, origin, &op, inputs)? {
            Some(results) => Ok(results),
            None => add(graph, budget, origin, op, inputs),
        }
    }

    /// A constant of floats, each computed of its place; refused before any is, if the budget has no room for it.
    pub(super) fn floats(
        &mut self,
        dtype: DType,
        dims: &[usize],
        value: impl FnMut(usize) -> f64,
    ) -> Result<ValueId, Fault> {
        if !dtype.is_float() {
            return misfit(format!("numbers of {dtype}, which are no floats"));
        }
        let n = self.room(dims)?;
        self.constant(Tensor::floats(dtype, dims, (0..n).map(value).collect()))
    }

    /// The same of integers.
    pub(super) fn integers(
        &mut self,
        dtype: DType,
        dims: &[usize],
        value: impl FnMut(usize) -> i64,
    ) -> Result<ValueId, Fault> {
        if dtype.is_float() {
            return misfit(format!("integers of {dtype}"));
        }
        let n = self.room(dims)?;
        self.constant(Tensor::ints(dtype, dims, (0..n).map(value).collect()))
    }

    /// The number of elements, for which there is room.
    pub(super) fn room(&self, dims: &[usize]) -> Result<usize, Fault> {
        let n = checked_numel(dims);
        self.budget.room(Resource::Elements, n.map_or(u64::MAX, |n| n as u64))?;
        Ok(n.unwrap_or(usize::MAX))
    }

    /// Counts operations on elements, before they are done.
    pub(super) fn work(&mut self, factors: &[usize]) -> Result<(), Fault> {
        let n = factors.iter().fold(1u64, |n, &f| n.saturating_mul(f as u64));
        Ok(self.budget.charge(Resource::Operations, n)?)
    }

    /// Refuses what would take so many nodes.
    pub(super) fn nodes(&self, n: usize) -> Result<(), Fault> {
        Ok(self.budget.room(Resource::Nodes, n as u64)?)
    }

    /// The value in another shape; itself if it has that shape already.
    pub(super) fn reshape(&mut self, value: ValueId, dims: Vec<usize>) -> Result<ValueId, Fault> {
        if self.graph.ty(value).shape.dims() == dims {
            return Ok(value);
        }
        if checked_numel(&dims).is_none() {
            return misfit(format!("shape {dims:?} is too large"));
        }
        self.emit(Op::Reshape(Reshape { shape: Shape(dims) }), &[value])
    }

    /// The value broadcast to a shape; itself if it has that shape already.
    pub(super) fn expand(&mut self, value: ValueId, dims: Vec<usize>) -> Result<ValueId, Fault> {
        if self.graph.ty(value).shape.dims() == dims {
            return Ok(value);
        }
        self.emit(Op::Expand(Expand { shape: Shape(dims) }), &[value])
    }

    /// The value in another element type; itself if it has that one already.
    pub(super) fn cast(&mut self, value: ValueId, to: DType) -> Result<ValueId, Fault> {
        if self.graph.ty(value).dtype == to {
            return Ok(value);
        }
        self.emit(Op::Cast(frit_ir::ops::Cast { to }), &[value])
    }

    /// Non-negative numbers out of ONNX integers, such that a product of one and a tensor's size is no overflow:
    /// strides, pads, taps.
    pub(super) fn steps(&self, values: &[i64], what: &str) -> Result<Vec<usize>, Fault> {
        let step = |&v: &i64| usize::try_from(v).ok().filter(|v| *v <= MAX_STEP);
        let steps: Option<Vec<usize>> = values.iter().map(step).collect();
        steps.ok_or_else(|| Fault::Attribute(format!("{what} {values:?}")))
    }

    /// Non-negative sizes of parts out of ONNX integers.
    pub(super) fn parts(&self, values: &[i64], what: &str) -> Result<Vec<usize>, Fault> {
        let part = |&v: &i64| usize::try_from(v).ok().filter(|v| *v <= MAX_ELEMENTS);
        let parts: Option<Vec<usize>> = values.iter().map(part).collect();
        match parts {
            Some(parts) => Ok(parts),
            None => misfit(format!("{what} {values:?} is not valid")),
        }
    }

    /// A count out of an attribute: 0 if it is negative, or too large to compute with.
    pub(super) fn count(&self, name: &str, default: i64) -> usize {
        usize::try_from(self.int(name, default)).ok().filter(|n| *n <= MAX_STEP).unwrap_or(0)
    }

    /// Non-negative sizes out of ONNX integers, small enough to compute with.
    pub(super) fn sizes(&self, values: &[i64], what: &str) -> Result<Vec<usize>, Fault> {
        let sizes: Option<Vec<usize>> = values.iter().map(|&v| usize::try_from(v).ok()).collect();
        match sizes {
            Some(sizes) if checked_numel(&sizes).is_some() => Ok(sizes),
            _ => misfit(format!("{what} {values:?} is not a valid shape")),
        }
    }
}

/// Adds an operation; computes it at once if its operands are constants and the budget affords it.
pub(super) fn emit(
    graph: &mut Graph,
    budget: &mut Budget,
    origin: &Origin,
    op: Op,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>, Fault> {
    let known: Option<Vec<&Tensor>> = inputs.iter().map(|v| graph.constant(*v)).collect();
    let Some(known) = known.filter(|_| !op.is_leaf()) else {
        return add(graph, budget, origin, op, inputs);
    };
    let types: Vec<&TensorType> = known.iter().map(|t| &t.ty).collect();
    let results = op.infer(&types).map_err(|e| Fault::Misfit(e.to_string()))?;
    let elements: usize = results.iter().map(|ty| ty.shape.numel()).sum();
    let operations = interpret::operations(&op, &types, &results.iter().collect::<Vec<_>>());
    let may_be_shape = elements <= SMALL && operations <= SMALL_WORK;
    let affords = elements <= MAX_FOLDED && budget.affords(elements as u64, operations);
    if !may_be_shape && !affords {
        return add(graph, budget, origin, op, inputs);
    }
    budget.charge(Resource::Operations, operations)?;
    budget.room(Resource::Elements, elements as u64)?;
    let results = interpret::eval_op(&op, &known, Options::default());
    let results = results.map_err(|e| Fault::Misfit(e.to_string()))?;
    let mut values = Vec::with_capacity(results.len());
    for value in results {
        values.extend(add(graph, budget, origin, Op::Constant(Constant { value }), &[])?);
    }
    Ok(values)
}

/// Adds an operation as it is.
pub(super) fn add(
    graph: &mut Graph,
    budget: &mut Budget,
    origin: &Origin,
    op: Op,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>, Fault> {
    if let Op::Constant(Constant { value }) = &op {
        budget.charge(Resource::Elements, value.numel() as u64)?;
    }
    let added = graph.add(op, inputs, origin.clone(), Region::Forward);
    let values = added.map_err(|e| Fault::Misfit(e.error.to_string()))?;
    budget.charge(Resource::Nodes, values.len() as u64)?;
    Ok(values)
}

/// The shortest decimal number that rounds to this f32, as f64.
pub(super) fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

#[cfg(test)]
mod tests {
    use super::decimal;

    #[test]
    fn float_attributes_are_the_numbers_that_were_meant() {
        assert_eq!(decimal(1e-5), 1e-5);
        assert_eq!(decimal(0.1), 0.1);
        assert!(decimal(f32::INFINITY).is_infinite());
        assert!(decimal(f32::NAN).is_nan());
    }
}
