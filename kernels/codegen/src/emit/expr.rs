//! Kernel expressions: a hash-consed DAG of scalar operations at a point of the iteration space.
//!
//! Composite operations have already been decomposed ([`super::composite`]); the rest is emitted directly, for one element or for a
//! vector of them.

use super::math::Un;
use super::view::Affine;
use frit_ir::DType;
use frit_ir::ops::{CompareFn, LogicalFn, ReduceFn};
use std::collections::HashMap;

/// Names an expression of a [`Dag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(u32);

impl Id {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The type in which a value is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ty {
    /// Every float of at most 32 bits.
    F32,
    /// 64-bit integers.
    I64,
    /// 32-bit integers and bytes.
    I32,
    /// Truth values.
    Bool,
}

impl Ty {
    /// The type in which values of this dtype are computed; `None` if kernels do not compute with it.
    pub(crate) fn of(dtype: DType) -> Option<Ty> {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Some(Ty::F32),
            DType::I64 => Some(Ty::I64),
            DType::I32 | DType::U8 => Some(Ty::I32),
            DType::Bool => Some(Ty::Bool),
            DType::F64 | DType::F8E4M3 | DType::F8E5M2 => None,
        }
    }
}

/// Arithmetic on two operands of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bin {
    Add,
    Sub,
    Mul,
    /// Of integers: truncated; 0 where the divisor is 0.
    Div,
    /// The remainder with the divisor's sign; of integers 0 where the divisor is 0.
    Mod,
    /// The remainder with the dividend's sign; of integers 0 where the divisor is 0.
    Rem,
    /// Of integers: wrapping; a negative exponent gives the reciprocal, truncated (0 for base 0).
    Pow,
    /// NaN if either is.
    Max,
    /// NaN if either is.
    Min,
}

/// What a reduction runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Over {
    /// All columns of a row.
    Cols,
    /// All rows of a column.
    Rows,
}

/// One scalar operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Expr {
    /// An element of an operand, widened to its compute type.
    Load {
        operand: usize,
        at: Affine,
    },
    /// An element of an operand at `at + stride · index`.
    Pick {
        operand: usize,
        at: Affine,
        stride: i64,
        index: Id,
    },
    /// The affine form itself, as an i64.
    Index(Affine),
    /// An f32 constant, by its bits.
    Float(u32),
    /// An integer or boolean constant.
    Int(i64, Ty),
    Un(Un, Id),
    Bin(Bin, Id, Id),
    /// `a · b + c`, rounded once.
    Fma(Id, Id, Id),
    Compare(CompareFn, Id, Id),
    Logical(LogicalFn, Id, Id),
    Select(Id, Id, Id),
    /// Conversion between compute types, as the `cast` operation does it.
    Convert(Ty, Id),
    /// Rounding of an f32 to a narrower float and back.
    Round(DType, Id),
    Reduce(ReduceFn, Over, Id),
}

/// An arena of expressions in which equal expressions are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dag {
    exprs: Vec<Expr>,
    types: Vec<Ty>,
    ids: HashMap<Expr, Id>,
}

impl Dag {
    pub(crate) fn get(&self, id: Id) -> &Expr {
        &self.exprs[id.index()]
    }

    pub(crate) fn ty(&self, id: Id) -> Ty {
        self.types[id.index()]
    }

    /// Every expression; operands come before users.
    pub(crate) fn ids(&self) -> impl DoubleEndedIterator<Item = Id> + use<> {
        (0..self.exprs.len() as u32).map(Id)
    }

    /// Adds an expression of this type, or finds it.
    pub(crate) fn add(&mut self, expr: Expr, ty: Ty) -> Id {
        if let Some(&id) = self.ids.get(&expr) {
            return id;
        }
        let id = Id(self.exprs.len() as u32);
        self.exprs.push(expr.clone());
        self.types.push(ty);
        self.ids.insert(expr, id);
        id
    }

    /// Changes every affine form.
    pub(crate) fn for_each_affine(&mut self, mut f: impl FnMut(&mut Affine)) {
        for expr in &mut self.exprs {
            if let Expr::Load { at, .. } | Expr::Index(at) | Expr::Pick { at, .. } = expr {
                f(at);
            }
        }
        // Expressions that become equal stay separate, which only costs a second load; the table is cleared because its
        // keys are stale.
        self.ids.clear();
    }

    /// Operands of an expression.
    pub(crate) fn operands(&self, id: Id) -> Vec<Id> {
        match *self.get(id) {
            Expr::Load { .. } | Expr::Index(_) | Expr::Float(_) | Expr::Int(..) => vec![],
            Expr::Pick { index, .. } => vec![index],
            Expr::Un(_, a) | Expr::Convert(_, a) | Expr::Round(_, a) | Expr::Reduce(_, _, a) => {
                vec![a]
            }
            Expr::Bin(_, a, b) | Expr::Compare(_, a, b) | Expr::Logical(_, a, b) => vec![a, b],
            Expr::Fma(a, b, c) | Expr::Select(a, b, c) => vec![a, b, c],
        }
    }

    /// Whether the expression's own operation is expensive.
    pub(crate) fn is_expensive(&self, id: Id) -> bool {
        match self.get(id) {
            Expr::Un(f, _) => f.is_expensive(),
            Expr::Bin(f, ..) => matches!(f, Bin::Mod | Bin::Rem | Bin::Pow),
            _ => false,
        }
    }

    pub(crate) fn float(&mut self, x: f32) -> Id {
        self.add(Expr::Float(x.to_bits()), Ty::F32)
    }

    pub(crate) fn int(&mut self, x: i64, ty: Ty) -> Id {
        self.add(Expr::Int(x, ty), ty)
    }

    pub(crate) fn un(&mut self, f: Un, a: Id) -> Id {
        self.add(Expr::Un(f, a), self.ty(a))
    }

    pub(crate) fn bin(&mut self, f: Bin, a: Id, b: Id) -> Id {
        self.add(Expr::Bin(f, a, b), self.ty(a))
    }

    pub(crate) fn plus(&mut self, a: Id, b: Id) -> Id {
        self.bin(Bin::Add, a, b)
    }

    pub(crate) fn minus(&mut self, a: Id, b: Id) -> Id {
        self.bin(Bin::Sub, a, b)
    }

    pub(crate) fn times(&mut self, a: Id, b: Id) -> Id {
        self.bin(Bin::Mul, a, b)
    }

    pub(crate) fn over(&mut self, a: Id, b: Id) -> Id {
        self.bin(Bin::Div, a, b)
    }

    pub(crate) fn fma(&mut self, a: Id, b: Id, c: Id) -> Id {
        self.add(Expr::Fma(a, b, c), Ty::F32)
    }

    pub(crate) fn compare(&mut self, f: CompareFn, a: Id, b: Id) -> Id {
        self.add(Expr::Compare(f, a, b), Ty::Bool)
    }

    pub(crate) fn logical(&mut self, f: LogicalFn, a: Id, b: Id) -> Id {
        self.add(Expr::Logical(f, a, b), self.ty(a))
    }

    pub(crate) fn select(&mut self, c: Id, a: Id, b: Id) -> Id {
        self.add(Expr::Select(c, a, b), self.ty(a))
    }

    pub(crate) fn convert(&mut self, ty: Ty, a: Id) -> Id {
        if self.ty(a) == ty { a } else { self.add(Expr::Convert(ty, a), ty) }
    }

    pub(crate) fn reduce(&mut self, f: ReduceFn, over: Over, a: Id) -> Id {
        self.add(Expr::Reduce(f, over, a), self.ty(a))
    }

    /// The reduction of a row.
    pub(crate) fn reduce_row(&mut self, f: ReduceFn, a: Id) -> Id {
        self.reduce(f, Over::Cols, a)
    }

    /// The mean of a row of `n` elements.
    pub(crate) fn row_mean(&mut self, a: Id, n: usize) -> Id {
        self.mean(Over::Cols, a, n)
    }

    /// The sum over `n` elements, divided by `n`.
    pub(crate) fn mean(&mut self, over: Over, a: Id, n: usize) -> Id {
        let sum = self.reduce(ReduceFn::Sum, over, a);
        let n = self.float(n as f32);
        self.over(sum, n)
    }
}
