//! Static shapes and tensor types.

use crate::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The maximum number of elements of a tensor, empty axes counted as one: sums and products of a few such sizes do
/// not overflow.
pub const MAX_ELEMENTS: usize = 1 << 40;
/// The largest number of axes that a tensor may have.
pub const MAX_RANK: usize = 64;

/// The dimensions of a tensor, outermost first; empty for a scalar.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Vec<usize>);

impl Shape {
    /// The shape of a scalar.
    pub fn scalar() -> Self {
        Shape(Vec::new())
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements (1 for a scalar); the largest number of all where it is larger, which no value's is.
    pub fn numel(&self) -> usize {
        product(&self.0)
    }

    /// The number of elements, unless there are more than [`MAX_ELEMENTS`], or more axes than [`MAX_RANK`].
    pub fn checked_numel(&self) -> Option<usize> {
        // An axis without elements must not hide an overflow in the others.
        let n = self.0.iter().fold(1usize, |n, &d| n.saturating_mul(d.max(1)));
        (n <= MAX_ELEMENTS && self.rank() <= MAX_RANK).then(|| self.numel())
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1usize; self.rank()];
        for i in (0..self.rank().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1].saturating_mul(self.0[i + 1]);
        }
        strides
    }

    /// Numpy's broadcast of two shapes, or `None` where they do not fit.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let at = |s: &Shape, i: usize| {
            let missing = rank - s.rank();
            if i < missing { 1 } else { s.0[i - missing] }
        };
        (0..rank)
            .map(|i| match (at(self, i), at(other, i)) {
                (a, b) if a == b => Some(a),
                (1, b) => Some(b),
                (a, 1) => Some(a),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
            .map(Shape)
    }

    /// Strides (in elements) with which a tensor of this shape is read as one of shape `to`; 0 where
    /// it is broadcast. `None` if it does not broadcast to `to`.
    pub fn broadcast_strides(&self, to: &Shape) -> Option<Vec<usize>> {
        let missing = to.rank().checked_sub(self.rank())?;
        let own = self.strides();
        (0..to.rank())
            .map(|i| {
                if i < missing {
                    return Some(0);
                }
                match self.0[i - missing] {
                    d if d == to.0[i] => Some(if d == 1 { 0 } else { own[i - missing] }),
                    1 => Some(0),
                    _ => None,
                }
            })
            .collect()
    }
}

/// The product of sizes, or the largest number of all where it is larger.
pub fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |n, &size| n.saturating_mul(size))
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

/// Element type and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Static shape.
    pub shape: Shape,
}

impl TensorType {
    /// A tensor type from its parts.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        TensorType { dtype, shape: shape.into() }
    }

    /// The type of a scalar.
    pub fn scalar(dtype: DType) -> Self {
        TensorType { dtype, shape: Shape::scalar() }
    }

    /// Size in bytes, dense.
    pub fn bytes(&self) -> usize {
        self.dtype.size().saturating_mul(self.shape.numel())
    }

    /// The same shape in another element type.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        TensorType { dtype, shape: self.shape.clone() }
    }

    /// The same element type in another shape.
    pub fn with_shape(&self, shape: impl Into<Shape>) -> Self {
        TensorType { dtype: self.dtype, shape: shape.into() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
