//! cuDNN candidates for batch normalization and its gradient.
//!
//! The library stores the reciprocal of the standard deviation where Frit stores the variance.

use crate::assembler::Assembler;
use crate::batch_norm::Norm;
use frit_ir::DType;
use frit_ir::plan::{
    Argument, Launch, Operation, OperationKind, OperationLaunch, Pointer, Strided,
};

/// Bytes of channels at one position per vector access of the engines.
const AT_ONCE: usize = 16;

impl Norm<'_> {
    /// Adds a cuDNN candidate beside the launches from `begin` on, if cuDNN may have an engine.
    pub(super) fn candidate(
        &self,
        a: &mut Assembler<'_>,
        reads: &[Pointer],
        writes: &[Pointer],
        begin: usize,
    ) -> Option<()> {
        let ([x, scale, bias], [y, mean, var]) = (reads, writes) else { return None };
        if !self.is_known() {
            return Some(());
        }
        let rstd = self.rstd(a);
        let (image, vector) = self.tensors();
        let operation = Operation {
            kind: OperationKind::BatchNorm { eps_bits: (self.eps as f32).to_bits() },
            tensors: [&image, &vector, &vector, &image, &vector, &vector].map(Clone::clone).into(),
            any_order: false,
        };
        let at = vec![*x, *scale, *bias, *y, *mean, rstd];
        let (before, after) = (vec![], vec![self.convert("batch_norm_var", *var, rstd)?]);
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
        Some(())
    }

    /// The same for the gradient.
    pub(super) fn gradient_candidate(
        &self,
        a: &mut Assembler<'_>,
        reads: &[Pointer],
        writes: &[Pointer],
        begin: usize,
    ) -> Option<()> {
        let ([dy, x, scale, mean, var], [dx, dscale, dbias]) = (reads, writes) else {
            return None;
        };
        if !self.is_known() {
            return Some(());
        }
        let rstd = self.rstd(a);
        let (image, vector) = self.tensors();
        let tensors = [&image, &image, &vector, &vector, &vector, &image, &vector, &vector];
        let operation = Operation {
            kind: OperationKind::BatchNormGrad,
            tensors: tensors.map(Clone::clone).into(),
            any_order: false,
        };
        let at = vec![*dy, *x, *scale, *mean, rstd, *dx, *dscale, *dbias];
        let (before, after) = (vec![self.convert("batch_norm_rstd", rstd, *var)?], vec![]);
        a.candidate_operation(begin, before, OperationLaunch { operation, at }, after);
        Some(())
    }

    /// Whether engines may support it.
    fn is_known(&self) -> bool {
        let element = self.x.dtype;
        (element.is_low_precision() || element == DType::F32)
            && self.statistics == DType::F32
            && (self.channels() * element.size()).is_multiple_of(AT_ONCE)
            && i32::try_from(self.x.shape.numel()).is_ok()
    }

    /// The images, each channel one row, and a vector of one element per channel.
    fn tensors(&self) -> (Strided, Strided) {
        let (batch, channels) = (self.x.shape.dims()[0], self.channels());
        let image = Strided::dense(self.x.dtype, &[batch, channels, 1, self.size()]);
        (image, Strided::dense(self.statistics, &[1, channels, 1, 1]))
    }

    /// Allocates 1/√(var + eps).
    fn rstd(&self, a: &mut Assembler<'_>) -> Pointer {
        a.scratch(self.channels() * self.statistics.size())
    }

    /// Converts the variance to 1/√(var + eps), or back.
    fn convert(&self, entry: &'static str, to: Pointer, from: Pointer) -> Option<Launch> {
        let kernel = self.kernel(entry)?.threads(self.channels());
        let mut kernel = kernel.pointer(to).pointer(from).i64(self.channels());
        kernel.arguments.push(Argument::F64(self.eps));
        Some(kernel.launch())
    }
}
