//! Work that is done once per flat group: gathers, reductions, statistics, the optimizer.

use super::{Lowering, body, internal};
use frit_ir::ops::{BinaryFn, Cast, FusionKind, ReduceKind};
use frit_ir::plan::{Action, BufferClass, GradientSpec, KernelKind, Place, Stream};
use frit_ir::{DType, Diagnostic, Graph, Node, Op, Region, TensorType, ValueId};
use std::collections::{HashMap, HashSet};

impl<'a> Lowering<'a> {
    /// Decides where each gradient is written: into its group's flat gradient.
    pub(super) fn place_gradients(&mut self) {
        let graph = self.graph;
        let uses: HashMap<ValueId, usize> =
            self.gradients().iter().fold(HashMap::new(), |mut uses, (_, value)| {
                *uses.entry(self.raw_gradient(*value)).or_default() += 1;
                uses
            });
        for (name, value) in self.gradients() {
            let node = graph.def(value);
            let reduced = if self.is_grad_sum(node) { self.addend(node) } else { value };
            self.gradient_name.insert(reduced, name.clone());
            let (group, segment) = self.group_of[&name];
            self.first_gradient.entry(group).or_insert(value);
            let flat = self.flat_gradient(group);
            self.missing.entry(group).or_default().insert(name);
            let offset = self.plan.groups[group].segments[segment].offset * 4;
            let mut raw = self.raw_gradient(value);
            if uses[&raw] > 1 {
                continue;
            }
            loop {
                let ty = graph.ty(raw).clone();
                self.required.insert(raw, Place { buffer: flat.buffer, offset, ty });
                let node = graph.def(raw);
                match &node.op {
                    // What a reshape reads is written at the same place, unless it is a leaf.
                    Op::Reshape(_) if !graph.def(node.inputs[0]).op.is_leaf() => {
                        raw = node.inputs[0];
                        if self.required.contains_key(&raw) {
                            break;
                        }
                    }
                    _ => break,
                }
            }
        }
    }

    /// The value before reduction and accumulation.
    fn raw_gradient(&self, value: ValueId) -> ValueId {
        let node = self.graph.def(value);
        match &node.op {
            Op::ReduceScatter(_) => self.raw_gradient(node.inputs[0]),
            Op::AllReduce(r) if r.unit.is_some() => self.raw_gradient(node.inputs[0]),
            _ if self.is_grad_sum(node) => self.raw_gradient(self.addend(node)),
            _ => value,
        }
    }

    /// The whole flat gradient of a group, before the reduction.
    fn flat_gradient(&mut self, group: usize) -> Place {
        if let Some(place) = self.flat_gradient.get(&group) {
            return place.clone();
        }
        let name = format!("{} gradient", self.plan.units[self.plan.groups[group].unit].name);
        let ty = self.whole(group, DType::F32);
        let place = self.workspace(&name, BufferClass::Gradient, ty);
        self.flat_gradient.insert(group, place.clone());
        place
    }

    pub(super) fn is_grad_sum(&self, node: &Node) -> bool {
        matches!(node.op, Op::Binary(BinaryFn::Add))
            && node.inputs.iter().any(|v| self.is_grad_sum_state(*v))
    }

    fn is_grad_sum_state(&self, value: ValueId) -> bool {
        matches!(&self.graph.def(value).op, Op::State(s) if s.name == "grad_sum")
    }

    fn addend(&self, node: &Node) -> ValueId {
        node.inputs[usize::from(self.is_grad_sum_state(node.inputs[0]))]
    }

    fn param_of(&self, value: ValueId, node: &Node) -> Result<String, Diagnostic> {
        self.param_of.get(&value).cloned().ok_or_else(|| {
            internal(format!("`{}` works on a sharded value of no parameter", node.op.name()))
                .at(&node.origin)
        })
    }

    /// A cast of a shard is done for the whole group when it is gathered.
    pub(super) fn sharded_cast(&mut self, node: &Node) -> Result<(), Diagnostic> {
        if matches!(node.op, Op::Cast(_)) {
            return Ok(());
        }
        Err(internal(format!("`{}` of a sharded value", node.op.name())).at(&node.origin))
    }

    pub(super) fn gather(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let name = self.param_of(node.inputs[0], node)?;
        let (group, segment) = self.group_of[&name];
        let dtype = self.graph.ty(node.outputs[0]).dtype;
        let key = (group, dtype, node.region);
        let buffer = match self.gathered.get(&key) {
            Some(&buffer) => buffer,
            None => {
                let send = self.shard_in(group, dtype, node)?;
                let unit = self.plan.units[self.plan.groups[group].unit].name.clone();
                let ty = self.whole(group, dtype);
                let recv = self.workspace(&format!("{unit} gathered"), BufferClass::Gathered, ty);
                let buffer = recv.buffer;
                let action = Action::AllGather { group, send, recv };
                let label = format!("all_gather {unit}");
                self.task(&label, Stream::Gather, node.region, &node.origin, action);
                self.gathered.insert(key, buffer);
                buffer
            }
        };
        let offset = self.plan.groups[group].segments[segment].offset * dtype.size();
        let ty = self.graph.ty(node.outputs[0]).clone();
        self.places.insert(node.outputs[0], Place { buffer, offset, ty });
        Ok(())
    }

    /// This rank's part of a group in `dtype`: cast once per micro-step.
    fn shard_in(&mut self, group: usize, dtype: DType, node: &Node) -> Result<Place, Diagnostic> {
        let master = Place {
            buffer: self.plan.groups[group].master,
            offset: 0,
            ty: self.part(group, DType::F32),
        };
        if dtype == DType::F32 {
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

    /// Runs one pointwise operation over flat places, generated if it can be.
    fn flat_kernel(
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

    fn pointwise_kind(&self, body: &Graph) -> KernelKind {
        if (self.options.generated)(body, FusionKind::Pointwise) {
            KernelKind::Generated
        } else {
            KernelKind::Interpreted
        }
    }

    /// One more gradient of a group is computed; the last one starts the reduction.
    pub(super) fn gradient_ready(&mut self, node: &'a Node) -> Result<(), Diagnostic> {
        let raw = node.inputs[0];
        let name = self.gradient_name.get(&node.outputs[0]).cloned();
        let name =
            name.ok_or_else(|| internal("a reduced value is no gradient").at(&node.origin))?;
        self.settle(&name, raw, node)?;
        let (group, _) = self.group_of[&name];
        if self.missing.get(&group).is_none_or(HashSet::is_empty) {
            self.reduce(group, node);
        }
        Ok(())
    }

    /// Sees to it that a gradient is at its place in the flat gradient.
    fn settle(&mut self, name: &str, raw: ValueId, node: &Node) -> Result<(), Diagnostic> {
        let (group, segment) = self.group_of[name];
        let offset = self.plan.groups[group].segments[segment].offset * 4;
        let flat = self.flat_gradient(group);
        let from = self.place(raw)?;
        let to = Place { buffer: flat.buffer, offset, ty: from.ty.clone() };
        if from != to {
            let action = Action::Copy { from, to };
            let label = format!("copy gradient {name}");
            self.task(&label, Stream::Compute, node.region, &node.origin, action);
        }
        if let Some(missing) = self.missing.get_mut(&group) {
            missing.remove(name);
        }
        Ok(())
    }

    /// Zeroes the gaps of a flat gradient and reduces it over ranks.
    fn reduce(&mut self, group: usize, node: &Node) {
        let flat = self.flat_gradient[&group].clone();
        let g = &self.plan.groups[group];
        let unit = self.plan.units[g.unit].name.clone();
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
            let label = format!("zero padding {unit}");
            self.task(&label, Stream::Compute, Region::Backward, &node.origin, action);
        }
        let sharded = self.plan.groups[group].sharded;
        let reduced = match (self.plan.world_size, sharded) {
            (1, _) => flat,
            (_, true) => {
                let ty = self.part(group, DType::F32);
                let label = format!("{unit} gradient shard");
                let recv = self.workspace(&label, BufferClass::Gradient, ty);
                let reduce = ReduceKind::Mean;
                let action =
                    Action::ReduceScatter { group, reduce, send: flat, recv: recv.clone() };
                let label = format!("reduce_scatter {unit}");
                self.task(&label, Stream::Reduce, Region::Backward, &node.origin, action);
                recv
            }
            (_, false) => {
                let reduce = ReduceKind::Mean;
                let (send, recv) = (flat.clone(), flat.clone());
                let action = Action::AllReduce { group: Some(group), reduce, send, recv };
                let label = format!("all_reduce {unit}");
                self.task(&label, Stream::Reduce, Region::Backward, &node.origin, action);
                flat
            }
        };
        self.shard_gradient.insert(group, reduced);
    }

    pub(super) fn note_grad_sum(&mut self, _: &Node) -> Result<(), Diagnostic> {
        Ok(())
    }

    /// What is left of the gradients at the end of the micro-step: on one rank their padding, and with
    /// accumulation their sums.
    pub(super) fn finish_gradients(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        if self.plan.world_size == 1 {
            for (name, value) in self.gradients() {
                let raw = self.raw_gradient(value);
                self.settle(&name, raw, graph.def(raw))?;
            }
            for group in self.flat_gradient.keys().copied().collect::<Vec<_>>() {
                let raw = self.raw_gradient(self.first_gradient[&group]);
                self.reduce(group, graph.def(raw));
            }
        }
        for (group, place) in self.shard_gradient.clone() {
            let sum = self.plan.groups[group].states.iter().find(|s| s.name == "grad_sum");
            if let Some(sum) = sum {
                let to = Place { buffer: sum.buffer, offset: 0, ty: place.ty.clone() };
                let node = graph.def(self.first_gradient[&group]);
                let op = Op::Binary(BinaryFn::Add);
                self.flat_kernel(op, vec![to.clone(), place], vec![to.clone()], node)?;
                self.shard_gradient.insert(group, to);
            }
        }
        for (&group, place) in &self.shard_gradient {
            self.plan.gradients.push(GradientSpec { group, place: place.clone() });
        }
        Ok(())
    }

    /// Statistics of every group, then their sum.
    pub(super) fn grad_stats(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let ty = TensorType::new(DType::F32, [2]);
        let mut parts = Vec::new();
        for (group, place) in self.shard_gradient.clone() {
            let body = body::of_op(Op::GradStats, std::slice::from_ref(&place.ty))?;
            let name = format!("statistics of group {group}");
            let part = self.workspace(&name, BufferClass::Gradient, ty.clone());
            let (kind, region) = (KernelKind::Library, FusionKind::RowReduce);
            self.run_kernel(kind, region, body, vec![place], vec![part.clone()], node);
            parts.push(part);
        }
        let body = body::sum_of(parts.len(), &ty)?;
        let total = self.result(node.outputs[0], node);
        let kind = self.pointwise_kind(&body);
        self.run_kernel(kind, FusionKind::Pointwise, body, parts, vec![total], node);
        Ok(())
    }

    /// The optimizer step of a whole group, at the first of its parameters.
    pub(super) fn optimizer_step(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let Op::OptimizerStep(step) = &node.op else {
            return Err(internal("no optimizer step").at(&node.origin));
        };
        let name = self.param_of(node.inputs[0], node)?;
        let (group, _) = self.group_of[&name];
        if !self.stepped.insert(group) {
            return Ok(());
        }
        let ty = self.part(group, DType::F32);
        let flat = |buffer| Place { buffer, offset: 0, ty: ty.clone() };
        let mut written = vec![flat(self.plan.groups[group].master)];
        for state in &node.inputs[2..2 + step.kind.n_states()] {
            let Op::State(state) = &self.graph.def(*state).op else {
                return Err(internal("optimizer state is no state").at(&node.origin));
            };
            let states = &self.plan.groups[group].states;
            let found = states.iter().find(|s| s.name == state.name);
            let found = found.ok_or_else(|| internal("optimizer state has no buffer"))?;
            written.push(flat(found.buffer));
        }
        let gradient = self.shard_gradient.get(&group).cloned();
        let gradient = gradient.ok_or_else(|| internal("a group has no gradient"))?;
        let mut reads = vec![written[0].clone(), gradient];
        reads.extend_from_slice(&written[1..]);
        for scalar in &node.inputs[2 + step.kind.n_states()..] {
            reads.push(self.place(*scalar)?);
        }
        self.flat_kernel(node.op.clone(), reads, written, node)
    }
}
