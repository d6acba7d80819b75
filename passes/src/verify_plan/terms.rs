//! Terms: what a value is computed from, as far as two ways to compute it must agree. Equal terms are equal values, but
//! for rounding between operations.
//!
//! A value is its elements in order, whatever its shape: a reshape is its operand. Sums have their operands in any order.

use frit_ir::ops::{BinaryFn, MatMul};
use frit_ir::plan::Pointer;
use frit_ir::{DType, Graph, Node, Op, ValueId};
use std::collections::HashMap;

/// The index of a term.
pub(super) type Id = usize;

/// How an operand of an elementwise operation covers the result.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Spread {
    /// An element for each of the result.
    Whole,
    /// An element for each along the last axis, which has so many.
    LastAxis(usize),
    /// Something else, with this shape.
    Shape(Vec<usize>),
}

/// A GEMM without epilogue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matmul {
    /// Rows, columns, contracted size.
    pub(super) sizes: [usize; 3],
    pub(super) batch: usize,
    /// Elements from one matrix of an operand to the next; 0 if there is one.
    pub(super) steps: [usize; 2],
    pub(super) transposed: [bool; 2],
    pub(super) of: [Id; 2],
    pub(super) scales: [Option<Id>; 2],
    pub(super) out: DType,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Term {
    /// What is in memory after so many launches that are not followed.
    Stored {
        after: usize,
        at: Pointer,
        dtype: DType,
        numel: usize,
    },
    Matmul(Matmul),
    /// The sum of these.
    Sum(Vec<(Id, Spread)>),
    /// The sums of the columns of a matrix of so many columns.
    Columns {
        of: Id,
        n: usize,
        dtype: DType,
    },
    /// A result of another operation.
    Of {
        op: Op,
        operands: Vec<(Id, Spread)>,
        result: usize,
    },
}

/// All terms, each once.
#[derive(Default)]
pub(super) struct Terms {
    all: Vec<(DType, usize)>,
    ids: HashMap<Term, Id>,
    sums: HashMap<Id, Vec<(Id, Spread)>>,
    matmuls: HashMap<Id, Matmul>,
}

impl Terms {
    pub(super) fn id(&mut self, term: Term, dtype: DType, numel: usize) -> Id {
        if let Some(id) = self.ids.get(&term) {
            return *id;
        }
        let id = self.all.len();
        match &term {
            Term::Sum(operands) => drop(self.sums.insert(id, operands.clone())),
            Term::Matmul(matmul) => drop(self.matmuls.insert(id, matmul.clone())),
            _ => {}
        }
        self.all.push((dtype, numel));
        self.ids.insert(term, id);
        id
    }

    /// Its elements.
    pub(super) fn ty(&self, id: Id) -> (DType, usize) {
        self.all[id]
    }

    /// A sum of so many elements, of operands that cover all of them or the last axis.
    pub(super) fn sum(&mut self, operands: Vec<(Id, Spread)>, numel: usize) -> Id {
        let dtype = self.ty(operands[0].0).0;
        let mut all = Vec::with_capacity(operands.len());
        for (id, spread) in operands {
            match self.sums.get(&id) {
                Some(inner) if spread == Spread::Whole => all.extend(inner.iter().cloned()),
                _ => all.push((id, spread)),
            }
        }
        all.sort();
        self.id(Term::Sum(all), dtype, numel)
    }

    pub(super) fn matmul(&mut self, matmul: Matmul) -> Id {
        let ([m, n, _], batch, out) = (matmul.sizes, matmul.batch, matmul.out);
        self.id(Term::Matmul(matmul), out, batch * m * n)
    }

    pub(super) fn columns(&mut self, of: Id, n: usize, dtype: DType) -> Id {
        self.id(Term::Columns { of, n, dtype }, dtype, n)
    }

    /// An operation that computes each element from those at its place.
    pub(super) fn elementwise(&mut self, op: Op, operands: &[Id]) -> Id {
        let (dtype, numel) = self.ty(operands[0]);
        let operands = operands.iter().map(|id| (*id, Spread::Whole)).collect();
        self.id(Term::Of { op, operands, result: 0 }, dtype, numel)
    }

    /// How a vector, or a matrix, covers a matrix of so many elements.
    pub(super) fn over(&self, id: Id, numel: usize) -> (Id, Spread) {
        let own = self.ty(id).1;
        (id, if own == numel { Spread::Whole } else { Spread::LastAxis(own) })
    }

    /// The results of a body whose operands are these terms.
    pub(super) fn body(&mut self, body: &Graph, operands: &[Id]) -> Vec<Id> {
        let mut values: HashMap<ValueId, Id> = HashMap::new();
        let mut operands = operands.iter();
        for (_, node) in body.nodes() {
            if let Op::Input(_) = node.op {
                values.extend(operands.next().map(|id| (node.outputs[0], *id)));
                continue;
            }
            let of: Vec<Id> = node.inputs.iter().map(|v| values[v]).collect();
            let first = self.normal(body, node, &of);
            for (result, value) in node.outputs.iter().enumerate() {
                let id = first.filter(|_| result == 0);
                let id = id.unwrap_or_else(|| self.other(body, node, &of, result));
                values.insert(*value, id);
            }
        }
        body.outputs.iter().map(|o| values[&o.value]).collect()
    }

    /// The result of an operation that has a form of its own.
    fn normal(&mut self, body: &Graph, node: &Node, of: &[Id]) -> Option<Id> {
        let ty = body.ty(*node.outputs.first()?);
        match &node.op {
            Op::Reshape(_) => Some(of[0]),
            Op::Binary(BinaryFn::Add) => {
                let operands = spreads(body, node, of).filter(|all| {
                    all.iter().all(|(_, spread)| !matches!(spread, Spread::Shape(_)))
                })?;
                Some(self.sum(operands, ty.shape.numel()))
            }
            Op::SumTo(_) => {
                let x = body.ty(node.inputs[0]);
                let n = *x.shape.0.last()?;
                let sums_columns = ty.shape.0.last() == Some(&n) && ty.shape.numel() == n;
                sums_columns.then(|| self.columns(of[0], n, ty.dtype))
            }
            Op::MatMul(op) => self.of_matmul(body, node, op, of),
            // It is rounded once, to a narrower type.
            Op::Cast(op) => {
                let matmul = self.matmuls.get(&of[0]).cloned()?;
                let narrows = matmul.out == DType::F32 && op.to.is_low_precision();
                narrows.then(|| self.matmul(Matmul { out: op.to, ..matmul }))
            }
            _ => None,
        }
    }

    fn of_matmul(&mut self, body: &Graph, node: &Node, op: &MatMul, of: &[Id]) -> Option<Id> {
        let dims = op.dims(body.ty(node.inputs[0]), body.ty(node.inputs[1]));
        let sizes = [dims.m, dims.n, dims.k];
        // One matrix for all, or one for each.
        let step = |id: Id, one: usize| match self.ty(id).1 {
            numel if numel == one => Some(0),
            numel if numel == one * dims.batch => Some(one),
            _ => None,
        };
        let steps = [step(of[0], dims.m * dims.k)?, step(of[1], dims.k * dims.n)?];
        Some(self.matmul(Matmul {
            sizes,
            batch: dims.batch,
            steps,
            transposed: [op.trans_a, op.trans_b],
            of: [of[0], of[1]],
            scales: [None; 2],
            out: body.ty(node.outputs[0]).dtype,
        }))
    }

    /// A result of any operation.
    fn other(&mut self, body: &Graph, node: &Node, of: &[Id], result: usize) -> Id {
        let ty = body.ty(node.outputs[result]);
        let shapes = || {
            let shape = |v: &ValueId| Spread::Shape(body.ty(*v).shape.0.clone());
            of.iter().copied().zip(node.inputs.iter().map(shape)).collect()
        };
        let operands = spreads(body, node, of).unwrap_or_else(shapes);
        let term = Term::Of { op: node.op.clone(), operands, result };
        self.id(term, ty.dtype, ty.shape.numel())
    }
}

/// How the operands of an elementwise operation cover its result, if all cover it whole or along the last axis.
fn spreads(body: &Graph, node: &Node, of: &[Id]) -> Option<Vec<(Id, Spread)>> {
    if !node.op.is_pointwise() {
        return None;
    }
    let all = &body.ty(node.outputs[0]).shape;
    let spread = |v: &ValueId| {
        let shape = &body.ty(*v).shape;
        let n = shape.0.last().copied();
        match shape.numel() {
            numel if numel == all.numel() => Some(Spread::Whole),
            numel if n == Some(numel) && all.0.last() == Some(&numel) => {
                Some(Spread::LastAxis(numel))
            }
            _ => None,
        }
    };
    of.iter().zip(&node.inputs).map(|(id, v)| Some((*id, spread(v)?))).collect()
}
