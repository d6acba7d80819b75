//! The parts of a step of Adafactor.

use super::operand::Operand;
use frit_ir::ops::{Adafactor, AdafactorPart};
use frit_kernels::adafactor as library;
use frit_kernels::pool::Pool;

/// Runs a part of a step on dense operands of its types.
///
/// # Safety
/// Operands are valid, and results overlap no operand but the one they replace.
pub(super) unsafe fn run(op: &Adafactor, pool: &Pool, reads: &[Operand], writes: &[Operand]) {
    // SAFETY: by the contract of this function.
    unsafe {
        let floats = |i: usize| -> &[f32] {
            let operand = &reads[i];
            std::slice::from_raw_parts(operand.pointer.cast(), operand.ty.shape.numel())
        };
        let scalar = |i: usize| f64::from(reads[i].pointer.cast::<f32>().read());
        let result = |i: usize| -> &mut [f32] {
            let operand = &writes[i];
            std::slice::from_raw_parts_mut(operand.pointer.cast(), operand.ty.shape.numel())
        };
        // Usually the same place.
        let keep = |from: usize, to: usize| {
            let (from, to) = (&reads[from], &writes[to]);
            if from.pointer != to.pointer {
                std::ptr::copy(from.pointer, to.pointer, from.ty.bytes());
            }
        };
        let part = |factor: usize, clip_value: usize| library::Part {
            begin: reads[0].pointer.cast::<i64>().read(),
            grads: floats(1),
            scale: library::Scale { factor: scalar(factor), clip_value: scalar(clip_value) },
        };
        let (matrices, rows, cols) = op.matrices();
        let kernel = library::Adafactor { matrices, rows, cols, share: op.share };
        let empty = op.shape.numel() == 0;
        match op.part {
            AdafactorPart::Sums if empty => result(0).fill(0.0),
            AdafactorPart::Sums => kernel.sums(pool, part(4, 3), floats(2), result(0)),
            AdafactorPart::Moments => {
                keep(3, 0);
                let skipped = empty || scalar(8) != 0.0;
                result(1)[0] = if skipped {
                    0.0
                } else {
                    let weight = (scalar(6) + 1.0).powf(-scalar(4));
                    kernel.moments(pool, part(7, 5), floats(2), result(0), weight)
                };
            }
            AdafactorPart::Step => {
                keep(2, 0);
                if !empty && scalar(13) == 0.0 {
                    let settings = library::Settings {
                        of_param: scalar(4),
                        of_update: scalar(5),
                        lr: scalar(6),
                        eps: scalar(7),
                        threshold: scalar(8),
                        decay: scalar(9),
                        step: scalar(11),
                    };
                    kernel.step(pool, part(12, 10), result(0), floats(3), &settings);
                }
            }
        }
    }
}
