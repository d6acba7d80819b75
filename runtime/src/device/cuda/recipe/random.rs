//! Random masks.

use super::SourceKernel;
use super::assembler::Assembler;
use frit_ir::Node;
use frit_ir::ops::RandomMask;

/// Elements that one block of the generator gives.
const WORDS: usize = 4;

pub(super) fn mask(a: &mut Assembler<'_>, node: &Node, op: &RandomMask) -> Option<()> {
    let n = op.shape.numel();
    let state = a.read(node.inputs[0])?;
    let to = a.write(node.outputs[0]);
    let limit = (op.keep * 4_294_967_296.0) as usize;
    let kernel = SourceKernel::new("random_mask", "random_mask")
        .threads(n.div_ceil(WORDS))
        .pointer(to)
        .pointer(state)
        .i64(n)
        .i64(op.id as usize)
        .i64(limit);
    if n > 0 {
        a.run(kernel);
    }
    Some(())
}
