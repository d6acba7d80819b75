//! Adds the reductions of gradients, and of the statistics that decide whether to skip the step.

use super::{INFO, Mesh, replace_operand};
use crate::pass::bug;
use frit_ir::ops::{AllReduce, BinaryFn, Constant, ParamKind, ReduceKind, ReduceScatter};
use frit_ir::plan::UnitId;
use frit_ir::{Code, DType, Diagnostic, Graph, NodeId, Op, OutputKind, Region, Tensor, ValueId};
use std::collections::HashMap;

/// Puts reductions behind the gradient of every trainable parameter: those of a micro-step before it is
/// accumulated, those of the whole step after.
pub(super) fn reduce(graph: &mut Graph, mesh: Mesh, dtype: DType) -> Result<(), Diagnostic> {
    let dtype = (dtype != DType::F32).then_some(dtype);
    let units: HashMap<String, UnitId> = graph
        .params()
        .filter(|(_, p)| p.kind == ParamKind::Trainable)
        .filter_map(|(_, p)| Some((p.name.clone(), p.unit?)))
        .collect();
    let gradients: Vec<(String, ValueId)> = graph
        .outputs
        .iter()
        .filter(|o| o.kind == OutputKind::Gradient)
        .map(|o| (o.name.clone(), o.value))
        .collect();
    // One value may be the gradient of two parameters: each gets its own reduction.
    let mut reduced: HashMap<(ValueId, String), ValueId> = HashMap::new();
    for (name, value) in gradients {
        let unit = units[&name];
        let mut steps = Vec::new();
        if mesh.shards > 1 {
            steps.push(Op::ReduceScatter(ReduceScatter { reduce: mesh.reduce, unit, dtype }));
        }
        if mesh.replicas > 1 {
            let (reduce, unit) = (mesh.reduce, Some(unit));
            steps.push(Op::AllReduce(AllReduce { reduce, unit, dtype }));
        }
        let raw = accumulated(graph, value);
        let early = match raw {
            None => steps.len(),
            // Reduce-scattered gradients are summed as shards; replicas are averaged only at the end.
            Some(_) => usize::from(mesh.sync),
        };
        let late = steps.split_off(early);
        let origin = graph.def(raw.unwrap_or(value)).origin.by(INFO.name);
        let mut add = |graph: &mut Graph, from, ops, region| {
            let mut result = from;
            for op in ops {
                result =
                    graph.add1(op, &[result], origin.clone(), region).map_err(bug(INFO.name))?;
            }
            reduced.insert((from, name.clone()), result);
            Ok::<(), Diagnostic>(())
        };
        match raw {
            None => add(graph, value, steps, Region::Backward)?,
            Some(raw) => {
                add(graph, raw, steps, Region::Backward)?;
                add(graph, value, late, Region::Update)?;
            }
        }
    }
    for id in graph.order().to_vec() {
        let node = graph.node(id);
        let names: Vec<String> = match (owner_of(graph, id), &node.op) {
            (Some(name), _) => vec![name; node.inputs.len()],
            (None, Op::GradStats(_)) => gradient_names(graph),
            (None, _) => continue,
        };
        let inputs: Vec<ValueId> = node
            .inputs
            .iter()
            .zip(names)
            .map(|(v, name)| reduced.get(&(*v, name)).copied().unwrap_or(*v))
            .collect();
        graph.set_inputs(id, inputs).map_err(bug(INFO.name))?;
    }
    for output in &mut graph.outputs {
        if output.kind == OutputKind::Gradient
            && let Some(value) = reduced.get(&(output.value, output.name.clone()))
        {
            output.value = *value;
        }
    }
    Ok(())
}

/// The gradient of this micro-step, if `value` is its sum with state.
fn accumulated(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let node = graph.def(value);
    let is_sum = |v: &ValueId| matches!(&graph.def(*v).op, Op::State(s) if s.name.is_sum());
    let state = node.inputs.iter().position(is_sum)?;
    match node.op {
        Op::TreeSum => Some(node.inputs[0]),
        _ => (node.inputs.len() == 2).then(|| node.inputs[1 - state]),
    }
}

/// The parameter whose optimizer step or gradient accumulation this node is.
fn owner_of(graph: &Graph, id: NodeId) -> Option<String> {
    let node = graph.node(id);
    if let Op::OptimizerStep(_) = node.op
        && let Op::Param(p) = &graph.def(node.inputs[0]).op
    {
        return Some(p.name.clone());
    }
    node.inputs.iter().find_map(|v| match &graph.def(*v).op {
        Op::State(s) if s.name.is_sum() => s.of.clone(),
        _ => None,
    })
}

/// Names of the gradients in the order in which `grad_stats` reads them: that of the outputs.
fn gradient_names(graph: &Graph) -> Vec<String> {
    graph
        .outputs
        .iter()
        .filter(|o| o.kind == OutputKind::Gradient)
        .map(|o| o.name.clone())
        .collect()
}

/// Sums [non-finite, Σg², count, loss] over ranks. The first two are of the gradient's shard: whole, and so
/// not summed, without sharding; in every replica, and so divided by their number, with replicas of shards.
pub(super) fn reduce_statistics(graph: &mut Graph, mesh: Mesh) -> Result<(), Diagnostic> {
    let Some(unscale) =
        graph.nodes().find(|(_, n)| matches!(n.op, Op::Unscale(_))).map(|(id, _)| id)
    else {
        return Ok(());
    };
    let mut stats = graph.node(unscale).inputs[0];
    if let Op::RoundStats = graph.def(stats).op {
        stats = graph.def(stats).inputs[0];
    }
    let sum = Op::AllReduce(AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None });
    let origin = graph.node(unscale).origin.by(INFO.name);
    let add = |graph: &mut Graph, op: Op, inputs: &[ValueId]| {
        graph.add1(op, inputs, origin.clone(), Region::Update).map_err(bug(INFO.name))
    };
    let Op::Concat(concat) = graph.def(stats).op.clone() else {
        return Err(Diagnostic::error(Code::PassFailed, "statistics are not a concatenation"));
    };
    let parts = graph.def(stats).inputs.clone();
    // The current readers of `stats`; the nodes added here read the original value.
    let users = graph.users()[stats.0 as usize].clone();
    let reduced = if mesh.shards == 1 {
        let local = add(graph, Op::Concat(concat.clone()), &parts[1..])?;
        let global = add(graph, sum, &[local])?;
        add(graph, Op::Concat(concat), &[parts[0], global])?
    } else if mesh.replicas == 1 {
        add(graph, sum, &[stats])?
    } else {
        let value = Tensor::scalar(1.0 / mesh.replicas as f64);
        let share = add(graph, Op::Constant(Constant { value }), &[])?;
        let once = add(graph, Op::Binary(BinaryFn::Mul), &[parts[0], share])?;
        let all = [&[once], &parts[1..]].concat();
        let local = add(graph, Op::Concat(concat), &all)?;
        add(graph, sum, &[local])?
    };
    for user in users {
        replace_operand(graph, user, stats, reduced)?;
    }
    Ok(())
}
