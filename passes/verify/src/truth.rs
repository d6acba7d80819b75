//! Truth values, which are 0 or 1.

use crate::term::{Number, Term, TermId, Terms};

/// Names a comparison with an infinity.
pub(crate) const WITH_INFINITY: &str = "with_infinity";

impl Terms {
    /// Whether a term is 0 or 1.
    pub(crate) fn is_truth(&self, id: TermId) -> bool {
        self.truths_of(id).is_truth
    }

    /// Whether a factor is 0 or 1, which one over a truth value is not. Positive powers of truth values are written as the first.
    pub(crate) fn is_truth_factor(&self, &(factor, exponent): &(TermId, Number)) -> bool {
        exponent == Number::ONE && self.is_truth(factor)
    }

    /// Whether a factor is a truth, or a polynomial of truths.
    pub(crate) fn is_choice_factor(&self, factor: &(TermId, Number)) -> bool {
        let is_polynomial = factor.1 == Number::ONE && self.truths_of(factor.0).is_polynomial;
        is_polynomial || self.is_truth_factor(factor)
    }

    /// The product of some factors of a product, which is in normal form as that is.
    pub(crate) fn some_of(&mut self, factors: &[(TermId, Number)]) -> TermId {
        match *factors {
            [(term, Number::ONE)] => self.written_out(term),
            _ => self.term(Term::Product(factors.into())),
        }
    }
}

/// Whether a function is 0 or 1.
pub(crate) fn is_truth_function(name: &str) -> bool {
    matches!(name, "not_negative" | "is_zero" | WITH_INFINITY)
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
