//! Lowers Muon's steps. The momentum of every flat group is updated first, each rank's part of it. Then, group by group, what is to be
//! orthogonalized is gathered in bf16, each matrix is orthogonalized whole by matmuls on every rank, and the rank keeps its part, along
//! which it steps its parameters.
//!
//! Source: Jordan et al. 2024, Muon; with the roundings of `torch.optim.Muon`.

use super::optimizer::{Body, ParamGroups, Step, param_group_offsets, types};
use super::{Lowering, body, internal};
use frit_ir::ops::{
    BinaryFn, Cast, Constant, FusionKind, MatMul, MuonMomentum, MuonRule, MuonStep, OptimizerKind,
    Reduce, ReduceFn, StateName, UnaryFn,
};
use frit_ir::plan::{Action, BufferClass, GroupId, KernelKind, Place, Stream};
use frit_ir::{DType, Diagnostic, Graph, Node, Op, Region, Tensor, TensorType, ValueId};

/// The scalar operands of a step.
struct Scalars {
    keep: ValueId,
    coefficients: [ValueId; 3],
    eps: ValueId,
    clip: ValueId,
    factor: ValueId,
    found_inf: ValueId,
}

fn scalars(node: &Node) -> Result<Scalars, Diagnostic> {
    let &[_, keep, a, b, c, eps, _, clip, _, factor, found_inf] = &node.inputs[3..] else {
        return Err(internal("Muon has other operands").at(&node.origin));
    };
    Ok(Scalars { keep, coefficients: [a, b, c], eps, clip, factor, found_inf })
}

fn rule(node: &Node) -> MuonRule {
    if let Op::OptimizerStep(step) = &node.op { step.muon } else { MuonRule::default() }
}

/// Scalars of the iterations, in memory.
struct Iteration {
    coefficients: [Place; 3],
    eps: Place,
    steps: usize,
}

impl<'a> Lowering<'a> {
    pub(super) fn muon_step(&mut self, group: GroupId, node: &'a Node) -> Result<(), Diagnostic> {
        if self.muon.is_empty() {
            self.orthogonalize_momenta()?;
        }
        if !self.is_last_of_all(group, node)? {
            return Ok(());
        }
        let along = self.muon.get(&group).cloned();
        let along = along.ok_or_else(|| internal("a group has no direction"))?;
        let master = self.master(group);
        let (mut body, mut reads) = (Body::new(), vec![master.clone(), along]);
        let mut operands: Vec<ValueId> =
            reads.iter().map(|p| body.input(p.ty.clone())).collect::<Result<_, _>>()?;
        let table = match param_group_offsets(&self.plan.groups[group]) {
            Some(offsets) => {
                let table = body.input(offsets.ty.clone())?;
                reads.push(offsets);
                Some(table)
            }
            None => None,
        };
        let [lr, decay] = [0, 1].map(|which| {
            let hypers = self.hypers_of(group);
            hypers.iter().map(|h| h[which]).collect::<Vec<ValueId>>()
        });
        operands.push(self.varying(&mut body, &mut reads, (group, table), &lr, node)?);
        operands.push(self.ratio(&mut body, (group, table))?);
        operands.push(self.varying(&mut body, &mut reads, (group, table), &decay, node)?);
        let found_inf = self.place(scalars(node)?.found_inf)?;
        operands.push(body.input(found_inf.ty.clone())?);
        reads.push(found_inf);
        let step = Op::MuonStep(MuonStep { adjust_lr: rule(node).adjust_lr });
        let results = body.add(step, &operands)?;
        let (mut body, mut writes) = (body.done(&results), vec![master]);
        self.write_copies(group, &mut body, &mut writes)?;
        self.steps.push(Step { body, reads, writes, node });
        Ok(())
    }

    /// What the learning rate of each element of a group is multiplied by.
    fn ratio(
        &self,
        body: &mut Body,
        (group, table): (GroupId, Option<ValueId>),
    ) -> Result<ValueId, Diagnostic> {
        let ratios = self.ratios_of(group);
        let constant = |body: &mut Body, i: usize| {
            let value = Tensor::scalar(ratios[i]);
            Ok(body.add(Op::Constant(Constant { value }), &[])?[0])
        };
        match table.filter(|_| ratios.iter().any(|r| *r != ratios[0])) {
            Some(table) => self.choice(body, (group, table), constant),
            None => constant(body, 0),
        }
    }

    /// One step of each group that Muon steps.
    fn muon_groups(&self) -> Result<Vec<(GroupId, &'a Node)>, Diagnostic> {
        let mut groups: Vec<(GroupId, &'a Node)> = Vec::new();
        for (_, node) in self.graph.nodes() {
            if matches!(&node.op, Op::OptimizerStep(op) if op.kind == OptimizerKind::Muon) {
                let (group, _) = self.group_of[&self.param_of(node.inputs[0], node)?];
                if groups.iter().all(|(other, _)| *other != group) {
                    groups.push((group, node));
                }
            }
        }
        Ok(groups)
    }

    /// The momenta of all groups, which may then be gathered ahead of their use, and the directions of their steps.
    fn orthogonalize_momenta(&mut self) -> Result<(), Diagnostic> {
        let groups = self.muon_groups()?;
        let (mut steps, mut mixed) = (Vec::new(), Vec::new());
        for &(group, node) in &groups {
            let Scalars { keep, clip, factor, found_inf, .. } = scalars(node)?;
            let momentum = self.group_state(group, &StateName::MuonMomentum)?;
            let gradient = self.gradient.at.get(&group).cloned();
            let gradient = gradient.ok_or_else(|| internal("a group has no gradient"))?;
            let mut reads = vec![gradient, momentum.clone()];
            for scalar in [keep, clip, factor, found_inf] {
                reads.push(self.place(scalar)?);
            }
            let op = Op::MuonMomentum(MuonMomentum { nesterov: rule(node).nesterov });
            let body = body::of_op(op, &types(&reads))?;
            let name = format!("{} direction", self.unit_name(group));
            let part = self.part(group, DType::BF16);
            let to = self.workspace(&name, BufferClass::Gradient, part);
            steps.push(Step { body, reads, writes: vec![momentum, to.clone()], node });
            mixed.push(to);
        }
        self.in_few_launches(steps)?;
        for ((group, node), part) in groups.into_iter().zip(mixed) {
            let along = self.direction(group, part, node)?;
            self.muon.insert(group, along);
        }
        Ok(())
    }

    /// This rank's part of a group in which each matrix is orthogonalized, from its part of what is not.
    fn direction(
        &mut self,
        group: GroupId,
        part: Place,
        node: &'a Node,
    ) -> Result<Place, Diagnostic> {
        let g = &self.plan.groups[group];
        let (shards, unit) = (g.shards(), self.unit_name(group));
        let matrices: Vec<(usize, frit_ir::Shape)> = g
            .segments
            .iter()
            .map(|s| (s.offset, self.plan.params[s.param].ty.shape.clone()))
            .collect();
        let whole = if shards > 1 {
            let ty = self.whole(group, DType::BF16);
            let recv = self.workspace(&format!("{unit} directions"), BufferClass::Gathered, ty);
            let send = part.clone();
            let action = Action::AllGather { group, ranks: None, send, recv: recv.clone() };
            let label = format!("all_gather direction {unit}");
            self.task(&label, Stream::Gather, Region::Update, &node.origin, action);
            recv
        } else {
            part.clone()
        };
        let Scalars { coefficients: [a, b, c], eps, .. } = scalars(node)?;
        let iteration = Iteration {
            coefficients: [self.place(a)?, self.place(b)?, self.place(c)?],
            eps: self.place(eps)?,
            steps: rule(node).ns_steps,
        };
        for (offset, shape) in matrices {
            let ty = TensorType::new(DType::BF16, shape);
            let offset = offset * ty.dtype.size();
            let matrix = Place { offset, ty, ..whole.clone() };
            self.orthogonalize(&matrix, &iteration, node)?;
        }
        if shards == 1 {
            return Ok(whole);
        }
        // The part before was sent; a rank's own part of the whole is where the parameters of its shard are.
        let kept = self.workspace(&format!("{unit} direction"), BufferClass::Gradient, part.ty);
        let action = Action::Reshard { group, ranks: shards, from: whole, to: kept.clone() };
        let label = format!("direction {unit}");
        self.task(&label, Stream::Compute, Region::Update, &node.origin, action);
        Ok(kept)
    }

    /// Orthogonalizes a matrix where it is.
    fn orthogonalize(
        &mut self,
        matrix: &Place,
        iteration: &Iteration,
        node: &'a Node,
    ) -> Result<(), Diagnostic> {
        let &[rows, cols] = matrix.ty.shape.dims() else {
            return Err(internal("Muon steps no matrix").at(&node.origin));
        };
        // The smaller of X·Xᵀ and Xᵀ·X.
        let (wide, n) = (rows <= cols, rows.min(cols));
        let [a, b, c] = &iteration.coefficients;
        let square = |dtype| TensorType::new(dtype, [n, n]);
        let mut x = self.normalized(matrix, &iteration.eps, node)?;
        for left in (0..iteration.steps).rev() {
            let gram = self.intermediate(square(DType::BF16));
            let own = MatMul { trans_a: !wide, trans_b: wide, out: None };
            self.matmul(own, [&x, &x], &gram, node)?;
            let squared = self.intermediate(square(DType::F32));
            let wider = MatMul { out: Some(DType::F32), ..MatMul::default() };
            self.matmul(wider.clone(), [&gram, &gram], &squared, node)?;
            let factor = self.intermediate(square(DType::BF16));
            self.mixed((&gram, b), (&squared, Some(c)), &factor, node)?;
            let product = self.intermediate(matrix.ty.with_dtype(DType::F32));
            match wide {
                true => self.matmul(wider, [&factor, &x], &product, node)?,
                false => {
                    let op = MatMul { trans_b: true, ..wider };
                    self.matmul(op, [&x, &factor], &product, node)?;
                }
            }
            let next = match left {
                0 => matrix.clone(),
                _ => self.intermediate(matrix.ty.clone()),
            };
            self.mixed((&x, a), (&product, None), &next, node)?;
            x = next;
        }
        Ok(())
    }

    fn intermediate(&mut self, ty: TensorType) -> Place {
        self.workspace("orthogonalization", BufferClass::Activation, ty)
    }

    /// A matrix divided by its norm, which is at least `eps`.
    fn normalized(
        &mut self,
        matrix: &Place,
        eps: &Place,
        node: &'a Node,
    ) -> Result<Place, Diagnostic> {
        let rows = matrix.ty.shape.dims()[0];
        let sums = self.intermediate(TensorType::new(DType::F32, [rows]));
        self.squares(matrix, &sums, node)?;
        // Read as one row.
        let row = Place { ty: TensorType::new(DType::F32, [1, rows]), ..sums };
        let total = self.intermediate(TensorType::new(DType::F32, [1]));
        let reduce = Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![1], keep_dims: false });
        let body = body::of_op(reduce, std::slice::from_ref(&row.ty))?;
        self.row_reduction(body, row, total.clone(), node);
        let mut body = Body::new();
        let reads = vec![matrix.clone(), total, eps.clone()];
        let [x, total, eps] = body.inputs(&reads)?;
        let root = body.add(Op::Unary(UnaryFn::Sqrt), &[total])?[0];
        let norm = body.cast(root, DType::BF16)?;
        let least = body.cast(eps, DType::BF16)?;
        let norm = body.add(Op::Binary(BinaryFn::Max), &[norm, least])?[0];
        let x = body.add(Op::Binary(BinaryFn::Div), &[x, norm])?[0];
        let to = self.intermediate(matrix.ty.clone());
        self.pointwise(body.done(&[x]), reads, to.clone(), node);
        Ok(to)
    }

    /// The sums of squares of the rows of a matrix.
    fn squares(&mut self, matrix: &Place, to: &Place, node: &'a Node) -> Result<(), Diagnostic> {
        let squares = |body: &mut Body| {
            let x = body.input(matrix.ty.clone())?;
            let x = body.cast(x, DType::F32)?;
            Ok::<ValueId, Diagnostic>(body.add(Op::Binary(BinaryFn::Mul), &[x, x])?[0])
        };
        let sum = Op::Reduce(Reduce { f: ReduceFn::Sum, axes: vec![1], keep_dims: false });
        let mut body = Body::new();
        let squared = squares(&mut body)?;
        let sums = body.add(sum.clone(), &[squared])?[0];
        let body = body.done(&[sums]);
        if (self.options.generated)(&body, FusionKind::RowReduce) {
            self.row_reduction(body, matrix.clone(), to.clone(), node);
            return Ok(());
        }
        let mut body = Body::new();
        let squared = squares(&mut body)?;
        let all = self.intermediate(matrix.ty.with_dtype(DType::F32));
        self.pointwise(body.done(&[squared]), vec![matrix.clone()], all.clone(), node);
        let body = body::of_op(sum, std::slice::from_ref(&all.ty))?;
        self.row_reduction(body, all, to.clone(), node);
        Ok(())
    }

    fn row_reduction(&mut self, body: Graph, read: Place, to: Place, node: &'a Node) {
        let region = FusionKind::RowReduce;
        let kind = match (self.options.generated)(&body, region) {
            true => KernelKind::Generated,
            false => self.library_kind(&body),
        };
        self.run_kernel(kind, region, body, vec![read], vec![to], node);
    }

    fn pointwise(&mut self, body: Graph, reads: Vec<Place>, to: Place, node: &'a Node) {
        let kind = self.pointwise_kind(&body);
        self.run_kernel(kind, FusionKind::Pointwise, body, reads, vec![to], node);
    }

    fn matmul(
        &mut self,
        op: MatMul,
        [a, b]: [&Place; 2],
        to: &Place,
        node: &'a Node,
    ) -> Result<(), Diagnostic> {
        let body = body::of_op(Op::MatMul(op), &[a.ty.clone(), b.ty.clone()])?;
        let kind = self.library_kind(&body);
        let (reads, writes) = (vec![a.clone(), b.clone()], vec![to.clone()]);
        self.run_kernel(kind, FusionKind::Pointwise, body, reads, writes, node);
        Ok(())
    }

    /// A matrix times a scalar, plus an f32 matrix, times another if there is one; rounded once, to bf16.
    fn mixed(
        &mut self,
        (x, of_x): (&Place, &Place),
        (y, of_y): (&Place, Option<&Place>),
        to: &Place,
        node: &'a Node,
    ) -> Result<(), Diagnostic> {
        let mut body = Body::new();
        let mut reads = vec![x.clone(), of_x.clone(), y.clone()];
        let [value, scale, mut other] = body.inputs(&reads)?;
        let value = body.cast(value, DType::F32)?;
        let value = body.add(Op::Binary(BinaryFn::Mul), &[value, scale])?[0];
        if let Some(of_y) = of_y {
            let scale = body.input(of_y.ty.clone())?;
            reads.push(of_y.clone());
            other = body.add(Op::Binary(BinaryFn::Mul), &[other, scale])?[0];
        }
        let sum = body.add(Op::Binary(BinaryFn::Add), &[value, other])?[0];
        let sum = body.cast(sum, DType::BF16)?;
        self.pointwise(body.done(&[sum]), reads, to.clone(), node);
        Ok(())
    }
}

impl ParamGroups {
    /// By what Muon multiplies the learning rate of a parameter; 1 with any other optimizer.
    pub(super) fn ratio(graph: &Graph, node: &Node) -> f64 {
        match &node.op {
            Op::OptimizerStep(step) if step.kind == OptimizerKind::Muon => {
                // Kernels hold it in f32.
                f64::from(step.muon.adjust_lr.ratio(&graph.ty(node.inputs[0]).shape) as f32)
            }
            _ => 1.0,
        }
    }
}

impl Body {
    fn cast(&mut self, value: ValueId, to: DType) -> Result<ValueId, Diagnostic> {
        Ok(self.add(Op::Cast(Cast { to }), &[value])?[0])
    }

    fn inputs<const N: usize>(&mut self, places: &[Place]) -> Result<[ValueId; N], Diagnostic> {
        let values: Vec<ValueId> =
            places.iter().map(|p| self.input(p.ty.clone())).collect::<Result<_, _>>()?;
        values.try_into().map_err(|_| internal("a body has other operands"))
    }
}
