//! Which terms are integers, and their exact arithmetic.
//!
//! Numbers of terms are f64, and real numbers that differ by less than rounding are one. Integers are exact: what is computed with them
//! stays below 2⁵³, where f64 has every whole number, and nothing is divided but by a common divisor. A sum or product beyond is a
//! function without laws.

use crate::operation::OPERATION;
use crate::term::{Definition, Function, Number, Term, TermId, Terms};
use crate::truth::WITH_INFINITY;
use frit_ir::DType;

/// Whole numbers below this are exact.
pub(crate) const WHOLE: f64 = (1_u64 << 53) as f64;

/// Polynomials of truth values with numbers up to this are those of real numbers.
const SMALL: f64 = 1e3;

/// What a term stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A number, an index or a truth value, which both have.
    Either,
    /// An integer that is made of data.
    Integer,
    /// A real number.
    Real,
}

/// Whether a type has integers other than truth values.
pub(crate) fn is_integer(dtype: DType) -> bool {
    !dtype.is_float() && dtype != DType::Bool
}

impl Terms {
    /// A leaf of this element type.
    pub(crate) fn typed_leaf(&mut self, key: &str, dtype: DType) -> u32 {
        let leaf = self.leaf(key);
        if is_integer(dtype) {
            self.leaf_kinds.insert(leaf, Kind::Integer);
        } else if dtype == DType::Bool {
            self.leaf_kinds.insert(leaf, Kind::Either);
        }
        leaf
    }

    /// Whether a number in a term is too large for an integer.
    pub(crate) fn is_large(&self, id: TermId) -> bool {
        let large = |x: Number| x.value().abs() >= WHOLE;
        match self.get(id) {
            Term::Number(x) => large(*x),
            Term::Sum(parts, constant) => {
                large(*constant) || parts.iter().any(|(t, f)| large(*f) || self.is_large(*t))
            }
            Term::Product(factors) => factors.iter().any(|(t, _)| match self.get(*t) {
                Term::Sum(parts, constant) => {
                    large(*constant) || parts.iter().any(|(_, f)| large(*f))
                }
                _ => false,
            }),
            _ => false,
        }
    }

    /// What a term is, whose parts are known.
    pub(crate) fn kind_of(&self, term: &Term) -> Kind {
        match term {
            Term::Number(_) | Term::Index(_) | Term::NotNegative(_) => Kind::Either,
            Term::Leaf(leaf, _) => self.leaf_kinds.get(leaf).copied().unwrap_or(Kind::Real),
            Term::Defined(definition, _) => match &self.definitions[*definition as usize] {
                Definition::Reduce { body, .. } => self.kind(*body),
                Definition::Opaque { is_integer: true, .. } => Kind::Integer,
                Definition::Opaque { .. } => Kind::Real,
            },
            Term::Sum(parts, _) | Term::Product(parts) => self.kinds(parts.iter().map(|p| p.0)),
            Term::Apply(function, operands) => match function.name {
                "not_negative" | "is_zero" | WITH_INFINITY => Kind::Either,
                "float_of" => Kind::Real,
                "to_integer" | OPERATION => Kind::Integer,
                "select" => self.kinds(operands[1..].iter().copied()),
                _ => match self.kinds(operands.iter().copied()) {
                    Kind::Integer => Kind::Integer,
                    _ => Kind::Real,
                },
            },
        }
    }

    /// What is made of terms.
    pub(crate) fn kinds(&self, terms: impl Iterator<Item = TermId>) -> Kind {
        terms.map(|t| self.kind(t)).max().unwrap_or(Kind::Either)
    }

    /// The number by which a sum is divided without a remainder, if it is one of integers.
    pub(crate) fn common_divisor(
        &self,
        id: TermId,
        parts: &[(TermId, Number)],
        constant: Number,
    ) -> Option<f64> {
        let numbers = || parts.iter().map(|(_, f)| *f).chain([constant]).map(Number::value);
        let largest = numbers().map(f64::abs).fold(0.0, f64::max);
        let is_integer = match self.kind(id) {
            Kind::Integer => true,
            // Of small numbers, quotients differ by more than rounding.
            Kind::Either => !self.truths_of(id).is_polynomial || largest > SMALL,
            Kind::Real => false,
        };
        let is_whole = largest < WHOLE && numbers().all(|x| x.fract() == 0.0);
        let gcd = |a: u64, b: u64| {
            let (mut a, mut b) = (a, b);
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        (is_integer && is_whole).then(|| numbers().map(|x| x.abs() as u64).fold(0, gcd) as f64)
    }

    /// A sum as a function without laws, if a number in it is too large for an integer; `largest` is beyond all of them.
    pub(crate) fn large_sum(
        &mut self,
        parts: &[(TermId, f64)],
        constant: f64,
        largest: f64,
    ) -> Option<TermId> {
        let is_integer = self.kinds(parts.iter().map(|p| p.0)) == Kind::Integer;
        if !is_integer || largest < WHOLE {
            return None;
        }
        let mut parts: Vec<(u64, TermId, f64)> =
            parts.iter().map(|(t, f)| (self.shape_of(*t), *t, *f)).collect();
        parts.sort_unstable_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2)));
        let multiple = |t: &mut Terms, (_, part, factor): (u64, TermId, f64)| match factor {
            1.0 => part,
            _ => {
                let function = Function { name: "times", attributes: [factor.to_bits(), 0] };
                t.term(Term::Apply(function, [part].into()))
            }
        };
        let operands = parts.into_iter().map(|part| multiple(self, part)).collect();
        let function = Function { name: "large_sum", attributes: [constant.to_bits(), 0] };
        Some(self.term(Term::Apply(function, operands)))
    }

    /// A product as a function without laws, if the number in it is too large for an integer.
    pub(crate) fn large_product(
        &mut self,
        factors: &[(TermId, f64)],
        number: f64,
    ) -> Option<TermId> {
        let is_integer = self.kinds(factors.iter().map(|p| p.0)) == Kind::Integer;
        if !is_integer || number.abs() < WHOLE {
            return None;
        }
        let mut operands: Vec<(u64, TermId, u64)> =
            factors.iter().map(|(t, e)| (self.shape_of(*t), *t, e.to_bits())).collect();
        operands.sort_unstable();
        let power = |t: &mut Terms, (_, factor, exponent): (u64, TermId, u64)| {
            let function = Function { name: "to_the", attributes: [exponent, 0] };
            t.term(Term::Apply(function, [factor].into()))
        };
        let operands = operands.into_iter().map(|factor| power(self, factor)).collect();
        let function = Function { name: "large_product", attributes: [0; 2] };
        Some(self.term(Term::Apply(function, operands)))
    }
}
