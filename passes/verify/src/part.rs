//! The parts that terms and indices are made of.

use crate::index::{Affine, Atom, Ix, Var};
use crate::term::{Coloring, Number, Term, TermId, Terms, mix};
use rustc_hash::FxHashSet;
use std::rc::Rc;

/// A part of a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Term(TermId),
    Index(Ix),
    Var(Var),
}

impl Terms {
    /// What a part is made of, and a hash of the place of each in it.
    pub(crate) fn parts(&self, of: Part) -> Vec<(Part, u64)> {
        match of {
            Part::Term(id) => self.parts_of_term(self.get(id)),
            Part::Index(ix) => parts_of_index(self.affine(ix)),
            Part::Var(_) => vec![],
        }
    }

    fn parts_of_term(&self, term: &Term) -> Vec<(Part, u64)> {
        let bag = |parts: &[(TermId, Number)]| -> Vec<(Part, u64)> {
            parts.iter().map(|(t, f)| (Part::Term(*t), f.value().to_bits())).collect()
        };
        match term {
            Term::Number(_) => vec![],
            Term::Index(ix) | Term::NotNegative(ix) => vec![(Part::Index(*ix), 0)],
            Term::Leaf(_, at) => {
                (0..).zip(at.iter()).map(|(k, ix)| (Part::Index(*ix), k)).collect()
            }
            Term::Defined(definition, at) => {
                let places = (0..at.len()).map(|k| self.first_exchanged(*definition, k) as u64);
                at.iter().map(|ix| Part::Index(*ix)).zip(places).collect()
            }
            Term::Sum(parts, _) | Term::Product(parts) => bag(parts),
            Term::Apply(_, operands) => operands.iter().map(|t| Part::Term(*t)).zip(0..).collect(),
        }
    }

    /// Variables that occur in a term, sorted.
    pub(crate) fn vars_in_term(&self, term: &Term) -> Rc<[Var]> {
        self.vars_in(self.parts_of_term(term))
    }

    /// Variables that occur in an index, sorted.
    pub(crate) fn vars_in_index(&self, affine: &Affine) -> Rc<[Var]> {
        self.vars_in(parts_of_index(affine))
    }

    fn vars_in(&self, parts: Vec<(Part, u64)>) -> Rc<[Var]> {
        let mut vars: Vec<Var> = vec![];
        // Parts often have the list of those before them, which may be long.
        let mut last = None;
        for (part, _) in parts {
            let list = match part {
                Part::Term(id) => self.vars_of(id),
                Part::Index(ix) => self.vars_of_index(ix),
                Part::Var(var) => {
                    vars.push(var);
                    continue;
                }
            };
            if last.is_none_or(|last| !Rc::ptr_eq(last, list)) {
                vars.extend(list.iter());
                last = Some(list);
            }
        }
        vars.sort_unstable();
        vars.dedup();
        vars.into()
    }

    /// Whether a variable in a part has a color.
    pub(crate) fn has_color(&self, part: Part, colors: &Coloring) -> bool {
        match part {
            Part::Term(id) => self.vars_of(id).iter().any(|v| colors.names(*v)),
            Part::Index(ix) => self.vars_of_index(ix).iter().any(|v| colors.names(*v)),
            Part::Var(var) => colors.names(var),
        }
    }

    /// All parts within one, of those that are asked for: each once, behind the parts that it is made of.
    pub(crate) fn parts_within(&self, part: Part, is_one: impl Fn(Part) -> bool) -> Vec<Part> {
        let (mut found, mut seen) = (vec![], FxHashSet::default());
        self.add_parts(part, &is_one, &mut seen, &mut found);
        found
    }

    fn add_parts(
        &self,
        part: Part,
        is_one: &impl Fn(Part) -> bool,
        seen: &mut FxHashSet<Part>,
        found: &mut Vec<Part>,
    ) {
        if !is_one(part) || !seen.insert(part) {
            return;
        }
        for (inner, _) in self.parts(part) {
            self.add_parts(inner, is_one, seen, found);
        }
        found.push(part);
    }
}

fn parts_of_index(affine: &Affine) -> Vec<(Part, u64)> {
    let part = |&(atom, factor): &(Atom, i64)| {
        let factor = factor as u64;
        match atom {
            Atom::Var(var) => (Part::Var(var), factor),
            Atom::Div(of, n) => (Part::Index(of), mix(mix(factor, n as u64), 1)),
            Atom::Mod(of, n) => (Part::Index(of), mix(mix(factor, n as u64), 2)),
            Atom::Data(term) => (Part::Term(term), factor),
        }
    };
    affine.atoms.iter().map(part).collect()
}
