//! Convolution over any number of spatial axes, and windows that slide.

use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, axis_of, float, float_result,
    same_shape,
};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// How a window slides over the spatial axes (all but the first two); one entry per axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Elements between two positions of the window.
    pub strides: Vec<usize>,
    /// Elements between two taps of the window.
    pub dilations: Vec<usize>,
    /// Border before the first element.
    pub low: Vec<usize>,
    /// Border after the last element.
    pub high: Vec<usize>,
}

impl Window {
    /// A window of stride 1 without border.
    pub fn plain(rank: usize) -> Self {
        let (ones, zeros) = (vec![1; rank], vec![0; rank]);
        Window { strides: ones.clone(), dilations: ones, low: zeros.clone(), high: zeros }
    }

    /// The number of positions of a window of these taps over operands of these sizes.
    ///
    /// # Errors
    /// If ranks differ, a stride or dilation is 0, or the window does not fit once.
    pub fn positions(&self, sizes: &[usize], taps: &[usize]) -> Result<Vec<usize>, OpError> {
        let rank = sizes.len();
        let lengths = [&self.strides, &self.dilations, &self.low, &self.high].map(Vec::len);
        if rank == 0 || taps.len() != rank || lengths.iter().any(|n| *n != rank) {
            return Err(OpError::new(format!(
                "a window of {} axes over {rank} spatial axes",
                taps.len()
            )));
        }
        if self.strides.contains(&0) || self.dilations.contains(&0) || taps.contains(&0) {
            return Err(OpError::new("strides, dilations and taps must be at least 1"));
        }
        (0..rank)
            .map(|i| {
                let padded = sizes[i].saturating_add(self.low[i]).saturating_add(self.high[i]);
                let extent = self.dilations[i].saturating_mul(taps[i] - 1).saturating_add(1);
                let room = padded.checked_sub(extent).ok_or_else(|| {
                    OpError::new(format!(
                        "a window of extent {extent} does not fit spatial axis {i} of {padded} \
                         elements"
                    ))
                })?;
                Ok(room / self.strides[i] + 1)
            })
            .collect()
    }
}

/// `(x[N, C, …], w[M, C/groups, …])` → `y[N, M, …]`: ONNX Conv without bias.
///
/// Accumulates in f32 (f64 for f64 operands) and rounds once.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {
    /// How the kernel slides over `x`.
    pub window: Window,
    /// Number of groups of channels that do not mix.
    pub groups: usize,
    /// Element type of the result; that of the operands if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

/// `(dy[N, M, …], w[M, C/groups, …])` → `dx[N, C, …]`: the gradient of [`Conv`] for `x`, which is the
/// transposed convolution.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvGradInput {
    /// How the kernel slides over `dx`.
    pub window: Window,
    /// Number of groups of channels that do not mix.
    pub groups: usize,
    /// Spatial sizes of `dx`.
    pub size: Vec<usize>,
    /// Element type of the result; that of the operands if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

/// `(dy[N, M, …], x[N, C, …])` → `dw[M, C/groups, …]`: the gradient of [`Conv`] for `w`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvGradWeight {
    /// How the kernel slides over `x`.
    pub window: Window,
    /// Number of groups of channels that do not mix.
    pub groups: usize,
    /// Spatial sizes of the kernel.
    pub taps: Vec<usize>,
    /// Element type of the result; that of the operands if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

fn operands(inputs: &[&TensorType], names: [&str; 2]) -> Result<(), OpError> {
    arity(inputs, 2)?;
    for (ty, name) in inputs.iter().zip(names) {
        float(ty, name)?;
        axis_of(ty, 2)?;
    }
    if inputs[0].dtype != inputs[1].dtype {
        let (a, b) = (inputs[0].dtype, inputs[1].dtype);
        return Err(OpError::new(format!("operands of dtypes {a} and {b}")));
    }
    if inputs[0].shape.rank() != inputs[1].shape.rank() {
        return Err(OpError::new("operands of different ranks"));
    }
    Ok(())
}

fn grouped(channels: usize, groups: usize, what: &str) -> Result<usize, OpError> {
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(OpError::new(format!("{channels} {what} in {groups} groups")));
    }
    Ok(channels / groups)
}

fn sizes_are(found: &[usize], expected: &[usize], what: &str) -> Result<(), OpError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (Shape::from(found), Shape::from(expected));
    Err(OpError::new(format!("{what} has spatial sizes {found}, not {expected}")))
}

fn image(dtype: DType, n: usize, c: usize, sizes: &[usize]) -> Vec<TensorType> {
    vec![TensorType::new(dtype, [&[n, c], sizes].concat())]
}

impl Operation for Conv {
    fn examples() -> Vec<Self> {
        vec![Conv { window: Window::plain(2), groups: 1, out: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        operands(inputs, ["x", "w"])?;
        let (x, w) = (inputs[0].shape.dims(), inputs[1].shape.dims());
        let channels = grouped(x[1], self.groups, "channels")?;
        grouped(w[0], self.groups, "filters")?;
        if w[1] != channels {
            return Err(OpError::new(format!(
                "filters of {} channels for groups of {channels}",
                w[1]
            )));
        }
        let sizes = self.window.positions(&x[2..], &w[2..])?;
        Ok(image(float_result(self.out, inputs[0].dtype)?, x[0], w[0], &sizes))
    }

    fn flops(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
        flops(outputs[0], inputs[1])
    }

    fn precision(&self) -> Precision {
        Precision::LOWER
    }

    fn linear(&self) -> Linear {
        Linear::InEach
    }
}

impl Operation for ConvGradInput {
    fn examples() -> Vec<Self> {
        vec![ConvGradInput { window: Window::plain(2), groups: 1, size: vec![4, 4], out: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        operands(inputs, ["dy", "w"])?;
        let (dy, w) = (inputs[0].shape.dims(), inputs[1].shape.dims());
        grouped(w[0], self.groups, "filters")?;
        if dy[1] != w[0] {
            return Err(OpError::new(format!("{} channels for {} filters", dy[1], w[0])));
        }
        sizes_are(&dy[2..], &self.window.positions(&self.size, &w[2..])?, "dy")?;
        let dtype = float_result(self.out, inputs[0].dtype)?;
        Ok(image(dtype, dy[0], w[1].saturating_mul(self.groups), &self.size))
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        flops(inputs[0], inputs[1])
    }

    fn precision(&self) -> Precision {
        Precision::LOWER
    }

    fn linear(&self) -> Linear {
        Linear::InEach
    }
}

impl Operation for ConvGradWeight {
    fn examples() -> Vec<Self> {
        vec![ConvGradWeight { window: Window::plain(2), groups: 1, taps: vec![2, 2], out: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        operands(inputs, ["dy", "x"])?;
        let (dy, x) = (inputs[0].shape.dims(), inputs[1].shape.dims());
        let channels = grouped(x[1], self.groups, "channels")?;
        grouped(dy[1], self.groups, "filters")?;
        same_shape(
            &TensorType::new(inputs[0].dtype, [dy[0]]),
            &TensorType::new(inputs[0].dtype, [x[0]]),
            "batch",
        )?;
        sizes_are(&dy[2..], &self.window.positions(&x[2..], &self.taps)?, "dy")?;
        Ok(image(float_result(self.out, inputs[0].dtype)?, dy[1], channels, &self.taps))
    }

    fn flops(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> u64 {
        flops(inputs[0], outputs[0])
    }

    fn precision(&self) -> Precision {
        Precision::LOWER
    }

    fn linear(&self) -> Linear {
        Linear::InEach
    }
}

/// Multiply-adds of a convolution whose `dy` and `w` have these types, counted as two each.
pub(super) fn flops(dy: &TensorType, w: &TensorType) -> u64 {
    let filters = w.shape.dims().first().copied().unwrap_or(1).max(1);
    (2 * dy.shape.numel() as u64).saturating_mul((w.shape.numel() / filters) as u64)
}
