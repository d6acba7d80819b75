//! Operations on single elements as functions without laws but for those that keep every bit.

use crate::term::{Function, Term, TermId, Terms};
use frit_ir::ops::{BinaryFn, Cast, CompareFn, LogicalFn, UnaryFn};
use frit_ir::{DType, Op};

/// Names an operation as a function; its number is an attribute.
pub(crate) const OPERATION: &str = "operation";

impl Terms {
    /// An operation on single elements of these dtypes.
    pub(crate) fn operation(&mut self, op: &Op, dtypes: &[DType], elements: &[TermId]) -> TermId {
        let key = (op.clone(), dtypes.to_vec());
        let number = match self.function_ids.get(&key) {
            Some(number) => *number,
            None => {
                let number = self.functions.len() as u64;
                self.functions.push(key.clone());
                self.function_ids.insert(key, number);
                number
            }
        };
        self.operation_of(number, elements)
    }

    /// The same by the number of the operation, in its normal form.
    pub(crate) fn operation_of(&mut self, number: u64, elements: &[TermId]) -> TermId {
        let (op, dtypes) = self.functions[number as usize].clone();
        if let Some(simple) = self.simple(&op, &dtypes, elements) {
            return simple;
        }
        let mut elements = elements.to_vec();
        let commutes = matches!(
            op,
            Op::Binary(BinaryFn::Add | BinaryFn::Mul)
                | Op::Compare(CompareFn::Eq | CompareFn::Ne)
                | Op::Logical(_)
                | Op::MatMul(_)
        );
        if commutes && dtypes[0] == dtypes[1] {
            elements.sort_by_key(|x| self.shape_of(*x));
        }
        self.term(Term::Apply(
            Function { name: OPERATION, attributes: [number, 0] },
            elements.into(),
        ))
    }

    /// What an operation is that has the bits of another term.
    fn simple(&mut self, op: &Op, dtypes: &[DType], x: &[TermId]) -> Option<TermId> {
        let (&first, last) = (x.first()?, *x.last()?);
        let is = |t: &Terms, id: TermId, value: f64| {
            t.literal_value(id).is_some_and(|found| found.to_bits() == value.to_bits())
        };
        // The operation and the operand whose result a term is.
        let of = |t: &Terms, id: TermId| match t.get(id) {
            Term::Apply(Function { name: OPERATION, attributes }, operands) => {
                Some((t.functions[attributes[0] as usize].clone(), operands[0]))
            }
            _ => None,
        };
        match op {
            Op::Cast(Cast { to }) => self.cast(first, dtypes[0], *to),
            Op::Unary(UnaryFn::Detach) => Some(first),
            Op::Unary(UnaryFn::Neg | UnaryFn::Not) => {
                of(self, first).filter(|((inner, _), _)| inner == op).map(|(_, operand)| operand)
            }
            Op::Binary(f) => {
                let float = dtypes[0].is_float();
                let neutral = |t: &Terms, id: TermId, right: bool| match f {
                    BinaryFn::Mul => is(t, id, 1.0),
                    BinaryFn::Div | BinaryFn::Pow => right && is(t, id, 1.0),
                    BinaryFn::Add => is(t, id, if float { -0.0 } else { 0.0 }),
                    BinaryFn::Sub => right && is(t, id, 0.0),
                    _ => false,
                };
                let right = neutral(self, last, true).then_some(first);
                right.or_else(|| neutral(self, first, false).then_some(last))
            }
            Op::Logical(f) => {
                let is_bool = dtypes[0] == DType::Bool;
                let known = |t: &Terms, id: TermId| {
                    t.literal_value(id).filter(|_| is_bool).map(|x| x == 1.0)
                };
                match (f, known(self, first), known(self, last)) {
                    (LogicalFn::And, Some(true), _) => Some(last),
                    (LogicalFn::And, _, Some(true)) => Some(first),
                    (LogicalFn::And, Some(false), _) | (LogicalFn::Or, Some(true), _) => {
                        Some(first)
                    }
                    (LogicalFn::And, _, Some(false)) | (LogicalFn::Or, _, Some(true)) => Some(last),
                    (LogicalFn::Or | LogicalFn::Xor, Some(false), _) => Some(last),
                    (LogicalFn::Or | LogicalFn::Xor, _, Some(false)) => Some(first),
                    (LogicalFn::And | LogicalFn::Or, ..) if first == last => Some(first),
                    _ => None,
                }
            }
            Op::Select => match self.literal_value(first) {
                Some(condition) => Some(if condition == 0.0 { x[2] } else { x[1] }),
                None => (x[1] == x[2]).then_some(x[1]),
            },
            _ => None,
        }
    }

    /// Casts that round nothing, and those of constants and of parts.
    fn cast(&mut self, x: TermId, from: DType, to: DType) -> Option<TermId> {
        if from == to {
            return Some(x);
        }
        if let Some(value) = self.literal_value(x)
            && (to.is_float() || value == 0.0 || value == 1.0)
        {
            return Some(self.literal(to.round(value)));
        }
        match self.get(x).clone() {
            Term::Apply(Function { name: OPERATION, attributes }, operands) => {
                let (inner, dtypes) = self.functions[attributes[0] as usize].clone();
                let Op::Cast(_) = inner else { return None };
                let (a, b, c) = (dtypes[0], from, to);
                let holds = a.widens_to(c) || c.is_float() || c == DType::Bool;
                let keeps = a.widens_to(b) && (holds || !a.is_float() && !b.is_float());
                keeps.then(|| self.operation(&Op::Cast(Cast { to }), &[a], &operands[..1]))
            }
            // A choice of parts is one of their casts.
            Term::Sum(parts, constant) if !self.has_indices(x) => {
                let mut sum = vec![];
                for (part, factor) in parts.iter() {
                    sum.push((self.cast_part(*part, from, to), factor.value()));
                }
                Some(self.sum(&sum, constant.value()))
            }
            Term::Product(_) if !self.has_indices(x) => Some(self.cast_part(x, from, to)),
            _ if self.is_truth(x) => Some(x),
            _ => None,
        }
    }

    /// The cast of a part, which is 0 where another is.
    fn cast_part(&mut self, part: TermId, from: DType, to: DType) -> TermId {
        let factors = match self.get(part).clone() {
            Term::Product(factors) => factors.iter().map(|(t, _)| *t).collect(),
            _ => vec![part],
        };
        let cast = |t: &mut Terms, x: TermId| match t.is_truth(x) {
            true => x,
            false => t.operation(&Op::Cast(Cast { to }), &[from], &[x]),
        };
        let factors: Vec<(TermId, f64)> =
            factors.into_iter().map(|x| (cast(self, x), 1.0)).collect();
        self.product(&factors)
    }

    /// Whether a part of a choice is an index as a number, or a number other than 0 and 1.
    fn has_indices(&self, x: TermId) -> bool {
        match self.get(x) {
            Term::Index(_) | Term::Number(_) => true,
            Term::Sum(parts, constant) => {
                let small = |x: f64| x == 0.0 || x.abs() == 1.0;
                !small(constant.value())
                    || parts.iter().any(|(t, f)| !small(f.value()) || self.has_indices(*t))
            }
            Term::Product(factors) => {
                factors.iter().filter(|(t, _)| !self.is_truth(*t)).count() > 1
                    || factors.iter().any(|(t, _)| self.has_indices(*t))
            }
            _ => false,
        }
    }
}
