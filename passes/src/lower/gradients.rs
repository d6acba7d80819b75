//! Lowers gradients per flat group: written into one flat gradient, then reduced over ranks and summed over
//! micro-steps, in the order that the graph has for every parameter. Operations that the graph has per parameter are
//! emitted per group, at the last of its parameters.

use super::{Lowering, body, in_place, internal};
use frit_ir::ops::{
    BinaryFn, Expand, FusionKind, ReduceKind, ScaledCast, StateName, reduction_factors,
};
use frit_ir::plan::{Action, BufferClass, GradientSpec, GroupId, KernelKind, Place, Stream};
use frit_ir::{DType, Diagnostic, Node, Op, Region, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The gradients during lowering.
#[derive(Default)]
pub(super) struct Gradients {
    /// The whole flat gradient of each trainable group, as a micro-step computes it.
    flat: BTreeMap<GroupId, Place>,
    /// The current location of the gradient of each group: flat, reduced, or summed.
    pub(super) at: BTreeMap<GroupId, Place>,
    /// Gradients of a group that are not yet computed in this micro-step, by parameter name.
    missing: BTreeMap<GroupId, HashSet<String>>,
    /// Parameter names by reduced or summed gradient.
    name: HashMap<ValueId, String>,
    /// Parameters of each group that have a gradient.
    n: BTreeMap<GroupId, usize>,
    /// Factor to apply to gradients in f32 after a reduction in another dtype.
    after: BTreeMap<GroupId, f64>,
}

impl<'a> Lowering<'a> {
    /// Decides where each gradient is written: into its group's flat gradient.
    pub(super) fn place_gradients(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        let uses: HashMap<ValueId, usize> =
            self.gradients().iter().fold(HashMap::new(), |mut uses, (_, value)| {
                *uses.entry(self.raw_gradient(*value)).or_default() += 1;
                uses
            });
        for (name, value) in self.gradients() {
            let mut at = value;
            let mut is_overwritten = false;
            while let Some(before) = self.before(at) {
                self.gradient.name.insert(at, name.clone());
                // An all-reduce leaves its result where its operand was.
                is_overwritten |= matches!(graph.def(at).op, Op::AllReduce(_));
                at = before;
            }
            let known = self.group_of.get(&name).copied();
            let (group, segment) =
                known.ok_or_else(|| internal(format!("`{name}` has a gradient and no group")))?;
            let flat = self.flat_gradient(group);
            *self.gradient.n.entry(group).or_default() += 1;
            self.gradient.missing.entry(group).or_default().insert(name);
            let segment = &self.plan.groups[group].segments[segment];
            let (offset, numel) = (segment.offset * 4, segment.numel);
            let mut raw = at;
            let is_shared =
                |value: ValueId| is_overwritten && self.users[value.0 as usize].len() > 1;
            // A gradient that is equal along an axis may be computed once; `settle` broadcasts it.
            if uses[&raw] > 1 || graph.ty(raw).shape.numel() != numel || is_shared(raw) {
                continue;
            }
            loop {
                let ty = graph.ty(raw).clone();
                self.required.insert(raw, Place { buffer: flat.buffer, offset, ty });
                let node = graph.def(raw);
                match &node.op {
                    // The operand of a reshape is written at the same place, unless it is a leaf.
                    Op::Reshape(_)
                        if !graph.def(node.inputs[0]).op.is_leaf()
                            && !is_shared(node.inputs[0]) =>
                    {
                        raw = node.inputs[0];
                        if self.required.contains_key(&raw) {
                            break;
                        }
                    }
                    // A GEMM is added to the matrix in place.
                    Op::Fusion(fusion) => match in_place::matrix_and_sum(&fusion.body) {
                        Some((matrix, _)) if self.is_read_once(node.inputs[matrix]) => {
                            raw = node.inputs[matrix];
                        }
                        _ => break,
                    },
                    // What only the gradient of an embedding is added to is where the sum will be.
                    Op::EmbeddingGrad(_) if self.adds_in_place(node) => raw = node.inputs[2],
                    _ => break,
                }
            }
        }
        Ok(())
    }

    /// See [`in_place::is_read_once`].
    fn is_read_once(&self, value: ValueId) -> bool {
        in_place::is_read_once(self.graph, &self.users, value)
    }

    /// Whether a node adds a gradient of an embedding to what nothing else reads, and what is no part of another value.
    fn adds_in_place(&self, node: &Node) -> bool {
        node.inputs.get(2).is_some_and(|added| {
            self.is_read_once(*added)
                && !self.required.contains_key(added)
                && !matches!(self.graph.def(*added).op, Op::Reshape(_) | Op::Slice(_))
        })
    }

    /// The value before the last reduction or accumulation of a gradient; `None` if there was none.
    fn before(&self, value: ValueId) -> Option<ValueId> {
        let node = self.graph.def(value);
        match &node.op {
            Op::ReduceScatter(_) => Some(node.inputs[0]),
            Op::AllReduce(r) if r.unit.is_some() => Some(node.inputs[0]),
            _ if self.is_grad_sum(node) => Some(self.addend(node)),
            _ => None,
        }
    }

    /// The value before every reduction and accumulation.
    fn raw_gradient(&self, value: ValueId) -> ValueId {
        std::iter::successors(Some(value), |v| self.before(*v)).last().unwrap_or(value)
    }

    /// The whole flat gradient of a group, before it is reduced.
    fn flat_gradient(&mut self, group: GroupId) -> Place {
        if let Some(place) = self.gradient.flat.get(&group) {
            return place.clone();
        }
        let name = format!("{} gradient", self.unit_name(group));
        let ty = self.whole(group, DType::F32);
        let place = self.workspace(&name, BufferClass::Gradient, ty);
        self.gradient.flat.insert(group, place.clone());
        place
    }

    pub(super) fn is_grad_sum(&self, node: &Node) -> bool {
        matches!(node.op, Op::Binary(BinaryFn::Add) | Op::TreeSum)
            && node.inputs.iter().any(|v| self.is_grad_sum_state(*v))
    }

    fn is_grad_sum_state(&self, value: ValueId) -> bool {
        matches!(&self.graph.def(value).op, Op::State(s) if s.name.is_sum() && s.of.is_some())
    }

    fn addend(&self, node: &Node) -> ValueId {
        match node.op {
            Op::TreeSum => node.inputs[0],
            _ => node.inputs[usize::from(self.is_grad_sum_state(node.inputs[0]))],
        }
    }

    pub(super) fn unit_name(&self, group: GroupId) -> String {
        self.plan.units[self.plan.groups[group].unit].name.clone()
    }

    /// Lowers the reduction or accumulation of one gradient: the last one of a group emits it for the whole group.
    pub(super) fn gradient_step(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        let name = self.gradient.name.get(&node.outputs[0]).cloned();
        let name =
            name.ok_or_else(|| internal("a reduced value is no gradient").at(&node.origin))?;
        if node.region != Region::Update {
            self.settle(&name, self.raw_gradient(node.outputs[0]), node)?;
        }
        let (group, _) = self.group_of[&name];
        if !self.is_last(group, self.gradient.n[&group], node)? {
            return Ok(());
        }
        match &node.op {
            Op::ReduceScatter(_) => self.scatter(group, node),
            Op::AllReduce(_) => self.average(group, node),
            _ => self.accumulate(group, node),
        }
    }

    /// Ensures that a gradient of this micro-step is in its segment of the flat gradient and, after the last one of
    /// its group, that the padding is zero.
    fn settle(&mut self, name: &str, raw: ValueId, node: &Node) -> Result<(), Diagnostic> {
        let (group, segment) = self.group_of[name];
        if !self.gradient.missing.get_mut(&group).is_some_and(|missing| missing.remove(name)) {
            return Ok(());
        }
        let flat = self.flat_gradient(group);
        let (offset, numel, param) = {
            let segment = &self.plan.groups[group].segments[segment];
            (segment.offset * 4, segment.numel, segment.param)
        };
        if self.graph.constant(raw).and_then(|c| c.as_splat()) == Some(0.0) {
            // The gradient of the parameter is zero. The constant may be a scalar.
            let ty = TensorType::new(DType::F32, [numel]);
            let action = Action::Zero { places: vec![Place { buffer: flat.buffer, offset, ty }] };
            let label = format!("zero gradient {name}");
            self.task(&label, Stream::Compute, node.region, &node.origin, action);
        } else {
            let from = self.place(raw)?;
            let mut to = Place { buffer: flat.buffer, offset, ty: from.ty.clone() };
            if from.ty.shape.numel() != numel {
                let shape = self.plan.params[param].ty.shape.clone();
                to.ty = from.ty.with_shape(shape.dims());
                self.flat_kernel(Op::Expand(Expand { shape }), vec![from], vec![to], node)?;
            } else if from != to {
                let action = Action::Copy { from, to };
                let label = format!("copy gradient {name}");
                self.task(&label, Stream::Compute, node.region, &node.origin, action);
            }
        }
        if self.gradient.missing[&group].is_empty() {
            self.zero_padding(group, &flat, node);
            self.gradient.at.insert(group, flat);
        }
        Ok(())
    }

    fn zero_padding(&mut self, group: GroupId, flat: &Place, node: &Node) {
        let g = &self.plan.groups[group];
        let mut gaps = Vec::new();
        let mut end = 0;
        let starts = g.segments.iter().map(|s| (s.offset, s.offset + s.numel));
        for (start, next) in starts.chain([(g.numel, g.numel)]) {
            if start > end {
                let ty = TensorType::new(DType::F32, [start - end]);
                gaps.push(Place { buffer: flat.buffer, offset: end * 4, ty });
            }
            end = next;
        }
        if !gaps.is_empty() {
            let action = Action::Zero { places: gaps };
            let label = format!("zero padding {}", self.unit_name(group));
            self.task(&label, Stream::Compute, Region::Backward, &node.origin, action);
        }
    }

    /// The current location of the gradient of a group, in f32.
    fn gradient_at(&mut self, group: GroupId, node: &Node) -> Result<Place, Diagnostic> {
        let place = self.gradient.at.get(&group).cloned();
        let place = place.ok_or_else(|| internal("a group has no gradient").at(&node.origin))?;
        if place.ty.dtype == DType::F32 {
            return Ok(place);
        }
        let ty = place.ty.with_dtype(DType::F32);
        let name = format!("{} gradient", self.unit_name(group));
        let wide = self.workspace(&name, BufferClass::Gradient, ty);
        let factor = self.gradient.after.get(&group).copied().unwrap_or(1.0);
        let op = Op::ScaledCast(ScaledCast { to: DType::F32, factor });
        self.flat_kernel(op, vec![place], vec![wide.clone()], node)?;
        self.gradient.at.insert(group, wide.clone());
        Ok(wide)
    }

    /// A gradient cast to `dtype` for reduction over `ranks` ranks: payload and reduction.
    fn narrowed(
        &mut self,
        group: GroupId,
        (reduce, dtype, ranks): (ReduceKind, Option<DType>, usize),
        node: &Node,
    ) -> Result<(Place, ReduceKind), Diagnostic> {
        let place = self.gradient_at(group, node)?;
        let Some(dtype) = dtype else { return Ok((place, reduce)) };
        let factors = reduction_factors(dtype, ranks);
        let (before, after) = factors.unwrap_or((1.0, 1.0));
        let name = format!("{} gradient in {dtype}", self.unit_name(group));
        let narrow = self.workspace(&name, BufferClass::Gradient, place.ty.with_dtype(dtype));
        let op = Op::ScaledCast(ScaledCast { to: dtype, factor: before });
        self.flat_kernel(op, vec![place], vec![narrow.clone()], node)?;
        self.gradient.after.insert(group, after);
        let reduce = if factors.is_some() { ReduceKind::Sum } else { reduce };
        Ok((narrow, reduce))
    }

    fn scatter(&mut self, group: GroupId, node: &Node) -> Result<(), Diagnostic> {
        let Op::ReduceScatter(op) = &node.op else {
            return Err(internal("no reduce-scatter").at(&node.origin));
        };
        let ranks = self.plan.groups[group].shards();
        let (send, reduce) = self.narrowed(group, (op.reduce, op.dtype, ranks), node)?;
        let unit = self.unit_name(group);
        let ty = self.part(group, send.ty.dtype);
        let recv = self.workspace(&format!("{unit} gradient shard"), BufferClass::Gradient, ty);
        let action = Action::ReduceScatter { group, reduce, send, recv: recv.clone() };
        let label = format!("reduce_scatter {unit}");
        self.task(&label, Stream::Reduce, node.region, &node.origin, action);
        self.gradient.at.insert(group, recv);
        Ok(())
    }

    fn average(&mut self, group: GroupId, node: &Node) -> Result<(), Diagnostic> {
        let Op::AllReduce(op) = &node.op else {
            return Err(internal("no all-reduce").at(&node.origin));
        };
        let ranks = self.plan.world_size / self.plan.groups[group].shards();
        let (place, reduce) = self.narrowed(group, (op.reduce, op.dtype, ranks), node)?;
        let (send, recv) = (place.clone(), place.clone());
        let action = Action::AllReduce { group: Some(group), reduce, send, recv };
        let label = format!("all_reduce {}", self.unit_name(group));
        self.task(&label, Stream::Reduce, node.region, &node.origin, action);
        self.gradient.at.insert(group, place);
        Ok(())
    }

    /// Adds the gradient of this micro-step to the sum.
    fn accumulate(&mut self, group: GroupId, node: &Node) -> Result<(), Diagnostic> {
        let place = self.gradient_at(group, node)?;
        if let Op::TreeSum = node.op {
            return self.accumulate_in_tree(group, place, node);
        }
        let sum = self.plan.groups[group].states.iter().find(|s| s.name == StateName::GradSum);
        let sum = sum.ok_or_else(|| internal("a group has no sum of gradients"))?.buffer;
        let to = Place { buffer: sum, offset: 0, ty: place.ty.clone() };
        let (op, reads) = (Op::Binary(BinaryFn::Add), vec![to.clone(), place]);
        self.flat_kernel(op, reads, vec![to.clone()], node)?;
        self.gradient.at.insert(group, to);
        Ok(())
    }

    /// The same in a binary tree. The last micro-step leaves the sum at the first level.
    fn accumulate_in_tree(
        &mut self,
        group: GroupId,
        place: Place,
        node: &Node,
    ) -> Result<(), Diagnostic> {
        let mut levels = Vec::new();
        for level in 0..node.outputs.len() {
            let name = StateName::Partial(level);
            let state = self.plan.groups[group].states.iter().find(|s| s.name == name);
            let state = state.ok_or_else(|| internal("a group lacks a level of its sum"))?;
            levels.push(Place { buffer: state.buffer, offset: 0, ty: place.ty.clone() });
        }
        let mut reads = vec![place, self.place(node.inputs[1])?];
        reads.extend(levels.iter().cloned());
        let types: Vec<TensorType> = reads.iter().map(|p| p.ty.clone()).collect();
        let body = body::of_op(Op::TreeSum, &types)?;
        self.gradient.at.insert(group, levels[0].clone());
        let (kind, region) = (KernelKind::Library, FusionKind::Pointwise);
        self.run_kernel(kind, region, body, reads, levels, node);
        Ok(())
    }

    /// At the end of the micro-step, completes gradients that are neither reduced nor summed.
    pub(super) fn finish_gradients(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        for (name, value) in self.gradients() {
            let raw = self.raw_gradient(value);
            self.settle(&name, raw, graph.def(raw))?;
        }
        Ok(())
    }

    /// Records the locations of the reduced gradients, in f32.
    pub(super) fn note_gradients(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        for (name, value) in self.gradients() {
            let (group, _) = self.group_of[&name];
            self.gradient_at(group, graph.def(value))?;
        }
        for (&group, place) in &self.gradient.at {
            self.plan.gradients.push(GradientSpec { group, place: place.clone() });
        }
        Ok(())
    }
}
