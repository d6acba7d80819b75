//! Lowers Adafactor steps. Each parameter is updated separately, for the elements that a rank holds: sums over them,
//! then the second moment and the magnitude of the update, then the step. Two all-reduces add the sums of all
//! parameters over ranks.

use super::{Lowering, body, internal};
use frit_ir::ops::{Adafactor, AdafactorPart, FusionKind, OptimizerKind, ReduceKind};
use frit_ir::plan::{Action, BufferClass, GroupId, Place, Stream};
use frit_ir::{DType, Diagnostic, Node, Op, Region, TensorType};

/// The sums of squares of a parameter and of its update, over all ranks.
#[derive(Clone)]
pub(super) struct Summed {
    of_param: Place,
    of_update: Place,
}

/// One parameter in the update.
struct Parameter<'g> {
    node: &'g Node,
    group: GroupId,
    segment: usize,
    sums: Place,
    squares: Place,
}

impl<'a> Lowering<'a> {
    /// Whether the optimizer processes each parameter separately.
    pub(super) fn steps_by_parameter(&self) -> bool {
        self.adafactor_nodes().next().is_some()
    }

    fn adafactor_nodes(&self) -> impl Iterator<Item = &'a Node> + use<'a> {
        let steps = |n: &&Node| matches!(&n.op, Op::OptimizerStep(op) if op.kind == OptimizerKind::Adafactor);
        self.graph.nodes().map(|(_, n)| n).filter(steps)
    }

    pub(super) fn adafactor_step(
        &mut self,
        group: GroupId,
        segment: usize,
        node: &'a Node,
    ) -> Result<(), Diagnostic> {
        if self.adafactor.is_empty() {
            self.adafactor_sums(node)?;
        }
        let Summed { of_param, of_update } = self.adafactor[&(group, segment)].clone();
        let [lr, _, eps, threshold, decay, clip, step, factor, found_inf] = scalars(node)?;
        let (mut reads, master) = (self.part_of(group, segment)?, self.master(group));
        reads.extend([master.clone(), self.place(node.inputs[2])?, of_param, of_update]);
        for scalar in [lr, eps, threshold, decay, clip, step, factor, found_inf] {
            reads.push(self.place(scalar)?);
        }
        self.adafactor_kernel(AdafactorPart::Step, group, reads, vec![master], node)
    }

    /// The sums of all parameters, then their moments, each followed by an all-reduce if ranks hold parts.
    fn adafactor_sums(&mut self, first: &Node) -> Result<(), Diagnostic> {
        let nodes: Vec<&'a Node> = self.adafactor_nodes().collect();
        let state_len = |n: &&Node| self.graph.ty(n.inputs[2]).shape.numel();
        // Everything that is added over ranks is contiguous.
        let n_sums = nodes.iter().map(state_len).sum::<usize>() + nodes.len();
        let f32s = |n| TensorType::new(DType::F32, [n]);
        let class = BufferClass::OptimizerState;
        let all_sums = self.workspace("adafactor sums", class, f32s(n_sums));
        let all_squares = self.workspace("adafactor updates", class, f32s(nodes.len()));
        let mut parameters = Vec::with_capacity(nodes.len());
        let mut end = 0;
        for (i, node) in nodes.into_iter().enumerate() {
            let name = self.param_of(node.inputs[0], node)?;
            let (group, segment) = self.group_of[&name];
            let n = self.graph.ty(node.inputs[2]).shape.numel() + 1;
            let sums = Place { offset: end * 4, ty: f32s(n), ..all_sums };
            let squares = Place { offset: i * 4, ty: f32s(1), ..all_squares };
            parameters.push(Parameter { node, group, segment, sums, squares });
            end += n;
        }
        for p in &parameters {
            let [.., clip, _, factor, _] = scalars(p.node)?;
            let mut reads = self.part_of(p.group, p.segment)?;
            reads.push(self.master(p.group));
            for scalar in [clip, factor] {
                reads.push(self.place(scalar)?);
            }
            let writes = vec![p.sums.clone()];
            self.adafactor_kernel(AdafactorPart::Sums, p.group, reads, writes, p.node)?;
        }
        self.add_over_ranks("adafactor sums", all_sums, first);
        for p in &parameters {
            let [_, exponent, .., clip, step, factor, found_inf] = scalars(p.node)?;
            let state = self.place(p.node.inputs[2])?;
            let mut reads = self.part_of(p.group, p.segment)?;
            reads.extend([p.sums.clone(), state.clone()]);
            for scalar in [exponent, clip, step, factor, found_inf] {
                reads.push(self.place(scalar)?);
            }
            let writes = vec![state.clone(), p.squares.clone()];
            self.adafactor_kernel(AdafactorPart::Moments, p.group, reads, writes, p.node)?;
            self.places.insert(p.node.outputs[1], state);
            let n = p.sums.ty.shape.numel() - 1;
            let of_param =
                Place { offset: p.sums.offset + n * 4, ty: p.squares.ty.clone(), ..p.sums.clone() };
            let summed = Summed { of_param, of_update: p.squares.clone() };
            self.adafactor.insert((p.group, p.segment), summed);
        }
        self.add_over_ranks("adafactor updates", all_squares, first);
        Ok(())
    }

    fn add_over_ranks(&mut self, name: &str, all: Place, node: &Node) {
        if self.options.shards == 1 {
            return;
        }
        let reduce = ReduceKind::Sum;
        let action = Action::AllReduce { group: None, reduce, send: all.clone(), recv: all };
        let label = format!("all_reduce {name}");
        self.task(&label, Stream::Reduce, Region::Update, &node.origin, action);
    }

    /// The offset of a parameter in its group's part, and that part of the gradient.
    fn part_of(&mut self, group: GroupId, segment: usize) -> Result<Vec<Place>, Diagnostic> {
        let offsets = self.plan.groups[group].param_offsets;
        let buffer = offsets.ok_or_else(|| internal("a group has no table of its parameters"))?;
        let ty = TensorType::new(DType::I64, [1]);
        let gradient = self.gradient.at.get(&group).cloned();
        let gradient = gradient.ok_or_else(|| internal("a group has no gradient"))?;
        Ok(vec![Place { buffer, offset: segment * 8, ty }, gradient])
    }

    fn adafactor_kernel(
        &mut self,
        part: AdafactorPart,
        group: GroupId,
        reads: Vec<Place>,
        writes: Vec<Place>,
        node: &Node,
    ) -> Result<(), Diagnostic> {
        let shards = self.plan.groups[group].shards();
        // Replicas of a shard hold the same elements; unsharded parameters are not added over ranks.
        let replicas = if shards > 1 { self.plan.world_size / shards } else { 1 };
        let shape = self.graph.ty(node.inputs[0]).shape.clone();
        let op = Op::Adafactor(Adafactor { part, shape, share: 1.0 / replicas as f64 });
        let types: Vec<TensorType> = reads.iter().map(|p| p.ty.clone()).collect();
        let body = body::of_op(op, &types)?;
        let (kind, region) = (self.library_kind(&body), FusionKind::Pointwise);
        self.run_kernel(kind, region, body, reads, writes, node);
        Ok(())
    }
}

/// The scalar operands of a step: learning rate, exponent, least size, threshold, decay, clip value, step,
/// factor, finite flag.
fn scalars(node: &Node) -> Result<[frit_ir::ValueId; 9], Diagnostic> {
    node.inputs
        .get(3..)
        .and_then(|all| all.try_into().ok())
        .ok_or_else(|| internal("Adafactor has other operands").at(&node.origin))
}
