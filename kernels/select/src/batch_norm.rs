//! Selection for batch normalization and its gradient.

mod cudnn;
mod last;
mod region;

use crate::assembler::Assembler;
use crate::routine::{Access, Call, elem};
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::plan::{Argument, Pointer};
use frit_ir::{DType, Graph, Node, Op, TensorType, ValueId};
use frit_kernels::routine::Routine;
use frit_kernels::routine::batch_norm::BatchNorm;
use region::Region;

/// Threads per block, as in `batch_norm.cu`.
const BLOCK: usize = 512;
/// Minimum vectors per thread, where several blocks share a channel.
const PACKS: usize = 4;
/// Blocks that occupy the GPU; at most `MOST_PARTS` of them share a channel.
const BUSY: usize = 1024;
const MOST_PARTS: usize = 64;
/// Two f64.
const PART_BYTES: usize = 16;

/// A batch normalization of images.
pub(super) struct Norm<'a> {
    pub(super) x: &'a TensorType,
    /// The type of scale, bias and statistics.
    pub(super) statistics: DType,
    pub(super) eps: f64,
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let norm = Norm::of(a, node)?;
    let writes: Vec<_> = node.outputs.iter().map(|v| a.write(*v)).collect();
    let reads: Vec<_> = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    let begin = a.launches();
    match &node.op {
        Op::BatchNorm(_) => {
            let entries = ["batch_norm_parts", "batch_norm"];
            norm.launches(a, entries, &reads[..1], &reads, &writes)?;
            norm.candidate(a, &reads, &writes, begin)
        }
        _ => {
            let entries = ["batch_norm_grad_parts", "batch_norm_grad"];
            let summed = [&reads[..2], &reads[3..]].concat();
            norm.launches(a, entries, &summed, &reads, &writes)?;
            norm.gradient_candidate(a, &reads, &writes, begin)
        }
    }
}

/// The launches of a body that is a batch normalization with what is around it. There is no candidate of cuDNN, which
/// would have what is between them in memory.
pub(super) fn cuda_region(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf()).collect();
    let region = Region::of(body, &nodes)?;
    let norm = Norm::of(a, region.norm)?;
    if norm.count() * norm.channels() == 0 {
        return None;
    }
    let writes: Vec<_> = region.writes.iter().map(|v| a.write(*v)).collect();
    let reads: Vec<_> = region.reads.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    match (region.channels_last, &region.norm.op) {
        (true, _) => last::cuda(a, &norm, &region, &reads, &writes),
        (false, Op::BatchNorm(_)) => norm.with_relu(a, &reads, &writes),
        (false, _) => norm.gradient_with_relu(a, &reads, &writes),
    }
}

impl<'a> Norm<'a> {
    /// That of a node, if the kernels support it.
    fn of(a: &Assembler<'a>, node: &Node) -> Option<Norm<'a>> {
        let (eps, x, vectors) = match &node.op {
            Op::BatchNorm(op) => (op.eps, 0, &node.inputs[1..]),
            Op::BatchNormGrad(op) => (op.eps, 1, &node.inputs[2..]),
            _ => return None,
        };
        let norm = Norm { x: a.ty(node.inputs[x]), statistics: a.ty(vectors[0]).dtype, eps };
        // Scale, bias, statistics and their gradients share one type.
        let mut all = vectors.iter().chain(&node.outputs[1..]);
        let fits = all.all(|v| a.ty(*v).dtype == norm.statistics);
        (fits && u32::try_from(norm.count()).is_ok()).then_some(norm)
    }

    pub(super) fn channels(&self) -> usize {
        self.x.shape.dims()[1]
    }

    /// Elements of a channel in one image.
    pub(super) fn size(&self) -> usize {
        self.x.shape.dims()[2..].iter().product()
    }

    /// Elements of a channel.
    fn count(&self) -> usize {
        self.x.shape.dims()[0] * self.size()
    }

    /// Elements per vector access.
    fn width(&self) -> usize {
        let most = 16 / self.x.dtype.size();
        (0..).map(|i| most >> i).find(|w| self.size().is_multiple_of(*w)).unwrap_or(1)
    }

    /// A kernel of `batch_norm.cu`.
    pub(super) fn kernel(&self, entry: &'static str) -> Option<SourceKernel> {
        let kernel = SourceKernel::new("batch_norm", entry)
            .define("T", c_type(self.x.dtype)?)
            .define("S", c_type(self.statistics)?)
            .define("WIDTH", self.width());
        Some(kernel)
    }

    /// Launches the partial sums of `summed` over each channel, where several blocks share one; then the results.
    fn launches(
        &self,
        a: &mut Assembler<'_>,
        [of_parts, of_all]: [&'static str; 2],
        summed: &[Pointer],
        reads: &[Pointer],
        writes: &[Pointer],
    ) -> Option<()> {
        let parts = self.parts();
        let sums = self.partial_sums(a, if parts > 1 { parts } else { 0 });
        if parts > 1 {
            let kernel = self.kernel(of_parts)?.pointer(sums);
            a.run(self.finish(kernel.pointers(summed.iter().copied()), parts));
        }
        let kernel = self.kernel(of_all)?.pointers(writes.iter().chain(reads).copied());
        a.run(self.finish(kernel.pointer(sums), parts));
        Some(())
    }

    /// Launches the normalization with a ReLU, and with a sum if another image is read.
    fn with_relu(
        &self,
        a: &mut Assembler<'_>,
        reads: &[Pointer],
        writes: &[Pointer],
    ) -> Option<()> {
        let entry = if reads.len() > 3 { "batch_norm_sum_relu" } else { "batch_norm_relu" };
        self.launches(a, ["batch_norm_parts", entry], &reads[..1], reads, writes)
    }

    /// Launches the gradient of what passes a ReLU.
    fn gradient_with_relu(
        &self,
        a: &mut Assembler<'_>,
        reads: &[Pointer],
        writes: &[Pointer],
    ) -> Option<()> {
        let [dy, x, scale, mean, var, gate @ ..] = reads else { return None };
        let entry = match gate.len() {
            1 => "batch_norm_relu_grad_parts",
            _ => "batch_norm_sum_relu_grad_parts",
        };
        // What passes the ReLU is in memory between the two, and in that of the result if it is none itself.
        let [dx, dscale, dbias, ref passed @ ..] = *writes else { return None };
        let passed = passed.first().copied().unwrap_or(dx);
        let parts = self.parts();
        let sums = self.partial_sums(a, parts);
        let first = self.kernel(entry)?.pointers([sums, passed, *dy, *x, *mean, *var]);
        a.run(self.finish(first.pointers(gate.iter().copied()), parts));
        let last = self.kernel("batch_norm_relu_grad")?.pointers([dx, dscale, dbias]);
        let last = last.pointers([passed, *x, *scale, *mean, *var, sums]);
        a.run(self.finish(last, parts));
        Some(())
    }

    /// Blocks that share a channel.
    fn parts(&self) -> usize {
        let share = BLOCK * PACKS * self.width();
        let parts = self.count().div_ceil(share).min(BUSY.div_ceil(self.channels()));
        parts.clamp(1, MOST_PARTS)
    }

    /// Allocates the partial sums of all channels.
    fn partial_sums(&self, a: &mut Assembler<'_>, parts: usize) -> Pointer {
        a.scratch(self.channels() * parts * PART_BYTES)
    }

    /// Adds the last arguments of a kernel and its blocks.
    fn finish(&self, kernel: SourceKernel, parts: usize) -> SourceKernel {
        let kernel = kernel.i64(self.x.shape.dims()[0]).i64(self.channels()).i64(self.size());
        let mut kernel = kernel.blocks(self.channels());
        kernel.arguments.push(Argument::F64(self.eps));
        kernel.grid[1] = parts as u32;
        kernel.block = BLOCK as u32;
        kernel
    }
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    let norm = |eps: f64, x: &TensorType, vectors: &[&TensorType]| {
        let dims = x.shape.dims();
        let (elem, size) = (elem(x.dtype)?, dims[2..].iter().product());
        let known = vectors.iter().all(|ty| ty.dtype == DType::F32);
        let (batch, channels) = (dims[0], dims[1]);
        known.then_some(BatchNorm { elem, batch, channels, size, eps, relu: false })
    };
    match op {
        Op::BatchNorm(op) => norm(op.eps, ins[0], &ins[1..]).map(Routine::BatchNorm),
        Op::BatchNormGrad(op) => norm(op.eps, ins[1], &ins[2..]).map(Routine::BatchNormGrad),
        _ => None,
    }
}

/// The routine of a body that is a batch normalization with a ReLU and a sum.
pub(super) fn cpu_with_relu(body: &Graph, nodes: &[&Node]) -> Option<Call> {
    let region = Region::of(body, nodes).filter(|region| !region.channels_last)?;
    let Region { norm, reads, writes, .. } = region;
    let types = |values: &[ValueId]| values.iter().map(|v| body.ty(*v)).collect::<Vec<_>>();
    let mut routine = cpu(&norm.op, &types(&norm.inputs), &types(&norm.outputs))?;
    if let Routine::BatchNorm(norm) | Routine::BatchNormGrad(norm) = &mut routine {
        norm.relu = true;
    }
    Some(Call { routine, reads: Access::whole(&reads), writes: Access::whole(&writes) })
}
