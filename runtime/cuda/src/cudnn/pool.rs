//! Pooling as a node of a cuDNN graph: resampling by maximum, or by average times the number of window elements.

use super::descriptor::{self as names, Attribute, Descriptor, Kind, Result};
use super::operations::{Builder, data_type, signed};
use frit_ir::DType;
use frit_ir::plan::{OperationKind, PoolFunction};

/// `cudnnResampleMode_t`: averages count the border.
const AVERAGE: i32 = 2;
const MAXIMUM: i32 = 3;
/// `cudnnPaddingMode_t`.
const ZEROS: i32 = 0;
const NEGATIVE_INFINITIES: i32 = 1;
/// `cudnnNanPropagation_t`.
const PROPAGATE: i32 = 1;

impl Builder<'_> {
    /// # Errors
    /// Operations that the library does not support.
    pub(super) fn pool(&mut self) -> Result {
        let OperationKind::Pool { function, taps, strides, low, high } = &self.operation.kind
        else {
            unreachable!("invariant: pooling")
        };
        let wide = match self.operation.tensors[0].dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let (mode, border, scale) = match function {
            PoolFunction::Max => (MAXIMUM, NEGATIVE_INFINITIES, 1.0),
            _ => (AVERAGE, ZEROS, taps.iter().product::<usize>() as f64),
        };
        let mut window = Descriptor::new(self.api, Kind::Resample)?;
        window.set(&names::RESAMPLE_MODE, &[mode])?;
        window.set(&names::RESAMPLE_TYPE, &[data_type(wide)?])?;
        window.set(&names::RESAMPLE_NAN, &[PROPAGATE])?;
        window.set(&names::RESAMPLE_BORDER, &[border])?;
        window.set(&names::RESAMPLE_AXES, &[taps.len() as i64])?;
        window.set(&names::RESAMPLE_TAPS, &signed(taps))?;
        window.set(&names::RESAMPLE_STRIDES, &signed(strides))?;
        window.set(&names::RESAMPLE_LOW, &signed(low))?;
        window.set(&names::RESAMPLE_HIGH, &signed(high))?;
        let window = window.finalize()?;

        // Attributes of the window, of the factor, and of the tensors.
        let (kind, description, factor, tensors): (_, _, _, &[u32]) = match function {
            PoolFunction::SumGrad => (Kind::ResampleGrad, 1725, 1723, &[1720, 1721, 1726, 1727]),
            _ => (Kind::ResampleForward, 1716, 1713, &[1710, 1711]),
        };
        let mut node = Descriptor::new(self.api, kind)?;
        node.refer(&Attribute::new(description, 15), &[&window])?;
        node.set(&Attribute::<f64>::new(factor, 5), &[scale])?;
        for (i, attribute) in tensors.iter().enumerate() {
            let tensor = self.tensor(i)?;
            node.refer(&Attribute::new(*attribute, 15), &[&self.parts[tensor]])?;
        }
        let node = node.finalize()?;
        self.keep(window);
        let node = self.keep(node);
        self.nodes.push(node);
        Ok(())
    }
}
