//! Work that is done once per flat group: gathers, statistics.

use super::{Lowering, body, internal};
use frit_ir::ops::{Cast, FusionKind};
use frit_ir::plan::{Action, Arena, BufferClass, KernelKind, Place, Stream};
use frit_ir::{DType, Diagnostic, Graph, Node, Op, TensorType, ValueId};

impl Lowering<'_> {
    pub(super) fn param_of(&self, value: ValueId, node: &Node) -> Result<String, Diagnostic> {
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
                // What is gathered before the micro-steps stays until the last has read it.
                let arena = if self.unsharding { Arena::Persistent } else { Arena::Workspace };
                let (name, class) = (format!("{unit} gathered"), BufferClass::Gathered);
                let recv =
                    Place { buffer: self.buffer(&name, arena, class, ty.bytes()), offset: 0, ty };
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

    /// Statistics of every group, then their sum.
    pub(super) fn grad_stats(&mut self, node: &Node) -> Result<(), Diagnostic> {
        let ty = TensorType::new(DType::F32, [2]);
        let mut parts = Vec::new();
        for (group, place) in self.gradient.at.clone() {
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
}
