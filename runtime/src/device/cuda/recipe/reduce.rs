//! Reductions.

use super::SourceKernel;
use super::assembler::Assembler;
use super::kernel::c_type;
use frit_ir::Node;

/// Blocks that sum one operand of `grad_stats`, at most, and what one leaves: two f64.
const STATS_BLOCKS: usize = 1024;
const STATS_BYTES: usize = 16;
/// Elements that a block of it walks over at least.
const STATS_CHUNK: usize = 1 << 14;

/// Non-finite elements and the sum of squares of all operands.
pub(super) fn grad_stats(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let mut operands = Vec::new();
    for value in &node.inputs {
        operands.push((a.read(*value)?, a.ty(*value)));
    }
    let to = a.write(node.outputs[0]);
    let blocks = |n: usize| n.div_ceil(STATS_CHUNK).min(STATS_BLOCKS);
    let all: usize = operands.iter().map(|(_, ty)| blocks(ty.shape.numel())).sum();
    let parts = a.scratch(all * STATS_BYTES);
    let kernel = |entry, dtype| -> Option<SourceKernel> {
        Some(SourceKernel::new("grad_stats", entry).define("T", c_type(dtype)?))
    };
    let mut first = 0;
    for (at, ty) in operands {
        let n = ty.shape.numel();
        if n == 0 {
            continue;
        }
        let part = parts.offset(first * STATS_BYTES);
        first += blocks(n);
        a.run(kernel("stats_parts", ty.dtype)?.grid(blocks(n))?.pointer(part).pointer(at).i64(n));
    }
    let dtype = a.ty(node.inputs[0]).dtype;
    a.run(kernel("stats_total", dtype)?.pointer(to).pointer(parts).i64(all));
    Some(())
}
