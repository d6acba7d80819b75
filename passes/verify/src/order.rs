//! The order of a definition's variables, and which of its arguments may be exchanged.

use crate::index::{Ix, Var};
use crate::part::Part;
use crate::term::{Algebra, Coloring, Term, TermId, Terms, mix};
use rustc_hash::FxHashMap;

impl Terms {
    /// The variables of a term in an order that does not depend on their names.
    ///
    /// Those that can be exchanged in the body are ordered by the places that they stand for; of the first of these, which of the two is
    /// the first is given. And whether there are such.
    pub(crate) fn canonical_order(
        &self,
        body: TermId,
        bound: &[Var],
        places: &[(Ix, Var)],
        first: usize,
    ) -> (Vec<Var>, bool) {
        let place = |var: Var| {
            let place = places.iter().find(|(_, v)| *v == var);
            place.map_or(0, |(ix, _)| self.shape_of_index(*ix))
        };
        let mut open: Vec<Var> = self.vars_of(body).to_vec();
        let mut named: Vec<(Var, u64)> = vec![];
        if self.algebra == Algebra::Bits {
            open.retain(|v| !bound.contains(v));
            named = bound.iter().copied().zip(200..).collect();
        }
        let mut tied = false;
        let kind = |v: Var| if bound.contains(&v) { 101 } else { 102 };
        while !open.is_empty() {
            let colors = open.iter().map(|v| (*v, kind(*v))).chain(named.iter().copied());
            let signs = self.signs(body, &Coloring::new(colors));
            let mut ordered: Vec<(u64, u64, Var)> =
                open.iter().map(|v| (signs[v], place(*v), *v)).collect();
            ordered.sort_unstable();
            // Those that nothing else has the sign of; of equal ones the first, which tells the others apart.
            let unique = ordered
                .iter()
                .filter(|(s, ..)| ordered.iter().filter(|(o, ..)| o == s).count() == 1)
                .map(|(.., v)| *v)
                .collect::<Vec<_>>();
            let next = if unique.is_empty() {
                let next = ordered[if tied { 0 } else { first }].2;
                tied = true;
                vec![next]
            } else {
                unique
            };
            for var in next {
                open.retain(|v| *v != var);
                named.push((var, 200 + named.len() as u64));
            }
        }
        (named.into_iter().map(|(v, _)| v).collect(), tied)
    }

    /// A hash of where each variable with a color occurs in a term.
    fn signs(&self, body: TermId, colors: &Coloring) -> FxHashMap<Var, u64> {
        let mut contexts = FxHashMap::from_iter([(Part::Term(body), 1)]);
        let mut signs = FxHashMap::default();
        let within = self.parts_within(Part::Term(body), |part| self.has_color(part, colors));
        for part in within.into_iter().rev() {
            let own = match part {
                Part::Term(id) => self.color(id, colors),
                Part::Index(ix) => self.color_index(ix, colors),
                Part::Var(var) => {
                    signs.insert(var, mix(contexts[&part], colors.of(var)));
                    continue;
                }
            };
            let own = mix(contexts[&part], own);
            for (inner, place) in self.parts(part) {
                let context = contexts.entry(inner).or_default();
                *context = context.wrapping_add(mix(own, place));
            }
        }
        signs
    }

    /// A definition at these arguments, in one order of those that may be exchanged.
    pub(crate) fn defined(&mut self, definition: u32, at: Vec<Ix>) -> TermId {
        let by_shape = |at: &[Ix]| -> Vec<(u64, Ix)> {
            at.iter().map(|ix| (self.shape_of_index(*ix), *ix)).collect()
        };
        let other = self.exchanged(definition, &at).filter(|o| by_shape(o) < by_shape(&at));
        self.term(Term::Defined(definition, other.unwrap_or(at).into()))
    }

    /// The other order of arguments of a definition.
    pub(crate) fn exchanged(&self, definition: u32, at: &[Ix]) -> Option<Vec<Ix>> {
        let order = self.symmetries.get(&definition)?;
        Some(order.iter().map(|k| at[*k]).collect())
    }

    /// The first of the places of a definition's arguments that may be exchanged with this one.
    pub(crate) fn first_exchanged(&self, definition: u32, k: usize) -> usize {
        self.symmetries.get(&definition).map_or(k, |order| k.min(order[k]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Kind;

    /// Σ x[i, k]·y[j, k]
    fn inner(t: &mut Terms, [x, y]: [&str; 2], [i, j]: [Ix; 2]) -> TermId {
        let (k, at) = t.fresh_index(5);
        let [x, y] = [(x, i), (y, j)].map(|(name, ix)| {
            let leaf = t.leaf(name);
            t.term(Term::Leaf(leaf, [ix, at].into()))
        });
        let product = t.mul(x, y);
        t.sum_over(product, k.as_slice())
    }

    #[test]
    fn arguments_are_exchanged_where_nothing_tells_them_apart() {
        let mut t = Terms::default();
        let axes = t.axes(&[6, 6, 3, 20]);
        let even = t.times(axes[2], 2);
        let vars = [0, 1].map(|number| Var { kind: Kind::Axis, number, extent: 6 });
        for (y, same) in [("x", true), ("y", false)] {
            let general = inner(&mut t, ["x", y], [axes[0], axes[1]]);
            let [found, exchanged] = [[even, axes[3]], [axes[3], even]].map(|at| {
                let pairs = vars.into_iter().zip(at).collect();
                let substituted = t.substitute(general, pairs);
                assert_eq!(substituted, inner(&mut t, ["x", y], at));
                substituted
            });
            assert_eq!(found == exchanged, same);
        }
    }
}
