//! Cross-entropy of class indices.
//!
//! Per row, so that sum, count and mean stay visible in the graph; computed in f32 (f64 for f64) from
//! logits of any float dtype. Source: ONNX SoftmaxCrossEntropyLoss-13, `torch.nn.functional.cross_entropy`.

use super::precision::{Class, own};
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, elements, float, index_type,
    same_shape, shape_is, statistics_dtype,
};
use crate::TensorType;
use serde::{Deserialize, Serialize};

/// `(logits[.., V], labels[..])` → `(losses[..], lse[..])`; a row whose label is `ignore_index` has
/// loss 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropy {
    /// The label that leaves a row out.
    pub ignore_index: i64,
}

impl Operation for CrossEntropy {
    fn examples() -> Vec<Self> {
        vec![CrossEntropy { ignore_index: -100 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        rows(inputs[0], inputs[1])?;
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
    /// The label that leaves a row out.
    pub ignore_index: i64,
}

impl Operation for CrossEntropyGrad {
    fn examples() -> Vec<Self> {
        vec![CrossEntropyGrad { ignore_index: 0 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 4)?;
        rows(inputs[1], inputs[2])?;
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

fn rows(logits: &TensorType, labels: &TensorType) -> Result<(), OpError> {
    float(logits, "logits")?;
    index_type(labels, "labels")?;
    let Some((_, lead)) = logits.shape.0.split_last() else {
        return Err(OpError::new("logits need a class axis"));
    };
    shape_is(labels, lead, "labels")
}
