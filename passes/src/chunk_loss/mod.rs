//! Computes a cross-entropy over the logits of a matmul in chunks of rows (tokens), so that neither all logits nor their gradient exist
//! at once.
//!
//! In: a training graph with its update, before it is sharded. Out: the same graph, in which the logits, their loss, their gradient and
//! the matmuls that read it are computed for one chunk of rows after another, in the forward pass. Losses and gradients of the hidden
//! states are concatenated; gradients of the weight and the bias are sums over the chunks, in f32.
//!
//! The logits of a model with a large vocabulary are its largest value: 32 × 1024 tokens of GPT-2 have 3.3 GB of them in bf16. Every
//! further chunk reads and writes the gradient of the weight once more. [`Chunks::Auto`] takes the most chunks that by the cost model
//! lengthen this part of the step by at most [`OVERHEAD`] or [`OVERHEAD_OF_PACKING`]; logits of less than [`MIN_BYTES`] are left whole. Where a plan exceeds its
//! memory budget, more chunks are tried before anything is recomputed.
//! Source: Liger Kernel (Hsu et al., 2024), which computes the same in chunks.

mod head;
mod split;

use crate::canonicalize;
use crate::cost::Device;
use crate::cost::kernel::GemmShape;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::{Code, Diagnostic, Graph, Node, NodeId, Op};
use head::{Head, Role};

/// The contract of [`ChunkLoss`].
pub const INFO: PassInfo = PassInfo {
    name: "chunk_loss",
    summary: "compute logits, loss and their gradients in chunks of tokens",
    requires: &[Property::Updated],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Reassociates,
};

/// The largest part of the time of logits, loss and their gradients that chunks may add.
const OVERHEAD: f64 = 0.01;

/// The same on a processor, where every chunk packs the weight for two more matmuls.
const OVERHEAD_OF_PACKING: f64 = 0.03;

/// Bytes of logits below which chunks save nothing to speak of.
const MIN_BYTES: usize = 16 << 20;

/// The most chunks that are chosen.
const MAX_CHUNKS: usize = 16;

/// The number of chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Chunks {
    /// As the cost model says.
    #[default]
    Auto,
    /// As many as are ever chosen, whatever they cost.
    Most,
    /// This many, of at least one row each; 1 leaves the logits whole.
    Fixed(usize),
}

/// Computes cross-entropies in chunks of rows.
#[derive(Clone, Debug)]
pub struct ChunkLoss {
    /// The number of chunks.
    pub chunks: Chunks,
    /// The device whose costs decide.
    pub device: Device,
}

impl Pass for ChunkLoss {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.chunks == Chunks::Fixed(1) {
            return Ok(Changed::No);
        }
        let is_loss = |node: &Node| matches!(node.op, Op::CrossEntropy(_));
        let losses: Vec<NodeId> =
            graph.nodes().filter(|(_, node)| is_loss(node)).map(|(id, _)| id).collect();
        let mut obstacle = "the model has no cross-entropy";
        let mut changed = Changed::No;
        for loss in losses {
            let head = match Head::of(graph, loss) {
                Ok(head) => head,
                Err(why) => {
                    obstacle = why;
                    continue;
                }
            };
            let n = self.number(graph, &head).min(head.rows);
            if n < 2 {
                obstacle = "its logits have a single row";
                continue;
            }
            let origin = graph.node(loss).origin.clone();
            split::split(graph, &head, n).map_err(bug(INFO.name))?;
            canonicalize::sort(graph)?;
            context.remark(&origin, format!("{} rows of logits in {n} chunks", head.rows));
            changed = Changed::Yes;
        }
        match self.chunks {
            Chunks::Fixed(n) if changed == Changed::No => Err(impossible(n, obstacle)),
            _ => Ok(changed),
        }
    }
}

impl ChunkLoss {
    /// The number of chunks for a head.
    fn number(&self, graph: &Graph, head: &Head) -> usize {
        if let Chunks::Fixed(n) = self.chunks {
            return n;
        }
        if graph.ty(head.logits).bytes() < MIN_BYTES {
            return 1;
        }
        let whole = seconds(&self.device, graph, head, 1);
        let overhead = if self.device.has_matrix_units() { OVERHEAD } else { OVERHEAD_OF_PACKING };
        let is_cheap = |n: usize| {
            self.chunks == Chunks::Most
                || seconds(&self.device, graph, head, n) <= (1.0 + overhead) * whole
        };
        let powers = std::iter::successors(Some(2), |n| Some(2 * n));
        powers
            .take_while(|n| *n <= MAX_CHUNKS && head.rows.is_multiple_of(*n))
            .take_while(|n| is_cheap(*n))
            .last()
            .unwrap_or(1)
    }
}

/// Predicted seconds of a head in `n` equal chunks. Elementwise operations are taken to be fused with the loss.
fn seconds(device: &Device, graph: &Graph, head: &Head, n: usize) -> f64 {
    let of = |(id, role): &(NodeId, Role)| {
        let node = graph.node(*id);
        match (&node.op, role) {
            (Op::MatMul(op), _) => {
                let [a, b] = [0, 1].map(|i| graph.ty(node.inputs[i]));
                let whole = GemmShape::of(op, a, b);
                let chunk = match role {
                    Role::Sum => GemmShape { k: whole.k / n, ..whole },
                    _ => GemmShape { m: whole.m / n, ..whole },
                };
                // All chunks but the first also read the sum so far.
                let sum = if *role == Role::Sum { graph.ty(node.outputs[0]).bytes() } else { 0 };
                let traffic = (chunk.bytes() as f64 + sum as f64) / device.bytes_per_second();
                let later = 1e-6 * device.launch_us + device.gemm_seconds(&chunk).max(traffic);
                device.matmul_seconds(&chunk) + (n - 1) as f64 * later
            }
            (Op::CrossEntropy(_), _) => {
                let bytes = 2 * graph.ty(head.logits).bytes() / n;
                n as f64 * device.copy_seconds(bytes as u64)
            }
            _ => 0.0,
        }
    };
    head.members.iter().map(of).sum()
}

fn impossible(n: usize, obstacle: &str) -> Diagnostic {
    let message = format!(
        "`memory.loss_chunks` = {n}, and the loss cannot be computed in chunks: {obstacle}"
    );
    Diagnostic::error(Code::NeedsAnotherSetting, message)
        .help("set memory.loss_chunks to \"auto\", or to 1")
}
