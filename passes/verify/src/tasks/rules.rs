//! The steps of optimizers that are several tasks, written out as these.

use super::Stated;
use frit_ir::ops::{
    Adafactor, AdafactorPart, AllGather, BinaryFn, Cast, Constant, MatMul, MuonMomentum, MuonStep,
    OptimizerKind, OptimizerStep, Reduce, ReduceFn, Reshape, Slice, UnaryFn,
};
use frit_ir::plan::UnitId;
use frit_ir::{DType, Graph, Node, Op, Region, Shape, Tensor, TensorType, ValueId};
use std::collections::HashMap;

/// The graph in which these steps are written out.
pub(super) fn written_out(graph: &Graph) -> Stated<Graph> {
    let mut made = graph.clone();
    let mut next: HashMap<ValueId, ValueId> = HashMap::new();
    for (_, node) in graph.nodes() {
        let Op::OptimizerStep(step) = &node.op else { continue };
        let mut writer = Writer { graph: &mut made, node };
        let results = match step.kind {
            OptimizerKind::Muon => writer.muon(step)?,
            OptimizerKind::Adafactor => writer.adafactor()?,
            _ => continue,
        };
        next.extend(node.outputs.iter().copied().zip(results));
    }
    // What reads a step stands behind it, as what is added does.
    made.substitute(&next);
    made.remove_dead();
    made.sort().map_err(|_| super::refused("a step depends on itself"))?;
    Ok(made)
}

/// Adds what one step is.
struct Writer<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
}

impl Writer<'_> {
    fn all(&mut self, op: Op, inputs: &[ValueId]) -> Stated<Vec<ValueId>> {
        Ok(self.graph.add(op, inputs, self.node.origin.clone(), Region::Update)?)
    }

    fn one(&mut self, op: Op, inputs: &[ValueId]) -> Stated<ValueId> {
        Ok(self.all(op, inputs)?[0])
    }

    fn cast(&mut self, x: ValueId, to: DType) -> Stated<ValueId> {
        self.one(Op::Cast(Cast { to }), &[x])
    }

    fn binary(&mut self, f: BinaryFn, a: ValueId, b: ValueId) -> Stated<ValueId> {
        self.one(Op::Binary(f), &[a, b])
    }

    fn reshaped(&mut self, x: ValueId, shape: &Shape) -> Stated<ValueId> {
        self.one(Op::Reshape(Reshape { shape: shape.clone() }), &[x])
    }

    /// What ranks have in parts as a whole, in one axis.
    fn gathered(&mut self, x: ValueId, flat: &Shape) -> Stated<ValueId> {
        let whole = self.one(Op::AllGather(AllGather { unit: UnitId::ROOT }), &[x])?;
        self.reshaped(whole, flat)
    }

    /// Σ over an axis.
    fn sum(&mut self, x: ValueId, axis: usize) -> Stated<ValueId> {
        let op = Reduce { f: ReduceFn::Sum, axes: vec![axis], keep_dims: false };
        self.one(Op::Reduce(op), &[x])
    }

    /// The momentum, the iteration of Newton and Schulz on it, and the step along its result.
    fn muon(&mut self, step: &OptimizerStep) -> Stated<Vec<ValueId>> {
        let (rule, inputs) = (step.muon, self.node.inputs.clone());
        let [param, gradient, momentum, lr, keep, a, b, c, eps, decay, clip, _, factor, found_inf] =
            inputs[..]
        else {
            return Err(super::refused("Muon has other operands"));
        };
        let op = Op::MuonMomentum(MuonMomentum { nesterov: rule.nesterov });
        let both = self.all(op, &[gradient, momentum, keep, clip, factor, found_inf])?;
        let (momentum, matrix) = (both[0], both[1]);
        let shape = self.graph.ty(param).shape.clone();
        let &[rows, columns] = shape.dims() else {
            return Err(super::refused("Muon steps no matrix"));
        };
        // X over its norm, which is at least ε.
        let wide = self.cast(matrix, DType::F32)?;
        let squares = self.binary(BinaryFn::Mul, wide, wide)?;
        let sums = self.sum(squares, 1)?;
        let row = self.reshaped(sums, &Shape::from([1, rows]))?;
        let total = self.sum(row, 1)?;
        let norm = self.one(Op::Unary(UnaryFn::Sqrt), &[total])?;
        let norm = self.cast(norm, DType::BF16)?;
        let least = self.cast(eps, DType::BF16)?;
        let norm = self.binary(BinaryFn::Max, norm, least)?;
        let mut x = self.binary(BinaryFn::Div, matrix, norm)?;
        // X ← aX + (bA + cA²)X with A = XXᵀ, or the same from the right.
        let left = rows <= columns;
        let f32_result = MatMul { out: Some(DType::F32), ..MatMul::default() };
        for _ in 0..rule.ns_steps {
            let op = MatMul { trans_a: !left, trans_b: left, out: None };
            let gram = self.one(Op::MatMul(op), &[x, x])?;
            let squared = self.one(Op::MatMul(f32_result.clone()), &[gram, gram])?;
            let squared = self.binary(BinaryFn::Mul, squared, c)?;
            let gram = self.cast(gram, DType::F32)?;
            let gram = self.binary(BinaryFn::Mul, gram, b)?;
            let polynomial = self.binary(BinaryFn::Add, gram, squared)?;
            let polynomial = self.cast(polynomial, DType::BF16)?;
            let product = match left {
                true => self.one(Op::MatMul(f32_result.clone()), &[polynomial, x])?,
                false => {
                    let op = MatMul { trans_b: true, ..f32_result.clone() };
                    self.one(Op::MatMul(op), &[x, polynomial])?
                }
            };
            let wide = self.cast(x, DType::F32)?;
            let wide = self.binary(BinaryFn::Mul, wide, a)?;
            let sum = self.binary(BinaryFn::Add, wide, product)?;
            x = self.cast(sum, DType::BF16)?;
        }
        let ratio = f64::from(rule.adjust_lr.ratio(&shape) as f32);
        let value = Tensor::scalar(ratio);
        let ratio = self.one(Op::Constant(Constant { value }), &[])?;
        let op = Op::MuonStep(MuonStep { adjust_lr: rule.adjust_lr });
        let param = self.one(op, &[param, x, lr, ratio, decay, found_inf])?;
        Ok(vec![param, momentum])
    }

    /// The sums of a parameter, its second moments, and the step.
    fn adafactor(&mut self) -> Stated<Vec<ValueId>> {
        let inputs = self.node.inputs.clone();
        let [
            param,
            gradient,
            state,
            lr,
            exponent,
            eps,
            threshold,
            decay,
            clip,
            step,
            factor,
            found_inf,
        ] = inputs[..]
        else {
            return Err(super::refused("Adafactor has other operands"));
        };
        let shape = self.graph.ty(param).shape.clone();
        let flat = Shape::from([shape.numel()]);
        let value = Tensor::splat(TensorType::new(DType::I64, [1]), 0.0);
        let first = self.one(Op::Constant(Constant { value }), &[])?;
        let [param, gradient] = [self.gathered(param, &flat)?, self.gathered(gradient, &flat)?];
        let part = |part| Op::Adafactor(Adafactor { part, shape: shape.clone(), share: 1.0 });
        let sums = self.one(part(AdafactorPart::Sums), &[first, gradient, param, clip, factor])?;
        let operands = [first, gradient, sums, state, exponent, clip, step, factor, found_inf];
        let moments = self.all(part(AdafactorPart::Moments), &operands)?;
        let (state, of_update) = (moments[0], moments[1]);
        let n = self.graph.ty(state).shape.numel();
        let last = Slice { start: vec![n], size: vec![1], step: vec![1] };
        let of_param = self.one(Op::Slice(last), &[sums])?;
        let operands = [
            first, gradient, param, state, of_param, of_update, lr, eps, threshold, decay, clip,
            step, factor, found_inf,
        ];
        let param = self.one(part(AdafactorPart::Step), &operands)?;
        Ok(vec![self.reshaped(param, &shape)?, state])
    }
}
