//! Sharded data parallelism: groups parameters into units and adds collectives to the graph.
//!
//! In: a training graph whose parameters are complete on every rank. Out: a graph for R replicas of S ranks that share one copy of the
//! sharded state. Sharded parameters and their state are read through one `all_gather` per parameter, region and unit; every gradient passes
//! through one `reduce_scatter` over its shard group (if S > 1) and one `all_reduce` over the replicas (if R > 1). Gradient statistics and
//! the loss are summed over ranks. Lowering merges the collectives of one unit.
//!
//! The root unit (0) and the last unit of the forward pass are gathered once and stay, as does every unit
//! that is not resharded after forward; the others are gathered again in backward, where casts and layout
//! changes of their parameters are repeated too, so that nothing unsharded outlives the forward pass.
//!
//! With accumulation, gradients are scattered in every micro-step and sums are sharded; replicas are averaged once, over the sums. With
//! `no_sync`, sums are unsharded and every reduction runs once.
//!
//! Source: Zhao et al. 2023 (FSDP), Rajbhandari et al. 2020 (ZeRO).

mod gradients;
pub mod small;
pub mod units;

use crate::loss::evaluation::STATISTICS;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{AllGather, AllReduce, ReduceKind};
use frit_ir::pattern;
use frit_ir::plan::{Strategy, TiSlice, TiVec, UnitId, UnitSpec};
use frit_ir::{Code, DType, Diagnostic, Graph, NodeId, Op, OutputKind, Region, ValueId, nearest};
use std::collections::{BTreeSet, HashMap, HashSet};
pub use units::Wrap;

/// Contract of the pass.
pub const INFO: PassInfo = PassInfo {
    name: "shard",
    summary: "form units of parameters and insert collectives",
    requires: &[Property::Updated],
    ensures: &[Property::Sharded],
    breaks: &[Property::Canonical],
    numerics: Numerics::Reassociates,
};

/// Units that are freed after the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reshard {
    /// Pattern of their names.
    pub units: String,
    /// Number of consecutive ranks that share a copy until backward, which then gathers among them
    /// alone; `None` for all that share the parameters.
    pub ranks: Option<usize>,
}

/// Shards a training graph over `world_size` ranks. With one rank only units are assigned.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Number of ranks.
    pub world_size: usize,
    /// The sharding strategy.
    pub strategy: Strategy,
    /// Ranks that share one copy under `hybrid_shard`.
    pub group: usize,
    /// How parameters are grouped into units.
    pub wrap: Wrap,
    /// Units that are freed after the forward pass; of patterns that cover one, the last counts.
    pub reshard_after_forward: Vec<Reshard>,
    /// Whether gradients are only reduced once all micro-steps are accumulated.
    pub no_sync: bool,
    /// Whether the step is the same on any number of ranks: gradients are summed, and an evaluation leaves its statistics to those
    /// who add those of all batches in order.
    pub reproducible: bool,
    /// The dtype in which ranks exchange gradients.
    pub reduce_dtype: DType,
    /// Parameters that are gathered in one collective regardless of their units; see [`small`].
    pub small_parameters: BTreeSet<String>,
}

impl Pass for Shard {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        graph.world_size = self.world_size;
        let mut assignment = match context.units.is_empty() {
            true => units::assign(graph, &self.wrap)?,
            false => units::known(graph, context),
        };
        if context.units.is_empty() && !self.small_parameters.is_empty() {
            let names: HashMap<ValueId, String> =
                graph.params().map(|(value, p)| (value, p.name.clone())).collect();
            small::into_own_unit(&mut assignment, &self.small_parameters, |v| names[&v].clone());
        }
        for (param, unit) in &assignment.unit_of {
            let node = graph.value(*param).def;
            if let Op::Param(p) = &mut graph.node_mut(node).op {
                p.unit = Some(*unit);
                context.unit_of.insert(p.name.clone(), *unit);
            }
        }
        for (index, unit) in assignment.units.iter_enumerated() {
            let n = assignment.unit_of.iter().filter(|(_, u)| *u == index).count();
            context.remark(
                &frit_ir::Origin::new("", &unit.name),
                format!("unit {index}: {n} parameters; {}", unit.reason),
            );
        }
        for (param, reason) in &assignment.reasons {
            context.remark(&frit_ir::Origin::new(param, ""), format!("parameter: {reason}"));
        }
        let kept = self.reshard(&mut assignment.units)?;
        context.units = assignment.units;
        if self.world_size == 1 {
            return Ok(Changed::Yes);
        }
        let shards = self.strategy.shards(self.world_size, self.group);
        let mesh = Mesh {
            shards,
            replicas: self.world_size / shards,
            sync: !self.no_sync && self.strategy != Strategy::ShardOptimizer,
            reduce: if self.reproducible { ReduceKind::Sum } else { ReduceKind::Mean },
        };
        if mesh.shards > 1 {
            mark_sharded(graph, mesh.sync);
            gather_parameters(graph, &assignment.unit_of, &kept)?;
        }
        gradients::reduce(graph, mesh, self.reduce_dtype)?;
        gradients::reduce_statistics(graph, mesh)?;
        if !self.reproducible {
            reduce_evaluation(graph)?;
        }
        graph.remove_dead();
        graph
            .sort()
            .map_err(|_| Diagnostic::error(Code::PassFailed, "cycle after pass `shard`"))?;
        Ok(Changed::Yes)
    }
}

impl Shard {
    /// For each unit, whether it stays gathered from forward to backward; if not, records how many ranks share it.
    fn reshard(
        &self,
        units: &mut TiSlice<UnitId, UnitSpec>,
    ) -> Result<TiVec<UnitId, bool>, Diagnostic> {
        let freed = matches!(self.strategy, Strategy::FullShard | Strategy::HybridShard);
        let shards = self.strategy.shards(self.world_size, self.group);
        for Reshard { units: pattern, ranks } in &self.reshard_after_forward {
            if !units.iter().any(|u| pattern::matches(pattern, &u.name)) {
                let names: Vec<&str> = units.iter().map(|u| u.name.as_str()).collect();
                let what = format!("`{pattern}` in sharding.reshard_after_forward matches no unit");
                return Err(Diagnostic::error(Code::ShardingPattern, what)
                    .note(format!("the units are {}", names.join(", ")))
                    .help(nearest::advice(pattern, names.iter().copied())));
            }
            if let Some(n) = ranks.filter(|n| freed && (*n == 0 || !shards.is_multiple_of(*n))) {
                let what = format!(
                    "sharding.reshard_after_forward: {n} does not divide the {shards} ranks that share a unit"
                );
                return Err(Diagnostic::error(Code::ShardingPattern, what)
                    .help("take a divisor, such as the number of ranks of a node"));
            }
        }
        // Units are in order of first use, but that of small parameters.
        let last = units.rposition(|u| u.name != small::NAME).unwrap_or(UnitId::ROOT);
        let mut kept = TiVec::with_capacity(units.len());
        for (i, unit) in units.iter_mut_enumerated() {
            let covers = |r: &&Reshard| pattern::matches(&r.units, &unit.name);
            let chosen = self.reshard_after_forward.iter().rfind(covers);
            let ranks = chosen.map(|r| r.ranks.unwrap_or(shards));
            let stays = i == UnitId::ROOT || i >= last || !freed || ranks.is_none_or(|n| n == 1);
            unit.reshard = ranks.filter(|n| !stays && *n < shards);
            kept.push(stays);
        }
        Ok(kept)
    }
}

/// The ranks: `replicas` groups of `shards` consecutive ones.
#[derive(Clone, Copy, Debug)]
struct Mesh {
    shards: usize,
    replicas: usize,
    /// Whether gradients are scattered in every micro-step.
    sync: bool,
    /// How gradients are combined.
    reduce: ReduceKind,
}

/// Marks parameters that belong to a unit, and their state, as sharded; sums of gradients only if they are
/// scattered before they are added.
fn mark_sharded(graph: &mut Graph, sync: bool) {
    for id in graph.order().to_vec() {
        match &mut graph.node_mut(id).op {
            Op::Param(p) => p.sharded = p.unit.is_some(),
            Op::State(s) => s.sharded = s.of.is_some() && (sync || !s.name.is_sum()),
            _ => {}
        }
    }
}

/// Puts an `all_gather` between every sharded parameter and its uses outside the update.
fn gather_parameters(
    graph: &mut Graph,
    unit_of: &[(ValueId, UnitId)],
    kept: &TiSlice<UnitId, bool>,
) -> Result<(), Diagnostic> {
    let users = graph.users();
    for &(param, unit) in unit_of {
        let origin = graph.def(param).origin.by(INFO.name);
        let handed_out =
            |o: &&mut frit_ir::Output| o.value == param && o.kind == OutputKind::Result;
        let gather = |graph: &mut Graph, region| {
            graph
                .add1(Op::AllGather(AllGather { unit }), &[param], origin.clone(), region)
                .map_err(bug(INFO.name))
        };
        let (mut forward, mut backward) = (None, None);
        // Values made from the parameter by casts, rounding and layout changes, the parameter first.
        let mut views = vec![param];
        let mut at = 0;
        while let Some(&view) = views.get(at) {
            at += 1;
            for &user in &users[view.0 as usize] {
                let node = graph.node(user);
                if node.region == Region::Forward && is_view(&node.op) && node.inputs[0] == view {
                    // The magnitude that `quantize` finds is no view.
                    let rounds = matches!(node.op, Op::Quantize(_));
                    let n = if rounds { 1 } else { node.outputs.len() };
                    views.extend(&node.outputs[..n]);
                }
            }
        }
        if graph.outputs.iter_mut().any(|o| handed_out(&o)) {
            let value = *forward.insert(gather(graph, Region::Forward)?);
            graph.outputs.iter_mut().filter(handed_out).for_each(|o| o.value = value);
        }
        let keep = kept[unit];
        let mut in_backward: HashMap<ValueId, ValueId> = HashMap::new();
        let all: HashSet<ValueId> = views.iter().copied().collect();
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
                        let value = repeat_view(graph, view, &all, &mut in_backward)?;
                        replace_operand(graph, user, view, value)?;
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

/// Whether a value is a view of one parameter: a concatenation is of several.
fn is_view(op: &Op) -> bool {
    matches!(op, Op::Cast(_) | Op::Quantize(_)) || op.is_layout() && !matches!(op, Op::Concat(_))
}

/// The value of `view` recomputed in backward from the values in `map`.
fn repeat_view(
    graph: &mut Graph,
    view: ValueId,
    views: &HashSet<ValueId>,
    map: &mut HashMap<ValueId, ValueId>,
) -> Result<ValueId, Diagnostic> {
    if let Some(&value) = map.get(&view) {
        return Ok(value);
    }
    if !views.contains(&view) {
        // Scales stay what they were in the forward pass.
        return Ok(view);
    }
    let node = graph.def(view).clone();
    let mut inputs = Vec::new();
    for &input in &node.inputs {
        inputs.push(repeat_view(graph, input, views, map)?);
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

/// Sums the statistics of an evaluation over ranks.
fn reduce_evaluation(graph: &mut Graph) -> Result<(), Diagnostic> {
    let Some(index) = graph.outputs.iter().position(|o| o.name == STATISTICS) else {
        return Ok(());
    };
    let value = graph.outputs[index].value;
    let sum = Op::AllReduce(AllReduce { reduce: ReduceKind::Sum, unit: None, dtype: None });
    let origin = graph.def(value).origin.by(INFO.name);
    let reduced = graph.add1(sum, &[value], origin, Region::Forward).map_err(bug(INFO.name))?;
    graph.outputs[index].value = reduced;
    Ok(())
}
