//! Pads matrix products to the alignment that matrix units want.
//!
//! In: a graph with final dtypes. Out: the same in which operands of some products get borders of zeros
//! and their results are cut back. A zero term changes no sum and columns of zeros are cut off, so
//! results stay equal bit for bit; parameters keep their logical shapes, their borders are nodes.
//! Source: NVIDIA, "Deep Learning Performance: Matrix Multiplication" (16-byte rows).

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::Diagnostic;
use frit_ir::ops::{MatMul, Pad, Slice};
use frit_ir::{Graph, GraphError, NodeId, Op, ValueId};
use std::collections::HashMap;

/// The contract of [`PadTensorCores`].
pub const INFO: PassInfo = PassInfo {
    name: "pad_tensor_cores",
    summary: "pad matrix products to the alignment of matrix units",
    requires: &[Property::Autocast],
    ensures: &[],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// More padding than this costs more than the alignment gains: unaligned half-precision products run at
/// half to three quarters of the aligned rate (same source).
const MAX_GROWTH: f64 = 1.25;

/// When to pad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PadMode {
    /// Low-precision products on CUDA devices, where it pays.
    #[default]
    Auto,
    /// Every product that is not aligned.
    On,
    /// Never.
    Off,
}

/// Pads matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PadTensorCores {
    /// When.
    pub mode: PadMode,
    /// To multiples of how many bytes, a power of two.
    pub alignment_bytes: usize,
    /// Whether the plan is for a CUDA device.
    pub target_is_cuda: bool,
}

impl Default for PadTensorCores {
    fn default() -> Self {
        PadTensorCores { mode: PadMode::Auto, alignment_bytes: 16, target_is_cuda: false }
    }
}

impl Pass for PadTensorCores {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.mode == PadMode::Off || (self.mode == PadMode::Auto && !self.target_is_cuda) {
            return Ok(Changed::No);
        }
        let mut padded = HashMap::new();
        let mut map = HashMap::new();
        for id in graph.order().to_vec() {
            let Op::MatMul(op) = graph.node(id).op.clone() else { continue };
            let Some(growth) = self.growth(graph, id, &op) else { continue };
            let y = graph.node(id).outputs[0];
            let (new, message) = growth.apply(graph, id, &mut padded).map_err(bug(INFO.name))?;
            context.remark(&graph.node(id).origin.by(INFO.name), message);
            map.insert(y, new);
        }
        graph.substitute(&map);
        crate::canonicalize::sort(graph)?;
        graph.remove_dead();
        Ok(Changed::when(!map.is_empty()))
    }
}

/// Elements added to each size of a product.
#[derive(Clone, Copy, Debug)]
struct Growth {
    m: usize,
    n: usize,
    k: usize,
    trans: [bool; 2],
}

impl PadTensorCores {
    /// What this product would gain; `None` if it stays as it is.
    fn growth(&self, graph: &Graph, id: NodeId, op: &MatMul) -> Option<Growth> {
        let node = graph.node(id);
        let [a, b] = [node.inputs[0], node.inputs[1]].map(|v| graph.ty(v));
        if self.mode == PadMode::Auto && !a.dtype.is_low_precision() {
            return None;
        }
        let multiple = (self.alignment_bytes / a.dtype.size()).max(1);
        let missing = |d: usize| d.next_multiple_of(multiple) - d;
        let rank = a.shape.rank();
        let (m, k) = match op.trans_a {
            true => (a.shape.0[rank - 1], a.shape.0[rank - 2]),
            false => (a.shape.0[rank - 2], a.shape.0[rank - 1]),
        };
        let n = b.shape.0[b.shape.rank() - if op.trans_b { 2 } else { 1 }];
        if m * n * k == 0 {
            return None;
        }
        // Rows of `a` are contiguous along M only if it is transposed.
        let growth = Growth {
            m: if op.trans_a { missing(m) } else { 0 },
            n: missing(n),
            k: missing(k),
            trans: [op.trans_a, op.trans_b],
        };
        let ratio = |d: usize, more: usize| (d + more) as f64 / d as f64;
        let ratio = ratio(m, growth.m) * ratio(n, growth.n) * ratio(k, growth.k);
        let pays = self.mode == PadMode::On || ratio <= MAX_GROWTH;
        (growth.m + growth.n + growth.k > 0 && pays).then_some(growth)
    }
}

impl Growth {
    /// The padded product, cut back to the old result's shape, and what was done in words.
    fn apply(
        &self,
        graph: &mut Graph,
        id: NodeId,
        padded: &mut HashMap<(ValueId, usize, usize), ValueId>,
    ) -> Result<(ValueId, String), GraphError> {
        let node = graph.node(id);
        let (origin, region) = (node.origin.by(INFO.name), node.region);
        let (op, inputs, y) = (node.op.clone(), node.inputs.clone(), node.outputs[0]);
        let swap = |trans: bool, rows: usize, columns: usize| {
            if trans { (columns, rows) } else { (rows, columns) }
        };
        let borders = [swap(self.trans[0], self.m, self.k), swap(self.trans[1], self.k, self.n)];
        let mut operands = Vec::with_capacity(2);
        for (&v, (rows, columns)) in inputs.iter().zip(borders) {
            if rows + columns == 0 {
                operands.push(v);
                continue;
            }
            if let Some(&same) = padded.get(&(v, rows, columns)) {
                operands.push(same);
                continue;
            }
            let rank = graph.ty(v).shape.rank();
            let (low, mut high) = (vec![0; rank], vec![0; rank]);
            (high[rank - 2], high[rank - 1]) = (rows, columns);
            let pad = Op::Pad(Pad { low, high, value: 0.0 });
            let wide = graph.add1(pad, &[v], origin.clone(), region)?;
            padded.insert((v, rows, columns), wide);
            operands.push(wide);
        }
        let product = graph.add1(op, &operands, origin.clone(), region)?;
        let (size, wide) = (graph.ty(y).shape.0.clone(), graph.ty(product).shape.clone());
        let message = format!("padded a product of shape {} to {wide}", graph.ty(y).shape);
        if wide.0 == size {
            return Ok((product, message));
        }
        let (start, step) = (vec![0; size.len()], vec![1; size.len()]);
        let cut = Op::Slice(Slice { start, size, step });
        Ok((graph.add1(cut, &[product], origin, region)?, message))
    }
}
