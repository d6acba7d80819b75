//! Matmuls with 8-bit operands: e4m3, and e5m2 for gradients.
//!
//! In: a graph with final dtypes; for training, after the update is added. Out: the same graph in which matmuls of low-precision
//! operands read them through `quantize`. An operand that depends on the loss scale is a gradient. Each tensor is quantized once for
//! all matmuls that read it, also through reshapes and transposes: after those that all of them share, so that these can fuse with
//! the producer.
//!
//! In training the amax of every tensor over the last micro-steps is one state, `amax_history`, updated by every micro-step with the
//! maximum over all ranks, so that all ranks use the same scales. An evaluation has no state, and scales each tensor by its own amax.
//!
//! 8-bit tensor cores need sizes that are multiples of 16; other matmuls are unchanged.

use crate::autocast::Override;
use crate::canonicalize;
use crate::cost::GemmShape;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{
    AllReduce, Concat, Quantize, Reduce, ReduceFn, ReduceKind, Reshape, Slice, State, StateName,
};
use frit_ir::{
    DType, Diagnostic, Graph, GraphError, Node, NodeId, Op, Origin, OutputKind, Region, Shape,
    TensorType, ValueId,
};
use std::collections::HashMap;

/// The contract of [`Fp8`].
pub const INFO: PassInfo = PassInfo {
    name: "fp8",
    summary: "quantize matmul operands to 8-bit floats",
    requires: &[Property::Autocast, Property::Updated],
    ensures: &[],
    breaks: &[],
    numerics: Numerics::LowersPrecision,
};

/// Alignment of the sizes of a matmul.
pub(crate) const ALIGNMENT: usize = 16;

/// Quantizes the operands of matmuls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fp8 {
    /// Whether anything is rounded.
    pub enabled: bool,
    /// Length of the amax history in micro-steps; `None` scales tensors by their current amax.
    pub history: Option<usize>,
    /// Overrides; a matmul that one matches has its dtype.
    pub exceptions: Vec<Override>,
    /// Number of ranks, over which amax is reduced.
    pub world_size: usize,
}

impl Pass for Fp8 {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if !self.enabled {
            return Ok(Changed::No);
        }
        let gemms: Vec<NodeId> = graph.order().to_vec();
        let gemms: Vec<NodeId> =
            gemms.into_iter().filter(|id| self.is_rounded(graph, *id, context)).collect();
        let scaled = scaled_values(graph);
        // The tensors in the order of their indices, each with its views, which all matmuls share.
        let mut shared: Vec<Vec<ValueId>> = Vec::new();
        for id in &gemms {
            for &v in &graph.node(*id).inputs {
                let views = views(graph, v);
                match shared.iter_mut().find(|known| known[0] == views[0]) {
                    Some(known) => {
                        let same = known.iter().zip(&views).take_while(|(a, b)| a == b).count();
                        known.truncate(same);
                    }
                    None => shared.push(views),
                }
            }
        }
        let tensors: Vec<ValueId> = shared.iter().map(|views| views[views.len() - 1]).collect();
        if tensors.is_empty() {
            return Ok(Changed::No);
        }
        let history = match self.history {
            Some(n) => Some(history(graph, [tensors.len(), n]).map_err(bug(INFO.name))?),
            None => None,
        };
        let mut rounded = HashMap::new();
        let mut latest = Vec::with_capacity(tensors.len());
        for (index, &v) in tensors.iter().enumerate() {
            let gradient = scaled[v.0 as usize];
            let (to, region) = match gradient {
                true => (DType::F8E5M2, Region::Backward),
                false => (DType::F8E4M3, Region::Forward),
            };
            let origin = graph.def(v).origin.by(INFO.name);
            let inputs: Vec<ValueId> = [v].into_iter().chain(history.map(|h| h.recent)).collect();
            let op = Op::Quantize(Quantize { to, index });
            let results = graph.add(op, &inputs, origin.clone(), region).map_err(bug(INFO.name))?;
            rounded.insert(v, results[0]);
            latest.push(results[1]);
            context.remark(&origin, format!("tensor {index}: {} in {to}", graph.ty(v)));
        }
        for id in &gemms {
            let mut inputs = Vec::with_capacity(2);
            for v in graph.node(*id).inputs.clone() {
                inputs.push(read(graph, v, &mut rounded).map_err(bug(INFO.name))?);
            }
            graph.set_inputs(*id, inputs).map_err(bug(INFO.name))?;
        }
        if let Some(history) = history {
            self.renew(graph, &history, &latest).map_err(bug(INFO.name))?;
        }
        canonicalize::sort(graph)?;
        let (n, tensors) = (gemms.len(), tensors.len());
        let message = format!("{n} matmuls in 8-bit floats; {tensors} tensors have a scale");
        context.remark(&Origin::none(), message);
        Ok(Changed::Yes)
    }
}

impl Fp8 {
    /// Whether a matmul with operands of this dtype is quantized if its sizes allow it.
    pub(crate) fn covers(&self, node: &Node, dtype: DType) -> bool {
        self.enabled && dtype.is_low_precision() && !self.exceptions.iter().any(|e| e.applies(node))
    }

    /// Whether this matmul is quantized; remarks why a low-precision one is not.
    fn is_rounded(&self, graph: &Graph, id: NodeId, context: &mut PassContext) -> bool {
        let node = graph.node(id);
        let Op::MatMul(op) = &node.op else { return false };
        let [a, b] = [0, 1].map(|i| graph.ty(node.inputs[i]));
        if !self.covers(node, a.dtype) {
            return false;
        }
        let GemmShape { m, n, k, .. } = GemmShape::of(op, a, b);
        let aligned = [m, n, k].iter().all(|size| size.is_multiple_of(ALIGNMENT));
        if !aligned && node.region == Region::Forward {
            let message = format!(
                "stays in {}: {m} × {k} by {k} × {n} are not multiples of {ALIGNMENT}",
                a.dtype
            );
            context.remark(&node.origin.by(INFO.name), message);
        }
        aligned
    }

    /// Prepends the amax of this micro-step, over all ranks, to the history.
    fn renew(
        &self,
        graph: &mut Graph,
        history: &History,
        latest: &[ValueId],
    ) -> Result<(), GraphError> {
        let origin = Origin::none().by(INFO.name);
        let mut add =
            |op: Op, inputs: &[ValueId]| graph.add1(op, inputs, origin.clone(), Region::Backward);
        let [tensors, kept] = history.size;
        let mut parts = Vec::with_capacity(tensors);
        for &amax in latest {
            parts.push(add(Op::Reshape(Reshape { shape: Shape::from([1]) }), &[amax])?);
        }
        let mut all = match parts[..] {
            [one] => one,
            _ => add(Op::Concat(Concat { axis: 0 }), &parts)?,
        };
        if self.world_size > 1 {
            let most = AllReduce { reduce: ReduceKind::Max, unit: None, dtype: None };
            all = add(Op::AllReduce(most), &[all])?;
        }
        let column = Op::Reshape(Reshape { shape: Shape::from([tensors, 1]) });
        let mut next = add(column, &[all])?;
        if kept > 1 {
            let older =
                Slice { start: vec![0, 0], size: vec![tensors, kept - 1], step: vec![1, 1] };
            let older = add(Op::Slice(older), &[history.state])?;
            next = add(Op::Concat(Concat { axis: 1 }), &[next, older])?;
        }
        graph.add_output(StateName::AmaxHistory.word(), next, OutputKind::Carry(history.state));
        Ok(())
    }
}

/// The amax history of all tensors, and the maximum of each.
#[derive(Clone, Copy)]
struct History {
    state: ValueId,
    recent: ValueId,
    size: [usize; 2],
}

fn history(graph: &mut Graph, size: [usize; 2]) -> Result<History, GraphError> {
    let ty = TensorType::new(DType::F32, size);
    let op =
        Op::State(State { name: StateName::AmaxHistory, of: None, ty, init: 0.0, sharded: false });
    let origin = Origin::none().by(INFO.name);
    let state = graph.add1(op, &[], origin.clone(), Region::Forward)?;
    graph.set_name(state, StateName::AmaxHistory.word());
    let largest = Op::Reduce(Reduce { f: ReduceFn::Max, axes: vec![1], keep_dims: false });
    let recent = graph.add1(largest, &[state], origin, Region::Forward)?;
    Ok(History { state, recent, size })
}

/// For every value, whether it depends on the seed of the backward pass.
fn scaled_values(graph: &Graph) -> Vec<bool> {
    let mut scaled = vec![false; graph.n_values()];
    for (_, node) in graph.nodes() {
        let seed = matches!(node.op, Op::LossScale(_));
        let any = seed || node.inputs.iter().any(|v| scaled[v.0 as usize]);
        node.outputs.iter().for_each(|v| scaled[v.0 as usize] = any);
    }
    scaled
}

/// The value that a value is a view of, and every view between them.
fn views(graph: &Graph, v: ValueId) -> Vec<ValueId> {
    let mut views = vec![v];
    while let Op::Reshape(_) | Op::Transpose(_) = &graph.def(views[views.len() - 1]).op {
        views.push(graph.def(views[views.len() - 1]).inputs[0]);
    }
    views.reverse();
    views
}

/// The rounded counterpart of a value, viewed as it is.
fn read(
    graph: &mut Graph,
    v: ValueId,
    rounded: &mut HashMap<ValueId, ValueId>,
) -> Result<ValueId, GraphError> {
    let (mut views, mut at) = (Vec::new(), v);
    let mut value = loop {
        if let Some(&value) = rounded.get(&at) {
            break value;
        }
        views.push(at);
        at = graph.def(at).inputs[0];
    };
    for v in views.into_iter().rev() {
        let view = graph.def(v).clone();
        value = graph.add1(view.op, &[value], view.origin, view.region)?;
        rounded.insert(v, value);
    }
    Ok(value)
}
