//! P319  Muon steps each matrix of a group once, along the whole of its momentum orthogonalized, at
//!       the rate of its shape; its momentum is of the gradient, factor and finite flag that were
//!       checked
//!
//! Checked from each step backwards: its direction is this rank's part of the whole group, in which each matrix was written by a number of
//! iterations from the same matrix of the momentum, gathered whole.

use super::host::home;
use super::training::Used;
use frit_ir::ops::{MatMul, StateName};
use frit_ir::plan::{Action, BufferId, Group, GroupId, PhaseName, Place, Plan, TaskId};
use frit_ir::{DType, Graph, Node, Op, Shape, TensorType, ValueId};
use std::collections::HashMap;

type Problem = &'static str;

const DIRECTION: Problem = "does not step along this rank's part of its orthogonalized momentum";
const ITERATION: Problem = "does not step along matrices that were orthogonalized whole";

/// What is known of Muon's work on the groups of a plan.
pub(super) struct Matrices<'a> {
    plan: &'a Plan,
    /// Tasks of the update that write a buffer, ascending.
    writers: HashMap<BufferId, Vec<TaskId>>,
    /// The task that updated the momentum of a group, and what it left to be orthogonalized.
    momenta: HashMap<GroupId, (TaskId, &'a Place)>,
    /// Iterations per matrix, the same for all.
    iterations: Option<usize>,
}

impl<'a> Matrices<'a> {
    pub(super) fn new(plan: &'a Plan) -> Self {
        let mut writers: HashMap<BufferId, Vec<TaskId>> = HashMap::new();
        let is_muon = |g: &Group| g.states.iter().any(|s| s.name == StateName::MuonMomentum);
        if plan.groups.iter().any(is_muon) {
            let update = plan.tasks_of(PhaseName::Update);
            for i in update.start.until(update.end) {
                for place in plan.tasks[i].action.writes() {
                    writers.entry(place.buffer).or_default().push(i);
                }
            }
        }
        Matrices { plan, writers, momenta: HashMap::new(), iterations: None }
    }

    /// Checks a node of task `i` that updates momentum or steps; the group that it steps, if it does.
    pub(super) fn verify(
        &mut self,
        i: TaskId,
        (body, node): (&Graph, &Node),
        used: &Used<'a>,
        unscaled: Option<&[Place]>,
    ) -> Result<Option<GroupId>, Problem> {
        let Some([factor, found_inf, ..]) = unscaled else {
            return Err("comes before the gradients are checked");
        };
        let read = |operand: usize| used.operands[operand];
        if let Op::MuonStep(step) = &node.op {
            if read(5) != Some(found_inf) {
                return Err("does not read the finite flag that was checked");
            }
            let group = self.stepped(i, used)?;
            let ratio = |matrix: &Shape| step.adjust_lr.ratio(matrix);
            self.rates(&self.plan.groups[group], (body, node.inputs[3]), ratio)?;
            return Ok(Some(group));
        }
        if (read(4), read(5)) != (Some(factor), Some(found_inf)) {
            return Err("does not read the factor and finite flag that were checked");
        }
        if !self.is_hyper(read(2), "muon_momentum") || !self.is_hyper(read(3), "clip_grad_value") {
            return Err("does not read the settings of Muon");
        }
        let of = |g: &&frit_ir::plan::GradientSpec| Some(&g.place) == read(0);
        let Some(group) = self.plan.gradients.iter().find(of).map(|g| g.group) else {
            return Err("does not read the gradient of a group");
        };
        let g = &self.plan.groups[group];
        let state = g.states.iter().find(|s| s.name == StateName::MuonMomentum);
        let before = read(1).map(|p| home(self.plan, i, p));
        let keeps = before.zip(state).is_some_and(|(p, s)| p.buffer == s.buffer && is_part(&p, g));
        if !keeps || used.written[0] != read(1) {
            return Err("does not update the momentum of its group");
        }
        let Some(mixed) = used.written[1].filter(|p| is_part(p, g)) else {
            return Err("does not leave a momentum to be orthogonalized");
        };
        match self.momenta.insert(group, (i, mixed)) {
            None => Ok(None),
            Some(_) => Err("updates the momentum of its group twice"),
        }
    }

    /// The group that task `i` steps, whose direction is what it has to be.
    fn stepped(&mut self, i: TaskId, used: &Used<'a>) -> Result<GroupId, Problem> {
        let plan = self.plan;
        let master = used.operands[0].map(|p| home(plan, i, p));
        let of = |p: &Place| plan.groups.position(|g| g.master == p.buffer && is_part(p, g));
        let group = master.as_ref().and_then(of).ok_or("steps no group")?;
        if used.written[0] != used.operands[0] {
            return Err("does not step a group where it is");
        }
        let g = &plan.groups[group];
        if g.param_group_offsets.is_some_and(|b| used.reads.iter().all(|r| r.buffer != b)) {
            return Err("does not read where its parameter groups begin");
        }
        let along = used.operands[1].filter(|p| is_part(p, g)).ok_or(DIRECTION)?;
        let (momentum, mixed) = *self.momenta.get(&group).ok_or(DIRECTION)?;
        let (whole, before) = if g.shards() == 1 {
            (along, i)
        } else {
            let kept = self.writer(along, i).ok_or(DIRECTION)?;
            match &plan.tasks[kept].action {
                Action::Reshard { group: other, ranks, from, to }
                    if (*other, *ranks, to) == (group, g.shards(), along) =>
                {
                    (from, kept)
                }
                _ => return Err(DIRECTION),
            }
        };
        for segment in &g.segments {
            let shape = plan.params[segment.param].ty.shape.clone();
            let ty = TensorType::new(DType::BF16, shape);
            let offset = segment.offset * ty.dtype.size();
            let matrix = Place { offset, ty, ..whole.clone() };
            let (first, iterations) = self.iterations(&matrix, before).ok_or(ITERATION)?;
            if *self.iterations.get_or_insert(iterations) != iterations {
                return Err("orthogonalizes matrices by different numbers of iterations");
            }
            let source = self.writer_of_part(&matrix, first).ok_or(ITERATION)?;
            let gathered = match &plan.tasks[source].action {
                Action::AllGather { group: other, ranks: None, send, recv } => {
                    (*other, send, recv) == (group, mixed, whole)
                        && self.writer(send, source) == Some(momentum)
                }
                _ => g.shards() == 1 && source == momentum && mixed == whole,
            };
            if !gathered {
                return Err("orthogonalizes something else than the momentum of its group");
            }
        }
        Ok(group)
    }

    /// The task that begins to orthogonalize the matrix which a task before `before` left here, and the number of
    /// iterations.
    fn iterations(&self, matrix: &Place, before: TaskId) -> Option<(TaskId, usize)> {
        let &[rows, cols] = matrix.ty.shape.dims() else { return None };
        let wide = rows <= cols;
        let (mut x, mut at, mut n) = (matrix, before, 0);
        let matmul = |trans_a, trans_b| MatMul { trans_a, trans_b, out: None };
        loop {
            at = self.writer(x, at)?;
            let (ops, reads) = self.kernel(at)?;
            if ops.contains(&"div") {
                let [first, norm, eps] = reads else { return None };
                let fits = ops == ["sqrt", "cast", "cast", "max", "div"]
                    && (first, n > 0) == (matrix, true)
                    && self.is_hyper(Some(eps), "muon_ns_eps");
                return (fits && self.is_norm(norm, matrix, at)).then_some((at, n));
            }
            let [before, a, product] = reads else { return None };
            let (left, right) = if wide { (None, Some(before)) } else { (Some(before), None) };
            let op = matmul(false, !wide);
            let [of_left, of_right] = self.multiplied(product, at, &op)?;
            let factor = if wide { of_left } else { of_right };
            let (ops_of_factor, of_factor) = self.kernel(self.writer(factor, at)?)?;
            let [gram, b, squared, c] = of_factor else { return None };
            let operands = (left.is_none_or(|x| x == of_left), right.is_none_or(|x| x == of_right));
            let fits = ops == ["cast", "mul", "add", "cast"]
                && ops_of_factor == ["cast", "mul", "mul", "add", "cast"]
                && operands == (true, true)
                && self.multiplied(squared, at, &matmul(false, false))? == [gram, gram]
                && self.multiplied(gram, at, &matmul(!wide, wide))? == [before, before];
            let coefficients = [("muon_ns_a", a), ("muon_ns_b", b), ("muon_ns_c", c)];
            let known = |(key, place): (&str, &Place)| self.is_hyper(Some(place), key);
            if !fits || !coefficients.into_iter().all(known) {
                return None;
            }
            (x, n) = (before, n + 1);
        }
    }

    /// Whether a place has the sum of squares of a matrix, summed by rows.
    fn is_norm(&self, norm: &Place, matrix: &Place, before: TaskId) -> bool {
        let reads_squares = |place: &Place, at: TaskId| -> Option<bool> {
            let (ops, reads) = self.kernel(self.writer_of_part(place, at)?)?;
            match &ops[..] {
                ["cast", "mul", "reduce"] | ["cast", "mul"] => Some(reads == [matrix.clone()]),
                _ => None,
            }
        };
        let through = |place: &Place, at: TaskId| -> Option<(Place, TaskId)> {
            let i = self.writer_of_part(place, at)?;
            match self.kernel(i)? {
                (ops, [read]) if ops == ["reduce"] => Some((read.clone(), i)),
                _ => None,
            }
        };
        let Some((rows, at)) = through(norm, before) else { return false };
        reads_squares(&rows, at)
            .or_else(|| through(&rows, at).and_then(|(all, at)| reads_squares(&all, at)))
            .unwrap_or(false)
    }

    /// The operands of the matmul of this kind that wrote a place.
    fn multiplied(&self, place: &Place, before: TaskId, op: &MatMul) -> Option<[&'a Place; 2]> {
        let Action::Kernel { kernel, reads, .. } =
            &self.plan.tasks[self.writer(place, before)?].action
        else {
            return None;
        };
        let mut nodes = self.plan.kernels[*kernel].body.nodes().map(|(_, n)| n);
        let found = nodes.find_map(|n| if let Op::MatMul(op) = &n.op { Some(op) } else { None })?;
        let same = (found.trans_a, found.trans_b) == (op.trans_a, op.trans_b);
        match (same, &self.kernel_ops(*kernel)[..], &reads[..]) {
            (true, ["matmul"], [a, b]) => Some([a, b]),
            _ => None,
        }
    }

    /// The operations of the kernel that a task runs, and what it reads.
    fn kernel(&self, i: TaskId) -> Option<(Vec<&'static str>, &'a [Place])> {
        let Action::Kernel { kernel, reads, .. } = &self.plan.tasks[i].action else { return None };
        Some((self.kernel_ops(*kernel), reads))
    }

    fn kernel_ops(&self, kernel: frit_ir::plan::KernelId) -> Vec<&'static str> {
        let nodes = self.plan.kernels[kernel].body.nodes().map(|(_, n)| &n.op);
        nodes.filter(|op| !op.is_leaf()).map(Op::name).collect()
    }

    /// The last task before `before` that writes any of these bytes, if it writes exactly this.
    fn writer(&self, place: &Place, before: TaskId) -> Option<TaskId> {
        let i = self.writer_of_part(place, before)?;
        self.plan.tasks[i].action.writes().contains(&place).then_some(i)
    }

    /// The last task before `before` that writes any of these bytes.
    fn writer_of_part(&self, place: &Place, before: TaskId) -> Option<TaskId> {
        let end = place.offset + place.ty.bytes();
        let overlaps = |w: &&Place| {
            w.buffer == place.buffer && w.offset < end && place.offset < w.offset + w.ty.bytes()
        };
        let writes = |i: &&TaskId| self.plan.tasks[**i].action.writes().iter().any(overlaps);
        let all = self.writers.get(&place.buffer)?;
        let earlier = &all[..all.partition_point(|i| *i < before)];
        earlier.iter().rev().find(writes).copied()
    }

    fn is_hyper(&self, place: Option<&Place>, key: &str) -> bool {
        let name = format!("optimizer.{key}");
        let hyper = self.plan.hyper.iter().find(|h| h.name == name);
        hyper.is_some_and(|h| place.is_some_and(|p| p.buffer == h.buffer))
    }

    /// Whether the rates of a group's matrices are multiplied by what their shapes ask for.
    fn rates(
        &self,
        g: &Group,
        (body, value): (&Graph, ValueId),
        ratio: impl Fn(&Shape) -> f64,
    ) -> Result<(), Problem> {
        let constant = |v: ValueId| body.constant(v).and_then(|c| c.as_splat());
        let by_group: Vec<Option<f64>> = match (&body.def(value).op, constant(value)) {
            (_, Some(x)) => vec![Some(x); g.param_groups.len()],
            (Op::ByParamGroup(_), _) => {
                body.def(value).inputs.iter().step_by(2).map(|v| constant(*v)).collect()
            }
            _ => vec![],
        };
        let fits = g.segments.iter().all(|segment| {
            let number = g.param_groups.partition_point(|p| p.offset <= segment.offset);
            let expected = ratio(&self.plan.params[segment.param].ty.shape);
            let found = number.checked_sub(1).and_then(|n| by_group.get(n).copied().flatten());
            found.is_some_and(|x| (x - expected).abs() <= 1e-6 * expected)
        });
        if fits && by_group.len() == g.param_groups.len() {
            return Ok(());
        }
        Err("does not step each matrix at the rate of its shape")
    }
}

/// Whether a place has as many elements as a rank's part of a group, from the first on.
fn is_part(place: &Place, g: &Group) -> bool {
    place.offset == 0 && place.ty.shape.numel() == g.shard_numel
}
