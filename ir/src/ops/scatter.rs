//! Writes by index: the inverses of the reads of [`super::index`].
//!
//! Updates are applied in ascending order, so the last of several updates of one element wins.
//! Source: ONNX ScatterElements-18, ScatterND-18.

use super::unary::functions;
use super::{
    Inferred, Linear, OpError, Operation, Precision, arity, axis_of, index_type, same_shape,
};
use crate::{DType, TensorType};
use serde::{Deserialize, Serialize};

functions! {
    /// How an update combines with the existing element.
    ScatterFn {
        /// It takes its place.
        Replace = "replace",
        /// Their sum.
        Add = "add",
        /// Multiplication.
        Mul = "mul",
        /// The larger; NaN if either is.
        Max = "max",
        /// The smaller; NaN if either is.
        Min = "min",
    }
}

impl ScatterFn {
    /// Data and updates, which are put in place or added.
    fn linear(self) -> Linear {
        match self {
            ScatterFn::Replace | ScatterFn::Add => Linear::In(&[0, 2]),
            ScatterFn::Mul | ScatterFn::Max | ScatterFn::Min => Linear::No,
        }
    }
}

/// `(data, indices, updates)` → the data with each update at the place that its index names along one
/// axis; indices and updates have one shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScatterElements {
    /// The axis along which the indices point.
    pub axis: usize,
    /// How updates are combined.
    pub f: ScatterFn,
}

impl Operation for ScatterElements {
    fn examples() -> Vec<Self> {
        ScatterFn::ALL.iter().map(|f| ScatterElements { axis: 0, f: *f }).collect()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        let (data, ids) = (inputs[0], inputs[1]);
        axis_of(data, self.axis)?;
        index_type(ids, "indices")?;
        same_shape(ids, inputs[2], "indices and updates")?;
        combinable(self.f, data, inputs[2])?;
        let (data_dims, ids_dims) = (data.shape.dims(), ids.shape.dims());
        let fits = data_dims.len() == ids_dims.len()
            && (0..data_dims.len()).all(|i| i == self.axis || ids_dims[i] <= data_dims[i]);
        if !fits {
            return Err(OpError::new(format!(
                "indices {} do not fit data {}",
                ids.shape, data.shape
            )));
        }
        Ok(vec![data.clone()])
    }

    fn precision(&self) -> Precision {
        // As `scatter_add`.
        Precision::PROMOTE
    }

    fn linear(&self) -> Linear {
        self.f.linear()
    }
}

/// `(data, indices[.., K], updates)` → the data with each update, a slice, at the place that its tuple
/// of indices names in the first K axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScatterNd {
    /// Leading axes that data and indices share.
    #[serde(default)]
    pub batch_dims: usize,
    /// How updates are combined.
    pub f: ScatterFn,
}

impl Operation for ScatterNd {
    fn examples() -> Vec<Self> {
        ScatterFn::ALL.iter().map(|f| ScatterNd { batch_dims: 1, f: *f }).collect()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 3)?;
        let (data, ids, updates) = (inputs[0], inputs[1], inputs[2]);
        combinable(self.f, data, updates)?;
        let slices = super::GatherNd { batch_dims: self.batch_dims }.infer(&[data, ids])?;
        if slices[0].shape != updates.shape {
            return Err(OpError::new(format!(
                "updates must have shape {}, not {}",
                slices[0].shape, updates.shape
            )));
        }
        Ok(vec![data.clone()])
    }

    fn precision(&self) -> Precision {
        // As `index_put`.
        Precision::PROMOTE
    }

    fn linear(&self) -> Linear {
        self.f.linear()
    }
}

fn combinable(f: ScatterFn, data: &TensorType, updates: &TensorType) -> Result<(), OpError> {
    if data.dtype != updates.dtype {
        let (a, b) = (data.dtype, updates.dtype);
        return Err(OpError::new(format!("data and updates of different dtypes {a} and {b}")));
    }
    if data.dtype == DType::Bool && f != ScatterFn::Replace {
        return Err(OpError::new("arithmetic on bool"));
    }
    Ok(())
}
