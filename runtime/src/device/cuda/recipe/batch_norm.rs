//! Batch normalization and its gradient.

use super::assembler::Assembler;
use super::batch_norm_offer::Norm;
use super::kernel::c_type;
use super::{Argument, SourceKernel};
use frit_ir::{Node, Op};

/// Threads of a block, as in `batch_norm.cu`.
const BLOCK: u32 = 512;

pub(super) fn assemble(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (entry, eps, x, vectors) = match &node.op {
        Op::BatchNorm(op) => ("batch_norm", op.eps, 0, &node.inputs[1..]),
        Op::BatchNormGrad(op) => ("batch_norm_grad", op.eps, 1, &node.inputs[2..]),
        _ => return None,
    };
    let x = a.ty(node.inputs[x]);
    let statistics = a.ty(vectors[0]).dtype;
    // Scale, bias, statistics and their gradients share one type.
    let all = vectors.iter().chain(&node.outputs[1..]);
    if all.into_iter().any(|v| a.ty(*v).dtype != statistics) {
        return None;
    }
    let dims = x.shape.dims();
    let (batch, channels, size) = (dims[0], dims[1], dims[2..].iter().product::<usize>());
    u32::try_from(batch * size).ok()?;
    let mut kernel = SourceKernel::new("batch_norm", entry)
        .define("T", c_type(x.dtype)?)
        .define("S", c_type(statistics)?)
        .blocks(channels);
    kernel.block = BLOCK;
    let writes: Vec<_> = node.outputs.iter().map(|v| a.write(*v)).collect();
    let reads: Vec<_> = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<_>>()?;
    let begin = a.launches();
    let kernel = kernel.pointers(writes.iter().chain(&reads).copied());
    let mut kernel = kernel.i64(batch).i64(channels).i64(size);
    kernel.arguments.push(Argument::F64(eps));
    a.run(kernel);
    let norm = Norm { x, statistics, eps };
    match &node.op {
        Op::BatchNorm(_) => norm.offer(a, &reads, &writes, begin),
        _ => norm.offer_gradient(a, &reads, &writes, begin),
    }
}
