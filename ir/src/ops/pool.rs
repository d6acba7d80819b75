//! Maxima and sums over sliding windows. Average pooling is the sum divided by the number of counted elements,
//! which is known at compile time.

use super::conv::Window;
use super::{Inferred, Linear, OpError, Operation, Precision, arity, axis_of, float};
use crate::TensorType;
use serde::{Deserialize, Serialize};

/// `(x[N, C, …])` → `y[N, C, …]`: the largest element of each window; a border counts as −∞.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxPool {
    /// How the window slides.
    pub window: Window,
    /// Spatial sizes of the window.
    pub taps: Vec<usize>,
}

/// `(dy, x)` → `dx`: the gradient of [`MaxPool`] goes to the first largest element of each window, in
/// row-major order, as in PyTorch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxPoolGrad {
    /// How the window slides.
    pub window: Window,
    /// Spatial sizes of the window.
    pub taps: Vec<usize>,
}

/// `(x[N, C, …])` → `y[N, C, …]`: the sum of each window; a border counts as 0. Sums in f32 (f64 for
/// f64).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumPool {
    /// How the window slides.
    pub window: Window,
    /// Spatial sizes of the window.
    pub taps: Vec<usize>,
}

/// `(dy)` → `dx`: the gradient of [`SumPool`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SumPoolGrad {
    /// How the window slides.
    pub window: Window,
    /// Spatial sizes of the window.
    pub taps: Vec<usize>,
    /// Spatial sizes of `dx`.
    pub size: Vec<usize>,
}

fn image(ty: &TensorType, sizes: &[usize]) -> TensorType {
    TensorType::new(ty.dtype, [&ty.shape.dims()[..2], sizes].concat())
}

fn check(ty: &TensorType, what: &str) -> Result<(), OpError> {
    float(ty, what)?;
    axis_of(ty, 2)
}

fn is(found: &TensorType, expected: &TensorType, what: &str) -> Result<(), OpError> {
    if found == expected {
        return Ok(());
    }
    Err(OpError::new(format!("{what} must be {expected}, not {found}")))
}

fn forward(window: &Window, taps: &[usize], inputs: &[&TensorType]) -> Inferred {
    arity(inputs, 1)?;
    check(inputs[0], "x")?;
    let own = &inputs[0].shape.dims()[2..];
    let sizes = window.positions(own, taps)?;
    // A window that lies in the border alone would have no element. One whose taps are as near as the operand is
    // long meets it if it begins before its end, and ends after its begin.
    let meets = |i: usize| {
        let extent = window.dilations[i].saturating_mul(taps[i] - 1).saturating_add(1);
        let (low, near) = (window.low[i], window.dilations[i] <= own[i] || window.low[i] == 0);
        own[i] > 0 && low < extent && window.high[i] < extent && near
    };
    if let Some(axis) = (0..own.len()).find(|i| !meets(*i)) {
        return Err(OpError::new(format!(
            "the border of spatial axis {axis} is not smaller than the window, which would hold no element of {}",
            own[axis]
        )));
    }
    Ok(vec![image(inputs[0], &sizes)])
}

impl Operation for MaxPool {
    fn examples() -> Vec<Self> {
        vec![MaxPool { window: Window::plain(2), taps: vec![2, 2] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        forward(&self.window, &self.taps, inputs)
    }

    fn precision(&self) -> Precision {
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

impl Operation for SumPool {
    fn examples() -> Vec<Self> {
        vec![SumPool { window: Window::plain(2), taps: vec![2, 2] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        forward(&self.window, &self.taps, inputs)
    }

    fn precision(&self) -> Precision {
        // The sums are kept in f32 inside.
        Precision::UNLISTED
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

impl Operation for MaxPoolGrad {
    fn examples() -> Vec<Self> {
        vec![MaxPoolGrad { window: Window::plain(2), taps: vec![2, 2] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        let y = forward(&self.window, &self.taps, &inputs[1..])?;
        is(inputs[0], &y[0], "dy")?;
        Ok(vec![inputs[1].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

impl Operation for SumPoolGrad {
    fn examples() -> Vec<Self> {
        vec![SumPoolGrad { window: Window::plain(2), taps: vec![2, 2], size: vec![4, 4] }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        check(inputs[0], "dy")?;
        let x = image(inputs[0], &self.size);
        let y = forward(&self.window, &self.taps, &[&x])?;
        is(inputs[0], &y[0], "dy")?;
        Ok(vec![x])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}
