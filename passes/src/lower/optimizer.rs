//! Lowers the optimizer step and the moving average of a flat group, once all of its parameters have been visited.

use super::{Lowering, body, internal};
use frit_ir::ops::{ByParamGroup, Concat, FusionKind, Input, OptimizerKind, Slice, StateName};
use frit_ir::plan::{BufferClass, BufferId, Group, GroupId, KernelKind, ParamGroup, Place};
use frit_ir::{
    DType, Diagnostic, Graph, Node, Op, Origin, OutputKind, Region, TensorType, ValueId,
};
use std::collections::{HashMap, HashSet};

/// Operands and results of a kernel that steps several groups, at most: code generation refuses more.
const MAX_POINTERS: usize = 64;

/// Elementwise work on one flat group, such as its step, that may be done in one launch with that of others.
pub(super) struct Step<'a> {
    pub(super) body: Graph,
    pub(super) reads: Vec<Place>,
    pub(super) writes: Vec<Place>,
    pub(super) node: &'a Node,
}

/// The parameter groups of the graph: their hyper-parameters, and the group of each parameter.
#[derive(Default)]
pub(super) struct ParamGroups {
    /// Learning rate and weight decay.
    pub(super) hypers: Vec<[ValueId; 2]>,
    /// The factor of the learning rate that depends on a parameter's shape.
    ratios: Vec<f64>,
    of: HashMap<String, usize>,
    /// The optimizer of each parameter.
    kinds: HashMap<String, OptimizerKind>,
}

impl ParamGroups {
    pub(super) fn new(graph: &Graph) -> Self {
        let mut groups = ParamGroups::default();
        for (_, node) in graph.nodes() {
            let Op::OptimizerStep(step) = &node.op else { continue };
            let Op::Param(param) = &graph.def(node.inputs[0]).op else { continue };
            let (hypers, ratio) = (own(node), ParamGroups::ratio(graph, node));
            let mut known = groups.hypers.iter().zip(&groups.ratios);
            let found = known.position(|(h, r)| (*h, *r) == (hypers, ratio));
            let group = found.unwrap_or_else(|| {
                groups.hypers.push(hypers);
                groups.ratios.push(ratio);
                groups.hypers.len() - 1
            });
            groups.of.insert(param.name.clone(), group);
            groups.kinds.insert(param.name.clone(), step.kind);
        }
        groups
    }

    /// Whether Muon steps a parameter.
    pub(super) fn is_muon(&self, param: &str) -> bool {
        self.kinds.get(param) == Some(&OptimizerKind::Muon)
    }

    /// The number of a parameter's parameter group; frozen parameters have the first.
    pub(super) fn of(&self, param: &str) -> usize {
        self.of.get(param).copied().unwrap_or(0)
    }
}

/// Checks that what every step writes is the next value of the parameter and the states that it reads.
///
/// # Errors
/// If it is not, as of a second step of a parameter.
pub(super) fn check_carried(graph: &Graph) -> Result<(), Diagnostic> {
    let mut carried: HashMap<ValueId, ValueId> = HashMap::new();
    for output in &graph.outputs {
        let OutputKind::Carry(leaf) = output.kind else { continue };
        if carried.insert(leaf, output.value).is_some() {
            return Err(internal(format!("`{}` has two next values", output.name)));
        }
    }
    for (_, node) in graph.nodes() {
        let leaves: Vec<ValueId> = match &node.op {
            Op::OptimizerStep(step) => {
                let states = &node.inputs[2..2 + step.kind.n_states()];
                [&node.inputs[..1], states].concat()
            }
            Op::EmaStep => node.inputs[..1].to_vec(),
            _ => continue,
        };
        let next = leaves.iter().map(|leaf| carried.get(leaf));
        if !next.eq(node.outputs.iter().map(Some)) {
            let what = format!("`{}` computes what is not carried", node.op.name());
            return Err(internal(what).at(&node.origin));
        }
    }
    Ok(())
}

/// The operands that may differ between parameters: learning rate and weight decay.
fn own(node: &Node) -> [ValueId; 2] {
    let Op::OptimizerStep(step) = &node.op else { unreachable!("invariant: a step") };
    let first = 2 + step.kind.n_states();
    [node.inputs[first], node.inputs[first + step.kind.hypers().len() - 1]]
}

/// The operands that all parameters of a group have in common.
fn shared(node: &Node) -> Vec<ValueId> {
    match &node.op {
        Op::OptimizerStep(step) => {
            let own = own(node);
            let scalars = &node.inputs[2 + step.kind.n_states()..];
            scalars.iter().copied().filter(|v| !own.contains(v)).collect()
        }
        Op::EmaStep => node.inputs[2..].to_vec(),
        _ => vec![],
    }
}

impl<'a> Lowering<'a> {
    /// The parameter group of this number, from `offset` on.
    pub(super) fn param_group(&self, number: usize, offset: usize) -> Option<ParamGroup> {
        let key = |mut value: ValueId| loop {
            match &self.graph.def(value).op {
                Op::Hyper(hyper) => return hyper.name.clone(),
                // The base rate is the first operand of the schedule.
                _ => match self.graph.def(value).inputs.first() {
                    Some(&input) => value = input,
                    None => return String::new(),
                },
            }
        };
        let [lr, decay] = *self.param_groups.hypers.get(number)?;
        Some(ParamGroup { offset, lr: key(lr), weight_decay: key(decay) })
    }

    /// Whether this is the last of the `n` nodes of its kind that belong to the group, and are one task.
    ///
    /// # Errors
    /// If it does another thing than the first, which that task cannot do as well.
    pub(super) fn is_last(
        &mut self,
        group: GroupId,
        n: usize,
        node: &'a Node,
    ) -> Result<bool, Diagnostic> {
        let key = (group, node.op.name(), node.region);
        let (seen, first) = self.seen.entry(key).or_insert((0, node));
        *seen += 1;
        if first.op != node.op || shared(first) != shared(node) {
            let unit = self.unit_name(group);
            let name = node.op.name();
            let what = format!("the parameters of unit `{unit}` have a `{name}` each that differ");
            return Err(internal(what).at(&node.origin));
        }
        Ok(*seen == n)
    }

    /// Whether this is the last such node of a group, which has one for each of its parameters.
    pub(super) fn is_last_of_all(
        &mut self,
        group: GroupId,
        node: &'a Node,
    ) -> Result<bool, Diagnostic> {
        self.is_last(group, self.plan.groups[group].segments.len(), node)
    }

    /// This rank's part of the group's state `name`.
    pub(super) fn group_state(
        &self,
        group: GroupId,
        name: &StateName,
    ) -> Result<Place, Diagnostic> {
        let found = self.plan.groups[group].states.iter().find(|s| s.name == *name);
        let found = found.ok_or_else(|| internal(format!("state `{name}` has no buffer")))?;
        Ok(Place { buffer: found.buffer, offset: 0, ty: self.part(group, DType::F32) })
    }

    pub(super) fn master(&self, group: GroupId) -> Place {
        let ty = self.part(group, DType::F32);
        Place { buffer: self.plan.groups[group].master, offset: 0, ty }
    }

    pub(super) fn optimizer_step(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        let Op::OptimizerStep(step) = &node.op else {
            return Err(internal("no optimizer step").at(&node.origin));
        };
        let name = self.param_of(node.inputs[0], node)?;
        let (group, segment) = self.group_of[&name];
        match step.kind {
            OptimizerKind::Adafactor => return self.adafactor_step(group, segment, node),
            OptimizerKind::Muon => return self.muon_step(group, node),
            _ => {}
        }
        if !self.is_last_of_all(group, node)? {
            return Ok(());
        }
        let mut written = vec![self.master(group)];
        for state in step.kind.states(&name) {
            written.push(self.group_state(group, &state)?);
        }
        let gradient = self.gradient.at.get(&group).cloned();
        let gradient = gradient.ok_or_else(|| internal("a group has no gradient"))?;
        let mut reads = vec![written[0].clone(), gradient];
        reads.extend_from_slice(&written[1..]);
        let scalars = &node.inputs[2 + step.kind.n_states()..];
        if let Some(offsets) = param_group_offsets(&self.plan.groups[group]) {
            return self.step_by_param_group(group, offsets, node, scalars, reads, written);
        }
        for scalar in scalars {
            reads.push(self.place(*scalar)?);
        }
        let mut body = body::of_op(node.op.clone(), &types(&reads))?;
        self.write_copies(group, &mut body, &mut written)?;
        self.steps.push(Step { body, reads, writes: written, node });
        Ok(())
    }

    /// Emits the steps of all groups, and then their averages.
    pub(super) fn finish_steps(&mut self) -> Result<(), Diagnostic> {
        let (steps, averages) =
            (std::mem::take(&mut self.steps), std::mem::take(&mut self.averages));
        self.in_few_launches(steps)?;
        self.in_few_launches(averages)
    }

    /// Emits work on groups, in as few launches as code generation makes of it.
    pub(super) fn in_few_launches(&mut self, mut steps: Vec<Step<'a>>) -> Result<(), Diagnostic> {
        // What several read is one operand.
        let mut pointers: HashSet<(BufferId, usize, bool)> = HashSet::new();
        let mut together: Vec<Step<'a>> = Vec::new();
        // Kernels of steps that write equally many results take fewer registers.
        steps.sort_by_key(|step| step.writes.len());
        for step in steps {
            let reads = step.reads.iter().map(|p| (p.buffer, p.offset, false));
            let writes = step.writes.iter().map(|p| (p.buffer, p.offset, true));
            let more: HashSet<_> = reads.chain(writes).collect();
            let n = pointers.union(&more).count();
            let alike = together.iter().all(|s| s.writes.len() == step.writes.len());
            let joins = self.options.multi_tensor && n <= MAX_POINTERS && alike;
            if !together.is_empty() && !joins {
                self.in_one_launch(std::mem::take(&mut together))?;
                pointers.clear();
            }
            pointers.extend(more);
            together.push(step);
        }
        self.in_one_launch(together)
    }

    /// Emits work on groups in one launch, or in one each if that cannot be.
    fn in_one_launch(&mut self, steps: Vec<Step<'a>>) -> Result<(), Diagnostic> {
        if steps.len() > 1 {
            let bodies: Vec<(Graph, Vec<Place>)> =
                steps.iter().map(|s| (s.body.clone(), s.reads.clone())).collect();
            let (body, reads) = body::joined(&bodies)?;
            let region = FusionKind::MultiTensor;
            if (self.options.generated)(&body, region) {
                let writes = steps.iter().flat_map(|s| s.writes.clone()).collect();
                let kind = KernelKind::Generated;
                self.run_kernel(kind, region, body, reads, writes, steps[0].node);
                return Ok(());
            }
        }
        for Step { body, reads, writes, node } in steps {
            let kind = self.pointwise_kind(&body);
            self.run_kernel(kind, FusionKind::Pointwise, body, reads, writes, node);
        }
        Ok(())
    }

    pub(super) fn library_kind(&self, body: &Graph) -> KernelKind {
        if (self.options.library)(body) { KernelKind::Library } else { KernelKind::Interpreted }
    }

    /// A step whose learning rate or weight decay differs between the parameters of a group.
    fn step_by_param_group(
        &mut self,
        group: GroupId,
        offsets: Place,
        node: &'a Node,
        scalars: &[ValueId],
        mut reads: Vec<Place>,
        mut written: Vec<Place>,
    ) -> Result<(), Diagnostic> {
        let groups: Vec<[ValueId; 2]> = self.hypers_of(group);
        let mut body = Body::new();
        let mut operands: Vec<ValueId> =
            reads.iter().map(|p| body.input(p.ty.clone())).collect::<Result<_, _>>()?;
        let table = body.input(offsets.ty.clone())?;
        reads.push(offsets);
        for scalar in scalars {
            let varies = [0, 1]
                .into_iter()
                .find(|&i| own(node)[i] == *scalar && groups.iter().any(|g| g[i] != groups[0][i]));
            let Some(which) = varies else {
                reads.push(self.place(*scalar)?);
                operands.push(body.input(self.graph.ty(*scalar).clone())?);
                continue;
            };
            let values: Vec<ValueId> = groups.iter().map(|g| g[which]).collect();
            let table = (group, Some(table));
            operands.push(self.varying(&mut body, &mut reads, table, &values, node)?);
        }
        let results = body.add(node.op.clone(), &operands)?;
        let mut body = body.done(&results);
        self.write_copies(group, &mut body, &mut written)?;
        self.steps.push(Step { body, reads, writes: written, node });
        Ok(())
    }

    /// The operand of a step that has one of these values for each parameter group of a flat group, whose table of offsets is
    /// in the body if there are several.
    pub(super) fn varying(
        &mut self,
        body: &mut Body,
        reads: &mut Vec<Place>,
        (group, table): (GroupId, Option<ValueId>),
        values: &[ValueId],
        node: &Node,
    ) -> Result<ValueId, Diagnostic> {
        let differ = values.iter().any(|v| *v != values[0]);
        let Some(table) = table.filter(|_| differ) else {
            let place = self.place(values[0])?;
            let value = body.input(place.ty.clone())?;
            reads.push(place);
            return Ok(value);
        };
        let place = self.vector(values, node)?;
        let all = body.input(place.ty.clone())?;
        reads.push(place);
        self.choice(body, (group, table), |body, i| body.element(all, i))
    }

    /// For each element of a group the value of its parameter group, by its number.
    pub(super) fn choice(
        &self,
        body: &mut Body,
        (group, table): (GroupId, ValueId),
        mut value: impl FnMut(&mut Body, usize) -> Result<ValueId, Diagnostic>,
    ) -> Result<ValueId, Diagnostic> {
        let mut operands = vec![value(body, 0)?];
        for i in 1..self.plan.groups[group].param_groups.len() {
            operands.push(body.element(table, i - 1)?);
            operands.push(value(body, i)?);
        }
        let len = self.plan.groups[group].shard_numel;
        Ok(body.add(Op::ByParamGroup(ByParamGroup { len }), &operands)?[0])
    }

    /// Learning rate and weight decay of each parameter group of a flat group.
    pub(super) fn hypers_of(&self, group: GroupId) -> Vec<[ValueId; 2]> {
        self.numbers_of(group).map(|i| self.param_groups.hypers[i]).collect()
    }

    /// The factor of the learning rate of each parameter group of a flat group.
    pub(super) fn ratios_of(&self, group: GroupId) -> Vec<f64> {
        self.numbers_of(group).map(|i| self.param_groups.ratios[i]).collect()
    }

    fn numbers_of(&self, group: GroupId) -> impl Iterator<Item = usize> {
        let group = &self.plan.groups[group];
        let number = move |g: &ParamGroup| {
            let segment = group.segments.iter().find(|s| s.offset >= g.offset);
            segment.map_or(0, |s| self.param_groups.of(&self.plan.params[s.param].name))
        };
        group.param_groups.iter().map(number)
    }

    /// Packs scalars into a vector.
    fn vector(&mut self, values: &[ValueId], node: &Node) -> Result<Place, Diagnostic> {
        let mut body = Body::new();
        let (mut reads, mut parts) = (Vec::new(), Vec::new());
        for value in values {
            let place = Place { ty: TensorType::new(DType::F32, [1]), ..self.place(*value)? };
            parts.push(body.input(place.ty.clone())?);
            reads.push(place);
        }
        let all = body.add(Op::Concat(Concat { axis: 0 }), &parts)?;
        let ty = TensorType::new(DType::F32, [values.len()]);
        let place = self.workspace("by parameter group", BufferClass::State, ty);
        let (body, region) = (body.done(&all), FusionKind::Pointwise);
        let kind = self.library_kind(&body);
        self.run_kernel(kind, region, body, reads, vec![place.clone()], node);
        Ok(place)
    }

    pub(super) fn ema_step(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        let name = self.param_of(node.inputs[0], node)?;
        let (group, _) = self.group_of[&name];
        if !self.is_last_of_all(group, node)? {
            return Ok(());
        }
        let average = self.group_state(group, &StateName::Ema)?;
        let mut reads = vec![average.clone(), self.master(group)];
        for scalar in &node.inputs[2..] {
            reads.push(self.place(*scalar)?);
        }
        let body = body::of_op(node.op.clone(), &types(&reads))?;
        self.averages.push(Step { body, reads, writes: vec![average], node });
        Ok(())
    }
}

pub(super) fn types(places: &[Place]) -> Vec<TensorType> {
    places.iter().map(|p| p.ty.clone()).collect()
}

/// The table of parameter groups of a group that has several.
pub(super) fn param_group_offsets(group: &Group) -> Option<Place> {
    let ty = TensorType::new(DType::I64, [group.param_groups.len().saturating_sub(1)]);
    group.param_group_offsets.map(|buffer| Place { buffer, offset: 0, ty })
}

/// Builder for a kernel body.
pub(super) struct Body {
    graph: Graph,
    n_inputs: usize,
}

impl Body {
    pub(super) fn new() -> Self {
        Body { graph: Graph::new("kernel"), n_inputs: 0 }
    }

    pub(super) fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, Diagnostic> {
        let added = self.graph.add(op, inputs, Origin::none(), Region::Forward);
        added.map_err(crate::pass::bug("lower"))
    }

    pub(super) fn input(&mut self, ty: TensorType) -> Result<ValueId, Diagnostic> {
        let name = self.n_inputs.to_string();
        self.n_inputs += 1;
        Ok(self.add(Op::Input(Input { name, ty }), &[])?[0])
    }

    /// Element `i` of a vector.
    fn element(&mut self, vector: ValueId, i: usize) -> Result<ValueId, Diagnostic> {
        let slice = Slice { start: vec![i], size: vec![1], step: vec![1] };
        Ok(self.add(Op::Slice(slice), &[vector])?[0])
    }

    pub(super) fn done(mut self, results: &[ValueId]) -> Graph {
        for (i, result) in results.iter().enumerate() {
            self.graph.add_output(&i.to_string(), *result, OutputKind::Result);
        }
        self.graph
    }
}
