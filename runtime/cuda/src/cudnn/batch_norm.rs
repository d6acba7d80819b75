//! Batch normalization and its gradient as nodes of a cuDNN graph.

use super::descriptor::{self as names, Attribute, Descriptor, Kind, Result};
use super::operations::Builder;
use frit_ir::DType;
use frit_ir::plan::Strided;

/// `cudnnBackendNormMode_t`.
const BATCH_NORM: i32 = 2;
/// `cudnnBackendNormFwdPhase_t`.
const TRAINING: i32 = 1;

impl Builder<'_> {
    /// # Errors
    /// Operations that the library does not support.
    pub(super) fn batch_norm(&mut self, eps: f32) -> Result {
        let mut node = Descriptor::new(self.api, Kind::NormForward)?;
        node.set(&names::NORM_MODE, &[BATCH_NORM])?;
        node.set(&names::NORM_PHASE, &[TRAINING])?;
        self.n_tensors += 1;
        self.values.push((self.n_tensors as i64, eps));
        let number = Strided::dense(DType::F32, &[1; 4]);
        let number = self.describe(&number, self.n_tensors, Some(&names::TENSOR_BY_VALUE))?;
        node.refer(&Attribute::new(2007, 15), &[&number])?;
        self.keep(number);
        // x, scale, bias, y, mean, rstd.
        self.finish_norm(node, &[2002, 2005, 2006, 2013, 2003, 2004])
    }

    /// # Errors
    /// Operations that the library does not support.
    pub(super) fn batch_norm_grad(&mut self) -> Result {
        let mut node = Descriptor::new(self.api, Kind::NormGrad)?;
        node.set(&names::NORM_GRAD_MODE, &[BATCH_NORM])?;
        // dy, x, scale, mean, rstd, dx, dscale, dbias.
        self.finish_norm(node, &[2104, 2101, 2105, 2102, 2103, 2109, 2107, 2108])
    }

    /// Adds a node and sets these attributes to the operation's tensors, in order.
    fn finish_norm(&mut self, mut node: Descriptor, attributes: &[u32]) -> Result {
        for (i, attribute) in attributes.iter().enumerate() {
            let tensor = self.tensor(i)?;
            node.refer(&Attribute::new(*attribute, 15), &[&self.parts[tensor]])?;
        }
        let node = node.finalize()?;
        let node = self.keep(node);
        self.nodes.push(node);
        Ok(())
    }
}
