//! cuDNN candidates for pooling.
//!
//! The gradient of max pooling has none: cuDNN does not specify which of equal elements receives it, its engine for dense channels is
//! not documented as deterministic, and engines that read indices require channels last.

use crate::assembler::Assembler;
use frit_ir::ops::Window;
use frit_ir::plan::{Operation, OperationKind, OperationLaunch, Pointer, PoolFunction, Strided};
use frit_ir::{DType, TensorType};

/// A window that slides over images.
pub(super) struct Pool<'a> {
    pub(super) window: &'a Window,
    pub(super) taps: &'a [usize],
    pub(super) image: &'a TensorType,
}

impl Pool<'_> {
    /// Adds a cuDNN candidate beside the launches from `begin` on, if cuDNN may have an engine.
    pub(super) fn candidate(
        &self,
        a: &mut Assembler<'_>,
        function: PoolFunction,
        [images, results]: [Pointer; 2],
        begin: usize,
    ) {
        let Some(operation) = self.operation(function) else { return };
        let at = [images, results].repeat(operation.tensors.len() / 2);
        let (before, after) = (vec![], vec![]);
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
    }

    /// The operation, if engines may support it. One spatial axis becomes a plane of one row.
    fn operation(&self, function: PoolFunction) -> Option<Operation> {
        let Pool { window, taps, image } = *self;
        let (outer, size) = image.shape.dims().split_at(2);
        let positions = window.positions(size, taps).ok()?;
        let low_precision = image.dtype.is_low_precision();
        let known = (low_precision || matches!(image.dtype, DType::F32 | DType::F64))
            && (1..=3).contains(&size.len())
            && window.dilations.iter().all(|d| *d == 1)
            && i32::try_from(image.shape.numel()).is_ok()
            // How asymmetric padding is counted is not documented; it makes no difference to maxima.
            && (function == PoolFunction::Max || window.low == window.high);
        if !known {
            return None;
        }
        let axes = |unit: usize, list: &[usize]| match list {
            [one] => vec![unit, *one],
            more => more.to_vec(),
        };
        let tensor =
            |size: &[usize]| Strided::dense(image.dtype, &[outer, &axes(1, size)].concat());
        let kind = OperationKind::Pool {
            function,
            taps: axes(1, taps),
            strides: axes(1, &window.strides),
            low: axes(0, &window.low),
            high: axes(0, &window.high),
        };
        let pair = [tensor(size), tensor(&positions)];
        let n_tensors = if function == PoolFunction::SumGrad { 4 } else { 2 };
        let tensors = pair.iter().cycle().take(n_tensors).cloned().collect();
        Some(Operation { kind, tensors, any_order: false })
    }
}
