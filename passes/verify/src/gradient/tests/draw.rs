//! Operations with operands that are drawn at random.

use frit_ir::ops::Op;
use frit_ir::{DType, Shape, Tensor, TensorData, TensorType};
use std::ops::Range;

/// What an operand of a case is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Trained,
    Given,
    Constant,
}

/// An operation, its operands, and the weights of its results in the loss, if they are read.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) operands: Vec<(Tensor, Kind)>,
    pub(crate) weights: Vec<Option<Vec<f64>>>,
    /// Elements of operands that are said to have no gradient.
    pub(crate) flat: Range<usize>,
}

impl Case {
    /// The operand is given, and not trained.
    pub(crate) fn given(mut self, i: usize) -> Self {
        self.operands[i].1 = Kind::Given;
        self
    }

    pub(crate) fn flat(mut self, flat: Range<usize>) -> Self {
        self.flat = flat;
        self
    }

    /// Whether each result is read.
    pub(crate) fn reading(mut self, read: &[bool], draw: &mut Draw) -> Self {
        let types: Vec<&TensorType> = self.operands.iter().map(|(value, _)| &value.ty).collect();
        let results = self.op.infer(&types).unwrap_or_else(|e| panic!("{:?}: {e}", self.op));
        let weights = |(ty, read): (&TensorType, &bool)| read.then(|| draw.weights(&ty.shape));
        self.weights = results.iter().zip(read).map(weights).collect();
        self
    }
}

/// The generator, and the element type of what it draws.
pub(crate) struct Draw {
    rng: fastrand::Rng,
    pub(crate) dtype: DType,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Draw { rng: fastrand::Rng::with_seed(seed), dtype: DType::F64 }
    }

    pub(crate) fn size(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        self.rng.usize(range)
    }

    pub(crate) fn chance(&mut self) -> bool {
        self.rng.bool()
    }

    pub(crate) fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.rng.usize(..all.len())].clone()
    }

    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        self.rng.shuffle(all);
    }

    pub(crate) fn uniform(&mut self, from: f64, to: f64) -> f64 {
        from + (to - from) * self.rng.f64()
    }

    fn weights(&mut self, shape: &Shape) -> Vec<f64> {
        let weight = |_| self.uniform(0.5, 1.5) * if self.rng.bool() { 1.0 } else { -1.0 };
        (0..shape.numel()).map(weight).collect()
    }

    /// A shape of `rank` axes of up to 4 elements.
    pub(crate) fn shape(&mut self, rank: usize) -> Vec<usize> {
        (0..rank).map(|_| self.rng.usize(1..=4)).collect()
    }

    /// Two shapes that broadcast, the second to the first and then perhaps exchanged.
    pub(crate) fn broadcast(&mut self) -> (Vec<usize>, Vec<usize>) {
        let rank = self.size(0..=3);
        let full = self.shape(rank);
        let mut part = full[self.rng.usize(0..=rank)..].to_vec();
        part.iter_mut().for_each(|d| *d = if self.rng.bool() { 1 } else { *d });
        if self.chance() { (full, part) } else { (part, full) }
    }

    /// Numbers of a range, far enough from each other and from multiples of ½ for differences.
    pub(crate) fn numbers(&mut self, n: usize, from: f64, to: f64) -> Vec<f64> {
        let mut drawn: Vec<f64> = Vec::with_capacity(n);
        while drawn.len() < n {
            let x = self.uniform(from, to);
            let corner = (2.0 * x).round() / 2.0;
            if drawn.iter().chain([&corner]).all(|y| (x - y).abs() > 5e-3) {
                drawn.push(x);
            }
        }
        drawn
    }

    pub(crate) fn tensor(&self, shape: impl Into<Shape>, elements: Vec<f64>) -> (Tensor, Kind) {
        let ty = TensorType::new(self.dtype, shape);
        (Tensor::exact(ty, TensorData::Float(elements)), Kind::Trained)
    }

    pub(crate) fn between(
        &mut self,
        from: f64,
        to: f64,
        shape: impl Into<Shape>,
    ) -> (Tensor, Kind) {
        let shape = shape.into();
        let elements = self.numbers(shape.numel(), from, to);
        self.tensor(shape, elements)
    }

    pub(crate) fn floats(&mut self, shape: impl Into<Shape>) -> (Tensor, Kind) {
        self.between(-2.0, 2.0, shape)
    }

    /// Of either sign, at least a half in size.
    pub(crate) fn nonzero(&mut self, shape: impl Into<Shape>) -> (Tensor, Kind) {
        let shape = shape.into();
        let mut elements = self.numbers(shape.numel(), 0.6, 1.9);
        elements.iter_mut().for_each(|x| *x = if self.rng.bool() { -*x } else { *x });
        self.tensor(shape, elements)
    }

    /// Indices of `n` elements, some from the end.
    pub(crate) fn indices(&mut self, n: usize, shape: impl Into<Shape>) -> (Tensor, Kind) {
        let shape = shape.into();
        let n = n as i64;
        let elements = (0..shape.numel()).map(|_| self.rng.i64(-n..n)).collect();
        self.integers(shape, elements)
    }

    pub(crate) fn integers(
        &mut self,
        shape: impl Into<Shape>,
        elements: Vec<i64>,
    ) -> (Tensor, Kind) {
        let dtype = if self.chance() { DType::I64 } else { DType::I32 };
        (Tensor::ints(dtype, shape, elements), Kind::Given)
    }

    pub(crate) fn bools(&mut self, shape: impl Into<Shape>) -> (Tensor, Kind) {
        let shape = shape.into();
        let elements = (0..shape.numel()).map(|_| self.rng.i64(0..2)).collect();
        (Tensor::ints(DType::Bool, shape, elements), Kind::Given)
    }

    /// A case whose first result is read.
    pub(crate) fn case(&mut self, op: Op, operands: Vec<(Tensor, Kind)>) -> Case {
        let case = Case { op, operands, weights: Vec::new(), flat: 0..0 };
        case.reading(&[true], self)
    }
}
