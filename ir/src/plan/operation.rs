//! Operations that cuDNN may compute instead of launches: strided tensors without addresses.

use crate::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Memory that an engine may use in addition to copies of its tensors, in bytes.
const WORKSPACE: usize = 32 << 20;
/// The most that one may use, in bytes; the gradient of attention as much as fits any GPU.
const MOST_WORKSPACE: usize = 1 << 30;
const MOST_OF_GRADIENT: usize = 1 << 40;
/// The greatest alignment that makes a difference, in bytes.
const MOST_ALIGNMENT: usize = 16;

/// An operation of cuDNN: the query for engines, and the key of a stored choice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operation {
    /// What is computed.
    pub kind: OperationKind,
    /// Operands and results, in the order that the kind says.
    pub tensors: Vec<Strided>,
    /// Whether engines may add in any order, so that results differ in their last bits between runs.
    #[serde(default, skip_serializing_if = "is_false")]
    pub any_order: bool,
}

/// What is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// Cross-correlation of images `[n, groups · c, …]` with filters `[groups · k, c, …]` to responses
    /// `[n, groups · k, …]`, in this order, or one of its gradients. Sums are f32, or f64 of f64.
    Conv {
        /// Which of the three tensors is the result.
        direction: Direction,
        /// Elements between two positions, by spatial axis.
        strides: Vec<usize>,
        /// Elements between two taps.
        dilations: Vec<usize>,
        /// Zeros before the first element.
        low: Vec<usize>,
        /// Zeros after the last element.
        high: Vec<usize>,
    },
    /// Attention of queries `[b, h, t, d]` to keys `[b, g, s, d]` and values `[b, g, s, e]`: `[b, h, t, e]`, and the
    /// natural logarithm of the sum of the exponentials of each row's scores, `[b, h, t, 1]` of f32.
    Attention {
        /// The bits of an f32, the factor of the scores.
        scale_bits: u32,
        /// Whether query `i` attends only to keys `j ≤ i`.
        causal: bool,
    },
    /// The gradient of attention, from queries, keys, values, the result and its gradient: those of queries, keys and
    /// values; then the logarithms, read, and for each of them a number that the engine writes, both `[b, h, t, 1]`
    /// of f32. It writes the gradient of every score to its workspace or, if it may add in any order, sums of the
    /// gradients of queries to one more tensor, `[b, h, t, d]` of f32.
    AttentionGrad {
        /// As of attention.
        scale_bits: u32,
        /// As of attention.
        causal: bool,
    },
    /// Maxima or sums of windows that slide over images `[n, c, …]`: images and results `[n, c, …]`, in this order. Or
    /// the gradient of the images from that of the sums; then images and sums follow, which engines for dense channels
    /// ask for though nothing depends on them. Sums are f32, or f64 of f64; NaN is the greatest number.
    Pool {
        /// The reduction of a window.
        function: PoolFunction,
        /// Elements of a window, by spatial axis.
        taps: Vec<usize>,
        /// Elements between two positions.
        strides: Vec<usize>,
        /// Elements of the border before the first one: −∞ for maxima, 0 for sums.
        low: Vec<usize>,
        /// The same after the last one.
        high: Vec<usize>,
    },
    /// Batch normalization with the statistics of the batch: images `[n, c, …]`, scale, bias, the normalized images,
    /// the mean, and 1/√(var + eps), of `c` elements each, f32.
    BatchNorm {
        /// The bits of an f32, which is added to the variance.
        eps_bits: u32,
    },
    /// Its gradient: that of the normalized images, the images, scale, mean, 1/√(var + eps); then the gradients of
    /// images, scale and bias.
    BatchNormGrad,
}

/// The reduction of a window by pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolFunction {
    /// The greatest element.
    Max,
    /// The sum.
    Sum,
    /// Every element's part in the gradients of the sums.
    SumGrad,
}

/// Which tensor of a convolution is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The responses.
    Forward,
    /// The images, from the gradient of the responses.
    GradInput,
    /// The filters, from the gradient of the responses.
    GradWeight,
}

/// Elements in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strided {
    /// Their type.
    pub dtype: DType,
    /// Elements along each axis.
    pub sizes: Vec<usize>,
    /// Elements between neighbors along each axis.
    pub strides: Vec<usize>,
    /// The power of two that the address is a multiple of, at most 16.
    pub alignment_bytes: usize,
}

impl Strided {
    /// A tensor without gaps, its last axis the innermost.
    pub fn dense(dtype: DType, sizes: &[usize]) -> Strided {
        let order: Vec<usize> = (0..sizes.len()).collect();
        Strided::ordered(dtype, sizes, &order)
    }

    /// A tensor without gaps, its second axis the innermost: channels last.
    pub fn channels_last(dtype: DType, sizes: &[usize]) -> Strided {
        let order: Vec<usize> = [0].into_iter().chain(2..sizes.len()).chain([1]).collect();
        Strided::ordered(dtype, sizes, &order)
    }

    /// A tensor without gaps, its axes from the outermost to the innermost.
    fn ordered(dtype: DType, sizes: &[usize], order: &[usize]) -> Strided {
        let (mut strides, mut step) = (vec![1; sizes.len()], 1);
        for &axis in order.iter().rev() {
            strides[axis] = step;
            step *= sizes[axis];
        }
        Strided { dtype, sizes: sizes.into(), strides, alignment_bytes: MOST_ALIGNMENT }
    }

    /// Whether equal indices are equal places in both.
    pub fn lies_as(&self, other: &Strided) -> bool {
        let places = |t: &Strided| -> Vec<usize> {
            t.strides.iter().zip(&t.sizes).filter(|(_, n)| **n > 1).map(|(s, _)| *s).collect()
        };
        self.sizes == other.sizes && places(self) == places(other)
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.sizes.iter().product::<usize>() * self.dtype.size()
    }
}

impl Operation {
    /// Whether it has as many tensors as its kind says.
    pub(super) fn is_complete(&self) -> bool {
        let n = match &self.kind {
            OperationKind::Conv { .. } => 3,
            OperationKind::Attention { .. } => 5,
            OperationKind::AttentionGrad { .. } => 10 + usize::from(self.any_order),
            OperationKind::Pool { function: PoolFunction::SumGrad, .. } => 4,
            OperationKind::Pool { .. } => 2,
            OperationKind::BatchNorm { .. } => 6,
            OperationKind::BatchNormGrad => 8,
        };
        self.tensors.len() == n
    }

    /// Which of the tensors are written.
    pub fn results(&self) -> &'static [usize] {
        match &self.kind {
            OperationKind::Conv { direction: Direction::GradInput, .. } => &[0],
            OperationKind::Conv { direction: Direction::GradWeight, .. } => &[1],
            OperationKind::Conv { direction: Direction::Forward, .. } => &[2],
            OperationKind::Attention { .. } => &[3, 4],
            OperationKind::AttentionGrad { .. } if self.any_order => &[5, 6, 7, 9, 10],
            OperationKind::AttentionGrad { .. } => &[5, 6, 7, 9],
            OperationKind::Pool { function: PoolFunction::SumGrad, .. } => &[0],
            OperationKind::Pool { .. } => &[1],
            OperationKind::BatchNorm { .. } => &[3, 4, 5],
            OperationKind::BatchNormGrad => &[5, 6, 7],
        }
    }

    /// Memory that engines may use, in bytes: enough to rearrange every tensor.
    pub fn workspace_bytes(&self) -> usize {
        let bytes = |t: &Strided| t.bytes().next_multiple_of(256);
        let needed = match (&self.kind, &self.tensors[..]) {
            (OperationKind::Attention { .. } | OperationKind::Pool { .. }, _) => 0,
            // Gradients of scores, and of the keys and values of every query head where these share them.
            (OperationKind::AttentionGrad { .. }, [q, k, v, ..]) => {
                let (heads, keys) = (q.sizes[0] * q.sizes[1], k.sizes[2]);
                let shared = if q.sizes[1] == k.sizes[1] { 0 } else { k.sizes[3] + v.sizes[3] };
                // Engines that add in any order may copy tensors instead of the scores.
                let (scores, copies) = match self.any_order {
                    true => (0, self.tensors.iter().map(bytes).fold(0, usize::saturating_add)),
                    false => (q.sizes[2], 0),
                };
                let rows = heads.saturating_mul(keys).saturating_mul(scores + shared);
                let needed = rows.saturating_mul(q.dtype.size()).saturating_add(copies);
                return WORKSPACE.saturating_add(needed).min(MOST_OF_GRADIENT);
            }
            _ => self.tensors.iter().map(bytes).sum(),
        };
        (WORKSPACE + needed).min(MOST_WORKSPACE)
    }

    /// The same for tensors at these addresses.
    pub fn at(&self, addresses: &[u64]) -> Operation {
        let mut placed = self.clone();
        for (tensor, at) in placed.tensors.iter_mut().zip(addresses) {
            tensor.alignment_bytes = MOST_ALIGNMENT.min(1 << at.trailing_zeros().min(16));
        }
        placed
    }
}

/// Everything that distinguishes it: the key of the tuning file.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            OperationKind::Conv { direction, strides, dilations, low, high } => {
                f.write_str(match direction {
                    Direction::Forward => "conv",
                    Direction::GradInput => "conv_grad_input",
                    Direction::GradWeight => "conv_grad_weight",
                })?;
                write!(f, " strides {} dilations {}", list(strides), list(dilations))?;
                write!(f, " low {} high {}", list(low), list(high))?;
            }
            OperationKind::Attention { scale_bits, causal }
            | OperationKind::AttentionGrad { scale_bits, causal } => {
                f.write_str(match &self.kind {
                    OperationKind::Attention { .. } => "attention",
                    _ => "attention_grad",
                })?;
                let causal = if *causal { " causal" } else { "" };
                write!(f, "{causal} scale {}", f32::from_bits(*scale_bits))?;
            }
            OperationKind::Pool { function, taps, strides, low, high } => {
                f.write_str(match function {
                    PoolFunction::Max => "max_pool",
                    PoolFunction::Sum => "sum_pool",
                    PoolFunction::SumGrad => "sum_pool_grad",
                })?;
                write!(f, " taps {} strides {}", list(taps), list(strides))?;
                write!(f, " low {} high {}", list(low), list(high))?;
            }
            OperationKind::BatchNorm { eps_bits } => {
                write!(f, "batch_norm eps {}", f32::from_bits(*eps_bits))?;
            }
            OperationKind::BatchNormGrad => f.write_str("batch_norm_grad")?,
        }
        if self.any_order {
            f.write_str(" any order")?;
        }
        for tensor in &self.tensors {
            let Strided { dtype, sizes, strides, alignment_bytes } = tensor;
            write!(f, " {dtype}:{}:{}", list(sizes), list(strides))?;
            if *alignment_bytes < MOST_ALIGNMENT {
                write!(f, " aligned {alignment_bytes}")?;
            }
        }
        Ok(())
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}
