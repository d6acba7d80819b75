//! Rematerialization: backward recomputes activations instead of keeping them.
//!
//! In: a training graph whose backward nodes read forward values. Out: the same graph, in which selected forward values are recomputed in
//! region `recompute(k)`, directly before their first use in backward, from values that are kept. Forward and backward are unchanged, so
//! results are bit-identical; dropout masks use the same counters.
//!
//! The forward pass is split into stages by its repeated blocks: a node belongs to the last block whose parameters it depends on. Values
//! passed between stages are always kept. `unit` recomputes everything else in a stage, except in the last one, whose backward follows
//! immediately. `selective` never computes a matmul, a convolution, attention or batch normalization again; of the sets of values from
//! which cheap operations compute all that backward reads it keeps the one of the fewest bytes, a minimum cut ([`min_cut`]), and of equal
//! ones that from which the least is recomputed. In low precision it starts from kept, hence rounded, results, while forward's kernels
//! may have used unrounded ones.
//!
//! Runs before `shard`, so that the recomputation and the gradients of a stage read parameters through one gather.

mod min_cut;

use crate::cost::kernel::is_matrix;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use crate::shard::{Wrap, units};
use frit_ir::{Diagnostic, Graph, GraphError, Node, Op, Origin, Region, ValueId};
use min_cut::{Network, UNLIMITED};
use std::collections::HashMap;

/// Contract of the pass.
pub const INFO: PassInfo = PassInfo {
    name: "recompute",
    summary: "rematerialize activations in backward instead of storing them",
    requires: &[Property::Updated],
    ensures: &[],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// Rematerializes activations in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// Stages, from the first, of which everything is recomputed.
    pub stages: usize,
    /// Whether cheap values of the other stages are, where that saves memory.
    pub selective: bool,
}

impl Recompute {
    /// Nothing is recomputed.
    pub const NONE: Recompute = Recompute { stages: 0, selective: false };
    /// Cheap values are, where that saves memory.
    pub const SELECTIVE: Recompute = Recompute { stages: 0, selective: true };
    /// Everything inside stages is.
    pub const UNIT: Recompute = Recompute { stages: usize::MAX, selective: false };
}

/// Number of stages of a graph that `unit` can recompute: all blocks but the last.
///
/// # Errors
/// If the blocks cannot be found.
pub fn stages(graph: &Graph) -> Result<usize, Diagnostic> {
    Ok(units::assign(graph, &Wrap::Blocks)?.units.len().saturating_sub(2))
}

impl Pass for Recompute {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if *self == Recompute::NONE {
            return Ok(Changed::No);
        }
        let kept = Kept::of(graph, self)?;
        let mut clones: HashMap<ValueId, ValueId> = HashMap::new();
        for id in graph.order().to_vec() {
            if graph.node(id).region != Region::Backward {
                continue;
            }
            let mut inputs = graph.node(id).inputs.clone();
            for input in &mut inputs {
                *input = again(graph, *input, &kept, &mut clones).map_err(bug(INFO.name))?;
            }
            if inputs != graph.node(id).inputs {
                graph.set_inputs(id, inputs).map_err(bug(INFO.name))?;
            }
        }
        let message = match clones.len() {
            0 => {
                "nothing: no value that backward reads is cheap, or inside a repeated block".into()
            }
            n => format!("{n} values of {} stages are rematerialized", kept.n_stages),
        };
        context.remark(&Origin::none(), message);
        crate::canonicalize::sort(graph)?;
        graph.remove_dead();
        Ok(Changed::when(!clones.is_empty()))
    }
}

/// Which values are kept for backward, and the stage of the others, by value.
struct Kept {
    kept: Vec<bool>,
    stage: Vec<usize>,
    n_stages: usize,
}

impl Kept {
    fn of(graph: &Graph, what: &Recompute) -> Result<Kept, Diagnostic> {
        let assignment = units::assign(graph, &Wrap::Blocks)?;
        let last = assignment.units.len() - 1;
        // A stage has the number of its unit.
        let unit: HashMap<ValueId, usize> =
            assignment.unit_of.into_iter().map(|(value, unit)| (value, unit.0)).collect();
        let mut stage = vec![0; graph.n_values()];
        let mut of_params = vec![true; graph.n_values()];
        let mut readers = vec![0; graph.n_values()];
        let mut handed_on = vec![false; graph.n_values()];
        for (_, node) in graph.nodes().filter(|(_, n)| n.region == Region::Forward) {
            let own = node.outputs.first().and_then(|v| unit.get(v)).copied().unwrap_or(0);
            let of = node.inputs.iter().map(|v| stage[v.0 as usize]).fold(own, usize::max);
            let leaf = matches!(node.op, Op::Param(_) | Op::Constant(_));
            let view = !node.inputs.is_empty()
                && node.inputs.iter().all(|v| of_params[v.0 as usize])
                && (matches!(node.op, Op::Cast(_)) || node.op.is_layout());
            for &v in &node.inputs {
                readers[v.0 as usize] += 1;
                handed_on[v.0 as usize] |= stage[v.0 as usize] != of;
            }
            for output in &node.outputs {
                stage[output.0 as usize] = of;
                of_params[output.0 as usize] = leaf || view;
            }
        }
        for output in &graph.outputs {
            handed_on[output.value.0 as usize] = true;
        }
        let how = |v: usize, node: &Node| {
            // Results of collectives are not recomputed.
            let kept = node.op.is_leaf() || matches!(node.op, Op::AllReduce(_));
            if node.region != Region::Forward || kept || of_params[v] || handed_on[v] {
                return How::Kept;
            }
            if (1..last).contains(&stage[v]) && stage[v] <= what.stages {
                return How::Recomputed;
            }
            // Outside of blocks only chains are followed, which end at the next value with two readers.
            let follows = readers[v] < 2 || stage[v] > 0 && last > 0;
            if what.selective && is_cheap(&node.op) && follows { How::Either } else { How::Kept }
        };
        let mut hows = vec![How::Kept; graph.n_values()];
        for (_, node) in graph.nodes() {
            for output in &node.outputs {
                hows[output.0 as usize] = how(output.0 as usize, node);
            }
        }
        let kept = fewest_bytes(graph, &hows, &of_params);
        Ok(Kept { kept, stage, n_stages: last })
    }
}

/// What may become of a value that backward reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Kept,
    Recomputed,
    Either,
}

/// Which values to keep, by value: the fewest bytes from which the others are computed. Parameters and what is made of them alone need
/// not be kept.
///
/// A network has two vertices for each value that can be needed, before and behind it, between which as much flows as it has bytes.
/// It leads from what is not computed again to what backward reads, and its minimum cut goes through the values to keep.
fn fewest_bytes(graph: &Graph, hows: &[How], of_params: &[bool]) -> Vec<bool> {
    let mut kept: Vec<bool> = hows.iter().map(|how| *how != How::Recomputed).collect();
    if !hows.contains(&How::Either) {
        return kept;
    }
    let is_free = |v: ValueId| {
        let node = graph.def(v);
        node.region != Region::Forward || node.op.is_leaf() || of_params[v.0 as usize]
    };
    let backward = graph.nodes().filter(|(_, n)| n.region == Region::Backward);
    let read: Vec<ValueId> = backward.flat_map(|(_, n)| n.inputs.iter().copied()).collect();
    // The values that may be needed, in the order in which they are found.
    let mut number: HashMap<ValueId, usize> = HashMap::new();
    let mut values: Vec<ValueId> = Vec::new();
    let mut find = |v: ValueId, values: &mut Vec<ValueId>| {
        if !is_free(v) && !number.contains_key(&v) {
            number.insert(v, values.len());
            values.push(v);
        }
    };
    read.iter().for_each(|v| find(*v, &mut values));
    let mut next = 0;
    while let Some(&v) = values.get(next) {
        if hows[v.0 as usize] != How::Kept {
            graph.def(v).inputs.iter().for_each(|input| find(*input, &mut values));
        }
        next += 1;
    }
    let (before, behind) = (|i: usize| 2 * i, |i: usize| 2 * i + 1);
    let (source, sink) = (2 * values.len(), 2 * values.len() + 1);
    let mut network = Network::new(2 * values.len() + 2);
    for (i, &v) in values.iter().enumerate() {
        let how = hows[v.0 as usize];
        let bytes = if how == How::Recomputed { UNLIMITED } else { graph.ty(v).bytes() as u64 };
        network.add(before(i), behind(i), bytes);
        if how == How::Kept {
            network.add(source, before(i), UNLIMITED);
            continue;
        }
        for input in &graph.def(v).inputs {
            if let Some(&of) = number.get(input) {
                network.add(behind(of), before(i), UNLIMITED);
            }
        }
    }
    for i in read.iter().filter_map(|v| number.get(v)) {
        network.add(behind(*i), sink, UNLIMITED);
    }
    let is_needed = network.cut(source, sink);
    for (i, v) in values.iter().enumerate() {
        // What is needed before a value is made of what is kept elsewhere.
        if is_needed[before(i)] {
            kept[v.0 as usize] = false;
        }
    }
    kept
}

/// Whether recomputing the node moves a few times its result and needs no matmul. Batch normalization passes over its operand three times.
fn is_cheap(op: &Op) -> bool {
    if is_matrix(op) {
        return false;
    }
    op.is_pointwise()
        || op.is_layout()
        || matches!(op, Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Softmax(_))
}

/// The value rematerialized, with everything it needs that is not stored; itself if it is stored.
fn again(
    graph: &mut Graph,
    value: ValueId,
    kept: &Kept,
    clones: &mut HashMap<ValueId, ValueId>,
) -> Result<ValueId, GraphError> {
    // Depth first, without recursion: chains are as long as the model.
    let mut stack = vec![(value, false)];
    while let Some((v, ready)) = stack.pop() {
        if kept.kept.get(v.0 as usize).copied().unwrap_or(true) || clones.contains_key(&v) {
            continue;
        }
        let node = graph.def(v);
        if !ready {
            stack.push((v, true));
            stack.extend(node.inputs.iter().map(|input| (*input, false)));
            continue;
        }
        let node = node.clone();
        let inputs: Vec<ValueId> =
            node.inputs.iter().map(|input| *clones.get(input).unwrap_or(input)).collect();
        let region = Region::Recompute(kept.stage[v.0 as usize] as u32);
        let outputs = graph.add(node.op, &inputs, node.origin.by(INFO.name), region)?;
        let made = node.outputs.iter().copied().zip(outputs);
        clones.extend(made.filter(|(of, _)| !kept.kept[of.0 as usize]));
    }
    Ok(clones.get(&value).copied().unwrap_or(value))
}
