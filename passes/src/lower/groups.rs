//! Flat groups: parameters of one unit with the same optimizer that are stored in the same dtype and are
//! gathered in the same dtypes, contiguous and sorted by their hyper-parameters. Each starts at a multiple of 16 bytes
//! in the narrowest dtype in which it is stored, gathered or cast, and has room behind it for the zeros with which it is padded;
//! the group is padded to a multiple of 128 bytes per rank. Padding is zero and stays zero.
//!
//! An evaluation keeps the groups of its training plan, so that each rank owns the same elements of every parameter in both; parameters
//! that it does not read are gaps.

use super::evaluation::is_evaluation;
use super::{Lowering, internal};
use frit_ir::ops::{ParamKind, StateName};
use frit_ir::plan::{
    Arena, BufferClass, Group, GroupId, GroupState, ParamGroup, ParamHome, ParamId, ParamSpec,
    Plan, Segment, UnitId,
};
use frit_ir::shape::MAX_ELEMENTS;
use frit_ir::{Code, DType, Diagnostic, Op, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Alignment of parameters in bytes, in the narrowest dtype of their group.
pub(super) const PARAM_ALIGNMENT: usize = 16;
/// Every rank's part is a multiple of this number of bytes.
const PART_ALIGNMENT: usize = 128;

/// Maximum elements of a group: an optimizer's sums over it are tensors of a few more elements.
const MAX_GROUP: usize = MAX_ELEMENTS / 2;

/// Offsets of the parameters of a group.
struct Layout {
    dtype: DType,
    segments: Vec<Segment>,
    numel: usize,
    shard_numel: usize,
    sharded: bool,
}

/// Optimizer state of every trainable group.
struct Updated {
    /// The states: name, initial value, and whether each rank holds only its part.
    states: Vec<(StateName, f64, bool)>,
    /// Whether the optimizer steps one parameter after the other.
    by_parameter: bool,
}

impl Lowering<'_> {
    pub(super) fn make_groups(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        self.trace_sharded_values();
        let dtypes = self.gather_dtypes();
        let trains = !is_evaluation(graph);
        let trained = self.options.trained.map(groups_by_name).unwrap_or_default();
        let mut shared: BTreeMap<GroupId, HashMap<String, ParamId>> = BTreeMap::new();
        // By unit, whether frozen, whether sharded, whether Muon steps them, and the dtypes in which they are held and gathered.
        type Key = (UnitId, bool, bool, bool, DType, BTreeSet<DType>);
        let mut members: BTreeMap<Key, Vec<ParamId>> = BTreeMap::new();
        for (value, param) in graph.params() {
            let index = self.plan.params.next_key();
            if let Some(unit) = param.unit {
                if self.plan.units.get(unit).is_none() {
                    let what =
                        format!("parameter `{}` is of unit {unit}, which is none", param.name);
                    return Err(internal(what).at(&graph.def(value).origin));
                }
                if param.ty.dtype != DType::F32 {
                    return Err(Diagnostic::error(
                        Code::ParameterDtype,
                        format!("parameter `{}` is {}", param.name, param.ty.dtype),
                    )
                    .at(&graph.def(value).origin)
                    .help("export the model with float32 weights"));
                }
                if let Some(group) = trained.get(param.name.as_str()) {
                    let held = self.options.trained.map(|plan| &plan.groups[*group]);
                    if held.is_some_and(|group| group.sharded != param.sharded) {
                        let what =
                            format!("parameter `{}` is not sharded as in the training", param.name);
                        return Err(internal(what).at(&graph.def(value).origin));
                    }
                    shared.entry(*group).or_default().insert(param.name.clone(), index);
                } else {
                    let trainable = trains && param.kind == ParamKind::Trainable;
                    let dtypes = dtypes.get(&param.name).cloned().unwrap_or_default();
                    let held = graph.ty(value).dtype;
                    let muon = self.param_groups.is_muon(&param.name);
                    let key = (unit, !trainable, param.sharded, muon, held, dtypes);
                    members.entry(key).or_default().push(index);
                }
            }
            self.plan.params.push(ParamSpec {
                name: param.name.clone(),
                ty: param.ty.clone(),
                kind: param.kind,
                reason: param.reason.clone(),
                init: param.init.clone(),
                home: ParamHome::Unused,
                digest: None,
            });
        }
        for (group, params) in shared {
            self.share_group(group, &params, &dtypes);
        }
        for ((unit, frozen, sharded, muon, held, dtypes), mut params) in members {
            let by_parameter = self.steps_by_parameter();
            let updated = Updated { states: self.state_names(&params), by_parameter };
            // Parameters with the same hyper-parameters are contiguous and, within them, those that are cast together.
            let is_cast =
                |p: &ParamId| self.cast_dtypes.contains_key(self.plan.params[*p].name.as_str());
            params.sort_by_key(|p| (self.param_groups.of(&self.plan.params[*p].name), !is_cast(p)));
            let narrowest = params
                .iter()
                .filter_map(|p| self.cast_dtypes.get(self.plan.params[*p].name.as_str()));
            let narrowest = narrowest.flatten().chain(&dtypes).map(|d| d.size());
            // Muon works on matrices in bf16.
            let narrowest = narrowest.chain(muon.then_some(DType::BF16.size()));
            let narrowest = narrowest.fold(held.size(), usize::min);
            let gathered = dtypes.into_iter().collect();
            let layout = self.lay_out(&params, held, narrowest, sharded);
            if layout.numel > MAX_GROUP {
                let unit = &self.plan.units[unit].name;
                let message = format!(
                    "the parameters of unit `{unit}` have {} elements in total, more than {MAX_GROUP}",
                    layout.numel
                );
                return Err(Diagnostic::error(Code::PlanTooLarge, message).help(
                    "correct the shapes of the parameters, or set sharding.wrap to smaller units",
                ));
            }
            self.make_group(unit, gathered, layout, if frozen { None } else { Some(&updated) });
        }
        self.make_copies();
        Ok(())
    }

    /// The group of the training plan, with those of its parameters that the evaluation reads.
    fn share_group(
        &mut self,
        group: GroupId,
        params: &HashMap<String, ParamId>,
        dtypes: &HashMap<String, BTreeSet<DType>>,
    ) {
        let Some(plan) = self.options.trained else { return };
        let group = &plan.groups[group];
        let read = |s: &Segment| {
            let param = *params.get(&plan.params[s.param].name)?;
            Some(Segment { param, ..*s })
        };
        let layout = Layout {
            dtype: group.dtype,
            segments: group.segments.iter().filter_map(read).collect(),
            numel: group.numel,
            shard_numel: group.shard_numel,
            sharded: group.sharded,
        };
        let gathered: BTreeSet<DType> =
            params.keys().filter_map(|name| dtypes.get(name)).flatten().copied().collect();
        self.make_group(group.unit, gathered.into_iter().collect(), layout, None);
    }

    /// Lays out parameters contiguously.
    fn lay_out(&self, params: &[ParamId], dtype: DType, narrowest: usize, sharded: bool) -> Layout {
        let mut segments = Vec::new();
        let mut end: usize = 0;
        for &param in params {
            let offset = end.next_multiple_of(PARAM_ALIGNMENT / narrowest);
            let spec = &self.plan.params[param];
            let numel = spec.ty.shape.numel();
            segments.push(Segment { param, offset, numel });
            end = offset + numel + self.rooms.get(spec.name.as_str()).unwrap_or(&0);
        }
        let parts = if sharded { self.options.shards } else { 1 };
        // A group without elements still has padding, so that every rank has a part.
        let numel = end.max(1).next_multiple_of(parts * PART_ALIGNMENT / narrowest);
        Layout { dtype, segments, numel, shard_numel: numel / parts, sharded }
    }

    fn make_group(
        &mut self,
        unit: UnitId,
        gather_dtypes: Vec<DType>,
        layout: Layout,
        updated: Option<&Updated>,
    ) {
        let index = self.plan.groups.next_key();
        let Layout { dtype, segments, numel, shard_numel, sharded } = layout;
        for (at, segment) in segments.iter().enumerate() {
            let spec = &mut self.plan.params[segment.param];
            spec.home = ParamHome::Group { group: index, offset: segment.offset };
            self.group_of.insert(spec.name.clone(), (index, at));
        }
        let name = format!("{} parameters", self.plan.units[unit].name);
        let bytes = shard_numel * dtype.size();
        let master = self.buffer(&name, Arena::Persistent, BufferClass::Parameter, bytes);
        let mut group = Group {
            unit,
            trainable: updated.is_some(),
            gather_dtypes,
            numel,
            shard_numel,
            sharded,
            dtype,
            master,
            states: vec![],
            copies: vec![],
            segments,
            param_groups: vec![],
            param_group_offsets: None,
            param_offsets: None,
        };
        if let Some(Updated { states, by_parameter }) = updated {
            group.param_groups = self.param_groups_along(&group.segments);
            if group.param_groups.len() > 1 {
                let bytes = (group.param_groups.len() - 1) * 8;
                let label = format!("{} parameter groups", self.plan.units[unit].name);
                let buffer = self.buffer(&label, Arena::Persistent, BufferClass::State, bytes);
                group.param_group_offsets = Some(buffer);
            }
            if *by_parameter {
                let label = format!("{} parameter offsets", self.plan.units[unit].name);
                let (class, bytes) = (BufferClass::State, group.segments.len() * 8);
                group.param_offsets = Some(self.buffer(&label, Arena::Persistent, class, bytes));
            }
            for (name, init, is_part) in states.clone() {
                let class = match name.is_sum() {
                    true => BufferClass::Gradient,
                    false => BufferClass::OptimizerState,
                };
                let label = format!("{} {name}", self.plan.units[unit].name);
                // Gradients that are reduced after the last micro-step are summed unsharded.
                let n = if is_part { shard_numel } else { numel };
                let buffer = self.buffer(&label, Arena::Persistent, class, n * 4);
                group.states.push(GroupState { name, buffer, init });
            }
        }
        self.plan.groups.push(group);
    }

    /// The table of parameter groups: where hyper-parameters change along the segments.
    fn param_groups_along(&self, segments: &[Segment]) -> Vec<ParamGroup> {
        let number = |s: &Segment| self.param_groups.of(&self.plan.params[s.param].name);
        let changes = segments.chunk_by(|a, b| number(a) == number(b)).enumerate();
        let group = |(i, same): (usize, &[Segment])| {
            self.param_group(number(&same[0]), if i == 0 { 0 } else { same[0].offset })
        };
        changes.filter_map(group).collect()
    }

    /// Names and initial values of the state of these parameters, in order of appearance, and whether it is sharded like
    /// them.
    fn state_names(&self, params: &[ParamId]) -> Vec<(StateName, f64, bool)> {
        let of: HashSet<&str> = params.iter().map(|p| self.plan.params[*p].name.as_str()).collect();
        let mut names: Vec<(StateName, f64, bool)> = Vec::new();
        for (_, node) in self.graph.nodes() {
            if let Op::State(s) = &node.op
                && s.of.as_deref().is_some_and(|name| of.contains(name))
                && names.iter().all(|(n, ..)| *n != s.name)
            {
                names.push((s.name.clone(), s.init, s.sharded));
            }
        }
        names
    }

    /// Maps every parameter, and every sharded value computed from it, to the parameter.
    fn trace_sharded_values(&mut self) {
        for (_, node) in self.graph.nodes() {
            let name = match &node.op {
                Op::Param(p) => Some(p.name.clone()),
                Op::State(s) => s.of.clone(),
                Op::Cast(_) if self.is_sharded(node.outputs[0]) => {
                    self.param_of.get(&node.inputs[0]).cloned()
                }
                _ => None,
            };
            if let Some(name) = name {
                self.param_of.insert(node.outputs[0], name);
            }
        }
        for (name, value) in self.gradients() {
            self.param_of.insert(value, name);
        }
    }

    /// The dtypes in which each parameter is gathered.
    fn gather_dtypes(&self) -> HashMap<String, BTreeSet<DType>> {
        let mut dtypes: HashMap<String, BTreeSet<DType>> = HashMap::new();
        for (_, node) in self.graph.nodes() {
            if let Op::AllGather(_) = node.op
                && let Some(name) = self.param_of.get(&node.inputs[0])
            {
                let dtype = self.graph.ty(node.inputs[0]).dtype;
                dtypes.entry(name.clone()).or_default().insert(dtype);
            }
        }
        dtypes
    }

    /// The gradient outputs: parameter name and value.
    pub(super) fn gradients(&self) -> Vec<(String, ValueId)> {
        self.graph
            .outputs
            .iter()
            .filter(|o| o.kind == frit_ir::OutputKind::Gradient)
            .map(|o| (o.name.clone(), o.value))
            .collect()
    }

    /// The type of a whole group in `dtype`.
    pub(super) fn whole(&self, group: GroupId, dtype: DType) -> TensorType {
        TensorType::new(dtype, [self.plan.groups[group].numel])
    }

    /// The type of one rank's part of a group in `dtype`.
    pub(super) fn part(&self, group: GroupId, dtype: DType) -> TensorType {
        TensorType::new(dtype, [self.plan.groups[group].shard_numel])
    }
}

/// The group of every grouped parameter.
fn groups_by_name(plan: &Plan) -> HashMap<&str, GroupId> {
    let of = |(index, group): (GroupId, &Group)| -> Vec<(ParamId, GroupId)> {
        group.segments.iter().map(|s| (s.param, index)).collect()
    };
    let all = plan.groups.iter_enumerated().flat_map(of);
    all.map(|(param, index)| (plan.params[param].name.as_str(), index)).collect()
}
