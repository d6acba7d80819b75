//! A fused region: several operations executed as one kernel.

use super::{Inferred, Linear, Op, OpError, Operation, Precision, arity};
use crate::{Graph, TensorType};
use serde::{Deserialize, Serialize};

/// How the elements of a region depend on each other, which decides how it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusionKind {
    /// Every result element depends on operand elements at its own place.
    Pointwise,
    /// Rows are independent; within one, reductions over the trailing axes.
    RowReduce,
    /// Columns are independent; each is reduced over the leading axes.
    ColReduce,
    /// As [`FusionKind::RowReduce`], and besides reductions over all rows, which nothing inside reads.
    RowColReduce,
    /// Several [`FusionKind::Pointwise`] regions that share nothing but scalars, each with a shape of its own: the same
    /// work on many tensors in one launch.
    MultiTensor,
    /// A matmul with a pointwise epilogue.
    Gemm,
    /// Attention, or its gradient, with layout operations before and behind it: the kernel reads and
    /// writes in place of them.
    Attention,
    /// A batch normalization with the sum and the ReLU behind it, or its gradient with those before it; its images may be
    /// transposed as in [`FusionKind::ChannelsLast`].
    BatchNorm,
    /// A convolution, a pooling, or the gradient of one, between transposes that put the channels of its images behind the
    /// first axis and back: the kernel reads and writes `[N, …, C]` in place of them.
    ChannelsLast,
}

impl FusionKind {
    /// Name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            FusionKind::Pointwise => "pointwise",
            FusionKind::RowReduce => "row_reduce",
            FusionKind::ColReduce => "col_reduce",
            FusionKind::RowColReduce => "row_col_reduce",
            FusionKind::MultiTensor => "multi_tensor",
            FusionKind::Gemm => "gemm",
            FusionKind::Attention => "attention",
            FusionKind::BatchNorm => "batch_norm",
            FusionKind::ChannelsLast => "channels_last",
        }
    }

    /// Whether a hand-written kernel runs the region; otherwise code generation compiles it.
    pub fn is_library(self) -> bool {
        use FusionKind::{Attention, BatchNorm, ChannelsLast, Gemm};
        matches!(self, Gemm | Attention | BatchNorm | ChannelsLast)
    }
}

/// A region with its body: an ordinary graph whose `input` leaves, in order, are the operands, and
/// whose outputs, in order, are the results.
///
/// Inside a region values of f16 and bf16 may be kept in f32 between nodes; results are rounded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fusion {
    /// How it is compiled.
    pub kind: FusionKind,
    /// What it computes.
    pub body: Graph,
}

impl Fusion {
    /// The operands' types as the body declares them.
    pub fn operand_types(&self) -> Vec<&TensorType> {
        self.body
            .nodes()
            .filter(|(_, n)| matches!(n.op, Op::Input(_)))
            .map(|(_, n)| self.body.ty(n.outputs[0]))
            .collect()
    }
}

impl Operation for Box<Fusion> {
    fn examples() -> Vec<Self> {
        // A body is no attribute of the text form.
        vec![]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        let expected = self.operand_types();
        arity(inputs, expected.len())?;
        for (i, (found, expected)) in inputs.iter().zip(&expected).enumerate() {
            if found != expected {
                return Err(OpError::new(format!("operand {i} is {found}, not {expected}")));
            }
        }
        if self.body.outputs.is_empty() {
            return Err(OpError::new("the body has no output"));
        }
        Ok(self.body.outputs.iter().map(|o| self.body.ty(o.value).clone()).collect())
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        let types = |ids: &[crate::ValueId]| -> Vec<TensorType> {
            ids.iter().map(|v| self.body.ty(*v).clone()).collect()
        };
        self.body
            .nodes()
            .map(|(_, n)| {
                let (inputs, outputs) = (types(&n.inputs), types(&n.outputs));
                n.op.flops(&inputs.iter().collect::<Vec<_>>(), &outputs.iter().collect::<Vec<_>>())
            })
            .fold(0, u64::saturating_add)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        // Regions are no part of a body.
        Linear::No
    }
}

/// Serialized as its text form; used only where a whole `Op` is written, never in the text form itself.
impl Serialize for Fusion {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        (self.kind, self.body.to_string()).serialize(s)
    }
}

impl<'de> Deserialize<'de> for Fusion {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let (kind, body) = <(FusionKind, String)>::deserialize(d)?;
        let body = crate::text::parse(&body).map_err(serde::de::Error::custom)?;
        Ok(Fusion { kind, body })
    }
}
