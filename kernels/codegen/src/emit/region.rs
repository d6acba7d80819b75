//! Lowers the body of a fused region to a [`Program`]: an iteration space, the expressions at each of its points, and the stores.
//!
//! Values are lowered on demand, from the results to the operands, each at the view at which it is used. f16 and bf16
//! values stay in f32 inside the region; explicit casts and stores round.

use super::composite;
use super::expr::{Dag, Expr, Id, Over, Ty};
use super::integer;
use super::optimizer;
use super::row_ops;
use super::scalars;
use super::view::{Affine, Space, Stop, View};
use crate::error::Unsupported;
use frit_ir::ops::{CompareFn, FusionKind, ReduceFn};
use frit_ir::{DType, Graph, Node, Op, Shape, TensorType, ValueId};
use std::collections::{HashMap, HashSet};

/// A result and where it is written.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// Position among operands and results.
    pub(crate) operand: usize,
    pub(crate) at: Affine,
    pub(crate) value: Id,
}

/// What a kernel computes. The last atom of the space is the column; those before are the rows.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) kind: FusionKind,
    pub(crate) space: Space,
    pub(crate) dag: Dag,
    pub(crate) stores: Vec<Store>,
    /// Types of the operands, then of the results.
    pub(crate) types: Vec<TensorType>,
    pub(crate) n_inputs: usize,
    /// For each expression, whether it depends on the row and on the column.
    pub(crate) depends: Vec<Dependence>,
    /// For each expression, whether some store depends on it.
    pub(crate) live: Vec<bool>,
}

/// Whether a value varies with the row and with the column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dependence {
    pub(crate) row: bool,
    pub(crate) col: bool,
}

impl Program {
    pub(crate) fn cols(&self) -> usize {
        self.space.sizes.last().copied().unwrap_or(1)
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.space.n_rows
    }

    /// Sizes of the row atoms.
    pub(crate) fn row_sizes(&self) -> &[usize] {
        &self.space.sizes[..self.space.n_rows]
    }

    pub(crate) fn rows(&self) -> usize {
        self.row_sizes().iter().product()
    }

    /// Whether a result has one element per column, of all rows.
    pub(crate) fn is_of_column(&self, store: &Store) -> bool {
        let (rows, col) = store.at.strides.split_at(self.n_rows());
        match self.kind {
            FusionKind::ColReduce => true,
            FusionKind::RowColReduce => rows.iter().all(|&s| s == 0) && col != [0],
            _ => false,
        }
    }

    pub(crate) fn depends(&self, id: Id) -> Dependence {
        self.depends[id.index()]
    }

    /// Whether an integer may be divided by 0.
    pub(crate) fn divides_by_zero(&self) -> bool {
        self.dag.ids().any(|id| self.live[id.index()] && integer::may_divide_by_zero(&self.dag, id))
    }
}

/// Analyzes the body of a region.
///
/// # Errors
/// What is not compiled, and why.
pub(crate) fn analyze(body: &Graph, kind: FusionKind) -> Result<Program, Unsupported> {
    if body.outputs.is_empty() {
        return Err(Unsupported::new("fusion", "it has no result"));
    }
    let mut space = iteration_space(body, kind)?;
    loop {
        match Lowering::new(body, kind, space.clone()).run() {
            Ok(program) => return Ok(program),
            Err(Stop::Cut(atom, inner)) => space = space.cut(atom, inner),
            Err(Stop::Unsupported(reason)) => return Err(reason),
        }
    }
}

fn iteration_space(body: &Graph, kind: FusionKind) -> Result<Space, Unsupported> {
    let result = &body.ty(body.outputs[0].value).shape;
    let reduced = || {
        body.nodes().find_map(|(_, node)| {
            let types: Vec<&TensorType> = node.inputs.iter().map(|v| body.ty(*v)).collect();
            row_ops::reduced(&node.op, &types, kind)
        })
    };
    let space = match kind {
        FusionKind::Pointwise => Space::new(&[], result.dims()),
        FusionKind::RowReduce | FusionKind::ColReduce | FusionKind::RowColReduce => {
            match (reduced(), result.rank()) {
                (Some((shape, split, _)), _) => {
                    let (rows, cols) = shape.0.split_at(split);
                    Space::new(rows, cols)
                }
                (None, 0) => Space::new(&[], &[]),
                (None, rank) => {
                    let (rows, cols) = result.0.split_at(rank - 1);
                    Space::new(rows, cols)
                }
            }
        }
        FusionKind::MultiTensor => {
            return Err(Unsupported::new("fusion", "it is several regions"));
        }
        FusionKind::Gemm
        | FusionKind::Attention
        | FusionKind::BatchNorm
        | FusionKind::ChannelsLast => {
            return Err(Unsupported::new("fusion", "it is a library kernel"));
        }
    };
    if space.sizes.contains(&0) {
        return Err(Unsupported::new("fusion", "it has no elements"));
    }
    Ok(space)
}

/// The state of one analysis.
pub(crate) struct Lowering<'g> {
    pub(crate) body: &'g Graph,
    pub(crate) kind: FusionKind,
    pub(crate) space: Space,
    pub(crate) dag: Dag,
    /// The operands: the `input` leaves, in order.
    operands: Vec<ValueId>,
    memo: HashMap<(ValueId, View), Id>,
}

impl<'g> Lowering<'g> {
    fn new(body: &'g Graph, kind: FusionKind, space: Space) -> Self {
        let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
        let operands = inputs.map(|(_, n)| n.outputs[0]).collect();
        Lowering { body, kind, space, dag: Dag::default(), operands, memo: HashMap::new() }
    }

    fn run(mut self) -> Result<Program, Stop> {
        let n_inputs = self.operands.len();
        let mut types: Vec<TensorType> =
            self.operands.iter().map(|&v| self.body.ty(v).clone()).collect();
        let mut stores = Vec::new();
        for (i, output) in self.body.outputs.iter().enumerate() {
            let ty = self.body.ty(output.value).clone();
            let view = self.result_view(output.value)?;
            let mut value = self.lower(output.value, &view)?;
            // The store rounds to the same dtype anyway.
            if let Expr::Round(dtype, inner) = *self.dag.get(value)
                && dtype == ty.dtype
            {
                value = inner;
            }
            let at = self.space.offset(&view, &ty.shape);
            stores.push(Store { operand: n_inputs + i, at, value });
            types.push(ty);
        }
        let Lowering { kind, space, dag, .. } = self;
        let mut program = Program {
            kind,
            space,
            dag,
            stores,
            types,
            n_inputs,
            depends: Vec::new(),
            live: Vec::new(),
        };
        collapse(&mut program);
        if program.space.sizes.len() != program.space.n_rows + 1 {
            let why = "its columns are not one contiguous axis for every operand";
            return Err(Unsupported::new("fusion", why).into());
        }
        dependences(&mut program);
        program.live = below(&program, program.stores.iter());
        check(&program)?;
        Ok(program)
    }

    /// The atoms that a reduction runs over.
    pub(crate) fn atoms(&self, over: Over) -> Vec<usize> {
        match over {
            Over::Rows => self.space.rows(),
            Over::Cols => self.space.cols(),
        }
    }

    fn result_view(&self, value: ValueId) -> Result<View, Stop> {
        let shape = &self.body.ty(value).shape;
        let (all, rows, cols) = (self.space.all(), self.space.rows(), self.space.cols());
        let n = shape.numel();
        let node = self.body.def(value);
        let types: Vec<&TensorType> = node.inputs.iter().map(|v| self.body.ty(*v)).collect();
        let reduced = row_ops::reduced(&node.op, &types, self.kind);
        let atoms = match self.kind {
            FusionKind::ColReduce => cols,
            FusionKind::RowColReduce if reduced.is_some_and(|(.., over)| over == Over::Rows) => {
                cols
            }
            FusionKind::RowReduce | FusionKind::RowColReduce
                if n == self.space.extent(&rows) && n != self.space.extent(&all) =>
            {
                rows
            }
            _ => all,
        };
        self.space.group(&atoms, shape.dims(), "fusion")
    }

    /// The value at `view`.
    pub(crate) fn lower(&mut self, value: ValueId, view: &View) -> Result<Id, Stop> {
        let key = (value, view.clone());
        if let Some(&id) = self.memo.get(&key) {
            return Ok(id);
        }
        let mut id = self.lower_new(value, view)?;
        if let Some(ty) = Ty::of(self.body.ty(value).dtype) {
            // Only `sum_to` may change the compute type.
            id = self.dag.convert(ty, id);
        }
        self.memo.insert(key, id);
        Ok(id)
    }

    /// Operand `i` of the node at the view to which it broadcasts.
    pub(crate) fn operand(
        &mut self,
        node: &Node,
        i: usize,
        view: &View,
        shape: &Shape,
    ) -> Result<Id, Stop> {
        let from = &self.body.ty(node.inputs[i]).shape;
        let view = view.broadcast(shape, from);
        self.lower(node.inputs[i], &view)
    }

    fn lower_new(&mut self, value: ValueId, view: &View) -> Result<Id, Stop> {
        let body = self.body;
        let ty = body.ty(value);
        if let Some((input, at)) = self.address(value, view) {
            return self.load(input, at);
        }
        let node = body.def(value);
        compute_type(ty.dtype, &node.op)?;
        let index = body.value(value).index;
        let shape = &ty.shape;
        match &node.op {
            Op::Constant(constant) => {
                let Some(x) = constant.value.as_splat() else {
                    return Err(unsupported(&node.op, "its elements are not all equal").into());
                };
                Ok(match Ty::of(ty.dtype) {
                    Some(Ty::F32) => self.dag.float(x as f32),
                    Some(int) => self.dag.int(constant.value.to_i64s()[0], int),
                    None => {
                        return Err(
                            unsupported(&node.op, "its element type is not supported").into()
                        );
                    }
                })
            }
            Op::Reshape(_) => {
                let from = &body.ty(node.inputs[0]).shape;
                let view = self.space.reshape(view, shape, from)?;
                self.lower(node.inputs[0], &view)
            }
            Op::Expand(_) => self.operand(node, 0, view, shape),
            Op::Transpose(op) => self.lower(node.inputs[0], &view.transpose(&op.perm)),
            Op::Slice(op) => self.lower(node.inputs[0], &view.slice(op)),
            Op::Split(op) => {
                let start: usize = op.sizes[..index].iter().sum();
                self.lower(node.inputs[0], &view.shifted(op.axis, start))
            }
            Op::Cast(op) => {
                let from = body.ty(node.inputs[0]).dtype;
                let x = self.lower(node.inputs[0], view)?;
                composite::cast(&mut self.dag, x, from, op.to, &node.op).map_err(Stop::from)
            }
            op if op.is_pointwise() => {
                let mut operands = Vec::with_capacity(node.inputs.len());
                for i in 0..node.inputs.len() {
                    operands.push(self.operand(node, i, view, shape)?);
                }
                let dtype = body.ty(*node.inputs.last().unwrap_or(&value)).dtype;
                composite::pointwise(&mut self.dag, op, &operands, dtype).map_err(Stop::from)
            }
            Op::OptimizerStep(_) | Op::EmaStep | Op::MuonMomentum(_) | Op::MuonStep(_) => {
                let mut operands = Vec::with_capacity(node.inputs.len());
                for i in 0..node.inputs.len() {
                    operands.push(self.operand(node, i, view, shape)?);
                }
                Ok(match &node.op {
                    Op::OptimizerStep(op) => {
                        optimizer::step(&mut self.dag, op.kind, &operands)?[index]
                    }
                    Op::MuonMomentum(op) => {
                        optimizer::muon_momentum(&mut self.dag, op.nesterov, &operands)[index]
                    }
                    Op::MuonStep(_) => optimizer::muon_step(&mut self.dag, &operands),
                    _ => optimizer::ema(&mut self.dag, &operands),
                })
            }
            Op::ByParamGroup(_) => {
                let at = self.space.offset(view, shape);
                let at = self.dag.add(Expr::Index(at), Ty::I64);
                let mut result = self.operand(node, 0, view, shape)?;
                for i in (1..node.inputs.len()).step_by(2) {
                    let begin = self.operand(node, i, view, shape)?;
                    let value = self.operand(node, i + 1, view, shape)?;
                    let here = self.dag.compare(CompareFn::Ge, at, begin);
                    result = self.dag.select(here, value, result);
                }
                Ok(result)
            }
            Op::ScaledCast(op) => {
                let from = body.ty(node.inputs[0]).dtype;
                let x = self.lower(node.inputs[0], view)?;
                let factor = self.dag.float(op.factor as f32);
                let x = self.dag.times(x, factor);
                composite::cast(&mut self.dag, x, from, op.to, &node.op).map_err(Stop::from)
            }
            Op::LossScale(op) => {
                let x = self.lower(node.inputs[0], view)?;
                let factor = self.dag.float(op.factor as f32);
                Ok(self.dag.times(x, factor))
            }
            Op::Unscale(_) | Op::UpdateLossScale(_) | Op::UpdateStep | Op::LearningRate(_) => {
                scalars::lower(self, node, index)
            }
            _ => row_ops::lower(self, node, index, view),
        }
    }

    /// The address of a value that is an operand, or an operand reshaped: both are dense.
    pub(crate) fn address(&self, value: ValueId, view: &View) -> Option<(usize, Affine)> {
        let mut source = value;
        while let Op::Reshape(_) = self.body.def(source).op {
            source = self.body.def(source).inputs[0];
        }
        let operand = self.operands.iter().position(|&v| v == source)?;
        Some((operand, self.space.offset(view, &self.body.ty(value).shape)))
    }

    fn load(&mut self, operand: usize, at: Affine) -> Result<Id, Stop> {
        let dtype = self.body.ty(self.operands[operand]).dtype;
        let ty = Ty::of(dtype).ok_or_else(|| {
            Unsupported::new("input", "its element type is not computed in kernels")
        })?;
        Ok(self.dag.add(Expr::Load { operand, at }, ty))
    }
}

pub(crate) fn unsupported(op: &Op, why: &str) -> Unsupported {
    Unsupported::new(op.name(), why)
}

fn compute_type(dtype: DType, op: &Op) -> Result<Ty, Unsupported> {
    Ty::of(dtype).ok_or_else(|| unsupported(op, "its element type is not computed in kernels"))
}

/// Merges atoms that every access treats as one; the last atom becomes the column.
fn collapse(program: &mut Program) {
    let Program { kind, space, dag, stores, .. } = program;
    // In a pointwise region rows and columns are not distinguished before this.
    let border = match kind {
        FusionKind::Pointwise => 0,
        _ => space.n_rows,
    };
    let mut border = border;
    let mut atom = space.sizes.len();
    while atom > 1 {
        atom -= 1;
        let outer = atom - 1;
        if atom == border {
            continue;
        }
        let mut joins = stores.iter().all(|s| s.at.joins(outer, &space.sizes));
        dag.for_each_affine(|at| joins &= at.joins(outer, &space.sizes));
        if joins {
            stores.iter_mut().for_each(|s| s.at.join(outer));
            dag.for_each_affine(|at| at.join(outer));
            space.sizes[outer] *= space.sizes[atom];
            space.sizes.remove(atom);
            if atom < border {
                border -= 1;
            }
        }
    }
    let no_column = match kind {
        FusionKind::Pointwise => space.sizes.is_empty(),
        _ => space.sizes.len() == border,
    };
    if no_column {
        // One column: its index is 0, so that any stride is correct; 1 makes it an ordinary vector. An indexed load
        // reads one element, so its index must be a scalar.
        let picks = dag.ids().any(|id| matches!(dag.get(id), Expr::Pick { .. }));
        space.sizes.push(1);
        stores.iter_mut().for_each(|s| s.at.strides.push(1));
        dag.for_each_affine(|at| at.strides.push(i64::from(!picks)));
    }
    space.n_rows = match kind {
        FusionKind::Pointwise => space.sizes.len() - 1,
        _ => border,
    };
}

fn dependences(program: &mut Program) {
    let dag = &program.dag;
    let of_affine = |at: &Affine| {
        let (rows, cols) = at.strides.split_at(program.space.n_rows);
        Dependence { row: rows.iter().any(|&s| s != 0), col: cols.iter().any(|&s| s != 0) }
    };
    let mut depends: Vec<Dependence> = Vec::new();
    for id in dag.ids() {
        let mut own = match dag.get(id) {
            Expr::Load { at, .. } | Expr::Pick { at, .. } | Expr::Index(at) => of_affine(at),
            _ => Dependence::default(),
        };
        for operand in dag.operands(id) {
            let operand = depends[operand.index()];
            own.row |= operand.row;
            own.col |= operand.col;
        }
        match dag.get(id) {
            Expr::Reduce(_, Over::Rows, _) => own = Dependence { row: false, col: true },
            Expr::Reduce(_, Over::Cols, _) => own = Dependence { row: true, col: false },
            _ => {}
        }
        depends.push(own);
    }
    program.depends = depends;
}

/// Rejects what the loops of a kind cannot express.
fn check(program: &Program) -> Result<(), Unsupported> {
    let refuse = |why: &str| Err(Unsupported::new("fusion", why));
    let sums = col_reductions(program);
    let of_sum = |id: Id| match program.dag.get(id) {
        Expr::Reduce(.., operand) => reaches(program, *operand, &sums),
        _ => false,
    };
    if program.dag.ids().any(|id| program.live[id.index()] && of_sum(id)) {
        return refuse("a reduction depends on a reduction over the rows");
    }
    let by_column = |id: Id| match program.dag.get(id) {
        Expr::Pick { index, .. } => program.depends(*index).col,
        _ => false,
    };
    if program.dag.ids().any(by_column) {
        return refuse("an indexed element varies along a row");
    }
    for store in &program.stores {
        let on = program.depends(store.value);
        let (rows, cols) = store.at.strides.split_at(program.n_rows());
        let by_row = rows.iter().any(|&s| s != 0);
        if (on.col && cols == [0]) || (on.row && !by_row && program.rows() > 1) {
            return refuse("a result has fewer elements than what it depends on");
        }
    }
    Ok(())
}

/// Whether an expression is a target or depends on one.
fn reaches(program: &Program, id: Id, targets: &[Id]) -> bool {
    let (mut stack, mut seen) = (vec![id], HashSet::new());
    while let Some(id) = stack.pop() {
        if targets.contains(&id) {
            return true;
        }
        if seen.insert(id) {
            stack.extend(program.dag.operands(id));
        }
    }
    false
}

/// The reductions over the rows.
pub(crate) fn col_reductions(program: &Program) -> Vec<Id> {
    let over_rows = |id: &Id| matches!(program.dag.get(*id), Expr::Reduce(_, Over::Rows, _));
    program.dag.ids().filter(|id| program.live[id.index()] && over_rows(id)).collect()
}

/// The reductions of rows in the order of their levels: a reduction of level `k` depends on
/// some of level `k − 1` and on none of level `k` or above.
pub(crate) fn levels(program: &Program) -> Vec<Vec<Id>> {
    let mut level: Vec<usize> = Vec::new();
    let mut levels: Vec<Vec<Id>> = Vec::new();
    for id in program.dag.ids() {
        let below =
            program.dag.operands(id).iter().map(|o| level[o.index()]).max().unwrap_or_default();
        if let Expr::Reduce(_, Over::Cols, _) = program.dag.get(id)
            && program.live[id.index()]
        {
            if levels.len() == below {
                levels.push(Vec::new());
            }
            levels[below].push(id);
            level.push(below + 1);
        } else {
            level.push(below);
        }
    }
    levels
}

/// Pairs of an operand and a result that may share memory.
///
/// The operand must be read only at the offset that is being written; an indexed read elsewhere in the row is allowed
/// where only per-row results, which are written first, depend on it. A per-row result shares no memory: on CUDA,
/// threads of its block may still have to read the operand.
pub(crate) fn in_place(program: &Program) -> Vec<(usize, usize)> {
    // Expressions on which results with an element per column depend.
    let needed = below(program, program.stores.iter().filter(|s| s.at.strides.last() != Some(&0)));
    let may_share = |operand: usize, store: &Store| {
        let (from, to) = (&program.types[operand], &program.types[store.operand]);
        let reads_elsewhere = |id: &Id| match program.dag.get(*id) {
            Expr::Load { operand: o, at } => *o == operand && *at != store.at,
            Expr::Pick { operand: o, .. } => *o == operand && needed[id.index()],
            _ => false,
        };
        let per_element = store.at.strides.last() != Some(&0);
        from == to && per_element && !program.dag.ids().any(|id| reads_elsewhere(&id))
    };
    let pairs = (0..program.n_inputs).flat_map(|i| program.stores.iter().map(move |s| (i, s)));
    pairs
        .filter(|(i, s)| may_share(*i, s))
        .map(|(i, s)| (i, s.operand - program.n_inputs))
        .collect()
}

/// The expressions on which these stores depend.
fn below<'s>(program: &Program, stores: impl Iterator<Item = &'s Store>) -> Vec<bool> {
    let mut live: Vec<bool> = program.dag.ids().map(|_| false).collect();
    stores.for_each(|s| live[s.value.index()] = true);
    for id in program.dag.ids().rev() {
        if live[id.index()] {
            program.dag.operands(id).iter().for_each(|o| live[o.index()] = true);
        }
    }
    live
}

/// How a reduction starts and combines.
pub(crate) fn identity(f: ReduceFn, ty: Ty) -> Expr {
    let float = |x: f32| Expr::Float(x.to_bits());
    match (f, ty) {
        (ReduceFn::Sum | ReduceFn::Mean, Ty::F32) => float(0.0),
        (ReduceFn::Prod, Ty::F32) => float(1.0),
        (ReduceFn::Max, Ty::F32) => float(f32::NEG_INFINITY),
        (ReduceFn::Min, Ty::F32) => float(f32::INFINITY),
        (ReduceFn::Sum | ReduceFn::Mean, ty) => Expr::Int(0, ty),
        (ReduceFn::Prod, ty) => Expr::Int(1, ty),
        (ReduceFn::Max, Ty::I64) => Expr::Int(i64::MIN, ty),
        (ReduceFn::Min, Ty::I64) => Expr::Int(i64::MAX, ty),
        (ReduceFn::Max, ty) => Expr::Int(i32::MIN.into(), ty),
        (ReduceFn::Min, ty) => Expr::Int(i32::MAX.into(), ty),
    }
}
