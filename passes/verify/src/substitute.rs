//! Substitution of indices for variables. Terms are built again, so they simplify.

use crate::index::{Affine, Atom, Ix, Kind, Var};
use crate::lemmas::{ROUND, extremum, rounded_by};
use crate::operation::OPERATION;
use crate::term::{Function, Term, TermId, Terms};

/// What stands for variables, sorted by variable.
pub(crate) struct Substitution {
    /// Equal pairs have the same, which is found at once however many they are.
    number: u32,
    pairs: Vec<(Var, Ix)>,
}

impl Substitution {
    fn of(&self, var: Var) -> Option<Ix> {
        let found = self.pairs.binary_search_by_key(&var, |(v, _)| *v).ok()?;
        Some(self.pairs[found].1)
    }

    /// Whether something stands for one of these variables.
    fn replaces(&self, vars: &[Var]) -> bool {
        match vars.len() < self.pairs.len() {
            true => vars.iter().any(|v| self.of(*v).is_some()),
            false => self.pairs.iter().any(|(v, _)| vars.binary_search(v).is_ok()),
        }
    }
}

impl Terms {
    /// The element at these indices of a value that is given as a term over its axes, of these sizes.
    pub(crate) fn at(&mut self, term: TermId, sizes: &[usize], at: &[Ix]) -> TermId {
        debug_assert_eq!(sizes.len(), at.len(), "an index along each axis");
        let pairs = sizes.iter().zip(at).enumerate().filter(|(_, (n, _))| **n != 1);
        let pairs = pairs.map(|(k, (&n, &ix))| {
            (Var { kind: Kind::Axis, number: k as u32, extent: n as u64 }, ix)
        });
        let pairs: Vec<(Var, Ix)> = pairs.collect();
        self.substitute(term, pairs)
    }

    pub(crate) fn substitute(&mut self, term: TermId, pairs: Vec<(Var, Ix)>) -> TermId {
        let vars = self.vars_of(term);
        let mut pairs: Vec<(Var, Ix)> = pairs
            .into_iter()
            .filter(|(var, ix)| {
                let same = Affine { atoms: vec![(Atom::Var(*var), 1)], constant: 0 };
                vars.binary_search(var).is_ok() && *self.affine(*ix) != same
            })
            .collect();
        if pairs.is_empty() {
            return term;
        }
        pairs.sort_unstable();
        let next = self.substitutions.len() as u32;
        let number = *self.substitutions.entry(pairs.clone()).or_insert(next);
        self.substituted_term(term, &Substitution { number, pairs })
    }

    fn substituted_term(&mut self, id: TermId, by: &Substitution) -> TermId {
        let found = self.exhausted().or(self.substituted.get(&(id, by.number)).copied());
        if let Some(found) = found {
            return found;
        }
        if !by.replaces(self.vars_of(id)) {
            return id;
        }
        let result = match self.get(id).clone() {
            Term::Number(_) => id,
            Term::Index(ix) => {
                let ix = self.substituted_index(ix, by);
                self.index_term(ix)
            }
            Term::NotNegative(ix) => {
                let ix = self.substituted_index(ix, by);
                self.index_not_negative(ix)
            }
            Term::Leaf(leaf, at) => {
                let at = at.iter().map(|ix| self.substituted_index(*ix, by)).collect();
                self.term(Term::Leaf(leaf, at))
            }
            Term::Defined(definition, at) => {
                let at = at.iter().map(|ix| self.substituted_index(*ix, by)).collect();
                self.defined(definition, at)
            }
            Term::Sum(parts, constant) => {
                let parts: Vec<(TermId, f64)> =
                    parts.iter().map(|(t, f)| (self.substituted_term(*t, by), f.value())).collect();
                self.sum(&parts, constant.value())
            }
            Term::Product(factors) => {
                let factors: Vec<(TermId, f64)> = factors
                    .iter()
                    .map(|(t, e)| (self.substituted_term(*t, by), e.value()))
                    .collect();
                self.product(&factors)
            }
            Term::Apply(function, operands) => {
                let operands: Vec<TermId> =
                    operands.iter().map(|t| self.substituted_term(*t, by)).collect();
                self.applied(function, &operands)
            }
        };
        self.substituted.insert((id, by.number), result);
        result
    }

    /// A function of elements, in its normal form.
    pub(crate) fn applied(&mut self, function: Function, operands: &[TermId]) -> TermId {
        match (function.name, operands) {
            ("exp", &[a]) => self.exp(a),
            ("log", &[a]) => self.log(a),
            ("select", &[c, a, b]) => self.select(c, a, b),
            ("not_negative", &[a]) => self.not_negative(a),
            ("is_zero", &[a]) => self.is_zero(a),
            ("float_of", &[a]) => self.float_of(a),
            ("max" | "min", &[a, b]) => extremum(self, function.name, a, b),
            (ROUND, &[a]) => rounded_by(self, a, function.attributes[0]),
            (OPERATION, _) => self.operation_of(function.attributes[0], operands),
            _ => self.function(function, operands),
        }
    }

    pub(crate) fn substituted_index(&mut self, ix: Ix, by: &Substitution) -> Ix {
        if !by.replaces(self.vars_of_index(ix)) {
            return ix;
        }
        let Affine { atoms, constant } = self.affine(ix).clone();
        let mut sum = self.constant_index(constant);
        for (atom, factor) in atoms {
            let atom = match atom {
                Atom::Var(var) => by.of(var).unwrap_or_else(|| self.atom(atom)),
                Atom::Div(of, n) => {
                    let of = self.substituted_index(of, by);
                    self.div(of, n)
                }
                Atom::Mod(of, n) => {
                    let of = self.substituted_index(of, by);
                    self.modulo(of, n)
                }
                Atom::Data(term) => {
                    let term = self.substituted_term(term, by);
                    self.as_index(term)
                }
            };
            let part = self.times(atom, factor);
            sum = self.plus(sum, part);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::DType;

    /// The sign of a sum and the order of operands follow from hashes of indices, which other indices change.
    #[test]
    fn terms_are_in_normal_form_after_substitution() {
        let mut t = Terms::default();
        let at = t.var(Kind::Axis, 0, 8);
        let var = Var { kind: Kind::Axis, number: 0, extent: 8 };
        let built = |t: &mut Terms, n: usize, ix: Ix| {
            let two = t.constant_index(2);
            let [a, b] = [("a", ix), ("b", two)].map(|(name, ix)| {
                let leaf = t.leaf(&format!("{name}{n}"));
                t.term(Term::Leaf(leaf, [ix].into()))
            });
            let difference = t.sub(a, b);
            let rounded = rounded_by(t, difference, DType::BF16 as u64);
            [rounded, extremum(t, "max", a, b)]
        };
        for n in 0..40 {
            let to = t.constant_index(5);
            let (general, special) = (built(&mut t, n, at), built(&mut t, n, to));
            assert_eq!(general.map(|x| t.substitute(x, vec![(var, to)])), special, "{n}");
        }
    }
}
