//! Values of which data decide the size along one axis: what a mask selects, as in `x[mask]`.
//!
//! Sizes of a plan are fixed, so such an axis is as long as everything that could be selected, and what is selected comes first, in
//! order; a mask says which places count. The places behind repeat the first element that is selected, so that functions of them are
//! as finite as of it. Operations along other axes compute them like any other, and those along this one leave them out: sums add
//! zeros, maxima see the lowest number, writes go nowhere. What would show how many there are, or mix them with others, is refused. In
//! JAX this is `jnp.nonzero(mask, size=mask.size)`.

mod adds;
mod along;

use super::context::{self, Fault};
use crate::import::limits::Budget;
use adds::Adds;
use along::{extreme, reduced, written};
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{
    BinaryFn, Cast, CompareFn, Concat, CumSum, Expand, Gather, GatherElements, GatherNd, LayerNorm,
    LogSoftmax, MatMul, Reshape, RmsNorm, ScatterElements, ScatterFn, Slice, Softmax,
};
use frit_ir::{DType, Graph, Op, Origin, Shape, Tensor, TensorType, ValueId};
use std::collections::HashMap;
use std::ops::Range;

/// Operators whose conversion computes with no size of an operand but those of its results. Any other refuses such values.
const CONVERTED: &[&str] = &[
    "Abs",
    "Acos",
    "Add",
    "And",
    "ArgMax",
    "ArgMin",
    "Asin",
    "Atan",
    "AveragePool",
    "Cast",
    "CastLike",
    "Ceil",
    "Celu",
    "Clip",
    "Concat",
    "ConstantOfShape",
    "Conv",
    "ConvTranspose",
    "Cos",
    "CumSum",
    "Div",
    "Dropout",
    "Einsum",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Expand",
    "Flatten",
    "Floor",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Greater",
    "GreaterOrEqual",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "IsInf",
    "IsNaN",
    "LayerNormalization",
    "LeakyRelu",
    "Less",
    "LessOrEqual",
    "Log",
    "LogSoftmax",
    "MaskedScatter",
    "MatMul",
    "Max",
    "MaxPool",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "NegativeLogLikelihoodLoss",
    "NonZero",
    "Not",
    "OneHot",
    "Or",
    "PRelu",
    "Pad",
    "Pow",
    "RMSNormalization",
    "Range",
    "Reciprocal",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "Relu",
    "Reshape",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Selu",
    "SequenceAt",
    "Shape",
    "Sigmoid",
    "Sign",
    "Sin",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropyLoss",
    "Softplus",
    "Softsign",
    "Split",
    "SplitToSequence",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Tile",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
    "Xor",
];

/// Places along an axis of a value, of which the first count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Selected {
    axis: usize,
    /// Which of them do: `bool[n]`, the first ones.
    counts: ValueId,
}

/// What is known of values of which data decide the size.
#[derive(Default)]
pub(super) struct Selections {
    values: HashMap<ValueId, Selected>,
    /// By which places of an axis count: those of the axis that became it together with so many elements behind it.
    joined: HashMap<ValueId, (ValueId, usize)>,
    /// Integers computed from the size along such an axis: of each element, which places it counts.
    sizes: HashMap<ValueId, Vec<Option<ValueId>>>,
}

/// What becomes of an operation on such values.
enum Outcome {
    /// It is done to these operands instead, and its results have such an axis or not.
    Of(Vec<ValueId>, Option<Selected>),
    /// Something else is done.
    Instead(ValueId, Option<Selected>),
}

impl Selections {
    /// Whether a value is known to be one of these, or a number of places.
    pub(super) fn has(&self, value: ValueId) -> bool {
        self.values.contains_key(&value) || self.is_size(value)
    }

    /// Whether an integer is computed from how many places count.
    pub(super) fn is_size(&self, value: ValueId) -> bool {
        self.sizes.contains_key(&value)
    }

    /// The axis of a value that is such a one.
    pub(super) fn axis_of(&self, value: ValueId) -> Option<usize> {
        self.values.get(&value).map(|s| s.axis)
    }

    /// Whether an element of sizes counts places.
    pub(super) fn counts_at(&self, sizes: ValueId, i: usize) -> bool {
        self.sizes.get(&sizes).is_some_and(|counts| counts[i].is_some())
    }

    /// Whether the conversion of an operator keeps what is known of its operands.
    pub(super) fn may_convert(op: &str) -> bool {
        CONVERTED.binary_search(&op).is_ok()
    }

    /// That the sizes of a value, which are those of the axes `axes` of another, count what they count there.
    pub(super) fn sized(&mut self, sizes: ValueId, of: ValueId, axes: Range<usize>) {
        if let Some(selected) = self.values.get(&of)
            && axes.contains(&selected.axis)
        {
            let counts = axes.map(|axis| (axis == selected.axis).then_some(selected.counts));
            self.sizes.insert(sizes, counts.collect());
        }
    }

    /// That a value has the sizes that `sizes` lists.
    pub(super) fn shaped(&mut self, value: ValueId, sizes: ValueId) -> Result<(), Fault> {
        let Some(counts) = self.sizes.get(&sizes) else { return Ok(()) };
        let mut found = counts.iter().enumerate().filter_map(|(axis, c)| Some((axis, (*c)?)));
        match (found.next(), found.next()) {
            (Some((axis, counts)), None) => {
                self.values.entry(value).or_insert(Selected { axis, counts });
                Ok(())
            }
            (None, _) => Ok(()),
            _ => Err(several()),
        }
    }

    /// Numbers from 0 up to a limit: where that is how many places count, those behind are 0.
    pub(super) fn numbered(
        &mut self,
        graph: &mut Graph,
        budget: &mut Budget,
        origin: &Origin,
        numbers: ValueId,
        limit: ValueId,
    ) -> Result<ValueId, Fault> {
        let Some(&[Some(counts)]) = self.sizes.get(&limit).map(Vec::as_slice) else {
            return Ok(numbers);
        };
        let (mut to, at) = (Adds { graph, budget, origin }, Selected { axis: 0, counts });
        let numbers = to.filled(numbers, at, 0.0)?;
        self.values.insert(numbers, at);
        Ok(numbers)
    }

    /// That a value has the axes of another of its shape.
    pub(super) fn alike(&mut self, value: ValueId, other: ValueId) {
        if let Some(selected) = self.values.get(&other).copied() {
            self.values.insert(value, selected);
        }
    }

    /// The coordinates of the elements of a mask that are true, `[axes, n]` for a mask of n elements.
    pub(super) fn coordinates(
        &mut self,
        graph: &mut Graph,
        budget: &mut Budget,
        origin: &Origin,
        mask: ValueId,
    ) -> Result<ValueId, Fault> {
        let mut to = Adds { graph, budget, origin };
        let mut mask = mask;
        if let Some(selected) = self.values.get(&mask).copied() {
            mask = to.filled(mask, selected, 0.0)?;
        }
        let dims = to.dims(mask);
        let n: usize = dims.iter().product();
        if n == 0 || dims.is_empty() {
            return Err(Fault::Misfit(format!("a mask of the shape {dims:?}")));
        }
        let mask = to.reshape(mask, &[n])?;
        let ones = to.op(Op::Cast(Cast { to: DType::I64 }), &[mask])?;
        let sums =
            to.op(Op::CumSum(CumSum { axis: 0, exclusive: false, reverse: false }), &[ones])?;
        let part = |start: usize, size: usize| {
            Op::Slice(Slice { start: vec![start], size: vec![size], step: vec![1] })
        };
        let total = to.op(part(n - 1, 1), &[sums])?;
        let places = to.constant(Tensor::vector_i64((0..n as i64).collect()))?;
        let counts = to.op(Op::Compare(CompareFn::Lt), &[places, total])?;
        // Each place that is selected is written where it comes in order, the others behind the end.
        let one = to.number(DType::I64, 1.0)?;
        let order = to.op(Op::Binary(BinaryFn::Sub), &[sums, one])?;
        let end = to.number(DType::I64, n as f64)?;
        let order = to.op(Op::Select, &[mask, order, end])?;
        let none = to.constant(Tensor::vector_i64(vec![0; n + 1]))?;
        let write = ScatterElements { axis: 0, f: ScatterFn::Replace };
        let selected = to.op(Op::ScatterElements(write), &[none, order, places])?;
        let first = to.op(part(0, 1), &[selected])?;
        let selected = to.op(part(0, n), &[selected])?;
        let selected = to.op(Op::Select, &[counts, selected, first])?;
        let mut rows = vec![];
        let mut rest = selected;
        for (axis, size) in dims.iter().enumerate().rev() {
            let mut own = rest;
            if axis > 0 {
                let size = to.number(DType::I64, *size as f64)?;
                let outer = to.op(Op::Binary(BinaryFn::Div), &[rest, size])?;
                let whole = to.op(Op::Binary(BinaryFn::Mul), &[outer, size])?;
                own = to.op(Op::Binary(BinaryFn::Sub), &[rest, whole])?;
                rest = outer;
            }
            rows.insert(0, to.reshape(own, &[1, n])?);
        }
        let all = to.op(Op::Concat(Concat { axis: 0 }), &rows)?;
        self.values.insert(all, Selected { axis: 1, counts });
        Ok(all)
    }

    /// Adds an operation of which an operand is such a value; nothing if none is.
    pub(super) fn emit(
        &mut self,
        graph: &mut Graph,
        budget: &mut Budget,
        origin: &Origin,
        op: &Op,
        inputs: &[ValueId],
    ) -> Result<Option<Vec<ValueId>>, Fault> {
        if !inputs.iter().any(|v| self.has(*v)) {
            return Ok(None);
        }
        let mut to = Adds { graph, budget, origin };
        if inputs.iter().any(|v| self.is_size(*v)) {
            return self.of_sizes(&mut to, op, inputs).map(Some);
        }
        Ok(Some(match self.outcome(&mut to, op, inputs)? {
            Outcome::Instead(value, selected) => {
                self.values.extend(selected.map(|s| (value, s)));
                vec![value]
            }
            Outcome::Of(inputs, selected) => {
                let results = context::emit(to.graph, to.budget, origin, op.clone(), &inputs)?;
                self.values.extend(selected.iter().flat_map(|s| results.iter().map(|v| (*v, *s))));
                results
            }
        }))
    }

    /// An operation on sizes, which are constants: its results are known to count what its operands do.
    fn of_sizes(
        &mut self,
        to: &mut Adds<'_>,
        op: &Op,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, Fault> {
        let moves = op.is_layout() || matches!(op, Op::Gather(_) | Op::Cast(_) | Op::Select);
        let known = inputs.iter().all(|v| to.graph.constant(*v).is_some());
        let is_index = |i: usize| matches!((op, i), (Op::Gather(_), 1) | (Op::Select, 0));
        // The way exporters ask for a size that is -1, which none of these is.
        let is_test = matches!(op, Op::Compare(_))
            && inputs.iter().any(|v| {
                let value = to.graph.constant(*v).and_then(|t| t.as_ints());
                !self.is_size(*v) && value.is_some_and(|t| t.iter().all(|n| *n < 0))
            });
        if !known || !(moves || is_test) {
            let counted = inputs.iter().map(|v| self.counted(to, *v));
            let counted: Vec<ValueId> = counted.collect::<Result<_, _>>()?;
            let results = self.emit(to.graph, to.budget, to.origin, op, &counted)?;
            return match results {
                Some(results) => Ok(results),
                None => context::emit(to.graph, to.budget, to.origin, op.clone(), &counted),
            };
        }
        // The same of the numbers of the places that elements count: 0 for none.
        let all: Vec<ValueId> = self.sizes.values().flatten().flatten().copied().collect();
        let mut numbered: Vec<Tensor> = vec![];
        for (i, v) in inputs.iter().enumerate() {
            let own = to.graph.constant(*v).expect("invariant: all are known");
            let counts = self.sizes.get(v);
            let number = |c: &Option<ValueId>| {
                c.map_or(0, |c| 1 + all.iter().position(|a| *a == c).unwrap_or(0) as i64)
            };
            numbered.push(match counts {
                _ if is_index(i) => own.clone(),
                Some(counts) => {
                    let numbers = counts.iter().map(number).collect();
                    Tensor::ints(DType::I64, own.shape().clone(), numbers)
                }
                None => Tensor::ints(DType::I64, own.shape().clone(), vec![0; own.numel()]),
            });
        }
        let results = context::emit(to.graph, to.budget, to.origin, op.clone(), inputs)?;
        if is_test {
            return Ok(results);
        }
        let op = match op {
            Op::Cast(_) => &Op::Cast(Cast { to: DType::I64 }),
            op => op,
        };
        let operands: Vec<&Tensor> = numbered.iter().collect();
        let made = eval_op(op, &operands, Options::default());
        let made = made.map_err(|e| Fault::Misfit(e.to_string()))?;
        for (value, numbers) in results.iter().zip(made) {
            let counts: Vec<Option<ValueId>> =
                numbers.to_i64s().iter().map(|n| (*n > 0).then(|| all[*n as usize - 1])).collect();
            if counts.iter().any(Option::is_some) {
                self.sizes.insert(*value, counts);
            }
        }
        Ok(results)
    }

    /// Sizes as what they are once it is known how many places count.
    fn counted(&self, to: &mut Adds<'_>, sizes: ValueId) -> Result<ValueId, Fault> {
        let Some(counts) = self.sizes.get(&sizes) else { return Ok(sizes) };
        let ty = to.graph.ty(sizes).clone();
        let known = to.graph.constant(sizes).map(Tensor::to_f64s);
        let known = known.expect("invariant: sizes are constants");
        let mut elements = vec![];
        for (size, counts) in known.into_iter().zip(counts) {
            elements.push(match counts {
                Some(counts) => to.number_of(*counts, ty.dtype)?,
                None => to.constant(Tensor::splat(TensorType::new(ty.dtype, [1]), size))?,
            });
        }
        let all = match elements[..] {
            [element] => element,
            _ => to.op(Op::Concat(Concat { axis: 0 }), &elements)?,
        };
        to.reshape(all, ty.shape.dims())
    }

    /// What becomes of an operation.
    fn outcome(
        &mut self,
        to: &mut Adds<'_>,
        op: &Op,
        inputs: &[ValueId],
    ) -> Result<Outcome, Fault> {
        let of = |i: usize| inputs.get(i).and_then(|v| self.values.get(v)).copied();
        let rank = |to: &Adds<'_>, i: usize| to.graph.ty(inputs[i]).shape.rank();
        let refused = || -> Result<Outcome, Fault> {
            let what = format!("a size of what `{}` computes with", op.name());
            Err(Fault::Dynamic(what))
        };
        let given = |selected: Option<Selected>| Ok(Outcome::Of(inputs.to_vec(), selected));
        let with = |i: usize, value: ValueId| {
            let mut inputs = inputs.to_vec();
            inputs[i] = value;
            inputs
        };
        let place = |axis: usize, s: Selected| Some(Selected { axis, ..s });
        let alone = |s: Option<Selected>| s.filter(|_| (1..inputs.len()).all(|i| of(i).is_none()));
        match op {
            op if op.is_pointwise()
                || matches!(op, Op::EnterPrecision(_) | Op::LeavePrecision(_)) =>
            {
                let all = (0..inputs.len()).map(|i| rank(to, i)).max().unwrap_or(0);
                let placed = (0..inputs.len())
                    .map(|i| of(i).map(|s| (s.axis + all - rank(to, i), s.counts)));
                given(one_axis(placed)?)
            }
            Op::Reshape(op) => {
                let Some(s) = of(0) else { return refused() };
                self.reshaped(to, inputs[0], s, op)
            }
            Op::Transpose(op) => match of(0) {
                Some(s) => {
                    given(op.perm.iter().position(|p| *p == s.axis).and_then(|k| place(k, s)))
                }
                None => refused(),
            },
            Op::Expand(op) => match of(0) {
                Some(s) => given(place(s.axis + op.shape.rank() - rank(to, 0), s)),
                None => refused(),
            },
            Op::Slice(op) => {
                let dims = to.dims(inputs[0]);
                let whole = |a: usize| op.start[a] == 0 && op.size[a] == dims[a] && op.step[a] == 1;
                match of(0) {
                    Some(s) if whole(s.axis) => given(Some(s)),
                    _ => refused(),
                }
            }
            Op::Pad(op) => match of(0) {
                Some(s) if op.low[s.axis] == 0 && op.high[s.axis] == 0 => given(Some(s)),
                _ => refused(),
            },
            Op::Split(op) => match of(0) {
                Some(s) if s.axis != op.axis => given(Some(s)),
                _ => refused(),
            },
            Op::Concat(op) => {
                let placed = (0..inputs.len()).map(|i| of(i).map(|s| (s.axis, s.counts)));
                match one_axis(placed)? {
                    Some(s) if s.axis != op.axis => given(Some(s)),
                    _ => refused(),
                }
            }
            Op::Reduce(op) => match of(0) {
                Some(s) => reduced(to, inputs[0], s, op),
                None => refused(),
            },
            Op::CumSum(cum_sum) => match alone(of(0)) {
                Some(s) if s.axis == cum_sum.axis => {
                    let filled = with(0, to.filled(inputs[0], s, 0.0)?);
                    let sums = to.op(op.clone(), &filled)?;
                    Ok(Outcome::Instead(to.repeated(sums, s)?, Some(s)))
                }
                Some(s) => given(Some(s)),
                None => refused(),
            },
            Op::ArgReduce(op) => match of(0) {
                // Of equal elements the first, so that none behind those that count is taken.
                Some(s) if s.axis == op.axis && !op.last => {
                    let lowest = extreme(to.graph.ty(inputs[0]).dtype, op.largest);
                    Ok(Outcome::Of(vec![to.filled(inputs[0], s, lowest)?], None))
                }
                Some(s) if s.axis != op.axis => given(Some(s)),
                _ => refused(),
            },
            Op::TopK(op) => match of(0) {
                Some(s) if s.axis != op.axis => given(Some(s)),
                _ => refused(),
            },
            Op::Softmax(Softmax { axis }) | Op::LogSoftmax(LogSoftmax { axis }) => match of(0) {
                Some(s) if s.axis == *axis => {
                    let filled = to.filled(inputs[0], s, f64::NEG_INFINITY)?;
                    let weights = to.op(op.clone(), &[filled])?;
                    Ok(Outcome::Instead(to.repeated(weights, s)?, Some(s)))
                }
                Some(s) => given(Some(s)),
                None => refused(),
            },
            Op::LayerNorm(LayerNorm { axis, .. }) | Op::RmsNorm(RmsNorm { axis, .. }) => {
                match alone(of(0)) {
                    Some(s) if s.axis < *axis => given(Some(s)),
                    _ => refused(),
                }
            }
            Op::CrossEntropy(_) => {
                let placed = (0..2).map(|i| of(i).map(|s| (s.axis, s.counts)));
                match one_axis(placed)? {
                    Some(s) if s.axis + 1 < rank(to, 0) => given(Some(s)),
                    _ => refused(),
                }
            }
            Op::Conv(_) | Op::ConvGradInput(_) | Op::MaxPool(_) | Op::SumPool(_) => {
                match alone(of(0)) {
                    Some(s) if s.axis == 0 => given(Some(s)),
                    _ => refused(),
                }
            }
            Op::MatMul(op) => self.product(to, inputs, op),
            Op::Embedding(_) => match (of(0), of(1)) {
                (None, Some(s)) => {
                    let ids = with(1, to.filled(inputs[1], s, 0.0)?);
                    Ok(Outcome::Instead(to.read(op, &ids, s)?, Some(s)))
                }
                _ => refused(),
            },
            Op::Gather(Gather { axis }) => {
                let ids = rank(to, 1);
                let read = of(0).filter(|s| s.axis != *axis);
                let read = read
                    .map(|s| (if s.axis < *axis { s.axis } else { s.axis + ids - 1 }, s.counts));
                let result = one_axis([read, of(1).map(|s| (s.axis + axis, s.counts))])?;
                self.gathered(to, (op, inputs), of(0).filter(|s| s.axis == *axis), None, result)
            }
            Op::GatherElements(GatherElements { axis }) => {
                let read = of(0).filter(|s| s.axis != *axis);
                let result = one_axis([read, of(1)].map(|s| s.map(|s| (s.axis, s.counts))))?;
                self.gathered(to, (op, inputs), of(0).filter(|s| s.axis == *axis), None, result)
            }
            Op::GatherNd(GatherNd { batch_dims }) => {
                let ids = to.dims(inputs[1]);
                let (places, depth) = (ids.len() - 1, ids[ids.len() - 1]);
                let read = of(0).and_then(|s| match s.axis {
                    axis if axis < *batch_dims => Some((axis, s.counts)),
                    axis => axis.checked_sub(batch_dims + depth).map(|k| (places + k, s.counts)),
                });
                let into = of(0).filter(|_| read.is_none());
                let row = into.map(|s| (s.axis - batch_dims, depth));
                match of(1) {
                    Some(s) if s.axis >= places => refused(),
                    s => {
                        let result = one_axis([read, s.map(|s| (s.axis, s.counts))])?;
                        self.gathered(to, (op, inputs), into, row, result)
                    }
                }
            }
            Op::ScatterElements(op) if of(0).is_none() => {
                match one_axis([of(1), of(2)].map(|s| s.map(|s| (s.axis, s.counts))))? {
                    Some(s) => {
                        written(to, inputs, s, op.f, op.axis, &Op::ScatterElements(op.clone()))
                    }
                    None => refused(),
                }
            }
            Op::ScatterNd(op) if of(0).is_none() && op.batch_dims == 0 => {
                let places = rank(to, 1) - 1;
                match one_axis([of(1), of(2)].map(|s| s.map(|s| (s.axis, s.counts))))? {
                    Some(s) if s.axis < places => {
                        written(to, inputs, s, op.f, 0, &Op::ScatterNd(op.clone()))
                    }
                    _ => refused(),
                }
            }
            _ => refused(),
        }
    }

    /// A read by indices: `into` is such an axis that they are into, at a place of a row of them.
    fn gathered(
        &self,
        to: &mut Adds<'_>,
        (op, inputs): (&Op, &[ValueId]),
        into: Option<Selected>,
        row: Option<(usize, usize)>,
        result: Option<Selected>,
    ) -> Result<Outcome, Fault> {
        let mut ids = inputs[1];
        if let Some(into) = into {
            ids = to.counted_from_start(ids, into.counts, row)?;
        }
        let Some(by) = self.values.get(&inputs[1]).copied() else {
            return Ok(Outcome::Of(vec![inputs[0], ids], result));
        };
        let inputs = [inputs[0], to.filled(ids, by, 0.0)?];
        Ok(Outcome::Instead(to.read(op, &inputs, by)?, result))
    }

    /// A product of matrices.
    fn product(
        &self,
        to: &mut Adds<'_>,
        inputs: &[ValueId],
        op: &MatMul,
    ) -> Result<Outcome, Fault> {
        let ranks = [0, 1].map(|i| to.graph.ty(inputs[i]).shape.rank());
        let all = ranks[0].max(ranks[1]);
        let (mut operands, mut placed) = (inputs.to_vec(), vec![]);
        for (i, turned) in [op.trans_a, op.trans_b].into_iter().enumerate() {
            let Some(s) = self.values.get(&inputs[i]).copied() else { continue };
            // Rows of the first operand, columns of the second.
            let own = ranks[i] - if turned == (i == 0) { 1 } else { 2 };
            let summed = ranks[i] - if turned == (i == 0) { 2 } else { 1 };
            if s.axis == summed {
                operands[i] = to.filled(inputs[i], s, 0.0)?;
            } else {
                let axis = if s.axis == own { all - 2 + i } else { s.axis + all - ranks[i] };
                placed.push(Some((axis, s.counts)));
            }
        }
        Ok(Outcome::Of(operands, one_axis(placed)?))
    }

    /// The value in another shape, if the axis can be told in it.
    fn reshaped(
        &mut self,
        to: &mut Adds<'_>,
        x: ValueId,
        s: Selected,
        op: &Reshape,
    ) -> Result<Outcome, Fault> {
        let (from, dims) = (to.dims(x), op.shape.dims());
        let n = from[s.axis];
        let before: usize = from[..s.axis].iter().product();
        let begins = |axis: &usize| dims[..*axis].iter().product::<usize>() == before;
        let starts: Vec<usize> = (0..dims.len()).filter(begins).collect();
        let refused = || Fault::Dynamic(format!("a size of {from:?} as {dims:?}"));
        if let Some(axis) = starts.iter().copied().find(|axis| dims[*axis] == n) {
            return Ok(Outcome::Of(vec![x], Some(Selected { axis, ..s })));
        }
        let axis = starts.into_iter().find(|axis| dims[*axis] > 1).ok_or_else(refused)?;
        let size = dims[axis];
        let counts = match self.joined.get(&s.counts) {
            // Apart again.
            Some((before, each)) if size * each == n => *before,
            // With elements behind: each place becomes several.
            _ if size > n && size.is_multiple_of(n) => {
                let column = to.reshape(s.counts, &[n, 1])?;
                let shape = Shape::from([n, size / n]);
                let each = to.op(Op::Expand(Expand { shape }), &[column])?;
                let counts = to.reshape(each, &[size])?;
                self.joined.insert(counts, (s.counts, size / n));
                counts
            }
            _ => return Err(refused()),
        };
        Ok(Outcome::Of(vec![x], Some(Selected { axis, counts })))
    }
}

/// The one axis of all that have one.
fn one_axis(
    placed: impl IntoIterator<Item = Option<(usize, ValueId)>>,
) -> Result<Option<Selected>, Fault> {
    let mut all = placed.into_iter().flatten();
    let Some((axis, counts)) = all.next() else { return Ok(None) };
    if all.any(|(other, _)| other != axis) {
        return Err(several());
    }
    Ok(Some(Selected { axis, counts }))
}

fn several() -> Fault {
    Fault::Dynamic("more than one size".into())
}
