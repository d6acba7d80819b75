//! Kernels: the operations of a body on what its operands hold.
//!
//! What works on single elements is done to every piece of a flat tensor, in the shape of the piece: the step of a flat group is that of
//! each of its parameters, wherever ranks divide it.

use super::flat::{Flat, Piece, Table, What, is_of_one};
use super::memory::Content;
use super::{KEPT, Machine, Stated, refused};
use frit_ir::ops::{
    Adafactor, AdafactorPart, BinaryFn, Concat, Constant, Expand, OptimizerKind, Reshape, Slice,
};
use frit_ir::plan::GroupId;
use frit_ir::{DType, Graph, Node, Op, Shape, Tensor, TensorType, ValueId};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// A value of a body.
#[derive(Clone)]
enum Operand {
    One(ValueId),
    Flat(Rc<Flat>),
    Table(Table, usize),
    /// An element of a table: the number of a parameter group, or of a parameter.
    Row(Table, usize),
    /// The value of each parameter group, by the element of the flat tensor at which it begins.
    ByGroup(Option<GroupId>, Rc<Vec<(usize, ValueId)>>),
}

impl Machine<'_> {
    /// The results of a kernel, as they are written.
    pub(super) fn kernel(&mut self, body: &Graph, reads: Vec<Content>) -> Stated<Vec<Rc<Flat>>> {
        let mut values: HashMap<ValueId, Operand> = HashMap::new();
        let mut reads = reads.into_iter();
        for (_, node) in body.nodes() {
            if let Op::Input(_) = &node.op {
                let read = reads.next().ok_or_else(|| refused("a kernel lacks an operand"))?;
                let ty = body.ty(node.outputs[0]);
                values.insert(node.outputs[0], self.operand(read, ty)?);
                continue;
            }
            let operands: Vec<Operand> = node.inputs.iter().map(|v| values[v].clone()).collect();
            let results = self.node(body, node, operands)?;
            values.extend(node.outputs.iter().copied().zip(results));
        }
        if reads.next().is_some() {
            return Err(refused("a kernel has an operand that it does not read"));
        }
        let results = body.outputs.iter().map(|output| match &values[&output.value] {
            Operand::Flat(flat) => Ok(flat.clone()),
            Operand::One(value) => Ok(Rc::new(self.flat_of(*value))),
            _ => Err(refused("a kernel returns a table")),
        });
        results.collect()
    }

    /// An operand of this type in a body.
    fn operand(&mut self, content: Content, ty: &TensorType) -> Stated<Operand> {
        match content {
            Content::Table(table, row) => Ok(Operand::Table(table, row)),
            Content::Flat(flat) if flat.shards > 1 => Ok(Operand::Flat(flat)),
            // A tensor of one axis and as many elements may be a flat group.
            Content::Flat(flat) if ty.shape.rank() == 1 && self.may_be_group(&flat) => {
                Ok(Operand::Flat(flat))
            }
            Content::Flat(flat) => Ok(Operand::One(self.whole(&flat, &ty.shape)?)),
        }
    }

    /// Whether a tensor has as many elements as a flat group.
    fn may_be_group(&self, flat: &Flat) -> bool {
        flat.numel > 1 && self.plan.groups.iter().any(|group| group.numel == flat.numel)
    }

    fn node(&mut self, body: &Graph, node: &Node, operands: Vec<Operand>) -> Stated<Vec<Operand>> {
        if let [Operand::Table(table, row)] = operands[..] {
            let Op::Slice(Slice { start, size, .. }) = &node.op else {
                return Err(refused("a table is read by other than its rows"));
            };
            return match size[..] {
                [1] => Ok(vec![Operand::Row(table, row + start[0])]),
                _ => Err(refused("several rows of a table are read at once")),
            };
        }
        let ty = body.ty(node.outputs[0]);
        if let Op::Adafactor(op) = &node.op {
            return self.adafactor(op, &operands);
        }
        if let Op::ByParamGroup(_) = &node.op {
            return Ok(vec![self.by_group(&operands)?]);
        }
        if let Op::GradStats(_) = &node.op {
            return self.statistics(node, &operands);
        }
        let flats = operands.iter().any(|x| matches!(x, Operand::Flat(_) | Operand::ByGroup(..)));
        if flats && ty.shape.rank() == 1 && self.is_by_element(&node.op, ty, &operands) {
            return self.by_element(&node.op, node.outputs.len(), operands);
        }
        let inputs: Vec<ValueId> = (operands.into_iter().zip(&node.inputs))
            .map(|(operand, input)| self.one(operand, &body.ty(*input).shape))
            .collect::<Stated<_>>()?;
        let results = self.add(node.op.clone(), &inputs)?;
        Ok(results.into_iter().map(Operand::One).collect())
    }

    /// Whether element `i` of every result is made of the elements `i` of flat operands, and scalars.
    fn is_by_element(&self, op: &Op, ty: &TensorType, operands: &[Operand]) -> bool {
        let is_one = match op {
            Op::OptimizerStep(step) => {
                !matches!(step.kind, OptimizerKind::Adafactor | OptimizerKind::Muon)
            }
            Op::ScaledCast(_)
            | Op::EmaStep
            | Op::MuonMomentum(_)
            | Op::MuonStep(_)
            | Op::TreeSum => true,
            op => op.is_pointwise(),
        };
        let numel = ty.shape.numel();
        is_one
            && operands.iter().all(|operand| match operand {
                Operand::Flat(flat) => flat.numel == numel * flat.shards,
                Operand::One(value) => self.numel(*value) == 1 && numel > 1,
                Operand::ByGroup(..) => true,
                Operand::Table(..) | Operand::Row(..) => false,
            })
    }

    /// An operation on the elements of flat tensors.
    fn by_element(
        &mut self,
        op: &Op,
        n_results: usize,
        operands: Vec<Operand>,
    ) -> Stated<Vec<Operand>> {
        let flats = || {
            operands.iter().filter_map(|x| if let Operand::Flat(f) = x { Some(f) } else { None })
        };
        let Some(first) = flats().next().cloned() else {
            return Err(refused("values of parameter groups without parameters"));
        };
        if flats().any(|f| f.shards != first.shards || f.numel != first.numel) {
            return Err(refused("parts of different tensors meet"));
        }
        let begins = self.begins(&flats().map(Rc::as_ref).collect::<Vec<_>>());
        let cut: Vec<Option<Vec<Option<Piece>>>> = (operands.iter())
            .map(|x| if let Operand::Flat(f) = x { Some(f.cut_at(&begins)) } else { None })
            .collect();
        let mut results: Vec<Vec<Piece>> = vec![vec![]; n_results];
        let mut dtypes = vec![first.dtype; n_results];
        for (k, &begin) in begins.iter().enumerate() {
            let end = begins.get(k + 1).copied().unwrap_or(first.numel);
            let numel = end - begin;
            let own: Vec<Piece> = cut.iter().flatten().filter_map(|pieces| pieces[k]).collect();
            let made = if own.iter().any(|p| p.what == What::Unknown) {
                vec![What::Unknown; n_results]
            } else if cut.iter().flatten().all(|p| p[k].is_some_and(|p| p.what == What::Zero))
                && keeps_zero(op, own.len(), operands.len())
            {
                vec![What::Zero; n_results]
            } else {
                let shape = self.shape_of(&own, numel);
                let mut inputs = vec![];
                for (operand, pieces) in operands.iter().zip(&cut) {
                    inputs.push(match (operand, pieces) {
                        (Operand::Flat(flat), Some(pieces)) => match pieces[k] {
                            Some(piece) => self.piece(piece, flat.dtype, &shape)?,
                            None => self.segment(flat, begin, &shape)?,
                        },
                        (Operand::ByGroup(group, values), _) => {
                            let own = group.map(|group| &self.plan.groups[group]);
                            if own.is_some_and(|g| {
                                (g.numel, g.shards()) != (first.numel, first.shards)
                            }) {
                                return Err(refused("parameter groups are of another group"));
                            }
                            of_group(values, begin..end)?
                        }
                        (Operand::One(value), _) => *value,
                        _ => return Err(refused("a table is an operand")),
                    });
                }
                let made = self.add(op.clone(), &inputs)?;
                for (value, dtype) in made.iter().zip(&mut dtypes) {
                    *dtype = self.graph.ty(*value).dtype;
                }
                made.into_iter().map(|value| What::Of(value, 0)).collect()
            };
            for (result, what) in results.iter_mut().zip(made) {
                result.push(Piece { begin, numel, what });
            }
        }
        if let Op::Cast(cast) = op {
            dtypes = vec![cast.to];
        }
        if let Op::ScaledCast(cast) = op {
            dtypes = vec![cast.to];
        }
        let resharded = flats().all(|f| f.resharded);
        let flat = |(pieces, dtype)| Flat {
            dtype,
            pieces,
            gradients: None,
            resharded,
            ..Flat::clone(&first)
        };
        let flats = results.into_iter().zip(dtypes).map(flat);
        Ok(flats.map(|flat| Operand::Flat(Rc::new(flat))).collect())
    }

    /// The elements at which the pieces begin that an operation works on: those of all operands, but where one has a whole value, others
    /// are joined.
    fn begins(&self, flats: &[&Flat]) -> Vec<usize> {
        let mut begins: BTreeSet<usize> = flats.iter().flat_map(|flat| flat.begins()).collect();
        for piece in flats.iter().flat_map(|flat| &flat.pieces) {
            let What::Of(value, 0) = piece.what else { continue };
            let (begin, end) = (piece.begin, piece.begin + piece.numel);
            let inside: Vec<usize> = begins.range(begin + 1..end).copied().collect();
            let is_known =
                |p: &Piece| p.what != What::Unknown || p.begin >= end || p.begin + p.numel <= begin;
            let are_known = || flats.iter().flat_map(|flat| &flat.pieces).all(is_known);
            if !inside.is_empty() && self.numel(value) == piece.numel && are_known() {
                inside.iter().for_each(|at| {
                    begins.remove(at);
                });
            }
        }
        begins.into_iter().collect()
    }

    /// The shape in which pieces are computed: that of the first which is all of a value.
    pub(super) fn shape_of(&self, pieces: &[Piece], numel: usize) -> Shape {
        let whole = pieces.iter().find_map(|piece| match piece.what {
            What::Of(value, 0) if self.numel(value) == numel => Some(value),
            _ => None,
        });
        whole.map_or(Shape::from([numel]), |value| self.graph.ty(value).shape.clone())
    }

    /// (value, row, value …): what each parameter group has.
    fn by_group(&mut self, operands: &[Operand]) -> Stated<Operand> {
        let (mut begins, mut values, mut of) = (vec![0], vec![], None);
        for operand in operands {
            match operand {
                Operand::Row(Table::ParamGroups(group), row) => {
                    if of.replace(*group).is_some_and(|other| other != *group) {
                        return Err(refused("parameter groups are of two groups"));
                    }
                    let groups = &self.plan.groups[*group].param_groups;
                    let group = groups.get(row + 1);
                    begins.push(group.ok_or_else(|| refused("no such parameter group"))?.offset);
                }
                Operand::One(value) => values.push(self.reshaped(*value, &Shape::scalar())?),
                Operand::Flat(flat) => {
                    let value = self.whole(flat, &Shape::scalar())?;
                    values.push(value);
                }
                _ => return Err(refused("parameter groups begin elsewhere")),
            }
        }
        if begins.len() != values.len() || !begins.is_sorted() {
            return Err(refused("parameter groups have other values"));
        }
        Ok(Operand::ByGroup(of, Rc::new(begins.into_iter().zip(values).collect())))
    }

    /// Statistics of gradients: of each parameter's, or of each piece of other tensors.
    fn statistics(&mut self, node: &Node, operands: &[Operand]) -> Stated<Vec<Operand>> {
        let plan = self.plan;
        let mut values = vec![];
        for operand in operands {
            let flat = match operand {
                Operand::One(value) => {
                    values.push(*value);
                    continue;
                }
                Operand::Flat(flat) if flat.resharded => return Err(refused(KEPT)),
                Operand::Flat(flat) => flat,
                _ => return Err(refused("statistics of a table")),
            };
            if let Some(group) = flat.gradients.map(|group| &plan.groups[group]) {
                let is_inside =
                    |piece: &Piece| piece.what == What::Zero || is_of_one(piece, &group.segments);
                let alike = (group.numel, group.shards()) == (flat.numel, flat.shards);
                if !alike || !flat.pieces.iter().all(is_inside) {
                    return Err(refused("gradients are of another group, or not padded by zeros"));
                }
                for segment in group.segments.iter().filter(|s| s.numel > 0) {
                    let shape = &plan.params[segment.param].ty.shape;
                    values.push(self.segment(flat, segment.offset, shape)?);
                }
                continue;
            }
            for piece in flat.pieces.iter().filter(|p| p.what != What::Zero) {
                let shape = self.shape_of(&[*piece], piece.numel);
                values.push(self.piece(*piece, flat.dtype, &shape)?);
            }
        }
        let results = self.add(node.op.clone(), &values)?;
        Ok(results.into_iter().map(Operand::One).collect())
    }

    /// A part of the step of the parameter in this row of a table. What a rank adds up of its part is only ever added over ranks: each share
    /// of a copy is a share of the whole.
    fn adafactor(&mut self, op: &Adafactor, operands: &[Operand]) -> Stated<Vec<Operand>> {
        let Some(Operand::Table(Table::Params(group), row)) = operands.first() else {
            return Err(refused("a parameter begins elsewhere"));
        };
        if operands.iter().any(|x| matches!(x, Operand::Flat(flat) if flat.resharded)) {
            return Err(refused(KEPT));
        }
        let segment = self.plan.groups[*group].segments.get(*row);
        let segment = *segment.ok_or_else(|| refused("no such parameter"))?;
        let of_parameter = match op.part {
            AdafactorPart::Moments => 1..2,
            AdafactorPart::Sums | AdafactorPart::Step => 1..3,
        };
        let value = Tensor::splat(TensorType::new(DType::I64, [1]), 0.0);
        let mut inputs = self.add(Op::Constant(Constant { value }), &[])?;
        for (k, operand) in operands.iter().enumerate().skip(1) {
            inputs.push(match operand {
                Operand::Flat(flat) if of_parameter.contains(&k) => {
                    let own = &self.plan.groups[*group];
                    if (flat.numel, flat.shards) != (own.numel, own.shards()) {
                        return Err(refused("a parameter is of another group"));
                    }
                    self.segment(flat, segment.offset, &Shape::from([segment.numel]))?
                }
                operand if !of_parameter.contains(&k) => {
                    let shape = match operand {
                        Operand::Flat(flat) => Shape::from([flat.numel]),
                        _ => Shape::scalar(),
                    };
                    self.one(operand.clone(), &shape)?
                }
                _ => return Err(refused("a parameter is in no group")),
            });
        }
        let whole = Op::Adafactor(Adafactor { share: 1.0, ..op.clone() });
        let mut results = self.add(whole, &inputs)?;
        if let (AdafactorPart::Step, Operand::Flat(params)) = (op.part, &operands[2]) {
            let end = segment.offset + segment.numel;
            let mut stepped = Flat::clone(params);
            let is_it = |p: &&mut Piece| p.begin == segment.offset && p.begin + p.numel == end;
            let piece = stepped.pieces.iter_mut().find(is_it);
            let piece = piece.ok_or_else(|| refused("a part of a parameter is stepped"))?;
            piece.what = What::Of(results[0], 0);
            return Ok(vec![Operand::Flat(Rc::new(stepped))]);
        }
        if op.share != 1.0 {
            let last = results.len() - 1;
            let value = Tensor::splat(TensorType::scalar(DType::F32), op.share);
            let share = self.add(Op::Constant(Constant { value }), &[])?[0];
            results[last] = self.add(Op::Binary(BinaryFn::Mul), &[results[last], share])?[0];
        }
        Ok(results.into_iter().map(Operand::One).collect())
    }

    /// An operand as one value of this shape.
    fn one(&mut self, operand: Operand, shape: &Shape) -> Stated<ValueId> {
        match operand {
            Operand::One(value) => Ok(value),
            Operand::Flat(flat) => self.whole(&flat, shape),
            _ => Err(refused("a table is an operand")),
        }
    }

    /// A tensor that every rank has whole, as one value of this shape.
    pub(super) fn whole(&mut self, flat: &Flat, shape: &Shape) -> Stated<ValueId> {
        if flat.shards > 1 {
            return Err(refused("the part of a rank is read as the whole"));
        }
        if let Some(value) = flat.value(|v| self.numel(v)) {
            return self.reshaped(value, shape);
        }
        // In rows, as the graph concatenates such pieces, or as the pieces are, or else as the first axis of the shape has them.
        let sizes: Vec<usize> = flat.pieces.iter().map(|p| p.numel).collect();
        let joined = (sizes, shape.clone(), self.task_region, self.origin.clone());
        let known = self.rows.get(&joined).cloned();
        let first = shape.dims().iter().position(|n| *n > 1).unwrap_or(0);
        let of_shape = || shape.dims().iter().skip(first + 1).copied().collect();
        let mut row: Vec<usize> = match known {
            Some(Some(row)) => row,
            Some(None) => self.row_of(&flat.pieces).unwrap_or_else(of_shape),
            None => of_shape(),
        };
        let is_of_rows = |n: usize, row: &[usize]| match row.iter().product() {
            0 => false,
            size => n.is_multiple_of(size),
        };
        if flat.pieces.iter().any(|p| !is_of_rows(p.begin, &row) || !is_of_rows(p.numel, &row)) {
            row = vec![];
        }
        let size: usize = row.iter().product();
        let mut parts = vec![];
        for piece in &flat.pieces {
            let own = Shape([&[piece.numel / size], &row[..]].concat());
            parts.push(self.piece(*piece, flat.dtype, &own)?);
        }
        let all = match parts[..] {
            [] if shape.numel() == 0 => self.zeros(flat.dtype, shape)?,
            [] => return Err(refused("nothing is read as a tensor")),
            [part] => part,
            _ => self.add(Op::Concat(Concat { axis: 0 }), &parts)?[0],
        };
        self.reshaped(all, shape)
    }

    /// The rows that all pieces have, if each is all of a value.
    fn row_of(&self, pieces: &[Piece]) -> Option<Vec<usize>> {
        let row = |piece: &Piece| match piece.what {
            What::Of(value, 0) if self.numel(value) == piece.numel => {
                self.graph.ty(value).shape.dims().get(1..).map(<[usize]>::to_vec)
            }
            _ => None,
        };
        let mut rows = pieces.iter().map(row);
        let first = rows.next()??;
        rows.all(|other| other.as_ref() == Some(&first)).then_some(first)
    }

    /// A piece as a value of this shape.
    pub(super) fn piece(&mut self, piece: Piece, dtype: DType, shape: &Shape) -> Stated<ValueId> {
        let (value, from) = match piece.what {
            What::Of(value, from) => (value, from),
            What::Zero => return self.zeros(dtype, shape),
            What::Unknown => return Err(refused("what is not known is read")),
        };
        let numel = self.numel(value);
        if (from, piece.numel) == (0, numel) {
            return self.reshaped(value, shape);
        }
        // As rows of the shape, if it is of whole rows.
        let row = shape.dims().get(1..).unwrap_or(&[]);
        let size: usize = row.iter().product();
        let is_of_rows = |n: usize| size > 0 && n.is_multiple_of(size);
        let (row, size) = match [from, piece.numel, numel].into_iter().all(is_of_rows) {
            true => (row, size),
            false => (&[][..], 1),
        };
        let rows = |n: usize| [&[n / size], row].concat();
        let all = self.reshaped(value, &Shape::from(&rows(numel)[..]))?;
        let mut start = vec![0; row.len() + 1];
        start[0] = from / size;
        let slice = Slice { start, size: rows(piece.numel), step: vec![1; row.len() + 1] };
        let part = self.add(Op::Slice(slice), &[all])?[0];
        self.reshaped(part, shape)
    }

    pub(super) fn zeros(&mut self, dtype: DType, shape: &Shape) -> Stated<ValueId> {
        let value = Tensor::splat(TensorType::scalar(dtype), 0.0);
        let zero = self.add(Op::Constant(Constant { value }), &[])?[0];
        match shape.rank() {
            0 => Ok(zero),
            _ => Ok(self.add(Op::Expand(Expand { shape: shape.clone() }), &[zero])?[0]),
        }
    }

    pub(super) fn reshaped(&mut self, value: ValueId, shape: &Shape) -> Stated<ValueId> {
        if self.graph.ty(value).shape == *shape {
            return Ok(value);
        }
        Ok(self.add(Op::Reshape(Reshape { shape: shape.clone() }), &[value])?[0])
    }

    /// A value as a tensor of one piece.
    pub(super) fn flat_of(&self, value: ValueId) -> Flat {
        let ty = self.graph.ty(value);
        let numel = ty.shape.numel();
        let piece = Piece { begin: 0, numel, what: What::Of(value, 0) };
        let pieces = if numel == 0 { vec![] } else { vec![piece] };
        Flat { dtype: ty.dtype, numel, shards: 1, pieces, gradients: None, resharded: false }
    }

    pub(super) fn numel(&self, value: ValueId) -> usize {
        self.graph.ty(value).shape.numel()
    }
}

/// The value of the parameter group that has all of these elements.
fn of_group(values: &[(usize, ValueId)], elements: std::ops::Range<usize>) -> Stated<ValueId> {
    let after = values.partition_point(|(begin, _)| *begin <= elements.start);
    let ends = values.get(after).map_or(usize::MAX, |(begin, _)| *begin);
    match after.checked_sub(1).and_then(|k| values.get(k)) {
        Some((_, value)) if elements.end <= ends => Ok(*value),
        _ => Err(refused("a parameter is of two parameter groups")),
    }
}

/// Whether an operation makes zeros if its `flats` flat operands are zeros, and the others finite numbers.
fn keeps_zero(op: &Op, flats: usize, operands: usize) -> bool {
    match op {
        Op::Cast(_) | Op::ScaledCast(_) | Op::OptimizerStep(_) | Op::EmaStep => true,
        Op::MuonMomentum(_) | Op::MuonStep(_) | Op::TreeSum => true,
        Op::Binary(BinaryFn::Mul | BinaryFn::Add | BinaryFn::Sub) => flats == operands,
        _ => false,
    }
}
