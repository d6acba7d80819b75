//! Selection for random numbers and masks.

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use frit_ir::ops::{Random, RandomFn, RandomMask};
use frit_ir::{Node, Op, TensorType};
use frit_kernels::routine::Routine;

/// Elements per block of the generator.
const WORDS: usize = 4;

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    match &node.op {
        Op::Random(op) => numbers(a, node, op),
        Op::RandomMask(op) => mask(a, node, op),
        _ => None,
    }
}

fn mask(a: &mut Assembler<'_>, node: &Node, op: &RandomMask) -> Option<()> {
    let limit = (op.keep * 4_294_967_296.0) as usize;
    let kernel = draws(a, node, "random_mask", op.shape.numel(), op.id)?;
    a.run(kernel.i64(limit));
    Some(())
}

fn numbers(a: &mut Assembler<'_>, node: &Node, op: &Random) -> Option<()> {
    let entry = match op.f {
        RandomFn::Uniform => "random_uniform",
        RandomFn::Normal => "random_normal",
    };
    let kernel = draws(a, node, entry, op.shape.numel(), op.id)?;
    a.run(kernel.f64(op.offset).f64(op.scale).f64(f64::from(op.most())));
    Some(())
}

/// A kernel for `n` elements; the first block of the generator may be partial.
fn draws(
    a: &mut Assembler<'_>,
    node: &Node,
    entry: &'static str,
    n: usize,
    id: u32,
) -> Option<SourceKernel> {
    let state = a.read(node.inputs[0])?;
    let to = a.write(node.outputs[0]);
    let kernel = SourceKernel::new("random", entry)
        .threads(n.div_ceil(WORDS) + 1)
        .pointer(to)
        .pointer(state)
        .i64(n)
        .i64(id as usize);
    Some(kernel)
}

pub(super) fn cpu(op: &Op, _: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    use frit_kernels::routine::random;
    Some(match op {
        Op::Random(op) => Routine::Random(random::Random {
            len: op.shape.numel(),
            normal: op.f == RandomFn::Normal,
            offset: op.offset as f32,
            scale: op.scale as f32,
            most: Some(op.most()).filter(|most| most.is_finite()),
            id: op.id,
        }),
        Op::RandomMask(op) => Routine::RandomMask(random::RandomMask {
            len: op.shape.numel(),
            keep: op.keep,
            id: op.id,
        }),
        _ => return None,
    })
}
