//! Names of large sums, so that what is made of them stays small: in each step of a recurrence it has those of all steps before.

use crate::term::{Definition, Term, TermId, Terms};

/// A definition that reduces nothing.
pub(crate) const NAME: &str = "name";

/// A sum of more parts has a name where it is a factor or an operand.
const LARGE: u32 = 48;

impl Terms {
    /// A number and a term whose product a sum is: itself if it is small, else a definition. Sums with bounds and choices stay in sight:
    /// there are indices at which they are simpler.
    pub(crate) fn shortened(&mut self, id: TermId) -> (f64, TermId) {
        match self.get(id) {
            Term::Sum(parts, _) if self.size_of(id).is_some_and(|size| size > LARGE) => {
                if parts.iter().any(|(part, _)| self.truths_of(*part).has_polynomial) {
                    return (1.0, id);
                }
            }
            _ => return (1.0, id),
        }
        let named = match self.names.get(&id) {
            Some(named) => *named,
            None => {
                let named = self.reduction(NAME, id, &[]);
                self.names.insert(id, named);
                named
            }
        };
        self.content(named)
    }

    /// The sum that a definition stands for, if it is one of [`Terms::shortened`].
    pub(crate) fn written_out(&mut self, id: TermId) -> TermId {
        let Term::Defined(definition, at) = self.get(id).clone() else { return id };
        match self.definitions[definition as usize] {
            Definition::Reduce { by: NAME, body, .. } => self.opened(body, &[], &at).0,
            _ => id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Ix, Kind, Var};

    fn leaf(t: &mut Terms, name: &str, n: usize, at: Ix) -> TermId {
        let leaf = t.leaf(&format!("{name}{n}"));
        t.term(Term::Leaf(leaf, [at].into()))
    }

    /// The last element of a recurrence c ← tanh(c·f + g)·c + g of so many steps.
    fn recurrence(t: &mut Terms, steps: usize, at: Ix) -> TermId {
        let mut c = leaf(t, "c", 0, at);
        for n in 0..steps {
            let [f, g] = ["f", "g"].map(|name| leaf(t, name, n, at));
            let product = t.mul(c, f);
            let inner = t.add(product, g);
            let tanh = t.apply("tanh", &[inner]);
            let product = t.mul(c, tanh);
            c = t.add(product, g);
        }
        c
    }

    #[test]
    fn each_step_of_a_recurrence_costs_the_same() {
        let cost = |steps: usize| {
            let mut t = Terms::default();
            let at = t.var(Kind::Axis, 0, 8);
            let last = recurrence(&mut t, steps, at);
            let before = t.number_of_terms();
            let two = t.constant_index(2);
            t.substitute(last, vec![(Var { kind: Kind::Axis, number: 0, extent: 8 }, two)]);
            (before, t.number_of_terms() - before)
        };
        let (few, many) = (cost(40), cost(80));
        assert!(many.0 < 3 * few.0, "{few:?} {many:?}");
        assert!(many.1 < 40, "an element of the last step has all steps: {many:?}");
    }

    #[test]
    fn named_sums_are_the_same_sums() {
        let mut t = Terms::default();
        let at = t.var(Kind::Axis, 0, 8);
        let (sum, factor) = (recurrence(&mut t, 30, at), leaf(&mut t, "f", 0, at));
        let parts: Vec<_> = (0..60).map(|n| (leaf(&mut t, "h", n, at), 1.0 - n as f64)).collect();
        let large = t.sum(&parts, 0.0);
        for sum in [sum, large] {
            let product = t.mul(sum, factor);
            assert_eq!(t.product(&[(product, 1.0), (factor, -1.0)]), sum);
            assert_eq!(t.product(&[(product, 1.0), (sum, -1.0)]), factor);
            let var = Var { kind: Kind::Axis, number: 0, extent: 8 };
            for n in [0, 3] {
                let n = t.constant_index(n);
                let [found, sum, factor] =
                    [product, sum, factor].map(|x| t.substitute(x, vec![(var, n)]));
                assert_eq!(t.mul(sum, factor), found);
                assert_ne!(found, product);
            }
        }
    }
}
