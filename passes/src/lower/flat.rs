//! Lowers operations that run once per flat group: gathers and statistics.

use super::groups::PARAM_ALIGNMENT;
use super::optimizer::Step;
use super::{Lowering, body, internal};
use crate::fuse::MAX_INTERFACE;
use frit_ir::ops::{Cast, FusionKind, GradStats};
use frit_ir::plan::{Action, Arena, BufferClass, GroupId, KernelKind, ParamId, Place, Stream};
use frit_ir::{DType, Diagnostic, Graph, Node, Op, TensorType, ValueId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The unsharded parameter that a node does nothing but cast to another float type, and that type.
fn cast_of_param<'g>(graph: &'g Graph, node: &Node) -> Option<(&'g str, DType)> {
    let ([input], [_]) = (&node.inputs[..], &node.outputs[..]) else { return None };
    let Op::Param(param) = &graph.def(*input).op else { return None };
    let cast = only_cast(node)?;
    (!param.sharded && param.unit.is_some() && cast.to.is_float())
        .then_some((param.name.as_str(), cast.to))
}

/// The cast of its operand that is all that a node computes.
pub(super) fn only_cast(node: &Node) -> Option<&Cast> {
    let fusion = match &node.op {
        Op::Cast(cast) => return Some(cast),
        Op::Fusion(fusion) => fusion,
        _ => return None,
    };
    let body = &fusion.body;
    let inner: Vec<&Node> = body.nodes().map(|(_, n)| n).collect();
    let [Node { op: Op::Input(_), outputs: input, .. }, cast] = inner[..] else { return None };
    let Op::Cast(op) = &cast.op else { return None };
    let returned = body.outputs.iter().map(|output| output.value);
    (cast.inputs == *input && returned.eq(cast.outputs.iter().copied())).then_some(op)
}

/// The float types to which parameters that are whole on every rank are cast, by name.
pub(super) fn param_cast_dtypes(graph: &Graph) -> HashMap<&str, BTreeSet<DType>> {
    let mut dtypes: HashMap<&str, BTreeSet<DType>> = HashMap::new();
    for (_, node) in graph.nodes() {
        if let Some((name, to)) = cast_of_param(graph, node) {
            dtypes.entry(name).or_default().insert(to);
        }
    }
    dtypes
}

/// Whether an operand may begin at this element of a flat tensor.
pub(super) fn is_aligned(element: usize, dtype: DType) -> bool {
    (element * dtype.size()).is_multiple_of(PARAM_ALIGNMENT)
}

impl<'a> Lowering<'a> {
    pub(super) fn param_of(&self, value: ValueId, node: &Node) -> Result<String, Diagnostic> {
        self.param_of.get(&value).cloned().ok_or_else(|| {
            internal(format!("`{}` works on a sharded value of no parameter", node.op.name()))
                .at(&node.origin)
        })
    }

    /// A cast of a shard is done for the whole group when it is gathered, from the dtype that the group is held in.
    pub(super) fn sharded_cast(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let is_held = |v: &ValueId| self.graph.def(*v).op.is_leaf();
        if matches!(&node.op, Op::Cast(cast) if cast.to.is_float())
            && node.inputs.iter().all(is_held)
        {
            return Ok(());
        }
        Err(internal(format!("`{}` of a sharded value", node.op.name())).at(&node.origin))
    }

    pub(super) fn gather(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let name = self.param_of(node.inputs[0], node)?;
        let (group, segment) = self.group_of[&name];
        let offset = self.plan.groups[group].segments[segment].offset;
        let wanted = self.graph.ty(node.outputs[0]).dtype;
        // A layout made for other dtypes may not align it; then it is cast when it is gathered.
        let dtype = match is_aligned(offset, wanted) {
            true => wanted,
            false => self.plan.groups[group].dtype,
        };
        let key = (group, dtype, node.region);
        let buffer = match self.gathered.get(&key) {
            Some(&buffer) => buffer,
            None => {
                let send = self.shard_in(group, dtype, node)?;
                let unit = self.plan.units[self.plan.groups[group].unit].name.clone();
                let ty = self.whole(group, dtype);
                // Parameters gathered before the micro-steps stay until the last micro-step has read them.
                let arena = if self.unsharding { Arena::Persistent } else { Arena::Workspace };
                let (name, class) = (format!("{unit} gathered"), BufferClass::Gathered);
                let recv =
                    Place { buffer: self.buffer(&name, arena, class, ty.bytes()), offset: 0, ty };
                let buffer = recv.buffer;
                let action = Action::AllGather { group, ranks: None, send, recv };
                let label = format!("all_gather {unit}");
                self.task(&label, Stream::Gather, node.region, &node.origin, action);
                self.gathered.insert(key, buffer);
                buffer
            }
        };
        let ty = TensorType::new(dtype, self.graph.ty(node.outputs[0]).shape.clone());
        let place = Place { buffer, offset: offset * dtype.size(), ty };
        if dtype != wanted {
            let to = self.result(node.outputs[0], node);
            return self.flat_kernel(Op::Cast(Cast { to: wanted }), vec![place], vec![to], node);
        }
        self.places.insert(node.outputs[0], place);
        Ok(())
    }

    /// This rank's shard of a group in `dtype`: cast once per micro-step if it is stored in another dtype.
    fn shard_in(&mut self, group: GroupId, dtype: DType, node: &Node) -> Result<Place, Diagnostic> {
        let held = self.plan.groups[group].dtype;
        let master =
            Place { buffer: self.plan.groups[group].master, offset: 0, ty: self.part(group, held) };
        if dtype == held {
            return Ok(master);
        }
        let ty = self.part(group, dtype);
        if let Some(&buffer) = self.shard_casts.get(&(group, dtype)) {
            return Ok(Place { buffer, offset: 0, ty });
        }
        let unit = self.plan.units[self.plan.groups[group].unit].name.clone();
        let place = self.workspace(&format!("{unit} shard"), BufferClass::Gathered, ty);
        let op = Op::Cast(Cast { to: dtype });
        self.flat_kernel(op, vec![master], vec![place.clone()], node)?;
        self.shard_casts.insert((group, dtype), place.buffer);
        Ok(place)
    }

    /// Reads the cast of a replicated parameter from its group's copy, or casts it and all others of its group that are cast to the same dtype in one task, or all groups
    /// if code generation makes one kernel of that; `false` if the node is not such a cast, or a separate task is cheaper.
    pub(super) fn cast_with_group(&mut self, node: &'a Node) -> Result<bool, Diagnostic> {
        let Some((name, to)) = cast_of_param(self.graph, node) else { return Ok(false) };
        let Some(&(group, segment)) = self.group_of.get(name) else { return Ok(false) };
        if self.required.contains_key(&node.outputs[0]) {
            return Ok(false);
        }
        let offset = self.plan.groups[group].segments[segment].offset;
        let ty = self.graph.ty(node.outputs[0]).clone();
        if let Some(copy) = self.copy_in(group, to) {
            let place = Place { offset: offset * to.size(), ty, ..copy };
            self.places.insert(node.outputs[0], place);
            return Ok(true);
        }
        if !self.param_casts.contains_key(&(group, to)) {
            let Some(step) = self.group_cast(group, to, node)? else { return Ok(false) };
            let mut steps = vec![step];
            let others = self.plan.groups.keys().filter(|g| *g != group).collect::<Vec<_>>();
            for other in others {
                let is_made = self.param_casts.contains_key(&(other, to))
                    || self.copy_in(other, to).is_some();
                if self.casts_together && !is_made {
                    steps.extend(self.group_cast(other, to, node)?);
                }
            }
            self.in_few_launches(steps)?;
        }
        let (buffer, first) = self.param_casts[&(group, to)];
        let offset = (offset - first) * to.size();
        self.places.insert(node.outputs[0], Place { buffer, offset, ty });
        Ok(true)
    }

    /// Whether code generation makes one kernel of the casts of several groups.
    pub(super) fn joins_casts(&self) -> Result<bool, Diagnostic> {
        let ty = TensorType::new(DType::F32, [PARAM_ALIGNMENT]);
        let body = body::of_op(Op::Cast(Cast { to: DType::BF16 }), std::slice::from_ref(&ty))?;
        let buffer = self.plan.buffers.next_key();
        let place = |i: usize| Place { buffer, offset: i * ty.bytes(), ty: ty.clone() };
        let two = [0, 1].map(|i| (body.clone(), vec![place(i)]));
        let joined = body::joined(&two)?.0;
        Ok(self.options.multi_tensor && (self.options.generated)(&joined, FusionKind::MultiTensor))
    }

    /// The cast of the range of a group that holds all parameters that are cast to a dtype; `None` if there is no such range.
    fn group_cast(
        &mut self,
        group: GroupId,
        to: DType,
        node: &'a Node,
    ) -> Result<Option<Step<'a>>, Diagnostic> {
        let Some((first, numel)) = self.cast_range(group, to) else { return Ok(None) };
        let g = &self.plan.groups[group];
        let unit = self.plan.units[g.unit].name.clone();
        let ty = |dtype| TensorType::new(dtype, [numel]);
        let (buffer, offset) = (g.master, first * g.dtype.size());
        let master = Place { buffer, offset, ty: ty(g.dtype) };
        let name = format!("{unit} in {}", to.name());
        let place = self.workspace(&name, BufferClass::Gathered, ty(to));
        self.param_casts.insert((group, to), (place.buffer, first));
        let body = body::of_op(Op::Cast(Cast { to }), std::slice::from_ref(&master.ty))?;
        Ok(Some(Step { body, reads: vec![master], writes: vec![place], node }))
    }

    /// First element and number of elements of the range with all parameters of a group that are cast to a dtype, if
    /// there are several, all aligned, and the gaps are small.
    fn cast_range(&self, group: GroupId, to: DType) -> Option<(usize, usize)> {
        let is_cast = |param: ParamId| {
            let name = self.plan.params[param].name.as_str();
            self.cast_dtypes.get(name).is_some_and(|d| d.contains(&to))
        };
        let segments = self.plan.groups[group].segments.iter();
        let inside: Vec<_> = segments.filter(|s| is_cast(s.param)).collect();
        let (first, last) = (inside.first()?, inside.last()?);
        let room = self.rooms.get(self.plan.params[last.param].name.as_str()).unwrap_or(&0);
        let numel = last.offset + last.numel + room - first.offset;
        let needed: usize = inside.iter().map(|s| s.numel).sum();
        if !inside.iter().all(|s| is_aligned(s.offset - first.offset, to)) {
            return None;
        }
        (inside.len() > 1 && 4 * numel <= 5 * needed).then_some((first.offset, numel))
    }

    /// Runs one pointwise operation over flat tensors, by generated code if possible.
    pub(super) fn flat_kernel(
        &mut self,
        op: Op,
        reads: Vec<Place>,
        writes: Vec<Place>,
        node: &Node,
    ) -> Result<(), Diagnostic> {
        let types: Vec<TensorType> = reads.iter().map(|p| p.ty.clone()).collect();
        let body = body::of_op(op, &types)?;
        let kind = self.pointwise_kind(&body);
        self.run_kernel(kind, FusionKind::Pointwise, body, reads, writes, node);
        Ok(())
    }

    pub(super) fn pointwise_kind(&self, body: &Graph) -> KernelKind {
        if (self.options.generated)(body, FusionKind::Pointwise) {
            KernelKind::Generated
        } else {
            KernelKind::Interpreted
        }
    }

    /// Statistics of all groups by one kernel; with several ranks those of every group, which need not wait until all are
    /// reduced, and then their sum. An exact sum is of all groups at once: f32 adds the digits of few sums exactly.
    pub(super) fn grad_stats(&mut self, node: &Node, op: GradStats) -> Result<(), Diagnostic> {
        let ty = self.graph.ty(node.outputs[0]).clone();
        let all: HashSet<ValueId> = self.gradients().into_iter().map(|(_, v)| v).collect();
        if node.inputs.iter().copied().collect::<HashSet<_>>() != all {
            let what = "statistics of other values than the gradients of all parameters";
            return Err(internal(what).at(&node.origin));
        }
        if self.plan.world_size == 1 || op.exact {
            let places: Vec<Place> = self.gradient.at.values().cloned().collect();
            let types: Vec<TensorType> = places.iter().map(|p| p.ty.clone()).collect();
            let body = body::of_op(Op::GradStats(op), &types)?;
            let total = self.result(node.outputs[0], node);
            let (kind, region) = (KernelKind::Library, FusionKind::RowReduce);
            self.run_kernel(kind, region, body, places, vec![total], node);
            return Ok(());
        }
        let mut parts = Vec::new();
        for (group, place) in self.gradient.at.clone() {
            let body = body::of_op(Op::GradStats(op), std::slice::from_ref(&place.ty))?;
            let name = format!("statistics of group {group}");
            let part = self.workspace(&name, BufferClass::Gradient, ty.clone());
            let (kind, region) = (KernelKind::Library, FusionKind::RowReduce);
            self.run_kernel(kind, region, body, vec![place], vec![part.clone()], node);
            parts.push(part);
        }
        let total = self.result(node.outputs[0], node);
        // Added from left to right, so that the number of groups does not change the sum of the first ones.
        let mut sum: Vec<Place> = Vec::new();
        let mut left = parts.into_iter().peekable();
        while left.peek().is_some() {
            sum.extend(left.by_ref().take(MAX_INTERFACE - 1 - sum.len()));
            let to = match left.peek() {
                Some(_) => self.workspace("statistics so far", BufferClass::Gradient, ty.clone()),
                None => total.clone(),
            };
            let body = body::sum_of(sum.len(), &ty)?;
            let kind = self.pointwise_kind(&body);
            let reads = std::mem::replace(&mut sum, vec![to.clone()]);
            self.run_kernel(kind, FusionKind::Pointwise, body, reads, vec![to], node);
        }
        Ok(())
    }
}
