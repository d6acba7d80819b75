//! Gradient rules of convolution, pooling and batch normalization, by their gradient operations.

use super::super::builder::{Builder, Gradients};
use super::Differentiate;
use frit_ir::ops::{
    BatchNorm, BatchNormGrad, Conv, ConvGradInput, ConvGradWeight, MaxPool, MaxPoolGrad, Op,
    SumPool, SumPoolGrad,
};
use frit_ir::{Node, ValueId};

impl Differentiate for Conv {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        // Gradients run in the dtype of the operands.
        let ty = b.ty(x[0]);
        let dy = b.cast(dy, ty.dtype)?;
        let (window, groups) = (self.window.clone(), self.groups);
        let mut gradients = vec![None; 2];
        if b.needs(0) {
            let size = ty.shape.dims()[2..].to_vec();
            let grad = ConvGradInput { window: window.clone(), groups, size, out: None };
            gradients[0] = Some(b.emit(Op::ConvGradInput(grad), &[dy, x[1]])?);
        }
        if b.needs(1) {
            let taps = b.ty(x[1]).shape.dims()[2..].to_vec();
            let out = Some(b.grad_dtype(x[1])).filter(|d| *d != ty.dtype);
            let grad = ConvGradWeight { window, groups, taps, out };
            gradients[1] = Some(b.emit(Op::ConvGradWeight(grad), &[dy, x[0]])?);
        }
        Ok(gradients)
    }
}

/// The transposed convolution is the gradient of a convolution, so a convolution is its gradient.
impl Differentiate for ConvGradInput {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let dtype = b.ty(x[0]).dtype;
        let dy = b.cast(dy, dtype)?;
        let (window, groups) = (self.window.clone(), self.groups);
        let mut gradients = vec![None; 2];
        if b.needs(0) {
            let grad = Conv { window: window.clone(), groups, out: None };
            gradients[0] = Some(b.emit(Op::Conv(grad), &[dy, x[1]])?);
        }
        if b.needs(1) {
            let taps = b.ty(x[1]).shape.dims()[2..].to_vec();
            let out = Some(b.grad_dtype(x[1])).filter(|d| *d != dtype);
            let grad = ConvGradWeight { window, groups, taps, out };
            gradients[1] = Some(b.emit(Op::ConvGradWeight(grad), &[x[0], dy])?);
        }
        Ok(gradients)
    }
}

impl Differentiate for MaxPool {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let grad = MaxPoolGrad { window: self.window.clone(), taps: self.taps.clone() };
        Ok(vec![Some(b.emit(Op::MaxPoolGrad(grad), &[dy, x])?)])
    }
}

impl Differentiate for SumPool {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let size = b.ty(x).shape.dims()[2..].to_vec();
        let grad = SumPoolGrad { window: self.window.clone(), taps: self.taps.clone(), size };
        Ok(vec![Some(b.emit(Op::SumPoolGrad(grad), &[dy])?)])
    }
}

impl Differentiate for BatchNorm {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let y = &node.outputs;
        let dtype = b.ty(x[0]).dtype;
        let dy = b.cast(dy, dtype)?;
        let grad = Op::BatchNormGrad(BatchNormGrad { eps: self.eps });
        let found = b.emit_all(grad, &[dy, x[0], x[1], y[1], y[2]])?;
        let mut gradients = vec![None; 3];
        for i in 0..3 {
            if b.needs(i) {
                let dtype = b.grad_dtype(x[i]);
                gradients[i] = Some(b.cast(found[i], dtype)?);
            }
        }
        Ok(gradients)
    }
}
