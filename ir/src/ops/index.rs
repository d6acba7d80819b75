//! Reads by index, and running sums.
//!
//! Indices are i64 or i32; a negative index counts from the end, as in ONNX.

use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, arity_in, axis_of, float, float_result,
    index_type,
};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `embedding(table[V, C], ids[..])` → `[.., C]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Embedding {
    /// The row that gets no gradient from here, as `padding_idx` of `torch.nn.Embedding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding_idx: Option<usize>,
}

impl Operation for Embedding {
    fn examples() -> Vec<Self> {
        vec![Embedding { padding_idx: None }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        let (table, ids) = (inputs[0], inputs[1]);
        index_type(ids, "ids")?;
        let [rows, width] = table.shape.dims() else {
            return Err(OpError::new(format!("the table must have 2 axes, not {}", table.shape)));
        };
        if let Some(row) = self.padding_idx.filter(|row| row >= rows) {
            return Err(OpError::new(format!("padding_idx {row} of a table of {rows} rows")));
        }
        let mut dims = ids.shape.0.clone();
        dims.push(*width);
        Ok(vec![table.with_shape(dims)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// The gradient of `embedding` for its table: `(dy[.., C], ids[..])` → `[rows, C]`, rows that occur
/// several times summed in f32. With a third operand, of the result's type, the sum of that and the gradient.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingGrad {
    /// Rows of the table.
    pub rows: usize,
    /// Element type of the result.
    pub dtype: DType,
}

impl Operation for EmbeddingGrad {
    fn examples() -> Vec<Self> {
        vec![EmbeddingGrad { rows: 7, dtype: DType::F32 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity_in(inputs, 2, 3)?;
        let (dy, ids) = (inputs[0], inputs[1]);
        float(dy, "dy")?;
        index_type(ids, "ids")?;
        let rank = ids.shape.rank();
        if dy.shape.rank() != rank + 1 || dy.shape.0[..rank] != ids.shape.0 {
            return Err(OpError::new(format!(
                "dy of shape {} does not belong to ids of shape {}",
                dy.shape, ids.shape
            )));
        }
        let dtype = float_result(Some(self.dtype), dy.dtype)?;
        let result = TensorType::new(dtype, [self.rows, dy.shape.0[rank]]);
        if let Some(ty) = inputs.get(2).filter(|ty| ***ty != result) {
            return Err(OpError::new(format!("{ty} cannot be added to a gradient {result}")));
        }
        Ok(vec![result])
    }

    fn precision(&self) -> Precision {
        Precision::AFTER
    }

    fn linear(&self) -> Linear {
        Linear::In(&[0, 2])
    }
}

/// ONNX Gather: `(data, indices)`; axis `axis` of the data is replaced by the axes of the indices.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gather {
    /// The axis.
    pub axis: usize,
}

impl Operation for Gather {
    fn examples() -> Vec<Self> {
        vec![Gather { axis: 0 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        axis_of(inputs[0], self.axis)?;
        index_type(inputs[1], "indices")?;
        let data = inputs[0].shape.dims();
        let mut dims = data[..self.axis].to_vec();
        dims.extend(inputs[1].shape.dims());
        dims.extend(&data[self.axis + 1..]);
        Ok(vec![inputs[0].with_shape(dims)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// ONNX GatherElements: `(data, indices)` → the shape of the indices.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatherElements {
    /// The axis along which the indices point.
    pub axis: usize,
}

impl Operation for GatherElements {
    fn examples() -> Vec<Self> {
        vec![GatherElements { axis: 0 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        axis_of(inputs[0], self.axis)?;
        index_type(inputs[1], "indices")?;
        let (data, ids) = (&inputs[0].shape, &inputs[1].shape);
        let fits = data.rank() == ids.rank()
            && (0..data.rank()).all(|i| i == self.axis || ids.0[i] <= data.0[i]);
        if !fits {
            return Err(OpError::new(format!("indices {ids} do not fit data {data}")));
        }
        Ok(vec![inputs[0].with_shape(ids.clone())])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// ONNX GatherND: `(data, indices[.., K])`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatherNd {
    /// Leading axes that data and indices share.
    pub batch_dims: usize,
}

impl Operation for GatherNd {
    fn examples() -> Vec<Self> {
        vec![GatherNd { batch_dims: 1 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 2)?;
        index_type(inputs[1], "indices")?;
        let (data, ids) = (inputs[0].shape.dims(), inputs[1].shape.dims());
        let b = self.batch_dims;
        let (depth, outer) = ids.split_last().ok_or_else(|| OpError::new("indices of rank 0"))?;
        if b > outer.len() || b > data.len() || *depth > data.len() - b || data[..b] != ids[..b] {
            return Err(OpError::new(format!(
                "indices {} do not fit data {}",
                inputs[1].shape, inputs[0].shape
            )));
        }
        let mut dims = outer.to_vec();
        dims.extend(&data[b + depth..]);
        Ok(vec![inputs[0].with_shape(dims)])
    }

    fn flops(&self, _: &[&TensorType], _: &[&TensorType]) -> u64 {
        0
    }

    fn precision(&self) -> Precision {
        Precision::LAYOUT
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}

/// ONNX CumSum along an axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CumSum {
    /// The axis.
    pub axis: usize,
    /// Whether the sum excludes the element itself.
    pub exclusive: bool,
    /// Whether sums run from the end.
    pub reverse: bool,
}

impl Operation for CumSum {
    fn examples() -> Vec<Self> {
        vec![CumSum { axis: 0, exclusive: true, reverse: false }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        axis_of(inputs[0], self.axis)?;
        if inputs[0].dtype == DType::Bool {
            return Err(OpError::new("cum_sum of bool"));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn precision(&self) -> Precision {
        Precision::F32
    }

    fn linear(&self) -> Linear {
        Linear::FIRST
    }
}
