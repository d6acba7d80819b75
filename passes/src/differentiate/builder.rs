//! Graph builder of the gradient rules: nodes in region backward that inherit the origin of their forward node.

use crate::pass::bug;
use frit_ir::ops::{BinaryFn, Cast, CompareFn, Constant, Expand, Op, Reshape, SumTo, UnaryFn};
use frit_ir::{Code, DType, Diagnostic, Graph, Origin, Region, Shape, Tensor, TensorType, ValueId};

/// The most elements of a zero tensor that is stored: there may be one for every node.
const MAX_ZEROS: usize = 1 << 12;

/// Why a rule gives no gradient.
#[derive(Debug)]
pub(super) enum RuleError {
    /// There is no gradient rule; names the operation.
    Unsupported(String),
    /// The rule built a wrong node.
    Bug(Box<Diagnostic>),
}

impl From<RuleError> for Diagnostic {
    fn from(error: RuleError) -> Diagnostic {
        match error {
            RuleError::Bug(diagnostic) => *diagnostic,
            RuleError::Unsupported(what) => {
                Diagnostic::error(Code::NoGradientRule, format!("{what} has no gradient rule"))
            }
        }
    }
}

/// Results of rules and of the steps that they take.
pub(super) type Rule<T> = Result<T, RuleError>;

/// Cotangents of the operands of a node; `None` where there is none or it is zero.
pub(super) type Gradients = Rule<Vec<Option<ValueId>>>;

/// Adds backward nodes for one forward node.
pub(super) struct Builder<'g> {
    /// The graph.
    pub(super) graph: &'g mut Graph,
    /// For each operand, whether its cotangent is needed.
    pub(super) needs: Vec<bool>,
    origin: Origin,
}

impl<'g> Builder<'g> {
    pub(super) fn new(graph: &'g mut Graph, forward: &Origin) -> Self {
        let origin = forward.by(super::INFO.name);
        Builder { graph, needs: Vec::new(), origin }
    }

    /// Adds a node and returns all results.
    pub(super) fn emit_all(&mut self, op: Op, inputs: &[ValueId]) -> Rule<Vec<ValueId>> {
        self.graph
            .add(op, inputs, self.origin.clone(), Region::Backward)
            .map_err(|e| RuleError::Bug(Box::new(bug(super::INFO.name)(e))))
    }

    /// Adds a node and returns its first result.
    pub(super) fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Rule<ValueId> {
        self.emit_all(op, inputs).map(|outputs| outputs[0])
    }

    /// Whether the cotangent of operand `i` is needed.
    pub(super) fn needs(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }

    /// Type of a value.
    pub(super) fn ty(&self, value: ValueId) -> TensorType {
        self.graph.ty(value).clone()
    }

    /// Dtype of the cotangents of `value`: f32 for a low-precision view of an f32 parameter, so that
    /// its gradient is never rounded; its own otherwise.
    pub(super) fn grad_dtype(&self, value: ValueId) -> DType {
        let own = self.graph.ty(value).dtype;
        if !own.is_low_precision() {
            return own;
        }
        let mut at = value;
        loop {
            let def = self.graph.def(at);
            match &def.op {
                Op::Param(p) if p.ty.dtype == DType::F32 => return DType::F32,
                Op::Cast(_)
                | Op::Transpose(_)
                | Op::Reshape(_)
                | Op::Slice(_)
                | Op::Pad(_)
                | Op::EnterPrecision(_)
                | Op::AllGather(_) => at = def.inputs[0],
                _ => return own,
            }
        }
    }

    /// Whether the value is a low-precision cast of an f32 value, perhaps seen in another shape: its
    /// cotangents are summed in f32.
    pub(super) fn is_narrowed(&self, value: ValueId) -> bool {
        let mut def = self.graph.def(value);
        while let Op::Reshape(_) | Op::Transpose(_) = &def.op {
            def = self.graph.def(def.inputs[0]);
        }
        matches!(&def.op, Op::Cast(Cast { to }) if to.is_low_precision())
            && self.graph.ty(def.inputs[0]).dtype == DType::F32
    }

    /// A constant of shape `[]`, which broadcasts.
    pub(super) fn constant(&mut self, dtype: DType, value: f64) -> Rule<ValueId> {
        let value = Tensor::splat(TensorType::scalar(dtype), value);
        self.emit(Op::Constant(Constant { value }), &[])
    }

    /// A constant zero tensor; a large one is broadcast of one element.
    pub(super) fn zeros(&mut self, ty: TensorType) -> Rule<ValueId> {
        if ty.shape.numel() <= MAX_ZEROS {
            return self.emit(Op::Constant(Constant { value: Tensor::splat(ty, 0.0) }), &[]);
        }
        let zero = self.constant(ty.dtype, 0.0)?;
        self.emit(Op::Expand(Expand { shape: ty.shape }), &[zero])
    }

    /// `value` converted, or itself.
    pub(super) fn cast(&mut self, value: ValueId, to: DType) -> Rule<ValueId> {
        if self.graph.ty(value).dtype == to {
            return Ok(value);
        }
        self.emit(Op::Cast(Cast { to }), &[value])
    }

    /// `value` in another shape, or itself.
    pub(super) fn reshape(&mut self, value: ValueId, shape: impl Into<Shape>) -> Rule<ValueId> {
        let shape = shape.into();
        if self.graph.ty(value).shape == shape {
            return Ok(value);
        }
        self.emit(Op::Reshape(Reshape { shape }), &[value])
    }

    pub(super) fn unary(&mut self, f: UnaryFn, x: ValueId) -> Rule<ValueId> {
        self.emit(Op::Unary(f), &[x])
    }

    pub(super) fn binary(&mut self, f: BinaryFn, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.emit(Op::Binary(f), &[a, b])
    }

    pub(super) fn add(&mut self, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.binary(BinaryFn::Add, a, b)
    }

    pub(super) fn mul(&mut self, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.binary(BinaryFn::Mul, a, b)
    }

    pub(super) fn div(&mut self, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.binary(BinaryFn::Div, a, b)
    }

    pub(super) fn neg(&mut self, x: ValueId) -> Rule<ValueId> {
        self.unary(UnaryFn::Neg, x)
    }

    pub(super) fn compare(&mut self, f: CompareFn, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.emit(Op::Compare(f), &[a, b])
    }

    pub(super) fn select(&mut self, c: ValueId, a: ValueId, b: ValueId) -> Rule<ValueId> {
        self.emit(Op::Select, &[c, a, b])
    }

    /// `x` and a number in its dtype; both in f32 if that does not hold the number.
    pub(super) fn beside(&mut self, x: ValueId, number: f64) -> Rule<(ValueId, ValueId)> {
        let dtype = self.graph.ty(x).dtype;
        let is_held = !dtype.is_low_precision() || dtype.round(number) == number;
        let computed = if is_held { dtype } else { DType::F32 };
        Ok((self.cast(x, computed)?, self.constant(computed, number)?))
    }

    /// `x` times a number, in the dtype of `x`.
    pub(super) fn scaled(&mut self, x: ValueId, factor: f64) -> Rule<ValueId> {
        let dtype = self.graph.ty(x).dtype;
        let (x, factor) = self.beside(x, factor)?;
        let product = self.mul(x, factor)?;
        self.cast(product, dtype)
    }

    /// The cotangent `gradient` of a broadcast use of `operand`: summed to its shape, in the dtype
    /// that its cotangents have.
    pub(super) fn sum_to(&mut self, gradient: ValueId, operand: ValueId) -> Rule<ValueId> {
        let (from, shape) = (self.ty(gradient), self.ty(operand).shape);
        let to = self.grad_dtype(operand);
        if from.shape == shape {
            return self.cast(gradient, to);
        }
        let dtype = (from.dtype != to).then_some(to);
        self.emit(Op::SumTo(SumTo { shape, dtype }), &[gradient])
    }
}
