//! Attention and its gradient as cuDNN graphs: matmuls, and the pointwise operations and reductions on scores between them.
//! cuDNN's engines match the whole graph and keep scores in registers, except the gradient's.
//!
//! The deterministic gradient writes the gradient of the scores to workspace and multiplies it by the keys in a separate matmul.
//! Engines for the graph that accumulates the queries' gradient in memory are nondeterministic without being flagged as such; they
//! set the sums to zero themselves (since version 9.6).
//!
//! Source: Dao et al. 2022; cuDNN's documentation of its graph interface, "Fused Attention".

use super::descriptor::{Api, Result};
use super::nodes::{Function, Nodes};
use crate::error::CudaError;
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind, Strided};

/// The first version without known errors: earlier ones read out of bounds in CUDA graphs.
const VERSION: usize = 91501;
/// Bytes per vector access of the engines.
const ALIGNMENT: usize = 16;
/// The tensor of a gradient that may add in any order, with the sums of the gradients of queries.
const SUMS: usize = 10;

/// Builder for the graph.
struct Graph<'a> {
    tensors: &'a [Strided],
    nodes: Nodes,
    causal: bool,
    /// Index of the scale's tensor.
    scale: usize,
    /// Scores, `[b, h, t, s]` of f32, and the same rounded to the elements.
    scores: Strided,
    narrow: Strided,
    /// `[b, h, t, 1]` of f32.
    rows: Strided,
}

/// Refuses operations that engines are known to compute incorrectly or with accesses out of bounds.
///
/// # Errors
/// If the version of the library is too old, or tensors are not aligned.
pub(super) fn check(api: &Api, operation: &Operation) -> Result {
    let refuse = |reason: &str| Err(CudaError::Call { call: "cuDNN", reason: reason.into() });
    // SAFETY: no arguments to get wrong.
    if unsafe { (api.cudnnGetVersion)() } < VERSION {
        return refuse("attention needs version 9.15.1 or later");
    }
    match operation.tensors.iter().all(|t| t.alignment_bytes >= ALIGNMENT) {
        true => Ok(()),
        false => refuse("attention needs tensors aligned to 16 bytes"),
    }
}

/// The graph of an attention or its gradient.
///
/// # Panics
/// If the operation is not an attention.
pub fn nodes(operation: &Operation) -> Nodes {
    let (scale_bits, causal) = match operation.kind {
        OperationKind::Attention { scale_bits, causal }
        | OperationKind::AttentionGrad { scale_bits, causal } => (scale_bits, causal),
        _ => panic!("not an attention: {operation}"),
    };
    let tensors = &operation.tensors[..];
    let (q, keys) = (&tensors[0], tensors[1].sizes[2]);
    let [batch, heads, queries] = [q.sizes[0], q.sizes[1], q.sizes[2]];
    let scores = Strided::dense(DType::F32, &[batch, heads, queries, keys]);
    let rows = Strided::dense(DType::F32, &[batch, heads, queries, 1]);
    let narrow = Strided { dtype: q.dtype, ..scores.clone() };
    let mut nodes = Nodes::default();
    let scale = nodes.value(f32::from_bits(scale_bits));
    let graph = Graph { tensors, nodes, causal, scale, scores, narrow, rows };
    match operation.kind {
        OperationKind::Attention { .. } => graph.attention(),
        _ => graph.gradient(),
    }
}

impl Graph<'_> {
    /// Scores s = scale · q kᵀ, their row's maximum m and sum l of e^(s − m); y = e^(s − m) / l · v, lse = m + ln l.
    fn attention(mut self) -> Nodes {
        let (q, k, v) = (self.tensor(0), self.turned(1), self.tensor(2));
        let (y, lse) = (self.tensor(3), self.tensor(4));
        let s = self.scores(q, k);
        let s = self.hide_later_keys(s);
        let Graph { mut nodes, scores, narrow, rows, .. } = self;
        let most = nodes.make(Function::Max, &[s], &rows);
        let s = nodes.make(Function::Sub, &[s, most], &scores);
        let s = nodes.make(Function::Exp, &[s], &scores);
        let sum = nodes.make(Function::Sum, &[s], &rows);
        let log = nodes.make(Function::Log, &[sum], &rows);
        nodes.write(Function::Add, &[most, log], lse);
        let p = nodes.make(Function::Div, &[s, sum], &narrow);
        nodes.write(Function::MatMul, &[p, v], y);
        nodes
    }

    /// delta = Σ dy·y of a row, p = e^(s − lse), dv = pᵀ dy, ds = scale · p (dy vᵀ − delta), dk = dsᵀ q, dq = ds k.
    fn gradient(mut self) -> Nodes {
        let (q, k, v) = (self.tensor(0), self.turned(1), self.turned(2));
        let (y, dy, lse) = (self.tensor(3), self.tensor(4), self.tensor(8));
        let (dq, delta) = (self.tensor(5), self.tensor(9));

        let values = Strided::dense(DType::F32, &self.tensors[3].sizes);
        let products = self.nodes.make(Function::Mul, &[dy, y], &values);
        let sums = self.nodes.make(Function::Sum, &[products], &self.rows);
        // Engines require it in memory, behind a matmul.
        let one = self.nodes.value(1.0);
        self.nodes.write(Function::Mul, &[sums, one], delta);

        let s = self.scores(q, k);
        let s = self.nodes.make(Function::Sub, &[s, lse], &self.scores);
        let s = self.hide_later_keys(s);
        let p = self.nodes.make(Function::Exp, &[s], &self.scores);
        self.keys_matmul(p, dy, 7);

        let dp = self.nodes.make(Function::MatMul, &[dy, v], &self.scores);
        let ds = self.nodes.make(Function::Sub, &[dp, delta], &self.scores);
        let ds = self.nodes.make(Function::Mul, &[ds, p], &self.scores);
        let ds = self.nodes.make(Function::Mul, &[ds, self.scale], &self.narrow);
        self.keys_matmul(ds, q, 6);

        let rows_of_k = self.nodes.make(Function::Transpose, &[k], &self.tensors[1]);
        if self.tensors.len() > SUMS {
            let sums = self.tensor(SUMS);
            self.nodes.write(Function::MatMul, &[ds, rows_of_k], sums);
            self.nodes.write(Function::Identity, &[sums], dq);
        } else {
            self.nodes.write(Function::MatMul, &[ds, rows_of_k], dq);
        }
        self.nodes
    }

    /// One of the operation's tensors.
    fn tensor(&mut self, index: usize) -> usize {
        self.nodes.memory(index, self.tensors[index].clone())
    }

    /// One of the operation's tensors with its last two axes transposed.
    fn turned(&mut self, index: usize) -> usize {
        self.nodes.memory(index, turned(&self.tensors[index]))
    }

    fn scores(&mut self, q: usize, k: usize) -> usize {
        let matmul = self.nodes.make(Function::MatMul, &[q, k], &self.scores);
        self.nodes.make(Function::Mul, &[matmul, self.scale], &self.scores)
    }

    /// Sets scores of keys after the query to −∞, if the attention is causal.
    fn hide_later_keys(&mut self, s: usize) -> usize {
        if !self.causal {
            return s;
        }
        let of = |dtype| Strided { dtype, ..self.scores.clone() };
        let query = self.nodes.make(Function::Index(2), &[s], &of(DType::I32));
        let key = self.nodes.make(Function::Index(3), &[s], &of(DType::I32));
        let is_seen = self.nodes.make(Function::AtLeast, &[query, key], &of(DType::Bool));
        let hidden = self.nodes.value(f32::NEG_INFINITY);
        self.nodes.make(Function::Select, &[s, hidden, is_seen], &self.scores)
    }

    /// Tensor `to` = the transposed scores, rounded, times rows of queries, summed over the heads that share keys.
    fn keys_matmul(&mut self, scores: usize, rows: usize, to: usize) {
        let turned = self.nodes.make(Function::Transpose, &[scores], &turned(&self.narrow));
        let (result, heads) = (self.tensor(to), self.scores.sizes[1]);
        let mut sizes = self.tensors[to].sizes.clone();
        if sizes[1] == heads {
            return self.nodes.write(Function::MatMul, &[turned, rows], result);
        }
        sizes[1] = heads;
        let all = Strided::dense(self.narrow.dtype, &sizes);
        let all = self.nodes.make(Function::MatMul, &[turned, rows], &all);
        self.nodes.write(Function::Sum, &[all], result);
    }
}

/// The tensor with its last two axes transposed.
fn turned(tensor: &Strided) -> Strided {
    let mut tensor = tensor.clone();
    tensor.sizes.swap(2, 3);
    tensor.strides.swap(2, 3);
    tensor
}
