//! Which values of a graph are sharded. This is derived from the graph, not stored in it.

use crate::{Graph, Op};

/// For every value, by id, whether each rank has only its part of it.
///
/// Leaves say so themselves; `all_gather` ends it, `reduce_scatter` begins it, other operations hand on
/// what any of their operands is, except `grad_stats`, whose result is a partial sum, and the state of an
/// optimizer that has not an element per element of the parameter, which every rank holds whole.
pub fn sharded_values(graph: &Graph) -> Vec<bool> {
    let mut sharded = vec![false; graph.n_values()];
    for (_, node) in graph.nodes() {
        let any = node.inputs.iter().any(|v| sharded[v.0 as usize]);
        let result = match &node.op {
            Op::Param(p) => p.sharded,
            Op::State(s) => s.sharded,
            Op::AllGather(_) | Op::GradStats(_) => false,
            Op::ReduceScatter(_) => true,
            _ => any,
        };
        for output in &node.outputs {
            sharded[output.0 as usize] = result;
        }
        if let Op::OptimizerStep(step) = &node.op
            && !step.kind.has_states_by_element()
        {
            node.outputs[1..].iter().for_each(|state| sharded[state.0 as usize] = false);
        }
    }
    sharded
}
