//! Names of large sums and operations, so that what is made of them stays small: in each step of a recurrence it has those of all
//! steps before.

use crate::operation::OPERATION;
use crate::term::{Algebra, Definition, Function, Term, TermId, Terms};

/// A definition that reduces nothing.
pub(crate) const NAME: &str = "name";

/// A sum of more parts has a name where it is a factor or an operand, and an operation of more parts in definitions.
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
        let named = self.name_of(id);
        self.content(named)
    }

    /// The sum that a definition stands for, if it is one of [`Terms::shortened`].
    pub(crate) fn written_out(&mut self, id: TermId) -> TermId {
        let Term::Defined(definition, at) = self.get(id).clone() else { return id };
        match self.definitions[definition as usize] {
            Definition::Reduce { by: NAME, body, .. } if !self.is_operation(body) => {
                self.opened(body, &[], &at).0
            }
            _ => id,
        }
    }

    /// What a part of a definition is in it: of a large operation its name. Elsewhere it stays in sight, as there are indices at which
    /// it is simpler; those of a definition are any.
    pub(crate) fn within_definition(&mut self, id: TermId) -> TermId {
        if self.has_name(id) { self.name_of(id) } else { id }
    }

    /// Whether a term has a name in definitions: a large operation where every bit matters.
    pub(crate) fn has_name(&self, id: TermId) -> bool {
        self.algebra == Algebra::Bits && self.parts_of(id) > LARGE && self.is_operation(id)
    }

    fn is_operation(&self, id: TermId) -> bool {
        matches!(self.get(id), Term::Apply(Function { name: OPERATION, .. }, _))
    }

    fn name_of(&mut self, id: TermId) -> TermId {
        if let Some(named) = self.names.get(&id) {
            return *named;
        }
        let named = self.reduction(NAME, id, &[]);
        self.names.insert(id, named);
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Ix, Kind, Var};
    use crate::reading::{Ranks, Reading};
    use frit_ir::text;

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

    /// c ← c + max(c, c moved by one, or by two in this step) + g of so many steps, of which every bit matters.
    fn unrolled(t: &mut Terms, steps: usize, other: Option<usize>) -> TermId {
        let mut lines = String::new();
        for name in ["c0", "g"] {
            let ty = r#"{"dtype":"f32","shape":[1,5]}"#;
            lines += &format!("%{name}: f32[1, 5] = input {{name = \"{name}\", ty = {ty}}}\n");
        }
        for k in 0..steps {
            let low = if other == Some(k) { 2 } else { 1 };
            lines += &format!(
                "%p{k}: f32[1, {}] = pad %c{k} {{high = [0,0], low = [0,{low}], value = -1.0}}
                 %s{k}: f32[1, 5] = slice %p{k} {{size = [1,5], start = [0,0], step = [1,1]}}
                 %b{k}: f32[2, 5] = concat %c{k}, %s{k} {{axis = 0}}
                 %m{k}: f32[1, 5] = reduce %b{k} {{axes = [0], f = \"max\", keep_dims = true}}
                 %a{k}: f32[1, 5] = add %m{k}, %g
                 %c{}: f32[1, 5] = add %a{k}, %c{k}\n",
                5 + low,
                k + 1
            );
        }
        let text = format!("graph @g world=1 {{\n{lines}return %c{steps} as \"y\"\n}}");
        let graph = text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
        Reading::new(t, &graph, Ranks::ONE).of(graph.outputs[0].value)
    }

    #[test]
    fn each_step_that_reads_elements_beside_others_costs_the_same() {
        let cost = |steps: usize| {
            let mut t = Terms::of(Algebra::Bits);
            unrolled(&mut t, steps, None);
            let arguments = t.definitions.iter().map(|definition| match definition {
                Definition::Reduce { body, .. } => t.vars_of(*body).len(),
                Definition::Opaque { .. } => 0,
            });
            (t.number_of_terms(), arguments.max())
        };
        let (few, many) = (cost(30), cost(60));
        assert!(many.0 < 9 * few.0 / 4, "{few:?} {many:?}");
        assert_eq!(few.1, many.1);
    }

    #[test]
    fn names_of_other_steps_are_others() {
        let mut t = Terms::of(Algebra::Bits);
        let same = unrolled(&mut t, 30, None);
        assert_eq!(unrolled(&mut t, 30, None), same);
        for other in [0, 1, 15, 28, 29] {
            assert_ne!(unrolled(&mut t, 30, Some(other)), same, "{other}");
        }
        assert_ne!(unrolled(&mut t, 29, None), same);
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
