//! Substitution of indices for variables. Terms are built again, so they simplify.

use crate::index::{Affine, Atom, Ix, Kind, Var};
use crate::operation::OPERATION;
use crate::term::{Function, Substitution, Term, TermId, Terms};

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
        let mut pairs: Vec<(Var, Ix)> = pairs
            .into_iter()
            .filter(|(var, ix)| {
                let same = Affine { atoms: vec![(Atom::Var(*var), 1)], constant: 0 };
                *self.affine(*ix) != same
            })
            .collect();
        pairs.sort_unstable();
        self.substituted_term(term, &pairs.into())
    }

    fn substituted_term(&mut self, id: TermId, by: &Substitution) -> TermId {
        let vars = self.vars_of(id);
        if !by.iter().any(|(v, _)| vars.binary_search(v).is_ok()) {
            return id;
        }
        if let Some(found) =
            self.exhausted().or_else(|| self.substituted.get(&(id, by.clone())).copied())
        {
            return found;
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
        self.substituted.insert((id, by.clone()), result);
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
            (OPERATION, _) => self.operation_of(function.attributes[0], operands),
            _ => self.function(function, operands),
        }
    }

    pub(crate) fn substituted_index(&mut self, ix: Ix, by: &Substitution) -> Ix {
        let vars = self.vars_of_index(ix);
        if !by.iter().any(|(v, _)| vars.binary_search(v).is_ok()) {
            return ix;
        }
        let Affine { atoms, constant } = self.affine(ix).clone();
        let mut sum = self.constant_index(constant);
        for (atom, factor) in atoms {
            let atom = match atom {
                Atom::Var(var) => by
                    .iter()
                    .find(|(v, _)| *v == var)
                    .map_or_else(|| self.atom(atom), |(_, ix)| *ix),
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
