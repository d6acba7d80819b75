//! Gradient rules of layout operations. They keep the dtype of the cotangent.

use super::super::builder::{Builder, Gradients, Rule};
use super::Differentiate;
use frit_ir::ops::{Concat, Expand, Op, Pad, Reshape, Slice, Split, Transpose};
use frit_ir::{Node, ValueId};

impl Differentiate for Reshape {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let shape = b.ty(x).shape;
        Ok(vec![Some(b.reshape(dy, shape)?)])
    }
}

impl Differentiate for Transpose {
    fn vjp_first(&self, b: &mut Builder<'_>, _: &Node, dy: ValueId) -> Gradients {
        Ok(vec![Some(b.emit(Op::Transpose(self.inverse()), &[dy])?)])
    }
}

impl Differentiate for Expand {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        Ok(vec![Some(b.sum_to(dy, x)?)])
    }
}

/// The elements go back to where they were read, between zeros.
impl Differentiate for Slice {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let ty = b.ty(x).with_dtype(b.ty(dy).dtype);
        let dims = ty.shape.dims().to_vec();
        if self.size.contains(&0) {
            return Ok(vec![Some(b.zeros(ty)?)]);
        }
        let mut dx = dy;
        if self.step.iter().zip(&self.size).any(|(&step, &size)| step < 0 && size > 1) {
            let reversed = |axis: usize| self.step[axis] < 0;
            let flip = Slice {
                start: (0..dims.len())
                    .map(|i| if reversed(i) { self.size[i] - 1 } else { 0 })
                    .collect(),
                size: self.size.clone(),
                step: (0..dims.len()).map(|i| if reversed(i) { -1 } else { 1 }).collect(),
            };
            dx = b.emit(Op::Slice(flip), &[dx])?;
        }
        let (mut low, mut high) = (Vec::new(), Vec::new());
        for (axis, &dim) in dims.iter().enumerate() {
            let (size, step) = (self.size[axis], self.step[axis].unsigned_abs());
            dx = spread(b, dx, axis, step)?;
            let reach = (size - 1) * step;
            let first =
                if self.step[axis] < 0 { self.start[axis] - reach } else { self.start[axis] };
            low.push(first);
            high.push(dim - first - reach - 1);
        }
        if low.iter().chain(&high).any(|&n| n > 0) {
            dx = b.emit(Op::Pad(Pad { low, high, value: 0.0 }), &[dx])?;
        }
        Ok(vec![Some(dx)])
    }
}

/// Puts `step − 1` zeros between neighbors along an axis.
fn spread(b: &mut Builder<'_>, x: ValueId, axis: usize, step: usize) -> Rule<ValueId> {
    let dims = b.ty(x).shape.0;
    let size = dims[axis];
    if step == 1 || size == 1 {
        return Ok(x);
    }
    let mut split = dims.clone();
    split.insert(axis + 1, 1);
    let apart = b.reshape(x, split.clone())?;
    let mut high = vec![0; split.len()];
    high[axis + 1] = step - 1;
    let padded = b.emit(Op::Pad(Pad { low: vec![0; split.len()], high, value: 0.0 }), &[apart])?;
    let mut merged = dims;
    merged[axis] = size * step;
    let joined = b.reshape(padded, merged.clone())?;
    merged[axis] = (size - 1) * step + 1;
    b.emit(Op::Slice(box_at(&vec![0; merged.len()], merged)), &[joined])
}

/// A dense box.
fn box_at(start: &[usize], size: Vec<usize>) -> Slice {
    Slice { start: start.to_vec(), step: vec![1; size.len()], size }
}

impl Differentiate for Concat {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = &node.inputs;
        let sizes: Vec<usize> = x.iter().map(|v| b.ty(*v).shape.0[self.axis]).collect();
        let wanted: Vec<usize> = (0..x.len()).filter(|&i| b.needs(i)).collect();
        let mut gradients = vec![None; x.len()];
        if let [only] = wanted[..] {
            let shape = b.ty(x[only]).shape.0;
            let mut start = vec![0; shape.len()];
            start[self.axis] = sizes[..only].iter().sum();
            gradients[only] = Some(b.emit(Op::Slice(box_at(&start, shape)), &[dy])?);
        } else {
            let parts = b.emit_all(Op::Split(Split { axis: self.axis, sizes }), &[dy])?;
            for i in wanted {
                gradients[i] = Some(parts[i]);
            }
        }
        for (i, gradient) in gradients.iter_mut().enumerate() {
            if let Some(g) = gradient {
                let dtype = b.grad_dtype(x[i]);
                *g = b.cast(*g, dtype)?;
            }
        }
        Ok(gradients)
    }
}

/// The parts one after the other; those that the loss does not depend on are zeros.
impl Differentiate for Split {
    fn vjp(&self, b: &mut Builder<'_>, node: &Node, dys: &[Option<ValueId>]) -> Gradients {
        let widest = dys
            .iter()
            .flatten()
            .map(|dy| b.ty(*dy).dtype)
            .max_by_key(|d| d.mantissa_bits())
            .unwrap_or(b.ty(node.inputs[0]).dtype);
        let mut parts = Vec::with_capacity(dys.len());
        for (dy, &y) in dys.iter().zip(&node.outputs) {
            parts.push(match dy {
                Some(dy) => b.cast(*dy, widest)?,
                None => {
                    let ty = b.ty(y).with_dtype(widest);
                    b.zeros(ty)?
                }
            });
        }
        Ok(vec![Some(b.emit(Op::Concat(Concat { axis: self.axis }), &parts)?)])
    }
}

impl Differentiate for Pad {
    fn vjp_first(&self, b: &mut Builder<'_>, node: &Node, dy: ValueId) -> Gradients {
        let x = node.inputs[0];
        let size = b.ty(x).shape.0;
        Ok(vec![Some(b.emit(Op::Slice(box_at(&self.low, size)), &[dy])?)])
    }
}
