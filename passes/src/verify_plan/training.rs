//! Verifies that the update is the declared one.
//!
//! P301  every parameter has exactly one location: one segment of one group, or a buffer
//! P302  exactly one optimizer step writes each trainable parameter, with its group or, with
//!       Adafactor, separately; none writes a frozen one
//! P303  the backward pass is seeded once, with scale / (C·A), or C·A·N if the step is reproducible
//! P304  gradients are unscaled once, by a factor of capacity C·A·N
//! P305  the norm and the finite check include every trainable group's gradient exactly once
//! P306  with several ranks, the statistics that decide whether to skip the step are summed over
//!       ranks
//! P307  the optimizer reads the gradient, factor and finite flag that were checked
//! P317  with a moving average, every trainable group has one averaging step, after the optimizer
//!       step and with the same finite flag
//! P312  parameter groups begin at parameter boundaries, and the optimizer reads these boundaries
//! P313  loss scale and step count change only in the update, depending on the finite flag that
//!       was checked
//! P316  optimizer state and step counts are initially zero, the loss scale positive

use super::host::home;
use super::{adafactor, broken, muon};
use frit_ir::ops::StateName;
use frit_ir::plan::{
    Action, BufferId, GroupId, ParamGroup, ParamId, PhaseName, Place, Plan, TaskId, TiSlice, TiVec,
};
use frit_ir::{Code, Diagnostic, Graph, Node, Op, ValueId};
use std::collections::{HashMap, HashSet};

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    owners(plan, found);
    first_values(plan, found);
    let n = (plan.loss_capacity * plan.reproducible.unwrap_or(plan.accumulation)) as f64;
    let mut seeds = 0;
    let mut unscaled = None;
    let mut counted: HashMap<GroupId, usize> = HashMap::new();
    let mut steps: TiVec<GroupId, usize> = vec![0; plan.groups.len()].into();
    let mut averages: TiVec<GroupId, usize> = vec![0; plan.groups.len()].into();
    let mut matrices = muon::Matrices::new(plan);
    for (i, task) in plan.tasks.iter_enumerated() {
        let Action::Kernel { kernel, reads, writes } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        for (_, node) in body.nodes() {
            match &node.op {
                Op::LossScale(op) => {
                    seeds += 1;
                    if (op.factor * n - 1.0).abs() > 1e-9 {
                        let message = format!("seed factor {} is not 1/{n}", op.factor);
                        found.push(broken(plan, Code::BackwardSeed, i, message));
                    }
                }
                Op::Unscale(op) => {
                    if unscaled.is_some() {
                        found.push(broken(
                            plan,
                            Code::Unscaling,
                            i,
                            "gradients are unscaled twice".into(),
                        ));
                    }
                    let capacity =
                        (plan.loss_capacity * plan.accumulation * plan.world_size) as f64;
                    if op.capacity != capacity {
                        let message = format!("capacity {} is not {capacity}", op.capacity);
                        found.push(broken(plan, Code::Unscaling, i, message));
                    }
                    unscaled = Some((i, writes.clone()));
                }
                Op::GradStats(_) => {
                    for read in reads {
                        if let Some(g) = plan.gradients.iter().find(|g| g.place == *read) {
                            *counted.entry(g.group).or_default() += 1;
                        }
                    }
                }
                Op::UpdateLossScale(_) | Op::UpdateStep => {
                    let update = plan.tasks_of(PhaseName::Update);
                    let flag = unscaled.as_ref().and_then(|(_, results)| results.get(1));
                    if !update.contains(&i) || flag.is_none_or(|flag| !reads.contains(flag)) {
                        let message = "does not change once per step by the finite flag";
                        found.push(broken(plan, Code::ScalerUpdate, i, message.into()));
                    }
                }
                Op::OptimizerStep(_) => {
                    let used = Used::of(body, node, reads, writes);
                    step(plan, i, &used, &unscaled, &mut steps, found);
                }
                Op::Adafactor(_) => {
                    let checked = unscaled.as_ref().map(|(_, results)| &results[..]);
                    if let Some(group) = adafactor::verify(plan, i, checked, found) {
                        steps[group] += 1;
                    }
                }
                Op::MuonMomentum(_) | Op::MuonStep(_) => {
                    let used = Used::of(body, node, reads, writes);
                    let checked = unscaled.as_ref().map(|(_, results)| &results[..]);
                    match matrices.verify(i, (body, node), &used, checked) {
                        Ok(Some(group)) => steps[group] += plan.groups[group].segments.len(),
                        Ok(None) => {}
                        Err(message) => {
                            found.push(broken(plan, Code::MuonParts, i, message.into()));
                        }
                    }
                }
                Op::EmaStep => {
                    let used = Used::of(body, node, reads, writes);
                    let master = used.operands[1].map(|p| home(plan, i, p).buffer);
                    let group = plan.groups.position(|g| Some(g.master) == master);
                    let flag = unscaled.as_ref().and_then(|(_, results)| results.get(1));
                    match group {
                        Some(g)
                            if steps[g] == plan.groups[g].segments.len()
                                && flag.is_some_and(|f| used.reads.contains(&f)) =>
                        {
                            averages[g] += 1;
                        }
                        _ => {
                            let message = "averages no parameters of a step that was taken".into();
                            found.push(broken(plan, Code::MovingAverage, i, message));
                        }
                    }
                }
                _ => {}
            }
        }
    }
    if seeds != 1 {
        found.push(Diagnostic::error(
            Code::BackwardSeed,
            format!("the backward pass has {seeds} seeds"),
        ));
    }
    for (i, group) in plan.groups.iter_enumerated() {
        let unit = &plan.units[group.unit].name;
        let expected = usize::from(group.trainable);
        let parameters = expected * group.segments.len();
        if steps[i] != parameters {
            let message =
                format!("unit `{unit}`: {} parameters are stepped, not {parameters}", steps[i]);
            found.push(Diagnostic::error(Code::OptimizerSteps, message));
        }
        let kept = group.states.iter().any(|s| s.name == StateName::Ema);
        if averages[i] != usize::from(kept) {
            let message = format!("the average of unit `{unit}` takes {} steps", averages[i]);
            found.push(Diagnostic::error(Code::MovingAverage, message));
        }
        let begins = |g: &ParamGroup| group.segments.iter().any(|s| s.offset == g.offset);
        if !group.param_groups.iter().skip(1).all(begins) {
            let message = format!("a parameter group of unit `{unit}` begins inside a parameter");
            found.push(Diagnostic::error(Code::ParameterGroups, message));
        }
        let n = counted.get(&i).copied().unwrap_or(0);
        if n != expected {
            let message = format!("the norm counts gradients of unit `{unit}` {n} times");
            found.push(Diagnostic::error(Code::StatisticsMissing, message));
        }
    }
    match unscaled {
        None => found.push(Diagnostic::error(Code::Unscaling, "gradients are never unscaled")),
        Some((i, _)) if plan.world_size > 1 && !reduced_before(plan, i) => {
            let message = "statistics are not summed over ranks".into();
            found.push(broken(plan, Code::StatisticsOfOneRank, i, message));
        }
        Some(_) => {}
    }
}

pub(super) fn owners(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut owners: TiVec<ParamId, usize> = vec![0; plan.params.len()].into();
    for group in &plan.groups {
        for segment in &group.segments {
            owners[segment.param] += 1;
        }
    }
    for (param, n) in plan.params.iter().zip(owners) {
        let expected = usize::from(matches!(param.home, frit_ir::plan::ParamHome::Group { .. }));
        if n != expected {
            let message = format!("parameter `{}` has {n} owners, not {expected}", param.name);
            found.push(Diagnostic::error(Code::Owners, message));
        }
    }
}

fn first_values(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let of_params = plan.groups.iter().flat_map(|g| &g.states).map(|s| (&s.name, s.init));
    for (name, init) in of_params.chain(plan.states.iter().map(|s| (&s.name, s.init))) {
        let fits = if *name == StateName::LossScale { init > 0.0 } else { init == 0.0 };
        if !fits {
            found.push(Diagnostic::error(
                Code::FirstValues,
                format!("state `{name}` begins at {init}"),
            ));
        }
    }
}

/// The places that one node of a kernel works on; several groups may be stepped by one kernel.
pub(super) struct Used<'a> {
    /// What the node depends on.
    pub(super) reads: Vec<&'a Place>,
    /// Each operand, if it is read from memory.
    pub(super) operands: Vec<Option<&'a Place>>,
    /// Where each result is written, if it is.
    pub(super) written: Vec<Option<&'a Place>>,
}

impl<'a> Used<'a> {
    fn of(body: &Graph, node: &Node, reads: &'a [Place], writes: &'a [Place]) -> Used<'a> {
        let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
        let at: HashMap<ValueId, &Place> = inputs.map(|(_, n)| n.outputs[0]).zip(reads).collect();
        let (mut open, mut seen) = (node.inputs.clone(), HashSet::new());
        while let Some(value) = open.pop() {
            if seen.insert(value) {
                open.extend(&body.def(value).inputs);
            }
        }
        let written = |value: &ValueId| {
            let result = body.outputs.iter().position(|o| o.value == *value);
            result.and_then(|i| writes.get(i))
        };
        Used {
            reads: seen.iter().filter_map(|v| at.get(v).copied()).collect(),
            operands: node.inputs.iter().map(|v| at.get(v).copied()).collect(),
            written: node.outputs.iter().map(written).collect(),
        }
    }
}

fn step(
    plan: &Plan,
    task: TaskId,
    used: &Used<'_>,
    unscaled: &Option<(TaskId, Vec<Place>)>,
    steps: &mut TiSlice<GroupId, usize>,
    found: &mut Vec<Diagnostic>,
) {
    let written = used.written[0].map(|p| home(plan, task, p));
    let of = |written: &Place| plan.groups.position(|g| g.master == written.buffer);
    let Some((written, group)) = written.and_then(|w| of(&w).map(|group| (w, group))) else {
        found.push(broken(
            plan,
            Code::OptimizerSteps,
            task,
            "an optimizer step of no group".into(),
        ));
        return;
    };
    let g = &plan.groups[group];
    if written.offset == 0 && written.ty.shape.numel() == g.shard_numel {
        steps[group] += g.segments.len();
    } else {
        found.push(broken(plan, Code::OptimizerSteps, task, "does not step a whole group".into()));
    }
    let checked = unscaled.as_ref().is_some_and(|(_, results)| {
        results.len() == 4 && results[..2].iter().all(|r| used.reads.contains(&r))
    });
    let gradient = plan.gradients.iter().find(|g| g.group == group).map(|g| &g.place);
    if gradient.is_none() || used.operands[1] != gradient || !checked {
        let message = "does not read the gradient, factor and finite flag that were checked";
        found.push(broken(plan, Code::OptimizerOperands, task, message.into()));
    }
    if g.param_group_offsets.is_some_and(|b| used.reads.iter().all(|r| r.buffer != b)) {
        let message = "does not read where its parameter groups begin".into();
        found.push(broken(plan, Code::ParameterGroups, task, message));
    }
}

/// Whether what `unscale` reads comes, in the update phase, from an all-reduce: its own operand, or an
/// operand of what made it.
fn reduced_before(plan: &Plan, unscale: TaskId) -> bool {
    let mut wanted: Vec<BufferId> =
        plan.tasks[unscale].action.reads().iter().map(|p| p.buffer).collect();
    for task in plan.tasks[..unscale].iter().rev() {
        if task.action.writes().iter().any(|p| wanted.contains(&p.buffer)) {
            if matches!(task.action, Action::AllReduce { group: None, .. }) {
                return true;
            }
            wanted.extend(task.action.reads().iter().map(|p| p.buffer));
        }
    }
    false
}
