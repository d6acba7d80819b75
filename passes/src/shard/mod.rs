//! Fully sharded data parallelism: parameters into units, collectives into the graph.
//!
//! In: a training graph whose parameters are whole on every rank. Out: with `full_shard`, parameters and
//! their state are sharded, read through one `all_gather` per parameter, region and unit, and each
//! gradient passes through one `reduce_scatter`; with `no_shard`, each gradient passes through one
//! `all_reduce`. Statistics of gradients and the loss are summed over ranks. Lowering merges the
//! collectives of one unit.
//!
//! The root unit (0) and the last unit of the forward pass are gathered once and stay; every other
//! unit is gathered again in backward, where casts and layout changes of its parameters are repeated
//! too, so that nothing unsharded outlives the forward pass.
//!
//! Source: Zhao et al. 2023 (FSDP), Rajbhandari et al. 2020 (ZeRO).

pub mod units;

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{AllGather, AllReduce, ParamKind, ReduceKind, ReduceScatter};
use frit_ir::{Diagnostic, Graph, NodeId, Op, OutputKind, Region, ValueId};
use std::collections::HashMap;
pub use units::Wrap;

/// Contract of the pass.
pub const INFO: PassInfo = PassInfo {
    name: "shard",
    summary: "put parameters into units and collectives into the graph",
    requires: &[Property::Updated],
    ensures: &[Property::Sharded],
    breaks: &[Property::Canonical],
    numerics: Numerics::Reassociates,
};

/// What is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Parameters, gradients and optimizer state (ZeRO-3).
    FullShard,
    /// Nothing; gradients are averaged by all-reduce (DDP).
    NoShard,
}

impl Strategy {
    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::FullShard => "full_shard",
            Strategy::NoShard => "no_shard",
        }
    }
}

/// Shards a training graph over `world_size` ranks. With one rank only units are assigned.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Number of ranks.
    pub world_size: usize,
    /// What is sharded.
    pub strategy: Strategy,
    /// How parameters are grouped into units.
    pub wrap: Wrap,
}

impl Pass for Shard {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        graph.world_size = self.world_size;
        let assignment = units::assign(graph, &self.wrap);
        for (param, unit) in &assignment.unit_of {
            let node = graph.value(*param).def;
            if let Op::Param(p) = &mut graph.node_mut(node).op {
                p.unit = Some(*unit);
            }
        }
        for (index, unit) in assignment.units.iter().enumerate() {
            let n = assignment.unit_of.iter().filter(|(_, u)| *u == index).count();
            context.remark(
                &frit_ir::Origin::new("", &unit.name),
                format!("unit {index}: {n} parameters; {}", unit.reason),
            );
        }
        let last_unit = assignment.units.len() - 1;
        context.units = assignment.units;
        if self.world_size == 1 {
            return Ok(Changed::Yes);
        }
        let full = self.strategy == Strategy::FullShard;
        if full {
            mark_sharded(graph);
            gather_parameters(graph, &assignment.unit_of, last_unit)?;
        }
        reduce_gradients(graph, full)?;
        reduce_statistics(graph, full)?;
        graph.remove_dead();
        graph.sort().map_err(|_| Diagnostic::error("B002", "cycle after pass `shard`"))?;
        Ok(Changed::Yes)
    }
}

/// Marks parameters that belong to a unit, and their state, as sharded.
fn mark_sharded(graph: &mut Graph) {
    for id in graph.order().to_vec() {
        match &mut graph.node_mut(id).op {
            Op::Param(p) => p.sharded = p.unit.is_some(),
            Op::State(s) => s.sharded = s.of.is_some(),
            _ => {}
        }
    }
}

/// Puts an `all_gather` between every sharded parameter and its uses outside the update.
fn gather_parameters(
    graph: &mut Graph,
    unit_of: &[(ValueId, usize)],
    last_unit: usize,
) -> Result<(), Diagnostic> {
    let users = graph.users();
    for &(param, unit) in unit_of {
        let origin = graph.def(param).origin.by(INFO.name);
        let gather = |graph: &mut Graph, region| {
            graph
                .add1(Op::AllGather(AllGather { unit }), &[param], origin.clone(), region)
                .map_err(bug(INFO.name))
        };
        let (mut forward, mut backward) = (None, None);
        // Values made from the parameter alone by casts and layout changes, the parameter first.
        let mut views = vec![param];
        let mut at = 0;
        while let Some(&view) = views.get(at) {
            at += 1;
            for &user in &users[view.0 as usize] {
                let node = graph.node(user);
                if node.region == Region::Forward && is_view(&node.op) {
                    views.extend(&node.outputs);
                }
            }
        }
        let keep = unit == 0 || unit == last_unit;
        let mut in_backward: HashMap<ValueId, ValueId> = HashMap::new();
        for view in views {
            for &user in &users[view.0 as usize] {
                match graph.node(user).region {
                    Region::Forward if view == param => {
                        let value = match forward {
                            Some(value) => value,
                            None => *forward.insert(gather(graph, Region::Forward)?),
                        };
                        replace_operand(graph, user, view, value)?;
                    }
                    Region::Backward | Region::Recompute(_) => {
                        if keep && view != param {
                            continue;
                        }
                        let source = match (keep, forward, backward) {
                            (true, Some(value), _) | (_, _, Some(value)) => value,
                            (true, None, _) => *forward.insert(gather(graph, Region::Forward)?),
                            (false, ..) => *backward.insert(gather(graph, Region::Backward)?),
                        };
                        // Forward views read the forward gather by now.
                        in_backward.insert(param, source);
                        in_backward.extend(forward.map(|value| (value, source)));
                        let value = repeat_view(graph, view, &mut in_backward)?;
                        replace_operand(graph, user, view, value)?;
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

fn is_view(op: &Op) -> bool {
    matches!(op, Op::Cast(_)) || op.is_layout()
}

/// The value of `view` computed again in backward, from what `map` already holds.
fn repeat_view(
    graph: &mut Graph,
    view: ValueId,
    map: &mut HashMap<ValueId, ValueId>,
) -> Result<ValueId, Diagnostic> {
    if let Some(&value) = map.get(&view) {
        return Ok(value);
    }
    let node = graph.def(view).clone();
    let mut inputs = Vec::new();
    for &input in &node.inputs {
        inputs.push(repeat_view(graph, input, map)?);
    }
    let origin = node.origin.by(INFO.name);
    let outputs = graph.add(node.op, &inputs, origin, Region::Backward).map_err(bug(INFO.name))?;
    map.extend(node.outputs.iter().copied().zip(outputs));
    Ok(map[&view])
}

fn replace_operand(
    graph: &mut Graph,
    user: NodeId,
    from: ValueId,
    to: ValueId,
) -> Result<(), Diagnostic> {
    let swap = |v: &ValueId| if *v == from { to } else { *v };
    let inputs = graph.node(user).inputs.iter().map(swap).collect();
    graph.set_inputs(user, inputs).map_err(bug(INFO.name))
}

/// Puts a reduction behind the gradient of every trainable parameter, before it is accumulated.
fn reduce_gradients(graph: &mut Graph, full: bool) -> Result<(), Diagnostic> {
    let units: HashMap<String, usize> = graph
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
    let mut reduced = HashMap::new();
    for (name, value) in gradients {
        let raw = accumulated(graph, value).unwrap_or(value);
        let unit = units[&name];
        let op = if full {
            Op::ReduceScatter(ReduceScatter { unit })
        } else {
            Op::AllReduce(AllReduce { reduce: ReduceKind::Mean, unit: Some(unit) })
        };
        let origin = graph.def(raw).origin.by(INFO.name);
        let result = graph.add1(op, &[raw], origin, Region::Backward).map_err(bug(INFO.name))?;
        // One value may be the gradient of two parameters: each gets its own reduction.
        reduced.insert((raw, name), result);
    }
    let by_raw = |reduced: &HashMap<(ValueId, String), ValueId>, raw, name: &str| {
        reduced.get(&(raw, name.to_string())).copied()
    };
    for id in graph.order().to_vec() {
        let node = graph.node(id);
        let owner = owner_of(graph, id);
        let stats = matches!(node.op, Op::GradStats);
        if owner.is_none() && !stats {
            continue;
        }
        let names: Vec<String> = match owner {
            Some(name) => vec![name; node.inputs.len()],
            None => gradient_names(graph),
        };
        let inputs: Vec<ValueId> = node
            .inputs
            .iter()
            .zip(&names)
            .map(|(v, name)| by_raw(&reduced, *v, name).unwrap_or(*v))
            .collect();
        graph.set_inputs(id, inputs).map_err(bug(INFO.name))?;
    }
    for i in 0..graph.outputs.len() {
        let output = &graph.outputs[i];
        if output.kind == OutputKind::Gradient
            && let Some(value) = by_raw(&reduced, output.value, &output.name)
        {
            graph.outputs[i].value = value;
        }
    }
    Ok(())
}

/// The gradient of this micro-step, if `value` is its sum with the state `grad_sum`.
fn accumulated(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let node = graph.def(value);
    let state = node
        .inputs
        .iter()
        .position(|v| matches!(&graph.def(*v).op, Op::State(s) if s.name == "grad_sum"))?;
    (node.inputs.len() == 2).then(|| node.inputs[1 - state])
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
        Op::State(s) if s.name == "grad_sum" => s.of.clone(),
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

/// Sums [non-finite, Σg², count, loss] over ranks. Without sharding the first two are already global.
fn reduce_statistics(graph: &mut Graph, full: bool) -> Result<(), Diagnostic> {
    let Some(unscale) =
        graph.nodes().find(|(_, n)| matches!(n.op, Op::Unscale(_))).map(|(id, _)| id)
    else {
        return Ok(());
    };
    let stats = graph.node(unscale).inputs[0];
    let sum = Op::AllReduce(AllReduce { reduce: ReduceKind::Sum, unit: None });
    let origin = graph.node(unscale).origin.by(INFO.name);
    let add = |graph: &mut Graph, op: Op, inputs: &[ValueId]| {
        graph.add1(op, inputs, origin.clone(), Region::Update).map_err(bug(INFO.name))
    };
    let reduced = if full {
        add(graph, sum, &[stats])?
    } else {
        let Op::Concat(concat) = graph.def(stats).op.clone() else {
            return Err(Diagnostic::error("B003", "statistics are not a concatenation"));
        };
        let parts = graph.def(stats).inputs.clone();
        let local = add(graph, Op::Concat(concat.clone()), &parts[1..])?;
        let global = add(graph, sum, &[local])?;
        add(graph, Op::Concat(concat), &[parts[0], global])?
    };
    let users = graph.users();
    for user in users[stats.0 as usize].clone() {
        // The reduction itself reads what it reduces.
        if !matches!(graph.node(user).op, Op::AllReduce(_)) {
            replace_operand(graph, user, stats, reduced)?;
        }
    }
    Ok(())
}
