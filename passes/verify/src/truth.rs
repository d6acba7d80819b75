//! Truth values, which are 0 or 1, and polynomials of them.

use crate::index::Affine;
use crate::term::{Number, Term, TermId, Terms};
use std::collections::BTreeMap;

/// Names a comparison with an infinity.
pub(crate) const WITH_INFINITY: &str = "with_infinity";

impl Terms {
    /// Whether a term is 0 or 1.
    pub(crate) fn is_truth(&self, id: TermId) -> bool {
        match self.get(id) {
            Term::NotNegative(_) => true,
            Term::Apply(f, _) => matches!(f.name, "not_negative" | "is_zero" | WITH_INFINITY),
            Term::Number(x) => *x == Number::ONE || *x == Number::ZERO,
            Term::Product(factors) => factors.iter().all(|factor| self.is_truth_factor(factor)),
            Term::Sum(parts, Number::ONE) => {
                matches!(&parts[..], [(t, f)] if f.value() == -1.0 && self.is_truth(*t))
            }
            _ => false,
        }
    }

    /// Whether a factor is 0 or 1, which one over a truth value is not. Positive powers of truth values are written as the first.
    pub(crate) fn is_truth_factor(&self, &(factor, exponent): &(TermId, Number)) -> bool {
        exponent == Number::ONE && self.is_truth(factor)
    }

    /// A polynomial of truth values, as their products with factors, and a term, whose product this sum is.
    pub(crate) fn choices(&mut self, id: TermId) -> Option<(Vec<(TermId, f64)>, TermId)> {
        let Term::Sum(parts, constant) = self.get(id).clone() else { return None };
        let (mut polynomial, mut rest, mut of) = (vec![], vec![], None);
        for &(part, factor) in parts.iter() {
            let factor = factor.value();
            let Some((truths, other)) = self.without_truths(part) else {
                rest.push((part, factor));
                continue;
            };
            if *of.get_or_insert(other) != other {
                return None;
            }
            polynomial.push((truths, factor));
        }
        let (size, of) = self.content(of?);
        polynomial.iter_mut().for_each(|(_, factor)| *factor *= size);
        let rest = self.sum(&rest, constant.value());
        let (factor, rest) = self.content(rest);
        if factor != 0.0 {
            polynomial.push((self.constant(1.0), factor));
        }
        (factor == 0.0 || rest == of).then_some((polynomial, of))
    }

    /// The truth values among the factors of a term, and the others; none if there are none.
    fn without_truths(&mut self, id: TermId) -> Option<(TermId, TermId)> {
        if self.is_truth(id) {
            return Some((id, self.constant(1.0)));
        }
        let Term::Product(factors) = self.get(id) else { return None };
        let (truths, others): (Vec<_>, Vec<_>) =
            factors.iter().partition(|f| self.is_truth_factor(f));
        (!truths.is_empty()).then(|| (self.some_of(&truths), self.some_of(&others)))
    }

    /// The product of some factors of a product, which is in normal form as that is.
    pub(crate) fn some_of(&mut self, factors: &[(TermId, Number)]) -> TermId {
        match *factors {
            [(term, Number::ONE)] => self.written_out(term),
            _ => self.term(Term::Product(factors.into())),
        }
    }

    /// Whether a polynomial is 1 − truth.
    pub(crate) fn is_negation(&self, polynomial: &[(TermId, f64)]) -> bool {
        matches!(polynomial, &[(_, -1.0), (one, 1.0)] if self.as_number(one) == Some(1.0))
    }

    /// Leaves out bounds that follow from others: i + 3 ≥ 0 where i ≥ 0.
    pub(crate) fn imply(&self, factors: &mut BTreeMap<TermId, f64>) {
        let bounds: Vec<(TermId, &Affine)> = (factors.keys())
            .filter_map(|t| match self.get(*t) {
                Term::NotNegative(ix) => Some((*t, self.affine(*ix))),
                _ => None,
            })
            .collect();
        let implied: Vec<TermId> = bounds
            .iter()
            .filter(|(_, a)| {
                bounds.iter().any(|(_, b)| a.atoms == b.atoms && a.constant > b.constant)
            })
            .map(|(t, _)| *t)
            .collect();
        implied.iter().for_each(|t| {
            factors.remove(t);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Kind;

    #[test]
    fn what_is_not_chosen_does_not_depend_on_grouping() {
        let mut t = Terms::default();
        let i = t.var(Kind::Axis, 0, 8);
        let [a, b, c] = ["a", "b", "c"].map(|name| {
            let leaf = t.leaf(name);
            t.term(Term::Leaf(leaf, [i].into()))
        });
        let late = t.offset(i, -3);
        let late = t.index_not_negative(late);
        let early = t.not(late);
        // Of factors that are products, and of one that is a sum.
        let sum = t.sum(&[(c, 2.0), (a, -1.0)], 0.0);
        for (x, y) in [(a, b), (sum, b), (b, sum), (sum, sum)] {
            let [chosen, both] = [t.mul(early, x), t.mul(x, y)];
            let [one, other, not] = [t.mul(chosen, y), t.mul(early, both), t.mul(late, both)];
            assert_eq!(one, other);
            assert_eq!(t.add(one, not), both);
            assert_ne!(one, not);
            assert_eq!(t.mul(one, late), t.constant(0.0));
        }
    }
}
