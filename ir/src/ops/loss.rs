//! Cross-entropy of class indices.
//!
//! Per row, so that sum, count and mean stay visible in the graph; computed in f32 (f64 for f64) from
//! logits of any float dtype. Source: ONNX SoftmaxCrossEntropyLoss-13, `torch.nn.functional.cross_entropy`.
//!
//! Rows of logits may be padded: only their first `classes` columns take part.

use super::precision::{Class, own};
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, elements, float, index_type,
    same_shape, shape_is, statistics_dtype,
};
use crate::{Shape, TensorType};
use serde::{Deserialize, Serialize};

/// `(logits[.., V], labels[..])` → `(losses[..], lse[..])`; a row whose label is `ignore_index` has
/// loss 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropy {
    /// The label that is ignored.
    pub ignore_index: i64,
    /// Number of classes, if rows have further columns (padding).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
}

impl CrossEntropy {
    /// Every column is a class.
    pub fn ignoring(ignore_index: i64) -> Self {
        CrossEntropy { ignore_index, classes: None }
    }

    /// The number of classes of logits of this shape.
    pub fn classes_of(&self, logits: &Shape) -> usize {
        self.classes.or(logits.0.last().copied()).unwrap_or(0)
    }
}

impl Operation for CrossEntropy {
    fn examples() -> Vec<Self> {
        vec![CrossEntropy::ignoring(-100), CrossEntropy { ignore_index: -1, classes: Some(2) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        rows(inputs[0], inputs[1], self.classes)?;
        let row = inputs[1].with_dtype(statistics_dtype(inputs[0].dtype));
        Ok(vec![row.clone(), row])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        5 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        // The results are losses: always f32.
        own(
            Class::F32Inside,
            "PyTorch casts its logits to f32; here the kernel does, as it reads them",
        )
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// `(dlosses[..], logits[.., V], labels[..], lse[..])` → `dlogits`, in the dtype of the logits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropyGrad {
    /// The label that is ignored.
    pub ignore_index: i64,
    /// Number of classes, if rows have further columns (padding), whose gradient is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
}

impl CrossEntropyGrad {
    /// Every column is a class.
    pub fn ignoring(ignore_index: i64) -> Self {
        CrossEntropyGrad { ignore_index, classes: None }
    }

    /// The number of classes of logits of this shape.
    pub fn classes_of(&self, logits: &Shape) -> usize {
        self.classes.or(logits.0.last().copied()).unwrap_or(0)
    }
}

impl Operation for CrossEntropyGrad {
    fn examples() -> Vec<Self> {
        vec![CrossEntropyGrad::ignoring(0), CrossEntropyGrad { ignore_index: 0, classes: Some(2) }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 4)?;
        rows(inputs[1], inputs[2], self.classes)?;
        same_shape(inputs[0], inputs[2], "dlosses and labels")?;
        same_shape(inputs[3], inputs[2], "lse and labels")?;
        Ok(vec![inputs[1].clone()])
    }

    fn flops(&self, inputs: &[&TensorType], _: &[&TensorType]) -> u64 {
        5 * elements(inputs)
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

fn rows(logits: &TensorType, labels: &TensorType, classes: Option<usize>) -> Result<(), OpError> {
    float(logits, "logits")?;
    index_type(labels, "labels")?;
    let Some((columns, lead)) = logits.shape.0.split_last() else {
        return Err(OpError::new("logits need a class axis"));
    };
    if classes.is_some_and(|classes| classes == 0 || classes > *columns) {
        return Err(OpError::new(format!("`classes` must be from 1 to the {columns} columns")));
    }
    shape_is(labels, lead, "labels")
}
